"""Vision towers that run once for all images: the same results, and one call of the attention per layer."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.overrides import TorchFunctionMode

import packhorse
from contract.processors import FAMILIES
from contract.separate import gradients_of
from contract.sweep import family_model
from loader_samples import chat, load
from noise_floor import largest_difference, noise_floor, relative_difference
from packhorse.collate_fns import model_inputs
from packhorse.families import vision
from packhorse.families.vision import VisionIndices, find_towers
from packhorse.types import Batch

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "batch.md"
NAMES = tuple(
    name
    for name in (
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        *("qwen3_omni", "kimi_k25"),
    )
    if name in FAMILIES
)
# transformers 5.22 raises for any video of Kimi K2.5; a test of the tower alone has videos.
WITH_VIDEO = tuple(name for name in NAMES if name != "kimi_k25")
CASES = ("images", "videos", "images and videos", "one image", "text")
Result = tuple[torch.Tensor, dict[str, torch.Tensor]]


def rows_of(case: str) -> list[dict[str, Any]]:
    """Two rows with media of several sizes; of noise, so that patches differ."""
    draw = np.random.default_rng(3)

    def noise(width: int, height: int) -> Any:
        return Image.fromarray(draw.integers(0, 255, (height, width, 3), np.uint8))

    small, wide, high = (
        {"type": "image", "image": noise(*size)} for size in ((60, 62), (150, 90), (64, 130))
    )
    clips = [{"type": "video", "video": [noise(62, 90) for _ in range(number)]} for number in (4, 8)]
    rows = {
        "images": [chat("why", "so", small, wide), chat("and", "as", high)],
        "videos": [chat("why", "so", clips[0]), chat("and", "as", clips[1])],
        "one image": [chat("why", "so", wide)],
    }
    return rows.get(case) or [row for kind in ("images", "videos") for row in rows[kind]]


@cache
def prepare_model(name: str, mode: str) -> Any:
    """A model whose decoder runs varlen kernels, so that batches hold the boundaries of documents too."""
    model = copy.deepcopy(family_model(name)).eval()
    decoder = "sdpa" if name == "qwen3_omni" else "varlen"
    assert packhorse.prepare(model, decoder, device="cpu", vision=mode).vision == mode
    return model


@cache
def batch_of(name: str, case: str, mode: str = "one_call", batch_size: int = 2) -> Batch:
    settings = {
        "family": name,
        "model": prepare_model(name, mode),
        "pack_size": 2048,
        "batch_size": batch_size,
    }
    if case == "text":  # a rank without images gets a placeholder, because the other has one
        settings |= {"pack_size": 192, "batch_size": 1}
        rows = [*rows_of("one image"), chat("why " * 40, "so " * 40)]
        batches = [batch for rank in (0, 1) for batch in load(rows, rank, 2, **settings)]
        return next(batch for batch in batches if batch.info.placeholder)
    return next(iter(load(rows_of(case), **settings)))


def run(model: Any, batch: Mapping[str, Any]) -> Result:
    """Logits, and the gradients of all weights, of the tower's first ones in particular."""
    logits = model(**model_inputs(batch)).logits
    logits.float().square().mean().backward()
    return logits.detach(), gradients_of(model)


def in_per_item_calls(name: str, batch: Mapping[str, Any], attention: str = "sdpa") -> Result:
    """What transformers computes for each image in a call of its own, from the grids alone."""
    model = prepare_model(name, "per_item")
    (tower,) = find_towers(model)
    vision.set_tower_attention(tower, attention)
    try:
        return run(model, without_indices(batch))
    finally:
        vision.set_tower_attention(tower, "sdpa")


def without_indices(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in batch.items() if not is_index(key)}


PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
INDICES = ("_ids", "seqlens", "seqlen", "_index", "interp_indices", "interp_weights")


def is_index(key: str) -> bool:
    return key.startswith(("image_", "video_")) and key.endswith(INDICES)


