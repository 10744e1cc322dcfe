"""The index of a JSON file: the byte offset of each row, built once and memory-mapped.

An index has eight bytes per row. It lies next to its file (``train.jsonl.phidx``), or in the cache if that
folder cannot be written; all processes of a machine share its pages. It is valid while the file has the same
size, modification time and first and last 64 KiB. A damaged index is rebuilt.
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
from dataclasses import asdict
from logging import getLogger
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from packhorse.errors import ConfigError
from packhorse.types import Flags
from packhorse.utils.files import Fingerprint, cache_folder, cache_lock, digest, write_atomic
from packhorse.utils.progress import Progress

Offsets = npt.NDArray[np.int64]

CHUNK = 1 << 20
_HEAD = 1 << 16  # bytes from which the length of lines is estimated
_LONG_LINE = 200  # bytes, above which searching for each newline is faster than comparing all bytes
_NEWLINE, _RETURN, _SPACE, _QUOTE, _BACKSLASH = b'\n\r "\\'
_BOM = b"\xef\xbb\xbf"
_AHEAD = 4  # bytes read beyond a chunk: a line may start right after it, or after a byte-order mark

LineObserver = Callable[[memoryview, int, list[int]], None]
"""Called with each piece of a file while it is scanned: its bytes, its offset, the starts of lines in it."""


def file_error(path: str | os.PathLike[str], problem: str) -> ConfigError:
    """Return the error for a file that cannot be used."""
    return ConfigError(f"{path}: {problem}", path=path)


class EmptyLines:
    """Records whether any row follows a blank line; if none does, row ``i`` is line ``i + 1`` of its file."""

    def __init__(self) -> None:
        self.before_rows = self._any = False

    def update(self, empty: Flags) -> None:
        """Add the next lines of the file: True for a blank line, False for a row."""
        first = int(empty.argmax()) if empty.any() else len(empty)
        self.before_rows |= not empty[0 if self._any else first :].all()
        self._any |= first < len(empty)


def scan_lines(
    fd: int,
    size: int,
    name: str,
    chunk: int = CHUNK,
    observer: LineObserver | None = None,
    empty_lines: EmptyLines | None = None,
) -> Iterator[Offsets]:
    """Yield the offsets of the lines of a JSONL file without blank lines, then the size of the file.

    CRLF line ends, blank lines, a byte-order mark and a last line without a newline are accepted.
    ``empty_lines`` is updated with every line.
    """
    mean_line = 0.0  # of the chunk before; most files are uniform
    for data, offset, got in _chunks(fd, size, name, chunk, _AHEAD, ahead=observer is not None):
        array = np.frombuffer(data, np.uint8, got)
        inside = min(got, chunk)
        if offset == 0:
            head = min(inside, _HEAD)
            mean_line = head / (data.count(b"\n", 0, head) + 1)
        by_search = mean_line > _LONG_LINE
        breaks = _search_breaks(data, inside) if by_search else np.flatnonzero(array[:inside] == _NEWLINE)
        mean_line = inside / (len(breaks) + 1)
        starts = breaks + 1
        if offset == 0:
            starts = np.concatenate([[len(_BOM) if data.startswith(_BOM) else 0], starts])
        starts = starts[starts < got]  # after the file's last newline there is no line
        empty = _find_empty_lines(fd, array, starts, offset, size)
        starts = starts[~empty]
        if empty_lines is not None:
            empty_lines.update(empty)
        if observer is not None:
            observer(memoryview(data)[:inside], offset, starts.tolist())
        yield starts + offset
    yield np.array([size], np.int64)


def _search_breaks(data: bytearray, stop: int) -> Offsets:
    """Return the offsets of newlines, by one search for each: faster if they are far apart."""
    offsets: list[int] = []
    append, index = offsets.append, data.index
    with contextlib.suppress(ValueError):  # raised once, after the last
        offset = -1
        while True:
            offset = index(_NEWLINE, offset + 1, stop)
            append(offset)
    return np.array(offsets, np.int64)


def _chunks(
    fd: int, size: int, name: str, chunk: int, extra: int = 0, ahead: bool = False
) -> Iterator[tuple[bytearray, int, int]]:
    """Yield the file in pieces: buffer, offset, bytes in it (``extra`` belong to the next).

    ``ahead`` reads the next piece in a thread, into a second buffer. It pays if pieces are parsed; it costs
    more than it saves if they are only scanned.
    """
    report = Progress(f"indexing {name}", size)
    offsets = range(0, size, chunk)
    buffers = [bytearray(min(chunk, size) + extra) for _ in offsets[: 1 + ahead]]

    def read(number: int) -> int:
        buffer, offset = buffers[number % len(buffers)], number * chunk
        return _read_into(fd, buffer, offset, min(len(buffer), size - offset), name)

    with ThreadPoolExecutor(1) if ahead else contextlib.nullcontext() as pool:
        reading: Future[int] | None = None
        for number, offset in enumerate(offsets):
            got = read(number) if reading is None else reading.result()
            if pool is not None and number + 1 < len(offsets):
                reading = pool.submit(read, number + 1)
                time.sleep(0)  # lets the thread start
            yield buffers[number % len(buffers)], offset, got
            report(offset + got)


def _find_empty_lines(fd: int, data: npt.NDArray[np.uint8], starts: Offsets, offset: int, size: int) -> Flags:
    """Return which of the lines at ``starts`` are white space only."""
    first = data[starts]
    second = data[np.minimum(starts + 1, len(data) - 1)]
    empty: Flags = (first == _NEWLINE) | ((first == _RETURN) & (second == _NEWLINE))
    for i in np.flatnonzero((first <= _SPACE) & ~empty):  # rare: lines that begin with white space
        empty[i] = _is_empty_line(fd, offset + int(starts[i]), size)
    return empty


def _is_empty_line(fd: int, start: int, size: int) -> bool:
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
    """Yield the offsets of the elements of the file's JSON array, then the offset of its ``]``.

    Reads only the structure (quotes, escapes, brackets, commas); elements are validated when they are parsed.
    """
    state = _ArrayState(name)
    for data, offset, got in _chunks(fd, size, name, chunk):
        yield state.feed(np.frombuffer(data, np.uint8, got), offset)
    yield state.finish()


class _ArrayState:
    """State of the scan of an array between two chunks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.depth = 0
        self.in_string = False
        self.escaped = False  # the chunk's first byte follows an odd run of backslashes
        self.opened = False
        self.seen_first = False
        self.closed_at = -1
        self.last_start = 0
        self.first: int | None = None  # offset after '[', until it is known whether an element or ']' follows

    def feed(self, data: npt.NDArray[np.uint8], offset: int) -> Offsets:
        if not self.opened:
            self._check_opening(data, offset)
        quotes = self._quotes(data)
        marks = np.flatnonzero(_STRUCTURAL[data])
        # A mark is part of the structure if an even number of quotes precedes it.
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
        # An element begins after each comma between elements.
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
        """Return the positions of quotes that no backslash escapes."""
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
            escaped = slashes[first_of_run] + lengths
            escaped = escaped[lengths % 2 == 1]
            if len(escaped) and escaped[-1] == len(data):
                self.escaped = True
                escaped = escaped[:-1]
            is_quote[escaped] = False
        return np.flatnonzero(is_quote)

    def _check_opening(self, data: npt.NDArray[np.uint8], offset: int) -> None:
        head = data.tobytes()
        head = (head.removeprefix(_BOM) if offset == 0 else head).lstrip()
        if not head:
            return
        if not head.startswith(b"["):
            hint = " (if it is one object per line, name it .jsonl)" if head.startswith(b"{") else ""
            raise file_error(self.name, f"expected a JSON array of rows, found {head[:20]!r}{hint}")
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
            raise file_error(self.name, f"text after the array's closing bracket (byte {self.closed_at})")

    def finish(self) -> Offsets:
        if not self.opened:
            raise file_error(self.name, "expected a JSON array of rows, found an empty file")
        if self.closed_at < 0:
            raise file_error(
                self.name,
                "the JSON array is not closed: the file is cut off, or a bracket or quote is missing in the "
                f"element at byte {self.last_start} or before it",
            )
        return np.array([self.closed_at], np.int64)


