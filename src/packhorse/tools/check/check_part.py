"""Apply the rules to one part of a data file.

Runs in the worker processes of an engine. A process opens the processor and each data file once and holds one
block of rows in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from packhorse.count.parts import PartTask, current_rows, make_counter
from packhorse.errors import BadSample, naming
from packhorse.formats.found_format import FoundFormat, find_format
from packhorse.media import describe
from packhorse.rows.parquet import ParquetRows
from packhorse.rows.row_files import Row, RowFile, gc_paused
from packhorse.rows.selection import row_key
from packhorse.tools.check.media_rules import DIGEST_BYTES, TINY, CheckedMedia, MediaChecker, digest
from packhorse.tools.check.row_rules import EncodingRules, check_row, repair_row
from packhorse.tools.check.rules import Violation, on_one_line, violation
from packhorse.types import Conversation, MediaRef, TextPart

_BLOCK = 256  # rows in memory at a time
NO_DIGEST = bytes(DIGEST_BYTES)

IMAGE = np.dtype([("content", "V16"), ("name", "V16"), ("row", "<i8"), ("item", "<i4")])
"""One image: digests of its bytes and of its name, its row, its index among the row's media."""


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """What to check, and how."""

    decode: bool = True  # otherwise only the headers of media are read
    max_length: int | None = None  # the most tokens of a row; needs a processor
    tiny: int = TINY  # report images with a side below this
    ignored: frozenset[str] = frozenset()  # rules that are not applied
    repair: bool = False  # also try to repair rows, for a cleaned copy


class RawFinding(NamedTuple):
    """A finding of a part: the row's number, what was found, and its location in the file.

    ``advice`` is empty for that of the rule.
    """

    row: int
    rule: str
    severity: str
    found: str
    advice: str
    location: str


class Repair(NamedTuple):
    """A repaired row as JSON on one line, and what was changed.

    For a Parquet file ``data`` has the messages only, which is all that a repair changes: other columns may
    contain what JSON cannot represent.
    """

    row: int
    data: bytes
    done: str


class PartFindings(NamedTuple):
    """The findings of a part."""

    findings: list[RawFinding]  # in the order of the rows
    conversations: bytes  # a digest of each row's conversation, concatenated; zeros for a row with errors
    images: bytes  # an array of IMAGE
    media: int  # number of media
    repairs: list[Repair]  # rows that have errors, and none after the repair
    relative: bool  # whether a path of a media item depends on the media folder
    media_failed: int = 0  # media that could not be opened
    found: FoundFormat = FoundFormat()  # of the rows


@dataclass(slots=True)
class _CheckedRow:
    violations: list[Violation]
    conversations: tuple[Conversation, ...] = ()  # two for a pair
    refs: tuple[MediaRef, ...] = ()  # of all conversations, each media item once
    media: tuple[CheckedMedia, ...] = ()  # one for each of them
    relative: bool = False

    @property
    def has_errors(self) -> bool:
        return any(violation.severity == "error" for violation in self.violations)


