"""PyTorch's attention kernel for variable-length sequences, as transformers calls attention.

:func:`register_varlen` registers it with transformers under the name ``"varlen"``.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from packhorse.errors import ConfigError, require

VARLEN = "varlen"
VARLEN_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments with which attention gets the boundaries of documents, by the names of transformers."""


def register_varlen() -> None:
    """Register the attention ``"varlen"`` and its mask with transformers."""
    transformers: Any = require("transformers", "train")
    require("transformers.masking_utils", "train").AttentionMaskInterface.register(VARLEN, varlen_mask)
    transformers.AttentionInterface.register(VARLEN, varlen_attention)


def varlen_mask(*, kv_length: int, attention_mask: torch.Tensor | None = None, **options: Any) -> Any:
    """Return the mask of sdpa for batches that are not packed; None if every token attends to all before it.

    A batch with as many keys as queries and no attention mask may be packed, so it gets none.
    """
    # Earlier releases of transformers pass the positions of the queries in the cache, not their number.
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
    """Causal attention inside each document of a packed batch, as transformers calls it.

    ``cu_seq_lens_q`` is where documents begin in the flattened batch [B * S]; sdpa computes a batch without
    it or with a mask. A ``sliding_window`` counts the token itself. Returns [B, S, heads, width], and None
    for the weights.
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
            raise ConfigError(
                f"varlen attention has no {name}, which this model uses: use flex_attention", setting=name
            )
    if dropout:
        raise ConfigError.of("attention_dropout", dropout, "varlen attention has no dropout: set it to 0")
    if max_length_q is None:
        detail = "cu_seq_lens_q needs it too: use the batch of the collater unchanged"
        raise ConfigError.of("max_length_q", None, detail)
    longest = int(max_length_q)
    return attend_by_segment(query, key, value, cu_seq_lens_q, longest, scaling, sliding_window), None


def attend_by_segment(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cumulative: torch.Tensor,
    longest: int,
    scaling: float | None = None,
    window: int | None = None,
    *,
    causal: bool = True,
) -> torch.Tensor:
    """Attention inside each segment of the flattened batch [B * S]: PyTorch's kernel on a GPU, else sdpa.

    Args:
        query: [B, heads, S, width], as are ``key`` and ``value``; these may have fewer heads.
        key: likewise.
        value: likewise.
        cumulative: where segments begin, and the end of the last one.
        longest: tokens of the longest segment.
        scaling: of scores; None for the usual one.
        window: tokens that a token attends to, with itself; None for all.
        causal: whether tokens attend to those before them only.

    Returns:
        [B, S, heads, width].
    """
    # Under autocast the rotary embedding returns float32, which no kernel for packs takes.
    device = query.device.type
    if torch.is_autocast_enabled(device):
        half = torch.get_autocast_dtype(device)
        query, key, value = (states.to(half) for states in (query, key, value))
    rows, _, length, _ = query.shape
    flat = [states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)]
    # Towers also compute in float32, in evaluation without autocast, say; decoders run sdpa then.
    if query.is_cuda and (causal or query.dtype in (torch.float16, torch.bfloat16)):
        result = _run_kernel(flat, cumulative, longest, scaling, window, causal)
    else:
        result = _run_sdpa(flat, cumulative, scaling, window, causal)
    return result.view(rows, length, *result.shape[1:])


def _window_mask(query: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """Return the mask of a sliding window for as many keys as queries, which :func:`varlen_mask` omits."""
    length = query.shape[2]
    if window is None or length != key.shape[2] or length <= window:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)


def _run_kernel(
    flat: Sequence[torch.Tensor],
    cumulative: torch.Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
    causal: bool,
) -> torch.Tensor:
    """Run PyTorch's kernel on queries, keys and values [B * S, heads, width]."""
    query, key, value = flat
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
        options["window_size"] = (-1 if window is None else window - 1, 0 if causal else -1)
    elif window is None:
        options["is_causal"] = causal
    else:
        raise ConfigError.of(
            "sliding_window", window, "PyTorch's varlen kernel has none: update it, or use flex_attention"
        )
    result: torch.Tensor = function(query, key, value, cumulative, cumulative, longest, longest, **options)
    return result


@cache
def varlen_kernel() -> tuple[Any, frozenset[str]]:
    """Return PyTorch's kernel, and the names of its arguments, which differ between releases."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise ConfigError(
            f"PyTorch {torch.__version__} has no torch.nn.attention.varlen: update it (2.10 or later), or "
            "use flex_attention"
        ) from error
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def _run_sdpa(
    flat: Sequence[torch.Tensor],
    cumulative: torch.Tensor,
    scaling: float | None,
    window: int | None,
    causal: bool,
) -> torch.Tensor:
    """Run sdpa on each segment of queries, keys and values [B * S, heads, width]."""
    outputs = []
    for start, stop in pairwise(cumulative.tolist()):
        q, k, v = (states[start:stop].transpose(0, 1)[None] for states in flat)
        mask = _window_mask(q, k, window)
        grouped = q.shape[1] != k.shape[1]
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scaling, enable_gqa=grouped
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)
