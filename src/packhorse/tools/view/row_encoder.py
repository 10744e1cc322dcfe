"""One row as its file has it and as the model sees it, side by side.

Encoding costs what it costs in training: media are decoded and the processor runs. One row at a time; the
last packs are remembered.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from packhorse.chat import IGNORE_INDEX, PRIVATE_USE, CannotAlign, label_tokens, template_errors
from packhorse.collate.packer import Packer
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import BadSample, data_errors
from packhorse.families import Encoder
from packhorse.formats.conversation import parse_conversation
from packhorse.ledger import Ledger
from packhorse.loader.placeholder import Placeholders
from packhorse.types import Conversation, Drop, MediaMask, MediaRef, Sample, TextPart, mask_secrets

TEMPLATE = "template"
"""Who speaks where the chat template does."""
ANSWER = "assistant"
"""Who is supervised; the end of the turn is the template's, and is supervised too."""

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of tokens of one colour.

    Attributes:
        role: who speaks.
        supervised: whether these tokens are supervised.
        hidden: whether the model is told not to look at them (a fake image).
        media item: the token that stands for a media item, as text; empty for text.
        text: what they say.
        start: the first token's place in the document; ``count`` tokens.
        positions: what the model is told of their places, for reading.
        beyond: the last token, which is only a label: the shift takes it off the input.
    """

    role: str
    supervised: bool
    hidden: bool
    media_item: str
    text: str
    start: int
    count: int
    positions: str = ""
    beyond: bool = False


def roles_of(encoder: Encoder, conversation: Conversation, ids: Sequence[int]) -> list[str]:
    """Who says each token; the template, wherever that cannot be told for certain."""
    roles = [TEMPLATE] * len(ids)
    with suppress(BadSample):
        text = encoder.render_conversation(conversation)
        for role, spans in _spans_by_role(encoder, conversation, text).items():
            with suppress(CannotAlign):
                labels = label_tokens(encoder, text, spans, ids, encoder.media_token_ids)
                for place, label in enumerate(labels):
                    if label != IGNORE_INDEX:
                        roles[place] = role
    return roles


def _spans_by_role(encoder: Encoder, conversation: Conversation, text: str) -> dict[str, list[Span]]:
    """Where the texts of each speaker stand in the rendered conversation."""
    mark = next(char for char in map(chr, PRIVATE_USE) if char not in text)
    said: list[tuple[str, str]] = []

    def masked(turn: Mapping[str, Any]) -> dict[str, Any]:
        parts = []
        for part in turn["content"]:
            if part["type"] == "text" and part["text"].strip():
                said.append((turn["role"], part["text"]))
                part = {**part, "text": f"{mark}{len(said) - 1}{mark}"}
            parts.append(part)
        return {**turn, "content": parts}

    try:
        rendered = encoder.render(list(map(masked, encoder.family.turns(conversation))))
        frame = re.split(f"{mark}(\\d+){mark}", rendered)
    except template_errors(TypeError, ValueError, LookupError):
        return {}
    if [int(number) for number in frame[1::2]] != list(range(len(said))):
        return {}
    return _fitted(text, frame[0::2], said)


def _fitted(text: str, frame: Sequence[str], said: Sequence[tuple[str, str]]) -> dict[str, list[Span]]:
    spans: dict[str, list[Span]] = defaultdict(list)
    at = len(frame[0])
    for (role, words), after in zip(said, frame[1:], strict=True):
        forms = dict.fromkeys((words, words.strip(), words.lstrip(), words.rstrip()))
        end = next(
            (
                at + len(form)
                for form in forms
                if text.startswith(form, at) and text.startswith(after, at + len(form))
            ),
            None,
        )
        if end is None:
            break  # the template has rewritten it: what follows cannot be placed for certain
        if end > at:
            spans[role].append((at, end))
        at = end + len(after)
    return spans


def runs_of(
    encoder: Encoder, sample: Mapping[str, Any], roles: Sequence[str], positions: Any = None
) -> list[Run]:
    """The runs of an encoded sample.

    Args:
        encoder: its tokenizer decodes.
        sample: ``input_ids``, ``labels`` and ``attention_mask`` [S], not shifted.
        roles: who says each token.
        positions: [S - 1] or [3, S - 1], after the shift; None for numbers from 0 on.
    """
    tokenizer, media = encoder.tokenizer, encoder.media_token_ids
    ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
    seen = sample["attention_mask"].tolist()
    last = len(ids) - 1
    kinds = [
        (
            ANSWER if label != IGNORE_INDEX else role,
            label != IGNORE_INDEX,
            not mask,
            token if token in media else -1,
        )
        for role, label, mask, token in zip(roles, labels, seen, ids, strict=True)
    ]
    runs, start = [], 0
    for end in range(1, len(ids) + 1):
        if end < last and kinds[end] == kinds[start]:
            continue
        role, supervised, hidden, media_item = kinds[start]
        name = "" if media_item < 0 else str(tokenizer.convert_ids_to_tokens(media_item))
        text = "" if name else decoded(tokenizer, ids[start:end])
        where = positions_of(positions, start, min(end, last))
        runs.append(Run(role, supervised, hidden, name, text, start, end - start, where, start == last))
        start = end
    return runs


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """Ids as text, special tokens included and nothing tidied up."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def positions_of(positions: Any, start: int, end: int) -> str:
    """The positions of a stretch, for reading: ``4-19``, or of three rows ``t 4, h 4-7, w 4-7``."""
    if end <= start:
        return ""
    if positions is None:
        return _range(start, end - 1)
    if positions.dim() == 1:
        return _range(int(positions[start]), int(positions[end - 1]))
    rows = [positions[row, start:end] for row in range(len(positions))]
    ranges = [_range(int(row.min()), int(row.max())) for row in rows]
    if len(set(ranges)) == 1:
        return ranges[0]
    return ", ".join(f"{name} {told}" for name, told in zip("thw", ranges, strict=False))


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


