from __future__ import annotations

import copy
import os
import pickle
import struct
from dataclasses import FrozenInstanceError
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from media_samples import CLOSED, OPEN_GROUPS, decode_all, make_image, noise, write_database, write_video
from PIL import Image
from torchcodec.decoders import VideoDecoder

from packhorse.errors import BadSample
from packhorse.media import VideoInfo, VideoSampling, load_video, probe_video
from packhorse.media import container as container_module
from raising import raises_bad_sample, raises_config

KINDS = {
    "b-frames.mp4": {"options": CLOSED},
    "open-groups.mp4": {"options": OPEN_GROUPS},
    "open-groups.mkv": {"options": OPEN_GROUPS},
    "short-groups.mp4": {"options": CLOSED, "group": 2},
    "fragments.mp4": {"mux": {"movflags": "frag_keyframe+empty_moov"}},
    "b-frames.mkv": {"options": CLOSED},
    "stream.ts": {"options": CLOSED},
    "vp9.webm": {"codec": "libvpx-vp9"},
    "hidden-frames.webm": {"codec": "libvpx", "options": {"auto-alt-ref": "1", "lag-in-frames": "16"}},
    "mpeg4.avi": {"codec": "mpeg4", "options": CLOSED},
    "mjpeg.avi": {"codec": "mjpeg", "pix_fmt": "yuvj420p"},
    "raw.h264": {},
    "image.gif": {"codec": "gif", "pix_fmt": "rgb8"},
}


def bad_sample(source: object, call=load_video, **options: object) -> BadSample:
    with pytest.raises(BadSample) as caught:
        call(source, **options)
    assert caught.value.stage == "media"
    return caught.value


def trim(source: Path, target: Path, start: int) -> Path:
    """Copy the packets so that an edit list cuts the first ``start`` frames away, as ``ffmpeg -ss`` does."""
    with av.open(str(source)) as reader, av.open(str(target), "w") as writer:
        stream = reader.streams.video[0]
        copy_stream = writer.add_stream_from_template(stream)
        shift = round(start / stream.average_rate / stream.time_base)
        for packet in reader.demux(stream):
            if packet.size:
                packet.pts, packet.dts, packet.stream = packet.pts - shift, packet.dts - shift, copy_stream
                writer.mux(packet)
    return target


@pytest.mark.parametrize("name", KINDS)
def test_every_frame_found_alone_is_the_frame_of_decoding_it_all(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_video(tmp_path / name, **KINDS[name])
    expected = decode_all(path)
    assert len(expected) == 60
    assert np.array_equal(load_video(path).frames, expected)
    monkeypatch.setattr(container_module, "_SEEK_COST", -1000)  # seek however little it saves
    for number in range(60):
        assert np.array_equal(load_video(path, frame_indices=[number]).frames[0], expected[number])


@pytest.mark.parametrize("name", ["b-frames.mp4", "open-groups.mp4", "b-frames.mkv", "vp9.webm", "stream.ts"])
def test_few_frames_of_many_are_reached_by_seeking_and_are_the_same(tmp_path: Path, name: str) -> None:
    path = write_video(tmp_path / name, 240, **KINDS[name])
    expected = decode_all(path)
    wanted = [3, 4, 100, 101, 229]
    with container_module.open_video(path) as video:
        plan = video._seek_plan(wanted)
        assert plan
        decoded = [number for number, _ in video._by_seeking(plan)]
    assert set(wanted) <= set(decoded)
    assert len(decoded) < 100
    assert np.array_equal(load_video(path, frame_indices=wanted).frames, expected[wanted])


@pytest.mark.parametrize("name", KINDS)
def test_probing_gives_what_loading_finds(tmp_path: Path, name: str) -> None:
    path = write_video(tmp_path / name, 37, **KINDS[name])
    info = probe_video(path)
    loaded = load_video(path).metadata
    assert (info.total_frames, info.height, info.width) == (37, 48, 64)
    assert (loaded.total_num_frames, loaded.height, loaded.width) == (37, 48, 64)
    assert loaded.fps == info.fps
    assert loaded.duration == info.duration
    if name not in ("raw.h264", "image.gif"):  # no clock at all; a clock of hundredths of a second
        assert info.fps == pytest.approx(30, abs=0.02)  # MKV has a clock of milliseconds
        assert info.duration == pytest.approx(37 / 30, abs=0.05)


def assert_same_clock(path: Path) -> None:
    """Frames, rate and duration are those that transformers' processors get from torchcodec."""
    info, expected = probe_video(path), VideoDecoder(str(path), seek_mode="exact").metadata
    assert info.total_frames == expected.num_frames
    assert (info.fps, info.duration) == (expected.average_fps, expected.duration_seconds)
    loaded = load_video(path).metadata
    assert (loaded.fps, loaded.duration) == (info.fps, info.duration)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "raw.h264"])  # torchcodec cannot open it
