"""Running the scripts of ``benchmarks/``, each in a process of its own.

A script tells what it promises through ``promises.py`` beside it, which writes a record (JSON) where the
environment asks for one. That module alone knows what a record looks like; it is loaded from the folder of
the scripts, since benchmarks are no part of the package.
"""

from __future__ import annotations

import importlib.util
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

from packhorse.errors import ConfigError

_LONGEST_PROBLEM = 300
_SECONDS_TO_END = 10.0  # that a script has to tidy up after Ctrl-C, and its children after its end
_LOOK_EVERY = 0.2  # seconds, for the end of a script
_READ = 2**16


@dataclass(frozen=True)
class Result:
    """What became of a script.

    Attributes:
        name: of the script.
        record: what it told, None where it was not run.
        problem: why it failed or was not run.
    """

    name: str
    record: dict[str, Any] | None
    problem: str = ""

    @property
    def ran(self) -> bool:
        """Whether it was started at all."""
        return self.record is not None

    @property
    def promises(self) -> list[dict[str, Any]]:
        """What it promised, each with its verdict: the script's own, also of a quick run."""
        return [] if self.record is None else list(self.record["promises"])

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; a script that cannot run here is not wrong."""
        return all(one["kept"] for one in self.promises) and not (self.ran and self.problem)


def find_folder(folder: Path | None) -> Path:
    """The folder of the scripts: the given one, or that of the checkout.

    Raises:
        ConfigError: there is none, or it has no ``promises.py``.
    """
    places = [Path(__file__).parents[4] / "benchmarks", Path("benchmarks")] if folder is None else [folder]
    for place in places:
        if (place / "promises.py").is_file():
            return place
    raise ConfigError(
        f"no {places[-1] / 'promises.py'}: benchmarks are part of a checkout, not of an installed package. "
        "Run this in a clone, or name the folder with --folder"
    )


def find_scripts(home: Path, names: Sequence[str] = ()) -> list[Path]:
    """The scripts that were asked for (all without names), in the order of the alphabet.

    Raises:
        ConfigError: there is no script of that name.
    """
    known = {path.stem: path for path in sorted(home.glob("*.py")) if "__main__" in path.read_text("utf-8")}
    if unknown := sorted(set(names) - set(known)):
        raise ConfigError(f"no benchmark {', '.join(unknown)} in {home}; there are {', '.join(known)}")
    return [path for name, path in known.items() if not names or name in names]


def load_promises(home: Path) -> Any:
    """The module ``promises.py`` of the folder."""
    spec = importlib.util.spec_from_file_location("packhorse_benchmark_promises", home / "promises.py")
    assert spec is not None  # it has the ending .py,
    assert spec.loader is not None  # and so a loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def why_not(script: Path, quick: bool) -> str:
    """Why a script cannot run here; empty if it can. A quick run needs no GPU."""
    if quick or not script.stem.startswith("gpu_"):
        return ""
    import torch

    return "" if torch.cuda.is_available() else "there is no GPU"


def run_script(script: Path, options: list[str], told: Callable[[str], object]) -> Result:
    """Run one script and pass on its promises as they come.

    Its temporary files are gone afterwards, however it ended. Ctrl-C ends it too.

    Args:
        script: to run.
        options: of its command line.
        told: is called with each line that tells a promise.
    """
    promises = load_promises(script.parent)
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "record.json"
        started = time.monotonic()
        code, last = _run(script, options, {promises.RECORD: str(file), "TMPDIR": folder}, told)
        record = promises.blank_record(str(script), options)
        if file.exists():
            record = json.loads(file.read_bytes())
    missed = not all(one["kept"] for one in record["promises"])
    problem = str(record["problem"])
    if not problem and code != int(missed):  # killed, or it ended for a reason that is no promise
        problem = last or "nothing was printed"
    if problem:
        problem = f"exit code {code}: {problem[:_LONGEST_PROBLEM]}"
    elif not record["promises"]:
        problem = "it promised nothing"
    record |= {"exit": code, "problem": problem}
    record["seconds"] = record["seconds"] or round(time.monotonic() - started, 1)
    return Result(script.stem, record, problem)


def _run(
    script: Path, options: list[str], more: dict[str, str], told: Callable[[str], object]
) -> tuple[int, str]:
    """Exit code and last line of a script."""
    last = ""
    # A session of its own: its children end with it, and Ctrl-C reaches it once, from here.
    process = subprocess.Popen(
        [sys.executable, "-u", str(script), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **more},
        start_new_session=True,
    )
    with process:
        try:
            for line in _lines(process):
                if line.startswith(("ok   ", "MISS ")):
                    told(line)
                last = line or last
            process.wait()
        except BaseException:
            _end(process)
            raise
        _kill_group(process)
    return process.returncode, last


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """What a script prints, until its end; a child that still holds its output then does not hold up us."""
    assert process.stdout is not None  # it has a pipe
    rest, ended = b"", math.inf
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < ended + _SECONDS_TO_END:
            if process.poll() is not None:
                ended = min(ended, time.monotonic())
            if not selector.select(_LOOK_EVERY):
                continue
            data = os.read(process.stdout.fileno(), _READ)
            if not data:
                break
            *lines, rest = re.split(rb"[\r\n]", rest + data)
            yield from (line.decode(errors="replace").rstrip() for line in lines)
    yield rest.decode(errors="replace").rstrip()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a script and what it has started; first as Ctrl-C does, so that it can tidy up."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGINT)
        process.wait(_SECONDS_TO_END)
    _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a script and of what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
