"""What every benchmark promises, told and recorded in one way.

A script calls :func:`promise` for each figure it claims and :func:`fact` for what stands beside it without
being judged; both print a line. Its ``main`` is decorated with :func:`recorded`, which ends the script with
exit code 1 where a promise is missed, and reads its command line with :func:`parse`, which knows ``--quick``.
A quick run is judged here too, by :func:`in_force`: half of a speed is enough, twice a limit on one.

Where the environment variable ``PACKHORSE_RECORD`` names a file, all of it is written there as JSON together
with the machine, the versions, the commit, the date and the command. ``benchmarks/run.py`` keeps these files
as ``benchmarks/results/<script>.json`` and writes docs/benchmarks.md from them. A script that runs elsewhere
(on a machine with a GPU) makes the same file by itself:

    PACKHORSE_RECORD=gpu_packing.json python benchmarks/gpu_packing.py

Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, Literal

RECORD = "PACKHORSE_RECORD"
PACKAGES = ("packhorse", "torch", "transformers", "tokenizers", "numpy", "pyarrow")


def promise(
    claim: str,
    value: float,
    target: float,
    *,
    baseline: str,
    unit: str = "x",
    at_least: bool = True,
    kind: Literal["speed", "exact"] = "speed",
) -> bool:
    """Print and record one promise.

    Args:
        claim: what is promised, in a few words.
        value: what was measured.
        target: what is to be reached; a quick run is judged by what :func:`in_force` makes of it.
        baseline: what it is measured against in the same run.
        unit: of both numbers; "x" for a ratio.
        at_least: whether ``target`` is the least (else the most) that keeps the promise.
        kind: "speed" depends on size and machine, so a quick run asks for less of it; "exact" does not.

    Returns:
        Whether it is kept.
    """
    value, full = _plain(value), _plain(target)
    sign = ">=" if at_least else "<="
    target = in_force(full, sign, kind) if _log.quick else full
    kept = value >= target if at_least else value <= target
    told = {"claim": claim, "value": value, "sign": sign, "target": target, "unit": unit}
    told |= {"baseline": baseline, "kind": kind, "kept": kept}
    if _log.quick:
        told["full_target"] = full
    print(
        f"{'ok  ' if kept else 'MISS'} {claim}: {shown(value, unit, target)}"
        f" (to reach: {to_reach(told)}; baseline: {baseline})",
        flush=True,
    )
    _log.add("promises", told)
    return kept


def in_force(target: float, sign: str, kind: str) -> float:
    """What a quick run has to reach of a target: half of a speed, twice a limit on one, all of what is exact.

    Small sizes and a busy machine cost speed. What is exact depends on neither, and is promised only at sizes
    where it holds.
    """
    if kind == "exact":
        return target
    return target / 2 if sign == ">=" else target * 2


def to_reach(told: dict[str, Any]) -> str:
    """The target of a promise as people read it: ``>= 1.25x, half of 2.5x``."""
    unit, target = told["unit"], told["target"]
    full = told.get("full_target", target)
    part = "half of" if told["sign"] == ">=" else "twice"
    return f"{told['sign']} {shown(target, unit)}" + (
        f", {part} {shown(full, unit)}" if full != target else ""
    )


def fact(what: str, value: float | str, unit: str = "") -> None:
    """Print and record a figure that is not judged."""
    value = value if isinstance(value, str) else _plain(value)
    print(f"     {what}: {shown(value, unit)}", flush=True)
    _log.add("facts", {"fact": what, "value": value, "unit": unit})


def shown(value: float | str, unit: str = "", beside: float | None = None) -> str:
    """A number as people read it, with four digits; with more where it would else look like ``beside``."""
    blank = "" if unit in ("", "x") else " "
    if isinstance(value, str):
        return f"{value}{blank}{unit}"
    text = _digits(value, 4)
    for digits in range(5, 18):
        if beside is None or value == beside or text != _digits(beside, digits - 1):
            break
        text = _digits(value, digits)
    return f"{text}{blank}{unit}"


def parse(parser: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """The options of this run; with ``--quick`` the given ones stand in place of the defaults."""
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes, seconds instead of minutes; half of a speed is enough, twice a limit on one",
    )
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(**quick)
    options = parser.parse_args()
    _log.quick = options.quick
    return options


@contextmanager
def recorded() -> Iterator[None]:
    """Around the ``main`` of a script: how it ended is recorded, and a missed promise is exit code 1.

    ``@recorded()`` above ``def main()``. Processes that the script starts record nothing.
    """
    _log.claim()
    try:
        yield
    except SystemExit as end:
        told = isinstance(end.code, str)
        _log.end(int(end.code or 0) if not told else 1, str(end.code) if told else "")
        raise
    except BaseException as error:
        _log.end(1, f"{type(error).__name__}: {error}")
        raise
    missed = not all(one["kept"] for one in _log.promises)
    _log.end(int(missed))
    if missed:
        sys.exit(1)


def blank_record(script: str, arguments: list[str]) -> dict[str, Any]:
    """The record of a script that has not told anything yet: the whole format is here.

    ``exit`` is None until the script has ended.
    """
    name = f"benchmarks/{Path(script).name}"
    return {
        "script": Path(script).stem,
        "command": shlex.join(["python", name, *arguments]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": 0.0,
        "exit": None,
        "problem": "",
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "promises": [],
        "facts": [],
    }


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record."""
    write_atomically(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that no reader ever sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def machine() -> dict[str, Any]:
    """Processor, cores that may be used, memory, and the GPU if this process has used one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    torch = sys.modules.get("torch")
    used = torch is not None and torch.cuda.is_initialized()
    gpu = torch.cuda.get_device_name() if torch is not None and used else None
    return {"cpu": _cpu(), "cores": cores, "memory_gib": round(memory), "gpu": gpu}


def versions() -> dict[str, str]:
    """Python and what is installed of the packages that matter."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        # A loaded module knows more: torch's build (cpu, cu130), packhorse where it is not installed.
        loaded = getattr(sys.modules.get(name), "__version__", None)
        try:
            found[name] = str(loaded or importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@cache
def commit() -> str | None:
    """The commit of this checkout, with a "+" where files are changed; None where git does not tell.

    Records and their page do not count as changed: a run over many scripts writes them itself.
    """
    here = ["git", "-C", str(Path(__file__).resolve().parents[1])]
    results = (":!benchmarks/results", ":!docs/benchmarks.md")
    told = []
    for asked in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--", ".", *results)):
        try:
            done = subprocess.run([*here, *asked], capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):  # no git, or not a checkout
            return None
        told.append(done.stdout.strip())
    return told[0] + ("+" if told[1] else "")


class _Log:
    """What this process has told so far, and the file for it."""

    def __init__(self) -> None:
        self.promises: list[dict[str, Any]] = []
        self.facts: list[dict[str, Any]] = []
        self.path: Path | None = None
        self.process = 0
        self.quick = False
        self.started = time.monotonic()

    def claim(self) -> None:
        """Take the file for this process alone: its children must not write it too."""
        if path := os.environ.pop(RECORD, None):
            self.path, self.process = Path(path), os.getpid()

    def add(self, kind: str, entry: dict[str, Any]) -> None:
        """One more promise or fact."""
        self.claim()
        getattr(self, kind).append(entry)
        self.write()

    def end(self, code: int, problem: str = "") -> None:
        """The script has ended."""
        self.write(exit=code, problem=problem)

    def write(self, **more: Any) -> None:
        """All of it, each time: a script that is killed leaves what it has told."""
        if self.path is None or self.process != os.getpid():
            return
        record = blank_record(sys.argv[0], sys.argv[1:])
        record |= {"seconds": round(time.monotonic() - self.started, 1)}
        write_record(self.path, {**record, "promises": self.promises, "facts": self.facts, **more})


_log = _Log()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _plain(value: float) -> float:
    """A number that JSON knows (numpy's are not)."""
    return value.item() if hasattr(value, "item") else value


def _digits(value: float, digits: int) -> str:
    text = f"{value:,.{digits}g}"
    return f"{value:,.0f}" if "e+" in text else text
