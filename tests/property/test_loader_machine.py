"""The loader under any order of calls: batches taken, states saved and loaded under other shapes, epochs set.

A machine plays a run: all ranks of a world in one process, as a trainer drives them, with stops, restarts
under another world, batch size, accumulation and number of workers, and jumps between epochs. It keeps its
own book of what a run must have been given by then. ``PACKHORSE_MACHINE_RUNS=500`` plays more of them.
"""

import json
import os
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import packhorse
from contract.processors import processor
from loader_samples import texts
from packhorse import World
from packhorse.errors import ConfigError

RUNS = int(os.environ.get("PACKHORSE_MACHINE_RUNS", "12"))
ROWS = 24
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
BROKEN = frozenset({2, 5, 7, 13, 19})  # these rows cannot be encoded
LONG = 11  # and this one does not fit into a pack


class Rows(list):  # type: ignore[type-arg]
    """Examples of which some break when they are read, after they were counted."""

    breaks = False

    def __getitem__(self, index: Any) -> Any:
        if self.breaks and index in BROKEN:
            raise ValueError("this row is broken")
        return super().__getitem__(index)


@dataclass
class Saved:
    """A state, and what the run had used when it was taken."""

    state: dict[str, Any]
    epoch: int
    used: Counter[int] = field(default_factory=Counter)
    lost: Counter[int] = field(default_factory=Counter)


def all_rows() -> Rows:
    made = texts(ROWS, seed=3)
    made[LONG]["conversation"][0]["content"][0]["text"] = "why " * 400
    return Rows(made)


class LoaderMachine(RuleBasedStateMachine):
    """See the module's docstring."""

    mode = "pack"

    def __init__(self) -> None:
        super().__init__()
        self.rows = all_rows()
        self.counts: Any = None
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.saved: list[Saved] = []
        self.loaders: list[packhorse.Loader] = []
        self.used: Counter[int] = Counter()
        self.lost: Counter[int] = Counter()

    def built(self, shape: tuple[int, int, int], workers: int = 0) -> list[packhorse.Loader]:
        """The loaders of all ranks, over the same rows."""
        world, batch, accumulation = shape
        assert self.folder is not None
        self.rows.breaks = False
        loaders = []
        for rank in range(world):
            options: dict[str, Any] = {"workers": workers if rank == 0 else 0, "start": "fork"}
            loader = packhorse.load(
                self.rows,
                processor("qwen2_vl"),
                model="unchecked",
                world=World(rank, world),
                counts=self.counts,
                mode=self.mode,
                pack_size=256,
                batch_size=batch,
                accumulation=accumulation,
                ledger_dir=Path(self.folder.name),
                max_bad_share=None,
                **options,
            )
            self.counts = loader.counts
            loaders.append(loader)
        self.rows.breaks = self.some_break
        return loaders

    @initialize(shape=SHAPES, some_break=st.booleans())
    def begin(self, shape: tuple[int, int, int], some_break: bool) -> None:
        self.some_break = some_break
        self.folder = tempfile.TemporaryDirectory()
        self.loaders = self.built(shape)

    # What a trainer does.

    @rule(steps=st.integers(1, 4))
    def take(self, steps: int) -> None:
        """The same number of batches on every rank; the epoch may end with one, and the next begin."""
        if self.is_over():
            self.used, self.lost = Counter(), Counter()
        reports = [self.taken(loader, steps) for loader in self.loaders]
        assert len({len(of_rank) for of_rank in reports}) == 1  # no rank waits for another
        for report in (one for of_rank in reports for one in of_rank):
            assert report.epoch == self.epoch
            self.used.update(report.samples)
            self.lost.update(report.lost)

    def taken(self, loader: packhorse.Loader, steps: int) -> list[Any]:
        reports, iterator = [], iter(loader)
        promised = loader.remaining
        for _ in range(steps):
            if next(iterator, None) is None:
                break
            reports.append(loader.last)
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
        for loader in self.loaders:
            loader.set_epoch(epoch)
        assert self.epoch == epoch

    @rule(rank=st.integers(0, 3))
    def save(self, rank: int) -> None:
        """Through JSON, as a checkpoint; whichever rank saves it."""
        saver = self.loaders[rank % len(self.loaders)]
        state = json.loads(json.dumps(saver.state_dict()))
        self.saved.append(Saved(state, self.epoch, self.used.copy(), self.lost.copy()))

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), shape=SHAPES, workers=st.sampled_from([0, 0, 0, 0, 0, 1]))
    def restart(self, data: st.DataObject, shape: tuple[int, int, int], workers: int) -> None:
        """From any state that was ever saved, with other ranks, batches, accumulation or workers."""
        saved = data.draw(st.sampled_from(self.saved))
        self.end()
        self.loaders = self.built(shape, workers)
        for loader in self.loaders:
            loader.load_state_dict(saved.state)
        self.used, self.lost = saved.used.copy(), saved.lost.copy()
        if self.epoch != saved.epoch:  # it was taken at the end of its epoch
            assert self.epoch == saved.epoch + 1
            assert self.left(saved.used + saved.lost) == []
            self.used, self.lost = Counter(), Counter()

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def load_nonsense(self, data: st.DataObject) -> None:
        """A state that cannot be is refused, and leaves all as it was."""
        state = dict(data.draw(st.sampled_from(self.saved)).state)
        name = data.draw(st.sampled_from(["version", "plan", "epoch", "segments", "packs"]))
        state[name] = data.draw(
            st.sampled_from([None, "x", -1, [[1, 1, 1, 10_000]], [[0, 1, 1, 1]], [[1]], {}])
        )
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

    def left(self, used: Counter[int]) -> list[int]:
        planned = Counter(self.loaders[0].plan.indices.tolist())
        return sorted((planned - used).elements())

    @invariant()
    def nothing_comes_twice_and_nothing_is_missed(self) -> None:
        if not self.loaders:
            return
        seen = self.used + self.lost
        assert max(seen.values(), default=1) == 1
        assert set(self.lost) <= (BROKEN if self.some_break else set())
        still: Counter[int] = Counter()
        for loader in self.loaders:
            dealt = loader._now.dealt
            for step in range(loader.cursor, len(loader)):
                still.update(index for pack in dealt.samples(step, loader.world.rank) for index in pack)
        assert sorted(still.elements()) == self.left(seen)

    @invariant()
    def the_lengths_are_honest(self) -> None:
        if not self.loaders:
            return
        for numbers in ({len(one) for one in self.loaders}, {one.cursor for one in self.loaders}):
            assert len(numbers) == 1
        first = self.loaders[0]
        assert len(first) == first.cursor + first.remaining
        assert len(first) % first.config.accumulation == 0

    @invariant()
    def the_account_adds_up(self) -> None:
        if not self.loaders or not self.is_over():
            return
        plan = self.loaders[0].plan
        left_out = sorted(plan.dropped.tolist())
        assert left_out == [LONG]
        assert sum(self.used.values()) + sum(self.lost.values()) + len(left_out) == ROWS
        assert self.lost == Counter(BROKEN if self.some_break else ())
        account = self.loaders[0].account
        if len(self.loaders) == 1:
            assert account is not None
            assert account.delivered is not None
            assert account.delivered + account.lost + account.left_out == account.rows == ROWS
            assert (account.epoch, account.lost) == (self.epoch, sum(self.lost.values()))
            told = account.reasons
            assert told.get("too_long") == 1
            assert sum(told.values()) == 1 + account.lost

    def end(self) -> None:
        for loader in self.loaders:
            loader.close()

    def teardown(self) -> None:
        self.end()
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
