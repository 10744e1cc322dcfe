"""Better than best fit, where that pays.

Best fit decreasing is within a few packs of the bound on most mixes. Where it is not, exact filling and the
cutting-stock programme are tried, and the plan with the fewest packs wins: best fit's own if none is better.
Both work on the histogram, so a hard mix costs one to three seconds whatever its size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.neat_packing_vlm.columns import cutting_stock
from packhorse.neat_packing_vlm.exact import Pattern, as_fill, fill_exactly
from packhorse.neat_packing_vlm.fill import Fill, Histogram, Integers, best_fit

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
