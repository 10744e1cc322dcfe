"""What a counting pass has found, ready to print: one pass over the sidecars, a part at a time."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from packhorse.datasets.count_columns import COUNTS, OK, CountColumns
from packhorse.datasets.meta_file import DatasetConfig
from packhorse.datasets.rows import RowFile
from packhorse.datasets.select import row_key
from packhorse.datasets.sidecar import Sidecar

_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class CountedFile:
    """A data set, its open file and the counts of it."""

    config: DatasetConfig
    file: RowFile
    sidecar: Sidecar


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be counted."""

    key: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class DatasetReport:
    """One data set: sums over all rows of its file.

    Attributes:
        tokens: by kind: ``text``, ``image``, ``video``, ``audio``.
        media: by kind: ``images``, ``videos``, ``audios``.
        longest: the most tokens of a row, ``longest_row`` its key (empty if there is none).
        bad: rows that could not be counted, by reason; some of them in ``examples``.
        off_by: 0 where all counts are exact; else by how many tokens the worst may be off, -1 if nobody can
            tell.
    """

    name: str
    file: str
    sidecar: str
    rows: int
    tokens: dict[str, int]
    supervised: int
    media: dict[str, int]
    patches: int
    longest: int
    longest_row: str
    bad: dict[str, int]
    examples: tuple[BadRow, ...]
    off_by: int

    @property
    def total(self) -> int:
        """All tokens."""
        return sum(self.tokens.values())


@dataclass(frozen=True, slots=True)
class Verified:
    """Random rows through the real processor.

    Attributes:
        checked: rows that were compared.
        failed: what differs, a line for each row.
        not_encoded: rows whose media could not be decoded, which a header does not tell.
    """

    checked: int = 0
    failed: tuple[str, ...] = ()
    not_encoded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CountReport:
    """A whole pass.

    Attributes:
        datasets: in the order of their names.
        seconds: for all of it, opening the processor included.
        counting_seconds: from the first row that had to be counted to the last.
        counted_rows: how many rows were counted now; the others were taken over.
        verified: None if nothing was verified.
        files: the data sets with their open files and sidecars.
    """

    datasets: tuple[DatasetReport, ...]
    seconds: float
    counting_seconds: float
    counted_rows: int
    verified: Verified | None = None
    files: tuple[CountedFile, ...] = field(default=(), repr=False)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "seconds": round(self.seconds, 3),
            "counting_seconds": round(self.counting_seconds, 3),
            "counted_rows": self.counted_rows,
            "datasets": [asdict(dataset) | {"total": dataset.total} for dataset in self.datasets],
            "verified": None if self.verified is None else asdict(self.verified),
        }


def dataset_report(counted: CountedFile) -> DatasetReport:
    """Sum up one sidecar; memory does not grow with its rows."""
    name, sidecar = counted.config.name, counted.sidecar
    sums: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    examples: list[BadRow] = []
    longest, longest_row, off_by = 0, "", 0
    for number, batch in enumerate(sidecar.batches()):
        first, columns = number * sidecar.part_rows, CountColumns.of(batch)
        sums.update({column: int(getattr(columns, column).sum()) for column in COUNTS})
        unknown = off_by < 0 or bool((columns.off_by < 0).any())
        off_by = -1 if unknown else max(off_by, int(columns.off_by.max(initial=0)))
        total = columns.total
        if total.max(initial=0) > longest:
            place = int(total.argmax())
            longest, longest_row = int(total[place]), row_key(name, first + place)
        if not columns.ok.all():
            bad.update(columns.status[~columns.ok].tolist())
            _add_examples(examples, batch, name, first)
    return DatasetReport(
        name,
        counted.config.file_name,
        str(sidecar.path),
        len(sidecar),
        {kind: sums[kind] for kind in ("text", "image", "video", "audio")},
        sums["supervised"],
        {kind: sums[kind] for kind in ("images", "videos", "audios")},
        sums["patches"],
        longest,
        longest_row,
        dict(bad.most_common()),
        tuple(examples),
        off_by,
    )


def _add_examples(examples: list[BadRow], batch: Any, dataset: str, first: int) -> None:
    """The first few bad rows of each reason."""
    statuses = batch.column("status").to_pylist()
    for place in np.flatnonzero([status != OK for status in statuses]).tolist():
        reason = statuses[place]
        if sum(known.reason == reason for known in examples) < _EXAMPLES:
            detail = batch.column("detail")[place].as_py()
            examples.append(BadRow(row_key(dataset, first + place), reason, detail))
