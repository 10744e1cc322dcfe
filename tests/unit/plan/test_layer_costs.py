"""The operations of each kind of layer, against those that PyTorch counts in a real model.

PyTorch counts matrix products and convolutions, as integers. It sees neither elementwise operations nor
triangular systems, so it counts a part of the scan of a layer with a state, of which transformers computes
some otherwise than kernels do: :func:`scan_of` says what. With that the numbers are equal. PyTorch sees no
masks either: pairs are compared without, and windows with transformers' masks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers.masking_utils import create_chunked_causal_mask, create_sliding_window_causal_mask

from packhorse.neat_packing_vlm import CostWeights, sample_costs, token_pairs
from packhorse.plan.layer_costs import decoder_layer_costs
from raising import raises_config

TEXT = {
    **{"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
DELTA = {
    **{"hidden_size": 512, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 24}
MAMBA_2 = {
    **{"hidden_size": 512, "mamba_n_heads": 16, "mamba_d_state": 8, "mamba_n_groups": 2},
    "mamba_chunk_size": 32,
}
HALF = ["linear_attention", "full_attention"] * 2
CONV = ["conv", "conv", "full_attention", "conv"]

newer_transformers = pytest.mark.skipif(
    not hasattr(transformers, "KimiLinearConfig"), reason="older transformers computes layers otherwise"
)

Make = Callable[[], Any]


def text(name: str, *without: str, **settings: Any) -> Make:
    kept = {key: value for key, value in TEXT.items() if key not in without}
    return lambda: getattr(transformers, name)(**(kept | settings))


CONFIGS: dict[str, Make] = {
    "full attention": text("LlamaConfig"),
    "one window": text("MistralConfig", sliding_window=16),
    "two matrices": text("Starcoder2Config", "head_dim"),
    "two matrices, no size of them": lambda: transformers.GPT2Config(
        vocab_size=128, n_embd=128, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    ),
    "gated delta net": text("Qwen3_5TextConfig", **DELTA),
    "gated delta net and experts": text(
        "Qwen3NextConfig", **DELTA | EXPERTS, shared_expert_intermediate_size=96
    ),
    "gated delta net, no gated attention": text("OlmoHybridConfig", "head_dim", **DELTA),
    "short convolution": text("Lfm2Config", "head_dim", layer_types=CONV, block_multiple_of=32),
    "short convolution and experts": text(
        "Lfm2MoeConfig", "head_dim", layer_types=CONV, num_dense_layers=1, **EXPERTS
    ),
    "layers of one block": text(
        "NemotronHConfig",
        "num_hidden_layers",
        hybrid_override_pattern="M*-ME",
        **{"hidden_size": 512, "mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 8},
        **{"n_groups": 2, "chunk_size": 32, "n_routed_experts": 4, "moe_intermediate_size": 64},
        moe_shared_expert_intermediate_size=96,
    ),
    "windows": text("Gemma3TextConfig", sliding_window=16),
    "windows, shared keys, inputs per layer": text(
        "Gemma4TextConfig",
        layer_types=["sliding_attention", "full_attention"] * 2,
        **{"sliding_window": 16, "global_head_dim": 64, "num_kv_shared_layers": 2},
        **{"use_double_wide_mlp": True, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 128},
    ),
    "dense MLP and experts": text(
        "Gemma4TextConfig",
        layer_types=["sliding_attention", "full_attention"] * 2,
        **{"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
        **{"moe_intermediate_size": 64, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    # transformers computes all experts of Llama 4 for every token: here there is one.
    "chunks": text(
        "Llama4TextConfig",
        **{"intermediate_size_mlp": 384, "attention_chunk_size": 16, "num_local_experts": 1},
        interleave_moe_layer_step=2,
    ),
    "windows and experts": text("GptOssConfig", num_local_experts=4, num_experts_per_tok=2),
    "experts in some layers": text("Qwen3MoeConfig", **EXPERTS, decoder_sparse_step=2, mlp_only_layers=[1]),
    "experts by interval": text(
        "Ernie4_5_MoeConfig",
        "head_dim",
        **{"moe_k": 2, "moe_num_experts": 4, "moe_intermediate_size": 64, "moe_layer_interval": 2},
    ),
    "latent attention, experts after the first layer": text(
        "DeepseekV3Config",
        "head_dim",
        **LATENT | {"q_lora_rank": 48, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1},
        **{"topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_key_value_heads": 4},
    ),
    "delta attention": text(
        "KimiLinearConfig",
        "head_dim",
        **LATENT | {"hidden_size": 512, "linear_head_dim": 16, "linear_num_heads": 4},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        **{"num_key_value_heads": 4, "layer_types": HALF},
    ),
    "Mamba-1": lambda: transformers.MambaConfig(
        vocab_size=128, hidden_size=128, num_hidden_layers=2, state_size=4
    ),
    "Mamba-1 and experts": text(
        "JambaConfig", "head_dim", num_experts=4, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4
    ),
    "Mamba-2 alone": lambda: transformers.Mamba2Config(
        **{"vocab_size": 128, "hidden_size": 512, "num_hidden_layers": 2, "num_heads": 16, "head_dim": 64},
        **{"state_size": 8, "n_groups": 2, "chunk_size": 32},
    ),
    "Mamba-2": text("BambaConfig", "head_dim", attn_layer_indices=[1], **MAMBA_2),
    "Mamba-2 next to attention": text("FalconH1Config", **MAMBA_2, mamba_d_ssm=1024),
    "Mamba-2 and experts": text(
        "GraniteMoeHybridConfig",
        "head_dim",
        layer_types=HALF,
        **MAMBA_2 | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 96},
    ),
    "Mamba-2 without experts": text(
        "GraniteMoeHybridConfig", "head_dim", layer_types=HALF, num_local_experts=0, **MAMBA_2
    ),
    "Mamba-2 and shared attention": text(
        "Zamba2Config",
        "head_dim",
        layers_block_type=["mamba", "mamba", "hybrid", "mamba"],
        **{"hidden_size": 512, "n_mamba_heads": 16, "mamba_headdim": 64, "mamba_d_state": 8},
        **{"mamba_ngroups": 2, "chunk_size": 32, "num_key_value_heads": 4, "adapter_rank": 8},
    ),
    "lightning attention": text("MiniMaxConfig", num_local_experts=4, block_size=32),
    "recurrent units": text("RecurrentGemmaConfig", "head_dim", attention_window_size=64),
}


LENGTHS = (64, 128, 192)  # multiples of all chunks
TRIANGLE = 64  # rows of the triangular system of a delta rule


class Polynomial(NamedTuple):
    """The operations of ``n`` tokens: ``pair * n**2 + token * n + constant``."""

    pair: Fraction
    token: Fraction
    constant: Fraction


def polynomial(counts: list[int]) -> Polynomial:
    """The one that has these values at ``LENGTHS``."""
    step = LENGTHS[0]
    first, second, third = counts
    pair = Fraction(third - 2 * second + first, 2 * step**2)
    token = Fraction(second - first, step) - 3 * step * pair
    return Polynomial(pair, token, first - token * step - pair * step**2)


def counted_operations(model: Any) -> dict[str, Polynomial]:
    """What PyTorch counts: products of tokens with matrices, convolutions, and products in batches."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the counter does not know grouped products
    counts = []
    for length in LENGTHS:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.arange(length)[None] % model.config.vocab_size, use_cache=False)
        found: Counter[str] = Counter()
        for operation, number in counter.get_flop_counts()["Global"].items():
            kinds = {"bmm": "products", "baddbmm": "products", "convolution": "convolutions"}
            found[kinds.get(str(operation).partition(".")[2], "matrices")] += number
        counts.append(found)
    kinds = ("matrices", "convolutions", "products")
    return {kind: polynomial([found[kind] for found in counts]) for kind in kinds}


