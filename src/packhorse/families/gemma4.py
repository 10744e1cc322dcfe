"""Gemma 4."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

from packhorse.families.encoder import Encoder, Family
from packhorse.families.media_sizes import Pieces, frame_pieces, frame_times
from packhorse.media import MediaSize
from packhorse.media.failure import bad_media
from packhorse.types import MediaKind, MediaLayout, TensorLayout

# The feature extractor's call cuts longer clips.
_MOST_SAMPLES = 480_000
_FRAMES_PER_TOKEN = 4


class Gemma4(Family):
    """Images and frames fill a budget of tokens, whatever their size; frames carry times.

    The feature extractor cuts audio at 30 seconds.
    """

    name = "gemma4"
    processor_classes: ClassVar[tuple[str, ...]] = ("Gemma4Processor",)
    kinds: ClassVar[tuple[MediaKind, ...]] = ("image", "video", "audio")
    layout: ClassVar[MediaLayout] = {
        # Padded to the budget of patches, which an item may set.
        "pixel_values": TensorLayout(("image",), "item", ragged=True),
        "image_position_ids": TensorLayout(("image",), "item", ragged=True),
        "pixel_values_videos": TensorLayout(("video",), "rows", "num_frames_per_video", ragged=True),
        "video_position_ids": TensorLayout(("video",), "rows", "num_frames_per_video", ragged=True),
        "num_frames_per_video": TensorLayout(("video",), "item"),
        "input_features": TensorLayout(("audio",), "item", ragged=True),
        "input_features_mask": TensorLayout(("audio",), "item", ragged=True),
    }
    fill: ClassVar[Mapping[str, float]] = {"image_position_ids": -1, "video_position_ids": -1}
    size_settings: ClassVar[Mapping[MediaKind, tuple[str, ...]]] = {
        "image": ("max_soft_tokens",),
        "video": ("max_soft_tokens",),
    }
    caveats: ClassVar[tuple[str, ...]] = ("the processor cuts audio at 30 seconds without a warning",)
    least_samples: ClassVar[int] = 161
    # Before that the frames of two videos cannot be separated (num_frames_per_video).
    min_transformers_for: ClassVar[Mapping[MediaKind, str]] = {"video": "5.19"}
    bidirectional: ClassVar[str | None] = "mm_token_type_ids"

    def media_tokens(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """Squares of pooled patches in the resized image; a token per four frames of audio."""
        processor = encoder.processor
        if kind == "image":
            return _tokens(processor.image_processor, *size)
        if kind == "video":
            return int(size.total_frames) * _tokens(processor.video_processor, size.height, size.width)
        extractor = processor.feature_extractor
        # A frame takes one sample more than its length, and half a frame of silence is put in front.
        samples = min(size, _MOST_SAMPLES) + extractor.frame_length // 2 - extractor.frame_length - 1
        frames: int = max(0, samples // extractor.hop_length + 1)
        return math.ceil(frames / _FRAMES_PER_TOKEN)

    def media_patches(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """Without those that fill up the budget, which are masked."""
        return int(self.media_tokens(encoder, kind, size) * encoder.vision(kind).pooling_kernel_size ** 2)

    def configure(
        self, encoder: Encoder, kind: MediaKind, size: Any, settings: Mapping[str, int]
    ) -> tuple[MediaSize, dict[str, Any]]:
        """The budget of tokens of an image or a frame: one of those that the processor's class takes."""
        options = {"max_soft_tokens": settings["max_soft_tokens"]}
        try:
            type(encoder.vision(kind))(**options)
        except ValueError as error:
            raise bad_media(str(error), "wrong_format") from error
        return size, options

    def pieces(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> Pieces:
        """Brackets; frames have their minute and second in front and a space between them."""
        processor = encoder.processor
        tokens = self.media_tokens(encoder, kind, size)
        if kind == "image":
            return [(processor.boi_token, 1), (processor.image_token, tokens), (processor.eoi_token, 1)]
        if kind == "audio":
            return [(processor.boa_token, 1), (processor.audio_token, tokens), (processor.eoa_token, 1)]
        openings = (
            f"{' ' if index else ''}{int(time // 60):02d}:{int(time % 60):02d} {processor.boi_token}"
            for index, time in enumerate(frame_times(size))
        )
        content = (processor.video_token, tokens // size.total_frames)
        return frame_pieces(openings, content, processor.eoi_token)


def _tokens(owner: Any, height: int, width: int) -> int:
    return _squares(height, width, owner.patch_size, owner.pooling_kernel_size, owner.max_soft_tokens)


@lru_cache(maxsize=4096)
def _squares(height: int, width: int, patch: int, pooled: int, most: int) -> int:
    """The largest image of nearly this shape within the budget, in squares of pooled patches."""
    square = patch * pooled
    scale = math.sqrt(most * square**2 / (height * width))
    rows, columns = math.floor(scale * height / square), math.floor(scale * width / square)
    # A very long image is one square wide, and as long as its shape and the budget allow.
    if rows == 0:
        rows, columns = 1, min(width // height, most)
    elif columns == 0:
        rows, columns = min(height // width, most), 1
    return rows * columns
