"""``benchmarks/run.py`` runs scripts, checks their promises, keeps their records and writes the page."""

import ast
import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from packhorse.errors import ConfigError

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import promises  # noqa: E402
import run as benchmark_run  # noqa: E402
from page import find_scripts, load_records, page_path, render, render_readme  # noqa: E402

KEPT = "promise('speed', 6.2, 6, baseline='the plain way')"
MISSED = "promise('speed', 5.0, 6, baseline='the plain way')"


@dataclass
class Done:
    exit_code: int
    stdout: str
    stderr: str


def run(*arguments: object) -> Done:
    """Run benchmarks/run.py in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = benchmark_run.main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse, after --help or a wrong option
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder of benchmarks with no script yet."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    shutil.copy(BENCHMARKS / "promises.py", folder)
    return folder


def write_script(home: Path, name: str, *lines: str) -> None:
    """Write a benchmark whose main has these lines."""
    body = "".join(f"    {line}\n" for line in ("parse(argparse.ArgumentParser())", *lines))
    (home / f"{name}.py").write_text(
        "import argparse, os, signal, subprocess, sys, tempfile, time\n"
        "from promises import fact, parse, promise, record_outcome\n"
        f"@record_outcome()\ndef main():\n{body}\nif __name__ == '__main__':\n    main()\n"
    )


def read_record(home: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((home / "results" / f"{name}.json").read_text())
    return content


def has_ended(process: int) -> bool:
    """Return whether a process ends soon; a zombie has ended."""
    for _ in range(100):
        try:
            if psutil.Process(process).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False


def calls(tree: ast.AST) -> list[tuple[str, list[Any]]]:
    """Return the names of called functions, and their constant arguments."""
    return [
        (
            getattr(node.func, "id", getattr(node.func, "attr", "")),
            [argument.value for argument in node.args if isinstance(argument, ast.Constant)],
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]


@pytest.mark.parametrize("path", find_scripts(BENCHMARKS), ids=lambda path: path.stem)
def test_every_benchmark_has_a_promise_and_a_quick_option(path: Path) -> None:
    names = {name for name, _ in calls(ast.parse(path.read_text("utf-8")))}
    assert "promise" in names
    assert {"record_outcome", "parse"} <= names


def test_the_benchmarks_of_the_checkout_are_found() -> None:
    names = [path.stem for path in find_scripts(BENCHMARKS)]
    assert {"count", "jsonl", "gpu_packing"} <= set(names)
    assert not {"promises", "mixes", "words", "run", "page"} & set(names)


def test_the_page_of_the_checkout_matches_its_records() -> None:
    assert page_path(BENCHMARKS).read_text("utf-8") == render(BENCHMARKS), (
        "run `python benchmarks/run.py --render`"
    )


def test_the_figures_of_the_readme_are_those_of_the_records() -> None:
    records = load_records(BENCHMARKS)
    readme = (BENCHMARKS.parent / "README.md").read_text("utf-8")
    assert readme == render_readme(readme, records), "run `python benchmarks/run.py --render`"
    bullets = re.findall(r"^- .*$", readme.partition("<!-- measured")[2].partition("<!-- /measured")[0], re.M)
    assert len(bullets) == 4
    for record in records:
        for entry in (*record["promises"], *record["facts"]):
            entry["value"] = 7777
    others = render_readme(readme, records)
    for bullet in bullets:  # none has its figures from elsewhere
        assert bullet not in others


def test_a_figure_that_no_record_has_is_named() -> None:
    records = [record for record in load_records(BENCHMARKS) if record["script"] != "faults"]
    with pytest.raises(ConfigError, match=r"killed: samples lost.* of benchmarks/faults\.py"):
        render_readme("<!-- measured: x -->\n<!-- /measured -->", records)


def test_a_real_benchmark_runs_quickly_and_writes_nothing() -> None:
    before = sorted((BENCHMARKS / "results").glob("*"))
    page = page_path(BENCHMARKS).read_bytes()
    done = run("estimate", "--quick", "--json")
    report = json.loads(done.stdout)
    (result,) = report["benchmarks"]
    assert (report["quick"], result["name"], result["ran"], result["problem"]) == (True, "estimate", True, "")
    same, ratio = result["promises"]
    assert same["claim"] == "rows with another estimate over columns"
    assert same["kept"]
    assert (ratio["sign"], ratio["target"], ratio["full_target"]) == (">=", 25, 50)
    assert ratio["kept"] == (ratio["value"] >= 25)
    assert report["kept"] == ratio["kept"]
    assert done.exit_code == (0 if ratio["kept"] else 1)
    assert sorted((BENCHMARKS / "results").glob("*")) == before
    assert page_path(BENCHMARKS).read_bytes() == page


def test_a_full_run_records_promises_machine_versions_date_and_command(home: Path) -> None:
    write_script(home, "good", "print('some table')", KEPT, "fact('rows', 1234567)")
    done = run("--folder", home)
    assert done.exit_code == 0, done.stdout
    assert "good (1 of 1)" in done.stdout
    assert "ok   speed: 6.2x (to reach: >= 6x; baseline: the plain way)" in done.stdout
    assert "some table" not in done.stdout
    assert "every promise is kept" in done.stdout
    content = read_record(home, "good")
    assert (content["script"], content["exit"], content["problem"]) == ("good", 0, "")
    assert content["command"] == "python benchmarks/good.py"
    assert content["date"].endswith(" UTC")
    assert content["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert content["machine"]["memory_gib"] > 0
    assert content["machine"]["cpu"]
    assert content["machine"]["gpu"] is None
    assert {"python", "packhorse", "torch", "transformers", "numpy", "pyarrow"} <= set(content["versions"])
    (promise,) = content["promises"]
    assert promise == {
        **{"claim": "speed", "value": 6.2, "sign": ">=", "target": 6, "unit": "x"},
        **{"baseline": "the plain way", "kind": "speed", "kept": True},
    }
    assert content["facts"] == [{"fact": "rows", "value": 1234567, "unit": ""}]
    page = page_path(home).read_text()
    assert page == render(home)
    assert page.startswith("<!-- Generated from benchmarks/results/.")
    date = content["date"]
    assert f"| speed | the plain way | 6.2x | ≥ 6x | yes | [good](#good) | {date} |" in page
    assert f"| [good](#good) | `python benchmarks/good.py` | {date} |" in page
    assert "| rows | 1,234,567 |" in page
    for name, version in content["versions"].items():
        assert f"{name} {version}" in page
    assert f"{content['machine']['cpu']}, {content['machine']['cores']} cores" in page


def test_a_script_alone_writes_the_same_record(home: Path, tmp_path: Path) -> None:
    write_script(home, "good", KEPT)
    assert run("--folder", home).exit_code == 0
    alone = tmp_path / "alone.json"
    environment = {**os.environ, "PACKHORSE_RECORD": str(alone)}
    subprocess.run([sys.executable, "benchmarks/good.py"], cwd=tmp_path, env=environment, check=True)
    ours, theirs = read_record(home, "good"), json.loads(alone.read_text())
    assert list(theirs) == list(ours)
    changing = {"date", "seconds"}
    assert {k: v for k, v in theirs.items() if k not in changing} == {
        k: v for k, v in ours.items() if k not in changing
    }


def test_a_missed_promise_gives_exit_code_1_and_is_in_the_table(home: Path) -> None:
    write_script(home, "good", KEPT)
    write_script(home, "slow", MISSED, "promise('a|b', 2, 1, baseline='none', unit='ms', at_least=False)")
    done = run("--folder", home)
    assert done.exit_code == 1
    assert "missed: slow" in done.stdout
    assert "\x1b" not in done.stdout
    assert read_record(home, "slow")["exit"] == 1
    page = page_path(home).read_text()
    assert "3 promises of 2 scripts: 1 kept, 2 missed." in page
    assert "| speed | the plain way | 5x | ≥ 6x | **missed** | [slow](#slow) |" in page
    assert "| a\\|b | none | 2 ms | ≤ 1 ms | **missed** |" in page
    assert run("good", "--folder", home).exit_code == 0
    assert "**missed**" in page_path(home).read_text()  # the page shows all records, not only this run


@pytest.mark.parametrize(
    ("target", "sign", "quick", "text"),
    [
        (2.5, ">=", 1.25, ">= 1.25x, half of 2.5x"),
        (90, ">=", 45, ">= 45x, half of 90x"),
        (1.0, "<=", 2.0, "<= 2x, twice 1x"),
        (0, "<=", 0, "<= 0x"),
    ],
)
def test_the_target_of_a_quick_run_is_half_of_a_speed_twice_a_limit_and_an_exact_value_unchanged(
    target: float, sign: str, quick: float, text: str
) -> None:
    assert promises.quick_target(target, sign, "speed") == quick
    assert promises.quick_target(target, sign, "exact") == target
    entry = {"sign": sign, "target": quick, "full_target": target, "unit": "x"}
    assert promises.describe_target(entry) == text


@pytest.mark.parametrize(
    ("value", "target", "at_least", "kept", "text"),
    [
        (3.1, 6, True, True, ">= 3x, half of 6x"),
        (2.9, 6, True, False, ">= 3x, half of 6x"),
        (1.9, 1, False, True, "<= 2x, twice 1x"),
        (2.1, 1, False, False, "<= 2x, twice 1x"),
    ],
)
def test_line_table_json_and_exit_code_of_a_quick_run_agree_and_name_both_targets(
    home: Path, value: float, target: float, at_least: bool, kept: bool, text: str
) -> None:
    write_script(home, "half", f"promise('x', {value}, {target}, baseline='b', at_least={at_least})")
    verdict, code = ("ok  ", 0) if kept else ("MISS", 1)
    line = f"{verdict} x: {value}x (to reach: {text}; baseline: b)"
    alone = subprocess.run(
        [sys.executable, str(home / "half.py"), "--quick"], capture_output=True, text=True, check=False
    )
    assert (alone.returncode, alone.stdout) == (code, line + "\n")
    quick = run("--quick", "--folder", home)
    assert quick.exit_code == code
    assert line in quick.stdout
    assert [row.split() for row in quick.stdout.splitlines() if row.startswith("  half ")] == [
        ["half", "x", f"{value}x", *text.split(), verdict.strip()]
    ]
    end = "every promise is kept" if kept else "missed: half"
    assert re.search(rf"^1 benchmark in \d+ s; {end}$", quick.stdout, re.MULTILINE)
    done = run("--quick", "--json", "--folder", home)
    assert done.exit_code == code
    report = json.loads(done.stdout)
    (result,) = report["benchmarks"]
    (promised,) = result["promises"]
    assert (report["kept"], result["ok"], promised["kept"]) == (kept, kept, kept)
    assert (promised["value"], promised["full_target"]) == (value, target)
    assert promised["target"] == (target / 2 if at_least else target * 2)


def test_a_quick_run_writes_no_file_and_a_full_run_needs_the_full_target(home: Path) -> None:
    write_script(
        home, "half", "value = 3.1 if '--quick' in sys.argv else 5", "promise('x', value, 6, baseline='b')"
    )
    assert run("--quick", "--folder", home).exit_code == 0
    assert not (home / "results").exists()
    assert not page_path(home).exists()
    done = run("--no-docs", "--json", "--folder", home)
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    (promise,) = report["benchmarks"][0]["promises"]
    assert (report["kept"], promise["target"], promise["full_target"]) == (False, 6, 6)
    assert "full_target" not in read_record(home, "half")["promises"][0]
    assert not page_path(home).exists()


def test_a_record_of_a_quick_run_is_rejected(home: Path) -> None:
    write_script(home, "half", "promise('x', 3.1, 6, baseline='b')")
    (home / "results").mkdir()
    environment = {**os.environ, "PACKHORSE_RECORD": str(home / "results" / "half.json")}
    subprocess.run([sys.executable, str(home / "half.py"), "--quick"], env=environment, check=True)
    done = run("--render", "--folder", home)
    assert done.exit_code == 2
    assert "half.json is a record of a run with --quick" in done.stderr


def test_a_quick_run_does_not_halve_an_exact_target(home: Path) -> None:
    write_script(home, "halved", "promise('noticed', 0.9, 1.0, baseline='b', kind='exact')")
    done = run("--quick", "--json", "--folder", home)
    assert done.exit_code == 1
    (promise,) = json.loads(done.stdout)["benchmarks"][0]["promises"]
    assert (promise["kind"], promise["kept"], promise["target"]) == ("exact", False, 1.0)
    write_script(home, "halved", "promise('noticed', 1.0, 1.0, baseline='b', kind='exact')")
    assert run("--quick", "--folder", home).exit_code == 0


def test_the_help_names_the_benchmarks_of_the_checkout() -> None:
    done = run("--help")
    names = ", ".join(path.stem for path in find_scripts(BENCHMARKS))
    assert f"Names: {names}." in " ".join(done.stdout.split())
    assert done.exit_code == 0


def test_a_record_has_the_commit_and_marks_changed_files(home: Path) -> None:
    def git(*arguments: str) -> str:
        person = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        done = subprocess.run(
            ["git", *person, *arguments], cwd=home.parent, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    write_script(home, "good", KEPT)
    assert run("--folder", home).exit_code == 0
    assert read_record(home, "good")["commit"] is None
    assert "commit " not in page_path(home).read_text().partition("## Machines")[2]
    git("init", "--quiet")
    (home.parent / ".gitignore").write_text("__pycache__\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "all")
    commit = git("rev-parse", "--short", "HEAD")
    for _ in range(2):  # the record and page of the first run are ignored
        assert run("--folder", home).exit_code == 0
        assert read_record(home, "good")["commit"] == commit
    assert f"commit {commit}, python " in page_path(home).read_text()
    write_script(home, "other", KEPT)
    assert run("good", "--folder", home).exit_code == 0
    assert read_record(home, "good")["commit"] == f"{commit}+"


def test_a_child_that_outlives_its_script_does_not_delay_the_run(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark_run, "_SECONDS_TO_END", 1.0)
    write_script(
        home,
        "parent",
        KEPT,
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])",
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))",
        "print('the last line')",
        "os.kill(os.getpid(), signal.SIGKILL)",
    )
    started = time.monotonic()
    assert run("--folder", home).exit_code == 1
    assert time.monotonic() - started < 120  # of the 600 that the child would take
    assert read_record(home, "parent")["problem"] == "exit code -9: the last line"
    assert read_record(home, "parent")["promises"][0]["kept"]
    assert has_ended(int((tmp_path / "child").read_text()))


def test_a_failing_script_is_reported_and_the_others_run(home: Path) -> None:
    write_script(home, "a_crash", KEPT, "raise OSError('no disk')")
    write_script(home, "b_said", MISSED, "sys.exit('the batches differ')")
    write_script(home, "c_dead", MISSED, "os.kill(os.getpid(), signal.SIGKILL)")
    (home / "d_import.py").write_text("import no_such_module\nif __name__ == '__main__': pass\n")
    write_script(home, "e_silent")
    write_script(home, "f_code", KEPT, "sys.exit(3)")
    write_script(home, "g_good", KEPT)
    done = run("--folder", home)
    assert done.exit_code == 1
    problems = {path.stem: read_record(home, path.stem)["problem"] for path in find_scripts(home)}
    assert problems["a_crash"] == "exit code 1: OSError: no disk"
    assert problems["b_said"] == "exit code 1: the batches differ"
    assert problems["c_dead"].startswith("exit code -9: ")
    assert problems["d_import"].startswith("exit code 1: ModuleNotFoundError")
    assert problems["e_silent"] == "it promised nothing"
    assert problems["f_code"].startswith("exit code 3: ")
    assert problems["g_good"] == ""
    page = page_path(home).read_text()
    assert "**Failed: a_crash, b_said, c_dead, d_import, e_silent, f_code.**" in page
    for name, problem in problems.items():
        text = " ".join(problem.split())
        assert (f"| **{text}** |  |  |  | **failed** | [{name}](#{name}) |" in page) == bool(problem)
    assert "| speed | the plain way | 6.2x | ≥ 6x | yes | [g_good](#g_good) |" in page
    assert run("a_crash", "--quick", "--folder", home).exit_code == 1  # although its promise is kept


def test_without_a_gpu_the_record_of_a_gpu_script_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write_script(home, "gpu_fast", KEPT)
    assert run("--quick", "--folder", home).exit_code == 0  # a quick run uses the CPU
    done = run("--folder", home)
    assert done.exit_code == 0
    assert "not run: there is no GPU; its record stays" in done.stdout
    assert not (home / "results").exists()
    assert "Not recorded yet: gpu_fast." in page_path(home).read_text()
    write_script(home, "good", KEPT)
    assert run("good", "--folder", home).exit_code == 0
    gpu_record = read_record(home, "good") | {"script": "gpu_fast", "date": "2030-01-02 03:04 UTC"}
    gpu_record["machine"] = gpu_record["machine"] | {"gpu": "Some GPU"}
    (home / "results" / "gpu_fast.json").write_text(json.dumps(gpu_record))
    text = (home / "results" / "gpu_fast.json").read_text()
    assert run("--folder", home).exit_code == 0
    assert (home / "results" / "gpu_fast.json").read_text() == text
    page = page_path(home).read_text()
    assert "| yes | [gpu_fast](#gpu_fast) | 2030-01-02 03:04 UTC |" in page
    assert "| Some GPU; " in page
    assert "Not recorded yet" not in page


def test_the_page_is_rendered_from_the_records(home: Path) -> None:
    write_script(home, "good", KEPT)
    assert run("--folder", home).exit_code == 0
    page = page_path(home).read_text()
    page_path(home).unlink()
    (home / "good.py").unlink()  # nothing is run
    assert run("--render", "--folder", home).exit_code == 0
    assert page_path(home).read_text() == page
    unfinished = read_record(home, "good")
    unfinished["exit"] = None  # of a script that was killed on another machine
    (home / "results" / "good.json").write_text(json.dumps(unfinished))
    assert "**it did not run to its end**" in render(home)
    (home / "results" / "good.json").write_text("{}")
    done = run("--render", "--folder", home)
    assert done.exit_code == 2
    assert "good.json has no script, command" in done.stderr
    write_script(home, "other", KEPT)
    assert run("--folder", home).exit_code == 2  # before anything is run
    assert not (home / "results" / "other.json").exists()
    assert page_path(home).read_text() == page
    assert len(load_records(BENCHMARKS)) == len(list((BENCHMARKS / "results").glob("*.json")))


def test_ctrl_c_leaves_no_partial_file_no_child_and_no_temporary_file(home: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    write_script(home, "a_good", KEPT)
    write_script(
        home,
        "b_long",
        KEPT,
        "open(tempfile.mktemp(), 'w').close()",
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])",
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))",
        "time.sleep(600)",
    )
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--folder", str(home)]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    bench = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    child = tmp_path / "child"
    while not (child.exists() and child.read_text()):
        assert bench.poll() is None
        time.sleep(0.05)
    bench.send_signal(signal.SIGINT)
    _, errors = bench.communicate(timeout=60)
    assert bench.returncode == 130, errors
    assert sorted(path.name for path in (home / "results").iterdir()) == ["a_good.json"]
    assert page_path(home).read_text() == render(home)
    assert not list(scratch.iterdir())
    assert has_ended(int(child.read_text()))


def test_children_of_a_script_do_not_write_its_record(home: Path) -> None:
    restart = "'--child' in sys.argv or subprocess.run([sys.executable, __file__, '--child'], check=True)"
    write_script(home, "twice", restart, "promise(str(len(sys.argv)), 1, 1, baseline='b')")
    text = (home / "twice.py").read_text()
    (home / "twice.py").write_text(text.replace("parse(argparse.ArgumentParser())", "pass"))
    assert run("--folder", home).exit_code == 0
    assert [promise["claim"] for promise in read_record(home, "twice")["promises"]] == ["1"]


def test_a_processor_is_passed_to_count_only(home: Path) -> None:
    for name in ("count", "other"):
        write_script(home, name, "promise('-'.join(sys.argv[1:]), 1, 1, baseline='b')")
        text = (home / f"{name}.py").read_text()
        (home / f"{name}.py").write_text(text.replace("parse(argparse.ArgumentParser())", "pass"))
    assert run("--processor", "x", "--folder", home).exit_code == 0
    assert read_record(home, "count")["command"] == "python benchmarks/count.py --processor x"
    assert read_record(home, "other")["command"] == "python benchmarks/other.py"


def test_a_missing_folder_or_script_gives_one_line(tmp_path: Path) -> None:
    done = run("--folder", tmp_path / "none")
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert "has no promises.py: --folder must be a folder of benchmarks" in done.stderr
    done = run("fish")
    assert done.exit_code == 2
    assert "no benchmark fish in" in done.stderr
    assert "balance, count" in done.stderr
