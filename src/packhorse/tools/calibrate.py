"""Measure what tokens, patches and images cost: forward and backward of packs of different shapes.

The packs come from a loader, with rows that are made up (random words and noise, of many lengths and sizes)
or from data. Packs of several sizes separate the cost of tokens from that of a pack.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from packhorse.collate.packed import model_inputs
from packhorse.errors import ConfigError
from packhorse.families import Encoder
from packhorse.families.models import media_parts
from packhorse.integrations.loss import batch_loss, count_batch_supervised
from packhorse.loader.config import Data, LoaderConfig
from packhorse.loader.loader import Loader
from packhorse.loader.startup import count_examples
from packhorse.plan.cost_fit import CostFit, fit_weights
from packhorse.plan.cost_model import CostWeights
from packhorse.types import Batch, Floats, World, to_device

_LETTERS = "abcdefghijklmnoprstuvw"
_IMAGE_EDGES = (128, 448, 1200)  # pixels
_MANY = 8  # images of a row
_PACKS_OF_A_SHAPE = 3
_PASSES = 2  # at least, after the first
_PARTS_OF_A_PACK = (1, 3)  # sizes of packs: pack_size over these

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Calibration:
    """The fitted weights, what was measured, and the weights before.

    ``features`` and ``seconds`` are those of each pack.
    """

    fit: CostFit
    before: CostWeights
    features: Floats
    seconds: Floats


def calibrate(
    model: Any,
    processor: Any,
    *,
    data: Data | None = None,
    pack_size: int = 8192,
    seconds: float = 60.0,
    progress: OnProgress | None = None,
) -> Calibration:
    """Measure packs of a model on its device, and fit cost weights to the times.

    Args:
        model: on its device, prepared for packs (:func:`packhorse.prepare`).
        processor: of the model.
        data: as for :func:`packhorse.load`; None makes rows up.
        pack_size: of the largest packs.
        seconds: about how long to measure, after one pass over all packs.
        progress: called with the packs that were run in the first pass, and all.
    """
    device = next(model.parameters()).device
    packs: list[Batch] = []
    tables: list[Floats] = []
    before = CostWeights()
    for rows, size in _sources(processor, model, data, pack_size):
        config = LoaderConfig(data=rows, pack_size=size, num_workers=0, placeholder="never", effort=0.0)
        loader = config.build(processor, model=model, world=World())
        features, batches = _first_packs(loader)
        before = loader.cost_weights
        packs, tables = packs + batches, [*tables, features]
    table = np.concatenate(tables)
    best = np.full(len(packs), np.inf)
    for number, batch in enumerate(packs, 1):  # kernels are chosen or compiled, memory is allocated
        _time_pack(model, batch, device)
        if progress is not None:
            progress(number, len(packs))
    started, passes = time.perf_counter(), 0
    while passes < _PASSES or time.perf_counter() - started < seconds:
        best = np.minimum(best, [_time_pack(model, batch, device) for batch in packs])
        passes += 1
    return Calibration(fit_weights(table, best, before), before, table, best)


def _first_packs(loader: Loader) -> tuple[Floats, list[Batch]]:
    """Return the first packs of a loader that lost no sample, and their features."""
    batches, rows = [], []
    for batch in loader:
        if not batch.info.lost:
            batches.append(batch)
            rows.append(batch.info.step)
        if len(batches) == _PACKS_OF_A_SHAPE:
            break
    loader.close()
    return loader.step_features(rows), batches


def _time_pack(model: Any, batch: Batch, device: torch.device) -> float:
    """Return the seconds of forward and backward."""
    moved = to_device(batch, device)
    _synchronize(device)
    started = time.perf_counter()
    output = model(**model_inputs(moved, model))
    loss = batch_loss(model, output, moved, max(1.0, count_batch_supervised(batch)))
    loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _sources(processor: Any, model: Any, data: Data | None, pack_size: int) -> Iterator[tuple[Data, int]]:
    """Yield rows and the size of their packs."""
    sizes = [pack_size // part for part in _PARTS_OF_A_PACK]
    if data is not None:
        yield from ((data, size) for size in sizes)
        return
    encoder = Encoder(processor)
    with_images = bool(media_parts(model.config)) and hasattr(processor, "image_processor")
    for size in sizes:
        shapes = [
            [_row(words, draw=random.Random(number)) for number in range(size // max(1, words))]
            for words in (size // 64, size // 8, size // 3)
        ]
        if with_images:
            shapes += [
                [_row(size // 32, [edge] * images, random.Random(n)) for n in range(_PACKS_OF_A_SHAPE)]
                for edge in _IMAGE_EDGES
                for images in (1, _MANY)
            ]
        for shape in shapes:
            yield from ((rows, size) for rows in [_fitting(shape, encoder, size)] if rows)


def _fitting(rows: Sequence[Any], encoder: Encoder, size: int) -> list[Any]:
    """Return the rows that fit into a pack; raise if the processor cannot count them."""
    counts = count_examples(rows, encoder)
    if not counts.ok.all():
        detail = next(detail for detail, ok in zip(counts.detail, counts.ok, strict=True) if not ok)
        raise ConfigError(f"the processor cannot encode made-up rows: {detail}; give some of yours as --data")
    return [row for row, total in zip(rows, counts.total.tolist(), strict=True) if 2 < total <= size]


def _row(words: int, edges: Sequence[int] = (), draw: random.Random | None = None) -> dict[str, Any]:
    """Return a chat of random words with images of noise; a random share of the words is in the answer."""
    draw = draw or random.Random(0)
    answer = max(1, int(words / 4 * draw.random()))  # a word has four letters, which may be a token each
    question = max(1, words // 4 - answer)
    texts = [" ".join("".join(draw.choices(_LETTERS, k=3)) for _ in range(n)) for n in (question, answer)]
    images = [{"type": "image", "image": _noise(edge, draw)} for edge in edges]
    turns = [("user", [*images, {"type": "text", "text": texts[0]}])]
    turns += [("assistant", [{"type": "text", "text": texts[1]}])]
    return {"conversation": [{"role": role, "content": content} for role, content in turns]}


def _noise(edge: int, draw: random.Random) -> Image.Image:
    pixels = np.random.default_rng(draw.randrange(2**32)).integers(0, 256, (edge, edge, 3), np.uint8)
    return Image.fromarray(pixels)
