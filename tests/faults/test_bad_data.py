"""Damaged media and failing stores: samples are delivered or in the ledger, or the run stops."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import packhorse
from contract.processors import processor
from faults.failing_store import PROTOCOL, count_faults, set_faults
from faults.fault_cases import (
    DAMAGES,
    damage_media,
    run_epoch,
    run_with_damaged_media,
    run_with_failing_store,
    write_images,
)
from packhorse.count.counting import count_meta
from packhorse.datasets import open_rows
from packhorse.errors import SystemFault
from packhorse.loader import TooManyBad
from packhorse.media import remote


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry at once, and forget which stores failed before."""
    monkeypatch.setattr(remote, "_WAITS", (0.0, 0.0))
    remote._failures.clear()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_with_a_tenth_of_the_media_damaged_every_row_is_delivered_or_in_the_ledger(
    num_workers: int, tmp_path: Path
) -> None:
    outcome = run_with_damaged_media(tmp_path / "data", rows=60, seed=3, num_workers=num_workers)
    assert set(outcome.injected) == set(DAMAGES)
    assert outcome.injected.total() == 6
    assert (outcome.lost, outcome.duplicates) == (0, 0)
    assert set(outcome.reasons) == {"broken_media"}


def test_media_damaged_after_counting_are_in_the_ledger(tmp_path: Path) -> None:
    meta = write_images(tmp_path / "data", 60)
    count_meta(str(meta), processor("qwen2_vl"))
    damages = damage_media(tmp_path / "data", 60, seed=3)
    loader = packhorse.load(
        str(meta), processor("qwen2_vl"), model="unchecked", pack_size=256, max_bad_share=0.2
    )
    delivered = run_epoch(loader)
    dropped = {f"shots/{number}" for number, kind in damages.items() if kind != "renamed"}
    assert {drop.key for drop in loader.ledger} == dropped
    assert sorted(delivered) == sorted({f"shots/{number}" for number in range(60)} - dropped)


def test_a_tenth_of_bad_rows_stops_the_run_with_the_reasons(tmp_path: Path) -> None:
    meta = write_images(tmp_path / "data", 60)
    whole = packhorse.load(str(meta), processor("qwen2_vl"), model="unchecked", pack_size=256)
    damage_media(tmp_path / "data", 60, seed=3)
    with pytest.raises(TooManyBad, match=r"max_bad_share=1.00%.*shots/\d+: broken_media") as caught:
        run_epoch(whole)
    assert set(caught.value.reasons) == {"broken_media"}
    for path in tmp_path.glob("data/*.phcount"):
        path.unlink()
    # Counting reads headers only: truncated files are found later.
    with pytest.raises(TooManyBad) as caught:
        packhorse.load(str(meta), processor("qwen2_vl"), model="unchecked", pack_size=256, max_bad_share=0.0)
    assert (caught.value.bad, caught.value.samples) == (3, 60)
    assert caught.value.reasons == {"broken_media": 3}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_media_of_a_failing_store_are_delivered_or_in_the_ledger(num_workers: int, tmp_path: Path) -> None:
    kinds = ("slow", "timeout", "reset", "denied", "short", "late_timeout")
    outcome = run_with_failing_store(
        tmp_path / "data", dict.fromkeys(kinds, 0.1), rows=60, seed=2, num_workers=num_workers
    )
    assert set(outcome.injected) == set(kinds)
    assert (outcome.lost, outcome.duplicates) == (0, 0)
    assert set(outcome.reasons) == {"unreachable_media", "broken_media"}


def test_a_slow_store_loses_no_sample(tmp_path: Path) -> None:
    outcome = run_with_failing_store(tmp_path / "data", {"slow": 0.2}, rows=20, sample_timeout=30.0)
    assert outcome.injected["slow"] >= 1
    assert not outcome.reasons


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_that_time_out_are_in_the_ledger_and_the_others_delivered(
    num_workers: int, tmp_path: Path
) -> None:
    outcome = run_with_failing_store(
        tmp_path / "data", {"slow": 0.2}, rows=20, num_workers=num_workers, delay=60.0, sample_timeout=1.5
    )
    assert 1 <= outcome.injected["slow"] < 20
    assert (outcome.lost, outcome.duplicates) == (0, 0)
    assert outcome.reasons == Counter(broken_media=outcome.injected["slow"])
    assert all("not ready after 1.5 s (sample_timeout)" in detail for detail in outcome.details)


def test_a_store_that_always_fails_stops_the_run_after_consecutive_failures(tmp_path: Path) -> None:
    with pytest.raises(TooManyBad, match="no answer for") as caught:
        run_with_failing_store(tmp_path / "data", {"timeout": 1.0}, max_bad_share=None, max_consecutive_bad=5)
    assert caught.value.setting == "max_consecutive_bad"
    assert "unreachable_media" in caught.value.reasons


@pytest.fixture
def remote_rows(tmp_path: Path, cache: Path) -> dict[str, Any]:
    """A meta file with rows in the store."""
    write_images(tmp_path / "data", 20)
    address = f"{PROTOCOL}://{tmp_path / 'data' / 'shots.jsonl'}"
    return {"shots": {"file_name": address, "media_dir": str(tmp_path / "data" / "media")}}


@pytest.mark.parametrize("fault", ["timeout", "reset", "denied", "short", "late_timeout"])
def test_incomplete_rows_stop_the_run_and_are_not_cached(
    fault: str, remote_rows: dict[str, Any], tmp_path: Path, cache: Path
) -> None:
    log, address = tmp_path / "log", remote_rows["shots"]["file_name"]
    set_faults(log, {fault: 1.0})
    for _ in range(2):  # the cache is not used the second time either
        with pytest.raises(ConnectionError, match=r"shots.jsonl.*nothing is kept") as caught:
            packhorse.load(remote_rows, processor("qwen2_vl"), model="unchecked", pack_size=256)
        assert address in str(caught.value)
    assert set(count_faults(log)) == {fault}
    assert count_faults(log)[fault] >= 2  # more if the fetch was retried
    assert [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"] == []
    set_faults(log, {})
    assert len(open_rows(address)) == 20


def test_a_failing_disk_stops_the_run_and_no_sample_counts_as_bad(tmp_path: Path) -> None:
    with pytest.raises(SystemFault, match="the machine is at fault"):
        run_with_failing_store(tmp_path / "data", {"disk": 1.0})
