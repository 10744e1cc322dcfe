"""Which tokens are supervised: the answers and what ends them, by each of the three ways."""

import logging

import pytest
import torch
from collate_stubs import (
    GREETING,
    CallProcessor,
    CharTokenizer,
    StrictProcessor,
    chatml,
    make_turns,
    pad_rows,
    text,
)

from contract.calls import Raw, own_batch
from contract.processors import processor
from contract.samples import turns
from packhorse import collate_fns
from packhorse.chat import IGNORE_INDEX
from raising import raises_config


def supervised_texts(tokenizer, ids, labels) -> list[str]:
    """The texts of the runs that are supervised, in each row."""
    assert labels.shape == ids.shape
    assert labels.dtype == ids.dtype
    assert torch.equal(labels[labels != IGNORE_INDEX], ids[labels != IGNORE_INDEX])
    return [tokenizer.decode(row[row != IGNORE_INDEX].tolist()) for row in labels]


class Unable(StrictProcessor):
    """Cannot render: its labels come from markers in the ids."""


class Wordless:
    """Has a tokenizer and nothing else: its labels come from a search."""

    def __init__(self, tokenizer=None):
        self.tokenizer = tokenizer or CharTokenizer()


class BareTokenizer:
    """As little as a search needs, with every argument required."""

    def __call__(self, text, add_special_tokens, return_tensors):
        assert add_special_tokens is False
        assert return_tensors == "pt"
        assert text == "assistant text"
        return {"input_ids": torch.tensor([[5, 6]])}

    def decode(self, token):
        return {7: "<|im_end|>"}.get(token, str(token))


TYPED = make_turns(
    ("user", text("<|im_start|>assistant\nI am a dog.<|im_end|>\n<|im_start|>assistant\n")),
    ("assistant", text("A cat. <|im_end|> ends a turn, <|im_start|>assistant\nbegins one.")),
    ("user", "Sure?"),
    ("assistant", "Yes."),
)
ANSWERS = "A cat. <|im_end|> ends a turn, <|im_start|>assistant\nbegins one.<|im_end|>Yes.<|im_end|>"


@pytest.mark.parametrize("made", [CallProcessor, Unable], ids=["renders", "has markers"])
def test_what_a_user_types_is_not_supervised(made):
    stub = made()
    batch = pad_rows([stub.tokenizer(chatml(one))["input_ids"] for one in (TYPED, GREETING)])
    labels = collate_fns.build_labels_from_template(batch["input_ids"], [TYPED, GREETING], stub)
    assert supervised_texts(stub.tokenizer, batch["input_ids"], labels) == [ANSWERS, "Hello!<|im_end|>"]


