"""Attention backends for packed batches in models of transformers: set one, or choose the right one.

``use_attention(model, "varlen")`` sets the decoder to PyTorch's kernel for variable-length sequences
(:mod:`packhorse.families.varlen`); batches of ``neat_packed_vlm_collater(…, attn_implementation="varlen")``
hold its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from packhorse.collate.batch_formats import CONTIGUOUS, FLASH, PAGED, batch_format_of, is_hub_kernel
from packhorse.collate.batch_formats import declare_batch_format as declare_batch_format
from packhorse.errors import ConfigError, require, suggest
from packhorse.families import FAMILIES
from packhorse.families.models import attention_of, class_of, set_attention, supports_sdpa
from packhorse.families.packing import inspect_packing
from packhorse.families.varlen import register_varlen, varlen_kernel
from packhorse.families.vision import (
    FLASH_VARLEN,
    ONE_CALL,
    PER_ITEM,
    attend_in_one_call,
    attend_per_item,
    attention_of_tower,
    find_towers,
    head_width,
    runs_in_one_call,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def use_attention(model: PreTrainedModel, attn_implementation: str) -> None:
    """Set the attention of a model's decoder; its vision tower does not change.

    Like transformers, loads a kernel of the Hub, also in place of a package of flash attention that is not
    installed, if the package ``kernels`` is.

    Raises:
        ConfigError: the name is not registered with transformers, its package is not installed, or the kernel
            cannot be loaded.
    """
    set_attention(model, check_attention(attn_implementation))


def check_attention(attn_implementation: str) -> str:
    """Return the name that transformers runs an attention under; register ``"varlen"``, load a kernel.

    Raises:
        ConfigError: it cannot run here.
    """
    transformers: Any = require("transformers", "train")
    register_varlen()
    registered = {"eager", *transformers.AttentionInterface()}
    known = {name for name in registered if not name.startswith(PAGED)}
    if attn_implementation in FLASH and attn_implementation not in installed_flash():
        return _load_kernel(_substitute_kernel(attn_implementation))
    if attn_implementation in known:
        return attn_implementation
    if is_hub_kernel(attn_implementation):
        return _load_kernel(attn_implementation)
    hint = suggest(attn_implementation, sorted(known))
    choices = ", ".join(sorted(known))
    raise ConfigError.of("attn_implementation", attn_implementation, f"expected one of {choices}{hint}")


def installed_flash() -> frozenset[str]:
    """Return the flash attentions of transformers whose package is installed, with a GPU."""
    utilities = require("transformers.utils", "train")
    checks = {name: getattr(utilities, f"is_flash_attn_{name[-1]}_available", None) for name in FLASH}
    return frozenset(name for name, available in checks.items() if available is not None and available())


def _has_kernels() -> bool:
    return bool(require("transformers.utils", "train").is_kernels_available())


def _substitute_kernel(flash: str) -> str:
    """Return the kernel of the Hub that transformers runs if the package of a flash attention is missing."""
    kernels = require("transformers.modeling_flash_attention_utils", "train").FLASH_ATTN_KERNEL_FALLBACK
    if not _has_kernels() or flash not in kernels:
        package = _FLASH_PACKAGES[flash]
        raise ConfigError(
            f"{flash} needs the package {package} and a GPU, which transformers does not find: pip install "
            f"{package} (or kernels, with which transformers gets it from the Hub), or set "
            "attn_implementation='varlen', PyTorch's kernel",
            setting="attn_implementation",
            value=flash,
        )
    return str(kernels[flash])


def _load_kernel(name: str) -> str:
    """Load a kernel of the Hub and register it with transformers; return its name."""
    if name in require("transformers", "train").AttentionInterface():
        return name
    if not _has_kernels():
        why = "kernels of the Hub need the package kernels: pip install kernels, or use 'varlen'"
        raise ConfigError.of("attn_implementation", name, why)
    try:
        require("transformers.integrations.hub_kernels", "train").load_and_register_attn_kernel(name)
    except (ImportError, ValueError, AttributeError) as error:
        why = f"the kernel cannot be loaded: {error}. Check its name and the network, or use 'varlen'"
        raise ConfigError.of("attn_implementation", name, why) from error
    return name


BEST_ON_CUDA = ("varlen", "flash_attention_2", "flex_attention", "sdpa", "eager")
BEST_ELSEWHERE = ("sdpa", "varlen", "eager")

_DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
_FLASH_PACKAGES = dict(zip(FLASH, ("flash-attn", "flash-attn-3", "flash-attn-4"), strict=True))
# transformers passes attention sinks to these alone; to others it does not, silently.
_FLASH_WITH_SINKS = ("flash_attention_4", "flash-attn4", "vllm-flash-attn3", "aiter-flash-attn")
_WIDEST_HEAD = 256  # of the kernels of flash attention, which varlen uses too
_HEAD_STEP = 8  # of kernels that do not pad; the decoders of models have such heads
_AMPERE, _HOPPER = (8, 0), (9, 0)


@dataclass(frozen=True, slots=True)
class AttentionInfo:
    """What the choice of an attention backend depends on.

    Attributes:
        device: ``"cuda"``, ``"cpu"``, …
        dtype: of the computation.
        capability: of the GPU; None without one.
        varlen: whether PyTorch has the varlen kernel.
        varlen_windows: whether that takes a sliding window.
        flash: the flash attentions that are installed.
        kernels: whether the package ``kernels`` is, which loads kernels of the Hub.
        bidirectional: whether the tokens of an image attend to each other in both directions.
        no_boundaries: why attention that takes boundaries of documents would be wrong; empty if it is right.
        no_eager: why eager attention would be wrong; empty if it is right.
        softcap: whether scores are capped.
        sinks: whether there are attention sinks.
        dropout: of attention weights.
        window: of layers with a sliding window; None without.
        chunk: tokens of a chunk of layers with chunked attention; None without.
        head: width of an attention head; None if unknown.
        own: the attention that a class with code of its own runs, whatever its config is set to; empty if
            nothing keeps documents apart in it. None for classes that run registered attentions.
    """

    device: str
    dtype: torch.dtype = torch.bfloat16
    capability: tuple[int, int] | None = None
    varlen: bool = True
    varlen_windows: bool = True
    flash: frozenset[str] = frozenset()
    kernels: bool = False
    bidirectional: bool = False
    no_boundaries: str = ""
    no_eager: str = ""
    softcap: bool = False
    sinks: bool = False
    dropout: float = 0.0
    window: int | None = None
    chunk: int | None = None
    head: int | None = None
    own: str | None = None


def inspect_attention(
    model: PreTrainedModel,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
) -> AttentionInfo:
    """Inspect a model of transformers, its device and the installed packages.

    Without ``device`` the model is trained on a GPU if there is one, else where it is; ``dtype`` is that of
    the weights in computations, ``autocast`` that of ``torch.autocast`` around them.
    """
    config = model.config.get_text_config()
    if device is None and model.device.type in ("cpu", "meta") and torch.cuda.is_available():
        device = "cuda"  # trainers move it there
    device = torch.device(device or model.device)
    on_gpu = device.type == "cuda" and torch.cuda.is_available()  # not where a model is prepared elsewhere
    takes = None
    with suppress(ConfigError):  # this PyTorch has no such kernel
        _, takes = varlen_kernel()
    packing = inspect_packing(model)
    # Families have the names of their model types.
    bidirectional = {family.name for family in FAMILIES if family.bidirectional is not None}
    return AttentionInfo(
        device=device.type,
        dtype=autocast or dtype or model.dtype,
        capability=torch.cuda.get_device_capability(device) if on_gpu else None,
        varlen=takes is not None,
        varlen_windows="window_size" in (takes or ()),
        flash=installed_flash(),
        kernels=_has_kernels(),
        bidirectional=model.config.model_type in bidirectional,
        no_boundaries=packing.no_boundaries,
        no_eager=packing.no_eager,
        softcap=any(_values(config, "attn_logit_softcapping")),
        sinks=any(name.rpartition(".")[2] == "sinks" for name, _ in model.named_parameters()),
        dropout=max((float(p) for name in _DROPOUTS for p in _values(config, name)), default=0.0),
        window=_window(config),
        chunk=_chunk(config),
        head=_head(config),
        own=_own_attention(model),
    )


def _own_attention(model: PreTrainedModel) -> str | None:
    """Return the attention that a model was built with if it cannot run another one; None if it can.

    Such classes ignore the arguments of other attentions: documents would attend to each other. Empty if the
    attention takes no mask.
    """
    config, pretrained = model.config.get_text_config(), require("transformers", "train").PreTrainedModel
    models = [module for module in model.modules() if isinstance(module, pretrained)]
    decoders = [module for module in models if module.config is config] or [model]
    for kind in dict.fromkeys(map(class_of, decoders)):
        # transformers has no public name for whether a class runs registered attentions.
        if not kind._can_set_attn_implementation():  # type: ignore[attr-defined]
            built = attention_of(model)
            return built if built == "eager" or (built == "sdpa" and supports_sdpa(kind)) else ""
    return None


def _values(config: PretrainedConfig, name: str) -> list[Any]:
    """Return the values of a setting that are set, of each layer if layers differ (Gemma 4)."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    return [value for layer in layers if (value := getattr(layer, name, None)) is not None]


