"""The index of a JSON file: where each row begins, built once and memory-mapped ever after.

An index is eight bytes a row. It lies beside its file (``train.jsonl.phidx``) or, where that folder cannot be
written, in the cache; all processes of a machine share its pages. It is believed only while the file has the
same size, time of change and first and last 64 KiB. A mangled index is built anew.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import zlib
from collections.abc import Iterator
from logging import getLogger
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from packhorse.datasets.cache import Fingerprint, cache_folder, cache_lock, digest, write_whole
from packhorse.datasets.scan import CHUNK, BlankLines, Offsets, Onlooker, scan_array, scan_lines

logger = getLogger(__name__)

Layout = Literal["lines", "array"]

_FORMAT = "packhorse-index-2"
_HEADER_BYTES = 512
# Where an onlooker parses, the next piece is read beside it; the interpreter goes from thread to thread with
# each: larger pieces are quicker. They cost two buffers of this size, and the offsets of the lines in one.
_LOOKED_AT_CHUNK = 1 << 23
# A smaller file is indexed in milliseconds: not worth a second file beside it.
KEEP_FROM_BYTES = 1 << 22


class RowIndex:
    """Where the rows of a file begin: row ``i`` lies from ``span(i)[0]`` to ``span(i)[1]``.

    Args:
        offsets: the beginnings, ascending, and behind them the end of the last row; an array in memory, or a
            memory map, of which only few pages are kept resident.
        every_line: whether row ``i`` is line ``i + 1`` of the file.
    """

    # A page fault brings in a good deal around it, so that even few look-ups make megabytes resident.
    _LOOKUPS = 32

    def __init__(self, offsets: Offsets, *, every_line: bool = False) -> None:
        self.every_line = every_line
        self._offsets = np.asarray(offsets)
        self._map: mmap.mmap | None = getattr(offsets, "_mmap", None)
        self._looked_up = 0

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def span(self, row: int) -> tuple[int, int]:
        """First byte of a row, and the byte behind it."""
        start, stop = self._offsets[row : row + 2].tolist()
        self._looked_up += 1
        if self._looked_up >= self._LOOKUPS:
            self._let_go()
        return start, stop

    def spans(self, rows: Offsets) -> tuple[Offsets, Offsets]:
        """First bytes, and bytes behind, of many rows."""
        starts, stops = self._offsets[rows], self._offsets[rows + 1]
        self._let_go()
        return starts, stops

    def checksum(self, size: int) -> int | None:
        """The CRC of all offsets, as the index file has it: about a millisecond for 100,000 rows.

        None where they cannot be right, whatever the file says: not ascending, or outside of a file of
        ``size`` bytes.
        """
        crc, last = 0, 0
        for first in range(0, len(self._offsets), 1 << 20):
            piece = self._offsets[first : first + (1 << 20)]
            if piece[0] < last or (piece[1:] < piece[:-1]).any():
                return None
            crc, last = zlib.crc32(np.ascontiguousarray(piece).data, crc), int(piece[-1])
            self._let_go()
        return crc if last <= size else None

    def _let_go(self) -> None:
        # Clean pages of a file: the system keeps them in its cache, they just no longer count as ours.
        self._looked_up = 0
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def open_index(
    path: str, layout: Layout, index_dir: str | None = None, onlooker: Onlooker | None = None
) -> tuple[RowIndex, Fingerprint]:
    """The index of the rows of ``path``, and the state of the file that it holds for.

    Args:
        path: a local file.
        layout: ``"lines"`` for JSONL, ``"array"`` for a JSON array.
        index_dir: keep the index in this folder and look nowhere else.
        onlooker: sees the lines as they are found, if the file has to be scanned: from the beginning, and
            again from the beginning if an index could not be kept.
    """
    fingerprint = Fingerprint.of(path)
    if fingerprint.size < KEEP_FROM_BYTES:
        return _scan(path, layout, fingerprint, onlooker), fingerprint
    homes = _homes(path, index_dir)
    index = _first_valid(homes, layout, fingerprint)
    if index is None:
        # An onlooker is not made to wait while another process scans: it would have to read the file anyway.
        with contextlib.nullcontext() if onlooker else cache_lock(f"index {homes[0]}"):
            index = (
                None if onlooker else _first_valid(homes, layout, fingerprint)
            )  # another may have been first
            if index is None:
                index = _build_and_keep(path, layout, fingerprint, homes, onlooker)
    return index, fingerprint


def _homes(path: str, index_dir: str | None) -> list[Path]:
    source = Path(os.path.realpath(path))
    in_folder = f"{source.name}.{digest(str(source))[:12]}.phidx"
    if index_dir is not None:
        return [Path(index_dir) / in_folder]
    return [source.with_name(f"{source.name}.phidx"), cache_folder() / "indexes" / in_folder]


def _first_valid(homes: list[Path], layout: Layout, fingerprint: Fingerprint) -> RowIndex | None:
    for home in homes:
        index = _load(home, layout, fingerprint)
        if index is not None:
            return index
    return None


def _build_and_keep(
    path: str, layout: Layout, fingerprint: Fingerprint, homes: list[Path], onlooker: Onlooker | None
) -> RowIndex:
    for home in homes:
        try:
            write_whole(home, lambda file: _write(file, path, layout, fingerprint, onlooker))
        except OSError as error:
            # Read-only folder, no space left, …: the next home, and in the end memory.
            logger.info("cannot keep the index of %s at %s (%s)", path, home, error)
            continue
        index = _load(home, layout, fingerprint)
        if index is not None:
            return index
    logger.warning("no folder to keep the index of %s in: holding it in memory", path)
    return _scan(path, layout, fingerprint, onlooker)


def _scan(path: str, layout: Layout, fingerprint: Fingerprint, onlooker: Onlooker | None) -> RowIndex:
    blank = BlankLines()
    offsets = np.concatenate(list(_pieces(path, layout, fingerprint, onlooker, blank)))
    return RowIndex(offsets, every_line=_is_every_line(layout, blank))


def _is_every_line(layout: Layout, blank: BlankLines) -> bool:
    return layout == "lines" and not blank.before_rows


def _pieces(
    path: str, layout: Layout, fingerprint: Fingerprint, onlooker: Onlooker | None, blank: BlankLines
) -> Iterator[Offsets]:
    fd = os.open(path, os.O_RDONLY)
    try:
        if layout == "array":
            yield from scan_array(fd, fingerprint.size, path)
        else:
            chunk = CHUNK if onlooker is None else _LOOKED_AT_CHUNK
            yield from scan_lines(fd, fingerprint.size, path, chunk, onlooker, blank)
    finally:
        os.close(fd)


def _write(
    file: IO[bytes], path: str, layout: Layout, fingerprint: Fingerprint, onlooker: Onlooker | None
) -> None:
    file.write(b" " * _HEADER_BYTES)
    count = crc = 0
    blank = BlankLines()
    for piece in _pieces(path, layout, fingerprint, onlooker, blank):
        data = piece.astype("<i8").tobytes()
        file.write(data)
        count += len(piece)
        crc = zlib.crc32(data, crc)
    every_line = _is_every_line(layout, blank)
    header = _header(layout, fingerprint) | {"offsets": count, "crc": crc, "every_line": every_line}
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


def _load(home: Path, layout: Layout, fingerprint: Fingerprint) -> RowIndex | None:
    """The index at ``home``, or None if there is none, it is of another state of the file, or mangled."""
    try:
        with open(home, "rb") as file:
            header = json.loads(file.read(_HEADER_BYTES))
            length = os.fstat(file.fileno()).st_size
    except (OSError, ValueError, RecursionError):
        return None
    wanted = _header(layout, fingerprint)
    if not isinstance(header, dict) or any(header.get(name) != value for name, value in wanted.items()):
        return None
    count, every_line = header.get("offsets"), header.get("every_line")
    if not isinstance(every_line, bool):
        return None
    if not isinstance(count, int) or count < 1 or length != _HEADER_BYTES + 8 * count:
        return None
    offsets = np.memmap(home, dtype="<i8", mode="r", offset=_HEADER_BYTES, shape=(count,))
    index = RowIndex(offsets, every_line=every_line)
    crc = index.checksum(fingerprint.size)
    return index if crc is not None and crc == header.get("crc") else None
