"""``packhorse demo``: from rows to a trained model in one run, with a report.

``steps`` runs the demo, ``train`` is the training run that is killed and resumed, ``data`` writes the rows
and makes the tiny model.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from packhorse.cli.terminal import AS_JSON, one_line_errors, to_json

EXAMPLES = """
Exit code 0: all of it held, 1: something that was promised did not, 2: it could not be run.

[bold]Examples[/bold]

packhorse demo
[dim]# writes to ./demo[/dim]

packhorse demo --out /tmp/demo --json
[dim]# where its files are, for machines; the story goes to stderr[/dim]
"""

_FILES = {
    "report": "report.html",
    "ledger": "ledger.jsonl",
    "plan": "plan.phplan",
    "meta": "data/meta.json",
}


def demo(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder to write to: a new one, or the demo's own.")
    ] = Path("demo"),
    as_json: AS_JSON = False,
) -> None:
    """From rows to a trained model in about a minute: check, count, plan, train, kill, go on, compare.

    On the CPU and without a network.
    """
    old_report = out / _FILES["report"]
    old = f"; {old_report} is of an earlier run" if old_report.exists() else ""
    with one_line_errors("demo", f"{out} is unfinished (the next run starts again){old}"):
        from packhorse.cli.demo.steps import run_demo

        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            held = run_demo(out)
    if as_json:
        files = {name: out / file for name, file in _FILES.items()}
        typer.echo(to_json({"version": 1, "passed": held, **files}))
    if not held:
        raise typer.Exit(1)
