"""The rows of a file that each rank takes: pure arithmetic on row numbers, the same on every rank.

The sampling ratio makes a list of rows (a fixed draw below 1, whole copies and a draw above 1), of which a
rank takes ``[rank::size]``. Every rank gets the same number; rows that do not divide are recorded.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from packhorse.errors import ConfigError
from packhorse.ledger import Ledger
from packhorse.types import Drop, World
from packhorse.utils.files import build_once, rebuild

logger = getLogger("packhorse.datasets")

RowNumbers = npt.NDArray[np.int64]
Remainder = Literal["drop", "keep"]

# Part of the format: all ranks and all runs draw the same rows.
_SEED = 42
_CACHED_FROM = 100_000
_DIGEST_SIZE = 16


def _draw(total: int, size: int) -> RowNumbers:
    """Draw ``size`` of ``total`` rows, always the same. A large draw takes seconds, so it is cached."""
    if size < _CACHED_FROM:
        return np.array(random.Random(_SEED).sample(range(total), size), np.int64)

    def write(file: IO[bytes]) -> None:
        rows = np.array(random.Random(_SEED).sample(range(total), size), "<i8")
        file.write(rows.tobytes() + _draw_digest(rows, total))

    name = f"draws/{total}-{size}.draw"  # not .i8: those have no digest
    path = build_once(name, write)
    rows = _load_draw(path, total, size)
    if rows is None:
        logger.warning("%s is damaged: drawing the rows again", path)
        rows = _load_draw(rebuild(name, write, path.stat().st_ino), total, size)
    if rows is None:
        raise ConfigError(f"{path} is damaged right after it was written: check the disk", path=path)
    return rows


def _load_draw(path: Path, total: int, size: int) -> RowNumbers | None:
    """Return the draw in a file; None if it is damaged. Reads it once: 20 ms per million rows."""
    if path.stat().st_size != 8 * size + _DIGEST_SIZE:
        return None
    rows: RowNumbers = np.memmap(path, "<i8", mode="r", shape=(size,))
    with open(path, "rb") as file:
        file.seek(8 * size)
        return rows if file.read() == _draw_digest(rows, total) else None


def _draw_digest(drawn: RowNumbers, total: int) -> bytes:
    """Return the digest that follows a draw in its file."""
    digest = hashlib.blake2b(str(total).encode(), digest_size=_DIGEST_SIZE)
    digest.update(drawn.data)
    return digest.digest()


def row_key(dataset: str, row: int, copy: int = 0) -> str:
    """Return the key of a row in errors and ledgers: ``coco/812``; ``coco/812#1`` for its second copy."""
    return f"{dataset}/{row}#{copy}" if copy else f"{dataset}/{row}"


@dataclass(frozen=True)
class RowSelection:
    """The rows that one rank takes from a file of ``total`` rows.

    ``row(p)`` is the number in the file of this rank's ``p``-th row, ``copy(p)`` its repetition. Memory is
    eight bytes per *drawn* row; whole copies cost nothing.

    Args:
        total: rows in the file.
        ratio: below 1: ``max(1, floor(total * ratio))`` rows drawn without repetition; above 1: each row
            ``floor(ratio)`` times and a draw for the fraction.
        world: this rank and the number of ranks.
        remainder: ``"drop"`` keeps all shards equal; ``"keep"`` gives the first ranks one row more.
    """

    total: int
    ratio: float = 1.0
    world: World = field(default_factory=World)
    remainder: Remainder = "drop"
    _drawn: RowNumbers = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ratio) and self.ratio >= 0):
            raise ConfigError.of("sample_ratio", self.ratio, "expected a number from 0 upwards")
        if self.remainder not in ("drop", "keep"):
            raise ConfigError.of("remainder", self.remainder, "expected 'drop' or 'keep'")
        size = math.floor(self.total * self.ratio)
        size = min(self.total, max(1, size)) if self.ratio < 1 else size - self._copied
        object.__setattr__(self, "_drawn", _draw(self.total, size))

    def __reduce__(self) -> tuple[Any, ...]:
        # The draw is repeated, or loaded from the cache: it is not pickled.
        return RowSelection, (self.total, self.ratio, self.world, self.remainder)

    @property
    def _copied(self) -> int:
        """Number of entries from whole copies of the file."""
        return self.total * int(self.ratio)

    @property
    def selected(self) -> int:
        """Number of rows of all ranks together, with repetitions and before the remainder is dropped."""
        return self._copied + len(self._drawn)

    def __len__(self) -> int:
        share, rest = divmod(self.selected, self.world.size)
        return share + (self.remainder == "keep" and self.world.rank < rest)

    def row(self, position: int) -> int:
        """Return the number in the file of this rank's ``position``-th row."""
        return self._row_of_entry(self.world.rank + position * self.world.size)

    def copy(self, position: int) -> int:
        """Return which repetition of its row this is: 0 unless the ratio is above 1."""
        return self._copy_of_entry(self.world.rank + position * self.world.size)

    def key(self, dataset: str, position: int) -> str:
        """The key of this rank's ``position``-th row; see :func:`row_key`."""
        return row_key(dataset, self.row(position), self.copy(position))

    def rows(self) -> RowNumbers:
        """Return the numbers of all rows of this rank, in order."""
        entries = self.world.rank + np.arange(len(self), dtype=np.int64) * self.world.size
        numbers = entries % max(1, self.total)
        after = entries >= self._copied
        numbers[after] = self._drawn[entries[after] - self._copied]
        return numbers

    def left_over(self) -> list[tuple[int, int]]:
        """Return (row, copy) of entries that no rank gets because they do not divide by the world size."""
        if self.remainder == "keep":
            return []
        first = self.selected - self.selected % self.world.size
        return [(self._row_of_entry(e), self._copy_of_entry(e)) for e in range(first, self.selected)]

    def not_drawn(self) -> RowNumbers:
        """Return the rows that a ratio below 1 does not draw, in order."""
        if self._copied:
            return np.empty(0, np.int64)
        mask = np.ones(self.total, np.bool_)
        mask[self._drawn] = False
        return np.flatnonzero(mask)

    def record_losses(self, dataset: str, ledger: Ledger) -> None:
        """Record rows that no rank gets. They are the same on all ranks; only rank 0 records them."""
        if self.world.rank:
            return
        not_drawn = f"sample_ratio={self.ratio} did not draw it"
        ledger.record_rows(dataset, self.not_drawn(), stage="select", reason="not_sampled", detail=not_drawn)
        left = (
            f"{self.selected} rows do not divide by world_size={self.world.size}; remainder='keep' keeps them"
        )
        for row, copy in self.left_over():
            ledger.record(Drop(row_key(dataset, row, copy), "select", "left_over", left, dataset=dataset))

    def _row_of_entry(self, entry: int) -> int:
        return entry % self.total if entry < self._copied else int(self._drawn[entry - self._copied])

    def _copy_of_entry(self, entry: int) -> int:
        return entry // self.total if entry < self._copied else int(self.ratio)
