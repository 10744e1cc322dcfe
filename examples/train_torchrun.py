"""A plain PyTorch loop under torchrun: DDP or FSDP2, accumulated micro-steps, checkpoints, resume.

    torchrun --nproc-per-node 2 examples/train_torchrun.py /tmp/run --strategy fsdp2
    torchrun --nproc-per-node 2 examples/train_torchrun.py /tmp/run --strategy fsdp2 --resume

On a machine without GPUs it runs on the CPU. A run may be resumed with another number of processes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpointing
from tiny import arguments, demo_loader, example_processor, tiny_model, write_atomic
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from packhorse.collate_fns import model_inputs
from packhorse.integrations.loss import count_supervised, grouped, token_loss
from packhorse.integrations.transformers import prepare
from packhorse.types import to_device


def wrap_model(model: Any, strategy: str, device: torch.device) -> Any:
    """The model, replicated or sharded over all ranks."""
    if strategy == "ddp":
        # In a step without media anywhere the vision tower is not used.
        return DistributedDataParallel(model, find_unused_parameters=True)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in [*model.model.language_model.layers, *model.model.visual.blocks]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sync_gradients(model: Any, now: bool) -> None:
    """Ranks exchange gradients in the last micro-step only."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = now
    else:
        model.set_requires_gradient_sync(now)


def train_step(model: Any, optimizer: Any, group: list[Any], device: torch.device) -> float:
    """One step over the micro-batches of this rank; returns the mean loss over the tokens of all ranks."""
    ranks = dist.get_world_size()
    tokens = count_supervised(group)
    total = torch.zeros((), device=device)
    for number, batch in enumerate(group, 1):
        sync_gradients(model, number == len(group))
        batch = to_device(batch, device)
        logits = model(**model_inputs(batch)).logits
        loss = token_loss(logits, batch["labels"], tokens, replicas=ranks)
        loss.backward()
        total += loss.detach() / ranks
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return float(total)


def save(folder: Path, step: int, model: Any, optimizer: Any, loader: Any) -> None:
    """Model, optimizer and loader; the file ``latest`` names the checkpoint once it is complete."""
    name = f"step-{step}"
    weights, moments = get_state_dict(model, optimizer)
    checkpointing.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / name)
    if dist.get_rank() == 0:
        write_atomic(folder / name / "loop.json", json.dumps({"step": step, "loader": loader.state_dict()}))
        write_atomic(folder / "latest", name)


def restore(folder: Path, model: Any, optimizer: Any, loader: Any) -> int:
    """Load the last checkpoint; returns how many steps had been made."""
    latest = folder / (folder / "latest").read_text()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    checkpointing.load(state, checkpoint_id=latest)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    loop = json.loads((latest / "loop.json").read_text())
    loader.load_state_dict(loop["loader"])
    return int(loop["step"])


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Build everything, then step through what is left of the epochs."""
    processor = example_processor(options)
    model = tiny_model(processor).to(device)
    prepare(model)
    loader = demo_loader(options, processor, model)
    model = wrap_model(model, options.strategy, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = restore(options.folder, model, optimizer, loader) if options.resume else 0
    writer = None
    if options.tensorboard is not None and dist.get_rank() == 0:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(options.tensorboard)
    for epoch in range(loader.epoch, options.epochs):
        for group in grouped(loader, options.gradient_accumulation_steps):
            loss = train_step(model, optimizer, group, device)
            step += 1
            loader.record_step(step, loss)
            if dist.get_rank() == 0:
                print(f"epoch {epoch} step {step} loss {loss:.4f} · {loader.metrics.summary()}", flush=True)
            if writer is not None:
                writer.add_scalar("loss", loss, step)
                loader.metrics.log(writer, step)
            if step % options.save_every == 0:
                save(options.folder, step, model, optimizer, loader)
            if step == options.stop_after:
                return
        if dist.get_rank() == 0:
            print(loader.epoch_stats, flush=True)  # over all ranks: each row was delivered, or says why not
    save(options.folder, step, model, optimizer, loader)
    if writer is not None:
        writer.close()


def main() -> None:
    """Read the options, join the other processes, train."""
    parser = arguments(__doc__)
    parser.add_argument("--strategy", choices=["ddp", "fsdp2"], default="ddp")
    parser.add_argument("--tensorboard", type=Path, help="write the loss and the loader's metrics here")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    try:
        train(options, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
