"""Engines of a counting pass: a Ray cluster, or all ranks of a process group.

Processes of a Ray cluster import this module, so it imports neither torch nor the counter.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from logging import getLogger
from typing import TYPE_CHECKING, Any

from packhorse.errors import ConfigError, require, suggest
from packhorse.utils.pool import (
    MAX_RETRIES,
    PICKLE_ERRORS,
    Engine,
    EngineError,
    LocalEngine,
    R,
    T,
    name_task,
    read_message,
    result_message,
    run_task,
    unsendable,
    use_one_thread,
)

if TYPE_CHECKING:
    from packhorse.count.parts import PartCounter
    from packhorse.distributed import Collectives, Rendezvous, Watch

# A handle of the work, and the module search path of the process that sent it.
_Parcel = tuple[Any, list[str]]

_OBJECT_STORE = 256 << 20  # bytes for tasks and results of a Ray that we start; more is spilled to disk
_CONNECT_TIMEOUT = 10.0  # seconds
# Seconds without a result after which a run looks for a reason: soon if no CPU was free when tasks were sent;
# otherwise later, as processes of the cluster may just be starting.
_SILENCE, _LONG_SILENCE = 5.0, 60.0
_POLL_INTERVAL = 0.05  # seconds between two looks for results of other ranks

logger = getLogger("packhorse.count")

ENGINES = ("local", "ray")


def make_engine(name: str, num_workers: int | None = None, ray_address: str | None = None) -> Engine:
    """Return the engine ``name``, one of :data:`ENGINES`.

    ``num_workers`` of None is all cores, or what the cluster has; ``ray_address`` as in :class:`RayEngine`.
    """
    if name == "ray":
        return RayEngine(ray_address, num_workers)
    if name != "local":
        choices = f"{', '.join(ENGINES)}{suggest(name, ENGINES)}"
        raise ConfigError(f"unknown engine {name!r}: expected one of {choices}", setting="engine", value=name)
    if ray_address is not None:
        raise ConfigError.of("ray_address", ray_address, "goes with the engine 'ray', not with 'local'")
    # A command's own process has used no GPU, and forks start at once with all loaded modules.
    return LocalEngine(num_workers, multiprocessing_context="fork" if sys.platform == "linux" else "spawn")


class RayEngine:
    """Run tasks on Ray.

    If this process has already joined a Ray cluster, it is used and left running. Otherwise one is joined (or
    started) for the run and left (or stopped) after it.

    Args:
        address: an existing cluster (``host:6379``, ``ray://host:10001``, ``auto``). None: the value of
            ``RAY_ADDRESS``, else a Ray on this machine for the duration of the run.
        num_workers: tasks that run at the same time; None for as many as the cluster has CPUs, those that
            join during the run included.
    """

    def __init__(self, address: str | None = None, num_workers: int | None = None) -> None:
        if num_workers is not None and num_workers < 1:
            raise ConfigError.of("num_workers", num_workers, "expected at least 1")
        self.address = address if address is not None else os.environ.get("RAY_ADDRESS") or "local"
        self.num_workers = num_workers

    def run(self, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[int, R]]:
        """See :meth:`packhorse.utils.pool.Engine.run`. Closing the iterator cancels running tasks."""
        if not tasks:
            return
        ray = require("ray", "ray")
        _membership.enter(ray, self.address, self.num_workers)
        running: dict[Any, int] = {}
        try:
            try:
                handle = ray.put(work)
            except PICKLE_ERRORS as error:
                raise unsendable("the work", error) from error
            options = {"num_cpus": 1, "max_retries": MAX_RETRIES, "retry_exceptions": False}
            remote = ray.remote(_run_on_node).options(**options)
            # In a tuple, a handle is passed on as it is; alone, Ray would rebuild the work for each task.
            parcel = handle, sys.path
            positions = iter(range(len(tasks)))
            limit = 0
            silence = _SILENCE if _free_cpus(ray) < 1 else _LONG_SILENCE
            while True:
                limit = self.num_workers or max(limit, 2 * int(ray.cluster_resources().get("CPU", 1)))
                while len(running) < limit and (position := next(positions, None)) is not None:
                    running[_send(remote, parcel, position, tasks[position])] = position
                if not running:
                    return
                ready = _wait_for_result(ray, list(running), silence)
                silence = _LONG_SILENCE
                position = running[ready]
                message = _receive(ray, ready, position, tasks)
                del running[ready]
                yield position, read_message(message)
        finally:
            for reference in running:
                ray.cancel(reference, force=True)
            _membership.leave(ray)


def _free_cpus(ray: Any) -> float:
    return float(ray.available_resources().get("CPU", 0))


def _wait_for_result(ray: Any, references: list[Any], silence: float) -> Any:
    """Wait for a result; report after ``silence`` seconds, and less and less often, if no CPU is free."""
    waited = 0.0
    while True:
        if ready := ray.wait(references, num_returns=1, timeout=silence)[0]:
            return ready[0]
        waited, silence = waited + silence, 2 * silence
        if _free_cpus(ray) < 1:
            logger.warning(
                "no result from the Ray cluster for %.0f s: %s tasks are sent, and none of its %g CPUs is "
                "free. Tasks start when other work gives CPUs back, or nodes join",
                waited,
                len(references),
                ray.cluster_resources().get("CPU", 0),
            )


def _send(remote: Any, parcel: _Parcel, position: int, task: Any) -> Any:
    try:
        return remote.remote(parcel, position, task)
    except PICKLE_ERRORS as error:
        raise unsendable(name_task(position, task), error) from error


def _receive(ray: Any, reference: Any, position: int, tasks: Sequence[Any]) -> bytes:
    try:
        message: bytes = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        # Errors of the work arrive as messages: this one is from before the work.
        problem = str(error.cause).partition("\n")[0]
        raise EngineError(
            f"{name_task(position, tasks[position])} could not be started on a node of the Ray cluster "
            f"({problem}): is packhorse, with what the work needs, installed there?"
        ) from error
    except ray.exceptions.RayError as error:
        raise EngineError(
            f"{name_task(position, tasks[position])} was given up after {MAX_RETRIES} retries: the process "
            f"or the node that ran it died ({error})"
        ) from error
    return message


_work_by_handle: dict[Any, Callable[[Any], Any]] = {}


def _run_on_node(parcel: _Parcel, position: int, task: Any) -> bytes:
    """Run one task in a process of the cluster."""
    import ray

    handle, path = parcel
    if handle not in _work_by_handle:
        sys.path += [folder for folder in path if folder not in sys.path]
        use_one_thread()
        _work_by_handle.clear()  # the work of an earlier run
        _work_by_handle[handle] = ray.get(handle)
        use_one_thread()  # the work may have imported torch
    return run_task(_work_by_handle[handle], position, task)


class _Membership:
    """Join Ray for the first run of this process, leave after the last: runs may overlap."""

    def __init__(self) -> None:
        self.lock, self.runs, self.joined = threading.Lock(), 0, False

    def enter(self, ray: Any, address: str, num_workers: int | None) -> None:
        with self.lock:
            if not ray.is_initialized():
                _join(ray, address, num_workers)
                self.joined = True
            self.runs += 1

    def leave(self, ray: Any) -> None:
        with self.lock:
            self.runs -= 1
            if self.runs == 0 and self.joined:
                self.joined = False
                ray.shutdown()


_membership = _Membership()


def _join(ray: Any, address: str, num_workers: int | None) -> None:
    settings: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "error"}
    if address == "local":
        settings["include_dashboard"] = False
        settings |= {"num_cpus": num_workers, "object_store_memory": _OBJECT_STORE}
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdecimal():  # fail at once if there is no answer: Ray itself retries for minutes
            socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT).close()
        ray.init(**settings)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise EngineError(f"cannot join the Ray cluster at {address!r} ({error})") from error


class RankEngine:
    """Run tasks on all ranks: rank 0 calls :meth:`run`, the others call :meth:`serve`."""

    def __init__(self, ranks: Collectives, rendezvous: Rendezvous, local: LocalEngine) -> None:
        self.ranks, self.rendezvous, self.local = ranks, rendezvous, local
        self._runs = 0

    def run(self, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[int, R]]:
        """See :meth:`packhorse.utils.pool.Engine.run`; ``work`` is a ``PartCounter``.

        If another rank dies, the results that have arrived are yielded before a SystemFault is raised.
        """
        from packhorse.distributed import Watch

        run, self._runs = self._runs, self._runs + 1
        self.rendezvous.send(f"tasks/{run}", result_message((getattr(work, "settings", None), list(tasks))))
        size = self.ranks.world.size
        own = range(0, len(tasks), size)
        expected, received, watch = len(tasks) - len(own), 0, Watch()
        with closing(self.local.run(work, tasks[::size])) as results:  # type: ignore[type-var]
            for number, result in results:
                yield own[number], result
                while received < expected and self.rendezvous.has_message(f"results/{run}/{received}"):
                    yield self._receive(run, received)
                    received += 1
                self._check_others(watch)
        while received < expected:
            if self.rendezvous.has_message(f"results/{run}/{received}"):
                yield self._receive(run, received)
                received += 1
            else:
                self._check_others(watch)
                time.sleep(_POLL_INTERVAL)

    def serve(self, work: PartCounter) -> None:
        """Count this rank's share of each run of rank 0, until rank 0 reaches the next rendezvous."""
        world = self.ranks.world
        while self.rendezvous.wait_for(f"tasks/{self._runs}", rank=0):
            run, self._runs = self._runs, self._runs + 1
            settings, tasks = read_message(self.rendezvous.receive(f"tasks/{run}"))
            if settings != work.settings:
                raise ConfigError(
                    "the processor of this rank differs from that of rank 0 (its tokenizer, its template or "
                    "its settings): let all ranks open the same processor with the same transformers version",
                    setting="processor",
                )
            own = range(world.rank, len(tasks), world.size)
            with closing(self.local.run(work, tasks[world.rank :: world.size])) as results:  # type: ignore[type-var]
                for number, result in results:
                    index = self.rendezvous.count_up(f"results/{run}")
                    self.rendezvous.send(f"results/{run}/{index}", result_message((own[number], result)))
                    if self.rendezvous.has_moved_on(0):
                        return  # another rank has failed: the next rendezvous raises its error

    def _receive(self, run: int, index: int) -> tuple[int, Any]:
        position, result = read_message(self.rendezvous.receive(f"results/{run}/{index}", remove=True))
        return position, result

    def _check_others(self, watch: Watch) -> None:
        if self.rendezvous.look(range(1, self.ranks.world.size), watch):
            self.ranks.gather(None)  # raises what the rank reports that has left the count
            raise AssertionError("a rank leaves the count only when rank 0 has, or when it failed")
