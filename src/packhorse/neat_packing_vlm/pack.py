"""Joining samples into a pack: encoded samples go in, one sequence comes out that remembers its documents.

Costs one copy of the tokens. Pixels are not copied here when the caller keeps them as parts
(:class:`~packhorse.neat_packing_vlm.media.Parts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from packhorse.chat import IGNORE_INDEX, TOKEN_KEYS, shift_tokens
from packhorse.errors import ConfigError
from packhorse.families import Family
from packhorse.neat_packing_vlm.media import (
    MEDIA_KEYS,
    Parts,
    count_items,
    holds_media,
    join,
    layouts_of,
    media_parts,
    pad_end,
)
from packhorse.positions import RopeIndex, mrope_position_ids

Sample = Mapping[str, Any]

_COUNTS = ("n_images", "n_videos")
_PER_TOKEN = frozenset({*TOKEN_KEYS, "labels", "position_ids"})
_MEDIA = frozenset(MEDIA_KEYS)


def _shift_sample(sample: Sample, has_mrope: bool = False) -> dict[str, Any]:
    """Shift one sample by one token: each position gets the label of the next token.

    Args:
        sample: ``input_ids`` and ``labels`` [S], other tensors per token ([S] or [1, S]), media tensors.
        has_mrope: it has ``position_ids`` [3, S], to be cut like the ids; otherwise positions are left alone.

    Returns:
        A new dict of views one token shorter; media tensors are the same objects.
    """
    values = {key: torch.as_tensor(sample[key]) for key in _PER_TOKEN if sample.get(key) is not None}
    ids = values["input_ids"]
    kept = {key: value for key, value in sample.items() if key not in values}
    if not has_mrope and "position_ids" in values:
        kept["position_ids"] = values.pop("position_ids")
    # What a hook has added per token is cut with the others.
    more = {key: value for key, value in kept.items() if _is_per_token(key, value, ids)}
    shifted = shift_tokens(values)
    return {**kept, **shifted, **{key: value[..., :-1] for key, value in more.items()}}


def _is_per_token(key: str, value: Any, ids: torch.Tensor) -> bool:
    named = key in _MEDIA or key in _PER_TOKEN or key in _COUNTS
    return not named and isinstance(value, torch.Tensor) and value.shape == ids.shape


def _compute_mrope_position_ids(sample: Sample, get_rope_index: RopeIndex) -> torch.Tensor | None:
    """Positions [3, S] of one sample, or None if ``get_rope_index`` does not take ``input_ids``.

    See :func:`packhorse.positions.mrope_position_ids`.
    """
    return mrope_position_ids(sample, get_rope_index)


def _build_packed_vlm_sample(
    samples: Sequence[Sample],
    pack_size: int,
    padding_idx: int,
    has_mrope: bool = False,
    sequence_alignment: int = 1,
    *,
    family: Family | None = None,
    keep_parts: bool = False,
) -> dict[str, Any]:
    """Join samples that are already shifted into one pack.

    Args:
        samples: dicts of :func:`_shift_sample`; with mRoPE each has ``position_ids`` [3, S].
        pack_size: the most tokens the pack may have, alignment included.
        padding_idx: fills documents up to ``sequence_alignment``; the end of the pack is not padded.
        has_mrope: positions are the samples' own; otherwise they restart at 0 with each document.
        sequence_alignment: each document is padded to a multiple of this many tokens.
        family: whose layout says how media are joined; None joins every known media tensor along axis 0.
        keep_parts: leave large media tensors as a list of the samples' own, for the collater to copy once.

    Returns:
        ``input_ids`` and ``labels`` [S]; ``attention_mask`` [S]: the document's number 1, 2, …, and 0 where
        a token is hidden (a fake image's) or fills up; ``position_ids`` [S] or [3, S]; further tensors per
        token; media tensors; ``seq_lens`` (tokens of each document, without what fills up) and
        ``seq_lens_padded``; ``n_images`` and ``n_videos``. In addition, for the collater: ``_family``,
        ``_alignment`` and ``_media_per_document`` (how many images and videos each document has).

    Raises:
        ConfigError: there are no samples, they do not fit into ``pack_size``, or tensors do not match.
    """
    if not samples:
        raise ConfigError("a pack without samples: expected at least one")
    rows = [_tokens_of(sample, place, has_mrope) for place, sample in enumerate(samples)]
    lengths = [len(row["input_ids"]) for row in rows]
    padded = [length + -length % sequence_alignment for length in lengths]
    if sum(padded) > pack_size:
        raise ConfigError(f"documents of {padded} tokens, {sum(padded)} together, in a pack of {pack_size}")
    pack: dict[str, Any] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        fill = {"input_ids": padding_idx, "labels": IGNORE_INDEX}.get(key, 0)
        columns = [row.get(key, torch.zeros_like(row["input_ids"])) for row in rows]
        missing = [after - before for before, after in zip(lengths, padded, strict=True)]
        pack[key] = torch.cat([pad_end(c, n, fill) for c, n in zip(columns, missing, strict=True)], dim=-1)
    pack |= _media_of(samples, family, keep_parts)
    layouts = layouts_of(family)
    counts = [[count_items(sample, kind, layouts) for sample in samples] for kind in ("image", "video")]
    return {
        **pack,
        "seq_lens": lengths,
        "seq_lens_padded": padded,
        "n_images": sum(counts[0]),
        "n_videos": sum(counts[1]),
        "_family": family,
        "_alignment": sequence_alignment,
        "_media_per_document": [images + videos for images, videos in zip(*counts, strict=True)],
    }


def _tokens_of(sample: Sample, place: int, has_mrope: bool) -> dict[str, torch.Tensor]:
    """The tensors per token of one document, the mask turned into its number."""
    ids = torch.as_tensor(sample["input_ids"]).reshape(-1)
    more = (key for key, value in sample.items() if _is_per_token(key, value, ids))
    names = ("input_ids", "labels", "attention_mask", *TOKEN_KEYS, *more)
    row = {key: torch.as_tensor(sample[key]) for key in names if sample.get(key) is not None}
    row = {key: value[0] if value.dim() == 2 and len(value) == 1 else value for key, value in row.items()}
    seen = row.get("attention_mask")
    # A number each, so that documents can be told apart; 0 stays 0, so that hidden tokens stay hidden.
    number = place + 1
    row["attention_mask"] = (
        torch.full_like(ids, number) if seen is None else (seen != 0).to(ids.dtype) * number
    )
    row["position_ids"] = torch.arange(len(ids))
    if has_mrope:
        if sample.get("position_ids") is None:
            raise ConfigError(f"sample {place} of the pack has no position_ids; with mRoPE each needs them")
        row["position_ids"] = torch.as_tensor(sample["position_ids"])
    wrong = {key: tuple(value.shape) for key, value in row.items() if value.shape[-1] != len(ids)}
    if wrong or "labels" not in row:
        found = wrong or f"no labels, only {', '.join(row)}"
        raise ConfigError(
            f"sample {place} of the pack: {found}, expected one entry for each of {len(ids)} ids"
        )
    return row


def _media_of(samples: Sequence[Sample], family: Family | None, keep_parts: bool) -> dict[str, Any]:
    media: dict[str, Parts] = {}
    for sample in samples:
        for key, value in sample.items():
            passed_over = key in _PER_TOKEN or key in _COUNTS or key.startswith("_")
            if passed_over or _is_per_token(key, value, sample["input_ids"]) or not holds_media(key, value):
                continue
            media.setdefault(key, Parts()).extend(media_parts(key, value, sample, family))
    # Numbers are few; what is in floating point is large.
    return {
        key: parts if keep_parts and parts.dtype.is_floating_point else join(key, parts, family)
        for key, parts in media.items()
    }
