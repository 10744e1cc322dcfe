"""``packhorse count``: count the tokens of every row exactly, and save the counts next to the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packhorse.cli import terminal
from packhorse.errors import ConfigError
from packhorse.types import MEDIA_KINDS
from packhorse.utils.progress import Progress

if TYPE_CHECKING:
    from packhorse.count.count_report import CountReport, DatasetReport

_SHOWN_FAILURES = 20

EXAMPLES = terminal.examples(
    "count",
    "Exit code 0: counted (bad rows are listed), 1: --verify found a difference, 2: could not be counted.",
    {
        "meta.json --processor ./model": "a second run reuses the counts of unchanged rows",
        "meta.json --processor ./model --verify 100": "also encode 100 rows and compare",
        "meta.json --processor ./model --retry-bad --dataset charts": "after images have been added",
        "meta.json --processor ./model --json > counts.json": "for machines",
    },
)


def count(
    meta: terminal.META,
    processor: terminal.PROCESSOR,
    engine: Annotated[str, terminal.text("NAME", "Where to count: local or ray.")] = "local",
    ray_address: Annotated[
        str | None, terminal.text("ADDRESS", "An existing Ray cluster; default: start one here.")
    ] = None,
    num_workers: terminal.WORKERS = None,
    datasets: terminal.DATASETS = None,
    task: terminal.TASK = None,
    write_jsonl: Annotated[
        Path | None, terminal.text("DIR", "Also write copies of the rows with their counts to this folder.")
    ] = None,
    verify: Annotated[
        int, terminal.number("Random rows to compare with the real processor; fail if one differs.", 0)
    ] = 0,
    seed: Annotated[int, terminal.number("Seed for the choice of verified rows.", None)] = 0,
    retry_bad: Annotated[
        bool, terminal.flag("--retry-bad", "Recount parts with bad rows (media have been added).")
    ] = False,
    fresh: Annotated[bool, terminal.flag("--fresh", "Recount everything (media have changed).")] = False,
    part_rows: Annotated[
        int | None, terminal.number("Rows per part of a count; default: as in the last run.")
    ] = None,
    trust_remote_code: terminal.TRUST = False,
    bad: Annotated[
        int, terminal.number("Bad rows to list for each reason and dataset (also in --json).", 0)
    ] = 3,
    verbose: terminal.VERBOSE = False,
    as_json: terminal.AS_JSON = False,
) -> None:
    """Count the tokens of every row exactly, without decoding a pixel, and save the counts next to the data.

    A second run reuses the counts of unchanged rows; an interrupted run continues where it stopped.
    """
    with terminal.one_line_errors("count", "the next run reuses the finished parts", verbose):
        from packhorse.count.count_report import write_counted_jsonl
        from packhorse.count.counting import count_meta
        from packhorse.count.engines import make_engine

        with Progress("counting") as progress:
            report = count_meta(
                meta,
                processor,
                dataset_names=datasets or None,
                task=terminal.task_of(task),
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
            raise ConfigError(f"{meta}: it lists no dataset", path=meta)
        written: list[Path] = []
        if write_jsonl is not None:
            with Progress("writing") as progress:
                written = write_counted_jsonl(report.files, write_jsonl, progress)
        advice = _advice(meta, report)
    if as_json:
        typer.echo(terminal.to_json({"version": 1, **report.as_dict(), "advice": advice, "written": written}))
    else:
        _print(report, written, advice)
    if report.verified is not None and report.verified.failed:
        raise typer.Exit(1)


def _advice(meta: str, report: CountReport) -> list[str]:
    """Return a line for each dataset whose media are all missing, but exist next to the meta or data file."""
    from packhorse.formats.meta import read_meta
    from packhorse.tools.media_dir_hint import media_dir_advice

    files = {
        dataset.name: counted.file
        for dataset, counted in zip(report.datasets, report.files, strict=True)
        if "missing_media" in dataset.bad and not any(dataset.media.values())
    }
    # The report has absolute paths; only the meta file shows whether a media_dir is given.
    configs = read_meta(meta, list(files)) if files else []
    return media_dir_advice(meta, [(config, files[config.name]) for config in configs])


def _print(report: CountReport, written: list[Path], advice: list[str]) -> None:
    out = terminal.Output()
    _print_table(report, out)
    longest = ", ".join(
        f"{each.longest_row} ({each.longest:,})" for each in report.datasets if each.longest_row
    )
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
    out.lines(f"not compared, cannot be decoded: {line}" for line in verified.not_encoded[:_SHOWN_FAILURES])
    out.lines(f"differs: {line}" for line in verified.failed[:_SHOWN_FAILURES])
    result = "all equal to the real processor"
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
        yield f"{dataset.name}: no supervised token in {share}, e.g. {rows}"
    for reason, count in dataset.bad.items():
        shown = [row for row in dataset.examples if row.reason == reason]
        yield f"{dataset.name}: {count:,} {reason}{', e.g.' if 0 < len(shown) < count else ''}"
        for row in shown:
            yield f"  {row.key}, {row.location}: {row.detail}"
        if reason == "missing_media" and dataset.reused:
            yield "  (found by an earlier run; if the media have been added since, count with --retry-bad)"


def _print_table(report: CountReport, out: terminal.Output) -> None:
    """Print a row for each dataset, with columns for the kinds of tokens that they have."""
    counts = report.as_dict()
    kinds = [kind for kind in MEDIA_KINDS if counts["all"]["tokens"][kind]]
    by_kind = ["text", *kinds] if kinds else []
    names = ["rows", "tokens", *by_kind, "supervised", "%", "media", "longest", "bad"]
    rows = [[dataset["name"], *_cells(dataset, names)] for dataset in counts["datasets"]]
    total = ["all", *_cells(counts["all"], names)] if len(rows) > 1 else None
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
