"""Pixels as bytes that become what the processor returns, on the device that they are moved to.

A worker sends plain bytes with a :class:`PixelFormat` for each tensor. The loader joins both to
:class:`BytePixels`, a tensor that has the shape, the dtype and the values of the processor's pixels, whatever
is done with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch


@dataclass(frozen=True, slots=True)
class PixelFormat:
    """How pixels that are bytes become what the processor returns: ``(byte - mean) / std``, by channel.

    Attributes:
        mean: of each channel, in units of bytes.
        std: likewise.
        channels: the axis of the channels; for rows that hold a whole patch each, ``"first"`` if all pixels
            of a channel follow each other there, ``"last"`` if all channels of a pixel do.
        repeats: how often each channel's pixels are in such a row (``"first"``): a patch of an image has as
            many frames as one of a video.
        mask: key of the tensor that is 0 where the processor pads, where pixels are 0; None without padding.
        dtype: of the result; None for float32.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    channels: int | Literal["first", "last"]
    repeats: int = 1
    mask: str | None = None
    dtype: torch.dtype | None = None

    def shape(self, pixels: torch.Tensor) -> torch.Size:
        """Return the shape of what :meth:`expand` returns."""
        return torch.Size([*pixels.shape[:-1], pixels.shape[-1] * self.repeats])

    def expand(self, pixels: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return what the processor returns; computed in float32, on the device of ``pixels``."""
        split, axis, number = pixels, 0, len(self.mean)
        if isinstance(self.channels, int):
            axis = self.channels - pixels.dim()
        else:
            sides, axis = ((number, -1), -2) if self.channels == "first" else ((-1, number), -1)
            split = pixels.reshape(*pixels.shape[:-1], *sides)
        shape = list(split.shape)
        if self.repeats > 1:
            split, axis = split.unsqueeze(-2), axis - 1
            shape.insert(-1, self.repeats)
        values = torch.empty(shape, dtype=self.dtype or torch.float32, device=pixels.device)
        # Numbers by channel instead of tensors of them: a copy of these to a GPU would wait for it.
        pairs = list(zip(self.mean, self.std, strict=True))
        channels_at_once = number if len(set(pairs)) == 1 else 1
        for channel, (mean, std) in enumerate(pairs[::channels_at_once]):
            part = split.narrow(axis, channel, channels_at_once)
            scaled = part.to(torch.float32).sub_(mean).div_(std)
            values.narrow(axis, channel, channels_at_once).copy_(scaled)  # repeats them
        if isinstance(self.channels, int):
            return values if mask is None else values.masked_fill_(mask.unsqueeze(axis) == 0, 0)
        values = values.flatten(pixels.dim() - 1)
        return values if mask is None else values.masked_fill_(mask.unsqueeze(-1) == 0, 0)


class BytePixels(torch.Tensor):
    """Bytes that act as the pixels of a processor: any operation computes these first, where the bytes are.

    Moving it to a device moves the bytes, and returns a plain tensor with the pixels there.
    """

    data_bytes: torch.Tensor
    format: PixelFormat
    mask: torch.Tensor | None

    def __new__(
        cls, data_bytes: torch.Tensor, pixel_format: PixelFormat, mask: torch.Tensor | None = None
    ) -> BytePixels:
        """Return bytes in a format; ``mask`` is the tensor that it names."""
        # torch documents this constructor of tensors without storage, and has no public name for it.
        made: BytePixels = torch.Tensor._make_wrapper_subclass(
            cls,
            pixel_format.shape(data_bytes),
            dtype=pixel_format.dtype or torch.float32,
            device=data_bytes.device,
        )
        made.data_bytes, made.format, made.mask = data_bytes, pixel_format, mask
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def to(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Return the pixels as a plain tensor, moved and converted as by ``torch.Tensor.to``."""
        moved = super().to(*arguments, **options)
        return moved.expand_on(None) if isinstance(moved, BytePixels) else moved

    def expand_on(self, device: torch.device | None, *, non_blocking: bool = False) -> torch.Tensor:
        """Return the pixels as a plain tensor on a device; None for that of the bytes."""
        if device is None:
            return self.format.expand(self.data_bytes, self.mask)
        mask = None if self.mask is None else self.mask.to(device, non_blocking=non_blocking)
        return self.format.expand(self.data_bytes.to(device, non_blocking=non_blocking), mask)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the pixels as an array."""
        return self.expand_on(None).numpy(force=force)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"BytePixels({tuple(self.shape)}, {self.dtype}, device='{self.device}')"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return BytePixels, (self.data_bytes, self.format, self.mask)

    # torch documents this for subclasses with __torch_dispatch__, and has no public name for it.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, arguments: Any = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation on the pixels."""
        options = dict(options or {})
        # What torch calls for to(), cuda(), half(), …; it has no public name for it.
        if function is torch.ops.aten._to_copy.default:
            device, non_blocking = options.get("device"), bool(options.get("non_blocking"))
            moved = arguments[0].expand_on(device, non_blocking=non_blocking)
            others = {name: options.get(name) for name in ("dtype", "memory_format")}
            return moved.to(**{name: value for name, value in others.items() if value is not None})
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            pixels = arguments[0]
            return cls(function(pixels.data_bytes), pixels.format, pixels.mask)
        return function(*_with_pixels(arguments), **_with_pixels(options))


def _with_pixels(value: Any) -> Any:
    """Return arguments of an operation with pixels in place of bytes."""
    if isinstance(value, BytePixels):
        return value.expand_on(None)
    if isinstance(value, tuple | list):
        return type(value)(map(_with_pixels, value))
    if isinstance(value, dict):
        return {name: _with_pixels(item) for name, item in value.items()}
    return value


def join_formats(batch: Mapping[str, Any], formats: Mapping[str, PixelFormat]) -> dict[str, BytePixels]:
    """Return the tensors of a batch that hold bytes, as pixels."""
    masks = {key: None if pixels.mask is None else batch[pixels.mask] for key, pixels in formats.items()}
    return {key: BytePixels(batch[key], pixels, masks[key]) for key, pixels in formats.items()}
