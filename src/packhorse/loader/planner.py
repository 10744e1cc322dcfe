"""Plan each epoch: from counts to packs, the rows that it drops, and the key of the plan.

Plans are the same on every rank: they depend on the counts and the settings alone. They are saved in the
cache, so that a second start (and every other process of the machine) maps them from a file.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np

from packhorse.count.columns import CountColumns
from packhorse.count.contents import Content
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import BadSample, ConfigError, list_some
from packhorse.formats.meta import MetaDataset
from packhorse.loader.config import LoaderConfig
from packhorse.plan.cost_model import CostWeights, cost_features, media_masks, sample_costs
from packhorse.plan.lengths import FOUND_WHEN_COUNTED, after_shift
from packhorse.plan.pack_plan import DROP_REASONS, PackPlan
from packhorse.plan.planning import plan_key, plan_packs
from packhorse.plan.schedule import SampleInfo
from packhorse.types import MEDIA_KINDS, Drop, Floats, Integers, MediaMask, Reason, Rows
from packhorse.utils.files import cache_folder, cache_lock, digest

logger = getLogger("packhorse.loader")

# Reasons that can be fixed without changing the row.
_FIXABLE_MEDIA = ("missing_media", "broken_media", "media_too_large", "row_too_large")
_ORDER = 1  # increased when the same plan is scheduled in another order
_CACHED_FROM = 50_000  # planning fewer samples is quicker than reading a file


def sample_capacity(config: LoaderConfig, reserve: int = 0) -> int:
    """Return the longest sample (after the shift) that fits into a pack with ``reserve`` reserved tokens."""
    size = config.pack_size - reserve
    return size - size % config.alignment


class Planner:
    """Plans the epochs of a dataset.

    Rows whose ``counts`` are not ``ok`` are in no plan. Each pack has ``reserve`` tokens reserved for a
    placeholder (:mod:`packhorse.loader.placeholder`) with the media of ``reserved_mask``, unless every pack
    of an epoch has all of these. ``contents`` are digests of the rows, which differ between datasets with the
    same counts. ``name`` identifies the plans of all epochs: loaders with the same name deliver the same
    packs.
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
        self.dataset_ids, self.contents = _dataset_ids(samples.dataset), tuple(contents)
        self.capacity = sample_capacity(config, reserve)
        # If the family's counts are not exact, plan for the largest error.
        self.documents = _shifted_documents(counts, config.alignment)
        lengths = (
            self.documents[0]
            + self.documents[1]
            + np.where(counts.exact | (counts.total == 0), 0, np.maximum(counts.off_by, 0))
        )
        if config.on_overlong == "truncate":
            lengths = np.minimum(lengths, self.capacity)
        self.lengths: Integers = np.where(counts.ok, lengths, 0)
        self._media_masks = media_masks(**{kind: getattr(counts, f"{kind}s") for kind in MEDIA_KINDS})
        self.sample_info = self.sample_info_by(weights)
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

    def plan(self, epoch: int) -> PackPlan:
        """Return the packs of an epoch; its indices are those of the examples."""
        if len(self.lengths) < _CACHED_FROM or self.config.mode == "pad":
            return self._make_plan(epoch)
        key = {**self.key, "epoch": epoch}
        path = self.folder / f"{self.name}-{epoch}.phplan"
        with cache_lock(f"plan {path}"):
            if path.exists():
                try:
                    return PackPlan.load(path, key)
                except (ConfigError, OSError) as error:
                    logger.warning("the saved plan cannot be used, replanning: %s", error)
            plan = self._make_plan(epoch)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                plan.save(path, key)
            except OSError as error:
                logger.warning("the plan cannot be saved (%s): the next start replans", error)
        return plan

    def _make_plan(self, epoch: int) -> PackPlan:
        if self.config.mode == "pad":
            # Each document of a pair has a row of its own.
            longest = np.where(self.counts.rejected > 0, np.maximum(*self.documents), self.lengths)
            return self._with_reasons(_plan_single_samples(self.lengths, longest, self.capacity))
        if self._may_need_no_reserve():
            plan = plan_packs(self.lengths, sample_capacity(self.config), epoch=epoch, **self._options)
            masks = np.bitwise_or.reduceat(self.sample_info.media_masks[plan.indices], plan.offsets[:-1])
            # A pack that loses its only sample of a kind has the tokens of that sample free.
            if bool((masks & int(self.reserved_mask) == int(self.reserved_mask)).all()):
                return self._with_reasons(plan)
        return self._with_reasons(plan_packs(self.lengths, self.capacity, epoch=epoch, **self._options))

    def reserve_in(self, plan: PackPlan) -> int:
        """Return how many tokens of each pack of a plan are reserved for a placeholder."""
        return self.reserve if plan.capacity == self.capacity else 0

    def _may_need_no_reserve(self) -> bool:
        """Whether every pack is likely to have media of all reserved kinds, so a plan without is tried."""
        size = self.config.pack_size
        fitting = (self.lengths > 0) & (self.lengths <= size)
        # The same rows have to be in the plan of every epoch, with the reserve and without.
        truncates = self.config.on_overlong == "truncate"
        if not self.reserve or truncates or (self.lengths[fitting] > self.capacity).any():
            return False
        samples, packs = int(fitting.sum()), max(1, int(self.lengths[fitting].sum()) // size)
        masks = self.sample_info.media_masks[fitting]
        lacking = [
            float((masks & int(MediaMask.of([kind])) == 0).mean()) for kind in self.reserved_mask.kinds
        ]
        return bool(samples) and all(packs * share ** (samples / packs) < 1 for share in lacking)

    def _with_reasons(self, plan: PackPlan) -> PackPlan:
        """Replace the reason of rows that could not be counted, which the plan takes for empty."""
        codes = plan.drop_codes.copy()
        codes[~self.counts.ok[plan.dropped]] = DROP_REASONS.index("sample_failed")
        return replace(plan, drop_codes=codes)

    def sample_info_by(self, weights: CostWeights) -> SampleInfo:
        """Return what the schedule needs of each sample, with costs by these weights."""
        costs = self._add_documents(sample_costs, weights, slice(None))
        if len(costs):  # a row of no tokens has a cost too, in any unit
            costs = np.maximum(costs, 1e-12 * float(costs.max()))
        dataset_ids = self.dataset_ids if self.config.spread_datasets else None
        # With placeholders all ranks of a step call the vision encoder, or none does.
        encoder = weights.encoder if self.config.placeholder == "never" else 0.0
        return SampleInfo(costs, self._media_masks, dataset_ids, weights.pack, encoder)

    def features(self, rows: Integers) -> Floats:
        """Return what the weights of these rows are multiplied with: [rows, ``len(weights.names)``]."""
        return self._add_documents(cost_features, self.weights, rows)

    def _add_documents(
        self, compute: Callable[..., Floats], weights: CostWeights, rows: Integers | slice
    ) -> Floats:
        """Return costs or features of rows: the sum of both documents of a pair."""
        counts = self.counts
        patches = counts.patches[rows].astype(np.float64)
        items = counts.images[rows] + counts.videos[rows]
        # The sidecar has totals only: assume that all media of a row have equally many patches.
        pairs = patches**2 / np.maximum(1, items)
        # Documents do not attend to each other.
        rejected = np.where(counts.ok[rows], self.documents[1][rows], 0)
        first = self.lengths[rows] - rejected
        both: Floats = compute(
            first,
            weights,
            patches=patches,
            patch_pairs=pairs,
            items=items,
            supervised=counts.supervised[rows],
        )
        both += compute(rejected, weights)
        return both

    def _limits(self) -> dict[str, tuple[Integers, int]]:
        counts, config = self.counts, self.config
        media = counts.images + counts.videos + counts.audios
        limits = {
            "patches": (counts.patches, config.max_patches),
            "media": (media, config.max_media),
            "documents": (1 + (counts.rejected > 0), config.max_documents),
        }
        return {name: (values, limit) for name, (values, limit) in limits.items() if limit is not None}

    def _key(self) -> dict[str, Any]:
        media = hashlib.blake2b(digest_size=16)
        counts = self.counts
        for column in (self.sample_info.media_masks, counts.patches, counts.images, counts.videos):
            media.update(np.ascontiguousarray(column).data)
        weights = self.weights
        local = (weights.window_pairs, weights.chunk_pairs)
        overhead = [weights.item, weights.encoder, weights.supervised, weights.pack]
        source: Mapping[str, Any] = {
            "order": _ORDER,
            "mode": self.config.mode,
            "rows": digest(
                *(part for content in self.contents for part in (content.digest, content.reading))
            ),
            "media": media.hexdigest(),
            "reserve": [self.reserve, int(self.reserved_mask)] if self.reserve else 0,
            "spread": self.config.spread_datasets,
            # Of models without windows and images the same as in states of earlier versions. Lists, as JSON
            # has them.
            "weights": [
                *(weights.token, weights.token_pair, weights.patch, weights.patch_pair),
                *([[list(pair) for pair in pairs] for pairs in local] if any(local) else []),
                *(overhead if any(overhead) else []),
            ],
        }
        key = plan_key(self.lengths, self.capacity, source=source, **self._options)
        return {name: value for name, value in key.items() if name != "epoch"}

    # Rows that are in no pack.

    def drops(self, plan: PackPlan) -> list[Drop]:
        """Return the ledger entries of the rows that are in no pack of a plan."""
        counts, reserve = self.counts, self.reserve_in(plan)
        dropped: list[tuple[int, Reason, str]] = [
            (index, counts.status[index], self._bad_detail(index))
            for index in np.flatnonzero(~counts.ok).tolist()
        ]
        for reason, indices in plan.dropped_by_reason().items():
            for index in indices[counts.ok[indices]].tolist():
                detail = self.limit_detail if reason == "over_limit" else ""
                if reason == "too_long":
                    detail = too_long_detail(int(self.lengths[index]), self.config, reserve)
                dropped.append((index, reason, detail))
        # Only data from files have locations; they cost no reading.
        locate = getattr(self.samples.dataset, "locations", lambda indices: [""] * len(indices))
        locations = locate([index for index, _, _ in dropped])
        drops = []
        for (index, reason, detail), location in zip(dropped, locations, strict=True):
            key = self.samples.key(index)
            detail = "; ".join(part for part in (detail, location) if part)
            drops.append(Drop.from_key(key, "plan", reason, detail))
        return drops

    def _bad_detail(self, index: int) -> str:
        """Return why a row could not be counted; saved counts keep it until they are retried."""
        reason, hint = self.counts.status[index], ""
        if reason in _FIXABLE_MEDIA and isinstance(self.samples.dataset, MetaDataset):
            hint = "; `packhorse count --retry-bad` between runs retries it"
        elif reason == "unreachable_media":
            hint = "; the next run retries it"
        return f"{self.counts.detail[index]} ({FOUND_WHEN_COUNTED}{hint})"

    @property
    def limit_detail(self) -> str:
        """Why a sample is in no pack although its tokens fit."""
        return f"alone over a limit of a pack ({', '.join(self.limits)})"

    def describe(self, plan: PackPlan) -> list[str]:
        """Describe a plan, with a line and up to five rows for each reason why rows are in no pack."""
        # A plan has indices only: its own lines about them are replaced by lines with keys.
        lines = [line for line in plan.describe(()).splitlines() if not line.startswith(("bad ", "dropped "))]
        if self.config.mode == "pad":  # there are no packs
            rows = len(plan) + int((self.counts.rejected[plan.indices] > 0).sum())
            fill = int(plan.tokens.sum()) / (rows * plan.capacity) if rows else 0.0
            lines = [
                f"rows       {rows:,} of at most {plan.capacity:,} tokens",
                f"fill       {100 * fill:.3f} % of rows of this length: {plan.tokens.sum():,} tokens",
                *(line for line in lines if line.startswith("samples ")),
            ]
        keys: dict[str, list[str]] = {}
        for drop in self.drops(plan):
            keys.setdefault(drop.reason, []).append(drop.key)
        for reason, names in keys.items():
            some = list_some(names, 5)
            lines.append(f"dropped    {reason}: {len(names):,} of {len(self.counts):,} ({some})")
        return lines

    def check(self, plan: PackPlan) -> None:
        """Raise if the settings (``on_overlong``, ``on_bad``) do not allow what a plan drops."""
        if self.config.on_overlong == "raise" and (longest := self._longest(plan)):
            message = f"{longest}: raise pack_size or set on_overlong='drop' or 'truncate'"
            raise ConfigError(message, setting="pack_size", value=self.config.pack_size)
        bad = np.flatnonzero(~self.counts.ok)
        if self.config.on_bad == "raise" and len(bad):
            first = int(bad[0])
            reason: Reason = str(self.counts.status[first])  # type: ignore[assignment]
            detail, key = self._bad_detail(first), self.samples.key(first)
            raise BadSample(detail, reason=reason, key=key, stage="plan")

    def warn_of_dropped(self, plan: PackPlan, drops: Sequence[Drop]) -> None:
        """Warn of rows in no pack, with their number for each reason and the first or longest one."""
        first = {drop.reason: drop for drop in reversed(drops)}
        for reason, number in sorted(Counter(drop.reason for drop in drops).items()):
            if reason != "too_long":
                which = f"{number:,} of {len(self.counts):,} rows are in no pack"
                logger.warning("%s: %s, first %s: %s", reason, which, first[reason].key, first[reason].detail)
        if longest := self._longest(plan):
            dropped = len(plan.dropped_by_reason()["too_long"])
            logger.warning("too_long: %s of %s; %s", f"{dropped:,}", f"{len(self.counts):,}", longest)

    def _longest(self, plan: PackPlan) -> str:
        """Describe the longest sample that is too long for a pack; empty if there is none."""
        indices = plan.dropped_by_reason().get("too_long", ())
        if not len(indices):
            return ""
        lengths = self.documents[0] + self.documents[1]
        longest = int(indices[lengths[indices].argmax()])
        return (
            f"{self.config.pack_size:,} tokens are below the longest sample ({lengths[longest]:,} after "
            f"the shift, {self.samples.key(longest)})"
        )


def _shifted_documents(counts: CountColumns, alignment: int) -> tuple[Integers, Integers]:
    """Return the lengths after the shift of each row's document, and of the rejected one of a pair (else 0).

    Those of a pair are padded to the alignment, as planning pads only their sum.
    """
    first, rejected = map(after_shift, counts.document_lengths)
    return np.where(rejected > 0, first + -first % alignment, first), rejected + -rejected % alignment


def _plan_single_samples(lengths: Integers, longest: Integers, capacity: int) -> PackPlan:
    """Return a plan in which each sample is a pack of its own; its ``longest`` document has to fit."""
    plan = plan_packs(np.where(longest > capacity, 2, np.minimum(lengths, 1)), 1, effort=0.0)
    return replace(plan, tokens=lengths[plan.indices], capacity=capacity)


def too_long_detail(length: int, config: LoaderConfig, reserve: int) -> str:
    """Describe why a sample of ``length`` tokens (after the shift) is in no pack."""
    size, capacity = config.pack_size, sample_capacity(config, reserve)
    reserved = f" ({size:,} less {size - capacity:,} reserved)" if capacity < size else ""
    return f"{length:,} tokens, more than the {capacity:,} of a pack{reserved}"


def _dataset_ids(dataset: Rows) -> Integers | None:
    """Return the number of each row's dataset in a mixture; None if there is only one."""
    if not isinstance(dataset, MetaDataset) or len(dataset.lengths()) < 2:
        return None
    sizes = list(dataset.lengths().values())
    return np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
