"""A dataset of packs, and :func:`neat_pack_dataset_vlm`, which plans the packs of a dataset."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from logging import getLogger
from typing import Any, Literal, Protocol, get_args

import numpy as np

from packhorse.chat import Processor
from packhorse.collate.packer import Packer, pack_to_dict, to_sample
from packhorse.count.columns import CountColumns
from packhorse.encode.robust import OnBad, ReplacingDataset, dataset_key, load_sample
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import BadSample, ConfigError, data_errors, suggest
from packhorse.families import Family
from packhorse.families.qwen_vl import RopeIndex
from packhorse.formats.meta import MetaDataset
from packhorse.formats.summary import MetaExamples
from packhorse.ledger import Ledger
from packhorse.plan.lengths import Eligibility, LazyLengths, after_shift, check_eligibility, sample_lengths
from packhorse.plan.pack_plan import PackPlan
from packhorse.plan.planning import plan_packs
from packhorse.types import Action, Drop, Integers, Reason, Sample, Stage

logger = getLogger("packhorse.neat_packing_vlm")

OnOverflow = Literal["carry", "drop"]


class Bins(Protocol):
    """For each pack the indices of its samples: a list of lists, or a plan."""

    def __len__(self) -> int: ...
    def __getitem__(self, pack: int, /) -> Iterable[Any]: ...


GROUP = 4
"""Number of neighbouring packs that share their overflow."""


class EmptyPack(BadSample):
    """No sample of a pack can be used.

    Attributes:
        failures: each of its samples, and why. They are recorded once the replacement is known.
    """

    def __init__(self, key: str, failures: Sequence[tuple[int, BadSample]]) -> None:
        super().__init__(f"none of its {len(failures)} samples can be used", key=key, stage="encode")
        self.failures = failures


class PackedDatasetWrapper(ReplacingDataset):
    """A torch dataset of packs; :func:`neat_pack_dataset_vlm` plans and returns one.

    A sample that fails is dropped from its pack and recorded. If lengths were estimated, a pack may overflow:
    what does not fit is carried over to a pack of the same group (``GROUP`` neighbours) with free space, and
    recorded if there is none. The result depends on bins and samples alone, not on workers or the order of
    access: the samples of a group are counted before one of its packs is built.

    Args:
        inner_dataset: a :class:`packhorse.datasets.PreTokenizedDatasetWrapper`, or any dataset of encoded
            samples.
        bins: for each pack the indices of its samples.
        pack_size: the maximum number of tokens of a pack, after the shift.
        padding_idx: pads documents to ``sequence_alignment``.
        get_rope_index: ``model.model.get_rope_index`` for models with mRoPE (better
            :func:`packhorse.families.qwen_vl.rope_index` of the model, which holds no weights).
        max_retries: with ``on_bad="replace"``: how many other packs are tried for one that is all bad.
        sequence_alignment: each document is padded to a multiple of this many tokens (2 x the size of context
            parallelism).
        on_overflow: ``"carry"``, or ``"drop"``: drop and record what does not fit. None carries if lengths
            can be counted without encoding; ``"carry"`` encodes to count them.
        exact: the bins were planned with exact lengths: nothing is counted.
        on_bad: for a pack without a usable sample: ``"replace"`` it by another pack, ``"skip"`` it (``None``,
            which :meth:`robust_collate` removes) or ``"raise"`` (which raises for a single bad sample too).
            None is the value of the inner dataset.
        max_consecutive_bad: as for :class:`~packhorse.datasets.RobustDatasetWrapper`, like ``seed`` and
            ``ledger``.

    Attributes:
        has_mrope: whether positions are three rows.
        plan: the plan with these packs, in training order, and the excluded samples; None if ``bins`` were
            lists.
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
            choices = get_args(OnOverflow)
            expected = f"expected one of {', '.join(choices)}{suggest(on_overflow, choices)}"
            raise ConfigError.of("on_overflow", on_overflow, expected)
        for name, number in (("pack_size", pack_size), ("sequence_alignment", sequence_alignment)):
            if number < 1:
                raise ConfigError.of(name, number, "expected at least 1")
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
        """Return the pack, its recorded replacement, or None if it is skipped."""
        return super().__getitem__(pack_idx)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which selects the replacements."""
        super().set_epoch(epoch)
        if hasattr(self.inner_dataset, "set_epoch"):
            self.inner_dataset.set_epoch(epoch)

    def key(self, idx: int) -> str:
        """Return the name of a pack for messages."""
        return f"pack/{idx}"

    def sample_key(self, index: int) -> str:
        """Return the key of a sample of the inner dataset for the ledger."""
        return dataset_key(self.inner_dataset, index)

    def load(self, idx: int) -> dict[str, Any]:
        """Build one pack; raise :class:`EmptyPack` if none of its samples can be used."""
        chosen, dropped = self.pack_samples(idx)
        failures: list[tuple[int, BadSample]] = []
        for index in dropped:
            length = self._lazy_lengths.lengths([index])[0]
            failures.append((index, self._overflow(idx, self.packer.padded_length(length - 1))))
        # As a ReplacingDataset records a sample that it cannot load.
        stage: Stage = "read" if isinstance(self.inner_dataset, ReplacingDataset) else "encode"
        samples: list[Sample] = []
        used = 0
        for index in chosen:
            with data_errors(self.on_bad, stage=stage) as outcome:
                values = load_sample(self.inner_dataset, index)
                if "input_ids" not in values:
                    raise not_encoded(self.inner_dataset)
                sample = self.packer.prepare(to_sample(values, self.family))
            if outcome.error is not None:
                failures.append((index, outcome.error))
                continue
            length = self.packer.padded_length(len(sample))
            if used + length > self.pack_size:
                failures.append((index, self._overflow(idx, length, self.pack_size - used)))
                continue
            samples.append(sample)
            used += length
        if not samples:
            raise EmptyPack(self.key(idx), failures)
        for index, failure in failures:
            self._record_sample(index, failure)
        return pack_to_dict(self.packer.join(samples), self.family)

    def pack_samples(self, idx: int) -> tuple[list[int], list[int]]:
        """Return the samples of a pack, with those carried over to it, and its samples that fit nowhere."""
        if not self._carries:
            return [int(index) for index in self.bins[idx]], []
        first = idx - idx % GROUP
        bins = tuple(tuple(int(i) for i in self.bins[n]) for n in range(first, min(first + GROUP, len(self))))
        indices = [index for pack in bins for index in pack]
        lengths = (self.packer.padded_length(n - 1) for n in self._lazy_lengths.lengths(indices))
        packs, dropped = _carry_over(bins, tuple(zip(indices, lengths, strict=True)), self.pack_size)
        return list(packs[idx - first]), list(dropped[idx - first])

    def record(self, idx: int | None, error: BadSample, more: str = "", *, replaced: bool = False) -> None:
        """Record what happened to the samples of a pack; an unknown one (None) is an entry without key."""
        if isinstance(error, EmptyPack):
            for index, failure in error.failures:
                self._record_sample(index, failure, more, replaced=replaced)
        elif idx is None:
            super().record(None, error, more, replaced=replaced)
            return
        else:
            own = error.original is error
            failure = BadSample(
                f"with pack {idx}: {error.detail}{more}",
                reason=error.reason if own else "collate_failed",
                stage=error.stage if own else "collate",
            )
            for index in self.pack_samples(idx)[0]:
                self._enter(index, failure, "replaced" if replaced else "dropped")
        name = "a pack" if idx is None else self.key(idx)
        logger.warning("%s %s: %s%s", name, "replaced" if replaced else "dropped", error, more)

    def _record_sample(self, index: int, error: BadSample, more: str = "", *, replaced: bool = False) -> None:
        """Record what happened to one sample."""
        if isinstance(self.inner_dataset, ReplacingDataset) and error.stage != "plan":
            self.inner_dataset.record(index, error, more, replaced=replaced)
            return
        failure = BadSample(error.detail + more, reason=error.reason, stage=error.stage)
        action: Action = "replaced" if replaced else "dropped"
        self._enter(index, failure, action)
        logger.warning("%s %s: %s", self.sample_key(index), action, failure.detail)

    def _enter(self, index: int, failure: BadSample, action: Action) -> None:
        key, detail = self.sample_key(index), failure.detail
        drop = Drop.from_key(key, failure.stage, failure.reason, detail, action, epoch=self.epoch)
        self.ledger.record(drop)

    def _overflow(self, idx: int, length: int, left: int | None = None) -> BadSample:
        """Return why a sample of this padded length is not in its pack."""
        if length > self.pack_size:
            detail = f"sample needs {length:,} tokens, packs have {self.pack_size:,}"
            return BadSample(detail, reason="too_long", stage="plan")
        detail = f"no space in pack {idx} of {self.pack_size:,} tokens, nor in its neighbours"
        if left is not None:
            detail = f"sample needs {length:,} tokens, pack {idx} has {left:,} left"
        return BadSample(detail, reason="pack_full", stage="plan")


def not_encoded(dataset: Any) -> ConfigError:
    """Return the error for a dataset of raw examples."""
    why = "its samples have no 'input_ids', pack PreTokenizedDatasetWrapper(dataset, processor)"
    return ConfigError.of("dataset", type(dataset).__name__, why)


@lru_cache(maxsize=64)
def _carry_over(
    bins: tuple[tuple[int, ...], ...], lengths: tuple[tuple[int, int], ...], capacity: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the packs of a group, and for each pack its samples that fit nowhere.

    Each pack first gets its own samples in order; the others go, longest first, to the first pack of the
    group with enough space.
    """
    length_of = dict(lengths)
    packs: list[list[int]] = [[] for _ in bins]
    free = [capacity] * len(bins)
    overflow: list[tuple[int, int]] = []
    for pack, indices in enumerate(bins):
        for index in indices:
            if length_of[index] <= free[pack]:
                packs[pack].append(index)
                free[pack] -= length_of[index]
            else:
                overflow.append((pack, index))
    dropped: list[list[int]] = [[] for _ in bins]
    for pack, index in sorted(overflow, key=lambda entry: -length_of[entry[1]]):
        target = next((number for number, space in enumerate(free) if length_of[index] <= space), None)
        if target is None:
            dropped[pack].append(index)
        else:
            packs[target].append(index)
            free[target] -= length_of[index]
    return packs, dropped


