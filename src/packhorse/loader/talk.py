"""Small-object collectives used at start-up and at epoch end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from packhorse.errors import ConfigError, SystemFault
from packhorse.loader.rendezvous import Rendezvous, rendezvous_of
from packhorse.samplers.agree import has_process_group
from packhorse.types import World

Result = TypeVar("Result")

_NAMED_FAILURES = 3
_PLAIN = (str, int, float, bool, type(None))  # what other ranks can surely read


@dataclass(frozen=True, slots=True)
class _Failure:
    """What a rank reports to the others: what it could not do, and its error, without the traceback.

    ``fields`` are the attributes of the error (the reason and key of a bad sample) that are plain values.
    """

    task: str
    text: str
    kind: type[Exception]
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: Exception, task: str) -> _Failure:
        text = f"{type(error).__name__}: {error}"
        kind = next(kind for kind in type(error).__mro__ if _can_be_raised_elsewhere(kind))
        fields = {name: value for name, value in vars(error).items() if isinstance(value, _PLAIN)}
        return cls(task, text, kind, fields)

    def as_error(self, message: str) -> Exception:
        """An error of the same class, with the same fields and another message."""
        error = self.kind(message)
        for name, value in self.fields.items():
            setattr(error, name, value)
        return error


def _can_be_raised_elsewhere(kind: type) -> bool:
    """Whether a class of errors is known to every rank and takes a message alone."""
    if kind.__module__.partition(".")[0] not in ("builtins", "packhorse"):
        return False
    try:
        kind("")
    except TypeError:
        return False
    return True


class Ranks:
    """The ranks that share the data, and whether they can talk.

    Args:
        world: this rank's place among them.
        group: their process group. Without it the default one, if it has as many ranks as the world; a world
            of another size (some ranks hold parts of one model) needs a group of its own to talk in.

    Attributes:
        rendezvous: where ranks wait for each other; None if they cannot talk, or their group has no store.
    """

    def __init__(self, world: World, group: Any = None) -> None:
        self.world, self.group = world, group
        if group is not None and dist.get_world_size(group) != world.size:
            raise ConfigError(
                f"a process group of {dist.get_world_size(group)} ranks for {world}: expected {world.size}"
            )
        self.can_talk = world.size > 1 and has_process_group() and dist.get_world_size(group) == world.size
        self.rendezvous: Rendezvous | None = None
        if self.can_talk:
            self.rendezvous = rendezvous_of(dist.group.WORLD if group is None else group, world)
        self._reported: Exception | None = None  # the error that all ranks know of
        self._source = 0  # rank in the process group of the process with world.rank 0; set by every exchange

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks by their ``world.rank``, or only this one's if they cannot talk.

        Waits for busy ranks without a limit, see :class:`~packhorse.loader.rendezvous.Rendezvous`.

        Raises:
            SystemFault: another rank has died.
            Exception: another rank has failed in :meth:`run_on_all_ranks`: its error.
        """
        return self._exchange(value, None) if self.can_talk else [value]

    def from_first(self, task: str, do: Callable[[], Result]) -> Result:
        """Run ``do`` on rank 0 and return its result on every rank; on each rank if they cannot talk.

        Raises:
            Exception: rank 0 failed, see :meth:`run_on_all_ranks`.
        """
        if not self.can_talk:
            return do()
        result = self.run_on_all_ranks(task, do if not self.world.rank else lambda: None)
        shared: list[Any] = [result]
        dist.broadcast_object_list(shared, group=self.group, group_src=self._source)
        first: Result = shared[0]
        return first

    def all_agree(self, yes: bool) -> bool:
        """Whether every rank says yes."""
        return all(self.gather(bool(yes)))

    def same(self, what: str, value: str, advice: str) -> None:
        """Raise if a value differs between ranks, which would then go different ways.

        Args:
            what: what the ranks do with the value, for the message: "have different settings".
            value: this rank's.
            advice: what to do about it.

        Raises:
            ConfigError: on every rank, naming what each has.
        """
        by_value: dict[str, list[int]] = {}
        for rank, gathered in enumerate(self.gather(value)):
            by_value.setdefault(gathered, []).append(rank)
        if len(by_value) > 1:
            named = "; ".join(f"{gathered} on ranks {ranks}" for gathered, ranks in by_value.items())
            raise ConfigError(f"the ranks {what}: {named}. {advice}")

    def run_on_all_ranks(self, task: str, do: Callable[[], Result]) -> Result:
        """Run ``do`` on every rank; if any rank fails, raise on all of them instead of hanging.

        A rank that failed raises its own error; the others raise one of the same class that names the rank
        and its reason.

        Args:
            task: what ``do`` does, for messages: "open the data".
            do: may use the other methods, this one included; every rank then has to.

        Raises:
            SystemFault: another rank has died.
        """
        if not self.can_talk:
            return do()
        if self.rendezvous is None:
            return self._run(task, do)
        with self.rendezvous.busy(task):
            return self._run(task, do)

    def _run(self, task: str, do: Callable[[], Result]) -> Result:
        try:
            result = do()
        except Exception as error:
            if error is not self._reported:
                self._reported = error
                with suppress(SystemFault):  # this rank's own error says more
                    self._exchange(None, _Failure.of(error, task))
            raise
        self._exchange(None, None)
        return result

    def _exchange(self, value: Any, failure: _Failure | None) -> list[Any]:
        """Give each rank's value to all; raise if another rank has failed and this one has not.

        Failures travel with every exchange: a rank that fails early meets the others wherever they are.
        """
        if self.rendezvous is not None:
            self.rendezvous.meet()  # so that the collective takes no longer than moving the data
        found: list[Any] = [None] * self.world.size
        dist.all_gather_object(found, (self.world.rank, value, failure), group=self.group)
        # In the order of the process group, which is another one for a mesh of turned dimensions.
        order = [rank for rank, _, _ in found]
        if sorted(order) != list(range(self.world.size)):
            raise ConfigError(
                f"the processes of the group have world ranks {order}: expected each of 0 to "
                f"{self.world.size - 1} once. Pass the process group whose ranks share the data as group="
            )
        self._source = order.index(0)
        found.sort(key=lambda entry: entry[0])
        failures = [(rank, report) for rank, _, report in found if report is not None]
        if failures and failure is None:
            named = [f"rank {rank} could not {one.task}: {one.text}" for rank, one in failures]
            more = f"; and {len(named) - _NAMED_FAILURES} more" if len(named) > _NAMED_FAILURES else ""
            self._reported = failures[0][1].as_error("; ".join(named[:_NAMED_FAILURES]) + more)
            raise self._reported
        return [value for _, value, _ in found]
