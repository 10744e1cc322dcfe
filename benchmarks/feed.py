"""Feeding: what the loader costs beside the processor, and how quickly a long epoch is taken up again.

    python benchmarks/feed.py [--quick] [--samples 240] [--repeat 5] [--packs 1000000]

An epoch of a million packs is taken up at 90 %: under the same shape, and with another number of ranks. To
reach: under a second.

Then photographs and chats about them (as in ``encode.py``) are fed to a consumer that does nothing, with 0, 1
and 2 workers, in bfloat16. The baseline is in the same run: a plain DataLoader with the same number of
workers over a dataset that opens the image, renders the template and calls the processor, one sample at a
time, without labels, packing or batches, and leaves the pixels in float32. Each round is an epoch of the same
loader; both start their workers inside the measurement, and without workers both take turns of a fraction of
a second. Both keep freed memory, as the loader's workers do: else it is luck whether the C library gives the
heap back after each sample. The median of ``--repeat`` ratios counts. To reach: at least 0.9 of its tokens
per second. Exit code 1 if a promise is missed.
"""

from __future__ import annotations

import argparse
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
from promises import fact, parse, promise, recorded

WORKERS = (0, 1, 2)
PACK = 8192


class BareProcessor(Dataset[int]):
    """Each sample as somebody would write it in five lines; gives its number of tokens."""

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


def as_it_is(sample: Any) -> Any:
    """No collating."""
    return sample


class Timed:
    """Iterates over batches and adds up the seconds in which they are made, and their tokens."""

    def __init__(self, batches: Iterable[Any], tokens: Callable[[Any], int]) -> None:
        start = time.perf_counter()
        self._batches, self._tokens_of = iter(batches), tokens
        self.seconds, self.tokens = time.perf_counter() - start, 0

    def step(self) -> bool:
        """Make a batch and let it go; whether there was one. Ending workers is not counted."""
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


def bare(meta: Path, processor: Any, num_workers: int) -> Timed:
    """The processor alone."""
    batches = DataLoader(
        BareProcessor(meta, processor),
        batch_size=None,
        num_workers=num_workers,
        collate_fn=as_it_is,
    )
    return Timed(batches, lambda sample: sample["input_ids"].numel())


def ours(loader: Loader) -> Timed:
    """The next epoch of the loader."""

    def tokens(batch: Any) -> int:
        # As many as the bare processor makes: one of each sample is cut off by the shift of labels.
        return batch.info.tokens + len(batch.info.samples)

    return Timed(loader, tokens)


def one_after_the_other(begin: Sequence[Callable[[], Timed]]) -> list[Timed]:
    """Each way with the machine to itself: with workers they would build at the same time."""
    ways = []
    for start in begin:
        ways.append(start())
        while ways[-1].step():
            pass
    return ways


def by_turns(begin: Sequence[Callable[[], Timed]]) -> list[Timed]:
    """All ways; whichever has made the fewest tokens makes the next ones.

    Turns of a fraction of a second, because a machine that others use changes its pace within seconds.
    """
    ways = [start() for start in begin]
    while min(ways, key=lambda way: way.tokens).step():
        pass
    for way in ways:  # the rest of those that are not through
        while way.step():
            pass
    return ways


def report_overhead(samples: int, repeat: int, numbers: Sequence[int]) -> None:
    """Print tokens per second both ways."""
    # Both ways as the loader's workers have it.
    torch.set_num_threads(1)
    settings = {"pack_size": PACK, "attn_implementation": "varlen", "pixel_dtype": "bfloat16"}
    with tempfile.TemporaryDirectory() as folder:
        meta, processor = write_chats(Path(folder), samples), released_qwen2_vl()
        print(f"\n{samples} samples, tokens/s\n{'workers':<10}{'processor':>12}{'loader':>12}{'ratio':>8}")
        for num_workers in numbers:
            loader = packhorse.load(
                str(meta), processor, model="unchecked", world=World(), num_workers=num_workers, **settings
            )
            begin = partial(bare, meta, processor, num_workers), partial(ours, loader)
            measure = one_after_the_other if num_workers else by_turns
            measure(begin)  # imports and caches
            ratios = []
            for number in range(repeat):
                loader.close()  # so that it starts its workers anew, as the other does
                order = 1 if number % 2 == 0 else -1
                theirs, own = measure(begin[::order])[::order]
                assert theirs.tokens == own.tokens, "both ways make the same tokens"
                ratios.append(own.pace / theirs.pace)
                print(
                    f"{num_workers:<10}{theirs.pace:>12,.0f}{own.pace:>12,.0f}{ratios[-1]:>8.3f}", flush=True
                )
            loader.close()
            claim = f"tokens a second through the loader, {num_workers} workers"
            baseline = "a plain DataLoader over the bare processor, memory kept as the loader's workers do"
            promise(claim, statistics.median(ratios), 0.9, baseline=baseline)


class Same(Sequence[Any]):
    """So many times the same example."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: Any) -> Any:
        parts = [("user", "Why?"), ("assistant", "So.")]
        return {"conversation": [{"role": r, "content": [{"type": "text", "text": t}]} for r, t in parts]}


def report_resume(packs: int) -> None:
    """Print how long it takes to stand at 90 % of an epoch."""
    rng = np.random.default_rng(0)
    number = 8 * packs
    lengths = rng.integers(200, 1800, number)
    zeros = np.zeros(number, np.int64)
    columns = dict.fromkeys(COUNTS, zeros) | {"text": lengths, "supervised": lengths // 4}
    good = np.ones(number, bool)
    status = np.full(number, OK, object)
    counts = CountColumns(**columns, status=status, ok=good, exact=good, off_by=zeros)
    config = LoaderConfig(data=Same(number), pack_size=PACK, attn_implementation="varlen", num_workers=0)
    processor = released_qwen2_vl()
    with tempfile.TemporaryDirectory() as folder:
        config = config.with_changes(cache_dir=folder)
        before = config.build(processor, model="unchecked", world=World(3, 64), counts=counts)
        other = config.build(processor, model="unchecked", world=World(3, 48), counts=counts)
    state = before.state_dict() | {"segments": [[64, 1, 1, len(before) * 9 // 10]]}
    print(f"{len(before.plan):,} packs of {number:,} samples, {len(before):,} steps of 64 ranks")
    for what, loader in (("the same 64 ranks", before), ("48 ranks instead of 64", other)):
        seconds = min(timed(lambda loader=loader: loader.load_state_dict(state)) for _ in range(3))
        claim = f"resuming at 90 % of {len(before.plan):,} packs, {what}"
        promise(claim, seconds, 1.0, baseline="a limit, not a ratio", unit="s", at_least=False)
        start = time.perf_counter()
        next(iter(loader))
        fact(f"first batch after resuming, {what}", time.perf_counter() - start, "s")


def timed(work: Callable[[], Any]) -> float:
    """Seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@recorded()
def main() -> None:
    """Measure and judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=240)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--packs", type=int, default=1_000_000)
    options = parse(parser, samples=24, repeat=1, packs=20_000)
    report_resume(options.packs)
    report_overhead(options.samples, options.repeat, WORKERS[::2] if options.quick else WORKERS)


if __name__ == "__main__":
    main()
