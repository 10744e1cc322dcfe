"""The order in which a rank takes its rows: every row once, neighbours together, the same on all ranks."""

import inspect
import logging
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Sampler

import packhorse.samplers as samplers
from packhorse import distributed
from packhorse.ledger import Ledger
from packhorse.plan import length_grouped
from packhorse.samplers import LengthGroupedSampler
from packhorse.types import World
from raising import raises_config


def rows_of(*lengths: int) -> list[dict[str, Any]]:
    return [{"conversation": [], "_text_tokens": length} for length in lengths]


def parameters(function: Any) -> dict[str, Any]:
    found = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in found if p.kind is p.POSITIONAL_OR_KEYWORD}


NEEDED = inspect.Parameter.empty


def test_documented_names_have_the_documented_arguments():
    assert parameters(LengthGroupedSampler) == {
        "dataset": NEEDED,
        "seed": 42,
        "processor": None,
        "max_length": None,
        "batch_size": 1,
    }
    assert parameters(samplers._smart_resize_image) == {
        "height": NEEDED,
        "width": NEEDED,
        "factor": 28,
        "min_pixels": 56 * 56,
        "max_pixels": 14 * 14 * 4 * 1280,
    }
    assert parameters(samplers._smart_resize_video) == {
        "num_frames": NEEDED,
        "height": NEEDED,
        "width": NEEDED,
        "temporal_factor": 2,
        "factor": 32,
        "min_pixels": 128 * 128,
        "max_pixels": 16 * 16 * 2 * 2 * 2 * 6144,
    }
    assert issubclass(LengthGroupedSampler, Sampler)
    assert samplers.logger.name == "packhorse.samplers"
    methods = {
        "_compute_or_load_lengths": ["self", "dataset"],
        "_estimate_image_tokens": ["self", "img_meta"],
        "_estimate_tokens": ["self", "example"],
        "_estimate_video_tokens": ["self", "vid_meta"],
        "_extract_image_config": ["processor"],
        "_extract_video_config": ["processor"],
        "_get_raw_samples": ["dataset"],
        "set_epoch": ["self", "epoch"],
    }
    for name, arguments in methods.items():
        assert list(parameters(getattr(LengthGroupedSampler, name))) == arguments


def test_documented_attributes_are_there():
    sampler = LengthGroupedSampler(rows_of(5, 9, 1, 7, 7), batch_size=0)
    assert sampler.lengths == [5, 9, 1, 7, 7]
    assert sampler.sorted_indices == [1, 3, 4, 0, 2]
    assert (sampler.epoch, sampler.batch_size, len(sampler)) == (0, 1, 5)
    assert sampler._image_cfg is None
    assert sampler._video_cfg is None
    assert sampler.lengths[1] == 9
    assert sampler.lengths[:2] == [5, 9]
    assert np.asarray(sampler.lengths).dtype == np.int64
    assert sampler.lengths != [5, 9, 1, 7]
    assert sampler.lengths != "59177"
    assert "5 in all" in repr(sampler.lengths)


def test_estimates_use_the_geometry_of_the_processor():
    owner = SimpleNamespace(patch_size=14, merge_size=2)
    sampler = LengthGroupedSampler(
        [], processor=SimpleNamespace(image_processor=owner, video_processor=owner)
    )
    assert sampler._estimate_image_tokens([480, 640]) == 391
    assert sampler._estimate_video_tokens([4, 280, 280, None, None]) == 2 * 100
    assert sampler._estimate_tokens({"_text_tokens": 100, "_media_tokens": 50}) == (100, 50)
    assert LengthGroupedSampler([])._estimate_image_tokens([480, 640]) == 500
    assert sampler._video_cfg is not None
    assert sampler._video_cfg["fps"] is None


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 50), max_size=60),
    st.integers(-1, 70),
    st.integers(0, 2**40),
    st.integers(0, 5),
)
def test_an_epoch_has_every_row_once_in_batches_of_neighbours(
    lengths: list[int], batch_size: int, seed: int, epoch: int
):
    sampler = LengthGroupedSampler(rows_of(*lengths), seed, None, None, batch_size)
    sampler.set_epoch(epoch)
    order = list(sampler)
    assert sorted(order) == list(range(len(lengths)))
    assert len(sampler) == len(lengths)
    by_length = list(sampler.sorted_indices)
    assert by_length == sorted(range(len(lengths)), key=lambda index: -lengths[index])
    size = max(1, batch_size)
    for first in range(0, len(order), size):
        batch = order[first : first + size]
        place = by_length.index(batch[0])
        assert batch == by_length[place : place + len(batch)]


