"""Decide which samples can be in no pack before one is built: bad rows and samples that are too long."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packhorse.count.columns import CountColumns
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.plan.lengths import LazyLengths, Lengths, after_shift
from packhorse.types import Flags, Integers, Reason, Rows

FOUND_WHEN_COUNTED = "found when it was counted"
"""What the ledger adds for a row that is bad already before a plan is made."""


@dataclass(frozen=True, slots=True)
class Eligibility:
    """Which samples of a dataset can be packed.

    Attributes:
        lengths: tokens that each takes up in a pack.
        bad: rows that could not be counted.
        too_long: samples that are excluded because they exceed a pack (or ``max_length``).
        doubtful: samples that seem to be too long, and stay until they are encoded.
        capacity: the longest sample that a pack holds.
        counts: exact counts; None if lengths are estimated.
        limit: the most tokens that the dataset encodes; None for no limit.
    """

    lengths: Integers
    bad: Flags
    too_long: Flags
    doubtful: Flags
    capacity: int
    counts: CountColumns | None = None
    limit: int | None = None

    def bad_reason(self, index: int, dataset: Rows) -> tuple[Reason, str]:
        """Return the reason and the detail of a bad row, with its place in the file if known."""
        assert self.counts is not None, "only counts tell that a row is bad"
        reason: Reason = self.counts.status[index]
        locations = getattr(getattr(dataset, "dataset", None), "locations", None)
        place = f"; {locations([index])[0]}" if callable(locations) else ""
        return reason, f"{self.counts.detail[index]} ({FOUND_WHEN_COUNTED}){place}"

    def overlong_reason(self, index: int) -> str:
        """Return the detail of a sample that is too long."""
        length = int(self.lengths[index])
        about = "" if self.counts is not None else "an estimated "
        if length <= self.capacity and self.limit is not None and length + 1 > self.limit:
            return f"{about}{length + 1:,} tokens are more than max_length={self.limit:,}"
        return f"{about}{length + 1:,} tokens ({length:,} after the shift) for packs of {self.capacity:,}"


def check_eligibility(
    dataset: Rows, found: Lengths, pack_size: int, alignment: int, drop_long: bool
) -> Eligibility:
    """Find the samples that can be in no pack.

    Args:
        dataset: encodes them.
        found: their lengths, before the shift.
        pack_size: the most tokens of a pack.
        alignment: the padded length of each sample is a multiple of this.
        drop_long: also exclude samples that only seem to be too long.
    """
    capacity = pack_size - pack_size % alignment
    tokens, limit = found.tokens, None
    bad = surely = np.zeros(len(tokens), np.bool_)
    if found.counts is not None:
        bad = ~found.counts.ok
        tokens, surely, limit = _surely_too_long(dataset, tokens, found.counts, capacity)
    lengths = after_shift(tokens)
    seems = (lengths > capacity) & ~bad
    too_long = surely | (seems & drop_long)
    return Eligibility(lengths, bad, too_long, seems & ~too_long, capacity, found.counts, limit)


def _surely_too_long(
    dataset: Rows, tokens: Integers, counts: CountColumns, capacity: int
) -> tuple[Integers, Flags, int | None]:
    """Return tokens, which samples are surely too long, and the most tokens that the dataset accepts.

    The tokens of the fake image are known up to one or two, so samples near the limit are counted with it.
    """
    wrapper = dataset if isinstance(dataset, PreTokenizedDatasetWrapper) else None
    if wrapper is not None and wrapper.post_tokenize_hook is not None:  # which may add or remove any number
        return tokens, np.zeros(len(tokens), np.bool_), None
    least = np.where(counts.exact, counts.total, np.where(counts.off_by < 0, 0, counts.total - counts.off_by))
    limit = None if wrapper is None else wrapper.max_length
    if wrapper is not None and limit is not None and wrapper.truncate:
        least, limit = np.where(counts.total > limit, 0, least), None
    most = capacity + 1 if limit is None else min(capacity + 1, limit)
    surely = counts.ok & (least > most)
    near = np.flatnonzero((tokens > most) & ~surely & counts.ok & (least > 0))
    lazy = LazyLengths(dataset)
    if len(near) and lazy.countable:
        tokens = tokens.copy()
        for index in near.tolist():
            total = lazy.total(index)
            if total:
                tokens[index], surely[index] = total, total > most
    return tokens, surely, limit
