"""Images per second of the loader, with pixels as bytes, and the cores that a GPU needs.

    PYTHONPATH=src python benchmarks/feed_images.py [--quick] [--workers 1 16]

Chats about photographs (JPEG, 0.3 to 2 megapixels) are fed to a consumer that does nothing, by each number of
workers (by default one, and one for each core), in these ways:

- the files are decoded by PIL, nothing else (``decode only``);
- transformers' processor of Qwen2.5-VL at the settings of the released models encodes one sample at a time in
  a plain DataLoader (``bare processor``);
- ``packhorse.load`` makes packs of 8,192 tokens, with ``pixels="compact"`` (workers send bytes, which
  :func:`packhorse.to_device` normalises on the GPU), ``"auto"`` (they are normalised when a batch is yielded)
  and ``"processor"`` (workers send what the processor returns).

A round is an epoch of each way with workers that run already; the median of ``--repeat`` ratios counts. The
workers build ahead what the settings allow, so an epoch has many batches for each of them. Reported too are
the memory of a batch's pixels, and for three mixes (single images, several images, videos) the tokens per
second of a core. ``--trains`` is how many tokens per second a GPU trains: with it, the cores that feed it.
Exit code 1 if a promise is missed. Needs no GPU and no network.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).parents[1]
sys.path[1:1] = [str(ROOT / "tests")]
from contract.torchvision_ops import make_torchvision_importable

make_torchvision_importable()

import packhorse
from feed import BareProcessor, no_collate
from packhorse import World
from packhorse.families.pixels import BytePixels
from packhorse.loader import Loader
from promises import fact, make_parser, parse, promise, record_outcome
from words import Text, qwen2_vl

PACK = 8192
COMPACT = 'packhorse.load, pixels="compact"'
WAYS = {COMPACT: "compact", 'packhorse.load, pixels="auto"': "auto", 'pixels="processor"': "processor"}
BARE, DECODE = "a plain DataLoader with the bare processor", "decode only"
OVER_BARE = {1: 1.7, 0: 1.8}  # by workers; 0 for as many as cores
OVER_DECODE = 0.45
MEMORY = 0.25
MIXES = ("single images", "several images", "videos")


@record_outcome()
def main() -> None:
    """Measure and print the promises."""
    cores = len(os.sched_getaffinity(0))
    parser = make_parser(__doc__, samples=360, repeat=5, trains=0.0)
    parser.add_argument("--workers", type=int, nargs="+", default=sorted({1, cores}))
    options = parse(parser, samples=16, repeat=1, workers=[1])
    torch.set_num_threads(1)
    processor = qwen2_5_vl()
    with tempfile.TemporaryDirectory() as folder:
        meta = write_chats(Path(folder), options.samples)
        for workers in options.workers:
            compare(meta, processor, workers, options, cores)
        report_memory(meta, processor)
    report_cores(options, processor)


def qwen2_5_vl() -> Any:
    """Return a processor with the settings of the released Qwen2.5-VL, which are those of Qwen2-VL."""
    return qwen2_vl()


# --- data ---------------------------------------------------------------------------------------------------


def write_chats(folder: Path, samples: int, images: tuple[int, int] = (1, 1), pixels: float = 2e6) -> Path:
    """Write photographs and chats about them; return the meta file."""
    rng, text = np.random.default_rng(0), Text()
    rows, sizes = [], []
    for _ in range(samples):
        number = int(rng.integers(images[0], images[1] + 1))
        names = [f"{len(sizes) + index}.jpg" for index in range(number)]
        area, ratio = rng.uniform(0.3e6, pixels, number), rng.uniform(0.6, 1.6, number)
        sizes += [(round((a * r) ** 0.5), round((a / r) ** 0.5)) for a, r in zip(area, ratio, strict=True)]
        turns = [
            {"role": "user", "content": "<image>" * number + text.words(20)},
            {"role": "assistant", "content": text.words(80)},
        ]
        rows.append(json.dumps({"messages": turns, "images": names}))
    with ThreadPoolExecutor() as pool:
        list(pool.map(partial(save_photograph, folder), range(len(sizes)), sizes))
    return write_meta(folder, rows)


def save_photograph(folder: Path, number: int, size: tuple[int, int]) -> None:
    """Write soft colours with grain, which compress like a photograph."""
    rng, (width, height) = np.random.default_rng(number), size
    small = rng.integers(0, 256, (max(2, height // 24), max(2, width // 24), 3), dtype=np.uint8)
    soft = np.asarray(Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)).astype(np.int16)
    grained = np.clip(soft + rng.integers(-12, 12, (height, width, 1)), 0, 255).astype(np.uint8)
    Image.fromarray(grained).save(folder / f"{number}.jpg", quality=90)


def write_videos(folder: Path, samples: int) -> Path:
    """Write chats about videos, each a list of 16 frames; return the meta file."""
    text, rows = Text(), []
    for number in range(samples):
        names = [f"{number * 16 + frame}.jpg" for frame in range(16)]
        for frame in range(16):
            save_photograph(folder, number * 16 + frame, (640, 480))
        turns = [
            {"role": "user", "content": "<video>" + text.words(20)},
            {"role": "assistant", "content": text.words(80)},
        ]
        rows.append(json.dumps({"messages": turns, "videos": [names]}))
    return write_meta(folder, rows)


def write_meta(folder: Path, rows: list[str]) -> Path:
    """Write the rows and their meta file."""
    (folder / "chats.jsonl").write_text("\n".join(rows))
    meta = folder / "meta.json"
    meta.write_text(json.dumps({"chats": {"file_name": "chats.jsonl", "media_dir": "."}}))
    return meta


# --- ways to feed -------------------------------------------------------------------------------------------


class Decoded(Dataset[int]):
    """Decode the files of a folder; return how many pixels each has."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> int:
        return int(np.asarray(Image.open(self.files[index]).convert("RGB")).size)


