"""A Lightning module that trains a model on the batches of a loader."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as lightning
import torch

from packhorse import model_inputs
from packhorse.integrations.lightning import step_loss


class PackedModule(lightning.LightningModule):  # type: ignore[misc]
    """Train a model with plain SGD; the loss is that of the whole output."""

    def __init__(self, model: Any, learning_rate: float = 0.1) -> None:
        super().__init__()
        self.model, self.learning_rate = model, learning_rate

    def run_model(self, batch: Any) -> Any:
        return self.model(**model_inputs(batch, self.model))

    def training_step(self, item: Any, index: int) -> torch.Tensor:
        batch, tokens = item
        return step_loss(self.trainer, self.run_model(batch), batch, tokens)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)
