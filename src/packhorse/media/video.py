"""Read the headers of videos, and decode sampled frames with their times.

:func:`probe_video` decodes no pixel. It costs a millisecond if the container has its number of frames (MP4,
MOV, AVI, a folder or list of frames; 50 for an hour of MP4), else one read of the file (MKV, WebM, TS).
:func:`load_video` decodes the frames of :func:`~packhorse.media.sample_frame_indices` and as few others as
possible, and keeps them in memory: frames x height x width x 3 bytes, up to a limit.

Files need ``pip install -e '.[video]'``; folders and lists of images do not.
"""

from __future__ import annotations

import importlib
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from packhorse.errors import BadSample, ConfigError, MissingDependency
from packhorse.media.container import VideoFile, open_video
from packhorse.media.failure import DEFAULT_MAX_BYTES, bad_media, check_bytes, read_error
from packhorse.media.images import DEFAULT_MAX_PIXELS, image_size, load_image
from packhorse.media.sampling import VideoInfo, VideoSampling, sample_frame_indices
from packhorse.media.source import Address, decoding, describe, local_path, locate, read_bytes

_IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
_DECORD_CONTAINERS = {"mp4", "matroska", "avi"}
_SAME_TIME = 1e-4  # seconds; far below the duration of a frame

Frames = Iterator[tuple[int, np.ndarray]]
Backend = Callable[[VideoFile, Any, Sequence[int]], Frames]


# --- folders and lists of images --------------------------------------------------------------------------


def _as_frames(source: object) -> list[Any] | None:
    """Return the frames of a folder, list or array of images, or None if ``source`` is a video file."""
    if isinstance(source, list | tuple) or (isinstance(source, np.ndarray) and source.ndim == 4):
        frames, expected = list(source), ""
    else:
        folder = local_path(source)
        if folder is None or not os.path.isdir(folder):
            return None
        frames, expected = _list_images(folder), f" (files named {', '.join(_IMAGE_SUFFIXES)})"
    if not frames:
        raise bad_media(f"{describe(source)}: the video has no frames{expected}")
    return frames


def _frames_info(frames: Sequence[Any], fps: float | None, max_pixels: int | None) -> VideoInfo:
    height, width = image_size(frames[0], max_pixels=max_pixels)
    return VideoInfo(len(frames), height, width, fps, len(frames) / fps if fps else None, is_file=False)


def _read_frames(
    frames: Sequence[Any], wanted: Sequence[int], info: VideoInfo, max_pixels: int | None
) -> Frames:
    for number in wanted:
        pixels = np.asarray(load_image(frames[number], max_pixels=max_pixels))
        if pixels.shape != (info.height, info.width, 3):
            raise bad_media(
                f"frame {number} ({describe(frames[number])}) is {pixels.shape[1]} x {pixels.shape[0]}, "
                f"expected {info.width} x {info.height} like the first frame"
            )
        yield number, pixels


def _list_images(folder: str) -> list[str]:
    def natural(name: str) -> tuple[list[tuple[bool, int, str]], str]:
        # The name itself decides between frame1 and frame01.
        pieces = re.findall(r"\d+|\D+", name)
        return [(not p.isdecimal(), int(p) if p.isdecimal() else 0, p) for p in pieces], name

    try:
        names = os.listdir(folder)
    except OSError as error:
        detail = f"{describe(folder)} cannot be listed ({error.strerror})"
        raise read_error(error, detail, "missing_media") from error
    images = (name for name in names if name.lower().endswith(_IMAGE_SUFFIXES) and not name.startswith("."))
    return [os.path.join(folder, name) for name in sorted(images, key=natural)]


# --- decoders ---------------------------------------------------------------------------------------------


def _decode_with_pyav(video: VideoFile, source: object, wanted: Sequence[int]) -> Frames:
    return video.decode(wanted)


