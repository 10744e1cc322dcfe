"""Spoilt media, failing stores: a sample is delivered or in the ledger, or the run stops and says why."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import packhorse
from contract.processors import processor
from faults.failing_store import PROTOCOL, bad_line, happened
from faults.fault_cases import SPOILT, bad_store, epoch, spoil, spoilt_media, write_images
from packhorse.count.counting import count_meta
from packhorse.datasets import open_rows
from packhorse.errors import SystemFault
from packhorse.loader import TooManyBad


@pytest.mark.parametrize("num_workers", [0, 1])
def test_with_a_tenth_of_the_media_spoilt_every_row_is_delivered_or_in_the_ledger(
    num_workers: int, tmp_path: Path
) -> None:
    outcome = spoilt_media(tmp_path / "data", rows=60, seed=3, num_workers=num_workers)
    assert set(outcome.injected) == set(SPOILT)
    assert outcome.injected.total() == 6
    assert (outcome.lost, outcome.doubled) == (0, 0)
    assert set(outcome.reasons) == {"broken_media"}


def test_media_spoilt_after_they_were_counted_are_in_the_ledger_too(tmp_path: Path) -> None:
    meta = write_images(tmp_path / "data", 60)
    count_meta(str(meta), processor("qwen2_vl"))
    done = spoil(tmp_path / "data", 60, seed=3)
    loader = packhorse.load(
        str(meta), processor("qwen2_vl"), model="unchecked", pack_size=256, max_bad_share=0.2
    )
    seen = epoch(loader)
    gone = {f"shots/{number}" for number, kind in done.items() if kind != "renamed"}
    assert {drop.key for drop in loader.ledger} == gone
    assert sorted(seen) == sorted({f"shots/{number}" for number in range(60)} - gone)


def test_a_tenth_is_more_than_is_usual_and_the_run_stops_with_the_reasons(tmp_path: Path) -> None:
    meta = write_images(tmp_path / "data", 60)
    whole = packhorse.load(str(meta), processor("qwen2_vl"), model="unchecked", pack_size=256)
    spoil(tmp_path / "data", 60, seed=3)
    with pytest.raises(TooManyBad, match=r"max_bad_share=1.00%.*broken_media \d.*shots/\d+: broken_media"):
        epoch(whole)
    for path in tmp_path.glob("data/*.phcount"):
        path.unlink()
    # A header that is whole is all that counting looks at: those that are cut off come later.
    with pytest.raises(TooManyBad, match=r"3 of 60 samples cannot be used.*broken_media 3"):
        packhorse.load(str(meta), processor("qwen2_vl"), model="unchecked", pack_size=256, max_bad_share=0.0)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_media_of_a_store_that_fails_are_delivered_or_in_the_ledger(num_workers: int, tmp_path: Path) -> None:
    kinds = ("slow", "timeout", "reset", "denied", "short", "late_timeout")
    outcome = bad_store(
        tmp_path / "data", dict.fromkeys(kinds, 0.1), rows=60, seed=2, num_workers=num_workers
    )
    assert set(outcome.injected) == set(kinds)
    assert (outcome.lost, outcome.doubled) == (0, 0)
    assert set(outcome.reasons) == {"unreachable_media", "broken_media"}


def test_a_store_that_is_slow_costs_time_and_no_sample(tmp_path: Path) -> None:
    outcome = bad_store(tmp_path / "data", {"slow": 0.2}, rows=20, sample_timeout=30.0)
    assert outcome.injected["slow"] >= 1
    assert not outcome.reasons


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_for_which_a_store_is_too_slow_are_in_the_ledger_and_the_others_delivered(
    num_workers: int, tmp_path: Path
) -> None:
    outcome = bad_store(
        tmp_path / "data", {"slow": 0.2}, rows=20, num_workers=num_workers, delay=60.0, sample_timeout=1.5
    )
    assert 1 <= outcome.injected["slow"] < 20
    assert (outcome.lost, outcome.doubled) == (0, 0)
    assert outcome.reasons == Counter(broken_media=outcome.injected["slow"])
    assert all("not ready after 1.5 s (sample_timeout)" in detail for detail in outcome.details)


def test_a_store_that_fails_all_the_time_stops_the_run_after_a_row_of_failures(tmp_path: Path) -> None:
    with pytest.raises(TooManyBad, match=r"consecutive samples failed.*unreachable_media.*no answer for"):
        bad_store(tmp_path / "data", {"timeout": 1.0}, max_bad_share=None, max_consecutive_bad=5)


@pytest.fixture
def remote_rows(tmp_path: Path, cache: Path) -> dict[str, Any]:
    """A meta file whose rows are in the store."""
    write_images(tmp_path / "data", 20)
    address = f"{PROTOCOL}://{tmp_path / 'data' / 'shots.jsonl'}"
    return {"shots": {"file_name": address, "media_dir": str(tmp_path / "data" / "media")}}


@pytest.mark.parametrize("fault", ["timeout", "reset", "denied", "short", "late_timeout"])
def test_rows_that_do_not_come_whole_stop_the_run_and_none_of_them_is_kept(
    fault: str, remote_rows: dict[str, Any], tmp_path: Path, cache: Path
) -> None:
    log, address = tmp_path / "log", remote_rows["shots"]["file_name"]
    bad_line(log, {fault: 1.0})
    for _ in range(2):  # nor is it taken from the cache the second time
        with pytest.raises(ConnectionError, match=r"shots.jsonl.*nothing is kept") as caught:
            packhorse.load(remote_rows, processor("qwen2_vl"), model="unchecked", pack_size=256)
        assert address in str(caught.value)
    assert set(happened(log)) == {fault}
    assert happened(log)[fault] >= 2  # more where the fetch was tried again
    assert [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"] == []
    bad_line(log, {})
    assert len(open_rows(address)) == 20


def test_a_disk_that_fails_stops_the_run_and_no_sample_is_called_bad(tmp_path: Path) -> None:
    """What the system says about itself is no sample's fault, whichever driver it comes through."""
    with pytest.raises(SystemFault, match="the machine is at fault"):
        bad_store(tmp_path / "data", {"disk": 1.0})
