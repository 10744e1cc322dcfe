"""Dealing an epoch under any shapes: every sample once, equal steps, nothing lost in a change of shape."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.errors import ConfigError
from packhorse.loader.state import LoaderState
from packhorse.neat_packing_vlm import plan_packs
from packhorse.plan.schedule import NOTHING, BatchLayout, Packs, PackSchedule, ResumeSegment, SampleInfo

CAPACITY = 64

shapes = st.builds(BatchLayout, st.integers(1, 9), st.integers(1, 4), st.integers(1, 4))


@st.composite
def epochs(draw):
    """A plan of up to 120 samples with the facts of each."""
    lengths = draw(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=120))
    kinds = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    dataset_ids = draw(st.none() | st.just([n % 3 for n in range(len(lengths))]))
    plan = plan_packs(lengths, CAPACITY, seed=draw(st.integers(0, 5)), effort=0)
    facts = SampleInfo(
        np.array(lengths, float),
        np.array(kinds, np.uint8),
        None if dataset_ids is None else np.array(dataset_ids, np.int64),
    )
    return plan, facts


def of_steps(dealt, first, last):
    """All samples of all ranks in these steps."""
    return [
        index
        for step in range(first, last)
        for rank in range(dealt.table.shape[1])
        for pack in dealt.samples(step, rank)
        for index in pack
    ]


@settings(max_examples=1500, deadline=None)
@given(epochs(), shapes, st.integers(0, 3), st.integers(0, 2))
def test_every_sample_is_dealt_to_one_rank_once(epoch, shape, seed, number):
    plan, facts = epoch
    dealt = PackSchedule(Packs(plan, facts), [ResumeSegment(*shape, 0)], seed=seed, epoch=number)

    assert sorted(of_steps(dealt, 0, len(dealt))) == sorted(plan.indices.tolist())
    assert len(dealt) % shape.gradient_accumulation_steps == 0
    assert dealt.table.shape[1:] == (shape.world, shape.batch)


@settings(max_examples=1500, deadline=None)
@given(epochs(), st.lists(st.tuples(shapes, st.floats(0, 1)), min_size=1, max_size=4), st.integers(0, 3))
def test_what_was_used_before_and_after_any_changes_of_shape_is_the_plan(epoch, changes, seed):
    plan, facts = epoch
    progress, used = LoaderState(), []
    for shape, share in changes:
        progress = progress.under(shape)
        dealt = PackSchedule(Packs(plan, facts), progress.segments, seed=seed)
        stop = progress.cursor + round(share * (len(dealt) - progress.cursor))
        used += of_steps(dealt, progress.cursor, stop)
        progress = progress.at(stop)
        saved = progress.to_dict("plan", {}, ())
        progress = LoaderState.from_dict(saved, "plan", {}, ())
    dealt = PackSchedule(Packs(plan, facts), progress.segments, seed=seed)
    used += of_steps(dealt, progress.cursor, len(dealt))

    assert sorted(used) == sorted(plan.indices.tolist())


@settings(max_examples=500, deadline=None)
@given(epochs(), shapes, shapes, st.floats(0, 1))
def test_a_rank_has_nothing_only_where_there_are_fewer_samples_than_ranks(epoch, first, second, share):
    plan, facts = epoch
    dealt = PackSchedule(Packs(plan, facts), [ResumeSegment(*first, 0)])
    stop = round(share * len(dealt))
    left = of_steps(dealt, stop, len(dealt))
    dealt = PackSchedule(Packs(plan, facts), [ResumeSegment(*first, stop), ResumeSegment(*second, 0)])
    tail = dealt.table[-second.gradient_accumulation_steps :]
    empty = (tail == NOTHING).all(axis=2)

    assert not (dealt.table[: -second.gradient_accumulation_steps] == NOTHING).any()
    if empty.any():  # then each of the last samples is alone
        assert all(len(dealt.units.samples(unit)) == 1 for unit in tail.ravel().tolist() if unit != NOTHING)
        assert (
            len(left) < second.world * second.batch * second.gradient_accumulation_steps
            or len(dealt) > second.gradient_accumulation_steps
        )


@settings(max_examples=500, deadline=None)
@given(epochs(), shapes, st.integers(0, 5))
def test_more_steps_can_be_asked_for_and_lose_nothing(epoch, shape, more):
    plan, facts = epoch
    natural = len(PackSchedule(Packs(plan, facts), [ResumeSegment(*shape, 0)]))
    dealt = PackSchedule(Packs(plan, facts), [ResumeSegment(*shape, 0)], at_least=natural + more)

    assert natural + more <= len(dealt) < natural + more + shape.gradient_accumulation_steps
    assert sorted(of_steps(dealt, 0, len(dealt))) == sorted(plan.indices.tolist())


@settings(max_examples=300, deadline=None)
@given(epochs(), shapes, st.integers(0, 9), st.integers(0, 9))
def test_the_same_arguments_deal_the_same_and_another_epoch_another_order(epoch, shape, seed, number):
    plan, facts = epoch
    one, same = (
        PackSchedule(Packs(plan, facts), [ResumeSegment(*shape, 0)], seed=seed, epoch=number)
        for _ in range(2)
    )
    assert np.array_equal(one.table, same.table)


def test_another_epoch_and_another_seed_have_another_order():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, CAPACITY, 400)
    plan = plan_packs(lengths, CAPACITY, effort=0)
    facts = SampleInfo(lengths.astype(float), np.zeros(400, np.uint8))
    tables = [
        PackSchedule(Packs(plan, facts), [ResumeSegment(4, 1, 1, 0)], seed=seed, epoch=epoch).table.tobytes()
        for seed, epoch in itertools.product(range(3), range(3))
    ]
    assert len(set(tables)) == 9


@pytest.mark.parametrize("world", range(1, 10))
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("gradient_accumulation_steps", [1, 4])
def test_steps_of_every_shape_are_even(world, batch, gradient_accumulation_steps):
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, CAPACITY, 3000)
    plan = plan_packs(lengths, CAPACITY, effort=0)
    facts = SampleInfo(lengths**1.5, (rng.random(3000) < 0.5).astype(np.uint8))
    dealt = PackSchedule(Packs(plan, facts), [ResumeSegment(world, batch, gradient_accumulation_steps, 0)])
    body = len(dealt) - gradient_accumulation_steps
    ratios = [dealt.costs(step).max() / dealt.costs(step).mean() for step in range(body)]
    mixed = sum(
        len({int(dealt.units.kinds[unit]) for unit in dealt.table[step].ravel().tolist()}) > 1
        for step in range(body)
    )

    assert np.mean(ratios) < 1.03
    assert mixed <= 1  # the step in which the last packs of each kind meet


def test_a_segment_that_used_more_steps_than_there_are_is_rejected():
    plan = plan_packs([5, 5, 5], 8)
    facts = SampleInfo(np.ones(3), np.zeros(3, np.uint8))
    with pytest.raises(ConfigError, match="3 micro-steps"):
        PackSchedule(Packs(plan, facts), [ResumeSegment(1, 1, 1, 4)])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(shapes, st.integers(0, 5)), max_size=6))
def test_shapes_that_were_never_used_leave_no_trace_in_a_state(changes):
    progress = LoaderState()
    for shape, steps in changes:
        progress = progress.under(shape)
        progress = progress.at(progress.cursor + steps)
    assert all(segment.steps for segment in progress.segments[:-1])
    assert len(progress.segments) <= max(1, len(changes))
