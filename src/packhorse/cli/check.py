"""``packhorse check``: a linter for the data of vision-language models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packhorse.cli.terminal import (
    AS_JSON,
    DATASETS,
    META,
    TRUST,
    WORKERS,
    Output,
    number_of,
    one_line_errors,
    processor_option,
    to_json,
)
from packhorse.utils.progress import Progress

if TYPE_CHECKING:
    from packhorse.tools.check import CheckReport, Finding, Fixed


_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}

EXAMPLES = """
Exit code 0: no error (warnings and notes are told; with --strict: no warning either), 1: errors found,
2: could not be checked.

[bold]Examples[/bold]

packhorse check meta.json
[dim]# rows and media, no model needed[/dim]

packhorse check meta.json --processor Qwen/Qwen3-VL-8B-Instruct --max-length 8192
[dim]# also special tokens in texts, rows that teach nothing, rows that are too long[/dim]

packhorse check meta.json --json --strict > report.json
[dim]# for CI: one JSON object; warnings fail too[/dim]

packhorse check meta.json --fix clean --drop-duplicates
[dim]# writes clean/meta.json without the bad rows; clean/ledger.jsonl names each of them[/dim]
"""


def check(
    meta: META,
    processor: Annotated[str | None, processor_option(", for the rules that need it")] = None,
    max_length: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Rows with more tokens are too long; needs --processor."),
    ] = None,
    headers: Annotated[
        bool,
        typer.Option("--headers", help="Read the headers of media only; do not decode them."),
    ] = False,
    datasets: DATASETS = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="RULE", help="Do not ask this rule; may be given again."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Warnings fail as errors do (exit code 1).")
    ] = False,
    fix: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a cleaned copy to this new or empty folder.")
    ] = None,
    drop_duplicates: Annotated[
        bool,
        typer.Option("--drop-duplicates", help="With --fix: leave out repeated conversations."),
    ] = False,
    show: Annotated[
        int, typer.Option(min=0, metavar="N", help="Show so many rows of each rule and dataset.")
    ] = 3,
    tiny: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tell images with a side below so many pixels.")
    ] = 16,
    num_workers: WORKERS = None,
    trust_remote_code: TRUST = False,
    as_json: AS_JSON = False,
) -> None:
    """Find what is wrong with rows and media before a model is trained on them.

    Every media item is opened and decoded. Nothing is changed; a cleaned copy is written only with --fix.
    """
    with one_line_errors("check", "nothing was written"):
        from packhorse.count.engines import make_engine
        from packhorse.errors import ConfigError
        from packhorse.tools.check import check_meta, check_target, write_fixed

        if drop_duplicates and fix is None:
            raise ConfigError("--drop-duplicates goes with --fix DIR")
        if max_length is not None and processor is None:
            raise ConfigError("--max-length goes with --processor: tokens are counted with it")
        if fix is not None:
            check_target(fix)  # before the long work
        with Progress("checking") as progress:
            report = check_meta(
                meta,
                processor,
                dataset_names=datasets or None,
                max_length=max_length,
                decode=not headers,
                tiny=tiny,
                ignore=ignore or (),
                repair=fix is not None,
                engine=make_engine("local", num_workers),
                trust_remote_code=trust_remote_code,
                progress=progress,
            )
        fixed: Fixed | None = None
        if fix is not None:
            with Progress("writing") as progress:
                fixed = write_fixed(report, fix, drop_duplicates=drop_duplicates, progress=progress)
        advice = _advice(meta, report)
    if as_json:
        _print_json(report, fixed, advice)
    else:
        _print(report, fixed, show, advice)
    if not report.passed(strict):
        raise typer.Exit(1)


def _advice(meta: str, report: CheckReport) -> list[str]:
    """Return a line for each dataset whose media are all missing, but exist next to the meta or data file."""
    from packhorse.tools.media_dir_hint import media_dir_advice

    without_media = (
        (one.config, one.file)
        for one in report.files
        if one.file is not None
        and one.media == one.media_failed > 0
        and any(rule == "missing_media" for rule, _ in one.counts)
    )
    return media_dir_advice(meta, without_media)


def _print_json(report: CheckReport, fixed: Fixed | None, advice: list[str]) -> None:
    """Print one object; the findings are written one by one, since they may be many."""
    head = to_json(report.as_dict() | {"advice": advice, "fixed": fixed})
    typer.echo(head.removesuffix("\n}") + ',\n  "findings": [', nl=False)
    separator = "\n"
    for finding in report.findings():
        typer.echo(f"{separator}    {to_json(finding, indent=None)}", nl=False)
        separator = ",\n"
    typer.echo("]\n}" if separator == "\n" else "\n  ]\n}")


def _print(report: CheckReport, fixed: Fixed | None, show: int, advice: list[str]) -> None:
    out = Output()
    if rules := report.by_rule():
        out.table(
            "Findings by rule and dataset",
            ("severity", "rule", "dataset", "found"),
            rules,
            text_columns=3,
            styles=[_COLOURS[severity] for severity, *_ in rules],
        )
        if show:
            _print_rows(report, rules, out, show)
    totals = report.totals()
    opened, media = totals["media"] - totals["media_failed"], totals["media"]
    decoded = "decoded" if report.settings.decode else "looked at (headers)"
    some = f"{opened:,} of {media:,}" if opened < media else f"{media:,}"
    what = ", ".join(number_of(number, name) for name, number in report.counts().items() if number)
    out.line(
        f"{totals['rows']:,} rows of {number_of(len(report.files), 'data set')} checked, {some} media "
        f"{decoded}, in {report.seconds:.1f} s: {what or 'nothing found'}."
    )
    out.lines(advice)
    needed: dict[str, list[str]] = defaultdict(list)
    for rule, need in report.not_asked().items():
        needed[need].append(rule)
    out.lines(f"not asked ({need}): {', '.join(rules)}" for need, rules in needed.items())
    if fixed is not None:
        out.lines(
            f"{one.name}: {one.rows:,} rows, {one.kept:,} kept ({one.repaired:,} of them repaired), "
            f"{one.dropped:,} dropped"
            for one in fixed.datasets
        )
        out.line(f"wrote {fixed.meta}; {fixed.ledger} names each row")


def _print_rows(
    report: CheckReport, rules: Sequence[tuple[str, str, str, int]], out: Output, show: int
) -> None:
    """Print the first rows of each rule and dataset."""
    from packhorse.tools.check import RULES

    first: dict[tuple[str, str, str], list[Finding]] = defaultdict(list)
    for finding in report.findings():
        group = first[finding.severity, finding.rule, finding.dataset]
        if len(group) < show:
            group.append(finding)
    for severity, rule, dataset, number in rules:
        shown = first[severity, rule, dataset]
        more = f", the first {len(shown)} of {number:,}" if len(shown) < number else ""
        out.line(f"{severity} {rule}", style=_COLOURS[severity], end="")
        out.line(f" in {dataset}{more}: {RULES[rule].advice}")
        for finding in shown:
            where = finding.key if finding.row is None else f"{finding.key}, {finding.location}"
            out.line(f"  {where}: {finding.found}")
    out.line()
