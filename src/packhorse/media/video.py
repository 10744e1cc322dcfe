"""Videos: a source goes in; its header, or the pixels of evenly spread frames with their times, come out.

:func:`probe_video` decodes no pixel. It costs a millisecond where the container tells its number of frames
(MP4, MOV, AVI, a folder or list of frames; 50 for an hour of MP4), and one read of the file where it does not
(MKV, WebM, TS).
:func:`load_video` decodes the frames that :func:`~packhorse.media.sample_frame_indices` names, and as few
others as it can, and holds them all in memory: frames x height x width x 3 bytes, up to a limit.

Needs ``pip install 'packhorse[video]'`` for files; frames as images need nothing.
"""

from __future__ import annotations

import importlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from packhorse.errors import BadSample, ConfigError, MissingDependency
from packhorse.media.container import VideoFile, open_video
from packhorse.media.failure import DEFAULT_MAX_BYTES, bad, check_bytes, unreadable
from packhorse.media.images import DEFAULT_MAX_PIXELS, image_size, load_image
from packhorse.media.sampling import VideoInfo, VideoSampling, sample_frame_indices
from packhorse.media.source import Address, describe, local_path, locate, read_bytes

_PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


def as_frames(source: Any) -> list[Any] | None:
    """The frames of a folder or list, or None where ``source`` is a video file.

    Args:
        source: a list or tuple of image sources, an array of frames x height x width x 3 bytes, or a folder.
    """
    if isinstance(source, list | tuple) or (isinstance(source, np.ndarray) and source.ndim == 4):
        frames = list(source)
    else:
        folder = local_path(source)
        if folder is None or not _is_folder(folder):
            return None
        frames = _images(folder)
    if not frames:
        wanted = (
            "" if isinstance(source, list | tuple | np.ndarray) else f" (files named {', '.join(_PICTURES)})"
        )
        raise bad(f"{describe(source)}: the video has no frames{wanted}", "broken_media")
    return frames


def frames_info(
    frames: Sequence[Any], fps: float | None, max_pixels: int | None = DEFAULT_MAX_PIXELS
) -> VideoInfo:
    """What can be told without decoding: the number of frames and the size of the first."""
    height, width = image_size(frames[0], max_pixels=max_pixels)
    return VideoInfo(len(frames), height, width, fps, len(frames) / fps if fps else None, is_file=False)


