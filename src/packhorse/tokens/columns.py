"""The estimate of `packhorse.tokens.estimate` for many rows at once: columns in, columns out.

Every number equals what the scalar functions give for that row: all arithmetic is done in float64 on whole
numbers below 2**53, where each step rounds as Python's does; the few entries beyond go through the scalar
functions. Costs tens of nanoseconds a medium and, beside the result, a few MB whatever the number of rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packhorse.errors import ConfigError
from packhorse.tokens.estimate import (
    CHARS_PER_TOKEN,
    LEAST_FPS,
    TOKENS_PER_MEDIUM,
    Geometry,
    estimate_image_tokens,
    estimate_video_tokens,
    fps_in,
    outline,
    sampling_in,
    sizes_in,
    told_tokens,
    unlisted,
)
from packhorse.tokens.resize import MOST_UNEVEN

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# So many media at a time stay in the processor's cache.
_BLOCK = 1 << 14
# Areas after rounding are at most four times those before: whole numbers up to here stay exact.
_EXACT = 2.0**50


@dataclass(frozen=True, slots=True)
class MediaSizes:
    """The images (or videos) of all rows, one after the other.

    Attributes:
        offsets: row ``r`` has the media from ``offsets[r]`` to ``offsets[r + 1]``; one more than rows.
        height: pixels; below 1 where it is not known.
        width: likewise.
        tokens: what the meta says outright (0 for null), -1 where it does not; None if it never does.
        frames: of videos: how many there are in all.
        fps: of videos; NaN where it is not known.
    """

    offsets: Ints
    height: npt.NDArray[np.integer[Any]]
    width: npt.NDArray[np.integer[Any]]
    tokens: npt.NDArray[np.integer[Any]] | None = None
    frames: npt.NDArray[np.integer[Any]] | None = None
    fps: npt.NDArray[np.floating[Any]] | None = None

    def __post_init__(self) -> None:
        columns = (self.height, self.width, self.tokens, self.frames, self.fps)
        lengths = {len(column) for column in columns if column is not None}
        if len(self.offsets) == 0 or lengths != {int(self.offsets[-1])}:
            raise ConfigError(
                f"media columns of {sorted(lengths)} entries with offsets up to "
                f"{self.offsets[-1] if len(self.offsets) else 'nothing'}: expected one entry per medium"
            )


@dataclass(frozen=True, slots=True)
class LengthColumns:
    """What rows tell about their length.

    Attributes:
        text: tokens of text per row.
        images: the images of the rows; None where there are none.
        videos: the videos of the rows; None where there are none.
        unlisted: media per row of which nothing is told (500 tokens each); None where there are none.
    """

    text: Ints
    images: MediaSizes | None = None
    videos: MediaSizes | None = None
    unlisted: npt.NDArray[np.integer[Any]] | None = None

    def __post_init__(self) -> None:
        found = [len(media.offsets) - 1 for media in (self.images, self.videos) if media is not None]
        found += [] if self.unlisted is None else [len(self.unlisted)]
        if any(rows != len(self.text) for rows in found):
            raise ConfigError(f"columns of {[len(self.text), *found]} rows: expected the same number in all")

    def __len__(self) -> int:
        return len(self.text)


def estimate_lengths(
    columns: LengthColumns, image_cfg: Geometry | None = None, video_cfg: Geometry | None = None
) -> tuple[Ints, Ints]:
    """(all tokens, those of media) of every row; see :func:`packhorse.tokens.estimate.estimate`."""
    media = np.zeros(len(columns), np.int64)
    if columns.images is not None:
        media += _row_sums(columns.images.offsets, image_tokens_of(columns.images, image_cfg))
    if columns.videos is not None:
        media += _row_sums(columns.videos.offsets, video_tokens_of(columns.videos, video_cfg))
    if columns.unlisted is not None:
        media += columns.unlisted.astype(np.int64) * TOKENS_PER_MEDIUM
    return columns.text + media, media


def columns_of(examples: Iterable[Mapping[str, Any]]) -> LengthColumns:
    """The columns of examples: one pass in Python, for whoever writes them down beside the rows."""
    text, unknown = array("q"), array("q")
    images, videos = _Collected(2), _Collected(3)
    for example in examples:
        seen = outline(example)
        tokens, media = example.get("_text_tokens"), example.get("_media_tokens")
        text.append(seen.characters // CHARS_PER_TOKEN if tokens is None else int(tokens))
        meta = example.get("mm_inputs_meta") or {}
        lists = [meta.get("images_meta") or (), meta.get("videos_meta") or ()]
        if media is not None:
            lists = [[{"n_tokens": media}], ()]
        unknown.append(0 if media is not None else unlisted(seen, len(lists[0]), len(lists[1])))
        images.add(lists[0])
        videos.add(lists[1])
    return LengthColumns(_ints(text), images.columns(), videos.columns(), _ints(unknown))


def image_tokens_of(images: MediaSizes, image_cfg: Geometry | None) -> Ints:
    """Tokens of each image."""
    tokens = _told_or_guess(images)
    if image_cfg is None:
        return tokens
    for block in _blocks(len(tokens)):
        height, width, known = _sides(images, block)
        found, outside = _cells(height, width, 1.0, image_cfg)
        known &= _even(height, width)
        _put(tokens[block], found, known & ~outside)
        for place in block.start + np.flatnonzero(outside & known):
            entry = [int(images.height[place]), int(images.width[place])]
            tokens[place] = estimate_image_tokens(entry, image_cfg)
    return tokens


def video_tokens_of(videos: MediaSizes, video_cfg: Geometry | None) -> Ints:
    """Tokens of each video."""
    tokens = _told_or_guess(videos)
    if video_cfg is None or videos.frames is None:
        return tokens
    factor, temporal = video_cfg["factor"], video_cfg["temporal_patch_size"]
    for block in _blocks(len(tokens)):
        height, width, known = _sides(videos, block)
        total = videos.frames[block].astype(np.float64)
        known &= total >= 1
        # Frames smaller than one token are first brought to its size.
        small = np.flatnonzero((height < factor) | (width < factor))
        scale = np.maximum(factor / height[small], factor / width[small])
        height[small], width[small] = np.trunc(height[small] * scale), np.trunc(width[small] * scale)
        frames = _sampled(total, None if videos.fps is None else videos.fps[block], video_cfg)
        found, outside = _cells(height, width, frames, video_cfg)
        known &= _even(height, width)
        _put(tokens[block], found * (frames / temporal), known & ~outside)
        for place in block.start + np.flatnonzero(outside & known):
            sizes = (videos.frames[place], videos.height[place], videos.width[place])
            fps = None if videos.fps is None else float(videos.fps[place])
            tokens[place] = estimate_video_tokens([*map(int, sizes), fps], video_cfg)
    return tokens


def _cells(
    height: Floats, width: Floats, frames: Floats | float, config: Geometry
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Tokens of a picture of each size, and where the numbers are too large for this arithmetic.

    The steps, and their order, are those of `packhorse.tokens.resize`.
    """
    factor, low, high = config["factor"], config["min_pixels"], config["max_pixels"]
    rows, columns = np.rint(height / factor), np.rint(width / factor)
    area = rows * columns * frames * (factor * factor)
    pixels = frames * height * width
    over = np.flatnonzero(area > high)
    if len(over):
        shrink = np.sqrt(pixels[over] / high)
        rows[over] = np.maximum(1, np.floor(height[over] / shrink / factor))
        columns[over] = np.maximum(1, np.floor(width[over] / shrink / factor))
    under = np.flatnonzero(area < low if low <= high else area <= high)
    if len(under):
        grow = np.sqrt(low / pixels[under])
        rows[under] = np.ceil(height[under] * grow / factor)
        columns[under] = np.ceil(width[under] * grow / factor)
    outside = (pixels >= _EXACT) | (max(low, high) >= _EXACT)
    return rows * columns, outside


