"""Count the parts of data files on all ranks: rank 0 runs the counting pass, each rank counts a share."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

from packhorse.count.parts import PartCounter
from packhorse.distributed import Collectives, Rendezvous, Watch
from packhorse.errors import ConfigError
from packhorse.utils.pool import LocalEngine, R, T, read_message, result_message

_PAUSE = 0.05  # seconds between two looks for results


class RankEngine:
    """Runs tasks on all ranks: :meth:`run` on rank 0, while the others are in :meth:`serve`.

    Args:
        ranks: that share the tasks.
        rendezvous: theirs.
        local: what runs this rank's share.
    """

    def __init__(self, ranks: Collectives, rendezvous: Rendezvous, local: LocalEngine) -> None:
        self.ranks, self.rendezvous, self.local = ranks, rendezvous, local
        self._runs = 0

    def run(self, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[int, R]]:
        """See :meth:`packhorse.utils.pool.Engine.run`; ``work`` is a :class:`PartCounter`.

        Raises:
            SystemFault: another rank has died. The results that came before were yielded.
        """
        settings = work.settings if isinstance(work, PartCounter) else None
        run, self._runs = self._runs, self._runs + 1
        self.rendezvous.send(f"tasks/{run}", result_message((settings, list(tasks))))
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
                time.sleep(_PAUSE)

    def serve(self, work: PartCounter) -> None:
        """Count this rank's share of each run of rank 0, until that is at the next meeting.

        Raises:
            ConfigError: this rank's processor differs from rank 0's.
        """
        world = self.ranks.world
        while self.rendezvous.wait_for(f"tasks/{self._runs}", rank=0):
            run, self._runs = self._runs, self._runs + 1
            settings, tasks = read_message(self.rendezvous.receive(f"tasks/{run}"))
            if settings != work.settings:
                raise ConfigError(
                    "the processor of this rank differs from that of rank 0 (its tokenizer, its template or "
                    "its settings): let all ranks open the same processor with the same transformers version"
                )
            own = range(world.rank, len(tasks), world.size)
            with closing(self.local.run(work, tasks[world.rank :: world.size])) as results:  # type: ignore[type-var]
                for number, result in results:
                    place = self.rendezvous.count_up(f"results/{run}")
                    self.rendezvous.send(f"results/{run}/{place}", result_message((own[number], result)))
                    if self.rendezvous.has_moved_on(0):
                        return  # another rank has failed: the next meeting says which

    def _receive(self, run: int, place: int) -> tuple[int, Any]:
        message = self.rendezvous.receive(f"results/{run}/{place}", remove=True)
        position, result = read_message(message)
        return position, result

    def _check_others(self, watch: Watch) -> None:
        if self.rendezvous.look(range(1, self.ranks.world.size), watch):
            self.ranks.gather(None)  # raises what the rank reports that has left the count
            raise AssertionError("a rank leaves the count only when rank 0 has, or when it failed")


def share_cores(ranks: Collectives, num_workers: int | None) -> int:
    """How many processes this rank may use, where several ranks of one machine share its cores.

    Args:
        ranks: all of them have to call this.
        num_workers: for each machine; None for one for each core.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    host = socket.gethostname()
    sharing = [name for name, theirs in ranks.gather((host, cores)) if name == host and cores & theirs]
    return max(1, (len(cores) if num_workers is None else num_workers) // len(sharing))
