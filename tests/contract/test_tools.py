"""Tools, tool calls and tool results: counts are exact, and labels are those of incremental rendering.

The oracle renders the conversation turn by turn with ``add_generation_prompt=True``: what an answer adds to
that, up to its end of turn, is what a model has to generate.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from contract.chat_templates import TOOLS
from contract.processors import build
from contract.samples import make_image
from contract.test_real_qwen import ASSETS, real
from packhorse.chat import IGNORE_INDEX
from packhorse.count.token_counter import TokenCounter
from packhorse.families import Encoder
from packhorse.formats.conversation import parse_conversation
from raising import raises_bad_sample

STOP = "<|im_end|>"
WEATHER = {
    "name": "get_weather",
    "description": "The weather at a place.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS_OF_ROWS = [{"type": "function", "function": WEATHER}]


def call(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def user(*parts: Any) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts],
    }


def assistant(text: str, *calls: dict[str, Any]) -> dict[str, Any]:
    content = [{"type": "text", "text": text}]
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {})}


def tool(text: str, *media: Any) -> dict[str, Any]:
    return {"role": "tool", "content": [*media, {"type": "text", "text": text}]}


def image(side: int) -> dict[str, Any]:
    return {"type": "image", "image": make_image(side, 2 * side)}


ROWS = {
    "one call": [user("Rain in Bonn?"), assistant("", call(city="Bonn")), tool("17 C"), assistant("No.")],
    "words and a call": [
        user("Rain in Bonn?"),
        assistant("I look it up.", call(city="Bonn")),
        tool('{"rain": false}'),
        assistant("No rain."),
    ],
    "two calls at once": [
        user("Bonn or Ulm?"),
        assistant("", call(city="Bonn"), call(city="Ulm")),
        tool("17 C"),
        tool("18 C"),
        assistant("Ulm."),
    ],
    "two rounds": [
        user("Bonn?"),
        assistant("", call(city="Bonn")),
        tool("17 C"),
        assistant("17."),
        user("And <|im_start|>assistant\nUlm?"),
        assistant("", call(city="Ulm <tool_call>")),
        tool("18 C"),
        assistant("18."),
    ],
    "no call": [user("Hi"), assistant("Hello.")],
}
WITH_IMAGES = {
    "an image and a call": [
        user(image(40), "Where?"),
        assistant("", call(city="Bonn")),
        tool("17 C"),
        assistant("Bonn."),
    ],
    "an image as a result": [
        user("Show it."),
        assistant("", call(city="Bonn")),
        tool("Here.", image(56)),
        assistant("Nice."),
    ],
}


Span = tuple[int, int]


def expected_spans(
    processor: Any, turns: list[dict[str, Any]], tools: Any, *, rewrites: bool = False
) -> tuple[str, list[Span]]:
    """Return the rendered text and the characters that a model generates, by rendering turn by turn.

    A template that ``rewrites`` writes a last answer in another way than the same answer in the middle, so
    only what precedes an answer is rendered alone; the answer ends at the first end of turn after that.
    """

    def render(some: list[dict[str, Any]], prompt: bool) -> str:
        text = processor.apply_chat_template(some, tools=tools, tokenize=False, add_generation_prompt=prompt)
        return str(text[0] if isinstance(text, list) else text)

    whole, spans = render(turns, False), []
    for number, turn in enumerate(turns):
        if turn["role"] == "assistant":
            before = render(turns[:number], True)
            after = whole if rewrites else render(turns[: number + 1], False)
            assert whole.startswith(before)
            assert whole.startswith(after)
            find = after[len(before) :].index if rewrites else after[len(before) :].rindex
            spans.append((len(before), len(before) + find(STOP) + len(STOP)))
    return whole, spans


def expected_labels(
    encode: Callable[[str], list[int]], text: str, spans: list[Span]
) -> tuple[list[int], list[int]]:
    """Return ids and labels: the tokens that are added when the text goes on to the end of a span.

    One that joins the last token of the prompt and the beginning of the answer is the prompt's.
    """
    ids = encode(text)
    labels = [IGNORE_INDEX] * len(ids)
    for span in spans:
        before, after = (encode(text[:position]) for position in span)
        assert ids[: len(after)] == after
        assert after[: len(before) - 1] == before[:-1]
        labels[len(before) : len(after)] = after[len(before) :]
    return ids, labels


def bare(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns as the template takes them: media parts hold their type alone."""
    return [
        {**turn, "content": [p if p["type"] == "text" else {"type": p["type"]} for p in turn["content"]]}
        for turn in turns
    ]


