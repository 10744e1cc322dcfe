"""The same rows in batches as transformers and TRL make them, to compare a plan with.

Every row is used, with its tokens after the label shift and its cost by the cost model, as in the plan. Rows
and packs are in random order, and fill the last step from the beginning, as Accelerate does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from packhorse.plan.cost_model import CostWeights, sample_costs, straggler_ratio
from packhorse.types import Floats, Integers

MEGA_BATCH = 50  # batches that transformers sorts by length together
TRL_ROWS = 1000  # rows that TRL packs together: the batch size of `Dataset.map`
_STAMPS = 1024  # more than TRL_ROWS
_GROUPS = 256  # groups of TRL_ROWS that are packed at once; their free tokens fit into the cache of a core


def compare_baselines(
    lengths: Integers,
    costs: Floats,
    weights: CostWeights,
    *,
    pack_cost: float = 0.0,
    pack_size: int,
    batch_size: int,
    ranks: int,
    draw: np.random.Generator,
) -> dict[str, dict[str, Any]]:
    """Return steps, computed tokens, straggler ratio and cost of an epoch, by method.

    ``random`` and ``length_grouped`` are padded batches of ``batch_size`` rows per rank, ``trl`` is one pack
    of TRL per rank. The cost of a step is that of its slowest rank; ``pack_cost`` is that of a batch or pack
    in addition to its rows.
    """
    order = draw.permutation(len(lengths))
    media = np.maximum(costs - sample_costs(lengths, weights), 0)  # not padded
    reports = {}
    for name, rows in (("random", order), ("length_grouped", group_by_length(lengths, order, batch_size))):
        batches = _fill_last(rows, batch_size * ranks).reshape(-1, batch_size)
        of_batches = batch_size * sample_costs(lengths[batches].max(axis=1), weights)
        of_batches += media[batches].sum(axis=1) + pack_cost
        reports[name] = {"slots": padded_slots(lengths[rows], batch_size), **_summarize(of_batches, ranks)}
    packs = pack_like_trl(lengths[order], pack_size)
    of_packs = draw.permutation(np.bincount(packs, weights=costs[order])) + pack_cost
    fill = int(lengths.sum()) / (len(of_packs) * pack_size) if len(of_packs) else 0.0
    reports["trl"] = {
        "slots": int(lengths.sum()),
        "fill": fill,
        **_summarize(_fill_last(of_packs, ranks), ranks),
    }
    return reports


def _fill_last(values: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """Return the values, continued from the beginning to a multiple of ``size``."""
    return np.resize(values, -(-len(values) // size) * size)


def _summarize(costs: Floats, ranks: int) -> dict[str, Any]:
    """Return steps, straggler ratio and cost of batches that ranks take in turn."""
    steps = costs.reshape(-1, ranks)
    ratio = straggler_ratio(costs, np.arange(len(costs)).reshape(-1, ranks))
    return {"steps": len(steps), "straggler": ratio, "cost": float(steps.max(axis=1).sum())}


def padded_slots(lengths: Integers, batch_size: int) -> int:
    """Return the tokens of all batches if each is padded to its longest row."""
    if not len(lengths):
        return 0
    starts = np.arange(0, len(lengths), batch_size)
    sizes = np.diff(np.append(starts, len(lengths)))
    return int((np.maximum.reduceat(lengths, starts) * sizes).sum())


def group_by_length(lengths: Integers, order: Integers, batch_size: int) -> Integers:
    """Return the rows as ``LengthGroupedSampler`` of transformers yields them for this random order.

    Mega-batches of 50 batches (fewer if there would be fewer than four) are sorted by length, and the longest
    row of all comes first.
    """
    mega = max(1, min(len(order) // (batch_size * 4), MEGA_BATCH)) * batch_size
    full = len(order) // mega * mega
    parts = []
    for part in (order[:full].reshape(-1, mega), order[full:].reshape(1, -1)):
        by_length = np.argsort(-lengths[part], axis=1, kind="stable")
        parts.append(np.take_along_axis(part, by_length, 1).reshape(-1))
    grouped = np.concatenate(parts)
    if len(grouped):
        longest = int(lengths[grouped[::mega]].argmax()) * mega
        grouped[[0, longest]] = grouped[[longest, 0]]
    return grouped


def pack_like_trl(lengths: Integers, pack_size: int) -> Integers:
    """Return the pack of each row, as TRL's strategy ``bfd`` (best fit, longest first) assigns them.

    TRL packs every 1,000 rows on their own. Here many such groups are packed at once, row by row.
    """
    packs, total = np.empty(len(lengths), np.int64), 0
    kind = np.uint32 if pack_size * _STAMPS < 1 << 31 else np.uint64
    for first in range(0, len(lengths), TRL_ROWS * _GROUPS):
        part = lengths[first : first + TRL_ROWS * _GROUPS]
        table = np.zeros((-(-len(part) // TRL_ROWS), TRL_ROWS), kind)
        table.reshape(-1)[: len(part)] = part  # rows of no length complete the last group, and change nothing
        by_length = np.argsort(-table.astype(np.int64), axis=1, kind="stable")
        needed = np.take_along_axis(table, by_length, 1) * kind(_STAMPS)
        # Free tokens of each pack, and when it got them: of equally free packs TRL takes the earliest.
        free = np.full(table.shape, pack_size * _STAMPS, kind)
        chosen, groups, opened = np.empty(table.shape, np.int64), np.arange(len(table)), 1
        for step in range(TRL_ROWS):
            rest = free[:, :opened] - needed[:, step, None]  # without a sign: what does not fit is huge
            chosen[:, step] = best = rest.argmin(axis=1)
            free[groups, best] = rest[groups, best] // _STAMPS * _STAMPS + step + 1
            opened = min(max(opened, int(best.max()) + 2), TRL_ROWS)
        ends = total + np.cumsum(chosen.max(axis=1) + 1)
        chosen += np.concatenate([[total], ends[:-1]])[:, None]
        result = np.empty_like(chosen)
        np.put_along_axis(result, by_length, chosen, 1)
        packs[first : first + len(part)] = result.reshape(-1)[: len(part)]
        total = int(ends[-1])
    return packs
