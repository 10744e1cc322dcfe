"""Videos: a source goes in; its header, or the pixels of evenly spread frames with their times, come out.

:func:`probe_video` decodes no pixel. It costs a millisecond where the container tells its number of frames
(MP4, MOV, AVI, a folder or list of frames; 50 for an hour of MP4), and one read of the file where it does not
(MKV, WebM, TS).
:func:`load_video` decodes the frames that :func:`~packhorse.media.sample_frame_indices` names, and as few
others as it can, and holds them all in memory: frames x height x width x 3 bytes, up to a limit.

Needs ``pip install 'packhorse[video]'`` for files; frames as pictures need nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from packhorse.errors import BadSample, ConfigError
from packhorse.media.container import open_video
from packhorse.media.failure import bad
from packhorse.media.frames import as_frames, frames_info, read_frames
from packhorse.media.images import DEFAULT_MAX_PIXELS
from packhorse.media.limits import DEFAULT_MAX_BYTES, check_bytes
from packhorse.media.sampling import VideoInfo, VideoSampling, sample_frame_indices
from packhorse.media.source import Address, describe, locate, read_bytes
from packhorse.media.video_backends import backend as find_backend


@dataclass(frozen=True, slots=True)
class VideoMetadata:
    """The original video and which frames were taken, in the fields of transformers' ``VideoMetadata``.

    ``frames_indices`` count in the original video, so times are right however few frames were taken.
    """

    total_num_frames: int
    fps: float | None
    width: int
    height: int
    duration: float | None
    video_backend: str | None
    frames_indices: tuple[int, ...]

    @property
    def timestamps(self) -> list[float]:
        """Seconds from the start for each frame taken."""
        if self.fps is None:
            raise ConfigError(
                "the frames have no rate, so no times: pass fps= with a list or folder of frames"
            )
        return [index / self.fps for index in self.frames_indices]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as processors take them (``video_metadata=[…]``)."""
        return {**asdict(self), "frames_indices": list(self.frames_indices)}


@dataclass(frozen=True, slots=True, eq=False)
class VideoFrames:
    """Decoded frames: ``frames`` is [T, H, W, 3] of uint8, RGB, upright."""

    frames: np.ndarray
    metadata: VideoMetadata


def probe_video(
    source: Any, *, fps: float | None = None, max_pixels: int | None = DEFAULT_MAX_PIXELS
) -> VideoInfo:
    """What the header tells, no pixel decoded.

    Args:
        source: a video file (path, address, ``db.lmdb::key``, bytes, dict), or frames: a folder of pictures
            or a list of paths or PIL images.
        fps: the rate at which a folder or list of frames was taken; a file knows its own.
        max_pixels: refuse larger frames, as :func:`load_video` does.

    Raises:
        BadSample: ``missing_media``, ``broken_media``, ``media_too_large``.
    """
    frames = as_frames(source)
    if frames is not None:
        return frames_info(frames, fps, max_pixels)
    with open_video(source) as video:
        info = video.info()
        _check(info, max_pixels, video.name)
        return info