def _sampled(total: Floats, fps: npt.NDArray[np.floating[Any]] | None, config: Geometry) -> Floats:
    """Frames that are taken: the steps of `packhorse.media.sampling.count_sampled_frames`."""
    sampling = sampling_in(config)
    count = most = total if sampling.max_frames is None else np.minimum(total, sampling.max_frames)
    if sampling.fps is not None and fps is not None:
        rate = _known_rates(fps)
        wanted = np.trunc(total / rate * sampling.fps)
        taken = np.minimum(np.maximum(wanted, sampling.min_frames or 1), most)
        count = np.where(np.isnan(rate) | (rate == sampling.fps), most, taken)
    temporal = sampling.temporal_patch_size
    filled: Floats = np.ceil(np.maximum(count, 1) / temporal) * temporal
    return filled


def _known_rates(fps: npt.NDArray[np.floating[Any]]) -> Floats:
    rates = fps.astype(np.float64)
    with np.errstate(invalid="ignore"):
        rates[~((rates >= LEAST_FPS) & (rates < np.inf))] = np.nan
    return rates


def _sides(media: MediaSizes, block: slice) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """Heights and widths to compute with, and which of them are to be believed."""
    height, width = media.height[block].astype(np.float64), media.width[block].astype(np.float64)
    known = (height >= 1) & (width >= 1)
    if media.tokens is not None:
        known &= media.tokens[block] < 0
    np.maximum(height, 1, out=height)
    np.maximum(width, 1, out=width)
    return height, width, known


