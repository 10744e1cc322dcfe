"""Wait for other ranks without a collective: heartbeats and messages in the process group's key-value store.

A collective gives up after the process group's timeout, however busy the other ranks are. Here a busy rank
keeps writing a heartbeat, and a rank that waits for it gives up only if the heartbeat stops for that long.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch.distributed as dist

from packhorse.errors import SystemFault
from packhorse.types import World

logger = getLogger("packhorse.loader")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.25  # seconds between two looks at the store
_BEAT_EVERY = 1.0  # seconds between two heartbeats, if the timeout allows
_REPORT_EVERY = 5.0  # seconds between two lines in the log
_NAMED_RANKS = 4  # how many missing ranks a line names
_CHUNK = 4 << 20  # bytes of one value: a TCPStore accepts at most 8 MiB


@dataclass(slots=True)
class _Status:
    """What a rank has last written: the number of the write, the last meeting it came to, what it does."""

    beat: int = 0
    meeting: int = 0
    task: str = ""
    left: str = ""  # why it will not come to the next meeting


@dataclass
class Watch:
    """What a waiting rank remembers: when each other rank's heartbeat changed, when to look and to report."""

    next_report: float = field(default_factory=lambda: time.monotonic() + _REPORT_EVERY)
    next_look: float = 0.0
    seen: dict[int, tuple[int, float]] = field(default_factory=dict)

    def is_time(self) -> bool:
        """Whether to look at the other ranks again."""
        return time.monotonic() >= self.next_look

    def silent_for(self, rank: int, beat: int) -> float:
        """Seconds since the heartbeat of a rank changed."""
        now = time.monotonic()
        if rank not in self.seen or self.seen[rank][0] != beat:
            self.seen[rank] = beat, now
        return now - self.seen[rank][1]


