"""A video kept as pictures: a folder or a list of frames goes in, the pixels of the wanted ones come out.

Only the wanted frames are opened. Frames in a folder are its pictures in natural order (``frame2`` before
``frame10``); a list keeps its order.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from packhorse.media.failure import bad, unreadable
from packhorse.media.images import DEFAULT_MAX_PIXELS, image_size, load_image
from packhorse.media.sampling import VideoInfo
from packhorse.media.source import describe, local_path

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
        frames = _pictures(folder)
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


def _pictures(folder: str) -> list[str]:
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
