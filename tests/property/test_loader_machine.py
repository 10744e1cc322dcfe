"""The loader under any order of calls: batches taken, states saved and loaded under other shapes, epochs set.

A machine plays a run: all ranks of a world in one process, as a trainer drives them, with stops, restarts
under another world, batch size, accumulation and number of workers, and jumps between epochs. Reads fail,
once or for good, also those of batches that are built ahead and never delivered; the row file is edited
between runs; a rank cannot open it. The machine keeps its own book of what a run must have been given.
``PACKHORSE_MACHINE_RUNS=500`` plays more of them. ``test_ranks_machine.py`` has ranks of a process group.
"""

import json
import os
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import packhorse
from contract.processors import processor
from loader_samples import texts
from packhorse import Ledger, World
from packhorse.errors import ConfigError
from packhorse.loader.epoch_stats import StepFile, rank_file
from packhorse.loader.state import Tally
from property.faulty_mixture import BROKEN, LONG, ROWS, TRANSIENT, open_mixture, row, rows, write
from raising import raises_config

RUNS = int(os.environ.get("PACKHORSE_MACHINE_RUNS", "12"))
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
PLACES = st.integers(0, ROWS - 1)


@dataclass
class Saved:
    """A state, and what the run had used when it was taken."""

    state: dict[str, Any]
    epoch: int
    used: Counter[int] = field(default_factory=Counter)
    lost: Counter[int] = field(default_factory=Counter)
    runs: dict[tuple[str, int], int] = field(default_factory=dict)


