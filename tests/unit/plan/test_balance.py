"""The cost model, and steps whose ranks have equal work."""

import numpy as np
import pytest
from transformers import Qwen2_5_VLConfig

from packhorse.neat_packing_vlm import (
    CostWeights,
    main_dataset,
    order_packs,
    pack_costs,
    pack_media_masks,
    patch_pairs_of,
    plan_packs,
    sample_costs,
    straggler_ratio,
)
from raising import raises_config

NAN = float("nan")
SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 100,
}


def test_the_weights_of_a_small_model_are_those_of_its_matrices():
    weights = CostWeights.of_model(SMALL | {"vision_config": {"hidden_size": 4, "depth": 3, "mlp_ratio": 2}})
    # Of a layer: q 8x8, k 8x4, v 8x4, o 8x8, three of 8x16; the head is 8x100.
    assert weights.token == 2 * 2 * (8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 16) + 2 * 8 * 100
    assert weights.token_pair == 2 * 2 * 8
    # Of a layer: four of 4x4 and two of 4x8.
    assert weights.patch == 3 * 2 * (4 * 4 * 4 + 2 * 4 * 8)
    assert weights.patch_pair == 3 * 4 * 4


def test_a_text_model_has_no_cost_of_patches_and_experts_count_as_often_as_they_are_visited():
    dense = CostWeights.of_model(SMALL)
    assert (dense.patch, dense.patch_pair) == (0, 0)
    sparse = CostWeights.of_model(SMALL | {"num_experts_per_tok": 3, "moe_intermediate_size": 16})
    assert sparse.token - dense.token == 2 * 2 * 2 * 3 * 8 * 16


def test_a_real_config_gives_the_parameters_of_its_model_and_window_attention_is_known():
    config = Qwen2_5_VLConfig()
    weights = CostWeights.of_model(config)
    text, vision = config.text_config, config.vision_config
    assert weights.token == pytest.approx(2 * parameters(text), rel=0.05)
    assert weights.patch_pair == 4 * 4 * vision.hidden_size  # four of its layers see the whole image
    with raises_config("hidden_size"):
        CostWeights.of_model({})


def parameters(text) -> int:
    key_values = text.hidden_size // text.num_attention_heads * text.num_key_value_heads
    attention = 2 * text.hidden_size**2 + 2 * text.hidden_size * key_values
    mlp = 3 * text.hidden_size * text.intermediate_size
    return text.num_hidden_layers * (attention + mlp) + text.hidden_size * text.vocab_size


def test_the_cost_of_a_pack_is_the_sum_of_its_documents_and_media():
    plan = plan_packs([3, 5, 4], 8)
    weights = CostWeights(token=1, token_pair=10, patch=100, patch_pair=1000)
    pairs = patch_pairs_of([2, 4, 6], [0, 2, 3, 3])
    assert pairs.tolist() == [4 + 16, 36, 0]
    assert patch_pairs_of([6], [0, 1], frames=[3]).tolist() == [12]  # three frames of two patches
    costs = sample_costs([3, 5, 4], weights, patches=[6, 6, 0], patch_pairs=pairs)
    assert costs.tolist() == [3 + 90 + 600 + 20_000, 5 + 250 + 600 + 36_000, 4 + 160]
    assert pack_costs(plan, costs).tolist() == [costs[0] + costs[1], costs[2]]
    assert sample_costs([3], weights, patches=[2]).tolist() == [3 + 90 + 200 + 4000]
    assert pack_media_masks(plan, image=[1, 0, 0], video=[0, 2, 0]).tolist() == [3, 0]
    with raises_config("images", match="unknown kind of media"):
        pack_media_masks(plan, images=[1, 0, 0])
    with raises_config("token", 0):
        CostWeights(token=0)


def spread_costs(n: int) -> np.ndarray:
    return np.random.default_rng(0).lognormal(0, 0.3, n)


