"""Full disks, folders that may not be written, clocks that jump, several processes after the same file."""

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
    leavings,
    no_file_larger_than,
    save_processor,
    sidecars,
    write_chats,
    write_rows,
)
from faults.failing_store import PROTOCOL, bad_line
from faults.fault_cases import (
    RACES,
    count_all,
    open_index,
    plan_all,
    prepared,
    race,
    write_many,
)
from faults.faulty_data import may_mount, small_disk
from packhorse.cli.app import app
from packhorse.count.counting import count_meta
from packhorse.datasets import open_rows
from packhorse.errors import ConfigError
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm import PackPlan, plan_packs
from packhorse.rows.fetch import local_file
from packhorse.types import Drop
from packhorse.utils.files import write_atomic

# Full disks.

ROOM = 16_384
LARGE = list(range(1, 20_001))
"""Lengths whose plan does not fit into the room."""


FULL = ["limit", "disk"] if may_mount() else ["limit"]
"""A limit on the size of files is everywhere to be had; a real disk where one may be mounted."""


@pytest.fixture(params=FULL)
def full(request: pytest.FixtureRequest, tmp_path: Path, cache: Path) -> Iterator[Callable[[], Path]]:
    """A folder in which, once it is called, no more than 16 KiB can be written: a real disk, or a limit."""
    home = tmp_path / "small"
    with ExitStack() as stack:
        if request.param == "limit":
            home.mkdir()
        else:
            assert stack.enter_context(small_disk(home, "8m")), "it could be mounted a moment ago"

        def begin() -> Path:
            if request.param == "limit":
                stack.enter_context(no_file_larger_than(ROOM))
            else:
                disk = os.statvfs(home)
                (home / "ballast").write_bytes(bytes(disk.f_bavail * disk.f_bsize - ROOM))
            return home

        yield begin


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*")]


def test_a_plan_on_a_full_disk_is_an_error_that_names_the_file_and_an_older_plan_stays(full: Any) -> None:
    small = plan_packs([3, 4, 5], 8)
    home = full()
    small.save(home / "a.phplan", {"of": "a few"})
    with pytest.raises(OSError, match=re.escape(str(home / "a.phplan"))):
        plan_packs(LARGE, 30_000).save(home / "a.phplan", {"of": "many"})
    assert PackPlan.load(home / "a.phplan", {"of": "a few"}).bins() == small.bins()
    assert hidden(home) == []


def test_the_plan_command_says_in_one_line_which_file_did_not_fit(full: Any, tmp_path: Path) -> None:
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


