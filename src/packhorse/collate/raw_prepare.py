"""Before the processor's call: examples go in, turns with decoded media come out; no example is changed.

Also what is particular to a batch of them: the options of the call that belong to their media, and which
tokens a fake image brought in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from packhorse.chat import is_transformers, template_errors, tokenizer_of
from packhorse.collate.finish import Records, check_present, keys_of, named, records_of, row_order
from packhorse.collate.processor_call import logger, plain_turns, render
from packhorse.collate.raw_labels import media_ids
from packhorse.errors import ConfigError
from packhorse.families import Encoder, Family, Generic, LoadedMedia, MediaSize
from packhorse.formats.conversation import parse_conversation
from packhorse.media import load_image
from packhorse.types import Conversation, MediaKind, MediaRef, Part

_MEDIA_ARGUMENTS = ("images", "videos", "audio")


@dataclass(frozen=True, slots=True)
class Opened:
    """One sample as it came: the example, with its sound in place, and the same in types.

    Attributes:
        example: in the documented format.
        conversation: as parsed; its key names the sample.
        records: where its loss would be written.
    """

    example: Mapping[str, Any]
    conversation: Conversation
    records: Records

    @property
    def turns(self) -> Sequence[Mapping[str, Any]]:
        """The turns as the example has them."""
        turns: Sequence[Mapping[str, Any]] = self.example["conversation"]
        return turns

    @property
    def fake(self) -> bool:
        """Whether its image is the fake one."""
        return bool(self.example.get("_injected_fake"))


@dataclass(frozen=True, slots=True)
class Ready:
    """One sample with decoded media.

    Attributes:
        conversation: as parsed; its media are where they come from.
        turns: for ``apply_chat_template``: parts hold images, frames [T, H, W, 3] and samples of sound.
        media: the same media apart, with what is known about the videos.
        fake: whether its image is the fake one.
        records: where its loss would be written.
    """

    conversation: Conversation
    turns: list[dict[str, Any]]
    media: LoadedMedia
    fake: bool
    records: Records

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


def open_batch(
    examples: Sequence[Mapping[str, Any]], processor: Any, family: Family, *, sound: bool = True
) -> list[Opened]:
    """The examples of a batch, read and checked.

    Args:
        examples: in the documented format; a :class:`~packhorse.encode.robust.Batch` names them.
        processor: tells what stands for a sound in the text.
        family: of the processor.
        sound: put sound that lies beside a conversation into it.

    Raises:
        BadSample: one is not in the documented format.
        ConfigError: (a ``ValueError``) the batch holds what is no example, or the processor has no chat
            template.
    """
    check_present(examples)
    for place, example in enumerate(examples):
        if "input_ids" in example and "conversation" not in example:
            raise ConfigError(
                f"sample {place} of the batch has input_ids and no conversation: these samples are already "
                "encoded, use pad_collate_fn"
            )
    encoder = Encoder(processor, family)
    encoder.check_template()
    records, opened = records_of(examples), []
    for example, key in zip(examples, keys_of(examples), strict=True):
        placed = encoder.place_audio(example, key) if sound else example
        opened.append(Opened(placed, parse_conversation(placed, key), records))
    return opened


def make_ready(
    examples: Sequence[Mapping[str, Any]], processor: Any, family: Family, *, check: bool = True
) -> list[Ready]:
    """Open a batch and decode its media; see :func:`open_batch` and :func:`decode`."""
    return decode(open_batch(examples, processor, family), processor, family, check=check)


def decode(opened: Sequence[Opened], processor: Any, family: Family, *, check: bool = True) -> list[Ready]:
    """Decode the media of a batch; samples come out in the order of rows.

    Args:
        opened: the samples.
        processor: tells how videos are sampled.
        family: decides what media there may be, and at which rate sound is loaded.
        check: see :func:`check_text`.

    Raises:
        BadSample: a media item is missing, broken or not one of the family's, or typed out in a text.
    """
    ready = []
    for one in opened:
        with named(one.conversation.key):
            family.check(one.conversation)
            if check:
                check_text(one.conversation, processor, family)
            turns, media = _loaded(one.turns, one.conversation, processor, family)
        ready.append(Ready(one.conversation, turns, media, one.fake, one.records))
    return in_order(ready, family)


def in_order(ready: Sequence[Ready], family: Family) -> list[Ready]:
    """The samples in the order in which they become rows (see :func:`row_order`)."""
    images = [sum(ref.kind == "image" for ref in one.conversation.media) for one in ready]
    return [ready[place] for place in row_order([one.fake for one in ready], images, family)]


def check_text(conversation: Conversation, processor: Any, family: Family) -> None:
    """Refuse a conversation whose text does not hold one placeholder for each media item, and no other.

    Only for transformers' processors of known families, which would mix up the media without a word.
    """
    if is_transformers(processor) and not isinstance(family, Generic):
        encoder = Encoder(processor, family)
        encoder.check_placeholders(encoder.render_conversation(conversation), conversation)


def _loaded(
    turns: Sequence[Mapping[str, Any]], conversation: Conversation, processor: Any, family: Family
) -> tuple[list[dict[str, Any]], LoadedMedia]:
    media, encoder = LoadedMedia([], [], []), Encoder(processor, family)

    def load(ref: MediaRef) -> Any:
        if ref.kind == "image":
            media.images.append(load_image(ref.source))
            return media.images[-1]
        one = encoder.load([ref])
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
    """The text of each sample, placeholders not expanded.

    Raises:
        BadSample: the chat template refuses one.
    """
    return [_text(one, processor, family) for one in ready]


def _text(one: Ready, processor: Any, family: Family) -> str:
    try:
        return render(processor, family, plain_turns(one.turns, family))
    except template_errors() as error:
        what = f"the chat template refuses it: {error}"
        raise family.bad(what, one.conversation, "wrong_format") from error


def all_media(ready: Sequence[Ready]) -> LoadedMedia:
    """The media of a batch in one."""
    return LoadedMedia(
        [image for one in ready for image in one.media.images],
        [video for one in ready for video in one.media.videos],
        [audio for one in ready for audio in one.media.audios],
    )


def grouped_options(ready: Sequence[Ready], processor: Any, family: Family) -> dict[str, Any]:
    """Options of a transformers processor's call that say what its media are (``videos_kwargs``, …)."""
    arguments = family.call_arguments(Encoder(processor, family), all_media(ready))
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
            first, after = _fake_span(ids[row][places], one, processor, family)
            mask[row, places[first:after]] = 0
    return {**batch, "attention_mask": mask}


