"""The demo runs, and its numbers add up."""

from pathlib import Path

import pytest

from packhorse.cli.demo import main
from packhorse.ledger import Ledger


def test_the_demo_shows_the_summary_and_names_the_three_broken_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    main(["--out", str(tmp_path / "demo")])
    assert "3 dataset(s), 39 samples" in caplog.text
    out = capsys.readouterr().out
    assert "40 rows in the files, 38 delivered, 2 left out." in out
    ledger = Ledger.load(tmp_path / "demo" / "ledger.jsonl")
    assert {drop.key: (drop.reason, drop.action) for drop in ledger} == {
        "charts/7": ("malformed_row", "left_out"),
        "charts/13": ("broken_media", "left_out"),
        "charts/19": ("surplus_placeholder", "cut"),
    }
