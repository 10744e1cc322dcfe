"""What a model family is, and the encoding that almost all of them share.

A family declares facts (which processors it serves, its media tensors, its media tokens) and *encodes*: one
conversation goes in, ids and media tensors of one sample come out, as the processor itself makes them.
Padding, packing, truncation and labels are written once, above it. A new family is one file and one entry in
the tuple of :mod:`packhorse.families`; the contract suite then tests all of it.

Encoding costs what the processor's call costs; counting media tokens is arithmetic.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from logging import getLogger
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from packhorse.chat import (
    IGNORE_INDEX,
    TOKEN_KEYS,
    Tokenised,
    answer_spans,
    is_transformers,
    renderer,
    supervised_tokens,
    template_errors,
    tokenizer_of,
    with_runs,
)
from packhorse.errors import DATA_ERRORS, BadSample, ConfigError, PackhorseError, is_data_error, naming
from packhorse.families.expansion import REFUSALS, Counting, Pieces, Sizes
from packhorse.families.media_sizes import LoadedMedia, MediaSize, size_of
from packhorse.families.probe import blanked
from packhorse.media import VideoSampling, describe, load_media
from packhorse.types import Conversation, MediaKind, MediaLayout, MediaRef, Reason, TextPart

if TYPE_CHECKING:
    import torch


def is_at_least(least: str) -> bool:
    """Whether the installed transformers is of this version or a newer one; True if it is not installed."""
    installed = installed_transformers()
    return installed is None or _numbers(installed) >= _numbers(least)


def check_transformers(what: str, least: str) -> None:
    """Raise if the installed transformers is older than something needs.

    Args:
        what: needs it, for the message: ``"kimi_k25"``.
        least: the oldest version that it works with.

    Raises:
        ConfigError: naming both versions and the line that installs the newer one.
    """
    if not is_at_least(least):
        raise ConfigError(
            f"{what} needs transformers {least} or newer, and {installed_transformers()} is installed: "
            f"pip install 'transformers>={least}'"
        )


def installed_transformers() -> str | None:
    """The version of transformers; None if there is none."""
    imported = sys.modules.get("transformers")
    return getattr(imported, "__version__", None) or _installed()


@cache
def _installed() -> str | None:
    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


@cache
def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sample as the processor made it, not yet labelled.

    Attributes:
        text: the rendered conversation, placeholders not expanded.
        turns: the messages it was rendered from.
        tokens: tensors of shape [S] by key, ``input_ids`` and ``attention_mask`` at least.
        media: media tensors by key, as the family's layout declares them.
        sizes: kind and size of each medium, in the order of the text.
        read: how the text was tokenised, a medium's token once; None where nobody looked.
    """

    text: str
    turns: Sequence[Mapping[str, Any]]
    tokens: dict[str, torch.Tensor]
    media: dict[str, torch.Tensor]
    sizes: tuple[tuple[MediaKind, MediaSize], ...] = ()
    read: Tokenised | None = None


def check_layout(family: Family, processor: Any, encoded: Encoded) -> None:
    """Refuse a media tensor whose axis 0 is not as long as the family's layout says for these media."""
    for key, value in encoded.media.items():
        layout = family.layout[key]
        expected = 1 if layout.owner == "sample" else sum(family.rows(processor, encoded, key))
        if value.shape[0] != expected:
            kinds = Counter(kind for kind, _ in encoded.sizes)
            raise ConfigError(
                f"the processor returned '{key}' of shape {tuple(value.shape)}; for {dict(kinds)} family "
                f"'{family.name}' ({layout.owner}) expects {expected} along axis 0"
            )


def check_media_tensors(family: Family, encoded: Encoded, conversation: Conversation) -> None:
    """Refuse a sample with a media item that the processor returned no tensor for."""
    made = {kind for key in encoded.media for kind in family.layout[key].kinds}
    for kind, number in Counter(kind for kind, _ in encoded.sizes).items():
        if kind not in made:
            raise family.bad(f"the processor returned no tensor for its {number} {kind}(s)", conversation)


def check_media_tokens(family: Family, processor: Any, encoded: Encoded, conversation: Conversation) -> None:
    """Refuse a sample with more or fewer media tokens than its media need, where the family can tell."""
    if not family.exact:
        return
    ids = encoded.tokens["input_ids"]
    found = sum(int((ids == token).sum()) for token in family.media_token_ids(processor))
    images = sum(kind == "image" for kind, _ in encoded.sizes)
    expected = sum(family.media_tokens(processor, kind, size, images) for kind, size in encoded.sizes)
    if found != expected:
        raise family.bad(f"{found} media tokens where its media need {expected}", conversation)


__all__ = ["TOKEN_KEYS", "Encoded", "Family", "LoadedMedia", "MediaSize", "Pieces", "Sizes", "token_named"]

