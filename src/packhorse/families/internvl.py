"""InternVL 3 and 3.5."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

from packhorse.families.encoder import Encoder, Family
from packhorse.families.media_sizes import Pieces, frame_pieces, nearest_tiles
from packhorse.types import MediaKind, MediaLayout, TensorLayout

_PATCHES_PER_TOKEN = 4  # pixel shuffle halves both sides; the processor does not know it


class InternVL(Family):
    """Images are tiles and a thumbnail, videos are frames: all in one tensor, in the order of the text."""

    name = "internvl"
    processor_classes: ClassVar[tuple[str, ...]] = ("InternVLProcessor",)
    kinds: ClassVar[tuple[MediaKind, ...]] = ("image", "video")
    layout: ClassVar[MediaLayout] = {"pixel_values": TensorLayout(("image", "video"), "rows")}
    equal_frames: ClassVar[bool] = True
    caveats: ClassVar[tuple[str, ...]] = (
        "videos of one sample must have the same number of frames: the processor rejects others",
    )

    def media_token_ids(self, encoder: Encoder) -> frozenset[int]:
        """One token for all images; the placeholder of a video is gone when it is expanded."""
        return frozenset({int(encoder.tokenizer.context_image_token_id)})

    def media_tokens(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """The same number for each tile and each frame."""
        return int(encoder.processor.image_seq_length) * self.item_rows(encoder, "pixel_values", kind, size)

    def media_patches(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """Four for each token."""
        return _PATCHES_PER_TOKEN * self.media_tokens(encoder, kind, size)

    def pieces(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> Pieces:
        """Brackets around an image; frames are numbered lines."""
        processor = encoder.processor
        start, pad, end = processor.start_image_token, processor.image_token, processor.end_image_token
        if kind == "image":
            return [(start, 1), (pad, self.media_tokens(encoder, kind, size)), (end, 1)]
        numbers = range(1, size.total_frames + 1)
        lines = (("\n" if number > 1 else "") + f"Frame{number}: {start}" for number in numbers)
        return frame_pieces(lines, (pad, int(processor.image_seq_length)), end)

    def item_rows(self, encoder: Encoder, key: str, kind: MediaKind, size: Any) -> int:
        """Tiles with the thumbnail, or frames."""
        if kind == "video":
            return int(size.total_frames)
        owner = encoder.processor.image_processor
        tile = owner.size["height"] * owner.size["width"]
        columns, rows = nearest_tiles(*size, tile, _arrangements(owner.min_patches, owner.max_patches))
        return columns * rows + (columns * rows > 1)


@lru_cache
def _arrangements(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """Tiles across and down, small arrangements first."""
    sides = range(1, most + 1)
    pairs = [(across, down) for across in sides for down in sides if least <= across * down <= most]
    return tuple(sorted(pairs, key=lambda pair: pair[0] * pair[1]))
