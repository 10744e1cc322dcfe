"""Packed batches: each backend gets what keeps documents apart, and nothing else is changed."""

import pickle

import pytest
import torch

from noise_floor import largest_difference, noise_floor
from packhorse.collate.masks import block_causal_mask, document_block_mask, find_segments, positions_separate
from packhorse.collate_fns import (
    loss_inputs,
    model_inputs,
    neat_packed_vlm_collater,
    packed_sequence_thd_vlm_collater,
)
from packhorse.errors import ConfigError
from packhorse.families.gemma3 import Gemma3
from packhorse.families.varlen import varlen_attention
from packhorse.neat_packing_vlm import _build_packed_vlm_sample
from raising import raises_config

DOCUMENTS = torch.tensor([[1, 1, 1, 2, 0, 0, 2, 3, 0, 0], [1, 0, 1, 1, 1, 1, 1, 1, 1, 1]])


def sample(length, hidden=(), **more):
    ids = torch.arange(length) + 1
    mask = torch.ones(length, dtype=torch.long)
    mask[list(hidden)] = 0
    return {"input_ids": ids, "labels": ids + 1, "attention_mask": mask, **more}


def pack(*samples, **options):
    return _build_packed_vlm_sample(samples, 1000, 0, **options)


def compare_all(documents):
    """The definition, by comparing every token with every other."""
    length = documents.shape[1]
    same = (documents[:, :, None] == documents[:, None, :]) & (documents[:, :, None] > 0)
    return (same & torch.ones(length, length, dtype=torch.bool).tril())[:, None]


def test_the_mask_filled_by_documents_is_the_one_made_by_comparing() -> None:
    assert torch.equal(block_causal_mask(DOCUMENTS), compare_all(DOCUMENTS))


def test_images_are_bidirectional_within_the_window() -> None:
    documents = torch.ones(1, 8, dtype=torch.long)
    marked = torch.tensor([[False, True, True, True, False, False, False, False]])
    mask = block_causal_mask(documents, marked)[0, 0]
    assert mask[1, 3]
    assert not mask[0, 1]
    assert mask[7, 0]
    windowed = block_causal_mask(documents, marked, window=3)[0, 0]
    assert windowed[1, 3]
    assert windowed[7].tolist() == [False] * 5 + [True] * 3


