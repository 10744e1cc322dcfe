"""Which samples can be in no pack, as far as that is known before one is built: bad rows, too long ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packhorse.datasets.count_columns import CountColumns
from packhorse.datasets.lengths import Ints
from packhorse.datasets.tokenized import PreTokenizedDatasetWrapper
from packhorse.neat_packing_vlm.claims import Claims
from packhorse.neat_packing_vlm.lengths import Lengths
from packhorse.types import Reason

Flags = npt.NDArray[np.bool_]

FOUND_WHEN_COUNTED = "found when it was counted"
"""What the ledger adds where a row is bad already before a plan is made."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The samples of a dataset, before they are planned.

    Attributes:
        lengths: tokens that each takes up in a pack.
        bad: rows that could not be counted.
        too_long: samples that are left out because no pack (or ``max_length``) holds them.
        doubtful: samples that seem to be so, and stay until they are encoded.
        room: the longest that a pack holds.
        counts: exact counts; None where lengths are estimated.
        limit: the most tokens that the dataset encodes; None for no limit.
    """

    lengths: Ints
    bad: Flags
    too_long: Flags
    doubtful: Flags
    room: int
    counts: CountColumns | None = None
    limit: int | None = None

    def why_bad(self, index: int, dataset: Any) -> tuple[Reason, str]:
        """The reason and the detail of a bad row, with its place in the file where the dataset tells."""
        assert self.counts is not None, "only counts tell that a row is bad"
        reason: Reason = self.counts.status[index]
        locations = getattr(getattr(dataset, "dataset", None), "locations", None)
        place = f"; {locations([index])[0]}" if callable(locations) else ""
        return reason, f"{self.counts.detail[index]} ({FOUND_WHEN_COUNTED}){place}"

    def why_too_long(self, index: int) -> str:
        """The detail of a sample that is too long."""
        length = int(self.lengths[index])
        about = "" if self.counts is not None else "an estimated "
        if length <= self.room and self.limit is not None and length + 1 > self.limit:
            return f"{about}{length + 1:,} tokens are more than max_length={self.limit:,}"
        return f"{about}{length + 1:,} tokens ({length:,} after the shift) for packs of {self.room:,}"


def after_shift(tokens: Ints) -> Ints:
    """Labels are shifted before documents are joined, so each takes up one token less."""
    return np.maximum(tokens - 1, 0)


def judge(dataset: Any, found: Lengths, pack_size: int, alignment: int, drop_long: bool) -> Judged:
    """Tell the samples that can be in no pack.

    Args:
        dataset: encodes them.
        found: their lengths, before the shift.
        pack_size: the most tokens of a pack.
        alignment: each sample takes up a multiple of so many.
        drop_long: leave out what only seems to be too long, too.
    """
    room = pack_size - pack_size % alignment
    if found.counts is None:
        lengths = after_shift(found.tokens)
        seems = lengths > room
        nobody = np.zeros(len(lengths), bool)
        return Judged(lengths, nobody, seems & drop_long, seems & (not drop_long), room)
    tokens, surely, limit = _counted(dataset, found.tokens, found.counts, room)
    lengths, bad = after_shift(tokens), ~found.counts.ok
    seems = (lengths > room) & ~bad
    too_long = surely | (seems & drop_long)
    return Judged(lengths, bad, too_long, seems & ~too_long, room, found.counts, limit)


def _counted(dataset: Any, tokens: Ints, counts: CountColumns, room: int) -> tuple[Ints, Flags, int | None]:
    """Tokens, which samples are surely too long, and what the dataset refuses beyond.

    What the fake image adds is known up to a token or two, so samples near the limit are counted with it.
    """
    ours = isinstance(dataset, PreTokenizedDatasetWrapper)
    if ours and dataset.post_tokenize_hook is not None:  # which may add or take away any number
        return tokens, np.zeros(len(tokens), bool), None
    least = np.where(counts.exact, counts.total, np.where(counts.off_by < 0, 0, counts.total - counts.off_by))
    limit = dataset.max_length if ours else None
    if limit is not None and dataset.truncate:
        least, limit = np.where(counts.total > limit, 0, least), None
    most = room + 1 if limit is None else min(room + 1, limit)
    surely = counts.ok & (least > most)
    near = np.flatnonzero((tokens > most) & ~surely & counts.ok & (least > 0))
    claims = Claims(dataset)
    if len(near) and claims.countable:
        tokens = tokens.copy()
        for index in near.tolist():
            total = claims.total(index)
            if total:
                tokens[index], surely[index] = total, total > most
    return tokens, surely, limit
