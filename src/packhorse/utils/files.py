"""The local cache: addresses fetched, archives unpacked, indexes kept, each built once per machine.

Everything lies under one folder (``$PACKHORSE_CACHE``, else ``$XDG_CACHE_HOME/packhorse``, else
``~/.cache/packhorse``) and can be deleted at any time. A file appears under its name only when it is whole;
processes that want the same file at the same time wait for the first one to make it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from glob import escape
from logging import getLogger
from pathlib import Path
from typing import IO

from filelock import FileLock

from packhorse.errors import FULL_DISK, ConfigError

logger = getLogger(__name__)

_EDGE = 1 << 16
_PIECE = 1 << 22
_LEAVINGS_AGE = 3600.0
_TRIES = 20
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # then the age of a file has to tell
_STATE = ("size", "mtime", "created", "LastModified", "last_modified", "ETag", "etag", "checksum", "sha")


def cache_folder() -> Path:
    """The folder of the cache; nothing is created."""
    if folder := os.environ.get("PACKHORSE_CACHE"):
        return Path(folder).expanduser()  # a YAML file, say, does not do it
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "packhorse"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells one state of a file from another without reading all of it."""

    size: int
    mtime_ns: int
    edges: str

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Fingerprint:
        """Size, time of change and a hash of the first and last 64 KiB: under a millisecond."""
        with open(path, "rb", buffering=0) as file:
            stat = os.fstat(file.fileno())
            edges = hashlib.blake2b(os.pread(file.fileno(), _EDGE, 0), digest_size=16)
            edges.update(os.pread(file.fileno(), _EDGE, max(0, stat.st_size - _EDGE)))
        return cls(stat.st_size, stat.st_mtime_ns, edges.hexdigest())

    def key(self, path: str | os.PathLike[str]) -> str:
        """A name for what is made from this state of the file at ``path``."""
        return digest(os.path.realpath(path), str(self.size), str(self.mtime_ns), self.edges)


def build_once(name: str, write: Callable[[IO[bytes]], None]) -> Path:
    """The file ``name`` of the cache; if it is not there, ``write`` fills it first.

    ``name`` must say what the content depends on (a hash of it). Of several processes one writes.
    """
    target = cache_folder() / name
    if target.exists():
        return target
    with cache_lock(name):
        if not target.exists():
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"the cache cannot be written ({error}): set PACKHORSE_CACHE") from error
            write_atomic(target, write, to_disk=True)
    return target


def rebuild(name: str, write: Callable[[IO[bytes]], None], damaged: int) -> Path:
    """As :func:`build_once`, where the file is there but is not what was written.

    Args:
        name: as for :func:`build_once`.
        write: likewise.
        damaged: the inode of that file; if another process has replaced it by now, the new one is taken.
    """
    target = cache_folder() / name
    with cache_lock(name):
        if not target.exists() or target.stat().st_ino == damaged:
            write_atomic(target, write, to_disk=True)
    return target


def write_atomic(target: Path, write: Callable[[IO[bytes]], None], *, to_disk: bool = False) -> None:
    """Write a file so that it is seen under its name only when it is complete.

    ``to_disk`` waits until it is safe from a power cut; for files whose damage nobody would notice.

    Raises:
        OSError: it cannot be written; where the disk is full, it names the file.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leavings(target)
    fd, temporary = _new_file(target)
    try:
        with contextlib.ExitStack() as stack:
            with os.fdopen(fd, "wb") as file:
                # The lock holds until the last descriptor is closed.
                stack.callback(_let_go, os.dup(fd))
                write(file)
                file.flush()
                if to_disk:
                    os.fsync(file.fileno())
            # Closed before it gets its name: a file server or a quota may refuse what was written only then.
            os.chmod(temporary, 0o644)  # mkstemp makes it private; other users share the data
            os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno in FULL_DISK and error.filename is None:
            error.filename = str(target)
        raise


def is_machine_error(error: Exception) -> bool:
    """Whether an error is the system's own (no rights, no room), and tells nothing of what a file holds.

    Arrow says OSError of a file whose inside is wrong, too, but then without the system's number.
    """
    return isinstance(error, OSError) and error.errno is not None


@contextlib.contextmanager
def cache_lock(name: str) -> Iterator[None]:
    """Only one process of this machine is inside for a given ``name``. Lets go when the process dies.

    Where the cache cannot be written there is no lock: work may then be done twice, never wrongly.
    """
    lock = FileLock(cache_folder() / "locks" / f"{digest(name)}.lock")
    try:
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        logger.debug("no lock for %s (%s)", name, error)
    try:
        yield
    finally:
        lock.release()


def _remove_leavings(target: Path) -> None:
    """Remove what a killed process left of an earlier attempt.

    Not what another process is writing now. Its age alone does not tell: a clock that jumps, or that of a
    file server, makes a new file look old (or an old one new).
    """
    for leaving in target.parent.glob(f".{escape(target.name)}.*"):
        with contextlib.suppress(OSError):  # gone already, or not ours to remove
            if abs(time.time() - leaving.stat().st_mtime) > _LEAVINGS_AGE:
                remove_if_idle(leaving)


def _new_file(target: Path) -> tuple[int, str]:
    """An empty file beside ``target``, open for writing and locked while it is: its descriptor and its name.

    Somebody whose clock is wrong may take it for a leaving in the moment before it is locked: then this makes
    another one. A killed process lets go of the lock.
    """
    for _ in range(_TRIES):
        fd, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            ours = _lock(fd, exclusive=True)
        except OSError as error:  # those who cannot ask for the lock remove nothing either
            logger.debug("no lock for %s (%s)", temporary, error)
            ours = True
        if ours and os.path.exists(temporary):
            return fd, temporary
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    told = f"{_TRIES} new files were removed at once by another process; is its clock wrong?"
    raise OSError(errno.EAGAIN, told, str(target))


def remove_if_idle(path: Path) -> None:
    """Remove a file that no process has locked (see :func:`_new_file`)."""
    with open(path, "rb") as file:
        # Shared: a file server gives no exclusive lock for a file that is open for reading. And it is removed
        # with the lock in hand: who has just made it, and locks it next, sees that it is gone.
        if _lock(file.fileno(), exclusive=False):
            path.unlink()


def _lock(fd: int, *, exclusive: bool) -> bool:
    """Lock an open file; False if another process has it. On a file system without locks everybody may.

    Raises:
        OSError: it cannot be said.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _let_go(fd: int) -> None:
    with contextlib.suppress(OSError):  # all that was written is there: told when the file was closed
        os.close(fd)


def digest(*parts: str) -> str:
    """A short name for these texts together."""
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
