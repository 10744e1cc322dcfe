from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.errors import BadSample
from packhorse.media import VideoInfo, VideoSampling, count_sampled_frames, sample_frame_indices
from raising import raises_bad_sample, raises_config


def video(total: int, fps: float | None = 30.0) -> VideoInfo:
    return VideoInfo(total, 48, 64, fps, total / fps if fps else None)


def indices(total: int, rate: float | None = 30.0, **settings: object) -> list[int]:
    return sample_frame_indices(video(total, rate), VideoSampling(**settings)).tolist()


samplings = st.builds(
    VideoSampling,
    fps=st.none() | st.floats(0.01, 200),
    min_frames=st.none() | st.integers(1, 50),
    max_frames=st.none() | st.integers(1, 50),
    num_frames=st.none() | st.integers(1, 50),
    temporal_patch_size=st.integers(1, 5),
)
videos = st.builds(video, st.integers(1, 500), st.none() | st.floats(0.1, 240))


@settings(deadline=None)
@given(videos, samplings)
def test_indices_are_ascending_inside_the_video_and_fill_whole_patches(
    info: VideoInfo, sampling: VideoSampling
) -> None:
    chosen = sample_frame_indices(info, sampling)
    patch = sampling.temporal_patch_size
    assert len(chosen) == count_sampled_frames(info, sampling)
    assert len(chosen) >= 1
    assert len(chosen) % patch == 0
    assert chosen.dtype == np.int64
    assert chosen.min() >= 0
    assert chosen.max() < info.total_frames
    assert (np.diff(chosen) >= 0).all()
    # Only the filling of the last patch repeats a frame, and only when the video has no more.
    distinct = len(np.unique(chosen))
    assert distinct == min(len(chosen), info.total_frames)
    assert len(chosen) - distinct < patch
    if distinct > 1:
        assert chosen[0] == 0
        assert chosen[-1] == info.total_frames - 1
        steps = np.diff(chosen[:distinct])
        assert steps.max() - steps.min() <= 1  # evenly spread


@settings(deadline=None)
@given(videos, samplings)
def test_the_count_is_the_documented_formula(info: VideoInfo, sampling: VideoSampling) -> None:
    total, patch = info.total_frames, sampling.temporal_patch_size
    if sampling.num_frames is not None:
        count = min(sampling.num_frames, total)
    else:
        count = min(total, sampling.max_frames or total)
        if sampling.fps is not None and info.fps is not None and sampling.fps != info.fps:
            wanted = max(int(total / info.fps * sampling.fps), sampling.min_frames or 1)
            count = min(wanted, count)
    assert count_sampled_frames(info, sampling) == math.ceil(count / patch) * patch


@settings(deadline=None)
@given(st.integers(1, 100), st.lists(st.integers(0, 99), min_size=1, max_size=20), st.integers(1, 4))
def test_given_indices_are_kept_in_order_and_only_filled_up(total: int, given: list[int], patch: int) -> None:
    given = [index % total for index in given]
    sampling = VideoSampling(fps=1, temporal_patch_size=patch)
    chosen = sample_frame_indices(video(total), sampling, given).tolist()
    assert chosen[: len(given)] == given
    assert len(chosen) == count_sampled_frames(video(total), sampling, given)
    assert len(chosen) - len(given) < patch
    assert set(chosen[len(given) :]) <= {given[-1]}


def test_frames_are_those_that_transformers_qwen3_vl_processor_takes() -> None:
    # Printed by the sample_frames of Qwen3VLVideoProcessor (transformers 5.22.2) with these settings; the
    # last one comes out as 0, 1, 2 there and is filled up when the patches are cut.
    qwen3 = {"fps": 2, "min_frames": 4, "max_frames": 768, "temporal_patch_size": 2}
    assert indices(100, 25.0, **qwen3) == [0, 14, 28, 42, 57, 71, 85, 99]
    assert indices(60, 30.0, **qwen3) == [0, 20, 39, 59]
    assert indices(3, 30.0, **qwen3) == [0, 1, 2, 2]


