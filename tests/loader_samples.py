"""Rows for the tests of the loader: texts of all lengths, small images, a short video."""

import random
from typing import Any

import numpy as np
from PIL import Image

import packhorse
from contract.processors import processor
from packhorse import World


def chat(question: str, answer: str, *media: dict[str, Any]) -> dict[str, Any]:
    turns = [
        ("user", [*media, {"type": "text", "text": question}]),
        ("assistant", [{"type": "text", "text": answer}]),
    ]
    return {"conversation": [{"role": role, "content": content} for role, content in turns]}


def image(draw: random.Random) -> dict[str, Any]:
    size = (draw.randint(60, 150), draw.randint(60, 150))
    return {"type": "image", "image": Image.new("RGB", size, (draw.randint(0, 255), 99, 7))}


def video() -> dict[str, Any]:
    frames = [np.full((60, 60, 3), 40 * n, np.uint8) for n in range(4)]
    return {"type": "video", "video": [Image.fromarray(frame) for frame in frames]}


def texts(number: int, seed: int = 0) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [chat("why " * draw.randint(1, 20), f"so {n} " * draw.randint(1, 8)) for n in range(number)]


def mixed_rows(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Half of them text alone, the others with one or two images or a video."""
    draw = random.Random(seed)
    rows = []
    for n in range(number):
        kind = draw.choice(["text", "text", "text", "one", "two", "video"])
        media = {"text": [], "one": [image(draw)], "two": [image(draw), image(draw)], "video": [video()]}
        rows.append(chat("why " * draw.randint(1, 20), f"so {n} " * draw.randint(1, 9), *media[kind]))
    return rows


def load(rows: Any, rank: int = 0, size: int = 1, **options: Any) -> packhorse.Loader:
    settings = {"pack_size": 256, "model": "unchecked", "num_workers": 0, **options}
    name = settings.pop("family", "qwen2_vl")
    return packhorse.load(rows, processor(name), world=World(rank, size), **settings)


def delivered_rows(loader: packhorse.Loader, steps: int | None = None) -> list[int]:
    """Return the samples of ``steps`` micro-steps, or of all that remain."""
    seen: list[int] = []
    for step, batch in enumerate(loader, 1):
        seen += batch.info.samples
        if step == steps:
            break
    return seen
