"""The schedule of an epoch under any layouts: every sample once, even steps, no loss on a change."""

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

layouts = st.builds(BatchLayout, st.integers(1, 9), st.integers(1, 4), st.integers(1, 4))


@st.composite
def epochs(draw):
    """A plan of up to 120 samples with the info of each."""
    lengths = draw(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=120))
    masks = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    dataset_ids = draw(st.none() | st.just([n % 3 for n in range(len(lengths))]))
    plan = plan_packs(lengths, CAPACITY, seed=draw(st.integers(0, 5)), effort=0)
    info = SampleInfo(
        np.array(lengths, float),
        np.array(masks, np.uint8),
        None if dataset_ids is None else np.array(dataset_ids, np.int64),
    )
    return plan, info


def of_steps(schedule, first, last):
    """All samples of all ranks in these steps."""
    return [
        index
        for step in range(first, last)
        for rank in range(schedule.table.shape[1])
        for pack in schedule.samples(step, rank)
        for index in pack
    ]


@settings(max_examples=1500, deadline=None)
@given(epochs(), layouts, st.integers(0, 3), st.integers(0, 2))
def test_every_sample_is_assigned_to_one_rank_once(epoch, layout, seed, number):
    plan, info = epoch
    schedule = PackSchedule(Packs(plan, info), [ResumeSegment(*layout, 0)], seed=seed, epoch=number)

    assert sorted(of_steps(schedule, 0, len(schedule))) == sorted(plan.indices.tolist())
    assert len(schedule) % layout.gradient_accumulation_steps == 0
    assert schedule.table.shape[1:] == (layout.world_size, layout.batch_size)


@settings(max_examples=1500, deadline=None)
@given(epochs(), st.lists(st.tuples(layouts, st.floats(0, 1)), min_size=1, max_size=4), st.integers(0, 3))
def test_what_was_used_before_and_after_any_changes_of_shape_is_the_plan(epoch, changes, seed):
    plan, info = epoch
    progress, used = LoaderState(), []
    for layout, share in changes:
        progress = progress.under(layout)
        schedule = PackSchedule(Packs(plan, info), progress.segments, seed=seed)
        stop = progress.cursor + round(share * (len(schedule) - progress.cursor))
        used += of_steps(schedule, progress.cursor, stop)
        progress = progress.at(stop)
        saved = progress.to_dict("plan", {}, ())
        progress = LoaderState.from_dict(saved, "plan", {}, ())
    schedule = PackSchedule(Packs(plan, info), progress.segments, seed=seed)
    used += of_steps(schedule, progress.cursor, len(schedule))

    assert sorted(used) == sorted(plan.indices.tolist())


@settings(max_examples=500, deadline=None)
@given(epochs(), layouts, layouts, st.floats(0, 1))
def test_a_rank_has_nothing_only_where_there_are_fewer_samples_than_ranks(epoch, first, second, share):
    plan, info = epoch
    schedule = PackSchedule(Packs(plan, info), [ResumeSegment(*first, 0)])
    stop = round(share * len(schedule))
    left = of_steps(schedule, stop, len(schedule))
    schedule = PackSchedule(Packs(plan, info), [ResumeSegment(*first, stop), ResumeSegment(*second, 0)])
    tail = schedule.table[-second.gradient_accumulation_steps :]
    empty = (tail == NOTHING).all(axis=2)

    assert not (schedule.table[: -second.gradient_accumulation_steps] == NOTHING).any()
    if empty.any():  # then each of the last samples is alone
        assert all(len(schedule.units.samples(unit)) == 1 for unit in tail[tail != NOTHING].tolist())
        assert (
            len(left) < second.world_size * second.batch_size * second.gradient_accumulation_steps
            or len(schedule) > second.gradient_accumulation_steps
        )


@settings(max_examples=500, deadline=None)
@given(epochs(), layouts, st.integers(0, 5))
def test_at_least_adds_steps_and_loses_no_sample(epoch, layout, more):
    plan, info = epoch
    natural = len(PackSchedule(Packs(plan, info), [ResumeSegment(*layout, 0)]))
    schedule = PackSchedule(Packs(plan, info), [ResumeSegment(*layout, 0)], at_least=natural + more)

    assert natural + more <= len(schedule) < natural + more + layout.gradient_accumulation_steps
    assert sorted(of_steps(schedule, 0, len(schedule))) == sorted(plan.indices.tolist())


@settings(max_examples=300, deadline=None)
@given(epochs(), layouts, st.integers(0, 9), st.integers(0, 9))
def test_the_same_arguments_give_the_same_schedule_and_another_epoch_another(epoch, layout, seed, number):
    plan, info = epoch
    one, same = (
        PackSchedule(Packs(plan, info), [ResumeSegment(*layout, 0)], seed=seed, epoch=number)
        for _ in range(2)
    )
    assert np.array_equal(one.table, same.table)


def test_another_epoch_and_another_seed_have_another_order():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, CAPACITY, 400)
    plan = plan_packs(lengths, CAPACITY, effort=0)
    info = SampleInfo(lengths.astype(float), np.zeros(400, np.uint8))
    tables = [
        PackSchedule(Packs(plan, info), [ResumeSegment(4, 1, 1, 0)], seed=seed, epoch=epoch).table.tobytes()
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
    info = SampleInfo(lengths**1.5, (rng.random(3000) < 0.5).astype(np.uint8))
    schedule = PackSchedule(Packs(plan, info), [ResumeSegment(world, batch, gradient_accumulation_steps, 0)])
    body = len(schedule) - gradient_accumulation_steps
    ratios = [schedule.costs(step).max() / schedule.costs(step).mean() for step in range(body)]
    mixed = sum(
        len({int(schedule.units.media_masks[unit]) for unit in schedule.table[step].ravel().tolist()}) > 1
        for step in range(body)
    )

    assert np.mean(ratios) < 1.03
    assert mixed <= 1  # the step in which the last packs of each kind meet


def test_a_segment_that_used_more_steps_than_there_are_is_rejected():
    plan = plan_packs([5, 5, 5], 8)
    info = SampleInfo(np.ones(3), np.zeros(3, np.uint8))
    with pytest.raises(ConfigError, match="3 micro-steps"):
        PackSchedule(Packs(plan, info), [ResumeSegment(1, 1, 1, 4)])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(layouts, st.integers(0, 5)), max_size=6))
def test_shapes_that_were_never_used_leave_no_trace_in_a_state(changes):
    progress = LoaderState()
    for layout, steps in changes:
        progress = progress.under(layout)
        progress = progress.at(progress.cursor + steps)
    assert all(segment.steps for segment in progress.segments[:-1])
    assert len(progress.segments) <= max(1, len(changes))
