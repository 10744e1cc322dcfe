"""Real processes that share an epoch: every row once, equal steps, one ledger; after a crash, the rest."""

import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from contract.samples import make_image
from count_samples import python_path, sidecars, write_meta, write_rows
from distributed.pipeline_ranks import run_together

pytestmark = pytest.mark.system

WORK = Path(__file__).with_name("loader_work.py")
ROWS, MISSING, LOST, LONG = 90, 7, 30, 11
"""Rows; one without its image from the start, one whose image is damaged, one that is too long."""


def write_data(folder: Path, name: str = "mixed") -> Path:
    """A meta file with two datasets: half of the rows have an image of their own on the disk."""
    images = folder / "images"
    images.mkdir(parents=True)
    rows = []
    for number in range(ROWS):
        question, answer = "why " * (number % 13 + 1), f"so {number} " * (number % 5 + 1)
        row: dict[str, Any] = {}
        if number % 2 == 0 or number == MISSING:
            row["images"] = [f"{number}.png"]
            question = "<image>" + question
            if number != MISSING:
                make_image(60 + number % 40, 60).save(images / f"{number}.png")
        if number == LONG:
            answer = "so " * 500
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"messages": turns, **row})
    # Its header is whole, so that it can be counted; its pixels are not.
    damaged = images / f"{LOST}.png"
    damaged.write_bytes(damaged.read_bytes()[:60])
    half = ROWS // 2
    write_rows(folder / "first.jsonl", rows[:half])
    write_rows(folder / "second.jsonl", rows[half:])
    names = {name: {"file_name": f"{name}.jsonl", "media_dir": str(images)} for name in ("first", "second")}
    return write_meta(folder, names)


def key(number: int) -> str:
    half = ROWS // 2
    return f"first/{number}" if number < half else f"second/{number - half}"


EVERY_KEY = {key(number) for number in range(ROWS)}
BAD = {key(MISSING): "missing_media", key(LOST): "broken_media", key(LONG): "too_long"}
GOOD = EVERY_KEY - set(BAD)
SETTINGS = {"pack_size": 256, "max_bad_share": 0.1, "num_workers": 1, "prefetch_factor": 1}


def run_all(folder: Path, runs: list[dict[str, Any]], timeout: float = 120, work: Path = WORK) -> str:
    """Run one after the other; what they wrote."""
    (folder / "runs.json").write_text(json.dumps(runs))
    command = [sys.executable, str(work), str(folder / "runs.json")]
    return run_together([command], folder, python_path(folder), timeout)


def read_results(run: dict[str, Any]) -> list[Any]:
    return [json.loads(Path(run["folder"], f"rank{rank}.json").read_text()) for rank in range(run["world"])]