class Scan(NamedTuple):
    """The scans of layers with a state, for each token.

    Attributes:
        operations: those of kernels, which the weights count.
        counted: those that PyTorch counts in transformers' code.
        pair: what PyTorch counts for each pair of tokens, and kernels do not compute.
    """

    operations: int = 0
    counted: int = 0
    pair: Fraction = Fraction(0)


def scan_of(model: torch.nn.Module) -> Scan:
    """The scans of all layers of a model, from the sizes of its modules."""
    scans = [Scan()]
    for layer in model.modules():
        if isinstance(weight := getattr(layer, "A_log", None), torch.Tensor):
            scan = mamba_1 if weight.dim() == 2 else mamba_2 if hasattr(layer, "chunk_size") else delta_rule
            scans.append(scan(layer))
    return Scan(*map(sum, zip(*scans, strict=True)))


def delta_rule(layer: Any) -> Scan:
    """All but the triangular system is counted."""
    if hasattr(layer, "num_v_heads"):
        heads, key, value = layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    else:  # Kimi
        heads, key, value = layer.num_heads, layer.head_dim, layer.head_dim
    system = heads * TRIANGLE * (key + value)
    products = heads * (2 * TRIANGLE * (2 * key + value) + 6 * key * value)
    return Scan(products + system, products)


def mamba_1(layer: Any) -> Scan:
    """The state changes elementwise; only what is read from it is counted."""
    read = 2 * layer.intermediate_size * layer.ssm_state_size
    return Scan(3 * read, read)


