"""Nemotron-Parse: prompt and answer for the decoder, a page for the encoder."""

import copy

import pytest
import torch
from collate_stubs import CharTokenizer, make_turns, pad_rows, text

from contract.processors import build, processor
from contract.samples import make_image
from packhorse.chat import IGNORE_INDEX
from packhorse.collate_fns import nemotron_parse_collate_fn
from raising import raises_bad_sample

PROMPT = "</s><s><predict_bbox><predict_classes><output_markdown>"


def page(answer: str, question: str = "Read this.") -> dict:
    parts = [{"type": "image", "image": make_image(60, 80)}, *text(question)]
    return {"conversation": make_turns(("user", parts), ("assistant", text(answer)))}


def supervised_texts(tokenizer, labels) -> list[str]:
    return [tokenizer.decode(row[row != IGNORE_INDEX].tolist()) for row in labels]


@pytest.mark.parametrize("prompt", [PROMPT, "<s>Go:"])
def test_the_batch_is_the_processors_own_of_prompt_and_answer(prompt):
    real = processor("nemotron_parse")
    answers = ["# Title\n\nA cat.</s>", "the end"]
    batch = nemotron_parse_collate_fn([page(answer) for answer in answers], real, prompt)
    own = real(
        images=[make_image(60, 80)] * 2,
        text=[prompt + answer for answer in answers],
        padding=True,
        add_special_tokens=False,
        return_tensors="pt",
    )
    assert torch.equal(batch["input_ids"], own["input_ids"][:, :-1])
    assert torch.equal(batch["attention_mask"], own["attention_mask"][:, :-1])
    assert torch.equal(batch["pixel_values"], own["pixel_values"].to(torch.bfloat16))
    assert supervised_texts(real.tokenizer, batch["labels"]) == answers
    assert batch["n_images_per_sample"].tolist() == [1, 1]


def test_every_label_is_the_token_after_its_decoder_input():
    batch = nemotron_parse_collate_fn(
        [page("A cat."), page("A very long answer.")], processor("nemotron_parse")
    )
    inputs, labels = batch["decoder_input_ids"], batch["labels"]
    assert inputs.shape == labels.shape == batch["decoder_attention_mask"].shape
    following = labels[:, :-1] != IGNORE_INDEX
    assert torch.equal(labels[:, :-1][following], inputs[:, 1:][following])
    assert torch.equal(batch["decoder_attention_mask"], batch["attention_mask"])


def test_the_prompt_is_not_supervised_even_if_the_answer_says_the_same():
    real = processor("nemotron_parse")
    batch = nemotron_parse_collate_fn([page("Go")], real, "<s>Go, Go")
    assert supervised_texts(real.tokenizer, batch["labels"]) == ["Go"]
    assert (batch["labels"][0] != IGNORE_INDEX).nonzero()[0] >= len(real.tokenizer.encode("<s>Go,")) - 1


def test_padding_is_not_supervised_where_it_is_the_end_token_too():
    real = build("nemotron_parse")
    real.tokenizer = copy.deepcopy(real.tokenizer)
    real.tokenizer.pad_token = real.tokenizer.eos_token
    batch = nemotron_parse_collate_fn([page("A cat.</s>"), page("A very long answer.</s>")], real)
    assert supervised_texts(real.tokenizer, batch["labels"]) == ["A cat.</s>", "A very long answer.</s>"]


class Small:
    """Takes no options beyond the documented ones."""

    def __init__(self):
        self.tokenizer = CharTokenizer()
        self.tokenizer.eos_token_id = None

    def __call__(self, *, images, text, padding, return_tensors):
        batch = pad_rows([self.tokenizer(one)["input_ids"] for one in text])
        return {**batch, "pixel_values": torch.ones(len(images), 3, 2, 2)}


def test_the_decoder_begins_with_the_start_token_of_the_prompt_and_has_it_once():
    real = processor("nemotron_parse")
    batch = nemotron_parse_collate_fn([page("A cat.")], real)
    assert real.tokenizer.decode(batch["decoder_input_ids"][0]).startswith("</s><s><predict_bbox>")


def test_a_tokenizer_that_names_no_special_token_will_do():
    batch = nemotron_parse_collate_fn([page("A cat.")], Small())
    assert batch["decoder_input_ids"].shape == batch["labels"].shape
    assert supervised_texts(CharTokenizer(), batch["labels"]) == ["A cat."]


def test_a_sample_needs_one_page():
    real = processor("nemotron_parse")
    with raises_bad_sample("media_mismatch", match="no image"):
        nemotron_parse_collate_fn(
            [page("A."), {"conversation": make_turns(("user", "Hi"), ("assistant", "Ho"))}], real
        )
    two = page("A.")
    two["conversation"][0]["content"] *= 2
    with raises_bad_sample("media_mismatch", match="one page"):
        nemotron_parse_collate_fn([two], real)
    assert nemotron_parse_collate_fn([], real) == {}


def test_pixels_stay_as_they_are_if_asked():
    real = processor("nemotron_parse")
    assert (
        nemotron_parse_collate_fn([page("A.")], real, pixel_dtype=None)["pixel_values"].dtype == torch.float32
    )
