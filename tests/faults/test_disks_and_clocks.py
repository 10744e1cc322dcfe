"""Full disks, read-only folders, clocks that jump, and races for one file."""

import gzip
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from contract.processors import processor
from count_samples import (
    chat,
    no_file_larger_than,
    save_processor,
    sidecars,
    stale_files,
    write_chats,
    write_rows,
)
from faults.failing_store import PROTOCOL, set_faults
from faults.fault_cases import (
    RACES,
    count_all,
    open_index,
    plan_all,
    prepare_race,
    race,
    write_many,
)
from faults.faulty_data import may_mount, small_disk
from packhorse.cli.app import app
from packhorse.count.counting import count_meta
from packhorse.datasets import open_rows
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm import PackPlan, plan_packs
from packhorse.rows.row_files import local_file
from packhorse.types import Drop
from packhorse.utils.files import write_atomic
from raising import raises_config

# Full disks.

FREE_BYTES = 16_384
LARGE = list(range(1, 20_001))
"""Lengths whose plan needs more than ``FREE_BYTES``."""


FULL = ["limit", "disk"] if may_mount() else ["limit"]
"""A limit on the size of files is always available; a real disk only if it can be mounted."""


@pytest.fixture(params=FULL)
def full(request: pytest.FixtureRequest, tmp_path: Path, cache: Path) -> Iterator[Callable[[], Path]]:
    """Return a folder in which only 16 KiB can be written: on a real disk, or with a limit."""
    home = tmp_path / "small"
    with ExitStack() as stack:
        if request.param == "limit":
            home.mkdir()
        else:
            assert stack.enter_context(small_disk(home, "8m")), "the disk could be mounted before"

        def begin() -> Path:
            if request.param == "limit":
                stack.enter_context(no_file_larger_than(FREE_BYTES))
            else:
                disk = os.statvfs(home)
                (home / "ballast").write_bytes(bytes(disk.f_bavail * disk.f_bsize - FREE_BYTES))
            return home

        yield begin


