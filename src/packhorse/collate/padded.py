"""Padding: samples that are already encoded go in, one rectangular batch comes out.

Whose a media tensor's entries are is read from the family's layout, never guessed from a shape. Costs one
copy of every tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from packhorse.collate.finish import add_counts, cast_pixels, check_present, keys_of, row_order, shift_batch
from packhorse.collate.packer import all_media_keys, check_tokens, join, layout_of, stack_tokens, to_sample
from packhorse.collate.processor_call import pad_token_id
from packhorse.errors import BadSample, ConfigError
from packhorse.families import Family, family_of
from packhorse.pp_media import MEDIA_LAYOUT_KEY, MEDIA_ROWS_KEY
from packhorse.types import Sample


def pad_collate_fn(
    examples: Sequence[Mapping[str, Any]],
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
    samples, pad = _read(examples, family, needs_labels=True), pad_token_id(processor)
    return collate_samples(
        samples, family, pad, max_length, pixel_dtype=pixel_dtype, media_layout=media_layout
    )


def _read(examples: Sequence[Mapping[str, Any]], family: Family, *, needs_labels: bool) -> list[Sample]:
    """The samples of a batch from their dicts.

    Raises:
        ConfigError: ids or labels are missing, or an entry is neither media of the family nor a note.
    """
    needed = ("input_ids", "labels") if needs_labels else ("input_ids",)
    for place, example in enumerate(examples):
        missing = [key for key in needed if example.get(key) is None]
        if missing:
            what = f"sample {place} of the batch has no {missing[0]}, only {', '.join(example)}"
            hint = ": examples go through the function that packhorse.collate_fns.COLLATE_FNS has"
            raise ConfigError(what + (hint if "conversation" in example else ""))
    named = zip(examples, keys_of(examples), strict=True)
    return [to_sample(example, family, key, strict=True) for example, key in named]


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
    samples = ordered(samples, family)
    batch = _pad(samples, family, pad, max_length, side)
    if media_layout:
        batch |= whose_media(samples, family)
    counts = [sample.num_items for sample in samples]
    return shift_batch(add_counts(cast_pixels(batch, pixel_dtype), counts), family)


def ordered(samples: Sequence[Sample], family: Family) -> list[Sample]:
    """The samples in the order of the batch's rows; see :func:`~packhorse.collate.finish.row_order`."""
    # Before padding, only the tokens of a fake image are hidden.
    masks = (sample.tokens.get("attention_mask") for sample in samples)
    fakes = [mask is not None and not bool(mask.all()) for mask in masks]
    images = [int("image_grid_thw" in sample.media) for sample in samples]
    return [samples[place] for place in row_order(fakes, images, family)]


def pad_samples(
    samples: Sequence[Mapping[str, Any]],
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
    return _pad(_read(samples, family, needs_labels=needs_labels), family, pad, max_length, side)


def _pad(
    samples: Sequence[Sample], family: Family, pad: int, max_length: int | None, side: str = "right"
) -> dict[str, Any]:
    rows = []
    for place, sample in enumerate(samples):
        check_tokens(sample, f"sample {place} of the batch")
        _check_length(sample, max_length)
        rows.append({"attention_mask": torch.ones_like(sample.tokens["input_ids"]), **sample.per_token})
    width = max(map(len, samples)) if max_length is None else max_length
    return {**stack_tokens(rows, width, pad, side), **_join_media(samples, family)}


def _check_length(sample: Sample, max_length: int | None) -> None:
    if max_length is not None and len(sample) > max_length:
        raise BadSample(
            f"a sample of {len(sample)} tokens in a batch of max_length={max_length}: give the dataset the "
            "same max_length (PreTokenizedDatasetWrapper leaves such samples out, or cuts them where media "
            "allow)",
            reason="too_long",
            key=sample.key,
            stage="collate",
        )


# --- media ------------------------------------------------------------------------------------------------


def _join_media(samples: Sequence[Sample], family: Family) -> dict[str, torch.Tensor]:
    """The media tensors of all samples, joined along axis 0 as the family's layout says."""
    joined = {}
    for key in all_media_keys(samples):
        tensors = [sample.media.get(key) for sample in samples]
        if layout_of(key, family).owner == "sample":
            tensors = _row_for_each(key, tensors)
        joined[key] = join(key, [tensor for tensor in tensors if tensor is not None], family)
    return joined


def whose_media(samples: Sequence[Sample], family: Family) -> dict[str, Any]:
    """The layout of each media tensor, and its entries for each sample; nothing where there are no media."""
    layouts = {key: layout_of(key, family) for key in all_media_keys(samples)}
    rows = {}
    for key, layout in layouts.items():
        absent = int(layout.owner == "sample")
        given = [sample.media.get(key) for sample in samples]
        rows[key] = torch.tensor([absent if value is None else len(value) for value in given])
    return {MEDIA_LAYOUT_KEY: layouts, MEDIA_ROWS_KEY: rows} if layouts else {}


def _row_for_each(key: str, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Samples without a media item get a row of zeros, so that row and sample stay in step."""
    like = next(tensor for tensor in tensors if tensor is not None)
    wrong = [tuple(t.shape) for t in tensors if t is not None and (t.dim() == 0 or len(t) != 1)]
    if wrong:
        raise ConfigError(f"'{key}' of a sample has shape {wrong[0]}, expected one entry along axis 0")
    return [torch.zeros_like(like) if tensor is None else tensor for tensor in tensors]
