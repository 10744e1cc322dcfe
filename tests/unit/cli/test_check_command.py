"""``packhorse check`` as a user types it."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from count_samples import python_path, save_processor, write_chats, write_meta, write_rows
from demo_data import write_demo_data
from packhorse.cli.app import app
from packhorse.ledger import Ledger
from unit.check.planted import MAX_LENGTH, write_clean, write_planted
from warm_python import run_warm

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_processor(tmp_path_factory.mktemp("processor"))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["check", *map(str, arguments), "--num-workers", "1"])


def as_typed(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "packhorse", "check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_check_shows_a_table_and_the_rows_with_file_and_line_and_fails(tmp_path: Path) -> None:
    result = as_typed(write_demo_data(tmp_path))
    assert result.returncode == 1
    assert re.search(r"^ *error +broken_media +charts +1 *$", result.stdout, re.MULTILINE)
    assert "error malformed_row in charts: write the row again, or delete it\n" in result.stdout
    assert f"  charts/7, {tmp_path}/charts.jsonl:8 (byte 1105): not valid JSON" in result.stdout
    assert "40 rows of 3 datasets checked, 26 of 27 media decoded, in " in result.stdout
    assert ": 3 errors, 1 warning.\n" in result.stdout
    assert "format of charts: messages (messages, images)\n" in result.stdout
    assert re.search(
        r"^skipped \(needs a processor\): .*\bspecial_token_in_text\b", result.stdout, re.MULTILINE
    )
    assert result.stderr == ""
    assert not CONTROL.search(result.stdout)


def test_a_check_says_what_to_set_if_no_text_mentions_the_media_of_its_row(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]
    rows = [{"messages": turns, "images": ["a.png"]}] * 12
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = run(tmp_path / "rows.jsonl").stdout
    assert output.count("rows: no text mentions the media of its row") == 1
    assert 'set media_position to "first"' in " ".join(output.split())


def test_exit_codes_distinguish_clean_data_warnings_and_errors(tmp_path: Path) -> None:
    clean = write_chats(tmp_path / "clean", 5)
    done = run(clean, "--strict")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "nothing found" in done.stdout
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
    write_rows(tmp_path / "rows.jsonl", [row, row])
    warned = write_meta(tmp_path, {"rows": {"file_name": "rows.jsonl"}})
    assert run(warned).exit_code == 0
    assert run(warned, "--strict").exit_code == 1
    assert run(warned, "--strict", "--ignore", "duplicate_conversation").exit_code == 0


def test_the_report_is_one_json_object_with_stable_names(tmp_path: Path, saved: str) -> None:
    meta = write_demo_data(tmp_path)
    result = run(meta, "--json", "--processor", saved, "--max-length", 150, "--headers")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert list(report) == [
        *("version", "passed", "processor", "max_length", "decoded", "seconds", "rows", "media"),
        *("media_failed", "rows_with_errors", "counts", "datasets", "skipped_rules", "advice", "fixed"),
        "findings",
    ]
    assert (report["passed"], report["decoded"], report["processor"]) == (False, False, saved)
    assert report["counts"]["error"] == sum(one["severity"] == "error" for one in report["findings"])
    assert set(report["skipped_rules"]) == {"duplicate_image"}
    assert report["datasets"][0]["format"] == ["messages"]
    assert report["datasets"][0]["columns"] == {"messages": ["messages"], "images": ["images"]}
    assert report["datasets"][0]["unused"] == []
    (line,) = [one for one in report["findings"] if one["rule"] == "malformed_row"]
    assert line.pop("found").startswith("not valid JSON")
    assert line == {
        "rule": "malformed_row",
        "severity": "error",
        "dataset": "charts",
        "row": 7,
        "key": "charts/7",
        "file": f"{tmp_path}/charts.jsonl",
        "line": 8,
        "location": f"{tmp_path}/charts.jsonl:8 (byte 1105)",
        "advice": "write the row again, or delete it",
    }
    rules = {one["rule"] for one in report["findings"]}
    assert "too_long" in rules
    clean = json.loads(run(write_chats(tmp_path / "chats", 3), "--json").stdout)
    assert (clean["findings"], clean["passed"]) == ([], True)


def test_fix_writes_a_copy_that_passes_and_says_what_it_did(tmp_path: Path) -> None:
    meta = write_demo_data(tmp_path / "data")
    result = run(meta, "--fix", tmp_path / "clean", "--drop-duplicates")
    assert result.exit_code == 1  # of the data as they are
    assert "charts: 24 rows, 21 kept (0 of them repaired), 3 dropped\n" in result.stdout
    assert f"wrote {tmp_path}/clean/meta.json" in result.stdout
    ledger = Ledger.load(tmp_path / "clean" / "ledger.jsonl")
    assert ledger.lost() == 4
    again = run(tmp_path / "clean" / "meta.json", "--strict", "--json")
    assert again.exit_code == 0, again.stdout
    fixed = json.loads(run(meta, "--fix", tmp_path / "more", "--json").stdout)["fixed"]
    assert fixed["ledger"] == f"{tmp_path}/more/ledger.jsonl"
    assert [one["dropped"] for one in fixed["datasets"]] == [3, 0, 0]


def test_the_command_finds_each_of_twenty_kinds_of_defects_in_two_hundred_rows_and_none_in_clean_ones(
    tmp_path: Path, saved: str
) -> None:
    env = {**os.environ, "PYTHONPATH": python_path(tmp_path / "py")}
    wanted = ("--processor", saved, "--max-length", MAX_LENGTH, "--json")
    meta, planted = write_planted(tmp_path / "planted")
    result = run_warm("-m", "packhorse", "check", meta, *wanted, env=env)
    assert (result.returncode, result.stderr) == (1, "")
    report = json.loads(result.stdout)
    assert (report["rows"], report["skipped_rules"]) == (200, {})
    found: dict[int, set[str]] = {}
    for one in report["findings"]:
        found.setdefault(one["row"], set()).add(one["rule"])
        assert (one["key"], one["line"]) == (f"mixed/{one['row']}", one["row"] + 1)
        assert one["location"].startswith(f"{tmp_path}/planted/mixed.jsonl:{one['line']} (byte ")
    assert found == planted.expected
    assert len(set().union(*planted.expected.values())) >= 20
    clean_meta = write_clean(tmp_path / "clean", 200)
    clean = run_warm("-m", "packhorse", "check", clean_meta, *wanted, "--strict", env=env)
    assert (clean.returncode, clean.stderr) == (0, "")
    report = json.loads(clean.stdout)
    assert (report["rows"], report["findings"], report["passed"]) == (200, [], True)


def failure(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("packhorse check: ")
    return line


def test_wrong_usage_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    meta = write_demo_data(tmp_path)
    gone = failure(run(tmp_path / "no" / "meta.json"))
    assert gone == f"packhorse check: {tmp_path}/no/meta.json: no such file or directory"
    assert "no dataset fish" in failure(run(meta, "--dataset", "fish"))
    assert "needs --processor" in failure(run(meta, "--max-length", 5))
    assert "needs --fix DIR" in failure(run(meta, "--drop-duplicates"))
    assert "no rule fishy" in failure(run(meta, "--ignore", "fishy"))
    assert "is not empty" in failure(run(meta, "--fix", tmp_path))
    assert "no such folder" in failure(run(meta, "--processor", tmp_path / "nothing"))
    (tmp_path / "media").rename(tmp_path / "elsewhere")
    assert "media_dir" in failure(run(meta))
    assert run(meta, "--max-length", "many").exit_code == 2
    assert run().exit_code == 2


def test_help_shows_examples_and_exit_codes() -> None:
    shown = CliRunner().invoke(app, ["check", "--help"], env={"COLUMNS": "120"}).stdout
    assert "packhorse check meta.json --fix clean --drop-duplicates" in shown
    assert "Exit code 0: no errors (with --strict: no warnings)" in shown
    for flag in ("--headers", "--strict", "--drop-duplicates", "--json"):
        assert re.search(rf"{flag} +[A-Z]", shown), flag


def test_two_processes_check_with_a_processor_what_one_checks(tmp_path: Path, saved: str) -> None:
    meta = write_chats(tmp_path, 1200)
    env = {**os.environ, "PYTHONPATH": python_path(tmp_path / "py")}
    arguments = (meta, "--processor", saved, "--max-length", 60, "--json")
    two = json.loads(run_warm("-m", "packhorse", "check", *arguments, "--num-workers", 2, env=env).stdout)
    one = json.loads(run(*arguments).stdout)
    assert two["findings"] == one["findings"] != []


def test_a_terminal_shows_how_far_the_work_is(tmp_path: Path) -> None:
    meta = write_chats(tmp_path, 2_000)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "packhorse", "check", str(meta), "--num-workers", "1"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while piece := os.read(ours, 4096):
            shown += piece
    out, _ = process.communicate(timeout=60)
    os.close(ours)
    assert b"checking" in shown
    assert b"2000/2000" in shown
    assert b"2,000 rows of 1 dataset checked" in out


def test_the_same_check_twice_at_once_gives_the_same_twice(tmp_path: Path) -> None:
    meta = write_demo_data(tmp_path)
    command = [sys.executable, "-m", "packhorse", "check", str(meta), "--json"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    one, two = (json.loads(process.communicate(timeout=120)[0]) for process in both)
    assert one["findings"] == two["findings"] != []


def test_an_interrupted_fix_leaves_nothing_after(tmp_path: Path) -> None:
    meta = write_chats(tmp_path / "data", 200_000)
    command = [sys.executable, "-m", "packhorse", "check", str(meta), "--fix", str(tmp_path / "clean")]
    with subprocess.Popen(
        [*command, "--num-workers", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        opened = Path(f"/proc/{process.pid}/fd")
        while not any("chats.jsonl" in os.path.realpath(entry) for entry in opened.iterdir()):
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert err == "packhorse check: stopped; nothing was written\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_what_data_hold_cannot_write_control_codes_to_a_terminal(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<image>"}]
    rows = [{"messages": turns, "images": ["\x1b[31m\nred.png"]}, {"\x1b[2J": [], "long" * 999: 1}]
    write_rows(tmp_path / "rows.jsonl", rows)
    meta = write_meta(tmp_path, {"rows": {"file_name": "rows.jsonl"}})
    for arguments in ((meta,), (meta, "--fix", tmp_path / "clean")):
        result = run(*arguments)
        assert result.exit_code == 1
        assert not CONTROL.search(result.stdout)
        assert max(map(len, result.stdout.splitlines())) < 800
