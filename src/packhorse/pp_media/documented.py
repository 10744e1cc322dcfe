"""The layouts of batches that declare none: the documented rules, by the names of the tensors.

A family's own declaration is better where there is one. These rules cover the well-known names, for batches
of collate functions that know no family; the names stand here a second time because this package imports no
family (a test compares the two). Pixels are told apart by their grid: one entry per image (whole images,
padded patches), or flat patches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from packhorse.pp_media.rows import COUNT_KEYS, multiplied_out, tensor_of
from packhorse.types import MediaKind, MediaLayout, TensorLayout

_IMAGE_GRIDS = ("image_grid_hws", "image_grid_thw", "image_sizes", "image_position_ids")
_GRID_NAME = _IMAGE_GRIDS[0]
_MORE_IMAGE_GRIDS = ("grid_thws", "image_grid_hw", "spatial_shapes")
_VIDEO_GRIDS = ("video_grid_thw", "num_frames_per_video")
_PIXELS: Mapping[str, tuple[MediaKind, tuple[str, ...]]] = {
    "pixel_values": ("image", (*_IMAGE_GRIDS, *_MORE_IMAGE_GRIDS)),
    "pixel_values_videos": ("video", _VIDEO_GRIDS),
}
# One entry per image, but not its patches; with spatial_shapes patches are padded, one entry per image.
_NOT_GRIDS = frozenset({"image_sizes", "image_position_ids", "spatial_shapes"})
_CROPS, _CROP_COUNTS = "patch_pixel_values", "num_patches"
_MASK = "pixel_attention_mask"
_IMAGES_OF_A_SAMPLE = (
    5  # axes of pixels [B, n, C, H, W] that come with a mask [B, n, H, W] (Idefics, SmolVLM)
)

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
"""Every key that is taken out of a batch which declares no layout."""


def _select_image_grid(
    image_grid_hws: torch.Tensor | None,
    image_grid_thw: torch.Tensor | None,
    image_sizes: torch.Tensor | None,
    image_position_ids: torch.Tensor | None,
) -> torch.Tensor | None:
    """The tensor that tells about each image: the first that is there."""
    given = (image_grid_hws, image_grid_thw, image_sizes, image_position_ids)
    return next((grid for grid in given if grid is not None), None)


def image_grid_of(media: Mapping[str, Any]) -> Any:
    """What :func:`_select_image_grid` selects, by the names of the tensors; also of names beyond it."""
    chosen = _select_image_grid(*(media.get(key) for key in _IMAGE_GRIDS))
    more = (media.get(key) for key in _MORE_IMAGE_GRIDS)
    return chosen if chosen is not None else next((grid for grid in more if grid is not None), None)


def with_image_grid(chunks: Mapping[str, Any]) -> dict[str, Any]:
    """The chunks, and the grid of the images under the name that stages read it by, ``image_grid_hws``."""
    grid = image_grid_of(chunks)
    return dict(chunks) if grid is None else {**chunks, _GRID_NAME: grid}


def by_own_names(chunks: Mapping[str, Any]) -> dict[str, Any]:
    """The chunks without the second name that :func:`with_image_grid` gave to a grid.

    It is known by its values, which survive pinning and moving: an ``image_grid_hws`` that the batch itself
    has next to another grid holds other numbers.
    """
    named = chunks.get(_GRID_NAME)
    others = [chunks[key] for key in (*_IMAGE_GRIDS[1:], *_MORE_IMAGE_GRIDS) if chunks.get(key)]
    if not named or not any(_equal(grid, named) for grid in others):
        return dict(chunks)
    return {key: value for key, value in chunks.items() if key != _GRID_NAME}


def _equal(some: Any, others: Any) -> bool:
    return some is others or all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def documented_layout(batch: Mapping[str, Any], declared: MediaLayout) -> dict[str, TensorLayout]:
    """Layouts of the batch's media tensors that nobody declares.

    Raises:
        ValueError: flat patches come without a grid, or pixels do not fit theirs.
    """
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
        whose = _pixels_and_mask(batch["pixel_values"], batch[_MASK], declared, layout)
        layout |= {"pixel_values": whose, _MASK: whose}
    return {key: value for key, value in layout.items() if key not in declared}


def _counted_by_crops(batch: Mapping[str, Any], grid_key: str | None) -> bool:
    """Whether ``num_patches`` counts flat pixels: where nothing else does, and it counts no crops."""
    numbers = batch.get(_CROP_COUNTS)
    if numbers is None or batch.get(_CROPS) is not None or grid_key not in (None, *_NOT_GRIDS):
        return False
    counts = multiplied_out(_CROP_COUNTS, tensor_of(_CROP_COUNTS, numbers))
    return int(counts.sum()) == len(tensor_of("pixel_values", batch["pixel_values"]))


def _pixels_and_mask(
    pixels: Any, mask: Any, declared: MediaLayout, by_name: Mapping[str, TensorLayout]
) -> TensorLayout:
    """Pixels and their mask are the same owner's, whichever of the two says whose they are."""
    for key in ("pixel_values", _MASK):
        if key in declared:
            return declared[key]
    of_samples = tensor_of("pixel_values", pixels).dim() == _IMAGES_OF_A_SAMPLE
    if of_samples and tensor_of(_MASK, mask).dim() == _IMAGES_OF_A_SAMPLE - 1:
        return TensorLayout(("image", "video"), "sample")
    return by_name["pixel_values"]


def pixels_layout(
    key: str,
    pixels: Any,
    kind: MediaKind,
    grid_key: str | None,
    grid: Any,
    grids: tuple[str, ...] = (),
) -> TensorLayout:
    """One entry per media item, or flat patches; if both fit, each item has one patch and they are equal.

    Args:
        key: of the pixels.
        pixels: the tensor.
        kind: of the media.
        grid_key: of the tensor that tells about each media item; None where there is none.
        grid: that tensor.
        grids: the keys it could have, for messages.

    Raises:
        ValueError: neither fits.
    """
    pixels = tensor_of(key, pixels)
    if grid_key is None:
        if pixels.dim() <= 2:
            raise ValueError(
                f"'{key}' has shape {tuple(pixels.shape)}, flat patches, and the batch has no grid that says "
                f"how many belong to each media item: expected one of {', '.join(grids)}"
            )
        return TensorLayout((kind,), "item")
    grid = tensor_of(grid_key, grid)
    patches = None
    if grid_key not in _NOT_GRIDS and grid.dim() <= 2 and not grid.is_floating_point():
        patches = int(multiplied_out(grid_key, grid).sum())
    if patches == len(pixels):
        return TensorLayout((kind,), "rows", grid_key)
    if len(grid) == len(pixels):
        return TensorLayout((kind,), "item")
    make = "" if patches is None else f" or {patches} (one per patch of the grid)"
    raise ValueError(
        f"'{key}' has shape {tuple(pixels.shape)} and '{grid_key}' {tuple(grid.shape)}: expected "
        f"{len(grid)} entries (one per {kind}){make} along axis 0, found {len(pixels)}"
    )
