"""Which formats and columns the rows of a dataset have, and what of them nothing reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from packhorse.errors import BadSample
from packhorse.formats.convert import convert_row, ignore_drop
from packhorse.formats.row_format import (
    ALIASES,
    PART_TYPES,
    PLACEHOLDER,
    TURN_COLUMNS,
    Layout,
    RowFormat,
    parse_turns,
    part_type,
    row_layout,
)
from packhorse.types import MEDIA_KINDS


@dataclass(frozen=True, slots=True)
class FoundFormat:
    """How the rows of a dataset are written, as far as they were read.

    Attributes:
        columns: (format, part, column) of what is read.
        unused: fields that nothing reads; ``messages[].score`` is one of turns.
        media: (has media, mentions media) of rows that do either.
    """

    columns: frozenset[tuple[str, str, str]] = frozenset()
    unused: frozenset[str] = frozenset()
    media: frozenset[tuple[bool, bool]] = frozenset()

    def __or__(self, other: FoundFormat) -> FoundFormat:
        """Return the format of the rows of both."""
        if other.columns <= self.columns and other.unused <= self.unused and other.media <= self.media:
            return self
        return FoundFormat(self.columns | other.columns, self.unused | other.unused, self.media | other.media)

    def advice(self) -> str:
        """Return what to set if media and the texts of no row belong together; empty if they do in one."""
        if self.media == {(True, False)}:
            return (
                "no text mentions the media of its row, so they are not used. To put them before the first "
                'text of the user set media_position to "first", in the meta file or with '
                "dataset_options={'media_position': 'first'}"
            )
        if self.media == {(False, True)}:
            others = f"; columns that are not used: {', '.join(sorted(self.unused))}" if self.unused else ""
            return (
                "the texts mention media (<image>), but no row has any, so the marks are cut. Name the "
                f"column with columns={{'images': …}}{others}"
            )
        return ""

    def __str__(self) -> str:
        """Return formats and columns: ``messages (messages=conversations, images)``."""
        formats: dict[str, list[str]] = {}
        for name, part, column in sorted(self.columns, key=_in_order):
            formats.setdefault(name, []).append(column if part == column else f"{part}={column}")
        return ", ".join(f"{name} ({', '.join(columns)})" for name, columns in formats.items()) or "unknown"

    def as_dict(self) -> dict[str, Any]:
        """Return formats, columns by part, and unused fields for JSON."""
        columns: dict[str, list[str]] = {}
        for _, part, column in sorted(self.columns, key=_in_order):
            columns.setdefault(part, []).append(column)
        return {
            "format": sorted({name for name, _, _ in self.columns}),
            "columns": {part: list(dict.fromkeys(names)) for part, names in columns.items()},
            "unused": sorted(self.unused),
        }


def _in_order(entry: tuple[str, str, str]) -> tuple[Any, ...]:
    return entry[0], list(ALIASES).index(entry[1]), entry[2]


def find_format(rows: Iterable[Mapping[str, Any]], rules: RowFormat) -> FoundFormat:
    """Return how these rows are written; rows of an unknown format are skipped."""
    found = FoundFormat()
    for row in rows:
        with suppress(BadSample):
            layout = row_layout(row, rules)
            parts = {**layout.columns, **layout.preference}
            columns = frozenset((layout.format, part, column) for part, column in parts.items())
            media = _find_media(row, layout)
            if rules.media_position == "first" and (True, False) in media:
                media = frozenset()
            unused = layout.unused_in(rules.task)
            with suppress(BadSample):
                convert_row(row, rules, key="", dataset="", record=ignore_drop, unused=unused)
            found |= FoundFormat(columns, frozenset(unused), media)
    return found


def _find_media(row: Mapping[str, Any], layout: Layout) -> frozenset[tuple[bool, bool]]:
    """Return whether a row has media in its columns and its turns mention media; nothing if neither."""
    columns = {**layout.columns, **layout.preference}
    has_media = any(_has_media(row.get(columns.get(f"{kind}s", ""))) for kind in MEDIA_KINDS)
    mentions = _mentions_media if has_media else _has_placeholder  # a part may have its own source
    texts = (parse_turns(row.get(columns.get(part, ""))) for part in (*TURN_COLUMNS, "query"))
    found = has_media, any(map(mentions, texts))
    return frozenset({found} if any(found) else ())


def _has_media(value: Any) -> bool:
    """Return whether a media column has an entry."""
    if isinstance(value, list | tuple):
        return any(map(_has_media, value))
    return value is not None and not (isinstance(value, str) and not value)


def _mentions_media(value: Any) -> bool:
    """Return whether a text, or one inside of turns, has a placeholder, or a part is a media item."""
    if isinstance(value, str):
        return PLACEHOLDER.search(value) is not None
    if isinstance(value, Mapping):
        return part_type(value) in PART_TYPES or any(map(_mentions_media, value.values()))
    return isinstance(value, list | tuple) and any(map(_mentions_media, value))


def _has_placeholder(value: Any) -> bool:
    """Return whether a text, or one inside of turns, has a placeholder."""
    if isinstance(value, str):
        return PLACEHOLDER.search(value) is not None
    values = value.values() if isinstance(value, Mapping) else value
    return isinstance(value, Mapping | list | tuple) and any(map(_has_placeholder, values))
