"""Sources of media: find out where the bytes of a media item are, keep them inside ``media_dir``, open them.

A source is one of

- a local path (``str`` or ``PathLike``) or a ``file://`` address,
- any other address that fsspec reads (``s3://…``, ``memory://…``),
- ``db.lmdb::key``: one entry of an LMDB database,
- encoded bytes (``bytes``, ``bytearray``, ``memoryview``),
- a Hugging Face style dict ``{"bytes": … or None, "path": … or None}``; the bytes win if both are given.

A missing source raises :class:`~packhorse.errors.BadSample` with reason ``missing_media``, an empty one
``broken_media``, one without permission or answer ``unreachable_media``; a fault of the machine (no file
handles left, a broken disk or mount) raises :class:`~packhorse.errors.SystemFault`.
"""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, BinaryIO, TypeVar
from urllib.parse import unquote

from packhorse.errors import DATA_ERRORS, BadSample, PackhorseError, is_data_error, machine_fault
from packhorse.media.failure import RemoteError, bad_media, read_error
from packhorse.media.lmdb import read_lmdb
from packhorse.media.remote import open_address
from packhorse.types import mask_secrets

PathLike = str | os.PathLike[str]
F = TypeVar("F", bound=Callable[..., Any])

_LOCAL_SCHEMES = ("file://", "local://")
_SCHEME = re.compile(r"[A-Za-z0-9+.\-:]+")
_MAX_NAME = 200
_BASE64 = re.compile(r"data:[^,;/]*/[^,]*;base64,.*|(?:(?<=/)|^)/?[A-Za-z0-9+/]{200,}={0,2}$", re.DOTALL)
_BASE64_IMAGE = re.compile(r"data:|/9j/|iVBORw0KGg|R0lGOD|UklGR")  # JPEG, PNG, GIF, WebP


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
    """An address that fsspec reads."""

    url: str


Location = LocalFile | LmdbEntry | Address | bytes


def locate(source: object) -> Location:
    """Return the kind of location that ``source`` is, without opening it.

    >>> locate("faces.lmdb::0001")
    LmdbEntry(database='faces.lmdb', key='0001')

    Only a source with ``::`` in it, or a ``file://`` address, costs a look at the disk.
    """
    if isinstance(source, Mapping):
        data, path = source.get("bytes"), source.get("path")
        if data is None and path is None:
            raise bad_media(f"{describe(source)}: expected 'bytes' or 'path', found neither", "missing_media")
        return locate(path if data is None else data)
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if not isinstance(source, str | os.PathLike):
        raise bad_media(f"{describe(source)} is not a path, an address or encoded bytes", "wrong_format")
    text = os.fsdecode(source)
    if "::" in text and (entry := _split_lmdb(text)) is not None:
        return entry
    if not is_address(text):
        return LocalFile(text)
    if text.lower().startswith(_LOCAL_SCHEMES):
        return LocalFile(_path_of_file_url(text))
    return Address(text)


def is_address(text: str) -> bool:
    """Return whether ``text`` starts with a scheme (``s3://``, ``simplecache::s3://``), ``file://`` included.

    A later ``://``, in a folder's name or in the key of an LMDB entry, does not make an address.
    """
    head, separator, _ = text.partition("://")
    return bool(separator) and _SCHEME.fullmatch(head) is not None and ".lmdb::" not in head


def open_source(source: object, *, buffering: int = -1, block_size: int | None = None) -> BinaryIO:
    """Open a source for reading from the start; the caller closes it.

    Args:
        source: anything :func:`locate` accepts.
        buffering: as for ``open``; 0 saves the buffer of a local file if little is read.
        block_size: how much fsspec fetches at once, if the default (megabytes) is too much.
    """
    file: BinaryIO
    match locate(source):
        case bytes(data):
            file, size = io.BytesIO(data), len(data)
        case LmdbEntry(database, key):
            value = read_lmdb(database, key)
            file, size = io.BytesIO(value), len(value)
        case Address(url):
            file, size = _open_address(url, block_size)
        case LocalFile(path):
            file, size = _open_local(path, buffering)
    if size == 0:
        file.close()
        raise bad_media(f"{describe(source)}: empty file (0 bytes)")
    return file


@contextmanager
def reading(source: object) -> Iterator[None]:
    """Turn an ``OSError`` of the block into the error for a source that cannot be read."""
    try:
        yield
    except OSError as error:
        raise read_error(error, f"{describe(source)}: reading it failed ({error})") from error


