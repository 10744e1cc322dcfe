"""The overhead of the loader over the bare processor, and the time to resume a long epoch.

    python benchmarks/feed.py [--quick] [--samples 240] [--repeat 5] [--packs 1000000]

First, resume an epoch of a million packs at 90 %, with the same and with another number of ranks. Target:
less than a second.

Then feed photographs and chats about them (as in ``encode.py``) to a consumer that does nothing, with 0, 1
and 2 workers, in bfloat16. The baseline, in the same run, is a plain DataLoader with the same number of
workers over a dataset that opens the image, renders the template and calls the processor, one sample at a
time, without labels, packing or batches, with pixels in float32. Each round is an epoch of the same loader;
both start their workers inside the measurement, and without workers they alternate every fraction of a
second. The median of ``--repeat`` ratios counts. Target: at least 0.9 of the baseline's tokens per second.
Exit code 1 if a promise is missed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import packhorse
from encode import released_qwen2_vl, write_chats
from packhorse import LoaderConfig, World
from packhorse.count.columns import COUNTS, OK, CountColumns
from packhorse.datasets import open_meta_dataset
from packhorse.loader import Loader
from promises import fact, make_parser, parse, promise, record_outcome

WORKERS = (0, 1, 2)
PACK = 8192


class BareProcessor(Dataset[int]):
    """Encode each sample with a simple five-line dataset; return its number of tokens."""

    def __init__(self, meta: Path, processor: Any) -> None:
        self.rows, self.processor = open_meta_dataset(str(meta)), processor

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        conversation = self.rows[index]["conversation"]
        paths = [
            part["image"] for turn in conversation for part in turn["content"] if part["type"] == "image"
        ]
        images = [Image.open(path).convert("RGB") for path in paths]
        text = self.processor.apply_chat_template(conversation, tokenize=False)
        return dict(self.processor(text=[text], images=images, return_tensors="pt"))


def no_collate(sample: Any) -> Any:
    """Return the sample unchanged."""
    return sample


class TimedBatches:
    """Iterate over batches and sum the seconds to build them, and their tokens."""

    def __init__(self, batches: Iterable[Any], tokens: Callable[[Any], int]) -> None:
        start = time.perf_counter()
        self._batches, self._tokens_of = iter(batches), tokens
        self.seconds, self.tokens = time.perf_counter() - start, 0

    def step(self) -> bool:
        """Build a batch and free it; return whether there was one. The end of workers is not measured."""
        start = time.perf_counter()
        batch = next(self._batches, None)
        if batch is None:
            return False
        self.tokens += self._tokens_of(batch)
        del batch
        self.seconds += time.perf_counter() - start
        return True

    @property
    def pace(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def start_baseline(meta: Path, processor: Any, num_workers: int) -> TimedBatches:
    """Start the baseline: the bare processor in a DataLoader."""
    batches = DataLoader(
        BareProcessor(meta, processor),
        batch_size=None,
        num_workers=num_workers,
        collate_fn=no_collate,
    )
    return TimedBatches(batches, lambda sample: sample["input_ids"].numel())


def start_loader(loader: Loader) -> TimedBatches:
    """Start the next epoch of the loader."""

    def tokens(batch: Any) -> int:
        # As many as the baseline's: the label shift removes one token per sample.
        return batch.info.tokens + len(batch.info.samples)

    return TimedBatches(loader, tokens)


def run_in_sequence(starts: Sequence[Callable[[], TimedBatches]]) -> list[TimedBatches]:
    """Run one after the other; with workers, both would otherwise build batches at the same time."""
    runs = []
    for start in starts:
        runs.append(start())
        while runs[-1].step():
            pass
    return runs


def run_alternating(starts: Sequence[Callable[[], TimedBatches]]) -> list[TimedBatches]:
    """Run all at once; the one with the fewest tokens builds the next batch.

    They alternate every fraction of a second, because the speed of a shared machine changes within seconds.
    """
    runs = [start() for start in starts]
    while min(runs, key=lambda run: run.tokens).step():
        pass
    for run in runs:  # those that are not finished
        while run.step():
            pass
    return runs


def report_overhead(samples: int, repeat: int, numbers: Sequence[int]) -> None:
    """Print tokens per second of both."""
    # Both with the settings of the loader's workers.
    torch.set_num_threads(1)
    settings = {"pack_size": PACK, "attn_implementation": "varlen", "pixel_dtype": "bfloat16"}
    with tempfile.TemporaryDirectory() as folder:
        meta, processor = write_chats(Path(folder), samples), released_qwen2_vl()
        print(f"\n{samples} samples, tokens/s\n{'workers':<10}{'processor':>12}{'loader':>12}{'ratio':>8}")
        for num_workers in numbers:
            loader = packhorse.load(
                str(meta), processor, model="unchecked", world=World(), num_workers=num_workers, **settings
            )
            starts = partial(start_baseline, meta, processor, num_workers), partial(start_loader, loader)
            measure = run_in_sequence if num_workers else run_alternating
            measure(starts)  # imports and caches
            ratios = []
            for number in range(repeat):
                loader.close()  # so that it restarts its workers, like the other
                order = 1 if number % 2 == 0 else -1
                baseline_run, loader_run = measure(starts[::order])[::order]
                assert baseline_run.tokens == loader_run.tokens, "both produce the same tokens"
                ratios.append(loader_run.pace / baseline_run.pace)
                print(
                    f"{num_workers:<10}{baseline_run.pace:>12,.0f}{loader_run.pace:>12,.0f}{ratios[-1]:>8.3f}",
                    flush=True,
                )
            loader.close()
            claim = f"tokens per second of the loader, {num_workers} workers"
            baseline = "a plain DataLoader with the bare processor"
            promise(claim, statistics.median(ratios), 0.9, baseline=baseline)


class RepeatedExample(Sequence[Any]):
    """The same example, repeated."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: Any) -> Any:
        parts = [("user", "Why?"), ("assistant", "So.")]
        return {"conversation": [{"role": r, "content": [{"type": "text", "text": t}]} for r, t in parts]}


