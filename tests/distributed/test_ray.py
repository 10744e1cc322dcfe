"""A real Ray cluster of two nodes on this machine; one is killed while it works."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ray
from ray_work import DieAgain, Marked, Slowly, environment, sleep

from count_samples import python_path, save_processor, sidecars
from demo_data import write_demo_data
from failing_work import Unlucky, fail_on_three
from packhorse.count.counting import count_meta
from packhorse.count.engines import RayEngine, make_engine
from packhorse.utils.pool import EngineError, LocalEngine

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning"),
]
NODE = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}


@contextmanager
def two_nodes() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    # As on a user's machine: the tests' own setting would hide whether workers keep to one thread.
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="2"):
        cluster = Cluster(initialize_head=True, head_node_args=NODE)
        cluster.second = cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
        cluster.wait_for_nodes()
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_nodes() as cluster:
        yield cluster


def results(engine: Any, work: Any, tasks: Any) -> dict[int, Any]:
    pairs = list(engine.run(work, tasks))
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def nodes_that_worked(folder: Path) -> set[str]:
    return {path.name.partition("-")[0] for path in folder.iterdir()}


def test_both_nodes_work_and_the_results_are_those_of_the_local_engine(cluster: Any, tmp_path: Path) -> None:
    work = Marked(tmp_path, seconds=0.1)
    found = results(RayEngine(cluster.address), work, range(20))
    assert found == {i: (i * i, b"%d" % i * 200_000) for i in range(20)}
    assert len(nodes_that_worked(tmp_path)) == 2
    # The work stays in a process: the second task there finds what the first one left.
    assert max(int(path.read_text()) for path in tmp_path.iterdir()) > 1
    assert not ray.is_initialized()


@contextmanager
def second_node_dies_at_work(cluster: Any, marks: Path) -> Iterator[None]:
    """Kill the second node as soon as it begins its second task, which it will never finish."""
    marks.with_name(f"{marks.name}.doomed").write_text(cluster.second.node_id)
    over = threading.Event()
    killed = []

    def watch() -> None:
        while not killed and not over.wait(0.01):
            if marks_of(marks, cluster.second.node_id) >= 2:
                cluster.remove_node(cluster.second, allow_graceful=False)
                killed.append(True)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    assert killed, "the second node did not work"


def marks_of(folder: Path, node: str = "") -> int:
    return sum(path.name.startswith(node) for path in folder.iterdir())


def test_a_node_killed_at_work_costs_time_and_no_result(tmp_path: Path) -> None:
    work = Marked(tmp_path, seconds=0.5)
    with two_nodes() as cluster, second_node_dies_at_work(cluster, tmp_path):
        found = results(RayEngine(cluster.address), work, range(16))
    assert found == {i: (i * i, b"%d" % i * 200_000) for i in range(16)}
    assert marks_of(tmp_path) > 16  # what was lost was done again


class Slow:
    """An engine on a cluster on which each task takes a while."""

    def __init__(self, address: str, marks: Path) -> None:
        self.address, self.marks, self.tasks = address, marks, 0

    def run(self, work: Any, tasks: Any) -> Iterator[tuple[int, Any]]:
        self.tasks += len(tasks)
        return RayEngine(self.address).run(Slowly(work, self.marks, 0.5), tasks)


def test_a_count_that_loses_a_node_writes_the_bytes_of_a_local_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path / "path"))
    marks, data = tmp_path / "marks", tmp_path / "data"
    marks.mkdir()
    processor = save_processor(tmp_path / "processor")
    meta = write_demo_data(data)  # images and videos
    count_meta(meta, processor, part_rows=2, engine=LocalEngine(2))
    expected = {path.name: path.read_bytes() for path in sidecars(data)}
    assert len(expected) == 3
    for path in sidecars(data):
        path.unlink()
    with two_nodes() as cluster, second_node_dies_at_work(cluster, marks):
        engine = Slow(cluster.address, marks)
        report = count_meta(meta, processor, part_rows=2, engine=engine)
    assert {path.name: path.read_bytes() for path in sidecars(data)} == expected
    assert report.counted_rows == 40
    assert marks_of(marks) > engine.tasks > 10  # what was lost was counted again


def test_a_killed_process_is_replaced_up_to_three_times(cluster: Any, tmp_path: Path) -> None:
    three, always = tmp_path / "three", tmp_path / "always"
    three.mkdir()
    always.mkdir()
    assert results(RayEngine(cluster.address), DieAgain(three, 3), range(3)) == {0: 0, 1: 1, 2: 4}
    with pytest.raises(EngineError, match=r"task 1 \(1\) was given up after 3 retries"):
        results(RayEngine(cluster.address), DieAgain(always, 99), range(3))
    assert len(list(always.iterdir())) == 4


def test_what_the_work_raises_comes_through_with_its_type(cluster: Any) -> None:
    with pytest.raises(Unlucky) as caught:
        results(RayEngine(cluster.address), fail_on_three, range(8))
    assert caught.value.number == 3
    assert "fail_on_three" in str(caught.value.__cause__)


def test_work_that_cannot_be_pickled_raises(cluster: Any) -> None:
    engine, lock = RayEngine(cluster.address), threading.Lock()
    with pytest.raises(EngineError, match="the work cannot be sent to another process"):
        results(engine, lock.acquire, range(2))
    with pytest.raises(EngineError, match=r"task 0 .* cannot be sent to another process"):
        results(engine, fail_on_three, [lock])
    with pytest.raises(EngineError, match=r"the result of task \d \(\d\) cannot be sent back"):
        results(engine, lambda number: threading.Lock(), range(2))


def test_a_ray_that_was_joined_before_stays_and_two_runs_share_it(cluster: Any) -> None:
    ray.init(cluster.address, log_to_driver=False)
    try:
        first, second = (RayEngine().run(fail_on_three, range(3)) for _ in range(2))
        assert dict(first) == dict(second) == {0: 0, 1: 1, 2: 2}
        assert ray.is_initialized()
    finally:
        ray.shutdown()


def test_overlapping_runs_leave_ray_after_the_last(cluster: Any) -> None:
    first, second = (RayEngine(cluster.address).run(fail_on_three, range(3)) for _ in range(2))
    found = dict([next(first)]), dict([next(second)])
    found[0].update(first)
    assert ray.is_initialized()
    found[1].update(second)
    assert found == ({0: 0, 1: 1, 2: 2}, {0: 0, 1: 1, 2: 2})
    assert not ray.is_initialized()


def test_a_run_given_up_early_frees_the_cluster(cluster: Any) -> None:
    run = RayEngine(cluster.address).run(first_at_once, range(6))
    next(run)
    run.close()
    started = time.monotonic()
    assert results(RayEngine(cluster.address), environment, range(2)) == {0: ("false", 1), 1: ("false", 1)}
    assert time.monotonic() - started < 200  # far less than the tasks that were given up would take


def first_at_once(number: int) -> None:
    if number:
        sleep(number)


def test_no_more_tasks_are_under_way_than_workers(cluster: Any) -> None:
    taken = []

    class Watched(list):
        def __getitem__(self, at: Any) -> Any:
            taken.append(at)
            return super().__getitem__(at)

    for done, _ in enumerate(RayEngine(cluster.address, num_workers=1).run(abs, Watched(range(5)))):
        assert len(taken) == done + 1


def test_a_missing_cluster_raises() -> None:
    with pytest.raises(EngineError, match=r"cannot join the Ray cluster at '127.0.0.1:1'"):
        results(RayEngine("127.0.0.1:1"), abs, range(2))


def test_a_cluster_without_a_free_cpu_is_reported_while_tasks_wait(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    release = tmp_path / "release"

    def hold(taken: str) -> None:  # inside, so that Ray sends its code: its processes do not find this module
        Path(taken).touch()
        end = time.monotonic() + 60
        while not release.exists() and time.monotonic() < end:
            time.sleep(0.05)

    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    try:
        cpus = int(ray.cluster_resources()["CPU"])
        holders = [ray.remote(hold).remote(str(tmp_path / f"taken{n}")) for n in range(cpus)]
        while len(list(tmp_path.glob("taken*"))) < cpus:
            assert not ray.wait(holders, timeout=0.05)[0], "no task holds the CPUs"

        def let_go() -> None:
            while not caplog.records and not release.exists():
                time.sleep(0.05)
            release.touch()

        threading.Thread(target=let_go, daemon=True).start()
        (tmp_path / "marks").mkdir()
        found = results(RayEngine(cluster.address), Marked(tmp_path / "marks"), range(3))
        ray.get(holders)
    finally:
        release.touch()
        ray.shutdown()
    assert [found[position][0] for position in range(3)] == [0, 1, 4]
    message = caplog.records[0].getMessage()
    assert f"3 tasks are sent, and none of its {cpus} CPUs is free" in message


# Last: a process that has started a Ray of its own keeps its token, and turns away a node of another cluster
# that asks it for an object.
def test_ray_starts_on_this_machine_where_no_cluster_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    engine = make_engine("ray", num_workers=2)
    assert isinstance(engine, RayEngine)
    assert results(engine, abs, range(-4, 0)) == results(LocalEngine(1), abs, range(-4, 0))
    assert not ray.is_initialized()
    assert results(engine, abs, []) == {}
