"""Passes over row files, part by part: `map_parts`, and the counting of one part.

A part is a range of rows. `map_parts` runs the parts of many files in this process or on an engine; counting,
checking and estimating use it. Workers open the processor and each data file once and hold one block of rows
in memory, whatever the size of a part.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from packhorse.count.columns import COUNTS, OK, count_schema
from packhorse.count.sidecar import CHECK, batch_digest, counter_settings, data_source
from packhorse.errors import BadSample, ConfigError
from packhorse.families import Encoder
from packhorse.families.media_sizes import ConfiguredSize
from packhorse.families.models import open_processor
from packhorse.formats.conversation import parse_documents
from packhorse.formats.convert import convert_row, ignore_drop
from packhorse.formats.meta import DatasetConfig
from packhorse.media import VideoInfo
from packhorse.media.source import is_address
from packhorse.rows.index import file_error
from packhorse.rows.row_files import Row, RowFile, gc_paused, open_rows
from packhorse.rows.selection import row_key
from packhorse.types import MEDIA_KINDS, Conversation
from packhorse.utils.files import Fingerprint
from packhorse.utils.pool import Engine, LocalEngine
from packhorse.utils.progress import OnProgress

if TYPE_CHECKING:
    import pyarrow as pa

    from packhorse.count.token_counter import Counted, MediaItemCount, TokenCounter

R = TypeVar("R")

PART_ROWS = 4096
"""Default rows per part: one or two seconds of work, which is what an interruption costs a worker."""

_BLOCK = 512  # rows in memory at a time: enough for the tokenizer to work in bulk
_MAX_DETAIL = 500
_POSITION_IN_JSON = re.compile(r"line (\d+) column (\d+) \(char \d+\)")


@dataclass(frozen=True, slots=True)
class PartTask:
    """Rows ``first`` to ``stop`` of a dataset's file.

    Attributes:
        config: the dataset, with absolute paths: a worker may start in another folder.
        state: of the data file when the task was created, to detect that a worker sees another file.
        index_dir: as for :func:`~packhorse.datasets.open_rows`.
    """

    config: DatasetConfig
    first: int
    stop: int
    state: Fingerprint
    index_dir: str | None = None


def split_parts(
    config: DatasetConfig, rows: int, part_rows: int, state: Fingerprint, index_dir: str | None
) -> list[PartTask]:
    """Return the parts of a dataset's file, which has ``rows`` rows and is in this state."""
    config = with_absolute_paths(config)
    return [
        PartTask(config, first, min(rows, first + part_rows), state, index_dir)
        for first in range(0, rows, part_rows)
    ]


def map_parts(
    files: Sequence[Sequence[PartTask]],
    work: Callable[[PartTask], R],
    engine: Engine | None,
    progress: OnProgress,
) -> Generator[tuple[int, PartTask, R]]:
    """Apply ``work`` to the parts of each file; yield (index of the file, part, result) as results arrive.

    Iterate inside ``contextlib.closing``, so that an error ends the engine's processes at once. Without an
    engine, ``work`` runs in this process; else it has to be picklable.
    """
    tasks = [(index, task) for index, parts in enumerate(files) for task in parts]
    total, done = sum(task.stop - task.first for _, task in tasks), 0
    if not tasks:
        return
    progress(0, total)
    results = (engine or LocalEngine(1)).run(work, [task for _, task in tasks])
    with closing(results):  # type: ignore[type-var]  # an engine's results are a generator
        for position, result in results:
            index, task = tasks[position]
            yield index, task, result
            done += task.stop - task.first
            progress(done, total)


def current_rows(task: PartTask) -> RowFile:
    """Return the data file of a task as it is now: an open file shows what was there when it was opened."""
    key = task.config.file_name, task.index_dir, task.state.size, task.state.edges
    rows, state = _open_file(*key)
    if Fingerprint.of(data_source(rows)) != state:
        _open_file.cache_clear()
        rows, _ = _open_file(*key)
    return rows


@lru_cache(maxsize=4)
def _open_file(address: str, index_dir: str | None, size: int, edges: str) -> tuple[RowFile, Fingerprint]:
    """Open a file; return it with its state, whose modification time may differ between machines."""
    rows = open_rows(address, index_dir)
    state = Fingerprint.of(data_source(rows))
    if (state.size, state.edges) != (size, edges):
        raise file_error(address, "the file has changed since the count began; count again")
    return rows, state


