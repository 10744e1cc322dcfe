"""What once went wrong in packing without a word, or stopped it without need."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from noise_floor import largest_difference, noise_floor
from packhorse.count.columns import CountColumns
from packhorse.encode.robust import RobustDatasetWrapper
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import ConfigError
from packhorse.families.qwen_vl import mrope_position_ids
from packhorse.families.varlen import varlen_attention, varlen_mask
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm import PackPlan, neat_pack_dataset_vlm, plan_key, plan_packs
from packhorse.plan.lengths import sample_lengths
from raising import raises_config


class Encoded(Dataset):
    """Samples of given lengths."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        ids = torch.arange(self.lengths[index])
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def make_counts(*lengths):
    zeros = np.zeros(len(lengths), np.int64)
    ones = np.ones(len(lengths), bool)
    status = np.array(["ok"] * len(lengths), object)
    return CountColumns(np.array(lengths), *[zeros] * 8, status, ones, ones, zeros)


def wrap(rows, max_length=None, truncate=False, hook=None):
    """A wrapper without its processor, which lengths do not need."""
    made = object.__new__(PreTokenizedDatasetWrapper)
    made.dataset, made.processor, made.inject_fake_images = rows, None, False
    made.max_length, made.truncate, made.post_tokenize_hook = max_length, truncate, hook
    return made