@dataclass(frozen=True, slots=True)
class Medium:
    """One media item of a row: its place among the row's media, and what is known of it."""

    number: int
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn as the file has it: texts and media in order."""

    role: str
    parts: tuple[str | Medium, ...]


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One token: place, id, text, role, whether it is supervised, and its position id."""

    place: int
    id: int
    text: str
    supervised: bool
    role: str
    position: str


@dataclass(frozen=True, slots=True)
class Shown:
    """A row for looking at.

    Attributes:
        index: its position in the mixture.
        turns: as the file has it; empty where it cannot be read.
        media: all its media.
        runs: as the model sees it; empty where it cannot be encoded.
        length: its tokens in a pack, after the shift.
        room: tokens it takes up there: the length, filled up to a multiple of the alignment.
        supervised: tokens that are supervised.
        both_ways: stretches of tokens that see each other in both directions.
        error: why it cannot be read or encoded.
        found: remarks of the encoder: truncated, nothing supervised.
        tokens: one by one.
    """

    index: int
    turns: tuple[Turn, ...] = ()
    media: tuple[Medium, ...] = ()
    runs: tuple[Run, ...] = ()
    length: int = 0
    room: int = 0
    supervised: int = 0
    bidirectional: tuple[tuple[int, int], ...] = ()
    error: BadSample | None = None
    found: tuple[Drop, ...] = ()
    tokens: tuple[TokenRow, ...] = field(default=(), repr=False)

    @property
    def truncated(self) -> bool:
        """Whether a part of it was cut off."""
        return any(drop.reason == "truncated" for drop in self.found)


