"""Whatever the lengths, the capacity and the limits: every sample in one pack or one drop, no pack too full.

Ten thousand random plans in all, most of them from seeded loops, which are quicker than hypothesis.
"""

import bisect
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.neat_packing_vlm import greedy_knapsack, greedy_knapsack_vt_balanced, plan_packs

SEEDED = 250  # plans in each of the chunks below
CHUNKS = 36


def best_fit_decreasing(lengths: list[int], capacity: int) -> int:
    """The number of bins of best fit decreasing, sample by sample."""
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        index = bisect.bisect_left(spaces, length)
        space = spaces.pop(index) if index < len(spaces) else capacity
        bisect.insort(spaces, space - length)
    return len(spaces)


def check(lengths, capacity, *, limits=None, alignment=1, **options):
    """A plan of these lengths, after it has been looked at from all sides."""
    limits = limits or {}
    plan = plan_packs(lengths, capacity, limits=limits, alignment=alignment, **options)
    sizes = -(-np.asarray(lengths, np.int64) // alignment) * alignment
    everybody = np.concatenate([plan.indices, plan.dropped])
    assert sorted(everybody.tolist()) == list(range(len(lengths)))
    assert plan.offsets[0] == 0
    assert (np.diff(plan.offsets) > 0).all()
    assert plan.offsets[-1] == len(plan.indices)
    assert (plan.sums(sizes) <= capacity).all()
    assert plan.sums(np.asarray(lengths, np.int64)).tolist() == plan.tokens.tolist()
    for values, limit in limits.values():
        assert (plan.sums(np.asarray(values, np.int64)) <= limit).all()
    for sample in plan.dropped.tolist():
        alone_over = any(values[sample] > limit for values, limit in limits.values())
        assert sizes[sample] > capacity or sizes[sample] == 0 or alone_over
    packed = sizes[plan.indices].tolist()
    assert len(plan) >= plan.bound
    if not limits:
        assert len(plan) <= best_fit_decreasing(packed, capacity)
    return plan


def draw_lengths(draw: random.Random, capacity: int) -> list[int]:
    """Lengths of one of several characters: any, large, few distinct, exact fits, some too long or empty."""
    n = draw.choice([0, 1, 2, 3, 10, 40, 120])
    kind = draw.randrange(5)
    if kind == 0:
        return [draw.randint(1, capacity) for _ in range(n)]
    if kind == 1:
        low, high = capacity // 4 + 1, max(capacity // 4 + 1, capacity // 2)
        return [draw.randint(low, high) for _ in range(n)]
    if kind == 2:
        values = [draw.randint(1, capacity) for _ in range(3)]
        return [draw.choice(values) for _ in range(n)]
    if kind == 3:
        lengths = []
        while len(lengths) < n:
            cuts = sorted(draw.randint(0, capacity) for _ in range(draw.randint(1, 4)))
            ends = [0, *cuts, capacity]
            lengths += [b - a for a, b in pairwise(ends) if b > a]
        draw.shuffle(lengths)
        return lengths
    return [draw.randint(0, capacity + capacity // 3 + 1) for _ in range(n)]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_sample_is_in_one_pack_or_dropped_and_no_pack_is_over_anything(chunk):
    draw = random.Random(chunk)
    for _ in range(SEEDED):
        capacity = draw.choice([1, 2, 7, 16, 64, 100, 1000, 8192])
        lengths = draw_lengths(draw, capacity)
        n = len(lengths)
        options = {"effort": draw.choice([0, 0, 0, None, 0.02])}
        if draw.random() < 0.5:
            options |= {"seed": draw.randrange(5), "epoch": draw.randrange(3)}
        if draw.random() < 0.2:
            options["dataset_ids"] = [draw.randrange(3) for _ in range(n)]
        if draw.random() < 0.2:
            options["alignment"] = draw.choice([2, 8, 16])
        if draw.random() < 0.25:
            visual = [draw.randint(0, length) for length in lengths]
            options["limits"] = {"visual": (visual, max(1, draw.randint(capacity // 2, capacity)))}
            if draw.random() < 0.5:
                options["limits"]["documents"] = ([1] * n, draw.randint(1, 8))
        check(lengths, capacity, **options)


@pytest.mark.parametrize("chunk", range(10))
def test_with_effort_there_are_never_more_packs_than_best_fit_makes(chunk):
    draw = random.Random(1000 + chunk)
    for _ in range(20):
        capacity = draw.choice([16, 64, 500])
        check(draw_lengths(draw, capacity), capacity, effort=0.5)


@settings(max_examples=400, deadline=None)
@given(capacity=st.integers(1, 300), data=st.data())
def test_the_histogram_gives_the_bins_of_best_fit_decreasing(capacity, data):
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    assert len(check(lengths, capacity, effort=0)) == best_fit_decreasing(lengths, capacity)


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), max_size=40),
    capacity=st.integers(1, 50),
    seed=st.integers(-5, 5),
    epoch=st.integers(0, 3),
)
def test_the_same_arguments_give_the_same_plan(lengths, capacity, seed, epoch):
    one, other = (plan_packs(lengths, capacity, seed=seed, epoch=epoch, effort=0.05) for _ in range(2))
    assert one.bins() == other.bins()
    assert one.dropped.tolist() == other.dropped.tolist()


@settings(max_examples=80, deadline=None)
@given(lengths=st.lists(st.integers(0, 60), max_size=40), capacity=st.integers(1, 50))
def test_the_documented_functions_hold_every_sample_that_fits(lengths, capacity):
    bins = greedy_knapsack(lengths, capacity)
    is_buffering = sorted(sample for one in bins for sample in one)
    assert is_buffering == [sample for sample, length in enumerate(lengths) if length <= capacity]
    assert all(one and sum(lengths[sample] for sample in one) <= capacity for one in bins)
    visual = [length // 2 for length in lengths]
    balanced = greedy_knapsack_vt_balanced(lengths, capacity, visual)
    assert sorted(balanced) == sorted(bins)
    loads = [sum(visual[sample] for sample in one) for one in balanced]
    assert loads == sorted(loads)
