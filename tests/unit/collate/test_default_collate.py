"""The default collate function with small processors, wrapped ones, hooks and bad input."""

import functools
import logging
from typing import ClassVar

import pytest
import torch
from collate_stubs import GREETING, StrictProcessor, make_turns, pad_rows, text
from transformers.processing_utils import ProcessingKwargs

from contract.processors import processor
from contract.samples import make_image, turns
from packhorse.chat import IGNORE_INDEX
from packhorse.collate_fns import default_collate_fn, make_robust_collate
from packhorse.datasets import RobustDatasetWrapper
from packhorse.families.processor_call import padding_side
from packhorse.formats.example_media import inject_fake_image
from packhorse.ledger import Ledger
from raising import raises_bad_sample, raises_config

HELLO = {"conversation": GREETING}
SEEN = {
    "conversation": make_turns(
        ("user", [{"type": "image", "image": make_image(56, 56)}, *text("What is it?")]),
        ("assistant", text("A cat.")),
    )
}


def supervised_texts(tokenizer, batch) -> list[str]:
    return [tokenizer.decode(row[row != IGNORE_INDEX].tolist()) for row in batch["labels"]]


def test_a_processor_with_the_documented_method_alone_is_enough():
    stub = StrictProcessor()
    batch = default_collate_fn([HELLO, SEEN], stub)
    assert len(stub.calls) == 1
    assert stub.calls[0]["padding"] is True
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    assert supervised_texts(stub.tokenizer, batch) == ["Hello!<|im_end|>", "A cat.<|im_end|>"]
    assert batch["pixel_values"].dtype == torch.bfloat16
    assert batch["n_images_per_sample"].tolist() == [0, 1]
    assert "n_videos_per_sample" not in batch
    assert "position_ids" not in batch


def test_a_small_processor_pads_to_the_longest_and_the_rest_up_to_the_limit_is_filled():
    stub = StrictProcessor()
    batch = default_collate_fn([HELLO, HELLO], stub, 128)
    assert (stub.calls[0]["padding"], stub.calls[0]["max_length"]) == (True, None)
    assert batch["input_ids"].shape == (2, 127)


def test_pixels_are_cast_as_asked():
    batch = default_collate_fn([SEEN], processor("qwen2_vl"), pixel_dtype=torch.float16)
    assert batch["pixel_values"].dtype == torch.float16
    assert batch["image_grid_thw"].dtype == torch.int64
    assert (
        default_collate_fn([SEEN], processor("qwen2_vl"), pixel_dtype=None)["pixel_values"].dtype
        == torch.float32
    )


class Everything(StrictProcessor):
    """Returns what no other processor does."""

    def apply_chat_template(self, conversations, **options):
        batch = super().apply_chat_template(conversations, **options)
        batch["stress"] = torch.ones_like(batch["input_ids"])
        batch["note"] = "as it was"
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).repeat(3, len(conversations), 1)
        return batch


def test_every_tensor_per_token_is_shifted_and_all_else_stays():
    batch = default_collate_fn([HELLO, HELLO], Everything())
    assert batch["stress"].shape == batch["input_ids"].shape
    assert batch["position_ids"].shape == (3, *batch["input_ids"].shape)
    assert batch["note"] == "as it was"


class Expanding(StrictProcessor):
    """Gives an image as many tokens as it has rows of pixels, which nothing announces."""

    image_token_id = 3

    def apply_chat_template(self, conversations, **options):
        batch = super().apply_chat_template(conversations, **options)
        rows = []
        for conversation, ids in zip(conversations, batch["input_ids"].tolist(), strict=True):
            images = [
                part["image"]
                for turn in conversation
                for part in turn["content"]
                if isinstance(part, dict) and part["type"] == "image"
            ]
            heights = iter([image.height for image in images])
            kept = [token for token in ids if token != 0]
            rows.append([token for token in kept for _ in range(next(heights) if token == 3 else 1)])
        return {**batch, **pad_rows(rows)}


class Around:
    """A processor around a processor."""

    def __init__(self, processor):
        self.processor = processor
        self.tokenizer = processor.tokenizer

    def apply_chat_template(self, *args, **options):
        return self.processor.apply_chat_template(*args, **options)


