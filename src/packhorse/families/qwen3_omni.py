"""Qwen3-Omni: images as Qwen3-VL, and audio."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from packhorse.families.encoder import Encoder, LoadedMedia
from packhorse.families.qwen_vl import VISION, Qwen2VL, video_tokens
from packhorse.media import VideoFrames, VideoInfo
from packhorse.types import MediaKind, MediaLayout, MediaRef, TensorLayout

# The processor's call uses these whatever its video processor says.
_VIDEO_PIXELS = (128 * 32 * 32, 768 * 32 * 32)
_CHUNK_FRAMES, _CHUNK_TOKENS = 100, 13


class Qwen3Omni(Qwen2VL):
    """Images as Qwen3-VL; videos as Qwen2-VL, without timestamps; 13 tokens for a second of audio.

    Audio is cut to whole hops of the feature extractor (10 ms), because a remainder is counted when a longer
    clip is in the same batch and is not counted otherwise.
    """

    name = "qwen3_omni"
    processor_classes: ClassVar[tuple[str, ...]] = ("Qwen3OmniMoeProcessor",)
    kinds: ClassVar[tuple[MediaKind, ...]] = ("image", "video", "audio")
    layout: ClassVar[MediaLayout] = {
        **VISION,
        "video_second_per_grid": TensorLayout(("video",), "item"),
        "input_features": TensorLayout(("audio",), "item", ragged=True),
        "feature_attention_mask": TensorLayout(("audio",), "item", ragged=True),
    }
    makes_token_tensors: ClassVar[bool] = True
    least_samples: ClassVar[int] = 320  # the window's half must fit into the clip after it is cut

    def media_tokens(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """Audio is subsampled eightfold in chunks of a second, each rounded up."""
        processor = encoder.processor
        if kind == "image":
            return super().media_tokens(encoder, kind, size)
        if kind == "video":
            budget = None if encoder.has_item_options else _VIDEO_PIXELS
            return video_tokens(processor.video_processor, size, budget)
        chunks, rest = divmod(size // processor.feature_extractor.hop_length, _CHUNK_FRAMES)
        for _ in range(3):
            rest = -(-rest // 2)
        return int(chunks * _CHUNK_TOKENS + rest)

    def frame_budget(self, encoder: Encoder, info: VideoInfo) -> tuple[float, float]:
        """That of the processor's call."""
        return _VIDEO_PIXELS

    def load(self, encoder: Encoder, refs: Iterable[MediaRef]) -> LoadedMedia:
        """Decode the media; audio ends at a whole hop."""
        media = super().load(encoder, refs)
        hop = encoder.processor.feature_extractor.hop_length
        audios = [(array[: len(array) // hop * hop], rate) for array, rate in media.audios]
        return replace(media, audios=audios)

    def call(self, encoder: Encoder, text: str, media: LoadedMedia) -> Mapping[str, Any]:
        """The processor's output, with each video's own time per temporal patch.

        The processor knows one rate for all videos of a call, 1 frame per second by default.
        """
        import torch

        output = dict(super().call(encoder, text, media))
        if media.videos:
            patch = encoder.processor.video_processor.temporal_patch_size
            seconds = [patch / _frames_per_second(video) for video in media.videos]
            output["video_second_per_grid"] = torch.tensor(seconds, dtype=torch.float32)
        return output


def _frames_per_second(video: VideoFrames) -> float:
    """Of the frames that were taken; 1, as in the processor, if the video has no rate."""
    metadata = video.metadata
    if metadata.fps is None:
        return 1.0
    return len(metadata.frames_indices) / metadata.total_num_frames * metadata.fps
