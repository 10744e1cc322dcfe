"""Rules about media: open and decode the media items of rows.

Decoding takes milliseconds for an image and that of 32 frames for a video; reading headers takes
microseconds. A path that several rows name is checked once per process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from packhorse.errors import BadSample
from packhorse.media import (
    VideoInfo,
    VideoSampling,
    confine,
    describe,
    load_image,
    load_media,
    media_size,
    open_source,
    read_bytes,
)
from packhorse.media.failure import read_error
from packhorse.media.images import MAX_ASPECT_RATIO
from packhorse.tools.check.rules import RULES, Severity, Violation, violation
from packhorse.types import MediaRef

TINY = 16
"""Images with a side below this number of pixels are reported as tiny."""

DIGEST_BYTES = 16

_FRAMES = VideoSampling(max_frames=32)
_MAX_KNOWN = 1 << 14
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class CheckedMedia:
    """One checked media item."""

    violations: tuple[Violation, ...]
    size: tuple[int, int] | None  # (height, width) of an image or of a video's frames; None if unknown
    content: bytes  # a digest of its bytes; of its name if they were not read
    name: bytes  # a digest of its name; empty if it has none (bytes in a Parquet file)
    read: bool = False  # whether ``content`` is that of its bytes
    failed: bool = False  # it could not be opened or decoded


class MediaChecker:
    """Checks media items; with a processor, that decides which shapes it rejects."""

    def __init__(self, decode: bool, tiny: int = TINY, has_processor: bool = False) -> None:
        self.decode, self.tiny, self.has_processor = decode, tiny, has_processor
        self._known: dict[Any, CheckedMedia] = {}

    def check(self, ref: MediaRef, media_dir: str | None, confined: bool) -> CheckedMedia:
        """Check one media item, which belongs in ``media_dir``; ``confined`` rejects it anywhere else."""
        key = None
        if isinstance(ref.source, str):
            key = (ref.kind, ref.source, repr(ref.options) if ref.options else "", media_dir, confined)
            if (known := self._known.get(key)) is not None:
                return known
        item = self._open_and_check(ref)
        outside = _check_folder(ref.source, media_dir, "error" if confined else "warning")
        item = replace(item, violations=(*outside, *item.violations))
        if key is not None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[key] = item
        return item

    def _open_and_check(self, ref: MediaRef) -> CheckedMedia:
        in_memory = isinstance(ref.source, bytes | bytearray | memoryview)
        name = b"" if in_memory else digest(repr(ref.source).encode("utf-8", "backslashreplace"))
        try:
            size, content = self._open(ref)
        except BadSample as error:
            rule = error.reason if error.reason in RULES else "broken_media"
            failure = (violation(rule, error.detail),)
            return CheckedMedia(failure, None, name or bytes(DIGEST_BYTES), name, failed=True)
        violations = self._check_shape(ref, size) if ref.kind == "image" and size is not None else ()
        return CheckedMedia(tuple(violations), size, content or name, name, content is not None)

    def _open(self, ref: MediaRef) -> tuple[tuple[int, int] | None, bytes | None]:
        """Return (size, digest of the bytes or None)."""
        if not self.decode:
            known: Any = media_size(ref)
            if ref.kind == "audio":
                return None, None
            return (known.height, known.width) if isinstance(known, VideoInfo) else known, None
        if ref.kind == "image":
            return _decode_image(ref.source)
        loaded: Any = load_media(ref, sampling=_FRAMES)
        size = None if ref.kind == "audio" else loaded.frames.shape[1:3]
        return size, _file_digest(ref.source)

    def _check_shape(self, ref: MediaRef, size: tuple[int, int]) -> Iterator[Violation]:
        shape = f"{describe(ref.source)} is {size[1]:,} x {size[0]:,}"
        ratio = max(size) / min(size)
        if ratio > MAX_ASPECT_RATIO and not self.has_processor:
            limit = f"the Qwen processors take at most {MAX_ASPECT_RATIO}"
            yield violation("extreme_aspect_ratio", f"{shape}, sides of 1 to {ratio:,.0f}; {limit}")
        if min(size) < self.tiny:
            yield violation("tiny_image", f"{shape}, below {self.tiny} pixels a side")


def digest(data: bytes) -> bytes:
    """Return a digest of bytes."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _decode_image(source: Any) -> tuple[tuple[int, int], bytes]:
    data = read_bytes(source)  # once, for the digest and for the pixels
    try:
        image = load_image(data)
    except BadSample as error:
        detail = error.detail.replace(describe(data), describe(source), 1)
        raise BadSample(detail, reason=error.reason, stage=error.stage) from error
    return (image.height, image.width), digest(data)


def _file_digest(source: Any) -> bytes | None:
    """Return a digest of the bytes of a file; None for frames in a list or folder."""
    if isinstance(source, list | tuple):
        return None
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    try:
        with open_source(source) as file:
            while piece := file.read(_PIECE):
                state.update(piece)
    except OSError as error:
        raise read_error(error, f"{describe(source)}: reading it failed ({error})", "broken_media") from None
    except BadSample:
        return None  # a folder of frames, which was just decoded
    return state.digest()


def _check_folder(source: Any, media_dir: str | None, severity: Severity) -> Iterator[Violation]:
    try:
        if media_dir is not None:
            confine(source, media_dir)
    except BadSample as error:
        # Other reasons (it is not a path) are found when it is opened.
        if error.reason == "outside_media_dir":
            yield violation("outside_media_dir", error.detail, severity)