def test_rate_and_duration_are_those_that_torchcodec_gives_to_processors(tmp_path: Path, name: str) -> None:
    assert_same_clock(write_video(tmp_path / name, 37, **KINDS[name]))


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_the_rate_of_a_video_with_uneven_times_is_that_of_torchcodec(tmp_path: Path, suffix: str) -> None:
    # Frames are not reordered: FFmpeg 5 and 8 disagree about how long a reordered frame of such a file lasts.
    path = tmp_path / f"uneven{suffix}"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=30, options={"bf": "0"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(40):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 6 * number, np.uint8), format="rgb24")
            frame.pts, frame.time_base = number + max(0, number - 20) ** 2, Fraction(1, 30)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    assert_same_clock(path)


def test_probing_reads_the_header_only(faststart: Path) -> None:
    data = faststart.read_bytes()
    header = data[: data.index(b"mdat") + 300]
    assert probe_video(header) == probe_video(faststart) == VideoInfo(60, 48, 64, 30.0, 2.0)


def test_all_sources_give_the_same_frames(video: Path, tmp_path: Path, memory) -> None:
    data = video.read_bytes()
    write_database(tmp_path / "db.lmdb", entries={"clip": data})
    expected = decode_all(video)[[0, 30, 59]]
    sources = [str(video), video, f"file://{video}", memory("clip.mp4", data), f"{tmp_path}/db.lmdb::clip"]
    for source in [*sources, data, bytearray(data), {"bytes": data, "path": None}, {"path": str(video)}]:
        assert probe_video(source).total_frames == 60
        assert np.array_equal(load_video(source, frame_indices=[0, 30, 59]).frames, expected)


def test_metadata_describe_the_original_video_so_times_are_right(video: Path) -> None:
    sampling = VideoSampling(fps=2, min_frames=4, max_frames=768, temporal_patch_size=2)
    loaded = load_video(video, sampling=sampling)
    assert loaded.frames.shape == (4, 48, 64, 3)
    assert loaded.frames.dtype == np.uint8
    assert loaded.metadata.as_dict() == {
        "total_num_frames": 60,
        "fps": 30.0,
        "width": 64,
        "height": 48,
        "duration": 2.0,
        "video_backend": "pyav",
        "frames_indices": [0, 20, 39, 59],
    }
    assert loaded.metadata.timestamps == [0, 20 / 30, 39 / 30, 59 / 30]
    with pytest.raises(FrozenInstanceError):
        loaded.metadata.fps = 1  # type: ignore[misc]


def test_arguments_of_the_call_override_the_sampling(video: Path) -> None:
    sampling = VideoSampling(fps=2, min_frames=4, max_frames=8, temporal_patch_size=2)
    assert len(load_video(video, sampling=sampling, fps=3).frames) == 6
    assert len(load_video(video, sampling=sampling, fps=30).frames) == 8
    assert len(load_video(video, sampling=sampling, fps=30, max_frames=10).frames) == 10
    assert len(load_video(video, sampling=sampling, min_frames=6).frames) == 6
    assert len(load_video(video, sampling=sampling, num_frames=2).frames) == 2
    assert load_video(video, sampling=sampling, frame_indices=[7]).metadata.frames_indices == (7, 7)


