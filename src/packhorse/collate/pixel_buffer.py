"""Where the pixels of a batch lie: large tensors for which fresh memory costs more than the copying."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from packhorse.types import Sample
from packhorse.utils.pool import in_worker

_LARGE = 1 << 22  # bytes from which on it matters where a tensor lies
_TIMES = 4  # as many pixels for a token as the first sample has, at most
_MOST = 1 << 32  # bytes of a room; what is more is copied when the batch is made
_LEAST = 1 << 28
_KEPT = 4  # rooms: the batch that is built, the one that is trained, and each of images and of videos


def are_pixels(key: str, dtype: torch.dtype) -> bool:
    """Whether a media tensor holds pixels, which may be converted to the model's type."""
    return "pixel_values" in key and dtype.is_floating_point


def buffer_for(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor to be filled, where large ones cost the least.

    A worker's tensor is made in shared memory, where the parent finds it: otherwise it would be copied there
    a second time. Elsewhere numpy asks the system for huge pages, which torch does not: fresh memory then
    comes in a few pieces, and copying 50 MB takes a third of the time.
    """
    numbers = math.prod(shape)
    if numbers * dtype.itemsize < _LARGE:
        return torch.empty(shape, dtype=dtype)
    if in_worker() or get_worker_info() is not None:
        like = torch.empty(0, dtype=dtype)
        # As torch's own collate function does it.
        storage = like._typed_storage()._new_shared(numbers, device=like.device)  # type: ignore[no-untyped-call]
        return like.new(storage).resize_(shape)
    return torch.from_numpy(np.empty(numbers * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class Settled(torch.Tensor):
    """Pixels in a :class:`PixelBuffer`. Nobody else holds them, so a batch may have them as they are."""

    # Whatever is made of them is a plain tensor again.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def already_joined(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor | None:
    """All parts as one tensor, where a :class:`PixelBuffer` put them one after the other; else None.

    Nothing is copied. Tensors that others made are never handed on like this: they may be needed again.
    """
    first, after = parts[0], parts[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        if (
            not isinstance(part, Settled)
            or part.data_ptr() != after
            or part.untyped_storage().data_ptr() != storage
            or part.shape[1:] != first.shape[1:]
            or part.dtype != dtype
        ):
            return None
        after += part.nbytes
    plain = first.as_subclass(torch.Tensor)
    numbers = sum(part.numel() for part in parts)
    whole = plain.as_strided((numbers,), (1,))
    # Over numpy, so that its storage is no larger than itself (and saving it saves no more than it holds).
    exact: torch.Tensor = torch.from_numpy(whole.view(torch.uint8).numpy()).view(dtype)
    return exact.view(sum(map(len, parts)), *first.shape[1:])


class BufferPool:
    """Memory for pixels that is used again as soon as nobody holds what was in it.

    Memory that was written to before costs a third of fresh memory. What is larger than was ever needed costs
    nothing: only what is written to is really taken.
    """

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[np.uint8]] = []

    def __reduce__(self) -> tuple[type[BufferPool], tuple[()]]:
        return BufferPool, ()  # another process begins with nothing

    def take(self, size: int) -> torch.Tensor:
        """So many bytes, or more.

        Raises:
            MemoryError: the system promises no more.
        """
        for number in range(len(self._arrays)):
            if len(self._arrays[number]) >= size and self._holders(number) == _unused():
                return torch.from_numpy(self._arrays[number])
        # So large that other batches fit in too: first samples differ, and with them what is expected.
        array = np.empty(max(_LEAST, 1 << (size - 1).bit_length()), np.uint8)
        self._arrays = [*self._arrays[-(_KEPT - 1) :], array]
        return torch.from_numpy(array)

    def _holders(self, number: int) -> int:
        """References to an array: as many as without any tensor over it, and one more for each."""
        return sys.getrefcount(self._arrays[number])


@cache
def _unused() -> int:
    """What ``_holders`` says of an array that nobody uses; measured, as Pythons count differently."""
    pool = BufferPool()
    pool._arrays = [np.empty(1, np.uint8)]
    return pool._holders(0)


class PixelBuffer:
    """Room for the pixels of one batch: each sample's are put there as soon as they are made.

    Joining them then copies nothing (:func:`already_joined`), and the memory in which the processor made them
    is free, and warm, for its next sample. In a worker they are copied once more, into shared memory, when
    the batch is sent.

    Args:
        tokens: that the batch has at most.
        dtype: that the pixels are converted to; None leaves them.
        pool: where the memory comes from.
    """

    def __init__(self, tokens: int, dtype: torch.dtype | None, pool: BufferPool) -> None:
        self._tokens, self._dtype, self._pool = tokens, dtype, pool
        self._rooms: dict[str, torch.Tensor] = {}
        self._off = False

    def settle(self, sample: Sample) -> Sample:
        """The sample with the same pixels in this room."""
        media = {
            key: self._put(key, value, len(sample))
            if are_pixels(key, value.dtype) and value.is_contiguous() and not self._off
            else value
            for key, value in sample.media.items()
        }
        return replace(sample, media=media)

    def _put(self, key: str, value: torch.Tensor, tokens: int) -> torch.Tensor:
        dtype = self._dtype or value.dtype
        numbers = value.numel()
        left = self._rooms.get(key)
        if left is None or len(left) < numbers or left.dtype != dtype:
            expected = _TIMES * numbers * (self._tokens // max(tokens, 1) + 1)
            size = max(min(expected * dtype.itemsize, _MOST), numbers * dtype.itemsize)
            if size < _LARGE:
                return value
            try:
                left = self._pool.take(size).view(dtype)
            except MemoryError:  # the system promises less than it could give in the end
                self._off = True
                return value
        self._rooms[key] = left[numbers:]
        return left[:numbers].view(value.shape).copy_(value).as_subclass(Settled)
