"""How much memory a decoded media item may take."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from packhorse.errors import BadSample
from packhorse.formats.example_media import preload_media
from packhorse.media import DEFAULT_MAX_BYTES, VideoSampling, load_audio, load_media, load_video
from packhorse.types import MediaRef


def too_large(call, *args: object, **options: object) -> str:
    with pytest.raises(BadSample) as caught:
        call(*args, **options)
    assert (caught.value.reason, caught.value.stage) == ("media_too_large", "media")
    return str(caught.value)


def example(video: object) -> dict:
    return {"conversation": [{"role": "user", "content": [{"type": "video", "video": video}]}]}


def test_a_bomb_of_frames_is_rejected_before_anything_is_allocated(tmp_path: Path) -> None:
    Image.new("RGB", (4096, 4096)).save(tmp_path / "big.png")
    frames = [str(tmp_path / "big.png")] * 200_000
    for call, source in ((load_video, frames), (preload_media, example(frames))):
        message = too_large(call, source)
        assert "200,000 frames of 4,096 x 4,096 would take 9,375.0 GiB" in message
        assert f"more than max_bytes={DEFAULT_MAX_BYTES:,}" in message
        assert "take fewer frames (fps, num_frames or max_frames), or raise max_bytes" in message


def test_a_video_may_take_exactly_the_limit_and_fewer_frames_fit(video: Path) -> None:
    one = 64 * 48 * 3
    assert len(load_video(video, max_bytes=60 * one).frames) == 60
    assert len(load_video(video, max_bytes=None).frames) == 60
    assert "clip.mp4: 60 frames of 64 x 48" in too_large(load_video, video, max_bytes=60 * one - 1)
    assert len(load_video(video, max_bytes=8 * one, num_frames=8).frames) == 8
    assert "9 frames" in too_large(load_video, video, max_bytes=8 * one, frame_indices=[7] * 9)


def test_the_limit_goes_through_all_doors(video: Path) -> None:
    ref = MediaRef("video", str(video))
    too_large(load_media, ref, max_bytes=1000)
    too_large(preload_media, example(str(video)), max_bytes=1000)
    two = VideoSampling(num_frames=2)
    loaded = preload_media(example(str(video)), sampling=two, max_bytes=2 * 64 * 48 * 3)
    too_large(preload_media, loaded, max_bytes=1000)
    file = io.BytesIO()
    soundfile.write(file, np.zeros(1000, np.float32), 8000, format="WAV")
    clip = MediaRef("audio", file.getvalue())
    assert len(load_media(clip, max_bytes=4000)[0]) == 1000
    assert "a clip of 1,000 samples" in too_large(load_media, clip, max_bytes=3999)
    assert "a clip of 2,000 samples" in too_large(load_media, clip, sampling_rate=16_000, max_bytes=4000)


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "MP3"])
def test_a_clip_larger_than_the_limit_is_rejected(form: str) -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(20_000, np.float32), 8000, format=form)
    message = too_large(load_audio, file.getvalue(), max_bytes=10_000)
    assert "cut it into shorter clips, or raise max_bytes" in message
