"""The command ``packhorse``: its parts are one file each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packhorse.cli import bench, check, ledger, plan, stats, view
from packhorse.cli.count import count
from packhorse.cli.parity import parity

app = typer.Typer(
    name="packhorse",
    help="Carries every sample of a vision-language fine-tuning set to the model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(count)
app.command()(parity)
app.command(epilog=check.EXAMPLES)(check.check)
app.command(epilog=stats.EXAMPLES)(stats.stats)
app.command(epilog=ledger.EXAMPLES)(ledger.ledger)
app.command(epilog=plan.EXAMPLES)(plan.plan)
app.command(epilog=view.EXAMPLES)(view.view)
app.command(epilog=bench.EXAMPLES)(bench.bench)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder to write to: a new one, or the demo's own.")] = Path(
        "demo"
    ),
) -> None:
    """From rows to a trained model in about a minute: check, count, plan, train, kill, go on, compare.

    On the CPU and without a network. Exit code 1 if something that was promised did not hold.
    """
    from packhorse.cli.demo import main as run_demo

    run_demo(["--out", str(out)])


def main() -> None:
    """Run the command line of this process."""
    from packhorse.cli.torchvision_help import help_torchvision

    help_torchvision()
    app(prog_name="packhorse")
