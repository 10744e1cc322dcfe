"""Planning: what goes in, what comes out, and how well hard mixes are packed."""

import numpy as np
import pytest
import torch

from packhorse.neat_packing_vlm import PackPlan, greedy_knapsack, greedy_knapsack_vt_balanced, plan_packs
from packhorse.plan.best_fit import Fill, Histogram, best_fit, lower_bound
from packhorse.plan.planning import Shuffle, assign_samples, gather, longest_first
from raising import raises_config


def mixed_lengths(n: int, seed: int = 0) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(5.8, 1.0, n).astype(np.int64), 1, 8192)


def test_a_small_plan_reads_as_the_docstring_says():
    plan = plan_packs([5, 3, 4, 20], capacity=8)
    assert plan.bins() == [[0, 1], [2]]
    assert {reason: found.tolist() for reason, found in plan.dropped_by_reason().items()} == {"too_long": [3]}
    assert plan.tokens.tolist() == [8, 4]
    assert plan.fill == 12 / 16
    assert len(plan) == plan.bound == 2
    assert plan[1].tolist() == plan[-1].tolist() == [2]
    assert plan.pack_of().tolist() == [0, 0, 1, -1]
    with pytest.raises(IndexError):
        plan[2]


def test_no_samples_make_no_packs():
    plan = plan_packs([], 8)
    assert (len(plan), plan.samples, plan.fill, plan.bins(), plan.bound) == (0, 0, 0.0, [], 0)
    assert greedy_knapsack([], 8) == []
    assert greedy_knapsack_vt_balanced([], 8, []) == []


def test_one_sample_makes_one_pack():
    assert plan_packs([8], 8).bins() == [[0]]


def test_samples_that_are_all_too_long_are_all_dropped():
    plan = plan_packs([9, 10, 11], 8)
    assert len(plan) == 0
    assert plan.dropped_by_reason()["too_long"].tolist() == [0, 1, 2]


def test_samples_without_tokens_are_dropped_with_a_reason_of_their_own_or_kept_on_request():
    plan = plan_packs([0, 4, 0, 9], 8)
    assert {reason: found.tolist() for reason, found in plan.dropped_by_reason().items()} == {
        "too_long": [3],
        "empty_sample": [0, 2],
    }
    assert plan_packs([0, 4, 0, 9], 8, empty="keep").bins() == [[1, 0, 2]]
    assert greedy_knapsack([0, 0], 8) == [[0, 1]]


def test_a_capacity_of_one_token_takes_one_token_to_the_pack():
    assert sorted(plan_packs([1, 2, 1], 1).bins()) == [[0], [2]]


@pytest.mark.parametrize(
    "kind",
    [list, np.asarray, torch.tensor, lambda x: np.asarray(x, np.uint16), lambda x: np.asarray(x, np.int8)],
)
def test_lists_arrays_and_tensors_give_the_same_plan(kind):
    lengths = [5, 3, 4, 2, 2, 7, 1]
    assert plan_packs(kind(lengths), 300, alignment=2).bins() == plan_packs(lengths, 300, alignment=2).bins()


@pytest.mark.parametrize(
    ("lengths", "options", "setting", "value"),
    [
        ([1.5], {}, "lengths", (1,)),
        ([[1]], {}, "lengths", (1, 1)),
        ([True], {}, "lengths", (1,)),
        ([3, -1], {}, "lengths", -1),
        ([1], {"capacity": 0}, "capacity", 0),
        ([1], {"capacity": 2**31}, "capacity", 2**31),
        ([1], {"alignment": 0}, "alignment", 0),
        ([1, 2], {"dataset_ids": [1]}, "dataset_ids", 1),
        ([1, 2], {"limits": {"images": ([1], 3)}}, "images", 1),
        ([1, 2], {"limits": {"images": ([1, 1], 0)}}, "images", 0),
    ],
)
def test_what_cannot_be_planned_is_rejected_with_what_was_found(lengths, options, setting, value):
    with raises_config(setting, value):
        plan_packs(lengths, **{"capacity": 8, **options})


def test_a_million_tokens_of_capacity_and_few_lengths_need_no_large_table():
    lengths = [999_999, 1, 700_000, 300_000, 250_000, 750_000, 500_000]
    plan = plan_packs(lengths, 1_000_000)
    assert len(plan) == 4
    assert sorted(plan.tokens.tolist()) == [500_000, 1_000_000, 1_000_000, 1_000_000]
    assert len(plan_packs(lengths, 2**31 - 1)) == 1


