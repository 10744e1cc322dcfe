"""Kimi K2.5: transformers' own processor, and the one that comes with the model."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from packhorse.chat import ChatProcessor, token_id, token_keys
from packhorse.errors import ConfigError
from packhorse.families.encoder import Encoder, Family, LoadedMedia
from packhorse.families.generic import ProbedFamily
from packhorse.families.kimi_vl import padded_groups
from packhorse.families.media_sizes import Pieces, frame_pieces, frame_times
from packhorse.families.processor_call import call, has_parameter
from packhorse.media import MediaSize
from packhorse.types import MediaKind, MediaLayout, TensorLayout

if TYPE_CHECKING:
    import torch

_MEDIA_PAD, _MEDIA_PAD_ID = "<|media_pad|>", 163605


class KimiK25(Family):
    """Images and videos at their own resolution; a video is cut into chunks of four frames, each with a time.

    ``video_grid_thw`` has a row for each chunk, not for each video.
    """

    name = "kimi_k25"
    processor_classes: ClassVar[tuple[str, ...]] = ("Kimi_K25Processor",)
    kinds: ClassVar[tuple[MediaKind, ...]] = ("image", "video")
    layout: ClassVar[MediaLayout] = {
        "pixel_values": TensorLayout(("image",), "rows", "image_grid_thw"),
        "image_grid_thw": TensorLayout(("image",), "item"),
        "pixel_values_videos": TensorLayout(("video",), "rows", "video_grid_thw"),
        "video_grid_thw": TensorLayout(("video",), "rows"),
    }
    min_transformers: ClassVar[str] = "5.13"
    size_settings: ClassVar[Mapping[MediaKind, tuple[str, ...]]] = {
        "image": ("max_pixels",),
        "video": ("max_pixels",),
    }

    def media_tokens(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """Never scaled up; scaled down to the budget of patches, then padded to whole groups."""
        if kind == "image":
            return _tokens(encoder.processor.image_processor, *size)
        frames = _tokens(encoder.processor.video_processor, size.height, size.width)
        return frames * self.item_rows(encoder, "video_grid_thw", kind, size)

    def media_patches(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """The grid multiplied out; frames are one token together, but each has its patches."""
        owner, frames = encoder.vision(kind), 1
        if kind == "video":
            frames, size = size.total_frames, (size.height, size.width)
        return int(frames * _tokens(owner, *size) * owner.merge_size**2)

    def pieces(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> Pieces:
        """Each chunk of a video has the time of its first frame in front, and brackets."""
        if kind != "video":
            return super().pieces(encoder, kind, size, images_in_sample)
        owner = encoder.processor.video_processor
        tokens = _tokens(owner, size.height, size.width)
        times = frame_times(size)[:: owner.temporal_patch_size]
        openings = (f"{_clock(seconds)}<|media_begin|>video<|media_content|>" for seconds in times)
        return frame_pieces(openings, (encoder.processor.video_token, tokens), "<|media_end|>")

    def configure(
        self, encoder: Encoder, kind: MediaKind, size: Any, settings: Mapping[str, int]
    ) -> tuple[MediaSize, dict[str, Any]]:
        """The budget is one of patches, for an image or a frame, before it is padded to whole groups."""
        patches = settings["max_pixels"] // encoder.vision(kind).patch_size ** 2
        return size, {"max_patches": max(1, patches)}

    def item_rows(self, encoder: Encoder, key: str, kind: MediaKind, size: Any) -> int:
        """A video's chunks."""
        chunk = encoder.processor.video_processor.temporal_patch_size
        chunks: int = math.ceil(size.total_frames / chunk)
        return chunks


