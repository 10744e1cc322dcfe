"""Packing configurations: the arguments of packing as plain data, and ``build()``, which makes the packs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from logging import getLogger
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from packhorse.collate.packer import Packer, pack_to_dict, to_sample
from packhorse.count.columns import CountColumns
from packhorse.encode.robust import OnBad, ReplacingDataset, load_sample
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import BadSample, ConfigError, data_errors
from packhorse.families import Family
from packhorse.families.qwen_vl import RopeIndex
from packhorse.formats.meta import MetaDataset
from packhorse.formats.summary import MetaExamples
from packhorse.ledger import Ledger
from packhorse.plan.lengths import (
    Eligibility,
    LazyLengths,
    Lengths,
    after_shift,
    check_eligibility,
    sample_lengths,
)
from packhorse.plan.pack_plan import PackPlan
from packhorse.plan.planning import plan_packs
from packhorse.types import Action, Drop, Flags, Integers, Reason, Sample, Stage

logger = getLogger("packhorse.neat_packing_vlm")

OnOverflow = Literal["carry", "drop"]


class Bins(Protocol):
    """For each pack the indices of its samples: a list of lists, or a plan."""

    def __len__(self) -> int: ...
    def __getitem__(self, pack: int, /) -> Iterable[Any]: ...


GROUP = 4
"""Neighbouring packs that take in each other's overflow."""


class EmptyPack(BadSample):
    """A pack of which no sample could be used.

    Attributes:
        failures: each of its samples, and why. They are recorded when it is known what comes instead.
    """

    def __init__(self, key: str, failures: Sequence[tuple[int, BadSample]]) -> None:
        super().__init__(f"none of its {len(failures)} samples can be used", key=key, stage="encode")
        self.failures = failures


