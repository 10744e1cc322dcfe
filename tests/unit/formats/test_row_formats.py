"""Spellings of a conversation: every one of them becomes the same example."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from packhorse.errors import BadSample
from packhorse.formats.conversation import parse_conversation, parse_documents
from packhorse.formats.convert import convert_row
from packhorse.formats.found_format import FoundFormat, find_format
from packhorse.formats.row_format import RowFormat, row_layout
from packhorse.ledger import Ledger
from packhorse.rows.row_files import TableRow, open_rows
from raising import raises_bad_sample, raises_config


def convert(row: dict[str, Any], **options: Any) -> dict[str, Any]:
    ledger = Ledger()
    example = convert_row(row, RowFormat.of(**options), key="a/0", dataset="a", record=ledger.record)
    assert not len(ledger)
    parse_conversation(example)
    return example


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


QUESTION, ANSWER = "What is it?", "A cat."
PLAIN = [
    {"role": "user", "content": [text(QUESTION)]},
    {"role": "assistant", "content": [text(ANSWER)]},
]
OF_IMAGE = [{"role": "user", "content": [{"type": "image", "image": "cat.png"}, text(QUESTION)]}, PLAIN[1]]


def turns(question: Any = QUESTION, answer: Any = ANSWER) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def from_value(question: Any = QUESTION, user: str = "human", assistant: str = "gpt") -> list[dict[str, Any]]:
    return [{"from": user, "value": question}, {"from": assistant, "value": ANSWER}]


SPELLINGS_OF_TEXT = {
    "messages": {"messages": turns()},
    "conversations": {"conversations": from_value()},
    "conversation": {"conversation": turns()},
    "messages as JSON text": {"messages": json.dumps(turns())},
    "mixed names": {
        "messages": [{"role": "user", "value": QUESTION}, {"from": "assistant", "content": ANSWER}]
    },
    "prompt and completion": {"prompt": QUESTION, "completion": ANSWER},
    "lists of messages": {"prompt": turns()[:1], "completion": turns()[1:]},
    "Alpaca": {"instruction": QUESTION, "input": "", "output": ANSWER},
    "Alpaca in two columns": {"instruction": "What", "input": "is it?", "output": ANSWER},
    "ms-swift": {"query": QUESTION, "response": ANSWER, "history": []},
    "question and answer": {"question": QUESTION, "answer": ANSWER},
    "typed parts": {"messages": turns([text(QUESTION)], [text(ANSWER)])},
    "typed parts with value": {"messages": turns([{"type": "text", "value": QUESTION}])},
    "dict of lists": {"messages": {"role": ["user", "assistant"], "content": [QUESTION, ANSWER]}},
    "dict of lists, from": {"conversations": {"from": ["human", "gpt"], "value": [QUESTION, ANSWER]}},
    "dicts of lists": {
        "prompt": {"role": ["user"], "content": [QUESTION]},
        "completion": {"role": ["assistant"], "content": [ANSWER]},
    },
    "empty columns of a table": {"messages": turns(), "images": None, "prompt": None, "system": None},
}


@pytest.mark.parametrize("name", SPELLINGS_OF_TEXT)
def test_a_text_conversation_is_the_same_in_every_spelling(name: str) -> None:
    expected = PLAIN
    if name == "Alpaca in two columns":
        expected = [{"role": "user", "content": [text("What\nis it?")]}, PLAIN[1]]
    assert convert(SPELLINGS_OF_TEXT[name]) == {"conversation": expected}


MARKED = f"<image>{QUESTION}"
SPELLINGS_OF_AN_IMAGE = {
    "images": {"messages": turns(MARKED), "images": ["cat.png"]},
    "image": {"messages": turns(MARKED), "image": "cat.png"},
    "dict with path": {"messages": turns(MARKED), "images": [{"path": "cat.png", "bytes": None}]},
    "LLaVA": {"conversations": from_value(f"<image>\n{QUESTION}"), "image": "cat.png"},
    "TRL": {"messages": turns([{"type": "image"}, text(QUESTION)], [text(ANSWER)]), "images": ["cat.png"]},
    "TRL in a table": {
        "messages": turns([{"type": "image", "text": None}, {"type": "text", "text": QUESTION}]),
        "images": ["cat.png"],
    },
    "TRL prompt": {
        "prompt": turns([{"type": "image"}, text(QUESTION)])[:1],
        "completion": turns()[1:],
        "images": ["cat.png"],
    },
    "part with image": {"messages": turns([{"type": "image", "image": "cat.png"}, text(QUESTION)])},
    "part with path": {"messages": turns([{"type": "image", "path": "cat.png"}, text(QUESTION)])},
    "part with url": {"messages": turns([{"type": "image", "url": "cat.png"}, text(QUESTION)])},
    "part without type": {"messages": turns([{"image": "cat.png"}, {"text": QUESTION}])},
    "image_url": {
        "messages": turns([{"type": "image_url", "image_url": {"url": "cat.png"}}, text(QUESTION)])
    },
    "image_url as text": {"messages": turns([{"type": "image_url", "image_url": "cat.png"}, text(QUESTION)])},
    "Alpaca with images": {"instruction": MARKED, "output": ANSWER, "images": ["cat.png"]},
    "ms-swift with images": {"query": MARKED, "response": ANSWER, "images": ["cat.png"]},
}


@pytest.mark.parametrize("name", SPELLINGS_OF_AN_IMAGE)
def test_a_conversation_about_an_image_is_the_same_in_every_spelling(name: str) -> None:
    assert convert(SPELLINGS_OF_AN_IMAGE[name]) == {"conversation": OF_IMAGE}


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4), "red").save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "base64": base64.b64encode(png()).decode()},
        {"type": "image", "image": f"data:image/png;base64,{base64.b64encode(png()).decode()}"},
        {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png()).decode()}"},
        },
        {"type": "image", "bytes": png()},
    ],
)
def test_encoded_images_of_parts_become_bytes(part: dict[str, Any]) -> None:
    (found, _) = convert({"messages": turns([part, text(QUESTION)])})["conversation"][0]["content"]
    assert found == {"type": "image", "image": png()}


@pytest.mark.parametrize("written", ["  indented:\n    x = 1\n", "   ", "", "a < b\n", " <audio> "])
def test_text_of_users_is_as_the_row_states_it(written: str) -> None:
    for row in ({"messages": turns(written)}, {"prompt": written, "completion": ANSWER}):
        assert convert(row)["conversation"][0]["content"] == [text(written)]


@pytest.mark.parametrize("role", ["user", "tool"])
def test_white_space_is_removed_next_to_markers_only(role: str) -> None:
    row = {
        "messages": [{"role": role, "content": "  Look \n<image> \n and <image>\n  x = 1\n"}, turns()[1]],
        "images": ["1.png", "2.png"],
    }
    assert convert(row)["conversation"][0]["content"] == [
        text("  Look"),
        {"type": "image", "image": "1.png"},
        text("and"),
        {"type": "image", "image": "2.png"},
        text("x = 1\n"),
    ]


def test_history_and_a_system_column_come_before_the_question() -> None:
    row = {"query": QUESTION, "response": ANSWER, "history": [["Hi", "Hello"]], "system": "Be brief."}
    example = convert(row)["conversation"]
    assert [turn["role"] for turn in example] == ["system", "user", "assistant", "user", "assistant"]
    assert example[0]["content"] == [text("Be brief.")]
    assert example[1]["content"] == [text("Hi")]


@pytest.mark.parametrize(
    "history",
    [
        [["Hi", "Hello"]],
        turns("Hi", "Hello"),
        [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
        {"role": ["user", "assistant"], "content": ["Hi", "Hello"]},
        [{"user": "Hi", "assistant": "Hello"}],
        [{"human": "Hi", "gpt": "Hello"}],
        [{"query": "Hi", "response": "Hello"}],
        [{"assistant": "Hello", "user": "Hi"}],
    ],
)
def test_a_history_is_the_same_in_every_spelling(history: Any) -> None:
    row = {"query": QUESTION, "response": ANSWER, "history": history}
    expected = convert({"messages": [*turns("Hi", "Hello"), *turns()]})
    assert convert(row) == expected


def test_a_field_of_a_history_that_nothing_reads_is_found() -> None:
    entry = {"user": "Hi", "assistant": "Hello", "score": 3}
    row = {"query": QUESTION, "response": ANSWER, "history": [entry]}
    assert find_format([row], RowFormat()).unused == {"history[].score"}
    converted: set[str] = set()
    convert_row(row, RowFormat(), key="a/0", dataset="a", record=Ledger().record, unused=converted)
    assert converted == {"history[].score"}


def test_roles_that_are_declared_hold_for_prompts_and_histories() -> None:
    row = {"query": QUESTION, "response": ANSWER, "history": [["Hi", "Hello"]]}
    assert convert(row, tags={"role_tag": "who", "user_tag": "asker"}) == convert(row)


def test_a_list_of_images_for_each_turn_is_read_in_order() -> None:
    messages = [*turns("<image><image>Compare."), *turns(MARKED)]
    flat = convert({"messages": messages, "images": ["1.png", "2.png", "3.png"]})
    assert convert({"messages": messages, "images": [["1.png", "2.png"], ["3.png"]]}) == flat
    assert convert({"messages": messages, "images": [["1.png", "2.png"], [], [{"path": "3.png"}]]}) == flat
    with raises_bad_sample("wrong_format", key="a/0", match="images has a list for each turn"):
        convert({"messages": messages, "images": [["1.png"], ["2.png"]]}, media_position="first")


def test_the_system_prompt_of_a_dataset_is_for_rows_without_one() -> None:
    system = {"role": "system", "content": "Mine."}
    assert convert({"messages": turns()}, system="Be brief.")["conversation"][0]["content"] == [
        text("Be brief.")
    ]
    own = convert({"messages": [system, *turns()]}, system="Be brief.")["conversation"]
    assert [turn["role"] for turn in own] == ["system", "user", "assistant"]
    assert own[0]["content"] == [text("Mine.")]


TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "cat"}}}
TOOL_EXAMPLE = {
    "conversation": [
        {"role": "user", "content": [text(QUESTION)]},
        {"role": "assistant", "content": [text("")], "tool_calls": [CALL]},
        {"role": "tool", "content": [text("fur")]},
        {"role": "assistant", "content": [text(ANSWER)]},
    ],
    "tools": [{"type": "function", "function": TOOL}],
}
CALL_TEXT = json.dumps({"name": "look", "arguments": {"at": "cat"}})
OPENAI_CALL = {"type": "function", "function": {"name": "look", "arguments": json.dumps({"at": "cat"})}}


@pytest.mark.parametrize(
    "row",
    [
        {
            "messages": [
                turns()[0],
                {"role": "assistant", "content": None, "tool_calls": [OPENAI_CALL]},
                {"role": "tool", "content": "fur"},
                turns()[1],
            ],
            "tools": [{"type": "function", "function": TOOL}],
        },
        {
            "messages": [
                turns()[0],
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": "fur"},
                turns()[1],
            ],
            "tools": json.dumps([TOOL]),
        },
        {
            "conversations": [
                {"from": "human", "value": QUESTION},
                {"from": "function_call", "value": CALL_TEXT},
                {"from": "observation", "value": "fur"},
                {"from": "gpt", "value": ANSWER},
            ],
            "tools": json.dumps([TOOL]),
        },
        {
            "messages": [
                {"role": "user", "content": QUESTION},
                {"role": "tool_call", "content": CALL_TEXT},
                {"role": "tool_response", "content": "fur"},
                {"role": "assistant", "content": ANSWER},
            ],
            "tools": [TOOL],
        },
    ],
    ids=["OpenAI", "tools as JSON text", "ShareGPT", "ms-swift"],
)
def test_tool_calls_are_the_same_in_every_spelling(row: dict[str, Any]) -> None:
    assert convert(row) == TOOL_EXAMPLE


NULLABLE = {
    "name": "look",
    "parameters": {"properties": {"at": {"type": ["string", "null"], "default": None}}},
}
NULL_CALL = {"name": "look", "arguments": {"at": None, "of": [{"a": None}]}}


def rows_with_nulls() -> list[dict[str, Any]]:
    as_text = {"name": "look", "arguments": json.dumps(NULL_CALL["arguments"])}
    calls = [
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": NULL_CALL}]},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": as_text}]},
        {"role": "function_call", "content": json.dumps(NULL_CALL)},
        {"role": "function_call", "content": NULL_CALL},
    ]
    tools = [[NULLABLE], json.dumps([NULLABLE]), NULLABLE, json.dumps(NULLABLE)]
    return [
        {"messages": [turns()[0], one, {"role": "tool", "content": "fur"}], "tools": functions}
        for one, functions in zip(calls, tools, strict=True)
    ]


@pytest.mark.parametrize("row", rows_with_nulls())
def test_nulls_that_tools_and_arguments_state_reach_the_template(row: dict[str, Any]) -> None:
    ledger = Ledger()
    example = convert_row(row, RowFormat(), key="a/0", dataset="a", record=ledger.record)
    assert example["tools"] == [{"type": "function", "function": NULLABLE}]
    assert example["conversation"][1]["tool_calls"] == [{"type": "function", "function": NULL_CALL}]


def test_nulls_of_a_table_are_fields_that_the_row_does_not_have(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"messages": [turns()[0], {"role": "assistant", "tool_calls": [call], "content": ""}], "tools": tools}
        for call, tools in (
            ({"function": {"name": "look", "arguments": {"at": "cat"}}}, [{"name": "look", "strict": True}]),
            ({"function": {"name": "see", "arguments": {"of": [{"a": 1}, {"b": 2}]}}}, [{"name": "see"}]),
        )
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    read = open_rows(str(tmp_path / "rows.parquet"))
    assert read[1]["tools"] == [{"name": "see", "strict": None}]
    for row, stored in zip(rows, read.read(range(2)), strict=True):
        assert isinstance(stored, dict)
        assert convert(stored) == convert(row)


def test_nulls_in_json_text_of_a_table_are_stated() -> None:
    _, row, *_ = rows_with_nulls()
    of_table, of_file = (
        convert_row(one, RowFormat(), key="a/0", dataset="a", record=Ledger().record)
        for one in (TableRow(row), row)
    )
    assert of_table == of_file


@pytest.mark.parametrize(("user", "assistant"), [("User", "Assistant"), ("HUMAN", "GPT"), ("Human", "bot")])
def test_roles_may_differ_in_case(user: str, assistant: str) -> None:
    expected = {"conversation": PLAIN}
    assert convert({"conversations": from_value(QUESTION, user, assistant)}) == expected
    pair = {
        "prompt": [{"role": user, "content": QUESTION}],
        "chosen": [{"role": assistant, "content": ANSWER}],
        "rejected": [{"role": assistant, "content": "A dog."}],
    }
    rules = RowFormat(task="preference")
    example = convert_row(pair, rules, key="a/0", dataset="a", record=Ledger().record)
    assert example["conversation"] == PLAIN


def test_a_declared_role_is_unknown_in_a_case_that_fits_two() -> None:
    tags = {"user_tag": "A", "assistant_tag": "a"}
    assert convert({"conversations": from_value(QUESTION, "A", "a")}, tags=tags) == {"conversation": PLAIN}
    row = {"conversations": [*from_value(QUESTION, "A", "a"), {"from": "User", "value": "?"}]}
    ledger = Ledger()
    convert_row(row, RowFormat.of(tags=tags), key="a/0", dataset="a", record=ledger.record)
    (drop,) = ledger
    assert (drop.reason, drop.action) == ("unknown_role", "cut")
    assert drop.detail.startswith("turn 2 has role 'User', expected system, ")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": turns(), "tools": [TOOL]},
        {"messages": [turns()[0], {"role": "tool", "content": "fur"}, turns()[1]]},
        {"messages": [turns()[0], {"role": "function_call", "content": CALL_TEXT}, turns()[1]]},
        {"messages": [turns()[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
    ],
)
def test_a_row_with_tools_and_an_unknown_role_is_rejected_as_a_whole(row: dict[str, Any]) -> None:
    odd = {**row, "messages": [*row["messages"], {"role": "critic", "content": "Good."}]}
    number = len(row["messages"])
    with raises_bad_sample(
        "unknown_role", key="a/0", match=f"turn {number} has role 'critic', expected user, "
    ):
        convert(odd)


def test_consecutive_calls_are_one_turn_with_several_calls() -> None:
    calls = [{"from": "function_call", "value": CALL_TEXT}] * 2
    row = {"conversations": [*from_value()[:1], *calls, {"from": "observation", "value": "fur"}]}
    assert convert(row)["conversation"][1]["tool_calls"] == [CALL, CALL]


def test_media_in_tool_results_take_the_next_entries() -> None:
    row = {
        "messages": [turns()[0], {"role": "tool", "content": "<image>found"}, turns()[1]],
        "images": ["cat.png"],
    }
    assert convert(row)["conversation"][1]["content"] == [
        {"type": "image", "image": "cat.png"},
        text("found"),
    ]


def test_media_that_no_text_mentions_come_first_if_the_dataset_says_so() -> None:
    row = {"messages": turns(), "images": ["cat.png"]}
    assert convert(row, media_position="first") == {"conversation": OF_IMAGE}
    ledger = Ledger()
    convert_row(row, RowFormat(), key="a/0", dataset="a", record=ledger.record)
    assert [drop.reason for drop in ledger] == ["surplus_media"]


def test_weights_of_rows_datasets_and_turns_are_kept() -> None:
    row = {"messages": [{**turns()[0]}, {**turns()[1], "loss": False}], "weight": 0.5}
    conversation = parse_conversation(convert(row, weight=4.0))
    assert conversation.weight == 2
    assert [message.weight for message in conversation.messages] == [1, 0]


@pytest.mark.parametrize(("policy", "left"), [("keep", "<think>Hm.</think>\n\nA cat."), ("drop", "A cat.")])
def test_reasoning_is_kept_or_removed(policy: str, left: str) -> None:
    row = {"messages": turns(answer="<think>Hm.</think>\n\nA cat.")}
    answer = convert(row, reasoning=policy)["conversation"][1]
    assert answer["content"] == [text(left)]
    with_field = {"messages": [turns()[0], {**turns()[1], "reasoning_content": "Hm."}]}
    assert ("reasoning_content" in convert(with_field, reasoning=policy)["conversation"][1]) == (
        policy == "keep"
    )


def test_what_nothing_reads_is_listed() -> None:
    row = {"messages": turns(), "id": 7, "source": "web", "images": None}
    assert row_layout(row, RowFormat()).unused == ("id", "source")
    assert row_layout(
        {"prompt": "a", "completion": "b", "messages": None, "score": 1}, RowFormat()
    ).unused == ("score",)


@pytest.mark.parametrize("name", [*SPELLINGS_OF_TEXT, *SPELLINGS_OF_AN_IMAGE])
def test_an_unknown_field_is_found_in_every_spelling(name: str) -> None:
    row = {**SPELLINGS_OF_TEXT, **SPELLINGS_OF_AN_IMAGE}[name]
    found = find_format([row, {**row, "odd": 1}], RowFormat())
    assert found.unused == {"odd"}
    assert found.as_dict()["unused"] == ["odd"]


@pytest.mark.parametrize(
    ("row", "unused"),
    [
        ({"messages": [{**turns()[0], "score": 3}, turns()[1]]}, "messages[].score"),
        ({"conversations": [{**from_value()[0], "score": 3}]}, "messages[].score"),
        ({"messages": json.dumps([{**turns()[0], "score": 3}])}, "messages[].score"),
        ({"prompt": [{**turns()[0], "score": 3}], "completion": ANSWER}, "messages[].score"),
        ({"messages": turns([{**text(QUESTION), "score": 3}])}, "messages[].content[].score"),
        (
            {"messages": turns([{"type": "image", "image": "cat.png", "score": 3}])},
            "messages[].content[].score",
        ),
        (
            {"messages": turns([{"type": "image_url", "image_url": {"url": "cat.png", "detail": "low"}}])},
            "messages[].content[].detail",
        ),
        ({"messages": turns(MARKED), "images": [{"path": "cat.png", "score": 3}]}, "images[].score"),
        (
            {"messages": turns([{"type": "image"}]), "images": [{"path": "cat.png", "score": 3}]},
            "images[].score",
        ),
        ({"messages": turns(MARKED), "image": {"path": "cat.png", "score": 3}}, "images[].score"),
        (
            {"messages": {"role": ["user"], "content": [QUESTION], "score": [3]}},
            "messages[].score",
        ),
    ],
    ids=[
        *("turn", "LLaVA", "JSON text", "prompt", "text part", "image part", "image_url", "column", "TRL"),
        *("one image", "dict of lists"),
    ],
)
def test_a_field_of_a_turn_or_part_that_nothing_reads_is_found(row: dict[str, Any], unused: str) -> None:
    assert find_format([row], RowFormat()).unused == {unused}
    converted: set[str] = set()
    convert_row(row, RowFormat(), key="a/0", dataset="a", record=Ledger().record, unused=converted)
    assert converted == {unused}


def test_fields_of_turns_and_parts_that_are_read_are_not_reported() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [OPENAI_CALL], "reasoning_content": "Hm."}
    result = {"role": "tool", "content": [{"found": "fur"}], "tool_call_id": "1", "name": "look"}
    clip = {"type": "video", "video": "clip.mp4", "fps": 2, "max_frames": 8, "video_max_pixels": 50176}
    row = {"messages": [turns([clip])[0], call, result, {**turns()[1], "loss": True, "score": None}]}
    assert find_format([row], RowFormat()).unused == set()
    converted: set[str] = set()
    convert_row(row, RowFormat(), key="a/0", dataset="a", record=Ledger().record, unused=converted)
    assert converted == set()


def test_the_format_of_rows_is_described_by_their_columns() -> None:
    rows = [{"conversations": from_value(), "image": "cat.png", "id": 1}, {"messages": turns()}]
    found = find_format(rows, RowFormat())
    assert str(found) == "messages (messages=conversations, messages, images=image)"
    assert found.as_dict() == {
        "format": ["messages"],
        "columns": {"messages": ["conversations", "messages"], "images": ["image"]},
        "unused": ["id"],
    }
    pair = find_format([{"query": "a", "response": "b"}, {"odd": 1}], RowFormat())
    assert str(found | pair) == f"{found}, prompt_response (prompt=query, response)"
    assert found | FoundFormat() is found
    assert str(FoundFormat()) == "unknown"


MARKED_ROWS = [
    {"messages": turns(MARKED), "images": ["cat.png"]},
    {"messages": json.dumps(turns([{"type": "image"}])), "images": ["cat.png"]},
    {"instruction": QUESTION, "input": "<image>", "output": ANSWER, "images": ["cat.png"]},
    {"query": QUESTION, "response": ANSWER, "history": [["<IMAGE>", "Yes"]], "image": "cat.png"},
    {"prompt": MARKED, "chosen": "a", "rejected": "b", "image": "cat.png"},
]


@pytest.mark.parametrize("row", MARKED_ROWS)
def test_no_advice_is_given_if_a_text_says_where_its_media_belong(row: dict[str, Any]) -> None:
    unmarked = {"messages": turns(), "images": ["cat.png"]}
    assert find_format([row], RowFormat()).advice() == ""
    assert find_format([unmarked, row], RowFormat()).advice() == ""


def test_rows_whose_media_no_text_mentions_get_one_advice() -> None:
    rows = [{"messages": turns(), "images": [name]} for name in ("1.png", "2.png")]
    rows.append({"messages": turns(), "images": [""]})
    assert 'set media_position to "first"' in find_format(rows, RowFormat()).advice()
    assert find_format(rows, RowFormat(media_position="first")).advice() == ""
    assert find_format(rows[2:], RowFormat()).advice() == ""


PNG64 = base64.b64encode(png()).decode()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": turns([{"type": "figure", "figure": 3}])}, "wrong_format"),
        ({"messages": turns([{"type": "image"}, text(QUESTION)])}, "media_mismatch"),
        ({"messages": turns([{"type": "image", "base64": "no base64!"}])}, "broken_media"),
        ({"messages": turns([{"type": "image", "base64": 3}])}, "wrong_format"),
        ({"messages": turns([{"type": "image", "image": "data:image/png,abc"}])}, "wrong_format"),
        ({"messages": turns([{"type": "image", "url": "https://host/a.png"}])}, "not_allowed"),
        ({"messages": turns(MARKED), "images": ["http://host/a.png"]}, "not_allowed"),
        ({"messages": turns(MARKED), "images": ["simplecache::HTTPS://host/a.png"]}, "not_allowed"),
        ({"messages": turns("<video>"), "videos": [["a.png", "http://host/b.png"]]}, "not_allowed"),
        ({"messages": turns(), "tools": "[{"}, "wrong_format"),
        ({"messages": turns(), "tools": 3}, "wrong_format"),
        ({"messages": [{"role": "function_call", "content": "no JSON"}]}, "wrong_format"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"arguments": {}}]}]}, "wrong_format"),
        ({"messages": turns(), "weight": -1}, "wrong_format"),
        ({"messages": turns(), "weight": "heavy"}, "wrong_format"),
        ({"query": "a", "response": "b", "history": ["x"]}, "wrong_format"),
        ({"query": "a", "response": "b", "history": "x"}, "wrong_format"),
        ({"query": "a", "response": "b", "history": [{"user": "x"}]}, "wrong_format"),
        ({"messages": {"role": "user", "content": "x"}}, "wrong_format"),
        ({"messages": {"role": ["user"], "content": []}}, "wrong_format"),
        ({"messages": turns(), "system": 3}, "wrong_format"),
        ({"messages": "no list"}, "wrong_format"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference_data"),
        ({"messages": turns(), "rejected_response": "c"}, "preference_data"),
        ({"prompt": "a", "completion": "b", "label": False}, "preference_data"),
    ],
)
def test_bad_input_is_a_bad_sample_with_key_and_reason(row: dict[str, Any], reason: str) -> None:
    with raises_bad_sample(reason, key="a/0", stage="convert"):
        convert(row)


@pytest.mark.parametrize("weight", [-1, "2", float("nan"), float("inf")])
def test_a_wrong_weight_of_a_turn_is_a_bad_sample(weight: Any) -> None:
    row = {"messages": [turns()[0], {**turns()[1], "weight": weight}]}
    with raises_bad_sample("wrong_format", key="a/0"):
        parse_conversation(
            convert_row(row, RowFormat(), key="a/0", dataset="a", record=Ledger().record), "a/0"
        )


def test_addresses_of_the_web_are_taken_if_the_dataset_allows_them() -> None:
    row = {"messages": turns([{"type": "image", "url": "https://host/a.png"}])}
    part = convert(row, allow_http=True)["conversation"][0]["content"][0]
    assert part == {"type": "image", "image": "https://host/a.png"}


def test_base64_data_is_limited_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKHORSE_MAX_BASE64_CHARS", str(len(PNG64) - 1))
    with raises_bad_sample("media_too_large", match="PACKHORSE_MAX_BASE64_CHARS"):
        convert({"messages": turns([{"type": "image", "base64": PNG64}])})


def test_paths_in_typed_parts_obey_confine(tmp_path: Path) -> None:
    row = {"messages": turns([{"type": "image", "path": "../x.png"}])}
    with raises_bad_sample("outside_media_dir"):
        convert(row, media_dir=str(tmp_path), confine=True)
    with raises_bad_sample("outside_media_dir"):
        convert(
            {"messages": turns([{"type": "image", "url": "file:///etc/passwd"}])},
            media_dir=str(tmp_path),
            confine=True,
        )


def test_a_row_of_no_known_format_shows_its_fields_and_the_closest_names() -> None:
    with pytest.raises(BadSample) as caught:
        convert({"mesages": turns(), "id": 3})
    assert caught.value.key == "a/0"
    for part in ("mesages, id", "did you mean 'messages'?", "columns={'messages': …}"):
        assert part in caught.value.detail


@pytest.mark.parametrize(
    ("setting", "value"),
    [("format", "chat"), ("reasoning", "hide"), ("media_position", "last"), ("weight", -1.0)],
)
def test_a_wrong_setting_of_a_format_is_named(setting: str, value: Any) -> None:
    with raises_config(setting, value):
        RowFormat.of(**{setting: value})


def test_a_tool_list_without_tools_is_none() -> None:
    for nothing in ("[]", [], "", None, {}):
        assert "tools" not in convert({"messages": turns(), "tools": nothing})


def test_call_turns_with_other_fields_stay_apart() -> None:
    calls = [
        {"from": "function_call", "value": CALL_TEXT},
        {"from": "function_call", "value": CALL_TEXT, "loss": False},
    ]
    row = {"conversations": [*from_value()[:1], *calls, {"from": "observation", "value": "fur"}]}
    found = convert(row)["conversation"]
    assert [turn.get("loss") for turn in found] == [None, None, False, None]


def test_a_result_of_a_tool_keeps_its_white_space_and_its_objects() -> None:
    def result(content: Any) -> Any:
        row = {"messages": [turns()[0], {"role": "tool", "content": content}, turns()[1]]}
        return convert(row)["conversation"][1]["content"]

    assert result("  a\n    b\n") == [text("  a\n    b\n")]
    assert result([{"t": 1}]) == [text('[{"t": 1}]')]
    assert result([text("a")]) == [text("a")]


def test_wrapped_base64_and_tuples_of_media_are_read() -> None:
    wrapped = base64.encodebytes(png()).decode()
    for data in (wrapped, f"data:image/png;base64,{PNG64}"):
        (part, _) = convert({"messages": turns([{"type": "image", "base64": data}, text(QUESTION)])})[
            "conversation"
        ][0]["content"]
        assert part["image"] == png()
    assert convert({"messages": turns(MARKED), "images": ("cat.png",)}) == {"conversation": OF_IMAGE}


def test_base64_in_place_of_a_path_is_read() -> None:
    of_bytes = {"role": "user", "content": [{"type": "image", "image": png()}, text(QUESTION)]}
    assert convert({"messages": turns(MARKED), "images": [PNG64]}) == {"conversation": [of_bytes, PLAIN[1]]}
    with raises_bad_sample("broken_media", key="a/0"):
        convert({"messages": turns(MARKED), "images": [PNG64[:-3]]})


def unused_of(row: dict[str, Any], **options: Any) -> set[str]:
    """What conversion does not use of a row."""
    unused: set[str] = set()
    rules = RowFormat.of(**options)
    convert_row(row, rules, key="a/0", dataset="a", record=Ledger().record, unused=unused)
    return unused


def test_names_that_belong_together_are_read_together() -> None:
    row = {"instruction": QUESTION, "input": "", "output": ANSWER, "prompt": f"{QUESTION} {ANSWER}"}
    assert convert(row) == {"conversation": PLAIN}
    assert unused_of(row) == {"prompt"}
    row = {"question": QUESTION, "answer": ANSWER, "response": "Another one."}
    assert convert(row) == {"conversation": PLAIN}
    assert convert({"prompt": QUESTION, "answer": ANSWER}) == {"conversation": PLAIN}


def test_an_empty_column_does_not_hide_another_of_the_same_part() -> None:
    assert convert({"messages": turns(MARKED), "images": [], "image": "cat.png"}) == {
        "conversation": OF_IMAGE
    }
    assert convert({"messages": [], "conversations": turns()}) == {"conversation": PLAIN}
    assert convert({"messages": [], "prompt": QUESTION, "completion": ANSWER}) == {"conversation": PLAIN}
    assert unused_of({"messages": turns(), "conversations": []}) == set()


def test_turns_are_read_from_json_text_and_other_json_is_an_answer() -> None:
    prompt, answer = json.dumps(turns()[:1]), json.dumps(turns()[1:])
    assert convert({"prompt": prompt, "completion": answer}) == {"conversation": PLAIN}
    listed = json.dumps([{"role": "admin", "content": "x"}])
    assert convert({"prompt": QUESTION, "completion": listed})["conversation"][1]["content"] == [text(listed)]
    history = json.dumps([["Hi", "Hello"]])
    assert len(convert({"query": QUESTION, "response": ANSWER, "history": history})["conversation"]) == 4


@pytest.mark.parametrize("kind", ["input_image", "image", "image_url"])
@pytest.mark.parametrize("field", ["image_url", "input_image", "image"])
def test_parts_of_openai_are_read_by_any_of_their_names(kind: str, field: str) -> None:
    question = [{"type": kind, field: "cat.png"}, {"type": "input_text", "text": QUESTION}]
    row = {"messages": turns(question, [{"type": "output_text", "text": ANSWER}])}
    assert convert(row) == {"conversation": OF_IMAGE}


@pytest.mark.parametrize("content", [None, ""])
def test_the_older_field_for_a_function_call_is_a_tool_call(content: str | None) -> None:
    call = {"name": "look", "arguments": '{"at": 1}'}
    asked, answered = turns()
    shown = {"role": "function", "name": "look", "content": "2"}
    row = {
        "messages": [asked, {"role": "assistant", "content": content, "function_call": call}, shown, answered]
    }
    tool = {"type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    example = convert({**row, "functions": [{"name": "look"}]})
    assert example["conversation"][1]["tool_calls"] == [tool]
    assert example["tools"] == [{"type": "function", "function": {"name": "look"}}]


def test_a_row_has_its_own_options_for_the_chat_template() -> None:
    options = {"enable_thinking": False}
    for given in (options, json.dumps(options)):
        example = convert(
            {"messages": turns(), "chat_template_kwargs": given},
            chat_template_kwargs={"enable_thinking": True, "a": 1},
        )
        assert example["chat_template_kwargs"] == {"enable_thinking": False, "a": 1}
    with raises_bad_sample("wrong_format", key="a/0"):
        convert({"messages": turns(), "chat_template_kwargs": [1]})


def test_decoded_audio_of_a_hub_dataset_is_read() -> None:
    clip = {"array": [0.0, 0.5], "sampling_rate": 16_000, "path": "x.wav"}
    row = {"messages": turns("<audio>" + QUESTION), "audio": clip}
    part = {"type": "audio", "audio": {"array": [0.0, 0.5], "sampling_rate": 16_000}}
    assert convert(row)["conversation"][0]["content"] == [part, text(QUESTION)]
    assert unused_of(row) == set()


def test_texts_that_mention_media_which_no_row_has_are_reported_with_the_columns_left() -> None:
    misspelled = {"messages": turns(MARKED), "imgs": ["cat.png"]}
    advice = find_format([misspelled], RowFormat()).advice()
    assert "columns={'images': …}" in advice
    assert advice.endswith("imgs")
    with_image = {"messages": turns(MARKED), "images": ["cat.png"]}
    assert find_format([misspelled, with_image], RowFormat()).advice() == ""
    own_source = {"messages": turns([{"type": "image", "image": "cat.png"}, text(QUESTION)])}
    assert find_format([own_source, {"messages": turns()}], RowFormat()).advice() == ""


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ("thinking</think>\n\n42", "42"),
        ("So <think>a</think> 42", "So 42"),
        ("<think>a</think>b<think>c</think>d", "bd"),
        ("42", "42"),
    ],
)
def test_reasoning_in_an_answer_is_dropped_also_if_the_prompt_has_begun_it(answer: str, kept: str) -> None:
    example = convert({"messages": turns(answer=answer)}, reasoning="drop")
    assert example["conversation"][1]["content"] == [text(kept)]


def test_the_reasoning_of_a_turn_that_calls_tools_is_dropped_too() -> None:
    call = {"role": "function_call", "content": '{"name": "look"}', "reasoning_content": "Hm."}
    row = {"messages": [turns()[0], call, {"role": "tool", "content": "2"}, turns()[1]]}
    assert "reasoning_content" not in convert(row, reasoning="drop")["conversation"][1]
    assert convert(row)["conversation"][1]["reasoning_content"] == "Hm."


def test_fields_that_have_no_effect_are_reported() -> None:
    call = {"id": 7, "score": 1, "function": {"name": "a", "arguments": {}, "parameters": {}}}
    asked = {**turns()[0], "weight": -1, "train": False}
    row = {"messages": [asked, {**turns()[1], "tool_calls": [call]}]}
    assert unused_of(row) == {
        "messages[].weight (role user)",
        "messages[].tool_calls[].score",
        "messages[].tool_calls[].parameters",
    }
    assert convert(row)["conversation"][1]["tool_calls"][0]["id"] == "7"


def test_an_example_says_how_its_reasoning_is_trained() -> None:
    for value in ("drop", "Let me think."):
        with raises_bad_sample("wrong_format", key="a/0"):
            parse_conversation({"conversation": PLAIN, "reasoning": value}, "a/0")


ODD_VALUES = ([], {}, [1], {"a": 1}, None, 1, 1.5, True, "x", [["a"]], [{"type": ["image"]}], {"type": [1]})
FIELDS_WITH_ODD_VALUES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "messages": lambda v: {"messages": v},
    "turn": lambda v: {"messages": [v]},
    "table": lambda v: {"messages": {"role": v, "content": v}},
    "role": lambda v: {"messages": [{"role": v, "content": "a"}]},
    "from": lambda v: {"messages": [{"from": v, "value": v}]},
    "content": lambda v: {"messages": [{"role": "user", "content": v}]},
    "result": lambda v: {"messages": [{"role": "tool", "content": v}]},
    "type of a result": lambda v: {"messages": [{"role": "tool", "content": [{"type": v, "text": "a"}]}]},
    "type": lambda v: {"messages": [{"role": "user", "content": [{"type": v, "text": "a"}]}]},
    "text": lambda v: {"messages": [{"role": "user", "content": [{"type": "text", "text": v}]}]},
    "image of a part": lambda v: {"messages": [{"role": "user", "content": [{"type": "image", "image": v}]}]},
    "image_url": lambda v: {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": v}]}]
    },
    "image": lambda v: {"messages": turns(MARKED), "images": [v]},
    "images": lambda v: {"messages": turns(MARKED), "images": v},
    "tool_calls": lambda v: {"messages": [{"role": "assistant", "content": "a", "tool_calls": v}]},
    "tool call": lambda v: {
        "messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": v}]}]
    },
    "function_call": lambda v: {"messages": [{"role": "function_call", "content": v}]},
    "loss": lambda v: {"messages": [{"role": "assistant", "content": "a", "loss": v}]},
    "reasoning_content": lambda v: {
        "messages": [{"role": "assistant", "content": "a", "reasoning_content": v}]
    },
    **{
        name: lambda v, name=name: {"messages": turns(), name: v}
        for name in ("weight", "tools", "system", "label", "rejected", "rejected_response", "_text_tokens")
    },
    "prompt": lambda v: {"prompt": v, "response": "a"},
    "response": lambda v: {"prompt": "a", "response": v},
    "history": lambda v: {"prompt": "a", "response": "b", "history": [v]},
    "chosen": lambda v: {"prompt": "a", "chosen": v, "rejected": "b"},
}


@pytest.mark.parametrize("task", ["sft", "preference"])
@pytest.mark.parametrize("field", FIELDS_WITH_ODD_VALUES)
def test_a_field_of_any_type_is_read_or_makes_a_bad_sample(field: str, task: str) -> None:
    for reasoning in ("keep", "drop", "mask"):
        for position in ({}, {"media_position": "first"}):
            rules = RowFormat.of(task=task, reasoning=reasoning, **position)
            for value in ODD_VALUES:
                with suppress(BadSample):
                    row = FIELDS_WITH_ODD_VALUES[field](value)
                    example = convert_row(row, rules, key="a/0", dataset="a", record=Ledger().record)
                    parse_documents(example, "a/0")


def test_names_of_a_table_that_are_empty_do_not_hide_others() -> None:
    spoken = [{"role": None, "content": None, **turn} for turn in from_value()]
    assert convert({"messages": spoken})["conversation"][0]["role"] == "user"


def test_an_empty_instruction_is_followed_by_the_input() -> None:
    assert convert({"instruction": None, "input": QUESTION, "output": ANSWER}) == {"conversation": PLAIN}


def test_a_system_column_next_to_a_system_turn_is_reported() -> None:
    ledger = Ledger()
    row = {"messages": [{"role": "system", "content": "A."}, *turns()], "system": "B."}
    convert_row(row, RowFormat(), key="a/0", dataset="a", record=ledger.record)
    assert [(drop.reason, drop.action) for drop in ledger] == [("unused_field", "kept")]


def test_options_that_are_not_of_the_template_are_rejected() -> None:
    with raises_config("chat_template_kwargs", ["tokenize"]):
        RowFormat.of(chat_template_kwargs={"tokenize": True})
    with raises_bad_sample("wrong_format", key="a/0"):
        parse_conversation({"conversation": PLAIN, "chat_template_kwargs": {"tools": []}}, "a/0")
