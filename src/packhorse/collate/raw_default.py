"""The collate function for Qwen2.5-VL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from packhorse.chat import IGNORE_INDEX, chat_template, is_transformers, template_errors
from packhorse.collate.finish import Counts, cast_pixels, counted, per_token, shifted
from packhorse.collate.packer import pad_last
from packhorse.collate.padded import pad_samples
from packhorse.collate.processor_call import call, logger, pad_token_id, padding_side, takes_grouped_options
from packhorse.collate.raw_labels import make_labels, report_unsupervised
from packhorse.collate.raw_limit import Batch, Hook, Made, cut_rows, within_length
from packhorse.collate.raw_media import _extract_media_from_conversations, count_turns
from packhorse.collate.raw_prepare import (
    Ready,
    all_media,
    flat_options,
    grouped_options,
    hide_fakes,
    make_ready,
    rendered,
)
from packhorse.errors import ConfigError
from packhorse.families import Encoder, Family, Generic, family_of

__all__ = ["Batch", "Hook", "default_collate_fn", "finish", "llava_onevision_collate_fn", "padded_to"]


def default_collate_fn(
    examples: Sequence[Mapping[str, Any]],
    processor: Any,
    max_length: int | None = None,
    _post_tokenize_hook: Hook | None = None,
    *,
    drop_overlong: bool = False,
    pixel_dtype: torch.dtype | None = torch.bfloat16,
) -> Batch:
    """Load the media of a batch, run the processor once, label the answers, shift by one.

    A batch with videos of a family that Packhorse knows is encoded sample by sample and joined: processors
    differ in which videos they take in one call (one alone, equally long ones, one rate for all).

    Args:
        examples: in the documented format; they are not changed. Media may be paths, bytes or decoded.
        processor: anything with ``apply_chat_template(conversations, tokenize=True, return_dict=True,
            return_tensors="pt", padding=…)``. Position ids are not made up: models compute their own.
        max_length: every batch has this many tokens before the shift: shorter samples are padded, longer ones
            truncated (logged, and in the ledger as ``truncated``). A media item is never cut in two: a sample
            ends before the first one that does not fit. None pads to the longest sample.
        _post_tokenize_hook: called as ``hook(batch, processor) -> batch`` before labels are made.
        drop_overlong: drop samples that are longer than ``max_length`` instead (``too_long``).
        pixel_dtype: what pixels are cast to; None leaves them as the processor makes them.

    Returns:
        The processor's tensors, those per token [B, S - 1]; ``labels`` [B, S - 1], each the next token;
        ``n_images_per_sample``, ``n_videos_per_sample`` and ``n_audios_per_sample`` [B], each where there is
        any; they are not for the model. Tokens of fake images
        (``_injected_fake``) and padding have ``attention_mask`` 0. Rows come in the order of the examples,
        but for Qwen models those with a fake image come last. An empty batch gives ``{}``.

    Raises:
        BadSample: (a ``ValueError``) a media item cannot be loaded, text and media do not agree, or
            ``drop_overlong`` leaves no sample.
        ConfigError: (a ``ValueError``) the processor has no chat template.
    """
    if not examples:
        return {}
    family = family_of(processor)
    if not hasattr(processor, "apply_chat_template"):
        raise ConfigError(
            f"{type(processor).__name__} has no apply_chat_template: use the function that "
            "packhorse.collate_fns.COLLATE_FNS has for it, or pad_collate_fn on encoded samples"
        )

    def make(ready: Sequence[Ready]) -> Batch:
        try:
            batch = _tokenised(ready, processor, family, max_length)
        except template_errors():
            rendered(ready, processor, family)  # says which one it refuses
            raise
        _check_media(batch, ready, processor, family)
        return batch

    made = within_length(
        examples, processor, family, max_length, make, _post_tokenize_hook, drop_overlong=drop_overlong
    )
    return finish(cast_pixels(made.batch, pixel_dtype), made.ready, processor, family, made=made)


def llava_onevision_collate_fn(
    examples: Sequence[Mapping[str, Any]],
    processor: Any,
    max_length: int | None = None,
    *,
    drop_overlong: bool = False,
) -> Batch:
    """:func:`default_collate_fn` for LLaVA-OneVision.

    Images are handed over sample by sample, which decides how many tokens each has: one alone is tiled,
    several are not.
    """
    return default_collate_fn(examples, processor, max_length, drop_overlong=drop_overlong)


def finish(
    batch: Mapping[str, Any],
    ready: Sequence[Ready],
    processor: Any,
    family: Family,
    counts: Counts | None = None,
    made: Made | None = None,
) -> Batch:
    """Labels, the cut to the length limit, counts and the shift.

    Args:
        batch: tensors per token [B, S], and media.
        ready: what it was made of.
        processor: made it.
        family: the processor's.
        counts: media of each sample, where they are not those of the conversations.
        made: where the batch has a length limit: the limit, and how long its rows are.
    """
    conversations = [one.turns for one in ready]
    labels = make_labels(batch["input_ids"], conversations, processor)
    if "attention_mask" in batch:
        labels = labels.masked_fill(batch["attention_mask"] == 0, IGNORE_INDEX)
    labelled = {**batch, "labels": labels}
    if made is not None:
        # After labels are made: answers are found more surely in whole rows.
        labelled = cut_rows(labelled, made, processor, family)
    report_unsupervised(labelled["labels"], [one.conversation.key for one in ready], ready[0].records)
    return shifted(counted(labelled, counts or count_turns(conversations)), family)


def _tokenised(ready: Sequence[Ready], processor: Any, family: Family, max_length: int | None) -> Batch:
    films = any(one.media.videos for one in ready)
    if films and is_transformers(processor) and not isinstance(family, Generic):
        return _one_by_one(ready, processor, family, max_length)
    method = processor.apply_chat_template
    conversations = [[dict(turn) for turn in one.turns] for one in ready]  # some write into them
    options: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    if not takes_grouped_options(method):
        # A fixed length is not asked for: a longer row would make a ragged batch, which processors refuse.
        batch = dict(call(method, conversations, **options, padding=True, **flat_options(ready, family)))
        return padded_to(batch, processor, family, max_length)
    grouped = grouped_options(ready, processor, family)
    # Not as plain options: those reach the extractor of sound too, which would pad and cut by them.
    text = {**grouped.get("text_kwargs", {}), "padding": True}
    options["processor_kwargs"] = {**grouped, "text_kwargs": text}
    if not isinstance(family, Generic):
        # One of them takes another template when it sees a video.
        options["chat_template"] = chat_template(processor)
    batch = dict(call(method, conversations, **options))
    if len(batch["input_ids"]) != len(ready) and not isinstance(family, Generic):
        # SmolVLM's processor in transformers 5.12 drops rows without images from a batch with images.
        return _one_by_one(ready, processor, family, max_length)
    return padded_to(batch, processor, family, max_length)


def _check_media(batch: Batch, ready: Sequence[Ready], processor: Any, family: Family) -> None:
    """Notice a processor whose template tokenises and forgets the media."""
    media = all_media(ready)
    number = len(media.images) + len(media.videos) + len(media.audios)
    if not number or any(key not in per_token(batch, family) for key in batch):
        return
    name = type(processor).__name__
    what = f"{name}.apply_chat_template returned no tensor for the {number} media of the batch"
    if not isinstance(family, Generic):
        raise ConfigError(f'{what}: use packhorse.collate_fns.COLLATE_FNS["{name}"]')
    logger.warning(what)


def _one_by_one(ready: Sequence[Ready], processor: Any, family: Family, max_length: int | None) -> Batch:
    samples, encoder = [], Encoder(processor, family)
    for one in ready:
        encoded = encoder.encode(one.decoded())
        samples.append({**encoded.tokens, **encoded.media})
    side = padding_side(processor)
    batch = pad_samples(samples, family, pad_token_id(processor), side=side)
    return padded_to(batch, processor, family, max_length)


def padded_to(batch: Batch, processor: Any, family: Family, width: int | None) -> Batch:
    """The batch with its tensors per token filled up to ``width`` on the processor's side."""
    if width is None or batch["input_ids"].shape[1] >= width:
        return batch
    pad, side = pad_token_id(processor), padding_side(processor)
    filled = {
        key: pad_last(batch[key], width, pad if key == "input_ids" else 0, side)
        for key in per_token(batch, family)
    }
    return {**batch, **filled}


