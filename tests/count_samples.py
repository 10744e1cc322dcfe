"""Datasets, saved processors and an engine for the tests of counting."""

import json
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from contract.processors import build

TESTS = Path(__file__).parent
SCRIPTS = TESTS.parent / "scripts"

# For the processes that tests start.
_SITE = "from torchvision_help import help_torchvision\nhelp_torchvision()\n"


def python_path(folder: Path) -> str:
    """A PYTHONPATH with which other processes can open real processors, and import what this one does."""
    site = folder / "site"
    site.mkdir(parents=True, exist_ok=True)
    (site / "sitecustomize.py").write_text(_SITE)
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(site), str(TESTS), str(SCRIPTS), *([given] if given else [])])


def save_processor(folder: Path, name: str = "qwen2_vl", change: Callable[[Any], None] | None = None) -> str:
    """Save a real processor where ``AutoProcessor`` finds it."""
    processor = build(name)
    if change is not None:
        change(processor)
    processor.save_pretrained(folder)
    return str(folder)


def chat(number: int, words: int = 5) -> dict[str, Any]:
    answer = " ".join(f"word{number}-{n}" for n in range(number % (words + 1)))
    return {
        "messages": [
            {"role": "user", "content": f"Question {number}?"},
            {"role": "assistant", "content": f"Answer {answer}."},
        ]
    }


def write_chats(folder: Path, rows: int, name: str = "chats") -> Path:
    """A mixture of one text-only dataset; returns the meta file."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / f"{name}.jsonl", [chat(n) for n in range(rows)])
    return write_meta(folder, {name: {"file_name": f"{name}.jsonl"}})


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def write_meta(folder: Path, meta: dict[str, Any]) -> Path:
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder / "meta.json"


def sidecars(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.phcount"))


def stale_files(folder: Path) -> list[str]:
    """What a finished or failed run must not leave: half files, and folders of parts without parts."""
    return sorted(
        path.name for path in folder.iterdir() if path.name.startswith(".") or path.suffix == ".parts"
    )


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """Files may not grow beyond ``size`` bytes: a full disk that needs no disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Stopped(Exception):
    """A run that ends in the middle."""


class StopsAfter:
    """An engine whose run ends after ``tasks`` tasks."""

    def __init__(self, tasks: int) -> None:
        self.tasks = tasks

    def run(self, work: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for number, task in islice(enumerate(tasks), self.tasks):
            yield number, work(task)
        raise Stopped
