"""Memory does not grow with the rows, beyond the digests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from planted import text_row

from count_samples import write_meta, write_rows

PEAK = """
import re, sys
from packhorse.tools.check import check_meta, write_fixed
from packhorse.tools.stats import compute_stats
meta, folder = sys.argv[1:]
report = check_meta(meta, repair=True)
fixed = write_fixed(report, folder, drop_duplicates=True)
compute_stats(meta)
found = sum(1 for _ in report.findings())
# Not ru_maxrss, which a child takes over from its parent.
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]
print(peak, found, fixed.datasets[0].dropped)
"""


def peak_of(folder: Path, rows: int) -> tuple[int, int, int]:
    """KiB at the most, findings, and rows dropped, for so many rows of which every fourth is bad."""
    folder.mkdir()
    bad = '{"messages": []}'
    write_rows(folder / "rows.jsonl", [text_row(n) if n % 4 else bad for n in range(rows)])
    meta = write_meta(folder, {"rows": {"file_name": "rows.jsonl"}})
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(meta), str(folder / "clean")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONMALLOC": "malloc", "MALLOC_TRIM_THRESHOLD_": "0"},
    )
    peak, found, dropped = map(int, done.stdout.split())
    return peak, found, dropped


@pytest.mark.parametrize("rows", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_ten_times_the_rows_take_a_few_bytes_more_for_each(tmp_path: Path, rows: int) -> None:
    few, *_ = peak_of(tmp_path / "few", rows // 10)
    many, found, dropped = peak_of(tmp_path / "many", rows)
    assert found == dropped == rows // 4
    # A row is 112 bytes as text and some 1,500 as objects.
    assert (many - few) * 1024 < 6_000_000 + 60 * rows, f"{few} KiB, {many} KiB"
