"""Which frames of a video the model sees: sizes and wishes go in, frame numbers come out.

Pure arithmetic: nothing is opened, so a plan that counts frames and a loader that reads them agree by
construction. Costs a few microseconds a video.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from packhorse.errors import ConfigError
from packhorse.media.failure import bad

_SETTINGS = ("fps", "min_frames", "max_frames", "num_frames", "temporal_patch_size")


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """What the header of a video tells.

    ``fps`` is None where nobody knows it: a folder or list of frames without a rate. Where this describes
    frames that were taken, ``total_frames`` is their number and ``indices`` says which they are, counted in
    the original video; None stands for all of them.
    """

    total_frames: int
    height: int
    width: int
    fps: float | None
    duration: float | None
    indices: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class VideoSampling:
    """How many frames to take.

    Args:
        fps: frames to take per second of video; None takes all frames (up to ``max_frames``).
        min_frames: take at least so many where the video has them (only with ``fps``).
        max_frames: take at most so many (with ``fps``, or when all frames are taken).
        num_frames: take exactly so many where the video has them, whatever its length; wins over ``fps``.
        temporal_patch_size: the number of frames is made a multiple of this, as the model's patches need.
    """

    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    num_frames: int | None = None
    temporal_patch_size: int = 1

    def __post_init__(self) -> None:
        if self.fps is not None and not (_is_number(self.fps) and 0 < self.fps < math.inf):
            raise ConfigError(f"fps={self.fps!r}: expected a number above 0, or None for all frames")
        for name in ("min_frames", "max_frames", "num_frames", "temporal_patch_size"):
            value = getattr(self, name)
            optional = name != "temporal_patch_size"
            if not (value is None and optional) and not (_is_number(value) and value == int(value) >= 1):
                raise ConfigError(f"{name}={value!r}: expected a whole number of at least 1")

    @classmethod
    def from_processor(cls, processor: Any) -> VideoSampling:
        """Read the settings of ``processor.video_processor``, or of a video processor itself.

        A setting that the processor does not have, or has as None, does not limit anything.
        """
        owner = getattr(processor, "video_processor", None)
        if owner is None:
            owner = processor
        if not any(hasattr(owner, name) for name in _SETTINGS):
            raise ConfigError(
                f"{type(processor).__name__} has no video_processor and none of {', '.join(_SETTINGS)}: "
                "pass a processor for videos, or VideoSampling(...) with the values"
            )
        found = {name: getattr(owner, name, None) for name in _SETTINGS}
        return cls(**{name: value for name, value in found.items() if value is not None})

    def override(
        self,
        *,
        fps: float | None = None,
        min_frames: int | None = None,
        max_frames: int | None = None,
        num_frames: int | None = None,
    ) -> VideoSampling:
        """These settings with the given ones in their place; ``fps`` also replaces ``num_frames``."""
        given = {"fps": fps, "min_frames": min_frames, "max_frames": max_frames, "num_frames": num_frames}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if "fps" in changes:
            changes.setdefault("num_frames", None)
        return replace(self, **changes) if changes else self


def count_sampled_frames(
    info: VideoInfo, sampling: VideoSampling, frame_indices: Sequence[int] | np.ndarray | None = None
) -> int:
    """How many frames :func:`sample_frame_indices` takes.

    With ``fps`` it is ``int(total / video fps * fps)``, at least ``min_frames``, at most ``max_frames`` and
    the video's own number, then rounded up to ``temporal_patch_size``: as many as transformers' Qwen3-VL
    processor feeds its model (its Qwen2-VL one rounds down instead, and loses the frames that are over).
    """
    total = info.total_frames
    if frame_indices is not None:
        count = len(frame_indices)
    elif sampling.num_frames is not None:
        count = min(sampling.num_frames, total)
    else:
        count = most = total if sampling.max_frames is None else min(total, sampling.max_frames)
        # A video of unknown rate cannot be thinned out to a rate: its frames were chosen by someone.
        if sampling.fps is not None and info.fps is not None and sampling.fps != info.fps:
            count = min(max(int(total / info.fps * sampling.fps), sampling.min_frames or 1), most)
    return _rounded_up(count, sampling.temporal_patch_size)


def sample_frame_indices(
    info: VideoInfo, sampling: VideoSampling, frame_indices: Sequence[int] | np.ndarray | None = None
) -> np.ndarray:
    """The numbers of the frames to read, ascending, counted from 0 in the original video.

    >>> sample_frame_indices(VideoInfo(60, 48, 64, 30.0, 2.0), VideoSampling(fps=2, min_frames=4)).tolist()
    [0, 20, 39, 59]

    Frames are spread evenly from the first to the last one, as transformers' Qwen3-VL processor spreads them
    (rounded ``linspace``). Where the count is rounded up beyond the frames there are, the last one is
    repeated, which is what the processors do to fill a temporal patch.

    Args:
        info: the video.
        sampling: how many frames.
        frame_indices: take these frames, in this order, instead; only the filling of the last temporal patch
            is still done.

    Raises:
        BadSample: ``broken_media`` where the video has no frames, or not those that ``frame_indices`` names;
            ``wrong_format`` where ``frame_indices`` are not whole numbers.
    """
    if info.total_frames < 1:
        raise bad("the video has no frames", "broken_media")
    if frame_indices is not None:
        chosen = _checked_indices(frame_indices, info.total_frames)
        count = count_sampled_frames(info, sampling, chosen)
    else:
        count = count_sampled_frames(info, sampling)
        spread = np.linspace(0, info.total_frames - 1, min(count, info.total_frames))
        chosen = spread.round().astype(np.int64)
    return np.concatenate([chosen, np.repeat(chosen[-1:], count - len(chosen))])


def _checked_indices(frame_indices: Sequence[int] | np.ndarray, total: int) -> np.ndarray:
    try:
        indices = np.asarray(frame_indices)
    except ValueError as error:
        raise bad(f"frame_indices are not a list of whole numbers ({error})", "wrong_format") from error
    if indices.ndim != 1 or len(indices) == 0 or indices.dtype.kind not in "iu":
        raise bad(
            f"frame_indices are {str(frame_indices)[:80]}, expected a list of whole numbers", "wrong_format"
        )
    outside = indices[(indices < 0) | (indices >= total)]
    if len(outside):
        named = ", ".join(map(str, outside[:8].tolist())) + (", …" if len(outside) > 8 else "")
        raise bad(f"frame_indices {named} are not in the video's {total:,} frames", "broken_media")
    return indices.astype(np.int64)


def _rounded_up(count: int, multiple: int) -> int:
    return math.ceil(max(count, 1) / multiple) * multiple


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
