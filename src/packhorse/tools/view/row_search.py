"""Searching rows: by key at once, by text by reading them, for a second or two at a time."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

from packhorse.errors import BadSample
from packhorse.tools.view.book import Book

SECONDS = 1.5
MOST = 50

_BLOCK = 256
_AROUND = 60


@dataclass(frozen=True, slots=True)
class Hit:
    """A row and the text around what was looked for."""

    index: int
    key: str
    before: str
    match: str
    after: str


@dataclass(frozen=True, slots=True)
class Hits:
    """What was found.

    Attributes:
        hits: at most ``MOST``.
        next: where to go on; None if all rows were looked at.
        looked_at: how many rows were read now.
    """

    hits: list[Hit]
    next: int | None
    looked_at: int


def find_key(book: Book, wanted: str) -> list[int]:
    """The rows with this key: ``coco/812``, or 812 in every data set."""
    wanted = wanted.strip()
    keys = [f"{name}/{wanted}" for name in book.names] if wanted.isdecimal() else [wanted]
    found = (book.finder.find(key) for key in keys)
    return [index for index in found if index is not None]


def find_text(book: Book, wanted: str, first: int = 0, seconds: float = SECONDS) -> Hits:
    """Rows in which a text stands, whatever its case, from a position on.

    A row that cannot be parsed is searched as its bytes are.
    """
    needle = re.compile(re.escape(wanted), re.IGNORECASE)
    hits: list[Hit] = []
    until = time.monotonic() + seconds
    index, start = first, 0
    for source in book.dataset.sources:
        begin, start = start, start + len(source)
        while index < start:
            positions = range(index - begin, min(index - begin + _BLOCK, len(source)))
            rows = source.file.read(source.selection.row(position) for position in positions)
            for position, row in zip(positions, rows, strict=True):
                place = begin + position
                text = book.raw(place) if isinstance(row, BadSample) else _text(row)
                found = needle.search(text)
                if found is not None:
                    hits.append(_hit(book, place, text, *found.span()))
                    if len(hits) == MOST:
                        return Hits(hits, place + 1 if place + 1 < len(book) else None, place + 1 - first)
            index = begin + positions.stop
            if time.monotonic() > until and index < len(book):
                return Hits(hits, index, index - first)
    return Hits(hits, None, max(0, index - first))


def _hit(book: Book, index: int, text: str, at: int, end: int) -> Hit:
    before = ("…" if at > _AROUND else "") + text[max(0, at - _AROUND) : at]
    after = text[end : end + _AROUND] + ("…" if end + _AROUND < len(text) else "")
    return Hit(index, book.key(index), before, text[at:end], after)


def _text(value: Any) -> str:
    """All texts of a row, one after the other."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "\n".join(filter(None, map(_text, value.values())))
    if isinstance(value, list | tuple):
        return "\n".join(filter(None, map(_text, value)))
    return ""
