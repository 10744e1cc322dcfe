"""Sound: a source goes in, a mono float32 array with its rate, or just the number of samples, comes out.

libsndfile decodes WAV, FLAC, OGG, MP3 and the like; PyAV the formats it cannot read (AAC in ``.m4a``, the
sound track of a video). Needs ``pip install 'packhorse[audio]'`` (and ``[video]`` for the latter); sound that
is already an array needs soxr only to change its rate. Costs about a millisecond for ten seconds of sound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from packhorse.errors import BadSample, MissingDependency, require
from packhorse.media.chunks import missing_bytes
from packhorse.media.container import open_container
from packhorse.media.failure import bad
from packhorse.media.source import describe, open_source

# A coded frame of AAC, MP3, Opus or Vorbis is at most this long; where a clip ends is not told more exactly.
_CODEC_FRAME = 4096
_MOST_CHANNELS = 64


def load_audio(source: Any, *, sampling_rate: int | None = None) -> tuple[np.ndarray, int]:
    """Decode one clip into (mono float32 samples in [-1, 1], rate).

    Args:
        source: anything :func:`~packhorse.media.open_source` opens; an ``(array, rate)`` pair; a dict with
            ``array`` and ``sampling_rate``; or an object with ``get_all_samples()`` (torchcodec's decoder,
            which Hugging Face datasets hand out). Channels are averaged; integers are scaled. In a 2-D array
            the shorter axis is the channels.
        sampling_rate: resample to this rate (soxr, high quality) where the clip has another.

    Raises:
        BadSample: ``missing_media`` or ``broken_media``.
    """
    pair = _as_pair(source)
    if pair is not None:
        mono, rate = _mono_array(*pair, source)
    elif hasattr(source, "get_all_samples"):
        mono, rate = _from_decoder(source)
    else:
        mono, rate = _from_file(source)
    if mono.size == 0:
        raise _no_samples(source)
    if sampling_rate is not None and sampling_rate != rate:
        mono = require("soxr", "audio").resample(mono, rate, sampling_rate)
        rate = sampling_rate
    return np.ascontiguousarray(mono, dtype=np.float32), rate


def audio_info(source: Any) -> tuple[int, int]:
    """(number of samples, rate) of a clip as it is stored; nothing is decoded.

    It is the length that :func:`load_audio` gives at the clip's own rate, except where the header does not
    tell it (Opus and AAC outside MP4: up to one coded frame off). Costs the header, and for a stream that
    has none (raw AAC) one read of the file.
    """
    pair = _as_pair(source)
    if pair is not None:
        mono, rate = _mono_array(*pair, source)
        count = len(mono)
    elif hasattr(source, "get_all_samples"):
        count, rate = _decoder_info(source)
    else:
        with open_source(source) as file:
            sound = _open_sound(file)
            if sound is None:
                count, rate = _pyav_read(file, source, decode=False)[1:]
            else:
                with sound:
                    count, rate = int(sound.frames), int(sound.samplerate)
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


def _from_file(source: Any) -> tuple[np.ndarray, int]:
    with open_source(source) as file:
        lost = missing_bytes(file)
        if lost:
            raise bad(
                f"{describe(source)} is cut short: its header promises {lost:,} bytes more of sound",
                "broken_media",
            )
        sound = _open_sound(file)
        if sound is None:
            samples, promised, rate = _pyav_read(file, source, decode=True)
            # The last coded frame is filled up; the header knows where the sound ends.
            samples = samples[:promised] if len(samples) - promised < _CODEC_FRAME else samples
            exact = _CODEC_FRAME
        else:
            with sound:
                samples, promised, rate = _sound_read(sound, source), int(sound.frames), int(sound.samplerate)
                exact = _CODEC_FRAME if sound.format == "MP3" else 0
    if len(samples) + exact < promised:
        raise bad(
            f"{describe(source)} is cut short or damaged: it promises {promised:,} samples, "
            f"{len(samples):,} could be read",
            "broken_media",
        )
    return samples, rate


def _open_sound(file: BinaryIO) -> Any:
    """The file opened by libsndfile, or None where that is not one of its formats."""
    soundfile = require("soundfile", "audio")
    # A name that ends in .raw makes soundfile ask for a rate instead of looking into the file.
    if str(getattr(file, "name", "")).lower().endswith(".raw"):
        return None
    try:
        return soundfile.SoundFile(file)
    except soundfile.LibsndfileError:
        file.seek(0)
        return None


def _sound_read(sound: Any, source: Any) -> np.ndarray:
    soundfile = require("soundfile", "audio")
    try:
        samples: np.ndarray = sound.read(dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise bad(f"{describe(source)} cannot be decoded ({error})", "broken_media") from error
    mono: np.ndarray = samples.mean(axis=1)
    return mono


def _pyav_read(file: BinaryIO, source: Any, *, decode: bool) -> tuple[np.ndarray, int, int]:
    """(mono samples or nothing, number of samples the file promises, rate)."""
    try:
        av = require("av", "video")
    except MissingDependency as error:
        raise bad(
            f"{describe(source)} is in no format that libsndfile reads. AAC and the sound of videos are read "
            "with PyAV: pip install 'packhorse[video]'",
            "broken_media",
        ) from error
    pieces: list[np.ndarray] = []
    try:
        with open_container(av, file) as container:
            if not container.streams.audio:
                raise bad(f"{describe(source)} holds no sound", "broken_media")
            stream = container.streams.audio[0]
            rate = int(stream.rate)
            if stream.frames and stream.duration is not None:
                promised = round(stream.duration * stream.time_base * rate)
            else:
                promised = _samples_of_packets(container, stream, rate)
                file.seek(0)
        if not decode:
            return np.empty(0, np.float32), promised, rate
        with open_container(av, file) as container:
            to_floats = av.AudioResampler(format="fltp")
            for frame in container.decode(audio=0):
                pieces += [out.to_ndarray().mean(axis=0) for out in to_floats.resample(frame)]
    except (av.error.FFmpegError, OSError) as error:
        raise bad(
            f"{describe(source)} cannot be read as sound ({getattr(error, 'strerror', None) or error})",
            "broken_media",
        ) from error
    return np.concatenate([np.empty(0, np.float32), *pieces]), promised, rate


def _samples_of_packets(container: Any, stream: Any, rate: int) -> int:
    ticks = sum(packet.duration or 0 for packet in container.demux(stream) if packet.size)
    samples: int = round(ticks * stream.time_base * rate)
    return samples


def _no_samples(source: Any) -> BadSample:
    return bad(f"{describe(source)}: the clip has no samples", "broken_media")
