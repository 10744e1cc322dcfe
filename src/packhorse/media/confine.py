"""Media paths of a row against the folder they belong to.

:func:`resolve` turns what a row holds into what is opened; :func:`confine` refuses what leaves the folder.
Both look at names and links only: no media item is opened, and nothing that is not a path is touched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from packhorse.errors import BadSample
from packhorse.media.failure import machine_fault
from packhorse.media.source import Address, Encoded, LmdbEntry, LocalFile, describe, is_address, locate

PathLike = str | os.PathLike[str]


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
