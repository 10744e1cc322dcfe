"""Weights of the schedule that are measured while training, and those that are given."""

import json
import logging

import numpy as np
import pytest

from loader_samples import delivered_rows, load, mixed_rows, texts
from packhorse.loader import measured_cost
from packhorse.loader.measured_cost import StepTimes
from packhorse.neat_packing_vlm import CostWeights
from raising import raises_config


class Clock:
    """A clock that the training loops of this file set: steps take exactly as long as they say."""

    now = 0.0

    def wait(self, seconds):
        self.now += seconds


CLOCK = Clock()


@pytest.fixture(autouse=True)
def simulated_clock(monkeypatch):
    """Let steps be measured by the clock of this file, whatever else the machine does."""
    monkeypatch.setattr(measured_cost, "_mark", lambda: CLOCK.now)


WEIGHTS = CostWeights(token=1.0, token_pair=0.0, patch=0.0, patch_pair=0.0, item=400.0)


def train(loader, *, per_item=3e-3, per_token=1e-5, steps=None, pause=0):
    """Train with steps that take a time for each token and image; return the samples."""
    seen = []
    for step, batch in enumerate(loader, 1):
        items = sum(batch.info.num_images) + sum(batch.info.num_videos)
        CLOCK.wait(per_token * batch.info.tokens + per_item * items)
        if step == pause:
            CLOCK.wait(0.5)  # a checkpoint is saved
        seen += batch.info.samples
        if step == steps:
            break
    return seen


def test_an_epoch_is_scheduled_by_the_times_of_the_one_before(caplog):
    rows = mixed_rows(60)
    loader = load(rows, measure_cost=True)
    counted = loader.cost_weights
    caplog.set_level(logging.INFO, logger="packhorse.loader")
    train(loader, pause=5)
    assert loader.cost_weights is counted  # of this epoch
    features, seconds = loader.measured_costs()
    assert features.shape == (len(loader), len(counted.names))
    tokens = features[:, counted.names.index("token")]
    assert tokens.sum() <= loader.plan.tokens.sum()
    assert seconds.min() > 0
    assert seconds[4] > 0.5
    assert "cost weights fitted to" in caplog.text

    assert sorted(train(loader, steps=None)) == list(range(60))
    fitted = loader.cost_weights
    assert loader.epoch == 1
    assert fitted.unit == "seconds"
    assert "predicted from measured times" in loader.describe()
    right = 3e-3 * features[:, counted.names.index("item")] + 1e-5 * tokens
    # Images take most of the time, and operations do not say so.
    assert np.corrcoef(features @ fitted.values(), right)[0, 1] > 0.95


def test_without_the_setting_nothing_is_measured():
    loader = load(texts(20))
    delivered_rows(loader)
    assert [len(part) for part in loader.measured_costs()] == [0, 0]
    delivered_rows(loader)
    assert loader.cost_weights.unit == "operations"
    assert "predicted from operations" in loader.describe()
    assert loader.state_dict()["weights"] is None


def test_a_resumed_epoch_keeps_its_weights_also_for_another_world():
    rows = mixed_rows(60)
    first = load(rows, measure_cost=True)
    train(first)
    used = train(first, steps=4)
    state = json.loads(json.dumps(first.state_dict()))
    assert CostWeights.of(state["weights"]) == first.cost_weights
    whole = first.straggler_ratio()

    second = load(rows, measure_cost=True)
    second.load_state_dict(state)
    assert second.cost_weights == first.cost_weights
    assert (second.epoch, second.cursor, second.straggler_ratio()) == (1, 4, whole)
    rest = delivered_rows(second)
    assert sorted(used + rest) == list(range(60))

    both = []
    for rank in range(2):
        loader = load(rows, rank, 2)  # does not measure, but keeps what was measured
        loader.load_state_dict(state)
        assert loader.cost_weights == first.cost_weights
        both += delivered_rows(loader)
    assert sorted(used + both) == list(range(60))


def test_an_epoch_resumed_inside_its_last_optimizer_step_ends():
    first = load(mixed_rows(60), measure_cost=True, gradient_accumulation_steps=4)
    for number, _ in enumerate(first, 1):
        if number == len(first) - 2:
            break
    second = load(mixed_rows(60), measure_cost=True, gradient_accumulation_steps=4)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert len(list(second)) == 2
    assert second.cost_weights.unit == "operations"


def test_weights_that_are_not_named_are_zero():
    weights = CostWeights.of({"token": 1e-6, "unit": "seconds"})
    assert weights.token_pair == weights.patch == weights.item == 0
    with raises_config("token", 0.0):
        CostWeights.of({})


def test_a_state_of_the_end_of_an_epoch_has_the_weights_of_the_next():
    rows = mixed_rows(60)
    first = load(rows, measure_cost=True)
    train(first)
    state = json.loads(json.dumps(first.state_dict()))
    assert state["weights"] is None
    assert state["next_weights"]["unit"] == "seconds"
    second = load(rows, measure_cost=True)
    second.load_state_dict(state)
    assert second.epoch == 1
    assert second.cost_weights == CostWeights.of(state["next_weights"])
    first.set_epoch(1)
    assert delivered_rows(second) == delivered_rows(first)
    second.set_epoch(5)
    assert second.cost_weights.unit == "seconds"  # the last that were measured


