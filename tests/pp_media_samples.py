"""Three images of known sizes, for the tests of media chunks."""

from typing import Any

import torch

from packhorse.types import TensorLayout

GRID = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 4, 4]])  # 4, 8 and 16 patches
PATCHES = torch.arange(28.0)[:, None].expand(28, 3)
IMAGES = {"pixel_values": PATCHES, "image_grid_thw": GRID}
LAYOUT = {
    "pixel_values": TensorLayout(("image",), "rows", "image_grid_thw"),
    "image_grid_thw": TensorLayout(("image",), "item"),
}


def batch_of(rows: int, **more: Any) -> dict[str, Any]:
    return {"input_ids": torch.zeros(rows, 5, dtype=torch.int64), **more}


def lengths(chunks: list[torch.Tensor]) -> list[int]:
    return [len(chunk) for chunk in chunks]