class Through:
    """Hands on what it does not have."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)


@pytest.mark.parametrize("wrap", [Around, Through])
@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3", "internvl"])
def test_a_wrapped_processor_makes_the_batch_of_the_one_inside(name, wrap):
    examples = [{"conversation": turns()}, SEEN]
    wrapped = default_collate_fn(examples, wrap(processor(name)))
    plain = default_collate_fn(examples, processor(name))
    assert wrapped.keys() == plain.keys()
    for key, value in plain.items():
        assert torch.equal(wrapped[key], value), key


def test_a_subclass_is_served_as_its_family():
    from transformers import Qwen2VLProcessor

    class Mine(Qwen2VLProcessor):
        pass

    real = processor("qwen2_vl")
    mine = Mine(
        image_processor=real.image_processor,
        video_processor=real.video_processor,
        tokenizer=real.tokenizer,
        chat_template=real.chat_template,
    )
    assert torch.equal(
        default_collate_fn([SEEN], mine)["input_ids"], default_collate_fn([SEEN], real)["input_ids"]
    )


def test_a_hook_changes_the_batch_before_labels_are_made():
    stub = StrictProcessor()

    def add_padding(batch, given):
        assert given is stub
        assert "labels" not in batch
        ids = batch["input_ids"]
        more = {key: torch.nn.functional.pad(batch[key], (0, 3)) for key in ("input_ids", "attention_mask")}
        assert ids.shape[0] == 2
        return {**batch, **more}

    batch = default_collate_fn([HELLO, HELLO], stub, None, add_padding)
    plain = default_collate_fn([HELLO, HELLO], stub)
    assert batch["input_ids"].shape[1] == plain["input_ids"].shape[1] + 3
    assert supervised_texts(stub.tokenizer, batch) == supervised_texts(stub.tokenizer, plain)


def test_a_mistake_in_a_hook_is_not_swallowed():
    def broken(batch, given):
        return nothing_of_this_name  # noqa: F821

    collate = make_robust_collate(
        [HELLO, HELLO],
        functools.partial(default_collate_fn, processor=StrictProcessor(), _post_tokenize_hook=broken),
    )
    with pytest.raises(NameError):
        collate([HELLO])


def test_the_fake_image_of_an_unlisted_processor_is_hidden_if_it_has_an_image_token_id():
    stub = StrictProcessor()
    fake = inject_fake_image(HELLO)
    with_mask = default_collate_fn([SEEN, fake], stub)
    assert with_mask["attention_mask"][1].sum() == (with_mask["input_ids"][1] != 0).sum()
    stub.image_token_id = 3
    batch = default_collate_fn([SEEN, fake], stub)
    assert (batch["attention_mask"][1][batch["input_ids"][1] == 3] == 0).all()
    assert (batch["attention_mask"][0][batch["input_ids"][0] == 3] == 1).all()
    assert batch["attention_mask"][1].sum() == with_mask["attention_mask"][1].sum() - 1


def test_a_sample_that_only_the_processor_shows_to_be_too_long_is_dropped(ledger, caplog):
    """Timestamps are not in the estimate; the sample is too long by one token all the same."""
    from contract.samples import clip

    frames, metadata = clip(6)
    video = {"type": "video", "video": frames, "video_metadata": metadata}
    video_example = {"conversation": make_turns(("user", [video]), ("assistant", "A cat."))}
    real = processor("qwen3_vl")
    length = default_collate_fn([video_example], real)["input_ids"].shape[1] + 1
    with caplog.at_level(logging.WARNING):
        batch = default_collate_fn(
            [video_example, {"conversation": turns()}], real, length - 1, drop_overlong=True
        )
    assert len(batch["input_ids"]) == 1
    assert "n_videos_per_sample" not in batch
    assert [entry.detail for entry in ledger] == [f"{length} tokens are more than max_length={length - 1}"]


def test_samples_that_collating_drops_or_reports_are_named_in_the_ledger_of_the_dataset():
    silent = {"conversation": make_turns(("user", text("Hello?")))}
    long = {"conversation": make_turns(("user", text("Why?")), ("assistant", text("So. " * 99)))}
    dataset = RobustDatasetWrapper([HELLO, long, silent], ledger=Ledger())
    collate = dataset.robust_collate(
        functools.partial(
            default_collate_fn, processor=processor("qwen2_vl"), max_length=90, drop_overlong=True
        )
    )
    assert len(collate(dataset.__getitems__([0, 1, 2]))["input_ids"]) == 2
    assert [(drop.key, drop.reason, drop.action) for drop in dataset.ledger] == [
        ("1", "too_long", "dropped"),
        ("2", "nothing_supervised", "kept"),
    ]


def test_a_truncated_sample_is_named_in_the_datasets_ledger():
    long = {"conversation": make_turns(("user", text("Why?")), ("assistant", text("So. " * 99)))}
    dataset = RobustDatasetWrapper([HELLO, long], ledger=Ledger())
    collate = dataset.robust_collate(
        functools.partial(default_collate_fn, processor=processor("qwen2_vl"), max_length=90)
    )
    assert collate(dataset.__getitems__([0, 1]))["input_ids"].shape == (2, 89)
    ((key, reason, action),) = [(drop.key, drop.reason, drop.action) for drop in dataset.ledger]
    assert (key, reason, action) == ("1", "truncated", "cut")


def test_a_sample_loses_the_image_that_does_not_fit_and_all_that_follows_it():
    real, ledger = processor("qwen2_vl"), Ledger()
    first, second = turns("image", answer="One."), turns("image", answer="Two.")
    for turn, size in ((first, (56, 56)), (second, (560, 560))):
        turn[0]["content"][0]["image"] = make_image(*size)
    dataset = RobustDatasetWrapper([{"conversation": first + second}], ledger=ledger)
    collate = functools.partial(default_collate_fn, processor=real, max_length=200)
    batch = dataset.robust_collate(collate)(dataset.__getitems__([0]))
    expected = default_collate_fn([{"conversation": first}], real)
    length = expected["input_ids"].shape[1]
    assert torch.equal(batch["input_ids"][:, :length], expected["input_ids"])
    assert torch.equal(batch["pixel_values"], expected["pixel_values"])
    assert batch["n_images_per_sample"].tolist() == [1]
    (entry,) = ledger
    assert (entry.reason, entry.key) == ("truncated", "0")
    assert entry.detail.endswith("max_length=200: the rest was cut, with 1 media")


def test_what_only_the_processor_knows_of_is_cut_too():
    """A processor whose images cannot be counted beforehand: it runs again without those that do not fit."""
    parts = [{"type": "image", "image": make_image(8, 20)} for _ in range(6)]
    example = {"conversation": make_turns(("user", parts), ("assistant", text("Six.")))}
    batch = default_collate_fn([example], Expanding(), 100)
    assert batch["input_ids"].shape == (1, 99)
    number = int(batch["n_images_per_sample"][0])
    assert number in (3, 4)
    assert int((batch["input_ids"] == 3).sum()) == 20 * number == 20 * len(batch["pixel_values"])


@pytest.mark.parametrize("max_length", [30, 60, 100, 150])
@pytest.mark.parametrize("sizes", [[5] * 8 + [200], [200, 5, 5], [5, 60, 5, 5, 60, 5], [20] * 7])
def test_a_sample_keeps_every_image_before_the_first_one_that_does_not_fit(sizes, max_length):
    parts = [{"type": "image", "image": make_image(8, size)} for size in sizes]
    example = {"conversation": make_turns(("user", parts), ("assistant", text("Many.")))}
    whole = default_collate_fn([example], Expanding())["input_ids"][0]
    ends = (whole == 3).nonzero().flatten()[torch.tensor(sizes).cumsum(0) - 1]
    # Processors make one batch of all samples, so the others are cut in the same steps.
    batch = default_collate_fn([HELLO, example, example], Expanding(), max_length)
    fitting = int((ends < max_length - 1).sum())
    assert len(batch.get("pixel_values", ())) == 2 * fitting
    assert [int((row == 3).sum()) for row in batch["input_ids"]] == [
        0,
        sum(sizes[:fitting]),
        sum(sizes[:fitting]),
    ]


class PadsRightKwargs:
    _defaults: ClassVar = {"text_kwargs": {"padding_side": "right"}}


class PadsLeftKwargs:
    _defaults: ClassVar = {"text_kwargs": {"padding_side": "left"}}


class PadsRight(StrictProcessor):
    """Declares other defaults than those of the class that has its name."""

    valid_processor_kwargs = PadsLeftKwargs


class PadsLeft(StrictProcessor):
    """Declares nothing but the base class of all defaults."""

    valid_processor_kwargs = ProcessingKwargs


def test_the_padding_side_is_the_declared_one_and_else_that_of_the_class_by_the_processors_name():
    assert padding_side(PadsRight()) == "left"
    assert padding_side(PadsLeft()) == "left"
    assert padding_side(StrictProcessor()) == "right"


def test_a_missing_image_costs_its_sample_and_not_the_batch():
    gone = {"conversation": turns("image")}
    gone["conversation"][0]["content"][0]["image"] = "/nowhere.png"
    dataset = RobustDatasetWrapper([HELLO, gone, SEEN], on_bad="skip", ledger=Ledger())
    collate = dataset.robust_collate(functools.partial(default_collate_fn, processor=processor("qwen2_vl")))
    assert len(collate(dataset.__getitems__([0, 1, 2]))["input_ids"]) == 2
    assert [(drop.key, drop.reason, drop.stage) for drop in dataset.ledger] == [
        ("1", "missing_media", "media")
    ]


def test_an_example_that_the_template_rejects_is_named_for_an_unlisted_processor():
    from contract.test_generic import llava

    made = llava()
    made.chat_template = (
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}"
        + (made.chat_template)
    )
    alone = {"conversation": make_turns(("assistant", text("Me.")))}
    dataset = RobustDatasetWrapper([HELLO, alone], on_bad="skip", ledger=Ledger())
    collate = dataset.robust_collate(functools.partial(default_collate_fn, processor=made))
    assert len(collate(dataset.__getitems__([0, 1]))["input_ids"]) == 1
    assert [(drop.key, drop.reason) for drop in dataset.ledger] == [("1", "wrong_format")]


def test_a_hidden_image_at_the_front_counts_towards_the_length():
    from contract.test_generic import llava

    made = llava()
    made.chat_template = (
        "{% for m in messages %}"
        "{% for p in m['content'] %}{{ '<image>' if p['type'] == 'image' }}{% endfor %}"
        "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ m['role'] }}: {{ p['text'] }}<|im_end|>\n"
        "{% endif %}{% endfor %}{% endfor %}"
    )
    fake = inject_fake_image(HELLO)
    batch = default_collate_fn([fake], made)
    assert batch["attention_mask"][0, 0] == 0
    length = batch["input_ids"].shape[1] + 1
    assert default_collate_fn([fake], made, length)["input_ids"].shape == (1, length - 1)
    with raises_bad_sample("too_long"):
        default_collate_fn([fake], made, length - 1, drop_overlong=True)


def test_an_unlisted_processor_whose_template_forgets_the_media_is_logged(caplog):
    class Forgetful(StrictProcessor):
        def apply_chat_template(self, conversations, **options):
            batch = super().apply_chat_template(conversations, **options)
            return {key: value for key, value in batch.items() if key != "pixel_values"}

    with caplog.at_level(logging.WARNING):
        default_collate_fn([SEEN], Forgetful())
    assert "Forgetful.apply_chat_template returned no tensor for the 1 media" in caplog.text


def test_a_sample_that_was_skipped_is_rejected_with_what_to_do():
    with raises_config("collate_fn", match="sample 1"):
        default_collate_fn([HELLO, None], processor("qwen2_vl"))


def test_a_message_keeps_what_else_it_holds():
    """A template may write more of a turn than its content."""
    real = processor("qwen2_vl")
    stub = StrictProcessor()
    conversation = [dict(turn, name="x") for turn in GREETING]
    default_collate_fn([{"conversation": conversation}], stub)
    assert all(turn["name"] == "x" for turn in stub.calls[0]["conversations"][0])
    assert default_collate_fn([{"conversation": conversation}], real)["input_ids"].shape[0] == 1


def test_a_processor_without_a_chat_template_is_rejected():
    with raises_config("processor", "NemotronParseProcessor"):
        default_collate_fn([SEEN], processor("nemotron_parse"))


@pytest.mark.parametrize("example", [{}, {"conversation": "Hi"}, {"conversation": [{"content": "Hi"}]}])
def test_an_example_in_another_format_is_rejected(example):
    with raises_bad_sample("wrong_format"):
        default_collate_fn([example], processor("qwen2_vl"))


def test_a_placeholder_typed_by_a_user_is_rejected():
    typed = {"conversation": turns(question="What is <|image_pad|>?")}
    with raises_bad_sample("media_mismatch"):
        default_collate_fn([typed], processor("qwen2_vl"))


def test_a_batch_that_fails_is_sampled_again(tmp_path, monkeypatch):
    broken = {"conversation": turns("image")}
    broken["conversation"][0]["content"][0]["image"] = str(tmp_path / "missing.png")
    dataset = [broken, SEEN, SEEN]
    collate = make_robust_collate(
        dataset, functools.partial(default_collate_fn, processor=processor("qwen2_vl"))
    )
    batch = collate([broken, SEEN])
    assert batch["n_images_per_sample"].tolist() == [1, 1]
