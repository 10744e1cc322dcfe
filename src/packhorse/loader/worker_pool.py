"""Work items go to worker processes; built batches come back in order, whatever happens to a worker.

A worker that dies (a decoder that crashes, the system's memory killer) is replaced, and the batches it had
not finished are built again: what counts as used is what was handed out, so nothing is lost and nothing comes
twice. If batches keep killing workers, the feed goes on with one worker at a time to find out which one it
is, and stops with the names of its samples.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.process
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from packhorse.errors import SystemFault
from packhorse.loader.build import BatchBuilder, Built
from packhorse.types import WorkItem

# What malloc.h of glibc calls them.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_IN_HEAP = 1 << 25  # bytes; the most that glibc allows: what is larger always comes fresh
_KEPT = 1 << 28  # bytes at the end of the heap that are free and are kept all the same

_SAID_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Have this process keep the memory that one sample needed for the next one.

    A processor makes and frees tensors of some ten megabytes for each picture. By itself glibc gives the end
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


logger = getLogger("packhorse.loader")

_DEATHS = ("exited unexpectedly", "is killed by signal")
_TOO_SLOW = "timed out after"
_RAISED_IN_WORKER = "Caught "
_LOOK_AFTER = 0.2
"""Seconds of waiting after which workers are looked after."""
_DYING = 1.0
"""Seconds in which a process whose connections are broken has ended, if it ends."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How batches are built.

    Attributes:
        workers: processes that build batches; 0 builds them in this one, when they are asked for.
        prefetch: batches that each worker builds ahead.
        pin_memory: copy batches to pinned memory, from which they go to a GPU without waiting.
        timeout: seconds to wait for a batch before the run stops; None waits for ever.
        context: how workers are started: ``"fork"``, ``"spawn"``, ``"forkserver"``; None for the usual way.
        deaths: how often workers may die before the next batch comes.
    """

    workers: int = 0
    prefetch: int = 2
    pin_memory: bool = False
    timeout: float | None = None
    context: str | None = None
    deaths: int = 2


class WorkItemSampler(Sampler[WorkItem]):
    """The work items of an epoch from a step on, made when they are asked for."""

    def __init__(self, make: Callable[[int], WorkItem], first: int, last: int) -> None:
        self.make, self.first, self.last = make, first, last

    def __iter__(self) -> Iterator[WorkItem]:
        return map(self.make, range(self.first, self.last))

    def __len__(self) -> int:
        return self.last - self.first


class StagedBuilder(Dataset[Built]):
    """Builds batches whose ledger entries come with them; nothing is written before a batch is handed out.

    Batches are built ahead, and rebuilt after a worker died, or the loader was closed or iterated again.
    Written at once, the entries of the first attempt would stay although the second one may succeed.
    """

    def __init__(self, builder: BatchBuilder) -> None:
        self.builder = builder

    def __getitem__(self, item: WorkItem) -> Built:
        with self.builder.samples.ledger.staged() as drops:
            built = self.builder[item]
        return built._replace(drops=tuple(drops))


class Feed:
    """Hands out the batches of work items, in order.

    Args:
        builder: builds them.
        settings: how.
        name: of a sample, for messages.
    """

    def __init__(self, builder: BatchBuilder, settings: WorkerSettings, name: Callable[[int], str]) -> None:
        self.builder, self.settings, self.name = builder, settings, name
        self._loader: DataLoader[Built] | None = None
        self._work_items = WorkItemSampler(_no_work_item, 0, 0)
        self._loader_of: WorkerSettings | None = None
        self._turn = 0

    def batches(self, make: Callable[[int], WorkItem], first: int, last: int) -> Iterator[Built]:
        """The batches of the steps from ``first`` to ``last``.

        Args:
            make: the work item of a step.
            first: the first step.
            last: the step behind the last one.

        Raises:
            SystemFault: workers die again and again, or a batch does not come in time; names its samples.
        """
        step, died = first, 0
        self._turn += 1
        turn = self._turn
        while step < last:
            settings, until = self.settings, last
            if died >= 2:  # carefully, until all that may have been in work is behind us
                settings = _one_at_a_time(self.settings)
                until = min(last, step + self.settings.workers * self.settings.prefetch)
            try:
                iterator = self._iterator(make, step, until, settings)
                while step < until:
                    built = next(iterator)
                    step, died = step + 1, 0
                    yield built
                    if turn != self._turn:
                        return  # somebody iterates anew: the workers build that one's batches now
            except (RuntimeError, OSError, EOFError) as error:
                if not self.settings.workers or not self._is_about_workers(error):
                    raise
                what = self._how_workers_ended() or _first_line(error)
                self.close(at_once=True)
                died += 1
                self._judge(error, what, died, make(step))

    def close(self, *, at_once: bool = False) -> None:
        """End the workers; ``at_once`` does not wait for what they are doing."""
        iterator: Any = getattr(self._loader, "_iterator", None)
        self._loader = self._loader_of = None
        workers = _workers_of(iterator)
        if at_once or not all(worker.is_alive() for worker in workers):
            _kill(iterator, workers)
        elif hasattr(iterator, "_shutdown_workers"):  # now, not when the last reference to it goes
            iterator._shutdown_workers()

    def _is_about_workers(self, error: Exception) -> bool:
        """Whether a worker has died or hangs; what a worker itself has raised is another thing."""
        what = _first_line(error)
        if what.startswith(_RAISED_IN_WORKER):
            return False
        if isinstance(error, RuntimeError):
            return any(words in what for words in (*_DEATHS, _TOO_SLOW))
        # A connection that breaks: the process at its other end may be about to end.
        workers = _workers_of(getattr(self._loader, "_iterator", None))
        end = time.monotonic() + _DYING
        while time.monotonic() < end:
            if not all(worker.is_alive() for worker in workers):
                return True
            time.sleep(0.01)
        return False

    def _how_workers_ended(self) -> str:
        ended = {
            worker.pid: worker.exitcode
            for worker in _workers_of(getattr(self._loader, "_iterator", None))
            if not worker.is_alive()
        }
        return "; ".join(
            f"process {pid}: {signal.strsignal(-code) if code < 0 else f'exit code {code}'}"
            for pid, code in ended.items()
        )

    def _judge(self, error: Exception, what: str, died: int, item: WorkItem) -> None:
        if _TOO_SLOW in what:
            raise SystemFault(
                f"micro step {item.step} did not come within {self.settings.timeout:g} s (timeout): "
                f"{self._named(item)}. A read hangs, or workers are too few: see sample_timeout"
            ) from error
        if died <= self.settings.deaths:
            logger.warning(
                "a worker died (%s); building micro step %s and those behind it again (%s of %s)",
                what,
                item.step,
                died,
                self.settings.deaths,
            )
            return
        raise SystemFault(
            f"workers died {died} times over micro step {item.step} ({what}), the last time building it "
            f"alone{self._culprit()}: {self._named(item)}. A medium that crashes its decoder, or too "
            "little memory (fewer workers, a smaller prefetch, shared memory)"
        ) from error

    def _culprit(self) -> str:
        index = self.builder.at_work_on()
        if index is None:
            return ", between two samples or before the first (can a worker import all it needs?)"
        return f", at work on {self.name(index)}"

    def _named(self, item: WorkItem) -> str:
        names = [self.name(index) for index in item.samples]
        shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        return f"samples {shown}" if names else "a batch without samples"

    def _iterator(
        self, make: Callable[[int], WorkItem], first: int, last: int, settings: WorkerSettings
    ) -> Iterator[Built]:
        workers = _workers_of(getattr(self._loader, "_iterator", None))
        if not all(worker.is_alive() for worker in workers):  # died while nobody waited for a batch
            self.close(at_once=True)
        if self._loader is None or self._loader_of != settings:
            self.close()
            self._loader = self._made(settings)
            self._loader_of = settings
        # Workers that live on get their work items from this same object.
        self._work_items.make, self._work_items.first, self._work_items.last = make, first, last
        watched: Iterator[Built] = _watched(iter(self._loader))
        return watched

    def _made(self, settings: WorkerSettings) -> DataLoader[Built]:
        workers = settings.workers
        options: dict[str, Any] = {}
        if workers:
            options = {
                "prefetch_factor": settings.prefetch,
                "persistent_workers": True,
                "timeout": settings.timeout or 0,
                "multiprocessing_context": settings.context,
                "worker_init_fn": _begin_worker,
            }
        return DataLoader(
            StagedBuilder(self.builder),
            batch_size=None,
            sampler=self._work_items,
            num_workers=workers,
            collate_fn=_as_it_is,
            pin_memory=settings.pin_memory,
            # Of its own, so that feeding draws nothing from the program's random numbers.
            generator=torch.Generator().manual_seed(0),
            **options,
        )


def _begin_worker(worker: int) -> None:
    """What a worker does first."""
    keep_freed_memory()
    _end_with_parent()


def _end_with_parent() -> None:
    """Have this worker end at once when the process that it works for is killed.

    By itself it would work off what it was given, and keep memory and files that the next run needs.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_leave_after, args=(parent,), daemon=True).start()


