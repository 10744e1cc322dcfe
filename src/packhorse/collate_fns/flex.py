"""Flex attention's BlockMask of a packed batch, worked out from blocks of 128 tokens.

Comparing every token with every other, as ``create_block_mask`` does, would cost half a second a batch on a
CPU; comparing blocks costs under a millisecond.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from packhorse.collate_fns.masks import spans

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
        """The mask on another device; BlockMask's own ``to`` leaves what its ``mask_mod`` holds behind."""
        moved = super().to(device)
        moved.__class__ = PackedBlockMask
        own: Any = self.mask_mod
        moved.mask_mod = DocumentMask(own.documents.to(device))
        return moved  # type: ignore[return-value]


def document_block_mask(documents: torch.Tensor) -> PackedBlockMask:
    """Which blocks of tokens see which, by document numbers [B, S] (see :mod:`packhorse.collate_fns.masks`).

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