def test_an_index_that_does_not_fit_is_held_in_memory_and_rows_are_the_same(
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
    assert list(home.rglob("*.phidx")) == hidden(home) == []


@pytest.mark.parametrize("what", ["fetched", "unpacked"])
def test_a_copy_that_does_not_fit_is_an_error_that_names_it_and_is_made_later(
    what: str, full: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "".join(json.dumps({"n": n, "text": os.urandom(20).hex()}) + "\n" for n in range(2000))
    (tmp_path / "rows.jsonl").write_text(rows)
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write(rows)
    bad_line(tmp_path / "log", {})
    source = f"{PROTOCOL}://{tmp_path}/rows.jsonl" if what == "fetched" else str(tmp_path / "rows.jsonl.gz")
    home = full()
    monkeypatch.setenv("PACKHORSE_CACHE", str(home / "cache"))
    with pytest.raises(OSError, match=re.escape(str(home / "cache"))):
        local_file(source)
    assert list(home.rglob("*.jsonl")) == hidden(home) == []
    monkeypatch.setenv("PACKHORSE_CACHE", str(tmp_path / "roomy"))
    with no_file_larger_than(1 << 30):
        assert Path(local_file(source)).read_text() == rows


def test_a_plan_that_cannot_be_kept_is_planned_and_trained_all_the_same(
    full: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packhorse.loader.planner._CACHED_FROM", 1)
    write_chats(tmp_path / "small", 1500)
    expected = plan_all(tmp_path / "small")
    (kept,) = (tmp_path / "small" / "plans").iterdir()
    kept.unlink()
    home = full()
    assert plan_all(home) == expected
    assert "the plan cannot be saved" in caplog.text
    assert list((home / "plans").iterdir()) == []


def test_entries_that_are_taken_back_on_a_full_disk_leave_the_file_as_it_was(
    full: Any, tmp_path: Path
) -> None:
    path = tmp_path / "small" / "ledger.jsonl"
    path.parent.mkdir(exist_ok=True)
    ledger = Ledger(path)
    ledger.record_all(Drop(f"a/{n}", "media", "broken_media", "x" * 100, epoch=0) for n in range(300))
    before = path.read_bytes()
    full()
    with pytest.raises(OSError, match=r"(No space left|File too large).*ledger\.jsonl"):
        ledger.roll_back(0, {"a/3"})
    assert path.read_bytes() == before
    assert hidden(path.parent) == []


# Folders that may not be written.


def as_nobody(do: Callable[[], Any]) -> Any:
    """What ``do`` returns in a child without the rights of an administrator; an error is its text."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            if not os.getuid():
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            told = {"found": do()}
        except BaseException as error:  # noqa: BLE001 (the parent's stack must not run twice)
            told = {"error": f"{type(error).__name__}: {error}"}
        os.write(writing, json.dumps(told).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        told = json.loads(file.read())
    os.waitpid(pid, 0)
    return told.get("error", told.get("found"))


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder that others may enter (pytest's own are private), and whose folders can be closed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        for path in [folder, *folder.rglob("*")]:
            if path.is_dir():
                path.chmod(0o755)


def close(folder: Path, mode: int = 0o555) -> None:
    folder.mkdir(exist_ok=True)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(mode if path.is_dir() else 0o444)


def test_a_cache_that_may_not_be_written_is_done_without(
    open_to_all: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, cache = open_to_all / "data", open_to_all / "cache"
    monkeypatch.setenv("PACKHORSE_CACHE", str(cache))
    write_chats(data, 40)
    write_many(data)
    expected = [count_all(data), plan_all(data), open_index(data)]
    for path in data.rglob("*.ph*"):
        path.unlink()
    close(cache)
    close(data, 0o777)
    assert [as_nobody(lambda work=work: work(data)) for work in (count_all, plan_all, open_index)] == expected
    assert len(sidecars(data)) == len(list(data.glob("*.phidx"))) == 1
    assert list(data.glob(".*")) == []


def test_where_nothing_may_be_written_what_is_there_is_used_and_what_is_not_is_asked_for(
    open_to_all: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, cache = open_to_all / "data", open_to_all / "cache"
    monkeypatch.setenv("PACKHORSE_CACHE", str(cache))
    write_chats(data, 40)
    write_many(data)
    close(cache)
    close(data)
    told = as_nobody(lambda: count_all(data))
    assert told.startswith("ConfigError: neither ")
    assert "PACKHORSE_CACHE" in told
    in_memory = as_nobody(lambda: open_index(data))
    close(data, 0o777)
    made = [work(data) for work in (count_all, plan_all, open_index)]
    close(data)
    close(cache)
    assert made == [as_nobody(lambda work=work: work(data)) for work in (count_all, plan_all, open_index)]
    assert made[2] == in_memory


# Clocks that jump.

FAR = {"past": 0, "future": 4_000_000_000}
"""Seconds since 1970, as clocks that are wrong tell them."""


def states(folder: Path, pattern: str) -> dict[str, int]:
    """Which files there are; a file that is made anew is another one."""
    return {str(path): path.stat().st_ino for path in sorted(folder.glob(pattern))}


@pytest.mark.parametrize("when", FAR)
@pytest.mark.parametrize("what", RACES)
def test_data_of_another_time_is_worked_on_once(what: str, when: str, tmp_path: Path, cache: Path) -> None:
    folder, (work, pattern) = prepared(tmp_path / "data", what), RACES[what]
    for path in folder.iterdir():
        os.utime(path, (FAR[when], FAR[when]))
    first = work(folder)
    made = states(folder, pattern)
    assert len(made) == 1
    assert work(folder) == first
    for path in folder.glob(pattern):
        os.utime(path, (FAR[when], FAR[when]))  # nor does the time of what was made matter
    assert work(folder) == first
    assert states(folder, pattern) == made, "made again"


@pytest.mark.parametrize("when", FAR)
@pytest.mark.parametrize("what", RACES)
def test_what_was_made_of_an_older_state_is_not_taken_whatever_the_clock_says(
    what: str, when: str, tmp_path: Path, cache: Path
) -> None:
    folder, (work, pattern) = prepared(tmp_path / "data", what), RACES[what]
    source = folder / ("many.jsonl" if what == "index" else "chats.jsonl")
    before = work(folder)
    for path in folder.glob(pattern):
        os.utime(path, (FAR["future"], FAR["future"]))  # newer than anything that will ever come
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
    assert work(folder / "other") == after, "not what comes of the new state alone"


def test_a_fresh_count_in_the_cache_is_taken_though_the_clock_was_set_back(
    open_to_all: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = open_to_all / "data"
    monkeypatch.setenv("PACKHORSE_CACHE", str(open_to_all / "cache"))
    meta = write_chats(data, 20)
    count_meta(str(meta), processor("qwen2_vl"))
    (beside,) = sidecars(data)
    os.utime(beside, (FAR["future"], FAR["future"]))
    close(data)
    close(open_to_all / "cache", 0o777)

    def fresh() -> list[str]:
        made = count_meta(str(meta), processor("qwen2_vl"), fresh=True).files[0].sidecar.path
        found = count_meta(str(meta), processor("qwen2_vl")).files[0].sidecar.path
        return [str(made), str(found)]

    made, found = as_nobody(fresh)
    assert made != str(beside)
    assert found == made


def test_parts_of_a_second_count_stay_though_the_clock_is_after_that_of_the_first(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one machine looks at bad rows again, another one starts a run on the same data."""
    meta = write_chats(tmp_path / "data", 20)
    rows = (tmp_path / "data" / "chats.jsonl").read_text().splitlines()
    write_rows(tmp_path / "data" / "chats.jsonl", ["{" if n % 5 == 0 else row for n, row in enumerate(rows)])
    first = count_meta(str(meta), processor("qwen2_vl"), part_rows=5).files[0].sidecar.path
    whole = first.read_bytes()
    os.utime(first, (FAR["future"], FAR["future"]))
    seen: list[tuple[set[Path], set[Path]]] = []

    def parts() -> set[Path]:
        return set((tmp_path / "data").glob("*.parts/*.arrow"))

    def start_elsewhere(done: int, total: int) -> None:
        before = parts()
        with monkeypatch.context() as elsewhere:  # with a cache, and so with locks, of its own
            elsewhere.setenv("PACKHORSE_CACHE", str(tmp_path / "elsewhere"))
            if done < total:
                assert count_meta(str(meta), processor("qwen2_vl")).counted_rows == 0
        seen.append((before, parts()))

    again = count_meta(str(meta), processor("qwen2_vl"), retry_bad=True, progress=start_elsewhere)
    assert again.counted_rows == 20
    assert [len(before) for before, _ in seen] == [0, 1, 2, 3, 0]
    assert all(before == after for before, after in seen), "parts were removed under the hands of the other"
    assert first.read_bytes() == whole
    assert leavings(tmp_path / "data") == []


def test_a_file_that_is_being_written_survives_a_clock_that_jumps_and_what_was_killed_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, now = tmp_path / "made.phplan", time.time()

    def slowly(file: Any) -> None:
        file.write(b"whole")
        file.flush()
        pid = os.fork()
        if not pid:  # another process, after a jump of the clock by a day, wants the same file
            monkeypatch.setattr(time, "time", lambda: now + 86_400)
            code = 1
            try:
                write_atomic(target, lambda other: other.write(b"of the other"))
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert target.read_bytes() == b"of the other"

    write_atomic(target, slowly)
    assert target.read_bytes() == b"whole"

    def killed(file: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for when in FAR.values():
        pid = os.fork()
        if not pid:
            write_atomic(target, killed)
        os.waitpid(pid, 0)
        (left,) = leavings(tmp_path)
        os.utime(tmp_path / left, (when, when))
        write_atomic(target, lambda file: file.write(b"next"))
        assert leavings(tmp_path) == []
    assert target.read_bytes() == b"next"


# Several processes after the same file.


@pytest.mark.parametrize("one_machine", [True, False])
@pytest.mark.parametrize("what", RACES)
def test_processes_that_make_the_same_file_at_once_find_the_same_and_leave_one(
    what: str, one_machine: bool, tmp_path: Path, cache: Path
) -> None:
    folder, (work, pattern) = prepared(tmp_path / "data", what), RACES[what]
    found = race(folder, what, one_machine=one_machine)
    assert len(set(found)) == 1, found
    made = states(folder, pattern)
    assert len(made) == 1
    assert work(folder) == found[0]
    assert states(folder, pattern) == made, "made again"
    assert [name for name in leavings(folder) if name != "cache"] == []


def test_processes_that_want_the_same_copy_fetch_it_once(tmp_path: Path, cache: Path) -> None:
    rows = write_many(tmp_path)
    log = tmp_path / "log"
    bad_line(log, {"slow": 1.0}, delay=0.3)
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


def test_a_cache_folder_that_is_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("PACKHORSE_CACHE", str(tmp_path / "cache"))
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write("{}\n")
    with pytest.raises(ConfigError, match="set PACKHORSE_CACHE"):
        local_file(str(tmp_path / "rows.jsonl.gz"))
