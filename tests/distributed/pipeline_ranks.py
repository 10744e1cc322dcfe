"""Starting several processes that belong together, and never leaving one after."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil


def run_together(commands: Sequence[Sequence[str]], folder: Path, path: str, timeout: float) -> str:
    """Run the commands side by side; when one fails or time is up, end all of them and show what they wrote.

    Args:
        commands: one for each process.
        folder: where what they write goes.
        path: their PYTHONPATH.
        timeout: seconds for all of them.

    Returns:
        What they wrote, one after the other.
    """
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    logs = [folder / f"output{number}.txt" for number in range(len(commands))]
    running = []
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("wb") as file:
                running.append(
                    subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=folder)
                )
        end = time.monotonic() + timeout
        while any(process.poll() is None for process in running) and time.monotonic() < end:
            if any(process.poll() for process in running):
                end = min(end, time.monotonic() + 10)  # the others would wait for ever
            time.sleep(0.05)
    finally:
        for process in running:
            _end(process)
    written = "\n".join(log.read_text(errors="replace") for log in logs)
    codes = [process.returncode for process in running]
    assert codes == [0] * len(running), (
        f"exit codes {codes} (-9: killed after {timeout} s)\n{written[-12_000:]}"
    )
    return written


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those it has started (torchrun's workers have sessions of their own)."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
    process.wait()
