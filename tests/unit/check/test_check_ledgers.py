"""Ledgers are read from a file or from a folder of ranks."""

from pathlib import Path

import numpy as np
import pytest

from count_samples import write_chats
from packhorse.errors import ConfigError
from packhorse.ledger import Ledger, read_ledgers
from packhorse.types import Drop


def rank(folder: Path, number: int) -> Ledger:
    ledger = Ledger()
    ledger.record(Drop(f"coco/{number}", "media", "missing_media", "no file", "dropped", "coco"))
    ledger.record(Drop("coco/7#1", "encode", "too_long", "900 tokens", "dropped", "coco"))
    ledger.record_rows("chats", np.array([number, number + 10]), stage="select", reason="not_sampled")
    ledger.save(folder / f"rank{number}.jsonl")
    return ledger


def test_the_ledgers_of_all_ranks_are_merged_and_other_files_passed_over(tmp_path: Path) -> None:
    rank(tmp_path, 0)
    rank(tmp_path, 1)
    write_chats(tmp_path, 3)
    (tmp_path / "notes.jsonl").write_text("not JSON\n")
    (tmp_path / "empty.jsonl").write_text("")
    ledger, files = read_ledgers(tmp_path)
    assert [file.name for file in files] == ["rank0.jsonl", "rank1.jsonl"]
    assert ledger.counts() == {"not_sampled": 4, "missing_media": 2, "too_long": 1}  # the last is one fact
    single, (file,) = read_ledgers(tmp_path / "rank1.jsonl")
    assert file == tmp_path / "rank1.jsonl"
    assert len(single) == 4


def test_entries_are_selected_by_reason_dataset_and_row(tmp_path: Path) -> None:
    ledger = rank(tmp_path, 3)
    assert [drop.key for drop in ledger.select(reason="not_sampled")] == ["chats/3", "chats/13"]
    assert [drop.key for drop in ledger.select(dataset="coco")] == ["coco/3", "coco/7#1"]
    assert [drop.key for drop in ledger.select(key="coco/7")] == ["coco/7#1"]
    assert list(ledger.select(key="coco/7", reason="not_sampled")) == []
    assert len(list(ledger.select())) == 4


def test_an_empty_ledger_is_one_and_a_folder_without_any_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no ledger in this folder"):
        read_ledgers(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_ledgers(tmp_path / "gone.jsonl")
    Ledger().save(tmp_path / "ledger.jsonl")
    ledger, files = read_ledgers(tmp_path)
    assert (len(ledger), len(files)) == (0, 1)
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(ConfigError, match="not a ledger entry"):
        read_ledgers(tmp_path / "rows.jsonl")
