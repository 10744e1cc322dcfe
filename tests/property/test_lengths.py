"""Counting by words gives what the tokenizer gives, whatever the text."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from contract.tiny_tokenizers import use_bytes_of_words
from packhorse.count.token_counter import _KNOWN_PATTERNS, QWEN2_PATTERN, TokenLengths


class Made:
    """A byte-level BPE tokenizer, trained here, that cuts texts by a pattern."""

    def __init__(self, pattern: str) -> None:
        engine = Tokenizer(models.BPE())
        engine.normalizer = normalizers.NFC()
        use_bytes_of_words(engine, pattern)
        known = "the horse carries a bale over the pass while rain\n\n ... don't it's 2024 naïve 漢字 [1]"
        words = known.split(" ")
        draw = random.Random(0)
        lines = [" ".join(draw.choices(words, k=12)) for _ in range(500)]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        engine.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet))
        self._tokenizer = engine


TOKENIZERS = {pattern: Made(pattern) for pattern in sorted(_KNOWN_PATTERNS)}
ODD = st.sampled_from(
    [
        *(" ", "  ", "\n", "\n\n", " \n", "\t", "\r\n", "\r", "\x0b", "\x1c", "\x85", "\xa0", "\u2028"),
        *("\u3000", "the", "horse", "don't", "'S", "'ll", "12", "3", ".", "...", "/", "(", "é", "e\u0301"),
        *("\u0301", "漢字", "\U0001f63a", "\u0131", "\u017f", "²", "Ⅷ", "\u200b", "\ufeff", "ﬁ", "\u212a"),
        "\u1100\u1161",
    ]
)
TEXTS = st.one_of(st.text(max_size=40), st.lists(ODD, max_size=20).map("".join))


@pytest.mark.parametrize("pattern", TOKENIZERS)
@settings(max_examples=400, deadline=None)
@given(texts=st.lists(TEXTS, max_size=6))
def test_lengths_by_words_are_those_of_the_encoded_texts(pattern, texts):
    made = TOKENIZERS[pattern]
    lengths = TokenLengths(made._tokenizer)
    assert lengths.by_word
    assert lengths.lengths(texts) == [len(one) for one in made._tokenizer.encode_batch(texts)]


@pytest.mark.parametrize("pattern", TOKENIZERS)
@settings(max_examples=400, deadline=None)
@given(left=TEXTS, right=TEXTS)
def test_where_a_cut_is_certain_the_parts_are_as_long_as_the_whole(pattern, left, right):
    lengths = TokenLengths(TOKENIZERS[pattern]._tokenizer)
    if lengths.cut_between(left, right):
        parts = lengths.lengths([left, right])
        assert lengths.lengths([left + right]) == [sum(parts)]


def test_a_tokenizer_of_another_kind_encodes_every_text():
    engine = Made(QWEN2_PATTERN)
    texts = ["the horse", " the  horse\n", ""]
    expected = [len(one) for one in engine._tokenizer.encode_batch(texts)]
    for change in (
        lambda e: setattr(e, "normalizer", normalizers.Lowercase()),
        lambda e: setattr(e, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False)),
        lambda e: e.add_tokens(["  "]),
    ):
        engine = Made(QWEN2_PATTERN)
        change(engine._tokenizer)
        lengths = TokenLengths(engine._tokenizer)
        assert not lengths.by_word
        assert lengths.lengths(texts) == [len(one) for one in engine._tokenizer.encode_batch(texts)]
    assert expected == TokenLengths(Made(QWEN2_PATTERN)._tokenizer).lengths(texts)


def test_truncation_and_padding_of_the_tokenizer_do_not_reach_the_counts():
    made = Made(QWEN2_PATTERN)
    made._tokenizer.enable_truncation(2)
    made._tokenizer.enable_padding(length=50)
    texts = ["the horse carries a bale"]
    expected = TokenLengths(Made(QWEN2_PATTERN)._tokenizer).lengths(texts)
    assert TokenLengths(made._tokenizer).lengths(texts) == expected
