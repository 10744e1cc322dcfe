"""Gemma 3."""

from __future__ import annotations

from typing import Any, ClassVar

from packhorse.chat import tokenizer_of
from packhorse.families.base import Family, token_named
from packhorse.families.expansion import Pieces
from packhorse.types import MediaKind, MediaLayout, TensorLayout

_PATCH = 14  # of SigLIP, the vision encoder; the processor does not know it


class Gemma3(Family):
    """Every image is a square of the same size and has the same number of tokens.

    ``token_type_ids`` marks them: image tokens attend to each other in both directions. Crops ("pan and
    scan") are off in the processor's call whatever its image processor says, so an image is one entry.
    """

    name = "gemma3"
    processor_classes: ClassVar[tuple[str, ...]] = ("Gemma3Processor",)
    layout: ClassVar[MediaLayout] = {"pixel_values": TensorLayout(("image",), "item")}
    both_ways: ClassVar[str | None] = "token_type_ids"

    def placeholders(self, processor: Any) -> dict[MediaKind, str]:
        """The token that opens an image; it is still there when the image is expanded."""
        return {"image": token_named(processor, "boi_token")}

    def media_token_ids(self, processor: Any) -> frozenset[int]:
        """The soft token: the processor's own ``image_token_id`` is the opening one."""
        return frozenset({int(tokenizer_of(processor).image_token_id)})

    def media_tokens(self, processor: Any, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """The same for every size."""
        return int(processor.image_seq_length)

    def media_patches(self, processor: Any, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """The same for every size."""
        square = processor.image_processor.size
        return int((square["height"] // _PATCH) * (square["width"] // _PATCH))

    def pieces(self, processor: Any, kind: MediaKind, size: Any, images_in_sample: int = 1) -> Pieces:
        """Brackets and two empty lines; newlines of the text beside them may melt into theirs."""
        opening, closing = token_named(processor, "boi_token"), token_named(processor, "eoi_token")
        soft = str(tokenizer_of(processor).image_token)
        return [(f"\n\n{opening}", 1), (soft, int(processor.image_seq_length)), (f"{closing}\n\n", 1)]
