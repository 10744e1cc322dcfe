"""Encoded samples become one rectangular batch; nothing is lost, and nothing is mixed up."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from contract.processors import processor
from packhorse.chat import IGNORE_INDEX
from packhorse.collate_fns import pad_collate_fn
from packhorse.datasets import RobustDatasetWrapper
from packhorse.ledger import Ledger
from raising import raises_bad_sample, raises_config

STUB = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=9))


def sample(length: int, **more) -> dict:
    ids = torch.arange(1, length + 1)
    labels = ids.clone()
    labels[: length // 2] = IGNORE_INDEX
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, **more}


def image(*grid: int, fill: float = 1.0) -> dict:
    return {
        "pixel_values": torch.full((grid[0] * grid[1] * grid[2], 6), fill),
        "image_grid_thw": torch.tensor([grid]),
    }


def test_short_samples_are_filled_up_on_the_right_and_shifted():
    batch = pad_collate_fn([sample(4, mm_token_type_ids=torch.ones(4, dtype=torch.long)), sample(2)], STUB)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [1, 2, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[-100, 3, 4], [2, -100, -100]]
    assert batch["mm_token_type_ids"].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert batch.keys() == {"input_ids", "attention_mask", "labels", "shift_labels", "mm_token_type_ids"}


def test_one_sample_is_a_batch():
    batch = pad_collate_fn([sample(3)], STUB)
    assert batch["input_ids"].tolist() == [[1, 2]]
    assert batch["labels"].tolist() == [[2, 3]]


def test_a_fixed_length_is_kept():
    assert pad_collate_fn([sample(3)], STUB, max_length=8)["input_ids"].shape == (1, 7)


def test_a_sample_longer_than_the_fixed_length_is_rejected_not_cut():
    with raises_bad_sample("too_long"):
        pad_collate_fn([sample(9)], STUB, max_length=8)


def test_media_are_joined_and_counted():
    batch = pad_collate_fn(
        [sample(4, **image(1, 2, 2)), sample(3), sample(3, **image(1, 2, 4, fill=2.0))], STUB
    )
    assert batch["pixel_values"].shape == (12, 6)
    assert batch["pixel_values"][:, 0].tolist() == [1.0] * 4 + [2.0] * 8
    assert batch["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4]]
    assert batch["n_images_per_sample"].tolist() == [1, 0, 1]
    assert "n_videos_per_sample" not in batch


def test_videos_are_counted_apart():
    video = {
        "pixel_values_videos": torch.ones(8, 6),
        "video_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2]]),
        "second_per_grid_ts": torch.tensor([1.0, 0.5]),
    }
    batch = pad_collate_fn([sample(4, **image(1, 2, 2)), sample(3, **video)], processor("qwen2_5_vl"))
    assert batch["n_images_per_sample"].tolist() == [1, 0]
    assert batch["n_videos_per_sample"].tolist() == [0, 2]
    assert batch["second_per_grid_ts"].tolist() == [1.0, 0.5]


def test_media_that_are_none_are_not_there():
    batch = pad_collate_fn([sample(3, pixel_values=None, image_grid_thw=None)], STUB)
    assert "pixel_values" not in batch


def test_tiles_that_differ_in_number_are_filled_up_where_the_family_says_so():
    def tiles(number):
        return {
            "pixel_values": torch.ones(1, number, 3, 2, 2),
            "image_sizes": torch.tensor([[2, 2]]),
            "batch_num_images": torch.tensor([1]),
        }

    batch = pad_collate_fn(
        [sample(3, **tiles(4)), sample(3, **tiles(2)), sample(2)], processor("llava_onevision")
    )
    assert batch["pixel_values"].shape == (2, 4, 3, 2, 2)
    assert batch["pixel_values"][1, 2:].abs().sum() == 0
    assert batch["batch_num_images"].tolist() == [1, 1, 0]
    assert batch["n_images_per_sample"].tolist() == [1, 1, 0]


def test_a_tensor_that_the_sample_owns_has_a_row_for_every_sample():
    def images(tiles):
        return {
            "pixel_values": torch.ones(1, tiles, 3, 2, 2),
            "pixel_attention_mask": torch.ones(1, tiles, 2, 2, dtype=torch.long),
        }

    samples = [sample(2), sample(3, **images(1)), sample(3, **images(3))]
    batch = pad_collate_fn(samples, processor("smolvlm"))
    assert batch["pixel_values"].shape == (3, 3, 3, 2, 2)
    assert batch["pixel_values"].flatten(1).sum(1).tolist() == [0, 12, 36]
    assert batch["pixel_attention_mask"].flatten(1).sum(1).tolist() == [0, 4, 12]


def test_what_a_mask_is_filled_up_with_is_the_familys_to_say():
    def crops(number):
        return {
            "image_pixel_values": torch.ones(1, number, 3, 2, 2),
            "image_attention_mask": torch.zeros(1, number, 2, 2),
            "image_sizes": torch.tensor([[2, 2]]),
        }

    batch = pad_collate_fn([sample(3, **crops(1)), sample(3, **crops(2))], processor("phi4_mm"))
    assert batch["image_attention_mask"].sum() == 4
    assert batch["image_pixel_values"].sum() == 36


def test_tensors_that_do_not_fit_together_are_named():
    wide, narrow = sample(3, **image(1, 2, 2)), sample(3, **image(1, 2, 2))
    narrow["pixel_values"] = narrow["pixel_values"][:, :5]
    with raises_config("pixel_values", [(4, 6), (4, 5)]):
        pad_collate_fn([wide, narrow], processor("qwen2_vl"))


def test_a_tensor_that_the_family_does_not_declare_is_rejected():
    with raises_config("smell", "tensor"):
        pad_collate_fn([sample(3, smell=torch.ones(1))], processor("qwen2_vl"))
    with raises_config("smell", "str"):
        pad_collate_fn([sample(3, smell="sweet")], STUB)


def test_samples_may_bring_their_own_counts():
    tiles = {"pixel_values": torch.ones(7, 3, 2, 2)}
    samples = [sample(3, **tiles), sample(3)]
    assert pad_collate_fn(samples, processor("internvl"))["n_images_per_sample"].tolist() == [7, 0]
    samples = [sample(3, **tiles, n_images=2, n_videos=1), sample(3, n_images=0, n_videos=0)]
    batch = pad_collate_fn(samples, processor("internvl"))
    assert batch["n_images_per_sample"].tolist() == [2, 0]
    assert batch["n_videos_per_sample"].tolist() == [1, 0]
    assert "n_images" not in batch


def test_notes_with_an_underscore_are_not_tensors():
    assert "_key" not in pad_collate_fn([sample(3, _key="coco/1")], STUB)


def test_positions_are_padded_and_shifted():
    flat = pad_collate_fn([sample(n, position_ids=torch.arange(n)) for n in (4, 2)], STUB)
    assert flat["position_ids"].tolist() == [[0, 1, 2], [0, 1, 0]]
    three = pad_collate_fn([sample(n, position_ids=torch.arange(n).repeat(3, 1)) for n in (4, 2)], STUB)
    assert three["position_ids"].shape == (3, 2, 3)
    with raises_config("position_ids"):
        pad_collate_fn([sample(3, position_ids=torch.arange(3)), sample(3)], STUB)


def test_what_a_hook_adds_per_token_is_padded_and_shifted():
    samples = [sample(3, token_weights=torch.tensor([0.5, 0.25, 1.0])), sample(2)]
    batch = pad_collate_fn(samples, processor("qwen2_vl"))
    assert batch["token_weights"].tolist() == [[0.5, 0.25], [0, 0]]


def test_loss_weights_are_padded_and_shifted_like_labels():
    samples = [sample(n, loss_weights=torch.arange(n) / 4) for n in (4, 2)]
    batch = pad_collate_fn(samples, processor("qwen2_vl"))
    assert batch["loss_weights"].tolist() == [[0.25, 0.5, 0.75], [0.25, 1, 1]]


def test_samples_without_loss_weights_have_weight_1_in_a_padded_batch():
    weighted = sample(4, loss_weights=torch.arange(4) / 4)
    batch = pad_collate_fn([weighted, sample(3)], processor("qwen2_vl"))
    assert batch["loss_weights"].tolist() == [[0.25, 0.5, 0.75], [1, 1, 1]]
    ones = sample(4, loss_weights=torch.ones(4))
    assert "loss_weights" not in pad_collate_fn([ones, sample(3)], processor("qwen2_vl"))


def test_types_may_come_with_a_batch_axis_of_one():
    batch = pad_collate_fn([sample(3, mm_token_type_ids=torch.tensor([[0, 1, 0]]))], STUB)
    assert batch["mm_token_type_ids"].tolist() == [[0, 1]]


def test_lists_are_taken_too():
    batch = pad_collate_fn([{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}], STUB)
    assert batch["labels"].tolist() == [[2, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1]]


def test_a_tensor_of_another_length_is_named():
    with raises_config("labels", (2,), match="sample 1"):
        pad_collate_fn([sample(3), {**sample(3), "labels": torch.ones(2)}], STUB)


def test_missing_ids_or_labels_are_named():
    with raises_config("labels"):
        pad_collate_fn([{"input_ids": torch.ones(3)}], STUB)
    with raises_config("input_ids", match="raw examples"):
        pad_collate_fn([{"conversation": []}], STUB)


@pytest.mark.parametrize("tokenizer", [SimpleNamespace(pad_token_id=None), SimpleNamespace()])
def test_a_tokenizer_without_a_pad_token_is_rejected(tokenizer):
    with raises_config("tokenizer.pad_token"):
        pad_collate_fn([sample(3)], SimpleNamespace(tokenizer=tokenizer))


def test_a_sample_that_was_skipped_is_rejected_with_what_to_do():
    with raises_config("collate_fn", match="sample 1"):
        pad_collate_fn([sample(3), None], STUB)


def test_a_sample_that_is_too_long_is_named_and_dropped_alone():
    dataset = RobustDatasetWrapper([sample(3), sample(9), sample(4)], on_bad="skip", ledger=Ledger())
    collate = dataset.robust_collate(partial(pad_collate_fn, processor=STUB, max_length=8))
    assert collate(dataset.__getitems__([0, 1, 2]))["input_ids"].shape == (2, 7)
    assert [(drop.key, drop.reason) for drop in dataset.ledger] == [("1", "too_long")]


def test_an_empty_batch_has_nothing_in_it():
    assert pad_collate_fn([], STUB) == {}


def test_pixels_are_bfloat16_unless_another_dtype_is_requested():
    sample = {
        "input_ids": torch.tensor([1, 2]),
        "labels": torch.tensor([1, 2]),
        "pixel_values": torch.rand(4, 6),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
    }
    real = processor("qwen2_vl")
    assert pad_collate_fn([sample], real)["pixel_values"].dtype == torch.bfloat16
    assert pad_collate_fn([sample], real)["image_grid_thw"].dtype == torch.int64
    same = pad_collate_fn([sample], real, pixel_dtype=None)["pixel_values"]
    assert torch.equal(same, sample["pixel_values"])


def test_pixels_that_come_as_a_list_of_tensors_are_joined_by_the_layout():
    listed = {"pixel_values": [torch.ones(3, 4, 4), torch.zeros(3, 4, 4)], "n_images": 2}
    whole = {"pixel_values": torch.stack(listed["pixel_values"]), "n_images": 2}
    made, expected = (pad_collate_fn([sample(4, **media)], processor("gemma3")) for media in (listed, whole))
    assert torch.equal(made["pixel_values"], expected["pixel_values"])
    with raises_config("pixel_values", 2):
        pad_collate_fn([sample(4, **{**listed, "n_images": 1})], processor("gemma3"))
