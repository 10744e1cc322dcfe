from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
from engine_work import (
    BadlyPickled,
    DieOnce,
    always_die,
    big,
    environment,
    raise_badly_pickled,
    return_a_lock,
    slow_first,
    square,
)

from failing_work import Unlucky, fail_on_three
from packhorse.count.engines import make_engine
from packhorse.errors import ConfigError
from packhorse.utils.pool import EngineError, LocalEngine
from raising import raises_config


def results(engine: LocalEngine, work: object, tasks: object) -> dict[int, object]:
    pairs = list(engine.run(work, tasks))
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    # The resource tracker of multiprocessing and the server of warm processes stay for the life of a process.
    others = ("resource_tracker", "warm_server")
    children = process.children(recursive=True)
    return [child for child in children if not any(name in " ".join(child.cmdline()) for name in others)]


def children() -> list[psutil.Process]:
    return workers_of(psutil.Process())


@pytest.mark.parametrize("start", ["spawn", "fork"])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("tasks", [0, 1, 2, 11])
def test_every_task_gives_its_result_once(num_workers: int, tasks: int, start: str) -> None:
    assert results(LocalEngine(num_workers, start), square, range(tasks)) == {i: i * i for i in range(tasks)}
    assert not children()


def test_one_worker_runs_in_this_process() -> None:
    here = os.getpid()
    assert results(LocalEngine(1), lambda task: os.getpid(), [0, 1]) == {0: here, 1: here}


def test_a_fast_task_does_not_wait_for_a_slow_one() -> None:
    order = [position for position, _ in LocalEngine(2).run(slow_first, range(4))]
    assert order[-1] == 0


def test_results_and_tasks_may_be_larger_than_a_pipe() -> None:
    tasks = [bytes([i]) * 3_000_000 for i in range(8)]
    assert results(LocalEngine(2), big, tasks) == {i: task * 2 for i, task in enumerate(tasks)}


def test_no_more_than_twice_the_workers_are_under_way(tmp_path: Path) -> None:
    taken = []

    class Watched(list):
        def __getitem__(self, at):
            taken.append(at)
            return super().__getitem__(at)

    run = LocalEngine(2).run(square, Watched(range(20)))
    for done in range(1, 8):
        next(run)
        assert len(taken) <= done + 4
    run.close()


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_a_killed_worker_is_replaced_and_its_task_done_again(tmp_path: Path, start: str) -> None:
    work = DieOnce(tmp_path, on=(1, 4, 5))
    assert results(LocalEngine(2, start), work, range(7)) == {i: i * i for i in range(7)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "4", "5"]


def test_a_worker_killed_from_outside_is_replaced(tmp_path: Path) -> None:
    run = LocalEngine(2).run(square, range(10))
    found = dict([next(run)])
    for child in children():
        child.kill()
    found.update(run)
    assert found == {i: i * i for i in range(10)}


def test_a_task_that_always_kills_its_worker_is_named() -> None:
    with pytest.raises(
        EngineError, match=r"task 2 \(2\) was given up: .* died 4 times, at last with Killed, signal 9"
    ):
        results(LocalEngine(2), always_die, range(4))
    assert not children()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_the_work_raises_comes_through_with_its_type(num_workers: int) -> None:
    with pytest.raises(Unlucky) as caught:
        results(LocalEngine(num_workers), fail_on_three, range(8))
    assert caught.value.number == 3
    if num_workers > 1:
        assert "fail_on_three" in str(caught.value.__cause__)
    assert not children()


def test_an_error_that_cannot_be_pickled_comes_as_text() -> None:
    pickled = pickle.dumps(BadlyPickled("a", "b"))
    with pytest.raises(TypeError):
        pickle.loads(pickled)
    with pytest.raises(EngineError, match="BadlyPickled: a and b"):
        results(LocalEngine(2), raise_badly_pickled, range(2))