def _fake_span(ids: torch.Tensor, one: Ready, processor: Any, family: Family) -> tuple[int, int]:
    """First and after-last token of the fake image in the unpadded ids of its sample."""
    beside = len(one.conversation.media) > 1
    # With other media beside it, what the processor makes of them has to be known too.
    if _tells_placeholders(processor, family) and (is_transformers(processor) or not beside):
        sizes = _sizes(one, processor, family) if beside else []
        return Encoder(processor, family).fake_image_span(ids.tolist(), one.conversation, sizes)
    owners = (processor, tokenizer_of(processor))
    told = {getattr(owner, "image_token_id", None) for owner in owners} - {None}
    content = told or media_ids(processor, family)
    places = [place for place, token in enumerate(ids.tolist()) if token in content]
    if not places:
        logger.warning(
            "%s does not tell its image token: the fake image of a sample is not hidden from attention",
            type(processor).__name__,
        )
        return 0, 0
    return places[0], places[-1] + 1


def _sizes(one: Ready, processor: Any, family: Family) -> list[tuple[MediaKind, MediaSize]]:
    """Kind and size of each media item; from headers where a package of the model's decodes them."""
    refs = one.conversation.media
    if len(one.media.sizes()) == len(refs):
        return one.media.sizes(ref.kind for ref in refs)
    encoder = Encoder(processor, family)
    return [(ref.kind, encoder.size_of(ref)) for ref in refs]


def _tells_placeholders(processor: Any, family: Family) -> bool:
    if isinstance(family, Generic) or not hasattr(tokenizer_of(processor), "convert_tokens_to_ids"):
        return False
    try:
        return "image" in Encoder(processor, family).placeholders
    except ConfigError:  # a small object by the name of a known class
        return False
