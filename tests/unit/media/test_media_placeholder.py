from __future__ import annotations

import copy

import pytest
from PIL import Image

from packhorse.errors import BadSample
from packhorse.formats.example_media import FAKE_IMAGE_SIZE, fake_image, inject_fake_image


def roles(example: dict) -> list[str]:
    return [turn["role"] for turn in example["conversation"]]


def test_the_fake_image_is_a_small_white_square() -> None:
    image = fake_image()
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


def test_sound_alone_does_not_run_the_vision_tower() -> None:
    example = {"conversation": [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}]}
    injected = inject_fake_image(example)
    assert [part["type"] for part in injected["conversation"][0]["content"]] == ["image", "audio"]


def test_injecting_twice_is_injecting_once() -> None:
    once = inject_fake_image({"conversation": [{"role": "user", "content": "Hi"}]})
    assert inject_fake_image(once) is once
    assert isinstance(once["conversation"][0]["content"][0]["image"], Image.Image)


def test_an_example_in_another_format_is_rejected() -> None:
    with pytest.raises(BadSample, match="'conversation' is missing"):
        inject_fake_image({"messages": []})
