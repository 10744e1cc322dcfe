"""Rows by their names: ``coco/812`` goes in, the position in the mixture comes out, and back."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from packhorse.datasets.meta import MetaDataset, Source

Integers = npt.NDArray[np.int64]

_MOST_DIGITS = 18


class RowFinder:
    """Finds rows of a mixture; sorts the rows of a data set when it is first asked for one of them."""

    def __init__(self, dataset: MetaDataset) -> None:
        self._sources = {source.config.name: source for source in dataset.sources}
        lengths = [len(source) for source in dataset.sources]
        self._first = dict(zip(self._sources, np.cumsum([0, *lengths]).tolist(), strict=False))
        self._ends = np.cumsum(lengths)
        self._order = lru_cache(maxsize=None)(self._sorted_rows)

    def place(self, index: int) -> tuple[Source, int]:
        """The data set of a position, and the row's number in its file."""
        name = list(self._sources)[int(np.searchsorted(self._ends, index, side="right"))]
        source = self._sources[name]
        return source, source.selection.row(index - self._first[name])

    def find(self, key: str) -> int | None:
        """The position of ``name/row`` or ``name/row#copy``; None if there is none."""
        name, _, rest = key.rpartition("/")
        number, _, copy = rest.partition("#")
        if name not in self._sources or not _is_number(number) or not _is_number(copy or "0"):
            return None
        rows, order = self._order(name)
        first = int(np.searchsorted(rows, int(number)))
        source, start = self._sources[name], int(self._first[name])
        while first < len(rows) and int(rows[first]) == int(number):
            position = int(order[first])
            if source.selection.copy(position) == int(copy or 0):
                return start + position
            first += 1
        return None

    def _sorted_rows(self, name: str) -> tuple[Integers, Integers]:
        rows = np.asarray(self._sources[name].selection.rows(), np.int64)
        order = np.argsort(rows, kind="stable")
        return rows[order], order


def _is_number(text: str) -> bool:
    """Whether a text can be the number of a row; Python refuses to read one of thousands of digits."""
    return text.isdecimal() and len(text) <= _MOST_DIGITS
