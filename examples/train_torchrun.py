"""Fine-tune in a plain PyTorch loop: DDP or FSDP2, gradient accumulation, checkpoints, resume.

    torchrun --nproc-per-node 2 examples/train_torchrun.py out --strategy fsdp2
    torchrun --nproc-per-node 4 examples/train_torchrun.py out --strategy fsdp2 --resume

The defaults of ``--model`` and ``--data`` are the files of ``make demo``. Runs on GPUs, or on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForImageTextToText, AutoProcessor

import packhorse


def wrap_model(model: Any, strategy: str) -> Any:
    """Replicate or shard the model over all ranks."""
    if strategy == "ddp":
        # The vision tower is unused in a step in which no rank has an image.
        return DistributedDataParallel(model, find_unused_parameters=True)
    # These are the names of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.
    for block in [*model.model.language_model.layers, *model.model.visual.blocks]:
        fully_shard(block)
    return fully_shard(model)


def train_step(model: Any, optimizer: Any, batches: list[Any], device: torch.device) -> float:
    """Train on the micro-batches of one optimizer step; return the mean loss over the tokens of all ranks."""
    ranks = dist.get_world_size()
    tokens = packhorse.count_supervised(batches)  # of all ranks
    total = torch.zeros((), device=device)
    for number, batch in enumerate(batches, 1):
        sync = number == len(batches)  # exchange gradients in the last micro-step only
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = sync
        else:
            model.set_requires_gradient_sync(sync)
        batch = packhorse.to_device(batch, device)
        output = model(**packhorse.model_inputs(batch, model))
        loss = packhorse.batch_loss(model, output, batch, tokens, replicas=ranks)
        loss.backward()
        total += loss.detach() / ranks
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return float(total)


def save(out: Path, step: int, model: Any, optimizer: Any, loader: packhorse.Loader) -> None:
    """Write a sharded checkpoint of model, optimizer and loader."""
    weights, moments = get_state_dict(model, optimizer)
    loop = json.dumps({"step": step, "loader": loader.state_dict()})
    dcp.save({"model": weights, "optimizer": moments, "loop": loop}, checkpoint_id=out / f"step-{step}")


def restore(out: Path, model: Any, optimizer: Any, loader: packhorse.Loader) -> int:
    """Load the last checkpoint, also one of another number of ranks; return its step."""
    complete = [path.parent for path in out.glob("step-*/.metadata")]  # .metadata is written last
    if not complete:
        raise SystemExit(f"{out} has no checkpoint to resume from")
    latest = max(complete, key=lambda path: int(path.name.removeprefix("step-")))
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "loop": ""}
    dcp.load(state, checkpoint_id=latest)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    loop = json.loads(state["loop"])
    loader.load_state_dict(loop["loader"])
    return int(loop["step"])


def report(step: int, loss: float, loader: packhorse.Loader) -> None:
    """Print a line for each step. Call your experiment tracker here."""
    if loader.world.rank == 0:
        print(f"step {step} loss {loss:.4f} · {loader.metrics.summary()}", flush=True)


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Build model, loader and optimizer, then train the rest of the epochs."""
    processor = AutoProcessor.from_pretrained(options.model)
    model = AutoModelForImageTextToText.from_pretrained(options.model).to(device)
    packhorse.prepare(
        model, options.attn_implementation
    )  # before the loader, which builds batches for this attention
    loader = packhorse.load(
        options.data,
        processor,
        model=model,
        pack_size=options.pack_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        ledger_dir=options.out / "ledger",  # rows that could not be trained, with the reason
        max_bad_share=0.05,  # the demo's data has broken rows on purpose
    )
    model = wrap_model(model.train(), options.strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    step = restore(options.out, model, optimizer, loader) if options.resume else 0
    for _ in range(loader.epoch, options.epochs):
        for batches in packhorse.grouped(loader, options.gradient_accumulation_steps):
            loss = train_step(model, optimizer, batches, device)
            step += 1
            report(step, loss, loader)
            if step % options.save_every == 0:
                save(options.out, step, model, optimizer, loader)
        if loader.world.rank == 0:
            print(loader.epoch_stats, flush=True)  # of all ranks: each row was delivered or has a reason
    save(options.out, step, model, optimizer, loader)


def main(argv: list[str] | None = None) -> None:
    """Read the options, join the other processes, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder of checkpoints and ledger")
    parser.add_argument("--model", default="demo/model", help="a folder or a hub name")
    parser.add_argument("--data", default="demo/data/meta.json", help="a data file or a meta file")
    parser.add_argument("--strategy", choices=["ddp", "fsdp2"], default="ddp")
    parser.add_argument("--attn-implementation", default="auto", help="varlen, flash_attention_2, sdpa, …")
    parser.add_argument("--pack-size", type=int, default=512)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--save-every", type=int, default=10, help="optimizer steps")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in OUT")
    options = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    try:
        train(options, device)
    finally:
        gc.collect()  # the model ends before its process group, or with gloo the process may abort at its end
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
