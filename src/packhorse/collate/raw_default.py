"""Collate functions for raw examples of most families, and of processors of no listed family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from packhorse.chat import Processor, pad_token_id, template_errors, token_keys
from packhorse.collate.finish import logger, sample_key
from packhorse.collate.packer import media_keys
from packhorse.collate.padded import pad_samples
from packhorse.collate.raw_batched import (
    call_with_texts,
    collate_batched,
    decode,
    media_options,
    render_examples,
    with_padding,
)
from packhorse.collate.raw_examples import Example, collate_encoded
from packhorse.encode.tokenized import Hook
from packhorse.errors import ConfigError
from packhorse.families import Encoder
from packhorse.families.processor_call import call, can_encode, padding_side, takes_grouped_options


def default_collate_fn(
    examples: Sequence[Mapping[str, Any]],
    processor: Processor,
    max_length: int | None = None,
    _post_tokenize_hook: Hook | None = None,
    *,
    drop_overlong: bool = False,
    pixel_dtype: torch.dtype | None = torch.bfloat16,
) -> dict[str, Any]:
    """Load the media of a batch, run the processor, label the answers, shift by one.

    Examples of a listed family are encoded one by one, so that what an example becomes does not depend on the
    others. For other processors ``apply_chat_template`` is called once for the whole batch.

    Args:
        examples: in the documented format; they are not changed. Media may be paths, bytes or decoded.
        processor: anything with ``apply_chat_template(conversations, tokenize=True, return_dict=True,
            return_tensors="pt", padding=…)``. Position ids are not added: models compute their own.
        max_length: every batch has this many tokens before the shift: shorter samples are padded, longer ones
            truncated (logged, and in the ledger as ``truncated``). A media item is never cut in two: a sample
            ends before the first one that does not fit. None pads to the longest sample.
        _post_tokenize_hook: called as ``hook(batch, processor) -> batch`` before labels are made.
        drop_overlong: drop samples that are longer than ``max_length`` instead (``too_long``).
        pixel_dtype: what pixels are cast to; None leaves them as the processor returns them.

    Returns:
        The processor's tensors, those per token [B, S - 1]; ``labels`` [B, S - 1], each the next token;
        ``n_images_per_sample``, ``n_videos_per_sample`` and ``n_audios_per_sample`` [B], each if there is
        any; they are not for the model. Tokens of fake images (``_injected_fake``) and padding have
        ``attention_mask`` 0. Rows come in the order of the examples, but for Qwen models those with a fake
        image come last. An empty batch gives ``{}``.

    Raises:
        BadSample: (a ``ValueError``) a media item cannot be loaded, text and media do not agree, or
            ``drop_overlong`` leaves no sample.
        ConfigError: (a ``ValueError``) the processor has no chat template.
    """
    if not examples:
        return {}
    if not hasattr(processor, "apply_chat_template"):
        why = "it has no apply_chat_template: use the function that packhorse.collate_fns.COLLATE_FNS has"
        why += " for it, or pad_collate_fn on encoded samples"
        raise ConfigError.of("processor", type(processor).__name__, why)
    encoder = Encoder(processor)
    if can_encode(encoder) and _post_tokenize_hook is None:
        return collate_encoded(
            examples, encoder, max_length, drop_longer=drop_overlong, pixel_dtype=pixel_dtype
        )
    return collate_batched(
        examples,
        encoder,
        _encode_and_pad if can_encode(encoder) else _apply_chat_template,
        max_length,
        hook=_post_tokenize_hook,
        drop_longer=drop_overlong,
        pixel_dtype=pixel_dtype,
    )


def _encode_and_pad(examples: Sequence[Example], encoder: Encoder) -> Mapping[str, Any]:
    samples = []
    for example in examples:
        with sample_key(example.key):
            encoded = encoder.encode(example.conversation)
        samples.append({**encoded.tokens, **encoded.media})
    processor = encoder.processor
    return pad_samples(samples, encoder.family, pad_token_id(processor), side=padding_side(processor))


def _apply_chat_template(examples: Sequence[Example], encoder: Encoder) -> Mapping[str, Any]:
    decoded = [decode(example, encoder) for example in examples]
    method = encoder.processor.apply_chat_template
    conversations = [[dict(turn) for turn in item.turns] for item in decoded]  # some processors change them
    options = with_padding(media_options(decoded, encoder), encoder)
    if takes_grouped_options(method):
        options = {"processor_kwargs": options}
    # No fixed length: a longer row would make a ragged batch, which processors reject.
    options |= {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    try:
        batch: Mapping[str, Any] = call(method, conversations, **options)
    except template_errors():
        render_examples(examples, encoder)  # raises with the key of the example that is rejected
        raise
    media = sum(len(example.conversation.media) for example in examples)
    if media and len(token_keys(batch, media_keys(encoder.family))) == len(batch):
        name = type(encoder.processor).__name__
        logger.warning("%s.apply_chat_template returned no tensor for the %d media of the batch", name, media)
    return batch


def llava_onevision_collate_fn(
    examples: Sequence[Mapping[str, Any]],
    processor: Processor,
    max_length: int | None = None,
    *,
    drop_overlong: bool = False,
) -> dict[str, Any]:
    """Collate raw examples for LLaVA-OneVision; see :func:`default_collate_fn`.

    The number of images in a sample decides how many tokens each has: one alone is tiled, several are not.
    """
    return default_collate_fn(examples, processor, max_length, drop_overlong=drop_overlong)


def qwen2_5_collate_fn(examples: Sequence[Mapping[str, Any]], processor: Processor) -> dict[str, Any]:
    """Collate raw examples for Qwen2.5-VL.

    Args:
        examples: in the documented format; they are not changed.
        processor: ``apply_chat_template(conversation, tokenize=False)`` returns a text, and
            ``processor(text=…, images=…, videos=…, padding=True, return_tensors="pt")`` the tensors.

    Returns:
        The batch as :func:`~packhorse.collate_fns.default_collate_fn` describes it, padded to the longest
        sample; pixels stay as the processor returns them.

    Raises:
        BadSample: (a ``ValueError``) a media item cannot be loaded, or text and media do not agree.
    """
    if not examples:
        return {}
    encoder = Encoder(processor)
    if can_encode(encoder):
        return collate_encoded(examples, encoder)
    return collate_batched(examples, encoder, _call_with_texts)


def _call_with_texts(examples: Sequence[Example], encoder: Encoder) -> Mapping[str, Any]:
    decoded = [decode(example, encoder) for example in examples]
    images = [image for item in decoded for image in item.media.images]
    videos = [video.frames for item in decoded for video in item.media.videos]
    options = with_padding(media_options(decoded, encoder), encoder)
    return call_with_texts(examples, encoder, images=images, videos=videos, **options)
