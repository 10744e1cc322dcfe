"""Digests of the rows of a dataset: a resumed run must read exactly the rows it began with.

The digest of a row file is made of the digests of its parts of ``PART_ROWS`` rows. Counting computes these
while it reads the rows and saves them in the count file, so starting a run reads no row while the size, the
modification time (remote: the ETag) and the first and last bytes of the file stay the same. Rows in memory
are always hashed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import orjson
from PIL import Image

from packhorse.count.parts import PART_ROWS, part_digest
from packhorse.count.sidecar import sidecar_locations
from packhorse.errors import data_errors
from packhorse.families import Encoder
from packhorse.formats.meta import MetaDataset, Source
from packhorse.rows.index import file_error
from packhorse.rows.row_files import RowFile
from packhorse.utils.files import digest

IN_MEMORY = "data in memory"
_BATCH = 512
_ADDRESS = re.compile(r" at 0x[0-9a-f]+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Content:
    """The content of one row file, or of all rows in memory.

    Attributes:
        name: the dataset, for messages and for the resume state.
        digest: of all rows, in order.
        file: the address of the row file; empty for rows in memory.
        reading: a digest of how rows are selected and read: share, columns, tags.
    """

    name: str
    digest: str
    file: str = ""
    reading: str = ""

    def __str__(self) -> str:
        return f"{self.file} (dataset '{self.name}')" if self.file else self.name


def contents_of(dataset: Any, encoder: Encoder, *, hash_all: bool = False) -> tuple[Content, ...]:
    """Return the content of each row file of a mixture, or of a sequence of examples.

    Args:
        dataset: a :class:`~packhorse.formats.meta.MetaDataset`, or examples with ``len`` and ``[index]``.
        encoder: of the processor that the rows were counted with; finds the count files.
        hash_all: read and hash every row file, even if a count file has the digests of this state.

    Raises:
        ConfigError: ``hash_all`` finds rows that are not those that were counted.
    """
    if not isinstance(dataset, MetaDataset):
        return (Content(IN_MEMORY, digest_of_examples(dataset)),)
    contents = []
    for source, location in zip(dataset.sources, sidecar_locations(dataset, encoder), strict=True):
        recorded = location.recorded_parts()
        if recorded is not None and hash_all:
            _compare_parts(source.file, *recorded)
        # Parts of another size (`packhorse count --part-rows`) have other digests: read the file.
        known = recorded is not None and recorded[0] == PART_ROWS
        parts = recorded[1] if recorded is not None and known else _part_digests(source.file)
        rows_digest = digest(str(len(source.file)), *parts)
        contents.append(Content(source.config.name, rows_digest, source.file.name, _reading_digest(source)))
    return tuple(contents)


def _part_digests(file: RowFile, part_rows: int = PART_ROWS) -> Iterator[str]:
    """Yield the digest of each part, read from the file: about a second per gigabyte."""
    for first in range(0, len(file), part_rows):
        yield part_digest(file, first, min(len(file), first + part_rows))


def _compare_parts(file: RowFile, part_rows: int, parts: Sequence[str]) -> None:
    for number, (then, now) in enumerate(zip(parts, _part_digests(file, part_rows), strict=True)):
        if then != now:
            first = number * part_rows
            raise file_error(
                file.name,
                f"rows {first} to {min(len(file), first + part_rows) - 1} have changed since they were "
                f"counted (digest {then} then, {now} now), though the file has the same size and "
                "modification time. Count it again with `packhorse count --fresh`",
            )


def _reading_digest(source: Source) -> str:
    """Return a digest of how rows are selected and read, without the media folder, so that data may move."""
    rules = {name: value for name, value in asdict(source.config.rules).items() if name != "media_dir"}
    selection = source.selection
    selected = [selection.ratio, selection.world.rank, selection.world.size, selection.remainder]
    return digest(json.dumps([selected, rules], sort_keys=True, default=str))


def digest_of_examples(examples: Any) -> str:
    """Return a digest of all examples, in order: text, numbers, and the pixels and samples of media."""
    state = hashlib.blake2b(str(len(examples)).encode(), digest_size=16)
    for example in _iterate(examples):
        row = _serialize(example)
        state.update(len(row).to_bytes(8, "little"))
        state.update(row)
    return state.hexdigest()


def _iterate(examples: Any) -> Iterator[Any]:
    datasets = sys.modules.get("datasets")
    if datasets is not None and isinstance(examples, datasets.Dataset):
        # As Arrow has them: images stay the bytes of their files, nothing is decoded.
        for table in examples.with_format("arrow").iter(_BATCH):
            yield from table.to_pylist()
        return
    for index in range(len(examples)):
        example = None  # if it cannot be read: counting records it
        with data_errors():
            example = examples[index]
        yield example


def _serialize(value: Any) -> bytes:
    try:
        return orjson.dumps(value, default=_as_json, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError:  # a lone surrogate, an integer of more than 64 bits, deep nesting
        return _serialize_by_parts(value)


def _serialize_by_parts(value: Any) -> bytes:
    """Serialize a value that orjson rejects: each part separately, so that no other is affected."""
    if isinstance(value, str):
        return b"str" + repr(value).encode("utf-8", "backslashreplace")
    if isinstance(value, int):
        return b"int" + hex(value).encode()
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        pairs = ((_serialize(key), _serialize(item)) for key, item in value.items())
        parts = [part for pair in sorted(pairs) for part in pair]
    elif isinstance(value, list | tuple):
        parts = [_serialize(item) for item in value]
    else:
        return _serialize(_as_json(value))
    state = hashlib.blake2b(type(value).__name__.encode(), digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.digest()


def _as_json(value: Any) -> Any:
    """Return JSON values for a value that is none; large data as a digest."""
    if isinstance(value, Image.Image):
        # A file that was only opened is named: decoding every image would take hours.
        content = str(getattr(value, "filename", "") or "")
        if not content:
            content = "unreadable"  # counting records it
            with data_errors():
                content = _bytes_digest(value.tobytes())
        return ["image", value.mode, value.size, content]
    if isinstance(value, bytes | bytearray | memoryview):
        return ["bytes", _bytes_digest(value)]
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.to_dense() if str(value.layout) != "torch.strided" else value).contiguous()
        data = value.flatten().view(sys.modules["torch"].uint8).numpy()
        return ["tensor", str(value.dtype), list(value.shape), _bytes_digest(data)]
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:  # its bytes are memory addresses
            return ["array", str(value.dtype), value.shape, _bytes_digest(_serialize(value.tolist()))]
        return ["array", str(value.dtype), value.shape, _bytes_digest(np.ascontiguousarray(value))]
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):  # longdouble stays one
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return ["set", *sorted(_serialize(item).hex() for item in value)]
    if isinstance(value, Iterable) and hasattr(value, "__len__"):
        return list(value)
    return [type(value).__qualname__, _ADDRESS.sub("", repr(value))]


def _bytes_digest(data: Any) -> str:
    if isinstance(data, np.ndarray):
        data = data.reshape(-1).view(np.uint8).data
    return hashlib.blake2b(data, digest_size=16).hexdigest()
