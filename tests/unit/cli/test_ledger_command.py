"""``packhorse ledger`` as a user types it."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import packhorse
from contract.processors import processor
from count_samples import chat, write_meta, write_rows
from packhorse.cli.app import app
from packhorse.ledger import Ledger
from packhorse.types import Drop


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["ledger", *map(str, arguments)])


def write_rank(folder: Path, number: int) -> Path:
    ledger = Ledger()
    ledger.record(Drop(f"coco/{number}", "media", "missing_media", "no file a.png", "dropped", "coco"))
    ledger.record(Drop(f"coco/{number}", "media", "missing_media", "no file b.png", "dropped", "coco"))
    ledger.record(Drop(f"chats/{number}", "convert", "unknown_role", "turn 1\nis [bold]odd", "cut", "chats"))
    ledger.record_rows("chats", np.arange(30), stage="select", reason="not_sampled")
    ledger.save(folder / f"rank{number}.jsonl")
    return folder / f"rank{number}.jsonl"


def test_a_ledger_is_a_table_and_a_list_of_one_line_an_entry(tmp_path: Path) -> None:
    path = write_rank(tmp_path, 0)
    command = [sys.executable, "-m", "packhorse", "ledger", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.search(r"^ *not_sampled +30 +0 +30 *$", result.stdout, re.MULTILINE)
    assert "coco/0  dropped  missing_media  no file a.png\n" in result.stdout
    assert "chats/0  cut  unknown_role  turn 1 is [bold]odd\n" in result.stdout
    assert "… and 13 more (--limit 0 lists all)\n" in result.stdout
    assert "33 entries; 31 samples were dropped or replaced.\n" in result.stdout
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", result.stdout)
    assert run(path, "--limit", 0).stdout.count("\nchats/") == 31


def test_the_ranks_of_a_folder_are_merged_and_counted_by_anything(tmp_path: Path) -> None:
    write_rank(tmp_path, 0)
    write_rank(tmp_path, 1)
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    report = json.loads(run(tmp_path, "--by", "dataset", "--json", "--limit", 1).stdout)
    assert report["files"] == [f"{tmp_path}/rank0.jsonl", f"{tmp_path}/rank1.jsonl"]
    assert report["counts"] == {"chats": 32, "coco": 4}
    assert report["actions"] == {"dropped": 34, "cut": 2}
    assert (report["entries"], report["lost"], report["by"]) == (36, 32, "dataset")
    assert [one["key"] for one in report["listed"]] == ["coco/0"]
    for by in ("stage", "action", "reason"):
        counts = json.loads(run(tmp_path, "--by", by, "--json").stdout)["counts"]
        assert sum(counts.values()) == 36
        assert "36 entries in 2 files" in run(tmp_path, "--by", by).stdout


def test_entries_can_be_chosen_by_reason_dataset_and_row(tmp_path: Path) -> None:
    path = write_rank(tmp_path, 5)
    assert json.loads(run(path, "--reason", "missing_media", "--json").stdout)["entries"] == 2
    assert json.loads(run(path, "--dataset", "chats", "--json").stdout)["entries"] == 31
    (entry,) = json.loads(run(path, "--key", "chats/5", "--reason", "unknown_role", "--json").stdout)[
        "listed"
    ]
    assert entry["detail"] == "turn 1\nis [bold]odd"
    none = run(path, "--reason", "too_long")
    there = "existing reasons: not_sampled (30), missing_media (2), unknown_role (1)"
    assert (none.exit_code, none.stdout) == (0, f"33 entries, none with reason too_long; {there}\n")
    assert run(path, "--key", "coco/9").stdout == "33 entries, none with key coco/9\n"
    assert "none with reason a and dataset b\n" in run(path, "--reason", "a", "--dataset", "b").stdout
    report = json.loads(run(path, "--key", "coco/9", "--json").stdout)
    assert (report["entries"], report["all_entries"], report["lost"]) == (0, 33, 0)
    one = run(path, "--reason", "unknown_role").stdout
    assert one.endswith("1 entry; 0 samples were dropped or replaced.\n")


def test_a_ledger_without_an_entry_says_that_nothing_was_dropped(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text("")
    result = run(tmp_path / "ledger.jsonl", "--reason", "too_long")
    assert result.stdout == "no entry: nothing was dropped, replaced, cut or repaired\n"


@pytest.mark.parametrize("empty_line", [False, True], ids=["no empty line", "an empty line"])
@pytest.mark.parametrize("ratio", [1.0, 0.6])
def test_rows_that_a_loader_drops_are_found_with_their_place_in_the_file(
    tmp_path: Path, ratio: float, empty_line: bool
) -> None:
    rows: list[Any] = [chat(number) for number in range(60)]
    for number in range(0, 60, 7):
        rows[number] = "{broken"
    rows[30] = chat(30) | {"messages": [{"role": "user", "content": "?" * 900}, *chat(30)["messages"][1:]]}
    write_rows(tmp_path / "chats.jsonl", ["", *rows] if empty_line else rows)  # an empty line is not a row

    def place(row: int) -> str:  # lines are not counted where that would mean to read the file
        return f"{tmp_path}/chats.jsonl" + (f", row {row} (byte " if empty_line else f":{row + 1} (byte ")

    meta = write_meta(tmp_path, {"chats": {"file_name": "chats.jsonl", "sample_ratio": ratio}})
    ledger = tmp_path / "run"
    settings = {"pack_size": 256, "max_bad_share": None, "ledger_dir": ledger}
    next(
        iter(packhorse.load(str(meta), processor("qwen2_vl"), model="unchecked", **settings))
    )  # files are written from then on
    listed = json.loads(run(ledger, "--json", "--limit", 0).stdout)["listed"]
    planned = [one for one in listed if one["stage"] == "plan"]
    assert {one["reason"] for one in planned} >= {"malformed_row"}
    assert ratio < 1 or "too_long" in {one["reason"] for one in planned}
    for one in planned:
        row = int(one["key"].partition("/")[2])
        assert re.search(rf"; {re.escape(place(row))}\d+\)$", one["detail"]), one
    if ratio == 1.0:
        shown = run(ledger, "--key", "chats/7").stdout
        assert "chats/7  dropped  malformed_row  not valid JSON" in shown
        assert place(7) in shown


def test_errors_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "no.jsonl", "no such file or directory"),
        (tmp_path, "no ledger in this"),
    ):
        result = run(path)
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert line.startswith("packhorse ledger: ")
        assert message in line
    (tmp_path / "rows.jsonl").write_text("not a ledger\n")
    assert "not a ledger entry" in run(tmp_path / "rows.jsonl").stderr
    assert run(tmp_path, "--by", "colour").exit_code == 2


def test_an_entry_that_a_crash_cut_off_is_passed_over(tmp_path: Path) -> None:
    path = write_rank(tmp_path, 0)
    path.write_bytes(path.read_bytes() + b'{"key": "coco/9", "st')
    assert json.loads(run(path, "--json").stdout)["entries"] == 33
