"""The collate function for raw examples of Phi-4-multimodal: audio, images, or both."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import torch

from packhorse.chat import Processor, is_transformers, tokenizer_of
from packhorse.collate.finish import sample_key
from packhorse.collate.processor_call import call, can_encode, has_parameter
from packhorse.collate.raw_batched import collate_batched, decode, render_examples, with_padding
from packhorse.collate.raw_examples import Batch, Example, collate_encoded
from packhorse.errors import ConfigError
from packhorse.families import Encoder
from packhorse.formats.conversation import extra_audio
from packhorse.media import load_audio

_IMAGE_KEYS = ("input_image_embeds", "image_pixel_values", "image_sizes", "image_attention_mask")
_TEXT, _IMAGE, _AUDIO = 0, 1, 2  # input_mode; an image and audio together are 3


def phi4_mm_collate_fn(examples: Sequence[Mapping[str, Any]], processor: Processor) -> Batch:
    """Collate raw examples for Phi-4-multimodal.

    Args:
        examples: in the documented format; they are not changed. Audio is a part of the conversation, or an
            ``audio`` field next to it (an (array, rate) pair, a dict with ``array`` and ``sampling_rate``, a
            file, or a list of them) whose placeholder the text has typed out, as
            :func:`packhorse.datasets.make_cv17_dataset` does.
        processor: the model's own, which takes ``audios`` as (array, rate) pairs, or transformers', which
            takes ``audio`` as arrays (they are resampled for it). If only its tokenizer has a chat template,
            as the released one has, that is used; its turns are texts with typed placeholders.

    Returns:
        The batch as :func:`~packhorse.collate_fns.default_collate_fn` describes it, padded to the longest
        sample; pixels stay as the processor returns them. ``input_mode`` [1] is 0 for text, 1 with images, 2
        with audio, 3 with both, if the processor does not set it. A batch without images has no image keys.

    Raises:
        BadSample: (a ``ValueError``) a media item cannot be loaded.
    """
    if not examples:
        return {}
    encoder = Encoder(_with_template(processor))
    if is_transformers(processor) and can_encode(encoder):
        batch = collate_encoded(examples, encoder)
    else:
        # The placeholders are typed as the processor requires, and the audio stays next to them.
        batch = collate_batched(examples, encoder, _call_phi4, place_audio=False)
        clips = [_audio_clips(example) for example in examples]
        if any(clips):
            batch["n_audios_per_sample"] = torch.tensor(clips)
    if "n_images_per_sample" not in batch:
        batch = {key: value for key, value in batch.items() if key not in _IMAGE_KEYS}
    if batch.get("input_mode") is None:
        image = _IMAGE if "n_images_per_sample" in batch else _TEXT
        batch["input_mode"] = torch.tensor([image + (_AUDIO if "n_audios_per_sample" in batch else _TEXT)])
    return batch


def _with_template(processor: Processor) -> Any:
    """Return the processor, or a copy that renders with its tokenizer's template if it has none itself."""
    tokenizer = tokenizer_of(processor)
    renders = hasattr(processor, "apply_chat_template") and (
        getattr(processor, "chat_template", "its own way") is not None
    )
    if renders or getattr(tokenizer, "chat_template", None) is None:
        return processor
    placeholders: dict[str, str] = {}
    with suppress(ConfigError):  # the model's own processor numbers them
        placeholders = {str(kind): text for kind, text in Encoder(processor).placeholders.items()}

    def apply_chat_template(turns: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        numbers = {"image": count(1), "audio": count(1)}
        texts = [{**turn, "content": _as_text(turn["content"], placeholders, numbers)} for turn in turns]
        return call(tokenizer.apply_chat_template, texts, **options)

    copied: Any = copy.copy(processor)
    copied.chat_template = tokenizer.chat_template
    copied.apply_chat_template = apply_chat_template
    return copied


def _as_text(content: Any, placeholders: Mapping[str, str], numbers: Mapping[str, Iterator[int]]) -> str:
    """Return the content of a turn as one text, with a placeholder for each media item."""
    if isinstance(content, str):
        return content
    return "".join(
        part["text"]
        if part["type"] == "text"
        else placeholders.get(part["type"]) or f"<|{part['type']}_{next(numbers[part['type']])}|>"
        for part in content
    )


def _audio_clips(example: Mapping[str, Any]) -> int:
    """Return the number of audio clips in an example, next to its conversation or in it."""
    contents = (turn["content"] for turn in example["conversation"])
    parts = (part for content in contents if not isinstance(content, str) for part in content)
    return len(extra_audio(example)) + len([part for part in parts if part["type"] == "audio"])


def _extra_audio(example: Example, encoder: Encoder) -> list[tuple[Any, int]]:
    """Return the (array, rate) pairs next to a conversation, each at its own rate.

    Raises:
        BadSample: there is audio in the conversation too, or a clip is too short.
    """
    family, sources = encoder.family, extra_audio(example.values)
    if sources and any(ref.kind == "audio" for ref in example.conversation.media):
        raise family.bad("audio next to the conversation ('audio') and in it", example.conversation)
    with sample_key(example.key):
        clips = [load_audio(source) for source in sources]
    for array, rate in clips:
        if len(array) * family.sampling_rate < family.least_samples * rate:
            detail = f"{len(array)} samples at {rate:,} Hz are too short for {family.name}"
            raise family.bad(detail, example.conversation, "broken_media")
    return clips


def _call_phi4(examples: Sequence[Example], encoder: Encoder) -> Mapping[str, Any]:
    processor, rate = encoder.processor, encoder.family.sampling_rate
    decoded = [decode(example, encoder).media for example in examples]
    clips = [
        clip
        for example, media in zip(examples, decoded, strict=True)
        for clip in _extra_audio(example, encoder) or media.audios
    ]
    options = with_padding({}, encoder)
    if any(media.images for media in decoded):
        nested = [list(media.images) for media in decoded]
        options["images"] = nested if is_transformers(processor) else [i for images in nested for i in images]
    if clips and has_parameter(processor, "audio") and not has_parameter(processor, "audios"):
        options["audio"] = [load_audio(clip, sampling_rate=rate)[0] for clip in clips]
        options |= {"audio_kwargs": {"sampling_rate": rate}} if is_transformers(processor) else {}
    elif clips:
        options["audios"] = clips
    texts = render_examples(examples, encoder)
    batch: Mapping[str, Any] = call(processor, text=texts, return_tensors="pt", **options)
    return batch