def mamba_2(layer: Any) -> Scan:
    """All is counted; groups are repeated for every head, and every chunk gets the states of all others.

    Kernels compute a group once, and pass the state from one chunk to the next.
    """
    inner, state, chunk = layer.intermediate_size, layer.ssm_state_size, layer.chunk_size
    operations = 2 * chunk * (layer.n_groups * state + inner) + 4 * inner * state
    repeated = 2 * chunk * (layer.num_heads - layer.n_groups) * state
    passed = 2 * inner * state  # times (chunks + 1)**2
    return Scan(operations, operations + repeated + 2 * passed // chunk, Fraction(passed, chunk**2))


def uncounted_matrices(model: Any) -> int:
    """Operations of the small matrices that the weights do not have."""
    # The gate of a shared expert; Zamba 2's matrix after shared attention, and adapters of its MLP.
    names = re.compile(r"shared_expert_gate|\.linear$|_adapter_list\.")
    found = [layer for name, layer in model.named_modules() if names.search(name)]
    return 2 * sum(layer.weight.numel() for layer in found if isinstance(layer, torch.nn.Linear))


@newer_transformers
@pytest.mark.parametrize("name", CONFIGS)
def test_the_operations_are_those_that_pytorch_counts(name: str) -> None:
    config = CONFIGS[name]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    matrices, convolutions, products = counted_operations(model).values()
    weights, scan = CostWeights.of_model(config), scan_of(model)
    # The weights are sums of integers; padding of convolutions is a constant, which they do not have.
    rest = weights.token + uncounted_matrices(model) - matrices.token - convolutions.token
    if scan.operations:
        assert (rest, products.token) == (scan.operations, scan.counted)
    else:  # experts and gates that are multiplied in batches
        assert rest == products.token
    local = sum(weight for _, weight in weights.window_pairs + weights.chunk_pairs)
    # The counter counts all pairs, the weights half of them.
    assert products.pair == 2 * Fraction(weights.token_pair + local) + scan.pair


def test_layers_with_a_state_have_no_pairs() -> None:
    config = transformers.Qwen3_5Config()
    layers = decoder_layer_costs(config.text_config)
    kinds = config.text_config.layer_types
    assert [layer.pair > 0 for layer in layers] == [kind == "full_attention" for kind in kinds]
    full = 2 * config.text_config.num_attention_heads * config.text_config.head_dim
    assert CostWeights.of_model(config).token_pair == kinds.count("full_attention") * full


def test_windows_and_chunks_are_those_of_the_layers() -> None:
    gemma = transformers.Gemma3TextConfig(sliding_window=512)
    weights, kinds = CostWeights.of_model(gemma), gemma.layer_types
    pair = 2 * gemma.num_attention_heads * gemma.head_dim
    assert weights.window_pairs == ((512, kinds.count("sliding_attention") * pair),)
    assert weights.token_pair == kinds.count("full_attention") * pair
    llama = transformers.Llama4TextConfig()
    ((chunk, _),) = CostWeights.of_model(llama).chunk_pairs
    assert chunk == llama.attention_chunk_size
    qwen = transformers.Qwen2Config()  # it names a window and does not use it
    assert not CostWeights.of_model(qwen).window_pairs


@newer_transformers
@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 31])
def test_the_pairs_of_a_window_and_of_a_chunk_are_those_of_transformers_masks(length: int) -> None:
    config = transformers.LlamaConfig(sliding_window=8, attention_chunk_size=8, attn_implementation="sdpa")
    options = {"inputs_embeds": torch.zeros(1, length, 8), "attention_mask": None, "past_key_values": None}
    for make, pairs in (
        (create_sliding_window_causal_mask, token_pairs(length, window=8)),
        (create_chunked_causal_mask, token_pairs(length, chunk=8)),
    ):
        mask = make(config, **options, allow_is_causal_skip=False)
        assert int(mask.sum()) == (pairs + length) / 2


def test_a_window_no_shorter_than_a_document_is_none() -> None:
    lengths = np.arange(9)
    for limit in ({"window": 8}, {"chunk": 8}):
        assert np.array_equal(token_pairs(lengths, **limit), lengths**2.0)
    weights = CostWeights(1, 2, 3, 4, ((8, 10.0),), ((4, 100.0),))
    expected = [16 + 2 * 256 + 10 * (256 - 8 * 9) + 100 * 4 * 16]
    assert sample_costs([16], weights).tolist() == expected


def test_weights_of_pairs_are_checked() -> None:
    with raises_config("window_pairs", ((0, 1.0),)):
        CostWeights(window_pairs=((0, 1.0),))
    with raises_config("chunk_pairs", ((8, -1.0),)):
        CostWeights(chunk_pairs=((8, -1.0),))
