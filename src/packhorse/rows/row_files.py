"""The documented loaders of a single file: everything, or one rank's share."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import orjson

from packhorse.errors import BadSample, ConfigError, limit_of
from packhorse.ledger import Ledger, default_ledger
from packhorse.rows.fetch import local_file
from packhorse.rows.index import Layout, Offsets, Onlooker, open_index
from packhorse.rows.selection import Remainder, RowSelection
from packhorse.types import World, mask_secrets

Row = dict[str, Any]

MAX_ROW_BYTES = 64 << 20
"""A larger row of a JSON file is not read: mostly a file without line ends, or one that was cut off."""

_BLOCK = 1 << 16  # rows looked up in the index at a time
_PIECE = 1 << 22  # bytes of a row file's content that are in memory at a time
_RUN_BYTES = 1 << 20  # about so many bytes are fetched with one call, if the rows asked for lie close


class RowFile(ABC):
    """Rows of one file by number, from 0.

    Attributes:
        name: the address the caller gave, for messages.
        path: the local file that is read.
    """

    def __init__(self, name: str, path: str) -> None:
        self.name, self.path = name, path

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, row: int) -> Row: ...

    @abstractmethod
    def location(self, row: int) -> str:
        """Where in the file the row is, for a person: ``train.jsonl:812 (byte 40213)``. May scan the file."""

    def quick_location(self, row: int) -> str:
        """As :meth:`location`, but never scans: it may name the row's number in place of its line."""
        return self.location(row)

    def read(self, rows: Iterable[int]) -> Iterator[Row | BadSample]:
        """The rows in the order asked for; one that cannot be parsed comes as its error: none is missed."""
        for row in rows:
            yield self._get_or_error(row)

    def content(self, first: int, stop: int) -> Iterator[bytes]:
        """What the file holds for these rows, in pieces: the same bytes wherever the file lies."""
        for number, row in enumerate(self.read(range(first, stop)), first):
            held = repr(row)
            if isinstance(row, BadSample):
                held = row.detail.removeprefix(f"{self.location(number)}: ")
            yield held.encode("utf-8", "backslashreplace")

    def _get_or_error(self, row: int) -> Row | BadSample:
        try:
            return self[row]
        except BadSample as error:
            return error

    def __iter__(self) -> Iterator[Row]:
        for row in self.read(range(len(self))):
            if isinstance(row, BadSample):
                raise row
            yield row

    def _checked(self, row: int) -> int:
        n = len(self)
        if not -n <= row < n:
            raise IndexError(f"row {row} of {n} in {self.name}")
        return row % n if n else row


