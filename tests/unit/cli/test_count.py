"""``packhorse count`` as a user types it."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from count_samples import chat, save_processor, sidecars, stale_files, write_chats
from demo_data import write_demo_data
from packhorse.cli.app import app
from packhorse.count.token_counter import TokenCounter


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_processor(tmp_path_factory.mktemp("processor"))


def run(*arguments: object) -> Result:
    # One worker: the work is done in this process. Two are for the tests of counting and of faults.
    return CliRunner().invoke(app, ["count", *map(str, arguments), "--num-workers", "1"])


def test_a_count_shows_a_table_of_the_datasets_and_the_bad_rows_and_verifies(
    tmp_path: Path, saved: str
) -> None:
    meta = write_demo_data(tmp_path)
    result = run(meta, "--processor", saved, "--verify", 40)
    assert result.exit_code == 0, result.output
    for name in ("charts", "chats", "clips", "all"):
        assert re.search(rf"^ *{name} +[0-9]", result.stdout, re.MULTILINE)
    where = f"{tmp_path}/charts.jsonl:8 (byte 1105)"
    assert f"charts: 1 malformed_row\n  charts/7, {where}: not valid JSON" in result.stdout
    assert "column 79 of the row\n" in result.stdout
    assert re.search(
        r"longest rows: charts/\d+ \(\d+\), chats/\d+ \(\d+\), clips/\d+ \(\d+\)\n", result.stdout
    )
    assert "40 rows counted (" in result.stdout
    spent = r"in [\d.]+ s \([\d.]+ s to open processor and files, [\d.]+ s to count\)\."
    assert re.search(spent, result.stdout)
    assert "verified 39 rows: all equal to the real processor" in result.stdout
    assert "charts/13" in result.stdout  # cannot be decoded
    assert len(sidecars(tmp_path)) == 3
    result = run(meta, "--processor", saved)
    assert "0 rows counted, 40 reused" in result.stdout  # and no rate


def test_rows_with_nothing_supervised_and_media_that_were_missing_before_are_reported(
    tmp_path: Path, saved: str
) -> None:
    meta = write_demo_data(tmp_path)
    question = {"messages": [{"role": "user", "content": "Anybody there?"}]}
    with open(tmp_path / "charts.jsonl", "a") as file:
        file.writelines(json.dumps(question) + "\n" for _ in range(4))
    for number in range(4):
        (tmp_path / "media" / f"chart0{number}.png").unlink()
    first = run(meta, "--processor", saved)
    supervised = "charts: no supervised token in 4 of 28 rows, e.g. charts/24, charts/25, charts/26\n"
    assert supervised in first.stdout
    assert "4 missing_media, e.g.\n" in first.stdout
    assert first.stdout.count("no file chart0") == 3
    assert "--retry-bad" not in first.stdout
    second = run(meta, "--processor", saved, "--bad", 10)
    assert second.stdout.count("no file chart0") == 4
    assert "count with --retry-bad" in second.stdout
    none = run(meta, "--processor", saved, "--bad", 0)
    assert "charts: 4 missing_media\n" in none.stdout
    assert "no file chart0" not in none.stdout


@pytest.mark.parametrize("name", ["train.jsonl", "train.json", "train.jsonl.gz"])
def test_a_data_file_is_counted_like_a_meta_file_that_names_it(tmp_path: Path, saved: str, name: str) -> None:
    rows = [chat(number) for number in range(3)]
    lines = json.dumps(rows) if name == "train.json" else "\n".join(map(json.dumps, rows))
    (tmp_path / name).write_bytes(gzip.compress(lines.encode()) if name.endswith(".gz") else lines.encode())
    (tmp_path / "meta.json").write_text(json.dumps({"train": {"file_name": name, "media_dir": "."}}))
    of_file, of_meta = (
        json.loads(run(path, "--processor", saved, "--json").stdout)
        for path in (tmp_path / name, tmp_path / "meta.json")
    )
    assert [dataset["name"] for dataset in of_file["datasets"]] == ["train"]
    assert of_file["all"]["rows"] == 3
    assert of_meta["all"] == {**of_file["all"], "reused": 3}  # they share their count file


def test_help_shows_flags_without_a_value() -> None:
    shown = CliRunner().invoke(app, ["count", "--help"], env={"COLUMNS": "200"}).stdout
    for flag in ("--retry-bad", "--fresh", "--trust-remote-code", "--json"):
        assert re.search(rf"{flag} +[A-Z]", shown), flag


def test_the_report_can_be_had_as_json(tmp_path: Path, saved: str) -> None:
    meta = write_demo_data(tmp_path)
    result = run(
        meta, "--processor", saved, "--json", "--dataset", "charts", "--write-jsonl", tmp_path / "out"
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    (charts,) = report["datasets"]
    assert charts["name"] == "charts"
    assert report["all"] == {name: charts[name] for name in report["all"]}
    assert {"rows", "total", "supervised", "tokens", "media", "bad", "longest_row"} <= set(report["all"])
    assert [row["location"] for row in charts["examples"]] == [f"{tmp_path}/charts.jsonl:8 (byte 1105)"]
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
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("packhorse count: ")
    return line


def test_errors_are_one_line_and_leave_nothing_after(tmp_path: Path, saved: str) -> None:
    meta = write_demo_data(tmp_path)
    assert "no such folder" in failure(run(meta, "--processor", tmp_path / "nothing"))
    error = failure(run(tmp_path / "no" / "meta.json", "--processor", saved))
    assert error == f"packhorse count: {tmp_path}/no/meta.json: no such file or directory"
    assert "no dataset fish" in failure(run(meta, "--processor", saved, "--dataset", "fish"))
    assert "unknown engine 'spark'" in failure(run(meta, "--processor", saved, "--engine", "spark"))
    assert "goes with the engine 'ray'" in failure(run(meta, "--processor", saved, "--ray-address", "auto"))
    (tmp_path / "media").rename(tmp_path / "elsewhere")
    assert "media_dir" in failure(run(meta, "--processor", saved))
    mute = save_processor(tmp_path / "mute", change=lambda one: setattr(one, "chat_template", None))
    assert "has no chat template" in failure(run(write_chats(tmp_path / "chats", 3), "--processor", mute))
    assert sidecars(tmp_path) == stale_files(tmp_path) == []


def test_the_command_line_starts_as_a_module() -> None:
    called = subprocess.run(
        [sys.executable, "-m", "packhorse", "--help"], capture_output=True, text=True, check=True
    )
    assert "count" in called.stdout
    assert "demo" in called.stdout
