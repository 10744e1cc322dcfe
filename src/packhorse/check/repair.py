"""Simple repairs: a row with errors goes in, the row as it was probably meant comes out, or None.

Only what has one plausible reading is repaired: roles that are known by another name, and media that no
placeholder mentions. The caller looks at the result again and believes it only if no error is left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from packhorse.datasets.rows import Row
from packhorse.datasets.sharegpt import ShareGptFormat
from packhorse.types import MEDIA_KINDS

_KNOWN_AS = {
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model"),
    "system": ("system",),
}


def repaired(row: Row, rules: ShareGptFormat) -> tuple[Row, list[str]] | None:
    """The row repaired, and what was done to it; None where there is nothing that could be repaired.

    Args:
        row: as the file holds it; it is not changed.
        rules: of its data set.
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
