"""Duplicates by digest: who is the same as whom, over all datasets.

Digests are kept, not texts or images: 16 bytes for each row and 44 for each image. Finding the groups costs
a sort and two numbers more for each, about two seconds for five million.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packhorse.rows.selection import row_key
from packhorse.tools.check.check_part import IMAGE

Integers = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]
"""Digests as lines of two numbers each."""


@dataclass(frozen=True, slots=True)
class Duplicates:
    """What is the same as something before it, for one dataset; arrays of one entry for each.

    Attributes:
        rows: conversations that are duplicates, ascending.
        row_twins: for each of them the first row with the same one, as (dataset, row).
        images: (row, which of its media) of images that are duplicates, by row.
        image_twins: for each of them the first one, as (dataset, row, which of its media).
        names: of all datasets.
    """

    rows: Integers
    row_twins: Integers
    images: Integers
    image_twins: Integers
    names: tuple[str, ...]

    def findings(self) -> Iterator[tuple[int, str, str]]:
        """(row, rule, what was found), in the order of the rows."""
        both = [*self._of_rows(), *self._of_images()]
        yield from sorted(both, key=lambda one: one[0])

    def _of_rows(self) -> Iterator[tuple[int, str, str]]:
        for row, (dataset, twin) in zip(self.rows.tolist(), self.row_twins.tolist(), strict=True):
            yield row, "duplicate_conversation", f"the same as {row_key(self.names[dataset], twin)}"

    def _of_images(self) -> Iterator[tuple[int, str, str]]:
        for (row, place), (dataset, twin, other) in zip(
            self.images.tolist(), self.image_twins.tolist(), strict=True
        ):
            key = row_key(self.names[dataset], twin)
            yield row, "duplicate_image", f"media item {place} is, byte for byte, media item {other} of {key}"


class DigestStore:
    """Digests of the rows and images of datasets, put in as parts of files get ready.

    Args:
        names: of the datasets.
        rows: how many rows each has.
    """

    def __init__(self, names: Sequence[str], rows: Sequence[int]) -> None:
        self.names = tuple(names)
        self._starts = np.cumsum([0, *rows])
        self._rows: Digests = np.zeros((int(self._starts[-1]), 2), np.uint64)
        self._images: dict[tuple[int, int], bytes] = {}

    def put(self, dataset: int, first: int, conversations: bytes, images: bytes) -> None:
        """The digests of a part: of its rows, from ``first`` on, and of its images (see :data:`IMAGE`)."""
        digests = np.frombuffer(conversations, np.uint64).reshape(-1, 2)
        start = int(self._starts[dataset]) + first
        self._rows[start : start + len(digests)] = digests
        if images:
            self._images[dataset, first] = images

    def duplicates(self) -> dict[str, Duplicates]:
        """The duplicates of each dataset by its name; the first in the order of names and rows is none."""
        rows, images = self._duplicate_rows(), self._duplicate_images()
        return {name: Duplicates(*rows[n], *images[n], self.names) for n, name in enumerate(self.names)}

    def _duplicate_rows(self) -> Mapping[int, tuple[Integers, Integers]]:
        places, firsts = twins(self._rows)
        told = self._rows[places].any(axis=1)  # zeros stand for rows without a digest
        places, firsts = places[told], firsts[told]
        owner, first_owner = self._owner(places), self._owner(firsts)
        found = {}
        for number in range(len(self.names)):
            own = owner == number
            of_twin = first_owner[own]
            twin_rows = firsts[own] - self._starts[of_twin]
            found[number] = places[own] - self._starts[number], np.stack([of_twin, twin_rows], axis=1)
        return found

    def _owner(self, places: Integers) -> Integers:
        return np.searchsorted(self._starts[1:], places, side="right")

    def _duplicate_images(self) -> Mapping[int, tuple[Integers, Integers]]:
        order = sorted(self._images)
        parts = [np.frombuffer(self._images[part], IMAGE) for part in order]
        every = np.concatenate([np.empty(0, IMAGE), *parts])
        owner = np.repeat([dataset for dataset, _ in order], [len(part) for part in parts]).astype(np.int64)
        content, name = _numbers(every["content"]), _numbers(every["name"])
        places, firsts = twins(content)
        # An image that several rows of a dataset name by the same name is used again, and no copy: only the
        # first mention of each name in each dataset is looked at.
        named = np.concatenate([content, name, owner[:, None].astype(np.uint64)], axis=1)
        mentioned_before, _ = twins(named)
        copies = ~np.isin(places, mentioned_before)
        places, firsts = places[copies], firsts[copies]
        of_twin = np.stack([owner[firsts], every["row"][firsts], every["place"][firsts]], axis=1)
        found = {}
        for number in range(len(self.names)):
            own = owner[places] == number
            at = places[own]
            found[number] = np.stack([every["row"][at], every["place"][at]], axis=1), of_twin[own]
        return found


def twins(lines: npt.NDArray[np.uint64]) -> tuple[Integers, Integers]:
    """(places of lines of a table that are equal to one before them, ascending; place of the first equal)."""
    key = lines[:, 0]
    ordered = np.sort(key)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(repeated):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    near = np.minimum(np.searchsorted(repeated, key), len(repeated) - 1)
    candidates = np.flatnonzero(repeated[near] == key)  # few: only these are compared in full
    chosen = lines[candidates]
    order = np.lexsort(chosen.T)  # stable: of equal lines the first stays first
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (chosen[order][1:] != chosen[order][:-1]).any(axis=1)
    first_of_group = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
    places, firsts = candidates[order][~begins], candidates[order][first_of_group][~begins]
    ascending = np.argsort(places)
    return places[ascending], firsts[ascending]


def _numbers(digests: npt.NDArray[np.void]) -> Digests:
    return np.frombuffer(np.ascontiguousarray(digests).tobytes(), np.uint64).reshape(-1, 2)
