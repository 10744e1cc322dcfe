"""Fine-tune in a loop with Accelerate, alone or under ``accelerate launch``.

    python examples/train_accelerate.py out
    accelerate launch --num-processes 2 examples/train_accelerate.py out --resume

The defaults of ``--model`` and ``--data`` are the files of ``make demo``. Runs on GPUs, or on the CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from transformers import AutoModelForImageTextToText, AutoProcessor

import packhorse
from packhorse.integrations.accelerate import attach, replicas, steps


def train_step(
    accelerator: Accelerator, model: Any, optimizer: Any, batches: list[Any], tokens: float
) -> float:
    """Train on the micro-batches of one optimizer step; return the mean loss over the tokens of all ranks."""
    factor = replicas(accelerator)
    total = torch.zeros((), device=accelerator.device)
    for batch in batches:
        with accelerator.accumulate(model):
            output = model(**packhorse.model_inputs(batch, model))
            loss = packhorse.batch_loss(model, output, batch, tokens, replicas=factor)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach() / factor
    return float(accelerator.reduce(total))


def save(accelerator: Accelerator, out: Path, step: int) -> None:
    """Write a checkpoint of model, optimizer and loader; then name it in the file ``latest``."""
    accelerator.save_state(str(out / f"step-{step}"))
    if accelerator.is_main_process:
        (out / "latest.new").write_text(f"step-{step}")
        (out / "latest.new").replace(out / "latest")


def report(step: int, loss: float, loader: packhorse.Loader) -> None:
    """Print a line for each step. Call your experiment tracker, or ``accelerator.log``, here."""
    if loader.world.rank == 0:
        print(f"step {step} loss {loss:.4f} · {loader.metrics.summary()}", flush=True)


def main(argv: list[str] | None = None) -> None:
    """Read the options, build model, loader and optimizer, train the rest of the epochs."""
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

    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # several processes on CPUs need it
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        # The vision tower is unused in a step in which no rank has an image.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    processor = AutoProcessor.from_pretrained(options.model)
    model = AutoModelForImageTextToText.from_pretrained(options.model).to(accelerator.device).train()
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
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=options.lr))
    attach(accelerator, loader)  # its state is saved and loaded with the model's
    step = 0
    if options.resume:
        latest = (options.out / "latest").read_text()
        accelerator.load_state(str(options.out / latest))
        step = int(latest.removeprefix("step-"))
    for _ in range(loader.epoch, options.epochs):
        for batches, tokens in steps(accelerator, loader):
            loss = train_step(accelerator, model, optimizer, batches, tokens)
            step += 1
            report(step, loss, loader)
            if step % options.save_every == 0:
                save(accelerator, options.out, step)
        accelerator.print(loader.epoch_stats)  # of all ranks: each row was delivered or has a reason
    save(accelerator, options.out, step)
    accelerator.end_training()  # with gloo, a process that keeps its process group may abort at its end


if __name__ == "__main__":
    main()
