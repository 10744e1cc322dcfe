"""Where the pixels of a batch lie: large tensors for which fresh memory costs more than the copying."""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

_LARGE = 1 << 22  # bytes from which on it matters where a tensor lies
_TIMES = 4  # as many pixels for a token as the first sample has, at most
_MOST = 1 << 32  # bytes of a room; what is more is copied when the batch is made


def are_pixels(key: str, dtype: torch.dtype) -> bool:
    """Whether a media tensor holds pixels, which may be converted to the model's type."""
    return "pixel_values" in key and dtype.is_floating_point


def room_for(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor to be filled, where large ones cost the least.

    A worker's tensor is made in shared memory, where the parent finds it: otherwise it would be copied there
    a second time. Elsewhere numpy asks the system for huge pages, which torch does not: fresh memory then
    comes in a few pieces, and copying 50 MB takes a third of the time.
    """
    numbers = math.prod(shape)
    if numbers * dtype.itemsize < _LARGE:
        return torch.empty(shape, dtype=dtype)
    if get_worker_info() is not None:
        like = torch.empty(0, dtype=dtype)
        # As torch's own collate function does it.
        storage = like._typed_storage()._new_shared(numbers, device=like.device)  # type: ignore[no-untyped-call]
        return like.new(storage).resize_(shape)
    return torch.from_numpy(np.empty(numbers * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class Settled(torch.Tensor):
    """Pixels in a :class:`PixelRoom`. Nobody else holds them, so a batch may have them as they are."""

    # Whatever is made of them is a plain tensor again.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def already_joined(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor | None:
    """All parts as one tensor, where a :class:`PixelRoom` put them one behind the other; else None.

    Nothing is copied. Tensors that others made are never handed on like this: they may be needed again.
    """
    first, behind = parts[0], parts[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        if (
            not isinstance(part, Settled)
            or part.data_ptr() != behind
            or part.untyped_storage().data_ptr() != storage
            or part.shape[1:] != first.shape[1:]
            or part.dtype != dtype
        ):
            return None
        behind += part.nbytes
    plain = first.as_subclass(torch.Tensor)
    numbers = sum(part.numel() for part in parts)
    whole = plain.as_strided((numbers,), (1,))
    # Over numpy, so that its storage is no larger than itself (and saving it saves no more than it holds).
    exact: torch.Tensor = torch.from_numpy(whole.view(torch.uint8).numpy()).view(dtype)
    return exact.view(sum(map(len, parts)), *first.shape[1:])


class PixelRoom:
    """Room for the pixels of one batch: each sample's are put there as soon as they are made.

    Joining them then copies nothing (:func:`already_joined`), and the memory in which the processor made them
    is free, and warm, for its next sample. Only what is written to is really taken of the room. Does nothing
    in a worker, where a batch goes into shared memory of exactly its size.

    Args:
        tokens: that the batch has at most.
        dtype: that the pixels are converted to; None leaves them.
    """

    def __init__(self, tokens: int, dtype: torch.dtype | None) -> None:
        self._tokens, self._dtype = tokens, dtype
        self._rooms: dict[str, torch.Tensor] = {}
        self._off = get_worker_info() is not None

    def settle(self, sample: MutableMapping[str, Any]) -> None:
        """Replace the pixels of a sample by the same ones in this room."""
        if self._off:
            return
        for key, value in sample.items():
            if isinstance(value, torch.Tensor) and are_pixels(key, value.dtype) and value.is_contiguous():
                sample[key] = self._put(key, value, len(sample["input_ids"].reshape(-1)))

    def _put(self, key: str, value: torch.Tensor, tokens: int) -> torch.Tensor:
        dtype = self._dtype or value.dtype
        numbers = value.numel()
        left = self._rooms.get(key)
        if left is None or len(left) < numbers or left.dtype != dtype:
            expected = _TIMES * numbers * (self._tokens // max(tokens, 1) + 1)
            size = min(expected * dtype.itemsize, max(_MOST, numbers * dtype.itemsize))
            if size < _LARGE:
                return value
            try:
                left = torch.from_numpy(np.empty(size - size % dtype.itemsize, np.uint8)).view(dtype)
            except MemoryError:  # the system promises less than it could give in the end
                self._off = True
                return value
        self._rooms[key] = left[numbers:]
        return left[:numbers].view(value.shape).copy_(value).as_subclass(Settled)
