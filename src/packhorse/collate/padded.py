"""Pad encoded samples to one rectangular batch.

The family's layout says which sample an entry of a media tensor belongs to. Copies every tensor once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from packhorse.chat import Processor, pad_token_id
from packhorse.collate.finish import add_counts, check_present, keys_of, row_order, shift_batch
from packhorse.collate.packer import (
    all_media_keys,
    cast_pixels,
    check_tokens,
    join,
    layout_of,
    stack_tokens,
    to_sample,
)
from packhorse.errors import BadSample, ConfigError
from packhorse.families import Family, family_of
from packhorse.pp_media import MEDIA_LAYOUT_KEY, MEDIA_ROWS_KEY
from packhorse.types import Sample


def pad_collate_fn(
    examples: Sequence[Mapping[str, Any]],
    processor: Processor,
    max_length: int | None = None,
    *,
    pixel_dtype: torch.dtype | None = torch.bfloat16,
    media_layout: bool = False,
) -> dict[str, Any]:
    """Make a batch of samples from :class:`packhorse.datasets.PreTokenizedDatasetWrapper`.

    Args:
        examples: dicts with ``input_ids`` and ``labels`` (both [S], not shifted), usually
            ``attention_mask`` and other tensors per token, and the media tensors of the family.
        processor: has the pad token; its class decides the family.
        max_length: the length of every batch before the shift; None pads to the longest sample.
        pixel_dtype: what pixels are cast to; None leaves them.
        media_layout: also return the layout of each media tensor and its entries for each sample, for a
            pipeline (:mod:`packhorse.pp_media`).

    Returns:
        Tensors per token of shape [B, S - 1], padded on the right (ids with the pad token, masks and types
        with 0, labels with :data:`~packhorse.chat.IGNORE_INDEX`) and shifted by one, the labels also as
        ``shift_labels``, so that the model does not shift them again; media tensors joined along axis 0,
        shorter ones padded if the layout declares them ragged, and one row per sample if the sample owns the
        axis; ``n_images_per_sample``, ``n_videos_per_sample`` and ``n_audios_per_sample`` [B] if there are
        such media: ``n_images``, ``n_videos`` and ``n_audios`` of the samples, or else the entries of their
        tensors (rows if no tensor separates media items, as InternVL's tiles). Rows come in the order of the
        samples, but for Qwen models samples with a fake image come last (see
        :func:`~packhorse.collate.finish.row_order`). An empty batch gives ``{}``.

    Raises:
        BadSample: a sample is longer than ``max_length``.
        ConfigError: (a ``ValueError``) a sample is None, the tokenizer has no pad token, or tensors do
            not fit together; the message names key and shapes.
    """
    if not examples:
        return {}
    family = family_of(processor)
    check_present(examples)
    return collate_samples(
        _read(examples, family, ("input_ids", "labels")),
        family,
        pad_token_id(processor),
        max_length,
        pixel_dtype=pixel_dtype,
        media_layout=media_layout,
    )


def _read(examples: Sequence[Mapping[str, Any]], family: Family, needed: tuple[str, ...]) -> list[Sample]:
    """Parse the samples of a batch; raise :class:`ConfigError` if one lacks what is ``needed``."""
    for index, example in enumerate(examples):
        missing = [key for key in needed if example.get(key) is None]
        if missing:
            detail = f"sample {index} of the batch has no {missing[0]}, only {', '.join(example)}"
            hint = ": raw examples need the function that packhorse.collate_fns.COLLATE_FNS has"
            raise ConfigError(detail + (hint if "conversation" in example else ""), setting=missing[0])
    keyed = zip(examples, keys_of(examples), strict=True)
    return [to_sample(example, family, key, strict=True) for example, key in keyed]


def collate_samples(
    samples: Sequence[Sample],
    family: Family,
    pad: int,
    max_length: int | None = None,
    *,
    side: str = "right",
    pixel_dtype: torch.dtype | None = torch.bfloat16,
    media_layout: bool = False,
) -> dict[str, Any]:
    """Collate typed samples as :func:`pad_collate_fn` does; ``pad`` pads their ids on this ``side``."""
    samples = order_rows(samples, family)
    batch = _pad(samples, family, pad, max_length, side)
    if media_layout:
        batch |= _media_layout(samples, family)
    counts = [sample.num_items for sample in samples]
    return shift_batch(add_counts(cast_pixels(batch, pixel_dtype), counts), family)


def order_rows(samples: Sequence[Sample], family: Family) -> list[Sample]:
    """Return the samples in row order; see :func:`~packhorse.collate.finish.row_order`."""
    # Before padding, only tokens of a fake image are hidden.
    masks = (sample.tokens.get("attention_mask") for sample in samples)
    fakes = [mask is not None and not bool(mask.all()) for mask in masks]
    images = [int("image_grid_thw" in sample.media) for sample in samples]
    return [samples[index] for index in row_order(fakes, images, family)]


def pad_samples(
    samples: Sequence[Mapping[str, Any]],
    family: Family,
    pad: int,
    *,
    side: str = "right",
) -> dict[str, Any]:
    """Return the batch of :func:`pad_collate_fn` before the shift and without counts."""
    return _pad(_read(samples, family, ("input_ids",)), family, pad, None, side)


def _pad(
    samples: Sequence[Sample], family: Family, pad: int, max_length: int | None, side: str
) -> dict[str, Any]:
    rows = []
    for index, sample in enumerate(samples):
        check_tokens(sample, f"sample {index} of the batch")
        if max_length is not None and len(sample) > max_length:
            raise BadSample(
                f"sample has {len(sample)} tokens, the batch has max_length={max_length}: set the same "
                "max_length for the dataset (PreTokenizedDatasetWrapper drops or truncates such samples)",
                reason="too_long",
                key=sample.key,
                stage="collate",
            )
        rows.append({"attention_mask": torch.ones_like(sample.tokens["input_ids"]), **sample.per_token})
    width = max(map(len, samples)) if max_length is None else max_length
    return {**stack_tokens(rows, width, pad, side), **_join_media(samples, family)}


def _join_media(samples: Sequence[Sample], family: Family) -> dict[str, torch.Tensor]:
    """Join the media tensors of all samples along axis 0, as the family's layout declares them."""
    joined = {}
    for key in all_media_keys(samples):
        tensors = [sample.media.get(key) for sample in samples]
        if layout_of(key, family).owner == "sample":
            tensors = _one_row_each(key, tensors)
        joined[key] = join(key, [tensor for tensor in tensors if tensor is not None], family)
    return joined


def _one_row_each(key: str, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Add a row of zeros for each sample without this media tensor, so that rows and samples match."""
    like = next(tensor for tensor in tensors if tensor is not None)
    wrong = [tuple(t.shape) for t in tensors if t is not None and (t.dim() == 0 or len(t) != 1)]
    if wrong:
        raise ConfigError.of(key, wrong[0], "expected one entry along axis 0 for each sample")
    return [torch.zeros_like(like) if tensor is None else tensor for tensor in tensors]


def _media_layout(samples: Sequence[Sample], family: Family) -> dict[str, Any]:
    """Return the layout of each media tensor and its entries for each sample; nothing without media."""
    layouts = {key: layout_of(key, family) for key in all_media_keys(samples)}
    rows = {}
    for key, layout in layouts.items():
        absent = int(layout.owner == "sample")
        tensors = [sample.media.get(key) for sample in samples]
        rows[key] = torch.tensor([absent if tensor is None else len(tensor) for tensor in tensors])
    return {MEDIA_LAYOUT_KEY: layouts, MEDIA_ROWS_KEY: rows} if layouts else {}
