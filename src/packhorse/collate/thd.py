"""Collate packs for Transformer Engine, which separates documents by their lengths ("thd")."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from packhorse.collate.finish import add_counts, finish_labels
from packhorse.collate.packed import Pack, PackedRows, neat_packed_vlm_collater, read_packs
from packhorse.collate.packed_dataset import NeatPackConfig


def packed_sequence_thd_vlm_collater(
    batch: Sequence[Pack],
    padding_idx: int = 0,
    max_length: int | None = None,
    seq_lens_padding_value: int = -1000,
    *,
    pixel_dtype: torch.dtype | None = torch.bfloat16,
    media_layout: bool = False,
) -> dict[str, Any]:
    """Make a batch of packs for attention in Transformer Engine's "thd" format.

    Args:
        batch: packs of :class:`packhorse.neat_packing_vlm.PackedDatasetWrapper`.
        padding_idx: the id that pads short packs.
        max_length: the length of every batch; None pads to the longest pack.
        seq_lens_padding_value: pads the lengths of rows with fewer documents.
        pixel_dtype: what pixels are converted to while they are copied; None leaves them.
        media_layout: see :func:`packhorse.collate_fns.neat_packed_vlm_collater`.

    Returns:
        Tensors per token [B, S] without a mask, the labels (already shifted) also as ``shift_labels``;
        ``position_ids`` [B, S] or [3, B, S]; ``seq_lens`` [B, documents], the visible tokens of each
        document, and ``seq_lens_padded``, the same with alignment, the tokens of a fake image (which follow
        their document) and, for the last one, the padding of the row; ``qkv_format="thd"``; media tensors and
        counts. An empty batch gives ``{}``.

    Raises:
        ConfigError: as :func:`packhorse.collate_fns.neat_packed_vlm_collater` with ``"varlen"``, also if
            ``max_length`` is not a multiple of the alignment of the packs.
    """
    if not batch:
        return {}
    rows = PackedRows(*read_packs(batch), padding_idx, max_length)
    made = rows.tokens()
    made, segments = rows.contiguous(made, rows.bidirectional(made) is not None, "Transformer Engine")
    del made["attention_mask"]
    for key, rows_of_lengths in (("seq_lens", segments.lengths), ("seq_lens_padded", segments.padded)):
        tensors = [torch.tensor(lengths, dtype=torch.long) for lengths in rows_of_lengths]
        made[key] = pad_sequence(tensors, batch_first=True, padding_value=seq_lens_padding_value)
    made["qkv_format"] = "thd"
    made |= rows.media(pixel_dtype, media_layout)
    return add_counts(finish_labels(made), [pack.num_items for pack in rows.packs])


def packed_collater(
    config: NeatPackConfig, padding_idx: int = 0, **options: Any
) -> Callable[[Sequence[Pack]], dict[str, Any]]:
    """Return the collate function for the packs of a configuration.

    Args:
        config: its ``packing_format`` chooses the function, ``collate_max_length`` and
            ``attn_implementation`` are passed to it.
        padding_idx: the id that pads short packs.
        **options: keyword arguments of the function.
    """
    options |= {"padding_idx": padding_idx, "max_length": config.collate_max_length}
    if config.packing_format == "thd":
        return partial(packed_sequence_thd_vlm_collater, **options)
    return partial(neat_packed_vlm_collater, attn_implementation=config.attn_implementation, **options)