def test_a_state_of_an_earlier_version_has_no_measured_weights():
    loader = load(texts(20))
    delivered_rows(loader, 3)
    state = loader.state_dict()
    del state["weights"], state["next_weights"]
    again = load(texts(20))
    again.load_state_dict(state)
    assert again.cursor == 3
    with raises_config("unit", "hours"):
        again.load_state_dict(state | {"weights": {"unit": "hours"}})


def test_steps_that_say_nothing_leave_the_weights_as_they_are(caplog):
    loader = load(texts(120), measure_cost=True)
    for number, _ in enumerate(loader):
        CLOCK.wait(0.001 + 0.002 * (number % 3))
    delivered_rows(loader, 1)
    assert loader.cost_weights.unit == "operations"
    assert "cost weights unchanged" in caplog.text


def test_an_epoch_with_fewer_steps_than_weights_leaves_them_as_they_are(caplog):
    loader = load(mixed_rows(6), measure_cost=True)
    train(loader)
    delivered_rows(loader, 1)
    assert loader.cost_weights.unit == "operations"
    assert "measured times for" in caplog.text


def test_a_step_is_measured_with_all_of_its_batches():
    rows = mixed_rows(60)
    loader = load(rows, measure_cost=True, gradient_accumulation_steps=4)
    group = []
    for batch in loader:
        group.append(batch)
        if len(group) == 4:  # as trainers do: fetch all, then train
            CLOCK.wait(0.004)
            group = []
    features, seconds = loader.measured_costs()
    assert len(features) == len(loader) // 4
    assert seconds[:-1] == pytest.approx(0.004)
    packs = features[:, loader.cost_weights.names.index("pack")]
    assert set(packs[:-1].tolist()) == {4}


def test_the_time_after_a_pause_counts_to_no_step():
    times = StepTimes(2)
    for index in range(4):
        times.start(index)
        if index == 2:
            times.pause()  # the loop was left, and entered again
        times.stop(index + 1)
    assert list(times.seconds()) == [0]
    times.clear()
    assert times.seconds() == {}


class Event:
    """An event of a GPU that has come as far as ``Event.now``; elapsed times are in milliseconds."""

    now = 0

    def __init__(self, at, device=0):
        self.at, self.device = at, device

    def query(self):
        return self.at <= Event.now

    def elapsed_time(self, end):
        assert end.query()
        return end.at - self.at


def test_events_are_read_when_the_gpu_has_passed_them_and_never_waited_for(monkeypatch):
    marks = [0.0, Event(10), Event(20), Event(50), Event(60), Event(90, device=1)]
    coming = iter(marks)
    monkeypatch.setattr(measured_cost, "_mark", lambda: next(coming))
    times = StepTimes(1)
    for step in range(3):
        times.start(step)
        times.stop(step + 1)
    assert times.seconds() == {}
    Event.now = 20
    assert times.seconds() == {}  # the GPU was first used within step 0
    Event.now = 100
    assert times.seconds() == {1: 0.03}  # another one was used within step 2


def test_given_weights_schedule_the_packs_and_belong_to_the_plan(tmp_path):
    rows = mixed_rows(40)
    file = tmp_path / "weights.json"
    file.write_text(json.dumps(WEIGHTS.to_dict() | {"measured": {"device": "CPU"}}))
    given, read, counted = load(rows, cost_weights=WEIGHTS), load(rows, cost_weights=file), load(rows)
    assert given.cost_weights == read.cost_weights == WEIGHTS
    assert given.plan_key == read.plan_key != counted.plan_key
    delivered_rows(counted, 2)
    with raises_config("plan", counted.plan_key, match="cost_weights"):
        given.load_state_dict(counted.state_dict())


@pytest.mark.parametrize(
    ("weights", "setting", "match"),
    [
        ({"tokens": 1}, "cost_weights", "token"),
        ({"token": "many"}, "cost_weights", "not numbers"),
        ({"token": -1.0}, "token", "0 or more"),
        ({"token": float("nan")}, "token", "0 or more"),
        ({"unit": "days"}, "unit", "seconds"),
        ("no such file.json", "cost_weights", "cannot be read"),
        (3, "cost_weights", "expected"),
    ],
)
def test_weights_that_make_no_sense_are_rejected(weights, setting, match):
    with raises_config(setting, match=match):
        load(texts(10), cost_weights=weights)


def test_ranks_that_cannot_agree_do_not_measure():
    with raises_config("measure_cost", True, match="cannot communicate"):
        load(texts(10), 0, 2, measure_cost=True)
    with raises_config("measure_cost", True, match="shard_data"):
        load(texts(10), 0, 1, measure_cost=True, shard_data=True)
