"""Fine-tune with PyTorch Lightning, alone or under torchrun.

    python examples/train_lightning.py out
    torchrun --nproc-per-node 2 examples/train_lightning.py out --resume

The defaults of ``--model`` and ``--data`` are the files of ``make demo``. Runs on GPUs, or on the CPU.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForImageTextToText, AutoProcessor

import packhorse
from packhorse.integrations.lightning import LoaderDataModule, step_loss


def report(step: int, loss: float, loader: packhorse.Loader) -> None:
    """Print a line for each step. Or give the Trainer a logger, and call ``self.log`` in the module."""
    if loader.world.rank == 0:
        print(f"step {step} loss {loss:.4f} · {loader.metrics.summary()}", flush=True)


class PackedModule(lightning.LightningModule):
    """A model of transformers that is trained on packed batches."""

    def __init__(self, model: Any, loader: packhorse.Loader, lr: float) -> None:
        super().__init__()
        self.model, self.loader, self.lr = model, loader, lr
        self.losses: list[torch.Tensor] = []

    def training_step(self, item: tuple[Any, float], batch_idx: int) -> torch.Tensor:
        """Return the loss of one micro-batch; ``tokens`` are the supervised tokens of the whole step."""
        batch, tokens = item
        output = self.model(**packhorse.model_inputs(batch, self.model))
        loss = step_loss(self.trainer, output, batch, tokens)
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, item: Any, batch_idx: int) -> None:
        """Report the mean loss over the tokens of all ranks after the last micro-batch of a step."""
        if len(self.losses) == self.trainer.accumulate_grad_batches:
            loss = float(self.all_gather(torch.stack(self.losses)).mean())
            self.losses = []
            report(self.global_step, loss, self.loader)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main(argv: list[str] | None = None) -> None:
    """Read the options, build model and loader, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder of checkpoints and ledger")
    parser.add_argument("--model", default="demo/model", help="a folder or a hub name")
    parser.add_argument("--data", default="demo/data/meta.json", help="a data file or a meta file")
    parser.add_argument("--pack-size", type=int, default=512)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--save-every", type=int, default=10, help="optimizer steps")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in OUT")
    options = parser.parse_args(argv)

    processor = AutoProcessor.from_pretrained(options.model)
    model = AutoModelForImageTextToText.from_pretrained(options.model).train()
    packhorse.prepare(model)  # before the loader, which builds batches for the attention that this sets
    loader = packhorse.load(
        options.data,
        processor,
        model=model,
        pack_size=options.pack_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        ledger_dir=options.out / "ledger",  # rows that could not be trained, with the reason
        max_bad_share=0.05,  # the demo's data has broken rows on purpose
    )
    checkpoints = ModelCheckpoint(
        options.out / "checkpoints",
        filename="{step}",
        every_n_train_steps=options.save_every,
        save_top_k=-1,
        save_last=True,
    )
    ranks = int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        accumulate_grad_batches=options.gradient_accumulation_steps,
        callbacks=[checkpoints],
        reload_dataloaders_every_n_epochs=1,  # the length of an epoch may change on resume
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        devices=ranks,
        # The vision tower is unused in a step in which no rank has an image.
        strategy="ddp_find_unused_parameters_true" if ranks > 1 else "auto",
    )
    last = options.out / "checkpoints" / "last.ckpt" if options.resume else None
    trainer.fit(PackedModule(model, loader, options.lr), LoaderDataModule(loader), ckpt_path=last)


if __name__ == "__main__":
    main()
