"""``benchmarks/promises.py`` formats numbers, prints promises and parses ``--quick``."""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def promises(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A newly imported module for each test, because it stores promises and whether the run is quick."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    monkeypatch.delitem(sys.modules, "promises", raising=False)
    return importlib.import_module("promises")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        *((6.2, "x", "6.2x"), (6.20391, "x", "6.204x"), (1234567, "", "1,234,567"), (0, "", "0")),
        *((0.00001234, "s", "1.234e-05 s"), (97554.3, "rows", "97,554 rows"), ("3 of 4", "", "3 of 4")),
    ],
)
def test_numbers_have_four_digits(promises: Any, value: Any, unit: str, text: str) -> None:
    assert promises.format_value(value, unit) == text


def test_a_number_never_looks_like_a_target_that_it_is_not(promises: Any) -> None:
    assert promises.format_value(99.9861, "%", 99.99) == "99.986 %"
    assert promises.format_value(99.99, "%", 99.99) == "99.99 %"
    assert promises.format_value(1_000_001, "", 1_000_000) == "1,000,001"


def test_a_promise_is_printed_with_value_target_and_baseline(
    promises: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(promises.RECORD, raising=False)
    assert promises.promise("speed", np.float64(6.5), 6, baseline="the plain way")
    assert not promises.promise("time", np.int64(3), 2, baseline="wc -l", unit="s", at_least=False)
    assert capsys.readouterr().out.splitlines() == [
        "ok   speed: 6.5x (to reach: >= 6x; baseline: the plain way)",
        "MISS time: 3 s (to reach: <= 2 s; baseline: wc -l)",
    ]


def test_quick_changes_defaults_but_no_explicit_options(
    promises: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(*arguments: str) -> tuple[int, int, bool]:
        monkeypatch.setattr(sys, "argv", ["x.py", *arguments])
        parser = argparse.ArgumentParser()
        parser.add_argument("--rows", type=int, default=1000)
        parser.add_argument("--repeat", type=int, default=3)
        options = promises.parse(parser, rows=10, repeat=1)
        return options.rows, options.repeat, options.quick

    assert parse() == (1000, 3, False)
    assert parse("--quick") == (10, 1, True)
    assert parse("--rows", "7", "--quick") == (7, 1, True)