def read_frames(
    frames: Sequence[Any],
    wanted: Sequence[int],
    info: VideoInfo,
    max_pixels: int | None = DEFAULT_MAX_PIXELS,
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (frame number, RGB pixels); a frame of another size than the first one is ``broken_media``."""
    for number in wanted:
        pixels = np.asarray(load_image(frames[number], max_pixels=max_pixels))
        if pixels.shape != (info.height, info.width, 3):
            raise bad(
                f"frame {number} ({describe(frames[number])}) is {pixels.shape[1]} x {pixels.shape[0]}, "
                f"expected {info.width} x {info.height} like the first frame",
                "broken_media",
            )
        yield number, pixels


def _is_folder(path: str) -> bool:
    try:
        return os.path.isdir(path)
    except ValueError:  # not a possible file name; opening it will say so
        return False


def _images(folder: str) -> list[str]:
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise unreadable(
            error, f"{describe(folder)} cannot be listed ({error.strerror})", "missing_media"
        ) from error
    shown = (name for name in names if name.lower().endswith(_PICTURES) and not name.startswith("."))
    return [os.path.join(folder, name) for name in sorted(shown, key=_natural)]


def _natural(name: str) -> tuple[list[tuple[bool, int, str]], str]:
    # The name itself decides between frame1 and frame01.
    pieces = re.findall(r"\d+|\D+", name)
    return [(not p.isdecimal(), int(p) if p.isdecimal() else 0, p) for p in pieces], name


_DECORD_CONTAINERS = {"mp4", "matroska", "avi"}
_SAME_TIME = 1e-4  # seconds; far below the time of a frame

Frames = Iterator[tuple[int, np.ndarray]]
Backend = Callable[[VideoFile, Any, Sequence[int]], Frames]


def find_backend(name: str) -> tuple[str, Backend]:
    """The real name and the decoder for ``name``; ``"auto"`` is PyAV."""
    real = "pyav" if name == "auto" else name
    if real not in _BACKENDS:
        raise ConfigError(f"backend={name!r}: expected auto, {', '.join(_BACKENDS)}")
    return real, _BACKENDS[real]


def _with_pyav(video: VideoFile, source: Any, wanted: Sequence[int]) -> Frames:
    return video.decode(wanted)


def _with_decord(video: VideoFile, source: Any, wanted: Sequence[int]) -> Frames:
    decord = _import("decord", "decord")
    # What decord 0.6 gets wrong without a word, found by comparing every frame.
    if video.turns % 2:
        raise _rejected(video, "decord garbles videos that are turned by 90 degrees")
    if not set(video.container.format.name.split(",")) & _DECORD_CONTAINERS:
        found = video.container.format.name
        raise _rejected(
            video, f"decord finds the right frames in MP4, MKV and AVI files only, this is {found}"
        )
    path = local_path(source)
    try:
        reader = decord.VideoReader(
            io.BytesIO(read_bytes(source)) if path is None else path, ctx=decord.cpu(0)
        )
        if len(reader) != len(video.packets):
            raise _other_count(video, "decord", len(reader))
        if video.has_open_groups:
            # Its seeking lands two frames off; reading through does not.
            chosen = set(wanted)
            for number in range(wanted[-1] + 1):
                pixels = reader.next().asnumpy()
                if number in chosen:
                    yield number, pixels
        else:
            yield from zip(wanted, reader.get_batch(list(wanted)).asnumpy(), strict=True)
    except (decord.DECORDError, RuntimeError) as error:
        raise _failed(video, "decord", error) from error


def _with_torchcodec(video: VideoFile, source: Any, wanted: Sequence[int]) -> Frames:
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
        raise _failed(video, "torchcodec", error) from error
    if video.timed:
        # Where an edit list cuts the start, torchcodec 0.13 delivers other frames than were asked for.
        for number, seconds in zip(wanted, batch.pts_seconds.tolist(), strict=True):
            if abs(seconds - video.seconds(number)) > _SAME_TIME:
                raise _rejected(
                    video,
                    f"torchcodec gives the frame of {seconds:.3f} s for frame {number}, "
                    f"which is shown at {video.seconds(number):.3f} s",
                )
    yield from zip(wanted, batch.data.numpy(), strict=True)


_BACKENDS: dict[str, Backend] = {
    "pyav": _with_pyav,
    "decord": _with_decord,
    "torchcodec": _with_torchcodec,
}


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ModuleNotFoundError, RuntimeError, OSError) as error:
        # torchcodec raises RuntimeError where it does not find the system's FFmpeg libraries.
        first_line = (str(error).splitlines() or [""])[0]
        raise MissingDependency(
            f"backend={package!r} cannot be loaded ({first_line}): "
            f"pip install {package}, or use backend='pyav'"
        ) from error


def _failed(video: VideoFile, name: str, error: Exception) -> BadSample:
    first_line = (str(error).splitlines() or [""])[0][:200]
    return bad(f"{video.name}: {name} could not decode it ({first_line})", "broken_media")


def _other_count(video: VideoFile, name: str, found: int) -> BadSample:
    return _rejected(video, f"{name} finds {found:,} frames where the file shows {len(video.packets):,}")


def _rejected(video: VideoFile, why: str) -> BadSample:
    return bad(f"{video.name}: {why}; use backend='pyav'", "broken_media")


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
        source: a video file (path, address, ``db.lmdb::key``, bytes, dict), or frames: a folder of images
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
        raise bad(f"{name}: the header tells no image size", "broken_media")
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