@pytest.mark.parametrize("batch_size", [1, 3, 8, 10_000])
def test_many_rows_come_in_the_order_of_the_drawn_chunks(batch_size: int):
    rows = 8192 * 3 * 2 if batch_size != 10_000 else 30_000
    lengths = np.random.default_rng(0).integers(0, 9999, rows)
    sampler = LengthGroupedSampler(range(rows), 7, None, None, batch_size, counts=lengths)
    sampler.set_epoch(2)
    chunks = torch.randperm(rows // batch_size, generator=torch.Generator().manual_seed(7 + 2)).tolist()
    by_length = np.argsort(-lengths, kind="stable").tolist()
    expected = [by_length[c * batch_size + place] for c in chunks for place in range(batch_size)]
    assert list(sampler) == expected


def test_epochs_differ_and_the_same_epoch_is_the_same_again():
    sampler = LengthGroupedSampler(rows_of(*range(100)), batch_size=4)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first
    assert list(LengthGroupedSampler(rows_of(*range(100)), seed=43, batch_size=4)) == second
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_the_short_batch_is_the_last_one_and_another_one_each_epoch():
    sampler = LengthGroupedSampler(rows_of(*range(11)), batch_size=4)
    lost = set()
    for epoch in range(20):
        sampler.set_epoch(epoch)
        lost.add(tuple(list(sampler)[8:]))
    assert len(lost) > 1, "drop_last does not lose the same rows in every epoch"


@pytest.mark.parametrize("rows", [0, 1])
def test_no_row_and_one_row_are_fine(rows: int, caplog: pytest.LogCaptureFixture):
    sampler = LengthGroupedSampler(rows_of(*[5] * rows), max_length=10, batch_size=8)
    assert list(sampler) == list(range(rows))
    assert len(sampler) == rows
    assert ("no rows to sample from" in caplog.text) == (rows == 0)


def test_rows_far_above_max_length_are_dropped_and_recorded(caplog: pytest.LogCaptureFixture):
    ledger = Ledger()
    rows = rows_of(10, 100 + 512, 100 + 513, 7)
    sampler = LengthGroupedSampler(rows, max_length=100, ledger=ledger)
    assert sampler.sorted_indices == [1, 0, 3]
    assert len(sampler.lengths) == 4
    (drop,) = ledger
    assert (drop.key, drop.stage, drop.reason, drop.action) == ("2", "plan", "too_long", "dropped")
    assert drop.detail == "613 tokens are more than max_length=100 and a margin of 512"
    assert "1 rows above max_length=100 are dropped" in caplog.text


def test_very_many_rows_are_recorded_as_arrays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(length_grouped, "_MOST_SINGLE_ENTRIES", 2)
    ledger = Ledger()
    LengthGroupedSampler(rows_of(*[9999] * 5), max_length=1, ledger=ledger)
    assert ledger.counts() == {"too_long": 5}
    assert not ledger._drops


def test_rows_over_the_smallest_rank_are_dropped_evenly_and_recorded_by_epoch():
    ledger = Ledger()
    sampler = LengthGroupedSampler(rows_of(*range(100)), batch_size=5, smallest=90, ledger=ledger)
    assert len(sampler) == 90
    dropped = []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        order = list(sampler)
        assert len(order) == len(set(order)) == 90
        assert list(sampler.sorted_indices) == sorted(order, reverse=True)
        gone = sorted(set(range(100)) - set(order))
        assert {int(drop.key) for drop in ledger if drop.epoch == epoch} == set(gone)
        assert all(9 <= after - before <= 11 for before, after in pairwise(gone))
        dropped.append(gone)
    assert dropped[0] != dropped[1]
    assert ledger.counts() == {"left_over": 20}


def test_ranks_of_different_size_have_similar_lengths_at_the_same_place():
    rng = np.random.default_rng(0)
    counts = [rng.lognormal(6, 1, rows).astype(np.int64) for rows in (2000, 1500)]
    pair = [LengthGroupedSampler(range(len(c)), batch_size=8, counts=c, smallest=1500) for c in counts]
    for epoch in (0, 3):
        for sampler in pair:
            sampler.set_epoch(epoch)
        first, second = (c[list(sampler)] for c, sampler in zip(counts, pair, strict=True))
        assert np.corrcoef(np.log(first), np.log(second))[0, 1] > 0.99


@pytest.mark.parametrize("smallest", [-1, 4])
def test_an_agreed_number_that_this_rank_cannot_have_is_rejected(smallest: int):
    with raises_config("smallest", smallest, match="this rank has 3 rows"):
        LengthGroupedSampler(rows_of(1, 2, 3), smallest=smallest)


def test_a_world_of_one_is_independent_and_a_larger_one_needs_the_counts():
    assert len(LengthGroupedSampler(rows_of(1, 2), max_length=1, world=World())) == 2
    assert len(LengthGroupedSampler(rows_of(1, 2), world=World(1, 2))) == 2
    with raises_config("max_length", 1, match=r"torch\.distributed"):
        LengthGroupedSampler(rows_of(1, 2), max_length=1, world=World(1, 2))


@pytest.mark.parametrize(
    ("backends", "device"),
    [
        ("cuda:nccl", "cuda"),
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("xpu:xccl", "xpu"),
    ],
)
def test_the_agreement_happens_where_the_backend_can_reach(
    backends: str, device: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(distributed.dist, "get_backend_config", lambda group: backends)
    assert distributed.reachable_device() == device


@pytest.mark.parametrize("position", range(12))
def test_a_sampler_goes_on_where_its_state_was_taken(position: int):
    rows = rows_of(*range(11))
    sampler = LengthGroupedSampler(rows, batch_size=4)
    sampler.set_epoch(3)
    order = list(sampler)
    given = iter(sampler)
    assert [next(given) for _ in range(position)] == order[:position]
    state = sampler.state_dict()
    assert (state["epoch"], state["position"]) == (3, position)
    resumed = LengthGroupedSampler(rows, batch_size=4)
    resumed.load_state_dict(state)
    resumed.set_epoch(3)  # trainers do
    assert resumed.state_dict() == state
    assert list(resumed) == order[position:]
    assert list(resumed) == order, "only once"
    resumed.load_state_dict(state)
    resumed.set_epoch(4)
    assert len(list(resumed)) == 11, "another epoch begins at its beginning"


def test_a_state_of_another_order_is_rejected():
    state = LengthGroupedSampler(rows_of(1, 2, 3), batch_size=2).state_dict()
    for setting, value, other in (
        ("batch_size", 2, LengthGroupedSampler(rows_of(1, 2, 3), batch_size=1)),
        ("seed", 42, LengthGroupedSampler(rows_of(1, 2, 3), seed=0, batch_size=2)),
        ("samples", 3, LengthGroupedSampler(rows_of(1, 2), batch_size=2)),
    ):
        with raises_config(setting, value, match="the state has"):
            other.load_state_dict(state)
    with raises_config("position", 4):
        LengthGroupedSampler(rows_of(1, 2, 3), batch_size=2).load_state_dict({**state, "position": 4})


def test_a_data_loader_gets_batches_of_neighbours():
    rows = rows_of(*np.random.default_rng(0).permutation(40).tolist())
    sampler = LengthGroupedSampler(rows, batch_size=4)
    loader = DataLoader(
        rows,  # type: ignore[arg-type]
        batch_size=4,
        sampler=sampler,
        collate_fn=lambda batch: [row["_text_tokens"] for row in batch],
    )
    batches = list(loader)
    assert all(max(batch) - min(batch) == 3 for batch in batches)
    assert len(loader) == 10


def test_the_log_says_where_lengths_come_from(caplog: pytest.LogCaptureFixture):
    rows = [*rows_of(5), {"conversation": [{"role": "user", "content": "x" * 30}]}]
    with caplog.at_level(logging.INFO):
        sampler = LengthGroupedSampler(rows)
    assert sampler.length_source == {"row fields": 1, "estimate": 1}
    assert "lengths of 2 rows: 1 by row fields, 1 by estimate" in caplog.text
