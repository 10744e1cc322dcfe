"""Encode one row for display: its turns as in the file, and its tokens as the model sees them.

Encoding costs the same as in training: media are decoded and the processor runs.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from packhorse.chat import IGNORE_INDEX, CannotAlign, label_tokens, template_errors, text_spans
from packhorse.collate.packer import Packer
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import BadSample, data_errors
from packhorse.families import Encoder
from packhorse.formats.conversation import parse_documents
from packhorse.ledger import Ledger
from packhorse.loader.placeholder import Placeholders
from packhorse.types import Conversation, Drop, MediaMask, MediaRef, Sample, TextPart, mask_secrets

if TYPE_CHECKING:
    from torch import Tensor

TEMPLATE = "template"
"""The role of tokens that the chat template adds."""
ANSWER = "assistant"
"""The role of supervised tokens; the end-of-turn token belongs to the template and is supervised too."""

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Consecutive tokens of the same role, supervision and visibility."""

    role: str
    supervised: bool
    hidden: bool  # the attention mask excludes them (a fake image)
    media_item: str  # the placeholder token of a media item, as text; empty for text
    text: str
    start: int  # index of the first token in the document
    count: int
    positions: str = ""
    label_only: bool = False  # the last token, which the label shift removes from the input


@dataclass(frozen=True, slots=True)
class MediaItem:
    """A media item of a row: its index among the row's media, kind and file name."""

    number: int
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn as in the file: texts and media in order."""

    role: str
    parts: tuple[str | MediaItem, ...]


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A line of the token table."""

    index: int
    id: int
    text: str
    supervised: bool
    role: str
    position: str


@dataclass(frozen=True, slots=True)
class RowView:
    """A row prepared for display."""

    index: int  # the sample index; -1 for a placeholder
    turns: tuple[Turn, ...] = ()  # as in the file; empty if the row cannot be read
    media: tuple[MediaItem, ...] = ()
    runs: tuple[TokenRun, ...] = ()  # the tokens the model sees; empty if the row cannot be encoded
    length: int = 0  # tokens in a pack, after the label shift
    padded_length: int = 0  # the length, padded to a multiple of the alignment
    supervised: int = 0
    bidirectional: tuple[Span, ...] = ()  # tokens that attend to each other in both directions
    error: BadSample | None = None
    drops: tuple[Drop, ...] = ()  # ledger entries of the encoder: truncated, nothing supervised
    tokens: tuple[TokenRow, ...] = field(default=(), repr=False)


class RowEncoder:
    """Encode rows for display, one at a time; ``packer`` shifts them and computes their positions."""

    def __init__(self, samples: PreTokenizedDatasetWrapper, packer: Packer) -> None:
        self.samples, self.packer = samples, packer
        self.encoder, self.family = samples.encoder, samples.family
        self._lock = threading.Lock()
        self._placeholders = Placeholders(samples)

    @property
    def knows_positions(self) -> bool:
        """Whether the positions are the model's; three-row (M-RoPE) positions need its config."""
        return not self.family.mrope or self.packer.get_rope_index is not None

    def conversation(self, index: int) -> Conversation:
        """Return the row as a conversation; raise ``BadSample`` if it cannot be read.

        That of a pair has the turns of the chosen answer, then those of the rejected one.
        """
        first, *others = self._documents(index)
        messages = (message for document in (first, *others) for message in document.messages)
        return replace(first, messages=tuple(messages)) if others else first

    def _documents(self, index: int) -> tuple[Conversation, ...]:
        key = self.samples.key(index)
        return parse_documents(self.encoder.place_audio(self.samples.dataset[index], key), key)

    def view(self, index: int) -> RowView:
        """Return a row for display; if it cannot be read or encoded, as much as is known, and the error."""
        with self._lock:
            row = RowView(index)
            with data_errors() as outcome:
                conversation = self.conversation(index)
                turns, media = split_conversation(conversation)
                row = replace(row, turns=turns, media=media)
                self.samples.ledger = Ledger()  # only the entries of this row
                return self._add_documents(row)
            return replace(row, error=outcome.error)

    def _add_documents(self, row: RowView) -> RowView:
        """Add the tokens of a row; those of a pair one document after the other, as in a pack."""
        conversations, samples = self._documents(row.index), self.samples.load_documents(row.index)
        for conversation, sample in zip(conversations, samples, strict=True):
            row = self._add_tokens(row, conversation, sample)
        return replace(row, drops=tuple(self.samples.ledger))

    def _add_tokens(self, row: RowView, conversation: Conversation, encoded: Sample) -> RowView:
        positions = self.packer.prepare(encoded).position_ids
        sample, before = encoded.per_token, row.padded_length
        ids, labels = sample["input_ids"].tolist(), sample["labels"]
        last = len(ids) - 1
        roles = find_roles(self.encoder, conversation, ids)
        runs = make_runs(self.encoder, sample, roles, positions)
        tokens = [
            TokenRow(
                before + index,
                token,
                decode_tokens(self.encoder, [token]),
                label != IGNORE_INDEX,
                role,
                format_positions(positions, index, min(index + 1, last)),
            )
            for index, (token, label, role) in enumerate(zip(ids, labels.tolist(), roles, strict=True))
        ]
        if not self.knows_positions and any(run.media_item for run in runs):
            # Consecutive numbers would be wrong from the first media item on.
            runs = [replace(run, positions="") for run in runs]
            tokens = [replace(token, position="") for token in tokens]
        spans = self._bidirectional_spans(sample)
        return replace(
            row,
            runs=(*row.runs, *(replace(run, start=before + run.start) for run in runs)),
            length=row.length + last,
            padded_length=before + self.packer.padded_length(last),
            supervised=row.supervised + int((labels != IGNORE_INDEX).sum()),
            bidirectional=(*row.bidirectional, *((before + start, before + end) for start, end in spans)),
            tokens=(*row.tokens, *tokens),
        )

    def placeholders(self, media_mask: MediaMask) -> list[tuple[str, RowView]]:
        """Return the placeholder samples that the loader adds for media kinds that are missing in a step."""
        if not media_mask:
            return []
        with self._lock:
            samples = self._placeholders.samples(media_mask)
            return [(kind, self._view_placeholder(sample)) for kind, sample in samples if kind is not None]

    def _view_placeholder(self, sample: Sample) -> RowView:
        length = len(sample) - 1
        positions = self.packer.prepare(sample).position_ids
        runs = make_runs(self.encoder, sample.per_token, [TEMPLATE] * len(sample), positions)
        return RowView(-1, runs=tuple(runs), length=length, padded_length=self.packer.padded_length(length))

    def _bidirectional_spans(self, sample: Mapping[str, Tensor]) -> tuple[Span, ...]:
        name = self.family.bidirectional
        if name is None or sample.get(name) is None:
            return ()
        marks = [bool(mark) for mark in sample[name].reshape(-1).tolist()]
        bounds = [0, *(n for n in range(1, len(marks)) if marks[n] != marks[n - 1]), len(marks)]
        return tuple((start, end) for start, end in pairwise(bounds) if start < end and marks[start])