class JsonRows(RowFile):
    """A JSONL file, or a JSON array, parsed row by row on access (about 5 microseconds for 1.5 KB).

    Args:
        name: what the caller calls the file.
        path: the local file.
        layout: ``"lines"`` or ``"array"``.
        index_dir: keep the index in this folder instead of beside the file.
        onlooker: see :func:`open_index`.
    """

    def __init__(
        self,
        name: str,
        path: str,
        layout: Layout,
        index_dir: str | None = None,
        onlooker: Onlooker | None = None,
    ) -> None:
        super().__init__(name, path)
        self.layout, self.index_dir = layout, index_dir
        self._open(onlooker)

    def _open(self, onlooker: Onlooker | None = None) -> None:
        self._index, self._fingerprint = open_index(self.path, self.layout, self.index_dir, onlooker)
        self._fd = os.open(self.path, os.O_RDONLY)
        self._max_bytes = limit_of("PACKHORSE_MAX_ROW_BYTES", MAX_ROW_BYTES)
        self._counted = (0, 1)  # up to this byte so many lines were counted

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, row: int) -> Row:
        row = self._checked(row)
        start, stop = self._index.span(row)
        if stop - start > self._max_bytes:
            raise self._too_large(row, stop - start)
        return self._parse(self._fetch(start, stop), row)

    def _too_large(self, row: int, size: int) -> BadSample:
        return BadSample(
            f"{self.location(row)}: the row has {size:,} bytes, more than the limit of {self._max_bytes:,}; "
            "is a line end missing? Split it, or raise PACKHORSE_MAX_ROW_BYTES",
            reason="row_too_large",
            stage="read",
        )

    def raw(self, row: int) -> bytes:
        """The row's own bytes, without what lies between it and the next."""
        return self._shed(self._fetch(*self._index.span(self._checked(row))))

    def read(self, rows: Iterable[int]) -> Iterator[Row | BadSample]:
        """As :meth:`RowFile.read`; neighbouring rows are fetched with one call."""
        numbers = iter(rows)
        while block := list(itertools.islice(numbers, _BLOCK)):
            at = self._all_checked(block)
            starts, stops = self._index.spans(at)
            firsts = _runs(starts, stops)
            first_bytes, after = starts.tolist(), stops.tolist()
            for first, last in zip(firsts, [*firsts[1:], len(block)], strict=True):
                base = first_bytes[first]
                # A run of its own, or one that ends with such a row.
                if after[last - 1] - base > self._max_bytes:
                    yield from map(self._get_or_error, block[first:last])
                    continue
                data = self._fetch(base, after[last - 1])
                if last == first + 1:
                    yield self._row_or_error(data, block[first])
                else:
                    view = memoryview(data)
                    for i in range(first, last):
                        yield self._row_or_error(view[first_bytes[i] - base : after[i] - base], block[i])

    def content(self, first: int, stop: int) -> Iterator[bytes]:
        """As :meth:`RowFile.content`: the rows' own bytes and what lies between them, without parsing."""
        at, end = self._index.span(first)[0], self._index.span(stop - 1)[1]
        while at < end:
            piece = self._fetch(at, min(end, at + _PIECE))
            yield piece
            at += len(piece)

    def _all_checked(self, rows: list[int]) -> Offsets:
        """As :meth:`_checked` for many rows at once."""
        at = np.array(rows, np.int64)
        n = len(self)
        outside = (at < -n) | (at >= n)
        if outside.any():
            self._checked(rows[int(outside.argmax())])  # raises
        return np.where(at < 0, at + n, at)

    def _row_or_error(self, data: bytes | memoryview, row: int) -> Row | BadSample:
        if self.layout == "lines":  # the short way, for millions of good rows
            try:
                value = orjson.loads(data)
            except orjson.JSONDecodeError:
                value = None
            if type(value) is dict:
                return value
        try:
            return self._parse(data, self._checked(row))
        except BadSample as error:
            return error

    def location(self, row: int) -> str:
        """File, line and byte offset; in a file with blank lines this counts the newlines before it."""
        row = self._checked(row)
        if self.layout == "array" or self._index.every_line:
            return self.quick_location(row)
        start = self._index.span(row)[0]
        offset, line = self._counted if self._counted[0] <= start else (0, 1)
        while offset < start:
            piece = os.pread(self._fd, min(1 << 22, start - offset), offset)
            line += piece.count(b"\n")
            offset += len(piece) or start  # a file that has become shorter has no more lines
        # Bad rows mostly come in ascending order: go on counting from here next time.
        self._counted = (start, line)
        return f"{self.name}:{line} (byte {start})"

    def quick_location(self, row: int) -> str:
        """File, byte offset, and the line if every line is a row, else the number of the row."""
        row = self._checked(row)
        start = self._index.span(row)[0]
        if self._index.every_line:
            return f"{self.name}:{row + 1} (byte {start})"
        what = "element" if self.layout == "array" else "row"
        return f"{self.name}, {what} {row} (byte {start})"

    def _fetch(self, start: int, stop: int) -> bytes:
        data = os.pread(self._fd, stop - start, start)
        while len(data) < stop - start:
            more = os.pread(self._fd, stop - start - len(data), start + len(data))
            if not more:
                raise ConfigError(f"{self.name}: the file is shorter than when it was opened; open it again")
            data += more
        return data

    def _shed(self, data: bytes | memoryview) -> bytes:
        """A row's span without what lies between it and the next: white space, the comma of an array."""
        row = bytes(data).strip()
        return row if self.layout == "lines" else row.removesuffix(b",").rstrip()

    def _parse(self, data: bytes | memoryview, row: int) -> Row:
        try:
            # The parser itself takes white space after a row.
            value = orjson.loads(data if self.layout == "lines" else self._shed(data))
        except orjson.JSONDecodeError:
            value = self._parse_leniently(self._shed(data), row)
        if type(value) is dict:
            return value
        raise self._malformed(row, f"expected an object, found {type(value).__name__}")

    def _parse_leniently(self, data: bytes, row: int) -> Any:
        """What orjson refuses but Python's parser takes (NaN, huge integers); else say what is wrong."""
        try:
            value = json.loads(data.decode("utf-8"))
            # A lone surrogate is accepted here but by no tokenizer later.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeDecodeError as error:
            raise self._malformed(row, f"not UTF-8: {error}") from error
        except UnicodeEncodeError as error:
            raise self._malformed(row, f"a lone surrogate escape: {error}") from error
        except (ValueError, RecursionError) as error:
            raise self._malformed(row, f"not valid JSON: {error}") from error
        return value

    def _malformed(self, row: int, what: str) -> BadSample:
        detail = f"{self.location(row)}: {what}"
        stat = os.stat(self.path)
        if (stat.st_size, stat.st_mtime_ns) != (self._fingerprint.size, self._fingerprint.mtime_ns):
            detail += " (the file has changed since it was opened)"
        return BadSample(detail, reason="malformed_row", stage="read")

    def __getstate__(self) -> dict[str, Any]:
        kept = ("name", "path", "layout", "index_dir", "_fingerprint")
        return {attribute: getattr(self, attribute) for attribute in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        expected = self._fingerprint
        self._open()
        if self._fingerprint != expected:
            raise ConfigError(f"{self.name}: the file has changed since it was opened by another process")

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # modules may be gone before it
        if (fd := self.__dict__.get("_fd")) is not None:
            close(fd)


def _runs(starts: Offsets, stops: Offsets) -> list[int]:
    """Which of the rows begin a run, that is, a stretch of the file to fetch with one call.

    A row goes on with the run before it if it lies after it, with no wider gap between than both are worth;
    runs are ended after about ``_RUN_BYTES``.
    """
    sizes = stops - starts
    gaps = starts[1:] - stops[:-1]
    begins = np.ones(len(starts), np.bool_)
    begins[1:] = (gaps < 0) | (gaps > sizes[1:] + sizes[:-1])
    begins[1:] |= stops[1:] // _RUN_BYTES != stops[:-1] // _RUN_BYTES
    return np.flatnonzero(begins).tolist()


def open_rows(address: str, index_dir: str | None = None, onlooker: Onlooker | None = None) -> RowFile:
    """Open a file of rows by its name.

    ``.jsonl`` and ``.ndjson`` are read by line, ``.parquet`` by row, everything else is taken for a JSON
    array; each may end in ``.gz`` or ``.zst`` and may be any fsspec address.

    An ``onlooker`` sees the lines of a JSONL file if it has to be scanned now, see :func:`open_index`.

    Raises:
        FileNotFoundError: nothing is there.
        ConfigError: (a ``ValueError``) it is not what its name says.
    """
    path, address = local_file(address), mask_secrets(address)
    if os.path.isdir(path):
        raise ConfigError(f"{address} is a folder, expected a file of rows: name its files, a dataset each")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{address}: no such file")
    if path.endswith(".parquet"):
        from packhorse.rows.parquet import ParquetRows

        return ParquetRows(address, path)
    layout: Layout = "lines" if path.endswith((".jsonl", ".ndjson")) else "array"
    return JsonRows(address, path, layout, index_dir, onlooker)


_gc_lock = threading.Lock()
_gc_holders = 0


def _make_all_old() -> None:
    """Spare the collector a walk over the millions of new objects at once; it sees them in its next full one.

    Moves all objects to the oldest generation, at no cost. Left out if the caller has frozen objects: they
    would be thawed.
    """
    if hasattr(gc, "freeze") and gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()


def _new_gc_lock() -> None:
    # As for the ledger's lock: a fork may copy it while another thread holds it.
    global _gc_lock
    _gc_lock = threading.Lock()


os.register_at_fork(after_in_child=_new_gc_lock)


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """No cyclic garbage collection inside: it is more than half the time of parsing many rows into dicts.

    May be nested and used from several threads; collection resumes when the last one leaves, and stays off
    if the caller had turned it off.
    """
    global _gc_holders
    with _gc_lock:
        if _gc_holders or gc.isenabled():
            _gc_holders += 1
            gc.disable()
            resume = True
        else:
            resume = False
    try:
        yield
    finally:
        if resume:
            with _gc_lock:
                _gc_holders -= 1
                if not _gc_holders:
                    _make_all_old()
                    gc.enable()


def load_json_or_jsonl(file_path: str | os.PathLike[str]) -> list[Row]:
    """All rows of a file: ``.jsonl`` by line (blank lines skipped), ``.parquet``, or else a JSON array.

    Raises:
        ValueError: the file is none of these, or (:class:`BadSample`) a row is malformed; both name the file,
            the latter also line and byte offset.
    """
    with gc_paused():
        return list(open_rows(os.fspath(file_path)))


def load_jsonl_for_rank(
    file_path: str | os.PathLike[str],
    sample_ratio: float,
    rank: int,
    world_size: int,
    *,
    remainder: Remainder = "drop",
    ledger: Ledger | None = None,
) -> tuple[list[Row], int]:
    """One rank's rows of a file; only these are parsed.

    Args:
        file_path: JSONL, or any other file :func:`open_rows` takes.
        sample_ratio: below 1 a fixed draw of rows, above 1 repetitions; see :class:`RowSelection`.
        rank: this process.
        world_size: how many processes share the file; rows are dealt ``[rank::world_size]``.
        remainder: rows that do not divide are recorded and dropped, or kept by the first ranks.
        ledger: where rank 0 records what no rank gets; the process's own if None.

    Returns:
        The parsed rows, and how many rows the file has.
    """
    world = World(rank, world_size)  # before rows are counted by it
    with gc_paused():
        share = _ShareOfLines(rank, world_size) if sample_ratio == 1 else None
        rows = open_rows(os.fspath(file_path), onlooker=share)
        selection = RowSelection(len(rows), sample_ratio, world, remainder)
        selection.record_losses(rows.name, ledger if ledger is not None else default_ledger())
        if share is not None and share.lines:
            return share.rows(rows, len(selection)), len(rows)
        parsed: list[Row] = []
        for row in rows.read(selection.rows().tolist()):
            if isinstance(row, BadSample):
                raise row
            parsed.append(row)
    return parsed, len(rows)


class _ShareOfLines:
    """Parses every ``world_size``-th line of a file while it is scanned for the first time (an onlooker).

    This saves reading the file twice. What the quick parser does not take is left for :meth:`rows`, which
    reads it again the thorough way.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._step = rank, world_size
        self._start_anew()

    def _start_anew(self) -> None:
        self.lines = 0
        self._open_line = b""  # the line that goes on in the next piece
        self._parsed: list[Any] = []

    def __call__(self, data: memoryview, offset: int, starts: list[int]) -> None:
        if offset == 0:
            self._start_anew()
        if not starts:
            self._open_line += data
            return
        if self.lines:
            self._parse_if_ours(self.lines - 1, self._open_line + data[: starts[0]])
        first = (self._rank - self.lines) % self._step
        starts_and_stops = zip(starts[first :: self._step], starts[first + 1 :: self._step], strict=False)
        self._parsed += [_quickly(data[start:stop]) for start, stop in starts_and_stops]
        self._open_line = bytes(data[starts[-1] :])
        self.lines += len(starts)

    def _parse_if_ours(self, line: int, data: bytes) -> None:
        if line % self._step == self._rank:
            self._parsed.append(_quickly(data))

    def rows(self, file: RowFile, count: int) -> list[Row]:
        """The first ``count`` rows of the share, when the whole file has been seen."""
        self._parse_if_ours(self.lines - 1, self._open_line)
        rows = self._parsed[:count]
        for position in [i for i, row in enumerate(rows) if type(row) is not dict]:
            rows[position] = file[self._rank + position * self._step]
        return rows


def _quickly(data: bytes | memoryview) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
