"""Decide whether a model gives packed rows the results that it gives their samples alone.

:func:`inspect_packing` is the one place that decides: the model types of :data:`PACKABLE` do, as tests of
this project show. Any other class is measured on a tiny copy (:mod:`.probe`). Layers that carry state are
called document by document (:mod:`.stateful`), which ``packhorse.prepare`` sets up.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from packhorse.errors import ConfigError
from packhorse.families.models import (
    ModelConfig,
    class_of,
    media_parts,
    model_classes,
    resolve_model,
    text_config,
    unwrap,
)
from packhorse.families.stateful import is_installed
from packhorse.families.tiny import LAYER_LISTS

if TYPE_CHECKING:
    import torch

# fmt: off
_FAMILY_MODEL_TYPES = frozenset({
    "gemma3", "gemma3_text", "gemma4", "gemma4_text", "internvl", "kimi_k25", "lfm2_vl", "llava_onevision",
    "nemotron_h_omni", "phi4_multimodal", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text",
    "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe_text", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe",
    "qwen3_vl_moe_text", "qwen3_vl_text", "smolvlm",
})
_DECODERS = frozenset({
    "apertus", "arcee", "bitnet", "cohere", "cohere2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "exaone4",
    "gemma", "gemma2", "glm", "glm4", "glm4_moe", "gpt2", "gpt_neox", "gpt_oss", "granite", "granitemoe",
    "granitemoeshared", "helium", "llama", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral",
    "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "seed_oss", "smollm3", "stablelm", "starcoder2",
})
STATEFUL_LAYERS: dict[str, tuple[str, ...]] = {
    "bamba": ("BambaMixer",),
    "falcon_h1": ("FalconH1Mixer",),
    "falcon_mamba": ("FalconMambaMixer",),
    "granitemoehybrid": ("GraniteMoeHybridMambaLayer",),
    "jamba": ("JambaMambaMixer",),
    "lfm2": ("Lfm2ShortConv",),
    "lfm2_moe": ("Lfm2MoeShortConv",),
    "mamba": ("MambaMixer",),
    "mamba2": ("Mamba2Mixer",),
    "nemotron_h": ("NemotronHMamba2Mixer",),
    "olmo_hybrid": ("OlmoHybridGatedDeltaNet",),
    "qwen3_5_moe_text": ("Qwen3_5MoeGatedDeltaNet",),
    "qwen3_5_text": ("Qwen3_5GatedDeltaNet",),
    "qwen3_next": ("Qwen3NextGatedDeltaNet",),
    "zamba2": ("Zamba2MambaMixer",),
}
"""Classes of the layers that carry state, by the model type of the decoder."""
# fmt: on
PACKABLE = _FAMILY_MODEL_TYPES | _DECODERS | STATEFUL_LAYERS.keys()
"""Model types whose packed rows are tested to give what their samples give alone.