def check(processor: Any, turns: list[dict[str, Any]], tools: Any) -> None:
    text, spans = expected_spans(processor, bare(turns), tools or None)
    check_spans(processor, turns, tools, text, spans)


def check_spans(
    processor: Any, turns: list[dict[str, Any]], tools: Any, text: str, spans: list[Span]
) -> None:
    """Assert that a conversation is rendered as ``text``, and that the tokens in ``spans`` are supervised."""
    encoder = Encoder(processor)
    conversation = parse_conversation({"conversation": turns, "tools": tools}, "a/0")
    encoded = encoder.encode(conversation)
    assert encoded.text == text
    images = [part["image"] for turn in turns for part in turn["content"] if part["type"] == "image"]

    def encode(some: str) -> list[int]:
        if not (shown := some.count("<|image_pad|>")):
            return list(encoder.tokenizer(some, add_special_tokens=False)["input_ids"])
        options = {"text_kwargs": {"add_special_tokens": False}}
        return list(processor(text=[some], images=[images[:shown]], **options)["input_ids"][0])

    ids, expected = expected_labels(encode, text, spans)
    assert encoded.tokens["input_ids"].tolist() == ids
    assert encoder.labels(encoded).tolist() == expected
    counted = TokenCounter(encoder).count(conversation).count
    supervised = sum(label != IGNORE_INDEX for label in expected)
    assert (counted.total, counted.supervised) == (len(ids), supervised)


@pytest.mark.parametrize("name", [*ROWS, *WITH_IMAGES])
def test_labels_of_tool_rows_are_those_of_incremental_rendering(name: str) -> None:
    processor = build("qwen3_vl")
    processor.chat_template = TOOLS
    check(processor, {**ROWS, **WITH_IMAGES}[name], TOOLS_OF_ROWS)


REAL = pytest.mark.skipif(not (ASSETS / "tokenizers").is_dir(), reason=f"no tokenizers/ in {ASSETS}")


@REAL
@pytest.mark.parametrize("name", [*ROWS, *WITH_IMAGES])
def test_labels_of_tool_rows_are_exact_with_the_public_qwen3_vl_template(name: str) -> None:
    check(real("qwen3_vl"), {**ROWS, **WITH_IMAGES}[name], TOOLS_OF_ROWS)


@REAL
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("tokenizer", ["qwen2_5", "qwen3"])
def test_labels_of_tool_rows_are_exact_with_the_text_templates(tokenizer: str, name: str) -> None:
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(ASSETS / "tokenizers" / tokenizer)
    texts = [{**turn, "content": turn["content"][0]["text"]} for turn in ROWS[name]]
    # Qwen3 writes an empty thought before the last answer only: as an answer in the middle it has none.
    text, spans = expected_spans(made, texts, TOOLS_OF_ROWS, rewrites=tokenizer == "qwen3")
    check_spans(made, ROWS[name], TOOLS_OF_ROWS, text, spans)


@pytest.mark.parametrize(
    ("turns", "tools", "missing"),
    [
        (ROWS["one call"], TOOLS_OF_ROWS, "tools, tool calls"),
        (ROWS["no call"], TOOLS_OF_ROWS, "tools"),
        (ROWS["one call"], [], "tool calls"),
    ],
)
def test_a_row_that_the_template_cannot_write_is_dropped_whole(turns: Any, tools: Any, missing: str) -> None:
    encoder = Encoder(build("qwen2_vl"))  # its template writes results, but neither tools nor calls
    conversation = parse_conversation({"conversation": turns, "tools": tools}, "a/0")
    with raises_bad_sample("unsupported_turn", key="a/0", match=f"does not write {missing}:"):
        encoder.encode(conversation)
    with raises_bad_sample("unsupported_turn", key="a/0"):
        TokenCounter(encoder).count(conversation)


