"""The command ``packhorse``: its parts are one file each."""

from __future__ import annotations

from typing import Annotated

import typer

from packhorse.cli import check, count, demo, ledger, parity, plan, stats, view
from packhorse.cli.terminal import CANNOT, OneLineGroup, PlainCommand

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


app.command(cls=PlainCommand, epilog=demo.EXAMPLES)(demo.demo)
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
