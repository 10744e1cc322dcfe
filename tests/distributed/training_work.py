"""What two processes do one after the other under one torchrun: starting Python costs more than training."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import packhorse
from distributed.training_runs import run_example
from packhorse.cli.demo.data import tiny_model, tiny_processor
from packhorse.collate_fns import model_inputs
from packhorse.errors import ConfigError
from packhorse.integrations.attention import use_attention
from packhorse.integrations.loss import count_supervised, token_loss
from packhorse.integrations.transformers import LOADER_STATE
from packhorse.types import World


def keep_traces(folder: Path, name: str, rank: int) -> None:
    (folder / name).mkdir(exist_ok=True)
    (folder / f"trace-{rank}.jsonl").rename(folder / name / f"trace-{rank}.jsonl")


def plain_loop(folder: Path, strategy: str, rank: int, meet: Callable[[], None]) -> None:
    """A whole run, and one from its first checkpoint on."""
    words = ("--strategy", strategy, "--epochs", "2", "--save-every", "2")
    meet()
    run_example("train_torchrun", folder, *words)
    keep_traces(folder, "whole", rank)
    if rank == 0:
        remove_later(folder, "step-2")
    meet()
    run_example("train_torchrun", folder, *words, "--resume")
    keep_traces(folder, "resumed", rank)


def remove_later(folder: Path, checkpoint: str) -> None:
    """Remove all checkpoints but one."""
    for path in [*folder.glob("checkpoint-*"), *folder.glob("step-*")]:
        if path.name != checkpoint:
            shutil.rmtree(path)


def plain_loop_with_eager(folder: Path, rank: int, meet: Callable[[], None]) -> None:
    """The whole run with another attention kernel: as far apart as correct runs are on this machine."""
    meet()
    run_example("train_torchrun", folder, "--attn-implementation", "eager", "--epochs", "2")
    keep_traces(folder, "whole", rank)


def trainer(folder: Path, rank: int) -> None:
    """A whole run, and one from its first checkpoint on."""
    words = ("--epochs", "2", "--save-every", "2")
    run_example("train_trainer", folder, *words)
    keep_traces(folder, "whole", rank)
    dist.barrier()
    if rank == 0:
        remove_later(folder, "checkpoint-2")
    dist.barrier()
    resumed = run_example("train_trainer", folder, *words, "--resume")
    keep_traces(folder, "resumed", rank)
    weights = torch.stack([p.detach().double().sum() for p in resumed.model.parameters()])
    (folder / f"weights-{rank}.json").write_text(json.dumps(weights.tolist()))
    assert (folder / "checkpoint-2" / LOADER_STATE).exists()


def chat(question: str, answer: str, image: Any = None) -> dict[str, Any]:
    parts = [] if image is None else [{"type": "image", "image": image}]
    turns = [
        ("user", [*parts, {"type": "text", "text": question}]),
        ("assistant", [{"type": "text", "text": answer}]),
    ]
    return {"conversation": [{"role": role, "content": content} for role, content in turns]}


def mixed_examples() -> list[dict[str, Any]]:
    """Three with an image and three without, one to a pack: in one step of two ranks both kinds meet."""
    from PIL import Image

    colours = ("red", "green", "blue")
    images = [chat("Which?", f"It is {c}.", Image.new("RGB", (56, 56), c)) for c in colours]
    return [*images, *(chat(f"Say {word}.", f"I say {word * 3}.") for word in ("one", "two", "six"))]


def mixed_loader(processor: Any, model: Any, rank: int, placeholder: Literal["auto", "never"]) -> Any:
    return packhorse.load(
        mixed_examples(),
        processor,
        model=model,
        world=World(rank, 2),
        pack_size=256,
        max_documents=1,
        placeholder=placeholder,
        cost_weights={"token": 1.0},  # the same steps with and without placeholders
    )


def sharded_gradients(rank: int, processor: Any) -> list[dict[str, Any]]:
    """Every step of the mixed data under FSDP2: what this rank had, and the gradients of all."""
    model = tiny_model(processor)
    loader = mixed_loader(processor, model, rank, "auto")
    for block in [*model.model.language_model.layers, *model.model.visual.blocks]:
        fully_shard(block)
    fully_shard(model)
    found = []
    for batch in loader:
        loss = token_loss(model(**model_inputs(batch)).logits, batch["labels"], count_supervised([batch]), 2)
        loss.backward()
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        found.append({"samples": batch.info.samples, "keys": media_keys(batch), "gradients": gradients})
    return found


def media_keys(batch: dict[str, Any]) -> list[str]:
    return sorted(key for key in batch if "pixel_values" in key)


def single_gradients(
    processor: Any, attention: str = "sdpa", mean_of_means: bool = False
) -> list[dict[str, Any]]:
    """The same steps in one process, without placeholders: what each rank has, and the gradients."""
    model = tiny_model(processor)
    use_attention(model, attention)
    loaders = [mixed_loader(processor, model, rank, "never") for rank in range(2)]
    found = []
    for batches in zip(*loaders, strict=True):
        for batch in batches:
            tokens = len(batches) * count_supervised([batch]) if mean_of_means else count_supervised(batches)
            token_loss(model(**model_inputs(batch)).logits, batch["labels"], tokens).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        found.append(
            {
                "samples": [batch.info.samples for batch in batches],
                "keys": [media_keys(batch) for batch in batches],
                "gradients": gradients,
            }
        )
    return found


def text_only_rank(folder: Path, rank: int) -> None:
    folder.mkdir(exist_ok=True)
    processor = tiny_processor()
    dist.init_process_group("gloo")
    torch.save(sharded_gradients(rank, processor), folder / f"rank-{rank}.pt")
    try:
        packhorse.load(
            mixed_examples(), processor, model="unchecked", world=World(rank, 2), pack_size=256, seed=rank
        )
    except ConfigError:
        pass
    else:
        raise AssertionError("loaders with different seeds must not start")
    dist.destroy_process_group()
    if rank == 0:
        torch.save(single_gradients(processor), folder / "single.pt")
        torch.save(single_gradients(processor, "eager"), folder / "eager.pt")
        torch.save(single_gradients(processor, mean_of_means=True), folder / "mean_of_means.pt")


def main(folder: Path, ports: Iterator[str]) -> None:
    rank = int(os.environ["RANK"])
    # A process group cannot be made a second time at the place where torchrun lets ranks meet.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"

    def meet() -> None:
        os.environ["MASTER_PORT"] = next(ports)

    meet()
    text_only_rank(folder / "text_only", rank)
    for strategy in ("ddp", "fsdp2"):
        plain_loop(folder / strategy, strategy, rank, meet)
    plain_loop_with_eager(folder / "eager", rank, meet)
    meet()
    trainer(folder / "trainer", rank)
    run_example("train_accelerate", folder / "accelerate")  # ends the Trainer's process group
    meet()
    run_example("train_lightning", folder / "lightning")


if __name__ == "__main__":
    main(Path(sys.argv[1]), iter(sys.argv[2:]))
