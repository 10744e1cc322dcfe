"""What a counting pass has found, ready to print: one pass over the sidecars, a part at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from packhorse.datasets.count_columns import COUNTS, CountColumns
from packhorse.datasets.meta_file import DatasetConfig
from packhorse.datasets.rows import RowFile
from packhorse.datasets.select import row_key
from packhorse.datasets.sidecar import Sidecar
from packhorse.types import mask_secrets

_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class CountedFile:
    """A data set, its open file, the counts of it, and how many of them an earlier run has made."""

    config: DatasetConfig
    file: RowFile
    sidecar: Sidecar
    taken_over: int = 0


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be counted, and where it stands now: ``train.jsonl:812 (byte 40213)``."""

    key: str
    reason: str
    detail: str
    location: str


@dataclass(frozen=True, slots=True)
class DatasetReport:
    """One data set: sums over all rows of its file.

    Attributes:
        tokens: by kind: ``text``, ``image``, ``video``, ``audio``.
        media: by kind: ``images``, ``videos``, ``audios``.
        longest: the most tokens of a row, ``longest_row`` its key (empty if there is none).
        bad: rows that could not be counted, by reason; some of them in ``examples``.
        unsupervised: rows without a token that is learned; the keys of some in ``unsupervised_rows``.
        taken_over: rows that an earlier run has counted.
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
    unsupervised: int
    unsupervised_rows: tuple[str, ...]
    taken_over: int
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

    @property
    def opening_seconds(self) -> float:
        """For all but the counting: opening processor and files, looking what there is, summing up."""
        return max(0.0, self.seconds - self.counting_seconds)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "seconds": round(self.seconds, 3),
            "counting_seconds": round(self.counting_seconds, 3),
            "counted_rows": self.counted_rows,
            "datasets": [asdict(dataset) | {"total": dataset.total} for dataset in self.datasets],
            "all": self.totals(),
            "verified": None if self.verified is None else asdict(self.verified),
        }

    def totals(self) -> dict[str, Any]:
        """Sums over the data sets, under the names they have there."""
        every = self.datasets
        longest = max(every, key=lambda one: one.longest, default=None)
        sums = {
            name: sum(getattr(one, name) for one in every)
            for name in ("rows", "total", "supervised", "unsupervised", "patches", "taken_over")
        }
        by_kind = {
            name: _added_up([getattr(one, name) for one in every]) for name in ("tokens", "media", "bad")
        }
        return (
            sums
            | by_kind
            | {
                "longest": 0 if longest is None else longest.longest,
                "longest_row": "" if longest is None else longest.longest_row,
                "off_by": -1
                if any(one.off_by < 0 for one in every)
                else max((one.off_by for one in every), default=0),
            }
        )


def _added_up(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    """Sums by name; a name whose sum is 0 is there too."""
    sums: Counter[str] = Counter()
    for one in counts:
        sums.update(one)
    return dict(sums)


def dataset_report(counted: CountedFile, bad_rows: int = _EXAMPLES) -> DatasetReport:
    """Sum up one sidecar; memory does not grow with its rows.

    Args:
        counted: the data set.
        bad_rows: so many bad rows of each reason are named.
    """
    name, sidecar = counted.config.name, counted.sidecar
    sums: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    examples: list[BadRow] = []
    silent: list[str] = []
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
        nothing_learned = np.flatnonzero(columns.ok & (columns.supervised == 0))
        sums["unsupervised"] += len(nothing_learned)
        silent += [
            row_key(name, first + place) for place in nothing_learned[: _EXAMPLES - len(silent)].tolist()
        ]
        for place in np.flatnonzero(~columns.ok).tolist():
            reason = columns.status[place]
            bad[reason] += 1
            if bad[reason] <= bad_rows:
                where = counted.file.location(first + place)
                examples.append(BadRow(row_key(name, first + place), reason, columns.detail[place], where))
    return DatasetReport(
        name,
        mask_secrets(counted.config.file_name),
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
        sums["unsupervised"],
        tuple(silent),
        counted.taken_over,
        off_by,
    )
