"""``PackPlan``: which samples make up each pack, and which are dropped; as flat arrays and as a file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from packhorse.count.columns import Distribution
from packhorse.errors import ConfigError, list_some
from packhorse.plan.cost_model import straggler_ratio
from packhorse.plan.schedule import order_packs
from packhorse.rows.index import file_error
from packhorse.rows.row_files import gc_paused
from packhorse.types import Flags, Floats, Integers, Reason
from packhorse.utils.files import write_atomic

DROP_REASONS: tuple[Reason, ...] = ("too_long", "over_limit", "empty_sample", "left_over", "sample_failed")
"""The first three come from ``plan_packs``. ``left_over`` is beyond ``max_packs``; ``sample_failed`` is a row
that could not be counted, whose reason is in the ledger."""

BAD_ROW = DROP_REASONS.index("sample_failed")

_FORMAT = "packhorse-plan-1"
# The columns of a file with the numpy kind of their numbers; the last two are optional.
_ARRAYS = {"offsets": "i", "indices": "i", "tokens": "i", "dropped": "i", "drop_codes": "u"}
_MORE_ARRAYS = {"costs": "f", "kinds": "u"}
_FIELDS = {"kinds": "media_masks"}  # of PackPlan, where a column has another name

PlanKey = Mapping[str, Any]
"""What a plan depends on: a digest of the counts, and every setting. See ``plan_key``."""


@dataclass(frozen=True, slots=True, eq=False)
class PackPlan:
    """Which samples make up each pack.

    >>> plan = plan_packs([5, 3, 4, 20], capacity=8)
    >>> plan.bins()
    [[0, 1], [2]]
    >>> plan.dropped_by_reason()
    {'too_long': array([3])}

    Attributes:
        offsets: pack ``k`` holds ``indices[offsets[k]:offsets[k + 1]]``.
        indices: positions of samples, the longest of a pack first.
        tokens: of the samples of each pack, without alignment padding.
        dropped: positions of the samples in no pack, ascending.
        drop_codes: the reason of each: an index into ``DROP_REASONS``.
        capacity: the most tokens of a pack.
        bound: a lower bound on the packs for these lengths.
        costs: cost of training on each pack, if known (``with_costs``).
        media_masks: the :class:`~packhorse.types.MediaMask` of each pack, likewise.
    """

    offsets: Integers
    indices: npt.NDArray[np.integer]
    tokens: Integers
    dropped: Integers
    drop_codes: npt.NDArray[np.uint8]
    capacity: int
    bound: int
    costs: Floats | None = None
    media_masks: npt.NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, pack: int) -> npt.NDArray[np.integer]:
        if not -len(self) <= pack < len(self):
            raise IndexError(f"pack {pack} of {len(self)}")
        pack %= len(self)
        return self.indices[self.offsets[pack] : self.offsets[pack + 1]]

    @property
    def samples(self) -> int:
        """Number of samples, dropped ones included."""
        return len(self.indices) + len(self.dropped)

    @property
    def fill(self) -> float:
        """Share of the capacity of all packs that samples use; 0 without packs."""
        return float(self.tokens.sum()) / (self.capacity * len(self)) if len(self) else 0.0

    def bins(self) -> list[list[int]]:
        """Return all packs as lists; ten million samples take a second and 40 bytes each."""
        # benchmarks/packing.py promises 5 times the speed of a heap packer: 10 with this, 2.7 without.
        with gc_paused():
            flat, ends = self.indices.tolist(), self.offsets.tolist()
            return [flat[begin:end] for begin, end in pairwise(ends)]

    def pack_of(self) -> Integers:
        """Return the pack of each sample; -1 for dropped ones."""
        packs = np.full(self.samples, -1, np.int64)
        packs[self.indices] = np.repeat(np.arange(len(self)), np.diff(self.offsets))
        return packs

    def dropped_by_reason(self) -> dict[Reason, Integers]:
        """Return the positions of dropped samples by reason."""
        drops = {reason: self.dropped[self.drop_codes == code] for code, reason in enumerate(DROP_REASONS)}
        return {reason: positions for reason, positions in drops.items() if len(positions)}

    def sums(self, values: npt.ArrayLike) -> npt.NDArray[Any]:
        """Return the sum of each pack over its samples of ``values``, which has one entry per sample."""
        return sums_by_pack(np.asarray(values)[self.indices], self.offsets)

    def with_costs(self, costs: npt.ArrayLike, media_masks: npt.ArrayLike | None = None) -> PackPlan:
        """Return the plan with costs and media masks (see :mod:`~packhorse.plan.cost_model`)."""
        masks = None if media_masks is None else np.asarray(media_masks, np.uint8)
        return replace(self, costs=np.asarray(costs, np.float64), media_masks=masks)

    def describe(self, world_sizes: Iterable[int] | None = None) -> str:
        """Return a few lines about fill, packs, samples per pack, drops and, if costs are known, stragglers.

        Without ``world_sizes`` the straggler ratios are those of 8, 64 and 512 ranks.
        """
        samples, bad = np.diff(self.offsets), int((self.drop_codes == BAD_ROW).sum())
        counted = f"{len(self.indices):,} packed, " + (f"{bad:,} bad, " if bad else "")
        lines = [
            f"packs      {len(self):,} of {self.capacity:,} tokens (no plan has fewer than {self.bound:,})",
            f"fill       {100 * self.fill:.3f} %: {self.tokens.sum():,} tokens",
            f"samples    {counted}{len(self.dropped) - bad:,} dropped",
        ]
        if len(self):
            spread = Distribution.of(samples)
            quartiles = ", ".join(f"{spread.percentile(percent):,}" for percent in QUARTILES)
            lines.append(f"per pack   {samples.mean():.2f} samples (least, quartiles, most: {quartiles})")
        for reason, positions in self.dropped_by_reason().items():
            some = list_some(positions, 5)
            what = "bad        " if reason == DROP_REASONS[BAD_ROW] else f"dropped    {reason}: "
            lines.append(f"{what}{len(positions):,} of {self.samples:,} (samples {some})")
        if self.costs is not None:
            sizes = _WORLD_SIZES if world_sizes is None else world_sizes
            lines.extend(_straggler_line(self, world_size) for world_size in sizes)
        elif world_sizes is not None and list(world_sizes):
            lines.append("straggler  unknown: the plan has no costs (PackPlan.with_costs)")
        return "\n".join(lines)

    def diff(self, other: PackPlan) -> str:
        """Return a few lines about what is different in another plan of the same samples.

        A sample counts as moved if the other samples of its pack are different.
        """
        if self.samples != other.samples:
            raise ConfigError(
                f"plans of {self.samples:,} and {other.samples:,} samples: expected the same samples in both"
            )
        old, new = self.pack_of(), other.pack_of()
        packed = (old >= 0) & (new >= 0)
        before, after = old[packed], new[packed]
        _, pair, together = np.unique(before * len(other) + after, return_inverse=True, return_counts=True)
        stayed = (together[pair] == np.diff(self.offsets)[before]) & (
            together[pair] == np.diff(other.offsets)[after]
        )
        moved = len(stayed) - int(stayed.sum())
        newly, no_more = int(((old >= 0) & (new < 0)).sum()), int(((old < 0) & (new >= 0)).sum())
        lines = [
            f"packs      {len(self):,} -> {len(other):,} ({len(other) - len(self):+,})",
            f"capacity   {self.capacity:,} -> {other.capacity:,}",
            f"fill       {100 * self.fill:.3f} % -> {100 * other.fill:.3f} %",
            f"moved      {moved:,} of {self.samples:,} samples have other companions",
            f"dropped    {len(self.dropped):,} -> {len(other.dropped):,}"
            f" ({newly:,} newly, {no_more:,} no more)",
        ]
        return "\n".join(lines)

    def in_order(self, order: npt.ArrayLike) -> PackPlan:
        """Return a plan with these packs in this order; samples of others are dropped as ``left_over``."""
        packs = np.asarray(order, np.int64)
        sizes = np.diff(self.offsets)[packs]
        offsets = offsets_of(sizes)
        first = np.repeat(self.offsets[packs] - offsets[:-1], sizes)
        indices = self.indices[first + np.arange(len(first))]
        beyond = np.ones(self.samples, bool)
        beyond[indices] = beyond[self.dropped] = False
        left_over = np.flatnonzero(beyond)
        dropped = np.concatenate([self.dropped, left_over])
        codes = np.concatenate([self.drop_codes, np.full(len(left_over), DROP_REASONS.index("left_over"))])
        rising = np.argsort(dropped, kind="stable")
        tokens = self.tokens[packs]
        return replace(
            self,
            offsets=offsets,
            indices=indices,
            tokens=tokens,
            bound=-(-int(tokens.sum()) // self.capacity) if len(left_over) else self.bound,
            dropped=dropped[rising],
            drop_codes=codes[rising].astype(np.uint8),
            costs=None if self.costs is None else self.costs[packs],
            media_masks=None if self.media_masks is None else self.media_masks[packs],
        )

    def without(self, samples: Flags, lengths: npt.ArrayLike, reason: Reason) -> PackPlan:
        """Return the plan without the samples that are True, dropped with one of ``DROP_REASONS``."""
        if not samples.any():
            return self
        codes = np.full(self.samples, -1, np.int16)
        codes[self.dropped] = self.drop_codes
        codes[samples] = DROP_REASONS.index(reason)
        dropped = np.flatnonzero(codes >= 0)
        why = codes[dropped].astype(np.uint8)
        stay = ~samples[self.indices]
        if stay.all():
            return replace(self, dropped=dropped, drop_codes=why)
        left = np.bincount(np.repeat(np.arange(len(self)), np.diff(self.offsets))[stay], minlength=len(self))
        packs = np.flatnonzero(left)
        offsets = offsets_of(left[packs])
        indices = self.indices[stay]
        tokens = sums_by_pack(np.asarray(lengths, np.int64)[indices], offsets)
        bound = -(-int(tokens.sum()) // self.capacity)
        return PackPlan(offsets, indices, tokens, dropped, why, self.capacity, bound)

    def save(self, path: str | os.PathLike[str], key: PlanKey | None = None) -> None:
        """Write the plan atomically to an Arrow file.

        It has one row of lists, so that each array is contiguous, and no time or path: the same plan gives
        the same bytes.
        """
        import pyarrow as pa

        arrays = {name: getattr(self, _FIELDS.get(name, name)) for name in (*_ARRAYS, *_MORE_ARRAYS)}
        present = {name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None}
        about = {
            "format": _FORMAT,
            "key": key or {},
            "capacity": self.capacity,
            "bound": self.bound,
            "reasons": DROP_REASONS,
        }
        about["digest"] = _digest(about, present)
        columns = [
            pa.LargeListArray.from_arrays(np.array([0, len(array)], np.int64), pa.array(array))
            for array in present.values()
        ]
        schema = pa.schema(
            [(name, column.type) for name, column in zip(present, columns, strict=True)],
            metadata={"packhorse": json.dumps(about, sort_keys=True)},
        )

        def write(file: IO[bytes]) -> None:
            with pa.ipc.new_file(file, schema) as writer:
                writer.write_batch(pa.record_batch(columns, schema=schema))

        write_atomic(Path(path), write)

    @classmethod
    def load(cls, path: str | os.PathLike[str], key: PlanKey | None = None) -> PackPlan:
        """Open a plan, memory-mapped, and verify its digest (0.1 s for ten million samples).

        Raises:
            ConfigError: the file is damaged, or was saved under another key than ``key``.
            OSError: it cannot be read.
        """
        about, arrays = _read(path)
        if key is not None:
            _check_key(path, about["key"], key)
        plan = cls(
            **{_FIELDS.get(name, name): array for name, array in arrays.items()},
            capacity=about["capacity"],
            bound=about["bound"],
        )
        if wrong := _contradiction(plan):
            raise _damage_error(path, wrong)
        return plan


def offsets_of(sizes: Integers) -> Integers:
    """Return where each of consecutive groups of these sizes starts, and where the last one ends."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def sums_by_pack(values: npt.NDArray[Any], offsets: Integers) -> npt.NDArray[Any]:
    """Return the sums between offsets, none of which is empty."""
    return np.add.reduceat(values, offsets[:-1]) if len(offsets) > 1 else values[:0]


