"""Two ranks of a process group, under any order of calls: no rank waits for one that raised; both continue.

Real processes with a gloo group. One may be given the state of another checkpoint, or a file that is not
there: then both raise, name the rank or both states, and nothing has happened.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from count_samples import python_path
from packhorse import Ledger
from property.faulty_mixture import LONG, ROWS, TRANSIENT, rows, write

pytestmark = pytest.mark.system

RUNS = int(os.environ.get("PACKHORSE_MACHINE_RUNS", "8"))
WORLD = 2
TIMEOUT = 60.0  # half of the process group's own
WORK = Path(__file__).with_name("rank_work.py")


class Collectives:
    """The processes; they live on from run to run, but for those after a run that failed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, list[subprocess.Popen[bytes]]()

    def start(self) -> None:
        """Start them, if they do not run."""
        if self.processes:
            return
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        environment = {**os.environ, "PYTHONPATH": python_path(folder)}
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(WORK), str(folder / "meeting"), str(rank), str(WORLD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=environment,
            )
            for rank in range(WORLD)
        ]
        for process in self.processes:  # importing takes longer than any command
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"

    def all_do(self, do: str, *own: dict[str, Any], **command: Any) -> list[Any]:
        """What each rank found when all were given a command; ``own`` is what differs between them."""
        for rank, process in enumerate(self.processes):
            line = json.dumps({"do": do, **command, **(own[rank] if own else {})})
            assert process.stdin is not None
            process.stdin.write(line.encode() + b"\n")
        end = time.monotonic() + TIMEOUT
        answers = [self._answer(process, end) for process in self.processes]
        if None in answers:
            self.end()
            raise AssertionError(f"no answer to {do!r} after {TIMEOUT:g} s: {answers}")
        return [one["found"] if "found" in one else (one["error"], one["message"]) for one in answers]

    def _answer(self, process: "subprocess.Popen[bytes]", end: float) -> Any:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
        return json.loads(process.stdout.readline()) if ready else None

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes = []


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collectives]:
    started = Collectives(tmp_path_factory.mktemp("ranks"))
    yield started
    started.end()


def is_all(samples: Counter[int]) -> bool:
    """Whether an epoch has no more than these."""
    return sum(samples.values()) == ROWS - 1


