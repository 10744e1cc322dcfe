"""Rows in memory: lists and Hugging Face datasets are read like files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from packhorse.chat import IGNORE_INDEX
from packhorse.families import Encoder
from packhorse.formats.conversation import parse_conversation
from packhorse.formats.in_memory import ConvertedRows, open_examples
from packhorse.formats.row_format import RowFormat
from packhorse.ledger import Ledger
from raising import raises_bad_sample, raises_config

TURNS = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]
EXAMPLE = {
    "conversation": [
        {"role": "user", "content": [{"type": "text", "text": "Who?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Me."}]},
    ]
}


def test_rows_of_a_list_become_examples() -> None:
    ledger = Ledger()
    rows = open_examples([{"messages": TURNS}, {"prompt": "Who?", "completion": "Me."}], None, ledger)
    assert list(rows) == [EXAMPLE, EXAMPLE] == rows[:]
    assert not len(ledger)


def test_examples_are_returned_as_they_are_and_their_other_fields_reported() -> None:
    ledger, data = Ledger(), [{**EXAMPLE, "id": 3}]
    assert open_examples(data, None, ledger) is data
    assert [(drop.reason, drop.detail) for drop in ledger] == [("unused_field", "not used: id")]


def test_a_field_that_only_a_later_row_has_is_reported_once() -> None:
    scored = [{**TURNS[0], "score": 3}, TURNS[1]]
    later = [{"messages": TURNS, "grade": 1}, {"messages": scored, "grade": 2}, {"messages": scored}]
    ledger = Ledger()
    rows = open_examples([{"messages": TURNS, "grade": None}] * 8 + later, None, ledger)
    assert not len(ledger)
    assert len(list(rows)) == len(list(rows)) == 11
    assert [(drop.reason, drop.action, drop.detail) for drop in ledger] == [
        ("unused_field", "kept", "not used: grade"),
        ("unused_field", "kept", "not used: messages[].score"),
    ]


def test_a_field_that_only_a_later_example_has_is_reported() -> None:
    ledger = Ledger()
    data = [EXAMPLE] * 8 + [{**EXAMPLE, "images": [], "id": 3}]
    assert open_examples(data, None, ledger) is data
    assert [drop.detail for drop in ledger] == ["not used: id, images"]


def example_of(image: str, **fields: Any) -> dict[str, Any]:
    question, answer = EXAMPLE["conversation"]
    parts = [{"type": "image", "image": image}, *question["content"]]
    return {"conversation": [{**question, "content": parts}, answer], **fields}


@pytest.mark.parametrize(
    ("image", "options", "reason"),
    [
        ("https://host/a.png", {"weight": 2.0}, "not_allowed"),
        ("https://host/a.png", {"confine": True, "media_dir": "/data"}, "not_allowed"),
        ("/etc/a.png", {"confine": True, "media_dir": "/data"}, "outside_media_dir"),
        ("../a.png", {"confine": True, "media_dir": "/data"}, "outside_media_dir"),
    ],
)
def test_media_of_examples_obey_the_settings_that_are_given(
    image: str, options: dict[str, Any], reason: Any
) -> None:
    rows = open_examples([example_of(image)], RowFormat.of(**options), Ledger())
    with raises_bad_sample(reason, key="0"):
        rows[0]
    data = [{**EXAMPLE, "audio": {"path": image}}]
    with raises_bad_sample(reason, key="0"):
        open_examples(data, RowFormat.of(**options), Ledger())[0]
    assert open_examples([example_of(image)], RowFormat(allow_http=True), Ledger())[0] == example_of(image)


def test_examples_keep_their_own_fields_when_settings_are_given() -> None:
    clip = (np.zeros(3, np.float32), 16_000)
    data = [{**EXAMPLE, "chat_template_kwargs": {"a": 1}, "reasoning": "keep", "audio": clip, "id": 3}]
    rules = RowFormat.of(reasoning="mask", weight=2.0, chat_template_kwargs={"a": 0, "b": 2})
    ledger = Ledger()
    (example,) = open_examples(data, rules, ledger)
    ((array, rate),) = example.pop("audio")
    assert (array is clip[0], rate) == (True, clip[1])
    options = {"chat_template_kwargs": {"a": 1, "b": 2}, "reasoning": "keep", "weight": 2.0}
    assert example == {**EXAMPLE, **options}
    assert [drop.detail for drop in ledger] == ["not used: id"]


def test_names_that_are_not_usual_are_declared() -> None:
    data = [{"dialog": [{"who": "asker", "said": "Who?"}, {"who": "helper", "said": "Me."}]}]
    tags = {"role_tag": "who", "content_tag": "said", "user_tag": "asker", "assistant_tag": "helper"}
    rows = open_examples(data, RowFormat.of({"messages": "dialog"}, tags), Ledger())
    assert list(rows) == [EXAMPLE]


def test_a_row_has_the_key_of_its_dataset_in_errors_and_entries() -> None:
    class Keyed(list[dict[str, Any]]):
        def key(self, index: int) -> str:
            return f"own/{index}"

    good, bad = {"messages": TURNS}, {"messages": TURNS, "tools": "{"}
    rows = open_examples(Keyed([good, bad]), None, Ledger())
    assert isinstance(rows, ConvertedRows)
    with raises_bad_sample("wrong_format", key="own/1"):
        rows[1]


@pytest.mark.parametrize("data", [[{"text": "Hi"}], [{"label": 3}, {"label": 4}]])
def test_rows_of_no_known_format_are_one_error_with_their_fields(data: list[Any]) -> None:
    with raises_config("columns", match=f"the row has: {next(iter(data[0]))}. Expected turns in a list"):
        open_examples(data, None, Ledger())


def test_rows_that_are_no_dicts_are_rejected() -> None:
    with raises_config("data", match="row 0 of data is a str"):
        open_examples(["Hi"], None, Ledger())


def test_no_rows_are_no_error() -> None:
    assert len(open_examples([], None, Ledger())) == 0


def test_the_images_of_a_hugging_face_dataset_stay_encoded_until_they_are_used(tmp_path: Path) -> None:
    import datasets

    for name in ("a", "b"):
        Image.new("RGB", (8, 8), "red").save(tmp_path / f"{name}.png")
    bare = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Who?"}]}, TURNS[1]]
    texts = [{**turn, "content": turn["content"]} for turn in bare]
    texts[1] = {"role": "assistant", "content": [{"type": "text", "text": "Me."}]}
    columns = {"messages": [texts] * 2, "images": [[str(tmp_path / f"{name}.png")] for name in ("a", "b")]}
    data = datasets.Dataset.from_dict(columns).cast_column("images", datasets.List(datasets.Image()))
    assert isinstance(data[0]["images"][0], Image.Image)
    rows = open_examples(data, None, Ledger())
    part = rows[1]["conversation"][0]["content"][0]
    assert part["type"] == "image"
    assert part["image"] == str(tmp_path / "b.png") or isinstance(part["image"], bytes)
    assert rows[0]["conversation"][0]["content"][1] == {"type": "text", "text": "Who?"}


@pytest.mark.parametrize("kind", ["numpy", "torch", "pandas", "arrow"])
def test_a_format_of_a_hugging_face_dataset_is_for_its_columns_alone(kind: str) -> None:
    """A trainer may have set the format: the rows are those of the same dataset without it."""
    import datasets

    data = datasets.Dataset.from_list([{"messages": TURNS, "weight": 2.0, "note": "a"}] * 2)
    data.set_format(kind, columns=["messages", "weight"])
    ledger = Ledger()
    assert list(open_examples(data, None, ledger)) == [{**EXAMPLE, "weight": 2.0}] * 2
    assert not len(ledger), "the note was not among the columns"
    assert data.format["type"] == kind
    data.set_format(kind, columns=["messages", "weight"], output_all_columns=True)
    open_examples(data, None, ledger)
    assert [drop.detail for drop in ledger] == ["not used: note"]


def test_an_answer_inside_a_prompt_is_supervised_unless_its_turn_is_not_trained(qwen: Any) -> None:
    """TRL's completion_only_loss supervises the completion alone."""
    encoder = Encoder(qwen)
    asked, answered = {"role": "user", "content": "And you?"}, {"role": "assistant", "content": "You."}
    rows = [
        {"prompt": [*TURNS, asked], "completion": [answered]},
        {"prompt": [TURNS[0], {**TURNS[1], "train": False}, asked], "completion": [answered]},
    ]
    supervised = []
    for example in open_examples(rows, None, Ledger()):
        labels = encoder.labels(encoder.encode(parse_conversation(example))).tolist()
        supervised.append(qwen.tokenizer.decode([label for label in labels if label != IGNORE_INDEX]))
    assert supervised == ["Me.<|im_end|>You.<|im_end|>", "You.<|im_end|>"]


