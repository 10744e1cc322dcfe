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
from packhorse.loader.epoch_stats import exceeds_share
from packhorse.plan.pack_plan import PackPlan
from packhorse.plan.schedule import (
    BatchLayout,
    Packs,
    PackSchedule,
    ResumeSegment,
    Units,
    random_generator,
    schedule_packs,
)
from packhorse.tools.baselines import compare_baselines
from packhorse.tools.view.saved_plan import PlanRequest, PlanResult, make_plan
from packhorse.types import MEDIA_KINDS, Drop, Integers

VERSION = 2
RANKS = 8  # on which methods are compared
BATCH_SIZE = 8  # rows per rank of the padded batches
WORLD_SIZES = (1, 8, 64, 512)
"""World sizes whose straggler ratio is printed."""

_MORE_WORLD_SIZES = (2, 4, 16, 32, 128, 256)
_MANY_PACKS = 200_000  # with more packs, only WORLD_SIZES are scheduled
_FILL_BINS = 20
_MAX_KEYS = 5  # example rows per reason
_SETTINGS = ("pack_size", "seed", "alignment", "on_overlong", "max_patches", "max_media", "max_documents")


def plan_report(planned: PlanResult, *, ranks: Sequence[int] = ()) -> dict[str, Any]:
    """Return all numbers of a plan as plain values, with the straggler ratio also for ``ranks``."""
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
        "padded_wasted": padded_waste(plan, config.pack_size),
        "documents_per_pack": _summarize(np.diff(plan.offsets)),
        "cost_basis": planned.planner.weights.basis,
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
        "comparison": compare_batches(planned),
    }


def sizes_report(request: PlanRequest, sizes: Sequence[int]) -> dict[str, Any]:
    """Return the numbers of the same rows in packs of several sizes, ascending; nothing is saved."""
    opened, counts, reports = None, None, []
    for size in sorted(sizes):
        resized = replace(request, config=request.config.with_changes(pack_size=size))
        planned = make_plan(resized, opened, counts)
        opened, counts = planned.opened, planned.counts
        plan, comparison = planned.packs.plan, compare_batches(planned)
        reports.append(
            {
                "pack_size": size,
                "reserve": planned.reserve,
                "capacity": plan.capacity,
                "packs": len(plan),
                "packed": len(plan.indices),
                "dropped": len(plan.dropped),
                "too_long": len(plan.dropped_by_reason().get("too_long", ())),
                "tokens": comparison["tokens"],
                "fill": plan.fill,
                "padded_wasted": padded_waste(plan, size),
                "documents_per_pack": _summarize(np.diff(plan.offsets)),
                "straggler_8": comparison["packed"]["straggler"],
            }
        )
    names = {"meta": str(request.config.data), "processor": request.processor_name}
    # The rows that fit into the largest packs.
    return {"version": VERSION, **names, "sizes": reports, "comparison": comparison}


def compare_batches(planned: PlanResult) -> dict[str, Any]:
    """Return what an epoch of the packed rows costs as planned and in batches of other libraries.

    For each method: ``steps``, ``slots`` (tokens that the model computes), ``wasted`` (the share of them that
    is padding), ``fill`` (of packs), ``straggler`` and ``time``, the sum over the steps of the cost of the
    slowest rank, relative to the plan's.
    """
    plan, planner, request = planned.packs.plan, planned.planner, planned.request
    lengths, costs = planner.lengths[plan.indices], planner.sample_info.costs[plan.indices]
    schedule = _schedule(planned)
    cost = epoch_cost(planned, schedule)
    slots, tokens = int((lengths + -lengths % request.config.alignment).sum()), int(lengths.sum())
    ratio, steps = schedule.straggler_ratio(), len(schedule)
    packed = {"slots": slots, "fill": plan.fill, "steps": steps, "straggler": ratio, "cost": cost}
    others = compare_baselines(
        lengths,
        costs,
        planner.weights,
        pack_cost=planner.sample_info.pack_cost,
        pack_size=request.config.pack_size,
        batch_size=BATCH_SIZE,
        ranks=RANKS,
        draw=random_generator(request.config.seed),
    )
    methods = {
        name: {
            "steps": report["steps"],
            "slots": report["slots"],
            "wasted": 1 - tokens / report["slots"] if report["slots"] else 0.0,
            "fill": report.get("fill"),
            "straggler": report["straggler"],
            "time": report["cost"] / cost if cost else 1.0,
        }
        for name, report in {"packed": packed, **others}.items()
    }
    return {"ranks": RANKS, "batch_size": BATCH_SIZE, "tokens": tokens, **methods}


def epoch_cost(planned: PlanResult, schedule: PackSchedule | None = None) -> float:
    """Return the predicted cost of an epoch: the slowest of :data:`RANKS` ranks, summed over the steps."""
    schedule = _schedule(planned) if schedule is None else schedule
    return float(schedule.rank_costs().max(axis=1).sum())


def _schedule(planned: PlanResult) -> PackSchedule:
    segments = [ResumeSegment(RANKS, 1, 1, 0)]
    request = planned.request
    return PackSchedule(planned.packs, segments, seed=request.config.seed, epoch=request.epoch)


def compared_methods(report: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the methods of :func:`compare_batches` with their descriptions."""
    comparison = report["comparison"]
    padded = f"batches of {comparison['batch_size']}, padded"
    texts = {
        "packed": "these packs",
        "random": f"random {padded}",
        "length_grouped": f"length-grouped {padded} (transformers)",
        "trl": f"packs of {report['pack_size']:,}, best fit (TRL bfd)",
    }
    return [(text, comparison[name]) for name, text in texts.items()]


def padded_waste(plan: PackPlan, pack_size: int) -> float:
    """Return the wasted share if every pack is padded to its size, as with ``pad_to_size=True``."""
    return 1 - int(plan.tokens.sum()) / (len(plan) * pack_size) if len(plan) else 0.0


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
