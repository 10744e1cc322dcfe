"""A plan in numbers: what ``packhorse plan`` prints, under names that stay, and what the overview draws.

Costs a dealing of the packs for each world size (half a second for a million packs) and a few passes over
the counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from packhorse.count.columns import Distribution
from packhorse.formats.estimate import image_config, video_config
from packhorse.loader.epoch_stats import exceeds_share
from packhorse.plan.lengths import estimated_lengths
from packhorse.plan.pack_plan import PackPlan
from packhorse.plan.planning import plan_packs
from packhorse.plan.schedule import (
    BatchLayout,
    Packs,
    PackSchedule,
    ResumeSegment,
    Units,
    random_generator,
    schedule_packs,
)
from packhorse.tools.view.plan_book import Planned, Request, make_plan
from packhorse.types import MEDIA_KINDS
from packhorse.utils.progress import OnProgress, Progress

Integers = npt.NDArray[np.int64]

BATCH = 8
MOST_ESTIMATED = 200_000


def padding(planned: Planned) -> dict[str, Any]:
    """Slots (tokens that the model computes) and the share of them that is wasted, for the packed rows.

    Batches of ``BATCH`` rows are padded to their longest row: rows as they come at random, and neighbours in
    length, which is the best that padding can do. ``packed`` are packs that are padded to the pack size, as
    with ``pad_to_size=True``; ``packed_unpadded`` end with their last sample, as the loader hands them out
    one by one.
    """
    plan, config = planned.packs.plan, planned.request.config
    lengths = planned.planner.lengths[plan.indices]
    aligned = int((lengths + -lengths % config.alignment).sum())
    shuffled = random_generator(config.seed).permutation(lengths)
    tokens = int(lengths.sum())
    return {
        "batch_size": BATCH,
        "tokens": tokens,
        "random": _wasted(padded_slots(shuffled, BATCH), tokens),
        "by_length": _wasted(padded_slots(np.sort(lengths)[::-1], BATCH), tokens),
        "packed": _wasted(len(plan) * config.pack_size, tokens),
        "packed_unpadded": _wasted(aligned, tokens),
    }


def padded_slots(lengths: Integers, batch: int) -> int:
    """Tokens of all batches when each is padded to its longest row; the last one may be short."""
    if not len(lengths):
        return 0
    starts = np.arange(0, len(lengths), batch)
    sizes = np.diff(np.append(starts, len(lengths)))
    return int((np.maximum.reduceat(lengths, starts) * sizes).sum())


def _wasted(slots: int, tokens: int) -> dict[str, Any]:
    return {"slots": slots, "wasted": 1 - tokens / slots if slots else 0.0}


def estimated(
    planned: Planned, progress: OnProgress | None = None, most: int = MOST_ESTIMATED
) -> dict[str, Any]:
    """What becomes of the rows if packs are planned by estimated lengths and what overflows is dropped.

    Args:
        planned: the exact plan; only rows that are in it are looked at.
        progress: called with the number of rows read; None logs it every few seconds.
        most: where there are more rows, so many of them, evenly spaced.

    Returns:
        ``rows`` that were compared; ``lost_overflow``: rows whose pack was already full; ``lost_too_long``:
        rows that were taken for longer than a pack; ``lost``: both; ``fill``: what the packs hold in the
        end; ``packs``; ``error_mean`` and ``error_p99``: by how many tokens estimates are off.
    """
    rows = np.sort(planned.packs.plan.indices).astype(np.int64)
    if len(rows) > most:
        rows = rows[np.linspace(0, len(rows) - 1, most).astype(np.int64)]
    guesses = _guesses(planned, rows, progress or Progress("estimating lengths"))
    room = planned.planner.capacity
    real = planned.planner.lengths[rows]
    plan = plan_packs(np.maximum(guesses - 1, 1), room, seed=planned.request.config.seed)
    overflow = overflowing(plan, real, room)
    lost = np.zeros(len(rows), bool)
    lost[overflow] = lost[plan.dropped] = True
    off = np.abs(guesses - 1 - real)
    slots = room * len(plan)
    return {
        "rows": len(rows),
        "packs": len(plan),
        "lost_overflow": len(overflow),
        "lost_too_long": len(plan.dropped),
        "lost": int(lost.sum()),
        "lost_share": float(lost.mean()) if len(rows) else 0.0,
        "fill": float(real[~lost].sum()) / slots if slots else 0.0,
        "error_mean": float(off.mean()) if len(rows) else 0.0,
        "error_p99": Distribution.of(off).percentile(99),
    }


def _guesses(planned: Planned, rows: Integers, progress: OnProgress) -> Integers:
    processor = planned.opened.processor
    configs = image_config(processor), video_config(processor)

    def report(done: int) -> None:
        progress(done, len(rows))

    return estimated_lengths(planned.opened.dataset, rows, *configs, report).tokens


def overflowing(plan: PackPlan, lengths: Integers, room: int) -> list[int]:
    """The samples that find their pack full, where each takes its samples in order as long as they fit."""
    gone: list[int] = []
    for pack in np.flatnonzero(plan.sums(lengths) > room).tolist():
        used = 0
        for sample in plan[pack].tolist():
            if used + int(lengths[sample]) > room:
                gone.append(sample)
            else:
                used += int(lengths[sample])
    return gone


VERSION = 1
WORLD_SIZES = (1, 8, 64, 512)
"""For which the straggler ratio is printed."""

_MORE_SIZES = (2, 4, 16, 32, 128, 256)
_MANY_PACKS = 200_000  # of more, only the sizes above are dealt
_FILL_BINS = 20
_KEYS = 5  # of rows that are named
_SETTINGS = ("pack_size", "seed", "alignment", "on_overlong", "max_patches", "max_media", "max_documents")


def plan_report(
    planned: Planned,
    *,
    ranks: Sequence[int] = (),
    estimates: bool = True,
    progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Everything there is to say about a plan, as plain values.

    Args:
        planned: the plan.
        ranks: further numbers of ranks for which to tell the straggler ratio.
        estimates: also compare with estimated lengths, for which rows are read.
        progress: told how many of them were.
    """
    request, plan, planner = planned.request, planned.packs.plan, planned.planner
    config = request.config
    return {
        "version": VERSION,
        "name": planner.name,
        "meta": str(config.data),
        "processor": request.processor_name,
        "model": planned.model,
        "epoch": request.epoch,
        "settings": {name: getattr(config, name) for name in _SETTINGS},
        "rows": len(planned.counts),
        "packed": len(plan.indices),
        "dropped": len(plan.dropped),
        "packs": len(plan),
        "fewest_packs": plan.bound,
        "pack_size": config.pack_size,
        "reserve": planned.reserve,
        "capacity": plan.capacity,
        "tokens": int(plan.tokens.sum()),
        "supervised": int(planned.counts.supervised[plan.indices].sum()),
        "fill": plan.fill,
        "documents_per_pack": _spread(np.diff(plan.offsets)),
        "straggler": stragglers(planned.packs, config.seed, request.epoch, ranks),
        "reasons": _reasons(planned),
        "bad": int((~planned.counts.ok).sum()),
        "max_bad_share": config.max_bad_share,
        "nothing_supervised": _nothing_supervised(planned),
        "not_drawn": planned.opened.ledger.counts(),
        "datasets": _datasets(planned),
        "histograms": _histograms(planned),
        "padding": padding(planned),
        "estimated": estimated(planned, progress) if estimates else None,
    }


