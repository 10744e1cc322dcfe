"""The process pool as the loader uses it: ordered results, tensors in shared memory, workers that live on."""

from __future__ import annotations

import gc
import itertools
import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from multiprocessing import active_children as children
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import torch
from engine_work import (
    Share,
    always_die,
    big,
    many_tensors,
    process_id,
    sleep,
    slow_first,
    tensor,
)

from count_samples import python_path
from failing_work import Unlucky, fail_on_three
from packhorse.utils.pool import EngineError, ProcessPool, ResultTimeout, WorkerDied
from warm_python import run_warm


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_ordered_results_come_in_order_though_the_first_task_is_the_slowest(start: str) -> None:
    pool = ProcessPool(slow_first, 2, start)
    assert list(pool.run(int, range(6), ordered=True)) == [(n, n) for n in range(6)]
    pool.close()


@pytest.mark.parametrize("prefetch_factor", [1, 3])
def test_no_more_than_the_prefetched_tasks_are_sent_ahead(prefetch_factor: int) -> None:
    sent: list[int] = []

    def task(position: int) -> int:
        sent.append(position)
        return position

    pool = ProcessPool(slow_first, 2, "fork")
    for position, _ in pool.run(task, range(1, 20), ordered=True, prefetch_factor=prefetch_factor):
        assert len(sent) <= position + 2 * prefetch_factor
    pool.close()


def test_workers_live_on_and_an_abandoned_run_leaves_no_result_to_the_next_one() -> None:
    pool = ProcessPool(process_id, 2, "fork")
    first = pool.run(int, range(100), ordered=True)
    _, (_, one) = next(first)
    seen = [result for _, result in pool.run(int, range(1000, 1010), ordered=True)]
    assert [number for number, _ in seen] == list(range(1000, 1010))
    workers = {child.pid for child in children()}
    assert {one, *(pid for _, pid in seen)} <= workers
    assert len(workers) == 2
    pool.close()
    assert not children()


def test_a_run_goes_on_after_the_pool_was_closed() -> None:
    pool = ProcessPool(process_id, 2, "fork")
    results = pool.run(int, range(12), ordered=True)
    seen = [next(results) for _ in range(3)]
    pool.close()
    assert not children()
    seen += results
    assert [number for _, (number, _) in seen] == list(range(12))
    pool.close()


def test_an_error_is_raised_in_its_turn_and_the_workers_can_be_used_again() -> None:
    pool = ProcessPool(fail_on_three, 2, "fork")
    results = pool.run(int, range(6), ordered=True)
    assert [next(results) for _ in range(3)] == [(0, 0), (1, 1), (2, 2)]
    with pytest.raises(Unlucky):
        next(results)
    assert [n for n, _ in pool.run(int, range(4, 9), ordered=True)] == list(range(4, 9))
    pool.close()


def test_a_task_that_kills_its_worker_each_time_is_named_after_the_results_before_it() -> None:
    pool = ProcessPool(always_die, 3, "fork", retries=1)
    results = pool.run(int, range(6), ordered=True)
    assert [next(results) for _ in range(2)] == [(0, 0), (1, 1)]
    with pytest.raises(WorkerDied) as caught:
        next(results)
    assert (caught.value.position, caught.value.deaths) == (2, 2)
    assert "Killed" in caught.value.exit_reason
    assert caught.value.note == 5
    pool.close()


def test_a_result_that_does_not_come_in_time_is_named() -> None:
    pool = ProcessPool(sleep, 2, "fork")
    with pytest.raises(ResultTimeout) as caught:
        next(pool.run(int, range(7, 9), ordered=True, timeout=0.3))
    assert caught.value.position == 7
    pool.close()
    assert not children()


def test_tensors_come_in_shared_memory_and_no_file_descriptor_stays_open() -> None:
    pool = ProcessPool(tensor, 2, "fork")
    used, used_by_workers = [], []
    for _ in range(3):
        for position, result in pool.run(int, range(20), ordered=True):
            assert result.is_shared()
            assert result[0, 0] == position
            if position == 15:
                break  # what was built ahead is given back too
        del result
        time.sleep(0.2)
        used.append(psutil.Process().num_fds())
        used_by_workers.append(max(psutil.Process(child.pid).num_fds() for child in children()))
    # A run sends about 20 tensors; those of the interrupted run stay open until the next one.
    assert used[2] < used[0] + 5
    assert used_by_workers[2] < used_by_workers[0] + 5
    pool.close()


def _limit_that_leaves(free: int) -> int:
    """Return the limit that leaves ``free`` descriptors.

    It bounds their numbers: a descriptor with a higher number stays open and does not count.
    """
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    unused = (number for number in itertools.count() if number not in used)
    return next(itertools.islice(unused, free, None))


