"""Tiny random models that accept what the processors of `contract.processors` return.

Two layers of width 64 on a vocabulary of about 300 entries, in float32 and evaluation mode: built in a
fraction of a second, a forward pass takes milliseconds. The decoder's weights are drawn wider than usual
(0.1), so that a token that sees something it should not see moves its logits by more than rounding does.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from contract.processors import FAMILIES, processor
from contract.torchvision_ops import make_torchvision_importable

_SPREAD = 0.1


def _text(name: str, **more: Any) -> dict[str, Any]:
    """What every decoder has in common, with the ids of the family's tokenizer."""
    words = processor(name).tokenizer
    return {
        "vocab_size": len(words),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "initializer_range": _SPREAD,
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
        **more,
    }


def _qwen_ids(name: str) -> dict[str, int]:
    words = processor(name).tokenizer
    return {
        "image_token_id": words.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": words.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": words.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": words.convert_tokens_to_ids("<|vision_end|>"),
    }


def _qwen_vision(**more: Any) -> dict[str, Any]:
    """The vision towers of Qwen2.5-VL and Qwen3-VL."""
    sizes = {"hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 128}
    return {"depth": 2, "num_heads": 4, **sizes, **more}


def _mrope(*section: int, interleaved: bool = False) -> dict[str, Any]:
    """Rotary positions in three parts (time, height, width) for heads of 16."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(section)}
    return {**rope, "mrope_interleaved": True} if interleaved else rope


def _qwen2_vl() -> Any:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    name = "qwen2_vl"
    config = Qwen2VLConfig(
        text_config=_text(name, rope_parameters=_mrope(2, 3, 3)),
        vision_config={"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2},
        **_qwen_ids(name),
    )
    return Qwen2VLForConditionalGeneration(config)


def _qwen2_5_vl() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    name = "qwen2_5_vl"
    config = Qwen2_5_VLConfig(
        text_config=_text(name, rope_parameters=_mrope(2, 3, 3)),
        vision_config=_qwen_vision(fullatt_block_indexes=[1]),
        **_qwen_ids(name),
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl() -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    name = "qwen3_vl"
    config = Qwen3VLConfig(
        text_config=_text(name, head_dim=16, rope_parameters=_mrope(4, 2, 2, interleaved=True)),
        vision_config=_qwen_vision(num_position_embeddings=64, deepstack_visual_indexes=[0]),
        **_qwen_ids(name),
    )
    return Qwen3VLForConditionalGeneration(config)


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _qwen3_vl_moe() -> Any:
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    name = "qwen3_vl_moe"
    text = _text(name, head_dim=16, rope_parameters=_mrope(4, 2, 2, interleaved=True))
    config = Qwen3VLMoeConfig(
        text_config=text | _EXPERTS,
        vision_config=_qwen_vision(num_position_embeddings=64, deepstack_visual_indexes=[0]),
        **_qwen_ids(name),
    )
    return Qwen3VLMoeForConditionalGeneration(config)


def _qwen3_5_text(name: str) -> dict[str, Any]:
    """One layer of linear attention, whose state runs along the row, and one of full attention."""
    return _text(
        name,
        head_dim=32,  # a quarter of which is rotated
        rope_parameters=_mrope(2, 1, 1, interleaved=True) | {"partial_rotary_factor": 0.25},
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )


def _qwen3_5() -> Any:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    name = "qwen3_5"
    config = Qwen3_5Config(
        text_config=_qwen3_5_text(name),
        vision_config=_qwen_vision(num_position_embeddings=64),
        **_qwen_ids(name),
    )
    return Qwen3_5ForConditionalGeneration(config)


def _qwen3_5_moe() -> Any:
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    name = "qwen3_5_moe"
    config = Qwen3_5MoeConfig(
        text_config=_qwen3_5_text(name) | _EXPERTS | {"shared_expert_intermediate_size": 32},
        vision_config=_qwen_vision(num_position_embeddings=64),
        **_qwen_ids(name),
    )
    return Qwen3_5MoeForConditionalGeneration(config)


def _gemma3() -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    made = processor("gemma3")
    config = Gemma3Config(
        text_config=_text(
            "gemma3",
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=512,
            layer_types=["sliding_attention", "full_attention"],
        ),
        vision_config=_siglip(made.image_processor.size["height"]),
        mm_tokens_per_image=made.image_seq_length,
        image_token_index=made.tokenizer.image_token_id,
        boi_token_index=made.tokenizer.boi_token_id,
        eoi_token_index=made.tokenizer.eoi_token_id,
    )
    model = Gemma3ForConditionalGeneration(config)
    # transformers begins with zeros here: no test would notice lost or exchanged images.
    model.model.multi_modal_projector.mm_input_projection_weight.data.normal_(0, _SPREAD)
    return model


def _gemma4() -> Any:
    """Its images have bidirectional attention in sliding layers, and layers have embeddings of their own."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    made = processor("gemma4")
    words = made.tokenizer
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = _text(
        "gemma4",
        head_dim=8,  # scores are not scaled, so wider heads round worse
        global_head_dim=16,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        use_bidirectional_attention="vision",
        vocab_size_per_layer_input=len(words),
        hidden_size_per_layer_input=8,
    )
    vision = {
        **sizes,
        "intermediate_size": 128,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "patch_size": made.image_processor.patch_size,
        "pooling_kernel_size": made.image_processor.pooling_kernel_size,
    }
    audio = {**sizes, "subsampling_conv_channels": [128, 4], "output_proj_dims": 64}
    tokens = {"boi": "<|image>", "eoi": "<image|>", "image": "<|image|>", "video": "<|video|>"}
    tokens |= {"boa": "<|audio>", "audio": "<|audio|>"}
    ids = {f"{name}_token_id": words.convert_tokens_to_ids(token) for name, token in tokens.items()}
    config = Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        eoa_token_index=words.convert_tokens_to_ids("<audio|>"),
        **ids,
    )
    model = Gemma4ForConditionalGeneration(config)
    model.register_forward_pre_hook(_with_features, with_kwargs=True)
    return model


