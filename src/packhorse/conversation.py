"""The door: an example dict (the documented format) becomes a :class:`~packhorse.types.Conversation`.

This is the only place that looks inside ``content``. What goes in is never changed; what comes out is frozen.
A structure that is not the documented one raises :class:`~packhorse.errors.BadSample`, naming the turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from packhorse.errors import BadSample
from packhorse.types import MEDIA_KINDS, Conversation, MediaRef, Message, Part, TextPart


def parse_conversation(example: Mapping[str, Any], key: str = "") -> Conversation:
    """Read ``example["conversation"]`` into types.

    >>> parse_conversation({"conversation": [{"role": "user", "content": "Hi"}]}).messages[0].text
    'Hi'
    """
    turns = example.get("conversation")
    if not isinstance(turns, list | tuple):
        raise _wrong(f"'conversation' is {_kind(turns)}, expected a list of turns", key)
    return Conversation(tuple(_message(turn, number, key) for number, turn in enumerate(turns)), key)


def replace_media(
    example: Mapping[str, Any], load: Callable[[MediaRef], Mapping[str, Any]]
) -> dict[str, Any]:
    """A copy of ``example`` in which each medium's part is updated with what ``load(ref)`` returns.

    The whole example is parsed before the first medium is loaded. Only dicts and lists on the way to a medium
    are copied; the caller's example stays as it was.
    """
    turns = []
    messages = parse_conversation(example).messages
    for turn, message in zip(example["conversation"], messages, strict=True):
        content = turn["content"]
        if not isinstance(content, str):
            content = [
                {**part, **load(parsed)} if isinstance(parsed, MediaRef) else part
                for part, parsed in zip(content, message.parts, strict=True)
            ]
        turns.append({**turn, "content": content})
    return {**example, "conversation": turns}


def prepend_part(example: Mapping[str, Any], turn: int, part: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``example`` with ``part`` at the front of turn number ``turn``.

    Where the turn's content is a text, that becomes a part behind it. The caller's example stays as it was.

    >>> example = {"conversation": [{"role": "user", "content": "Hi"}]}
    >>> prepend_part(example, 0, {"type": "text", "text": "1."})["conversation"][0]["content"]
    [{'type': 'text', 'text': '1.'}, {'type': 'text', 'text': 'Hi'}]
    """
    parse_conversation(example)
    turns = list(example["conversation"])
    content = turns[turn]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    turns[turn] = {**turns[turn], "content": [part, *parts]}
    return {**example, "conversation": turns}


def _message(turn: Any, number: int, key: str) -> Message:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
        raise _wrong(f"turn {number} is {_kind(turn)} without a 'role', expected role and content", key)
    content = turn.get("content")
    if isinstance(content, str):
        return Message(turn["role"], (TextPart(content),))
    if not isinstance(content, list | tuple):
        raise _wrong(
            f"the content of turn {number} is {_kind(content)}, expected text (empty where nothing is said) "
            "or a list of parts",
            key,
        )
    return Message(turn["role"], tuple(_part(part, number, key) for part in content))


def _part(part: Any, turn: int, key: str) -> Part:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise _wrong(f"a text part of turn {turn} holds {_kind(part.get('text'))}", key)
        return TextPart(part["text"])
    if kind in MEDIA_KINDS:
        if part.get(kind) is None:
            raise _wrong(f"an {kind} part of turn {turn} has no '{kind}' field", key)
        options = {name: value for name, value in part.items() if name not in ("type", kind)}
        return MediaRef(kind, part[kind], options)
    raise _wrong(f"turn {turn} has a part of type {kind!r}, expected text, image, video or audio", key)


def _wrong(detail: str, key: str) -> BadSample:
    return BadSample(detail, reason="wrong_format", key=key, stage="convert")


def _kind(value: Any) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"
