"""The ledger counts every entry once, survives crashes, and hears from child processes."""

import json
import multiprocessing
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from count_samples import no_file_larger_than
from packhorse.errors import BadSample, SystemFault
from packhorse.ledger import Ledger
from packhorse.types import Drop
from raising import raises_config

MISSING = Drop("coco/812", "media", "missing_media", "no file", "dropped", "coco")
CUT = Drop("coco/9", "convert", "unknown_role", "role 'tool'", "cut", "coco")


def test_an_entry_recorded_twice_is_counted_once() -> None:
    ledger = Ledger()
    ledger.record(MISSING)
    ledger.record(MISSING)
    ledger.record(CUT)
    assert list(ledger) == [MISSING, CUT]
    assert ledger.counts() == {"missing_media": 1, "unknown_role": 1}
    assert ledger.counts("action") == {"dropped": 1, "cut": 1}
    assert ledger.lost() == 1


def test_a_sample_that_fails_in_two_ways_is_lost_once() -> None:
    ledger = Ledger()
    ledger.record(MISSING)
    ledger.record(Drop(MISSING.key, "read", "malformed_row"))
    assert (len(ledger), ledger.lost()) == (2, 1)


def test_the_same_failure_in_two_epochs_is_two_entries() -> None:
    ledger = Ledger()
    for epoch in (0, 1):
        ledger.record(Drop("a/1", "read", "sample_failed", epoch=epoch))
    assert len(ledger) == 2


def test_the_summary_says_how_many_of_how_many() -> None:
    ledger = Ledger()
    assert ledger.summary() == "no entries: nothing dropped, replaced, cut or repaired"
    ledger.record(MISSING)
    assert ledger.summary(10_000) == "missing_media, dropped: 1 of 10,000"


def test_five_million_rows_of_one_reason_stay_one_array() -> None:
    ledger = Ledger()
    rows = np.arange(0, 10_000_000, 2)
    ledger.record_rows("big", rows, stage="select", reason="not_sampled")
    assert len(ledger) == ledger.counts()["not_sampled"] == ledger.lost() == 5_000_000
    assert next(iter(ledger)).key == "big/0"


def test_no_rows_make_no_entry() -> None:
    ledger = Ledger()
    ledger.record_rows("big", np.array([], np.int64), stage="select", reason="not_sampled")
    assert len(ledger) == 0
    assert list(ledger) == []