def load_video(
    source: Any,
    *,
    sampling: VideoSampling | None = None,
    frame_indices: Sequence[int] | np.ndarray | None = None,
    fps: float | None = None,
    min_frames: int | None = None,
    max_frames: int | None = None,
    num_frames: int | None = None,
    backend: str = "auto",
    max_pixels: int | None = DEFAULT_MAX_PIXELS,
    max_bytes: int | None = DEFAULT_MAX_BYTES,
) -> VideoFrames:
    """Decode the frames a model is to see.

    Args:
        source: as for :func:`probe_video`.
        sampling: how many frames; None takes all of them.
        frame_indices: take exactly these frames of the original video, in this order.
        fps: in place of ``sampling.fps``. For a folder or list of frames it is the rate at which they were
            taken instead: it gives them times, and all of them are used (up to ``max_frames``).
        min_frames: in place of ``sampling.min_frames``.
        max_frames: in place of ``sampling.max_frames``.
        num_frames: in place of ``sampling.num_frames``.
        backend: ``"auto"`` and ``"pyav"`` decode with PyAV; ``"decord"`` and ``"torchcodec"`` with those.
        max_pixels: refuse larger frames before decoding one.
        max_bytes: refuse frames that take more memory (frames taken x height x width x 3) before anything is
            allocated; None is no limit.

    Raises:
        BadSample: as :func:`probe_video`; a truncated file and frames that do not exist are ``broken_media``,
            more than ``max_bytes`` is ``media_too_large``.
    """
    real_name, decode = find_backend(backend)
    wishes = (sampling or VideoSampling()).override(
        fps=fps, min_frames=min_frames, max_frames=max_frames, num_frames=num_frames
    )
    frames = as_frames(source)
    if frames is not None:
        info = frames_info(frames, fps, max_pixels)
        indices = _indices(info, wishes, frame_indices, source)
        _check_memory(len(indices), info, max_bytes, describe(source))
        decoded: Iterable[tuple[int, np.ndarray]] = read_frames(
            frames, np.unique(indices).tolist(), info, max_pixels
        )
        return _gathered(decoded, indices, info, "pil", describe(source))
    if not isinstance(source, bytes) and isinstance(locate(source), Address):
        # The file is read through twice (its list of frames, then the frames): fetch it once.
        name, source = describe(source), read_bytes(source)
    else:
        name = describe(source)
    with open_video(source, name) as video:
        _check(video.info(), max_pixels, name)
        video.check_complete()
        info = video.info(exact=True)
        indices = _indices(info, wishes, frame_indices, name)
        _check_memory(len(indices), info, max_bytes, name)
        decoded = decode(video, source, np.unique(indices).tolist())
        return _gathered(decoded, indices, info, real_name, name)


def _indices(info: VideoInfo, sampling: VideoSampling, chosen: Any, source: Any) -> np.ndarray:
    try:
        return sample_frame_indices(info, sampling, chosen)
    except BadSample as error:
        raise bad(f"{describe(source)}: {error.detail}", error.reason) from error


def _check(info: VideoInfo, max_pixels: int | None, name: str) -> None:
    if info.total_frames < 1:
        raise bad(f"{name}: the video has no frames", "broken_media")
    pixels = info.height * info.width
    if pixels < 1:
        raise bad(f"{name}: the header tells no picture size", "broken_media")
    if max_pixels is not None and pixels > max_pixels:
        raise bad(
            f"{name} has frames of {info.width:,} x {info.height:,} = {pixels:,} pixels, "
            f"more than max_pixels={max_pixels:,}",
            "media_too_large",
        )


def _check_memory(frames: int, info: VideoInfo, max_bytes: int | None, name: str) -> None:
    check_bytes(
        frames * info.height * info.width * 3,
        max_bytes,
        f"{name}: {frames:,} frames of {info.width:,} x {info.height:,}",
        "take fewer frames (fps, num_frames or max_frames)",
    )


def _gathered(
    decoded: Iterable[tuple[int, np.ndarray]],
    indices: np.ndarray,
    info: VideoInfo,
    backend_name: str,
    name: str,
) -> VideoFrames:
    frames = np.empty((len(indices), info.height, info.width, 3), np.uint8)
    for number, pixels in decoded:
        if pixels.shape != frames.shape[1:]:
            raise bad(
                f"{name}: frame {number} is {pixels.shape[1]} x {pixels.shape[0]}, expected "
                f"{info.width} x {info.height} as the header says",
                "broken_media",
            )
        frames[indices == number] = pixels
    metadata = VideoMetadata(
        total_num_frames=info.total_frames,
        fps=info.fps,
        width=info.width,
        height=info.height,
        duration=info.duration,
        video_backend=backend_name,
        frames_indices=tuple(indices.tolist()),
    )
    return VideoFrames(frames, metadata)
