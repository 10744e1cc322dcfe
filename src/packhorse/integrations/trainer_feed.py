"""A loader as trainers see it that count steps themselves and fetch batches before they train them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from packhorse.errors import ConfigError
from packhorse.families.models import UNCHECKED, check_packable, models_in
from packhorse.integrations.loss import Batch, count_supervised


def check_world(
    loader: Any, rank: int, size: int, gradient_accumulation_steps: int, *, saved_by_all: bool = False
) -> None:
    """Refuse a loader that deals to other ranks, or in other steps, than those that train.

    Args:
        loader: the loader.
        rank: of this process among those that train.
        size: how many train.
        gradient_accumulation_steps: micro-batches per optimizer step of the training loop.
        saved_by_all: whether each rank has a state of its own in a checkpoint.

    Raises:
        ConfigError: naming both.
    """
    world = loader.world
    if (world.rank, world.size) != (rank, size):
        raise ConfigError(
            f"the loader is for rank {world.rank} of {world.size}, but rank {rank} of {size} trains: build "
            "the loader when torch.distributed is initialised, or pass world="
        )
    if loader.config.shard_data and size > 1 and not saved_by_all:
        raise ConfigError(
            "shard_data=True: each rank's loader has a state of its own, but checkpoints hold only that of "
            "the first rank. Leave shard_data out"
        )
    if loader.config.gradient_accumulation_steps != gradient_accumulation_steps:
        raise ConfigError(
            f"{gradient_accumulation_steps} micro-batches are accumulated, but the loader has "
            "gradient_accumulation_steps="
            f"{loader.config.gradient_accumulation_steps}: give both the same"
        )


def check_model(loader: Any, module: Any) -> None:
    """Raise if a module that a loader of packs feeds holds a model that packed rows are wrong for.

    Args:
        loader: the loader; one that was built with ``model="unchecked"`` is not checked here either.
        module: a model, or a module around it (a LightningModule).

    Raises:
        ConfigError: see :func:`packhorse.families.models.packing_problems`.
    """
    if loader.config.mode != "pack" or loader.model_name == UNCHECKED:
        return
    for model in models_in(module):
        check_packable(model)


class TrainerFeed:
    """One pass is the rest of the loader's epoch; the next pass is the next epoch.

    Trainers ask for as many batches as there are and never for the end, so the epoch is closed here, when its
    last batch is delivered. Counts what was trained: trainers fetch all micro-batches of a step before they
    train the first.

    Attributes:
        handed_out: batches of this epoch, since the loader was built or loaded.
        trained: of them, in finished optimizer steps; the trainer counts.
        accumulated: of them, in an optimizer step that is not finished: a checkpoint does not hold their
            gradients, so they do not count as trained.
    """

    def __init__(self, loader: Any) -> None:
        self.loader, self.dataset = loader, loader.dataset
        self._length = len(loader)  # what is left of an epoch that began on other ranks may be less
        self._reset()

    def _reset(self) -> None:
        self.epoch, self.delivered, self.trained, self.accumulated = self.loader.epoch, 0, 0, 0

    def finish_step(self) -> None:
        """Count the micro-batches of the step that the optimizer has made."""
        self.trained, self.accumulated = self.trained + self.accumulated, 0

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)  # begins the next epoch if this one is over
        if self.loader.epoch != self.epoch:
            self._reset()
        return self._delivered(batches)

    def _delivered(self, batches: Iterator[Batch]) -> Iterator[Any]:
        for batch in batches:
            self.delivered += 1
            if not self.loader.remaining:
                _close(batches)
            yield batch

    @property
    def position(self) -> float:
        """Epochs delivered, with the part of the present one."""
        return float(self.loader.epoch + 1 - self.loader.remaining / self._length)

    def state_dict(self) -> dict[str, Any]:
        """The loader's, with no more used up than was trained."""
        consumed = None if self.trained == self.delivered else self.trained
        state: dict[str, Any] = self.loader.state_dict(consumed=consumed)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after what was trained."""
        self.loader.load_state_dict(state)
        self._reset()


class StepFeed(TrainerFeed):
    """Pairs of a batch and the supervised tokens of its step, for trainers that show one batch at a time.

    All micro-batches of a step are fetched when its first one is asked for; their tokens are counted over all
    ranks.
    """

    def __init__(self, loader: Any) -> None:
        self._before = 0
        super().__init__(loader)

    def _reset(self) -> None:
        self._before = 0
        super()._reset()

    def __len__(self) -> int:
        """Batches of this epoch, those before a restart as they were then."""
        return self._before + self.delivered + int(self.loader.remaining)

    def _delivered(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, int]]:
        gradient_accumulation_steps = self.loader.config.gradient_accumulation_steps
        step: list[Batch] = []
        for batch in super()._delivered(batches):
            step.append(batch)
            if self.loader.cursor % gradient_accumulation_steps and self.loader.remaining:
                continue
            tokens = count_supervised(step)
            for number, one in enumerate(step, 1):
                self.accumulated += 1  # by the time that anybody asks
                if number == len(step):
                    self.finish_step()
                yield one, tokens
            step = []

    def state_dict(self) -> dict[str, Any]:
        """The loader's, and how many batches of the epoch were trained, whatever the ranks were.

        Raises:
            ConfigError: an optimizer step is not finished. Trainers of this kind go on at the micro-batch
                that they counted last, so the step could not be trained again from its beginning.
        """
        if self.accumulated:
            raise ConfigError(
                f"checkpoint after {self.accumulated} micro-batches of an optimizer step of "
                f"{self.loader.config.gradient_accumulation_steps}: their gradients are not saved, so "
                "they would never be trained. Save when a step is finished: count optimizer steps "
                "(ModelCheckpoint(every_n_train_steps=…)), or make val_check_interval a multiple of "
                "accumulate_grad_batches"
            )
        return {"loader": super().state_dict(), "batches": self._before + self.trained}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after what was trained."""
        super().load_state_dict(state["loader"])
        if self.loader.epoch == state["loader"]["epoch"]:
            self._before = int(state["batches"])


def _close(batches: Iterator[Batch]) -> None:
    """Ask for the end after the last batch, where the loader adds up its epoch."""
    for _ in batches:
        raise AssertionError("a loader with nothing remaining has delivered a batch")
