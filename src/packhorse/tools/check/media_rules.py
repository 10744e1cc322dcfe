"""Media of a row, opened and decoded: a reference goes in, what is wrong with it and its digest come out.

An image costs its decoding (milliseconds), a video that of 32 frames spread over it; with headers alone it is
microseconds. A path that several rows name is looked at once in a process.
"""

from __future__ import annotations

import hashlib
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
from packhorse.tools.check.rules import RULES, Found, Severity, found
from packhorse.types import MediaRef

TINY = 16
"""An image with a side below this many pixels is called tiny."""

DIGEST_BYTES = 16

_FRAMES = VideoSampling(max_frames=32)
_MOST_KNOWN = 1 << 14
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Seen:
    """One media item.

    Attributes:
        findings: what is wrong with it.
        size: (height, width) of an image or of a video's frames; None where nobody knows.
        content: a digest of its bytes; of its name where they were not read.
        name: a digest of its name; empty where it has none (bytes in a Parquet file).
        read: whether ``content`` is that of its bytes.
        failed: whether it could not be opened or decoded.
    """

    findings: tuple[Found, ...]
    size: tuple[int, int] | None
    content: bytes
    name: bytes
    read: bool = False
    failed: bool = False


class MediaChecker:
    """Looks at media.

    Args:
        decode: decode them; otherwise only their headers are read.
        tiny: images with a side below this are told.
        has_processor: a processor says itself which shapes it refuses.
    """

    def __init__(self, decode: bool, tiny: int = TINY, has_processor: bool = False) -> None:
        self.decode, self.tiny, self.has_processor = decode, tiny, has_processor
        self._known: dict[Any, Seen] = {}

    def look(self, ref: MediaRef, media_dir: str | None, confined: bool) -> Seen:
        """Everything about one media item.

        Args:
            ref: the media item, its path resolved.
            media_dir: the folder it belongs to; None where the dataset names none.
            confined: whether the dataset refuses media outside it.
        """
        key = None
        if isinstance(ref.source, str):
            key = (ref.kind, ref.source, repr(ref.options) if ref.options else "", media_dir, confined)
            if (known := self._known.get(key)) is not None:
                return known
        seen = self._looked(ref)
        outside = _outside(ref.source, media_dir, "error" if confined else "warning")
        seen = replace(seen, findings=(*outside, *seen.findings))
        if key is not None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = seen
        return seen

    def _looked(self, ref: MediaRef) -> Seen:
        name = _name(ref.source)
        try:
            size, content = self._opened(ref)
        except BadSample as error:
            rule = error.reason if error.reason in RULES else "broken_media"
            told = (found(rule, error.detail),)
            return Seen(told, None, name or bytes(DIGEST_BYTES), name, failed=True)
        findings = self._shape(ref, size) if ref.kind == "image" and size is not None else []
        return Seen(tuple(findings), size, content or name, name, content is not None)

    def _opened(self, ref: MediaRef) -> tuple[tuple[int, int] | None, bytes | None]:
        """(size, digest of the bytes or None)."""
        if not self.decode:
            known: Any = media_size(ref)
            if ref.kind == "audio":
                return None, None
            return (known.height, known.width) if isinstance(known, VideoInfo) else known, None
        if ref.kind == "image":
            return _decoded_image(ref.source)
        loaded: Any = load_media(ref, sampling=_FRAMES)
        size = None if ref.kind == "audio" else loaded.frames.shape[1:3]
        return size, _file_digest(ref.source)

    def _shape(self, ref: MediaRef, size: tuple[int, int]) -> list[Found]:
        height, width = size
        findings = []
        uneven = max(size) / min(size)
        if uneven > MAX_ASPECT_RATIO and not self.has_processor:
            what = (
                f"{describe(ref.source)} is {width:,} x {height:,}, sides of 1 to {uneven:,.0f}; the Qwen "
                f"processors take at most {MAX_ASPECT_RATIO}"
            )
            findings.append(found("extreme_aspect_ratio", what))
        if min(size) < self.tiny:
            what = f"{describe(ref.source)} is {width:,} x {height:,}, below {self.tiny} pixels a side"
            findings.append(found("tiny_image", what))
        return findings


def digest(data: bytes) -> bytes:
    """A digest of some bytes."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _decoded_image(source: Any) -> tuple[tuple[int, int], bytes]:
    data = read_bytes(source)  # read once: for its digest and for its pixels
    try:
        image = load_image(data)
    except BadSample as error:
        detail = error.detail.replace(describe(data), describe(source), 1)
        raise BadSample(detail, reason=error.reason, stage=error.stage) from error
    return (image.height, image.width), digest(data)


def _file_digest(source: Any) -> bytes | None:
    """Of the bytes of a file; None for frames in a list or folder."""
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


def _name(source: Any) -> bytes:
    if isinstance(source, bytes | bytearray | memoryview):
        return b""
    return digest(repr(source).encode("utf-8", "backslashreplace"))


def _outside(source: Any, media_dir: str | None, severity: Severity) -> tuple[Found, ...]:
    if media_dir is None:
        return ()
    try:
        confine(source, media_dir)
    except BadSample as error:
        # Other reasons (something that is no path) are told when it is opened.
        if error.reason == "outside_media_dir":
            return (found("outside_media_dir", error.detail, severity),)
    return ()
