"""From a dataset of encoded samples to a dataset of packs, in one call."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from packhorse.datasets.count_columns import CountColumns
from packhorse.datasets.lengths import Ints
from packhorse.datasets.meta import MetaDataset
from packhorse.datasets.robust import OnBad, ReplacingDataset
from packhorse.datasets.summary import MetaExamples
from packhorse.datasets.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import DATA_ERRORS, BadSample, ConfigError, is_data_error
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm.claims import load
from packhorse.neat_packing_vlm.dataset import OnOverflow, PackedDatasetWrapper, logger, not_encoded
from packhorse.neat_packing_vlm.judge import Judged, after_shift, judge
from packhorse.neat_packing_vlm.lengths import Lengths, lengths_of
from packhorse.neat_packing_vlm.pack_plan import PackPlan
from packhorse.neat_packing_vlm.plan import plan_packs
from packhorse.positions import RopeIndex
from packhorse.types import Drop, Reason


def pack_lengths(samples: Any, counts: CountColumns | None = None) -> Ints:
    """How many tokens of a pack each sample takes up: what :func:`neat_pack_dataset_vlm` plans with itself.

    That is one less than its ``input_ids`` has, for the shift of labels; the fake image of a sample without
    pictures is in it, and what truncation cuts is not. A row that could not be counted has 0.

    Args:
        samples: a :class:`packhorse.datasets.PreTokenizedDatasetWrapper`, or any dataset of encoded samples.
        counts: exact counts of the rows; without them those of ``packhorse count``, where there are any,
            else lengths are estimated (or, of encoded samples, measured).
    """
    return after_shift(lengths_of(samples, counts=counts).tokens)


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
            really are too long for it. What is known to be too long (by exact counts) is left out and
            recorded in any case.
        max_packs: keep no more packs than this, taken evenly from all of them; what is in the others is
            recorded.
        get_rope_index: for models with mRoPE: :func:`packhorse.positions.rope_index` of the model.
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
    found = lengths_of(dataset, ds_raw, processor, counts)
    judged = judge(dataset, found, pack_size, sequence_alignment, drop_long_samples)
    if plan is None:
        capacity = int(pack_size * packing_ratio)
        planned = _planned(judged, pack_size, capacity, sequence_alignment, seed)
        order = _order(planned, found, balance_media_tokens)
    else:
        planned = _given(plan, judged, pack_size, sequence_alignment)
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
        exact=found.exact and not bool(judged.doubtful.any()),
        on_bad=on_bad,
        seed=seed or 0,
        ledger=ledger,
    )
    _record(made, trained, judged, max_packs)
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
    try:
        first = load(dataset, 0) if len(dataset) else None
    except DATA_ERRORS as error:
        if not is_data_error(error):
            raise
        return  # whoever builds its pack records it
    if isinstance(first, Mapping) and "input_ids" not in first:
        raise not_encoded(dataset)


def _planned(judged: Judged, pack_size: int, capacity: int, alignment: int, seed: int | None) -> PackPlan:
    """The plan: what may be longer than the planned capacity, but is not left out, has a pack of its own."""
    room = capacity - capacity % alignment
    if room < 1:
        raise ConfigError(
            f"packs planned with {capacity} of {pack_size} tokens hold no document of {alignment}"
        )
    gone = judged.bad | judged.too_long
    planned = np.where(gone, pack_size + 1, np.minimum(judged.lengths, room))
    plan = plan_packs(planned, capacity, alignment=alignment, seed=seed, empty="keep")
    return plan.without(judged.bad, planned, "sample_failed")


def _given(
    plan: PackPlan | str | os.PathLike[str], judged: Judged, pack_size: int, alignment: int
) -> PackPlan:
    """A plan from elsewhere, without what can never be built.

    Raises:
        ConfigError: it is of other samples, or its packs are too large.
    """
    name = "the plan" if isinstance(plan, PackPlan) else os.fspath(plan)
    plan = plan if isinstance(plan, PackPlan) else PackPlan.load(plan)
    lengths = judged.lengths
    if plan.samples != len(lengths):
        raise ConfigError(
            f"{name} is one of {plan.samples:,} samples, the dataset has {len(lengths):,}: plan anew"
        )
    plan = plan.without(judged.bad, lengths, "sample_failed").without(judged.too_long, lengths, "too_long")
    # Estimates are no reason to refuse a plan: who made it may have known better.
    rooms = lengths + -lengths % alignment
    tokens = plan.sums(rooms) if judged.counts is not None else plan.tokens
    over = np.flatnonzero((tokens > pack_size) & (np.diff(plan.offsets) > 1))
    if len(over):
        raise ConfigError(
            f"pack {over[0]} of {name} has {tokens[over[0]]:,} tokens, for packs of {pack_size:,} "
            f"({len(over):,} of {len(plan):,} packs are too large): plan with "
            f"plan_packs(pack_lengths(dataset), {pack_size})"
        )
    return plan


def _order(plan: PackPlan, found: Lengths, balance: bool) -> npt.NDArray[np.integer]:
    if not balance or not found.visual.any():
        return np.arange(len(plan))
    return np.argsort(plan.sums(found.visual), kind="stable")


def _spread(packs: int, most: int | None) -> npt.NDArray[np.bool_]:
    """Which packs are kept: all, or ``most`` of them from the middles of equal parts."""
    if most is None or most >= packs:
        return np.ones(packs, bool)
    kept = np.zeros(packs, bool)
    if most:
        kept[(2 * np.arange(most, dtype=np.int64) + 1) * packs // (2 * most)] = True
    return kept


def _record(made: PackedDatasetWrapper, plan: PackPlan, judged: Judged, max_packs: int | None) -> None:
    """Write into the ledger why samples are in no pack, whichever pack is ever built.

    Raises:
        BadSample: ``on_bad="raise"``, and a row could not be counted.
    """
    details = {"over_limit": "alone over a limit of the plan", "empty_sample": "no tokens"}
    if max_packs is not None:
        details["left_over"] = f"beyond max_packs={max_packs}"
    found: Counter[Reason] = Counter()
    for reason, positions in plan.dropped_by_reason().items():
        for index in positions.tolist():
            key = made.sample_key(index)
            drop, detail = reason, details.get(reason, "the plan leaves it out")
            if judged.bad[index]:
                drop, detail = judged.why_bad(index, made.inner_dataset)
                if made.on_bad == "raise":
                    raise BadSample(detail, reason=drop, key=key, stage="plan")
            elif reason == "too_long":
                detail = judged.why_too_long(index)
            made.ledger.record(Drop(key, "plan", drop, detail, dataset=key.rpartition("/")[0]))
            found[drop] += 1
    for reason, number in found.items():
        logger.warning("%s of %s samples left out: %s", f"{number:,}", f"{plan.samples:,}", reason)
