"""Exact filling: complete one pack at a time, starting with the longest remaining sample.

Best fit wastes up to a tenth if all samples are large. Here the longest remaining length is combined with the
lengths that leave the least space, and the pattern is repeated as long as there are samples for it, about 50
microseconds per pattern. The window limits how short the combined lengths may be; the best one depends on the
data: try several.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from packhorse.plan.best_fit import Fill, Histogram
from packhorse.types import Integers


class Pattern(NamedTuple):
    """A number of packs with the same content: how many samples of each length."""

    packs: int
    each: dict[int, int]


def fill_exactly(histogram: Histogram, capacity: int, *, window: int, tries: int) -> list[Pattern]:
    """Pack everything, pattern by pattern.

    Considers ``window`` lengths for the larger of the last two samples of a pack, and tries ``tries`` lengths
    for the third last if no two fill the pack.
    """
    stock = _Stock(histogram, capacity)
    patterns = []
    while stock.longest_up_to(capacity):
        patterns.append(_next_pattern(stock, capacity, window, tries))
    return patterns


def as_fill(patterns: list[Pattern]) -> Fill:
    """Return patterns that use up a histogram as moves."""
    moves = []
    packs = 0
    for pattern in patterns:
        depth = 0
        for length, each in sorted(pattern.each.items(), reverse=True):
            moves.append((-length, packs, pattern.packs, each, depth))
            depth += each
        packs += pattern.packs
    moves.sort()
    table = np.array(moves, np.int64).reshape(-1, 5).T
    return Fill(packs, *np.ascontiguousarray(table[1:]))


class _Stock:
    """The remaining samples of a histogram."""

    def __init__(self, histogram: Histogram, capacity: int) -> None:
        self.counts = np.zeros(capacity + 1, np.int64)
        self.counts[histogram.lengths] = histogram.counts
        present = np.where(self.counts > 0, np.arange(capacity + 1), 0)
        self._below: Integers = np.maximum.accumulate(present)
        self._lengths = histogram.lengths  # falling; some may be used up
        self._used_up = 0

    def longest_up_to(self, space: int) -> int:
        """Return the longest remaining length of at most ``space``; 0 if there is none."""
        return int(self._below[space])

    def count(self, length: int) -> int:
        return int(self.counts[length])

    def take(self, length: int, count: int) -> None:
        self.counts[length] -= count
        if not self.counts[length]:
            end = int(np.searchsorted(self._below, length, "right"))
            self._below[length:end] = self._below[length - 1]
            self._used_up += 1

    def best_pair(self, space: int, window: int) -> tuple[int, int, int]:
        """Return the least space that two lengths leave, and the lengths (0: none).

        Among equals, the pair with the longest length wins: short ones are easier to place later.
        """
        if self._used_up > 64 or 8 * self._used_up > len(self._lengths):
            self._lengths = self._lengths[self.counts[self._lengths] > 0]
            self._used_up = 0
        rising = self._lengths[::-1]
        high = int(np.searchsorted(rising, space, "right"))
        low = max(0, min(int(np.searchsorted(rising, space // 2, "left")), high - 1), high - window)
        larger = rising[low:high][::-1]
        if not len(larger):
            return space, 0, 0
        smaller = self._below[space - larger]
        rest = space - larger - smaller
        rest[self.counts[larger] == 0] = space + 1
        for _ in range(2):
            best = int(rest.argmin())
            first, second = int(larger[best]), int(smaller[best])
            if int(rest[best]) > space:
                break
            if first != second or self.counts[first] > 1:
                return int(rest[best]), first, second
            rest[best] = space + 1  # there is only one of it
        single = self.longest_up_to(space)
        return space - single, single, 0


def _next_pattern(stock: _Stock, capacity: int, window: int, tries: int) -> Pattern:
    """Take the samples of the next pattern out of the stock."""
    each: dict[int, int] = {}

    def take(length: int, count: int) -> None:
        each[length] = each.get(length, 0) + count
        stock.take(length, count)

    space = capacity
    longest = stock.longest_up_to(space)
    take(longest, 1)
    space -= longest
    # While more than three of the longest fit, take it.
    while (length := stock.longest_up_to(space)) and space > 3 * length:
        count = min(stock.count(length), space // length - 2)
        take(length, count)
        space -= count * length
    for length in _last_three(stock, space, window, tries):
        take(length, 1)
    repeats = min(stock.count(length) // count for length, count in each.items())
    if repeats:
        for length, count in each.items():
            stock.take(length, repeats * count)
    return Pattern(1 + repeats, each)


def _last_three(stock: _Stock, space: int, window: int, tries: int) -> list[int]:
    """Return up to three lengths that fill ``space`` as well as the search finds."""
    rest, *lengths = stock.best_pair(space, window)
    third = stock.longest_up_to(space)
    while rest and tries and third and 3 * third >= space:
        pair_rest, first, second = stock.best_pair(space - third, window)
        wanted = 1 + (first == third) + (second == third)
        if pair_rest < rest and stock.count(third) >= wanted:
            rest, lengths = pair_rest, [third, first, second]
        third = stock.longest_up_to(third - 1)
        tries -= 1
    return [length for length in lengths if length]
