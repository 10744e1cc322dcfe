"""A loader in PyTorch Lightning: ``trainer.fit(module, LoaderDataModule(loader))``.

Importing this imports Lightning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from packhorse.errors import require
from packhorse.integrations.loss import Batch, token_loss
from packhorse.integrations.trainer_feed import StepFeed, check_model, check_world

_lightning: Any = require("lightning.pytorch", "lightning")


class LoaderDataModule(_lightning.LightningDataModule):  # type: ignore[misc]
    """Trains from a loader; its state is in every checkpoint, and ``ckpt_path`` goes on after it.

    Each item is a pair: the batch, and the supervised tokens of its whole step over all ranks; see
    :func:`step_loss`. Lightning adds no sampler of its own, as the loader is no ``DataLoader``.

    A run that goes on with another number of ranks needs ``Trainer(reload_dataloaders_every_n_epochs=1)``:
    Lightning asks for the length of an epoch once otherwise.

    Args:
        loader: a :class:`packhorse.Loader`, with Lightning's ``accumulate_grad_batches`` as
            ``gradient_accumulation_steps``; or a function without arguments that builds one,
            called once the process group exists.
    """

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self._resumed = False
        self._build: Callable[[], Any] | None = loader if callable(loader) else None
        if self._build is None:
            self._take(loader)

    def _take(self, loader: Any) -> None:
        self.loader, self._feed = loader, StepFeed(loader)

    def setup(self, stage: str) -> None:
        """Build the loader, where that was left to this."""
        if self._build is not None:
            self._take(self._build())
            self._build = None

    def train_dataloader(self) -> StepFeed:
        """The loader.

        Raises:
            ConfigError: it deals to other ranks, accumulates another number of micro-steps, or packed rows
                are wrong for a model in the LightningModule.
        """
        trainer = self.trainer
        check_world(self.loader, trainer.global_rank, trainer.world_size, trainer.accumulate_grad_batches)
        check_model(self.loader, trainer.lightning_module)
        if self._resumed:
            self._resumed = False
            _mark_saved(trainer)
        return self._feed

    def state_dict(self) -> dict[str, Any]:
        """What was trained; Lightning puts it into the checkpoint."""
        return self._feed.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after what was trained."""
        self._feed.load_state_dict(state_dict)
        self._resumed = True


def _mark_saved(trainer: Any) -> None:
    """Keep checkpoint callbacks from saving the step that was resumed from once more.

    ``ModelCheckpoint(every_n_train_steps=…)`` forgets in a resumed run which step it saved last, and saves
    again after the first micro-batch, in the middle of an optimizer step. It has no public way to set that
    step.
    """
    for callback in trainer.checkpoint_callbacks:
        if hasattr(callback, "_last_global_step_saved"):
            callback._last_global_step_saved = trainer.global_step


def step_loss(trainer: Any, logits: torch.Tensor, batch: Batch, tokens: int) -> torch.Tensor:
    """What ``training_step`` returns: one mean over the supervised tokens of all ranks and micro-steps.

    Lightning divides by the number of accumulated micro-steps, and ranks average gradients; both are undone
    here. Divided by both again, and added up, this is the loss to log: see ``examples/train_lightning.py``.
    """
    return token_loss(
        logits, batch["labels"], tokens, replicas=trainer.world_size * trainer.accumulate_grad_batches
    )
