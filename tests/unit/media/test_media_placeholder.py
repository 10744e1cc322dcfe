from __future__ import annotations

import copy

import numpy as np
import pytest
from PIL import Image

from packhorse.formats.example_media import FAKE_IMAGE_SIZE, inject_fake_image
from packhorse.media import VideoInfo, load_media, placeholder_media
from raising import raises_bad_sample


def roles(example: dict) -> list[str]:
    return [turn["role"] for turn in example["conversation"]]


def test_a_placeholder_image_is_white_and_of_the_given_size() -> None:
    image = placeholder_media("image", (40, 60)).source
    assert (image.mode, image.size) == ("RGB", (60, 40))
    assert image.getcolors() == [(40 * 60, (255, 255, 255))]


def test_a_placeholder_video_keeps_frame_positions_and_times() -> None:
    info = VideoInfo(3, 40, 60, 10.0, 9.0, (0, 30, 61))
    video = load_media(placeholder_media("video", info))
    assert video.frames.shape == (3, 40, 60, 3)
    assert (video.frames == 255).all()
    assert video.metadata.frames_indices == (0, 30, 61)
    assert video.metadata.timestamps == [0.0, 3.0, 6.1]
    whole = placeholder_media("video", VideoInfo(2, 40, 60, None, None))
    assert whole.options["video_metadata"]["frames_indices"] == [0, 1]


def test_a_placeholder_audio_clip_is_silent_at_the_given_rate() -> None:
    samples, rate = load_media(placeholder_media("audio", 800, 8_000))
    assert (len(samples), samples.dtype, rate) == (800, np.float32, 8_000)
    assert not samples.any()


def test_the_fake_image_is_a_small_white_square() -> None:
    injected = inject_fake_image({"conversation": [{"role": "user", "content": "Hi"}]})
    image = injected["conversation"][0]["content"][0]["image"]
    assert FAKE_IMAGE_SIZE == 56
    assert (image.mode, image.size) == ("RGB", (56, 56))
    assert image.getcolors() == [(56 * 56, (255, 255, 255))]


def test_text_becomes_the_image_and_the_text() -> None:
    example = {"conversation": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}
    before = copy.deepcopy(example)
    injected = inject_fake_image(example)
    assert example == before
    image_part, text_part = injected["conversation"][0]["content"]
    assert image_part["type"] == "image"
    assert image_part["image"].size == (56, 56)
    assert text_part == {"type": "text", "text": "Hi"}
    assert injected["_injected_fake"] is True
    assert injected["conversation"][1] == {"role": "assistant", "content": "Yes"}


def test_parts_stay_after_the_image_and_the_first_user_turn_is_chosen() -> None:
    part = {"type": "text", "text": "Hi"}
    example = {
        "conversation": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [part], "name": "ann"},
            {"role": "assistant", "content": "Yes"},
            {"role": "user", "content": "More"},
        ],
        "_text_tokens": 9,
    }
    before = copy.deepcopy(example)
    injected = inject_fake_image(example)
    assert example == before
    assert [p["type"] for p in injected["conversation"][1]["content"]] == ["image", "text"]
    assert injected["conversation"][1]["name"] == "ann"
    assert injected["conversation"][3] == {"role": "user", "content": "More"}
    assert injected["_text_tokens"] == 9


def test_a_user_turn_is_added_after_the_system_turn_where_there_is_none() -> None:
    for before, after in [
        (["assistant"], ["user", "assistant"]),
        (["system", "assistant"], ["system", "user", "assistant"]),
        (["system", "system", "assistant"], ["system", "system", "user", "assistant"]),
        (["system"], ["system", "user"]),
        ([], ["user"]),
    ]:
        injected = inject_fake_image({"conversation": [{"role": role, "content": "x"} for role in before]})
        assert roles(injected) == after
        turn = injected["conversation"][after.index("user")]
        assert [part["type"] for part in turn["content"]] == ["image"]


@pytest.mark.parametrize(
    "part", [{"type": "image", "image": "a.png"}, {"type": "video", "video": ["1.png", "2.png"]}]
)
def test_an_example_that_shows_something_comes_back_itself(part: dict) -> None:
    example = {"conversation": [{"role": "user", "content": [part]}]}
    assert inject_fake_image(example) is example


def test_audio_alone_does_not_run_the_vision_tower() -> None:
    example = {"conversation": [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}]}
    injected = inject_fake_image(example)
    assert [part["type"] for part in injected["conversation"][0]["content"]] == ["image", "audio"]


def test_injecting_twice_is_injecting_once() -> None:
    once = inject_fake_image({"conversation": [{"role": "user", "content": "Hi"}]})
    assert inject_fake_image(once) is once
    assert isinstance(once["conversation"][0]["content"][0]["image"], Image.Image)


def test_an_example_in_another_format_is_rejected() -> None:
    with raises_bad_sample("wrong_format", match="'conversation' is missing"):
        inject_fake_image({"messages": []})
