"""Rules about rows: their conversation, and with a processor their special tokens, lengths and labels.

Lengths and supervised tokens come from the counter of ``packhorse count``, which decodes no media.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from packhorse.chat import compile_tokens
from packhorse.count.token_counter import Counted, TokenCounter
from packhorse.errors import BadSample
from packhorse.families.encoder import PROCESSOR_ERRORS
from packhorse.formats.conversation import parse_documents
from packhorse.formats.convert import convert_row
from packhorse.formats.meta import DatasetConfig
from packhorse.formats.row_format import (
    PLACEHOLDER,
    ROLES,
    Layout,
    RowFormat,
    parse_turns,
    row_layout,
    turn_names,
)
from packhorse.rows.row_files import Row
from packhorse.tools.check.rules import RULES, Violation, violation
from packhorse.types import MEDIA_KINDS, Conversation, Drop, MediaKind, MediaRef, Message, TextPart

# Consequences of an unknown role, whose turn is dropped with its content.
_FOLLOW_FROM_ROLE = ("no_assistant_turn", "empty_conversation", "surplus_media", "surplus_placeholder")
_CORRECT_ROW = "correct the row as the finding says"
_REASONING_NOT_WRITTEN = (
    "the chat template does not write reasoning_content: write <think>…</think> into the content, or set "
    "reasoning to drop"
)
# What the processor rejects for its size with a larger ratio of sides, it rejects for its shape.
_MIN_EXTREME_RATIO = 10


def check_row(row: Row, config: DatasetConfig, key: str) -> tuple[list[Violation], tuple[Conversation, ...]]:
    """Return everything that is wrong with a row's content, and its conversations: those of a pair are two.

    Whether the dataset is strict or confined does not matter here.
    """
    drops: list[Drop] = []
    try:
        rules = replace(config.rules, strict=False, confine=False)  # records every problem, raises at none
        example = convert_row(row, rules, key=key, dataset=config.name, record=drops.append)
        conversations = parse_documents(example, key)
    except BadSample as error:
        rule = error.reason if error.reason in RULES else "wrong_format"
        correct = error.reason == "wrong_format" and _has_known_names(row, config.rules)
        return [violation(rule, error.detail, advice=_CORRECT_ROW if correct else "")], ()
    violations = [violation(drop.reason, drop.detail) for drop in drops]
    if any(one.rule == "unknown_role" for one in violations):
        violations = [one for one in violations if one.rule not in _FOLLOW_FROM_ROLE]
    else:
        violations += [found for one in conversations if one.messages for found in _check_order(one.messages)]
    violations += [found for one in conversations for found in _check_texts(one)]
    if len(conversations) == 2 and conversations[0].messages == conversations[1].messages:
        violations.append(violation("equal_answers", "the chosen and the rejected answer are the same"))
    return violations, conversations


def _has_known_names(row: Row, rules: RowFormat) -> bool:
    """Return whether columns and tags fit the row: its turns are found, with role and content."""
    try:
        column = row_layout(row, rules).columns.get("messages")
    except BadSample:
        return False
    turns = parse_turns(row.get(column)) if column is not None else ()
    if not isinstance(turns, list | tuple):
        return not isinstance(turns, Mapping)
    names = (turn_names(rules.tags, turn) for turn in turns if isinstance(turn, Mapping))
    return all(None not in one for one in names)


def _check_order(messages: Sequence[Message]) -> Iterator[Violation]:
    roles = [message.role for message in messages]
    late = next((number for number, role in enumerate(roles) if number and role == "system"), None)
    turns = [(number, role) for number, role in enumerate(roles) if role != "system"]
    repeated = ((number, role) for (_, before), (number, role) in pairwise(turns) if before == role)
    found = ""
    if late is not None:
        found = f"turn {late} is a system turn, expected it first"
    elif turns and turns[0][1] == "assistant":
        found = f"turn {turns[0][0]} is an answer without a question before it"
    elif (repetition := next(repeated, None)) is not None:
        found = f"turn {repetition[0]} is {repetition[1]}'s, and so is the one before it"
    if found:
        yield violation("turns_out_of_order", found)
    if "assistant" in roles and roles[-1] != "assistant":
        yield violation("unanswered_turn", f"the last turn ({len(roles) - 1}) is {roles[-1]}'s")


def _check_texts(conversation: Conversation) -> Iterator[Violation]:
    has_audio = any(ref.kind == "audio" for ref in conversation.media)
    for number, message in enumerate(conversation.messages):
        texts = [part.text for part in message.parts if isinstance(part, TextPart)]
        has_media = any(isinstance(part, MediaRef) for part in message.parts)
        if not has_media and not message.extras and not any(text.strip() for text in texts):
            yield violation("empty_turn", f"turn {number} ({message.role}) is empty")
        typed = [match[0] for text in texts for match in PLACEHOLDER.finditer(text)]
        # In rows without audio, <audio> is not a placeholder.
        typed = [name for name in typed if has_audio or name.lower() != "<audio>"]
        if typed:
            found = f"turn {number} ({message.role}) has a literal {typed[0]}, which stays text"
            yield violation("placeholder_as_text", found)


def repair_row(row: Row, rules: RowFormat) -> tuple[Row, list[str], str] | None:
    """Return a repaired copy of the row, what was changed, and the column of its turns.

    None if there is nothing to repair.
    """
    try:
        layout = row_layout(row, rules)
    except BadSample:
        return None
    column = layout.columns.get("messages", "")
    turns = row.get(column)
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        return None
    done: list[str] = []
    new = [_repair_role(turn, number, rules, done) for number, turn in enumerate(turns)]
    new = _add_placeholders(row, layout, new, rules, done)
    return ({**row, column: new}, done, column) if done else None


def _repair_role(
    turn: Mapping[str, Any], number: int, rules: RowFormat, done: list[str]
) -> Mapping[str, Any]:
    """Return the turn with a name that the dataset uses for its role."""
    (tag, _), names = turn_names(rules.tags, turn), rules.tags.roles()
    role = turn.get(tag) if tag is not None else None
    if tag is None or not isinstance(role, str) or role in names:
        return turn
    meant = next((name for name, words in ROLES.items() if role.strip().lower() in words), None)
    if meant is None:
        return turn
    name = next(name for name, of_role in names.items() if of_role == meant)
    done.append(f"turn {number}: role {role!r} became {name!r}")
    return {**turn, tag: name}


def _add_placeholders(
    row: Row, layout: Layout, turns: list[Mapping[str, Any]], rules: RowFormat, done: list[str]
) -> list[Mapping[str, Any]]:
    """Put placeholders of media kinds that no user turn mentions at the beginning of the first one."""
    texts = dict[int, Any]()
    for number, turn in enumerate(turns):
        role, content = turn_names(rules.tags, turn)
        if role is not None and content is not None and rules.tags.find_role(str(turn[role])) == "user":
            texts[number] = turn[content]
    if not texts or not all(isinstance(text, str) for text in texts.values()):
        return turns
    first = min(texts)
    front = ""
    for kind in MEDIA_KINDS:
        entries = row.get(layout.columns.get(f"{kind}s", ""))
        entries = entries if isinstance(entries, list) else [entries]
        media = sum(entry is not None and entry != "" for entry in entries)
        mentioned = any(re.search(f"<{kind}>", text, re.IGNORECASE) for text in texts.values())
        if media == len(entries) and not mentioned:
            front += f"<{kind}>" * media
            done.append(f"turn {first}: {media} <{kind}> put in front")
    if not front:
        return turns
    tag = turn_names(rules.tags, turns[first])[1] or "content"
    changed = {**turns[first], tag: f"{front}\n{texts[first]}"}
    return [changed if number == first else turn for number, turn in enumerate(turns)]


class EncodingRules:
    """The rules that need a processor; rows may have at most ``max_length`` tokens."""

    def __init__(self, counter: TokenCounter, max_length: int | None = None) -> None:
        self.counter, self.max_length = counter, max_length
        self._special = compile_tokens(_special_texts(counter))

    def typed_tokens(self, conversation: Conversation) -> Iterator[Violation]:
        """Yield a violation for each turn whose text contains special tokens."""
        for number, message in enumerate(conversation.messages):
            texts = (part.text for part in message.parts if isinstance(part, TextPart))
            typed = dict.fromkeys(token for text in texts for token in self._special.findall(text))
            if typed:
                found = f"turn {number} ({message.role}) types out {', '.join(typed)}"
                yield violation("special_token_in_text", found)

    def shape(self, kind: MediaKind, size: tuple[int, int], images: int, name: str) -> list[Violation]:
        """Return a violation if the processor rejects an image of this (height, width) for its shape."""
        encoder, family = self.counter.encoder, self.counter.family
        if kind != "image" or kind not in family.kinds or max(size) <= _MIN_EXTREME_RATIO * min(size):
            return []
        try:
            encoder.media_tokens(kind, size, images)
        except PROCESSOR_ERRORS as error:
            height, width = size
            found = (
                f"{name} is {width:,} x {height:,}, sides of 1 to {max(size) / min(size):,.0f}; "
                f"{type(encoder.processor).__name__} (family {family.name}) rejects it: {error}"
            )
            return [violation("extreme_aspect_ratio", found, "error")]
        return []

    def lengths(self, conversations: Sequence[Conversation]) -> list[list[Violation]]:
        """Return the violations of each conversation's token counts, in order."""
        counts = self.counter.count_many(conversations)
        return [
            [*self._check_count(count), *self._check_answers(conversation, count)]
            for conversation, count in zip(conversations, counts, strict=True)
        ]

    def _check_answers(self, conversation: Conversation, counted: Counted | BadSample) -> Iterator[Violation]:
        """Yield a violation for each answer of which the chat template drops a part."""
        if not isinstance(counted, BadSample):
            for turn, dropped in self.counter.encoder.dropped_characters(conversation):
                found = f"the chat template drops {dropped:,} characters of the answer in turn {turn}"
                reasons = conversation.messages[turn].extras.get("reasoning_content")
                advice = _REASONING_NOT_WRITTEN if reasons and not self._writes_reasoning else ""
                yield violation("answer_shortened", found, advice=advice)

    @cached_property
    def _writes_reasoning(self) -> bool:
        """Whether the chat template writes ``reasoning_content``, if only that of the last answer."""
        thought = "packhorse_thought"
        answer = Message("assistant", (TextPart("A."),), {"reasoning_content": thought})
        probe = Conversation((Message("user", (TextPart("Q."),)), answer))
        try:
            return thought in self.counter.encoder.render_conversation(probe)
        except BadSample:
            return True  # unknown

    def _check_count(self, counted: Counted | BadSample) -> Iterator[Violation]:
        if isinstance(counted, BadSample):
            rule = "unsupported_turn" if counted.reason == "unsupported_turn" else "sample_failed"
            yield violation(rule, counted.detail)
            return
        total = counted.count.total
        if not counted.count.supervised:
            yield violation("nothing_supervised", f"of {total:,} tokens none is supervised")
        if self.max_length is not None and total > self.max_length:
            yield violation("too_long", f"{total:,} tokens, more than max_length={self.max_length:,}")


def _special_texts(counter: TokenCounter) -> set[str]:
    """Return the tokens that are never split and must not occur in a text.

    Added tokens that are not special (``<think>``, ``<tool_call>``) are ordinary text.
    """
    tokenizer = counter.encoder.tokenizer
    tokens = {str(token) for token in getattr(tokenizer, "all_special_tokens", ())}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    tokens |= {str(token.content) for token in added.values() if getattr(token, "special", False)}
    tokens |= set(counter.encoder.placeholders.values())
    return tokens - {""}
