"""What a sampler agrees on, saves and records is what it does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.processors import processor
from count_samples import write_chats
from packhorse.count.counting import count_meta
from packhorse.datasets import open_meta_dataset
from packhorse.ledger import Ledger
from packhorse.plan import length_grouped
from packhorse.samplers import LengthGroupedSampler
from packhorse.types import World
from raising import raises_config


def rows_of(rows: int) -> list[dict[str, Any]]:
    return [{"conversation": [], "_text_tokens": number} for number in range(rows)]


class Named(list[Any]):
    """Rows with keys."""

    def key(self, index: int) -> str:
        return f"rows/{index}"


def test_lengths_that_the_caller_gives_are_not_agreed_on_by_those_of_count_files(tmp_path: Path) -> None:
    made = processor("qwen2_vl")
    meta = write_chats(tmp_path, 40)
    count_meta(meta, made)
    dataset = open_meta_dataset(meta, shard_data=True, rank=0, world_size=2)
    counts = np.array([100] * 10 + [6000] * (len(dataset) - 10))
    options: dict[str, Any] = {"processor": made, "max_length": 1000, "counts": counts}
    with raises_config("max_length", 1000, match="pass smallest="):
        LengthGroupedSampler(dataset, world=World(0, 2), **options)
    sampler = LengthGroupedSampler(dataset, world=World(0, 2), smallest=9, **options)
    assert len(sampler) == len(list(sampler)) == 9
    assert len(LengthGroupedSampler(dataset, world=World(0, 2), counts=counts)) == len(dataset)


def test_more_rows_than_a_rank_has_cannot_be_agreed_on(tmp_path: Path) -> None:
    class Longer(LengthGroupedSampler):
        def _compute_or_load_lengths(self, dataset: Any) -> Any:
            return [length + 10_000 for length in super()._compute_or_load_lengths(dataset)]

    made = processor("qwen2_vl")
    meta = write_chats(tmp_path, 16)
    count_meta(meta, made)
    dataset = open_meta_dataset(meta, shard_data=True, rank=0, world_size=2)
    with raises_config("dataset", 0, match="every rank has 8 rows"):
        Longer(dataset, processor=made, max_length=5000, world=World(0, 2))


def test_the_state_of_a_finished_epoch_gives_nothing_of_it_again() -> None:
    sampler = LengthGroupedSampler(rows_of(8), batch_size=2)
    order = list(sampler)
    state = sampler.state_dict()
    assert (state["epoch"], state["position"]) == (0, 8)
    resumed = LengthGroupedSampler(rows_of(8), batch_size=2)
    resumed.load_state_dict(state)
    assert list(resumed) == []
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert sorted(resumed) == list(range(8))
    assert list(sampler) == order, "without another epoch the same one is given again, from its start"
    sampler.set_epoch(1)
    assert sampler.state_dict()["position"] == 0


def test_rows_left_over_are_named_for_each_epoch_however_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(length_grouped, "_MOST_SINGLE_ENTRIES", 10)
    ledger = Ledger()
    sampler = LengthGroupedSampler(Named(rows_of(100)), smallest=40, ledger=ledger)
    for epoch in (0, 1, 1):
        sampler.set_epoch(epoch)
        next(iter(sampler))
    assert len(ledger) == ledger.lost() == 120
    assert {drop.epoch for drop in ledger} == {0, 1}
    ledger.save(tmp_path / "ledger.jsonl")
    assert list(Ledger.load(tmp_path / "ledger.jsonl")) == list(ledger)
