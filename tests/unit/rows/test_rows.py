"""Rows by number from every kind of file; bad rows named by file, line and byte; safe in child processes."""

import gc
import gzip
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import packhorse.rows.index as index_module
from packhorse.datasets import _load_json_or_jsonl, _load_jsonl_for_rank
from packhorse.errors import BadSample, ConfigError
from packhorse.ledger import Ledger
from packhorse.rows.index import EmptyLines, scan_lines
from packhorse.rows.row_files import JsonRows, RowFile, gc_paused, is_json_lines, open_rows
from raising import raises_bad_sample, raises_config
from row_files import WRITERS

ROWS = [{"id": i, "text": "ü" * i, "nested": [{"a": i}]} for i in range(40)]


@pytest.fixture
def keep_small_indexes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few bytes are worth an index in these tests."""
    monkeypatch.setattr(index_module, "KEEP_FROM_BYTES", 1)


@pytest.mark.parametrize("kind", WRITERS)
def test_every_file_type_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    rows = open_rows(WRITERS[kind](tmp_path, ROWS))
    assert len(rows) == len(ROWS)
    assert list(rows) == ROWS
    assert rows[-1] == ROWS[-1]
    assert list(rows.read([3, 1, 1, 39])) == [ROWS[3], ROWS[1], ROWS[1], ROWS[39]]
    assert list(rows.read([])) == []
    with pytest.raises(IndexError, match="row 40 of 40"):
        rows[40]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_without_rows_has_none(tmp_path: Path, kind: str) -> None:
    rows = open_rows(WRITERS[kind](tmp_path, []))
    assert len(rows) == 0
    assert list(rows) == []
    with pytest.raises(IndexError):
        rows[0]


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_rows_can_be_read_in_child_processes(tmp_path: Path, kind: str, method: str) -> None:
    rows = open_rows(WRITERS[kind](tmp_path, ROWS))
    rows[5]
    context = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    # Under fork the children inherit the open reader itself, under spawn they get it pickled.
    children = [context.Process(target=_send_rows, args=(rows, results)) for _ in range(2)]
    for child in children:
        child.start()
    found = []
    while len(found) < len(children):
        ended = [child.exitcode for child in children if child.exitcode]
        assert not ended, f"children ended with {ended}"
        if results.empty():
            time.sleep(0.01)
        else:
            found.append(results.get())
    assert found == [ROWS, ROWS]
    for child in children:
        child.join()
    assert list(rows) == ROWS, "and the parent's reader still works"


def _send_rows(rows: RowFile, results: Any) -> None:
    results.put([rows[i] for i in range(len(rows))])


@pytest.mark.parametrize("kind", WRITERS)
def test_negative_numbers_count_from_the_end_everywhere(tmp_path: Path, kind: str) -> None:
    rows = open_rows(WRITERS[kind](tmp_path, ROWS))
    assert list(rows.read([-1, -40])) == [ROWS[39], ROWS[0]]
    assert rows.location(-1) == rows.location(39)
    with pytest.raises(IndexError):
        list(rows.read([-41]))


def test_a_reader_opened_by_a_relative_path_survives_a_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS["jsonl"](tmp_path, ROWS)
    monkeypatch.chdir(tmp_path)
    frozen = pickle.dumps(open_rows("rows.jsonl"))
    monkeypatch.chdir("/")
    assert list(pickle.loads(frozen)) == ROWS


def test_dictionary_columns_of_parquet_are_read_as_their_values(tmp_path: Path) -> None:
    table = pa.table({"role": pa.array(["a", "b", "a"] * 500).dictionary_encode()})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=100)
    assert [row["role"] for row in open_rows(str(tmp_path / "x.parquet"))] == ["a", "b", "a"] * 500


def test_a_cache_that_was_emptied_is_filled_again(tmp_path: Path, cache: Path) -> None:
    frozen = {kind: pickle.dumps(open_rows(WRITERS[kind](tmp_path, ROWS))) for kind in ("parquet", "jsonl")}
    shutil.rmtree(cache)
    for data in frozen.values():
        assert list(pickle.loads(data)) == ROWS


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACKHORSE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set PACKHORSE_CACHE"):
        open_rows(WRITERS["parquet"](tmp_path, ROWS))


@pytest.mark.parametrize("empty", [0, 1])
def test_many_bad_rows_are_located_in_one_count_of_lines(empty: int, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", b"\n" * empty + b'{"id": 0}\n{bad\n' * 300)
    errors = [row for row in open_rows(path).read(range(600)) if isinstance(row, BadSample)]
    lines = [int(str(error).split(".jsonl:")[1].split(" ")[0]) for error in errors]
    assert lines == list(range(2 + empty, 601 + empty, 2))


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes of files are read, a number for each time."""
    read: list[int] = []
    pread = os.pread

    def count_reads(fd: int, size: int, offset: int) -> bytes:
        data = pread(fd, size, offset)
        read.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", count_reads)
    return read


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        b'{"n": 0}\n{"n": 1}\n{"n": 2}\n',
        b'\xef\xbb\xbf{"n": 0}\r\n{"n": 1}\r\n{"n": 2}',
        b'{"n": 0}\n{"n": 1}\n{"n": 2}\n\n  \n\n',  # no row comes after them
    ],
)
def test_line_numbers_cost_no_reading_where_every_line_is_a_row(
    data: bytes, kept: bool, tmp_path: Path, bytes_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "KEEP_FROM_BYTES", 0 if kept else 1 << 22)
    path = write(tmp_path / "x.jsonl", data)
    for _ in range(1 + kept):  # built, then found
        rows = open_rows(path)
        bytes_read.clear()
        starts = [data.index(b'{"n": %d' % n) for n in range(3)]
        assert [rows.location(n) for n in range(3)] == [
            f"{path}:{n + 1} (byte {start})" for n, start in enumerate(starts)
        ]
        assert [rows.quick_location(n) for n in range(3)] == [rows.location(n) for n in range(3)]
        assert bytes_read == []


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("before", [b"\n", b" \r\n", b'{"n": 9}\n\n'])
def test_with_empty_lines_a_line_is_counted_on_request_and_else_the_row_is_named(
    before: bytes, kept: bool, tmp_path: Path, bytes_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "KEEP_FROM_BYTES", 0 if kept else 1 << 22)
    data = before + b'{"n": 0}\n' * 3
    path = write(tmp_path / "x.jsonl", data)
    for _ in range(1 + kept):
        rows = open_rows(path)
        last = len(rows) - 1
        bytes_read.clear()
        start, line = len(data) - 9, data.count(b"\n")
        assert rows.quick_location(-1) == f"{path}, row {last} (byte {start})"
        assert bytes_read == []
        assert rows.location(last) == f"{path}:{line} (byte {start})"