@pytest.mark.parametrize("length", [100, 128, 300, 1000])
def test_the_block_mask_allows_what_the_dense_mask_allows(length) -> None:
    torch.manual_seed(length)
    documents = (torch.rand(2, length) < 0.01).cumsum(-1) + 1
    documents[:, 40:60] = 0
    documents[1, -length // 3 :] = 0
    block_mask = document_block_mask(documents)
    blocks = -(-length // 128)
    dense = torch.nn.functional.pad(compare_all(documents)[:, 0], (0, -length % 128, 0, -length % 128))
    tiles = dense.view(2, blocks, 128, blocks, 128).permute(0, 1, 3, 2, 4).flatten(-2)
    shown = block_mask.to_dense()[:, 0].bool()
    assert bool((shown | ~tiles.any(-1)).all())  # no block is dropped that holds something
    for row in range(2):
        for number in range(blocks):
            count = int(block_mask.full_kv_num_blocks[row, 0, number])
            for column in block_mask.full_kv_indices[row, 0, number, :count].tolist():
                assert bool(tiles[row, number, column].all())  # and none is whole that is not
    places = torch.arange(length)
    seen = block_mask.mask_mod(torch.tensor(1), torch.tensor(0), places[:, None], places[None, :])
    assert torch.equal(seen, compare_all(documents)[1, 0])
    again = pickle.loads(pickle.dumps(block_mask)).to("cpu")
    assert torch.equal(again.mask_mod.documents, documents)


def test_decreasing_document_numbers_are_rejected() -> None:
    with raises_config("documents"):
        block_causal_mask(torch.tensor([[2, 2, 1]]))


def test_segments_put_hidden_tokens_after_their_document() -> None:
    found = find_segments(DOCUMENTS)
    assert found.moved
    assert found.order[0].tolist() == [0, 1, 2, 3, 6, 4, 5, 7, 8, 9]
    assert found.cumulative.tolist() == [0, 3, 5, 7, 8, 10, 19, 20]
    assert found.longest == 9
    assert found.lengths == [[3, 2, 1], [9]]
    assert found.padded == [[3, 4, 3], [10]]


def test_sdpa_gets_a_bool_mask_and_eager_numbers_to_add() -> None:
    packs = [pack(sample(3), sample(2)), pack(sample(4))]
    batch = neat_packed_vlm_collater(packs, padding_idx=9)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 1, 2], [1, 2, 3, 4, 9]]
    assert batch["labels"].tolist() == [[2, 3, 4, 2, 3], [2, 3, 4, 5, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    documents = torch.tensor([[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]])
    assert torch.equal(batch["_packed_seq_ids"], documents)
    assert batch["attention_mask"].dtype == torch.bool
    assert torch.equal(batch["attention_mask"], compare_all(documents))
    eager = neat_packed_vlm_collater(packs, attn_implementation="eager", mask_dtype=torch.bfloat16)
    added = eager["attention_mask"]
    assert added.dtype == torch.bfloat16
    assert torch.equal(added == 0, compare_all(documents))
    assert bool((added[added != 0] == torch.finfo(torch.bfloat16).min).all())


def test_flash_attention_gets_document_numbers_and_where_documents_begin() -> None:
    packs = [pack(sample(3), sample(2)), pack(sample(4))]
    batch = neat_packed_vlm_collater(packs, attn_implementation="flash_attention_2")
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 9, 10]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert (batch["max_length_q"], batch["max_length_k"]) == (4, 4)
    inputs = model_inputs(batch)
    assert "attention_mask" not in inputs
    assert "labels" not in inputs


def test_varlen_gets_no_mask_and_hidden_tokens_after_their_document() -> None:
    batch = neat_packed_vlm_collater([pack(sample(4, hidden=[1]), sample(2))], attn_implementation="varlen")
    assert "attention_mask" not in batch
    assert batch["input_ids"].tolist() == [[1, 3, 4, 2, 1, 2]]
    assert batch["position_ids"].tolist() == [[0, 2, 3, 1, 0, 1]]
    assert batch["_packed_seq_ids"].tolist() == [[1, 1, 1, 0, 2, 2]]
    assert batch["cu_seq_lens_k"].tolist() == [0, 3, 4, 6]


def test_hidden_tokens_do_not_move_past_media() -> None:
    hiding = sample(4, hidden=[1], n_images=2)
    with raises_config("attn_implementation", "varlen", match="2 media"):
        neat_packed_vlm_collater([pack(hiding)], attn_implementation="varlen")
    neat_packed_vlm_collater([pack(hiding)], attn_implementation="flex_attention")


def test_transformer_engine_gets_lengths() -> None:
    packs = [pack(sample(3), sample(4, hidden=[1]), sequence_alignment=4), pack(sample(4))]
    batch = packed_sequence_thd_vlm_collater(packs, max_length=12)
    assert batch["qkv_format"] == "thd"
    assert batch["seq_lens"].tolist() == [[3, 3], [4, -1000]]
    assert batch["seq_lens_padded"].tolist() == [[4, 8], [12, -1000]]
    assert batch["input_ids"].tolist()[0] == [1, 2, 3, 0, 1, 3, 4, 2, 0, 0, 0, 0]
    assert "attention_mask" not in batch


def test_positions_in_three_rows_stay_so() -> None:
    positions = torch.arange(3).expand(3, 3)
    packs = [pack(sample(3, position_ids=positions), has_mrope=True) for _ in range(2)]
    assert neat_packed_vlm_collater(packs, max_length=5)["position_ids"].shape == (3, 2, 5)


def test_media_are_joined_in_the_order_of_the_packs_and_converted_on_the_way() -> None:
    def image(value):
        return {"pixel_values": torch.full((4, 6), value), "image_grid_thw": torch.tensor([[1, 2, 2]])}

    packs = [
        pack(sample(3, **image(1.0)), sample(3, **image(2.0))),
        pack(sample(4)),
        pack(sample(4, **image(3.0))),
    ]
    batch = neat_packed_vlm_collater(packs)
    assert batch["pixel_values"].dtype == torch.bfloat16
    assert packed_sequence_thd_vlm_collater(packs)["pixel_values"].dtype == torch.bfloat16
    assert batch["pixel_values"][::4, 0].tolist() == [1.0, 2.0, 3.0]
    assert batch["image_grid_thw"].shape == (3, 3)
    assert batch["n_images_per_sample"].tolist() == [2, 0, 1]
    assert "n_videos_per_sample" not in batch
    assert neat_packed_vlm_collater(packs, pixel_dtype=None)["pixel_values"].dtype == torch.float32


def test_a_pack_is_padded_and_never_cut() -> None:
    assert neat_packed_vlm_collater([pack(sample(4))], max_length=6)["input_ids"].shape == (1, 6)
    with raises_config("max_length", 3):
        neat_packed_vlm_collater([pack(sample(4))], max_length=3)


def test_one_document_has_no_numbers_of_its_own() -> None:
    assert "_packed_seq_ids" not in neat_packed_vlm_collater([pack(sample(4))])


def test_an_empty_batch_has_nothing_in_it_and_a_missing_pack_is_rejected() -> None:
    assert neat_packed_vlm_collater([]) == packed_sequence_thd_vlm_collater([]) == {}
    with raises_config("collate_fn"):
        neat_packed_vlm_collater([None])


def test_without_an_attention_implementation_the_mask_is_that_of_sdpa() -> None:
    packs = [pack(sample(3), sample(4))]
    batch, expected = (neat_packed_vlm_collater(packs, attn_implementation=name) for name in (None, "sdpa"))
    assert torch.equal(batch["attention_mask"], expected["attention_mask"])


@pytest.mark.parametrize("backend", ["sdpa", "eager", None])
def test_document_numbers_can_be_left_to_the_model_and_transformers_does_not_get_them(backend) -> None:
    packs = [pack(sample(3), sample(4)), pack(sample(2))]
    batch = neat_packed_vlm_collater(packs, 0, None, backend, materialize_4d_mask=False)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 2, 2, 2, 2], [1, 1, 0, 0, 0, 0, 0]]
    moved = {key: value.clone() for key, value in batch.items()}
    for select in (model_inputs, loss_inputs):
        with raises_config("materialize_4d_mask", False):
            select(moved)
    flash = neat_packed_vlm_collater(packs, 0, None, "flash_attention_2", materialize_4d_mask=False)
    assert "cu_seq_lens_q" in model_inputs(flash)