def test_work_that_cannot_be_pickled_raises() -> None:
    lock = threading.Lock()
    for work in (lambda task: task, lock.acquire):
        with pytest.raises(EngineError, match=r"the work cannot be sent to another process .*one worker"):
            results(LocalEngine(2), work, range(2))


def test_a_task_or_a_result_that_cannot_be_pickled_raises() -> None:
    with pytest.raises(EngineError, match=r"task 0 .* cannot be sent to another process"):
        results(LocalEngine(2), square, [threading.Lock(), 1])
    with pytest.raises(EngineError, match=r"the result of task \d \(\d\) cannot be sent back"):
        results(LocalEngine(2), return_a_lock, range(2))
    assert not children()


def test_two_engines_run_at_once() -> None:
    first, second = LocalEngine(2).run(square, range(9)), LocalEngine(2).run(square, range(100, 109))
    found: tuple[dict, dict] = ({}, {})
    for one, two in zip(first, second, strict=True):
        found[0].update([one])
        found[1].update([two])
    assert found == ({i: i * i for i in range(9)}, {i: (100 + i) ** 2 for i in range(9)})
    assert not list(first)
    assert not list(second)
    assert not children()


def test_a_run_given_up_early_leaves_no_process() -> None:
    run = LocalEngine(2).run(slow_first, range(50))
    next(run)
    assert len(children()) == 2
    run.close()
    assert not children()


def test_workers_use_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    for found in results(LocalEngine(2), environment, range(2)).values():
        assert found == ("false", "1", 1)


SCRIPT = """
    import sys, time
    sys.path.insert(0, {folder!r})
    from engine_work import square, sleep
    from packhorse.utils.pool import LocalEngine
    def main():
        for pair in LocalEngine(2, {start!r}).run({work}, range(4)):
            print(pair, flush=True)
    {call}
"""


def script(tmp_path: Path, work: str, *, guarded: bool = True, start: str = "spawn") -> list[str]:
    call = 'if __name__ == "__main__":\n        main()' if guarded else "main()"
    path = tmp_path / "script.py"
    path.write_text(
        textwrap.dedent(SCRIPT.format(folder=str(Path(__file__).parent), work=work, call=call, start=start))
    )
    return [sys.executable, str(path)]


def test_a_script_without_a_guard_gets_a_helpful_error(tmp_path: Path) -> None:
    done = subprocess.run(
        script(tmp_path, "square", guarded=False), capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert 'needs `if __name__ == "__main__":`' in done.stderr


@pytest.mark.system
@pytest.mark.parametrize("start", ["spawn", "fork"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_workers_end_with_the_process_that_started_them(
    tmp_path: Path, how: signal.Signals, start: str
) -> None:
    with subprocess.Popen(
        script(tmp_path, "sleep", start=start), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        parent = psutil.Process(run.pid)
        until = time.monotonic() + 30
        processes: list[psutil.Process] = []
        while len(processes) < 2 and time.monotonic() < until:
            processes = workers_of(parent)
            time.sleep(0.05)
        assert len(processes) == 2
        time.sleep(1)  # into the first tasks
        run.send_signal(how)
        assert run.wait(20) != 0
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


def test_make_engine_takes_a_name() -> None:
    engine = make_engine("local", num_workers=3)
    assert isinstance(engine, LocalEngine)
    assert engine.num_workers == 3
    assert make_engine("local").num_workers >= 1
    with pytest.raises(ConfigError, match=r"unknown engine 'spark': expected one of local, ray$"):
        make_engine("spark")
    with pytest.raises(ConfigError, match=r"unknown engine 'lokal'.* \(did you mean 'local'\?\)"):
        make_engine("lokal")
    with pytest.raises(ConfigError, match="ray_address"):
        make_engine("local", ray_address="here:1")
    with raises_config("num_workers", 0):
        LocalEngine(0)
    with raises_config("multiprocessing_context", "thread"):
        LocalEngine(2, "thread")


def test_importing_the_engines_brings_in_nothing_heavy() -> None:
    lines = "import sys, packhorse.count.engines; print({'torch', 'ray', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", lines], text=True).strip() == "set()"