def qwen2_5_collate_fn(examples: Sequence[Mapping[str, Any]], processor: Any) -> Batch:
    """Render each conversation, then call the processor once with all texts, images and videos.

    Args:
        examples: in the documented format; they are not changed.
        processor: ``apply_chat_template(conversation, tokenize=False)`` gives a text, and
            ``processor(text=…, images=…, videos=…, padding=True, return_tensors="pt")`` the tensors.

    Returns:
        The batch as :func:`~packhorse.collate_fns.default_collate_fn` describes it, padded to the longest
        sample; pixels stay as the processor makes them.

    Raises:
        BadSample: (a ``ValueError``) a media item cannot be loaded, or text and media do not agree.
    """
    if not examples:
        return {}
    family = family_of(processor)
    ready = make_ready(examples, processor, family)
    images, videos = _extract_media_from_conversations([one.turns for one in ready])
    options: dict[str, Any] = {"images": images, "videos": videos}
    options = {name: value for name, value in options.items() if value is not None}
    if is_transformers(processor):
        options |= grouped_options(ready, processor, family)
        options["text_kwargs"] = {**options.get("text_kwargs", {}), "padding": True}
    else:
        options |= {"padding": True, **flat_options(ready, family)}
    batch = dict(call(processor, text=rendered(ready, processor, family), return_tensors="pt", **options))
    return finish(hide_fakes(batch, ready, processor, family), ready, processor, family)
