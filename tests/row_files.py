"""Writes the same rows in every file format that ``open_rows`` takes."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

Rows = list[dict[str, Any]]


def _jsonl(rows: Rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_jsonl(folder: Path, rows: Rows) -> str:
    (folder / "rows.jsonl").write_bytes(_jsonl(rows))
    return str(folder / "rows.jsonl")


def write_json(folder: Path, rows: Rows) -> str:
    (folder / "rows.json").write_text(json.dumps(rows, indent=1))
    return str(folder / "rows.json")


def write_json_lines(folder: Path, rows: Rows) -> str:
    # A single object would be a meta file, so one row is an array.
    (folder / "rows.lines.json").write_bytes(_jsonl(rows) if len(rows) > 1 else json.dumps(rows).encode())
    return str(folder / "rows.lines.json")


def write_gz(folder: Path, rows: Rows) -> str:
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(_jsonl(rows)))
    return str(folder / "rows.jsonl.gz")


def write_zst(folder: Path, rows: Rows) -> str:
    # Two frames, as parallel compressors write them.
    data = _jsonl(rows)
    halves = (data[: len(data) // 2], data[len(data) // 2 :])
    packed = b"".join(pa.Codec("zstd").compress(half, asbytes=True) for half in halves)
    (folder / "rows.jsonl.zst").write_bytes(packed)
    return str(folder / "rows.jsonl.zst")


def write_parquet(folder: Path, rows: Rows) -> str:
    table = pa.Table.from_pylist(rows, schema=None if rows else pa.schema({"id": pa.int64()}))
    pq.write_table(table, folder / "rows.parquet", row_group_size=7)
    return str(folder / "rows.parquet")


def write_address(folder: Path, rows: Rows) -> str:
    address = f"memory://{folder.as_posix()}/rows.jsonl"
    with fsspec.open(address, "wb") as file:
        file.write(_jsonl(rows))
    return address


WRITERS: dict[str, Callable[[Path, Rows], str]] = {
    "jsonl": write_jsonl,
    "json": write_json,
    "lines in .json": write_json_lines,
    "jsonl.gz": write_gz,
    "jsonl.zst": write_zst,
    "parquet": write_parquet,
    "memory://": write_address,
}
