"""A large draw of rows is made once and cached; a damaged one is repeated."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from packhorse.rows.selection import RowSelection

TOTAL = 250_000


def other_row(data: bytes) -> np.int64:
    """A row of the file that was not drawn."""
    drawn = np.frombuffer(data[: TOTAL // 2 * 8], "<i8")
    return np.setdiff1d(np.arange(TOTAL), drawn)[0]  # type: ignore[no-any-return]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda data: data[:-8],
    "outside of the file": lambda data: np.int64(TOTAL).tobytes() + data[8:],
    "below 0": lambda data: np.int64(-1).tobytes() + data[8:],
    "another row": lambda data: other_row(data).tobytes() + data[8:],
    "another digest": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "a row twice": lambda data: data[8:16] + data[8:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_draw_is_repeated_and_is_the_same(damage: str, cache: Path) -> None:
    rows = np.array(RowSelection(TOTAL, 0.5).rows())
    assert len(np.unique(rows)) == TOTAL // 2
    (kept,) = (cache / "draws").iterdir()
    good = kept.read_bytes()
    kept.unlink()
    kept.write_bytes(DAMAGE[damage](good))
    assert np.array_equal(RowSelection(TOTAL, 0.5).rows(), rows)
    assert kept.read_bytes() == good
