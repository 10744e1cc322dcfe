"""``packhorse check``: a linter for the data of vision-language models."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packhorse.cli.terminal import (
    AS_JSON,
    DATASETS,
    META,
    TRUST,
    WORKERS,
    new_table,
    one_line_errors,
    out_console,
    processor_option,
)
from packhorse.utils.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from packhorse.tools.check import CheckReport, Finding, Fixed


_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_WIDTH = 140  # of a table that goes to a file

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
        int, typer.Option(min=0, metavar="N", help="Show so many rows of each rule and data set.")
    ] = 3,
    tiny: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tell pictures with a side below so many pixels.")
    ] = 16,
    workers: WORKERS = None,
    trust_remote_code: TRUST = False,
    as_json: AS_JSON = False,
) -> None:
    """Find what is wrong with rows and media before a model is trained on them.

    Every medium is opened and decoded. Nothing is changed; a cleaned copy is written only with --fix.
    """
    with one_line_errors("check", "nothing was written"):
        from packhorse.count.engines import engine_named
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
                engine=engine_named("local", workers),
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
    """A line for each data set whose media are all missing, though they lie beside the meta or data file."""
    from packhorse.tools.media_dir_hint import media_dir_advice

    told = [
        media_dir_advice(meta, one.config, one.file)
        for one in report.files
        if one.file is not None
        and one.media == one.media_failed > 0
        and any(rule == "missing_media" for rule, _ in one.counts)
    ]
    return [line for line in told if line is not None]


def _print_json(report: CheckReport, fixed: Fixed | None, advice: list[str]) -> None:
    """One object; the findings are written one by one, since they may be many."""
    head = report.as_dict() | {"advice": advice, "fixed": None if fixed is None else fixed.as_dict()}
    typer.echo(json.dumps(head, indent=2).removesuffix("\n}") + ',\n  "findings": [', nl=False)
    separator = "\n"
    for finding in report.findings():
        typer.echo(f"{separator}    {json.dumps(finding.as_dict())}", nl=False)
        separator = ",\n"
    typer.echo("]\n}" if separator == "\n" else "\n  ]\n}")


def _print(report: CheckReport, fixed: Fixed | None, show: int, advice: list[str]) -> None:
    console = out_console(_WIDTH)
    counts = report.counts()
    if any(counts.values()):
        console.print(_table(report))
        _print_rows(report, console, show)
    rows = sum(file.rows for file in report.files)
    media = sum(file.media for file in report.files)
    what = ", ".join(
        f"{number:,} {name}{'' if number == 1 else 's'}" for name, number in counts.items() if number
    )
    opened = media - sum(file.media_failed for file in report.files)
    decoded = "decoded" if report.settings.decode else "looked at (headers)"
    some = f"{opened:,} of {media:,}" if opened < media else f"{media:,}"
    sets = "1 data set" if len(report.files) == 1 else f"{len(report.files)} data sets"
    console.print(
        f"{rows:,} rows of {sets} checked, {some} media {decoded}, in {report.seconds:.1f} s: "
        f"{what or 'nothing found'}."
    )
    for line in advice:
        console.print(line, markup=False, soft_wrap=True)
    needed: dict[str, list[str]] = defaultdict(list)
    for rule, need in report.not_asked().items():
        needed[need].append(rule)
    for need, rules in needed.items():
        console.print(f"not asked ({need}): {', '.join(rules)}", soft_wrap=True)
    if fixed is not None:
        _print_fixed(fixed, console)


def _table(report: CheckReport) -> Table:
    from rich.markup import escape

    from packhorse.tools.check.check_report import rule_counts

    table = new_table("Findings by rule and data set")
    for name in ("severity", "rule"):
        table.add_column(name, no_wrap=True)
    table.add_column("data set", overflow="fold")
    table.add_column("found", justify="right", no_wrap=True)
    for severity, rule, dataset, number in rule_counts(report.files):
        table.add_row(severity, rule, escape(dataset), f"{number:,}", style=_COLOURS[severity])
    return table


def _print_rows(report: CheckReport, console: Console, show: int) -> None:
    """The first rows of each rule and data set."""
    from packhorse.tools.check import RULES
    from packhorse.tools.check.check_report import rule_counts

    if not show:
        return
    first: dict[tuple[str, str, str], list[Finding]] = defaultdict(list)
    for finding in report.findings():
        group = first[finding.severity, finding.rule, finding.dataset]
        if len(group) < show:
            group.append(finding)
    for severity, rule, dataset, number in rule_counts(report.files):
        shown = first[severity, rule, dataset]
        more = f", the first {len(shown)} of {number:,}" if len(shown) < number else ""
        console.print(f"{severity} {rule}", style=_COLOURS[severity], end="")
        console.print(f" in {dataset}{more}: {RULES[rule].advice}", markup=False, soft_wrap=True)
        for finding in shown:
            where = finding.key if finding.row is None else f"{finding.key}, {finding.location}"
            console.print(f"  {where}: {finding.found}", markup=False, soft_wrap=True)
    console.print()


def _print_fixed(fixed: Fixed, console: Console) -> None:
    for one in fixed.datasets:
        console.print(
            f"{one.name}: {one.rows:,} rows, {one.kept:,} kept ({one.repaired:,} of them repaired), "
            f"{one.left_out:,} left out",
            markup=False,
            soft_wrap=True,
        )
    console.print(f"wrote {fixed.meta}; {fixed.ledger} names each row", markup=False, soft_wrap=True)
