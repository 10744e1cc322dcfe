"""How far pixels that are sent as bytes are from those of the processor, over images of all kinds.

    python benchmarks/pixels.py [--quick] [--images 200]

For each family whose processor qualifies, random images of odd sizes, of all modes (grey, palette, RGBA,
CMYK, 16 bits) and EXIF orientations are encoded twice: by the processor as it is, and by the one that leaves
pixels as bytes, which are then normalised as on the device. Promises the largest difference of a pixel in
float32 and that no token differs; a control with another mean has to differ. Exit code 1 if a promise is
missed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from contract.processors import FAMILIES, processor
from packhorse.families import Encoder
from packhorse.families.compact import Compact, find_compact
from packhorse.types import Conversation, MediaRef, Message, PixelFormat, Sample, TextPart
from promises import fact, make_parser, parse, promise, record_outcome

LARGEST = 1e-6
MODES = ("RGB", "L", "RGBA", "P", "CMYK", "I;16", "1", "LA", "YCbCr")
CONTROL = 0.01  # of a mean, in units of a byte


@record_outcome()
def main() -> None:
    """Compare all images of all families."""
    options = parse(make_parser(__doc__, images=200, seed=0), images=9)
    left, found = [], list[Found]()
    for name in FAMILIES:
        if "image" not in FAMILIES[name].modalities:
            continue
        encoder = Encoder(processor(name))
        compact = find_compact(encoder, ["image"])
        if compact.formats:
            found.append(compare(encoder, compact, options))
            fact(f"{name}: largest difference of a pixel, tokens that differ", f"{found[-1][:2]}")
        else:
            left.append(f"{name} ({compact.problems['image']})")
    fact("pixels stay as the processor returns them", "; ".join(left))
    baseline = f"the processors of {len(found)} families, {options.images} images each"
    exactly: dict[str, Any] = {"baseline": baseline, "unit": "", "kind": "exact"}
    most = max(one.difference for one in found)
    promise("largest difference of a pixel sent as a byte", most, LARGEST, at_least=False, **exactly)
    tokens = sum(one.tokens for one in found)
    promise("tokens that differ with pixels sent as bytes", tokens, 0, at_least=False, **exactly)
    claim = f"the difference with a mean that is {CONTROL} of a byte off (control: must be seen)"
    promise(claim, min(one.control for one in found), 10 * LARGEST, **exactly)


class Found(NamedTuple):
    """The largest difference of a pixel, how many tokens differ, and the difference of the control."""

    difference: float
    tokens: int
    control: float


def compare(encoder: Encoder, compact: Compact, options: argparse.Namespace) -> Found:
    """Encode all images with both processors of a family."""
    other = Encoder(encoder.processor, encoder.family, compact)
    largest, tokens, control = 0.0, 0, float("inf")
    for number in range(options.images):
        conversation = ask_about(draw_image(np.random.default_rng([options.seed, number]), number))
        expected, actual = (one.label_sample(one.encode(conversation), "") for one in (encoder, other))
        ids, others = expected.tokens["input_ids"], actual.tokens["input_ids"]
        tokens += abs(len(ids) - len(others)) or int((ids != others).sum())
        for key, right in compact.formats.items():
            wrong = replace(right, mean=tuple(mean + CONTROL for mean in right.mean))
            off, seen = (difference(one, key, actual, expected) for one in (right, wrong))
            largest, control = max(largest, off), min(control, seen)
    return Found(largest, tokens, control)


def draw_image(draw: np.random.Generator, number: int) -> Image.Image:
    """Return an image of random pixels and odd size, in one of all modes; every third has an orientation."""
    height, width = (int(side) for side in draw.integers(29, 420, 2))
    mode = MODES[number % len(MODES)]
    if mode == "I;16":
        return Image.fromarray(draw.integers(0, 1 << 16, (height, width)).astype(np.uint16))
    image = Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)).convert(mode)
    if number % 3 == 0:
        image.getexif()[0x0112] = 1 + number % 8
    return image


def ask_about(image: Image.Image) -> Conversation:
    """Return a conversation about an image."""
    question = Message("user", (MediaRef("image", image), TextPart("What is it?")))
    return Conversation((question, Message("assistant", (TextPart("A cat."),))))


def difference(found: PixelFormat, key: str, actual: Sample, expected: Sample) -> float:
    """Return how far the pixels of a sample of bytes are from those that the processor returns."""
    mask = None if found.mask is None else actual.media[found.mask]
    return float((found.expand(actual.media[key], mask) - expected.media[key]).abs().max())


if __name__ == "__main__":
    main()
