"""The fixtures themselves: every processor builds, takes every media item it claims, and feeds its tiny
model."""

import time

import pytest
import torch

from contract.calls import Raw, own_batch, render
from contract.chat_templates import TEMPLATES, chatml
from contract.processors import FAMILIES, build, processor
from contract.samples import clip, make_image, tone, turns
from contract.tiny_models import MODELS, WITHOUT_VIDEO, media_of, tiny_model
from contract.tiny_tokenizers import TOKEN_SETS, tokenizer

EVERY = tuple(FAMILIES)
CHATTING = tuple(name for name in FAMILIES if FAMILIES[name].chats)
SEEING = tuple(name for name in FAMILIES if "video" in FAMILIES[name].modalities)
HEARING = tuple(name for name in FAMILIES if "audio" in FAMILIES[name].modalities)

WORDS = Raw(turns())
ONE = Raw(turns("image"), images=(make_image(100, 60),))
TWO = Raw(turns("image", "image"), images=(make_image(100, 60), make_image(300, 200)))
VIDEO = Raw(turns("video"), clips=(clip(5),))
AUDIO = Raw(turns("audio"), audios=(tone(16_000),))


def pixels(batch) -> list[str]:
    return [key for key in batch if "pixel_values" in key]


@pytest.mark.parametrize("name", EVERY)
def test_a_processor_builds_in_less_than_a_second(name):
    build(name)  # the first one imports its modules
    start = time.perf_counter()
    made = build(name)
    assert time.perf_counter() - start < 1
    assert type(made).__name__ == FAMILIES[name].class_name
    assert processor(name) is processor(name)


@pytest.mark.parametrize("name", EVERY)
def test_text_alone_gives_ids_and_no_pixels(name):
    batch = own_batch(name, [WORDS])
    assert batch["input_ids"].shape == batch["attention_mask"].shape
    assert not pixels(batch)
    assert processor(name).tokenizer.decode(batch["input_ids"][0]) == render(name, WORDS.conversation)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("sample", [ONE, TWO], ids=["one", "two of different size"])
def test_images_become_pixels_and_tokens(name, sample):
    batch = own_batch(name, [sample])
    assert pixels(batch)
    words = own_batch(name, [WORDS])
    assert (batch["input_ids"].shape[1] > words["input_ids"].shape[1]) is FAMILIES[name].chats


@pytest.mark.parametrize("name", SEEING)
def test_decoded_frames_become_pixels_and_tokens(name):
    batch = own_batch(name, [VIDEO])
    assert pixels(batch)
    assert batch["input_ids"].shape[1] > own_batch(name, [WORDS])["input_ids"].shape[1]


@pytest.mark.parametrize("name", HEARING)
def test_audio_becomes_features_and_tokens(name):
    batch = own_batch(name, [AUDIO])
    assert [key for key in batch if "input_features" in key]
    audio = processor(name).tokenizer.convert_tokens_to_ids(processor(name).audio_token)
    assert (batch["input_ids"] == audio).sum() in (13, 25)  # a second, at 80 or 40 ms a token


@pytest.mark.parametrize("name", CHATTING)
def test_a_batch_holds_the_ids_each_sample_has_alone(name):
    samples = [WORDS, ONE, TWO]
    batch = own_batch(name, samples)
    for row, sample in enumerate(samples):
        alone = own_batch(name, [sample])["input_ids"][0]
        assert torch.equal(batch["input_ids"][row][batch["attention_mask"][row].bool()], alone)


@pytest.mark.parametrize("name", CHATTING)
def test_a_template_takes_strings_parts_and_roles_it_does_not_know(name):
    parts = [{"type": "text", "text": "It is 42."}]
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How many?"},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": parts},
    ]
    text = render(name, conversation)
    assert all(said in text for said in ("Be brief.", "How many?", "42", "It is 42."))
    prompt = render(name, conversation[:3], add_generation_prompt=True)
    assert text.startswith(prompt)


@pytest.mark.parametrize("name", CHATTING)
def test_a_template_rejects_a_part_it_does_not_know(name):
    with pytest.raises(Exception, match="no placeholder for a part of type smell"):
        render(name, [{"role": "user", "content": [{"type": "smell"}]}])


def test_a_generation_block_marks_what_the_assistant_says():
    conversation = turns("image")
    conversation[0]["content"][0]["image"] = make_image(100, 60)
    made = processor("qwen2_vl")
    batch = made.apply_chat_template(
        [conversation],
        chat_template=chatml(generation=True, image="<|image_pad|>"),
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
    )
    said = batch["input_ids"][0][torch.as_tensor(batch["assistant_masks"][0]).bool()]
    assert made.tokenizer.decode(said) == "A cat.<|im_end|>"


@pytest.mark.parametrize("name", tuple(TOKEN_SETS))
def test_a_tokenizer_gives_back_any_text_and_keeps_its_special_tokens_whole(name):
    words = tokenizer(name)
    text = "Was? 你好 \U0001f600\n\n\n the cat.\n 12"
    assert words.decode(words.encode(text, add_special_tokens=False)) == text
    tokens = TOKEN_SETS[name]
    for special in (tokens.eos, tokens.pad, *tokens.named.values(), *tokens.more):
        (number,) = words.encode(special, add_special_tokens=False)
        assert number == words.convert_tokens_to_ids(special)


def test_every_family_that_chats_has_a_template():
    assert set(TEMPLATES) == set(CHATTING)
    assert set(TOKEN_SETS) == set(EVERY)


@pytest.mark.parametrize("name", MODELS)
def test_a_tiny_model_learns_from_what_its_processor_returns(name):
    samples = [WORDS, ONE, TWO, *([VIDEO] if "video" in media_of(name) else [])]
    model = tiny_model(name)
    for sample in samples:
        batch = own_batch(name, [sample])
        loss = model(**batch, labels=batch["input_ids"]).loss
        assert torch.isfinite(loss)
        assert loss.requires_grad


@pytest.mark.parametrize("name", sorted(WITHOUT_VIDEO))
def test_models_that_raise_for_videos_still_do(name):
    with pytest.raises(TypeError, match="must be tuple of Tensors"):
        tiny_model(name)(**own_batch(name, [VIDEO]))


@pytest.mark.parametrize("name", MODELS)
def test_a_tiny_model_takes_a_padded_batch(name):
    batch = own_batch(name, [WORDS, ONE, TWO])
    with torch.no_grad():
        logits = tiny_model(name)(**batch).logits
    assert logits.shape[:2] == batch["input_ids"].shape
    assert torch.isfinite(logits).all()