def _even(height: Floats, width: Floats) -> npt.NDArray[np.bool_]:
    even: npt.NDArray[np.bool_] = np.maximum(height, width) / np.minimum(height, width) <= MOST_UNEVEN
    return even


def _put(tokens: Ints, found: Floats, where: npt.NDArray[np.bool_]) -> None:
    with np.errstate(invalid="ignore"):  # of entries that are not put
        np.copyto(tokens, found, where=where, casting="unsafe")


def _told_or_guess(media: MediaSizes) -> Ints:
    if media.tokens is None:
        return np.full(len(media.height), TOKENS_PER_MEDIUM, np.int64)
    return np.where(media.tokens >= 0, media.tokens, TOKENS_PER_MEDIUM).astype(np.int64)


def _row_sums(offsets: Ints, tokens: Ints) -> Ints:
    running = np.zeros(len(tokens) + 1, np.int64)
    np.cumsum(tokens, out=running[1:])
    sums: Ints = np.diff(running[offsets])
    return sums


def _blocks(total: int) -> Iterable[slice]:
    return (slice(first, min(first + _BLOCK, total)) for first in range(0, total, _BLOCK))


class _Collected:
    """Entries of ``images_meta`` (two sizes each) or ``videos_meta`` (three, and a rate) as columns."""

    def __init__(self, sizes: int) -> None:
        self.sizes = tuple(array("q") for _ in range(sizes))
        self.offsets, self.tokens, self.fps = array("q", [0]), array("q"), array("d")

    def add(self, entries: Iterable[Any]) -> None:
        """The media of the next row."""
        for entry in entries:
            told = told_tokens(entry)
            sizes = sizes_in(entry, len(self.sizes))
            for column, size in zip(self.sizes, sizes or [0] * len(self.sizes), strict=True):
                column.append(size)
            self.tokens.append(-1 if told is None else told)
            fps = fps_in(entry) if sizes is not None else None
            self.fps.append(np.nan if fps is None else fps)
        self.offsets.append(len(self.tokens))

    def columns(self) -> MediaSizes | None:
        """Everything so far; None if no row had any."""
        if not self.tokens:
            return None
        *frames, height, width = map(_ints, self.sizes)
        fps = np.frombuffer(self.fps, np.float64) if frames else None
        return MediaSizes(
            _ints(self.offsets), height, width, _ints(self.tokens), frames[0] if frames else None, fps
        )


def _ints(numbers: array[int]) -> Ints:
    return np.frombuffer(numbers, np.int64) if numbers else np.empty(0, np.int64)
