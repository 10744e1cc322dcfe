"""The columns of a count file: as Arrow has them, and as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from packhorse.types import Flags, Floats, Integers

Texts = npt.NDArray[np.object_]

OK = "ok"
COUNTS = ("text", "image", "video", "audio", "supervised", "images", "videos", "audios", "patches")

_MEDIA_INTEGERS = ("height", "width", "frames", "samples", "tokens", "patches")
_MEDIA_NUMBERS = ("fps", "duration")


def count_schema(metadata: Mapping[str, str] | None = None) -> Any:
    """The columns of a sidecar, as an Arrow schema.

    ``media`` has the media of a row in the order of the text; ``kind`` is a place in ``MEDIA_KINDS``, and
    what does not apply to a kind, or is not known, is 0.
    """
    import pyarrow as pa

    medium = [
        pa.field("kind", pa.int8(), nullable=False),
        *(pa.field(name, pa.int32(), nullable=False) for name in _MEDIA_INTEGERS),
        *(pa.field(name, pa.float64(), nullable=False) for name in _MEDIA_NUMBERS),
    ]
    columns = [
        *(pa.field(name, pa.int32(), nullable=False) for name in COUNTS),
        pa.field("status", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
        pa.field("exact", pa.bool_(), nullable=False),
        pa.field("off_by", pa.int32(), nullable=False),
        pa.field("media", pa.list_(pa.field("item", pa.struct(medium), nullable=False)), nullable=False),
    ]
    return pa.schema(columns, metadata=dict(metadata or {}))


@dataclass(frozen=True, slots=True)
class CountColumns:
    """The counts of many rows, one array each; see :class:`packhorse.types.TokenCount` for their meaning.

    A row whose ``status`` is not ``"ok"`` could not be counted: ``status`` is then the reason as the ledger
    has it, ``detail`` what was found (empty for good rows), and its counts are 0.
    """

    text: Integers
    image: Integers
    video: Integers
    audio: Integers
    supervised: Integers
    images: Integers
    videos: Integers
    audios: Integers
    patches: Integers
    status: Texts
    ok: Flags
    exact: Flags
    off_by: Integers
    detail: Texts = field(default_factory=lambda: np.empty(0, object))

    def __post_init__(self) -> None:
        if len(self.detail) != len(self.text):
            object.__setattr__(self, "detail", np.full(len(self.text), "", object))

    def __len__(self) -> int:
        return len(self.text)

    @property
    def total(self) -> Integers:
        """The length of each row's ``input_ids``."""
        return self.text + self.image + self.video + self.audio

    def take(self, positions: npt.ArrayLike) -> CountColumns:
        """The counts of these rows, in this order; a row may come more than once.

        All rows as they stand are given without a copy: of a large file, which mostly is taken whole, another
        hundred bytes a row would be the most memory that opening it needs.
        """
        at = np.asarray(positions, np.int64)
        if len(at) == len(self) and np.array_equal(at, np.arange(len(at))):
            return self
        return CountColumns(*(getattr(self, column.name)[at] for column in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[CountColumns]) -> CountColumns:
        """Several one after the other; a single one as it is, without a copy."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls.of(count_schema().empty_table())
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)))

    @classmethod
    def of(cls, table: Any) -> CountColumns:
        """From a table or a record batch of a sidecar."""
        integers = {name: _numbers(table.column(name)) for name in (*COUNTS, "off_by")}
        status = _shared_texts(table.column("status"))
        exact, ok = _array(table.column("exact"), np.bool_), np.asarray(status == OK, np.bool_)
        # Good rows have none, and most rows are good: only the others' are read.
        detail, bad = np.full(len(status), "", object), np.flatnonzero(~ok)
        detail[bad] = table.column("detail").take(_arrow_integers(bad)).to_pylist()
        return cls(**integers, status=status, ok=ok, exact=exact, detail=detail)


@dataclass(frozen=True, slots=True)
class MediaColumns:
    """The media of many rows, flat: those of row ``i`` are ``offsets[i]`` to ``offsets[i + 1]``.

    ``kind`` is a place in :data:`packhorse.types.MEDIA_KINDS`; ``height``, ``width`` and ``frames`` are 0 for
    sound, ``samples`` for pictures; ``frames`` are those that are fed to the model, ``fps`` and ``duration``
    the video's own (0 where nobody knows them).
    """

    offsets: Integers
    kind: npt.NDArray[np.int8]
    height: Integers
    width: Integers
    frames: Integers
    samples: Integers
    tokens: Integers
    patches: Integers
    fps: Floats
    duration: Floats

    @classmethod
    def of(cls, batches: Sequence[Any]) -> MediaColumns:
        """From the record batches of a sidecar."""
        lists = [batch.column("media") for batch in batches]
        lengths = [_numbers(media.value_lengths()) for media in lists]
        ends = np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]))
        flat = [media.flatten() for media in lists]

        def joined(name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
            return np.concatenate([np.empty(0, dtype), *(_array(part.field(name), dtype) for part in flat)])

        integers = {name: joined(name, np.int64) for name in _MEDIA_INTEGERS}
        numbers = {name: joined(name, np.float64) for name in _MEDIA_NUMBERS}
        return cls(offsets=ends, kind=joined("kind", np.int8), **integers, **numbers)


def _arrow_integers(numbers: npt.NDArray[Any]) -> Any:
    import pyarrow as pa

    return pa.array(numbers, pa.int64())


def _numbers(column: Any) -> Integers:
    return _array(column, np.int64)


def _array(column: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    # A chunked array always copies, and does not take the argument.
    plain = column.to_numpy() if hasattr(column, "chunks") else column.to_numpy(zero_copy_only=False)
    return np.asarray(plain, dtype)


def _shared_texts(column: Any) -> Texts:
    """Texts of which there are few different ones, each once in memory."""
    encoded = column.dictionary_encode()
    chunks = encoded.chunks if hasattr(encoded, "chunks") else [encoded]
    parts = [np.array(c.dictionary.to_pylist(), object)[_numbers(c.indices)] for c in chunks if len(c)]
    return np.concatenate([np.empty(0, object), *parts])
