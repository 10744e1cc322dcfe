"""Packs built lazily: what fails is taken out, what is too long is carried over, nothing is silent."""

import inspect

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from packhorse.collate.packed_dataset import EmptyPack
from packhorse.collate_fns import neat_packed_vlm_collater
from packhorse.count.columns import CountColumns
from packhorse.errors import BadSample, ConfigError, ReplacementsFailed
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm import PackedDatasetWrapper, neat_pack_dataset_vlm
from raising import raises_bad_sample, raises_config


class Encoded(Dataset):
    """Samples of given lengths; token ``t`` of sample ``i`` is ``1000 * i + t``."""

    def __init__(self, lengths, bad=()):
        self.lengths, self.bad = lengths, set(bad)

    def __len__(self):
        return len(self.lengths)

    def key(self, index):
        return f"set/{index}"

    def __getitem__(self, index):
        if index in self.bad:
            raise BadSample("torn", reason="broken_media", stage="media")
        ids = 1000 * index + torch.arange(self.lengths[index])
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def make_packs(lengths, bins, size, bad=(), **options):
    options.setdefault("ledger", Ledger())
    return PackedDatasetWrapper(Encoded(lengths, bad), bins, size, **options)


def members(pack):
    return sorted(set((pack["input_ids"] // 1000).tolist()))


def ledger_entries(dataset):
    return {(drop.key, drop.reason) for drop in dataset.ledger}


def test_the_documented_calls_have_the_documented_arguments() -> None:
    def positional(function):
        parameters = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}

    none = inspect.Parameter.empty
    assert positional(PackedDatasetWrapper) == {
        "inner_dataset": none,
        "bins": none,
        "pack_size": none,
        "padding_idx": 0,
        "get_rope_index": None,
        "max_retries": 10,
    }
    assert positional(neat_pack_dataset_vlm) == {
        "dataset": none,
        "pack_size": none,
        "padding_idx": 0,
        "drop_long_samples": False,
        "max_packs": None,
        "get_rope_index": None,
        "ds_raw": None,
        "packing_ratio": 1.0,
        "processor": None,
        "balance_media_tokens": True,
    }


class Seen(Encoded):
    """Each sample has an image of four patches, filled with its number."""

    def __getitem__(self, index):
        pixels = torch.full((4, 6), float(index))
        return {
            **super().__getitem__(index),
            "pixel_values": pixels,
            "image_grid_thw": torch.tensor([[1, 2, 2]]),
        }


def test_a_pack_holds_its_pixels_as_one_tensor() -> None:
    dataset = PackedDatasetWrapper(Seen([3, 4, 3]), [[0, 2], [1]], 10, ledger=Ledger())
    pixels = dataset[0]["pixel_values"]
    assert isinstance(pixels, torch.Tensor)
    assert pixels[:, 0].tolist() == [0.0] * 4 + [2.0] * 4
    batch = neat_packed_vlm_collater([dataset[0], dataset[1]], pixel_dtype=None)
    assert batch["pixel_values"][::4, 0].tolist() == [0.0, 2.0, 1.0]


def test_a_pack_is_accessed_by_the_documented_argument_name() -> None:
    dataset = make_packs([3, 4], [[0], [1]], 10)
    assert members(dataset.__getitem__(pack_idx=1)) == [1]


def test_a_pack_holds_its_samples_shifted() -> None:
    dataset = make_packs([3, 4], [[0, 1]], 10)
    assert len(dataset) == 1
    pack = dataset[0]
    assert pack["input_ids"].tolist() == [0, 1, 1000, 1001, 1002]
    assert pack["labels"].tolist() == [1, 2, 1001, 1002, 1003]
    assert pack["attention_mask"].tolist() == [1, 1, 2, 2, 2]
    assert not dataset.has_mrope


def test_a_sample_that_fails_is_taken_out_and_the_pack_goes_on() -> None:
    dataset = make_packs([3, 3, 3], [[0, 1, 2]], 10, bad=[1])
    assert members(dataset[0]) == [0, 2]
    assert ledger_entries(dataset) == {("set/1", "broken_media")}


def test_a_program_error_in_a_sample_stops_the_run() -> None:
    class Faulty(Encoded):
        def __getitem__(self, index):
            raise NameError("typo")

    with pytest.raises(NameError):
        PackedDatasetWrapper(Faulty([3]), [[0]], 10, ledger=Ledger())[0]


def test_one_bad_sample_is_raised_if_requested() -> None:
    with raises_bad_sample("broken_media"):
        make_packs([3, 3], [[0, 1]], 10, bad=[1], on_bad="raise")[0]


def test_a_pack_without_a_usable_sample_is_skipped_replaced_or_raised() -> None:
    bins = [[0], [1]]
    assert make_packs([3, 3], bins, 10, bad=[0], on_bad="skip")[0] is None
    assert members(make_packs([3, 3], bins, 10, bad=[0], on_bad="replace")[0]) == [1]
    with pytest.raises(ReplacementsFailed) as failed:
        make_packs([3, 3], bins, 10, bad=[0, 1], on_bad="replace")[0]
    assert isinstance(failed.value.last, EmptyPack)
    with raises_bad_sample("broken_media"):
        make_packs([3, 3], bins, 10, bad=[0], on_bad="raise")[0]
    dataset = make_packs([3, 3], bins, 10, bad=[0], on_bad="skip")
    with pytest.raises(EmptyPack) as empty:
        dataset.load(0)
    assert empty.value.key == "pack/0"
    assert dataset[0] is None
    assert ledger_entries(dataset) == {("set/0", "broken_media")}


def test_the_samples_of_a_replaced_pack_are_recorded_with_what_came_instead() -> None:
    dataset = make_packs([3, 90, 3, 3], [[0, 1], [2, 3]], 10, bad=[0], on_bad="replace")
    delivered = [members(pack) for pack in dataset]
    assert delivered == [[2, 3], [2, 3]]
    entries = {drop.key: drop for drop in dataset.ledger}
    assert sorted(entries) == ["set/0", "set/1"]
    assert {(drop.reason, drop.action) for drop in entries.values()} == {
        ("broken_media", "replaced"),
        ("too_long", "replaced"),
    }
    assert all(drop.detail.endswith("; pack/1 instead") for drop in entries.values())
    as_themselves = {index for pack in delivered for index in pack}
    assert len(as_themselves) + dataset.ledger.lost() == 4


def test_packs_of_unknown_number_that_cannot_be_collated_are_recorded_without_a_key(caplog) -> None:
    def collate(packs):
        raise ValueError("torn")

    dataset = make_packs([3, 3, 3], [[0, 1], [2]], 10, on_bad="skip")
    assert dataset.robust_collate(collate)([dataset[0], dataset[1]]) is None
    assert [(drop.key, drop.reason, drop.action) for drop in dataset.ledger] == [
        ("", "collate_failed", "dropped"),
        ("", "collate_failed", "dropped"),
    ]
    assert "pack/0" not in caplog.text


def test_samples_that_are_not_encoded_stop_the_run_with_the_wrapper_that_is_missing() -> None:
    said = {"conversation": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with raises_config("dataset", "list"):
        PackedDatasetWrapper([said], [[0]], 10, ledger=Ledger())[0]
    with raises_config("dataset", "list"):
        neat_pack_dataset_vlm([said], 10, ledger=Ledger())


def test_a_skipped_pack_is_taken_out_of_the_batch() -> None:
    dataset = make_packs([3, 3], [[0], [1]], 10, bad=[0], on_bad="skip")
    loader = DataLoader(dataset, batch_size=2, collate_fn=dataset.robust_collate(neat_packed_vlm_collater))
    (batch,) = loader
    assert batch["input_ids"].tolist() == [[1000, 1001]]


def test_overflow_is_dropped_and_named_where_lengths_cannot_be_had() -> None:
    dataset = make_packs([6, 6, 6], [[0, 1, 2]], 10)
    assert members(dataset[0]) == [0, 1]
    assert ledger_entries(dataset) == {("set/2", "pack_full")}


def test_overflow_is_carried_over_to_a_neighbour_with_free_space() -> None:
    dataset = make_packs([6, 6, 6, 3], [[0, 1, 2], [3]], 10, on_overflow="carry")
    assert members(dataset[0]) == [0, 1]
    assert members(dataset[1]) == [2, 3]
    assert not ledger_entries(dataset)


def test_overflow_that_fits_nowhere_is_named_once() -> None:
    dataset = make_packs([6, 6, 6, 8], [[0, 1, 2], [3]], 10, on_overflow="carry")
    assert [members(dataset[pack]) for pack in (1, 0, 1)] == [[3], [0, 1], [3]]
    assert ledger_entries(dataset) == {("set/2", "pack_full")}
    assert len(dataset.ledger) == 1


def test_who_goes_where_does_not_depend_on_the_order_of_asking_or_on_workers() -> None:
    torch.manual_seed(0)
    lengths = torch.randint(2, 30, (200,)).tolist()
    bins = [list(range(first, first + 5)) for first in range(0, 200, 5)]
    one, other = (make_packs(lengths, bins, 70, on_overflow="carry") for _ in range(2))
    forwards = {pack: members(one[pack]) for pack in range(len(bins))}
    backwards = {pack: members(other[pack]) for pack in reversed(range(len(bins)))}
    assert forwards == backwards
    third = make_packs(lengths, bins, 70, on_overflow="carry")
    loader = DataLoader(third, batch_size=None, num_workers=2)
    assert {pack: members(found) for pack, found in enumerate(loader)} == forwards
    delivered = [index for found in forwards.values() for index in found]
    dropped = {int(drop.key.split("/")[1]) for drop in one.ledger}
    assert sorted([*delivered, *dropped]) == list(range(200))
    assert set(ledger_entries(one)) == set(ledger_entries(other)) == set(ledger_entries(third))


def test_every_pack_stays_within_its_size_and_alignment() -> None:
    dataset = make_packs([4, 6, 3], [[0, 1, 2]], 16, sequence_alignment=4)
    pack = dataset[0]
    assert pack["seq_lens"] == [3, 5, 2]
    assert pack["seq_lens_padded"] == [4, 8, 4]
    assert len(pack["input_ids"]) == 16
    assert members(make_packs([4, 6, 3], [[0, 1, 2]], 12, sequence_alignment=4)[0]) == [0, 1]


def test_positions_in_three_rows_work_with_alignment() -> None:
    def get_rope_index(input_ids, attention_mask=None):
        return torch.arange(input_ids.shape[1]).expand(3, 1, -1) * 2, None

    dataset = make_packs([4, 3], [[0, 1]], 16, get_rope_index=get_rope_index, sequence_alignment=4)
    assert dataset.has_mrope
    assert dataset[0]["position_ids"].tolist() == [[0, 2, 4, 0, 0, 2, 0, 0]] * 3


def test_a_sample_of_one_token_is_named() -> None:
    dataset = make_packs([1, 4], [[0, 1]], 16)
    assert members(dataset[0]) == [1]
    assert ledger_entries(dataset) == {("set/0", "empty_sample")}


@pytest.mark.parametrize(("setting", "value"), [("on_overflow", "hide"), ("sequence_alignment", 0)])
def test_settings_out_of_range_are_rejected(setting, value) -> None:
    with raises_config(setting, value):
        make_packs([3], [[0]], 10, **{setting: value})


# --- in one call --------------------------------------------------------------------------------------------


def rows(*lengths):
    """Rows whose fields say how long they are."""
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    return [{"conversation": said, "_text_tokens": length, "_media_tokens": 0} for length in lengths]


def test_every_sample_is_in_one_pack() -> None:
    lengths = [30, 20, 50, 60, 41, 10, 91]
    dataset = neat_pack_dataset_vlm(Encoded(lengths), 100, ds_raw=rows(*lengths), ledger=Ledger())
    found = [index for pack in range(len(dataset)) for index in members(dataset[pack])]
    assert sorted(found) == list(range(7))
    assert not len(dataset.ledger)


def test_lengths_of_encoded_samples_are_measured() -> None:
    dataset = neat_pack_dataset_vlm(Encoded([30, 70]), 100, ledger=Ledger())
    assert members(dataset[0]) == [0, 1]


def test_samples_too_long_for_a_pack_are_dropped_only_if_requested() -> None:
    lengths = [30, 200]
    kept = neat_pack_dataset_vlm(Encoded(lengths), 100, ds_raw=rows(*lengths), on_bad="skip", ledger=Ledger())
    assert len(kept) == 2
    assert sorted(str(kept[pack] is None) for pack in range(2)) == ["False", "True"]
    assert ledger_entries(kept) == {("set/1", "too_long")}
    dropping = neat_pack_dataset_vlm(
        Encoded(lengths), 100, ds_raw=rows(*lengths), drop_long_samples=True, ledger=Ledger()
    )
    assert len(dropping) == 1
    assert ledger_entries(dropping) == {("set/1", "too_long")}


def test_the_ratio_leaves_a_margin_and_the_size_stays_the_limit() -> None:
    lengths = [51, 41, 95]
    dataset = neat_pack_dataset_vlm(
        Encoded(lengths), 100, ds_raw=rows(*lengths), packing_ratio=0.9, ledger=Ledger()
    )
    assert sorted(members(dataset[pack]) for pack in range(len(dataset))) == [[0, 1], [2]]


def test_packs_beyond_the_cap_are_named() -> None:
    lengths = [90, 91, 92]
    dataset = neat_pack_dataset_vlm(
        Encoded(lengths), 100, max_packs=2, ds_raw=rows(*lengths), ledger=Ledger()
    )
    assert len(dataset) == 2
    assert len(ledger_entries(dataset)) == 1


def test_neighbouring_packs_carry_similar_media() -> None:
    raw = rows(*[90] * 6)
    for row, media in zip(raw, [5, 80, 0, 70, 10, 60], strict=True):
        row.update(_text_tokens=90 - media, _media_tokens=media)
    dataset = neat_pack_dataset_vlm(Encoded([90] * 6), 100, ds_raw=raw, ledger=Ledger())
    assert [members(dataset[pack])[0] for pack in range(6)] == [2, 0, 4, 5, 3, 1]
    plain = neat_pack_dataset_vlm(
        Encoded([90] * 6), 100, ds_raw=raw, balance_media_tokens=False, ledger=Ledger()
    )
    assert [members(plain[pack])[0] for pack in range(6)] != [2, 0, 4, 5, 3, 1]


def make_counts(*lengths):
    zeros = np.zeros(len(lengths), np.int64)
    ones = np.ones(len(lengths), bool)
    status = np.array(["ok"] * len(lengths), object)
    return CountColumns(np.array(lengths), *[zeros] * 8, status, ones, ones, zeros)


def test_exact_counts_are_believed_and_nothing_is_counted_again() -> None:
    lengths = [31, 71, 11]
    dataset = neat_pack_dataset_vlm(Encoded(lengths), 100, counts=make_counts(*lengths), ledger=Ledger())
    assert dataset.exact
    assert sorted(members(dataset[pack]) for pack in range(len(dataset))) == [[0, 1], [2]]


def test_rows_and_samples_must_be_equally_many() -> None:
    with pytest.raises(ConfigError, match="ds_raw has 1 rows for a dataset of 2"):
        neat_pack_dataset_vlm(Encoded([3, 3]), 10, ds_raw=rows(3))
