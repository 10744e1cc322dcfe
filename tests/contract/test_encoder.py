"""An encoder looks a processor up once, tries each size once, and works the same in another process."""

import pickle
from collections import Counter
from copy import copy
from dataclasses import replace
from datetime import datetime
from functools import reduce

import numpy
import pytest
import torch

from contract.processors import FAMILIES, build, processor
from contract.samples import make_image, turns
from packhorse.chat import IGNORE_INDEX
from packhorse.count.parts import make_counter
from packhorse.count.token_counter import TokenCounter
from packhorse.errors import BadSample
from packhorse.families import Encoder, Generic
from packhorse.formats.conversation import parse_conversation
from raising import raises_bad_sample, raises_config


def question(*images):
    said = turns(*["image"] * len(images))
    for part, image in zip(said[0]["content"], images, strict=False):
        part["image"] = image
    return parse_conversation({"conversation": said}, "a/1")


@pytest.mark.parametrize("name", FAMILIES)
def test_an_encoder_in_another_process_encodes_the_same(name):
    encoder = Encoder(processor(name))
    encoded = encoder.encode(question(make_image(60, 40)))
    other = pickle.loads(pickle.dumps(encoder))
    assert type(other.family) is type(encoder.family)
    assert other.media_token_ids == encoder.media_token_ids
    again = other.encode(question(make_image(60, 40)))
    assert torch.equal(again.tokens["input_ids"], encoded.tokens["input_ids"])
    assert torch.equal(other.labels(again), encoder.labels(encoded))


def test_the_error_of_a_broken_image_has_the_key_of_its_row():
    with raises_bad_sample("broken_media", key="a/1"):
        Encoder(processor("qwen2_vl")).encode(question(b"no image"))


def test_special_tokens_of_a_tokenizer_are_looked_up_once_and_not_for_every_sample():
    calls = Counter()
    made = copy(processor("qwen2_vl"))

    class Asked(type(made.tokenizer)):
        def get_added_vocab(self):
            calls["get_added_vocab"] += 1
            return super().get_added_vocab()

    made.tokenizer = copy(made.tokenizer)
    made.tokenizer.__class__ = Asked
    encoder = Encoder(made)
    encoder.labels(encoder.encode(question(make_image(60, 40))))
    first = calls.copy()
    assert first["get_added_vocab"]
    for side in (30, 50, 70):
        encoder.labels(encoder.encode(question(make_image(side, side))))
    assert calls == first


def test_a_size_is_tried_once():
    made = copy(processor("qwen2_vl"))
    calls = Counter()

    class Called(type(made)):
        def __call__(self, *args, **options):
            calls["call"] += 1
            return super().__call__(*args, **options)

    made.__class__ = Called
    encoder = Encoder(made, Generic())
    for _ in range(2):
        assert encoder.media_tokens("image", (40, 60)) > 0
        assert encoder.media_patches("image", (40, 60)) > 0
    assert calls["call"] == 1