class PackedDatasetWrapper(ReplacingDataset):
    """A torch dataset of packs; :func:`neat_pack_dataset_vlm` plans and makes one.

    A sample that fails is taken out and recorded, and its pack goes on. Where lengths were estimated, a pack
    may turn out too full: what does not fit is carried over to a pack of the same group (``GROUP``
    neighbours) that has room, and recorded if none has. Who goes where depends on the bins and the samples
    alone, not on workers or the order of asking: the samples of a group are counted before one of its packs
    is built.

    Args:
        inner_dataset: a :class:`packhorse.datasets.PreTokenizedDatasetWrapper`, or any dataset of encoded
            samples.
        bins: for each pack the indices of its samples.
        pack_size: the most tokens of a pack, after the shift.
        padding_idx: fills documents up to ``sequence_alignment``.
        get_rope_index: ``model.model.get_rope_index`` for models with mRoPE (better
            :func:`packhorse.families.qwen_vl.rope_index` of the model, which leaves the weights at home).
        max_retries: with ``on_bad="replace"``: how many other packs are tried for one that is all bad.
        sequence_alignment: each document takes up a multiple of so many tokens (2 x the size of context
            parallelism).
        on_overflow: ``"carry"``, or ``"drop"``: leave out what does not fit, and record it. Without it:
            carried where lengths can be counted without encoding; ``"carry"`` encodes to learn them.
        exact: the bins were planned with exact lengths: nothing is counted.
        on_bad: what becomes of a pack with no usable sample: ``"replace"`` it by another pack, ``"skip"``
            it (``None``, which :meth:`robust_collate` takes out) or ``"raise"`` (which raises for a single
            bad sample too). Without it, as the inner dataset does.
        max_consecutive_bad: as for :class:`~packhorse.datasets.RobustDatasetWrapper`, like ``seed`` and
            ``ledger``.

    Attributes:
        has_mrope: whether positions are three rows.
        plan: the plan whose packs these are, in the order in which they are trained, and what is in none of
            them; None where ``bins`` were lists.
    """

    def __init__(
        self,
        inner_dataset: Any,
        bins: Bins,
        pack_size: int,
        padding_idx: int = 0,
        get_rope_index: RopeIndex | None = None,
        max_retries: int = 10,
        *,
        sequence_alignment: int = 1,
        on_overflow: OnOverflow | None = None,
        exact: bool = False,
        on_bad: OnBad | None = None,
        max_consecutive_bad: int = 100,
        seed: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        if on_bad is None:
            on_bad = inner_dataset.on_bad if isinstance(inner_dataset, ReplacingDataset) else "replace"
        super().__init__(
            inner_dataset,
            max_retries,
            on_bad=on_bad,
            max_consecutive_bad=max_consecutive_bad,
            seed=seed,
            ledger=ledger,
        )
        if on_overflow not in (None, *get_args(OnOverflow)):
            raise ConfigError(
                f"on_overflow={on_overflow!r}: expected one of {', '.join(get_args(OnOverflow))}"
            )
        if pack_size < 1 or sequence_alignment < 1:
            raise ConfigError(f"{pack_size=}, {sequence_alignment=}: expected at least 1")
        self.inner_dataset, self.bins, self.pack_size = inner_dataset, bins, pack_size
        self.plan: PackPlan | None = bins if isinstance(bins, PackPlan) else None
        self.padding_idx, self.get_rope_index = padding_idx, get_rope_index
        self.sequence_alignment, self.exact = sequence_alignment, exact
        self.has_mrope = get_rope_index is not None
        self.family: Family | None = getattr(inner_dataset, "family", None)
        self.packer = Packer(pack_size, padding_idx, get_rope_index, sequence_alignment, self.family)
        self._lazy_lengths = LazyLengths(inner_dataset, encode=on_overflow == "carry")
        self._carries = on_overflow != "drop" and not exact and self._lazy_lengths.available
        if len(bins) and self.family is not None and self.family.mrope and not self.has_mrope:
            logger.warning(
                "%s models have positions in three rows: pass get_rope_index=packhorse.families.qwen_vl."
                "rope_index(model), or packed training will differ from unpacked",
                self.family.name,
            )

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, pack_idx: int) -> Any:
        """The pack, its recorded replacement, or None if it is skipped."""
        return super().__getitem__(pack_idx)

    def set_epoch(self, epoch: int) -> None:
        """Another epoch chooses other replacements."""
        super().set_epoch(epoch)
        if hasattr(self.inner_dataset, "set_epoch"):
            self.inner_dataset.set_epoch(epoch)

    def key(self, idx: int) -> str:
        """The name of a pack in messages."""
        return f"pack/{idx}"

    def sample_key(self, index: int) -> str:
        """The name of a sample of the inner dataset in the ledger."""
        own = getattr(self.inner_dataset, "key", None)
        return str(own(index)) if callable(own) else str(index)

    def load(self, idx: int) -> dict[str, Any]:
        """Build one pack.

        Raises:
            EmptyPack: none of its samples can be used.
        """
        chosen, dropped = self.dealt(idx)
        failures: list[tuple[int, BadSample]] = []
        for index in dropped:
            length = self._lazy_lengths.lengths([index])[0]
            failures.append((index, self._no_room(idx, self.packer.padded_length(length - 1))))
        # A wrapper below knows no more than that reading failed.
        stage: Stage = "read" if isinstance(self.inner_dataset, ReplacingDataset) else "encode"
        samples: list[Sample] = []
        used = 0
        for index in chosen:
            with data_errors(self.on_bad, stage=stage) as outcome:
                sample = self._prepared(index)
            if outcome.error is not None:
                failures.append((index, outcome.error))
                continue
            room = self.packer.padded_length(len(sample))
            if used + room > self.pack_size:
                failures.append((index, self._no_room(idx, room, self.pack_size - used)))
                continue
            samples.append(sample)
            used += room
        if not samples:
            raise EmptyPack(self.key(idx), failures)
        for index, failure in failures:
            self._record_sample(index, failure)
        return pack_to_dict(self.packer.join(samples), self.family)

    def _prepared(self, index: int) -> Sample:
        sample = load_sample(self.inner_dataset, index)
        if "input_ids" not in sample:
            raise not_encoded(self.inner_dataset)
        return self.packer.prepare(to_sample(sample, self.family))

    def dealt(self, idx: int) -> tuple[list[int], list[int]]:
        """The samples of a pack, its own and those it takes in, and its own that no pack has room for."""
        if not self._carries:
            return [int(index) for index in self.bins[idx]], []
        first = idx - idx % GROUP
        bins = tuple(tuple(int(i) for i in self.bins[n]) for n in range(first, min(first + GROUP, len(self))))
        rooms = {index: self.packer.padded_length(n - 1) for index, n in self._lengths(bins).items()}
        packs, dropped = _redealt(bins, tuple(rooms.items()), self.pack_size)
        return list(packs[idx - first]), list(dropped[idx - first])

    def _lengths(self, bins: Sequence[Sequence[int]]) -> dict[int, int]:
        indices = [index for bin_ in bins for index in bin_]
        return dict(zip(indices, self._lazy_lengths.lengths(indices), strict=True))

    def record(self, idx: int | None, error: BadSample, more: str = "", *, replaced: bool = False) -> None:
        """Write into the ledger what became of the samples of a pack."""
        if isinstance(error, EmptyPack):
            for index, failure in error.failures:
                self._record_sample(index, failure, more, replaced=replaced)
        elif idx is not None:
            own = error.original is error
            failure = BadSample(
                f"with pack {idx}: {error.detail}{more}",
                reason=error.reason if own else "collate_failed",
                stage=error.stage if own else "collate",
            )
            for index in self.dealt(idx)[0]:
                self._enter(index, failure, "replaced" if replaced else "dropped")
        logger.warning("%s %s: %s%s", self.key(idx or 0), "replaced" if replaced else "dropped", error, more)

    def _record_sample(self, index: int, error: BadSample, more: str = "", *, replaced: bool = False) -> None:
        """Write into the ledger what became of one sample."""
        if isinstance(self.inner_dataset, ReplacingDataset) and error.stage != "plan":
            self.inner_dataset.record(index, error, more, replaced=replaced)
            return
        failure = BadSample(error.detail + more, reason=error.reason, stage=error.stage)
        action: Action = "replaced" if replaced else "dropped"
        self._enter(index, failure, action)
        logger.warning("%s %s: %s", self.sample_key(index), action, failure.detail)

    def _enter(self, index: int, failure: BadSample, action: Action) -> None:
        key = self.sample_key(index)
        dataset = key.rpartition("/")[0]
        entry = Drop(key, failure.stage, failure.reason, failure.detail, action, dataset, self.epoch)
        self.ledger.record(entry)

    def _no_room(self, idx: int, room: int, left: int | None = None) -> BadSample:
        """Why a sample of so many tokens is not in its pack."""
        if room > self.pack_size:
            detail = f"it takes up {room:,} tokens, for packs of {self.pack_size:,}"
            return BadSample(detail, reason="too_long", stage="plan")
        detail = f"no room in pack {idx} of {self.pack_size:,} tokens, nor in those beside it"
        if left is not None:
            detail = f"{room:,} tokens where pack {idx} has {left:,} left"
        return BadSample(detail, reason="pack_full", stage="plan")