def test_an_unknown_backend_is_rejected() -> None:
    with raises_config("attn_implementation", "magic"):
        neat_packed_vlm_collater([pack(sample(3))], attn_implementation="magic")


# --- bidirectional attention --------------------------------------------------------------------------------


def gemma(*samples):
    return pack(*samples, family=Gemma3())


def test_gemma_is_left_to_transformers_which_makes_its_masks_from_positions() -> None:
    types = torch.tensor([0, 1, 1, 0])
    packs = [gemma(sample(4, token_type_ids=types), sample(2)), gemma(sample(3))]
    for backend in ("sdpa", "eager", "flex_attention"):
        batch = neat_packed_vlm_collater(packs, attn_implementation=backend)
        assert "attention_mask" not in batch
        assert batch["use_cache"] is False
        assert batch["token_type_ids"][0].tolist() == [0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("backend", ["varlen", "flash_attention_2"])
def test_gemma_is_rejected_for_kernels_without_bidirectional_attention(backend) -> None:
    with raises_config("attn_implementation", backend, match="bidirectional"):
        neat_packed_vlm_collater([gemma(sample(3))], attn_implementation=backend)
    marked = sample(3, token_type_ids=torch.tensor([0, 1, 0]))
    with raises_config("attn_implementation", backend, match="bidirectional"):
        neat_packed_vlm_collater([pack(marked)], attn_implementation=backend)


class _Config:
    sliding_window = 2

    def get_text_config(self):
        return self


def test_a_fake_image_of_gemma_needs_a_mask_for_each_kind_of_layer() -> None:
    packs = [gemma(sample(4, hidden=[1], token_type_ids=torch.tensor([0, 1, 0, 0])))]
    with raises_config("inject_fake_images", True):
        neat_packed_vlm_collater(packs)
    masks = neat_packed_vlm_collater(packs, config=_Config())["attention_mask"]
    assert masks["full_attention"][0, 0].tolist()[3] == [True, False, True, True]
    assert masks["sliding_attention"][0, 0].tolist()[3] == [False, False, True, True]


def test_positions_separate_documents_unless_something_is_hidden_inside() -> None:
    assert positions_separate(torch.tensor([[1, 1, 2, 2, 0, 0]]), torch.tensor([[0, 1, 0, 1, 0, 0]]))
    assert not positions_separate(torch.tensor([[1, 0, 1]]), torch.tensor([[0, 1, 2]]))
    assert not positions_separate(torch.tensor([[0, 1, 1]]), torch.tensor([[0, 1, 2]]))
    assert not positions_separate(torch.tensor([[1, 1, 2]]), torch.tensor([[0, 1, 2]]))


# --- alignment ----------------------------------------------------------------------------------------------


def test_segments_of_aligned_documents_begin_at_multiples_of_the_alignment() -> None:
    packs = [
        pack(sample(5), sample(8), sample(2), sequence_alignment=4),
        pack(sample(6, hidden=[1, 2]), sequence_alignment=4),
    ]
    for backend in ("varlen", "flash_attention_2"):
        batch = neat_packed_vlm_collater(packs, max_length=24, attn_implementation=backend)
        # The filling up of a document is in its segment; the end of a row is one of its own.
        assert batch["cu_seq_lens_q"].tolist() == [0, 8, 16, 20, 24, 28, 48]
        assert batch["max_length_q"] == 20
    unaligned = neat_packed_vlm_collater([pack(sample(5), sample(2))], 0, 12, "varlen")
    assert unaligned["cu_seq_lens_q"].tolist() == [0, 5, 7, 12]


@pytest.mark.parametrize("backend", ["varlen", "flash_attention_2"])
def test_each_pack_keeps_its_document_boundaries_in_a_batch_of_mixed_alignments(backend) -> None:
    packs = [pack(sample(3), sample(5)), pack(sample(4), sample(4), sequence_alignment=4)]
    batch = neat_packed_vlm_collater(packs, attn_implementation=backend)
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 8, 12, 16]
    batch = neat_packed_vlm_collater(packs[::-1], attn_implementation=backend)
    assert batch["cu_seq_lens_q"].tolist() == [0, 4, 8, 11, 16]


