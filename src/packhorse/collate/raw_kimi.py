"""Collate functions for Kimi-VL and Kimi K2.5."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from packhorse.chat import TOKEN_KEYS, ChatProcessor, is_transformers, tokenizer_of
from packhorse.collate.finish import Counts
from packhorse.collate.padded import pad_samples
from packhorse.collate.processor_call import call, names, pad_token_id, text_ids
from packhorse.collate.raw_default import finish, padded_to
from packhorse.collate.raw_limit import Batch, within_length
from packhorse.collate.raw_media import _extract_media_from_conversations
from packhorse.collate.raw_prepare import Ready, hide_fakes, make_ready, rendered
from packhorse.families import Encoder, Family, family_of
from packhorse.families.kimi_k25 import KimiK25, KimiK25Remote, media_pad_id
from packhorse.types import MediaKind

_IDS = ("input_ids", "attention_mask")
# Patches, the grid that says how many each image (or chunk of a video) has, and what it is about.
_GRIDS: tuple[tuple[str, str, MediaKind], ...] = tuple(
    (key, layout.rows_from, layout.kinds[0])
    for family in (KimiK25Remote, KimiK25)
    for key, layout in family.layout.items()
    if layout.rows_from is not None
)


def kimi_vl_collate_fn(
    examples: Sequence[Mapping[str, Any]],
    processor: Any,
    max_length: int | None = None,
    *,
    drop_overlong: bool = False,
) -> Batch:
    """Render each conversation, then call the processor once, without special tokens around the texts.

    Args:
        examples: in the documented format; they are not changed.
        processor: ``apply_chat_template(conversation, tokenize=False)`` gives a text, and
            ``processor(text=…, images=…, padding=…, add_special_tokens=False, return_tensors="pt")`` the
            tensors.
        max_length: every batch has this many tokens before the shift; longer samples are truncated as by
            :func:`~packhorse.collate_fns.default_collate_fn`. None pads to the longest sample.
        drop_overlong: drop longer samples instead.

    Returns:
        The batch as :func:`~packhorse.collate_fns.default_collate_fn` describes it; pixels stay as the
        processor makes them.

    Raises:
        BadSample: (a ``ValueError``) a media item cannot be loaded, or ``drop_overlong`` leaves no sample.
    """
    if not examples:
        return {}
    family = family_of(processor)

    def make(ready: Sequence[Ready]) -> Batch:
        images, _ = _extract_media_from_conversations([one.turns for one in ready])
        options: dict[str, Any] = {"add_special_tokens": False, "padding": True}
        if images is not None:
            options["images"] = images
        texts = rendered(ready, processor, family)
        batch = dict(call(processor, text=texts, return_tensors="pt", **options))
        return padded_to(batch, processor, family, max_length)

    made = within_length(examples, processor, family, max_length, make, drop_overlong=drop_overlong)
    return finish(made.batch, made.ready, processor, family, made=made)


def _expand_image_tokens(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    grid_thws: torch.Tensor,
    media_token_id: int,
    merge_kernel_size: tuple[int, int] = (2, 2),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat each image placeholder as often as its image has tokens.

    Args:
        input_ids: [S], one ``media_token_id`` for each image.
        attention_mask: [S].
        grid_thws: [N, 3], (t, h, w) of each image in patches.
        media_token_id: the placeholder.
        merge_kernel_size: how many patches down and across become one token.

    Returns:
        (ids, mask), longer by ``(h // 2) * (w // 2) - 1`` for each image. As they are, where the ids hold no
        placeholder, or one for each token already (some versions of the processor expand themselves).

    Raises:
        ValueError: there are more or fewer placeholders than images.
    """
    places = input_ids == media_token_id
    found, tokens = int(places.sum()), _tokens_of(grid_thws, merge_kernel_size)
    if found == 0 or found == int(tokens.sum()):
        return input_ids, attention_mask
    if found != len(grid_thws):
        raise ValueError(
            f"{found} placeholders (id {media_token_id}) in the ids for {len(grid_thws)} images: "
            "expected one each"
        )
    repeats = torch.ones_like(input_ids, dtype=torch.long)
    repeats[places] = tokens.to(repeats.device)
    return torch.repeat_interleave(input_ids, repeats), torch.repeat_interleave(attention_mask, repeats)


