"""Cutting stock: the best mixture of pack kinds, by a linear programme over classes of lengths.

Lengths are rounded up to a grain, so that some 300 classes remain whatever the data. Each pack kind is a
column; the programme says how many packs of each kind cover all samples with the fewest packs, and its prices
say which kind is missing (column generation: a knapsack over the prices). Started with the kinds that exact
filling found it is done in a few rounds, well under a second; the answer is then rounded down.

scipy's HiGHS solves the programme. It is imported here when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from packhorse.neat_packing_vlm.exact import Pattern
from packhorse.neat_packing_vlm.fill import Histogram, Integers

Floats = npt.NDArray[np.float64]
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
