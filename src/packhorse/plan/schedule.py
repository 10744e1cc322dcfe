"""Assign packs to steps and ranks.

A schedule depends on the plan, seed, epoch and layouts alone, so the resume state is only the layouts and
the steps used under each. A million packs take half a second.
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
    """The pack of each rank in each step.

    Attributes:
        steps: [steps, ranks].
        rest: packs that do not fill a step, fewer than ranks.
        mixed: steps whose packs do not all have the same kinds of media.
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
    """Order packs into steps of one pack for each rank.

    The packs of a step have the same kinds of media, if there are enough of them, and the same cost up to
    about twice the tolerance. Within that, the packs of a step, the order of steps and the ranks are random.
    Five million packs take about a second.

    Args:
        costs: of each pack.
        world_size: the number of ranks.
        media_masks: of each pack (``pack_media_masks``); None if all packs have the same media.
        dataset_ids: the dataset of each pack (see :func:`main_dataset`); the order of steps then spreads
            every dataset evenly over the epoch.
        seed: of the shuffle.
        epoch: changes the shuffle.
        tolerance: packs whose costs differ by less count as equal.
    """
    cost: Floats = np.asarray(costs, np.float64)
    if world_size < 1:
        raise ConfigError.of("world_size", world_size, "expected 1 or more")
    if tolerance <= 0:
        raise ConfigError.of("tolerance", tolerance, "expected more than 0")
    if len(cost) and not cost.min() > 0:
        pack = int(cost.argmin())
        raise ConfigError.of("costs", float(cost[pack]), f"expected more than 0, also for pack {pack}")
    masks = np.zeros(len(cost), np.int64) if media_masks is None else np.asarray(media_masks, np.int64)
    if len(masks) != len(cost):
        problem = f"media_masks: expected one for each of the {len(cost):,} packs, found {len(masks):,}"
        raise ConfigError(problem, setting="media_masks", value=len(masks))
    draw = random_generator(seed, epoch)
    # Sort by bands of equal cost, which are shifted in each epoch, and randomly within a band.
    band = np.floor(np.log(cost) / np.log1p(tolerance) + draw.random()).astype(np.int64)
    by_cost = np.lexsort((draw.random(len(cost)), band))
    full_steps, spare = [], []
    middle = float(np.median(cost)) if len(cost) else 0.0
    for mask in np.unique(masks):
        packs = by_cost[masks[by_cost] == mask]
        remainder = len(packs) % world_size
        # Take the remainder from the median cost, where it matches the spare packs of other masks.
        first = int(np.searchsorted(cost[packs], middle)) - remainder // 2
        first = min(max(0, first), len(packs) - remainder)
        spare.append(packs[first : first + remainder])
        full_steps.append(np.delete(packs, np.s_[first : first + remainder]))
    pure = np.concatenate([*full_steps, np.zeros(0, np.int64)]).reshape(-1, world_size)
    rest = np.concatenate([*spare, np.zeros(0, np.int64)])
    rest = rest[np.argsort(cost[rest], kind="stable")]
    full = len(rest) // world_size * world_size
    steps = np.concatenate([pure, rest[:full].reshape(-1, world_size)]).astype(np.int64)
    steps = draw.permuted(steps, axis=1)
    steps = steps[_shuffle_steps(steps, dataset_ids, draw)]
    mixed = np.flatnonzero((masks[steps] != masks[steps[:, :1]]).any(axis=1))
    return StepOrder(steps, rest[full:].astype(np.int64), mixed)