def pack_lengths(samples: Any, counts: CountColumns | None = None) -> Integers:
    """Return the lengths with which :func:`neat_pack_dataset_vlm` plans.

    That is one less than the ``input_ids`` of each sample, for the label shift; the fake image of a sample
    without images counts, tokens that truncation cuts do not. A row that could not be counted has 0.

    Args:
        samples: a :class:`packhorse.datasets.PreTokenizedDatasetWrapper`, or any dataset of encoded samples.
        counts: exact counts of the rows; None for those of ``packhorse count``, if there are any; otherwise
            lengths are estimated (or, of encoded samples, measured).
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
    processor: Processor | None = None,
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
    """Plan packs for a dataset and wrap it, so that packs are built on access.

    Args:
        dataset: a :class:`packhorse.datasets.PreTokenizedDatasetWrapper`, or any dataset of encoded samples.
        pack_size: the maximum number of tokens of a pack, after the shift.
        padding_idx: pads documents to ``sequence_alignment``.
        drop_long_samples: if lengths are estimated: drop and record samples that seem longer than
            ``pack_size``. Otherwise each gets its own pack and is recorded if it is too long for it. Samples
            that exact counts show to be too long are dropped and recorded in any case.
        max_packs: the maximum number of packs, taken evenly from all of them; samples of the others are
            recorded.
        get_rope_index: for models with mRoPE: :func:`packhorse.families.qwen_vl.rope_index` of the model.
        ds_raw: the rows, to estimate lengths from; None for the dataset that ``dataset`` wraps.
        packing_ratio: plan with this share of ``pack_size``, a margin for wrong estimates.
        processor: for the geometry of media and the counts of ``packhorse count``; None for the dataset's.
        balance_media_tokens: neighbouring packs have similar numbers of media tokens.
        sequence_alignment: each document is padded to a multiple of this many tokens.
        counts: exact counts, if the caller has them. Rows that could not be counted are in no pack; they are
            recorded with the reason of the count.
        on_overflow: see :class:`PackedDatasetWrapper`, like ``on_bad`` and ``ledger``.
        on_bad: see there.
        seed: shuffles samples of the same length, and selects replacements; None for neither.
        ledger: see there.
        plan: use these packs in their order (a plan, or the file of one) instead of planning: from
            ``plan_packs(pack_lengths(dataset), pack_size)``.

    Returns:
        The packs; ``.plan`` has their samples and the excluded ones. Lengths are counted or estimated, but no
        sample is encoded yet.

    Raises:
        ConfigError: a setting is out of range, rows and samples differ in number, the samples are not
            encoded, or a given plan does not match these samples and packs.
        BadSample: ``on_bad="raise"``, and a row could not be counted.
    """
    if not 0 < packing_ratio <= 1:
        raise ConfigError.of("packing_ratio", packing_ratio, "expected more than 0 and at most 1")
    if max_packs is not None and max_packs < 0:
        raise ConfigError.of("max_packs", max_packs, "expected 0 or more")
    if plan is not None and packing_ratio != 1:
        remedy = "the plan has a capacity of its own, remove packing_ratio"
        raise ConfigError.of("packing_ratio", packing_ratio, remedy)
    _check_encoded(dataset)
    lengths = sample_lengths(dataset, ds_raw, processor, counts)
    eligibility = check_eligibility(dataset, lengths, pack_size, sequence_alignment, drop_long_samples)
    if plan is None:
        capacity = int(pack_size * packing_ratio)
        full_plan = _make_plan(eligibility, pack_size, capacity, sequence_alignment, seed)
        if balance_media_tokens and lengths.media.any():
            full_plan = full_plan.in_order(np.argsort(full_plan.sums(lengths.media), kind="stable"))
    else:
        full_plan = _read_plan(plan, eligibility, pack_size, sequence_alignment)
    final_plan = full_plan.in_order(_select_packs(len(full_plan), max_packs))
    packed = PackedDatasetWrapper(
        dataset,
        final_plan,
        pack_size,
        padding_idx,
        get_rope_index,
        sequence_alignment=sequence_alignment,
        on_overflow=on_overflow,
        exact=lengths.all_exact and not bool(eligibility.doubtful.any()),
        on_bad=on_bad,
        seed=seed or 0,
        ledger=ledger,
    )
    _record_excluded(packed, final_plan, eligibility, max_packs)
    logger.info("%s", final_plan.describe(()))
    return packed


def _check_encoded(dataset: Any) -> None:
    """Raise a ConfigError if samples are not encoded; loads one if the class is unknown."""
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


def _make_plan(
    eligibility: Eligibility, pack_size: int, capacity: int, alignment: int, seed: int | None
) -> PackPlan:
    """Plan packs; a sample that may be longer than the capacity but is not dropped gets its own pack."""
    longest = capacity - capacity % alignment
    if longest < 1:
        expected = f"expected at most {capacity}, the tokens that packs of {pack_size} are planned with"
        raise ConfigError.of("sequence_alignment", alignment, expected)
    excluded = eligibility.bad | eligibility.too_long
    lengths = np.where(excluded, pack_size + 1, np.minimum(eligibility.lengths, longest))
    plan = plan_packs(lengths, capacity, alignment=alignment, seed=seed, empty="keep")
    return plan.without(eligibility.bad, lengths, "sample_failed")


def _read_plan(
    plan: PackPlan | str | os.PathLike[str], eligibility: Eligibility, pack_size: int, alignment: int
) -> PackPlan:
    """Return a given plan without the samples that cannot be in a pack; raise if it is for other packs."""
    path = "" if isinstance(plan, PackPlan) else os.fspath(plan)
    name = path or "the plan"
    plan = plan if isinstance(plan, PackPlan) else PackPlan.load(plan)
    lengths = eligibility.lengths
    if plan.samples != len(lengths):
        what = f"{name} has {plan.samples:,} samples, the dataset has {len(lengths):,}: plan this dataset"
        raise ConfigError(what, setting="plan", path=path)
    plan = plan.without(eligibility.bad, lengths, "sample_failed")
    plan = plan.without(eligibility.too_long, lengths, "too_long")
    # Estimates are no reason to reject a plan: its author may have had exact lengths.
    exact = eligibility.counts is not None
    tokens = plan.sums(lengths + -lengths % alignment) if exact else plan.tokens
    over = np.flatnonzero((tokens > pack_size) & (np.diff(plan.offsets) > 1))
    if len(over):
        what = (
            f"{len(over):,} of {len(plan):,} packs of {name} are too large for packs of {pack_size:,} (pack "
        )
        what += (
            f"{over[0]} has {tokens[over[0]]:,} tokens): use plan_packs(pack_lengths(dataset), {pack_size})"
        )
        raise ConfigError(what, setting="plan", path=path)
    return plan


def _select_packs(packs: int, max_packs: int | None) -> Integers:
    """Return which packs are kept: all, or ``max_packs`` of them from the middles of equal parts."""
    if max_packs is None or max_packs >= packs:
        return np.arange(packs)
    return (2 * np.arange(max_packs) + 1) * packs // (2 * max(max_packs, 1))


def _record_excluded(
    packed: PackedDatasetWrapper, plan: PackPlan, eligibility: Eligibility, max_packs: int | None
) -> None:
    """Record why samples are in no pack; ``on_bad="raise"`` raises if a row could not be counted."""
    details = {"over_limit": "alone over a limit of the plan", "empty_sample": "no tokens"}
    if max_packs is not None:
        details["left_over"] = f"beyond max_packs={max_packs}"
    dropped: Counter[Reason] = Counter()
    for reason, positions in plan.dropped_by_reason().items():
        for index in positions.tolist():
            key = packed.sample_key(index)
            drop, detail = reason, details.get(reason, "the plan excludes it")
            if eligibility.bad[index]:
                drop, detail = eligibility.bad_reason(index, packed.inner_dataset)
                if packed.on_bad == "raise":
                    raise BadSample(detail, reason=drop, key=key, stage="plan")
            elif reason == "too_long":
                detail = eligibility.overlong_reason(index)
            packed.ledger.record(Drop.from_key(key, "plan", drop, detail))
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
        self, inner_dataset: Any, bins: Bins, padding_idx: int = 0, get_rope_index: RopeIndex | None = None
    ) -> PackedDatasetWrapper:
        """Wrap a dataset of encoded samples; no sample is encoded yet."""
        return PackedDatasetWrapper(
            inner_dataset, bins, padding_idx=padding_idx, get_rope_index=get_rope_index, **asdict(self)
        )


@dataclass(slots=True)
class NeatPackConfig:
    """Settings of :func:`neat_pack_dataset_vlm` and of the collate function for its packs.

    Args:
        pack_size: see :func:`neat_pack_dataset_vlm`, like ``drop_long_samples``, ``max_packs``,
            ``packing_ratio`` and ``balance_media_tokens``.
        collate_max_length: the length of every batch; None pads to its longest pack. Like the next two, for
            :func:`packhorse.collate_fns.packed_collater`.
        attn_implementation: the attention of the model's decoder; None is ``"sdpa"``.
        packing_format: ``"neat"`` for models of transformers, ``"thd"`` for Transformer Engine.
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
            raise ConfigError.of("packing_format", self.packing_format, "expected 'neat' or 'thd'")

    def build(
        self,
        dataset: Any,
        padding_idx: int = 0,
        get_rope_index: RopeIndex | None = None,
        ds_raw: Any = None,
        processor: Processor | None = None,
        *,
        sequence_alignment: int = 1,
    ) -> PackedDatasetWrapper:
        """Plan packs for a dataset of encoded samples; no sample is encoded yet."""
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
