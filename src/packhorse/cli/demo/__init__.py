"""``packhorse demo``: run all steps on generated data, and write a report.

``steps`` runs the demo, ``train`` is the training process that is killed and resumed, ``data`` generates the
rows and the tiny model.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from packhorse.cli import terminal

EXAMPLES = terminal.examples(
    "demo",
    "Exit code 0: every check passed, 1: a check failed, 2: the demo could not run.",
    {"": "write to ./demo", "--out /tmp/demo --json": "print the paths of its files as JSON"},
)

_FILES = {"report": "report.html", "ledger": "ledger.jsonl", "plan": "plan.phplan", "meta": "data/meta.json"}


def demo(
    out: Annotated[
        Path, terminal.text("DIR", "Folder to write to: a new one, or that of an earlier demo.")
    ] = Path("demo"),
    verbose: terminal.VERBOSE = False,
    as_json: terminal.AS_JSON = False,
) -> None:
    """Check, count, plan, train, kill, resume and compare, in about a minute.

    Needs neither a GPU nor a network.
    """
    old_report = out / _FILES["report"]
    note = f"; {old_report} is from an earlier run" if old_report.exists() else ""
    stopped = f"{out} is incomplete (the next run starts from the beginning){note}"
    with terminal.one_line_errors("demo", stopped, verbose):
        from packhorse.cli.demo.steps import run_demo

        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            passed = run_demo(out)
    if as_json:
        files = {name: out / file for name, file in _FILES.items()}
        typer.echo(terminal.to_json({"version": 1, "passed": passed, **files}))
    if not passed:
        raise typer.Exit(1)
