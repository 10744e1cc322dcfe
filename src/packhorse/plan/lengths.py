"""Look up how long samples are, from the best source for each row, without encoding.

Sources, the best first: lengths that the caller gives, the sidecar of ``packhorse count``, the row's own
fields, an estimate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from logging import getLogger
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset, Subset

from packhorse.chat import Processor
from packhorse.count.columns import CountColumns
from packhorse.count.sidecar import counts_of, is_counted
from packhorse.count.token_counter import TokenCounter
from packhorse.encode.robust import ReplacingDataset, load_sample
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import BadSample, ConfigError, data_errors
from packhorse.families.models import as_processor
from packhorse.formats.conversation import parse_conversation
from packhorse.formats.estimate import (
    ColumnsBuilder,
    Geometry,
    LengthColumns,
    estimate_lengths,
    image_config,
    outline,
    video_config,
)
from packhorse.formats.example_media import inject_fake_image
from packhorse.formats.meta import MetaDataset, RowKeys
from packhorse.formats.summary import MetaExamples
from packhorse.types import Conversation, Flags, Integers, Reason, Rows
from packhorse.utils.progress import Progress

logger = getLogger("packhorse.datasets")

Counts = CountColumns | LengthColumns | npt.ArrayLike

SOURCES = ("given", "sidecar", "row fields", "estimate", "unknown")
"""Where a length comes from, the best first. An unknown length (the row cannot be read) is 0."""
GIVEN, SIDECAR, FIELDS, ESTIMATE, UNKNOWN = range(len(SOURCES))

_ROWS_COMPARED = 16
_REPORT_EVERY = 1024
_PLAIN = [
    {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "So."}]},
]


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of samples, one entry each.

    Attributes:
        tokens: before the label shift; 0 if the row cannot be read.
        media: those of its media.
        exact: whether that is what the processor makes of it.
        text_only: whether a readable row has neither image nor video.
        source: a position in ``SOURCES``.
        counts: what the lengths were taken from; None if some are estimated.
    """

    tokens: Integers
    media: Integers
    exact: Flags
    text_only: Flags
    source: npt.NDArray[np.uint8]
    counts: CountColumns | None = None

    @classmethod
    def of(cls, counts: CountColumns, source: int) -> Lengths:
        """Take the lengths from exact counts."""
        media = counts.image + counts.video + counts.audio
        text_only = (counts.images + counts.videos == 0) & counts.ok
        sources = np.where(counts.ok, source, UNKNOWN).astype(np.uint8)
        return cls(counts.total, media, counts.exact, text_only, sources, counts)

    @classmethod
    def join(cls, parts: Sequence[Lengths], order: Integers) -> Lengths:
        """Concatenate parts, then take their entries in this order."""
        counts = [part.counts for part in parts if part.counts is not None]
        names = ("tokens", "media", "exact", "text_only", "source")
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts])[order] for name in names
        }
        if len(counts) == len(parts):
            columns["counts"] = CountColumns.concat(counts).take(order)
        return cls(**columns)

    @property
    def all_exact(self) -> bool:
        """Whether every row that could be counted has an exact length."""
        return self.counts is not None and bool(self.exact[self.counts.ok].all())

    @property
    def sources(self) -> Counter[str]:
        """Number of rows by source."""
        rows = np.bincount(self.source, minlength=len(SOURCES)).tolist()
        return Counter({name: count for name, count in zip(SOURCES, rows, strict=True) if count})


def after_shift(tokens: Integers) -> Integers:
    """Return lengths after the label shift, which takes one token of each document."""
    return np.maximum(tokens - 1, 0)


