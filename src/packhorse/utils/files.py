"""Atomic files, locks, fingerprints, and the local cache.

The cache folder (``$PACKHORSE_CACHE``, else ``$XDG_CACHE_HOME/packhorse``, else ``~/.cache/packhorse``) can
be deleted at any time. A file appears under its name when it is complete; of several processes that need the
same file, one builds it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
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

from packhorse.errors import ConfigError

logger = getLogger(__name__)

_EDGE = 1 << 16
_STALE_AGE = 3600.0  # seconds
_TRIES = 20
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system without locks


def cache_folder() -> Path:
    """Return the folder of the cache, which need not exist."""
    if folder := os.environ.get("PACKHORSE_CACHE"):
        return Path(folder).expanduser()  # a value from a YAML file may start with ~
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "packhorse"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identifies the state of a file without reading all of it."""

    size: int
    mtime_ns: int
    edges: str

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Fingerprint:
        """Return size, modification time and a hash of the first and last 64 KiB, in under a millisecond."""
        with open(path, "rb", buffering=0) as file:
            stat = os.fstat(file.fileno())
            edges = hashlib.blake2b(os.pread(file.fileno(), _EDGE, 0), digest_size=16)
            edges.update(os.pread(file.fileno(), _EDGE, max(0, stat.st_size - _EDGE)))
        return cls(stat.st_size, stat.st_mtime_ns, edges.hexdigest())

    def key(self, path: str | os.PathLike[str]) -> str:
        """Return a cache key for this state of the file at ``path``."""
        return digest(os.path.realpath(path), str(self.size), str(self.mtime_ns), self.edges)


def build_once(name: str, write: Callable[[IO[bytes]], None]) -> Path:
    """Return the cache file ``name``; ``write`` fills it if it does not exist.

    ``name`` must contain a hash of everything that the content depends on.
    """
    target = cache_folder() / name
    if target.exists():
        return target
    with cache_lock(name):
        if not target.exists():
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                message = f"the cache cannot be written ({error}): set PACKHORSE_CACHE"
                raise ConfigError(message, setting="PACKHORSE_CACHE", path=target.parent) from error
            write_atomic(target, write, to_disk=True)
    return target


def rebuild(name: str, write: Callable[[IO[bytes]], None], damaged: int) -> Path:
    """Replace a cache file whose inode is ``damaged``, unless another process has replaced it already."""
    target = cache_folder() / name
    with cache_lock(name):
        if not target.exists() or target.stat().st_ino == damaged:
            write_atomic(target, write, to_disk=True)
    return target


def write_atomic(target: Path, write: Callable[[IO[bytes]], object], *, to_disk: bool = False) -> None:
    """Write a file that appears under its name when it is complete.

    ``to_disk`` syncs it, for files whose damage would not be noticed.

    Raises:
        OSError: it cannot be written; if the disk is full, the error names the file.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale_files(target)
    fd, temporary = _new_file(target)
    try:
        with contextlib.ExitStack() as stack:
            with os.fdopen(fd, "wb") as file:
                # The lock holds until the last descriptor is closed.
                stack.callback(_close_quietly, os.dup(fd))
                write(file)
                file.flush()
                if to_disk:
                    os.fsync(file.fileno())
            # Rename after closing: a file server or a quota may reject the data when it is closed.
            os.chmod(temporary, 0o644)  # mkstemp makes it private; other users share the data
            os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(target)  # without an errno it would replace the message
        raise


def is_machine_error(error: Exception) -> bool:
    """Return whether an error comes from the system (no permission, full disk), not from a file's content.

    Arrow also raises OSError for a damaged file, but without an errno.
    """
    return isinstance(error, OSError) and error.errno is not None


@contextlib.contextmanager
def cache_lock(name: str) -> Iterator[None]:
    """Lock ``name`` between the processes of this machine; a process that dies releases it.

    If the cache cannot be written there is no lock: work may then be done twice, with the same result.
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


def _remove_stale_files(target: Path) -> None:
    """Remove temporary files of killed processes, but none that a process has locked.

    The age alone is not enough: the clock of a file server may differ.
    """
    for stale in target.parent.glob(f".{escape(target.name)}.*"):
        with contextlib.suppress(OSError):  # removed already, or no permission
            if abs(time.time() - stale.stat().st_mtime) > _STALE_AGE:
                remove_if_idle(stale)


def _new_file(target: Path) -> tuple[int, str]:
    """Create and lock a temporary file next to ``target``; return its descriptor and name.

    A process with a wrong clock may remove it as stale before it is locked; then another one is created.
    """
    for _ in range(_TRIES):
        fd, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            locked = _lock(fd, exclusive=True)
        except OSError as error:  # then other processes cannot lock and remove it either
            logger.debug("no lock for %s (%s)", temporary, error)
            locked = True
        if locked and os.path.exists(temporary):
            return fd, temporary
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    message = f"another process removed {_TRIES} new files; check the clocks of the machines"
    raise OSError(errno.EAGAIN, message, str(target))


def remove_if_idle(path: Path) -> None:
    """Remove a file that no process has locked (see :func:`_new_file`)."""
    with open(path, "rb") as file:
        # Shared: a file server gives no exclusive lock for a file that is open for reading. Removed while
        # locked, so that a process that has just created it notices when it gets the lock.
        if _lock(file.fileno(), exclusive=False):
            path.unlink()


def _lock(fd: int, *, exclusive: bool) -> bool:
    """Lock an open file; return False if another process has locked it. True on systems without locks."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _close_quietly(fd: int) -> None:
    with contextlib.suppress(OSError):  # closing the file has reported errors of writing
        os.close(fd)


def digest(*parts: str) -> str:
    """Return a hash of these texts."""
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
