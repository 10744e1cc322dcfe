"""The one autoregressive shift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packhorse.errors import ConfigError

TOKEN_KEYS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
"""Tensors with one entry per token, whatever the family."""


def shift_tokens(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The one autoregressive shift: each position gets the label of the next token.

    Takes tensors of one sample ([S]) or a batch ([B, S]; ``position_ids`` also [3, B, S]); returns a new dict
    of views one token shorter: ``labels`` without the first, every other token tensor without the last.
    All that is not one entry per token stays.

    Raises:
        ConfigError: there are no labels, or a token tensor has another length than they.
    """
    if "labels" not in batch:
        raise ConfigError(f"cannot shift without 'labels', only {', '.join(batch)}")
    shifted = dict(batch)
    length = batch["labels"].shape[-1]
    for key in ("labels", *TOKEN_KEYS, "position_ids"):
        if key not in batch:
            continue
        shape = tuple(batch[key].shape)
        if shape[-1] != length or len(shape) > (3 if key == "position_ids" else 2):
            raise ConfigError(f"'{key}' is {shape}, expected one entry for each of {length} labels")
        shifted[key] = batch[key][..., 1:] if key == "labels" else batch[key][..., :-1]
    return shifted
