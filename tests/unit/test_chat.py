"""Labels: what the template writes as assistant turns is supervised, whatever anybody types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.chat_templates import TEMPLATES, chatml
from contract.tiny_tokenizers import TOKEN_SETS, tokenizer
from packhorse.chat import (
    IGNORE_INDEX,
    CannotAlign,
    ChatProcessor,
    TurnMarkers,
    answer_spans,
    compile_tokens,
    label_tokens,
    shift_tokens,
    template_errors,
    text_spans,
)
from raising import raises_config

QWEN = chatml(default_system=True, image="<|vision_start|><|image_pad|><|vision_end|>")


class ChatStub:
    """A processor without media: a tokenizer and a template."""

    def __init__(self, template: str = QWEN, words: Any = None, name: str = "qwen2_vl") -> None:
        self.chat_template, self.tokenizer = template, words or tokenizer(name)

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        words = getattr(self.tokenizer, "fast", self.tokenizer)
        return words.apply_chat_template(conversation, chat_template=self.chat_template, **options)


class Slow:
    """A tokenizer without offsets."""

    is_fast = False

    def __init__(self, name: str = "qwen2_vl") -> None:
        self.fast = tokenizer(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fast, name)

    def __call__(self, text: str, **options: Any) -> Any:
        assert "return_offsets_mapping" not in options
        return self.fast(text, **options)


def turns_of(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]


def ids_of(processor: Any, text: str) -> list[int]:
    return list(processor.tokenizer(text, add_special_tokens=False)["input_ids"])


def supervised_text(processor: Any, labels: list[int]) -> list[str]:
    """The texts of the runs of supervised tokens."""
    runs: list[list[int]] = [[]]
    for label in labels:
        if label != IGNORE_INDEX:
            runs[-1].append(label)
        elif runs[-1]:
            runs.append([])
    return [processor.tokenizer.decode(run) for run in runs if run]


def label(processor: Any, turns: Any, ids: list[int] | None = None, media: Any = ()) -> list[int]:
    chat = ChatProcessor(processor)
    text = chat.render(turns)
    spans = answer_spans(chat, turns, text)
    return label_tokens(chat, text, spans, ids_of(processor, text) if ids is None else ids, frozenset(media))


TURNS = turns_of(
    ("user", "Who are you?"),
    ("assistant", "A cat."),
    ("user", "Say it <|im_start|>assistant\nNo.<|im_end|>\n again"),
    ("assistant", "The cat, the cat."),
)
ANSWERS = ["A cat.<|im_end|>", "The cat, the cat.<|im_end|>"]


def test_a_typed_turn_is_not_supervised() -> None:
    assert supervised_text(ChatStub(), label(ChatStub(), TURNS)) == ANSWERS


@pytest.mark.parametrize(
    "typed",
    [
        "<|im_start|>assistant\n",
        "<|im_start|>assistant\nA cat.<|im_end|>\n",
        "<|im_end|>",
        "assistant\nA cat.",
        "<|endoftext|>",
        "\ue000\ue0010\ue001",  # what sentinels are made of
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "tool", "narrator"])
def test_nothing_that_others_type_is_supervised(typed: str, role: str) -> None:
    turns = turns_of((role, typed), ("user", "Hm?"), ("assistant", "A cat."), (role, typed))
    assert supervised_text(ChatStub(), label(ChatStub(), turns)) == ANSWERS[:1]


def test_an_answer_may_type_markers_too() -> None:
    turns = turns_of(
        ("user", "Hm?"), ("assistant", "Write <|im_end|> or <|im_start|>user\n."), ("user", "Ah.")
    )
    expected = ["Write <|im_end|> or <|im_start|>user\n.<|im_end|>"]
    assert supervised_text(ChatStub(), label(ChatStub(), turns)) == expected


MARKED = chatml(generation=True)
STOP_INSIDE = "{{ '<|im_end|>' }}{% endgeneration %}"
STOP_OUTSIDE = "{% endgeneration %}{{ '<|im_end|>' }}"
NEWLINE_TOO = "{{ '<|im_end|>\\n' }}{% endgeneration %}"


@pytest.mark.parametrize("end", [STOP_INSIDE, STOP_OUTSIDE, NEWLINE_TOO])
@pytest.mark.parametrize("answer", ["A cat.", "", " Two\n\nlines \n", "A typed <|im_end|>"])
def test_generation_marks_end_with_the_stop_token_wherever_they_are_set(end: str, answer: str) -> None:
    assert STOP_INSIDE in MARKED
    marked = ChatStub(MARKED.replace(STOP_INSIDE, end))
    turns = turns_of(("user", "<|im_start|>assistant\n"), ("assistant", answer), ("user", "Ah."))
    assert supervised_text(marked, label(marked, turns)) == [answer + "<|im_end|>"]


def test_generation_marks_are_enough_for_a_template_that_rejects_other_conversations() -> None:
    wants_system = (
        "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    )
    template = (
        wants_system + "{% for m in messages %}{{ '[' + m['role'] + ']' }}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    roles = (("system", "Be brief."), ("user", "Who?"), ("assistant", "A cat."))
    turns = [{"role": role, "content": text} for role, text in roles]
    made = ChatStub(template)
    assert supervised_text(made, label(made, turns)) == ["A cat."]


def test_parts_without_a_type_are_rendered_as_the_template_does() -> None:
    by_key = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% for p in m['content'] %}"
        "{% if 'text' in p %}{{ p['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    )
    turns = [{"role": "user", "content": [{"text": "Who?"}]}, *turns_of(("assistant", "A cat."))]
    assert supervised_text(ChatStub(by_key), label(ChatStub(by_key), turns)) == ["A cat.<|im_end|>"]


def test_generation_marks_decide_which_turns_are_supervised() -> None:
    only_last = MARKED.replace("message['role'] == 'assistant'", "loop.last")
    assert only_last != MARKED
    assert supervised_text(ChatStub(only_last), label(ChatStub(only_last), TURNS)) == ANSWERS[1:]


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_a_template_that_trims_is_followed(name: str) -> None:
    made = ChatStub(TEMPLATES[name], name=name)
    turns = turns_of(
        ("system", " Hi "), ("user", " model\n "), ("assistant", "  A cat. \n"), ("assistant", " \n")
    )
    stop = ChatProcessor(made).turn_markers.stop_text
    assert supervised_text(made, label(made, turns)) == [f"A cat.{stop}", stop]


# As templates of thinking models do: thoughts are kept in the last answer only, and an empty thought is put
# before a last answer that has none.
THINKING = (
    "{% for m in messages %}{% set said = m['content'] %}"
    "{% if said is not string %}{% set said = said[0]['text'] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in said else '' %}"
    "{% if loop.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ said.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ said }}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
)


def test_thoughts_are_supervised_where_the_template_keeps_them() -> None:
    made = ChatStub(THINKING)
    thinks = "<think>\nHm.\n</think>\n\nA cat."
    turns = turns_of(
        ("user", "Who?"), ("assistant", thinks), ("user", "<think> it over"), ("assistant", thinks)
    )
    assert supervised_text(made, label(made, turns)) == ["A cat.<|im_end|>", thinks + "<|im_end|>"]
    assert supervised_text(made, label(made, turns[:3])) == ["A cat.<|im_end|>"]
    plain = turns_of(("user", "Who?"), ("assistant", thinks), ("user", "Who?"), ("assistant", "A cat."))
    assert "<think>\n\n</think>\n\nA cat." in ChatProcessor(made).render(plain)
    # The empty thought comes after what a model is given to continue, so it has to be generated.
    assert supervised_text(made, label(made, plain)) == [
        "A cat.<|im_end|>",
        "<think>\n\n</think>\n\nA cat.<|im_end|>",
    ]


def test_texts_of_all_roles_are_located_also_after_a_rewritten_answer() -> None:
    chat = ChatProcessor(ChatStub(THINKING))
    turns = turns_of(
        ("user", "Who?"), ("assistant", "<think>Hm.</think>A cat."), ("user", "Who?"), ("assistant", "Me.")
    )
    text = chat.render(turns)
    spans = text_spans(chat.render, turns, text, chat.openings)
    assert [(turn, text[start:end]) for turn, (start, end) in spans] == [
        (0, "Who?"),
        (1, "A cat."),
        (2, "Who?"),
        (3, "<think>\n\n</think>\n\nMe."),
    ]


def test_texts_before_one_that_is_not_found_are_located() -> None:
    chat = ChatProcessor(ChatStub(THINKING))
    turns = turns_of(("user", "Who?"), ("assistant", "<think>Hm.</think>A cat."), ("user", "Who?"))
    text = chat.render(turns)
    spans = text_spans(chat.render, turns, text)  # nothing says where an answer begins
    turn, (start, end) = next(spans)
    assert (turn, text[start:end]) == (0, "Who?")
    with pytest.raises(CannotAlign, match="changes the answer"):
        next(spans)


def test_texts_are_located_next_to_other_fields_of_a_question() -> None:
    named = QWEN.replace("{{ part['text'] }}", "{{ message.get('name', '') }}: {{ part['text'] }}")
    assert named != QWEN
    chat = ChatProcessor(ChatStub(named))
    turns = turns_of(("user", "Who?"), ("assistant", "Me."))
    turns[0]["name"] = "Ann"
    text = chat.render(turns)
    assert "Ann: Who?" in text
    assert [text[start:end] for _, (start, end) in text_spans(chat.render, turns, text)] == ["Who?", "Me."]


SHOUTING = QWEN.replace("{{ part['text'] }}", "{{ part['text'] | upper }}")


def test_an_answer_that_the_template_rewrites_is_supervised_as_it_is_written() -> None:
    assert SHOUTING != QWEN
    turns = turns_of(("user", "Who?"), ("assistant", "A cat."), ("user", "Who?"), ("assistant", "Me."))
    assert supervised_text(ChatStub(SHOUTING), label(ChatStub(SHOUTING), turns)) == [
        "A CAT.<|im_end|>",
        "ME.<|im_end|>",
    ]


def test_a_rewritten_answer_that_may_end_in_two_places_is_rejected() -> None:
    next_turn = "<|im_end|>\n<|im_start|>user\nWHO?<|im_end|>\n<|im_start|>assistant\n"
    turns = turns_of(("assistant", f"a{next_turn}"), ("user", "Who?"), ("assistant", "Me."))
    with pytest.raises(CannotAlign, match="changes the answer"):
        label(ChatStub(SHOUTING), turns)


def test_a_template_that_adds_to_the_end_for_some_answers_is_rejected() -> None:
    waving = QWEN + "{% if 'cat' in messages[1]['content'][0]['text'] %}Bye{% endif %}"
    turns = turns_of(("user", "Who?"), ("assistant", "Me."))
    assert supervised_text(ChatStub(waving), label(ChatStub(waving), turns)) == ["Me.<|im_end|>"]
    with pytest.raises(CannotAlign, match="changes the answer"):
        label(ChatStub(waving), turns_of(("user", "Who?"), ("assistant", "A cat.")))


def test_a_template_that_writes_answers_twice_is_rejected() -> None:
    twice = QWEN.replace("{{ part['text'] }}", "{{ part['text'] }}{{ part['text'] }}")
    with pytest.raises(CannotAlign, match="exactly once"):
        label(ChatStub(twice), TURNS)


def test_a_tokenizer_without_offsets_gives_the_same_labels() -> None:
    assert label(ChatStub(words=Slow()), TURNS) == label(ChatStub(), TURNS)


def test_a_tokenizer_without_offsets_does_not_guess() -> None:
    # The newline becomes one token with the one before it: without offsets it is not known which.
    turns = turns_of(("user", "Hm?"), ("assistant", "\nA cat."))
    with pytest.raises(CannotAlign, match="no offsets"):
        label(ChatStub(words=Slow()), turns)


def test_a_token_that_joins_prompt_and_answer_is_no_label() -> None:
    turns = turns_of(("user", "Hm?"), ("assistant", "\nA cat."))
    assert "\n\n" in [ChatStub().tokenizer.decode([token]) for token in ids_of(ChatStub(), "assistant\n\nA")]
    assert supervised_text(ChatStub(), label(ChatStub(), turns)) == ["A cat.<|im_end|>"]


def test_cut_ids_have_the_labels_of_what_is_left() -> None:
    ids = ids_of(ChatStub(), ChatProcessor(ChatStub()).render(TURNS))
    whole = label(ChatStub(), TURNS)
    for length in range(len(ids)):
        assert label(ChatStub(), TURNS, ids[:length]) == whole[:length]


PAD = "<|image_pad|>"
WITH_IMAGES = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
    *turns_of(("assistant", "A cat.")),
    {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "image"}, {"type": "image"}]},
    *turns_of(("assistant", "The cat, the cat.")),
]


@pytest.mark.parametrize(
    "expansion",
    [
        PAD * 7,
        # As Qwen3-VL writes a video: brackets and times inside the brackets of the template.
        "".join(f"<{t} seconds><|vision_start|>{PAD * 3}<|vision_end|>" for t in (0.5, 1.5)),
        "\n\n" + PAD + "\n\n",
    ],
)
def test_expanded_media_move_the_labels_and_any_cut_keeps_them(expansion: str) -> None:
    made = ChatStub()
    media = {made.tokenizer.convert_tokens_to_ids(PAD)}
    ids = ids_of(made, ChatProcessor(made).render(WITH_IMAGES).replace(PAD, expansion))
    whole = label(made, WITH_IMAGES, ids, media)
    assert supervised_text(made, whole) == ANSWERS
    assert not media & set(whole)
    for length in range(len(ids)):
        assert label(made, WITH_IMAGES, ids[:length], media) == whole[:length]


@pytest.mark.parametrize("pad", ["<|endoftext|>", "<|im_end|>"])
def test_padding_is_not_supervised_on_either_side(pad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ChatStub()
    number = made.tokenizer.convert_tokens_to_ids(pad)
    monkeypatch.setattr(type(made.tokenizer), "pad_token_id", number, raising=False)
    ids, whole = ids_of(made, ChatProcessor(made).render(TURNS)), label(made, TURNS)
    none, more = [IGNORE_INDEX] * 5, [number] * 5
    assert label(made, TURNS, more + ids) == none + whole
    assert label(made, TURNS, ids + more) == whole + none


def test_padding_with_the_stop_token_does_not_hide_where_answers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    # The template's only special token is the one that padding repeats, and an image moves the answer.
    made = ChatStub(TEMPLATES["smolvlm"].replace("<|im_start|>", ""), name="smolvlm")
    stop, image = (made.tokenizer.convert_tokens_to_ids(t) for t in ("<end_of_utterance>", "<image>"))
    monkeypatch.setattr(type(made.tokenizer), "pad_token_id", stop, raising=False)
    turns = [{"role": "user", "content": [{"type": "image"}]}, *turns_of(("assistant", "A cat."))]
    ids = ids_of(made, ChatProcessor(made).render(turns).replace("<image>", "<image>" * 9))
    whole = label(made, turns, ids, {image})
    assert supervised_text(made, whole) == [" A cat.<end_of_utterance>"]
    none, more = [IGNORE_INDEX] * 5, [stop] * 5
    assert label(made, turns, more + ids, {image}) == none + whole
    assert label(made, turns, ids + more, {image}) == whole + none


@pytest.mark.parametrize(
    "template", [QWEN, chatml(generation=True, image="<|vision_start|><|image_pad|><|vision_end|>")]
)
@pytest.mark.parametrize("tokens", [1, 5])
def test_media_in_an_answer_are_not_supervised(template: str, tokens: int) -> None:
    made = ChatStub(template)
    media = {made.tokenizer.convert_tokens_to_ids(PAD)}
    shows = [{"type": "text", "text": "Look: "}, {"type": "image"}, {"type": "text", "text": "nice."}]
    turns = [*turns_of(("user", "Draw.")), {"role": "assistant", "content": shows}]
    ids = ids_of(made, ChatProcessor(made).render(turns).replace(PAD, PAD * tokens))
    labels = label(made, turns, ids, media)
    assert not media & set(labels)
    text = "".join(supervised_text(made, labels))
    assert text.replace("<|vision_start|>", "").replace("<|vision_end|>", "") == "Look: nice.<|im_end|>"


def test_a_beginning_of_text_token_that_the_processor_added_is_counted() -> None:
    made = ChatStub("{% for m in messages %}{{ m['role'] }}: {{ m['content'][0]['text'] }}\n{% endfor %}")
    made.tokenizer = tokenizer("gemma3")
    turns = turns_of(("user", "Hm?"), ("assistant", "A cat."))
    ids = list(made.tokenizer(ChatProcessor(made).render(turns))["input_ids"])
    assert ids[0] == made.tokenizer.bos_token_id
    assert supervised_text(made, label(made, turns, ids)) == [" A cat.\n"]


@pytest.mark.parametrize(
    "other",
    [
        turns_of(("user", "Who are you?"), ("assistant", "A dog.")),
        turns_of(("user", "Who are you?"), ("user", "Now?"), ("assistant", "The dog.")),
        turns_of(("assistant", "Hello?"), ("user", "Who are you?"), ("assistant", "A cat.")),
    ],
)
def test_ids_of_another_conversation_are_rejected(other: Any) -> None:
    ids = ids_of(ChatStub(), ChatProcessor(ChatStub()).render(other))
    with pytest.raises(CannotAlign):
        label(ChatStub(), TURNS, ids)


def test_what_a_hook_puts_after_the_marker_is_not_supervised() -> None:
    made = ChatStub(TEMPLATES["gemma4"], name="gemma4")
    turns = turns_of(
        ("user", "Hm?"), ("assistant", "A cat."), ("user", "<|turn>model\n"), ("assistant", "Yes")
    )
    text = ChatProcessor(made).render(turns)
    thought = "<|channel>thought\n<channel|>"
    ids = ids_of(made, text.replace("<|turn>model\n", "<|turn>model\n" + thought))
    assert supervised_text(made, label(made, turns, ids)) == ["A cat.<turn|>", "Yes<turn|>"]


@pytest.mark.parametrize(
    ("name", "opening", "stop"),
    [
        *(
            (name, "<|im_start|>assistant\n", "<|im_end|>")
            for name in ("qwen2_vl", "internvl", "nemotron_omni")
        ),
        ("kimi_vl", "<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
        ("kimi_k25", "<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
        ("gemma3", "<start_of_turn>model\n", "<end_of_turn>"),
        ("gemma4", "<|turn>model\n", "<turn|>"),
        ("smolvlm", "Assistant:", "<end_of_utterance>"),
        ("phi4_mm", "<|assistant|>", "<|end|>"),
    ],
)
def test_turn_markers_are_those_of_the_template(name: str, opening: str, stop: str) -> None:
    made = ChatStub(TEMPLATES[name], name=name)
    markers = ChatProcessor(made).turn_markers
    assert made.tokenizer.decode(markers.assistant) == opening
    assert made.tokenizer.decode([markers.stop]) == stop == markers.stop_text


def test_turn_markers_are_found_once() -> None:
    class Counting(ChatStub):
        rendered = 0

        def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
            Counting.rendered += 1
            return super().apply_chat_template(conversation, **options)

    gemma = ChatProcessor(Counting(TEMPLATES["gemma3"], name="gemma3"))
    assert gemma.turn_markers is gemma.turn_markers
    assert Counting.rendered == 1


def test_a_template_without_a_stop_token_has_none() -> None:
    made = ChatStub("{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}")
    markers = ChatProcessor(made).turn_markers
    assert markers == TurnMarkers(tuple(ids_of(made, "\n[assistant]")), None, "\n[assistant]", "\n")


def test_an_end_of_turn_that_is_no_special_token_is_supervised_as_the_template_writes_it() -> None:
    template = (
        "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}\n### END\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant:\n{% endif %}"
    )
    made = ChatStub(template)
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A cat."}] * 2
    assert supervised_text(made, label(made, turns)) == ["A cat.\n### END"] * 2


def test_an_end_of_turn_of_several_tokens_is_supervised_up_to_its_special_token() -> None:
    made = ChatStub(
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}(done)<|im_end|>\n{% endfor %}"
    )
    answers = [{"role": "assistant", "content": text} for text in ("A cat.", "Me.")]
    question = {"role": "user", "content": "Who?"}
    turns = [question, answers[0], question, answers[1]]
    assert supervised_text(made, label(made, turns)) == ["A cat.(done)<|im_end|>", "Me.(done)<|im_end|>"]


def test_what_the_generation_prompt_has_is_not_supervised() -> None:
    asks = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
    made = ChatStub(THINKING + asks)
    turns = turns_of(("user", "Who?"), ("assistant", "Me."), ("user", "Who?"), ("assistant", "A cat."))
    assert supervised_text(made, label(made, turns)) == ["Me.<|im_end|>", "A cat.<|im_end|>"]


def test_a_processor_without_a_template_has_no_markers() -> None:
    class Mute:
        pass

    mute: Any = Mute()
    mute.tokenizer = tokenizer("nemotron_parse")
    with pytest.raises(CannotAlign, match="Mute has no chat template"):
        _ = ChatProcessor(mute).turn_markers


def test_tokens_are_shifted_once_and_nothing_else() -> None:
    sample = {
        "input_ids": torch.arange(5),
        "attention_mask": torch.ones(5),
        "mm_token_type_ids": torch.zeros(5),
        "labels": torch.arange(10, 15),
        "position_ids": torch.arange(5),
        "pixel_values": torch.zeros(5, 5),
    }
    shifted = shift_tokens(sample)
    assert shifted["input_ids"].tolist() == [0, 1, 2, 3]
    assert shifted["labels"].tolist() == [11, 12, 13, 14]
    lengths = {key: value.shape for key, value in shifted.items()}
    assert lengths.pop("pixel_values") == (5, 5)
    assert set(lengths.values()) == {(4,)}
    assert sample["input_ids"].shape == (5,)


def test_a_batch_is_shifted_along_its_last_axis() -> None:
    batch = {
        "input_ids": torch.zeros(2, 6),
        "labels": torch.zeros(2, 6),
        "position_ids": torch.zeros(3, 2, 6),
    }
    shapes = {key: tuple(value.shape) for key, value in shift_tokens(batch).items()}
    assert shapes == {"input_ids": (2, 5), "labels": (2, 5), "position_ids": (3, 2, 5)}


@pytest.mark.parametrize(
    ("batch", "setting", "value"),
    [
        ({"input_ids": torch.zeros(4)}, "labels", None),
        ({"labels": torch.zeros(4), "input_ids": torch.zeros(5)}, "input_ids", (5,)),
        (
            {"labels": torch.zeros(1, 4), "attention_mask": torch.zeros(1, 1, 4, 4)},
            "attention_mask",
            (1, 1, 4, 4),
        ),
    ],
)
def test_what_cannot_be_shifted_is_rejected(batch: Any, setting: str, value: Any) -> None:
    with raises_config(setting, value):
        shift_tokens(batch)


PIECES = [
    *(
        "the cat",
        " sat",
        "A. ",
        "\n",
        "\n\n",
        " ",
        "12",
        "é",
        "猫",
        "\U0001f63a",
        "\u200d",
        "{{ x }}",
        "assistant\n",
    ),
    *("<|im_start|>", "<|im_end|>", "<start_of_turn>model\n", "<end_of_turn>", "<|turn>model\n", "<turn|>"),
    *("<end_of_utterance>", "Assistant: ", "User:", "<|assistant|>", "<|end|>", "<|im_middle|>", "<bos>"),
]
WORDS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
ROLES = st.sampled_from(["user", "assistant", "assistant", "tool"])


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(ROLES, WORDS), min_size=1, max_size=6))
def test_labels_always_read_as_the_answers(name: str, turns: list[tuple[str, str]]) -> None:
    made = ChatStub(TEMPLATES[name], name=name)
    stop = ChatProcessor(made).turn_markers.stop_text
    assert stop in TOKEN_SETS[name].more or stop == TOKEN_SETS[name].eos
    answers = [text for role, text in turns if role == "assistant"]
    if name in ("gemma3", "gemma4"):
        answers = [text.strip() for text in answers]
    found = supervised_text(made, label(made, turns_of(*turns)))
    assert len(found) == len(answers)
    for text, answer in zip(found, answers, strict=True):
        whole = answer + stop
        if name == "smolvlm":  # its generation prompt has no blank, an answer has one
            whole = " " + whole
        # The newline that ends a marker may be part of the answer's first token, which is then no label.
        assert whole.endswith(text)
        assert not whole.removesuffix(text).strip()


CONTENTS = st.one_of(
    WORDS,
    st.lists(
        WORDS.map(lambda text: {"type": "text", "text": text}) | st.just({"type": "image"}),
        min_size=1,
        max_size=3,
    ),
)


@pytest.mark.parametrize("name", [*sorted(TEMPLATES), "thinking", "shouting"])
@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.lists(st.tuples(ROLES, CONTENTS), min_size=1, max_size=4), min_size=1, max_size=3))
def test_spans_by_the_cached_template_text_are_those_of_rendering_the_row_again(name: str, rows: Any) -> None:
    """Passing ``render`` renders every row with its own sentinels."""
    changing = {"thinking": THINKING, "shouting": SHOUTING}
    made = ChatStub({**TEMPLATES, **changing}[name], name="qwen2_vl" if name in changing else name)
    chat = ChatProcessor(made)
    for row in rows:
        turns = [{"role": role, "content": content} for role, content in row]
        try:
            text = chat.render(turns)
        except template_errors():
            continue
        try:
            expected = answer_spans(chat, turns, text, render=chat.render)
        except CannotAlign:
            with pytest.raises(CannotAlign):
                answer_spans(chat, turns, text)
        else:
            assert answer_spans(chat, turns, text) == expected


def test_the_longest_special_token_at_a_position_is_found() -> None:
    pattern = compile_tokens(["<i>", "<i><i>", "a.b"])
    assert pattern.findall("<i><i><i>a.b axb") == ["<i><i>", "<i>", "a.b"]
    assert compile_tokens([]).search("<i>") is None
