"""Pipeline parallelism: a Qwen2-VL cut into stages, packed batches of images, videos and text.

    torchrun --nproc-per-node 2 examples/pipeline_parallel.py /tmp/run
    torchrun --nproc-per-node 2 examples/pipeline_parallel.py /tmp/run --schedule interleaved

Runs on the CPU (gloo). Each process holds one stage of the model (two with the interleaved schedule); the
first has the vision tower, the last the head. Both make the same batches, and each microbatch's media follow
its text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from tiny import demo_meta, tiny_model, tiny_processor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import packhorse
from packhorse.integrations.loss import supervised_tokens
from packhorse.integrations.pipelining import VlmPipeline, split_vlm

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


def train(options: argparse.Namespace) -> None:
    """Build everything, then step through the epochs."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    processor = tiny_processor()
    stages_per_rank = 2 if options.schedule == "interleaved" else 1
    n_stages = ranks * stages_per_rank
    model = tiny_model(processor, layers=n_stages)
    loader = packhorse.load(
        demo_meta(options.folder / "data"),
        processor,
        model=model,
        world=packhorse.World(),  # stages of one model share their batches; data-parallel copies would not
        pack_size=options.pack_size,
        batch_size=options.batch_size,
        pipeline_microbatches=options.microbatches,  # media come in chunks, one for each microbatch
        max_bad_share=0.1,  # three rows of the demo's data are broken on purpose
    )
    parts = split_vlm(model, n_stages)[rank::ranks]
    pipeline = VlmPipeline(parts, options.microbatches, SCHEDULES[options.schedule])
    optimizer = torch.optim.AdamW([weight for part in parts for weight in part.parameters()], lr=3e-3)
    step = 0
    for epoch in range(options.epochs):
        for batch in loader:
            loss = pipeline.step(batch)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if loss is not None:  # where the last stage is
                print(f"epoch {epoch} step {step} loss {loss:.4f}", flush=True)
    evaluated = list(loader)
    losses = [pipeline.eval(batch, tokens=1) for batch in evaluated]  # sums over tokens
    if losses[0] is not None:
        mean = sum(map(float, losses)) / sum(map(supervised_tokens, evaluated))
        print(f"evaluation loss {mean:.4f}", flush=True)
    for part in parts:  # the names are those of the whole model: together they are its checkpoint
        torch.save(part.state_dict(), options.folder / f"stage-{part.index}.pt")


def main() -> None:
    """Read the options, join the other processes, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="data and weights go here")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4, help="packs in a step, of all microbatches")
    parser.add_argument("--pack-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        train(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