def part_digest(rows: RowFile, first: int, stop: int) -> str:
    """Return a digest of the file's content for these rows; about a gigabyte per second."""
    state = hashlib.blake2b(digest_size=16)
    for piece in rows.content(first, stop):
        state.update(piece)
    return state.hexdigest()


def check_media_dir(config: DatasetConfig) -> None:
    """Raise if the media folder is missing or unreadable, instead of one bad row per media item."""
    folder = config.rules.media_dir
    if folder is None or is_address(folder):
        return
    try:
        with os.scandir(folder) as entries:
            next(entries, None)
        os.stat(os.path.join(folder, "."))  # listing needs another permission than entering
    except OSError as error:
        raise ConfigError(
            f"dataset '{config.name}': the media_dir {folder} cannot be read ({error.strerror}): mount it, "
            "correct media_dir in the meta file (remove it if the rows hold their media), or grant the "
            "permission to read it",
            setting="media_dir",
            value=folder,
        ) from error


def with_absolute_paths(config: DatasetConfig) -> DatasetConfig:
    """Return the same dataset for a process in another folder."""
    rules = config.rules
    media_dir = os.getcwd() if rules.media_dir is None else rules.media_dir
    if not is_address(media_dir):
        media_dir = os.path.abspath(media_dir)
    file_name = config.file_name if is_address(config.file_name) else os.path.abspath(config.file_name)
    return replace(config, file_name=file_name, rules=replace(rules, media_dir=media_dir))


# Counting one part.


@dataclass(frozen=True, slots=True)
class PartResult:
    """A counted part: the digest of its bytes in the data file, and an Arrow IPC file with one batch."""

    digest: str
    data: bytes


class PartCounter:
    """Count the rows of a :class:`PartTask`; runs in the processes of an engine.

    Each process opens a processor that is given by its path once, and raises if it finds other ``settings``
    there than the starting process. An encoder may be given in place of a processor.
    """

    def __init__(self, processor: Any, trust_remote_code: bool = False) -> None:
        self.processor = os.fspath(processor) if isinstance(processor, os.PathLike) else processor
        self.trust_remote_code = trust_remote_code
        self._counter: TokenCounter | None = make_counter(self.processor, trust_remote_code)
        self.settings = counter_settings(self._counter)

    def __call__(self, task: PartTask) -> PartResult:
        """Count the rows of one part."""
        check_media_dir(task.config)
        counter = self.counter
        rows = current_rows(task)
        with gc_paused():
            return PartResult(part_digest(rows, task.first, task.stop), _count_part(counter, rows, task))

    @property
    def counter(self) -> TokenCounter:
        """The counter of this process; raises ConfigError if it would count with other settings."""
        if self._counter is None:
            self._counter = make_counter(self.processor, self.trust_remote_code)
            if isinstance(self.processor, str) and counter_settings(self._counter) != self.settings:
                remedy = "let all machines see the same processor and the same version of transformers"
                problem = f"this process finds other settings than the one that started the count; {remedy}"
                raise ConfigError.of("processor", self.processor, problem)
        return self._counter

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_counter": None}


def make_counter(processor: Any, trust_remote_code: bool = False) -> TokenCounter:
    """Return the counter for a processor, its encoder or a path; raise if it cannot render a conversation."""
    from packhorse.count.token_counter import TokenCounter

    if isinstance(processor, str):
        processor = open_processor(processor, trust_remote_code)
    encoder = Encoder.of(processor)
    encoder.check_rendering()
    return TokenCounter(encoder)


