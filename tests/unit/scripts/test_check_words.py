"""``scripts/check_words.py`` finds words that the project does not use."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "check_words.py"
CLEAN = '''"""Return the samples that a worker dropped."""

import functools


def describe_drops(samples):  # next to the ledger
    return "dropped: connection refused; taken into account in the next micro-step"


class Report:
    @property
    def dropped(self):
        return []

    @functools.cached_property
    def counted(self):
        return 0
'''


def run(*paths: Path) -> tuple[int, list[str], str]:
    """Return exit status, printed lines and standard error of the script."""
    command = [sys.executable, str(SCRIPT), *map(str, paths)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    return process.returncode, process.stdout.splitlines(), process.stderr


@pytest.mark.parametrize(
    ("name", "line", "word"),
    [
        ("identifier.py", "left_out = 3", "left out"),
        ("class_name.py", "class MediumCount: ...", "medium"),
        ("comment.py", "x = 1  # told by the parent", "told"),
        ("docstring.py", '"""The pack behind it."""', "behind"),
        ("message.py", 'raise ValueError("is refused")', "refused"),
        ("page.md", "A data set in `train.jsonl`.", "data set"),
        ("hyphen.md", "a stand-in for the image", "stand in"),
        ("template.html", "<p>3 films</p>", "films"),
        ("script.js", "// ten micro steps", "micro steps"),
        ("function.py", "def _made(path): ...", "def made"),
        ("method.py", "class A:\n    async def opened(self): ...", "def opened"),
    ],
)
def test_a_planted_word_is_printed_with_its_place_and_the_word_to_write(
    tmp_path: Path, name: str, line: str, word: str
) -> None:
    path = tmp_path / name
    path.write_text(f"\n{line}\n")
    status, lines, error = run(tmp_path)
    number = 1 + len(line.splitlines())
    assert status == 1
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"{path}:{number}: {word!r}: write ")
    assert error == "1 words to replace\n"


def test_clean_text_prints_nothing_and_exits_with_zero(tmp_path: Path) -> None:
    (tmp_path / "clean.py").write_text(CLEAN)
    (tmp_path / "clean.md").write_text("Count `train.jsonl`, then start the loader.\n")
    assert run(tmp_path) == (0, [], "")


def test_files_of_other_types_results_and_generated_pages_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(b"\x89PNG told\xff")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "old.md").write_text("told")
    (tmp_path / "benchmarks.md").write_text("<!-- Generated from records. -->\ntold\n")
    assert run(tmp_path) == (0, [], "")


def test_without_arguments_the_whole_project_is_checked_with_relative_paths(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "check_words.py"
    script.write_bytes(SCRIPT.read_bytes())
    for name in ("src", "docs", "tests", "benchmarks", "examples"):
        (tmp_path / name).mkdir()
    for name in ("README.md", "CONTRIBUTING.md", "src/a.py"):
        (tmp_path / name).write_text("told\n")
    process = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert process.returncode == 1
    files = [line.partition(":")[0] for line in process.stdout.splitlines()]
    assert files == ["src/a.py", "README.md", "CONTRIBUTING.md"]


def test_the_script_and_this_test_may_name_the_words() -> None:
    assert run(SCRIPT, Path(__file__)) == (0, [], "")


def test_a_path_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    status, lines, error = run(tmp_path / "missing")
    assert (status, lines) == (1, [])
    assert error == f"{tmp_path / 'missing'}: no such file or folder\n"
