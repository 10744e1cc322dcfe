"""Floating-point operations of the layers of a language model, from its config.

A matrix of ``a`` by ``b`` costs ``2ab`` for each token. Norms, activations, rotary embeddings and other
elementwise operations are not counted. Gemma 3n and Zamba have more matrices than are counted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from packhorse.errors import ConfigError
from packhorse.families.tiny import LAYER_LISTS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Config: TypeAlias = "PretrainedConfig | Mapping[str, Any]"

_PATTERN = "hybrid_override_pattern"  # of configs of NVIDIA: a letter for each layer
# What configs call their layers, by the names that transformers gives these kinds.
_KINDS = {
    **{"mamba": "linear_attention", "recurrent": "linear_attention", "attention": "full_attention"},
    **{"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"},
}
_WITHOUT_PAIRS = ("linear_attention", "conv", "moe", "mlp")
_STATEFUL = ("linear_attention", "hybrid", "hybrid_sliding")
_DELTA_RULE_CHUNK = 64  # of the kernels of flash-linear-attention, and of transformers' own code
_TWO_MATRICES = (
    "apertus",
    "arcee",
    "gpt2",
    "gpt_neox",
    "jais2",
    "nemotron",
    "nemotron_h",
    "phi",
    "starcoder2",
)
_GATED_ATTENTION = ("qwen3_next", "qwen3_5")  # their query matrix computes a gate too; no setting says so


class LayerCost(NamedTuple):
    """Operations of a layer: for each token, and for each pair of tokens that its attention computes.

    ``pair`` is for each of the ``n * n`` pairs of a document of ``n`` tokens; with a ``window`` only for
    those less than ``window`` tokens apart, with a ``chunk`` for those in the same chunk.
    """

    token: int
    pair: int = 0
    window: int | None = None
    chunk: int | None = None


def decoder_layer_costs(config: Config) -> list[LayerCost]:
    """Return the operations of each layer of a decoder: attention of all kinds, state spaces, experts."""
    kinds = _layer_kinds(config)
    each = get_setting(config, "per_layer_config")  # newer transformers: layers may differ from each other
    return [_layer(config if each is None else each[index], kinds, index) for index in range(len(kinds))]


def get_setting(config: Config, name: str) -> Any:
    """Return a value of a config; None if it has none."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def get_size(config: Config, *names: str, default: int | None = None) -> int:
    """Return the first of some sizes that a config has; of one for each layer the largest."""
    for name in names:
        value = get_setting(config, name)
        if isinstance(value, (list, tuple)):  # one entry for each layer
            value = max(value, default=None)
        if value is not None and value != "auto":
            return int(value)
    if default is None:
        problem = f"the model config has none of {', '.join(names)}: pass CostWeights(...) instead"
        raise ConfigError(problem, setting=names[0])
    return default


def _layer_kinds(config: Config) -> list[str]:
    """Return the kind of each layer, by the names of transformers."""
    if (listed := _listed_kinds(config)) is not None:
        number = get_size(config, "num_hidden_layers", default=len(listed))
        return [_KINDS.get(kind, kind) for kind in islice(cycle(listed), number)]
    without_attention = get_setting(config, "state_size") and not get_setting(config, "num_attention_heads")
    kind = "linear_attention" if without_attention else "full_attention"
    return [kind] * get_size(config, "num_hidden_layers")


def _listed_kinds(config: Config) -> Any:
    return next((kinds for name in (*LAYER_LISTS, _PATTERN) if (kinds := get_setting(config, name))), None)


def _layer(config: Config, kinds: list[str], index: int) -> LayerCost:
    """Return the operations of one layer."""
    kind, token, pair = kinds[index], 0, 0
    window = chunk = None
    if kind == "conv":
        token += _short_convolution(config)
    if kind in _STATEFUL:
        token += _linear_attention(config)
    if kind not in _WITHOUT_PAIRS:
        attention, pair = _attention(config, kind, index)
        window, chunk = _window(config, kind), _chunk(config, kind)
        token += attention
    if _has_feed_forward(config, kinds, kind):
        token += _feed_forward(config, kind, index)
    extra = get_size(config, "hidden_size_per_layer_input", default=0)  # Gemma 3n and 4
    return LayerCost(token + 6 * get_size(config, "hidden_size") * extra, pair, window, chunk)


