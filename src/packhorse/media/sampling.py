"""Choose the frames of a video that the model sees, from the video's header and the settings.

Counting and loading use the same functions, so they agree. With a transformers processor, the
``sample_frames`` of its video processor chooses the frames of a file, so they are those of the released
processor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from packhorse.errors import ConfigError, list_some
from packhorse.media.failure import bad_media

_SETTINGS = ("fps", "min_frames", "max_frames", "num_frames", "temporal_patch_size")
_LIMIT_CLASSES = frozenset({"SmolVLMVideoProcessor"})
"""Video processors that sample by ``fps`` and take ``num_frames`` as a limit; others use one of the two."""
_WHOLE_PATCH_CLASSES = frozenset({"Qwen3VLVideoProcessor"})
"""Video processors that reject a video shorter than one temporal patch; others pad it themselves."""
_CALL_ONLY = ("input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata")
"""Arguments of a video processor's call that it does not pass on to ``sample_frames``."""


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """The header of a video.

    Attributes:
        total_frames: frames of the video, or of the sampled part of it.
        height: of a frame, in pixels.
        width: of a frame, in pixels.
        fps: None if unknown: a folder or list of frames without a rate.
        duration: in seconds.
        indices: positions of sampled frames in the original video; None for all frames.
        is_file: False for a folder or list of frames, which no processor samples by rate.
    """

    total_frames: int
    height: int
    width: int
    fps: float | None
    duration: float | None
    indices: tuple[int, ...] | None = None
    is_file: bool = field(default=True, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class VideoSampling:
    """How many frames to take.

    Without a video processor (:meth:`from_processor`) the rule of :func:`count_sampled_frames` applies.

    Args:
        fps: frames to take per second of video; None takes all frames (up to ``max_frames``).
        min_frames: the least number of frames, if the video has them (only with ``fps``).
        max_frames: the largest number of frames (with ``fps``, or if all frames are taken).
        num_frames: the exact number of frames, if the video has them; takes precedence over ``fps``.
        temporal_patch_size: the number of frames is rounded up to a multiple of this.
        video_processor: transformers' video processor, whose ``sample_frames`` chooses the frames of a file.
        overridden: the settings that :meth:`override` has set.
    """

    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    num_frames: int | None = None
    temporal_patch_size: int = 1
    video_processor: Any = field(default=None, repr=False, compare=False)
    overridden: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.fps is not None and not (_is_number(self.fps) and 0 < self.fps < math.inf):
            raise ConfigError.of("fps", self.fps, "expected a number above 0, or None for all frames")
        for name in ("min_frames", "max_frames", "num_frames", "temporal_patch_size"):
            value = getattr(self, name)
            optional = name != "temporal_patch_size"
            if not (value is None and optional) and not (_is_number(value) and value == int(value) >= 1):
                raise ConfigError.of(name, value, "expected a whole number of at least 1")

    @classmethod
    def from_processor(cls, processor: Any) -> VideoSampling:
        """Return the settings of ``processor.video_processor``, or of a video processor itself.

        Frames of a file are those of its ``sample_frames`` if ``do_sample_frames`` is true or ``fps`` or
        ``num_frames`` is set, and all frames otherwise, as in the processor's own call. A setting that the
        processor does not have, or has as None, is no limit.

        Raises:
            ConfigError: there is no video processor, or one of its settings is invalid.
        """
        owner = getattr(processor, "video_processor", None)
        if owner is None:
            owner = processor
        if not any(hasattr(owner, name) for name in _SETTINGS):
            raise ConfigError(
                f"{type(processor).__name__} has no video_processor and none of {', '.join(_SETTINGS)}: "
                "pass a processor for videos, or VideoSampling(...) with the values",
                setting="processor",
            )
        settings = {name: getattr(owner, name, None) for name in _SETTINGS}
        if hasattr(owner, "sample_frames"):
            # The processor pads its temporal patches itself.
            settings |= {"temporal_patch_size": None, "video_processor": owner}
        return cls(**{name: value for name, value in settings.items() if value is not None})

    def override(
        self,
        *,
        fps: float | None = None,
        min_frames: int | None = None,
        max_frames: int | None = None,
        num_frames: int | None = None,
    ) -> VideoSampling:
        """Return a copy with the given settings.

        ``fps`` also replaces ``num_frames``, except for a video processor that uses both (SmolVLM's).
        """
        given = {"fps": fps, "min_frames": min_frames, "max_frames": max_frames, "num_frames": num_frames}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if not changes:
            return self
        overridden = self.overridden | changes.keys()
        if "fps" in changes and not self._is_a(_LIMIT_CLASSES):
            changes.setdefault("num_frames", None)
        return replace(self, **changes, overridden=overridden)

    def _is_a(self, names: frozenset[str]) -> bool:
        return any(base.__name__ in names for base in type(self.video_processor).__mro__)


def count_sampled_frames(
    info: VideoInfo, sampling: VideoSampling, frame_indices: Sequence[int] | np.ndarray | None = None
) -> int:
    """Return how many frames :func:`sample_frame_indices` takes.

    Without a video processor and with ``fps`` it is ``int(total / video fps * fps)``, at least
    ``min_frames``, at most ``max_frames`` and the frames of the video, then rounded up to
    ``temporal_patch_size``.
    """
    if sampling.video_processor is not None:
        return len(sample_frame_indices(info, sampling, frame_indices))
    total = info.total_frames
    if frame_indices is not None:
        count = len(frame_indices)
    elif sampling.num_frames is not None:
        count = min(sampling.num_frames, total)
    else:
        count = most = total if sampling.max_frames is None else min(total, sampling.max_frames)
        # A video of unknown rate cannot be sampled by rate.
        if sampling.fps is not None and info.fps is not None and sampling.fps != info.fps:
            count = min(max(int(total / info.fps * sampling.fps), sampling.min_frames or 1), most)
    return _round_up(count, sampling.temporal_patch_size)


def sample_frame_indices(
    info: VideoInfo, sampling: VideoSampling, frame_indices: Sequence[int] | np.ndarray | None = None
) -> np.ndarray:
    """Return the positions of the frames to read in the original video, ascending, from 0.

    >>> sample_frame_indices(VideoInfo(60, 48, 64, 30.0, 2.0), VideoSampling(fps=2, min_frames=4)).tolist()
    [0, 20, 39, 59]

    With a video processor, the frames of a file are those that it takes. Otherwise, for a list of frames, and
    if the video processor raises (most do if the video is shorter than the requested number of frames),
    frames are spread evenly from the first to the last one (rounded ``linspace``). If the count is rounded up
    beyond the frames of the video, the last one is repeated, as the processors do to fill a temporal patch.

    Args:
        info: the video.
        sampling: how many frames.
        frame_indices: take these frames, in this order, instead; the last temporal patch is still padded.

    Raises:
        BadSample: ``broken_media`` if the video has no frames, or not those of ``frame_indices``;
            ``wrong_format`` if ``frame_indices`` are not whole numbers.
        ConfigError: the video processor samples frames and has neither ``fps`` nor ``num_frames``.
    """
    if info.total_frames < 1:
        raise bad_media("the video has no frames")
    if frame_indices is not None:
        chosen = _check_indices(frame_indices, info.total_frames)
        count = _round_up(len(chosen), sampling.temporal_patch_size)
    else:
        taken = _indices_of_processor(info, sampling) if info.is_file else None
        chosen = _spread_evenly(info, sampling) if taken is None else taken
        count = len(chosen)
    if sampling._is_a(_WHOLE_PATCH_CLASSES):
        count = max(count, sampling.video_processor.temporal_patch_size)
    return np.concatenate([chosen, np.repeat(chosen[-1:], count - len(chosen))])


def _spread_evenly(info: VideoInfo, sampling: VideoSampling) -> np.ndarray:
    """Return the frames by the rule of :func:`count_sampled_frames`."""
    count = count_sampled_frames(info, replace(sampling, video_processor=None))
    spread = np.linspace(0, info.total_frames - 1, min(count, info.total_frames))
    chosen = spread.round().astype(np.int64)
    return np.concatenate([chosen, np.repeat(chosen[-1:], count - len(chosen))])


def _indices_of_processor(info: VideoInfo, sampling: VideoSampling) -> np.ndarray | None:
    """Return the frames that the video processor takes from a file; None without one, and if it raises."""
    owner = sampling.video_processor
    if owner is None:
        return None
    samples = getattr(owner, "do_sample_frames", False) or (sampling.fps, sampling.num_frames) != (None, None)
    taken = _call_sample_frames(info, sampling) if samples else np.arange(info.total_frames)
    if taken is None:
        return None
    # Not every processor has these two settings; a row may set them all the same.
    requested = {name: getattr(sampling, name) for name in sampling.overridden}
    count = max(len(taken), min(requested.get("min_frames", 1), info.total_frames))
    count = min(count, requested.get("max_frames", count))
    if count == len(taken):
        return taken
    if count > len(taken) and sampling._is_a(_LIMIT_CLASSES):
        return _spread_evenly(info, VideoSampling(num_frames=count))
    return _call_sample_frames(info, replace(sampling, num_frames=count))


def _call_sample_frames(info: VideoInfo, sampling: VideoSampling) -> np.ndarray | None:
    """Call ``sample_frames`` of the video processor with the arguments of its own call; None if it raises."""
    from transformers.video_utils import VideoMetadata

    # sample_frames reads settings from the processor, so a copy gets ours.
    owner = copy(sampling.video_processor)
    for name in ("fps", "num_frames", "min_frames", "max_frames"):
        value = getattr(sampling, name)
        if hasattr(owner, name) or value is not None:
            setattr(owner, name, value)
    if sampling.num_frames is not None and not sampling._is_a(_LIMIT_CLASSES):
        owner.fps = None  # most raise if both are set; num_frames takes precedence
    names = getattr(getattr(owner, "valid_kwargs", None), "__annotations__", ())
    settings = {name: getattr(owner, name, None) for name in names if name not in _CALL_ONLY}
    metadata = VideoMetadata(
        total_num_frames=info.total_frames,
        fps=info.fps,
        width=info.width,
        height=info.height,
        duration=info.duration,
    )
    try:
        taken = owner.sample_frames(metadata=metadata, **settings)
    except (ValueError, ArithmeticError):
        return None
    except TypeError as error:
        if sampling.fps is not None or sampling.num_frames is not None:
            raise
        problem = f"{type(owner).__name__} has neither fps nor num_frames: set one of them on "
        remedy = "processor.video_processor, or do_sample_frames=False for all frames"
        raise ConfigError.of("do_sample_frames", True, problem + remedy) from error
    indices = np.asarray(taken, np.int64)
    # Steps in float32 may end one frame after the last, which every decoder rejects.
    indices = indices[indices < info.total_frames]
    return indices if len(indices) else None


def _check_indices(frame_indices: Sequence[int] | np.ndarray, total: int) -> np.ndarray:
    try:
        indices = np.asarray(frame_indices)
    except ValueError as error:
        raise bad_media(f"frame_indices are not a list of whole numbers ({error})", "wrong_format") from error
    if indices.ndim != 1 or len(indices) == 0 or indices.dtype.kind not in "iu":
        detail = f"frame_indices are {str(frame_indices)[:80]}, expected a list of whole numbers"
        raise bad_media(detail, "wrong_format")
    outside = indices[(indices < 0) | (indices >= total)]
    if len(outside):
        named = list_some(outside, 8)
        raise bad_media(f"frame_indices {named} are not in the video's {total:,} frames")
    return indices.astype(np.int64)


def _round_up(count: int, multiple: int) -> int:
    return math.ceil(max(count, 1) / multiple) * multiple


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
