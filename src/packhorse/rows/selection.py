"""Which rows of a file a rank takes: pure arithmetic on row numbers, the same on every rank.

First the sampling ratio makes a list of rows (a fixed draw below 1, whole copies and a draw above 1), then
the list is dealt ``[rank::size]``. Every rank gets the same number; what does not divide is told, not lost.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from typing import IO, Literal

import numpy as np
import numpy.typing as npt

from packhorse.errors import ConfigError
from packhorse.ledger import Ledger
from packhorse.types import Drop, World
from packhorse.utils.files import build_once, rebuild

logger = getLogger("packhorse.datasets")

RowNumbers = npt.NDArray[np.int64]
Remainder = Literal["drop", "keep"]

# Part of the format: every rank, and every run since, draws the same rows.
_SEED = 42
_KEEP_FROM = 100_000
_DIGEST_SIZE = 16


def _draw(total: int, size: int) -> RowNumbers:
    """``size`` of ``total`` rows, always the same. A large draw takes seconds, so it is kept in the cache."""
    if size < _KEEP_FROM:
        return np.array(random.Random(_SEED).sample(range(total), size), np.int64)

    def write(file: IO[bytes]) -> None:
        drawn = random.Random(_SEED).sample(range(total), size)
        kept = np.array(drawn, "<i8")
        file.write(kept.tobytes() + _digest_of_draw(kept, total))

    name = f"draws/{total}-{size}.draw"  # not .i8: those have no digest
    path = build_once(name, write)
    kept = _kept_draw(path, total, size)
    if kept is None:
        logger.warning("%s is damaged: drawing anew", path)
        kept = _kept_draw(rebuild(name, write, path.stat().st_ino), total, size)
    if kept is None:
        raise ConfigError(f"{path} is damaged as soon as it is made: is the disk in order?")
    return kept


def _kept_draw(path: Path, total: int, size: int) -> RowNumbers | None:
    """The draw in a file; None if it is not what was written. Reads it once: 20 ms per million rows."""
    if path.stat().st_size != 8 * size + _DIGEST_SIZE:
        return None
    kept: RowNumbers = np.memmap(path, "<i8", mode="r", shape=(size,))
    with open(path, "rb") as file:
        file.seek(8 * size)
        return kept if file.read() == _digest_of_draw(kept, total) else None


def _digest_of_draw(drawn: RowNumbers, total: int) -> bytes:
    """What is written after a draw of rows, so that any change is noticed."""
    digest = hashlib.blake2b(str(total).encode(), digest_size=_DIGEST_SIZE)
    digest.update(drawn.data)
    return digest.digest()


def row_key(dataset: str, row: int, copy: int = 0) -> str:
    """The name of a row in errors and ledgers: ``coco/812``; ``coco/812#1`` for its second copy."""
    return f"{dataset}/{row}#{copy}" if copy else f"{dataset}/{row}"


@dataclass(frozen=True)
class RowSelection:
    """The rows one rank takes from a file of ``total`` rows.

    Position ``p`` (from 0 to ``len``) is the ``p``-th row of this rank: ``row(p)`` is its number in the file,
    ``copy(p)`` says which repetition of that row it is. Memory is eight bytes per *drawn* row; whole copies
    cost nothing.

    Args:
        total: rows in the file.
        ratio: below 1: ``max(1, floor(total * ratio))`` rows drawn without repetition; above 1: each row
            ``floor(ratio)`` times and a draw for the fraction.
        world: which share of the list is ours.
        remainder: ``"drop"`` keeps all shards equal; ``"keep"`` gives the first ranks one row more.
    """

    total: int
    ratio: float = 1.0
    world: World = field(default_factory=World)
    remainder: Remainder = "drop"
    _drawn: RowNumbers = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ratio) and self.ratio >= 0):
            raise ConfigError(f"sample_ratio={self.ratio}: expected a number from 0 upwards")
        if self.remainder not in ("drop", "keep"):
            raise ConfigError(f"remainder={self.remainder!r}: expected 'drop' or 'keep'")
        object.__setattr__(self, "_drawn", _draw(self.total, self._draw_size()))

    def __getstate__(self) -> tuple[int, float, World, Remainder]:
        return self.total, self.ratio, self.world, self.remainder

    def __setstate__(self, state: tuple[int, float, World, Remainder]) -> None:
        # The draw is made (or found) again: it need not travel.
        for name, value in zip(("total", "ratio", "world", "remainder"), state, strict=True):
            object.__setattr__(self, name, value)
        self.__post_init__()

    def _draw_size(self) -> int:
        if self.ratio < 1:
            return min(self.total, max(1, math.floor(self.total * self.ratio)))
        return math.floor(self.total * self.ratio) - self._copied

    @property
    def _copied(self) -> int:
        """How many entries of the list come from whole copies of the file."""
        return self.total * int(self.ratio)

    @property
    def selected(self) -> int:
        """How many rows all ranks together choose from (repetitions counted)."""
        return self._copied + len(self._drawn)

    def __len__(self) -> int:
        share, rest = divmod(self.selected, self.world.size)
        return share + (self.remainder == "keep" and self.world.rank < rest)

    def row(self, position: int) -> int:
        """The number in the file of this rank's ``position``-th row."""
        return self._row_of_entry(self.world.rank + position * self.world.size)

    def copy(self, position: int) -> int:
        """Which repetition of its row this is: 0 unless the ratio is above 1."""
        return self._copy_of_entry(self.world.rank + position * self.world.size)

    def key(self, dataset: str, position: int) -> str:
        """The key of this rank's ``position``-th row; see :func:`row_key`."""
        return row_key(dataset, self.row(position), self.copy(position))

    def rows(self) -> RowNumbers:
        """The numbers of all this rank's rows, in order."""
        entries = self.world.rank + np.arange(len(self), dtype=np.int64) * self.world.size
        numbers = entries % max(1, self.total)
        after = entries >= self._copied
        numbers[after] = self._drawn[entries[after] - self._copied]
        return numbers

    def left_over(self) -> list[tuple[int, int]]:
        """(row, copy) of the entries that no rank gets because they do not divide by the world size."""
        if self.remainder == "keep":
            return []
        first = self.selected - self.selected % self.world.size
        return [(self._row_of_entry(e), self._copy_of_entry(e)) for e in range(first, self.selected)]

    def not_drawn(self) -> RowNumbers:
        """The rows that a ratio below 1 leaves out, in order."""
        if self._copied:
            return np.empty(0, np.int64)
        mask = np.ones(self.total, np.bool_)
        mask[self._drawn] = False
        return np.flatnonzero(mask)

    def record_losses(self, dataset: str, ledger: Ledger) -> None:
        """Name in the ledger what no rank gets. All ranks know the same, so rank 0 alone records it."""
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
