"""One rank of ``test_ranks_machine.py``: ``python rank_work.py MEETING RANK WORLD``.

Reads a command (a JSON line) from its standard input, does it, and answers with a JSON line.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import packhorse
from contract.processors import processor
from property.faulty_mixture import open_mixture

TIMEOUT = timedelta(seconds=120)
"""Timeout of the process group: a rank that learns of an error only by this has waited too long."""


class Rank:
    """A loader, and what a command does with it."""

    def __init__(self) -> None:
        self.loader: packhorse.Loader | None = None

    def build(self, folder: str, file: str, num_workers: int) -> list[int]:
        """Open the file and plan."""
        self.close()
        self.loader = None
        path = Path(folder, file)
        # A file that is not there is left for the loader to open, which the other ranks take part in.
        data: Any = open_mixture(path) if path.exists() else {"chats": {"file_name": str(path)}}
        loader = packhorse.load(
            data,
            processor("qwen2_vl"),
            model="unchecked",
            pack_size=256,
            ledger_dir=Path(folder, "ledger"),
            max_bad_share=None,
            num_workers=num_workers,
            prefetch_factor=3,
            multiprocessing_context="fork",
        )
        loader.dataset.faults = Path(folder, "faults")
        self.loader = loader
        return [len(loader), len(loader.plan.indices)]

    def take(self, steps: int) -> list[list[list[int]]]:
        """The samples of some batches, delivered and lost."""
        assert self.loader is not None
        found: list[list[list[int]]] = []
        for batch in self.loader:
            found.append([list(batch.info.samples), list(batch.info.lost)])
            if len(found) == steps:
                break
        return found

    def state(self) -> dict[str, Any]:
        """How far it is."""
        assert self.loader is not None
        return self.loader.state_dict()

    def load(self, state: dict[str, Any]) -> int:
        """Go on there; how many micro-steps are left."""
        assert self.loader is not None
        self.loader.load_state_dict(state)
        return self.loader.remaining

    def epoch_stats(self) -> list[Any]:
        """Where the samples of the epoch went, over all ranks."""
        assert self.loader is not None
        assert self.loader.epoch_stats is not None
        stats = self.loader.epoch_stats
        return [stats.epoch, stats.delivered, stats.lost, stats.dropped, stats.reasons]

    def close(self) -> None:
        """End the workers."""
        if self.loader is not None:
            self.loader.close()


def main() -> None:
    """Answer commands until there are no more."""
    meeting, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    answers = sys.stdout
    sys.stdout = sys.stderr  # nothing else may write there
    processor("qwen2_vl")
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=TIMEOUT
    )
    answers.write("ready\n")
    answers.flush()
    this = Rank()
    for line in sys.stdin:
        command = json.loads(line)
        do: Callable[..., Any] = getattr(this, command.pop("do"))
        try:
            answer = {"found": do(**command)}
        except (packhorse.errors.PackhorseError, OSError) as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
