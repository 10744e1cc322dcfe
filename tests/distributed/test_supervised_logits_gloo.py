"""Two gloo processes with DDP or FSDP2 that compute fewer logits: the gradients of one process with all.

One rank has a batch without a label in its second micro-step, and the embeddings are tied to the head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distributed.gloo import process_group
from noise_floor import noise_floor, relative_difference
from packhorse import Batch, batch_loss, count_supervised, model_inputs, prepare
from packhorse.families import logits as logits_module

RANKS, STEPS, LENGTH, WORDS = 2, 2, 24, 64
SUPERVISED = ((19, 5), (11, 0))
WAYS = ("ddp", "ddp, unused", "fsdp2", "fsdp2, head alone")
MODES = ("supervised", "chunked")


def make_model(logits: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": WORDS}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    prepare(model, "sdpa", device="cpu", logits=logits)
    return model.train()


def batch_of(rank: int, step: int) -> Batch:
    draw = torch.Generator().manual_seed(rank * STEPS + step)
    ids, labels = (torch.randint(3, WORDS, (1, LENGTH), generator=draw) for _ in range(2))
    labels[:, SUPERVISED[rank][step] :] = -100
    return Batch({"input_ids": ids, "position_ids": torch.arange(LENGTH)[None], "labels": labels})


def gradients(model: Any) -> torch.Tensor:
    grads = (p.grad for p in model.parameters())
    return torch.cat([getattr(grad, "full_tensor", lambda g=grad: g)().flatten() for grad in grads])


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    logits_module.CHUNK_TOKENS = 7
    with process_group(rank, RANKS, folder):
        found = {f"{way}, {mode}": train(rank, way, mode) for way in WAYS for mode in MODES}
        torch.save(found, f"{folder}/rank{rank}.pt")


def train(rank: int, way: str, mode: str) -> torch.Tensor:
    model = make_model(mode)
    wrapped: Any = model
    if way.startswith("fsdp2"):
        mesh = init_device_mesh("cpu", (RANKS,))
        parts = [*model.model.layers, *([model.lm_head] if way.endswith("alone") else [])]
        if way.endswith("alone"):
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        for part in parts:
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
    else:
        wrapped = DistributedDataParallel(model, find_unused_parameters=way.endswith("unused"))
    batches = [batch_of(rank, step) for step in range(STEPS)]
    tokens = count_supervised(batches)
    for batch in batches:
        output = wrapped(**model_inputs(batch, wrapped, check=False))
        batch_loss(wrapped, output, batch, tokens, replicas=RANKS).backward()
    found = gradients(model)
    if way.endswith("alone"):  # the head is not tied: its gradient is last, that of the embeddings first
        head = found[-WORDS * 32 :]
        found = found[: -WORDS * 32].clone()
        found[: WORDS * 32] += head
    return found


def in_one_process(order: int = 1, shifted: bool = False) -> torch.Tensor:
    model = make_model("all")
    batches = [batch_of(rank, step) for rank in range(RANKS) for step in range(STEPS)][::order]
    losses = []
    for batch in batches:
        labels = batch["labels"].roll(1, 1) if shifted else batch["labels"]
        logits = model(input_ids=batch["input_ids"]).logits
        losses.append(F.cross_entropy(logits[0], labels[0], reduction="sum"))
    (torch.stack(losses).sum() / sum(map(sum, SUPERVISED))).backward()
    return gradients(model)


def test_ranks_have_the_gradients_of_all_logits(tmp_path: Path, parity: Any) -> None:
    mp.spawn(rank_main, args=(str(tmp_path),), nprocs=RANKS)
    expected, wrong = in_one_process(), in_one_process(shifted=True)
    floor = noise_floor(expected, in_one_process(-1), measure=relative_difference)
    for rank in range(RANKS):
        for way, found in torch.load(tmp_path / f"rank{rank}.pt").items():
            difference = relative_difference(found, expected)
            parity.check(way, difference, floor, relative_difference(wrong, expected))