def _tokens_of(grids: torch.Tensor, merge: tuple[int, int] = (2, 2)) -> torch.Tensor:
    return (grids[:, -2] // merge[0]) * (grids[:, -1] // merge[1])


def kimi_k25_vl_collate_fn(
    examples: Sequence[Mapping[str, Any]], processor: Any, max_length: int | None = None
) -> Batch:
    """Encode each sample, expand its image placeholders, and pad to one length before the model runs.

    So the length of a sequence does not change inside the model, as pipeline parallelism needs it.

    Args:
        examples: in the documented format; they are not changed.
        processor: the model's own (``processor(text=…, medias=[{"type": "image", "image": …}])`` leaves one
            ``<|media_pad|>`` per image and returns ``grid_thws``), or transformers' (which expands itself).
        max_length: every batch has this many tokens before the shift; longer samples are cut, before the
            first media item that does not fit, and that is recorded in the ledger. None pads to the longest.

    Returns:
        The batch as :func:`~packhorse.collate_fns.default_collate_fn` describes it. Media whose tokens were
        cut are dropped and not counted. With ``grid_thws`` there is ``image_grid_hws``: the same without t.

    Raises:
        BadSample: (a ``ValueError``) a media item cannot be loaded.
        ValueError: placeholders and images differ in number.
    """
    if not examples:
        return {}
    family = family_of(processor)
    ready = make_ready(examples, processor, family)
    pad = pad_token_id(processor)
    samples, counts = [], []
    for one, text in zip(ready, rendered(ready, processor, family), strict=True):
        sample = _encoded(one, text, processor, family)
        hidden = hide_fakes({key: sample[key][None] for key in _IDS}, [one], processor, family)
        sample["attention_mask"] = hidden["attention_mask"][0]
        if max_length is not None and len(sample["input_ids"]) > max_length:
            sample, kept = _cut(sample, one, processor, family, max_length)
        else:
            kept = Counter(ref.kind for ref in one.conversation.media)
        samples.append(sample)
        counts.append(kept)
    batch = pad_samples(samples, family, pad, max_length=max_length)
    if "grid_thws" in batch:
        batch["image_grid_hws"] = batch["grid_thws"][:, 1:]
    numbers = Counts([kept["image"] for kept in counts], [kept["video"] for kept in counts])
    return finish(batch, ready, processor, family, numbers)


def _encoded(one: Ready, text: str, processor: Any, family: Family) -> Batch:
    """One sample: tensors per token [S] and its media, placeholders expanded."""
    if is_transformers(processor):
        encoded = Encoder(processor, family).encode(one.decoded())
        return {**encoded.tokens, **encoded.media}
    images, options = one.media.images, dict[str, Any]()
    if images and names(processor, "images") and not names(processor, "medias"):
        options["images"] = images
    elif images:
        options["medias"] = [{"type": "image", "image": image} for image in images]
    try:
        sample = dict(call(processor, text=text, return_tensors="pt", **options))
    except ValueError:
        if images:
            raise
        # The model's own processor does not take text alone.
        sample = {"input_ids": torch.tensor(text_ids(tokenizer_of(processor), text))}
    ids = sample["input_ids"].reshape(-1)
    mask = sample["attention_mask"].reshape(-1) if "attention_mask" in sample else torch.ones_like(ids)
    grids = sample.get("grid_thws")
    if grids is not None:
        pad = media_pad_id(ChatProcessor(processor))
        if len(grids) and not bool((ids == pad).any()):
            raise ValueError(f"no placeholder (id {pad}) in the ids for {len(grids)} images")
        ids, mask = _expand_image_tokens(ids, mask, grids, pad, _merge_kernel(processor))
    return {**sample, "input_ids": ids, "attention_mask": mask}


def _merge_kernel(processor: Any) -> tuple[int, int]:
    found = getattr(getattr(processor, "image_processor", None), "merge_kernel_size", None)
    return (int(found[0]), int(found[1])) if isinstance(found, list | tuple) else (2, 2)


def _cut(
    sample: Batch, one: Ready, processor: Any, family: Family, max_length: int
) -> tuple[Batch, Counter[str]]:
    """The sample without what is after ``max_length``, or after the first media item that does not fit."""
    length, end = len(sample["input_ids"]), max_length
    kept: Counter[str] = Counter()
    for kind, first, after in _spans(sample, one, processor, family):
        if after >= max_length:  # the shift of labels cuts the last token
            end = min(end, first)
            break
        kept[kind] += 1
    what = f"{length} tokens are more than max_length={max_length}: {length - end} were cut"
    lost = len(one.conversation.media) - sum(kept.values())
    what += f", with {lost} media" if lost else ""
    one.records.record(one.conversation.key, "truncated", what, "cut")
    shorter = {key: value[:end] if key in TOKEN_KEYS else value for key, value in sample.items()}
    for rows_key, grid_key, kind in _GRIDS:
        if shorter.get(grid_key) is not None:
            units = sum(_units(one, kind, processor, family)[: kept[kind]])
            grid = shorter[grid_key][:units]
            rows = int(grid.prod(dim=1).sum())
            shorter[grid_key] = grid if units else None
            shorter[rows_key] = shorter[rows_key][:rows] if units else None
    return shorter, kept


def _spans(sample: Batch, one: Ready, processor: Any, family: Family) -> Iterator[tuple[MediaKind, int, int]]:
    """Kind, first and after-last token of each media item, in the order of the text."""
    ids = sample["input_ids"]
    pads = {
        "image": media_pad_id(ChatProcessor(processor)),
        "video": getattr(processor, "video_token_id", None),
    }
    places: dict[MediaKind, Iterator[int]] = {}
    tokens: dict[MediaKind, Iterator[int]] = {}
    for _, grid_key, kind in _GRIDS:
        if sample.get(grid_key) is not None:
            places[kind] = iter((ids == pads[kind]).nonzero().flatten().tolist())
            each = iter(_tokens_of(sample[grid_key], _merge_kernel(processor)).tolist())
            units = _units(one, kind, processor, family)
            tokens[kind] = iter([sum(islice(each, number)) for number in units])
    for ref in one.conversation.media:
        found = list(islice(places[ref.kind], next(tokens[ref.kind])))
        yield ref.kind, found[0], found[-1] + 1


def _units(one: Ready, kind: MediaKind, processor: Any, family: Family) -> list[int]:
    """How many rows of its grid each image or video has: one, or a row for each chunk of a video."""
    if kind == "image":
        return [1] * len(one.media.images)
    sizes = [size for found, size in one.media.sizes() if found == "video"]
    encoder = Encoder(processor, family)
    return [family.item_rows(encoder, "video_grid_thw", "video", size) for size in sizes]
