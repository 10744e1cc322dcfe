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
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from logging import getLogger
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from packhorse.errors import ConfigError
from packhorse.utils.files import Fingerprint, cache_folder, cache_lock, digest, write_atomic
from packhorse.utils.progress import Progress

Offsets = npt.NDArray[np.int64]

CHUNK = 1 << 20
_HEAD = 1 << 16  # bytes at the beginning of a file that tell how long its lines are
_LONG_LINE = 200  # bytes, from which searching for each newline is quicker than comparing all bytes
_NEWLINE, _RETURN, _SPACE, _QUOTE, _BACKSLASH = b'\n\r "\\'
_BOM = b"\xef\xbb\xbf"
_AHEAD = 4  # bytes read beyond a chunk: a line may start right after it, or after a byte-order mark


# Sees each piece of a file as it is scanned: the bytes, the offset of the first, where in them lines begin.
Onlooker = Callable[[memoryview, int, list[int]], None]


class BlankLines:
    """Whether rows come after blank lines; where none does, row ``i`` is line ``i + 1`` of its file."""

    def __init__(self) -> None:
        self.before_rows = self._any = False

    def saw(self, blank: npt.NDArray[np.bool_]) -> None:
        """The next lines of the file, each blank or a row."""
        first = int(blank.argmax()) if blank.any() else len(blank)
        self.before_rows |= not blank[0 if self._any else first :].all()
        self._any |= first < len(blank)


def scan_lines(
    fd: int,
    size: int,
    name: str,
    chunk: int = CHUNK,
    onlooker: Onlooker | None = None,
    blank_lines: BlankLines | None = None,
) -> Iterator[Offsets]:
    """Offsets of the lines of a JSONL file that are not blank, then the file's size as the closing bound.

    CRLF line ends, blank lines, a byte-order mark and a last line without a newline are all in order.
    ``blank_lines`` is told of every line.
    """
    mean_line = 0.0  # of the chunk before, at first of its beginning: most files are alike from end to end
    chunks = _chunks if onlooker is None else _chunks_ahead
    for data, offset, got in chunks(fd, size, name, chunk, _AHEAD):
        array = np.frombuffer(data, np.uint8, got)
        inside = min(got, chunk)
        if offset == 0:
            head = min(inside, _HEAD)
            mean_line = head / (data.count(b"\n", 0, head) + 1)
        far_apart = mean_line > _LONG_LINE
        breaks = _breaks_by_search(data, inside) if far_apart else np.flatnonzero(array[:inside] == _NEWLINE)
        mean_line = inside / (len(breaks) + 1)
        starts = breaks + 1
        if offset == 0:
            starts = np.concatenate([[len(_BOM) if data.startswith(_BOM) else 0], starts])
        starts = starts[starts < got]  # after the file's last newline there is no line
        blank = _blank(fd, array, starts, offset, size)
        starts = starts[~blank]
        if blank_lines is not None:
            blank_lines.saw(blank)
        if onlooker is not None:
            onlooker(memoryview(data)[:inside], offset, starts.tolist())
        yield starts + offset
    yield np.array([size], np.int64)


def _breaks_by_search(data: bytearray, stop: int) -> Offsets:
    """Where the newlines are, one search for each: the quicker way when they are far apart."""
    found: list[int] = []
    add, index = found.append, data.index
    with contextlib.suppress(ValueError):  # there is none after the last: told once, not asked each time
        at = -1
        while True:
            at = index(_NEWLINE, at + 1, stop)
            add(at)
    return np.array(found, np.int64)


Chunks = Iterator[tuple[bytearray, int, int]]


def _chunks(fd: int, size: int, name: str, chunk: int, extra: int = 0) -> Chunks:
    """The file in pieces: buffer (the same each time), offset, bytes in it (``extra`` belong to the next).

    One thread: where little is done with a piece, reading ahead was measured to cost more than it saves.
    """
    report = Progress(f"indexing {name}", size)
    buffer = bytearray(min(chunk, size) + extra)
    for offset in range(0, size, chunk):
        got = _read_into(fd, buffer, offset, min(len(buffer), size - offset), name)
        yield buffer, offset, got
        report(offset + got)


