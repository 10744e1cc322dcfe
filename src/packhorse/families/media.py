"""The media of one conversation: decoded, or their sizes alone.

A size is what decides how many tokens a medium has. It comes from the decoded medium or, without decoding
one, from its header; both give the same number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from packhorse.media import (
    VideoFrames,
    VideoInfo,
    VideoSampling,
    count_sampled_frames,
    media_size,
    sampling_of,
)
from packhorse.media.load import _preloaded as preloaded_metadata
from packhorse.types import MediaKind, MediaRef

MediaSize = tuple[int, int] | VideoInfo | int
"""(height, width) of an image; the :class:`VideoInfo` of the frames that are *fed* (``total_frames`` being
their number); the number of samples of a sound at the family's rate."""


@dataclass(frozen=True, slots=True)
class LoadedMedia:
    """Decoded media of one conversation, each kind in the order of the text."""

    images: list[Any]
    videos: list[VideoFrames]
    audios: list[tuple[Any, int]]

    def sizes(self, order: Iterable[MediaKind] | None = None) -> list[tuple[MediaKind, MediaSize]]:
        """Kind and size of each medium.

        Args:
            order: the kinds as the text mentions them; without it all images come first, then all videos,
                then all sounds.
        """
        sizes: dict[MediaKind, Iterator[MediaSize]] = {
            "image": ((image.height, image.width) for image in self.images),
            "video": (_fed(video) for video in self.videos),
            "audio": (len(array) for array, _ in self.audios),
        }
        if order is None:
            return [(kind, size) for kind, found in sizes.items() for size in found]
        return [(kind, next(sizes[kind])) for kind in order]


def _fed(video: VideoFrames) -> VideoInfo:
    frames, height, width = video.frames.shape[:3]
    return VideoInfo(frames, height, width, video.metadata.fps, video.metadata.duration)


def size_of(ref: MediaRef, sampling: VideoSampling, sampling_rate: int) -> MediaSize:
    """The size of a medium as the family is fed it, from its header.

    Args:
        ref: the medium.
        sampling: how many frames of a video are taken.
        sampling_rate: the rate to which sound is brought.

    Raises:
        BadSample: the medium is missing or broken, or its options make no sense.
    """
    found: Any = media_size(ref)
    if ref.kind == "image":
        height, width = found
        return height, width
    if ref.kind == "audio":
        samples, rate = found
        # As soxr rounds the length of what it resamples.
        return int(samples) if rate == sampling_rate else math.floor(samples * sampling_rate / rate + 0.5)
    ready = preloaded_metadata(ref)
    frames = (
        count_sampled_frames(found, sampling_of(ref, sampling), ref.options.get("frame_indices"))
        if ready is None
        else len(ready.frames_indices)
    )
    return VideoInfo(frames, found.height, found.width, found.fps, found.duration)
