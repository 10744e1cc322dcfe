"""The order of the packs of an epoch: in each step the ranks have equal work and the same kinds of media."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.errors import ConfigError
from packhorse.neat_packing_vlm.balance import Floats
from packhorse.neat_packing_vlm.deal import random_numbers
from packhorse.neat_packing_vlm.fill import Integers

TOLERANCE = 0.01


class StepOrder(NamedTuple):
    """Which pack each rank gets in each step.

    Attributes:
        steps: one row for each step, one column for each rank.
        rest: the packs that do not fill a step, fewer than there are ranks.
        mixed: the steps whose packs do not all have the same kinds of media.
    """

    steps: Integers
    rest: Integers
    mixed: Integers


def order_packs(
    costs: npt.ArrayLike,
    world_size: int,
    *,
    kinds: npt.ArrayLike | None = None,
    strata: npt.ArrayLike | None = None,
    seed: int = 0,
    epoch: int = 0,
    tolerance: float = TOLERANCE,
) -> StepOrder:
    """Put packs into steps of one pack for each rank.

    The packs of a step have the same kinds of media, wherever there are enough of them, and cost the same up
    to about twice the tolerance. Within that, which packs come together is random, as are the place of a step
    in the epoch and the rank a pack goes to. Sorting is all it costs: a second for some five million packs.

    Args:
        costs: of each pack.
        world_size: the number of ranks.
        kinds: the media of each pack (``pack_kinds``); packs of one kind only if not given.
        strata: a number for each pack, for example the data set that most of its tokens are from: steps are
            then shuffled so that each part of the epoch has its share of every number.
        seed: of the shuffle.
        epoch: shuffles anew.
        tolerance: packs whose costs differ by less are taken as equal.
    """
    cost: Floats = np.asarray(costs, np.float64)
    if world_size < 1 or tolerance <= 0:
        raise ConfigError(f"world_size={world_size}, tolerance={tolerance}: expected 1 or more, and above 0")
    if len(cost) and not cost.min() > 0:
        raise ConfigError(f"pack {int(cost.argmin())} costs {cost.min()}: expected more than 0 for each")
    kind = np.zeros(len(cost), np.int64) if kinds is None else np.asarray(kinds, np.int64)
    if len(kind) != len(cost):
        raise ConfigError(f"{len(kind):,} kinds for {len(cost):,} packs: expected one for each")
    draw = random_numbers(seed, epoch)
    # Bands of equal cost, which lie elsewhere in each epoch; at random within a band.
    band = np.floor(np.log(cost) / np.log1p(tolerance) + draw.random()).astype(np.int64)
    by_cost = np.lexsort((draw.random(len(cost)), band))
    whole, spare = [], []
    middle = float(np.median(cost)) if len(cost) else 0.0
    for one in np.unique(kind):
        packs = by_cost[kind[by_cost] == one]
        left = len(packs) % world_size
        # What does not fill a step is taken from the middle, where the spare packs of other kinds are too.
        at = min(max(0, int(np.searchsorted(cost[packs], middle)) - left // 2), len(packs) - left)
        spare.append(packs[at : at + left])
        whole.append(np.delete(packs, np.s_[at : at + left]))
    pure = np.concatenate([*whole, np.zeros(0, np.int64)]).reshape(-1, world_size)
    rest = np.concatenate([*spare, np.zeros(0, np.int64)])
    rest = rest[np.argsort(cost[rest], kind="stable")]
    full = len(rest) // world_size * world_size
    steps = np.concatenate([pure, rest[:full].reshape(-1, world_size)]).astype(np.int64)
    steps = draw.permuted(steps, axis=1)
    steps = steps[_shuffled(steps, strata, draw)]
    mixed = np.flatnonzero((kind[steps] != kind[steps[:, :1]]).any(axis=1))
    return StepOrder(steps, rest[full:].astype(np.int64), mixed)


def _shuffled(steps: Integers, strata: npt.ArrayLike | None, draw: np.random.Generator) -> Integers:
    """An order of the steps: any, or one in which every stretch has its share of each stratum.

    Steps are lined up by content and cut into blocks of neighbours; each stretch of the epoch takes one step
    from each block.
    """
    number = len(steps)
    if strata is None or number < 4:
        return draw.permutation(number)
    of_packs = np.asarray(strata)
    shares = np.stack([(of_packs == one)[steps].mean(axis=1) for one in np.unique(of_packs)])
    first = shares.argmax(axis=0)
    lined_up = np.lexsort((draw.random(number), shares.max(axis=0), first))
    stretches = max(1, int(np.sqrt(number)))
    # A random stretch for each member of a block, each stretch once; then any order inside a stretch.
    padded = -(-number // stretches) * stretches
    stretch = draw.permuted(np.arange(padded).reshape(-1, stretches) % stretches, axis=1).reshape(-1)[:number]
    return lined_up[np.lexsort((draw.random(number), stretch))]


def main_stratum(strata: npt.ArrayLike, lengths: npt.ArrayLike, pack_of: Integers, packs: int) -> Integers:
    """For each pack the stratum that most of its tokens are from.

    Args:
        strata: of each sample.
        lengths: of each sample.
        pack_of: the pack of each sample; -1 for none.
        packs: how many packs there are.
    """
    names, numbers = np.unique(np.asarray(strata), return_inverse=True)
    inside = pack_of >= 0
    cells = pack_of[inside] * len(names) + numbers.reshape(-1)[inside]
    tokens = np.bincount(cells, weights=np.asarray(lengths)[inside], minlength=packs * len(names))
    return np.asarray(names[tokens.reshape(packs, -1).argmax(axis=1)], np.int64)
