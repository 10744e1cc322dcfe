"""Dealing an epoch: which packs each rank gets in each step, under any shape of the cluster.

Plain numbers in, plain numbers out: sorting is all it costs (a million packs take half a second). What was
dealt depends on the plan, the seed, the epoch and the shapes alone, so a run is taken up again by dealing
anew, and nothing but the shapes and how far each of them came has to be remembered.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.errors import ConfigError
from packhorse.types import Floats, Integers, MediaMask

if TYPE_CHECKING:
    from packhorse.plan.pack_plan import PackPlan


TOLERANCE = 0.01


def random_generator(seed: int, *more: int) -> np.random.Generator:
    """Return a generator that depends on these integers alone; ``seed`` may be negative."""
    return np.random.default_rng([seed & (2**63 - 1), *more])


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
    media_masks: npt.ArrayLike | None = None,
    dataset_ids: npt.ArrayLike | None = None,
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
        media_masks: of each pack (``pack_media_masks``); None if all packs have the same media.
        dataset_ids: the dataset of each pack, for example the one most of its tokens are from; steps are then
            shuffled so that each part of the epoch has its share of every dataset.
        seed: of the shuffle.
        epoch: shuffles anew.
        tolerance: packs whose costs differ by less are taken as equal.
    """
    cost: Floats = np.asarray(costs, np.float64)
    if world_size < 1 or tolerance <= 0:
        raise ConfigError(f"world_size={world_size}, tolerance={tolerance}: expected 1 or more, and above 0")
    if len(cost) and not cost.min() > 0:
        raise ConfigError(f"pack {int(cost.argmin())} costs {cost.min()}: expected more than 0 for each")
    masks = np.zeros(len(cost), np.int64) if media_masks is None else np.asarray(media_masks, np.int64)
    if len(masks) != len(cost):
        raise ConfigError(f"{len(masks):,} media masks for {len(cost):,} packs: expected one for each")
    draw = random_generator(seed, epoch)
    # Bands of equal cost, which lie elsewhere in each epoch; at random within a band.
    band = np.floor(np.log(cost) / np.log1p(tolerance) + draw.random()).astype(np.int64)
    by_cost = np.lexsort((draw.random(len(cost)), band))
    whole, spare = [], []
    middle = float(np.median(cost)) if len(cost) else 0.0
    for mask in np.unique(masks):
        packs = by_cost[masks[by_cost] == mask]
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
    steps = steps[_shuffled(steps, dataset_ids, draw)]
    mixed = np.flatnonzero((masks[steps] != masks[steps[:, :1]]).any(axis=1))
    return StepOrder(steps, rest[full:].astype(np.int64), mixed)