def _count_part(counter: TokenCounter, rows: RowFile, task: PartTask) -> bytes:
    """Return the counts of a part as an Arrow IPC file."""
    import pyarrow as pa

    columns = CountedRows()
    for first in range(task.first, task.stop, _BLOCK):
        numbers = range(first, min(first + _BLOCK, task.stop))
        for result in _count_rows(counter, rows, numbers, task.config):
            columns.add(result)
    sink = pa.BufferOutputStream()
    batch = columns.batch()
    schema = count_schema({CHECK.decode(): batch_digest(batch)})
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _count_rows(
    counter: TokenCounter, rows: RowFile, numbers: range, config: DatasetConfig
) -> Iterator[Counted | BadSample]:
    """Yield the count of each row, or its error, in order."""
    parsed = [_parse(row, number, config) for number, row in zip(numbers, rows.read(numbers), strict=True)]
    counts = iter(counter.count_documents([entry for entry in parsed if not isinstance(entry, BadSample)]))
    for number, entry in zip(numbers, parsed, strict=True):
        result = entry if isinstance(entry, BadSample) else next(counts)
        yield _without_paths(result, rows, number, config) if isinstance(result, BadSample) else result


def _parse(row: Row | BadSample, number: int, config: DatasetConfig) -> tuple[Conversation, ...] | BadSample:
    if isinstance(row, BadSample):
        return row
    key = row_key(config.name, number)
    try:
        example = convert_row(row, config.rules, key=key, dataset=config.name, record=ignore_drop)
        return parse_documents(example, key)
    except BadSample as error:
        return error


def _without_paths(error: BadSample, rows: RowFile, number: int, config: DatasetConfig) -> BadSample:
    """Return the error without paths and lines of the file, which may change while the row stays the same."""
    detail = error.detail
    if error.reason in ("malformed_row", "row_too_large"):
        detail = detail.removeprefix(f"{rows.location(number)}: ")
    detail = _POSITION_IN_JSON.sub(
        _describe_position, detail.replace(f"{config.rules.media_dir}{os.sep}", "")
    )
    return BadSample(detail[:_MAX_DETAIL], reason=error.reason, stage=error.stage)


def _describe_position(match: re.Match[str]) -> str:
    """The JSON parser's position is one in the row, not in the file."""
    line, column = match.groups()
    return f"{'' if line == '1' else f'line {line}, '}column {column} of the row"


_FIELDS = (*COUNTS, "off_by", "rejected", "exact")
_get_fields = attrgetter(*_FIELDS)
_NO_COUNTS = (*(0 for _ in COUNTS), 0, 0, True)


class CountedRows:
    """Collect the counts of rows, to write them as Arrow columns."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.weight: list[float] = []
        self.status: list[str] = []
        self.detail: list[str] = []
        self.media: list[list[tuple[int | float | str, ...]]] = []

    def add(self, row: Counted | BadSample) -> None:
        """Append a row's count, or why it has none."""
        if isinstance(row, BadSample):
            self.rows.append(_NO_COUNTS)
            self.weight.append(0.0)
            self.media.append([])
            self.status.append(row.reason)
            # A file name may contain bytes that are not UTF-8.
            self.detail.append(row.detail.encode("utf-8", "backslashreplace").decode())
        else:
            self.rows.append(_get_fields(row.count))
            self.weight.append(row.count.supervised if row.weight is None else row.weight)
            self.status.append(OK)
            self.detail.append("")
            self.media.append([_media_values(item) for item in row.media])

    def batch(self) -> pa.RecordBatch:
        """Return the rows as one Arrow record batch."""
        import pyarrow as pa

        schema = count_schema()
        values: dict[str, Any] = dict(zip(_FIELDS, zip(*self.rows, strict=True), strict=True))
        values |= {"status": self.status, "detail": self.detail, "media": self.media, "weight": self.weight}
        arrays = [pa.array(values[field.name], field.type) for field in schema]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _media_values(item: MediaItemCount) -> tuple[int | float | str, ...]:
    """Return a media item's values in the order of ``count_schema``."""
    size, settings = item.size, ""
    if isinstance(size, ConfiguredSize):
        settings, size = json.dumps(dict(size.settings)), size.original
    height = width = frames = samples = 0
    fps = duration = 0.0
    if isinstance(size, VideoInfo):
        height, width, frames = size.height, size.width, size.total_frames
        fps, duration = size.fps or 0.0, size.duration or 0.0
    elif isinstance(size, tuple):
        height, width = size
    else:
        samples = size
    kind = MEDIA_KINDS.index(item.kind)
    return kind, height, width, frames, samples, item.tokens, item.patches, fps, duration, settings
