"""Where the planner gets lengths from: count files for mixtures, lazy or loaded into a list."""

import json
from pathlib import Path
from typing import Any

import pytest

from contract.processors import processor
from count_samples import save_processor
from packhorse.count.counting import count_meta
from packhorse.datasets import PreTokenizedDatasetWrapper, make_meta_dataset, open_meta_dataset
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm import neat_pack_dataset_vlm
from packhorse.plan.lengths import sample_lengths

WORDS = {"a": [3, 40, 0, 7, 90, 12, 5], "b": [60, 1, 33, 8]}
BROKEN = '{"messages": [\n'


@pytest.fixture
def counted(tmp_path: Path, cache: Path) -> dict[str, Any]:
    """Two files of text chats, counted for Qwen2-VL."""
    meta = {}
    for name, words in WORDS.items():
        turns = [
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "word " * number}]
            for number in words
        ]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in turns))
        meta[name] = {"file_name": str(path)}
    count_meta(meta, processor("qwen2_vl"))
    return meta


def wrap(rows: Any) -> PreTokenizedDatasetWrapper:
    return PreTokenizedDatasetWrapper(rows, processor("qwen2_vl"), inject_fake_images=False, ledger=Ledger())


@pytest.mark.parametrize("load", [open_meta_dataset, make_meta_dataset])
def test_packs_are_planned_with_the_counts_of_the_files(counted: dict[str, Any], load: Any) -> None:
    samples = wrap(load(counted))
    expected = [len(sample["input_ids"]) for sample in samples]
    found = sample_lengths(samples)
    assert found.all_exact
    assert found.tokens.tolist() == expected
    packs = neat_pack_dataset_vlm(samples, max(expected), ledger=Ledger())
    assert packs.exact
    assert sorted(n for pack in packs for n in pack["seq_lens"]) == sorted(n - 1 for n in expected)


def test_a_list_without_its_broken_rows_finds_the_counts_of_the_others(
    tmp_path: Path, counted: dict[str, Any]
) -> None:
    path = Path(counted["a"]["file_name"])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], BROKEN, *lines[2:]]))
    count_meta(counted, processor("qwen2_vl"))
    rows = make_meta_dataset(counted, on_bad="skip")
    assert len(rows) == sum(map(len, WORDS.values()))
    samples = wrap(rows)
    found = sample_lengths(samples)
    assert found.all_exact
    assert found.tokens.tolist() == [len(sample["input_ids"]) for sample in samples]


def test_a_list_that_was_changed_is_estimated(counted: dict[str, Any]) -> None:
    rows = make_meta_dataset(counted)
    rows.reverse()
    assert not sample_lengths(wrap(rows)).all_exact
    rows.pop()
    assert not sample_lengths(wrap(rows)).all_exact


def test_the_rows_and_the_path_of_a_processor_will_do(tmp_path: Path, counted: dict[str, Any]) -> None:
    saved = save_processor(tmp_path / "saved")
    rows = make_meta_dataset(counted)
    assert sample_lengths(rows, processor=saved).all_exact
    assert sample_lengths([{}] * len(rows), ds_raw=rows, processor=saved).all_exact


def test_counts_that_no_processor_opens_are_warned_of(
    counted: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    assert not sample_lengths(make_meta_dataset(counted)).all_exact
    assert "no processor was given" in caplog.text
