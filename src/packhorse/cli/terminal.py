"""What commands print: lines, tables or one JSON object to stdout, one-line errors to stderr; exit codes.

0: done, 1: the answer is no (errors found, counts differ, packed does not equal unpacked), 2: it could not be
done, 130: Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.table import Table


def processor_option(more: str = "") -> Any:
    """Return the option ``--processor``; ``more`` is added to its help."""
    return typer.Option(metavar="DIR", help=f"Folder (or hub name) of the model's processor{more}.")


META = Annotated[str, typer.Argument(help="The meta file: which datasets there are.", metavar="META")]
PROCESSOR = Annotated[str, processor_option()]
DATASETS = Annotated[
    list[str] | None,
    typer.Option("--dataset", metavar="NAME", help="Only this dataset; may be given again."),
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


Cell = str | int


def new_table() -> Table:
    """Return a table without columns, in the style of all commands."""
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))


class Output:
    """Stdout of a command.

    Args:
        width: columns if stdout is no terminal.
    """

    def __init__(self, width: int = 140) -> None:
        from rich.console import Console

        console = Console(highlight=False)
        self.console = console if console.is_terminal else Console(width=width, highlight=False)

    def line(self, text: str = "", style: str | None = None, *, end: str = "\n", wrap: bool = False) -> None:
        """Print a line as it is; ``wrap`` breaks it at the width."""
        self.console.print(text, style=style, end=end, markup=False, soft_wrap=not wrap)

    def lines(self, texts: Iterable[str]) -> None:
        """Print each text on a line of its own."""
        for text in texts:
            self.line(text)

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[Cell]],
        *,
        text_columns: int = 1,
        styles: Sequence[str] = (),
        total: Sequence[Cell] | None = None,
    ) -> None:
        """Print a table under its title.

        Args:
            title: printed above.
            columns: their names; only the names of datasets are folded if they are long.
            rows: their cells; whole numbers get separators.
            text_columns: so many are aligned to the left, all others to the right.
            styles: of the rows, if they are coloured.
            total: a last row, after a separator.
        """
        from rich.markup import escape

        table = new_table()
        for number, name in enumerate(columns):
            is_name = name == "dataset"
            table.add_column(
                name,
                justify="left" if number < text_columns else "right",
                no_wrap=not is_name,
                overflow="fold",
                min_width=len(name) if is_name else None,
            )

        def add(cells: Sequence[Cell], style: str | None = None) -> None:
            table.add_row(
                *(f"{cell:,}" if isinstance(cell, int) else escape(cell) for cell in cells), style=style
            )

        for number, cells in enumerate(rows):
            add(cells, styles[number] if styles else None)
        if total is not None:
            table.add_section()
            add(total)
        self.line(title, style="italic")
        self.console.print(table)


def to_json(value: object, indent: int | None = 2) -> str:
    """Return JSON; dataclasses are written as objects, and paths as strings."""

    def plain(part: DataclassInstance | Path) -> object:
        return str(part) if isinstance(part, Path) else asdict(part)

    return json.dumps(value, indent=indent, default=plain)


def number_of(count: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun: ``1 row``, ``2,000 rows``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def own_command() -> str:
    """Return how to type the command of this environment: its name if the shell finds it, else its path."""
    installed = Path(sys.executable).with_name("packhorse")
    found = which("packhorse")
    if found is not None and (not installed.exists() or Path(found).samefile(installed)):
        return "packhorse"
    if not installed.exists():
        return f"{sys.executable} -m packhorse"
    here = Path.cwd()
    return str(installed.relative_to(here) if installed.is_relative_to(here) else installed)


@contextlib.contextmanager
def one_line_errors(command: str, stopped: str) -> Iterator[None]:
    """Turn errors that a user can act on into one line on stderr and an exit code.

    Args:
        command: its name.
        stopped: printed after Ctrl-C: what is left.
    """
    from packhorse.errors import PackhorseError, plain_error

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of the output has gone; typer ends quietly
    except (PackhorseError, OSError) as error:
        line = " ".join(plain_error(error).split())
        typer.echo(f"packhorse {command}: {line}", err=True)
        raise typer.Exit(CANNOT) from error
    except KeyboardInterrupt as error:
        typer.echo(f"packhorse {command}: stopped; {stopped}", err=True)
        raise typer.Exit(STOPPED) from error


class _PlainHelp:
    """Commands whose ``--help`` shows no value after flags."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters of the base class, flags without a type."""
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class PlainCommand(_PlainHelp, TyperCommand):
    """A command."""


class OneLineGroup(_PlainHelp, TyperGroup):
    """Commands that report wrong usage in one line: the command, the error, where to look."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **more: Any) -> Any:
        """Run a command; report a misspelled or missing option in one line, with exit code 2."""
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