def test_alignment_uses_capacity_but_is_not_counted_as_tokens():
    plan = plan_packs([5, 5, 5, 9], 16, alignment=8)
    assert sorted(map(sorted, plan.bins())) == [[0, 1], [2], [3]]
    assert sorted(plan.tokens.tolist()) == [5, 9, 10]
    # 16 does not fit three aligned samples, and 12 only one of 8.
    assert len(plan_packs([5, 5], 12, alignment=8)) == 2
    assert plan_packs([3], 6, alignment=8).dropped_by_reason()["too_long"].tolist() == [0]


def test_another_epoch_reassigns_samples_of_one_length():
    lengths = mixed_lengths(5000)
    first, again, other = (plan_packs(lengths, 8192, seed=3, epoch=epoch) for epoch in (0, 0, 1))
    assert np.array_equal(first.indices, again.indices)
    assert np.array_equal(lengths[first.indices], lengths[other.indices])
    assert (first.indices != other.indices).mean() > 0.5
    in_order = plan_packs([4] * 6, 8).bins()
    assert in_order == [[0, 1], [2, 3], [4, 5]] or in_order == [[0, 3], [1, 4], [2, 5]]


def test_a_shuffle_is_a_permutation_that_can_be_undone_and_treats_all_places_alike():
    for bits in (16, 17, 24):
        shuffle = Shuffle(bits, seed=7, epoch=2)
        numbers = np.arange(1 << 16, dtype=np.int64)
        scrambled = shuffle.scramble(numbers.copy())
        assert len(np.unique(scrambled)) == len(numbers)
        assert scrambled.min() >= 0
        assert scrambled.max() < 1 << bits
        assert np.array_equal(shuffle.restore(scrambled), numbers)
    # Six samples of one length over 6,000 epochs: each of them is in each place a sixth of the time.
    places = np.array([longest_first(np.full(6, 5), 8, seed=1, epoch=epoch) for epoch in range(6000)])
    shares = np.stack([(places == sample).mean(axis=0) for sample in range(6)])
    assert abs(shares - 1 / 6).max() < 0.03


def test_dataset_ids_are_spread_evenly_over_the_packs_of_one_kind():
    lengths = np.full(4000, 2048)
    dataset_ids = np.repeat([0, 1, 1, 1], 1000)  # one dataset after the other, as a mixture has them
    plan = plan_packs(lengths, 8192, seed=0, dataset_ids=dataset_ids)
    of_first = (dataset_ids == 0)[plan.indices].reshape(10, 400).sum(axis=1)
    assert of_first.min() >= 90  # of 400 samples in a tenth of the packs 100 are expected
    assert of_first.max() <= 110
    assert sorted(plan.indices.tolist()) == list(range(4000))


def test_assigning_in_runs_and_by_a_sort_give_the_same_packs(monkeypatch):
    lengths = np.concatenate([mixed_lengths(30_000), np.full(3000, 1), np.full(50, 8192), np.full(70, 5000)])
    histogram = Histogram.of(lengths, 8192)
    fill = best_fit(histogram, 8192)
    order = longest_first(lengths, 8192)
    monkeypatch.setattr("packhorse.plan.planning._MANY", 0)
    monkeypatch.setattr("packhorse.plan.planning._LONG_RUN", 0)
    by_runs, by_sort = assign_samples(fill, order), gather(fill.pack_of(), fill.packs, order)
    assert np.array_equal(by_runs[0], by_sort[0])
    assert sorted(by_runs[1].tolist()) == list(range(len(lengths)))
    for positions in (by_runs[1], by_sort[1]):
        tokens = np.add.reduceat(lengths[positions], by_runs[0][:-1])
        assert np.array_equal(tokens, fill.totals(fill.each * fill.lengths(histogram)))


def test_the_bound_counts_samples_of_more_than_half_a_pack():
    assert lower_bound(Histogram.of(np.array([5, 5, 5]), 8), 8) == 3
    assert lower_bound(Histogram.of(np.array([5, 5, 3, 3, 1]), 8), 8) == 3
    assert lower_bound(Histogram.of(np.array([4] * 5), 8), 8) == 3


def test_a_fill_names_the_pack_of_each_sample():
    fill = best_fit(Histogram.of(np.array([4, 4, 4, 2, 2]), 8), 8)
    assert isinstance(fill, Fill)
    assert fill.packs == 2
    assert fill.sizes().sum() == 5
    assert np.bincount(fill.pack_of(), weights=[4, 4, 4, 2, 2]).tolist() == [8, 8]


