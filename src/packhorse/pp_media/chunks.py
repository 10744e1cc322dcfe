"""Splitting the media of a batch into one chunk for each microbatch."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from packhorse.pp_media.documented import _VLM_MEDIA_KEYS, documented_layout, pixels_layout
from packhorse.pp_media.rows import (
    COUNT_KEYS,
    MEDIA_LAYOUT_KEY,
    MEDIA_ROWS_KEY,
    MediaRows,
    check_sizes,
    split_rows,
)
from packhorse.types import MediaLayout, TensorLayout

VLM_PP_MEDIA_KEY = "_vlm_pp_media_chunks"
"""Under this key a prepared batch has its media: key of a tensor -> ``n_microbatches`` chunks of it."""

Batch = MutableMapping[str, Any]


def chunk_vlm_media(
    pixel_values: torch.Tensor,
    image_grid: torch.Tensor,
    batch_size: int,
    n_microbatches: int,
    n_images_per_sample: torch.Tensor | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Split pixels and the tensor that tells about each image into chunks for microbatches.

    Args:
        pixel_values: one entry per image ([N, C, H, W], [N, patches, D], …) or flat patches ([patches, D],
            [patches, C, h, w]).
        image_grid: one entry per image: grids ([N, 2] or [N, 3]), sizes, or position ids.
        batch_size: rows of the batch.
        n_microbatches: how many chunks to make.
        n_images_per_sample: [batch_size], images of each row; without it each row must have one.

    Returns:
        Chunks of the pixels and chunks of the grid: ``n_microbatches`` views each, empty where a microbatch
        has no image.

    Raises:
        ValueError: the numbers do not add up; the message names shapes and counts.
    """
    media = {"pixel_values": pixel_values, "image_grid": image_grid}
    check_sizes({}, batch_size, n_microbatches)
    layout: MediaLayout = {
        "pixel_values": pixels_layout("pixel_values", pixel_values, "image", "image_grid", image_grid),
        "image_grid": TensorLayout(("image",), "item"),
    }
    counted = {**media, COUNT_KEYS["image"]: n_images_per_sample}
    chunks = _chunks(MediaRows(counted, batch_size, layout, one_each=True), n_microbatches)
    return chunks["pixel_values"], chunks["image_grid"]


def chunk_step3_media(
    pixel_values: torch.Tensor,
    batch_size: int,
    n_microbatches: int,
    num_patches: torch.Tensor | None = None,
    patch_pixel_values: torch.Tensor | None = None,
    patch_newline_mask: torch.Tensor | None = None,
) -> dict[str, list[torch.Tensor]]:
    """Split one whole image per sample, and the crops of all images, into chunks for microbatches.

    Args:
        pixel_values: [batch_size, …], one image for each row of the batch.
        batch_size: rows of the batch.
        n_microbatches: how many chunks to make.
        num_patches: [batch_size], crops of each row's image.
        patch_pixel_values: [crops, …], the crops of all images.
        patch_newline_mask: [crops], whether a line of crops ends.

    Returns:
        For each tensor that was given, ``n_microbatches`` views.

    Raises:
        ValueError: crops come without ``num_patches``, or the numbers do not add up.
    """
    check_sizes({}, batch_size, n_microbatches)
    crops = TensorLayout(("image",), "rows", "num_patches")
    layout: MediaLayout = {
        "pixel_values": TensorLayout(("image",), "sample"),
        "num_patches": TensorLayout(("image",), "sample"),
        "patch_pixel_values": crops,
        "patch_newline_mask": crops,
    }
    tensors = (pixel_values, num_patches, patch_pixel_values, patch_newline_mask)
    media = {key: value for key, value in zip(layout, tensors, strict=True) if value is not None}
    present = {key: layout[key] for key in media}
    return _chunks(MediaRows(media, batch_size, present), n_microbatches)


def prepare_vlm_media_for_pp(
    batch: Batch, batch_size: int, n_microbatches: int, *, layout: MediaLayout | None = None
) -> Batch:
    """Take the media tensors out of a batch and put their chunks under :data:`VLM_PP_MEDIA_KEY`.

    Whose the entries of a tensor are is read, in this order, from ``layout``, from what the batch carries
    under :data:`MEDIA_LAYOUT_KEY`, and from the documented rules for well-known names. How many each row has
    comes from ``n_images_per_sample`` and its like, or from :data:`MEDIA_ROWS_KEY`.

    Args:
        batch: changed in place, after everything has been checked; what is not about media stays as it is.
        batch_size: its rows.
        n_microbatches: as the schedule has it.
        layout: the family's layout, where the batch does not carry it.

    Returns:
        The same batch. Its chunks are views of the tensors it had. Without media there is no key.

    Raises:
        ValueError: numbers do not add up, a grid is missing, or a tensor contradicts its layout; the message
            names key, shapes and counts.
    """
    check_sizes(batch, batch_size, n_microbatches)
    table = layout if layout is not None else batch.get(MEDIA_LAYOUT_KEY) or {}
    declared = {key: value for key, value in table.items() if batch.get(key) is not None}
    present = {**declared, **documented_layout(batch, declared)}
    chunks = _chunks(MediaRows(batch, batch_size, present, one_each=not declared), n_microbatches)
    # Known names may also be there without a value, and must not reach the schedule.
    for key in (*chunks, *table, *_VLM_MEDIA_KEYS, MEDIA_LAYOUT_KEY, MEDIA_ROWS_KEY):
        batch.pop(key, None)
    if chunks:
        batch[VLM_PP_MEDIA_KEY] = chunks
    return batch


def _chunks(found: MediaRows, n_microbatches: int) -> dict[str, list[torch.Tensor]]:
    return {key: split_rows(found.tensor(key), found.of(key), n_microbatches) for key in found.layout}


def wrap_vlm_collate_for_pp(
    collate_fn: Callable[[Any], Batch], n_microbatches: int, *, layout: MediaLayout | None = None
) -> Callable[[Any], Batch]:
    """Wrap a collate function so that its batches are ready for pipeline stages.

    Wrap last: around ``dataset.robust_collate(…)``, whose empty batches (None) pass through.

    Args:
        collate_fn: makes batches with ``input_ids`` [B, S].
        n_microbatches: as the schedule has it.
        layout: see :func:`prepare_vlm_media_for_pp`.

    Returns:
        A function of the same kind; it can be sent to DataLoader workers if ``collate_fn`` can.

    Raises:
        ValueError: ``n_microbatches`` is not a positive number.
    """
    check_sizes({}, 1, n_microbatches)
    return _PreparingCollate(collate_fn, n_microbatches, None if layout is None else dict(layout))


@dataclass(frozen=True, slots=True)
class _PreparingCollate:
    """What :func:`wrap_vlm_collate_for_pp` returns; a class, so that it can be sent to workers."""

    collate_fn: Callable[[Any], Batch]
    n_microbatches: int
    layout: MediaLayout | None

    def __call__(self, samples: Any) -> Any:
        batch: Any = self.collate_fn(samples)
        if batch is None:
            return None
        if not isinstance(batch.get("input_ids"), torch.Tensor):
            raise ValueError(f"the batch has no tensor 'input_ids' to tell its rows, only {', '.join(batch)}")
        rows = len(batch["input_ids"])
        return prepare_vlm_media_for_pp(batch, rows, self.n_microbatches, layout=self.layout)
