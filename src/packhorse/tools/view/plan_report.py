"""The numbers of a plan: what ``packhorse plan`` prints as JSON and what the viewer's overview shows.

A report schedules the packs once per world size (half a second for a million packs) and reads the counts a
few times.
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
from packhorse.tools.view.saved_plan import PlanRequest, PlanResult, make_plan
from packhorse.types import MEDIA_KINDS, Drop, Integers
from packhorse.utils.progress import OnProgress, Progress

VERSION = 1
BATCH_SIZE = 8  # of the padded batches that packs are compared with
MAX_ESTIMATED = 200_000
WORLD_SIZES = (1, 8, 64, 512)
"""World sizes whose straggler ratio is printed."""

_MORE_WORLD_SIZES = (2, 4, 16, 32, 128, 256)
_MANY_PACKS = 200_000  # with more packs, only WORLD_SIZES are scheduled
_FILL_BINS = 20
_MAX_KEYS = 5  # example rows per reason
_SETTINGS = ("pack_size", "seed", "alignment", "on_overlong", "max_patches", "max_media", "max_documents")


def plan_report(
    planned: PlanResult,
    *,
    ranks: Sequence[int] = (),
    estimates: bool = True,
    progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Return all numbers of a plan as plain values.

    Args:
        planned: the plan.
        ranks: additional world sizes for the straggler ratio.
        estimates: also compare with estimated lengths, which reads rows.
        progress: called with the number of rows read.
    """
    request, plan, counts = planned.request, planned.packs.plan, planned.counts
    config, packed = request.config, np.sort(plan.indices)
    unsupervised = packed[counts.supervised[packed] == 0]
    return {
        "version": VERSION,
        "name": planned.planner.name,
        "meta": str(config.data),
        "processor": request.processor_name,
        "model": planned.model,
        "epoch": request.epoch,
        "settings": {name: getattr(config, name) for name in _SETTINGS},
        "rows": len(counts),
        "packed": len(plan.indices),
        "dropped": len(plan.dropped),
        "packs": len(plan),
        "fewest_packs": plan.bound,
        "pack_size": config.pack_size,
        "reserve": planned.reserve,
        "capacity": plan.capacity,
        "tokens": int(plan.tokens.sum()),
        "supervised": int(counts.supervised[plan.indices].sum()),
        "fill": plan.fill,
        "documents_per_pack": _summarize(np.diff(plan.offsets)),
        "straggler": stragglers(planned.packs, config.seed, request.epoch, ranks),
        "reasons": _report_reasons(planned.dropped),
        "bad": int((~counts.ok).sum()),
        "max_bad_share": config.max_bad_share,
        "nothing_supervised": {
            "rows": len(unsupervised),
            "keys": [planned.opened.dataset.key(int(row)) for row in unsupervised[:_MAX_KEYS]],
        },
        "not_drawn": planned.opened.ledger.counts(),
        "datasets": _report_datasets(planned),
        "histograms": _histograms(planned),
        "padding": padding_report(planned),
        "estimated": estimate_losses(planned, progress) if estimates else None,
    }


def sizes_report(request: PlanRequest, sizes: Sequence[int]) -> dict[str, Any]:
    """Return the numbers of the same rows in packs of several sizes, ascending; nothing is saved."""
    opened, reports = None, []
    for size in sorted(sizes):
        planned = make_plan(replace(request, config=request.config.with_changes(pack_size=size)), opened)
        opened, plan, padding = planned.opened, planned.packs.plan, padding_report(planned)
        segments = [ResumeSegment(8, 1, 1, 0)]
        schedule = PackSchedule(planned.packs, segments, seed=request.config.seed, epoch=request.epoch)
        reports.append(
            {
                "pack_size": size,
                "reserve": planned.reserve,
                "capacity": plan.capacity,
                "packs": len(plan),
                "packed": len(plan.indices),
                "dropped": len(plan.dropped),
                "too_long": len(plan.dropped_by_reason().get("too_long", ())),
                "tokens": padding["tokens"],
                "fill": plan.fill,
                "padded_wasted": padding["packed"]["wasted"],
                "documents_per_pack": _summarize(np.diff(plan.offsets)),
                "straggler_8": schedule.straggler_ratio(),
            }
        )
    # The rows that fit into the largest packs.
    shared = {name: padding[name] for name in ("batch_size", "tokens", "random", "by_length")}
    names = {"meta": str(request.config.data), "processor": request.processor_name}
    return {"version": VERSION, **names, "sizes": reports, "padding": shared}


