"""Compare losses of packed tokens with those of the samples alone; used by ``gpu_train.py``.

Alone means a padded batch of one sample, for which the model computes positions and mask.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

import packhorse
from gpu_data import Batch, Setup, encode_samples, make_loader, pad_samples, set_attention
from gpu_packing import FIRST_TOKENS, token_losses
from packhorse.chat import IGNORE_INDEX
from packhorse.integrations.attention import use_attention
from packhorse.types import to_device

PACKS = 4


def first_packs(setup: Setup, attention: str) -> Iterator[tuple[packhorse.Batch, tuple[int, ...]]]:
    """Yield the first packs, the same for every backend, with their sample indices."""
    loader = make_loader(setup, attn_implementation=attention, num_workers=0, pin_memory=False)
    for _, batch in zip(range(PACKS), loader, strict=False):
        yield batch, batch.info.samples


@torch.no_grad()
def losses_alone(setup: Setup) -> tuple[dict[int, torch.Tensor], float]:
    """Return the losses of each sample alone, and the mean difference between two kernels."""
    samples = encode_samples(setup)
    set_attention(setup, "varlen")
    chosen = [index for _, inside in first_packs(setup, "varlen") for index in inside]
    losses: dict[str, dict[int, torch.Tensor]] = {}
    for attention in ("sdpa", "eager"):
        use_attention(setup.model, attention)
        losses[attention] = {}
        for index in chosen:
            batch = to_device(pad_samples(setup.processor, setup.dtype, [samples[index]]), setup.device)
            losses[attention][index] = first_losses(setup, batch, torch.ones_like(batch["labels"][0]), 1)
    off = torch.cat([losses["sdpa"][index] - losses["eager"][index] for index in chosen])
    return losses["sdpa"], float(off.abs().mean())


def first_losses(
    setup: Setup, batch: Batch, documents: torch.Tensor, number: int, losses: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the losses of the first supervised tokens of a document of the batch."""
    losses = token_losses(setup.model, batch)[0] if losses is None else losses
    selected = (documents == number) & (batch["labels"][0] != IGNORE_INDEX)
    return losses[selected][:FIRST_TOKENS]


@torch.no_grad()
def difference(setup: Setup, name: str, alone: dict[int, torch.Tensor]) -> float:
    """Return the mean difference of a token's loss packed and alone; ``control`` uses a leaking mask."""
    attention = "sdpa" if name == "control" else name
    set_attention(setup, attention)
    off = []
    for batch, inside in first_packs(setup, attention):
        numbers = batch.info.document_ids
        documents = (torch.ones_like(batch["input_ids"]) if numbers is None else numbers)[0]
        if name == "control":
            width = batch["input_ids"].shape[1]
            batch["attention_mask"] = torch.ones(1, 1, width, width, dtype=torch.bool).tril()
        moved, documents = to_device(batch, setup.device), documents.to(setup.device)
        losses = token_losses(setup.model, moved)[0]
        for number, index in enumerate(inside, 1):
            off.append(first_losses(setup, moved, documents, number, losses) - alone[index])
    return float(torch.cat(off).abs().mean())


@torch.no_grad()
def model_loss_error(setup: Setup, attention: str) -> tuple[float, float]:
    """Compare ``model(**batch).loss`` with the mean over supervised tokens, and with labels shifted twice.

    Returns:
        The largest relative difference of each over some packs.
    """
    set_attention(setup, attention)
    own, twice = 0.0, 0.0
    for batch, _ in first_packs(setup, attention):
        moved = to_device(batch, setup.device)
        output = setup.model(**moved)
        flat, labels = output.logits.flatten(0, 1).float(), moved["labels"].flatten()
        right = torch.nn.functional.cross_entropy(flat, labels)
        again = torch.nn.functional.cross_entropy(flat[:-1], labels[1:])
        own = max(own, float((output.loss - right).abs() / right))
        twice = max(twice, float((again - right).abs() / right))
    return own, twice
