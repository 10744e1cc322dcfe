"""Best fit decreasing on the histogram of lengths, and how few packs there could be at best.

In go the distinct lengths with their numbers, out come bulk moves; samples do not appear. Lengths are small
integers, so a dataset of any size has at most a few thousand of them, and packs that hold the same lengths
are moved together. The cost is that of the distinct lengths and of the moves (some 25,000 for the mixes we
know, 2 microseconds each), whether there are a hundred thousand samples or ten million.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.types import Integers


class Histogram(NamedTuple):
    """Distinct lengths, the longest first, and how many samples have each."""

    lengths: Integers
    counts: Integers

    @classmethod
    def of(cls, lengths: npt.NDArray[np.integer], capacity: int) -> Histogram:
        """Of lengths from 1 to ``capacity``, in any order."""
        # A table of all lengths is the fastest, unless it is much larger than the samples are many.
        if capacity <= 4 * len(lengths) + (1 << 16):
            table = np.bincount(lengths, minlength=1)
            present = np.flatnonzero(table)[::-1]
            return cls(present, table[present])
        values, counts = np.unique(lengths, return_counts=True)
        return cls(values[::-1].astype(np.int64), counts[::-1].astype(np.int64))

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        """How long all samples are together."""
        return int(self.lengths @ self.counts)

    def rounded_up(self, grain: int) -> Histogram:
        """In units of ``grain``."""
        units = -(-self.lengths // grain)
        starts = np.flatnonzero(np.diff(units, prepend=-1))
        return Histogram(units[starts], np.add.reduceat(self.counts, starts))


class Fill(NamedTuple):
    """How a histogram is packed, as moves over the samples from the longest to the shortest.

    A move puts the next ``width * each`` samples, all of one length, into the ``width`` packs from ``first``
    on, ``each`` into every one of them, where ``depth`` samples lie already. All packs of a move have the
    same content up to then.
    """

    packs: int
    first: Integers
    width: Integers
    each: Integers
    depth: Integers

    def pack_of(self) -> npt.NDArray[np.int32]:
        """For each sample, from the longest to the shortest, its pack."""
        first = np.repeat(self.first, self.each).astype(np.int32)
        count = np.repeat(self.width, self.each)
        ends = np.cumsum(count)
        packs = np.repeat(first - (ends - count).astype(np.int32), count)
        packs += np.arange(len(packs), dtype=np.int32)
        return packs

    def sizes(self) -> Integers:
        """How many samples each pack holds."""
        return self.totals(self.each)

    def totals(self, amounts: Integers) -> Integers:
        """For each pack the sum of an amount that each move puts into every one of its packs."""
        steps = np.zeros(self.packs + 1, np.int64)
        np.add.at(steps, self.first, amounts)
        np.subtract.at(steps, self.first + self.width, amounts)
        totals: Integers = np.cumsum(steps[:-1])
        return totals

    def lengths(self, histogram: Histogram) -> Integers:
        """The length of the samples of each move."""
        number = self.width * self.each
        kind = np.searchsorted(np.cumsum(histogram.counts), np.cumsum(number) - number, "right")
        found: Integers = histogram.lengths[kind]
        return found


Group = tuple[int, int, int]
"""Packs with the same content: the number of the first, how many, and how many samples are in each."""

Move = tuple[int, int, int, int]
"""First pack, width, each and depth: see :class:`Fill`."""


def best_fit(histogram: Histogram, capacity: int, rooms_left: Integers | None = None) -> Fill:
    """Best fit decreasing: each sample, the longest first, goes where it leaves the least room.

    The result is that of going through the samples one by one: the tightest pack with room for a length takes
    as many of it as fit before another pack is touched, so all packs of a group can be served in one move.

    Args:
        histogram: lengths from 1 to ``capacity``.
        capacity: of a pack.
        rooms_left: of packs that exist already; they are the first, and ``depth`` counts from what they hold.
    """
    groups: dict[int, list[Group]] = {}
    moves: list[Move] = []
    lengths, counts = histogram.lengths.tolist(), histogram.counts.tolist()
    large = 0
    if rooms_left is None:  # samples of more than half a pack have one each: no need to look for room
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
        packs = len(rooms_left)
        for pack, room in enumerate(rooms_left.tolist()):
            groups.setdefault(room, []).append((pack, 1, 0))
    rooms = sorted(groups)  # the keys of groups
    made: list[tuple[int, Group]] = []
    for length, left in zip(lengths[large:], counts[large:], strict=True):
        start = at = bisect_left(rooms, length)
        while left and at < len(rooms):
            room = rooms[at]
            stack = groups[room]
            left = _serve(stack, room, length, left, moves, made)
            if stack:
                break
            del groups[room]
            at += 1
        if at > start:
            del rooms[start:at]
        if left:
            count = -(-left // (capacity // length))
            _serve([(packs, count, 0)], capacity, length, left, moves, made)
            packs += count
        for room, group in made:
            if room in groups:
                groups[room].append(group)
            elif room:
                groups[room] = [group]
                insort(rooms, room)
        made.clear()
    flat = np.fromiter(chain.from_iterable(moves), np.int64, 4 * len(moves)).reshape(-1, 4)
    return Fill(packs, *np.ascontiguousarray(flat.T))


def _serve(
    stack: list[Group],
    room: int,
    length: int,
    left: int,
    moves: list[Move],
    made: list[tuple[int, Group]],
) -> int:
    """Put ``left`` samples of a length into the groups on the stack; returns how many found no place.

    Groups served leave the stack and are added to ``made`` with the room they have now.
    """
    each = room // length
    while stack and left:
        first, count, depth = stack.pop()
        if left <= each:  # one pack takes them all
            if count > 1:
                stack.append((first + 1, count - 1, depth))
            moves.append((first, 1, left, depth))
            made.append((room - left * length, (first, 1, depth + left)))
            return 0
        served = left // each
        if served < count:
            stack.append((first + served, count - served, depth))
        else:
            served = count
        moves.append((first, served, each, depth))
        made.append((room - each * length, (first, served, depth + each)))
        left -= served * each
    return left


def lower_bound(histogram: Histogram, capacity: int) -> int:
    """No plan has fewer packs than this (Martello and Toth's second bound).

    Samples of more than half a pack need one each; what the shorter ones of at least ``k`` tokens cannot find
    in the room beside those, for some ``k``, needs further packs. ``k = 1`` is the bound of the area.
    """
    lengths, counts = histogram.lengths[::-1], histogram.counts[::-1]
    if not len(lengths):
        return 0
    number = np.concatenate([[0], np.cumsum(counts)])
    tokens = np.concatenate([[0], np.cumsum(counts * lengths)])
    half = int(np.searchsorted(lengths, capacity // 2, "right"))
    smallest = np.concatenate([[0], lengths[:half]])
    low = np.searchsorted(lengths, smallest, "left")
    high = np.maximum(np.searchsorted(lengths, capacity - smallest, "right"), half)
    beside = (number[high] - number[half]) * capacity - (tokens[high] - tokens[half])
    without_room = tokens[half] - tokens[low] - beside
    return int((number[-1] - number[half] + np.maximum(0, -(-without_room // capacity))).max())
