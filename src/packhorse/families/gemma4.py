"""Gemma 4."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from packhorse.families.base import Family
from packhorse.types import MediaKind, MediaLayout, TensorLayout

# The feature extractor's call cuts longer clips.
_MOST_SAMPLES = 480_000
_FRAMES_PER_TOKEN = 4


class Gemma4(Family):
    """Images and frames fill a budget of tokens, whatever their size; frames carry times; sound has tokens.

    The feature extractor cuts sound at 30 seconds.
    """

    name = "gemma4"
    processor_classes: ClassVar[tuple[str, ...]] = ("Gemma4Processor",)
    kinds: ClassVar[tuple[MediaKind, ...]] = ("image", "video", "audio")
    layout: ClassVar[MediaLayout] = {
        "pixel_values": TensorLayout(("image",), "item"),
        "image_position_ids": TensorLayout(("image",), "item"),
        "pixel_values_videos": TensorLayout(("video",), "rows", "num_frames_per_video"),
        "video_position_ids": TensorLayout(("video",), "rows", "num_frames_per_video"),
        "num_frames_per_video": TensorLayout(("video",), "item"),
        "input_features": TensorLayout(("audio",), "item", ragged=True),
        "input_features_mask": TensorLayout(("audio",), "item", ragged=True),
    }
    caveats: ClassVar[tuple[str, ...]] = ("the processor cuts sound at 30 seconds and does not say so",)
    least_samples: ClassVar[int] = 161

    def media_tokens(self, processor: Any, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """Squares of pooled patches in the resized picture; a token per four frames of sound."""
        if kind == "image":
            return _tokens(processor.image_processor, *size)
        if kind == "video":
            return int(size.total_frames) * _tokens(processor.video_processor, size.height, size.width)
        ears = processor.feature_extractor
        # A frame takes one sample more than its length, and half a frame of silence is put in front.
        samples = min(size, _MOST_SAMPLES) + ears.frame_length // 2 - ears.frame_length - 1
        frames: int = max(0, samples // ears.hop_length + 1)
        return math.ceil(frames / _FRAMES_PER_TOKEN)


def _tokens(owner: Any, height: int, width: int) -> int:
    """The largest picture of nearly this shape within the budget, in squares of pooled patches."""
    square = owner.patch_size * owner.pooling_kernel_size
    pixels = owner.max_soft_tokens * owner.pooling_kernel_size**2 * owner.patch_size**2
    scale = math.sqrt(pixels / (height * width))
    rows, columns = math.floor(scale * height / square), math.floor(scale * width / square)
    # A very long picture is one square wide, and as long as its shape and the budget allow.
    if rows == 0:
        rows, columns = 1, min(width // height, owner.max_soft_tokens)
    elif columns == 0:
        rows, columns = min(height // width, owner.max_soft_tokens), 1
    return int(rows * columns)