def test_saving_and_loading_gives_the_same_entries(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.record(MISSING)
    ledger.record_rows("b", np.array([0, 1, 2, 7, 9, 10]), stage="select", reason="not_sampled", detail="x")
    ledger.save(tmp_path / "ledger.jsonl")
    assert list(Ledger.load(tmp_path / "ledger.jsonl")) == list(ledger)
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert lines[1]["rows"] == [[0, 3], [7, 8], [9, 11]]
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.jsonl"], "no partial file is left"


def test_a_file_with_the_first_name_of_dropped_is_read(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.record(Drop("a/1", "decode", "missing_media", "gone", "dropped", "a"))
    ledger.record_rows("a", np.arange(3, 7), stage="plan", reason="too_long")
    ledger.save(tmp_path / "new.jsonl")
    text = (tmp_path / "new.jsonl").read_text()
    assert text.count('"dropped"') == 2
    (tmp_path / "old.jsonl").write_text(text.replace('"dropped"', '"left_out"'))
    assert list(Ledger.load(tmp_path / "old.jsonl")) == list(ledger)


def test_a_name_that_is_not_utf8_can_be_saved(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.record(Drop("a/0", "media", "missing_media", os.fsdecode(b"caf\xe9.jpg")))
    ledger.save(tmp_path / "ledger.jsonl")
    assert list(Ledger.load(tmp_path / "ledger.jsonl")) == list(ledger)


def test_a_ledger_with_a_path_is_on_disk_before_the_process_ends(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "ledger.jsonl"
    Ledger(path).record(MISSING)
    Ledger(path).record(CUT)  # a second run continues the file
    with open(path, "a") as file:
        file.write('{"key": "a/1", "stage": "re')  # a crash in mid-write
    assert list(Ledger.load(path)) == [MISSING, CUT]
    later = Drop("coco/99", "read", "sample_failed")
    Ledger(path).record(later)  # and the run goes on
    assert list(Ledger.load(path)) == [MISSING, CUT, later]


def test_a_line_cut_off_by_a_dying_worker_costs_no_other_entry() -> None:
    ledger = Ledger()
    for number in range(2):
        child = multiprocessing.get_context("fork").Process(target=_record, args=(ledger, f"child/{number}"))
        child.start()
        child.join()
        with open(ledger._spool, "a") as file:
            file.write('{"key": "torn')
    assert {drop.key for drop in ledger if drop.stage == "read"} == {"child/0", "child/1"}


def test_many_rows_recorded_again_count_once() -> None:
    ledger = Ledger()
    for rows in (np.arange(5), np.arange(5), np.arange(3, 8)):
        ledger.record_rows("b", rows, stage="select", reason="not_sampled")
    assert len(ledger) == ledger.lost() == 8


def test_entries_that_name_no_row_are_all_counted() -> None:
    ledger = Ledger()
    drop = Drop("", "convert", "surplus_media", "one", "dropped")
    for _ in range(3):
        ledger.record(drop)
    assert len(ledger) == len(list(ledger)) == ledger.lost() == ledger.counts()["surplus_media"] == 3
    ledger.record_all(
        [drop, drop, Drop("a/0", "media", "missing_media"), Drop("a/0", "media", "missing_media")]
    )
    assert ledger.counts() == {"surplus_media": 5, "missing_media": 1}


def test_a_fork_while_another_thread_records_does_not_hang_the_child() -> None:
    ledger = Ledger()
    with ledger._lock:
        child = multiprocessing.get_context("fork").Process(target=_record, args=(ledger, "child/0"))
        child.start()
    child.join(20)
    assert child.exitcode == 0


def _record_in_a_grandchild(ledger: Ledger) -> None:
    worker = multiprocessing.get_context("fork").Process(target=_record, args=(ledger, "grandchild/0"))
    worker.start()
    worker.join()
    assert "grandchild/0" in {drop.key for drop in ledger}


def test_a_trainer_process_sees_the_entries_of_its_own_workers() -> None:
    ledger = Ledger()
    trainer = multiprocessing.get_context("spawn").Process(target=_record_in_a_grandchild, args=(ledger,))
    trainer.start()
    trainer.join()
    assert trainer.exitcode == 0
    assert "grandchild/0" in {drop.key for drop in ledger}


def test_a_file_that_is_no_ledger_is_rejected_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"key": "a"}\n')
    with raises_config(path=tmp_path / "x.jsonl", match=r"x\.jsonl:1"):
        Ledger.load(tmp_path / "x.jsonl")


def test_merging_two_ranks_counts_nothing_twice() -> None:
    first, second = Ledger(), Ledger()
    first.record(MISSING)
    second.record(MISSING)
    second.record(CUT)
    second.record_rows("b", np.arange(3), stage="select", reason="not_sampled")
    first.merge(second)
    assert first.counts() == {"not_sampled": 3, "missing_media": 1, "unknown_role": 1}


def _record(ledger: Ledger, key: str) -> None:
    ledger.record(Drop(key, "read", "sample_failed"))
    ledger.record_rows("many", np.arange(4), stage="select", reason="not_sampled")


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_what_child_processes_record_arrives_in_the_parent(
    tmp_path: Path, method: str, on_disk: bool
) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl" if on_disk else None)
    ledger.record(MISSING)
    context = multiprocessing.get_context(method)
    children = [context.Process(target=_record, args=(ledger, f"child/{i}")) for i in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    assert {drop.key for drop in ledger if drop.stage == "read"} == {"child/0", "child/1", "child/2"}
    assert ledger.counts() == {"not_sampled": 4, "sample_failed": 3, "missing_media": 1}
    assert ledger.counts()["sample_failed"] == 3, "a second look counts nothing twice"


def test_the_temporary_file_of_child_entries_goes_with_the_ledger() -> None:
    ledger = Ledger()
    child = multiprocessing.get_context("fork").Process(target=_record, args=(ledger, "child/0"))
    child.start()
    child.join()
    spool = ledger._spool
    assert spool.exists()
    del ledger
    assert not spool.exists()


def test_a_bad_sample_survives_the_way_from_a_worker() -> None:
    error = BadSample("cut off", reason="broken_media", key="coco/1", stage="media")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.reason, again.key) == ("coco/1: cut off", "broken_media", "coco/1")
    assert again.as_drop(dataset="coco") == Drop(
        "coco/1", "media", "broken_media", "cut off", "dropped", "coco"
    )


def test_a_sample_that_was_cut_and_then_lost_does_not_count_as_delivered():
    ledger = Ledger()
    ledger.record(Drop("a/1", "encode", "truncated", "cut", "cut", "a", 0))
    ledger.record(Drop("a/2", "encode", "truncated", "cut", "cut", "a", 0))
    ledger.record(Drop("a/1", "collate", "collate_failed", "no", "dropped", "a", 0))
    assert ledger.samples_by_reason(gone=True) == {"collate_failed": 1}
    assert ledger.samples_by_reason(gone=False) == {"truncated": 1}
    assert ledger.samples_by_reason() == {"truncated": 2, "collate_failed": 1}


def test_flush_writes_the_buffered_entries_that_the_file_lacks(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    old, new = (Drop(f"a/{n}", "plan", "too_long", "9 tokens") for n in range(2))
    Ledger(path).record(old)
    ledger = Ledger(path).buffer()
    ledger.record_all([old, new])
    ledger.record(Drop("", "collate", "collate_failed", "which one is not known"))
    assert list(Ledger.load(path)) == [old]
    ledger.flush()
    ledger.flush()
    assert len(path.read_text().splitlines()) == 3
    assert list(Ledger.load(path)) == list(ledger)
    ledger.record(Drop("a/2", "plan", "too_long", "9 tokens"))
    assert len(Ledger.load(path)) == 4


def test_restored_entries_are_not_written_twice(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    nameless = Drop("", "collate", "collate_failed", "which one is not known", epoch=0)
    first = Ledger(path)
    first.record_all([nameless, nameless, Drop("a/1", "media", "missing_media", "no file", epoch=0)])
    before = path.read_text()
    ledger = Ledger(path).buffer()
    for _ in range(2):
        ledger.restore(Ledger.load(path).of_epoch(0, alone=True))
    ledger.flush()
    assert path.read_text() == before
    assert list(ledger) == list(Ledger.load(path))


def test_rolling_back_removes_later_epochs_and_nothing_before(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    drops = [
        Drop(f"a/{n}", "media", "missing_media", "no file", epoch=epoch) for n in (1, 2) for epoch in range(3)
    ]
    ledger = Ledger(path)
    ledger.record_all([Drop("a/9", "plan", "too_long", "9 tokens"), *drops])
    assert ledger.last_epoch() == 2
    assert ledger.roll_back(1, {"a/2"}) == 3
    kept = {("a/9", None), ("a/1", 0), ("a/2", 0), ("a/1", 1)}
    assert {(drop.key, drop.epoch) for drop in ledger} == kept
    assert {(drop.key, drop.epoch) for drop in Ledger.load(path)} == kept


@pytest.mark.parametrize("written", [0, 1])
def test_an_entry_that_could_not_be_written_is_rolled_back_too(tmp_path: Path, written: int) -> None:
    path = tmp_path / "ledger.jsonl"
    before, after, later = (
        Drop(f"a/{n}", "media", "missing_media", "no file", epoch=n > 2) for n in (1, 2, 3)
    )
    ledger = Ledger(path)
    ledger.record_all([before][:written])
    with no_file_larger_than(path.stat().st_size if written else 0):
        for drop in (after, later, *[before][written:]):
            with pytest.raises(SystemFault, match="memory only"):
                ledger.record(drop)
    assert ledger.roll_back(0, {"a/2"}) == 2
    ledger.record(Drop("a/4", "media", "missing_media", "no file", epoch=0))
    assert sorted(drop.key for drop in ledger) == ["a/1", "a/4"]
    assert sorted(drop.key for drop in Ledger.load(path)) == ["a/1", "a/4"]


@pytest.mark.parametrize(("key", "dataset"), [("coco/812", "coco"), ("a/b/3#1", "a/b"), ("17", ""), ("", "")])
def test_an_entry_from_a_key_has_its_dataset(key: str, dataset: str) -> None:
    drop = Drop.from_key(key, "encode", "truncated", "cut", "cut", epoch=2)
    assert drop == Drop(key, "encode", "truncated", "cut", "cut", dataset, 2)