@pytest.mark.parametrize(
    ("descriptors", "problem"),
    [
        (4, "a worker process cannot be started"),
        (60, "the result of task 0 (0) cannot be sent back"),
        (200, "a result cannot be received"),
    ],
)
def test_too_few_file_descriptors_are_named_with_the_remedy(descriptors: int, problem: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    pool = ProcessPool(many_tensors, 2, "fork")
    gc.collect()  # a descriptor of an earlier test that is closed from here on would be one more
    resource.setrlimit(resource.RLIMIT_NOFILE, (_limit_that_leaves(descriptors), limits[1]))
    try:
        with pytest.raises(EngineError, match=rf"{re.escape(problem)} .*\(ulimit -n\)"):
            list(pool.run(int, range(20), ordered=True))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        pool.close()


@pytest.fixture(params=["file_descriptor", "file_system"])
def _sharing(request: pytest.FixtureRequest) -> Iterator[None]:
    """How torch shares tensors between processes."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(request.param)
    yield
    torch.multiprocessing.set_sharing_strategy(before)


@pytest.mark.usefixtures("_sharing")
def test_tensors_that_were_lost_with_their_worker_are_made_again() -> None:
    killed: list[BaseProcess] = []

    def kill_all_once(result: torch.Tensor) -> torch.Tensor:
        if not killed:
            time.sleep(0.3)  # the workers have sent all they may
            killed.extend(children())
            for child in killed:
                child.kill()
            end = time.monotonic() + 20  # torch removes the files of a dead process after some seconds
            while all(any(Path("/dev/shm").glob(f"torch_{child.pid}_*")) for child in killed):
                assert time.monotonic() < end
                time.sleep(0.1)
        return result

    pool = ProcessPool(tensor, 3, "fork")
    seen = list(pool.run(int, range(12), ordered=True, receive=kill_all_once))
    assert len(killed) == 3
    assert [position for position, _ in seen] == list(range(12))
    assert all(torch.equal(result, torch.full((200, 1000), position)) for position, result in seen)
    pool.close()


def test_workers_killed_in_the_middle_of_sending_are_replaced() -> None:
    pool = ProcessPool(big, 2, "fork")
    results = pool.run(lambda n: bytes([n]) * 3_000_000, range(6), ordered=True)
    seen = [next(results)]
    time.sleep(0.5)  # each has filled its pipe by now, and waits
    for child in children():
        child.kill()
    seen += results
    assert seen == [(n, bytes([n]) * 6_000_000) for n in range(6)]
    pool.close()


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_a_shared_tensor_of_the_work_is_shared_with_every_worker(start: str) -> None:
    shared = torch.zeros(8, dtype=torch.int64)
    shared.share_memory_()
    pool = ProcessPool(Share(shared), 2, start)
    assert dict(pool.run(int, range(8))) == {n: n for n in range(8)}
    assert shared.tolist() == list(range(8))
    pool.close()


def test_workers_end_with_the_last_reference_to_their_pool() -> None:
    gc.collect()
    gc.disable()
    try:
        pool = ProcessPool(sleep, 2, "fork")
        with pytest.raises(ResultTimeout):
            next(pool.run(int, range(4), timeout=0.2))
        assert len(children()) == 2
        del pool
    finally:
        gc.enable()
    gc.collect()  # the error that was caught holds on to the run
    assert not children()


def test_a_fork_that_has_a_copy_of_the_pool_does_not_end_its_workers() -> None:
    pool = ProcessPool(process_id, 2, "fork")
    assert len(list(pool.run(int, range(4)))) == 4
    pid = os.fork()
    if not pid:
        pool.close()
        del pool
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(children()) == 2
    pool.close()


def test_a_stopped_worker_is_ended_too() -> None:
    pool = ProcessPool(process_id, 2, "fork")
    list(pool.run(int, range(4)))
    os.kill(children()[0].pid or 0, signal.SIGSTOP)
    pool.close()
    assert not children()


BUILD_THEN_SET = """
import multiprocessing
from loader_samples import load, texts
from packhorse.utils.pool import ProcessPool

if __name__ == "__main__":
    pool, loader = ProcessPool(abs, 2), load(texts(20), num_workers=2)
    multiprocessing.set_start_method("spawn")
    assert dict(pool.run(int, range(3))) == {0: 0, 1: 1, 2: 2}
    pool.close()
    print(multiprocessing.get_start_method())
"""


def test_a_program_may_set_the_start_method_after_a_pool_or_a_loader_was_built(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BUILD_THEN_SET)
    environment = {**os.environ, "PYTHONPATH": python_path(tmp_path)}
    run = run_warm(script, env=environment)
    assert (run.returncode, run.stdout) == (0, "spawn\n"), run.stderr
