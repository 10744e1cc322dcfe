"""How long the rows of a dataset are: by the best source there is for each, without encoding anything.

A dataset may be wrapped (in ``RobustDatasetWrapper``, ``PreTokenizedDatasetWrapper``, torch's ``Subset`` and
``ConcatDataset``): the rows under the wrappers are looked at, so that no picture is decoded for its length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from logging import getLogger
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset, Subset

from packhorse.count.columns import CountColumns
from packhorse.count.sidecar import counts_of, is_counted
from packhorse.errors import DATA_ERRORS, BadSample, ConfigError, is_data_error
from packhorse.families.processors import as_processor
from packhorse.formats.estimate import Geometry, LengthColumns, estimate, estimate_lengths
from packhorse.formats.meta import MetaDataset, RowKeys
from packhorse.formats.summary import MetaExamples
from packhorse.ledger import Ledger, default_ledger
from packhorse.utils.progress import Progress

logger = getLogger("packhorse.datasets")

Ints = npt.NDArray[np.int64]
Examples = Iterator[tuple[int, Any]]
"""Places in a list of rows with the examples there; None for one that cannot be read."""

_ROWS_COMPARED = 16


def recorded_counts(dataset: Any, processor: Any) -> CountColumns | None:
    """Exact counts of a dataset's rows, if they are a mixture's whose files have all been counted.

    Args:
        dataset: without wrappers. What :func:`~packhorse.datasets.open_meta_dataset` and
            :func:`~packhorse.datasets.make_meta_dataset` give is known to be a mixture.
        processor: what the rows were counted with: a processor, or the path or hub name of one.

    Returns:
        None if there are none; where count files lie about unused, the log says why.

    Raises:
        ConfigError: there is no processor under that path.
    """
    if isinstance(dataset, MetaDataset):
        mixture, places = dataset, None
    else:
        found = _mixture_of(dataset) if isinstance(dataset, MetaExamples) else None
        if found is None:
            return None
        mixture, places = found
    processor = as_processor(processor)
    if not any(hasattr(processor, name) for name in ("tokenizer", "convert_tokens_to_ids")):
        # None, or one that only tells a geometry: nothing was ever counted with it.
        if is_counted(mixture):
            logger.warning(
                "there are count files for this data, but lengths are estimated: no processor %s. Pass the "
                "one that the rows were counted with as processor=",
                "was given" if processor is None else "with a tokenizer was given",
            )
        return None
    counts = counts_of(mixture, processor)
    return counts if counts is None or places is None else counts.take(places)


def examples_at(dataset: Any, rows: Ints) -> Examples:
    """The examples of these rows; a mixture is read file by file, which is several times faster.

    Whoever loads a row that cannot be read decides what becomes of it, and records that.
    """
    return _of_mixture(dataset, rows) if isinstance(dataset, MetaDataset) else _one_by_one(dataset, rows)


def _one_by_one(dataset: Any, rows: Ints) -> Examples:
    for place, row in enumerate(rows):
        try:
            example = dataset[int(row)]
        except DATA_ERRORS as error:
            if not is_data_error(error):
                raise
            example = None
        yield place, example


def _of_mixture(dataset: MetaDataset, rows: Ints) -> Examples:
    first = 0
    for source in dataset.sources:
        places = np.flatnonzero((rows >= first) & (rows < first + len(source)))
        positions = rows[places] - first
        first += len(source)
        read = source.file.read(source.selection.row(int(position)) for position in positions)
        for place, position, row in zip(places, positions, read, strict=True):
            try:
                example = source.convert(row, int(position), dataset.ledger)
            except BadSample:
                example = None
            yield int(place), example


def _mixture_of(examples: MetaExamples) -> tuple[MetaDataset, Ints] | None:
    """The mixture that a list was loaded from, and where each of its examples stands there.

    None if the list no longer is what was loaded: a list can be shuffled or filtered, so some of its examples
    are compared with the files.
    """
    keys = getattr(examples, "key", None)
    if not isinstance(keys, RowKeys) or len(examples) != len(keys):
        return None
    mixture, places = keys.mixture, keys.places()
    for number in np.linspace(0, len(examples) - 1, min(len(examples), _ROWS_COMPARED)).astype(int).tolist():
        if examples[number].get("conversation") != mixture[int(places[number])]["conversation"]:
            return None
    return mixture, places


Flags = npt.NDArray[np.bool_]
Counts = CountColumns | LengthColumns | npt.ArrayLike

GIVEN, SIDECAR, FIELDS, ESTIMATE, UNKNOWN = "given", "sidecar", "row fields", "estimate", "unknown"
"""Where a length comes from, the best first. An unknown one (the row cannot be read) counts 0."""

MARGIN = 512
"""Rows are left out only if they are so much above ``max_length``, where their length is not exact."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long rows are.

    Attributes:
        tokens: of each row.
        exact: whether that is what the processor makes of it.
        sources: how many rows have their length from which source.
    """

    tokens: Ints
    exact: Flags
    sources: Counter[str]


@dataclass(frozen=True, slots=True)
class Measure:
    """What lengths are measured with."""

    processor: Any = None
    image_cfg: Geometry | None = None
    video_cfg: Geometry | None = None


def are_too_long(tokens: Ints, exact: Flags, max_length: int) -> Flags:
    """Which rows are left out by their length: those that are not exact have a margin of ``MARGIN``."""
    too_long: Flags = tokens > max_length + np.where(exact, 0, MARGIN)
    return too_long


def lengths_of(dataset: Any, measure: Measure, rows: Ints | None = None) -> Lengths:
    """The length of each row.

    Args:
        dataset: what is sampled from.
        measure: the processor and its geometry.
        rows: only these rows, in this order; all if None.
    """
    rows = np.arange(len(dataset), dtype=np.int64) if rows is None else rows
    if isinstance(dataset, Subset):
        return lengths_of(dataset.dataset, measure, np.asarray(dataset.indices, np.int64)[rows])
    if isinstance(dataset, ConcatDataset):
        return _lengths_of_parts(dataset, measure, rows)
    inner = _wrapped(dataset)
    if inner is not None:
        return lengths_of(inner, measure, rows)
    counts = recorded_counts(dataset, measure.processor)
    if counts is None:
        return _lengths_by_rows(dataset, measure, rows)
    counted = Counter({SIDECAR: int(counts.ok[rows].sum())})
    counted[UNKNOWN] = len(rows) - counted[SIDECAR]
    return Lengths(counts.total[rows], counts.exact[rows], counted)


def given_lengths(counts: Counts, rows: int, measure: Measure) -> Lengths:
    """The length of each row by counts that the caller has; plain numbers are not taken for exact.

    Raises:
        ConfigError: they are not as many as there are rows.
    """
    source = GIVEN
    if isinstance(counts, CountColumns):
        lengths = counts.total
    elif isinstance(counts, LengthColumns):
        lengths, source = estimate_lengths(counts, measure.image_cfg, measure.video_cfg)[0], ESTIMATE
    else:
        lengths = np.asarray(counts)
    if lengths.shape != (rows,) or lengths.dtype.kind not in "iu":
        raise ConfigError(
            f"counts= is of shape {lengths.shape} and type {lengths.dtype}: expected one whole number for "
            f"each of the dataset's {rows} rows"
        )
    exact = counts.exact if isinstance(counts, CountColumns) else np.zeros(rows, np.bool_)
    return Lengths(lengths.astype(np.int64), exact, Counter({source: rows}))


def raw_samples(dataset: Any) -> Any:
    """What lies under the wrappers of a dataset, as long as they keep its rows and their order."""
    inner = None if isinstance(dataset, Subset | ConcatDataset) else _wrapped(dataset)
    return dataset if inner is None else raw_samples(inner)


def ranks_sharing(dataset: Any) -> int:
    """How many ranks the rows of a meta file were split across; 1 if each rank has all, or if unknown."""
    raw = raw_samples(dataset)
    mixture = getattr(getattr(raw, "key", None), "mixture", raw)  # of a loaded list
    sources = mixture.sources if isinstance(mixture, MetaDataset) else ()
    return max((source.selection.world.size for source in sources), default=1)


def key_of(dataset: Any, index: int) -> str:
    """The name of a row in the ledger: the dataset's own (``coco/812``), else its number."""
    if isinstance(dataset, Subset):
        return key_of(dataset.dataset, int(dataset.indices[index]))
    own = getattr(dataset, "key", None)
    if callable(own):
        return str(own(index))
    inner = _wrapped(dataset)
    return str(index) if inner is None else key_of(inner, index)


