"""Plans with further limits: visual tokens, media items or documents of a pack.

Packs are planned by length first; the samples of packs over a limit are repacked one by one (5 to 10
microseconds each), and all of them if that is not good enough.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from operator import lt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.plan.cutting_stock import Assignment
from packhorse.types import Integers

_NEAR_ENOUGH = 0.005  # over the bound: not worth repacking everything
_LOOKS = 8  # packs to look at for one sample, of the tightest and of the emptiest
_TRIAL = 40_000  # samples on which to choose the method


class Resource(NamedTuple):
    """What each sample takes of a resource, and how much a pack has; no sample takes more than that."""

    values: Integers
    limit: int

    @property
    def fewest_packs(self) -> int:
        """Lower bound on the packs."""
        total = int(self.values.sum())
        return -(-total // self.limit) if total else 0

    def take(self, samples: npt.NDArray[np.integer]) -> Resource:
        """Return the resource for some of the samples."""
        return Resource(self.values[samples], self.limit)


def within_limits(plan: Assignment, tokens: Resource, others: list[Resource], bound: int) -> Assignment:
    """Return a plan by length alone with the packs over a limit repacked; ``bound`` is by length too."""
    pack_of = plan.pack_of
    over = np.zeros(plan.packs, np.bool_)
    for other in others:
        over |= np.bincount(pack_of, weights=other.values, minlength=plan.packs) > other.limit
    if not over.any():
        return plan
    samples = np.flatnonzero(over[pack_of])
    packs, new_packs = _repack([resource.take(samples) for resource in (tokens, *others)])
    kept = plan.packs - int(over.sum())
    renumbered = np.cumsum(~over) - 1
    repacked = renumbered[pack_of]
    repacked[samples] = kept + new_packs
    best = Assignment(kept + packs, repacked)
    bound = max(bound, *(other.fewest_packs for other in others))
    if len(samples) < len(pack_of) and best.packs > (1 + _NEAR_ENOUGH) * bound:
        best = min(best, _repack([tokens, *others]), key=lambda plan: plan.packs)
    return best


def _repack(resources: list[Resource]) -> Assignment:
    """Pack everything with the better method; of many samples, some decide which that is."""
    samples = len(resources[0].values)
    methods = (_spread_evenly, _best_fit)
    if samples <= 2 * _TRIAL:
        return min((Assignment(*method(resources)) for method in methods), key=lambda plan: plan.packs)
    some = np.arange(0, samples, samples // _TRIAL)
    trial = [resource.take(some) for resource in resources]
    return Assignment(*min(methods, key=lambda method: method(trial)[0])(resources))


def _by_share(resources: list[Resource]) -> Integers:
    """Return samples by the largest share that they take of any resource, descending."""
    share = np.max([resource.values / resource.limit for resource in resources], axis=0)
    return np.argsort(-share, kind="stable")


def _spread_evenly(resources: list[Resource]) -> tuple[int, Integers]:
    """Put each sample into the emptiest of the fewest possible packs, the rest by :func:`_best_fit`.

    All resources of a pack fill at the same pace. Returns the number of packs and the pack of each sample.
    """
    order = _by_share(resources)
    wants = list(zip(*(resource.values[order].tolist() for resource in resources), strict=True))
    limits = [resource.limit for resource in resources]
    packs = max(resource.fewest_packs for resource in resources)
    spaces = [limits] * packs
    loads = [(0.0, pack) for pack in range(packs)]
    chosen = []
    for want in wants:
        aside: list[tuple[float, int]] = []
        choice = -1
        while loads and len(aside) < _LOOKS and choice < 0:
            _, pack = loads[0]
            left = [have - take for have, take in zip(spaces[pack], want, strict=True)]
            if min(left) < 0:
                aside.append(heappop(loads))
            else:
                choice, spaces[pack] = pack, left
                load = max(1 - have / limit for have, limit in zip(left, limits, strict=True))
                heapreplace(loads, (load, pack))
        for entry in aside:
            heappush(loads, entry)
        chosen.append(choice)
    pack_of = np.empty(len(chosen), np.int64)
    pack_of[order] = chosen
    rest = np.flatnonzero(pack_of < 0)
    if len(rest):
        packs, pack_of[rest] = _best_fit([resource.take(rest) for resource in resources], spaces)
    return packs, pack_of


def _best_fit(resources: list[Resource], spaces: Sequence[list[int]] = ()) -> tuple[int, Integers]:
    """Best fit decreasing on the scarcest resource, among packs that have enough of the others.

    Resources that are equal for all samples (the number of documents) do not decide the fit; ``spaces`` is
    what existing packs have left. Returns the number of packs and the pack of each sample.
    """
    need = [int(np.ptp(values) > 0) * int(values.sum()) / limit for values, limit in resources]
    first = need.index(max(need))
    others = [number for number in range(len(resources)) if number != first]
    fewest = [int(resource.values.min()) for resource in resources]
    values = resources[first].values.tolist()
    sides = [resources[number].values.tolist() for number in others]
    limits = [resources[number].limit for number in others]
    packs = _Packs(fewest[first], [fewest[number] for number in others])
    for pack, given in enumerate(spaces):
        packs.put(pack, given[first], [given[number] for number in others])
    packs.count = len(spaces)
    pack_of = np.empty(len(values), np.int64)
    for sample in _by_share(resources).tolist():
        wants = [side[sample] for side in sides]
        value = values[sample]
        fit = packs.find(value, wants)
        if fit is None:
            fit = packs.count, resources[first].limit, limits
            packs.count += 1
        pack, space, free = fit
        pack_of[sample] = pack
        free = [have - want for have, want in zip(free, wants, strict=True)]
        packs.put(pack, space - value, free)
    return packs.count, pack_of


class _Packs:
    """Packs by their space of the first resource, without those too full for any sample."""

    def __init__(self, least: int, least_of_others: list[int]) -> None:
        self.count = 0
        self._least, self._least_of_others = least, least_of_others
        self._spaces: list[int] = []
        self._by_space: dict[int, list[tuple[int, list[int]]]] = {}

    def put(self, pack: int, space: int, free: list[int]) -> None:
        if space < self._least or any(map(lt, free, self._least_of_others)):
            return
        if space in self._by_space:
            self._by_space[space].append((pack, free))
        else:
            self._by_space[space] = [(pack, free)]
            insort(self._spaces, space)

    def find(self, value: int, wants: list[int]) -> tuple[int, int, list[int]] | None:
        """Remove and return the tightest pack that fits the sample, among ``_LOOKS`` candidates."""
        spaces = self._spaces
        start = bisect_left(spaces, value)
        tightest = range(start, min(start + _LOOKS, len(spaces)))
        emptiest = range(len(spaces) - 1, max(start, len(spaces) - _LOOKS) - 1, -1)
        for candidates in (tightest, emptiest):
            looks = _LOOKS
            for index in candidates:
                space = spaces[index]
                stack = self._by_space[space]
                for position in range(len(stack) - 1, max(-1, len(stack) - 1 - looks), -1):
                    looks -= 1
                    pack, free = stack[position]
                    if any(map(lt, free, wants)):
                        continue
                    stack[position] = stack[-1]
                    stack.pop()
                    if not stack:
                        del self._by_space[space], spaces[index]
                    return pack, space, free
                if looks <= 0:
                    break
        return None
