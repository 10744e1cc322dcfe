"""Plans in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from packhorse.errors import ConfigError
from packhorse.neat_packing_vlm.balance import straggler_ratio
from packhorse.neat_packing_vlm.fill import Integers
from packhorse.neat_packing_vlm.order import order_packs
from packhorse.neat_packing_vlm.pack_plan import BAD_ROW, DROP_REASONS, PackPlan

QUARTILES = (0, 25, 50, 75, 100)
"""The least, the quartiles and the most."""

_WORLD_SIZES = (8, 64, 512)


def describe(plan: PackPlan, world_sizes: Iterable[int] | None = None) -> str:
    """A few lines about a plan.

    Args:
        plan: the plan; straggler ratios need the costs of its packs (``PackPlan.with_costs``).
        world_sizes: for which to predict the straggler ratio of ``order_packs``; None for some usual ones,
            where costs are known.
    """
    samples, bad = np.diff(plan.offsets), int((plan.drop_codes == BAD_ROW).sum())
    counted = f"{len(plan.indices):,} packed, " + (f"{bad:,} bad, " if bad else "")
    lines = [
        f"packs      {len(plan):,} of {plan.capacity:,} tokens (no plan has fewer than {plan.bound:,})",
        f"fill       {100 * plan.fill:.3f} %: {plan.tokens.sum():,} tokens",
        f"samples    {counted}{len(plan.dropped) - bad:,} dropped",
    ]
    if len(plan):
        quartiles = ", ".join(f"{value:,}" for value in percentiles(samples, QUARTILES))
        lines.append(f"per pack   {samples.mean():.2f} samples (least, quartiles, most: {quartiles})")
    for reason, positions in plan.dropped_by_reason().items():
        some = ", ".join(map(str, positions[:5].tolist())) + (", …" if len(positions) > 5 else "")
        what = "bad        " if reason == DROP_REASONS[BAD_ROW] else f"dropped    {reason}: "
        lines.append(f"{what}{len(positions):,} of {plan.samples:,} (samples {some})")
    if plan.costs is not None:
        sizes = _WORLD_SIZES if world_sizes is None else world_sizes
        lines.extend(_straggler_line(plan, world_size) for world_size in sizes)
    elif world_sizes is not None and list(world_sizes):
        lines.append("straggler  not known: the plan has no costs (PackPlan.with_costs)")
    return "\n".join(lines)


def percentiles(values: npt.NDArray[Any], percents: Sequence[int]) -> list[int]:
    """Of whole numbers, at least one: each is the smallest value that at least so many percent do not exceed.

    Real values, none in between, as ``packhorse stats`` tells them. Costs a sort.
    """
    ranks = [max(1, -(-len(values) * percent // 100)) for percent in percents]
    ordered = np.sort(values)
    return [int(ordered[rank - 1]) for rank in ranks]


def _straggler_line(plan: PackPlan, world_size: int) -> str:
    assert plan.costs is not None
    order = order_packs(plan.costs, world_size, kinds=plan.kinds)
    if not len(order.steps):
        return f"straggler  {world_size:>4} ranks: more ranks than packs"
    ratio = straggler_ratio(plan.costs, order.steps)
    mixed = f", {len(order.mixed):,} with mixed media" if plan.kinds is not None else ""
    return f"straggler  {world_size:>4} ranks: {ratio:.4f} over {len(order.steps):,} steps{mixed}"


def diff(before: PackPlan, after: PackPlan) -> str:
    """What is different between two plans of the same samples.

    A sample counts as moved if it has not the same companions in both plans; the number of a pack is nothing.
    """
    if before.samples != after.samples:
        raise ConfigError(
            f"plans of {before.samples:,} and {after.samples:,} samples: expected the same samples in both"
        )
    old, new = before.pack_of(), after.pack_of()
    moved = (_companions(old) != _companions(new)) & (old >= 0) & (new >= 0)
    lines = [
        f"packs      {len(before):,} -> {len(after):,} ({len(after) - len(before):+,})",
        f"capacity   {before.capacity:,} -> {after.capacity:,}",
        f"fill       {100 * before.fill:.3f} % -> {100 * after.fill:.3f} %",
        f"moved      {int(moved.sum()):,} of {before.samples:,} samples have other companions",
        f"dropped    {len(before.dropped):,} -> {len(after.dropped):,}"
        f" ({int(((old >= 0) & (new < 0)).sum()):,} newly, {int(((old < 0) & (new >= 0)).sum()):,} no more)",
    ]
    return "\n".join(lines)


def _companions(pack_of: Integers) -> npt.NDArray[np.uint64]:
    """For each sample a number that is the same in two plans if its pack holds the same samples in both."""
    numbers = np.arange(1, len(pack_of) + 1, dtype=np.uint64)
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    totals = np.zeros(int(pack_of.max(initial=-1)) + 2, np.uint64)  # the last place is for samples in no pack
    np.add.at(totals, pack_of, mixed)
    found: npt.NDArray[np.uint64] = totals[pack_of]
    return found
