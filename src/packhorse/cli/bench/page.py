"""The page docs/benchmarks.md: made from the records of all scripts, and from nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from packhorse.cli.bench.run import find_scripts, load_promises
from packhorse.errors import ConfigError

_INTRO = """\
<!-- Made by `packhorse bench` from benchmarks/results/. Do not edit: run `packhorse bench --render`. -->

# Benchmarks

What Packhorse promises, and what was measured. Every figure was printed by a script of `benchmarks/` and
recorded with the machine, the versions, the commit (`+` where files were changed), the date and the command;
this page is made from the records. A ratio is against the baseline beside it, in the same run on the same
machine. `packhorse bench` (or `make bench`) runs every script, writes its record and makes this page anew;
`packhorse bench --quick` takes minutes, writes nothing, and asks for half of each target that is about speed,
and for the whole of what is exact. A script whose name begins with `gpu_` needs a GPU: where there is none,
its record stays as it is.
"""
_FIELDS = (
    "script",
    "command",
    "date",
    "seconds",
    "exit",
    "problem",
    "machine",
    "versions",
    "promises",
    "facts",
)


def results_folder(home: Path) -> Path:
    """Where the records of the scripts in ``home`` are kept."""
    return home / "results"


def page_of(home: Path) -> Path:
    """The page that is made from them."""
    return home.parent / "docs" / "benchmarks.md"


def load_records(home: Path) -> list[dict[str, Any]]:
    """The records of all scripts, in the order of the alphabet.

    Raises:
        ConfigError: a file is no record, or one of a quick run, whose targets are not the promised ones.
    """
    records = []
    for path in sorted(results_folder(home).glob("*.json")):
        try:
            record = json.loads(path.read_bytes())
        except ValueError as error:
            raise ConfigError(f"{path} is no JSON ({error}): remove it, or run `packhorse bench`") from error
        lacking = [name for name in _FIELDS if not isinstance(record, dict) or name not in record]
        if lacking:
            raise ConfigError(f"{path} has no {', '.join(lacking)}: remove it, or run `packhorse bench`")
        if any("full_target" in one for one in record["promises"]):
            raise ConfigError(f"{path} is of a run with --quick: remove it, or run `packhorse bench`")
        records.append(record)
    return records


def write_page(home: Path) -> Path:
    """Make the page anew; where it is."""
    page = page_of(home)
    page.parent.mkdir(parents=True, exist_ok=True)
    part = page.with_name(f".{page.name}.{os.getpid()}")
    try:
        part.write_text(render(home), encoding="utf-8")
        part.replace(page)
    finally:
        part.unlink(missing_ok=True)
    return page


def render(home: Path) -> str:
    """The page as text: a table of promises, one of runs, one of machines, and the facts of each script."""
    records = load_records(home)
    shown = load_promises(home).shown
    places = sorted({_place(one) for one in records})
    numbers = {place: number for number, place in enumerate(places, 1)}
    parts = [_INTRO, *_summary(records, home), "## Promises", _promises(records, shown), "## Runs"]
    parts.append(
        _table(
            ("script", "command", "date", "seconds", "on"),
            (
                (
                    _link(one),
                    f"`{one['command']}`",
                    one["date"],
                    f"{one['seconds']:,.0f}",
                    numbers[_place(one)],
                )
                for one in records
            ),
        )
    )
    parts.append("## Machines and versions")
    parts.append(_table(("", "machine", "versions"), ((numbers[place], *place) for place in places)))
    for one in records:
        parts += [f"## {one['script']}", *_section(one, shown)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _summary(records: Sequence[dict[str, Any]], home: Path) -> list[str]:
    """How many promises are kept, which are not, which scripts failed, and which have no record."""
    told = [one for record in records for one in record["promises"]]
    missed = sum(not one["kept"] for one in told)
    parts = [f"{len(told)} promises of {len(records)} scripts: {len(told) - missed} kept, {missed} missed."]
    if failed := [record["script"] for record in records if _failure(record)]:
        parts.append(f"**Failed: {', '.join(failed)}.**")
    done = {record["script"] for record in records}
    if lacking := [path.stem for path in find_scripts(home) if path.stem not in done]:
        parts.append(f"Not recorded yet: {', '.join(lacking)}.")
    return parts


def _promises(records: Iterable[dict[str, Any]], shown: Any) -> str:
    rows = []
    for record in records:
        for one in record["promises"]:
            value = shown(one["value"], one["unit"], one["target"])
            target = f"{'≥' if one['sign'] == '>=' else '≤'} {shown(one['target'], one['unit'])}"
            kept = "yes" if one["kept"] else "**missed**"
            rows.append((one["claim"], one["baseline"], value, target, kept, _link(record), record["date"]))
        if failure := _failure(record):
            rows.append((f"**{failure}**", "", "", "", "**failed**", _link(record), record["date"]))
    return _table(("claim", "baseline", "measured", "to reach", "kept", "run", "date"), rows)


def _section(record: dict[str, Any], shown: Any) -> list[str]:
    """What a script told beside its promises."""
    parts = [f"**{failure}**"] if (failure := _failure(record)) else []
    facts = [(one["fact"], shown(one["value"], one["unit"])) for one in record["facts"]]
    parts.append(_table(("fact", "value"), facts) if facts else "Nothing but its promises.")
    machine, versions = _place(record)
    parts.append(f"`{record['command']}`, {record['date']}. {machine}. {versions}.")
    return parts


def _failure(record: dict[str, Any]) -> str:
    """What went wrong, empty if the script ran to its end."""
    if record["exit"] is None:
        return "it did not run to its end"
    return str(record["problem"])


def _place(record: dict[str, Any]) -> tuple[str, str]:
    """Machine and versions in words, the commit with them."""
    machine, versions = record["machine"], record["versions"]
    gpu = f"{machine['gpu']}; " if machine["gpu"] else ""
    words = f"{gpu}{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    told = [f"{name} {version}" for name, version in versions.items()]
    if commit := record.get("commit"):  # none where there was no git
        told.insert(0, f"commit {commit}")
    return words, ", ".join(told)


def _link(record: dict[str, Any]) -> str:
    return f"[{record['script']}](#{record['script']})"


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: object) -> str:
    """Text that stays inside a cell of a table."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")