class PartChecker:
    """Check the rows of a :class:`~packhorse.count.parts.PartTask`.

    Each process opens the processor once; media of the datasets ``no_media_dir`` may lie anywhere.
    """

    def __init__(
        self,
        settings: CheckSettings,
        processor: Any = None,
        trust_remote_code: bool = False,
        no_media_dir: frozenset[str] = frozenset(),
    ) -> None:
        self.settings, self.processor, self.trust_remote_code = settings, processor, trust_remote_code
        self.no_media_dir, self.encoding = no_media_dir, None
        if processor is not None:
            self.encoding = EncodingRules(make_counter(processor, trust_remote_code), settings.max_length)
        self.media = MediaChecker(settings.decode, settings.tiny, self.encoding is not None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.settings, self.processor, self.trust_remote_code, self.no_media_dir)

    def __call__(self, task: PartTask) -> PartFindings:
        """Check the rows of one part."""
        with gc_paused():
            return self._check_part(current_rows(task), task)

    def _check_part(self, rows: RowFile, task: PartTask) -> PartFindings:
        findings: list[RawFinding] = []
        digests: list[bytes] = []
        images: list[tuple[bytes, bytes, int, int]] = []
        repairs: list[Repair] = []
        media, failed, relative = 0, 0, False
        found = FoundFormat()
        for row, raw, checked in self._check_rows(rows, task):
            if isinstance(raw, dict):
                found |= find_format([raw], task.config.rules)
            delivered = checked
            if checked.violations:
                location = on_one_line(rows.location(row))
                findings += [RawFinding(row, *violation, location) for violation in checked.violations]
            if checked.has_errors and self.settings.repair and isinstance(raw, dict):
                repaired = self._repair(raw, row, task, isinstance(rows, ParquetRows))
                if repaired is not None:
                    repairs.append(repaired[0])
                    delivered = repaired[1]
            digests.append(NO_DIGEST if delivered.has_errors else _conversation_digest(delivered))
            relative |= delivered.relative
            media += len(checked.media)
            failed += sum(item.failed for item in checked.media)
            images += [
                (item.content, item.name.ljust(DIGEST_BYTES, b"\0"), row, index)
                for index, item in enumerate(checked.media)
                if item.read and checked.refs[index].kind == "image"
            ]
        return PartFindings(
            findings,
            b"".join(digests),
            np.array(images, IMAGE).tobytes(),
            media,
            repairs,
            relative,
            failed,
            found,
        )

    def _check_rows(
        self, rows: RowFile, task: PartTask
    ) -> Iterator[tuple[int, Row | BadSample, _CheckedRow]]:
        for first in range(task.first, task.stop, _BLOCK):
            numbers = range(first, min(first + _BLOCK, task.stop))
            block = list(rows.read(numbers))
            checked = [self._check_row(raw, n, rows, task) for n, raw in zip(numbers, block, strict=True)]
            self._add_lengths(checked)
            yield from zip(numbers, block, checked, strict=True)

    def _check_row(self, raw: Row | BadSample, row: int, rows: RowFile | None, task: PartTask) -> _CheckedRow:
        config = task.config
        if isinstance(raw, BadSample):
            # The location is a field of its own.
            detail = raw.detail if rows is None else raw.detail.removeprefix(f"{rows.location(row)}: ")
            return _CheckedRow(self._filter([violation(raw.reason, detail)]))
        violations, conversations = check_row(raw, config, row_key(config.name, row))
        if not conversations:
            return _CheckedRow(self._filter(violations))
        first, *others = (conversation.media for conversation in conversations)
        refs = (*first, *(ref for media in others for ref in media if ref not in first))
        folder = config.rules.media_dir
        media_dir = None if config.name in self.no_media_dir else folder
        with naming(row_key(config.name, row)):
            media = tuple(self.media.check(ref, media_dir, config.rules.confine) for ref in refs)
        images = sum(ref.kind == "image" for ref in refs)
        for ref, item in zip(refs, media, strict=True):
            violations += item.violations
            if self.encoding is not None and item.size is not None:
                violations += self.encoding.shape(ref.kind, item.size, images, describe(ref.source))
        if self.encoding is not None:
            violations += [found for one in conversations for found in self.encoding.typed_tokens(one)]
        relative = media_dir is None and any(_is_under(ref.source, folder) for ref in refs)
        return _CheckedRow(self._filter(violations), conversations, refs, media, relative)

    def _add_lengths(self, rows: Sequence[_CheckedRow]) -> None:
        """Add violations of the token counts to rows without an error: one cause, one finding."""
        if self.encoding is None:
            return
        valid = [(row, one) for row in rows if not row.has_errors for one in row.conversations]
        lengths = self.encoding.lengths([conversation for _, conversation in valid])
        for (row, _), violations in zip(valid, lengths, strict=True):
            row.violations += self._filter(violations)

    def _repair(
        self, raw: Row, row: int, task: PartTask, messages_only: bool
    ) -> tuple[Repair, _CheckedRow] | None:
        """Return the repaired row; None if it cannot be repaired, or still has an error."""
        repaired = repair_row(raw, task.config.rules)
        if repaired is None:
            return None
        new, done, column = repaired
        checked = self._check_row(new, row, None, task)
        self._add_lengths([checked])
        if checked.has_errors:
            return None
        data = json.dumps({column: new[column]} if messages_only else new, ensure_ascii=False)
        return Repair(row, data.encode(), "; ".join(done)), checked

    def _filter(self, violations: list[Violation]) -> list[Violation]:
        return [one for one in dict.fromkeys(violations) if one.rule not in self.settings.ignored]


def _is_under(source: Any, folder: str | None) -> bool:
    """Return whether a path was resolved against the working directory, for want of a media folder."""
    if isinstance(source, list | tuple):
        return any(_is_under(item, folder) for item in source)
    return isinstance(source, str) and folder is not None and source.startswith(os.path.join(folder, ""))


def _conversation_digest(row: _CheckedRow) -> bytes:
    """Return a digest of roles, texts and media; never zeros for a row that has a conversation."""
    if not row.conversations:
        return NO_DIGEST
    turns: list[Any] = [repr(row.conversations[0].tools)] if row.conversations[0].tools else []
    for message in (message for conversation in row.conversations for message in conversation.messages):
        parts = [
            ["text", part.text]
            if isinstance(part, TextPart)
            else [part.kind, row.media[row.refs.index(part)].content.hex()]
            for part in message.parts
        ]
        turns.append([message.role, parts, repr(sorted(message.extras.items())) if message.extras else ""])
    return digest(json.dumps(turns, ensure_ascii=True).encode())
