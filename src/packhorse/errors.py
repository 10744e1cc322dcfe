"""What can go wrong, and the ledger in which every loss is written.

An error says what was found, what was expected and what to do. A sample that is not delivered as its file
holds it becomes a :class:`~packhorse.types.Drop` in a :class:`Ledger`; recording costs about a microsecond,
and the same fact recorded twice (a second epoch, a retry) stays one entry.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from packhorse.types import Action, Drop, Reason, Stage

if TYPE_CHECKING:
    import numpy as np


class PackhorseError(Exception):
    """Every error that Packhorse raises on purpose."""


class ConfigError(PackhorseError, ValueError):
    """The caller asked for something that cannot be done; no sample is at fault."""


class MissingDependency(PackhorseError, ImportError):
    """An optional package is not installed; the message holds the line that installs it."""


class BadSample(PackhorseError, ValueError):
    """One sample cannot be used. A policy above decides whether it is left out, replaced, or fatal.

    Args:
        detail: what was found and what was expected.
        reason: the word under which the ledger counts it.
        key: the row's key (``coco/812``), empty where the raiser does not know it.
        stage: the stage that noticed.
    """

    def __init__(
        self, detail: str, *, reason: Reason = "sample_failed", key: str = "", stage: Stage = "read"
    ) -> None:
        super().__init__(f"{key}: {detail}" if key else detail)
        self.detail, self.reason, self.key, self.stage = detail, reason, key, stage

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel from DataLoader workers to the parent; keyword arguments need telling.
        return _rebuild_bad_sample, (self.detail, self.reason, self.key, self.stage)

    def as_drop(self, *, key: str = "", dataset: str = "", action: Action = "left_out") -> Drop:
        """The ledger entry for this error."""
        return Drop(self.key or key, self.stage, self.reason, self.detail, action, dataset)


def _rebuild_bad_sample(detail: str, reason: Reason, key: str, stage: Stage) -> BadSample:
    return BadSample(detail, reason=reason, key=key, stage=stage)


# What a broken sample makes a dataset, a decoder or a processor raise. Everything else (NameError, TypeError,
# AttributeError, ImportError, …) is a mistake in a program: no other sample would do better.
_DATA_ERRORS = (OSError, ValueError, LookupError, EOFError, RuntimeError)
_NOT_DATA_ERRORS = (NotImplementedError, RecursionError, ConfigError)


def is_data_error(error: BaseException) -> bool:
    """Whether ``error`` can be the fault of one sample, so that another sample may be tried instead."""
    return isinstance(error, _DATA_ERRORS) and not isinstance(error, _NOT_DATA_ERRORS)


def require(module: str, extra: str) -> ModuleType:
    """Import an optional package, or say which line installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"this needs the package '{module.partition('.')[0]}': pip install 'packhorse[{extra}]'"
        ) from error


@dataclass(frozen=True, slots=True, eq=False)
class _ManyRows:
    """One reason for many rows of a dataset, kept as an array so that five million rows stay one entry."""

    dataset: str
    rows: np.ndarray
    stage: Stage
    reason: Reason
    detail: str
    action: Action

    def __len__(self) -> int:
        return len(self.rows)

    def drops(self) -> Iterator[Drop]:
        for row in self.rows.tolist():
            yield Drop(
                f"{self.dataset}/{row}", self.stage, self.reason, self.detail, self.action, self.dataset
            )

    def to_json(self) -> dict[str, Any]:
        import numpy as np

        breaks = np.flatnonzero(np.diff(self.rows) != 1) + 1
        firsts = self.rows[np.concatenate([[0], breaks])]
        lasts = self.rows[np.concatenate([breaks - 1, [len(self.rows) - 1]])]
        ranges = np.stack([firsts, lasts + 1], axis=1).tolist()
        names = ("dataset", "stage", "reason", "detail", "action")
        return {"rows": ranges, "n": len(self.rows), **{name: getattr(self, name) for name in names}}


_DROP_FIELDS = frozenset(f.name for f in fields(Drop))


