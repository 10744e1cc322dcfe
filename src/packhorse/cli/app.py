"""The command ``packhorse``: its parts are one file each."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from packhorse.cli import check, count, ledger, parity, plan, stats, view
from packhorse.cli.terminal import AS_JSON, CANNOT, OneLineGroup, PlainCommand

EXIT_CODES = """
Exit codes of all commands: 0 done, 1 the answer is no, 2 it could not be done, 130 Ctrl-C.

[bold]Examples[/bold]

packhorse demo
[dim]# all of it in a minute, without a model or a network[/dim]

packhorse check meta.json
[dim]# what is wrong with my data?[/dim]

packhorse plan meta.json --processor ./model
[dim]# which rows share a pack, and what is that worth?[/dim]

packhorse --install-completion
[dim]# the Tab key then completes commands and options[/dim]
"""

DEMO_EXAMPLES = """
Exit code 0: all of it held, 1: something that was promised did not, 2: it could not be run.

[bold]Examples[/bold]

packhorse demo
[dim]# writes to ./demo[/dim]

packhorse demo --out /tmp/demo --json
[dim]# where its files are, for machines; the story goes to stderr[/dim]
"""

app = typer.Typer(
    name="packhorse",
    help="Carries every sample of a vision-language fine-tuning set to the model.",
    cls=OneLineGroup,
    invoke_without_command=True,
    epilog=EXIT_CODES,
    pretty_exceptions_enable=False,
)


@app.callback()
def packhorse(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Carries every sample of a vision-language fine-tuning set to the model."""
    if version:
        from packhorse import __version__

        typer.echo(f"packhorse {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)
        raise typer.Exit(CANNOT)


@app.command(cls=PlainCommand, epilog=DEMO_EXAMPLES)
def demo(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder to write to: a new one, or the demo's own.")
    ] = Path("demo"),
    as_json: AS_JSON = False,
) -> None:
    """From rows to a trained model in about a minute: check, count, plan, train, kill, go on, compare.

    On the CPU and without a network.
    """
    from packhorse.cli.demo import main as run_demo

    code = 0
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        try:
            run_demo(["--out", str(out)])
        except SystemExit as ended:
            code = int(ended.code or 0)
    if as_json and code < CANNOT:
        files = {
            "report": "report.html",
            "ledger": "ledger.jsonl",
            "plan": "plan.phplan",
            "meta": "data/meta.json",
        }
        told = {name: str(out / file) for name, file in files.items()}
        typer.echo(json.dumps({"version": 1, "passed": code == 0, **told}, indent=2))
    raise typer.Exit(code)


app.command(cls=PlainCommand, epilog=stats.EXAMPLES)(stats.stats)
app.command(cls=PlainCommand, epilog=count.EXAMPLES)(count.count)
app.command(cls=PlainCommand, epilog=plan.EXAMPLES)(plan.plan)
app.command(cls=PlainCommand, epilog=check.EXAMPLES)(check.check)
app.command(cls=PlainCommand, epilog=view.EXAMPLES)(view.view)
app.command(cls=PlainCommand, epilog=parity.EXAMPLES)(parity.parity)
app.command(cls=PlainCommand, epilog=ledger.EXAMPLES)(ledger.ledger)


def main() -> None:
    """Run the command line of this process."""
    app(prog_name="packhorse")