def _leave_after(parent: multiprocessing.process.BaseProcess) -> None:
    """Wait for the death of ``parent``, which is noticed within a fifth of a second.

    Its end of a pipe closes then. But processes that it has forked later have that end open, too, and may
    live on: so whose child this process is tells as well.
    """
    started_by = os.getppid()
    while parent.is_alive() and os.getppid() == started_by:
        # A server of forks is in between: it may live on a little longer than whom it works for.
        if started_by != parent.pid and not _exists(parent.pid):
            break
        parent.join(_LOOK_AFTER)
    os._exit(1)


def _exists(pid: int | None) -> bool:
    try:
        os.kill(pid or 0, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _one_at_a_time(settings: WorkerSettings) -> WorkerSettings:
    return WorkerSettings(1, 1, settings.pin_memory, settings.timeout, settings.context, settings.deaths)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _workers_of(iterator: Any) -> list[Any]:
    return list(getattr(iterator, "_workers", ()))


def _kill(iterator: Any, workers: list[Any]) -> None:
    """End workers of which one may have died with a lock in its hands.

    torch's own way of ending them takes these locks, and would wait for ever. So nothing that the workers
    share is touched: they are killed, and the iterator is told that it has ended.
    """
    if iterator is None or not workers:
        return
    iterator._shutdown = True
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(_DYING)
    if hasattr(iterator, "_pin_memory_thread_done_event"):
        iterator._pin_memory_thread_done_event.set()
    for queue in (*iterator._index_queues, iterator._worker_result_queue):
        queue.cancel_join_thread()  # its thread may wait for such a lock; a daemon, it ends with the program
        queue.close()


def _watched(iterator: Any) -> Any:
    """The same iterator, which tells of a dead worker within a moment, but only where a batch is waited for.

    torch learns of a dead worker by a signal, and raises wherever the program is at that moment: in the
    middle of a training step, where nobody can handle it. Without that signal it looks after its workers
    every five seconds of waiting (or when its time-out is over); here it does so five times a second.
    """
    from torch.utils.data._utils.signal_handling import _remove_worker_pids  # type: ignore[attr-defined]

    if getattr(iterator, "_worker_pids_set", False):
        iterator._worker_pids_set = False
        _remove_worker_pids(id(iterator))
        iterator._try_get_data = partial(_try_get_data, weakref.ref(iterator))
    return iterator


def _try_get_data(iterator: weakref.ref[Any], timeout: float = _LOOK_AFTER) -> tuple[bool, Any]:
    """What torch's method of this name does: whether there are data in time, and which."""
    end = time.monotonic() + timeout
    while True:
        left = end - time.monotonic()
        alive: Any = iterator()
        found: tuple[bool, Any] = type(alive)._try_get_data(alive, max(0.0, min(_LOOK_AFTER, left)))
        if found[0] or left <= _LOOK_AFTER:
            return found


def _no_work_item(step: int) -> WorkItem:
    raise IndexError(f"no work item for step {step}")


def _as_it_is(built: Any) -> Any:
    return built
