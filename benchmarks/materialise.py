"""Building and collating one full pack, compared with plain Python.

    python benchmarks/materialise.py [--quick] [--tokens 8192] [--images 16] [--repeat 15] [--threads 1]

Encoded samples (one image each, as Qwen2-VL's processor makes them) are in memory; measured is what turns
them into a batch with pixels in bfloat16, in one thread, as a DataLoader worker has it. The plain way,
written here: token lists are extended and made tensors, pixels are joined in the pack, joined again in the
batch and then converted, and the mask compares every token with every other. Prints the best CPU time (so
that other work on the machine disturbs little) of ``--repeat`` runs of each, checks that both make the same
batch, and prints the ratios that are promised. Exit code 1 if one is missed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from packhorse.collate.packed import collate_packs
from packhorse.collate.packer import Packer, to_sample
from packhorse.families.qwen_vl import Qwen2VL
from promises import fact, make_parser, parse, promise, record_outcome

Sample = dict[str, Any]
WITH_MASK, WITHOUT_MASK = 6, 4


@record_outcome()
def main() -> None:
    """Make samples, measure and print the promises."""
    parser = make_parser(__doc__, tokens=8192, images=16, repeat=15)
    parser.add_argument("--threads", type=int, default=1, help="a DataLoader worker has one")
    options = parse(parser, repeat=3)
    torch.set_num_threads(options.threads)
    samples = [sample(options.tokens // options.images, number) for number in range(options.images)]
    pixels = sum(one["pixel_values"].nbytes for one in samples)
    print(f"{options.tokens:,} tokens, {options.images} images of {pixels / 1e6 / options.images:.1f} MB\n")
    same_batch(samples, options.tokens)
    report(samples, options.tokens, options.repeat)


def sample(length: int, seed: int) -> Sample:
    """Return a shifted sample; seven eighths of its tokens are an image."""
    torch.manual_seed(seed)
    ids = torch.randint(0, 150_000, (length,))
    rows = length * 7 // 8 // 16
    patches = rows * 16 * 4
    return {
        "input_ids": ids,
        "labels": ids + 1,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": torch.zeros_like(ids),
        "position_ids": torch.arange(length).expand(3, -1),
        "pixel_values": torch.randn(patches, 1176),
        "image_grid_thw": torch.tensor([[1, rows * 2, 32]]),
        "n_images": torch.tensor(1),
    }


# --- the plain way ------------------------------------------------------------------------------------------


def plain_pack(samples: list[Sample]) -> Sample:
    """Join samples by extending lists."""
    ids: list[int] = []
    labels: list[int] = []
    types: list[int] = []
    numbers: list[int] = []
    for number, one in enumerate(samples, 1):
        ids.extend(one["input_ids"].tolist())
        labels.extend(one["labels"].tolist())
        types.extend(one["mm_token_type_ids"].tolist())
        numbers.extend([number] * len(one["input_ids"]))
    return {
        "input_ids": torch.tensor(ids),
        "labels": torch.tensor(labels),
        "mm_token_type_ids": torch.tensor(types),
        "attention_mask": torch.tensor(numbers),
        "position_ids": torch.cat([one["position_ids"] for one in samples], dim=-1),
        "pixel_values": torch.cat([one["pixel_values"] for one in samples]),
        "image_grid_thw": torch.cat([one["image_grid_thw"] for one in samples]),
    }


def plain_batch(packs: list[Sample], length: int, dense: bool) -> Sample:
    """Pad and stack rows, join and convert pixels; build the mask by comparing all tokens."""

    def stack(key: str, fill: int) -> torch.Tensor:
        rows = [torch.nn.functional.pad(p[key], (0, length - p[key].shape[-1]), value=fill) for p in packs]
        return torch.stack(rows, dim=-2)

    numbers = stack("attention_mask", 0)
    batch = {
        "input_ids": stack("input_ids", 0),
        "labels": stack("labels", -100),
        "mm_token_type_ids": stack("mm_token_type_ids", 0),
        "position_ids": stack("position_ids", 0),
        "pixel_values": torch.cat([pack["pixel_values"] for pack in packs]).to(torch.bfloat16),
        "image_grid_thw": torch.cat([pack["image_grid_thw"] for pack in packs]),
        "attention_mask": numbers,
    }
    if dense:
        same = numbers[:, :, None] == numbers[:, None, :]
        visible = (numbers != 0)[:, :, None] & (numbers != 0)[:, None, :]
        causal = torch.tril(torch.ones(length, length, dtype=torch.bool))
        batch["attention_mask"] = (same & visible & causal[None])[:, None]
    return batch


def plain(samples: list[Sample], length: int, dense: bool) -> Sample:
    """Build and collate one pack."""
    return plain_batch([plain_pack(samples)], length, dense)


# --- ours ---------------------------------------------------------------------------------------------------


def ours(samples: list[Sample], length: int, attention: str) -> Sample:
    """Build and collate one pack."""
    family = Qwen2VL()
    pack = Packer(length, family=family).join([to_sample(sample, family) for sample in samples])
    return collate_packs([pack], family, 0, length, attention, pixel_dtype=torch.bfloat16)


def same_batch(samples: list[Sample], length: int) -> None:
    """Raise if the compared results are different."""
    left, right = plain(samples, length, dense=True), ours(samples, length, "sdpa")
    different = [key for key, value in left.items() if not torch.equal(value, right[key])]
    if different:
        sys.exit(f"the batches differ in {', '.join(different)}")


def report(samples: list[Sample], length: int, repeat: int) -> None:
    """Print the table and the promises."""
    floor = torch.empty(sum(len(one["pixel_values"]) for one in samples), 1176, dtype=torch.bfloat16)

    def copy_pixels() -> None:
        first = 0
        for one in samples:
            floor[first : first + len(one["pixel_values"])].copy_(one["pixel_values"])
            first += len(one["pixel_values"])

    ways: dict[str, Callable[[], Any]] = {
        "plain, mask by comparing": lambda: plain(samples, length, dense=True),
        "plain, document numbers": lambda: plain(samples, length, dense=False),
        "ours, sdpa": lambda: ours(samples, length, "sdpa"),
        "ours, flash_attention_2": lambda: ours(samples, length, "flash_attention_2"),
        "ours, varlen": lambda: ours(samples, length, "varlen"),
        "ours, flex_attention": lambda: ours(samples, length, "flex_attention"),
        "floor: the copy into bfloat16": copy_pixels,
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeat):  # in turn, so that a busy moment hits all alike
        for way, make in ways.items():
            start = time.process_time()
            made = make()
            best[way] = min(best[way], time.process_time() - start)
            del made
    for way, seconds in best.items():
        print(f"{way:<34}{seconds * 1000:>10.1f} ms")
    print(f"\n{os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    with_mask = best["plain, mask by comparing"] / best["ours, sdpa"]
    lists = "lists extended, pixels joined twice and converted"
    promise(
        "build and collate a pack for sdpa, speed",
        *(with_mask, WITH_MASK),
        baseline=f"{lists}, mask by comparing all tokens",
    )
    without = best["plain, document numbers"] / best["ours, flash_attention_2"]
    promise("build and collate a pack without a dense mask, speed", without, WITHOUT_MASK, baseline=lists)
    for way, seconds in best.items():
        fact(way, 1000 * seconds, "ms")


if __name__ == "__main__":
    main()