def decoding(function: F) -> F:
    """Decorate a function of a source: what a decoder raises for damaged data is an error of the source."""

    @wraps(function)
    def decode(source: object, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(source, *args, **kwargs)
        except (*DATA_ERRORS, ArithmeticError) as error:
            is_damage = isinstance(error, ArithmeticError) or is_data_error(error)
            if isinstance(error, PackhorseError) or not is_damage:
                raise
            detail = f"{describe(source)}: cannot be decoded ({type(error).__name__}: {error})"
            raise read_error(error, detail) from error

    return decode  # type: ignore[return-value]  # it has the same arguments


def read_bytes(source: object) -> bytes:
    """Return the whole content of a source."""
    if isinstance(source, bytes) and source:
        return source
    with open_source(source) as file, reading(source):
        return file.read()


def local_path(source: object) -> str | None:
    """Return the path on this machine, or None if the source is not a local file."""
    if not isinstance(source, str | os.PathLike | Mapping):
        return None
    location = locate(source)
    return location.path if isinstance(location, LocalFile) else None


def describe(source: object) -> str:
    """Return a short name of the source for messages, without its contents and the secrets of an address.

    >>> describe(b"abc")
    '<3 bytes>'
    """
    if isinstance(source, str | os.PathLike):
        text = mask_secrets(os.fsdecode(source))
        return text if len(text) <= _MAX_NAME else f"{text[: _MAX_NAME // 2]}…{text[-_MAX_NAME // 2 :]}"
    if isinstance(source, bytes | bytearray | memoryview):
        return f"<{memoryview(source).nbytes:,} bytes>"
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


def _split_lmdb(text: str) -> LmdbEntry | None:
    # The last "::" with a database on its left; earlier ones are for keys that contain "::" themselves.
    cut = text.rfind("::")
    while cut > 0:
        left, key = text[:cut], text[cut + 2 :]
        if left.lower().startswith(_LOCAL_SCHEMES):
            left = _path_of_file_url(left)
        if not is_address(left) and (
            left.endswith(".lmdb") or (os.path.lexists(left) and not os.path.lexists(text))
        ):
            return LmdbEntry(left, key)
        cut = text.rfind("::", 0, cut)
    return None


def _path_of_file_url(url: str) -> str:
    path = url.partition("://")[2]
    if path.lower().startswith("localhost/"):
        path = path[len("localhost") :]
    # RFC 8089 escapes spaces and the like; fsspec does not. The name as written comes first.
    return path if "%" not in path or os.path.lexists(path) else unquote(path)


def _open_local(path: str, buffering: int) -> tuple[BinaryIO, int]:
    try:
        status = os.stat(path)
        # Opening a FIFO or a device could block forever.
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise bad_media(f"{describe(path)} is {kind}, expected a file", "missing_media")
        return open(path, "rb", buffering), status.st_size
    except FileNotFoundError as error:
        raise _base64_error(path) or bad_media(f"no file {describe(path)}", "missing_media") from error
    except OSError as error:
        if (bad := _base64_error(path)) is not None:
            raise bad from error
        detail = f"{describe(path)} cannot be opened ({error.strerror})"
        raise read_error(error, detail, "missing_media") from error
    except ValueError as error:
        if isinstance(error, BadSample):
            raise
        raise bad_media(f"{describe(path)!r} is not a file name ({error})", "missing_media") from error


def _base64_error(path: str) -> BadSample | None:
    """Return the error for base64 data in place of a path; the media folder may be in front of it."""
    found = _BASE64.search(path)
    if found is None or not all(re.search(kind, found[0]) for kind in ("[a-z]", "[A-Z]", "[0-9]")):
        return None
    image = _BASE64_IMAGE.search(found[0])
    data = found[0] if image is None else found[0][image.start() :]
    return bad_media(
        f"base64 data in place of a path ({data[:24]}…, {len(data):,} characters): decode it, save it as a "
        "file and give the path of the file",
        "missing_media",
    )


def _open_address(url: str, block_size: int | None) -> tuple[BinaryIO, int]:
    if ".lmdb::" in url:
        raise bad_media(f"{describe(url)}: an LMDB database is read from a local disk only", "missing_media")
    try:
        return open_address(url, block_size)
    except OSError as error:
        missing = isinstance(error, RemoteError) and error.missing and not str(error)
        detail = f"no file {describe(url)}" if missing else f"{describe(url)} cannot be opened ({error})"
        raise read_error(error, detail, "missing_media") from None


# --- paths of a row and the media folder ------------------------------------------------------------------


def resolve(path: object, media_dir: PathLike | None, confined: bool = False) -> Any:
    """Return the source to open for ``path`` as a row has it.

    >>> resolve("cats/1.jpg", "/data/media")
    '/data/media/cats/1.jpg'

    Args:
        path: a path, an address, ``db.lmdb::key``, a list of frame paths, or a dict with ``path``. Relative
            paths get ``media_dir`` in front; absolute ones and addresses do not. Anything else (bytes, a PIL
            image, an array) is returned as it is.
        media_dir: a folder or an address; None leaves every path as it is.
        confined: raise if the result is not inside ``media_dir`` (see :func:`confine`).
    """
    if media_dir is None:
        return path
    resolved = _join(path, os.fsdecode(media_dir))
    return confine(resolved, media_dir) if confined else resolved


def confine(path: object, media_dir: PathLike) -> Any:
    """Return ``path`` if all of it is inside ``media_dir``, else raise.

    A local path (or LMDB database, or each frame of a list or folder) is inside if its real path is: ``..``
    and symbolic links are followed first. An address is inside if ``media_dir`` is an address and a whole
    leading part of it. Costs the ``lstat`` calls of one ``realpath`` for each path; no media item is opened.

    Raises:
        BadSample: reason ``outside_media_dir``, stage ``convert``.
    """
    root = locate(media_dir)
    for part in _paths(path):
        location = locate(part)
        if isinstance(location, bytes):
            continue
        if isinstance(root, Address):
            inside = isinstance(location, Address) and _is_address_inside(location.url, root.url)
        elif isinstance(location, LocalFile | LmdbEntry) and isinstance(root, LocalFile):
            local = location.path if isinstance(location, LocalFile) else location.database
            inside = _is_path_inside(local, root.path)
        else:
            inside = False
        if not inside:
            raise BadSample(
                f"{describe(part)} is not inside the media folder {describe(media_dir)}",
                reason="outside_media_dir",
                stage="convert",
            )
    return path


def _join(path: object, media_dir: str) -> Any:
    if isinstance(path, list | tuple):
        return [_join(frame, media_dir) for frame in path]
    if isinstance(path, Mapping):
        inner = path.get("path")
        return path if inner is None else {**path, "path": _join(inner, media_dir)}
    if not isinstance(path, str | os.PathLike):
        return path
    text = os.fsdecode(path)
    if os.path.isabs(text) or is_address(text):
        return text
    return f"{media_dir.rstrip('/')}/{text}" if is_address(media_dir) else os.path.join(media_dir, text)


def _paths(path: object) -> list[PathLike]:
    if isinstance(path, list | tuple):
        return [inner for item in path for inner in _paths(item)]
    if isinstance(path, Mapping):
        return [path["path"]] if path.get("bytes") is None and path.get("path") is not None else []
    return [path] if isinstance(path, str | os.PathLike) else []


def _is_path_inside(path: str, root: str) -> bool:
    def is_inside(name: str) -> bool:
        return name == real_root or name.startswith(real_root.rstrip(os.sep) + os.sep)

    try:
        real_root, real = os.path.realpath(root), os.path.realpath(path)
        if not is_inside(real) or not os.path.isdir(real):
            return is_inside(real)
        # The content of a folder of frames, or of an LMDB database, is opened too.
        with os.scandir(real) as entries:
            return all(is_inside(os.path.realpath(entry.path)) for entry in entries if entry.is_symlink())
    except (OSError, ValueError) as error:
        if (fault := machine_fault(error, f"{describe(path)} cannot be checked ({error})")) is not None:
            raise fault from error
        # A name that cannot be a path, or a folder that cannot be listed, proves nothing.
        return False


def _is_address_inside(url: str, root: str) -> bool:
    root = root.rstrip("/")
    if url.rstrip("/") == root:
        return True
    if not url.startswith(root + "/"):
        return False
    rest = url[len(root) + 1 :]
    # "::" would chain a second file system; servers decode %2e%2e before they resolve a path.
    return "::" not in rest and ".." not in re.split(r"[/\\]", unquote(rest))
