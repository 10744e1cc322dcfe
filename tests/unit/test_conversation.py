"""The one parser of the example format."""

import copy
from typing import Any

import pytest

from packhorse.formats.conversation import (
    extra_audio,
    parse_conversation,
    place_audio,
    prepend_part,
    replace_media,
)
from packhorse.types import MediaRef, TextPart
from raising import raises_bad_sample

EXAMPLE: dict[str, Any] = {
    "conversation": [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "video", "video": "a.mp4", "fps": 2},
                {"type": "text", "text": "What is it?"},
                {"type": "image", "image": "b.jpg"},
            ],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
    ],
    "_text_tokens": 5,
}


def test_text_and_media_come_out_in_order() -> None:
    conversation = parse_conversation(EXAMPLE, "coco/1")
    assert conversation.key == "coco/1"
    assert [message.role for message in conversation.messages] == ["system", "user", "assistant"]
    assert conversation.messages[0].parts == (TextPart("Be brief."),)
    assert conversation.media == (MediaRef("video", "a.mp4", {"fps": 2}), MediaRef("image", "b.jpg", {}))
    assert conversation.messages[1].text == "What is it?"


def test_other_fields_of_a_turn_are_kept_where_they_hold_anything() -> None:
    turns = [{"role": "assistant", "content": "", "tool_calls": [1], "name": None}]
    (message,) = parse_conversation({"conversation": turns}).messages
    assert message.extras == {"tool_calls": [1]}


SPOKEN = {"conversation": [{"role": "user", "content": "Say <|audio_1|> and <|audio_2|>!"}], "audio": "a.wav"}


def test_audio_next_to_a_conversation_takes_the_place_of_its_placeholder() -> None:
    before = copy.deepcopy(SPOKEN)
    placed = place_audio(SPOKEN)
    assert before == SPOKEN
    assert "audio" not in placed
    texts = [part.get("text", part.get("audio")) for part in placed["conversation"][0]["content"]]
    assert texts == ["Say ", "a.wav", " and <|audio_2|>!"]
    both = place_audio({**SPOKEN, "audio": ["a.wav", "b.wav"]}, ["<|audio_2|>"])
    texts = [part.get("text", part.get("audio")) for part in both["conversation"][0]["content"]]
    assert texts == ["Say ", "a.wav", " and ", "b.wav", "!"]


def test_a_turn_that_is_the_placeholder_and_nothing_else_becomes_the_audio() -> None:
    turns = [{"role": "user", "content": text} for text in ("<|audio_1|>", "Write it down.")]
    placed = place_audio({"conversation": turns, "audio": "a.wav"})
    assert placed["conversation"] == [
        {"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]},
        {"role": "user", "content": "Write it down."},
    ]


def test_an_example_without_audio_next_to_it_comes_back_itself() -> None:
    for example in (EXAMPLE, {**EXAMPLE, "audio": None}, {**EXAMPLE, "audio": []}):
        assert place_audio(example) is example


def test_audio_without_a_placeholder_comes_first_in_the_first_user_turn() -> None:
    placed = place_audio({**EXAMPLE, "audio": ["a.wav", "b.wav"]})
    parts = placed["conversation"][1]["content"]
    assert [part.get("audio") for part in parts] == ["a.wav", "b.wav", None, None, None]


@pytest.mark.parametrize("audio", [["a.wav", "b.wav", "c.wav"], ["a.wav", "b.wav"]])
def test_placeholders_and_audio_clips_must_be_as_many(audio: Any) -> None:
    with raises_bad_sample("media_mismatch", key="a/1", match=f"{len(audio)} audio clips for 1 placehold"):
        place_audio({**SPOKEN, "audio": audio}, key="a/1")


def test_an_array_and_its_rate_are_one_clip() -> None:
    assert extra_audio({"audio": [[0.0, 0.1], 16_000]}) == [[[0.0, 0.1], 16_000]]
    assert extra_audio({"audio": ([0.0, 0.1], 16_000)}) == [([0.0, 0.1], 16_000)]


def test_no_turns_are_a_conversation_without_turns() -> None:
    assert parse_conversation({"conversation": []}).messages == ()


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({}, "'conversation' is missing"),
        ({"conversation": "hi"}, "is a str, expected a list"),
        ({"conversation": ["hi"]}, "turn 0 is a str"),
        ({"conversation": [{"content": "hi"}]}, "turn 0 .* without a 'role'"),
        ({"conversation": [{"role": "user"}]}, "content of turn 0 is missing"),
        ({"conversation": [{"role": "user", "content": [{"type": "smell"}]}]}, "part of type 'smell'"),
        ({"conversation": [{"role": "user", "content": ["hi"]}]}, "part of type None"),
        ({"conversation": [{"role": "user", "content": [{"type": "text"}]}]}, "text part of turn 0"),
        ({"conversation": [{"role": "user", "content": [{"type": "image"}]}]}, "no 'image' field"),
    ],
)
def test_what_is_no_conversation_is_rejected_by_turn(example: dict[str, Any], message: str) -> None:
    with raises_bad_sample("wrong_format", key="a/1", match=message):
        parse_conversation(example, "a/1")


