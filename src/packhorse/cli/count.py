"""``packhorse count``: exact token counts of every row, kept beside the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packhorse.cli.terminal import (
    AS_JSON,
    DATASETS,
    META,
    PROCESSOR,
    TRUST,
    WORKERS,
    Output,
    one_line_errors,
    to_json,
)
from packhorse.types import MEDIA_KINDS
from packhorse.utils.progress import Progress

if TYPE_CHECKING:
    from packhorse.count.count_report import CountReport, DatasetReport


_SHOWN_FAILURES = 20

EXAMPLES = """
Exit code 0: counted (bad rows are told), 1: --verify found a difference, 2: could not be counted.

[bold]Examples[/bold]

packhorse count meta.json --processor Qwen/Qwen3-VL-8B-Instruct
[dim]# once; a second run takes over what has not changed[/dim]

packhorse count meta.json --processor ./model --verify 100
[dim]# and encode 100 random rows for real: is every count right?[/dim]

packhorse count meta.json --processor ./model --retry-bad --dataset charts
[dim]# missing images have arrived[/dim]

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
    num_workers: WORKERS = None,
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
            help="Rows that are counted, kept and reused together; as before without it.",
        ),
    ] = None,
    trust_remote_code: TRUST = False,
    bad: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="List so many bad rows of each reason and dataset (also in --json)."
        ),
    ] = 3,
    as_json: AS_JSON = False,
) -> None:
    """Count the tokens of every row exactly, without decoding a pixel, and keep the result beside the data.

    A second run takes over what has not changed; an interrupted one continues where it stopped.
    """
    with one_line_errors("count", "the next run continues with what is finished"):
        from packhorse.count.count_report import write_counted_jsonl
        from packhorse.count.counting import count_meta
        from packhorse.count.engines import make_engine
        from packhorse.errors import ConfigError

        with Progress("counting") as progress:
            report = count_meta(
                meta,
                processor,
                dataset_names=datasets or None,
                engine=make_engine(engine, num_workers, ray_address),
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
            raise ConfigError(f"{meta}: it names no dataset")
        written: list[Path] = []
        if write_jsonl is not None:
            with Progress("writing") as progress:
                written = write_counted_jsonl(report.files, write_jsonl, progress)
        advice = _advice(meta, report)
    if as_json:
        typer.echo(to_json({"version": 1, **report.as_dict(), "advice": advice, "written": written}))
    else:
        _print(report, written, advice)
    if report.verified is not None and report.verified.failed:
        raise typer.Exit(1)


def _advice(meta: str, report: CountReport) -> list[str]:
    """Return a line for each dataset whose media are all missing, but exist next to the meta or data file."""
    from packhorse.formats.meta import read_meta
    from packhorse.tools.media_dir_hint import media_dir_advice

    files = {
        one.name: counted.file
        for one, counted in zip(report.datasets, report.files, strict=True)
        if "missing_media" in one.bad and not any(one.media.values())
    }
    # The report has absolute paths; only the meta file shows whether a media_dir was given.
    configs = read_meta(meta, list(files)) if files else []
    return media_dir_advice(meta, [(config, files[config.name]) for config in configs])


def _print(report: CountReport, written: list[Path], advice: list[str]) -> None:
    out = Output()
    _print_table(report, out)
    longest = ", ".join(f"{one.longest_row} ({one.longest:,})" for one in report.datasets if one.longest_row)
    if longest:
        out.line(f"longest rows: {longest}")
    for dataset in report.datasets:
        out.lines(_remarks(dataset))
    out.lines(advice)
    reused, rate = report.totals()["reused"], ""
    if report.counted_rows and report.counting_seconds:
        rate = f" ({report.counted_rows / report.counting_seconds:,.0f} rows/s)"
    out.line(
        f"{report.counted_rows:,} rows counted{rate}, {reused:,} reused, in {report.seconds:.1f} s "
        f"({report.opening_seconds:.1f} s to open processor and files, {report.counting_seconds:.1f} s to "
        "count)."
    )
    out.lines(f"counts in {path}" for path in dict.fromkeys(dataset.sidecar for dataset in report.datasets))
    out.lines(f"wrote {copy}" for copy in written)
    if (verified := report.verified) is None:
        return
    out.lines(
        f"cannot be decoded, so not compared: {line}" for line in verified.not_encoded[:_SHOWN_FAILURES]
    )
    out.lines(f"differs: {line}" for line in verified.failed[:_SHOWN_FAILURES])
    result = "all as the real processor makes them"
    if verified.failed:
        result = f"{len(verified.failed):,} differ from the real processor"
    out.line(f"verified {verified.checked - len(verified.not_encoded):,} rows: {result}")


def _remarks(dataset: DatasetReport) -> Iterator[str]:
    """Yield what the table does not show: inexact counts, unsupervised rows, bad rows."""
    if dataset.off_by:
        bound = f"at most {dataset.off_by:,} tokens a row" if dataset.off_by > 0 else "an unknown number"
        yield f"{dataset.name}: not exact, off by {bound}"
    if dataset.unsupervised:
        rows = ", ".join(dataset.unsupervised_rows)
        share = f"{dataset.unsupervised:,} of {dataset.rows:,} rows"
        yield f"{dataset.name}: nothing is supervised of {share}, as {rows}"
    for reason, number in dataset.bad.items():
        shown = [row for row in dataset.examples if row.reason == reason]
        yield f"{dataset.name}: {number:,} {reason}{', as' if 0 < len(shown) < number else ''}"
        for row in shown:
            yield f"  {row.key}, {row.location}: {row.detail}"
        if reason == "missing_media" and dataset.reused:
            yield "  (as an earlier run found it; if the media are there now, count with --retry-bad)"


def _print_table(report: CountReport, out: Output) -> None:
    """Print a row for each dataset; a kind of tokens that none of them has gets no column."""
    every = report.as_dict()
    kinds = [kind for kind in MEDIA_KINDS if every["all"]["tokens"][kind]]
    by_kind = ["text", *kinds] if kinds else []
    names = ["rows", "tokens", *by_kind, "supervised", "%", "media", "longest", "bad"]
    rows = [[one["name"], *_cells(one, names)] for one in every["datasets"]]
    total = ["all", *_cells(every["all"], names)] if len(rows) > 1 else None
    out.table("Tokens by dataset", ["dataset", *names], rows, total=total)


def _cells(counts: Mapping[str, Any], names: list[str]) -> list[str | int]:
    total, supervised = counts["total"], counts["supervised"]
    cells = {
        "rows": counts["rows"],
        "tokens": total,
        **counts["tokens"],
        "supervised": supervised,
        "%": f"{supervised / total:.1%}" if total else "-",
        "media": sum(counts["media"].values()),
        "longest": counts["longest"],
        "bad": sum(counts["bad"].values()),
    }
    return [cells[name] for name in names]
