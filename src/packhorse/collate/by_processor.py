"""The collate function for raw examples of each processor class."""

from collections.abc import Callable
from typing import Any

from packhorse.collate.raw_default import default_collate_fn, llava_onevision_collate_fn, qwen2_5_collate_fn
from packhorse.collate.raw_kimi import kimi_k25_vl_collate_fn, kimi_vl_collate_fn
from packhorse.collate.raw_nemotron import nemotron_omni_collate_fn, nemotron_parse_collate_fn
from packhorse.collate.raw_phi4 import phi4_mm_collate_fn
from packhorse.collate.raw_qwen_omni import qwen3_omni_collate_fn

COLLATE_FNS: dict[str, Callable[..., dict[str, Any]]] = {
    "Gemma3Processor": default_collate_fn,
    "Gemma4Processor": default_collate_fn,
    "InternVLProcessor": default_collate_fn,
    "KimiK25Processor": kimi_k25_vl_collate_fn,
    "KimiVLProcessor": kimi_vl_collate_fn,
    "Kimi_K25Processor": kimi_k25_vl_collate_fn,
    "LlavaOneVisionProcessor": llava_onevision_collate_fn,
    "LlavaOnevisionProcessor": llava_onevision_collate_fn,
    "NemotronH_Nano_Omni_Reasoning_V3Processor": nemotron_omni_collate_fn,
    "NemotronH_Omni_Reasoning_V3Processor": nemotron_omni_collate_fn,
    "NemotronParseProcessor": nemotron_parse_collate_fn,
    "Phi4MMProcessor": phi4_mm_collate_fn,
    "Phi4MultimodalProcessor": phi4_mm_collate_fn,
    "Qwen2VLProcessor": qwen2_5_collate_fn,
    "Qwen2_5_VLProcessor": qwen2_5_collate_fn,
    "Qwen3OmniMoeProcessor": qwen3_omni_collate_fn,
    "Qwen3VLProcessor": default_collate_fn,
    "SmolVLMProcessor": default_collate_fn,
    "default": default_collate_fn,
}
"""The collate function for raw examples by the class name of the processor; ``"default"`` for any other.

Only some models of Gemma 4 need the thinking prefix, so :func:`gemma4_prefix_collate_fn` is not in it."""
