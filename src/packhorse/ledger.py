"""The ledger: every sample that is not delivered as its file holds it, with the reason.

Recording takes a few microseconds; recording the same entry twice has no effect. Entries of child processes
(DataLoader workers) appear in the parent's ledger.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tempfile
import threading
import uuid
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from packhorse.errors import ConfigError, write_fault
from packhorse.types import Action, Drop, Reason, Stage
from packhorse.utils.files import write_atomic

if TYPE_CHECKING:
    import numpy as np


_COMMON = ("dataset", "stage", "reason", "detail", "action", "epoch")


@dataclass(frozen=True, slots=True, eq=False)
class ManyRows:
    """One reason for many rows of a dataset, as an array."""

    dataset: str
    rows: np.ndarray
    stage: Stage
    reason: Reason
    detail: str
    action: Action
    epoch: int | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def group(self) -> tuple[Any, ...]:
        """The values that all rows of an entry share."""
        return tuple(getattr(self, name) for name in _COMMON)

    def add(self, rows: np.ndarray) -> ManyRows:
        """Return the entry with further rows, each once."""
        import numpy as np

        return replace(self, rows=np.union1d(self.rows, rows))

    def drops(self) -> Iterator[Drop]:
        """Yield an entry for each row."""
        for row in self.rows.tolist():
            key = f"{self.dataset}/{row}"
            yield Drop(key, self.stage, self.reason, self.detail, self.action, self.dataset, self.epoch)

    def to_json(self) -> dict[str, Any]:
        """Return the entry as in a ledger file, the rows as ranges."""
        import numpy as np

        breaks = np.flatnonzero(np.diff(self.rows) != 1) + 1
        firsts = self.rows[np.concatenate([[0], breaks])]
        lasts = self.rows[np.concatenate([breaks - 1, [len(self.rows) - 1]])]
        ranges = np.stack([firsts, lasts + 1], axis=1).tolist()
        return {"rows": ranges, "n": len(self.rows), **{name: getattr(self, name) for name in _COMMON}}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> ManyRows:
        """Read what :meth:`to_json` returned; older files have no epoch."""
        import numpy as np

        rows = np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in entry["rows"]])
        first = Drop.from_json({"key": "", "epoch": None, **entry})
        return cls(rows=rows, **{name: getattr(first, name) for name in _COMMON})


logger = getLogger(__name__)

_row_read: ContextVar[tuple[Ledger, str] | None] = ContextVar("packhorse row", default=None)
GONE: tuple[Action, ...] = ("dropped", "replaced")


class Ledger:
    """Every sample or media item that was dropped, replaced, cut, repaired, or kept with a remark.

    >>> ledger = Ledger()
    >>> ledger.record(Drop("coco/812", "media", "missing_media", "no file images/812.jpg"))
    >>> ledger.counts()
    {'missing_media': 1}

    Copies of a ledger in other processes of the machine (forked or spawned DataLoader workers) share their
    entries.

    Args:
        path: also append each entry to this JSONL file at once, so that a killed run leaves its ledger. An
            existing file is continued; ``Ledger.load(path)`` reads all of it.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        # Absolute, because a worker may start in another folder.
        self.path = Path(path).absolute() if path is not None else None
        self._drops: dict[Drop, int] = {}  # entry -> count; above 1 only without a key
        self._many: dict[tuple[str | int | None, ...], ManyRows] = {}
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self.is_buffering = False  # see buffer
        self._staged: list[Drop] | None = None  # see capture
        self._spool_name = f"packhorse-ledger-{uuid.uuid4().hex}.jsonl"
        self._spool_read = _size(self.path) if self.path is not None else 0
        self._unwritten: list[bytes] = []  # lines that could not be written
        _ledgers.add(self)
        if self.path is None:
            weakref.finalize(self, _remove_if_owner, self._spool_name, self._owner)

    @property
    def _spool(self) -> Path:
        """The file through which processes share entries; a temporary one is created when a child writes."""
        return self.path or Path(tempfile.gettempdir(), self._spool_name)

    def record(self, drop: Drop) -> None:
        """Record one entry; recording it twice has no effect (unless it has no key).

        Raises:
            SystemFault: the file cannot be written. The entry is in memory, and is written with the next one.
        """
        self.record_all((drop,))

    def record_all(self, drops: Iterable[Drop]) -> None:
        """Record many entries with one write."""
        if self._staged is not None:
            self._staged.extend(drops)
            return
        with self._lock:
            new = []
            for drop in drops:
                if drop not in self._drops or not drop.key:
                    self._drops[drop] = self._drops.get(drop, 0) + 1
                    new.append(drop)
            if new and self._is_shared():
                self._append(*map(asdict, new))

    def record_rows(
        self,
        dataset: str,
        rows: np.ndarray,
        *,
        stage: Stage,
        reason: Reason,
        detail: str = "",
        action: Action = "dropped",
        epoch: int | None = None,
    ) -> None:
        """Record one reason for many rows: eight bytes per row in memory, ranges in the file."""
        if len(rows):
            self._record_many(ManyRows(dataset, rows, stage, reason, detail, action, epoch))

    def merge(self, other: Ledger) -> None:
        """Add all entries of another ledger."""
        other._collect()
        self.record_all(drop for drop, times in list(other._drops.items()) for _ in range(times))
        for many in list(other._many.values()):
            self._record_many(many)

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[Drop]]:
        """Collect the entries of the block in a list instead of recording them.

        A batch that is built ahead may never be delivered; its entries are recorded when it is.
        """
        outer, self._staged = self._staged, []
        try:
            yield self._staged
        finally:
            self._staged = outer

    def buffer(self) -> Ledger:
        """Write no entry to the file until :meth:`flush`; return the ledger itself."""
        self.is_buffering = True
        return self

    def flush(self) -> None:
        """Write the buffered entries that are not in the file yet; from now on write at once."""
        if not self.is_buffering:
            return
        saved = self._read_file()
        with self._lock:
            self.is_buffering = False
            new = [
                asdict(drop) for drop, n in self._drops.items() for _ in range(n - saved._drops.get(drop, 0))
            ]
            new += [many.to_json() for many in self._many.values() if saved._add_many(many)]
            if new and self._is_shared():
                self._append(*new)

    def _read_file(self) -> Ledger:
        """Return the entries of the file, without truncated lines."""
        saved = Ledger()
        if self.path is not None and self.path.exists():
            with open(self.path, "rb") as file:
                for line in file:
                    saved._add_line(line)
        return saved

    def restore(self, saved: Ledger) -> None:
        """Add entries that the file has already; nothing is written, none counts twice."""
        with self._lock:
            for drop, times in saved._drops.items():
                self._drops[drop] = max(times, self._drops.get(drop, 0))
            for many in saved._many.values():
                self._add_many(many)

    def roll_back(self, epoch: int, keys: Collection[str]) -> int:
        """Remove the entries of an epoch about these samples, and all of later epochs; return their number.

        Used on resume: samples that failed after the checkpoint are tried once more. The file is replaced
        atomically.
        """

        def is_obsolete(drop: Drop) -> bool:
            if drop.epoch is None:
                return False
            return drop.epoch > epoch or (drop.epoch == epoch and drop.key in keys)

        self._collect()
        saved = self._read_file()
        in_file = {drop for drop in saved._drops if is_obsolete(drop)}
        with self._lock:
            removed = in_file.union(filter(is_obsolete, self._drops))
            for drop in removed:
                self._drops.pop(drop, None)
                saved._drops.pop(drop, None)
            self._unwritten = [line for line in self._unwritten if not _parse_drops(line) & removed]
        if in_file and self.path is not None:
            saved.save(self.path)
            self._spool_read = _size(self.path)
        return len(removed)

    def of_epoch(self, epoch: int, *, alone: bool = False) -> Ledger:
        """Return a ledger with the entries of one epoch and, unless ``alone``, those without an epoch."""
        self._collect()
        wanted = (epoch,) if alone else (None, epoch)
        selected = Ledger()
        selected._drops = {drop: n for drop, n in self._drops.items() if drop.epoch in wanted}
        selected._many = {group: many for group, many in self._many.items() if many.epoch in wanted}
        return selected

    def last_epoch(self) -> int:
        """Return the last epoch of an entry of a single sample; -1 if there is none."""
        self._collect()
        return max((drop.epoch for drop in list(self._drops) if drop.epoch is not None), default=-1)

    def __len__(self) -> int:
        self._collect()
        return sum(self._drops.values()) + sum(map(len, self._many.values()))

    def __iter__(self) -> Iterator[Drop]:
        self._collect()
        for drop, times in list(self._drops.items()):
            yield from itertools.repeat(drop, times)
        for many in list(self._many.values()):
            yield from many.drops()

    def select(
        self, *, reason: str | None = None, dataset: str | None = None, key: str | None = None
    ) -> Iterator[Drop]:
        """Yield the entries with this reason, dataset and row (``coco/812``, its copies included)."""
        for drop in self:
            if (
                reason in (None, drop.reason)
                and dataset in (None, drop.dataset)
                and (key is None or drop.key == key or drop.key.startswith(f"{key}#"))
            ):
                yield drop

    def counts(self, by: Literal["reason", "dataset", "stage", "action"] = "reason") -> dict[str, int]:
        """Return the number of entries by reason (or dataset, stage, action), the most frequent first."""
        self._collect()
        counter: Counter[str] = Counter()
        for drop, times in list(self._drops.items()):
            counter[getattr(drop, by)] += times
        for many in list(self._many.values()):
            counter[getattr(many, by)] += len(many)
        return dict(counter.most_common())

    def samples_by_reason(self, *, gone: bool | None = None) -> dict[str, int]:
        """Return the number of distinct samples by reason, the most frequent first.

        Args:
            gone: only samples that were not delivered (dropped or replaced), or only those that were (cut,
                repaired, kept with a remark, and not lost later in the same epoch); None for both.
        """
        counter: Counter[str] = Counter()
        lost: set[tuple[str, int | None]] = set()
        if gone is False:
            self._collect()
            lost = {(drop.key, drop.epoch) for drop in list(self._drops) if drop.key and drop.action in GONE}
        for (reason, action), count in self._samples(by_reason=True, without=lost).items():
            if gone is None or (action in GONE) == gone:
                counter[reason] += count
        return dict(counter.most_common())

    def lost(self) -> int:
        """Return the number of samples not delivered (dropped or replaced), each once per epoch."""
        return sum(n for (_, action), n in self._samples(by_reason=False).items() if action in GONE)

    def summary(self, total: int | None = None) -> str:
        """Return a line per reason and action: ``missing_media, dropped: 37 of 10,000``.

        Each sample counts once per line.
        """
        of = "" if total is None else f" of {total:,}"
        lines = [f"{r}, {a}: {n:,}{of}" for (r, a), n in self._samples(by_reason=True).most_common()]
        return "\n".join(lines) or "no entries: nothing dropped, replaced, cut or repaired"

    def lines(self) -> Iterator[bytes]:
        """Yield all entries as lines of JSON; entries of many rows are one line with row ranges."""
        self._collect()
        for drop, times in list(self._drops.items()):
            yield entry_line(asdict(drop)) * times
        yield from (entry_line(many.to_json()) for many in list(self._many.values()))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`lines` to a file, atomically."""
        write_atomic(Path(path), lambda file: file.writelines(self.lines()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Ledger:
        """Read a ledger file written by :meth:`save` or by ``Ledger(path)``.

        A line that a crash truncated is skipped with a warning.

        Raises:
            ConfigError: the file has lines, but no entry.
        """
        ledger = cls()
        with open(path, "rb") as file:
            truncated = [number for number, line in enumerate(file, 1) if not ledger._add_line(line)]
        if truncated and not len(ledger):
            raise ConfigError(f"{path}:{truncated[0]}: not a ledger entry", path=path)
        if truncated:
            logger.warning("%s: skipped truncated line(s) %s", path, ", ".join(map(str, truncated)))
        return ledger

    def _samples(
        self, *, by_reason: bool, without: Collection[tuple[str, int | None]] = ()
    ) -> Counter[tuple[str, str]]:
        """Count distinct samples by (reason or nothing, action), except those of ``without``."""
        self._collect()
        seen: set[tuple[str, str, str, int | None]] = set()
        counter: Counter[tuple[str, str]] = Counter()
        for drop, times in list(self._drops.items()):
            sample = (drop.reason if by_reason else "", drop.action, drop.key, drop.epoch)
            if sample not in seen and sample[2:] not in without:
                counter[sample[:2]] += times
                if drop.key:  # entries without a key count each
                    seen.add(sample)
        for many in list(self._many.values()):
            counter[many.reason if by_reason else "", many.action] += len(many)
        return counter

    def _record_many(self, many: ManyRows) -> None:
        with self._lock:
            if self._add_many(many) and self._is_shared():
                self._append(many.to_json())

    def _add_many(self, many: ManyRows) -> bool:
        """Add rows to those with the same reason; return whether any is new."""
        known = self._many.get(many.group)
        total = many if known is None else known.add(many.rows)
        if known is not None and len(total) == len(known):
            return False
        self._many[many.group] = total
        return True

    def _is_shared(self) -> bool:
        return (self.path is not None and not self.is_buffering) or os.getpid() != self._owner

    def _append(self, *entries: dict[str, Any]) -> None:
        """Write entries, and earlier ones that could not be written; raise if they cannot be written."""
        pid, last = os.getpid(), entries[-1]
        self._unwritten += [entry_line({**entry, "pid": pid}) for entry in entries]
        spool, written = self._spool, 0
        try:
            spool.parent.mkdir(parents=True, exist_ok=True)
            # Appending is atomic: lines of several processes do not mix.
            fd = os.open(spool, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(fd).st_size
                # Start a new line if a crash or a full disk has truncated the last one.
                line = b"\n" if size and os.pread(fd, 1, size - 1) != b"\n" else b""
                for waiting in self._unwritten:
                    line += waiting
                    while line:
                        line = line[os.write(fd, line) :]
                    written += 1
            finally:
                os.close(fd)
                del self._unwritten[:written]
        except OSError as error:
            remedy = (
                f"{len(self._unwritten):,} ledger entries are in memory only, the last for "
                f"{last.get('key') or last.get('dataset')} ({last['reason']}): free disk space or choose "
                "another path, and restart from the last checkpoint"
            )
            raise write_fault(error, spool, remedy) from error

    def _collect(self) -> None:
        """Read the entries that other processes have written since the last call."""
        if _size(self._spool) <= self._spool_read:
            return
        pid = os.getpid()
        with self._lock, open(self._spool, "rb") as file:
            file.seek(self._spool_read)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # another process is writing it
                self._spool_read += len(line)
                self._add_line(line, except_from=pid)

    def _add_line(self, line: bytes, except_from: int | None = None) -> bool:
        """Add one line of a file; return False if it is no entry (truncated in a crash)."""
        if not line.strip():
            return True
        try:
            entry = json.loads(line)
            if except_from is not None and entry.get("pid") == except_from:
                return True
            if "rows" in entry:
                self._add_many(ManyRows.from_json(entry))
            else:
                drop = Drop.from_json(entry)
                self._drops[drop] = 1 if drop.key else self._drops.get(drop, 0) + 1
        except (ValueError, TypeError, KeyError, AttributeError):
            return False
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_unwritten")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _unwritten=[])
        _ledgers.add(self)


@contextlib.contextmanager
def reading_row(ledger: Ledger, key: str) -> Iterator[None]:
    """Read one row in the block: remarks on it (:func:`remark`) go to this ledger, under this key."""
    token = _row_read.set((ledger, key))
    try:
        yield
    finally:
        _row_read.reset(token)


def remark(drop: Drop) -> None:
    """Record a remark on the row that is being read, for code that does not know its key (a transform).

    Outside :func:`reading_row` the remark is recorded once, without a key, in the default ledger.
    """
    row = _row_read.get()
    if row is not None:
        row[0].record(replace(drop, key=row[1]))
    elif drop not in _default._drops:
        _default.record(drop)


def read_ledgers(path: str | os.PathLike[str]) -> tuple[Ledger, list[Path]]:
    """Read a ledger file, or all ledger files (``*.jsonl``) of a folder together.

    Other files of the folder are ignored; an entry that several ranks have recorded counts once.

    Returns:
        The ledger, and the files it was read from.

    Raises:
        FileNotFoundError: the path does not exist.
        ConfigError: the file is no ledger, or the folder has none.
    """
    folder = Path(path)
    if not folder.is_dir():
        return Ledger.load(folder), [folder]
    files = [file for file in sorted(folder.glob("*.jsonl")) if file.is_file() and _is_ledger(file)]
    if not files:
        message = f"{path}: no ledger in this folder (files *.jsonl as Ledger.save writes them)"
        raise ConfigError(message, path=path)
    merged = Ledger()
    for file in files:
        merged.merge(Ledger.load(file))
    return merged, files


def _is_ledger(file: Path) -> bool:
    """Return whether the first non-empty line is a ledger entry; empty files go by their name."""
    with open(file, "rb") as lines:
        first = next((line for line in lines if line.strip()), None)
    if first is None:
        return "ledger" in file.name
    try:
        entry = json.loads(first)
    except ValueError:
        return False
    is_entry = isinstance(entry, dict) and entry.keys() >= {"stage", "reason", "action", "dataset"}
    return is_entry and bool({"key", "rows"} & entry.keys())


def default_ledger() -> Ledger:
    """Return the ledger of this process, the default of every ``ledger=``."""
    return _default


def entry_line(entry: dict[str, Any]) -> bytes:
    """Return an entry as a line of a ledger file."""
    # A lone surrogate (a file name that is not UTF-8) becomes its JSON escape.
    return (json.dumps(entry, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _parse_drops(line: bytes) -> set[Drop]:
    """Return the entry of a line; empty if the line is about many rows."""
    parsed = Ledger()
    parsed._add_line(line)
    return set(parsed._drops)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):  # writing raises the error
        return 0


def _remove_if_owner(name: str, owner: int) -> None:
    if os.getpid() == owner:
        Path(tempfile.gettempdir(), name).unlink(missing_ok=True)


def _new_locks() -> None:
    # A fork may copy a lock that another thread of the parent holds, which would never be released.
    for ledger in list(_ledgers):
        ledger._lock = threading.Lock()
        ledger._unwritten = []  # the parent writes them


_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()
os.register_at_fork(after_in_child=_new_locks)
_default = Ledger()
