"""Plan packs: which samples go into which pack."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from packhorse.errors import ConfigError
from packhorse.plan.best_fit import Fill, Histogram, best_fit, lower_bound
from packhorse.plan.cutting_stock import Assignment, improve
from packhorse.plan.limits import Resource, within_limits
from packhorse.plan.pack_plan import DROP_REASONS, PackPlan, offsets_of, sums_by_pack
from packhorse.plan.schedule import random_generator
from packhorse.types import Integers

Limits = Mapping[str, tuple[npt.ArrayLike, int]]
"""Further limits by name: what each sample takes, and the most that a pack may hold."""

_LARGEST = 2**31 - 1
_PLANNER = 1  # incremented when the same lengths give another plan

Positions = npt.NDArray[np.int32]

_MAX_RADIX = 1 << 21  # beyond, the arrays do not fit into a cache, and sorting one integer is faster
_LOWER_HALF = 0 if sys.byteorder == "little" else 1
# Copying runs needs half the time of a second sort from this many samples on, if the runs are this long:
# benchmarks/packing.py promises at most 5 times np.sort for ten million samples.
_MANY, _LONG_RUN = 1 << 20, 24
_LEAST_BITS = 16  # even two samples are shuffled with this many bits


def plan_packs(
    lengths: npt.ArrayLike,
    capacity: int,
    *,
    limits: Limits | None = None,
    alignment: int = 1,
    seed: int | None = None,
    epoch: int = 0,
    dataset_ids: npt.ArrayLike | None = None,
    effort: float | None = None,
    empty: Literal["drop", "keep"] = "drop",
) -> PackPlan:
    """Assign samples to as few packs as possible.

    Every sample is in exactly one pack, or dropped with a reason: ``too_long`` (for the capacity),
    ``over_limit`` (alone over a further limit), ``empty_sample`` (no tokens). No pack exceeds the capacity or
    a limit, and there are never more packs than with best fit decreasing. The same arguments give the same
    plan.

    Args:
        lengths: tokens of each sample: a list, an array or a tensor of integers.
        capacity: tokens of a pack.
        limits: for example ``{"visual tokens": (visual, 6144), "documents": (np.ones(n, int), 32)}``.
        alignment: each sample takes up its length rounded up to a multiple of this.
        seed: assigns samples of one length at random; None keeps their order.
        epoch: changes the random assignment.
        dataset_ids: the dataset of each sample; samples of one length are assigned so that each dataset is
            spread evenly over the packs.
        effort: approximate seconds to search for a better plan than best fit; 0 is best fit alone. None
            searches if best fit is more than 0.1 % over the bound: a twentieth of a second for each pack
            that could be saved, at most five seconds.
        empty: samples of no tokens are dropped, or kept in the last pack (not with ``limits``).

    Raises:
        ConfigError: an argument is out of range, or of the wrong type or length.
    """
    tokens = as_integers(lengths, "lengths")
    for name, size in (("capacity", capacity), ("alignment", alignment)):
        if not 0 < size <= _LARGEST:
            raise ConfigError.of(name, size, f"expected 1 to {_LARGEST:,}")
    if len(tokens) > _LARGEST:
        problem = f"lengths: {len(tokens):,} samples, expected at most {_LARGEST:,}; plan parts of them"
        raise ConfigError(problem, setting="lengths", value=len(tokens))
    if limits and empty == "keep":
        raise ConfigError.of("empty", empty, "with limits the last pack could be over them; use empty='drop'")
    others = _resources(limits or {}, len(tokens))
    groups = (
        None if dataset_ids is None else as_integers(dataset_ids, "dataset_ids", len(tokens)).astype(np.int64)
    )
    units = tokens if alignment == 1 else -(-tokens // alignment)
    units_per_pack = capacity // alignment
    codes = _drop_codes(units, units_per_pack, others)
    kept = None if codes is None else np.flatnonzero(codes < 0)
    if kept is not None:
        units, others = units[kept], [other.take(kept) for other in others]
        groups = None if groups is None else groups[kept]
    order = longest_first(units, units_per_pack, seed=seed, epoch=epoch, dataset_ids=groups)
    histogram = Histogram.of(units, units_per_pack)
    bound = lower_bound(histogram, units_per_pack)
    fill = _pack(histogram, units_per_pack, bound, effort, [other.take(order) for other in others])
    if isinstance(fill, Fill):
        offsets, indices = assign_samples(fill, order)
    else:
        offsets, indices = gather(fill.pack_of, fill.packs, order)
    if isinstance(fill, Fill) and alignment == 1:
        packed = fill.totals(fill.each * fill.lengths(histogram))
    else:
        packed = sums_by_pack((tokens if kept is None else tokens[kept])[indices], offsets)
    if kept is not None:
        indices = kept.astype(np.int32)[indices]
    plan = PackPlan(offsets, indices, packed, *_drops(codes), capacity, bound)
    return _with_empty_samples(plan) if empty == "keep" else plan


def plan_key(
    lengths: npt.ArrayLike,
    capacity: int,
    *,
    limits: Limits | None = None,
    alignment: int = 1,
    seed: int | None = None,
    epoch: int = 0,
    dataset_ids: npt.ArrayLike | None = None,
    effort: float | None = None,
    empty: str = "drop",
    source: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the key of a plan: a digest of all counts, and the settings.

    Takes the arguments of ``plan_packs``, and as ``source`` anything else, as JSON, that the plan depends on:
    names of data, of the processor.
    """
    hashed = hashlib.blake2b(digest_size=16)
    tokens = as_integers(lengths, "lengths")
    columns = {"lengths": tokens} | {
        f"limit {name}": as_integers(values[0], name) for name, values in (limits or {}).items()
    }
    if dataset_ids is not None:
        columns["strata"] = as_integers(dataset_ids, "dataset_ids")
    for name, column in sorted(columns.items()):
        hashed.update(f"{name} {len(column)} ".encode())
        hashed.update(np.ascontiguousarray(column, "<i8").data)
    key = {
        "counts": hashed.hexdigest(),
        "samples": len(tokens),
        "capacity": capacity,
        "alignment": alignment,
        "limits": {name: int(limit) for name, (_, limit) in (limits or {}).items()},
        "seed": seed,
        "epoch": epoch,
        "effort": effort,
        "empty": empty,
        "source": dict(source or {}),
        "planner": _PLANNER,
    }
    plain: dict[str, Any] = json.loads(json.dumps(key))
    return plain


