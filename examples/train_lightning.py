"""PyTorch Lightning, fed by a loader; alone or under torchrun.

python examples/train_lightning.py /tmp/run
torchrun --nproc-per-node 2 examples/train_lightning.py /tmp/run --resume
"""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import arguments, demo_loader, example_processor, tiny_model

from packhorse.collate_fns import model_inputs
from packhorse.integrations.lightning import LoaderDataModule, step_loss
from packhorse.integrations.transformers import prepare


class PackedModule(lightning.LightningModule):
    """A model of transformers on packed batches."""

    def __init__(self, model: Any, loader: Any) -> None:
        super().__init__()
        self.model, self.loader = model, loader
        self._losses: list[torch.Tensor] = []

    def training_step(self, item: tuple[Any, int], number: int) -> torch.Tensor:
        """One micro-batch; the tokens are those of the whole step."""
        batch, tokens = item
        loss = step_loss(self.trainer, self.model(**model_inputs(batch)).logits, batch, tokens)
        self._losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, item: Any, number: int) -> None:
        """After the last micro-batch of a step: its loss, the mean over the tokens of all ranks."""
        if len(self._losses) == self.trainer.accumulate_grad_batches:
            loss = float(self.all_gather(torch.stack(self._losses)).mean())
            self._losses = []
            self.loader.record_step(self.global_step, loss)
            self.print(f"step {self.global_step} loss {loss:.4f} · {self.loader.metrics.summary()}")

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(words: list[str] | None = None) -> None:
    """Read the options, build everything, train."""
    options = arguments(__doc__).parse_args(words)
    processor = example_processor(options)
    model = tiny_model(processor)
    prepare(model)
    ranks = int(os.environ.get("WORLD_SIZE", 1))  # torchrun's
    loader = demo_loader(options, processor, model)
    saving = ModelCheckpoint(
        options.folder / "checkpoints",
        filename="{step}",
        every_n_train_steps=options.save_every,
        save_top_k=-1,
        save_last=True,
    )
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        max_steps=options.stop_after or -1,
        accumulate_grad_batches=options.gradient_accumulation_steps,
        callbacks=[saving],
        reload_dataloaders_every_n_epochs=1,  # an epoch may have another length after a resume
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        devices=ranks,
        # In a step without media anywhere the vision tower is not used.
        strategy="ddp_find_unused_parameters_true" if ranks > 1 else "auto",
    )
    last = options.folder / "checkpoints" / "last.ckpt" if options.resume else None
    trainer.fit(PackedModule(model, loader), LoaderDataModule(loader), ckpt_path=last)


if __name__ == "__main__":
    main()
