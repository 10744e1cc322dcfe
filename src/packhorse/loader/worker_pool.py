"""Build batches in worker processes and yield them in order.

A worker that dies (a decoder that crashes, the out-of-memory killer) is replaced and its batches are rebuilt.
Only delivered batches count as used, so nothing is lost or delivered twice. A batch that keeps killing its
worker stops the run with the names of its samples.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache, partial
from logging import getLogger
from typing import Any

import torch

from packhorse.errors import SystemFault, list_some
from packhorse.loader.build import NO_SAMPLE, BatchBuilder, Built, restore_random_state
from packhorse.loader.config import LoaderConfig
from packhorse.types import Batch, WorkItem
from packhorse.utils.pool import EngineError, ProcessPool, ResultTimeout, WorkerDied, in_worker

_MAX_WORKERS = 8
_MIN_ROWS = 1000  # fewer are encoded sooner than worker processes have started
_RETRIES = 2  # of a batch whose worker died
# M_MMAP_THRESHOLD (32 MB, the largest that glibc allows) and M_TRIM_THRESHOLD of malloc.h.
_MALLOC = {-3: 1 << 25, -1: 1 << 28}

logger = getLogger("packhorse.loader")


def default_num_workers(rows: int, cores: int) -> int:
    """Return the number of worker processes for ``num_workers=None``, by the rows and cores of this rank.

    One per core, at most 8; 0 with a single core, with fewer than 1,000 rows, and in a daemonic process,
    which must not start others.
    """
    if cores < 2 or rows < _MIN_ROWS:
        return 0
    if multiprocessing.current_process().daemon and not _is_importing_main():
        logger.info("num_workers=0: this is a daemonic process, which cannot start worker processes")
        return 0
    return min(cores, _MAX_WORKERS)


def _is_importing_main() -> bool:
    """Whether this is a started process that runs the main module, which lacks ``if __name__ == "__main__"``.

    There the start of workers must fail, as multiprocessing makes it: with 0 workers the script would run a
    second time.
    """
    return "__mp_main__" in sys.modules and sys.modules["__main__"] is not sys.modules["__mp_main__"]


@cache
def keep_freed_memory() -> bool:
    """Let malloc of glibc keep up to 256 MB of freed memory in this process; return whether it does.

    A processor allocates and frees tensors of tens of megabytes for each image. By default glibc returns such
    memory to the system, and the next image pays for a page fault per 4 KB. The promise of benchmarks/feed.py
    (0.9 of the bare processor's tokens per second without workers) needs it: 0.95 to 0.98, and 0.67 without.
    Settings of the user (``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``, ``GLIBC_TUNABLES``) stay.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    return mallopt is not None and all(mallopt(option, value) for option, value in _MALLOC.items())


def build_staged(builder: BatchBuilder, item: WorkItem) -> Built:
    """Build a batch that carries its ledger entries; nothing is recorded before it is delivered.

    Batches are built ahead, and rebuilt after a worker died or the loader was closed or re-iterated.
    Recorded at once, the entries of a first attempt would stay although the second one may succeed.
    """
    keep_freed_memory()
    # Each sample seeds the random numbers of its process: here they are the program's.
    unchanged = nullcontext() if in_worker() else restore_random_state()
    with unchanged, builder.samples.ledger.capture() as drops:
        built = builder.build(item)
    return built._replace(drops=tuple(drops))


class WorkerPool:
    """Yields the batches of work items in order.

    With ``num_workers=0`` they are built in this process, on request; also if workers cannot be started and
    ``config.num_workers`` is None.
    """

    def __init__(self, builder: BatchBuilder, config: LoaderConfig, num_workers: int) -> None:
        self.builder, self.config, self.num_workers = builder, config, num_workers
        self._build = partial(build_staged, builder)
        self._processes: ProcessPool[WorkItem, Built] | None = None
        if num_workers:
            self._processes = ProcessPool(self._build, num_workers, config.multiprocessing_context, _RETRIES)
        self._iteration = 0

    def batches(self, make: Callable[[int], WorkItem], first: int, last: int) -> Iterator[Built]:
        """Yield the batches of the steps from ``first`` to before ``last``; ``make`` makes their work items.

        Raises :class:`SystemFault` if a batch killed its worker on every attempt, or did not arrive in time.
        """
        self._iteration += 1
        iteration, pin = self._iteration, self.config.pin_memory and torch.cuda.is_available()
        for built in self._build_all(make, range(first, last), pin):
            yield built
            if iteration != self._iteration:
                return  # another iterator uses the workers now

    def close(self) -> None:
        """End the workers; the next iteration starts new ones."""
        if self._processes is not None:
            self._processes.close()

    def _start(self, processes: ProcessPool[WorkItem, Built]) -> None:
        """Start the workers; if that fails and their number was chosen by default, do without."""
        try:
            processes.start()
        except (EngineError, OSError) as error:
            if self.config.num_workers is not None:
                raise
            logger.warning("num_workers=0: worker processes cannot be started (%s)", error)
            self.close()
            self._processes, self.num_workers = None, 0

    def _build_all(self, make: Callable[[int], WorkItem], steps: range, pin: bool) -> Iterator[Built]:
        if self._processes is not None and steps:
            self._start(self._processes)
        if self._processes is None:
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
                prefetch_factor=self.config.prefetch_factor,
                timeout=self.config.timeout,
                receive=(lambda built: thread.submit(pin_batch, built)) if pin else None,
            )
            try:
                for _, result in results:
                    yield result.result() if pin else result
            except (WorkerDied, ResultTimeout) as error:
                self.close()
                raise self._system_fault(error, make) from error

    def _system_fault(
        self, error: WorkerDied | ResultTimeout, make: Callable[[int], WorkItem]
    ) -> SystemFault:
        if error.position is None:
            return SystemFault(str(error))
        item, key = make(error.position), self.builder.samples.key
        keys = [key(index) for index in item.samples]
        samples = f"samples {list_some(keys, 20)}" if keys else "a batch without samples"
        if isinstance(error, ResultTimeout):
            return SystemFault(
                f"micro-step {item.step} did not arrive within timeout={self.config.timeout:g} s: {samples}. "
                "A read hangs, or there are too few workers: set sample_timeout or raise num_workers"
            )
        current = "between two samples" if error.note == NO_SAMPLE else f"while encoding {key(error.note)}"
        return SystemFault(
            f"workers died {error.deaths} times over micro-step {item.step} ({error.exit_reason}), "
            f"{current}: {samples}. A media item crashes its decoder, or memory is short (use fewer "
            "workers, a smaller prefetch_factor, or more shared memory)"
        )


def pin_batch(built: Built) -> Built:
    """Copy the tensors of a batch to pinned memory; a tensor under two keys stays one."""
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