def _chunks_ahead(fd: int, size: int, name: str, chunk: int, extra: int = 0) -> Chunks:
    """As :func:`_chunks`, with two buffers in turn: the next piece is read while one is looked at."""
    report = Progress(f"indexing {name}", size)
    offsets = range(0, size, chunk)
    buffers = [bytearray(min(chunk, size) + extra) for _ in offsets[:2]]

    def read(pool: ThreadPoolExecutor, number: int) -> Future[int]:
        buffer, offset = buffers[number % 2], number * chunk
        reading = pool.submit(_read_into, fd, buffer, offset, min(len(buffer), size - offset), name)
        time.sleep(0)  # the thread needs the interpreter for a moment, to begin
        return reading

    with ThreadPoolExecutor(1) as pool:
        reading = read(pool, 0) if offsets else None
        for number, offset in enumerate(offsets):
            assert reading is not None
            got = reading.result()
            reading = read(pool, number + 1) if number + 1 < len(offsets) else None
            yield buffers[number % 2], offset, got
            report(offset + got)


def _blank(fd: int, data: npt.NDArray[np.uint8], starts: Offsets, offset: int, size: int) -> np.ndarray:
    """Which of the lines at ``starts`` hold white space only."""
    first = data[starts]
    second = data[np.minimum(starts + 1, len(data) - 1)]
    blank: np.ndarray = (first == _NEWLINE) | ((first == _RETURN) & (second == _NEWLINE))
    for i in np.flatnonzero((first <= _SPACE) & ~blank):  # rare: a line that begins with white space
        blank[i] = _is_blank_line(fd, offset + int(starts[i]), size)
    return blank


def _is_blank_line(fd: int, start: int, size: int) -> bool:
    while start < size:
        piece = os.pread(fd, 4096, start)
        line, newline, _ = piece.partition(b"\n")
        if line.strip():
            return False
        if newline or not piece:
            return True
        start += len(piece)
    return True


def scan_array(fd: int, size: int, name: str, chunk: int = CHUNK) -> Iterator[Offsets]:
    """Offsets of the elements of the JSON array that the file holds, then the offset of its ``]``.

    Only the outermost structure is looked at (quotes, escapes, brackets, commas); whether an element is valid
    is found out when it is parsed.

    Raises:
        ConfigError: the file does not hold one whole array.
    """
    state = _ArrayState(name)
    for data, offset, got in _chunks(fd, size, name, chunk):
        yield state.feed(np.frombuffer(data, np.uint8, got), offset)
    yield state.finish()


