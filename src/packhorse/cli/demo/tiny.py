"""A tiny Qwen2-VL with random weights and transformers' own processor for it; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from packhorse.errors import require

_SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{%- set content = message['content'] %}
{{ '' }}
{%- if content is string %}{{ content }}
{%- else %}
{%- for part in content %}
{%- if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>
{%- else %}{{ part['text'] }}
{%- endif %}
{%- endfor %}
{%- endif %}<|im_end|>
{{ '' }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{{ '' }}
{%- endif -%}
"""


def tiny_processor(texts: Iterable[str] = (), words: int = 0) -> Any:
    """Transformers' own Qwen2-VL processor with a tokenizer of 256 bytes and the special tokens.

    Args:
        texts: the tokenizer also learns pairs of letters from these, so that a token is a few letters long,
        words: and so many of them.
    """
    tokenizers: Any = require("tokenizers", "train")
    transformers: Any = require("transformers", "train")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    byte_ids = {letter: number for number, letter in enumerate(alphabet)}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(byte_ids, merges=[]))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    if words:
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=len(alphabet) + words, initial_alphabet=alphabet, show_progress=False
        )
        model.train_from_iterator(texts, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(_SPECIAL),
    )
    return transformers.Qwen2VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(
            size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16}
        ),
        video_processor=transformers.Qwen2VLVideoProcessor(
            size={"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 8}
        ),
        tokenizer=tokenizer,
        chat_template=_CHAT_TEMPLATE,
    )


def tiny_model(processor: Any, seed: int = 0, layers: int = 2) -> Any:
    """A Qwen2-VL of a few layers of width 64; a step takes a fraction of a second on a CPU."""
    import torch

    transformers: Any = require("transformers", "train")
    words = processor.tokenizer
    ids = {
        f"{name}_token_id": words.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in {
            "image": "image_pad",
            "video": "video_pad",
            "vision_start": "vision_start",
            "vision_end": "vision_end",
        }.items()
    }
    text = {
        "vocab_size": len(words),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
        "bos_token_id": None,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
    }
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
        return transformers.Qwen2VLForConditionalGeneration(config)
