"""The decoders that can be asked for by name; each gives the pixels of exactly the wanted frames.

PyAV reads the list of frames for all of them (:mod:`packhorse.media.container`), so the choice of a decoder
never changes which frames are taken. ``decord`` and ``torchcodec`` are optional and are installed by name.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from packhorse.errors import BadSample, ConfigError, MissingDependency
from packhorse.media.container import VideoFile
from packhorse.media.failure import bad
from packhorse.media.source import local_path, read_bytes

_DECORD_CONTAINERS = {"mp4", "matroska", "avi"}
_SAME_TIME = 1e-4  # seconds; far below the time of a frame

Frames = Iterator[tuple[int, np.ndarray]]
Backend = Callable[[VideoFile, Any, Sequence[int]], Frames]


def backend(name: str) -> tuple[str, Backend]:
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
        raise _refused(video, "decord garbles videos that are turned by 90 degrees")
    if not set(video.container.format.name.split(",")) & _DECORD_CONTAINERS:
        found = video.container.format.name
        raise _refused(
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
        # Where an edit list cuts the start, torchcodec 0.13 hands out other frames than were asked for.
        for number, seconds in zip(wanted, batch.pts_seconds.tolist(), strict=True):
            if abs(seconds - video.seconds(number)) > _SAME_TIME:
                raise _refused(
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
    return _refused(video, f"{name} finds {found:,} frames where the file shows {len(video.packets):,}")


def _refused(video: VideoFile, why: str) -> BadSample:
    return bad(f"{video.name}: {why}; use backend='pyav'", "broken_media")
