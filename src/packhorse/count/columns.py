"""The columns of a count file: their Arrow schema, arrays of their values, and distributions of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from packhorse.types import Flags, Floats, Integers

if TYPE_CHECKING:
    import pyarrow as pa

Texts = npt.NDArray[np.object_]

OK = "ok"
COUNTS = ("text", "image", "video", "audio", "supervised", "images", "videos", "audios", "patches")

_MEDIA_INTEGERS = ("height", "width", "frames", "samples", "tokens", "patches")
_MEDIA_NUMBERS = ("fps", "duration")


def count_schema(metadata: Mapping[str, str] | None = None) -> pa.Schema:
    """Return the Arrow schema of a sidecar.

    ``media`` has the media of a row in the order of the text; ``kind`` is an index of ``MEDIA_KINDS``, and
    what does not apply to a kind, or is unknown, is 0. ``settings`` are the item's settings for its size, as
    JSON; empty without any.
    """
    import pyarrow as pa

    media_item = [
        pa.field("kind", pa.int8(), nullable=False),
        *(pa.field(name, pa.int32(), nullable=False) for name in _MEDIA_INTEGERS),
        *(pa.field(name, pa.float64(), nullable=False) for name in _MEDIA_NUMBERS),
        pa.field("settings", pa.string(), nullable=False),
    ]
    columns = [
        *(pa.field(name, pa.int32(), nullable=False) for name in COUNTS),
        pa.field("status", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
        pa.field("exact", pa.bool_(), nullable=False),
        pa.field("off_by", pa.int32(), nullable=False),
        pa.field("weight", pa.float64(), nullable=False),
        pa.field("rejected", pa.int32(), nullable=False),
        pa.field("media", pa.list_(pa.field("item", pa.struct(media_item), nullable=False)), nullable=False),
    ]
    return pa.schema(columns, metadata=dict(metadata or {}))


@dataclass(frozen=True, slots=True)
class CountColumns:
    """The counts of many rows, one array each; see :class:`packhorse.types.TokenCount` for their meaning.

    A row whose ``status`` is not ``"ok"`` could not be counted: ``status`` is the ledger's reason, ``detail``
    what was found (empty for valid rows), and its counts are 0. ``weight`` is the sum of the loss weights of
    a row's supervised tokens.
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
    weight: Floats = field(default_factory=lambda: np.empty(0, np.float64))
    rejected: Integers = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        if len(self.detail) != len(self.text):
            object.__setattr__(self, "detail", np.full(len(self.text), "", object))
        if len(self.weight) != len(self.text):
            object.__setattr__(self, "weight", self.supervised.astype(np.float64))
        if len(self.rejected) != len(self.text):
            object.__setattr__(self, "rejected", np.zeros(len(self.text), np.int64))

    def __len__(self) -> int:
        return len(self.text)

    @property
    def total(self) -> Integers:
        """Length of each row's ``input_ids``; of a pair, those of both documents."""
        return self.text + self.image + self.video + self.audio

    @property
    def weighted(self) -> bool:
        """Whether any row has loss weights other than 1."""
        return bool((self.weight != self.supervised).any())

    @property
    def document_lengths(self) -> tuple[Integers, Integers]:
        """Lengths of each row's first document, and of the rejected one of a pair (else 0)."""
        return self.total - self.rejected, self.rejected

    def take(self, positions: npt.ArrayLike) -> CountColumns:
        """Return the counts of these rows, in this order; a row may occur more than once.

        All rows in their order are returned without a copy: large files mostly are taken whole, and a copy
        would double the peak memory of opening them.
        """
        rows = np.asarray(positions, np.int64)
        if len(rows) == len(self) and np.array_equal(rows, np.arange(len(rows))):
            return self
        return CountColumns(*(getattr(self, column.name)[rows] for column in fields(self)))

    @classmethod
    def concat(cls, parts: Sequence[CountColumns]) -> CountColumns:
        """Concatenate counts; a single one is returned without a copy."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls.of(count_schema().empty_table())
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)))

    @classmethod
    def of(cls, table: pa.Table | pa.RecordBatch) -> CountColumns:
        """Return the counts in a table or a record batch of a sidecar."""
        import pyarrow as pa

        integers = {name: _to_array(table.column(name), np.int64) for name in (*COUNTS, "off_by", "rejected")}
        status = _to_texts(table.column("status"))
        exact, ok = _to_array(table.column("exact"), np.bool_), np.asarray(status == OK, np.bool_)
        # Only bad rows have a detail, and they are few.
        detail, bad = np.full(len(status), "", object), np.flatnonzero(~ok)
        detail[bad] = table.column("detail").take(pa.array(bad, pa.int64())).to_pylist()
        weight = _to_array(table.column("weight"), np.float64)
        return cls(**integers, status=status, ok=ok, exact=exact, detail=detail, weight=weight)


@dataclass(frozen=True, slots=True)
class MediaColumns:
    """The media of many rows, flat: those of row ``i`` are ``offsets[i]`` to ``offsets[i + 1]``.

    ``kind`` is an index of :data:`packhorse.types.MEDIA_KINDS`; ``height``, ``width`` and ``frames`` are 0
    for audio, ``samples`` for images; ``frames`` are those that the model gets, ``fps`` and ``duration`` the
    video's own (0 if unknown). ``settings`` are the item's settings for its size, as JSON; empty without any.
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
    settings: Texts

    @classmethod
    def of(cls, batches: Sequence[pa.RecordBatch]) -> MediaColumns:
        """Return the media in record batches of a sidecar."""
        lists = [batch.column("media") for batch in batches]
        lengths = [_to_array(media.value_lengths(), np.int64) for media in lists]
        offsets = np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]))
        flat = [media.flatten() for media in lists]

        def concat(name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
            arrays = (_to_array(part.field(name), dtype) for part in flat)
            return np.concatenate([np.empty(0, dtype), *arrays])

        integers = {name: concat(name, np.int64) for name in _MEDIA_INTEGERS}
        numbers = {name: concat(name, np.float64) for name in _MEDIA_NUMBERS}
        texts = np.concatenate([np.empty(0, object), *(_to_texts(part.field("settings")) for part in flat)])
        return cls(offsets=offsets, kind=concat("kind", np.int8), settings=texts, **integers, **numbers)


def _to_array(column: pa.Array | pa.ChunkedArray, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    # A chunked array always copies, and rejects the argument.
    array = column.to_numpy() if hasattr(column, "chunks") else column.to_numpy(zero_copy_only=False)
    return np.asarray(array, dtype)


def _to_texts(column: pa.Array | pa.ChunkedArray) -> Texts:
    """Return an array of texts that shares equal ones, of which there are few."""
    encoded = column.dictionary_encode()
    chunks = encoded.chunks if hasattr(encoded, "chunks") else [encoded]
    parts = [
        np.array(chunk.dictionary.to_pylist(), object)[_to_array(chunk.indices, np.int64)]
        for chunk in chunks
        if len(chunk)
    ]
    return np.concatenate([np.empty(0, object), *parts])


PERCENTILES = (50, 90, 99)
_MAX_VALUE = (1 << 24) - 1  # a row may claim any number of tokens; memory grows with the largest


class Distribution:
    """Frequencies of integers from 0.

    >>> lengths = Distribution.of([3, 1, 2, 2])
    >>> lengths.percentile(50), lengths.max, lengths.mean
    (2, 3, 2.0)
    """

    def __init__(self, counts: npt.ArrayLike = ()) -> None:
        self.counts: Integers = np.asarray(counts, np.int64).reshape(-1)

    @classmethod
    def of(cls, values: npt.ArrayLike) -> Distribution:
        """Count values; they are clipped to 0 and 16 million."""
        array = np.clip(np.asarray(values, np.int64).reshape(-1), 0, _MAX_VALUE)
        return cls(np.bincount(array))

    @classmethod
    def merge(cls, parts: Iterable[Distribution]) -> Distribution:
        """Return the distribution of all values together."""
        counts = [part.counts for part in parts]
        total = np.zeros(max(map(len, counts), default=0), np.int64)
        for part in counts:
            total[: len(part)] += part
        return cls(total)

    @property
    def n(self) -> int:
        """Number of values."""
        return int(self.counts.sum())

    @property
    def sum(self) -> int:
        """Sum of all values."""
        return int((self.counts * np.arange(len(self.counts))).sum())

    @property
    def mean(self) -> float:
        """Mean; 0 without values."""
        return self.sum / self.n if self.n else 0.0

    @property
    def min(self) -> int:
        """Smallest value; 0 without values."""
        return self.percentile(0)

    @property
    def max(self) -> int:
        """Largest value; 0 without values."""
        return self.percentile(100)

    def percentile(self, percent: int) -> int:
        """Return the smallest value that at least ``percent`` percent of all values do not exceed."""
        if not self.n:
            return 0
        rank = max(1, -(-self.n * percent // 100))
        return int(np.searchsorted(np.cumsum(self.counts), rank))

    def doubling_edges(self) -> list[int]:
        """Return edges for a histogram in which each bin is twice as wide as the one before.

        Zeros have their own bin, and so has the empty range between them and the next value.
        """
        used = np.flatnonzero(self.counts)
        positive = used[used > 0]
        first = int(positive[0]).bit_length() - 1 if len(positive) else 0
        edges = [1 << power for power in range(first, self.max.bit_length() + 1)]
        has_zeros = len(used) > 0 and used[0] == 0
        return [0, *([1] if first else []), *edges] if has_zeros or not len(positive) else edges

    def histogram(self, edges: Sequence[int]) -> list[int]:
        """Return the number of values from each edge up to but not including the next."""
        return [int(self.counts[low:high].sum()) for low, high in pairwise(edges)]

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers for JSON, and a histogram in bins that double."""
        edges = self.doubling_edges()
        return {
            "n": self.n,
            "sum": self.sum,
            "mean": round(self.mean, 3),
            "min": self.min,
            **{f"p{percent}": self.percentile(percent) for percent in PERCENTILES},
            "max": self.max,
            "histogram": {"edges": edges, "counts": self.histogram(edges)},
        }