A model is accepted without a measurement if its own type and that of its decoder are both among them.
"""

_IGNORE_BOUNDARIES = frozenset({"falcon_mamba", "mamba", "mamba2", "nemotron", "stablelm"})
"""Of these, the types whose decoder or attention does not get the boundaries of documents."""

# Kinds of layers in which a token sees no more than its mask or its document's bounds let it see.
_PROVEN_LAYERS = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "attention", "moe", "mlp"}
)
# Kinds whose mixing a measurement with two short documents shows. Others may select keys over the whole row.
_MEASURABLE_LAYERS = _PROVEN_LAYERS | {
    "conv",
    "hybrid",
    "hybrid_sliding",
    "linear_attention",
    "mamba",
    "recurrent",
}
_MEDIA_INPUTS = ("pixel_values", "image", "video", "audio", "input_features", "protein")  # of forward passes


@dataclass(frozen=True, slots=True)
class Packing:
    """Whether, and how, a model can be trained on packed rows.

    Attributes:
        problems: why packed rows would not give what their samples give alone; empty if they do.
        layers: classes of the layers that carry state, which ``packhorse.prepare`` lets run document by
            document.
        tested: whether tests of this project show it; else it was measured on a tiny copy.
        known: whether ``problems`` are facts, not only the lack of a proof.
        no_boundaries: why attention that takes boundaries of documents, as varlen and flash attention do,
            would be wrong; empty if it is right.
    """

    problems: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    tested: bool = True
    known: bool = True
    no_boundaries: str = ""


def inspect_packing(model: object) -> Packing:
    """Return whether a model can be trained on packed rows.

    Args:
        model: a model, its config, or the folder or hub name of one.

    Raises:
        ConfigError: it is no model.
    """
    inner, config = resolve_model(model)
    problems = (*_problems(inner, config), *_problems_of_adapters(model))
    if problems:
        return Packing(problems)
    text = text_config(config)
    untested = [name for name in dict.fromkeys((config.model_type, text.model_type)) if name not in PACKABLE]
    model_class = class_of(inner) if inner is not None else model_classes(config)[0]
    layers = STATEFUL_LAYERS.get(text.model_type, ())
    ours = model_class.__module__.startswith("transformers.")
    if ours and not untested and (layers or not _may_carry_state(inner, config, text)):
        ignores = text.model_type in _IGNORE_BOUNDARIES
        return Packing(layers=layers, no_boundaries=_NO_BOUNDARIES if ignores else "")
    if odd := {kind: index for kind, index in layer_kinds(text).items() if kind not in _MEASURABLE_LAYERS}:
        layers_named = ", ".join(f"layer {index} ({kind})" for kind, index in odd.items())
        why = f"{model_class.__name__}: no test shows that {layers_named} keeps the documents of a row apart"
        return Packing((why + _HINT,), (), False, False)
    return _measure_packing(model_class, config, untested)


def _measure_packing(model_class: Any, config: ModelConfig, untested: Sequence[str]) -> Packing:
    from packhorse.families.probe import probe

    result = probe(model_class, config)
    name = model_class.__name__
    if result.problem:
        why = result.problem
        if result.wrong and not _takes_positions(model_class):
            why += f"; {name} takes no position_ids"
        return Packing((f"{name}: {why}{'' if result.wrong else _HINT}",), (), False, result.wrong)
    if untested and _takes_media(model_class, config):
        why = f"{name}: its text is right in packed rows, as measured, but no test shows that its media are"
        return Packing((why + _HINT,), result.layers, False, False)
    return Packing((), result.layers, False, no_boundaries=_NO_BOUNDARIES if result.varlen else "")


def _takes_media(model_class: type, config: ModelConfig) -> bool:
    """Whether a model takes media; Fuyu does without a part for them."""
    parameters = inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
    return bool(media_parts(config)) or any(name.startswith(_MEDIA_INPUTS) for name in parameters)


_NO_BOUNDARIES = "this model does not pass them on, or ignores them"
_HINT = (
    "; packhorse parity --model measures it with your data. If packed equals unpacked there, call "
    "packhorse.prepare(model, allow_unproven=True), and pass that model: packhorse.load(…, model=model)"
)
_ACCEPTED = "_packhorse_accepted_unproven"


def packing_problems(model: object) -> tuple[str, ...]:
    """Why packed rows would not give what their samples give alone; see :func:`inspect_packing`."""
    return inspect_packing(model).problems


def known_problems(model: object) -> tuple[str, ...]:
    """As :func:`packing_problems`, but without the objection that nothing proves that a model is right."""
    packing = inspect_packing(model)
    return packing.problems if packing.known else ()


def accept_unproven(model: object) -> None:
    """Let checks accept a model although nothing proves that packed rows are right for it."""
    setattr(unwrap(model), _ACCEPTED, True)


def is_accepted(model: object, packing: Packing) -> bool:
    """Return whether a model has no problems, or lacks only a proof and the user has accepted that."""
    return not packing.problems or (not packing.known and hasattr(resolve_model(model)[0], _ACCEPTED))


def check_packable(model: object, *, measured: bool = False, trains: bool = True) -> Packing:
    """Return how a model can be trained on packed rows; raise ConfigError if it has problems.

    Args:
        model: a model, its config, or the folder or hub name of one.
        measured: only problems that are known count, because the user measures the model.
        trains: packed rows go through this very model, so its layers that carry state must be prepared.
    """
    inner, config = resolve_model(model)
    model = config if inner is None else model
    packing = inspect_packing(model)
    if not is_accepted(model, packing) and (packing.known or not measured):
        raise packing_error(packing)
    if trains and not measured and (problem := unprepared_layers(model, packing)):
        raise ConfigError(f"{problem}: call packhorse.prepare(model) first", setting="model")
    return packing


def unprepared_layers(model: object, packing: Packing | None = None) -> str:
    """Return which layers of a model carry state over documents until it is prepared; empty if none do.

    ``packing`` is what :func:`inspect_packing` returned for the model, if the caller has it.
    """
    packing = inspect_packing(model) if packing is None else packing
    inner = resolve_model(model)[0] if packing.layers else None
    if inner is None or is_installed(inner, packing.layers):
        return ""
    return (
        f"{', '.join(packing.layers)} of {type(inner).__name__} carries state from one document of a packed "
        "row to the next, whatever the attention mask says"
    )


def boundaries_error(problem: str) -> ConfigError:
    """The error for attention that takes boundaries of documents, from :attr:`Packing.no_boundaries`."""
    what = f"varlen and flash attention take the boundaries of documents, and {problem}"
    remedy = "use attn_implementation='sdpa', 'eager' or 'flex_attention'"
    return ConfigError(f"{what}: {remedy}", setting="attn_implementation")


def packing_error(packing: Packing) -> ConfigError:
    """The error for a model that has problems in packed rows."""
    remedy = "Use padded batches" if packing.known else "Or use padded batches"
    what = f'this model cannot be trained on packed rows: {"; ".join(packing.problems)}. {remedy}: mode="pad"'
    return ConfigError(what, setting="model")


def layer_kinds(config: ModelConfig) -> dict[str, int]:
    """Return the kinds of layers that a config of a decoder lists, with the first layer of each."""
    first: dict[str, int] = {}
    for name in LAYER_LISTS:
        kinds = getattr(config, name, None) or ()
        for index, kind in enumerate(islice(kinds, getattr(config, "num_hidden_layers", None))):
            first.setdefault(str(kind), index)
    return first


def _problems(model: torch.nn.Module | None, config: ModelConfig) -> Iterator[str]:
    """Yield what no measurement on text shows, or needs."""
    text = text_config(config)
    if model is None and not model_classes(config):
        yield (
            f"{type(config).__name__} is not a config of transformers, so its layers are unknown: pass the "
            "model itself"
        )
    if getattr(config, "is_encoder_decoder", False):
        yield "its encoder and the attention to it know nothing of documents"
    if getattr(text, "cross_attention_layers", None):
        yield "text attends to images in layers of cross attention, which know nothing of documents"
    if config.model_type == "paligemma":
        yield "PaliGemma's question attends to itself bidirectionally, which packed batches have no mask for"


def _may_carry_state(model: torch.nn.Module | None, config: ModelConfig, text: ModelConfig) -> bool:
    """Whether a kind of layer is listed, or a class used, that no test has shown to keep documents apart."""
    if layer_kinds(text).keys() - _PROVEN_LAYERS:
        return True
    if model is None:
        classes = (*model_classes(config), *(model_classes(text) if text is not config else ()))
    else:
        classes = tuple({type(module): None for module in model.modules()})
    # transformers has no public name for this flag.
    return any(getattr(kind, "_is_stateful", False) for kind in classes)


def _takes_positions(model_class: type) -> bool:
    """Keyword arguments that a forward pass does not name are silently lost in many classes."""
    parameters = inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
    return "position_ids" in parameters or any(p.kind is p.VAR_POSITIONAL for p in parameters.values())


def _problems_of_adapters(model: object) -> Iterator[str]:
    modules: Iterable[object] = getattr(model, "modules", tuple)()
    configs = [getattr(module, "peft_config", None) for module in modules]
    adapters = [adapter for config in configs if isinstance(config, dict) for adapter in config.values()]
    for adapter_class, adapter in {type(adapter): adapter for adapter in adapters}.items():
        if getattr(adapter, "is_prompt_learning", False):
            yield f"{adapter_class.__name__} adds its virtual tokens once for each row, not for each document"
