"""What the reference pipeline is known to get wrong, one test for each failure."""

import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from count_samples import write_chats
from loader_samples import chat, delivered_rows, load, mixed_rows, texts
from packhorse.neat_packing_vlm import CostWeights, sample_costs

RANKS = 4


def steps_of(rows: Any, **options: Any) -> list[list[tuple[dict[str, Any], tuple[int, ...]]]]:
    """For each step of an epoch what each of four ranks gets: the batch and its samples."""
    by_rank = []
    for rank in range(RANKS):
        loader = load(rows, rank, RANKS, **options)
        by_rank.append([(batch, batch.info.samples) for batch in loader])
    return [list(step) for step in zip(*by_rank, strict=True)]


# Double sharding: rows were cut by rank when opened, and once more by the sampler.


@pytest.mark.parametrize("mode", ["pack", "pad"])
@pytest.mark.parametrize("kind", ["list", "meta file"])
def test_double_sharding_of_64_rows_four_ranks_see_64_and_not_16(
    kind: str, mode: str, tmp_path: Path, cache: Path
) -> None:
    data = texts(64) if kind == "list" else str(write_chats(tmp_path, 64))
    seen = [delivered_rows(load(data, rank, RANKS, mode=mode)) for rank in range(RANKS)]
    assert sorted(chain(*seen)) == list(range(64))
    assert all(len(rows) > 4 for rows in seen)


# Balance: packs were put into even steps, and then shuffled one by one.


def straggler(costs: Any) -> float:
    """Return the cost of the most expensive rank over the mean, for each step."""
    return float((costs.max(axis=1) / costs.mean(axis=1)).mean())


@pytest.mark.parametrize("mode", ["pack", "pad"])
def test_balance_survives_the_shuffle(mode: str) -> None:
    draw = random.Random(0)
    rows = [chat("why " * draw.randint(1, 40), f"so {n} " * draw.randint(1, 12)) for n in range(240)]
    loader = load(rows, 0, RANKS, mode=mode, pack_size=256)
    weights = sample_costs(loader.counts.total - 1, CostWeights())
    steps = steps_of(rows, mode=mode, pack_size=256)
    costs = np.array([[weights[list(samples)].sum() for _, samples in step] for step in steps[:-1]])
    assert len(costs) > 20
    shuffled = np.random.default_rng(0).permutation(costs.reshape(-1)).reshape(costs.shape)
    assert straggler(costs) < 1.06
    assert straggler(shuffled) - 1 > 3 * (straggler(costs) - 1)
    assert straggler(shuffled) > 1.1
    # It is shuffled: neither the costs of steps nor the samples come in order.
    means = costs.mean(axis=1)
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.5
    assert loader.straggler_ratio() < 1.15


# Unseeded replacement: a sample that failed was replaced by one drawn from the global random numbers.


def batches_with_a_loss(num_workers: int, **options: Any) -> Iterator[dict[str, Any]]:
    rows = mixed_rows(30)
    loader = load(rows, num_workers=num_workers, max_bad_share=None, **options)
    rows[7] = rows[19] = {"conversation": []}  # once they are counted
    yield from loader
    assert loader.epoch_stats is not None
    assert (loader.epoch_stats.lost, loader.epoch_stats.delivered) == (2, 28)
    loader.close()


@pytest.mark.parametrize("mode", ["pack", "pad"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_unseeded_replacement_two_runs_with_one_seed_are_equal_to_the_bit(
    num_workers: int, mode: str
) -> None:
    runs = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        runs.append(list(batches_with_a_loss(num_workers, mode=mode)))
    assert len(runs[0]) == len(runs[1]) > 5
    for one, other in zip(*runs, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            same = (
                torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
            )
            assert same, name
    other_seed = list(batches_with_a_loss(num_workers, mode=mode, seed=1))
    assert [batch["input_ids"].tolist() for batch in other_seed] != [
        batch["input_ids"].tolist() for batch in runs[0]
    ]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_feeding_draws_nothing_from_the_random_numbers_of_the_program(num_workers: int) -> None:
    def states() -> tuple[Any, ...]:
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    before = states()
    assert list(batches_with_a_loss(num_workers))
    assert states() == before


# Text-only ranks: where a rank has no image in a step, its vision tower does not run, and the others wait.


def media_of(batch: dict[str, Any]) -> frozenset[str]:
    return frozenset(name for name in batch if "pixel" in name or "grid" in name)


@pytest.mark.parametrize("mode", ["pack", "pad"])
def test_text_only_hang_in_every_step_all_ranks_have_the_same_media(mode: str) -> None:
    rows = mixed_rows(61)
    steps = steps_of(rows, mode=mode)
    assert all(len({media_of(batch) for batch, _ in step}) == 1 for step in steps)
    assert len({media_of(step[0][0]) for step in steps}) > 1, "steps with and without media"
    never = steps_of(rows, mode=mode, placeholder="never")
    assert any(len({media_of(batch) for batch, _ in step}) > 1 for step in never)
    for both in (steps, never):
        assert sorted(chain(*(samples for step in both for _, samples in step))) == list(range(61))


def test_text_only_hang_a_rank_that_loses_its_only_image_gets_a_placeholder() -> None:
    rows = mixed_rows(61)
    lost = 0
    by_rank = []
    for rank in range(RANKS):
        own = list(rows)
        loader = load(own, rank, RANKS, max_bad_share=None)
        for index in range(0, 61, 2):  # once they are counted
            own[index] = {"conversation": []}
        by_rank.append([media_of(batch) for batch in loader])
        lost += loader.metrics.lost
    assert lost == 31
    assert all(len(set(step)) == 1 for step in zip(*by_rank, strict=True))


def test_samples_that_are_cut_leave_space_for_the_placeholder() -> None:
    rows = mixed_rows(40) + [chat("why " * 10, f"so {n} " * 200) for n in range(21)]
    steps = steps_of(rows, on_overlong="truncate")
    assert sorted(chain(*(samples for step in steps for _, samples in step))) == list(range(61))
    assert all(len({media_of(batch) for batch, _ in step}) == 1 for step in steps)
    assert max(batch["input_ids"].shape[1] for step in steps for batch, _ in step) <= 256
