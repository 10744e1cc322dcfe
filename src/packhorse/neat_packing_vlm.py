"""Packing under its documented names; see :mod:`packhorse.plan` and :mod:`packhorse.collate`."""

from packhorse.collate.packed_dataset import (
    NeatPackConfig,
    PackedDatasetWrapper,
    PackedDatasetWrapperConfig,
    logger,
    neat_pack_dataset_vlm,
    pack_lengths,
)
from packhorse.collate.packer import MEDIA_KEYS, _build_packed_vlm_sample, _shift_sample
from packhorse.families.qwen_vl import mrope_position_ids as _compute_mrope_position_ids
from packhorse.formats.estimate import estimate_image_tokens as _estimate_image_tokens
from packhorse.formats.estimate import estimate_sample_length as _estimate_sample_length
from packhorse.formats.estimate import estimate_video_tokens as _estimate_video_tokens
from packhorse.plan.cost_fit import CostFit, fit_weights
from packhorse.plan.cost_model import (
    CostWeights,
    cost_features,
    pack_costs,
    pack_media_masks,
    patch_pairs_of,
    sample_costs,
    straggler_ratio,
    token_pairs,
)
from packhorse.plan.pack_plan import PackPlan
from packhorse.plan.planning import greedy_knapsack, greedy_knapsack_vt_balanced, plan_key, plan_packs
from packhorse.plan.schedule import StepOrder, main_dataset, order_packs

__all__ = [
    "MEDIA_KEYS",
    "CostFit",
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
    "cost_features",
    "fit_weights",
    "greedy_knapsack",
    "greedy_knapsack_vt_balanced",
    "logger",
    "main_dataset",
    "neat_pack_dataset_vlm",
    "order_packs",
    "pack_costs",
    "pack_lengths",
    "pack_media_masks",
    "patch_pairs_of",
    "plan_key",
    "plan_packs",
    "sample_costs",
    "straggler_ratio",
    "token_pairs",
]
