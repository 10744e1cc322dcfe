"""What keeps documents of a packed batch apart, for each attention backend.

Document numbers [B, S] go in (1, 2, … along each row, 0 for tokens that nobody may see: a fake image's, and
padding). Dense masks are filled document by document; no S x S comparison is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask

from packhorse.errors import ConfigError


class Span(NamedTuple):
    """Where a document lies: its row, its first token and the one after its last."""

    row: int
    start: int
    stop: int


def spans(documents: torch.Tensor) -> Iterator[Span]:
    """The documents of a batch. Hidden tokens may lie inside one.

    Raises:
        ConfigError: numbers of a row do not rise.
    """
    for row, numbers in enumerate(documents):
        seen = torch.nonzero(numbers).flatten()
        visible = numbers[seen]
        steps = visible.diff()
        if bool((steps < 0).any()):
            raise ConfigError(f"document numbers of row {row} go down: expected 1, 2, … from left to right")
        starts = torch.nonzero(steps).flatten() + 1
        edges = [0, *starts.tolist(), len(seen)]
        for first, after in pairwise(edges):
            if after > first:
                yield Span(row, int(seen[first]), int(seen[after - 1]) + 1)


def block_causal_mask(
    documents: torch.Tensor, bidirectional: torch.Tensor | None = None, window: int | None = None
) -> torch.Tensor:
    """Which token sees which: bool [B, 1, S, S], True where the column is seen by the row.

    Args:
        documents: [B, S].
        bidirectional: bool [B, S]: tokens that also see later tokens of their own run of such tokens.
        window: a token sees so many of its document, itself included; None for all.
    """
    rows, length = documents.shape
    # numpy's zeros are memory that nobody has touched yet: what lies between documents is never written.
    mask = torch.from_numpy(np.zeros((rows, 1, length, length), np.bool_))
    found = list(spans(documents))
    longest = max((span.stop - span.start for span in found), default=0)
    triangle = torch.ones(longest, longest, dtype=torch.bool).tril_()
    for row, start, stop in found:
        size = stop - start
        block = mask[row, 0, start:stop, start:stop]
        block.copy_(triangle[:size, :size])
        if bidirectional is not None:
            for first, after in _runs(bidirectional[row, start:stop]):
                block[first:after, first:after] = True
        if window is not None and size > window:
            block.copy_(block.triu(1 - window))
        hidden = torch.nonzero(documents[row, start:stop] == 0).flatten()
        if len(hidden):
            block[hidden] = False
            block[:, hidden] = False
    return mask


def _runs(marked: torch.Tensor) -> Iterator[tuple[int, int]]:
    """First and after-last place of each run of True."""
    edges = torch.nn.functional.pad(marked.to(torch.int8), (1, 1)).diff()
    starts, ends = torch.nonzero(edges == 1).flatten(), torch.nonzero(edges == -1).flatten()
    yield from zip(starts.tolist(), ends.tolist(), strict=True)


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same mask as numbers to add to attention scores: 0 where seen, the lowest number elsewhere."""
    return torch.full(mask.shape, torch.finfo(dtype).min, dtype=dtype).masked_fill_(mask, 0)


def positions_tell(documents: torch.Tensor, positions: torch.Tensor) -> bool:
    """Whether positions [B, S] alone tell documents apart and hide what is hidden.

    transformers takes every place where positions do not rise by one for the beginning of a document.
    """
    derived = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    for numbers, runs in zip(documents, derived, strict=True):
        visible = torch.nonzero(numbers).flatten()
        same_number, same_run = numbers[visible].diff() == 0, runs[visible].diff() == 0
        if not torch.equal(same_number, same_run):
            return False
        hidden = torch.nonzero(numbers == 0).flatten()
        following = torch.searchsorted(visible, hidden)
        before = following < len(visible)
        if bool((runs[hidden[before]] == runs[visible[following[before]]]).any()):
            return False
    return True


class Segments(NamedTuple):
    """A batch as kernels for sequences of different lengths take it.

    Attributes:
        order: [B, S]: where each token comes from, so that hidden ones stand after their document.
        moved: whether any token does move.
        cumulative: int32 [N + 1]: where segments begin in the flattened batch, and its end.
        longest: tokens of the longest.
        lengths: for each row the visible tokens of its documents.
        padded: for each row what its documents take up, hidden tokens and padding included.
    """

    order: torch.Tensor
    moved: bool
    cumulative: torch.Tensor
    longest: int
    lengths: list[list[int]]
    padded: list[list[int]]


