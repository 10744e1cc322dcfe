"""Tiny copies of configs of transformers: the same kinds of layers, a few thousand weights.

The names of settings say which are sizes, so a copy of an unknown config may not build; callers handle that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import Any

LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
"""Settings of a config that list the kind of each layer, or a pattern of kinds."""

# Names are matched as a whole, without regard for white space; the first match counts.
_SIZES: tuple[tuple[int, str], ...] = (
    (128, "vocab_size_per_layer_input | (text_|unpadded_|padded_)?vocab_size | n_vocab"),
    (
        8,
        r"""hidden_size_per_layer_input | embedding_size | embed_proj_dim | (mamba_)?dt_rank | time_step_rank
        | altup_num_inputs_dim | \w*lora_(rank|dim) | laurel_rank | rotary_dim | rope_dim
        | v_head_dim | (qk_)?(rope|nope)_head_dim | index_head_dim | (ssm_|mamba_|mamba_d_)?state(_size|_dim)?
        | (mamba_)?chunk_size | (attention_|attn_|sliding_)window_size | sliding_window_size""",
    ),
    (
        16,
        """qk_head_dim | (swa_|global_|attention_|linear_(key_|value_)?)?head_dim | kv_channels
        | head_size | mamba_(d_)?head(_dim|dim)?""",
    ),
    (128, "mamba_d_ssm | ssm_intermediate_size"),
    (8, "mamba_n_heads | mamba_num_heads | n_mamba_heads"),  # as heads of 16 with expand=2
    (4, "linear_num_((key|value)_)?heads"),
    (2, "mamba_n_groups | n_groups | mamba_ngroups"),
    (
        2,
        """moe_(router_)?top_?k | (num_)?experts_per_(tok|token) | top_k(_experts)? | moe_k
        | num_selected_experts""",
    ),
    (4, "(num|n|moe_num|num_local|n_routed|moe_n_routed)(_routed)?_experts | zero_expert_num"),
    (1, "(n|num|moe_num)_shared_experts | num_zero_experts"),
    (1, "n_group | topk_groups? | num_expert_groups? | first_k_dense_replace | moe_layer_start_index"),
    # What selects keys selects fewer than a document has.
    (4, r"index_topk | keep_window_size | index_block_size | \w*topk_blocks? | index_n_heads | moba_\w*"),
    (
        64,
        r"""(\w+_)?(intermediate|ffn_hidden|ffn|inner)_size(_mlp)? | \w*intermediate_dim
        | (encoder_|decoder_)?ffn_dim | n_inner | dim_feedforward | d_ff | block_ff_dim | block_multiple_of
        | lru_width""",
    ),
    (
        64,
        """(text_|word_|out_|decoder_|encoder_|lm_)?(hidden_size|hidden_dim|n_embd|d_model|embed_dim|dim)
        | d_embed | embedding_dim | attention_hidden_size | conv_dim | block_dim | width | output_dim
        | output_hidden_size | projection_dim | mm_hidden_size | projector_hidden_size | qk_dim | v_dim""",
    ),
    (
        2,
        """(num|n)_(hidden_)?layers? | n_layer | depth | num_blocks | layers | (en|de)coder_layers
        | (mtp|text)_num_hidden_layers | num_(en|de)coder_layers""",
    ),
    (
        2,
        """(num_)?(key_value|kv)_heads | n_head_kv | multi_query_group_num
        | num_global_key_value_heads | swa_num_key_value_heads""",
    ),
    (4, "(swa_)?(num_|n_)?(attention_|attn_)?heads? | (en|de)coder_attention_heads"),
    (256, "(max|n)_(position(_embeddings)?|ctx|positions) | max_sequence_length | seq_length | max_seq_len"),
    (2, "attn_layer_period | expert_layer_period | full_attention_interval"),
    (1, "attn_layer_offset | expert_layer_offset"),
    (0, "num_kv_shared_layers | num_dense_layers"),
)
_PATTERNS = tuple((re.compile(pattern, re.VERBOSE), size) for size, pattern in _SIZES)
_BY_TYPE: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 16},  # hidden_size * expand / head_dim
    "xlstm": {"chunk_size": 16},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "num_hidden_layers": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
}
"""Sizes that follow from others, in types whose config does not compute them."""
_COUNTS = re.compile(
    r"(num|n)_(hidden_)?layers?|n_layer|depth|num_blocks|(en|de)coder_layers|num_(en|de)coder_layers"
)
_SPECIAL_IDS = re.compile(r"(bos|eos|pad|sep|decoder_start|unk|cls|mask)_token_id")
# Rows to measure have one mask for all layers, which is right if documents are shorter than a window.
_WINDOWS, _LEAST_WINDOW = {"sliding_window", "attention_chunk_size", "attention_window_size"}, 128
_NOT_NONE = {"head_dim": 16, "num_key_value_heads": 2}
# With output_router_logits a model that is not prepared computes no packed batch.
_NOT_SETTINGS = frozenset(
    {
        *("architectures", "transformers_version", "quantization_config", "dtype", "id2label", "label2id"),
        "output_router_logits",
    }
)


def tiny_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a config, as ``to_dict`` gives them, with small sizes and a layer of each kind."""
    layers = next((v for k, v in settings.items() if _COUNTS.fullmatch(k) and isinstance(v, int)), None)
    kinds = {key: settings[key] for key in LAYER_LISTS if layers and isinstance(settings.get(key), list)}
    # Kinds of layers may be a pattern that a model repeats (RecurrentGemma).
    repeated = {key: list(islice(cycle(pattern), layers)) for key, pattern in kinds.items() if pattern}
    settings = {**settings, **repeated}
    lists = {key: value for key, value in settings.items() if isinstance(value, list) and layers}
    per_layer = {key: value for key, value in lists.items() if len(value) == layers and layers > 1}
    # Numbers of layers, which a config derives from the kinds of its layers.
    numbers = [key for key, value in lists.items() if key.endswith(("_idxs", "_idx")) and value]
    per_layer = {key: value for key, value in per_layer.items() if key not in {*numbers, "architectures"}}
    kept = _first_of_each(list(zip(*(map(repr, value) for value in per_layer.values()), strict=True)))
    made: dict[str, Any] = {}
    for key, value in settings.items():
        if key in _NOT_SETTINGS or key in numbers:
            continue
        if key == "per_layer_config" and isinstance(value, Mapping):  # of layers that differ, by their index
            each = {int(index): part for index, part in value.items()}
            made[key] = {new: tiny_settings(each[old]) for new, old in enumerate(kept) if old in each}
            continue
        if value is None and key in _NOT_NONE:
            made[key] = _NOT_NONE[key]
            continue
        if isinstance(value, Mapping) and (key.endswith("_config") or "model_type" in value):
            made[key] = tiny_settings(value)
        elif key in per_layer:
            made[key] = [value[index] for index in kept]
        else:
            made[key] = _small(key, value, len(kept))
    if settings.get("num_key_value_heads") == settings.get("num_attention_heads", 0):
        made["num_key_value_heads"] = made["num_attention_heads"]  # latent attention has no groups
    if "vocab_size" in made and made.get("window_size"):
        made["window_size"] = 8  # of a decoder: that of a vision tower follows from its patches
    for key in _WINDOWS & made.keys():
        if isinstance(made[key], int):
            made[key] = max(made[key], _LEAST_WINDOW)
    if made.get("attn_layer_indices"):
        made["attn_layer_indices"] = [1]
    if made.get("mamba_d_ssm"):
        made["mamba_d_ssm"] = made["mamba_n_heads"] * made["mamba_d_head"]
    if "qk_rope_head_dim" in made and isinstance(made.get("head_dim"), int):
        rope = made.get("rope_parameters")
        share = rope.get("partial_rotary_factor", 1) if isinstance(rope, Mapping) else 1
        made["head_dim"] = int(made["qk_rope_head_dim"] / share)  # a part of a head has positions
    _fit_sections(made)
    return made | _BY_TYPE.get(str(made.get("model_type")), {})