def test_frames_come_in_the_requested_order(video: Path) -> None:
    wanted = [50, 3, 3, 20]
    assert np.array_equal(load_video(video, frame_indices=wanted).frames, decode_all(video)[wanted])


def test_frames_cut_away_by_an_edit_list_are_not_counted(video: Path, tmp_path: Path) -> None:
    path = trim(video, tmp_path / "trimmed.mp4", 8)
    expected = decode_all(path)
    assert len(expected) < 60
    assert probe_video(path).total_frames == len(expected)
    assert np.array_equal(load_video(path).frames, expected)
    assert np.array_equal(load_video(path, frame_indices=[1, 40]).frames, expected[[1, 40]])


def test_an_edit_list_that_ends_early_is_no_damage(video: Path, tmp_path: Path) -> None:
    data = bytearray(video.read_bytes())
    at = data.index(b"elst") + 12
    (duration,) = struct.unpack(">I", data[at : at + 4])
    data[at : at + 4] = struct.pack(">I", duration // 2)
    path = tmp_path / "early.mp4"
    path.write_bytes(data)
    expected = decode_all(path)
    assert 25 < len(expected) < 35
    assert probe_video(path).total_frames == len(expected)
    assert np.array_equal(load_video(path).frames, expected)


@pytest.mark.parametrize(("rotation", "turns"), [(90, 1), (180, 2), (270, 3)])
def test_a_phone_video_is_put_upright(tmp_path: Path, rotation: int, turns: int) -> None:
    path = write_video(tmp_path / "phone.mp4", 10, rotation=rotation)
    info = probe_video(path)
    loaded = load_video(path)
    expected = np.rot90(decode_all(path), turns, axes=(1, 2))
    assert (info.height, info.width) == expected.shape[1:3]
    assert np.array_equal(loaded.frames, expected)
    assert (loaded.metadata.height, loaded.metadata.width) == expected.shape[1:3]


def test_a_file_cut_in_the_middle_says_how_many_frames_are_left(faststart: Path, tmp_path: Path) -> None:
    data = faststart.read_bytes()
    path = tmp_path / "cut.mp4"
    path.write_bytes(data[: len(data) * 2 // 3])
    for options in ({}, {"frame_indices": [0]}, {"backend": "decord"}, {"backend": "torchcodec"}):
        error = bad_sample(path, **options)
        assert error.reason == "broken_media"
        assert "cut.mp4 is truncated or damaged: it should have 60 frames, " in str(error)
        assert 0 < int(str(error).split("60 frames, ")[1].split()[0]) < 60


def test_a_file_cut_before_its_index_cannot_be_opened(video: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.mp4"
    path.write_bytes(video.read_bytes()[:1500])
    for call in (load_video, probe_video):
        error = bad_sample(path, call)
        assert error.reason == "broken_media"
        assert "cut.mp4" in str(error)
        assert "0 frames could be read" in str(error)
        assert "moov" in str(error)


def test_damage_inside_the_pixels_is_noticed(faststart: Path, tmp_path: Path) -> None:
    data = bytearray(faststart.read_bytes())
    start = data.index(b"mdat") + 4
    data[start:] = bytes(len(data) - start)
    path = tmp_path / "zeros.mp4"
    path.write_bytes(data)
    error = bad_sample(path)
    assert error.reason == "broken_media"
    assert "should have 60 frames, 0 could be read" in str(error)


def test_what_is_no_video_is_broken_and_what_is_not_there_missing(tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_bytes(b"not a video at all " * 50)
    (tmp_path / "empty.mp4").touch()
    for call in (load_video, probe_video):
        assert bad_sample(tmp_path / "text.mp4", call).reason == "broken_media"
        assert "0 bytes" in str(bad_sample(tmp_path / "empty.mp4", call))
        assert bad_sample(tmp_path / "no.mp4", call).reason == "missing_media"
        assert bad_sample("memory://no.mp4", call).reason == "missing_media"
        assert bad_sample("nul\0byte", call).reason == "missing_media"


def test_a_video_without_frames_is_broken(tmp_path: Path) -> None:
    path = write_video(tmp_path / "none.mkv", 0)
    for call in (load_video, probe_video):
        error = bad_sample(path, call)
        assert error.reason == "broken_media"
        assert "none.mkv" in str(error)


def test_a_file_with_audio_only_has_no_video(tmp_path: Path) -> None:
    path = tmp_path / "audio.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    for call in (load_video, probe_video):
        error = bad_sample(path, call)
        assert error.reason == "broken_media"
        assert "has no video stream" in str(error)


def test_indices_outside_the_video_are_named_with_the_file(video: Path) -> None:
    error = bad_sample(video, frame_indices=[0, 60, 61])
    assert error.reason == "broken_media"
    assert "clip.mp4: frame_indices 60, 61 are not in the video's 60 frames" in str(error)


def test_a_playlist_is_not_followed_to_another_file(video: Path, tmp_path: Path) -> None:
    secret = write_video(tmp_path / "secret.ts", 10)
    evil = tmp_path / "media"
    evil.mkdir()
    for name in ("evil.m3u8", "evil.mp4"):
        path = evil / name
        path.write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\nfile://{secret}\n#EXT-X-ENDLIST\n")
        for backend in ("pyav", "decord", "torchcodec"):
            assert bad_sample(path, backend=backend).reason == "broken_media"
        assert bad_sample(path, probe_video).reason == "broken_media"


@pytest.mark.parametrize(
    "text",
    [
        "ffconcat version 1.0\nfile {}\n",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n",
        "concat:{}|{}",
    ],
)
def test_a_list_of_files_or_streams_is_not_followed(text: str, tmp_path: Path) -> None:
    secret = write_video(tmp_path / "secret.ts", 10)
    path = tmp_path / "evil.mp4"
    path.write_text(text.format(secret, secret))
    assert bad_sample(path).reason == bad_sample(path, probe_video).reason == "broken_media"


def test_frames_larger_than_the_limit_are_rejected_before_decoding(video: Path) -> None:
    for call in (load_video, probe_video):
        error = bad_sample(video, call, max_pixels=3000)
        assert error.reason == "media_too_large"
        assert "64 x 48 = 3,072 pixels, more than max_pixels=3,000" in str(error)


def test_a_wrong_backend_or_rate_is_the_callers_mistake(video: Path) -> None:
    with raises_config("backend", "opencv", match="expected auto, pyav, decord, torchcodec"):
        load_video(video, backend="opencv")
    with raises_config("fps", 0):
        load_video(video, fps=0)


# Frames as images


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve frames whose names sort wrongly as text, and things that are no frames."""
    folder = tmp_path / "frames"
    folder.mkdir()
    for number in range(12):
        Image.fromarray(make_image(number)).save(folder / f"frame{number}.png")
    (folder / "notes.txt").write_text("x")
    (folder / ".hidden.png").write_bytes(b"x")
    return folder


def test_a_folder_of_frames_is_a_video_in_natural_order(folder: Path) -> None:
    expected = np.stack([make_image(number) for number in range(12)])
    for source in (folder, str(folder), f"file://{folder}", {"path": str(folder)}):
        assert probe_video(source) == VideoInfo(12, 48, 64, None, None)
        assert np.array_equal(load_video(source).frames, expected)
    assert np.array_equal(load_video(folder, frame_indices=[10, 2]).frames, expected[[10, 2]])


def test_lists_of_paths_images_bytes_and_arrays_are_videos(folder: Path) -> None:
    expected = np.stack([make_image(number) for number in (1, 10)])
    paths = [folder / "frame1.png", str(folder / "frame10.png")]
    images = [Image.fromarray(make_image(n)).convert("RGBA") for n in (1, 10)]
    for source in (
        paths,
        tuple(paths),
        images,
        [p.read_bytes() for p in map(Path, paths)],
        list(expected),
        expected,
    ):
        assert probe_video(source) == VideoInfo(2, 48, 64, None, None)
        assert np.array_equal(load_video(source).frames, expected)


def test_the_rate_of_frames_gives_them_times_and_takes_them_all(folder: Path) -> None:
    sampling = VideoSampling(fps=2, min_frames=4, max_frames=768, temporal_patch_size=2)
    assert probe_video(folder, fps=4) == VideoInfo(12, 48, 64, 4, 3.0)
    loaded = load_video(folder, sampling=sampling, fps=4)
    assert loaded.metadata.timestamps == [number / 4 for number in range(12)]
    assert loaded.metadata.video_backend == "pil"
    assert len(load_video(folder, sampling=sampling).frames) == 12
    assert len(load_video(folder, sampling=sampling, max_frames=6).frames) == 6
    with raises_config("fps", match="no rate"):
        _ = load_video(folder).metadata.timestamps


def test_an_odd_number_of_frames_is_filled_up_with_the_last(folder: Path) -> None:
    (folder / "frame11.png").unlink()
    loaded = load_video(folder, sampling=VideoSampling(temporal_patch_size=2))
    assert loaded.metadata.frames_indices == (*range(11), 10)
    assert np.array_equal(loaded.frames[-1], loaded.frames[-2])


def test_frames_of_different_sizes_are_broken(folder: Path) -> None:
    Image.fromarray(noise(32, 48)).save(folder / "frame7.png")
    error = bad_sample(folder)
    assert error.reason == "broken_media"
    assert "frame 7 (" in str(error)
    assert "is 32 x 48, expected 64 x 48 like the first frame" in str(error)
    assert len(load_video(folder, frame_indices=[0, 1]).frames) == 2


def test_missing_and_broken_frames_are_named(folder: Path) -> None:
    error = bad_sample([folder / "frame1.png", folder / "frame99.png"])
    assert error.reason == "missing_media"
    assert "frame99.png" in str(error)
    (folder / "frame5.png").write_bytes((folder / "frame5.png").read_bytes()[:-60])
    error = bad_sample(folder)
    assert error.reason == "broken_media"
    assert "frame5.png" in str(error)


def test_no_frames_at_all_are_broken(tmp_path: Path) -> None:
    (tmp_path / "hollow").mkdir()
    for source in (tmp_path / "hollow", [], ()):
        for call in (load_video, probe_video):
            error = bad_sample(source, call)
            assert error.reason == "broken_media"
            assert "no frames" in str(error)


def test_only_the_wanted_frames_of_a_list_are_opened(folder: Path) -> None:
    frames = [folder / "frame0.png", "/not/there.png", folder / "frame2.png"]
    assert len(load_video(frames, frame_indices=[0, 2]).frames) == 2


def test_the_callers_list_is_not_changed(folder: Path) -> None:
    frames = [str(folder / f"frame{number}.png") for number in range(3)]
    indices = [2, 0]
    before = copy.deepcopy((frames, indices))
    load_video(frames, frame_indices=indices)
    assert (frames, indices) == before


def test_loaded_frames_travel_between_processes_and_hold_no_file_open(video: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    loaded = load_video(video, num_frames=2)
    assert len(os.listdir("/proc/self/fd")) == before
    again = pickle.loads(pickle.dumps(loaded))
    assert again.metadata == loaded.metadata
    assert np.array_equal(again.frames, loaded.frames)


def test_a_recording_whose_clock_does_not_start_at_zero_is_read_from_its_first_frame(tmp_path: Path) -> None:
    path = write_video(tmp_path / "whole.ts", options=CLOSED)
    with container_module.open_video(path) as video:
        assert video.seconds(0) > 0
    loaded = load_video(path, fps=2)
    assert loaded.metadata.timestamps[0] == 0
    assert np.array_equal(loaded.frames[0], decode_all(path)[0])


class LazyImage(Image.Image):
    """An image whose tags are read when they are used, and are damaged."""

    @property
    def tag_v2(self) -> dict[int, Any]:
        raise ZeroDivisionError("no rows")


@pytest.mark.parametrize("call", [probe_video, load_video])
def test_what_a_decoder_raises_is_an_error_of_its_video(call: Any) -> None:
    words = r"cannot be decoded \(ZeroDivisionError: no rows\)"
    with raises_bad_sample("broken_media", stage="media", match=words):
        call([LazyImage(), LazyImage()])
