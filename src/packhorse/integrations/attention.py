"""Attention backends for packed batches in models of transformers.

``use_attention(model, "varlen")`` sets the decoder to PyTorch's own kernel for sequences of different
lengths; batches of ``neat_packed_vlm_collater(…, attn_implementation="varlen")`` bring what it needs. No
other package is built, nothing of transformers is replaced: the function is registered under a name of its
own, through transformers' own registers.
"""

from __future__ import annotations

import inspect
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from packhorse.errors import ConfigError, require

VARLEN = "varlen"


def register_varlen() -> None:
    """Make ``"varlen"`` known to transformers; may be called again."""
    transformers = require("transformers", "train")
    require("transformers.masking_utils", "train").AttentionMaskInterface.register(VARLEN, varlen_mask)
    transformers.AttentionInterface.register(VARLEN, varlen_attention)


def use_attention(model: Any, attn_implementation: str) -> None:
    """Set the attention of a model's decoder, and leave its vision tower as it is.

    Some classes refuse a backend for the model as a whole that their decoder runs well (Qwen-VL and
    ``flex_attention``), so the decoder's own config is set.

    Raises:
        ConfigError: transformers knows no attention of that name, or what it needs is not installed.
    """
    check_attention(attn_implementation)
    model.config.get_text_config()._attn_implementation = attn_implementation


def check_attention(attn_implementation: str) -> None:
    """Refuse an attention that cannot run here; ``"varlen"`` is made known to transformers.

    Raises:
        ConfigError: nobody has registered the name with transformers, or what it needs is not installed.
    """
    register_varlen()
    known = {"eager", *require("transformers", "train").AttentionInterface()}
    if attn_implementation not in known:
        raise ConfigError(f"attention {attn_implementation!r}: expected one of {', '.join(sorted(known))}")
    flash = attn_implementation == "flash_attention_2"
    if flash and not require("transformers.utils", "train").is_flash_attn_2_available():
        raise ConfigError(
            "flash_attention_2 needs the package flash-attn and a GPU, and transformers does not find them "
            "here: pip install flash-attn, or take varlen, PyTorch's own kernel"
        )


def attention_of(model: Any) -> str:
    """The attention that a model's decoder runs with."""
    return str(model.config.get_text_config()._attn_implementation)


def varlen_mask(*, kv_length: int, attention_mask: torch.Tensor | None = None, **options: Any) -> Any:
    """The mask of ordinary batches, as for sdpa; none where every token may see all before it.

    Here nobody knows whether the batch is packed, so no mask is made of what may be a pack: as many keys as
    queries, and none of them hidden. What lies in a cache before the queries, or behind them in a static one,
    is transformers' to say.
    """
    # Earlier releases of transformers tell the queries' places in the cache instead of their number.
    queries = options["q_length"] if "q_length" in options else len(options["cache_position"])
    if attention_mask is None and queries == kv_length:
        return None
    utilities = require("transformers.masking_utils", "train")
    return utilities.sdpa_mask(kv_length=kv_length, attention_mask=attention_mask, **options)


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each document of a packed batch.

    Args:
        module: the attention layer.
        query: [B, heads, S, width]; ``key`` and ``value`` may have fewer heads.
        key: as the query.
        value: as the query.
        attention_mask: only in batches that are not packed.
        dropout: must be 0 in packed batches.
        scaling: of the scores; 1 / sqrt(width) without it.
        is_causal: None asks the module.
        sliding_window: a token sees so many tokens, itself included.
        cu_seq_lens_q: where documents begin in the flattened batch [B * S]. Without it the batch is not
            packed, and sdpa does the work.
        max_length_q: tokens of the longest document.
        options: passed on to sdpa.

    Returns:
        [B, S, heads, width], and None for the weights.
    """
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if cu_seq_lens_q is None or not causal or attention_mask is not None:
        sdpa = require("transformers.integrations.sdpa_attention", "train").sdpa_attention_forward
        if cu_seq_lens_q is None and causal and attention_mask is None:
            attention_mask = _window_mask(query, key, sliding_window)
            is_causal = is_causal if attention_mask is None else False
        passed = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **options}
        output: tuple[torch.Tensor, None] = sdpa(module, query, key, value, attention_mask, **passed)
        return output
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise ConfigError(f"varlen attention has no {name}, which this model uses: take flex_attention")
    if dropout:
        raise ConfigError(f"varlen attention has no dropout: set attention_dropout=0 (it is {dropout})")
    # Under autocast queries and keys leave the rotary embedding in float32, which no kernel for packs takes.
    device = query.device.type
    if torch.is_autocast_enabled(device):
        half = torch.get_autocast_dtype(device)
        query, key, value = (states.to(half) for states in (query, key, value))
    rows, _, length, _ = query.shape
    if max_length_q is None:
        raise ConfigError("cu_seq_lens_q without max_length_q: use the batch as the collater made it")
    q, k, v = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    run = _kernel if query.is_cuda else _document_by_document
    made = run(q, k, v, cu_seq_lens_q, int(max_length_q), scaling, sliding_window)
    return made.view(rows, length, *made.shape[1:]), None


def _window_mask(query: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """What :func:`varlen_mask` left open: the window, where there are as many keys as queries."""
    length = query.shape[2]
    if window is None or length != key.shape[2] or length <= window:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cumulative: torch.Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """PyTorch's kernel on [B * S, heads, width]."""
    function, takes = varlen_kernel()
    if scaling is not None and "scale" not in takes:
        query = query * (scaling * query.shape[-1] ** 0.5)
    options: dict[str, Any] = {"scale": scaling} if "scale" in takes else {}
    grouped = query.shape[1] != key.shape[1]
    if grouped and "enable_gqa" in takes:
        options["enable_gqa"] = True
    elif grouped:
        groups = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    if "window_size" in takes:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is None:
        options["is_causal"] = True
    else:
        raise ConfigError(
            "this PyTorch's varlen kernel has no sliding window: update it, or use flex_attention"
        )
    made: torch.Tensor = function(query, key, value, cumulative, cumulative, longest, longest, **options)
    return made


@cache
def varlen_kernel() -> tuple[Any, frozenset[str]]:
    """PyTorch's kernel, and the names of its arguments, which have changed between releases.

    Raises:
        ConfigError: this PyTorch has none.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise ConfigError(
            f"PyTorch {torch.__version__} has no torch.nn.attention.varlen: update it (2.10 or later), or "
            "use flex_attention"
        ) from error
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def _document_by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cumulative: torch.Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """The same without the kernel: sdpa on each document."""
    bounds = cumulative.tolist()
    made = []
    for start, stop in pairwise(bounds):
        q, k, v = (states[start:stop].transpose(0, 1)[None] for states in (query, key, value))
        mask = _window_mask(q, k, window)
        seen = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        made.append(seen[0].transpose(0, 1))
    return torch.cat(made)
