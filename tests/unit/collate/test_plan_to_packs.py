"""From counts to a plan, its file and packs: every row is in a pack or in the ledger before one is built."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from contract.processors import processor
from packhorse.count.counting import count_meta
from packhorse.count.sidecar import counts_of
from packhorse.datasets import PreTokenizedDatasetWrapper, RobustDatasetWrapper, open_meta_dataset
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm import PackPlan, neat_pack_dataset_vlm, pack_lengths, plan_key, plan_packs
from raising import raises_bad_sample, raises_config

ROWS, SIZE = 60, 256
MISSING, TORN, LONG = 7, 20, 33  # an image that is not there, a line that is no JSON, too many words


def row(number: int) -> str:
    words = 400 if number == LONG else number % 17
    turns = [
        {"role": "user", "content": ("<image>" if number % 3 == 1 else "") + f"Question {number}?"},
        {"role": "assistant", "content": "word " * words + "end."},
    ]
    media = {"images": ["none.png" if number == MISSING else "image.png"]} if number % 3 == 1 else {}
    line = json.dumps({"messages": turns, **media})
    return line[:40] if number == TORN else line


@pytest.fixture
def meta(tmp_path: Path, cache: Path) -> dict[str, Any]:
    """Texts and images, counted for Qwen2-VL."""
    Image.new("RGB", (112, 84), "tan").save(tmp_path / "image.png")
    path = tmp_path / "mix.jsonl"
    path.write_text("\n".join(map(row, range(ROWS))) + "\n")
    made = {"mix": {"file_name": str(path), "media_dir": str(tmp_path)}}
    count_meta(made, processor("qwen2_vl"))
    return made


def wrap(meta: dict[str, Any], **options: Any) -> PreTokenizedDatasetWrapper:
    return PreTokenizedDatasetWrapper(open_meta_dataset(meta), processor("qwen2_vl"), **options)


def pack_samples(samples: Any, size: int = SIZE, **options: Any) -> Any:
    return neat_pack_dataset_vlm(samples, size, get_rope_index=None, **options)


def dropped_keys(packs: Any) -> dict[str, str]:
    return {drop.key: drop.reason for drop in packs.ledger if drop.action in ("dropped", "replaced")}


def test_lengths_to_plan_with_are_those_of_the_samples_after_the_shift(meta: dict[str, Any]) -> None:
    samples = wrap(meta)
    lengths = pack_lengths(samples)
    assert [lengths[MISSING], lengths[TORN]] == [0, 0]
    for index in (0, 1, 2, 5, LONG):
        # What the fake image's newlines melt with may make it a token more or less.
        assert abs(int(lengths[index]) - (len(samples.load(index)["input_ids"]) - 1)) <= 1
    counts = counts_of(samples.dataset, samples.processor)
    assert counts is not None
    assert (pack_lengths(samples, counts) == lengths).all()
    assert (pack_lengths(wrap(meta, inject_fake_images=False)) == np.maximum(counts.total - 1, 0)).all()


def test_bad_and_too_long_rows_are_recorded_when_packs_are_planned(
    meta: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        packs = pack_samples(wrap(meta))
    expected = {"mix/7": "missing_media", "mix/20": "malformed_row", "mix/33": "too_long"}
    assert dropped_keys(packs) == expected
    details = {drop.key: drop.detail for drop in packs.ledger}
    assert "none.png" in details["mix/7"]
    assert "mix.jsonl:21 (byte " in details["mix/20"]
    assert f"for packs of {SIZE}" in details["mix/33"]
    assert "57 packed, 2 bad, 1 dropped" in caplog.text
    planned = packs.plan
    assert planned is not None
    assert sorted(planned.indices.tolist()) == sorted(set(range(ROWS)) - {MISSING, TORN, LONG})
    documents = [length for pack in packs for length in pack["seq_lens"]]
    assert len(documents) == 57
    assert dropped_keys(packs) == expected


def test_samples_known_to_be_too_long_are_always_dropped(meta: dict[str, Any]) -> None:
    for drop in (False, True):
        packs = pack_samples(wrap(meta, ledger=Ledger()), drop_long_samples=drop)
        assert dropped_keys(packs)["mix/33"] == "too_long"
        assert LONG not in packs.plan.indices


def test_a_text_that_only_its_fake_image_makes_too_long_is_recorded_too(meta: dict[str, Any]) -> None:
    samples = wrap(meta, ledger=Ledger())
    exact = len(samples.load(LONG)["input_ids"]) - 1
    packs = pack_samples(samples, exact - 1)
    assert dropped_keys(packs)["mix/33"] == "too_long"
    fits = pack_samples(wrap(meta, ledger=Ledger()), exact)
    assert "mix/33" not in dropped_keys(fits)
    assert LONG in fits.plan.indices
    assert max(length for pack in fits for length in pack["seq_lens"]) == exact


def test_samples_over_max_length_are_recorded_when_packs_are_planned(
    meta: dict[str, Any],
) -> None:
    packs = pack_samples(wrap(meta, max_length=300, ledger=Ledger()), 4096)
    detail = {drop.key: drop.detail for drop in packs.ledger}["mix/33"]
    assert "tokens are more than max_length=300" in detail
    cut = pack_samples(wrap(meta, max_length=300, truncate=True, ledger=Ledger()), 4096)
    assert "mix/33" not in dropped_keys(cut)
    assert LONG in cut.plan.indices


def test_a_bad_row_raises_with_on_bad_raise(meta: dict[str, Any]) -> None:
    with raises_bad_sample("missing_media", key="mix/7"):
        pack_samples(wrap(meta, on_bad="raise"))


@pytest.mark.parametrize("from_file", [True, False])
def test_a_plan_is_trained_as_it_was_saved(meta: dict[str, Any], tmp_path: Path, from_file: bool) -> None:
    samples = wrap(meta)
    lengths = pack_lengths(samples)
    plan = plan_packs(lengths, SIZE, seed=3)
    path = tmp_path / "mix.phplan"
    plan.save(path, plan_key(lengths, SIZE, seed=3))
    packs = pack_samples(samples, plan=path if from_file else plan)
    assert packs.plan.bins() == plan.bins()
    assert dropped_keys(packs) == {"mix/7": "missing_media", "mix/20": "malformed_row", "mix/33": "too_long"}
    documents = sum(len(pack["seq_lens"]) for pack in packs)
    assert documents + packs.ledger.lost() == ROWS
    for pack in range(len(packs)):
        assert sorted(packs.pack_samples(pack)[0]) == sorted(plan[pack].tolist())
    again = tmp_path / "again.phplan"
    packs.plan.save(again)
    assert PackPlan.load(again).bins() == plan.bins()
    other = pack_samples(wrap(meta, ledger=Ledger()), plan=again)
    assert dropped_keys(other) == dropped_keys(packs)


def test_bad_rows_are_taken_out_of_a_plan_that_has_them(meta: dict[str, Any]) -> None:
    samples = wrap(meta, inject_fake_images=False)
    lengths = pack_lengths(samples)
    careless = np.where(lengths == 0, 5, np.minimum(lengths, SIZE))
    packs = pack_samples(samples, plan=plan_packs(careless, SIZE))
    assert dropped_keys(packs) == {"mix/7": "missing_media", "mix/20": "malformed_row", "mix/33": "too_long"}
    assert sum(len(pack["seq_lens"]) for pack in packs) == ROWS - 3
    assert packs.plan.samples == ROWS
    assert (packs.plan.sums(lengths) == packs.plan.tokens).all()


def test_a_plan_of_other_samples_lengths_or_packs_is_rejected(meta: dict[str, Any]) -> None:
    samples = wrap(meta)
    counts = counts_of(samples.dataset, samples.processor)
    assert counts is not None
    # Counts alone know neither the fake images nor the shift.
    with raises_config("plan", match=r"plan_packs\(pack_lengths\(dataset\), 256\)"):
        pack_samples(samples, plan=plan_packs(counts.total, SIZE))
    with raises_config("plan", match="3 samples"):
        pack_samples(samples, plan=plan_packs([5, 5, 5], SIZE))
    with raises_config("plan", match="for packs of 256"):
        pack_samples(samples, plan=plan_packs(pack_lengths(samples), 512))
    with raises_config("packing_ratio", 0.9):
        pack_samples(samples, packing_ratio=0.9, plan=plan_packs(pack_lengths(samples), SIZE))


def test_the_plan_says_what_a_cap_dropped(meta: dict[str, Any]) -> None:
    packs = pack_samples(wrap(meta), max_packs=3)
    assert len(packs) == len(packs.plan) == 3
    reasons = {reason: len(found) for reason, found in packs.plan.dropped_by_reason().items()}
    assert reasons["left_over"] == ROWS - 3 - len(packs.plan.indices)
    assert (reasons["sample_failed"], reasons["too_long"]) == (2, 1)
    assert list(dropped_keys(packs).values()).count("left_over") == reasons["left_over"]
    assert "2 bad" in packs.plan.describe()


def test_examples_are_rejected_with_the_wrapper_that_encodes_them(meta: dict[str, Any]) -> None:
    for examples in (open_meta_dataset(meta), RobustDatasetWrapper(open_meta_dataset(meta))):
        with raises_config("dataset", "MetaDataset"):
            neat_pack_dataset_vlm(examples, 2048)
