"""What a row says, looked at without opening a medium: a row goes in, findings and a conversation come out.

The row is converted as the data sets convert it, so what is found here is what loading would cut, refuse or
deliver with a remark. Costs some tens of microseconds a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from packhorse.check.rules import Found, found
from packhorse.conversation import parse_conversation
from packhorse.datasets.meta_file import DatasetConfig
from packhorse.datasets.rows import Row
from packhorse.datasets.sharegpt import PLACEHOLDER, ShareGptFormat, convert_row
from packhorse.errors import BadSample
from packhorse.types import Conversation, Drop, MediaRef, Message, TextPart

# What an unknown role brings with it: its turn is gone, and so is what it said.
_FOLLOW_FROM_ROLE = ("no_assistant_turn", "empty_conversation", "surplus_media", "surplus_placeholder")


def look_at_row(row: Row, config: DatasetConfig, key: str) -> tuple[list[Found], Conversation | None]:
    """Everything that is wrong with what a row says; the conversation is None where it is none at all.

    Args:
        row: as the file holds it.
        config: of its data set. Whether it is strict or confined does not matter here.
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
    """The rules of a data set that tell everything instead of stopping at the first; made once."""
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
