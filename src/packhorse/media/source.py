"""Where a media item's bytes come from: what a row holds goes in, a binary file or bytes come out.

:func:`resolve` joins a row's path to its media folder, :func:`confine` rejects a path outside of it.

A source is one of

- a local path (``str`` or ``PathLike``) or a ``file://`` address,
- any other address that fsspec reads (``s3://…``, ``memory://…``),
- ``db.lmdb::key``: one entry of an LMDB database,
- encoded bytes (``bytes``, ``bytearray``, ``memoryview``),
- a Hugging Face style dict ``{"bytes": … or None, "path": … or None}``; the bytes win where both are given.

Opening a local file costs one ``stat`` and one ``open``; nothing is read ahead. A source that is not there
raises :class:`~packhorse.errors.BadSample` with reason ``missing_media``, an empty one ``broken_media``, one
that may not be read or does not answer ``unreachable_media``; a machine that fails (no file handles left, a
broken disk or mount) :class:`~packhorse.errors.SystemFault`.
"""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO
from urllib.parse import unquote

from packhorse.errors import BadSample
from packhorse.media.failure import RemoteError, bad, machine_fault, unreadable
from packhorse.media.lmdb import read_lmdb
from packhorse.media.remote import open_address
from packhorse.types import mask_secrets

PathLike = str | os.PathLike[str]

