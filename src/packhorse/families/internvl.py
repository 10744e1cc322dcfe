"""InternVL 3 and 3.5."""

from __future__ import annotations

from typing import Any, ClassVar

from packhorse.chat import tokenizer_of
from packhorse.families.base import Family
from packhorse.types import MediaKind, MediaLayout, TensorLayout


class InternVL(Family):
    """Images are tiles and a thumbnail, films are frames: all in one tensor, in the order of the text."""

    name = "internvl"
    processor_classes: ClassVar[tuple[str, ...]] = ("InternVLProcessor",)
    kinds: ClassVar[tuple[MediaKind, ...]] = ("image", "video")
    layout: ClassVar[MediaLayout] = {"pixel_values": TensorLayout(("image", "video"), "rows")}
    caveats: ClassVar[tuple[str, ...]] = (
        "videos of one sample must have the same number of frames: the processor refuses others",
    )

    def media_token_ids(self, processor: Any) -> frozenset[int]:
        """One token for all pictures; the placeholder of a video is gone when it is expanded."""
        return frozenset({int(tokenizer_of(processor).context_image_token_id)})

    def media_tokens(self, processor: Any, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """The same number for each tile and each frame."""
        return int(processor.image_seq_length) * self.item_rows(processor, "pixel_values", kind, size)

    def item_rows(self, processor: Any, key: str, kind: MediaKind, size: Any) -> int:
        """Tiles with the thumbnail, or frames."""
        if kind == "video":
            return int(size.total_frames)
        owner = processor.image_processor
        height, width = size
        columns, rows = _canvas(owner, height, width)
        return columns * rows + (columns * rows > 1)


def _canvas(owner: Any, height: int, width: int) -> tuple[int, int]:
    """The arrangement of tiles whose shape is nearest; of equals the larger, while it is not half empty."""
    tile = owner.size["height"] * owner.size["width"]
    sides = range(1, owner.max_patches + 1)
    arrangements = [
        (across, down)
        for across in sides
        for down in sides
        if owner.min_patches <= across * down <= owner.max_patches
    ]
    best, nearest = (1, 1), float("inf")
    for across, down in sorted(arrangements, key=lambda pair: pair[0] * pair[1]):
        distance = abs(width / height - across / down)
        enough = distance == nearest and height * width > 0.5 * tile * across * down
        if distance < nearest or enough:
            best, nearest = (across, down), distance
    return best
