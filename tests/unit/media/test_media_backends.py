from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from media_samples import CLOSED, OPEN_GROUPS, decode_all, write_video

from packhorse.media import VideoSampling, load_video
from raising import raises_bad_sample

# decord and torchcodec carry their own FFmpeg, whose colour conversion may round differently.
TOLERANCE = 3


def assert_close(frames: np.ndarray, expected: np.ndarray) -> None:
    assert frames.shape == expected.shape
    assert np.abs(frames.astype(int) - expected).max() <= TOLERANCE


@pytest.mark.parametrize("backend", ["decord", "torchcodec"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("closed.mp4", {"options": CLOSED}),
        ("open.mp4", {"options": OPEN_GROUPS}),
        ("open.mkv", {"options": OPEN_GROUPS}),
        ("short.mp4", {"options": CLOSED, "group": 2}),
        ("vp9.webm", {"codec": "libvpx-vp9"}),
        ("mjpeg.avi", {"codec": "mjpeg", "pix_fmt": "yuvj420p"}),
    ],
)
def test_every_decoder_gives_the_same_frames_as_pyav(
    tmp_path: Path, backend: str, name: str, options: dict
) -> None:
    path = write_video(tmp_path / name, **options)
    sampling = VideoSampling(fps=7, min_frames=4, max_frames=768, temporal_patch_size=2)
    theirs, ours = (load_video(path, sampling=sampling, backend=b) for b in (backend, "auto"))
    assert theirs.metadata.frames_indices == ours.metadata.frames_indices
    assert theirs.metadata.timestamps == ours.metadata.timestamps
    assert theirs.metadata.video_backend == backend
    assert_close(theirs.frames, ours.frames)
    everything = decode_all(path)
    for number in (0, 1, 13, 24, 25, 47, 59):
        assert_close(load_video(path, frame_indices=[number], backend=backend).frames, everything[[number]])


@pytest.mark.parametrize("backend", ["decord", "torchcodec"])
def test_every_decoder_reads_bytes_and_addresses(video: Path, memory, backend: str) -> None:
    expected = decode_all(video)[[40, 2, 2]]
    for source in (video, video.read_bytes(), memory("clip.mp4", video.read_bytes())):
        assert_close(load_video(source, frame_indices=[40, 2, 2], backend=backend).frames, expected)


def test_torchcodec_puts_a_phone_video_upright_as_pyav_does(tmp_path: Path) -> None:
    path = write_video(tmp_path / "phone.mp4", 10, rotation=90)
    assert_close(load_video(path, backend="torchcodec").frames, load_video(path).frames)


def test_decord_is_not_trusted_where_it_is_known_to_be_wrong(tmp_path: Path) -> None:
    for name, options, why in [
        ("phone.mp4", {"rotation": 90}, "turned by 90 degrees"),
        ("stream.ts", {}, "this is mpegts"),
    ]:
        path = write_video(tmp_path / name, 30, **options)
        with raises_bad_sample("broken_media", match=why) as caught:
            load_video(path, backend="decord")
        assert "use backend='pyav'" in str(caught.value)
