"""The counter's numbers are the processor's: every family, every case, on the short and the long way."""

from __future__ import annotations

import copy
import random
from collections import Counter
from functools import cache
from typing import Any
from unittest import mock

import pytest
from tokenizers import Regex
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from contract.cases import CASES, conversation, takes
from contract.chat_templates import chatml
from contract.processors import FAMILIES, build, processor
from packhorse.chat import IGNORE_INDEX
from packhorse.count.token_counter import QWEN2_PATTERN, Counted, TokenCounter
from packhorse.errors import BadSample
from packhorse.families import Encoder
from packhorse.formats.conversation import parse_conversation
from packhorse.types import Conversation, Message, TextPart

EVERY = tuple(FAMILIES)
ASKED = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
# Families whose real tokenizers cut texts by the pattern of Qwen2; the small ones of the tests are made to.
BY_WORD = (
    *(name for name in EVERY if name.startswith("qwen")),
    *("llava_onevision", "internvl", "nemotron_omni"),
)
WORDS = (
    *("the cat carries a heavy bag over", "the pass", "don't", "it's 12:45", "naïve", "漢字", "\U0001f63a"),
    *(
        "\n",
        "\n\n",
        " \n",
        "\t",
        "  ",
        "...",
        "x = [1, 2]",
        "'LL",
        "e\u0301",
        "\u3000",
        "\r\n",
        "-",
        "1234567",
    ),
    *("</s>", ""),
)


def counter_of(name: str) -> TokenCounter:
    made = processor(name)
    return TokenCounter(Encoder(made))


@cache
def cutting_by_pattern(name: str) -> Any:
    """The family's processor with a tokenizer that cuts as the real one does."""
    made = build(name)
    made.tokenizer = copy.deepcopy(made.tokenizer)  # processors of one family share theirs
    engine = made.tokenizer._tokenizer
    cut = Split(Regex(QWEN2_PATTERN), "isolated")
    engine.pre_tokenizer = Sequence([cut, ByteLevel(add_prefix_space=False, use_regex=False)])
    engine.normalizer = NFC()
    return made


def real(name: str, asked: Conversation, made: Any = None) -> tuple[int, int, Counter[str]] | str:
    """Length, supervised tokens and number of media of the real encoding, or the reason why there is none."""
    made = made or processor(name)
    encoder = Encoder(made)
    try:
        encoded = encoder.encode(asked)
    except BadSample as error:
        return error.reason
    labels = encoder.labels(encoded)
    media = Counter(kind for kind, _ in encoded.sizes)
    return len(encoded.tokens["input_ids"]), int((labels != IGNORE_INDEX).sum()), media


def summary(result: Counted | BadSample) -> tuple[int, int, Counter[str]] | str:
    if isinstance(result, BadSample):
        return result.reason
    count = result.count
    numbers = {"image": count.images, "video": count.videos, "audio": count.audios}
    return count.total, count.supervised, +Counter(numbers)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", EVERY)
def test_every_case_is_counted_as_it_is_encoded(name, case, files):
    asked = parse_conversation({"conversation": conversation(name, case, files)}, "row/7")
    (result,) = counter_of(name).count_many([asked])
    if not takes(name, case):
        assert isinstance(result, BadSample)
        assert (result.reason, result.key) == ("media_mismatch", "row/7")
        return
    assert summary(result) == real(name, asked)


@pytest.mark.parametrize("owner", ["processor", "tokenizer"])
@pytest.mark.parametrize("name", ["qwen2_vl", "llava_onevision", "smolvlm"])
def test_a_template_that_is_set_later_is_used_for_counting_and_for_labels(name, owner, files):
    made = build(name)
    if owner == "tokenizer":
        template, made = made.chat_template, copy.deepcopy(made.tokenizer)
        made.chat_template = template
    asked = parse_conversation({"conversation": conversation(name, "text", files)}, "row/7")
    encoder = Encoder(made)
    counter = TokenCounter(encoder)
    before, settings = summary(counter.count(asked)), counter.settings()
    encoder.label_sample(encoder.encode(asked), "row/7")
    end = "<end_of_utterance>" if name == "smolvlm" else "<|im_end|>"
    made.chat_template = made.chat_template.replace(end, "<|endoftext|>!")
    after = summary(counter.count(asked))
    assert after == real(name, asked, made)
    assert after != before
    assert counter.settings() != settings
    labels = encoder.label_sample(encoder.encode(asked), "row/7").labels
    assert labels is not None
    supervised = labels[labels != IGNORE_INDEX].tolist()
    assert (len(supervised), supervised[-1]) == (after[1], encoder.special_tokens["<|endoftext|>"])


