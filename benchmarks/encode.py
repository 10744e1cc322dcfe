"""The time to encode a sample by component, and samples per second of DataLoader workers.

    python benchmarks/encode.py [--quick] [--samples 60] [--repeat 3]

Writes photographs (JPEG, 640 x 480 to 1280 x 960) and chats about them, encodes them with a real Qwen2-VL
processor at its released settings (with a tokenizer of 30,000 entries, see ``words.py``), and prints

- which share of ``PreTokenizedDatasetWrapper.__getitem__`` is spent inside the processor, the tokenizer, the
  chat template and the image decoder, and which share is Packhorse's. The baseline, in the same run, is the
  time inside those calls. Target: at most 10 % in Packhorse;
- samples per second with 0, 1 and 2 DataLoader workers, and their ratio to 0.

Exit code 1 if a promise is missed.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from contract.torchvision_ops import make_torchvision_importable

make_torchvision_importable()

import torch
from torch.utils.data import DataLoader

import packhorse.families.encoder as families_encoder
from packhorse.chat import RepeatedTokenTokenizer
from packhorse.datasets import PreTokenizedDatasetWrapper, open_meta_dataset
from promises import fact, make_parser, parse, promise, record_outcome
from words import Text, qwen2_vl

OURS = "our own"
SIZES = ((640, 480), (800, 600), (1024, 768), (1280, 960))


@record_outcome()
def main() -> None:
    """Write the data, measure and print the promises."""
    options = parse(make_parser(__doc__, samples=60, repeat=3), samples=8, repeat=1)
    torch.set_num_threads(1)  # as in DataLoader workers
    with tempfile.TemporaryDirectory() as folder:
        meta = write_chats(Path(folder), options.samples)
        processor = released_qwen2_vl()
        dataset = PreTokenizedDatasetWrapper(open_meta_dataset(meta), processor, on_bad="raise")
        _ = dataset[0]  # imports and caches
        report_shares(dataset, options.repeat)
        report_workers(dataset)


def write_chats(folder: Path, samples: int) -> Path:
    """Write JPEG files and a JSONL with one chat each; return the meta file."""
    rng, text = np.random.default_rng(0), Text()
    rows = []
    for number in range(samples):
        width, height = SIZES[number % len(SIZES)]
        small = rng.integers(0, 255, (height // 16, width // 16, 3), dtype=np.uint8)
        Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(
            folder / f"{number}.jpg"
        )
        turns = []
        for turn in range(3):
            question = ("<image>" if turn == 0 else "") + text.words(11 * (turn + 1))
            turns += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": text.words(54)},
            ]
        rows.append(json.dumps({"messages": turns, "images": [f"{number}.jpg"]}))
    (folder / "chats.jsonl").write_text("\n".join(rows))
    meta = folder / "meta.json"
    meta.write_text(json.dumps({"chats": {"file_name": "chats.jsonl", "media_dir": "."}}))
    return meta


def released_qwen2_vl() -> Any:
    """Return a Qwen2-VL processor with the pixel budget of the released models."""
    return qwen2_vl()


class Clock:
    """Sum the CPU time (which other work on the machine hardly changes) spent inside given functions.

    The time of a measured call inside another counts only for the inner one.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.inside = [OURS]
        self.since = time.process_time()

    def charge(self) -> None:
        """Add the time since the last call to the current function."""
        now = time.process_time()
        self.seconds[self.inside[-1]] += now - self.since
        self.since = now

    def around(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time measured."""

        def timed_call(*args: Any, **kwargs: Any) -> Any:
            self.charge()
            self.inside.append(label)
            try:
                return function(*args, **kwargs)
            finally:
                self.charge()
                self.inside.pop()

        return timed_call


def report_shares(dataset: PreTokenizedDatasetWrapper, repeat: int) -> None:
    """Print where the time goes, and the promise."""
    processor, clock = dataset.processor, Clock()
    patched = [
        (type(processor), "__call__", "processor"),
        (type(processor), "apply_chat_template", "chat template"),
        (type(processor.tokenizer), "__call__", "tokenizer"),
        (RepeatedTokenTokenizer, "__call__", OURS),  # called by the processor, but part of Packhorse
        (families_encoder, "load_image", "image decoder"),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in patched]
    for (owner, name, original), (_, _, label) in zip(originals, patched, strict=True):
        setattr(owner, name, clock.around(label, original))
    try:
        clock.since = time.process_time()
        for _ in range(repeat):
            for index in range(len(dataset)):
                dataset[index]
        clock.charge()
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
    total, ours = sum(clock.seconds.values()), clock.seconds.pop(OURS)
    print(f"{len(dataset)} samples, {repeat} times: {1000 * total / repeat / len(dataset):.1f} ms a sample")
    for label, seconds in clock.seconds.most_common():
        fact(f"share of {label}", 100 * seconds / total, "%")
    theirs = "processor, tokenizer, chat template and image decoder"
    share = 100 * ours / total
    promise("our own share of encoding a sample", share, 10, baseline=theirs, unit="%", at_least=False)
    print()


def report_workers(dataset: PreTokenizedDatasetWrapper) -> None:
    """Print samples per second for 0, 1 and 2 workers."""
    alone = 0.0
    for num_workers in (0, 1, 2):
        loader = DataLoader(
            dataset, batch_size=None, num_workers=num_workers, persistent_workers=num_workers > 0
        )
        for _ in loader:  # the workers start here
            pass
        start = time.perf_counter()
        count = sum(1 for _ in loader)
        rate = count / (time.perf_counter() - start)
        alone = alone or rate
        fact(f"samples/s with {num_workers} workers", f"{rate:.1f}, {rate / alone:.2f}x none")


if __name__ == "__main__":
    main()
