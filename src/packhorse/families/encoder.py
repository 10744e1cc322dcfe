"""Families and the encoder: a family bound to a processor, used to count, encode, check and view.

A :class:`Family` declares which processors it serves, its media tensors and its media tokens, and calls its
processor. :class:`Encoder` has what all families share: it turns one conversation into the ids and media
tensors that the processor makes, and counts media tokens by arithmetic on sizes. A new family is one file and
one entry in :data:`packhorse.families.FAMILIES`; the contract tests then cover it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import groupby
from logging import getLogger
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from packhorse.chat import (
    IGNORE_INDEX,
    SOME_TOOL,
    TOKEN_KEYS,
    Answer,
    CannotAlign,
    ChatProcessor,
    Processor,
    RepeatedTokenTokenizer,
    Span,
    TemplateFailed,
    TokenizedText,
    answer_spans,
    chat_templates,
    rejected_by_template,
    special_tokens,
    supervised_tokens,
    template_errors,
    token_ids,
    with_repeated_tokens,
)
from packhorse.errors import (
    DATA_ERRORS,
    BadSample,
    ConfigError,
    MissingDependency,
    PackhorseError,
    is_data_error,
    machine_fault,
    raise_with_name,
)
from packhorse.families.compact import Compact, as_bytes
from packhorse.families.item_options import check_own_call, with_item_options, with_options
from packhorse.families.media_sizes import (
    AnySize,
    CallOptions,
    ConfiguredSize,
    Pieces,
    Sizes,
    check_equal_frames,
    fill_placeholders,
    plain_size,
    shorten,
    size_of,
    split_runs,
    write_out,
)
from packhorse.families.models import as_processor, check_transformers
from packhorse.formats.conversation import place_audio
from packhorse.formats.row_format import TURN_FIELDS
from packhorse.media import (
    MediaSize,
    VideoFrames,
    VideoInfo,
    VideoSampling,
    describe,
    load_image,
    load_media,
    placeholder_media,
)
from packhorse.media.failure import DEFAULT_MAX_BYTES, check_bytes
from packhorse.media.loading import settings_of
from packhorse.media.settings import DATASET_SETTINGS, canonical_name, size_names, size_settings
from packhorse.types import (
    MEDIA_KINDS,
    Conversation,
    MediaKind,
    MediaLayout,
    MediaRef,
    Message,
    Reason,
    Sample,
    TextPart,
)

if TYPE_CHECKING:
    import torch
    from PIL import Image

logger = getLogger(__name__)

PROCESSOR_ERRORS = (ValueError, ArithmeticError)
"""What a processor raises for a media item that it rejects; some divide by a side of 0."""

_ALL_FRAMES = VideoSampling()
_TYPICAL_SIZES: dict[MediaKind, MediaSize] = {"image": (480, 640), "video": VideoInfo(8, 480, 640, 24.0, 4.0)}
_MAX_OPTIONS = 1 << 12  # encoders remembered by the options of an item
_JSON_VALUES = (str, int, float, type(None), np.generic)
_MAX_DEPTH = 200  # of lists and objects in tools and fields of turns; templates are rendered recursively
_THINK = ("<think>", "</think>")  # what most templates, and texts of answers, have around reasoning
_OPEN_THOUGHT, _END_OF_THOUGHT = re.compile(r"<think>\s*\Z"), re.compile(r"</think>\s*")


@dataclass(frozen=True, slots=True)
class LoadedMedia:
    """Decoded media of one conversation, each kind in the order of the text.

    ``configured`` has the sizes of images and videos with settings of their own, by kind and position.
    """

    images: list[Image.Image]
    videos: list[VideoFrames]
    audios: list[tuple[np.ndarray, int]]
    configured: dict[tuple[MediaKind, int], ConfiguredSize] = field(default_factory=dict)

    def sizes(self, order: Iterable[MediaKind] | None = None) -> list[tuple[MediaKind, AnySize]]:
        """Kind and size of each media item: kinds in ``order``, or all images, then videos, then audio."""
        own_sizes: dict[MediaKind, Iterator[MediaSize]] = {
            "image": ((image.height, image.width) for image in self.images),
            "video": (info_of(video) for video in self.videos),
            "audio": (len(array) for array, _ in self.audios),
        }
        sizes_of_kind: dict[MediaKind, Iterator[AnySize]] = {
            kind: iter([self.configured.get((kind, index), size) for index, size in enumerate(sizes)])
            for kind, sizes in own_sizes.items()
        }
        if order is None:
            return [(kind, size) for kind, sizes in sizes_of_kind.items() for size in sizes]
        return [(kind, next(sizes_of_kind[kind])) for kind in order]

    def options(self, kind: MediaKind) -> list[CallOptions]:
        """Options of the processor's call for each image or video; empty if none has settings of its own."""
        items = len(self.images if kind == "image" else self.videos)
        found = [self.configured.get((kind, at)) for at in range(items)]
        return [() if one is None else one.options for one in found] if any(found) else []


