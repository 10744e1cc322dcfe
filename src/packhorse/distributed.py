"""Small-object collectives used at start-up and at epoch end."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch.distributed as dist

from packhorse.errors import ConfigError, SystemFault, list_some
from packhorse.types import World

logger = getLogger("packhorse.loader")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.25  # seconds between two looks at the store
_BEAT_EVERY = 1.0  # seconds between two heartbeats, if the timeout allows
_REPORT_EVERY = 5.0  # seconds between two lines in the log
_NAMED_RANKS = 4  # how many missing ranks a line names
_CHUNK = 4 << 20  # bytes of one value: a TCPStore accepts at most 8 MiB


@dataclass(slots=True)
class _Status:
    """The last status of a rank: heartbeat, last meeting it arrived at, current task."""

    beat: int = 0
    meeting: int = 0
    task: str = ""
    left: str = ""  # why it will not arrive at the next meeting


@dataclass
class Watch:
    """State of a waiting rank: when each heartbeat changed, when to check and to report next."""

    next_report: float = field(default_factory=lambda: time.monotonic() + _REPORT_EVERY)
    next_look: float = 0.0
    seen: dict[int, tuple[int, float]] = field(default_factory=dict)

    def is_time(self) -> bool:
        """Return whether to check the other ranks."""
        return time.monotonic() >= self.next_look

    def silent_for(self, rank: int, beat: int) -> float:
        """Return the seconds since the heartbeat of a rank changed."""
        now = time.monotonic()
        if rank not in self.seen or self.seen[rank][0] != beat:
            self.seen[rank] = beat, now
        return now - self.seen[rank][1]


class Rendezvous:
    """A barrier of the ranks of a process group with heartbeats, and messages between them.

    ``token`` names the group in its key-value store, the same on all its ranks.

    Attributes:
        timeout: seconds without a heartbeat after which a rank counts as dead: the process group's timeout.
        meetings: number of barriers that this rank has arrived at.
    """

    def __init__(self, store: Any, world: World, token: str) -> None:
        self.store, self.world = store, world
        self.timeout: float = store.timeout.total_seconds()
        # A token per group, because torchrun's store outlives process groups and restarts.
        self._prefix = f"packhorse/{token}"
        self._interval = min(_BEAT_EVERY, self.timeout / 4)
        self.meetings = 0
        self._task = ""
        self._beats = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def busy(self, task: str) -> Iterator[None]:
        """Write heartbeats during the block, so that the others wait for this rank."""
        done = threading.Event()
        before, self._task = self._task, task
        self._write_status()
        if not before:  # else the thread of the outer block writes them
            threading.Thread(target=self._beat, args=(done,), daemon=True).start()
        try:
            yield
        except Exception:
            raise
        except BaseException as error:  # the process ends, and arrives at no other meeting
            with contextlib.suppress(SystemFault):
                self._write_status(left=type(error).__name__)
            raise
        finally:
            done.set()
            self._task = before

    def _beat(self, done: threading.Event) -> None:
        with contextlib.suppress(SystemFault):  # the main thread notices it too
            while not done.wait(self._interval):
                self._write_status()

    def meet(self) -> None:
        """Wait until all ranks have called this; raise if one has died or was interrupted."""
        self.meetings += 1
        self._write_status()
        complete = f"{self._prefix}/{self.meetings}/complete"
        with self._store_errors():
            if self.store.add(f"{self._prefix}/{self.meetings}/arrived", 1) == self.world.size:
                self.store.set(complete, "")
        others = [rank for rank in range(self.world.size) if rank != self.world.rank]
        self._poll(lambda: bool(self.store.check([complete])), others, self.meetings)

    def has_moved_on(self, rank: int) -> bool:
        """Return whether a rank waits at the next meeting already."""
        return self._status(rank).meeting > self.meetings

    def wait_for(self, key: str, rank: int) -> bool:
        """Wait for a message; return False if its sender waits at the next meeting instead."""
        self._poll(lambda: self.has_message(key) or self.has_moved_on(rank), [rank], self.meetings + 1)
        return self.has_message(key)  # a rank that has moved on may have sent it before

    def has_message(self, key: str) -> bool:
        """Return whether a message has arrived."""
        with self._store_errors():
            return bool(self.store.check([self._message_key(key)]))

    def send(self, key: str, data: bytes) -> None:
        """Send a message to other ranks, valid until the next meeting."""
        chunks = [data[first : first + _CHUNK] for first in range(0, len(data), _CHUNK)] or [b""]
        name = self._message_key(key)
        with self._store_errors():
            for number, chunk in enumerate(chunks):
                self.store.set(f"{name}/{number}", chunk)
            self.store.set(name, str(len(chunks)))  # last, because it marks the message as complete

    def receive(self, key: str, *, remove: bool = False) -> bytes:
        """Read a message that has arrived, and remove it from the store if wanted."""
        name = self._message_key(key)
        with self._store_errors():
            parts = [f"{name}/{number}" for number in range(int(self.store.get(name)))]
            data: bytes = b"".join(self.store.get(part) for part in parts)
            if remove:
                for stored in (name, *parts):
                    self.store.delete_key(stored)
        return data

    def count_up(self, key: str) -> int:
        """Return the next number of a counter that all ranks share, from 0."""
        with self._store_errors():
            return int(self.store.add(self._message_key(key), 1)) - 1

    def look(self, ranks: Iterable[int], watch: Watch) -> set[int]:
        """Check that ranks are alive; return those that wait at the next meeting. Checks once a second."""
        if not watch.is_time():
            return set()
        return set(ranks) - set(self._busy(ranks, self.meetings + 1, watch))

    def _busy(self, ranks: Iterable[int], meeting: int, watch: Watch) -> dict[int, _Status]:
        """Return the ranks that are alive and have not arrived at a meeting."""
        busy = {rank: status for rank in ranks if (status := self._status(rank)).meeting < meeting}
        for rank, status in busy.items():
            if status.left:
                raise SystemFault(f"rank {rank} was stopped ({status.left}) while other ranks waited for it")
            if watch.silent_for(rank, status.beat) > self.timeout:
                raise SystemFault(self._silence(rank, status))
        watch.next_look = time.monotonic() + self._interval
        return busy

    def _report(self, busy: dict[int, _Status], watch: Watch) -> None:
        """Log every few seconds which ranks are late; only on the lowest waiting rank."""
        now = time.monotonic()
        if now < watch.next_report or not busy or any(rank not in busy for rank in range(self.world.rank)):
            return
        watch.next_report = now + _REPORT_EVERY
        named = (
            f"rank {rank} ({status.task})" if status.task else f"rank {rank}" for rank, status in busy.items()
        )
        logger.info("rank %s waits for %s", self.world.rank, list_some(named, _NAMED_RANKS))

    def _silence(self, rank: int, status: _Status) -> str:
        limit = f"{self.timeout:g} s, the timeout of the process group"
        if not status.beat:
            return f"rank {rank} has not built its loader within {limit}: see its log"
        task = f" during '{status.task}'" if status.task else ""
        return f"rank {rank} has died or hangs{task}: no heartbeat for {limit}. See its log, or the system's"

    def _poll(self, is_done: Callable[[], bool], ranks: list[int], meeting: int) -> None:
        """Wait for ranks that arrive at ``meeting`` later."""
        pause, watch = _FIRST_PAUSE, Watch()
        while True:
            with self._store_errors():
                if is_done():
                    return
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            if pause == _LONGEST_PAUSE and watch.is_time():
                self._report(self._busy(ranks, meeting, watch), watch)

    def _write_status(self, left: str = "") -> None:
        with self._lock:  # the heartbeat must not overwrite a later status
            self._beats += 1
            status = [self._beats, self.meetings, self._task, left]
            with self._store_errors():
                self.store.set(f"{self._prefix}/status/{self.world.rank}", json.dumps(status))

    def _status(self, rank: int) -> _Status:
        key = f"{self._prefix}/status/{rank}"
        with self._store_errors():
            return _Status(*json.loads(self.store.get(key))) if self.store.check([key]) else _Status()

    def _message_key(self, key: str) -> str:
        return f"{self._prefix}/{self.meetings}/{key}"

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Raise errors of a store that is gone as :class:`SystemFault`."""
        try:
            yield
        except RuntimeError as error:  # the base of torch.distributed.DistError
            raise SystemFault(
                "the key-value store of the process group does not answer: the process that holds it (mostly "
                f"rank 0, or torchrun's agent) has ended; see its log ({' '.join(str(error).split())[:200]})"
            ) from error


