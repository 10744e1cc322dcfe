"""Split the media of a batch into one chunk for each microbatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from logging import getLogger
from typing import Any

import torch

from packhorse.pp_media.documented import _VLM_MEDIA_KEYS, add_image_grid, documented_layout, pixels_layout
from packhorse.pp_media.rows import (
    COUNT_KEYS,
    MEDIA_LAYOUT_KEY,
    MEDIA_ROWS_KEY,
    MediaRows,
    check_keys,
    check_sizes,
    split_rows,
)
from packhorse.types import Batch, MediaLayout, TensorLayout

VLM_PP_MEDIA_KEY = "_vlm_pp_media_chunks"
"""The key of the media in a prepared batch: key of a tensor -> ``n_microbatches`` chunks of it. The grid of
the images is also there as ``image_grid_hws``, whatever the name of the tensor."""

logger = getLogger("packhorse.pp_media")

BatchMapping = MutableMapping[str, Any]


def chunk_vlm_media(
    pixel_values: torch.Tensor,
    image_grid: torch.Tensor,
    batch_size: int,
    n_microbatches: int,
    n_images_per_sample: torch.Tensor | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Split pixels and the tensor with one entry per image into chunks for microbatches.

    Args:
        pixel_values: one entry per image ([N, C, H, W], [N, patches, D], …) or flat patches ([patches, D],
            [patches, C, h, w]).
        image_grid: one entry per image: grids ([N, 2] or [N, 3]), sizes, or position ids.
        batch_size: rows of the batch.
        n_microbatches: the number of chunks.
        n_images_per_sample: [batch_size], images of each row; None if each row has one.

    Returns:
        Chunks of the pixels and chunks of the grid: ``n_microbatches`` views each, empty if a microbatch has
        no image.

    Raises:
        ValueError: shapes and counts do not match; the message has both.
    """
    rows, number = check_sizes({}, batch_size, n_microbatches)
    media = {"pixel_values": pixel_values, "image_grid": image_grid}
    layout: MediaLayout = {
        "pixel_values": pixels_layout("pixel_values", pixel_values, "image", "image_grid", image_grid),
        "image_grid": TensorLayout(("image",), "item"),
    }
    counted = {**media, COUNT_KEYS["image"]: n_images_per_sample}
    chunks = _chunks(MediaRows(counted, rows, layout, one_each=True), number)
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
        n_microbatches: the number of chunks.
        num_patches: [batch_size], crops of each row's image.
        patch_pixel_values: [crops, …], the crops of all images.
        patch_newline_mask: [crops], whether a line of crops ends.

    Returns:
        For each given tensor, ``n_microbatches`` views. Without ``num_patches`` it is unknown to which row a
        crop belongs: crops are dropped, with a warning.

    Raises:
        ValueError: shapes and counts do not match.
    """
    rows, number = check_sizes({}, batch_size, n_microbatches)
    if num_patches is None and patch_pixel_values is not None:
        logger.warning("chunk_step3_media: crops without num_patches are dropped")
    if num_patches is None:
        patch_pixel_values = patch_newline_mask = None
    crops = TensorLayout(("image",), "rows", "num_patches")
    layout: MediaLayout = {
        "pixel_values": TensorLayout(("image",), "sample"),
        "num_patches": TensorLayout(("image",), "sample"),
        "patch_pixel_values": crops,
        "patch_newline_mask": crops,
    }
    tensors = (pixel_values, num_patches, patch_pixel_values, patch_newline_mask)
    given = dict(zip(layout, tensors, strict=True))
    media = {key: value for key, value in given.items() if value is not None or key == "pixel_values"}
    present = {key: layout[key] for key in media}
    return _chunks(MediaRows(media, rows, present), number)


def prepare_vlm_media_for_pp(
    batch: BatchMapping, batch_size: int, n_microbatches: int, *, layout: MediaLayout | None = None
) -> BatchMapping:
    """Replace the media tensors of a batch by their chunks under :data:`VLM_PP_MEDIA_KEY`.

    The owner of a tensor's entries comes, key by key and in this order, from ``layout``, from the batch's
    :data:`MEDIA_LAYOUT_KEY`, and from the documented rules for well-known names. The entries of each row come
    from ``n_images_per_sample``, ``n_videos_per_sample`` and ``n_audios_per_sample``, and from
    :data:`MEDIA_ROWS_KEY`; if both are there, they must agree.

    Args:
        batch: changed in place, after all checks; other entries stay. One that is not a mapping, or has no
            media, is not checked and is returned unchanged.
        batch_size: its rows.
        n_microbatches: of the schedule.
        layout: the family's layout, if the batch does not carry it.

    Returns:
        The same batch. Its chunks are views of its tensors. Without media there is no key. A batch that was
        prepared for the same number of microbatches stays unchanged.

    Raises:
        ValueError: shapes and counts do not match, a grid is missing, a tensor contradicts its layout, or the
            batch was prepared for another number of microbatches; the message has key, shapes and counts.
    """
    given: Any = batch  # collate functions may return anything
    if not isinstance(given, Mapping):
        return batch
    table = {**(batch.get(MEDIA_LAYOUT_KEY) or {}), **(layout or {})}
    if not _has_media(batch, table):
        return _remove_media_keys(batch, table)
    rows, number = check_sizes(batch, batch_size, n_microbatches)
    declared = {key: value for key, value in table.items() if batch.get(key) is not None}
    present = {**declared, **documented_layout(batch, declared)}
    _check_unprepared(batch, present, number)
    check_keys(batch.get(MEDIA_ROWS_KEY), {*table, *_VLM_MEDIA_KEYS})
    media_rows = MediaRows({**_loader_counts(batch), **batch}, rows, present, one_each=not declared)
    chunks = _chunks(media_rows, number)
    _check_mask(media_rows)
    _remove_media_keys(batch, {**table, **chunks})
    if chunks:
        batch[VLM_PP_MEDIA_KEY] = add_image_grid(chunks)
    return batch


def _has_media(batch: Mapping[str, Any], table: Mapping[str, Any]) -> bool:
    """Return whether a batch has media, prepared or not; counts alone are none."""
    names = {*table, *_VLM_MEDIA_KEYS, VLM_PP_MEDIA_KEY, MEDIA_ROWS_KEY} - set(COUNT_KEYS.values())
    return any(batch.get(key) is not None for key in names)


def _remove_media_keys(batch: BatchMapping, table: Mapping[str, Any]) -> BatchMapping:
    # Keys without a value must not reach the schedule either.
    for key in (*table, *_VLM_MEDIA_KEYS, MEDIA_LAYOUT_KEY, MEDIA_ROWS_KEY):
        batch.pop(key, None)
    return batch


def _loader_counts(batch: BatchMapping) -> dict[str, Any]:
    """Return the media of each row and the documents from the ``info`` of a loader's batch."""
    if not isinstance(batch, Batch):
        return {}
    counts = {kind: getattr(batch.info, f"num_{kind}s") for kind in COUNT_KEYS}
    media = {COUNT_KEYS[kind]: torch.tensor(count) for kind, count in counts.items() if any(count)}
    return {**media, "_packed_seq_ids": batch.info.document_ids}


