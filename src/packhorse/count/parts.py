"""Counting one part of a data file: a task goes in, an Arrow record batch comes out as bytes.

This is what runs in the worker processes of an engine. A process opens the processor and each data file once.
Rows are read and converted exactly as :class:`~packhorse.datasets.MetaDataset` does it; media are looked at
through their headers. Every row comes out, with its counts or with the reason why it has none. Memory is a
block of rows, whatever the size of a part.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from packhorse.chat import template_errors
from packhorse.count.columns import COUNTS, OK, count_schema
from packhorse.count.sidecar import CHECK, batch_digest, counter_settings, data_source
from packhorse.errors import BadSample, ConfigError
from packhorse.families import Encoder
from packhorse.families.models import open_processor
from packhorse.formats.conversation import parse_conversation
from packhorse.formats.meta import DatasetConfig
from packhorse.formats.sharegpt import convert_row
from packhorse.media import VideoInfo
from packhorse.media.source import is_address
from packhorse.rows.row_files import Row, RowFile, gc_paused, open_rows
from packhorse.rows.selection import row_key
from packhorse.types import MEDIA_KINDS, Conversation, Drop
from packhorse.utils.files import Fingerprint

if TYPE_CHECKING:
    from packhorse.count.token_counter import Counted, MediaItemCount, TokenCounter


_BLOCK = 512  # rows in memory at a time: enough for the tokenizer to work in bulk
_LONGEST_DETAIL = 500
_IN_ROW = re.compile(r"line (\d+) column (\d+) \(char \d+\)")


@dataclass(frozen=True, slots=True)
class PartTask:
    """Rows ``first`` to ``stop`` of a dataset's file.

    Attributes:
        config: the dataset, with absolute paths: a worker may start in another folder.
        size: bytes of the data file where the task was made; with
        edges: a hash of its first and last bytes, to notice when a worker sees another file.
        index_dir: as for :func:`~packhorse.datasets.open_rows`.
    """

    config: DatasetConfig
    first: int
    stop: int
    size: int
    edges: str
    index_dir: str | None = None


@dataclass(frozen=True, slots=True)
class PartResult:
    """A counted part: the digest of its bytes in the data file, and an Arrow IPC file with one batch."""

    digest: str
    data: bytes


@dataclass(frozen=True)
class PartCounter:
    """The work of an engine: call it with a :class:`PartTask`.

    Args:
        processor: a processor, or the path of one, which each process opens once.
        settings: what the counter of the starting process counts with: another is rejected.
        trust_remote_code: run code that comes with the processor.
    """

    processor: Any
    settings: dict[str, Any]
    trust_remote_code: bool = False
    _own: list[TokenCounter] = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, processor: Any, trust_remote_code: bool = False) -> PartCounter:
        """Open the processor, and take its settings for those of all processes."""
        opened_rows.cache_clear()  # as for the processor: a file may be another one by now
        if isinstance(processor, str | os.PathLike):
            processor = os.fspath(processor)
            opened_counter.cache_clear()  # the folder may hold another one since the last pass
            return cls(processor, opened_counter(processor, trust_remote_code)[1], trust_remote_code)
        counter = make_counter(processor)
        work = cls(processor, counter_settings(counter))
        work._own.append(counter)
        return work

    def __call__(self, task: PartTask) -> PartResult:
        """Count the rows of one part."""
        check_media_dir(task.config)
        counter = self.counter()
        rows = rows_now(task)
        with gc_paused():
            return PartResult(part_digest(rows, task.first, task.stop), _counted_bytes(counter, rows, task))

    def counter(self) -> TokenCounter:
        """The counter of this process.

        Raises:
            ConfigError: it would count with other settings.
        """
        if isinstance(self.processor, str):
            counter, settings = opened_counter(self.processor, self.trust_remote_code)
        else:
            if not self._own:
                self._own.append(make_counter(self.processor))
            counter, settings = self._own[0], self.settings
        if settings != self.settings:
            raise ConfigError(
                f"{self.processor}: this process finds other settings there than the one that started the "
                "count; let all machines see the same processor and the same version of transformers"
            )
        return counter

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_own": []}


def make_counter(processor: Any) -> TokenCounter:
    """The counter for a processor.

    Raises:
        ConfigError: it cannot write a conversation: it has no chat template.
    """
    from packhorse.count.token_counter import TokenCounter

    encoder = Encoder(processor)
    turns = [{"role": role, "content": [{"type": "text", "text": "a"}]} for role in ("user", "assistant")]
    try:
        encoder.render(turns)
    except template_errors():
        pass  # there is a template, which wants more than this; rows will tell
    except (ValueError, AttributeError) as error:
        why = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{type(processor).__name__} has no chat template, so its conversations cannot be counted: set "
            f"tokenizer.chat_template and save the processor again ({why})"
        ) from error
    return TokenCounter(encoder)


def check_media_dir(config: DatasetConfig) -> None:
    """Raise if the media folder is missing or unreadable, instead of one bad row per media item."""
    folder = config.rules.media_dir
    if folder is None or is_address(folder):
        return
    try:
        with os.scandir(folder) as entries:
            next(entries, None)
        os.stat(os.path.join(folder, "."))  # listing needs another right than going in
    except OSError as error:
        raise ConfigError(
            f"dataset '{config.name}': the media_dir {folder} cannot be read ({error.strerror}): mount it, "
            "correct media_dir in the meta file, or give the right to read it"
        ) from error


def with_absolute_paths(config: DatasetConfig) -> DatasetConfig:
    """The same dataset for a process in another folder."""
    rules = config.rules
    media_dir = os.getcwd() if rules.media_dir is None else rules.media_dir
    if not is_address(media_dir):
        media_dir = os.path.abspath(media_dir)
    file_name = config.file_name if is_address(config.file_name) else os.path.abspath(config.file_name)
    return replace(config, file_name=file_name, rules=replace(rules, media_dir=media_dir))


def part_digest(rows: RowFile, first: int, stop: int) -> str:
    """A digest of what the file holds for these rows: about a gigabyte a second."""
    state = hashlib.blake2b(digest_size=16)
    for piece in rows.content(first, stop):
        state.update(piece)
    return state.hexdigest()


@lru_cache(maxsize=1)
def opened_counter(path: str, trust_remote_code: bool) -> tuple[TokenCounter, dict[str, Any]]:
    """The counter for the processor at ``path``, and what it counts with; opened once in a process."""
    counter = make_counter(open_processor(path, trust_remote_code))
    return counter, counter_settings(counter)


def rows_now(task: PartTask) -> RowFile:
    """The data file as it is now. One that stays open shows what lay there when it was opened."""
    wanted = task.config.file_name, task.index_dir, task.size, task.edges
    rows, state = opened_rows(*wanted)
    if Fingerprint.of(data_source(rows)) != state:
        opened_rows.cache_clear()
        rows, _ = opened_rows(*wanted)
    return rows


@lru_cache(maxsize=4)
def opened_rows(address: str, index_dir: str | None, size: int, edges: str) -> tuple[RowFile, Fingerprint]:
    """An open file and its state; the time of change may be another on another machine."""
    rows = open_rows(address, index_dir)
    state = Fingerprint.of(data_source(rows))
    if (state.size, state.edges) != (size, edges):
        raise ConfigError(f"{address}: the file has changed since the count began; count again")
    return rows, state


def _counted_bytes(counter: TokenCounter, rows: RowFile, task: PartTask) -> bytes:
    """The part as an Arrow IPC file."""
    import pyarrow as pa

    columns = CountedRows()
    for first in range(task.first, task.stop, _BLOCK):
        numbers = range(first, min(first + _BLOCK, task.stop))
        for result in _counted(counter, rows, numbers, task.config):
            columns.add(result)
    sink = pa.BufferOutputStream()
    batch = columns.batch()
    schema = count_schema({CHECK.decode(): batch_digest(batch)})
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _counted(
    counter: TokenCounter, rows: RowFile, numbers: range, config: DatasetConfig
) -> Iterator[Counted | BadSample]:
    """The count of each row, or what is wrong with it, in order."""
    parsed = [_parsed(row, number, config) for number, row in zip(numbers, rows.read(numbers), strict=True)]
    counted = iter(counter.count_many([entry for entry in parsed if isinstance(entry, Conversation)]))
    for number, entry in zip(numbers, parsed, strict=True):
        result = next(counted) if isinstance(entry, Conversation) else entry
        yield _placeless(result, rows, number, config) if isinstance(result, BadSample) else result


def _parsed(row: Row | BadSample, number: int, config: DatasetConfig) -> Conversation | BadSample:
    if isinstance(row, BadSample):
        return row
    key = row_key(config.name, number)
    try:
        example = convert_row(row, config.rules, key=key, dataset=config.name, record=no_remarks)
        return parse_conversation(example, key)
    except BadSample as error:
        return error


def no_remarks(drop: Drop) -> None:
    """Remarks on rows that are delivered are made, and kept, when the dataset is opened."""


def _placeless(error: BadSample, rows: RowFile, number: int, config: DatasetConfig) -> BadSample:
    """The error without paths and places, which may change while the row stays the same."""
    detail = error.detail
    if error.reason in ("malformed_row", "row_too_large"):
        detail = detail.removeprefix(f"{rows.location(number)}: ")
    detail = _IN_ROW.sub(_in_row, detail.replace(f"{config.rules.media_dir}{os.sep}", ""))
    return BadSample(detail[:_LONGEST_DETAIL], reason=error.reason, stage=error.stage)


def _in_row(found: re.Match[str]) -> str:
    """A place that the JSON parser tells is one in the row, not in the file."""
    line, column = found.groups()
    return f"{'' if line == '1' else f'line {line}, '}column {column} of the row"


_FIELDS = (*COUNTS, "off_by", "exact")
_values = attrgetter(*_FIELDS)
_NOTHING = (*(0 for _ in COUNTS), 0, True)


class CountedRows:
    """Collects the counts of rows, to write them as Arrow columns."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.status: list[str] = []
        self.detail: list[str] = []
        self.offsets = [0]
        self.media: list[tuple[int | float, ...]] = []

    def add(self, row: Counted | BadSample) -> None:
        """Append a row's count, or why it has none."""
        if isinstance(row, BadSample):
            self.rows.append(_NOTHING)
            self.status.append(row.reason)
            self.detail.append(_writable(row.detail))
        else:
            self.rows.append(_values(row.count))
            self.status.append(OK)
            self.detail.append("")
            if row.media:
                self.media.extend(map(_media_item, row.media))
        self.offsets.append(len(self.media))

    def batch(self) -> Any:
        """As one Arrow record batch."""
        import pyarrow as pa

        schema = count_schema()
        media_item = schema.field("media").type.value_field
        columns = list(zip(*self.media, strict=True)) or [()] * media_item.type.num_fields
        arrays = [
            pa.array(column, media_item.type.field(number).type) for number, column in enumerate(columns)
        ]
        structs = pa.StructArray.from_arrays(arrays, fields=list(media_item.type))
        media = pa.ListArray.from_arrays(
            pa.array(self.offsets, pa.int32()), structs, type=schema.field("media").type
        )
        plain: dict[str, Any] = dict(zip(_FIELDS, zip(*self.rows, strict=True), strict=True))
        plain |= {"status": self.status, "detail": self.detail}
        arrays = [
            media if field.name == "media" else pa.array(plain[field.name], field.type) for field in schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _writable(text: str) -> str:
    """A file name may hold bytes that are no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def _media_item(media_item: MediaItemCount) -> tuple[int | float, ...]:
    """A media item as ``count_schema`` has it."""
    kind, size = MEDIA_KINDS.index(media_item.kind), media_item.size
    height = width = frames = samples = 0
    fps = duration = 0.0
    if isinstance(size, VideoInfo):
        height, width, frames = size.height, size.width, size.total_frames
        fps, duration = size.fps or 0.0, size.duration or 0.0
    elif isinstance(size, tuple):
        height, width = size
    else:
        samples = size
    return kind, height, width, frames, samples, media_item.tokens, media_item.patches, fps, duration
