"""Collate functions for raw examples of Kimi-VL and Kimi K2.5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from packhorse.chat import Processor, is_transformers
from packhorse.collate.padded import pad_samples
from packhorse.collate.processor_call import call, can_encode, has_parameter, pad_token_id, text_ids
from packhorse.collate.raw_batched import collate_batched, decode, render_examples
from packhorse.collate.raw_examples import Batch, Example, collate_encoded
from packhorse.families import Encoder
from packhorse.families.kimi_k25 import media_pad_id


def kimi_vl_collate_fn(
    examples: Sequence[Mapping[str, Any]],
    processor: Processor,
    max_length: int | None = None,
    *,
    drop_overlong: bool = False,
) -> Batch:
    """Collate raw examples for Kimi-VL, without special tokens around the texts.

    Args:
        examples: in the documented format; they are not changed.
        processor: ``apply_chat_template(conversation, tokenize=False)`` returns a text, and
            ``processor(text=…, images=…, padding=…, add_special_tokens=False, return_tensors="pt")`` the
            tensors.
        max_length: every batch has this many tokens before the shift; longer samples are truncated as by
            :func:`~packhorse.collate_fns.default_collate_fn`. None pads to the longest sample.
        drop_overlong: drop longer samples instead.

    Returns:
        The batch as :func:`~packhorse.collate_fns.default_collate_fn` describes it; pixels stay as the
        processor returns them.

    Raises:
        BadSample: (a ``ValueError``) a media item cannot be loaded, or ``drop_overlong`` leaves no sample.
    """
    if not examples:
        return {}
    encoder = Encoder(processor)
    if can_encode(encoder):
        return collate_encoded(examples, encoder, max_length, drop_longer=drop_overlong)
    return collate_batched(examples, encoder, _call_kimi_vl, max_length, drop_longer=drop_overlong)


def _call_kimi_vl(examples: Sequence[Example], encoder: Encoder) -> Mapping[str, Any]:
    images = [image for example in examples for image in decode(example, encoder).media.images]
    options: dict[str, Any] = {"images": images} if images else {}
    options |= {"add_special_tokens": False, "padding": True, "return_tensors": "pt"}
    batch: Mapping[str, Any] = call(encoder.processor, text=render_examples(examples, encoder), **options)
    return batch


def _expand_image_tokens(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    grid_thws: torch.Tensor,
    media_token_id: int,
    merge_kernel_size: tuple[int, int] = (2, 2),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat each image placeholder once per token of its image.

    Args:
        input_ids: [S], one ``media_token_id`` for each image.
        attention_mask: [S].
        grid_thws: [N, 3], (t, h, w) of each image in patches.
        media_token_id: the placeholder.
        merge_kernel_size: patches along height and width that become one token.

    Returns:
        (ids, mask), longer by ``(h // 2) * (w // 2) - 1`` for each image. Unchanged if the ids hold no
        placeholder, or one for each token already (some versions of the processor expand themselves).

    Raises:
        ValueError: there are more or fewer placeholders than images.
    """
    is_placeholder = input_ids == media_token_id
    placeholders = int(is_placeholder.sum())
    tokens = (grid_thws[:, -2] // merge_kernel_size[0]) * (grid_thws[:, -1] // merge_kernel_size[1])
    if placeholders in (0, int(tokens.sum())):
        return input_ids, attention_mask
    if placeholders != len(grid_thws):
        raise ValueError(
            f"{placeholders} placeholders (id {media_token_id}) in the ids for {len(grid_thws)} images: "
            "expected one each"
        )
    repeats = torch.ones_like(input_ids, dtype=torch.long)
    repeats[is_placeholder] = tokens.to(repeats.device)
    return torch.repeat_interleave(input_ids, repeats), torch.repeat_interleave(attention_mask, repeats)


def kimi_k25_vl_collate_fn(
    examples: Sequence[Mapping[str, Any]], processor: Processor, max_length: int | None = None
) -> Batch:
    """Collate raw examples for Kimi K2.5, with expanded image placeholders.

    So the length of a sequence does not change inside the model, as pipeline parallelism requires.

    Args:
        examples: in the documented format; they are not changed.
        processor: the model's own (``processor(text=…, medias=[{"type": "image", "image": …}])`` leaves one
            ``<|media_pad|>`` per image and returns ``grid_thws``), or transformers' (which expands itself).
        max_length: every batch has this many tokens before the shift; longer samples are cut, before the
            first media item that does not fit, and that is recorded in the ledger. None pads to the longest.

    Returns:
        The batch as :func:`~packhorse.collate_fns.default_collate_fn` describes it, padded on the right.
        Media whose tokens were cut are dropped and not counted. With ``grid_thws`` there is
        ``image_grid_hws``: the same without t.

    Raises:
        BadSample: (a ``ValueError``) a media item cannot be loaded.
        ValueError: placeholders and images differ in number.
    """
    if not examples:
        return {}
    encoder = Encoder(processor)
    if is_transformers(processor) and can_encode(encoder):
        batch = collate_encoded(examples, encoder, max_length, side="right")
    else:
        placeholder = frozenset({media_pad_id(encoder)})
        batch = collate_batched(examples, encoder, _call_kimi_k25, max_length, media_tokens=placeholder)
    if "grid_thws" in batch:
        batch["image_grid_hws"] = batch["grid_thws"][:, 1:]
    return batch


def _call_kimi_k25(examples: Sequence[Example], encoder: Encoder) -> Mapping[str, Any]:
    """Call the processor of the model's repository for each example, and expand the image placeholders."""
    texts = render_examples(examples, encoder)
    samples = [
        _encode_kimi_k25(text, decode(example, encoder).media.images, encoder)
        for text, example in zip(texts, examples, strict=True)
    ]
    return pad_samples(samples, encoder.family, pad_token_id(encoder.processor))


def _encode_kimi_k25(text: str, images: Sequence[Any], encoder: Encoder) -> dict[str, Any]:
    processor, options = encoder.processor, dict[str, Any]()
    if images and has_parameter(processor, "images") and not has_parameter(processor, "medias"):
        options["images"] = images
    elif images:
        options["medias"] = [{"type": "image", "image": image} for image in images]
    try:
        sample = dict(call(processor, text=text, return_tensors="pt", **options))
    except ValueError:
        if images:
            raise
        # The processor of the model's repository does not take text alone.
        sample = {"input_ids": torch.tensor(text_ids(encoder.tokenizer, text))}
    ids = sample["input_ids"].reshape(-1)
    mask = sample["attention_mask"].reshape(-1) if "attention_mask" in sample else torch.ones_like(ids)
    grids = sample.get("grid_thws")
    if grids is not None:
        pad = media_pad_id(encoder)
        if len(grids) and not bool((ids == pad).any()):
            raise ValueError(f"no placeholder (id {pad}) in the ids for {len(grids)} images")
        kernel = getattr(getattr(processor, "image_processor", None), "merge_kernel_size", None)
        merge = (int(kernel[0]), int(kernel[1])) if isinstance(kernel, list | tuple) else (2, 2)
        ids, mask = _expand_image_tokens(ids, mask, grids, pad, merge)
    return {**sample, "input_ids": ids, "attention_mask": mask}