def hidden_files(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*")]


def test_a_plan_on_a_full_disk_raises_with_the_file_and_keeps_the_older_plan(full: Any) -> None:
    small = plan_packs([3, 4, 5], 8)
    home = full()
    small.save(home / "a.phplan", {"of": "a few"})
    with pytest.raises(OSError, match=re.escape(str(home / "a.phplan"))):
        plan_packs(LARGE, 30_000).save(home / "a.phplan", {"of": "many"})
    assert PackPlan.load(home / "a.phplan", {"of": "a few"}).bins() == small.bins()
    assert hidden_files(home) == []


def test_the_plan_command_names_the_file_on_a_full_disk(full: Any, tmp_path: Path) -> None:
    meta, saved = write_chats(tmp_path / "data", 900), save_processor(tmp_path / "processor")
    count_meta(str(meta), saved)
    home = full()
    command = ["plan", str(meta), "--processor", saved, "--pack-size", "256", "--out", str(home / "a.phplan")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert str(home / "a.phplan") in line
    assert "no space left" in line or "file too large" in line
    assert [path.name for path in home.iterdir() if path.name != "ballast"] == []


def test_an_index_that_cannot_be_written_is_kept_in_memory(
    full: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_many(tmp_path / "small", size=6 << 20)
    whole = [row["n"] for row in open_rows(str(path)) if "n" in row]
    for index in path.parent.glob("*.phidx"):
        index.unlink()
    home = full()
    monkeypatch.setenv("PACKHORSE_CACHE", str(home / "cache"))
    rows = open_rows(str(path))
    assert [row["n"] for row in rows if "n" in row] == whole
    assert "holding it in memory" in caplog.text
    assert list(home.rglob("*.phidx")) == hidden_files(home) == []


@pytest.mark.parametrize("what", ["fetched", "unpacked"])
def test_a_copy_on_a_full_disk_raises_with_its_name_and_is_retried(
    what: str, full: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "".join(json.dumps({"n": n, "text": os.urandom(20).hex()}) + "\n" for n in range(2000))
    (tmp_path / "rows.jsonl").write_text(rows)
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write(rows)
    set_faults(tmp_path / "log", {})
    source = f"{PROTOCOL}://{tmp_path}/rows.jsonl" if what == "fetched" else str(tmp_path / "rows.jsonl.gz")
    home = full()
    monkeypatch.setenv("PACKHORSE_CACHE", str(home / "cache"))
    with pytest.raises(OSError, match=re.escape(str(home / "cache"))):
        local_file(source)
    assert list(home.rglob("*.jsonl")) == hidden_files(home) == []
    monkeypatch.setenv("PACKHORSE_CACHE", str(tmp_path / "large"))
    with no_file_larger_than(1 << 30):
        assert Path(local_file(source)).read_text() == rows


def test_a_plan_that_cannot_be_cached_is_used(
    full: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packhorse.loader.planner._CACHED_FROM", 1)
    write_chats(tmp_path / "small", 1500)
    expected = plan_all(tmp_path / "small")
    (cached,) = (tmp_path / "small" / "plans").iterdir()
    cached.unlink()
    home = full()
    assert plan_all(home) == expected
    assert "the plan cannot be saved" in caplog.text
    assert list((home / "plans").iterdir()) == []


def test_a_roll_back_on_a_full_disk_leaves_the_file_unchanged(full: Any, tmp_path: Path) -> None:
    path = tmp_path / "small" / "ledger.jsonl"
    path.parent.mkdir(exist_ok=True)
    ledger = Ledger(path)
    ledger.record_all(Drop(f"a/{n}", "media", "broken_media", "x" * 100, epoch=0) for n in range(300))
    before = path.read_bytes()
    full()
    with pytest.raises(OSError, match=r"(No space left|File too large).*ledger\.jsonl"):
        ledger.roll_back(0, {"a/3"})
    assert path.read_bytes() == before
    assert hidden_files(path.parent) == []


# Read-only folders.


def run_unprivileged(function: Callable[[], Any]) -> Any:
    """Return the result of a function in an unprivileged child process, or its error as text."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            if not os.getuid():
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            outcome = {"result": function()}
        except BaseException as error:  # noqa: BLE001 (the parent's stack must not run twice)
            outcome = {"error": f"{type(error).__name__}: {error}"}
        os.write(writing, json.dumps(outcome).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        outcome = json.loads(file.read())
    os.waitpid(pid, 0)
    return outcome.get("error", outcome.get("result"))


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder that other users may enter (pytest's are private), made writable at the end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        for path in [folder, *folder.rglob("*")]:
            if path.is_dir():
                path.chmod(0o755)


def set_mode(folder: Path, mode: int = 0o555) -> None:
    folder.mkdir(exist_ok=True)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(mode if path.is_dir() else 0o444)


def test_a_read_only_cache_is_not_used(open_to_all: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, cache = open_to_all / "data", open_to_all / "cache"
    monkeypatch.setenv("PACKHORSE_CACHE", str(cache))
    write_chats(data, 40)
    write_many(data)
    expected = [count_all(data), plan_all(data), open_index(data)]
    for path in data.rglob("*.ph*"):
        path.unlink()
    set_mode(cache)
    set_mode(data, 0o777)
    assert [
        run_unprivileged(lambda work=work: work(data)) for work in (count_all, plan_all, open_index)
    ] == expected
    assert len(sidecars(data)) == len(list(data.glob("*.phidx"))) == 1
    assert list(data.glob(".*")) == []


def test_existing_files_are_used_if_nothing_can_be_written_and_counting_raises(
    open_to_all: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, cache = open_to_all / "data", open_to_all / "cache"
    monkeypatch.setenv("PACKHORSE_CACHE", str(cache))
    write_chats(data, 40)
    write_many(data)
    set_mode(cache)
    set_mode(data)
    error = run_unprivileged(lambda: count_all(data))
    assert error.startswith("ConfigError: neither ")
    assert "PACKHORSE_CACHE" in error
    in_memory = run_unprivileged(lambda: open_index(data))
    set_mode(data, 0o777)
    results = [work(data) for work in (count_all, plan_all, open_index)]
    set_mode(data)
    set_mode(cache)
    assert results == [
        run_unprivileged(lambda work=work: work(data)) for work in (count_all, plan_all, open_index)
    ]
    assert results[2] == in_memory


# Clocks that jump.

FAR = {"past": 0, "future": 4_000_000_000}
"""Wrong times in seconds since 1970."""


def inodes(folder: Path, pattern: str) -> dict[str, int]:
    """Return the inode of each file; a rebuilt file has another one."""
    return {str(path): path.stat().st_ino for path in sorted(folder.glob(pattern))}


@pytest.mark.parametrize("when", FAR)
@pytest.mark.parametrize("what", RACES)
def test_data_with_a_wrong_time_is_processed_once(what: str, when: str, tmp_path: Path, cache: Path) -> None:
    folder, (work, pattern) = prepare_race(tmp_path / "data", what), RACES[what]
    for path in folder.iterdir():
        os.utime(path, (FAR[when], FAR[when]))
    first = work(folder)
    before = inodes(folder, pattern)
    assert len(before) == 1
    assert work(folder) == first
    for path in folder.glob(pattern):
        os.utime(path, (FAR[when], FAR[when]))  # the time of the result does not matter either
    assert work(folder) == first
    assert inodes(folder, pattern) == before, "it was rebuilt"


@pytest.mark.parametrize("when", FAR)
@pytest.mark.parametrize("what", RACES)
def test_results_of_older_data_are_not_used_whatever_the_clock_says(
    what: str, when: str, tmp_path: Path, cache: Path
) -> None:
    folder, (work, pattern) = prepare_race(tmp_path / "data", what), RACES[what]
    source = folder / ("many.jsonl" if what == "index" else "chats.jsonl")
    before = work(folder)
    for path in folder.glob(pattern):
        os.utime(path, (FAR["future"], FAR["future"]))  # newer than any later file
    content = source.read_bytes()
    middle = content.index(b"\n", len(content) // 2) + 1
    row = json.dumps(chat(999, words=300)).encode() + b"\n"
    source.write_bytes(content[:middle] + row + content[middle:])
    os.utime(source, (FAR[when], FAR[when]))
    after = work(folder)
    assert after != before
    (folder / "other").mkdir()
    for path in folder.glob("*.json*"):
        if not path.name.endswith(".phidx") and path.suffix != ".phcount":
            (folder / "other" / path.name).write_bytes(path.read_bytes())
    os.utime(folder / "other" / source.name, (FAR[when], FAR[when]))
    assert work(folder / "other") == after, "not the result of the new data"


def test_a_fresh_count_in_the_cache_is_used_although_the_clock_was_set_back(
    open_to_all: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = open_to_all / "data"
    monkeypatch.setenv("PACKHORSE_CACHE", str(open_to_all / "cache"))
    meta = write_chats(data, 20)
    count_meta(str(meta), processor("qwen2_vl"))
    (local,) = sidecars(data)
    os.utime(local, (FAR["future"], FAR["future"]))
    set_mode(data)
    set_mode(open_to_all / "cache", 0o777)

    def fresh() -> list[str]:
        made = count_meta(str(meta), processor("qwen2_vl"), fresh=True).files[0].sidecar.path
        found = count_meta(str(meta), processor("qwen2_vl")).files[0].sidecar.path
        return [str(made), str(found)]

    made, found = run_unprivileged(fresh)
    assert made != str(local)
    assert found == made


def test_parts_of_a_second_count_stay_although_its_clock_lags_the_first(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One machine recounts bad rows while another starts a run on the same data."""
    meta = write_chats(tmp_path / "data", 20)
    rows = (tmp_path / "data" / "chats.jsonl").read_text().splitlines()
    write_rows(tmp_path / "data" / "chats.jsonl", ["{" if n % 5 == 0 else row for n, row in enumerate(rows)])
    first = count_meta(str(meta), processor("qwen2_vl"), part_rows=5).files[0].sidecar.path
    whole = first.read_bytes()
    os.utime(first, (FAR["future"], FAR["future"]))
    snapshots: list[tuple[set[Path], set[Path]]] = []

    def parts() -> set[Path]:
        return set((tmp_path / "data").glob("*.parts/*.arrow"))

    def start_other_run(done: int, total: int) -> None:
        before = parts()
        with monkeypatch.context() as patch:  # another cache, with other locks
            patch.setenv("PACKHORSE_CACHE", str(tmp_path / "other"))
            if done < total:
                assert count_meta(str(meta), processor("qwen2_vl")).counted_rows == 0
        snapshots.append((before, parts()))

    recount = count_meta(str(meta), processor("qwen2_vl"), retry_bad=True, progress=start_other_run)
    assert recount.counted_rows == 20
    assert [len(before) for before, _ in snapshots] == [0, 1, 2, 3, 0]
    assert all(before == after for before, after in snapshots), "parts of the other run were removed"
    assert first.read_bytes() == whole
    assert stale_files(tmp_path / "data") == []


def test_a_file_that_is_being_written_survives_a_clock_jump_and_stale_files_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, now = tmp_path / "plan.phplan", time.time()

    def write_slowly(file: Any) -> None:
        file.write(b"whole")
        file.flush()
        pid = os.fork()
        if not pid:  # another process writes the same file after a clock jump of a day
            monkeypatch.setattr(time, "time", lambda: now + 86_400)
            code = 1
            try:
                write_atomic(target, lambda other: other.write(b"of the other"))
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert target.read_bytes() == b"of the other"

    write_atomic(target, write_slowly)
    assert target.read_bytes() == b"whole"

    def die(file: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for when in FAR.values():
        pid = os.fork()
        if not pid:
            write_atomic(target, die)
        os.waitpid(pid, 0)
        (left,) = stale_files(tmp_path)
        os.utime(tmp_path / left, (when, when))
        write_atomic(target, lambda file: file.write(b"next"))
        assert stale_files(tmp_path) == []
    assert target.read_bytes() == b"next"


# Races for one file.


@pytest.mark.parametrize("one_machine", [True, False])
@pytest.mark.parametrize("what", RACES)
def test_processes_that_write_the_same_file_at_once_have_the_same_result(
    what: str, one_machine: bool, tmp_path: Path, cache: Path
) -> None:
    folder, (work, pattern) = prepare_race(tmp_path / "data", what), RACES[what]
    results = race(folder, what, one_machine=one_machine)
    assert len(set(results)) == 1, results
    before = inodes(folder, pattern)
    assert len(before) == 1
    assert work(folder) == results[0]
    assert inodes(folder, pattern) == before, "it was rebuilt"
    assert [name for name in stale_files(folder) if name != "cache"] == []


def test_processes_that_need_the_same_copy_fetch_it_once(tmp_path: Path, cache: Path) -> None:
    rows = write_many(tmp_path)
    log = tmp_path / "log"
    set_faults(log, {"slow": 1.0}, delay=0.3)
    started = [os.fork() for _ in range(1)]
    if not started[0]:
        code = 1
        try:
            local_file(f"{PROTOCOL}://{rows}")
            code = 0
        finally:
            os._exit(code)
    here = Path(local_file(f"{PROTOCOL}://{rows}"))
    assert os.waitstatus_to_exitcode(os.waitpid(started[0], 0)[1]) == 0
    assert here.read_bytes() == rows.read_bytes()
    assert len(log.read_text().splitlines()) == 1


def test_a_cache_folder_that_is_a_file_raises_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("PACKHORSE_CACHE", str(tmp_path / "cache"))
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write("{}\n")
    with raises_config("PACKHORSE_CACHE", match="set PACKHORSE_CACHE"):
        local_file(str(tmp_path / "rows.jsonl.gz"))
