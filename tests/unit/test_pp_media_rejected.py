"""Media chunks for microbatches: mismatches are rejected with key, shapes and counts."""

from typing import Any

import numpy as np
import pytest
import torch

from packhorse.pp_media import (
    MEDIA_ROWS_KEY,
    VLM_PP_MEDIA_KEY,
    chunk_step3_media,
    chunk_vlm_media,
    prepare_vlm_media_for_pp,
    wrap_vlm_collate_for_pp,
)
from packhorse.types import TensorLayout
from pp_media_samples import GRID, IMAGES, LAYOUT, PATCHES, batch_of, lengths

# --- rows that the batch gives -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            {"pixel_values": [16, 12]},
            r"\[16, 12\] entries of 'pixel_values', by 'image_grid_thw' multiplied out \[4, 24\]",
        ),
        (
            {"image_grid_thw": [2, 1]},
            r"\[2, 1\] entries of 'image_grid_thw', by n_images_per_sample \[1, 2\]",
        ),
        ({"pixel_value": [4, 24]}, r"'_media_rows' has the key 'pixel_value', which is no media tensor"),
        ({"pixel_values": [4, 25]}, r"\[4, 25\].*\[4, 24\]"),
        ({"pixel_values": [4.0, 24.0]}, r"_media_rows\['pixel_values'\].*whole numbers"),
        ([4, 24], "'_media_rows' is a list"),
    ],
)
def test_rows_that_contradict_grids_and_counts_are_rejected(rows: Any, message: str) -> None:
    if isinstance(rows, dict):
        rows = {key: torch.tensor(value) for key, value in rows.items()}
    batch = batch_of(2, **IMAGES, n_images_per_sample=torch.tensor([1, 2]), **{MEDIA_ROWS_KEY: rows})
    with pytest.raises(ValueError, match=message):
        prepare_vlm_media_for_pp(batch, 2, 2, layout=LAYOUT)


def test_rows_of_tiles_must_fit_the_counts() -> None:
    layout = {"pixel_values": TensorLayout(("image", "video"), "rows")}
    counts = {"n_images_per_sample": torch.tensor([2, 0, 1])}
    for rows, fits in (([4, 0, 1], True), ([1, 0, 4], False), ([4, 1, 0], False), ([3, 2, 0], False)):
        given = {MEDIA_ROWS_KEY: {"pixel_values": torch.tensor(rows)}}
        batch = batch_of(3, pixel_values=torch.rand(5, 3, 2, 2), **counts, **given)
        if fits:
            chunks = prepare_vlm_media_for_pp(batch, 3, 3, layout=layout)[VLM_PP_MEDIA_KEY]
            assert lengths(chunks["pixel_values"]) == rows
        else:
            with pytest.raises(ValueError, match=r"'pixel_values', by n_images.* \(at least\)"):
                prepare_vlm_media_for_pp(batch, 3, 3, layout=layout)


# --- what is rejected ---------------------------------------------------------------------------------------

BAD = {
    "counts too small": (
        {**IMAGES, "n_images_per_sample": torch.tensor([1, 1])},
        r"'image_grid_thw' has shape \(3, 3\).*\[1, 1\] by row \(n_images_per_sample\) make 2 entries, not 3",
    ),
    "counts of other rows": (
        {**IMAGES, "n_images_per_sample": torch.tensor([1, 1, 1])},
        r"'n_images_per_sample' is torch.int64 of shape \(3,\), expected .* \(2,\)",
    ),
    "a negative count": (
        {**IMAGES, "n_images_per_sample": torch.tensor([4, -1])},
        r"'n_images_per_sample' is \[4, -1\]",
    ),
    "no counts": (
        IMAGES,
        r"'image_grid_thw' of shape \(3, 3\) in a batch of 2 rows without 'n_images_per_sample'",
    ),
    "no grid": (
        {"pixel_values": PATCHES, "n_images_per_sample": torch.tensor([1, 2])},
        r"'pixel_values'.*\(28, 3\).*image_grid_thw",
    ),
    "patches and grid apart": (
        {**IMAGES, "pixel_values": PATCHES[:27], "n_images_per_sample": torch.tensor([1, 2])},
        r"'pixel_values' has shape \(27, 3\).*28",
    ),
    "a list of tensors": (
        {**IMAGES, "pixel_values": [PATCHES], "n_images_per_sample": torch.tensor([1, 2])},
        "'pixel_values' is a list",
    ),
}