class Rendezvous:
    """Where the ranks of a process group meet.

    Args:
        store: the group's key-value store.
        world: this rank's place in the group.
        token: names the group in the store, the same on all its ranks.

    Attributes:
        timeout: seconds without a heartbeat after which a rank counts as dead: the process group's timeout.
        meetings: how many meetings this rank has come to. All ranks come to all of them.
    """

    def __init__(self, store: Any, world: World, token: str) -> None:
        self.store, self.world = store, world
        self.timeout: float = store.timeout.total_seconds()
        # torchrun's store outlives process groups and restarts: what earlier ones wrote must not count.
        self._prefix = f"packhorse/{token}"
        self._interval = min(_BEAT_EVERY, self.timeout / 4)
        self.meetings = 0
        self._task = ""
        self._beats = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def busy(self, task: str) -> Iterator[None]:
        """Write heartbeats while this rank is at work, so that the others wait for it."""
        done = threading.Event()
        before, self._task = self._task, task
        self._write_status()
        if not before:  # else there is a thread for it
            threading.Thread(target=self._beat, args=(done,), daemon=True).start()
        try:
            yield
        except Exception:
            raise
        except BaseException as error:  # the process is to end: it comes to no other meeting
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
        """Wait until all ranks have come to this meeting.

        Raises:
            SystemFault: a rank has died or was interrupted, or the store is gone.
        """
        self.meetings += 1
        self._write_status()
        complete = f"{self._prefix}/{self.meetings}/complete"
        with self._store_errors():
            if self.store.add(f"{self._prefix}/{self.meetings}/arrived", 1) == self.world.size:
                self.store.set(complete, "")
        others = [rank for rank in range(self.world.size) if rank != self.world.rank]
        self._poll(lambda: bool(self.store.check([complete])), others, self.meetings)

    def has_moved_on(self, rank: int) -> bool:
        """Whether a rank waits at the next meeting already."""
        return self._status(rank).meeting > self.meetings

    def wait_for(self, key: str, rank: int) -> bool:
        """Wait until a message is there; False if the rank that should send it waits at the next meeting."""
        self._poll(lambda: self.has_message(key) or self.has_moved_on(rank), [rank], self.meetings + 1)
        return self.has_message(key)  # a rank that has moved on may have sent it before

    def has_message(self, key: str) -> bool:
        """Whether a message is there."""
        with self._store_errors():
            return bool(self.store.check([self._message_key(key)]))

    def send(self, key: str, data: bytes) -> None:
        """Leave a message for other ranks, which holds until the next meeting."""
        chunks = [data[first : first + _CHUNK] for first in range(0, len(data), _CHUNK)] or [b""]
        name = self._message_key(key)
        with self._store_errors():
            for number, chunk in enumerate(chunks):
                self.store.set(f"{name}/{number}", chunk)
            self.store.set(name, str(len(chunks)))  # last: the message is complete when this is there

    def receive(self, key: str, *, remove: bool = False) -> bytes:
        """Read a message that is there.

        Args:
            key: its name.
            remove: remove it from the store, as the only rank that reads it.
        """
        name = self._message_key(key)
        with self._store_errors():
            parts = [f"{name}/{number}" for number in range(int(self.store.get(name)))]
            data: bytes = b"".join(self.store.get(part) for part in parts)
            if remove:
                for stored in (name, *parts):
                    self.store.delete_key(stored)
        return data

    def count_up(self, key: str) -> int:
        """The next number of a counter that all ranks share, from 0."""
        with self._store_errors():
            return int(self.store.add(self._message_key(key), 1)) - 1

    def look(self, ranks: Iterable[int], watch: Watch) -> set[int]:
        """Check that ranks are alive that work until the next meeting; return those that wait there already.

        Looks at most once a second; returns nothing in between.

        Raises:
            SystemFault: a rank has died or was interrupted.
        """
        if not watch.is_time():
            return set()
        busy = self._busy(ranks, self.meetings + 1, watch)
        return set(ranks) - set(busy)

    def _busy(self, ranks: Iterable[int], meeting: int, watch: Watch) -> dict[int, _Status]:
        """The ranks that are alive and have not come to a meeting."""
        busy = {rank: status for rank in ranks if (status := self._status(rank)).meeting < meeting}
        for rank, status in busy.items():
            if status.left:
                raise SystemFault(f"rank {rank} was stopped ({status.left}) while other ranks waited for it")
            if watch.silent_for(rank, status.beat) > self.timeout:
                raise SystemFault(self._silence(rank, status))
        watch.next_look = time.monotonic() + self._interval
        return busy

    def _report(self, busy: dict[int, _Status], watch: Watch) -> None:
        """Log once in a while for whom this rank waits; of several waiting ranks, only on the lowest."""
        now = time.monotonic()
        if now < watch.next_report or not busy or any(rank not in busy for rank in range(self.world.rank)):
            return
        watch.next_report = now + _REPORT_EVERY
        named = [f"rank {rank}{_doing(status)}" for rank, status in list(busy.items())[:_NAMED_RANKS]]
        more = f" and {len(busy) - len(named)} more" if len(busy) > len(named) else ""
        logger.info("rank %s waits for %s%s", self.world.rank, ", ".join(named), more)

    def _silence(self, rank: int, status: _Status) -> str:
        limit = f"{self.timeout:g} s, the timeout of the process group"
        if not status.beat:
            return f"rank {rank} has not built its loader within {limit}: see its log"
        at = f" during '{status.task}'" if status.task else ""
        return f"rank {rank} has died or hangs{at}: no sign of life for {limit}. See its log, or the system's"

    def _poll(self, is_done: Callable[[], bool], ranks: list[int], meeting: int) -> None:
        """Wait for ranks that come to ``meeting`` later."""
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
        """Turn the errors of a store that is gone into one that says so."""
        try:
            yield
        except RuntimeError as error:  # the base of torch.distributed.DistError
            raise SystemFault(
                "the key-value store of the process group does not answer: the process that holds it (mostly "
                f"rank 0, or torchrun's agent) has ended; see its log ({' '.join(str(error).split())[:200]})"
            ) from error


def _doing(status: _Status) -> str:
    return f" ({status.task})" if status.task else ""


# By process group: meetings are counted from its beginning, over all loaders that use it.
_known: WeakKeyDictionary[Any, Rendezvous] = WeakKeyDictionary()


def rendezvous_of(group: Any, world: World) -> Rendezvous | None:
    """The meeting place of a process group; None if it has no store (MPI).

    All ranks of the group have to call it: for a new group they agree on a token.
    """
    if group not in _known:
        store = group.get_group_store() if hasattr(group, "get_group_store") else None
        if store is None:
            return None
        _known[group] = Rendezvous(store, world, agree_on_token(group))
    _known[group].world = world  # of the loader that is being built: another one may have had another rank
    return _known[group]


def agree_on_token(group: Any) -> str:
    """A random name for a process group, the same on all its ranks and new for every group.

    Raises:
        SystemFault: a rank does not come within the group's timeout.
    """
    token: list[Any] = [uuid4().hex]
    try:
        dist.broadcast_object_list(token, group=group, group_src=0)
    except RuntimeError as error:  # the base of torch.distributed.DistError
        raise SystemFault(
            "the ranks of the process group did not all start to build a loader within the group's timeout: "
            f"see the logs of the other ranks ({' '.join(str(error).split())[:200]})"
        ) from error
    return str(token[0])
