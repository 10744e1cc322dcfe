"""Better than best fit, where that pays.

Best fit decreasing is within a few packs of the bound on most mixes. Where it is not, exact filling and the
cutting-stock programme are tried, and the plan with the fewest packs wins: best fit's own if none is better.
Both work on the histogram, so a hard mix costs one to three seconds whatever its size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.plan.best_fit import Fill, Histogram, best_fit
from packhorse.plan.exact_fill import Pattern, as_fill, fill_exactly
from packhorse.types import Floats, Integers

Column = tuple[tuple[int, int], ...]
"""A pack kind: the numbers of its classes, each with how many samples of it a pack holds."""

_ROUNDS = 40
_NEAR_ENOUGH = 1e-4  # of the bound: what is lost in rounding down is more than that
_NOTHING = 1e-7


def cutting_stock(classes: Histogram, capacity: int, kinds: Iterable[Pattern]) -> list[Pattern]:
    """The mixture of pack kinds with the fewest packs, rounded down to whole packs.

    Args:
        classes: lengths in grains, from 1 to ``capacity``.
        capacity: in grains.
        kinds: to begin with; every length must be in one of them.

    Returns:
        Kinds and numbers of packs. Some samples remain for the caller, and a kind may ask for more samples of
        a class than there are.
    """
    lengths, demand = classes.lengths[::-1], classes.counts[::-1].astype(np.float64)
    place = {length: number for number, length in enumerate(lengths.tolist())}
    columns: dict[Column, None] = {}  # an ordered set
    for kind in kinds:
        columns[tuple(sorted((place[length], each) for length, each in kind.each.items()))] = None
    packs = np.zeros(0)
    bound = 0.0
    for _ in range(_ROUNDS):
        answer = _solve(list(columns), demand)
        if answer is None:
            break
        packs, prices = answer
        worth, choice = _knapsack(lengths, prices, capacity)
        # Prices scaled down until no kind is worth more than its pack are a bound for every solution.
        bound = max(bound, float(prices @ demand) / max(1.0, float(worth[capacity])))
        missing = _missing(lengths, prices, worth, choice, capacity)
        before = len(columns)
        columns.update(dict.fromkeys(missing))
        if float(packs.sum()) - bound <= _NEAR_ENOUGH * bound or len(columns) == before:
            break
    whole = np.floor(packs + 1e-6).astype(np.int64).tolist()
    return [
        Pattern(number, {int(lengths[place]): each for place, each in column})
        for column, number in zip(columns, whole, strict=False)  # columns of the last round have no number
        if number
    ]


def _solve(columns: list[Column], demand: Floats) -> tuple[Floats, Floats] | None:
    """How many packs of each kind, and the price of one sample of each class; None if there is no answer."""
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
    """For every room up to ``capacity`` the highest price, and the class to take first (-1: none)."""
    worth = np.zeros(capacity + 1)
    choice = np.full(capacity + 1, -1, np.int64)
    fitting = np.searchsorted(lengths, np.arange(capacity + 1), "right").tolist()
    for room in range(1, capacity + 1):
        worth[room] = worth[room - 1]
        if number := fitting[room]:
            total = prices[:number] + worth[room - lengths[:number]]
            best = int(total.argmax())
            if total[best] > worth[room] + _NOTHING:
                worth[room], choice[room] = total[best], best
    return worth, choice


def _missing(
    lengths: Integers, prices: Floats, worth: Floats, choice: Integers, capacity: int
) -> list[Column]:
    """For each class the best kind that holds it, where that is worth more than its pack."""
    steps, sizes = choice.tolist(), lengths.tolist()
    total = prices + worth[capacity - lengths]
    found = []
    for number in np.flatnonzero(total > 1 + _NOTHING).tolist():
        each = {number: 1}
        room = capacity - sizes[number]
        while room > 0:
            best = steps[room]
            if best < 0:
                room -= 1
            else:
                each[best] = each.get(best, 0) + 1
                room -= sizes[best]
        found.append(tuple(sorted(each.items())))
    return found


GOOD_ENOUGH = 0.001  # over the lower bound
SECONDS_PER_PACK = 0.05
MOST_SECONDS = 5.0

_WINDOWS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 1.0)  # of the distinct lengths
_TRIES = 8
_THOROUGH = 64
_CLASSES = 320
_FEW_GRAINS, _MANY_GRAINS = 512, 2048

# What the parts take on an ordinary processor, in seconds: for planning how much to do. No clock is read, so
# the same lengths give the same plan on every machine.
_EXACT_PER_LENGTH = 1e-4
_COLUMNS_PER_PAIR_OF_CLASSES = 1e-5


class Assignment(NamedTuple):
    """The pack of each sample, from the longest to the shortest."""

    packs: int
    pack_of: npt.NDArray[np.integer]


def improved(
    histogram: Histogram, capacity: int, fit: Fill, bound: int, effort: float | None
) -> Fill | Assignment:
    """The plan with the fewest packs that the effort allows to find; ``fit`` if none has fewer.

    Args:
        histogram: lengths from 1 to ``capacity``.
        capacity: of a pack.
        fit: best fit's answer.
        bound: no plan has fewer packs.
        effort: about how many seconds to spend; None: as long as the packs that may be saved take to train,
            at a twentieth of a second each, but five seconds at most.
    """
    savable = fit.packs - bound
    if savable <= 0 or (effort is None and savable <= GOOD_ENOUGH * bound):
        return fit
    seconds = min(MOST_SECONDS, SECONDS_PER_PACK * savable) if effort is None else effort
    if seconds <= 0:
        return fit
    best: Fill | Assignment = fit
    grain = _grain(histogram, capacity)
    classes = histogram.rounded_up(grain)
    # Where the capacity is no multiple of the grain, the longest may be over it once rounded up: they are
    # packed with the rest.
    fits = classes.lengths <= capacity // grain
    classes = Histogram(classes.lengths[fits], classes.counts[fits])
    if not len(classes.lengths):
        return best
    # Rounded lengths are few: all windows are tried on them, for the kinds and to see which window is good.
    seconds -= _EXACT_PER_LENGTH * len(_WINDOWS) * len(classes.lengths)
    if seconds < 0:
        return best
    rough = [_filled(classes, capacity // grain, share, _TRIES) for share in _WINDOWS]
    packs = [sum(pattern.packs for pattern in patterns) for patterns in rough]
    promising = np.argsort(packs, kind="stable")[:2]
    attempts = [(_WINDOWS[place], _TRIES) for place in promising] + [(1.0, _THOROUGH)]
    cost = _COLUMNS_PER_PAIR_OF_CLASSES * len(classes.lengths) ** 2
    if seconds >= cost:
        seconds -= cost
        kinds = cutting_stock(classes, capacity // grain, [k for patterns in rough for k in patterns])
        best = _fewer(best, _by_classes(histogram, capacity, grain, kinds))
    for share, tries in attempts:
        seconds -= _EXACT_PER_LENGTH * len(histogram.lengths) * (1 + tries / 32)
        if seconds < 0 or best.packs <= bound:
            break
        best = _fewer(best, as_fill(_filled(histogram, capacity, share, tries)))
    return best


def _fewer(best: Fill | Assignment, other: Fill | Assignment) -> Fill | Assignment:
    return other if other.packs < best.packs else best


def _filled(histogram: Histogram, capacity: int, share: float, tries: int) -> list[Pattern]:
    window = max(2, round(share * len(histogram.lengths)))
    return fill_exactly(histogram, capacity, window=window, tries=tries)


def _grain(histogram: Histogram, capacity: int) -> int:
    """The finest power of two that leaves few enough classes, or a few hundred grains to the pack."""
    grain = 1
    while capacity // grain > _FEW_GRAINS and (
        capacity // grain > _MANY_GRAINS or len(histogram.rounded_up(grain).lengths) > _CLASSES
    ):
        grain *= 2
    return grain


def _by_classes(histogram: Histogram, capacity: int, grain: int, kinds: list[Pattern]) -> Assignment:
    """Hand the samples of each class to the packs of the kinds, and what remains to wherever it fits."""
    lengths = np.repeat(histogram.lengths, histogram.counts)
    pack_of = np.full(len(lengths), -1, np.int64)
    classes = -(-lengths // grain)
    nexts = dict(zip(*_runs(classes), strict=True))
    packs = 0
    for kind in kinds:
        for length, each in kind.each.items():
            begin, end = nexts[length]
            number = min(end - begin, kind.packs * each)
            pack_of[begin : begin + number] = packs + np.arange(number) % kind.packs
            nexts[length] = (begin + number, end)
        packs += kind.packs
    left = np.flatnonzero(pack_of < 0)
    room = capacity - np.bincount(
        pack_of[pack_of >= 0], weights=lengths[pack_of >= 0], minlength=packs
    ).astype(np.int64)
    total, pack_of[left] = _rest(lengths[left], capacity, room)
    return Assignment(total, pack_of)


def _rest(lengths: Integers, capacity: int, room: Integers) -> tuple[int, npt.NDArray[np.integer]]:
    """Pack the last samples, some into room that is left: how many packs there are, and each sample's."""
    if not len(lengths):
        return len(room), lengths
    histogram = Histogram.of(lengths, capacity)
    fit = best_fit(histogram, capacity, room)
    best = fit.packs, fit.pack_of().astype(np.int64)
    for share in (1 / 8, 1 / 4, 1 / 2, 1.0):
        other = as_fill(_filled(histogram, capacity, share, _TRIES))
        if len(room) + other.packs < best[0]:
            best = len(room) + other.packs, len(room) + other.pack_of().astype(np.int64)
    return best


def _runs(values: Integers) -> tuple[list[int], list[tuple[int, int]]]:
    """The values of a sorted array, and where each begins and ends."""
    starts = np.flatnonzero(np.diff(values, prepend=values[0] + 1))
    ends = np.append(starts[1:], len(values))
    return values[starts].tolist(), list(zip(starts.tolist(), ends.tolist(), strict=True))