class Ledger:
    """Every sample or medium that was left out, replaced, cut, repaired, or kept with a remark.

    >>> ledger = Ledger()
    >>> ledger.record(Drop("coco/812", "media", "missing_media", "no file images/812.jpg"))
    >>> ledger.counts()
    {'missing_media': 1}

    Args:
        path: also append each entry to this JSONL file as it happens. All processes that hold a copy of the
            ledger (DataLoader workers, forked or spawned) append to the same file; ``Ledger.load(path)`` then
            sees them all, whereas iterating shows what this process recorded.

    Recording is thread-safe. An entry equal to an earlier one is kept once.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        # Absolute: a worker may start in another folder.
        self.path = Path(path).absolute() if path is not None else None
        self._drops: dict[Drop, None] = {}
        self._many: list[_ManyRows] = []
        self._lock = threading.Lock()

    def record(self, drop: Drop) -> None:
        """Write one entry; the same entry a second time changes nothing."""
        with self._lock:
            if drop in self._drops:
                return
            self._drops[drop] = None
            self._append(asdict(drop))

    def record_rows(
        self,
        dataset: str,
        rows: np.ndarray,
        *,
        stage: Stage,
        reason: Reason,
        detail: str = "",
        action: Action = "left_out",
    ) -> None:
        """Write one reason for many rows at once: eight bytes a row in memory, ranges in the file."""
        if len(rows) == 0:
            return
        many = _ManyRows(dataset, rows, stage, reason, detail, action)
        with self._lock:
            self._many.append(many)
            self._append(many.to_json())

    def merge(self, other: Ledger) -> None:
        """Add everything another ledger holds (another rank's, another stage's)."""
        for drop in list(other._drops):
            self.record(drop)
        for many in list(other._many):
            with self._lock:
                self._many.append(many)
                self._append(many.to_json())

    def __len__(self) -> int:
        return len(self._drops) + sum(map(len, self._many))

    def __iter__(self) -> Iterator[Drop]:
        yield from list(self._drops)
        for many in list(self._many):
            yield from many.drops()

    def counts(self, by: Literal["reason", "dataset", "stage", "action"] = "reason") -> dict[str, int]:
        """How many entries there are by reason (or by dataset, stage, action), the most frequent first."""
        counter = Counter(getattr(drop, by) for drop in list(self._drops))
        for many in list(self._many):
            counter[getattr(many, by)] += len(many)
        return dict(counter.most_common())

    def lost(self) -> int:
        """How many samples were not delivered (left out or replaced); the others were, if changed."""
        by_action = self.counts("action")
        return by_action.get("left_out", 0) + by_action.get("replaced", 0)

    def summary(self, total: int | None = None) -> str:
        """A line per reason and action, ready to print: ``missing_media, left_out: 37 of 10,000``."""
        counter: Counter[tuple[str, str]] = Counter((d.reason, d.action) for d in list(self._drops))
        for many in list(self._many):
            counter[many.reason, many.action] += len(many)
        if not counter:
            return "nothing left out, replaced, cut or repaired"
        of = "" if total is None else f" of {total:,}"
        return "\n".join(f"{r}, {a}: {n:,}{of}" for (r, a), n in counter.most_common())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole ledger as JSONL (entries of many rows as one line with row ranges), atomically."""
        lines: Iterable[dict[str, Any]] = [asdict(drop) for drop in list(self._drops)]
        target = Path(path)
        fd, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
                for line in (*lines, *(many.to_json() for many in list(self._many))):
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Ledger:
        """Read a ledger file written by :meth:`save` or by ``Ledger(path)``.

        A last line without its newline was cut off by a crash in mid-write and is passed over.
        """
        ledger = cls()
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith("\n"):
                    break
                try:
                    ledger._load_entry(json.loads(line))
                except (ValueError, TypeError, KeyError) as error:
                    raise ConfigError(f"{path}:{number}: not a ledger entry ({error})") from error
        return ledger

    def _load_entry(self, entry: dict[str, Any]) -> None:
        if "rows" not in entry:
            self.record(Drop(**{name: entry[name] for name in _DROP_FIELDS if name in entry}))
            return
        import numpy as np

        ranges: Sequence[tuple[int, int]] = entry["rows"]
        rows = np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in ranges])
        self.record_rows(
            entry["dataset"],
            rows,
            stage=entry["stage"],
            reason=entry["reason"],
            detail=entry["detail"],
            action=entry["action"],
        )

    def _append(self, entry: dict[str, Any]) -> None:
        if self.path is None:
            return
        # One write to a file opened for appending: lines of several processes do not mix.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, (json.dumps(entry, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
        finally:
            os.close(fd)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_drops": dict(self._drops), "_many": list(self._many)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())


_default = Ledger()


def default_ledger() -> Ledger:
    """The ledger of this process, which calls without a ``ledger=`` of their own write to."""
    return _default
