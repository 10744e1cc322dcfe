"""``packhorse bench``: run the scripts of ``benchmarks/`` and judge what they promise.

Each script is a process of its own. It prints lines that begin with ``ok`` or ``MISS`` and end with what is
to be reached; these are read here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

# For each script, the options with which it takes seconds instead of minutes.
QUICK: dict[str, tuple[str, ...]] = {
    "balance": ("--samples", "100000"),
    "count": ("--rows", "2000", "--repeat", "1"),
    "encode": ("--samples", "16", "--repeat", "1"),
    "estimate": ("--rows", "100000", "--repeat", "2"),
    "exact": ("--sizes", "20", "--videos", "6", "--conversations", "60"),
    "feed": ("--samples", "24", "--repeat", "1", "--packs", "100000"),
    "gpu_packing": ("--tiny", "--samples", "16", "--pack", "512", "--longest", "256", "--mean", "64"),
    "headers": ("--images", "60", "--repeat", "3"),
    "jsonl": ("--gigabytes", "0.3", "--repeat", "3"),
    "materialise": ("--repeat", "3"),
    "packing": ("--largest", "100000", "--repeat", "1"),
}
_PROMISE = re.compile(
    r"(?P<mark>ok|MISS)\s+(?P<what>.*?)(?:: (?P<value>-?[\d,.]+) ?\S* "
    r"\(to reach: (?P<sign>>=|<=) (?P<target>-?[\d,.]+).*\))?$"
)
_WIDTH = 120  # of a table that goes to a file
_LONGEST_PROBLEM = 300

EXAMPLES = """
Exit code 0: every promise is kept, 1: one is missed or a script failed, 2: there is nothing to run.

[bold]Examples[/bold]

packhorse bench
[dim]# all of them at full size[/dim]

packhorse bench --quick
[dim]# minutes: do they run, and is no ratio below half of its target?[/dim]

packhorse bench jsonl packing --json > bench.json
[dim]# two of them, for machines[/dim]
"""


@dataclass(frozen=True)
class Promise:
    """A line of a script.

    Attributes:
        what: was promised.
        kept: whether it was; of a quick run: whether at least half of it was.
        value: that was measured, if the line has one,
        sign: and how it is to be to
        target: what is to be reached.
    """

    what: str
    kept: bool
    value: float | None = None
    sign: str = ""
    target: float | None = None


@dataclass
class Result:
    """What became of a script; ``problem`` says why it failed or was not run."""

    name: str
    ran: bool = True
    promises: list[Promise] = field(default_factory=list)
    seconds: float = 0.0
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; a script that cannot run here is not wrong."""
        return all(one.kept for one in self.promises) and not (self.ran and self.problem)


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(help="Which ones; all without it.", metavar="[NAME]…")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", metavar="", help="Small sizes; half of each target is enough.")
    ] = False,
    processor: Annotated[
        str | None, typer.Option(help="Folder of a processor or tokenizer, for `count` at full size.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the scripts are; found in a checkout without it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print the results as JSON.")] = False,
) -> None:
    """Run the benchmarks of a checkout and judge what each promises against its baseline."""
    from rich.console import Console

    from packhorse.errors import ConfigError

    try:
        scripts = find_scripts(folder, names or ())
    except ConfigError as error:
        typer.echo(f"packhorse bench: {error}", err=True)
        raise typer.Exit(2) from error
    console = Console(stderr=as_json, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=as_json, width=_WIDTH, highlight=False)
    try:
        results = [_measured(script, quick, processor, console) for script in scripts]
    except KeyboardInterrupt as error:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from error
    if as_json:
        told = [{**asdict(one), "ok": one.ok} for one in results]
        typer.echo(json.dumps({"quick": quick, "benchmarks": told}, indent=2))
    else:
        _print_table(results, console)
    if not all(one.ok for one in results):
        raise typer.Exit(1)


def find_scripts(folder: Path | None, names: Any) -> list[Path]:
    """The scripts that were asked for, in the order of the alphabet.

    Raises:
        ConfigError: there is no such folder, or no script of that name.
    """
    from packhorse.errors import ConfigError

    places = [Path(__file__).parents[3] / "benchmarks", Path("benchmarks")] if folder is None else [folder]
    home = next((place for place in places if place.is_dir()), None)
    if home is None:
        raise ConfigError(
            f"no folder {places[-1]}: benchmarks are part of a checkout, not of an installed package. Run "
            "this in a clone, or name the folder with --folder"
        )
    known = {path.stem: path for path in sorted(home.glob("*.py")) if "__main__" in path.read_text("utf-8")}
    if unknown := sorted(set(names) - set(known)):
        raise ConfigError(f"no benchmark {', '.join(unknown)} in {home}; there are {', '.join(known)}")
    return [path for name, path in known.items() if not names or name in names]


