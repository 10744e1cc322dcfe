"""Find benchmarks and their records; write their page and the figures of the README from the records."""

from __future__ import annotations

import json
import re
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
# Lines of the README: a text, and the (script, claim or fact, part of its baseline) of each figure in it.
_BULLETS = (
    (
        "**Exact token counts without decoding**: in {:,.0f} samples of {:.0f} model families, "
        "{:.0f} counts differ from the tokens of the real processor.",
        ("exact", "samples compared", ""),
        ("exact", "families", ""),
        ("exact", "counts that differ", ""),
    ),
    (
        "**{:.1f}x the tokens per second of padded batches** ({:.1f}x of batches padded by length), "
        "training on images and text on one H200.",
        ("gpu_train", "real tokens a second, images and text packed with varlen", "padded at random"),
        ("gpu_train", "real tokens a second, images and text packed with varlen", "padded by length"),
    ),
    (
        "**Every row is trained or named with a reason**: {:.0f} samples lost and {:.0f} duplicated "
        "in {:.0f} runs with a process killed at work.",
        ("faults", "killed: samples lost", ""),
        ("faults", "killed: duplicate samples", ""),
        ("faults", "rounds in which a process at work was killed", ""),
    ),
    (
        "**Resume on another number of GPUs**: {:.1f} s to go on at 90 % of 975,261 packs "
        "with 48 ranks instead of 64.",
        ("feed", "resuming at 90 % of 975,261 packs, 48 ranks instead of 64", ""),
    ),
)
_MEASURED = re.compile(r"(<!-- measured:.*?-->\n).*?(<!-- /measured -->)", re.DOTALL)
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
        detail = f"no benchmark {', '.join(unknown)} in {home}; choose from {', '.join(known)}"
        raise ConfigError(detail, setting="names", value=unknown)
    return [path for name, path in known.items() if not names or name in names]


def page_path(home: Path) -> Path:
    """Return the path of the page about the benchmarks in ``home``."""
    return home.parent / "docs" / "reference" / "benchmarks.md"


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
            raise ConfigError(f"{path} is not valid JSON ({error}): {remedy}", path=path) from error
        if missing := [name for name in _FIELDS if not isinstance(record, dict) or name not in record]:
            raise ConfigError(f"{path} has no {', '.join(missing)}: {remedy}", path=path)
        if any("full_target" in promise for promise in record["promises"]):
            raise ConfigError(f"{path} is a record of a run with --quick: {remedy}", path=path)
        records.append(record)
    return records


def write_page(home: Path) -> Path:
    """Write the page, and the figures of a README that has a place for them; return the path of the page."""
    write_atomically(page_path(home), render(home))
    readme = home.parent / "README.md"
    if readme.is_file() and _MEASURED.search(text := readme.read_text("utf-8")):
        write_atomically(readme, render_readme(text, load_records(home)))
    return page_path(home)


def render_readme(text: str, records: Sequence[dict[str, Any]]) -> str:
    """Return the README with the figures of the records between its ``measured`` comments."""
    lines = (line.format(*(_figure(records, *name) for name in names)) for line, *names in _BULLETS)
    bullets = "\n".join(f"- {line}" for line in lines)
    return _MEASURED.sub(lambda match: f"{match[1]}{bullets}\n{match[2]}", text)


def _figure(records: Sequence[dict[str, Any]], script: str, name: str, baseline: str) -> float:
    """Return the value of a promise (with that baseline) or of a fact.

    Raises:
        ConfigError: no record has it.
    """
    for record in records:
        for entry in (*record["promises"], *record["facts"]) if record["script"] == script else ():
            if name in (entry.get("claim"), entry.get("fact")) and baseline in entry.get("baseline", ""):
                return float(entry["value"])
    raise ConfigError(f"the README needs '{name}' of benchmarks/{script}.py, which no record has")


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
