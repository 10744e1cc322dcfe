"""How commands speak: tables to stdout, bars and one-line errors to stderr, exit codes.

0: done, 1: the answer is no (errors found, counts differ, packed does not equal unpacked), 2: it could not be
done, 130: Ctrl-C.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def processor_option(more: str = "") -> Any:
    """The option ``--processor``; ``more`` says what it is for, or what is done without it."""
    return typer.Option(metavar="DIR", help=f"Folder (or hub name) of the model's processor{more}.")


META = Annotated[str, typer.Argument(help="The meta file: which data sets there are.", metavar="META")]
PROCESSOR = Annotated[str, processor_option()]
DATASETS = Annotated[
    list[str] | None,
    typer.Option("--dataset", metavar="NAME", help="Only this data set; may be given again."),
]
WORKERS = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Worker processes; one per core without it.")
]
TRUST = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code that comes with the processor or model."),
]
AS_JSON = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
]


CANNOT, STOPPED = 2, 130


def out_console(width: int) -> Console:
    """What a command prints on; ``width`` columns where that is no terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=width, highlight=False)


def new_table(title: str | None = None) -> Table:
    """A table without columns, as all commands print it."""
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))


def own_command() -> str:
    """How to type the command of this environment: by its name where the shell finds it, else by its path."""
    beside = Path(sys.executable).with_name("packhorse")
    found = which("packhorse")
    if found is not None and (not beside.exists() or Path(found).samefile(beside)):
        return "packhorse"
    if not beside.exists():
        return f"{sys.executable} -m packhorse"
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)


@contextlib.contextmanager
def one_line_errors(command: str, stopped: str) -> Iterator[None]:
    """Turn what a user can do something about into one line on stderr and an exit code.

    Args:
        command: its name.
        stopped: what Ctrl-C leaves behind, in words.
    """
    from packhorse.errors import PackhorseError, plain_error

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        yield
    except BrokenPipeError:
        raise  # whoever read our output has gone: typer ends quietly
    except (PackhorseError, OSError) as error:
        line = " ".join(plain_error(error).split())
        typer.echo(f"packhorse {command}: {line}", err=True)
        raise typer.Exit(CANNOT) from error
    except KeyboardInterrupt as error:
        typer.echo(f"packhorse {command}: stopped; {stopped}", err=True)
        raise typer.Exit(STOPPED) from error


class _PlainHelp:
    """Flags take no value, and ``--help`` shows none behind them."""

    def get_params(self, ctx: Any) -> Any:
        """As the base class has them; flags without a type."""
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class PlainCommand(_PlainHelp, TyperCommand):
    """A command."""


class OneLineGroup(_PlainHelp, TyperGroup):
    """Commands whose wrong use, too, is one line: which command, what is wrong, where to look."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **more: Any) -> Any:
        """As the base class; a misspelled option or a missing one is told in one line, with exit code 2."""
        standalone_mode = more.pop("standalone_mode", True)
        try:
            code = super().main(args, *rest, **{**more, "standalone_mode": False})
        except Exception as error:
            # Typer's own errors, under whatever name its version has them: they format themselves.
            format_message = getattr(error, "format_message", None)
            if not standalone_mode or not callable(format_message):
                raise
            context = getattr(error, "ctx", None)
            name = "packhorse" if context is None else context.command_path
            text = " ".join(str(format_message()).replace("Value error, ", "").split()).rstrip(".")
            typer.echo(f"{name}: {text[:1].lower()}{text[1:]} (see {name} --help)", err=True)
            sys.exit(int(getattr(error, "exit_code", CANNOT)))
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)