def _clock(seconds: float) -> str:
    """Hours, minutes, seconds and thousandths; starts over after a day."""
    return time.strftime("%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}"


def _tokens(owner: Any, height: int, width: int) -> int:
    patch, longest = owner.patch_size, owner.size["max_height"] * owner.patch_size
    patches = max(1, height // patch) * max(1, width // patch)
    scale = min(1.0, math.sqrt(owner.max_patches / patches), longest / height, longest / width)
    factor = patch * owner.merge_size
    return padded_groups(height, scale, factor) * padded_groups(width, scale, factor)


def media_pad_id(chat: ChatProcessor) -> int:
    """The id of ``<|media_pad|>``: what the processor or its tokenizer says, else the released model's."""
    candidates = (
        getattr(chat.processor, "media_placeholder_token_id", None),
        getattr(chat.processor, "image_token_id", None),
        token_id(chat.tokenizer, _MEDIA_PAD),
    )
    return next((candidate for candidate in candidates if isinstance(candidate, int)), _MEDIA_PAD_ID)


def expand_placeholders(
    tokens: Mapping[str, torch.Tensor],
    grids: torch.Tensor,
    placeholder: int,
    merge_kernel_size: tuple[int, int] = (2, 2),
) -> dict[str, torch.Tensor]:
    """Repeat each image placeholder once per token of its image, in every tensor of ``tokens``.

    Ids that have one for each token already, as some versions of the processor return them, stay unchanged.
    ConfigError if there are more or fewer placeholders than images.

    Args:
        tokens: ``input_ids`` and other tensors of one sample with one entry per token, [S] or [1, S].
        grids: [N, 3], (t, h, w) of each image in patches.
        placeholder: the id of the placeholder.
        merge_kernel_size: patches along height and width that become one token.
    """
    import torch

    ids = tokens["input_ids"].reshape(-1)
    rows, columns = merge_kernel_size
    lengths = (grids[:, -2] // rows) * (grids[:, -1] // columns)
    is_placeholder = ids == placeholder
    count = int(is_placeholder.sum())
    if count == int(lengths.sum()):
        return dict(tokens)
    if count != len(grids):
        raise ConfigError(
            f"{count} placeholders (id {placeholder}) in the ids for {len(grids)} images: expected one "
            f"{_MEDIA_PAD} each. Use the processor and the chat template of the same Kimi K2.5 repository",
            setting="processor",
        )
    repeats = torch.ones_like(ids, dtype=torch.long)
    repeats[is_placeholder] = lengths.to(repeats)
    return {key: torch.repeat_interleave(value, repeats, dim=-1) for key, value in tokens.items()}


class KimiK25Remote(ProbedFamily):
    """The processor of the model's own repository: it leaves one ``<|media_pad|>`` per image in the ids.

    The model would expand them in its forward pass; here they are expanded before, from ``grid_thws``, so
    that lengths are known.
    """

    name = "kimi_k25_remote"
    processor_classes: ClassVar[tuple[str, ...]] = ("KimiK25Processor",)
    layout: ClassVar[MediaLayout] = {
        "pixel_values": TensorLayout(("image",), "rows", "grid_thws"),
        "grid_thws": TensorLayout(("image",), "item"),
    }
    caveats: ClassVar[tuple[str, ...]] = (
        "media tokens are counted by running the processor on a white image of the same size",
    )

    def placeholders(self, encoder: Encoder) -> dict[MediaKind, str]:
        """Fixed by the model."""
        return {"image": _MEDIA_PAD}

    def media_token_ids(self, encoder: Encoder) -> frozenset[int]:
        """The id of ``<|media_pad|>``."""
        return frozenset({media_pad_id(encoder)})

    def call_arguments(self, encoder: Encoder, media: LoadedMedia) -> dict[str, Any]:
        """Images are entries of ``medias``; ``images`` for a processor that takes only these."""
        if not media.images:
            return {}
        if has_parameter(encoder.processor, "images") and not has_parameter(encoder.processor, "medias"):
            return {"images": media.images}
        return {"medias": [{"type": "image", "image": image} for image in media.images]}

    def text_arguments(self, encoder: Encoder, text: str) -> dict[str, Any]:
        """The call takes no option for the text."""
        return {}

    def call(self, encoder: Encoder, text: str, media: LoadedMedia) -> dict[str, Any]:
        """The processor's output with a batch axis of one, each placeholder repeated once per image token.

        Works with an encoder of any family, so that collate functions can call processors that only follow
        the same contract.
        """
        import torch

        arguments = self.call_arguments(encoder, media)
        try:
            output = dict(call(encoder.processor, text=text, return_tensors="pt", **arguments))
        except ValueError:
            if arguments:
                raise
            # The processor of the model's repository does not take text alone.
            output = {"input_ids": torch.tensor(encoder.tokenize(text))}
        output.setdefault("attention_mask", torch.ones_like(output["input_ids"]))
        tokens = {key: output[key].reshape(1, -1) for key in token_keys(output, self.layout)}
        grids = output.get("grid_thws")
        if grids is not None:
            kernel = getattr(getattr(encoder.processor, "image_processor", None), "merge_kernel_size", None)
            rows, columns = kernel if isinstance(kernel, list | tuple) else (2, 2)
            tokens = expand_placeholders(tokens, grids, media_pad_id(encoder), (int(rows), int(columns)))
        return {**output, **tokens}