def padding_report(planned: PlanResult) -> dict[str, Any]:
    """Return slots (tokens that the model computes) and the wasted share of them, for the packed rows.

    Batches of ``BATCH_SIZE`` rows are padded to their longest row: rows in random order, and rows sorted by
    length, which is the best that padding can do. ``packed`` are packs padded to the pack size, as with
    ``pad_to_size=True``; ``packed_unpadded`` end with their last sample, as the loader yields them.
    """
    plan, config = planned.packs.plan, planned.request.config
    lengths = planned.planner.lengths[plan.indices]
    tokens = int(lengths.sum())
    slots = {
        "random": padded_slots(random_generator(config.seed).permutation(lengths), BATCH_SIZE),
        "by_length": padded_slots(np.sort(lengths)[::-1], BATCH_SIZE),
        "packed": len(plan) * config.pack_size,
        "packed_unpadded": int((lengths + -lengths % config.alignment).sum()),
    }
    methods = {
        name: {"slots": total, "wasted": 1 - tokens / total if total else 0.0}
        for name, total in slots.items()
    }
    return {"batch_size": BATCH_SIZE, "tokens": tokens, **methods}


def padded_slots(lengths: Integers, batch_size: int) -> int:
    """Return the tokens of all batches if each is padded to its longest row."""
    if not len(lengths):
        return 0
    starts = np.arange(0, len(lengths), batch_size)
    sizes = np.diff(np.append(starts, len(lengths)))
    return int((np.maximum.reduceat(lengths, starts) * sizes).sum())


def estimate_losses(
    planned: PlanResult, progress: OnProgress | None = None, limit: int = MAX_ESTIMATED
) -> dict[str, Any]:
    """Return how many packed rows are lost if packs are planned by estimated lengths and overflow is dropped.

    Compares at most ``limit`` rows, evenly spaced. ``lost_overflow`` are rows whose pack was already full,
    ``lost_too_long`` rows estimated longer than a pack; errors of the estimates are in tokens.
    """
    rows = np.sort(planned.packs.plan.indices).astype(np.int64)
    if len(rows) > limit:
        rows = rows[np.linspace(0, len(rows) - 1, limit).astype(np.int64)]
    report = progress or Progress("estimating lengths")
    processor, dataset = planned.opened.processor, planned.opened.dataset
    configs = image_config(processor), video_config(processor)
    estimates = estimated_lengths(dataset, rows, *configs, lambda done: report(done, len(rows))).tokens - 1
    capacity = planned.planner.capacity
    lengths = planned.planner.lengths[rows]
    plan = plan_packs(np.maximum(estimates, 1), capacity, seed=planned.request.config.seed)
    overflow = find_overflow(plan, lengths, capacity)
    lost = np.zeros(len(rows), bool)
    lost[overflow] = lost[plan.dropped] = True
    errors = np.abs(estimates - lengths)
    slots = capacity * len(plan)
    return {
        "rows": len(rows),
        "packs": len(plan),
        "lost_overflow": len(overflow),
        "lost_too_long": len(plan.dropped),
        "lost": int(lost.sum()),
        "lost_share": float(lost.mean()) if len(rows) else 0.0,
        "fill": float(lengths[~lost].sum()) / slots if slots else 0.0,
        "error_mean": float(errors.mean()) if len(rows) else 0.0,
        "error_p99": Distribution.of(errors).percentile(99),
    }


def find_overflow(plan: PackPlan, lengths: Integers, capacity: int) -> list[int]:
    """Return the samples that do not fit if each pack takes its samples in order as long as they fit."""
    overflow: list[int] = []
    for pack in np.flatnonzero(plan.sums(lengths) > capacity).tolist():
        used = 0
        for sample in plan[pack].tolist():
            if used + int(lengths[sample]) > capacity:
                overflow.append(sample)
            else:
                used += int(lengths[sample])
    return overflow


