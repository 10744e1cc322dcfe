"""Run benchmarks, compare what they measure with what they promise, and write their records and the page.

    python benchmarks/run.py [--quick] [NAME ...]

Each script runs in its own process and writes a record (JSON) through promises.py. A full run keeps the
records in benchmarks/results/ and writes docs/reference/benchmarks.md from all of them; a quick run has small
sizes and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from packhorse.cli.terminal import CANNOT, STOPPED, Output, new_table
from packhorse.errors import ConfigError
from page import find_scripts, load_records, write_page
from promises import RECORD, describe_target, format_value, new_record, write_record

HERE = Path(__file__).resolve().parent
_WIDTH = 120  # columns of a table that goes to a file
_LONGEST_PROBLEM = 300
_SECONDS_TO_END = 10.0  # for a script to clean up after Ctrl-C, and for its children after its end
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Result:
    """The outcome of a script: its record (None if it did not run), and why it failed or did not run."""

    name: str
    record: dict[str, Any] | None
    problem: str = ""

    @property
    def promises(self) -> list[dict[str, Any]]:
        """The promises of the script, each with the script's own verdict."""
        return [] if self.record is None else list(self.record["promises"])

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; a script that cannot run here is not wrong."""
        return all(promise["kept"] for promise in self.promises) and not (self.record and self.problem)

    def as_dict(self) -> dict[str, object]:
        """Return what ``--json`` prints about the script."""
        record = self.record or {}
        promises = [{"full_target": promise["target"], **promise} for promise in self.promises]
        return {
            **{"name": self.name, "ran": self.record is not None, "ok": self.ok, "problem": self.problem},
            **{"promises": promises, "facts": record.get("facts", []), "seconds": record.get("seconds", 0.0)},
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = _parse(arguments)
    try:
        return _run_all(options)
    except (ConfigError, OSError) as error:
        print(f"benchmarks/run.py: {error}", file=sys.stderr)
        return CANNOT
    except KeyboardInterrupt:
        print("benchmarks/run.py: stopped; the records of finished scripts are written", file=sys.stderr)
        return STOPPED


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"Names: {', '.join(path.stem for path in find_scripts(HERE))}.\nExit code 0: every promise "
        "is kept, 1: one is missed or a script failed, 2: nothing could be run, 130: Ctrl-C.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="benchmarks to run (default: all)")
    add("--quick", action="store_true", help="small sizes, half of each speed target; write nothing")
    add("--render", action="store_true", help="run nothing, only write the page from the records")
    add("--docs", action=argparse.BooleanOptionalAction, default=True, help="write the page of the docs")
    add("--processor", metavar="DIR", help="processor or tokenizer for `count` (default: it trains one)")
    add("--folder", type=Path, default=HERE, metavar="DIR", help="folder of the scripts (default: this one)")
    add("--json", action="store_true", help="print one JSON object on stdout, everything else on stderr")
    return parser.parse_intermixed_args(arguments)


def _run_all(options: argparse.Namespace) -> int:
    """Run the chosen scripts one by one; return the exit code."""
    home: Path = options.folder
    if not (home / "promises.py").is_file():
        detail = f"{home} has no promises.py: --folder must be a folder of benchmarks"
        raise ConfigError(detail, setting="folder", path=home)
    if options.render:
        print(write_page(home))
        return 0
    scripts = find_scripts(home, options.names)
    writes_page = options.docs and not options.quick
    if writes_page:
        load_records(home)  # report an unreadable record now, not after the first hour
    console = Console(stderr=True, highlight=False) if options.json else Output(_WIDTH).console
    results = []
    for number, script in enumerate(scripts, 1):
        console.print(f"{script.stem} ({number} of {len(scripts)})", style="bold", markup=False)
        results.append(_measure(script, options, console))
        if writes_page:
            write_page(home)
    kept = all(result.ok for result in results)
    if options.json:
        report = {"version": 2, "quick": options.quick, "kept": kept}
        print(json.dumps({**report, "benchmarks": [result.as_dict() for result in results]}, indent=2))
    else:
        _print_table(results, console)
    return 0 if kept else 1


def _measure(script: Path, options: argparse.Namespace, console: Console) -> Result:
    """Run a script and, after a full run, write its record."""

    def show(line: str) -> None:
        console.print(f"  {line}", markup=False, soft_wrap=True)

    if not options.quick and script.stem.startswith("gpu_") and not _has_gpu():
        show("not run: there is no GPU; its record stays")
        return Result(script.stem, None, "there is no GPU")
    arguments = ["--quick"] if options.quick else []
    if script.stem == "count" and options.processor is not None:
        arguments += ["--processor", options.processor]
    result = run_script(script, arguments, show)
    assert result.record is not None  # it ran
    if not options.quick:
        write_record(script.parent / "results" / f"{script.stem}.json", result.record)
    if result.problem:
        show(f"FAILED {result.problem}")
    show(f"{result.record['seconds']:.0f} s")
    return result


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _print_table(results: list[Result], console: Console) -> None:
    """Print the promises of all scripts and the verdict."""
    table = new_table()
    for name in ("benchmark", "promise", "measured", "to reach", "verdict"):
        table.add_column(name, justify="right" if name in ("measured", "to reach") else "left")
    for result in results:
        for promise in result.promises:
            verdict = "ok" if promise["kept"] else "MISS"
            value = format_value(promise["value"], promise["unit"], promise["target"])
            table.add_row(result.name, escape(promise["claim"]), value, describe_target(promise), verdict)
        if result.problem:
            table.add_row(
                result.name, escape(result.problem), "", "", "FAILED" if result.record else "not run"
            )
    console.print(table)
    missed = [result.name for result in results if not result.ok]
    seconds = sum(result.record["seconds"] for result in results if result.record is not None)
    verdict = f"missed: {', '.join(missed)}" if missed else "every promise is kept"
    count = "1 benchmark" if len(results) == 1 else f"{len(results)} benchmarks"
    console.print(f"{count} in {seconds:.0f} s; {verdict}", markup=False, soft_wrap=True)


def run_script(script: Path, arguments: list[str], show: Callable[[str], object]) -> Result:
    """Run one script and return its record.

    The temporary files of the script are deleted however it ends. Ctrl-C ends it too.

    Args:
        script: the script.
        arguments: of its command line.
        show: called with each line that reports a promise, as it is printed.
    """
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "record.json"
        started = time.monotonic()
        code, last = _run_process(script, arguments, {RECORD: str(file), "TMPDIR": folder}, show)
        record = json.loads(file.read_bytes()) if file.exists() else new_record(str(script), arguments)
    missed = not all(promise["kept"] for promise in record["promises"])
    problem = str(record["problem"])
    if not problem and code != int(missed):  # killed, or ended for a reason other than a promise
        problem = last or "nothing was printed"
    if problem:
        problem = f"exit code {code}: {problem[:_LONGEST_PROBLEM]}"
    elif not record["promises"]:
        problem = "it promised nothing"
    record |= {"exit": code, "problem": problem}
    record["seconds"] = record["seconds"] or round(time.monotonic() - started, 1)
    return Result(script.stem, record, problem)


def _run_process(
    script: Path, arguments: list[str], env: dict[str, str], show: Callable[[str], object]
) -> tuple[int, str]:
    """Return the exit code and the last line of a script."""
    last = ""
    # In its own session: its children end with it, and Ctrl-C reaches it once, from here.
    process = subprocess.Popen(
        [sys.executable, "-u", str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **env},
        start_new_session=True,
    )
    with process:
        try:
            for line in _read_lines(process):
                if line.startswith(("ok   ", "MISS ")):
                    show(line)
                last = line or last
            process.wait()
        except BaseException:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGINT)  # like Ctrl-C, so that it can clean up
                process.wait(_SECONDS_TO_END)
            raise
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, last


def _read_lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield the output of a script until it ends, without waiting for children that keep its pipe open."""
    assert process.stdout is not None  # it has a pipe
    rest, ended = b"", math.inf
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < ended + _SECONDS_TO_END:
            if process.poll() is not None:
                ended = min(ended, time.monotonic())
            if not selector.select(_POLL_SECONDS):
                continue
            data = os.read(process.stdout.fileno(), 2**16)
            if not data:
                break
            *lines, rest = re.split(rb"[\r\n]", rest + data)
            yield from (line.decode(errors="replace").rstrip() for line in lines)
    yield rest.decode(errors="replace").rstrip()


if __name__ == "__main__":
    sys.exit(main())
