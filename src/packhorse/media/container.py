"""Read video files with PyAV: the header, the list of frames, and single frames by index.

The header costs about a millisecond. The list of frames (presentation time and keyframe flag of each packet)
costs one read of the file and decodes nothing. Frames are then decoded from the start or, if few of many are
requested, from the keyframe before each; both give the same pixels.

A playlist in a video file is not followed: no other file or address is opened.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from struct import unpack
from typing import Any, BinaryIO

import numpy as np

from packhorse.errors import BadSample, PackhorseError, require
from packhorse.media.failure import bad_media, read_error
from packhorse.media.sampling import VideoInfo
from packhorse.media.source import describe, open_source

_UNIT = 1 << 16  # the matrix has fixed-point numbers
_TURNS = {(0, -_UNIT, _UNIT, 0): 1, (-_UNIT, 0, 0, -_UNIT): 2, (0, _UNIT, -_UNIT, 0): 3}
_MICROSECONDS = 1_000_000
_SEEK_COST = 4  # a seek costs about as much as decoding this number of frames


def _quarter_turns(file: BinaryIO) -> dict[int, int]:
    """Return for each track id the counter-clockwise quarter turns that put its frames upright.

    Empty if the file is not an MP4 or MOV file; 0 for a track with any other matrix. (PyAV has the rotation
    of decoded frames only, not that of a stream.)
    """
    end = file.seek(0, 2)
    file.seek(0)
    if file.read(8)[4:] not in (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip"):
        return {}
    boxes = [(0, end)]
    for name in (b"moov", b"trak", b"tkhd"):
        boxes = [(a, b) for span in boxes for kind, a, b in _boxes(file, *span) if kind == name]
    turns: dict[int, int] = {}
    for start, stop in boxes:
        file.seek(start)
        turns.update(_track_header(file.read(min(stop - start, 128))))
    return turns


def _boxes(file: BinaryIO, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (name, start of the contents, end) of each box between two positions."""
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
    return {track: _TURNS.get((a, b, c, d), 0)}


@dataclass(frozen=True, slots=True)
class _Packet:
    """One encoded frame."""

    pts: int | None
    dts: int | None
    keyframe: bool
    duration: int


