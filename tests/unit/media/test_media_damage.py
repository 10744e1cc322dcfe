"""Images, audio and videos with damage: always a ``BadSample``, whatever the decoders make of it."""

from __future__ import annotations

import io
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from media_samples import write_video

from packhorse.errors import BadSample, MissingDependency
from packhorse.media import audio as audio_module
from packhorse.media import audio_info, load_audio, load_image, load_video, probe_video
from raising import raises_bad_sample

RATE = 44_100


def noise(samples: int) -> np.ndarray:
    return (np.random.default_rng(0).normal(size=samples) / 5).astype(np.float32)


def encode(form: str, samples: int = 60_000) -> bytearray:
    file = io.BytesIO()
    soundfile.write(file, noise(samples), RATE, format=form)
    return bytearray(file.getvalue())


def tiff(type_of_offset: int) -> bytes:
    """Return a grey TIFF of 4 x 4 pixels; 3 is a short integer, 5 a fraction."""
    tags = [(256, 3, 4), (257, 3, 4), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, type_of_offset, 200)]
    tags += [(277, 3, 1), (278, 3, 4), (279, 3, 16)]
    header = b"II*\0" + struct.pack("<IH", 8, len(tags))
    header += b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    return header.ljust(200, b"\0") + struct.pack("<II", 200, 1) + bytes(32)


def test_a_tiff_whose_tags_have_the_wrong_type_is_a_bad_sample() -> None:
    assert load_image(tiff(3)).size == (4, 4)
    with raises_bad_sample("broken_media"):
        load_image(tiff(5))


def mp3_without_length(samples: int, bit_rate: int = 128_000) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp3", options={"write_xing": "0", "id3v2_version": "0"}) as container:
        stream = container.add_stream("libmp3lame", rate=RATE, layout="mono")
        stream.bit_rate, stream.options = bit_rate, {"reservoir": "0"}
        for start in range(0, samples, 1152):
            block = noise(samples)[None, start : start + 1152]
            frame = av.AudioFrame.from_ndarray(block, format="fltp", layout="mono")
            frame.sample_rate, frame.pts = RATE, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def length(call: Callable[[bytes], tuple[Any, int]], data: bytes) -> int | None:
    """The length of a clip as ``call`` finds it, None if it raises."""
    try:
        found = call(data)[0]
    except BadSample:
        return None
    return found if isinstance(found, int) else len(found)


def unknown_codec() -> bytes:
    data = encode("WAV")
    data[20:22] = b"\x99\x33"
    return bytes(data)


def flac_that_promises(samples: int) -> bytes:
    data = encode("FLAC")
    data[21] = data[21] & 0xF0 | samples >> 32
    data[22:26] = struct.pack(">I", samples & 0xFFFF_FFFF)
    return bytes(data)


def mp3_that_promises(frames: int) -> bytes:
    data = encode("MP3")
    at = data.index(b"Xing") + 8
    data[at : at + 4] = struct.pack(">I", frames)
    return bytes(data)


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        (unknown_codec, "no decoder for its audio stream"),
        (lambda: flac_that_promises(0xF_0000_EA60), "gives 64,424,569,440 samples"),
        (lambda: mp3_that_promises(0x4000_0000), "more than any codec packs into a file of"),
    ],
    ids=["wav-codec", "flac-length", "mp3-length"],
)
def test_an_invalid_header_is_broken_for_the_length_and_for_the_samples(
    damaged: Callable[[], bytes], words: str
) -> None:
    for call in (audio_info, load_audio):
        with raises_bad_sample("broken_media", stage="media", match=words):
            call(damaged())


def test_a_length_that_is_possible_and_wrong_costs_no_memory_and_is_broken() -> None:
    data = flac_that_promises(400_000_000)
    assert audio_info(data) == (400_000_000, RATE)
    with raises_bad_sample("broken_media", match=r"gives 400,000,000 samples|cannot be decoded"):
        load_audio(data)


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "MP3"])
def test_audio_read_in_blocks_has_the_same_samples(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(encode(form))
    whole, _ = load_audio(data)
    for block in (1000, 20_000, 60_000):
        monkeypatch.setattr(audio_module, "_BLOCK", block)
        samples, _ = load_audio(data)
        assert samples.shape == whole.shape
        assert np.abs(samples - whole).max() < 1e-6


def test_a_flac_file_written_to_a_pipe_has_no_length_and_is_read_to_its_end() -> None:
    data = flac_that_promises(0)
    samples, rate = load_audio(data)
    assert audio_info(data) == (60_000, RATE) == (len(samples), rate)
    assert np.array_equal(samples, load_audio(bytes(encode("FLAC")))[0])


def test_an_mp3_without_a_length_is_counted_not_guessed() -> None:
    loud, quiet = mp3_without_length(90_000, 320_000), mp3_without_length(90_000, 32_000)
    # A guess from the bit rate of the first frame would be half of it, or five times as much.
    for data in (loud + quiet, quiet + loud):
        samples, rate = load_audio(data)
        assert audio_info(data) == (len(samples), rate)
        assert 180_000 <= len(samples) < 180_000 + 4 * 1152


def test_an_mp3_without_a_length_names_the_package_that_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = mp3_without_length(20_000)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingDependency, match=r"has no length in its header.*pip install -e '\.\[video\]'"):
        load_audio(data)


def test_a_cut_mp3_never_has_another_length_than_audio_info_gives() -> None:
    data = bytes(encode("MP3", 8000))
    cuts = [data[:end] for end in range(1, len(data), 13)]
    lengths = [length(audio_info, cut) for cut in cuts]
    found = [length(load_audio, cut) for cut in cuts]
    assert sum(count is not None for count in lengths) > 20
    assert [count for count, real in zip(lengths, found, strict=True) if real not in (None, count)] == []


def test_a_cut_mp3_without_its_encoders_header_has_the_length_of_what_is_left() -> None:
    data = mp3_without_length(60_000)
    for part in (0.3, 0.5, 0.9, 0.999):
        cut = data[: int(len(data) * part)]
        samples, rate = load_audio(cut)
        assert audio_info(cut) == (len(samples), rate)


def test_a_stream_that_turns_up_late_in_a_damaged_video_does_no_harm(tmp_path: Path) -> None:
    path = write_video(tmp_path / "clip.ts", 20, codec="mpeg4", fps=10, group=1)
    data = bytearray(path.read_bytes())
    starts = [at for at in range(0, len(data), 188) if data[at + 1 : at + 3] == b"\x41\x00"]
    assert len(starts) == 20
    data[starts[10] + 1] = 0x5F  # this frame now belongs to a stream that no table names
    path.write_bytes(data)
    for _ in range(10):  # PyAV's answer depends on what lies after a table in memory
        found = probe_video(path).total_frames
        assert 15 < found < 20
        assert len(load_video(path).frames) == found


def test_a_clip_whose_rate_is_damaged_neither_explodes_nor_vanishes_when_resampled() -> None:
    clip = (np.zeros(1_000_000, np.float32), 1)
    with raises_bad_sample("media_too_large", match=r"16,000,000,000 samples would take 59\.6 GiB"):
        load_audio(clip, sampling_rate=16_000)
    with raises_bad_sample("broken_media", match="the clip has no samples"):
        load_audio((np.zeros(1000, np.float32), 2**31 - 1), sampling_rate=16_000)
