"""The estimated length of a sample: the documented formulas over columns, and for one row."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example as with_example
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.processors import processor
from packhorse.errors import ConfigError
from packhorse.formats.estimate import (
    LengthColumns,
    MediaSizes,
    columns_of,
    estimate_image_tokens,
    estimate_lengths,
    estimate_sample_length,
    estimate_video_tokens,
    image_config,
    video_config,
)
from packhorse.media.images import resize_image, resize_video
from packhorse.media.sampling import VideoInfo, VideoSampling, count_sampled_frames
from raising import raises_config

IMAGES = {"patch_size": 14, "merge_size": 2, "factor": 28, "min_pixels": 56 * 56, "max_pixels": 1003520}
VIDEOS = {
    "patch_size": 16,
    "merge_size": 2,
    "factor": 32,
    "min_pixels": 128 * 128,
    "max_pixels": 16 * 16 * 2 * 2 * 2 * 6144,
    "temporal_patch_size": 2,
    "fps": 2,
    "min_frames": 4,
    "max_frames": 768,
}


def sample(*parts: dict[str, Any], text: str = "", **more: Any) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": text}]
    return {"conversation": [{"role": "user", "content": content}], **more}


IMAGE = {"type": "image", "image": "a.jpg"}
VIDEO = {"type": "video", "video": "a.mp4"}
AUDIO = {"type": "audio", "audio": "a.wav"}


def estimate(row: dict[str, Any], *configs: Any) -> tuple[int, int, bool]:
    """(text tokens, media tokens, whether the row's fields state both)."""
    total, media, from_fields = estimate_lengths(columns_of([row]), *configs)
    return int(total[0] - media[0]), int(media[0]), bool(from_fields[0])


def test_text_is_its_field_or_a_third_of_its_characters():
    assert estimate_sample_length(sample(text="x" * 11)) == 3
    assert estimate_sample_length(sample(text="x" * 11, _text_tokens=70)) == 70
    plain = {"conversation": [{"role": "user", "content": "xxx"}, {"role": "assistant", "content": "yyy"}]}
    assert estimate_sample_length(plain) == 2


def test_media_without_a_meta_are_500_each():
    assert estimate_sample_length(sample(IMAGE, VIDEO, AUDIO, text="xxx")) == 1501
    assert estimate_sample_length(sample(IMAGE, VIDEO), IMAGES, VIDEOS, return_media_tokens=True) == (
        1000,
        1000,
    )


def test_media_are_measured_by_their_meta_and_null_counts_nothing():
    meta = {"images_meta": [[480, 640], {"n_tokens": 7}, None], "videos_meta": [[60, 320, 320, 30.0, 2.0]]}
    row = sample(IMAGE, IMAGE, IMAGE, VIDEO, mm_inputs_meta=meta, _text_tokens=5)
    assert estimate(row, IMAGES, VIDEOS) == (5, 391 + 7 + 0 + 2 * 100, True)
    assert estimate(row) == (5, 500 + 7 + 0 + 500, False)


def test_a_media_item_beyond_the_meta_is_500_and_an_entry_beyond_the_media_counts():
    meta = {"images_meta": [{"n_tokens": 7}]}
    assert estimate(sample(IMAGE, IMAGE, mm_inputs_meta=meta, _text_tokens=0)) == (0, 507, False)
    assert estimate({"_text_tokens": 0, "mm_inputs_meta": meta}) == (0, 7, True)


def test_both_fields_of_a_row_are_all_that_is_looked_at():
    assert estimate({"_text_tokens": 100, "_media_tokens": 50}) == (100, 50, True)
    assert estimate(sample(IMAGE, text="xxx", _media_tokens=50)) == (1, 50, False)


@pytest.mark.parametrize(
    "entry",
    [[], [480], ["a", "b"], [0, 640], [480, -1], [10, 2001], {}, {"n_tokens": None}, 7, "480", [1e400, 2]],
)
def test_an_entry_without_information_is_500(entry: Any):
    assert estimate_image_tokens(entry, IMAGES) == 500
    assert estimate_video_tokens(entry, VIDEOS) == 500


def test_what_is_not_a_conversation_counts_nothing():
    rows: list[dict[str, Any]] = [
        {},
        {"conversation": None},
        {"conversation": ["text", {"role": "user"}, {"role": "user", "content": [None, {"type": "text"}]}]},
        {"conversation": 5},
        {"conversation": [{"role": "user", "content": 5}]},
        {"conversation": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
    ]
    assert [estimate_sample_length(row) for row in rows] == [0] * len(rows)


@pytest.mark.parametrize(
    ("total", "fps", "config", "frames"),
    [
        (300, 30.0, {}, 20),  # ten seconds, two frames each
        (300, 29.0, {}, 20),  # 20.7: a part of a frame is none
        (315, 30.0, {}, 22),  # 21, rounded up to the temporal patch
        (30, 30.0, {}, 4),  # at least min_frames
        (3, 30.0, {}, 4),  # but not more than there are, then rounded up
        (1, 30.0, {}, 2),
        (90_000, 30.0, {}, 768),  # at most max_frames
        (100, None, {}, 100),  # an unknown rate
        (100, 0.0, {}, 100),
        (100, math.nan, {}, 100),
        (101, 30.0, {"fps": None}, 102),  # transformers 5: every frame
        (9_000, 30.0, {"fps": None}, 768),
    ],
)
def test_frames_are_taken_by_rate_within_bounds_and_fill_the_temporal_patch(
    total: int, fps: float | None, config: dict[str, Any], frames: int
):
    cfg = {**VIDEOS, **config}
    height, width = resize_video(frames, 100, 200)
    expected = frames // 2 * (height // 32) * (width // 32)
    assert estimate_video_tokens([total, 100, 200, fps, 1.0], cfg) == expected


def test_a_video_setting_that_makes_no_sense_is_the_callers_error():
    with raises_config("fps", 0):
        estimate_video_tokens([60, 100, 100, 30.0, 2.0], {**VIDEOS, "fps": 0})


def test_the_geometry_of_videos_is_read_from_the_processor():
    owner = SimpleNamespace(
        patch_size=16, merge_size=2, fps=None, size={"shortest_edge": 9, "longest_edge": 99}
    )
    assert video_config(SimpleNamespace(video_processor=owner)) == {
        **VIDEOS,
        "min_pixels": 9,
        "max_pixels": 99,
        "fps": None,
    }
    owner = SimpleNamespace(
        patch_size=14, merge_size=2, temporal_patch_size=1, fps=0.5, min_frames=1, max_frames=8
    )
    found = video_config(SimpleNamespace(video_processor=owner))
    assert found is not None
    assert [found[name] for name in ("temporal_patch_size", "fps", "min_frames", "max_frames")] == [
        1,
        0.5,
        1,
        8,
    ]
    assert video_config(SimpleNamespace()) is None
    assert video_config(None) is None


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_omni"])
def test_real_processors_have_a_geometry_and_every_sample_an_estimate(name: str):
    meta = {"images_meta": [[480, 640]], "videos_meta": [[60, 320, 320, 30.0, 2.0]]}
    row = sample(IMAGE, VIDEO, mm_inputs_meta=meta, _text_tokens=1)
    images, videos = image_config(processor(name)), video_config(processor(name))
    assert estimate(row, images, videos)[2]


def test_the_estimate_of_an_image_is_what_qwens_processor_makes_of_it():
    image_processor = processor("qwen2_vl").image_processor
    config = image_config(processor("qwen2_vl"))
    for height, width in [(1, 1), (28, 28), (42, 42), (480, 640), (8000, 200), (199, 1), (70, 14)]:
        patches = image_processor.get_number_of_image_patches(height, width, {})
        assert estimate_image_tokens([height, width], config) == patches // 4


SIDES = st.one_of(
    st.integers(-1, 200), st.integers(1, 9000), st.sampled_from([14, 42, 70, 28 * 200, 10**9, 2**40])
)
FPS = st.one_of(
    st.none(), st.sampled_from([0.0, -1.0, 2, 24, 29.97, 1e-300, math.inf, math.nan]), st.floats(0.01, 240)
)
TOKEN_METAS = st.one_of(st.none(), st.builds(lambda n: {"n_tokens": n}, st.integers(0, 9999)), st.just({}))
IMAGE_METAS = st.one_of(TOKEN_METAS, st.lists(SIDES, min_size=2, max_size=2))
VIDEO_METAS = st.one_of(
    TOKEN_METAS,
    st.builds(
        lambda n, h, w, fps: [n, h, w, fps, 1.0], st.one_of(st.integers(0, 2000), SIDES), SIDES, SIDES, FPS
    ),
)
ROWS = st.builds(
    lambda text, tokens, whole, images, videos, media: sample(
        *media,
        text="x" * text,
        **({} if tokens is None else {"_text_tokens": tokens}),
        **({} if whole is None else {"_media_tokens": whole}),
        mm_inputs_meta={"images_meta": images, "videos_meta": videos},
    ),
    st.integers(0, 100),
    st.one_of(st.none(), st.integers(0, 10_000)),
    st.one_of(st.none(), st.none(), st.integers(0, 10_000)),
    st.lists(IMAGE_METAS, max_size=4),
    st.lists(VIDEO_METAS, max_size=3),
    st.lists(st.sampled_from([IMAGE, VIDEO, AUDIO]), max_size=4),
)


@st.composite
def geometries(draw: st.DrawFn) -> dict[str, Any]:
    factor = draw(st.sampled_from([1, 28, 32, 7, 56]))
    low = draw(st.one_of(st.integers(0, 300_000), st.just(2**60)))
    return {
        "factor": factor,
        "min_pixels": low,
        "max_pixels": draw(st.one_of(st.integers(1, 20_000_000), st.just(2**60))),
        "temporal_patch_size": draw(st.integers(1, 4)),
        "fps": draw(st.one_of(st.none(), st.sampled_from([1, 2, 2.0, 24, 0.3]))),
        "min_frames": draw(st.one_of(st.none(), st.integers(1, 9))),
        "max_frames": draw(st.one_of(st.none(), st.integers(1, 768))),
    }


def expected_media_tokens(row: dict[str, Any], images: Any, videos: Any) -> int:
    """The documented formula in plain Python integers, one media item after the other."""
    if "_media_tokens" in row:
        return int(row["_media_tokens"])
    meta = row["mm_inputs_meta"]
    kinds = [part["type"] for part in row["conversation"][0]["content"]]
    missing = kinds.count("audio")
    missing += max(0, kinds.count("image") - len(meta["images_meta"]))
    missing += max(0, kinds.count("video") - len(meta["videos_meta"]))
    found = [expected_tokens(entry, 2, images) for entry in meta["images_meta"]]
    found += [expected_tokens(entry, 3, videos) for entry in meta["videos_meta"]]
    return 500 * missing + sum(found)


def expected_tokens(entry: Any, sizes: int, config: Any) -> int:
    if not isinstance(entry, list):
        return 0 if entry is None else int(entry.get("n_tokens", 500))
    if config is None or min(entry[:sizes]) < 1:
        return 500
    factor, patch = config["factor"], config.get("temporal_patch_size")
    bounds = config["min_pixels"], config["max_pixels"]
    try:
        if sizes == 2:
            height, width = resize_image(*entry, factor, *bounds)
            return (height // factor) * (width // factor)
        total, height, width, fps, _ = entry
        fps = fps if fps is not None and 1e-3 <= fps < math.inf else None
        sampling = VideoSampling(config["fps"], config["min_frames"], config["max_frames"], None, patch)
        frames = count_sampled_frames(VideoInfo(total, height, width, fps, None), sampling)
        height, width = resize_video(frames, height, width, patch, factor, *bounds)
        return (frames // patch) * (height // factor) * (width // factor)
    except ValueError:
        return 500


@settings(max_examples=400, deadline=None)
@given(st.lists(ROWS, max_size=6), st.one_of(st.none(), geometries()), st.one_of(st.none(), geometries()))
@with_example([sample(mm_inputs_meta={"images_meta": [[42, 70], [14, 98]], "videos_meta": []})], IMAGES, None)
def test_over_columns_the_estimate_is_the_documented_formula_on_every_row(
    rows: list[dict[str, Any]], images: dict[str, Any] | None, videos: dict[str, Any] | None
):
    media = [expected_media_tokens(row, images, videos) for row in rows]
    text = [row.get("_text_tokens", len(row["conversation"][0]["content"][-1]["text"]) // 3) for row in rows]
    found = estimate_lengths(columns_of(rows), images, videos)
    assert found.media.tolist() == media
    assert found.total.tolist() == [sum(pair) for pair in zip(text, media, strict=True)]
    alone = [estimate_sample_length(row, images, videos, return_media_tokens=True) for row in rows]
    assert alone == list(zip(found.total.tolist(), media, strict=True))


def test_numbers_that_no_column_holds_are_limited_not_an_error():
    row = sample(IMAGE, IMAGE, VIDEO, _text_tokens=10**30)
    row["mm_inputs_meta"] = {
        "images_meta": [{"n_tokens": math.nan}, {"n_tokens": 10**30}],
        "videos_meta": [[10, 64, 64, 10**400, 1.0]],
    }
    unknown_rate = estimate_video_tokens([10, 64, 64, None], VIDEOS)
    assert estimate(row, IMAGES, VIDEOS) == (2**53, 500 + 2**53 + unknown_rate, False)


@pytest.mark.parametrize("factor", [28, 32])
def test_over_columns_a_large_grid_of_sizes_is_the_same(factor: int):
    sides = np.unique(np.concatenate([np.arange(1, 130), np.arange(factor // 2, 9000, 77)]))
    height, width = (side.ravel() for side in np.meshgrid(sides, sides))
    offsets = np.arange(len(height) + 1)
    cfg = {**IMAGES, "factor": factor}
    columns = LengthColumns(np.zeros(len(height), np.int64), MediaSizes(offsets, height, width))
    sizes = zip(height.tolist(), width.tolist(), strict=True)
    expected = [expected_tokens(list(size), 2, cfg) for size in sizes]
    assert estimate_lengths(columns, cfg)[0].tolist() == expected


def test_columns_of_small_integers_and_without_optional_columns_are_taken():
    sizes = MediaSizes(np.array([0, 1, 1]), np.array([480], np.int32), np.array([640], np.uint16))
    total, media, known = estimate_lengths(LengthColumns(np.array([3, 4]), sizes, sizes), IMAGES, VIDEOS)
    assert not known.any()
    assert total.tolist() == [3 + 391 + 500, 4]  # a video without frames is unknown
    assert media.tolist() == [891, 0]


def test_columns_that_do_not_fit_each_other_are_rejected():
    with raises_config("offsets"):
        MediaSizes(np.array([0, 2]), np.array([1]), np.array([1]))
    sizes = MediaSizes(np.array([0, 1]), np.array([1]), np.array([1]))
    with pytest.raises(ConfigError, match="same number in all"):
        LengthColumns(np.zeros(2, np.int64), sizes)


def test_no_rows_have_no_lengths():
    assert [part.tolist() for part in estimate_lengths(columns_of([]))] == [[], [], []]