@pytest.mark.parametrize("ranks", [1, 8, 64, 512])
def test_every_pack_is_in_one_step_or_in_the_rest_and_ranks_are_even(ranks):
    costs = spread_costs(20_003)
    order = order_packs(costs, ranks, seed=1)
    assert order.steps.shape == (20_003 // ranks, ranks)
    assert len(order.rest) == 20_003 % ranks
    assert sorted([*order.steps.ravel().tolist(), *order.rest.tolist()]) == list(range(20_003))
    sorted_steps = np.argsort(costs)[: 20_003 // ranks * ranks].reshape(-1, ranks)
    assert straggler_ratio(costs, order.steps) < 1.02 * straggler_ratio(costs, sorted_steps)


def test_the_straggler_ratio_is_the_longest_rank_over_the_mean():
    assert straggler_ratio([1, 3, 2, 2], np.array([[0, 1], [2, 3]])) == (1.5 + 1) / 2
    assert straggler_ratio([], np.zeros((0, 4), int)) == 1.0


def test_each_epoch_has_its_own_random_order_and_the_same_epoch_the_same():
    costs = spread_costs(6400)
    one, same, other = (order_packs(costs, 8, seed=3, epoch=epoch) for epoch in (0, 0, 1))
    assert np.array_equal(one.steps, same.steps)
    assert not np.array_equal(one.steps, other.steps)
    together = {frozenset(step) for step in one.steps.tolist()} & {frozenset(s) for s in other.steps.tolist()}
    assert len(together) < 40
    means = costs[one.steps].mean(axis=1)
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.15
    assert abs(costs[one.steps].mean(axis=0) / costs.mean() - 1).max() < 0.02  # no rank gets the heavy ones


def test_all_ranks_of_a_step_have_the_same_kinds_of_media_where_the_data_allow_it():
    costs = spread_costs(5000)
    masks = np.random.default_rng(1).choice([0, 1, 3], size=5000, p=[0.1, 0.8, 0.1])
    order = order_packs(costs, 64, media_masks=masks)
    pure = np.delete(order.steps, order.mixed, axis=0)
    assert (masks[pure] == masks[pure[:, :1]]).all()
    # Each kind leaves fewer packs than ranks, so two kinds more than one make two mixed steps at most.
    assert len(order.mixed) <= 2
    assert straggler_ratio(costs, order.steps) < 1.05  # five hundred packs of a kind are eight steps


def test_fewer_packs_than_ranks_are_all_rest():
    order = order_packs([1.0, 2.0], 8, media_masks=[0, 1])
    assert len(order.steps) == 0
    assert sorted(order.rest.tolist()) == [0, 1]
    assert len(order_packs([], 8).rest) == 0


def test_each_part_of_the_epoch_has_its_share_of_every_dataset():
    costs = spread_costs(8000)
    dataset_ids = np.repeat([0, 1, 2], [4000, 3000, 1000])
    order = order_packs(costs, 1, dataset_ids=dataset_ids, seed=5)
    share = (dataset_ids[order.steps[:, 0]] == 2).reshape(20, 400).mean(axis=1)
    assert abs(share - 1 / 8).max() < 0.02  # at random it would be off by 0.05 somewhere


def test_the_main_dataset_of_a_pack_has_most_of_its_tokens():
    plan = plan_packs([5, 3, 4], 8)
    assert main_dataset([7, 9, 9], [5, 3, 4], plan.pack_of(), len(plan)).tolist() == [7, 9]


@pytest.mark.parametrize(
    ("costs", "options", "setting", "value"),
    [
        ([1.0, 0.0], {}, "costs", 0.0),
        ([1.0, NAN], {}, "costs", pytest.approx(NAN, nan_ok=True)),
        ([1.0], {"world_size": 0}, "world_size", 0),
        ([1.0], {"tolerance": 0}, "tolerance", 0),
        ([1.0], {"media_masks": [1, 2]}, "media_masks", 2),
    ],
)
def test_orders_that_make_no_sense_are_rejected(costs, options, setting, value):
    with raises_config(setting, value):
        order_packs(costs, **{"world_size": 2, **options})