def report_resume(packs: int) -> None:
    """Print how long it takes to resume at 90 % of an epoch."""
    rng = np.random.default_rng(0)
    number = 8 * packs
    lengths = rng.integers(200, 1800, number)
    zeros = np.zeros(number, np.int64)
    columns = dict.fromkeys(COUNTS, zeros) | {"text": lengths, "supervised": lengths // 4}
    good = np.ones(number, bool)
    status = np.full(number, OK, object)
    counts = CountColumns(**columns, status=status, ok=good, exact=good, off_by=zeros)
    config = LoaderConfig(
        data=RepeatedExample(number), pack_size=PACK, attn_implementation="varlen", num_workers=0
    )
    processor = released_qwen2_vl()
    with tempfile.TemporaryDirectory() as folder:
        config = config.with_changes(cache_dir=folder)
        before = config.build(processor, model="unchecked", world=World(3, 64), counts=counts)
        other = config.build(processor, model="unchecked", world=World(3, 48), counts=counts)
    state = before.state_dict() | {"segments": [[64, 1, 1, len(before) * 9 // 10]]}
    print(f"{len(before.plan):,} packs of {number:,} samples, {len(before):,} steps of 64 ranks")
    for what, loader in (("the same 64 ranks", before), ("48 ranks instead of 64", other)):
        seconds = min(measure_seconds(lambda loader=loader: loader.load_state_dict(state)) for _ in range(3))
        claim = f"resuming at 90 % of {len(before.plan):,} packs, {what}"
        promise(claim, seconds, 1.0, baseline="a limit, not a ratio", unit="s", at_least=False)
        start = time.perf_counter()
        next(iter(loader))
        fact(f"first batch after resuming, {what}", time.perf_counter() - start, "s")


def measure_seconds(work: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@record_outcome()
def main() -> None:
    """Measure and print the promises."""
    parser = make_parser(__doc__, samples=240, repeat=5, packs=1_000_000)
    options = parse(parser, samples=24, repeat=1, packs=20_000)
    report_resume(options.packs)
    report_overhead(options.samples, options.repeat, WORKERS[::2] if options.quick else WORKERS)


if __name__ == "__main__":
    main()