def sizes_report(request: Request, sizes: Sequence[int]) -> dict[str, Any]:
    """The same rows in packs of several sizes, as plain values; nothing is saved.

    Args:
        request: what is to be planned; its own pack size is passed over.
        sizes: of packs, told from the smallest on. Each costs a planning and a dealing.
    """
    opened, found = None, []
    for size in sorted(sizes):
        planned = make_plan(replace(request, config=request.config.with_changes(pack_size=size)), opened)
        opened, plan, costs = planned.opened, planned.packs.plan, padding(planned)
        schedule = PackSchedule(
            planned.packs, [ResumeSegment(8, 1, 1, 0)], seed=request.config.seed, epoch=request.epoch
        )
        found.append(
            {
                "pack_size": size,
                "reserve": planned.reserve,
                "capacity": plan.capacity,
                "packs": len(plan),
                "packed": len(plan.indices),
                "dropped": len(plan.dropped),
                "too_long": len(plan.dropped_by_reason().get("too_long", ())),
                "tokens": costs["tokens"],
                "fill": plan.fill,
                "padded_wasted": costs["packed"]["wasted"],
                "documents_per_pack": _spread(np.diff(plan.offsets)),
                "straggler_8": schedule.straggler_ratio(),
            }
        )
    # Of the rows that fit into the largest packs.
    shared = {name: costs[name] for name in ("batch_size", "tokens", "random", "by_length")}
    names = {"meta": str(request.config.data), "processor": request.processor_name}
    return {"version": VERSION, **names, "sizes": found, "padding": shared}


