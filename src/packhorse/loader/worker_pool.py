"""Builds batches in worker processes and hands them out in order.

A worker that dies (a decoder that crashes, the out-of-memory killer) is replaced and its batches are rebuilt.
Only batches that were delivered count as used, so nothing is lost or delivered twice. A batch that keeps
killing its worker stops the run with the names of its samples.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from packhorse.errors import SystemFault
from packhorse.loader.build import NO_SAMPLE, BatchBuilder, Built
from packhorse.types import Batch, WorkItem
from packhorse.utils.pool import ProcessPool, ResultTimeout, WorkerDied, in_worker

# What malloc.h of glibc calls them.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_IN_HEAP = 1 << 25  # bytes; the most that glibc allows: what is larger always comes fresh
_KEPT = 1 << 28  # bytes at the end of the heap that are free and are kept all the same

_SAID_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Have this process keep the memory that one sample needed for the next one.

    A processor makes and frees tensors of some ten megabytes for each image. By itself glibc gives the end
    of the heap back to the system when it is larger than about 64 MB, so it is luck what happens: the same
    work was seen to take one page fault or a million, which is a quarter of its time. This is for processes
    that do nothing else; it holds until they end.

    Returns:
        Whether it was done: not where the user has said something on it (``MALLOC_TRIM_THRESHOLD_`` and its
        like), nor with another C library than glibc.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in os.environ for name in _SAID_BY_USER) or "_threshold" in tunables:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all([mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP), mallopt(_M_TRIM_THRESHOLD, _KEPT)])


_RETRIES = 2  # of a batch whose worker died
_tune_malloc = cache(keep_freed_memory)  # once per process


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How batches are built.

    Attributes:
        num_workers: processes that build batches; 0 builds them in this process, on request.
        prefetch: batches that each worker builds ahead.
        pin_memory: copy batches to pinned memory, from which copies to a GPU are asynchronous.
        timeout: seconds to wait for a batch before the run stops; None waits forever.
        context: start method: ``"fork"``, ``"spawn"`` or ``"forkserver"``; None for Python's default.
    """

    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = False
    timeout: float | None = None
    context: str | None = None


@dataclass(frozen=True)
class StagedBuilder:
    """Builds batches that carry their ledger entries; nothing is recorded before a batch is delivered.

    Batches are built ahead, and rebuilt after a worker died or the loader was closed or iterated again.
    Recorded at once, the entries of a first attempt would stay although the second one may succeed.
    """

    builder: BatchBuilder

    def __call__(self, item: WorkItem) -> Built:
        """Build the batch of a work item."""
        if in_worker():
            _tune_malloc()
            _seed(item.epoch, item.step)  # the same numbers in any worker, and in a retry
        with self.builder.samples.ledger.staged() as drops:
            built = self.builder[item]
        return built._replace(drops=tuple(drops))


def _seed(*key: int) -> None:
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed prepares the GPUs too


class WorkerPool:
    """Hands out the batches of work items, in order.

    Args:
        builder: builds them.
        settings: how.
        name: the name of a sample, for messages.
    """

    def __init__(self, builder: BatchBuilder, settings: WorkerSettings, name: Callable[[int], str]) -> None:
        self.builder, self.settings, self.name = builder, settings, name
        self._build = StagedBuilder(builder)
        self._processes: ProcessPool[WorkItem, Built] = ProcessPool(
            self._build, settings.num_workers, settings.context, _RETRIES
        )
        self._turn = 0

    def batches(self, make: Callable[[int], WorkItem], first: int, last: int) -> Iterator[Built]:
        """The batches of the steps from ``first`` up to ``last``, which is excluded.

        Args:
            make: the work item of a step.
            first: the first step.
            last: the step after the last one.

        Raises:
            SystemFault: a batch kills its worker each time, or does not come in time; names its samples.
        """
        self._turn += 1
        turn = self._turn
        for built in self._built(make, range(first, last)):
            yield built
            if turn != self._turn:
                return  # another iterator uses the workers now

    def close(self) -> None:
        """End the workers; iterating again starts new ones."""
        self._processes.close()

    def _built(self, make: Callable[[int], WorkItem], steps: range) -> Iterator[Built]:
        settings = self.settings
        pin = settings.pin_memory and torch.cuda.is_available()
        if not settings.num_workers:
            for step in steps:
                built = self._build(make(step))
                yield pin_batch(built) if pin else built
            return
        # Without pinning no thread is started. In the thread, too, this rank's GPU is the current one.
        device = torch.cuda.current_device() if pin else None
        with ThreadPoolExecutor(1, initializer=partial(torch.cuda.set_device, device)) as thread:
            results = self._processes.run(
                make,
                steps,
                ordered=True,
                prefetch_factor=settings.prefetch_factor,
                timeout=settings.timeout,
                receive=(lambda built: thread.submit(pin_batch, built)) if pin else None,
            )
            try:
                for _, result in results:
                    yield result.result() if pin else result
            except (WorkerDied, ResultTimeout) as error:
                self.close()
                raise self._fault(error, make) from error

    def _fault(self, error: WorkerDied | ResultTimeout, make: Callable[[int], WorkItem]) -> SystemFault:
        if error.position is None:
            return SystemFault(str(error))
        item = make(error.position)
        if isinstance(error, ResultTimeout):
            return SystemFault(
                f"micro-step {item.step} did not come within {self.settings.timeout:g} s (timeout): "
                f"{self._describe(item)}. A read hangs, or workers are too few: see sample_timeout"
            )
        current = "between two samples" if error.note == NO_SAMPLE else f"at work on {self.name(error.note)}"
        return SystemFault(
            f"workers died {error.deaths} times over micro-step {item.step} ({error.exit_reason}), "
            f"{current}: {self._describe(item)}. A media item that crashes its decoder, or too little "
            "memory (use fewer workers, a smaller prefetch, or more shared memory)"
        )

    def _describe(self, item: WorkItem) -> str:
        names = [self.name(index) for index in item.samples]
        shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        return f"samples {shown}" if names else "a batch without samples"


def pin_batch(built: Built) -> Built:
    """The same with the tensors of the batch in pinned memory; a tensor under two keys stays one."""
    pinned: dict[int, torch.Tensor] = {}

    def pin(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in pinned:
                pinned[id(value)] = value.pin_memory()
            return pinned[id(value)]
        if isinstance(value, Mapping):
            return {key: pin(item) for key, item in value.items()}
        return type(value)(map(pin, value)) if type(value) in (list, tuple) else value

    return built._replace(batch=Batch(pin(built.batch), built.batch.info))