_STRUCTURAL = np.zeros(256, np.bool_)
_STRUCTURAL[list(b"{}[],")] = True
_DEPTH_STEP = np.zeros(256, np.int64)
_DEPTH_STEP[list(b"{[")] = 1
_DEPTH_STEP[list(b"}]")] = -1


def _read_into(fd: int, buffer: bytearray, offset: int, length: int, name: str) -> int:
    """Fill ``buffer`` from ``offset``; raise if the file has become shorter meanwhile."""
    view = memoryview(buffer)
    got = 0
    while got < length:
        n = os.preadv(fd, [view[got:length]], offset + got)
        if n == 0:
            raise file_error(name, f"the file became shorter while it was being read (byte {offset + got})")
        got += n
    return got


logger = getLogger(__name__)

Layout = Literal["lines", "array"]

_FORMAT = "packhorse-index-2"
_HEADER_BYTES = 512
# With an observer, the next piece is read in another thread. Larger pieces need fewer switches; they take two
# buffers of this size, and the offsets of the lines in one.
_OBSERVED_CHUNK = 1 << 23
# A smaller file is indexed in milliseconds: not worth a second file next to it.
KEEP_FROM_BYTES = 1 << 22


class RowIndex:
    """The byte offsets of the rows of a file: row ``i`` is from ``span(i)[0]`` to ``span(i)[1]``.

    Args:
        offsets: the starts, ascending, and the end of the last row; an array in memory, or a memory map, of
            which only few pages are kept resident.
        every_line: whether row ``i`` is line ``i + 1`` of the file.
    """

    # A page fault loads many pages around it, so that even few look-ups make megabytes resident.
    _LOOKUPS = 32

    def __init__(self, offsets: Offsets, *, every_line: bool = False) -> None:
        self.every_line = every_line
        self._offsets = np.asarray(offsets)
        base: Any = offsets.base
        self._map: mmap.mmap | None = base if isinstance(base, mmap.mmap) else None
        self._looked_up = 0

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def span(self, row: int) -> tuple[int, int]:
        """Return the first byte of a row, and the byte after it."""
        start, stop = self._offsets[row : row + 2].tolist()
        self._looked_up += 1
        if self._looked_up >= self._LOOKUPS:
            self._release_pages()
        return start, stop

    def spans(self, rows: Offsets) -> tuple[Offsets, Offsets]:
        """Return the first bytes of rows, and the bytes after them."""
        starts, stops = self._offsets[rows], self._offsets[rows + 1]
        self._release_pages()
        return starts, stops

    def checksum(self, size: int) -> int | None:
        """Return the CRC of all offsets, as in the index file: about a millisecond for 100,000 rows.

        None if they are invalid: not ascending, or outside of a file of ``size`` bytes.
        """
        crc, last = 0, 0
        for first in range(0, len(self._offsets), 1 << 20):
            piece = self._offsets[first : first + (1 << 20)]
            if piece[0] < last or (piece[1:] < piece[:-1]).any():
                return None
            crc, last = zlib.crc32(np.ascontiguousarray(piece).data, crc), int(piece[-1])
            self._release_pages()
        return crc if last <= size else None

    def _release_pages(self) -> None:
        # They stay in the system's cache, but no longer count as this process's memory.
        self._looked_up = 0
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def open_index(
    path: str, layout: Layout, index_dir: str | None = None, observer: LineObserver | None = None
) -> tuple[RowIndex, Fingerprint]:
    """Return the index of the rows of a local file, and the state of the file that it is valid for.

    The index is kept in ``index_dir`` only, if given. ``observer`` is called with the lines if the file has
    to be scanned; again from the beginning if the index could not be saved.
    """
    fingerprint = Fingerprint.of(path)
    if fingerprint.size < KEEP_FROM_BYTES:
        return _scan(path, layout, fingerprint, observer), fingerprint
    targets = _index_paths(path, index_dir)
    index = _load_first(targets, layout, fingerprint)
    if index is None:
        # With an observer the file is read anyway: do not wait for another process.
        with cache_lock(f"index {targets[0]}") if observer is None else contextlib.nullcontext():
            index = _load_first(targets, layout, fingerprint)  # of another process
            if index is None:
                index = _build_and_save(path, layout, fingerprint, targets, observer)
    return index, fingerprint