def test_what_fills_a_document_up_is_not_seen_by_its_tokens() -> None:
    torch.manual_seed(0)
    documents = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0, 2, 2, 0, 0]])
    query = torch.randn(1, 4, 12, 16)
    key, value = torch.randn(2, 1, 2, 12, 16).unbind(0)
    visible = documents[0] > 0

    def attention_of(alignment: int) -> torch.Tensor:
        found = find_segments(documents, alignment)
        options = {"cu_seq_lens_q": found.cumulative, "max_length_q": found.longest}
        return varlen_attention(_Layer(), query, key, value, None, scaling=0.3, **options)[0][0, visible]

    assert find_segments(documents, 4).cumulative.tolist() == [0, 8, 12]
    torch.testing.assert_close(attention_of(4), attention_of(1))


def test_rows_that_are_no_multiple_of_the_alignment_are_rejected() -> None:
    packs = [pack(sample(5), sample(3), sequence_alignment=4)]
    for max_length in (None, 12, 16):
        batch = packed_sequence_thd_vlm_collater(packs, max_length=max_length)
        assert all(length % 4 == 0 for length in batch["seq_lens_padded"][0].tolist())
    with raises_config("max_length", 14, match="aligned to 4"):
        packed_sequence_thd_vlm_collater(packs, max_length=14)
    with raises_config("max_length", 14, match="aligned to 4"):
        neat_packed_vlm_collater(packs, max_length=14, attn_implementation="varlen")


# --- the attention function ---------------------------------------------------------------------------------


class _Layer(torch.nn.Module):
    is_causal = True
    num_key_value_groups = 2


@pytest.mark.parametrize("window", [None, 3])
def test_varlen_attention_is_attention_with_the_dense_mask(window, parity) -> None:
    torch.manual_seed(0)
    documents = torch.tensor([[1, 1, 1, 1, 1, 2, 2, 0], [1, 1, 2, 2, 2, 2, 2, 2]])
    query = torch.randn(2, 4, 8, 16)
    key, value = torch.randn(2, 2, 2, 8, 16).unbind(0)
    found = find_segments(documents)
    made, _ = varlen_attention(
        _Layer(),
        query,
        key,
        value,
        None,
        scaling=0.3,
        sliding_window=window,
        cu_seq_lens_q=found.cumulative,
        max_length_q=found.longest,
    )
    mask = block_causal_mask(documents, window=window)
    visible = documents > 0
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) * 0.3
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)
    by_hand = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)[visible]
    expected, leaking = (
        torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=0.3, enable_gqa=True
        ).transpose(1, 2)[visible]
        for seen in (mask, torch.ones(8, 8, dtype=torch.bool).tril())
    )
    parity.check(
        "attention",
        largest_difference(made[visible], expected),
        noise_floor(expected, by_hand),
        largest_difference(leaking, expected),
    )


def test_varlen_attention_rejects_options_that_its_kernel_does_not_support() -> None:
    states = torch.randn(1, 2, 4, 8)
    found = {"cu_seq_lens_q": torch.tensor([0, 4], dtype=torch.int32), "max_length_q": 4}
    with pytest.raises(ConfigError, match="softcap"):
        varlen_attention(_Layer(), states, states, states, None, softcap=30.0, **found)
    with pytest.raises(ConfigError, match="dropout"):
        varlen_attention(_Layer(), states, states, states, None, dropout=0.1, **found)
