"""Kimi-VL, whose processor comes with the model."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from packhorse.families.encoder import Encoder, Family
from packhorse.types import MediaKind, MediaLayout, TensorLayout


class KimiVL(Family):
    """Images at their own resolution, one token per 28 x 28 pixels; the processor takes plain options."""

    name = "kimi_vl"
    processor_classes: ClassVar[tuple[str, ...]] = ("KimiVLProcessor",)
    layout: ClassVar[MediaLayout] = {
        "pixel_values": TensorLayout(("image",), "rows", "image_grid_hws"),
        "image_grid_hws": TensorLayout(("image",), "item"),
    }
    flat_arguments: ClassVar[bool] = True
    writes_special_tokens: ClassVar[bool] = True

    def media_tokens(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """Scaled down to ``in_token_limit`` patches, then padded to whole groups of patches."""
        owner = encoder.processor.image_processor
        height, width = size
        patches = max(1, (height // owner.patch_size) * (width // owner.patch_size))
        scale = min(1.0, math.sqrt(owner.in_token_limit / patches))
        rows, columns = owner.merge_kernel_size
        return padded_groups(height, scale, owner.patch_size * rows) * padded_groups(
            width, scale, owner.patch_size * columns
        )

    def media_patches(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """The grid multiplied out."""
        rows, columns = encoder.processor.image_processor.merge_kernel_size
        return int(self.media_tokens(encoder, kind, size) * rows * columns)


def padded_groups(side: int, scale: float, factor: int) -> int:
    """How many groups of ``factor`` pixels a scaled side is padded to."""
    return math.ceil(max(1, int(side * scale)) / factor)