# By process group: meetings are counted over all loaders that use it.
_rendezvous: WeakKeyDictionary[Any, Rendezvous] = WeakKeyDictionary()


def rendezvous_of(group: dist.ProcessGroup, world: World) -> Rendezvous | None:
    """Return the rendezvous of a process group; None without a store (MPI). All its ranks have to call it."""
    if group not in _rendezvous:
        store = group.get_group_store() if hasattr(group, "get_group_store") else None
        if store is None:
            return None
        _rendezvous[group] = Rendezvous(store, world, agree_on_token(group))
    _rendezvous[group].world = world  # another loader may have had another rank
    return _rendezvous[group]


def agree_on_token(group: dist.ProcessGroup) -> str:
    """Return a random name for a process group, the same on all its ranks."""
    token: list[Any] = [uuid4().hex]
    try:
        dist.broadcast_object_list(token, group=group, group_src=0)
    except RuntimeError as error:  # the base of torch.distributed.DistError
        raise SystemFault(
            "the ranks of the process group did not all start to build a loader within the group's timeout: "
            f"see the logs of the other ranks ({' '.join(str(error).split())[:200]})"
        ) from error
    return str(token[0])


Result = TypeVar("Result")

_NAMED_FAILURES = 3
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class _Failure:
    """The failed task of a rank and its error, without the traceback.

    ``fields`` are the attributes of the error (the reason and key of a bad sample) that are plain values.
    """

    task: str
    text: str
    kind: type[Exception]
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: Exception, task: str) -> _Failure:
        text = f"{type(error).__name__}: {error}"
        kind = next(kind for kind in type(error).__mro__ if _can_be_rebuilt(kind))
        fields = {name: value for name, value in vars(error).items() if _is_plain(value)}
        return cls(task, text, kind, fields)

    def as_error(self, message: str) -> Exception:
        """Return an error of the same class, with the same fields and this message."""
        error = self.kind(message)
        error.__dict__.update(self.fields)
        return error


