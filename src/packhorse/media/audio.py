"""Sound: a source goes in, a mono float32 array with its rate, or just the number of samples, comes out.

libsndfile decodes WAV, FLAC, OGG, MP3 and the like; PyAV the formats it cannot read (AAC in ``.m4a``, the
sound track of a video) and files that do not tell their length (:mod:`packhorse.media.audio`). Needs
``pip install 'packhorse[audio]'`` (and ``[video]`` for the latter); sound that is already an array needs soxr
only to change its rate. Costs about a millisecond for ten seconds of sound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from struct import unpack, unpack_from
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from packhorse.errors import BadSample, MissingDependency, require
from packhorse.media.container import open_container, packets_of
from packhorse.media.failure import DEFAULT_MAX_BYTES, bad, check_bytes, unreadable
from packhorse.media.source import describe, open_source

# (start of the file, its kind) -> (byte order, name of the chunk that holds the sound)
_KINDS = {
    (b"RIFF", b"WAVE"): ("<", b"data"),
    (b"FORM", b"AIFF"): (">", b"SSND"),
    (b"FORM", b"AIFC"): (">", b"SSND"),
}
# Programs that write to a pipe cannot come back to fill in the length.
_STREAMED = 0x7FFF_0000


def missing_bytes(file: BinaryIO) -> int:
    """How many bytes of sound the header promises beyond the end of the file; 0 for any other format.

    Reads eight bytes of each chunk, and leaves the file at its start.
    """
    end = file.seek(0, 2)
    file.seek(0)
    head = file.read(12)
    order, wanted = _KINDS.get((head[:4], head[8:]), ("", b""))
    missing, at = 0, 12
    while wanted and at + 8 <= end:
        file.seek(at)
        name, size = unpack(f"{order}4sI", file.read(8))
        if name == wanted:
            missing = max(0, at + 8 + size - end) if size < _STREAMED else 0
            break
        at += 8 + size + size % 2
    file.seek(0)
    return missing


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
    """Read the length header after the tags; leaves the file at its start."""
    end = file.seek(0, 2)
    start = _after_tags(file, end)
    file.seek(start)
    head = file.read(_WINDOW)
    file.seek(0)
    frames, size = _xing(head) or _vbri(head) or (0, 0)
    return Mp3Length(frames > 0, max(0, start + size - end))


def _after_tags(file: BinaryIO, end: int) -> int:
    at = 0
    while at < end:
        file.seek(at)
        tag = file.read(10)
        if len(tag) < 10 or tag[:3] != b"ID3":
            break
        # Seven bits of each byte; a flag says that the header is repeated after the tag.
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


# A coded frame of AAC, MP3, Opus or Vorbis is at most this long; where a clip ends is not told more exactly.
_CODEC_FRAME = 4096
# Silence in FLAC: 65,535 samples in a frame of 12 bytes. No other codec packs more.
_MOST_SAMPLES_PER_BYTE = 1 << 13
_BLOCK = 1 << 22  # samples of all channels together: 16 MiB
_UNKNOWN = (1 << 63) - 1  # what libsndfile says where a header tells no length
_SAMPLE_BYTES = 4


def measure_audio(source: Any) -> tuple[int, int]:
    """(number of samples, rate); the header, or one read of the file where that tells no length."""
    with open_source(source) as file, _reading(source):
        with _libsndfile(file, source) as sound:
            if sound is not None:
                count, rate = int(sound.frames), int(sound.samplerate)
                _check_promise(count, file, source)
                return count, rate
        read = _pyav_read(file, source, None, decode=False)
        return read.promised, read.rate


def decode_audio(source: Any, max_bytes: int | None) -> tuple[np.ndarray, int]:
    """(mono float32 samples, rate)."""
    with open_source(source) as file, _reading(source):
        lost = missing_bytes(file)
        if lost:
            raise bad(
                f"{describe(source)} is cut short: its header promises {lost:,} bytes more of sound",
                "broken_media",
            )
        with _libsndfile(file, source) as sound:
            if sound is not None:
                read = _sound_read(sound, file, source, max_bytes)
        if sound is None:
            read = _pyav_read(file, source, max_bytes, decode=True)
    if len(read.samples) + read.slack < read.promised:
        raise bad(
            f"{describe(source)} is cut short or damaged: it promises {read.promised:,} samples, "
            f"{len(read.samples):,} could be read",
            "broken_media",
        )
    return read.samples, read.rate


class _Read(NamedTuple):
    """Mono samples (none where only the header was read), how many were promised, how many fewer will do."""

    samples: np.ndarray
    promised: int
    rate: int
    slack: int


class _Watched:
    """A file for libsndfile, which takes a failed read for the end of the file; it remembers the failure."""

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
def _reading(source: Any) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unreadable(error, f"{describe(source)}: reading it failed ({error})", "broken_media") from error


@contextmanager
def _libsndfile(file: BinaryIO, source: Any) -> Iterator[Any]:
    """The file opened by libsndfile, or None where PyAV is to read it."""
    soundfile = require("soundfile", "audio")
    watched = _Watched(file)
    try:
        sound = soundfile.SoundFile(watched)
    except soundfile.LibsndfileError:
        watched.check()
        file.seek(0)
        yield None
        return
    with sound:
        watched.check()
        told = sound.frames < _UNKNOWN
        if sound.format == "MP3":
            position = file.tell()
            told = told and mp3_length(file).told
            file.seek(position)
        if told:
            try:
                yield sound
            finally:
                watched.check()
            return
    file.seek(0)
    try:
        require("av", "video")
    except MissingDependency as error:
        raise MissingDependency(
            f"{describe(source)} does not tell its length, so PyAV is needed to read it: "
            "pip install 'packhorse[video]'"
        ) from error
    yield None


def _sound_read(sound: Any, file: BinaryIO, source: Any, max_bytes: int | None) -> _Read:
    soundfile = require("soundfile", "audio")
    promised = int(sound.frames)
    _check_promise(promised, file, source)
    check_samples(promised, max_bytes, source)
    slack = _mp3_slack(file) if sound.format == "MP3" else 0
    block = max(1, _BLOCK // sound.channels)
    pieces: list[np.ndarray] = []
    try:
        while not pieces or len(pieces[-1]) == block:
            pieces.append(sound.read(block, dtype="float32", always_2d=True).mean(axis=1))
    except soundfile.LibsndfileError as error:
        raise bad(f"{describe(source)} cannot be decoded ({error})", "broken_media") from error
    samples = np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
    return _Read(samples, promised, int(sound.samplerate), slack)


def _mp3_slack(file: BinaryIO) -> int:
    # Some encoders count a frame too many; where bytes are missing too, so is sound.
    position = file.tell()
    missing = mp3_length(file).missing
    file.seek(position)
    return 0 if missing else _CODEC_FRAME


def _pyav_read(file: BinaryIO, source: Any, max_bytes: int | None, *, decode: bool) -> _Read:
    try:
        av = require("av", "video")
    except MissingDependency as error:
        raise bad(
            f"{describe(source)} is in no format that libsndfile reads. AAC and the sound of videos are read "
            "with PyAV: pip install 'packhorse[video]'",
            "broken_media",
        ) from error
    samples = np.empty(0, np.float32)
    try:
        with open_container(av, file) as container:
            stream = _sound_stream(container, source)
            rate = int(stream.rate)
            slack = _mp3_slack(file) if container.format.name == "mp3" else _CODEC_FRAME
            if stream.frames and stream.duration is not None:
                promised = round(stream.duration * stream.time_base * rate)
            else:
                promised = _samples_of_packets(container, stream, rate)
        _check_promise(promised, file, source)
        if decode:
            check_samples(promised, max_bytes, source)
            file.seek(0)
            with open_container(av, file) as container:
                samples = _pyav_decode(av, container, source, max_bytes)
            # The last coded frame is filled up; the header knows where the sound ends.
            samples = samples[:promised] if len(samples) - promised < _CODEC_FRAME else samples
    except av.error.FFmpegError as error:
        raise bad(
            f"{describe(source)} cannot be read as sound ({error.strerror or error})", "broken_media"
        ) from error
    return _Read(samples, promised, rate, slack)


def _sound_stream(container: Any, source: Any) -> Any:
    if not container.streams.audio:
        raise bad(f"{describe(source)} holds no sound", "broken_media")
    stream = container.streams.audio[0]
    if stream.codec_context is None:
        raise bad(f"{describe(source)}: there is no decoder for its sound", "broken_media")
    if not stream.rate or not stream.time_base:
        raise bad(f"{describe(source)}: the header tells no sampling rate", "broken_media")
    return stream


def _pyav_decode(av: Any, container: Any, source: Any, max_bytes: int | None) -> np.ndarray:
    to_floats = av.AudioResampler(format="fltp")
    pieces, total = [np.empty(0, np.float32)], 0
    for packet in packets_of(container, _sound_stream(container, source)):
        for frame in packet.decode():
            try:
                floats = to_floats.resample(frame)
            except ValueError as error:
                raise bad(
                    f"{describe(source)}: the sound changes its format ({error})", "broken_media"
                ) from error
            pieces += [out.to_ndarray().mean(axis=0) for out in floats]
            total += frame.samples
        check_samples(total, max_bytes, source)
    return np.concatenate(pieces)


def _samples_of_packets(container: Any, stream: Any, rate: int) -> int:
    ticks = sum(packet.duration or 0 for packet in packets_of(container, stream) if packet.size)
    samples: int = round(ticks * stream.time_base * rate)
    return samples


def _check_promise(promised: int, file: BinaryIO, source: Any) -> None:
    position = file.tell()
    size = file.seek(0, 2)
    file.seek(position)
    if promised > size * _MOST_SAMPLES_PER_BYTE:
        raise bad(
            f"{describe(source)}: the header is damaged: it promises {promised:,} samples, more than any "
            f"codec packs into a file of {size:,} bytes",
            "broken_media",
        )


def check_samples(samples: int, max_bytes: int | None, source: Any) -> None:
    """Raise ``media_too_large`` where so many samples would take more memory than they may."""
    what = f"{describe(source)}: a clip of {samples:,} samples"
    check_bytes(samples * _SAMPLE_BYTES, max_bytes, what, "cut it into shorter clips")


_MOST_CHANNELS = 64


def load_audio(
    source: Any, *, sampling_rate: int | None = None, max_bytes: int | None = DEFAULT_MAX_BYTES
) -> tuple[np.ndarray, int]:
    """Decode one clip into (mono float32 samples in [-1, 1], rate).

    Args:
        source: anything :func:`~packhorse.media.open_source` opens; an ``(array, rate)`` pair; a dict with
            ``array`` and ``sampling_rate``; or an object with ``get_all_samples()`` (torchcodec's decoder,
            which Hugging Face datasets deliver). Channels are averaged; integers are scaled. In a 2-D array
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
        mono, rate = decode_audio(source, max_bytes)
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
        count, rate = measure_audio(source)
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
