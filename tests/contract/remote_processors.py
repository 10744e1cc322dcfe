"""Substitutes for processors that come with their model's own code and are not part of transformers.

They follow the documented call contract (arguments, keys, shapes, what a placeholder becomes) and nothing
else: no config, no saving. Pixels are prepared with torch alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature, PreTrainedTokenizerFast


def _pixels(image: Image.Image, width: int, height: int) -> torch.Tensor:
    """The image as RGB, resized, channels first, between -1 and 1."""
    array = np.asarray(image.convert("RGB").resize((width, height)), dtype=np.float32)
    return torch.from_numpy(array).permute(2, 0, 1) / 127.5 - 1


def _flat(images: Any) -> list[Image.Image]:
    if isinstance(images, Image.Image):
        return [images]
    return [image for entry in images for image in _flat(entry)]


class KimiVLImageProcessor:
    """Native resolution, scaled down to ``in_token_limit`` patches and padded to whole 2 by 2 groups."""

    model_input_names = ("pixel_values", "image_grid_hws")

    def __init__(self, patch_size: int = 14, in_token_limit: int = 256) -> None:
        self.patch_size = patch_size
        self.merge_kernel_size = [2, 2]
        self.in_token_limit = in_token_limit

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Patches down and across for an image of ``height`` by ``width`` pixels."""
        patches = (height // self.patch_size) * (width // self.patch_size)
        scale = min(1.0, math.sqrt(self.in_token_limit / max(1, patches)))
        rows, columns = self.merge_kernel_size
        down = math.ceil(max(1, int(height * scale)) / (self.patch_size * rows)) * rows
        across = math.ceil(max(1, int(width * scale)) / (self.patch_size * columns)) * columns
        return down, across

    def __call__(self, images: Any) -> dict[str, torch.Tensor]:
        patches, grids = [], []
        for image in _flat(images):
            down, across = self.grid(image.height, image.width)
            pixels = _pixels(image, across * self.patch_size, down * self.patch_size)
            pixels = pixels.reshape(3, down, self.patch_size, across, self.patch_size)
            patches.append(pixels.permute(1, 3, 0, 2, 4).flatten(0, 1))
            grids.append((down, across))
        return {"pixel_values": torch.cat(patches), "image_grid_hws": torch.tensor(grids)}


class _KimiProcessor:
    """What the processors of Kimi models share."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, chat_template: str) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.image_processor = KimiVLImageProcessor()

    def apply_chat_template(
        self, conversation: Any, chat_template: str | None = None, tokenize: bool = False, **options: Any
    ) -> Any:
        """The text of one conversation, or the texts of several; it never looks at the media."""
        return self.tokenizer.apply_chat_template(
            conversation, chat_template=chat_template or self.chat_template, tokenize=tokenize, **options
        )

    def decode(self, *args: Any, **options: Any) -> str:
        """The tokenizer's own."""
        return str(self.tokenizer.decode(*args, **options))


class KimiVLProcessor(_KimiProcessor):
    """``<|media_pad|>`` stands for one image in the text and for one token of it in the ids."""

    image_token = "<|media_pad|>"

    def __call__(
        self, images: Any = None, text: str | Sequence[str] | None = None, **options: Any
    ) -> BatchFeature:
        if text is None:
            raise ValueError("You have to specify `text`.")
        texts = [text] if isinstance(text, str) else list(text)
        data: dict[str, Any] = {}
        if images is not None and _flat(images):
            data = self.image_processor(images)
            rows, columns = self.image_processor.merge_kernel_size
            counts = (data["image_grid_hws"].prod(dim=1) // (rows * columns)).tolist()
            texts = [self._expand(one, counts) for one in texts]
        return_tensors = options.pop("return_tensors", None)
        data = {**self.tokenizer(texts, **options), **data}
        return BatchFeature(data=data, tensor_type=return_tensors)

    def _expand(self, text: str, counts: list[int]) -> str:
        """Takes from ``counts`` as many numbers as the text has placeholders."""
        first, *rest = text.split(self.image_token)
        return first + "".join(self.image_token * counts.pop(0) + piece for piece in rest)


class KimiK25Processor(_KimiProcessor):
    """One text with its ``medias``, or whole messages; the ids keep one ``<|media_pad|>`` for each image."""

    def __call__(
        self,
        messages: Any = None,
        medias: Sequence[dict[str, Any]] | None = None,
        text: str | None = None,
        return_tensors: str = "pt",
        **options: Any,
    ) -> BatchFeature:
        if messages is None and (medias is None or text is None):
            raise ValueError("Provide either 'messages' or both 'medias' and 'text'")
        if messages is not None or medias is None or not isinstance(text, str):
            raise NotImplementedError("this substitute takes one text and its medias")
        images = self.image_processor([media["image"] for media in medias if media["type"] == "image"])
        grids = images["image_grid_hws"]
        return BatchFeature(
            {
                **self.tokenizer(text, return_tensors=return_tensors),
                "pixel_values": images["pixel_values"],
                "grid_thws": torch.cat([torch.ones_like(grids[:, :1]), grids], 1),
            }
        )


class NemotronParseProcessor:
    """A page image of one fixed size and a decoder text: no chat template, no image tokens in the text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, height: int = 64, width: int = 48) -> None:
        self.tokenizer = tokenizer
        self.image_size = (height, width)

    def __call__(
        self,
        images: Any = None,
        text: str | Sequence[str] | None = None,
        add_special_tokens: bool = True,
        return_tensors: str | None = None,
        **options: Any,
    ) -> BatchFeature:
        if images is None and text is None:
            raise ValueError("You need to specify either an `images` or `text` input to process.")
        data: dict[str, Any] = {}
        if images is not None:
            height, width = self.image_size
            data["pixel_values"] = torch.stack([_pixels(image, width, height) for image in _flat(images)])
        if text is not None:
            texts = [text] if isinstance(text, str) else list(text)
            data.update(self.tokenizer(texts, add_special_tokens=add_special_tokens, **options))
        return BatchFeature(data=data, tensor_type=return_tensors)

    def decode(self, *args: Any, **options: Any) -> str:
        """The tokenizer's own."""
        return str(self.tokenizer.decode(*args, **options))
