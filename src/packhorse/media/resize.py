"""Compute the size to which an image or a video is resized before it is cut into patches.

Rounds like transformers' Qwen2-VL image processor and Qwen3-VL video processor: to multiples of ``factor``,
within a budget of pixels, keeping the aspect ratio as well as possible.
"""

from __future__ import annotations

import math

MAX_ASPECT_RATIO = 200


def resize_image(
    height: int,
    width: int,
    factor: int = 28,
    min_pixels: int = 56 * 56,
    max_pixels: int = 14 * 14 * 4 * 1280,
) -> tuple[int, int]:
    """Return (height, width) of an image after resizing.

    >>> resize_image(480, 640)
    (476, 644)

    Raises:
        ValueError: one side is more than 200 times the other, as in the processors.
    """
    _check_aspect_ratio(height, width)
    rows, columns = round(height / factor), round(width / factor)
    area = rows * columns * factor * factor
    return _within(height, width, factor, (rows, columns), area, 1, min_pixels, max_pixels)


def resize_video(
    num_frames: int,
    height: int,
    width: int,
    temporal_factor: int = 2,
    factor: int = 32,
    min_pixels: int = 128 * 128,
    max_pixels: int = 16 * 16 * 2 * 2 * 2 * 6144,
) -> tuple[int, int]:
    """Return (height, width) of the frames of a video after resizing; the budget is for all frames together.

    Raises:
        ValueError: fewer frames than ``temporal_factor``, or one side more than 200 times the other.
    """
    if num_frames < temporal_factor:
        raise ValueError(f"{num_frames} frames: expected at least temporal_factor={temporal_factor}")
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect_ratio(height, width)
    rows, columns = round(height / factor), round(width / factor)
    area = round(num_frames / temporal_factor) * temporal_factor * rows * columns * factor * factor
    return _within(height, width, factor, (rows, columns), area, num_frames, min_pixels, max_pixels)


def _within(
    height: int,
    width: int,
    factor: int,
    cells: tuple[int, int],
    area: int,
    frames: int,
    min_pixels: int,
    max_pixels: int,
) -> tuple[int, int]:
    """Return the rounded size, scaled down or up if its area is outside the budget."""
    rows, columns = cells
    if area > max_pixels:
        scale = math.sqrt(frames * height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / scale / factor)) for side in (height, width))
    elif area < min_pixels:
        scale = math.sqrt(min_pixels / (frames * height * width))
        rows, columns = (math.ceil(side * scale / factor) for side in (height, width))
    return rows * factor, columns * factor


def _check_aspect_ratio(height: int, width: int) -> None:
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise ValueError(f"{height} x {width}: aspect ratio {ratio:.0f}, expected at most {MAX_ASPECT_RATIO}")
