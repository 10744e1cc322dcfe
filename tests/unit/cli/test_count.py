"""``packhorse count`` as a user types it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from count_samples import leavings, save_processor, sidecars, write_chats
from packhorse.cli.app import app
from packhorse.cli.demo_data import write_demo_data
from packhorse.tokens.count import TokenCounter


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_processor(tmp_path_factory.mktemp("processor"))


def run(*arguments: object) -> Result:
    # One worker: the work is done in this process. Two are for the tests of counting and of faults.
    return CliRunner().invoke(app, ["count", *map(str, arguments), "--workers", "1"])


def test_a_count_shows_a_table_of_the_data_sets_and_the_bad_rows_and_verifies(
    tmp_path: Path, saved: str
) -> None:
    meta = write_demo_data(tmp_path)
    result = run(meta, "--processor", saved, "--verify", 40)
    assert result.exit_code == 0, result.output
    for name in ("charts", "chats", "clips", "all"):
        assert re.search(rf"^ *{name} +[0-9]", result.stdout, re.MULTILINE)
    assert "charts: 1 malformed_row, as\n  charts/7: not valid JSON" in result.stdout
    assert "40 rows counted (" in result.stdout
    assert "verified 39 rows: all as the real processor makes them" in result.stdout
    assert "charts/13" in result.stdout  # cannot be decoded
    assert len(sidecars(tmp_path)) == 3
    result = run(meta, "--processor", saved)
    assert "0 rows counted (" in result.stdout
    assert "40 taken over" in result.stdout


def test_the_report_can_be_had_as_json(tmp_path: Path, saved: str) -> None:
    meta = write_demo_data(tmp_path)
    result = run(
        meta, "--processor", saved, "--json", "--dataset", "charts", "--write-jsonl", tmp_path / "out"
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    (charts,) = report["datasets"]
    assert charts["name"] == "charts"
    assert charts["rows"] == report["counted_rows"] == 24
    assert charts["bad"] == {"malformed_row": 1}
    assert charts["total"] == sum(charts["tokens"].values()) > charts["supervised"] > 0
    assert Path(charts["sidecar"]) in sidecars(tmp_path)
    assert report["written"] == [str(tmp_path / "out" / "charts.jsonl")]
    row = json.loads((tmp_path / "out" / "charts.jsonl").read_text().splitlines()[0])
    (image,) = row["mm_inputs_meta"]["images_meta"]
    assert image["n_tokens"] > 0
    assert image["width"] * 3 == image["height"] * 4
    assert row["_text_tokens"] > 0


def test_a_count_that_differs_from_the_real_processor_fails(
    tmp_path: Path, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TokenCounter._result
    monkeypatch.setattr(TokenCounter, "_result", lambda self, total, *rest: right(self, total + 2, *rest))
    result = run(write_chats(tmp_path, 5), "--processor", saved, "--verify", 2)
    assert result.exit_code == 1
    assert result.stdout.count("differs: chats/") == 2
    assert "total predicted" in result.stdout
    assert "2 differ from the real processor" in result.stdout


def failure(result: Result) -> str:
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("packhorse count: ")
    return line


def test_errors_are_one_line_and_leave_nothing_behind(tmp_path: Path, saved: str) -> None:
    meta = write_demo_data(tmp_path)
    assert "no such folder" in failure(run(meta, "--processor", tmp_path / "nothing"))
    assert "no/meta.json" in failure(run(tmp_path / "no" / "meta.json", "--processor", saved))
    assert "no dataset fish" in failure(run(meta, "--processor", saved, "--dataset", "fish"))
    assert "unknown engine 'spark'" in failure(run(meta, "--processor", saved, "--engine", "spark"))
    assert "goes with the engine 'ray'" in failure(run(meta, "--processor", saved, "--ray-address", "auto"))
    (tmp_path / "media").rename(tmp_path / "elsewhere")
    assert "media_dir" in failure(run(meta, "--processor", saved))
    mute = save_processor(tmp_path / "mute", change=lambda one: setattr(one, "chat_template", None))
    assert "has no chat template" in failure(run(write_chats(tmp_path / "chats", 3), "--processor", mute))
    assert sidecars(tmp_path) == leavings(tmp_path) == []


def test_the_command_line_starts_as_a_module_and_runs_the_demo(tmp_path: Path) -> None:
    called = subprocess.run(
        [sys.executable, "-m", "packhorse", "--help"], capture_output=True, text=True, check=True
    )
    assert "count" in called.stdout
    assert "demo" in called.stdout
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "demo")])
    assert result.exit_code == 0
    assert "40 rows in the files, 38 delivered, 2 left out." in result.stdout
