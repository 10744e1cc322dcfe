"""What the Ray tests run in the processes of a cluster."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def work_for(seconds: float, folder: Path, node: str) -> None:
    """Take a while; on a node that is to be killed, the second task takes until then."""
    doomed = folder.with_name(f"{folder.name}.doomed")
    own = sum(path.name.startswith(node) for path in folder.iterdir())
    time.sleep(120 if own >= 2 and doomed.exists() and doomed.read_text() == node else seconds)


@dataclass
class Marked:
    """Squares its task, slowly, and leaves a mark in ``folder`` for each attempt: node, task, process."""

    folder: Path
    seconds: float = 0.0
    loaded: int = field(default_factory=lambda: 0)

    def __call__(self, number: int) -> tuple[int, bytes]:
        import ray

        self.loaded += 1
        node = ray.get_runtime_context().get_node_id()
        with open(self.folder / f"{node}-{number}-{os.getpid()}-{time.monotonic_ns()}", "w") as file:
            file.write(str(self.loaded))
        work_for(self.seconds, self.folder, node)
        return number * number, b"%d" % number * 200_000  # large: it lies on the node until it is fetched


@dataclass
class DieAgain:
    """Kills its own process the first ``times`` times it gets task 1."""

    folder: Path
    times: int

    def __call__(self, number: int) -> int:
        if number == 1 and len(list(self.folder.iterdir())) < self.times:
            (self.folder / str(time.monotonic_ns())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number * number


@dataclass
class Slowly:
    """Other work, each task of it at least ``seconds`` long, with a mark in ``folder`` as above."""

    work: Any
    folder: Path
    seconds: float

    def __call__(self, task: Any) -> Any:
        import ray

        node = ray.get_runtime_context().get_node_id()
        (self.folder / f"{node}-{time.monotonic_ns()}").touch()
        work_for(self.seconds, self.folder, node)
        return self.work(task)


def environment(number: int) -> tuple[str | None, int]:
    import torch

    return os.environ.get("TOKENIZERS_PARALLELISM"), torch.get_num_threads()


def sleep(number: int) -> None:
    time.sleep(300)
