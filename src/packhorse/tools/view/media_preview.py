"""Media items of rows, decoded and re-encoded for a browser.

A file is never served by its path or byte for byte, so a file that is no media item cannot reach the browser.
"""

from __future__ import annotations

import io
import wave
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from PIL import Image

from packhorse.errors import BadSample
from packhorse.media import VideoFrames, load_media
from packhorse.tools.view.row_encoder import RowEncoder
from packhorse.types import MediaRef

MAX_FRAMES = 8
"""How many frames of a video are shown, evenly spaced."""

_MAX_LOSSLESS = 512 * 512  # pixels of an image that is sent as PNG


class EncodedMedia(NamedTuple):
    """Encoded bytes and their media type."""

    data: bytes
    media_type: str


class MediaPreviews:
    """The media of an encoder's rows; the encoder determines how videos are sampled."""

    def __init__(self, encoder: RowEncoder) -> None:
        self.encoder = encoder
        self._video = lru_cache(maxsize=16)(self._load_video)

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


def describe_error(error: BaseException) -> str:
    """Return the message of a media item that cannot be shown."""
    return error.detail if isinstance(error, BadSample) else str(error)
