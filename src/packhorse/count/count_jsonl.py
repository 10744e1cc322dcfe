"""Copies of data files as JSONL, with the counts in each row: what ``packhorse count --write-jsonl`` makes.

A row gets ``_text_tokens`` and ``mm_inputs_meta``; together they are its exact length. The fields are put
into the row's own bytes, so the rest of it stays as it was. A row that could not be counted is copied as it
is: rows keep their numbers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import orjson

from packhorse.count.columns import OK
from packhorse.count.count_report import CountedFile
from packhorse.errors import BadSample, ConfigError, SystemFault
from packhorse.rows.row_files import JsonRows, RowFile
from packhorse.types import MEDIA_KINDS
from packhorse.utils.files import write_atomic
from packhorse.utils.progress import OnProgress, Progress

_FIELDS = ("_text_tokens", "mm_inputs_meta")


def write_counted_jsonl(
    files: Sequence[CountedFile],
    folder: str | os.PathLike[str],
    progress: OnProgress | None = None,
) -> list[Path]:
    """Write ``<dataset>.jsonl`` for each dataset, and a ``meta.json`` that names them.

    Each file appears when it is whole. Memory is one part of the file.

    Raises:
        ConfigError: a row holds what JSON cannot (the bytes of an image in a Parquet file), or two datasets
            would get the same file.
        SystemFault: the files cannot be written.
    """
    home = Path(folder)
    targets = [home / f"{counted.config.name.replace(os.sep, '_')}.jsonl" for counted in files]
    if len(set(targets)) < len(targets):
        raise ConfigError(f"two datasets would be written to one of {', '.join(map(str, targets))}")
    for counted, target in zip(files, targets, strict=True):
        if os.path.realpath(target) == os.path.realpath(counted.file.path):
            raise ConfigError(f"{target} is the data file itself: write the copies to another folder")
    meta = {
        counted.config.name: counted.config.entry(target.name)
        for counted, target in zip(files, targets, strict=True)
    }
    report = progress or Progress("writing")
    total, done = sum(len(counted.file) for counted in files), 0

    def write_rows(counted: CountedFile, file: IO[bytes]) -> None:
        nonlocal done
        for lines in _blocks(counted):
            file.writelines(lines)
            done += len(lines)
            report(done, total)

    try:
        for counted, target in zip(files, targets, strict=True):
            write_atomic(target, partial(write_rows, counted))
        text = json.dumps(meta, indent=2, ensure_ascii=False) + "\n"
        write_atomic(home / "meta.json", lambda file: _write(file, text.encode()))
    except OSError as error:
        raise SystemFault(f"{error.filename or home} cannot be written ({error.strerror})") from error
    return targets


def _write(file: IO[bytes], data: bytes) -> None:
    file.write(data)


def _blocks(counted: CountedFile) -> Iterator[list[bytes]]:
    """Yield the lines of the copy, a part of the file at a time."""
    first = 0
    for batch in counted.sidecar.batches():
        counts = batch.select(["text", "status", "media"]).to_pylist()
        rows = [(row_bytes(counted.file, number), one) for number, one in enumerate(counts, first)]
        yield [(_with_counts(row, one) if one["status"] == OK else row) + b"\n" for row, one in rows]
        first += len(counts)


def row_bytes(file: RowFile, number: int) -> bytes:
    """A row on one line.

    Raises:
        ConfigError: it holds what JSON cannot.
    """
    if isinstance(file, JsonRows):
        # A line end cannot be part of a JSON string, so it stands between values.
        return file.raw(number).replace(b"\r", b" ").replace(b"\n", b" ")
    try:
        return orjson.dumps(file[number])
    except (TypeError, BadSample) as error:
        raise ConfigError(
            f"{file.location(number)} cannot be written as JSON ({error}): copies are for rows with paths of "
            "media, not with their bytes"
        ) from error


def _with_counts(row: bytes, counts: dict[str, Any]) -> bytes:
    fields = orjson.dumps({"_text_tokens": counts["text"], "mm_inputs_meta": inputs_meta(counts["media"])})
    if any(name.encode() in row for name in _FIELDS):
        values = json.loads(row)
        kept = {name: value for name, value in values.items() if name not in _FIELDS}
        if len(kept) < len(values):  # from an earlier count (and not just text that mentions it): not twice
            row = json.dumps(kept, ensure_ascii=False).encode()
    return row[: row.rindex(b"}")].rstrip() + b"," + fields[1:]


def inputs_meta(media: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """``mm_inputs_meta`` of a row: sizes and tokens of its media, kind by kind, in the order of the text."""
    names = {
        "image": ("height", "width"),
        "video": ("frames", "height", "width", "fps", "duration"),
        "audio": ("samples",),
    }
    found: dict[str, list[dict[str, Any]]] = {"images_meta": [], "videos_meta": []}
    for media_item in media:
        kind = MEDIA_KINDS[media_item["kind"]]
        entry = {name: media_item[name] for name in names[kind]} | {"n_tokens": media_item["tokens"]}
        found.setdefault(f"{kind}s_meta", []).append(entry)
    return found