@pytest.mark.parametrize("layout", [None, LAYOUT], ids=["by name", "declared"])
@pytest.mark.parametrize("case", BAD)
def test_media_that_do_not_match_their_counts_are_rejected_by_key_and_the_batch_stays(
    case: str, layout: dict[str, TensorLayout] | None
) -> None:
    media, message = BAD[case]
    batch = batch_of(2, **media)
    with pytest.raises(ValueError, match=message):
        prepare_vlm_media_for_pp(batch, 2, 2, layout=layout)
    assert set(batch) == {"input_ids", *media}


@pytest.mark.parametrize(
    ("owner", "message"),
    [
        (
            "sample",
            r"'pixel_values' has shape \(28, 3\).*the sample\): \[1, 1\] by row.*make 2 entries, not 28",
        ),
        ("item", r"'pixel_values' has shape \(28, 3\).*the item\): \[1, 2\] by row.*make 3 entries, not 28"),
        ("rows", r"make 3 entries, not 28.*media_layout=True.*'_media_rows'"),
    ],
)
def test_a_tensor_that_contradicts_its_declaration_is_rejected(owner: Any, message: str) -> None:
    batch = batch_of(2, **IMAGES, n_images_per_sample=torch.tensor([1, 2]))
    layout = {**LAYOUT, "pixel_values": TensorLayout(("image",), owner)}
    with pytest.raises(ValueError, match=message):
        prepare_vlm_media_for_pp(batch, 2, 2, layout=layout)


def test_a_declared_batch_is_not_taken_for_one_image_a_row() -> None:
    with pytest.raises(ValueError, match="without 'n_images_per_sample'"):
        prepare_vlm_media_for_pp(batch_of(3, **IMAGES), 3, 3, layout=LAYOUT)
    assert VLM_PP_MEDIA_KEY in prepare_vlm_media_for_pp(batch_of(3, **IMAGES), 3, 3)


@pytest.mark.parametrize("number", [0, -1, 1.5, True, None])
def test_a_number_of_microbatches_that_is_none_is_rejected_everywhere(number: Any) -> None:
    with pytest.raises(ValueError, match="n_microbatches="):
        prepare_vlm_media_for_pp(batch_of(3, **IMAGES), 3, number)
    with pytest.raises(ValueError, match="n_microbatches="):
        chunk_vlm_media(PATCHES, GRID, 3, number)
    with pytest.raises(ValueError, match="n_microbatches="):
        chunk_step3_media(PATCHES, 3, number)
    with pytest.raises(ValueError, match="n_microbatches="):
        wrap_vlm_collate_for_pp(dict, number)


def test_a_batch_size_that_the_ids_contradict_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"batch_size=3, but 'input_ids' has shape \(4, 5\)"):
        prepare_vlm_media_for_pp(batch_of(4, **IMAGES), 3, 2)