class _ArrayState:
    """What the scan of an array carries from one chunk to the next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.depth = 0
        self.in_string = False
        self.escaped = False  # the chunk's first byte follows an odd run of backslashes
        self.opened = False
        self.seen_first = False
        self.closed_at = -1
        self.last_start = 0
        self.first: int | None = None  # after '[', until we know that an element follows and not ']'

    def feed(self, data: npt.NDArray[np.uint8], offset: int) -> Offsets:
        if not self.opened:
            self._check_opening(data, offset)
        quotes = self._quotes(data)
        marks = np.flatnonzero(_STRUCTURAL[data])
        # A mark is structure when an even number of quotes lies before it.
        outside = (np.searchsorted(quotes, marks) + self.in_string) % 2 == 0
        marks = marks[outside]
        self.in_string = bool((len(quotes) + self.in_string) % 2)
        step = _DEPTH_STEP[data[marks]]
        after = self.depth + np.cumsum(step)
        if len(after):
            self.depth = int(after[-1])
        self._check_closing(data, marks, after, step, offset)
        if self.first is None and not self.seen_first and len(marks):
            self.first = offset + int(marks[0]) + 1
        # After each comma between elements begins the next one.
        starts: Offsets = marks[(after == 1) & (data[marks] == ord(","))] + (offset + 1)
        if self.first is not None:
            follows = data[max(0, self.first - offset) :].tobytes().lstrip()
            if follows:
                if not follows.startswith(b"]"):
                    starts = np.concatenate([[self.first], starts])
                self.first, self.seen_first = None, True
        if len(starts):
            self.last_start = int(starts[-1])
        return starts

    def _quotes(self, data: npt.NDArray[np.uint8]) -> Offsets:
        """Positions of the quotes that open or close a string, that is, which no backslash escapes."""
        is_quote = data == _QUOTE
        slashes = np.flatnonzero(data == _BACKSLASH)
        if self.escaped:
            is_quote[0] = False
            slashes = slashes[slashes != 0]
        self.escaped = False
        if len(slashes):
            first_of_run = np.concatenate([[True], np.diff(slashes) != 1])
            run = np.cumsum(first_of_run) - 1
            lengths = np.bincount(run)
            behind = slashes[first_of_run] + lengths
            behind = behind[lengths % 2 == 1]
            if len(behind) and behind[-1] == len(data):
                self.escaped = True
                behind = behind[:-1]
            is_quote[behind] = False
        return np.flatnonzero(is_quote)

    def _check_opening(self, data: npt.NDArray[np.uint8], offset: int) -> None:
        head = data.tobytes()
        head = (head.removeprefix(_BOM) if offset == 0 else head).lstrip()
        if not head:
            return
        if not head.startswith(b"["):
            hint = " (if it is one object per line, name it .jsonl)" if head.startswith(b"{") else ""
            raise ConfigError(f"{self.name}: expected a JSON array of rows, found {head[:20]!r}{hint}")
        self.opened = True

    def _check_closing(
        self, data: npt.NDArray[np.uint8], marks: Offsets, after: Offsets, step: np.ndarray, offset: int
    ) -> None:
        rest = 0
        if self.closed_at < 0:
            closing = np.flatnonzero((after == 0) & (step == -1))
            if not len(closing):
                return
            self.closed_at = offset + int(marks[closing[0]])
            rest = int(marks[closing[0]]) + 1
        if data[rest:].tobytes().strip():
            raise ConfigError(f"{self.name}: text after the array's closing bracket (byte {self.closed_at})")

    def finish(self) -> Offsets:
        if not self.opened:
            raise ConfigError(f"{self.name}: expected a JSON array of rows, found an empty file")
        if self.closed_at < 0:
            raise ConfigError(
                f"{self.name}: the JSON array is not closed: the file is cut off, or a bracket or quote is "
                f"missing in the element at byte {self.last_start} or before it"
            )
        return np.array([self.closed_at], np.int64)


_STRUCTURAL = np.zeros(256, np.bool_)
_STRUCTURAL[list(b"{}[],")] = True
_DEPTH_STEP = np.zeros(256, np.int64)
_DEPTH_STEP[list(b"{[")] = 1
_DEPTH_STEP[list(b"}]")] = -1


def _read_into(fd: int, buffer: bytearray, offset: int, length: int, name: str) -> int:
    """Fill ``buffer`` from ``offset``; a file that has become shorter meanwhile is an error, not a crash."""
    view = memoryview(buffer)
    got = 0
    while got < length:
        n = os.preadv(fd, [view[got:length]], offset + got)
        if n == 0:
            raise ConfigError(
                f"{name}: the file became shorter while it was being read (byte {offset + got})"
            )
        got += n
    return got


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
        offsets: the beginnings, ascending, and after them the end of the last row; an array in memory, or a
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
        """First byte of a row, and the byte after it."""
        start, stop = self._offsets[row : row + 2].tolist()
        self._looked_up += 1
        if self._looked_up >= self._LOOKUPS:
            self._let_go()
        return start, stop

    def spans(self, rows: Offsets) -> tuple[Offsets, Offsets]:
        """First bytes, and bytes after, of many rows."""
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
            write_atomic(home, lambda file: _write(file, path, layout, fingerprint, onlooker))
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
