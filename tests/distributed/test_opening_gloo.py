"""Real processes open a loader: what fails on one rank is raised on all, and counting may take its time."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from contract.processors import processor
from count_samples import sidecars, write_chats
from distributed.loader_work import chats
from distributed.test_loader_gloo import codes, read_results, run_all
from packhorse.count.counting import count_meta
from packhorse.count.sidecar import counts_of
from packhorse.datasets import open_meta_dataset
from packhorse.loader.startup import count_examples

pytestmark = pytest.mark.system

WORK = Path(__file__).with_name("opening_work.py")
ROWS, PART_ROWS = 72, 6
TIMEOUT = 3.0
"""Of the process group: counting takes longer, and a dead rank is noticed after it."""

# How one rank fails: what it raises, and a part of its message.
FAILURES = {
    "file": ("ConfigError", "data/meta.json: no such file"),
    "model": ("ConfigError", "without a config"),
    "processor": ("ConfigError", "differs from that of rank 0"),
    "counting": ("NameError", "name 'columns' is not defined"),
    "planning": ("ConfigError", "raise pack_size or set on_overlong"),
}


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each of three ranks raises when one has a problem, by problem."""
    folder = tmp_path_factory.mktemp("failing")
    runs = {
        how: {
            "job": "open_badly",
            "how": how,
            "world": 3,
            "timeout": TIMEOUT if how == "killed" else 60,
            "others_go_on": how == "killed",
            "folder": str(folder / how),
            "meta": str(write_chats(folder / f"data-{how}", 20)),
        }
        for how in [*FAILURES, "interrupted", "killed"]
    }
    written = run_all(folder, list(runs.values()), work=WORK)
    for how, run in runs.items():
        expected = [0, -9, 0] if how == "killed" else [0, 0, 0]
        assert codes(run) == expected, f"{how}\n{written[-12_000:]}"
    reports = {how: read_results(run) for how, run in runs.items() if how != "killed"}
    reports["killed"] = read_results({**runs["killed"], "world": 1})
    return reports


@pytest.mark.parametrize("how", FAILURES)
def test_what_fails_on_one_rank_is_raised_on_all_with_its_class_rank_and_reason(
    how: str, failing: dict[str, list[dict[str, Any]]]
) -> None:
    kind, words = FAILURES[how]
    assert [one["class"] for one in failing[how]] == [kind] * 3
    assert all(words in one["message"] for one in failing[how])
    assert all(one["message"].startswith("rank 1 could not ") for one in failing[how][::2])
    assert all(one["seconds"] < 30 for one in failing[how])  # half of the process group's timeout


def test_a_rank_that_is_interrupted_stops_the_others(failing: dict[str, list[dict[str, Any]]]) -> None:
    kinds = [one["class"] for one in failing["interrupted"]]
    assert kinds == ["SystemFault", "KeyboardInterrupt", "SystemFault"]
    assert all(
        "rank 1 was stopped (KeyboardInterrupt)" in one["message"] for one in failing["interrupted"][::2]
    )


def test_a_killed_rank_is_named_after_the_timeout_of_the_process_group(
    failing: dict[str, list[dict[str, Any]]],
) -> None:
    reports = failing["killed"][0]
    assert reports["class"] == "SystemFault"
    assert "rank 1 has died or hangs during 'count the tokens'" in reports["message"]
    assert f"no heartbeat for {TIMEOUT:g} s, the timeout of the process group" in reports["message"]


