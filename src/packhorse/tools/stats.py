"""Distributions of tokens and media over the rows of datasets: exact from counts, or estimated.

With a processor the rows are counted (existing counts are reused). Without one, text is characters // 3
tokens, a media item is 500 tokens, and only numbers of media and sizes of images are exact; this costs one
pass over the rows and the headers of their images.
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
import numpy.typing as npt

from packhorse.count.columns import CountColumns, Distribution, MediaColumns
from packhorse.count.count_report import CountedFile
from packhorse.count.counting import count_meta
from packhorse.count.parts import (
    PART_ROWS,
    PartTask,
    check_media_dir,
    current_rows,
    map_parts,
    split_parts,
    with_absolute_paths,
)
from packhorse.count.sidecar import data_source
from packhorse.errors import BadSample, ConfigError
from packhorse.formats.conversation import parse_documents
from packhorse.formats.convert import convert_row, ignore_drop
from packhorse.formats.estimate import ColumnsBuilder, estimate_lengths
from packhorse.formats.meta import DatasetConfig, Meta, read_meta
from packhorse.media import image_size
from packhorse.rows.row_files import RowFile, gc_paused, open_rows
from packhorse.rows.selection import row_key
from packhorse.types import MEDIA_KINDS, Task
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
"""The distributions: over rows tokens, supervised tokens, their share in percent, tokens of images and
videos, and media; over images the longer side in pixels and the tokens."""

_IMAGE = MEDIA_KINDS.index("image")
_LONGEST = 5  # rows that are listed for each dataset


class LongRow(NamedTuple):
    """One of the longest rows of a dataset: tokens, index, key, file and line."""

    tokens: int
    row: int
    key: str = ""
    location: str = ""


@dataclass(frozen=True, slots=True)
class DatasetStats:
    """One dataset, over all rows of its file.

    Attributes:
        name: of the dataset.
        file: its row file.
        rows: number of all rows.
        bad: for each reason the number of rows that could not be counted; they are in no distribution.
        text_only: rows without media.
        media: numbers of ``images``, ``videos`` and ``audios``.
        spreads: the distributions of :data:`SPREADS`.
        longest: the rows with the most tokens, the longest first.
        supervised_weight: the sum of the loss weights of all supervised tokens; None for estimates.
    """

    name: str
    file: str
    rows: int
    bad: dict[str, int]
    text_only: int
    media: dict[str, int]
    spreads: dict[str, Distribution] = field(repr=False)
    longest: tuple[LongRow, ...] = ()
    supervised_weight: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        names = ("name", "file", "rows", "bad", "text_only", "media", "supervised_weight")
        fields = {name: getattr(self, name) for name in names}
        spreads = {name: self.spreads[name].as_dict() for name in SPREADS}
        return fields | spreads | {"longest": [row._asdict() for row in self.longest]}

    @property
    def supervised_share(self) -> float:
        """Supervised tokens over all tokens."""
        tokens = self.spreads["tokens"].sum
        return self.spreads["supervised_tokens"].sum / tokens if tokens else 0.0


@dataclass(frozen=True, slots=True)
class StatsReport:
    """The datasets of a meta file.

    Attributes:
        datasets: in the order of the meta file.
        estimated: whether tokens are estimated, not counted.
        off_by: the largest error of a row's token count; 0 if all are exact, -1 if unknown.
        processor: its name; empty without one.
        counted_rows: how many rows were counted by this call.
        seconds: how long it took.
    """

    datasets: tuple[DatasetStats, ...]
    estimated: bool
    off_by: int
    processor: str
    counted_rows: int
    seconds: float

    def all(self) -> DatasetStats:
        """Return all datasets as one."""
        return _merge("all", "", self.datasets, max(len(dataset.longest) for dataset in self.datasets))

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {
            "version": 1,
            "estimated": self.estimated,
            "exact": self.off_by == 0,
            "off_by": self.off_by,
            "processor": self.processor or None,
            "counted_rows": self.counted_rows,
            "seconds": round(self.seconds, 3),
            "datasets": [dataset.as_dict() for dataset in self.datasets],
            "all": self.all().as_dict(),
        }


def compute_stats(
    meta: Meta,
    processor: Any = None,
    *,
    dataset_names: Sequence[str] | None = None,
    engine: Engine | None = None,
    trust_remote_code: bool = False,
    index_dir: str | None = None,
    longest: int = _LONGEST,
    task: Task | None = None,
    progress: OnProgress | None = None,
) -> StatsReport:
    """Compute the distributions of tokens and media over the rows of each dataset.

    Args:
        meta: the meta file, or a dict with its content. All rows of a file are used, whatever the
            ``sample_ratio`` of its dataset.
        processor: a processor, or the path of one: rows without counts are counted first, and the counts
            saved. None for estimates.
        dataset_names: only these datasets.
        engine: where to count (see :mod:`packhorse.count.engines`); None counts in this process.
        trust_remote_code: run code that comes with the processor.
        index_dir: as for :func:`~packhorse.datasets.open_meta_dataset`.
        longest: how many of the longest rows of each dataset to list.
        task: what the rows are for; None for what each dataset says.
        progress: called with the number of finished rows; None logs it every few seconds.

    Raises:
        ConfigError: the meta file, a data file, the processor or a media folder is missing or invalid.
    """
    started = time.monotonic()
    configs = read_meta(meta, dataset_names, task)
    if not configs:
        raise ConfigError(f"{meta}: it lists no dataset", path="" if isinstance(meta, Mapping) else meta)
    if processor is None:
        progress = progress or Progress("estimating")
        datasets = tuple(_estimate_datasets(configs, engine, index_dir, progress, longest))
        return StatsReport(datasets, True, -1, "", 0, time.monotonic() - started)
    report = count_meta(
        meta,
        processor,
        dataset_names=dataset_names,
        engine=engine,
        trust_remote_code=trust_remote_code,
        bad_rows=0,
        index_dir=index_dir,
        task=task,
        progress=progress,
    )
    name = processor if isinstance(processor, str | os.PathLike) else type(processor).__name__
    return StatsReport(
        tuple(_stats_of_counts(counted, longest) for counted in report.files),
        False,
        int(report.totals()["off_by"]),
        os.fspath(name),
        report.counted_rows,
        time.monotonic() - started,
    )


def _stats_of_counts(counted: CountedFile, longest: int) -> DatasetStats:
    """Return the statistics of a sidecar, which is read part by part."""
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
        bad = Counter(columns.status[~ok].tolist())
        part = _part_stats(len(columns), bad, numbers, values, rows, longest)
        parts.append(replace(part, supervised_weight=float(columns.weight.sum())))
        first += len(columns)
    return _with_locations(_merge(config.name, config.file_name, parts, longest), counted.file)


def _with_locations(stats: DatasetStats, file: RowFile) -> DatasetStats:
    """Return the statistics with keys and locations of the longest rows."""
    locations = {row: file.location(row) for row in sorted(entry.row for entry in stats.longest)}
    longest = [
        LongRow(tokens, row, row_key(stats.name, row), locations[row]) for tokens, row, *_ in stats.longest
    ]
    return replace(stats, longest=tuple(longest))


def _part_stats(
    rows: int,
    bad: Mapping[str, int],
    media: Mapping[str, npt.ArrayLike],
    values: Mapping[str, Any],
    good: npt.ArrayLike,
    longest: int,
) -> DatasetStats:
    """Return the statistics of some rows; ``media`` and ``values`` are those of the rows ``good``."""
    tokens, indices = np.asarray(values["tokens"], np.int64), np.asarray(good, np.int64)
    order = np.lexsort((indices, -tokens))[:longest]  # of equally long rows the first
    return DatasetStats(
        "",
        "",
        rows,
        dict(bad),
        int((np.asarray(values["media_per_row"]) == 0).sum()),
        {name: int(np.sum(counts)) for name, counts in media.items()},
        {name: Distribution.of(values[name]) for name in SPREADS},
        tuple(LongRow(int(tokens[index]), int(indices[index])) for index in order),
    )


def _merge(name: str, file: str, parts: Sequence[DatasetStats], longest: int = _LONGEST) -> DatasetStats:
    bad: Counter[str] = Counter()
    media: Counter[str] = Counter(dict.fromkeys(("images", "videos", "audios"), 0))
    for part in parts:
        bad.update(part.bad)
        media.update(part.media)
    weights = [part.supervised_weight for part in parts if part.supervised_weight is not None]
    rows = [row for part in parts for row in part.longest]
    rows.sort(key=lambda row: (-row.tokens, row.key.rpartition("/")[0], row.row))
    return DatasetStats(
        name,
        file,
        sum(part.rows for part in parts),
        dict(bad.most_common()),
        sum(part.text_only for part in parts),
        dict(media),
        {spread: Distribution.merge(part.spreads[spread] for part in parts) for spread in SPREADS},
        tuple(rows[:longest]),
        float(sum(weights)) if len(weights) == len(parts) else None,
    )


# --- estimates -------------------------------------------------------------------------------------------


def _estimate_datasets(
    configs: Sequence[DatasetConfig],
    engine: Engine | None,
    index_dir: str | None,
    progress: OnProgress,
    longest: int,
) -> Iterator[DatasetStats]:
    for config in configs:
        check_media_dir(config)
    files = [open_rows(with_absolute_paths(config).file_name, index_dir) for config in configs]
    parts = [
        split_parts(config, len(file), PART_ROWS, Fingerprint.of(data_source(file)), index_dir)
        for config, file in zip(configs, files, strict=True)
    ]
    datasets: list[DatasetStats] = [_merge("", "", []) for _ in configs]
    work = partial(_estimate_part, longest=longest)
    with contextlib.closing(map_parts(parts, work, engine, progress)) as results:
        for index, _, part in results:
            datasets[index] = _merge("", "", [datasets[index], part], longest)
    for config, stats, file in zip(configs, datasets, files, strict=True):
        yield _with_locations(replace(stats, name=config.name, file=config.file_name), file)


def _estimate_part(task: PartTask, longest: int) -> DatasetStats:
    """Return estimates of some rows; runs in the worker processes of an engine."""
    rows, columns = current_rows(task), ColumnsBuilder()
    bad: Counter[str] = Counter()
    media: dict[str, list[int]] = {f"{kind}s": [] for kind in MEDIA_KINDS}
    values: dict[str, Any] = {name: [] for name in SPREADS}
    characters: list[tuple[int, int]] = []
    good: list[int] = []
    with gc_paused():
        for index, row in enumerate(rows.read(range(task.first, task.stop)), task.first):
            key, config = row_key(task.config.name, index), task.config
            try:
                if isinstance(row, BadSample):
                    raise row
                example = convert_row(row, config.rules, key=key, dataset=config.name, record=ignore_drop)
                documents = parse_documents(example, key)
                refs = [ref for document in documents for ref in document.media]
                sides = [max(image_size(ref.source)) for ref in refs if ref.kind == "image"]
                columns.add(example)
            except BadSample as error:
                bad[error.reason] += 1
                continue
            good.append(index)
            values["media_per_row"].append(len(refs))
            values["image_side"] += sides
            kinds = Counter(ref.kind for ref in refs)
            for kind in MEDIA_KINDS:
                media[f"{kind}s"].append(kinds[kind])
            turns = [turn for document in documents for turn in document.messages]
            answers = sum(len(turn.text) for turn in turns if turn.role == "assistant")
            characters.append((answers, sum(len(turn.text) for turn in turns)))
    total, visual, _ = estimate_lengths(columns.columns())
    # `_text_tokens` need not agree with the characters: answers keep their share of it.
    texts = zip((total - visual).tolist(), characters, strict=True)
    supervised = np.array([text * part // max(whole, 1) for text, (part, whole) in texts], np.int64)
    values |= {"tokens": total, "visual_tokens": visual, "supervised_tokens": supervised}
    values["supervised_percent"] = 100 * supervised // np.maximum(total, 1)
    return _part_stats(task.stop - task.first, bad, media, values, good, longest)