def test_step3_images_and_crops_that_do_not_match_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"'pixel_values' has shape \(4, 3, 8, 8\)"):
        chunk_step3_media(torch.rand(4, 3, 8, 8), 3, 2)
    with pytest.raises(ValueError, match=r"'patch_pixel_values' .*make 6 entries, not 5"):
        chunk_step3_media(torch.rand(3, 3), 3, 2, torch.tensor([1, 2, 3]), torch.rand(5, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: chunk_vlm_media(PATCHES, None, 3, 2), "'image_grid' is a NoneType"),
        (lambda: chunk_vlm_media(None, GRID, 3, 2), "'pixel_values' is a NoneType"),
        (lambda: chunk_vlm_media(torch.tensor(1.0), GRID, 3, 2), "'pixel_values' is a number"),
        (lambda: chunk_vlm_media(PATCHES, torch.tensor(3), 3, 2), "'image_grid' is a number"),
        (lambda: chunk_step3_media(None, 3, 2), "'pixel_values' is a NoneType"),
        (lambda: chunk_step3_media(torch.tensor(1.0), 3, 2), "'pixel_values' is a number"),
        (
            lambda: chunk_step3_media(torch.rand(2, 3), 2, 2, torch.tensor([-1, 3]), torch.rand(2, 3)),
            "'num_patches' of shape .* holds -1",
        ),
        (
            lambda: chunk_step3_media(
                torch.rand(2, 3), 2, 2, torch.tensor([[1, 2], [2, 1]]), torch.rand(4, 3)
            ),
            r"'num_patches' is torch.int64 of shape \(2, 2\): expected whole numbers \[N\]",
        ),
        (
            lambda: chunk_step3_media(torch.rand(2, 3), 2, 2, torch.tensor([1.0, 2.0]), torch.rand(3, 3)),
            "'num_patches' is torch.float32",
        ),
        (
            lambda: chunk_vlm_media(torch.rand(4, 3), torch.tensor([[-1, -4], [1, 0]]), 2, 2),
            "'image_grid' of shape .* holds -4",
        ),
        (
            lambda: chunk_vlm_media(torch.rand(4, 3), torch.tensor([[1, 4], [1, 0]]), 2, 2),
            "'image_grid' of shape .* holds 0: expected no number below 1",
        ),
    ],
)
def test_what_is_no_tensor_and_numbers_that_make_no_sense_are_value_errors(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_batch_whose_tensors_are_empty_has_no_media_and_is_fine() -> None:
    pixels, grids = chunk_vlm_media(torch.rand(0, 3), torch.zeros(0, 3, dtype=torch.int64), 3, 2)
    assert lengths(pixels) == lengths(grids) == [0, 0]
    empty = {"pixel_values": torch.rand(0, 3), "image_grid_thw": torch.zeros(0, 3, dtype=torch.int64)}
    for more in ({}, {"n_images_per_sample": torch.zeros(3, dtype=torch.int64)}):
        for layout in (None, LAYOUT):
            chunks = prepare_vlm_media_for_pp(batch_of(3, **empty, **more), 3, 2, layout=layout)
            assert lengths(chunks[VLM_PP_MEDIA_KEY]["pixel_values"]) == [0, 0]


def test_rows_from_an_undeclared_grid_are_rejected() -> None:
    layout = {"pixel_values": TensorLayout(("image",), "rows", "my_grid")}
    batch = batch_of(2, pixel_values=PATCHES, my_grid=GRID, n_images_per_sample=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="'my_grid', which no layout declares"):
        prepare_vlm_media_for_pp(batch, 2, 2, layout=layout)


def test_numbers_of_numpy_are_numbers() -> None:
    batch = prepare_vlm_media_for_pp(batch_of(3, **IMAGES), np.int64(3), np.int32(2))
    assert lengths(batch[VLM_PP_MEDIA_KEY]["image_grid_thw"]) == [2, 1]


def test_a_batch_that_is_prepared_for_another_number_of_microbatches_is_rejected() -> None:
    batch = prepare_vlm_media_for_pp(batch_of(3, **IMAGES), 3, 2)
    chunks = batch[VLM_PP_MEDIA_KEY]
    assert prepare_vlm_media_for_pp(batch, 3, 2)[VLM_PP_MEDIA_KEY] is chunks
    with pytest.raises(ValueError, match=r"split for \[2\] microbatches, and now for 3"):
        prepare_vlm_media_for_pp(batch, 3, 3)
    with pytest.raises(ValueError, match="chunks of image_grid_thw, pixel_values, image_grid_hws and also"):
        prepare_vlm_media_for_pp({**batch, **IMAGES}, 3, 2)
