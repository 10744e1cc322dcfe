"""Progress of long work: a bar on a terminal, log lines elsewhere."""

import logging
import os
import pty
import subprocess
import sys

import pytest

from packhorse.utils.progress import Progress

WORK = """
from packhorse.utils.progress import Progress
with Progress("counting") as progress:
    progress(0, 50)
    progress(50, 50)
"""


def run_on_terminal(**environment: str) -> str:
    """Run the work with a terminal as stderr and return what it draws."""
    ours, theirs = pty.openpty()
    settings = {**os.environ, "CI": "", "TERM": "xterm", "COLUMNS": "120", **environment}
    subprocess.run([sys.executable, "-c", WORK], stderr=theirs, env=settings, check=True)
    os.close(theirs)
    drawn = b""
    try:
        while piece := os.read(ours, 65536):
            drawn += piece
    except OSError:  # Linux reports the closed other end as an error
        pass
    os.close(ours)
    return drawn.decode()


def test_a_terminal_gets_a_bar_and_a_ci_run_does_not() -> None:
    assert "50/50" in run_on_terminal()
    assert run_on_terminal(CI="true") == ""


def test_without_a_terminal_a_line_is_logged_once_the_interval_has_passed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "packhorse")
    with Progress("counting") as quick:
        quick(10, 40)
    assert caplog.messages == []
    with Progress("counting", interval=0.0) as progress:
        progress(0, 40)
        progress(10, 40)
    assert caplog.messages == ["counting: 25 %, about 0 s left"]
    indexing = Progress("indexing train.jsonl", 200, interval=0.0)
    indexing(100)
    assert caplog.messages[1].startswith("indexing train.jsonl: 50 %, about ")
