"""Layouts of batches that declare none: the documented rules, by the names of the tensors.

They are for batches of collate functions without a family; a family's own declaration is better. The names
are repeated here because this package imports no family (a test compares the two). The grid decides whether
pixels have one entry per image (whole images, padded patches) or are flat patches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from packhorse.pp_media.rows import COUNT_KEYS, entries_by_grid, tensor_of
from packhorse.types import MediaKind, MediaLayout, TensorLayout

_IMAGE_GRIDS = ("image_grid_hws", "image_grid_thw", "image_sizes", "image_position_ids")
_GRID_NAME = _IMAGE_GRIDS[0]
_MORE_IMAGE_GRIDS = ("grid_thws", "image_grid_hw", "spatial_shapes")
_VIDEO_GRIDS = ("video_grid_thw", "num_frames_per_video")
_PIXELS: Mapping[str, tuple[MediaKind, tuple[str, ...]]] = {
    "pixel_values": ("image", (*_IMAGE_GRIDS, *_MORE_IMAGE_GRIDS)),
    "pixel_values_videos": ("video", _VIDEO_GRIDS),
}
# One entry per image, without its number of patches; with spatial_shapes patches are padded to one length.
_NOT_GRIDS = frozenset({"image_sizes", "image_position_ids", "spatial_shapes"})
_CROPS, _CROP_COUNTS = "patch_pixel_values", "num_patches"
_MASK = "pixel_attention_mask"
_SAMPLE_AXES = 5  # of pixels [B, n, C, H, W] with a mask [B, n, H, W] (Idefics, SmolVLM)

_IMAGE, _VIDEO, _AUDIO = (TensorLayout((kind,), "item") for kind in ("image", "video", "audio"))
_BY_NAME: MediaLayout = {
    "patch_pixel_values": TensorLayout(("image",), "rows", "num_patches"),
    "num_patches": _IMAGE,
    "patch_newline_mask": TensorLayout(("image",), "rows", "num_patches"),
    **dict.fromkeys((*_IMAGE_GRIDS, *_MORE_IMAGE_GRIDS), _IMAGE),
    **dict.fromkeys(("image_pixel_values", "input_image_embeds", "image_attention_mask"), _IMAGE),
    _MASK: _IMAGE,  # or what the pixels are, see documented_layout
    "batch_num_images": TensorLayout(("image",), "sample"),
    **dict.fromkeys((*_VIDEO_GRIDS, "second_per_grid_ts", "video_second_per_grid"), _VIDEO),
    "video_position_ids": TensorLayout(("video",), "rows", "num_frames_per_video"),
    **dict.fromkeys(("input_features", "feature_attention_mask", "input_features_mask"), _AUDIO),
    **dict.fromkeys(("audio_input_features", "audio_embed_sizes", "audio_attention_mask"), _AUDIO),
    "input_audio_embeds": _AUDIO,
}

_VLM_MEDIA_KEYS: tuple[str, ...] = (*_PIXELS, *_BY_NAME, *COUNT_KEYS.values())
"""Every key that is removed from a batch without a declared layout."""


def _select_image_grid(
    image_grid_hws: torch.Tensor | None,
    image_grid_thw: torch.Tensor | None,
    image_sizes: torch.Tensor | None,
    image_position_ids: torch.Tensor | None,
) -> torch.Tensor | None:
    """Return the first of these tensors, which have one entry per image, that is not None."""
    given = (image_grid_hws, image_grid_thw, image_sizes, image_position_ids)
    return next((grid for grid in given if grid is not None), None)


def image_grid_of(media: Mapping[str, Any]) -> Any:
    """Return the tensor with one entry per image, by its name; also of names beyond the documented four."""
    chosen = _select_image_grid(*(media.get(key) for key in _IMAGE_GRIDS))
    more = (media.get(key) for key in _MORE_IMAGE_GRIDS)
    return chosen if chosen is not None else next((grid for grid in more if grid is not None), None)


def add_image_grid(chunks: Mapping[str, Any]) -> dict[str, Any]:
    """Add the grid of the images under the name that stages read, ``image_grid_hws``."""
    grid = image_grid_of(chunks)
    return dict(chunks) if grid is None else {**chunks, _GRID_NAME: grid}


def without_added_grid(chunks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chunks without the entry that :func:`add_image_grid` added.

    It is found by its values, which survive pinning and moving: an ``image_grid_hws`` that the batch itself
    has next to another grid holds other numbers.
    """
    named = chunks.get(_GRID_NAME)
    others = [chunks[key] for key in (*_IMAGE_GRIDS[1:], *_MORE_IMAGE_GRIDS) if chunks.get(key)]
    if not named or not any(_equal(grid, named) for grid in others):
        return dict(chunks)
    return {key: value for key, value in chunks.items() if key != _GRID_NAME}