@pytest.mark.parametrize("chunk", [1, 7, 9, 10, 64])
@pytest.mark.parametrize(
    "data", [b"{}\n{}\n\n", b"{}\n\n{}\n", b"\n\n", b"{}", b"", b"{}\n \n\n\n\n\n\n\n\n{}"]
)
def test_empty_lines_before_rows_are_found_wherever_pieces_end(
    chunk: int, data: bytes, tmp_path: Path
) -> None:
    path = write(tmp_path / "x.jsonl", data)
    seen = EmptyLines()
    with open(path, "rb") as file:
        list(scan_lines(file.fileno(), len(data), path, chunk, None, seen))
    assert seen.before_rows == (b"\n\n{" in data or b"\n \n" in data)


def test_rows_can_be_read_from_threads(tmp_path: Path) -> None:
    rows = open_rows(WRITERS["jsonl"](tmp_path, ROWS))
    seen: list[bool] = []
    threads = [threading.Thread(target=lambda: seen.append(list(rows) == ROWS)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 8


def test_parquet_keeps_bytes_and_nested_values(tmp_path: Path) -> None:
    image = {"bytes": b"\x89PNG", "path": None}
    path = WRITERS["parquet"](tmp_path, [{"images": [image], "messages": [{"role": "user", "content": "x"}]}])
    assert open_rows(path)[0]["images"] == [image]


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b'{"id": 1, "x": ', "not valid JSON"),
        (b'{"id": "\xff\xfe"}', "not UTF-8"),
        (b'{"id": "\\ud800"}', "a lone surrogate"),
        (b"[1, 2]", "expected an object, found list"),
        (b"42", "expected an object, found int"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_a_malformed_line_names_file_line_and_byte_and_costs_no_other_row(
    tmp_path: Path, bad: bytes, message: str
) -> None:
    path = write(tmp_path / "x.jsonl", b'{"id": 0}\n\n' + bad + b'\n{"id": 2}\n')
    rows = open_rows(path)
    assert len(rows) == 3
    with raises_bad_sample("malformed_row", match=rf"x\.jsonl:3 \(byte 11\): {message}"):
        rows[1]
    assert rows[0] == {"id": 0}
    assert rows[2] == {"id": 2}
    good_or_error = list(rows.read(range(3)))
    assert good_or_error[0] == {"id": 0}
    assert isinstance(good_or_error[1], BadSample)
    assert good_or_error[2] == {"id": 2}
    with raises_bad_sample("malformed_row", match="byte 11"):
        _load_json_or_jsonl(path)
    with raises_bad_sample("malformed_row", match="byte 11"):
        _load_jsonl_for_rank(path, 1.0, 1, 3)
    assert _load_jsonl_for_rank(path, 1.0, 2, 3) == ([{"id": 2}], 3)
    with pytest.raises(ValueError, match="rank=0, world size=0: expected size >= 1"):
        _load_jsonl_for_rank(path, 1.0, 0, 0)


def test_a_malformed_element_of_an_array_is_named_by_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", b'[{"id": 0}, {"id": nope}, {"id": 2}]')
    rows = open_rows(path)
    assert (rows[0], rows[2]) == ({"id": 0}, {"id": 2})
    with raises_bad_sample("malformed_row", match=r"x\.json, element 1 \(byte 11\): not valid JSON"):
        rows[1]


def test_numbers_that_only_pythons_parser_takes_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", b'{"score": NaN, "n": 123456789012345678901234567890}\n')
    assert open_rows(path)[0]["n"] == 123456789012345678901234567890


def test_a_line_of_ten_megabytes_is_a_row_like_any_other(tmp_path: Path) -> None:
    long = {"id": 1, "text": "x" * 10_000_000}
    path = write(tmp_path / "x.jsonl", b'{"id": 0}\n' + json.dumps(long).encode() + b'\n{"id": 2}')
    assert list(open_rows(path)) == [{"id": 0}, long, {"id": 2}]


def test_a_missing_file_and_a_file_of_another_kind_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no\.jsonl: no such file"):
        open_rows(str(tmp_path / "no.jsonl"))
    with pytest.raises(FileNotFoundError, match=r"memory://no/rows\.jsonl"):
        open_rows("memory://no/rows.jsonl")
    with raises_config(path=tmp_path / "x.json", match="expected a JSON array"):
        _load_json_or_jsonl(write(tmp_path / "x.json", b'"rows"\n{"id": 1}\n'))
    with raises_config(path=tmp_path, match="is a folder, expected a file of rows"):
        open_rows(str(tmp_path))
    with raises_config(path=tmp_path / "x.parquet"):
        open_rows(write(tmp_path / "x.parquet", b"PAR1 no"))
    for name in ("x.jsonl.gz", "x.jsonl.zst"):
        whole = WRITERS[name[2:]](tmp_path, ROWS)
        with raises_config(path=tmp_path / name, match="cannot be unpacked"):
            open_rows(write(tmp_path / name, Path(whole).read_bytes()[:-20]))


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        (b'{"id": 0}\n{"id": 1}\n', 2),
        (b'\xef\xbb\xbf{"id": 0}\r\n\r\n{"id": 1}', 2),
        (b" " * 9999 + b'\n\n  {"id": "' + b"a" * 9999 + b'"}\n{"id": 1}\n', 2),
        (b'{"id": 0}', 1),
        (b'{\n "id": 0\n}\n', None),
        (b'{"id": 0}, {"id": 1}', None),
        (b'{"id": \n{"id": 1}\n', None),
        (b"\n \n", None),
        (b'["' + b"a" * 9999 + b'"]', 1),
    ],
)
def test_a_json_file_whose_first_line_is_an_object_has_a_row_on_each_line(
    tmp_path: Path, content: bytes, rows: int | None
) -> None:
    path = write(tmp_path / "x.json", content)
    assert is_json_lines(path) == (content[:2] != b'["' and rows is not None)
    assert is_json_lines(path, several=True) == (rows == 2)
    if rows is None:
        with raises_config(path=path, match="expected a JSON array"):
            open_rows(path)
    else:
        assert len(open_rows(path)) == rows


