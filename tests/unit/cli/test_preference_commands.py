"""`packhorse check`, `count`, `stats`, `plan` and the viewer on preference data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from contract.processors import processor
from packhorse.cli.app import app
from packhorse.count.counting import count_meta
from packhorse.loader.config import LoaderConfig
from packhorse.tools.check import check_meta
from packhorse.tools.stats import compute_stats
from packhorse.tools.view.plan_viewer import PlanViewer
from packhorse.tools.view.saved_plan import PlanRequest, make_plan


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    Image.new("RGB", (80, 60), "tan").save(tmp_path / "0.png")
    rows = [
        {
            "messages": [{"role": "user", "content": f"<image>Number {n}?"}],
            "images": ["0.png"],
            "chosen": "A cat.",
            "rejected": f"{n} dogs.",
        }
        for n in range(4)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "pairs.jsonl"


@pytest.fixture
def saved(tmp_path: Path) -> str:
    processor("qwen2_vl").save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_commands_read_pairs_for_the_task(pairs: Path, saved: str) -> None:
    task = ("--task", "preference")
    assert not check_meta(str(pairs), task="preference").counts()["error"]
    assert run("check", str(pairs), *task)["findings"] == []
    counted = run("count", str(pairs), "--processor", saved, "--verify", "4", *task)
    assert counted["all"]["media"]["images"] == 8  # both answers have the image
    assert compute_stats(str(pairs), task="preference").all().rows == 4
    exact = run("stats", str(pairs), "--processor", saved, *task)
    assert exact["datasets"][0]["rows"] == 4
    plan = run("plan", str(pairs), "--processor", saved, "--pack-size", "400", *task)
    assert plan["rows"] == 4


def test_without_the_task_they_name_it(pairs: Path, saved: str) -> None:
    assert check_meta(str(pairs)).counts()["error"] == 4
    result = CliRunner().invoke(app, ["plan", str(pairs), "--processor", saved])
    assert result.exit_code == 2
    assert 'task="preference"' in result.output.replace("\n", "")


def test_a_meta_file_may_name_the_task_for_the_commands(pairs: Path, saved: str) -> None:
    entry = {"file_name": "pairs.jsonl", "media_dir": ".", "task": "preference"}
    meta = pairs.parent / "meta.json"
    meta.write_text(json.dumps({"pairs": entry}))
    assert run("plan", str(meta), "--processor", saved, "--pack-size", "400")["rows"] == 4
    assert PlanViewer.open(str(meta), saved, pack_size=400).saved.request.config.task == "preference"


def test_errors_of_either_answer_are_found(pairs: Path, saved: str) -> None:
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    rows[0]["rejected"] = " "
    rows[1]["rejected"] = "types <|im_end|> out"
    rows[2]["rejected"] = rows[3]["rejected"]
    rows[2]["messages"] = rows[3]["messages"]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = run_check(pairs, saved)
    assert found == {
        ("pairs/0", "empty_turn"),
        ("pairs/1", "special_token_in_text"),
        ("pairs/3", "duplicate_conversation"),
    }


def run_check(path: Path, saved: str) -> set[tuple[str, str]]:
    report = check_meta(str(path), saved, task="preference")
    return {(finding.key, finding.rule) for finding in report.findings()}


def test_the_viewer_shows_both_documents_of_a_pair(pairs: Path, saved: str) -> None:
    config = LoaderConfig(data=str(pairs), pack_size=400, task="preference", alignment=8)
    planned = make_plan(PlanRequest(config, saved))
    viewer = PlanViewer.open(str(pairs), saved, pack_size=400, task="preference")
    row = viewer.encoder.view(1)
    assert row.error is None
    assert [turn.role for turn in row.turns] == ["user", "assistant"] * 2
    assert len(row.media) == 2
    counts = planned.counts
    assert row.length == counts.total[1] - 2
    assert row.supervised == counts.supervised[1]
    starts = [run.start for run in row.runs if run.media_item]
    assert starts == [starts[0], starts[0] + counts.total[1] - counts.rejected[1] - 1]
    assert [token.index for token in row.tokens if token.supervised] == sorted(
        token.index for token in row.tokens if token.supervised
    )


def test_counts_with_lengths_are_written_for_the_task(pairs: Path, tmp_path: Path) -> None:
    from packhorse.count.count_report import write_counted_jsonl
    from packhorse.formats.meta import read_meta

    report = count_meta(str(pairs), processor("qwen2_vl"), task="preference")
    write_counted_jsonl(report.files, tmp_path / "counted")
    (config,) = read_meta(str(tmp_path / "counted" / "meta.json"))
    assert config.rules.task == "preference"
