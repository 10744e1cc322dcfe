"""A video file through PyAV: its header, the list of its frames, and exactly the frames that are asked for.

What the header tells costs about a millisecond. The list of frames (presentation time and keyframe flag of
each packet) costs one read of the file and decodes nothing. Frames are then decoded either from the start
or, where few are wanted out of many, from the keyframe before each; both give the same pixels.

Playlists inside a "video" are not followed: a file is read, and no other file or address that it names.
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

from packhorse.errors import PackhorseError, require
from packhorse.media.failure import bad, unreadable
from packhorse.media.sampling import VideoInfo
from packhorse.media.source import describe, open_source

_UNIT = 1 << 16  # the matrix holds fixed-point numbers
_TURNS: dict[tuple[float, float, float, float], int] = {
    (1, 0, 0, 1): 0,
    (0, -1, 1, 0): 1,
    (-1, 0, 0, -1): 2,
    (0, 1, -1, 0): 3,
}


def quarter_turns(file: BinaryIO) -> dict[int, int]:
    """Track number -> counter-clockwise quarter turns that put its image upright.

    Empty for everything that is not an MP4 or MOV file; 0 for a track with any other matrix.
    """
    end = file.seek(0, 2)
    file.seek(0)
    if file.read(8)[4:] not in (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip"):
        return {}
    turns: dict[int, int] = {}
    for kind, start, stop in _boxes(file, 0, end):
        if kind != b"moov":
            continue
        for track, track_start, track_stop in _boxes(file, start, stop):
            if track != b"trak":
                continue
            for name, head_start, head_stop in _boxes(file, track_start, track_stop):
                if name == b"tkhd":
                    file.seek(head_start)
                    turns.update(_track_header(file.read(min(head_stop - head_start, 128))))
    return turns


def _boxes(file: BinaryIO, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """(name, start of contents, end) of each box between two positions."""
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
    return {track: _TURNS.get((a / _UNIT, b / _UNIT, c / _UNIT, d / _UNIT), 0)}


_MICROSECONDS = 1_000_000
_SEEK_COST = 4  # a seek costs about as much as decoding so many frames


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
        promised: the number of frames that the header tells, 0 where it does not.
        turns: quarter turns (counter-clockwise) that put the image upright.
    """

    def __init__(self, av: Any, file: BinaryIO, name: str) -> None:
        self._av, self._file, self.name = av, file, name
        turns = quarter_turns(file)
        self.container: Any = None
        self._open()
        self.turns = turns.get(self.stream.id, 0)
        # Decoding times in the index of an MP4, and whether its edit list cuts frames away.
        self._index: list[int] = []
        self._is_trimmed = False
        self.promised = self._frames_in_header()
        self._not_shown = 0

    def _open(self) -> None:
        """Stand at the first packet; opening anew costs half a millisecond and, unlike seeking, is exact."""
        self.close()
        self._file.seek(0)
        self.container = open_container(self._av, self._file)
        streams = self.container.streams.video
        if not streams:
            raise bad(f"{self.name} holds no video stream", "broken_media")
        self.stream = self.container.streams.best("video") or streams[0]
        if self.stream.codec_context is None:
            raise bad(f"{self.name}: there is no decoder for its video stream", "broken_media")

    def close(self) -> None:
        """Close the container; the file is the caller's."""
        if self.container is not None:
            self.container.close()

    @cached_property
    def _stored(self) -> tuple[_Packet, ...]:
        """Every frame in the order of the file, which is the order of decoding."""
        self._open()
        packets = []
        for packet in packets_of(self.container, self.stream):
            if packet.is_corrupt:
                continue  # the file ends inside it
            if packet.size and not packet.is_discard:
                key, duration = bool(packet.is_keyframe), packet.duration or 0
                packets.append(_Packet(packet.pts, packet.dts, key, duration))
            elif not packet.size and not _is_end(packet):
                # AVI stores "as before" as an empty frame and counts it.
                self._not_shown += 1
        return tuple(packets)

    @cached_property
    def timed(self) -> bool:
        """Whether every frame has a presentation time of its own."""
        times = {packet.pts for packet in self._stored}
        return None not in times and len(times) == len(self._stored)

    @cached_property
    def packets(self) -> tuple[_Packet, ...]:
        """Every frame of the file in the order of presentation. Costs one read of the file."""
        return tuple(sorted(self._stored, key=_pts)) if self.timed else self._stored

    @cached_property
    def has_open_groups(self) -> bool:
        """Whether frames are stored after a keyframe and shown before it, so that it is no clean start."""
        key = None
        for packet in self._stored:
            if packet.keyframe:
                key = packet
            elif key is not None and _pts(packet) < _pts(key):
                return True
        return False

    def seconds(self, number: int) -> float:
        """The presentation time of a frame as the file tells it (which need not start at 0)."""
        return float(_pts(self.packets[number]) * self.stream.time_base)

    def info(self, *, exact: bool = False) -> VideoInfo:
        """Size, number of frames, rate and duration.

        Args:
            exact: count the frames that are really in the file, also where the header tells a number.
        """
        total = self.promised if self.promised and not exact else len(self.packets)
        height, width = self.stream.codec_context.height, self.stream.codec_context.width
        if self.turns % 2:
            height, width = width, height
        fps, duration = self._rate(total)
        return VideoInfo(total, height, width, fps, duration)

    def check_complete(self) -> None:
        """Raise ``broken_media`` where the file has fewer frames than its header promises, or none."""
        readable = len(self.packets)
        if readable + self._not_shown < self.promised:
            raise self.cut_short(readable)
        if readable == 0:
            raise bad(f"{self.name}: the video has no frames", "broken_media")

    def cut_short(self, readable: int) -> Exception:
        """The error for frames that are promised and not there."""
        promised = self.promised or len(self.packets)
        return bad(
            f"{self.name} is cut short or damaged: it promises {promised:,} frames, "
            f"{readable:,} could be read",
            "broken_media",
        )

    def decode(self, wanted: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (frame number, RGB pixels) for each wanted frame, in no promised order, perhaps twice.

        Args:
            wanted: ascending frame numbers, each once, all below the number of packets.

        Raises:
            BadSample: ``broken_media`` where one of them cannot be decoded.
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
        raise self.cut_short(decoded) from failure

    def _methods(self, wanted: Sequence[int]) -> Iterator[Iterator[tuple[int, Any]]]:
        # The later ones are for files whose packets and frames disagree about time, or that do not seek.
        if self.timed:
            starts = self._seek_plan(wanted)
            if starts:
                yield self._by_seeking(starts)
            yield self._from_start(timed=True)
        yield self._from_start(timed=False)

    def _from_start(self, *, timed: bool) -> Iterator[tuple[int, Any]]:
        self._open()
        packets = packets_of(self.container, self.stream)
        frames = chain.from_iterable(packet.decode() for packet in packets)
        for count, frame in enumerate(frames):
            yield (self._numbers.get(frame.pts, -1) if timed else count), frame

    def _by_seeking(self, starts: dict[int, list[int]]) -> Iterator[tuple[int, Any]]:
        for start, group in starts.items():
            last = group[-1]
            for frame in self._decoded_from(self.packets[start]):
                number = self._numbers.get(frame.pts, -1)
                # Frames in front of the keyframe may lack what they refer to.
                if start <= number <= last:
                    yield number, frame
                if number >= last:
                    break

    def _decoded_from(self, key: _Packet) -> Iterator[Any]:
        """Frames from a keyframe on (or from one before it); none where the container does not seek there."""
        # Some containers seek by presentation time, some by decoding time, which may come out after the key.
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
        """Keyframe number -> the wanted frames to decode from it; empty where reading through is cheaper."""
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
        # The header of an MP4 also counts frames that its edit list cuts away; its index knows which.
        if "mp4" in self.container.format.name.split(",") and self.stream.frames:
            entries = [(entry.timestamp, entry.is_discard) for entry in self.stream.index_entries]
            self._index = [time for time, is_discarded in entries if not is_discarded]
            self._is_trimmed = len(self._index) < len(entries)
            return len(self._index)
        return int(self.stream.frames)

    def _rate(self, total: int) -> tuple[float | None, float | None]:
        """Frames per second and seconds, as torchcodec reports them to transformers' processors.

        Seconds are those from the start of the first frame to the end of the last one; frames per second are
        the frames divided by them, whatever rate the header states.
        """
        span = self._span_in_header() or self._span_of_packets()
        if span is None:
            rate = self.stream.average_rate or self.stream.guessed_rate
            fps = float(rate) if rate else None
            return fps, self._duration(total, fps)
        begin, end = (float(ticks * self.stream.time_base) for ticks in span)
        return total / (end - begin), end - begin

    def _span_in_header(self) -> tuple[int, int] | None:
        """Presentation time of the first frame and of the end of the last, in ticks; None if not certain."""
        ticks = self.stream.duration
        if not self.promised or not ticks or self._is_trimmed:
            return None
        if self.stream.codec_context.has_b_frames and self._index:
            # Where frames are reordered and of unequal length, the last one stored is not the last one shown.
            steps = np.diff(self._index)
            if len(np.unique(steps)) > 1 or steps[:1].sum() * len(self._index) not in (0, ticks):
                return None
        start = self.stream.start_time or 0
        return start, start + ticks

    def _span_of_packets(self) -> tuple[int, int] | None:
        """The same, read from every packet. Costs one read of the file."""
        if not self.timed or not self.packets:
            return None
        begin = _pts(self.packets[0])
        end = max(_pts(packet) + packet.duration for packet in self.packets)
        return (begin, end) if end > begin else None

    def _duration(self, total: int, fps: float | None) -> float | None:
        if self.stream.duration is not None:
            return float(self.stream.duration * self.stream.time_base)
        if self.container.duration is not None:
            return float(self.container.duration / _MICROSECONDS)
        return total / fps if fps else None


@contextmanager
def open_video(source: Any, name: str | None = None) -> Iterator[VideoFile]:
    """Open a video of any source.

    A failure of reading it inside the block becomes ``broken_media``, or a ``SystemFault`` where it is one.
    """
    av = require("av", "video")
    name = name or describe(source)
    with open_source(source) as file:
        try:
            video = VideoFile(av, file, name)
        except (av.error.FFmpegError, OSError) as error:
            raise _failed(
                av,
                error,
                f"{name} cannot be opened as a video ({_reason(error)}): 0 frames could be read. "
                "An MP4 file that is cut before its index (moov) looks like this",
            ) from error
        try:
            yield video
        except (av.error.FFmpegError, OSError) as error:
            raise _failed(av, error, f"{name}: reading the video failed ({_reason(error)})") from error
        finally:
            video.close()


def open_container(av: Any, file: BinaryIO) -> Any:
    """Open a file with PyAV; FFmpeg itself may open nothing, since a playlist could name any other file."""
    return av.open(file, options={"protocol_whitelist": "none"}, metadata_errors="replace")


def packets_of(container: Any, stream: Any) -> Iterator[Any]:
    """The stream's packets; the last one is empty and makes the decoder deliver what it still holds.

    Going on after that one is not safe: where FFmpeg found a further stream on the way (the file is damaged,
    or joined from two), PyAV looks for that stream in tables without a place for it and may raise IndexError.
    """
    for packet in container.demux(stream):
        yield packet
        if _is_end(packet):
            return


def _is_end(packet: Any) -> bool:
    return not packet.size and packet.dts is None


def _failed(av: Any, error: Exception, detail: str) -> PackhorseError:
    # An error that the file raised comes through FFmpeg as it is; FFmpeg's own are about the data.
    if isinstance(error, av.error.FFmpegError):
        return bad(detail, "broken_media")
    return unreadable(error, detail, "broken_media")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _not_after(packet: Any, key: _Packet) -> bool:
    # Keyframes are shown in the order they are stored, and MKV knows no decoding time just after a seek.
    here, there = (packet.pts, key.pts) if packet.is_keyframe else (packet.dts, key.dts)
    return here is not None and there is not None and here <= there


def _pts(packet: _Packet) -> int:
    return packet.pts or 0