QUARTILES = (0, 25, 50, 75, 100)
"""Minimum, quartiles and maximum."""

_WORLD_SIZES = (8, 64, 512)


def _straggler_line(plan: PackPlan, world_size: int) -> str:
    assert plan.costs is not None
    order = order_packs(plan.costs, world_size, media_masks=plan.media_masks)
    if not len(order.steps):
        return f"straggler  {world_size:>4} ranks: more ranks than packs"
    ratio = straggler_ratio(plan.costs, order.steps)
    mixed = f", {len(order.mixed):,} with mixed media" if plan.media_masks is not None else ""
    return f"straggler  {world_size:>4} ranks: {ratio:.4f} over {len(order.steps):,} steps{mixed}"


# The plan file.


def load_key(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the key a plan was saved under."""
    key: dict[str, Any] = _read(path)[0]["key"]
    return key


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata of the file, and its arrays, memory-mapped."""
    import pyarrow as pa

    if not os.path.getsize(path):
        raise _damage_error(path, "it is empty")
    try:
        with pa.memory_map(os.fspath(path)) as mapped:
            reader = pa.ipc.open_file(mapped)
            about = json.loads((reader.schema.metadata or {})[b"packhorse"])
            if (found := about["format"]) != _FORMAT:
                raise ValueError(f"expected {_FORMAT}, found {found}")
            batch = reader.get_batch(0)
            batch.validate(full=True)
            arrays = {name: _map_array(batch.column(name)[0].values) for name in batch.schema.names}
        _check_columns(arrays)
        if tuple(about["reasons"]) != DROP_REASONS or about.pop("digest") != _digest(about, arrays):
            raise ValueError("its content does not match its digest")
        if not isinstance(about["key"], dict) or type(about["capacity"]) is not int or about["capacity"] < 1:
            raise ValueError("it does not say what it was planned from")
        if type(about["bound"]) is not int or about["bound"] < 0:
            raise ValueError("it does not say how few packs there could be")
    except (
        *(pa.ArrowException, ValueError, LookupError, TypeError, AttributeError, OSError),
        RecursionError,  # JSON nested without end
    ) as error:
        raise _damage_error(path, str(error)) from error
    return about, arrays


def _map_array(values: Any) -> npt.NDArray[Any]:
    """Return an array over the file's memory; ``to_numpy`` would import pandas, which takes half a second."""
    from pyarrow import types

    if not (types.is_integer(values.type) or types.is_floating(values.type)):
        raise ValueError(f"{values.type} instead of numbers")
    kind = np.dtype(values.type.to_pandas_dtype())
    if values.null_count:
        raise ValueError("missing values in an array of numbers")
    if not len(values):
        return np.empty(0, kind)
    return np.frombuffer(values.buffers()[1], kind, len(values), values.offset * kind.itemsize)


def _check_columns(arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    if missing := sorted(set(_ARRAYS) - set(arrays)):
        raise ValueError(f"without {', '.join(missing)}")
    known = _ARRAYS | _MORE_ARRAYS
    if wrong := sorted(name for name, array in arrays.items() if array.dtype.kind != known.get(name)):
        raise ValueError(f"unknown columns, or of another kind: {', '.join(wrong)}")


def _digest(about: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    hashed = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16)
    for name, array in arrays.items():
        hashed.update(f"{name} {array.dtype.str} {len(array)} ".encode())
        hashed.update(array.data)
    return hashed.hexdigest()


def _contradiction(plan: PackPlan) -> str:
    """Return what is inconsistent in a plan; empty if nothing is."""
    sizes = np.diff(plan.offsets)
    if (
        not len(plan.offsets)
        or plan.offsets[0]
        or (sizes <= 0).any()
        or plan.offsets[-1] != len(plan.indices)
    ):
        return "the packs do not cover its samples"
    columns = [column for column in (plan.tokens, plan.costs, plan.media_masks) if column is not None]
    if {len(plan)} != {*map(len, columns)} or len(plan.dropped) != len(plan.drop_codes):
        return "its columns have different lengths"
    if (plan.drop_codes >= len(DROP_REASONS)).any():
        return "it drops samples for an unknown reason"
    every = np.concatenate([plan.indices, plan.dropped])
    if len(every) and (every.min() < 0 or every.max() >= len(every) or np.bincount(every).max() > 1):
        return "a sample is missing or in two packs"
    return ""


def _check_key(path: str | os.PathLike[str], found: Mapping[str, Any], wanted: PlanKey) -> None:
    try:
        plain = json.loads(json.dumps(dict(wanted)))  # as read from a file: lists for tuples
    except TypeError as error:
        raise ConfigError(f"the key of a plan must be JSON ({error})", setting="key") from error
    absent = object()
    names = [name for name in sorted({*found, *plain}) if found.get(name, absent) != plain.get(name, absent)]
    if names:
        theirs, ours = (
            ", ".join(f"{name}={key[name]}" if name in key else f"no {name}" for name in names)
            for key in (found, plain)
        )
        raise ConfigError(
            f"{os.fspath(path)} was planned from {theirs}; this run has {ours}: plan again",
            setting=names[0],
            value=plain.get(names[0]),
            path=path,
        )


def _damage_error(path: str | os.PathLike[str], why: str) -> ConfigError:
    return file_error(path, f"is not a complete plan ({why}): remove it and plan again")
