"""Collate functions: a list of examples or of encoded samples goes in, a batch for the model comes out.

Labels of a batch are already shifted: ``labels[:, t]`` is the token after ``input_ids[:, t]``. The same
tensor is in the batch as ``shift_labels``, so that models of transformers do not shift them again
(``docs/collate.md``).
"""

from collections.abc import Callable
from typing import Any

from packhorse.collate_fns.contract import logger
from packhorse.collate_fns.default import default_collate_fn, llava_onevision_collate_fn
from packhorse.collate_fns.gemma4 import (
    _GEMMA4_MODEL_TURN,
    _GEMMA4_THINKING_PREFIX,
    _inject_thinking_prefix_tokens,
    gemma4_inject_thinking_prefix,
    gemma4_prefix_collate_fn,
)
from packhorse.collate_fns.kimi import _expand_image_tokens, kimi_k25_vl_collate_fn, kimi_vl_collate_fn
from packhorse.collate_fns.labels import (
    _IMSTART_TEMPLATE_PROCESSORS,
    _get_assistant_marker,
    _get_stop_token_id,
    build_labels,
    build_labels_from_template,
)
from packhorse.collate_fns.media import (
    _count_media_per_sample,
    _drop_overlong_samples,
    _ensure_rgb,
    _estimate_media_tokens,
    _extract_image_config,
    _extract_media_from_conversations,
)
from packhorse.collate_fns.nemotron_omni import nemotron_omni_collate_fn
from packhorse.collate_fns.nemotron_parse import nemotron_parse_collate_fn
from packhorse.collate_fns.packed import loss_inputs, model_inputs, neat_packed_vlm_collater
from packhorse.collate_fns.pad import pad_collate_fn
from packhorse.collate_fns.phi4 import phi4_mm_collate_fn
from packhorse.collate_fns.qwen2_5 import qwen2_5_collate_fn
from packhorse.collate_fns.qwen3_omni import qwen3_omni_collate_fn
from packhorse.collate_fns.search import (
    _decode_single_token,
    _extract_assistant_text,
    _find_pattern_indices,
)
from packhorse.collate_fns.thd import packed_collater, packed_sequence_thd_vlm_collater
from packhorse.datasets.robust import make_robust_collate

__all__ = [
    "COLLATE_FNS",
    "_GEMMA4_MODEL_TURN",
    "_GEMMA4_THINKING_PREFIX",
    "_IMSTART_TEMPLATE_PROCESSORS",
    "_count_media_per_sample",
    "_decode_single_token",
    "_drop_overlong_samples",
    "_ensure_rgb",
    "_estimate_media_tokens",
    "_expand_image_tokens",
    "_extract_assistant_text",
    "_extract_image_config",
    "_extract_media_from_conversations",
    "_find_pattern_indices",
    "_get_assistant_marker",
    "_get_stop_token_id",
    "_inject_thinking_prefix_tokens",
    "build_labels",
    "build_labels_from_template",
    "default_collate_fn",
    "gemma4_inject_thinking_prefix",
    "gemma4_prefix_collate_fn",
    "kimi_k25_vl_collate_fn",
    "kimi_vl_collate_fn",
    "llava_onevision_collate_fn",
    "logger",
    "loss_inputs",
    "make_robust_collate",
    "model_inputs",
    "neat_packed_vlm_collater",
    "nemotron_omni_collate_fn",
    "nemotron_parse_collate_fn",
    "packed_collater",
    "packed_sequence_thd_vlm_collater",
    "pad_collate_fn",
    "phi4_mm_collate_fn",
    "qwen2_5_collate_fn",
    "qwen3_omni_collate_fn",
]

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
"""By the name of the processor's class; for any other processor, ``"default"``.

Gemma 4's thinking prefix is for some of its models only, so :func:`gemma4_prefix_collate_fn` is asked for."""
