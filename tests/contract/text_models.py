"""Tiny models of the families that `contract.tiny_models` lacks: called with text alone, for their loss."""

from __future__ import annotations

from functools import cache
from typing import Any

_VOCABULARY = 512  # more than any tokenizer of the tests has
_TEXT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
_MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
}
_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN3_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "out_hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}


def _qwen3_omni() -> Any:
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig

    audio = {"num_mel_bins": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
    audio |= {"d_model": 32, "output_dim": 32, "downsample_hidden_size": 8}
    config = Qwen3OmniMoeThinkerConfig(
        text_config=_TEXT | _EXPERTS | _MROPE,
        vision_config=_QWEN3_VISION,
        audio_config=audio,
        vision_start_token_id=250,
    )
    return Qwen3OmniMoeThinkerForConditionalGeneration(config)


def _kimi_k25() -> Any:
    from transformers import Kimi_K25ForConditionalGeneration
    from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25Config

    text = _TEXT | {"model_type": "deepseek_v3", "head_dim": 8, "n_routed_experts": 4, "n_group": 2}
    text |= {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "topk_group": 1}
    text |= {"first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "v_head_dim": 8}
    text |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    return Kimi_K25ForConditionalGeneration(Kimi_K25Config(text_config=text, vision_config=_VISION))


def _phi4_mm() -> Any:
    from transformers import Phi4MultimodalConfig, Phi4MultimodalForCausalLM

    audio = {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2}
    audio |= {"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32}
    vision = _VISION | {"num_hidden_layers": 2, "feature_layer": -1}
    return Phi4MultimodalForCausalLM(Phi4MultimodalConfig(**_TEXT, vision_config=vision, audio_config=audio))


_BUILD = {
    "qwen3_omni": _qwen3_omni,
    "kimi_k25": _kimi_k25,
    "phi4_mm": _phi4_mm,
}

TEXT_MODELS: tuple[str, ...] = tuple(_BUILD)


@cache
def text_model(name: str) -> Any:
    """The model ``name`` with random weights in evaluation mode; the same object at every call."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return _BUILD[name]().eval()