def _pack(
    histogram: Histogram, units_per_pack: int, bound: int, effort: float | None, others: list[Resource]
) -> Fill | Assignment:
    """Return the pack of each sample, from the longest to the shortest."""
    fit = best_fit(histogram, units_per_pack)
    fill = fit if fit.packs <= bound else improve(histogram, units_per_pack, fit, bound, effort)
    if not others:
        return fill
    plan = Assignment(fill.packs, fill.pack_of()) if isinstance(fill, Fill) else fill
    tokens = Resource(np.repeat(histogram.lengths, histogram.counts), units_per_pack)
    return within_limits(plan, tokens, others, bound)


def as_integers(values: npt.ArrayLike, what: str, expected: int | None = None) -> npt.NDArray[np.integer]:
    """Return ``values`` as an array of non-negative integers; raise if they are something else."""
    array = np.asarray(values)
    if array.ndim == 1 and not len(array):
        array = array.astype(np.int64)
    value: Any
    if array.ndim != 1 or array.dtype.kind not in "iu":
        value, problem = array.shape, f"a 1-d array of integers, found shape {array.shape} of {array.dtype}"
    elif expected is not None and len(array) != expected:
        value, problem = len(array), f"one for each of the {expected:,} samples, found {len(array):,}"
    elif len(array) and (value := int(array.min())) < 0:
        problem = f"0 or more, found {value} for sample {int(array.argmin())}"
    else:
        return array if array.dtype in (np.int32, np.int64) else array.astype(np.int64)
    raise ConfigError(f"{what}: expected {problem}", setting=what, value=value)


def _resources(limits: Limits, samples: int) -> list[Resource]:
    resources = []
    for name, (values, limit) in limits.items():
        if limit < 1:
            raise ConfigError.of(name, limit, "expected a limit of 1 or more")
        resources.append(Resource(as_integers(values, name, samples).astype(np.int64), limit))
    return resources


def _drop_codes(
    units: npt.NDArray[np.integer], units_per_pack: int, others: list[Resource]
) -> npt.NDArray[np.int8] | None:
    """Return the drop code of each sample (-1: packed), or None if all are packed."""
    if not len(units) or (units.min() > 0 and units.max() <= units_per_pack and not others):
        return None
    codes = np.full(len(units), -1, np.int8)
    for other in others:
        codes[other.values > other.limit] = DROP_REASONS.index("over_limit")
    codes[units > units_per_pack] = DROP_REASONS.index("too_long")
    codes[units == 0] = DROP_REASONS.index("empty_sample")
    return codes if codes.max() >= 0 else None


def _drops(codes: npt.NDArray[np.int8] | None) -> tuple[Integers, npt.NDArray[np.uint8]]:
    if codes is None:
        return np.zeros(0, np.int64), np.zeros(0, np.uint8)
    positions = np.flatnonzero(codes >= 0)
    return positions, codes[positions].astype(np.uint8)


