"""What the lengths of a dataset's rows are found from: count files where there are any, else the rows.

Samplers and the planner of packs both begin here. Nothing is encoded and no medium is opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from logging import getLogger
from typing import Any

import numpy as np
import numpy.typing as npt

from packhorse.datasets.count_columns import CountColumns
from packhorse.datasets.count_part import as_processor
from packhorse.datasets.meta import MetaDataset, RowKeys
from packhorse.datasets.sidecar import counts_of, is_counted
from packhorse.datasets.summary import MetaExamples
from packhorse.errors import DATA_ERRORS, BadSample, is_data_error

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
