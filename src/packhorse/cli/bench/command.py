"""The command ``packhorse bench``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packhorse.cli.options import AS_JSON
from packhorse.cli.screen import new_table, one_line_errors, out_console

if TYPE_CHECKING:
    from rich.console import Console

    from packhorse.cli.bench.run import Result

_WIDTH = 120  # of a table that goes to a file

EXAMPLES = """
Exit code 0: every promise is kept, 1: one is missed or a script failed, 2: there is nothing to run.

[bold]Examples[/bold]

packhorse bench
[dim]# all of them at full size; writes benchmarks/results/ and docs/benchmarks.md[/dim]

packhorse bench --quick
[dim]# minutes: is what is exact exact, and no speed below half of its target? Writes nothing[/dim]

packhorse bench jsonl packing --json > bench.json
[dim]# two of them, for machines[/dim]

packhorse bench --render
[dim]# only make docs/benchmarks.md anew from the results that are there[/dim]
"""


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(help="Which ones; all without it.", metavar="[NAME]…")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", metavar="", help="Small sizes; half of a speed is enough. Writes nothing."),
    ] = False,
    render: Annotated[
        bool, typer.Option("--render", metavar="", help="Run nothing, only make the page from the results.")
    ] = False,
    docs: Annotated[
        bool, typer.Option("--docs/--no-docs", metavar="", help="Make docs/benchmarks.md from all results.")
    ] = True,
    processor: Annotated[
        str | None,
        typer.Option(help="Folder of a processor or tokenizer, for `count`; one is trained without it."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the scripts are; found in a checkout without it."),
    ] = None,
    as_json: AS_JSON = False,
) -> None:
    """Run the benchmarks of a checkout and judge what each promises against its baseline."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False) if as_json else out_console(_WIDTH)
    with one_line_errors("bench", "the results of the scripts before it are written"):
        from packhorse.cli.bench.page import load_records, write_page
        from packhorse.cli.bench.run import find_folder, find_scripts

        home = find_folder(folder)
        if render:
            typer.echo(write_page(home))
            return
        scripts = find_scripts(home, names or ())
        if docs and not quick:
            load_records(home)  # one that cannot be read is told now, not after the first hour
        results = []
        for number, script in enumerate(scripts, 1):
            console.print(f"{script.stem} ({number} of {len(scripts)})", style="bold", markup=False)
            results.append(_measured(script, quick, processor, console))
            if docs and not quick:
                write_page(home)
    if as_json:
        told = {"version": 1, "quick": quick, "benchmarks": [_as_dict(one) for one in results]}
        typer.echo(json.dumps(told, indent=2))
    else:
        _print_table(results, console)
    if not all(one.ok for one in results):
        raise typer.Exit(1)


def _measured(script: Path, quick: bool, processor: str | None, console: Console) -> Result:
    """Run a script, and keep its record if it ran at full size."""
    from packhorse.cli.bench.page import results_folder
    from packhorse.cli.bench.run import Result, load_promises, run_script, why_not

    if problem := why_not(script, quick):
        console.print(f"  not run: {problem}; its record stays", markup=False, soft_wrap=True)
        return Result(script.stem, None, problem)
    options = ["--quick"] if quick else []
    if script.stem == "count" and processor is not None:
        options += ["--processor", processor]
    started = time.monotonic()
    result = run_script(
        script, options, lambda line: console.print(f"  {line}", markup=False, soft_wrap=True), quick=quick
    )
    if not quick and result.record is not None:
        load_promises(script.parent).write_record(
            results_folder(script.parent) / f"{script.stem}.json", result.record
        )
    if result.problem:
        console.print(f"  FAILED {result.problem}", markup=False, soft_wrap=True)
    console.print(f"  {time.monotonic() - started:.0f} s", style="dim", markup=False)
    return result


def _as_dict(one: Result) -> dict[str, object]:
    record = one.record or {}
    return {
        **{"name": one.name, "ran": one.ran, "ok": one.ok, "problem": one.problem, "promises": one.promises},
        **{"facts": record.get("facts", []), "seconds": record.get("seconds", 0.0)},
    }


def _print_table(results: list[Result], console: Console) -> None:
    from rich.markup import escape

    table = new_table()
    for name in ("benchmark", "promise", "measured", "to reach", "verdict"):
        table.add_column(name, justify="right" if name in ("measured", "to reach") else "left")
    for one in results:
        for promise in one.promises:
            verdict = "ok" if promise["kept"] else "MISS"
            value, target = (f"{promise[which]:,.4g} {promise['unit']}" for which in ("value", "target"))
            table.add_row(one.name, escape(promise["claim"]), value, f"{promise['sign']} {target}", verdict)
        if one.problem:
            table.add_row(one.name, escape(one.problem), "", "", "FAILED" if one.ran else "not run")
    console.print(table)
    wrong = [one.name for one in results if not one.ok]
    seconds = sum(one.record["seconds"] for one in results if one.record is not None)
    told = f"missed: {', '.join(wrong)}" if wrong else "every promise is kept"
    console.print(f"{len(results)} benchmarks in {seconds:.0f} s; {told}", markup=False, soft_wrap=True)
