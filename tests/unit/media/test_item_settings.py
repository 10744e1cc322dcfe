"""Settings next to a media item and of its dataset, without a processor: names, values, precedence."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from packhorse.errors import BadSample, ConfigError
from packhorse.formats.convert import convert_row
from packhorse.formats.meta import read_meta, row_format
from packhorse.formats.row_format import RowFormat
from packhorse.media import load_media, media_size
from packhorse.media.settings import check_dataset_settings, size_settings, with_dataset_settings
from packhorse.types import MediaRef

IMAGE = Image.new("RGB", (40, 30))


@pytest.mark.parametrize(
    ("kind", "own", "dataset", "expected"),
    [
        ("image", {}, {"max_pixels": 9}, {"max_pixels": 9}),
        ("image", {"max_pixels": 5}, {"max_pixels": 9}, {"max_pixels": 5}),
        ("image", {"max_pixels": None}, {"max_pixels": 9}, {"max_pixels": 9}),
        ("image", {}, {"video_max_pixels": 9, "fps": 2, "total_pixels": 7}, {}),
        ("video", {}, {"max_pixels": 9, "resized_height": 1, "resized_width": 1}, {}),
        ("video", {}, {"video_max_pixels": 9, "fps": 2}, {"max_pixels": 9, "fps": 2}),
        ("video", {"video_max_pixels": 5}, {"video_max_pixels": 9}, {"video_max_pixels": 5}),
        ("audio", {}, {"max_pixels": 9, "fps": 2}, {}),
        # What excludes a setting of the dataset.
        ("image", {"max_pixels": 5}, {"min_pixels": 9}, {"max_pixels": 5}),
        ("image", {"min_pixels": 50}, {"max_pixels": 9}, {"min_pixels": 50}),
        ("image", {"max_pixels": 50}, {"min_pixels": 9}, {"max_pixels": 50, "min_pixels": 9}),
        (
            "image",
            {"resized_height": 5, "resized_width": 5},
            {"max_pixels": 9},
            {"resized_height": 5, "resized_width": 5},
        ),
        ("image", {"max_pixels": 5}, {"resized_height": 5, "resized_width": 5}, {"max_pixels": 5}),
        ("video", {"fps": 1}, {"num_frames": 8, "max_frames": 9}, {"fps": 1, "max_frames": 9}),
        ("video", {"num_frames": 4}, {"fps": 2, "max_frames": 3}, {"num_frames": 4, "fps": 2}),
        ("video", {"frame_indices": [0]}, {"fps": 2, "num_frames": 3}, {"frame_indices": [0]}),
        ("video", {"max_frames": 4}, {"min_frames": 8}, {"max_frames": 4}),
        ("image", {"max_pixels": "many"}, {"min_pixels": 9}, {"max_pixels": "many", "min_pixels": 9}),
    ],
)
def test_an_item_takes_the_settings_of_its_dataset_that_it_does_not_replace(
    kind: Any, own: dict[str, Any], dataset: dict[str, Any], expected: dict[str, Any]
) -> None:
    merged = with_dataset_settings(kind, own, dataset)
    assert {name: value for name, value in merged.items() if value is not None} == expected


def test_converted_rows_have_the_settings_in_every_spelling() -> None:
    rules = row_format({"max_pixels": 9, "video_max_pixels": 7, "fps": 2, "media_position": "first"})
    turns = [{"role": "user", "content": "<image><video>"}, {"role": "assistant", "content": "A"}]
    clip = {"path": "b.mp4", "fps": 4}
    rows: list[dict[str, Any]] = [
        {"messages": turns, "images": ["a.png"], "videos": [clip]},
        {
            "messages": turns,
            "image": {"bytes": b"x"},
            "video": {"path": "b.mp4", "fps": 4, "max_pixels": None},
        },
        {"prompt": "?", "completion": "A", "images": ["a.png"], "videos": [clip]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "a.png"}},
                        {"type": "video", "video": "b.mp4", "fps": 4},
                    ],
                },
                turns[1],
            ]
        },
    ]
    for row in rows:
        example = convert_row(row, rules, key="row/0", dataset="", record=lambda drop: None)
        image, video = example["conversation"][0]["content"][:2]
        assert image["max_pixels"] == 9
        assert (video["max_pixels"], video["fps"]) == (7, 4)
        assert "fps" not in image


def test_the_settings_of_a_dataset_survive_writing_its_entry() -> None:
    entry = {"file_name": "a.jsonl", "media_dir": "/m", "max_pixels": 9, "fps": 1.5, "weight": 2}
    (config,) = read_meta({"a": entry})
    assert config.rules.media_settings == {"max_pixels": 9, "fps": 1.5}
    assert config.entry("a.jsonl") == {**entry, "sample_ratio": 1.0}
    (again,) = read_meta({"a": config.entry("a.jsonl")})
    assert again == config
    assert "media_settings" not in RowFormat().entry()


@pytest.mark.parametrize("use", [media_size, load_media])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_pixels": "many"}, "max_pixels is 'many'"),
        ({"min_pixels": 10, "max_pixels": 5}, "min_pixels=10 is above max_pixels=5"),
        ({"resized_width": 10}, "resized_width without resized_height"),
        ({"max_pixels": float("nan")}, "max_pixels is nan"),
        ({"max_pixels": float("inf")}, "max_pixels is inf"),
        ({"max_pixels": 10**400}, "max_pixels is 10000"),
        ({"max_pixels": [1]}, r"max_pixels is \[1\]"),
    ],
)
def test_measuring_and_loading_reject_invalid_settings(use: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadSample, match=words) as raised:
        use(MediaRef("image", IMAGE, options))
    assert raised.value.reason == "wrong_format"


def test_loading_leaves_the_size_to_encoding() -> None:
    ref = MediaRef("image", IMAGE, {"max_pixels": 100.0, "caption": "many words"})
    assert media_size(ref) == (30, 40)
    assert size_settings("image", ref.options) == {"max_pixels": 100}


@pytest.mark.parametrize(
    "settings",
    [{"max_pixels": 0}, {"video_min_pixels": 5, "video_max_pixels": 2}, {"resized_width": 5}, {"fps": -1}],
)
def test_invalid_settings_of_a_dataset_name_the_setting(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        check_dataset_settings(settings)
    assert raised.value.setting in settings
