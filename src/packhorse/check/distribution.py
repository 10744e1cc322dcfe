"""How a whole number is spread over many rows: its percentiles and its histogram, from counts by value.

What is kept is how often each value comes, so memory grows with the largest value and not with the rows, and
every percentile is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

PERCENTILES = (50, 90, 99)
_MOST = (1 << 24) - 1  # a row may claim any number of tokens; memory grows with the largest
Integers = npt.NDArray[np.int64]


class Distribution:
    """Values from 0 upwards and how often each comes.

    >>> spread = Distribution.of([3, 1, 2, 2])
    >>> spread.percentile(50), spread.max, spread.mean
    (2, 3, 2.0)
    """

    def __init__(self, counts: npt.ArrayLike = ()) -> None:
        self.counts: Integers = np.asarray(counts, np.int64).reshape(-1)

    @classmethod
    def of(cls, values: npt.ArrayLike) -> Distribution:
        """Of whole numbers; what is below 0 or above 16 million counts as that."""
        array = np.clip(np.asarray(values, np.int64).reshape(-1), 0, _MOST)
        return cls(np.bincount(array))

    @classmethod
    def joined(cls, parts: Iterable[Distribution]) -> Distribution:
        """Of all values together."""
        total = cls()
        for part in parts:
            total = total + part
        return total

    def __add__(self, other: Distribution) -> Distribution:
        longer, shorter = sorted((self.counts, other.counts), key=len, reverse=True)
        sums = longer.copy()
        sums[: len(shorter)] += shorter
        return Distribution(sums)

    @property
    def n(self) -> int:
        """How many values there are."""
        return int(self.counts.sum())

    @property
    def sum(self) -> int:
        """Of all values."""
        return int((self.counts * np.arange(len(self.counts))).sum())

    @property
    def mean(self) -> float:
        """0 where there is no value."""
        return self.sum / self.n if self.n else 0.0

    @property
    def max(self) -> int:
        """0 where there is no value."""
        used = np.flatnonzero(self.counts)
        return int(used[-1]) if len(used) else 0

    @property
    def min(self) -> int:
        """0 where there is no value."""
        used = np.flatnonzero(self.counts)
        return int(used[0]) if len(used) else 0

    def percentile(self, percent: float) -> int:
        """The smallest value that at least so many percent of all do not exceed."""
        if not self.n:
            return 0
        rank = max(1, math.ceil(self.n * percent / 100))
        return int(np.searchsorted(np.cumsum(self.counts), rank))

    def between(self, low: int, high: int) -> int:
        """How many values are from ``low`` up to but not including ``high``."""
        return int(self.counts[low:high].sum())

    def doubling_edges(self) -> list[int]:
        """Edges for a histogram in which each bin is twice as wide as the one before; all values inside.

        Zeros have a bin of their own, and what lies empty between them and the next value is one bin.
        """
        used = np.flatnonzero(self.counts)
        positive = used[used > 0]
        first = 1 << (int(positive[0]).bit_length() - 1) if len(positive) else 1
        edges = [first]
        while edges[-1] <= self.max:
            edges.append(edges[-1] * 2)
        has_zeros = len(used) > 0 and used[0] == 0
        return [0, *([1] if first > 1 else []), *edges] if has_zeros or not len(positive) else edges

    def histogram(self, edges: Sequence[int]) -> list[int]:
        """How many values each bin has: from one edge up to but not including the next."""
        return [self.between(low, high) for low, high in pairwise(edges)]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the numbers, and a histogram in bins that double."""
        edges = self.doubling_edges()
        return {
            "n": self.n,
            "sum": self.sum,
            "mean": round(self.mean, 3),
            "min": self.min,
            **{f"p{percent}": self.percentile(percent) for percent in PERCENTILES},
            "max": self.max,
            "histogram": {"edges": edges, "counts": self.histogram(edges)},
        }
