"""Best fit decreasing on the histogram of lengths, and a lower bound on the number of packs.

Packs with the same content are filled together by one move, so the cost depends on the number of distinct
lengths and moves (typically 25,000, 2 microseconds each), not on the number of samples.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.types import Integers


class Histogram(NamedTuple):
    """Distinct lengths, the longest first, and the number of samples of each."""

    lengths: Integers
    counts: Integers

    @classmethod
    def of(cls, lengths: npt.NDArray[np.integer], capacity: int) -> Histogram:
        """Return the histogram of lengths from 1 to ``capacity``."""
        # A table of all lengths is fastest, unless it is much larger than the number of samples.
        if capacity <= 4 * len(lengths) + (1 << 16):
            table = np.bincount(lengths, minlength=1)
            present = np.flatnonzero(table)[::-1]
            return cls(present, table[present])
        values, counts = np.unique(lengths, return_counts=True)
        return cls(values[::-1].astype(np.int64), counts[::-1].astype(np.int64))

    def round_up(self, grain: int) -> Histogram:
        """Return the histogram in units of ``grain``."""
        units = -(-self.lengths // grain)
        starts = np.flatnonzero(np.diff(units, prepend=-1))
        return Histogram(units[starts], np.add.reduceat(self.counts, starts))


class Fill(NamedTuple):
    """How a histogram is packed, as moves over the samples from the longest to the shortest.

    A move puts the next ``width * each`` samples, all of one length, into ``width`` packs starting at
    ``first``: ``each`` into every pack, after the ``depth`` samples that it holds. All packs of a move have
    the same content before it.
    """

    packs: int
    first: Integers
    width: Integers
    each: Integers
    depth: Integers

    def pack_of(self) -> npt.NDArray[np.int32]:
        """Return the pack of each sample, from the longest to the shortest."""
        first = np.repeat(self.first, self.each).astype(np.int32)
        count = np.repeat(self.width, self.each)
        ends = np.cumsum(count)
        packs = np.repeat(first - (ends - count).astype(np.int32), count)
        packs += np.arange(len(packs), dtype=np.int32)
        return packs

    def sizes(self) -> Integers:
        """Return the number of samples of each pack."""
        return self.totals(self.each)

    def totals(self, amounts: Integers) -> Integers:
        """Return for each pack the sum of the amounts of its moves."""
        steps = np.zeros(self.packs + 1, np.int64)
        np.add.at(steps, self.first, amounts)
        np.subtract.at(steps, self.first + self.width, amounts)
        totals: Integers = np.cumsum(steps[:-1])
        return totals

    def lengths(self, histogram: Histogram) -> Integers:
        """Return the length of the samples of each move."""
        samples = self.width * self.each
        length = np.searchsorted(np.cumsum(histogram.counts), np.cumsum(samples) - samples, "right")
        lengths: Integers = histogram.lengths[length]
        return lengths


Group = tuple[int, int, int]
"""Packs with the same content: the first, how many, and how many samples each holds."""

Move = tuple[int, int, int, int]
"""First pack, width, each and depth: see :class:`Fill`."""


def best_fit(histogram: Histogram, capacity: int, free_spaces: Integers | None = None) -> Fill:
    """Best fit decreasing: each sample, the longest first, goes where it leaves the least space.

    Equals the algorithm on single samples: the tightest pack with space for a length takes as many of it as
    fit before another pack is used, so all packs of a group are filled in one move. Packs with
    ``free_spaces`` exist already: they come first, and ``depth`` counts from their content.
    """
    groups: dict[int, list[Group]] = {}
    moves: list[Move] = []
    lengths, counts = histogram.lengths.tolist(), histogram.counts.tolist()
    large = 0
    if free_spaces is None:  # each sample of more than half a pack has its own
        large = int((2 * histogram.lengths > capacity).sum())
        firsts = [0, *accumulate(counts[:large])]
        packs = firsts[large]
        moves = [(first, count, 1, 0) for first, count in zip(firsts, counts[:large], strict=False)]
        groups = {
            capacity - length: [(first, count, 1)]
            for length, first, count in zip(lengths[:large], firsts, counts, strict=False)
            if length < capacity
        }
    else:
        packs = len(free_spaces)
        for pack, space in enumerate(free_spaces.tolist()):
            groups.setdefault(space, []).append((pack, 1, 0))
    spaces = sorted(groups)  # the keys of groups
    changed: list[tuple[int, Group]] = []
    for length, left in zip(lengths[large:], counts[large:], strict=True):
        start = end = bisect_left(spaces, length)
        while left and end < len(spaces):
            space = spaces[end]
            stack = groups[space]
            left = _serve(stack, space, length, left, moves, changed)
            if stack:
                break
            del groups[space]
            end += 1
        if end > start:
            del spaces[start:end]
        if left:
            count = -(-left // (capacity // length))
            _serve([(packs, count, 0)], capacity, length, left, moves, changed)
            packs += count
        for space, group in changed:
            if space in groups:
                groups[space].append(group)
            elif space:
                groups[space] = [group]
                insort(spaces, space)
        changed.clear()
    flat = np.fromiter(chain.from_iterable(moves), np.int64, 4 * len(moves)).reshape(-1, 4)
    return Fill(packs, *np.ascontiguousarray(flat.T))


def _serve(
    stack: list[Group],
    space: int,
    length: int,
    left: int,
    moves: list[Move],
    changed: list[tuple[int, Group]],
) -> int:
    """Put ``left`` samples of a length into the groups on the stack; return how many did not fit.

    Filled groups move from the stack to ``changed``, with their remaining space.
    """
    each = space // length
    while stack and left:
        first, count, depth = stack.pop()
        if left <= each:  # one pack takes them all
            if count > 1:
                stack.append((first + 1, count - 1, depth))
            moves.append((first, 1, left, depth))
            changed.append((space - left * length, (first, 1, depth + left)))
            return 0
        served = left // each
        if served < count:
            stack.append((first + served, count - served, depth))
        else:
            served = count
        moves.append((first, served, each, depth))
        changed.append((space - each * length, (first, served, depth + each)))
        left -= served * each
    return left


def lower_bound(histogram: Histogram, capacity: int) -> int:
    """Return a lower bound on the number of packs (Martello and Toth's L2).

    Each sample of more than half a pack needs its own; the shorter samples of at least ``k`` tokens that do
    not fit next to those need further packs. The bound is the maximum over ``k``.
    """
    lengths, counts = histogram.lengths[::-1], histogram.counts[::-1]
    if not len(lengths):
        return 0
    samples = np.concatenate([[0], np.cumsum(counts)])
    tokens = np.concatenate([[0], np.cumsum(counts * lengths)])
    half = int(np.searchsorted(lengths, capacity // 2, "right"))
    smallest = np.concatenate([[0], lengths[:half]])
    low = np.searchsorted(lengths, smallest, "left")
    high = np.maximum(np.searchsorted(lengths, capacity - smallest, "right"), half)
    free = (samples[high] - samples[half]) * capacity - (tokens[high] - tokens[half])
    without_space = tokens[half] - tokens[low] - free
    return int((samples[-1] - samples[half] + np.maximum(0, -(-without_space // capacity))).max())