def info_of(video: VideoFrames) -> VideoInfo:
    """Return the header that a video of these frames has."""
    frames, height, width = video.frames.shape[:3]
    metadata = video.metadata
    return VideoInfo(frames, height, width, metadata.fps, metadata.duration, metadata.frames_indices)


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sample as the processor made it, not yet labelled.

    Attributes:
        text: the rendered conversation, placeholders not expanded.
        conversation: what it was rendered from.
        tokens: tensors of shape [S] by key, ``input_ids`` and ``attention_mask`` at least.
        media: media tensors by key, as the family's layout declares them.
        sizes: kind and size of each media item, in the order of the text.
        read: how the text was tokenised, each media token once; None if unknown.
    """

    text: str
    conversation: Conversation
    tokens: dict[str, torch.Tensor]
    media: dict[str, torch.Tensor]
    sizes: tuple[tuple[MediaKind, AnySize], ...] = ()
    read: TokenizedText | None = None


class Family:
    """A model family; subclasses declare what differs.

    Attributes:
        name: for messages and tests.
        processor_classes: names of the processor classes it serves.
        layout: every media tensor the processor may return.
        fill: what ragged tensors are padded with, if not with 0.
        kinds: the media it takes.
        exact: whether :meth:`media_tokens` and :meth:`pieces` equal what the processor does.
        off_by: by how many tokens a sample's count can be wrong; None if unknown.
        caveats: limits, as sentences.
        sampling_rate: of audio for the model.
        least_samples: shorter audio has no token, or breaks the feature extractor.
        chats: whether conversations are rendered by a chat template.
        mrope: positions have three rows (time, height, width), computed from media grids.
        bidirectional: the tensor per token that marks media tokens with bidirectional attention.
        flat_arguments: the processor's call takes plain options, not ``text_kwargs`` and the like.
        writes_special_tokens: the rendered text has all special tokens.
        makes_token_tensors: the processor's call returns tensors of tokens, not lists.
        listed: whether its processors are known, and tested, by their class.
        equal_frames: all videos of a sample must have the same number of frames.
        size_settings: the settings that an item of each kind may have (:mod:`packhorse.media.settings`); an
            item or a dataset with another one is rejected.
        min_transformers: the oldest transformers it works with.
        min_transformers_for: the same for kinds of media that need a newer one.
        pixel_masks: the tensor that says where pixels are padding, by the key of the pixels.
    """

    name: ClassVar[str]
    processor_classes: ClassVar[tuple[str, ...]] = ()
    layout: ClassVar[MediaLayout] = MappingProxyType({})
    fill: ClassVar[Mapping[str, float]] = MappingProxyType({})
    kinds: ClassVar[tuple[MediaKind, ...]] = ("image",)
    exact: ClassVar[bool] = True
    off_by: ClassVar[int | None] = 0
    caveats: ClassVar[tuple[str, ...]] = ()
    sampling_rate: ClassVar[int] = 16_000
    least_samples: ClassVar[int] = 1
    chats: ClassVar[bool] = True
    mrope: ClassVar[bool] = False
    bidirectional: ClassVar[str | None] = None
    flat_arguments: ClassVar[bool] = False
    writes_special_tokens: ClassVar[bool] = False
    makes_token_tensors: ClassVar[bool] = True
    listed: ClassVar[bool] = True
    equal_frames: ClassVar[bool] = False
    size_settings: ClassVar[Mapping[MediaKind, tuple[str, ...]]] = MappingProxyType({})
    min_transformers: ClassVar[str] = "5.12"
    min_transformers_for: ClassVar[Mapping[MediaKind, str]] = MappingProxyType({})
    pixel_masks: ClassVar[Mapping[str, str]] = MappingProxyType({})

    # --- media in the text, by arithmetic on sizes -------------------------------------------------------

    def placeholders(self, encoder: Encoder) -> dict[MediaKind, str]:
        """What the chat template writes for one media item of each kind."""
        return {kind: encoder.token(f"{kind}_token") for kind in self.kinds}

    def media_token_ids(self, encoder: Encoder) -> frozenset[int]:
        """The ids of media content (not of the brackets around it)."""
        names = (encoder.token(f"{kind}_token") for kind in self.kinds)
        return frozenset(encoder.tokenizer.convert_tokens_to_ids(name) for name in names)

    def media_tokens(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """Return the number of content tokens of a media item of this size.

        Args:
            encoder: with a processor of the family.
            kind: image, video or audio.
            size: see :data:`MediaSize`; ``encoder.size_of`` reads it from a header.
            images_in_sample: how many images the sample has.

        Raises:
            ValueError: the processor rejects a media item of this size.
        """
        raise NotImplementedError(f"{self.name} has no {kind} tokens")

    def media_patches(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """Return the number of patches in the vision encoder for an image or video of this size.

        Padding up to the size of a tile counts, since it is computed; tiles that only fill up a batch do not.
        Arguments and errors are those of :meth:`media_tokens`.
        """
        return 0

    def pieces(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> Pieces:
        """Return what the processor writes in the text in place of one media item's placeholder.

        By default the placeholder, once per content token; families whose processors write brackets, times
        and the like add them. Arguments and errors are those of :meth:`media_tokens`.
        """
        tokens = self.media_tokens(encoder, kind, size, images_in_sample)
        return [(encoder.placeholders[kind], tokens)]

    def pieces_together(self, encoder: Encoder, sizes: Sizes) -> list[Pieces]:
        """:meth:`pieces` of each media item of one sample; overridden where they depend on each other."""
        if self.equal_frames:
            check_equal_frames(sizes)
        images = sum(kind == "image" for kind, _ in sizes)
        bound = [(encoder.for_size(kind, size), kind, plain_size(size)) for kind, size in sizes]
        return [self.pieces(own_encoder, kind, size, images) for own_encoder, kind, size in bound]

    def item_rows(self, encoder: Encoder, key: str, kind: MediaKind, size: Any) -> int:
        """Return a media item's rows in a tensor whose layout is ``"rows"`` without ``rows_from``."""
        raise NotImplementedError(f"{self.name} does not define the rows of a media item in '{key}'")

    def configure(
        self, encoder: Encoder, kind: MediaKind, size: Any, settings: Mapping[str, int]
    ) -> tuple[MediaSize, dict[str, Any]]:
        """Return the size of what the processor gets for an item with these settings, and its call's options.

        The item is resized if that size is not its own. The options replace attributes of the same names of
        the image or video processor, so :meth:`media_tokens` reads them there.

        Raises:
            ValueError: the processor rejects an item of this size.
        """
        raise NotImplementedError(f"{self.name} has no settings for the size of a media item")

    def resize(self, encoder: Encoder, item: Any, size: Any) -> Any:
        """Resize a decoded image or the frames of a video to the size that :meth:`configure` returned."""
        raise NotImplementedError(f"{self.name} does not resize media itself")

    def rejected_setting(self, kind: MediaKind, options: Mapping[str, Any]) -> str:
        """Return the name of an item's setting that the family does not take; empty if it takes all."""
        taken = self.size_settings.get(kind, ())
        names = size_names(kind, options)
        return next((name for name in names if canonical_name(kind, name) not in taken), "")

    def describe_rejected(self, kind: MediaKind, name: str) -> str:
        """Describe a setting that the family does not take for this kind of media."""
        taken = self.size_settings.get(kind, ())
        known = f"takes {', '.join(taken)}" if taken else "has no setting for the size of an item"
        return f"{name} has no effect on {kind}s of {self.name}, which {known}: remove it"

    # --- how a conversation is checked and rendered ------------------------------------------------------

    def check(self, conversation: Conversation) -> None:
        """Raise BadSample for a conversation that the family cannot take, before anything is loaded.

        A media item for which the installed transformers is too old raises ConfigError.
        """
        if not conversation.messages:
            raise self.bad("a conversation without turns", conversation, "empty_conversation")
        for ref in conversation.media:
            if ref.kind not in self.kinds:
                known = ", ".join(self.kinds)
                raise self.bad(f"a part of type {ref.kind}; {self.name} takes {known}", conversation)
            if ref.options and (name := self.rejected_setting(ref.kind, ref.options)):
                raise self.bad(self.describe_rejected(ref.kind, name), conversation, "wrong_format")
            if ref.kind in self.min_transformers_for:
                check_transformers(f"{ref.kind} of {self.name}", self.min_transformers_for[ref.kind])

    def turns(self, conversation: Conversation) -> list[dict[str, Any]]:
        """The messages as the chat template takes them: media parts hold their type alone."""
        return [
            {
                **message.extras,
                "role": message.role,
                "content": [
                    {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": part.kind}
                    for part in message.parts
                ],
            }
            for message in conversation.messages
        ]

    def render(self, encoder: Encoder, turns: Sequence[Mapping[str, Any]]) -> str:
        """The conversation as one text, placeholders not expanded."""
        return encoder.apply_chat_template(turns)

    def answer_spans(self, encoder: Encoder, turns: Sequence[Mapping[str, Any]], text: str) -> list[Answer]:
        """The supervised characters of ``text``, which was rendered from ``turns``."""
        return answer_spans(encoder, turns, text)

    # --- how the processor is called ---------------------------------------------------------------------

    def load(self, encoder: Encoder, refs: Iterable[MediaRef]) -> LoadedMedia:
        """Decode the media of one conversation; BadSample if one cannot be loaded or audio is too short."""
        loaded = LoadedMedia([], [], [])
        for ref in refs:
            if ref.kind == "image":
                image: Any = load_image(ref.source)
                if configured := encoder.configured_size(ref, (image.height, image.width)):
                    loaded.configured["image", len(loaded.images)] = configured
                    image = encoder.resize(image, configured)
                loaded.images.append(image)
            elif ref.kind == "video":
                video: Any = load_media(ref, sampling=encoder.video_sampling)
                if configured := encoder.configured_size(ref, info_of(video)):
                    loaded.configured["video", len(loaded.videos)] = configured
                    video = encoder.resize(video, configured)
                loaded.videos.append(video)
            else:
                clip: Any = load_media(ref, sampling_rate=self.sampling_rate)
                self.check_audio_length(ref, len(clip[0]))
                loaded.audios.append(clip)
        return loaded

    def check_audio_length(self, ref: MediaRef, samples: Any) -> None:
        """Raise if an audio clip is too short for the family."""
        if samples < self.least_samples:
            raise BadSample(
                f"{describe(ref.source)}: {samples} samples at {self.sampling_rate:,} Hz, "
                f"{self.name} needs at least {self.least_samples}",
                reason="broken_media",
                stage="encode",
            )

    def takes_flat_arguments(self, encoder: Encoder) -> bool:
        """Whether the processor's call takes plain options and one list of each kind of media."""
        return self.flat_arguments

    def call_arguments(self, encoder: Encoder, media: LoadedMedia) -> dict[str, Any]:
        """Keyword arguments of the processor's call for the media of one conversation."""
        if self.takes_flat_arguments(encoder):
            given: dict[str, Any] = {
                "images": media.images,
                "videos": [video.frames for video in media.videos],
                "audio": [array for array, _ in media.audios],
            }
            return {name: value for name, value in given.items() if value}
        arguments: dict[str, Any] = {}
        if media.images:
            arguments["images"] = [media.images]
        if media.videos:
            arguments["videos"] = [[video.frames for video in media.videos]]
            arguments["videos_kwargs"] = {
                "video_metadata": [video.metadata.as_dict() for video in media.videos],
                "do_sample_frames": False,
                # Otherwise frames 1 or 3 pixels high are taken for channels.
                "input_data_format": "channels_last",
            }
        if media.audios:
            arguments["audio"] = [array for array, _ in media.audios]
            arguments["audio_kwargs"] = {"sampling_rate": self.sampling_rate}
        return arguments

    def text_arguments(self, encoder: Encoder, text: str) -> dict[str, Any]:
        """Keyword arguments of the processor's call for the text, without truncation and padding."""
        bos = getattr(encoder.tokenizer, "bos_token", None)
        # A template that writes the beginning-of-text token itself must not get a second one.
        if not self.writes_special_tokens and (bos is None or not text.startswith(bos)):
            return {}
        options = {"add_special_tokens": False}
        return options if self.takes_flat_arguments(encoder) else {"text_kwargs": options}

    def call(self, encoder: Encoder, text: str, media: LoadedMedia) -> Mapping[str, Any]:
        """The processor's own output for one conversation, with a batch axis of one."""
        arguments = self.call_arguments(encoder, media) | self.text_arguments(encoder, text)
        processor = encoder.processor
        if media.configured:
            images, videos = media.options("image"), media.options("video")
            processor = with_item_options(processor, images, videos, self.fill)
        if self.makes_token_tensors:
            output: Mapping[str, Any] = processor(text=[text], return_tensors="pt", **arguments)
            return output
        import torch

        # transformers checks every token before it makes a tensor of a list. benchmarks/encode.py promises a
        # share of at most 10 %; one run each on a busy machine had 15.7 % without this and 11.7 % with it.
        for kind in arguments.keys() & {"images", "videos"}:
            options = arguments.get(f"{kind}_kwargs", {})
            arguments[f"{kind}_kwargs"] = {**options, "return_tensors": "pt"}
        return {
            key: value
            if isinstance(value, torch.Tensor)
            # Numpy reads a list of numbers in a quarter of the time.
            else torch.from_numpy(np.array(value, np.int64))
            if key in TOKEN_KEYS
            else torch.tensor(value)
            for key, value in processor(text=[text], **arguments).items()
        }

    def sort_output(self, encoded: Encoded, output: Mapping[str, Any]) -> None:
        """Put the processor's tensors into ``encoded``; ConfigError for one that the layout lacks."""
        for key, value in output.items():
            if key in TOKEN_KEYS:
                encoded.tokens[key] = value[0]
            elif key in self.layout and hasattr(value, "shape"):
                encoded.media[key] = value
            else:
                shape = tuple(value.shape) if hasattr(value, "shape") else None
                what = f"({type(value)})" if shape is None else f"of shape {shape}"
                known = ", ".join(self.layout)
                detail = (
                    f"the processor returned '{key}' {what}, which family '{self.name}' does not declare as "
                    f"a tensor of its layout ({known}): add it there, or it would be lost"
                )
                raise ConfigError(detail, setting=key, value=shape)

    def bad(self, detail: str, conversation: Conversation, reason: Reason = "media_mismatch") -> BadSample:
        """Return the error for a conversation that is rejected."""
        return BadSample(detail, reason=reason, key=conversation.key, stage="encode")


@contextmanager
def processor_errors(key: str) -> Iterator[None]:
    """Raise what a processor raises for one sample as a :class:`BadSample` with this key.

    An error that is not the sample's fault (a missing package or credential) gets the key in its message.
    """
    try:
        yield
    except (ConfigError, MissingDependency) as error:
        raise_with_name(error, key)
    except BadSample as error:
        if error.key:
            raise
        raise error.with_key(key) from error  # errors of media have no key
    except PackhorseError:
        raise
    except PROCESSOR_ERRORS as error:
        what = f"the processor rejects it: {error}"
        raise BadSample(what, reason="sample_failed", key=key, stage="encode") from error
    except DATA_ERRORS as error:
        if not is_data_error(error) or machine_fault(error, "") is not None:
            raise
        what = f"the processor fails on it: {type(error).__name__}: {error}"
        raise BadSample(what, reason="sample_failed", key=key, stage="encode") from error


@dataclass(frozen=True, slots=True)
class Probe:
    """What the processor makes of a placeholder media item."""

    tokens: int  # of its content
    patches: int  # rows in a tensor of patches; 0 if there is no such tensor
    pieces: Pieces  # what the processor writes in place of its placeholder


_VALUE, _CALL, _RESULT = "packhorse_value", "packhorse_call", "packhorse_result"
_TOOL_CALL = {"id": "packhorse", "type": "function", "function": {"name": _CALL, "arguments": {"a": _VALUE}}}
_TOOL_CONVERSATION = Conversation(
    (
        Message("user", (TextPart("Q."),)),
        Message("assistant", (TextPart(""),), {"tool_calls": [_TOOL_CALL]}),
        Message("tool", (TextPart(_RESULT),), {"name": _CALL, "tool_call_id": "packhorse"}),
        Message("assistant", (TextPart("A."),)),
    )
)


@dataclass(frozen=True, slots=True)
class _ToolSupport:
    """What of tools, tool calls and tool results a chat template writes, and how it takes arguments."""

    written: frozenset[str]
    arguments_as_text: bool = False


class _WrittenTools(NamedTuple):
    text: str
    written: frozenset[str]


class Encoder(ChatProcessor):
    """A family bound to a processor.

    What it looks up in the processor is cached. Only the processor and the family are pickled.

    Args:
        processor: the model's processor, or a tokenizer for text alone. A chat template that is set later
            is used from then on; other changes made to it after the first use have no effect.
        family: of the processor; None for :func:`family_of`.
        compact: samples have pixels as bytes, from this copy of the processor
            (:func:`packhorse.families.compact.find_compact`); None for pixels as the processor returns them.
    """

    has_item_options = False
    """Whether the processor has the options of one media item as attributes; see :meth:`for_size`."""

    def __init__(
        self, processor: Processor, family: Family | None = None, compact: Compact | None = None
    ) -> None:
        super().__init__(processor)
        if family is None:
            from packhorse.families import family_of  # it imports the families, which import this module

            family = family_of(processor)
        self.family, self.compact = family, compact
        self._probes: dict[tuple[MediaKind, Any], Probe] = {}
        self._with_options: dict[tuple[MediaKind, CallOptions], Encoder] = {}

    @classmethod
    def of(cls, processor: Encoder | Processor | str | os.PathLike[str]) -> Encoder:
        """Return the encoder of a processor, or of that at a path or hub name; an encoder itself."""
        return processor if isinstance(processor, Encoder) else cls(as_processor(processor))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.processor, self.family, self.compact)

    # --- what the processor has --------------------------------------------------------------------------

    def find_token(self, name: str) -> str | None:
        """Return the token that the processor or its tokenizer has under this name; None without one."""
        tokens = (getattr(owner, name, None) for owner in (self.processor, self.tokenizer))
        return next((str(token) for token in tokens if token is not None), None)

    def vision(self, kind: MediaKind) -> Any:
        """The part of the processor for images, or for videos."""
        return self.processor.image_processor if kind == "image" else self.processor.video_processor

    def token(self, name: str) -> str:
        """:meth:`find_token`; ConfigError if there is none."""
        token = self.find_token(name)
        if token is None:
            what = f"{type(self.processor).__name__} has no {name}, and neither has its tokenizer"
            raise ConfigError(what, setting=name)
        return token

    @cached_property
    def placeholders(self) -> dict[MediaKind, str]:
        """What the chat template writes for one media item of each kind."""
        return self.family.placeholders(self)

    @cached_property
    def media_token_ids(self) -> frozenset[int]:
        """The ids of media content (not of the brackets around it)."""
        return self.family.media_token_ids(self)

    @property
    def settings(self) -> dict[str, Any]:
        """All of the processor that determines token counts, as JSON values; the tokenizer as a digest.

        Cached: the digest of a tokenizer with 150,000 tokens takes a second.
        """
        return self._cache_for_template("settings", self._describe_settings)

    def _describe_settings(self) -> dict[str, Any]:
        description = _remove_paths(_describe(self.processor))
        template, templates = self.chat_template, copy.deepcopy(chat_templates(self.processor))
        return {
            "family": self.family.name,
            "processor": json.loads(json.dumps(description, sort_keys=True, default=str)),
            "tokenizer": _tokenizer_digest(self.tokenizer),
            "template": template if all(other in (None, template) for other in templates) else templates,
        }

    @cached_property
    def video_sampling(self) -> VideoSampling:
        """How the processor samples frames; all frames without a video processor."""
        owner = getattr(self.processor, "video_processor", None)
        return VideoSampling() if owner is None else VideoSampling.from_processor(self.processor)

    @cached_property
    def _called(self) -> Encoder:
        """The encoder whose processor is called: this one, or one that leaves pixels as bytes."""
        return self if self.compact is None else Encoder(self.compact.processor, self.family)

    @cached_property
    def _quick(self) -> tuple[Encoder, RepeatedTokenTokenizer] | None:
        """An encoder that tokenizes runs of a media token once; None if the processor cannot have one."""
        if not self.family.listed:
            return None
        processor, tokenizer = with_repeated_tokens(self._called.processor, self.media_token_ids)
        return None if tokenizer is None else (Encoder(processor, self.family), tokenizer)

    def check_dataset_settings(self, name: str, settings: Mapping[str, Any]) -> None:
        """Raise ConfigError if media cannot have these settings of a dataset with this family."""
        where = f"dataset '{name}': " if name else ""
        for kind, size in _TYPICAL_SIZES.items():
            named = {DATASET_SETTINGS[key][1]: key for key in settings if DATASET_SETTINGS[key][0] == kind}
            if not named or kind not in self.family.kinds:
                continue
            options = {setting: settings[key] for setting, key in named.items()}
            if rejected := self.family.rejected_setting(kind, options):
                key = named[rejected]
                problem = self.family.describe_rejected(kind, key)
                raise ConfigError(f"{where}{problem}", setting=key, value=settings[key])
            try:
                if chosen := size_settings(kind, options):
                    self.configure(kind, size, chosen)
            except BadSample as error:
                key = next(iter(named.values()))
                raise ConfigError(f"{where}{error.detail}", setting=key, value=settings[key]) from error

    def check_template(self) -> None:
        """Raise ConfigError if a processor that is made for chat templates has none."""
        processor = self.processor
        if not self.family.chats or not hasattr(processor, "chat_template"):
            return  # one without the attribute renders in another way
        if all(template is None for template in chat_templates(processor)):
            raise ConfigError(
                f"{type(processor).__name__} has no chat template: set processor.chat_template (released "
                "models bring theirs along with AutoProcessor.from_pretrained)",
                setting="processor.chat_template",
            )

    # --- a conversation as text --------------------------------------------------------------------------

    def render(self, turns: Sequence[Mapping[str, Any]]) -> str:
        """The conversation as one text, placeholders not expanded."""
        return self.family.render(self, turns)

    def turns(self, conversation: Conversation) -> list[dict[str, Any]]:
        """:meth:`Family.turns`, with the arguments of calls as JSON text if the template takes only that."""
        turns = self.family.turns(conversation)
        if not conversation.uses_tools or not any("tool_calls" in turn for turn in turns):
            return turns
        if self._tool_support.arguments_as_text:
            turns = [_with_arguments_as_text(turn) for turn in turns]
        return turns

    def render_conversation(self, conversation: Conversation) -> str:
        """:meth:`render` of a conversation; BadSample if the chat template rejects it."""
        if conversation.uses_tools:
            _check_json_values(conversation)
        encoder = self.for_conversation(conversation)
        if conversation.uses_tools:
            encoder.check_tools(conversation)
        try:
            return encoder.render(encoder.turns(conversation))
        except template_errors() as error:
            if isinstance(error, TemplateFailed):
                self.check_rendering()  # it may fail on every conversation
            raise rejected_by_template(error, conversation.key) from error

    def check_rendering(self) -> None:
        """Raise ConfigError if not even a short question and its answer can be rendered.

        A template that rejects them with an error of Jinja is accepted: it may take other conversations.
        """
        turns = [{"role": role, "content": [{"type": "text", "text": "a"}]} for role in ("user", "assistant")]
        try:
            self.render(turns)
        except (TemplateFailed, ValueError, AttributeError) as error:
            name, reason = type(self.processor).__name__, " ".join(str(error).split())[:200]
            problem = f"{name} has no chat template, so its conversations cannot be counted"
            if self.chat_template is not None:
                problem = f"the chat template of {name} fails on every conversation"
            remedy = "set tokenizer.chat_template and save the processor again"
            raise ConfigError(f"{problem}: {remedy} ({reason})", setting="chat_template") from error
        except template_errors():
            pass

    def for_conversation(self, conversation: Conversation) -> Encoder:
        """Return the encoder that renders with the tools and template options of a conversation."""
        if not conversation.chat_template_kwargs and not conversation.tools:
            return self
        options = dict(conversation.chat_template_kwargs)
        if conversation.tools:
            options["tools"] = list(conversation.tools)
        return self.with_template_kwargs(options)

    def check_tools(self, conversation: Conversation) -> None:
        """Raise if the conversation has tools, calls or results that the chat template does not write."""
        messages = conversation.messages
        needed = {
            "tools": bool(conversation.tools),
            "tool calls": any(message.extras.get("tool_calls") for message in messages),
            "tool results": any(message.role == "tool" for message in messages),
        }
        if not any(needed.values()):
            return
        written = self._tool_support.written
        if missing := [what for what, is_needed in needed.items() if is_needed and what not in written]:
            raise BadSample(
                f"the chat template of {type(self.processor).__name__} does not write {', '.join(missing)}: "
                "use a processor whose template does, or set its chat_template",
                reason="unsupported_turn",
                key=conversation.key,
                stage="encode",
            )

    @property
    def _tool_support(self) -> _ToolSupport:
        """What the chat template writes of tools, from a conversation that has all of them."""
        return self._cache_for_any_tools("tools", lambda owner: owner._find_tool_support())

    def _find_tool_support(self) -> _ToolSupport:
        arguments = {"a": _VALUE}
        turns = self.family.turns(_TOOL_CONVERSATION)
        as_object, as_text = (
            self._try_tools(form) for form in (turns, [_with_arguments_as_text(turn) for turn in turns])
        )
        takes_objects = "tool calls" in as_object.written and str(arguments) not in as_object.text
        if not takes_objects and "tool calls" in as_text.written and json.dumps(arguments) in as_text.text:
            return _ToolSupport(as_text.written, arguments_as_text=True)
        return _ToolSupport(as_object.written)

    def _try_tools(self, turns: Sequence[Mapping[str, Any]]) -> _WrittenTools:
        """Render turns with tools, and return what of them is in the text."""
        try:
            text = self.with_template_kwargs({**self.template_kwargs, "tools": [SOME_TOOL]}).render(turns)
        except template_errors(TypeError, ValueError, LookupError):
            return _WrittenTools("", frozenset())
        found = {
            "tools": SOME_TOOL["function"]["name"] in text,
            "tool calls": _CALL in text and _VALUE in text,
            "tool results": _RESULT in text,
        }
        return _WrittenTools(text, frozenset(what for what, is_written in found.items() if is_written))

    def dropped_characters(self, conversation: Conversation) -> Iterator[tuple[int, int]]:
        """Yield the turns of answers of which the chat template drops characters, and how many.

        Those of ``reasoning_content`` count too.
        """
        text, encoder = self.render_conversation(conversation), self.for_conversation(conversation)
        answers = self.family.answer_spans(encoder, encoder.turns(conversation), text)
        for start, end, turn in answers:
            if turn < 0:
                continue  # generation marks do not say which turn is marked
            message = conversation.messages[turn]
            stated = (message.text, str(message.extras.get("reasoning_content") or ""))
            if dropped := sum(_dropped_length(part, text[start:end]) for part in stated):
                yield turn, dropped

    def answers(self, conversation: Conversation, text: str) -> list[tuple[Answer, float]]:
        """Return the supervised characters of a rendered conversation, each with its factor for the loss.

        Raises:
            CannotAlign: they are not located with certainty.
        """
        encoder, messages = self.for_conversation(conversation), conversation.messages
        try:
            answers = self.family.answer_spans(encoder, encoder.turns(conversation), text)
        except CannotAlign as error:
            if not conversation.chat_template_kwargs.get("enable_thinking", True) and _reasons(conversation):
                raise CannotAlign(
                    f"{error}: enable_thinking is false, but an answer has reasoning. Set reasoning to "
                    "'drop' for this dataset, or remove enable_thinking from its chat_template_kwargs"
                ) from error
            raise
        weights = [message.weight for message in messages]
        if conversation.reasoning == "keep" and conversation.weight == 1 and weights.count(1) == len(weights):
            return [(answer, 1.0) for answer in answers]
        if any(weight != 1 for weight in weights) and any(answer.turn < 0 for answer in answers):
            raise CannotAlign("the generation marks of the template do not say which turn has which weight")
        if conversation.reasoning == "mask":
            marks = self._cache_for_template("reasoning", self._find_reasoning_marks)
            written = (
                (text[answer.start : answer.end], messages[answer.turn])
                for answer in answers
                if answer.turn >= 0
            )
            if not all(marks) or any(_is_unmarked(*one, marks) for one in written):
                detail = (
                    "reasoning='mask': the chat template does not write reasoning between two marks such as "
                    "<think>…</think>. Set reasoning to 'keep' or 'drop'"
                )
                raise BadSample(detail, reason="unsupported_turn", key=conversation.key, stage="encode")
            answers = [part for answer in answers for part in _without_reasoning(answer, text, marks)]
        weighted = (
            (answer, conversation.weight * (weights[answer.turn] if answer.turn >= 0 else 1.0))
            for answer in answers
        )
        return [(answer, weight) for answer, weight in weighted if weight]

    def _find_reasoning_marks(self) -> tuple[str, str]:
        """Return what the chat template writes before and after ``reasoning_content``.

        ``<think>`` and ``</think>`` if it does not write that field; two empty texts if it has no marks.
        """
        thought, answer = "packhorse_thought", "packhorse_answer"
        reply = Message("assistant", (TextPart(answer),), {"reasoning_content": thought})
        turns = self.family.turns(Conversation((Message("user", (TextPart("Q."),)), reply)))
        try:
            text = self.render(turns)
            spans = self.family.answer_spans(self, turns, text)
        except template_errors(CannotAlign, TypeError, ValueError, LookupError):
            return _THINK
        written = "".join(text[span.start : span.end] for span in spans)
        before, found, rest = written.partition(thought)
        after, has_answer, _ = rest.partition(answer)
        if not found or _THINK[1] in after:
            return _THINK
        return (
            (before.strip(), after.strip()) if has_answer and before.strip() and after.strip() else ("", "")
        )

    def place_audio(self, example: Mapping[str, Any], key: str = "") -> Mapping[str, Any]:
        """:func:`packhorse.formats.conversation.place_audio` with the family's placeholder."""
        if example.get("audio") is None:
            return example
        placeholders: list[str] = []
        with suppress(ConfigError):  # a stub with the name of a known class has no tokens
            placeholders = [self.placeholders["audio"]] if "audio" in self.family.kinds else []
        return place_audio(example, placeholders, key)

    def check_placeholders(self, text: str, conversation: Conversation) -> None:
        """Raise unless the rendered text has one placeholder for each media item, and none from a text."""
        if not conversation.media and not any(written in text for written in self.placeholders.values()):
            return
        wanted = Counter(ref.kind for ref in conversation.media)
        texts = [
            "".join(part.text for part in message.parts if isinstance(part, TextPart))
            for message in conversation.messages
        ]
        expected: Counter[str] = Counter()
        for kind, placeholder in self.placeholders.items():
            expected[placeholder] += wanted[kind]
        for placeholder, items in expected.items():
            count = text.count(placeholder)
            typed = sum(written.count(placeholder) for written in texts)
            if count != items or typed:
                what = f"the rendered text holds '{placeholder}' {count} times for {items} media items"
                if typed:
                    what += f", {typed} of them typed in a text: not distinguishable from a media item"
                raise self.family.bad(what, conversation)

    def text_options(self, text: str) -> Mapping[str, Any]:
        """Options with which the processor's call tokenises a rendered text."""
        arguments = self.family.text_arguments(self, text)
        options: Mapping[str, Any] = arguments.get("text_kwargs", arguments)  # some processors take them flat
        return options

    def tokenize(self, text: str, rendered: str | None = None) -> list[int]:
        """The ids of a text that was made of a rendered one, as the processor's call tokenises it."""
        return token_ids(self.tokenizer(text, **self.text_options(text if rendered is None else rendered)))

    # --- media, from sizes alone -------------------------------------------------------------------------

    def size_of(self, ref: MediaRef) -> AnySize:
        """The size :meth:`media_tokens` takes, from the header alone: no pixel or sample is decoded."""
        sampling = self.video_sampling if ref.kind == "video" else _ALL_FRAMES
        size = size_of(ref, sampling, self.family.sampling_rate)
        if ref.kind == "audio":
            self.family.check_audio_length(ref, size)
        return self.configured_size(ref, size) or size

    def configured_size(self, ref: MediaRef, size: MediaSize) -> ConfiguredSize | None:
        """Return the size of a media item with settings of its own; None for one without.

        Raises:
            BadSample: the settings are invalid, or the processor rejects the item.
        """
        settings = settings_of(ref) if ref.options else {}
        return self.configure(ref.kind, size, settings) if settings else None

    def configure(self, kind: MediaKind, size: MediaSize, settings: Mapping[str, int]) -> ConfiguredSize:
        """Return the size of a media item of this size with these settings; see :meth:`Family.configure`."""
        check_own_call(self.processor)
        with processor_errors(""):
            resized, options = self.family.configure(self, kind, size, settings)
            if isinstance(resized, VideoInfo) and resized != size:
                check_bytes(
                    resized.total_frames * resized.height * resized.width * 3 * 4,  # resized as floats
                    DEFAULT_MAX_BYTES,
                    f"{resized.total_frames:,} frames resized to {resized.width:,} x {resized.height:,}",
                    "lower min_pixels, or take fewer frames",
                )
        pairs = tuple(
            (name, tuple(value.items()) if isinstance(value, Mapping) else value)
            for name, value in options.items()
        )
        return ConfiguredSize(size, resized, pairs, tuple(sorted(settings.items())))

    def resize(self, item: Any, configured: ConfiguredSize) -> Any:
        """Return a decoded image or video as the processor gets it."""
        if configured.size == configured.original:
            return item
        return self.family.resize(self, item, configured.size)

    def for_size(self, kind: MediaKind, size: AnySize) -> Encoder:
        """Return the encoder for an item: one whose processor has the item's own options as attributes."""
        if not isinstance(size, ConfiguredSize):
            return self
        key = kind, size.options
        if key not in self._with_options:
            if len(self._with_options) >= _MAX_OPTIONS:
                self._with_options.clear()
            bound = copy.copy(self)
            bound.processor, bound.has_item_options = with_options(self.processor, kind, size.options), True
            self._with_options[key] = bound
        return self._with_options[key]

    def media_tokens(self, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """See :meth:`Family.media_tokens`."""
        return self.family.media_tokens(self.for_size(kind, size), kind, plain_size(size), images_in_sample)

    def media_patches(self, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """See :meth:`Family.media_patches`; 0 for audio."""
        if kind == "audio":
            return 0
        return self.family.media_patches(self.for_size(kind, size), kind, plain_size(size), images_in_sample)

    def pieces_of(self, sizes: Sizes, key: str = "") -> list[Pieces]:
        """:meth:`Family.pieces_together`; BadSample if the processor rejects the media."""
        with processor_errors(key):
            return self.family.pieces_together(self, sizes)

    def expand(self, text: str, sizes: Sizes, key: str = "") -> str:
        """A rendered text as the processor tokenises it, from the sizes of its media alone.

        :meth:`tokenize` gives it the ids of :meth:`encode`. Raises as :meth:`pieces_of`.
        """
        texts = [write_out(pieces) for pieces in self.pieces_of(sizes, key)]
        return fill_placeholders(text, self.placeholders, [kind for kind, _ in sizes], texts)

    def outline(self, text: str, sizes: Sizes, key: str = "") -> tuple[str, int]:
        """:meth:`expand` with every repeated token written once, and how many tokens that omits.

        The length of a sample is the number of tokens of the outline and those omitted. Only tokens that the
        tokenizer never splits or joins to a neighbour are shortened, so the count stays exact; it costs the
        text alone, however large the media.
        """
        if not sizes:
            return text, 0
        short = [shorten(pieces, self.special_tokens) for pieces in self.pieces_of(sizes, key)]
        kinds = [kind for kind, _ in sizes]
        outlined = fill_placeholders(text, self.placeholders, kinds, [written for written, _ in short])
        return outlined, sum(omitted for _, omitted in short)

    def probe(self, kind: MediaKind, size: Any) -> Probe:
        """Return what the processor makes of a placeholder of this size; each size is tried once.

        For processors whose arithmetic is unknown. Costs a call of the processor, and is right only if the
        number of tokens depends on the size alone.
        """
        if (kind, size) not in self._probes:
            placeholder = placeholder_media(kind, size, self.family.sampling_rate)
            encoded = self.encode(Conversation((Message("user", (placeholder,)),)))
            ids = encoded.tokens["input_ids"].tolist()
            tokens = sum(token in self.media_token_ids for token in ids)
            counted = [key for key in encoded.media if self.family.layout[key].rows_from is not None]
            patches = sum(sum(self.rows(encoded, key)) for key in counted)
            self._probes[kind, size] = Probe(tokens, patches, self._read_pieces(encoded, ids, tokens))
        return self._probes[kind, size]

    def _read_pieces(self, encoded: Encoded, ids: list[int], tokens: int) -> Pieces:
        """What the ids read as where the text has the placeholder; else the placeholder, once per token."""
        ((kind, _),) = encoded.sizes
        placeholder = self.placeholders.get(kind)
        if placeholder is None:
            return []
        before, _, after = encoded.text.partition(placeholder)
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        read = str(self.tokenizer.decode(ids, **options))
        start = read.find(before)
        end = len(read) - len(after)
        if start < 0 or start + len(before) > end or not read.endswith(after):
            return [(placeholder, tokens)]
        # Its tokens apart from what surrounds them, so that they are known to be the same ones.
        return split_runs(read[start + len(before) : end], placeholder)

    def fake_image_span(
        self, ids: Sequence[int], conversation: Conversation, sizes: Sizes
    ) -> tuple[int, int]:
        """First and after-last token that the fake image adds to a sample, brackets and newlines included.

        They are what lies between the tokens that the conversation with the image and that without it have in
        common at their beginning and at their end. (A space that the template writes only before a text, or
        that becomes one token with the image's own newlines, goes with them.) ``ids`` are without padding,
        ``conversation`` has the fake image, its first one, and ``sizes`` are in the order of the text.
        """
        without = _without_first_image(conversation)
        text = self.render_conversation(without)
        if not without.media:
            plain = self.tokenize(text)
        elif self.family.exact:
            fake = [kind for kind, _ in sizes].index("image")
            rest = [size for index, size in enumerate(sizes) if index != fake]
            plain = self.tokenize(self.expand(text, rest, without.key))
        else:
            plain = self.encode(without).tokens["input_ids"].tolist()
        first = _common_prefix(ids, plain)
        return first, len(ids) - _common_prefix(ids[::-1], plain[first:][::-1])

    # --- encoding ----------------------------------------------------------------------------------------

    def load(self, refs: Iterable[MediaRef]) -> LoadedMedia:
        """Decode the media of one conversation; see :meth:`Family.load`."""
        return self.family.load(self, refs)

    def encode(self, conversation: Conversation, *, fake_image: bool = False) -> Encoded:
        """Load the media, render the template, run the processor on this one conversation.

        Args:
            conversation: what to encode.
            fake_image: whether its first image is the fake one, whose tokens get ``attention_mask`` 0.

        Raises:
            BadSample: a media item cannot be loaded, the text and the media do not agree, or the template or
                the processor rejects them.
            ConfigError: the processor returns a tensor that the layout does not declare, or of another shape.
        """
        family = self.family
        family.check(conversation)
        text = self.render_conversation(conversation)
        self.check_placeholders(text, conversation)
        with processor_errors(conversation.key):
            media = self.load(conversation.media)
            output, read = self._call(text, media)
        sizes = media.sizes(ref.kind for ref in conversation.media)
        encoded = Encoded(text, conversation, {}, {}, tuple(sizes), read)
        family.sort_output(encoded, output)
        if self.compact is not None:
            self._as_bytes(encoded)
        self._check_media(encoded, conversation)
        if fake_image:
            first, after = self.fake_image_span(encoded.tokens["input_ids"].tolist(), conversation, sizes)
            encoded.tokens["attention_mask"][first:after] = 0
        return encoded

    def _as_bytes(self, encoded: Encoded) -> None:
        """Convert pixels that the processor returns as whole numbers to bytes."""
        assert self.compact is not None
        for key in self.compact.formats.keys() & encoded.media.keys():
            pixels = as_bytes(encoded.media[key])
            if pixels is None:
                what = f"the processor returned '{key}' with values that are no bytes: set pixels='processor'"
                raise ConfigError(what, setting="pixels")
            encoded.media[key] = pixels

    def _call(self, text: str, media: LoadedMedia) -> tuple[Mapping[str, Any], TokenizedText | None]:
        """The processor's output, if possible with a tokenizer that is quicker over media; and its tokens."""
        if self._quick is None:
            return self.family.call(self._called, text, media), None
        quick, tokenizer = self._quick
        try:
            return self.family.call(quick, text, media), tokenizer.read
        except (AttributeError, TypeError, ValueError, LookupError) as error:
            # The sample may be at fault, or a processor that wants more of its tokenizer than there is.
            output = self.family.call(self._called, text, media)
            _warn_slow_tokenizer(type(self.processor).__name__, f"{type(error).__name__}: {error}")
            return output, None

    def labels(self, encoded: Encoded) -> torch.Tensor:
        """Labels [S] of an encoded sample: all that a model has to generate, nothing else."""
        return self._labels_and_weights(encoded)[0]

    def _labels_and_weights(self, encoded: Encoded) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Labels [S] and loss weights [S]; None if all weights are 1."""
        import torch

        ids = encoded.tokens["input_ids"].tolist()
        answers = self.answers(encoded.conversation, encoded.text)

        def label(chosen: Iterable[Answer]) -> torch.Tensor:
            spans = [(answer.start, answer.end) for answer in chosen]
            supervised = supervised_tokens(self, encoded.text, spans, ids, self.media_token_ids, encoded.read)
            labels = np.full(len(ids), IGNORE_INDEX, np.int64)
            for start, end in supervised:
                labels[start:end] = ids[start:end]
            return torch.from_numpy(labels)

        weights = None
        for weight in {weight for _, weight in answers} - {1.0}:
            weights = torch.ones(len(ids)) if weights is None else weights
            of_weight = label(answer for answer, other in answers if other == weight)
            weights[of_weight != IGNORE_INDEX] = weight
        return label(answer for answer, _ in answers), weights

    def label_sample(self, encoded: Encoded, key: str) -> Sample:
        """Return the sample with its labels; BadSample if its answers are not located with certainty."""
        try:
            labels, weights = self._labels_and_weights(encoded)
        except CannotAlign as error:
            raise BadSample(str(error), key=key, stage="encode") from error
        # A hook may have made labels, loss weights and positions.
        tokens: dict[str, Any] = {"labels": labels, "loss_weights": weights, **encoded.tokens}
        counts = Counter(kind for kind, _ in encoded.sizes)
        return Sample(
            labels=tokens.pop("labels"),
            position_ids=tokens.pop("position_ids", None),
            loss_weights=tokens.pop("loss_weights"),
            tokens=tokens,
            media=encoded.media,
            num_items={kind: counts[kind] for kind in MEDIA_KINDS},
            key=key,
        )

    def rows(self, encoded: Encoded, key: str) -> list[int]:
        """How many entries along axis 0 of a media tensor belong to each of its items, in text order.

        Only for tensors whose axis 0 is owned by items or their rows; one owned by the sample is not divided.
        """
        family = self.family
        layout = family.layout[key]
        items = [(kind, size) for kind, size in encoded.sizes if kind in layout.kinds]
        if layout.owner == "sample":
            what = f"axis 0 of '{key}' is the sample's, not its media's ({family.name})"
            raise ConfigError(what, setting=key)
        if layout.owner == "item":
            return [1] * len(items)
        if layout.rows_from is None:
            return [family.item_rows(self, key, kind, plain_size(size)) for kind, size in items]
        if layout.rows_from not in encoded.media:
            what = f"the processor returned '{key}' without '{layout.rows_from}' ({family.name})"
            raise ConfigError(what, setting=layout.rows_from)
        grid = encoded.media[layout.rows_from]
        entries = iter(grid.reshape(len(grid), -1).numpy().prod(1).tolist())
        return [sum(next(entries) for _ in range(n)) for n in self.rows(encoded, layout.rows_from)]

    def _check_media(self, encoded: Encoded, conversation: Conversation) -> None:
        """Raise if a sample's media tensors or media tokens do not agree with its media."""
        family = self.family
        returned = {kind for key in encoded.media for kind in family.layout[key].kinds}
        counts = Counter(kind for kind, _ in encoded.sizes)
        for kind, items in counts.items():
            if kind not in returned:
                what = f"the processor returned no tensor for its {items} {kind}(s)"
                raise family.bad(what, conversation)
        if family.exact:
            ids = encoded.tokens["input_ids"].numpy()
            actual = sum(np.count_nonzero(ids == token) for token in self.media_token_ids)
            needed = sum(self.media_tokens(kind, size, counts["image"]) for kind, size in encoded.sizes)
            if actual != needed:
                raise family.bad(f"{actual} media tokens where its media need {needed}", conversation)
        for key, value in encoded.media.items():
            layout = family.layout[key]
            expected = 1 if layout.owner == "sample" else sum(self.rows(encoded, key))
            shape = tuple(value.shape)
            if shape[0] != expected:
                what = (
                    f"the processor returned '{key}' of shape {shape}; for {dict(counts)} "
                    f"family '{family.name}' ({layout.owner}) expects {expected} along axis 0"
                )
                raise ConfigError(what, setting=key, value=shape)


def spans_by_weight(answers: Sequence[tuple[Answer, float]]) -> Iterator[tuple[float, list[Span]]]:
    """Yield the spans of consecutive answers with the same weight, and that weight."""
    for weight, group in groupby(answers, itemgetter(1)):
        yield weight, [(answer.start, answer.end) for answer, _ in group]


def _dropped_length(answer: str, written: str) -> int:
    """Return how many characters of an answer are not in what the template writes for its turn."""
    if answer.strip() in written:
        return 0
    lines = [line for line in map(str.strip, answer.splitlines()) if line]
    return sum(len(line) for line in lines if line not in written)


def _without_reasoning(answer: Answer, text: str, marks: tuple[str, str]) -> Iterator[Answer]:
    """Yield what an answer has before and after its reasoning, which is between ``marks`` or ``<think>``."""
    start = answer.start
    end = _END_OF_THOUGHT.search(text, start, answer.end)
    is_open = _OPEN_THOUGHT.search(text, 0, start) or (end and _THINK[0] not in text[start : end.start()])
    if end and is_open:
        start = end.end()  # the generation prompt, or that of the model which gave the answer, has begun it
    for thought in _reasoning_pattern(marks).finditer(text, start, answer.end):
        yield answer._replace(start=start, end=thought.start())
        start = thought.end()
    yield answer._replace(start=start)


@cache
def _reasoning_pattern(marks: tuple[str, str]) -> re.Pattern[str]:
    pairs = dict.fromkeys((_THINK, marks))
    return re.compile(
        "|".join(rf"{re.escape(begin)}.*?{re.escape(end)}\s*" for begin, end in pairs), re.DOTALL
    )


def _is_unmarked(written: str, message: Message, marks: tuple[str, str]) -> bool:
    """Return whether the template wrote the reasoning of an answer without these marks, or ``<think>``.

    Some templates have marks for it only in rows with tools.
    """
    thought = str(message.extras.get("reasoning_content") or "").strip()
    return bool(thought) and thought in written and marks[1] not in written and _THINK[1] not in written


def _reasons(conversation: Conversation) -> bool:
    """Return whether an answer has reasoning, as a field or in its text."""
    answers = (message for message in conversation.messages if message.role == "assistant")
    return any(one.extras.get("reasoning_content") or _THINK[1] in one.text for one in answers)


def _check_json_values(conversation: Conversation) -> None:
    """Raise for values in tools and fields that JSON does not have: transformers would write their type."""
    fields: list[tuple[str, Any]] = [("tools", conversation.tools)] if conversation.tools else []
    for number, message in enumerate(conversation.messages):
        if message.extras:  # a template does not know other fields
            known = TURN_FIELDS & message.extras.keys()
            fields += [(f"'{name}' of turn {number}", message.extras[name]) for name in sorted(known)]
    for where, value in fields:
        if problem := _describe_non_json(value):
            detail = f"{where} has {problem}"
            raise BadSample(detail, reason="wrong_format", key=conversation.key, stage="encode")


def _describe_non_json(value: Any) -> str:
    """Describe what of a value JSON does not have; empty if it has all."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, _JSON_VALUES):
                continue
            unknown = item
            if isinstance(item, list | tuple):
                below += item
                unknown = None
            elif isinstance(item, Mapping):
                below += item.values()
                unknown = next((key for key in item if not isinstance(key, _JSON_VALUES)), None)
            if unknown is not None:
                return f"a value of type {type(unknown).__name__}, which JSON does not have: write it as text"
        if not below:
            return ""
        level = below
    return f"values more than {_MAX_DEPTH} levels deep"


def _with_arguments_as_text(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn in which the arguments of calls are JSON, as the ``tojson`` of templates writes it."""

    def convert(call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or isinstance(function.get("arguments", ""), str):
            return call
        # A number of numpy is the only value left that json does not know: see _check_json_values.
        text = json.dumps(function["arguments"], ensure_ascii=False, default=lambda number: number.item())
        return {**call, "function": {**function, "arguments": text}}

    calls = turn.get("tool_calls")
    return (
        {**turn, "tool_calls": [convert(call) for call in calls]} if isinstance(calls, list) else dict(turn)
    )


def _tokenizer_digest(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        settings = json.loads(backend.to_str())
        settings["padding"] = settings["truncation"] = None  # left by the last call of the tokenizer
        content = json.dumps(settings, sort_keys=True)
    else:
        content = json.dumps([tokenizer.get_vocab(), special_tokens(tokenizer)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _describe(processor: Any) -> Mapping[str, Any]:
    """Return the settings of a processor, or of its parts; raise if it has none."""
    if hasattr(processor, "to_dict"):
        settings: dict[str, Any] = processor.to_dict()
        return settings
    names = ("image_processor", "video_processor", "audio_processor", "feature_extractor")
    parts = {name: part for name in names if (part := getattr(processor, name, None)) is not None}
    settings = {
        name: part.to_dict() if hasattr(part, "to_dict") else vars(part)
        for name, part in parts.items()
        if hasattr(part, "to_dict") or hasattr(part, "__dict__")
    }
    if parts and not settings:
        why = "it has no to_dict with its settings, so counts cannot be saved"
        raise ConfigError.of("processor", type(processor).__name__, why)
    return settings


def _remove_paths(value: Any) -> Any:
    """Return settings without their origin: the same processor in another folder counts the same."""
    if isinstance(value, Mapping):
        kept = {k: v for k, v in value.items() if k not in ("_name_or_path", "name_or_path", "tokenizer")}
        return {name: _remove_paths(item) for name, item in kept.items()}
    if isinstance(value, list | tuple):
        return [_remove_paths(item) for item in value]
    return value


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many items two sequences have in common at their beginning."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(left), len(right)))


def _without_first_image(conversation: Conversation) -> Conversation:
    """The conversation without its first image, and without the message if nothing else is in it."""
    first = next(ref for ref in conversation.media if ref.kind == "image")
    messages = []
    for message in conversation.messages:
        rest = tuple(part for part in message.parts if part is not first)
        if len(rest) == len(message.parts):
            messages.append(message)
        elif rest:
            messages.append(replace(message, parts=rest))
    return replace(conversation, messages=tuple(messages))


@cache
def _warn_slow_tokenizer(processor: str, why: str) -> None:
    logger.warning("%s does not work with a quicker tokenizer (%s): encoding takes longer", processor, why)
