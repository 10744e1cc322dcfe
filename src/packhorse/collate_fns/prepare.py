"""Before the processor's call: examples go in, turns with decoded media come out; no example is changed.

Also what is particular to a batch of them: the options of the call that belong to their media, and which
tokens a fake image brought in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from packhorse.chat import template_errors, tokenizer_of
from packhorse.collate_fns.contract import is_transformers, logger, plain_turns, render
from packhorse.collate_fns.finish import row_order
from packhorse.collate_fns.labels import media_ids
from packhorse.conversation import parse_conversation
from packhorse.datasets.tokenized import fake_tokens
from packhorse.errors import ConfigError
from packhorse.families import Encoded, Family, Generic, LoadedMedia
from packhorse.media import load_image
from packhorse.types import Conversation, MediaRef, Part

_MEDIA_ARGUMENTS = ("images", "videos", "audio")


@dataclass(frozen=True, slots=True)
class Ready:
    """One sample with decoded media.

    Attributes:
        conversation: as parsed; its media are where they come from.
        turns: for ``apply_chat_template``: parts hold images, frames [T, H, W, 3] and samples of sound.
        media: the same media apart, with what is known about the videos.
        fake: whether its image is the fake one.
    """

    conversation: Conversation
    turns: list[dict[str, Any]]
    media: LoadedMedia
    fake: bool

    def decoded(self) -> Conversation:
        """The conversation with its decoded media in place of where they come from."""
        images, videos, audios = iter(self.media.images), iter(self.media.videos), iter(self.media.audios)

        def ready(part: Part) -> Part:
            if not isinstance(part, MediaRef):
                return part
            if part.kind == "video":
                video = next(videos)
                return MediaRef("video", video.frames, {"video_metadata": video.metadata.as_dict()})
            return MediaRef(part.kind, next(images if part.kind == "image" else audios))

        messages = self.conversation.messages
        return replace(
            self.conversation,
            messages=tuple(replace(m, parts=tuple(ready(part) for part in m.parts)) for m in messages),
        )


def parse_batch(examples: Sequence[Mapping[str, Any]]) -> list[Conversation]:
    """The conversations of a batch.

    Raises:
        BadSample: one is not in the documented format.
        ConfigError: (a ``ValueError``) the batch is empty.
    """
    if not examples:
        raise ConfigError("an empty batch: expected at least one example")
    return [parse_conversation(example) for example in examples]


def make_ready(
    examples: Sequence[Mapping[str, Any]], processor: Any, family: Family, *, check: bool = True
) -> list[Ready]:
    """Decode the media of a batch; samples come out in the order of rows.

    Args:
        examples: in the documented format.
        processor: tells how videos are sampled.
        family: decides what media there may be, and at which rate sound is loaded.
        check: see :func:`check_text`.

    Raises:
        BadSample: a medium is missing, broken or not one of the family's, or typed out in a text.
    """
    ready = []
    for example, conversation in zip(examples, parse_batch(examples), strict=True):
        family.check(conversation)
        if check:
            check_text(example["conversation"], conversation, processor, family)
        turns, media = _loaded(example["conversation"], conversation, processor, family)
        ready.append(Ready(conversation, turns, media, bool(example.get("_injected_fake"))))
    return in_order(ready, family)


def in_order(ready: Sequence[Ready], family: Family) -> list[Ready]:
    """The samples in the order in which they become rows (see :func:`row_order`)."""
    images = [sum(ref.kind == "image" for ref in one.conversation.media) for one in ready]
    return [ready[place] for place in row_order([one.fake for one in ready], images, family)]


def check_text(
    turns: Sequence[Mapping[str, Any]], conversation: Conversation, processor: Any, family: Family
) -> None:
    """Refuse a conversation whose text does not hold one placeholder for each medium, and no other.

    Only for transformers' processors of known families, which would mix up the media without a word.
    """
    if is_transformers(processor) and not isinstance(family, Generic):
        try:
            text = render(processor, family, plain_turns(turns, family))
        except template_errors() as error:
            raise family.bad(
                f"the chat template refuses it: {error}", conversation, "wrong_format"
            ) from error
        family._check_placeholders(processor, text, conversation)


def _loaded(
    turns: Sequence[Mapping[str, Any]], conversation: Conversation, processor: Any, family: Family
) -> tuple[list[dict[str, Any]], LoadedMedia]:
    media = LoadedMedia([], [], [])

    def load(ref: MediaRef) -> Any:
        if ref.kind == "image":
            media.images.append(load_image(ref.source))
            return media.images[-1]
        one = family.load([ref], processor)
        media.videos.extend(one.videos)
        media.audios.extend(one.audios)
        return one.videos[0].frames if one.videos else one.audios[0][0]

    loaded = []
    for turn, message in zip(plain_turns(turns, family), conversation.messages, strict=True):
        content = turn["content"]
        if not isinstance(content, str):
            parts = zip(content, message.parts, strict=True)
            content = [
                {**part, ref.kind: load(ref)} if isinstance(ref, MediaRef) else part for part, ref in parts
            ]
        loaded.append({**turn, "content": content})
    return loaded, media


def rendered(ready: Sequence[Ready], processor: Any, family: Family) -> list[str]:
    """The text of each sample, placeholders not expanded."""
    return [render(processor, family, plain_turns(one.turns, family)) for one in ready]


def all_media(ready: Sequence[Ready]) -> LoadedMedia:
    """The media of a batch in one."""
    return LoadedMedia(
        [image for one in ready for image in one.media.images],
        [video for one in ready for video in one.media.videos],
        [audio for one in ready for audio in one.media.audios],
    )


def grouped_options(ready: Sequence[Ready], processor: Any, family: Family) -> dict[str, Any]:
    """Options of a transformers processor's call that say what its media are (``videos_kwargs``, …)."""
    arguments = family.call_arguments(processor, all_media(ready))
    return {name: value for name, value in arguments.items() if name not in _MEDIA_ARGUMENTS}


