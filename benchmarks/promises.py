"""Print and record the promises of benchmarks.

A script calls :func:`promise` for each figure with a target and :func:`fact` for other figures; both print
a line. Its ``main`` is decorated with :func:`record_outcome`, which exits with code 1 if a promise is missed,
and parses its command line with :func:`make_parser` and :func:`parse`, which adds ``--quick``. A quick run
needs half of a speed, or twice a limit (:func:`quick_target`).

If the environment variable ``PACKHORSE_RECORD`` names a file, everything is written there as JSON together
with the machine, the versions, the commit, the date and the command. ``benchmarks/run.py`` keeps these files
as ``benchmarks/results/<script>.json`` and writes docs/reference/benchmarks.md from them. On another machine
(with a GPU), a script writes the same file:

    PACKHORSE_RECORD=gpu_packing.json python benchmarks/gpu_packing.py

Needs only Python.
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
        value: the measured value.
        target: the value to reach; for a quick run see :func:`quick_target`.
        baseline: what it is compared with in the same run.
        unit: of both numbers; "x" for a ratio.
        at_least: whether ``target`` is a minimum (else a maximum).
        kind: "speed" depends on size and machine, so a quick run needs less; "exact" does not.

    Returns:
        Whether the promise is kept.
    """
    value, full = _plain(value), _plain(target)
    sign = ">=" if at_least else "<="
    target = quick_target(full, sign, kind) if _log.quick else full
    kept = value >= target if at_least else value <= target
    entry = {"claim": claim, "value": value, "sign": sign, "target": target, "unit": unit}
    entry |= {"baseline": baseline, "kind": kind, "kept": kept}
    if _log.quick:
        entry["full_target"] = full
    print(
        f"{'ok  ' if kept else 'MISS'} {claim}: {format_value(value, unit, target)}"
        f" (to reach: {describe_target(entry)}; baseline: {baseline})",
        flush=True,
    )
    _log.add("promises", entry)
    return kept


def quick_target(target: float, sign: str, kind: str) -> float:
    """Return the target of a quick run: half of a speed, twice a limit, an exact target unchanged.

    Small sizes and a busy machine reduce speed; exact results do not depend on them.
    """
    if kind == "exact":
        return target
    return target / 2 if sign == ">=" else target * 2


def describe_target(entry: dict[str, Any]) -> str:
    """Return the target of a promise as text: ``>= 1.25x, half of 2.5x``."""
    unit, target = entry["unit"], entry["target"]
    full = entry.get("full_target", target)
    part = "half of" if entry["sign"] == ">=" else "twice"
    return f"{entry['sign']} {format_value(target, unit)}" + (
        f", {part} {format_value(full, unit)}" if full != target else ""
    )


def fact(what: str, value: float | str, unit: str = "") -> None:
    """Print and record a figure without a target."""
    value = value if isinstance(value, str) else _plain(value)
    print(f"     {what}: {format_value(value, unit)}", flush=True)
    _log.add("facts", {"fact": what, "value": value, "unit": unit})


def format_value(value: float | str, unit: str = "", other: float | None = None) -> str:
    """Format a number with four digits, or with more if it would otherwise look like ``other``."""
    space = "" if unit in ("", "x") else " "
    if isinstance(value, str):
        return f"{value}{space}{unit}"
    text = _digits(value, 4)
    for digits in range(5, 18):
        if other is None or value == other or text != _digits(other, digits - 1):
            break
        text = _digits(value, digits)
    return f"{text}{space}{unit}"


def make_parser(description: str | None, **numbers: float) -> argparse.ArgumentParser:
    """Return a parser with an option for each number: ``repeat=3`` is ``--repeat``, an int, by default 3."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser


def parse(parser: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """Parse the options of this run; with ``--quick`` the given values replace the defaults."""
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes, seconds instead of minutes; half of each speed target, twice each limit",
    )
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(**quick)
    options = parser.parse_args()
    _log.quick = options.quick
    return options


@contextmanager
def record_outcome() -> Iterator[None]:
    """Decorate the ``main`` of a script: record how it ended; exit with code 1 if a promise is missed.

    Processes that the script starts record nothing.
    """
    _log.claim()
    try:
        yield
    except SystemExit as end:
        is_message = isinstance(end.code, str)
        _log.end(1 if is_message else int(end.code or 0), str(end.code) if is_message else "")
        raise
    except BaseException as error:
        _log.end(1, f"{type(error).__name__}: {error}")
        raise
    missed = not all(entry["kept"] for entry in _log.promises)
    _log.end(int(missed))
    if missed:
        sys.exit(1)


def new_record(script: str, arguments: list[str]) -> dict[str, Any]:
    """Return an empty record, which defines the format; ``exit`` is None until the script has ended."""
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
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def machine() -> dict[str, Any]:
    """Return processor, usable cores, memory, and the GPU if this process has used one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    torch = sys.modules.get("torch")
    used = torch is not None and torch.cuda.is_initialized()
    gpu = torch.cuda.get_device_name() if torch is not None and used else None
    return {"cpu": _cpu(), "cores": cores, "memory_gib": round(memory), "gpu": gpu}


def versions() -> dict[str, str]:
    """Return the versions of Python and of ``PACKAGES``."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        # A loaded module has more: torch's build (cpu, cu130), packhorse if it is not installed.
        loaded = getattr(sys.modules.get(name), "__version__", None)
        try:
            installed[name] = str(loaded or importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


@cache
def commit() -> str | None:
    """Return the commit of this checkout, with a "+" if files are changed; None without git.

    Records and their page are ignored: a run of many scripts writes them.
    """
    here = ["git", "-C", str(Path(__file__).resolve().parents[1])]
    results = (":!benchmarks/results", ":!docs/reference/benchmarks.md")
    outputs = []
    for arguments in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--", ".", *results)):
        try:
            done = subprocess.run([*here, *arguments], capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):  # no git, or not a checkout
            return None
        outputs.append(done.stdout.strip())
    return outputs[0] + ("+" if outputs[1] else "")


class _Log:
    """The promises and facts that this process recorded, and their file."""

    def __init__(self) -> None:
        self.promises: list[dict[str, Any]] = []
        self.facts: list[dict[str, Any]] = []
        self.path: Path | None = None
        self.process = 0
        self.quick = False
        self.started = time.monotonic()

    def claim(self) -> None:
        """Take the file for this process, so that its children do not write it too."""
        if path := os.environ.pop(RECORD, None):
            self.path, self.process = Path(path), os.getpid()

    def add(self, kind: str, entry: dict[str, Any]) -> None:
        """Add a promise or fact."""
        self.claim()
        getattr(self, kind).append(entry)
        self.write()

    def end(self, code: int, problem: str = "") -> None:
        """Record that the script has ended."""
        self.write(exit=code, problem=problem)

    def write(self, **more: Any) -> None:
        """Write everything each time, so that a killed script leaves a record."""
        if self.path is None or self.process != os.getpid():
            return
        record = new_record(sys.argv[0], sys.argv[1:])
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
    """Convert a numpy number to a Python number."""
    return value.item() if hasattr(value, "item") else value


def _digits(value: float, digits: int) -> str:
    text = f"{value:,.{digits}g}"
    return f"{value:,.0f}" if "e+" in text else text