def _shuffled(steps: Integers, dataset_ids: npt.ArrayLike | None, draw: np.random.Generator) -> Integers:
    """An order of the steps: any, or one in which every stretch has its share of each stratum.

    Steps are lined up by content and cut into blocks of neighbours; each stretch of the epoch takes one step
    from each block.
    """
    number = len(steps)
    if dataset_ids is None or number < 4:
        return draw.permutation(number)
    of_packs = np.asarray(dataset_ids)
    shares = np.stack([(of_packs == one)[steps].mean(axis=1) for one in np.unique(of_packs)])
    first = shares.argmax(axis=0)
    lined_up = np.lexsort((draw.random(number), shares.max(axis=0), first))
    stretches = max(1, int(np.sqrt(number)))
    # A random stretch for each member of a block, each stretch once; then any order inside a stretch.
    padded = -(-number // stretches) * stretches
    stretch = draw.permuted(np.arange(padded).reshape(-1, stretches) % stretches, axis=1).reshape(-1)[:number]
    return lined_up[np.lexsort((draw.random(number), stretch))]


def main_dataset(
    dataset_ids: npt.ArrayLike, lengths: npt.ArrayLike, pack_of: Integers, packs: int
) -> Integers:
    """Return, for each pack, the dataset that most of its tokens are from.

    Args:
        dataset_ids: of each sample.
        lengths: of each sample.
        pack_of: the pack of each sample; -1 for none.
        packs: how many packs there are.
    """
    names, numbers = np.unique(np.asarray(dataset_ids), return_inverse=True)
    inside = pack_of >= 0
    cells = pack_of[inside] * len(names) + numbers.reshape(-1)[inside]
    tokens = np.bincount(cells, weights=np.asarray(lengths)[inside], minlength=packs * len(names))
    return np.asarray(names[tokens.reshape(packs, -1).argmax(axis=1)], np.int64)


Masks = npt.NDArray[np.uint8]

NOTHING = -1
"""Stands in a table where there is no pack for a rank."""


class BatchLayout(NamedTuple):
    """How an epoch is cut.

    Attributes:
        world_size: ranks that share the packs.
        batch_size: packs (or samples) that a rank gets in a micro-step.
        gradient_accumulation_steps: the number of micro-steps is a multiple of this.
    """

    world_size: int
    batch_size: int = 1
    gradient_accumulation_steps: int = 1

    def check(self) -> BatchLayout:
        """Itself, if it makes sense.

        Raises:
            ConfigError: a number is below 1.
        """
        if min(self) < 1:
            raise ConfigError(f"{self}: expected each of them to be 1 or more")
        return self


class ResumeSegment(NamedTuple):
    """A stretch of an epoch under one shape, and how many micro-steps of it were used."""

    world_size: int
    batch_size: int
    gradient_accumulation_steps: int
    steps: int

    @property
    def layout(self) -> BatchLayout:
        """The layout without the steps."""
        return BatchLayout(self.world_size, self.batch_size, self.gradient_accumulation_steps)


@dataclass(frozen=True, slots=True)
class SampleInfo:
    """What dealing has to know of each sample.

    Attributes:
        costs: what it costs to train, more than 0.
        media_masks: the :class:`~packhorse.types.MediaMask` of its media.
        dataset_ids: a number that says which dataset it is from; None does not spread datasets.
    """

    costs: Floats
    media_masks: Masks
    dataset_ids: Integers | None = None


class Packs:
    """The packs of a plan, and what dealing has to know of each; a fifth of a second for a million."""

    def __init__(self, plan: PackPlan, info: SampleInfo) -> None:
        self.plan, self.info = plan, info
        starts, ordered = plan.offsets[:-1], plan.indices
        self.costs: Floats = np.add.reduceat(info.costs[ordered], starts) if len(plan) else np.zeros(0)
        self.media_masks: Masks = (
            np.bitwise_or.reduceat(info.media_masks[ordered], starts) if len(plan) else np.zeros(0, np.uint8)
        )
        hashed = blake2b(np.ascontiguousarray(plan.offsets).data, digest_size=12)
        hashed.update(np.ascontiguousarray(plan.indices).data)
        self.digest = hashed.hexdigest()
        # Of a pack the dataset of its longest sample, which stands first.
        self.dataset_ids = None if info.dataset_ids is None else info.dataset_ids[ordered[starts]]


class Units:
    """Packs under their numbers, and after them the parts of packs that had to be split."""

    def __init__(self, packs: Packs) -> None:
        self.plan, self.info = packs.plan, packs.info
        self.costs, self.media_masks = packs.costs, packs.media_masks
        self.dataset_ids = packs.dataset_ids
        self.parts: list[Integers] = []
        self._parents: list[int] = []

    def __len__(self) -> int:
        return len(self.plan) + len(self.parts)

    def samples(self, unit: int) -> Integers:
        """The samples of a pack or of a part."""
        if unit < len(self.plan):
            return np.asarray(self.plan[unit], np.int64)
        return self.parts[unit - len(self.plan)]

    def halves(self, unit: int) -> tuple[int, int]:
        """Two new units of about equal cost with the samples of one that has at least two."""
        samples = self.samples(unit)
        costs = self.info.costs[samples]
        parts: tuple[list[int], list[int]] = ([], [])
        loads = [0.0, 0.0]
        for place in np.argsort(-costs, kind="stable").tolist():
            lighter = int(loads[1] < loads[0])
            parts[lighter].append(int(samples[place]))
            loads[lighter] += float(costs[place])
        self.parts += [np.array(part, np.int64) for part in parts]
        self._parents += [unit, unit]
        return len(self) - 2, len(self) - 1

    def cost(self, unit: int) -> float:
        """What a unit costs, one that was split off just now too."""
        if unit < len(self.costs):
            return float(self.costs[unit])
        return float(self.info.costs[self.samples(unit)].sum())

    def merge_parts(self) -> None:
        """Give the parts that were split off their places in the arrays, all at once."""
        new = self.parts[len(self.costs) - len(self.plan) :]
        if not new:
            return
        parents = self._parents[len(self._parents) - len(new) :]
        self.costs = np.append(self.costs, [self.info.costs[part].sum() for part in new])
        masks = np.array([np.bitwise_or.reduce(self.info.media_masks[part]) for part in new], np.uint8)
        self.media_masks = np.append(self.media_masks, masks)
        if self.dataset_ids is not None:
            dataset_ids = self.dataset_ids.tolist()
            for parent in parents:  # which may be a part itself
                dataset_ids.append(dataset_ids[parent])
            self.dataset_ids = np.array(dataset_ids, np.int64)


class PackSchedule:
    """One epoch, dealt to the shape of its last segment.

    Attributes:
        table: the units of each micro-step, rank and place in the rank's batch; ``NOTHING`` where none is.
        units: what the numbers mean.
    """

    def __init__(
        self,
        packs: Packs,
        segments: Sequence[ResumeSegment],
        *,
        seed: int = 0,
        epoch: int = 0,
        at_least: int = 0,
    ) -> None:
        """Deal every segment in turn: each one gets what those before it have left.

        Args:
            packs: of the epoch's plan.
            segments: the shapes of this epoch in order; all steps of the last one are dealt.
            seed: of the order.
            epoch: another order.
            at_least: so many micro-steps at least in the last segment; packs are split to fill them.

        Raises:
            ConfigError: a segment has used more steps than there were.
        """
        self.units = Units(packs)
        left = np.arange(len(packs.plan), dtype=np.int64)
        for turn, segment in enumerate(segments):
            layout = segment.layout.check()
            last = turn == len(segments) - 1
            order_seed = seed if not turn else _other_seed(seed, turn)
            table = schedule_packs(self.units, left, layout, order_seed, epoch, at_least if last else 0)
            if not 0 <= segment.steps <= len(table):
                raise ConfigError(f"{segment}: there are {len(table):,} micro-steps under this layout")
            if last:
                self.table = table
            rest = table[segment.steps :].reshape(-1)
            left = np.sort(rest[rest != NOTHING])
        self._padded = np.append(self.units.costs, 0.0)  # what stands at NOTHING

    def __len__(self) -> int:
        return len(self.table)

    def samples(self, step: int, rank: int) -> list[list[int]]:
        """The samples of each pack that a rank gets in a micro-step."""
        return [self.units.samples(unit).tolist() for unit in self.table[step, rank].tolist() if unit >= 0]

    def media_mask(self, step: int) -> MediaMask:
        """The media that any rank has in a micro-step."""
        units = self.table[step].reshape(-1)
        masks = self.units.media_masks[units[units != NOTHING]]
        return MediaMask(int(np.bitwise_or.reduce(masks, initial=0)))

    def costs(self, step: int) -> Floats:
        """What a micro-step costs each rank."""
        costs: Floats = self._costs(self.table[step : step + 1])[0]
        return costs

    def straggler_ratio(self) -> float:
        """How much longer a step takes than with even work: max / mean over ranks, mean over steps."""
        costs = self._costs(self.table)
        mean = costs.mean(axis=1)
        return float((costs.max(axis=1)[mean > 0] / mean[mean > 0]).mean()) if (mean > 0).any() else 1.0

    def _costs(self, table: Integers) -> Floats:
        costs: Floats = self._padded[table].sum(axis=2)
        return costs


def schedule_packs(
    units: Units, ids: Integers, layout: BatchLayout, seed: int = 0, epoch: int = 0, at_least: int = 0
) -> Integers:
    """Deal units to the ranks of a shape.

    Full steps come from :func:`~packhorse.neat_packing_vlm.order_packs`: packs of equal cost and of the same
    media together, shuffled. What does not fill the last optimiser step is spread over its micro-steps and
    ranks; packs are split where there are fewer of them than ranks, so that every rank has something to
    learn as long as there are samples for it.

    Returns:
        [steps, world, batch]: each of ``ids``, or the parts it was split into, exactly once.
    """
    world, batch, gradient_accumulation_steps = layout
    dataset_ids = None if units.dataset_ids is None else units.dataset_ids[ids]
    masks = units.media_masks[ids]
    order = order_packs(
        units.costs[ids], world * batch, media_masks=masks, dataset_ids=dataset_ids, seed=seed, epoch=epoch
    )
    rows, rest = ids[order.steps], ids[order.rest]
    full = len(rows) // gradient_accumulation_steps * gradient_accumulation_steps
    tail = np.concatenate([rows[full:].reshape(-1), rest])
    steps = max(
        full + (gradient_accumulation_steps if len(tail) else 0),
        -(-at_least // gradient_accumulation_steps) * gradient_accumulation_steps,
    )
    if steps > full and not len(tail) and full:
        full -= gradient_accumulation_steps
        tail = rows[full:].reshape(-1)
    body = rows[:full].reshape(-1, world, batch)
    return np.concatenate([body, _schedule_tail(units, tail, steps - full, world, batch)])


def _schedule_tail(units: Units, ids: Integers, steps: int, world: int, batch: int) -> Integers:
    table = np.full((steps, world, batch), NOTHING, np.int64)
    if not steps:
        return table
    pool = _split(units, ids.tolist(), steps * world)
    pool.sort(key=lambda unit: (int(units.media_masks[unit]), float(units.costs[unit]), unit))
    begin = 0
    for step in range(steps):
        end = begin + (len(pool) - begin) // (steps - step)
        taken = [0] * world
        loads = [(0, 0.0, rank) for rank in range(world)]
        for unit in sorted(pool[begin:end], key=lambda unit: -units.costs[unit]):
            count, load, rank = heapq.heappop(loads)
            table[step, rank, taken[rank]] = unit
            taken[rank] += 1
            heapq.heappush(loads, (count + 1, load + float(units.costs[unit]), rank))
        begin = end
    return table


def _split(units: Units, ids: list[int], wanted: int) -> list[int]:
    """Split the dearest units in two until there are as many as wanted, or all hold a single sample."""
    whole = [unit for unit in ids if len(units.samples(unit)) < 2]
    heap = [(-units.cost(unit), unit) for unit in ids if len(units.samples(unit)) > 1]
    heapq.heapify(heap)
    while heap and len(heap) + len(whole) < wanted:
        _, unit = heapq.heappop(heap)
        for half in units.halves(unit):
            if len(units.samples(half)) > 1:
                heapq.heappush(heap, (-units.cost(half), half))
            else:
                whole.append(half)
    units.merge_parts()
    return [*whole, *(unit for _, unit in heap)]


def _other_seed(seed: int, turn: int) -> int:
    return int.from_bytes(blake2b(f"{seed} {turn}".encode(), digest_size=7).digest(), "little")