def _with_empty_samples(plan: PackPlan) -> PackPlan:
    """Return the plan with its empty samples in the last pack, or in a new one if there is none."""
    are_empty = plan.drop_codes == DROP_REASONS.index("empty_sample")
    samples = plan.dropped[are_empty]
    if not len(samples):
        return plan
    offsets, tokens = plan.offsets.copy(), plan.tokens
    if len(plan):
        offsets[-1] += len(samples)
    else:
        offsets, tokens = np.array([0, len(samples)]), np.zeros(1, np.int64)
    indices = np.concatenate([plan.indices, samples.astype(plan.indices.dtype)])
    dropped, codes = plan.dropped[~are_empty], plan.drop_codes[~are_empty]
    return PackPlan(offsets, indices, tokens, dropped, codes, plan.capacity, plan.bound)


def greedy_knapsack(lengths: npt.ArrayLike, max_length: int) -> list[list[int]]:
    """Assign samples to bins by best fit decreasing.

    >>> greedy_knapsack([5, 3, 4, 20], 8)
    [[0, 1], [2]]

    Args:
        lengths: tokens of each sample.
        max_length: tokens of a bin.

    Returns:
        Lists of positions. Every sample of at most ``max_length`` tokens is in exactly one list; longer ones
        are in none. :func:`plan_packs` reports those and needs fewer bins for hard data.
    """
    return plan_packs(lengths, max_length, effort=0, empty="keep").bins()


def greedy_knapsack_vt_balanced(
    lengths: npt.ArrayLike, max_length: int, visual_tokens: npt.ArrayLike
) -> list[list[int]]:
    """Return the bins of :func:`greedy_knapsack`, ordered by their visual tokens.

    Ranks that take consecutive packs of a step then have a similar load on the vision encoder.
    :func:`order_packs` also balances the language model and attention, and shuffles.

    Args:
        lengths: tokens of each sample, media included.
        max_length: tokens of a bin.
        visual_tokens: media tokens of each sample.
    """
    plan = plan_packs(lengths, max_length, effort=0, empty="keep")
    visual = as_integers(visual_tokens, "visual_tokens", plan.samples).astype(np.int64)
    bins = plan.bins()
    return [bins[pack] for pack in np.argsort(plan.sums(visual), kind="stable").tolist()]


# Assignment of samples to packs.


def longest_first(
    lengths: npt.NDArray[np.integer],
    capacity: int,
    *,
    seed: int | None = None,
    epoch: int = 0,
    dataset_ids: Integers | None = None,
) -> Positions:
    """Return positions in order of decreasing length; lengths and their number are below 2^31.

    Sorts one integer of length and position, several times faster than ``argsort``; to shuffle within each
    length, the position is scrambled. ``dataset_ids`` spread samples of one length so that each dataset
    appears as evenly as possible.
    """
    if seed is None and dataset_ids is None and len(lengths) <= _MAX_RADIX:
        return radix_argsort(np.subtract(capacity, lengths, dtype=np.int64), capacity)
    bits = max(_LEAST_BITS, len(lengths).bit_length())
    shuffle = None if seed is None else Shuffle(bits, seed, epoch)
    keys = np.subtract(capacity, lengths, dtype=np.int64)
    keys <<= 32
    positions = np.arange(len(keys), dtype=np.int64)
    keys |= positions if shuffle is None else shuffle.scramble(positions)
    keys.sort()
    order: Positions = keys.view(np.int32)[_LOWER_HALF::2]  # no copy
    if shuffle is not None:
        order = shuffle.restore(order.astype(np.int64)).astype(np.int32)
    if dataset_ids is not None:
        order = order[_spread_datasets(np.asarray(lengths)[order], dataset_ids[order], seed or 0, epoch)]
    return order


class Shuffle:
    """A permutation of the integers of ``bits`` bits for each seed and epoch, independent of numpy's version.

    Three rounds of multiplying by an odd number and folding the upper half onto the lower.
    """

    def __init__(self, bits: int, seed: int, epoch: int) -> None:
        self._mask = (1 << bits) - 1
        self._fold = np.uint64((bits + 1) // 2)
        drawn = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=48).digest()
        words = [int.from_bytes(drawn[start : start + 8], "little") & self._mask for start in range(0, 48, 8)]
        self._rounds = [(words[i] | 1, words[i + 1]) for i in (0, 2, 4)]
        self._undo = [(pow(factor, -1, 1 << bits), add) for factor, add in reversed(self._rounds)]

    def scramble(self, numbers: Integers) -> Integers:
        """Permute integers in place."""
        x = numbers.view(np.uint64)
        for factor, add in self._rounds:
            x *= np.uint64(factor)
            x += np.uint64(add)
            x &= np.uint64(self._mask)
            x ^= x >> self._fold
        return numbers

    def restore(self, numbers: Integers) -> Integers:
        """Invert :meth:`scramble` in place."""
        x = numbers.view(np.uint64)
        for factor, add in self._undo:
            x ^= x >> self._fold
            x -= np.uint64(add)
            x *= np.uint64(factor)
            x &= np.uint64(self._mask)
        return numbers


