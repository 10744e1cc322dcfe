"""Decide whether a model gives packed rows the results that it gives their samples alone.

:func:`inspect_packing` is the one place that decides: the model types of :data:`PACKABLE` do, as tests of
this project show. Any other class is measured on a tiny copy (:mod:`.probe`). Layers that carry state are
called document by document (:mod:`.stateful`), which ``packhorse.prepare`` sets up.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch

from packhorse.errors import ConfigError, require
from packhorse.families.models import (
    ModelConfig,
    class_of,
    media_parts,
    model_classes,
    resolve_model,
    text_config,
    unwrap,
)
from packhorse.families.stateful import KERNEL_PACKAGES, STATEFUL_LAYERS, has_document_bounds
from packhorse.families.tiny import LAYER_LISTS

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
STATE_WEIGHTS = frozenset({"A_log", "dt_bias", "time_decay"})
"""Names of the weights of recurrences in transformers."""
_RECURRENT = (torch.nn.RNNBase, torch.nn.RNNCellBase, torch.nn.Conv1d)  # a convolution unless of one token
# Packages whose modules compute each token alone, or what the module does that they replace.
_KNOWN_PACKAGES = frozenset(
    {
        *("torch", "transformers", "timm", "peft", "accelerate", "deepspeed", "bitsandbytes"),
        *("torchao", "gptqmodel", "awq", "hqq", "optimum", "quanto", "compressed_tensors", "auto_round"),
        *("eetq", "liger_kernel", "kernels", "flash_attn", "xformers", "apex", "transformer_engine"),
        *KERNEL_PACKAGES,
        *sys.stdlib_module_names,
    }
)
_NO_BOUNDARIES = "this model does not pass them on, or ignores them"
_HINT = (
    "packhorse parity --model measures it with your data (packhorse.tools.parity.check_parity if you changed "
    "the model). If packed equals unpacked there, call packhorse.prepare(model, allow_unproven=True), and "
    "pass that model: packhorse.load(…, model=model)"
)
_ACCEPTED = "_packhorse_accepted_unproven"


@dataclass(frozen=True, slots=True, kw_only=True)
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
        no_eager: why eager attention would be wrong; empty if it is right.
    """

    problems: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    tested: bool = True
    known: bool = True
    no_boundaries: str = ""
    no_eager: str = ""


def inspect_packing(model: object) -> Packing:
    """Return whether a model can be trained on packed rows.

    Args:
        model: a model, its config, or the folder or hub name of one.

    Raises:
        ConfigError: it is no model.
    """
    inner, config = resolve_model(model)
    text = text_config(config)
    layers = STATEFUL_LAYERS.get(text.model_type, ())
    modules = _inspect_modules(model, inner, config, layers)
    problems = (*_problems(inner, config), *_problems_of_adapters(modules.adapters))
    if problems:
        return Packing(problems=problems)
    if inner is None and (what := _describe_own_code(config)):
        return _unproven(f"{what}: pass the model itself, packhorse.load(…, model=model)")
    untested = [name for name in dict.fromkeys((config.model_type, text.model_type)) if name not in PACKABLE]
    model_class = class_of(inner) if inner is not None else model_classes(config)[0]
    ours = model_class.__module__.startswith("transformers.")
    if ours and not untested and _has_tested_layers(inner, config, layers, modules):
        if inner is not None and (what := _describe_replaced(inner, modules)):
            return _unproven(f"{model_class.__name__}: {what}", layers)
        ignores = text.model_type in _IGNORE_BOUNDARIES
        return Packing(layers=layers, no_boundaries=_NO_BOUNDARIES if ignores else "")
    if odd := {kind: index for kind, index in layer_kinds(text).items() if kind not in _MEASURABLE_LAYERS}:
        layers_named = ", ".join(f"layer {index} ({kind})" for kind, index in odd.items())
        why = f"{model_class.__name__}: no test shows that {layers_named} keeps the documents of a row apart"
        return _unproven(why)
    measured = _measure_packing(model_class, config, untested)
    if inner is None or measured.problems or not modules.not_checked():
        return measured
    from packhorse.families.probe import module_classes

    if what := _describe_replaced(inner, modules, module_classes(model_class, config)):
        return replace(measured, problems=(f"{model_class.__name__}: {what}",), known=False)
    return measured


def _unproven(problem: str, layers: tuple[str, ...] = ()) -> Packing:
    return Packing(problems=(problem,), layers=layers, tested=False, known=False)


def _describe_own_code(config: ModelConfig) -> str:
    """Return what class a checkpoint names that is not of transformers, but its own code; empty if none."""
    names = getattr(config, "architectures", None) or ()
    own = any(name.startswith("AutoModel") for name in getattr(config, "auto_map", None) or ())
    transformers: Any = require("transformers", "train")
    if not own or not names or any(hasattr(transformers, name) for name in names):
        return ""
    return f"the checkpoint comes with code for its class {names[0]}, and its config does not show its layers"


