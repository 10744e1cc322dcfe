"""Gemma 3."""

from __future__ import annotations

from typing import Any, ClassVar

from packhorse.families.encoder import Encoder, Family
from packhorse.families.media_sizes import Pieces
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
    bidirectional: ClassVar[str | None] = "token_type_ids"

    def placeholders(self, encoder: Encoder) -> dict[MediaKind, str]:
        """The token that opens an image; it is still there when the image is expanded."""
        return {"image": encoder.token("boi_token")}

    def media_token_ids(self, encoder: Encoder) -> frozenset[int]:
        """The soft token: the processor's own ``image_token_id`` is the opening one."""
        return frozenset({int(encoder.tokenizer.image_token_id)})

    def media_tokens(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """The same for every size."""
        return int(encoder.processor.image_seq_length)

    def media_patches(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """The same for every size."""
        square = encoder.processor.image_processor.size
        return int((square["height"] // _PATCH) * (square["width"] // _PATCH))

    def pieces(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> Pieces:
        """Brackets and two empty lines; newlines of the text may join theirs in one token."""
        opening, closing = encoder.token("boi_token"), encoder.token("eoi_token")
        soft = str(encoder.tokenizer.image_token)
        return [(f"\n\n{opening}", 1), (soft, int(encoder.processor.image_seq_length)), (f"{closing}\n\n", 1)]
