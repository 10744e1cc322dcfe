"""The tables of the batch (docs/reference/batch.md) list the keys, shapes and dtypes of real batches."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from contract.tiny_models import tiny_model
from loader_samples import chat, image, load, video

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "batch.md"
FORMATS = ("sdpa", "eager", "varlen", "flash_attention_2", "flex_attention", 'mode="pad"')


def read_table(first_cell: str) -> list[dict[str, str]]:
    """Return the lines of a table of the page by the names of its columns."""
    text = PAGE.read_text("utf-8")
    lines = text[text.index(f"| {first_cell} |") :].partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def documented_formats() -> dict[str, dict[str, tuple[str, str]]]:
    """Return the dtype and shape of each key in each format that has it."""
    formats: dict[str, dict[str, tuple[str, str]]] = {}
    for line in read_table("format"):
        keys = formats.setdefault(line["format"].strip("`"), {})
        for row in read_table("key"):
            cell = line[row["key"]] if row["shape"] == "by format" else row["shape"]
            if cell != "none":
                shape, dtype = re.findall(r"(.+?)(?: (int64|bool|float))?$", cell)[0]
                keys |= dict.fromkeys(re.findall("`([^`]+)`", row["key"]), (dtype or row["dtype"], shape))
    return formats


def fits(shape: tuple[int, ...], documented: str, sizes: dict[str, int]) -> bool:
    """Whether a shape is one of those documented; names of sizes get the value that they first have."""
    for pattern in documented.split(" or "):
        names = pattern.strip("[]").split(", ")
        if len(names) == len(shape):
            found = [
                int(name) if name.isdigit() else sizes.setdefault(name, size)
                for name, size in zip(names, shape, strict=True)
            ]
            return found == list(shape)
    return False


def check(batch: dict[str, Any], documented: dict[str, tuple[str, str]]) -> None:
    assert set(batch) == set(documented)
    sizes: dict[str, int] = {}
    for key, value in batch.items():
        dtype, shape = documented[key]
        if shape == "BlockMask":
            assert isinstance(value, BlockMask)
        elif shape == "a number":
            assert isinstance(value, int)
        else:
            assert fits(tuple(value.shape), shape, sizes), f"{key} {tuple(value.shape)}, not {shape} {sizes}"
            found = "float" if value.is_floating_point() else str(value.dtype).removeprefix("torch.")
            assert found == dtype, key
    assert sizes["B"] in (2, 4)
    assert sizes["S"] > 10


def batch_of(family: str, name: str, *, videos: bool = True) -> dict[str, Any]:
    draw = random.Random(0)
    rows = [
        chat("why " * n, "so " * n, image(draw), *([video()] if videos and n % 2 == 0 else []))
        for n in range(1, 25)
    ]
    settings: dict[str, Any] = {"mode": "pad", "batch_size": 4} if name == 'mode="pad"' else {"batch_size": 2}
    if name != 'mode="pad"':
        settings["attn_implementation"] = name
    # Of a config, whose attention is not known: a model has to run the attention that batches are built for.
    model = tiny_model(family).config
    loader = load(rows, family=family, model=model, pack_size=512, **settings)
    batches = [batch for batch in loader if len(batch["input_ids"]) == settings["batch_size"]]
    return dict(next(batch for batch in batches if not videos or "pixel_values_videos" in batch))


def test_the_tables_have_a_line_for_every_format() -> None:
    assert sorted(documented_formats()) == sorted(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_a_batch_has_the_keys_shapes_and_types_of_the_tables(name: str) -> None:
    check(batch_of("qwen2_5_vl", name), documented_formats()[name])


def test_a_batch_that_lacks_a_key_or_has_another_shape_is_found() -> None:
    documented = documented_formats()["sdpa"]
    batch = batch_of("qwen2_5_vl", "sdpa")
    wrong = (
        {key: value for key, value in batch.items() if key != "position_ids"},
        {**batch, "more": 1},
        {**batch, "labels": batch["labels"][:, 1:]},
        {**batch, "attention_mask": batch["attention_mask"].to(torch.int64)},
    )
    for changed in wrong:
        with pytest.raises(AssertionError):
            check(changed, documented)


def test_packed_batches_of_gemma_have_use_cache_and_no_mask() -> None:
    batch = batch_of("gemma3", "sdpa", videos=False)
    assert batch["use_cache"] is False
    assert "attention_mask" not in batch
    assert batch["position_ids"].shape == batch["input_ids"].shape == batch["token_type_ids"].shape
