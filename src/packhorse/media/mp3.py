"""What an MP3 file tells about its length: the header that encoders hide in its first frame (Xing, VBRI)."""

from __future__ import annotations

from dataclasses import dataclass
from struct import unpack_from
from typing import BinaryIO

_WINDOW = 4096  # the first frame, and whatever junk stands in front of it
_HAS_FRAMES, _HAS_BYTES = 1, 2


@dataclass(frozen=True, slots=True)
class Mp3Length:
    """What the first frame tells.

    ``told`` is whether it holds the number of frames; without it a length can only be guessed from the first
    frame's bit rate. ``missing`` is how many bytes it promises beyond the end of the file.
    """

    told: bool
    missing: int


def mp3_length(file: BinaryIO) -> Mp3Length:
    """Read the length header behind the tags; leaves the file at its start."""
    end = file.seek(0, 2)
    start = _behind_tags(file, end)
    file.seek(start)
    head = file.read(_WINDOW)
    file.seek(0)
    frames, size = _xing(head) or _vbri(head) or (0, 0)
    return Mp3Length(frames > 0, max(0, start + size - end))


def _behind_tags(file: BinaryIO, end: int) -> int:
    at = 0
    while at < end:
        file.seek(at)
        tag = file.read(10)
        if len(tag) < 10 or tag[:3] != b"ID3":
            break
        # Seven bits of each byte; a flag says that the header is repeated behind the tag.
        size = sum((byte & 0x7F) << shift for byte, shift in zip(tag[6:], (21, 14, 7, 0), strict=True))
        at += 10 + size + (10 if tag[5] & 0x10 else 0)
    return at


def _xing(head: bytes) -> tuple[int, int] | None:
    at = max(head.find(b"Xing"), head.find(b"Info"))
    if at < 0 or at + 16 > len(head):
        return None
    flags, first, second = unpack_from(">III", head, at + 4)
    frames = first if flags & _HAS_FRAMES else 0
    size = (second if flags & _HAS_FRAMES else first) if flags & _HAS_BYTES else 0
    return frames, size


def _vbri(head: bytes) -> tuple[int, int] | None:
    at = head.find(b"VBRI")
    if at < 0 or at + 18 > len(head):
        return None
    size, frames = unpack_from(">II", head, at + 10)
    return frames, size
