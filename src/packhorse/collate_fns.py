"""Collate functions under their documented names; the code lives in :mod:`packhorse.collate`.

Labels of a batch are already shifted: ``labels[:, t]`` is the token after ``input_ids[:, t]``. The same
tensor is in the batch as ``shift_labels``, so that models of transformers do not shift them again
(``docs/reference/batch.md``).
"""

from packhorse.collate.finish import logger
from packhorse.collate.packed import loss_inputs, model_inputs, neat_packed_vlm_collater
from packhorse.collate.padded import pad_collate_fn
from packhorse.collate.raw_default import default_collate_fn, llava_onevision_collate_fn, qwen2_5_collate_fn
from packhorse.collate.raw_families import (
    _GEMMA4_MODEL_TURN,
    _GEMMA4_THINKING_PREFIX,
    COLLATE_FNS,
    _expand_image_tokens,
    _inject_thinking_prefix_tokens,
    gemma4_inject_thinking_prefix,
    gemma4_prefix_collate_fn,
    kimi_k25_vl_collate_fn,
    kimi_vl_collate_fn,
    nemotron_omni_collate_fn,
    nemotron_parse_collate_fn,
    phi4_mm_collate_fn,
)
from packhorse.collate.raw_labels import (
    _IMSTART_TEMPLATE_PROCESSORS,
    _decode_single_token,
    _extract_assistant_text,
    _find_pattern_indices,
    _get_assistant_marker,
    _get_stop_token_id,
    build_labels,
    build_labels_from_template,
)
from packhorse.collate.raw_media import (
    _count_media_per_sample,
    _drop_overlong_samples,
    _ensure_rgb,
    _estimate_media_tokens,
    _extract_media_from_conversations,
)
from packhorse.collate.raw_qwen_omni import qwen3_omni_collate_fn
from packhorse.collate.thd import packed_collater, packed_sequence_thd_vlm_collater
from packhorse.encode.robust import make_robust_collate
from packhorse.formats.estimate import image_config as _extract_image_config

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