def _shuffle_steps(steps: Integers, dataset_ids: npt.ArrayLike | None, draw: np.random.Generator) -> Integers:
    """Return a random order of the steps, in which every section has its share of each dataset.

    Steps are sorted by content and cut into blocks; each section of the epoch gets one step of each block.
    """
    count = len(steps)
    if dataset_ids is None or count < 4:
        return draw.permutation(count)
    of_packs = np.asarray(dataset_ids)
    shares = np.stack([(of_packs == dataset)[steps].mean(axis=1) for dataset in np.unique(of_packs)])
    by_content = np.lexsort((draw.random(count), shares.max(axis=0), shares.argmax(axis=0)))
    sections = max(1, int(np.sqrt(count)))
    padded = -(-count // sections) * sections
    section = draw.permuted(np.arange(padded).reshape(-1, sections) % sections, axis=1).reshape(-1)[:count]
    return by_content[np.lexsort((draw.random(count), section))]


def main_dataset(
    dataset_ids: npt.ArrayLike, lengths: npt.ArrayLike, pack_of: Integers, packs: int
) -> Integers:
    """Return the dataset that most tokens of each pack are from; a sample in no pack has the pack -1."""
    names, numbers = np.unique(np.asarray(dataset_ids), return_inverse=True)
    inside = pack_of >= 0
    cells = pack_of[inside] * len(names) + numbers.reshape(-1)[inside]
    tokens = np.bincount(cells, weights=np.asarray(lengths)[inside], minlength=packs * len(names))
    return np.asarray(names[tokens.reshape(packs, -1).argmax(axis=1)], np.int64)


Masks = npt.NDArray[np.uint8]

VISUAL = np.uint8(MediaMask.of(("image", "video")))

NOTHING = -1
"""In a schedule: no pack."""


class BatchLayout(NamedTuple):
    """How an epoch is divided into micro-steps.

    Attributes:
        world_size: ranks that share the packs.
        batch_size: packs (or samples) that a rank gets in a micro-step.
        gradient_accumulation_steps: the number of micro-steps is a multiple of this.
    """

    world_size: int
    batch_size: int = 1
    gradient_accumulation_steps: int = 1

    def check(self) -> BatchLayout:
        """Return the layout; raise :class:`ConfigError` if a number is below 1."""
        for name, number in self._asdict().items():
            if number < 1:
                raise ConfigError.of(name, number, "expected 1 or more")
        return self


class ResumeSegment(NamedTuple):
    """A part of an epoch under one layout, and the micro-steps that were used of it."""

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
    """What the schedule needs of each sample.

    Attributes:
        costs: cost of training on it, more than 0.
        media_masks: its :class:`~packhorse.types.MediaMask`.
        dataset_ids: its dataset; None does not spread datasets.
        pack_cost: cost of each pack in addition to its samples.
        encoder_cost: likewise of each pack with images or videos; 0 if all ranks of a step have it.
    """

    costs: Floats
    media_masks: Masks
    dataset_ids: Integers | None = None
    pack_cost: float = 0.0
    encoder_cost: float = 0.0

    def cost(self, samples: Integers) -> float:
        """Return the cost of a pack of these samples."""
        costs, mask = float(self.costs[samples].sum()), np.bitwise_or.reduce(self.media_masks[samples])
        return costs + float(self.costs_of_packs(np.array([mask], np.uint8))[0])

    def costs_of_packs(self, media_masks: Masks) -> Floats:
        """Return the cost of packs with these media in addition to their samples."""
        return self.pack_cost + self.encoder_cost * np.asarray(media_masks & VISUAL > 0, np.float64)


class Packs:
    """The packs of a plan with what the schedule needs of each; a million take a fifth of a second."""

    def __init__(self, plan: PackPlan, info: SampleInfo) -> None:
        self.plan, self.info = plan, info
        starts, ordered = plan.offsets[:-1], plan.indices
        self.media_masks: Masks = (
            np.bitwise_or.reduceat(info.media_masks[ordered], starts) if len(plan) else np.zeros(0, np.uint8)
        )
        of_samples = np.add.reduceat(info.costs[ordered], starts) if len(plan) else np.zeros(0)
        self.costs: Floats = of_samples + info.costs_of_packs(self.media_masks)
        hashed = blake2b(np.ascontiguousarray(plan.offsets).data, digest_size=12)
        hashed.update(np.ascontiguousarray(plan.indices).data)
        self.digest = hashed.hexdigest()
        # The dataset of the longest sample, which is the first.
        self.dataset_ids = None if info.dataset_ids is None else info.dataset_ids[ordered[starts]]


class Units:
    """The units of a schedule: packs by their numbers, then the parts of packs that were split."""

    def __init__(self, packs: Packs) -> None:
        self.plan, self.info = packs.plan, packs.info
        self.costs, self.media_masks = packs.costs, packs.media_masks
        self.dataset_ids = packs.dataset_ids
        self.parts: list[Integers] = []
        self._parents: list[int] = []

    def __len__(self) -> int:
        return len(self.plan) + len(self.parts)

    def samples(self, unit: int) -> Integers:
        """Return the samples of a unit."""
        if unit < len(self.plan):
            return np.asarray(self.plan[unit], np.int64)
        return self.parts[unit - len(self.plan)]

    def pack(self, unit: int) -> int:
        """Return the number of the pack that a unit is, or is a part of."""
        while unit >= len(self.plan):
            unit = self._parents[unit - len(self.plan)]
        return unit

    def split(self, unit: int) -> tuple[int, int]:
        """Split a unit of at least two samples into two new ones of about equal cost."""
        samples = self.samples(unit)
        costs = self.info.costs[samples]
        parts: tuple[list[int], list[int]] = ([], [])
        loads = [0.0, 0.0]
        for position in np.argsort(-costs, kind="stable").tolist():
            lighter = int(loads[1] < loads[0])
            parts[lighter].append(int(samples[position]))
            loads[lighter] += float(costs[position])
        self.parts += [np.array(part, np.int64) for part in parts]
        self._parents += [unit, unit]
        return len(self) - 2, len(self) - 1

    def cost(self, unit: int) -> float:
        """Return the cost of a unit, also before :meth:`merge_parts`."""
        if unit < len(self.costs):
            return float(self.costs[unit])
        return self.info.cost(self.samples(unit))

    def merge_parts(self) -> None:
        """Append the new parts to the arrays."""
        new = self.parts[len(self.costs) - len(self.plan) :]
        if not new:
            return
        self.costs = np.append(self.costs, [self.info.cost(part) for part in new])
        masks = np.array([np.bitwise_or.reduce(self.info.media_masks[part]) for part in new], np.uint8)
        self.media_masks = np.append(self.media_masks, masks)
        if self.dataset_ids is not None:
            dataset_ids = self.dataset_ids.tolist()
            for parent in self._parents[-len(new) :]:  # may be a part itself
                dataset_ids.append(dataset_ids[parent])
            self.dataset_ids = np.array(dataset_ids, np.int64)


class PackSchedule:
    """The schedule of one epoch under the layout of its last segment.

    Attributes:
        table: [steps, world_size, batch_size], numbers of ``units`` or ``NOTHING``.
        units: the packs and parts of packs.
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
        """Schedule every segment in turn; each gets the packs that those before it did not use.

        Packs are split until the last segment has ``at_least`` micro-steps. Raises :class:`ConfigError` if a
        segment has used more steps than it has.
        """
        self.units = Units(packs)
        left = np.arange(len(packs.plan), dtype=np.int64)
        for turn, segment in enumerate(segments):
            layout = segment.layout.check()
            last = turn == len(segments) - 1
            drawn = blake2b(f"{seed} {turn}".encode(), digest_size=7).digest()
            order_seed = int.from_bytes(drawn, "little") if turn else seed
            table = schedule_packs(self.units, left, layout, order_seed, epoch, at_least if last else 0)
            if not 0 <= segment.steps <= len(table):
                raise ConfigError.of("steps", segment.steps, f"{layout} has {len(table):,} micro-steps")
            if last:
                self.table = table
            rest = table[segment.steps :].reshape(-1)
            left = np.sort(rest[rest != NOTHING])
        self._padded_costs = np.append(self.units.costs, 0.0)  # the last one is for NOTHING

    def __len__(self) -> int:
        return len(self.table)

    def samples(self, step: int, rank: int) -> list[list[int]]:
        """Return the samples of each pack of a rank in a micro-step."""
        return [self.units.samples(unit).tolist() for unit in self.table[step, rank].tolist() if unit >= 0]

    def media_mask(self, step: int) -> MediaMask:
        """Return the media that any rank has in a micro-step."""
        units = self.table[step].reshape(-1)
        masks = self.units.media_masks[units[units != NOTHING]]
        return MediaMask(int(np.bitwise_or.reduce(masks, initial=0)))

    def costs(self, step: int) -> Floats:
        """Return the cost of a micro-step on each rank."""
        costs: Floats = self._padded_costs[self.table[step]].sum(axis=1)
        return costs

    def rank_costs(self) -> Floats:
        """Return the cost of every micro-step on each rank: [steps, ranks]."""
        costs: Floats = self._padded_costs[self.table].sum(axis=2)
        return costs

    def straggler_ratio(self) -> float:
        """Return max / mean of the costs over ranks, averaged over steps; 1.0 is perfectly even."""
        costs = self.rank_costs()
        mean = costs.mean(axis=1)
        return float((costs.max(axis=1)[mean > 0] / mean[mean > 0]).mean()) if (mean > 0).any() else 1.0


def schedule_packs(
    units: Units, ids: Integers, layout: BatchLayout, seed: int = 0, epoch: int = 0, at_least: int = 0
) -> Integers:
    """Assign units to steps and ranks: [steps, world_size, batch_size].

    Full steps come from :func:`order_packs`. The packs that do not fill the last optimizer step are spread
    over its micro-steps and ranks; if they are fewer than ranks, they are split, so that every rank has
    samples as long as there are enough.
    """
    world, batch, accumulation = layout
    dataset_ids = None if units.dataset_ids is None else units.dataset_ids[ids]
    masks = units.media_masks[ids]
    order = order_packs(
        units.costs[ids], world * batch, media_masks=masks, dataset_ids=dataset_ids, seed=seed, epoch=epoch
    )
    rows, rest = ids[order.steps], ids[order.rest]
    full = len(rows) // accumulation * accumulation
    tail = np.concatenate([rows[full:].reshape(-1), rest])
    steps = max(full + (accumulation if len(tail) else 0), -(-at_least // accumulation) * accumulation)
    if steps > full and not len(tail) and full:
        full -= accumulation
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
    """Split the most expensive units until there are enough, or all hold a single sample."""
    single = [unit for unit in ids if len(units.samples(unit)) < 2]
    heap = [(-units.cost(unit), unit) for unit in ids if len(units.samples(unit)) > 1]
    heapq.heapify(heap)
    while heap and len(heap) + len(single) < wanted:
        _, unit = heapq.heappop(heap)
        for half in units.split(unit):
            if len(units.samples(half)) > 1:
                heapq.heappush(heap, (-units.cost(half), half))
            else:
                single.append(half)
    units.merge_parts()
    return [*single, *(unit for _, unit in heap)]
