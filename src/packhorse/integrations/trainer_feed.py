"""Loaders for trainers, which count steps themselves and prefetch batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from packhorse.collate.packed import check_takes_batches_of
from packhorse.errors import ConfigError
from packhorse.families.models import UNCHECKED, attention_of, models_in, unwrap
from packhorse.families.packing import check_packable
from packhorse.families.router_loss import check_model_router_loss
from packhorse.integrations.loss import wrong_world
from packhorse.integrations.preference import count_for_loss
from packhorse.types import Batch

if TYPE_CHECKING:
    from packhorse.loader.loader import Loader


def check_world(
    loader: Loader, rank: int, size: int, gradient_accumulation_steps: int, *, saved_by_all: bool = False
) -> None:
    """Raise :class:`ConfigError` if ranks or ``gradient_accumulation_steps`` of the training loop differ.

    Also if ``shard_data`` is set, but only the first rank saves its state (``saved_by_all``).
    """
    if (loader.world.rank, loader.world.size) != (rank, size):
        raise wrong_world(loader.world, f"rank {rank} of {size} trains")
    if loader.config.shard_data and size > 1 and not saved_by_all:
        raise ConfigError.of(
            "shard_data",
            True,
            "each rank's loader has its own state, but checkpoints hold only one. Remove shard_data",
        )
    if (loaders := loader.config.gradient_accumulation_steps) != gradient_accumulation_steps:
        raise ConfigError.of(
            "gradient_accumulation_steps",
            gradient_accumulation_steps,
            f"the loader has gradient_accumulation_steps={loaders}: use the same",
        )


def check_model(loader: Loader, module: torch.nn.Module) -> None:
    """Raise if a loader yields packs and the module holds a model that they are wrong for.

    That is a model for which packed rows are wrong, one that runs another attention, or one with an auxiliary
    loss of its router that is not prepared. If the loader has
    ``model="unchecked"``, nothing is checked.
    """
    if loader.attn_implementation is None or loader.model_name == UNCHECKED:
        return
    for model in models_in(module):
        check_packable(model)
        name = type(unwrap(model)).__name__
        check_takes_batches_of(name, attention_of(model), loader.attn_implementation)
        check_model_router_loss(model)


class TrainerFeed:
    """Iterates over the rest of the loader's epoch; the next iteration is the next epoch.

    Trainers never iterate past the last batch, so the epoch ends here when that is delivered. Counts what was
    trained: trainers fetch all micro-batches of a step before they train the first.

    Attributes:
        delivered: batches of this epoch, since the loader was built or loaded.
        trained: those in finished optimizer steps; the trainer counts.
        accumulated: those in an unfinished optimizer step, whose gradients a checkpoint does not hold.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader, self.dataset = loader.keep_bytes(), loader.dataset
        self._length = len(loader)  # a resumed epoch may be shorter
        self._reset()

    def _reset(self) -> None:
        self.epoch, self.delivered, self.trained, self.accumulated = self.loader.epoch, 0, 0, 0

    def finish_step(self) -> None:
        """Count the accumulated micro-batches as trained."""
        self.trained, self.accumulated = self.trained + self.accumulated, 0

    def __len__(self) -> int:
        """Return the batches of a whole epoch."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)  # starts the next epoch if this one is over
        if self.loader.epoch != self.epoch:
            self._reset()
        return self._deliver(batches)

    def _deliver(self, batches: Iterator[Batch]) -> Iterator[Any]:
        for batch in batches:
            self.delivered += 1
            if not self.loader.remaining:
                for _ in batches:  # exhausted, so that the loader ends its epoch
                    raise AssertionError("a loader with nothing remaining has delivered a batch")
            yield batch

    @property
    def position(self) -> float:
        """Number of epochs delivered, with the fraction of the present one."""
        return float(self.loader.epoch + 1 - self.loader.remaining / self._length)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last trained batch."""
        consumed = None if self.trained == self.delivered else self.trained
        return self.loader.state_dict(consumed=consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after what was trained."""
        self.loader.load_state_dict(state)
        self._reset()


class StepFeed(TrainerFeed):
    """Yields pairs of a batch and the supervised tokens (or their weight) of its step over all ranks.

    For trainers that take one batch at a time; all micro-batches of a step are fetched with its first one.
    """

    def _reset(self) -> None:
        self._before = 0
        super()._reset()

    def __len__(self) -> int:
        """Return the batches of this epoch, including those before a restart."""
        return self._before + self.delivered + int(self.loader.remaining)

    def _deliver(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, float]]:
        gradient_accumulation_steps = self.loader.config.gradient_accumulation_steps
        step: list[Batch] = []
        for batch in super()._deliver(batches):
            step.append(batch)
            if self.loader.cursor % gradient_accumulation_steps and self.loader.remaining:
                continue
            tokens = count_for_loss(step)
            for number, fetched in enumerate(step, 1):
                self.accumulated += 1
                if number == len(step):
                    self.finish_step()
                yield fetched, tokens
            step = []

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state and the number of batches of the epoch that were trained.

        Raises:
            ConfigError: an optimizer step is not finished, and could not be repeated from its start.
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
        """Resume after what was trained."""
        super().load_state_dict(state["loader"])
        if self.loader.epoch == state["loader"]["epoch"]:
            self._before = int(state["batches"])
