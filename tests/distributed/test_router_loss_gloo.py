"""Two gloo processes with DDP and two micro-steps: the auxiliary loss of a router as of padded batches.

The auxiliary loss is a mean over the tokens of a micro-batch. So the expected gradients come from a padded
batch for each micro-batch, in one process, and the model as transformers has it.
"""

from __future__ import annotations

from collections.abc import Callable
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
    return model


def prepared_model() -> Any:
    model = tiny_model()
    prepare(model, "sdpa", device="cpu")
    return model


def samples_of(rank: int, step: int) -> list[Sample]:
    draw = torch.Generator().manual_seed(10 * rank + step)
    samples = []
    for length in LENGTHS[rank][step]:
        ids, labels = (torch.randint(3, 60, (length,), generator=draw) for _ in range(2))
        labels[: 2 * rank] = -100
        if (rank, step) == PADDING:
            labels.fill_(-100)
        samples.append(Sample(tokens={"input_ids": ids}, labels=labels))
    return samples


def packed_batch(rank: int, step: int, model: Any) -> Batch:
    pack = Packer(32).join(samples_of(rank, step))
    batch = collate_packs([pack], None, 0, 32, "sdpa", config=model.config)
    if (rank, step) == PADDING:
        batch["router_mask"].fill_(False)
    return Batch(loss_inputs(batch))


def padded_batch(rank: int, step: int, width: int = 17) -> dict[str, torch.Tensor]:
    """One document in each row."""
    samples = samples_of(rank, step)
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = sample.tokens["input_ids"]
        mask[row, : len(sample)] = 1
        labels[row, : len(sample)] = sample.labels
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "shift_labels": labels}


def with_padding(batch: dict[str, Any]) -> dict[str, Any]:
    """All tokens count in the auxiliary loss."""
    return {**batch, "router_mask": torch.ones_like(batch["router_mask"])}


def as_one_document(batch: dict[str, Any]) -> dict[str, Any]:
    """The mask lets documents attend to those before them."""
    return {**batch, "attention_mask": torch.ones_like(batch["attention_mask"]).tril()}


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def rank_main(rank: int, folder: str) -> None:
    with process_group(rank, RANKS, folder):
        train(rank, folder)


def train(rank: int, folder: str) -> None:
    model = prepared_model()
    wrapped = DistributedDataParallel(model)
    batches = [packed_batch(rank, step, model) for step in range(2)]
    tokens = count_supervised(batches)
    for step, batch in enumerate(batches):
        wrapped.require_backward_grad_sync = step == 1
        output = wrapped(**model_inputs(batch, wrapped))
        batch_loss(wrapped, output, batch, tokens, replicas=RANKS).backward()
    torch.save(gradients(model), f"{folder}/rank{rank}.pt")


WITH_SAMPLES = [(rank, step) for rank in range(RANKS) for step in range(2) if (rank, step) != PADDING]


def gradients_in_one_process(model: Any, batches: list[Any], weighted: bool = True) -> torch.Tensor:
    """Gradients of the mean of the batches' own losses, weighted by supervised tokens or not."""
    tokens = [int((batch["labels"] != -100).sum()) for batch in batches]
    for batch, count in zip(batches, tokens, strict=True):
        share = count / sum(tokens) if weighted else 1 / len(batches)
        (model(**batch).loss * share).backward()
    return gradients(model)


def gradients_of_padded_batches(order: int = 1, width: int = 17, weighted: bool = True) -> torch.Tensor:
    batches = [padded_batch(*place, width) for place in WITH_SAMPLES][::order]
    return gradients_in_one_process(tiny_model(), batches, weighted)


def gradients_of_packs(mistake: Callable[[dict[str, Any]], dict[str, Any]]) -> torch.Tensor:
    model = prepared_model()
    batches = [mistake(packed_batch(*place, model)) for place in WITH_SAMPLES]
    return gradients_in_one_process(model, batches)


def test_ranks_and_accumulation_train_on_the_weighted_mean_of_the_losses_of_padded_batches(
    tmp_path: Path, parity: Any
) -> None:
    mp.spawn(rank_main, args=(str(tmp_path),), nprocs=RANKS)
    expected = gradients_of_padded_batches()
    others = [gradients_of_padded_batches(order=-1), gradients_of_padded_batches(width=32)]
    floor = noise_floor(expected, *others, measure=relative_difference)
    controls = {
        "weights": gradients_of_padded_batches(weighted=False),
        "padding": gradients_of_packs(with_padding),
        "boundaries": gradients_of_packs(as_one_document),
    }
    for rank in range(RANKS):
        difference = relative_difference(torch.load(tmp_path / f"rank{rank}.pt"), expected)
        for mistake, control in controls.items():
            away = relative_difference(control, expected)
            parity.check(f"gradients, {mistake}", difference, floor, away)
