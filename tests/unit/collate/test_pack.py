"""Samples joined into a pack: documents are separate, hidden tokens stay hidden, no pixel is copied."""

import pickle
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch

from packhorse.collate.packed import model_inputs, neat_packed_vlm_collater
from packhorse.collate.packer import Packer, join, pack_to_dict, to_pack, to_sample
from packhorse.collate.thd import packed_sequence_thd_vlm_collater
from packhorse.families import FAMILIES, Family
from packhorse.families.llava_onevision import LlavaOnevision
from packhorse.families.qwen_vl import mrope_position_ids
from packhorse.neat_packing_vlm import (
    MEDIA_KEYS,
    _build_packed_vlm_sample,
    _compute_mrope_position_ids,
    _shift_sample,
)
from raising import raises_bad_sample, raises_config


def sample(*ids, **more):
    tokens = torch.tensor(ids)
    return {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": torch.ones_like(tokens), **more}


def image(patches, grid, value=1.0):
    return {"pixel_values": torch.full((patches, 6), value), "image_grid_thw": torch.tensor([grid])}


def test_a_shift_cuts_every_tensor_per_token_and_no_media() -> None:
    pixels = torch.ones(4, 4)  # as many rows as there are tokens
    types = torch.tensor([[0, 1, 1, 0]])
    shifted = _shift_sample(sample(1, 2, 3, 4, pixel_values=pixels, mm_token_type_ids=types))
    assert shifted["input_ids"].tolist() == [1, 2, 3]
    assert shifted["labels"].tolist() == [2, 3, 4]
    assert shifted["attention_mask"].tolist() == [1, 1, 1]
    assert shifted["mm_token_type_ids"].tolist() == [[0, 1, 1]]
    assert shifted["pixel_values"] is pixels


def test_a_shift_cuts_positions_only_with_mrope() -> None:
    given = sample(1, 2, 3, position_ids=torch.arange(9).view(3, 3))
    assert _shift_sample(given, has_mrope=True)["position_ids"].tolist() == [[0, 1], [3, 4], [6, 7]]
    assert _shift_sample(given)["position_ids"].shape == (3, 3)


def test_what_a_hook_adds_per_token_is_shifted_and_joined() -> None:
    weights = torch.tensor([0.1, 0.2, 0.3])
    shifted = _shift_sample(sample(1, 2, 3, token_weights=weights))
    assert shifted["token_weights"].tolist() == pytest.approx([0.1, 0.2])
    pack = _build_packed_vlm_sample([shifted, _shift_sample(sample(4, 5))], 10, 0)
    assert pack["token_weights"].tolist() == pytest.approx([0.1, 0.2, 0.0])


def test_documents_get_numbers_and_positions_of_their_own() -> None:
    pack = _build_packed_vlm_sample([sample(1, 2, 3), sample(4, 5)], 8, 0)
    assert pack["input_ids"].tolist() == [1, 2, 3, 4, 5]
    assert pack["attention_mask"].tolist() == [1, 1, 1, 2, 2]
    assert pack["position_ids"].tolist() == [0, 1, 2, 0, 1]
    assert pack["seq_lens"] == [3, 2]
    assert (pack["n_images"], pack["n_videos"]) == (0, 0)


def test_hidden_tokens_stay_hidden() -> None:
    hiding = sample(1, 9, 9, 2)
    hiding["attention_mask"] = torch.tensor([1, 0, 0, 1])
    pack = _build_packed_vlm_sample([sample(7), hiding], 8, 0)
    assert pack["attention_mask"].tolist() == [1, 2, 0, 0, 2]


def test_media_are_joined_and_counted() -> None:
    samples = [sample(1, 2, **image(4, [1, 2, 2])), sample(3), sample(4, 5, **image(8, [1, 2, 4], 2.0))]
    pack = _build_packed_vlm_sample(samples, 8, 0)
    assert pack["pixel_values"].shape == (12, 6)
    assert pack["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4]]
    assert pack["n_images"] == 2


def test_alignment_fills_each_document_up_with_mrope_too() -> None:
    positions = torch.arange(3).expand(3, 3)
    samples = [sample(1, 2, 3, position_ids=positions), sample(4, 5, 6, position_ids=positions + 1)]
    pack = _build_packed_vlm_sample(samples, 8, 99, has_mrope=True, sequence_alignment=4)
    assert pack["input_ids"].tolist() == [1, 2, 3, 99, 4, 5, 6, 99]
    assert pack["labels"].tolist() == [1, 2, 3, -100, 4, 5, 6, -100]
    assert pack["attention_mask"].tolist() == [1, 1, 1, 0, 2, 2, 2, 0]
    assert pack["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]] * 3
    assert (pack["seq_lens"], pack["seq_lens_padded"]) == ([3, 3], [4, 4])


def test_pixels_stay_the_samples_own_until_the_batch_is_made() -> None:
    samples = [sample(1, 2, **image(4, [1, 2, 2])), sample(4, 5, **image(8, [1, 2, 4], 2.0))]
    pack = Packer(8).join([to_sample(one, None) for one in samples])
    assert pack.media["pixel_values"][0] is samples[0]["pixel_values"]
    assert torch.cat(pack.media["pixel_values"]).shape == (12, 6)
    assert torch.cat(pickle.loads(pickle.dumps(pack)).media["pixel_values"]).shape == (12, 6)


def test_images_of_different_shape_are_filled_up_where_the_family_says_so() -> None:
    two, three = torch.ones(1, 2, 3, 4, 4), torch.ones(2, 3, 3, 4, 4)
    joined = join("pixel_values", [two, three], LlavaOnevision(), torch.bfloat16)
    assert (joined.shape, joined.dtype) == ((3, 3, 3, 4, 4), torch.bfloat16)
    assert joined[0, 2].sum() == 0
    qwen = next(family for family in FAMILIES if family.name == "qwen2_vl")
    with raises_config("pixel_values", [(2, 6), (2, 5)]):
        join("pixel_values", [torch.ones(2, 6), torch.ones(2, 5)], qwen)


def family(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def test_pixels_that_come_as_a_list_of_tensors_are_joined_by_the_layout() -> None:
    listed = {"pixel_values": [torch.ones(4, 6), torch.zeros(8, 6)], "n_images": 2}
    grids = {"image_grid_thw": [torch.tensor([1, 2, 2]), torch.tensor([1, 2, 4])]}
    for known in (family("qwen2_vl"), None):
        pack = _build_packed_vlm_sample([sample(1, 2, **listed, **grids)], 8, 0, family=known)
        assert torch.equal(pack["pixel_values"], torch.cat(listed["pixel_values"]))
        assert pack["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4]]
        assert pack["n_images"] == 2
    whole = {"pixel_values": [torch.ones(3, 4, 4), torch.zeros(3, 4, 4)], "n_images": 2}
    both = [sample(1, 2, **whole), sample(3, pixel_values=torch.ones(1, 3, 4, 4), n_images=1)]
    pack = _build_packed_vlm_sample(both, 8, 0, family=family("gemma3"))
    assert pack["pixel_values"].shape == (3, 3, 4, 4)
    assert pack["pixel_values"][1].sum() == 0
    assert pack["n_images"] == 3


def test_tiles_of_a_list_are_filled_up_to_the_largest() -> None:
    tiles = {"pixel_values": [torch.ones(2, 3, 4, 4), torch.ones(3, 3, 4, 4)], "n_images": 2}
    pack = _build_packed_vlm_sample([sample(1, 2, **tiles)], 8, 0, family=LlavaOnevision())
    assert pack["pixel_values"].shape == (2, 3, 3, 4, 4)
    assert pack["pixel_values"][0, 2].sum() == 0


def test_arrays_are_media_and_notes_are_not() -> None:
    arrays = {"pixel_values": np.ones((4, 6), np.float32), "image_grid_thw": [[1, 2, 2]]}
    pack = _build_packed_vlm_sample([sample(1, 2, source="coco", tags=["a"], **arrays)], 8, 0)
    assert pack["pixel_values"].shape == (4, 6)
    assert pack["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert not {"source", "tags"} & pack.keys()


@pytest.mark.parametrize(
    ("samples", "setting", "value"),
    [
        ([], "samples", 0),
        ([sample(*range(9))], "pack_size", 8),
        ([sample(1, 2, mystery=torch.ones(1, 3))], "mystery", "tensor"),
        ([sample(1, 2, mystery=[torch.ones(3)])], "mystery", "list"),
        ([sample(1, pixel_values=[torch.ones(3, 4, 4)])], "pixel_values", None),
        ([sample(1, pixel_values=["a.png"])], "pixel_values", "list"),
        (
            [sample(1, image_grid_thw=torch.ones(2, 3), pixel_values=[torch.ones(4, 6)], n_images=2)],
            "pixel_values",
            1,
        ),
        ([{"input_ids": torch.tensor([1])}], "labels", None),
        ([sample(1, 2) | {"labels": torch.tensor([1])}], "labels", (1,)),
    ],
)
def test_what_cannot_be_joined_is_rejected(samples, setting, value) -> None:
    with raises_config(setting, value):
        _build_packed_vlm_sample(samples, 8, 0)


def test_mrope_without_positions_is_rejected() -> None:
    with raises_config("position_ids"):
        _build_packed_vlm_sample([sample(1, 2)], 8, 0, has_mrope=True)


def test_media_keys_are_those_of_the_families() -> None:
    assert set(MEDIA_KEYS) == {key for family in FAMILIES for key in family.layout}
    assert {"pixel_values", "image_grid_thw", "image_position_ids", "pixel_values_videos"} <= set(MEDIA_KEYS)


# --- typed samples -----------------------------------------------------------------------------------------


def test_the_entries_of_a_dict_are_sorted_by_name_and_what_no_family_declares_by_shape() -> None:
    notes = {"_key": "coco/1", "source": "coco", "video_grid_thw": None}
    weights = torch.tensor([0.5, 1.0])
    given = sample(1, 2, **image(2, [1, 1, 2]), token_weights=weights, n_videos=0, **notes)
    typed = to_sample(given, family("qwen2_vl"), "coco/1")
    assert typed.tokens.keys() == {"input_ids", "attention_mask", "token_weights"}
    assert typed.media.keys() == {"pixel_values", "image_grid_thw"}
    assert typed.num_items == {"image": 1, "video": 0, "audio": 0}
    assert (len(typed), typed.key, typed.position_ids) == (2, "coco/1", None)
    media_of_the_same_shape = sample(1, 2, second_per_grid_ts=torch.ones(2))
    assert to_sample(media_of_the_same_shape, None).tokens.keys() == {"input_ids", "attention_mask"}


def test_a_sample_is_the_same_after_a_dict() -> None:
    typed = to_sample(sample(1, 2, position_ids=torch.arange(2), **image(2, [1, 1, 2])), family("qwen2_vl"))
    given = typed.to_dict()
    assert (int(given["n_images"]), int(given["n_videos"])) == (1, 0)
    again = to_sample(given, family("qwen2_vl"))
    assert again.per_token.keys() == typed.per_token.keys()
    assert again.media.keys() == typed.media.keys()
    assert again.num_items == typed.num_items
    assert not {"n_images", "n_videos"} & to_sample(sample(1, 2), None).to_dict().keys()


def test_a_pack_is_the_same_after_a_dict() -> None:
    samples = [to_sample(sample(1, 2, **image(2, [1, 1, 2])), None), to_sample(sample(3, n_audios=1), None)]
    pack = Packer(8, sequence_alignment=2).join(samples)
    again = to_pack(pack_to_dict(pack, None), None)
    for name in ("num_items", "seq_lens", "seq_lens_padded", "items_per_document", "alignment"):
        assert getattr(again, name) == getattr(pack, name)
    assert all(torch.equal(value, pack.per_token[key]) for key, value in again.per_token.items())
    assert pack.num_items == {"image": 1, "video": 0, "audio": 1}


def test_a_prepared_sample_is_a_new_one_and_the_given_one_stays() -> None:
    given = to_sample(sample(1, 2, 3), None)
    prepared = Packer(8).prepare(given)
    assert (len(given), len(prepared)) == (3, 2)
    assert prepared.labels is not None
    assert prepared.labels.tolist() == [2, 3]
    with pytest.raises(FrozenInstanceError):
        given.labels = None  # type: ignore[misc]
    with raises_bad_sample("empty_sample"):
        Packer(8).prepare(to_sample(sample(1), None))


def test_a_sample_without_positions_next_to_others_with_them_is_named() -> None:
    samples = [
        to_sample(sample(1, 2, position_ids=torch.arange(2)), None, "coco/1"),
        to_sample(sample(3, 4), None, "coco/2"),
    ]
    with raises_config("position_ids", match="coco/2"):
        Packer(8).join(samples)


def test_samples_without_loss_weights_have_weight_1_next_to_others_that_have_them() -> None:
    packer = Packer(8, sequence_alignment=2)
    plain, weighted = (
        packer.prepare(to_sample(sample(1, 2, 3, 4, **fields), None))
        for fields in ({}, {"loss_weights": torch.tensor([1, 0.5, 0.25, 0])})
    )
    pack = packer.join([plain, weighted])
    assert pack.loss_weights is not None
    assert pack.loss_weights.tolist() == [1, 1, 1, 1, 0.5, 0.25, 0, 1]
    other = packer.join([plain])
    assert other.loss_weights is None
    batch = neat_packed_vlm_collater([pack_to_dict(pack, None), pack_to_dict(other, None)])
    assert batch["loss_weights"].tolist() == [pack.loss_weights.tolist(), [1.0] * 8]
    assert batch["loss_weights"].dtype == torch.float32


def test_a_batch_in_which_all_loss_weights_are_1_has_none() -> None:
    packer = Packer(8)
    pack = packer.join([packer.prepare(to_sample(sample(1, 2, 3, loss_weights=torch.ones(3)), None))])
    assert "loss_weights" not in neat_packed_vlm_collater([pack_to_dict(pack, None)])
    assert "loss_weights" not in packed_sequence_thd_vlm_collater([pack_to_dict(pack, None)])


def test_loss_weights_follow_the_labels_when_a_sample_is_cut_shifted_and_packed() -> None:
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4])
    typed = to_sample(sample(1, 2, 3, 4, loss_weights=weights), family("qwen2_vl"))
    assert typed.tokens.keys() == {"input_ids", "attention_mask"}
    assert typed.loss_weights is weights
    packer = Packer(8, sequence_alignment=4)
    pack = packer.join([packer.prepare(typed), packer.prepare(typed.cut(slice(1, 4)))])
    assert pack.loss_weights is not None
    assert pack.labels is not None
    assert pack.labels.tolist() == [2, 3, 4, -100, 3, 4, -100, -100]
    assert pack.loss_weights.tolist() == pytest.approx([0.2, 0.3, 0.4, 1, 0.3, 0.4, 1, 1])
    batch = neat_packed_vlm_collater([pack_to_dict(pack, None)])
    assert batch["loss_weights"].tolist() == [pack.loss_weights.tolist()]
    assert "loss_weights" not in model_inputs(batch)


# --- positions ----------------------------------------------------------------------------------------------


def test_rope_index_is_asked_with_what_it_takes() -> None:
    asked = {}

    def get_rope_index(input_ids, image_grid_thw=None, attention_mask=None):
        asked.update(image_grid_thw=image_grid_thw, attention_mask=attention_mask)
        return torch.arange(input_ids.shape[1]).expand(3, 1, -1), None

    positions = _compute_mrope_position_ids(sample(1, 2, 3, **image(4, [1, 2, 2])), get_rope_index)
    assert positions.tolist() == [[0, 1, 2]] * 3
    assert asked["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert asked["attention_mask"].tolist() == [[1, 1, 1]]


def test_a_callable_that_takes_no_ids_gives_no_positions() -> None:
    assert _compute_mrope_position_ids(sample(1, 2), lambda tokens: None) is None


class _Model:
    class config:
        image_token_id = 7
        video_token_id = 8

    def get_rope_index(self, input_ids, mm_token_type_ids, image_grid_thw=None):
        return mm_token_type_ids.expand(3, 1, -1), None


def test_token_types_come_from_the_models_config_where_the_sample_has_none() -> None:
    positions = mrope_position_ids(sample(1, 7, 8, 2, **image(4, [1, 2, 2])), _Model().get_rope_index)
    assert positions[0].tolist() == [0, 1, 2, 0]


def test_unknown_token_types_are_an_error() -> None:
    def get_rope_index(input_ids, mm_token_type_ids, image_grid_thw=None):
        raise AssertionError("not called")

    with raises_config("mm_token_type_ids"):
        mrope_position_ids(sample(1, 7, **image(4, [1, 2, 2])), get_rope_index)


def test_positions_of_another_shape_are_rejected() -> None:
    with raises_config("get_rope_index", (1, 2)):
        mrope_position_ids(sample(1, 2), lambda input_ids: (torch.zeros(1, 2), None))
