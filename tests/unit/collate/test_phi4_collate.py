"""Phi-4: audio next to the conversation or in it, images, and the input mode."""

import copy

import numpy as np
import pytest
import torch
from collate_stubs import CharTokenizer, chatml, make_turns, pad_rows, text

from contract.processors import build, processor
from contract.samples import make_image, tone
from packhorse.chat import IGNORE_INDEX
from packhorse.collate_fns import phi4_mm_collate_fn


class Remote:
    """As the model's repository has it: ``audios`` are (array, rate) pairs; image keys come unasked."""

    def __init__(self, mode=None):
        self.tokenizer = CharTokenizer()
        self.mode, self.calls = mode, []

    def apply_chat_template(self, conversation, tokenize):
        return chatml(conversation)

    def __call__(self, *, text, return_tensors, padding, truncation, max_length, images=None, audios=None):
        self.calls.append({"images": images, "audios": audios, "truncation": truncation, "padding": padding})
        batch = pad_rows([self.tokenizer(one)["input_ids"] for one in text])
        batch["input_image_embeds"] = torch.zeros(1)
        batch["image_sizes"] = torch.zeros(1)
        batch["image_attention_mask"] = torch.zeros(1)
        batch["input_audio_embeds"] = torch.zeros(len(audios or ()))
        return batch if self.mode is None else {**batch, "input_mode": self.mode}


def audio_example(audio=None, *, images=0) -> dict:
    parts = [{"type": "image", "image": make_image(32, 32)}] * images
    example = {
        "conversation": make_turns(
            ("user", [*parts, *text("Write it down.")]), ("assistant", text("Merhaba."))
        )
    }
    return example if audio is None else {**example, "audio": audio}


PAIR = (tone(8_000), 16_000)


def test_audio_is_passed_in_pairs_and_unused_image_keys_are_removed():
    stub = Remote()
    batch = phi4_mm_collate_fn(
        [audio_example(PAIR), audio_example({"array": tone(4_000), "sampling_rate": 8_000})], stub
    )
    (call,) = stub.calls
    assert [(len(array), rate) for array, rate in call["audios"]] == [(8_000, 16_000), (4_000, 8_000)]
    assert call["truncation"] is False
    assert not {"input_image_embeds", "image_sizes", "image_attention_mask"} & batch.keys()
    assert batch["input_mode"].tolist() == [2]
    assert batch["input_ids"].shape == batch["labels"].shape
    texts = [stub.tokenizer.decode(row[row != IGNORE_INDEX].tolist()) for row in batch["labels"]]
    assert texts == ["Merhaba.<|im_end|>"] * 2


@pytest.mark.parametrize(
    ("example", "mode"),
    [
        (audio_example(), 0),
        (audio_example(images=1), 1),
        (audio_example(PAIR), 2),
        (audio_example(PAIR, images=1), 3),
    ],
    ids=["text", "image", "audio", "both"],
)
def test_the_mode_says_what_there_is(example, mode):
    batch = phi4_mm_collate_fn([example], Remote())
    assert batch["input_mode"].tolist() == [mode]
    assert ("image_sizes" in batch) is (mode in (1, 3))


def test_a_mode_that_the_processor_sets_stays():
    assert phi4_mm_collate_fn([audio_example(PAIR)], Remote(mode=torch.tensor([7])))[
        "input_mode"
    ].tolist() == [7]


def test_several_audio_clips_of_a_sample_are_a_list():
    stub = Remote()
    phi4_mm_collate_fn([audio_example([PAIR, PAIR, PAIR])], stub)
    assert len(stub.calls[0]["audios"]) == 3
    phi4_mm_collate_fn([audio_example([tone(10), 16_000])], stub)  # a pair that became a list on the way
    assert len(stub.calls[1]["audios"]) == 1


@pytest.mark.parametrize("placed", ["next to", "inside"])
def test_transformers_processor_gets_arrays_at_its_own_rate(placed):
    real = processor("phi4_mm")
    stereo = (np.stack([tone(44_100), tone(44_100)]), 44_100)
    if placed == "next to":
        asked = f"{real.audio_token}Write it down."
        example = {"conversation": make_turns(("user", asked), ("assistant", "Merhaba.")), "audio": stereo}
    else:
        parts = [{"type": "audio", "audio": stereo}, *text("Write it down.")]
        example = {"conversation": make_turns(("user", parts), ("assistant", "Merhaba."))}
    batch = phi4_mm_collate_fn([example, audio_example()], real)
    audio = real.tokenizer.convert_tokens_to_ids(real.audio_token)
    # One of the rates differs from the other by a fraction of a sample only.
    assert (batch["input_ids"] == audio).sum(1).tolist() == [13, 0]
    assert batch["audio_input_features"].shape[0] == 1
    assert batch["input_mode"].tolist() == [2]
    texts = [real.tokenizer.decode(row[row != IGNORE_INDEX]) for row in batch["labels"]]
    assert texts == ["Merhaba.<|end|>"] * 2


TEXT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{{ eos_token }}"
)


@pytest.mark.parametrize(
    "example", [audio_example(PAIR), audio_example(PAIR, images=2), audio_example(images=1), audio_example()]
)
def test_a_template_that_only_the_tokenizer_has_is_used(example):
    """As released: the tokenizer's template takes texts."""
    bare = build("phi4_mm")
    bare.tokenizer = copy.deepcopy(bare.tokenizer)
    bare.chat_template, bare.tokenizer.chat_template = None, TEXT_TEMPLATE
    batch = phi4_mm_collate_fn([example], bare)
    expected = phi4_mm_collate_fn([example], processor("phi4_mm"))
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[key], expected[key]) for key in batch)
    assert (batch["labels"] != IGNORE_INDEX).any()
    assert bare.chat_template is None


def test_placeholders_are_numbered_for_a_processor_that_names_none():
    class Templated(CharTokenizer):
        chat_template = "ChatML"

        def apply_chat_template(self, turns, tokenize):
            return chatml(turns)

    class Bare(Remote):
        apply_chat_template = None

        def __init__(self):
            super().__init__()
            self.tokenizer, self.chat_template, self.texts = Templated(), None, []

        def __call__(self, *, text, **options):
            self.texts.extend(text)
            return super().__call__(text=text, truncation=False, max_length=None, **options)

    stub = Bare()
    batch = phi4_mm_collate_fn([audio_example(images=2)], stub)
    assert stub.texts[0].startswith("<|im_start|>user\n<|image_1|><|image_2|>Write it down.<|im_end|>")
    labels = batch["labels"][0]
    assert stub.tokenizer.decode(labels[labels != IGNORE_INDEX].tolist()) == "Merhaba.<|im_end|>"
