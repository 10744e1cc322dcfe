"""The plan of each epoch: from counts to packs, what is dropped of them, and the name of all of it.

The same on every rank: it depends on the counts and the settings alone. Kept in the cache, so that a second
start (and every other process of the machine) maps it from a file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from packhorse.count.columns import CountColumns
from packhorse.count.contents import Content
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import BadSample, ConfigError
from packhorse.formats.meta import MetaDataset
from packhorse.loader.config import LoaderConfig
from packhorse.plan.cost_model import CostWeights, media_masks, sample_costs
from packhorse.plan.eligibility import FOUND_WHEN_COUNTED
from packhorse.plan.lengths import after_shift
from packhorse.plan.pack_plan import DROP_REASONS, PackPlan
from packhorse.plan.planning import plan_key, plan_packs
from packhorse.plan.schedule import SampleInfo
from packhorse.types import MEDIA_KINDS, Drop, MediaMask, Reason
from packhorse.utils.files import cache_folder, cache_lock, digest

logger = getLogger("packhorse.loader")

Integers = npt.NDArray[np.int64]
# A row is mended in its file; these may be mended without changing it.
_MAY_HAVE_ARRIVED = ("missing_media", "broken_media", "media_too_large", "row_too_large")
_ORDER = 1  # goes up when the same plan is dealt in another order
_CACHED_FROM = 50_000  # planning fewer samples is quicker than reading a file


def sample_capacity(config: LoaderConfig, reserve: int = 0) -> int:
    """The longest sample (after the shift) that fits into a pack of which ``reserve`` tokens stay free."""
    size = config.pack_size - reserve
    return size - size % config.alignment


class Planner:
    """Plans the epochs of a dataset.

    Args:
        counts: of every row; those that are not ``ok`` are in no plan.
        samples: encodes the rows; gives their names and datasets here.
        config: the settings.
        weights: what tokens and patches cost.
        reserve: tokens of each pack that stay free for a placeholder (:mod:`packhorse.loader.placeholder`),
            unless every pack of an epoch has media of all ``reserved_mask``.
        reserved_mask: the media of that placeholder.
        contents: digests of the rows; two datasets with the same counts differ in them.

    Attributes:
        sample_info: what the schedule has to know of the samples.
        name: names the plan of every epoch: two loaders with the same name feed the same packs.
    """

    def __init__(
        self,
        counts: CountColumns,
        samples: PreTokenizedDatasetWrapper,
        config: LoaderConfig,
        weights: CostWeights,
        *,
        reserve: int = 0,
        reserved_mask: MediaMask = MediaMask.NONE,
        contents: Sequence[Content] = (),
    ) -> None:
        self.counts, self.samples, self.config, self.weights = counts, samples, config, weights
        self.reserve, self.reserved_mask = reserve, reserved_mask if reserve else MediaMask.NONE
        self.dataset_ids, self.contents = _dataset_numbers(samples.dataset), tuple(contents)
        # Where the family cannot promise the number, there is room for what it may be off.
        lengths = after_shift(counts.total) + np.where(
            counts.exact | (counts.total == 0), 0, np.maximum(counts.off_by, 0)
        )
        if config.on_overlong == "truncate":
            lengths = np.minimum(lengths, self.room)
        self.lengths: Integers = np.where(counts.ok, lengths, 0)
        self.sample_info = SampleInfo(
            self._costs(),
            media_masks(**{kind: getattr(counts, f"{kind}s") for kind in MEDIA_KINDS}),
            self.dataset_ids if config.spread_datasets else None,
        )
        self.limits = self._limits()
        self._options: dict[str, Any] = {
            "limits": self.limits,
            "alignment": config.alignment,
            "seed": config.seed,
            "dataset_ids": self.dataset_ids,
            "effort": config.effort,
        }
        self.key = self._key()
        self.name = hashlib.blake2b(json.dumps(self.key, sort_keys=True).encode(), digest_size=12).hexdigest()
        self.folder = cache_folder() / "plans" if config.cache_dir is None else Path(config.cache_dir)

    @property
    def room(self) -> int:
        """The longest sample that fits into a pack."""
        return sample_capacity(self.config, self.reserve)

    def plan(self, epoch: int) -> PackPlan:
        """The packs of an epoch; positions in it are those of the examples."""
        if len(self.lengths) < _CACHED_FROM or self.config.mode == "pad":
            return self._planned(epoch)
        key = {**self.key, "epoch": epoch}
        path = self.folder / f"{self.name}-{epoch}.phplan"
        with cache_lock(f"plan {path}"):
            if path.exists():
                try:
                    return PackPlan.load(path, key)
                except (ConfigError, OSError) as error:
                    logger.warning("planning anew: %s", error)
            plan = self._planned(epoch)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                plan.save(path, key)
            except OSError as error:
                logger.warning("the plan is not kept (%s): the next start plans again", error)
        return plan

    def _planned(self, epoch: int) -> PackPlan:
        if self.config.mode == "pad":
            return self._with_reasons(_one_by_one(self.lengths, self.room))
        if self._may_go_without_reserve():
            plan = self._packed(epoch, sample_capacity(self.config))
            masks = np.bitwise_or.reduceat(self.sample_info.media_masks[plan.indices], plan.offsets[:-1])
            # A pack that loses its only sample of a kind has the tokens of that sample free.
            if bool((masks & int(self.reserved_mask) == int(self.reserved_mask)).all()):
                return self._with_reasons(plan)
        return self._with_reasons(self._packed(epoch, self.room))

    def _packed(self, epoch: int, capacity: int) -> PackPlan:
        return plan_packs(self.lengths, capacity, epoch=epoch, **self._options)

    def reserve_in(self, plan: PackPlan) -> int:
        """How many tokens of each pack of a plan stay free for a placeholder."""
        return self.reserve if plan.capacity == self.room else 0

    def _may_go_without_reserve(self) -> bool:
        """Whether it is likely that every pack has media of all reserved kinds, so that it is worth a try."""
        size = self.config.pack_size
        fitting = (self.lengths > 0) & (self.lengths <= size)
        # The same rows have to be in the plan of every epoch, with the reserve and without.
        truncates = self.config.on_overlong == "truncate"
        if not self.reserve or truncates or (self.lengths[fitting] > self.room).any():
            return False
        samples, packs = int(fitting.sum()), max(1, int(self.lengths[fitting].sum()) // size)
        lacking = [
            float((self.sample_info.media_masks[fitting] & int(kind) == 0).mean())
            for kind in self.reserved_mask
        ]
        return bool(samples) and all(packs * share ** (samples / packs) < 1 for share in lacking)

    def _with_reasons(self, plan: PackPlan) -> PackPlan:
        """Rows that could not be counted have no token, but that is not why they are in no pack."""
        codes = plan.drop_codes.copy()
        codes[~self.counts.ok[plan.dropped]] = DROP_REASONS.index("sample_failed")
        return replace(plan, drop_codes=codes)

    def _costs(self) -> npt.NDArray[np.float64]:
        counts = self.counts
        patches = counts.patches.astype(np.float64)
        # The sidecar's totals do not tell how the patches are shared out: evenly, as most rows' are.
        pairs = patches**2 / np.maximum(1, counts.images + counts.videos)
        costs = sample_costs(self.lengths, self.weights, patches=patches, patch_pairs=pairs)
        return np.maximum(costs, 1.0)

    def _limits(self) -> dict[str, tuple[Integers, int]]:
        counts, config = self.counts, self.config
        media = counts.images + counts.videos + counts.audios
        wanted = {
            "patches": (counts.patches, config.max_patches),
            "media": (media, config.max_media),
            "documents": (np.ones(len(counts), np.int64), config.max_documents),
        }
        return {name: (values, limit) for name, (values, limit) in wanted.items() if limit is not None}

    def _key(self) -> dict[str, Any]:
        media = hashlib.blake2b(digest_size=16)
        for column in (
            self.sample_info.media_masks,
            self.counts.patches,
            self.counts.images,
            self.counts.videos,
        ):
            media.update(np.ascontiguousarray(column).data)
        weights = self.weights
        source: Mapping[str, Any] = {
            "order": _ORDER,
            "mode": self.config.mode,
            "rows": digest(*(part for one in self.contents for part in (one.digest, one.reading))),
            "media": media.hexdigest(),
            "reserve": [self.reserve, int(self.reserved_mask)] if self.reserve else 0,
            "spread": self.config.spread_datasets,
            "weights": [weights.token, weights.token_pair, weights.patch, weights.patch_pair],
        }
        key = plan_key(self.lengths, self.room, source=source, **self._options)
        return {name: value for name, value in key.items() if name != "epoch"}

    # Rows that are in no pack.

    def dropped(self, plan: PackPlan) -> list[Drop]:
        """The ledger entries of the rows that are in no pack of a plan."""
        counts = self.counts
        found: list[tuple[int, Reason, str]] = [
            (index, counts.status[index], _bad_detail(counts, index))
            for index in np.flatnonzero(~counts.ok).tolist()
        ]
        for reason, positions in plan.dropped_by_reason().items():
            for index in positions[counts.ok[positions]].tolist():
                detail = self.limit_detail if reason == "over_limit" else ""
                if reason == "too_long":
                    detail = too_long_detail(int(self.lengths[index]), self.config, self.reserve)
                found.append((index, reason, detail))
        # Only data from files have locations; they cost no reading.
        locations = getattr(self.samples.dataset, "locations", lambda indices: [""] * len(indices))
        drops = []
        for (index, reason, detail), place in zip(
            found, locations([index for index, _, _ in found]), strict=True
        ):
            key = self.samples.key(index)
            detail = "; ".join(part for part in (detail, place) if part)
            drops.append(Drop(key, "plan", reason, detail, dataset=key.rpartition("/")[0]))
        return drops

    @property
    def limit_detail(self) -> str:
        """Why a sample is in no pack though its tokens fit."""
        return f"alone over a limit of a pack ({', '.join(self.limits)})"

    def describe(self, plan: PackPlan) -> list[str]:
        """A plan in words, with a line for each reason why rows are in no pack, and five of them."""
        # A plan knows positions only: its own lines on them are replaced by lines with keys.
        lines = [line for line in plan.describe(()).splitlines() if not line.startswith(("bad ", "dropped "))]
        keys: dict[str, list[str]] = {}
        for drop in self.dropped(plan):
            keys.setdefault(drop.reason, []).append(drop.key)
        for reason, names in keys.items():
            some = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
            lines.append(f"dropped   {reason}: {len(names):,} of {len(self.counts):,} ({some})")
        return lines

    def check_bad(self) -> None:
        """Raise if a row could not be counted.

        Raises:
            BadSample: the first such row.
        """
        for index in np.flatnonzero(~self.counts.ok)[:1].tolist():
            reason: Reason = str(self.counts.status[index])  # type: ignore[assignment]
            detail, key = _bad_detail(self.counts, index), self.samples.key(index)
            raise BadSample(detail, reason=reason, key=key, stage="plan")

    def check_overlong(self, plan: PackPlan) -> None:
        """Raise if samples that are longer than a pack are to be an error.

        Raises:
            ConfigError: ``on_overlong="raise"``, and there is one.
        """
        if self.config.on_overlong == "raise" and (longest := self._longest(plan)):
            raise ConfigError(f"{longest}: raise pack_size or set on_overlong='drop' or 'truncate'")

    def warn_of_overlong(self, plan: PackPlan) -> None:
        """Log how many samples are too long for a pack, and which is the longest."""
        if longest := self._longest(plan):
            number = len(plan.dropped_by_reason()["too_long"])
            logger.warning("too_long: %s of %s; %s", f"{number:,}", f"{len(self.counts):,}", longest)

    def _longest(self, plan: PackPlan) -> str:
        """The longest sample that is too long for a pack, in words; empty if there is none."""
        positions = plan.dropped_by_reason().get("too_long", ())
        if not len(positions):
            return ""
        totals = self.counts.total
        longest = int(positions[totals[positions].argmax()])
        return (
            f"{self.config.pack_size:,} tokens are below the longest sample ({totals[longest] - 1:,} after "
            f"the shift, {self.samples.key(longest)})"
        )


def _one_by_one(lengths: Integers, room: int) -> PackPlan:
    """A plan in which each sample is a pack of its own."""
    plan = plan_packs(np.where(lengths > room, 2, np.minimum(lengths, 1)), 1, effort=0.0)
    return PackPlan(
        plan.offsets,
        plan.indices,
        lengths[plan.indices],
        plan.dropped,
        plan.drop_codes,
        room,
        plan.bound,
    )


def _bad_detail(counts: CountColumns, index: int) -> str:
    again = "; between runs `packhorse count --retry-bad` looks again"
    hint = again if counts.status[index] in _MAY_HAVE_ARRIVED else ""
    if counts.status[index] == "unreachable_media":
        hint = "; the next run asks again"
    return f"{counts.detail[index]} ({FOUND_WHEN_COUNTED}{hint})"


def too_long_detail(length: int, config: LoaderConfig, reserve: int) -> str:
    """Why a sample of ``length`` tokens (after the shift) is in no pack."""
    size, capacity = config.pack_size, sample_capacity(config, reserve)
    kept = f" ({size:,} less {size - capacity:,} kept free)" if capacity < size else ""
    return f"{length:,} tokens, more than the {capacity:,} of a pack{kept}"


def _dataset_numbers(dataset: Any) -> Integers | None:
    """For each row the number of its dataset in a mixture; None if there is only one."""
    if not isinstance(dataset, MetaDataset) or len(dataset.lengths()) < 2:
        return None
    sizes = list(dataset.lengths().values())
    return np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
