"""``packhorse bench`` runs scripts, reads what they promise, and ends with what they came to."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from packhorse.cli.bench import QUICK, find_scripts

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "packhorse", "bench", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def script(folder: Path, name: str, *lines: str, code: int = 0, end: str = "") -> None:
    """A benchmark that prints these lines and ends with this code, or as ``end`` says."""
    body = "".join(f"    print({line!r})\n" for line in lines)
    end = end or f"raise SystemExit({code})"
    (folder / f"{name}.py").write_text(f"if __name__ == '__main__':\n{body}    {end}\n")


def test_every_benchmark_of_the_checkout_has_a_quick_size_with_options_that_it_takes() -> None:
    scripts = find_scripts(None, ())
    assert {path.parent.resolve() for path in scripts} == {BENCHMARKS}
    assert [path.stem for path in scripts] == sorted(QUICK)
    for path in scripts:
        for option in (part for part in QUICK[path.stem] if part.startswith("--")):
            assert f'"{option}"' in path.read_text(), f"{path.name} takes no {option}"


def test_a_real_benchmark_runs_quickly_and_its_promises_are_read() -> None:
    done = run("estimate", "--quick", "--json")
    report = json.loads(done.stdout)
    (one,) = report["benchmarks"]
    assert (report["quick"], one["name"], one["ran"], one["problem"]) == (True, "estimate", True, "")
    same, ratio = one["promises"]
    assert same["what"] == "the same number for each of 100,000 rows"
    assert same["kept"]
    assert (ratio["sign"], ratio["target"]) == (">=", 50)
    assert ratio["kept"] == (ratio["value"] >= 25)
    assert done.returncode == (0 if ratio["kept"] else 1)


def test_kept_promises_end_with_zero_and_a_missed_one_with_one(tmp_path: Path) -> None:
    script(tmp_path, "good", "some table", "ok   speed: 6.20x (to reach: >= 6x)")
    (tmp_path / "helper.py").write_text("NUMBER = 1\n")  # no script
    done = run("--folder", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ok   speed: 6.20x (to reach: >= 6x)" in done.stdout
    assert "some table" not in done.stdout
    assert "helper" not in done.stdout
    assert "every promise is kept" in done.stdout
    script(tmp_path, "slow", "MISS time: 1,200.5 ms (to reach: <= 1,000 ms)", "not  asked for: 3x", code=1)
    done = run("--folder", tmp_path)
    assert done.returncode == 1
    assert "missed: slow" in done.stdout
    assert "\x1b" not in done.stdout
    assert run("good", "--folder", tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("MISS speed: 3.10x (to reach: >= 6x)", True),
        ("MISS speed: 2.90x (to reach: >= 6x)", False),
        ("MISS share: 46.0% (to reach: >= 90 %)", True),
        ("MISS share: 44.0% (to reach: >= 90 %)", False),
        ("MISS time: 1.900 (to reach: <= 1.0)", True),
        ("MISS time: 2.100 (to reach: <= 1.0)", False),
        ("MISS that differ: 1 (to reach: <= 0)", False),
        ("MISS the numbers differ", False),
    ],
)
def test_a_quick_run_asks_for_half_of_a_target_and_for_twice_a_limit(
    tmp_path: Path, line: str, kept: bool
) -> None:
    script(tmp_path, "headers", line, code=1)
    done = run("--quick", "--json", "--folder", tmp_path)
    assert json.loads(done.stdout)["benchmarks"][0]["ok"] is kept
    assert done.returncode == (0 if kept else 1)
    assert run("--json", "--folder", tmp_path).returncode == 1  # in full, a miss is a miss


def test_a_script_that_fails_is_told_apart_from_one_that_misses(tmp_path: Path) -> None:
    missed = "MISS speed: 5.00x (to reach: >= 6x)"
    script(tmp_path, "headers", missed, code=1)
    assert run("headers", "--quick", "--folder", tmp_path).returncode == 0
    script(tmp_path, "headers", missed, end="raise OSError('no disk')")
    done = run("headers", "--quick", "--folder", tmp_path)
    assert done.returncode == 1
    assert "FAILED exit code 1: OSError: no disk" in done.stdout
    script(tmp_path, "headers", code=3)
    assert "FAILED exit code 3" in run("--folder", tmp_path).stdout


def test_what_cannot_run_here_is_named_and_is_no_failure(tmp_path: Path) -> None:
    script(tmp_path, "count", "ok   all")
    script(tmp_path, "unheard_of", "ok   all")
    done = run("count", "--folder", tmp_path)
    assert done.returncode == 0
    assert "not run: it needs a real tokenizer: --processor DIR" in done.stdout
    script(tmp_path, "count", "MISS speed: 0.10x (to reach: >= 1.5x)", code=1)
    done = run("count", "--quick", "--folder", tmp_path)
    assert done.returncode == 0
    assert "it runs; not judged without a real tokenizer" in done.stdout
    assert run("count", "--quick", "--processor", "x", "--folder", tmp_path).returncode == 1
    done = run("unheard_of", "--quick", "--folder", tmp_path)
    assert done.returncode == 0
    assert "its small sizes are not known" in done.stdout


def test_without_the_folder_or_the_script_there_is_one_clear_line(tmp_path: Path) -> None:
    done = run("--folder", tmp_path / "none")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "benchmarks are part of a checkout, not of an installed package" in done.stderr
    done = run("fish")
    assert done.returncode == 2
    assert "no benchmark fish in" in done.stderr
    assert "balance, count" in done.stderr