class RanksMachine(RuleBasedStateMachine):
    """See the module's docstring."""

    def __init__(self, ranks: Collectives) -> None:
        super().__init__()
        self.ranks = ranks
        self.ranks.start()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        (self.path / "faults").mkdir()
        write(self.path / "rows.jsonl", rows())
        self.saved: list[tuple[dict[str, Any], Counter[int], Counter[int]]] = []
        self.used: Counter[int] = Counter()
        self.lost: Counter[int] = Counter()
        self.epoch, self.over = 0, False

    def build(self, num_workers: int = 0) -> None:
        first, *others = self.ranks.all_do(
            "build", folder=str(self.path), file="rows.jsonl", num_workers=num_workers
        )
        assert isinstance(first, list), first
        assert others == [first] * (WORLD - 1)
        self.used, self.lost, self.epoch, self.over = Counter(), Counter(), 0, False

    @initialize(num_workers=st.sampled_from([0, 1]))
    def begin(self, num_workers: int) -> None:
        self.build(num_workers)

    @rule(steps=st.integers(1, 4))
    def take(self, steps: int) -> None:
        if self.over:
            self.used, self.lost, self.epoch = Counter(), Counter(), self.epoch + 1
        # A step that is run again may lose other samples; then states from after its first run name these.
        now = (self.epoch, sum((self.used + self.lost).values()))
        self.saved = [one for one in self.saved if (one[0]["epoch"], sum((one[1] + one[2]).values())) <= now]
        reports = self.ranks.all_do("take", steps=steps)
        assert len({len(of_rank) for of_rank in reports}) == 1
        for samples, lost in (one for of_rank in reports for one in of_rank):
            self.used.update(samples)
            self.lost.update(lost)
        self.over = is_all(self.used + self.lost)

    def state(self) -> dict[str, Any]:
        """The state; it is the same on every rank."""
        first, *others = self.ranks.all_do("state")
        assert all(one == first for one in others)
        found: dict[str, Any] = first
        return found

    @rule()
    def finish(self) -> None:
        """The epoch summary is that of all ranks, before and after restarts."""
        if not self.over:
            self.take(ROWS)
        stats_of_ranks = self.ranks.all_do("epoch_stats")
        reasons = {"too_long": 1} | ({"sample_failed": len(self.lost)} if self.lost else {})
        expected = [self.epoch, sum(self.used.values()), sum(self.lost.values()), 1, reasons]
        assert stats_of_ranks == [expected] * WORLD
        assert sorted((self.used + self.lost).elements()) == [n for n in range(ROWS) if n != LONG]

    @rule()
    def save(self) -> None:
        self.saved.append((self.state(), self.used.copy(), self.lost.copy()))

    @rule(close=st.booleans())
    def store_fails_again(self, close: bool) -> None:
        """What was built ahead and not used may be rebuilt."""
        for happened in (self.path / "faults").iterdir():
            happened.unlink()
        if close:
            self.ranks.all_do("close")

    @rule(data=st.data(), num_workers=st.sampled_from([0, 1]))
    def restart(self, data: st.DataObject, num_workers: int) -> None:
        self.go_on(self.any_saved(data), num_workers)

    def any_saved(self, data: st.DataObject) -> int:
        if not self.saved:
            self.save()
        return data.draw(st.integers(0, len(self.saved) - 1))

    def go_on(self, number: int, num_workers: int = 0) -> None:
        state, used, lost = self.saved[number]
        self.build(num_workers)
        left = self.ranks.all_do("load", state=state)
        assert isinstance(left[0], int), left
        assert left[0] == left[1]
        self.used, self.lost, self.epoch, self.over = used.copy(), lost.copy(), state["epoch"], False
        if is_all(used + lost):  # it was taken at the end of its epoch
            self.used, self.lost, self.epoch = Counter(), Counter(), state["epoch"] + 1

    @rule(late=st.integers(0, WORLD - 1))
    def mix_states(self, late: int) -> None:
        """A run that was killed between the writes of two ranks; both states are named, on both ranks."""
        self.save()
        self.take(1)
        before = self.state()
        states = [before] * WORLD
        states[late] = self.saved[-1][0]
        for error, message in self.ranks.all_do("load", *({"state": state} for state in states)):
            assert error == "ConfigError"
            assert message.startswith("the ranks load different states: ")
            for rank, state in enumerate(states):
                position = f"epoch {state['epoch']}, micro-step {state['segments'][-1][-1]} "
                assert position in message
                assert f"on ranks [{rank}]" in message
        assert self.state() == before

    @rule(rank=st.integers(0, WORLD - 1))
    def fail_to_open(self, rank: int) -> None:
        """One rank does not see the file: both raise, and the run resumes from its last state."""
        self.save()
        files = [{"file": "away.jsonl" if number == rank else "rows.jsonl"} for number in range(WORLD)]
        found = self.ranks.all_do("build", *files, folder=str(self.path), num_workers=0)
        assert all("away.jsonl" in message for _, message in found), found
        self.go_on(len(self.saved) - 1)

    @rule(data=st.data(), place=st.integers(0, ROWS - 2))
    def edit_the_data(self, data: st.DataObject, place: int) -> None:
        number = self.any_saved(data)
        changed = rows()
        changed[place], changed[place + 1] = changed[place + 1], changed[place]
        write(self.path / "rows.jsonl", changed)
        self.build()
        for error, message in self.ranks.all_do("load", state=self.saved[number][0]):
            assert error == "ConfigError"
            assert "rows.jsonl" in message
        write(self.path / "rows.jsonl", rows())
        self.go_on(number)

    @invariant()
    def every_row_was_delivered_once_or_is_in_the_ledger_once(self) -> None:
        assert max((self.used + self.lost).values(), default=1) == 1
        assert set(self.lost) <= TRANSIENT
        named: Counter[str] = Counter()
        for file in (self.path / "ledger").glob("rank-*.jsonl"):
            named.update(drop.key for drop in Ledger.load(file) if drop.epoch == self.epoch)
        assert named == Counter({f"chats/{number}": 1 for number in self.lost})

    def teardown(self) -> None:
        if self.ranks.processes:
            self.ranks.all_do("close")
        self.folder.cleanup()


def test_ranks_go_on_together_or_raise_together(ranks: Collectives) -> None:
    run_state_machine_as_test(
        lambda: RanksMachine(ranks),
        settings=settings(
            max_examples=RUNS,
            stateful_step_count=10,
            deadline=None,
            phases=(Phase.generate,),  # processes that wait for each other take too long to shrink
            derandomize="PACKHORSE_MACHINE_RUNS" not in os.environ,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