def _is_plain(value: Any) -> bool:
    """Return whether every rank can unpickle a value: a text, a number, or several of them."""
    return all(isinstance(part, _PLAIN) for part in (value if type(value) in (list, tuple) else (value,)))


def _can_be_rebuilt(kind: type) -> bool:
    """Return whether every rank knows this class of errors and it takes a message alone."""
    if kind.__module__.partition(".")[0] not in ("builtins", "packhorse"):
        return False
    try:
        kind("")
    except TypeError:
        return False
    return True


class Collectives:
    """Small-object collectives of the ranks that share the data.

    Args:
        world: this rank.
        group: their process group; None for the default one, if it has as many ranks as the world. A world
            of another size (some ranks hold parts of one model) needs its own group.

    Attributes:
        is_distributed: whether the ranks can communicate; if not, every rank acts alone.
        reaches_all_ranks: whether :meth:`gather` returns the values of all ranks; also if there is only one.
        rendezvous: where ranks wait for each other; None if they cannot communicate, or the group has no
            store.
    """

    def __init__(self, world: World, group: dist.ProcessGroup | None = None) -> None:
        self.world, self.group = world, group
        if group is not None and (size := dist.get_world_size(group)) != world.size:
            message = f"a process group of {size} ranks for {world}: expected {world.size}"
            raise ConfigError(message, setting="group", value=size)
        several = world.size > 1 and has_process_group()
        self.is_distributed = several and dist.get_world_size(group) == world.size
        self.reaches_all_ranks = self.is_distributed or world.size == 1
        self.rendezvous: Rendezvous | None = None
        if self.is_distributed:
            members = dist.group.WORLD if group is None else group
            assert members is not None
            self.rendezvous = rendezvous_of(members, world)
        self._reported: Exception | None = None  # the error that all ranks know
        self._source = 0  # the rank in the process group that has world.rank 0; set by every exchange

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks by ``world.rank``; only this one's if not distributed.

        Waits for busy ranks without a limit, see :class:`Rendezvous`; raises if one has died or failed.
        """
        return self._exchange(value, None) if self.is_distributed else [value]

    def share_cores(self, num_workers: int | None = None) -> int:
        """Return the number of processes for this rank; a collective, so every rank has to call it.

        Ranks of one machine divide its cores, or ``num_workers`` per machine.
        """
        can_ask = hasattr(os, "sched_getaffinity")
        cores = os.sched_getaffinity(0) if can_ask else set(range(os.cpu_count() or 1))
        host = socket.gethostname()
        sharing = [name for name, theirs in self.gather((host, cores)) if name == host and cores & theirs]
        return max(1, (len(cores) if num_workers is None else num_workers) // len(sharing))

    def broadcast(self, task: str, do: Callable[[], Result]) -> Result:
        """Run ``do`` on rank 0 and return its result on every rank; if not distributed, run it on each."""
        if not self.is_distributed:
            return do()
        shared: list[Any] = [self.run_on_all_ranks(task, do if not self.world.rank else lambda: None)]
        dist.broadcast_object_list(shared, group=self.group, group_src=self._source)
        first: Result = shared[0]
        return first

    def all_agree(self, yes: bool) -> bool:
        """Return whether ``yes`` is true on every rank."""
        return all(self.gather(bool(yes)))

    def assert_same(self, what: str, value: str, advice: str) -> None:
        """Raise on every rank if a value differs between ranks: "the ranks ``what``: … ``advice``"."""
        by_value: dict[str, list[int]] = {}
        for rank, gathered in enumerate(self.gather(value)):
            by_value.setdefault(gathered, []).append(rank)
        if len(by_value) > 1:
            named = "; ".join(f"{gathered} on ranks {ranks}" for gathered, ranks in by_value.items())
            raise ConfigError(f"the ranks {what}: {named}. {advice}")

    def run_on_all_ranks(self, task: str, do: Callable[[], Result]) -> Result:
        """Run ``do`` on every rank; if any rank fails, raise on all of them instead of hanging.

        A rank that failed raises its own error; the others raise one of the same class that names the rank,
        its ``task`` ("open the data") and its reason. ``do`` may call the other methods, this one included,
        if every rank does.
        """
        if not self.is_distributed:
            return do()
        with contextlib.nullcontext() if self.rendezvous is None else self.rendezvous.busy(task):
            try:
                result = do()
            except Exception as error:
                if error is not self._reported:
                    self._reported = error
                    with contextlib.suppress(SystemFault):  # the error of this rank is more specific
                        self._exchange(None, _Failure.of(error, task))
                raise
            self._exchange(None, None)
            return result

    def _exchange(self, value: Any, failure: _Failure | None) -> list[Any]:
        """Exchange values; raise if another rank has failed and this one has not.

        Every exchange carries failures, so a rank that fails early reaches the others wherever they are.
        """
        if self.rendezvous is not None:
            self.rendezvous.meet()  # so that the collective itself does not time out
        entries: list[Any] = [None] * self.world.size
        dist.all_gather_object(entries, (self.world.rank, value, failure), group=self.group)
        # In the order of the process group, which may differ for a mesh.
        order = [rank for rank, _, _ in entries]
        if sorted(order) != list(range(self.world.size)):
            raise ConfigError(
                f"the processes of the group have world ranks {order}: expected each of 0 to "
                f"{self.world.size - 1} once. Pass the process group whose ranks share the data as group=",
                setting="group",
                value=order,
            )
        self._source = order.index(0)
        entries.sort(key=lambda entry: entry[0])
        failures = [(rank, report) for rank, _, report in entries if report is not None]
        if failures and failure is None:
            named = [f"rank {rank} could not {report.task}: {report.text}" for rank, report in failures]
            self._reported = failures[0][1].as_error(list_some(named, _NAMED_FAILURES, "; "))
            raise self._reported
        return [value for _, value, _ in entries]


def has_process_group() -> bool:
    """Return whether a default process group is initialized."""
    return dist.is_available() and dist.is_initialized()


def reachable_device(group: dist.ProcessGroup | None = None) -> str:
    """Return the device type of the backend: ``cuda`` for NCCL, ``cpu`` for gloo and MPI."""
    devices = [entry.partition(":")[0] for entry in str(dist.get_backend_config(group)).split(",")]
    return "cpu" if "cpu" in devices else devices[0]
