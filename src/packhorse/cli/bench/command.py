"""The command ``packhorse bench``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packhorse.cli.terminal import AS_JSON, PlainCommand, new_table, one_line_errors, out_console

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

packhorse bench --quick jsonl
[dim]# one of them, in seconds[/dim]

packhorse bench jsonl packing --json > bench.json
[dim]# two of them, for machines[/dim]

packhorse bench --render
[dim]# only make docs/benchmarks.md anew from the results that are there[/dim]
"""


class BenchCommand(PlainCommand):
    """The command; its help names the benchmarks of the checkout, which are looked for only then."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """As the base class, with the names in front of the examples."""
        self.epilog = f"{_names()}\n{EXAMPLES}"
        super().format_help(ctx, formatter)


def _names() -> str:
    """The benchmarks that there are, in one line; why there are none where there is no checkout."""
    from packhorse.cli.bench.run import find_folder, find_scripts
    from packhorse.errors import ConfigError

    try:
        names = [path.stem for path in find_scripts(find_folder(None))]
    except ConfigError:
        return "There are none here: benchmarks are part of a checkout, not of an installed package."
    return f"Names: {', '.join(names)}."


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(help="Which ones; all without it.", metavar="NAME")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            metavar="",
            help="Small sizes; half of a speed is enough, twice a limit on one. Writes nothing.",
        ),
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
        from packhorse.cli.bench.run import find_folder, find_scripts, load_promises

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
    kept = all(one.ok for one in results)
    if as_json:
        told = {"version": 2, "quick": quick, "kept": kept, "benchmarks": [_as_dict(one) for one in results]}
        typer.echo(json.dumps(told, indent=2))
    else:
        _print_table(results, load_promises(home), console)
    if not kept:
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
        script, options, lambda line: console.print(f"  {line}", markup=False, soft_wrap=True)
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
    promises = [{"full_target": promise["target"], **promise} for promise in one.promises]
    return {
        **{"name": one.name, "ran": one.ran, "ok": one.ok, "problem": one.problem, "promises": promises},
        **{"facts": record.get("facts", []), "seconds": record.get("seconds", 0.0)},
    }


def _print_table(results: list[Result], promises: Any, console: Console) -> None:
    """What each script promised, in the words of ``promises.py``."""
    from rich.markup import escape

    table = new_table()
    for name in ("benchmark", "promise", "measured", "to reach", "verdict"):
        table.add_column(name, justify="right" if name in ("measured", "to reach") else "left")
    for one in results:
        for promise in one.promises:
            verdict = "ok" if promise["kept"] else "MISS"
            value = promises.shown(promise["value"], promise["unit"], promise["target"])
            table.add_row(one.name, escape(promise["claim"]), value, promises.to_reach(promise), verdict)
        if one.problem:
            table.add_row(one.name, escape(one.problem), "", "", "FAILED" if one.ran else "not run")
    console.print(table)
    wrong = [one.name for one in results if not one.ok]
    seconds = sum(one.record["seconds"] for one in results if one.record is not None)
    told = f"missed: {', '.join(wrong)}" if wrong else "every promise is kept"
    number = "1 benchmark" if len(results) == 1 else f"{len(results)} benchmarks"
    console.print(f"{number} in {seconds:.0f} s; {told}", markup=False, soft_wrap=True)
