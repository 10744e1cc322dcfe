"""What every collate function does last: count media, bring pixels to the model's type, shift by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from packhorse.chat import TOKEN_KEYS, shift_tokens
from packhorse.families import FAMILIES, Family
from packhorse.neat_packing_vlm.pixels import are_pixels

_SHIFTED_THERE = frozenset({*TOKEN_KEYS, "labels", "position_ids"})


def row_order(fakes: Sequence[bool], images: Sequence[int], family: Family) -> list[int]:
    """In which order the samples become rows: as they are, or those with a fake image last.

    Models with mRoPE hand out the grids of images to attended image tokens, row by row, to find positions.
    They pass over the hidden tokens of a fake image but not over its grid: the next row's image would get
    that grid, and wrong positions (or the model stops). Behind the last real image it does no harm.

    Args:
        fakes: whether each sample's image is the fake one.
        images: how many images each sample has.
        family: decides whether that matters.
    """
    order = list(range(len(fakes)))
    first = next((place for place in order if fakes[place]), len(order))
    in_the_way = any(images[place] and not fakes[place] for place in order[first:])
    if not in_the_way or not family.mrope:
        return order
    return sorted(order, key=lambda place: fakes[place])


class Counts(NamedTuple):
    """How many media each row of a batch has."""

    images: Sequence[int] = ()
    videos: Sequence[int] = ()
    audios: Sequence[int] = ()


def counted(batch: Mapping[str, Any], counts: Counts) -> dict[str, Any]:
    """The batch with ``n_images_per_sample`` [B] and its like, each where there is any such medium."""
    result = dict(batch)
    for kind, numbers in counts._asdict().items():
        if any(numbers):
            result[f"n_{kind}_per_sample"] = torch.tensor(numbers)
    return result


def cast_pixels(batch: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """The batch with its pixels as ``dtype``; masks, grids and sound stay as they are, all with None."""
    result = dict(batch)
    for key, value in batch.items():
        if dtype is not None and isinstance(value, torch.Tensor) and are_pixels(key, value.dtype):
            result[key] = value.to(dtype)
    return result


def shifted(batch: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The autoregressive shift of labels and of every tensor per token; what is shifted is contiguous.

    Losses of transformers take ``shift_labels`` that can be viewed as one row.
    """
    result = shift_tokens(batch)
    for key in per_token(batch, family) - _SHIFTED_THERE:
        result[key] = batch[key][:, :-1]
    return with_shift_labels(
        {key: value if value is batch[key] else value.contiguous() for key, value in result.items()}
    )


def with_shift_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with its labels, which are shifted already, also as ``shift_labels``.

    A model of transformers computes a loss if ``labels`` are given, and does not shift them where it is given
    ``shift_labels``. It is the same tensor, so a change in place is a change of both.
    """
    return {**batch, "shift_labels": batch["labels"]}


def per_token(batch: Mapping[str, Any], family: Family) -> set[str]:
    """Keys of tensors [B, S] that have an entry for each token, those that only this processor has included.

    No media tensor of any family is taken for one, whatever its shape.
    """
    shape = batch["input_ids"].shape
    media = {key for known in (*FAMILIES, family) for key in known.layout}
    return {
        key
        for key, value in batch.items()
        if isinstance(value, torch.Tensor) and value.shape == shape and key not in media
    }
