"""The Arrow copies of Parquet files: whatever becomes of one, rows are right, and no process dies of it."""

import logging
import multiprocessing
import random
import resource
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packhorse.datasets.arrow import ParquetRows, _validate
from packhorse.datasets.count_part import part_digest
from packhorse.datasets.rows import open_rows
from packhorse.errors import BadSample

ROWS: list[dict[str, Any]] = [
    {
        "id": n,
        "messages": [
            {"role": "user", "content": f"say {n}"},
            {"role": "assistant", "content": "ü" * (n % 5)},
        ],
        "images": [{"bytes": bytes([n % 256]) * 9, "path": None}] * (n % 3),
    }
    for n in range(600)
]


@pytest.fixture
def path(tmp_path: Path, cache: Path) -> str:
    """A Parquet file whose copy is in the cache."""
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=100)
    assert list(open_rows(str(tmp_path / "rows.parquet"))) == ROWS
    return str(tmp_path / "rows.parquet")


def copy_in(cache: Path) -> Path:
    (copy,) = (cache / "arrow").glob("*.arrow")
    return copy


def replace(path: Path, data: bytes) -> None:
    """Another file under the name: one that is mapped stays as it was for who has it open."""
    path.unlink()
    path.write_bytes(data)


def place_of_offsets(data: bytes) -> int:
    """Where in a copy it says which messages are those of row 300."""
    whole = pa.py_buffer(data)
    column = pa.ipc.open_file(whole).get_batch(1).column("messages")
    return int(column.buffers()[1].address - whole.address) + 4 * (300 - 256)


def outside(data: bytes) -> bytes:
    """The copy with messages that are far outside of it."""
    at = place_of_offsets(data)
    return data[:at] + (1 << 30).to_bytes(4, "little") + data[at + 4 :]


def with_other_name(data: bytes) -> bytes:
    """The copy with a column of another name."""
    return data.replace(b"messages", b"massages")


DAMAGE = {
    "cut off": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "no Arrow file": lambda data: b"x" * len(data),
    "offsets": outside,
    "columns": with_other_name,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_copy_is_made_anew_when_it_is_opened_or_read(
    damage: str, path: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = copy_in(cache)
    good = copy.read_bytes()
    replace(copy, DAMAGE[damage](good))
    with caplog.at_level(logging.WARNING):
        assert list(open_rows(path)) == ROWS
    assert copy.read_bytes() == good
    assert caplog.text.count("is damaged") == 1
    assert str(copy) in caplog.text


def test_a_copy_that_is_damaged_while_it_is_open_is_made_anew(path: str, cache: Path) -> None:
    rows = open_rows(path)
    assert rows[0] == ROWS[0]
    copy = copy_in(cache)
    good = copy.read_bytes()
    with open(copy, "r+b") as file:
        file.write(outside(good))
    assert rows[300] == ROWS[300]
    assert copy.read_bytes() == good
    with open(copy, "r+b") as file:
        file.write(outside(good))
    assert isinstance(again := open_rows(path), ParquetRows)
    assert again.table([599, 300, 1]).to_pylist() == [ROWS[599], ROWS[300], ROWS[1]]


def test_no_damage_kills_the_process_or_changes_the_number_of_rows(path: str, cache: Path) -> None:
    copy = copy_in(cache)
    good = copy.read_bytes()
    for seed in range(60):
        numbers = random.Random(seed)
        at = numbers.randrange(len(good) // 4 - 2) * 4
        value = numbers.choice((b"\xff\xff\xff\x7f", b"\0\0\0\0", b"\0\0\0\x80"))
        replace(copy, good[:at] + value + good[at + 4 :])
        rows = open_rows(path)
        assert len(list(rows.read(range(len(rows))))) == len(ROWS), f"byte {at}"


def _ids(path: str) -> list[int]:
    return [row["id"] for row in open_rows(path)]


def test_processes_that_find_the_same_damage_all_read_the_right_rows(path: str, cache: Path) -> None:
    replace(copy_in(cache), outside(copy_in(cache).read_bytes()))
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert pool.map(_ids, [path] * 3) == [list(range(600))] * 3


def test_a_text_that_is_no_utf8_costs_its_row_and_no_other(tmp_path: Path, cache: Path) -> None:
    texts = pa.array([b"good", b"\xff\xfe", b"good"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": texts}), tmp_path / "rows.parquet")
    rows = open_rows(str(tmp_path / "rows.parquet"))
    first, bad, last = rows.read(range(3))
    assert (first, last) == ({"text": "good"}, {"text": "good"})
    assert isinstance(bad, BadSample)
    assert bad.reason == "malformed_row"
    assert f"{tmp_path / 'rows.parquet'}, row 1: not UTF-8" in str(bad)
    assert part_digest(rows, 0, 3) != part_digest(rows, 0, 1)


def test_a_disk_that_is_full_is_not_called_a_parquet_file_that_cannot_be_read(
    tmp_path: Path, cache: Path
) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*cache/arrow/.*\.arrow'"):
            open_rows(str(tmp_path / "rows.parquet"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(open_rows(str(tmp_path / "rows.parquet"))) == ROWS


def test_a_field_without_values_that_is_too_short_is_damage_beside_a_text_that_is_not_utf8() -> None:
    texts = pa.Array.from_buffers(pa.string(), 5, [None, *pa.array([b"\xff"] * 5).buffers()[1:]])
    batch = pa.RecordBatch.from_arrays([pa.StructArray.from_arrays([texts, pa.nulls(5)], ["a", "b"])], ["c"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    whole = sink.getvalue().to_pybytes()
    lengths, shorter = (struct.pack("<6q", 5, 0, 5, 0, *last) for last in ((5, 5), (0, 0)))
    assert whole.count(lengths) == 1
    good, damaged = (
        pa.ipc.open_stream(data).read_next_batch().column(0)
        for data in (whole, whole.replace(lengths, shorter))
    )
    _validate(good)
    with pytest.raises(pa.ArrowInvalid):
        _validate(damaged)
