"""The sizes of the media of one conversation, and what a processor writes in the text for them.

A size decides how many tokens a media item has. It comes from the item's header, or from an item in memory;
nothing is decoded.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from packhorse.chat import compile_tokens
from packhorse.media import (
    DEFAULT_MAX_BYTES,
    MediaSize,
    VideoInfo,
    VideoSampling,
    describe,
    media_size,
    probe_video,
    sampling_of,
)
from packhorse.media.audio import check_samples
from packhorse.media.loading import preloaded_metadata
from packhorse.media.video import frame_positions
from packhorse.types import MediaKind, MediaRef

CallOptions = tuple[tuple[str, Any], ...]
"""Options of an image or video processor's call, hashable: mappings in them are pairs too."""


@dataclass(frozen=True, slots=True)
class ConfiguredSize:
    """The size of a media item with settings of its own.

    Attributes:
        original: its size in the file, after sampling frames.
        size: what the processor gets: the original size, or that to which the item is resized before.
        options: of the processor's call for this item.
        settings: what the options were made from; see :func:`~packhorse.media.settings.size_settings`.
    """

    original: MediaSize
    size: MediaSize
    options: CallOptions
    settings: tuple[tuple[str, int], ...]


AnySize = MediaSize | ConfiguredSize

Sizes = Sequence[tuple[MediaKind, AnySize]]
"""Kind and size of each media item of a sample, in the order of the conversation."""

Pieces = Sequence[tuple[str, int]]
"""Texts in order, and how often each is written in a row."""

_RATE_OF_UNKNOWN = 24
"""The rate that processors assume for a video without one."""


def frame_numbers(info: VideoInfo) -> range | tuple[int, ...]:
    """Where in the original video the frames are."""
    return range(info.total_frames) if info.indices is None else info.indices


def frame_times(info: VideoInfo) -> list[float]:
    """Seconds from the start for each frame, as processors take them from its metadata."""
    fps = _RATE_OF_UNKNOWN if info.fps is None else info.fps
    return [number / fps for number in frame_numbers(info)]


def size_of(ref: MediaRef, sampling: VideoSampling, sampling_rate: int) -> MediaSize:
    """The size of a media item from its header, after sampling frames and resampling audio.

    Raises BadSample if the item is missing, broken or too large to be decoded, or its options make no sense.
    """
    if ref.kind == "video":
        return _video_size(ref, sampling)
    size: Any = media_size(ref)
    if ref.kind == "image":
        height, width = size
        return height, width
    samples, rate = size
    # As soxr rounds the length of what it resamples.
    fed = int(samples) if rate == sampling_rate else math.floor(samples * sampling_rate / rate + 0.5)
    check_samples(max(samples, fed), DEFAULT_MAX_BYTES, ref.source)
    return fed


def _video_size(ref: MediaRef, sampling: VideoSampling) -> VideoInfo:
    ready = preloaded_metadata(ref)
    if ready is not None:
        # The frames that are there count, whatever size the original had.
        shown = probe_video(ref.source)
        indices = ready.frames_indices
        return VideoInfo(len(indices), shown.height, shown.width, ready.fps, ready.duration, indices)
    video: Any = media_size(ref)
    requested = ref.options.get("frame_indices")
    name, settings = describe(ref.source), sampling_of(ref, sampling)
    positions = frame_positions(video, settings, requested, name, DEFAULT_MAX_BYTES)
    size: VideoInfo = replace(video, total_frames=len(positions), indices=tuple(positions.tolist()))
    return size


def plain_size(size: AnySize) -> MediaSize:
    """Return the size of what the processor gets."""
    return size.size if isinstance(size, ConfiguredSize) else size


def call_arguments(options: CallOptions) -> dict[str, Any]:
    """Return options as keyword arguments.

    >>> call_arguments((("size", (("shortest_edge", 784),)), ("do_resize", True)))
    {'size': {'shortest_edge': 784}, 'do_resize': True}
    """
    return {name: dict(value) if isinstance(value, tuple) else value for name, value in options}


