"""Decode or measure a media item of any kind, and make placeholders.

``ref.source`` is the source of a media item, ``ref.options`` are the settings in its row (``fps``,
``frame_indices``, …). The reference and its row are not changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from PIL import Image

from packhorse.errors import BadSample, ConfigError
from packhorse.media.audio import audio_info, load_audio
from packhorse.media.failure import DEFAULT_MAX_BYTES, bad_media
from packhorse.media.images import DEFAULT_MAX_PIXELS, image_size, load_image
from packhorse.media.sampling import VideoInfo, VideoSampling
from packhorse.media.settings import check_frame_limits, size_settings
from packhorse.media.source import describe
from packhorse.media.video import VideoFrames, VideoMetadata, load_video, probe_video
from packhorse.types import MediaKind, MediaRef

MediaSize = tuple[int, int] | VideoInfo | int
"""(height, width) of an image; the :class:`VideoInfo` of the frames that the model gets (``total_frames`` is
their number, ``indices`` their positions in the original video); the number of samples of an audio clip."""

_VIDEO_OPTIONS = ("fps", "min_frames", "max_frames", "num_frames")


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
            ``frame_indices`` override ``sampling``; a preloaded video (with ``video_metadata``) is not
            sampled. An audio clip as a bare array has its rate in the option ``sampling_rate``.
        sampling: how many frames of a video to take; None takes all.
        sampling_rate: resample audio to this rate; None keeps its own.
        exif: turn images upright by their EXIF orientation.
        backend: the decoder for videos.
        max_pixels: the largest image or video frame that is decoded.
        max_bytes: the most memory that a decoded video or clip may take.

    Raises:
        BadSample: the media item is missing, broken or too large, or its options are invalid.
    """
    settings_of(ref)  # raises for an invalid one
    if ref.kind == "image":
        return load_image(ref.source, exif=exif, max_pixels=max_pixels)
    if ref.kind == "audio":
        return load_audio(_audio_source(ref), sampling_rate=sampling_rate, max_bytes=max_bytes)
    if (metadata := preloaded_metadata(ref)) is not None:
        loaded = load_video(ref.source, max_pixels=max_pixels, max_bytes=max_bytes)
        return VideoFrames(loaded.frames, metadata)
    sampling_of(ref, sampling)  # an invalid option is the row's fault, not the caller's
    return load_video(
        ref.source,
        sampling=sampling,
        frame_indices=ref.options.get("frame_indices"),
        backend=backend,
        max_pixels=max_pixels,
        max_bytes=max_bytes,
        **_video_options(ref),
    )


def media_size(ref: MediaRef) -> tuple[int, int] | VideoInfo:
    """Return the size of a media item without decoding it.

    Returns:
        (height, width) of an image, the :class:`VideoInfo` of a video, (samples, rate) of an audio clip.
    """
    settings_of(ref)  # raises for an invalid one
    if ref.kind == "image":
        return image_size(ref.source)
    if ref.kind == "audio":
        return audio_info(_audio_source(ref))
    if (metadata := preloaded_metadata(ref)) is not None:
        return VideoInfo(
            metadata.total_num_frames, metadata.height, metadata.width, metadata.fps, metadata.duration
        )
    sampling_of(ref, None)  # raises for an invalid option
    return probe_video(ref.source, fps=ref.options.get("fps"))


def placeholder_media(kind: MediaKind, size: MediaSize, sampling_rate: int = 16_000) -> MediaRef:
    """Return a media item of the given size without content: a white image or video, or silence."""
    if isinstance(size, tuple):
        height, width = size
        return MediaRef(kind, Image.new("RGB", (width, height), "white"))
    if not isinstance(size, VideoInfo):
        return MediaRef(kind, (np.zeros(size, np.float32), sampling_rate))
    frames = np.full((size.total_frames, size.height, size.width, 3), 255, np.uint8)
    indices = tuple(range(size.total_frames)) if size.indices is None else size.indices
    # With complete metadata the frames count as already sampled, and keep their times.
    metadata = VideoMetadata(
        max(indices) + 1, size.fps, size.width, size.height, size.duration, None, indices
    )
    return MediaRef(kind, frames, {"video_metadata": metadata.as_dict()})


def sampling_of(ref: MediaRef, sampling: VideoSampling | None) -> VideoSampling:
    """Return ``sampling`` with the options of the video's row; raise ``wrong_format`` for an invalid one."""
    try:
        result = (sampling or VideoSampling()).override(**_video_options(ref))
        check_frame_limits(ref.options)
    except ConfigError as error:
        raise bad_media(f"{describe(ref.source)}: {error}", "wrong_format") from error
    return result


def settings_of(ref: MediaRef) -> dict[str, int]:
    """Return the settings for the size of a media item; raise ``wrong_format`` for an invalid one.

    They are for encoding (:mod:`packhorse.families`): loading and measuring give the item's own size.
    """
    if not ref.options:
        return {}
    try:
        return size_settings(ref.kind, ref.options)
    except BadSample as error:
        raise bad_media(f"{describe(ref.source)}: {error.detail}", error.reason) from error


def _video_options(ref: MediaRef) -> dict[str, Any]:
    return {name: ref.options.get(name) for name in _VIDEO_OPTIONS}


def _audio_source(ref: MediaRef) -> Any:
    rate = ref.options.get("sampling_rate")
    bare = hasattr(ref.source, "shape") or (isinstance(ref.source, list) and len(ref.source) != 2)
    return (ref.source, rate) if bare and rate is not None else ref.source


def preloaded_metadata(ref: MediaRef) -> VideoMetadata | None:
    """Return the metadata of frames that are already sampled, or None if there are none or too few."""
    metadata = ref.options.get("video_metadata")
    names = [field.name for field in fields(VideoMetadata)]
    if not isinstance(ref.source, list | tuple | np.ndarray) or not isinstance(metadata, Mapping):
        return None
    known = {name: metadata[name] for name in names if metadata.get(name) is not None}
    if "frames_indices" not in known or not {"total_num_frames", "height", "width"} <= known.keys():
        return None
    indices = tuple(known["frames_indices"])
    if len(indices) != len(ref.source):
        raise bad_media(
            f"{describe(ref.source)}: video_metadata does not describe these frames: it has {len(indices)} "
            f"frames_indices, expected {len(ref.source)}",
            "wrong_format",
        )
    return VideoMetadata(**{**dict.fromkeys(names), **known, "frames_indices": indices})
