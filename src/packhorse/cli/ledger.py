"""``packhorse ledger``: where did my rows go?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packhorse.cli.terminal import AS_JSON, Output, number_of, one_line_errors, to_json

if TYPE_CHECKING:
    from packhorse.ledger import Ledger
    from packhorse.types import Drop


EXAMPLES = """
Exit code 0: shown (also where there is no entry), 2: there is no ledger.

[bold]Examples[/bold]

packhorse ledger run/ledger.jsonl
[dim]# how many rows for which reason, and the first 20[/dim]

packhorse ledger run/ledgers --by dataset
[dim]# all ledgers of a folder, one of each rank[/dim]

packhorse ledger run/ledger.jsonl --reason missing_media --limit 0
[dim]# every row with a missing media item[/dim]

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
    dataset: Annotated[str | None, typer.Option(metavar="NAME", help="Only entries of this dataset.")] = None,
    key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Only entries of this row, as coco/812.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="List so many entries; 0 for all.")] = 20,
    as_json: AS_JSON = False,
) -> None:
    """Show what became of the rows that were not delivered as their files hold them."""
    with one_line_errors("ledger", "nothing was changed"):
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
        typer.echo(to_json(report))
        return
    if not total:
        asked = {"reason": reason, "dataset": dataset, "key": key}
        typer.echo(
            _describe_empty(whole, {name: value for name, value in asked.items() if value is not None})
        )
        return
    _print(counts, by, listed, total, len(lost), len(files))


def _describe_empty(whole: Ledger, asked: Mapping[str, str]) -> str:
    """Return which entries there are if none was selected."""
    if not len(whole):
        return "no entry: nothing was dropped, replaced, cut or repaired"
    told = " and ".join(f"{name} {value}" for name, value in asked.items())
    there = [
        f"{name}s there are: {', '.join(f'{one} ({number:,})' for one, number in whole.counts(name).items())}"
        for name in ("reason", "dataset")
        if name in asked and len(asked) == 1
    ]
    return "; ".join([f"{number_of(len(whole), 'entry', 'entries')}, none with {told}", *there])


def _sums(counts: Counter[tuple[str, str]], place: int) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for group, number in counts.items():
        sums[group[place]] += number
    return dict(sums.most_common())


def _print(
    counts: Counter[tuple[str, str]], by: By, listed: list[Drop], total: int, lost: int, files: int
) -> None:
    from packhorse.tools.check.rules import on_one_line

    out = Output()
    actions = [] if by is By.action else list(_sums(counts, 1))
    out.table(
        f"Entries by {by.value}",
        ["dataset" if by is By.dataset else by.value, *actions, "all"],
        [
            (group or "-", *(counts[group, action] for action in actions), number)
            for group, number in _sums(counts, 0).items()
        ],
    )
    for drop in listed:
        # Details of many-line errors stay on one line, so that a line is an entry.
        line = f"{drop.key}  {drop.action}  {drop.reason}  {' '.join(drop.detail.split())}"
        out.line(on_one_line(line))
    if len(listed) < total:
        out.line(f"… and {total - len(listed):,} more (--limit 0 lists all)")
    where = "" if files == 1 else f" in {files} files"
    samples = "1 sample was not delivered as itself"
    if lost != 1:
        samples = f"{lost:,} samples were not delivered as themselves"
    out.line(f"{number_of(total, 'entry', 'entries')}{where}; {samples}.")