def row_lengths(
    dataset: Rows,
    processor: Processor | str | None = None,
    image_cfg: Geometry | None = None,
    video_cfg: Geometry | None = None,
    *,
    counts: Counts | None = None,
    unwrap: bool = True,
) -> Lengths:
    """Look up the lengths of a dataset's rows, which were counted with ``processor``.

    The geometries are for estimates. Plain numbers as ``counts`` are not assumed to be exact; their number
    has to be that of the rows. ``unwrap`` looks at the rows inside wrappers, ``Subset`` and
    ``ConcatDataset``, so that no sample is encoded for its length.
    """
    if counts is not None:
        return _given_lengths(counts, len(dataset), image_cfg, video_cfg)
    rows = np.arange(len(dataset), dtype=np.int64)
    parts = list(_inner_rows(dataset, rows, rows)) if unwrap else [(dataset, rows, rows)]
    lengths = []
    for inner, rows_of_part, _ in parts:
        if (recorded := recorded_counts(inner, processor)) is not None:
            lengths.append(Lengths.of(recorded.take(rows_of_part), SIDECAR))
        else:
            report = Progress("estimating lengths", len(rows_of_part))
            lengths.append(estimated_lengths(inner, rows_of_part, image_cfg, video_cfg, report))
    positions = np.concatenate([positions for *_, positions in parts])
    return lengths[0] if len(parts) == 1 else Lengths.join(lengths, np.argsort(positions))


def _given_lengths(
    counts: Counts, rows: int, image_cfg: Geometry | None, video_cfg: Geometry | None
) -> Lengths:
    source = GIVEN
    if isinstance(counts, CountColumns):
        lengths = counts.total
    elif isinstance(counts, LengthColumns):
        lengths, source = estimate_lengths(counts, image_cfg, video_cfg).total, ESTIMATE
    else:
        lengths = np.asarray(counts)
    if lengths.shape != (rows,) or lengths.dtype.kind not in "iu":
        problem = (
            f"counts= is of shape {lengths.shape} and type {lengths.dtype}: expected one integer for each"
        )
        raise ConfigError(f"{problem} of the {rows} rows", setting="counts", value=lengths.shape)
    if isinstance(counts, CountColumns):
        return Lengths.of(counts, source)
    no, zeros = np.zeros(rows, np.bool_), np.zeros(rows, np.int64)
    return Lengths(lengths.astype(np.int64), zeros, no, no, np.full(rows, source, np.uint8))


def estimated_lengths(
    dataset: Rows,
    rows: Integers,
    image_cfg: Geometry | None,
    video_cfg: Geometry | None,
    report: Callable[[int], None],
) -> Lengths:
    """Estimate the lengths of these rows; samples that are encoded already are measured."""
    columns = ColumnsBuilder()
    positions, readable = np.empty(len(rows), np.int64), np.zeros(len(rows), np.bool_)
    text_only = readable.copy()
    for number, (position, row) in enumerate(_examples_at(dataset, rows)):
        positions[number], readable[number] = position, row is not None
        ids = () if row is None else row.get("input_ids")
        if ids is None:
            seen = outline(row)
            text_only[number] = not seen.images + seen.videos
            columns.add(row, seen)
        else:
            columns.add({"_text_tokens": np.asarray(ids).size, "_media_tokens": 0})
        if (number + 1) % _REPORT_EVERY == 0 or number + 1 == len(rows):
            report(number + 1)
    total, media, from_fields = estimate_lengths(columns.columns(), image_cfg, video_cfg)
    source = np.where(readable, np.where(from_fields, FIELDS, ESTIMATE), UNKNOWN).astype(np.uint8)
    lengths = Lengths(total, media, np.zeros(len(rows), np.bool_), text_only, source)
    return Lengths.join([lengths], np.argsort(positions))


def recorded_counts(dataset: Rows, processor: Processor | str | None) -> CountColumns | None:
    """Return the exact counts of a mixture whose files have all been counted; None if there are none.

    Logs why count files that exist are not used. What :func:`~packhorse.datasets.open_meta_dataset` and
    :func:`~packhorse.datasets.make_meta_dataset` return is known to be a mixture, if it has no wrapper.
    """
    mixture: MetaDataset | None = dataset if isinstance(dataset, MetaDataset) else None
    positions: Integers | None = None
    if isinstance(dataset, MetaExamples):
        mixture, positions = _mixture_of(dataset) or (None, None)
    if mixture is None:
        return None
    processor = as_processor(processor)
    if not any(hasattr(processor, name) for name in ("tokenizer", "convert_tokens_to_ids")):
        # None, or an object with nothing but a geometry: no rows were counted with it.
        if is_counted(mixture):
            logger.warning(
                "there are count files for this data, but lengths are estimated: no processor %s. Pass the "
                "one that the rows were counted with as processor=",
                "was given" if processor is None else "with a tokenizer was given",
            )
        return None
    counts = counts_of(mixture, processor)
    return counts if counts is None or positions is None else counts.take(positions)


