"""ShareGPT rows: placeholders take media in order, and inconsistent rows are recorded or raised."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import packhorse.datasets as datasets
from packhorse.ledger import Ledger, default_ledger
from raising import raises_bad_sample, raises_config

convert = datasets._convert_sharegpt_to_conversation


def row(user: str, **media: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": " An answer. "}]
    return {"messages": turns, **media}


def user_parts(example: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    return convert(example, **options)["conversation"][0]["content"]


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_the_public_spelling_is_the_same_function() -> None:
    assert datasets.convert_sharegpt_to_conversation is convert


def test_each_placeholder_takes_the_next_media_item_of_its_kind() -> None:
    example = row(
        "Look <image> and <VIDEO>\n<Image>\n compare.", images=["a.jpg", "/abs/b.jpg"], videos=["v.mp4"]
    )
    before = copy.deepcopy(example)
    assert convert(example, media_dir="/data") == {
        "conversation": [
            {
                "role": "user",
                "content": [
                    text("Look"),
                    {"type": "image", "image": "/data/a.jpg"},
                    text("and"),
                    {"type": "video", "video": "/data/v.mp4"},
                    {"type": "image", "image": "/abs/b.jpg"},
                    text("compare."),
                ],
            },
            {"role": "assistant", "content": [text(" An answer. ")]},
        ]
    }
    assert example == before, "the caller's row is never changed"


def test_placeholders_outside_user_turns_are_text() -> None:
    turns = [
        {"role": "system", "content": "<image> means an image"},
        {"role": "user", "content": "<image>?"},
        {"role": "assistant", "content": "No <image>."},
    ]
    conversation = convert({"messages": turns, "images": ["a.jpg"]})["conversation"]
    assert conversation[0]["content"] == [text("<image> means an image")]
    assert conversation[2]["content"] == [text("No <image>.")]


def test_own_names_for_columns_and_tags() -> None:
    example = {
        "conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "x"}],
        "image": "a.jpg",
    }
    tags = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
    result = convert(example, {"messages": "conversations", "images": "image"}, tags, "/d")
    assert [turn["role"] for turn in result["conversation"]] == ["user", "assistant"]
    assert result["conversation"][0]["content"] == [{"type": "image", "image": "/d/a.jpg"}]


def test_entries_with_extras_pass_them_on_and_resolve_the_path() -> None:
    entry = {"path": "v.mp4", "fps": 2, "frame_indices": [0, 4]}
    assert user_parts(row("<video>", videos=[entry]), media_dir="/d") == [
        {"type": "video", "video": "/d/v.mp4", "fps": 2, "frame_indices": [0, 4]}
    ]


def test_frame_lists_bytes_and_images_are_media_too() -> None:
    image = Image.new("RGB", (2, 2))
    example = row(
        "<video><image><image><image>",
        videos=[["f1.jpg", "/f2.jpg"]],
        images=[image, {"bytes": b"png", "path": "x.png"}, "s3://bucket/c.jpg"],
    )
    assert [part[part["type"]] for part in user_parts(example, media_dir="/d")] == [
        ["/d/f1.jpg", "/f2.jpg"],
        image,
        b"png",
        "s3://bucket/c.jpg",
    ]


def test_audio_placeholders_need_an_audio_column() -> None:
    assert user_parts(row("<audio>hm", audios=["a.wav"]))[0] == {"type": "audio", "audio": "a.wav"}
    assert user_parts(row("<audio>hm")) == [text("<audio>hm")]


def test_null_and_empty_entries_are_no_media() -> None:
    ledger = Ledger()
    for nothing in (None, "", [None], [""], []):
        convert(row("x", images=nothing), ledger=ledger)
    assert len(ledger) == 0


def test_an_empty_entry_keeps_its_place_and_is_recorded() -> None:
    ledger = Ledger()
    parts = user_parts(row("first <image> second <image>", images=[None, "b.jpg"]), ledger=ledger)
    assert parts == [text("first"), text("second"), {"type": "image", "image": "b.jpg"}]
    assert [(drop.reason, drop.action) for drop in ledger] == [("missing_media", "cut")]


def test_extras_of_an_entry_cannot_replace_the_part_itself() -> None:
    entry = {"path": "ok.jpg", "image": "/etc/passwd", "type": "image/jpeg", "detail": "high"}
    assert user_parts(row("<image>", images=[entry]), media_dir="/d") == [
        {"type": "image", "image": "/d/ok.jpg", "detail": "high"}
    ]


@pytest.mark.parametrize(
    "extra",
    [
        {"_text_tokens": "7"},
        {"mm_inputs_meta": [[1, 2]]},
        {"mm_inputs_meta": {"images_meta": [{"n_tokens": None}]}},
        {"messages": [{"role": "user", "content": [{"type": "figure", "figure": "x"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
    ],
)
def test_fields_that_are_not_what_they_should_be_are_rejected_by_row(extra: dict[str, Any]) -> None:
    with raises_bad_sample("wrong_format", key="set/5"):
        convert(row("x") | extra, key="set/5")


def test_a_user_turn_with_nothing_left_is_one_empty_text() -> None:
    assert user_parts(row("   ")) == [text("")]


def test_white_space_around_the_text_of_users_is_removed_as_in_the_reference() -> None:
    assert user_parts(row("  What?\n")) == [text("What?")]
    assert user_parts(row("  Look <image>\n", images=["a.jpg"]))[0] == text("Look")


def test_precomputed_fields_pass_through_and_others_do_not() -> None:
    result = convert(row("x") | {"_text_tokens": 7, "mm_inputs_meta": {"images_meta": []}, "id": 5})
    assert set(result) == {"conversation", "_text_tokens", "mm_inputs_meta"}


def test_content_that_is_already_split_into_parts_is_kept() -> None:
    parts = [{"type": "image", "image": "a.jpg"}, text("hm <image>")]
    assert user_parts({"messages": [{"role": "user", "content": parts}]}, media_dir="/d") == [
        {"type": "image", "image": "/d/a.jpg"},
        text("hm <image>"),
    ]


@pytest.mark.parametrize(
    ("example", "reason", "action"),
    [
        (row("<image><image>x", images=["a.jpg"]), "surplus_placeholder", "cut"),
        (row("<video>"), "surplus_placeholder", "cut"),
        (row("x", images=["a.jpg"]), "surplus_media", "cut"),
        (row("<image>", images=["a.jpg"], videos=["v.mp4"]), "surplus_media", "cut"),
        ({"messages": [{"role": "critic", "content": "x"}, *row("x")["messages"]]}, "unknown_role", "cut"),
        ({"messages": []}, "empty_conversation", "kept"),
        ({"messages": None}, "empty_conversation", "kept"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no_assistant_turn", "kept"),
    ],
)
def test_an_inconsistent_row_is_recorded_or_raised(example: dict[str, Any], reason: str, action: str) -> None:
    ledger = Ledger()
    convert(example, key="set/3", ledger=ledger)
    (drop,) = ledger
    assert (drop.key, drop.stage, drop.reason, drop.action) == ("set/3", "convert", reason, action)
    assert drop.detail
    with raises_bad_sample(reason, key="set/3"):
        convert(example, key="set/3", strict=True)


def test_without_a_ledger_findings_go_to_the_processes_own() -> None:
    convert(row("x", images=["a.jpg"]), key="own/0")
    assert "own/0" in {drop.key for drop in default_ledger()}


def test_the_rest_of_an_inconsistent_row_is_delivered() -> None:
    assert user_parts(row("<image>a<image>b", images=["1.jpg"]), ledger=Ledger()) == [
        {"type": "image", "image": "1.jpg"},
        text("a"),
        text("b"),
    ]


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"conversations": []}, "no 'messages' column; the row has: conversations"),
        ({"messages": "hi"}, "'messages' is a str"),
        (
            {"messages": [{"from": "human", "value": "x"}]},
            "turn 0 has no 'role'; it is a dict with from, value",
        ),
        ({"messages": ["hi"]}, "turn 0 has no 'role'; it is a str"),
        ({"messages": [{"role": "assistant", "content": None}]}, "content of turn 0 is null"),
        (row("<image>", images=[{"uri": "x"}]), "neither 'path' nor 'bytes'"),
    ],
)
def test_a_row_of_another_format_says_what_it_has(example: dict[str, Any], message: str) -> None:
    with raises_bad_sample("wrong_format", match=message):
        convert(example)


@pytest.mark.parametrize(
    ("options", "setting", "value", "remedy"),
    [
        ({"columns": {"message": "x"}}, "columns", ["message"], r"message \(did you mean 'messages'\?\)"),
        ({"tags": {"role": "from"}}, "tags", ["role"], r"role \(did you mean 'role_tag'\?\)"),
        ({"tags": {"role_tag": 3}}, "role_tag", 3, "expected a string"),
        ({"confine": True}, "confine", True, "needs a media_dir"),
    ],
)
def test_a_wrong_format_description_is_the_callers_error(
    options: dict[str, Any], setting: str, value: Any, remedy: str
) -> None:
    with raises_config(setting, value, match=remedy):
        convert(row("x"), **options)


def test_media_outside_the_folder_are_rejected_when_asked(tmp_path: Path) -> None:
    inside = tmp_path / "media"
    inside.mkdir()
    (tmp_path / "secret.jpg").touch()
    os.symlink(tmp_path / "secret.jpg", inside / "link.jpg")
    ready = {"messages": [{"role": "user", "content": [{"type": "image", "image": {"path": "../x.jpg"}}]}]}
    with raises_bad_sample("outside_media_dir", key="set/1"):
        convert(ready, media_dir=str(inside), confine=True, key="set/1")
    frames = row("<video>", videos=[[{"path": "/etc/passwd"}]])
    with raises_bad_sample("outside_media_dir", key="set/1"):
        convert(frames, media_dir=str(inside), confine=True, key="set/1")
    for path in ("../secret.jpg", "link.jpg", tmp_path / "secret.jpg", "/etc/passwd", "s3://b/x.jpg"):
        example = row("<image>", images=[path])
        with raises_bad_sample("outside_media_dir", key="set/1"):
            convert(example, media_dir=str(inside), confine=True, key="set/1")
        convert(example, media_dir=str(inside))  # not asked
    assert user_parts(row("<image>", images=["a/../b.jpg"]), media_dir=str(inside), confine=True)
