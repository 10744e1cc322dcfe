"""What was delivered is counted, and the ledger names only what was not: never one sample in both."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import packhorse
from count_samples import no_file_larger_than
from faults.faulty_data import Faulty, Once, children, raising
from loader_samples import delivered_rows, load, texts
from packhorse.errors import SystemFault
from packhorse.ledger import Ledger
from packhorse.loader import TooManyBad
from packhorse.loader.epoch_stats import StepFile
from packhorse.loader.state import Tally

ROWS = 60
SETTINGS: dict[str, Any] = {"model": "unchecked", "mode": "pad", "max_bad_share": None}


def failing_once(folder: Path, rows: range = range(ROWS)) -> Faulty:
    """Every row fails when a worker reads it for the first time, as on a file server that recovers."""
    faults = {}
    for row in rows:
        (folder / str(row)).mkdir(parents=True)
        faults[row] = Once(folder / str(row), raising(OSError("the store does not answer")))
    return Faulty(texts(ROWS), faults)


def make_loader(rows: Any, rank: int = 0, size: int = 1, **options: Any) -> packhorse.Loader:
    rows.armed = False
    loader = load(rows, rank, size, **{**SETTINGS, **options})
    rows.armed = True
    return loader


def until_built_ahead(folder: Path, number: int) -> None:
    """Wait until workers have tried this number of rows."""
    while sum(1 for _ in folder.glob("*/happened0")) < number:
        pass


@pytest.mark.parametrize("between", ["close", "iterate again", "worker killed", "same state", "resume"])
def test_a_failure_of_a_batch_that_was_not_delivered_is_in_no_ledger(tmp_path: Path, between: str) -> None:
    """The worker builds six batches ahead, which fail; they are rebuilt and delivered."""
    rows = failing_once(tmp_path / "faults")
    options = {"num_workers": 1, "prefetch_factor": 6, "ledger_dir": tmp_path / "ledger"}
    others = set(children())  # of tests before this one
    loader = make_loader(rows, **options)
    batches = iter(loader)
    first = next(batches).info.lost
    assert len(first) == 1, "this one is delivered: it is lost"
    until_built_ahead(tmp_path / "faults", 6)
    state = json.loads(json.dumps(loader.state_dict()))
    if between == "worker killed":
        (worker,) = set(children()) - others
        os.kill(worker, signal.SIGKILL)
        os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
    elif between != "iterate again":
        loader.close()
    if between == "same state":
        loader.load_state_dict(state)
    if between == "resume":
        loader = make_loader(rows, **options)
        loader.load_state_dict(state)
    delivered: list[int] = []
    lost = list(first)
    for batch in batches if between == "worker killed" else loader:
        delivered += batch.info.samples
        lost += batch.info.lost
    loader.close()
    stats = loader.epoch_stats
    assert stats is not None
    assert sorted(delivered + lost) == list(range(ROWS))
    assert len(delivered) >= 5, "batches that failed the first time were delivered"
    assert (stats.delivered, stats.lost) == (len(delivered), len(lost))
    assert stats.reasons == {"sample_failed": len(lost)}
    for ledger in (loader.ledger, Ledger.load(tmp_path / "ledger" / "rank-00000.jsonl")):
        assert sorted(int(drop.key) for drop in ledger) == sorted(lost)


def test_entries_of_a_batch_at_which_the_run_was_stopped_are_rolled_back_when_it_is_built_again(
    tmp_path: Path,
) -> None:
    rows = Faulty(texts(ROWS), {}, only_workers=False)
    loader = make_loader(rows, max_consecutive_bad=2, ledger_dir=tmp_path)
    order = [loader._current.schedule.samples(step, 0)[0][0] for step in range(ROWS)]
    rows.faults = dict.fromkeys(order[5:8], raising(OSError("the store does not answer")))
    with pytest.raises(TooManyBad) as caught:
        delivered_rows(loader)
    assert (caught.value.setting, caught.value.bad) == ("max_consecutive_bad", 3)
    assert loader.cursor == 7
    assert {int(drop.key) for drop in loader.ledger} == set(order[5:8]), "the reasons of the stop"
    rows.faults = {}
    assert delivered_rows(loader) == order[7:]
    assert loader.epoch_stats is not None
    assert (loader.epoch_stats.delivered, loader.epoch_stats.lost) == (ROWS - 2, 2)
    assert {int(drop.key) for drop in Ledger.load(tmp_path / "rank-00000.jsonl")} == set(order[5:7])


def test_an_epoch_that_is_too_bad_at_its_end_counts_its_last_batch_once() -> None:
    rows = Faulty(texts(ROWS), {}, only_workers=False)
    loader = make_loader(rows, 0, 2, max_bad_share=0.05)  # two ranks are checked together, at the end
    mine = [loader._current.schedule.samples(step, 0)[0][0] for step in range(len(loader))]
    rows.faults = dict.fromkeys(mine[-4:], raising(OSError("gone")))
    with pytest.raises(TooManyBad):
        delivered_rows(loader)
    assert loader.remaining == 1
    rows.faults = {}
    assert delivered_rows(loader) == mine[-1:]
    assert loader._current.tallies[-1] == (len(mine) - 3, 3)
    assert {int(drop.key) for drop in loader.ledger} == set(mine[-4:-1])


@pytest.mark.parametrize("size", [1, 2])
def test_a_share_of_zero_stops_a_rank_at_its_first_bad_sample(size: int) -> None:
    rows = Faulty(texts(ROWS), {}, only_workers=False)
    loader = make_loader(rows, 0, size, max_bad_share=0.0)
    mine = [loader._current.schedule.samples(step, 0)[0][0] for step in range(len(loader))]
    rows.faults = {mine[3]: raising(OSError("gone"))}
    with pytest.raises(TooManyBad) as caught:
        delivered_rows(loader)
    assert (caught.value.setting, caught.value.bad, caught.value.samples) == ("max_bad_share", 1, ROWS)
    assert loader.cursor == 3


@pytest.mark.parametrize("last", [True, False])
def test_a_batch_that_files_prevented_is_delivered_later_and_its_failures_count_once(
    tmp_path: Path, last: bool
) -> None:
    """Two consecutive samples fail; with the second one a file of the run cannot be used."""
    rows = Faulty(texts(ROWS), {}, only_workers=False)
    loader = make_loader(rows, max_consecutive_bad=2, ledger_dir=tmp_path)
    order = [loader._current.schedule.samples(step, 0)[0][0] for step in range(ROWS)]
    stop = ROWS - 1 if last else 6
    rows.faults = dict.fromkeys(order[stop - 1 : stop + 1], raising(OSError("gone")))
    delivered_rows(loader, stop)
    steps, kept = tmp_path / "rank-00000.steps", tmp_path / "kept"
    blocked = tmp_path / "rank-00007.jsonl" if last else steps  # read at the end of the epoch, or written
    if not last:
        steps.rename(kept)
    blocked.mkdir()
    with pytest.raises(OSError if last else SystemFault):
        delivered_rows(loader)
    assert (loader.cursor, loader.remaining) == (stop, ROWS - stop)
    blocked.rmdir()
    if not last:
        kept.rename(steps)
    assert delivered_rows(loader) == order[stop + 1 :]
    assert loader.epoch_stats is not None
    assert (loader.epoch_stats.delivered, loader.epoch_stats.lost) == (ROWS - 2, 2)
    assert sorted(int(drop.key) for drop in loader.ledger) == sorted(order[stop - 1 : stop + 1])


@pytest.mark.parametrize("worlds", [(3, 2, 1), (1, 4, 1), (2, 2, 1), (4, 1, 1)])
def test_what_was_delivered_is_counted_over_restarts_with_other_ranks(
    tmp_path: Path, worlds: tuple[int, ...]
) -> None:
    """Three runs; the first goes three steps further than its checkpoint, and is killed there."""
    bad = {4, 17, 33, 50}
    rows = Faulty(texts(ROWS), dict.fromkeys(bad, raising(OSError("gone"))), only_workers=False)
    state: dict[str, Any] | None = None
    for number, world in enumerate(worlds):
        ranks = []
        for rank in range(world):
            loader = make_loader(rows, rank, world, ledger_dir=tmp_path, batch_size=2)
            if state is not None:
                loader.load_state_dict(state)
            ranks.append(loader)
        if number == 2:
            break
        for loader in ranks:
            batches = iter(loader)
            for _ in range(3):
                next(batches)
        state = json.loads(json.dumps(ranks[-1].state_dict()))
        assert all(loader.state_dict() == state for loader in ranks)
        for loader in ranks:
            delivered_rows(loader, 3)
    (last,) = ranks
    delivered_rows(last)
    assert last.epoch_stats is not None
    assert (last.epoch_stats.delivered, last.epoch_stats.lost) == (ROWS - 4, 4)
    assert last.epoch_stats.reasons == {"sample_failed": 4}


def test_a_step_file_that_is_not_whole_makes_delivered_unknown_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = Faulty(texts(ROWS), {}, only_workers=False)
    ranks = [make_loader(rows, rank, 2, ledger_dir=tmp_path) for rank in range(2)]
    for loader in ranks:
        delivered_rows(loader, 4)
    file = tmp_path / "rank-00001.steps"
    whole = file.read_bytes()
    for content, known in ((whole, ROWS), (whole[:-3], None), (b"", None)):
        file.write_bytes(content)
        caplog.clear()
        again = make_loader(rows, ledger_dir=tmp_path)
        again.load_state_dict(ranks[0].state_dict())
        delivered_rows(again)
        assert again.epoch_stats is not None
        assert again.epoch_stats.delivered == known
        assert (f"not all of its step files are in {tmp_path}" in again.epoch_stats.unknown) == (
            known is None
        )
        assert "set ledger_dir" not in again.epoch_stats.unknown
        assert (f"{file} has " in caplog.text) == (known is None)
    file.unlink()


def test_a_step_that_is_written_in_part_only_is_reported_and_can_be_written_again(tmp_path: Path) -> None:
    file = StepFile(tmp_path / "rank-00000.steps")
    file.append("branch", 0, Tally(1, 0))
    with (
        no_file_larger_than(file.path.stat().st_size + 5),
        pytest.raises(SystemFault, match="cannot be written"),
    ):
        file.append("branch", 1, Tally(1, 0))
    file.append("branch", 1, Tally(2, 0))
    lines = [line for line in file.path.read_text().splitlines() if line.endswith("]")]
    assert list(map(json.loads, lines)) == [["branch", 0, 1, 0], ["branch", 1, 2, 0]]


def test_a_step_file_with_half_a_line_is_continued(tmp_path: Path) -> None:
    loader = make_loader(Faulty(texts(ROWS), {}), ledger_dir=tmp_path)
    delivered_rows(loader, 2)
    file = tmp_path / "rank-00000.steps"
    file.write_bytes(file.read_bytes() + b'["half')
    again = make_loader(Faulty(texts(ROWS), {}), ledger_dir=tmp_path)
    again.load_state_dict(loader.state_dict())
    delivered_rows(again, 1)
    assert StepFile(file).read(again._state) == [dict.fromkeys(range(3), ((1, 0), []))]
