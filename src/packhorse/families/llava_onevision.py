"""LLaVA-OneVision."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, ClassVar

from packhorse.families.encoder import Encoder, Family
from packhorse.types import MediaKind, MediaLayout, TensorLayout


class LlavaOnevision(Family):
    """One image alone is tiled; several in one sample are one square each; frames are pooled."""

    name = "llava_onevision"
    processor_classes: ClassVar[tuple[str, ...]] = ("LlavaOnevisionProcessor", "LlavaOneVisionProcessor")
    kinds: ClassVar[tuple[MediaKind, ...]] = ("image", "video")
    layout: ClassVar[MediaLayout] = {
        # Images have different numbers of tiles; the model drops those that are all zero.
        "pixel_values": TensorLayout(("image",), "item", ragged=True),
        "image_sizes": TensorLayout(("image",), "item"),
        # A sample without images has no entry here.
        "batch_num_images": TensorLayout(("image",), "sample"),
        "pixel_values_videos": TensorLayout(("video",), "item"),
    }
    equal_frames: ClassVar[bool] = True
    caveats: ClassVar[tuple[str, ...]] = (
        "videos in one batch (or one sample) must have the same number of frames: the model takes no others",
    )

    def media_tokens(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """A newline token ends an image, and each row of a tiled one."""
        processor = encoder.processor
        side = int(math.sqrt(processor.num_image_tokens))
        if kind == "video":
            return int(size.total_frames) * math.ceil(side / 2) ** 2 + 1
        if images_in_sample > 1:
            tokens = processor.num_image_tokens + 1
        else:
            tokens = processor.num_image_tokens + _tile_tokens(encoder, side, *size)
        return int(tokens - (processor.vision_feature_select_strategy == "default"))

    def media_patches(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """Those of a tile, for each tile and each frame; an image alone is tiled and also seen whole."""
        tiles = 1
        if kind == "video":
            tiles = size.total_frames
        elif images_in_sample == 1:
            owner = encoder.processor.image_processor
            height, width = _best_canvas(*size, _canvases(owner))
            tiles += (height // owner.size["height"]) * (width // owner.size["width"])
        return int(tiles * encoder.processor.num_image_tokens)


def _tile_tokens(encoder: Encoder, side: int, height: int, width: int) -> int:
    """Tokens of the tiles without their padding, and one for the end of each row."""
    owner = encoder.processor.image_processor
    tile_height, tile_width = owner.size["height"], owner.size["width"]
    best_height, best_width = _best_canvas(height, width, _canvases(owner))
    rows, columns = side * (best_height // tile_height), side * (best_width // tile_width)
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    most_tiles = int(encoder.processor.vision_aspect_ratio.removeprefix("anyres_max_"))
    shrink = math.sqrt(rows * columns / (most_tiles * side**2))
    if shrink > 1.1:
        rows, columns = int(rows // shrink), int(columns // shrink)
    return int(rows * columns + rows)


def _canvases(owner: Any) -> tuple[tuple[int, int], ...]:
    return tuple((height, width) for height, width in owner.image_grid_pinpoints)


@lru_cache(maxsize=4096)
def _best_canvas(height: int, width: int, canvases: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """The canvas that keeps most of the image's pixels, the smallest of those; the first of equals."""

    def kept_and_wasted(canvas: tuple[int, int]) -> tuple[int, int]:
        scale = min(canvas[1] / width, canvas[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - canvas[0] * canvas[1]

    return max(canvases, key=kept_and_wasted)
