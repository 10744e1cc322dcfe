"""Tokens for reading: ids and labels go in, runs of one colour come out.

A run is a stretch of tokens of one speaker that are all learned or all not, or the tokens of a medium. Who
speaks is found by rendering the conversation with stand-ins for its texts and carrying each text over to
token positions, the way labels are made.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from packhorse.chat import IGNORE_INDEX, CannotAlign, label_tokens, template_errors, tokenizer_of
from packhorse.chat.template import PRIVATE_USE
from packhorse.errors import BadSample
from packhorse.families import Family
from packhorse.types import Conversation

TEMPLATE = "template"
"""Who speaks where the chat template does."""
ANSWER = "assistant"
"""Who is learned; the end of the turn is the template's, and is learned too."""

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of tokens of one colour.

    Attributes:
        role: who speaks.
        learned: whether these tokens are learned.
        hidden: whether the model is told not to look at them (a fake image).
        medium: the token that stands for a medium, as text; empty for text.
        text: what they say.
        start: the first token's place in the document; ``count`` tokens.
        positions: what the model is told of their places, for reading.
        beyond: the last token, which is only a label: the shift takes it off the input.
    """

    role: str
    learned: bool
    hidden: bool
    medium: str
    text: str
    start: int
    count: int
    positions: str = ""
    beyond: bool = False


def roles_of(family: Family, processor: Any, conversation: Conversation, ids: Sequence[int]) -> list[str]:
    """Who says each token; the template, wherever that cannot be told for certain."""
    roles = [TEMPLATE] * len(ids)
    media = family.media_token_ids(processor)
    with suppress(BadSample):
        text = family.rendered(processor, conversation)
        for role, spans in _spans_by_role(family, processor, conversation, text).items():
            with suppress(CannotAlign):
                labels = label_tokens(processor, text, spans, ids, media)
                for place, label in enumerate(labels):
                    if label != IGNORE_INDEX:
                        roles[place] = role
    return roles


def _spans_by_role(
    family: Family, processor: Any, conversation: Conversation, text: str
) -> dict[str, list[Span]]:
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
        frame = re.split(
            f"{mark}(\\d+){mark}", family.render(processor, list(map(masked, family.turns(conversation))))
        )
    except template_errors(TypeError, ValueError, LookupError):
        return {}
    if [int(number) for number in frame[1::2]] != list(range(len(said))):
        return {}
    return _fitted(text, frame[0::2], said)


def _fitted(text: str, frame: Sequence[str], said: Sequence[tuple[str, str]]) -> dict[str, list[Span]]:
    spans: dict[str, list[Span]] = defaultdict(list)
    at = len(frame[0])
    for (role, words), behind in zip(said, frame[1:], strict=True):
        forms = dict.fromkeys((words, words.strip(), words.lstrip(), words.rstrip()))
        end = next(
            (
                at + len(form)
                for form in forms
                if text.startswith(form, at) and text.startswith(behind, at + len(form))
            ),
            None,
        )
        if end is None:
            break  # the template has rewritten it: what follows cannot be placed for certain
        if end > at:
            spans[role].append((at, end))
        at = end + len(behind)
    return spans


def runs_of(
    family: Family, processor: Any, sample: Mapping[str, Any], roles: Sequence[str], positions: Any = None
) -> list[Run]:
    """The runs of an encoded sample.

    Args:
        family: of the processor.
        processor: its tokenizer decodes.
        sample: ``input_ids``, ``labels`` and ``attention_mask`` [S], not shifted.
        roles: who says each token.
        positions: [S - 1] or [3, S - 1], after the shift; None for numbers from 0 on.
    """
    tokenizer = tokenizer_of(processor)
    media = family.media_token_ids(processor)
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
        role, learned, hidden, medium = kinds[start]
        name = "" if medium < 0 else str(tokenizer.convert_ids_to_tokens(medium))
        text = "" if name else decoded(tokenizer, ids[start:end])
        where = positions_of(positions, start, min(end, last))
        runs.append(Run(role, learned, hidden, name, text, start, end - start, where, start == last))
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
