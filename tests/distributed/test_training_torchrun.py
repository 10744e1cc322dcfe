"""Two gloo processes under torchrun: plain loops with DDP and FSDP2, the Trainer, a rank without media."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.torchvision_ops import make_torchvision_importable
from distributed.training_runs import (
    DEMO_KEYS,
    Step,
    free_ports,
    run_example,
    samples_of,
    steps_of,
    torchrun,
    write_demo,
)
from noise_floor import largest_difference, noise_floor, relative_difference

pytestmark = pytest.mark.system

RUNS = ("ddp", "fsdp2", "trainer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("torchrun")
    make_torchvision_importable()
    write_demo(made)
    torchrun(Path(__file__).with_name("training_work.py"), [str(made), *map(str, free_ports(8))], made)
    return made


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, tuple[list[Step], list[Step]]]:
    """Of each kind the steps of a whole run of two epochs, and those of one that went on after step 2."""
    return {name: (steps_of(folder / name / "whole"), steps_of(folder / name / "resumed")) for name in RUNS}


@pytest.fixture(scope="module")
def eager(folder: Path) -> list[Step]:
    """The plain loop with another attention kernel."""
    return steps_of(folder / "eager" / "whole")


def check_losses(parity: Any, found: list[Step], expected: list[Step], eager: list[Step]) -> None:
    """Compare with the noise between two kernels; the control are the losses of the step after each."""
    losses = [[step.loss for step in steps] for steps in (found, expected, eager, expected[1:])]
    assert [step.samples for step in eager] == [step.samples for step in expected]
    number = len(found)
    parity.check(
        "loss",
        largest_difference(losses[0], losses[1][:number]),
        noise_floor(losses[1][:number], losses[2][:number]),
        largest_difference(losses[3][:number], losses[1][: len(losses[3][:number])]),
    )


@pytest.mark.parametrize("name", RUNS)
def test_two_epochs_train_every_sample_twice(runs: dict[str, Any], name: str) -> None:
    whole, _ = runs[name]
    trained = samples_of(whole)
    assert len(whole) % 2 == 0
    for epoch in (whole[: len(whole) // 2], whole[len(whole) // 2 :]):
        assert sorted(samples_of(epoch)) == sorted(DEMO_KEYS)
    assert len(trained) == 2 * len(DEMO_KEYS)


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_goes_on_with_the_same_samples_and_losses(
    runs: dict[str, Any], name: str, parity: Any
) -> None:
    whole, resumed = runs[name]
    assert [step.number for step in resumed] == list(range(3, len(whole) + 1))
    for step, expected in zip(resumed, whole[2:], strict=True):
        assert step.samples == expected.samples
    check_losses(parity, resumed, whole[2:], whole[2:])  # the same computation: nothing but rounding
    assert whole[-1].loss < whole[0].loss


def test_replicated_and_sharded_training_are_the_same(
    runs: dict[str, Any], eager: list[Step], parity: Any
) -> None:
    replicated, sharded = runs["ddp"][0], runs["fsdp2"][0]
    assert [step.samples for step in replicated] == [step.samples for step in sharded]
    check_losses(parity, sharded, replicated, eager)


def test_the_trainer_counts_tokens_as_the_plain_loop_does(
    runs: dict[str, Any], eager: list[Step], parity: Any
) -> None:
    """Before its first update; then it clips gradients, which the plain loop does not."""
    check_losses(parity, runs["trainer"][0][:1], runs["ddp"][0], eager)


@pytest.mark.parametrize("name", ["accelerate", "lightning"])
def test_accelerate_and_lightning_train_as_the_plain_loop_does(
    folder: Path, runs: dict[str, Any], name: str, eager: list[Step], parity: Any
) -> None:
    found, expected = steps_of(folder / name), runs["ddp"][0]
    assert len(found) == len(expected) // 2, "one epoch"
    for step, other in zip(found, expected, strict=False):
        assert step.samples == other.samples
    check_losses(parity, found, expected, eager)


def test_ranks_of_the_trainer_have_the_same_weights(folder: Path) -> None:
    first, second = (json.loads((folder / "trainer" / f"weights-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second


def test_a_run_of_two_ranks_goes_on_alone(folder: Path, runs: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(folder / "trainer" / "checkpoint-2", tmp_path / "checkpoint-2")
    demo = folder / "demo"
    words = ("--model", str(demo / "model"), "--data", str(demo / "data" / "meta.json"), "--epochs", "2")
    run_example("train_trainer", tmp_path, *words, "--resume")
    before, after = samples_of(runs["trainer"][0][:2]), samples_of(steps_of(tmp_path))
    rest = len(DEMO_KEYS) - len(before)
    assert 0 < rest < len(DEMO_KEYS)
    assert sorted(before + after[:rest]) == sorted(after[rest:]) == sorted(DEMO_KEYS)


@pytest.fixture(scope="module")
def text_only(folder: Path) -> tuple[list[Any], list[Any], list[Any]]:
    """The steps of rank 0, of rank 1, and of one process that has both."""
    read = [torch.load(folder / "text_only" / f"{name}.pt") for name in ("rank-0", "rank-1", "single")]
    return read[0], read[1], read[2]


def test_without_placeholders_a_rank_would_have_no_media_where_another_has(text_only: Any) -> None:
    *_, single = text_only
    differing = [step for step in single if step["keys"][0] != step["keys"][1]]
    assert len(differing) == 1, "the step that would hang"
    assert sorted(map(len, differing[0]["keys"])) == [0, 1]


def test_every_rank_has_the_same_media_keys_in_every_step(text_only: Any) -> None:
    first, second, single = text_only
    assert len(first) == len(second) == len(single) == 3
    for mine, yours, both in zip(first, second, single, strict=True):
        assert mine["keys"] == yours["keys"]
        assert [mine["samples"], yours["samples"]] == both["samples"], "otherwise nothing is compared"


def test_gradients_with_a_placeholder_are_those_of_one_process_without(
    folder: Path, text_only: Any, parity: Any
) -> None:
    first, second, single = text_only
    eager, wrong = (torch.load(folder / "text_only" / f"{name}.pt") for name in ("eager", "mean_of_means"))
    for mine, yours, both in zip(first, second, single, strict=True):
        for name, gradient in mine["gradients"].items():
            assert torch.equal(gradient, yours["gradients"][name])
            if name not in both["gradients"]:
                assert not bool(gradient.any()), f"{name} has a gradient in a step without media"
    found, expected, other, mean_of_means = (
        [step["gradients"] for step in steps] for steps in (first, single, eager, wrong)
    )
    parity.check(
        "gradients",
        relative_difference(found, expected),
        noise_floor(expected, other, measure=relative_difference),
        relative_difference(mean_of_means, expected),
    )