def _describe_replaced(
    model: torch.nn.Module, modules: _Modules, expected: frozenset[type] = frozenset()
) -> str:
    """Return a module of a model that its class does not have, and that may mix documents; empty if none."""
    for kind, module in modules.not_checked().items():
        if expected.intersection(kind.__mro__):
            continue
        name = next(name for name, part in model.named_modules() if part is module)
        what = "is no module of this class, and nothing shows that it keeps the documents of a row apart"
        if kind in modules.recurrent:
            what = "carries state along the row, as no layer of its class does"
        return f"{name} ({kind.__name__}) {what}"
    return ""


def _measure_packing(model_class: Any, config: ModelConfig, untested: Sequence[str]) -> Packing:
    from packhorse.families.probe import probe

    result = probe(model_class, config)
    name = model_class.__name__
    if result.problem:
        why = result.problem
        if result.wrong and not _takes_positions(model_class):
            why += f"; {name} takes no position_ids"
        problem = f"{name}: {why}"
        return Packing(problems=(problem,), tested=False, known=result.wrong)
    no_boundaries = _NO_BOUNDARIES if result.varlen else ""
    packing = Packing(layers=result.layers, tested=False, no_boundaries=no_boundaries, no_eager=result.eager)
    if untested and _takes_media(model_class, config):
        why = f"{name}: its text is right in packed rows, as measured, but no test shows that its media are"
        return replace(packing, problems=(why,), known=False)
    return packing


def _takes_media(model_class: type, config: ModelConfig) -> bool:
    """Whether a model takes media; Fuyu does without a part for them."""
    parameters = inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
    return bool(media_parts(config)) or any(name.startswith(_MEDIA_INPUTS) for name in parameters)


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
    check_decoder(config)
    model = config if inner is None else model
    packing = inspect_packing(model)
    if not is_accepted(model, packing) and (packing.known or not measured):
        raise packing_error(packing)
    prepared = inner is not None and has_document_bounds(inner, packing.layers)
    if trains and not measured and packing.layers and not prepared:
        raise unprepared_error(config if inner is None else inner, packing.layers)
    return packing


def check_decoder(config: ModelConfig) -> None:
    """Raise ConfigError for an encoder-decoder: a row of a batch has the prompt and the answer."""
    if getattr(config, "is_encoder_decoder", False):
        what = f"the model is an encoder-decoder ({config.model_type}), whose encoder would see the answers:"
        raise ConfigError(f"{what} batches are for decoders, in packs and in padded rows", setting="model")


def unprepared_layers(model: object) -> str:
    """Return which layers of a model carry state over documents until it is prepared; empty if none do."""
    inner, layers = resolve_model(model)[0], inspect_packing(model).layers
    if inner is None or has_document_bounds(inner, layers):
        return ""
    return _describe_state(inner, layers)


def _describe_state(model: object, layers: Sequence[str]) -> str:
    return (
        f"{', '.join(layers)} of {type(model).__name__} carries state from one document of a packed "
        "row to the next, whatever the attention mask says"
    )


def unprepared_error(model: object, layers: Sequence[str]) -> ConfigError:
    """The error for a model, or its config, whose layers with state are not called document by document."""
    what = f"{_describe_state(model, layers)}: call packhorse.prepare(model) first"
    if not isinstance(model, torch.nn.Module):
        what += ", and pass that model: packhorse.load(…, model=model)"
    return ConfigError(what, setting="model")


def boundaries_error(problem: str) -> ConfigError:
    """The error for attention that takes boundaries of documents, from :attr:`Packing.no_boundaries`."""
    what = f"varlen and flash attention take the boundaries of documents, and {problem}"
    remedy = "use attn_implementation='sdpa', 'eager' or 'flex_attention'"
    return ConfigError(f"{what}: {remedy}", setting="attn_implementation")


def packing_error(packing: Packing) -> ConfigError:
    """The error for a model that has problems in packed rows."""
    remedy = "Use padded batches" if packing.known else "Or use padded batches"
    hint = "" if packing.known else f"; {_HINT}"
    problems = "; ".join(packing.problems)
    what = f'this model cannot be trained on packed rows: {problems}{hint}. {remedy}: mode="pad"'
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
        yield "its encoder and the attention to it do not separate documents"
    if getattr(text, "cross_attention_layers", None):
        yield "text attends to images in layers of cross attention, which do not separate documents"
    if config.model_type == "paligemma":
        yield "PaliGemma's question attends to itself bidirectionally, which packed batches have no mask for"


