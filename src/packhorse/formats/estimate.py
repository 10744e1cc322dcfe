"""Estimate the number of tokens of rows from their fields alone: the only place of these formulas.

No file is opened and no tokenizer runs: text counts by its characters, media by the sizes in
``mm_inputs_meta`` and the geometry of the processor. The formulas run on columns of many rows at once; the
functions for one row, image or video are calls with a single row and cost about 50 microseconds. Exact counts
are what `packhorse count` makes.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.errors import ConfigError
from packhorse.media.images import MAX_ASPECT_RATIO, image_tokens, resize_video
from packhorse.media.sampling import VideoInfo, VideoSampling, count_sampled_frames
from packhorse.types import Flags, Floats, Integers

# If nothing better is known, a token is three characters and a media item 500 tokens.
CHARS_PER_TOKEN = 3
TOKENS_PER_MEDIA_ITEM = 500

Geometry = Mapping[str, Any]
"""``patch_size``, ``merge_size``, ``factor``, ``min_pixels``, ``max_pixels``; for videos also
``temporal_patch_size``, ``fps``, ``min_frames``, ``max_frames``."""

# A rate below one frame in a quarter of an hour is a mistake, and dividing by it would overflow.
_LEAST_FPS = 1e-3
_TOO_LARGE = 2**53
_BLOCK = 1 << 14  # this many media items at a time stay in the processor's cache
# Areas after rounding are at most four times those before: whole numbers up to here stay exact.
_EXACT = 2.0**50
_UNKNOWN = -1


def image_config(processor: object) -> dict[str, int] | None:
    """Return the geometry by which Qwen-like image processors cut images into tokens; None for others.

    Returns:
        ``patch_size``, ``merge_size``, ``factor`` (pixels along a token's side), ``min_pixels`` and
        ``max_pixels``. Pixel bounds are attributes, or in ``size`` under ``min_pixels``/``max_pixels`` or
        ``shortest_edge``/``longest_edge``; missing bounds are those of Qwen2-VL.
    """
    return _geometry(getattr(processor, "image_processor", None), 56 * 56, 14 * 14 * 4 * 1280)


def video_config(processor: object) -> dict[str, Any] | None:
    """Return the geometry by which Qwen-like video processors cut videos into tokens; None for others.

    Returns:
        The keys of :func:`image_config` (the pixel bounds hold for all frames of a video together), and
        ``temporal_patch_size``, ``fps`` (None, as in transformers 5: every frame is taken), ``min_frames``
        and ``max_frames``; missing values are those of Qwen3-VL.
    """
    owner = getattr(processor, "video_processor", None)
    config: dict[str, Any] | None = _geometry(owner, 128 * 128, 16 * 16 * 2 * 2 * 2 * 6144)
    if config is None:
        return None
    fps = getattr(owner, "fps", None)
    config["fps"] = fps if isinstance(fps, int | float) else None
    for name, default in (("temporal_patch_size", 2), ("min_frames", 4), ("max_frames", 768)):
        value = getattr(owner, name, None)
        config[name] = value if isinstance(value, int) else default
    return config


def _geometry(owner: object, min_pixels: int, max_pixels: int) -> dict[str, int] | None:
    patch, merge = getattr(owner, "patch_size", None), getattr(owner, "merge_size", None)
    if not isinstance(patch, int) or not isinstance(merge, int):
        return None
    return {
        "patch_size": patch,
        "merge_size": merge,
        "factor": patch * merge,
        "min_pixels": _bound(owner, "min_pixels", "shortest_edge", min_pixels),
        "max_pixels": _bound(owner, "max_pixels", "longest_edge", max_pixels),
    }


def _bound(owner: object, name: str, edge: str, default: int) -> int:
    size = getattr(owner, "size", None)
    in_size = [
        size.get(key) if isinstance(size, Mapping) else getattr(size, key, None) for key in (name, edge)
    ]
    values = (getattr(owner, name, None), *in_size)
    return next((value for value in values if isinstance(value, int)), default)


@dataclass(frozen=True, slots=True)
class MediaSizes:
    """The images (or videos) of all rows, concatenated.

    Attributes:
        offsets: row ``r`` has the media from ``offsets[r]`` to ``offsets[r + 1]``; one more than rows.
        height: pixels; below 1 if unknown.
        width: likewise.
        tokens: the number that the meta states (0 for null), -1 if it does not; None if it never does.
        frames: of videos: how many there are in all.
        fps: of videos; NaN if unknown.
    """

    offsets: Integers
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
                f"{self.offsets[-1] if len(self.offsets) else 'nothing'}: expected one entry per media item",
                setting="offsets",
            )


@dataclass(frozen=True, slots=True)
class LengthColumns:
    """The fields of rows that lengths are estimated from.

    Attributes:
        text: tokens of text per row.
        images: the images of the rows; None if there are none.
        videos: the videos of the rows; None if there are none.
        unlisted: media items per row without an entry (500 tokens each); None if there are none.
        stated: whether ``text`` is the row's own field, not three characters a token; None if unknown.
    """

    text: Integers
    images: MediaSizes | None = None
    videos: MediaSizes | None = None
    unlisted: npt.NDArray[np.integer[Any]] | None = None
    stated: Flags | None = None

    def __post_init__(self) -> None:
        found = [len(media.offsets) - 1 for media in (self.images, self.videos) if media is not None]
        found += [len(column) for column in (self.unlisted, self.stated) if column is not None]
        if any(rows != len(self.text) for rows in found):
            raise ConfigError(f"columns of {[len(self.text), *found]} rows: expected the same number in all")

    def __len__(self) -> int:
        return len(self.text)


class Estimates(NamedTuple):
    """Estimated tokens of many rows.

    Attributes:
        total: all tokens of each row.
        media: those of its media.
        from_fields: whether the row's own fields state all of it: nothing is the guess of three characters a
            token or of 500 tokens a media item.
    """

    total: Integers
    media: Integers
    from_fields: Flags


def estimate_lengths(
    columns: LengthColumns, image_cfg: Geometry | None = None, video_cfg: Geometry | None = None
) -> Estimates:
    """Estimate the tokens of every row.

    Text is ``_text_tokens``, else all characters // 3. Media are ``_media_tokens``, else the tokens of each
    entry of ``mm_inputs_meta``, and 500 for each media item without an entry, of unknown size, or of a size
    that the processors reject.

    Args:
        columns: what :func:`columns_of` makes of examples.
        image_cfg: see :func:`image_config`.
        video_cfg: see :func:`video_config`.

    Raises:
        ConfigError: a setting of ``video_cfg`` is out of range.
    """
    media, guessed = np.zeros(len(columns), np.int64), np.zeros(len(columns), np.int64)
    if columns.unlisted is not None:
        guessed += columns.unlisted
    for sizes, config, is_video in ((columns.images, image_cfg, False), (columns.videos, video_cfg, True)):
        if sizes is not None:
            tokens = _tokens_of(sizes, config, is_video)
            unknown = tokens < 0
            if unknown.any():
                guessed += _row_sums(sizes.offsets, unknown)
                tokens[unknown] = 0
            media += _row_sums(sizes.offsets, tokens)
    media += guessed * TOKENS_PER_MEDIA_ITEM
    stated = np.zeros(len(columns), np.bool_) if columns.stated is None else columns.stated
    return Estimates(columns.text + media, media, stated & (guessed == 0))


class Outline(NamedTuple):
    """How much text and how many media an example has."""

    characters: int = 0
    images: int = 0
    videos: int = 0
    audios: int = 0


def outline(example: Mapping[str, Any]) -> Outline:
    """Count characters and media without building anything; skips what is not in the documented format."""
    characters = images = videos = audios = 0
    both = (example.get("conversation"), example.get("rejected"))  # of a pair
    for turn in (turn for turns in both if isinstance(turns, (list, tuple)) for turn in turns):
        content = turn.get("content") if isinstance(turn, dict) else None
        if isinstance(content, str):
            characters += len(content)
            continue
        for part in content if isinstance(content, (list, tuple)) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text":
                text = part.get("text")
                characters += len(text) if isinstance(text, str) else 0
            elif kind == "image":
                images += 1
            elif kind == "video":
                videos += 1
            elif kind == "audio":
                audios += 1
    return Outline(characters, images, videos, audios)


class ColumnsBuilder:
    """Collects the fields of examples, one after the other, as :class:`LengthColumns`."""

    def __init__(self) -> None:
        self.text, self.unlisted, self.stated = array("q"), array("q"), array("b")
        self.images, self.videos = _MediaBuilder(2), _MediaBuilder(3)

    def add(self, example: Mapping[str, Any], seen: Outline | None = None) -> None:
        """Add the next row; ``seen`` is its text and media, if the caller has counted them."""
        text, media = example.get("_text_tokens"), example.get("_media_tokens")
        seen = outline(example) if seen is None else seen
        meta = {} if media is not None else example.get("mm_inputs_meta") or {}
        images, videos = meta.get("images_meta") or (), meta.get("videos_meta") or ()
        unlisted = max(0, seen.images - len(images)) + max(0, seen.videos - len(videos)) + seen.audios
        if media is not None:
            images, unlisted = [{"n_tokens": int(media)}], 0
        self.text.append(seen.characters // CHARS_PER_TOKEN if text is None else min(int(text), _TOO_LARGE))
        self.stated.append(text is not None)
        self.unlisted.append(unlisted)
        self.images.add(images)
        self.videos.add(videos)

    def columns(self) -> LengthColumns:
        """Return everything so far."""
        stated = np.array(self.stated, np.bool_)
        return LengthColumns(
            _ints(self.text), self.images.columns(), self.videos.columns(), _ints(self.unlisted), stated
        )


def columns_of(examples: Iterable[Mapping[str, Any]]) -> LengthColumns:
    """Collect the columns of examples: one pass in Python."""
    builder = ColumnsBuilder()
    for example in examples:
        builder.add(example)
    return builder.columns()


class _MediaBuilder:
    """Entries of ``images_meta`` (two sizes each) or ``videos_meta`` (three, and a rate) as columns."""

    def __init__(self, sizes: int) -> None:
        self.sizes = tuple(array("q") for _ in range(sizes))
        self.offsets, self.tokens, self.fps = array("q", [0]), array("q"), array("d")

    def add(self, entries: Iterable[Any]) -> None:
        """Add the media of the next row."""
        for entry in entries:
            sizes = _sizes_in(entry, len(self.sizes))
            for column, size in zip(self.sizes, sizes or [0] * len(self.sizes), strict=True):
                column.append(size)
            self.tokens.append(_stated_tokens(entry))
            self.fps.append(_fps_in(entry) if sizes is not None else math.nan)
        self.offsets.append(len(self.tokens))

    def columns(self) -> MediaSizes | None:
        """Return everything so far; None if no row had any."""
        if not self.tokens:
            return None
        *frames, height, width = map(_ints, self.sizes)
        fps = np.frombuffer(self.fps, np.float64) if frames else None
        return MediaSizes(
            _ints(self.offsets), height, width, _ints(self.tokens), frames[0] if frames else None, fps
        )


def _ints(numbers: array[int]) -> Integers:
    return np.frombuffer(numbers, np.int64) if numbers else np.empty(0, np.int64)


def _stated_tokens(entry: object) -> int:
    """Return the ``n_tokens`` of an entry; 0 if the entry is null."""
    if entry is None:
        return 0
    tokens = entry.get("n_tokens") if isinstance(entry, Mapping) else None
    if not isinstance(tokens, int | float) or not abs(tokens) < math.inf:
        return _UNKNOWN
    return min(max(0, int(tokens)), _TOO_LARGE)


def _sizes_in(entry: object, count: int) -> tuple[int, ...] | None:
    """Return the first ``count`` numbers of an entry; None if one is missing or cannot be a size."""
    if not isinstance(entry, list | tuple) or len(entry) < count:
        return None
    try:
        sizes = tuple(int(number) for number in entry[:count])
    except (TypeError, ValueError, OverflowError):
        return None
    return sizes if min(sizes) >= 1 and max(sizes) < _TOO_LARGE else None


def _fps_in(entry: list[Any] | tuple[Any, ...]) -> float:
    fps = entry[3] if len(entry) > 3 else None
    return fps if isinstance(fps, int | float) and _LEAST_FPS <= fps <= sys.float_info.max else math.nan


def estimate_sample_length(
    example: Mapping[str, Any],
    image_cfg: Geometry | None = None,
    video_cfg: Geometry | None = None,
    return_media_tokens: bool = False,
) -> int | tuple[int, int]:
    """Estimate the tokens of one example, text and media; :func:`estimate_lengths` is faster for many.

    Args:
        example: in the documented format; see :func:`estimate_lengths`.
        image_cfg: see :func:`image_config`.
        video_cfg: see :func:`video_config`.
        return_media_tokens: return (all tokens, those of media).
    """
    found = estimate_lengths(columns_of([example]), image_cfg, video_cfg)
    total, media = int(found.total[0]), int(found.media[0])
    return (total, media) if return_media_tokens else total


def estimate_image_tokens(img_meta: object, image_cfg: Geometry | None) -> int:
    """Estimate the tokens of one image by its entry in ``images_meta``.

    >>> qwen2_vl = {"factor": 28, "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
    >>> estimate_image_tokens([480, 640], qwen2_vl)
    391

    Args:
        img_meta: ``[height, width]``, ``{"n_tokens": n}``, or None for an image that counts nothing.
        image_cfg: see :func:`image_config`.

    Returns:
        The tokens; 500 if neither entry nor geometry determines them, or the processors reject the size.
    """
    columns = columns_of([{"mm_inputs_meta": {"images_meta": [img_meta]}}])
    return int(estimate_lengths(columns, image_cfg).media[0])


def estimate_video_tokens(vid_meta: Any, video_cfg: Geometry | None) -> int:
    """Estimate the tokens of one video by its entry in ``videos_meta``; timestamps are text.

    Args:
        vid_meta: ``[total_frames, height, width, fps, duration]``, ``{"n_tokens": n}``, or None.
        video_cfg: see :func:`video_config`.

    Returns:
        The tokens; 500 if neither entry nor geometry determines them, or the processors reject the size.
    """
    columns = columns_of([{"mm_inputs_meta": {"videos_meta": [vid_meta]}}])
    return int(estimate_lengths(columns, None, video_cfg).media[0])


def _tokens_of(media: MediaSizes, config: Geometry | None, is_video: bool) -> Integers:
    """Return the tokens of each image or video, -1 if unknown."""
    tokens = np.full(len(media.height), _UNKNOWN) if media.tokens is None else media.tokens.astype(np.int64)
    if config is None or (is_video and media.frames is None):
        return tokens
    sampling = None
    if is_video:
        names = ("fps", "min_frames", "max_frames", "temporal_patch_size")
        sampling = VideoSampling(**{name: config[name] for name in names})
    for first in range(0, len(tokens), _BLOCK):
        block = slice(first, first + _BLOCK)
        height, width, known = _sides(media, block)
        frames: Floats | float = 1.0
        if sampling is not None and media.frames is not None:
            known &= media.frames[block] >= 1
            frames = _count_sampled(
                media.frames[block], None if media.fps is None else media.fps[block], sampling
            )
            # Frames smaller than one token are first brought to its size.
            scale = np.maximum(1.0, config["factor"] / np.minimum(height, width))
            height, width = np.trunc(height * scale), np.trunc(width * scale)
        found, too_large = _cells(height, width, frames, config)
        if sampling is not None:
            found *= frames / sampling.temporal_patch_size
        known &= np.maximum(height, width) / np.minimum(height, width) <= MAX_ASPECT_RATIO
        with np.errstate(invalid="ignore"):  # of unknown entries
            np.copyto(tokens[block], found, where=known & ~too_large, casting="unsafe")
        for place in first + np.flatnonzero(known & too_large):
            tokens[place] = _large_tokens(media, int(place), config, sampling)
    return tokens


def _large_tokens(media: MediaSizes, place: int, config: Geometry, sampling: VideoSampling | None) -> int:
    """Return the tokens of an image or video whose numbers are too large for arithmetic in floats."""
    height, width = int(media.height[place]), int(media.width[place])
    factor: int = config["factor"]
    bounds = config["min_pixels"], config["max_pixels"]
    if sampling is None or media.frames is None:
        return image_tokens((height, width), factor, *bounds)
    temporal = sampling.temporal_patch_size
    fps = math.nan if media.fps is None else float(media.fps[place])
    rate = fps if _LEAST_FPS <= fps < math.inf else None
    frames = count_sampled_frames(VideoInfo(int(media.frames[place]), height, width, rate, None), sampling)
    rows, columns = resize_video(frames, height, width, temporal, factor, *bounds)
    return (frames // temporal) * (rows // factor) * (columns // factor)


def _cells(height: Floats, width: Floats, frames: Floats | float, config: Geometry) -> tuple[Floats, Flags]:
    """Return the tokens of a frame of each size, and where the numbers are too large for floats.

    The steps, and their order, are those of `packhorse.media.images`.
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
    return rows * columns, (pixels >= _EXACT) | (max(low, high) >= _EXACT)


def _count_sampled(
    frames: npt.NDArray[Any], fps: npt.NDArray[np.floating[Any]] | None, sampling: VideoSampling
) -> Floats:
    """Return the number of sampled frames: the steps of `packhorse.media.sampling.count_sampled_frames`."""
    total = frames.astype(np.float64)
    count = most = total if sampling.max_frames is None else np.minimum(total, sampling.max_frames)
    if sampling.fps is not None and fps is not None:
        rate = fps.astype(np.float64)
        with np.errstate(invalid="ignore"):
            rate[~((rate >= _LEAST_FPS) & (rate < np.inf))] = np.nan
        wanted = np.trunc(total / rate * sampling.fps)
        taken = np.minimum(np.maximum(wanted, sampling.min_frames or 1), most)
        count = np.where(np.isnan(rate) | (rate == sampling.fps), most, taken)
    temporal = sampling.temporal_patch_size
    filled: Floats = np.ceil(np.maximum(count, 1) / temporal) * temporal
    return filled


def _sides(media: MediaSizes, block: slice) -> tuple[Floats, Floats, Flags]:
    """Return heights and widths to compute with, and which of them are known and needed."""
    height, width = media.height[block].astype(np.float64), media.width[block].astype(np.float64)
    known = (height >= 1) & (width >= 1)
    if media.tokens is not None:
        known &= media.tokens[block] < 0
    np.maximum(height, 1, out=height)
    np.maximum(width, 1, out=width)
    return height, width, known


def _row_sums(offsets: Integers, values: npt.NDArray[Any]) -> Integers:
    running = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=running[1:])
    sums: Integers = np.diff(running[offsets])
    return sums
