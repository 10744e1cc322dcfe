"""The ledger: where every sample that is not delivered as its file holds it is named, with the reason.

Recording costs a few microseconds. The same fact recorded twice (a second epoch, a retry) stays one entry.
Entries made in child processes (DataLoader workers) arrive in the parent's ledger by themselves.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import uuid
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from packhorse.errors import ConfigError
from packhorse.types import Action, Drop, Reason, Stage

if TYPE_CHECKING:
    import numpy as np

_DROP_FIELDS = tuple(f.name for f in fields(Drop))


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
            key = f"{self.dataset}/{row}"
            yield Drop(key, self.stage, self.reason, self.detail, self.action, self.dataset)

    def to_json(self) -> dict[str, Any]:
        import numpy as np

        breaks = np.flatnonzero(np.diff(self.rows) != 1) + 1
        firsts = self.rows[np.concatenate([[0], breaks])]
        lasts = self.rows[np.concatenate([breaks - 1, [len(self.rows) - 1]])]
        ranges = np.stack([firsts, lasts + 1], axis=1).tolist()
        names = ("dataset", "stage", "reason", "detail", "action")
        return {"rows": ranges, "n": len(self.rows), **{name: getattr(self, name) for name in names}}


class Ledger:
    """Every sample or medium that was left out, replaced, cut, repaired, or kept with a remark.

    >>> ledger = Ledger()
    >>> ledger.record(Drop("coco/812", "media", "missing_media", "no file images/812.jpg"))
    >>> ledger.counts()
    {'missing_media': 1}

    Copies of a ledger in child processes on the same machine (forked or spawned DataLoader workers) report
    to the ledger they were copied from: its counts and entries include theirs.

    Args:
        path: also append each entry to this JSONL file as it happens, so that a killed run leaves its ledger
            behind. An existing file is continued; ``Ledger.load(path)`` reads all of it.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        # Absolute: a worker may start in another folder.
        self.path = Path(path).absolute() if path is not None else None
        self._drops: dict[Drop, None] = {}
        self._many: list[_ManyRows] = []
        self._lock = threading.Lock()
        self._owner = os.getpid()
        # Where child processes leave their entries. The temporary one comes into being when a child writes.
        self._spool = self.path or Path(tempfile.gettempdir(), f"packhorse-ledger-{uuid.uuid4().hex}.jsonl")
        self._spool_read = _size(self._spool)
        if self.path is None:
            weakref.finalize(self, _remove_if_owner, self._spool, self._owner)

    def record(self, drop: Drop) -> None:
        """Write one entry; the same entry a second time changes nothing."""
        with self._lock:
            if drop not in self._drops:
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
        if len(rows):
            self._record_many(_ManyRows(dataset, rows, stage, reason, detail, action))

    def merge(self, other: Ledger) -> None:
        """Add everything another ledger holds (another rank's, another stage's)."""
        other._collect()
        for drop in list(other._drops):
            self.record(drop)
        for many in list(other._many):
            self._record_many(many)

    def __len__(self) -> int:
        self._collect()
        return len(self._drops) + sum(map(len, self._many))

    def __iter__(self) -> Iterator[Drop]:
        self._collect()
        yield from list(self._drops)
        for many in list(self._many):
            yield from many.drops()

    def counts(self, by: Literal["reason", "dataset", "stage", "action"] = "reason") -> dict[str, int]:
        """How many entries there are by reason (or by dataset, stage, action), the most frequent first."""
        self._collect()
        counter: Counter[str] = Counter(getattr(drop, by) for drop in list(self._drops))
        for many in list(self._many):
            counter[getattr(many, by)] += len(many)
        return dict(counter.most_common())

    def lost(self) -> int:
        """How many samples were not delivered (left out or replaced), each counted once per epoch."""
        self._collect()
        gone = ("left_out", "replaced")
        samples = {(drop.key, drop.epoch) for drop in list(self._drops) if drop.action in gone}
        return len(samples) + sum(len(many) for many in list(self._many) if many.action in gone)

    def summary(self, total: int | None = None) -> str:
        """A line per reason and action, ready to print: ``missing_media, left_out: 37 of 10,000``.

        Samples are counted, each once per line, however many entries it has for that reason.
        """
        self._collect()
        samples = {(drop.reason, drop.action, drop.key, drop.epoch) for drop in list(self._drops)}
        counter = Counter((reason, action) for reason, action, *_ in samples)
        for many in list(self._many):
            counter[many.reason, many.action] += len(many)
        of = "" if total is None else f" of {total:,}"
        lines = [f"{r}, {a}: {n:,}{of}" for (r, a), n in counter.most_common()]
        return "\n".join(lines) or "nothing left out, replaced, cut or repaired"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole ledger as JSONL (entries of many rows as one line with row ranges), atomically."""
        self._collect()
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(fd, "wb") as file:
                file.writelines(_line(asdict(drop)) for drop in list(self._drops))
                file.writelines(_line(many.to_json()) for many in list(self._many))
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
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    ledger._add(json.loads(line))
                except (ValueError, TypeError, KeyError) as error:
                    raise ConfigError(f"{path}:{number}: not a ledger entry ({error})") from error
        return ledger

    def _record_many(self, many: _ManyRows) -> None:
        with self._lock:
            self._many.append(many)
            self._append(many.to_json())

    def _append(self, entry: dict[str, Any]) -> None:
        pid = os.getpid()
        if self.path is None and pid == self._owner:
            return
        self._spool.parent.mkdir(parents=True, exist_ok=True)
        # One write to a file opened for appending: lines of several processes do not mix.
        fd = os.open(self._spool, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, _line({**entry, "pid": pid}))
        finally:
            os.close(fd)

    def _collect(self) -> None:
        """Take in what child processes have written since the last look; one stat when there is none."""
        if os.getpid() != self._owner or _size(self._spool) <= self._spool_read:
            return
        with self._lock, open(self._spool, "rb") as file:
            file.seek(self._spool_read)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # a child is writing it right now
                self._spool_read += len(line)
                entry = json.loads(line)
                if entry.get("pid") != self._owner:
                    self._add(entry)

    def _add(self, entry: dict[str, Any]) -> None:
        if "rows" not in entry:
            self._drops[Drop(**{name: entry[name] for name in _DROP_FIELDS})] = None
            return
        import numpy as np

        rows = np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in entry["rows"]])
        names = ("stage", "reason", "detail", "action")
        self._many.append(_ManyRows(entry["dataset"], rows, *(entry[name] for name in names)))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())


def default_ledger() -> Ledger:
    """The ledger of this process, which calls without a ``ledger=`` of their own write to."""
    return _default


def _line(entry: dict[str, Any]) -> bytes:
    # A lone surrogate (a file name that is not UTF-8) becomes its JSON escape.
    return (json.dumps(entry, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _remove_if_owner(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        path.unlink(missing_ok=True)


_default = Ledger()
