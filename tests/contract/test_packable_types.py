"""Every model type that is declared packable: two documents in a row give what each of them gives alone."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.text_models import TEXT_MODELS, text_model
from contract.tiny_models import MODELS, tiny_model
from contract.torchvision_ops import make_torchvision_importable
from noise_floor import CONTROL, FACTOR, largest_difference, noise_floor
from packhorse.families.models import PACKABLE, check_packable, known_problems, packing_problems
from raising import raises_config

make_torchvision_importable()

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

_SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "intermediate_size", "ffn_dim"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_attention_heads", "n_head"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "bos_token_id", "eos_token_id"), 1),
    "hidden_size_per_layer_input": 8,
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "pad_token_id": 0,
}
_DIFFERENT = {"deepseek_v3": {"head_dim": 8}}  # the part of a head with positions
_MAY_BE_NONE = ("head_dim", "num_key_value_heads")
_OF_FAMILIES = {
    **{name: partial(tiny_model, name) for name in MODELS},
    **{name: partial(text_model, name) for name in TEXT_MODELS},
}
_DECODERS = [
    name
    for name in sorted(PACKABLE & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys())
    if not name.endswith("_text") and not CONFIG_MAPPING[name].sub_configs
]
_FIRST, _SECOND = 9, 13


def small(model_type: str, settings: dict[str, Any]) -> Any:
    """The default config of a model type with small sizes and two layers."""
    default = CONFIG_MAPPING[model_type]().to_dict()
    layers = default.get("num_hidden_layers", default.get("n_layer"))
    made = {key: value for key, value in default.items() if key != "architectures"}
    for key, value in default.items():
        if key in _SIZES and (value is not None or key in _MAY_BE_NONE):
            made[key] = _SIZES[key]
        elif isinstance(value, list) and len(value) == layers:  # one entry for each layer
            made[key] = value[:2]
    return CONFIG_MAPPING[model_type].from_dict(made | _DIFFERENT.get(model_type, {}) | settings)


def decoder(model_type: str, **settings: Any) -> Any:
    """A tiny language model of a type; sdpa where it has it."""
    config = small(model_type, settings)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config._attn_implementation = "sdpa" if kind._supports_sdpa else "eager"
    return kind(config)


def with_random_weights(model: Any) -> Any:
    """Also those that begin as zeros or ones, after which a difference would hide."""
    model = copy.deepcopy(model).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(
                0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))
            )
    return model


def packed_and_alone(model: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of two documents: in a row, alone, in a row in the other order, and with a mask that leaks."""
    ids = torch.randint(5, 90, (1, _FIRST + _SECOND), generator=torch.Generator().manual_seed(1))
    documents = ids.split([_FIRST, _SECOND], 1)
    additive = model.config.get_text_config()._attn_implementation == "eager"

    def row(parts: Any, keep_apart: bool = True) -> torch.Tensor:
        lengths = [part.shape[1] for part in parts]
        numbers = torch.arange(len(parts)).repeat_interleave(torch.tensor(lengths))
        seen = torch.ones(sum(lengths), sum(lengths)).tril().bool()
        seen &= (numbers[:, None] == numbers) | (not keep_apart)
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo().min) if additive else seen
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        with torch.no_grad():
            made = model(
                input_ids=torch.cat(parts, 1),
                attention_mask=mask[None, None],
                position_ids=positions,
                use_cache=False,
            )
        return made.logits

    first, second = documents
    alone = torch.cat([row([one]) for one in documents], 1)
    other = row([second, first]).roll(_FIRST, 1)
    return row([first, second]), alone, other, row([first, second], keep_apart=False)


def check(model: Any, parity: Any) -> None:
    assert packing_problems(model) == packing_problems(model.config) == ()
    packed, alone, other, leak = packed_and_alone(with_random_weights(model))
    parity.check(
        f"logits of {model.config.model_type}",
        largest_difference(packed, alone),
        noise_floor(alone, other),
        largest_difference(leak, alone),
    )


@pytest.mark.parametrize("name", _DECODERS)
def test_a_declared_decoder_gives_packed_documents_what_it_gives_them_alone(name: str, parity: Any) -> None:
    torch.manual_seed(0)
    check(decoder(name), parity)


@pytest.mark.parametrize("name", _OF_FAMILIES)
def test_the_text_of_a_declared_family_gives_packed_what_it_gives_alone(name: str, parity: Any) -> None:
    check(_OF_FAMILIES[name](), parity)


def test_no_declared_type_is_without_a_test() -> None:
    configs = [build().config for build in _OF_FAMILIES.values()]
    tested = {part.model_type for config in configs for part in (config, config.get_text_config())}
    assert {name for name in PACKABLE if name in CONFIG_MAPPING} <= tested | set(_DECODERS)


def test_the_documentation_lists_every_declared_type() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "batch.md"
    assert {f"`{name}`" for name in PACKABLE} <= set(re.findall("`[a-z0-9_]+`", page.read_text()))


def test_a_type_that_selects_keys_over_the_row_differs_and_is_rejected_as_unproven() -> None:
    torch.manual_seed(0)
    model = decoder("doge", keep_window_size=8)
    packed, alone, _, _ = packed_and_alone(with_random_weights(model))
    assert largest_difference(packed, alone) > CONTROL * FACTOR * noise_floor(alone)
    for given in (model, model.config):
        with raises_config("model") as caught:
            check_packable(given)
        for part in ("model type 'doge'", "packhorse parity --model", 'model="unchecked"', 'mode="pad"'):
            assert part in str(caught.value)
    assert known_problems(model) == (), "so packhorse parity measures it"


@pytest.mark.parametrize(
    "name", ["idefics", "molmo2", "blt", "reformer", "kosmos-2", "git", "diffusion_gemma", "falcon"]
)
def test_untested_types_are_rejected_by_their_config(name: str) -> None:
    assert packing_problems(CONFIG_MAPPING[name]())


def test_a_declared_model_with_a_decoder_of_another_type_is_rejected() -> None:
    config = CONFIG_MAPPING["llava_onevision"](text_config=small("falcon", {}))
    (why,) = packing_problems(config)
    assert "model type 'falcon'" in why
