"""The media of one conversation: decoded, or their sizes alone.

A size is what decides how many tokens a medium has. It comes from the decoded medium or, without decoding
one, from its header; both give the same number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from packhorse.errors import BadSample
from packhorse.media import (
    DEFAULT_MAX_BYTES,
    VideoFrames,
    VideoInfo,
    VideoSampling,
    describe,
    media_size,
    probe_video,
    sample_frame_indices,
    sampling_of,
)
from packhorse.media.audio import check_samples
from packhorse.media.failure import bad, check_bytes
from packhorse.media.loading import _preloaded as preloaded_metadata
from packhorse.types import MediaKind, MediaRef

MediaSize = tuple[int, int] | VideoInfo | int
"""(height, width) of an image; the :class:`VideoInfo` of the frames that are *fed* (``total_frames`` being
their number, ``indices`` which of the original they are); the number of samples of a sound at the family's
rate."""

_RATE_OF_UNKNOWN = 24
"""What processors take for the rate of a video whose rate nobody knows."""


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
    metadata = video.metadata
    return VideoInfo(frames, height, width, metadata.fps, metadata.duration, metadata.frames_indices)


def frame_numbers(info: VideoInfo) -> range | tuple[int, ...]:
    """Where in the original video the frames are."""
    return range(info.total_frames) if info.indices is None else info.indices


def frame_times(info: VideoInfo) -> list[float]:
    """Seconds from the start for each frame, as processors take them from its metadata."""
    fps = _RATE_OF_UNKNOWN if info.fps is None else info.fps
    return [number / fps for number in frame_numbers(info)]


def size_of(ref: MediaRef, sampling: VideoSampling, sampling_rate: int) -> MediaSize:
    """The size of a medium as the family is fed it, from its header.

    Args:
        ref: the medium.
        sampling: how many frames of a video are taken.
        sampling_rate: the rate to which sound is brought.

    Raises:
        BadSample: the medium is missing, broken or too large to be decoded, or its options make no sense.
    """
    if ref.kind == "video":
        return _video_size(ref, sampling)
    found: Any = media_size(ref)
    if ref.kind == "image":
        height, width = found
        return height, width
    samples, rate = found
    # As soxr rounds the length of what it resamples.
    fed = int(samples) if rate == sampling_rate else math.floor(samples * sampling_rate / rate + 0.5)
    check_samples(max(samples, fed), DEFAULT_MAX_BYTES, ref.source)
    return fed


def _video_size(ref: MediaRef, sampling: VideoSampling) -> VideoInfo:
    ready = preloaded_metadata(ref)
    if ready is not None:
        # The frames that are there count, whatever size the original had.
        shown = probe_video(ref.source)
        indices = ready.frames_indices
        return VideoInfo(len(indices), shown.height, shown.width, ready.fps, ready.duration, indices)
    found: Any = media_size(ref)
    wishes = sampling_of(ref, sampling)
    try:
        chosen = sample_frame_indices(found, wishes, ref.options.get("frame_indices"))
    except BadSample as error:
        raise bad(f"{describe(ref.source)}: {error.detail}", error.reason) from error
    size: VideoInfo = replace(found, total_frames=len(chosen), indices=tuple(chosen.tolist()))
    check_bytes(
        size.total_frames * size.height * size.width * 3,
        DEFAULT_MAX_BYTES,
        f"{describe(ref.source)}: {size.total_frames:,} frames of {size.width:,} x {size.height:,}",
        "take fewer frames (fps, num_frames or max_frames)",
    )
    return size