@pytest.mark.parametrize("capacity", [8190, 7372, 10007])
def test_a_capacity_need_not_be_a_multiple_of_anything(capacity):
    rng = np.random.default_rng(0)
    lengths = np.r_[rng.integers(capacity // 4, capacity // 2, 2500), capacity]
    plan = plan_packs(lengths, capacity, effort=10)
    assert sorted(plan.indices.tolist()) == list(range(len(lengths)))
    assert plan.sums(lengths).max() <= capacity
    assert len(plan) <= len(plan_packs(lengths, capacity, effort=0))


def test_samples_that_are_all_over_the_capacity_once_rounded_are_packed():
    plan = plan_packs(np.full(3000, 8190), 8190, effort=10)
    assert len(plan) == 3000


def test_the_rows_of_a_subset_are_its_own():
    lengths = [5, 9, 7, 3, 20]
    subset = Subset(Encoded(lengths), [4, 3, 2, 1, 0])
    assert sample_lengths(subset).tokens.tolist() == lengths[::-1]
    assert sample_lengths(Subset(Encoded(lengths), [0, 2])).tokens.tolist() == [5, 7]
    assert sample_lengths(RobustDatasetWrapper(Encoded(lengths), ledger=Ledger())).tokens.tolist() == lengths


def test_a_sample_that_will_be_truncated_counts_as_what_is_left():
    rows, counts = Encoded([600, 20]), make_counts(600, 20)
    cut = sample_lengths(wrap(rows, 128, truncate=True), counts=counts)
    assert (cut.tokens.tolist(), cut.all_exact) == ([128, 20], False)
    whole = sample_lengths(wrap(rows, 1000, truncate=True), counts=counts)
    assert (whole.tokens.tolist(), whole.all_exact) == ([600, 20], True)
    assert sample_lengths(wrap(rows, 128), counts=counts).tokens.tolist() == [600, 20]


def test_counts_are_not_exact_where_a_hook_may_change_tokens():
    rows, counts = Encoded([60, 20]), make_counts(60, 20)
    assert sample_lengths(wrap(rows), counts=counts).all_exact
    assert not sample_lengths(wrap(rows, hook=lambda result, processor: result), counts=counts).all_exact


def test_empty_samples_are_not_kept_with_limits():
    with raises_config("empty", "keep", match="with limits"):
        plan_packs([0, 0, 0, 5], 8, limits={"documents": (np.ones(4, int), 2)}, empty="keep")


def test_a_rope_index_with_further_keywords_gets_all_there_is():
    found = {}

    def rope(input_ids, **others):
        found.update(others)
        return torch.zeros(3, 1, input_ids.shape[1])

    sample = {
        "input_ids": torch.arange(4),
        "attention_mask": torch.ones(4),
        "mm_token_type_ids": torch.zeros(4),
        "image_grid_thw": torch.ones(1, 3),
    }
    assert mrope_position_ids(sample, rope) is not None
    assert set(found) == {"attention_mask", "mm_token_type_ids", "image_grid_thw"}
    assert mrope_position_ids(sample, lambda x=0, **all: torch.zeros(3, 1, 4)) is not None
    assert mrope_position_ids(sample, lambda x: torch.zeros(3, 1, 4)) is None


def test_a_cap_keeps_packs_of_all_kinds():
    raw = [{"_text_tokens": 90 - media, "_media_tokens": media, "conversation": []} for media in range(60)]
    dataset = neat_pack_dataset_vlm(Encoded([90] * 60), 100, ds_raw=raw, max_packs=3, ledger=Ledger())
    assert [pack.tolist() for pack in dataset.bins] == [[10], [30], [50]]
    assert len(list(dataset.ledger)) == 57
    for most, left in ((0, 0), (59, 59), (60, 60), (100, 60)):
        dataset = neat_pack_dataset_vlm(Encoded([90] * 60), 100, ds_raw=raw, max_packs=most, ledger=Ledger())
        assert (len(dataset), len(list(dataset.ledger))) == (left, 60 - left)
    with pytest.raises(ConfigError, match="max_packs=-1"):
        neat_pack_dataset_vlm(Encoded([14, 15]), 16, max_packs=-1, ledger=Ledger())


def test_a_limit_may_have_any_name():
    limits = {"lengths": ([1, 1], 4), "dataset_ids": ([1, 1], 4)}
    assert plan_key([1, 2], 8, limits=limits) != plan_key([5, 6], 8, limits=limits)
    one, other = (
        plan_key([1, 2], 8, limits=limits, dataset_ids=dataset_ids) for dataset_ids in ([0, 0], [0, 1])
    )
    assert one != other


def test_keys_are_compared_as_they_are_saved(tmp_path):
    key = {"source": ("a", "b")}
    plan_packs([3, 4], 8).save(tmp_path / "plan", key)
    assert len(PackPlan.load(tmp_path / "plan", key)) == 1
    with raises_config("seed", None, path=tmp_path / "plan", match="no seed; this run has seed=None"):
        PackPlan.load(tmp_path / "plan", {**key, "seed": None})
    with raises_config("key", match="JSON"):
        PackPlan.load(tmp_path / "plan", {"source": object()})


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    ("before", "queries", "keys"),
    [(0, 6, 6), (3, 3, 6), (5, 1, 6), (0, 3, 8), (2, 3, 8), (4, 1, 8)],
    ids=["whole", "cache", "next", "static, empty", "static", "static, next"],
)
def test_batches_that_are_not_packed_see_the_cache_and_the_window(before, queries, keys, window, parity):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, length, 8) for length in (queries, keys, keys))
    at, seen = torch.arange(before, before + queries)[:, None], torch.arange(keys)
    expected = (seen <= at) & (seen > at - (window or keys))
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    mask = varlen_mask(
        batch_size=1,
        q_length=queries,
        kv_length=keys,
        q_offset=before,
        mask_function=function,
        local_size=window,
        allow_is_causal_skip=before + queries == keys or not before,
    )
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~expected, torch.finfo(q.dtype).min)
    by_hand = (scores.softmax(-1) @ v).transpose(1, 2)
    attended, shifted = (
        torch.nn.functional.scaled_dot_product_attention(q, k, held, expected[None, None]).transpose(1, 2)
        for held in (v, v.roll(1, -2))
    )
    for causal in (None, True):
        made, _ = varlen_attention(torch.nn.Module(), q, k, v, mask, is_causal=causal, sliding_window=window)
        parity.check(
            "attention",
            largest_difference(made, attended),
            noise_floor(attended, by_hand),
            largest_difference(shifted, attended),
        )