@contextmanager
def wrong_boundaries(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let all images be one segment; and two, if there is one image."""
    attend = vision.attend_by_segment

    def attend_wrongly(q: Any, k: Any, v: Any, bounds: torch.Tensor, longest: int, *more: Any, **named: Any):
        end = q.shape[2]
        points = [0, end] if len(bounds) > 2 else [0, end // 2, end]
        return attend(q, k, v, torch.tensor(points, dtype=bounds.dtype), end, *more, **named)

    with patch.context() as context:
        context.setattr(vision, "attend_by_segment", attend_wrongly)
        yield


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name in NAMES for case in CASES if name in WITH_VIDEO or "videos" not in case],
)
def test_one_call_for_all_images_gives_what_one_call_per_image_gives(
    name: str, case: str, parity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, model = batch_of(name, case), prepare_model(name, "one_call")
    expected, eager = (in_per_item_calls(name, batch, attention) for attention in ("sdpa", "eager"))
    found = run(model, batch)
    from_grids = run(model, without_indices(batch))
    image_by_image = run(prepare_model(name, "per_item"), batch)  # with the indices of the batch
    with wrong_boundaries(monkeypatch):
        wrong = run(model, batch)
    for what, index, measure in (("logits", 0, largest_difference), ("gradients", 1, relative_difference)):
        floor = noise_floor(expected[index], eager[index], measure=measure)
        control = measure(wrong[index], expected[index])
        for result in (found, from_grids, image_by_image):
            # The patches of a placeholder image are all the same, whichever attend to each other.
            exact = case != "text"
            parity.check(what, measure(result[index], expected[index]), floor, control, exact=exact)
    assert any(part in key for key in found[1] for part in ("visual", "vision_tower"))


@contextmanager
def register(name: str, function: Any) -> Iterator[None]:
    """Replace an attention that is registered with transformers."""
    from transformers import AttentionInterface

    before = AttentionInterface()[name]
    AttentionInterface.register(name, function)
    try:
        yield
    finally:
        AttentionInterface.register(name, before)


def calls_of_layers(model: Any, batch: Mapping[str, Any]) -> list[int]:
    """How often each layer of the tower calls its attention in a forward pass."""
    from transformers import AttentionInterface

    (tower,) = find_towers(model)
    attention = vision.attention_of_tower(tower)
    function, calls = AttentionInterface()[attention], Counter[int]()

    def count(module: Any, *arguments: Any, **options: Any) -> Any:
        calls[id(module)] += 1
        return function(module, *arguments, **options)

    with register(attention, count), torch.no_grad():
        model(**model_inputs(batch))
    return [calls[id(layer)] for layer in vision.attention_layers(tower)]


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_calls_its_attention_once_for_all_images(name: str) -> None:
    batch = batch_of(name, "images")
    assert set(calls_of_layers(prepare_model(name, "one_call"), batch)) == {1}
    assert min(calls_of_layers(prepare_model(name, "per_item"), batch)) >= len(batch["image_grid_thw"]) == 3


@pytest.mark.parametrize("name", WITH_VIDEO)
def test_images_and_videos_of_several_rows_are_one_call_each(name: str) -> None:
    batch = batch_of(name, "images and videos")
    assert batch["image_grid_thw"].shape[0] == 3
    assert len(batch["video_grid_thw"]) == 2
    assert set(calls_of_layers(prepare_model(name, "one_call"), batch)) == {2}


# Indices.


class HostReads(TorchFunctionMode):
    """Counts the functions for which a GPU makes the CPU wait."""

    NAMES = ("tolist", "item", "__bool__", "__int__", "__index__", "nonzero", "unique_consecutive")

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        name = getattr(function, "__name__", "")
        repeats = arguments[1] if len(arguments) > 1 else options.get("repeats")
        waits = (
            name == "repeat_interleave" and isinstance(repeats, torch.Tensor) and "output_size" not in options
        )
        if name in self.NAMES or waits:
            self.found[name] += 1
        return function(*arguments, **options)


def host_reads(name: str, mode: str, inputs: dict[str, Any], patch: pytest.MonkeyPatch) -> Counter[str]:
    """What the tower of a model reads on the CPU, apart from its attention."""
    model = prepare_model(name, mode)
    (tower,) = find_towers(model)
    forward, found = tower.forward, Counter[str]()

    def count(*arguments: Any, **options: Any) -> Any:
        with HostReads() as reads:
            output = forward(*arguments, **options)
        found.update(reads.found)
        return output

    def attend(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> torch.Tensor:
        return v.transpose(1, 2)

    with patch.context() as context, torch.no_grad():
        context.setattr(tower, "forward", count)
        context.setattr(vision, "attend_by_segment", attend)
        model(**inputs)
    return found


@pytest.mark.parametrize("given", [True, False], ids=["indices of the batch", "grids alone"])
@pytest.mark.parametrize("name", NAMES)
def test_a_tower_reads_nothing_from_its_device(
    name: str, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(name, "images and videos" if name in WITH_VIDEO else "images")
    inputs = model_inputs(batch if given else without_indices(batch))
    assert not host_reads(name, "one_call", inputs, monkeypatch)
    as_before = host_reads(name, "per_item", model_inputs(without_indices(batch)), monkeypatch)
    assert as_before["tolist"] >= 5


@pytest.mark.parametrize("name", NAMES)
def test_the_tower_gets_the_indices_of_the_batch_for_images_and_videos_apart(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers has no keywords for those of Kimi K2.5: a hook of its tower computes them."""
    model = prepare_model(name, "one_call")
    batch = batch_of(name, "images and videos" if name in WITH_VIDEO else "images")
    assert any(map(is_index, batch)) == (name != "kimi_k25")
    (tower,) = find_towers(model)
    seen: list[dict[str, Any]] = []
    forward = tower.forward
    monkeypatch.setattr(tower, "forward", lambda *a, **o: (seen.append(dict(o)), forward(*a, **o))[1])
    if any(map(is_index, batch)):
        monkeypatch.setattr(VisionIndices, "compute", None)  # by the hook
    with torch.no_grad():
        model(**model_inputs(batch))
    for kind, options in zip(("image", "video"), seen, strict=False):
        for key in filter(is_index, batch):
            if key.startswith(f"{kind}_"):
                assert options[key.removeprefix(f"{kind}_")] is batch[key]
        assert options["cu_seqlens"][-1] == options["grid_thw"].prod(-1).sum() == len(batch[PIXELS[kind]])
    assert len(seen) == len(PIXELS.keys() & {key.partition("_")[0] for key in batch if "_grid" in key})


@pytest.mark.parametrize("name", NAMES)
def test_indices_are_those_that_the_tower_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is the tower's own forward pass: each function gives what it gives without the indices."""
    model = prepare_model(name, "per_item")
    (tower,) = find_towers(model)
    frames = (1, 2, 1) if name != "kimi_k25" else (2, 2, 2)  # which takes videos of one length alone
    grids = torch.tensor([[n, *size] for n, size in zip(frames, ((4, 6), (8, 4), (10, 2)), strict=True)])
    computed = VisionIndices.of(tower).compute(grids)
    features = {"qwen2_vl": 1176, "qwen2_5_vl": 1176}.get(name, 1536)
    shape = (3, 14, 14) if name == "kimi_k25" else (features,)
    patches = torch.randn(int(grids.prod(-1).sum()), *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = tower(patches, grid_thw=grids).pooler_output
        assert torch.equal(tower(patches, grid_thw=grids, **computed).pooler_output, expected)
        for key, value in computed.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                changed: Any = value.roll(1, -1)
            elif isinstance(value, torch.Tensor):
                changed = value.flip(0) if "cu_" not in key else value[[0, -1]]
            else:
                continue  # the longest segment, which sdpa does not need
            found = tower(patches, grid_thw=grids, **{**computed, key: changed}).pooler_output
            assert not torch.allclose(found, expected), f"the tower does not use {key}"


def test_batches_for_other_models_hold_no_indices() -> None:
    given: dict[str, Any] = {"family": "qwen3_vl", "pack_size": 512}
    for model in (prepare_model("qwen3_vl", "per_item"), prepare_model("qwen3_vl", "one_call").config):
        assert not any(map(is_index, next(iter(load(rows_of("images"), model=model, **given)))))


def test_the_page_of_the_batch_lists_the_indices_with_their_shapes() -> None:
    text = PAGE.read_text("utf-8").partition("### Indices for the vision tower")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    documented: dict[str, str] = {}
    for keys, shapes, _ in rows:
        names = re.findall(r"`(\w+)`", keys)
        each = re.findall(r"\[[^]]*\]|a number", shapes)
        documented |= dict(zip(names, each * (len(names) // len(each)), strict=True))
    found = set()
    for name in NAMES:
        batch = batch_of(name, "images")
        windows = len(batch.get("image_cu_window_seqlens", [0])) - 1
        sizes = {"P": len(batch["pixel_values"]), "I": len(batch["image_grid_thw"]), "W": windows}
        for key in filter(is_index, batch):
            found.add(key)
            if isinstance(batch[key], int):
                assert documented[key] == "a number"
            else:
                shape = [int(eval(part, sizes)) for part in documented[key].strip("[]").split(", ")]
                assert list(batch[key].shape) == shape, key
    assert found == documented.keys()


def test_padded_batches_hold_indices_too() -> None:
    model = prepare_model("qwen3_vl", "one_call")
    loader = load(rows_of("images"), family="qwen3_vl", model=model, mode="pad", batch_size=2)
    batch = next(iter(loader))
    assert any(map(is_index, batch))
    with torch.no_grad():
        found, expected = (model(**inputs).loss for inputs in (batch, without_indices(batch)))
    assert torch.equal(found, expected)


def test_batches_of_workers_and_of_the_collate_function_run_alike(parity: Any) -> None:
    model = prepare_model("qwen2_5_vl", "one_call")
    given: dict[str, Any] = {"family": "qwen2_5_vl", "model": model, "pack_size": 512, "batch_size": 2}
    batch = next(iter(load(rows_of("images"), num_workers=1, **given)))
    assert any(map(is_index, batch))
    assert run(model, batch)[0].equal(run(model, batch_of("qwen2_5_vl", "images"))[0])