def _decode_with_decord(video: VideoFile, source: object, wanted: Sequence[int]) -> Frames:
    decord = _import("decord", "decord")
    # Silent errors of decord 0.6, found by comparing every frame.
    if video.turns % 2:
        raise _not_supported(video, "decord garbles videos that are turned by 90 degrees")
    if not set(video.container.format.name.split(",")) & _DECORD_CONTAINERS:
        detail = "decord seeks correctly in MP4, MKV and AVI files only"
        raise _not_supported(video, f"{detail}, this is {video.container.format.name}")
    path = local_path(source)
    try:
        file = io.BytesIO(read_bytes(source)) if path is None else path
        reader = decord.VideoReader(file, ctx=decord.cpu(0))
        if len(reader) != len(video.packets):
            raise _other_count(video, "decord", len(reader))
        if video.has_open_groups:
            # Its seeking is two frames off; reading from the start is not.
            chosen = set(wanted)
            for number in range(wanted[-1] + 1):
                pixels = reader.next().asnumpy()
                if number in chosen:
                    yield number, pixels
        else:
            yield from zip(wanted, reader.get_batch(list(wanted)).asnumpy(), strict=True)
    except (decord.DECORDError, RuntimeError) as error:
        raise _decode_error(video, "decord", error) from error


def _decode_with_torchcodec(video: VideoFile, source: object, wanted: Sequence[int]) -> Frames:
    decoders = _import("torchcodec.decoders", "torchcodec")
    path = local_path(source)
    try:
        decoder = decoders.VideoDecoder(read_bytes(source) if path is None else path, dimension_order="NHWC")
        if len(decoder) != len(video.packets):
            raise _other_count(video, "torchcodec", len(decoder))
        batch = decoder.get_frames_at(indices=list(wanted))
    except BadSample:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        raise _decode_error(video, "torchcodec", error) from error
    if video.timed:
        # If an edit list removes the start, torchcodec 0.13 returns other frames than requested.
        for number, seconds in zip(wanted, batch.pts_seconds.tolist(), strict=True):
            if abs(seconds - video.seconds(number)) > _SAME_TIME:
                raise _not_supported(
                    video,
                    f"torchcodec gives the frame of {seconds:.3f} s for frame {number}, "
                    f"which is shown at {video.seconds(number):.3f} s",
                )
    yield from zip(wanted, batch.data.numpy(), strict=True)


_BACKENDS: dict[str, Backend] = {
    "pyav": _decode_with_pyav,
    "decord": _decode_with_decord,
    "torchcodec": _decode_with_torchcodec,
}


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ModuleNotFoundError, RuntimeError, OSError) as error:
        # torchcodec raises RuntimeError if it does not find the system's FFmpeg libraries.
        first_line = (str(error).splitlines() or [""])[0]
        raise MissingDependency(
            f"backend={package!r} cannot be loaded ({first_line}): "
            f"pip install {package}, or use backend='pyav'"
        ) from error


def _decode_error(video: VideoFile, name: str, error: Exception) -> BadSample:
    first_line = (str(error).splitlines() or [""])[0][:200]
    return bad_media(f"{video.name}: {name} could not decode it ({first_line})")


def _other_count(video: VideoFile, name: str, count: int) -> BadSample:
    return _not_supported(video, f"{name} finds {count:,} frames, the file has {len(video.packets):,}")


def _not_supported(video: VideoFile, detail: str) -> BadSample:
    return bad_media(f"{video.name}: {detail}; use backend='pyav'")