def _mixture_of(examples: MetaExamples) -> tuple[MetaDataset, Integers] | None:
    """Return the mixture that a list was loaded from, and the position of each example in it.

    None if the list has changed since: a list can be shuffled or filtered, so some of its examples are
    compared with the files.
    """
    keys = getattr(examples, "key", None)
    if not isinstance(keys, RowKeys) or len(examples) != len(keys):
        return None
    mixture, positions = keys.mixture, keys.mixture_indices()
    for number in np.linspace(0, len(examples) - 1, min(len(examples), _ROWS_COMPARED)).astype(int).tolist():
        if examples[number].get("conversation") != mixture[int(positions[number])]["conversation"]:
            return None
    return mixture, positions


def _examples_at(dataset: Rows, rows: Integers) -> Iterator[tuple[int, Any]]:
    """Yield positions in ``rows`` with the examples there; None for a row that cannot be read.

    A mixture is read file by file, which is several times faster. Unreadable rows are recorded when they are
    loaded.
    """
    if not isinstance(dataset, MetaDataset):
        for position, row in enumerate(rows.tolist()):
            with data_errors() as outcome:
                example = dataset[row]
            yield position, None if outcome.error else example
        return
    first = 0
    for source in dataset.sources:
        positions = np.flatnonzero((rows >= first) & (rows < first + len(source)))
        inside = (rows[positions] - first).tolist()
        first += len(source)
        read = source.file.read(source.selection.row(number) for number in inside)
        for position, number, row in zip(positions.tolist(), inside, read, strict=True):
            try:
                example = source.convert(row, source.key(number), dataset.ledger)
            except BadSample:
                example = None
            yield position, example


def _inner_rows(
    dataset: Any, rows: Integers, positions: Integers
) -> Iterator[tuple[Any, Integers, Integers]]:
    """Yield the datasets inside wrappers with their rows, and the positions of these in the outermost one."""
    if isinstance(dataset, ConcatDataset):
        first = 0
        for part, end in zip(dataset.datasets, dataset.cumulative_sizes, strict=True):
            inside = (rows >= first) & (rows < end)
            yield from _inner_rows(part, rows[inside] - first, positions[inside])
            first = end
    elif isinstance(dataset, Subset):
        yield from _inner_rows(dataset.dataset, np.asarray(dataset.indices, np.int64)[rows], positions)
    elif (inner := wrapped_dataset(dataset)) is not None:
        yield from _inner_rows(inner, rows, positions)
    else:
        yield dataset, rows, positions


def wrapped_dataset(dataset: Rows) -> Any:
    """Return what a wrapper wraps if it has the same number of rows, else None."""
    inner = getattr(dataset, "dataset", None)
    if inner is None or not hasattr(inner, "__getitem__") or not hasattr(inner, "__len__"):
        return None
    return inner if len(inner) == len(dataset) else None