def segments(documents: torch.Tensor, alignment: int | Sequence[int] = 1) -> Segments:
    """Make every document one run of tokens: what is hidden inside it goes after it.

    After its document and in a segment of its own, a hidden token sees nobody and is seen by nobody. Its
    position goes with it, and positions, not places, are what attention turns by.

    With ``alignment``, segments begin at multiples of it: the hidden tokens up to the next multiple belong to
    the segment of their document. They come after all its tokens, so these do not see them.

    Args:
        documents: [B, S].
        alignment: of all rows, or one for each row. A row that was packed with a smaller one has documents
            that begin between multiples, so each row is rounded by its own.
    """
    list(spans(documents))  # numbers must rise
    hidden = (documents == 0).to(torch.int64)
    owner = documents.cummax(-1).values.clamp(min=1)
    keys = owner * 2 + hidden
    order = keys.argsort(dim=-1, stable=True)
    sorted_keys = keys.gather(-1, order)
    rows, length = documents.shape
    starts = torch.ones_like(sorted_keys, dtype=torch.bool)
    starts[:, 1:] = sorted_keys.diff() != 0
    of_row, place = torch.nonzero(starts, as_tuple=True)
    # Only where hidden tokens begin is there anything to round; past the last one the next document begins.
    multiple = torch.as_tensor(alignment).expand(rows)[of_row]
    boundaries = of_row * length + place + -place % multiple
    ends = torch.tensor([rows * length])
    cumulative = torch.unique_consecutive(torch.cat([boundaries, ends])).to(torch.int32)
    lengths, padded = [], []
    for row in range(rows):
        total = torch.bincount(owner[row])[1:]
        visible = torch.bincount(documents[row], minlength=len(total) + 1)[1:]
        present = visible > 0
        lengths.append(visible[present].tolist())
        padded.append(total[present].tolist())
    moved = bool((order != torch.arange(length)).any())
    return Segments(order, moved, cumulative, int(cumulative.diff().max()), lengths, padded)


_BLOCK = 128  # flex attention's own


class DocumentMask:
    """Flex attention's question "may q see kv?", answered from document numbers. Can be sent to processes."""

    def __init__(self, documents: torch.Tensor) -> None:
        self.documents = documents
        self.__name__ = "document_mask"  # flex attention prints it

    def __call__(
        self, row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        """Whether tokens of a row see each other."""
        mine = self.documents[row, query]
        return (query >= key) & (mine == self.documents[row, key]) & (mine > 0)


class PackedBlockMask(BlockMask):
    """A BlockMask that takes its document numbers along to a device."""

    def to(self, device: Any) -> PackedBlockMask:
        """The mask on another device; BlockMask's own ``to`` leaves what its ``mask_mod`` holds after."""
        moved = super().to(device)
        moved.__class__ = PackedBlockMask
        own: Any = self.mask_mod
        moved.mask_mod = DocumentMask(own.documents.to(device))
        return moved  # type: ignore[return-value]


def document_block_mask(documents: torch.Tensor) -> PackedBlockMask:
    """Which blocks of tokens see which, by document numbers [B, S] (see :mod:`packhorse.collate.masks`).

    Raises:
        ConfigError: numbers of a row do not rise.
    """
    list(spans(documents))
    rows, length = documents.shape
    blocks = -(-length // _BLOCK)
    padded = torch.nn.functional.pad(documents, (0, blocks * _BLOCK - length)).view(rows, blocks, _BLOCK)
    none = int(documents.max()) + 1
    low = torch.where(padded > 0, padded, none).amin(-1)  # [B, blocks]
    high, whole = padded.amax(-1), (padded > 0).all(-1)
    before = torch.ones(blocks, blocks, dtype=torch.bool).tril(-1)
    diagonal = torch.eye(blocks, dtype=torch.bool)
    # Numbers rise, so an earlier block shares a document exactly if its last is this one's first.
    shares = high[:, None, :] >= low[:, :, None]
    alone = whole & (low == high)
    full = before & shares & alone[:, :, None] & alone[:, None, :]
    partial = (before & shares & ~full) | (diagonal & (high > 0)[:, :, None])
    made = PackedBlockMask.from_kv_blocks(
        *_listed(partial),
        *_listed(full),
        BLOCK_SIZE=_BLOCK,
        mask_mod=DocumentMask(documents),
        seq_lengths=(length, length),
    )
    assert isinstance(made, PackedBlockMask)
    return made


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of each row are set, and their numbers first; both with an axis for heads."""
    numbers = blocks.sum(-1, dtype=torch.int32)[:, None]
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)[:, None]
    return numbers, order.contiguous()