logger = getLogger(__name__)

_ALL_FRAMES = VideoSampling()


class Family(Counting):
    """A model family; subclasses declare what differs. What it can count is in :class:`Counting`.

    Attributes:
        name: for messages and tests.
        processor_classes: names of the processor classes it serves.
        layout: every media tensor the processor may return.
        fill: what ragged tensors are padded with, where that is not 0.
        kinds: the media it takes.
        caveats: what it cannot promise, in words.
        sampling_rate: of sound, as the model wants it.
        least_samples: shorter sound has no token, or breaks the feature extractor.
        chats: whether conversations are written by a chat template.
        mrope: the model's positions are three rows (time, height, width), not one, found from media grids.
        both_ways: the tensor per token that marks media whose tokens see each other in both directions.
        listed: whether its processors are known, and tested, by their class.
        min_transformers: the oldest transformers it works with, and
        min_transformers_for: for single kinds of media, where they need a newer one.
    """

    name: ClassVar[str]
    processor_classes: ClassVar[tuple[str, ...]] = ()
    layout: ClassVar[MediaLayout] = MappingProxyType({})
    fill: ClassVar[Mapping[str, float]] = MappingProxyType({})
    kinds: ClassVar[tuple[MediaKind, ...]] = ("image",)
    caveats: ClassVar[tuple[str, ...]] = ()
    sampling_rate: ClassVar[int] = 16_000
    least_samples: ClassVar[int] = 1
    chats: ClassVar[bool] = True
    mrope: ClassVar[bool] = False
    both_ways: ClassVar[str | None] = None
    listed: ClassVar[bool] = True
    min_transformers: ClassVar[str] = "5.12"
    min_transformers_for: ClassVar[Mapping[MediaKind, str]] = MappingProxyType({})

    # --- facts; subclasses override what differs ---------------------------------------------------------

    def placeholders(self, processor: Any) -> dict[MediaKind, str]:
        """What the chat template writes for one medium of each kind, before it is expanded."""
        return {kind: token_named(processor, f"{kind}_token") for kind in self.kinds}

    def media_token_ids(self, processor: Any) -> frozenset[int]:
        """The ids that stand for the content of media (not for the brackets around it)."""
        tokenizer = tokenizer_of(processor)
        return frozenset(
            tokenizer.convert_tokens_to_ids(token_named(processor, f"{kind}_token")) for kind in self.kinds
        )

    def item_rows(self, processor: Any, key: str, kind: MediaKind, size: Any) -> int:
        """How many rows a medium has in a tensor whose layout is ``"rows"`` without ``rows_from``."""
        raise NotImplementedError(f"{self.name} does not say how many rows of '{key}' a medium has")

    def check(self, conversation: Conversation) -> None:
        """Refuse what the family cannot take, before anything is loaded.

        Raises:
            BadSample: it has a media item of a kind that the family does not take, or is empty.
            ConfigError: it has a media item for which the installed transformers is too old.
        """
        if not conversation.messages:
            raise self.bad("a conversation without turns", conversation, "empty_conversation")
        for ref in conversation.media:
            if ref.kind not in self.kinds:
                known = ", ".join(self.kinds)
                raise self.bad(f"a part of type {ref.kind}; {self.name} takes {known}", conversation)
            if ref.kind in self.min_transformers_for:
                check_transformers(f"{ref.kind} of {self.name}", self.min_transformers_for[ref.kind])

    def call_arguments(self, processor: Any, media: LoadedMedia) -> dict[str, Any]:
        """Keyword arguments of the processor's call for the media of one conversation."""
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

    def text_arguments(self, processor: Any, text: str) -> dict[str, Any]:
        """Keyword arguments of the processor's call for the text; lengths and padding are ours to decide."""
        bos = getattr(tokenizer_of(processor), "bos_token", None)
        # A template that writes the beginning-of-text token itself must not get a second one.
        written = bos is not None and text.startswith(bos)
        return {"text_kwargs": {"add_special_tokens": False}} if written else {}

    # --- what all share ----------------------------------------------------------------------------------

    def encode(self, conversation: Conversation, processor: Any) -> Encoded:
        """Load the media, render the template, run the processor on this one conversation.

        Raises:
            BadSample: a medium cannot be loaded, the text and the media do not agree, or the template or the
                processor refuses them.
            ConfigError: the processor returns a tensor that the layout does not declare, or of another shape.
        """
        self.check(conversation)
        text = self.rendered(processor, conversation)
        self.check_placeholders(processor, text, conversation)
        with naming(conversation.key):
            media = self.load(conversation.media, processor)
        try:
            output, read = self._called(processor, text, media)
        except PackhorseError:
            raise
        except REFUSALS as error:
            raise self.bad(f"the processor refuses it: {error}", conversation, "sample_failed") from error
        except DATA_ERRORS as error:
            if not is_data_error(error):
                raise
            what = f"the processor fails on it: {type(error).__name__}: {error}"
            raise self.bad(what, conversation, "sample_failed") from error
        sizes = media.sizes(ref.kind for ref in conversation.media)
        made = Encoded(text, self.turns(conversation), {}, {}, tuple(sizes), read)
        encoded = self._sorted_out(made, output)
        check_media_tensors(self, encoded, conversation)
        check_media_tokens(self, processor, encoded, conversation)
        check_layout(self, processor, encoded)
        return encoded

    def labels(self, processor: Any, encoded: Encoded) -> torch.Tensor:
        """Labels [S] of an encoded sample: the answers and their end-of-turn tokens, nothing else.

        Raises:
            CannotAlign: see :func:`packhorse.chat.supervised_tokens`.
        """
        import torch

        spans = self.answer_spans(processor, encoded)
        ids = encoded.tokens["input_ids"]
        media_ids = self.media_token_ids(processor)
        labels = torch.full_like(ids, IGNORE_INDEX, dtype=torch.int64)
        for start, end in supervised_tokens(
            processor, encoded.text, spans, ids.tolist(), media_ids, encoded.read
        ):
            labels[start:end] = ids[start:end]
        return labels

    def answer_spans(self, processor: Any, encoded: Encoded) -> list[tuple[int, int]]:
        """The characters of ``encoded.text`` that are supervised."""
        return answer_spans(
            processor, encoded.turns, encoded.text, lambda turns: self.render(processor, turns)
        )

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

    def render(self, processor: Any, turns: Sequence[Mapping[str, Any]]) -> str:
        """The conversation as one text, placeholders not expanded."""
        return renderer(processor)(turns)

    def rendered(self, processor: Any, conversation: Conversation) -> str:
        """:meth:`render` of a conversation.

        Raises:
            BadSample: the chat template refuses it.
        """
        try:
            return self.render(processor, self.turns(conversation))
        except template_errors() as error:
            raise self.bad(f"the chat template refuses it: {error}", conversation, "wrong_format") from error

    def check_template(self, processor: Any) -> None:
        """Refuse a processor that is made for chat templates and was given none.

        Raises:
            ConfigError: it has none, so that no sample could be rendered.
        """
        if not self.chats or not hasattr(processor, "chat_template"):
            return  # one without the attribute has its own way of rendering
        # Those of transformers do not ask their tokenizer for one.
        owners = (processor,) if is_transformers(processor) else (processor, tokenizer_of(processor))
        if all(getattr(owner, "chat_template", None) is None for owner in owners):
            raise ConfigError(
                f"{type(processor).__name__} has no chat template: set processor.chat_template (released "
                "models bring theirs along with AutoProcessor.from_pretrained)"
            )

    def video_sampling(self, processor: Any) -> VideoSampling:
        """How the processor samples frames; all frames where it does not say."""
        owner = getattr(processor, "video_processor", None)
        return VideoSampling() if owner is None else VideoSampling.from_processor(processor)

    def size_of(self, ref: MediaRef, processor: Any) -> MediaSize:
        """The size :meth:`media_tokens` takes, from the header alone: no pixel or sample is decoded.

        Raises:
            BadSample: what the header shows already of what :meth:`load` would refuse.
        """
        sampling = self.video_sampling(processor) if ref.kind == "video" else _ALL_FRAMES
        size = size_of(ref, sampling, self.sampling_rate)
        if ref.kind == "audio":
            self._check_sound(ref, size)
        return size

    def _check_sound(self, ref: MediaRef, samples: Any) -> None:
        if samples < self.least_samples:
            raise BadSample(
                f"{describe(ref.source)}: {samples} samples at {self.sampling_rate:,} Hz, "
                f"{self.name} needs at least {self.least_samples}",
                reason="broken_media",
                stage="encode",
            )

    def blanked(self, conversation: Conversation, sizes: Sizes) -> Conversation:
        """The conversation with a blank medium of the same size for each of its own.

        Where a family is not :attr:`exact`, encoding this tells how long the sample gets without decoding its
        media; the processor still does all its work.
        """
        return blanked(self, conversation, sizes)

    def load(self, refs: Iterable[MediaRef], processor: Any) -> LoadedMedia:
        """Decode the media of one conversation.

        Raises:
            BadSample: a medium cannot be loaded, or a sound is too short for the family.
        """
        loaded = LoadedMedia([], [], [])
        homes: dict[MediaKind, list[Any]] = {
            "image": loaded.images,
            "video": loaded.videos,
            "audio": loaded.audios,
        }
        refs = tuple(refs)
        # Asked only where there is a video: a processor without one need not say how it samples.
        sampling = self.video_sampling(processor) if any(ref.kind == "video" for ref in refs) else None
        for ref in refs:
            medium: Any = load_media(ref, sampling=sampling, sampling_rate=self.sampling_rate)
            if ref.kind == "audio":
                self._check_sound(ref, len(medium[0]))
            homes[ref.kind].append(medium)
        return loaded

    def call(self, processor: Any, text: str, media: LoadedMedia) -> Mapping[str, Any]:
        """The processor's own output for one conversation, with a batch axis of one."""
        arguments = self.call_arguments(processor, media) | self.text_arguments(processor, text)
        output: Mapping[str, Any] = processor(text=[text], return_tensors="pt", **arguments)
        return output

    def _called(
        self, processor: Any, text: str, media: LoadedMedia
    ) -> tuple[Mapping[str, Any], Tokenised | None]:
        """:meth:`call`, with a tokenizer that is quicker over media; and what that has read."""
        quick, runs = with_runs(processor, self.media_token_ids(processor)) if self.listed else (None, None)
        if runs is None:
            return self.call(processor, text, media), None
        try:
            return self.call(quick, text, media), runs.read
        except (AttributeError, TypeError, ValueError, LookupError) as error:
            # The sample may be at fault, or a processor that wants more of its tokenizer than there is.
            output = self.call(processor, text, media)
            _warn_of_stand_in(type(processor).__name__, f"{type(error).__name__}: {error}")
            return output, None

    def rows(self, processor: Any, encoded: Encoded, key: str) -> list[int]:
        """How many entries along axis 0 of a media tensor belong to each of its items, in text order.

        Only for tensors whose axis 0 is owned by items or their rows; one owned by the sample is not divided.
        """
        layout = self.layout[key]
        items = [(kind, size) for kind, size in encoded.sizes if kind in layout.kinds]
        if layout.owner == "sample":
            raise ConfigError(f"axis 0 of '{key}' is the sample's, not its media's ({self.name})")
        if layout.owner == "item":
            return [1] * len(items)
        if layout.rows_from is None:
            return [self.item_rows(processor, key, kind, size) for kind, size in items]
        if layout.rows_from not in encoded.media:
            raise ConfigError(f"the processor returned '{key}' without '{layout.rows_from}' ({self.name})")
        grid = encoded.media[layout.rows_from]
        entries = iter(grid.reshape(len(grid), -1).prod(1).tolist())
        return [
            sum(next(entries) for _ in range(number))
            for number in self.rows(processor, encoded, layout.rows_from)
        ]

    def bad(self, detail: str, conversation: Conversation, reason: Reason = "media_mismatch") -> BadSample:
        """The error that refuses a conversation."""
        return BadSample(detail, reason=reason, key=conversation.key, stage="encode")

    # --- what came out, and what is refused --------------------------------------------------------------

    def _sorted_out(self, encoded: Encoded, output: Mapping[str, Any]) -> Encoded:
        for key, value in output.items():
            if key in TOKEN_KEYS:
                encoded.tokens[key] = value[0]
            elif key in self.layout and hasattr(value, "shape"):
                encoded.media[key] = value
            else:
                what = f"of shape {tuple(value.shape)}" if hasattr(value, "shape") else f"({type(value)})"
                known = ", ".join(self.layout)
                raise ConfigError(
                    f"the processor returned '{key}' {what}, which family '{self.name}' does not declare as "
                    f"a tensor of its layout ({known}): add it there, or it would be lost"
                )
        return encoded

    def check_placeholders(self, processor: Any, text: str, conversation: Conversation) -> None:
        """Refuse a rendered text that has not one placeholder for each medium, or has one typed out."""
        wanted = Counter(ref.kind for ref in conversation.media)
        expected: Counter[str] = Counter()
        for kind, placeholder in self.placeholders(processor).items():
            expected[placeholder] += wanted[kind]
        for placeholder, number in expected.items():
            found = text.count(placeholder)
            typed = sum(message.text.count(placeholder) for message in conversation.messages)
            if found != number or typed:
                raise self.bad(
                    f"the rendered text holds '{placeholder}' {found} times for {number} media"
                    + (
                        f", {typed} of them typed out in a text: cannot be told from a medium"
                        if typed
                        else ""
                    ),
                    conversation,
                )


@cache
def _warn_of_stand_in(processor: str, why: str) -> None:
    logger.warning("%s does not work with a quicker tokenizer (%s): encoding takes longer", processor, why)


def token_named(processor: Any, name: str) -> str:
    """A token the processor (or its tokenizer) has under this name."""
    for owner in (processor, tokenizer_of(processor)):
        token = getattr(owner, name, None)
        if token is not None:
            return str(token)
    raise ConfigError(f"{type(processor).__name__} has no {name}, and neither has its tokenizer")
