from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from media_samples import decode_all, make_image
from PIL import Image

from packhorse.formats.example_media import preload_media
from packhorse.media import (
    VideoFrames,
    VideoInfo,
    VideoSampling,
    count_sampled_frames,
    load_media,
    media_size,
    sampling_of,
)
from packhorse.types import MediaRef
from raising import raises_bad_sample, raises_config

SAMPLING = VideoSampling(fps=2, min_frames=4, max_frames=768, temporal_patch_size=2)


@pytest.fixture
def wav(tmp_path: Path) -> Path:
    soundfile.write(tmp_path / "a.wav", np.zeros(800, np.float32), 8000)
    return tmp_path / "a.wav"


@pytest.fixture
def example(png: Path, video: Path, wav: Path) -> dict:
    return {
        "conversation": [
            {"role": "system", "content": "Look."},
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": str(png), "min_pixels": 3136},
                    {"type": "video", "video": str(video), "frame_indices": [5, 9]},
                    {"type": "audio", "audio": str(wav)},
                    {"type": "text", "text": "What is it?"},
                ],
            },
            {"role": "assistant", "content": "A clip."},
        ],
        "_text_tokens": 3,
    }


def parts(example: dict) -> list[dict]:
    return example["conversation"][1]["content"]


def test_each_kind_is_loaded_and_measured(png: Path, video: Path, wav: Path) -> None:
    image = load_media(MediaRef("image", str(png)))
    assert isinstance(image, Image.Image)
    assert media_size(MediaRef("image", str(png))) == (30, 40)
    frames = load_media(MediaRef("video", video), sampling=SAMPLING)
    assert isinstance(frames, VideoFrames)
    assert frames.frames.shape == (4, 48, 64, 3)
    assert media_size(MediaRef("video", video)) == VideoInfo(60, 48, 64, 30.0, 2.0)
    samples, rate = load_media(MediaRef("audio", str(wav)), sampling_rate=16_000)
    assert (len(samples), rate) == (1600, 16_000)
    assert media_size(MediaRef("audio", str(wav))) == (800, 8000)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 4),
        ({"fps": 5}, 10),
        ({"fps": 30, "max_frames": 6}, 6),
        ({"min_frames": 8}, 8),
        ({"num_frames": 2}, 2),
        ({"fps": 5, "num_frames": 2}, 2),
        ({"frame_indices": [3, 1, 2]}, 4),
        ({"resized_height": 28, "resized_width": 28}, 4),
    ],
)
def test_the_rows_options_override_the_sampling_and_can_be_counted_beforehand(
    video: Path, options: dict, count: int
) -> None:
    ref = MediaRef("video", str(video), options)
    loaded = load_media(ref, sampling=SAMPLING)
    assert len(loaded.frames) == count
    planned = count_sampled_frames(media_size(ref), sampling_of(ref, SAMPLING), options.get("frame_indices"))
    assert planned == count


@pytest.mark.parametrize(
    "options",
    [
        *({"fps": 0}, {"fps": "fast"}, {"max_frames": -1}, {"frame_indices": "all"}),
        *({"min_frames": 5, "max_frames": 4}, {"min_frames": "5", "max_frames": 4}),
        *({"resized_height": 28}, {"total_pixels": 0}),
    ],
)
def test_invalid_options_are_the_rows_fault(video: Path, options: dict) -> None:
    with raises_bad_sample("wrong_format", match=r"clip\.mp4: "):
        load_media(MediaRef("video", str(video), options))


def test_a_wrong_backend_stays_the_callers_fault(video: Path) -> None:
    with raises_config("backend", "none"):
        load_media(MediaRef("video", str(video)), backend="none")


def test_the_rate_of_a_list_of_frames_comes_from_its_row() -> None:
    ref = MediaRef("video", [Image.fromarray(make_image(n)) for n in range(5)], {"fps": 1})
    assert media_size(ref) == VideoInfo(5, 48, 64, 1, 5.0)
    loaded = load_media(ref, sampling=SAMPLING)
    assert loaded.metadata.timestamps == [0, 1, 2, 3, 4, 4]


def test_audio_as_a_bare_array_has_its_rate_in_an_option() -> None:
    for source in (np.zeros(100, np.float32), [0.0] * 100):
        ref = MediaRef("audio", source, {"sampling_rate": 8000})
        assert media_size(ref) == (100, 8000)
        assert load_media(ref)[1] == 8000


def test_preloading_puts_media_in_place_and_leaves_the_row_alone(example: dict, video: Path) -> None:
    before = copy.deepcopy(example)
    loaded = preload_media(example, sampling=SAMPLING, sampling_rate=16_000)
    assert example == before
    image, clip, audio, text = parts(loaded)
    assert isinstance(image["image"], Image.Image)
    assert image["image"].mode == "RGB"
    assert image["min_pixels"] == 3136
    assert clip["frame_indices"] == [5, 9]
    assert clip["video_metadata"]["frames_indices"] == [5, 9]
    assert clip["video_metadata"]["total_num_frames"] == 60
    assert np.array_equal(np.stack(clip["video"]), decode_all(video)[[5, 9]])
    assert audio["audio"][1] == 16_000
    assert text == {"type": "text", "text": "What is it?"}
    assert loaded["_text_tokens"] == 3
    assert loaded["conversation"][0] == {"role": "system", "content": "Look."}


def test_preloading_twice_is_preloading_once(example: dict) -> None:
    once = preload_media(example, sampling=SAMPLING)
    twice = preload_media(once, sampling=SAMPLING)
    assert parts(twice)[0]["image"] is parts(once)[0]["image"]
    assert parts(twice)[1]["video_metadata"] == parts(once)[1]["video_metadata"]
    assert parts(twice)[1]["video"] == parts(once)[1]["video"]
    assert np.array_equal(parts(twice)[2]["audio"][0], parts(once)[2]["audio"][0])


def test_a_preloaded_video_keeps_the_size_of_the_original(example: dict) -> None:
    part = parts(preload_media(example))[1]
    ref = MediaRef("video", part["video"], {k: v for k, v in part.items() if k not in ("type", "video")})
    assert media_size(ref) == VideoInfo(60, 48, 64, 30.0, 2.0)
    with raises_bad_sample("wrong_format", match="video_metadata does not describe these frames"):
        load_media(MediaRef("video", part["video"][:1], ref.options))


def test_metadata_that_name_no_frames_do_not_stop_the_sampling() -> None:
    frames = [Image.fromarray(make_image(n)) for n in range(6)]
    ref = MediaRef("video", frames, {"video_metadata": {"fps": 2.0, "total_num_frames": 6}, "max_frames": 2})
    assert load_media(ref).metadata.frames_indices == (0, 5)


def test_a_missing_media_item_is_reported_with_its_reason(example: dict, png: Path) -> None:
    png.unlink()
    with raises_bad_sample("missing_media", stage="media", match=r"no file .*image\.png"):
        preload_media(example)


def test_a_turn_without_content_is_the_rows_fault(example: dict) -> None:
    example["conversation"].append({"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]})
    with raises_bad_sample("wrong_format", match="the content of turn 3 is missing"):
        preload_media(example)


def test_importing_the_package_imports_no_optional_or_heavy_one() -> None:
    heavy = "torch av pyarrow fsspec lmdb soundfile soxr decord torchcodec transformers datasets"
    code = f"import sys, packhorse.media; print([m for m in {heavy.split()} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
