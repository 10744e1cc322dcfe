"""The index of a JSON file: where each row begins, built once and memory-mapped ever after.

An index is eight bytes a row. It lies beside its file (``train.jsonl.phidx``) or, where that folder cannot be
written, in the cache; all processes of a machine share its pages. It is believed only while the file has the
same size, time of change and first and last 64 KiB. A mangled index is built anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from logging import getLogger
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from packhorse.datasets.cache import Fingerprint, cache_folder, cache_lock, write_whole
from packhorse.datasets.scan import Offsets, scan_array, scan_lines

logger = getLogger(__name__)

Layout = Literal["lines", "array"]

_FORMAT = "packhorse-index-1"
_HEADER_BYTES = 512
# A smaller file is indexed in milliseconds: not worth a second file beside it.
KEEP_FROM_BYTES = 1 << 22


def open_index(path: str, layout: Layout, index_dir: str | None = None) -> tuple[Offsets, Fingerprint]:
    """The offsets of the rows of ``path`` (one more than there are rows) and the file state they hold for.

    Args:
        path: a local file.
        layout: ``"lines"`` for JSONL, ``"array"`` for a JSON array.
        index_dir: keep the index in this folder and look nowhere else.
    """
    fingerprint = Fingerprint.of(path)
    if fingerprint.size < KEEP_FROM_BYTES:
        return _scan(path, layout, fingerprint), fingerprint
    homes = _homes(path, index_dir)
    index = _first_valid(homes, layout, fingerprint)
    if index is None:
        index = _build(path, layout, fingerprint, homes)
    return index, fingerprint


def _homes(path: str, index_dir: str | None) -> list[Path]:
    source = Path(os.path.realpath(path))
    in_folder = f"{source.name}.{Fingerprint(0, 0, '').key(source)[:12]}.phidx"
    if index_dir is not None:
        return [Path(index_dir) / in_folder]
    return [source.with_name(f"{source.name}.phidx"), cache_folder() / "indexes" / in_folder]


def _first_valid(homes: list[Path], layout: Layout, fingerprint: Fingerprint) -> Offsets | None:
    for home in homes:
        index = _load(home, layout, fingerprint)
        if index is not None:
            return index
    return None


def _build(path: str, layout: Layout, fingerprint: Fingerprint, homes: list[Path]) -> Offsets:
    with cache_lock(f"index {homes[0]}"):
        index = _first_valid(homes, layout, fingerprint)  # another process may have been first
        return index if index is not None else _build_and_keep(path, layout, fingerprint, homes)


def _build_and_keep(path: str, layout: Layout, fingerprint: Fingerprint, homes: list[Path]) -> Offsets:
    for home in homes:
        try:
            write_whole(home, lambda file: _write(file, path, layout, fingerprint))
        except OSError as error:
            # Read-only folder, no space left, …: the next home, and in the end memory.
            logger.info("cannot keep the index of %s at %s (%s)", path, home, error)
            continue
        index = _load(home, layout, fingerprint)
        if index is not None:
            return index
    logger.warning("no folder to keep the index of %s in: holding it in memory", path)
    return _scan(path, layout, fingerprint)


def _scan(path: str, layout: Layout, fingerprint: Fingerprint) -> Offsets:
    return np.concatenate(list(_pieces(path, layout, fingerprint)))


def _pieces(path: str, layout: Layout, fingerprint: Fingerprint) -> Iterator[Offsets]:
    scan = scan_lines if layout == "lines" else scan_array
    fd = os.open(path, os.O_RDONLY)
    try:
        yield from scan(fd, fingerprint.size, path)
    finally:
        os.close(fd)


def _write(file: IO[bytes], path: str, layout: Layout, fingerprint: Fingerprint) -> None:
    file.write(b" " * _HEADER_BYTES)
    count = checksum = 0
    for piece in _pieces(path, layout, fingerprint):
        file.write(piece.astype("<i8").tobytes())
        count += len(piece)
        checksum += int(piece.sum())
    header = _header(layout, fingerprint) | {"offsets": count, "sum": checksum % 2**64}
    file.seek(0)
    file.write(json.dumps(header).encode())


def _header(layout: Layout, fingerprint: Fingerprint) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "layout": layout,
        "size": fingerprint.size,
        "mtime_ns": fingerprint.mtime_ns,
        "edges": fingerprint.edges,
    }


def _load(home: Path, layout: Layout, fingerprint: Fingerprint) -> Offsets | None:
    """The index at ``home``, or None if there is none, it is of another state of the file, or mangled."""
    try:
        with open(home, "rb") as file:
            header = json.loads(file.read(_HEADER_BYTES))
            length = os.fstat(file.fileno()).st_size
    except (OSError, ValueError):
        return None
    wanted = _header(layout, fingerprint)
    if not isinstance(header, dict) or any(header.get(name) != value for name, value in wanted.items()):
        return None
    count = header.get("offsets")
    if not isinstance(count, int) or count < 1 or length != _HEADER_BYTES + 8 * count:
        return None
    index = np.memmap(home, dtype="<i8", mode="r", offset=_HEADER_BYTES, shape=(count,))
    if int(index.sum()) % 2**64 != header.get("sum"):
        return None
    return index
