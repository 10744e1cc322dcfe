"""``packhorse count``: exact token counts of every row, kept beside the data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packhorse.cli.terminal import (
    AS_JSON,
    DATASETS,
    META,
    PROCESSOR,
    TRUST,
    WORKERS,
    new_table,
    one_line_errors,
    out_console,
)
from packhorse.types import MEDIA_KINDS
from packhorse.utils.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from packhorse.count.count_report import CountReport, DatasetReport


_WIDTH = 140  # of a table that goes to a file
_SHOWN_FAILURES = 20

EXAMPLES = """
Exit code 0: counted (bad rows are told), 1: --verify found a difference, 2: could not be counted.

[bold]Examples[/bold]

packhorse count meta.json --processor Qwen/Qwen3-VL-8B-Instruct
[dim]# once; a second run takes over what has not changed[/dim]

packhorse count meta.json --processor ./model --verify 100
[dim]# and encode 100 random rows for real: is every count right?[/dim]

packhorse count meta.json --processor ./model --retry-bad --dataset charts
[dim]# missing pictures have arrived[/dim]

packhorse count meta.json --processor ./model --json > counts.json
[dim]# for machines[/dim]
"""


def count(
    meta: META,
    processor: PROCESSOR,
    engine: Annotated[str, typer.Option(metavar="NAME", help="Where to count: local or ray.")] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="An existing Ray cluster; one is started here without it."),
    ] = None,
    workers: WORKERS = None,
    datasets: DATASETS = None,
    write_jsonl: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write copies of the rows with their counts to this folder."),
    ] = None,
    verify: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Compare so many random rows with the real processor; fail if one differs.",
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(metavar="N", help="Which rows are verified.")] = 0,
    retry_bad: Annotated[
        bool,
        typer.Option("--retry-bad", help="Count parts with bad rows again (media have arrived)."),
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Count everything again (media have changed).")
    ] = False,
    part_rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Rows that are counted, kept and taken over together; as before without it.",
        ),
    ] = None,
    trust_remote_code: TRUST = False,
    bad: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="List so many bad rows of each reason and data set (also in --json)."
        ),
    ] = 3,
    as_json: AS_JSON = False,
) -> None:
    """Count the tokens of every row exactly, without decoding a pixel, and keep the result beside the data.

    A second run takes over what has not changed; an interrupted one continues where it stopped.
    """
    with one_line_errors("count", "the next run continues with what is finished"):
        from packhorse.count.count_jsonl import write_counted_jsonl
        from packhorse.count.counting import count_meta
        from packhorse.count.engines import engine_named
        from packhorse.errors import ConfigError

        with Progress("counting") as progress:
            report = count_meta(
                meta,
                processor,
                dataset_names=datasets or None,
                engine=engine_named(engine, workers, ray_address),
                part_rows=part_rows,
                verify=verify,
                seed=seed,
                retry_bad=retry_bad,
                fresh=fresh,
                trust_remote_code=trust_remote_code,
                bad_rows=bad,
                progress=progress,
            )
        if not report.datasets:
            raise ConfigError(f"{meta}: it names no data set")
        written: list[Path] = []
        if write_jsonl is not None:
            with Progress("writing") as progress:
                written = write_counted_jsonl(report.files, write_jsonl, progress)
        advice = _advice(meta, report)
    if as_json:
        told = {
            "version": 1,
            **report.as_dict(),
            "advice": advice,
            "written": [str(path) for path in written],
        }
        typer.echo(json.dumps(told, indent=2))
    else:
        _print(report, written, advice)
    if report.verified is not None and report.verified.failed:
        raise typer.Exit(1)


def _advice(meta: str, report: CountReport) -> list[str]:
    """A line for each data set whose media are all missing, though they lie beside the meta or data file."""
    from packhorse.formats.meta_file import read_meta
    from packhorse.tools.media_dir_hint import media_dir_advice

    none = {
        one.name: counted.file
        for one, counted in zip(report.datasets, report.files, strict=True)
        if "missing_media" in one.bad and not any(one.media.values())
    }
    # The report has absolute paths; whether a media_dir was named stands in the meta file.
    told = (
        [media_dir_advice(meta, one, none[one.name]) for one in read_meta(meta, list(none))] if none else []
    )
    return [line for line in told if line is not None]


def _print(report: CountReport, written: list[Path], advice: list[str]) -> None:
    console = out_console(_WIDTH)
    console.print(_table(report))
    longest = ", ".join(f"{one.longest_row} ({one.longest:,})" for one in report.datasets if one.longest_row)
    if longest:
        console.print(f"longest rows: {longest}", markup=False, soft_wrap=True)
    for dataset in report.datasets:
        for line in _remarks(dataset):
            console.print(line, markup=False, soft_wrap=True)
    for line in advice:
        console.print(line, markup=False, soft_wrap=True)
    taken_over, rate = sum(dataset.taken_over for dataset in report.datasets), ""
    if report.counted_rows and report.counting_seconds:
        rate = f" ({report.counted_rows / report.counting_seconds:,.0f} rows/s)"
    opening, counting = f"{report.opening_seconds:.1f}", f"{report.counting_seconds:.1f}"
    console.print(
        f"{report.counted_rows:,} rows counted{rate}, {taken_over:,} taken over, in {report.seconds:.1f} s "
        f"({opening} s to open processor and files, {counting} s to count).",
        soft_wrap=True,
    )
    for path in dict.fromkeys(dataset.sidecar for dataset in report.datasets):
        console.print(f"counts in {path}", markup=False, soft_wrap=True)
    for copy in written:
        console.print(f"wrote {copy}", markup=False, soft_wrap=True)
    _print_verified(report, console)


def _remarks(dataset: DatasetReport) -> Iterator[str]:
    """What the table does not tell of a data set: rows that are not exact, not learned, or bad."""
    if dataset.off_by:
        bound = f"at most {dataset.off_by:,} tokens a row" if dataset.off_by > 0 else "an unknown number"
        yield f"{dataset.name}: not exact, off by {bound}"
    if dataset.unsupervised:
        rows = ", ".join(dataset.unsupervised_rows)
        share = f"{dataset.unsupervised:,} of {dataset.rows:,} rows"
        yield f"{dataset.name}: nothing is learned of {share}, as {rows}"
    for reason, number in dataset.bad.items():
        shown = [row for row in dataset.examples if row.reason == reason]
        yield f"{dataset.name}: {number:,} {reason}{', as' if 0 < len(shown) < number else ''}"
        for row in shown:
            yield f"  {row.key}, {row.location}: {row.detail}"
        if reason == "missing_media" and dataset.taken_over:
            yield "  (as an earlier run found it; if the media are there now, count with --retry-bad)"


def _table(report: CountReport) -> Table:
    """A row for each data set; kinds of tokens that nobody has are left out, to fit on a terminal."""
    from rich.markup import escape

    kinds = [kind for kind in MEDIA_KINDS if any(one.tokens[kind] for one in report.datasets)]
    names = [
        "rows",
        "tokens",
        *(["text", *kinds] if kinds else []),
        "learned",
        "%",
        "media",
        "longest",
        "bad",
    ]
    table = new_table("Tokens by data set")
    table.add_column("data set", overflow="fold", min_width=8)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for one in report.datasets:
        table.add_row(escape(one.name), *_cells([one], names))
    if len(report.datasets) > 1:
        table.add_section()
        table.add_row("all", *_cells(report.datasets, names))
    return table


def _cells(datasets: Sequence[DatasetReport], names: list[str]) -> list[str]:
    total, supervised = sum(one.total for one in datasets), sum(one.supervised for one in datasets)
    values = {
        "rows": sum(one.rows for one in datasets),
        "tokens": total,
        "learned": supervised,
        **{kind: sum(one.tokens[kind] for one in datasets) for kind in ("text", *MEDIA_KINDS)},
        "media": sum(sum(one.media.values()) for one in datasets),
        "longest": max(one.longest for one in datasets),
        "bad": sum(sum(one.bad.values()) for one in datasets),
    }
    cells = {name: f"{value:,}" for name, value in values.items()}
    cells["%"] = f"{supervised / total:.1%}" if total else "-"
    return [cells[name] for name in names]


def _print_verified(report: CountReport, console: Console) -> None:
    verified = report.verified
    if verified is None:
        return
    for line in verified.not_encoded[:_SHOWN_FAILURES]:
        console.print(f"cannot be decoded, so not compared: {line}", markup=False, soft_wrap=True)
    for line in verified.failed[:_SHOWN_FAILURES]:
        console.print(f"differs: {line}", markup=False, soft_wrap=True)
    compared = verified.checked - len(verified.not_encoded)
    if verified.failed:
        console.print(f"verified {compared:,} rows: {len(verified.failed):,} differ from the real processor")
    else:
        console.print(f"verified {compared:,} rows: all as the real processor makes them")
