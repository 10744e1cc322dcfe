"""Processes killed at random moments leave only complete files, and in the end every sample once."""

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
from faults.kill_rounds import ROUNDS, kept_rows
from faults.kill_runner import ProcessRunner, open_runner
from loader_samples import delivered_rows, load, texts
from packhorse.count.counting import count_meta
from packhorse.errors import BadSample
from packhorse.ledger import Ledger

pytestmark = pytest.mark.system

FEW = {"count": 3, "plan": 3, "view": 2, "ledger": 4, "train": 2}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessRunner]:
    with open_runner(tmp_path_factory.mktemp("desk")) as opened:
        yield opened


@pytest.mark.parametrize("kind", ROUNDS)
def test_work_that_is_killed_continues_without_loss_duplicates_or_partial_files(
    kind: str, runner: ProcessRunner
) -> None:
    tally = ROUNDS[kind](runner, FEW[kind], seed=1)
    assert tally.rounds == FEW[kind], tally
    assert tally.kills >= tally.rounds, "no process was killed at work"
    assert tally.clean, tally


def fail_slowly() -> None:
    time.sleep(1.0)
    raise BadSample("the connection was lost", reason="missing_media")


def test_workers_of_a_killed_run_write_nothing_into_the_ledger_of_the_next(tmp_path: Path) -> None:
    """A slow read that fails after the kill must not record a sample that the next run delivers."""
    rows = Faulty(texts(40), {})
    options = {"ledger_dir": tmp_path / "ledger", "max_bad_share": 0.5}
    late = delivered_rows(load(rows.rows))[12]
    rows.faults = {late: Once(tmp_path, fail_slowly)}
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
    resumed = load(rows, **options, num_workers=0)
    resumed.load_state_dict(json.loads((tmp_path / "state.json").read_text()))
    delivered = delivered_rows(resumed)
    assert late in delivered
    time.sleep(1.5)  # the worker of the killed run has read its sample by now
    file = tmp_path / "ledger" / "rank-00000.jsonl"
    assert not file.exists() or list(Ledger.load(file)) == []
    assert resumed.epoch_stats is not None
    assert resumed.epoch_stats.lost == 0


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
def test_a_worker_ends_with_its_run_while_another_child_of_that_run_continues(
    start: str, tmp_path: Path
) -> None:
    """A child that is forked later inherits the pipe that reports the end of the run."""
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


def test_parts_of_a_count_that_was_killed_at_its_end_are_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = write_chats(tmp_path, 20)
    pid = os.fork()
    if not pid:
        monkeypatch.setattr("packhorse.count.counting.remove_files", lambda paths: os._exit(9))
        count_meta(str(meta), processor("qwen2_vl"), part_rows=5)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert stale_files(tmp_path), "there are no stale files"
    assert kept_rows(tmp_path, part=5) == 20, "each row once, although it is in a part and in the file"
    assert count_meta(str(meta), processor("qwen2_vl"), part_rows=5).counted_rows == 0
    assert stale_files(tmp_path) == []
