"""The demo runs as it is typed, keeps what it promises, and what it says to type next works."""

import json
import re
import resource
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from packhorse.cli.demo.steps import prepare_folder
from packhorse.cli.demo.train import Step, read_trace
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm import PackPlan
from raising import raises_config
from warm_python import run_warm

pytestmark = pytest.mark.system

BROKEN = {
    "charts/7": ("malformed_row", "dropped"),
    "charts/13": ("broken_media", "dropped"),
    "charts/19": ("surplus_placeholder", "cut"),
    "drawings/31": ("missing_media", "dropped"),
    "clips/5": ("broken_media", "dropped"),
    "chats/23": ("too_long", "dropped"),
}


@dataclass(frozen=True)
class Run:
    """The demo's folder, relative to the working directory it was started in, and what it printed."""

    home: Path
    printed: str
    seconds: float  # of computing, by all its processes

    @property
    def out(self) -> Path:
        return self.home / "demo"

    def trace(self, name: str) -> list[Step]:
        return read_trace(self.out / "runs" / name)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run, through the entry point, without any help with torchvision; half a minute of computing."""
    home = tmp_path_factory.mktemp("home")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run(
        [sys.executable, "-m", "packhorse", "demo"], cwd=home, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    computed = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(home, run.stdout, computed)


def test_the_demo_keeps_its_promises_with_two_minutes_of_one_core_at_most(demo: Run) -> None:
    marks = re.findall(r"^(ok|FAIL) ", demo.printed, re.MULTILINE)
    assert marks == ["ok"] * 7
    assert "All checks passed." in demo.printed
    assert "\x1b" not in demo.printed  # no control codes without a terminal
    assert demo.seconds < 120


def test_the_check_of_the_demo_names_every_row_that_is_broken_on_purpose(demo: Run) -> None:
    shown = demo.printed.partition("\n2. ")[2].partition("\n3. ")[0]
    found = re.findall(r"^ +(?:error|warning) +\w+ +(\w+/\d+)", shown, re.MULTILINE)
    assert sorted(found) == sorted([*BROKEN, "chats/41"])


def test_the_killed_run_stopped_in_the_middle_and_the_next_one_went_on_with_the_same_losses(
    demo: Run,
) -> None:
    whole, killed, resumed = map(demo.trace, ("whole", "killed", "resumed"))
    assert len(whole) >= 30
    first = resumed[0].step
    assert 1 < first <= killed[-1].step < len(whole)  # steps after the last checkpoint are made again
    assert killed == whole[: len(killed)]
    assert resumed == whole[first - 1 :]  # numbers, losses to the last bit, rows


def test_the_loss_of_the_demo_falls(demo: Run) -> None:
    losses = [step.loss for step in demo.trace("whole")]
    assert sum(losses[-5:]) < sum(losses[:5]) / 2


def test_every_row_of_the_demo_was_trained_once_or_is_in_the_ledger_with_its_reason(demo: Run) -> None:
    ledger = Ledger.load(demo.out / "ledger.jsonl")
    assert {drop.key: (drop.reason, drop.action) for drop in ledger} == BROKEN
    resumed = demo.trace("resumed")
    steps = [step for step in demo.trace("killed") if step.step < resumed[0].step] + resumed
    trained = [key for step in steps for key in step.samples]
    lost = [key for key, (_, action) in BROKEN.items() if action == "dropped"]
    rows = [
        f"{path.stem}/{number}"
        for path in (demo.out / "data").glob("*.jsonl")
        for number in range(len(path.read_text().splitlines()))
    ]
    assert sorted(trained + lost) == sorted(rows)
    assert ledger.lost() == len(lost)


def test_the_saved_plan_is_the_one_that_was_trained(demo: Run) -> None:
    plan = PackPlan.load(demo.out / "plan.phplan")
    assert len(plan) == len(demo.trace("whole"))
    broken_later = 1  # charts/13: only its pixels are broken
    assert sum(len(step.samples) for step in demo.trace("whole")) == len(plan.indices) - broken_later


def test_the_report_has_its_plots_inside_and_asks_for_nothing_from_elsewhere(demo: Run) -> None:
    page = (demo.out / "report.html").read_text()
    killed = demo.trace("killed")[-1].step + 1
    assert f"killed in step {killed}" in page
    assert page.count("<svg") >= 5
    assert page.count('class="dot resumed"') == len(demo.trace("resumed"))
    for key in BROKEN:
        assert key in page
    assert not re.search(r"(?:src|href)=|url\(|@import", page)
    assert "MISS" not in page


def test_the_command_that_the_last_screen_names_shows_the_plan_in_a_browser(demo: Run) -> None:
    typed = re.search(r"packhorse (view \S+ --ledger \S+)", demo.printed)
    assert typed is not None
    command = [sys.executable, "-u", "-m", "packhorse", *typed[1].split(), "--port", "0"]
    with subprocess.Popen(command, cwd=demo.home, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http://\S+/", server.stdout.readline())
            assert found is not None
            with urllib.request.urlopen(found[0] + "report.json") as answer:
                assert json.load(answer)["packs"] == len(demo.trace("whole"))
            with urllib.request.urlopen(found[0] + "pack/0") as answer:
                assert "<|im_start|>" in answer.read().decode().replace("&lt;", "<").replace("&gt;", ">")
        finally:
            server.terminate()


@pytest.mark.slow
def test_the_other_commands_of_the_last_screen_end_well(demo: Run) -> None:
    shown = demo.printed.partition("Next commands:")[2]
    commands = [line.partition("#")[0].split()[1:] for line in shown.splitlines() if "packhorse" in line]
    ran = [arguments for arguments in commands if arguments[0] != "view"]
    assert len(ran) == 2
    for arguments in ran:
        run = subprocess.run(
            [sys.executable, "-m", "packhorse", *arguments],
            cwd=demo.home,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == (1 if arguments[0] == "check" else 0), run.stderr  # it has found errors


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious.txt").write_text("years of work")
    yield tmp_path
    assert (tmp_path / "data" / "precious.txt").read_text() == "years of work"


def test_a_folder_that_is_not_the_demos_own_is_rejected_and_not_touched(foreign: Path) -> None:
    run = run_warm("-m", "packhorse", "demo", "--out", foreign)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert "is not empty and was not written by the demo" in run.stderr
    assert [path.name for path in foreign.iterdir()] == ["data"]


def test_reasons_in_the_report_sum_to_the_rows_that_are_not_trained(demo: Run) -> None:
    page = (demo.out / "report.html").read_text()
    summary = re.search(
        r"350 rows = 345 trained \+ 5 not trained\. Of these 4 are in no pack, and 1 failed when decoded: "
        r"[\w ]+\. By reason: ([\w, ]+)\.</p>",
        page,
    )
    assert summary is not None
    assert sum(int(part.split()[0]) for part in summary[1].split(", ")) == 5
    assert "Trained, changed or with a remark: 1 surplus_placeholder.</p>" in page
    assert "350 rows = 345 trained once + 4 in no pack + 1 that could not be decoded" in demo.printed


def test_each_step_of_the_demo_names_the_command_that_does_it(demo: Run) -> None:
    titles = re.findall(r"^(\d)\. .*: (\S*packhorse) (\w+ .*)$", demo.printed, re.MULTILINE)
    assert [(number, words.split()[0]) for number, _, words in titles] == [
        *(("2", "check"), ("3", "count"), ("4", "plan"), ("8", "parity"))
    ]
    assert all(shutil.which(typed, path=f"{demo.home}") or shutil.which(typed) for _, typed, _ in titles)
    check = titles[0]
    run = run_warm("-m", "packhorse", *check[2].split(), cwd=demo.home)
    assert "too_long" in run.stdout


def test_a_report_stays_until_there_is_a_new_one(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "demo")
    (tmp_path / "demo" / "report.html").write_text("the last run")
    prepare_folder(tmp_path / "demo")
    assert (tmp_path / "demo" / "report.html").read_text() == "the last run"


def test_a_folder_that_cannot_be_made_is_one_plain_line() -> None:
    run = run_warm("-m", "packhorse", "demo", "--out", "/proc/nowhere/demo")
    assert run.returncode == 2
    assert run.stderr.startswith("packhorse demo: /proc/nowhere")
    assert "Errno" not in run.stderr


def test_the_demos_own_folder_is_overwritten_but_not_what_others_put_there(tmp_path: Path) -> None:
    out = tmp_path / "new" / "demo"
    prepare_folder(out)
    (out / "runs" / "old").mkdir(parents=True)
    (out / "ledger.jsonl").write_text("{}\n")
    (out / "notes.txt").write_text("mine")
    prepare_folder(out)
    assert sorted(path.name for path in out.iterdir()) == [".packhorse-demo", "notes.txt"]
    (tmp_path / "file").write_text("")
    with raises_config(path=tmp_path / "file", match="is a file"):
        prepare_folder(tmp_path / "file")