def not_encoded(dataset: Any) -> ConfigError:
    """What to say where examples are to be packed."""
    return ConfigError(
        f"the samples of a {type(dataset).__name__} have no 'input_ids', and packs are made of encoded "
        "samples: wrap the examples, PreTokenizedDatasetWrapper(dataset, processor), and pack that"
    )


@lru_cache(maxsize=64)
def _redealt(
    bins: tuple[tuple[int, ...], ...], rooms: tuple[tuple[int, int], ...], capacity: int
) -> tuple[list[list[int]], list[list[int]]]:
    """The packs of a group, and for each the samples of its own that fit nowhere.

    Each pack first takes its own samples in their order; what does not fit goes, the longest first, to the
    first pack of the group that has room.
    """
    needs = dict(rooms)
    packs: list[list[int]] = []
    left: list[int] = []
    over: list[tuple[int, int]] = []
    for number, bin_ in enumerate(bins):
        own, room = [], capacity
        for index in bin_:
            if needs[index] <= room:
                own.append(index)
                room -= needs[index]
            else:
                over.append((number, index))
        packs.append(own)
        left.append(room)
    dropped: list[list[int]] = [[] for _ in bins]
    for number, index in sorted(over, key=lambda entry: -needs[entry[1]]):
        home = next((place for place, room in enumerate(left) if needs[index] <= room), None)
        if home is None:
            dropped[number].append(index)
        else:
            packs[home].append(index)
            left[home] -= needs[index]
    return packs, dropped


