"""Phi-4-multimodal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

from packhorse.families.encoder import Encoder, Family, LoadedMedia
from packhorse.families.media_sizes import nearest_tiles, tile_arrangements
from packhorse.types import MediaKind, MediaLayout, TensorLayout

_GLOBAL_TOKENS = 256 + 16 + 1  # the whole image with its row ends, and one between it and the crops
_LEAST_SIDE = 10


class Phi4MM(Family):
    """An image becomes the whole image, resized, and crops of 448 pixels; audio is a flat list of clips."""

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

    def media_tokens(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """Every second patch each way of what is not padding, and the end of each row."""
        if kind == "image":
            owner = encoder.processor.image_processor
            rows, columns = _half_patches(*size, owner.size["height"], owner.patch_size, owner.dynamic_hd)
            return _GLOBAL_TOKENS + rows * columns + rows
        extractor = encoder.processor.audio_processor
        frames = ((size - extractor.win_length) // extractor.hop_length + 1) * extractor.audio_feat_stride
        tokens: int = math.ceil(
            math.ceil(frames / extractor.audio_compression_rate) / extractor.audio_downsample_rate
        )
        return tokens

    def media_patches(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """Those of a crop, for each crop and for the whole image."""
        owner = encoder.processor.image_processor
        self.media_tokens(encoder, kind, size)  # raises for what the processor rejects
        height, width = size
        across, down = _crops(height, width, owner.size["height"], owner.dynamic_hd)
        return int((1 + across * down) * (owner.size["height"] // owner.patch_size) ** 2)

    def call(self, encoder: Encoder, text: str, media: LoadedMedia) -> Mapping[str, Any]:
        """The processor's output, with a mask for audio also if a single clip needs none.

        In a batch with a longer clip it does.
        """
        import torch

        output = dict(super().call(encoder, text, media))
        if media.audios and "audio_attention_mask" not in output:
            clips, frames = output["audio_input_features"].shape[:2]
            output["audio_attention_mask"] = torch.ones(clips, frames, dtype=torch.bool)
        return output


@lru_cache(maxsize=4096)
def _half_patches(height: int, width: int, side: int, patch: int, most: int) -> tuple[int, int]:
    """Rows and columns of tokens of the crops, without the patches that are all padding."""
    across, down = _crops(height, width, side, most)
    by_width, by_height = side * across / width, side * down / height
    scaled = (
        (int(height * by_width), side * across)
        if by_width < by_height
        else (side * down, int(width * by_height))
    )
    if min(scaled) < _LEAST_SIDE:
        raise ValueError(
            f"{height} x {width}: the aspect ratio is very extreme, it would be scaled to "
            f"{scaled[0]} x {scaled[1]}, expected at least {_LEAST_SIDE} pixels a side"
        )
    rows = side // patch * down - (side * down - scaled[0]) // patch
    columns = side // patch * across - (side * across - scaled[1]) // patch
    return math.ceil(rows / 2), math.ceil(columns / 2)


def _crops(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """Crops across and down: as many as the image has, or as its shape needs where those are too many."""
    across, down = math.ceil(width / side), math.ceil(height / side)
    if across * down <= most:
        return across, down
    return nearest_tiles(height, width, side**2, tile_arrangements(1, most))
