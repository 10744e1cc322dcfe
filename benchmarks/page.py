"""Find the benchmarks of a folder and their records, and write docs/benchmarks.md from the records alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from packhorse.errors import ConfigError
from promises import format_value, write_atomically

_INTRO = """\
<!-- Generated from benchmarks/results/. Do not edit: run `python benchmarks/run.py --render`. -->

# Benchmarks

Promises of Packhorse and measured values. A script of `benchmarks/` printed each figure and recorded it
with the machine, the versions, the commit (`+` if files were changed), the date and the command; this page is
generated from the records. A ratio compares with the baseline in the next column, measured in the same run on
the same machine.

```
make bench                                      # run every script; write the records and this page
make bench-quick                                # minutes: run every script with small sizes; write nothing
make bench-jsonl                                # run only benchmarks/jsonl.py; write no record
python benchmarks/run.py jsonl packing          # run two scripts; write their records and this page
python benchmarks/run.py --quick --json jsonl   # print one JSON object
```

The exit code is 0 if every promise is kept, 1 if one is missed or a script failed, 2 if nothing could be run,
and 130 after Ctrl-C. A quick run requires half of each speed target, twice each limit and every exact target,
and prints both targets: `to reach: >= 1.25x, half of 2.5x`. In the JSON object `target` is the one that
counts, `full_target` the promised one. A script whose name begins with `gpu_` needs
a GPU for a full run; without one it does not run and its record stays as it is.
"""
_FIELDS = (
    *("script", "command", "date", "seconds", "exit"),
    *("problem", "machine", "versions", "promises", "facts"),
)


def find_scripts(home: Path, names: Sequence[str] = ()) -> list[Path]:
    """Return the benchmarks with these names, or all of them, in alphabetical order.

    Raises:
        ConfigError: there is no benchmark of that name.
    """
    paths = (path for path in sorted(home.glob("*.py")) if path.stem != "run")
    known = {path.stem: path for path in paths if "\nif __name__ ==" in path.read_text("utf-8")}
    if unknown := sorted(set(names) - set(known)):
        raise ConfigError(f"no benchmark {', '.join(unknown)} in {home}; choose from {', '.join(known)}")
    return [path for name, path in known.items() if not names or name in names]


def page_path(home: Path) -> Path:
    """Return the path of the page about the benchmarks in ``home``."""
    return home.parent / "docs" / "benchmarks.md"


def load_records(home: Path) -> list[dict[str, Any]]:
    """Load the records of all scripts, in alphabetical order.

    Raises:
        ConfigError: a file is not a record, or is one of a quick run, which has other targets.
    """
    records = []
    for path in sorted((home / "results").glob("*.json")):
        remedy = "remove it, or run `make bench`"
        try:
            record = json.loads(path.read_bytes())
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON ({error}): {remedy}") from error
        if missing := [name for name in _FIELDS if not isinstance(record, dict) or name not in record]:
            raise ConfigError(f"{path} has no {', '.join(missing)}: {remedy}")
        if any("full_target" in promise for promise in record["promises"]):
            raise ConfigError(f"{path} is a record of a run with --quick: {remedy}")
        records.append(record)
    return records


def write_page(home: Path) -> Path:
    """Write the page and return its path."""
    write_atomically(page_path(home), render(home))
    return page_path(home)


def render(home: Path) -> str:
    """Return the page: tables of promises, of runs and of machines, and the figures of each script."""
    records = load_records(home)
    setups = sorted({_setup(record) for record in records})
    number = {setup: index for index, setup in enumerate(setups, 1)}
    runs = (
        (_link(one), f"`{one['command']}`", one["date"], f"{one['seconds']:,.0f}", number[_setup(one)])
        for one in records
    )
    parts = [_INTRO, *_summary(records, home), "## Promises", _promises(records)]
    parts += ["## Runs", _table(("script", "command", "date", "seconds", "on"), runs)]
    parts += ["## Machines and versions"]
    parts += [_table(("", "machine", "versions"), ((number[setup], *setup) for setup in setups))]
    for record in records:
        parts += [f"## {record['script']}", *_section(record)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _summary(records: Sequence[dict[str, Any]], home: Path) -> list[str]:
    """Count the promises that are kept and missed; name scripts that failed or have no record."""
    kept = [promise["kept"] for record in records for promise in record["promises"]]
    parts = [
        f"{len(kept)} promises of {len(records)} scripts: {sum(kept)} kept, {len(kept) - sum(kept)} missed."
    ]
    if failed := [record["script"] for record in records if _failure(record)]:
        parts.append(f"**Failed: {', '.join(failed)}.**")
    recorded = {record["script"] for record in records}
    if missing := [path.stem for path in find_scripts(home) if path.stem not in recorded]:
        parts.append(f"Not recorded yet: {', '.join(missing)}.")
    return parts


def _promises(records: Iterable[dict[str, Any]]) -> str:
    rows = []
    for record in records:
        run = (_link(record), record["date"])
        for promise in record["promises"]:
            unit = promise["unit"]
            value = format_value(promise["value"], unit, promise["target"])
            target = f"{'≥' if promise['sign'] == '>=' else '≤'} {format_value(promise['target'], unit)}"
            kept = "yes" if promise["kept"] else "**missed**"
            rows.append((promise["claim"], promise["baseline"], value, target, kept, *run))
        if failure := _failure(record):
            rows.append((f"**{failure}**", "", "", "", "**failed**", *run))
    return _table(("claim", "baseline", "measured", "to reach", "kept", "run", "date"), rows)


def _section(record: dict[str, Any]) -> list[str]:
    """Return what a script recorded in addition to its promises."""
    parts = [f"**{failure}**"] if (failure := _failure(record)) else []
    facts = [(fact["fact"], format_value(fact["value"], fact["unit"])) for fact in record["facts"]]
    parts.append(_table(("fact", "value"), facts) if facts else "Only its promises.")
    machine, versions = _setup(record)
    parts.append(f"`{record['command']}`, {record['date']}. {machine}. {versions}.")
    return parts


def _failure(record: dict[str, Any]) -> str:
    """Return why the script failed; empty if it ran to its end."""
    return "it did not run to its end" if record["exit"] is None else str(record["problem"])


def _setup(record: dict[str, Any]) -> tuple[str, str]:
    """Describe the machine, and the versions with the commit."""
    machine = record["machine"]
    gpu = f"{machine['gpu']}; " if machine["gpu"] else ""
    versions = [f"{name} {version}" for name, version in record["versions"].items()]
    if commit := record.get("commit"):  # None without git
        versions.insert(0, f"commit {commit}")
    return (
        f"{gpu}{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB",
        ", ".join(versions),
    )


def _link(record: dict[str, Any]) -> str:
    return f"[{record['script']}](#{record['script']})"


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: object) -> str:
    """Escape text for a table cell, on one line."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")
