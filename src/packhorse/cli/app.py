"""The command ``packhorse``; each subcommand has its own file."""

from __future__ import annotations

from typing import Annotated

import typer

from packhorse.cli import calibrate, check, convert, count, demo, ledger, parity, plan, stats, view
from packhorse.cli.terminal import CANNOT, OneLineGroup, PlainCommand

DESCRIPTION = "Prepare, pack and load data for fine-tuning vision-language models."
EXIT_CODES = """
Exit codes of all commands: 0 success, 1 negative result, 2 the command could not run, 130 Ctrl-C.

[bold]Examples[/bold]

packhorse demo
[dim]# every step in a minute, without a model or a network[/dim]

packhorse check meta.json
[dim]# find errors in the data[/dim]

packhorse plan meta.json --processor ./model
[dim]# assign rows to packs, and show how full they are[/dim]

packhorse --install-completion
[dim]# complete commands and options with the Tab key[/dim]
"""

app = typer.Typer(
    name="packhorse",
    help=DESCRIPTION,
    cls=OneLineGroup,
    invoke_without_command=True,
    epilog=EXIT_CODES,
    pretty_exceptions_enable=False,
)


@app.callback(help=DESCRIPTION)
def packhorse(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Show the version, or the help if there is no subcommand."""
    if version:
        from packhorse import __version__

        typer.echo(f"packhorse {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)
        raise typer.Exit(CANNOT)


for _module in (demo, stats, count, plan, check, view, parity, calibrate, ledger, convert):
    _name = _module.__name__.rpartition(".")[2]
    app.command(cls=PlainCommand, epilog=_module.EXAMPLES)(getattr(_module, _name))


def main() -> None:
    """Run the command line of this process."""
    app(prog_name="packhorse")
