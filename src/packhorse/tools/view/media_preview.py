"""Media items of rows, decoded and re-encoded for a browser.

A file is never served by its path or byte for byte, so a file that is no media item cannot reach the browser.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from packhorse.errors import MissingDependency, data_errors
from packhorse.media import VideoFrames, VideoSampling, load_media
from packhorse.tools.view.row_encoder import RowEncoder
from packhorse.types import MediaRef

MAX_FRAMES = 8
"""How many frames of a video are shown, evenly spaced."""

_MAX_LOSSLESS = 512 * 512  # pixels of an image that is sent as PNG
_MAX_TILES = 4  # images of a pack in a list
_TILE = 64  # width and height in pixels
_TILE_GAP = 6
_TILE_PAPER = (128, 128, 128, 60)  # visible on a light and on a dark page


class EncodedMedia(NamedTuple):
    """Encoded bytes and their media type."""

    data: bytes
    media_type: str


class MediaPreviews:
    """The media of an encoder's rows; the encoder determines how videos are sampled."""

    def __init__(self, encoder: RowEncoder) -> None:
        self.encoder = encoder
        self._video = lru_cache(maxsize=16)(self._load_video)
        self.thumbnails = lru_cache(maxsize=512)(self._make_thumbnails)

    def get(self, row: int, number: int) -> EncodedMedia:
        """Return an image or an audio clip; raise ``LookupError`` if there is none of this number."""
        ref = self._ref(row, number)
        if ref.kind == "video":
            raise LookupError(f"media item {number} is a video: request its frames")
        media_item = load_media(ref, sampling_rate=self.encoder.family.sampling_rate)
        if isinstance(media_item, Image.Image):
            return encode_image(media_item)
        assert isinstance(media_item, tuple)
        return encode_audio(*media_item)

    def frames(self, row: int, number: int) -> tuple[int, ...]:
        """Return the indices in the video of the frames that are shown."""
        return self._video(row, number)[0]

    def frame(self, row: int, number: int, frame: int) -> EncodedMedia:
        """Return the n-th of the :meth:`frames` that are shown."""
        return self._video(row, number)[1][frame]

    def _make_thumbnails(self, rows: tuple[int, ...]) -> EncodedMedia:
        """Return the first images and video frames of some rows, as one small image."""
        tiles: list[Image.Image | None] = []
        for row in rows:
            with data_errors():
                for ref in self.encoder.conversation(row).media:
                    if ref.kind != "audio" and len(tiles) < _MAX_TILES:
                        tiles.append(self._make_tile(ref))
        return join_tiles(tiles)

    def _make_tile(self, ref: MediaRef) -> Image.Image | None:
        """Return a small image of a media item; None if it cannot be decoded."""
        with data_errors(), suppress(MissingDependency):
            item = load_media(ref, sampling=VideoSampling(num_frames=1))
            if isinstance(item, VideoFrames):
                item = Image.fromarray(item.frames[0])
            assert isinstance(item, Image.Image)
            return ImageOps.contain(item.convert("RGB"), (_TILE, _TILE))
        return None

    def _ref(self, row: int, number: int) -> MediaRef:
        media = self.encoder.conversation(row).media
        if not 0 <= number < len(media):
            raise LookupError(f"row {row} has {len(media)} media items, so there is no media item {number}")
        return media[number]

    def _load_video(self, row: int, number: int) -> tuple[tuple[int, ...], list[EncodedMedia]]:
        ref = self._ref(row, number)
        if ref.kind != "video":
            raise LookupError(f"media item {number} is not a video")
        video = load_media(ref, sampling=self.encoder.encoder.video_sampling)
        assert isinstance(video, VideoFrames)
        total = len(video.frames)
        shown = np.unique(np.linspace(0, total - 1, min(total, MAX_FRAMES)).astype(int)).tolist()
        indices = tuple(int(video.metadata.frames_indices[n]) for n in shown)
        return indices, [encode_image(Image.fromarray(video.frames[n])) for n in shown]


def join_tiles(tiles: Sequence[Image.Image | None]) -> EncodedMedia:
    """Draw small images next to each other; a crossed square for one that is missing."""
    step = _TILE + _TILE_GAP
    joined = Image.new("RGBA", (step * max(1, len(tiles)) - _TILE_GAP, _TILE))
    draw = ImageDraw.Draw(joined)
    for number, tile in enumerate(tiles):
        x = number * step
        corners = ((x, 0), (x + _TILE - 1, _TILE - 1))
        if tile is None:
            draw.rectangle(corners, outline="#a13d2d", width=2)
            draw.line(corners, fill="#a13d2d", width=2)
        else:
            draw.rectangle(corners, fill=_TILE_PAPER)
            joined.paste(tile, (x + (_TILE - tile.width) // 2, (_TILE - tile.height) // 2))
    out = io.BytesIO()
    joined.save(out, "PNG")
    return EncodedMedia(out.getvalue(), "image/png")


def encode_image(image: Image.Image) -> EncodedMedia:
    """Encode an RGB image in its original size."""
    out = io.BytesIO()
    if image.width * image.height <= _MAX_LOSSLESS:
        image.save(out, "PNG", compress_level=1)
        return EncodedMedia(out.getvalue(), "image/png")
    image.save(out, "JPEG", quality=88)
    return EncodedMedia(out.getvalue(), "image/jpeg")


def encode_audio(samples: np.ndarray, rate: int) -> EncodedMedia:
    """Encode mono audio as a 16-bit WAV file."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(int(rate))
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return EncodedMedia(out.getvalue(), "audio/wav")
