"""Dealing samples to packs: who of the samples of one length goes where.

A fill says how many samples of a length each pack takes. Here the samples are put in order of length, those
of one length as they come, or shuffled by seed and epoch, or spread by dataset, and then delivered in that
order. All of it is numpy: one sort of the samples, and one copy in runs or a second sort.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import numpy.typing as npt

from packhorse.plan.best_fit import Fill
from packhorse.types import Integers

Positions = npt.NDArray[np.int32]

_LOWER_HALF = 0 if sys.byteorder == "little" else 1
# From so many samples on copying runs is quicker than a second sort, provided that the runs are this long.
_MANY, _LONG_RUN = 1 << 20, 24
_PIECE = 1 << 14  # numbers that stay in the processor's cache while several operations pass over them
_LEAST_BITS = 16  # a shuffle of two samples draws its order from this many bits


def longest_first(
    lengths: npt.NDArray[np.integer],
    capacity: int,
    *,
    seed: int | None = None,
    epoch: int = 0,
    dataset_ids: Integers | None = None,
) -> Positions:
    """Positions in order of falling length.

    Sorting one integer made of length and position is several times faster than numpy's ``argsort``, and for
    a shuffle within each length only the position in it has to be scrambled.

    Args:
        lengths: up to ``capacity``, fewer than 2^31 of them.
        capacity: an upper bound, below 2^31.
        seed: None keeps samples of one length in the order in which they come.
        epoch: another one shuffles anew.
        dataset_ids: the dataset of each sample; samples of one length are spread so that each dataset appears
            as evenly as possible.
    """
    bits = max(_LEAST_BITS, len(lengths).bit_length())
    shuffle = None if seed is None else Shuffle(bits, seed, epoch)
    keys = np.empty(len(lengths), np.int64)
    for at in range(0, len(keys), _PIECE):
        piece = keys[at : at + _PIECE]
        np.subtract(capacity, lengths[at : at + _PIECE], out=piece)
        piece <<= 32
        positions = np.arange(at, at + len(piece), dtype=np.int64)
        piece |= positions if shuffle is None else shuffle.scrambled(positions)
    keys.sort()
    order: Positions = keys.view(np.int32)[_LOWER_HALF::2]  # no copy
    if shuffle is not None:
        order = order.copy()
        for at in range(0, len(order), _PIECE):
            scrambled = order[at : at + _PIECE]
            scrambled[:] = shuffle.restored(scrambled.astype(np.int64))
    if dataset_ids is not None:
        order = order[
            _spread(np.asarray(lengths)[order], dataset_ids[order], 0 if seed is None else seed, epoch)
        ]
    return order


class Shuffle:
    """A reversible scrambling of the numbers of ``bits`` bits, another for each seed and epoch.

    It needs no table and no random generator, whose streams may change from one numpy to the next: three
    rounds of multiplying by an odd number and folding the upper half onto the lower.
    """

    def __init__(self, bits: int, seed: int, epoch: int) -> None:
        self._mask = (1 << bits) - 1
        self._fold = np.uint64((bits + 1) // 2)
        drawn = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=48).digest()
        words = [int.from_bytes(drawn[at : at + 8], "little") & self._mask for at in range(0, 48, 8)]
        self._rounds = [(words[i] | 1, words[i + 1]) for i in (0, 2, 4)]
        self._undo = [(pow(factor, -1, 1 << bits), add) for factor, add in reversed(self._rounds)]

    def scrambled(self, numbers: Integers) -> Integers:
        """Where each number goes; the array is overwritten."""
        x = numbers.view(np.uint64)
        for factor, add in self._rounds:
            x *= np.uint64(factor)
            x += np.uint64(add)
            x &= np.uint64(self._mask)
            x ^= x >> self._fold
        return numbers

    def restored(self, numbers: Integers) -> Integers:
        """The inverse of :meth:`scrambled`; the array is overwritten."""
        x = numbers.view(np.uint64)
        for factor, add in self._undo:
            x ^= x >> self._fold
            x -= np.uint64(add)
            x *= np.uint64(factor)
            x &= np.uint64(self._mask)
        return numbers


def random_numbers(seed: int, *more: int) -> np.random.Generator:
    """For any seed, a negative one too, and whatever else they depend on."""
    return np.random.default_rng([seed & (2**63 - 1), *more])


def _spread(lengths: npt.NDArray[np.integer], dataset_ids: Integers, seed: int, epoch: int) -> Integers:
    """An order within each run of equal lengths in which the datasets come evenly."""
    groups = np.lexsort((dataset_ids, -lengths.astype(np.int64)))  # stable: it keeps the shuffle
    run, kind = lengths[groups], dataset_ids[groups]
    starts = np.flatnonzero(np.concatenate([[True], (np.diff(run) != 0) | (np.diff(kind) != 0)]))
    counts = np.diff(np.append(starts, len(groups)))
    rank = np.arange(len(groups)) - np.repeat(starts, counts)
    # Each stratum starts at a point of its own, so that not all of them begin with their first.
    begin = random_numbers(seed, epoch).random(len(starts))
    share = (rank + np.repeat(begin, counts)) / np.repeat(counts, counts)
    return groups[np.lexsort((share, -run.astype(np.int64)))]


def deal(fill: Fill, order: Positions) -> tuple[Integers, Positions]:
    """Hand out the samples in ``order`` (the longest first) as the fill says.

    Returns:
        Offsets and positions: pack ``k`` holds ``positions[offsets[k]:offsets[k + 1]]``.
    """
    runs = int(np.minimum(fill.each, fill.width).sum())
    if len(order) < _MANY or len(order) < _LONG_RUN * runs:
        return gather(fill.pack_of(), fill.packs, order)
    sizes = fill.sizes()
    offsets = _ends(sizes)
    fill = _split(fill, np.flatnonzero(np.diff(sizes)) + 1)
    positions = np.empty(len(order), np.int32)
    begins = offsets[fill.first] + fill.depth
    columns = (begins, sizes[fill.first], fill.width, fill.each)
    at = 0
    for begin, size, width, each in zip(*(column.tolist() for column in columns), strict=True):
        if each >= width:
            for to in range(begin, begin + width * size, size):
                positions[to : to + each] = order[at : at + each]
                at += each
        else:
            for to in range(begin, begin + each):
                positions[to : to + width * size : size] = order[at : at + width]
                at += width
    return offsets, positions


def _split(fill: Fill, changes: Integers) -> Fill:
    """The moves cut at these packs, so that all packs of a move are of one size in the end."""
    low = np.searchsorted(changes, fill.first, "right")
    high = np.searchsorted(changes, fill.first + fill.width, "left")
    parts = high - low + 1
    move = np.repeat(np.arange(len(parts)), parts)
    part = np.arange(len(move)) - np.repeat(np.cumsum(parts) - parts, parts)
    bounds = np.concatenate([[0], changes, [fill.packs]])
    begin = np.maximum(fill.first[move], bounds[low[move] + part])
    end = np.minimum((fill.first + fill.width)[move], bounds[low[move] + part + 1])
    return Fill(fill.packs, begin, end - begin, fill.each[move], fill.depth[move])


def gather(pack_of: npt.NDArray[np.integer], packs: int, order: Positions) -> tuple[Integers, Positions]:
    """As :func:`deal`, where the pack of each sample in ``order`` is known; packs keep the order."""
    offsets = _ends(np.bincount(pack_of, minlength=packs))
    keys = pack_of.astype(np.int64)
    keys <<= 32
    keys |= np.arange(len(order))
    keys.sort()
    return offsets, order[keys.view(np.int32)[_LOWER_HALF::2]]


def _ends(sizes: Integers) -> Integers:
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets
