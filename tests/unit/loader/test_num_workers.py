"""How many processes build batches by default, and what happens where none can be started."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import packhorse
from contract.processors import processor
from count_samples import python_path
from loader_samples import delivered_rows, load, texts
from packhorse import World
from packhorse.errors import PackhorseError
from packhorse.loader import worker_pool
from packhorse.loader.worker_pool import default_num_workers
from warm_python import run_warm


@pytest.mark.parametrize(
    ("rows", "cores", "expected"),
    [(1000, 2, 2), (1000, 8, 8), (10**6, 64, 8), (10**6, 1, 0), (999, 64, 0)],
)
def test_the_default_is_one_worker_per_core_up_to_eight_and_none_for_few_rows(
    rows: int, cores: int, expected: int
) -> None:
    assert default_num_workers(rows, cores) == expected


def test_the_loader_shares_the_cores_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "_MIN_ROWS", 10)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    rows = texts(40)
    assert load(rows, num_workers=None).num_workers == 8
    assert load(rows, 1, 4, num_workers=None).num_workers == 3
    assert load(rows, 1, 5, num_workers=None).num_workers == 0, "8 rows are not worth starting a process"
    assert load(rows, num_workers=5).num_workers == 5
    assert packhorse.load(rows, processor("qwen2_vl"), model="unchecked", world=World()).num_workers == 8


def _load_in_daemon(pipe: Any) -> None:
    loader = load(texts(40), num_workers=None)
    pipe.send((loader.num_workers, sorted(delivered_rows(loader))))


def test_a_daemonic_process_builds_batches_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "_MIN_ROWS", 10)
    context = multiprocessing.get_context("fork")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_load_in_daemon, args=(theirs,), daemon=True)
    process.start()
    assert pipe.poll(120)
    assert pipe.recv() == (0, list(range(40)))
    process.join()


class Unsendable:
    """Rows that cannot be pickled."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]

    def __reduce__(self) -> str:
        raise TypeError("an open file cannot be pickled")


def test_where_workers_cannot_be_started_by_default_this_process_builds_batches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_pool, "_MIN_ROWS", 10)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    rows = Unsendable(texts(20))
    loader = load(rows, num_workers=None, multiprocessing_context="spawn")
    assert loader.num_workers == 2
    assert sorted(delivered_rows(loader)) == list(range(20))
    assert loader.num_workers == 0
    assert "num_workers=0: worker processes cannot be started (the work cannot be sent" in caplog.text
    chosen = load(rows, num_workers=2, multiprocessing_context="spawn")
    with pytest.raises(PackhorseError, match="cannot be sent to another process"):
        next(iter(chosen))


UNGUARDED = """
import os
from loader_samples import load, texts
from packhorse.loader import worker_pool

worker_pool._MIN_ROWS = 10
worker_pool._RETRIES = 0  # each worker imports everything
os.sched_getaffinity = lambda pid: {0, 1}
print("started", flush=True)
batches = list(load(texts(20), num_workers=None, multiprocessing_context="spawn"))
print("trained", flush=True)
"""


def test_a_script_without_a_main_guard_fails_and_is_not_run_by_its_workers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNGUARDED)
    environment = {**os.environ, "PYTHONPATH": python_path(tmp_path)}
    run = run_warm(script, env=environment)
    assert run.returncode != 0
    assert "trained" not in run.stdout
    assert '`if __name__ == "__main__":`' in run.stderr


FREED = """
import os
import torch
from packhorse.loader.worker_pool import keep_freed_memory

kept = keep_freed_memory()
blocks = [torch.ones(5 << 20) for _ in range(10)]  # of 20 MB
used = int(open("/proc/self/statm").read().split()[1])
del blocks
freed = used - int(open("/proc/self/statm").read().split()[1])
print(kept, freed * os.sysconf("SC_PAGESIZE") > 150e6)
"""


@pytest.mark.parametrize(
    ("settings", "expected"), [({}, "True False"), ({"MALLOC_ARENA_MAX": "8"}, "False True")]
)
def test_freed_memory_is_kept_for_the_next_image_unless_the_user_has_settings_for_malloc(
    settings: dict[str, str], expected: str
) -> None:
    others = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    command = [sys.executable, "-c", FREED]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=others | settings)
    assert run.stdout.strip() == expected
