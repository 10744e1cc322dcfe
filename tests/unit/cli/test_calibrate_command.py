"""``packhorse calibrate`` as a user types it, on a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from packhorse.cli.app import app
from packhorse.cli.demo.data import tiny_model, tiny_processor
from packhorse.plan.cost_model import CostWeights
from packhorse.tools import calibrate


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Qwen2-VL and its processor."""
    folder = tmp_path_factory.mktemp("model")
    processor = tiny_processor()
    processor.save_pretrained(folder)
    tiny_model(processor).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def simulated_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all packs, but let them take a time for each token and image, whatever else the machine does."""
    run_pack = calibrate._time_pack

    def time_pack(model: Any, batch: Any, device: Any) -> float:
        assert run_pack(model, batch, device) > 0
        return 1e-3 + 1e-5 * batch.info.tokens + 2e-3 * sum(batch.info.num_images)

    monkeypatch.setattr(calibrate, "_time_pack", time_pack)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["calibrate", *map(str, arguments)])


def test_measured_weights_are_written_and_a_plan_uses_them(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "weights.json"
    result = run("--model", model, "--out", out, "--pack-size", 512, "--seconds", 0.1, "--device", "cpu")
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    weights = CostWeights.of(out)
    assert weights.unit == "seconds"
    assert weights.token > 0
    assert written["measured"]["packs"] > 20
    assert written["measured"]["device"] == "cpu"
    assert "from operations" in result.stdout
    assert f"wrote {out}" in result.stdout.replace("\n", "")

    rows = [
        {"messages": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so " * n}]}
        for n in range(1, 30)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    plan = ["plan", str(tmp_path / "rows.jsonl"), "--processor", str(model), "--pack-size", "128"]
    for option, basis in (([], "operations"), (["--cost-weights", str(out)], "measured times")):
        planned = CliRunner().invoke(app, [*plan, *option])
        assert planned.exit_code == 0, planned.output
        assert f"(Predicted from {basis}.)" in planned.stdout
        report = json.loads(CliRunner().invoke(app, [*plan, *option, "--json"]).stdout)
        assert report["cost_basis"] == basis


def test_a_file_that_cannot_be_written_is_an_error_before_anything_is_measured(
    model: Path, tmp_path: Path
) -> None:
    result = run("--model", model, "--out", tmp_path / "no such folder" / "weights.json")
    assert result.exit_code == 2
    assert "no such folder" in result.output
    assert run("--model", tmp_path, "--out", tmp_path / "weights.json").exit_code == 2
