"""Common options of the commands, and their output: tables or JSON to stdout, one-line errors to stderr.

Exit codes: 0 success, 1 a negative result (errors found, counts differ, packed does not equal unpacked), 2
the command could not run, 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from enum import Enum
from importlib import import_module
from inspect import signature
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from packhorse.errors import PackhorseError, plain_error, suggest
from packhorse.types import Task as TaskName

if TYPE_CHECKING:
    # Stubs of type checkers; dataclasses has no public type for its instances.
    from _typeshed import DataclassInstance
    from rich.table import Table


def text(metavar: str, description: str, *names: str) -> Any:
    """Return an option with a value; ``names`` if it is not called like its parameter."""
    return typer.Option(*names, metavar=metavar, help=description)


def number(description: str, minimum: float | None = 1, maximum: float | None = None) -> Any:
    """Return an option with a number."""
    return typer.Option(min=minimum, max=maximum, metavar="N", help=description)


def flag(name: str, description: str) -> Any:
    """Return a flag."""
    return typer.Option(name, help=description)


def processor(note: str = "") -> Any:
    """Return the option ``--processor``; ``note`` is added to its help."""
    return text("DIR", f"Folder (or Hub name) of the model's processor{note}.")


def examples(command: str, exit_codes: str, arguments: dict[str, str]) -> str:
    """Return the end of a command's help: its exit codes, and examples of arguments with a comment each."""
    lines = [f"packhorse {command} {given}\n[dim]# {note}[/dim]" for given, note in arguments.items()]
    return "\n\n".join([exit_codes, "[bold]Examples[/bold]", *lines]) + "\n"


META = Annotated[str, typer.Argument(help="A data file, or a meta file that lists datasets.", metavar="META")]
PROCESSOR = Annotated[str, processor()]
DATASETS = Annotated[list[str] | None, text("NAME", "Only this dataset; can be repeated.", "--dataset")]
Task = Enum("Task", {"sft": "sft", "preference": "preference"}, type=str)
TASK = Annotated[
    Task | None,
    text("TASK", "What rows are for: sft or preference; default: what the meta file says, else sft."),
]
WORKERS = Annotated[int | None, number("Worker processes; default: one per core.")]
TRUST = Annotated[bool, flag("--trust-remote-code", "Run code that comes with the processor or model.")]
VERBOSE = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print details, and the warnings of other libraries.")
]
AS_JSON = Annotated[bool, flag("--json", "Print one JSON object to stdout and nothing else.")]

CANNOT, STOPPED = 2, 130

_LIBRARIES = ("transformers", "datasets", "huggingface_hub", "torch", "accelerate", "PIL")
_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}

Cell = str | int


def task_of(option: Any) -> TaskName | None:
    """Return the value of the option ``--task``; None if it is not given."""
    return None if option is None else option.value


def new_table() -> Table:
    """Return an empty table in the style of all commands."""
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))


class Output:
    """Stdout of a command, with ``width`` columns if it is not a terminal."""

    def __init__(self, width: int = 140) -> None:
        from rich.console import Console

        console = Console(highlight=False)
        self.console = console if console.is_terminal else Console(width=width, highlight=False)

    def line(self, text: str = "", style: str | None = None, *, end: str = "\n", wrap: bool = False) -> None:
        """Print a line without markup; ``wrap`` breaks it at the width."""
        self.console.print(text, style=style, end=end, markup=False, soft_wrap=not wrap)

    def lines(self, texts: Iterable[str]) -> None:
        """Print each text on its own line."""
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
        """Print a table under its title, with the first ``text_columns`` left-aligned.

        Integers get separators, only long names of datasets are wrapped, and ``total`` is the last row.
        """
        from rich.markup import escape

        table = new_table()
        for index, name in enumerate(columns):
            is_name = name == "dataset"
            table.add_column(
                name,
                justify="left" if index < text_columns else "right",
                no_wrap=not is_name,
                overflow="fold",
                min_width=len(name) if is_name else None,
            )

        def add(cells: Sequence[Cell], style: str | None = None) -> None:
            table.add_row(
                *(f"{cell:,}" if isinstance(cell, int) else escape(cell) for cell in cells), style=style
            )

        for index, cells in enumerate(rows):
            add(cells, styles[index] if styles else None)
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


