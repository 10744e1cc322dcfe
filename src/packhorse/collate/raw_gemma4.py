r"""The collate function for Gemma 4 models that open every answer with an empty thinking channel.

Their answers begin with ``<|channel>thought\n<channel|>``. Where training data have it not, the model expects
it and the loss begins high; so it is put in, and not supervised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from packhorse.chat import IGNORE_INDEX, tokenizer_of
from packhorse.collate.packer import pad_last
from packhorse.collate.processor_call import text_ids
from packhorse.collate.raw_default import default_collate_fn
from packhorse.collate.raw_examples import Batch
from packhorse.collate.raw_labels import token_id
from packhorse.errors import ConfigError

_GEMMA4_MODEL_TURN = "<|turn>model\n"
_GEMMA4_THINKING_PREFIX = "<|channel>thought\n<channel|>"


def gemma4_prefix_collate_fn(
    examples: Sequence[Mapping[str, Any]],
    processor: Any,
    max_length: int | None = None,
    *,
    drop_overlong: bool = False,
) -> Batch:
    """:func:`~packhorse.collate_fns.default_collate_fn` with the thinking prefix in every answer.

    The prefix counts towards ``max_length``; its tokens are not supervised.
    """
    if not examples:
        return {}
    tokenizer = tokenizer_of(processor)

    def insert(batch: Batch, _: Any) -> Mapping[str, Any]:
        return _inject_thinking_prefix_tokens(batch, tokenizer)

    batch = default_collate_fn(examples, processor, max_length, insert, drop_overlong=drop_overlong)
    marker, prefix = _patterns(tokenizer)
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"], strict=True):
        for place in _ends(ids, [*marker, *prefix]):
            # The label of a token stands one place before it.
            labels[max(0, place - len(prefix) - 1) : place - 1] = IGNORE_INDEX
    return batch


def gemma4_inject_thinking_prefix(batch: Mapping[str, Any], processor: Any) -> dict[str, Any]:
    r"""Put Gemma 4's thinking prefix after every ``<|turn>model\n``, as a hook after tokenisation.

    For ``PreTokenizedDatasetWrapper(…, post_tokenize_hook=gemma4_inject_thinking_prefix)`` and
    ``default_collate_fn(…, _post_tokenize_hook=…)``. Labels are made after the hook and leave the prefix out;
    ``labels`` that the batch already has are :data:`~packhorse.chat.IGNORE_INDEX` on it.

    Args:
        batch: ``input_ids`` [B, S], and any other tensors.
        processor: its tokenizer must have Gemma 4's tokens; otherwise the batch comes back as it is.
    """
    tokenizer = tokenizer_of(processor)
    tokens = ("<|turn>", "<|channel>", "<channel|>")
    if any(token_id(tokenizer, token) is None for token in tokens):
        return dict(batch)
    return _inject_thinking_prefix_tokens(batch, tokenizer)


def _inject_thinking_prefix_tokens(batch: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    r"""Put ``<|channel>thought\n<channel|>`` after every ``<|turn>model\n`` that has it not.

    Args:
        batch: ``input_ids`` [B, S], and any other tensors. ``attention_mask`` is 1 on what is put in,
            ``labels`` are IGNORE_INDEX and every other whole-number tensor [B, S] is 0 there; all else stays.
        tokenizer: tells the tokens and the padding.

    Returns:
        A new batch, as long as before where padding makes room, else as long as its longest row.
    """
    marker, prefix = _patterns(tokenizer)
    ids = batch["input_ids"]
    places = [_openings(row, marker, prefix) for row in ids.tolist()]
    if not any(places):
        return dict(batch)
    result = dict(batch)
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None and len({len(found) for found in places}) > 1:
        raise ConfigError("the tokenizer has no pad token, and rows with more answers become longer")
    mask = batch.get("attention_mask", torch.ones_like(ids))
    spans = [_span(row) for row in mask]
    grown = [
        (end - start) + len(prefix) * len(found) for (start, end), found in zip(spans, places, strict=True)
    ]
    width = max(*grown, ids.shape[1])
    side = (
        "left"
        if all(end == ids.shape[1] for _, end in spans) and any(start for start, _ in spans)
        else "right"
    )
    for key, value in batch.items():
        per_token = (
            isinstance(value, torch.Tensor) and value.shape == ids.shape and not value.is_floating_point()
        )
        if per_token:
            fill = {"input_ids": 0 if pad is None else pad, "labels": IGNORE_INDEX}.get(key, 0)
            value_inside = {"attention_mask": 1, "labels": IGNORE_INDEX}.get(key, 0)
            inside = prefix if key == "input_ids" else [value_inside] * len(prefix)
            rows = [
                _inserted(row[start:end], [place - start for place in found], inside)
                for row, (start, end), found in zip(value, spans, places, strict=True)
            ]
            result[key] = torch.stack([pad_last(row, width, fill, side) for row in rows])
    return result


def _patterns(tokenizer: Any) -> tuple[list[int], list[int]]:
    return text_ids(tokenizer, _GEMMA4_MODEL_TURN), text_ids(tokenizer, _GEMMA4_THINKING_PREFIX)


def _ends(ids: Sequence[int], pattern: Sequence[int]) -> list[int]:
    """The places after each occurrence."""
    width, wanted = len(pattern), list(pattern)
    return [at + width for at in range(len(ids) - width + 1) if list(ids[at : at + width]) == wanted]


def _openings(ids: list[int], marker: list[int], prefix: list[int]) -> list[int]:
    """Where the prefix belongs and is not yet."""
    return [place for place in _ends(ids, marker) if ids[place : place + len(prefix)] != prefix]


def _span(mask: torch.Tensor) -> tuple[int, int]:
    """First and after-last attended token of a row."""
    places = mask.nonzero().flatten()
    return (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)


def _inserted(row: torch.Tensor, places: Sequence[int], inside: Sequence[int]) -> torch.Tensor:
    piece = torch.tensor(inside, dtype=row.dtype, device=row.device)
    cuts = [0, *places, len(row)]
    pieces = [part for start, end in pairwise(cuts) for part in (piece, row[start:end])]
    return torch.cat(pieces[1:])
