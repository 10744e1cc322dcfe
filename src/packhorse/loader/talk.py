"""What ranks have to tell each other: few words, at the start and at the end of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from packhorse.errors import ConfigError, PackhorseError
from packhorse.samplers.agree import has_process_group
from packhorse.types import World

Result = TypeVar("Result")


class Ranks:
    """The ranks that share the data, and whether they can talk.

    Args:
        world: this rank's place among them.
        group: their process group. Without it the default one, if it has as many ranks as the world; a world
            of another size (some ranks hold parts of one model) needs a group of its own to talk in.
    """

    def __init__(self, world: World, group: Any = None) -> None:
        self.world, self.group = world, group
        if group is not None and dist.get_world_size(group) != world.size:
            raise ConfigError(
                f"a process group of {dist.get_world_size(group)} ranks for {world}: expected {world.size}"
            )
        self.can_talk = world.size > 1 and has_process_group() and dist.get_world_size(group) == world.size

    def gather(self, value: Any) -> list[Any]:
        """What each rank says, in order; only this rank's where they cannot talk."""
        if not self.can_talk:
            return [value]
        found: list[Any] = [None] * self.world.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def from_first(self, do: Callable[[], Result]) -> Result:
        """What the first rank finds, on every rank; each for itself where they cannot talk.

        Raises:
            PackhorseError: the first rank failed; what it raised there is raised there.
        """
        if not self.can_talk:
            return do()
        found = self.together(do if not self.world.rank else lambda: None)
        told: list[Any] = [found]
        dist.broadcast_object_list(told, group=self.group, group_src=0)
        result: Result = told[0]
        return result

    def all_agree(self, yes: bool) -> bool:
        """Whether every rank says yes."""
        return all(self.gather(bool(yes)))

    def same(self, what: str, value: str) -> None:
        """Refuse to start where a value differs between ranks, which would then go different ways.

        Raises:
            ConfigError: on every rank, naming what each has.
        """
        found = self.gather(value)
        if len(set(found)) > 1:
            by_value: dict[str, list[int]] = {}
            for rank, one in enumerate(found):
                by_value.setdefault(one, []).append(rank)
            told = "; ".join(f"{one} on ranks {ranks}" for one, ranks in by_value.items())
            raise ConfigError(f"the ranks have different {what}: {told}. Give all of them the same settings")

    def together(self, do: Callable[[], Result]) -> Result:
        """Do something that only some ranks may fail at: then all of them fail, and none waits.

        Raises:
            PackhorseError: it failed on another rank; what it raised here is raised here.
        """
        try:
            result = do()
        except Exception as error:
            self.gather(f"{type(error).__name__}: {error}")
            raise
        failed = [f"rank {rank}: {told}" for rank, told in enumerate(self.gather("")) if told]
        if failed:
            raise PackhorseError(f"another rank cannot go on. {'; '.join(failed)}")
        return result
