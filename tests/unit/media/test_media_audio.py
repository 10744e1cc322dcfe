from __future__ import annotations

import copy
import io
import struct
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import torch
from media_samples import write_database, write_video
from torchcodec.decoders import AudioDecoder

from packhorse.errors import BadSample
from packhorse.media import audio_info, load_audio
from packhorse.media.audio import _mp3_length
from raising import raises_bad_sample

RATE = 16_000


def tone(samples: int = 2 * RATE + 123, rate: int = RATE, pitch: float = 440) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * pitch * np.arange(samples) / rate)).astype(np.float32)


def audio_bytes(
    samples: np.ndarray, rate: int = RATE, form: str = "WAV", subtype: str | None = None
) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form, subtype=subtype)
    return file.getvalue()


def write_aac(path: Path, samples: np.ndarray, rate: int = RATE, channels: int = 1) -> Path:
    layout = "mono" if channels == 1 else "stereo"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=rate, layout=layout)
        for start in range(0, len(samples), 1024):
            block = np.repeat(samples[None, start : start + 1024], channels, axis=0)
            frame = av.AudioFrame.from_ndarray(block, format="fltp", layout=layout)
            frame.sample_rate, frame.pts = rate, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def bad_sample(source: object, call=load_audio) -> BadSample:
    with pytest.raises(BadSample) as caught:
        call(source)
    assert caught.value.stage == "media"
    return caught.value


@pytest.mark.parametrize(
    ("form", "subtype", "tolerance"),
    [
        ("WAV", "PCM_16", 1e-4),
        ("WAV", "FLOAT", 0),
        ("WAV", "PCM_U8", 1e-2),
        ("AIFF", "PCM_16", 1e-4),
        ("FLAC", "PCM_24", 1e-6),
        ("OGG", "VORBIS", 0.1),
        ("OGG", "OPUS", 0.1),
        ("MP3", None, 0.1),
    ],
)
def test_formats_of_libsndfile_are_decoded_and_measured(
    form: str, subtype: str | None, tolerance: float
) -> None:
    data = audio_bytes(tone(), form=form, subtype=subtype)
    samples, rate = load_audio(data)
    assert samples.dtype == np.float32
    assert samples.ndim == 1
    assert samples.flags.c_contiguous
    assert audio_info(data) == (len(samples), rate)
    if form != "MP3":
        assert (len(samples), rate) == (2 * RATE + 123, RATE)
        assert np.abs(samples - tone()).max() <= tolerance


def test_all_sources_give_the_same_audio(tmp_path: Path, memory) -> None:
    data = audio_bytes(tone(), subtype="FLOAT")
    (tmp_path / "a.wav").write_bytes(data)
    write_database(tmp_path / "db.lmdb", entries={"k": data})
    for source in (
        tmp_path / "a.wav",
        f"file://{tmp_path}/a.wav",
        memory("a.wav", data),
        f"{tmp_path}/db.lmdb::k",
        data,
        {"bytes": data, "path": "a.wav"},
        {"bytes": None, "path": str(tmp_path / "a.wav")},
        (tone(), RATE),
        (tone().astype(np.float64), RATE),
        (torch.from_numpy(tone()), RATE),
        {"array": tone(), "sampling_rate": RATE, "path": "gone.wav"},
        AudioDecoder(data),
    ):
        samples, rate = load_audio(source)
        assert rate == RATE
        assert samples.dtype == np.float32
        assert np.array_equal(samples, tone())
        assert audio_info(source) == (len(tone()), RATE)


def test_stereo_is_averaged() -> None:
    stereo = np.stack([tone(), np.zeros_like(tone())], axis=1)
    data = audio_bytes(stereo, subtype="FLOAT")
    for source in (data, (stereo, RATE), (stereo.T, RATE), AudioDecoder(data)):
        samples, _ = load_audio(source)
        assert np.allclose(samples, tone() / 2, atol=1e-7)
        assert audio_info(source) == (len(tone()), RATE)


def test_integers_are_scaled_to_one() -> None:
    for dtype, low, high in [
        (np.int16, -(2**15), 2**15 - 1),
        (np.int32, -(2**31), 2**31 - 1),
        (np.uint8, 0, 255),
        (np.int8, -128, 127),
    ]:
        samples, _ = load_audio((np.array([low, high], dtype), RATE))
        assert samples[0] == -1
        assert samples[1] == pytest.approx(1, abs=1e-2)


def test_a_clip_of_one_stereo_sample_is_one_sample() -> None:
    data = audio_bytes(np.array([[0.5, 0.25]], np.float32), subtype="FLOAT")
    assert load_audio(data)[0].tolist() == [0.375]
    assert audio_info(data) == (1, RATE)


def test_resampling_keeps_pitch_and_length() -> None:
    samples, rate = load_audio((tone(48_000, 48_000), 48_000), sampling_rate=16_000)
    assert rate == 16_000
    assert len(samples) == 16_000
    assert np.abs(samples[1000:-1000] - tone(16_000, 16_000)[1000:-1000]).max() < 1e-3
    same, _ = load_audio((tone(), RATE), sampling_rate=RATE)
    assert np.array_equal(same, tone())


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate", [16_000, 44_100])
def test_aac_in_mp4_is_read_through_pyav(tmp_path: Path, rate: int, channels: int) -> None:
    path = write_aac(tmp_path / "a.m4a", tone(rate, rate), rate, channels)
    samples, found = load_audio(path)
    assert found == rate
    assert audio_info(path) == (len(samples), rate)
    assert abs(len(samples) - rate) < 1024
    assert np.abs(samples[2000:10_000] - tone(rate, rate)[2000:10_000]).max() < 0.1


