"""The training process of the demo.

    python -m packhorse.cli.demo.train FOLDER NAME [--from OTHER] [--kill-at STEP]

Trains one epoch with one pack per step, and writes to ``FOLDER/runs/NAME``: a line for each step in
``trace.jsonl``, the last checkpoint, and the ledger. ``--from`` resumes another run with its ledger.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from packhorse.cli.demo.data import tiny_model
from packhorse.collate.packed import model_inputs
from packhorse.families.models import open_processor
from packhorse.integrations.loss import count_supervised, token_loss
from packhorse.integrations.transformers import prepare
from packhorse.loader.config import LoaderConfig

PACK_SIZE = 512
SAVE_EVERY = 8
_LEARNING_RATE = 4e-3


def demo_config(folder: Path) -> LoaderConfig:
    """Return the loader's settings for planning and for training."""
    return LoaderConfig(
        data=str(folder / "data" / "meta.json"),
        pack_size=PACK_SIZE,
        max_bad_share=0.1,  # some rows have errors on purpose
        cache_dir=folder / "cache",
        count_workers=1,
    )


@dataclass(frozen=True)
class Step:
    """One training step: its number from 1, the mean loss of its supervised tokens, the keys of its rows."""

    step: int
    loss: float
    samples: tuple[str, ...]


def read_trace(run: Path) -> list[Step]:
    """Return the steps of a run."""
    steps = map(json.loads, (run / "trace.jsonl").read_text().splitlines())
    return [Step(step["step"], step["loss"], tuple(step["samples"])) for step in steps]


def train(folder: Path, name: str, resume_from: str | None = None, kill_at: int | None = None) -> None:
    """Train the rest of the epoch, from the checkpoint and ledger of the run ``resume_from``.

    The process kills itself in the middle of the step ``kill_at``.
    """
    torch.set_num_threads(1)  # as fast for such a small model, and two runs share the machine
    run = folder / "runs" / name
    run.mkdir(parents=True)
    processor = open_processor(str(folder / "model"), False)
    model = tiny_model(processor)
    prepare(model, "sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    if resume_from is not None:
        shutil.copytree(folder / "runs" / resume_from / "ledger", run / "ledger")
    config = demo_config(folder).with_changes(ledger_dir=run / "ledger")
    loader = config.build(processor, model=model)
    step = 0
    if resume_from is not None:
        step = _restore(folder / "runs" / resume_from, model, optimizer, loader)
    with open(run / "trace.jsonl", "w", buffering=1) as trace:
        for batch in loader:
            step += 1
            loss = _backward(model, batch)
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            samples = list(batch.info.keys)
            trace.write(json.dumps({"step": step, "loss": loss, "samples": samples}) + "\n")
            if step % SAVE_EVERY == 0:
                _save(run, step, model, optimizer, loader)
            if step % SAVE_EVERY == 0 or step == 1:
                print(f"step {step:>3}  loss {loss:.4f}", flush=True)
    if resume_from is not None:
        model.save_pretrained(folder / "model")  # next to its processor


def _backward(model: Any, batch: Any) -> float:
    logits = model(**model_inputs(batch, model)).logits
    loss: Any = token_loss(logits, batch["labels"], count_supervised([batch]))
    loss.backward()
    return float(loss.detach())


def _save(run: Path, step: int, model: Any, optimizer: Any, loader: Any) -> None:
    """Write a checkpoint atomically."""
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "loader": json.dumps(loader.state_dict()),
    }
    torch.save(state, run / ".checkpoint.pt")
    os.replace(run / ".checkpoint.pt", run / "checkpoint.pt")


def _restore(run: Path, model: Any, optimizer: Any, loader: Any) -> int:
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    loader.load_state_dict(json.loads(state["loader"]))
    return int(state["step"])


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--from", dest="resume_from")
    parser.add_argument("--kill-at", type=int)
    options = parser.parse_args()
    logging.getLogger("packhorse").setLevel(logging.ERROR)  # the ledger has the same
    train(options.folder, options.name, options.resume_from, options.kill_at)


if __name__ == "__main__":
    main()
