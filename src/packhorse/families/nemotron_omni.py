"""Nemotron Omni (NemotronH_Omni_Reasoning_V3)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from packhorse.families.encoder import Encoder, Family, LoadedMedia
from packhorse.families.media_sizes import Pieces, frame_numbers, frame_pieces
from packhorse.media import VideoInfo
from packhorse.types import Conversation, MediaKind, MediaLayout, TensorLayout


class NemotronOmni(Family):
    """Images at their own resolution, one video of paired frames with their times, and audio.

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
        "two videos in one sample are rejected: the processor takes one",
        "videos in one batch must have frames of the same size",
        "the model of transformers 5.22 raises for videos, and for a batch with images and videos",
    )
    min_transformers: ClassVar[str] = "5.18"
    least_samples: ClassVar[int] = 320  # below two frames, normalising gives NaN

    def media_token_ids(self, encoder: Encoder) -> frozenset[int]:
        """One token for images and frames, one for audio."""
        tokenizer = encoder.tokenizer
        names = (encoder.processor.image_token, encoder.processor.audio_token)
        return frozenset(int(tokenizer.convert_tokens_to_ids(name)) for name in names)

    def media_tokens(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """Patches in groups of two by two; frames in pairs; audio subsampled in stages of two."""
        processor = encoder.processor
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

    def media_patches(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """The grid multiplied out; two frames are embedded together."""
        return self.media_tokens(encoder, kind, size, images_in_sample) * _group(encoder.vision(kind)) ** 2

    def pieces(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> Pieces:
        """Brackets; frames are lines of two, with their numbers and times in words."""
        processor = encoder.processor
        tokens = self.media_tokens(encoder, kind, size, images_in_sample)
        start, pad, end = processor.image_start_token, processor.image_token, processor.image_end_token
        if kind == "image":
            return [(start, 1), (pad, tokens), (end, 1)]
        if kind == "audio":
            start, pad, end = processor.audio_start_token, processor.audio_token, processor.audio_end_token
            return [(start, 1), (pad, tokens), (end, 1)]
        labels = _frame_labels(size, processor.video_temporal_patch_dim)
        lines = (("\n" if index else "") + f"{label}: {start}" for index, label in enumerate(labels))
        return frame_pieces(lines, (pad, tokens // len(labels)), end)

    def item_rows(self, encoder: Encoder, key: str, kind: MediaKind, size: Any) -> int:
        """A video's frames."""
        return int(size.total_frames)

    def check(self, conversation: Conversation) -> None:
        """Reject a second video."""
        super().check(conversation)
        videos = sum(ref.kind == "video" for ref in conversation.media)
        if videos > 1:
            raise self.bad(f"{videos} videos: {self.name} takes one in a sample", conversation)

    def call_arguments(self, encoder: Encoder, media: LoadedMedia) -> dict[str, Any]:
        """Video metadata is one object, not a list."""
        arguments = super().call_arguments(encoder, media)
        if media.videos:
            from transformers.video_utils import VideoMetadata

            (metadata,) = arguments["videos_kwargs"]["video_metadata"]
            arguments["videos_kwargs"]["video_metadata"] = VideoMetadata(**metadata)
        return arguments


def _frame_labels(info: VideoInfo, group_size: int) -> list[str]:
    """The line before each group of frames, with their times if the rate is known."""
    # The processor counts in whole milliseconds per frame.
    milliseconds = int(1000.0 / info.fps) if info.fps else None
    labels: list[str] = []
    for index, position in enumerate(frame_numbers(info)):
        time = "" if milliseconds is None else f" sampled at {position * milliseconds / 1000.0:.2f} seconds"
        if index % group_size == 0:
            labels.append(f"Frame {index + 1}{time}")
        else:
            labels[-1] += f" and frame {index + 1}{time}"
    return labels


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
    if not rows * columns:
        # The processor divides by zero.
        raise ValueError(f"{height} x {width}: too long for {most} patches, one side would have none")
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
