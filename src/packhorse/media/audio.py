"""Decode audio clips into mono float32 arrays, and read their lengths.

libsndfile decodes WAV, FLAC, OGG, MP3 and the like; PyAV decodes the formats it cannot read (AAC in ``.m4a``,
the audio track of a video) and files whose header has no length. Needs ``pip install -e '.[audio]'``,
for PyAV ``[video]``; an array needs soxr only to change its rate. Ten seconds take about a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from struct import unpack, unpack_from
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from packhorse.errors import BadSample, MissingDependency, install_line, require
from packhorse.media.container import open_container, packets_of
from packhorse.media.failure import DEFAULT_MAX_BYTES, bad_media, check_bytes
from packhorse.media.source import decoding, describe, open_source, reading

# The first and third word of a file -> byte order, name of the chunk with the samples.
_RIFF_FORMATS = {
    (b"RIFF", b"WAVE"): ("<", b"data"),
    (b"FORM", b"AIFF"): (">", b"SSND"),
    (b"FORM", b"AIFC"): (">", b"SSND"),
}
_STREAMED = 0x7FFF_0000  # a larger chunk was written to a pipe, before its length was known
_MP3_WINDOW = 4096  # holds the first frame, and junk in front of it
_XING_FRAMES, _XING_BYTES = 1, 2
_CODEC_FRAME = 4096  # samples; a coded frame of AAC, MP3, Opus or Vorbis has at most this many
_MAX_SAMPLES_PER_BYTE = 1 << 13  # of any codec: FLAC codes 65,535 samples of silence in 12 bytes
_BLOCK = 1 << 22  # samples of all channels together: 16 MiB
_UNKNOWN_LENGTH = (1 << 63) - 1  # of libsndfile
_SAMPLE_BYTES = 4
_MAX_CHANNELS = 64


@decoding
def load_audio(
    source: object, *, sampling_rate: int | None = None, max_bytes: int | None = DEFAULT_MAX_BYTES
) -> tuple[np.ndarray, int]:
    """Decode one clip into (mono float32 samples in [-1, 1], rate).

    Args:
        source: anything :func:`~packhorse.media.open_source` opens; an ``(array, rate)`` pair; a dict with
            ``array`` and ``sampling_rate``; or an object with ``get_all_samples()`` (torchcodec's decoder,
            which Hugging Face datasets return). Channels are averaged; integers are scaled. In a 2-D array
            the shorter axis is the channels.
        sampling_rate: resample to this rate (soxr, high quality) if the clip has another.
        max_bytes: raise if the samples, at their own rate or at ``sampling_rate``, take more memory (four
            bytes each); None for no limit.

    Raises:
        BadSample: ``missing_media``, ``broken_media`` or ``media_too_large``.
    """
    if (pair := _as_pair(source)) is not None:
        mono, rate = _mono_array(*pair, source)
    elif hasattr(source, "get_all_samples"):
        mono, rate = _decode_with_decoder(source)
    else:
        mono, rate = _decode_file(source, max_bytes)
    if sampling_rate is not None and sampling_rate != rate:
        # The rate in a damaged header can be 1.
        check_samples(len(mono) * sampling_rate // rate, max_bytes, source)
        mono, rate = require("soxr", "audio").resample(mono, rate, sampling_rate), sampling_rate
    if mono.size == 0:
        raise _no_samples(source)
    return np.ascontiguousarray(mono, dtype=np.float32), rate


@decoding
def audio_info(source: object) -> tuple[int, int]:
    """Return (number of samples, rate) of a clip as it is stored, without decoding it.

    It is the length that :func:`load_audio` gives at the clip's own rate, with two exceptions:

    - If only coded frames can be counted (Opus and AAC outside MP4), or an MP3 file has fewer of them than
      its header states (miscounted, or one is damaged), the two may differ by up to 4,096 samples.
    - A truncated file has the length in its header, or of the rest of it; :func:`load_audio` raises.

    Costs the header, and one read of the file if that has no length (raw AAC, a FLAC file written to a pipe,
    an MP3 file without the encoder's header).
    """
    if (pair := _as_pair(source)) is not None:
        mono, rate = _mono_array(*pair, source)
        count = len(mono)
    elif hasattr(source, "get_all_samples"):
        count, rate = _decoder_info(source)
    else:
        count, rate = _measure_file(source)
    if count < 1:
        raise _no_samples(source)
    return count, rate


def check_samples(samples: int, max_bytes: int | None, source: object) -> None:
    """Raise ``media_too_large`` if a clip of this number of samples needs more than ``max_bytes``."""
    what = f"{describe(source)}: a clip of {samples:,} samples"
    check_bytes(samples * _SAMPLE_BYTES, max_bytes, what, "cut it into shorter clips")


# --- arrays and decoders ----------------------------------------------------------------------------------


def _as_pair(source: object) -> tuple[Any, Any] | None:
    if isinstance(source, Mapping) and source.get("array") is not None:
        return source["array"], source.get("sampling_rate")
    if isinstance(source, tuple | list) and len(source) == 2 and not isinstance(source[0], str | bytes):
        return source[0], source[1]
    return None


def _mono_array(array: Any, rate: Any, source: object) -> tuple[np.ndarray, int]:
    try:
        samples = np.asarray(array)
        whole_rate = int(rate)
    except (TypeError, ValueError) as error:
        detail = f"{describe(source)} is not audio: expected (array, rate) ({error})"
        raise bad_media(detail, "wrong_format") from error
    if whole_rate < 1 or whole_rate != rate:
        detail = f"{describe(source)}: sampling rate {rate!r}, expected a whole number above 0"
        raise bad_media(detail, "wrong_format")
    is_wide_integer = samples.dtype.name in ("int64", "uint64")
    if samples.ndim not in (1, 2) or samples.dtype.kind not in "fiu" or is_wide_integer:
        expected = "expected 1 or 2 axes of floats, or of integers up to 32 bits"
        raise bad_media(f"{describe(samples)} is not audio: {expected}")
    if samples.dtype.kind == "f":
        floats = samples.astype(np.float32, copy=False)
    else:
        half = float(2 ** (8 * samples.dtype.itemsize - 1))
        offset = half if samples.dtype.kind == "u" else 0.0
        floats = ((samples.astype(np.float64) - offset) / half).astype(np.float32)
    if samples.ndim == 2 and samples.size:
        if min(samples.shape) > _MAX_CHANNELS:
            raise bad_media(f"{describe(samples)} is not audio: neither axis can be channels")
        return floats.mean(axis=int(np.argmin(samples.shape)), dtype=np.float32), whole_rate
    return floats.reshape(-1), whole_rate


def _decode_with_decoder(source: Any) -> tuple[np.ndarray, int]:
    samples = source.get_all_samples()
    # The axes are always channels, samples.
    return np.asarray(samples.data, dtype=np.float32).mean(axis=0), int(samples.sample_rate)


def _decoder_info(source: object) -> tuple[int, int]:
    metadata = getattr(source, "metadata", None)
    seconds, rate = (getattr(metadata, name, None) for name in ("duration_seconds", "sample_rate"))
    if seconds is None or rate is None:
        mono, rate = _decode_with_decoder(source)
        return len(mono), rate
    return round(seconds * rate), int(rate)


def _no_samples(source: object) -> BadSample:
    return bad_media(f"{describe(source)}: the clip has no samples")


# --- files ------------------------------------------------------------------------------------------------


class _Clip(NamedTuple):
    """The content of a file."""

    samples: np.ndarray  # mono; empty if only the header was read
    expected: int  # the number of samples in the header
    rate: int
    tolerance: int  # the number of samples that an intact file may lack


def _measure_file(source: object) -> tuple[int, int]:
    with open_source(source) as file, reading(source):
        with _open_soundfile(file, source) as clip:
            if clip is not None:
                _check_length(int(clip.frames), file, source)
                return int(clip.frames), int(clip.samplerate)
        measured = _read_with_pyav(file, source, None, decode=False)
        return measured.expected, measured.rate


def _decode_file(source: object, max_bytes: int | None) -> tuple[np.ndarray, int]:
    with open_source(source) as file, reading(source):
        if missing := _missing_bytes(file):
            raise bad_media(f"{describe(source)} is truncated: {missing:,} bytes of audio are missing")
        with _open_soundfile(file, source) as clip:
            if clip is not None:
                decoded = _read_with_soundfile(clip, file, source, max_bytes)
        if clip is None:
            decoded = _read_with_pyav(file, source, max_bytes, decode=True)
    samples, expected, rate, tolerance = decoded
    if len(samples) + tolerance < expected:
        raise bad_media(
            f"{describe(source)} is truncated or damaged: its header gives {expected:,} samples, "
            f"{len(samples):,} could be read"
        )
    return samples, rate


def _missing_bytes(file: BinaryIO) -> int:
    """Return how many bytes of audio a WAV or AIFF file lacks; 0 for any other format.

    libsndfile reads such a file as a shorter clip, without an error.
    """
    end = file.seek(0, 2)
    file.seek(0)
    head = file.read(12)
    order, wanted = _RIFF_FORMATS.get((head[:4], head[8:]), ("", b""))
    missing, position = 0, 12
    while wanted and position + 8 <= end:
        file.seek(position)
        name, size = unpack(f"{order}4sI", file.read(8))
        position += 8 + size + size % 2
        if name == wanted:
            missing = max(0, position - size % 2 - end) if size < _STREAMED else 0
            break
    file.seek(0)
    return missing


def _mp3_length(file: BinaryIO) -> tuple[bool, int]:
    """Return whether an MP3 has its number of frames in a Xing or VBRI header, and how many bytes it lacks.

    Without that number libsndfile guesses a length from the bit rate of the first frame. The position in the
    file stays the same.
    """
    before, end, start = file.tell(), file.seek(0, 2), 0
    while start < end:
        file.seek(start)
        tag = file.read(10)
        if len(tag) < 10 or tag[:3] != b"ID3":
            break
        # Seven bits of each byte; a flag says that the header is repeated after the tag.
        size = sum((byte & 0x7F) << shift for byte, shift in zip(tag[6:], (21, 14, 7, 0), strict=True))
        start += 10 + size + (10 if tag[5] & 0x10 else 0)
    file.seek(start)
    head = file.read(_MP3_WINDOW)
    file.seek(before)
    xing, vbri = max(head.find(b"Xing"), head.find(b"Info")), head.find(b"VBRI")
    frames = size = 0
    if 0 <= xing <= len(head) - 16:
        flags, first, second = unpack_from(">III", head, xing + 4)
        frames = first if flags & _XING_FRAMES else 0
        size = (second if flags & _XING_FRAMES else first) if flags & _XING_BYTES else 0
    elif 0 <= vbri <= len(head) - 18:
        size, frames = unpack_from(">II", head, vbri + 10)
    return frames > 0, max(0, start + size - end)


def _mp3_tolerance(file: BinaryIO) -> int:
    # Some encoders count a frame too many; if bytes are missing too, the file is truncated.
    return 0 if _mp3_length(file)[1] else _CODEC_FRAME


class _WatchedFile:
    """A file for libsndfile, which treats a failed read as the end of the file; keeps the error."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read(len(buffer))
        except OSError as error:
            self.error = self.error or error
            return 0
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        try:
            return self._file.seek(offset, whence)
        except OSError as error:
            self.error = self.error or error
            return self._file.tell()

    def tell(self) -> int:
        return self._file.tell()

    def check(self) -> None:
        if self.error is not None:
            raise self.error


@contextmanager
def _open_soundfile(file: BinaryIO, source: object) -> Iterator[Any]:
    """Yield the file opened by libsndfile, or None if PyAV has to read it."""
    soundfile = require("soundfile", "audio")
    watched = _WatchedFile(file)
    try:
        clip = soundfile.SoundFile(watched)
    except soundfile.LibsndfileError:
        watched.check()
        file.seek(0)
        yield None
        return
    with clip:
        watched.check()
        if clip.frames < _UNKNOWN_LENGTH and (clip.format != "MP3" or _mp3_length(file)[0]):
            try:
                yield clip
            finally:
                watched.check()
            return
    file.seek(0)
    try:
        require("av", "video")
    except MissingDependency as error:
        raise MissingDependency(
            f"{describe(source)} has no length in its header, so PyAV is needed to read it: "
            f"{install_line('video')}"
        ) from error
    yield None


def _read_with_soundfile(clip: Any, file: BinaryIO, source: object, max_bytes: int | None) -> _Clip:
    soundfile = require("soundfile", "audio")
    expected = int(clip.frames)
    _check_length(expected, file, source)
    check_samples(expected, max_bytes, source)
    tolerance = _mp3_tolerance(file) if clip.format == "MP3" else 0
    block = max(1, _BLOCK // clip.channels)
    pieces: list[np.ndarray] = []
    try:
        while not pieces or len(pieces[-1]) == block:
            pieces.append(clip.read(block, dtype="float32", always_2d=True).mean(axis=1))
    except soundfile.LibsndfileError as error:
        raise bad_media(f"{describe(source)} cannot be decoded ({error})") from error
    samples = np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
    return _Clip(samples, expected, int(clip.samplerate), tolerance)


def _read_with_pyav(file: BinaryIO, source: object, max_bytes: int | None, *, decode: bool) -> _Clip:
    try:
        av = require("av", "video")
    except MissingDependency as error:
        raise bad_media(
            f"{describe(source)} is in no format that libsndfile reads. AAC and the audio of videos are read "
            f"with PyAV: {install_line('video')}"
        ) from error
    samples = np.empty(0, np.float32)
    try:
        with open_container(av, file) as container:
            stream = _audio_stream(container, source)
            rate = int(stream.rate)
            tolerance = _mp3_tolerance(file) if container.format.name == "mp3" else _CODEC_FRAME
            ticks = stream.duration
            if not stream.frames or ticks is None:
                packets = packets_of(container, stream)
                ticks = sum(packet.duration or 0 for packet in packets if packet.size)
            expected = round(ticks * stream.time_base * rate)
        _check_length(expected, file, source)
        if decode:
            check_samples(expected, max_bytes, source)
            file.seek(0)
            with open_container(av, file) as container:
                samples = _decode_with_pyav(av, container, source, max_bytes)
            # The last coded frame is padded; the header has the end of the audio.
            samples = samples[:expected] if len(samples) - expected < _CODEC_FRAME else samples
    except av.error.FFmpegError as error:
        detail = f"{describe(source)} cannot be read as audio ({error.strerror or error})"
        raise bad_media(detail) from error
    return _Clip(samples, expected, rate, tolerance)


def _audio_stream(container: Any, source: object) -> Any:
    if not container.streams.audio:
        raise bad_media(f"{describe(source)} has no audio stream")
    stream = container.streams.audio[0]
    if stream.codec_context is None:
        raise bad_media(f"{describe(source)}: there is no decoder for its audio stream")
    if not stream.rate or not stream.time_base:
        raise bad_media(f"{describe(source)}: the header has no sampling rate")
    return stream


def _decode_with_pyav(av: Any, container: Any, source: object, max_bytes: int | None) -> np.ndarray:
    resampler = av.AudioResampler(format="fltp")
    pieces, total = [np.empty(0, np.float32)], 0
    for packet in packets_of(container, _audio_stream(container, source)):
        for frame in packet.decode():
            try:
                floats = resampler.resample(frame)
            except ValueError as error:
                raise bad_media(f"{describe(source)}: the audio changes its format ({error})") from error
            pieces += [out.to_ndarray().mean(axis=0) for out in floats]
            total += frame.samples
        check_samples(total, max_bytes, source)
    return np.concatenate(pieces)


def _check_length(samples: int, file: BinaryIO, source: object) -> None:
    position = file.tell()
    size = file.seek(0, 2)
    file.seek(position)
    if samples > size * _MAX_SAMPLES_PER_BYTE:
        raise bad_media(
            f"{describe(source)}: the header is damaged: it gives {samples:,} samples, more than any codec "
            f"packs into a file of {size:,} bytes"
        )
