"""The Arrow copies of Parquet files: damage to their structure is noticed, and no process dies of it.

A changed letter in a copy is not noticed, nor is a changed number: such a copy is valid, and its rows are
read as they are in it.
"""

import logging
import multiprocessing
import random
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packhorse.count.parts import part_digest
from packhorse.errors import BadSample
from packhorse.rows import parquet as arrow
from packhorse.rows.parquet import ParquetRows, _check, _validate
from packhorse.rows.row_files import open_rows
from raising import raises_config

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
    (copy,) = (cache / "arrow-2").glob("*.arrow")
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
def test_a_damaged_copy_is_rebuilt_when_it_is_opened_or_read(
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


def test_a_copy_that_is_damaged_while_it_is_open_is_rebuilt(path: str, cache: Path) -> None:
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


TEXTS = pa.array([b"good", b"\xff\xfe", b"good" * 9], pa.binary()).view(pa.string())
ENDS = pa.array(range(4), pa.int32())
NESTED: dict[str, pa.Array] = {
    "large": TEXTS.view(pa.binary()).cast(pa.large_binary()).view(pa.large_string()),
    "dictionary": pa.DictionaryArray.from_arrays(pa.array(range(3), pa.int32()), TEXTS),
    "list": pa.ListArray.from_arrays(ENDS, TEXTS),
    "fixed-size list": pa.FixedSizeListArray.from_arrays(TEXTS, 1),
    "struct": pa.StructArray.from_arrays([TEXTS, pa.nulls(3)], ["text", "nothing"]),
    "keys of a map": pa.MapArray.from_arrays(ENDS, TEXTS, pa.array([1, 2, 3])),
    "values of a map": pa.MapArray.from_arrays(ENDS, pa.array(["a", "b", "c"]), TEXTS),
}
NESTED["list of structs"] = pa.ListArray.from_arrays(ENDS, NESTED["struct"])
NESTED["list of maps"] = pa.ListArray.from_arrays(ENDS, NESTED["values of a map"])
NESTED["list of dictionaries"] = pa.ListArray.from_arrays(ENDS, NESTED["dictionary"])
if hasattr(pa, "json_"):  # that pyarrow writes views to Parquet, too
    NESTED["view"] = TEXTS.view(pa.binary()).cast(pa.binary_view()).view(pa.string_view())
    NESTED["json"] = pa.ExtensionArray.from_storage(pa.json_(), TEXTS)
    NESTED["list of json"] = pa.ListArray.from_arrays(ENDS, NESTED["json"])


@pytest.mark.parametrize("kind", NESTED)
def test_a_text_that_is_no_utf8_costs_its_row_alone_wherever_it_is_nested(
    kind: str, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pq.write_table(pa.table({"text": NESTED[kind]}), tmp_path / "rows.parquet")
    first, bad, last = open_rows(str(tmp_path / "rows.parquet")).read(range(3))
    assert [first, last] == [{"text": NESTED[kind][n].as_py()} for n in (0, 2)]
    assert isinstance(bad, BadSample)
    assert not caplog.text


@pytest.mark.parametrize("kind", NESTED)
def test_an_offset_outside_is_damage_even_next_to_a_text_that_is_not_utf8(kind: str) -> None:
    sink = pa.BufferOutputStream()
    batch = pa.RecordBatch.from_arrays([NESTED[kind]], ["text"])
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    whole = sink.getvalue().to_pybytes()
    last = struct.pack("<3i" if kind != "large" else "<3q", 4, 6, 42)
    broken = last[: len(last) // 3 * 2] + (1 << 30).to_bytes(len(last) // 3, "little")
    if kind == "view":  # it has where a long text begins, after its length and first letters
        last, broken = (struct.pack("<i4sii", 36, b"good", 0, at) for at in (6, 1 << 30))
    assert whole.count(last) == 1
    _validate(pa.ipc.open_file(whole).get_batch(0).column(0))
    with pytest.raises(pa.ArrowException):
        _validate(pa.ipc.open_file(whole.replace(last, broken)).get_batch(0).column(0))


MAPS = {
    "map": pa.array([[("k", "v")], None, []], pa.map_(pa.string(), pa.string())),
    "list": pa.array([[[("k", 1)]], [], [None]], pa.list_(pa.map_(pa.string(), pa.int64()))),
    "struct": pa.array([{"m": [("k", "v")]}] * 3, pa.struct([("m", pa.map_(pa.string(), pa.string()))])),
    "map of maps": pa.array(
        [[("k", [("a", 1)])]] * 3, pa.map_(pa.string(), pa.map_(pa.string(), pa.int64()))
    ),
}


@pytest.mark.parametrize("kind", MAPS)
def test_maps_are_read_wherever_they_are_nested(
    kind: str, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = pa.table({"map": MAPS[kind]})
    pq.write_table(table, tmp_path / "rows.parquet")
    for _ in range(2):
        rows = open_rows(str(tmp_path / "rows.parquet"))
        assert list(rows) == table.to_pylist()
    assert isinstance(rows, ParquetRows)
    assert rows.table([2, 0]).to_pylist() == [table.to_pylist()[n] for n in (2, 0)]
    assert not caplog.text


def test_columns_are_described_alike_where_an_extension_type_is_not_known() -> None:
    known = pa.schema([("tensor", pa.fixed_shape_tensor(pa.int32(), (2,)))])
    name = {"ARROW:extension:name": "arrow.fixed_shape_tensor"}
    unknown = pa.schema([pa.field("tensor", pa.list_(pa.int32(), 2), metadata=name)])
    assert _check(known, 3) == _check(unknown, 3)
    others = [
        pa.schema([("tensor", pa.list_(pa.int32(), 2))]),
        pa.schema([pa.field("tensor", pa.list_(pa.int32(), 3), metadata=name)]),
        pa.schema([pa.field("tensor", pa.list_(pa.int32()), metadata=name)]),
        pa.schema([pa.field("tensor", pa.list_(pa.int64(), 2), metadata=name)]),
    ]
    assert len({_check(schema, 3) for schema in [known, *others]} | {_check(known, 4)}) == 6


def test_a_copy_is_never_made_of_a_file_that_has_changed(path: str, cache: Path) -> None:
    rows = open_rows(path)
    copy = copy_in(cache)
    damaged = outside(copy.read_bytes())
    with open(copy, "r+b") as file:
        file.write(damaged)
    pq.write_table(pa.Table.from_pylist(ROWS[:10]), path)
    with raises_config(path=path, match="the file has changed since it was opened"):
        rows[300]
    assert copy.read_bytes() == damaged
    assert list(open_rows(path)) == ROWS[:10]


def test_a_file_that_changes_while_it_is_copied_leaves_no_copy(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), file)
    rows = ParquetRows.__new__(ParquetRows)
    rows.__dict__.update(open_rows(str(file)).__getstate__())  # type: ignore[operator]
    copy_in(cache).unlink()
    pq.write_table(pa.Table.from_pylist(ROWS[:10]), file)
    with raises_config(path=file, match="has changed since it was opened"):
        rows._open()
    assert not list((cache / "arrow-2").iterdir())


def test_a_copy_that_is_deleted_before_it_is_mapped_is_rebuilt(
    path: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = arrow.build_once

    def made_and_deleted(name: str, write: Callable[[IO[bytes]], None]) -> Path:
        made = once(name, write)
        made.unlink()
        return made

    monkeypatch.setattr(arrow, "build_once", made_and_deleted)
    assert list(open_rows(path)) == ROWS
    assert copy_in(cache).exists()


def test_a_disk_that_is_full_is_not_called_a_parquet_file_that_cannot_be_read(
    tmp_path: Path, cache: Path
) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*cache/arrow-2/.*\.arrow'"):
            open_rows(str(tmp_path / "rows.parquet"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(open_rows(str(tmp_path / "rows.parquet"))) == ROWS


def test_a_field_without_values_that_is_too_short_is_damage_even_next_to_a_text_that_is_not_utf8() -> None:
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
