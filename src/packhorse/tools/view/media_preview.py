"""Media as a browser shows them: the number of a row and of a media item go in, encoded bytes come out.

Nothing is served by its path, and nothing as it lies on the disk: images and frames are decoded and encoded
again, so a file that is no image cannot reach the browser as something else.
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

FRAMES = 8
"""The most frames of a video that are shown, evenly spaced."""

_SMALL = 512 * 512  # up to so many pixels an image is sent without loss


class EncodedMedia(NamedTuple):
    """Bytes and what they are."""

    data: bytes
    kind: str


class MediaPreviews:
    """The media of the rows of one dataset.

    Args:
        encoder: knows the rows, and how videos are sampled.
    """

    def __init__(self, encoder: RowEncoder) -> None:
        self.encoder = encoder
        self._frames = lru_cache(maxsize=16)(self._video)

    def get(self, row: int, number: int) -> EncodedMedia:
        """An image, or a sound.

        Raises:
            BadSample: it cannot be decoded.
            LookupError: there is no such media item, or it is a video.
        """
        ref = self._ref(row, number)
        if ref.kind == "video":
            raise LookupError("a video is shown by its frames")
        media_item = load_media(ref, sampling_rate=self.encoder.family.sampling_rate)
        if isinstance(media_item, Image.Image):
            return encode_image(media_item)
        assert isinstance(media_item, tuple)
        return encode_audio(*media_item)

    def frames(self, row: int, number: int) -> tuple[int, ...]:
        """Which of the frames that the model is fed are shown, by their number in the video.

        Raises:
            BadSample: the video cannot be decoded.
            LookupError: there is no such video.
        """
        return self._frames(row, number)[0]

    def frame(self, row: int, number: int, place: int) -> EncodedMedia:
        """One of :meth:`frames`, by its place among them."""
        if place < 0:
            raise LookupError("frames are numbered from 0")
        return self._frames(row, number)[1][place]

    def _ref(self, row: int, number: int) -> MediaRef:
        media = self.encoder.conversation(row).media
        if not 0 <= number < len(media):
            raise LookupError(f"media item {number} of {len(media)}")
        return media[number]

    def _video(self, row: int, number: int) -> tuple[tuple[int, ...], list[EncodedMedia]]:
        ref = self._ref(row, number)
        if ref.kind != "video":
            raise LookupError(f"media item {number} is no video")
        video = load_media(ref, sampling=self.encoder.samples.encoder.video_sampling)
        assert isinstance(video, VideoFrames)
        total = len(video.frames)
        places = np.unique(np.linspace(0, total - 1, min(total, FRAMES)).astype(int)).tolist()
        numbers = tuple(int(video.metadata.frames_indices[place]) for place in places)
        return numbers, [encode_image(Image.fromarray(video.frames[place])) for place in places]


def encode_image(image: Image.Image) -> EncodedMedia:
    """An RGB image in its own size."""
    small = image.width * image.height <= _SMALL
    out = io.BytesIO()
    if small:
        image.save(out, "PNG", compress_level=1)
    else:
        image.save(out, "JPEG", quality=88)
    return EncodedMedia(out.getvalue(), "image/png" if small else "image/jpeg")


def encode_audio(samples: np.ndarray, rate: int) -> EncodedMedia:
    """Mono sound as a WAV file of 16 bits."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(int(rate))
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return EncodedMedia(out.getvalue(), "audio/wav")


def describe_error(error: BaseException) -> str:
    """What to say of a media item that cannot be shown."""
    return error.detail if isinstance(error, BadSample) else str(error)