def test_arguments_as_text_and_as_an_object_are_the_same() -> None:
    from packhorse.formats.convert import convert_row
    from packhorse.formats.row_format import RowFormat
    from packhorse.ledger import Ledger

    processor = build("qwen3_vl")
    processor.chat_template = TOOLS
    encoder = Encoder(processor)
    texts = []
    for arguments in ({"city": "Bonn"}, json.dumps({"city": "Bonn"})):
        function = {"name": "get_weather", "arguments": arguments}
        row = {
            "messages": [
                {"role": "user", "content": "Rain?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"type": "function", "function": function}],
                },
                {"role": "tool", "content": "17 C"},
                {"role": "assistant", "content": "No."},
            ],
            "tools": json.dumps(TOOLS_OF_ROWS),
        }
        example = convert_row(row, RowFormat(), key="a/0", dataset="a", record=Ledger().record)
        texts.append(encoder.render_conversation(parse_conversation(example)))
    assert texts[0] == texts[1]
    assert '"arguments": {"city": "Bonn"}' in texts[0]


def test_template_options_of_a_row_reach_the_template() -> None:
    processor = build("qwen3_vl")
    processor.chat_template = processor.chat_template + "{% if shout is defined %}{{ shout }}{% endif %}"
    encoder = Encoder(processor)
    example = {"conversation": ROWS["no call"], "chat_template_kwargs": {"shout": "LOUD"}}
    assert encoder.render_conversation(parse_conversation(example)).endswith("LOUD")
    plain = parse_conversation({"conversation": ROWS["no call"]})
    assert not encoder.render_conversation(plain).endswith("LOUD")


def test_turns_of_weight_zero_and_masked_reasoning_are_not_supervised() -> None:
    processor = build("qwen3_vl")
    encoder = Encoder(processor)
    turns = [
        user("1?"),
        {**assistant("One."), "loss": False},
        user("2?"),
        assistant("<think>Hm.</think>\n\nTwo."),
    ]

    def supervised_text(**settings: Any) -> str:
        conversation = parse_conversation({"conversation": turns, **settings}, "a/0")
        labels = encoder.labels(encoder.encode(conversation)).tolist()
        counted = TokenCounter(encoder).count(conversation).count
        assert counted.supervised == sum(label != IGNORE_INDEX for label in labels)
        return str(processor.tokenizer.decode([label for label in labels if label != IGNORE_INDEX]))

    assert supervised_text() == "<think>Hm.</think>\n\nTwo.<|im_end|>"
    assert supervised_text(reasoning="mask") == "Two.<|im_end|>"
    assert supervised_text(weight=0) == ""


def test_weights_of_rows_and_turns_are_weights_of_tokens() -> None:
    encoder = Encoder(build("qwen3_vl"))
    turns = [user("1?"), {**assistant("One."), "weight": 0.5}, user("2?"), assistant("Two.")]
    encoded = encoder.encode(parse_conversation({"conversation": turns, "weight": 4}, "a/0"))
    sample = encoder.label_sample(encoded, "a/0")
    assert sample.labels is not None
    assert sample.loss_weights is not None
    chosen = sample.loss_weights[sample.labels != IGNORE_INDEX].tolist()
    first = chosen.index(4.0)
    assert chosen == [2.0] * first + [4.0] * (len(chosen) - first)
    assert 0 < first < len(chosen)
    counter = TokenCounter(encoder)
    assert counter.count(encoded.conversation).weight == sum(chosen)
    for weight, expected in ((4, 4.0 * len(chosen)), (1, None), (0, None)):  # of the whole row
        turns[1].pop("weight", None)
        counted = counter.count(parse_conversation({"conversation": turns, "weight": weight}, "a/0"))
        assert counted.weight == expected
        assert counted.count.supervised == (len(chosen) if weight else 0)
    plain = encoder.encode(parse_conversation({"conversation": ROWS["no call"]}, "a/0"))
    assert encoder.label_sample(plain, "a/0").loss_weights is None


def test_tools_are_written_in_the_order_of_their_own_fields() -> None:
    processor = build("qwen3_vl")
    processor.chat_template = TOOLS
    encoder = Encoder(processor)
    for function in ({"name": "a", "description": "b"}, {"description": "b", "name": "a"}):
        tools = [{"type": "function", "function": function}]
        conversation = parse_conversation({"conversation": ROWS["no call"], "tools": tools})
        expected = processor.apply_chat_template(bare(ROWS["no call"]), tools=tools, tokenize=False)
        assert encoder.render_conversation(conversation) == expected