def _measured(script: Path, quick: bool, processor: str | None, console: Console) -> Result:
    name = script.stem
    console.print(name, style="bold", markup=False)
    if problem := _why_not(name, quick, processor):
        console.print(f"  not run: {problem}", markup=False, soft_wrap=True)
        return Result(name, ran=False, problem=problem)
    with _options(name, quick, processor) as options:
        result = run_script(script, options, quick, console)
    if name == "count" and processor is None and result.promises:
        result.promises = []  # how fast counting is depends on the tokenizer, and this one is made up
        console.print("  it runs; not judged without a real tokenizer (--processor DIR)")
    if result.problem:
        console.print(f"  FAILED {result.problem}", markup=False, soft_wrap=True)
    return result


def _why_not(name: str, quick: bool, processor: str | None) -> str:
    """Why a script cannot run here; empty if it can."""
    if quick:
        return "" if name in QUICK else "its small sizes are not known (cli/bench.py, QUICK)"
    if name == "count" and processor is None:
        return "it needs a real tokenizer: --processor DIR"
    if name.startswith("gpu_"):
        import torch

        return "" if torch.cuda.is_available() else "there is no GPU"
    return ""


@contextmanager
def _options(name: str, quick: bool, processor: str | None) -> Iterator[list[str]]:
    """The command line of a script; a quick count gets the demo's processor."""
    options = list(QUICK.get(name, ())) if quick else []
    if name != "count":
        yield options
    elif processor is not None:
        yield [*options, "--processor", processor]
    else:
        from packhorse.cli.demo.tiny import tiny_processor
        from packhorse.cli.torchvision_help import help_torchvision

        help_torchvision()
        with tempfile.TemporaryDirectory() as folder:
            tiny_processor().save_pretrained(folder)
            yield [*options, "--processor", folder]


def run_script(script: Path, options: list[str], quick: bool, console: Console) -> Result:
    """Run one script and print its promises as they come; what became of them."""
    result = Result(script.stem)
    started = time.monotonic()
    command = [sys.executable, "-u", str(script), *options]
    missed, crashed, last = False, False, ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None  # it has a pipe
        for line in map(str.rstrip, process.stdout):
            found = _PROMISE.match(line)
            if found is not None:
                missed |= found["mark"] == "MISS"
                result.promises.append(judged(found, quick))
                console.print(f"  {line}", markup=False, soft_wrap=True)
            crashed |= line.startswith("Traceback (most recent call last)")
            last = line or last
    result.seconds = round(time.monotonic() - started, 1)
    # A script ends with 1 where a promise is missed, and Python where an error is not caught.
    if process.returncode and (crashed or not missed or process.returncode != 1):
        result.problem = f"exit code {process.returncode}: {last[:_LONGEST_PROBLEM]}"
    return result


def judged(found: re.Match[str], quick: bool) -> Promise:
    """A promise as its script judges it; in a quick run by half of its target (a limit: by twice)."""
    kept, what = found["mark"] == "ok", found["what"]
    if found["value"] is None:
        return Promise(what, kept)
    value, target = (float(found[name].replace(",", "")) for name in ("value", "target"))
    if quick and not kept:
        kept = value >= target / 2 if found["sign"] == ">=" else value <= target * 2
    return Promise(what, kept, value, found["sign"], target)


def _print_table(results: list[Result], console: Console) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in ("benchmark", "promise", "measured", "to reach", "verdict"):
        table.add_column(name, justify="right" if name in ("measured", "to reach") else "left")
    for one in results:
        for promise in one.promises:
            value = "" if promise.value is None else f"{promise.value:g}"
            target = "" if promise.target is None else f"{promise.sign} {promise.target:g}"
            verdict = "ok" if promise.kept else "MISS"
            table.add_row(one.name, escape(promise.what), value, target, verdict)
        if one.problem or not one.promises:
            verdict = "FAILED" if one.ran and one.problem else "ok" if one.ran else "not run"
            table.add_row(one.name, escape(one.problem) or "it runs", "", "", verdict)
    console.print(table)
    wrong = [one.name for one in results if not one.ok]
    seconds = sum(one.seconds for one in results)
    told = f"missed: {', '.join(wrong)}" if wrong else "every promise is kept"
    console.print(f"{len(results)} benchmarks in {seconds:.0f} s; {told}", markup=False, soft_wrap=True)
