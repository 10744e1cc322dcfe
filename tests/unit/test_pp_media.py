"""Media chunks for microbatches: whose they are, what is rejected, and what stage 0 holds, and when."""

import copy
import inspect
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch

import packhorse.pp_media as pp_media
from contract.calls import render  # noqa: F401 - makes torchvision importable with a CPU torch
from packhorse.pp_media import (
    MEDIA_LAYOUT_KEY,
    MEDIA_ROWS_KEY,
    VLM_PP_MEDIA_KEY,
    _select_image_grid,
    chunk_step3_media,
    chunk_vlm_media,
    prepare_vlm_media_for_pp,
    wrap_vlm_collate_for_pp,
)
from packhorse.types import TensorLayout
from pp_media_samples import GRID, IMAGES, LAYOUT, PATCHES, batch_of, lengths

# --- the door ---------------------------------------------------------------------------------------------


def test_importing_it_imports_torch_and_the_types_only() -> None:
    script = "import sys, torch; before = set(sys.modules); import packhorse.pp_media; "
    script += "print(*set(sys.modules) - before)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    own = {name for name in run.stdout.split() if name.startswith("packhorse")}
    assert own - {"packhorse", "packhorse.types"} == {n for n in own if n.startswith("packhorse.pp_media")}
    foreign = (
        {name.split(".")[0] for name in run.stdout.split()} - {"packhorse"} - set(sys.stdlib_module_names)
    )
    assert foreign <= {"torch", "numpy"}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        (
            "_select_image_grid",
            "image_grid_hws image_grid_thw image_sizes image_position_ids",
        ),
        (
            "chunk_step3_media",
            "pixel_values batch_size n_microbatches num_patches=None patch_pixel_values=None "
            "patch_newline_mask=None",
        ),
        ("chunk_vlm_media", "pixel_values image_grid batch_size n_microbatches n_images_per_sample=None"),
        ("prepare_vlm_media_for_pp", "batch batch_size n_microbatches"),
        ("stage_vlm_media_for_pp", "pp model_parts batch"),
        ("wrap_vlm_collate_for_pp", "collate_fn n_microbatches"),
    ],
)
def test_documented_calls_have_the_documented_arguments(name: str, parameters: str) -> None:
    found = inspect.signature(getattr(pp_media, name)).parameters.values()
    positional = [p for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [
        p.name if p.default is p.empty else f"{p.name}={p.default}" for p in positional
    ] == parameters.split()


def test_documented_data_is_there() -> None:
    assert VLM_PP_MEDIA_KEY == "_vlm_pp_media_chunks"
    assert {
        "pixel_values",
        "patch_pixel_values",
        "num_patches",
        "patch_newline_mask",
        "image_grid_hws",
    } <= set(pp_media._VLM_MEDIA_KEYS)


# --- layouts ----------------------------------------------------------------------------------------------


def test_seven_rows_in_three_microbatches_are_three_two_two() -> None:
    images, grids = chunk_vlm_media(torch.rand(7, 3, 4, 4), torch.ones(7, 3, dtype=torch.int64), 7, 3)
    assert lengths(images) == lengths(grids) == [3, 2, 2]
    split = torch.tensor_split(torch.arange(7), 3)
    assert lengths(images) == lengths(list(split))


def test_fewer_rows_than_microbatches_still_make_as_many_chunks() -> None:
    images, grids = chunk_vlm_media(torch.rand(2, 6, 5), torch.tensor([[1, 2, 3], [1, 3, 2]]), 2, 4)
    assert lengths(images) == lengths(grids) == [1, 1, 0, 0]
    assert images[3].shape == (0, 6, 5)


def test_flat_patches_go_with_their_samples_by_counts() -> None:
    pixels, grids = chunk_vlm_media(PATCHES, GRID, 4, 2, torch.tensor([0, 1, 2, 0]))
    assert lengths(pixels) == [4, 24]
    assert lengths(grids) == [1, 2]
    assert torch.equal(torch.cat(pixels), PATCHES)
    assert pixels[1].data_ptr() == PATCHES[4:].data_ptr(), "chunks are views"


def test_flat_patches_with_one_image_a_row_need_no_counts() -> None:
    pixels, _ = chunk_vlm_media(PATCHES, GRID, 3, 3)
    assert lengths(pixels) == [4, 8, 16]


def test_as_many_images_as_rows_are_not_taken_for_one_each_when_counts_say_otherwise() -> None:
    pixels, grids = chunk_vlm_media(PATCHES, GRID, 3, 3, torch.tensor([2, 0, 1]))
    assert lengths(pixels) == [12, 0, 16]
    assert lengths(grids) == [2, 0, 1]


def test_patches_of_four_axes_are_flat_when_the_grid_says_so() -> None:
    pixels, _ = chunk_vlm_media(torch.rand(28, 3, 14, 14), GRID, 2, 2, torch.tensor([1, 2]))
    assert lengths(pixels) == [4, 24]


def test_step3_crops_follow_their_image() -> None:
    chunks = chunk_step3_media(
        torch.rand(3, 3, 8, 8), 3, 2, torch.tensor([2, 0, 3]), torch.rand(5, 3, 4, 4), torch.zeros(5).bool()
    )
    assert {key: lengths(value) for key, value in chunks.items()} == {
        "pixel_values": [2, 1],
        "num_patches": [2, 1],
        "patch_pixel_values": [2, 3],
        "patch_newline_mask": [2, 3],
    }


def test_step3_batches_are_prepared_by_their_names() -> None:
    batch = batch_of(
        3,
        pixel_values=torch.rand(3, 3, 8, 8),
        num_patches=torch.tensor([2, 0, 3]),
        patch_pixel_values=torch.rand(5, 3, 4, 4),
        patch_newline_mask=torch.zeros(5).bool(),
    )
    chunks = prepare_vlm_media_for_pp(batch, 3, 3)[VLM_PP_MEDIA_KEY]
    assert lengths(chunks["patch_pixel_values"]) == lengths(chunks["patch_newline_mask"]) == [2, 0, 3]


@pytest.mark.parametrize("grid", ["image_sizes", "image_position_ids", "image_grid_hws"])
def test_a_tensor_with_one_entry_per_image_is_split_by_image_under_its_own_name(grid: str) -> None:
    values = torch.randint(1, 9, (4, 6, 2) if grid == "image_position_ids" else (4, 2))
    batch = batch_of(
        3, pixel_values=torch.rand(4, 6, 5), n_images_per_sample=torch.tensor([3, 0, 1]), **{grid: values}
    )
    chunks = prepare_vlm_media_for_pp(batch, 3, 3)[VLM_PP_MEDIA_KEY]
    assert set(chunks) == {"pixel_values", grid, "image_grid_hws"}
    assert chunks["image_grid_hws"] is chunks[grid]
    assert lengths(chunks[grid]) == lengths(chunks["pixel_values"]) == [3, 0, 1]


def test_videos_and_audio_have_their_own_counts() -> None:
    batch = batch_of(
        3,
        pixel_values_videos=torch.rand(24, 5),
        video_grid_thw=torch.tensor([[2, 2, 2], [4, 2, 2]]),
        second_per_grid_ts=torch.tensor([1.0, 2.0]),
        n_videos_per_sample=torch.tensor([0, 2, 0]),
        input_features=torch.rand(3, 8, 9),
        feature_attention_mask=torch.ones(3, 9),
        n_audios_per_sample=torch.tensor([1, 0, 2]),
    )
    chunks = prepare_vlm_media_for_pp(batch, 3, 3)[VLM_PP_MEDIA_KEY]
    assert lengths(chunks["pixel_values_videos"]) == [0, 24, 0]
    assert lengths(chunks["video_grid_thw"]) == lengths(chunks["second_per_grid_ts"]) == [0, 2, 0]
    assert lengths(chunks["input_features"]) == lengths(chunks["feature_attention_mask"]) == [1, 0, 2]
    assert set(batch) == {"input_ids", VLM_PP_MEDIA_KEY}


def test_the_first_grid_that_is_there_is_selected() -> None:
    a, b = torch.ones(1), torch.zeros(1)
    assert _select_image_grid(None, a, b, None) is a
    assert _select_image_grid(a, b, None, None) is a
    assert _select_image_grid(None, None, None, b) is b
    assert _select_image_grid(None, None, None, None) is None


# --- declared layouts --------------------------------------------------------------------------------------


def test_a_declared_layout_wins_over_what_the_shapes_suggest() -> None:
    tiles = torch.rand(3, 4, 5)  # as many as rows, but the first row has them all
    declared = {"pixel_values": TensorLayout(("image", "video"), "rows")}
    rows = {"pixel_values": torch.tensor([3, 0, 0])}
    carried = batch_of(3, pixel_values=tiles, **{MEDIA_LAYOUT_KEY: declared, MEDIA_ROWS_KEY: rows})
    chunks = prepare_vlm_media_for_pp(carried, 3, 3)[VLM_PP_MEDIA_KEY]
    assert lengths(chunks["pixel_values"]) == [3, 0, 0]
    assert set(carried) == {"input_ids", VLM_PP_MEDIA_KEY}


def test_an_unheard_of_tensor_is_split_as_it_is_declared() -> None:
    batch = batch_of(2, depth_maps=torch.rand(3, 4), n_images_per_sample=torch.tensor([1, 2]))
    layout = {"depth_maps": TensorLayout(("image",), "item")}
    chunks = prepare_vlm_media_for_pp(batch, 2, 2, layout=layout)[VLM_PP_MEDIA_KEY]
    assert lengths(chunks["depth_maps"]) == [1, 2]


def test_a_batch_without_media_is_left_as_it_is() -> None:
    batch = batch_of(2, labels=torch.zeros(2, 5), pixel_values=None, **{MEDIA_LAYOUT_KEY: LAYOUT})
    assert set(prepare_vlm_media_for_pp(batch, 2, 2)) == {"input_ids", "labels"}


# --- pixels and their mask --------------------------------------------------------------------------------


def test_a_mask_of_pixels_follows_them() -> None:
    """Patches that are filled up, one entry per image; by counts, which are not one per row."""
    media = {
        "pixel_values": torch.rand(3, 6, 5),
        "pixel_attention_mask": torch.ones(3, 6),
        "spatial_shapes": torch.tensor([[2, 3], [1, 6], [1, 1]]),
    }
    batch = batch_of(3, **media, n_images_per_sample=torch.tensor([2, 0, 1]))
    chunks = prepare_vlm_media_for_pp(batch, 3, 3)[VLM_PP_MEDIA_KEY]
    expected = {key: [2, 0, 1] for key in (*media, "image_grid_hws")}
    assert {key: lengths(parts) for key, parts in chunks.items()} == expected
    assert set(batch) == {"input_ids", VLM_PP_MEDIA_KEY}, "nothing is left that the schedule would split"


def test_images_of_samples_are_one_entry_a_row_whatever_the_counts_say() -> None:
    """[B, images, C, H, W] with a mask [B, images, H, W]: three images, three rows, not one each."""
    media = {"pixel_values": torch.rand(3, 2, 3, 4, 4), "pixel_attention_mask": torch.ones(3, 2, 4, 4)}
    batch = batch_of(3, **media, n_images_per_sample=torch.tensor([2, 0, 1]))
    chunks = prepare_vlm_media_for_pp(batch, 3, 3)[VLM_PP_MEDIA_KEY]
    assert {key: lengths(parts) for key, parts in chunks.items()} == {key: [1, 1, 1] for key in media}


@pytest.mark.parametrize("key", ["pixel_values", "pixel_attention_mask"])
def test_the_one_that_is_declared_speaks_for_both(key: str) -> None:
    media = {"pixel_values": torch.rand(3, 6, 5), "pixel_attention_mask": torch.ones(3, 6)}
    batch = batch_of(3, **media, n_images_per_sample=torch.tensor([2, 0, 1]))
    layout = {key: TensorLayout(("image",), "sample")}
    chunks = prepare_vlm_media_for_pp(batch, 3, 3, layout=layout)[VLM_PP_MEDIA_KEY]
    assert {key: lengths(parts) for key, parts in chunks.items()} == {key: [1, 1, 1] for key in media}


def test_pixels_and_a_mask_that_do_not_agree_are_rejected() -> None:
    media = {"pixel_values": torch.rand(3, 6, 5), "pixel_attention_mask": torch.ones(3, 6)}
    batch = batch_of(3, **media, n_images_per_sample=torch.tensor([2, 0, 1]))
    layout = {
        "pixel_values": TensorLayout(("image",), "item"),
        "pixel_attention_mask": TensorLayout(("image",), "sample"),
    }
    with pytest.raises(
        ValueError, match=r"\[2, 0, 1\] entries of 'pixel_values' and \[1, 1, 1\] of 'pixel_att"
    ):
        prepare_vlm_media_for_pp(batch, 3, 3, layout=layout)


# --- layouts that are declared in two places ---------------------------------------------------------------


def test_a_given_layout_and_that_of_the_batch_are_put_together_and_the_given_one_wins() -> None:
    carried = {
        "depth_maps": TensorLayout(("image",), "item"),
        "pixel_values": TensorLayout(("image",), "sample"),
    }
    batch = batch_of(
        3,
        depth_maps=torch.rand(3, 4),
        pixel_values=torch.rand(3, 4, 4),
        n_images_per_sample=torch.tensor([1, 2, 0]),
        **{MEDIA_LAYOUT_KEY: carried},
    )
    layout = {"pixel_values": TensorLayout(("image",), "item")}
    chunks = prepare_vlm_media_for_pp(batch, 3, 3, layout=layout)[VLM_PP_MEDIA_KEY]
    assert lengths(chunks["depth_maps"]) == [1, 2, 0], "what only the batch declares"
    assert lengths(chunks["pixel_values"]) == [1, 2, 0], "what both declare"


def test_counts_of_all_kinds_that_share_a_tensor_are_added_up() -> None:
    batch = batch_of(
        3,
        pixel_values=torch.rand(4, 3, 2, 2),
        n_images_per_sample=torch.tensor([0, 2, 0]),
        n_videos_per_sample=torch.tensor([1, 0, 1]),
    )
    layout = {"pixel_values": TensorLayout(("image", "video"), "item")}
    chunks = prepare_vlm_media_for_pp(batch, 3, 3, layout=layout)[VLM_PP_MEDIA_KEY]
    assert lengths(chunks["pixel_values"]) == [1, 2, 1]


# --- names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", ["grid_thws", "image_grid_hw", "image_grid_hws", "image_grid_thw"])
def test_flat_patches_are_counted_by_every_grid_that_is_known(grid: str) -> None:
    sides = GRID[:, 1:] if "hw" in grid.removesuffix("s").removesuffix("thw") else GRID
    media = {"pixel_values": PATCHES, grid: sides}
    batch = batch_of(3, **media, n_images_per_sample=torch.tensor([2, 0, 1]))
    chunks = prepare_vlm_media_for_pp(batch, 3, 3)[VLM_PP_MEDIA_KEY]
    assert lengths(chunks["pixel_values"]) == [12, 0, 16]
    assert lengths(chunks[grid]) == [2, 0, 1]


def test_what_is_no_grid_is_not_multiplied_out() -> None:
    """Sizes that come to as many as there are images; and positions of patches."""
    sizes = torch.tensor([[1, 2], [1, 1], [0, 5]])
    batch = batch_of(
        3, pixel_values=torch.rand(3, 4), image_sizes=sizes, n_images_per_sample=torch.tensor([2, 0, 1])
    )
    chunks = prepare_vlm_media_for_pp(batch, 3, 3)[VLM_PP_MEDIA_KEY]
    assert lengths(chunks["pixel_values"]) == [2, 0, 1]


def test_frames_and_their_positions_are_split_by_the_frames_of_each_video() -> None:
    batch = batch_of(
        3,
        pixel_values_videos=torch.rand(7, 6, 5),
        video_position_ids=torch.zeros(7, 6, 2, dtype=torch.int64),
        num_frames_per_video=torch.tensor([3, 4]),
        n_videos_per_sample=torch.tensor([0, 1, 1]),
    )
    chunks = prepare_vlm_media_for_pp(batch, 3, 3)[VLM_PP_MEDIA_KEY]
    assert lengths(chunks["pixel_values_videos"]) == lengths(chunks["video_position_ids"]) == [0, 3, 4]
    assert lengths(chunks["num_frames_per_video"]) == [0, 1, 1]


@pytest.mark.parametrize(
    "key",
    [
        *("input_features", "feature_attention_mask", "input_features_mask"),
        *("audio_input_features", "audio_embed_sizes", "audio_attention_mask", "input_audio_embeds"),
    ],
)
def test_audio_of_every_name_is_split_and_never_taken_for_one_each(key: str) -> None:
    audio = {key: torch.rand(3, 8)}
    batch = batch_of(3, **audio, n_audios_per_sample=torch.tensor([2, 0, 1]))
    assert lengths(prepare_vlm_media_for_pp(batch, 3, 3)[VLM_PP_MEDIA_KEY][key]) == [2, 0, 1]
    with pytest.raises(ValueError, match=f"'{key}' of shape .*without 'n_audios_per_sample'"):
        prepare_vlm_media_for_pp(batch_of(3, **audio), 3, 3)


def test_videos_are_never_taken_for_one_each() -> None:
    media = {"pixel_values_videos": PATCHES, "video_grid_thw": GRID}
    with pytest.raises(ValueError, match=r"'video_grid_thw' of shape .*without 'n_videos_per_sample'"):
        prepare_vlm_media_for_pp(batch_of(3, **media), 3, 3)


@pytest.mark.parametrize(
    "more",
    [
        {"n_audios_per_sample": torch.tensor([0, 1, 0])},
        {"_packed_seq_ids": torch.ones(3, 5)},
        {"cu_seq_lens_q": torch.tensor([0, 5, 10, 15])},
        {"attention_mask": torch.ones(3, 1, 5, 5)},
    ],
    ids=lambda more: next(iter(more)),
)
def test_one_image_a_row_is_taken_for_granted_in_batches_that_count_nothing_only(
    more: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match="without 'n_images_per_sample'"):
        prepare_vlm_media_for_pp(batch_of(3, **IMAGES, **more), 3, 3)


# --- collate functions -------------------------------------------------------------------------------------


def _collate(rows: list[int]) -> dict[str, Any] | None:
    if not rows:
        return None
    return batch_of(len(rows), pixel_values=torch.rand(len(rows), 3, 4, 4), labels=torch.tensor(rows))


def test_a_wrapped_collate_function_prepares_its_batches_in_workers_too() -> None:
    wrapped = pickle.loads(pickle.dumps(wrap_vlm_collate_for_pp(_collate, 2)))
    loader = torch.utils.data.DataLoader(list(range(5)), batch_size=3, collate_fn=wrapped, num_workers=1)
    assert [lengths(batch[VLM_PP_MEDIA_KEY]["pixel_values"]) for batch in loader] == [[2, 1], [1, 1]]
    assert wrapped([]) is None


def test_a_collate_function_without_ids_is_rejected() -> None:
    with pytest.raises(ValueError, match="no tensor 'input_ids' with its rows, only pixel_values"):
        wrap_vlm_collate_for_pp(dict, 2)({"pixel_values": torch.rand(2, 3, 4, 4)})


@pytest.mark.parametrize("batch", [None, [1, 2], "text", {}, {"labels": 1}, {"pixel_values": None}])
def test_what_is_no_mapping_or_has_no_media_passes_through(batch: Any) -> None:
    expected = {} if batch == {"pixel_values": None} else batch
    assert prepare_vlm_media_for_pp(copy.copy(batch), 3, 2) == expected
    assert wrap_vlm_collate_for_pp(lambda samples: samples, 2)(batch) is batch


def test_a_batch_without_media_is_not_measured() -> None:
    batch = batch_of(4)
    assert prepare_vlm_media_for_pp(batch, 3, 2) is batch
    assert set(batch) == {"input_ids"}


@pytest.mark.parametrize("shape", [(7, 5), (7, 3, 4, 4)])
def test_flat_pixels_are_counted_by_num_patches(shape: tuple[int, ...]) -> None:
    pixels = torch.rand(shape)
    batch = batch_of(
        3,
        pixel_values=pixels,
        num_patches=torch.tensor([2, 1, 4]),
        n_images_per_sample=torch.tensor([2, 0, 1]),
    )
    chunks = prepare_vlm_media_for_pp(batch, 3, 3)[VLM_PP_MEDIA_KEY]
    assert lengths(chunks["pixel_values"]) == [3, 0, 4]
    assert lengths(chunks["num_patches"]) == [2, 0, 1]
    assert torch.equal(torch.cat(chunks["pixel_values"]), pixels)


def test_step3_crops_without_their_numbers_are_dropped_and_named(caplog: pytest.LogCaptureFixture) -> None:
    chunks = chunk_step3_media(
        torch.rand(3, 3, 8, 8), 3, 2, None, torch.rand(5, 3, 4, 4), torch.zeros(5).bool()
    )
    assert {key: lengths(value) for key, value in chunks.items()} == {"pixel_values": [2, 1]}
    assert "crops without num_patches" in caplog.text