def counting_run(home: Path, **settings: Any) -> dict[str, Any]:
    """Three ranks count; their data are in the folder ``node0`` (``node1``, … with ``own_folders``)."""
    for rank in range(3 if settings.get("own_folders") else 1):
        if not (home / f"node{rank}").exists():
            write_chats(home / f"node{rank}", ROWS)
    return {
        "job": "count_slowly",
        "world": 3,
        "timeout": TIMEOUT,
        "slow": [],
        "part_rows": PART_ROWS,
        "folder": str(home / "run"),
        "meta": str(home / "node0" / "meta.json"),
        "settings": {},
        **settings,
    }


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs in which three ranks count, by name; ``alone`` has the counts of a single process."""
    folder = tmp_path_factory.mktemp("counting")
    parts_each = ROWS // PART_ROWS // 3
    killed = {"victim": 1, "dies_at": 3, "slow": [0, 1, 2], "seconds": 0.2, "others_go_on": True}
    runs = {
        "slow": counting_run(folder / "slow", slow=[0, 2], seconds=2 * TIMEOUT / parts_each),
        "own": counting_run(folder / "own", own_folders=True),
        "sharded": counting_run(folder / "sharded", own_folders=True, settings={"shard_data": True}),
        "killed": counting_run(folder / "killed", **killed),
        "resumed": counting_run(folder / "killed", folder=str(folder / "resumed")),
    }
    shutil.copytree(folder / "slow" / "node0", folder / "alone")  # with the same times
    written = run_all(folder, list(runs.values()), work=WORK)
    for name, run in runs.items():
        assert codes(run) == ([0, -9, 0] if name == "killed" else [0, 0, 0]), f"{name}\n{written[-12_000:]}"
    meta = str(folder / "alone" / "meta.json")
    count_meta(meta, processor("qwen2_vl"), part_rows=PART_ROWS)
    counts = counts_of(open_meta_dataset(meta), processor("qwen2_vl"))
    assert counts is not None
    reports = {name: read_results(run) for name, run in runs.items() if name != "killed"}
    reports["killed"] = read_results({**runs["killed"], "world": 1})
    return {**reports, "alone": counts.total.tolist(), "written": written, "folder": folder}


def test_ranks_share_the_counting_and_outlast_the_timeout_of_the_process_group(
    counting: dict[str, Any],
) -> None:
    reports = counting["slow"]
    assert [one["class"] for one in reports] == [None] * 3
    assert all(one["seconds"] > TIMEOUT for one in reports)
    assert [len(one["counted"]) for one in reports] == [ROWS // PART_ROWS // 3] * 3
    assert sorted(first for one in reports for first, _ in one["counted"]) == list(range(0, ROWS, PART_ROWS))
    assert all(one["total"] == counting["alone"] for one in reports)
    assert "rank 1 waits for rank 0 (count the tokens)" in counting["written"]


@pytest.mark.parametrize("name", ["own", "sharded"])
def test_ranks_without_a_shared_folder_get_the_counts_of_rank_0(name: str, counting: dict[str, Any]) -> None:
    reports, alone, folder = counting[name], counting["alone"], counting["folder"] / name
    assert [len(one["counted"]) for one in reports] == [
        ROWS // PART_ROWS // 3
    ] * 3  # nothing was counted twice
    assert [len(sidecars(folder / f"node{rank}")) for rank in range(3)] == [1, 0, 0]
    for rank, one in enumerate(reports):
        assert one["total"] == (alone[rank::3] if name == "sharded" else alone)


def test_ranks_without_a_shared_folder_do_not_announce_another_count(counting: dict[str, Any]) -> None:
    runs = ("slow", "own", "sharded", "killed", "resumed")  # rank 0 of each announces its count once
    assert counting["written"].count("no count files are used") == len(runs)


def test_a_rank_that_is_killed_while_counting_loses_no_finished_part(counting: dict[str, Any]) -> None:
    assert counting["killed"][0]["class"] == "SystemFault"
    assert "rank 1 has died or hangs" in counting["killed"][0]["message"]
    # Of its four parts, the killed rank had sent two; the other ranks had finished theirs.
    assert sum(len(one["counted"]) for one in counting["resumed"]) == 2
    assert all(one["total"] == counting["alone"] for one in counting["resumed"])


def test_parts_counted_by_ranks_make_the_same_count_file(counting: dict[str, Any]) -> None:
    (shared,) = sidecars(counting["folder"] / "slow" / "node0")
    (alone,) = sidecars(counting["folder"] / "alone")
    assert shared.read_bytes() == alone.read_bytes()


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of a mesh of two data-parallel and two tensor-parallel ranks gets."""
    folder = tmp_path_factory.mktemp("mesh")
    meta = str(write_chats(folder / "data", ROWS))
    run = {"job": "on_a_mesh", "world": 4, "folder": str(folder / "run"), "meta": meta}
    written = run_all(folder, [run], work=WORK)
    assert codes(run) == [0] * 4, written[-12_000:]
    return read_results(run)


def test_a_world_is_the_place_in_the_data_parallel_dimensions_of_a_mesh(mesh: list[dict[str, Any]]) -> None:
    assert [one["world"] for one in mesh] == [[0, 2], [0, 2], [1, 2], [1, 2]]
    assert [one["part"] for one in mesh] == [[0, 2], [1, 2], [0, 2], [1, 2]]
    assert [one["both"] for one in mesh] == [[0, 4], [1, 4], [2, 4], [3, 4]]
    assert [one["turned"] for one in mesh] == [[0, 4], [2, 4], [1, 4], [3, 4]]


