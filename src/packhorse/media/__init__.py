"""Media: where an image, a video or a sound clip is goes in; its size, or its pixels or samples, come out.

Sizes come from headers alone and cost microseconds; decoding happens only in ``load_*``. No source is ever
changed. A failure that is the data's fault is a :class:`~packhorse.errors.BadSample` that names it; a failure
of the machine (no file handles left, a broken disk) is a :class:`~packhorse.errors.SystemFault`.
Importing this imports none of torch, av, pyarrow, fsspec, lmdb or soundfile.
"""

from packhorse.media.audio import audio_info, load_audio
from packhorse.media.failure import DEFAULT_MAX_BYTES
from packhorse.media.images import DEFAULT_MAX_PIXELS, image_size, load_image
from packhorse.media.loading import load_media, media_size, sampling_of
from packhorse.media.sampling import VideoInfo, VideoSampling, count_sampled_frames, sample_frame_indices
from packhorse.media.source import confine, describe, local_path, open_source, read_bytes, resolve
from packhorse.media.video import VideoFrames, VideoMetadata, load_video, probe_video

__all__ = [
    "DEFAULT_MAX_BYTES",
    "DEFAULT_MAX_PIXELS",
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
    "probe_video",
    "read_bytes",
    "resolve",
    "sample_frame_indices",
    "sampling_of",
]
