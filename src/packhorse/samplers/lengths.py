"""How long the rows of a dataset are: by the best source there is for each, without encoding anything.

A dataset may be wrapped (in ``RobustDatasetWrapper``, ``PreTokenizedDatasetWrapper``, torch's ``Subset`` and
``ConcatDataset``): the rows under the wrappers are looked at, so that no picture is decoded for its length.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset, Subset

from packhorse.datasets.count_columns import CountColumns
from packhorse.datasets.lengths import Ints, examples_at, recorded_counts
from packhorse.datasets.meta import MetaDataset
from packhorse.datasets.progress import Progress
from packhorse.errors import ConfigError
from packhorse.ledger import Ledger, default_ledger
from packhorse.tokens.columns import LengthColumns, estimate_lengths
from packhorse.tokens.estimate import Geometry, estimate

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
        sources[FIELDS if found.told else ESTIMATE] += 1
    return Lengths(lengths, np.zeros(len(rows), np.bool_), sources)
