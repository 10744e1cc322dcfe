r"""The thinking prefix of Gemma 4, and the collate function that inserts it.

Some models open every answer with an empty thinking channel, ``<|channel>thought\n<channel|>``. Training data
without it starts with a high loss, so it is inserted, but not supervised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from packhorse.chat import IGNORE_INDEX, tokenizer_of
from packhorse.collate.packer import stack_tokens
from packhorse.collate.processor_call import text_ids
from packhorse.collate.raw_default import default_collate_fn
from packhorse.collate.raw_examples import Batch
from packhorse.collate.raw_labels import find_all, token_id
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
    """Collate raw examples for Gemma 4 with the thinking prefix in every answer.

    The prefix counts towards ``max_length``; its tokens are not supervised. Everything else is as in
    :func:`~packhorse.collate_fns.default_collate_fn`.
    """
    if not examples:
        return {}
    tokenizer = tokenizer_of(processor)

    def insert(batch: Batch, _: Any) -> Mapping[str, Any]:
        return _inject_thinking_prefix_tokens(batch, tokenizer)

    batch = default_collate_fn(examples, processor, max_length, insert, drop_overlong=drop_overlong)
    marker, prefix = _patterns(tokenizer)
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"], strict=True):
        for start in find_all(ids, [*marker, *prefix]):
            first = start + len(marker) - 1  # the label of a token is one index before it
            labels[first : first + len(prefix)] = IGNORE_INDEX
    return batch


def gemma4_inject_thinking_prefix(batch: Mapping[str, Any], processor: Any) -> dict[str, Any]:
    r"""Insert Gemma 4's thinking prefix after every ``<|turn>model\n``, as a hook after tokenization.

    For ``PreTokenizedDatasetWrapper(…, post_tokenize_hook=gemma4_inject_thinking_prefix)`` and
    ``default_collate_fn(…, _post_tokenize_hook=…)``. Labels that are made after the hook exclude the prefix;
    ``labels`` that the batch already has are :data:`~packhorse.chat.IGNORE_INDEX` on it.

    Args:
        batch: ``input_ids`` [B, S], and any other tensors.
        processor: its tokenizer must have Gemma 4's tokens; otherwise the batch is returned unchanged.
    """
    tokenizer = tokenizer_of(processor)
    tokens = ("<|turn>", "<|channel>", "<channel|>")
    if any(token_id(tokenizer, token) is None for token in tokens):
        return dict(batch)
    return _inject_thinking_prefix_tokens(batch, tokenizer)


def _inject_thinking_prefix_tokens(batch: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    r"""Insert ``<|channel>thought\n<channel|>`` after every ``<|turn>model\n`` that is not followed by it.

    Args:
        batch: ``input_ids`` [B, S], and any other tensors. For inserted tokens ``attention_mask`` is 1,
            ``labels`` are IGNORE_INDEX and every other integer tensor [B, S] is 0; everything else stays.
        tokenizer: has the ids of the tokens and of padding.

    Returns:
        A new batch of the same length if the padding leaves enough space, else as long as its longest row.
    """
    marker, prefix = _patterns(tokenizer)
    ids = batch["input_ids"]
    insertions = [_missing_prefixes(row, marker, prefix) for row in ids.tolist()]
    if not any(insertions):
        return dict(batch)
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None and len(set(map(len, insertions))) > 1:
        raise ConfigError(
            "the tokenizer has no pad token, and rows with more answers become longer: set "
            "tokenizer.pad_token"
        )
    spans = [_visible_span(row) for row in batch.get("attention_mask", torch.ones_like(ids))]
    keys = [
        key
        for key, value in batch.items()
        if isinstance(value, torch.Tensor) and value.shape == ids.shape and not value.is_floating_point()
    ]
    zeros = [0] * len(prefix)
    inserted = {
        "input_ids": prefix,
        "attention_mask": [1] * len(prefix),
        "labels": [IGNORE_INDEX] * len(prefix),
    }
    rows = []
    for row, ((start, end), indices) in enumerate(zip(spans, insertions, strict=True)):
        places = [index - start for index in indices]
        rows.append(
            {key: _insert(batch[key][row, start:end], places, inserted.get(key, zeros)) for key in keys}
        )
    width = max(ids.shape[1], *(len(row["input_ids"]) for row in rows))
    left = all(end == ids.shape[1] for _, end in spans) and any(start for start, _ in spans)
    return {**batch, **stack_tokens(rows, width, pad or 0, "left" if left else "right")}


def _patterns(tokenizer: Any) -> tuple[list[int], list[int]]:
    return text_ids(tokenizer, _GEMMA4_MODEL_TURN), text_ids(tokenizer, _GEMMA4_THINKING_PREFIX)


def _missing_prefixes(ids: list[int], marker: list[int], prefix: list[int]) -> list[int]:
    """Return the indices after each marker that the prefix does not follow."""
    ends = [start + len(marker) for start in find_all(ids, marker)]
    return [end for end in ends if ids[end : end + len(prefix)] != prefix]


def _visible_span(mask: torch.Tensor) -> tuple[int, int]:
    """Return the first and after-last token of a row that is attended to."""
    visible = mask.nonzero().flatten()
    return (int(visible[0]), int(visible[-1]) + 1) if len(visible) else (0, 0)


def _insert(row: torch.Tensor, places: Sequence[int], values: Sequence[int]) -> torch.Tensor:
    piece = torch.tensor(values, dtype=row.dtype, device=row.device)
    edges = [0, *places, len(row)]
    pieces = [part for start, end in pairwise(edges) for part in (piece, row[start:end])]
    return torch.cat(pieces[1:])
