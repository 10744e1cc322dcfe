"""How a phone held the camera: the turn written in an MP4 or MOV header.

A file goes in; the quarter turns for each track come out. FFmpeg hands pixels out as they were stored, and
tells the turn only with a decoded frame; the header says it for a few small reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import unpack
from typing import BinaryIO

_UNIT = 1 << 16  # the matrix holds fixed-point numbers
_TURNS: dict[tuple[float, float, float, float], int] = {
    (1, 0, 0, 1): 0,
    (0, -1, 1, 0): 1,
    (-1, 0, 0, -1): 2,
    (0, 1, -1, 0): 3,
}


def quarter_turns(file: BinaryIO) -> dict[int, int]:
    """Track number -> counter-clockwise quarter turns that put its picture upright.

    Empty for everything that is not an MP4 or MOV file; 0 for a track with any other matrix.
    """
    end = file.seek(0, 2)
    file.seek(0)
    if file.read(8)[4:] not in (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip"):
        return {}
    turns: dict[int, int] = {}
    for kind, start, stop in _boxes(file, 0, end):
        if kind != b"moov":
            continue
        for track, track_start, track_stop in _boxes(file, start, stop):
            if track != b"trak":
                continue
            for name, head_start, head_stop in _boxes(file, track_start, track_stop):
                if name == b"tkhd":
                    file.seek(head_start)
                    turns.update(_track_header(file.read(min(head_stop - head_start, 128))))
    return turns


def _boxes(file: BinaryIO, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """(name, start of contents, end) of each box between two positions."""
    while at + 8 <= end:
        file.seek(at)
        head = file.read(16)
        if len(head) < 8:
            return
        size, name = unpack(">I4s", head[:8])
        start = at + 8
        if size == 1 and len(head) == 16:
            (size,) = unpack(">Q", head[8:])
            start = at + 16
        elif size == 0:
            size = end - at
        if size < start - at:
            return
        yield name, start, min(at + size, end)
        at += size


def _track_header(data: bytes) -> dict[int, int]:
    # Version 1 has 8-byte times; the matrix and the size (4 + 4 bytes) end the box.
    times = 16 if data[:1] == b"\x01" else 8
    at = 4 + times + 4 + 4 + times // 2 + 16
    if len(data) < at + 36:
        return {}
    (track,) = unpack(">I", data[4 + times : 8 + times])
    a, b, _, c, d = unpack(">5i", data[at : at + 20])
    return {track: _TURNS.get((a / _UNIT, b / _UNIT, c / _UNIT, d / _UNIT), 0)}