def test_replacing_media_leaves_the_callers_example_alone() -> None:
    before = copy.deepcopy(EXAMPLE)
    after = replace_media(EXAMPLE, lambda ref: {ref.kind: f"loaded {ref.source}"})
    assert before == EXAMPLE
    assert after["conversation"][1]["content"][0] == {"type": "video", "video": "loaded a.mp4", "fps": 2}
    assert after["conversation"][0] == EXAMPLE["conversation"][0]
    assert after["_text_tokens"] == 5


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (
            {"role": "assistant", "content": None, "tool_calls": []},
            "content of turn 3 is missing, expected text",
        ),
        ({"role": "assistant"}, "content of turn 3 is missing"),
        ({"role": "assistant", "content": 7}, "content of turn 3 is a int"),
        ("Hi", "turn 3 is a str"),
        ({"role": "user", "content": [{"type": "image", "image": None}]}, "no 'image' field"),
    ],
)
def test_replacing_media_rejects_a_bad_turn_before_it_loads_the_first_media_item(
    turn: Any, message: str
) -> None:
    loaded: list[MediaRef] = []

    def load(ref: MediaRef) -> dict[str, Any]:
        loaded.append(ref)
        return {}

    for change in (
        lambda e: replace_media(e, load),
        lambda e: prepend_part(e, 0, {"type": "text", "text": "x"}),
    ):
        with raises_bad_sample("wrong_format", stage="convert", match=message):
            change({"conversation": [*EXAMPLE["conversation"], turn]})
    assert loaded == []


def test_media_in_a_tuple_of_parts_are_replaced_too() -> None:
    example = {"conversation": ({"role": "user", "content": ({"type": "image", "image": "a.png"},)},)}
    after = replace_media(example, lambda ref: {ref.kind: "loaded"})
    assert after["conversation"] == [{"role": "user", "content": [{"type": "image", "image": "loaded"}]}]


def test_a_part_is_put_in_front_of_a_text_or_of_other_parts() -> None:
    part = {"type": "image", "image": "x.png"}
    before = copy.deepcopy(EXAMPLE)
    text, parts = prepend_part(EXAMPLE, 0, part), prepend_part(EXAMPLE, 1, part)
    assert before == EXAMPLE
    assert text["conversation"][0] == {
        "role": "system",
        "content": [part, {"type": "text", "text": "Be brief."}],
    }
    assert text["conversation"][1:] == EXAMPLE["conversation"][1:]
    assert parts["conversation"][1]["content"] == [part, *EXAMPLE["conversation"][1]["content"]]
    assert parts["_text_tokens"] == 5
