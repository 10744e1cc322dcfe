"""The local cache: addresses fetched, archives unpacked, indexes kept, each built once per machine.

Everything lies under one folder (``$PACKHORSE_CACHE``, else ``$XDG_CACHE_HOME/packhorse``, else
``~/.cache/packhorse``) and can be deleted at any time. A file appears under its name only when it is whole;
processes that want the same file at the same time wait for the first one to make it.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import IO

from filelock import FileLock

from packhorse.errors import ConfigError

logger = getLogger(__name__)

_EDGE = 1 << 16


def cache_folder() -> Path:
    """The folder of the cache; nothing is created."""
    if folder := os.environ.get("PACKHORSE_CACHE"):
        return Path(folder)
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
        return _digest(os.path.realpath(path), str(self.size), str(self.mtime_ns), self.edges)


def local_file(address: str) -> str:
    """A local, uncompressed file with what ``address`` holds.

    ``address`` is a path or any fsspec address (``s3://``, ``hf://``, ``memory://``, ``https://`` …),
    possibly ending in ``.gz`` or ``.zst``. A plain local path comes back as it is; anything else is fetched
    or unpacked into the cache the first time, and again when the original has changed.
    """
    path = _fetched(address) if "://" in address else address
    stem, suffix = os.path.splitext(path)
    if suffix not in (".gz", ".zst"):
        return path
    key = Fingerprint.of(path).key(path)
    return str(build_once(f"unpacked/{key}/{os.path.basename(stem)}", lambda file: _unpack(path, file)))


def build_once(name: str, write: Callable[[IO[bytes]], None]) -> Path:
    """The file ``name`` of the cache; if it is not there, ``write`` fills it first.

    ``name`` must say what the content depends on (a hash of it). Of several processes one writes.
    """
    target = cache_folder() / name
    if target.exists():
        return target
    with cache_lock(name):
        if not target.exists():
            write_whole(target, write)
    return target


def write_whole(target: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Write a file so that it is seen under its name only when it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            write(file)
        os.chmod(temporary, 0o644)  # mkstemp makes it private; other users share the data
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def cache_lock(name: str) -> Iterator[None]:
    """Only one process of this machine is inside for a given ``name``. Lets go when the process dies.

    Where the cache cannot be written there is no lock: work may then be done twice, never wrongly.
    """
    lock = FileLock(cache_folder() / "locks" / f"{_digest(name)}.lock")
    try:
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        logger.debug("no lock for %s (%s)", name, error)
    try:
        yield
    finally:
        lock.release()


def _fetched(address: str) -> str:
    import fsspec

    fs, path = fsspec.core.url_to_fs(address)
    if fs.protocol in ("file", "local") or "file" in fs.protocol:
        return str(path)
    if not fs.exists(path):
        raise FileNotFoundError(f"{address}: no such file")
    key = _digest(address, str(fs.ukey(path)))

    def download(file: IO[bytes]) -> None:
        logger.info("fetching %s", address)
        with fs.open(path, "rb") as remote:
            shutil.copyfileobj(remote, file, 1 << 22)

    return str(build_once(f"fetched/{key}/{os.path.basename(path)}", download))


def _unpack(path: str, file: IO[bytes]) -> None:
    logger.info("unpacking %s", path)
    try:
        if path.endswith(".gz"):
            with gzip.open(path, "rb") as packed:
                shutil.copyfileobj(packed, file, 1 << 22)
        else:
            import pyarrow

            with pyarrow.CompressedInputStream(pyarrow.OSFile(path), "zstd") as packed:
                while piece := packed.read(1 << 22):
                    file.write(piece)
    except (EOFError, zlib.error, OSError) as error:
        raise ConfigError(f"{path}: cannot be unpacked ({error}); is the file cut off?") from error


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