@pytest.mark.parametrize("name", EVERY)
def test_media_tokens_are_counted_by_kind(name, files):
    kinds = sorted(FAMILIES[name].modalities)
    for kind, case in (("image", "one image"), ("video", "video"), ("audio", "audio")):
        if kind not in kinds:
            continue
        asked = parse_conversation({"conversation": conversation(name, case, files)})
        one = counter_of(name).count(asked)
        made = processor(name)
        ids = Encoder(made).encode(asked).tokens["input_ids"].tolist()
        content = sum(token in Encoder(made).media_token_ids for token in ids)
        assert {k: getattr(one.count, k) for k in ("image", "video", "audio")} == {
            **dict.fromkeys(("image", "video", "audio"), 0),
            kind: content,
        }
        assert one.count.text == len(ids) - content
        assert one.count.exact
        assert one.count.patches == sum(media_item.patches for media_item in one.media)
        assert (one.count.patches > 0) == (kind != "audio")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", BY_WORD)
def test_every_case_is_counted_as_it_is_encoded_by_a_tokenizer_with_a_known_pattern(name, case, files):
    if not takes(name, case):
        return
    made = cutting_by_pattern(name)
    asked = parse_conversation({"conversation": conversation(name, case, files)}, "row/7")
    expected = real(name, asked, made)
    assert list(map(summary, TokenCounter(Encoder(made)).count_many([asked] * 3))) == [expected] * 3


@pytest.mark.parametrize("name", BY_WORD)
def test_random_texts_are_counted_as_they_are_encoded_by_a_tokenizer_with_a_known_pattern(name):
    made = cutting_by_pattern(name)
    counter = TokenCounter(Encoder(made))
    asked = random_texts(name)
    with mock.patch.object(TokenCounter, "_tokenize", return_value="long") as long_way:
        results = counter.count_many(asked)
    short = [(one, result) for one, result in zip(asked, results, strict=True) if result != "long"]
    assert len(short) + long_way.call_count == len(asked)
    assert len(short) > 20  # the others have an answer that begins with white space
    for one, result in short:
        assert summary(result) == real(name, one, made), one


def random_texts(seed: str) -> list[Conversation]:
    draw = random.Random(seed)
    asked = []
    for _ in range(60):
        roles = ["system"] * draw.randint(0, 1) + ["user", "assistant"] * draw.randint(1, 3)
        texts = ["".join(draw.choice(WORDS) + draw.choice(["", " "]) for _ in range(8)) for _ in roles]
        messages = (Message(role, (TextPart(text),)) for role, text in zip(roles, texts, strict=True))
        asked.append(Conversation(tuple(messages)))
    return asked


@pytest.mark.parametrize("name", EVERY)
def test_random_texts_are_counted_as_they_are_encoded(name):
    counter = counter_of(name)
    asked = random_texts(name)
    for one, result in zip(asked, counter.count_many(asked), strict=True):
        expected = real(name, one)
        assert summary(result) == expected, one
    # The same, each on the long way.
    with mock.patch.object(TokenCounter, "_split", return_value=None):
        again = counter_of(name).count_many(asked)
    assert list(map(summary, again)) == list(map(summary, counter.count_many(asked)))


def test_most_conversations_go_the_short_way_with_a_tokenizer_that_cuts_by_a_known_pattern():
    made = cutting_by_pattern("qwen2_vl")
    counter = TokenCounter(Encoder(made))
    said = [Message("user", (TextPart("What is it?"),)), Message("assistant", (TextPart("A cat."),))]
    with mock.patch.object(TokenCounter, "_tokenize", side_effect=AssertionError):
        assert counter.count(Conversation(tuple(said))).count.supervised == 4


@pytest.mark.parametrize(
    "body",
    [
        "{{ p.text | trim }}",
        "{% if 'cat' in p.text %}seen: {% endif %}{{ p.text }}",
        "{{ p.text }}{% if m.role == 'user' %}{{ p.text }}{% endif %}",
        "{% if m.role == 'assistant' %}{{ p.text }}{% endif %}",
    ],
)
def test_a_template_that_changes_repeats_or_drops_texts_is_counted_as_it_is_encoded(body):
    made = copy.copy(cutting_by_pattern("qwen2_vl"))
    made.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% for p in m.content %}BODY{% endfor %}<|im_end|>\n{% endfor %}"
    ).replace("BODY", body)
    rows = [
        Conversation((Message("user", (TextPart(question),)), Message("assistant", (TextPart(answer),))))
        for question, answer in (
            ("What is it?", "A cat."),
            ("  Where is the cat? ", " Here. "),
            ("Why?", "So."),
        )
    ]
    counter = TokenCounter(Encoder(made))
    assert list(map(summary, counter.count_many(rows))) == [real("qwen2_vl", row, made) for row in rows]


