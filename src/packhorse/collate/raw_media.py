"""The media of raw conversations: collected, counted, converted, and their tokens estimated from headers.

Nothing here decodes a pixel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from PIL import Image

from packhorse.chat import CannotAlign, Processor, Turns, rejected_by_template, template_errors
from packhorse.collate.finish import Records
from packhorse.collate.raw_labels import _extract_assistant_text, tokens_or_nothing
from packhorse.errors import BadSample, ConfigError, list_some
from packhorse.families import Encoder
from packhorse.families.processor_call import plain_turns, render, text_ids, tolerated_errors
from packhorse.formats.estimate import image_config
from packhorse.media import image_size
from packhorse.media.images import image_tokens
from packhorse.types import MEDIA_KINDS, MediaRef

Keyed = TypeVar("Keyed", bound=Any)  # a sample or an example: it has a key


def _extract_media_from_conversations(
    conversations: Sequence[Turns],
) -> tuple[list[Any] | None, list[Any] | None]:
    """Return all images and all videos of a batch in the order of the text; None if there are none."""
    media = (ref for conversation in conversations for ref in _media(conversation))
    refs = [ref for ref in media if ref.source is not None]
    images = [ref.source for ref in refs if ref.kind == "image"]
    videos = [ref.source for ref in refs if ref.kind == "video"]
    return images or None, videos or None


def _count_media_per_sample(conversations: Sequence[Turns]) -> tuple[list[int], list[int]]:
    """Return the number of images and the number of videos of each conversation, as two lists."""
    kinds = [[ref.kind for ref in _media(conversation)] for conversation in conversations]
    return [found.count("image") for found in kinds], [found.count("video") for found in kinds]


def _ensure_rgb(conversations: Sequence[Turns]) -> Sequence[Turns]:
    """Convert every PIL image of the conversations to RGB, in place; return the conversations."""
    for conversation in conversations:
        for turn in conversation:
            content = turn.get("content")
            for part in content if isinstance(content, list) else ():
                image = part.get("image") if isinstance(part, dict) else None
                if isinstance(image, Image.Image) and image.mode != "RGB":
                    part["image"] = image.convert("RGB")
    return conversations


def _estimate_media_tokens(conversation: Turns, processor: Processor) -> int:
    """Estimate the tokens of a conversation's media beyond one placeholder each.

    Exact for listed families (brackets and timestamps around a media item are not counted); for others,
    images by the geometry of :func:`image_config`. A media item of unknown size, or one that cannot
    be read, counts 0. Reads one header per media item.
    """
    return _media_tokens(conversation, Encoder(processor))


def _media_tokens(conversation: Turns, encoder: Encoder) -> int:
    refs = [ref for ref in _media(conversation) if ref.source is not None]
    images = sum(ref.kind == "image" for ref in refs)
    return sum(max(0, _item_tokens(ref, images, encoder) - 1) for ref in refs)


def _item_tokens(ref: MediaRef, images: int, encoder: Encoder) -> int:
    try:
        if encoder.family.exact and ref.kind in encoder.family.kinds:
            return encoder.media_tokens(ref.kind, encoder.size_of(ref), images)
    except (BadSample, ValueError):
        return 0  # loading it raises the reason
    except tolerated_errors(encoder.processor):
        pass  # a stub with the class name of a listed processor
    config = image_config(encoder.processor)
    if ref.kind != "image" or config is None:
        return 0
    try:
        size = image_size(ref.source)
        return image_tokens(size, config["factor"], config["min_pixels"], config["max_pixels"])
    except (BadSample, ValueError):
        return 0


def _drop_overlong_samples(
    conversations: Sequence[Turns], processor: Processor, max_length: int | None
) -> tuple[list[Turns], list[int]]:
    """Drop conversations that are estimated to have more than ``max_length`` tokens.

    Counts the rendered text and, from headers, the media. Drops are logged and recorded in the ledger of the
    process as ``too_long``, without a key.

    Returns:
        (the conversations that are kept, their positions); all of them if ``max_length`` is None.

    Raises:
        BadSample: (a ``ValueError``) none is left.
    """
    if max_length is None:
        return list(conversations), list(range(len(conversations)))
    encoder = Encoder(processor)
    lengths = [token_length(conversation, encoder) for conversation in conversations]
    kept = _within(lengths, max_length, [""] * len(lengths), Records())
    return [conversations[index] for index in kept], kept


def drop_overlong(
    samples: Sequence[Keyed], lengths: Sequence[int], max_length: int, records: Records
) -> list[Keyed]:
    """Return the samples of a batch that are not longer than ``max_length``, and record the others.

    If all are longer it raises and records nothing: the caller decides what happens to them.
    """
    kept = _within(lengths, max_length, [sample.key for sample in samples], records)
    return [samples[index] for index in kept]


def _within(lengths: Sequence[int], max_length: int, keys: Sequence[str], records: Records) -> list[int]:
    too_long = [length for length in lengths if length > max_length]
    if too_long and len(too_long) == len(lengths):
        raise BadSample(
            f"all {len(lengths)} samples of the batch have more than max_length={max_length} tokens "
            f"({list_some(too_long, 8)})",
            reason="too_long",
            stage="collate",
        )
    for key, length in zip(keys, lengths, strict=True):
        if length > max_length:
            records.record(key, "too_long", f"{length} tokens are more than max_length={max_length}")
    return [index for index, length in enumerate(lengths) if length <= max_length]


def token_length(conversation: Turns, encoder: Encoder, key: str = "") -> int:
    """Estimate the tokens of a conversation from its text and from the headers of its media."""
    try:
        text = len(text_ids(encoder.tokenizer, render(encoder, plain_turns(conversation, encoder.family))))
    except template_errors() as error:
        raise rejected_by_template(error, key, "collate") from error
    except tolerated_errors(encoder.processor, CannotAlign, ConfigError):
        texts = map(_extract_assistant_text, conversation)  # a processor that cannot render
        text = sum(len(tokens_or_nothing(text, encoder)) for text in texts)
    return text + _media_tokens(conversation, encoder)


def _media(conversation: Turns) -> Iterator[MediaRef]:
    """Yield the media of raw turns; parts in another format are skipped."""
    for turn in conversation:
        content = turn.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in MEDIA_KINDS:
                options = {name: value for name, value in part.items() if name not in ("type", kind)}
                yield MediaRef(kind, part.get(kind), options)