def test_raw_aac_is_measured_to_within_a_frame(tmp_path: Path) -> None:
    path = write_aac(tmp_path / "a.aac", tone())
    samples, _ = load_audio(path)
    assert abs(audio_info(path)[0] - len(samples)) <= 1024
    assert load_audio(path.read_bytes())[1] == RATE


def test_broken_audio_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "text.wav").write_bytes(b"this is no audio " * 20)
    (tmp_path / "empty.wav").touch()
    (tmp_path / "noise.raw").write_bytes(bytes(range(256)))
    for call in (load_audio, audio_info):
        error = bad_sample(tmp_path / "text.wav", call)
        assert error.reason == "broken_media"
        assert "text.wav cannot be read as audio" in str(error)
        assert "0 bytes" in str(bad_sample(tmp_path / "empty.wav", call))
        assert bad_sample(tmp_path / "no.wav", call).reason == "missing_media"
        assert bad_sample(tmp_path / "noise.raw", call).reason == "broken_media"
        assert "no samples" in str(bad_sample(audio_bytes(np.zeros(0, np.float32)), call))
        assert "no samples" in str(bad_sample((np.zeros(0, np.float32), RATE), call))


def test_a_silent_video_has_no_audio(tmp_path: Path) -> None:
    path = write_video(tmp_path / "silent.mp4", 5)
    for call in (load_audio, audio_info):
        error = bad_sample(path, call)
        assert error.reason == "broken_media"
        assert "has no audio stream" in str(error)


@pytest.mark.parametrize("form", ["WAV", "FLAC", "AIFF"])
def test_a_truncated_file_is_broken(form: str) -> None:
    data = audio_bytes(np.random.default_rng(0).normal(0, 0.2, 40_000).astype(np.float32), form=form)
    error = bad_sample(data[: len(data) // 2])
    assert error.reason == "broken_media"
    assert "truncated" in str(error) or "cannot be decoded" in str(error)


def test_a_truncated_mp4_is_broken(tmp_path: Path) -> None:
    data = write_aac(tmp_path / "a.m4a", tone()).read_bytes()
    assert bad_sample(data[: len(data) // 2]).reason == "broken_media"


def test_a_wav_written_to_a_pipe_has_no_length_and_is_read_to_its_end() -> None:
    data = bytearray(audio_bytes(tone(), subtype="PCM_16"))
    at = data.index(b"data") + 4
    data[4:8] = data[at : at + 4] = struct.pack("<I", 0xFFFF_FFFF)
    assert len(load_audio(bytes(data))[0]) == len(tone())


@pytest.mark.parametrize(
    ("source", "reason", "words"),
    [
        ((np.zeros((4, 4, 4), np.float32), RATE), "broken_media", "1 or 2 axes"),
        ((np.zeros(4, np.int64), RATE), "broken_media", "up to 32 bits"),
        ((np.zeros((100, 100), np.float32), RATE), "broken_media", "neither axis can be channels"),
        ((np.zeros(4, np.float32), 0), "wrong_format", "sampling rate 0"),
        ((np.zeros(4, np.float32), None), "wrong_format", r"expected \(array, rate\)"),
        (({}, RATE), "broken_media", "is not audio"),
        ({"array": [0.0, 0.1]}, "wrong_format", r"expected \(array, rate\)"),
        (7, "wrong_format", "<int>"),
    ],
)
def test_arrays_that_are_no_audio_are_rejected(source: object, reason: str, words: str) -> None:
    for call in (load_audio, audio_info):
        with raises_bad_sample(reason, match=words):
            call(source)


def test_a_playlist_is_not_followed(tmp_path: Path) -> None:
    secret = write_aac(tmp_path / "secret.aac", tone())
    evil = tmp_path / "evil.m3u8"
    evil.write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\nfile://{secret}\n#EXT-X-ENDLIST\n")
    assert bad_sample(evil).reason == "broken_media"


def test_the_callers_array_is_neither_changed_nor_shared_when_scaled() -> None:
    array = (tone() * 30_000).astype(np.int16)
    source = {"array": array, "sampling_rate": RATE}
    before = copy.deepcopy(source)
    load_audio(source, sampling_rate=8000)
    assert np.array_equal(source["array"], before["array"])
    assert source["sampling_rate"] == RATE


@pytest.mark.parametrize("missing", [0, 700])
def test_the_length_of_an_mp3_is_in_a_vbri_header_too(missing: int) -> None:
    header = b"VBRI" + struct.pack(">HHHII", 1, 0, 75, 2000 + missing, 12)
    content = (b"\xff\xfb\x90\x64" + bytes(32) + header).ljust(2000, b"\0")
    assert _mp3_length(io.BytesIO(content)) == (True, missing)


class BrokenDecoder:
    """An audio decoder, as datasets return it, for a file whose header cannot be used."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def get_all_samples(self) -> None:
        raise self.error


@pytest.mark.parametrize("error", [ZeroDivisionError("rate 0"), RuntimeError("no frame"), OSError("seek")])
@pytest.mark.parametrize("call", [load_audio, audio_info])
def test_what_a_decoder_raises_is_an_error_of_its_clip(call: Any, error: Exception) -> None:
    bad = bad_sample(BrokenDecoder(error), call)
    assert bad.reason == "broken_media"
    assert bad.detail == f"<BrokenDecoder>: cannot be decoded ({type(error).__name__}: {error})"


@pytest.mark.parametrize("call", [load_audio, audio_info])
def test_a_mistake_in_a_decoder_is_no_error_of_its_clip(call: Any) -> None:
    with pytest.raises(NotImplementedError, match="later"):
        call(BrokenDecoder(NotImplementedError("later")))