def ledger_of(dataset: Any) -> Ledger:
    """The dataset's own ledger, or that of what it wraps, or that of this process."""
    own = getattr(dataset, "ledger", None)
    if isinstance(own, Ledger):
        return own
    inner = dataset.dataset if isinstance(dataset, Subset) else _wrapped(dataset)
    return default_ledger() if inner is None else ledger_of(inner)


def _wrapped(dataset: Any) -> Any:
    """What a wrapper wraps, if its rows are the wrapper's, one for one."""
    inner = getattr(dataset, "dataset", None)
    if inner is None or not hasattr(inner, "__getitem__") or not hasattr(inner, "__len__"):
        return None
    return inner if len(inner) == len(dataset) else None


def processor_of(dataset: Any) -> Any:
    """The processor that a wrapper (:class:`PreTokenizedDatasetWrapper`) encodes with; None if there is none.

    None too for joined sets that are encoded with different ones.
    """
    if isinstance(dataset, ConcatDataset):
        found = {id(one): one for one in map(processor_of, dataset.datasets)}
        return next(iter(found.values())) if len(found) == 1 else None
    own = getattr(dataset, "processor", None)
    if own is not None:
        return own
    inner = dataset.dataset if isinstance(dataset, Subset) else _wrapped(dataset)
    return None if inner is None else processor_of(inner)


def _lengths_of_parts(dataset: ConcatDataset[Any], measure: Measure, rows: Ints) -> Lengths:
    lengths, exact = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.bool_)
    sources: Counter[str] = Counter()
    first = 0
    for part, end in zip(dataset.datasets, dataset.cumulative_sizes, strict=True):
        places = np.flatnonzero((rows >= first) & (rows < end))
        found = lengths_of(part, measure, rows[places] - first)
        lengths[places], exact[places] = found.tokens, found.exact
        sources += found.sources
        first = end
    return Lengths(lengths, exact, sources)


def _lengths_by_rows(dataset: Any, measure: Measure, rows: Ints) -> Lengths:
    lengths = np.zeros(len(rows), np.int64)
    sources: Counter[str] = Counter()
    report = Progress("estimating lengths", len(rows))
    for done, (place, example) in enumerate(examples_at(dataset, rows)):
        if done % 4096 == 0:
            report(done)
        if example is None:
            sources[UNKNOWN] += 1
            continue
        found = estimate(example, measure.image_cfg, measure.video_cfg)
        lengths[place] = found.text + found.media
        sources[FIELDS if found.from_fields else ESTIMATE] += 1
    return Lengths(lengths, np.zeros(len(rows), np.bool_), sources)