def _index_paths(path: str, index_dir: str | None) -> list[Path]:
    source = Path(os.path.realpath(path))
    in_folder = f"{source.name}.{digest(str(source))[:12]}.phidx"
    if index_dir is not None:
        return [Path(index_dir) / in_folder]
    return [source.with_name(f"{source.name}.phidx"), cache_folder() / "indexes" / in_folder]


def _load_first(targets: list[Path], layout: Layout, fingerprint: Fingerprint) -> RowIndex | None:
    indexes = (_load(target, layout, fingerprint) for target in targets)
    return next((index for index in indexes if index is not None), None)


def _build_and_save(
    path: str, layout: Layout, fingerprint: Fingerprint, targets: list[Path], observer: LineObserver | None
) -> RowIndex:
    for target in targets:
        try:
            write_atomic(target, lambda file: _write(file, path, layout, fingerprint, observer))
        except OSError as error:
            # Read-only folder, no space left, …: try the next folder, then memory.
            logger.info("cannot keep the index of %s at %s (%s)", path, target, error)
            continue
        if (index := _load(target, layout, fingerprint)) is not None:
            return index
    logger.warning("no folder to keep the index of %s in: holding it in memory", path)
    return _scan(path, layout, fingerprint, observer)


def _scan(path: str, layout: Layout, fingerprint: Fingerprint, observer: LineObserver | None) -> RowIndex:
    empty_lines = EmptyLines()
    offsets = np.concatenate(list(_pieces(path, layout, fingerprint.size, observer, empty_lines)))
    return RowIndex(offsets, every_line=layout == "lines" and not empty_lines.before_rows)


