"""How many tokens a sample has, guessed from its row alone: the only place of these formulas.

No file is opened and no tokenizer runs: text by its characters, media by the sizes that the row tells and the
geometry of the processor. Costs a few microseconds a row; `packhorse.formats.estimate` does the same to a
million rows at once, to the same number. The exact count is `packhorse count`'s affair.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from packhorse.errors import ConfigError
from packhorse.media.resize import MOST_UNEVEN, resize_image, resize_video
from packhorse.media.sampling import VideoInfo, VideoSampling, count_sampled_frames

# Without better knowledge a token is three characters and a medium 500 tokens.
CHARS_PER_TOKEN = 3
TOKENS_PER_MEDIUM = 500

Geometry = Mapping[str, Any]
"""``patch_size``, ``merge_size``, ``factor``, ``min_pixels``, ``max_pixels``; for videos also
``temporal_patch_size``, ``fps``, ``min_frames``, ``max_frames``."""

# A film of less than a frame in a quarter of an hour: the number is a mistake, and would divide to infinity.
LEAST_FPS = 1e-3
_TOO_LARGE = 2**53


class Estimate(NamedTuple):
    """Tokens of a sample.

    ``told`` says that the row's own fields tell all of it: nothing is the guess of three characters a token
    or of 500 tokens a medium.
    """

    text: int
    media: int
    told: bool


def image_config(processor: Any) -> dict[str, int] | None:
    """The geometry by which Qwen-like image processors cut images into tokens; None where there is none.

    Returns:
        ``patch_size``, ``merge_size``, ``factor`` (pixels along a token's side), ``min_pixels`` and
        ``max_pixels``. Pixel bounds are attributes, or in ``size`` under ``min_pixels``/``max_pixels`` or
        ``shortest_edge``/``longest_edge``; bounds that are not told are those of Qwen2-VL.
    """
    return _geometry(getattr(processor, "image_processor", None), 56 * 56, 14 * 14 * 4 * 1280)


def video_config(processor: Any) -> dict[str, Any] | None:
    """The geometry by which Qwen-like video processors cut films into tokens; None where there is none.

    Returns:
        What :func:`image_config` gives (the pixel bounds hold for all frames of a film together), and
        ``temporal_patch_size``, ``fps`` (None, as in transformers 5: every frame is taken), ``min_frames``
        and ``max_frames``; what is not told is as in Qwen3-VL.
    """
    owner = getattr(processor, "video_processor", None)
    config: dict[str, Any] | None = _geometry(owner, 128 * 128, 16 * 16 * 2 * 2 * 2 * 6144)
    if config is None:
        return None
    fps = getattr(owner, "fps", None)
    config["temporal_patch_size"] = _whole(getattr(owner, "temporal_patch_size", None), 2)
    config["fps"] = fps if isinstance(fps, int | float) else None
    config["min_frames"] = _whole(getattr(owner, "min_frames", None), 4)
    config["max_frames"] = _whole(getattr(owner, "max_frames", None), 768)
    return config


def estimate_image_tokens(img_meta: Any, image_cfg: Geometry | None) -> int:
    """Tokens of one image by its entry in ``images_meta``.

    >>> qwen2_vl = {"factor": 28, "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
    >>> estimate_image_tokens([480, 640], qwen2_vl)
    391

    Args:
        img_meta: ``[height, width]``, ``{"n_tokens": n}``, or None for an image that counts nothing.
        image_cfg: see :func:`image_config`.

    Returns:
        The tokens; 500 where the entry or the geometry does not tell them, or the processors refuse the size.
    """
    found = _image_tokens(img_meta, image_cfg)
    return TOKENS_PER_MEDIUM if found is None else found


def estimate_video_tokens(vid_meta: Any, video_cfg: Geometry | None) -> int:
    """Tokens of one video by its entry in ``videos_meta``; timestamps between its frames are text.

    Args:
        vid_meta: ``[total_frames, height, width, fps, duration]``, ``{"n_tokens": n}``, or None.
        video_cfg: see :func:`video_config`.

    Returns:
        The tokens; 500 where the entry or the geometry does not tell them, or the processors refuse the size.
    """
    found = _video_tokens(vid_meta, video_cfg)
    return TOKENS_PER_MEDIUM if found is None else found


@overload
def estimate_sample_length(
    example: Mapping[str, Any],
    image_cfg: Geometry | None = ...,
    video_cfg: Geometry | None = ...,
    return_media_tokens: Literal[False] = ...,
) -> int: ...
@overload
def estimate_sample_length(
    example: Mapping[str, Any],
    image_cfg: Geometry | None,
    video_cfg: Geometry | None,
    return_media_tokens: Literal[True],
) -> tuple[int, int]: ...
@overload
def estimate_sample_length(
    example: Mapping[str, Any],
    image_cfg: Geometry | None = ...,
    video_cfg: Geometry | None = ...,
    *,
    return_media_tokens: bool,
) -> int | tuple[int, int]: ...
def estimate_sample_length(
    example: Mapping[str, Any],
    image_cfg: Geometry | None = None,
    video_cfg: Geometry | None = None,
    return_media_tokens: bool = False,
) -> int | tuple[int, int]:
    """Tokens of one example, text and media together.

    Args:
        example: in the documented format; see :func:`estimate`.
        image_cfg: see :func:`image_config`.
        video_cfg: see :func:`video_config`.
        return_media_tokens: return (all tokens, those of media).
    """
    found = estimate(example, image_cfg, video_cfg)
    total = found.text + found.media
    return (total, found.media) if return_media_tokens else total


def estimate(
    example: Mapping[str, Any], image_cfg: Geometry | None = None, video_cfg: Geometry | None = None
) -> Estimate:
    """Tokens of one example: text and media apart.

    Text is ``_text_tokens``, else all characters // 3. Media are ``_media_tokens``, else what each entry of
    ``mm_inputs_meta`` is worth (:func:`estimate_image_tokens`), and 500 for each medium without an entry. A
    turn or part that is not in the documented format counts nothing: what is wrong with it is said when the
    sample is read.
    """
    text, media = example.get("_text_tokens"), example.get("_media_tokens")
    if text is not None and media is not None:
        return Estimate(int(text), int(media), True)
    seen = outline(example)
    found = media_tokens(seen, example.get("mm_inputs_meta"), image_cfg, video_cfg)
    told = text is not None and (media is not None or found[1])
    return Estimate(
        seen.characters // CHARS_PER_TOKEN if text is None else int(text),
        found[0] if media is None else int(media),
        told,
    )


class Outline(NamedTuple):
    """How much text and how many media an example has."""

    characters: int = 0
    images: int = 0
    videos: int = 0
    audios: int = 0


def outline(example: Mapping[str, Any]) -> Outline:
    """Count characters and media without building anything; passes over what is not understood."""
    characters = images = videos = audios = 0
    turns = example.get("conversation")
    for turn in turns if isinstance(turns, (list, tuple)) else ():
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


def media_tokens(
    seen: Outline,
    meta: Mapping[str, Any] | None,
    image_cfg: Geometry | None = None,
    video_cfg: Geometry | None = None,
) -> tuple[int, bool]:
    """(tokens of all media of an example, whether none of them is the blind guess of 500)."""
    images = (meta.get("images_meta") or ()) if meta else ()
    videos = (meta.get("videos_meta") or ()) if meta else ()
    found = [_image_tokens(entry, image_cfg) for entry in images]
    found += [_video_tokens(entry, video_cfg) for entry in videos]
    unknown = found.count(None) + unlisted(seen, len(images), len(videos))
    return sum(tokens for tokens in found if tokens is not None) + unknown * TOKENS_PER_MEDIUM, not unknown


def unlisted(seen: Outline, images: int, videos: int) -> int:
    """How many media have no entry in the lists of that many images and videos; sounds never have one."""
    return max(0, seen.images - images) + max(0, seen.videos - videos) + seen.audios


def told_tokens(entry: Any) -> int | None:
    """What an entry says outright: its ``n_tokens``; 0 if it is null; None if it does not say."""
    if entry is None:
        return 0
    tokens = entry.get("n_tokens") if isinstance(entry, Mapping) else None
    return max(0, int(tokens)) if isinstance(tokens, int | float) else None


def sizes_in(entry: Any, count: int) -> tuple[int, ...] | None:
    """The first ``count`` numbers of an entry; None if it has not that many, or one cannot be a size."""
    if not isinstance(entry, list | tuple) or len(entry) < count:
        return None
    try:
        sizes = tuple(int(number) for number in entry[:count])
    except (TypeError, ValueError, OverflowError):
        return None
    return sizes if min(sizes) >= 1 and max(sizes) < _TOO_LARGE else None


def fps_in(entry: Sequence[Any]) -> float | None:
    """The rate of a film by its entry; None where it is not known or makes no sense."""
    fps = entry[3] if len(entry) > 3 else None
    known = isinstance(fps, int | float) and LEAST_FPS <= fps < math.inf
    return fps if known else None


def image_tokens(height: int, width: int, image_cfg: Geometry) -> int:
    """Tokens of an image of this size.

    Raises:
        ValueError: the processors refuse it: one side is more than 200 times the other.
    """
    factor: int = image_cfg["factor"]
    rows, columns = resize_image(height, width, factor, image_cfg["min_pixels"], image_cfg["max_pixels"])
    return (rows // factor) * (columns // factor)


def video_tokens(total_frames: int, height: int, width: int, fps: float | None, video_cfg: Geometry) -> int:
    """Tokens of a film of this size: of the frames that are taken, as many as fill the temporal patches.

    Raises:
        ValueError: the processors refuse it: one side is more than 200 times the other.
    """
    factor: int = video_cfg["factor"]
    temporal: int = video_cfg["temporal_patch_size"]
    frames = count_sampled_frames(VideoInfo(total_frames, height, width, fps, None), sampling_in(video_cfg))
    bounds = video_cfg["min_pixels"], video_cfg["max_pixels"]
    rows, columns = resize_video(frames, height, width, temporal, factor, *bounds)
    return (frames // temporal) * (rows // factor) * (columns // factor)


def _image_tokens(entry: Any, image_cfg: Geometry | None) -> int | None:
    told = told_tokens(entry)
    if told is not None or image_cfg is None:
        return told
    sizes = sizes_in(entry, 2)
    if sizes is None:
        return None
    try:
        return image_tokens(sizes[0], sizes[1], image_cfg)
    except ValueError:
        return None  # no processor takes such a shape; who loads the image says so


def _video_tokens(entry: Any, video_cfg: Geometry | None) -> int | None:
    told = told_tokens(entry)
    if told is not None or video_cfg is None:
        return told
    sizes = sizes_in(entry, 3)
    if sizes is None:
        return None
    sampling_in(video_cfg)  # a setting that makes no sense is the caller's mistake, not the film's
    try:
        return video_tokens(sizes[0], sizes[1], sizes[2], fps_in(entry), video_cfg)
    except ValueError:
        return None


def sampling_in(video_cfg: Geometry) -> VideoSampling:
    """How frames are taken.

    Raises:
        ConfigError: a setting is out of range.
    """
    settings = (video_cfg[name] for name in ("fps", "min_frames", "max_frames", "temporal_patch_size"))
    return _sampling(*settings)


@lru_cache(maxsize=64)
def _sampling(
    fps: float | None, min_frames: int | None, max_frames: int | None, temporal: int
) -> VideoSampling:
    return VideoSampling(fps, min_frames, max_frames, None, temporal)


def _geometry(owner: Any, min_pixels: int, max_pixels: int) -> dict[str, int] | None:
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


def _bound(owner: Any, name: str, edge: str, default: int) -> int:
    told = (getattr(owner, name, None), _size_entry(owner, name), _size_entry(owner, edge))
    return next((value for value in told if isinstance(value, int)), default)


def _size_entry(owner: Any, name: str) -> Any:
    size = getattr(owner, "size", None)
    return size.get(name) if isinstance(size, Mapping) else getattr(size, name, None)


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) else default


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
    """(all tokens, those of media) of every row; see :func:`packhorse.formats.estimate.estimate`."""
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

    The steps, and their order, are those of `packhorse.media.resize`.
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
