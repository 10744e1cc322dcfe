"""Where the sampler gets the lengths of rows from: count files, fields of the rows, estimates."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from contract.processors import processor
from count_samples import save_processor
from packhorse.count.counting import count_meta
from packhorse.count.sidecar import counts_of
from packhorse.datasets import (
    PreTokenizedDatasetWrapper,
    RobustDatasetWrapper,
    make_meta_dataset,
    open_meta_dataset,
)
from packhorse.errors import BadSample
from packhorse.formats.estimate import columns_of
from packhorse.samplers import LengthGroupedSampler
from packhorse.types import World
from raising import raises_config


def row(words: int, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "word " * words}]
    return {"messages": turns, **more}


def write(folder: Path, lengths: dict[str, list[int]], **options: Any) -> dict[str, Any]:
    """A mixture of text chats with these numbers of words."""
    meta = {}
    for name, words in lengths.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row(number)) + "\n" for number in words))
        meta[name] = {"file_name": str(path), **options}
    return meta


@pytest.fixture
def counted(tmp_path: Path, cache: Path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    meta = write(
        tmp_path, {name: rng.integers(0, 300, rows).tolist() for name, rows in (("a", 23), ("b", 10))}
    )
    count_meta(meta, processor("qwen2_vl"))
    return meta


def test_exact_counts_are_used_where_the_files_have_been_counted(counted: dict[str, Any]):
    dataset = open_meta_dataset(counted)
    sampler = LengthGroupedSampler(dataset, processor=processor("qwen2_vl"))
    counts = counts_of(dataset, processor("qwen2_vl"))
    assert counts is not None
    assert sampler.lengths == counts.total.tolist()
    assert sampler.length_source == {"sidecar": 33}
    encoded = PreTokenizedDatasetWrapper(dataset, processor("qwen2_vl"), inject_fake_images=False)
    for index in (0, 17, 32):
        assert sampler.lengths[index] == len(encoded[index]["input_ids"])


def test_counts_for_another_processor_or_none_are_not_used(counted: dict[str, Any]):
    dataset = open_meta_dataset(counted)
    for other in (None, object(), processor("qwen3_vl")):
        assert LengthGroupedSampler(dataset, processor=other).length_source == {"estimate": 33}


def test_the_processor_of_a_wrapper_finds_the_counts(counted: dict[str, Any]):
    dataset = open_meta_dataset(counted)
    made = processor("qwen2_vl")
    wrapped = PreTokenizedDatasetWrapper(dataset, made)
    for whole in (wrapped, Subset(wrapped, range(33)), ConcatDataset([wrapped])):
        assert LengthGroupedSampler(whole).length_source == {"sidecar": 33}
    other = PreTokenizedDatasetWrapper(dataset, processor("qwen3_vl"))
    assert LengthGroupedSampler(other, processor=made).length_source == {"sidecar": 33}
    assert LengthGroupedSampler(ConcatDataset([wrapped, other])).length_source == {"estimate": 66}


def test_the_path_of_a_processor_will_do(tmp_path: Path, counted: dict[str, Any]):
    saved = save_processor(tmp_path / "saved")
    assert LengthGroupedSampler(open_meta_dataset(counted), processor=saved).length_source == {"sidecar": 33}


def test_count_files_that_are_not_used_are_warned_of_once(
    counted: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    dataset = open_meta_dataset(counted)
    for other, why in (
        (None, "no processor was given"),
        (object(), "no processor with a tokenizer was given"),
        (processor("qwen3_vl"), "was counted with another model family"),
    ):
        caplog.clear()
        LengthGroupedSampler(dataset, processor=other)
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert why in record.getMessage()


def test_exact_lengths_have_no_margin(counted: dict[str, Any]):
    dataset, made = open_meta_dataset(counted), processor("qwen2_vl")
    counts = counts_of(dataset, made)
    assert counts is not None
    total = counts.total
    limit = int(np.median(total))
    kept = [index for index in range(33) if total[index] <= limit]
    for given in (None, counts):
        sampler = LengthGroupedSampler(dataset, processor=made, max_length=limit, counts=given)
        assert sorted(sampler) == kept
    details = {drop.detail for drop in dataset.ledger if drop.reason == "too_long"}
    assert all(detail.endswith(f"more than max_length={limit}") for detail in details)
    with_margin = [index for index in range(33) if total[index] <= limit + 512]
    assert len(kept) < len(with_margin) < 33
    inexact = replace(counts, exact=np.zeros(33, np.bool_))
    for given in (inexact, total):  # the source of plain numbers is unknown
        assert sorted(LengthGroupedSampler(dataset, max_length=limit, counts=given)) == with_margin


def test_a_loaded_list_has_its_counts_as_long_as_it_is_as_it_was_loaded(counted: dict[str, Any]):
    examples = make_meta_dataset(counted)
    made = processor("qwen2_vl")
    expected = LengthGroupedSampler(open_meta_dataset(counted), processor=made).lengths
    sampler = LengthGroupedSampler(examples, processor=made)
    assert (sampler.length_source, sampler.lengths) == ({"sidecar": 33}, expected)
    examples.reverse()
    assert LengthGroupedSampler(examples, processor=made).length_source == {"estimate": 33}
    examples.reverse()
    del examples[3]
    assert LengthGroupedSampler(examples, processor=made).length_source == {"estimate": 32}


def test_a_list_that_was_loaded_without_bad_rows_keeps_its_counts_in_step(tmp_path: Path, cache: Path):
    meta = write(tmp_path, {"a": [5, 50, 500]})
    path = Path(meta["a"]["file_name"])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{", lines[1], lines[2], "[1]"]) + "\n")
    made = processor("qwen2_vl")
    count_meta(meta, made)
    kept = LengthGroupedSampler(make_meta_dataset(meta, on_bad="skip"), processor=made)
    lazy = LengthGroupedSampler(open_meta_dataset(meta), processor=made)
    assert kept.length_source == {"sidecar": 3}
    assert lazy.length_source == {"sidecar": 3, "unknown": 2}
    assert lazy.lengths == [kept.lengths[0], 0, kept.lengths[1], kept.lengths[2], 0]


def test_rows_of_an_uncounted_mixture_are_estimated_wherever_they_stand(tmp_path: Path, cache: Path):
    meta = write(tmp_path, {"a": [6, 60, 600], "b": [3, 30]}, sample_ratio=2)
    with open(meta["a"]["file_name"], "a") as file:
        file.write("{\n")
    dataset = open_meta_dataset(meta)
    sampler = LengthGroupedSampler(dataset)
    by_words = {words: (2 + 5 * words) // 3 for words in (6, 60, 600, 3, 30)}
    first, second = [by_words[words] for words in (6, 60, 600)], [by_words[words] for words in (3, 30)]
    assert sampler.lengths == [*first, 0, *first, 0, *second, *second]
    assert sampler.length_source == {"estimate": 10, "unknown": 2}
    picked = LengthGroupedSampler(Subset(RobustDatasetWrapper(dataset), [11, 3, 2, 8]))
    assert picked.lengths == [second[1], 0, first[2], second[0]]


def test_shards_and_copies_have_the_counts_of_their_own_rows(counted: dict[str, Any]):
    made = processor("qwen2_vl")
    everything = {
        dataset.key(i): length
        for dataset in [open_meta_dataset(counted)]
        for i, length in enumerate(LengthGroupedSampler(dataset, processor=made).lengths)
    }
    more = {name: {**entry, "sample_ratio": 1.5} for name, entry in counted.items()}
    for rank in range(2):
        shard = open_meta_dataset(more, shard_data=True, rank=rank, world_size=2)
        sampler = LengthGroupedSampler(shard, processor=made)
        assert sampler.length_source == {"sidecar": len(shard)}
        for index, length in enumerate(sampler.lengths):
            assert length == everything[shard.key(index).partition("#")[0]]


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("remainder", ["drop", "keep"])
@pytest.mark.parametrize("max_length", [None, 200])
def test_ranks_agree_without_talking_where_everything_is_counted(
    counted: dict[str, Any], world: int, remainder: Any, max_length: int | None
):
    made = processor("qwen2_vl")
    shards = [
        open_meta_dataset(counted, shard_data=True, rank=rank, world_size=world, remainder=remainder)
        for rank in range(world)
    ]
    ranks = [
        LengthGroupedSampler(shard, 42, made, max_length, 2, world=World(rank, world))
        for rank, shard in enumerate(shards)
    ]
    alone = [LengthGroupedSampler(shard, 42, made, max_length, 2) for shard in shards]
    assert {len(rank) for rank in ranks} == {min(map(len, alone))}
    assert [len(list(rank)) for rank in ranks] == [len(rank) for rank in ranks]
    if max_length is not None:
        assert any(len(one) < len(shard) for one, shard in zip(alone, shards, strict=True))


def test_rows_split_across_another_world_are_rejected(counted: dict[str, Any]):
    shard = open_meta_dataset(counted, shard_data=True, rank=0, world_size=2)
    with raises_config("world", 3, match=r"split across \[2\] ranks"):
        LengthGroupedSampler(shard, world=World(0, 3))


def test_rows_dropped_are_named_as_the_dataset_names_them(counted: dict[str, Any]):
    dataset = open_meta_dataset(counted)
    wrapped = Subset(RobustDatasetWrapper(dataset), list(range(20, 33)))
    counts = np.zeros(13, np.int64)
    counts[[0, 5]] = 9999
    LengthGroupedSampler(wrapped, max_length=100, counts=counts)
    drops = [(drop.key, drop.dataset) for drop in dataset.ledger if drop.reason == "too_long"]
    assert drops == [("a/20", "a"), ("b/2", "b")]


class Unreadable(Dataset[Any]):
    """A wrapper with expensive samples: none may be loaded for its length."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("encoded a sample for its length")


