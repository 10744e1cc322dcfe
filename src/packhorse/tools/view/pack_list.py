"""The list of packs: sorted, filtered and cut into pages; a tenth of a second for a million packs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import urlencode

import numpy as np
import numpy.typing as npt

from packhorse.tools.view.book import Book
from packhorse.types import MEDIA_KINDS, MediaMask

Integers = npt.NDArray[np.int64]

SORTS = ("number", "fill", "documents", "cost")
PAGE = 50

_LARGEST = 1e15


@dataclass(frozen=True, slots=True)
class PackQuery:
    """What is asked of the list.

    Attributes:
        sort: one of ``SORTS``.
        down: the largest first.
        dataset: only packs with rows of this dataset, by its name.
        media: only packs with this kind of media item; ``none`` for text alone.
        least: only packs at least so full, in percent; ``most`` likewise.
        error: only packs with a row that has a remark for this reason; ``any`` for any.
        page: from 1.
    """

    sort: str = "number"
    down: bool = False
    dataset: str = ""
    media: str = ""
    least: float = 0.0
    most: float = 100.0
    error: str = ""
    page: int = 1

    @classmethod
    def of(cls, wanted: Mapping[str, str]) -> PackQuery:
        """From the query of an address; what makes no sense there is as if it were not there."""
        sort = wanted.get("sort", "")
        return cls(
            sort if sort in SORTS else "number",
            wanted.get("down") == "1",
            wanted.get("dataset", ""),
            wanted.get("media", ""),
            number_in(wanted.get("least"), 0.0),
            number_in(wanted.get("most"), 100.0),
            wanted.get("error", ""),
            page_in(wanted),
        )

    def address(self, **changes: Any) -> str:
        """The query with some changes, as it stands in an address."""
        values = {**asdict(self), **changes}
        values["down"] = "1" if values["down"] else ""
        usual = asdict(PackQuery())
        return urlencode({name: _plain(v) for name, v in values.items() if v not in ("", usual[name])})


@dataclass(frozen=True, slots=True)
class PackLine:
    """One line of the list."""

    number: int
    tokens: int
    fill: float
    documents: int
    cost: float
    kinds: tuple[str, ...]
    datasets: tuple[str, ...]
    errors: tuple[str, ...]


class PackList:
    """The packs of a book."""

    def __init__(self, book: Book) -> None:
        self.book, self.plan = book, book.plan
        self.documents = np.diff(self.plan.offsets)
        costs = self.plan.costs
        mean = float(costs.mean()) if costs is not None and len(costs) else 1.0
        self.costs = np.ones(len(self.plan)) if costs is None else costs / mean
        self._with_dataset = lru_cache(maxsize=16)(self._packs_with_dataset)
        self._ordered = lru_cache(maxsize=8)(self._sorted)

    def find(self, query: PackQuery) -> tuple[list[PackLine], int]:
        """The lines of a page, and how many packs there are on all pages."""
        numbers = self._ordered(query.sort, query.down)
        keep = self._wanted(query)
        if keep is not None:
            numbers = numbers[keep[numbers]]
        first = (query.page - 1) * PAGE
        return [self.line(int(number)) for number in numbers[first : first + PAGE]], len(numbers)

    def line(self, number: int) -> PackLine:
        """A pack in one line."""
        rows = self.plan[number]
        mask = 0 if self.plan.media_masks is None else int(self.plan.media_masks[number])
        datasets = np.unique(self.book.datasets_of(rows)).tolist()
        marks = self.book.marks
        errors = {drop.reason for row in rows.tolist() if row in marks for drop in marks[row]}
        return PackLine(
            number,
            int(self.plan.tokens[number]),
            int(self.plan.tokens[number]) / self.plan.capacity,
            len(rows),
            float(self.costs[number]),
            MediaMask(mask).kinds,
            tuple(self.book.names[place] for place in datasets),
            tuple(sorted(errors)),
        )

    def _sorted(self, sort: str, down: bool) -> Integers:
        columns: dict[str, Any] = {
            "fill": self.plan.tokens,
            "documents": self.documents,
            "cost": self.costs,
        }
        if sort not in columns:
            order = np.arange(len(self.plan))
            return order[::-1] if down else order
        values = np.asarray(columns[sort])
        return np.argsort(-values if down else values, kind="stable")

    def _wanted(self, query: PackQuery) -> npt.NDArray[np.bool_] | None:
        """Which packs are asked for; None for all."""
        tests: list[npt.NDArray[np.bool_]] = []
        if query.least > 0 or query.most < 100:
            fill = self.plan.tokens * (100 / self.plan.capacity)
            tests.append((fill >= query.least) & (fill <= query.most))
        if query.dataset:
            tests.append(self._with_dataset(query.dataset))
        masks = self.plan.media_masks
        if query.media and masks is not None:
            wanted = int(MediaMask.of(kind for kind in MEDIA_KINDS if kind == query.media))
            tests.append(masks & wanted > 0 if wanted else masks == 0)
        if query.error:
            tests.append(self._with_error(query.error))
        return np.logical_and.reduce(tests) if tests else None

    def _packs_with_dataset(self, name: str) -> npt.NDArray[np.bool_]:
        if name not in self.book.names or not len(self.plan):
            return np.zeros(len(self.plan), bool)
        inside = self.book.datasets_of(self.plan.indices) == self.book.names.index(name)
        return np.asarray(np.logical_or.reduceat(inside, self.plan.offsets[:-1]), bool)

    def _with_error(self, reason: str) -> npt.NDArray[np.bool_]:
        found = np.zeros(len(self.plan), bool)
        for row, drops in list(self.book.marks.items()):
            pack = int(self.book.pack_of[row])
            if pack >= 0 and (reason == "any" or any(drop.reason == reason for drop in drops)):
                found[pack] = True
        return found


def number_in(text: str | None, usual: float) -> float:
    """A number of an address; the usual one where it is none, or none that anything here can have."""
    try:
        value = float(text) if text else usual
    except ValueError:
        return usual
    return value if abs(value) < _LARGEST else usual


def page_in(wanted: Mapping[str, str]) -> int:
    """The page that an address asks for, from 1."""
    return max(1, int(number_in(wanted.get("page"), 1)))


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value
