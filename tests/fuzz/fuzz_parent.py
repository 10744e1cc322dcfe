"""Fuzz one reader in a child process, and say what came of it."""

import os
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from fuzz_targets import BROKEN, TARGETS  # noqa: E402

from count_samples import python_path  # noqa: E402

EXCEPTION = 77  # libFuzzer's exit code for a target that failed
STARTING = 120.0  # seconds at most until the first input
_ONE_AT_A_TIME = threading.Lock()  # makes seeds: what they import is not made for threads


@dataclass(frozen=True)
class Report:
    """A run.

    Attributes:
        tried: inputs.
        read: of them were read.
        rejected: with an error of Packhorse.
        unexpected: exceptions of another kind (the first ends the run).
        crashes: of the interpreter, or hangs (likewise).
        detail: the end of what the child said, where anything was found.
    """

    tried: int
    read: int
    rejected: int
    unexpected: int = 0
    crashes: int = 0
    detail: str = ""


def fuzz(name: str, seconds: int, folder: Path, seed: int = 1) -> Report:
    """Make the seeds of a target in a new folder, and fuzz it for so long; what is found is kept there."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    with _ONE_AT_A_TIME:
        for number, data in enumerate((TARGETS | BROKEN)[name].seeds(folder)):
            (corpus / f"seed-{number}").write_bytes(data)
    counts = struct.Struct("<qqq")
    (folder / "counts").write_bytes(bytes(counts.size))
    environment = {**os.environ, "PYTHONPATH": python_path(folder), "PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, str(HERE / "fuzz_child.py"), name, str(folder), str(seconds), str(seed)]
    try:
        run = subprocess.run(
            command, env=environment, capture_output=True, check=False, timeout=seconds + STARTING
        )
        code, said = run.returncode, (run.stderr + run.stdout).decode(errors="replace")
    except subprocess.TimeoutExpired as error:
        code, said = -1, f"it did not end: {(error.stderr or b'').decode(errors='replace')}"
    tried, read, rejected = counts.unpack((folder / "counts").read_bytes())
    by_exception = code == EXCEPTION and "Uncaught Python exception" in said
    return Report(
        tried,
        read,
        rejected,
        int(by_exception),
        int(code != 0 and not by_exception),
        said[-4000:] if code else "",
    )
