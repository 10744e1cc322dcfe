"""Ranks that measure the time of their steps agree on the weights of the next epoch."""

from pathlib import Path
from typing import Any

import pytest

from distributed.test_loader_gloo import codes, read_results, run_all

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """What each of three ranks found, and their log."""
    folder: Path = tmp_path_factory.mktemp("measured")
    run = {"job": "measure", "world": 3, "folder": str(folder / "run")}
    written = run_all(folder, [run])
    assert codes(run) == [0, 0, 0], written[-12_000:]
    return read_results(run), written


@pytest.mark.parametrize("how", ["slower", "waiting"])
def test_all_ranks_have_the_same_weights_and_schedule(
    measured: tuple[list[dict[str, Any]], str], how: str
) -> None:
    ranks = [found[how] for found in measured[0]]
    assert ranks[0]["weights"]["unit"] == "seconds"
    for rank in ranks[1:]:
        assert (rank["weights"], rank["state"]) == (ranks[0]["weights"], ranks[0]["state"])
        assert rank["straggler"] == ranks[0]["straggler"]
    keys = [key for rank in ranks for key in rank["keys"]]
    assert len(keys) == len(set(keys)) == 160


@pytest.mark.parametrize("how", ["slower", "waiting"])
def test_the_weights_predict_the_time_of_a_rank_alone(
    measured: tuple[list[dict[str, Any]], str], how: str
) -> None:
    for found in measured[0]:
        assert found[how]["correlation"] > 0.97


def test_a_rank_that_is_slower_is_named(measured: tuple[list[dict[str, Any]], str]) -> None:
    lines = [line for line in measured[1].splitlines() if "take longer than the others" in line]
    assert ": 2 (" in lines[0]
