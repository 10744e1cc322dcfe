"""Run the training examples, and record the loss and the rows of each step."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from count_samples import python_path
from packhorse import Loader

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


def write_demo(folder: Path, layers: int = 2) -> None:
    """Write ``demo/data`` and ``demo/model``, where the examples find them if they run in ``folder``.

    A small part of what ``make demo`` writes, and the model has random weights.
    """
    from demo_data import write_demo_data
    from packhorse.cli.demo.data import tiny_model, tiny_processor

    write_demo_data(folder / "demo" / "data")
    processor = tiny_processor()
    processor.save_pretrained(folder / "demo" / "model")
    tiny_model(processor, layers=layers).save_pretrained(folder / "demo" / "model")


def example(name: str) -> ModuleType:
    """Import one of the examples."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return import_module(name)


class Interrupted(Exception):
    """Stops an example."""


def run_example(name: str, out: Path, *words: str, stop_after: int | None = None) -> Any:
    """Run an example in this process and record its steps in ``out``; raise after the step ``stop_after``."""
    module = example(name)
    with record_steps(module, out, stop_after):
        return module.main([str(out), "--lr", "1e-3", *words])


@contextmanager
def record_steps(module: ModuleType, out: Path, stop_after: int | None = None) -> Iterator[None]:
    """Write each step that an example reports to ``out``: its loss, and the rows since the last one."""
    keys: list[str] = []
    iterate, report = Loader.__iter__, module.report

    def record_keys(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            keys.extend(batch.info.keys)
            yield batch

    def record_step(step: int, loss: float, loader: Loader) -> None:
        report(step, loss, loader)
        out.mkdir(parents=True, exist_ok=True)
        with (out / f"trace-{loader.world.rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "loss": loss, "samples": keys}) + "\n")
        keys.clear()
        if step == stop_after:
            raise Interrupted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "__iter__", lambda loader: record_keys(iterate(loader)))
        patch.setattr(module, "report", record_step)
        yield


def steps_of(folder: Path) -> list[Step]:
    """Read and remove what :func:`record_steps` wrote, so that a resumed run begins new files."""
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
    """Run a script in ``folder`` under torchrun on a free port; kill one that hangs, and show its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), str(script), *words]
    path = os.pathsep.join([python_path(folder), str(EXAMPLES)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    log = folder / "output.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=folder
        )
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