def _spread_datasets(
    lengths: npt.NDArray[np.integer], dataset_ids: Integers, seed: int, epoch: int
) -> Integers:
    """Return an order that mixes the datasets evenly within each run of equal lengths."""
    groups = np.lexsort((dataset_ids, -lengths.astype(np.int64)))  # stable: it keeps the shuffle
    run, dataset = lengths[groups], dataset_ids[groups]
    starts = np.flatnonzero(np.concatenate([[True], (np.diff(run) != 0) | (np.diff(dataset) != 0)]))
    counts = np.diff(np.append(starts, len(groups)))
    rank = np.arange(len(groups)) - np.repeat(starts, counts)
    # Each dataset starts at its own offset, so that they do not all begin together.
    begin = random_generator(seed, epoch).random(len(starts))
    share = (rank + np.repeat(begin, counts)) / np.repeat(counts, counts)
    return groups[np.lexsort((share, -run.astype(np.int64)))]


def assign_samples(fill: Fill, order: Positions) -> tuple[Integers, Positions]:
    """Assign the samples in ``order`` (the longest first) to the packs of a fill.

    Pack ``k`` holds ``positions[offsets[k]:offsets[k + 1]]`` of the offsets and positions returned.
    """
    runs = int(np.minimum(fill.each, fill.width).sum())
    if len(order) < _MANY or len(order) < _LONG_RUN * runs:
        return gather(fill.pack_of(), fill.packs, order)
    sizes = fill.sizes()
    offsets = offsets_of(sizes)
    fill = _split_moves(fill, np.flatnonzero(np.diff(sizes)) + 1)
    positions = np.empty(len(order), np.int32)
    begins = offsets[fill.first] + fill.depth
    columns = (begins, sizes[fill.first], fill.width, fill.each)
    start = 0
    for begin, size, width, each in zip(*(column.tolist() for column in columns), strict=True):
        if each >= width:
            for to in range(begin, begin + width * size, size):
                positions[to : to + each] = order[start : start + each]
                start += each
        else:
            for to in range(begin, begin + each):
                positions[to : to + width * size : size] = order[start : start + width]
                start += width
    return offsets, positions


def _split_moves(fill: Fill, changes: Integers) -> Fill:
    """Split moves at these packs, so that all packs of a move have the same final size."""
    low = np.searchsorted(changes, fill.first, "right")
    high = np.searchsorted(changes, fill.first + fill.width, "left")
    parts = high - low + 1
    move = np.repeat(np.arange(len(parts)), parts)
    part = np.arange(len(move)) - np.repeat(np.cumsum(parts) - parts, parts)
    bounds = np.concatenate([[0], changes, [fill.packs]])
    begin = np.maximum(fill.first[move], bounds[low[move] + part])
    end = np.minimum((fill.first + fill.width)[move], bounds[low[move] + part + 1])
    return Fill(fill.packs, begin, end - begin, fill.each[move], fill.depth[move])


def radix_argsort(keys: npt.NDArray[np.integer], largest: int) -> Positions:
    """Return a stable argsort of integers from 0 to ``largest``, 16 bits at a time.

    The promise of benchmarks/packing.py (25 times the heap, for a million samples) needs it on processors for
    which numpy has no vectorised sort: 40, and 13 without.
    """
    order = np.argsort(keys.astype(np.uint16), kind="stable")  # a radix sort for this type alone
    for shift in range(16, int(largest).bit_length(), 16):
        order = order[np.argsort((keys >> shift).astype(np.uint16)[order], kind="stable")]
    return order.astype(np.int32)


def gather(pack_of: npt.NDArray[np.integer], packs: int, order: Positions) -> tuple[Integers, Positions]:
    """Return offsets and positions as :func:`assign_samples`, from the pack of each sample in ``order``."""
    offsets = offsets_of(np.bincount(pack_of, minlength=packs))
    if len(order) <= _MAX_RADIX:
        return offsets, order[radix_argsort(pack_of, packs)]
    keys = pack_of.astype(np.int64)
    keys <<= 32
    keys |= np.arange(len(order))
    keys.sort()
    return offsets, order[keys.view(np.int32)[_LOWER_HALF::2]]
