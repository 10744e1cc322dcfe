"""What the examples share: a tiny Qwen2-VL with random weights, its processor, and the demo's data.

Nothing is downloaded.
In your own script these are ``AutoProcessor.from_pretrained(name)``,
``AutoModelForImageTextToText.from_pretrained(name)`` and the path of your meta file.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packhorse.cli.demo.data import tiny_model, tiny_processor

__all__ = [
    "Traced",
    "arguments",
    "demo_loader",
    "demo_meta",
    "example_processor",
    "tiny_model",
    "tiny_processor",
    "write_atomic",
]


def demo_meta(folder: Path) -> Path:
    """The meta file of the demo's data; written by the first process of the machine, the others wait."""
    from filelock import FileLock

    from packhorse.cli.demo.data import write_demo_data

    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not (folder / "meta.json").exists():
            write_demo_data(folder)
    return folder / "meta.json"


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What all training examples take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path, help="data, checkpoints and traces go here")
    parser.add_argument("--meta", type=Path, help="a meta file of your own; without it the demo's data")
    parser.add_argument("--processor", help="a saved Qwen2-VL processor, as demo/model; else a tiny one")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
    parser.add_argument("--pack-size", type=int, default=512)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=2, help="steps of the optimizer")
    parser.add_argument("--stop-after", type=int, help="stop after this many steps, as if interrupted")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    return parser


def example_processor(options: argparse.Namespace) -> Any:
    """The processor that the options ask for; plans and counts made with the same one are reused."""
    if options.processor is None:
        return tiny_processor()
    from packhorse.families.models import open_processor

    return open_processor(options.processor)


def demo_loader(options: argparse.Namespace, processor: Any, model: Any) -> Traced:
    """The loader that the options ask for."""
    import packhorse

    loader = packhorse.load(
        options.meta or demo_meta(options.folder / "data"),
        processor,
        model=model,
        pack_size=options.pack_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        num_workers=options.num_workers,
        ledger_dir=options.folder / "ledger",
        max_bad_share=0.1,  # three rows of the demo's data are broken on purpose
    )
    return Traced(loader, options.folder)


class Traced:
    """A loader that writes down what was trained: each step's loss and this rank's samples."""

    def __init__(self, loader: Any, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._loader, self._path = loader, folder / f"trace-{loader.world.rank}.jsonl"
        self._keys: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._record_keys(iter(self._loader))

    def _record_keys(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._keys += batch.info.keys
            yield batch

    def record_step(self, step: int, loss: float) -> None:
        """A step of the optimizer was made with the batches delivered since the last one."""
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "loss": loss, "samples": self._keys}) + "\n")
        self._keys = []


def write_atomic(path: Path, text: str) -> None:
    """Write a file so that no other process ever reads half of it."""
    half = path.with_name(f".{path.name}")
    half.write_text(text)
    os.replace(half, path)