def pack_lengths(samples: Any, counts: CountColumns | None = None) -> Integers:
    """How many tokens of a pack each sample takes up: what :func:`neat_pack_dataset_vlm` plans with itself.

    That is one less than its ``input_ids`` has, for the shift of labels; the fake image of a sample without
    images is in it, and what truncation cuts is not. A row that could not be counted has 0.

    Args:
        samples: a :class:`packhorse.datasets.PreTokenizedDatasetWrapper`, or any dataset of encoded samples.
        counts: exact counts of the rows; without them those of ``packhorse count``, where there are any,
            else lengths are estimated (or, of encoded samples, measured).
    """
    return after_shift(sample_lengths(samples, counts=counts).tokens)


def neat_pack_dataset_vlm(
    dataset: Any,
    pack_size: int,
    padding_idx: int = 0,
    drop_long_samples: bool = False,
    max_packs: int | None = None,
    get_rope_index: RopeIndex | None = None,
    ds_raw: Any = None,
    packing_ratio: float = 1.0,
    processor: Any = None,
    balance_media_tokens: bool = True,
    *,
    sequence_alignment: int = 1,
    counts: CountColumns | None = None,
    on_overflow: OnOverflow | None = None,
    on_bad: OnBad | None = None,
    seed: int | None = None,
    ledger: Ledger | None = None,
    plan: PackPlan | str | os.PathLike[str] | None = None,
) -> PackedDatasetWrapper:
    """Plan packs for a dataset and wrap it so that they are built when asked for.

    Args:
        dataset: a :class:`packhorse.datasets.PreTokenizedDatasetWrapper`, or any dataset of encoded samples.
        pack_size: the most tokens of a pack, after the shift.
        padding_idx: fills documents up to ``sequence_alignment``.
        drop_long_samples: where lengths are estimated: leave out samples that seem to be longer than
            ``pack_size``, and record them. They get a pack of their own otherwise, and are recorded if they
            really are too long for it. What is known to be too long (by exact counts) is dropped and
            recorded in any case.
        max_packs: keep no more packs than this, taken evenly from all of them; what is in the others is
            recorded.
        get_rope_index: for models with mRoPE: :func:`packhorse.families.qwen_vl.rope_index` of the model.
        ds_raw: the rows, to estimate lengths from; without it, what ``dataset`` wraps.
        packing_ratio: plan with this share of ``pack_size``, to leave room for wrong estimates.
        processor: tells the geometry of media and finds the counts of ``packhorse count``; without it, the
            dataset's.
        balance_media_tokens: neighbouring packs carry similar numbers of media tokens.
        sequence_alignment: each document takes up a multiple of so many tokens.
        counts: exact counts, where the caller has them. Rows that could not be counted are in no pack; they
            are recorded with the reason that was found then.
        on_overflow: see :class:`PackedDatasetWrapper`, like ``on_bad`` and ``ledger``.
        on_bad: see there.
        seed: deals samples of the same length at random, and chooses replacements; None for neither.
        ledger: see there.
        plan: take these packs in their order (a plan, or the file of one) instead of planning: made with
            ``plan_packs(pack_lengths(dataset), pack_size)``.

    Returns:
        The packs; ``.plan`` says what is in them, and what is in none. Counting or estimating lengths and
        planning is all that happened until now.

    Raises:
        ConfigError: a setting is out of range, rows and samples are not equally many, the samples are not
            encoded, or a given plan is not one of these samples and packs.
        BadSample: ``on_bad="raise"``, and a row could not be counted.
    """
    if not 0 < packing_ratio <= 1:
        raise ConfigError(f"{packing_ratio=}: expected more than 0 and at most 1")
    if max_packs is not None and max_packs < 0:
        raise ConfigError(f"{max_packs=}: expected 0 or more")
    if plan is not None and packing_ratio != 1:
        raise ConfigError(
            f"{packing_ratio=} with a plan: that was planned already, with a capacity of its own"
        )
    _refuse_examples(dataset)
    found = sample_lengths(dataset, ds_raw, processor, counts)
    eligibility = check_eligibility(dataset, found, pack_size, sequence_alignment, drop_long_samples)
    if plan is None:
        capacity = int(pack_size * packing_ratio)
        planned = _planned(eligibility, pack_size, capacity, sequence_alignment, seed)
        order = _order(planned, found, balance_media_tokens)
    else:
        planned = _given(plan, eligibility, pack_size, sequence_alignment)
        order = np.arange(len(planned))
    trained = planned.in_order(order[_spread(len(order), max_packs)])
    made = PackedDatasetWrapper(
        dataset,
        trained,
        pack_size,
        padding_idx,
        get_rope_index,
        sequence_alignment=sequence_alignment,
        on_overflow=on_overflow,
        exact=found.all_exact and not bool(eligibility.doubtful.any()),
        on_bad=on_bad,
        seed=seed or 0,
        ledger=ledger,
    )
    _record(made, trained, eligibility, max_packs)
    logger.info("%s", trained.describe(()))
    return made


