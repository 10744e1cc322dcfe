"""Gemma 4's thinking prefix: in every answer, seen and not supervised."""

import pytest
import torch

from contract.processors import processor
from contract.samples import make_image, turns
from packhorse.chat import IGNORE_INDEX
from packhorse.collate_fns import (
    _GEMMA4_MODEL_TURN,
    _GEMMA4_THINKING_PREFIX,
    _inject_thinking_prefix_tokens,
    default_collate_fn,
    gemma4_inject_thinking_prefix,
    gemma4_prefix_collate_fn,
)
from packhorse.datasets import PreTokenizedDatasetWrapper
from packhorse.formats.example_media import inject_fake_image
from raising import raises_bad_sample


@pytest.fixture(scope="module")
def tokenizer():
    return processor("gemma4").tokenizer


def ids_of(tokenizer, *texts: str, side: str = "right") -> dict[str, torch.Tensor]:
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    width = max(map(len, rows))

    def fill(row, value):
        padding = [value] * (width - len(row))
        return padding + row if side == "left" else row + padding

    ids = torch.tensor([fill(row, tokenizer.pad_token_id) for row in rows])
    mask = torch.tensor([fill([1] * len(row), 0) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": mask * 2}


ONE = "<|turn>user\nHi<turn|>\n<|turn>model\nHo<turn|>\n"
TWO = ONE + "<|turn>user\nAnd?<turn|>\n<|turn>model\nHe<turn|>\n"
NONE = "<|turn>user\nHi there, you over there, on the other side<turn|>\n"


def with_prefix(text: str) -> str:
    return text.replace(_GEMMA4_MODEL_TURN, _GEMMA4_MODEL_TURN + _GEMMA4_THINKING_PREFIX)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_prefix_stands_after_every_marker(tokenizer, side):
    batch = ids_of(tokenizer, ONE, TWO, NONE, side=side)
    before = {key: value.clone() for key, value in batch.items()}
    made = _inject_thinking_prefix_tokens(batch, tokenizer)
    prefix = len(tokenizer.encode(_GEMMA4_THINKING_PREFIX, add_special_tokens=False))
    assert made["input_ids"].shape[1] == batch["input_ids"].shape[1] + 2 * prefix
    for row, mask, text in zip(made["input_ids"], made["attention_mask"], (ONE, TWO, NONE), strict=True):
        assert tokenizer.decode(row[mask.bool()]) == with_prefix(text)
        assert (row[~mask.bool()] == tokenizer.pad_token_id).all()
        assert mask[0 if side == "right" else -1] == 1
    assert made["mm_token_type_ids"].shape == made["input_ids"].shape
    assert made["mm_token_type_ids"].sum() == before["mm_token_type_ids"].sum()
    assert all(torch.equal(batch[key], before[key]) for key in before)


def test_padding_is_replaced_by_the_prefix(tokenizer):
    batch = ids_of(tokenizer, ONE)
    wide = {key: torch.nn.functional.pad(value, (0, 30)) for key, value in batch.items()}
    wide["input_ids"][:, -30:] = tokenizer.pad_token_id
    made = _inject_thinking_prefix_tokens(wide, tokenizer)
    assert made["input_ids"].shape == wide["input_ids"].shape


def test_a_prefix_that_is_there_is_not_put_in_again(tokenizer):
    batch = ids_of(tokenizer, with_prefix(TWO))
    made = _inject_thinking_prefix_tokens(batch, tokenizer)
    assert torch.equal(made["input_ids"], batch["input_ids"])


def test_other_tensors_are_extended_if_they_are_whole_numbers_per_token(tokenizer):
    batch = ids_of(tokenizer, ONE)
    shape = batch["input_ids"].shape
    batch["stress"], batch["weight"] = torch.full(shape, 5), torch.ones(3, 4)
    made = _inject_thinking_prefix_tokens(batch, tokenizer)
    assert made["stress"].shape == made["input_ids"].shape
    assert made["stress"].sum() == 5 * shape[1]
    assert made["weight"] is batch["weight"]


def test_a_batch_of_ids_alone_is_enough(tokenizer):
    ids = ids_of(tokenizer, ONE)["input_ids"]
    made = _inject_thinking_prefix_tokens({"input_ids": ids}, tokenizer)
    assert tokenizer.decode(made["input_ids"][0]) == with_prefix(ONE)


def example(*answers: str) -> dict:
    return {"conversation": [turn for answer in answers for turn in turns(answer=answer)]}


def test_a_collated_batch_sees_the_prefix_and_learns_the_answers(tokenizer):
    examples = [example("A cat."), example("A dog.", "Two dogs.")]
    examples[0]["conversation"][0]["content"].insert(0, {"type": "image", "image": make_image(64, 48)})
    batch = gemma4_prefix_collate_fn(examples, processor("gemma4"))
    seen = [tokenizer.decode(row) for row in batch["input_ids"]]
    assert [text.count(_GEMMA4_MODEL_TURN + _GEMMA4_THINKING_PREFIX) for text in seen] == [1, 2]
    texts = [tokenizer.decode(row[row != IGNORE_INDEX]) for row in batch["labels"]]
    assert texts == ["A cat.<turn|>", "A dog.<turn|>Two dogs.<turn|>"]
    plain = default_collate_fn(examples, processor("gemma4"))
    assert torch.equal(batch["pixel_values"], plain["pixel_values"])
    assert batch["labels"].shape == batch["input_ids"].shape == batch["mm_token_type_ids"].shape


def test_the_prefix_counts_towards_the_length():
    real, given = processor("gemma4"), [example("A cat."), example("A cat.", "A dog.")]
    length = gemma4_prefix_collate_fn(given[:1], real)["input_ids"].shape[1] + 1
    dropped = gemma4_prefix_collate_fn(given, real, length, drop_overlong=True)
    assert dropped["input_ids"].shape == (1, length - 1)
    with raises_bad_sample("too_long"):
        gemma4_prefix_collate_fn(given, real, length - 1, drop_overlong=True)
    assert gemma4_prefix_collate_fn(given, real, length - 1)["input_ids"].shape == (2, length - 2)


def test_a_fake_image_stays_hidden_with_the_prefix(tokenizer):
    batch = gemma4_prefix_collate_fn([inject_fake_image(example("A cat."))], processor("gemma4"))
    mask = batch["attention_mask"][0].bool()
    shown = tokenizer.decode(batch["input_ids"][0][mask])
    assert "<|image|>" not in shown
    assert _GEMMA4_MODEL_TURN + _GEMMA4_THINKING_PREFIX + "A cat." in shown
    assert "What is it?" in shown


def test_as_a_hook_the_prefix_is_seen_and_not_supervised(tokenizer):
    real, given = processor("gemma4"), [example("A cat.", "A dog.")]
    plain = PreTokenizedDatasetWrapper(given, real)[0]
    hooked = PreTokenizedDatasetWrapper(given, real, post_tokenize_hook=gemma4_inject_thinking_prefix)[0]
    supervised = hooked["labels"] != IGNORE_INDEX
    assert tokenizer.decode(hooked["input_ids"]) == with_prefix(tokenizer.decode(plain["input_ids"]))
    assert torch.equal(hooked["labels"][supervised], plain["labels"][plain["labels"] != IGNORE_INDEX])
    batch = default_collate_fn(given, real, None, gemma4_inject_thinking_prefix)
    assert torch.equal(batch["labels"], gemma4_prefix_collate_fn(given, real)["labels"])


def test_labels_that_are_there_already_are_ignored_on_the_prefix(tokenizer):
    batch = ids_of(tokenizer, ONE, TWO)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORE_INDEX)
    made = gemma4_inject_thinking_prefix(batch, processor("gemma4"))
    prefix = len(tokenizer.encode(_GEMMA4_THINKING_PREFIX, add_special_tokens=False))
    supervised = (made["labels"] != IGNORE_INDEX).sum(1)
    assert torch.equal(supervised, batch["attention_mask"].sum(1))
    assert (made["attention_mask"].sum(1) - supervised).tolist() == [prefix, 2 * prefix]


def test_the_hook_leaves_batches_of_other_tokenizers_alone():
    other = processor("qwen2_vl")
    batch = ids_of(other.tokenizer, "<|im_start|>assistant\nHi<|im_end|>", ONE)
    made = gemma4_inject_thinking_prefix(batch, other)
    assert made.keys() == batch.keys()
    assert all(made[key] is batch[key] for key in batch)
