"""Preference data: every spelling of a pair, or of an answer with its label, becomes the same example."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packhorse.errors import ConfigError
from packhorse.formats.conversation import parse_conversation, parse_documents, split_documents
from packhorse.formats.convert import convert_row
from packhorse.formats.in_memory import open_examples
from packhorse.formats.meta import open_meta_dataset
from packhorse.formats.row_format import RowFormat
from packhorse.ledger import Ledger
from packhorse.types import Drop
from raising import raises_bad_sample, raises_config

QUESTION = {"role": "user", "content": "What is it?"}
GOOD = {"role": "assistant", "content": "A cat."}
BAD = {"role": "assistant", "content": "A dog."}


def convert(row: dict[str, Any], record: Any = None, **options: Any) -> dict[str, Any]:
    rules = RowFormat.of(**{"task": "preference", **options})
    drops: list[Drop] = []
    example = convert_row(row, rules, key="a/0", dataset="a", record=record or drops.append)
    assert not drops
    parse_documents(example)
    return example


def turn(role: str, text: str, *media: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"role": role, "content": [*media, {"type": "text", "text": text}], **more}


def pair(*prompt: dict[str, Any], good: str = "A cat.", bad: str = "A dog.") -> dict[str, Any]:
    before = list(prompt) or [turn("user", "What is it?")]
    return {
        "conversation": [*before, turn("assistant", good)],
        "rejected": [*before, turn("assistant", bad)],
    }


def from_value(turn: dict[str, Any]) -> dict[str, Any]:
    return {"from": {"user": "human", "assistant": "gpt"}[turn["role"]], "value": turn["content"]}


PAIRS = {
    "TRL": {"prompt": "What is it?", "chosen": "A cat.", "rejected": "A dog."},
    "JSON text": {
        "messages": json.dumps([QUESTION, GOOD]),
        "rejected_messages": json.dumps([QUESTION, BAD]),
    },
    "JSON text, prompt": {
        "prompt": json.dumps([QUESTION]),
        "chosen": json.dumps([GOOD]),
        "rejected": json.dumps([BAD]),
    },
    "TRL, messages": {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
    "TRL, implicit prompt": {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
    "TRL, all columns": {
        "prompt": "What is it?",
        "messages": [QUESTION, GOOD],
        "chosen": [QUESTION, GOOD],
        "rejected": [QUESTION, BAD],
    },
    "LLaMA-Factory, sharegpt": {
        "conversations": [from_value(QUESTION)],
        "chosen": from_value(GOOD),
        "rejected": from_value(BAD),
    },
    "LLaMA-Factory, alpaca": {
        "instruction": "What is it?",
        "input": "",
        "chosen": "A cat.",
        "rejected": "A dog.",
    },
    "ms-swift": {"messages": [QUESTION, GOOD], "rejected_response": "A dog."},
    "ms-swift, messages": {"messages": [QUESTION, GOOD], "rejected_messages": [QUESTION, BAD]},
    "ms-swift, query": {"query": "What is it?", "response": "A cat.", "rejected_response": "A dog."},
    "ms-swift, a list of one": {"messages": [QUESTION, GOOD], "rejected_response": ["A dog."]},
    "ms-swift, messages in a list": {
        "messages": [QUESTION, GOOD],
        "rejected_messages": [[QUESTION, BAD]],
    },
    "dicts of lists": {
        "chosen": {"role": ["user", "assistant"], "content": ["What is it?", "A cat."]},
        "rejected": {"role": ["user", "assistant"], "content": ["What is it?", "A dog."]},
    },
    "typed parts": {
        "messages": [QUESTION],
        "chosen": [{"type": "text", "text": "A cat."}],
        "rejected": [{"type": "text", "text": "A dog."}],
    },
    "an example": pair(),
    "an example with a label of another kind": {**pair(), "label": 3},
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_is_the_same_in_every_spelling(name: str) -> None:
    assert convert(PAIRS[name]) == pair()


@pytest.mark.parametrize(
    "rejected", [["A dog.", "A cow."], [[QUESTION, BAD], [QUESTION, BAD]], {"role": [], "content": []}]
)
def test_several_rejected_answers_are_one_error_that_says_what_to_do(rejected: Any) -> None:
    row = {"messages": [QUESTION, GOOD], "rejected_response": rejected}
    with raises_bad_sample(
        "wrong_format", key="a/0", match="rejected answers, expected one: write a row for each"
    ):
        convert(row)


LABELLED = {
    "TRL": {"prompt": "What is it?", "completion": "A cat.", "label": True},
    "TRL, messages": {"prompt": [QUESTION], "completion": [GOOD], "label": True},
    "LLaMA-Factory": {"instruction": "What is it?", "output": "A cat.", "kto_tag": True},
    "ms-swift": {"messages": [QUESTION, GOOD], "label": True},
}


@pytest.mark.parametrize("name", LABELLED)
def test_a_labelled_answer_is_the_same_in_every_spelling(name: str) -> None:
    assert convert(LABELLED[name]) == {"conversation": pair()["conversation"], "label": True}


def test_media_of_a_row_belong_to_both_answers() -> None:
    image = {"type": "image", "image": "cat.png"}
    expected = pair(turn("user", "What is it?", image))
    marked = {**QUESTION, "content": "<image>What is it?"}
    bare = {**QUESTION, "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
    for row in (
        {"messages": [marked, GOOD], "rejected_response": "A dog.", "images": ["cat.png"]},
        {"prompt": [bare], "chosen": [GOOD], "rejected": [BAD], "images": [{"path": "cat.png"}]},
        {"chosen": [bare, GOOD], "rejected": [bare, BAD], "images": ["cat.png"]},
    ):
        assert convert(row) == expected


def test_only_what_follows_the_common_prompt_is_supervised() -> None:
    before = [QUESTION, GOOD, {"role": "user", "content": "Sure?"}]
    prompt = [turn("user", "What is it?"), turn("assistant", "A cat.", weight=0), turn("user", "Sure?")]
    expected = pair(*prompt, good="Yes.", bad="No.")
    answers = ({"role": "assistant", "content": text} for text in ("Yes.", "No."))
    good, bad = answers
    assert convert({"prompt": before, "chosen": [good], "rejected": [bad]}) == expected
    assert convert({"messages": [*before, good], "rejected_response": "No."}) == expected
    labelled = {"conversation": expected["conversation"], "label": False}
    assert convert({"messages": [*before, good], "label": False}) == labelled


def test_tools_and_system_prompts_belong_to_both_answers() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    row = {**PAIRS["TRL"], "system": "Be brief.", "tools": json.dumps(tools)}
    found = convert(row)
    assert found == {**pair(turn("system", "Be brief."), turn("user", "What is it?")), "tools": tools}
    assert list(split_documents(found)) == ["chosen", "rejected"]
    assert all(document.tools == tuple(tools) for document in parse_documents(found))


def test_what_is_found_in_the_prompt_is_recorded_once() -> None:
    drops: list[Drop] = []
    convert({**PAIRS["ms-swift"], "images": ["cat.png"]}, record=drops.append)
    assert [drop.reason for drop in drops] == ["surplus_media"]


@pytest.mark.parametrize(
    ("row", "reason", "match"),
    [
        ({"prompt": "a", "chosen": "b"}, "wrong_format", "without a rejected answer"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "wrong_format", "without a rejected answer"),
        ({"prompt": "a", "chosen": "b", "rejected": []}, "wrong_format", "without a rejected answer"),
        ({"prompt": "a", "rejected": "b"}, "wrong_format", "without a chosen answer"),
        ({"messages": [QUESTION], "rejected_response": "b"}, "wrong_format", "without a chosen answer"),
        ({"chosen": "a", "rejected": "b"}, "wrong_format", "no prompt"),
        ({"prompt": [QUESTION, GOOD], "chosen": "a", "rejected": "b"}, "wrong_format", "ends in an answer"),
        (
            {"chosen": [QUESTION, GOOD], "rejected": [{**QUESTION, "content": "Why?"}, BAD]},
            "wrong_format",
            "same prompt",
        ),
        (
            {"prompt": [{"role": "stranger", "content": "Hm"}], "chosen": "Yes.", "rejected": "No."},
            "wrong_format",
            "same prompt",
        ),
        ({"messages": [QUESTION, GOOD], "label": 1}, "wrong_format", "expected true or false"),
        ({"messages": [QUESTION, GOOD], "label": "good"}, "wrong_format", "expected true or false"),
        ({"messages": [QUESTION], "label": True}, "wrong_format", "without an answer"),
        ({**PAIRS["TRL"], "weight": 2}, "wrong_format", "weight has no effect"),
        (
            {"messages": [QUESTION, {**GOOD, "train": False}], "rejected_response": "b"},
            "wrong_format",
            "no effect",
        ),
        ({"chosen": [{"role": ["user"]}], "rejected": [{"role": ["user"]}]}, "wrong_format", "no prompt"),
        ({"messages": [3], "rejected_response": "b"}, "wrong_format", "without a chosen answer"),
        ({"messages": [QUESTION, GOOD]}, "no_preference", 'task="sft"'),
        ({"prompt": "a", "completion": "b"}, "no_preference", "the row has prompt, completion"),
    ],
)
def test_bad_input_is_a_bad_sample_with_key_and_reason(row: dict[str, Any], reason: Any, match: str) -> None:
    with raises_bad_sample(reason, key="a/0", stage="convert", match=match):
        convert(row, record=[].append)


@pytest.mark.parametrize("row", [*PAIRS.values(), *LABELLED.values()])
def test_the_default_task_rejects_preference_data_with_the_line_to_write(row: dict[str, Any]) -> None:
    with raises_bad_sample("preference_data", key="a/0", match=r'packhorse\.load\(…, task="preference"\)'):
        convert(row, task="sft")


@pytest.mark.parametrize("example", [pair(), {"conversation": pair()["conversation"], "label": True}])
def test_an_example_with_a_preference_is_no_plain_conversation(example: dict[str, Any]) -> None:
    with raises_bad_sample("preference_data", key="a/0"):
        parse_conversation(example, "a/0")


@pytest.mark.parametrize("label", [0, 1, True, "bad"])
def test_a_kto_tag_of_any_type_is_no_plain_answer(label: Any) -> None:
    with raises_bad_sample("preference_data", key="a/0"):
        convert({"messages": [QUESTION, GOOD], "kto_tag": label}, task="sft")
    with raises_bad_sample("preference_data", key="a/0"):
        convert({"messages": [QUESTION, GOOD], "good": label}, task="sft", columns={"label": "good"})


def test_a_prompt_that_its_whole_conversations_contradict_is_reported() -> None:
    drops: list[Drop] = []
    row = {"prompt": "Who?", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}
    assert convert(row, drops.append) == pair()
    assert [(drop.reason, drop.action) for drop in drops] == [("unused_field", "kept")]


def test_rows_in_memory_with_a_preference_need_the_task() -> None:
    with raises_config("task", match="preference data"):
        open_examples([pair()], None, Ledger())
    with raises_config("task", match="expected a chosen and a rejected answer"):
        open_examples([{"messages": [QUESTION, GOOD]}], RowFormat(task="preference"), Ledger())


def test_fields_that_are_read_are_not_reported_as_unused() -> None:
    ledger = Ledger()
    open_examples([{**PAIRS["TRL"], "score": 3}], RowFormat(task="preference"), ledger)
    assert [drop.detail for drop in ledger] == ["not used: score"]


def test_a_dataset_of_llama_factory_with_ranking_is_read_for_the_task(tmp_path: Path) -> None:
    columns = {"messages": "conversations", "chosen": "better", "rejected": "worse"}
    entry = {"file_name": "rows.json", "formatting": "sharegpt", "ranking": True, "columns": columns}
    row = {"conversations": [from_value(QUESTION)], "better": from_value(GOOD), "worse": from_value(BAD)}
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"ranked": entry}))
    info = str(tmp_path / "dataset_info.json")
    assert list(open_meta_dataset(info)) == list(open_meta_dataset(info, task="preference")) == [pair()]
    with pytest.raises(ConfigError, match=r'task="preference".*--task preference'):
        open_meta_dataset(info, task="sft")


def test_a_meta_file_may_say_what_its_rows_are_for(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(PAIRS["TRL"]) + "\n")
    meta = {"pairs": {"file_name": str(tmp_path / "rows.jsonl"), "task": "preference"}}
    assert list(open_meta_dataset(meta)) == [pair()]
    with raises_config("task", "dpo"):
        open_meta_dataset({"pairs": {**meta["pairs"], "task": "dpo"}})
