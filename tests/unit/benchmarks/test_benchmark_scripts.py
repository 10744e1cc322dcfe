"""Computations of benchmark scripts."""

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SIZES = [10_000, 100_000, 1_000_000]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a script by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.mark.parametrize(("power", "kept"), [(1.0, True), (1.05, True), (1.2, False), (2.0, False)])
def test_a_long_start_up_does_not_hide_superlinear_growth(load: Any, power: float, kept: bool) -> None:
    size = load("size")
    seconds = [30 + 4 * (rows / SIZES[1]) ** power for rows in SIZES]
    assert (size.exponent(SIZES, seconds) <= size.MAX_GROWTH) is kept


def test_growth_of_little_work_has_no_target(load: Any) -> None:
    size = load("size")
    assert size.exponent(SIZES, [7.0, 7.3, 9.0]) is None
    assert size.exponent(SIZES, [7.0, 6.9, 8.0]) is None
    assert size.exponent(SIZES, [7.0, 7.0, 60.0]) > size.MAX_GROWTH


def test_a_mutant_is_noticed_by_failed_tests_and_not_by_tests_that_cannot_run(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutants = load("mutants")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    files = {
        "right": "def test_it():\n    pass\n",
        "wrong": "def test_it():\n    assert False\n",
        "no_import": "import no_such_module\n",
        "no_fixture": "def test_it(nothing):\n    pass\n",
    }
    for name, text in files.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    assert mutants.passes(("test_right.py",), tmp_path)
    assert not mutants.passes(("test_wrong.py",), tmp_path)
    for name in ("no_import", "no_fixture", "no_file"):
        with pytest.raises(RuntimeError, match="exit code"):
            mutants.passes((f"test_{name}.py",), tmp_path)
