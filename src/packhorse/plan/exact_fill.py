"""Exact filling: for the longest sample left, the companions that fill its pack best.

Best fit loses up to a tenth where all samples are large, because nothing small is there to fill the gaps.
Here each pack is made whole before the next: the longest length that is left, then a search for the lengths
that leave the least room, then as many packs of that kind as the stock allows. The search looks at all pairs
at once with numpy, so a pack kind costs some 50 microseconds.

Whatever the first packs take the last ones lack. How far down the search may go for a companion (the window)
decides how the short lengths are shared, and which window is best depends on the mix: try several.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from packhorse.plan.best_fit import Fill, Histogram
from packhorse.types import Integers


class Pattern(NamedTuple):
    """So many packs that hold the same: how many of each length."""

    packs: int
    each: dict[int, int]


def fill_exactly(histogram: Histogram, capacity: int, *, window: int, tries: int) -> list[Pattern]:
    """Pack everything, pack kind by pack kind.

    Args:
        histogram: lengths from 1 to ``capacity``.
        capacity: of a pack.
        window: how many lengths to consider for the larger of the last two samples of a pack.
        tries: how many lengths to try for the third last where no two fill the pack.
    """
    stock = _Stock(histogram, capacity)
    patterns = []
    while stock.longest_up_to(capacity):
        patterns.append(_next_pattern(stock, capacity, window, tries))
    return patterns


def as_fill(patterns: list[Pattern]) -> Fill:
    """Patterns that use up a histogram, as moves over its samples from the longest to the shortest."""
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
    """What is left of a histogram, and the longest length up to any bound."""

    def __init__(self, histogram: Histogram, capacity: int) -> None:
        self.counts = np.zeros(capacity + 1, np.int64)
        self.counts[histogram.lengths] = histogram.counts
        present = np.where(self.counts > 0, np.arange(capacity + 1), 0)
        self._below: Integers = np.maximum.accumulate(present)
        self._lengths = histogram.lengths  # falling; some may be used up
        self._used_up = 0

    def longest_up_to(self, room: int) -> int:
        """The longest length left that is not above ``room``; 0 if there is none."""
        return int(self._below[room])

    def count(self, length: int) -> int:
        return int(self.counts[length])

    def take(self, length: int, number: int) -> None:
        self.counts[length] -= number
        if not self.counts[length]:
            end = int(np.searchsorted(self._below, length, "right"))
            self._below[length:end] = self._below[length - 1]
            self._used_up += 1

    def best_pair(self, room: int, window: int) -> tuple[int, int, int]:
        """The two lengths (the second may be 0: none) that leave the least of ``room``, and what they leave.

        Of several the pair with the longest length is taken: short ones are easier to place later.
        """
        if self._used_up > 64 or 8 * self._used_up > len(self._lengths):
            self._lengths = self._lengths[self.counts[self._lengths] > 0]
            self._used_up = 0
        rising = self._lengths[::-1]
        high = int(np.searchsorted(rising, room, "right"))
        low = max(0, min(int(np.searchsorted(rising, room // 2, "left")), high - 1), high - window)
        larger = rising[low:high][::-1]
        if not len(larger):
            return room, 0, 0
        smaller = self._below[room - larger]
        rest = room - larger - smaller
        rest[self.counts[larger] == 0] = room + 1
        for _ in range(2):
            best = int(rest.argmin())
            first, second = int(larger[best]), int(smaller[best])
            if int(rest[best]) > room:
                break
            if first != second or self.counts[first] > 1:
                return int(rest[best]), first, second
            rest[best] = room + 1  # there is only one of it
        single = self.longest_up_to(room)
        return room - single, single, 0


def _next_pattern(stock: _Stock, capacity: int, window: int, tries: int) -> Pattern:
    """Take the next pack, and all that are like it, out of the stock."""
    each: dict[int, int] = {}

    def take(length: int, number: int) -> None:
        each[length] = each.get(length, 0) + number
        stock.take(length, number)

    room = capacity
    longest = stock.longest_up_to(room)
    take(longest, 1)
    room -= longest
    # As long as more than three of the longest fit, there is no choice to make.
    while (length := stock.longest_up_to(room)) and room > 3 * length:
        number = min(stock.count(length), room // length - 2)
        take(length, number)
        room -= number * length
    for length in _last_three(stock, room, window, tries):
        take(length, 1)
    more = min(stock.count(length) // number for length, number in each.items())
    if more:
        for length, number in each.items():
            stock.take(length, more * number)
    return Pattern(1 + more, each)


def _last_three(stock: _Stock, room: int, window: int, tries: int) -> list[int]:
    """Up to three lengths that fill ``room`` as well as the search finds."""
    rest, *found = stock.best_pair(room, window)
    third = stock.longest_up_to(room)
    while rest and tries and third and 3 * third >= room:
        pair_rest, first, second = stock.best_pair(room - third, window)
        wanted = 1 + (first == third) + (second == third)
        if pair_rest < rest and stock.count(third) >= wanted:
            rest, found = pair_rest, [third, first, second]
        third = stock.longest_up_to(third - 1)
        tries -= 1
    return [length for length in found if length]