class LoaderMachine(RuleBasedStateMachine):
    """See the module's docstring."""

    mode = "pack"

    def __init__(self) -> None:
        super().__init__()
        self.counts: Any = None
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.saved: list[Saved] = []
        self.loaders: list[packhorse.Loader] = []
        self.evaluation: packhorse.Loader | None = None
        self.used: Counter[int] = Counter()
        self.lost: Counter[int] = Counter()
        self.runs: Counter[tuple[str, int]] = Counter()  # of each micro-step
        self.rolls_back_later = False

    @property
    def path(self) -> Path:
        assert self.folder is not None
        return Path(self.folder.name)

    @property
    def file(self) -> Path:
        return self.path / "rows.jsonl"

    def build_loaders(self, shape: tuple[int, int, int], num_workers: int = 0) -> list[packhorse.Loader]:
        """The loaders of all ranks, each with the file opened by itself; reads fail when all are there."""
        world, batch, gradient_accumulation_steps = shape
        loaders = []
        for rank in range(world):
            options: dict[str, Any] = {
                "num_workers": num_workers if rank == 0 else 0,
                "multiprocessing_context": "fork",
                "prefetch_factor": 3,
            }
            loader = packhorse.load(
                open_mixture(self.file),
                processor("qwen2_vl"),
                model="unchecked",
                world=World(rank, world),
                counts=self.counts,
                mode=self.mode,
                pack_size=256,
                batch_size=batch,
                gradient_accumulation_steps=gradient_accumulation_steps,
                ledger_dir=self.path / "ledger",
                max_bad_share=None,
                **options,
            )
            loaders.append(loader)
        for loader in loaders:
            loader.dataset.faults, loader.dataset.broken = self.path / "faults", self.some_break
        return loaders

    @initialize(shape=SHAPES, some_break=st.booleans(), num_workers=st.sampled_from([0, 0, 1]))
    def begin(self, shape: tuple[int, int, int], some_break: bool, num_workers: int) -> None:
        self.some_break = some_break
        self.folder = tempfile.TemporaryDirectory()
        (self.path / "faults").mkdir()
        write(self.file, rows())
        self.loaders = self.build_loaders(shape, num_workers)
        self.counts = self.loaders[0].counts

    # What a trainer does.

    @rule(steps=st.integers(1, 4))
    def take(self, steps: int) -> None:
        """The same number of batches on every rank; the epoch may end with one, and the next begin."""
        if self.is_over():
            self.used, self.lost = Counter(), Counter()
        reports = [self.take_steps(loader, steps) for loader in self.loaders]
        self.rolls_back_later = False
        assert len({len(of_rank) for of_rank in reports}) == 1  # no rank waits for another
        for report in (one for of_rank in reports for one in of_rank):
            assert report.epoch == self.epoch
            self.used.update(report.samples)
            self.lost.update(report.lost)
        self.runs.update(self.steps_used()[-len(reports[0]) :] if reports[0] else ())
        # A step that is run again may lose other samples, so states from after its first run are outdated.
        self.saved = [one for one in self.saved if all(self.runs[step] == n for step, n in one.runs.items())]

    def steps_used(self) -> list[tuple[str, int]]:
        """The micro-steps that the run has come through in this epoch."""
        progress = self.loaders[0]._state
        return [
            (progress.branch(number), step)
            for number, segment in enumerate(progress.segments)
            for step in range(segment.steps)
        ]

    def take_steps(self, loader: packhorse.Loader, steps: int) -> list[Any]:
        batches = iter(loader)  # starts the next epoch if this one is over
        promised = loader.remaining
        reports = [batch.info for batch in islice(batches, steps)]
        assert len(reports) == min(steps, promised)
        return reports

    @rule()
    def finish(self) -> None:
        """All of the epoch that is left."""
        if not self.is_over():
            self.take(max(loader.remaining for loader in self.loaders))

    @rule(epoch=st.integers(0, 3))
    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch or self.is_over():
            self.used, self.lost = Counter(), Counter()
            self.rolls_back_later = self.loaders[0].ledger.is_buffering
        for loader in self.loaders:
            loader.set_epoch(epoch)
        assert self.epoch == epoch

    @rule(rank=st.integers(0, 3))
    def save(self, rank: int) -> None:
        """Through JSON, as a checkpoint; whichever rank saves it."""
        states = [json.loads(json.dumps(loader.state_dict())) for loader in self.loaders]
        state = states[rank % len(states)]
        assert all(one == state for one in states)
        runs = {step: self.runs[step] for step in self.steps_used()}
        self.saved.append(Saved(state, self.epoch, self.used.copy(), self.lost.copy(), runs))

    @rule(data=st.data(), shape=SHAPES, num_workers=st.sampled_from([0, 0, 1]))
    def restart(self, data: st.DataObject, shape: tuple[int, int, int], num_workers: int) -> None:
        """From any state that is not outdated, with other ranks, batches, accumulation or workers."""
        saved = self.any_saved(data)
        self.end()
        self.go_on(saved, shape, num_workers)

    def any_saved(self, data: st.DataObject) -> Saved:
        if not self.saved:
            self.save(0)
        return data.draw(st.sampled_from(self.saved))

    def go_on(self, saved: Saved, shape: tuple[int, int, int], num_workers: int = 0) -> None:
        self.loaders = self.build_loaders(shape, num_workers)
        self.rolls_back_later = False
        for loader in self.loaders:
            loader.load_state_dict(saved.state)
        self.used, self.lost = saved.used.copy(), saved.lost.copy()
        if self.epoch != saved.epoch:  # it was taken at the end of its epoch
            assert self.epoch == saved.epoch + 1
            assert self.left(saved.used + saved.lost) == []
            self.used, self.lost = Counter(), Counter()

    @rule(close=st.booleans())
    def store_fails_again(self, close: bool) -> None:
        """Each transient fault may happen once more; workers may end, with all that they have built ahead."""
        for happened in (self.path / "faults").iterdir():
            happened.unlink()
        if close:
            for loader in self.loaders:
                loader.close()

    @rule(shape=SHAPES, what=st.sampled_from(["evaluate", "fail to open"]))
    def do_something_else(self, shape: tuple[int, int, int], what: str) -> None:
        """Evaluate, or fail to open another loader: it changes nothing for this one."""
        before = [loader.state_dict() for loader in self.loaders]
        files = {path: path.read_bytes() for path in (self.path / "ledger").glob("*")}
        if what == "evaluate":
            self.evaluate()
        else:
            self.file.rename(self.path / "away")
            with pytest.raises(FileNotFoundError, match=r"rows\.jsonl"):
                self.build_loaders(shape)
            (self.path / "away").rename(self.file)
        assert [loader.state_dict() for loader in self.loaders] == before
        assert {path: path.read_bytes() for path in (self.path / "ledger").glob("*")} == files

    def evaluate(self) -> None:
        """Another loader delivers a whole epoch."""
        if self.evaluation is None:
            self.evaluation = packhorse.load(
                texts(6), processor("qwen2_vl"), model="unchecked", world=World(), pack_size=256, mode="pad"
            )
        self.evaluation.set_epoch(0)
        assert sum(len(batch.info.samples) for batch in self.evaluation) == 6
        assert self.evaluation.epoch_stats is not None
        assert self.evaluation.epoch_stats.delivered == 6

    @rule(
        data=st.data(),
        shape=SHAPES,
        place=PLACES,
        kind=st.sampled_from(["swap", "word", "remove", "double", "note"]),
    )
    def edit_the_data(self, data: st.DataObject, shape: tuple[int, int, int], place: int, kind: str) -> None:
        """A state of other data is rejected, whichever row it is; put back, the data are those of the run."""
        saved = self.any_saved(data)
        changed, other = rows(), data.draw(PLACES.filter(lambda number: number != place))
        if kind == "swap":
            changed[place], changed[other] = changed[other], changed[place]
        elif kind == "remove":
            del changed[place]
        elif kind == "double":
            changed.insert(other, changed[place])
        else:
            changed[place] = row(place, "no") if kind == "word" else {**changed[place], "note": "new"}
        self.end()
        write(self.file, changed)
        kept, self.counts = self.counts, None
        for loader in self.build_loaders(shape):
            with raises_config("data", match=r"rows\.jsonl.*digest \w+ when the state was saved"):
                loader.load_state_dict(saved.state)
        write(self.file, rows())
        self.counts = kept
        self.go_on(saved, shape)

    @rule(data=st.data())
    def load_nonsense(self, data: st.DataObject) -> None:
        """A state that cannot be is rejected, and leaves all as it was."""
        state = dict(self.any_saved(data).state)
        name = data.draw(st.sampled_from(["version", "plan", "epoch", "segments", "packs", "data", "used"]))
        nonsense = ["x", -1, [[1, 1, 1, 10_000]], [[0, 1, 1, 1]], [[1]], {}]
        if name != "used":  # where None stands for "not known"
            nonsense.append(None)
        state[name] = data.draw(st.sampled_from(nonsense))
        before = self.loaders[0].state_dict()
        try:
            self.loaders[0].load_state_dict(state)
        except ConfigError:
            assert self.loaders[0].state_dict() == before
        else:
            raise AssertionError(f"{name}={state[name]!r} was taken")

    # What must hold at any time.

    @property
    def epoch(self) -> int:
        (epoch,) = {loader.epoch for loader in self.loaders}
        return epoch

    def is_over(self) -> bool:
        return self.loaders[0].remaining == 0

    def may_be_lost(self) -> set[int]:
        return set(TRANSIENT | BROKEN if self.some_break else TRANSIENT)

    def left(self, used: Counter[int]) -> list[int]:
        planned = Counter(self.loaders[0].plan.indices.tolist())
        return sorted((planned - used).elements())

    @invariant()
    def nothing_comes_twice_and_nothing_is_missed(self) -> None:
        if not self.loaders:
            return
        seen = self.used + self.lost
        assert max(seen.values(), default=1) == 1
        assert set(self.lost) <= self.may_be_lost()
        still: Counter[int] = Counter()
        for loader in self.loaders:
            schedule = loader._current.schedule
            for step in range(loader.cursor, len(loader)):
                still.update(index for pack in schedule.samples(step, loader.world.rank) for index in pack)
        assert sorted(still.elements()) == self.left(seen)

    @invariant()
    def the_ledgers_name_what_was_lost_and_nothing_that_was_delivered(self) -> None:
        if not self.loaders or self.rolls_back_later:
            return
        named: Counter[str] = Counter()
        for file in (self.path / "ledger").glob("rank-*.jsonl"):
            named.update(drop.key for drop in Ledger.load(file) if drop.epoch == self.epoch)
        assert named == Counter({f"chats/{number}": 1 for number in self.lost})

    @invariant()
    def delivered_and_lost_are_counted_step_by_step(self) -> None:
        if not self.loaders:
            return
        state, total = self.loaders[0]._state, Tally()
        for number, segment in enumerate(state.segments):
            for rank in range(segment.world_size):
                steps = StepFile(rank_file(self.path / "ledger", rank, ".steps")).read(state)[number]
                assert len(steps) == segment.steps
                for tally, _ in steps.values():
                    total = total.plus(tally)
        assert total == (sum(self.used.values()), sum(self.lost.values()))

    @invariant()
    def the_lengths_are_honest(self) -> None:
        if not self.loaders:
            return
        for numbers in ({len(one) for one in self.loaders}, {one.cursor for one in self.loaders}):
            assert len(numbers) == 1
        first = self.loaders[0]
        assert len(first) == first.cursor + first.remaining
        assert len(first) % first.config.gradient_accumulation_steps == 0

    @invariant()
    def the_epoch_reconciles(self) -> None:
        if not self.loaders or not self.is_over():
            return
        plan = self.loaders[0].plan
        dropped = sorted(plan.dropped.tolist())
        assert dropped == [LONG]
        assert sum(self.used.values()) + sum(self.lost.values()) + len(dropped) == ROWS
        assert set(self.lost) >= (BROKEN if self.some_break else set())
        stats = self.loaders[0].epoch_stats
        if len(self.loaders) == 1:
            assert stats is not None
            assert stats.delivered == sum(self.used.values())
            assert stats.delivered + stats.lost + stats.dropped == stats.rows == ROWS
            assert (stats.epoch, stats.lost) == (self.epoch, sum(self.lost.values()))
            reasons = stats.reasons
            assert reasons.get("too_long") == 1
            assert sum(reasons.values()) == 1 + stats.lost

    def end(self) -> None:
        for loader in self.loaders:
            loader.close()

    def teardown(self) -> None:
        self.end()
        if self.evaluation is not None:
            self.evaluation.close()
        if self.folder is not None:
            self.folder.cleanup()


class PaddingMachine(LoaderMachine):
    """The same without packs."""

    mode = "pad"


for machine in (LoaderMachine, PaddingMachine):
    machine.TestCase.settings = settings(
        max_examples=RUNS,
        stateful_step_count=12,
        deadline=None,
        derandomize="PACKHORSE_MACHINE_RUNS" not in os.environ,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )

TestLoaderMachine = LoaderMachine.TestCase
TestPaddingMachine = PaddingMachine.TestCase
