"""Unlisted processors: what is certain works, what is not certain stops the run."""

import logging
import pickle

import pytest
import torch

from contract.chat_templates import TEMPLATES, chatml
from contract.processors import processor
from contract.remote_processors import KimiK25Processor
from contract.samples import make_image, turns
from contract.tiny_tokenizers import tokenizer
from packhorse.chat import IGNORE_INDEX
from packhorse.collate_fns import kimi_k25_vl_collate_fn, pad_collate_fn
from packhorse.count.token_counter import TokenCounter
from packhorse.datasets import PreTokenizedDatasetWrapper
from packhorse.families import Encoder, Generic, family_of
from packhorse.families.kimi_k25 import KimiK25Remote
from packhorse.formats.conversation import parse_conversation
from packhorse.ledger import Ledger
from packhorse.types import TensorLayout
from raising import raises_bad_sample, raises_config

TEXTS_ONLY = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
)


def llava():
    from transformers import CLIPImageProcessor, LlavaProcessor

    small = {"height": 28, "width": 28}
    return LlavaProcessor(
        image_processor=CLIPImageProcessor(size=small, crop_size=small),
        tokenizer=tokenizer("llava_onevision"),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chatml(image="<image>\n"),
    )


def question(*images, question="What is it?"):
    said = turns(*["image"] * len(images), question=question)
    for part, image in zip(said[0]["content"], images, strict=False):
        part["image"] = image
    return parse_conversation({"conversation": said}, "a/1")


def supervised_text(encoder, conversation):
    labels = encoder.labels(encoder.encode(conversation))
    return encoder.tokenizer.decode(labels[labels != IGNORE_INDEX])


def test_an_unlisted_processor_of_transformers_is_encoded_and_labelled():
    made = llava()
    encoder = Encoder(made)
    two = question(make_image(100, 60), make_image(30, 90))
    encoded = encoder.encode(two)
    own = made(text=[encoded.text], images=[[make_image(100, 60), make_image(30, 90)]], return_tensors="pt")
    assert torch.equal(encoded.tokens["input_ids"], own["input_ids"][0])
    assert torch.equal(encoded.media["pixel_values"], own["pixel_values"])
    assert encoder.family.layout == {"pixel_values": TensorLayout(("image",), "item")}
    assert supervised_text(encoder, two) == "A cat.<|im_end|>"
    assert encoder.media_tokens("image", (60, 100)) == 4
    assert not encoder.family.exact


def test_an_unlisted_class_is_warned_about_once(caplog):
    class Unheard:
        tokenizer = tokenizer("qwen2_vl")

    with caplog.at_level(logging.WARNING, logger="packhorse"):
        first, second = family_of(Unheard()), family_of(Unheard())
    assert first is second, "collating knows the tensors that encoding has seen"
    (record,) = caplog.records
    assert "Unheard is no processor that Packhorse knows" in record.message
    assert all(caveat in record.message for caveat in Generic.caveats)


def test_a_tokenizer_alone_is_enough_for_text():
    made = tokenizer("qwen2_vl")
    made.chat_template = TEXTS_ONLY
    try:
        encoder = Encoder(made)
        assert isinstance(encoder.family, Generic)
        encoded = encoder.encode(question())
        assert encoded.text.startswith("<|im_start|>user\nWhat is it?<|im_end|>")
        assert supervised_text(encoder, question()) == "A cat.<|im_end|>"
        with raises_config("processor", match=r"has media \(image\)"):
            encoder.encode(question(make_image(10, 10)))
    finally:
        made.chat_template = None


@pytest.mark.parametrize("template", [TEXTS_ONLY, chatml(), chatml(generation=True)])
def test_templates_for_texts_and_for_parts_both_work(template):
    class ChatStub:
        def __init__(self):
            self.tokenizer, self.chat_template = tokenizer("qwen2_vl"), template

        def apply_chat_template(self, conversation, **options):
            return [self.tokenizer.apply_chat_template(conversation, chat_template=template, **options)]

        def __call__(self, text, return_tensors):
            return self.tokenizer(text, return_tensors=return_tensors)

    assert supervised_text(Encoder(ChatStub()), question()) == "A cat.<|im_end|>"