def sample_lengths(
    dataset: Rows,
    ds_raw: Rows | None = None,
    processor: Processor | str | None = None,
    counts: CountColumns | None = None,
) -> Lengths:
    """Look up the lengths of the samples that a dataset encodes: fake images added, long samples truncated.

    Without ``ds_raw`` the rows are what one of Packhorse's own wrappers wraps, or the dataset itself (any
    other wrapper returns all its samples, which may encode them). Raises :class:`ConfigError` if rows or
    counts differ in number from samples.
    """
    # Only these are known to have the samples of what they wrap, in its order: a Subset has others.
    wrapped = dataset.dataset if isinstance(dataset, ReplacingDataset) else dataset
    raw = wrapped if ds_raw is None else ds_raw
    processor = as_processor(getattr(dataset, "processor", None) if processor is None else processor)
    for what, rows in (("ds_raw", raw), ("counts", counts)):
        if rows is not None and len(rows) != len(dataset):
            problem = f"{what} has {len(rows):,} rows for a dataset of {len(dataset):,} samples"
            raise ConfigError(problem, setting=what, value=len(rows))
    configs = image_config(processor), video_config(processor)
    lengths = row_lengths(raw, processor, *configs, counts=counts, unwrap=False)
    if lengths.text_only.any() and (fake := _fake_image_tokens(dataset)):
        # A fake image takes a token more or less if its newlines merge with those of the text.
        tokens = lengths.tokens + fake * lengths.text_only
        lengths = replace(lengths, tokens=tokens, exact=lengths.exact & ~lengths.text_only)
    if isinstance(dataset, PreTokenizedDatasetWrapper):
        if dataset.post_tokenize_hook is not None:  # which may add or remove tokens
            lengths = replace(lengths, exact=np.zeros(len(dataset), np.bool_))
        limit = dataset.max_length
        if dataset.truncate and limit is not None and (long := lengths.tokens > limit).any():
            # Whole turns are cut, so these have at most this many.
            tokens, media = np.minimum(lengths.tokens, limit), np.minimum(lengths.media, limit)
            lengths = replace(lengths, tokens=tokens, media=media, exact=lengths.exact & ~long)
    return lengths


def _fake_image_tokens(dataset: Rows) -> int:
    """Return the tokens that a fake image adds to a sample without images; 0 if none is added."""
    if not isinstance(dataset, PreTokenizedDatasetWrapper) or not dataset.inject_fake_images:
        return 0
    family = dataset.family
    if "image" not in family.kinds:
        return 0
    counter = TokenCounter(dataset.encoder)
    example: dict[str, Any] = {"conversation": _PLAIN}
    with suppress(BadSample):  # a template that needs other turns: overflow handling covers what is added
        with_image, without = (
            counter.count(parse_conversation(shown, "")).count.total
            for shown in (inject_fake_image(example), example)
        )
        return with_image - without
    return 0


