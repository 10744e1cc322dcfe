"""Two processes, two or four stages: pipelined training is training of the whole model.

All cases run in one pair of processes (`pipeline_work`), because starting them takes most of the time.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pipeline_ranks import run_together

from contract.media_files import write_media
from count_samples import python_path

pytestmark = pytest.mark.system

WORK = Path(__file__).with_name("pipeline_work.py")
MODELS = ("qwen2_vl", "qwen3_vl")
CASES = [
    *(
        f"{name} {kind} {shape}"
        for name in MODELS
        for kind in ("gpipe", "1f1b")
        for shape in ("padded", "packed")
    ),
    *(f"{name} 1f1b {kind}" for name in MODELS for kind in ("varlen", "fakes", "checkpointed")),
    *(f"{name} interleaved" for name in MODELS),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("pipeline")
    media = folder / "media"
    media.mkdir()
    write_media(media)
    commands = [[sys.executable, str(WORK), str(rank), str(media)] for rank in range(2)]
    run_together(commands, folder, python_path(folder), timeout=300)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def noise_of(case: str) -> str:
    """The case whose noise is measured: the whole model does the same steps whatever the schedule is."""
    name, *_, kind = case.split()
    measured = {"padded": "gpipe padded", "checkpointed": "gpipe padded", "packed": "gpipe packed"}
    measured |= {"varlen": "gpipe packed"}
    return f"{name} {measured[kind]}" if kind in measured else case


def check(
    parity: Any, found: dict[str, Any], noise: dict[str, Any], rank: int, whats: tuple[str, ...]
) -> None:
    for what in whats:
        if found["compared"][what]:
            numbers = (found["difference"][what], noise["floor"][what], noise["control"][what])
            parity.check(f"{what} (rank {rank})", *numbers)


@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_and_weights_of_three_steps_are_those_of_one_process(
    ranks: list[dict[str, Any]], case: str, parity: Any
) -> None:
    for number, rank in enumerate(ranks):
        assert len(rank[case]["losses"]) == 3
        check(parity, rank[case], rank[noise_of(case)], number, ("loss", "evaluation", "gradient", "weight"))
    assert ranks[0][case]["supervised"] == ["visual", "embed_tokens", "layers"]
    assert ranks[1][case]["supervised"] == ["layers", "lm_head"]
    assert ranks[0][case]["losses"] == ranks[1][case]["losses"]
    assert ranks[0][case]["losses"][2] < ranks[0][case]["losses"][0] - 1, "nothing is supervised"
    first, last = (rank[case]["compared"] for rank in ranks)
    assert (first["loss"], last["loss"]) == (first["evaluation"], last["evaluation"]) == (0, 3)
    assert min(first["gradient"], first["weight"], last["gradient"], last["weight"]) > 20


@pytest.mark.parametrize("name", MODELS)
def test_the_cursor_starts_again_after_a_schedule_has_probed_shapes(
    ranks: list[dict[str, Any]], name: str, parity: Any
) -> None:
    found = ranks[0][f"{name} by hand"]
    assert found["cursor"] == [1, 1, 2, 3, 1, 2, 3], "a probe and three microbatches, then three microbatches"
    for number, rank in enumerate(ranks):
        by_hand = rank[f"{name} by hand"]
        check(parity, by_hand, by_hand, number, ("loss", "gradient"))


def test_a_stage_that_fails_leaves_no_staged_tensor_and_no_activation_on_any_rank(
    ranks: list[dict[str, Any]],
) -> None:
    assert "failed to run forward" in ranks[0]["failing"]["error"]
    assert "closed by peer" in ranks[1]["failing"]["error"]
    for rank in ranks:
        assert rank["failing"]["left"] == []
        assert rank["failing"]["schedules"] == 0