# --- videos -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VideoMetadata:
    """The original video and the sampled frames, in the fields of transformers' ``VideoMetadata``.

    ``frames_indices`` are positions in the original video, so times are right for any number of frames.
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
        """Seconds from the start for each sampled frame."""
        if self.fps is None:
            raise ConfigError.of(
                "fps", None, "the frames have no rate: pass fps= with a list or folder of them"
            )
        return [index / self.fps for index in self.frames_indices]

    def as_dict(self) -> dict[str, Any]:
        """Return a dict as processors take it (``video_metadata=[…]``)."""
        return {**asdict(self), "frames_indices": list(self.frames_indices)}


@dataclass(frozen=True, slots=True, eq=False)
class VideoFrames:
    """Decoded frames: ``frames`` is [T, H, W, 3] of uint8, RGB, upright."""

    frames: np.ndarray
    metadata: VideoMetadata


@decoding
def probe_video(
    source: object, *, fps: float | None = None, max_pixels: int | None = DEFAULT_MAX_PIXELS
) -> VideoInfo:
    """Return the header of a video, without decoding a pixel.

    Args:
        source: a video file (path, address, ``db.lmdb::key``, bytes, dict), or frames: a folder of images
            or a list of paths or PIL images.
        fps: the rate of a folder or list of frames; a file has its own.
        max_pixels: raise for larger frames, like :func:`load_video`.

    Raises:
        BadSample: ``missing_media``, ``broken_media``, ``media_too_large``.
    """
    if (frames := _as_frames(source)) is not None:
        return _frames_info(frames, fps, max_pixels)
    with open_video(source) as video:
        info = video.info()
        _check_info(info, max_pixels, video.name)
        return info


@decoding
def load_video(
    source: object,
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
    """Decode the frames that a model gets.

    Args:
        source: as for :func:`probe_video`.
        sampling: how many frames; None takes all of them.
        frame_indices: take exactly these frames of the original video, in this order.
        fps: replaces ``sampling.fps``. For a folder or list of frames it is their own rate instead: it gives
            them times, and all of them are used (up to ``max_frames``).
        min_frames: replaces ``sampling.min_frames``.
        max_frames: replaces ``sampling.max_frames``.
        num_frames: replaces ``sampling.num_frames``.
        backend: ``"auto"`` and ``"pyav"`` decode with PyAV; ``"decord"`` and ``"torchcodec"`` with those.
        max_pixels: raise for larger frames before decoding one.
        max_bytes: raise if the frames take more memory (frames x height x width x 3), before anything is
            allocated; None for no limit.

    Raises:
        BadSample: as :func:`probe_video`; a truncated file and frames that do not exist are ``broken_media``,
            more than ``max_bytes`` is ``media_too_large``.
    """
    backend = "pyav" if backend == "auto" else backend
    if backend not in _BACKENDS:
        raise ConfigError.of("backend", backend, f"expected auto, {', '.join(_BACKENDS)}")
    sampling = (sampling or VideoSampling()).override(
        fps=fps, min_frames=min_frames, max_frames=max_frames, num_frames=num_frames
    )
    name = describe(source)
    if (frames := _as_frames(source)) is not None:
        info = _frames_info(frames, fps, max_pixels)
        indices = frame_positions(info, sampling, frame_indices, name, max_bytes)
        decoded = _read_frames(frames, np.unique(indices).tolist(), info, max_pixels)
        return _gather_frames(decoded, indices, info, "pil", name)
    if not isinstance(source, bytes) and isinstance(locate(source), Address):
        # The file is read twice (the list of frames, then the frames): fetch it once.
        source = read_bytes(source)
    with open_video(source, name) as video:
        _check_info(video.info(), max_pixels, name)
        video.check_complete()
        info = video.info(exact=True)
        indices = frame_positions(info, sampling, frame_indices, name, max_bytes)
        decoded = _BACKENDS[backend](video, source, np.unique(indices).tolist())
        return _gather_frames(decoded, indices, info, backend, name)


def frame_positions(
    info: VideoInfo, sampling: VideoSampling, frame_indices: Any, name: str, max_bytes: int | None
) -> np.ndarray:
    """Return :func:`sample_frame_indices`; raise if the frames would need more than ``max_bytes``.

    Errors start with ``name``, the name of the source.
    """
    try:
        indices = sample_frame_indices(info, sampling, frame_indices)
    except BadSample as error:
        raise bad_media(f"{name}: {error.detail}", error.reason) from error
    check_bytes(
        len(indices) * info.height * info.width * 3,
        max_bytes,
        f"{name}: {len(indices):,} frames of {info.width:,} x {info.height:,}",
        "take fewer frames (fps, num_frames or max_frames)",
    )
    return indices


def _check_info(info: VideoInfo, max_pixels: int | None, name: str) -> None:
    if info.total_frames < 1:
        raise bad_media(f"{name}: the video has no frames")
    pixels = info.height * info.width
    if pixels < 1:
        raise bad_media(f"{name}: the header has no frame size")
    if max_pixels is not None and pixels > max_pixels:
        size = f"{info.width:,} x {info.height:,} = {pixels:,} pixels, more than max_pixels={max_pixels:,}"
        raise bad_media(f"{name} has frames of {size}", "media_too_large")


def _gather_frames(
    decoded: Frames, indices: np.ndarray, info: VideoInfo, backend_name: str, name: str
) -> VideoFrames:
    frames = np.empty((len(indices), info.height, info.width, 3), np.uint8)
    for number, pixels in decoded:
        if pixels.shape != frames.shape[1:]:
            raise bad_media(
                f"{name}: frame {number} is {pixels.shape[1]} x {pixels.shape[0]}, expected "
                f"{info.width} x {info.height} as in the header"
            )
        frames[indices == number] = pixels
    positions = tuple(indices.tolist())
    metadata = VideoMetadata(
        info.total_frames, info.fps, info.width, info.height, info.duration, backend_name, positions
    )
    return VideoFrames(frames, metadata)