def test_tensor_parallel_ranks_get_the_same_rows_and_data_parallel_ranks_others(
    mesh: list[dict[str, Any]],
) -> None:
    rows = [one["rows"] for one in mesh]
    assert rows[0] == rows[1]
    assert rows[2] == rows[3]
    assert sorted(rows[0] + rows[2]) == sorted(f"chats/{number}" for number in range(ROWS))


@pytest.mark.parametrize("shard_data", [False, True])
def test_tensor_parallel_ranks_get_the_same_batches_and_together_all_rows(
    shard_data: bool, mesh: list[dict[str, Any]]
) -> None:
    reports = [one[f"shard_data={shard_data}"] for one in mesh]
    assert reports[0]["steps"] == reports[1]["steps"]
    assert reports[2]["steps"] == reports[3]["steps"]
    assert len(reports[0]["steps"]) == len(reports[2]["steps"])
    seen = [key for one in reports[::2] for step in one["steps"] for key in step]
    assert sorted(seen) == sorted(f"chats/{number}" for number in range(ROWS))
    assert {one["delivered"] for one in reports} == {ROWS}


def run_job(folder: Path, job: str, world: int, **settings: Any) -> list[Any]:
    """What each rank of a job of ``opening_work.py`` finds."""
    run = {"job": job, "world": world, "folder": str(folder / "run"), **settings}
    written = run_all(folder, [run], work=WORK)
    assert codes(run) == [0] * world, written[-12_000:]
    return read_results(run)


@pytest.fixture(scope="module")
def in_another_order(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What four processes find whose world orders them in another way than their process group."""
    return run_job(tmp_path_factory.mktemp("order"), "in_another_order", 4)


def test_counts_are_those_of_their_rows_if_world_and_process_group_order_the_ranks_differently(
    in_another_order: list[Any],
) -> None:
    rows = [row for words in range(1, 41) for row in chats(1, words)]
    counts = count_examples(rows, processor("qwen2_vl")).total.tolist()
    for rank in in_another_order:
        assert rank["counts"] == counts
        assert rank["gathered"] == [0, 1, 2, 3]
        assert rank["broadcast"] == 0
        assert rank["delivered"] == 40
    assert sorted(index for rank in in_another_order for index in rank["samples"]) == list(range(40))


def test_processes_with_the_same_rank_are_rejected(in_another_order: list[Any]) -> None:
    for rank in in_another_order:
        assert rank["duplicates"] == ["group", [0, 0, 1, 1]]


def test_an_error_has_its_fields_on_every_rank(in_another_order: list[Any]) -> None:
    assert [rank["bad"] for rank in in_another_order] == [
        ["too_long", "coco/3", "encode", "9,000 tokens"]
    ] * 4
    failed = "rank 1 could not read a row: BadSample: coco/3: 9,000 tokens"
    assert [rank["message"] for rank in in_another_order[1:]] == [failed] * 3  # world.rank 1 is the first
    assert [rank["wrong"] for rank in in_another_order] == [["dataset_names", ["coco", "maps"]]] * 4


def test_a_process_group_does_not_read_what_an_earlier_one_left_in_the_store(tmp_path: Path) -> None:
    ranks = run_job(tmp_path, "two_groups_in_turn", 3)
    assert ranks == [[[False, False, False, 1]] * 2] * 3


def test_shards_of_different_length_are_counted_where_only_the_longer_ones_start_processes(
    tmp_path: Path,
) -> None:
    meta = str(write_chats(tmp_path / "data", 13))
    ranks = run_job(
        tmp_path,
        "count_slowly",
        2,
        meta=meta,
        slow=[],
        part_rows=4,
        timeout=10,
        in_this_process=6,  # the shards have 7 and 6 rows
        settings={"shard_data": True, "count_workers": 1},
    )
    assert [rank["class"] for rank in ranks] == [None] * 2
    assert [len(rank["total"]) for rank in ranks] == [7, 6]


def test_a_file_that_one_rank_cannot_read_at_the_end_of_an_epoch_is_raised_on_all(tmp_path: Path) -> None:
    ranks = run_job(tmp_path, "unreadable_at_the_end", 2)
    assert [rank["class"] for rank in ranks] == ["IsADirectoryError"] * 2
    assert ranks[1]["message"].startswith("rank 0 could not reconcile the epoch: ")
    assert all(rank["seconds"] < 30 for rank in ranks)  # half of the process group's timeout
    assert [(rank["remaining"], rank["steps"], rank["delivered"]) for rank in ranks] == [(1, 1, 24)] * 2