def test_a_typed_placeholder_is_rejected_where_the_processor_names_it():
    with raises_bad_sample("media_mismatch", match="not distinguishable from a media item"):
        Encoder(llava()).encode(question(question="What is <image>?"))


class Returning:
    """An object that follows the call contract and returns the given tensors in addition to the ids."""

    image_token = "<image>"

    def __init__(self, **tensors):
        self.tokenizer = tokenizer("llava_onevision")
        self.tensors = tensors

    def apply_chat_template(self, conversation, **options):
        return self.tokenizer.apply_chat_template(
            conversation, chat_template=chatml(image="<image>"), **options
        )

    def __call__(self, text, images=None, return_tensors=None):
        return {**self.tokenizer(text, return_tensors=return_tensors), **self.tensors}


IMAGES = (make_image(10, 10), make_image(20, 10))


def test_a_models_own_processor_is_called_as_it_is_written_and_not_as_those_of_transformers():
    from transformers import ProcessorMixin

    class Own(ProcessorMixin):
        image_token = "<image>"

        def __init__(self):
            self.tokenizer, self.chat_template, self.given = (
                tokenizer("llava_onevision"),
                chatml(image="<image>"),
                [],
            )

        def __call__(self, text=None, images=None, return_tensors=None):
            self.given.append(images)
            return {**self.tokenizer(text, return_tensors="pt"), "pixel_values": torch.zeros(len(images), 3)}

    made = Own()
    Encoder(made).encode(question(*IMAGES))
    assert [image.size for image in made.given[-1]] == [(10, 10), (20, 10)], "one flat list"


def test_patches_with_a_grid_are_known():
    grid = torch.tensor([[1, 2, 2], [1, 4, 2]])
    made = Returning(pixel_values=torch.zeros(12, 5), image_grid_thw=grid)
    encoder = Encoder(made, Generic())
    encoded = encoder.encode(question(*IMAGES))
    assert encoder.family.layout["pixel_values"] == TensorLayout(("image",), "rows", "image_grid_thw")
    assert encoder.rows(encoded, "pixel_values") == [4, 8]


@pytest.mark.parametrize(
    "tensors",
    [  # the first is the one that is rejected
        {"pixel_values": torch.zeros(12, 5)},  # tiles or patches, of an unknown image
        {"pixel_values": torch.zeros(1, 2, 5)},  # the sample's
        {"pixel_values": torch.zeros(11, 5), "image_grid_thw": torch.tensor([[1, 2, 2], [1, 4, 2]])},
        {"scale": torch.tensor(1.0)},
        {"names": ["a", "b"]},
    ],
    ids=["rows", "sample", "wrong grid", "number", "list"],
)
def test_a_tensor_whose_owner_is_not_certain_stops_the_run(tensors):
    with raises_config(next(iter(tensors)), match="not certain"):
        Encoder(Returning(**tensors), Generic()).encode(question(*IMAGES))


def test_a_tensor_per_token_is_not_taken_for_one_per_image():
    made = Returning(pixel_values=torch.zeros(1, 5))
    encoder = Encoder(made, Generic())
    length = len(encoder.encode(question(IMAGES[0])).tokens["input_ids"])
    made.tensors["position_ids"] = torch.zeros(1, length)
    with raises_config("position_ids", (1, length)):
        encoder.encode(question(IMAGES[0]))


def test_what_one_sample_taught_is_checked_against_the_next():
    encoder = Encoder(Returning(pixel_values=torch.zeros(1, 5)), Generic())
    encoder.encode(question(IMAGES[0]))
    with raises_config("pixel_values", (1, 5)):
        encoder.encode(question(*IMAGES))


def test_the_generic_family_can_be_sent_to_another_process():
    encoder = Encoder(Returning(pixel_values=torch.zeros(1, 5)), Generic())
    encoder.encode(question(IMAGES[0]))
    assert pickle.loads(pickle.dumps(encoder.family)).layout == encoder.family.layout


class Around:
    """A wrapper that hands everything on."""

    def __init__(self, inner):
        self.processor = inner

    def __getattr__(self, name):
        return getattr(self.processor, name)

    def __call__(self, *args, **options):
        return self.processor(*args, **options)


