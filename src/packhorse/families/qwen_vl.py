"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL (its MoE and the Qwen3.5 models use the same processor)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from packhorse.chat import TOKEN_KEYS
from packhorse.families.encoder import Encoder, Family, LoadedMedia
from packhorse.families.media_sizes import Pieces, frame_times
from packhorse.media import VideoInfo
from packhorse.media.images import resize_image, resize_video
from packhorse.types import MediaKind, MediaLayout, TensorLayout

VISION: MediaLayout = {
    "pixel_values": TensorLayout(("image",), "rows", "image_grid_thw"),
    "image_grid_thw": TensorLayout(("image",), "item"),
    "pixel_values_videos": TensorLayout(("video",), "rows", "video_grid_thw"),
    "video_grid_thw": TensorLayout(("video",), "item"),
}
"""Images and videos are flat patches; the grid of each says how many are its own."""


class Qwen2VL(Family):
    """Qwen2-VL and Qwen2.5-VL: one token per 28 x 28 pixels, and per pair of frames."""

    name = "qwen2_vl"
    processor_classes: ClassVar[tuple[str, ...]] = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor")
    kinds: ClassVar[tuple[MediaKind, ...]] = ("image", "video")
    layout: ClassVar[MediaLayout] = {**VISION, "second_per_grid_ts": TensorLayout(("video",), "item")}
    mrope: ClassVar[bool] = True

    def call(self, encoder: Encoder, text: str, media: LoadedMedia) -> Mapping[str, Any]:
        """The processor's own output, the tensors of the tokens made here.

        transformers looks at every token before it makes a tensor of them, which takes as long as a tenth of
        an image. So it is asked for tensors of the media alone.
        """
        import torch

        arguments = self.call_arguments(encoder, media) | self.text_arguments(encoder, text)
        for kind in ("images", "videos"):
            if kind in arguments:
                own = arguments.get(f"{kind}_kwargs", {})
                arguments[f"{kind}_kwargs"] = {**own, "return_tensors": "pt"}
        output: Mapping[str, Any] = encoder.processor(text=[text], **arguments)

        def tensor(key: str, value: Any) -> torch.Tensor:
            if isinstance(value, torch.Tensor):
                return value
            # Numpy reads lists of numbers in a quarter of the time.
            return torch.from_numpy(np.array(value, np.int64)) if key in TOKEN_KEYS else torch.tensor(value)

        return {key: tensor(key, value) for key, value in output.items()}

    def media_tokens(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """Pixels after resizing, over the pixels of a token."""
        if kind == "image":
            return image_tokens(encoder.processor.image_processor, size)
        return video_tokens(encoder.processor.video_processor, size)

    def media_patches(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """The grid multiplied out: a token is a square of ``merge_size`` patches a side."""
        return patches_of(encoder, kind, self.media_tokens(encoder, kind, size))


class Qwen3VL(Qwen2VL):
    """Qwen3-VL: one token per 32 x 32 pixels; a video's frames share one budget and carry timestamps."""

    name = "qwen3_vl"
    processor_classes: ClassVar[tuple[str, ...]] = ("Qwen3VLProcessor",)
    layout: ClassVar[MediaLayout] = VISION

    def pieces(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> Pieces:
        """Each temporal patch of a video has its time and brackets of its own, inside the template's."""
        processor = encoder.processor
        if kind != "video":
            return super().pieces(encoder, kind, size, images_in_sample)
        pad = encoder.token("video_token")
        start, end = processor.vision_start_token, processor.vision_end_token
        times = middle_times(size, processor.video_processor.temporal_patch_size)
        tokens = self.media_tokens(encoder, kind, size) // len(times)
        written: list[tuple[str, int]] = []
        for seconds in times:
            written += ((f"<{seconds:.1f} seconds>{start}", 1), (pad, tokens), (end, 1))
        return written


def image_tokens(image_processor: Any, size: tuple[int, int]) -> int:
    """Content tokens of an image for all processors that resize as Qwen2-VL's does."""
    factor = image_processor.patch_size * image_processor.merge_size
    height, width = resize_image(*size, factor, *pixel_budget(image_processor))
    return int(height * width // factor**2)


def video_tokens(video_processor: Any, info: VideoInfo, budget: tuple[int, int] | None = None) -> int:
    """Content tokens of a video, by the class of the video processor.

    ``Qwen3VLVideoProcessor`` gives all frames together one budget of pixels; ``Qwen2VLVideoProcessor``, which
    AutoProcessor also builds for Qwen3-Omni, gives it to each frame.

    Args:
        video_processor: of the family's processor.
        info: the frames that are fed.
        budget: least and most pixels; None for the video processor's own.
    """
    low, high = budget or pixel_budget(video_processor)
    factor, patch = (
        video_processor.patch_size * video_processor.merge_size,
        video_processor.temporal_patch_size,
    )
    frames, capped = info.total_frames, getattr(video_processor, "cap_pixels_per_frame", None)
    if any(base.__name__ == "Qwen3VLVideoProcessor" for base in type(video_processor).__mro__):
        if capped:
            per_frame = min(video_processor.max_video_tokens * factor**2, high // frames)
            high = max(per_frame, int(low * 1.05)) * frames
        height, width = resize_video(frames, info.height, info.width, patch, factor, low, high)
    else:
        if capped:
            share = int(video_processor.max_video_tokens * factor * factor * 0.9) * patch // frames
            high = max(min(high, share), int(low * 1.05))
        height, width = resize_image(info.height, info.width, factor, low, high)
    return int(math.ceil(frames / patch) * height * width // factor**2)


def patches_of(encoder: Encoder, kind: MediaKind, tokens: int) -> int:
    """Patches under so many content tokens; sound has none."""
    if kind == "audio":
        return 0
    owner = encoder.processor.image_processor if kind == "image" else encoder.processor.video_processor
    return int(tokens * owner.merge_size**2)


def middle_times(info: VideoInfo, patch: int) -> list[float]:
    """The time of each temporal patch, half-way between its first frame and its last."""
    times = frame_times(info)
    times += times[-1:] * (-len(times) % patch)
    return [(times[at] + times[at + patch - 1]) / 2 for at in range(0, len(times), patch)]


def pixel_budget(owner: Any) -> tuple[int, int]:
    """Least and most pixels of an image or video processor."""
    return int(owner.size["shortest_edge"]), int(owner.size["longest_edge"])