def too_many_bad(report: Mapping[str, Any]) -> str:
    """What the loader will say of the rows that cannot be used, where it will not start; else nothing."""
    share, bad, rows = report.get("max_bad_share"), report.get("bad", 0), report["rows"]
    if share is None or not exceeds_share(bad, rows, share):
        return ""
    return (
        f"the loader stops at more than {100 * share:.4g} % bad rows (max_bad_share): {bad:,} of {rows:,} "
        f"are ({bad / rows:.2%}); mend them (`packhorse check` says how), or raise max_bad_share"
    )


def stragglers(packs: Packs, seed: int, epoch: int, more: Sequence[int] = ()) -> list[dict[str, Any]]:
    """For each world size: max / mean cost over the ranks of a step, as the loader deals and at random.

    Both are means over all steps of the epoch. What does not fill the last one is spread over its ranks in
    the same way in both; only the order of the packs differs.
    """
    if not len(packs.plan):
        return []
    many = len(packs.plan) > _MANY_PACKS
    shuffled = random_generator(seed).permutation(len(packs.plan))
    found = []
    for ranks in sorted({*WORLD_SIZES, *more, *(() if many else _MORE_SIZES)}):
        schedule = PackSchedule(packs, [ResumeSegment(ranks, 1, 1, 0)], seed=seed, epoch=epoch)
        ratio = _ratio_in_order(packs, shuffled, ranks)
        found.append(
            {"ranks": ranks, "ratio": schedule.straggler_ratio(), "random": ratio, "steps": len(schedule)}
        )
    return found


def _ratio_in_order(packs: Packs, order: npt.NDArray[np.int64], ranks: int) -> float:
    """The straggler ratio of packs that are assigned in this order."""
    full = len(order) // ranks * ranks
    steps = packs.costs[order[:full]].reshape(-1, ranks)
    if full < len(order):
        units = Units(packs)
        last = schedule_packs(units, np.sort(order[full:]), BatchLayout(ranks, 1, 1))
        steps = np.concatenate([steps, np.append(units.costs, 0.0)[last].sum(axis=2)])
    return float((steps.max(axis=1) / steps.mean(axis=1)).mean())


def _spread(values: npt.NDArray[Any]) -> dict[str, Any]:
    spread = Distribution.of(values)
    quartiles = {f"p{percent}": spread.percentile(percent) for percent in (25, 50, 75)}
    return {"mean": spread.mean, "min": spread.min, **quartiles, "max": spread.max}


def _reasons(planned: Planned) -> list[dict[str, Any]]:
    """Why rows are in no pack, the most frequent reason first, each with some of its rows."""
    found: dict[str, list[Any]] = defaultdict(list)
    for drop in planned.dropped:
        found[drop.reason].append(drop)
    groups = sorted(found.items(), key=lambda group: (-len(group[1]), group[0]))
    return [
        {
            "reason": reason,
            "rows": len(drops),
            "keys": [drop.key for drop in drops[:_KEYS]],
            "detail": drops[0].detail,
        }
        for reason, drops in groups
    ]


def _nothing_supervised(planned: Planned) -> dict[str, Any]:
    """Rows that are in a pack though no token of them is supervised: how many, and some of them."""
    packed = np.sort(planned.packs.plan.indices)
    found = packed[planned.counts.supervised[packed] == 0]
    return {"rows": len(found), "keys": [planned.opened.dataset.key(int(row)) for row in found[:_KEYS]]}


def _datasets(planned: Planned) -> list[dict[str, Any]]:
    counts, plan = planned.counts, planned.packs.plan
    inside = np.zeros(len(counts), bool)
    inside[plan.indices] = True
    found, first = [], 0
    for name, rows in planned.opened.dataset.lengths().items():
        part = slice(first, first + rows)
        kept = inside[part]
        one: dict[str, Any] = {"name": name, "rows": rows, "packed": int(kept.sum())}
        one["tokens"] = int(counts.total[part][kept].sum())
        for kind in ("text", *MEDIA_KINDS, "supervised"):
            one[kind] = int(getattr(counts, kind)[part][kept].sum())
        found.append(one)
        first += rows
    return found


def _histograms(planned: Planned) -> dict[str, Any]:
    plan = planned.packs.plan
    shares = plan.tokens / plan.capacity
    fill, _ = np.histogram(shares, _FILL_BINS, (0.0, 1.0))
    totals = planned.counts.total[planned.counts.ok]
    longest = int(totals.max()) if len(totals) else 0
    edges = [0, *(2**power for power in range(4, max(5, longest.bit_length() + 1)))]
    lengths, _ = np.histogram(totals, edges)
    return {
        "fill": {"edges": [n / _FILL_BINS for n in range(_FILL_BINS + 1)], "counts": fill.tolist()},
        "length": {"edges": edges, "counts": lengths.tolist()},
    }