def test_the_limits_hold() -> None:
    assert len(indices(3000, fps=2, max_frames=16)) == 16
    assert len(indices(3000, fps=0.001, min_frames=4)) == 4
    assert indices(2, fps=2, min_frames=4) == [0, 1]
    assert len(indices(100, fps=2, min_frames=40, max_frames=10)) == 10
    assert indices(1, fps=2, temporal_patch_size=4) == [0, 0, 0, 0]
    assert len(indices(100, num_frames=7, temporal_patch_size=2)) == 8


def test_without_a_rate_all_frames_are_taken_up_to_the_most() -> None:
    assert indices(10) == list(range(10))
    assert indices(100, max_frames=4) == [0, 33, 66, 99]
    # The frames of a list without a rate were chosen by someone; they are not thinned out again.
    assert indices(10, None, fps=2, min_frames=4, max_frames=768) == list(range(10))


def test_the_same_rate_takes_every_frame_in_spite_of_rounding() -> None:
    assert all(len(indices(total, 29.97, fps=29.97)) == total for total in range(1, 200))


def test_indices_outside_the_video_are_named() -> None:
    with pytest.raises(
        BadSample, match=r"frame_indices -1, 60, 99 are not in the video's 60 frames"
    ) as caught:
        sample_frame_indices(video(60), VideoSampling(), [0, -1, 60, 5, 99])
    assert caught.value.reason == "broken_media"


@pytest.mark.parametrize("given", [[], [0.5], ["a"], [[1, 2]], [[1], [2, 3]], [True]])
def test_indices_that_are_no_list_of_whole_numbers_are_rejected(given: list) -> None:
    with raises_bad_sample("wrong_format", match="whole numbers"):
        sample_frame_indices(video(60), VideoSampling(), given)


def test_a_video_without_frames_cannot_be_sampled() -> None:
    with raises_bad_sample("broken_media", match="no frames"):
        sample_frame_indices(video(0), VideoSampling())


def test_settings_are_read_from_a_processor_or_its_video_processor() -> None:
    inner = SimpleNamespace(fps=2, min_frames=4, max_frames=768, num_frames=None, temporal_patch_size=2)
    expected = VideoSampling(fps=2, min_frames=4, max_frames=768, temporal_patch_size=2)
    assert VideoSampling.from_processor(SimpleNamespace(video_processor=inner)) == expected
    assert VideoSampling.from_processor(inner) == expected


def test_a_processor_without_a_rate_or_with_few_settings_is_legal() -> None:
    assert VideoSampling.from_processor(SimpleNamespace(fps=None, temporal_patch_size=2)) == VideoSampling(
        temporal_patch_size=2
    )
    assert (
        VideoSampling.from_processor(
            SimpleNamespace(video_processor=SimpleNamespace(num_frames=8))
        ).num_frames
        == 8
    )


def test_a_processor_that_knows_nothing_of_videos_is_the_callers_mistake() -> None:
    with raises_config("processor", match="SimpleNamespace has no video_processor"):
        VideoSampling.from_processor(SimpleNamespace(tokenizer=None))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fps", 0),
        ("fps", -1),
        ("fps", "2"),
        ("fps", math.nan),
        ("min_frames", 0),
        ("max_frames", 2.5),
        ("max_frames", True),
        ("num_frames", -3),
        ("temporal_patch_size", 0),
        ("temporal_patch_size", None),
    ],
)
def test_settings_that_make_no_sense_are_named(name: str, value: object) -> None:
    with raises_config(name) as caught:
        VideoSampling(**{name: value})
    assert repr(caught.value.value) == repr(value)  # one is NaN


def test_an_override_replaces_only_what_is_given() -> None:
    base = VideoSampling(fps=2, min_frames=4, max_frames=8, temporal_patch_size=2)
    assert base.override() is base
    assert base.override(max_frames=6) == VideoSampling(2, 4, 6, None, 2)
    assert VideoSampling(num_frames=8).override(fps=1) == VideoSampling(fps=1)
    assert VideoSampling().override(fps=1, num_frames=3) == VideoSampling(fps=1, num_frames=3)
