"""Phi-4-multimodal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from packhorse.families.base import Family, LoadedMedia
from packhorse.types import MediaKind, MediaLayout, TensorLayout

_GLOBAL_TOKENS = 256 + 16 + 1  # the whole picture with its row ends, and one between it and the crops


class Phi4MM(Family):
    """An image is a picture of the whole and crops of 448 pixels; sound is a flat list of clips."""

    name = "phi4_mm"
    processor_classes: ClassVar[tuple[str, ...]] = ("Phi4MultimodalProcessor", "Phi4MMProcessor")
    kinds: ClassVar[tuple[MediaKind, ...]] = ("image", "audio")
    layout: ClassVar[MediaLayout] = {
        "image_pixel_values": TensorLayout(("image",), "item", ragged=True),
        "image_sizes": TensorLayout(("image",), "item"),
        "image_attention_mask": TensorLayout(("image",), "item", ragged=True),
        "audio_input_features": TensorLayout(("audio",), "item", ragged=True),
        "audio_embed_sizes": TensorLayout(("audio",), "item"),
        "audio_attention_mask": TensorLayout(("audio",), "item", ragged=True),
    }
    # The processor marks every patch of a crop that is not there as attended to.
    fill: ClassVar[Mapping[str, float]] = {"image_attention_mask": 1.0}
    least_samples: ClassVar[int] = 400

    def media_tokens(self, processor: Any, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """Every second patch each way of what is not padding, and the end of each row."""
        if kind == "image":
            rows, columns = _half_patches(processor.image_processor, *size)
            return _GLOBAL_TOKENS + rows * columns + rows
        ears = processor.audio_processor
        frames = ((size - ears.win_length) // ears.hop_length + 1) * ears.audio_feat_stride
        tokens: int = math.ceil(math.ceil(frames / ears.audio_compression_rate) / ears.audio_downsample_rate)
        return tokens

    def call(self, processor: Any, text: str, media: LoadedMedia) -> Mapping[str, Any]:
        """The processor's output, with a mask for sound also where a single clip needs none.

        In a batch with a longer clip it does.
        """
        import torch

        output = dict(super().call(processor, text, media))
        if media.audios and "audio_attention_mask" not in output:
            clips, frames = output["audio_input_features"].shape[:2]
            output["audio_attention_mask"] = torch.ones(clips, frames, dtype=torch.bool)
        return output


def _half_patches(owner: Any, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of tokens of the crops, without the patches that are all padding."""
    side, patch = owner.size["height"], owner.patch_size
    across, down = math.ceil(width / side), math.ceil(height / side)
    if across * down > owner.dynamic_hd:
        across, down = _nearest(height, width, side, owner.dynamic_hd)
    by_width, by_height = side * across / width, side * down / height
    below = side * down - int(height * by_width) if by_width < by_height else 0
    beside = 0 if by_width < by_height else side * across - int(width * by_height)
    rows = side // patch * down - below // patch
    columns = side // patch * across - beside // patch
    return math.ceil(rows / 2), math.ceil(columns / 2)


def _nearest(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """Crops across and down whose shape is nearest to the picture's; of equals see below."""
    # Which of two equally large arrangements comes first is decided by the order of a set of pairs: it must
    # be the same set, filled in the same order, as in the processor.
    arrangements = {
        (across, down)
        for larger in range(1, most + 1)
        for across in range(1, larger + 1)
        for down in range(1, larger + 1)
        if across * down <= most
    }
    best, nearest = (1, 1), float("inf")
    for across, down in sorted(arrangements, key=lambda pair: pair[0] * pair[1]):
        distance = abs(width / height - across / down)
        enough = distance == nearest and height * width > 0.5 * side * side * across * down
        if distance < nearest or enough:
            best, nearest = (across, down), distance
    return best
