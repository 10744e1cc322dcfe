"""Second limits: visual tokens, media, documents of a pack."""

import numpy as np
import pytest

from packhorse.neat_packing_vlm import plan_packs


def chats(n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    visual = np.where(rng.random(n) < 0.7, rng.integers(64, 1280, n), 0)
    return np.minimum(8192, visual + rng.lognormal(5.3, 0.9, n).astype(np.int64) + 8), visual


def test_a_limit_that_no_pack_reaches_changes_nothing():
    lengths, visual = chats(3000)
    free, guarded = plan_packs(lengths, 8192), plan_packs(lengths, 8192, limits={"visual": (visual, 8192)})
    assert sorted(map(sorted, free.bins())) == sorted(map(sorted, guarded.bins()))


@pytest.mark.parametrize("limit", [2000, 4000, 6000])
def test_no_pack_is_over_a_limit_of_visual_tokens_and_few_packs_are_added(limit):
    lengths, visual = chats(20_000)
    plan = plan_packs(lengths, 8192, limits={"visual": (visual, limit)})
    assert plan.sums(visual).max() <= limit
    assert plan.sums(lengths).max() <= 8192
    assert sorted(plan.indices.tolist()) == list(range(20_000))
    assert len(plan) <= 1.05 * max(plan.bound, visual.sum() / limit)


@pytest.mark.parametrize("most", [5, 8, 16])
def test_a_limit_of_documents_spreads_short_ones_over_the_packs(most):
    lengths, _ = chats(20_000)
    plan = plan_packs(lengths, 8192, limits={"documents": (np.ones(20_000, int), most)})
    assert np.diff(plan.offsets).max() <= most
    assert len(plan) <= 1.05 * max(plan.bound, 20_000 / most)


def test_many_samples_are_tried_on_a_part_of_them_first():
    lengths, visual = chats(100_000)
    plan = plan_packs(
        lengths, 8192, limits={"visual": (visual, 3000), "documents": (np.ones(100_000, int), 12)}
    )
    assert plan.sums(visual).max() <= 3000
    assert np.diff(plan.offsets).max() <= 12
    assert sorted(plan.indices.tolist()) == list(range(100_000))


def test_a_sample_that_is_alone_over_a_limit_is_dropped_for_that():
    plan = plan_packs([4, 4, 9, 0], 8, limits={"images": ([1, 5, 5, 9], 4), "videos": ([0, 0, 0, 0], 1)})
    assert {reason: found.tolist() for reason, found in plan.dropped_by_reason().items()} == {
        "too_long": [2],
        "over_limit": [1],
        "empty_sample": [3],
    }
    assert plan.bins() == [[0]]


def test_limits_hold_together_with_alignment_seed_and_dataset_ids():
    lengths, visual = chats(2000)
    plan = plan_packs(
        lengths,
        8192,
        limits={"visual": (visual, 3000)},
        alignment=64,
        seed=1,
        epoch=2,
        dataset_ids=np.arange(2000) % 3,
    )
    assert plan.sums(-(-lengths // 64) * 64).max() <= 8192
    assert plan.sums(visual).max() <= 3000
    assert plan.sums(lengths).tolist() == plan.tokens.tolist()
