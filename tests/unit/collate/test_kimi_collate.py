"""Kimi-VL and Kimi K2.5: the model's own processors, and transformers'."""

from types import SimpleNamespace

import pytest
import torch
from collate_stubs import GREETING, CallProcessor, CharTokenizer, chatml, make_turns, text

from contract.processors import processor
from contract.samples import clip, make_image, turns
from packhorse.chat import IGNORE_INDEX
from packhorse.collate_fns import _expand_image_tokens, kimi_k25_vl_collate_fn, kimi_vl_collate_fn
from packhorse.families import Encoder
from packhorse.families.kimi_k25 import KimiK25Remote
from raising import raises_config

MEDIA = 3


def supervised_texts(tokenizer, labels) -> list[str]:
    return [tokenizer.decode(row[row != IGNORE_INDEX].tolist()) for row in labels]


def image_example(*sizes: tuple[int, int], answer: str = "A cat.") -> dict:
    parts = [{"type": "image", "image": make_image(*size)} for size in sizes]
    return {"conversation": make_turns(("user", [*parts, *text("What?")]), ("assistant", text(answer)))}


class K25(CallProcessor):
    """As the model's repository has it: one text, ``medias``, a placeholder for each image, ``grid_thws``."""

    def __call__(self, *, text, return_tensors, medias=None):
        self.calls.append({"text": text, "medias": medias})
        ids = torch.tensor([self.tokenizer(text)["input_ids"]])
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if medias:
            grids = [(1, media["image"].height // 14, media["image"].width // 14) for media in medias]
            batch["grid_thws"] = torch.tensor(grids)
            batch["pixel_values"] = torch.ones(sum(h * w for _, h, w in grids), 3, 14, 14)
        return batch


def test_texts_images_and_options_are_passed_plainly_to_kimi_vl():
    stub = CallProcessor()
    batch = kimi_vl_collate_fn([image_example((28, 28)), {"conversation": GREETING}], stub)
    (call,) = stub.calls
    assert call["add_special_tokens"] is False
    assert call["padding"] is True
    assert [image.size for image in call["images"]] == [(28, 28)]
    assert call["text"][1] == chatml(GREETING)
    assert supervised_texts(stub.tokenizer, batch["labels"]) == ["A cat.<|im_end|>", "Hello!<|im_end|>"]
    assert batch["n_images_per_sample"].tolist() == [1, 0]


def test_a_batch_of_kimi_vl_has_the_requested_length(ledger):
    stub = CallProcessor()
    long = {"conversation": make_turns(("user", "Why? " * 40), ("assistant", "So."))}
    batch = kimi_vl_collate_fn([{"conversation": GREETING}, long], stub, max_length=100)
    assert stub.calls[0]["padding"] is True
    assert batch["input_ids"].shape == (2, 99)
    assert ledger.counts() == {"truncated": 1, "nothing_supervised": 1}


def test_kimi_vl_drops_what_is_too_long_to_the_token(ledger):
    examples = [image_example((100, 60)), image_example((300, 200))]
    longest = kimi_vl_collate_fn(examples, processor("kimi_vl"))["input_ids"].shape[1] + 1
    assert kimi_vl_collate_fn(examples, processor("kimi_vl"), longest)["input_ids"].shape == (2, longest - 1)
    dropped = kimi_vl_collate_fn(examples, processor("kimi_vl"), longest - 1, drop_overlong=True)
    assert dropped["input_ids"].shape[0] == 1
    assert ledger.counts() == {"too_long": 1}


def test_kimi_vl_cuts_tokens_and_no_image(ledger):
    examples = [image_example((100, 60)), image_example((300, 200))]
    whole = kimi_vl_collate_fn(examples, processor("kimi_vl"))
    limit = whole["input_ids"].shape[1]
    batch = kimi_vl_collate_fn(examples, processor("kimi_vl"), limit)
    assert torch.equal(batch["input_ids"], whole["input_ids"][:, : limit - 1])
    assert torch.equal(batch["pixel_values"], whole["pixel_values"])
    assert ledger.counts() == {"truncated": 1}
    small = kimi_vl_collate_fn(examples, processor("kimi_vl"), 60)
    assert small["n_images_per_sample"].tolist() == [1, 0]
    assert len(small["image_grid_hws"]) == 1


def test_a_placeholder_is_repeated_for_each_token_of_its_image():
    ids, mask = torch.tensor([7, MEDIA, 8, MEDIA]), torch.tensor([1, 1, 1, 0])
    grids = torch.tensor([[1, 4, 4], [1, 2, 6]])
    found, seen_there = _expand_image_tokens(ids, mask, grids, MEDIA)
    assert found.tolist() == [7, *[MEDIA] * 4, 8, *[MEDIA] * 3]
    assert seen_there.tolist() == [1] * 6 + [0] * 3
    found, _ = _expand_image_tokens(ids, mask, grids, MEDIA, merge_kernel_size=(1, 2))
    assert (found == MEDIA).sum() == 8 + 6


def test_nothing_is_expanded_where_there_is_no_image():
    ids = torch.tensor([7, 8])
    found, _ = _expand_image_tokens(ids, torch.ones_like(ids), torch.zeros(0, 3, dtype=torch.long), MEDIA)
    assert found.tolist() == [7, 8]


@pytest.mark.parametrize("ids", [[7, 8], [7, *[MEDIA] * 4, 8]])
def test_ids_without_a_placeholder_and_expanded_ids_stay_as_they_are(ids):
    ids = torch.tensor(ids)
    found, mask = _expand_image_tokens(ids, torch.ones_like(ids), torch.tensor([[1, 4, 4]]), MEDIA)
    assert found.tolist() == ids.tolist()
    assert len(mask) == len(ids)


def test_an_image_without_a_placeholder_is_rejected_for_k25():
    class Forgetful(K25):
        def apply_chat_template(self, conversation, **options):
            return super().apply_chat_template(conversation, **options).replace("<|media_pad|>", "")

    with raises_config("processor", match="0 placeholders"):
        kimi_k25_vl_collate_fn([image_example((56, 56))], Forgetful())


def test_placeholders_and_images_must_be_as_many():
    ids = torch.tensor([MEDIA, MEDIA])
    with raises_config("processor", match="2 placeholders"):
        _expand_image_tokens(ids, torch.ones_like(ids), torch.tensor([[1, 2, 2]]), MEDIA)


def test_placeholders_of_k25_are_expanded_before_the_model_runs():
    stub = K25()
    batch = kimi_k25_vl_collate_fn([image_example((56, 56), (28, 56)), {"conversation": GREETING}], stub)
    assert [call["medias"] and len(call["medias"]) for call in stub.calls] == [2, None]
    assert stub.calls[0]["medias"][0]["type"] == "image"
    assert (batch["input_ids"] == MEDIA).sum(1).tolist() == [4 + 2, 0]
    assert batch["grid_thws"].tolist() == [[1, 4, 4], [1, 4, 2]]
    assert batch["image_grid_hws"].tolist() == [[4, 4], [4, 2]]
    assert batch["pixel_values"].shape == (24, 3, 14, 14)
    assert batch["n_images_per_sample"].tolist() == [2, 0]
    assert supervised_texts(stub.tokenizer, batch["labels"]) == ["A cat.<|im_end|>", "Hello!<|im_end|>"]
    assert (batch["attention_mask"] == (batch["input_ids"] != 0)).all()


def test_k25_batches_have_one_length():
    batch = kimi_k25_vl_collate_fn(
        [image_example((56, 56)), {"conversation": GREETING}], K25(), max_length=200
    )
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 199)


def test_media_whose_tokens_were_cut_are_dropped_and_not_counted(ledger):
    examples = [image_example((560, 560)), image_example((28, 28), (560, 560)), image_example((28, 28))]
    batch = kimi_k25_vl_collate_fn(examples, K25(), max_length=90)
    assert batch["input_ids"].shape == (3, 89)
    assert batch["n_images_per_sample"].tolist() == [0, 1, 1]
    assert batch["grid_thws"].tolist() == [[1, 2, 2], [1, 2, 2]]
    assert batch["pixel_values"].shape[0] == 8
    assert (batch["input_ids"] == MEDIA).sum(1).tolist() == [0, 1, 1]
    assert ledger.counts() == {"truncated": 2, "nothing_supervised": 2}
    assert [entry.action for entry in ledger if entry.reason == "truncated"] == ["cut", "cut"]


def test_a_batch_whose_media_were_all_cut_has_no_media(ledger):
    batch = kimi_k25_vl_collate_fn([image_example((560, 560))], K25(), max_length=60)
    assert not {"pixel_values", "grid_thws", "image_grid_hws", "n_images_per_sample"} & batch.keys()


def test_an_answer_that_is_cut_is_supervised_as_far_as_it_goes(ledger):
    stub = K25()
    whole = kimi_k25_vl_collate_fn([image_example((28, 28), answer="A very long cat.")], stub)
    length = whole["input_ids"].shape[1] + 1
    batch = kimi_k25_vl_collate_fn(
        [image_example((28, 28), answer="A very long cat.")], stub, max_length=length - 7
    )
    assert supervised_texts(stub.tokenizer, batch["labels"]) == ["A very long"]
    assert batch["n_images_per_sample"].tolist() == [1]


def test_the_shift_cuts_no_image_that_ends_at_the_limit(ledger):
    stub = K25()
    ids = kimi_k25_vl_collate_fn([image_example((56, 56))], stub)["input_ids"][0]
    after = int((ids == MEDIA).nonzero()[-1]) + 1
    batch = kimi_k25_vl_collate_fn([image_example((56, 56))], stub, max_length=after)
    assert "grid_thws" not in batch
    assert (batch["input_ids"] == MEDIA).sum() == 0
    batch = kimi_k25_vl_collate_fn([image_example((56, 56))], stub, max_length=after + 1)
    assert (batch["input_ids"] == MEDIA).sum() == 4
    assert batch["n_images_per_sample"].tolist() == [1]


def test_an_unknown_token_is_not_taken_for_the_placeholder():
    class Unknowing(CharTokenizer):
        unk_token_id = 7

        def convert_tokens_to_ids(self, token):
            return 7

    stub = SimpleNamespace(tokenizer=Unknowing())
    assert Encoder(stub, KimiK25Remote()).media_token_ids == {163605}
    stub = SimpleNamespace(tokenizer=CharTokenizer())
    assert Encoder(stub, KimiK25Remote()).media_token_ids == {MEDIA}


def test_a_processor_that_does_not_take_text_alone_is_not_asked_to():
    class NeedsMedia(K25):
        def __call__(self, messages=None, medias=None, text=None, return_tensors="pt", **options):
            if messages is None and (medias is None or text is None):
                raise ValueError("Provide either 'messages' or both 'medias' and 'text'")
            return super().__call__(text=text, return_tensors=return_tensors, medias=medias)

    examples = [{"conversation": GREETING}, image_example((56, 56))]
    assert torch.equal(
        kimi_k25_vl_collate_fn(examples, NeedsMedia())["input_ids"],
        kimi_k25_vl_collate_fn(examples, K25())["input_ids"],
    )


def test_a_processor_that_takes_images_gets_images():
    class Named(K25):
        def __call__(self, *, text, return_tensors, images=None):
            medias = [{"type": "image", "image": image} for image in images or ()]
            return super().__call__(text=text, return_tensors=return_tensors, medias=medias)

    batch = kimi_k25_vl_collate_fn([image_example((56, 56))], Named())
    assert (batch["input_ids"] == MEDIA).sum() == 4


def test_the_placeholder_of_the_released_model_is_used_if_no_other_is_known():
    class Numbers(CharTokenizer):
        convert_tokens_to_ids = None

        def __call__(self, words, add_special_tokens=True):
            found = [
                CharTokenizer().convert_tokens_to_ids(one) for one in words.replace("<|media_pad|>", "\0")
            ]
            return {"input_ids": [163605 if number == 4 else number for number in found]}

    stub = K25()
    stub.tokenizer = Numbers()
    batch = kimi_k25_vl_collate_fn([image_example((56, 56))], stub)
    assert (batch["input_ids"] == 163605).sum() == 4


def test_a_missing_pad_token_is_an_error():
    stub = K25()
    stub.tokenizer.pad_token_id = None
    with raises_config("tokenizer.pad_token"):
        kimi_k25_vl_collate_fn([{"conversation": GREETING}], stub)


@pytest.mark.needs_family("kimi_k25")
def test_transformers_processor_is_cut_before_the_video_that_does_not_fit(ledger):
    frames, metadata = clip(6)
    video = {"type": "video", "video": frames, "video_metadata": metadata}
    example = {"conversation": turns("image")}
    example["conversation"][0]["content"][:1] = [{"type": "image", "image": make_image(56, 56)}, video]
    real = processor("kimi_k25")
    whole = kimi_k25_vl_collate_fn([example], real)
    assert whole["n_videos_per_sample"].tolist() == [1]
    places = (whole["input_ids"][0] == real.video_token_id).nonzero().flatten()
    batch = kimi_k25_vl_collate_fn([example], real, max_length=int(places[-1]))
    assert batch["n_images_per_sample"].tolist() == [1]
    assert not {"n_videos_per_sample", "pixel_values_videos", "video_grid_thw"} & batch.keys()
    assert not (batch["input_ids"] == real.video_token_id).any()
    assert torch.equal(batch["image_grid_thw"], whole["image_grid_thw"])
    assert torch.equal(batch["pixel_values"], whole["pixel_values"])