def hard_mix(name: str, n: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    if name == "quarter_half":
        return rng.integers(2049, 4096, n)
    if name == "triplets":
        first = rng.integers(2049, 4096, n // 3)
        least, most = np.maximum(2049, 8192 - first - 4095), np.minimum(4095, 8192 - first - 2049)
        second = least + (rng.random(n // 3) * (most - least + 1)).astype(np.int64)
        return np.concatenate([first, second, 8192 - first - second])
    if name == "documents":
        text = rng.lognormal(5.2, 0.6, n)
        page = np.clip(rng.normal(2550, 380, n), 1200, 3700)
        return np.maximum(8, np.where(rng.random(n) < 0.08, text, page + text).astype(np.int64))
    tiles = rng.choice([1, 3, 5, 7, 9, 13], size=n, p=[0.15, 0.2, 0.25, 0.2, 0.1, 0.1])
    return (tiles * 258 + rng.lognormal(4.8, 0.8, n)).astype(np.int64)


@pytest.mark.parametrize(
    ("name", "fill", "best_fit_fill"),
    [
        ("documents", 0.99, 0.95),
        ("triplets", 0.99, 0.89),
        ("tiles", 0.999, 0.996),
        ("quarter_half", 0.945, 0.901),
    ],
)
def test_hard_mixes_are_packed_much_better_than_best_fit_does(name, fill, best_fit_fill):
    lengths = hard_mix(name, 99_999)
    assert plan_packs(lengths, 8192, effort=0).fill < best_fit_fill
    plan = plan_packs(lengths, 8192)
    assert plan.fill >= fill
    assert plan.sums(lengths).max() <= 8192
    assert sorted(plan.indices.tolist()) == list(range(len(lengths)))


def test_easy_mixes_are_filled_to_the_last_pack():
    lengths = mixed_lengths(100_000)
    plan = plan_packs(lengths, 8192)
    assert len(plan) <= plan.bound + 2
    assert isinstance(plan, PackPlan)


def test_visual_token_order_puts_similar_packs_side_by_side():
    lengths = mixed_lengths(2000).tolist()
    visual = (np.array(lengths) * np.random.default_rng(0).random(2000)).astype(int).tolist()
    bins = greedy_knapsack_vt_balanced(lengths, 8192, visual)
    assert sorted(bins) == sorted(greedy_knapsack(lengths, 8192))
    loads = [sum(visual[sample] for sample in one) for one in bins]
    assert loads == sorted(loads)
    with raises_config("visual_tokens", 1, match="one for each of the 2,000 samples"):
        greedy_knapsack_vt_balanced(lengths, 8192, [1])


def test_packs_in_another_order_are_the_same_packs_and_the_others_are_named():
    lengths = np.array([7, 6, 5, 4, 3, 2, 20, 1])
    plan = plan_packs(lengths, 8).with_costs(np.arange(4.0), np.arange(4))
    turned = plan.in_order(np.arange(len(plan))[::-1])
    assert turned.bins() == plan.bins()[::-1]
    assert (turned.costs.tolist(), turned.media_masks.tolist()) == ([3.0, 2.0, 1.0, 0.0], [3, 2, 1, 0])
    assert (turned.bound, turned.dropped.tolist()) == (plan.bound, [6])
    two = plan.in_order([2, 0])
    assert two.bins() == [plan.bins()[2], plan.bins()[0]]
    assert two.samples == plan.samples
    reasons = {reason: found.tolist() for reason, found in two.dropped_by_reason().items()}
    assert reasons == {"too_long": [6], "left_over": sorted([*plan.bins()[1], *plan.bins()[3]])}
    assert (two.tokens == two.sums(lengths)).all()
    nothing = plan.in_order([])
    assert (len(nothing), nothing.samples, nothing.fill) == (0, 8, 0.0)


def test_samples_taken_out_of_a_plan_leave_no_empty_pack_and_are_named():
    lengths = np.array([7, 6, 5, 4, 3, 2, 20, 1])
    plan = plan_packs(lengths, 8)
    gone = np.isin(np.arange(8), [*plan.bins()[1], 6, 7])
    left = plan.without(gone, lengths, "sample_failed")
    assert left.bins() == [[i for i in pack if not gone[i]] for k, pack in enumerate(plan.bins()) if k != 1]
    assert left.dropped_by_reason()["sample_failed"].tolist() == np.flatnonzero(gone).tolist()
    assert (left.tokens == left.sums(lengths)).all()
    assert left.bound <= len(left)
    assert plan.without(np.zeros(8, bool), lengths, "too_long") is plan
    assert len(plan.without(np.ones(8, bool), lengths, "too_long")) == 0
