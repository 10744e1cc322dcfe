"""Attention backends for packed batches in models of transformers.

``use_attention(model, "varlen")`` sets the decoder to PyTorch's own kernel for sequences of different
lengths; batches of ``neat_packed_vlm_collater(…, attn_implementation="varlen")`` bring what it needs. No
other package is built, nothing of transformers is replaced: the function is registered under a name of its
own, through transformers' own registers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from packhorse.collate.packed import ATTENTION
from packhorse.errors import ConfigError, require
from packhorse.families import FAMILIES
from packhorse.families.models import packing_error, packing_problems

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
    queries, and none of them hidden. What lies in a cache before the queries, or after them in a static one,
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


BEST_ON_CUDA = ("varlen", "flash_attention_2", "flex_attention", "sdpa", "eager")
BEST_ELSEWHERE = ("sdpa", "varlen", "eager")

_DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
_WIDEST_HEAD = 256  # of flash attention's kernels, which varlen runs too
_AMPERE = (8, 0)


@dataclass(frozen=True, slots=True)
class AttentionInfo:
    """What decides about attention.

    Attributes:
        device: ``"cuda"``, ``"cpu"``, …
        dtype: what attention computes in.
        capability: of the GPU; None without one.
        varlen: whether PyTorch has its varlen kernel, and
        varlen_windows: whether that takes a sliding window.
        flash: whether flash-attn is installed.
        both_ways: images see themselves in both directions.
        softcap: scores are capped; ``sinks``: they have one more, supervised entry.
        dropout: of attention weights.
        window: tokens that a layer sees, where one does not see all; None for all.
        chunk: tokens of a chunk, where a layer sees its chunk alone; None for all.
        head: width of an attention head; None if not known.
        mixing: what lets documents of one row see each other whatever the backend, in words.
    """

    device: str
    dtype: torch.dtype = torch.bfloat16
    capability: tuple[int, int] | None = None
    varlen: bool = True
    varlen_windows: bool = True
    flash: bool = False
    bidirectional: bool = False
    softcap: bool = False
    sinks: bool = False
    dropout: float = 0.0
    window: int | None = None
    chunk: int | None = None
    head: int | None = None
    mixing: tuple[str, ...] = ()


def inspect_attention(
    model: Any,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
) -> AttentionInfo:
    """Look at a model of transformers, at its device and at what is installed; see :func:`.prepare`.

    Args:
        model: the model.
        device: it is trained on; None for where it is, or a GPU if there is one and it is not there yet.
        dtype: of its weights while they compute; None for what they are now.
        autocast: the type of ``torch.autocast`` around it.
    """
    config = model.config.get_text_config()
    device = torch.device(device or _device_of(model))
    varlen, windows = _varlen_kernel()
    return AttentionInfo(
        device=device.type,
        dtype=autocast or dtype or model.dtype,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        varlen=varlen,
        varlen_windows=windows,
        flash=bool(require("transformers.utils", "train").is_flash_attn_2_available()),
        bidirectional=model.config.model_type in _both_ways_models(),
        softcap=any(_values(config, "attn_logit_softcapping")),
        sinks=any(name.rpartition(".")[2] == "sinks" for name, _ in model.named_parameters()),
        dropout=max((float(p) for name in _DROPOUTS for p in _values(config, name)), default=0.0),
        window=_window(config),
        chunk=_chunk(config),
        head=_head(config),
        mixing=packing_problems(model),
    )


def _device_of(model: Any) -> torch.device:
    """Trainers move models to the GPU themselves, so one that is still elsewhere will be there."""
    device = torch.device(model.device)
    moves = device.type in ("cpu", "meta") and torch.cuda.is_available()
    return torch.device("cuda") if moves else device


def _varlen_kernel() -> tuple[bool, bool]:
    """Whether PyTorch has it, and with a sliding window."""
    try:
        _, takes = varlen_kernel()
    except ConfigError:
        return False, False
    return True, "window_size" in takes


def _both_ways_models() -> frozenset[str]:
    """Families are named after their models' type."""
    return frozenset(family.name for family in FAMILIES if family.bidirectional is not None)