class RowEncoder:
    """Encodes rows to be shown, one at a time.

    Args:
        samples: encodes single rows.
        packer: shifts samples and computes their positions.
    """

    def __init__(self, samples: PreTokenizedDatasetWrapper, packer: Packer) -> None:
        self.samples, self.packer = samples, packer
        self.family = self.samples.family
        self._lock = threading.Lock()
        self._blanks = Placeholders(self.samples)

    @property
    def knows_positions(self) -> bool:
        """Whether positions shown are the model's: three rows need its config."""
        return not self.family.mrope or self.packer.get_rope_index is not None

    def conversation(self, index: int) -> Conversation:
        """The row as a conversation.

        Raises:
            BadSample: it cannot be read.
        """
        key = self.samples.key(index)
        example = self.samples.encoder.place_audio(self.samples.dataset[index], key)
        return parse_conversation(example, key)

    def show(self, index: int) -> Shown:
        """A row; where it cannot be read or encoded, as much of it as there is, and why."""
        with self._lock:
            with data_errors() as outcome:
                conversation = self.conversation(index)
            if outcome.error is not None:
                return Shown(index, error=outcome.error)
            turns, media = told(conversation)
            self.samples.ledger = Ledger()  # of this row alone
            with data_errors() as outcome:
                return self._shown(index, conversation, turns, media)
            return Shown(index, turns, media, error=outcome.error)

    def _shown(
        self, index: int, conversation: Conversation, turns: tuple[Turn, ...], media: tuple[Medium, ...]
    ) -> Shown:
        encoded = self.samples.load_sample(index)
        positions = self.packer.prepare(encoded).position_ids
        sample = encoded.per_token
        ids = sample["input_ids"].tolist()
        roles = roles_of(self.samples.encoder, conversation, ids)
        runs = runs_of(self.samples.encoder, sample, roles, positions)
        tokens = self._tokens(ids, sample["labels"].tolist(), roles, positions)
        if not self.knows_positions and any(run.media_item for run in runs):
            # Counted through they would be wrong from the first media item on.
            runs = [replace(run, positions="") for run in runs]
            tokens = tuple(replace(token, position="") for token in tokens)
        return Shown(
            index,
            turns,
            media,
            tuple(runs),
            len(ids) - 1,
            self.packer.padded_length(len(ids) - 1),
            int((sample["labels"] != IGNORE_INDEX).sum()),
            self._both_ways(sample),
            found=tuple(self.samples.ledger),
            tokens=tokens,
        )

    def placeholders(self, media_mask: MediaMask) -> list[tuple[str, Shown]]:
        """The blank samples that the loader adds where media of these kinds are missing in a step.

        Raises:
            ConfigError: the processor cannot encode such a thing.
        """
        if not media_mask:
            return []
        with self._lock:
            samples = self._blanks.samples(media_mask)
            return [(kind, self._blank(sample)) for kind, sample in samples if kind is not None]

    def _blank(self, sample: Sample) -> Shown:
        length = len(sample) - 1
        positions = self.packer.prepare(sample).position_ids
        runs = runs_of(self.samples.encoder, sample.per_token, [TEMPLATE] * len(sample), positions)
        return Shown(-1, runs=tuple(runs), length=length, room=self.packer.padded_length(length))

    def _tokens(
        self, ids: Sequence[int], labels: Sequence[int], roles: Sequence[str], positions: Any
    ) -> tuple[TokenRow, ...]:
        tokenizer, last = self.samples.encoder.tokenizer, len(ids) - 1
        return tuple(
            TokenRow(
                place,
                token,
                decoded(tokenizer, [token]),
                label != IGNORE_INDEX,
                role,
                positions_of(positions, place, min(place + 1, last)),
            )
            for place, (token, label, role) in enumerate(zip(ids, labels, roles, strict=True))
        )

    def _both_ways(self, sample: dict[str, Any]) -> tuple[tuple[int, int], ...]:
        name = self.family.bidirectional
        if name is None or sample.get(name) is None:
            return ()
        marks = [bool(mark) for mark in sample[name].reshape(-1).tolist()]
        edges = [place for place in range(1, len(marks)) if marks[place] != marks[place - 1]]
        bounds = [0, *edges, len(marks)]
        return tuple((first, end) for first, end in pairwise(bounds) if first < end and marks[first])


def told(conversation: Conversation) -> tuple[tuple[Turn, ...], tuple[Medium, ...]]:
    """A conversation for reading, and its media in order."""
    media: list[Medium] = []
    turns = []
    for message in conversation.messages:
        parts: list[str | Medium] = []
        for part in message.parts:
            if isinstance(part, TextPart):
                parts.append(part.text)
            else:
                media.append(Medium(len(media), part.kind, _name(part)))
                parts.append(media[-1])
        turns.append(Turn(message.role, tuple(parts)))
    return tuple(turns), tuple(media)


def _name(ref: MediaRef) -> str:
    """What a media item is called: the end of its path, if it has one."""
    source = ref.source.get("path") if isinstance(ref.source, dict) else ref.source
    if isinstance(source, list | tuple) and source:
        return f"{len(source)} frames"
    return mask_secrets(source).rpartition("/")[2][-80:] if isinstance(source, str) else ref.kind