def number_of(count: int, singular: str, plural: str | None = None) -> str:
    """Return a number with its noun: ``1 row``, ``2,000 rows``."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def command_name() -> str:
    """Return the command of this environment: its name if the shell finds it, else its path."""
    installed = Path(sys.executable).with_name("packhorse")
    in_path = which("packhorse")
    if in_path is not None and (not installed.exists() or Path(in_path).samefile(installed)):
        return "packhorse"
    if not installed.exists():
        return f"{sys.executable} -m packhorse"
    here = Path.cwd()
    return str(installed.relative_to(here) if installed.is_relative_to(here) else installed)


@contextlib.contextmanager
def one_line_errors(command: str, stopped: str, verbose: bool) -> Iterator[None]:
    """Turn errors that a user can act on into one line and an exit code; Ctrl-C prints ``stopped``.

    Warnings of other libraries are only printed if ``verbose``.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        with contextlib.nullcontext() if verbose else _quiet_libraries():
            yield
    except BrokenPipeError:
        raise  # the reader of the output has exited; typer exits silently
    except (PackhorseError, OSError) as error:
        line = " ".join(plain_error(error).split())
        if isinstance(error, PackhorseError):
            line = in_options(command, line)
        typer.echo(f"packhorse {command}: {line}", err=True)
        raise typer.Exit(CANNOT) from error
    except KeyboardInterrupt as error:
        typer.echo(f"packhorse {command}: stopped; {stopped}", err=True)
        raise typer.Exit(STOPPED) from error


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Print only errors of other libraries, also in worker processes."""
    loggers = [logging.getLogger(name) for name in _LIBRARIES]
    levels = [logger.level for logger in loggers]
    added = {name: value for name, value in _QUIET.items() if name not in os.environ}
    os.environ.update(added)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for name in added:
            os.environ.pop(name, None)


def in_options(command: str, text: str) -> str:
    """Return a message with a command's options in place of settings.

    ``placeholder='never'`` becomes ``--placeholder never``, ``max_bad_share`` becomes ``--max-bad-share``.
    """
    function = getattr(import_module(f"packhorse.cli.{command}"), command)
    options = {name: "--" + name.replace("_", "-") for name in signature(function).parameters}
    if "datasets" in options:
        options["dataset_names"] = "--dataset"
    if "num_workers" in options:
        options["count_workers"] = "--num-workers"
    values = r"'[^']*'(?: or '[^']*')*|[\w.-]*\w"

    def replace(match: re.Match[str]) -> str:
        name, value = match[1], (match[2] or "").replace("'", "")
        if not value:
            return options[name] if "_" in name else name  # else it may be an ordinary word
        return options[name] if value == "True" else f"{options[name]} {value}"

    # Not inside paths.
    return re.sub(rf"(?<![\w/.-])({'|'.join(options)})(?:=({values}))?(?![\w/-]|\.\w)", replace, text)


def _with_suggestion(text: str, context: Any) -> str:
    """Return the message with "Did you mean …?" for a mistyped command or option.

    Typer suggests commands since 0.20 and lists options as "Possible options".
    """
    typo = re.match(r"No such (?:command '|option:? )(--?[\w-]+|[\w-]+)'?", text)
    if typo is None or context is None:
        return text
    if "command" in typo[0]:
        known = context.command.list_commands(context)
    else:
        known = [name for param in context.command.get_params(context) for name in param.opts]
    hint = suggest(typo[1], known).strip(" ()")
    return f"{typo[0]}. {hint[0].upper()}{hint[1:]}" if hint else typo[0]


class _PlainHelp:
    """Shows no value after flags in ``--help``."""

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
    """A group of commands that reports wrong usage in one line."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **more: Any) -> Any:
        """Run a command; report a mistyped or missing option in one line, with exit code 2."""
        standalone_mode = more.pop("standalone_mode", True)
        try:
            code = super().main(args, *rest, **{**more, "standalone_mode": False})
        except Exception as error:
            # Typer's errors; their classes depend on its version, so they are recognized by a method.
            format_message = getattr(error, "format_message", None)
            if not standalone_mode or not callable(format_message):
                raise
            context = getattr(error, "ctx", None)
            name = "packhorse" if context is None else context.command_path
            text = " ".join(str(format_message()).replace("Value error, ", "").split()).rstrip(".")
            text = _with_suggestion(text, context)
            typer.echo(f"{name}: {text[:1].lower()}{text[1:]} (see {name} --help)", err=True)
            sys.exit(int(getattr(error, "exit_code", CANNOT)))
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)