def thinking(before, after):
    """A processor whose template writes reasoning between two marks."""
    own = build("qwen3_vl")
    own.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.reasoning_content %}{{ '"
        + before
        + "' + m.reasoning_content + '"
        + after
        + "' }}{% endif %}"
        "{{ m.content[0].text + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    return own


# As Qwen's: the reasoning of an answer is taken out of its text, and every answer has a thought.
QWEN_THINKING = (
    "{% for m in messages %}{% set thought, text = m.reasoning_content or '', m.content[0].text %}"
    "{% if '</think>' in text %}"
    "{% set thought, text = text.split('</think>')[0].split('<think>')[-1], text.split('</think>')[-1] %}"
    "{% endif %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{{ '<think>' + thought + '</think>' }}{% endif %}"
    "{{ text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '</think>' }}{% endif %}{% endif %}"
)


def one_answer(text, **settings):
    reasoning = settings.pop("reasoning_content", None)
    answer = {"role": "assistant", "content": [{"type": "text", "text": text}]}
    if reasoning is not None:
        answer["reasoning_content"] = reasoning
    question = {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]}
    return parse_conversation({"conversation": [question, answer], **settings}, "set/7")


@pytest.mark.parametrize("marks", [("<think>\\n", "\\n</think>\\n\\n"), ("[thought]\\n", "[/thought]\\n")])
def test_masked_reasoning_is_context_with_the_marks_of_any_template(marks):
    own = thinking(*marks)
    encoder = Encoder(own)
    spoken = "".join((marks[0], "Add.", marks[1], "Two.")).replace("\\n", "\n")
    for answer in (
        one_answer("Two.", reasoning="mask", reasoning_content="Add."),
        one_answer(spoken, reasoning="mask"),
        one_answer("<think>Add.</think>Two.", reasoning="mask"),
        one_answer("Two.", reasoning="mask"),
    ):
        labels = encoder.labels(encoder.encode(answer)).tolist()
        supervised = [label for label in labels if label != IGNORE_INDEX]
        assert own.tokenizer.decode(supervised) == "Two.<|im_end|>"
        assert TokenCounter(encoder).count(answer).count.supervised == len(supervised)


@pytest.mark.parametrize("given", ["reasoning_content", "text", "none"])
def test_a_template_without_marks_around_reasoning_cannot_mask_it(given):
    encoder = Encoder(thinking("", ""))
    field = {"reasoning_content": "Add."} if given == "reasoning_content" else {}
    answer = one_answer("<think>Add.</think>Two." if given == "text" else "Two.", reasoning="mask", **field)
    with raises_bad_sample("unsupported_turn", key="set/7", match="Set reasoning to 'keep' or 'drop'"):
        encoder.labels(encoder.encode(answer))
    with raises_bad_sample("unsupported_turn", key="set/7", match="Set reasoning to 'keep' or 'drop'"):
        TokenCounter(encoder).count(answer)


def test_reasoning_that_a_template_writes_without_marks_in_some_rows_only_is_not_supervised():
    own = thinking("", "")
    own.chat_template = own.chat_template.replace("{% if m.reasoning", "{% if loop.index > 3 and m.reasoning")
    encoder = Encoder(own)
    row = one_answer("Two.", reasoning="mask", reasoning_content="Add.")
    twice = replace(row, messages=row.messages * 2)
    encoder.labels(encoder.encode(row))
    with raises_bad_sample("unsupported_turn", key="set/7", match="Set reasoning to 'keep' or 'drop'"):
        encoder.labels(encoder.encode(twice))


@pytest.mark.parametrize("given", ["reasoning_content", "text"])
def test_reasoning_in_a_dataset_without_thinking_is_an_error_that_says_what_to_do(given):
    own = build("qwen3_vl")
    own.chat_template = QWEN_THINKING
    encoder = Encoder(own)
    field = {"reasoning_content": "Add."} if given == "reasoning_content" else {}
    text = "<think>Add.</think>Two." if given == "text" else "Two."
    answer = one_answer(text, chat_template_kwargs={"enable_thinking": False}, **field)
    encoder.labels(encoder.encode(one_answer("Two.", chat_template_kwargs={"enable_thinking": False})))
    remedy = "Set reasoning to 'drop' for this dataset, or remove enable_thinking"
    with raises_bad_sample("sample_failed", key="set/7", match=remedy):
        TokenCounter(encoder).count(answer)


# Adds texts and fields without a look at their types, as many templates of models do.
CONCATENATING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + (' ' + m.name if m.name else '') + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m.content[0].text }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)


def calling(argument):
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": argument}}}
    return one_answer_with(tool_calls=[call])


def one_answer_with(**extras):
    row = one_answer("Two.")
    asked, answer = row.messages
    return replace(row, messages=(asked, replace(answer, extras=extras)))


@pytest.mark.parametrize(
    ("row", "match"),
    [
        (one_answer_with(reasoning_content=["Add."]), "TypeError: can only concatenate str"),
        (one_answer_with(name=3), "TypeError: can only concatenate str"),
        (replace(one_answer("Two."), tools=("look",)), "ValueError: Tools should either be a JSON schema"),
    ],
)
def test_a_row_on_which_the_template_fails_is_dropped_alone(row, match):
    own = build("qwen3_vl")
    own.chat_template = CONCATENATING
    encoder = Encoder(own)
    with raises_bad_sample("wrong_format", key="set/7", match=f"the chat template rejects it: {match}"):
        encoder.encode(row)
    counted = TokenCounter(encoder).count_many([one_answer("Two."), row, one_answer("Three.")])
    assert [isinstance(result, BadSample) for result in counted] == [False, True, False]
    assert counted[1].key == "set/7"


