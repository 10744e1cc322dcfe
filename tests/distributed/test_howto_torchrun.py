"""Scripts of how-to pages that need several processes run unchanged under torchrun, and resume."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import packhorse
from contract.processors import processor
from contract.tiny_models import tiny_model
from contract.torchvision_ops import make_torchvision_importable
from distributed.training_runs import torchrun

pytestmark = pytest.mark.system

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"

# The page's model by name is the small one of the contract tests.
SMALL_MODEL = """
import os
os.chdir({folder!r})
from contract.torchvision_ops import make_torchvision_importable
make_torchvision_importable()
from contract.processors import processor
from contract.tiny_models import tiny_model
import transformers
transformers.AutoProcessor.from_pretrained = lambda name: processor("qwen2_5_vl")
transformers.AutoModelForImageTextToText.from_pretrained = lambda name: tiny_model("qwen2_5_vl")
"""


def blocks(page: Path, fence: str) -> str:
    """The blocks of a page under a fence: ``python`` writes the rows, ``python title="train.py"`` trains."""
    found = re.findall(rf"^```{re.escape(fence)}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"{page.name} has no block {fence}"
    return "\n".join(found)


def run(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, processes: int) -> str:
    """Run a page's script in a folder; the first time, its rows are written there. Return what it prints."""
    monkeypatch.chdir(folder)
    if not Path("train.jsonl").exists():
        exec(blocks(HOW_TO / page, "python"), {})
    script = SMALL_MODEL.format(folder=str(folder)) + blocks(HOW_TO / page, 'python title="train.py"')
    Path("train.py").write_text(script)
    torchrun(folder / "train.py", [], folder, processes)
    return (folder / "output.txt").read_text()


def steps(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)", output, re.M)}


def validation_loss(output: str) -> float:
    return float(re.findall(r"^validation loss (\S+)", output, re.M)[0])


def test_the_script_of_the_fsdp2_page_trains_evaluates_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    whole = run("fsdp2.md", folder, monkeypatch, processes=2)
    assert list(steps(whole)) == list(range(1, len(steps(whole)) + 1))
    assert len(steps(whole)) > 2
    assert "24 delivered" in whole

    # One process evaluates the weights that two have saved: the loss is the same.
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    last = max(steps(whole))
    dcp_to_torch_save(folder / "checkpoints" / f"step-{last}", folder / "whole.pt")
    saved = torch.load(folder / "whole.pt", weights_only=False)
    assert json.loads(saved["run"])["step"] == last
    make_torchvision_importable()
    model = tiny_model("qwen2_5_vl", seed=1)
    model.load_state_dict(saved["model"])
    packhorse.prepare(model)
    rows = {"validation": {"file_name": "validation.jsonl", "media_dir": "."}}
    loader = packhorse.load(rows, processor("qwen2_5_vl"), model=model, pack_size=256)
    assert packhorse.evaluate(model, loader).loss == pytest.approx(validation_loss(whole), abs=1e-4)

    # A run that was killed while it wrote its last checkpoints resumes after step 2, on one rank.
    for checkpoint in (folder / "checkpoints").iterdir():
        if checkpoint.name != "step-2":
            (checkpoint / ".metadata").unlink()
    resumed = run("fsdp2.md", folder, monkeypatch, processes=1)
    assert "resumed after step 2" in resumed
    assert min(steps(resumed)) == 3
    assert "24 delivered" in resumed
    shutil.rmtree(folder)
