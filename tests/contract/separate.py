"""Logits and gradients of samples that are not packed: alone, or in a padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from noise_floor import noise_floor, relative_difference
from packhorse.chat import IGNORE_INDEX
from packhorse.collate_fns import model_inputs, pad_collate_fn
from packhorse.families.models import attention_of
from packhorse.integrations.attention import use_attention


@dataclass(frozen=True)
class Separate:
    """What a model says about each of some samples, and the gradients of the mean loss over all of them.

    The floors say how far other correct computations of the same samples are from that.
    """

    logits: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    floor: float
    gradient_floor: float


def separate_forwards(model: Any, processor: Any, samples: Any) -> Separate:
    """Run every sample alone with sdpa; for the floors, all in one padded batch with sdpa and with eager."""
    numbers = range(len(samples))
    before = attention_of(model)
    use_attention(model, "sdpa")
    logits, gradients = _run(model, processor, samples, [[number] for number in numbers])
    others = []
    for attention in ("sdpa", "eager"):
        use_attention(model, attention)
        others += [_run(model, processor, samples, [numbers[::-1]])]
    use_attention(model, before)
    return Separate(
        logits,
        gradients,
        noise_floor(logits, *(other for other, _ in others)),
        noise_floor(gradients, *(other for _, other in others), measure=relative_difference),
    )


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """The gradients of a model, which are cleared."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _run(
    model: Any, processor: Any, samples: Any, groups: Sequence[Sequence[int]]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    batches = [pad_collate_fn([samples[number] for number in group], processor) for group in groups]
    supervised = sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in batches)
    logits: dict[int, torch.Tensor] = {}
    for group, batch in zip(groups, batches, strict=True):
        found = model(**model_inputs(batch)).logits
        loss = F.cross_entropy(found.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        (loss / supervised).backward()
        for row, number in enumerate(_row_numbers(batch, samples, group)):
            # In a batch with longer ones, a sample keeps its last token, which has no label.
            length = int(samples[number]["attention_mask"][:-1].sum())
            logits[number] = found.detach()[row][batch["attention_mask"][row].bool()][:length]
    return [logits[number] for number in range(len(samples))], gradients_of(model)


def _row_numbers(batch: dict[str, Any], samples: Any, group: Sequence[int]) -> list[int]:
    """Which sample each row is: those with a fake image may come last."""
    left, found = list(group), []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        for number in left:
            sample = samples[number]
            length = len(sample["input_ids"]) - 1
            more = int(mask.sum()) - int(sample["attention_mask"][:-1].sum())
            if more in (0, 1) and torch.equal(ids[:length], sample["input_ids"][:length]):
                found.append(number)
                left.remove(number)
                break
    assert not left
    return found