_LOCAL_SCHEMES = ("file://", "local://")
_SCHEME = re.compile(r"[A-Za-z0-9+.\-:]+")
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A path on this machine."""

    path: str


@dataclass(frozen=True, slots=True)
class LmdbEntry:
    """One entry of an LMDB database on this machine."""

    database: str
    key: str


@dataclass(frozen=True, slots=True)
class Address:
    """Something that fsspec reads."""

    url: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """Bytes that are already here."""

    data: bytes


Place = LocalFile | LmdbEntry | Address | Encoded


def locate(source: Any) -> Place:
    """Say which kind of place ``source`` is, without opening it.

    >>> locate("faces.lmdb::0001")
    LmdbEntry(database='faces.lmdb', key='0001')

    Only a source with ``::`` in it, or a ``file://`` address, costs a look at the disk.
    """
    if isinstance(source, Mapping):
        return _locate_dict(source)
    if isinstance(source, bytes | bytearray | memoryview):
        return Encoded(bytes(source))
    if not isinstance(source, str | os.PathLike):
        raise bad(f"{describe(source)} is not a path, an address or encoded bytes", "wrong_format")
    text = os.fsdecode(source)
    if "::" in text and (entry := _split_lmdb(text)) is not None:
        return entry
    if not is_address(text):
        return LocalFile(text)
    if text.lower().startswith(_LOCAL_SCHEMES):
        return LocalFile(_path_of_file_url(text))
    return Address(text)


def is_address(text: str) -> bool:
    """Whether ``text`` starts with a scheme (``s3://``, ``simplecache::s3://``), ``file://`` included.

    A ``://`` further after, in a folder's name or in the key of an LMDB entry, does not make an address.
    """
    head, found, _ = text.partition("://")
    return bool(found) and _SCHEME.fullmatch(head) is not None and ".lmdb::" not in head


def open_source(source: Any, *, buffering: int = -1, block_size: int | None = None) -> BinaryIO:
    """Open a source for reading from the start; the caller closes it.

    Args:
        source: anything :func:`locate` knows.
        buffering: as for ``open``; 0 spares a local file the buffer where little is read.
        block_size: how much fsspec fetches at once, where the default (megabytes) is too much.
    """
    match locate(source):
        case Encoded(data):
            file, size = _in_memory(data)
        case LmdbEntry(database, key):
            file, size = _in_memory(read_lmdb(database, key))
        case Address(url):
            file, size = _open_address(url, block_size)
        case LocalFile(path):
            file, size = _open_local(path, buffering)
    if size == 0:
        file.close()
        raise bad(f"{describe(source)}: empty file (0 bytes)", "broken_media")
    return file


def read_bytes(source: Any) -> bytes:
    """Everything the source holds. Costs one read of the whole."""
    if isinstance(source, bytes) and source:
        return source
    with open_source(source) as file:
        try:
            return file.read()
        except OSError as error:
            raise unreadable(
                error, f"{describe(source)}: reading it failed ({error})", "broken_media"
            ) from error


def local_path(source: Any) -> str | None:
    """The path on this machine, or None where the source is no local file."""
    if not isinstance(source, str | os.PathLike | Mapping):
        return None
    place = locate(source)
    return place.path if isinstance(place, LocalFile) else None


def describe(source: Any) -> str:
    """A short name of the source for messages; never its contents, nor the secrets of an address.

    >>> describe(b"abc")
    '<3 bytes>'
    """
    if isinstance(source, str | os.PathLike):
        text = mask_secrets(os.fsdecode(source))
        if len(text) <= _LONGEST_NAME:
            return text
        return f"{text[: _LONGEST_NAME // 2]}…{text[-_LONGEST_NAME // 2 :]}"
    if isinstance(source, bytes | bytearray):
        return f"<{len(source):,} bytes>"
    if isinstance(source, memoryview):
        return f"<{source.nbytes:,} bytes>"
    if isinstance(source, Mapping):
        path, data = source.get("path"), source.get("bytes")
        if path is not None or data is not None:
            return describe(path if path is not None else data)
        return f"<dict with {', '.join(map(str, list(source)[:4])) or 'nothing'}>"
    if isinstance(source, list | tuple):
        return f"<{len(source)} items, first {describe(source[0])}>" if source else "<empty list>"
    if hasattr(source, "shape") and hasattr(source, "dtype"):
        return f"<array {tuple(source.shape)} {source.dtype}>"
    if hasattr(source, "size") and hasattr(source, "mode"):
        return f"<{type(source).__name__} {source.size} {source.mode}>"
    return f"<{type(source).__name__}>"


def _locate_dict(source: Mapping[Any, Any]) -> Place:
    data, path = source.get("bytes"), source.get("path")
    if data is not None:
        return locate(data)
    if path is not None:
        return locate(path)
    raise bad(f"{describe(source)}: expected 'bytes' or 'path', found neither", "missing_media")


def _split_lmdb(text: str) -> LmdbEntry | None:
    # The last "::" that has a database on its left; earlier ones serve keys that contain "::" themselves.
    cut = text.rfind("::")
    while cut > 0:
        left, key = text[:cut], text[cut + 2 :]
        if left.lower().startswith(_LOCAL_SCHEMES):
            left = _path_of_file_url(left)
        if not is_address(left) and (left.endswith(".lmdb") or (_exists(left) and not _exists(text))):
            return LmdbEntry(left, key)
        cut = text.rfind("::", 0, cut)
    return None


def _path_of_file_url(url: str) -> str:
    path = url.partition("://")[2]
    if path.lower().startswith("localhost/"):
        path = path[len("localhost") :]
    # RFC 8089 escapes blanks and the like; fsspec does not. The name as written comes first.
    return path if "%" not in path or _exists(path) else unquote(path)


def _exists(path: str) -> bool:
    try:
        os.lstat(path)
    except (OSError, ValueError):
        return False
    return True


def _in_memory(data: bytes) -> tuple[BinaryIO, int]:
    return io.BytesIO(data), len(data)


def _open_local(path: str, buffering: int) -> tuple[BinaryIO, int]:
    try:
        status = os.stat(path)
        # Opening a FIFO or a device could wait for ever.
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise bad(f"{describe(path)} is {kind}, expected a file", "missing_media")
        return open(path, "rb", buffering), status.st_size
    except FileNotFoundError as error:
        raise bad(f"no file {describe(path)}", "missing_media") from error
    except OSError as error:
        raise unreadable(
            error, f"{describe(path)} cannot be opened ({error.strerror})", "missing_media"
        ) from error
    except ValueError as error:
        if isinstance(error, BadSample):
            raise
        raise bad(f"{describe(path)!r} is not a file name ({error})", "missing_media") from error


def _open_address(url: str, block_size: int | None) -> tuple[BinaryIO, int]:
    if ".lmdb::" in url:
        raise bad(f"{describe(url)}: an LMDB database is read from a local disk only", "missing_media")
    try:
        return open_address(url, block_size)
    except OSError as error:
        plain = isinstance(error, RemoteError) and error.missing and not str(error)
        detail = f"no file {describe(url)}" if plain else f"{describe(url)} cannot be opened ({error})"
        raise unreadable(error, detail, "missing_media") from None


# --- media paths and their folder ----------------------------------------------------------------------


def resolve(path: Any, media_dir: PathLike | None, confined: bool = False) -> Any:
    """The source to open for ``path`` as it stands in a row.

    >>> resolve("cats/1.jpg", "/data/media")
    '/data/media/cats/1.jpg'

    Args:
        path: a path, an address, ``db.lmdb::key``, a list of frame paths, or a dict with ``path``. Relative
            paths get ``media_dir`` in front; absolute ones and addresses do not. Anything else (bytes, a PIL
            image, an array) comes back as it is.
        media_dir: a folder or an address; None leaves every path as it is.
        confined: refuse what is not inside ``media_dir`` (see :func:`confine`).
    """
    if media_dir is None:
        return path
    resolved = _joined(path, os.fsdecode(media_dir))
    return confine(resolved, media_dir) if confined else resolved


def confine(path: Any, media_dir: PathLike) -> Any:
    """Return ``path`` if all of it lies inside ``media_dir``, else raise.

    A local path (or LMDB database, or each frame of a list or folder) is inside when its real path is: ``..``
    and symbolic links are followed first. An address is inside when ``media_dir`` is an address and a whole
    leading part of it. Costs the ``lstat`` calls of one ``realpath`` for each path.

    Raises:
        BadSample: reason ``outside_media_dir``, stage ``convert``.
    """
    root = locate(media_dir)
    for part in _paths(path):
        place = locate(part)
        if isinstance(place, Encoded):
            continue
        if isinstance(root, Address):
            inside = isinstance(place, Address) and _address_inside(place.url, root.url)
        elif isinstance(place, LocalFile | LmdbEntry) and isinstance(root, LocalFile):
            inside = _local_inside(place.path if isinstance(place, LocalFile) else place.database, root.path)
        else:
            inside = False
        if not inside:
            raise BadSample(
                f"{describe(part)} is not inside the media folder {describe(media_dir)}",
                reason="outside_media_dir",
                stage="convert",
            )
    return path


def _joined(path: Any, media_dir: str) -> Any:
    if isinstance(path, list | tuple):
        return [_joined(frame, media_dir) for frame in path]
    if isinstance(path, Mapping):
        inner = path.get("path")
        return path if inner is None else {**path, "path": _joined(inner, media_dir)}
    if not isinstance(path, str | os.PathLike):
        return path
    text = os.fsdecode(path)
    if os.path.isabs(text) or is_address(text):
        return text
    if is_address(media_dir):
        return f"{media_dir.rstrip('/')}/{text}"
    return os.path.join(media_dir, text)


def _paths(path: Any) -> list[Any]:
    if isinstance(path, list | tuple):
        return [inner for item in path for inner in _paths(item)]
    if isinstance(path, Mapping):
        if path.get("bytes") is not None or path.get("path") is None:
            return []
        return [path["path"]]
    return [path] if isinstance(path, str | os.PathLike) else []


def _local_inside(path: str, root: str) -> bool:
    try:
        real_root = os.path.realpath(root)
        real = os.path.realpath(path)
        if not _under(real, real_root):
            return False
        if not os.path.isdir(real):
            return True
        # A folder of frames, or of an LMDB database: what it holds is opened too.
        with os.scandir(real) as entries:
            return all(_under(os.path.realpath(e.path), real_root) for e in entries if e.is_symlink())
    except (OSError, ValueError) as error:
        fault = machine_fault(error, f"{describe(path)} cannot be looked at ({error})")
        if fault is not None:
            raise fault from error
        # A name that cannot be a path, or a folder that cannot be listed, proves nothing.
        return False


def _under(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)


def _address_inside(url: str, root: str) -> bool:
    root = root.rstrip("/")
    if url.rstrip("/") == root:
        return True
    if not url.startswith(root + "/"):
        return False
    rest = url[len(root) + 1 :]
    # "::" would chain a second file system after this one; servers decode %2e%2e before they look.
    return "::" not in rest and ".." not in re.split(r"[/\\]", unquote(rest))
