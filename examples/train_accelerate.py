"""A loop of Accelerate with a Packhorse loader; alone or under ``accelerate launch``.

python examples/train_accelerate.py /tmp/run
accelerate launch --num-processes 2 examples/train_accelerate.py /tmp/run --resume
"""

from __future__ import annotations

import json
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from tiny import arguments, demo_loader, example_processor, tiny_model, write_atomic

from packhorse.collate_fns import model_inputs
from packhorse.integrations.accelerate import attach, replicas, steps
from packhorse.integrations.loss import token_loss
from packhorse.integrations.transformers import prepare


def train_step(accelerator: Any, model: Any, optimizer: Any, batches: list[Any], tokens: int) -> float:
    """One step over the micro-batches of this rank; returns the mean loss over the tokens of all ranks."""
    factor = replicas(accelerator)
    total = torch.zeros((), device=accelerator.device)
    for batch in batches:
        with accelerator.accumulate(model):
            logits = model(**model_inputs(batch)).logits
            loss = token_loss(logits, batch["labels"], tokens, replicas=factor)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach() / factor
    return float(accelerator.reduce(total))


def main(words: list[str] | None = None) -> None:
    """Read the options, build everything, train."""
    options = arguments(__doc__).parse_args(words)
    # In a step without media anywhere the vision tower is not used.
    ddp = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # required for several processes on CPUs
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        kwargs_handlers=[ddp],
    )
    processor = example_processor(options)
    model = tiny_model(processor).to(accelerator.device)
    prepare(model)
    loader = demo_loader(options, processor, model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    attach(accelerator, loader)
    step = 0
    if options.resume:
        latest = options.folder / (options.folder / "latest").read_text()
        accelerator.load_state(latest)
        step = json.loads((latest / "loop.json").read_text())["step"]
    for epoch in range(loader.epoch, options.epochs):
        for batches, tokens in steps(accelerator, loader):
            loss = train_step(accelerator, model, optimizer, batches, tokens)
            step += 1
            loader.record_step(step, loss)
            accelerator.print(f"epoch {epoch} step {step} loss {loss:.4f} · {loader.metrics.summary()}")
            if step % options.save_every == 0:
                name = f"step-{step}"
                accelerator.save_state(options.folder / name)
                if accelerator.is_main_process:
                    write_atomic(options.folder / name / "loop.json", json.dumps({"step": step}))
                    write_atomic(options.folder / "latest", name)
            if step == options.stop_after:
                return


if __name__ == "__main__":
    main()
