"""Real media, written by the tests: a video in which every frame has other pixels; an LMDB database."""

from __future__ import annotations

import struct
from pathlib import Path

import av
import lmdb
import numpy as np

CLOSED = {"bf": "2"}
OPEN_GROUPS = {"bf": "2", "x264-params": "open-gop=1:keyint=12:min-keyint=12:scenecut=0"}


def make_image(number: int, width: int = 64, height: int = 48) -> np.ndarray:
    """Frame ``number``: a bar that moves, over a colour that changes."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = number * 4 % 256
    pixels[..., 2] = 255 - number * 2 % 256
    at = number * 3 % (width - 4)
    pixels[:, at : at + 4] = 255
    return pixels


def write_video(
    path: Path,
    frames: int = 60,
    *,
    codec: str = "libx264",
    fps: int = 30,
    size: tuple[int, int] = (64, 48),
    group: int = 12,
    options: dict[str, str] | None = None,
    mux: dict[str, str] | None = None,
    pix_fmt: str = "yuv420p",
    rotation: int = 0,
) -> Path:
    with av.open(str(path), "w", options=mux or {}) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = pix_fmt
        stream.codec_context.gop_size = group
        stream.options = options or {}
        container.start_encoding()
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(make_image(number, *size), format="rgb24")
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    if rotation:
        _turn(path, rotation)
    return path


def write_database(path: Path, *, folder: bool = True, entries: dict[str, bytes] | None = None) -> Path:
    """An LMDB database: a folder, or a single file."""
    environment = lmdb.open(str(path), subdir=folder, map_size=1 << 24)
    with environment.begin(write=True) as transaction:
        for key, value in (entries or {"key": b"value", "other": b"second"}).items():
            transaction.put(key.encode(), value)
    environment.close()
    return path


def _turn(path: Path, rotation: int) -> None:
    """Write a rotation into the track header of an MP4, as a phone does."""
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 44
    cos, sin = {90: (0, 1), 180: (-1, 0), 270: (0, -1)}[rotation]
    data[at : at + 20] = struct.pack(">5i", cos << 16, -sin << 16, 0, sin << 16, cos << 16)
    path.write_bytes(data)


def decode_all(path: Path) -> np.ndarray:
    """Every frame, by decoding from the start: what all other ways are compared with."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def noise(width: int, height: int, channels: int = 3) -> np.ndarray:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(width * 1000 + height).integers(0, 256, shape, dtype=np.uint8)