def feed(batches: Iterable[Any]) -> tuple[float, int]:
    """Feed an epoch; return its seconds and its tokens (of a loader)."""
    started, tokens = time.perf_counter(), 0
    for batch in batches:
        tokens += batch.info.tokens if isinstance(batch, packhorse.Batch) else 0
    return time.perf_counter() - started, tokens


def plain(dataset: Dataset[Any], workers: int) -> DataLoader[Any]:
    """Return a plain DataLoader with one sample a batch, whose workers live on."""
    return DataLoader(
        dataset, batch_size=None, num_workers=workers, collate_fn=no_collate, persistent_workers=True
    )


def make_loader(meta: Path, processor: Any, pixels: str, workers: int) -> Loader:
    """Return a loader of packs."""
    return packhorse.load(
        str(meta),
        processor,
        model="unchecked",
        world=World(),
        num_workers=workers,
        pixels=pixels,  # type: ignore[arg-type]  # one of the three
        pixel_dtype="bfloat16",
        pack_size=PACK,
        attn_implementation="varlen",
    )


def compare(meta: Path, processor: Any, workers: int, options: argparse.Namespace, cores: int) -> None:
    """Feed all samples in each way, and promise the ratios."""
    ways: dict[str, Iterable[Any]] = {
        DECODE: plain(Decoded(meta.parent), workers),
        BARE: plain(BareProcessor(meta, processor), workers),
        **{name: make_loader(meta, processor, pixels, workers) for name, pixels in WAYS.items()},
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.repeat + 1):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            seconds, _ = feed(ways[name])
            if number:  # the first round starts the workers and fills caches
                found[name].append(seconds)
    print(f"\n{options.samples} images, {workers} workers, images/s")
    for name, seconds in found.items():
        print(f"{name:<46}" + "".join(f"{options.samples / one:>8.1f}" for one in seconds), flush=True)
        rate = options.samples / statistics.median(seconds)
        fact(f"{name}, {workers} of {cores} cores", f"{rate:.1f} images/s")
    for way in ways.values():
        if isinstance(way, Loader):
            way.close()
    ways.clear()  # ends the workers of the others

    def over(name: str, base: str) -> float:
        pairs = zip(found[base], found[name], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)

    claim = f"images per second of the loader with compact pixels, {workers} of {cores} cores"
    promise(claim, over(COMPACT, BARE), OVER_BARE[1 if workers == 1 else 0], baseline=BARE)
    if workers in (1, cores):
        promise(claim, over(COMPACT, DECODE), OVER_DECODE, baseline=DECODE)
    for name in list(WAYS)[1:]:
        fact(f"{name} over {BARE}, {workers} workers", over(name, BARE), "x")


def report_memory(meta: Path, processor: Any) -> None:
    """Promise how much memory the pixels of a batch take on the way from a worker."""
    size = {
        pixels: max(bytes_of(batch["pixel_values"]) for batch in make_loader(meta, processor, pixels, 0))
        for pixels in ("compact", "processor")
    }
    for pixels, most in size.items():
        fact(f'pixels of the largest batch, pixels="{pixels}"', most / 2**20, "MiB")
    claim = "memory of a batch's pixels as bytes"
    promise(
        claim,
        size["compact"] / size["processor"],
        MEMORY,
        baseline='pixels="processor", bfloat16',
        at_least=False,
        kind="exact",
    )


def bytes_of(pixels: torch.Tensor) -> int:
    """Return the memory of a tensor of pixels."""
    return int((pixels.data_bytes if isinstance(pixels, BytePixels) else pixels).nbytes)


def report_cores(options: argparse.Namespace, processor: Any) -> None:
    """Report tokens per second of one core for each mix, and the cores that feed a GPU."""
    for mix in MIXES:
        with tempfile.TemporaryDirectory() as name:
            folder, samples = Path(name), max(4, options.samples // 12)
            if mix == "videos":
                meta = write_videos(folder, samples)
            else:
                several = mix == "several images"
                meta = write_chats(folder, samples, (3, 6) if several else (1, 1), 8e5 if several else 2e6)
            loader = make_loader(meta, processor, "compact", 0)
            feed(loader)  # caches
            seconds, tokens = feed(loader)
        speed = tokens / seconds
        needs = f"; {options.trains / speed:.1f} cores feed {options.trains:,.0f} tokens/s"
        fact(f"{mix}: a core", f"{speed:,.0f} tokens/s" + (needs if options.trains else ""))


if __name__ == "__main__":
    main()