def _with_features(model: Any, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Encode images before the call where there are videos: transformers 5.22 loses their frame counts."""
    if options.get("pixel_values_videos") is None:
        return arguments, options
    given = {**options, "mm_encoder_outputs": {}}
    video, at, frames = (
        given.pop(key) for key in ("pixel_values_videos", "video_position_ids", "num_frames_per_video")
    )
    given["mm_encoder_outputs"]["video"] = model.model.get_video_features(video, at, frames, return_dict=True)
    image, at = (given.pop(key, None) for key in ("pixel_values", "image_position_ids"))
    if image is not None:
        given["mm_encoder_outputs"]["image"] = model.get_image_features(image, at, return_dict=True)
    return arguments, given


def _siglip(side: int) -> dict[str, Any]:
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": side,
        "patch_size": 14,
        "vision_use_head": False,
    }


def _llava_onevision() -> Any:
    from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

    made = processor("llava_onevision")
    config = LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **_text("llava_onevision")},
        vision_config=_siglip(made.image_processor.size["height"]),
        image_token_index=made.image_token_id,
        video_token_index=made.video_token_id,
        image_grid_pinpoints=made.image_processor.image_grid_pinpoints,
    )
    return LlavaOnevisionForConditionalGeneration(config)


def _internvl() -> Any:
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    made = processor("internvl")
    side = made.image_processor.size["height"]
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": [side, side],
    }
    config = InternVLConfig(
        text_config={"model_type": "qwen2", **_text("internvl")},
        vision_config=vision,
        image_token_id=made.image_token_id,
        image_seq_length=made.image_seq_length,
        tie_word_embeddings=False,
    )
    return InternVLForConditionalGeneration(config)


def _smolvlm() -> Any:
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    made = processor("smolvlm")
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": made.image_processor.max_image_size["longest_edge"],
        "patch_size": 14,
    }
    text = {"model_type": "llama", **_text("smolvlm")}
    config = SmolVLMConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=made.image_token_id,
        pad_token_id=text["pad_token_id"],
    )
    return SmolVLMForConditionalGeneration(config)


def _lfm2_vl() -> Any:
    from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration

    made = processor("lfm2_vl")
    vision = {
        "model_type": "siglip2_vision_model",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_patches": 16,
        "patch_size": made.image_processor.encoder_patch_size,
        "vision_use_head": False,
    }
    text = _text(
        "lfm2_vl",
        model_type="lfm2",
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
    )
    config = Lfm2VlConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=made.image_token_id,
        projector_hidden_size=64,
        downsample_factor=made.image_processor.downsample_factor,
    )
    return Lfm2VlForConditionalGeneration(config)


def _nemotron_omni() -> Any:
    from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import NemotronH_Omni_Reasoning_V3

    made = processor("nemotron_omni")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = _text(
        "nemotron_omni",
        model_type="nemotron_h",
        head_dim=16,
        layers_block_type=["linear_attention", "mlp", "full_attention"],
        mtp_layers_block_type=[],
        chunk_size=8,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=8,
    )
    del text["num_hidden_layers"]
    frames = made.video_temporal_patch_dim
    # Pixels are cast to the dtype in the config, which from_pretrained sets.
    vision = {**sizes, "dtype": "float32", "max_img_size": 512, "video_temporal_patch_size": frames}
    config = NemotronH_Omni_Reasoning_V3.config_class(
        text_config=text,
        vision_config=vision,
        audio_config={
            **sizes,
            "intermediate_size": 128,
            "num_mel_bins": made.feature_extractor.feature_size,
            "subsampling_conv_channels": 8,
            "conv_kernel_size": 3,
            "projection_hidden_size": 64,
            "projection_bias": False,
        },
        vision_hidden_size=64,
        projector_hidden_size=64,
        video_temporal_patch_size=frames,
        image_token_id=made.image_token_id,
        audio_token_id=made.audio_token_id,
    )
    return NemotronH_Omni_Reasoning_V3(config)


_BUILD = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "llava_onevision": _llava_onevision,
    "internvl": _internvl,
    "smolvlm": _smolvlm,
    "lfm2_vl": _lfm2_vl,
    "nemotron_omni": _nemotron_omni,
}

MODELS: tuple[str, ...] = tuple(_BUILD)

WITHOUT_VIDEO = frozenset({"nemotron_omni"})
"""Models that raise for any video in transformers 5.22; a test notices when they no longer do."""


@cache
def tiny_model(name: str, seed: int = 0, *, by_document: bool = True) -> Any:
    """The model of the family ``name`` with weights drawn from ``seed``; the same object at every call.

    Layers that carry state along the row are called document by document, or stay as transformers has them.
    """
    import torch

    from packhorse.families.models import make_honour_shift_labels
    from packhorse.families.packing import inspect_packing
    from packhorse.families.stateful import install

    make_torchvision_importable()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _BUILD[name]().eval()
    # As prepare does: where transformers is too old, and where layers carry state along the sequence.
    make_honour_shift_labels(model)
    if by_document:
        install(model, inspect_packing(model).layers)
    return model


def media_of(name: str) -> frozenset[str]:
    """What the model of the family ``name`` takes, of what its processor does."""
    return FAMILIES[name].modalities - ({"video"} if name in WITHOUT_VIDEO else set())


def with_layers(name: str, layers: int) -> Any:
    """The model of the family ``name`` with another number of layers; another object at every call."""
    import torch

    config = copy.deepcopy(tiny_model(name).config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = [text.layer_types[0]] * layers
    torch.manual_seed(1)
    return type(tiny_model(name))(config)
