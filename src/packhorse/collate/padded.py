"""Padding: samples that are already encoded go in, one rectangular batch comes out.

Whose a media tensor's entries are is read from the family's layout, never guessed from a shape. Costs one
copy of every tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from packhorse.chat import IGNORE_INDEX, TOKEN_KEYS
from packhorse.collate.finish import (
    Counts,
    cast_pixels,
    check_present,
    counted,
    keys_of,
    named,
    row_order,
    shifted,
)
from packhorse.collate.packer import count_items, holds_media, join, layout_of, media_parts
from packhorse.collate.processor_call import pad_token_id
from packhorse.errors import BadSample, ConfigError
from packhorse.families import Family, family_of
from packhorse.pp_media import MEDIA_LAYOUT_KEY, MEDIA_ROWS_KEY
from packhorse.types import MEDIA_KINDS

Sample = Mapping[str, Any]

_PER_TOKEN = (*TOKEN_KEYS, "labels", "position_ids")
_COUNTS = ("n_images", "n_videos", "n_audios")


def pad_collate_fn(
    examples: Sequence[Sample],
    processor: Any,
    max_length: int | None = None,
    *,
    pixel_dtype: torch.dtype | None = torch.bfloat16,
    media_layout: bool = False,
) -> dict[str, Any]:
    """Make a batch of samples from :class:`packhorse.datasets.PreTokenizedDatasetWrapper`.

    Args:
        examples: dicts with ``input_ids`` and ``labels`` (both [S], not shifted), usually
            ``attention_mask`` and other tensors per token, and the media tensors of the family.
        processor: tells the pad token and the family.
        max_length: pad every batch to so many tokens; None pads to the longest sample.
        pixel_dtype: what pixels are cast to; None leaves them.
        media_layout: also say whose the entries of each media tensor are, for a pipeline
            (:mod:`packhorse.pp_media`).

    Returns:
        Tensors per token of shape [B, S - 1], padded on the right (ids with the pad token, masks and types
        with 0, labels with :data:`~packhorse.chat.IGNORE_INDEX`) and shifted by one, the labels also as
        ``shift_labels``, so that the model does not shift them again; media tensors joined along axis 0,
        shorter ones filled up where the layout says that they may differ, and one row per sample where the
        sample owns the axis; ``n_images_per_sample``, ``n_videos_per_sample`` and ``n_audios_per_sample``
        [B] where there are such media: what the samples' own ``n_images`` and its like say, or else the
        entries of their tensors (which are rows where no tensor separates media items, as
        InternVL's tiles). Rows come in the order of the samples, but for Qwen models samples with a fake
        image come last (see :func:`~packhorse.collate.finish.row_order`). An empty batch gives ``{}``.

    Raises:
        BadSample: a sample is longer than ``max_length``.
        ConfigError: (a ``ValueError``) a sample is None, the tokenizer has no pad token, or tensors do
            not fit together; the message names key and shapes.
    """
    if not examples:
        return {}
    family = family_of(processor)
    check_present(examples)
    for sample, key in zip(examples, keys_of(examples), strict=True):
        with named(key):
            _check_length(sample.get("input_ids"), max_length)
    samples = [_with_media_tensors(sample, family) for sample in ordered(examples, family)]
    batch = pad_samples(samples, family, pad_token_id(processor), max_length=max_length, needs_labels=True)
    if media_layout:
        batch |= whose_media(samples, family)
    return shifted(counted(cast_pixels(batch, pixel_dtype), count_media(samples, family)), family)


def ordered(samples: Sequence[Sample], family: Family) -> list[Any]:
    """The samples in the order of the batch's rows; see :func:`~packhorse.collate.finish.row_order`."""
    # Before padding, only the tokens of a fake image are hidden.
    masks = (sample.get("attention_mask") for sample in samples)
    fakes = [mask is not None and not bool(torch.as_tensor(mask).all()) for mask in masks]
    images = [int(sample.get("image_grid_thw") is not None) for sample in samples]
    return [samples[place] for place in row_order(fakes, images, family)]


def pad_samples(
    samples: Sequence[Sample],
    family: Family,
    pad: int,
    *,
    max_length: int | None = None,
    side: str = "right",
    needs_labels: bool = False,
) -> dict[str, Any]:
    """The batch of :func:`pad_collate_fn` before the shift and without counts; ``side`` is where to pad."""
    if not samples:
        raise ConfigError("an empty batch: expected at least one sample")
    rows = [_token_tensors(sample, place, needs_labels) for place, sample in enumerate(samples)]
    for row in rows:
        _check_length(row["input_ids"], max_length)
    width = max(row["input_ids"].shape[-1] for row in rows) if max_length is None else max_length
    batch: dict[str, Any] = {}
    for key in (key for key in _PER_TOKEN if any(key in row for row in rows)):
        fill = {"input_ids": pad, "labels": IGNORE_INDEX}.get(key, 0)
        columns = [_or_default(row, key) for row in rows]
        _check_dimensions(key, columns)
        filled = [pad_last(column, width, fill, side) for column in columns]
        batch[key] = torch.stack(filled, dim=-2)  # [B, S], and [3, B, S] of [3, S]
    return {**batch, **join_media(samples, family)}


def _check_length(ids: Any, max_length: int | None) -> None:
    length = 0 if ids is None else torch.as_tensor(ids).shape[-1]
    if max_length is not None and length > max_length:
        raise BadSample(
            f"a sample of {length} tokens in a batch of max_length={max_length}: give the dataset the same "
            "max_length (PreTokenizedDatasetWrapper leaves such samples out, or cuts them where media allow)",
            reason="too_long",
            stage="collate",
        )


def _token_tensors(sample: Sample, place: int, needs_labels: bool) -> dict[str, torch.Tensor]:
    needed = ("input_ids", "labels") if needs_labels else ("input_ids",)
    missing = [key for key in needed if sample.get(key) is None]
    if missing:
        what = f"sample {place} of the batch has no {missing[0]}, only {', '.join(sample)}"
        hint = ": examples go through the function that packhorse.collate_fns.COLLATE_FNS has"
        raise ConfigError(what + (hint if "conversation" in sample else ""))
    row = {key: torch.as_tensor(sample[key]) for key in _PER_TOKEN if sample.get(key) is not None}
    row = {key: value[0] if value.dim() == 2 and len(value) == 1 else value for key, value in row.items()}
    row.setdefault("attention_mask", torch.ones_like(row["input_ids"]))
    length = row["input_ids"].shape[-1]
    for key, value in row.items():
        if value.shape[-1] != length or value.dim() > (2 if key == "position_ids" else 1):
            raise ConfigError(
                f"sample {place} of the batch: '{key}' is {tuple(value.shape)}, expected one entry for each "
                f"of {length} tokens"
            )
    return row


def _or_default(row: Mapping[str, torch.Tensor], key: str) -> torch.Tensor:
    if key in row:
        return row[key]
    if key == "position_ids":
        raise ConfigError("some samples of the batch have 'position_ids' and some have not")
    return torch.full_like(row["input_ids"], IGNORE_INDEX if key == "labels" else 0)


def _check_dimensions(key: str, columns: Iterable[torch.Tensor]) -> None:
    found = {tuple(column.shape[:-1]) for column in columns}
    if len(found) > 1:
        raise ConfigError(f"'{key}' has leading axes {sorted(found)} in one batch, expected the same in all")


def pad_last(tensor: torch.Tensor, width: int, fill: float, side: str) -> torch.Tensor:
    """Fill up the last axis to ``width``."""
    missing = width - tensor.shape[-1]
    return F.pad(tensor, (missing, 0) if side == "left" else (0, missing), value=fill) if missing else tensor


# --- media ------------------------------------------------------------------------------------------------


def join_media(samples: Sequence[Sample], family: Family) -> dict[str, torch.Tensor]:
    """The media tensors of all samples, joined along axis 0 as the family's layout says."""
    keys = dict.fromkeys(key for sample in samples for key in sample if _is_media(key))
    joined = {}
    for key in keys:
        given = [sample.get(key) for sample in samples]
        layout = layout_of(key, family, given)
        tensors = [None if value is None else torch.as_tensor(value) for value in given]
        if all(tensor is None for tensor in tensors):
            continue
        if layout.owner == "sample":
            tensors = _row_for_each(key, tensors)
        joined[key] = join(key, [tensor for tensor in tensors if tensor is not None], family)
    return joined


def _with_media_tensors(sample: Sample, family: Family) -> Sample:
    """The sample with one tensor in place of each list of tensors, joined as the family's layout says."""
    lists = {
        key: value
        for key, value in sample.items()
        if isinstance(value, list | tuple) and _is_media(key) and holds_media(key, value)
    }
    joined = {key: join(key, media_parts(key, value, sample, family), family) for key, value in lists.items()}
    return {**sample, **joined}


def whose_media(samples: Sequence[Sample], family: Family) -> dict[str, Any]:
    """The layout of each media tensor, and its entries for each sample; nothing where there are no media."""
    keys = dict.fromkeys(key for sample in samples for key in sample if _is_media(key))
    found = {key: [sample.get(key) for sample in samples] for key in keys}
    found = {key: values for key, values in found.items() if any(value is not None for value in values)}
    if not found:
        return {}
    layouts = {key: layout_of(key, family, values) for key, values in found.items()}
    absent = {key: int(layout.owner == "sample") for key, layout in layouts.items()}
    rows = {
        key: torch.tensor([absent[key] if value is None else len(value) for value in values])
        for key, values in found.items()
    }
    return {MEDIA_LAYOUT_KEY: layouts, MEDIA_ROWS_KEY: rows}


def _is_media(key: str) -> bool:
    return key not in _PER_TOKEN and key not in _COUNTS and not key.startswith("_")


def _row_for_each(key: str, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Samples without a medium get a row of zeros, so that row and sample stay in step."""
    like = next(tensor for tensor in tensors if tensor is not None)
    wrong = [tuple(t.shape) for t in tensors if t is not None and (t.dim() == 0 or len(t) != 1)]
    if wrong:
        raise ConfigError(f"'{key}' of a sample has shape {wrong[0]}, expected one entry along axis 0")
    return [torch.zeros_like(like) if tensor is None else tensor for tensor in tensors]


def count_media(samples: Sequence[Sample], family: Family) -> Counts:
    """How many images, videos and sounds each sample has, as far as its tensors tell."""
    layouts = {
        key: layout_of(key, family, [value])
        for sample in samples
        for key, value in sample.items()
        if _is_media(key) and value is not None
    }
    return Counts(*([count_items(sample, kind, layouts) for sample in samples] for kind in MEDIA_KINDS))
