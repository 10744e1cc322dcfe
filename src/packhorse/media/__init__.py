"""Locate, measure and decode images, videos and audio clips.

Sizes come from headers and cost microseconds; only ``load_*`` decodes. A source is never changed. Bad data
raise :class:`~packhorse.errors.BadSample`, which names the source; a fault of the machine (no file handles
left, a broken disk) raises :class:`~packhorse.errors.SystemFault`.
Importing this imports none of torch, av, pyarrow, fsspec, lmdb or soundfile.
"""

from packhorse.media.audio import audio_info, load_audio
from packhorse.media.failure import DEFAULT_MAX_BYTES
from packhorse.media.images import DEFAULT_MAX_PIXELS, image_size, load_image
from packhorse.media.loading import MediaSize, load_media, media_size, placeholder_media, sampling_of
from packhorse.media.sampling import VideoInfo, VideoSampling, count_sampled_frames, sample_frame_indices
from packhorse.media.source import confine, describe, local_path, open_source, read_bytes, resolve
from packhorse.media.video import VideoFrames, VideoMetadata, load_video, probe_video

__all__ = [
    "DEFAULT_MAX_BYTES",
    "DEFAULT_MAX_PIXELS",
    "MediaSize",
    "VideoFrames",
    "VideoInfo",
    "VideoMetadata",
    "VideoSampling",
    "audio_info",
    "confine",
    "count_sampled_frames",
    "describe",
    "image_size",
    "load_audio",
    "load_image",
    "load_media",
    "load_video",
    "local_path",
    "media_size",
    "open_source",
    "placeholder_media",
    "probe_video",
    "read_bytes",
    "resolve",
    "sample_frame_indices",
    "sampling_of",
]
