"""``packhorse ledger``: where did my rows go?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packhorse.cli.terminal import AS_JSON, new_table, one_line_errors, out_console

if TYPE_CHECKING:
    from packhorse.ledger import Ledger
    from packhorse.types import Drop


_WIDTH = 140  # of a table that goes to a file

EXAMPLES = """
Exit code 0: shown (also where there is no entry), 2: there is no ledger.

[bold]Examples[/bold]

packhorse ledger run/ledger.jsonl
[dim]# how many rows for which reason, and the first 20[/dim]

packhorse ledger run/ledgers --by dataset
[dim]# all ledgers of a folder, one of each rank[/dim]

packhorse ledger run/ledger.jsonl --reason missing_media --limit 0
[dim]# every row with a missing medium[/dim]

packhorse ledger run/ledger.jsonl --key coco/812 --json
[dim]# what happened to one row, for machines[/dim]
"""


class By(str, Enum):
    """What the table counts by."""

    reason = "reason"
    dataset = "dataset"
    stage = "stage"
    action = "action"


def ledger(
    path: Annotated[Path, typer.Argument(help="A ledger file, or a folder of them.", metavar="FILE|DIR")],
    by: Annotated[
        By, typer.Option(metavar="COLUMN", help="What the table counts by: reason, dataset, stage or action.")
    ] = By.reason,
    reason: Annotated[
        str | None, typer.Option(metavar="REASON", help="Only entries with this reason.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only entries of this data set.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Only entries of this row, as coco/812.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="List so many entries; 0 for all.")] = 20,
    as_json: AS_JSON = False,
) -> None:
    """Show what became of the rows that were not delivered as their files hold them."""
    with one_line_errors("ledger", "nothing was changed"):
        from packhorse.tools.ledgers import read_ledgers, selected

        whole, files = read_ledgers(path)
        counts: Counter[tuple[str, str]] = Counter()
        listed: list[Drop] = []
        lost: set[tuple[str, int | None]] = set()
        for drop in selected(whole, reason=reason, dataset=dataset, key=key):
            counts[getattr(drop, by.value), drop.action] += 1
            if drop.action in ("left_out", "replaced"):
                lost.add((drop.key, drop.epoch))
            if not limit or len(listed) < limit:
                listed.append(drop)
    total, entries = sum(counts.values()), len(whole)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "version": 1,
                    "files": [str(file) for file in files],
                    "entries": total,
                    "all_entries": entries,
                    "lost": len(lost),
                    "by": by.value,
                    "counts": _sums(counts, 0),
                    "actions": _sums(counts, 1),
                    "listed": [asdict(drop) for drop in listed],
                },
                indent=2,
            )
        )
        return
    if not total:
        asked = {"reason": reason, "dataset": dataset, "key": key}
        typer.echo(_nothing(whole, {name: value for name, value in asked.items() if value is not None}))
        return
    _print(counts, by, listed, total, len(lost), len(files))


def _nothing(whole: Ledger, asked: Mapping[str, str]) -> str:
    """What there is instead, where nothing was found."""
    if not len(whole):
        return "no entry: nothing was left out, replaced, cut or repaired"
    told = " and ".join(f"{name} {value}" for name, value in asked.items())
    there = [
        f"{name}s there are: {', '.join(f'{one} ({number:,})' for one, number in whole.counts(name).items())}"
        for name in ("reason", "dataset")
        if name in asked and len(asked) == 1
    ]
    return "; ".join([f"{_entries(len(whole))}, none with {told}", *there])


def _entries(number: int) -> str:
    return "1 entry" if number == 1 else f"{number:,} entries"


def _sums(counts: Counter[tuple[str, str]], place: int) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for group, number in counts.items():
        sums[group[place]] += number
    return dict(sums.most_common())


def _print(
    counts: Counter[tuple[str, str]], by: By, listed: list[Drop], total: int, lost: int, files: int
) -> None:
    from rich.markup import escape

    from packhorse.tools.check.rules import on_one_line

    console = out_console(_WIDTH)
    actions = list(_sums(counts, 1))
    table = new_table(f"Entries by {by.value}")
    table.add_column("data set" if by is By.dataset else by.value, overflow="fold")
    for name in [*(actions if by is not By.action else []), "all"]:
        table.add_column(name, justify="right", no_wrap=True)
    for group, number in _sums(counts, 0).items():
        cells = [] if by is By.action else [f"{counts[group, action]:,}" for action in actions]
        table.add_row(escape(group) or "-", *cells, f"{number:,}")
    console.print(table)
    for drop in listed:
        # Details of many-line errors stay on one line, so that a line is an entry.
        line = f"{drop.key}  {drop.action}  {drop.reason}  {' '.join(drop.detail.split())}"
        console.print(on_one_line(line), markup=False, soft_wrap=True)
    if len(listed) < total:
        console.print(f"… and {total - len(listed):,} more (--limit 0 lists all)")
    where = "" if files == 1 else f" in {files} files"
    samples = "1 sample was not delivered as itself"
    if lost != 1:
        samples = f"{lost:,} samples were not delivered as themselves"
    console.print(f"{_entries(total)}{where}; {samples}.")
