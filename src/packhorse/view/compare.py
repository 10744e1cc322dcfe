"""What the same rows would cost otherwise: padded, or packed by estimated lengths.

Padding is arithmetic on the exact lengths. For the other, the rows are read and estimated as a sampler
without counts does it (some 20 microseconds a row, at most ``MOST_ESTIMATED`` of them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from packhorse.datasets.lengths import examples_at
from packhorse.neat_packing_vlm import PackPlan, plan_packs
from packhorse.neat_packing_vlm.deal import random_numbers
from packhorse.neat_packing_vlm.describe import percentiles
from packhorse.tokens.estimate import estimate, image_config, video_config
from packhorse.view.planning import Planned

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
    plan, settings = planned.packs.plan, planned.planner.settings
    lengths = planned.planner.lengths[plan.indices]
    aligned = int((lengths + -lengths % settings.alignment).sum())
    shuffled = random_numbers(settings.seed).permutation(lengths)
    tokens = int(lengths.sum())
    return {
        "batch_size": BATCH,
        "tokens": tokens,
        "random": _wasted(padded_slots(shuffled, BATCH), tokens),
        "by_length": _wasted(padded_slots(np.sort(lengths)[::-1], BATCH), tokens),
        "packed": _wasted(len(plan) * settings.size, tokens),
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
    planned: Planned, progress: Callable[[int, int], None] | None = None, most: int = MOST_ESTIMATED
) -> dict[str, Any]:
    """What becomes of the rows if packs are planned by estimated lengths and what overflows is dropped.

    Args:
        planned: the exact plan; only rows that are in it are looked at.
        progress: told how many rows were read.
        most: where there are more rows, so many of them, evenly spaced.

    Returns:
        ``rows`` that were compared; ``lost_overflow``: rows whose pack was already full; ``lost_too_long``:
        rows that were taken for longer than a pack; ``lost``: both; ``fill``: what the packs hold in the
        end; ``packs``; ``error_mean`` and ``error_p99``: by how many tokens estimates are off.
    """
    rows = np.sort(planned.packs.plan.indices).astype(np.int64)
    if len(rows) > most:
        rows = rows[np.linspace(0, len(rows) - 1, most).astype(np.int64)]
    guesses = _guesses(planned, rows, progress)
    room = planned.planner.room
    real = planned.planner.lengths[rows]
    plan = plan_packs(np.maximum(guesses - 1, 1), room, seed=planned.planner.settings.seed)
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
        "error_p99": percentiles(off, (99,))[0] if len(rows) else 0,
    }


def _guesses(planned: Planned, rows: Integers, progress: Callable[[int, int], None] | None) -> Integers:
    processor = planned.opened.samples.processor
    image_cfg, video_cfg = image_config(processor), video_config(processor)
    found = np.zeros(len(rows), np.int64)
    for done, (place, example) in enumerate(examples_at(planned.opened.dataset, rows), 1):
        if example is not None:
            guess = estimate(example, image_cfg, video_cfg)
            found[place] = guess.text + guess.media
        if progress is not None and (done % 1024 == 0 or done == len(rows)):
            progress(done, len(rows))
    return found


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
