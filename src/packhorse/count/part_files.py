"""What the counting pass does on disk: parts are kept, opened, looked at, and removed."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import IO, Any

from packhorse.count.columns import OK
from packhorse.count.sidecar import CHECK, Sidecar, as_damage, batch_digest, open_batches
from packhorse.errors import FULL_DISK, SystemFault
from packhorse.utils.files import remove_if_idle, write_atomic

logger = getLogger("packhorse.datasets")

_TICK = 2_000_000_000  # nanoseconds that every file system can tell apart
_NOT_OURS_TO_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS)

# Reasons that are the same in whatever folder media are looked for.
_OF_THE_ROW = (
    OK,
    "malformed_row",
    "row_too_large",
    "wrong_format",
    "empty_conversation",
    "no_assistant_turn",
    "unknown_role",
    "surplus_placeholder",
)


def may_write(folder: Path) -> bool:
    """Make a folder for parts; False where that is not allowed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno not in _NOT_OURS_TO_WRITE:
            raise _fault(error, folder) from error
        logger.info("%s cannot be written (%s)", folder.parent, error.strerror)
        return False
    return os.access(folder, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def save_part(path: Path, data: bytes, newer_than: Iterable[Path] = ()) -> None:
    """Write a part, whole or not at all.

    Args:
        path: its file.
        data: what it holds.
        newer_than: count files that it belongs after, whatever the clock says (see :func:`older_than`).

    Raises:
        SystemFault: that cannot be done.
    """

    def write(file: IO[bytes]) -> None:
        file.write(data)
        file.flush()
        mark_newest(file.fileno(), newer_than)  # before it is seen under its name

    try:
        with report_full_disk(path):
            with contextlib.suppress(FileNotFoundError):
                return write_atomic(path, write)
            write_atomic(path, write)  # another process has just removed the folder, as it was empty
    except FileNotFoundError as error:
        raise _fault(error, path) from error


@dataclass
class Part:
    """A counted part that lies in a file of its own, or in a sidecar; looked through once.

    Attributes:
        name: the digest of its bytes in the data file.
        home: the file, or the open sidecar and its number there.
    """

    name: str
    home: Path | tuple[Sidecar, int]
    _check: str | None = None

    def batch(self) -> Any:
        """Its record batch.

        Raises:
            OSError: it cannot be read.
            ConfigError: (a ``ValueError``) it is damaged.
        """
        if not isinstance(self.home, Path):
            sidecar, number = self.home
            return sidecar.part(number)
        batch, check = _opened(self.home, look=self._check is None)
        self._check = self._check or check
        return batch

    def check(self) -> str:
        """The digest of its counts; raises as :meth:`batch`."""
        if not isinstance(self.home, Path):
            sidecar, number = self.home
            return str(sidecar.about["checks"][number])
        if self._check is None:
            self.batch()
        return str(self._check)

    def is_gone(self) -> bool:
        """Whether its file was removed."""
        return isinstance(self.home, Path) and not self.home.exists()

    def is_whole(self) -> bool:
        """Whether it can be reused."""
        try:
            self.batch()
        except (OSError, ValueError):
            return False
        return True


def _opened(path: Path, *, look: bool) -> tuple[Any, str]:
    """The record batch of a part, and the digest of its counts.

    Not looked through a second time: the sidecar that it goes into is, when it is there.
    """
    import pyarrow as pa

    reader = open_batches(str(path))
    try:
        batch = reader.get_batch(0)
        check = (reader.schema.metadata or {}).get(CHECK, b"").decode()
        if look and check != batch_digest(batch):
            raise ValueError("its counts are not those that were written")
    except (pa.ArrowException, ValueError, OSError) as error:
        raise as_damage(error, str(path)) from error
    return batch, check


def is_bad(batch: Any) -> bool:
    """Whether any row of a part could not be counted."""
    return any(status != OK for status in batch.column("status").unique().to_pylist())


def has_unreachable(batches: Iterable[Any]) -> bool:
    """Whether a media item of any row could not be reached: the counts hold for one run only."""
    return any("unreachable_media" in batch.column("status").unique().to_pylist() for batch in batches)


def needs_no_media(batch: Any) -> bool:
    """Whether no row of a part has, or failed for, any media."""
    import pyarrow.compute as pc

    media = sum(pc.sum(batch.column(name)).as_py() or 0 for name in ("images", "videos", "audios"))
    return not media and set(batch.column("status").unique().to_pylist()) <= set(_OF_THE_ROW)


def has_bad(sidecar: Sidecar) -> bool:
    """Whether any row of a file could not be counted."""
    return any(map(is_bad, sidecar.batches()))


@contextlib.contextmanager
def report_full_disk(path: Path) -> Iterator[None]:
    """Writing inside: says in plain words what went wrong; a part that is gone is the caller's to handle."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _fault(error, path) from error


def _fault(error: OSError, path: Path) -> SystemFault:
    why = FULL_DISK.get(error.errno or 0, error.strerror or str(error))
    cure = "make room and count again" if error.errno in FULL_DISK else "count again"
    return SystemFault(
        f"{path} cannot be written: {why}. No count file is incomplete; {cure} (what is finished is kept)"
    )


def mark_newest(path: Path | int, others: Iterable[Path]) -> None:
    """Make a file (or an open one, by its descriptor) newer than others, though clocks are set back.

    Of several count files the newest holds; parts are somebody's at work while they are newer than it.
    """
    made = os.stat(path).st_mtime_ns
    for other in others:
        with contextlib.suppress(FileNotFoundError):
            if other != path and (last := other.stat().st_mtime_ns) >= made:
                made = last + _TICK
                os.utime(path, ns=(made, made))


def older_than(mtime_ns: int, paths: Iterable[Path]) -> Iterator[Path]:
    """Those that were there before."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime_ns <= mtime_ns:
                yield path


def remove_stale_files(folder: Path, mtime_ns: int) -> None:
    """Remove what killed processes had begun to write in a folder of parts before that time.

    Without it the folder could not be removed. What a process is writing now is locked, and stays.
    """
    for leaving in older_than(mtime_ns, folder.glob(".*.arrow.*")):
        with contextlib.suppress(OSError):  # gone already, or not ours to remove
            remove_if_idle(leaving)


def remove_files(paths: Iterable[Path]) -> None:
    """Remove those that are there and may be removed."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