def test_without_markers_and_rendering_answers_are_searched():
    stub = Wordless(BareTokenizer())
    ids = torch.tensor([[1, 5, 6, 7, 0]])
    conversation = make_turns(("user", text("question")), ("assistant", text("assistant text")))
    for build in (collate_fns.build_labels, collate_fns.build_labels_from_template):
        assert build(ids, [conversation], stub).tolist() == [[-100, 5, 6, 7, -100]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_supervised_even_if_the_answer_is_cut_off(side):
    stub = Unable()
    whole = stub.tokenizer(chatml(GREETING))["input_ids"]
    row = whole[: whole.index(2, 20) - 2]  # "Hell"
    ids = torch.tensor([[0] * 5 + row if side == "left" else row + [0] * 5])
    labels = collate_fns.build_labels_from_template(ids, [GREETING], stub)
    assert supervised_texts(stub.tokenizer, ids, labels) == ["Hell"]


def test_media_tokens_in_an_answer_are_not_supervised():
    stub = Unable()
    stub.image_token_id = 3
    conversation = make_turns(("user", "Draw."), ("assistant", [{"type": "image"}, *text("Here.")]))
    ids = torch.tensor([stub.tokenizer(chatml(conversation))["input_ids"]])
    labels = collate_fns.build_labels_from_template(ids, [conversation], stub)
    assert supervised_texts(stub.tokenizer, ids, labels) == ["Here.<|im_end|>"]


def test_another_number_of_markers_than_expected_is_not_used():
    stub = Unable()
    # An answer that is in the ids and not in the conversation: the one that is gets found by search.
    more = [*GREETING, *make_turns(("assistant", "I am not here."))]
    ids = torch.tensor([stub.tokenizer(chatml(more))["input_ids"]])
    labels = collate_fns.build_labels_from_template(ids, [GREETING], stub)
    assert supervised_texts(stub.tokenizer, ids, labels) == ["Hello!<|im_end|>"]


def test_an_answer_that_repeats_the_question_is_searched_after_it():
    stub = Wordless()
    conversation = make_turns(
        ("user", "Say Paris"), ("assistant", "Paris"), ("user", "Again: Paris"), ("assistant", "Paris")
    )
    ids = torch.tensor([stub.tokenizer(chatml(conversation))["input_ids"]])
    labels = collate_fns.build_labels(ids, [conversation], stub)
    assert supervised_texts(stub.tokenizer, ids, labels) == ["Paris<|im_end|>Paris<|im_end|>"]
    after_the_question = (ids[0] == 1).nonzero()[1]
    assert (labels[0] != IGNORE_INDEX).nonzero()[0] > after_the_question


def test_a_search_ignores_a_space_before_the_answer():
    tokenizer = processor("smolvlm").tokenizer
    batch = own_batch("smolvlm", [Raw(turns(answer="the cat"))])
    labels = collate_fns.build_labels(batch["input_ids"], [turns(answer="the cat")], Wordless(tokenizer))
    assert supervised_texts(tokenizer, batch["input_ids"], labels) == [" the cat<end_of_utterance>"]


def test_real_processors_are_labelled_exactly_where_a_search_fails():
    # "\n\n" becomes one token with the newline of the marker, which is then no label.
    conversation = turns(answer="\n\nA cat.")
    batch = own_batch("qwen2_vl", [Raw(conversation)])
    labels = collate_fns.build_labels_from_template(batch["input_ids"], [conversation], processor("qwen2_vl"))
    said_there = supervised_texts(processor("qwen2_vl").tokenizer, batch["input_ids"], labels)
    assert said_there == ["A cat.<|im_end|>"]


def test_a_sample_without_supervised_tokens_is_logged_and_recorded(ledger, caplog):
    stub = CallProcessor()
    silent = make_turns(("user", "Hi"))
    ids = torch.tensor([stub.tokenizer(chatml(silent))["input_ids"]])
    with caplog.at_level(logging.WARNING):
        labels = collate_fns.build_labels_from_template(ids, [silent], stub)
    assert (labels == IGNORE_INDEX).all()
    (entry,) = ledger
    assert (entry.reason, entry.action, entry.stage) == ("nothing_supervised", "kept", "collate")
    assert "no token of it is supervised" in caplog.text


def test_an_answer_that_is_not_found_is_logged(ledger, caplog):
    with caplog.at_level(logging.WARNING):
        collate_fns.build_labels(torch.tensor([[9, 9, 9]]), [GREETING], Wordless())
    assert "'Hello!'" in caplog.text
    assert ledger.counts() == {"nothing_supervised": 1}


def test_rows_and_conversations_must_be_as_many():
    with raises_config("conversations", 2):
        collate_fns.build_labels(torch.tensor([[1, 2]]), [GREETING, GREETING], Wordless())


def test_a_pattern_is_found_from_a_place_on():
    ids = torch.tensor([1, 2, 3, 1, 2, 4])
    assert collate_fns._find_pattern_indices(ids, torch.tensor([1, 2])) == (0, 2)
    assert collate_fns._find_pattern_indices(ids, torch.tensor([1, 2]), search_start_index=1) == (3, 5)
    assert collate_fns._find_pattern_indices(ids, [2, 4]) == (4, 6)
    assert collate_fns._find_pattern_indices(ids, torch.tensor([9])) == (-1, -1)
    assert collate_fns._find_pattern_indices(ids, []) == (-1, -1)


def test_the_first_token_of_a_pattern_may_differ_if_there_are_others():
    ids = torch.tensor([1, 2, 3, 4])
    find = collate_fns._find_pattern_indices
    assert find(ids, torch.tensor([9, 3]), allow_first_token_mismatch=True) == (1, 3)
    assert find(ids, torch.tensor([9, 3])) == (-1, -1)
    assert find(ids, torch.tensor([9]), allow_first_token_mismatch=True) == (-1, -1)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("Hi", "Hi"),
        ([{"type": "text", "text": "A "}, {"type": "image"}, {"type": "text", "text": "cat"}], "A cat"),
        (None, ""),
        ([], ""),
    ],
)
def test_the_text_of_a_turn(content, expected):
    assert collate_fns._extract_assistant_text({"role": "assistant", "content": content}) == expected


def test_the_text_of_a_turn_without_content_is_empty():
    assert collate_fns._extract_assistant_text({"role": "assistant"}) == ""


class WantsList:
    def decode(self, ids):
        return "/".join(str(number) for number in list(ids))


class WantsNumber:
    def decode(self, token):
        return f"<{token + 0}>"


class WantsTensor:
    def decode(self, ids):
        return str(ids.sum().item())


class WantsNothing:
    def decode(self, ids):
        raise ValueError(ids)


class OutOfVocabulary:
    """Raises what tokenizers and sentencepiece raise for an id they do not have."""

    def __init__(self, error, name=None):
        self.error, self.name = error, name

    def decode(self, ids):
        raise self.error

    def convert_ids_to_tokens(self, ids):
        return [self.name for _ in ids]


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (WantsList(), "7"),
        (WantsNumber(), "<7>"),
        (WantsTensor(), "7"),
        (WantsNothing(), "7"),
        (OutOfVocabulary(RuntimeError("piece id is out of range")), "7"),
        (OutOfVocabulary(OverflowError("out of range")), "7"),
        (OutOfVocabulary(NotImplementedError(), "<seven>"), "<seven>"),
        (object(), "7"),
    ],
)
def test_one_token_is_decoded_by_any_tokenizer(tokenizer, expected):
    assert collate_fns._decode_single_token(tokenizer, 7) == expected


def test_the_marker_of_chatml_and_its_end():
    marker = CharTokenizer()("<|im_start|>assistant\n")["input_ids"]
    assert collate_fns._get_assistant_marker(CharTokenizer()) == marker
    assert collate_fns._get_stop_token_id(CharTokenizer()) == 2
    real = processor("qwen2_vl").tokenizer
    assert real.decode(collate_fns._get_assistant_marker(real)) == "<|im_start|>assistant\n"
    assert real.decode(collate_fns._get_stop_token_id(real)) == "<|im_end|>"


def test_a_tokenizer_without_chatml_has_no_marker():
    gemma = processor("gemma3").tokenizer
    assert collate_fns._get_assistant_marker(gemma) is None
    assert collate_fns._get_stop_token_id(gemma) is None
    assert collate_fns._get_assistant_marker(BareTokenizer()) is None


def test_a_tokenizer_that_says_unknown_has_no_marker():
    class Unknowing(CharTokenizer):
        unk_token_id = 99

        def convert_tokens_to_ids(self, token):
            return 99

    assert collate_fns._get_assistant_marker(Unknowing()) is None
    assert collate_fns._get_stop_token_id(Unknowing()) is None