def bad_rows_warning(report: Mapping[str, Any]) -> str:
    """Return a warning if the share of bad rows exceeds the loader's limit, else an empty string."""
    share, bad, rows = report.get("max_bad_share"), report.get("bad", 0), report["rows"]
    if share is None or not exceeds_share(bad, rows, share):
        return ""
    return (
        f"the loader stops at more than {100 * share:.4g} % bad rows (max_bad_share): {bad:,} of {rows:,} "
        f"are bad ({bad / rows:.2%}); repair them (see `packhorse check`), or raise max_bad_share"
    )


def stragglers(packs: Packs, seed: int, epoch: int, more: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Return max / mean cost over the ranks of a step, by world size, as scheduled and in random order.

    Both are means over all steps of the epoch; the incomplete last step is spread over its ranks in the same
    way in both.
    """
    if not len(packs.plan):
        return []
    sizes = {*WORLD_SIZES, *more, *(() if len(packs.plan) > _MANY_PACKS else _MORE_WORLD_SIZES)}
    shuffled = random_generator(seed).permutation(len(packs.plan))
    reports = []
    for ranks in sorted(sizes):
        schedule = PackSchedule(packs, [ResumeSegment(ranks, 1, 1, 0)], seed=seed, epoch=epoch)
        ratios = {"ratio": schedule.straggler_ratio(), "random": _ratio_in_order(packs, shuffled, ranks)}
        reports.append({"ranks": ranks, **ratios, "steps": len(schedule)})
    return reports


def _ratio_in_order(packs: Packs, order: Integers, ranks: int) -> float:
    """Return the straggler ratio of packs that are scheduled in this order."""
    full = len(order) // ranks * ranks
    steps = packs.costs[order[:full]].reshape(-1, ranks)
    if full < len(order):
        units = Units(packs)
        last = schedule_packs(units, np.sort(order[full:]), BatchLayout(ranks, 1, 1))
        steps = np.concatenate([steps, np.append(units.costs, 0.0)[last].sum(axis=2)])
    return float((steps.max(axis=1) / steps.mean(axis=1)).mean())


def _summarize(values: npt.NDArray[Any]) -> dict[str, Any]:
    spread = Distribution.of(values)
    quartiles = {f"p{percent}": spread.percentile(percent) for percent in (25, 50, 75)}
    return {"mean": spread.mean, "min": spread.min, **quartiles, "max": spread.max}


def _report_reasons(dropped: Sequence[Drop]) -> list[dict[str, Any]]:
    """Return why rows are in no pack, the most frequent reason first, each with example rows."""
    by_reason: dict[str, list[Drop]] = defaultdict(list)
    for drop in dropped:
        by_reason[drop.reason].append(drop)
    return [
        {
            "reason": reason,
            "rows": len(drops),
            "keys": [drop.key for drop in drops[:_MAX_KEYS]],
            "detail": drops[0].detail,
        }
        for reason, drops in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0]))
    ]


def _report_datasets(planned: PlanResult) -> list[dict[str, Any]]:
    counts, plan = planned.counts, planned.packs.plan
    packed = np.zeros(len(counts), bool)
    packed[plan.indices] = True
    reports, first = [], 0
    for name, rows in planned.opened.dataset.lengths().items():
        part = slice(first, first + rows)
        kept = packed[part]
        columns = {"tokens": counts.total} | {
            kind: getattr(counts, kind) for kind in ("text", *MEDIA_KINDS, "supervised")
        }
        sums = {column: int(values[part][kept].sum()) for column, values in columns.items()}
        reports.append({"name": name, "rows": rows, "packed": int(kept.sum()), **sums})
        first += rows
    return reports


def _histograms(planned: PlanResult) -> dict[str, Any]:
    plan = planned.packs.plan
    fill, _ = np.histogram(plan.tokens / plan.capacity, _FILL_BINS, (0.0, 1.0))
    totals = planned.counts.total[planned.counts.ok]
    longest = int(totals.max()) if len(totals) else 0
    edges = [0, *(2**power for power in range(4, max(5, longest.bit_length() + 1)))]
    lengths, _ = np.histogram(totals, edges)
    return {
        "fill": {"edges": [n / _FILL_BINS for n in range(_FILL_BINS + 1)], "counts": fill.tolist()},
        "length": {"edges": edges, "counts": lengths.tolist()},
    }
