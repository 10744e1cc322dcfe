"""Why a packed batch is not what its samples are: the usual mistakes, each looked for on its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from packhorse.chat import IGNORE_INDEX
from packhorse.collate_fns import model_inputs
from packhorse.errors import ConfigError
from packhorse.models import known_problems
from packhorse.positions import RopeIndex, mrope_position_ids

_ONE_ROW = 2  # axes: [B, S]


class Packed:
    """A packed batch, the model it goes through, and which sample each document is.

    Args:
        model: set to the batch's attention.
        batch: on the model's device.
        bins: for each row the numbers of its samples.
        keys: the names of the samples.
    """

    def __init__(
        self, model: Any, batch: Mapping[str, Any], bins: Sequence[Sequence[int]], keys: Sequence[str]
    ) -> None:
        self.model, self.batch, self.bins, self.keys = model, dict(batch), bins, keys
        if "_packed_seq_ids" not in batch:
            raise ConfigError("the batch has no '_packed_seq_ids' [B, S], the numbers of documents")
        self.numbers: torch.Tensor = batch["_packed_seq_ids"]

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Row, document and sample of every document."""
        for row, samples in enumerate(self.bins):
            for document, sample in enumerate(samples, 1):
                yield row, document, sample

    def name(self, row: int, document: int) -> str:
        """What a person calls a document: ``pack 0, document 1 (coco/812)``."""
        return f"pack {row}, document {document} ({self.keys[self.bins[row][document - 1]]})"

    def visible(self, row: int, document: int) -> tuple[int, torch.Tensor]:
        """The places of a document's tokens that can be seen."""
        return row, self.numbers[row] == document

    def logits(self, **changed: Any) -> torch.Tensor:
        """What the model says about the batch, or about it with some tensors changed."""
        logits: torch.Tensor = self.model(**model_inputs({**self.batch, **changed})).logits
        return logits


def likely_causes(
    packed: Packed,
    labels: Sequence[torch.Tensor],
    samples: Any,
    own_rope: RopeIndex | None,
    tolerance: float,
) -> tuple[str, ...]:
    """The mistakes that can be shown in a batch.

    Args:
        packed: the batch.
        labels: of the visible tokens of each sample alone.
        samples: encoded, not shifted.
        own_rope: how the model itself finds positions in three rows; None if they are one row.
        tolerance: by how much logits may differ.
    """
    found = [
        *_of_labels(packed, labels),
        *_of_positions(packed, samples, own_rope),
        *_of_attention(packed, tolerance),
        *known_problems(packed.model),
    ]
    unknown = (
        "none of the usual ones (labels and positions are right, documents do not see each other): compare "
        "with attn_implementation='eager', and look at what the model does with its keyword arguments"
    )
    return tuple(found) or (unknown,)


def _of_labels(packed: Packed, labels: Sequence[torch.Tensor]) -> Iterator[str]:
    for row, document, sample in packed.places():
        mine, right = packed.batch["labels"][packed.visible(row, document)], labels[sample]
        if torch.equal(mine, right):
            continue
        how = "are not those of the sample alone"
        if torch.equal(mine[:-1], right[1:]):
            how = "are shifted once too often: each token is to predict the one after the next"
        elif torch.equal(mine[1:], right[:-1]):
            how = "are not shifted: each token is to predict itself"
        yield f"labels of {packed.name(row, document)} {how}"
        return


def _of_positions(packed: Packed, samples: Any, own_rope: RopeIndex | None) -> Iterator[str]:
    positions = packed.batch.get("position_ids")
    if positions is None:
        yield "the batch has no position_ids, so positions run on from document to document"
        return
    if own_rope is not None and positions.dim() == _ONE_ROW:
        yield (
            f"position_ids are one row {tuple(positions.shape)}, but {type(packed.model).__name__} has "
            "mRoPE, positions in three rows [3, B, S]: pass "
            "get_rope_index=packhorse.positions.rope_index(model)"
        )
        return
    for row, document, sample in packed.places():
        tokens = samples[sample]
        mask = torch.as_tensor(tokens["attention_mask"]).bool()[:-1]
        right = torch.arange(len(mask)) if own_rope is None else mrope_position_ids(tokens, own_rope)
        assert right is not None
        _, places = packed.visible(row, document)
        mine = positions[..., row, :][..., places].cpu()
        if not torch.equal(mine, right[..., : len(mask)][..., mask]):
            yield (
                f"positions of {packed.name(row, document)} are not those the model gives it alone "
                f"(they begin with {mine.flatten()[:4].tolist()}): they must restart with each document"
            )
            return


def _of_attention(packed: Packed, tolerance: float) -> Iterator[str]:
    """Other answers in one document must not change what is said about another."""
    labels = packed.batch["labels"]
    with torch.no_grad():
        before = packed.logits()
        for row, samples in enumerate(packed.bins):
            for document in range(1, len(samples) + 1):
                _, places = packed.visible(row, document)
                # Learned tokens are text, so media still fit their placeholders.
                changed = places & (labels[row] != IGNORE_INDEX)
                if not bool(changed.any()):
                    continue
                ids = packed.batch["input_ids"].clone()
                media = _media_like(packed)
                texts = torch.nonzero(changed & ~torch.isin(ids[row], media)).flatten()
                ids[row, texts] = ids[row, texts].roll(1) if len(set(ids[row, texts].tolist())) > 1 else 1
                moved = (packed.logits(input_ids=ids) - before).abs().amax(-1)
                others = (packed.numbers > 0) & ~_as_mask(packed.numbers, row, places)
                if float(moved[others].max() if bool(others.any()) else 0.0) > 10 * tolerance:
                    seen = torch.nonzero((moved > 10 * tolerance) & others)[0].tolist()
                    number = int(packed.numbers[seen[0], seen[1]])
                    yield (
                        f"attention leaks: {packed.name(seen[0], number)} changes with the tokens of "
                        f"{packed.name(row, document)}. The attention mask is not the one this backend "
                        "needs (eager takes numbers, sdpa bools; flash attention must get no mask beside "
                        "cu_seq_lens), or the model's attention is not the one the batch was made for"
                    )
                    return


def _media_like(packed: Packed) -> torch.Tensor:
    """Ids that must stay where they are: those the config names as tokens of media."""
    config = packed.model.config
    names = [name for name in vars(config) if "token" in name and name.endswith(("_id", "_index"))]
    ids = [value for name in names if isinstance(value := getattr(config, name), int)]
    return torch.tensor(ids or [-1], device=packed.batch["input_ids"].device)


def _as_mask(numbers: torch.Tensor, row: int, places: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros_like(numbers, dtype=torch.bool)
    mask[row] = places
    return mask