@dataclass(slots=True)
class _Modules:
    """The modules of a model, without those of its parts for media and those inside of known layers.

    Attributes:
        first: the first module of each class.
        layers: names of classes of layers that carry state, of those that are known.
        recurrent: other modules that carry state, the first of each class.
        adapters: configs of PEFT's adapters.
    """

    first: dict[type, torch.nn.Module] = field(default_factory=dict)
    layers: set[str] = field(default_factory=set)
    recurrent: dict[type, torch.nn.Module] = field(default_factory=dict)
    adapters: list[object] = field(default_factory=list)

    def not_checked(self) -> dict[type, torch.nn.Module]:
        """Return the first module of each class that carries state, or has code of an unknown package."""
        return self.recurrent | {kind: module for kind, module in self.first.items() if _is_unknown(kind)}


def _inspect_modules(
    model: object, inner: torch.nn.Module | None, config: ModelConfig, layers: Sequence[str]
) -> _Modules:
    """Go once through the modules of a model, and those that wrap it: every batch is checked."""
    result = _Modules()
    towers = {type(getattr(config, name)) for name in media_parts(config)} - {
        type(config),
        type(text_config(config)),
    }
    plain: set[type] = set()  # classes whose modules have nothing but children
    names: dict[type, str] = {}  # of layers that carry state, by class
    seen: set[int] = set()
    for root in (inner, model):
        stack: list[Any] = [root] if isinstance(root, torch.nn.Module) else []
        while stack:
            module = stack.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            # named_modules() and parameters() take five times as long: 10 ms for a large model with LoRA.
            values, children, kind = vars(module), module._modules, type(module)
            if kind not in plain:
                if "peft_config" in values or hasattr(kind, "peft_config"):
                    adapters = module.peft_config
                    result.adapters.extend(adapters.values() if isinstance(adapters, dict) else ())
                if root is inner:
                    if type(values.get("config")) in towers:
                        continue
                    # PEFT's modules_to_save: the wrapper may have children that never run, next to the layer.
                    kind = type(children.get("original_module", module))
                    if kind not in names:
                        names[kind] = next(
                            (base.__name__ for base in kind.__mro__ if base.__name__ in layers), ""
                        )
                    if names[kind]:
                        continue
                    result.first.setdefault(kind, module)
                    if kind not in result.recurrent and _is_recurrent(module):
                        result.recurrent[kind] = module
                if kind.__module__.startswith("torch.nn.") and not issubclass(kind, _RECURRENT):
                    plain.add(kind)
            if children:
                stack.extend(children.values())
    result.layers.update(filter(None, names.values()))
    return result


def _is_unknown(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] not in _KNOWN_PACKAGES for base in kind.__mro__)


def _is_recurrent(module: torch.nn.Module) -> bool:
    """Whether a module is a recurrence or a convolution along the sequence, as far as its class shows."""
    # named_parameters() is too slow for every module of every batch, see _inspect_modules.
    if not STATE_WEIGHTS.isdisjoint(module._parameters):
        return True
    return isinstance(module, _RECURRENT) and getattr(module, "kernel_size", None) != (1,)


def _has_tested_layers(
    model: torch.nn.Module | None, config: ModelConfig, layers: Sequence[str], modules: _Modules
) -> bool:
    """Whether a model of a tested type has the layers that were tested; later versions may rename them."""
    text = text_config(config)
    classes = set(modules.first)
    if model is None:
        classes = {*model_classes(config), *(model_classes(text) if text is not config else ())}
    if not layers:
        return not _has_untested_layers(classes, text)
    if model is not None:
        return modules.layers.issuperset(layers)
    files = {kind.__module__ for kind in classes} & sys.modules.keys()
    names = {getattr(value, "__name__", "") for file in files for value in vars(sys.modules[file]).values()}
    return names.issuperset(layers)


def _has_untested_layers(classes: set[type], text: ModelConfig) -> bool:
    """Whether a kind of layer is listed, or a class used, that no test has shown to keep documents apart."""
    if layer_kinds(text).keys() - _PROVEN_LAYERS:
        return True
    # transformers has no public name for this flag.
    return any(getattr(kind, "_is_stateful", False) for kind in classes)


def _takes_positions(model_class: type) -> bool:
    """Keyword arguments that a forward pass does not name are silently lost in many classes."""
    parameters = inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
    return "position_ids" in parameters or any(p.kind is p.VAR_POSITIONAL for p in parameters.values())


def _problems_of_adapters(adapters: Sequence[object]) -> Iterator[str]:
    for adapter_class, adapter in {type(adapter): adapter for adapter in adapters}.items():
        if getattr(adapter, "is_prompt_learning", False):
            yield f"{adapter_class.__name__} adds its virtual tokens once for each row, not for each document"
        if getattr(adapter, "alora_invocation_tokens", None):
            yield "aLoRA is active from its invocation tokens to the end of the row, not of each document"
