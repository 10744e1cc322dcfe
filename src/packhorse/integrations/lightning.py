"""A loader in PyTorch Lightning, which this imports: ``trainer.fit(module, LoaderDataModule(loader))``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from packhorse.errors import ConfigError, require
from packhorse.families.models import models_in, unwrap
from packhorse.families.router_loss import has_router_loss
from packhorse.integrations.loss import batch_loss, batch_token_loss
from packhorse.integrations.trainer_feed import StepFeed, check_model, check_world

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from packhorse.loader.loader import Loader

_lightning: Any = require("lightning.pytorch", "lightning")


class LoaderDataModule(_lightning.LightningDataModule):  # type: ignore[misc]
    """Trains from a loader; every checkpoint holds its state, and ``ckpt_path`` resumes it.

    Each item is a pair: the batch, and the supervised tokens of its whole step over all ranks; see
    :func:`step_loss`. Lightning adds no sampler, because the loader is no ``DataLoader``.

    To resume with another number of ranks, set ``Trainer(reload_dataloaders_every_n_epochs=1)``: otherwise
    Lightning reads the length of an epoch only once.

    Args:
        loader: a :class:`packhorse.Loader`, with Lightning's ``accumulate_grad_batches`` as
            ``gradient_accumulation_steps``; or a function without arguments that builds one when the process
            group exists.
    """

    def __init__(self, loader: Loader | Callable[[], Loader]) -> None:
        super().__init__()
        self._resumed = False
        self._build: Callable[[], Loader] | None = loader if callable(loader) else None
        if not callable(loader):
            self.loader, self._feed = loader, StepFeed(loader)

    def setup(self, stage: str) -> None:
        """Build the loader if a function was given."""
        if self._build is not None:
            self.loader = self._build()
            self._feed, self._build = StepFeed(self.loader), None

    def train_dataloader(self) -> StepFeed:
        """Return the loader's batches; raise if world, accumulation or model do not suit the loader."""
        trainer = self.trainer
        check_world(self.loader, trainer.global_rank, trainer.world_size, trainer.accumulate_grad_batches)
        check_model(self.loader, trainer.lightning_module)
        if self._resumed:
            self._resumed = False
            _mark_saved(trainer)
        return self._feed

    def state_dict(self) -> dict[str, Any]:
        """Return the state after what was trained; Lightning saves it in the checkpoint."""
        return self._feed.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume after what was trained."""
        self._feed.load_state_dict(state_dict)
        self._resumed = True


def _mark_saved(trainer: Trainer) -> None:
    """Keep checkpoint callbacks from saving the resumed step once more.

    ``ModelCheckpoint(every_n_train_steps=…)`` does not restore its last saved step, and would save after the
    first micro-batch, in the middle of an optimizer step.
    """
    for callback in trainer.checkpoint_callbacks:
        # ModelCheckpoint has no public way to set it.
        if hasattr(callback, "_last_global_step_saved"):
            callback._last_global_step_saved = trainer.global_step


def step_loss(trainer: Trainer, output: Any, batch: Mapping[str, Any], tokens: float) -> torch.Tensor:
    """Return the loss for ``training_step``: a mean over the supervised tokens of all ranks and micro-steps.

    Applies the loss weights of the batch, and adds the auxiliary loss of a router as
    :func:`~packhorse.integrations.loss.batch_loss` does. Undoes that Lightning divides by the accumulated
    micro-steps and that ranks average gradients. To log it, divide by both again and sum: see
    ``examples/train_lightning.py``.

    Args:
        trainer: of Lightning.
        output: of the model; its logits are enough if it has no auxiliary loss.
        batch: first part of what :class:`LoaderDataModule` yields.
        tokens: second part.

    Raises:
        ConfigError: only logits are given, but the model of the module has an auxiliary loss.
    """
    replicas = trainer.world_size * trainer.accumulate_grad_batches
    routed = [m for m in models_in(trainer.lightning_module) if has_router_loss(unwrap(m).config)]
    if isinstance(output, torch.Tensor) and routed:
        name = type(unwrap(routed[0])).__name__
        what = f"step_loss got logits, but {name} has an auxiliary loss: pass the output of the model"
        raise ConfigError(what, setting="output")
    if len(routed) > 1:
        names = ", ".join(type(unwrap(model)).__name__ for model in routed)
        what = f"several models have an auxiliary loss ({names}): use packhorse.batch_loss, with replicas="
        raise ConfigError(f"{what}{replicas}", setting="model")
    if routed:
        return batch_loss(routed[0], output, batch, tokens, replicas)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return batch_token_loss(logits, batch, tokens, replicas)
