"""From a reference to pixels or sound: one door for all kinds of media.

``ref.source`` says where a media item is, ``ref.options`` what its row wishes (``fps``, ``frame_indices``,
…). The result is new; the reference and the row it came from stay as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from PIL import Image

from packhorse.errors import ConfigError
from packhorse.media.audio import audio_info, load_audio
from packhorse.media.failure import DEFAULT_MAX_BYTES, bad
from packhorse.media.images import DEFAULT_MAX_PIXELS, image_size, load_image
from packhorse.media.sampling import VideoInfo, VideoSampling
from packhorse.media.source import describe
from packhorse.media.video import VideoFrames, VideoMetadata, load_video, probe_video
from packhorse.types import MediaRef

_VIDEO_WISHES = ("fps", "min_frames", "max_frames", "num_frames")


def load_media(
    ref: MediaRef,
    *,
    sampling: VideoSampling | None = None,
    sampling_rate: int | None = None,
    exif: bool = True,
    backend: str = "auto",
    max_pixels: int | None = DEFAULT_MAX_PIXELS,
    max_bytes: int | None = DEFAULT_MAX_BYTES,
) -> Image.Image | VideoFrames | tuple[np.ndarray, int]:
    """Decode one media item: an RGB image, a :class:`VideoFrames`, or (samples, rate).

    Args:
        ref: the media item. A video's options ``fps``, ``min_frames``, ``max_frames``, ``num_frames`` and
            ``frame_indices`` override ``sampling``; a video that was preloaded (it has ``video_metadata``)
            is not sampled again. Sound given as a bare array has its rate in the option ``sampling_rate``.
        sampling: how many frames of a video to take; None takes all.
        sampling_rate: the rate to resample sound to; None keeps its own.
        exif: turn images upright by their EXIF orientation.
        backend: the decoder for videos.
        max_pixels: the largest image or video frame that is decoded.
        max_bytes: the most memory that a decoded video or clip may take.

    Raises:
        BadSample: the media item is missing, broken or too large, or its options make no sense.
    """
    if ref.kind == "image":
        return load_image(ref.source, exif=exif, max_pixels=max_pixels)
    if ref.kind == "audio":
        return load_audio(_sound(ref), sampling_rate=sampling_rate, max_bytes=max_bytes)
    metadata = _preloaded(ref)
    if metadata is not None:
        loaded = load_video(ref.source, max_pixels=max_pixels, max_bytes=max_bytes)
        return VideoFrames(loaded.frames, metadata)
    sampling_of(ref, sampling)  # a wish that makes no sense is the row's fault, not the caller's
    return load_video(
        ref.source,
        sampling=sampling,
        frame_indices=ref.options.get("frame_indices"),
        backend=backend,
        max_pixels=max_pixels,
        max_bytes=max_bytes,
        **_wishes(ref),
    )


def media_size(
    ref: MediaRef, *, exif: bool = True, max_pixels: int | None = DEFAULT_MAX_PIXELS
) -> tuple[int, int] | VideoInfo:
    """What can be told about a media item without decoding it.

    Returns:
        (height, width) of an image, the :class:`VideoInfo` of a video, (samples, rate) of sound.
    """
    if ref.kind == "image":
        return image_size(ref.source, exif=exif, max_pixels=max_pixels)
    if ref.kind == "audio":
        return audio_info(_sound(ref))
    metadata = _preloaded(ref)
    if metadata is not None:
        return VideoInfo(
            metadata.total_num_frames, metadata.height, metadata.width, metadata.fps, metadata.duration
        )
    sampling_of(ref, None)  # as above
    return probe_video(ref.source, fps=ref.options.get("fps"), max_pixels=max_pixels)


def sampling_of(ref: MediaRef, sampling: VideoSampling | None) -> VideoSampling:
    """``sampling`` with the wishes of the video's own row in its place; a wish that makes no sense raises."""
    try:
        return (sampling or VideoSampling()).override(**_wishes(ref))
    except ConfigError as error:
        raise bad(f"{describe(ref.source)}: {error}", "wrong_format") from error


def _wishes(ref: MediaRef) -> dict[str, Any]:
    return {name: ref.options.get(name) for name in _VIDEO_WISHES}


def _sound(ref: MediaRef) -> Any:
    rate = ref.options.get("sampling_rate")
    bare = hasattr(ref.source, "shape") or (isinstance(ref.source, list) and len(ref.source) != 2)
    return (ref.source, rate) if bare and rate is not None else ref.source


def _preloaded(ref: MediaRef) -> VideoMetadata | None:
    """The metadata of frames that were sampled before; incomplete ones do not count as such."""
    metadata = ref.options.get("video_metadata")
    names = [field.name for field in fields(VideoMetadata)]
    if not isinstance(ref.source, list | tuple | np.ndarray) or not isinstance(metadata, Mapping):
        return None
    known = {name: metadata[name] for name in names if metadata.get(name) is not None}
    if "frames_indices" not in known or not {"total_num_frames", "height", "width"} <= known.keys():
        return None
    indices = tuple(known["frames_indices"])
    if len(indices) != len(ref.source):
        raise bad(
            f"{describe(ref.source)}: video_metadata does not describe these frames: it has {len(indices)} "
            f"frames_indices, expected {len(ref.source)}",
            "wrong_format",
        )
    return VideoMetadata(**{**dict.fromkeys(names), **known, "frames_indices": indices})
