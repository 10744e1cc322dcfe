"""The example of pipeline parallelism runs as its first lines say."""

import re
import sys
from pathlib import Path

import pytest
import torch
from pipeline_ranks import run_together

from contract.processors import processor  # noqa: F401 - transformers with a CPU torch
from count_samples import python_path
from distributed.training_runs import EXAMPLES, write_demo

pytestmark = pytest.mark.system


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("interleaved", 4)])
def test_the_example_learns_with_torchrun_and_leaves_the_whole_model(
    schedule: str, stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(EXAMPLES / "pipeline_parallel.py"), "out", "--schedule", schedule]
    options = ["--pack-size", "256", "--epochs", "2", "--lr", "3e-3"]
    write_demo(tmp_path, layers=stages)
    monkeypatch.setenv("PACKHORSE_CACHE", str(tmp_path / "cache"))
    written = run_together([[*torchrun, *script, *options]], tmp_path, python_path(tmp_path), timeout=200)
    losses = [float(loss) for loss in re.findall(r"step \d+ loss ([\d.]+)", written)]
    assert len(losses) >= 6
    assert losses[-1] < losses[0] - 1
    assert float(re.findall(r"evaluation loss ([\d.]+)", written)[0]) < losses[0] - 1
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "demo" / "model")
    whole = model.state_dict()
    saved = [torch.load(tmp_path / "out" / f"stage-{stage}.pt") for stage in range(stages)]
    assert sum(map(len, saved)) == len(whole)
    together = {name: weight for part in saved for name, weight in part.items()}
    assert {name: w.shape for name, w in together.items()} == {name: w.shape for name, w in whole.items()}
    assert not any(torch.equal(together[name], whole[name]) for name in whole if "weight" in name)
