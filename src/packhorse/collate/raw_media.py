"""The media of conversations: found, counted, converted, and their tokens estimated from headers.

Nothing here decodes a pixel but :func:`_ensure_rgb`, which gets decoded images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from PIL import Image

from packhorse.chat import CannotAlign, template_errors, tokenizer_of
from packhorse.collate.finish import Counts, Records
from packhorse.collate.processor_call import Turns, plain_turns, render, text_ids, tolerated
from packhorse.collate.raw_labels import _extract_assistant_text
from packhorse.errors import BadSample, ConfigError
from packhorse.families import Encoder, Family, family_of
from packhorse.formats.estimate import image_config, image_tokens
from packhorse.media import image_size
from packhorse.types import MEDIA_KINDS, Conversation, MediaRef


class _Sample(Protocol):
    """What a sample of a batch has to name it by, opened or decoded."""

    @property
    def conversation(self) -> Conversation: ...
    @property
    def records(self) -> Records: ...


Named = TypeVar("Named", bound=_Sample)


def _extract_media_from_conversations(
    conversations: Sequence[Turns],
) -> tuple[list[Any] | None, list[Any] | None]:
    """All images and all videos of a batch in the order of the text, as the parts hold them.

    Returns:
        (images, videos), each None where there is none.
    """
    found = (ref for conversation in conversations for ref in _media(conversation))
    refs = [ref for ref in found if ref.source is not None]
    images = [ref.source for ref in refs if ref.kind == "image"]
    videos = [ref.source for ref in refs if ref.kind == "video"]
    return images or None, videos or None


def _count_media_per_sample(conversations: Sequence[Turns]) -> tuple[list[int], list[int]]:
    """How many images and how many videos each conversation has: two lists as long as ``conversations``."""
    images, videos, _ = count_turns(conversations)
    return list(images), list(videos)


def count_turns(conversations: Sequence[Turns]) -> Counts:
    """How many media of each kind each conversation has."""
    kinds = [[ref.kind for ref in _media(conversation)] for conversation in conversations]
    return Counts(*([found.count(kind) for found in kinds] for kind in ("image", "video", "audio")))


def _ensure_rgb(conversations: Sequence[Turns]) -> Sequence[Turns]:
    """Convert every PIL image of the conversations to RGB, in place; the conversations come back."""
    for conversation in conversations:
        for turn in conversation:
            content = turn.get("content")
            for part in content if isinstance(content, list) else ():
                image = part.get("image") if isinstance(part, dict) else None
                if isinstance(image, Image.Image) and image.mode != "RGB":
                    part["image"] = image.convert("RGB")
    return conversations


def _extract_image_config(processor: Any) -> dict[str, int] | None:
    """The geometry by which Qwen-like image processors cut images into tokens; None where there is none.

    Returns:
        ``patch_size``, ``merge_size``, ``factor`` (pixels along a token's side), ``min_pixels`` and
        ``max_pixels``; see :func:`packhorse.formats.estimate.image_config`.
    """
    return image_config(processor)


def _estimate_media_tokens(conversation: Turns, processor: Any) -> int:
    """Tokens that the media of a conversation have beyond one placeholder each.

    Exact for families that Packhorse knows (brackets and timestamps around a media item are not counted); for
    others, images by the geometry of :func:`_extract_image_config`. A media item whose size cannot be told,
    or that cannot be read, adds nothing. Costs a header per media item.
    """
    family = family_of(processor)
    refs = [ref for ref in _media(conversation) if ref.source is not None]
    images = sum(ref.kind == "image" for ref in refs)
    return sum(max(0, _tokens(family, processor, ref, images) - 1) for ref in refs)


def _tokens(family: Family, processor: Any, ref: MediaRef, images: int) -> int:
    if family.exact and ref.kind in family.kinds:
        try:
            encoder = Encoder(processor, family)
            return encoder.media_tokens(ref.kind, encoder.size_of(ref), images)
        except (BadSample, ValueError):
            return 0  # it cannot be read, or the processor will refuse it; who loads it says why
        except tolerated(processor):
            pass  # a small object by the name of a known class
    config = _extract_image_config(processor)
    if ref.kind != "image" or config is None:
        return 0
    try:
        height, width = image_size(ref.source)
        return image_tokens(height, width, config)
    except (BadSample, ValueError):
        return 0


def _drop_overlong_samples(
    conversations: Sequence[Turns], processor: Any, max_length: int | None
) -> tuple[list[Turns], list[int]]:
    """Leave out conversations that have more than ``max_length`` tokens, as far as can be told beforehand.

    Counts the rendered text and, from headers, the media. What is dropped is logged and recorded in the
    process's ledger as ``too_long``, without a name.

    Returns:
        (the conversations that are kept, their positions); all of them where ``max_length`` is None.

    Raises:
        BadSample: (a ``ValueError``) none is left.
    """
    if max_length is None:
        return list(conversations), list(range(len(conversations)))
    lengths = [token_length(conversation, processor) for conversation in conversations]
    kept = _fitting(lengths, max_length, [""] * len(lengths), Records())
    return [conversations[place] for place in kept], kept


def drop_turn(samples: Sequence[Named], lengths: Sequence[int], max_length: int) -> list[Named]:
    """Those samples of a batch that are not longer than ``max_length``; the others are recorded.

    Raises:
        BadSample: all are longer. Then nothing is recorded: whoever catches it decides what becomes of them.
    """
    keys = [sample.conversation.key for sample in samples]
    return [samples[place] for place in _fitting(lengths, max_length, keys, samples[0].records)]


def _fitting(lengths: Sequence[int], max_length: int, keys: Sequence[str], records: Records) -> list[int]:
    too_long = [length for length in lengths if length > max_length]
    if too_long and len(too_long) == len(lengths):
        raise BadSample(
            f"all {len(lengths)} samples of the batch have more than max_length={max_length} tokens "
            f"({', '.join(map(str, too_long[:8]))}{', …' if len(too_long) > 8 else ''})",
            reason="too_long",
            stage="collate",
        )
    for key, length in zip(keys, lengths, strict=True):
        if length > max_length:
            records.record(key, "too_long", f"{length} tokens are more than max_length={max_length}")
    return [place for place, length in enumerate(lengths) if length <= max_length]


def token_length(conversation: Turns, processor: Any, key: str = "") -> int:
    """How many tokens a conversation has, as far as can be told from its text and from headers.

    Raises:
        BadSample: the chat template refuses it.
    """
    family = family_of(processor)
    tokenizer = tokenizer_of(processor)
    turns = plain_turns(conversation, family)
    try:
        text = len(text_ids(tokenizer, render(processor, family, turns)))
    except template_errors() as error:
        raise BadSample(
            f"the chat template refuses it: {error}", reason="wrong_format", key=key, stage="collate"
        ) from error
    except tolerated(processor, CannotAlign, ConfigError):
        text = _length_of_texts(conversation, processor)
    return text + _estimate_media_tokens(conversation, processor)


def _length_of_texts(conversation: Turns, processor: Any) -> int:
    """Without a rendering: the texts of the turns."""
    try:
        texts = filter(None, map(_extract_assistant_text, conversation))
        return sum(len(text_ids(tokenizer_of(processor), text)) for text in texts)
    except tolerated(processor):
        return 0


def _media(conversation: Turns) -> Iterator[MediaRef]:
    """The media of raw turns; what is no part in the documented format is passed over."""
    for turn in conversation:
        content = turn.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in MEDIA_KINDS:
                options = {name: value for name, value in part.items() if name not in ("type", kind)}
                yield MediaRef(kind, part.get(kind), options)
