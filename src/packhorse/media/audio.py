"""Sound: a source goes in, a mono float32 array with its rate, or just the number of samples, comes out.

libsndfile decodes WAV, FLAC, OGG, MP3 and the like; PyAV the formats it cannot read (AAC in ``.m4a``, the
sound track of a video) and files that do not tell their length (:mod:`packhorse.media.sound`). Needs
``pip install 'packhorse[audio]'`` (and ``[video]`` for the latter); sound that is already an array needs soxr
only to change its rate. Costs about a millisecond for ten seconds of sound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from packhorse.errors import BadSample, require
from packhorse.media.failure import bad
from packhorse.media.limits import DEFAULT_MAX_BYTES
from packhorse.media.sound import check_samples, decode_sound, measure_sound
from packhorse.media.source import describe

_MOST_CHANNELS = 64


def load_audio(
    source: Any, *, sampling_rate: int | None = None, max_bytes: int | None = DEFAULT_MAX_BYTES
) -> tuple[np.ndarray, int]:
    """Decode one clip into (mono float32 samples in [-1, 1], rate).

    Args:
        source: anything :func:`~packhorse.media.open_source` opens; an ``(array, rate)`` pair; a dict with
            ``array`` and ``sampling_rate``; or an object with ``get_all_samples()`` (torchcodec's decoder,
            which Hugging Face datasets hand out). Channels are averaged; integers are scaled. In a 2-D array
            the shorter axis is the channels.
        sampling_rate: resample to this rate (soxr, high quality) where the clip has another.
        max_bytes: refuse a clip whose samples, at its own rate or at ``sampling_rate``, take more memory
            (four bytes each); None is no limit.

    Raises:
        BadSample: ``missing_media``, ``broken_media`` or ``media_too_large``.
    """
    pair = _as_pair(source)
    if pair is not None:
        mono, rate = _mono_array(*pair, source)
    elif hasattr(source, "get_all_samples"):
        mono, rate = _from_decoder(source)
    else:
        mono, rate = decode_sound(source, max_bytes)
    if sampling_rate is not None and sampling_rate != rate:
        # A damaged header can tell a rate of 1.
        check_samples(len(mono) * sampling_rate // rate, max_bytes, source)
        mono = require("soxr", "audio").resample(mono, rate, sampling_rate)
        rate = sampling_rate
    if mono.size == 0:
        raise _no_samples(source)
    return np.ascontiguousarray(mono, dtype=np.float32), rate


def audio_info(source: Any) -> tuple[int, int]:
    """(number of samples, rate) of a clip as it is stored; nothing is decoded.

    It is the length that :func:`load_audio` gives at the clip's own rate, with two exceptions:

    - Where only coded frames can be counted (Opus and AAC outside MP4), or an MP3 file has fewer of them than
      its header tells (miscounted, or one is damaged), the two may differ by up to 4,096 samples.
    - A file that is cut short has the length that its header tells, or that is left of it, where
      :func:`load_audio` raises.

    Costs the header, and one read of the file where that tells no length (raw AAC, a FLAC file written to a
    pipe, an MP3 file without the encoder's header).
    """
    pair = _as_pair(source)
    if pair is not None:
        mono, rate = _mono_array(*pair, source)
        count = len(mono)
    elif hasattr(source, "get_all_samples"):
        count, rate = _decoder_info(source)
    else:
        count, rate = measure_sound(source)
    if count < 1:
        raise _no_samples(source)
    return count, rate


def _as_pair(source: Any) -> tuple[Any, Any] | None:
    if isinstance(source, Mapping) and source.get("array") is not None:
        return source["array"], source.get("sampling_rate")
    if isinstance(source, tuple | list) and len(source) == 2 and not isinstance(source[0], str | bytes):
        return source[0], source[1]
    return None


def _mono_array(array: Any, rate: Any, source: Any) -> tuple[np.ndarray, int]:
    try:
        samples = np.asarray(array)
        whole = int(rate)
    except (TypeError, ValueError) as error:
        raise bad(
            f"{describe(source)} is not sound: expected (array, rate) ({error})", "wrong_format"
        ) from error
    if whole < 1 or whole != rate:
        raise bad(
            f"{describe(source)}: sampling rate {rate!r}, expected a whole number above 0", "wrong_format"
        )
    if (
        samples.ndim not in (1, 2)
        or samples.dtype.kind not in "fiu"
        or samples.dtype.name in ("int64", "uint64")
    ):
        raise bad(
            f"{describe(samples)} is not sound: expected 1 or 2 axes of floats, or of integers up to 32 bits",
            "broken_media",
        )
    if samples.ndim == 2 and samples.size:
        if min(samples.shape) > _MOST_CHANNELS:
            raise bad(f"{describe(samples)} is not sound: neither axis can be channels", "broken_media")
        return _scaled(samples).mean(axis=int(np.argmin(samples.shape)), dtype=np.float32), whole
    return _scaled(samples).reshape(-1), whole


def _scaled(samples: np.ndarray) -> np.ndarray:
    if samples.dtype.kind == "f":
        return samples.astype(np.float32, copy=False)
    half = float(2 ** (8 * samples.dtype.itemsize - 1))
    offset = half if samples.dtype.kind == "u" else 0.0
    return ((samples.astype(np.float64) - offset) / half).astype(np.float32)


def _from_decoder(source: Any) -> tuple[np.ndarray, int]:
    try:
        samples = source.get_all_samples()
    except (RuntimeError, ValueError) as error:
        raise bad(f"{describe(source)} cannot be decoded ({error})", "broken_media") from error
    # Channels x samples, always.
    return np.asarray(samples.data, dtype=np.float32).mean(axis=0), int(samples.sample_rate)


def _decoder_info(source: Any) -> tuple[int, int]:
    metadata = getattr(source, "metadata", None)
    seconds = getattr(metadata, "duration_seconds", None)
    rate = getattr(metadata, "sample_rate", None)
    if seconds is None or rate is None:
        mono, known_rate = _from_decoder(source)
        return len(mono), known_rate
    return round(seconds * rate), int(rate)


def _no_samples(source: Any) -> BadSample:
    return bad(f"{describe(source)}: the clip has no samples", "broken_media")
