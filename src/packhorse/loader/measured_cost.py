"""Measure the time of optimizer steps, and fit the cost weights to it at the end of an epoch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from logging import getLogger
from typing import TypeAlias

import numpy as np
import torch

from packhorse.distributed import Collectives
from packhorse.errors import list_some
from packhorse.loader.planner import Planner
from packhorse.plan.cost_fit import CostFit, fit_weights
from packhorse.plan.cost_model import CostWeights
from packhorse.plan.schedule import NOTHING, VISUAL, PackSchedule
from packhorse.types import Floats

logger = getLogger("packhorse.loader")

Mark: TypeAlias = "float | torch.cuda.Event"

_MOST_STEPS, _MOST_PACKS = 1024, 65_536  # that a fit uses; of more steps, not every one
_ROUNDS = 10
_SLOWER = 1.1  # a rank that takes this many times as long as the others is reported


class StepTimes:
    """Time of each optimizer step of this rank: from its first batch until the next step's is requested.

    On a GPU, events are recorded in the stream and read when they have passed, so nothing waits for the GPU;
    without one, the clock is read. A step is measured as a whole because trainers fetch all of its
    micro-batches before they train the first.
    """

    def __init__(self, gradient_accumulation_steps: int) -> None:
        self._accumulation = gradient_accumulation_steps
        self._seconds: dict[int, float] = {}
        self._passing: deque[tuple[int, Mark, Mark]] = deque()
        self._started: tuple[int, Mark] | None = None

    def start(self, index: int) -> None:
        """Start measuring if the micro-step of this index is the first of its optimizer step."""
        if index % self._accumulation == 0:
            self._started = index // self._accumulation, _mark()

    def stop(self, index: int) -> None:
        """Stop measuring if the micro-step of this index is the first of the next optimizer step."""
        if self._started is None or index % self._accumulation:
            return
        (step, started), self._started = self._started, None
        self._passing.append((step, started, _mark()))
        self._read()

    def pause(self) -> None:
        """Do not measure the step that is being trained."""
        self._started = None

    def clear(self) -> None:
        """Forget all times, for another epoch."""
        self._started = None
        self._seconds.clear()
        self._passing.clear()

    def seconds(self) -> dict[int, float]:
        """Return the time of each optimizer step that was measured and is over on the GPU."""
        self._read()
        return dict(self._seconds)

    def _read(self) -> None:
        while self._passing:
            step, started, ended = self._passing[0]
            if isinstance(started, float) and isinstance(ended, float):
                self._seconds[step] = ended - started
            elif not isinstance(started, float) and not isinstance(ended, float):
                if not ended.query():  # type: ignore[no-untyped-call]
                    return  # the GPU is not that far
                if started.device == ended.device:
                    self._seconds[step] = started.elapsed_time(ended) / 1000
            # Otherwise the process began to use the GPU, or another one, within the step.
            self._passing.popleft()


def _mark() -> Mark:
    """Return this moment: for the GPU, if this process uses one, else by the clock."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return time.perf_counter()
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclass(frozen=True)
class MeasuredEpoch:
    """An epoch whose optimizer steps were measured from ``first`` on.

    Attributes:
        planner: knows what is in each sample.
        schedule: the packs of each rank in each micro-step.
        placeholder: whether a rank without images gets a placeholder if another one has images.
        accumulation: micro-steps of an optimizer step.
        first: the first micro-step.
    """

    planner: Planner
    schedule: PackSchedule
    placeholder: bool
    accumulation: int
    first: int

    def steps(self) -> range:
        """Return the optimizer steps that a fit uses: all, or equally many of each part of a long epoch."""
        begin, end = -(-self.first // self.accumulation), len(self.schedule) // self.accumulation
        packs = self.schedule.table[0].size * self.accumulation if end else 1
        most = max(1, min(_MOST_STEPS, _MOST_PACKS // packs))
        return range(begin, end, max(1, -(-(end - begin) // most)))

    def features(self, steps: Sequence[int], ranks: slice = slice(None)) -> Floats:
        """Return what the weights of optimizer steps are multiplied with: [steps, ranks, weights]."""
        units, names = self.schedule.units, self.planner.weights.names
        indices = np.asarray(steps, np.int64)[:, None] * self.accumulation + np.arange(self.accumulation)
        packs = self.schedule.table[indices]  # [steps, micro-steps, ranks, packs]
        masks = np.where(packs == NOTHING, 0, np.append(units.media_masks, 0)[packs])
        calls = (masks & VISUAL > 0).sum(axis=3)
        if self.placeholder:
            calls = np.maximum(calls, calls.max(axis=2, initial=0, keepdims=True) > 0)
        packs = packs[:, :, ranks].swapaxes(1, 2)  # [steps, ranks, micro-steps, packs]
        groups = packs.reshape(packs.shape[0] * packs.shape[1], packs.shape[2] * packs.shape[3])
        samples = [[units.samples(unit) for unit in group if unit != NOTHING] for group in groups.tolist()]
        rows = np.concatenate([np.zeros(0, np.int64), *chain.from_iterable(samples)])
        group_of = np.repeat(np.arange(len(groups)), [sum(map(len, parts)) for parts in samples])
        columns = self.planner.features(rows).T
        sums = np.stack([np.bincount(group_of, column, minlength=len(groups)) for column in columns], axis=1)
        table: Floats = sums.astype(np.float64).reshape(*packs.shape[:2], len(names))
        table[..., names.index("encoder")] = calls[:, :, ranks].sum(axis=1)
        table[..., names.index("pack")] = (packs != NOTHING).sum(axis=(2, 3))
        return table


def fit_epoch(epoch: MeasuredEpoch, times: StepTimes, before: CostWeights, ranks: Collectives) -> CostFit:
    """Fit the cost weights to the steps of all ranks; all ranks call this and get the same weights."""
    steps, seconds = epoch.steps(), times.seconds()
    own = [seconds.get(step, float("nan")) for step in steps]
    of_ranks = ranks.gather(own)
    gathered = np.array(of_ranks, np.float64).reshape(len(of_ranks), len(steps))
    return ranks.broadcast("fit the cost weights", partial(_fit, epoch, steps, gathered.T, before))


def _fit(epoch: MeasuredEpoch, steps: Sequence[int], seconds: Floats, before: CostWeights) -> CostFit:
    """Fit weights to the times [steps, ranks] of all ranks.

    The time of a rank is divided by how many times as long it takes as others for the same cost, so that
    ranks with other GPUs measure in the same unit. The ranks of a step may wait for the slowest one: its time
    says what that one's batches cost. Which one it is follows from the weights, so they are fitted to the
    means over the ranks first, and then to the slowest ranks until these stay the same.
    """
    features = epoch.features(steps)
    slowness = _compare_ranks(seconds, features @ before.values())
    times, known = seconds / slowness, np.isfinite(seconds).all(axis=1)
    features, times = features[known], times[known]
    fit = fit_weights(features.mean(axis=1), times.mean(axis=1), before)
    if len(slowness) > 1:
        slowest = np.full(len(times), -1)
        for _ in range(_ROUNDS):
            chosen = (features @ fit.weights.values() * slowness).argmax(axis=1)
            if (chosen == slowest).all():
                break
            slowest, rows = chosen, np.arange(len(times))
            fit = fit_weights(features[rows, slowest], times[rows, slowest], before)
    (logger.warning if fit.problem else logger.info)("%s", fit.describe())
    return fit


def _compare_ranks(seconds: Floats, predicted: Floats) -> Floats:
    """Return how many times as long each rank takes as the median rank for the same predicted cost."""
    ratios = np.divide(seconds, predicted, out=np.full_like(predicted, np.nan), where=predicted > 0)
    measured = [column[np.isfinite(column)] for column in ratios.T]
    pace = np.array([np.median(column) if len(column) else np.nan for column in measured])
    known = np.isfinite(pace)
    slowness: Floats = np.ones(len(pace))  # a rank without times counts as one like the others
    slowness[known] = pace[known] / (np.median(pace[known]) if known.any() else 1.0)
    if slow := [f"{rank} ({slowness[rank]:.2f}x)" for rank in np.flatnonzero(slowness > _SLOWER)]:
        logger.warning(
            "ranks that take longer than the others for the same work: %s. Another GPU, or something else "
            "that runs on it?",
            list_some(slow, 8),
        )
    return slowness
