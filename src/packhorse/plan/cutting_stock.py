"""Improve on best fit by exact filling and a cutting-stock linear program.

Best fit decreasing is within a few packs of the bound on most data. If it is not, both are tried, and the
plan with the fewest packs wins. Both work on the histogram, so hard data take one to three seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.plan.best_fit import Fill, Histogram, best_fit
from packhorse.plan.exact_fill import Pattern, as_fill, fill_exactly
from packhorse.types import Floats, Integers

Column = tuple[tuple[int, int], ...]
"""A pattern: class numbers, each with how many samples of it a pack holds."""

_ROUNDS = 40
_NEAR_ENOUGH = 1e-4  # of the bound: rounding down loses more than that
_EPSILON = 1e-7


def cutting_stock(classes: Histogram, capacity: int, patterns: Iterable[Pattern]) -> list[Pattern]:
    """Return the patterns with the fewest packs, rounded down to whole packs; lengths are in grains.

    Starts with ``patterns``, which hold every length. The result leaves some samples to the caller, and may
    need more samples of a class than there are.
    """
    lengths, demand = classes.lengths[::-1], classes.counts[::-1].astype(np.float64)
    index = {length: number for number, length in enumerate(lengths.tolist())}
    columns: dict[Column, None] = {}  # an ordered set
    for pattern in patterns:
        columns[tuple(sorted((index[length], each) for length, each in pattern.each.items()))] = None
    packs = np.zeros(0)
    bound = 0.0
    for _ in range(_ROUNDS):
        answer = _solve(list(columns), demand)
        if answer is None:
            break
        packs, prices = answer
        worth, choice = _knapsack(lengths, prices, capacity)
        # Prices scaled down until no pattern is worth more than its pack bound every solution.
        bound = max(bound, float(prices @ demand) / max(1.0, float(worth[capacity])))
        before = len(columns)
        columns.update(dict.fromkeys(_better_columns(lengths, prices, worth, choice, capacity)))
        if float(packs.sum()) - bound <= _NEAR_ENOUGH * bound or len(columns) == before:
            break
    counts = np.floor(packs + 1e-6).astype(np.int64).tolist()
    return [
        Pattern(count, {int(lengths[number]): each for number, each in column})
        for column, count in zip(columns, counts, strict=False)  # columns of the last round have no count
        if count
    ]


def _solve(columns: list[Column], demand: Floats) -> tuple[Floats, Floats] | None:
    """Return the packs of each column and the price of a sample of each class; None if unsolved."""
    from scipy.optimize import linprog
    from scipy.sparse import csc_array

    ends = np.cumsum([0, *map(len, columns)])
    flat = np.array([pair for column in columns for pair in column], np.int64)
    matrix: Any = csc_array((-flat[:, 1].astype(float), flat[:, 0], ends), shape=(len(demand), len(columns)))
    answer: Any = linprog(np.ones(len(columns)), A_ub=matrix, b_ub=-demand, method="highs-ds")
    if answer.status:
        return None
    return answer.x, np.maximum(0.0, -answer.ineqlin.marginals)


def _knapsack(lengths: Integers, prices: Floats, capacity: int) -> tuple[Floats, Integers]:
    """Return for every space up to ``capacity`` the highest price, and the class to take first (-1: none)."""
    worth = np.zeros(capacity + 1)
    choice = np.full(capacity + 1, -1, np.int64)
    fitting = np.searchsorted(lengths, np.arange(capacity + 1), "right").tolist()
    for space in range(1, capacity + 1):
        worth[space] = worth[space - 1]
        if number := fitting[space]:
            total = prices[:number] + worth[space - lengths[:number]]
            best = int(total.argmax())
            if total[best] > worth[space] + _EPSILON:
                worth[space], choice[space] = total[best], best
    return worth, choice


def _better_columns(
    lengths: Integers, prices: Floats, worth: Floats, choice: Integers, capacity: int
) -> list[Column]:
    """Return for each class the best column that holds it, if that is worth more than its pack."""
    steps, sizes = choice.tolist(), lengths.tolist()
    total = prices + worth[capacity - lengths]
    columns = []
    for number in np.flatnonzero(total > 1 + _EPSILON).tolist():
        each = {number: 1}
        space = capacity - sizes[number]
        while space > 0:
            best = steps[space]
            if best < 0:
                space -= 1
            else:
                each[best] = each.get(best, 0) + 1
                space -= sizes[best]
        columns.append(tuple(sorted(each.items())))
    return columns


GOOD_ENOUGH = 0.001  # over the lower bound
SECONDS_PER_PACK = 0.05
MOST_SECONDS = 5.0

_WINDOWS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 1.0)  # of the distinct lengths
_TRIES = 8
_THOROUGH = 64
_CLASSES = 320
_FEW_GRAINS, _MANY_GRAINS = 512, 2048

# Estimated seconds of the parts. No clock is read, so the same lengths give the same plan on every machine.
_EXACT_PER_LENGTH = 1e-4
_COLUMNS_PER_PAIR_OF_CLASSES = 1e-5


class Assignment(NamedTuple):
    """The pack of each sample, from the longest to the shortest."""

    packs: int
    pack_of: npt.NDArray[np.integer]


def improve(
    histogram: Histogram, capacity: int, fit: Fill, bound: int, effort: float | None
) -> Fill | Assignment:
    """Return the plan with the fewest packs that the effort finds; ``fit`` if none has fewer.

    ``effort`` is approximate seconds; None spends ``SECONDS_PER_PACK`` for each pack that may be saved, at
    most ``MOST_SECONDS``.
    """
    savable = fit.packs - bound
    seconds = min(MOST_SECONDS, SECONDS_PER_PACK * savable) if effort is None else effort
    if savable <= 0 or seconds <= 0 or (effort is None and savable <= GOOD_ENOUGH * bound):
        return fit
    best: Fill | Assignment = fit
    grain = _grain(histogram, capacity)
    classes = histogram.round_up(grain)
    # Rounded up, the longest may exceed the capacity: they are packed with the rest.
    fits = classes.lengths <= capacity // grain
    classes = Histogram(classes.lengths[fits], classes.counts[fits])
    if not len(classes.lengths):
        return best
    # Try all windows on the few rounded lengths, for their patterns and to find good windows.
    seconds -= _EXACT_PER_LENGTH * len(_WINDOWS) * len(classes.lengths)
    if seconds < 0:
        return best
    rough = [_fill(classes, capacity // grain, share, _TRIES) for share in _WINDOWS]
    packs = [sum(pattern.packs for pattern in patterns) for patterns in rough]
    promising = np.argsort(packs, kind="stable")[:2]
    attempts = [(_WINDOWS[window], _TRIES) for window in promising] + [(1.0, _THOROUGH)]
    cost = _COLUMNS_PER_PAIR_OF_CLASSES * len(classes.lengths) ** 2
    if seconds >= cost:
        seconds -= cost
        patterns = cutting_stock(classes, capacity // grain, chain.from_iterable(rough))
        best = min(best, _assign_classes(histogram, capacity, grain, patterns), key=lambda plan: plan.packs)
    for share, tries in attempts:
        seconds -= _EXACT_PER_LENGTH * len(histogram.lengths) * (1 + tries / 32)
        if seconds < 0 or best.packs <= bound:
            break
        best = min(best, as_fill(_fill(histogram, capacity, share, tries)), key=lambda plan: plan.packs)
    return best


def _fill(histogram: Histogram, capacity: int, share: float, tries: int) -> list[Pattern]:
    window = max(2, round(share * len(histogram.lengths)))
    return fill_exactly(histogram, capacity, window=window, tries=tries)


def _grain(histogram: Histogram, capacity: int) -> int:
    """Return the finest power of two with few enough classes, or a few hundred grains per pack."""
    grain = 1
    while capacity // grain > _FEW_GRAINS and (
        capacity // grain > _MANY_GRAINS or len(histogram.round_up(grain).lengths) > _CLASSES
    ):
        grain *= 2
    return grain


def _assign_classes(histogram: Histogram, capacity: int, grain: int, patterns: list[Pattern]) -> Assignment:
    """Assign the samples of each class to the packs of the patterns, and the rest by best fit."""
    lengths = np.repeat(histogram.lengths, histogram.counts)
    pack_of = np.full(len(lengths), -1, np.int64)
    classes = histogram.round_up(grain)
    ends = np.cumsum(classes.counts)
    spans = zip((ends - classes.counts).tolist(), ends.tolist(), strict=True)
    nexts = dict(zip(classes.lengths.tolist(), spans, strict=True))
    packs = 0
    for pattern in patterns:
        for length, each in pattern.each.items():
            begin, end = nexts[length]
            count = min(end - begin, pattern.packs * each)
            pack_of[begin : begin + count] = packs + np.arange(count) % pattern.packs
            nexts[length] = (begin + count, end)
        packs += pattern.packs
    left = np.flatnonzero(pack_of < 0)
    space = capacity - np.bincount(
        pack_of[pack_of >= 0], weights=lengths[pack_of >= 0], minlength=packs
    ).astype(np.int64)
    total, pack_of[left] = _assign_rest(lengths[left], capacity, space)
    return Assignment(total, pack_of)


def _assign_rest(lengths: Integers, capacity: int, space: Integers) -> tuple[int, npt.NDArray[np.integer]]:
    """Return the number of packs and the pack of each of the last samples; existing packs have ``space``."""
    if not len(lengths):
        return len(space), lengths
    histogram = Histogram.of(lengths, capacity)
    fit = best_fit(histogram, capacity, space)
    best = fit.packs, fit.pack_of().astype(np.int64)
    for share in (1 / 8, 1 / 4, 1 / 2, 1.0):
        other = as_fill(_fill(histogram, capacity, share, _TRIES))
        if len(space) + other.packs < best[0]:
            best = len(space) + other.packs, len(space) + other.pack_of().astype(np.int64)
    return best
