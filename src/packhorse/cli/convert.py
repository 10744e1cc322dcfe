"""``packhorse convert``: write any readable dataset as Packhorse's own JSONL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packhorse.cli import terminal
from packhorse.utils.progress import Progress

if TYPE_CHECKING:
    from packhorse.tools.to_jsonl import Converted

EXAMPLES = terminal.examples(
    "convert",
    "Exit code 0: all rows were converted, 1: some were dropped (see the ledger), 2: could not be converted.",
    {
        "chats.parquet train.jsonl": "images inside of rows become files of the folder media",
        "data/dataset_info.json train.jsonl --dataset charts": "a dataset of LLaMA-Factory",
        "meta.json data/train.jsonl --media-dir data/images": "paths of media relative to data/images",
        "meta.json train.jsonl --overwrite --json": "replace train.jsonl; the report for machines",
    },
)


def convert(
    source: Annotated[
        str,
        typer.Argument(help="A data file, a meta file, or a dataset_info.json.", metavar="SOURCE"),
    ],
    out: Annotated[str, typer.Argument(help="The new file, train.jsonl for example.", metavar="OUT")],
    datasets: terminal.DATASETS = None,
    task: terminal.TASK = None,
    media_dir: Annotated[
        Path | None,
        terminal.text("DIR", "Write paths in this folder relative to it; default: the folder of OUT."),
    ] = None,
    overwrite: Annotated[
        bool, terminal.flag("--overwrite", "Replace OUT and its ledger if they exist.")
    ] = False,
    verbose: terminal.VERBOSE = False,
    as_json: terminal.AS_JSON = False,
) -> None:
    """Write any readable dataset as JSONL with messages and media columns, and a ledger of the rest.

    Reading OUT gives the same examples. Training does not need it: every command reads SOURCE itself.
    """
    with terminal.one_line_errors("convert", "nothing was written", verbose):
        from packhorse.tools.to_jsonl import write_jsonl

        with Progress("converting") as progress:
            converted = write_jsonl(
                source,
                out,
                dataset_names=datasets or None,
                task=terminal.task_of(task),
                media_dir=media_dir,
                overwrite=overwrite,
                progress=progress,
            )
    if as_json:
        typer.echo(terminal.to_json({"version": 1, **converted.as_dict()}))
    else:
        _print(converted)
    if converted.totals()["dropped"]:
        raise typer.Exit(1)


def _print(converted: Converted) -> None:
    out = terminal.Output()
    names = ("rows", "written", "dropped")
    total = converted.totals()
    out.table(
        "Converted rows by dataset",
        ["dataset", *names],
        [[dataset.name, *(getattr(dataset, name) for name in names)] for dataset in converted.datasets],
        total=["all", *total.values()] if len(converted.datasets) > 1 else None,
    )
    for dataset in converted.datasets:
        out.line(f"{dataset.name}: {dataset.found}")
        out.lines(f"{dataset.name}: {count:,} {reason}" for reason, count in dataset.reasons.items())
    files = f", {terminal.number_of(converted.media_files, 'media file')}" if converted.media_files else ""
    out.line(f"wrote {converted.out} ({terminal.number_of(total['written'], 'row')}){files}")
    out.lines(f"{one.name}: {advice}" for one in converted.datasets if (advice := one.found.advice()))
    if Path(converted.ledger).stat().st_size:
        out.line(f"{converted.ledger} lists what was dropped or changed")
    options = dict(converted.options)
    read_with = [f"task={options.pop('task')!r}"] if "task" in options else []
    read_with += [f"dataset_options={options!r}"] if options else []
    if read_with:
        out.line(f"read it with {', '.join(read_with)}")
