"""The size to which an image or a video is brought before it is cut into patches: the only such formulas.

They round as transformers' Qwen2-VL image processor and Qwen3-VL video processor do: to whole multiples of
``factor``, within a budget of pixels, keeping the shape as well as that allows. Pure arithmetic.
"""

from __future__ import annotations

import math

MOST_UNEVEN = 200


def resize_image(
    height: int,
    width: int,
    factor: int = 28,
    min_pixels: int = 56 * 56,
    max_pixels: int = 14 * 14 * 4 * 1280,
) -> tuple[int, int]:
    """(height, width) of an image after resizing.

    >>> resize_image(480, 640)
    (476, 644)

    Raises:
        ValueError: one side is more than 200 times the other, which the processors refuse too.
    """
    _check_shape(height, width)
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
    """(height, width) of the frames of a video after resizing; the budget is for all frames together.

    Raises:
        ValueError: fewer frames than ``temporal_factor``, or one side more than 200 times the other.
    """
    if num_frames < temporal_factor:
        raise ValueError(f"{num_frames} frames: expected at least temporal_factor={temporal_factor}")
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_shape(height, width)
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
    """The rounded size, shrunk or grown where its area is outside the budget."""
    if area > max_pixels:
        shrink = math.sqrt(frames * height * width / max_pixels)
        cells = (
            max(1, math.floor(height / shrink / factor)),
            max(1, math.floor(width / shrink / factor)),
        )
    elif area < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        cells = (math.ceil(height * grow / factor), math.ceil(width * grow / factor))
    return cells[0] * factor, cells[1] * factor


def _check_shape(height: int, width: int) -> None:
    uneven = max(height, width) / min(height, width)
    if uneven > MOST_UNEVEN:
        raise ValueError(f"{height} x {width}: sides of 1 to {uneven:.0f}, expected at most {MOST_UNEVEN}")