def _fit_sections(made: dict[str, Any]) -> None:
    """Fit the parts of rotary positions in several dimensions (mRoPE) to the width of a head."""
    rope = made.get("rope_parameters")
    if not isinstance(rope, Mapping) or not (parts := rope.get("mrope_section")):
        return
    width = made.get("head_dim") or made["hidden_size"] // made["num_attention_heads"]
    half = int(width * rope.get("partial_rotary_factor", 1)) // 2
    fitted = [part * half // sum(parts) for part in parts]
    made["rope_parameters"] = {**rope, "mrope_section": [fitted[0] + half - sum(fitted), *fitted[1:]]}


def _first_of_each(kinds: Sequence[Any]) -> list[int]:
    """Return the index of the first layer of each kind; of two layers if there is one kind."""
    first: dict[Any, int] = {}
    for index, kind in enumerate(kinds):
        first.setdefault(kind, index)
    indices = sorted(first.values())
    return [0, 0] if len(indices) == 1 else indices


def _small(key: str, value: Any, layers: int) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if _SPECIAL_IDS.fullmatch(key):
        return min(value, 2)
    if layers and _COUNTS.fullmatch(key):
        return layers
    size = next((size for pattern, size in _PATTERNS if pattern.fullmatch(key)), None)
    return value if size is None else min(value, size) if value > 0 else value
