"""LFM2-VL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from packhorse.families.encoder import Encoder, Family, LoadedMedia
from packhorse.families.media_sizes import Pieces, nearest_tiles, tile_arrangements
from packhorse.media.images import fit_any_image
from packhorse.types import MediaKind, MediaLayout, TensorLayout


class Lfm2VL(Family):
    """An image at its own shape; a large one as tiles, and smaller as a whole after them."""

    name = "lfm2_vl"
    processor_classes: ClassVar[tuple[str, ...]] = ("Lfm2VlProcessor",)
    layout: ClassVar[MediaLayout] = {
        # Tiles and whole images, filled up to the same number of patches.
        "pixel_values": TensorLayout(("image",), "rows"),
        "pixel_attention_mask": TensorLayout(("image",), "rows"),
        "spatial_shapes": TensorLayout(("image",), "rows"),
    }
    pixel_masks: ClassVar[Mapping[str, str]] = {"pixel_values": "pixel_attention_mask"}

    def media_tokens(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """A token for each square of patches, in every tile and in the whole image."""
        split = _split(encoder.processor.image_processor, *size)
        return split.tiles * split.tile_tokens + split.whole_tokens

    def media_patches(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """Those of a whole budget for each tile and for the whole image: they are filled up to it."""
        owner = encoder.processor.image_processor
        return self.item_rows(encoder, "pixel_values", kind, size) * _most_patches(owner)

    def pieces(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> Pieces:
        """Brackets; tiles by row and column, and a mark before the whole image that follows them."""
        processor = encoder.processor
        split, pad = _split(processor.image_processor, *size), processor.image_token
        written: list[tuple[str, int]] = [(processor.image_start_token, 1)]
        for row in range(1, split.rows + 1):
            for column in range(1, split.columns + 1):
                written += ((f"<|img_row_{row}_col_{column}|>", 1), (pad, split.tile_tokens))
        if split.tiles and split.whole_tokens:
            written.append((processor.image_thumbnail_token, 1))
        return [*written, (pad, split.whole_tokens), (processor.image_end_token, 1)]

    def item_rows(self, encoder: Encoder, key: str, kind: MediaKind, size: Any) -> int:
        """Tiles, and the whole image."""
        split = _split(encoder.processor.image_processor, *size)
        return split.tiles + bool(split.whole_tokens)

    def call(self, encoder: Encoder, text: str, media: LoadedMedia) -> Mapping[str, Any]:
        """The processor's output; ValueError for an image for which that is not what the model takes."""
        for image in media.images:
            _split(encoder.processor.image_processor, image.height, image.width)
        return super().call(encoder, text, media)


class _Split(NamedTuple):
    """How an image is divided: one that is not large has no tiles; ``whole_tokens`` are 0 for tiles alone."""

    rows: int
    columns: int
    tile_tokens: int
    whole_tokens: int

    @property
    def tiles(self) -> int:
        return self.rows * self.columns


def _split(owner: Any, height: int, width: int) -> _Split:
    """Divide an image as the image processor does.

    Raises:
        ValueError: the processor returns something else than it writes tokens for.
    """
    group = owner.downsample_factor
    factor = owner.encoder_patch_size * group
    least, most = (tokens * factor**2 for tokens in (owner.min_image_tokens, owner.max_image_tokens))
    whole = fit_any_image(height, width, factor, least, most)
    rows, columns = _tiles(owner, height, width, factor)
    shown = owner.use_thumbnail or not rows
    patches = math.prod(whole) // owner.encoder_patch_size**2
    if shown and patches > _most_patches(owner):
        raise ValueError(
            f"{height} x {width}: too long, it would be scaled to {whole[0]} x {whole[1]}, which has "
            f"{patches} patches, expected at most {_most_patches(owner)}"
        )
    if rows * columns == 1:
        raise ValueError(
            f"{height} x {width}: it would be one tile, but with the tokens of an image without tiles. Set "
            f"min_tiles of the image processor to 2, not {owner.min_tiles}"
        )
    side = math.ceil(owner.tile_size // owner.encoder_patch_size / group)
    return _Split(rows, columns, side**2, math.prod(whole) // factor**2 if shown else 0)


def _tiles(owner: Any, height: int, width: int, factor: int) -> tuple[int, int]:
    """Rows and columns of tiles; no tiles for an image that is not large."""
    sides = (max(owner.encoder_patch_size, round(side / factor) * factor) for side in (height, width))
    budget = owner.max_image_tokens * factor**2 * owner.max_pixels_tolerance
    if not owner.do_image_splitting or owner.max_tiles == 1 or math.prod(sides) <= budget:
        return 0, 0
    arrangements = tile_arrangements(owner.min_tiles, owner.max_tiles)
    columns, rows = nearest_tiles(height, width, owner.tile_size**2, arrangements)
    return rows, columns


def _most_patches(owner: Any) -> int:
    """The patches up to which every tile and every whole image are filled up."""
    tile = owner.tile_size // owner.encoder_patch_size if owner.do_image_splitting else 0
    return int(max(owner.max_image_tokens * owner.downsample_factor**2, tile**2))
