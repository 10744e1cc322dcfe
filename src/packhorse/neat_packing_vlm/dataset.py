"""Packs that are built when they are asked for, in DataLoader workers.

The constructor stores which samples go into which pack. Asking for a pack encodes its samples (which is
where the time goes), shifts and joins them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from logging import getLogger
from typing import Any, Literal, Protocol, get_args

from packhorse.datasets.robust import OnBad, ReplacingDataset
from packhorse.errors import DATA_ERRORS, BadSample, ConfigError, is_data_error
from packhorse.families import Family
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm.claims import Claims, load
from packhorse.neat_packing_vlm.pack import (
    _build_packed_vlm_sample,
    _compute_mrope_position_ids,
    _shift_sample,
)
from packhorse.neat_packing_vlm.pack_plan import PackPlan
from packhorse.positions import RopeIndex
from packhorse.types import Action, Drop

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

    def __init__(self, key: str, failures: Sequence[tuple[int, BaseException]]) -> None:
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
            :func:`packhorse.positions.rope_index` of the model, which leaves the weights at home).
        max_retries: with ``on_bad="replace"``: how many other packs are tried for one that is all bad.
        sequence_alignment: each document takes up a multiple of so many tokens (2 x the size of context
            parallelism).
        on_overflow: ``"carry"``, or ``"drop"``: leave out what does not fit, and record it. Without it:
            carried where lengths can be counted without encoding; ``"carry"`` encodes to learn them.
        exact: the bins were planned with exact lengths: nothing is counted.
        on_bad: what becomes of a pack with no usable sample: ``"replace"`` it by another pack, ``"skip"``
            it (``None``, which :meth:`robust_collate` takes out) or ``"raise"`` (which raises for a single
            bad sample too). Without it, as the inner dataset does.
        max_in_a_row: as for :class:`packhorse.datasets.RobustDatasetWrapper`, like ``seed`` and ``ledger``.

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
        max_in_a_row: int = 100,
        seed: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        if on_bad is None:
            on_bad = inner_dataset.on_bad if isinstance(inner_dataset, ReplacingDataset) else "replace"
        super().__init__(
            inner_dataset, max_retries, on_bad=on_bad, max_in_a_row=max_in_a_row, seed=seed, ledger=ledger
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
        self._claims = Claims(inner_dataset, encode=on_overflow == "carry")
        self._carries = on_overflow != "drop" and not exact and self._claims.can_tell
        if len(bins) and self.family is not None and self.family.mrope and not self.has_mrope:
            logger.warning(
                "%s models have positions in three rows: pass get_rope_index=packhorse.positions."
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
        chosen, left_out = self.dealt(idx)
        failures: list[tuple[int, BaseException]] = []
        for index in left_out:
            length = self._claims.lengths([index])[0]
            failures.append((index, self._no_room(idx, self._aligned(length - 1))))
        samples, used = [], 0
        for index in chosen:
            try:
                sample = self.prepared(load(self.inner_dataset, index))
            except DATA_ERRORS as error:
                if self.on_bad == "raise" or not is_data_error(error):
                    raise
                failures.append((index, error))
                continue
            room = self.room_of(sample)
            if used + room > self.pack_size:
                failures.append((index, self._no_room(idx, room, self.pack_size - used)))
                continue
            samples.append(sample)
            used += room
        if not samples:
            raise EmptyPack(self.key(idx), failures)
        for index, failure in failures:
            self._record_sample(index, failure)
        return self.joined(samples)

    def joined(self, samples: Sequence[dict[str, Any]], *, keep_parts: bool = False) -> dict[str, Any]:
        """A pack of samples as :meth:`sample` and :meth:`prepared` make them; they have to fit.

        With ``keep_parts``, pixels stay a list of the samples' own tensors, for a collater that copies them.
        """
        mrope = self.has_mrope and all("position_ids" in sample for sample in samples)
        return _build_packed_vlm_sample(
            samples,
            self.pack_size,
            self.padding_idx,
            mrope,
            self.sequence_alignment,
            family=self.family,
            keep_parts=keep_parts,
        )

    def dealt(self, idx: int) -> tuple[list[int], list[int]]:
        """The samples of a pack, its own and those it takes in, and its own that no pack has room for."""
        if not self._carries:
            return [int(index) for index in self.bins[idx]], []
        first = idx - idx % GROUP
        bins = tuple(tuple(int(i) for i in self.bins[n]) for n in range(first, min(first + GROUP, len(self))))
        rooms = {index: self._aligned(n - 1) for index, n in self._lengths(bins).items()}
        packs, left_out = _redealt(bins, tuple(rooms.items()), self.pack_size)
        return list(packs[idx - first]), list(left_out[idx - first])

    def _lengths(self, bins: Sequence[Sequence[int]]) -> dict[int, int]:
        indices = [index for bin_ in bins for index in bin_]
        return dict(zip(indices, self._claims.lengths(indices), strict=True))

    def record(self, idx: int | None, error: BaseException, more: str = "", *, replaced: bool) -> None:
        """Write into the ledger what became of the samples of a pack."""
        if isinstance(error, EmptyPack):
            for index, failure in error.failures:
                self._record_sample(index, failure, more, replaced=replaced)
        elif idx is not None:
            bad = error if isinstance(error, BadSample) else None
            what = bad.detail if bad else f"{type(error).__name__}: {error}"
            failure = BadSample(
                f"with pack {idx}: {what}{more}",
                reason=bad.reason if bad else "collate_failed",
                stage=bad.stage if bad else "collate",
            )
            for index in self.dealt(idx)[0]:
                self._enter(index, failure, "replaced" if replaced else "left_out")
        logger.warning("%s %s: %s%s", self.key(idx or 0), "replaced" if replaced else "left out", error, more)

    def room_of(self, sample: dict[str, Any]) -> int:
        """How many tokens of a pack a shifted sample takes up."""
        return self._aligned(len(sample["input_ids"].reshape(-1)))

    def sample(self, index: int) -> dict[str, Any] | None:
        """One sample, shifted and with its positions; None if it fails, which is recorded."""
        try:
            return self.prepared(load(self.inner_dataset, index))
        except DATA_ERRORS as error:
            if self.on_bad == "raise" or not is_data_error(error):
                raise
            self._record_sample(index, error)
            return None

    def _record_sample(
        self, index: int, error: BaseException, more: str = "", *, replaced: bool = False
    ) -> None:
        """Write into the ledger what became of one sample."""
        bad = error if isinstance(error, BadSample) else None
        if isinstance(self.inner_dataset, ReplacingDataset) and (bad is None or bad.stage != "plan"):
            self.inner_dataset.record(index, error, more, replaced=replaced)
            return
        what = (bad.detail if bad else f"{type(error).__name__}: {error}") + more
        failure = BadSample(
            what, reason=bad.reason if bad else "sample_failed", stage=bad.stage if bad else "encode"
        )
        self._enter(index, failure, "replaced" if replaced else "left_out")
        logger.warning("%s %s: %s", self.sample_key(index), "replaced" if replaced else "left out", what)

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

    def prepared(self, sample: Any) -> dict[str, Any]:
        """An encoded sample, shifted and with its positions.

        Raises:
            BadSample: it has no two tokens.
            ConfigError: it is not encoded.
        """
        if "input_ids" not in sample:
            raise not_encoded(self.inner_dataset)
        if len(sample["input_ids"].reshape(-1)) < 2:
            raise BadSample("a single token has no next one to learn", reason="empty_sample", stage="encode")
        positions = None
        if self.get_rope_index is not None:
            positions = _compute_mrope_position_ids(sample, self.get_rope_index)
        placed = dict(sample) if positions is None else {**sample, "position_ids": positions}
        if positions is None:
            placed.pop("position_ids", None)
        return _shift_sample(placed, has_mrope=positions is not None)

    def _aligned(self, length: int) -> int:
        return max(length, 0) + -max(length, 0) % self.sequence_alignment


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
    left_out: list[list[int]] = [[] for _ in bins]
    for number, index in sorted(over, key=lambda entry: -needs[entry[1]]):
        home = next((place for place, room in enumerate(left) if needs[index] <= room), None)
        if home is None:
            left_out[number].append(index)
        else:
            packs[home].append(index)
            left[home] -= needs[index]
    return packs, left_out
