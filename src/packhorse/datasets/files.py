"""The documented loaders of a single file: everything, or one rank's share."""

from __future__ import annotations

import os

from packhorse.datasets.rows import Row, gc_paused, open_rows
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
    rows = open_rows(os.fspath(file_path))
    selection = RowSelection(len(rows), sample_ratio, World(rank, world_size), remainder)
    selection.record_losses(rows.name, ledger if ledger is not None else default_ledger())
    parsed: list[Row] = []
    with gc_paused():
        for row in rows.read(selection.rows().tolist()):
            if isinstance(row, BadSample):
                raise row
            parsed.append(row)
    return parsed, len(rows)
