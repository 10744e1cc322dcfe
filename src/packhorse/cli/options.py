"""Arguments and options that several commands share: each is spelled here once."""

from __future__ import annotations

from typing import Annotated, Any

import typer


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
