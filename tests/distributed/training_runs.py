"""Runs of the training examples, and what they left after."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from count_samples import python_path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

# Of the demo's rows one is not JSON, and the image of another is cut off.
DEMO_KEYS = {
    *(f"charts/{row}" for row in range(24) if row not in (7, 13)),
    *(f"clips/{row}" for row in range(4)),
    *(f"chats/{row}" for row in range(12)),
}


@dataclass(frozen=True)
class Step:
    """One step of the optimizer, over all ranks."""

    number: int
    loss: float
    samples: tuple[str, ...]


def example(name: str) -> Any:
    """One of the examples as a module."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return import_module(name)


def steps_of(folder: Path) -> list[Step]:
    """What the processes wrote down; the files are taken away, so that a resumed run begins new ones."""
    lines = []
    for path in sorted(folder.glob("trace-*.jsonl")):
        lines.append([json.loads(line) for line in path.read_text().splitlines()])
        path.unlink()
    steps = []
    for ranks in zip(*lines, strict=True):
        (number,) = {rank["step"] for rank in ranks}
        (loss,) = {rank["loss"] for rank in ranks}
        steps.append(Step(number, loss, tuple(key for rank in ranks for key in rank["samples"])))
    return steps


def samples_of(steps: list[Step]) -> list[str]:
    return [key for step in steps for key in step.samples]


def free_ports(number: int) -> list[int]:
    """Free ports; all are held until the last one is found."""
    with ExitStack() as held:
        ports = []
        for _ in range(number):
            taken = held.enter_context(socket.socket())
            taken.bind(("127.0.0.1", 0))
            ports.append(int(taken.getsockname()[1]))
    return ports


def torchrun(script: Path, words: list[str], folder: Path, processes: int = 2, seconds: int = 150) -> None:
    """Start a script under torchrun on a free port; one that hangs is killed, and its output shown."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), str(script), *words]
    path = os.pathsep.join([python_path(folder), str(EXAMPLES)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    log = folder / "output.txt"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(
                signal.SIGTERM
            )  # torchrun ends its processes, which have sessions of their own
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
            code = None
    said = log.read_text()[-8000:]
    assert code is not None, f"no end after {seconds} s:\n{said}"
    assert code == 0, said