def find_roles(encoder: Encoder, conversation: Conversation, ids: Sequence[int]) -> list[str]:
    """Return the role of each token; ``TEMPLATE`` if it cannot be determined."""
    roles = [TEMPLATE] * len(ids)
    with suppress(BadSample):
        text = encoder.render_conversation(conversation)
        for role, spans in _find_spans(encoder, conversation, text).items():
            with suppress(CannotAlign):
                labels = label_tokens(encoder, text, spans, ids, encoder.media_token_ids)
                for index, label in enumerate(labels):
                    if label != IGNORE_INDEX:
                        roles[index] = role
    return roles


def _find_spans(encoder: Encoder, conversation: Conversation, text: str) -> dict[str, list[Span]]:
    """Return the character spans of each role in the rendered conversation, as far as they can be located."""
    spans: dict[str, list[Span]] = defaultdict(list)
    encoder = encoder.for_conversation(conversation)
    openings: tuple[str, ...] = ()
    with suppress(CannotAlign):
        openings = encoder.openings
    turns = encoder.turns(conversation)
    with suppress(CannotAlign, *template_errors(TypeError, ValueError, LookupError)):
        for number, (start, end) in text_spans(encoder.render, turns, text, openings):
            role = turns[number]["role"]
            if start < end:
                spans[role].append((start, end))
    return spans


def make_runs(
    encoder: Encoder, sample: Mapping[str, Tensor], roles: Sequence[str], positions: Tensor | None = None
) -> list[TokenRun]:
    """Group the tokens of an encoded sample, which is not shifted, into runs.

    ``positions`` are [S - 1] or [3, S - 1], after the shift; None for 0, 1, 2, ….
    """
    ids = sample["input_ids"].tolist()
    last = len(ids) - 1
    names = {token: str(encoder.tokenizer.convert_ids_to_tokens(token)) for token in encoder.media_token_ids}
    columns = zip(roles, sample["labels"].tolist(), sample["attention_mask"].tolist(), ids, strict=True)
    groups = [
        (ANSWER if label != IGNORE_INDEX else role, label != IGNORE_INDEX, not mask, names.get(token, ""))
        for role, label, mask, token in columns
    ]
    runs, start = [], 0
    for end in range(1, len(ids) + 1):
        if end < last and groups[end] == groups[start]:
            continue
        text = "" if groups[start][-1] else decode_tokens(encoder, ids[start:end])
        where = format_positions(positions, start, min(end, last))
        runs.append(TokenRun(*groups[start], text, start, end - start, where, start == last))
        start = end
    return runs


def decode_tokens(encoder: Encoder, ids: Sequence[int]) -> str:
    """Return ids as text, with special tokens and original spaces."""
    return str(encoder.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def format_positions(positions: Tensor | None, start: int, end: int) -> str:
    """Return the positions of a span of tokens: ``4-19``, or for three rows ``t 4, h 4-7, w 4-7``."""
    if end <= start:
        return ""
    if positions is None:
        return _format_range(start, end - 1)
    if positions.dim() == 1:
        return _format_range(int(positions[start]), int(positions[end - 1]))
    rows = [row[start:end] for row in positions]
    ranges = [_format_range(int(row.min()), int(row.max())) for row in rows]
    if len(set(ranges)) == 1:
        return ranges[0]
    return ", ".join(f"{name} {values}" for name, values in zip("thw", ranges, strict=False))


def _format_range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def split_conversation(conversation: Conversation) -> tuple[tuple[Turn, ...], tuple[MediaItem, ...]]:
    """Return the turns of a conversation and its media items, both in order."""
    media: list[MediaItem] = []
    turns = []
    for message in conversation.messages:
        parts: list[str | MediaItem] = []
        for part in message.parts:
            if isinstance(part, TextPart):
                parts.append(part.text)
            else:
                media.append(MediaItem(len(media), part.kind, _media_name(part)))
                parts.append(media[-1])
        turns.append(Turn(message.role, tuple(parts)))
    return tuple(turns), tuple(media)


def _media_name(ref: MediaRef) -> str:
    """Return the file name of a media item if it has one, else its kind."""
    source = ref.source.get("path") if isinstance(ref.source, dict) else ref.source
    if isinstance(source, list | tuple) and source:
        return f"{len(source)} frames"
    return mask_secrets(source).rpartition("/")[2] if isinstance(source, str) else ref.kind
