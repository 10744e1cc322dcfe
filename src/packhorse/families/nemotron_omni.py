"""Nemotron Omni (NemotronH_Omni_Reasoning_V3)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from packhorse.chat import tokenizer_of
from packhorse.families.base import Family, LoadedMedia
from packhorse.types import Conversation, MediaKind, MediaLayout, TensorLayout


class NemotronOmni(Family):
    """Images at their own resolution, one video of paired frames with their times, and sound.

    There is no token for videos: their frames are image tokens, and ``<video>`` is plain text until the
    processor replaces it.
    """

    name = "nemotron_omni"
    processor_classes: ClassVar[tuple[str, ...]] = ("NemotronH_Omni_Reasoning_V3Processor",)
    kinds: ClassVar[tuple[MediaKind, ...]] = ("image", "video", "audio")
    layout: ClassVar[MediaLayout] = {
        "pixel_values": TensorLayout(("image",), "rows", "image_grid_hw"),
        "image_grid_hw": TensorLayout(("image",), "item"),
        # Frames of different size cannot be in one batch.
        "pixel_values_videos": TensorLayout(("video",), "rows"),
        "input_features": TensorLayout(("audio",), "item", ragged=True),
        "input_features_mask": TensorLayout(("audio",), "item", ragged=True),
    }
    caveats: ClassVar[tuple[str, ...]] = (
        "two videos in one sample are refused: the processor takes one",
        "videos in one batch must have frames of the same size",
    )
    least_samples: ClassVar[int] = 320  # below two frames, normalising gives NaN

    def media_token_ids(self, processor: Any) -> frozenset[int]:
        """One token for images and frames, one for sound."""
        tokenizer = tokenizer_of(processor)
        names = (processor.image_token, processor.audio_token)
        return frozenset(int(tokenizer.convert_tokens_to_ids(name)) for name in names)

    def media_tokens(self, processor: Any, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """Patches in groups of two by two; frames in pairs; sound thinned out by stages of two."""
        if kind == "image":
            height, width = size
            rows, columns = _image_grid(processor.image_processor, height, width, images_in_sample)
            return rows * columns // _group(processor.image_processor) ** 2
        if kind == "video":
            rows, columns = _frame_grid(processor.video_processor, size.height, size.width)
            pairs = math.ceil(size.total_frames / processor.video_temporal_patch_dim)
            return int(pairs * (rows * columns // _group(processor.video_processor) ** 2))
        frames = int(1 + size // processor.audio_hop_length)
        for _ in range(int(math.log2(processor.audio_subsampling_factor))):
            frames = math.ceil(frames / 2)
        return max(1, frames)

    def item_rows(self, processor: Any, key: str, kind: MediaKind, size: Any) -> int:
        """A video's frames."""
        return int(size.total_frames)

    def check(self, conversation: Conversation) -> None:
        """Refuse a second video."""
        super().check(conversation)
        videos = sum(ref.kind == "video" for ref in conversation.media)
        if videos > 1:
            raise self.bad(f"{videos} videos: {self.name} takes one in a sample", conversation)

    def call_arguments(self, processor: Any, media: LoadedMedia) -> dict[str, Any]:
        """Video metadata is one object, not a list."""
        arguments = super().call_arguments(processor, media)
        if media.videos:
            from transformers.video_utils import VideoMetadata

            (metadata,) = arguments["videos_kwargs"]["video_metadata"]
            arguments["videos_kwargs"]["video_metadata"] = VideoMetadata(**metadata)
        return arguments


def _group(owner: Any) -> int:
    """Patches along each side of a token."""
    ratio: float = owner.downsample_ratio
    return round(1 / ratio)


def _image_grid(owner: Any, height: int, width: int, images: int) -> tuple[int, int]:
    """Rows and columns of patches: as the image has them, scaled into the budget, in whole groups."""
    group, least = _group(owner), owner.min_num_patches
    most = max((owner.max_model_len - 4) * group**2, least * images)
    most = max(min(most, owner.max_num_patches) if owner.max_num_patches else most, least)
    rows, columns = (round(side / owner.patch_size + 0.5) for side in (height, width))
    shrink = min(math.sqrt(most / (rows * columns)), 1.0)
    rows, columns = math.floor(shrink * rows), math.floor(shrink * columns)
    if most > least > rows * columns:
        grow = math.sqrt(least / (rows * columns))
        rows, columns = math.ceil(grow * rows), math.ceil(grow * columns)
    rows = _whole_groups(rows, columns, group, most)
    return rows, _whole_groups(columns, rows, group, most)


def _whole_groups(side: int, other: int, group: int, most: int) -> int:
    """``side`` rounded up to whole groups where the budget allows it, else down."""
    up, down = math.ceil(side / group) * group, side // group * group
    return up if up == side or up * other <= most else max(group, down)


def _frame_grid(owner: Any, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of patches of every frame."""
    group, most = _group(owner), owner.video_target_num_patches
    if not owner.video_maintain_aspect_ratio:
        side = max(group, int(math.sqrt(most)) // group * group)
        return side, side
    shape = width / height
    sides = [max(round(math.sqrt(most / shape)), 1), max(round(math.sqrt(most * shape)), 1)]
    rows, columns = (math.ceil(side / group) * group for side in sides)
    if rows * columns > most:
        rows, columns = (max(group, side // group * group) for side in sides)
    return rows, columns
