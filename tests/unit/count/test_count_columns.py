"""The columns of counts in memory."""

import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from packhorse.count.columns import COUNTS, OK, CountColumns, count_schema

_ROWS = 20_000


def columns(rows: int = _ROWS) -> CountColumns:
    numbers = np.arange(rows, dtype=np.int32)
    plain = dict.fromkeys((*COUNTS, "off_by", "rejected"), numbers)
    values = {
        **{name: pa.array(column) for name, column in plain.items()},
        "status": pa.array([OK] * rows),
        "detail": pa.array([""] * rows),
        "exact": pa.array([True] * rows),
        "weight": pa.array(numbers * 0.5),
        "media": pa.array([[]] * rows, count_schema().field("media").type),
    }
    return CountColumns.of(pa.table([values[field.name] for field in count_schema()], count_schema()))


def test_taking_all_rows_as_they_stand_and_joining_one_part_copies_nothing() -> None:
    counts = columns()
    everything = np.arange(_ROWS)
    tracemalloc.start()
    try:
        taken = CountColumns.concat([counts.take(everything)])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * _ROWS  # a copy is about a hundred bytes a row
    assert taken.text is counts.text


@pytest.mark.parametrize(
    "positions",
    [[0, 2, 1, 3], [3, 2, 1, 0], [0, 1, 2], [0, 1, 2, 3, 3], [0, 0, 0, 0], []],
    ids=["swapped", "backwards", "fewer", "more", "one row four times", "none"],
)
def test_any_other_choice_of_rows_is_given_in_its_own_order(positions: list[int]) -> None:
    counts = columns(4)
    taken = counts.take(positions)
    assert taken.text.tolist() == positions
    assert taken.weight.tolist() == [position / 2 for position in positions]
    assert len(taken.status) == len(taken.detail) == len(taken.ok) == len(positions)
    assert counts.text.tolist() == [0, 1, 2, 3]


def test_parts_are_joined_one_after_the_other() -> None:
    joined = CountColumns.concat([columns(2), columns(3), columns(0)])
    assert joined.text.tolist() == [0, 1, 0, 1, 2]
    assert joined.weighted
    assert len(CountColumns.concat([])) == 0