def _pieces(
    path: str, layout: Layout, size: int, observer: LineObserver | None, empty_lines: EmptyLines
) -> Iterator[Offsets]:
    fd = os.open(path, os.O_RDONLY)
    try:
        if layout == "array":
            yield from scan_array(fd, size, path)
        else:
            chunk = CHUNK if observer is None else _OBSERVED_CHUNK
            yield from scan_lines(fd, size, path, chunk, observer, empty_lines)
    finally:
        os.close(fd)


def _write(
    file: IO[bytes], path: str, layout: Layout, fingerprint: Fingerprint, observer: LineObserver | None
) -> None:
    file.write(b" " * _HEADER_BYTES)
    count = crc = 0
    empty_lines = EmptyLines()
    for piece in _pieces(path, layout, fingerprint.size, observer, empty_lines):
        data = piece.astype("<i8").tobytes()
        file.write(data)
        count += len(piece)
        crc = zlib.crc32(data, crc)
    every_line = layout == "lines" and not empty_lines.before_rows
    header = _header(layout, fingerprint) | {"offsets": count, "crc": crc, "every_line": every_line}
    file.seek(0)
    file.write(json.dumps(header).encode())


def _header(layout: Layout, fingerprint: Fingerprint) -> dict[str, Any]:
    return {"format": _FORMAT, "layout": layout, **asdict(fingerprint)}


def _load(path: Path, layout: Layout, fingerprint: Fingerprint) -> RowIndex | None:
    """Return the index at ``path``; None if it is missing, damaged, or of another state of the file."""
    try:
        with open(path, "rb") as file:
            header = json.loads(file.read(_HEADER_BYTES))
            length = os.fstat(file.fileno()).st_size
    except (OSError, ValueError, RecursionError):
        return None
    wanted = _header(layout, fingerprint)
    if not isinstance(header, dict) or any(header.get(name) != value for name, value in wanted.items()):
        return None
    count, every_line = header.get("offsets"), header.get("every_line")
    if not (isinstance(every_line, bool) and isinstance(count, int) and count >= 1):
        return None
    if length != _HEADER_BYTES + 8 * count:
        return None
    offsets = np.memmap(path, dtype="<i8", mode="r", offset=_HEADER_BYTES, shape=(count,))
    index = RowIndex(offsets, every_line=every_line)
    crc = index.checksum(fingerprint.size)
    return index if crc is not None and crc == header.get("crc") else None
