"""Which samples can be in no pack, as far as that is known before one is built: bad rows, too long ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.count.columns import CountColumns
from packhorse.count.token_counter import TokenCounter
from packhorse.encode.preparation import with_sound_in_place
from packhorse.encode.robust import ReplacingDataset
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import DATA_ERRORS, BadSample, ConfigError, is_data_error
from packhorse.families.processors import as_processor
from packhorse.formats.conversation import parse_conversation
from packhorse.formats.estimate import estimate, image_config, outline, video_config
from packhorse.formats.example_media import inject_fake_image
from packhorse.plan.row_lengths import Ints, examples_at, recorded_counts
from packhorse.types import Conversation, Reason

_PLAIN = [
    {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "So."}]},
]


class Lengths(NamedTuple):
    """What the planner is told.

    Attributes:
        tokens: of each sample, before the shift; 0 where the row cannot be read.
        visual: those of its media.
        exact: whether all are what the processor makes.
        counts: what they were taken from; None where they are estimated.
    """

    tokens: Ints
    visual: Ints
    exact: bool
    counts: CountColumns | None = None


def lengths_of(
    dataset: Any, ds_raw: Any = None, processor: Any = None, counts: CountColumns | None = None
) -> Lengths:
    """The lengths of a dataset's samples.

    Args:
        dataset: encodes them.
        ds_raw: their rows; without it what one of Packhorse's own wrappers wraps, or the dataset itself (any
            other wrapper is asked for all of its samples, which may encode them).
        processor: for the geometry of media and to find counts; without it the dataset's.
        counts: exact counts of the rows.

    Raises:
        ConfigError: rows or counts are not as many as samples.
    """
    # Only these are known to have the samples of what they wrap, in its order: a Subset has others.
    wrapped = dataset.dataset if isinstance(dataset, ReplacingDataset) else dataset
    raw = wrapped if ds_raw is None else ds_raw
    processor = getattr(dataset, "processor", None) if processor is None else processor
    processor = as_processor(processor)
    counts = recorded_counts(raw, processor) if counts is None else counts
    for what, found in (("ds_raw", raw), ("counts", counts)):
        if found is not None and len(found) != len(dataset):
            raise ConfigError(f"{what} has {len(found):,} rows for a dataset of {len(dataset):,} samples")
    if counts is None:
        tokens, visual, plain = _estimated(raw, processor)
        exact = False
    else:
        tokens, visual = counts.total, counts.image + counts.video + counts.audio
        plain = (counts.images + counts.videos == 0) & counts.ok
        exact = bool(counts.exact[counts.ok].all())
    fake = _fake_image(dataset) if plain.any() else 0
    if fake:
        # Where its newlines melt with the text's the fake image takes a token more or less.
        tokens, exact = tokens + fake * plain, False
    if isinstance(dataset, PreTokenizedDatasetWrapper):
        exact = exact and dataset.post_tokenize_hook is None
        limit = dataset.max_length
        if dataset.truncate and limit is not None and (tokens > limit).any():
            # Whole turns are cut, so these have at most so many.
            tokens, visual, exact = np.minimum(tokens, limit), np.minimum(visual, limit), False
    return Lengths(tokens, visual, exact, counts)


def _estimated(raw: Any, processor: Any) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
    image_cfg, video_cfg = image_config(processor), video_config(processor)
    tokens, visual = np.zeros(len(raw), np.int64), np.zeros(len(raw), np.int64)
    plain = np.zeros(len(raw), bool)
    for place, row in examples_at(raw, np.arange(len(raw), dtype=np.int64)):
        if row is None:
            continue  # it cannot be read
        if row.get("input_ids") is not None:
            tokens[place] = np.asarray(row["input_ids"]).size
            continue
        found, seen = estimate(row, image_cfg, video_cfg), outline(row)
        tokens[place], visual[place] = found.text + found.media, found.media
        plain[place] = seen.images + seen.videos == 0
    return tokens, visual, plain


def _fake_image(dataset: Any) -> int:
    """How many tokens the fake image adds to a sample without pictures; 0 where none is added."""
    if not isinstance(dataset, PreTokenizedDatasetWrapper) or not dataset.inject_fake_images:
        return 0
    if "image" not in dataset.family.kinds:
        return 0
    counter = TokenCounter(dataset.encoder)
    example: dict[str, Any] = {"conversation": _PLAIN}
    with suppress(BadSample):  # a template that wants other turns: the packs find room for what it adds
        with_it, without = (
            counter.count(parse_conversation(shown, "")).count.total
            for shown in (inject_fake_image(example), example)
        )
        return with_it - without
    return 0


_UNKNOWN = -1


class Claims:
    """Lengths of samples, before the shift, as far as they can be had without encoding.

    Args:
        dataset: the encoding dataset.
        encode: where lengths cannot be counted, encode samples to learn them (dear: each is encoded again
            for every pack that has to know).
    """

    def __init__(self, dataset: Any, *, encode: bool = False) -> None:
        self.dataset, self.encode = dataset, encode
        self.countable = _countable(dataset)
        self._known: np.ndarray[Any, Any] | None = None
        self._counter: TokenCounter | None = None

    @property
    def can_tell(self) -> bool:
        """Whether lengths can be had at all."""
        return self.countable or self.encode

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """The tokens of each sample; 0 for one that cannot be used."""
        if self._known is None:
            self._known = np.full(len(self.dataset), _UNKNOWN, np.int32)
        for index in indices:
            if self._known[index] == _UNKNOWN:
                self._known[index] = self._counted(index) if self.countable else self._encoded(index)
        return [int(self._known[index]) for index in indices]

    def total(self, index: int) -> int:
        """The tokens of a sample before anything is cut or refused; 0 if it cannot be encoded.

        Only where samples are ``countable``.
        """
        if self._counter is None:
            self._counter = TokenCounter(self.dataset.encoder)
        try:
            return self._counter.count(self._conversation(index)).count.total
        except DATA_ERRORS as error:
            if not is_data_error(error):
                raise
            return 0  # encoding it fails too, and says why

    def _counted(self, index: int) -> int:
        total, limit = self.total(index), self.dataset.max_length
        if limit is None or total <= limit:
            return total
        return int(limit) if self.dataset.truncate else 0

    def _conversation(self, index: int) -> Conversation:
        """What is encoded for a sample, its fake image included."""
        dataset, key = self.dataset, self.dataset.key(index)
        example = with_sound_in_place(dataset.dataset[index], dataset.encoder, key)
        if dataset.inject_fake_images and "image" in dataset.family.kinds:
            example = inject_fake_image(example)
        return parse_conversation(example, key)

    def _encoded(self, index: int) -> int:
        try:
            sample = load(self.dataset, index)
        except DATA_ERRORS as error:
            if not is_data_error(error):
                raise
            return 0
        return len(sample["input_ids"].reshape(-1))

    def __getstate__(self) -> dict[str, Any]:
        # What was counted is counted again where it is needed: cheaper than sending it to every worker.
        return {**self.__dict__, "_known": None, "_counter": None}


def load(dataset: Any, index: int) -> Any:
    """One sample, without the replacement that a dataset of ours would choose for one that fails.

    Raises:
        BadSample: the dataset gives None for it.
    """
    own = getattr(dataset, "load", None)
    sample = own(index) if callable(own) else dataset[index]
    if sample is None:
        raise BadSample("the dataset gives no sample", reason="sample_failed", stage="encode")
    return sample


def _countable(dataset: Any) -> bool:
    if not isinstance(dataset, PreTokenizedDatasetWrapper):
        return False
    return bool(dataset.family.exact) and dataset.post_tokenize_hook is None


Flags = npt.NDArray[np.bool_]

FOUND_WHEN_COUNTED = "found when it was counted"
"""What the ledger adds where a row is bad already before a plan is made."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The samples of a dataset, before they are planned.

    Attributes:
        lengths: tokens that each takes up in a pack.
        bad: rows that could not be counted.
        too_long: samples that are left out because no pack (or ``max_length``) holds them.
        doubtful: samples that seem to be so, and stay until they are encoded.
        room: the longest that a pack holds.
        counts: exact counts; None where lengths are estimated.
        limit: the most tokens that the dataset encodes; None for no limit.
    """

    lengths: Ints
    bad: Flags
    too_long: Flags
    doubtful: Flags
    room: int
    counts: CountColumns | None = None
    limit: int | None = None

    def why_bad(self, index: int, dataset: Any) -> tuple[Reason, str]:
        """The reason and the detail of a bad row, with its place in the file where the dataset tells."""
        assert self.counts is not None, "only counts tell that a row is bad"
        reason: Reason = self.counts.status[index]
        locations = getattr(getattr(dataset, "dataset", None), "locations", None)
        place = f"; {locations([index])[0]}" if callable(locations) else ""
        return reason, f"{self.counts.detail[index]} ({FOUND_WHEN_COUNTED}){place}"

    def why_too_long(self, index: int) -> str:
        """The detail of a sample that is too long."""
        length = int(self.lengths[index])
        about = "" if self.counts is not None else "an estimated "
        if length <= self.room and self.limit is not None and length + 1 > self.limit:
            return f"{about}{length + 1:,} tokens are more than max_length={self.limit:,}"
        return f"{about}{length + 1:,} tokens ({length:,} after the shift) for packs of {self.room:,}"


def after_shift(tokens: Ints) -> Ints:
    """Labels are shifted before documents are joined, so each takes up one token less."""
    return np.maximum(tokens - 1, 0)


def judge(dataset: Any, found: Lengths, pack_size: int, alignment: int, drop_long: bool) -> Judged:
    """Tell the samples that can be in no pack.

    Args:
        dataset: encodes them.
        found: their lengths, before the shift.
        pack_size: the most tokens of a pack.
        alignment: each sample takes up a multiple of so many.
        drop_long: leave out what only seems to be too long, too.
    """
    room = pack_size - pack_size % alignment
    if found.counts is None:
        lengths = after_shift(found.tokens)
        seems = lengths > room
        nobody = np.zeros(len(lengths), bool)
        return Judged(lengths, nobody, seems & drop_long, seems & (not drop_long), room)
    tokens, surely, limit = _counted(dataset, found.tokens, found.counts, room)
    lengths, bad = after_shift(tokens), ~found.counts.ok
    seems = (lengths > room) & ~bad
    too_long = surely | (seems & drop_long)
    return Judged(lengths, bad, too_long, seems & ~too_long, room, found.counts, limit)


def _counted(dataset: Any, tokens: Ints, counts: CountColumns, room: int) -> tuple[Ints, Flags, int | None]:
    """Tokens, which samples are surely too long, and what the dataset refuses beyond.

    What the fake image adds is known up to a token or two, so samples near the limit are counted with it.
    """
    ours = isinstance(dataset, PreTokenizedDatasetWrapper)
    if ours and dataset.post_tokenize_hook is not None:  # which may add or take away any number
        return tokens, np.zeros(len(tokens), bool), None
    least = np.where(counts.exact, counts.total, np.where(counts.off_by < 0, 0, counts.total - counts.off_by))
    limit = dataset.max_length if ours else None
    if limit is not None and dataset.truncate:
        least, limit = np.where(counts.total > limit, 0, least), None
    most = room + 1 if limit is None else min(room + 1, limit)
    surely = counts.ok & (least > most)
    near = np.flatnonzero((tokens > most) & ~surely & counts.ok & (least > 0))
    claims = Claims(dataset)
    if len(near) and claims.countable:
        tokens = tokens.copy()
        for index in near.tolist():
            total = claims.total(index)
            if total:
                tokens[index], surely[index] = total, total > most
    return tokens, surely, limit
