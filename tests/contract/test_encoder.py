"""An encoder looks a processor up once, tries each size once, and works the same in another process."""

import pickle
from collections import Counter
from copy import copy

import pytest
import torch

from contract.processors import FAMILIES, processor
from contract.samples import make_image, turns
from packhorse.families import Encoder, Generic
from packhorse.formats.conversation import parse_conversation
from raising import raises_bad_sample


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
