"""How long and how heavy the rows of datasets are: exact from counts, or estimated and called so.

With a processor the rows are counted (what has been counted before is reused), and everything here is
exact. Without one, text is characters // 3, a media item is 500 tokens, and only numbers of media and sizes
of images are exact; it costs one pass over the rows and the headers of their images.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from packhorse.count.columns import CountColumns, Distribution, MediaColumns
from packhorse.count.count_report import CountedFile
from packhorse.count.counting import count_meta
from packhorse.count.parts import (
    PART_ROWS,
    PartTask,
    check_media_dir,
    current_rows,
    ignore_drop,
    map_parts,
    split_parts,
    with_absolute_paths,
)
from packhorse.count.sidecar import data_source
from packhorse.errors import BadSample, ConfigError
from packhorse.formats.conversation import parse_conversation
from packhorse.formats.estimate import ColumnsBuilder, estimate_lengths
from packhorse.formats.meta import Meta, read_meta
from packhorse.formats.sharegpt import convert_row
from packhorse.media import media_size
from packhorse.rows.row_files import Row, RowFile, gc_paused, open_rows
from packhorse.rows.selection import row_key
from packhorse.types import MEDIA_KINDS, Conversation, MediaRef
from packhorse.utils.files import Fingerprint
from packhorse.utils.pool import Engine
from packhorse.utils.progress import OnProgress, Progress

SPREADS = (
    "tokens",
    "supervised_tokens",
    "supervised_percent",
    "visual_tokens",
    "media_per_row",
    "image_side",
    "image_tokens",
)
"""What is spread over what: tokens, supervised tokens, their share in percent, tokens of images and videos
and number of media for each row; the longer side in pixels and tokens for each image."""

_IMAGE = MEDIA_KINDS.index("image")

LONGEST = 5
"""So many rows of each dataset are named, the longest first."""


class LongRow(NamedTuple):
    """One of the longest rows of a dataset: its tokens and its number, its name, its file and line."""

    tokens: int
    row: int
    key: str = ""
    location: str = ""


@dataclass(frozen=True, slots=True)
class DatasetStats:
    """One dataset, over all rows of its file.

    Attributes:
        rows: all; ``bad`` of them could not be counted, by reason, and are in no distribution.
        text_only: rows without media.
        media: by kind: ``images``, ``videos``, ``audios``.
        spreads: the distributions that :data:`SPREADS` names.
        longest: the rows with the most tokens, the longest first.
    """

    name: str
    file: str
    rows: int
    bad: dict[str, int]
    text_only: int
    media: dict[str, int]
    spreads: dict[str, Distribution] = field(repr=False)
    longest: tuple[LongRow, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        own = {name: getattr(self, name) for name in ("name", "file", "rows", "bad", "text_only", "media")}
        spreads = {name: self.spreads[name].as_dict() for name in SPREADS}
        return own | spreads | {"longest": [row._asdict() for row in self.longest]}

    @property
    def supervised_share(self) -> float:
        """Supervised tokens over all tokens."""
        tokens = self.spreads["tokens"].sum
        return self.spreads["supervised_tokens"].sum / tokens if tokens else 0.0


@dataclass(frozen=True, slots=True)
class StatsReport:
    """A mixture.

    Attributes:
        datasets: in the order of their names.
        estimated: whether tokens are estimates, and not counted.
        off_by: by how many tokens a row's number may be off; 0 where all are exact, -1 if nobody can tell.
        processor: the name of it; empty for none.
        counted_rows: how many rows had to be counted now.
    """

    datasets: tuple[DatasetStats, ...]
    estimated: bool
    off_by: int
    processor: str
    counted_rows: int
    seconds: float

    def all(self) -> DatasetStats:
        """All datasets together."""
        return _together("all", "", self.datasets, max(len(one.longest) for one in self.datasets))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "version": 1,
            "estimated": self.estimated,
            "exact": self.off_by == 0,
            "off_by": self.off_by,
            "processor": self.processor or None,
            "counted_rows": self.counted_rows,
            "seconds": round(self.seconds, 3),
            "datasets": [one.as_dict() for one in self.datasets],
            "all": self.all().as_dict(),
        }


def stats_of(
    meta: Meta,
    processor: Any = None,
    *,
    dataset_names: Sequence[str] | None = None,
    engine: Engine | None = None,
    trust_remote_code: bool = False,
    index_dir: str | None = None,
    longest: int = LONGEST,
    progress: OnProgress | None = None,
) -> StatsReport:
    """How the rows of the datasets of a meta file are spread.

    Args:
        meta: the meta file, or a dict with its content. All rows of a file are looked at, whatever share of
            them a dataset takes.
        processor: a processor, or the path of one: rows that are not counted yet are counted first, and the
            counts kept. None for estimates.
        dataset_names: only these datasets.
        engine: where to count (see :mod:`packhorse.count.engines`); None counts in this process.
        trust_remote_code: run code that comes with the processor.
        index_dir: as for :func:`~packhorse.datasets.open_meta_dataset`.
        longest: name so many rows of each dataset, the longest first.
        progress: called with the number of finished rows; None logs it every few seconds.

    Raises:
        ConfigError: the meta file, a data file, the processor or a media folder is not in order.
    """
    started = time.monotonic()
    if not read_meta(meta, dataset_names):
        raise ConfigError(f"{meta}: it names no dataset")
    if processor is None:
        found = _estimated(
            meta, dataset_names, engine, index_dir, progress or Progress("estimating"), longest
        )
        return StatsReport(tuple(found), True, -1, "", 0, time.monotonic() - started)
    report = count_meta(
        meta,
        processor,
        dataset_names=dataset_names,
        engine=engine,
        trust_remote_code=trust_remote_code,
        bad_rows=0,
        index_dir=index_dir,
        progress=progress,
    )
    is_path = isinstance(processor, str | os.PathLike)
    name = os.fspath(processor) if is_path else type(processor).__name__
    return StatsReport(
        tuple(_counted(one, longest) for one in report.files),
        False,
        int(report.totals()["off_by"]),
        name,
        report.counted_rows,
        time.monotonic() - started,
    )


def _counted(counted: CountedFile, longest: int) -> DatasetStats:
    """From a sidecar, a part at a time."""
    config = counted.config
    parts: list[DatasetStats] = []
    first = 0
    for batch in counted.sidecar.batches():
        columns, media = CountColumns.of(batch), MediaColumns.of([batch])
        ok, is_image = columns.ok, media.kind == _IMAGE
        numbers = {name: getattr(columns, name)[ok] for name in ("images", "videos", "audios")}
        total, supervised = columns.total[ok], columns.supervised[ok]
        values = {
            "tokens": total,
            "supervised_tokens": supervised,
            "supervised_percent": 100 * supervised // np.maximum(total, 1),
            "visual_tokens": (columns.image + columns.video)[ok],
            "media_per_row": sum(numbers.values()),
            "image_side": np.maximum(media.height, media.width)[is_image],
            "image_tokens": media.tokens[is_image],
        }
        rows = first + np.flatnonzero(ok)
        parts.append(
            _part(len(columns), Counter(columns.status[~ok].tolist()), numbers, values, rows, longest)
        )
        first += len(columns)
    return _named(_together(config.name, config.file_name, parts, longest), counted.file)


def _longest(tokens: Any, rows: Any, most: int) -> tuple[LongRow, ...]:
    """The rows with the most tokens; of equally long ones the first."""
    total, numbers = np.asarray(tokens, np.int64), np.asarray(rows, np.int64)
    order = np.lexsort((numbers, -total))[:most]
    return tuple(LongRow(int(total[place]), int(numbers[place])) for place in order)


def _named(found: DatasetStats, file: RowFile) -> DatasetStats:
    """With names and places of the longest rows."""
    places = {row: file.location(row) for row in sorted(one.row for one in found.longest)}
    named = [
        LongRow(one.tokens, one.row, row_key(found.name, one.row), places[one.row]) for one in found.longest
    ]
    return replace(found, longest=tuple(named))


def _part(
    rows: int,
    bad: Mapping[str, int],
    numbers: Mapping[str, Any],
    values: Mapping[str, Any],
    counted: Any,
    longest: int,
) -> DatasetStats:
    """Some rows; ``counted`` are the numbers of those that ``values`` are of."""
    media = {name: int(np.sum(of_rows)) for name, of_rows in numbers.items()}
    text_only = int((np.asarray(values["media_per_row"]) == 0).sum())
    spreads = {name: Distribution.of(values[name]) for name in SPREADS}
    found = _longest(values["tokens"], counted, longest)
    return DatasetStats("", "", rows, dict(bad), text_only, media, spreads, found)


def _together(name: str, file: str, parts: Sequence[DatasetStats], longest: int = LONGEST) -> DatasetStats:
    bad: Counter[str] = Counter()
    media: Counter[str] = Counter(dict.fromkeys(("images", "videos", "audios"), 0))
    for part in parts:
        bad.update(part.bad)
        media.update(part.media)
    return DatasetStats(
        name,
        file,
        sum(part.rows for part in parts),
        dict(bad.most_common()),
        sum(part.text_only for part in parts),
        dict(media),
        {spread: Distribution.concat(part.spreads[spread] for part in parts) for spread in SPREADS},
        tuple(sorted((row for part in parts for row in part.longest), key=_longest_first)[:longest]),
    )


def _longest_first(row: LongRow) -> tuple[int, str, int]:
    return -row.tokens, row.key.rpartition("/")[0], row.row


# --- estimates -------------------------------------------------------------------------------------------


def _estimated(
    meta: Meta,
    dataset_names: Sequence[str] | None,
    engine: Engine | None,
    index_dir: str | None,
    progress: OnProgress,
    longest: int,
) -> Iterator[DatasetStats]:
    named = read_meta(meta, dataset_names)
    for config in named:
        check_media_dir(config)
    files = [open_rows(with_absolute_paths(config).file_name, index_dir) for config in named]
    parts = [
        split_parts(config, len(file), PART_ROWS, Fingerprint.of(data_source(file)), index_dir)
        for config, file in zip(named, files, strict=True)
    ]
    found: list[DatasetStats] = [_together("", "", []) for _ in named]
    work = partial(_estimated_part, longest=longest)
    with contextlib.closing(map_parts(parts, work, engine, progress)) as results:
        for index, _, part in results:
            found[index] = _together("", "", [found[index], part], longest)
    for config, one, file in zip(named, found, files, strict=True):
        yield _named(replace(one, name=config.name, file=config.file_name), file)


def _estimated_part(task: PartTask, longest: int) -> DatasetStats:
    """Estimates of some rows; runs in the worker processes of an engine."""
    rows, columns = current_rows(task), ColumnsBuilder()
    bad: Counter[str] = Counter()
    numbers: dict[str, list[int]] = {"images": [], "videos": [], "audios": []}
    values: dict[str, Any] = {name: [] for name in SPREADS}
    characters: list[tuple[int, int]] = []
    good: list[int] = []
    with gc_paused():
        for number, row in enumerate(rows.read(range(task.first, task.stop)), task.first):
            try:
                conversation = _add_row(row, row_key(task.config.name, number), task, columns, values)
            except BadSample as error:
                bad[error.reason] += 1
                continue
            good.append(number)
            kinds = Counter(ref.kind for ref in conversation.media)
            for kind in MEDIA_KINDS:
                numbers[f"{kind}s"].append(kinds[kind])
            answers = sum(len(turn.text) for turn in conversation.messages if turn.role == "assistant")
            characters.append((answers, sum(len(turn.text) for turn in conversation.messages)))
    total, media, _ = estimate_lengths(columns.columns())
    # `_text_tokens` can differ from what the characters suggest: answers keep their share of it.
    texts = zip((total - media).tolist(), characters, strict=True)
    supervised = np.array([text * part // max(whole, 1) for text, (part, whole) in texts], np.int64)
    values |= {"tokens": total, "visual_tokens": media, "supervised_tokens": supervised}
    values["supervised_percent"] = 100 * supervised // np.maximum(total, 1)
    return _part(task.stop - task.first, bad, numbers, values, good, longest)


def _add_row(
    row: Row | BadSample, key: str, task: PartTask, columns: ColumnsBuilder, values: dict[str, Any]
) -> Conversation:
    if isinstance(row, BadSample):
        raise row
    example = convert_row(row, task.config.rules, key=key, dataset=task.config.name, record=ignore_drop)
    conversation = parse_conversation(example, key)
    sides = [_side(ref) for ref in conversation.media if ref.kind == "image"]
    columns.add(example)
    values["media_per_row"].append(len(conversation.media))
    values["image_side"] += sides
    return conversation


def _side(ref: MediaRef) -> int:
    size: Any = media_size(ref)
    return int(max(size))