def _refuse_examples(dataset: Any) -> None:
    """Say at once that samples are not encoded; asks for one where the class does not tell.

    Raises:
        ConfigError: they are not.
    """
    if isinstance(dataset, PreTokenizedDatasetWrapper):
        return
    wrapped = dataset.dataset if isinstance(dataset, ReplacingDataset) else dataset
    if isinstance(wrapped, MetaDataset | MetaExamples):
        raise not_encoded(wrapped)
    with data_errors() as outcome:
        first = load_sample(dataset, 0) if len(dataset) else None
    # A sample that fails is recorded when its pack is built.
    if outcome.error is None and isinstance(first, Mapping) and "input_ids" not in first:
        raise not_encoded(dataset)


def _planned(found: Eligibility, pack_size: int, capacity: int, alignment: int, seed: int | None) -> PackPlan:
    """The plan: what may be longer than the planned capacity, but is not dropped, has a pack of its own."""
    longest = capacity - capacity % alignment
    if longest < 1:
        raise ConfigError(
            f"packs planned with {capacity} of {pack_size} tokens hold no document of {alignment}"
        )
    gone = found.bad | found.too_long
    planned = np.where(gone, pack_size + 1, np.minimum(found.lengths, longest))
    plan = plan_packs(planned, capacity, alignment=alignment, seed=seed, empty="keep")
    return plan.without(found.bad, planned, "sample_failed")


def _given(
    plan: PackPlan | str | os.PathLike[str], found: Eligibility, pack_size: int, alignment: int
) -> PackPlan:
    """A plan from elsewhere, without what can never be built.

    Raises:
        ConfigError: it is of other samples, or its packs are too large.
    """
    name = "the plan" if isinstance(plan, PackPlan) else os.fspath(plan)
    plan = plan if isinstance(plan, PackPlan) else PackPlan.load(plan)
    lengths = found.lengths
    if plan.samples != len(lengths):
        raise ConfigError(
            f"{name} is one of {plan.samples:,} samples, the dataset has {len(lengths):,}: plan anew"
        )
    plan = plan.without(found.bad, lengths, "sample_failed").without(found.too_long, lengths, "too_long")
    # Estimates are no reason to refuse a plan: who made it may have known better.
    rooms = lengths + -lengths % alignment
    tokens = plan.sums(rooms) if found.counts is not None else plan.tokens
    over = np.flatnonzero((tokens > pack_size) & (np.diff(plan.offsets) > 1))
    if len(over):
        raise ConfigError(
            f"pack {over[0]} of {name} has {tokens[over[0]]:,} tokens, for packs of {pack_size:,} "
            f"({len(over):,} of {len(plan):,} packs are too large): plan with "
            f"plan_packs(pack_lengths(dataset), {pack_size})"
        )
    return plan


def _order(plan: PackPlan, found: Lengths, balance: bool) -> npt.NDArray[np.integer]:
    if not balance or not found.media.any():
        return np.arange(len(plan))
    return np.argsort(plan.sums(found.media), kind="stable")