def _window(config: PretrainedConfig) -> int | None:
    types = getattr(config, "layer_types", None)
    used = getattr(config, "use_sliding_window", True) if types is None else "sliding_attention" in types
    return min(_values(config, "sliding_window"), default=None) if used else None


def _chunk(config: PretrainedConfig) -> int | None:
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    return min(_values(config, "attention_chunk_size"), default=None) if chunked else None


def _head(config: PretrainedConfig) -> int | None:
    head_dims = _values(config, "head_dim")
    heads, widths = _values(config, "num_attention_heads"), _values(config, "hidden_size")
    if not head_dims and heads and widths:
        return int(max(widths) // min(heads))
    return max(head_dims, default=None)


def unsupported_features(info: AttentionInfo, backend: str, longest: int | None = None) -> tuple[str, ...]:
    """Return why a backend would be wrong, or would not run; empty if it is right.

    ``longest`` is the tokens of the longest document, at most the pack size; None if unknown.
    """
    batch_format = batch_format_of(backend, ("auto",))
    return (*_backend_problems(info, backend, batch_format), *_window_problems(info, batch_format, longest))


def _backend_problems(info: AttentionInfo, backend: str, batch_format: str) -> Iterator[str]:
    """Yield what the backend lacks on this device, or for this model."""
    varlen, hub, gpu = backend == "varlen", is_hub_kernel(backend), info.device == "cuda"
    flash = backend in FLASH or (hub and batch_format in CONTIGUOUS)
    if varlen and gpu and not info.varlen:
        yield "this PyTorch has no varlen kernel: update it (2.10 or later)"
    if varlen and gpu and info.window is not None and not info.varlen_windows:
        yield "this PyTorch's varlen kernel has no sliding window: update it"
    if backend in FLASH and gpu and backend not in info.flash and not info.kernels:
        yield f"{_FLASH_PACKAGES[backend]} is not installed"
    if hub and not info.kernels:
        yield "the package kernels is not installed"
    if info.own is not None and backend != info.own:
        what = f"that is {info.own}" if info.own else 'build it with attn_implementation="eager"'
        yield f"the model's class runs the attention that it was built with alone: {what}"
    if flash and (info.device == "cpu" or (backend in FLASH and not gpu)):
        yield f"flash attention runs on a GPU alone, not on {info.device}: use 'varlen' or 'sdpa'"
    if backend == "flex_attention" and not gpu:
        yield f"it has no backward pass on {info.device}: use 'sdpa' or 'varlen'"
    if (varlen or flash) and gpu:
        if info.dtype not in (torch.float16, torch.bfloat16):
            dtype = str(info.dtype).removeprefix("torch.")
            yield f"its kernel computes in bfloat16 or float16, not in {dtype}"
        if info.capability is not None and info.capability < _AMPERE:
            yield "its kernel needs a GPU of compute capability 8.0 (Ampere) or later"
        if (info.head or 0) > _WIDEST_HEAD:
            yield f"its heads have up to {_WIDEST_HEAD} dimensions, the model's {info.head}"
        if backend == "flash_attention_4" and info.capability is not None and info.capability < _HOPPER:
            yield "its kernel needs a GPU of compute capability 9.0 (Hopper) or later"
    if batch_format in CONTIGUOUS and info.no_boundaries:
        yield f"it takes the boundaries of documents, and {info.no_boundaries}"
    if backend == "eager" and info.no_eager:
        yield info.no_eager
    if batch_format in CONTIGUOUS and info.bidirectional:
        yield "it is causal, and images of this model attend in both directions"
    if info.sinks and (
        backend in ("varlen", "sdpa") or (flash and not any(name in backend for name in _FLASH_WITH_SINKS))
    ):
        yield "it has no attention sinks, which this model uses"
    if backend in ("varlen", "sdpa") and info.softcap:
        yield "it has no cap on scores, which this model uses"
    if backend in ("varlen", "flex_attention", *FLASH[1:]) and info.dropout:
        yield f"it has no dropout: set attention_dropout=0 in the model's config (it is {info.dropout})"


def _window_problems(info: AttentionInfo, batch_format: str, longest: int | None) -> Iterator[str]:
    """Yield problems of layers with a window or chunks, which one mask for all layers cannot express."""
    lengths = "" if longest is None else f" (documents have up to {longest:,} tokens)"
    window = None if info.bidirectional else info.window  # transformers builds the masks of Gemma 3 and 4
    # The layer passes its window to kernels that separate documents.
    masked = batch_format not in CONTIGUOUS
    if window is not None and masked and (longest is None or longest > window):
        yield (
            f"a layer has a window of {window:,} tokens, and there is one mask for all layers{lengths}. If "
            "documents are shorter, pass longest="
        )
    if info.chunk is not None and (longest is None or longest > info.chunk):
        yield f"a layer has chunks of {info.chunk:,} tokens, which packed batches do not support{lengths}"


def choose_attention(
    info: AttentionInfo, attn_implementation: str = "auto", longest: int | None = None
) -> str:
    """Return the requested attention, or with ``"auto"`` the fastest that is right; raise if it is wrong."""
    if attn_implementation != "auto":
        if wrong := unsupported_features(info, attn_implementation, longest):
            detail = f"it is wrong here: {'; '.join(wrong)}"
            raise ConfigError.of("attn_implementation", attn_implementation, detail)
        return attn_implementation
    rejected = {}
    for backend in BEST_ON_CUDA if info.device == "cuda" else BEST_ELSEWHERE:
        rejected[backend] = unsupported_features(info, backend, longest)
        if not rejected[backend]:
            return backend
    reasons = "\n".join(f"- {backend}: {'; '.join(why)}" for backend, why in rejected.items())
    detail = f"no backend is right for this model on {info.device}:\n{reasons}"
    raise ConfigError.of("attn_implementation", "auto", detail)


# Vision towers.


def check_vision(vision: str) -> None:
    """Raise ConfigError for another value of ``vision`` than :func:`packhorse.prepare` takes."""
    if vision not in (choices := ("auto", ONE_CALL, PER_ITEM)):
        hint = suggest(vision, choices)
        raise ConfigError.of("vision", vision, f"expected one of {', '.join(choices)}{hint}")


def use_vision(
    model: PreTrainedModel, vision: str, info: AttentionInfo, decoder: str, dtype: torch.dtype | None = None
) -> tuple[str, str]:
    """Let the attention of a model's vision tower run once for all images, or once for each image.

    Args:
        model: the model.
        vision: ``"one_call"``, ``"per_item"``, or ``"auto"``: in one call on a GPU, if that is right.
        info: about the model.
        decoder: the attention of its decoder. If that is a flash attention, the tower runs it too.
        dtype: of the tower in computations; None for that of its weights.

    Returns:
        What the tower does, ``""`` for a model without a tower that could do either; and with ``"auto"`` on a
        GPU why it is not one call.

    Raises:
        ConfigError: one call is requested, and impossible.
    """
    towers = find_towers(model)
    if not towers:
        if vision == ONE_CALL:
            why = "has no vision tower that is known to call its attention for each image: leave vision out"
            raise ConfigError.of("vision", vision, f"{class_of(model).__name__} {why}")
        return "", ""
    flash = decoder in FLASH or (is_hub_kernel(decoder) and "flash" in decoder)
    attention = check_attention(decoder) if flash else FLASH_VARLEN
    problems = {why: None for tower in towers for why in _tower_problems(tower, attention, info, dtype)}
    if vision == ONE_CALL and problems:
        raise ConfigError.of("vision", vision, f"it is wrong here: {'; '.join(problems)}")
    one_call = vision == ONE_CALL or (vision == "auto" and info.device == "cuda" and not problems)
    for tower in towers:
        ours = attention_of_tower(tower) == FLASH_VARLEN
        if one_call or (vision == "auto" and runs_in_one_call(tower) and not ours):
            attend_in_one_call(tower, attention if one_call else attention_of_tower(tower))
        elif runs_in_one_call(tower):
            attend_per_item(tower)
    mode = ONE_CALL if all(map(runs_in_one_call, towers)) else PER_ITEM
    reported = vision == "auto" and mode == PER_ITEM and info.device == "cuda"
    return mode, "; ".join(problems) if reported else ""


def _tower_problems(
    tower: PreTrainedModel, attention: str, info: AttentionInfo, dtype: torch.dtype | None
) -> tuple[str, ...]:
    """Return why an attention would be wrong for all images of a tower in one call; empty if it is right."""
    weights = next((weight.dtype for weight in tower.parameters() if weight.is_floating_point()), info.dtype)
    towers_info = AttentionInfo(
        device=info.device,
        dtype=dtype or weights,
        capability=info.capability,
        varlen=info.varlen,
        flash=info.flash,
        kernels=info.kernels,
        head=(width := head_width(tower)),
    )
    problems = unsupported_features(towers_info, "varlen" if attention == FLASH_VARLEN else attention)
    if attention == FLASH_VARLEN and info.device == "cuda" and width % _HEAD_STEP:
        problems += (f"its heads have a multiple of {_HEAD_STEP} dimensions, the tower's {width}",)
    return problems
