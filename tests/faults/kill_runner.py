"""Start processes, kill them at random moments, and record the outcome."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from count_samples import python_path, save_processor

WORK = Path(__file__).with_name("kill_work.py")


@dataclass
class Tally:
    """The outcome of several rounds.

    Attributes:
        rounds: number of rounds with a kill.
        kills: number of processes that were killed at work.
        lost: samples (or entries) that are missing at the end.
        duplicates: samples (or entries) that occur twice.
        partial: files that were incomplete or different.
        left: processes that were still running after the end.
        remarks: which files were incomplete or different.
    """

    rounds: int = 0
    kills: int = 0
    lost: int = 0
    duplicates: int = 0
    partial: int = 0
    left: int = 0
    remarks: list[str] = field(default_factory=list)

    def check(self, is_right: bool, what: str) -> None:
        """Record a check of a file."""
        if not is_right:
            self.partial += 1
            self.remarks.append(f"round {self.rounds}: {what}")

    def compare(self, actual: Iterable[Any], expected: Iterable[Any]) -> None:
        """Record missing and duplicate samples."""
        counts, expected_counts = Counter(actual), Counter(expected)
        self.lost += (expected_counts - counts).total()
        self.duplicates += (counts - expected_counts).total()

    @property
    def clean(self) -> bool:
        return self.lost == self.duplicates == self.partial == self.left == 0


@dataclass(frozen=True)
class ProcessResult:
    """Exit code, duration and output of a process."""

    code: int
    seconds: float
    output: str

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


class KillTimes:
    """Random moments to kill a process, within the time that its work takes.

    Args:
        seconds: time of an undisturbed run.
        seed: random seed.
    """

    def __init__(self, seconds: float, seed: int) -> None:
        self.seconds, self._rng = seconds, random.Random(seed)

    def draw(self) -> float:
        return self._rng.uniform(0, self.seconds)

    def record(self, result: ProcessResult) -> bool:
        """Return whether a process was killed; one that finished before shortens the time range."""
        if not result.killed:
            self.seconds = min(self.seconds, result.seconds)
        return result.killed


def repeat_until_killed(rounds: int, play: Callable[[int], int], tally: Tally) -> None:
    """Play rounds until ``rounds`` of them had a kill, or too many had none."""
    played = 0
    while tally.rounds < rounds and played < 3 * rounds + 5:
        hits = play(played)
        tally.kills += hits
        tally.rounds += bool(hits)
        played += 1


class ProcessRunner:
    """A folder, a saved processor, and a launcher that starts and kills processes; a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processor = save_processor(folder / "processor")
        self.cache = folder / "cache"
        self._log = folder / "log0.txt"
        environment = {**os.environ, "PYTHONPATH": python_path(folder), "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._launcher = subprocess.Popen(
            [sys.executable, str(WORK), self.processor],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._sessions: list[int] = []
        self._read_reply()  # the launcher is ready

    def __enter__(self) -> ProcessRunner:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._launcher.stdin is not None
        self._launcher.stdin.close()
        self.count_left_running(timeout=0)
        self._launcher.wait(timeout=30)

    def start(self, job: str, *, delay: float | None = None, group: bool = False, **more: Any) -> int:
        """Start a process and kill it after ``delay`` seconds; call :meth:`wait` before the next."""
        # A new file, so that the output of earlier processes is not read.
        self._log = self.folder / f"log{len(self._sessions) + 1}.txt"
        self._log.write_text("")
        request = {"job": job, "delay": delay, "group": group, "log": str(self._log), **more}
        request["environment"] = {"PACKHORSE_CACHE": str(self.cache)}
        assert self._launcher.stdin is not None
        self._launcher.stdin.write(json.dumps(request) + "\n")
        self._launcher.stdin.flush()
        pid = int(self._read_reply()["pid"])
        self._sessions.append(pid)
        return pid

    def wait(self) -> ProcessResult:
        """Wait for the process."""
        reply = self._read_reply()
        return ProcessResult(reply["code"], reply["seconds"], self.output())

    def run(self, job: str, *, delay: float | None = None, **more: Any) -> ProcessResult:
        self.start(job, delay=delay, **more)
        result = self.wait()
        assert result.code == 0 or (delay is not None and result.killed), result.output[-6000:]
        return result

    def command(self, *arguments: object, delay: float | None = None) -> ProcessResult:
        """Run the command line."""
        return self.run("command", delay=delay, arguments=[str(argument) for argument in arguments])

    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def count_left_running(self, timeout: float = 20.0) -> int:
        """Return how many children of killed processes do not end by themselves."""
        end = time.monotonic() + timeout
        while (alive := self._alive()) and time.monotonic() < end:
            time.sleep(0.1)
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(alive)

    def _alive(self) -> list[int]:
        """Return the running processes of the sessions started here; each child has its own."""
        sessions, alive = set(self._sessions), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if int(fields[3]) in sessions and fields[0] != "Z":
                    alive.append(int(entry.name))
        return alive

    def _read_reply(self) -> dict[str, Any]:
        assert self._launcher.stdout is not None
        line = self._launcher.stdout.readline()
        assert line, f"the launcher has ended ({self._launcher.poll()})"
        reply: dict[str, Any] = json.loads(line)
        return reply


@contextlib.contextmanager
def open_runner(folder: Path) -> Iterator[ProcessRunner]:
    """Open a runner in a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessRunner(folder) as runner:
        yield runner
