"""The Trainer, Accelerate and Lightning train a tiny model from a loader, are stopped, and go on exactly."""

import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from contract.torchvision_ops import make_torchvision_importable
from distributed.training_runs import (
    DEMO_KEYS,
    Interrupted,
    Step,
    run_example,
    samples_of,
    steps_of,
    write_demo,
)

make_torchvision_importable()

pytestmark = pytest.mark.system

FRAMEWORKS = ("trainer", "accelerate", "lightning")
EPOCH = 5  # steps, with two micro-batches each
# Where the last checkpoint is: in the middle of an epoch, at its end.
CHECKPOINTS = (2, EPOCH)


@dataclass(frozen=True)
class Runs:
    """A run of two epochs; one that stops a step after its checkpoint; those that go on from there."""

    whole: list[Step]
    stopped: list[Step]
    resumed: list[Step]
    in_other_steps: list[Step]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's data, counted by the first run, and its model."""
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder)
    return folder / "demo"


class Results:
    """Runs of one framework, each made once."""

    def __init__(self, framework: str, demo: Path, folders: pytest.TempPathFactory) -> None:
        self.framework, self.folders = framework, folders
        self.words = ("--model", str(demo / "model"), "--data", str(demo / "data" / "meta.json"))
        self.whole = cache(self._whole)
        self.runs = cache(self._runs)

    def _run(self, folder: Path, *words: str, stop_after: int | None = None) -> list[Step]:
        words = (*self.words, "--epochs", "2", *words)
        if stop_after is None:
            run_example(f"train_{self.framework}", folder, *words)
        else:
            with pytest.raises(Interrupted):
                run_example(f"train_{self.framework}", folder, *words, stop_after=stop_after)
        return steps_of(folder)

    def _whole(self) -> list[Step]:
        return self._run(self.folders.mktemp(self.framework))

    def _runs(self, checkpoint: int) -> Runs:
        folder = self.folders.mktemp(f"{self.framework}{checkpoint}")
        words = ("--save-every", str(checkpoint))
        stopped = self._run(folder, *words, stop_after=checkpoint + 1)
        other = self.folders.mktemp("other") / "copy"
        shutil.copytree(folder, other)
        resumed = self._run(folder, *words, "--resume")
        in_other_steps: list[Step] = []
        if checkpoint < EPOCH:
            in_other_steps = self._run(other, *words, "--resume", "--gradient-accumulation-steps", "1")
        return Runs(self.whole(), stopped, resumed, in_other_steps)


@pytest.fixture(scope="module", params=FRAMEWORKS)
def results(request: pytest.FixtureRequest, demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(request.param, demo, tmp_path_factory)


def test_each_epoch_trains_every_sample_once(results: Results) -> None:
    whole = results.whole()
    assert [step.number for step in whole] == list(range(1, 2 * EPOCH + 1))
    for epoch in (whole[:EPOCH], whole[EPOCH:]):
        assert sorted(samples_of(epoch)) == sorted(DEMO_KEYS)
    assert samples_of(whole[:EPOCH]) != samples_of(whole[EPOCH:]), "every epoch has its own schedule"


def test_the_model_learns(results: Results) -> None:
    whole = results.whole()
    assert whole[-1].loss < 0.9 * whole[0].loss


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_stopped_run_did_what_the_whole_one_did(results: Results, checkpoint: int) -> None:
    runs = results.runs(checkpoint)
    assert runs.stopped == runs.whole[: len(runs.stopped)]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_resumed_run_goes_on_exactly(results: Results, checkpoint: int) -> None:
    runs = results.runs(checkpoint)
    assert len(runs.stopped) == checkpoint + 1
    assert runs.resumed == runs.whole[checkpoint:]
    assert runs.resumed[0] == runs.stopped[-1], "the step after the checkpoint is made again"


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_samples_before_and_after_the_checkpoint_are_the_epochs(results: Results, checkpoint: int) -> None:
    runs = results.runs(checkpoint)
    before = samples_of(runs.stopped[:-1])
    assert sorted(before + samples_of(runs.resumed)) == sorted([*DEMO_KEYS, *DEMO_KEYS])


def test_a_run_can_go_on_with_other_steps(results: Results) -> None:
    """One micro-batch per step instead of two; the rest of the epoch is rescheduled."""
    runs = results.runs(CHECKPOINTS[0])
    before, after = runs.stopped[:-1], runs.in_other_steps
    trained = samples_of(before) + samples_of(after)
    assert len(trained) == 2 * len(DEMO_KEYS)
    assert sorted(trained[: len(DEMO_KEYS)]) == sorted(trained[len(DEMO_KEYS) :]) == sorted(DEMO_KEYS)
    assert len(after) > len(runs.resumed)