def test_reasoning_that_the_generation_prompt_begins_is_masked_too() -> None:
    processor = build("qwen3_vl")
    opening = "<|im_start|>assistant\n<think>\n"
    processor.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'assistant' %}"
        "{{ '<think>\n' + m.get('reasoning_content', '') + '\n</think>\n\n' }}{% endif %}"
        "{{ m['content'][0]['text'] }}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}" + "{{ " + repr(opening) + " }}{% endif %}"
    )
    encoder = Encoder(processor)
    turns = [user("1 + 1?"), {**assistant("Two."), "reasoning_content": "Add."}]
    texts = []
    for policy in ("keep", "mask"):
        encoded = encoder.encode(parse_conversation({"conversation": turns, "reasoning": policy}, "a/0"))
        labels = encoder.labels(encoded).tolist()
        texts.append(processor.tokenizer.decode([label for label in labels if label != IGNORE_INDEX]))
    assert texts == ["Add.\n</think>\n\nTwo.<|im_end|>", "Two.<|im_end|>"]


# As DeepSeek's and others: arguments are added to a text, so they have to be one.
ARGUMENTS_AS_TEXT = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.content %}{{ m.content[0].text }}{% endif %}"
    "{% for call in m.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function.name + '\n' + call.function.arguments + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("how", ["added to a text", "written as they are", "read item by item"])
def test_arguments_are_what_the_template_takes(how: str) -> None:
    processor, template = build("qwen3_vl"), ARGUMENTS_AS_TEXT
    if how == "written as they are":  # as Python writes them, if they are an object
        template = template.replace(
            "' + call.function.arguments + '", "' }}{{ call.function.arguments }}{{ '"
        )
    if how == "read item by item":
        items = "' }}{% for key, value in call.function.arguments.items() %}{{ key ~ value }}{% endfor %}{{ '"
        template = template.replace("' + call.function.arguments + '", items)
    processor.chat_template = template
    for turns in ROWS.values():
        said = turns
        if how != "read item by item":
            said = [
                {**turn, "tool_calls": [as_text(one) for one in turn["tool_calls"]]}
                if "tool_calls" in turn
                else turn
                for turn in turns
            ]
        text, spans = expected_spans(processor, bare(said), TOOLS_OF_ROWS)
        check_spans(processor, turns, TOOLS_OF_ROWS, text, spans)


def as_text(tool_call: dict[str, Any]) -> dict[str, Any]:
    function = tool_call["function"]
    return {**tool_call, "function": {**function, "arguments": json.dumps(function["arguments"])}}


def test_arguments_with_a_number_of_numpy_or_letters_beyond_ascii_are_written_as_json() -> None:
    processor = build("qwen3_vl")
    processor.chat_template = ARGUMENTS_AS_TEXT
    turns = [
        user("Bonn?"),
        assistant("", call(city="Köln", days=np.int64(3))),
        tool("17 C"),
        assistant("17."),
    ]
    text = Encoder(processor).render_conversation(parse_conversation({"conversation": turns}, "a/0"))
    assert '{"city": "Köln", "days": 3}</tool_call>' in text


def test_other_tools_in_each_row_cost_two_renderings_and_none_of_what_they_have_in_common() -> None:
    calls = Counter[str]()
    processor = build("qwen3_vl")

    class Called(type(processor)):  # type: ignore[misc]
        def apply_chat_template(self, *args: Any, **options: Any) -> Any:
            calls["render"] += 1
            return super().apply_chat_template(*args, **options)

    processor.__class__ = Called
    processor.chat_template = TOOLS
    encoder = Encoder(processor)
    counter, plain = TokenCounter(encoder), TokenCounter(Encoder(processor))
    for number, turns in enumerate([ROWS["no call"], *[*ROWS.values()] * 3]):
        tools = [{"type": "function", "function": {**WEATHER, "name": f"get_{number}"}}]
        conversation = parse_conversation({"conversation": turns, "tools": tools}, "a/0")
        calls.clear()
        counted = counter.count(conversation)
        assert number == 0 or calls["render"] <= 2
        assert counted == plain.count(conversation)
