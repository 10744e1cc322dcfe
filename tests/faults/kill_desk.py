"""The desk from which processes are started and killed, and where it is noted what has become of them."""

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
    """What rounds have come to.

    Attributes:
        rounds: that were played.
        kills: that hit a process at work.
        lost: samples (or entries) that should be there at the end and are not; ``doubled``: there twice.
        half: files that were seen under their names and were not whole, or not the right ones.
        left: processes that were still there after the end.
        remarks: what was half or different, for people.
    """

    rounds: int = 0
    kills: int = 0
    lost: int = 0
    doubled: int = 0
    half: int = 0
    left: int = 0
    remarks: list[str] = field(default_factory=list)

    def whole(self, is_whole: bool, what: str) -> None:
        """Take a file (or what was found in one) into account."""
        if not is_whole:
            self.half += 1
            self.remarks.append(f"round {self.rounds}: {what}")

    def compare(self, found: Iterable[Any], expected: Iterable[Any]) -> None:
        """Take into account what is there, and what should be."""
        there, wanted = Counter(found), Counter(expected)
        self.lost += (wanted - there).total()
        self.doubled += (there - wanted).total()

    @property
    def clean(self) -> bool:
        return self.lost == self.doubled == self.half == self.left == 0


@dataclass(frozen=True)
class Ended:
    """How a process ended, after how long, and what it wrote."""

    code: int
    seconds: float
    written: str

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


class Moments:
    """Draws when to kill: any time in which the work is done, as far as is known.

    Args:
        seconds: that it takes undisturbed.
        seed: of the draw.
    """

    def __init__(self, seconds: float, seed: int) -> None:
        self.seconds, self._draw = seconds, random.Random(seed)

    def drawn(self) -> float:
        return self._draw.uniform(0, self.seconds)

    def saw(self, ended: Ended) -> bool:
        """Whether a process was hit; one that was done before shows that the work takes less time."""
        if not ended.killed:
            self.seconds = min(self.seconds, ended.seconds)
        return ended.killed


def until_hit(rounds: int, play: Callable[[int], int], tally: Tally) -> None:
    """Play rounds until so many were hit by a kill; too many misses end it."""
    played = 0
    while tally.rounds < rounds and played < 3 * rounds + 5:
        hits = play(played)
        tally.kills += hits
        tally.rounds += bool(hits)
        played += 1


class Desk:
    """A folder, a saved processor, and the process that starts (and kills) the others; a context manager."""

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
        self._told()  # it is ready

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._launcher.stdin is not None
        self._launcher.stdin.close()
        self.left_over(patience=0)
        self._launcher.wait(timeout=30)

    def start(self, job: str, *, delay: float | None = None, group: bool = False, **more: Any) -> int:
        """Start a process; it is killed after ``delay`` seconds. One at a time: ask for its :meth:`end`."""
        # A file of its own: nobody reads what an earlier one has written.
        self._log = self.folder / f"log{len(self._sessions) + 1}.txt"
        self._log.write_text("")
        request = {"job": job, "delay": delay, "group": group, "log": str(self._log), **more}
        request["environment"] = {"PACKHORSE_CACHE": str(self.cache)}
        assert self._launcher.stdin is not None
        self._launcher.stdin.write(json.dumps(request) + "\n")
        self._launcher.stdin.flush()
        pid = int(self._told()["pid"])
        self._sessions.append(pid)
        return pid

    def end(self) -> Ended:
        """Wait for it."""
        told = self._told()
        return Ended(told["code"], told["seconds"], self.written())

    def run(self, job: str, *, delay: float | None = None, **more: Any) -> Ended:
        self.start(job, delay=delay, **more)
        ended = self.end()
        assert ended.code == 0 or (delay is not None and ended.killed), ended.written[-6000:]
        return ended

    def command(self, *arguments: object, delay: float | None = None) -> Ended:
        """Run the command line."""
        return self.run("command", delay=delay, arguments=[str(one) for one in arguments])

    def written(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def left_over(self, patience: float = 20.0) -> int:
        """How many processes that were started by killed ones do not end by themselves."""
        end = time.monotonic() + patience
        while (alive := self._alive()) and time.monotonic() < end:
            time.sleep(0.1)
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(alive)

    def _alive(self) -> list[int]:
        """Processes of the sessions that were started here; each child has a session of its own."""
        ours, found = set(self._sessions), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if int(fields[3]) in ours and fields[0] != "Z":
                    found.append(int(entry.name))
        return found

    def _told(self) -> dict[str, Any]:
        assert self._launcher.stdout is not None
        line = self._launcher.stdout.readline()
        assert line, f"the process that starts the others has ended ({self._launcher.poll()})"
        told: dict[str, Any] = json.loads(line)
        return told


@contextlib.contextmanager
def open_desk(folder: Path) -> Iterator[Desk]:
    """A desk in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    with Desk(folder) as desk:
        yield desk
