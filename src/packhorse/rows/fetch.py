"""The local cache: addresses fetched, archives unpacked, indexes kept, each built once per machine.

Everything lies under one folder (``$PACKHORSE_CACHE``, else ``$XDG_CACHE_HOME/packhorse``, else
``~/.cache/packhorse``) and can be deleted at any time. A file appears under its name only when it is whole;
processes that want the same file at the same time wait for the first one to make it.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import zlib
from collections.abc import Iterator
from typing import IO, Any

from packhorse.errors import ConfigError
from packhorse.media.failure import RemoteError
from packhorse.media.remote import INVALID_PATH, RemoteFile, call_store, find_store
from packhorse.media.source import is_address, local_path
from packhorse.types import mask_secrets
from packhorse.utils.files import Fingerprint, build_once, digest, logger

_PIECE = 1 << 22
_STATE = ("size", "mtime", "created", "LastModified", "last_modified", "ETag", "etag", "checksum", "sha")


def local_file(address: str) -> str:
    """A local, uncompressed file with what ``address`` holds.

    ``address`` is a path or any fsspec address (``s3://``, ``hf://``, ``memory://``, ``https://`` …),
    possibly ending in ``.gz`` or ``.zst``. A plain local path comes back as it is; anything else is fetched
    or unpacked into the cache the first time, and again when the original has changed.
    """
    path = os.path.abspath(_fetched(address) if is_address(address) else address)
    stem, suffix = os.path.splitext(path)
    if suffix not in (".gz", ".zst"):
        return path
    key = Fingerprint.of(path).key(path)
    return str(build_once(f"unpacked/{key}/{os.path.basename(stem)}", lambda file: _unpack(path, file)))


def _fetched(address: str) -> str:
    if (path := local_path(address)) is not None:
        return path
    with _named(address):
        fs, path = find_store(address)
        info = call_store(address, lambda: fs.info(path), INVALID_PATH)
    # Not the store's own key alone: for some stores it is the address, whatever lies there.
    state = {name: str(info[name]) for name in _STATE if info.get(name) is not None}
    key = digest(address, str(fs.ukey(path)), str(sorted(state.items())))

    def download(file: IO[bytes]) -> None:
        logger.info("fetching %s", mask_secrets(address))
        came, size = 0, info.get("size")
        with contextlib.ExitStack() as stack:
            with _named(address):
                opened = call_store(address, lambda: fs.open(path, "rb"), INVALID_PATH)
                remote = stack.enter_context(RemoteFile(address, opened))
            while True:
                with _named(address):
                    piece = remote.read(_PIECE)
                if not piece:
                    break
                came += file.write(piece)
        # A line that breaks may look like the end of the file. Kept, half of the rows would be lost for good.
        if size is not None and came != size:
            raise ConnectionError(
                f"{mask_secrets(address)}: {came:,} bytes came, expected {size:,}; nothing is kept, try again"
            )

    return str(build_once(f"fetched/{key}/{os.path.basename(path.partition('?')[0])}", download))


@contextlib.contextmanager
def _named(address: str) -> Iterator[None]:
    """Asking a store inside: an error says for which address."""
    name = mask_secrets(address)
    try:
        yield
    except RemoteError as error:
        # Without the cause, whose text may hold the secrets of the address.
        if error.missing and not str(error):
            raise FileNotFoundError(f"{name}: no such file") from None
        if error.missing:
            raise ConfigError(f"{name} is no address that can be read ({error})") from None
        raise ConnectionError(f"{name} cannot be fetched ({error}); nothing is kept, try again") from None
    except OSError as error:
        why = str(error) or type(error).__name__
        raise ConnectionError(f"{name} cannot be fetched ({why}); nothing is kept, try again") from error


def _unpack(path: str, file: IO[bytes]) -> None:
    logger.info("unpacking %s", path)
    for piece in _unpacked(path):
        file.write(piece)


def _unpacked(path: str) -> Iterator[bytes]:
    with contextlib.ExitStack() as stack:
        try:
            if path.endswith(".gz"):
                packed: Any = stack.enter_context(gzip.open(path, "rb"))
            else:
                import pyarrow

                packed = stack.enter_context(pyarrow.CompressedInputStream(pyarrow.OSFile(path), "zstd"))
            piece = packed.read(_PIECE)
            while piece:
                yield piece
                piece = packed.read(_PIECE)
        except (EOFError, zlib.error, OSError) as error:
            raise ConfigError(f"{path}: cannot be unpacked ({error}); is the file cut off?") from error
