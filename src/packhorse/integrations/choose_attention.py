"""Which attention backends are right for a model in packed training, and which of them is taken.

A model is looked at once (:func:`facts_of`); everything after that is a function of these facts alone:
:func:`objections` says why a backend would be wrong, :func:`choose` takes the best one without any. What is
known here about backends is what packed batches bring them (:mod:`packhorse.collate_fns.packed`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from packhorse.collate_fns.packed import ATTENTION
from packhorse.errors import ConfigError, require
from packhorse.families import FAMILIES
from packhorse.integrations.attention import varlen_kernel
from packhorse.models import packing_problems, refusal

BEST_ON_CUDA = ("varlen", "flash_attention_2", "flex_attention", "sdpa", "eager")
BEST_ELSEWHERE = ("sdpa", "varlen", "eager")

_DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
_WIDEST_HEAD = 256  # of flash attention's kernels, which varlen runs too
_AMPERE = (8, 0)


@dataclass(frozen=True, slots=True)
class Facts:
    """What decides about attention.

    Attributes:
        device: ``"cuda"``, ``"cpu"``, …
        dtype: what attention computes in.
        capability: of the GPU; None without one.
        varlen: whether PyTorch has its varlen kernel, and
        varlen_windows: whether that takes a sliding window.
        flash: whether flash-attn is installed.
        both_ways: images see themselves in both directions.
        softcap: scores are capped; ``sinks``: they have one more, learned entry.
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
    both_ways: bool = False
    softcap: bool = False
    sinks: bool = False
    dropout: float = 0.0
    window: int | None = None
    chunk: int | None = None
    head: int | None = None
    mixing: tuple[str, ...] = ()


def facts_of(
    model: Any,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
) -> Facts:
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
    return Facts(
        device=device.type,
        dtype=autocast or dtype or model.dtype,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        varlen=varlen,
        varlen_windows=windows,
        flash=bool(require("transformers.utils", "train").is_flash_attn_2_available()),
        both_ways=model.config.model_type in _both_ways_models(),
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
    return frozenset(family.name for family in FAMILIES if family.both_ways is not None)


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


def objections(facts: Facts, backend: str, longest: int | None = None) -> tuple[str, ...]:
    """Why a backend would be wrong, or would not run; empty if it is right.

    Args:
        facts: about the model.
        backend: one of :data:`packhorse.collate_fns.packed.ATTENTION`.
        longest: tokens of the longest document, at most the pack size; None if not known.

    Raises:
        ConfigError: no such backend.
    """
    if backend not in ATTENTION:
        raise ConfigError(f"attn={backend!r}: expected 'auto' or one of {', '.join(ATTENTION)}")
    kernels = {"varlen": _on_varlen, "flash_attention_2": _on_flash, "flex_attention": _on_flex}
    found = [*kernels[backend](facts)] if backend in kernels else []
    if facts.both_ways and backend in ("varlen", "flash_attention_2"):
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


def _on_varlen(facts: Facts) -> Iterator[str]:
    if facts.device == "cuda" and not facts.varlen:
        yield "this PyTorch has no torch.nn.attention.varlen: update it (2.10 or later)"
    if facts.device == "cuda" and facts.window is not None and not facts.varlen_windows:
        yield "this PyTorch's varlen kernel has no sliding window: update it"
    yield from _on_kernels(facts)


def _on_flash(facts: Facts) -> Iterator[str]:
    if facts.device != "cuda" or not facts.flash:
        yield "flash-attn is not installed" if facts.device == "cuda" else f"there is none on {facts.device}"
    yield from _on_kernels(facts)


def _on_flex(facts: Facts) -> Iterator[str]:
    if facts.device != "cuda":
        yield f"it has no backward pass on {facts.device}"


def _on_kernels(facts: Facts) -> Iterator[str]:
    """What the kernels of flash attention cannot do."""
    if facts.device != "cuda":
        return
    if facts.dtype not in (torch.float16, torch.bfloat16):
        yield f"its kernel computes in bfloat16 or float16, not in {str(facts.dtype).removeprefix('torch.')}"
    if facts.capability is not None and facts.capability < _AMPERE:
        yield "its kernel needs a GPU of compute capability 8.0 (Ampere) or later"
    if facts.head is not None and facts.head > _WIDEST_HEAD:
        yield f"its kernel takes heads of up to {_WIDEST_HEAD}, this model's have {facts.head}"


def _on_windows(facts: Facts, backend: str, longest: int | None) -> Iterator[str]:
    """Layers that see less than their whole document: a mask made for all layers cannot say so."""
    told = "" if longest is None else f" (documents have up to {longest:,} tokens)"
    window = None if facts.both_ways else facts.window  # transformers makes the masks of Gemma 3 and 4
    # Kernels that take documents apart are given the window by the layer itself.
    masked = backend not in ("varlen", "flash_attention_2")
    if window is not None and masked and (longest is None or longest > window):
        yield (
            f"a layer sees {window:,} tokens only, and the mask is one for all layers{told}. Where documents "
            "are shorter, say so with longest="
        )
    if facts.chunk is not None and (longest is None or longest > facts.chunk):
        yield f"a layer sees chunks of {facts.chunk:,} tokens only, which packed batches do not know{told}"


def choose(facts: Facts, attn: str = "auto", longest: int | None = None) -> str:
    """The backend to take: the one asked for if it is right, for ``"auto"`` the fastest that is.

    Raises:
        ConfigError: the model cannot be packed, the backend is wrong for it, or none is right.
    """
    if facts.mixing:
        raise refusal(facts.mixing)
    if attn != "auto":
        wrong = objections(facts, attn, longest)
        if wrong:
            raise ConfigError(f"{attn} is wrong here: {'; '.join(wrong)}")
        return attn
    refused = {}
    for backend in BEST_ON_CUDA if facts.device == "cuda" else BEST_ELSEWHERE:
        refused[backend] = objections(facts, backend, longest)
        if not refused[backend]:
            return backend
    reasons = "\n".join(f"- {backend}: {'; '.join(why)}" for backend, why in refused.items())
    raise ConfigError(f"no attention backend is right for this model on {facts.device}:\n{reasons}")