def test_wrappers_subsets_and_joined_sets_are_looked_through():
    rows = [{"conversation": [], "_text_tokens": number} for number in range(10)]
    wrapped = Unreadable(Unreadable(rows))
    assert LengthGroupedSampler._get_raw_samples(wrapped) is rows
    assert LengthGroupedSampler(wrapped).lengths == list(range(10))
    subset = Subset(wrapped, [7, 2, 2])
    assert LengthGroupedSampler(subset).lengths == [7, 2, 2]
    assert LengthGroupedSampler._get_raw_samples(subset) is subset
    joined: ConcatDataset[Any] = ConcatDataset([subset, wrapped])
    sampler = LengthGroupedSampler(Subset(joined, [12, 0, 3, 1]))
    assert sampler.lengths == [9, 7, 0, 2]
    assert sampler.length_source == {"row fields": 4}


def test_samples_that_are_encoded_already_are_measured():
    samples = [{"input_ids": torch.arange(length)} for length in (3, 9, 5)]
    sampler = LengthGroupedSampler(samples)
    assert (sampler.lengths, sampler.length_source) == ([3, 9, 5], {"row fields": 3})


def test_joined_sets_have_exact_lengths_where_one_of_them_is_counted(counted: dict[str, Any]):
    dataset, rows = open_meta_dataset(counted), [{"conversation": [], "_text_tokens": 7}]
    counts = counts_of(dataset, processor("qwen2_vl"))
    assert counts is not None
    joined: ConcatDataset[Any] = ConcatDataset([rows, dataset])
    sampler = LengthGroupedSampler(Subset(joined, [5, 0, 2]), processor=processor("qwen2_vl"))
    assert sampler.lengths == [counts.total[4], 7, counts.total[1]]
    assert sampler.length_source == {"sidecar": 2, "row fields": 1}


