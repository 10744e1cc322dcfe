"""Whatever bytes a reader is given, it reads them or rejects them with an error of Packhorse, and comes back.

Coverage-guided, a few seconds for each reader; ``make fuzz SECONDS=600`` goes on for longer.
"""

import os
from pathlib import Path

import pytest
from fuzz_parent import fuzz
from fuzz_targets import TARGETS

pytestmark = pytest.mark.system

SECONDS = int(os.environ.get("PACKHORSE_FUZZ_SECONDS", "2"))


@pytest.mark.parametrize("name", TARGETS)
def test_mangled_input_is_read_or_rejected_and_never_more(name: str, tmp_path: Path) -> None:
    report = fuzz(name, SECONDS, tmp_path / "run")
    assert (report.unexpected, report.crashes) == (0, 0), report.detail
    # The run reached both sides, and went on to its end.
    assert report.read > 0
    assert report.rejected > 0
    assert report.read + report.rejected == report.tried


@pytest.mark.parametrize(
    ("name", "found", "detail"),
    [
        ("raises", (1, 0), "KeyError: 'found'"),
        ("crashes", (0, 1), "Fatal Python error: Aborted"),
        ("is greedy", (1, 0), "MemoryError"),
    ],
)
def test_a_reader_that_fails_is_found(name: str, found: tuple[int, int], detail: str, tmp_path: Path) -> None:
    report = fuzz(name, SECONDS, tmp_path / "run")
    assert (report.unexpected, report.crashes) == found, report.detail
    assert detail in report.detail
