"""A token that is written a thousand times in a row is tokenised once, and nothing else changes."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing
from transformers import AddedToken, PreTrainedTokenizerBase

from contract.processors import processor
from contract.samples import make_image
from contract.tiny_tokenizers import TOKEN_SETS, tokenizer
from packhorse.chat import RepeatedTokenTokenizer, repeated_media_tokens, special_tokens, with_repeated_tokens
from packhorse.datasets import PreTokenizedDatasetWrapper
from packhorse.families import Encoder
from packhorse.formats.conversation import parse_conversation

PAD = "<|image_pad|>"


def runs(words: Any, *tokens: str) -> RepeatedTokenTokenizer:
    special = special_tokens(words)
    return RepeatedTokenTokenizer(
        words, repeated_media_tokens(words, frozenset(special[token] for token in tokens))
    )


@given(data=st.data(), name=st.sampled_from(sorted(TOKEN_SETS)), special=st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_text_has_the_tokens_that_the_tokenizer_gives_it(
    data: st.DataObject, name: str, special: bool
) -> None:
    words = tokenizer(name)
    known = sorted(special_tokens(words))
    shortened = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True))
    piece = st.one_of(
        st.sampled_from([" ", "\n", "\n\n", "the cat", ". ", "<|", "|>", "\u4e2d"]),
        st.tuples(st.sampled_from(known), st.integers(1, 40)).map(lambda pair: pair[0] * pair[1]),
    )
    text = "".join(data.draw(st.lists(piece, max_size=12)))
    quick = runs(words, *shortened)
    for options in ({}, {"return_tensors": "pt"}) if text else ({},):
        wanted = words([text], add_special_tokens=special, **options)
        found = quick([text], add_special_tokens=special, **options)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value)), key
    read = quick.read
    if read is None:  # a token that the tokenizer puts around the text, too: they are not distinguishable
        assert special
        assert {words.bos_token, words.eos_token} & {*shortened}
        return
    again = words(read.text, add_special_tokens=special, return_offsets_mapping=True)
    assert (read.ids, list(zip(read.starts, read.ends, strict=True))) == (
        again["input_ids"],
        again["offset_mapping"],
    )


def test_what_it_does_not_understand_the_tokenizer_does_itself() -> None:
    words = tokenizer("qwen2_vl")
    text = "a" + PAD * 30 + "b"
    calls: tuple[tuple[Any, dict[str, Any]], ...] = (
        (text, {}),
        ([text, "c"], {"padding": True}),
        ([text], {"padding": "max_length", "max_length": 40}),
        ([text], {"truncation": True, "max_length": 20}),
        ([text], {"return_offsets_mapping": True}),
        ([text], {"return_tensors": "np"}),
        ([["a", "b"]], {"is_split_into_words": True}),
        (["a"], {"is_split_into_words": True}),
    )
    for texts, options in calls:
        quick = runs(words, PAD)
        wanted, found = words(texts, **options), quick(texts, **options)
        assert quick.read is None, options
        assert {key: str(value) for key, value in found.items()} == {
            key: str(value) for key, value in wanted.items()
        }


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        (["<a>"], ["<a>"]),
        (["<a>", "<a><a>"], ["<a><a>"]),
        (["<a>", "<a><"], []),
        (["<a>", "x<a><b"], []),
        ([AddedToken("<a>", single_word=True)], []),
        ([AddedToken("<a>", normalized=True)], []),
        ([AddedToken("<a>", lstrip=True, rstrip=True, normalized=False)], ["<a>"]),
    ],
)
def test_a_token_that_is_another_one_next_to_its_like_is_not_shortened(
    tokens: list[Any], kept: list[str]
) -> None:
    words = copy.deepcopy(tokenizer("qwen2_vl"))
    words.add_tokens(
        [one if isinstance(one, AddedToken) else AddedToken(one, normalized=False) for one in tokens]
    )
    ids = frozenset(words.convert_tokens_to_ids(["<a>", "<a><a>"])) - {words.unk_token_id}
    assert sorted(repeated_media_tokens(words, ids)) == kept
    made = copy.copy(processor("qwen2_vl"))
    made.tokenizer = words
    quick, sentinel = with_repeated_tokens(made, ids)
    assert (sentinel is None) == (not kept) == (quick is made)
    for text in ("<a>" * 7, "x<a><a><b", " <a> <a><a>\n<a>"):
        assert quick.tokenizer([text])["input_ids"] == words([text])["input_ids"]


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("strip", [False, True])
def test_words_after_a_run_are_cut_as_they_are_after_one_token(scheme: str, strip: bool) -> None:
    words = copy.deepcopy(tokenizer("qwen2_vl"))
    words.backend_tokenizer.pre_tokenizer = Metaspace(prepend_scheme=scheme)
    words.add_tokens([AddedToken("<a>", lstrip=strip, rstrip=strip, normalized=False)])
    quick = runs(words, "<a>")
    for text in ("<a><a><a>the cat", "the <a><a> cat", "the\n<a><a><a> <a>the", "<a><a>"):
        assert quick([text])["input_ids"] == words([text])["input_ids"]
        assert quick.read is not None


def test_runs_that_are_not_found_again_are_left_to_the_tokenizer() -> None:
    words = tokenizer("qwen2_vl")
    wrong = RepeatedTokenTokenizer(words, {"the": special_tokens(words)[PAD]})
    text = "the" * 20
    assert wrong([text])["input_ids"] == words([text])["input_ids"]
    assert wrong.read is None


def test_a_processor_keeps_its_tokenizer() -> None:
    made = processor("qwen2_vl")
    before = made.tokenizer
    quick, sentinel = with_repeated_tokens(made, Encoder(made).media_token_ids)
    assert sentinel is not None
    assert made.tokenizer is before
    assert quick is not made
    assert quick.image_processor is made.image_processor
    assert len(quick.tokenizer) == len(before)
    assert quick.tokenizer.eos_token == before.eos_token


@pytest.mark.parametrize("tool", [object(), tokenizer("qwen2_vl")], ids=["anything", "a tokenizer"])
def test_what_is_no_processor_of_transformers_is_left_alone(tool: Any) -> None:
    assert with_repeated_tokens(tool, frozenset({1})) == (tool, None)


def test_a_sample_is_tokenised_once_and_its_labels_are_those_of_a_second_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = processor("qwen2_vl")
    encoder = Encoder(made)
    parts = [{"type": "image", "image": make_image(200, 150)}, {"type": "text", "text": "What is it?"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "The cat."}]}
    parsed = parse_conversation({"conversation": [{"role": "user", "content": parts}, answer]}, "a/0")
    encoded = encoder.encode(parsed)
    assert encoded.read is not None
    assert encoded.read.text == encoded.text
    assert len(encoded.read.ids) < len(encoded.tokens["input_ids"])
    wanted = encoder.labels(replace(encoded, read=None))
    monkeypatch.setattr("packhorse.chat._tokenize", lambda *_, **__: pytest.fail("a second time"))
    assert torch.equal(encoder.labels(encoded), wanted)
    assert (wanted != -100).any()


@pytest.mark.parametrize("name", ["qwen2_vl", "llava_onevision", "kimi_k25"])
def test_a_token_that_the_tokenizer_puts_after_the_text_is_not_supervised(name: str) -> None:
    made = copy.copy(processor(name))
    made.tokenizer = copy.deepcopy(made.tokenizer)
    end = made.tokenizer.pad_token
    template = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, made.tokenizer.convert_tokens_to_ids(end))]
    )
    made.tokenizer.backend_tokenizer.post_processor = template
    encoder = Encoder(made)
    for length in range(1, 30):
        turns = [("user", "q " * (length % 7 + 1)), ("assistant", "a b c " * length + "end.")]
        example = [{"role": r, "content": [{"type": "text", "text": t}]} for r, t in turns]
        encoded = encoder.encode(parse_conversation({"conversation": example}, "a/0"))
        assert encoded.read is not None
        labels = encoder.labels(encoded)
        assert torch.equal(labels, encoder.labels(replace(encoded, read=None)))
        assert labels[-1] == -100


def test_a_processor_with_a_call_of_its_own_is_given_its_own_tokenizer() -> None:
    class Counting(type(processor("qwen2_vl"))):  # type: ignore[misc]
        seen = 0

        def __call__(self, *args: Any, **options: Any) -> Any:
            self.seen += 1
            assert isinstance(self.tokenizer, PreTrainedTokenizerBase)
            return super().__call__(*args, **options)

    base = processor("qwen2_vl")
    made = Counting(base.image_processor, base.tokenizer, base.video_processor, base.chat_template)
    encoder, original = Encoder(made), Encoder(base)
    example = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A cat."}]
    parsed = parse_conversation({"conversation": example}, "a/0")
    encoded = encoder.encode(parsed)
    assert (made.seen, encoded.read) == (1, None)
    assert torch.equal(encoded.tokens["input_ids"], original.encode(parsed).tokens["input_ids"])


def test_a_processor_that_needs_more_of_its_tokenizer_gets_its_own_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = processor("qwen2_vl")
    encoder = Encoder(made)
    example = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A cat."}]
    parsed = parse_conversation({"conversation": example}, "a/0")
    wanted = encoder.encode(parsed)

    def asks_for_more(self: Any, text: Any, **options: Any) -> Any:
        found = self.tokenizer(text, **options)
        found.char_to_token(0, 0)
        return type(made).__mro__[1].__call__(self, text=text, **options)

    asks_for_more.__module__ = "transformers.models.of_tomorrow"
    monkeypatch.setattr(type(made), "__call__", asks_for_more)
    for _ in range(2):
        assert torch.equal(encoder.encode(parsed).tokens["input_ids"], wanted.tokens["input_ids"])
    warnings = [message for message in caplog.messages if "quicker tokenizer" in message]
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "Qwen2VLProcessor does not work with a quicker tokenizer (ValueError: char_to"
    )


def test_the_tokenizer_can_be_copied_and_pickled() -> None:
    quick = runs(tokenizer("qwen2_vl"), PAD)
    text = ["a" + PAD * 5]
    wanted = quick(text)["input_ids"]
    for other in (copy.copy(quick), copy.deepcopy(quick), pickle.loads(pickle.dumps(quick))):
        assert other(text)["input_ids"] == wanted


def test_labels_are_long_whatever_a_hook_makes_of_the_ids() -> None:
    def shorter(batch: Any, _: Any) -> Any:
        return {**batch, "input_ids": batch["input_ids"].int()}

    example = {
        "conversation": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A cat."}]
    }
    dataset = PreTokenizedDatasetWrapper([example], processor("qwen2_vl"), post_tokenize_hook=shorter)
    assert dataset[0]["labels"].dtype == torch.int64


def test_tokens_of_another_text_are_not_used_for_labels() -> None:
    made = processor("qwen2_vl")
    encoder = Encoder(made)

    def encode_answer(answer: str) -> Any:
        turns = [("user", "Who?"), ("assistant", answer)]
        example = [{"role": r, "content": [{"type": "text", "text": t}]} for r, t in turns]
        return encoder.encode(parse_conversation({"conversation": example}, "a/0"))

    one, other = encode_answer("A cat."), encode_answer("An answer that is longer.")
    assert torch.equal(encoder.labels(replace(one, read=other.read)), encoder.labels(one))
