"""Mixtures: a meta file names datasets, each with its file, format and share; a data file is one dataset.

``open_meta_dataset`` reads and converts a row on access (memory does not grow with the data),
``make_meta_dataset`` returns the same examples as a list. Both assign the same rows to a rank and record what
they drop in a ledger.
"""

from __future__ import annotations

import bisect
import codecs
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate
from logging import getLogger
from pathlib import PurePath
from typing import Any, Literal, overload

import numpy as np

from packhorse.errors import BadSample, ConfigError, data_errors, list_some, naming, suggest
from packhorse.formats import llama_factory
from packhorse.formats.conversation import parse_conversation
from packhorse.formats.convert import convert_row
from packhorse.formats.found_format import FoundFormat, find_format
from packhorse.formats.row_format import RowFormat, row_layout
from packhorse.formats.summary import (
    MetaExamples,
    add_stats,
    collect_sample_stats,
    log_dataset_loading_summary,
)
from packhorse.ledger import Ledger
from packhorse.media.remote import require_driver
from packhorse.media.settings import DATASET_SETTINGS
from packhorse.media.source import is_address
from packhorse.rows.index import file_error
from packhorse.rows.row_files import Row, RowFile, gc_paused, is_json_lines, local_file, open_rows
from packhorse.rows.selection import Remainder, RowSelection, row_key
from packhorse.types import Drop, Integers, Task, World, mask_secrets
from packhorse.utils.progress import Progress

logger = getLogger("packhorse.datasets")

OnBadRow = Literal["raise", "skip"]

_THREADS = 8
_BLOCK = 1 << 14
# Settings of a dataset in a meta file, and of data in memory, with their types.
FORMAT_KEYS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("columns", "tags", "chat_template_kwargs"), dict),
    **dict.fromkeys(("media_dir", "format", "media_position", "system", "reasoning", "task"), str),
    **dict.fromkeys(("strict", "confine", "allow_http"), bool),
    **dict.fromkeys(("weight", *DATASET_SETTINGS), (int, float)),
}
# Names of LLaMA-Factory's arguments, in hints.
OTHER_NAMES = {
    **{"image_max_pixels": "max_pixels", "image_min_pixels": "min_pixels"},
    **{"video_fps": "fps", "video_maxlen": "max_frames"},
}
_META_KEYS = ("file_name", *FORMAT_KEYS, "sample_ratio", "num_samples")
_SHOWN_NAMES = 20
DATA_SUFFIXES = (".jsonl", ".ndjson", ".parquet")
_COMPRESSED_SUFFIXES = (".gz", ".zst")
_FIRST_BYTES = 4096  # enough to see whether a JSON file is an array
_FIELDS_OF_ROWS = ("messages", "conversations", "conversation")


# --- meta files ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DatasetConfig:
    """One entry of a meta file, checked and with its paths resolved."""

    name: str
    file_name: str
    rules: RowFormat
    sample_ratio: float = 1.0
    num_samples: int | None = None
    unused: frozenset[str] = frozenset()  # keys of its entry that nothing reads

    def ratio_of(self, rows: int) -> float:
        """Return the share of a file with this many rows that is used."""
        if self.num_samples is None or not rows or self.num_samples == rows:
            return self.sample_ratio
        return (self.num_samples + 0.5) / rows  # rounded down to num_samples rows

    def entry(self, file_name: str) -> dict[str, Any]:
        """The entry of a meta file for the same rows in another file."""
        entry = {"file_name": file_name, **self.rules.entry(), "sample_ratio": self.sample_ratio}
        return entry if self.num_samples is None else {**entry, "num_samples": self.num_samples}


Meta = str | os.PathLike[str] | Mapping[str, Any]