def test_rows_that_cannot_be_read_come_last_and_do_not_stop_the_others(caplog: pytest.LogCaptureFixture):
    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            if index == 1:
                raise BadSample("not JSON")
            return {"conversation": [], "_text_tokens": 5 + index}

    sampler = LengthGroupedSampler(Rows())
    assert sampler.sorted_indices == [2, 0, 1]
    assert sampler.length_source == {"row fields": 2, "unknown": 1}
    assert "1 rows cannot be read" in caplog.text


def test_a_mistake_in_a_dataset_is_not_taken_for_a_bad_row():
    class Broken(Dataset[Any]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Any:
            raise NameError("typo")

    with pytest.raises(NameError):
        LengthGroupedSampler(Broken())


def test_lengths_can_be_given(counted: dict[str, Any]):
    rows = [{"conversation": [], "_text_tokens": 1}, {"conversation": [{"role": "user", "content": "x" * 9}]}]
    for counts in ([3, 9], np.array([3, 9], np.int32)):
        sampler = LengthGroupedSampler(rows, counts=counts)
        assert (sampler.lengths, sampler.length_source) == ([3, 9], {"given": 2})
    columns = LengthGroupedSampler(rows, counts=columns_of(rows))
    assert (columns.lengths, columns.length_source) == ([1, 3], {"estimate": 2})
    dataset = open_meta_dataset(counted)
    counts = counts_of(dataset, processor("qwen2_vl"))
    assert counts is not None
    assert LengthGroupedSampler(dataset, counts=counts).lengths == counts.total.tolist()


@pytest.mark.parametrize("counts", [[1], [1.5, 2.5], [[1, 2]]])
def test_counts_that_do_not_fit_are_rejected(counts: Any):
    with raises_config("counts", np.shape(counts)):
        LengthGroupedSampler([{}, {}], counts=counts)