def _spread(packs: int, most: int | None) -> Flags:
    """Which packs are kept: all, or ``most`` of them from the middles of equal parts."""
    if most is None or most >= packs:
        return np.ones(packs, bool)
    kept = np.zeros(packs, bool)
    if most:
        kept[(2 * np.arange(most, dtype=np.int64) + 1) * packs // (2 * most)] = True
    return kept


def _record(made: PackedDatasetWrapper, plan: PackPlan, found: Eligibility, max_packs: int | None) -> None:
    """Write into the ledger why samples are in no pack, whichever pack is ever built.

    Raises:
        BadSample: ``on_bad="raise"``, and a row could not be counted.
    """
    details = {"over_limit": "alone over a limit of the plan", "empty_sample": "no tokens"}
    if max_packs is not None:
        details["left_over"] = f"beyond max_packs={max_packs}"
    dropped: Counter[Reason] = Counter()
    for reason, positions in plan.dropped_by_reason().items():
        for index in positions.tolist():
            key = made.sample_key(index)
            drop, detail = reason, details.get(reason, "the plan leaves it out")
            if found.bad[index]:
                drop, detail = found.bad_reason(index, made.inner_dataset)
                if made.on_bad == "raise":
                    raise BadSample(detail, reason=drop, key=key, stage="plan")
            elif reason == "too_long":
                detail = found.overlong_reason(index)
            made.ledger.record(Drop(key, "plan", drop, detail, dataset=key.rpartition("/")[0]))
            dropped[drop] += 1
    for reason, number in dropped.items():
        logger.warning("%s of %s samples dropped: %s", f"{number:,}", f"{plan.samples:,}", reason)


PackingFormat = Literal["neat", "thd"]


@dataclass(slots=True)
class PackedDatasetWrapperConfig:
    """Settings of :class:`PackedDatasetWrapper`; each field is its argument of the same name."""

    pack_size: int = 2048
    sequence_alignment: int = 1
    max_retries: int = 10

    def build(
        self,
        inner_dataset: Any,
        bins: Bins,
        padding_idx: int = 0,
        get_rope_index: RopeIndex | None = None,
    ) -> PackedDatasetWrapper:
        """Wrap a dataset of encoded samples; nothing is encoded yet."""
        return PackedDatasetWrapper(
            inner_dataset,
            bins,
            self.pack_size,
            padding_idx,
            get_rope_index,
            self.max_retries,
            sequence_alignment=self.sequence_alignment,
        )


@dataclass(slots=True)
class NeatPackConfig:
    """Settings of :func:`neat_pack_dataset_vlm` and of the collate function for its packs.

    Args:
        pack_size: see :func:`neat_pack_dataset_vlm`, like the next four.
        drop_long_samples: see there.
        max_packs: see there.
        packing_ratio: see there.
        balance_media_tokens: see there.
        collate_max_length: pad every batch to this many tokens; None pads to its longest pack.
        attn_implementation: what the model's decoder runs with; None is ``"sdpa"``.
        packing_format: ``"neat"`` for models of transformers, ``"thd"`` for Transformer Engine.

    The last three are for :func:`packhorse.collate_fns.packed_collater`.
    """

    pack_size: int = 2048
    drop_long_samples: bool = False
    max_packs: int | None = None
    packing_ratio: float = 1.0
    balance_media_tokens: bool = True
    collate_max_length: int | None = None
    attn_implementation: str | None = None
    packing_format: PackingFormat = "neat"

    def __post_init__(self) -> None:
        if self.packing_format not in get_args(PackingFormat):
            raise ConfigError(f"packing_format={self.packing_format!r}: expected 'neat' or 'thd'")

    def build(
        self,
        dataset: Any,
        padding_idx: int = 0,
        get_rope_index: RopeIndex | None = None,
        ds_raw: Any = None,
        processor: Any = None,
        *,
        sequence_alignment: int = 1,
    ) -> PackedDatasetWrapper:
        """Plan packs for a dataset of encoded samples; nothing is encoded yet."""
        return neat_pack_dataset_vlm(
            dataset,
            self.pack_size,
            padding_idx,
            self.drop_long_samples,
            self.max_packs,
            get_rope_index,
            ds_raw,
            self.packing_ratio,
            processor,
            self.balance_media_tokens,
            sequence_alignment=sequence_alignment,
        )
