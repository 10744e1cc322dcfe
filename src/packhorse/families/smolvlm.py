"""SmolVLM and SmolVLM2."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, ClassVar

from packhorse.families.encoder import Encoder, Family, LoadedMedia
from packhorse.families.media_sizes import Pieces, Sizes, frame_pieces, frame_times
from packhorse.media import VideoInfo
from packhorse.types import Conversation, MediaKind, MediaLayout, TensorLayout

_LONGEST_SIDE = 4096


class SmolVLM(Family):
    """A sample's images are tiles along axis 1 of one entry; a video's frames are untiled images.

    The processor has one key for images and for frames, and the second overwrites the first: a sample with
    both is rejected.
    """

    name = "smolvlm"
    processor_classes: ClassVar[tuple[str, ...]] = ("SmolVLMProcessor",)
    kinds: ClassVar[tuple[MediaKind, ...]] = ("image", "video")
    layout: ClassVar[MediaLayout] = {
        # The model flattens samples and tiles, and drops tiles that are all zero.
        "pixel_values": TensorLayout(("image", "video"), "sample", ragged=True),
        "pixel_attention_mask": TensorLayout(("image", "video"), "sample", ragged=True),
    }
    caveats: ClassVar[tuple[str, ...]] = ("an image and a video in one sample are rejected",)
    pixel_masks: ClassVar[Mapping[str, str]] = {"pixel_values": "pixel_attention_mask"}

    def media_token_ids(self, encoder: Encoder) -> frozenset[int]:
        """One token for images and frames."""
        return frozenset({int(encoder.tokenizer.convert_tokens_to_ids(encoder.processor.image_token))})

    def media_tokens(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """The same number for each tile, for the whole image, and for each frame."""
        processor = encoder.processor
        if kind == "video":
            return int(size.total_frames * processor.image_seq_len)
        rows, columns = _tiles(processor.image_processor, *size)
        return int((rows * columns + 1) * processor.image_seq_len)

    def media_patches(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """Those of a tile, for each tile, for the whole image, and for each frame."""
        tokens = int(encoder.processor.image_seq_len)
        side = encoder.processor.image_processor.max_image_size["longest_edge"]
        return self.media_tokens(encoder, kind, size) // tokens * _patches(side, tokens)

    def pieces(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> Pieces:
        """Tiles by row and column, and the whole image; frames with their times, and words around them."""
        processor = encoder.processor
        if kind == "video":
            return _video(encoder, size, size.total_frames)
        rows, columns = _tiles(processor.image_processor, *size)
        fake, pad = processor.fake_image_token, (processor.image_token, int(processor.image_seq_len))
        written: list[tuple[str, int]] = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                line = "\n" if row > 1 and column == 1 else ""
                written += ((f"{line}{fake}<row_{row}_col_{column}>", 1), pad)
        gap = "\n\n" if rows else ""
        return [*written, (f"{gap}{fake}{processor.global_image_token}", 1), pad, (fake, 1)]

    def pieces_together(self, encoder: Encoder, sizes: Sizes) -> list[Pieces]:
        """Every video is said to have as many frames as the longest one."""
        videos: list[Any] = [size for kind, size in sizes if kind == "video"]
        if not videos:
            return super().pieces_together(encoder, sizes)
        most = max(video.total_frames for video in videos)
        return [_video(encoder, video, most) for video in videos]

    def check(self, conversation: Conversation) -> None:
        """Reject a sample with images and videos."""
        super().check(conversation)
        if {ref.kind for ref in conversation.media} == {"image", "video"}:
            raise self.bad("an image and a video: smolvlm's processor keeps the pixels of one", conversation)

    def render(self, encoder: Encoder, turns: Sequence[Mapping[str, Any]]) -> str:
        """With the processor's own template, which it replaces by another when it sees a video."""
        return encoder.apply_chat_template(turns, chat_template=encoder.chat_template)

    def call(self, encoder: Encoder, text: str, media: LoadedMedia) -> Mapping[str, Any]:
        """The processor's output; the frames of several videos one after the other, as one sample's tiles."""
        import torch

        output = dict(super().call(encoder, text, media))
        if media.videos:
            for key in ("pixel_values", "pixel_attention_mask"):
                pairs = zip(output[key], media.videos, strict=True)
                output[key] = torch.cat([frames[: len(video.frames)] for frames, video in pairs])[None]
        return output


def _video(encoder: Encoder, info: VideoInfo, frames: int) -> Pieces:
    """A video: how many frames are said to come, their times, and each as a whole image."""
    processor = encoder.processor
    fake, pad = processor.fake_image_token, (processor.image_token, int(processor.image_seq_len))
    times = frame_times(info)
    seconds = int(times[-1] if info.duration is None else info.duration)
    opening = (
        f"You are provided the following series of {_in_words(frames)} frames from a "
        f"{timedelta(seconds=seconds)} [H:MM:SS] video.\n"
    )
    clocks = (f"{int(time // 60):02d}:{int(time % 60):02d}" for time in times)
    lines = (f"\nFrame from {clock}:{fake}{processor.global_image_token}" for clock in clocks)
    return [(opening, 1), *frame_pieces(lines, pad, fake), ("\n\n", 1)]


@lru_cache
def _in_words(number: int) -> str:
    # The processor cannot be built without that package.
    return str(importlib.import_module("num2words").num2words(number))


@lru_cache
def _patches(side: int, tokens: int) -> int:
    """Patches of a tile: the vision encoders have patches of 14 or 16 pixels, and whole squares to a token.

    The processor does not know which.
    """
    for patch in (14, 16):
        squares = (side // patch) ** 2 / tokens
        if math.sqrt(squares).is_integer():
            return (side // patch) ** 2
    return tokens


def _tiles(owner: Any, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of tiles; no tiles where the resized image fits into one."""
    if not owner.do_image_splitting:
        return 0, 0
    tile = owner.max_image_size["longest_edge"]
    height, width = _scale(height, width, owner.size["longest_edge"], even=True)
    if max(height, width) > _LONGEST_SIDE:
        height, width = _scale(height, width, _LONGEST_SIDE)
    height, width = _scale(height, width, math.ceil(max(height, width) / tile) * tile)
    rows, columns = math.ceil(height / tile), math.ceil(width / tile)
    return (rows, columns) if max(rows, columns) > 1 else (0, 0)


def _scale(height: int, width: int, longest: int, even: bool = False) -> tuple[int, int]:
    """The longer side made ``longest``, the other one by the same ratio, cut to whole pixels."""
    ratio = width / height
    other = int(longest / ratio) if width >= height else int(longest * ratio)
    other = max(1, other + other % 2 if even else other)
    return (other, longest) if width >= height else (longest, other)