def test_nulls_of_a_hugging_face_dataset_are_fields_that_the_row_does_not_have() -> None:
    import datasets

    rows = [{"messages": TURNS, "tools": [{"name": "a", "strict": True}]}, {"messages": TURNS, "tools": []}]
    rows[1]["tools"] = [{"name": "b", "strict": None}]
    of_table = open_examples(datasets.Dataset.from_list(rows), None, Ledger())
    assert of_table[1]["tools"] == [{"type": "function", "function": {"name": "b"}}]
    of_list = open_examples(rows, None, Ledger())
    assert of_list[1]["tools"] == [{"type": "function", "function": {"name": "b", "strict": None}}]


class WithBrokenRow(list[Any]):
    """Rows of which one cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        if index == 3:
            raise OSError("broken")
        return super().__getitem__(index)


def test_a_row_that_cannot_be_read_changes_nothing_for_the_others() -> None:
    rows = open_examples(WithBrokenRow([{"messages": TURNS}] * 8), None, Ledger())
    assert rows[2] == rows[4] == EXAMPLE
    with pytest.raises(OSError, match="broken"):
        rows[3]


def test_a_dict_of_datasets_is_rejected_with_their_names() -> None:
    with raises_config("data", match="'train', 'test'"):
        open_examples({"train": [EXAMPLE], "test": [EXAMPLE]}, None, Ledger())  # type: ignore[arg-type]