def _window(config: Config, kind: str) -> int | None:
    """Return how many tokens a token attends to, with itself; None if to all before it."""
    sliding = kind in ("sliding_attention", "hybrid_sliding")
    if _listed_kinds(config) is None:  # all layers or none
        sliding = get_setting(config, "use_sliding_window") is not False
    # RecurrentGemma names its kinds itself, and all of its attention has a window.
    sliding = sliding or get_setting(config, "attention_window_size") is not None
    return get_size(config, "sliding_window", "attention_window_size", default=0) or None if sliding else None


def _chunk(config: Config, kind: str) -> int | None:
    chunked = kind == "chunked_attention"
    return get_size(config, "attention_chunk_size", default=0) or None if chunked else None


def _attention(config: Config, kind: str, index: int) -> tuple[int, int]:
    """Return the operations of attention for a token, and for a pair of tokens (half of all pairs count)."""
    hidden, heads = get_size(config, "hidden_size"), get_size(config, "num_attention_heads")
    if get_setting(config, "kv_lora_rank"):
        return _latent_attention(config)
    inputs = get_size(config, "attention_hidden_size", default=hidden)  # Zamba 2
    width = get_size(config, "head_dim", "attention_head_dim", default=inputs // heads)
    key_heads = value_heads = get_size(config, "num_key_value_heads", default=heads)
    if get_setting(config, "attention_k_eq_v") and kind == "full_attention":
        value_heads = 0
    if _shares_keys(config, index):
        key_heads = value_heads = 0
    gated = str(get_setting(config, "model_type")).startswith(_GATED_ATTENTION)
    projections = inputs * width * ((2 if gated else 1) * heads + key_heads + value_heads)
    return 2 * (projections + heads * width * hidden), 2 * heads * width


def _shares_keys(config: Config, index: int) -> bool:
    """Return whether a layer takes keys and values of an earlier one (Gemma 3n and 4)."""
    shared = get_size(config, "num_kv_shared_layers", default=0)
    return shared > 0 and index >= get_size(config, "num_hidden_layers") - shared


def _latent_attention(config: Config) -> tuple[int, int]:
    """Return the operations of multi-head latent attention (DeepSeek, Kimi)."""
    hidden, heads = get_size(config, "hidden_size"), get_size(config, "num_attention_heads")
    plain, rotary = get_size(config, "qk_nope_head_dim"), get_size(config, "qk_rope_head_dim")
    values, rank = get_size(config, "v_head_dim"), get_size(config, "kv_lora_rank")
    query_rank = get_size(config, "q_lora_rank", default=0)
    query = heads * (plain + rotary)
    queries = query_rank * (hidden + query) if query_rank else hidden * query
    keys = hidden * (rank + rotary) + rank * heads * (plain + values)
    return 2 * (queries + keys + heads * values * hidden), heads * (plain + rotary + values)


def _short_convolution(config: Config) -> int:
    """Return the operations of a gated short convolution (LFM2)."""
    hidden, kernel = get_size(config, "hidden_size"), get_size(config, "conv_L_cache")
    return 2 * (4 * hidden * hidden + kernel * hidden)


def _linear_attention(config: Config) -> int:
    """Return the operations of a layer with a state: linear attention, delta rule or state space."""
    if get_setting(config, "linear_num_value_heads") is not None:
        return _gated_delta_net(config)
    if get_setting(config, "linear_head_dim") is not None:
        return _kimi_delta_attention(config)
    if get_setting(config, "lru_width") is not None:
        return _recurrent_unit(config)
    heads = get_size(config, "mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads", default=0)
    selective = get_setting(config, "mamba_dt_rank") or get_setting(config, "time_step_rank")
    if selective and not get_setting(config, "num_heads"):
        return _mamba_1(config)
    return _mamba_2(config, heads) if heads else _lightning_attention(config)


def _delta_rule(heads: int, key: int, value: int) -> int:
    """Return the operations of the delta rule for a token, computed in chunks as kernels do.

    In a chunk two products of keys, one with values and a triangular system; three with the state.
    """
    return heads * (_DELTA_RULE_CHUNK * (5 * key + 3 * value) + 6 * key * value)


def _gated_delta_net(config: Config) -> int:
    """Return the operations of a gated delta net (Qwen3-Next, Qwen3.5, OLMo hybrid)."""
    hidden, heads = get_size(config, "hidden_size"), get_size(config, "linear_num_value_heads")
    key, value = get_size(config, "linear_key_head_dim"), get_size(config, "linear_value_head_dim")
    keys, values = get_size(config, "linear_num_key_heads") * key, heads * value
    kernel = get_size(config, "linear_conv_kernel_dim", default=4)
    projections = hidden * (2 * keys + 3 * values + 2 * heads)
    return 2 * (projections + kernel * (2 * keys + values)) + _delta_rule(heads, key, value)


def _kimi_delta_attention(config: Config) -> int:
    hidden, heads = get_size(config, "hidden_size"), get_size(config, "linear_num_heads")
    width, kernel = get_size(config, "linear_head_dim"), get_size(config, "linear_conv_kernel_dim", default=4)
    inner = heads * width
    projections = hidden * (4 * inner + 2 * width + heads) + 2 * width * inner
    return 2 * (projections + 3 * kernel * inner) + _delta_rule(heads, width, width)


def _recurrent_unit(config: Config) -> int:
    """Return the operations of a gated linear recurrent unit (RecurrentGemma)."""
    hidden, width = get_size(config, "hidden_size"), get_size(config, "lru_width")
    gates = 2 * width * width // get_size(config, "num_attention_heads")
    return 2 * (3 * hidden * width + gates + get_size(config, "conv1d_width", default=4) * width)


def _mamba_2(config: Config, heads: int) -> int:
    """Return the operations of Mamba-2, whose kernels compute in chunks with matrices."""
    hidden, expand = get_size(config, "hidden_size"), get_size(config, "mamba_expand", "expand", default=2)
    names = ("mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim")
    inner = heads * get_size(config, *names, default=expand * hidden // heads)
    groups = get_size(config, "n_groups", "mamba_n_groups", "mamba_ngroups", default=1)
    state = get_size(config, "ssm_state_size", "mamba_d_state", "state_size")
    convolved = inner + 2 * groups * state
    kernel = get_size(config, "conv_kernel", "mamba_d_conv", default=4)
    chunk = get_size(config, "chunk_size", "mamba_chunk_size", default=256)
    scan = 2 * chunk * (groups * state + inner) + 4 * inner * state
    return 2 * (hidden * (inner + convolved + heads) + kernel * convolved + inner * hidden) + scan


def _mamba_1(config: Config) -> int:
    """Return the operations of Mamba-1, whose scan is elementwise: it multiplies and adds to the state."""
    hidden = get_size(config, "hidden_size")
    inner = hidden * get_size(config, "mamba_expand", "expand", default=2)
    state = get_size(config, "mamba_d_state", "state_size")
    rank = get_size(config, "mamba_dt_rank", "time_step_rank", default=-(-hidden // 16))
    kernel = get_size(config, "mamba_d_conv", "conv_kernel", default=4)
    return 2 * inner * (3 * hidden + 2 * rank + 2 * state + kernel) + 6 * inner * state


def _lightning_attention(config: Config) -> int:
    """Return the operations of linear attention with a decay (MiniMax)."""
    hidden, heads = get_size(config, "hidden_size"), get_size(config, "num_attention_heads")
    width = get_size(config, "head_dim", default=hidden // heads)
    block = get_size(config, "block_size", default=256)
    return 10 * hidden * heads * width + heads * (4 * block * width + 4 * width * width)


def _has_feed_forward(config: Config, kinds: list[str], kind: str) -> bool:
    """Return whether a layer has an MLP or experts."""
    if {"moe", "mlp"} & set(kinds):  # Nemotron-H: a layer is one of attention, state space, MLP and experts
        return kind in ("moe", "mlp")
    if "hybrid" in kinds and kind == "linear_attention":  # Zamba: only with the shared attention
        return False
    return bool(get_setting(config, "num_attention_heads"))  # Mamba has none


def _feed_forward(config: Config, kind: str, index: int) -> int:
    """Return the operations of the MLP or of the experts that a token visits."""
    if kind == "moe" or (kind != "mlp" and _has_experts(config, index)):
        dense = _mlp(config, index) if get_setting(config, "enable_moe_block") else 0  # Gemma 4 has both
        return dense + _experts(config)
    return _mlp(config, index)


def _matrices(config: Config) -> int:
    """Return the matrices of an MLP: two, or three if it is gated."""
    return 2 if get_setting(config, "model_type") in _TWO_MATRICES else 3


def _mlp(config: Config, index: int) -> int:
    usual = 4 * get_size(config, "hidden_size") if get_setting(config, "model_type") == "gpt2" else 0
    inner = get_size(config, "intermediate_size_mlp", "intermediate_size", "n_inner", default=usual)
    if _number_of_experts(config) == 0:
        inner = get_size(
            config, "shared_intermediate_size", default=inner
        )  # GraniteMoeHybrid without experts
    if get_setting(config, "block_auto_adjust_ff_dim"):  # LFM2
        multiple = get_size(config, "block_multiple_of")
        inner = int((get_setting(config, "block_ffn_dim_multiplier") or 1) * int(2 * inner / 3))
        inner = -(-inner // multiple) * multiple
    if get_setting(config, "model_type") == "recurrent_gemma":  # its setting is of two matrices together
        inner //= 2
    if get_setting(config, "use_double_wide_mlp") and _shares_keys(config, index):
        inner *= 2
    return 2 * _matrices(config) * get_size(config, "hidden_size") * inner


def _number_of_experts(config: Config) -> int | None:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    number = get_size(config, *names, default=-1)
    return None if number < 0 else number


def _visited_experts(config: Config) -> int:
    names = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
    return get_size(config, *names, default=0)


def _has_experts(config: Config, index: int) -> bool:
    """Return whether a layer has experts: configs say so in many ways."""
    if not _visited_experts(config) or _number_of_experts(config) == 0:
        return False
    if (kinds := get_setting(config, "mlp_layer_types")) is not None:
        return bool(kinds[index] == "sparse")
    if isinstance(listed := get_setting(config, "moe_layers"), (list, tuple)):
        return index in listed
    if get_setting(config, "enable_moe_block") is False:
        return False
    if isinstance(frequency := get_setting(config, "moe_layer_freq"), (list, tuple)):
        return bool(frequency[index])
    if period := get_size(config, "expert_layer_period", default=0):
        return index % period == get_size(config, "expert_layer_offset", default=0)
    starts = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    steps = ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step")
    last = get_size(config, "moe_layer_end_index", default=-1)
    return (
        index >= get_size(config, *starts, default=0)
        and (last < 0 or index <= last)
        and index not in (get_setting(config, "mlp_only_layers") or ())
        and (index + 1) % max(1, get_size(config, *steps, default=1)) == 0
        and index % max(1, frequency or 1) == 0
    )


def _experts(config: Config) -> int:
    """Return the operations of the router, of the experts that a token visits and of the shared ones."""
    hidden, matrices = get_size(config, "hidden_size"), _matrices(config)
    inner = get_size(config, "moe_intermediate_size", "intermediate_size")
    latent = get_size(config, "moe_latent_size", default=0)  # Nemotron-H
    routed = matrices * _visited_experts(config) * inner * (latent or hidden) + 2 * hidden * latent
    router = hidden * (_number_of_experts(config) or 0)
    return 2 * (router + routed + matrices * hidden * _shared_experts(config, inner))


def _shared_experts(config: Config, inner: int) -> int:
    """Return the intermediate size of the experts that every token visits."""
    sizes = (
        "moe_shared_expert_intermediate_size",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
    )
    if (size := get_size(config, *sizes, default=-1)) >= 0:
        return size
    if get_setting(config, "intermediate_size_mlp") is not None:  # Llama 4
        return get_size(config, "intermediate_size")
    counts = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    return inner * get_size(config, *counts, default=0)
