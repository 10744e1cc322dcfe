"""Sound in files: a source goes in, mono samples with their rate, or just their number, comes out.

libsndfile decodes what it can read, in blocks, so that memory follows the sound that is there and not the
number that a damaged header promises. PyAV decodes the rest, and the files that do not tell their length (a
FLAC file written to a pipe, an MP3 file without the encoder's header): libsndfile guesses that of an MP3 from
its first frame, and reads no further than its guess.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from packhorse.errors import MissingDependency, require
from packhorse.media.chunks import missing_bytes
from packhorse.media.container import open_container, packets_of
from packhorse.media.failure import bad, unreadable
from packhorse.media.limits import check_bytes
from packhorse.media.mp3 import mp3_length
from packhorse.media.source import describe, open_source

# A coded frame of AAC, MP3, Opus or Vorbis is at most this long; where a clip ends is not told more exactly.
_CODEC_FRAME = 4096
# Silence in FLAC: 65,535 samples in a frame of 12 bytes. No other codec packs more.
_MOST_SAMPLES_PER_BYTE = 1 << 13
_BLOCK = 1 << 22  # samples of all channels together: 16 MiB
_UNKNOWN = (1 << 63) - 1  # what libsndfile says where a header tells no length
_SAMPLE_BYTES = 4


def measure_sound(source: Any) -> tuple[int, int]:
    """(number of samples, rate); the header, or one read of the file where that tells no length."""
    with open_source(source) as file, _reading(source):
        with _libsndfile(file, source) as sound:
            if sound is not None:
                count, rate = int(sound.frames), int(sound.samplerate)
                _check_promise(count, file, source)
                return count, rate
        read = _pyav_read(file, source, None, decode=False)
        return read.promised, read.rate


def decode_sound(source: Any, max_bytes: int | None) -> tuple[np.ndarray, int]:
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