def _check_unprepared(batch: BatchMapping, media: MediaLayout, n_microbatches: int) -> None:
    chunks = batch.get(VLM_PP_MEDIA_KEY) or {}
    numbers = {len(parts) for parts in chunks.values()}
    if numbers - {n_microbatches}:
        raise ValueError(
            f"the media of the batch were split for {sorted(numbers)} microbatches, and now for "
            f"{n_microbatches}: prepare a batch once, as its collate function returns it"
        )
    if chunks and media:
        raise ValueError(
            f"the batch has chunks of {', '.join(chunks)} and also media tensors ({', '.join(media)}): "
            "prepare a batch once"
        )


def _check_mask(rows: MediaRows) -> None:
    """Raise if rows have different numbers of pixel and mask entries."""
    pixels, mask = "pixel_values", "pixel_attention_mask"
    if {pixels, mask} <= set(rows.layout) and not torch.equal(rows.of(pixels), rows.of(mask)):
        raise ValueError(
            f"the rows of the batch have {rows.of(pixels).tolist()} entries of '{pixels}' and "
            f"{rows.of(mask).tolist()} of '{mask}': expected as many; declare both alike"
        )


def _chunks(rows: MediaRows, n_microbatches: int) -> dict[str, list[torch.Tensor]]:
    return {key: split_rows(rows.tensor(key), rows.of(key), n_microbatches) for key in rows.layout}


def wrap_vlm_collate_for_pp(
    collate_fn: Callable[[Any], BatchMapping], n_microbatches: int, *, layout: MediaLayout | None = None
) -> Callable[[Any], BatchMapping]:
    """Wrap a collate function so that its batches are ready for pipeline stages.

    Wrap last: around ``dataset.robust_collate(…)``, whose empty batches (None) pass through, as does anything
    that is not a mapping or has no media. ``partial(pad_collate_fn, processor=…, media_layout=True)`` and
    ``partial(neat_packed_vlm_collater, media_layout=True)`` return the owner of all media, for every family.
    Batches of other collate functions are split by ``layout`` and their counts, which is enough except for
    tiles, videos and samples that no tensor counts; these raise with their key.

    Args:
        collate_fn: returns batches with ``input_ids`` [B, S].
        n_microbatches: of the schedule.
        layout: see :func:`prepare_vlm_media_for_pp`.

    Returns:
        A collate function; it can be pickled if ``collate_fn`` can.

    Raises:
        ValueError: ``n_microbatches`` is not a positive number.
    """
    _, number = check_sizes({}, 1, n_microbatches)
    return partial(_collate_and_prepare, collate_fn, number, None if layout is None else dict(layout))


def _collate_and_prepare(
    collate_fn: Callable[[Any], BatchMapping], n_microbatches: int, layout: MediaLayout | None, samples: Any
) -> Any:
    batch: Any = collate_fn(samples)
    if not isinstance(batch, MutableMapping):
        return batch
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() == 0:
        if not _has_media(batch, {**(batch.get(MEDIA_LAYOUT_KEY) or {}), **(layout or {})}):
            return batch
        raise ValueError(f"the batch has no tensor 'input_ids' with its rows, only {', '.join(batch)}")
    return prepare_vlm_media_for_pp(batch, len(ids), n_microbatches, layout=layout)
