"""Fine-tune a Qwen2-VL, Qwen2.5-VL or Qwen3-VL that is split into pipeline stages, on packed batches.

    torchrun --nproc-per-node 2 examples/pipeline_parallel.py out

Each process holds one stage (two with ``--schedule interleaved``); the first has the vision tower, the last
the head. All processes build the same batches, and the media of each microbatch follow its text. The defaults
of ``--model`` and ``--data`` are the files of ``make demo``. Runs on the CPU, with gloo.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from transformers import AutoModelForImageTextToText, AutoProcessor

import packhorse
from packhorse.integrations.loss import count_batch_supervised
from packhorse.integrations.pipelining import VlmPipeline, split_vlm

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


def train(options: argparse.Namespace) -> None:
    """Build model, loader and pipeline, train the epochs, evaluate, and save the stages."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    processor = AutoProcessor.from_pretrained(options.model)
    model = AutoModelForImageTextToText.from_pretrained(options.model).train()
    loader = packhorse.load(
        options.data,
        processor,
        model=model,
        world=packhorse.World(),  # stages of one model share their batches; data-parallel copies do not
        pack_size=options.pack_size,
        batch_size=options.batch_size,
        pipeline_microbatches=options.microbatches,  # media come in chunks, one for each microbatch
        max_bad_share=0.05,  # the demo's data has broken rows on purpose
    )
    n_stages = ranks * (2 if options.schedule == "interleaved" else 1)
    parts = split_vlm(model, n_stages)[rank::ranks]  # the stages of this process
    pipeline = VlmPipeline(parts, options.microbatches, SCHEDULES[options.schedule])
    weights = [weight for part in parts for weight in part.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=options.lr)
    step = 0
    for epoch in range(options.epochs):
        for batch in loader:
            loss = pipeline.step(batch)  # forward and backward
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if loss is not None:  # on the rank of the last stage
                print(f"epoch {epoch} step {step} loss {loss:.4f}", flush=True)
    batches = list(loader)
    sums = [pipeline.eval(batch, tokens=1) for batch in batches]  # of the losses of a batch's tokens
    if sums[0] is not None:
        mean = sum(map(float, sums)) / sum(map(count_batch_supervised, batches))
        print(f"evaluation loss {mean:.4f}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    for part in parts:  # names are those of the whole model: all stages together are its checkpoint
        torch.save(part.state_dict(), options.out / f"stage-{part.index}.pt")


def main(argv: list[str] | None = None) -> None:
    """Read the options, join the other processes, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder of the trained stages")
    parser.add_argument("--model", default="demo/model", help="a folder or a hub name")
    parser.add_argument("--data", default="demo/data/meta.json", help="a data file or a meta file")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4, help="packs in a step, of all microbatches")
    parser.add_argument("--pack-size", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-5)
    options = parser.parse_args(argv)
    dist.init_process_group("gloo")
    try:
        train(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
