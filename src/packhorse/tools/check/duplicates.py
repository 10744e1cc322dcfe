"""Find duplicate conversations and images by their digests, over all datasets.

Memory is 16 bytes per row and 44 per image. Finding the groups takes a sort: seconds for five million.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packhorse.rows.selection import row_key
from packhorse.tools.check.check_part import IMAGE
from packhorse.types import Integers

Digests = npt.NDArray[np.uint64]
"""One digest per line, as two numbers."""


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Rows and images of one dataset that equal an earlier one; arrays with one entry for each."""

    rows: Integers  # duplicate conversations, ascending
    row_twins: Integers  # for each the first row with the same conversation, as (dataset, row)
    images: Integers  # duplicate images as (row, index of the media item), by row
    image_twins: Integers  # for each the first one, as (dataset, row, index of the media item)
    names: tuple[str, ...]  # of all datasets

    def counts(self) -> dict[str, int]:
        """Return the number of findings by rule."""
        return {"duplicate_conversation": len(self.rows), "duplicate_image": len(self.images)}

    def findings(self) -> Iterator[tuple[int, str, str]]:
        """Yield (row, rule, what was found), in the order of the rows."""
        findings = []
        for row, (dataset, twin) in zip(self.rows.tolist(), self.row_twins.tolist(), strict=True):
            found = f"the same as {row_key(self.names[dataset], twin)}"
            findings.append((row, "duplicate_conversation", found))
        images = zip(self.images.tolist(), self.image_twins.tolist(), strict=True)
        for (row, item), (dataset, twin, other) in images:
            key = row_key(self.names[dataset], twin)
            found = f"media item {item} is, byte for byte, media item {other} of {key}"
            findings.append((row, "duplicate_image", found))
        yield from sorted(findings, key=lambda finding: finding[0])


class DigestStore:
    """Digests of the rows and images of datasets, added part by part."""

    def __init__(self, names: Sequence[str], rows: Sequence[int]) -> None:
        self.names = tuple(names)
        self._starts = np.cumsum([0, *rows])
        self._rows: Digests = np.zeros((int(self._starts[-1]), 2), np.uint64)
        self._images: dict[tuple[int, int], bytes] = {}

    def put(self, dataset: int, first: int, conversations: bytes, images: bytes) -> None:
        """Add the digests of a part: of its rows, from ``first`` on, and of its images (:data:`IMAGE`)."""
        digests = np.frombuffer(conversations, np.uint64).reshape(-1, 2)
        start = int(self._starts[dataset]) + first
        self._rows[start : start + len(digests)] = digests
        if images:
            self._images[dataset, first] = images

    def duplicates(self) -> dict[str, Duplicates]:
        """Return the duplicates of each dataset by name; the first by order of names and rows is none."""
        rows, images = self._duplicate_rows(), self._duplicate_images()
        return {name: Duplicates(*rows[n], *images[n], self.names) for n, name in enumerate(self.names)}

    def _duplicate_rows(self) -> list[tuple[Integers, Integers]]:
        indices, firsts = find_duplicates(self._rows)
        has_digest = self._rows[indices].any(axis=1)  # rows with errors have zeros
        indices, firsts = indices[has_digest], firsts[has_digest]
        owner, first_owner = (np.searchsorted(self._starts[1:], i, side="right") for i in (indices, firsts))
        twins = np.stack([first_owner, firsts - self._starts[first_owner]], axis=1)
        rows = indices - self._starts[owner]
        return [(rows[owner == number], twins[owner == number]) for number in range(len(self.names))]

    def _duplicate_images(self) -> list[tuple[Integers, Integers]]:
        order = sorted(self._images)
        parts = [np.frombuffer(self._images[part], IMAGE) for part in order]
        images = np.concatenate([np.empty(0, IMAGE), *parts])
        owner = np.repeat([dataset for dataset, _ in order], [len(part) for part in parts]).astype(np.int64)
        content, name = _as_numbers(images["content"]), _as_numbers(images["name"])
        indices, firsts = find_duplicates(content)
        # An image that several rows of a dataset mention by the same name is reused, not copied: only the
        # first mention of each name in each dataset counts.
        mentions = np.concatenate([content, name, owner[:, None].astype(np.uint64)], axis=1)
        copies = ~np.isin(indices, find_duplicates(mentions)[0])
        indices, firsts = indices[copies], firsts[copies]
        items = np.stack([images["row"], images["item"]], axis=1)
        twins = np.concatenate([owner[firsts, None], items[firsts]], axis=1)
        own = [owner[indices] == number for number in range(len(self.names))]
        return [(items[indices[mask]], twins[mask]) for mask in own]


def find_duplicates(lines: npt.NDArray[np.uint64]) -> tuple[Integers, Integers]:
    """Return the indices of lines that equal an earlier one, ascending, and that of the first equal one."""
    order = np.lexsort(lines.T)  # stable: of equal lines the first stays first
    repeats = np.zeros(len(order), np.bool_)
    repeats[1:] = np.logical_and.reduce([column[order][1:] == column[order][:-1] for column in lines.T])
    first_of_group = np.maximum.accumulate(np.where(repeats, 0, np.arange(len(order))))
    indices, firsts = order[repeats], order[first_of_group[repeats]]
    ascending = np.argsort(indices)
    return indices[ascending], firsts[ascending]


def _as_numbers(digests: npt.NDArray[np.void]) -> Digests:
    return np.frombuffer(np.ascontiguousarray(digests).tobytes(), np.uint64).reshape(-1, 2)