@pytest.mark.parametrize("texts", [("<|image_", "pad|> hi"), ("<|im_", "end|>"), ("a <|image_pad|>",)])
def test_a_special_token_spread_over_parts_is_seen(texts):
    made = cutting_by_pattern("qwen2_vl")
    counter = TokenCounter(Encoder(made))
    asked = Message("user", tuple(map(TextPart, texts)))
    plain = Message("user", tuple(TextPart("hi there") for _ in texts))
    answer = Message("assistant", (TextPart("A cat."),))
    rows = [Conversation((one, answer)) for one in (plain, plain, plain, asked)]
    assert list(map(summary, counter.count_many(rows))) == [real("qwen2_vl", row, made) for row in rows]


def test_settings_do_not_depend_on_the_last_call_of_the_tokenizer():
    made = build("qwen2_vl")
    settings = TokenCounter(Encoder(made)).settings()
    made.tokenizer(["a", "a cat sleeps"], padding=True, truncation=True, max_length=3)
    assert TokenCounter(Encoder(made)).settings() == settings


def test_settings_of_a_processor_that_cannot_describe_itself_are_those_of_its_parts():
    made = build("kimi_vl")
    settings = TokenCounter(Encoder(made)).settings()
    made.image_processor.in_token_limit = 7
    assert TokenCounter(Encoder(made)).settings() != settings


def test_fields_of_a_turn_next_to_its_content_are_counted_too():
    made = build("qwen2_vl")
    made.chat_template = made.chat_template.replace(
        "{{ message['role'] }}",
        "{{ message['role'] }}{{ message.get('mood', '') }}",
    )
    counter = TokenCounter(Encoder(made))
    plain = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A cat."}]
    moody = [{**plain[0], "mood": "angry, very angry"}, plain[1]]
    asked = [parse_conversation({"conversation": turns}) for turns in (plain, moody, plain)]
    results = counter.count_many(asked)
    assert list(map(summary, results)) == [real("qwen2_vl", one, made) for one in asked]
    assert summary(results[0]) != summary(results[1])


def test_no_conversations_and_an_empty_one():
    counter = counter_of("qwen2_vl")
    assert counter.count_many([]) == []
    (result,) = counter.count_many([Conversation((), "row/0")])
    assert isinstance(result, BadSample)
    assert (result.reason, result.key) == ("empty_conversation", "row/0")


def test_settings_know_every_template_of_a_processor_that_has_several(tmp_path):
    from transformers import AutoProcessor

    made = build("qwen2_vl")
    plain = made.chat_template
    assert TokenCounter(Encoder(made)).settings()["template"] == plain  # count files of before stay valid
    made.chat_template = {"default": plain, "tool_use": plain + " tools"}
    made.save_pretrained(tmp_path)
    assert (tmp_path / "additional_chat_templates" / "tool_use.jinja").is_file()
    made = AutoProcessor.from_pretrained(tmp_path)
    made.image_processor = build("qwen2_vl").image_processor
    asked = parse_conversation({"conversation": ASKED})
    counter = TokenCounter(Encoder(made))
    before, settings = summary(counter.count(asked)), counter.settings()
    made.chat_template["default"] = plain.replace("<|im_end|>", "<|endoftext|>!")
    after = counter.settings()
    assert summary(counter.count(asked)) == real("qwen2_vl", asked, made) != before
    assert after != settings
    made.chat_template["tool_use"] = "another"
    assert counter.settings() not in (settings, after)


def test_generation_marks_in_the_default_of_several_templates_are_the_labels():
    made = build("qwen2_vl")
    every = chatml(generation=True, image="<|image_pad|>")
    last = every.replace("== 'assistant' %}{% gen", "== 'assistant' and loop.last %}{% gen")
    assert last != every
    asked = parse_conversation({"conversation": 2 * ASKED})
    labels = []
    for template in (every, last, {"default": last, "other": every}):
        made.chat_template = template
        encoder = Encoder(made)
        labels.append(encoder.label_sample(encoder.encode(asked), "row/0").labels.tolist())
    assert labels[0] != labels[1] == labels[2]


def test_settings_know_the_tokenizer_the_template_and_the_budget_of_pixels_but_no_folder(tmp_path):
    from transformers import AutoProcessor

    made = build("qwen2_vl")
    made.tokenizer = copy.deepcopy(made.tokenizer)  # processors of one family share theirs
    settings = TokenCounter(Encoder(made)).settings()
    made.save_pretrained(tmp_path)
    assert str(tmp_path) not in str(settings)
    again = AutoProcessor.from_pretrained(tmp_path)
    assert TokenCounter(Encoder(again)).settings() == settings
    for change in (
        lambda: setattr(made.image_processor, "size", {"shortest_edge": 56 * 56, "longest_edge": 12345}),
        lambda: setattr(made, "chat_template", made.chat_template + " "),
        lambda: made.tokenizer.add_tokens(["<a new one>"]),
    ):
        change()
        changed = TokenCounter(Encoder(made)).settings()
        assert changed != settings
        settings = changed