def codes(run: dict[str, Any]) -> list[int]:
    return json.loads(Path(run["folder"], "codes.json").read_text())


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each of 2 or 4 processes found."""
    folder = tmp_path_factory.mktemp(f"world{request.param}")
    settings = {**SETTINGS, "ledger_dir": str(folder / "ledger")}
    run = {
        "job": "everything",
        "world": request.param,
        "folder": str(folder / "run"),
        "meta": str(write_data(folder / "data")),
        "settings": settings,
        "epochs": 2,
    }
    written = run_all(folder, [run])
    assert codes(run) == [0] * request.param, written[-12_000:]
    return {"found": read_results(run), "written": written, "folder": folder, "world": request.param}


def delivered_keys(ranks: dict[str, Any], what: str, epoch: int) -> list[list[str]]:
    """The rows of each rank in an epoch."""
    return [list(chain(*one[what]["epochs"][epoch])) for one in ranks["found"]]


@pytest.mark.parametrize("what", ["scheduled", "sharded"])
@pytest.mark.parametrize("epoch", [0, 1])
def test_every_row_reaches_one_rank_once_or_is_in_the_ledger(
    ranks: dict[str, Any], what: str, epoch: int
) -> None:
    seen = list(chain(*delivered_keys(ranks, what, epoch)))
    assert len(seen) == len(set(seen))
    assert set(seen) == GOOD
    planned = {name for one in ranks["found"] for name in one[what]["planned"]}
    assert planned == GOOD | {key(LOST)}


@pytest.mark.parametrize("what", ["scheduled", "sharded"])
def test_all_ranks_make_the_same_number_of_steps(ranks: dict[str, Any], what: str) -> None:
    for epoch in (0, 1):
        assert len({len(one[what]["epochs"][epoch]) for one in ranks["found"]}) == 1
    assert {len(one[what]["epochs"][0]) for one in ranks["found"]} == {ranks["found"][0][what]["length"]}
    assert all(len(rows) > 0 for rows in delivered_keys(ranks, what, 0))


def test_ranks_that_share_the_rows_have_one_plan(ranks: dict[str, Any]) -> None:
    assert len({one["scheduled"]["plan"] for one in ranks["found"]}) == 1
    assert delivered_keys(ranks, "scheduled", 0) != delivered_keys(ranks, "scheduled", 1)


def test_ranks_with_rows_of_their_own_take_no_others(ranks: dict[str, Any]) -> None:
    own = [set(one["sharded"]["rows"]) for one in ranks["found"]]
    assert set().union(*own) == EVERY_KEY
    assert sum(map(len, own)) == ROWS
    for epoch in (0, 1):
        assert all(
            set(mine) <= rows for mine, rows in zip(delivered_keys(ranks, "sharded", epoch), own, strict=True)
        )


@pytest.mark.parametrize("what", ["scheduled", "sharded"])
def test_in_every_step_all_ranks_have_the_same_media(ranks: dict[str, Any], what: str) -> None:
    steps = list(zip(*(one[what]["media"] for one in ranks["found"]), strict=True))
    assert all(len(set(map(tuple, step))) == 1 for step in steps)
    assert any(step[0] for step in steps)


@pytest.mark.parametrize("what", ["scheduled", "sharded"])
def test_the_epoch_reconciles_and_is_the_same_on_every_rank(ranks: dict[str, Any], what: str) -> None:
    stats_of_ranks = [one[what]["stats"] for one in ranks["found"]]
    assert all(stats == stats_of_ranks[0] for stats in stats_of_ranks)
    rows, planned, delivered_rows, lost, reasons = stats_of_ranks[0]
    assert (rows, planned, delivered_rows, lost) == (ROWS, ROWS - 2, ROWS - 3, 1)
    assert reasons == {"broken_media": 1, "missing_media": 1, "too_long": 1}  # of this epoch, not of both


def test_the_first_rank_prints_where_all_rows_went(ranks: dict[str, Any]) -> None:
    lines = ranks["written"].splitlines()
    logged = [line for line in lines if f"epoch 1: {ROWS} rows, {ROWS - 2} in the plan" in line]
    assert len(logged) == 2, "once for each of the two ways to share rows"
    assert all(f"{ROWS - 3} delivered, 1 failed" in line for line in logged)
    assert sum("broken_media: 1 of 90" in line for line in lines) == 4  # each way in each of two epochs


def test_the_ledgers_of_all_ranks_name_what_was_dropped(ranks: dict[str, Any]) -> None:
    for name in ("ledger", "run/sharded"):
        entries = [
            json.loads(line)
            for file in sorted((ranks["folder"] / name).glob("rank-*.jsonl"))
            for line in file.read_text().splitlines()
        ]
        assert {entry["key"]: entry["reason"] for entry in entries} == BAD


def test_a_rank_with_other_settings_is_rejected_on_every_rank(ranks: dict[str, Any]) -> None:
    world = ranks["world"]
    errors = [one["rejected"] for one in ranks["found"]]
    assert [len(one) for one in errors] == [5] * world
    for case in (0, 1):  # the packs would differ
        plans = {one[case][1] for one in errors}
        assert len(plans) == 2
        for one in errors:
            assert "the ranks have different plans" in one[case][0]
            assert all(plan in one[case][0] for plan in plans)
            assert f"on ranks [{world - 1}]" in one[case][0]
            assert "the same rows in the same order" in one[case][0]
    for case, words in (
        (2, "batch_size=2"),
        (3, "gradient_accumulation_steps=2"),
    ):  # the same packs, scheduled differently
        assert all("the ranks have different settings" in one[case][0] for one in errors)
        assert all(words in one[case][0] for one in errors)
    assert all("ledger_dir=None on ranks [" in one[4][0] for one in errors)  # others would wait for its steps


def test_a_rank_without_rows_of_its_own_stops_all_of_them_at_once(ranks: dict[str, Any]) -> None:
    assert ranks["found"][0]["too few"].startswith("rank 1 could not open the data: ConfigError: there is no")
    assert all("there is no example in the data" in one["too few"] for one in ranks["found"])


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3)])
def test_after_the_kill_of_a_rank_another_number_of_ranks_trains_exactly_the_rest(
    before: int, after: int, tmp_path: Path
) -> None:
    common = {
        "job": "train",
        "meta": str(write_data(tmp_path / "data")),
        "settings": {**SETTINGS, "num_workers": 2, "ledger_dir": str(tmp_path / "ledger")},
        "checkpoint": str(tmp_path / "checkpoint.json"),
        "save_every": 2,
    }
    victim = {"victim": before - 1, "dies_at": 5}
    first = {**common, **victim, "world": before, "folder": str(tmp_path / "first")}
    second = {**common, "world": after, "folder": str(tmp_path / "second")}
    (tmp_path / "runs").mkdir()
    run_all(tmp_path / "runs", [first])
    assert codes(first) == [-9] * before, "the victim was killed, the others with it"
    saved = json.loads((tmp_path / "checkpoint.json").read_text())
    assert saved["step"] == 4
    assert 0 < len(saved["ids"]) < len(GOOD)
    written = run_all(tmp_path / "runs", [second])
    assert codes(second) == [0] * after, written[-12_000:]
    ranks = read_results(second)
    trained = saved["ids"] + list(chain(*(one["after"] for one in ranks)))
    assert len(trained) == len(set(trained)), "twice"
    assert set(trained) == GOOD
    assert set(ranks[0]["planned"]) == GOOD | {key(LOST)}
    assert all(one["delivered"] == len(GOOD) for one in ranks), "counted by ranks of both runs"
    # Whichever ranks have met it in whichever run, a sample counts once.
    assert all(one["reasons"] == {"missing_media": 1, "broken_media": 1, "too_long": 1} for one in ranks)


def test_eight_processes_that_open_the_same_data_at_once_agree(tmp_path: Path) -> None:
    meta = write_data(tmp_path / "data")
    settings = {**SETTINGS, "num_workers": 0, "cache_dir": str(tmp_path / "plans")}
    run = {
        "job": "open_alone",
        "world": 8,
        "folder": str(tmp_path / "run"),
        "meta": str(meta),
        "settings": settings,
    }
    assert sidecars(meta.parent) == [], "counted already"
    written = run_all(tmp_path, [run])
    assert codes(run) == [0] * 8, written[-12_000:]
    ranks = read_results(run)
    assert len({one["plan"] for one in ranks}) == 1
    samples = list(chain(*(one["samples"] for one in ranks)))
    assert len(samples) == len(set(samples)) == len(GOOD)
    assert len(sidecars(meta.parent)) == 2, "one count file for each dataset"


def test_shards_of_unequal_work_go_on_after_the_shorter_ones_end(ranks: dict[str, Any]) -> None:
    parts = [one["uneven"] for one in ranks["found"]]
    assert len({part["steps"] for part in parts}) == 1
    assert [part["left"] for part in parts] == [2] * ranks["world"]
    assert all(part["seen"] == list(range(part["rows"])) for part in parts)


def test_ranks_that_load_different_states_are_rejected_and_both_are_named(ranks: dict[str, Any]) -> None:
    last = ranks["world"] - 1
    for one in (rank["mixed"] for rank in ranks["found"]):
        for message in (one["steps"], one["sharded steps"]):
            assert message.startswith("the ranks load different states: epoch 0, micro-step 1 (digest")
            assert "epoch 0, micro-step 2 (digest" in message
            assert f"on ranks [{last}]" in message
        assert one["digest"] in one["steps"]
        assert one["nonsense"].startswith("the ranks load different states: a NoneType on ranks [0]")
        assert one["not rejected"] == "not rejected"
        assert one["other shard"].startswith(
            ("with shard_data=True", "rank 0 could not load the state: ConfigError: with shard_data=True")
        )
        assert one["seconds"] < 30, "no rank waits for the time-out of the process group (60 s)"


def test_the_state_is_the_same_on_every_rank(ranks: dict[str, Any]) -> None:
    states = [one["mixed"]["state"] for one in ranks["found"]]
    assert all(state == states[0] for state in states)


def test_half_a_line_in_a_ledger_stops_no_epoch(ranks: dict[str, Any]) -> None:
    assert all(one["torn"] == {"delivered": 12, "reasons": {}} for one in ranks["found"])
