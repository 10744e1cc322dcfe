"""Seven mixtures of lengths to compare packers with, at a capacity of 8,192 tokens.

Each takes the number of samples and a random generator and returns the length of each sample. ``chat_parts``
also says what the chats are made of, for the cost of a pack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

CAPACITY = 8192
FACTOR = 28  # pixels of a token's side: two patches of 14
SIZES = (
    *((480, 640), (640, 480), (768, 1024), (720, 1280), (336, 336), (1080, 1920)),
    *((600, 800), (512, 512), (1024, 1024), (224, 224), (1600, 1200), (448, 448)),
)
SHARES = (0.22, 0.10, 0.12, 0.08, 0.10, 0.08, 0.08, 0.07, 0.05, 0.04, 0.03, 0.03)
IMAGES = (0, 1, 2, 3, 4, 6, 8, 16)
IMAGE_SHARES = (0.15, 0.62, 0.10, 0.05, 0.04, 0.02, 0.015, 0.005)


class Chats(NamedTuple):
    """Image chats: total tokens, image tokens, images per chat, and the tokens of all images, flat."""

    lengths: np.ndarray
    visual: np.ndarray
    images: np.ndarray
    image_tokens: np.ndarray


def image_tokens(height: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Return the tokens of images: sides rounded to the factor, within 4 to 1,280 tokens."""
    least, most = 56 * 56, 1280 * FACTOR**2
    area = height * width
    rows, columns = np.rint(height / FACTOR), np.rint(width / FACTOR)
    shrink, grow = np.sqrt(area / most), np.sqrt(least / area)
    large, small = rows * columns * FACTOR**2 > most, rows * columns * FACTOR**2 < least
    for side, pixels in ((rows, height), (columns, width)):
        smaller = np.maximum(1, np.floor(pixels / shrink / FACTOR))
        side[large] = smaller[large]
        side[small] = np.ceil(pixels * grow / FACTOR)[small]
    return (rows * columns).astype(np.int64)


def chat_parts(n: int, rng: np.random.Generator) -> Chats:
    """Return chats with log-normal text and 0 to 16 images of common sizes, half of them jittered."""
    text = rng.lognormal(5.3, 0.9, n).astype(np.int64) + 8
    images = rng.choice(IMAGES, size=n, p=IMAGE_SHARES)
    total = int(images.sum())
    size = np.array(SIZES, float)[rng.choice(len(SIZES), size=total, p=np.array(SHARES) / sum(SHARES))]
    jitter = rng.random(total) < 0.5
    size[jitter] *= rng.uniform(0.6, 1.4, size=(int(jitter.sum()), 2))
    size = np.maximum(32, np.rint(size))
    each = image_tokens(size[:, 0], size[:, 1])
    ends = np.concatenate([[0], np.cumsum(images)])
    sums = np.concatenate([[0], np.cumsum(each)])
    visual = sums[ends[1:]] - sums[ends[:-1]]
    lengths = np.clip(text + visual, 1, CAPACITY)
    return Chats(lengths, visual, images, each)


def chat(n: int, rng: np.random.Generator) -> np.ndarray:
    """Image chats."""
    return chat_parts(n, rng).lengths


def short(n: int, rng: np.random.Generator) -> np.ndarray:
    """Short supervised text, 350 tokens on average."""
    return np.clip(rng.lognormal(np.log(350) - 0.32, 0.8, n).astype(np.int64), 4, CAPACITY)


def uniform(n: int, rng: np.random.Generator) -> np.ndarray:
    """Uniform lengths up to the capacity."""
    return rng.integers(1, CAPACITY + 1, n)


def quarter_half(n: int, rng: np.random.Generator) -> np.ndarray:
    """Lengths between a quarter and a half of the capacity, without short samples."""
    return rng.integers(CAPACITY // 4 + 1, CAPACITY // 2, n)


def triplets(n: int, rng: np.random.Generator) -> np.ndarray:
    """Triples that fill a pack exactly, shuffled: a perfect plan exists."""
    low, high = CAPACITY // 4 + 1, CAPACITY // 2 - 1
    first = rng.integers(low, high + 1, n // 3)
    least, most = np.maximum(low, CAPACITY - first - high), np.minimum(high, CAPACITY - first - low)
    second = least + (rng.random(n // 3) * (most - least + 1)).astype(np.int64)
    lengths = np.concatenate([first, second, CAPACITY - first - second])
    rng.shuffle(lengths)
    return lengths


def documents(n: int, rng: np.random.Generator) -> np.ndarray:
    """One page of about 2,550 tokens and some text each; 8 % are short text only."""
    text = rng.lognormal(5.2, 0.6, n)
    page = np.clip(rng.normal(2550, 380, n), 1200, 3700)
    lengths = np.where(rng.random(n) < 0.08, text, page + text)
    return np.clip(lengths.astype(np.int64), 8, CAPACITY)


def tiles(n: int, rng: np.random.Generator) -> np.ndarray:
    """One to thirteen tiles of 258 tokens, and text."""
    number = rng.choice([1, 3, 5, 7, 9, 13], size=n, p=[0.15, 0.2, 0.25, 0.2, 0.1, 0.1])
    return np.clip((number * 258 + rng.lognormal(4.8, 0.8, n)).astype(np.int64), 8, CAPACITY)


MIXES: dict[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    make.__name__: make for make in (chat, short, uniform, quarter_half, triplets, documents, tiles)
}
