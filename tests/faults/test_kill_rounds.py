"""Processes that are killed at any moment: whole files only, and in the end all samples, each once."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.processors import processor
from count_samples import stale_files, write_chats
from faults.faulty_data import Faulty, Once
from faults.kill_desk import Desk, open_desk
from faults.kill_rounds import ROUNDS, kept_rows
from loader_samples import delivered_rows, load, texts
from packhorse.count.counting import count_meta
from packhorse.errors import BadSample
from packhorse.ledger import Ledger

FEW = {"count": 3, "plan": 3, "view": 2, "ledger": 4, "train": 2}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    with open_desk(tmp_path_factory.mktemp("desk")) as made:
        yield made


@pytest.mark.parametrize("kind", ROUNDS)
def test_killed_at_any_moment_it_goes_on_and_nothing_is_lost_doubled_or_half(kind: str, desk: Desk) -> None:
    tally = ROUNDS[kind](desk, FEW[kind], seed=1)
    assert tally.rounds == FEW[kind], tally
    assert tally.kills >= tally.rounds, "no process was hit while it was at work"
    assert tally.clean, tally


def slow_and_torn() -> None:
    time.sleep(1.0)
    raise BadSample("the line was dead", reason="missing_media")


def test_workers_of_a_killed_run_write_nothing_into_the_ledger_of_the_next(tmp_path: Path) -> None:
    """A slow read that fails after the kill would name a sample as lost that the next run delivers."""
    rows = Faulty(texts(40), {})
    options = {"ledger_dir": tmp_path / "ledger", "max_bad_share": 0.5}
    late = delivered_rows(load(rows.rows))[12]
    rows.faults = {late: Once(tmp_path, slow_and_torn)}
    pid = os.fork()
    if not pid:
        killed = load(rows, **options, num_workers=1, prefetch_factor=8)
        rows.armed = True
        iterator = iter(killed)
        next(iterator)
        (tmp_path / "state.json").write_text(json.dumps(killed.state_dict()))
        while not (tmp_path / "happened0").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    again = load(rows, **options, num_workers=0)
    again.load_state_dict(json.loads((tmp_path / "state.json").read_text()))
    delivered = delivered_rows(again)
    assert late in delivered
    time.sleep(1.5)  # the worker of the killed run has read its sample by now
    file = tmp_path / "ledger" / "rank-00000.jsonl"
    assert not file.exists() or list(Ledger.load(file)) == []
    assert again.account is not None
    assert again.account.lost == 0


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


RUN = """
import os, signal, sys, time
from packhorse.utils.pool import ProcessPool

def work(hang):
    if hang:
        time.sleep(60)
    return os.getpid()

if __name__ == "__main__":
    results = ProcessPool(work, 1, sys.argv[1]).run([False, True].__getitem__, range(2))
    _, worker = next(results)
    other = os.fork()
    if not other:
        time.sleep(60)
        os._exit(0)
    print(worker, other, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_a_worker_ends_with_its_run_though_another_process_of_that_run_lives_on(
    start: str, tmp_path: Path
) -> None:
    """What was forked later has all that the run had open, and with it the pipe that tells of its death."""
    script = tmp_path / "run.py"
    script.write_text(RUN)
    command = [sys.executable, str(script), start]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
        assert run.stdout is not None
        worker, other = map(int, run.stdout.readline().split())
        assert run.wait(60) == -signal.SIGKILL
        try:
            end = time.monotonic() + 10
            while is_running(worker) and time.monotonic() < end:
                time.sleep(0.02)
            assert is_running(other)
            assert not is_running(worker)
        finally:
            for left in (worker, other):
                if is_running(left):
                    os.kill(left, signal.SIGKILL)


def test_a_count_killed_when_its_file_was_done_leaves_no_parts_after_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = write_chats(tmp_path, 20)
    pid = os.fork()
    if not pid:
        monkeypatch.setattr("packhorse.count.counting.remove_files", lambda paths: os._exit(9))
        count_meta(str(meta), processor("qwen2_vl"), part_rows=5)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert stale_files(tmp_path), "nothing was left to remove"
    assert kept_rows(tmp_path, part=5) == 20, "each row once, though it is in a part and in the file"
    assert count_meta(str(meta), processor("qwen2_vl"), part_rows=5).counted_rows == 0
    assert stale_files(tmp_path) == []
