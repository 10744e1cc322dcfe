"""Where a counting pass runs: processes on this machine, or a Ray cluster."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from logging import getLogger
from typing import Any, TypeVar

from packhorse.errors import ConfigError, require
from packhorse.utils.pool import (
    MAX_RETRIES,
    PICKLE_ERRORS,
    Engine,
    EngineError,
    LocalEngine,
    name_task,
    read_message,
    run_task,
    unsendable,
    use_one_thread,
)

# A handle of the work, and where the process that sent it finds its modules.
_Parcel = tuple[Any, list[str]]

# What tasks and results in flight may take on a Ray of our own; more goes to disk.
_OBJECT_STORE = 256 << 20
_PATIENCE = 10.0  # seconds for a cluster to answer
# Seconds without a result after which a run looks for a reason: soon if no CPU was free when tasks were sent;
# otherwise later, as processes of the cluster may just be starting.
_SILENCE, _LONG_SILENCE = 5.0, 60.0

logger = getLogger("packhorse.count")


class RayEngine:
    """Tasks on Ray.

    A Ray that this process has already joined is used as it is, and stays. Otherwise one is joined (or
    started) for the run and left (or stopped) after it.

    Args:
        address: an existing cluster (``host:6379``, ``ray://host:10001``, ``auto``). None: what the variable
            ``RAY_ADDRESS`` says, else a Ray on this machine for as long as the run takes.
        num_workers: how many tasks may run at once; None for as many as the cluster has CPUs, those that join
            during the run included.
    """

    def __init__(self, address: str | None = None, num_workers: int | None = None) -> None:
        if num_workers is not None and num_workers < 1:
            raise ConfigError(f"num_workers={num_workers} is too few: expected at least 1")
        self.address = address if address is not None else os.environ.get("RAY_ADDRESS") or "local"
        self.num_workers = num_workers

    def run(self, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[int, R]]:
        """See :meth:`packhorse.utils.pool.Engine.run`. Closing the iterator cancels what is under way."""
        if not tasks:
            return
        ray = require("ray", "ray")
        _membership.enter(ray, self.address, self.num_workers)
        flying: dict[Any, int] = {}
        try:
            try:
                handle = ray.put(work)
            except PICKLE_ERRORS as error:
                raise unsendable("the work", error) from error
            do = ray.remote(_do).options(num_cpus=1, max_retries=MAX_RETRIES, retry_exceptions=False)
            # In a tuple, a handle is passed on as it is; alone, Ray would rebuild the work for each task.
            parcel = handle, sys.path
            waiting = iter(range(len(tasks)))
            limit = 0
            silence = _SILENCE if _free_cpus(ray) < 1 else _LONG_SILENCE
            while True:
                limit = self.num_workers or max(limit, 2 * int(ray.cluster_resources().get("CPU", 1)))
                while len(flying) < limit and (position := next(waiting, None)) is not None:
                    flying[_started(do, parcel, position, tasks[position])] = position
                if not flying:
                    return
                ready = _wait_for_result(ray, list(flying), silence)
                silence = _LONG_SILENCE
                position = flying[ready]
                received = _received(ray, ready, position, tasks)
                del flying[ready]
                yield position, read_message(received)
        finally:
            for reference in flying:
                ray.cancel(reference, force=True)
            _membership.leave(ray)


def _free_cpus(ray: Any) -> float:
    return float(ray.available_resources().get("CPU", 0))


def _wait_for_result(ray: Any, references: list[Any], silence: float) -> Any:
    """Wait for a result; report after ``silence`` seconds, and less and less often, if no CPU is free."""
    waited = 0.0
    while True:
        ready, _ = ray.wait(references, num_returns=1, timeout=silence)
        if ready:
            return ready[0]
        waited, silence = waited + silence, 2 * silence
        free, total = _free_cpus(ray), ray.cluster_resources().get("CPU", 0)
        if free < 1:
            logger.warning(
                "no result from the Ray cluster for %.0f s: %s tasks are sent, and none of its %g CPUs is "
                "free. Tasks start when other work gives CPUs back, or nodes join",
                waited,
                len(references),
                total,
            )


def _started(do: Any, parcel: _Parcel, position: int, task: Any) -> Any:
    try:
        return do.remote(parcel, position, task)
    except PICKLE_ERRORS as error:
        raise unsendable(name_task(position, task), error) from error


def _received(ray: Any, reference: Any, position: int, tasks: Sequence[Any]) -> bytes:
    try:
        received: bytes = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        # The work's own errors come as messages: this one is from before the work.
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
    return received


_rebuilt: dict[Any, Callable[[Any], Any]] = {}


def _do(parcel: _Parcel, position: int, task: Any) -> bytes:
    """One task, in a process of the cluster."""
    import ray

    handle, path = parcel
    if handle not in _rebuilt:
        sys.path += [folder for folder in path if folder not in sys.path]
        use_one_thread()
        _rebuilt.clear()  # the work of an earlier run
        _rebuilt[handle] = ray.get(handle)
        use_one_thread()  # torch may have come with the work
    return run_task(_rebuilt[handle], position, task)


class _Membership:
    """Joins Ray for the first run of this process that needs it, leaves after the last: runs may overlap."""

    def __init__(self) -> None:
        self.lock, self.runs, self.ours = threading.Lock(), 0, False

    def enter(self, ray: Any, address: str, num_workers: int | None) -> None:
        with self.lock:
            if not ray.is_initialized():
                _join(ray, address, num_workers)
                self.ours = True
            self.runs += 1

    def leave(self, ray: Any) -> None:
        with self.lock:
            self.runs -= 1
            if self.runs == 0 and self.ours:
                self.ours = False
                ray.shutdown()


_membership = _Membership()


def _join(ray: Any, address: str, num_workers: int | None) -> None:
    settings: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "error"}
    if address == "local":
        settings |= {
            "include_dashboard": False,
            "num_cpus": num_workers,
            "object_store_memory": _OBJECT_STORE,
        }
    try:
        _knock(address)
        ray.init(**settings)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise EngineError(f"cannot join the Ray cluster at {address!r} ({error})") from error


def _knock(address: str) -> None:
    """Raise an OSError if nobody answers at ``host:port``; Ray itself would go on trying for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_PATIENCE).close()


ENGINES = ("local", "ray")


def make_engine(name: str, num_workers: int | None = None, ray_address: str | None = None) -> Engine:
    """The engine ``name`` ("local" or "ray").

    Args:
        name: one of :data:`ENGINES`.
        num_workers: tasks that run at the same time; None for all cores, or for what the cluster has.
        ray_address: an existing Ray cluster; None takes that of ``RAY_ADDRESS``, else starts one on this
            machine.
    """
    if name == "local":
        if ray_address is not None:
            raise ConfigError(f"ray_address={ray_address!r} goes with the engine 'ray', not with 'local'")
        # The process of a command is our own: it has used no GPU, and forks start at once with all it loaded.
        return LocalEngine(
            num_workers, multiprocessing_context="fork" if sys.platform == "linux" else "spawn"
        )
    if name == "ray":
        return RayEngine(ray_address, num_workers)
    raise ConfigError(f"unknown engine {name!r}: expected one of {', '.join(ENGINES)}")


T = TypeVar("T")
R = TypeVar("R")