@pytest.mark.parametrize(
    ("row", "match"),
    [
        (calling(datetime(2026, 1, 1)), "'tool_calls' of turn 1 has a value of type datetime"),
        (calling([{"b": b"cat"}]), "'tool_calls' of turn 1 has a value of type bytes"),
        (one_answer_with(name=numpy.zeros(2)), "'name' of turn 1 has a value of type ndarray"),
        (replace(one_answer("Two."), tools=({"name": {1, 2}},)), "tools has a value of type set"),
        (replace(one_answer("Two."), tools=({("a", "b"): 1},)), "tools has a value of type tuple"),
        (calling(reduce(lambda inner, _: [inner], range(5000), 1)), "levels deep"),
    ],
)
def test_values_that_json_does_not_have_are_rejected_and_not_written_as_their_type(row, match):
    own = build("qwen3_vl")
    own.chat_template = CONCATENATING
    with raises_bad_sample("wrong_format", key="set/7", match=match):
        Encoder(own).encode(row)
    with raises_bad_sample("wrong_format", key="set/7", match=match):
        TokenCounter(Encoder(own)).count(row)


def test_fields_that_templates_do_not_know_may_have_any_values():
    row = one_answer_with(created=datetime(2026, 1, 1))
    encoder = Encoder(processor("qwen3_vl"))
    assert encoder.render_conversation(row) == encoder.render_conversation(one_answer("Two."))


def test_numbers_of_numpy_in_calls_are_numbers():
    own = build("qwen3_vl")
    own.chat_template = CONCATENATING.replace(
        "call.function | tojson",
        "call.function.name ~ call.function.arguments.a ~ call.function.arguments.at",
    )
    for number in (numpy.int64(3), numpy.float32(3), 3):
        assert "3" in Encoder(own).render_conversation(calling(number))


def test_a_template_that_fails_on_every_row_is_one_error_at_the_start():
    own = build("qwen3_vl")
    own.chat_template = "{{ 'Turns: ' + messages | length }}"
    for use in (make_counter, lambda processor: Encoder(processor).encode(one_answer("Two."))):
        with raises_config("chat_template", match="fails on every conversation.*can only concatenate str"):
            use(own)


def test_errors_of_our_own_code_around_the_template_are_not_of_the_row():
    class Wrong(type(Encoder(processor("qwen3_vl")).family)):
        def turns(self, conversation):
            raise TypeError("a mistake")

    encoder = Encoder(processor("qwen3_vl"), Wrong())
    with pytest.raises(TypeError, match="a mistake"):
        encoder.encode(one_answer("Two."))


def test_a_template_that_fails_while_answers_are_located_drops_the_row():
    own = build("qwen3_vl")
    own.chat_template = CONCATENATING.replace(
        "{{ m.content[0].text }}",  # it reads a number of a text, which the text that locates it has not
        "{% if messages | length > 2 and '7' not in m.content[0].text %}{{ 'a' + 3 }}{% endif %}"
        "{{ m.content[0].text }}",
    )
    row = one_answer("7.")
    row = replace(row, messages=(row.messages[1],) * 4)
    encoder = Encoder(own)
    encoded = encoder.encode(row)
    with raises_bad_sample("sample_failed", key="set/7", match="the template rejects sentinels"):
        encoder.label_sample(encoded, "set/7")
    with raises_bad_sample("sample_failed", key="set/7", match="the template rejects sentinels"):
        TokenCounter(encoder).count(row)


def test_a_template_that_fails_without_options_of_its_processor_is_named_with_the_row():
    own = build("qwen3_vl")

    class Shouting(type(own)):
        def apply_chat_template(self, *args, **options):
            return super().apply_chat_template(*args, shout="LOUD", **options)

    own.__class__ = Shouting
    own.chat_template = CONCATENATING.replace(
        "{{ m.content[0].text }}", "{% generation %}{{ m.content[0].text + shout }}{% endgeneration %}"
    )
    encoder = Encoder(own)
    encoded = encoder.encode(one_answer("Two."))
    with raises_bad_sample("sample_failed", key="set/7", match="when its generation marks are requested"):
        encoder.label_sample(encoded, "set/7")


def test_an_option_that_no_template_uses_is_warned_of_once_and_not_passed_on(caplog):
    encoder = Encoder(processor("qwen2_vl")).with_template_kwargs({"enable_nothing": False})
    turns = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert encoder.render(turns) == encoder.render(turns) == Encoder(processor("qwen2_vl")).render(turns)
    warnings = [one.getMessage() for one in caplog.records]
    assert [text for text in warnings if "enable_nothing" in text] == [
        "the chat template of Qwen2VLProcessor does not use enable_nothing, which has no effect"
    ]
    assert not any("processor_kwargs" in text for text in warnings)
