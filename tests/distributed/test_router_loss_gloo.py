"""Two gloo processes with DDP and two micro-steps: the auxiliary loss of a router as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from distributed.gloo import process_group
from noise_floor import noise_floor, relative_difference
from packhorse import Batch, batch_loss, count_supervised, model_inputs, prepare
from packhorse.collate.packed import collate_packs, loss_inputs
from packhorse.collate.packer import Packer
from packhorse.types import Sample

RANKS = 2
# For each rank the documents of its micro-batches; the last batch has placeholders alone.
LENGTHS = (((9, 13), (17,)), ((5, 6, 4), (7,)))
PADDING = (1, 1)


def tiny_model() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    config = MixtralConfig(**sizes, **heads, output_router_logits=True, router_aux_loss_coef=0.5)
    model = MixtralForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.gate.weight, 0, 2)
    prepare(model, "sdpa", device="cpu")
    return model


def batch_of(rank: int, step: int, model: Any) -> Batch:
    draw = torch.Generator().manual_seed(10 * rank + step)
    samples = []
    for length in LENGTHS[rank][step]:
        ids, labels = (torch.randint(3, 60, (length,), generator=draw) for _ in range(2))
        labels[: 2 * rank] = -100
        if (rank, step) == PADDING:
            labels.fill_(-100)
        samples.append(Sample(tokens={"input_ids": ids}, labels=labels))
    batch = collate_packs([Packer(32).join(samples)], None, 0, 32, "sdpa", config=model.config)
    if (rank, step) == PADDING:
        batch["router_mask"].fill_(False)
    return Batch(loss_inputs(batch))


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def rank_main(rank: int, folder: str) -> None:
    with process_group(rank, RANKS, folder):
        train(rank, folder)


def train(rank: int, folder: str) -> None:
    model = tiny_model()
    wrapped = DistributedDataParallel(model)
    batches = [batch_of(rank, step, model) for step in range(2)]
    tokens = count_supervised(batches)
    for step, batch in enumerate(batches):
        wrapped.require_backward_grad_sync = step == 1
        output = wrapped(**model_inputs(batch, wrapped))
        batch_loss(wrapped, output, batch, tokens, replicas=RANKS).backward()
    torch.save(gradients(model), f"{folder}/rank{rank}.pt")


def one_process(order: int = 1, weighted: bool = True) -> torch.Tensor:
    """Gradients of the mean of the batches' own losses, weighted by tokens or not."""
    model = tiny_model()
    places = [(rank, step) for rank in range(RANKS) for step in range(2)]
    batches = [batch_of(*place, model) for place in places if place != PADDING][::order]
    tokens = count_supervised(batches)
    for batch in batches:
        share = count_supervised([batch]) / tokens if weighted else 1 / len(batches)
        (model(**batch).loss * share).backward()
    return gradients(model)


def test_ranks_and_accumulation_train_on_the_weighted_mean_of_their_losses(
    tmp_path: Path, parity: Any
) -> None:
    mp.spawn(rank_main, args=(str(tmp_path),), nprocs=RANKS)
    expected = one_process()
    floor = noise_floor(expected, one_process(-1), measure=relative_difference)
    away = relative_difference(one_process(weighted=False), expected)
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        parity.check("gradients", relative_difference(found, expected), floor, away)
