"""Pixels as bytes: the processor resizes and cuts images, and the device normalises them.

Most image and video processors resize pixels as bytes, then rescale and normalise them to floats, and then
cut them into patches or tiles. :func:`find_compact` tries out, on small random media, whether the user's own
processor does just that: its call without rescaling and normalising has to give the same tokens, and bytes
from which :class:`~packhorse.types.PixelFormat` computes the same pixels. These take a quarter of the memory
of float32, an eighth where the processor repeats an image for each frame of a patch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from packhorse.errors import PackhorseError
from packhorse.families.item_options import has_own_call, with_options
from packhorse.media import VideoInfo, placeholder_media
from packhorse.types import Conversation, MediaKind, MediaRef, Message, PixelFormat, TextPart

if TYPE_CHECKING:
    import torch

    from packhorse.chat import Processor
    from packhorse.families.encoder import Encoded, Encoder

_LARGEST_DIFFERENCE = 1e-6  # of a pixel, from that of the processor
_IMAGES = ((61, 97), (150, 113), (260, 420))  # height and width, odd and of different shape
_VIDEOS = ((64, 80), (97, 61))
_FRAMES = 4
_TURNED_OFF = ("do_rescale", "do_normalize")


@dataclass(frozen=True, slots=True)
class Compact:
    """A processor that leaves pixels as bytes.

    Attributes:
        processor: a copy of the user's, whose call does not normalise.
        formats: how the tensors that hold bytes become what the user's processor returns.
        problems: why media of a kind stay as the processor returns them.
    """

    processor: Processor
    formats: Mapping[str, PixelFormat] = field(default_factory=dict)
    problems: Mapping[MediaKind, str] = field(default_factory=dict)


class _CannotCompact(Exception):
    """The processor does something else than to resize, rescale, normalise and cut."""


def find_compact(encoder: Encoder, kinds: Iterable[MediaKind] = ("image", "video")) -> Compact:
    """Return a processor that leaves pixels as bytes, for the kinds of media where that is right."""
    processor, formats = encoder.processor, dict[str, PixelFormat]()
    problems: dict[MediaKind, str] = {}
    for kind in kinds:
        if kind not in encoder.family.kinds:
            continue
        try:
            changed, found = _try_kind(encoder, kind, processor)
            for key in formats.keys() & found.keys():  # frames under the key of images
                if formats[key] != found[key]:
                    raise _CannotCompact(f"'{key}' of images and of videos are normalised differently")
        except (_CannotCompact, PackhorseError) as error:
            problems[kind] = str(error)
        else:
            processor, formats = changed, {**formats, **found}
    shared = {key for kind in problems for key, one in encoder.family.layout.items() if kind in one.kinds}
    if problems and shared & formats.keys():
        return Compact(encoder.processor, {}, problems)
    return Compact(processor, formats, problems)


def _try_kind(
    encoder: Encoder, kind: MediaKind, processor: Processor
) -> tuple[Processor, dict[str, PixelFormat]]:
    """Return ``processor`` without normalising media of a kind, and the formats of its bytes."""
    if not has_own_call(encoder.processor):
        raise _CannotCompact(f"the call of {type(encoder.processor).__name__} is not that of transformers")
    part = getattr(encoder.processor, f"{kind}_processor", None)
    options: dict[str, Any] = {name: False for name in _TURNED_OFF if getattr(part, name, False)}
    if not options:
        raise _CannotCompact(f"{type(part).__name__} has no do_rescale and do_normalize that are on")
    frames = int(getattr(part, "temporal_patch_size", 1)) if kind == "image" else 1
    if frames > 1:
        options["temporal_patch_size"] = 1
    if kind == "image" and hasattr(part, "process_image"):
        options["process_image"] = _ToTensor(part)
    changed = with_options(processor, kind, tuple(options.items()))
    conversation = _random_media(kind)
    expected = encoder.encode(conversation)
    actual = type(encoder)(changed, encoder.family).encode(conversation)
    return changed, _find_formats(encoder, expected, actual, _normalisation(part), frames)


class _ToTensor:
    """An image processor's ``process_image`` that keeps the order of bytes that PIL has.

    Torch resizes bytes in this order in half the time, with the same results. The image processor's own
    method copies an image so that its channels follow each other.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __call__(self, image: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        """Return an image [channels, height, width]."""
        if getattr(image, "mode", "") != "RGB" or options.get("device") is not None:
            converted: torch.Tensor = self.owner.process_image(image, *arguments, **options)
            return converted
        import torch

        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _random_media(kind: MediaKind) -> Conversation:
    """Return a conversation about media of random pixels."""
    draw = np.random.default_rng(0)
    refs = []
    for height, width in _IMAGES if kind == "image" else _VIDEOS:
        size: Any = (height, width)
        if kind == "video":
            size = VideoInfo(_FRAMES, height, width, 2.0, _FRAMES / 2, tuple(range(_FRAMES)))
        placeholder = placeholder_media(kind, size)
        pixels = draw.integers(0, 256, np.asarray(placeholder.source).shape, np.uint8)
        refs.append(MediaRef(kind, pixels, placeholder.options))
    parts = TextPart(".")
    return Conversation((Message("user", (*refs, parts)), Message("assistant", (parts,))))


def _normalisation(part: Any) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each channel, in units of bytes."""
    scale = part.rescale_factor if part.do_rescale else 1.0
    mean, std = (part.image_mean, part.image_std) if getattr(part, "do_normalize", False) else (0.0, 1.0)
    # As transformers rounds them, so that results are equal to the bit.
    return tuple(
        (np.broadcast_to(np.asarray(value, np.float32), 3) * np.float32(1.0 / scale)).tolist()
        for value in (mean, std)
    )


def _find_formats(
    encoder: Encoder, expected: Encoded, actual: Encoded, pair: tuple[list[float], list[float]], frames: int
) -> dict[str, PixelFormat]:
    """Return the format of each tensor that differs; raise if any differs in another way."""
    same_tokens = expected.tokens.keys() == actual.tokens.keys() and all(
        value.equal(actual.tokens[key]) for key, value in expected.tokens.items()
    )
    if not same_tokens or expected.media.keys() != actual.media.keys():
        raise _CannotCompact("without normalising, the processor returns other tokens or tensors")
    formats = {}
    for key, value in expected.media.items():
        if value.equal(actual.media[key]):
            continue
        pixels, mask = as_bytes(actual.media[key]), encoder.family.pixel_masks.get(key)
        if mask is None and encoder.family.layout[key].ragged and any(pair[0]):
            raise _CannotCompact(f"'{key}' is padded with 0 after normalising, and no tensor says where")
        masked = None if mask is None else actual.media[mask]
        if pixels is None:
            raise _CannotCompact(f"'{key}' is not of whole numbers before it is normalised")
        right = (
            one for one in _candidates(pixels, pair, frames) if _is_right(one.expand(pixels, masked), value)
        )
        if (found := next(right, None)) is None:
            raise _CannotCompact(f"'{key}' is not a resized image that is rescaled and normalised")
        formats[key] = replace(found, mask=mask)
    if not formats:
        raise _CannotCompact("the processor returns no pixels that are normalised")
    return formats


def as_bytes(pixels: torch.Tensor) -> torch.Tensor | None:
    """Return pixels as bytes; None if they are not whole numbers from 0 to 255."""
    import torch

    if pixels.dtype == torch.uint8:
        return pixels
    converted = pixels.to(torch.uint8)
    return converted if pixels.is_floating_point() and bool((converted == pixels).all()) else None


def _candidates(
    pixels: torch.Tensor, pair: tuple[list[float], list[float]], frames: int
) -> list[PixelFormat]:
    """Return the formats that differ in where a tensor has its channels."""
    mean, std = map(tuple, pair)
    channels: list[Any] = ["first"] if pixels.shape[-1] % len(mean) == 0 else []
    if frames == 1:
        axes = [axis for axis in range(1, pixels.dim()) if pixels.shape[axis] == len(mean)]
        channels = [*axes, *channels, *(["last"] if channels else [])]
    return [PixelFormat(mean, std, where, frames) for where in channels]


def _is_right(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.shape == expected.shape and bool((actual - expected).abs().max() <= _LARGEST_DIFFERENCE)
