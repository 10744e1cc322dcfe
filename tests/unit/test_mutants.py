"""The mutants of benchmarks/mutants.py can still be made: each changes one line that is there."""

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from mutants import MUTANTS, Mutant, apply  # noqa: E402


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_a_mutant_changes_one_line_and_names_tests_that_exist(mutant: Mutant, tmp_path: Path) -> None:
    copy = tmp_path / "packhorse" / mutant.file
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / "src" / "packhorse" / mutant.file, copy)
    before = copy.read_text("utf-8")
    apply(mutant, tmp_path)
    after = copy.read_text("utf-8")
    assert before != after
    compile(after, mutant.file, "exec")
    assert all((ROOT / name).is_file() for name in mutant.tests)