class LazyLengths:
    """Counts the tokens of single samples, before the label shift, on access.

    Args:
        dataset: the encoding dataset.
        encode: encode samples whose length cannot be counted (expensive: each is encoded once more for every
            pack that needs it).

    Attributes:
        countable: whether lengths can be counted without encoding.
        available: whether lengths can be determined at all.
    """

    def __init__(self, dataset: Rows, *, encode: bool = False) -> None:
        self.dataset, self._wrapper = dataset, None
        if isinstance(dataset, PreTokenizedDatasetWrapper) and dataset.post_tokenize_hook is None:
            self._wrapper = dataset if dataset.family.exact else None
        self.countable = self._wrapper is not None
        self.available = self.countable or encode
        self._known: npt.NDArray[np.int32] | None = None
        self._counter: TokenCounter | None = None

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Return the tokens of each sample; 0 for one that cannot be used."""
        if self._known is None:
            self._known = np.full(len(self.dataset), -1, np.int32)
        limit = None if self._wrapper is None else self._wrapper.max_length
        for index in indices:
            if self._known[index] < 0:
                total = self.total(index)
                if self._wrapper is not None and limit is not None and total > limit:
                    total = limit if self._wrapper.truncate else 0
                self._known[index] = total
        return [int(self._known[index]) for index in indices]

    def total(self, index: int) -> int:
        """Return the tokens of a sample, of a countable one before truncation; 0 if it cannot be encoded."""
        with data_errors():
            if self._wrapper is None:
                return len(load_sample(self.dataset, index)["input_ids"].reshape(-1))
            if self._counter is None:
                self._counter = TokenCounter(self._wrapper.encoder)
            return self._counter.count(_encoded_conversation(self._wrapper, index)).count.total
        return 0  # encoding raises the same error, and records it

    def __getstate__(self) -> dict[str, Any]:
        # Recounting in a worker is cheaper than sending the counts to each of them.
        return {**self.__dict__, "_known": None, "_counter": None}


def _encoded_conversation(dataset: PreTokenizedDatasetWrapper, index: int) -> Conversation:
    """Return what is encoded for a sample, its fake image included."""
    key = dataset.key(index)
    example = dataset.encoder.place_audio(dataset.dataset[index], key)
    if dataset.inject_fake_images and "image" in dataset.family.kinds:
        example = inject_fake_image(example)
    return parse_conversation(example, key)


# Which samples can be packed.

FOUND_WHEN_COUNTED = "found when it was counted"
"""In the ledger, after the detail of a row that was bad before planning."""


@dataclass(frozen=True, slots=True)
class Eligibility:
    """Which samples of a dataset can be packed.

    Attributes:
        lengths: tokens that each takes up in a pack.
        bad: rows that could not be counted.
        too_long: samples that are excluded because they exceed a pack (or ``max_length``).
        doubtful: samples that seem to be too long, and stay until they are encoded.
        capacity: the longest sample that a pack holds.
        counts: exact counts; None if lengths are estimated.
        limit: the most tokens that the dataset encodes; None for no limit.
    """

    lengths: Integers
    bad: Flags
    too_long: Flags
    doubtful: Flags
    capacity: int
    counts: CountColumns | None = None
    limit: int | None = None

    def bad_reason(self, index: int, dataset: Rows) -> tuple[Reason, str]:
        """Return the reason and the detail of a bad row, with its location in the file if known."""
        assert self.counts is not None, "without counts no row is known to be bad"
        reason: Reason = self.counts.status[index]
        locations = getattr(getattr(dataset, "dataset", None), "locations", None)
        location = f"; {locations([index])[0]}" if callable(locations) else ""
        return reason, f"{self.counts.detail[index]} ({FOUND_WHEN_COUNTED}){location}"

    def overlong_reason(self, index: int) -> str:
        """Return the detail of a sample that is too long."""
        length = int(self.lengths[index])
        about = "" if self.counts is not None else "an estimated "
        if length <= self.capacity and self.limit is not None and length + 1 > self.limit:
            return f"{about}{length + 1:,} tokens are more than max_length={self.limit:,}"
        return f"{about}{length + 1:,} tokens ({length:,} after the shift) for packs of {self.capacity:,}"


def check_eligibility(
    dataset: Rows, lengths: Lengths, pack_size: int, alignment: int, drop_long: bool
) -> Eligibility:
    """Find the samples that can be in no pack; ``drop_long``: also those that only seem to be too long."""
    capacity = pack_size - pack_size % alignment
    tokens, limit = lengths.tokens, None
    bad = surely = np.zeros(len(tokens), np.bool_)
    if lengths.counts is not None:
        bad = ~lengths.counts.ok
        tokens, surely, limit = _surely_too_long(dataset, tokens, lengths.counts, capacity)
    shifted = after_shift(tokens)
    seems = (shifted > capacity) & ~bad
    too_long = surely | (seems & drop_long)
    return Eligibility(shifted, bad, too_long, seems & ~too_long, capacity, lengths.counts, limit)


def _surely_too_long(
    dataset: Rows, tokens: Integers, counts: CountColumns, capacity: int
) -> tuple[Integers, Flags, int | None]:
    """Return tokens, which samples are surely too long, and the most tokens that the dataset accepts.

    The tokens of the fake image are known up to one or two, so samples near the limit are counted with it.
    """
    wrapper = dataset if isinstance(dataset, PreTokenizedDatasetWrapper) else None
    if wrapper is not None and wrapper.post_tokenize_hook is not None:  # which may add or remove any number
        return tokens, np.zeros(len(tokens), np.bool_), None
    least = np.where(counts.exact, counts.total, np.where(counts.off_by < 0, 0, counts.total - counts.off_by))
    limit = None if wrapper is None else wrapper.max_length
    if wrapper is not None and limit is not None and wrapper.truncate:
        least, limit = np.where(counts.total > limit, 0, least), None
    most = capacity + 1 if limit is None else min(capacity + 1, limit)
    surely = counts.ok & (least > most)
    near = np.flatnonzero((tokens > most) & ~surely & counts.ok & (least > 0))
    lazy = LazyLengths(dataset)
    if len(near) and lazy.countable:
        tokens = tokens.copy()
        for index in near.tolist():
            if total := lazy.total(index):
                tokens[index], surely[index] = total, total > most
    return tokens, surely, limit
