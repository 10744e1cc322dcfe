"""Rules that need the processor: special tokens in texts, what it refuses, lengths, what is supervised.

Lengths and supervised tokens come from the counter that ``packhorse count`` uses: no pixel is decoded for
them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from packhorse.count.token_counter import Counted, TokenCounter
from packhorse.errors import BadSample
from packhorse.families.encoder import PROCESSOR_ERRORS
from packhorse.formats.conversation import parse_conversation
from packhorse.formats.meta import DatasetConfig
from packhorse.formats.sharegpt import PLACEHOLDER, ShareGptFormat, convert_row
from packhorse.rows.row_files import Row
from packhorse.tools.check.rules import Found, found
from packhorse.types import MEDIA_KINDS, Conversation, Drop, MediaKind, MediaRef, Message, TextPart

_KNOWN_AS = {
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model"),
    "system": ("system",),
}


def repaired(row: Row, rules: ShareGptFormat) -> tuple[Row, list[str]] | None:
    """The row repaired, and what was done to it; None where there is nothing that could be repaired.

    Args:
        row: as the file holds it; it is not changed.
        rules: of its dataset.
    """
    turns = row.get(rules.columns.messages)
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        return None
    done: list[str] = []
    new = [_with_known_role(turn, number, rules, done) for number, turn in enumerate(turns)]
    new = _with_placeholders(row, new, rules, done)
    return ({**row, rules.columns.messages: new}, done) if done else None


def _with_known_role(turn: Mapping[str, Any], number: int, rules: ShareGptFormat, done: list[str]) -> Any:
    tags = rules.tags
    own = {"user": tags.user_tag, "assistant": tags.assistant_tag, "system": tags.system_tag}
    role = turn.get(tags.role_tag)
    if not isinstance(role, str) or role in own.values():
        return turn
    meant = next((name for name, words in _KNOWN_AS.items() if role.strip().lower() in words), None)
    if meant is None:
        return turn
    done.append(f"turn {number}: role {role!r} became {own[meant]!r}")
    return {**turn, tags.role_tag: own[meant]}


def _with_placeholders(row: Row, turns: list[Any], rules: ShareGptFormat, done: list[str]) -> list[Any]:
    """Media of a kind that no user turn mentions go to the front of the first one."""
    tags, columns = rules.tags, rules.columns
    users = [number for number, turn in enumerate(turns) if turn.get(tags.role_tag) == tags.user_tag]
    texts = [turns[number].get(tags.content_tag) for number in users]
    if not users or not all(isinstance(text, str) for text in texts):
        return turns
    front = ""
    for kind, column in zip(MEDIA_KINDS, (columns.images, columns.videos, columns.audios), strict=True):
        entries = row.get(column)
        entries = entries if isinstance(entries, list) else [entries]
        media = sum(entry is not None and entry != "" for entry in entries)
        mentioned = any(re.search(f"<{kind}>", text, re.IGNORECASE) for text in texts)
        if media == len(entries) and not mentioned:
            front += f"<{kind}>" * media
            done.append(f"turn {users[0]}: {media} <{kind}> put in front")
    if not front:
        return turns
    first = turns[users[0]]
    with_front = {**first, tags.content_tag: f"{front}\n{texts[0]}"}
    return [with_front if number == users[0] else turn for number, turn in enumerate(turns)]


# What an unknown role brings with it: its turn is gone, and so is what it said.
_FOLLOW_FROM_ROLE = ("no_assistant_turn", "empty_conversation", "surplus_media", "surplus_placeholder")


def look_at_row(row: Row, config: DatasetConfig, key: str) -> tuple[list[Found], Conversation | None]:
    """Everything that is wrong with what a row says; the conversation is None where it is none at all.

    Args:
        row: as the file holds it.
        config: of its dataset. Whether it is strict or confined does not matter here.
        key: of the row.
    """
    drops: list[Drop] = []
    try:
        example = convert_row(row, _loose(config.rules), key=key, dataset=config.name, record=drops.append)
        conversation = parse_conversation(example, key)
    except BadSample as error:
        rule = error.reason if error.reason == "row_too_large" else "wrong_format"
        return [found(rule, error.detail)], None
    findings = [found(drop.reason, drop.detail) for drop in drops]
    if any(one.rule == "unknown_role" for one in findings):
        findings = [one for one in findings if one.rule not in _FOLLOW_FROM_ROLE]
    elif conversation.messages:
        findings += _order(conversation.messages)
    findings += _texts(conversation)
    return findings, conversation


@lru_cache(maxsize=64)
def _loose(rules: ShareGptFormat) -> ShareGptFormat:
    """The rules of a dataset that tell everything instead of stopping at the first; made once."""
    return replace(rules, strict=False, confine=False)


def malformed(error: BadSample, location: str) -> Found:
    """The finding for a row that cannot be read or parsed; ``location`` is not part of it."""
    return found(error.reason, error.detail.removeprefix(f"{location}: "))


def _order(messages: Sequence[Message]) -> list[Found]:
    roles = [message.role for message in messages]
    late = next((number for number, role in enumerate(roles) if number and role == "system"), None)
    spoken = [(number, role) for number, role in enumerate(roles) if role != "system"]
    findings = []
    if late is not None:
        findings.append(found("turns_out_of_order", f"turn {late} is a system turn, expected it first"))
    elif spoken and spoken[0][1] == "assistant":
        findings.append(
            found("turns_out_of_order", f"turn {spoken[0][0]} is an answer without a question before it")
        )
    else:
        for (_, before), (number, role) in pairwise(spoken):
            if before == role:
                what = f"turn {number} is {role}'s, and so is the one before it"
                findings.append(found("turns_out_of_order", what))
                break
    if "assistant" in roles and roles[-1] != "assistant":
        findings.append(found("unanswered_turn", f"the last turn ({len(roles) - 1}) is {roles[-1]}'s"))
    return findings


def _texts(conversation: Conversation) -> list[Found]:
    findings = []
    has_sound = any(ref.kind == "audio" for ref in conversation.media)
    for number, message in enumerate(conversation.messages):
        texts = [part.text for part in message.parts if isinstance(part, TextPart)]
        media = any(isinstance(part, MediaRef) for part in message.parts)
        if not media and not message.extras and not any(text.strip() for text in texts):
            findings.append(found("empty_turn", f"turn {number} ({message.role}) says nothing"))
        typed = [match[0] for text in texts for match in PLACEHOLDER.finditer(text)]
        # Rows without sound may speak of <audio>: nobody takes it for a placeholder.
        typed = [one for one in typed if has_sound or one.lower() != "<audio>"]
        if typed:
            what = f"turn {number} ({message.role}) has a literal {typed[0]}, which stays text"
            findings.append(found("placeholder_as_text", what))
    return findings


_UNEVEN = 10
"""Whatever is rejected for its size with sides of more than 1 to 10 is rejected for its shape."""


class EncodingRules:
    """The rules for one processor.

    Args:
        counter: of the processor.
        max_length: more tokens are too many; None for no limit.
    """

    def __init__(self, counter: TokenCounter, max_length: int | None = None) -> None:
        self.counter, self.max_length = counter, max_length
        tokens = _special_texts(counter)
        longest_first = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
        self._special = re.compile(longest_first or r"(?!)")

    def typed_tokens(self, conversation: Conversation) -> list[Found]:
        """Special tokens that a text of the conversation types out: one finding for each turn."""
        findings = []
        for number, message in enumerate(conversation.messages):
            texts = (part.text for part in message.parts if isinstance(part, TextPart))
            typed = dict.fromkeys(token for text in texts for token in self._special.findall(text))
            if typed:
                what = f"turn {number} ({message.role}) types out {', '.join(typed)}"
                findings.append(found("special_token_in_text", what))
        return findings

    def shape(self, kind: MediaKind, size: tuple[int, int], images: int, name: str) -> list[Found]:
        """Whether the processor refuses an image of this (height, width) for its shape."""
        encoder, family = self.counter.encoder, self.counter.family
        if kind != "image" or kind not in family.kinds or max(size) <= _UNEVEN * min(size):
            return []
        try:
            encoder.media_tokens(kind, size, images)
        except PROCESSOR_ERRORS as error:
            height, width = size
            what = (
                f"{name} is {width:,} x {height:,}, sides of 1 to {max(size) / min(size):,.0f}; "
                f"{type(encoder.processor).__name__} (family {family.name}) refuses it: {error}"
            )
            return [found("extreme_aspect_ratio", what, "error")]
        return []

    def lengths(self, conversations: Sequence[Conversation]) -> list[list[Found]]:
        """What the counts of conversations tell, in order."""
        return [self._of_count(one) for one in self.counter.count_many(conversations)]

    def _of_count(self, counted: Counted | BadSample) -> list[Found]:
        if isinstance(counted, BadSample):
            return [found("sample_failed", counted.detail)]
        count, findings = counted.count, []
        if not count.supervised:
            what = f"of {count.total:,} tokens none is supervised"
            findings.append(found("nothing_supervised", what))
        if self.max_length is not None and count.total > self.max_length:
            what = f"{count.total:,} tokens, more than max_length={self.max_length:,}"
            findings.append(found("too_long", what))
        return findings


def _special_texts(counter: TokenCounter) -> set[str]:
    """Tokens that are read as themselves wherever they stand, and are not meant to be typed.

    Added tokens that are not special (``<think>``, ``<tool_call>``) are text like any other.
    """
    tokenizer = counter.encoder.tokenizer
    known = {str(token) for token in getattr(tokenizer, "all_special_tokens", ())}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    known |= {str(token.content) for token in added.values() if getattr(token, "special", False)}
    known |= set(counter.encoder.placeholders.values())
    return {token for token in known if token}
