"""A loader in a trainer that fetches ahead and counts steps: what was trained is what a checkpoint says."""

from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

import packhorse
from contract.processors import processor
from contract.torchvision_ops import make_torchvision_importable
from packhorse.errors import ConfigError
from packhorse.integrations.loss import count_batch_supervised
from packhorse.integrations.trainer_feed import StepFeed, TrainerFeed, check_world
from packhorse.types import World
from raising import raises_config

make_torchvision_importable()


def examples(number: int) -> list[dict[str, Any]]:
    return [
        {
            "conversation": [
                {"role": "user", "content": f"Question {n}?"},
                {"role": "assistant", "content": "Answer. " * (1 + n % 4)},
            ]
        }
        for n in range(number)
    ]


def loader(gradient_accumulation_steps: int = 2, number: int = 12, **settings: Any) -> Any:
    settings = {"model": "unchecked", "pack_size": 128, "max_documents": 1, **settings}
    return packhorse.load(
        examples(number),
        processor("qwen2_vl"),
        gradient_accumulation_steps=gradient_accumulation_steps,
        world=World(),
        **settings,
    )


def take(batches: Iterator[Any], steps: int) -> list[int]:
    return [index for batch in islice(batches, steps) for index in batch.info.samples]


def test_a_trainer_that_never_asks_for_the_end_gets_every_epoch() -> None:
    source = loader()
    feed = TrainerFeed(source)
    assert len(feed) == 12
    for epoch in range(3):
        assert sorted(take(iter(feed), len(feed))) == list(range(12))
        assert source.epoch == epoch
        assert source.epoch_stats.epoch == epoch, "the epoch was added up"
        assert source.epoch_stats.delivered == 12


def test_the_state_counts_what_was_trained_not_what_was_fetched() -> None:
    source = loader()
    feed = TrainerFeed(source)
    batches = iter(feed)
    first = take(batches, 4)
    feed.trained += 2
    state = feed.state_dict()
    other = loader()
    resumed = TrainerFeed(other)
    resumed.load_state_dict(state)
    assert take(iter(resumed), 2) == first[2:]
    feed.trained += 2
    assert feed.state_dict() == source.state_dict()


def test_the_state_after_the_last_batch_begins_the_next_epoch() -> None:
    source = loader()
    feed = TrainerFeed(source)
    take(iter(feed), 12)
    feed.trained += 12
    other = loader()
    resumed = TrainerFeed(other)
    resumed.load_state_dict(feed.state_dict())
    assert take(iter(resumed), 12) == take(iter(feed), 12)
    assert other.epoch == source.epoch == 1


@pytest.mark.parametrize("gradient_accumulation_steps", [1, 2, 3])
def test_each_batch_comes_with_the_tokens_of_its_step(gradient_accumulation_steps: int) -> None:
    pairs = list(StepFeed(loader(gradient_accumulation_steps)))
    assert len(pairs) == 12
    for first in range(0, len(pairs), gradient_accumulation_steps):
        step = pairs[first : first + gradient_accumulation_steps]
        assert {tokens for _, tokens in step} == {sum(count_batch_supervised(batch) for batch, _ in step)}


def test_a_state_is_rejected_within_a_step_and_counts_the_step_when_it_is_finished() -> None:
    """Trainers of this kind do not save the gradients of the micro-batches so far."""
    source = loader(3)
    feed = StepFeed(source)
    batches = iter(feed)
    for number in range(1, 8):
        next(batches)
        assert (feed.trained, feed.accumulated) == (number // 3 * 3, number % 3)
        if number % 3:
            with pytest.raises(ConfigError, match=f"after {number % 3} micro-batches of an optimizer"):
                feed.state_dict()
        else:
            assert feed.state_dict()["batches"] == number
            assert feed.state_dict()["loader"]["segments"][-1][-1] == number
    assert source.cursor == 9


def test_an_epoch_that_goes_on_in_other_steps_is_as_long_as_what_was_and_what_comes() -> None:
    feed = StepFeed(loader(2))
    batches = iter(feed)
    for _ in range(4):
        next(batches)
    resumed = StepFeed(loader(1, batch_size=2))
    resumed.load_state_dict(feed.state_dict())
    assert len(resumed) == 4 + 4
    assert len(list(resumed)) == 4
    assert len(resumed) == 8, "until the next epoch begins"
    iter(resumed)
    assert len(resumed) == 6


@pytest.mark.parametrize(
    ("rank", "size", "gradient_accumulation_steps", "setting", "value"),
    [(0, 2, 2, "world", (0, 1)), (0, 1, 4, "gradient_accumulation_steps", 4)],
)
def test_a_loader_for_others_is_rejected(
    rank: int, size: int, gradient_accumulation_steps: int, setting: str, value: Any
) -> None:
    with raises_config(setting, value):
        check_world(loader(), rank, size, gradient_accumulation_steps)


def test_rows_of_its_own_are_rejected_where_only_the_first_rank_saves() -> None:
    config = SimpleNamespace(shard_data=True, gradient_accumulation_steps=1)
    own = SimpleNamespace(world=World(1, 2), config=config)
    with raises_config("shard_data", True):
        check_world(own, 1, 2, 1)
    check_world(own, 1, 2, 1, saved_by_all=True)
