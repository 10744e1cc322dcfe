"""Packing: planning which samples share a row, balancing the rows over ranks, and building them."""

from packhorse.neat_packing_vlm.balance import (
    CostWeights,
    pack_costs,
    pack_kinds,
    patch_pairs_of,
    sample_costs,
    straggler_ratio,
)
from packhorse.neat_packing_vlm.configs import NeatPackConfig, PackedDatasetWrapperConfig
from packhorse.neat_packing_vlm.dataset import PackedDatasetWrapper, logger
from packhorse.neat_packing_vlm.knapsack import greedy_knapsack, greedy_knapsack_vt_balanced
from packhorse.neat_packing_vlm.make import neat_pack_dataset_vlm, pack_lengths
from packhorse.neat_packing_vlm.media import MEDIA_KEYS
from packhorse.neat_packing_vlm.order import StepOrder, main_stratum, order_packs
from packhorse.neat_packing_vlm.pack import (
    _build_packed_vlm_sample,
    _compute_mrope_position_ids,
    _shift_sample,
)
from packhorse.neat_packing_vlm.pack_plan import PackPlan
from packhorse.neat_packing_vlm.plan import plan_packs
from packhorse.neat_packing_vlm.plan_file import plan_key
from packhorse.tokens.estimate import estimate_image_tokens as _estimate_image_tokens
from packhorse.tokens.estimate import estimate_sample_length as _estimate_sample_length
from packhorse.tokens.estimate import estimate_video_tokens as _estimate_video_tokens

__all__ = [
    "MEDIA_KEYS",
    "CostWeights",
    "NeatPackConfig",
    "PackPlan",
    "PackedDatasetWrapper",
    "PackedDatasetWrapperConfig",
    "StepOrder",
    "_build_packed_vlm_sample",
    "_compute_mrope_position_ids",
    "_estimate_image_tokens",
    "_estimate_sample_length",
    "_estimate_video_tokens",
    "_shift_sample",
    "greedy_knapsack",
    "greedy_knapsack_vt_balanced",
    "logger",
    "main_stratum",
    "neat_pack_dataset_vlm",
    "order_packs",
    "pack_costs",
    "pack_kinds",
    "pack_lengths",
    "patch_pairs_of",
    "plan_key",
    "plan_packs",
    "sample_costs",
    "straggler_ratio",
]
