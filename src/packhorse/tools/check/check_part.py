"""Checking one part of a data file: a task goes in, its findings and digests come out.

This is what runs in the worker processes of an engine. A process opens the processor and each data file once;
memory is a block of rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from packhorse.count.parts import PartTask, make_counter, opened_counter, rows_now
from packhorse.errors import BadSample, naming
from packhorse.media import describe
from packhorse.rows.parquet import ParquetRows
from packhorse.rows.row_files import Row, RowFile, gc_paused
from packhorse.rows.selection import row_key
from packhorse.tools.check.media_rules import DIGEST_BYTES, TINY, MediaChecker, Seen, digest
from packhorse.tools.check.row_rules import EncodingRules, look_at_row, malformed, repaired
from packhorse.tools.check.rules import Found, on_one_line
from packhorse.types import Conversation, TextPart

_BLOCK = 256  # rows in memory at a time
NO_DIGEST = bytes(DIGEST_BYTES)

IMAGE = np.dtype([("content", "V16"), ("name", "V16"), ("row", "<i8"), ("place", "<i4")])
"""One image: digests of its bytes and of its name, its row, which of the row's media it is."""


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """What is checked, and how.

    Attributes:
        decode: decode media; otherwise only their headers are read.
        max_length: more tokens are too many; needs a processor.
        tiny: images with a side below this are told.
        ignored: rules that are not asked.
        repair: also try to repair rows, for a cleaned copy.
    """

    decode: bool = True
    max_length: int | None = None
    tiny: int = TINY
    ignored: frozenset[str] = frozenset()
    repair: bool = False


@dataclass(frozen=True, slots=True)
class CheckTask:
    """Rows of a dataset's file.

    Attributes:
        part: which rows, with absolute paths.
        media_dir: the dataset's own; None where it names none (then media may lie anywhere).
    """

    part: PartTask
    media_dir: str | None


class RawFinding(NamedTuple):
    """A finding of a part: the row's number and place, and what was found there."""

    row: int
    rule: str
    severity: str
    found: str
    location: str


class Repair(NamedTuple):
    """A row as it was probably meant, as JSON on one line, and what was done to it.

    Of a Parquet file ``data`` holds the messages alone, which are all that a repair changes: other columns
    may hold what JSON cannot.
    """

    row: int
    data: bytes
    done: str


class PartFindings(NamedTuple):
    """What was found in a part.

    Attributes:
        findings: in the order of the rows.
        conversations: a digest of each row's conversation, one after the other; zeros where a row has errors.
        images: an array of :data:`IMAGE` as bytes.
        media: how many media there are; ``media_failed`` of them could not be opened.
        repairs: rows that have errors, and none when they are repaired.
        relative: whether a path of a media item depends on the media folder.
    """

    findings: list[RawFinding]
    conversations: bytes
    images: bytes
    media: int
    repairs: list[Repair]
    relative: bool
    media_failed: int = 0


@dataclass(frozen=True)
class PartChecker:
    """The work of an engine: call it with a :class:`CheckTask`.

    Args:
        settings: what is checked.
        processor: a processor, or the path of one, which each process opens once; None for none.
        trust_remote_code: run code that comes with the processor.
    """

    settings: CheckSettings
    processor: Any = None
    trust_remote_code: bool = False
    _own: list[_Checker] = field(default_factory=list, init=False, repr=False, compare=False)

    def __call__(self, task: CheckTask) -> PartFindings:
        """Check the rows of one part."""
        with gc_paused():
            return self.checker().part(rows_now(task.part), task)

    def checker(self) -> _Checker:
        """The checker of this process; opens the processor.

        Raises:
            ConfigError: the processor cannot be opened, or has no chat template.
        """
        if not self._own:
            self._own.append(_Checker(self.settings, self._encoding()))
        return self._own[0]

    def _encoding(self) -> EncodingRules | None:
        if self.processor is None:
            return None
        if isinstance(self.processor, str):
            counter = opened_counter(self.processor, self.trust_remote_code)[0]
        else:
            counter = make_counter(self.processor)
        return EncodingRules(counter, self.settings.max_length)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_own": []}


@dataclass(slots=True)
class _Looked:
    """A row on its way through the rules."""

    findings: list[Found]
    conversation: Conversation | None = None
    seen: tuple[Seen, ...] = ()
    relative: bool = False

    @property
    def has_errors(self) -> bool:
        return any(one.severity == "error" for one in self.findings)


