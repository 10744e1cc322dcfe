"""The documented loaders of a single file: everything, or one rank's share."""

from __future__ import annotations

import os
from typing import Any

import orjson

from packhorse.datasets.rows import Row, RowFile, gc_paused, open_rows
from packhorse.datasets.select import Remainder, RowSelection
from packhorse.errors import BadSample
from packhorse.ledger import Ledger, default_ledger
from packhorse.types import World


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
        remainder: rows that do not divide are recorded and left out, or kept by the first ranks.
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