class VideoFile:
    """An open video; use it through :func:`open_video`.

    Attributes:
        name: the source, for messages.
        expected_frames: the number of frames in the header, 0 if it has none.
        turns: quarter turns (counter-clockwise) that put the frames upright.
    """

    def __init__(self, av: Any, file: BinaryIO, name: str) -> None:
        self._av, self._file, self.name = av, file, name
        turns = _quarter_turns(file)
        self.container: Any = None
        self._open()
        self.turns = turns.get(self.stream.id, 0)
        # Decoding times in the index of an MP4, and whether its edit list removes frames.
        self._index: list[int] = []
        self._is_trimmed = False
        self.expected_frames = self._frames_in_header()
        self._empty_frames = 0

    def _open(self) -> None:
        """Go to the first packet; reopening costs half a millisecond and, unlike seeking, is exact."""
        self.close()
        self._file.seek(0)
        self.container = open_container(self._av, self._file)
        streams = self.container.streams.video
        if not streams:
            raise bad_media(f"{self.name} has no video stream")
        self.stream = self.container.streams.best("video") or streams[0]
        if self.stream.codec_context is None:
            raise bad_media(f"{self.name}: there is no decoder for its video stream")

    def close(self) -> None:
        """Close the container; the file is the caller's."""
        if self.container is not None:
            self.container.close()

    @cached_property
    def _stored(self) -> tuple[_Packet, ...]:
        """Packets of all frames in the order of the file, which is the order of decoding."""
        self._open()
        packets = []
        for packet in packets_of(self.container, self.stream):
            if packet.is_corrupt:
                continue  # the file ends inside it
            if packet.size and not packet.is_discard:
                key, duration = bool(packet.is_keyframe), packet.duration or 0
                packets.append(_Packet(packet.pts, packet.dts, key, duration))
            elif not packet.size and not _is_end(packet):
                # AVI stores a repeated frame as an empty one and counts it.
                self._empty_frames += 1
        return tuple(packets)

    @cached_property
    def timed(self) -> bool:
        """Whether the presentation times of the frames are known and unique."""
        times = {packet.pts for packet in self._stored}
        return None not in times and len(times) == len(self._stored)

    @cached_property
    def packets(self) -> tuple[_Packet, ...]:
        """Packets of all frames in the order of presentation. Costs one read of the file."""
        return tuple(sorted(self._stored, key=_pts)) if self.timed else self._stored

    @cached_property
    def has_open_groups(self) -> bool:
        """Whether a frame is stored after a keyframe and shown before it, so that seeking is not exact."""
        key = None
        for packet in self._stored:
            if packet.keyframe:
                key = packet
            elif key is not None and _pts(packet) < _pts(key):
                return True
        return False

    def seconds(self, number: int) -> float:
        """Return the presentation time of a frame in the file (which need not start at 0)."""
        return float(_pts(self.packets[number]) * self.stream.time_base)

    def info(self, *, exact: bool = False) -> VideoInfo:
        """Return the header; if ``exact``, with the number of frames in the file and not in the header."""
        total = self.expected_frames if self.expected_frames and not exact else len(self.packets)
        height, width = self.stream.codec_context.height, self.stream.codec_context.width
        if self.turns % 2:
            height, width = width, height
        fps, duration = self._rate(total)
        return VideoInfo(total, height, width, fps, duration)

    def check_complete(self) -> None:
        """Raise ``broken_media`` if the file has fewer frames than its header states, or none."""
        readable = len(self.packets)
        if readable + self._empty_frames < self.expected_frames:
            raise self._truncation_error(readable)
        if readable == 0:
            raise bad_media(f"{self.name}: the video has no frames")

    def _truncation_error(self, readable: int) -> BadSample:
        expected = self.expected_frames or len(self.packets)
        return bad_media(
            f"{self.name} is truncated or damaged: it should have {expected:,} frames, "
            f"{readable:,} could be read"
        )

    def decode(self, wanted: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (frame number, RGB pixels) for each wanted frame, in any order, perhaps twice.

        ``wanted`` are ascending frame numbers without duplicates, all below the number of packets.
        """
        failure: Exception | None = None
        for method in self._methods(wanted):
            missing, decoded = set(wanted), 0
            try:
                for number, frame in method:
                    decoded += 1
                    if number in missing:
                        missing.discard(number)
                        yield number, self._pixels(frame)
                    if not missing:
                        return
            except self._av.error.FFmpegError as error:
                failure = error
        raise self._truncation_error(decoded) from failure

    def _methods(self, wanted: Sequence[int]) -> Iterator[Iterator[tuple[int, Any]]]:
        # The later ones are for files whose packets and frames have different times, or that cannot seek.
        if self.timed:
            if starts := self._seek_plan(wanted):
                yield self._by_seeking(starts)
            yield self._from_start(timed=True)
        yield self._from_start(timed=False)

    def _from_start(self, *, timed: bool) -> Iterator[tuple[int, Any]]:
        self._open()
        frames = chain.from_iterable(packet.decode() for packet in packets_of(self.container, self.stream))
        for count, frame in enumerate(frames):
            yield (self._numbers.get(frame.pts, -1) if timed else count), frame

    def _by_seeking(self, starts: dict[int, list[int]]) -> Iterator[tuple[int, Any]]:
        for start, group in starts.items():
            last = group[-1]
            for frame in self._decoded_from(self.packets[start]):
                number = self._numbers.get(frame.pts, -1)
                # Frames before the keyframe may lack the frames they refer to.
                if start <= number <= last:
                    yield number, frame
                if number >= last:
                    break

    def _decoded_from(self, key: _Packet) -> Iterator[Any]:
        """Yield frames from a keyframe (or an earlier one) on; none if the container cannot seek there."""
        # Some containers seek by presentation time, some by decoding time, and may end up after the keyframe.
        for position in (key.pts, key.dts):
            if position is None:
                continue
            self.container.seek(position, stream=self.stream, backward=True)
            packets = packets_of(self.container, self.stream)
            first = next(packets, None)
            if first is not None and _not_after(first, key):
                for packet in chain([first], packets):
                    yield from packet.decode()
                return

    def _seek_plan(self, wanted: Sequence[int]) -> dict[int, list[int]]:
        """Return the frames to decode from each keyframe; empty if decoding from the start is cheaper."""
        keys = [number for number, packet in enumerate(self.packets) if packet.keyframe]
        if not keys or keys[0] > wanted[0]:
            return {}
        plan: dict[int, list[int]] = {}
        for number in wanted:
            plan.setdefault(keys[bisect_right(keys, number) - 1], []).append(number)
        cost = sum(group[-1] - start + 1 + _SEEK_COST for start, group in plan.items())
        return plan if cost < 0.8 * (wanted[-1] + 1) else {}

    @cached_property
    def _numbers(self) -> dict[int | None, int]:
        return {packet.pts: number for number, packet in enumerate(self.packets)}

    def _pixels(self, frame: Any) -> np.ndarray:
        pixels: np.ndarray = frame.to_ndarray(format="rgb24")
        return np.rot90(pixels, self.turns) if self.turns else pixels

    def _frames_in_header(self) -> int:
        # The header of an MP4 also counts frames that its edit list removes; its index marks them.
        if "mp4" in self.container.format.name.split(",") and self.stream.frames:
            entries = [(entry.timestamp, entry.is_discard) for entry in self.stream.index_entries]
            self._index = [time for time, is_discarded in entries if not is_discarded]
            self._is_trimmed = len(self._index) < len(entries)
            return len(self._index)
        return int(self.stream.frames)

    def _rate(self, total: int) -> tuple[float | None, float | None]:
        """Return frames per second and duration, as torchcodec reports them to transformers' processors.

        The duration is from the start of the first frame to the end of the last one; frames per second are
        the frames divided by it, whatever rate the header states.
        """
        span = self._span_in_header() or self._span_of_packets()
        if span is None:
            rate = self.stream.average_rate or self.stream.guessed_rate
            fps = float(rate) if rate else None
            if self.stream.duration is not None:
                return fps, float(self.stream.duration * self.stream.time_base)
            if self.container.duration is not None:
                return fps, float(self.container.duration / _MICROSECONDS)
            return fps, total / fps if fps else None
        begin, end = (float(ticks * self.stream.time_base) for ticks in span)
        return total / (end - begin), end - begin

    def _span_in_header(self) -> tuple[int, int] | None:
        """Return the presentation time of the first frame and the end of the last, in ticks, or None."""
        ticks = self.stream.duration
        if not self.expected_frames or not ticks or self._is_trimmed:
            return None
        if self.stream.codec_context.has_b_frames and self._index:
            # If frames are reordered and of unequal length, the last one stored is not the last one shown.
            steps = np.diff(self._index)
            if len(np.unique(steps)) > 1 or steps[:1].sum() * len(self._index) not in (0, ticks):
                return None
        start = self.stream.start_time or 0
        return start, start + ticks

    def _span_of_packets(self) -> tuple[int, int] | None:
        """Return the same from all packets. Costs one read of the file."""
        if not self.timed or not self.packets:
            return None
        begin = _pts(self.packets[0])
        end = max(_pts(packet) + packet.duration for packet in self.packets)
        return (begin, end) if end > begin else None


@contextmanager
def open_video(source: object, name: str | None = None) -> Iterator[VideoFile]:
    """Open a video of any source; a read error in the block becomes ``broken_media`` or a ``SystemFault``."""
    av = require("av", "video")
    name = name or describe(source)
    with open_source(source) as file:
        try:
            video = VideoFile(av, file, name)
        except (av.error.FFmpegError, OSError) as error:
            detail = (
                f"{name} cannot be opened as a video ({_describe_error(error)}): 0 frames could be read. An "
                "MP4 file that is truncated before its index (moov) gives this error"
            )
            raise _convert_error(av, error, detail) from error
        try:
            yield video
        except (av.error.FFmpegError, OSError) as error:
            detail = f"{name}: reading the video failed ({_describe_error(error)})"
            raise _convert_error(av, error, detail) from error
        finally:
            video.close()


def open_container(av: Any, file: BinaryIO) -> Any:
    """Open a file with PyAV; FFmpeg itself may open nothing, because a playlist could name any file."""
    return av.open(file, options={"protocol_whitelist": "none"}, metadata_errors="replace")


def packets_of(container: Any, stream: Any) -> Iterator[Any]:
    """Yield the stream's packets; the last one is empty and flushes the decoder.

    PyAV must not be read any further: if FFmpeg has found another stream in the meantime (the file is
    damaged, or two files were joined), PyAV may raise IndexError.
    """
    for packet in container.demux(stream):
        yield packet
        if _is_end(packet):
            return


def _is_end(packet: Any) -> bool:
    return not packet.size and packet.dts is None


def _convert_error(av: Any, error: Exception, detail: str) -> PackhorseError:
    # FFmpeg passes on errors of the file unchanged; its own errors are about the data.
    return bad_media(detail) if isinstance(error, av.error.FFmpegError) else read_error(error, detail)


def _describe_error(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _not_after(packet: Any, key: _Packet) -> bool:
    # Keyframes are shown in the order they are stored, and MKV has no decoding time just after a seek.
    here, there = (packet.pts, key.pts) if packet.is_keyframe else (packet.dts, key.dts)
    return here is not None and there is not None and here <= there


def _pts(packet: _Packet) -> int:
    return packet.pts or 0