def read_meta(
    source: Meta, dataset_names: Sequence[str] | None = None, task: Task | None = None
) -> list[DatasetConfig]:
    """The datasets of a meta file, in the order of their names.

    Args:
        source: a JSON file (or address of one) that maps names to entries with ``file_name`` and settings
            (``docs/reference/data.md`` has a table), or LLaMA-Factory's ``dataset_info.json``; or such a dict
            itself, whose relative paths then start at the working directory; or a data file (``.jsonl``,
            ``.ndjson``, ``.parquet``, a JSON array; also compressed), whose media paths then start at its
            folder. The dataset of ``train.jsonl`` is called ``train``.
        dataset_names: only these.
        task: what the rows are for; None for what each dataset says (``"task"``).

    Raises:
        ConfigError: (a ``ValueError``) naming the file, the dataset and the key that is missing, unknown,
            twice there, or of the wrong type.
    """
    path = "meta" if isinstance(source, Mapping) else os.fspath(source)
    if isinstance(source, Mapping):
        meta = dict(source)
    elif is_data_file(path):
        meta = meta_of_file(path)
        path = "meta"  # the paths are relative to the working directory
    else:
        meta = _parse_meta(path)
    names = sorted(meta) if dataset_names is None else sorted(dataset_names)
    unknown = [name for name in names if name not in meta]
    if unknown:
        hints = ", ".join(f"{name}{suggest(name, map(str, meta))}" for name in unknown)
        some = list_some(sorted(map(str, meta)), _SHOWN_NAMES)
        raise ConfigError(
            f"{path}: dataset_names: no dataset {hints}; it has {some}",
            setting="dataset_names",
            value=unknown,
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError.of("dataset_names", twice, "named twice; to repeat a dataset set its sample_ratio")
    configs = [_dataset_config(path, name, meta[name]) for name in names]
    if task is None:
        return configs
    return [replace(config, rules=replace(config.rules, task=task)) for config in configs]


def task_of_meta(source: Meta, dataset_names: Sequence[str] | None = None) -> Task:
    """Return what the rows of a meta file are for: ``"preference"`` if any dataset says so."""
    tasks = {config.rules.task for config in read_meta(source, dataset_names)}
    return "preference" if "preference" in tasks else "sft"


def meta_of_file(path: str, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the content of a meta file with one dataset, the rows of a data file."""
    name = os.path.basename(path).partition(".")[0] or "train"
    return {name: {"file_name": path, "media_dir": _folder(path) or ".", **(options or {})}}


def open_dataset_rows(config: DatasetConfig, index_dir: str | None = None) -> RowFile:
    """The rows of a dataset; an error of :func:`open_rows` that is not the system's names the dataset."""
    with naming(f"dataset '{config.name}'"):
        return open_rows(config.file_name, index_dir)


def is_data_file(path: str) -> bool:
    """Whether a file has rows: by its suffix, or because it is a JSON array or has an object on each line."""
    stem = path
    for suffix in _COMPRESSED_SUFFIXES:
        stem = stem.removesuffix(suffix)
    if stem.endswith(DATA_SUFFIXES):
        return True
    path = local_file(path)
    with open(path, "rb") as file:
        if file.read(_FIRST_BYTES).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            return True
    return is_json_lines(path, several=True)  # a meta file may be one line


def _parse_meta(path: str) -> dict[str, Any]:
    with open(local_file(path), "rb") as file:
        try:
            meta = json.load(file, object_pairs_hook=_no_duplicates)
        except ValueError as error:
            raise file_error(path, f"not a valid meta file: {error}") from error
    if not isinstance(meta, dict):
        raise file_error(path, f"expected an object of datasets, found a {type(meta).__name__}")
    if any(isinstance(meta.get(name), list) for name in _FIELDS_OF_ROWS):
        problem = "is a single row; expected a meta file or a data file"
        raise file_error(path, f"{problem}. Write rows as a JSON array, or one on each line of a .jsonl file")
    return meta


def _dataset_config(path: str, name: str, entry: object) -> DatasetConfig:
    where = f"{path}: dataset '{name}'"
    if not isinstance(entry, dict):
        problem = f"{where} is a {type(entry).__name__}, expected an object"
        raise ConfigError(problem, setting=name, value=entry)
    folder, unused = _folder(path), list[str]()
    if os.path.basename(path) == llama_factory.FILE_NAME or llama_factory.is_entry(entry):
        unused = llama_factory.unused_keys(entry)
        with naming(where):
            entry = llama_factory.meta_entry(entry, _META_KEYS)

    def wrong(key: str, problem: str) -> ConfigError:
        return ConfigError(f"{where} {problem}", setting=key, value=entry.get(key))

    if unknown := sorted(set(entry) - set(_META_KEYS)):
        hints = ", ".join(f"{key}{suggest(key, _META_KEYS, OTHER_NAMES)}" for key in unknown)
        raise wrong(unknown[0], f"has unknown {hints}; known are {', '.join(_META_KEYS)}")
    if not entry.get("file_name"):
        raise wrong("file_name", "has no file_name")
    if not isinstance(file_name := entry["file_name"], str):
        raise wrong("file_name", f"has file_name={file_name!r}, expected a str")
    ratio, number = entry.get("sample_ratio", 1.0), entry.get("num_samples")
    if isinstance(ratio, bool) or not isinstance(ratio, int | float):
        raise wrong("sample_ratio", f"has sample_ratio={ratio!r}, expected a number")
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        raise wrong("num_samples", f"has num_samples={number!r}, expected a whole number above 0")
    options = {key: value for key, value in entry.items() if key in FORMAT_KEYS}
    with naming(where):
        rules = row_format({**options, "media_dir": _media_dir(folder, options.get("media_dir"))})
    not_read = frozenset(f"{key} of its entry" for key in unused)
    return DatasetConfig(name, _join(folder, file_name), rules, float(ratio), number, not_read)


def row_format(options: Mapping[str, Any]) -> RowFormat:
    """Return the row format of a dataset from its settings in a meta file, or those of data in memory."""
    if unknown := sorted(set(options) - set(FORMAT_KEYS)):
        hints = ", ".join(f"{key}{suggest(key, FORMAT_KEYS, OTHER_NAMES)}" for key in unknown)
        raise ConfigError(
            f"unknown {hints}; known are {', '.join(FORMAT_KEYS)}", setting="dataset_options", value=unknown
        )
    for key, value in options.items():
        kind = FORMAT_KEYS[key]
        if value is not None and not isinstance(value, kind):
            name = getattr(kind, "__name__", "number")
            raise ConfigError.of(key, value, f"expected a {name}")
    media = {key: options[key] for key in DATASET_SETTINGS if options.get(key) is not None}
    others = {key: value for key, value in options.items() if key not in DATASET_SETTINGS}
    return RowFormat.of(**others, media_settings=media)


def _folder(path: str) -> str:
    """The folder of the meta file, with a closing slash where it has to have one."""
    if not is_address(path):
        return os.path.dirname(path)
    scheme, _, rest = path.partition("://")
    return f"{scheme}://{rest.rpartition('/')[0]}"


def _join(folder: str, path: str) -> str:
    if is_address(path) or not folder:
        return path
    if is_address(folder):
        return folder + path if folder.endswith("://") else os.path.join(folder, path)
    return str(PurePath(folder, path))  # without the "." of `"media_dir": "."`; a ".." stays, for links


def _media_dir(folder: str, media_dir: str | None) -> str | None:
    """Resolve a relative media folder: next to the meta file, else in the working directory."""
    if media_dir is None or is_address(media_dir):
        return media_dir
    path = _join(folder, media_dir)
    if path == media_dir or is_address(path) or os.path.isdir(path) or not os.path.isdir(media_dir):
        return path
    logger.warning(
        "media_dir %s is not next to the meta file; using the one in the working directory, %s. Write its "
        "absolute path, or its path relative to the meta file",
        media_dir,
        os.getcwd(),
    )
    return media_dir


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if duplicates := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"duplicate name {', '.join(map(repr, duplicates))}")
    return dict(pairs)


# --- mixtures ------------------------------------------------------------------------------------------


class UnusedFields:
    """Reports fields that nothing reads and that the first rows do not have, each once in a process."""

    def __init__(self, name: str = "", of_first_rows: Iterable[str] = ()) -> None:
        self._name, self._reported = name, set(of_first_rows)

    def report(self, unused: set[str], ledger: Ledger) -> None:
        """Record and log those that have not been reported."""
        if unused <= self._reported:
            return
        new = sorted(unused - self._reported)
        self._reported |= unused
        name = self._name or "data"
        logger.warning("%s: fields that are not used: %s", name, ", ".join(new))
        for one in new:  # with a key, so that the ledger has one entry for all processes
            ledger.record(Drop(name, "convert", "unused_field", f"not used: {one}", "kept", self._name))


@dataclass(frozen=True, slots=True)
class Source:
    """One dataset of a mixture: its open file, this rank's rows of it, and how its first rows are written."""

    config: DatasetConfig
    file: RowFile
    selection: RowSelection
    found: FoundFormat = field(default_factory=FoundFormat)
    unused: UnusedFields = field(default_factory=UnusedFields)

    def __len__(self) -> int:
        return len(self.selection)

    def key(self, position: int) -> str:
        """The name of the example at a position of this rank's rows."""
        return self.selection.key(self.config.name, position)

    def convert(self, row: Row | BadSample, key: str, ledger: Ledger) -> dict[str, Any]:
        """Return the example that a row becomes; BadSample if it is unreadable or no conversation."""
        if isinstance(row, BadSample):
            raise row.with_key(key)
        unused: set[str] = set()
        name, record = self.config.name, ledger.record
        example = convert_row(row, self.config.rules, key=key, dataset=name, record=record, unused=unused)
        if unused:
            self.unused.report(unused, ledger)
        return example


class MetaDataset(Sequence[dict[str, Any]]):
    """The examples of a mixture, read and converted on access.

    A sequence: ``len``, ``[i]`` (a :class:`BadSample` names the row that cannot be read), slices, iteration.
    It can be forked and pickled into workers. Resident memory is a few MB whatever the size of the data.

    Attributes:
        ledger: what was dropped when opening, and what conversion found since.
    """

    def __init__(self, sources: Sequence[Source], ledger: Ledger) -> None:
        self._sources = tuple(sources)
        self._ends = list(accumulate(map(len, self._sources)))
        self.ledger = ledger

    @property
    def sources(self) -> tuple[Source, ...]:
        """The datasets of the mixture, in order: each has its ``config``, ``file`` and ``selection``."""
        return self._sources

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        source, position = self._find(index)
        key = source.selection.key(source.config.name, position)
        row = next(source.file.read([source.selection.row(position)]))
        return source.convert(row, key, self.ledger)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for source in self._sources:
            # Read in the order of the selection, neighbours together.
            rows = source.file.read(map(source.selection.row, range(len(source))))
            for position, row in enumerate(rows):
                yield source.convert(row, source.key(position), self.ledger)

    def key(self, index: int) -> str:
        """The name of an example: dataset and row, ``coco/812``."""
        source, position = self._find(index)
        return source.key(position)

    def row(self, index: int) -> Row:
        """The row as the file holds it."""
        source, position = self._find(index)
        return source.file[source.selection.row(position)]

    def location(self, index: int) -> str:
        """File and line of an example's row."""
        source, position = self._find(index)
        return source.file.location(source.selection.row(position))

    def locations(self, indices: Sequence[int]) -> list[str]:
        """As :meth:`location`, for many, without reading: if there are blank lines, without line numbers."""
        rows = map(self._find, indices)
        return [source.file.quick_location(source.selection.row(position)) for source, position in rows]

    def describe(self) -> list[str]:
        """Return a line for each dataset: its rows, the format of its first rows, what is not used."""
        lines = []
        for source in self._sources:
            name = f"{source.config.name} ({mask_secrets(source.config.file_name)})"
            lines.append(describe_rows(name, len(source), source.config.rules, source.found))
        return lines

    def lengths(self) -> dict[str, int]:
        """Examples per dataset, in order."""
        return {source.config.name: len(source) for source in self._sources}

    def stats(self) -> dict[str, int]:
        """Media and estimated tokens; reads every row, so it costs a pass over the data."""
        return collect_sample_stats(self)

    def _find(self, index: int) -> tuple[Source, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        index %= len(self)
        which = bisect.bisect_right(self._ends, index)
        return self._sources[which], index - (self._ends[which - 1] if which else 0)

    def __repr__(self) -> str:
        return f"MetaDataset({len(self):,} examples: {self.lengths()})"


def open_meta_dataset(
    path_or_dataset: Meta,
    dataset_names: Sequence[str] | None = None,
    split: str = "train",
    shard_data: bool = False,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    remainder: Remainder = "drop",
    ledger: Ledger | None = None,
    index_dir: str | None = None,
    task: Task | None = None,
) -> MetaDataset:
    """Open the datasets of a meta file without loading them: the lazy form of :func:`make_meta_dataset`.

    A file is indexed the first time (seconds for gigabytes) and opens in milliseconds after that.

    Args:
        path_or_dataset: the meta file, or a dict with its content.
        dataset_names: only these datasets; all if None.
        split: not used; for symmetry with the other loaders.
        shard_data: take only this rank's rows of each file, ``[rank::world_size]``.
        rank: the data-parallel rank (see :meth:`World.from_mesh`); if None, the rank among all processes.
        world_size: how many data-parallel ranks there are; if None, how many processes.
        remainder: rows that do not divide by ``world_size`` are recorded and dropped (``"drop"``), or go to
            the first ranks (``"keep"``).
        ledger: where losses are recorded; a new one if None.
        index_dir: folder for the row indexes, instead of next to the files.
        task: see :func:`read_meta`.

    Raises:
        ConfigError: the meta file is not in order, or a data file does not match its suffix.
        FileNotFoundError: a file does not exist.
    """
    configs = read_meta(path_or_dataset, dataset_names, task)
    world = _world(shard_data, rank, world_size)
    ledger = ledger if ledger is not None else Ledger()
    with ThreadPoolExecutor(_THREADS) as pool:
        files = list(pool.map(lambda config: open_dataset_rows(config, index_dir), configs))
    sources = []
    for config, file in zip(configs, files, strict=True):
        selection = RowSelection(len(file), config.ratio_of(len(file)), world, remainder)
        selection.record_losses(config.name, ledger)
        found = find_format(check_first_rows(config, file).values(), config.rules)
        found |= FoundFormat(unused=config.unused)
        unused = UnusedFields(config.name, found.unused)
        sources.append(Source(config, file, selection, found, unused))
        if world.rank == 0:
            record_unused_fields(config.name, found.unused, ledger)
    record_same_files(sources, ledger)
    return MetaDataset(sources, ledger)


def make_meta_dataset(
    path_or_dataset: Meta,
    dataset_names: Sequence[str] | None = None,
    split: str = "train",
    shard_data: bool = False,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    on_bad: OnBadRow = "raise",
    remainder: Remainder = "drop",
    ledger: Ledger | None = None,
    index_dir: str | None = None,
    **kwargs: Any,
) -> MetaExamples:
    """Load the datasets of a meta file into a list of examples (about 2 KB of memory a row).

    Datasets are loaded in parallel and ordered by name. A summary table is logged.

    Args:
        path_or_dataset: the meta file, or a dict with its content.
        dataset_names: only these datasets; all if None.
        split: not used; for symmetry with the other loaders.
        shard_data: take only this rank's rows of each file, ``[rank::world_size]``.
        rank: the data-parallel rank (see :meth:`World.from_mesh`); if None, the rank among all processes.
        world_size: how many data-parallel ranks there are; if None, how many processes.
        on_bad: a row that cannot be read or is no conversation stops the loading (``"raise"``), or is
            dropped and recorded (``"skip"``; shards may then differ in length).
        remainder: see :func:`open_meta_dataset`.
        ledger: see :func:`open_meta_dataset`.
        index_dir: see :func:`open_meta_dataset`.
        **kwargs: ignored, with a warning.

    Returns:
        The examples, with ``.stats`` (see :func:`collect_sample_stats`) and ``.ledger``.
    """
    if kwargs:
        logger.warning("make_meta_dataset ignores the argument(s) %s", ", ".join(sorted(kwargs)))
    if on_bad not in ("raise", "skip"):
        raise ConfigError.of("on_bad", on_bad, "expected 'raise' or 'skip'")
    started = time.perf_counter()
    lazy = open_meta_dataset(
        path_or_dataset,
        dataset_names,
        split,
        shard_data,
        rank,
        world_size,
        remainder=remainder,
        ledger=ledger,
        index_dir=index_dir,
    )
    with gc_paused(), ThreadPoolExecutor(_THREADS) as pool:
        loaded = list(pool.map(lambda source: _load(source, lazy.ledger, on_bad), lazy.sources))
    examples = MetaExamples(example for part in loaded for example in part.examples)
    timings = [part.timing for part in loaded]
    examples.stats = add_stats(timings)
    examples.ledger = lazy.ledger
    examples.key = RowKeys(lazy, [part.skipped for part in loaded])
    rank = _world(shard_data, rank, world_size).rank if shard_data else rank
    log_dataset_loading_summary(timings, time.perf_counter() - started, len(examples), rank)
    if len(lazy.ledger):
        logger.warning("of the rows of %s:\n%s", path_or_dataset, lazy.ledger.summary())
    return examples


@dataclass(frozen=True, slots=True)
class _Loaded:
    """One dataset in memory: its examples, the positions that were dropped, its line of the summary."""

    examples: list[dict[str, Any]]
    skipped: list[int]
    timing: dict[str, Any]


class RowKeys:
    """Keys of the examples of a list loaded from ``mixture``, from which rows may have been dropped."""

    def __init__(self, mixture: MetaDataset, skipped: Sequence[Sequence[int]]) -> None:
        self.mixture = mixture
        starts = accumulate(map(len, mixture.sources), initial=0)
        dropped = [start + index for start, part in zip(starts, skipped, strict=False) for index in part]
        # For each dropped row: how many examples of the list come before it.
        self._before = [index - count for count, index in enumerate(dropped)]

    def __len__(self) -> int:
        return len(self.mixture) - len(self._before)

    def __call__(self, index: int) -> str:
        """Return the key of an example by its index in the list."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        index %= len(self)
        return self.mixture.key(index + bisect.bisect_right(self._before, index))

    def mixture_indices(self) -> Integers:
        """Return the index in the mixture of each example of the list, as it was loaded."""
        indices = np.arange(len(self), dtype=np.int64)
        return indices + np.searchsorted(np.asarray(self._before, np.int64), indices, side="right")


def _load(source: Source, ledger: Ledger, on_bad: OnBadRow) -> _Loaded:
    """Read and convert one dataset, block by block."""
    name, numbers = source.config.name, source.selection.rows()
    report = Progress(f"loading {name}", len(numbers))
    examples: list[dict[str, Any]] = []
    skipped: list[int] = []
    io_s = convert_s = 0.0
    for first in range(0, len(numbers), _BLOCK):
        started = time.perf_counter()
        rows = list(source.file.read(numbers[first : first + _BLOCK].tolist()))
        read = time.perf_counter()
        examples.extend(_convert_rows(source, rows, first, ledger, on_bad, skipped))
        io_s, convert_s = io_s + read - started, convert_s + time.perf_counter() - read
        report(first + len(rows))
    started = time.perf_counter()
    stats = collect_sample_stats(examples)
    convert_s += time.perf_counter() - started
    _warn_of_missing(name, stats, len(examples))
    timing = {"name": name, "samples": len(examples), "io_s": io_s, "convert_s": convert_s, **stats}
    return _Loaded(examples, skipped, timing)


def _convert_rows(
    source: Source,
    rows: list[Row | BadSample],
    first: int,
    ledger: Ledger,
    on_bad: OnBadRow,
    skipped: list[int],
) -> Iterator[dict[str, Any]]:
    for position, row in enumerate(rows, first):
        try:
            example = source.convert(row, source.key(position), ledger)
        except BadSample as error:
            if on_bad == "raise":
                raise
            ledger.record(error.as_drop(dataset=source.config.name))
            skipped.append(position)
            continue
        yield example


def _warn_of_missing(name: str, stats: dict[str, int], samples: int) -> None:
    """Warn once per dataset about fields that rows lack."""
    fields = {"_text_tokens": "n_missing_text_tokens", "mm_inputs_meta": "n_missing_mm_inputs_meta"}
    missing = [f"{field} ({stats[stat]:,})" for field, stat in fields.items() if stats[stat]]
    if missing:
        logger.warning("%s: of %s rows some lack %s: estimating", name, f"{samples:,}", ", ".join(missing))


def _world(shard_data: bool, rank: int | None, world_size: int | None) -> World:
    if not shard_data:
        if world_size is not None and world_size > 1:
            logger.warning(
                "world_size=%s has no effect without shard_data=True: loading all rows", world_size
            )
        return World()
    if (rank is None) != (world_size is None):
        raise ConfigError.of("rank", rank, f"world_size={world_size}: give both or neither")
    return World.detect() if rank is None or world_size is None else World(rank, world_size)


_FIRST_ROWS = 8
_OTHER_TASK = ("preference_data", "no_preference")  # rows that another task reads


def check_first_rows(config: DatasetConfig, file: RowFile) -> dict[str, Row]:
    """Return the first rows of a dataset by their keys; raise if none can be read in its format.

    All ranks read the same rows, so all raise or none. A ``media_dir`` that does not exist gets a warning,
    unless all media of these rows are elsewhere.
    """
    media_dir = config.rules.media_dir
    if media_dir is not None and is_address(media_dir):
        with naming(f"dataset '{config.name}'"):
            require_driver(media_dir)
    numbers = range(min(len(file), _FIRST_ROWS))
    numbered = zip(numbers, file.read(numbers), strict=True)
    rows = {row_key(config.name, number): row for number, row in numbered if not isinstance(row, BadSample)}
    with naming(f"dataset '{config.name}'"):
        check_rows_format(rows, config.rules)
    if media_dir is not None and not is_address(media_dir) and not os.path.isdir(media_dir):
        _warn_of_media_dir(config.name, media_dir, rows, config.rules)
    return rows


def _warn_of_media_dir(
    name: str, media_dir: str, rows: Mapping[str, Mapping[str, Any]], rules: RowFormat
) -> None:
    """Warn of a ``media_dir`` that does not exist, unless rows have media and none of them is in it."""
    sources: list[object] = []
    for key, row in rows.items():
        with data_errors():
            example = convert_row(row, rules, key=key, dataset=name, record=Ledger().record)
            sources += [ref.source for ref in parse_conversation(example).media]
    if not sources or any(str(_first(source)).startswith(os.path.join(media_dir, "")) for source in sources):
        logger.warning(
            "%s: media_dir %s is not a folder (nor is there one in the working directory): every media item "
            "with a relative path will be missing, and its row dropped or replaced as missing_media",
            name,
            media_dir,
        )


def _first(source: object) -> object:
    """Return a media item, or its first frame."""
    return next(iter(source), None) if isinstance(source, list | tuple) else source


def check_rows_format(rows: Mapping[str, Mapping[str, Any]], rules: RowFormat) -> None:
    """Raise if none of the first rows of a dataset can be read in its format: then the format is wrong."""
    findings = Ledger()
    unknown: list[BadSample] = []
    for key, row in rows.items():
        try:
            row_layout(row, rules)
            example = convert_row(row, rules, key=key, dataset="", record=findings.record)
        except BadSample as error:
            if error.key and error.reason not in _OTHER_TASK:
                return  # this row is broken; it is raised when it is read
            unknown.append(error)
            continue
        if any(turn["role"] == "assistant" for turn in example["conversation"]):
            return
    if unknown and len(unknown) == len(rows):
        names = sorted(map(str, next(iter(rows.values()))))
        setting = "task" if unknown[0].reason in _OTHER_TASK else "columns"
        raise ConfigError(unknown[0].detail, setting=setting, value=names) from unknown[0]
    roles = [drop for drop in findings if drop.reason == "unknown_role"]
    if len(rows) > 1 and len({drop.key for drop in roles}) == len(rows):
        raise ConfigError(
            f"none of the first rows has an assistant turn; {roles[0].key}: {roles[0].detail}. Set "
            "tags={'user_tag': …, 'assistant_tag': …} to the roles of the rows",
            setting="tags",
        )


def describe_rows(name: str, rows: int, rules: RowFormat, found: FoundFormat) -> str:
    """Return a line about a dataset: rows, format, settings, and the fields that nothing reads."""
    entry = rules.entry()
    shown = ("columns", "tags", "media_dir", "format")
    settings = [f"{key}={value!r}" for key, value in entry.items() if key not in shown]
    unused = [f"not used: {', '.join(sorted(found.unused))}"] if found.unused else []
    return "; ".join([f"{name}: {rows:,} row{'s' * (rows != 1)}, {found}", *settings, *unused])


def record_unused_fields(name: str, unused: Iterable[str], ledger: Ledger) -> None:
    """Record and log the fields of a dataset that nothing reads."""
    if names := ", ".join(sorted(unused)):
        logger.warning("%s: fields that are not used: %s", name or "data", names)
        ledger.record(Drop(name, "select", "unused_field", f"not used: {names}", "kept", name))


def record_same_files(sources: Sequence[Source], ledger: Ledger) -> None:
    """Record and log datasets that have the same file."""
    first: dict[str, str] = {}
    for source in sources:
        name, path = source.config.name, os.path.realpath(source.file.path)
        other = first.setdefault(path, name)
        if other != name and source.selection.world.rank == 0:
            detail = f"{source.file.name} is also the file of dataset '{other}'; its rows are delivered twice"
            logger.warning("%s: %s", name, detail)
            ledger.record(Drop(name, "select", "same_file", detail, "kept", name))