def check_equal_frames(sizes: Sizes) -> None:
    """Raise ValueError if the videos differ in frames."""
    numbers = sorted({size.total_frames for _, size in sizes if isinstance(size, VideoInfo)})
    if len(numbers) > 1:
        listed = ", ".join(map(str, numbers))
        raise ValueError(f"videos of {listed} frames in one sample, expected the same number for each")


@lru_cache(maxsize=4096)
def nearest_tiles(
    height: int, width: int, tile: int, arrangements: tuple[tuple[int, int], ...]
) -> tuple[int, int]:
    """The arrangement of tiles whose shape is nearest; of equals the larger, while it is not half empty."""
    best, nearest = (1, 1), float("inf")
    for across, down in arrangements:
        distance = abs(width / height - across / down)
        enough = distance == nearest and height * width > 0.5 * tile * across * down
        if distance < nearest or enough:
            best, nearest = (across, down), distance
    return best


@lru_cache
def tile_arrangements(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """Tiles across and down, small arrangements first; for processors that collect them in a set."""
    # Which of two equally large arrangements comes first is decided by the order of a set of pairs: it must
    # be the same set, filled in the same order, as in the processor.
    pairs = {
        (across, down)
        for larger in range(least, most + 1)
        for across in range(1, larger + 1)
        for down in range(1, larger + 1)
        if least <= across * down <= most
    }
    return tuple(sorted(pairs, key=lambda pair: pair[0] * pair[1]))


def split_runs(text: str, token: str) -> Pieces:
    """The text cut into runs of a token and what is between them."""
    runs: list[tuple[str, int]] = []
    for index, between in enumerate(text.split(token)):
        if index and runs and runs[-1][0] == token:
            runs[-1] = (token, runs[-1][1] + 1)
        elif index:
            runs.append((token, 1))
        if between:
            runs.append((between, 1))
    return runs


def frame_pieces(openings: Iterable[str], content: tuple[str, int], closing: str) -> Pieces:
    """What is written for frames or chunks of a video: its opening, its content tokens and the closing."""
    return [piece for opening in openings for piece in ((opening, 1), content, (closing, 1))]


def write_out(pieces: Pieces) -> str:
    """The text in full.

    >>> write_out([("<img>", 1), ("<pad>", 3), ("</img>", 1)])
    '<img><pad><pad><pad></img>'
    """
    return "".join(text * times for text, times in pieces)


def shorten(pieces: Pieces, whole_tokens: Container[str]) -> tuple[str, int]:
    """The text with every repeated token written once, and how many tokens were omitted.

    >>> shorten([("<img>", 1), ("<pad>", 3), ("</img>", 1)], {"<img>", "<pad>", "</img>"})
    ('<img><pad></img>', 2)

    Only ``whole_tokens`` are shortened: texts that the tokenizer makes one token of, whatever their
    neighbours (:func:`packhorse.chat.special_tokens`).
    """
    texts, omitted = [], 0
    for text, times in pieces:
        if times > 1 and text in whole_tokens:
            texts.append(text)
            omitted += times - 1
        else:
            texts.append(text * times)
    return "".join(texts), omitted


def fill_placeholders(
    text: str, placeholders: Mapping[MediaKind, str], kinds: Iterable[MediaKind], texts: Iterable[str]
) -> str:
    """Return the rendered text with the text of each media item in place of its placeholder.

    As the processors do it: the first placeholder of a kind is the first media item of that kind, wherever
    the template has put it.

    >>> placeholders = {"image": "<i>", "video": "<v>"}
    >>> fill_placeholders("a <i> b <v> c <i>", placeholders, ("image", "image", "video"), "123")
    'a 1 b 3 c 2'

    ``kinds`` and ``texts`` are in the order of the conversation; a kind without a placeholder is not written.
    """
    waiting: dict[str, list[str]] = {}
    for kind, item in zip(kinds, texts, strict=True):
        if kind in placeholders:
            waiting.setdefault(placeholders[kind], []).append(item)
    if not waiting:
        return text
    queues = {token: iter(written) for token, written in waiting.items()}
    return compile_tokens(waiting).sub(lambda match: next(queues[match[0]]), text)