def _equal(left: Any, right: Any) -> bool:
    return left is right or all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def documented_layout(batch: Mapping[str, Any], declared: MediaLayout) -> dict[str, TensorLayout]:
    """Return the layouts of the batch's media tensors that are not declared."""
    layout = {key: value for key, value in _BY_NAME.items() if batch.get(key) is not None}
    for key, (kind, grids) in _PIXELS.items():
        pixels = batch.get(key)
        if pixels is not None and key not in declared:
            grid_key = next((name for name in grids if batch.get(name) is not None), None)
            if kind == "image" and _counted_by_crops(batch, grid_key):
                grid_key = _CROP_COUNTS
            grid = None if grid_key is None else batch[grid_key]
            layout[key] = pixels_layout(key, pixels, kind, grid_key, grid, grids)
    if batch.get("pixel_values") is not None and batch.get(_MASK) is not None:
        shared = _pixels_and_mask(batch["pixel_values"], batch[_MASK], declared, layout)
        layout |= {"pixel_values": shared, _MASK: shared}
    return {key: value for key, value in layout.items() if key not in declared}


def _counted_by_crops(batch: Mapping[str, Any], grid_key: str | None) -> bool:
    """Return whether ``num_patches`` counts flat pixels: nothing else does, and there are no crops."""
    numbers = batch.get(_CROP_COUNTS)
    if numbers is None or batch.get(_CROPS) is not None or grid_key not in (None, *_NOT_GRIDS):
        return False
    counts = entries_by_grid(_CROP_COUNTS, tensor_of(_CROP_COUNTS, numbers))
    return int(counts.sum()) == len(tensor_of("pixel_values", batch["pixel_values"]))


def _pixels_and_mask(
    pixels: Any, mask: Any, declared: MediaLayout, by_name: Mapping[str, TensorLayout]
) -> TensorLayout:
    """Return the layout of pixels and their mask: the declared one of either, else by their axes."""
    for key in ("pixel_values", _MASK):
        if key in declared:
            return declared[key]
    of_samples = tensor_of("pixel_values", pixels).dim() == _SAMPLE_AXES
    if of_samples and tensor_of(_MASK, mask).dim() == _SAMPLE_AXES - 1:
        return TensorLayout(("image", "video"), "sample")
    return by_name["pixel_values"]


def pixels_layout(
    key: str, pixels: Any, kind: MediaKind, grid_key: str | None, grid: Any, grids: tuple[str, ...] = ()
) -> TensorLayout:
    """Return the layout of pixels: one entry per media item, or flat patches; raise if neither matches.

    If both match, each item has one patch and the layouts are equal. ``grid`` has one entry per media item;
    ``grids`` are the keys it could have, for messages.
    """
    pixels = tensor_of(key, pixels)
    if grid_key is None:
        if pixels.dim() <= 2:
            raise ValueError(
                f"'{key}' has shape {tuple(pixels.shape)}, flat patches, and the batch has no grid with the "
                f"number of each media item: expected one of {', '.join(grids)}"
            )
        return TensorLayout((kind,), "item")
    grid = tensor_of(grid_key, grid)
    patches = None
    if grid_key not in _NOT_GRIDS and grid.dim() <= 2 and not grid.is_floating_point():
        patches = int(entries_by_grid(grid_key, grid).sum())
    if patches == len(pixels):
        return TensorLayout((kind,), "rows", grid_key)
    if len(grid) == len(pixels):
        return TensorLayout((kind,), "item")
    make = "" if patches is None else f" or {patches} (one per patch of the grid)"
    raise ValueError(
        f"'{key}' has shape {tuple(pixels.shape)} and '{grid_key}' {tuple(grid.shape)}: expected "
        f"{len(grid)} entries (one per {kind}){make} along axis 0, found {len(pixels)}"
    )
