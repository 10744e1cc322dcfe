"""Attention masks and segments that separate the documents of a packed batch, for each attention backend.

All are built from document numbers [B, S]: 1, 2, … along each row, 0 for tokens without attention (of a fake
image, and padding). Dense masks are filled document by document; no S x S comparison is made.
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
    """A document: its row, its first token and the one after its last."""

    row: int
    start: int
    stop: int


def spans(documents: torch.Tensor) -> Iterator[Span]:
    """Yield the documents of a batch, hidden tokens inside them included; raise if their numbers decrease."""
    for row, numbers in enumerate(documents):
        seen = torch.nonzero(numbers).flatten()
        visible = numbers[seen]
        steps = visible.diff()
        if bool((steps < 0).any()):
            what = f"the numbers of documents in row {row} decrease: expected 1, 2, … from left to right"
            raise ConfigError(what, setting="documents")
        starts = torch.nonzero(steps).flatten() + 1
        edges = [0, *starts.tolist(), len(seen)]
        for first, after in pairwise(edges):
            if after > first:
                yield Span(row, int(seen[first]), int(seen[after - 1]) + 1)


def block_causal_mask(
    documents: torch.Tensor, bidirectional: torch.Tensor | None = None, window: int | None = None
) -> torch.Tensor:
    """Return the mask bool [B, 1, S, S], True if the row's token attends to the column's.

    Tokens marked in ``bidirectional`` [B, S] also attend to later tokens of their own run of such tokens.
    With ``window`` a token attends to that many tokens of its document, itself included.
    """
    rows, length = documents.shape
    # numpy's zeros are untouched memory: the blocks between documents are never written.
    mask = torch.from_numpy(np.zeros((rows, 1, length, length), np.bool_))
    all_spans = list(spans(documents))
    longest = max((span.stop - span.start for span in all_spans), default=0)
    triangle = torch.ones(longest, longest, dtype=torch.bool).tril_()
    for row, start, stop in all_spans:
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
    """Yield the first and after-last index of each run of True."""
    edges = torch.nn.functional.pad(marked.to(torch.int8), (1, 1)).diff()
    starts, ends = torch.nonzero(edges == 1).flatten(), torch.nonzero(edges == -1).flatten()
    yield from zip(starts.tolist(), ends.tolist(), strict=True)


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a mask to numbers to add to attention scores: 0 if True, the lowest number elsewhere."""
    return torch.full(mask.shape, torch.finfo(dtype).min, dtype=dtype).masked_fill_(mask, 0)


def positions_separate(documents: torch.Tensor, positions: torch.Tensor) -> bool:
    """Return whether positions [B, S] alone separate documents and hidden tokens.

    transformers begins a document at every token whose position is not its predecessor's plus one.
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
    """A batch for attention kernels with variable sequence lengths.

    Attributes:
        order: [B, S]: the index of each token before hidden ones are moved after their document.
        moved: whether any token moves.
        cumulative: int32 [N + 1]: where segments begin in the flattened batch, and its end.
        longest: tokens of the longest segment.
        lengths: for each row the visible tokens of its documents.
        padded: the same with hidden tokens and padding.
    """

    order: torch.Tensor
    moved: bool
    cumulative: torch.Tensor
    longest: int
    lengths: list[list[int]]
    padded: list[list[int]]


def find_segments(documents: torch.Tensor, alignment: int | Sequence[int] = 1) -> Segments:
    """Make every document one run of tokens: hidden tokens inside it move after it.

    After its document and in its own segment, a hidden token attends to nothing and is not attended to. Its
    position moves with it, and rotary embeddings depend on positions, not on indices.

    With ``alignment``, segments begin at multiples of it: the hidden tokens up to the next multiple belong to
    the segment of their document. They follow all its tokens, so causal attention does not reach them.
    ``alignment`` may have one value per row: documents packed with a smaller one begin in between.
    """
    list(spans(documents))  # raises if numbers decrease
    hidden = (documents == 0).to(torch.int64)
    owner = documents.cummax(-1).values.clamp(min=1)
    keys = owner * 2 + hidden
    order = keys.argsort(dim=-1, stable=True)
    sorted_keys = keys.gather(-1, order)
    rows, length = documents.shape
    starts = torch.ones_like(sorted_keys, dtype=torch.bool)
    starts[:, 1:] = sorted_keys.diff() != 0
    row_index, index = torch.nonzero(starts, as_tuple=True)
    # Documents begin at multiples already; only the start of hidden tokens is rounded.
    multiple = torch.as_tensor(alignment).expand(rows)[row_index]
    boundaries = row_index * length + index + -index % multiple
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
    """The ``mask_mod`` of flex attention from document numbers; can be pickled."""

    def __init__(self, documents: torch.Tensor) -> None:
        self.documents = documents
        self.__name__ = "document_mask"  # flex attention prints it

    def __call__(
        self, row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        """Return whether a query attends to a key."""
        document = self.documents[row, query]
        return (query >= key) & (document == self.documents[row, key]) & (document > 0)


class PackedBlockMask(BlockMask):
    """A BlockMask whose ``to`` moves its document numbers too."""

    ndim = 4  # as any mask has it: transformers reads it for layers that carry state along the sequence

    def to(self, device: Any) -> PackedBlockMask:
        """Return the mask on another device; ``BlockMask.to`` does not move what its ``mask_mod`` holds."""
        moved = super().to(device)
        moved.__class__ = PackedBlockMask
        mask_mod: Any = self.mask_mod
        moved.mask_mod = DocumentMask(mask_mod.documents.to(device))
        return moved  # type: ignore[return-value]


def document_block_mask(documents: torch.Tensor) -> PackedBlockMask:
    """Return the block mask of flex attention for document numbers [B, S]."""
    list(spans(documents))  # raises if numbers decrease
    rows, length = documents.shape
    blocks = -(-length // _BLOCK)
    padded = torch.nn.functional.pad(documents, (0, blocks * _BLOCK - length)).view(rows, blocks, _BLOCK)
    none = int(documents.max()) + 1
    low = torch.where(padded > 0, padded, none).amin(-1)  # [B, blocks]
    high, whole = padded.amax(-1), (padded > 0).all(-1)
    before = torch.ones(blocks, blocks, dtype=torch.bool).tril(-1)
    diagonal = torch.eye(blocks, dtype=torch.bool)
    # Numbers increase, so an earlier block shares a document exactly if its last is this one's first.
    shares = high[:, None, :] >= low[:, :, None]
    alone = whole & (low == high)
    full = before & shares & alone[:, :, None] & alone[:, None, :]
    partial = (before & shares & ~full) | (diagonal & (high > 0)[:, :, None])
    made = PackedBlockMask.from_kv_blocks(
        *_to_indices(partial),
        *_to_indices(full),
        BLOCK_SIZE=_BLOCK,
        mask_mod=DocumentMask(documents),
        seq_lengths=(length, length),
    )
    assert isinstance(made, PackedBlockMask)
    return made


def _to_indices(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many blocks of each row are set, and their indices first; both with an axis for heads."""
    numbers = blocks.sum(-1, dtype=torch.int32)[:, None]
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)[:, None]
    return numbers, order.contiguous()