def test_an_array_without_line_ends_is_not_read_to_see_that_it_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKHORSE_MAX_ROW_BYTES", "20")
    assert not is_json_lines(write(tmp_path / "x.json", b'{"id": "' + b"a" * 9999 + b'"}\n{}\n'))


@pytest.mark.usefixtures("keep_small_indexes")
def test_the_index_of_an_array_is_not_used_when_the_file_has_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", b'[{"id": 0},\n{"id": 1}]')
    times = os.stat(path)
    assert [row["id"] for row in open_rows(path)] == [0, 1]
    content = b'{"id": 2}\n{"id": 3}\n'
    write(tmp_path / "x.json", content.ljust(times.st_size))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert [row["id"] for row in open_rows(path)] == [2, 3]


def test_concatenated_gzip_members_are_all_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl.gz", gzip.compress(b'{"id": 0}\n') + gzip.compress(b'{"id": 1}\n'))
    assert len(open_rows(path)) == 2


def test_a_changed_archive_or_address_is_fetched_again(tmp_path: Path, cache: Path) -> None:
    for kind in ("jsonl.gz", "memory://", "parquet"):
        assert len(open_rows(WRITERS[kind](tmp_path, ROWS))) == 40
        assert len(open_rows(WRITERS[kind](tmp_path, ROWS[:7]))) == 7
    assert any(cache.iterdir())