class _Checker:
    """Checks parts, in one process."""

    def __init__(self, settings: CheckSettings, encoding: EncodingRules | None) -> None:
        self.settings, self.encoding = settings, encoding
        self.media = MediaChecker(settings.decode, settings.tiny, encoding is not None)

    def part(self, rows: RowFile, task: CheckTask) -> PartFindings:
        findings: list[RawFinding] = []
        digests: list[bytes] = []
        images: list[tuple[bytes, bytes, int, int]] = []
        repairs: list[Repair] = []
        media, failed, relative = 0, 0, False
        for number, raw, looked in self._all(rows, task):
            mended = None
            if looked.findings:
                where = on_one_line(rows.location(number))
                findings += [RawFinding(number, *one, where) for one in looked.findings]
            if looked.has_errors and self.settings.repair and isinstance(raw, dict):
                mended = self._mended(raw, number, task, isinstance(rows, ParquetRows))
                if mended is not None:
                    repairs.append(mended[0])
            good = mended[1] if mended is not None else looked
            digests.append(NO_DIGEST if good.has_errors else _digest_of(good))
            media += len(looked.seen)
            failed += sum(seen.failed for seen in looked.seen)
            relative |= good.relative
            images += [
                (seen.content, seen.name.ljust(DIGEST_BYTES, b"\0"), number, place)
                for place, seen in enumerate(looked.seen)
                if seen.read and looked.conversation and looked.conversation.media[place].kind == "image"
            ]
        return PartFindings(
            findings, b"".join(digests), np.array(images, IMAGE).tobytes(), media, repairs, relative, failed
        )

    def _all(self, rows: RowFile, task: CheckTask) -> Iterator[tuple[int, Row | BadSample, _Looked]]:
        part = task.part
        for first in range(part.first, part.stop, _BLOCK):
            numbers = range(first, min(first + _BLOCK, part.stop))
            block = list(rows.read(numbers))
            looked = [self._look(row, number, rows, task) for number, row in zip(numbers, block, strict=True)]
            self._count(looked)
            yield from zip(numbers, block, looked, strict=True)

    def _look(self, row: Row | BadSample, number: int, rows: RowFile | None, task: CheckTask) -> _Looked:
        config = task.part.config
        if isinstance(row, BadSample):
            where = "" if rows is None else rows.location(number)
            return _Looked(self._asked([malformed(row, where)]))
        findings, conversation = look_at_row(row, config, row_key(config.name, number))
        if conversation is None:
            return _Looked(self._asked(findings))
        refs = conversation.media
        with naming(row_key(config.name, number)):
            seen = tuple(self.media.look(ref, task.media_dir, config.rules.confine) for ref in refs)
        for ref, one in zip(refs, seen, strict=True):
            findings += one.findings
            if self.encoding is not None and one.size is not None:
                images = sum(other.kind == "image" for other in refs)
                findings += self.encoding.shape(ref.kind, one.size, images, describe(ref.source))
        if self.encoding is not None:
            findings += self.encoding.typed_tokens(conversation)
        relative = task.media_dir is None and any(_under(ref.source, config.rules.media_dir) for ref in refs)
        return _Looked(self._asked(findings), conversation, seen, relative)

    def _count(self, looked: Sequence[_Looked]) -> None:
        """Add what the lengths tell of rows that have no error yet: one cause, one finding."""
        if self.encoding is None:
            return
        sound = [one for one in looked if one.conversation is not None and not one.has_errors]
        told = self.encoding.lengths([one.conversation for one in sound if one.conversation is not None])
        for one, findings in zip(sound, told, strict=True):
            one.findings += self._asked(findings)

    def _mended(
        self, row: Row, number: int, task: CheckTask, messages_only: bool
    ) -> tuple[Repair, _Looked] | None:
        """The row repaired, if it then has no error."""
        made = repaired(row, task.part.config.rules)
        if made is None:
            return None
        new, done = made
        looked = self._look(new, number, None, task)
        self._count([looked])
        if looked.has_errors:
            return None
        column = task.part.config.rules.columns.messages
        data = json.dumps({column: new[column]} if messages_only else new, ensure_ascii=False)
        return Repair(number, data.encode(), "; ".join(done)), looked

    def _asked(self, findings: list[Found]) -> list[Found]:
        return [one for one in dict.fromkeys(findings) if one.rule not in self.settings.ignored]


def _under(source: Any, folder: str | None) -> bool:
    """Whether a resolved path got the working directory in front, which stands in for a media folder."""
    if isinstance(source, list | tuple):
        return any(_under(one, folder) for one in source)
    return isinstance(source, str) and folder is not None and source.startswith(os.path.join(folder, ""))


def _digest_of(looked: _Looked) -> bytes:
    """A digest of who says what with which media: never zeros for a row that has a conversation."""
    if looked.conversation is None:
        return NO_DIGEST
    seen = iter(looked.seen)
    said = []
    for message in looked.conversation.messages:
        parts = [
            ["text", part.text] if isinstance(part, TextPart) else [part.kind, next(seen).content.hex()]
            for part in message.parts
        ]
        said.append([message.role, parts, repr(sorted(message.extras.items())) if message.extras else ""])
    return digest(json.dumps(said, ensure_ascii=True).encode())
