"""The collate function for Phi-4-multimodal: sound, images, or both."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import torch

from packhorse.chat import is_transformers, tokenizer_of
from packhorse.collate.finish import Counts, named
from packhorse.collate.processor_call import call, names
from packhorse.collate.raw_default import finish
from packhorse.collate.raw_limit import Batch
from packhorse.collate.raw_prepare import Opened, decode, hide_fakes, open_batch, rendered
from packhorse.errors import ConfigError
from packhorse.families import Encoder, Family, Generic, family_of
from packhorse.formats.conversation import extra_audio
from packhorse.media import load_audio

_IMAGE_KEYS = ("input_image_embeds", "image_pixel_values", "image_sizes", "image_attention_mask")
_TEXT, _IMAGE, _AUDIO = 0, 1, 2  # input_mode; an image and sound together are 3


def phi4_mm_collate_fn(examples: Sequence[Mapping[str, Any]], processor: Any) -> Batch:
    """Render each conversation, then call the processor once with all texts, sounds and images.

    Args:
        examples: in the documented format; they are not changed. Sound is a part of the conversation, or an
            ``audio`` field beside it (an (array, rate) pair, a dict with ``array`` and ``sampling_rate``, a
            file, or a list of them) whose placeholder the text has typed out, as
            :func:`packhorse.datasets.make_cv17_dataset` does.
        processor: the model's own, which takes ``audios`` as (array, rate) pairs, or transformers', which
            takes ``audio`` as arrays (they are resampled for it). Where only its tokenizer has a chat
            template, as the released one has, that is used; its turns are texts with typed placeholders.

    Returns:
        The batch as :func:`~packhorse.collate_fns.default_collate_fn` describes it, padded to the longest
        sample; pixels stay as the processor makes them. ``input_mode`` [1] is 0 for text, 1 with images, 2
        with sound, 3 with both, if the processor does not set it. A batch without images has no image keys.

    Raises:
        BadSample: (a ``ValueError``) a media item cannot be loaded.
    """
    if not examples:
        return {}
    processor = _with_template(processor)
    family = family_of(processor)
    # For other processors a placeholder is typed out as they want it, and the sound stays beside.
    placed = is_transformers(processor) and not isinstance(family, Generic)
    opened = open_batch(examples, processor, family, sound=placed)
    sounds = [_sounds(one, family) for one in opened]
    ready = decode(opened, processor, family, check=placed)
    sounds = [found or list(one.media.audios) for found, one in zip(sounds, ready, strict=True)]
    images = [one.media.images for one in ready]
    options = _options(sounds, images, processor, family)
    texts = rendered(ready, processor, family)
    batch = dict(call(processor, text=texts, return_tensors="pt", **options))
    if not any(images):
        batch = {key: value for key, value in batch.items() if key not in _IMAGE_KEYS}
    if batch.get("input_mode") is None:
        mode = (_IMAGE if any(images) else _TEXT) + (_AUDIO if any(sounds) else _TEXT)
        batch["input_mode"] = torch.tensor([mode])
    counts = Counts([len(found) for found in images], audios=[len(found) for found in sounds])
    return finish(hide_fakes(batch, ready, processor, family), ready, processor, family, counts)


def _with_template(processor: Any) -> Any:
    """The processor, or a copy that renders with its tokenizer's chat template where it has none itself."""
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

    copied = copy.copy(processor)
    copied.chat_template = tokenizer.chat_template
    copied.apply_chat_template = apply_chat_template
    return copied


def _as_text(content: Any, placeholders: Mapping[str, str], numbers: Mapping[str, Any]) -> str:
    """The content of a turn as one text, with a placeholder for each media item."""
    if isinstance(content, str):
        return content
    return "".join(
        part["text"]
        if part["type"] == "text"
        else placeholders.get(part["type"]) or f"<|{part['type']}_{next(numbers[part['type']])}|>"
        for part in content
    )


def _sounds(one: Opened, family: Family) -> list[tuple[Any, int]]:
    """The (array, rate) pairs beside the conversation of a sample, at their own rate.

    Raises:
        BadSample: there is sound in the conversation too, or one is too short.
    """
    beside = extra_audio(one.example)
    if beside and any(ref.kind == "audio" for ref in one.conversation.media):
        raise family.bad("sound beside the conversation ('audio') and in it", one.conversation)
    with named(one.conversation.key):
        sounds = [load_audio(source) for source in beside]
    for array, rate in sounds:
        if len(array) * family.sampling_rate < family.least_samples * rate:
            what = f"{len(array)} samples at {rate:,} Hz are too short for {family.name}"
            raise family.bad(what, one.conversation, "broken_media")
    return sounds


def _options(
    sounds: Sequence[Sequence[tuple[Any, int]]],
    images: Sequence[Sequence[Any]],
    processor: Any,
    family: Family,
) -> dict[str, Any]:
    pairs = [pair for found in sounds for pair in found]
    pictures = [image for found in images for image in found]
    options: dict[str, Any] = {}
    if is_transformers(processor):
        options["text_kwargs"] = {"padding": True}
        options |= {"images": [list(found) for found in images]} if pictures else {}
    else:
        options |= {"padding": True, **({"images": pictures} if pictures else {})}
    if pairs and names(processor, "audio") and not names(processor, "audios"):
        rate = family.sampling_rate
        options["audio"] = [load_audio(pair, sampling_rate=rate)[0] for pair in pairs]
        options |= {"audio_kwargs": {"sampling_rate": rate}} if is_transformers(processor) else {}
    elif pairs:
        options["audios"] = pairs
    return options