def test_a_transparent_wrapper_is_served_as_what_it_wraps():
    made = Around(processor("gemma3"))
    encoder = Encoder(made)
    assert encoder.family is family_of(processor("gemma3"))
    assert supervised_text(encoder, question(IMAGES[0])) == "A cat.<end_of_turn>"


def test_a_wrapper_with_another_tokenizer_is_not_seen_through():
    made = Around(processor("gemma3"))
    made.tokenizer = tokenizer("qwen2_vl")
    assert isinstance(family_of(made), Generic)


def kimi_k25():
    return KimiK25Processor(tokenizer("kimi_k25"), TEMPLATES["kimi_k25"])


def test_kimi_k25s_own_processor_has_its_placeholders_expanded():
    encoder = Encoder(kimi_k25())
    assert isinstance(encoder.family, KimiK25Remote)
    images = make_image(70, 50), make_image(10, 20)  # 4 x 6 and 2 x 2 patches
    encoded = encoder.encode(question(*images))
    (pad,) = encoder.media_token_ids
    ids = encoded.tokens["input_ids"]
    assert (ids == pad).sum() == 6 + 1
    assert encoded.tokens["attention_mask"].shape == ids.shape
    assert encoder.rows(encoded, "pixel_values") == [24, 4]
    assert supervised_text(encoder, question(*images)) == "A cat.<|im_end|>"
    assert encoder.media_tokens("image", (50, 70)) == 6


def test_text_alone_is_encoded_though_kimi_k25s_own_processor_rejects_it():
    encoder = Encoder(kimi_k25())
    with pytest.raises(ValueError, match="both 'medias' and 'text'"):
        encoder.processor(text="What is it?")
    assert supervised_text(encoder, question()) == "A cat.<|im_end|>"


def test_every_row_is_encoded_and_counted_with_kimi_k25s_own_processor():
    rows = [{"conversation": turns("image")}, {"conversation": turns()}]
    rows[0]["conversation"][0]["content"][0]["image"] = make_image(70, 50)
    made, ledger = kimi_k25(), Ledger()
    dataset = PreTokenizedDatasetWrapper(rows, made, on_bad="raise", inject_fake_images=False, ledger=ledger)
    counter = TokenCounter(Encoder(made))
    for index, row in enumerate(rows):
        counted = counter.count(parse_conversation(row, str(index)))
        assert counted.count.total == len(dataset[index]["input_ids"])
    assert dataset[0]["grid_thws"].tolist() == [[1, 4, 6]]
    assert not list(ledger)
    batch, samples = kimi_k25_vl_collate_fn(rows, made), [dataset[0], dataset[1]]
    padded = pad_collate_fn(samples, made, pixel_dtype=None)
    for key in ("input_ids", "attention_mask", "labels", "pixel_values", "grid_thws"):
        assert torch.equal(batch[key], padded[key]), key


def test_all_tensors_of_tokens_are_expanded_and_a_missing_mask_is_added():
    class Other(KimiK25Processor):
        def __call__(self, **options):
            output = super().__call__(**options)
            del output["attention_mask"]
            return {**output, "token_type_ids": torch.arange(output["input_ids"].shape[1])[None]}

    encoder = Encoder(Other(tokenizer("kimi_k25"), TEMPLATES["kimi_k25"]), KimiK25Remote())
    tokens = encoder.encode(question(make_image(70, 50))).tokens
    (pad,) = encoder.media_token_ids
    assert tokens["attention_mask"].tolist() == [1] * len(tokens["input_ids"])
    types = tokens["token_type_ids"][tokens["input_ids"] == pad].tolist()
    assert len(types) == 6
    assert len(set(types)) == 1


def test_kimi_k25s_own_processor_with_other_placeholders_stops_the_run():
    class Forgetful(KimiK25Processor):
        def __call__(self, *, medias, **options):
            return super().__call__(medias=medias[:1], **options)

    encoder = Encoder(Forgetful(tokenizer("kimi_k25"), TEMPLATES["kimi_k25"]), KimiK25Remote())
    with raises_config("processor", match="2 placeholders"):
        encoder.encode(question(make_image(70, 50), make_image(10, 20)))
