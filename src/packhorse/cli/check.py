"""``packhorse check``: find errors in rows and media."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packhorse.cli import terminal
from packhorse.errors import ConfigError
from packhorse.utils.progress import Progress

if TYPE_CHECKING:
    from packhorse.tools.check import CheckReport, Finding, Fixed

_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}

EXAMPLES = terminal.examples(
    "check",
    "Exit code 0: no errors (with --strict: no warnings), 1: errors found, 2: could not be checked.",
    {
        "meta.json": "rows and media, no model needed",
        "meta.json --processor ./model --max-length 8192": "also special tokens in texts and row lengths",
        "meta.json --json --strict > report.json": "for CI: one JSON object; warnings fail, too",
        "meta.json --fix clean --drop-duplicates": "write a copy without the bad rows",
    },
)


def check(
    meta: terminal.META,
    processor: Annotated[str | None, terminal.processor(", for the rules that need it")] = None,
    max_length: Annotated[
        int | None, terminal.number("The largest number of tokens of a row; needs --processor.")
    ] = None,
    headers: Annotated[
        bool, terminal.flag("--headers", "Read the headers of media only; do not decode them.")
    ] = False,
    datasets: terminal.DATASETS = None,
    task: terminal.TASK = None,
    ignore: Annotated[
        list[str] | None, terminal.text("RULE", "Skip this rule; can be repeated.", "--ignore")
    ] = None,
    strict: Annotated[bool, terminal.flag("--strict", "Fail on warnings, too (exit code 1).")] = False,
    fix: Annotated[
        Path | None, terminal.text("DIR", "Write a cleaned copy to this new or empty folder.")
    ] = None,
    drop_duplicates: Annotated[
        bool, terminal.flag("--drop-duplicates", "With --fix: drop duplicate conversations.")
    ] = False,
    show: Annotated[int, terminal.number("Rows to show for each rule and dataset.", 0)] = 3,
    tiny: Annotated[int, terminal.number("Report images with a side below this number of pixels.")] = 16,
    num_workers: terminal.WORKERS = None,
    trust_remote_code: terminal.TRUST = False,
    verbose: terminal.VERBOSE = False,
    as_json: terminal.AS_JSON = False,
) -> None:
    """Find errors in rows and media before training.

    Opens and decodes every media item. Changes nothing; only --fix writes a cleaned copy.
    """
    with terminal.one_line_errors("check", "nothing was written", verbose):
        from packhorse.count.engines import make_engine
        from packhorse.tools.check import check_meta, check_target, write_fixed

        if drop_duplicates and fix is None:
            raise ConfigError("drop_duplicates needs --fix DIR", setting="drop_duplicates", value=True)
        if max_length is not None and processor is None:
            raise ConfigError.of("max_length", max_length, "it needs --processor to count tokens")
        if fix is not None:
            check_target(fix)  # before the long work
        with Progress("checking") as progress:
            report = check_meta(
                meta,
                processor,
                dataset_names=datasets or None,
                task=terminal.task_of(task),
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
        (dataset.config, dataset.file)
        for dataset in report.files
        if dataset.file is not None
        and dataset.media == dataset.media_failed > 0
        and any(rule == "missing_media" for rule, _ in dataset.counts)
    )
    return media_dir_advice(meta, without_media)


def _print_json(report: CheckReport, fixed: Fixed | None, advice: list[str]) -> None:
    """Print one object; write the findings one by one, because there may be many."""
    head = terminal.to_json(report.as_dict() | {"advice": advice, "fixed": fixed})
    typer.echo(head.removesuffix("\n}") + ',\n  "findings": [', nl=False)
    separator = "\n"
    for finding in report.findings():
        typer.echo(f"{separator}    {terminal.to_json(finding, indent=None)}", nl=False)
        separator = ",\n"
    typer.echo("]\n}" if separator == "\n" else "\n  ]\n}")


def _print(report: CheckReport, fixed: Fixed | None, show: int, advice: list[str]) -> None:
    out = terminal.Output()
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
    decoded = "decoded" if report.settings.decode else "read (headers)"
    share = f"{opened:,} of {media:,}" if opened < media else f"{media:,}"
    counts = ", ".join(
        terminal.number_of(count, severity) for severity, count in report.counts().items() if count
    )
    datasets = terminal.number_of(len(report.files), "dataset")
    out.line(
        f"{totals['rows']:,} rows of {datasets} checked, {share} media {decoded}, in {report.seconds:.1f} s: "
        f"{counts or 'nothing found'}."
    )
    formats: dict[str, list[str]] = defaultdict(list)
    for file in report.files:
        if file.found.columns:
            formats[str(file.found)].append(file.name)
    out.lines(f"format of {', '.join(names)}: {found}" for found, names in formats.items())
    out.lines(f"{file.name}: {found}" for file in report.files if (found := file.found.advice()))
    out.lines(advice)
    skipped: dict[str, list[str]] = defaultdict(list)
    for rule, need in report.skipped_rules().items():
        skipped[need].append(rule)
    out.lines(f"skipped ({need}): {', '.join(rules)}" for need, rules in skipped.items())
    if fixed is not None:
        out.lines(
            f"{copy.name}: {copy.rows:,} rows, {copy.kept:,} kept ({copy.repaired:,} of them repaired), "
            f"{copy.dropped:,} dropped"
            for copy in fixed.datasets
        )
        out.line(f"wrote {fixed.meta}; {fixed.ledger} lists each changed row")


def _print_rows(
    report: CheckReport, rules: Sequence[tuple[str, str, str, int]], out: terminal.Output, show: int
) -> None:
    """Print the first rows of each rule and dataset."""
    first: dict[tuple[str, str, str], list[Finding]] = defaultdict(list)
    for finding in report.findings():
        group = first[finding.severity, finding.rule, finding.dataset]
        if len(group) < show:
            group.append(finding)
    for severity, rule, dataset, count in rules:
        shown = first[severity, rule, dataset]
        part = f", the first {len(shown)} of {count:,}" if len(shown) < count else ""
        for advice in dict.fromkeys(finding.advice for finding in shown):
            out.line(f"{severity} {rule}", style=_COLOURS[severity], end="")
            out.line(f" in {dataset}{part}: {advice}")
            for finding in shown:
                if finding.advice == advice:
                    location = finding.key if finding.row is None else f"{finding.key}, {finding.location}"
                    out.line(f"  {location}: {finding.found}")
    out.line()