def _values(config: Any, name: str) -> list[Any]:
    """A setting of each layer where layers differ (Gemma 4), else of all; without what is not set."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    return [value for layer in layers if (value := getattr(layer, name, None)) is not None]


def _window(config: Any) -> int | None:
    kinds = getattr(config, "layer_types", None)
    if kinds is None and not getattr(config, "use_sliding_window", True):
        return None
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    return min(_values(config, "sliding_window"), default=None)


def _chunk(config: Any) -> int | None:
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    return min(_values(config, "attention_chunk_size"), default=None) if chunked else None


def _head(config: Any) -> int | None:
    found = _values(config, "head_dim")
    heads, widths = _values(config, "num_attention_heads"), _values(config, "hidden_size")
    if not found and heads and widths:
        return int(max(widths) // min(heads))
    return max(found, default=None)


def unsupported_features(facts: AttentionInfo, backend: str, longest: int | None = None) -> tuple[str, ...]:
    """Why a backend would be wrong, or would not run; empty if it is right.

    Args:
        facts: about the model.
        backend: one of :data:`packhorse.collate.packed.ATTENTION`.
        longest: tokens of the longest document, at most the pack size; None if not known.

    Raises:
        ConfigError: no such backend.
    """
    if backend not in ATTENTION:
        raise ConfigError(f"attn={backend!r}: expected 'auto' or one of {', '.join(ATTENTION)}")
    kernels = {"varlen": _on_varlen, "flash_attention_2": _on_flash, "flex_attention": _on_flex}
    found = [*kernels[backend](facts)] if backend in kernels else []
    if facts.bidirectional and backend in ("varlen", "flash_attention_2"):
        found.append("images of this model see themselves both ways, and it knows one direction only")
    if facts.sinks and backend in ("varlen", "sdpa"):
        found.append("it has no attention sinks, which this model uses")
    if facts.softcap and backend in ("varlen", "sdpa"):
        found.append("it has no cap on scores, which this model uses")
    if facts.dropout and backend in ("varlen", "flex_attention"):
        found.append(
            f"it has no dropout: set attention_dropout=0 in the model's config (it is {facts.dropout})"
        )
    return (*found, *_on_windows(facts, backend, longest))


def _on_varlen(facts: AttentionInfo) -> Iterator[str]:
    if facts.device == "cuda" and not facts.varlen:
        yield "this PyTorch has no torch.nn.attention.varlen: update it (2.10 or later)"
    if facts.device == "cuda" and facts.window is not None and not facts.varlen_windows:
        yield "this PyTorch's varlen kernel has no sliding window: update it"
    yield from _on_kernels(facts)


def _on_flash(facts: AttentionInfo) -> Iterator[str]:
    if facts.device != "cuda" or not facts.flash:
        yield "flash-attn is not installed" if facts.device == "cuda" else f"there is none on {facts.device}"
    yield from _on_kernels(facts)


def _on_flex(facts: AttentionInfo) -> Iterator[str]:
    if facts.device != "cuda":
        yield f"it has no backward pass on {facts.device}"


def _on_kernels(facts: AttentionInfo) -> Iterator[str]:
    """What the kernels of flash attention cannot do."""
    if facts.device != "cuda":
        return
    if facts.dtype not in (torch.float16, torch.bfloat16):
        yield f"its kernel computes in bfloat16 or float16, not in {str(facts.dtype).removeprefix('torch.')}"
    if facts.capability is not None and facts.capability < _AMPERE:
        yield "its kernel needs a GPU of compute capability 8.0 (Ampere) or later"
    if facts.head is not None and facts.head > _WIDEST_HEAD:
        yield f"its kernel takes heads of up to {_WIDEST_HEAD}, this model's have {facts.head}"


def _on_windows(facts: AttentionInfo, backend: str, longest: int | None) -> Iterator[str]:
    """Layers that see less than their whole document: a mask made for all layers cannot say so."""
    told = "" if longest is None else f" (documents have up to {longest:,} tokens)"
    window = None if facts.bidirectional else facts.window  # transformers makes the masks of Gemma 3 and 4
    # Kernels that take documents apart are given the window by the layer itself.
    masked = backend not in ("varlen", "flash_attention_2")
    if window is not None and masked and (longest is None or longest > window):
        yield (
            f"a layer sees {window:,} tokens only, and the mask is one for all layers{told}. Where documents "
            "are shorter, say so with longest="
        )
    if facts.chunk is not None and (longest is None or longest > facts.chunk):
        yield f"a layer sees chunks of {facts.chunk:,} tokens only, which packed batches do not know{told}"


def choose_attention(facts: AttentionInfo, attn: str = "auto", longest: int | None = None) -> str:
    """The backend to take: the one asked for if it is right, for ``"auto"`` the fastest that is.

    Raises:
        ConfigError: the model cannot be packed, the backend is wrong for it, or none is right.
    """
    if facts.mixing:
        raise packing_error(facts.mixing)
    if attn != "auto":
        wrong = unsupported_features(facts, attn, longest)
        if wrong:
            raise ConfigError(f"{attn} is wrong here: {'; '.join(wrong)}")
        return attn
    rejected = {}
    for backend in BEST_ON_CUDA if facts.device == "cuda" else BEST_ELSEWHERE:
        rejected[backend] = unsupported_features(facts, backend, longest)
        if not rejected[backend]:
            return backend
    reasons = "\n".join(f"- {backend}: {'; '.join(why)}" for backend, why in rejected.items())
    raise ConfigError(f"no attention backend is right for this model on {facts.device}:\n{reasons}")