def flat_options(ready: Sequence[Ready], family: Family) -> dict[str, Any]:
    """The same for any other processor, in the plain words that processors know."""
    media = all_media(ready)
    options: dict[str, Any] = {}
    if media.videos:
        options["video_metadata"] = [video.metadata.as_dict() for video in media.videos]
        options["do_sample_frames"] = False
    if media.audios:
        options["sampling_rate"] = family.sampling_rate
    return options


def has_audio(ready: Sequence[Ready]) -> bool:
    """Whether any sample of the batch has sound."""
    return any(one.media.audios for one in ready)


def hide_fakes(
    batch: Mapping[str, Any], ready: Sequence[Ready], processor: Any, family: Family
) -> dict[str, Any]:
    """The batch with attention 0 on the tokens that fake images brought in."""
    if not any(one.fake for one in ready):
        return dict(batch)
    ids = batch["input_ids"]
    mask = batch["attention_mask"].clone() if "attention_mask" in batch else torch.ones_like(ids)
    for row, one in enumerate(ready):
        if one.fake:
            places = mask[row].nonzero().flatten()
            first, behind = _fake_span(ids[row][places], one, processor, family)
            mask[row, places[first:behind]] = 0
    return {**batch, "attention_mask": mask}


def _fake_span(ids: torch.Tensor, one: Ready, processor: Any, family: Family) -> tuple[int, int]:
    """First and behind-last token of the fake image in the unpadded ids of its sample."""
    if _tells_placeholders(processor, family):
        turns = plain_turns(one.turns, family)
        encoded = Encoded(render(processor, family, turns), turns, {"input_ids": ids}, {})
        return fake_tokens(family, processor, encoded, one.conversation)
    content = media_ids(processor, family)
    places = [place for place, token in enumerate(ids.tolist()) if token in content]
    if not places:
        logger.warning(
            "%s does not tell its image token: the fake image of a sample is not hidden from attention",
            type(processor).__name__,
        )
        return 0, 0
    return places[0], places[-1] + 1


def _tells_placeholders(processor: Any, family: Family) -> bool:
    if isinstance(family, Generic) or not hasattr(tokenizer_of(processor), "convert_tokens_to_ids"):
        return False
    try:
        return "image" in family.placeholders(processor)
    except ConfigError:  # a small object by the name of a known class
        return False