@pytest.mark.usefixtures("keep_small_indexes")
class TestTheIndexFile:
    def test_it_lies_next_to_the_file_and_is_reused(self, tmp_path: Path) -> None:
        path = WRITERS["jsonl"](tmp_path, ROWS)
        assert list(open_rows(path)) == ROWS
        home = tmp_path / "rows.jsonl.phidx"
        before = home.stat()
        assert list(open_rows(path)) == ROWS
        assert home.stat().st_mtime_ns == before.st_mtime_ns
        assert home.stat().st_ino == before.st_ino

    def test_small_files_get_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        open_rows(WRITERS["jsonl"](tmp_path, ROWS))
        assert not list(tmp_path.glob("*.phidx"))

    def test_a_chosen_folder_holds_it_alone(self, tmp_path: Path) -> None:
        path = WRITERS["jsonl"](tmp_path, ROWS)
        (tmp_path / "indexes").mkdir()
        open_rows(path, str(tmp_path / "indexes"))
        assert len(list((tmp_path / "indexes").iterdir())) == 1
        assert not list(tmp_path.glob("*.phidx"))

    @pytest.mark.parametrize("change", ["append", "same size, other time", "same size and time, other end"])
    def test_a_changed_file_is_reindexed(self, tmp_path: Path, change: str) -> None:
        path = Path(WRITERS["jsonl"](tmp_path, ROWS))
        open_rows(str(path))
        stat = path.stat()
        data = path.read_bytes()
        if change == "append":
            path.write_bytes(data + b'{"id": 40}\n')
        else:
            # One row less in the same number of bytes.
            path.write_bytes(data[: data[:-1].rindex(b"\n")].ljust(len(data)))
            later = stat.st_mtime_ns + (1 if change == "same size, other time" else 0)
            os.utime(path, ns=(stat.st_atime_ns, later))
        assert len(open_rows(str(path))) == (41 if change == "append" else 39)

    @pytest.mark.parametrize("damage", ["cut", "flip", "header", "empty", "garbage"])
    def test_a_damaged_index_is_rebuilt(self, tmp_path: Path, damage: str) -> None:
        path = WRITERS["jsonl"](tmp_path, ROWS)
        open_rows(path)
        home = tmp_path / "rows.jsonl.phidx"
        data = bytearray(home.read_bytes())
        if damage == "cut":
            data = data[:-8]
        elif damage == "flip":
            data[-20] ^= 1
        elif damage == "header":
            data[3] ^= 1
        else:
            data = bytearray() if damage == "empty" else bytearray(os.urandom(900))
        home.write_bytes(data)
        assert list(open_rows(path)) == ROWS

    def test_if_it_cannot_lie_next_to_the_file_it_goes_to_the_cache(
        self, tmp_path: Path, cache: Path
    ) -> None:
        path = WRITERS["jsonl"](tmp_path, ROWS)
        (tmp_path / "rows.jsonl.phidx").mkdir()  # root may write anywhere, but not over a folder
        assert list(open_rows(path)) == ROWS
        assert len(list((cache / "indexes").iterdir())) == 1

    def test_without_any_place_it_is_held_in_memory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = WRITERS["jsonl"](tmp_path, ROWS)
        (tmp_path / "rows.jsonl.phidx").mkdir()
        (tmp_path / "file").touch()
        monkeypatch.setenv("PACKHORSE_CACHE", str(tmp_path / "file" / "cache"))
        assert list(open_rows(path)) == ROWS
        assert "holding it in memory" in caplog.text

    def test_processes_that_open_a_file_together_all_get_it_right(self, tmp_path: Path) -> None:
        rows = [{"id": i} for i in range(400_000)]
        path = WRITERS["jsonl"](tmp_path, rows)
        script = (
            "import sys; from packhorse.rows.row_files import open_rows; print(len(open_rows(sys.argv[1])))"
        )
        command = [sys.executable, "-c", script, path]
        runs = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
        assert [run.communicate()[0] for run in runs] == [b"400000\n"] * 4
        assert len(list(tmp_path.glob("*.phidx"))) == 1
        assert not list(tmp_path.glob(".*")), "no half file is left after"


def test_a_file_cut_short_under_an_open_reader_is_an_error_not_a_crash(tmp_path: Path) -> None:
    path = WRITERS["jsonl"](tmp_path, ROWS)
    rows = open_rows(path)
    os.truncate(path, 100)
    with raises_config(path=path, match="shorter than when it was opened"):
        rows[39]


def test_a_file_that_changed_between_processes_is_rejected(tmp_path: Path) -> None:
    path = WRITERS["jsonl"](tmp_path, ROWS)
    frozen = pickle.dumps(open_rows(path))
    WRITERS["jsonl"](tmp_path, ROWS[:3])
    with raises_config(path=path, match="has changed"):
        pickle.loads(frozen)


def test_a_row_spoilt_after_opening_says_that_the_file_has_changed(tmp_path: Path) -> None:
    path = Path(WRITERS["jsonl"](tmp_path, ROWS))
    rows = open_rows(str(path))
    time.sleep(0.01)
    path.write_bytes(path.read_bytes().replace(b'{"id": 3,', b'{"id"  3,'))
    with raises_bad_sample("malformed_row", match="has changed since"):
        rows[3]


def test_the_raw_row_is_what_the_file_holds(tmp_path: Path) -> None:
    lines = open_rows(write(tmp_path / "x.jsonl", b'{"a": 1}\r\n\r\n{"b":2}'))
    array = open_rows(write(tmp_path / "x.json", b'[{"a": 1} , {"b":2}\n]'))
    for rows in (lines, array):
        assert isinstance(rows, JsonRows)
        assert [rows.raw(0), rows.raw(1)] == [b'{"a": 1}', b'{"b":2}']


def test_garbage_collection_waits_and_comes_back() -> None:
    assert gc.isenabled()
    with gc_paused():
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the caller's choice stands"
    finally:
        gc.enable()


def test_what_the_caller_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with gc_paused():
            kept = [{"row": [number]} for number in range(10_000)]
        assert gc.get_freeze_count() == frozen > 0
        assert len(kept) == 10_000
    finally:
        gc.unfreeze()
    with gc_paused():
        made = [{"row": [number]} for number in range(10_000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert any(made is one for one in gc.get_objects(generation=2))  # spared the walk, not hidden for good


def test_frozen_objects_are_not_counted_after_a_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def count() -> int:
        raise AssertionError("walked over all frozen objects")

    monkeypatch.setattr(gc, "get_freeze_count", count)
    with gc_paused():
        made = [{"row": [number]} for number in range(100)]
    assert len(made) == 100
    assert gc.isenabled()


def test_an_eager_load_that_scans_leaves_the_index_for_the_next(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(index_module, "KEEP_FROM_BYTES", 1)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(b'{"id": %d}\n' % number for number in range(10)) + b"not json\n")
    rows, total = _load_jsonl_for_rank(path, 1.0, 0, 2, ledger=Ledger())
    assert (rows, total) == ([{"id": n} for n in (0, 2, 4, 6, 8)], 11)
    assert path.with_name("rows.jsonl.phidx").exists()
    assert _load_jsonl_for_rank(path, 1.0, 0, 2, ledger=Ledger()) == (rows, total)


def test_an_index_that_cannot_be_kept_does_not_double_rows(tmp_path: Path, monkeypatch) -> None:
    """The file is scanned again for the next home: what was parsed in the first go does not count."""
    monkeypatch.setattr(index_module, "KEEP_FROM_BYTES", 1)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(b'{"id": %d}\n' % number for number in range(9)))
    scans = []

    def full_disk(home, write):
        with tempfile.TemporaryFile() as file:
            write(file)
        scans.append(home)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index_module, "write_atomic", full_disk)
    rows, total = _load_jsonl_for_rank(path, 1.0, 1, 3, ledger=Ledger())
    assert (rows, total, len(scans)) == ([{"id": 1}, {"id": 4}, {"id": 7}], 9, 2)
