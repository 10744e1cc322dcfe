"""Fine-tune with the Trainer of transformers, alone or under torchrun.

    python examples/train_trainer.py out
    torchrun --nproc-per-node 2 examples/train_trainer.py out --resume

The defaults of ``--model`` and ``--data`` are the files of ``make demo``. Runs on GPUs, or on the CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import packhorse


class PackedTrainer(packhorse.TrainFromLoader, Trainer):
    """A Trainer that trains on the batches of a loader."""


def report(step: int, loss: float, loader: packhorse.Loader) -> None:
    """Print a line for each step. Or set ``report_to`` below: it gets the loader's metrics too."""
    if loader.world.rank == 0:
        print(f"step {step} loss {loss:.4f} · {loader.metrics.summary()}", flush=True)


class Report(TrainerCallback):
    """Calls ``report`` after each optimizer step."""

    def __init__(self, loader: packhorse.Loader) -> None:
        self.loader = loader

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Report the step's loss; the last log, of the whole run, has none."""
        if logs and "loss" in logs:
            report(state.global_step, logs["loss"], self.loader)


def main(argv: list[str] | None = None) -> Trainer:
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

    arguments = TrainingArguments(  # before the loader: it joins the other processes
        str(options.out),
        num_train_epochs=options.epochs,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=options.save_every,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),  # several processes on CPUs need it
    )
    processor = AutoProcessor.from_pretrained(options.model)
    model = AutoModelForImageTextToText.from_pretrained(options.model)
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
    trainer = PackedTrainer(model, arguments, loader=loader, callbacks=[Report(loader)])
    trainer.train(resume_from_checkpoint=options.resume)
    return trainer


if __name__ == "__main__":
    main()
