"""From a dataset of encoded samples to a dataset of packs, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from packhorse.datasets.count_columns import CountColumns
from packhorse.datasets.robust import OnBad
from packhorse.errors import ConfigError
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm.dataset import OnOverflow, PackedDatasetWrapper, logger
from packhorse.neat_packing_vlm.lengths import Lengths, lengths_of
from packhorse.neat_packing_vlm.pack_plan import PackPlan
from packhorse.neat_packing_vlm.plan import plan_packs
from packhorse.positions import RopeIndex
from packhorse.types import Drop, Reason


class OrderedPacks(Sequence[npt.NDArray[np.integer]]):
    """The packs of a plan in another order; no pack is copied."""

    def __init__(self, plan: PackPlan, order: npt.NDArray[np.integer]) -> None:
        self.plan, self.order = plan, order

    def __len__(self) -> int:
        return len(self.order)

    @overload
    def __getitem__(self, pack: int) -> npt.NDArray[np.integer]: ...
    @overload
    def __getitem__(self, pack: slice) -> OrderedPacks: ...
    def __getitem__(self, pack: int | slice) -> npt.NDArray[np.integer] | OrderedPacks:
        if isinstance(pack, slice):
            return OrderedPacks(self.plan, self.order[pack])
        return self.plan[int(self.order[pack])]


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
) -> PackedDatasetWrapper:
    """Plan packs for a dataset and wrap it so that they are built when asked for.

    Args:
        dataset: a :class:`packhorse.datasets.PreTokenizedDatasetWrapper`, or any dataset of encoded samples.
        pack_size: the most tokens of a pack, after the shift.
        padding_idx: fills documents up to ``sequence_alignment``.
        drop_long_samples: leave out samples that seem to be longer than ``pack_size``, and record them. They
            get a pack of their own otherwise, and are recorded if they really are too long for it.
        max_packs: keep no more packs than this, taken evenly from all of them; what is in the others is
            recorded.
        get_rope_index: for models with mRoPE: :func:`packhorse.positions.rope_index` of the model.
        ds_raw: the rows, to estimate lengths from; without it, what ``dataset`` wraps.
        packing_ratio: plan with this share of ``pack_size``, to leave room for wrong estimates.
        processor: tells the geometry of media and finds the counts of ``packhorse count``; without it, the
            dataset's.
        balance_media_tokens: neighbouring packs carry similar numbers of media tokens.
        sequence_alignment: each document takes up a multiple of so many tokens.
        counts: exact counts, where the caller has them.
        on_overflow: see :class:`PackedDatasetWrapper`, like ``on_bad`` and ``ledger``.
        on_bad: see there.
        seed: deals samples of the same length at random, and chooses replacements; None for neither.
        ledger: see there.

    Returns:
        The packs. Counting or estimating lengths and planning is all that happened until now.

    Raises:
        ConfigError: a setting is out of range, or rows and samples are not equally many.
    """
    if not 0 < packing_ratio <= 1:
        raise ConfigError(f"{packing_ratio=}: expected more than 0 and at most 1")
    if max_packs is not None and max_packs < 0:
        raise ConfigError(f"{max_packs=}: expected 0 or more")
    found = lengths_of(dataset, ds_raw, processor, counts)
    # Labels are shifted before documents are joined, so each takes up one token less.
    lengths = np.maximum(found.tokens - 1, 0)
    too_long = lengths > pack_size - pack_size % sequence_alignment
    dropped = too_long & drop_long_samples
    plan = _planned(lengths, dropped, pack_size, int(pack_size * packing_ratio), sequence_alignment, seed)
    order = _order(plan, found, balance_media_tokens)
    kept = _spread(len(order), max_packs)
    packs = OrderedPacks(plan, order[kept])
    made = PackedDatasetWrapper(
        dataset,
        packs,
        pack_size,
        padding_idx,
        get_rope_index,
        sequence_alignment=sequence_alignment,
        on_overflow=on_overflow,
        exact=found.exact and not bool((too_long & ~dropped).any()),
        on_bad=on_bad,
        seed=seed or 0,
        ledger=ledger,
    )
    tokens = [
        f"{length + 1:,} tokens for packs of {pack_size:,}" for length in lengths[plan.dropped].tolist()
    ]
    _record(made, plan.dropped, "too_long", tokens)
    beyond = [index for pack in order[~kept] for index in plan[int(pack)].tolist()]
    _record(made, beyond, "left_over", [f"beyond max_packs={max_packs}"] * len(beyond))
    logger.info("%s", plan.describe(()))
    return made


def _planned(
    lengths: npt.NDArray[np.int64],
    dropped: npt.NDArray[np.bool_],
    pack_size: int,
    capacity: int,
    alignment: int,
    seed: int | None,
) -> PackPlan:
    """The plan: what is longer than the planned capacity, but not dropped, has a pack of its own."""
    room = capacity - capacity % alignment
    if room < 1:
        raise ConfigError(
            f"packs planned with {capacity} of {pack_size} tokens hold no document of {alignment}"
        )
    planned = np.where(dropped, pack_size + 1, np.minimum(lengths, room))
    return plan_packs(planned, capacity, alignment=alignment, seed=seed, empty="keep")


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


def _record(
    made: PackedDatasetWrapper, indices: Iterable[Any], reason: Reason, details: Sequence[str]
) -> None:
    for index, detail in zip(indices, details, strict=True):
        key = made.sample_key(int(index))
        made.ledger.record(Drop(key, "plan", reason, detail, dataset=key.rpartition("/")[0]))
    if details:
        logger.warning("%s samples left out: %s", f"{len(details):,}", reason)
