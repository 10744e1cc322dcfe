"""Packing configurations: the arguments of packing as plain data, and ``build()``, which makes the packs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from packhorse.errors import ConfigError
from packhorse.neat_packing_vlm.dataset import Bins, PackedDatasetWrapper
from packhorse.neat_packing_vlm.make import neat_pack_dataset_vlm
from packhorse.positions import RopeIndex

PackingFormat = Literal["neat", "thd"]


@dataclass(slots=True)
class PackedDatasetWrapperConfig:
    """Settings of :class:`PackedDatasetWrapper`; each field is its argument of the same name."""

    pack_size: int = 2048
    sequence_alignment: int = 1
    max_retries: int = 10

    def build(
        self,
        inner_dataset: Any,
        bins: Bins,
        padding_idx: int = 0,
        get_rope_index: RopeIndex | None = None,
    ) -> PackedDatasetWrapper:
        """Wrap a dataset of encoded samples; nothing is encoded yet."""
        return PackedDatasetWrapper(
            inner_dataset,
            bins,
            self.pack_size,
            padding_idx,
            get_rope_index,
            self.max_retries,
            sequence_alignment=self.sequence_alignment,
        )


@dataclass(slots=True)
class NeatPackConfig:
    """Settings of :func:`neat_pack_dataset_vlm` and of the collate function for its packs.

    Args:
        pack_size: see :func:`neat_pack_dataset_vlm`, like the next four.
        drop_long_samples: see there.
        max_packs: see there.
        packing_ratio: see there.
        balance_media_tokens: see there.
        collate_max_length: pad every batch to this many tokens; None pads to its longest pack.
        attn_implementation: what the model's decoder runs with; None is ``"sdpa"``.
        packing_format: ``"neat"`` for models of transformers, ``"thd"`` for Transformer Engine.

    The last three are for :func:`packhorse.collate_fns.packed_collater`.
    """

    pack_size: int = 2048
    drop_long_samples: bool = False
    max_packs: int | None = None
    packing_ratio: float = 1.0
    balance_media_tokens: bool = True
    collate_max_length: int | None = None
    attn_implementation: str | None = None
    packing_format: PackingFormat = "neat"

    def __post_init__(self) -> None:
        if self.packing_format not in get_args(PackingFormat):
            raise ConfigError(f"packing_format={self.packing_format!r}: expected 'neat' or 'thd'")

    def build(
        self,
        dataset: Any,
        padding_idx: int = 0,
        get_rope_index: RopeIndex | None = None,
        ds_raw: Any = None,
        processor: Any = None,
        *,
        sequence_alignment: int = 1,
    ) -> PackedDatasetWrapper:
        """Plan packs for a dataset of encoded samples; nothing is encoded yet."""
        return neat_pack_dataset_vlm(
            dataset,
            self.pack_size,
            padding_idx,
            self.drop_long_samples,
            self.max_packs,
            get_rope_index,
            ds_raw,
            self.packing_ratio,
            processor,
            self.balance_media_tokens,
            sequence_alignment=sequence_alignment,
        )
