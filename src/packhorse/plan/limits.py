"""Plans that keep to more than one limit: tokens, and say visual tokens, media or documents of a pack.

A second limit is a guard of memory that most packs never come near. So packs are planned by length first;
only those over a limit are opened and their samples packed again, one by one. Where that is not good enough,
because a limit is what decides, everything is packed one by one, in whichever of two ways suits the data:
best fit, or spreading the load evenly over as many packs as there must be. That takes some five to ten
microseconds a sample.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.plan.cutting_stock import Assignment
from packhorse.types import Integers

_NEAR_ENOUGH = 0.005  # over the bound: not worth packing everything anew
_LOOKS = 8  # how many packs to look at for one sample, the tightest ones and the emptiest ones
_TRIAL = 40_000  # samples on which to find out which way suits the data


class Resource(NamedTuple):
    """What each sample takes of something, and how much of it a pack has; no sample takes more than that."""

    values: Integers
    limit: int

    @property
    def fewest_packs(self) -> int:
        """No plan has fewer packs than this."""
        total = int(self.values.sum())
        return -(-total // self.limit) if total else 0

    def take(self, samples: npt.NDArray[np.integer]) -> Resource:
        """The same for some of the samples."""
        return Resource(self.values[samples], self.limit)


def within_limits(plan: Assignment, tokens: Resource, others: list[Resource], bound: int) -> Assignment:
    """A plan in which no pack is over any limit.

    Args:
        plan: in which no pack is over its capacity of tokens.
        tokens: lengths and capacity.
        others: the further limits, for the same samples.
        bound: no plan by length alone has fewer packs.
    """
    pack_of = plan.pack_of
    over = np.zeros(plan.packs, np.bool_)
    for other in others:
        over |= np.bincount(pack_of, weights=other.values, minlength=plan.packs) > other.limit
    if not over.any():
        return plan
    again = np.flatnonzero(over[pack_of])
    packs, places = _anew([one.take(again) for one in (tokens, *others)])
    kept = plan.packs - int(over.sum())
    renumbered = np.cumsum(~over) - 1
    mended = renumbered[pack_of]
    mended[again] = kept + places
    best = Assignment(kept + packs, mended)
    bound = max(bound, *(other.fewest_packs for other in others))
    if len(again) < len(pack_of) and best.packs > (1 + _NEAR_ENOUGH) * bound:
        best = min(best, _anew([tokens, *others]), key=lambda plan: plan.packs)
    return best


def _anew(resources: list[Resource]) -> Assignment:
    """Pack everything in the way that does better, on all samples or, if they are many, on some."""
    samples = len(resources[0].values)
    ways = (_evenly, _one_by_one)
    if samples <= 2 * _TRIAL:
        return min((Assignment(*way(resources)) for way in ways), key=lambda plan: plan.packs)
    some = np.arange(0, samples, samples // _TRIAL)
    trial = [one.take(some) for one in resources]
    return Assignment(*min(ways, key=lambda way: way(trial)[0])(resources))


def _by_share(resources: list[Resource]) -> Integers:
    """Samples in the order of what they take most of.

    By length alone a long text without images would come last where images are scarce.
    """
    share = np.max([one.values / one.limit for one in resources], axis=0)
    return np.argsort(-share, kind="stable")


def _evenly(resources: list[Resource]) -> tuple[int, Integers]:
    """Each sample to the emptiest of as many packs as there must be; what finds no place, one by one.

    Packs fill at the same pace in everything, so none is out of places for documents while it has room for
    tokens. As :func:`_one_by_one`, it returns the number of packs and the pack of each sample.
    """
    order = _by_share(resources)
    wants = list(zip(*(one.values[order].tolist() for one in resources), strict=True))
    limits = [one.limit for one in resources]
    packs = max(one.fewest_packs for one in resources)
    rooms = [limits] * packs
    loads = [(0.0, pack) for pack in range(packs)]
    places = []
    for want in wants:
        aside: list[tuple[float, int]] = []
        place = -1
        while loads and len(aside) < _LOOKS and place < 0:
            _, pack = loads[0]
            left = [have - take for have, take in zip(rooms[pack], want, strict=True)]
            if min(left) < 0:
                aside.append(heappop(loads))
            else:
                place, rooms[pack] = pack, left
                load = max(1 - have / limit for have, limit in zip(left, limits, strict=True))
                heapreplace(loads, (load, pack))
        for entry in aside:
            heappush(loads, entry)
        places.append(place)
    pack_of = np.empty(len(places), np.int64)
    pack_of[order] = places
    rest = np.flatnonzero(pack_of < 0)
    if len(rest):
        packs, pack_of[rest] = _one_by_one([one.take(rest) for one in resources], rooms)
    return packs, pack_of


def _one_by_one(resources: list[Resource], rooms: Sequence[list[int]] = ()) -> tuple[int, Integers]:
    """Best fit decreasing on the scarcest resource, among packs that have enough of the others.

    One that is the same for all samples (the number of documents) says nothing about fit and is not used.

    Args:
        resources: in any order.
        rooms: of packs that exist already, for each what it has left of every resource.

    Returns:
        The number of packs, and the pack of each sample.
    """
    need = [int(np.ptp(one.values) > 0) * int(one.values.sum()) / one.limit for one in resources]
    first = need.index(max(need))
    others = [at for at in range(len(resources)) if at != first]
    fewest = [int(one.values.min()) for one in resources]
    values = resources[first].values.tolist()
    sides = [resources[at].values.tolist() for at in others]
    limits = [resources[at].limit for at in others]
    packs = _Packs(fewest[first], [fewest[at] for at in others])
    for pack, given in enumerate(rooms):
        packs.put(pack, given[first], [given[at] for at in others])
    packs.number = len(rooms)
    pack_of = np.empty(len(values), np.int64)
    for sample in _by_share(resources).tolist():
        wants = [side[sample] for side in sides]
        value = values[sample]
        found = packs.find(value, wants)
        if found is None:
            found = packs.number, resources[first].limit, limits
            packs.number += 1
        pack, room, free = found
        pack_of[sample] = pack
        free = [have - want for have, want in zip(free, wants, strict=True)]
        packs.put(pack, room - value, free)
    return packs.number, pack_of


class _Packs:
    """Packs by the room they have of the first resource; those too full for any sample are dropped."""

    def __init__(self, least: int, least_of_others: list[int]) -> None:
        self.number = 0
        self._least, self._least_of_others = least, least_of_others
        self._rooms: list[int] = []
        self._by_room: dict[int, list[tuple[int, list[int]]]] = {}

    def put(self, pack: int, room: int, free: list[int]) -> None:
        if room < self._least:
            return
        for have, least in zip(free, self._least_of_others, strict=True):
            if have < least:
                return
        if room in self._by_room:
            self._by_room[room].append((pack, free))
        else:
            self._by_room[room] = [(pack, free)]
            insort(self._rooms, room)

    def find(self, value: int, wants: list[int]) -> tuple[int, int, list[int]] | None:
        """Take out the tightest pack in which the sample fits, among those it looks at."""
        rooms = self._rooms
        start = bisect_left(rooms, value)
        tightest = range(start, min(start + _LOOKS, len(rooms)))
        emptiest = range(len(rooms) - 1, max(start, len(rooms) - _LOOKS) - 1, -1)
        for places in (tightest, emptiest):
            looks = _LOOKS
            for at in places:
                room = rooms[at]
                stack = self._by_room[room]
                for place in range(len(stack) - 1, max(-1, len(stack) - 1 - looks), -1):
                    looks -= 1
                    pack, free = stack[place]
                    for have, want in zip(free, wants, strict=True):
                        if have < want:
                            break
                    else:
                        stack[place] = stack[-1]
                        stack.pop()
                        if not stack:
                            del self._by_room[room], rooms[at]
                        return pack, room, free
                if looks <= 0:
                    break
        return None
