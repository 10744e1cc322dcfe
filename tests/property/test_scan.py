"""The index finds exactly the rows that a parser finds, wherever chunk boundaries fall."""

import json
import os
import tempfile
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.datasets import _load_jsonl_for_rank
from packhorse.errors import ConfigError
from packhorse.ledger import Ledger
from packhorse.rows import index
from packhorse.rows import index as scan_module
from packhorse.rows.index import scan_array, scan_lines

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text('ab"\\,[]{}\n é漢', max_size=6), JSON, max_size=4)
LONG_LINES = st.sampled_from([-1, 0, 200])  # with -1 newlines are searched for, with 200 bytes compared
WHITE_SPACE = st.sampled_from([b"", b" ", b"\t ", b"\r", b" \r", b"  \t\r"])


def scan(function, data: bytes, chunk: int) -> list[int]:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return np.concatenate(list(function(file.fileno(), len(data), "test", chunk))).tolist()


@settings(max_examples=400, deadline=None)
@given(
    lines=st.lists(st.one_of(OBJECTS.map(lambda o: json.dumps(o).encode()), WHITE_SPACE), max_size=12),
    ends=st.lists(st.sampled_from([b"\n", b"\r\n"]), min_size=12, max_size=12),
    last_newline=st.booleans(),
    bom=st.booleans(),
    chunk=st.integers(1, 64),
    long_line=LONG_LINES,
)
def test_lines_are_found_as_a_text_file_has_them(lines, ends, last_newline, bom, chunk, long_line) -> None:
    data = b"".join(line + end for line, end in zip(lines, ends, strict=False))
    if lines and not last_newline:
        data = data.rstrip(b"\r\n")
    data = (b"\xef\xbb\xbf" if bom else b"") + data
    with mock.patch.object(scan_module, "_LONG_LINE", long_line):
        starts = scan(scan_lines, data, chunk)
    rows = [json.loads(data[a:b]) for a, b in pairwise(starts)]
    text = data.decode("utf-8-sig")
    assert rows == [json.loads(line) for line in text.split("\n") if line.strip()]
    assert starts[-1] == len(data)


@settings(max_examples=120, deadline=None)
@given(
    lines=st.lists(st.one_of(OBJECTS.map(lambda o: json.dumps(o).encode()), WHITE_SPACE), max_size=20),
    last_newline=st.booleans(),
    bom=st.booleans(),
    chunk=st.integers(1, 64),
    size=st.integers(1, 5),
    rank=st.integers(0, 4),
    long_line=LONG_LINES,
)
def test_a_rank_that_parses_while_scanning_gets_the_rows_that_reading_gives_it(
    lines, last_newline, bom, chunk, size, rank, long_line
) -> None:
    rank %= size
    data = b"\n".join(lines) + b"\n" * last_newline
    data = (b"\xef\xbb\xbf" if bom else b"") + data
    rows = [json.loads(line) for line in data.decode("utf-8-sig").split("\n") if line.strip()]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.jsonl")
        with open(path, "wb") as file:
            file.write(data)
        with (
            mock.patch.object(index, "_OBSERVED_CHUNK", chunk),
            mock.patch.object(scan_module, "_LONG_LINE", long_line),
        ):
            got, total = _load_jsonl_for_rank(path, 1.0, rank, size, ledger=Ledger())
    assert total == len(rows)
    assert got == rows[: len(rows) - len(rows) % size][rank::size]


@settings(max_examples=400, deadline=None)
@given(rows=st.lists(OBJECTS, max_size=8), indent=st.sampled_from([None, 0, 2]), chunk=st.integers(1, 80))
def test_elements_are_found_as_the_parser_has_them(rows, indent, chunk) -> None:
    data = json.dumps(rows, indent=indent, ensure_ascii=bool(len(rows) % 2)).encode()
    starts = scan(scan_array, data, chunk)
    pieces = [data[a:b].rstrip().removesuffix(b",") for a, b in pairwise(starts)]
    assert [json.loads(piece) for piece in pieces] == rows
    assert data[starts[-1] :].strip() == b"]"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty file"),
        (b"  \n ", "empty file"),
        (b'{"a": 1}', "expected a JSON array.*one object per line, name it .jsonl"),
        (b'"rows"', "expected a JSON array"),
        (b'[{"a": 1}, {"b"', "is not closed.* at byte"),
        (b'[{"a": "]', "is not closed.* at byte"),
        (b'[{"a": 1}] [2]', "after the array's closing bracket"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 3, 4096])
def test_a_file_that_is_no_array_is_rejected_by_name(data: bytes, message: str, chunk: int) -> None:
    with pytest.raises(ConfigError, match=f"^test: .*{message}"):
        scan(scan_array, data, chunk)


def test_empty_arrays_and_files_have_no_rows() -> None:
    assert scan(scan_lines, b"", 16) == [0]
    for chunk in (1, 2, 16):
        assert scan(scan_array, b" [ ] ", chunk) == [3]


def test_a_file_that_shrinks_during_the_scan_is_an_error_not_a_crash() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(b"{}\n" * 100)
        file.flush()
        os.ftruncate(file.fileno(), 50)
        with pytest.raises(ConfigError, match="became shorter"):
            list(scan_lines(file.fileno(), 300, "test", 64))
