"""Loader metrics of the last steps: fill, speed, waiting time."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from packhorse.types import BatchInfo

_WINDOW = 50


class Writer(Protocol):
    """TensorBoard's ``SummaryWriter``, or anything with its ``add_scalar``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any:
        """Write one number."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Metrics of the last steps of this rank.

    Attributes:
        fill: share of the batches' tokens that belong to samples. Without ``pad_to_size`` a batch of one pack
            ends with its last sample, so this is near 1; how full packs are of ``pack_size`` is in the plan.
        padding: the rest.
        supervised: share of the samples' tokens that are supervised.
        tokens_per_second: tokens of samples per second.
        wait: share of the time in which the loop waited for a batch.
        straggler: planned cost of a step, maximum over mean of all ranks.
        samples: samples delivered since the loader was built.
        lost: samples that failed since then.
    """

    fill: float
    padding: float
    supervised: float
    tokens_per_second: float
    wait: float
    straggler: float
    samples: int
    lost: int


class Metrics:
    """Metrics of the last 50 steps, for a line in the log or for TensorBoard.

    Args:
        gradient_accumulation_steps: micro-steps that may be fetched before the first training step.
    """

    def __init__(self, gradient_accumulation_steps: int = 1) -> None:
        self._accumulation = gradient_accumulation_steps
        # Of each: tokens, slots, supervised tokens, the straggler ratio, seconds waited and taken.
        self._steps: deque[tuple[float, ...]] = deque(maxlen=_WINDOW)
        self.samples = self.lost = self.steps = 0
        self._last: float | None = None

    def update(self, info: BatchInfo, straggler: float, waited: float) -> None:
        """Count a batch for which the loop has waited ``waited`` seconds."""
        now = time.perf_counter()
        # The time of the first step starts when its batch is requested.
        took = now - self._last if self._last is not None else waited
        self._last = now
        self.steps += 1
        self.samples += len(info.samples)
        self.lost += len(info.lost)
        self._steps.append((info.tokens, info.slots, info.supervised, straggler, waited, took))

    def pause(self) -> None:
        """Exclude the time until the next batch (between epochs)."""
        self._last = None

    def numbers(self) -> Numbers:
        """Return the current metrics; zeros before the first step."""
        sums = [sum(column) for column in zip(*self._steps, strict=True)]
        tokens, slots, supervised, straggler, waited, took = sums or [0.0] * 6
        fill = tokens / slots if slots else 0.0
        return Numbers(
            fill=fill,
            padding=1 - fill if slots else 0.0,
            supervised=supervised / tokens if tokens else 0.0,
            tokens_per_second=tokens / took if took else 0.0,
            wait=min(1.0, waited / took) if took else 0.0,
            straggler=straggler / len(self._steps) if self._steps else 1.0,
            samples=self.samples,
            lost=self.lost,
        )

    def as_dict(self) -> dict[str, float]:
        """Return the metrics by name."""
        return asdict(self.numbers())

    def summary(self) -> str:
        """Return one line for the log; waiting time is included from the second step on."""
        n = self.numbers()
        # Before the first training step there is nothing but waiting.
        wait = f"waiting for data {n.wait:.1%} · " if self.steps > self._accumulation else ""
        return (
            f"fill {n.fill:.1%} · {n.tokens_per_second:,.0f} tokens/s · supervised {n.supervised:.1%} · "
            f"{wait}straggler {n.straggler:.3f} · samples {n.samples:,}"
            + (f" · lost {n.lost:,}" if n.lost else "")
        )

    def log(self, writer: Writer, step: int, prefix: str = "data/") -> None:
        """Write the metrics to TensorBoard."""
        for name, value in self.as_dict().items():
            writer.add_scalar(f"{prefix}{name}", value, step)
