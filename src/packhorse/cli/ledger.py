"""``packhorse ledger``: list rows that were dropped, replaced, cut or repaired."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packhorse.cli import terminal

if TYPE_CHECKING:
    from packhorse.ledger import Ledger
    from packhorse.types import Drop

EXAMPLES = terminal.examples(
    "ledger",
    "Exit code 0: shown (an empty ledger, too), 2: there is no ledger.",
    {
        "run/ledger.jsonl": "the number of rows for each reason, and the first 20",
        "run/ledgers --by dataset": "all ledgers of a folder, one per rank",
        "run/ledger.jsonl --reason missing_media --limit 0": "every row with a missing media item",
        "run/ledger.jsonl --key coco/812 --json": "what happened to one row, as JSON",
    },
)


By = Enum("By", {"reason": "reason", "dataset": "dataset", "stage": "stage", "action": "action"}, type=str)


def ledger(
    path: Annotated[Path, typer.Argument(help="A ledger file, or a folder of them.", metavar="FILE|DIR")],
    by: Annotated[By, terminal.text("COLUMN", "Count by reason, dataset, stage or action.")] = By.reason,
    reason: Annotated[str | None, terminal.text("REASON", "Only entries with this reason.")] = None,
    dataset: Annotated[str | None, terminal.text("NAME", "Only entries of this dataset.")] = None,
    key: Annotated[str | None, terminal.text("KEY", "Only entries of this row, e.g. coco/812.")] = None,
    limit: Annotated[int, terminal.number("Entries to list; 0 for all.", 0)] = 20,
    verbose: terminal.VERBOSE = False,
    as_json: terminal.AS_JSON = False,
) -> None:
    """List rows that were dropped, replaced, cut or repaired."""
    with terminal.one_line_errors("ledger", "nothing was changed", verbose):
        from packhorse.ledger import read_ledgers

        whole, files = read_ledgers(path)
        counts: Counter[tuple[str, str]] = Counter()
        listed: list[Drop] = []
        lost: set[tuple[str, int | None]] = set()
        for drop in whole.select(reason=reason, dataset=dataset, key=key):
            counts[getattr(drop, by.value), drop.action] += 1
            if drop.action in ("dropped", "replaced"):
                lost.add((drop.key, drop.epoch))
            if not limit or len(listed) < limit:
                listed.append(drop)
    total = sum(counts.values())
    if as_json:
        report = {
            "version": 1,
            "files": files,
            "entries": total,
            "all_entries": len(whole),
            "lost": len(lost),
            "by": by.value,
            "counts": _sums(counts, 0),
            "actions": _sums(counts, 1),
            "listed": listed,
        }
        typer.echo(terminal.to_json(report))
        return
    if not total:
        filters = {"reason": reason, "dataset": dataset, "key": key}
        typer.echo(
            _describe_empty(whole, {name: value for name, value in filters.items() if value is not None})
        )
        return
    _print(counts, by, listed, total, len(lost), len(files))


def _describe_empty(whole: Ledger, filters: Mapping[str, str]) -> str:
    """Return the message if the filters match no entry, with the values that exist."""
    if not len(whole):
        return "no entry: nothing was dropped, replaced, cut or repaired"
    text = f"{terminal.number_of(len(whole), 'entry', 'entries')}, none with "
    text += " and ".join(f"{name} {value}" for name, value in filters.items())
    for name in ("reason", "dataset"):
        if [*filters] == [name]:
            values = ", ".join(f"{value} ({count:,})" for value, count in whole.counts(name).items())
            text += f"; existing {name}s: {values}"
    return text


def _sums(counts: Counter[tuple[str, str]], index: int) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for group, count in counts.items():
        sums[group[index]] += count
    return dict(sums.most_common())


def _print(
    counts: Counter[tuple[str, str]], by: By, listed: list[Drop], total: int, lost: int, files: int
) -> None:
    from packhorse.tools.check.rules import on_one_line

    out = terminal.Output()
    actions = [] if by is By.action else list(_sums(counts, 1))
    out.table(
        f"Entries by {by.value}",
        [by.value, *actions, "all"],
        [
            (group or "-", *(counts[group, action] for action in actions), count)
            for group, count in _sums(counts, 0).items()
        ],
    )
    for drop in listed:
        # An entry is one line, whatever its detail.
        line = f"{drop.key}  {drop.action}  {drop.reason}  {' '.join(drop.detail.split())}"
        out.line(on_one_line(line))
    if len(listed) < total:
        out.line(f"… and {total - len(listed):,} more (--limit 0 lists all)")
    where = "" if files == 1 else f" in {files} files"
    samples = terminal.number_of(lost, "sample was", "samples were")
    out.line(f"{terminal.number_of(total, 'entry', 'entries')}{where}; {samples} dropped or replaced.")
