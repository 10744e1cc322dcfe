"""The comparison of a plan with batches of transformers and packs of TRL, checked against these libraries."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from packhorse.plan.cost_model import CostWeights, sample_costs
from packhorse.tools.baselines import (
    TRL_ROWS,
    compare_baselines,
    group_by_length,
    pack_like_trl,
    padded_slots,
)
from packhorse.tools.view.plan_report import compare_batches, plan_report
from packhorse.tools.view.saved_plan import PlanResult, make_plan
from packhorse.types import Integers

WEIGHTS = CostWeights(1.0, 0.01, 0.5, 0.0)


def random_lengths(count: int, longest: int) -> Integers:
    rng = np.random.default_rng(count)
    return np.minimum(rng.lognormal(np.log(longest / 8), 1.0, count), longest).astype(np.int64) + 1


def compare(lengths: Integers, costs: Any = None, ranks: int = 2, batch_size: int = 4) -> dict[str, Any]:
    costs = sample_costs(lengths, WEIGHTS) if costs is None else costs
    draw = np.random.default_rng(0)
    options: dict[str, Any] = {"pack_size": 512, "batch_size": batch_size, "ranks": ranks, "draw": draw}
    return compare_baselines(lengths, costs, WEIGHTS, **options)


@pytest.mark.parametrize(
    ("lengths", "slots"), [([], 0), ([7], 7), ([3, 1, 2, 9], 3 * 2 + 9 * 2), ([5, 1, 4], 5 * 2 + 4)]
)
def test_a_batch_is_padded_to_its_longest_row(lengths: list[int], slots: int) -> None:
    assert padded_slots(np.array(lengths, np.int64), 2) == slots


@pytest.mark.parametrize("count", [1, 7, 31, 32, 100, 1600, 1999, 5000])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_rows_are_grouped_by_length_as_transformers_groups_them(count: int, batch_size: int) -> None:
    from transformers.trainer_pt_utils import LengthGroupedSampler

    lengths = random_lengths(count, 300)  # with many equal ones
    sampler = LengthGroupedSampler(
        batch_size, lengths=lengths.tolist(), generator=torch.Generator().manual_seed(3)
    )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3)).numpy()
    assert group_by_length(lengths, order, batch_size).tolist() == list(sampler)


@pytest.mark.needs_trl
@pytest.mark.parametrize(("count", "size"), [(1, 64), (10, 64), (1000, 512), (1001, 512), (3500, 8192)])
def test_packs_of_the_baseline_are_those_of_trl(count: int, size: int) -> None:
    from datasets import Dataset
    from trl import pack_dataset

    lengths = random_lengths(count, size - 1)
    rows = Dataset.from_dict({"input_ids": [[row] * length for row, length in enumerate(lengths.tolist())]})
    packed = pack_dataset(rows, seq_length=size, strategy="bfd")
    theirs = [
        [(ids[end - length], length) for end, length in zip(np.cumsum(parts), parts, strict=True)]
        for ids, parts in zip(packed["input_ids"], packed["seq_lengths"], strict=True)
    ]
    packs = pack_like_trl(lengths, size)
    ours: list[list[tuple[int, int]]] = [[] for _ in range(int(packs.max()) + 1)]
    for row in np.lexsort((np.arange(count), -lengths, np.arange(count) // TRL_ROWS)).tolist():
        ours[packs[row]].append((row, int(lengths[row])))
    assert ours == theirs


def test_a_pack_size_that_needs_large_integers_gives_the_same_packs() -> None:
    lengths = random_lengths(2500, 500)
    small, large = pack_like_trl(lengths, 512), pack_like_trl(lengths * 2**20, 512 * 2**20)
    assert small.tolist() == large.tolist()


def test_padding_is_paid_for_and_media_are_not_padded() -> None:
    lengths = np.array([10, 20, 10, 20, 10, 20, 10, 20])
    text = sample_costs(lengths, WEIGHTS)
    found = compare(lengths, text + 100.0, ranks=1, batch_size=8)
    padded = 8 * float(sample_costs([20], WEIGHTS)[0]) + 8 * 100
    assert found["random"]["cost"] == found["length_grouped"]["cost"] == pytest.approx(padded)
    assert found["trl"]["cost"] == pytest.approx(text.sum() + 8 * 100)
    assert (found["random"]["slots"], found["trl"]["slots"], found["trl"]["fill"]) == (160, 120, 120 / 512)


def test_the_last_step_is_filled_from_the_beginning() -> None:
    found = compare(np.full(9, 10), ranks=2, batch_size=4)
    assert (found["random"]["steps"], found["random"]["slots"]) == (2, 90)
    assert found["random"]["straggler"] == pytest.approx(1)
    one_step = 4 * float(sample_costs([10], WEIGHTS)[0])
    assert found["random"]["cost"] == pytest.approx(2 * one_step)


def test_grouping_pads_less_than_random_batches_and_has_more_even_steps() -> None:
    found = compare(random_lengths(20_000, 500), ranks=8, batch_size=8)
    assert found["length_grouped"]["slots"] < found["random"]["slots"]
    assert 1 < found["length_grouped"]["straggler"] < found["random"]["straggler"]
    assert found["trl"]["cost"] < found["length_grouped"]["cost"] < found["random"]["cost"]


def test_no_row_gives_no_step() -> None:
    for method in compare(np.zeros(0, np.int64)).values():
        assert (method["steps"], method["slots"], method["cost"], method["straggler"]) == (0, 0, 0, 1)


def test_the_plan_is_the_unit_of_time_and_every_method_has_the_same_rows(planned: PlanResult) -> None:
    found = compare_batches(planned)
    assert found["packed"]["time"] == 1
    assert found["packed"]["fill"] == planned.packs.plan.fill
    for name in ("packed", "random", "length_grouped", "trl"):
        assert found[name]["slots"] * (1 - found[name]["wasted"]) == pytest.approx(found["tokens"])
    lengths = planned.planner.lengths[planned.packs.plan.indices]
    assert found["trl"]["slots"] == found["tokens"] == int(lengths.sum())


def test_a_negative_seed_gives_a_report(planned: PlanResult) -> None:
    request = planned.request
    seeded = replace(request, config=request.config.with_changes(seed=-1))
    report = plan_report(make_plan(seeded, planned.opened))
    assert report["settings"]["seed"] == -1
    assert report["comparison"]["random"]["slots"] >= report["tokens"]
    assert report["straggler"][0]["random"] == 1
