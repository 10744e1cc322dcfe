"""Models and processors of transformers: opened by name, and found inside wrappers.

:func:`honours_shift_labels` says whether a model's own loss takes labels that are shifted already. Nothing is
computed and no weight is read. :mod:`.packing` says whether a model can be trained on packed rows.
"""

from __future__ import annotations

import ast
import http.client
import inspect
import json
import os
import re
import ssl
import sys
import textwrap
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from logging import getLogger
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol

from packhorse.chat import Processor, is_tokenizer, tokenizer_of
from packhorse.errors import ConfigError, require

if TYPE_CHECKING:
    import torch

logger = getLogger("packhorse.families.models")

UNCHECKED = "unchecked"
"""``model="unchecked"``: pack without a model, at the user's own risk."""

CACHES = ("past_key_values", "past_key_value", "cache_params", "layer_past", "cache")
"""Arguments of forward passes that hold what earlier tokens left: with one of them, a model generates."""

_MEDIA_PARTS = ("vision", "audio", "vq_", "image", "speech")  # in names of parts of a config
_WRAPPED = ("_orig_mod", "module", "_fsdp_wrapped_module")  # torch.compile, DDP and DeepSpeed, FSDP
_HUB_SECONDS = 5.0
# What transformers raises for JSON files that are not valid, or valid with other content than it expects.
_BROKEN_FILES = (OSError, ValueError, LookupError, TypeError, AttributeError)
EXPECTED = "a model of transformers, its config, or the folder or hub name of one"


class ModelConfig(Protocol):
    """A config of transformers: its other attributes differ by model type."""

    model_type: str

    def get_text_config(self) -> Any:
        """Return the part for the decoder."""

    def __getattr__(self, name: str) -> Any: ...


def is_unchecked(model: object) -> bool:
    """Whether the user opted out of checking the model."""
    return isinstance(model, str) and model == UNCHECKED


def unwrap(model: object) -> Any:
    """Return the model inside PEFT, DDP, FSDP, DeepSpeed and ``torch.compile``; ConfigError if none."""
    *_, inner = _unwrap_steps(model)
    # Qwen-Omni's whole model has no forward pass: what is trained is its thinker.
    return getattr(inner, "thinker", inner)


def is_compiled(model: object) -> bool:
    """Return whether ``torch.compile`` is one of the wrappers of a model."""
    return any("_orig_mod" in _contents(part) for part in _unwrap_steps(model))


def has_virtual_tokens(model: object) -> bool:
    """Return whether an adapter of PEFT around a model puts tokens of its own before each row."""
    configs = (getattr(part, "active_peft_config", None) for part in _unwrap_steps(model))
    return any(getattr(config, "is_prompt_learning", False) for config in configs)


def _unwrap_steps(model: object) -> Iterator[Any]:
    """Yield a wrapper, what it wraps, and so on to the model; ConfigError if there is none."""
    inner: Any = model
    yield inner
    while not _is_model(inner):
        if callable(getattr(inner, "get_base_model", None)):  # PEFT
            inner = inner.get_base_model()
        else:
            parts = (getattr(inner, name, None) for name in _WRAPPED)
            inner = next((part for part in parts if part is not None), None)
        if inner is None:
            name = type(model).__name__
            what = f"model is a {name} without a config: expected {EXPECTED}"
            if name == "Prepared":
                what = (
                    "model is the report of packhorse.prepare, which changes the model itself: pass the model"
                )
            raise ConfigError(what, setting="model", value=name)
        yield inner


def _is_model(value: object) -> bool:
    wrapper = any(name in _contents(value) for name in _WRAPPED) or hasattr(type(value), "get_base_model")
    return not wrapper and hasattr(getattr(value, "config", None), "get_text_config")


def _contents(value: object) -> set[str]:
    """Names of the attributes and submodules of an object itself; a wrapper shows those of its content."""
    return {*vars(value), *vars(value).get("_modules", ())} if hasattr(value, "__dict__") else set()


def class_of(model: torch.nn.Module) -> type:
    """Return the class of a model; FSDP2 gives it a subclass of its own."""
    return next(kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch."))


def models_in(module: torch.nn.Module) -> Iterator[Any]:
    """The outermost models of transformers in a module, which may be one itself."""
    if _is_model(module) or hasattr(module, "peft_config"):
        yield module
        return
    for child in module.children():
        yield from models_in(child)


def resolve_model(model: object) -> tuple[Any | None, Any]:
    """Return a model (None if only a config is known) and its config; :data:`EXPECTED` says what to give."""
    if isinstance(model, str | os.PathLike):
        model = open_config(os.fspath(model))
    if model is None or isinstance(model, type):
        expected = f"{EXPECTED}. Write model=model, as of AutoModelForImageTextToText.from_pretrained(…)"
        raise _wrong_object("model", model, expected)
    if callable(getattr(model, "get_text_config", None)):
        return None, getattr(model, "thinker_config", model)  # as in unwrap
    inner = unwrap(model)
    return inner, inner.config


def open_config(name: str, trust_remote_code: bool = False) -> Any:
    """Return the config of a model in a folder or on the hub; ConfigError if there is none."""
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        what = f"model {name}: no config there (config.json is missing). Expected {EXPECTED}"
        raise ConfigError(what, setting="model", value=name, path=name)
    offline = check_name("model", name)
    transformers: Any = require("transformers", "train")
    wrong_values = require("huggingface_hub.errors", "train").StrictDataclassError
    try:
        return transformers.AutoConfig.from_pretrained(
            name, trust_remote_code=trust_remote_code, local_files_only=offline
        )
    except (*_BROKEN_FILES, wrong_values) as error:
        why = _describe_broken(error)
        needs_code = "trust_remote_code" in str(error)
        if needs_code:
            why = "it comes with code of its own"
        hint = ": load the model with trust_remote_code=True and pass it; commands have --trust-remote-code"
        hint = hint if needs_code else ""
        what = f"model {name}: no config there can be read ({why}){hint}"
        raise ConfigError(what, setting="model", value=name) from error


def _describe_broken(error: BaseException) -> str:
    cause = error.__cause__ or error
    name = f"{type(cause).__name__}: " if isinstance(cause, LookupError | TypeError | AttributeError) else ""
    return " ".join(f"{name}{cause}".split())[:300]


def check_name(what: str, name: str) -> bool:
    """Raise ConfigError at once if the folder or hub name of a model or processor cannot be found.

    Returns whether only the hub's cache can be used: without a network the hub's client retries for half a
    minute per file, so the hub is tried once before it.
    """
    if os.path.isdir(name):
        return False
    if os.path.exists(name):
        expected = f"{what} {name} is a file: expected the folder or hub name of a {what}"
        raise ConfigError(expected, setting=what, value=name, path=name)
    if name.split() != [name] or name.startswith((".", "/", "~")) or name.count("/") > 1:
        expected = f"{what} {name or repr(name)}: no such folder. Expected a folder or hub name"
        raise ConfigError(expected, setting=what, value=name, path=name)
    hub: Any = require("huggingface_hub.constants", "train")
    cached = os.path.join(hub.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots")
    offline = hub.HF_HUB_OFFLINE or not _hub_answers(f"{hub.ENDPOINT}/{name}")
    if os.path.isdir(cached):
        return offline
    if offline:
        why = "HF_HUB_OFFLINE is set" if hub.HF_HUB_OFFLINE else "the hub cannot be reached"
        detail = (
            f"{what} {name}: no such folder in {os.getcwd()}, not in the hub's cache, and {why}. Pass the "
            f"folder of a {what}, or download it where there is a network: hf download {name}"
        )
        raise ConfigError(detail, setting=what, value=name)
    logger.info("%s %s: no such folder in %s, so it is read from the hub", what, name, os.getcwd())
    return False


def _hub_answers(address: str) -> bool:
    """Whether anything answers there within a few seconds, which include looking up the host's name."""
    answers: list[bool] = []
    thread = Thread(target=lambda: answers.append(_is_reachable(address)), daemon=True)
    thread.start()
    thread.join(_HUB_SECONDS)
    return any(answers)


def _is_reachable(address: str) -> bool:
    """Whether anything answers there: any status will do, and so will a certificate that is rejected."""
    try:
        request = urllib.request.Request(address, method="HEAD")
        with urllib.request.urlopen(request, timeout=_HUB_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)
    except (OSError, ValueError, http.client.HTTPException):  # ValueError: HF_ENDPOINT is no address
        return False


def model_classes(config: ModelConfig) -> tuple[type, ...]:
    """Classes of transformers for a config, the one that is trained first; empty for remote code."""
    transformers: Any = require("transformers", "train")
    names = getattr(config, "architectures", None) or ()
    classes = [getattr(transformers, name, None) for name in names]
    for task in ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "CAUSAL_LM", ""):
        mapping = getattr(transformers, f"MODEL_FOR_{task}_MAPPING" if task else "MODEL_MAPPING", {})
        try:
            mapped = mapping[type(config)]
        except KeyError:
            continue
        classes += mapped if isinstance(mapped, tuple | list) else [mapped]
    return tuple(dict.fromkeys(model_class for model_class in classes if isinstance(model_class, type)))


def text_config(config: ModelConfig) -> Any:
    """Return the part of a config that describes the decoder; ConfigError if it has several."""
    try:
        return config.get_text_config()
    except ValueError as error:
        why = f"it has no single decoder ({error})"
        raise ConfigError.of("model", type(config).__name__, why) from error


def attention_of(model: object) -> str:
    """Return the attention backend of the decoder of a model or config; ``"sdpa"`` if none is set."""
    # transformers has no public way to read the attention implementation.
    return str(getattr(text_config(resolve_model(model)[1]), "_attn_implementation", None) or "sdpa")


def set_attention(model: object, attn_implementation: str) -> None:
    """Set the attention backend of the decoder of a model or config, not that of its vision tower."""
    # set_attn_implementation sets the whole model, and some classes reject a backend that their decoder runs
    # (Qwen-VL and flex_attention).
    text_config(resolve_model(model)[1])._attn_implementation = attn_implementation


def supports_sdpa(model_class: type) -> bool:
    """Return whether a class of models runs sdpa."""
    # transformers has no public name for it.
    return bool(getattr(model_class, "_supports_sdpa", False))


def media_parts(config: ModelConfig) -> tuple[str, ...]:
    """Names of the parts of a model's config that encode images, videos or audio."""
    names = {*vars(config), *getattr(config, "sub_configs", ())}
    parts = (name for name in names if name.endswith(("_config", "_encoder")))
    of_media = (name for name in parts if any(word in name for word in _MEDIA_PARTS))
    return tuple(sorted(name for name in of_media if getattr(config, name, None) is not None))


def weightless_model(config: ModelConfig) -> Any | None:
    """Build a model with mRoPE without weights (on ``meta``); None if transformers has no such class."""
    import torch

    with_mrope = (kind for kind in model_classes(config) if callable(getattr(kind, "get_rope_index", None)))
    model_class: Any = next(with_mrope, None)
    if model_class is None:
        return None
    try:
        with torch.device("meta"):
            return model_class(config)
    except (ValueError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        why = f"{model_class.__name__}, which computes positions, cannot be built ({error}): pass the model"
        raise ConfigError.of("model", type(config).__name__, why) from error


# --- shift_labels --------------------------------------------------------------------------------------

_MADE_TO = "_packhorse_shift_labels"


def honours_shift_labels(model: object) -> bool:
    """Whether ``model(labels=…, shift_labels=…).loss`` uses ``shift_labels`` as they are.

    Args:
        model: a model of transformers, also inside PEFT, DDP or ``torch.compile``, or its class.
    """
    if isinstance(model, type):
        return _passes_on(model)
    inner = unwrap(model)
    return bool(getattr(inner, _MADE_TO, False)) or _passes_on(type(inner))


def make_honour_shift_labels(model: object) -> None:
    """Let a model whose own loss drops ``shift_labels`` compute it from them; any other stays as it is.

    Two hooks of the forward pass do it: ``labels`` are not handed to the model, and the loss of its logits is
    added to the output, as transformers computes it, with the auxiliary loss of a router if there is one.
    """
    inner = unwrap(model)
    if honours_shift_labels(inner):
        return
    inner.register_forward_pre_hook(_without_labels, with_kwargs=True)
    inner.register_forward_hook(_with_loss, with_kwargs=True)
    setattr(inner, _MADE_TO, True)


def check_shift_labels(model: object) -> None:
    """Raise ConfigError if ``model(**batch).loss`` would shift the labels of a batch a second time."""
    inner, config = resolve_model(model)
    kind = type(inner) if inner is not None else next(iter(model_classes(config)), None)
    # Encoder-decoder models do not shift labels at all, and other classes may compute any loss they like.
    if kind is None or config.is_encoder_decoder or not kind.__module__.startswith("transformers."):
        return
    learns = "labels" in inspect.signature(kind.forward).parameters  # type: ignore[attr-defined]
    if learns and not honours_shift_labels(kind if inner is None else inner):
        version = require("transformers", "train").__version__
        passed = "" if inner is not None else " and pass the model itself"
        what = (
            f"{kind.__name__} of transformers {version} drops shift_labels, so model(**batch).loss would "
            f"shift labels twice: call packhorse.prepare(model) first{passed}, or upgrade transformers. For "
            "padded batches of a model that prepare rejects, call "
            "packhorse.families.models.make_honour_shift_labels(model)"
        )
        raise ConfigError(what, setting="model", value=kind.__name__)


def _passes_on(kind: type) -> bool:
    """Whether the forward pass of a class hands its loss function ``shift_labels``, or all it does not know.

    Read from the source: a call would need weights. A class without a call of ``loss_function`` computes its
    loss by hand, or none.
    """
    try:
        source = inspect.getsource(inspect.unwrap(kind.forward))  # type: ignore[attr-defined]
    except (OSError, TypeError, AttributeError):
        return False
    calls = [
        node
        for node in ast.walk(ast.parse(textwrap.dedent(source)))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "loss_function"
    ]
    return bool(calls) and all(
        any(keyword.arg in (None, "shift_labels") for keyword in call.keywords) for call in calls
    )


def _without_labels(
    module: object, arguments: Any, options: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    if options.get("shift_labels") is None:
        return None
    return arguments, {key: value for key, value in options.items() if key != "labels"}


def _with_loss(module: Any, arguments: Any, options: dict[str, Any], output: Any) -> Any:
    labels = options.get("shift_labels")
    if labels is None:
        return None
    import torch

    whole = not isinstance(output, tuple)
    if whole:
        logits, auxiliary = output.logits, output.get("aux_loss")
    else:  # where an auxiliary loss is depends on the class, but it is one number
        tensors = [part for part in output if isinstance(part, torch.Tensor)]
        logits = next(part for part in tensors if part.dim())
        auxiliary = next((part for part in tensors if not part.dim()), None)
    causal_loss = require("transformers.loss.loss_utils", "train").ForCausalLMLoss
    items = options.get("num_items_in_batch")
    loss = causal_loss(logits, None, logits.shape[-1], num_items_in_batch=items, shift_labels=labels)
    if auxiliary is not None:
        loss = loss + router_loss_coefficient(module) * auxiliary
    return type(output)(**{**output, "loss": loss}) if whole else (loss, *output)


def router_loss_coefficient(model: object) -> float:
    """Return the factor with which a model adds the auxiliary loss of its router; ConfigError without one."""
    inner = unwrap(model)
    # Most heads copy it from the config when they are built, and ignore later changes of the config.
    for owner in (inner, text_config(inner.config)):
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            if (value := getattr(owner, name, None)) is not None:
                return float(value)
    what = (
        f"{type(inner).__name__} has no router_aux_loss_coef, so the weight of its auxiliary loss is unknown"
    )
    raise ConfigError(what, setting="router_aux_loss_coef")


# --- processors ----------------------------------------------------------------------------------------


def as_processor(processor: Processor | str | os.PathLike[str] | None) -> Any:
    """Return the processor, opened if its path or hub name was given (see :func:`open_processor`)."""
    return open_processor(os.fspath(processor)) if isinstance(processor, str | os.PathLike) else processor


def as_whole_processor(processor: Processor | str | os.PathLike[str] | None) -> Any:
    """As :func:`as_processor`; ConfigError for a part of a processor, a class or None."""
    processor = as_processor(processor)
    speaks = any(hasattr(processor, name) for name in ("tokenizer", "apply_chat_template"))
    if isinstance(processor, type) or not callable(processor) or not (speaks or is_tokenizer(processor)):
        raise _wrong_object(
            "processor",
            processor,
            "the model's whole processor (with a tokenizer), or the folder or hub name of one. Write "
            "processor=AutoProcessor.from_pretrained(name)",
        )
    return processor


def _wrong_object(setting: str, value: object, expected: str) -> ConfigError:
    given = name = None if value is None else getattr(value, "__name__", type(value).__name__)
    if isinstance(value, type):
        given = f"the class {name}, not an object of it"
    return ConfigError(f"{setting} is {given}: expected {expected}", setting=setting, value=name)


def open_processor(path: str, trust_remote_code: bool = False) -> Any:
    """Open a processor by its path or hub name.

    Raises:
        ConfigError: there is none, or it cannot be opened.
    """
    here = os.path.exists(path)
    offline = check_name("processor", path)
    transformers: Any = require("transformers", "train")
    try:
        opened = transformers.AutoProcessor.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=offline
        )
    except (*_BROKEN_FILES, ImportError, RuntimeError) as error:
        why = _describe_broken(error)
        broken = "torchvision" in f"{error} {why}"
        if isinstance(error, RuntimeError) and not broken:
            raise
        what = "cannot be opened" if here or broken else "no such folder, and not available from the hub"
        hint = f"; {_torchvision_hint()}" if broken else ""
        if "trust_remote_code" in str(error):
            hint = "; read its code, then allow it with trust_remote_code=True"
        elif names := _processor_class_without_files(path):
            hint = (
                f'; its tokenizer_config.json has "processor_class": "{names}", but files of that processor '
                "are missing: save that processor there, or remove that line if the data has no media"
            )
        detail = f"processor {path}: {what} ({why}){hint}"
        raise ConfigError(detail, setting="processor", value=path, path=path if here else "") from error
    if getattr(opened, "chat_template", "") is None:
        # Some classes (Phi-4) leave it with the tokenizer, and then do not find it.
        opened.chat_template = getattr(tokenizer_of(opened), "chat_template", None)
    return opened


def _processor_class_without_files(path: str) -> str:
    """Return the processor that a folder of a tokenizer names, if its files are not there."""
    files = (os.path.join(path, name) for name in ("preprocessor_config.json", "processor_config.json"))
    if any(map(os.path.exists, files)):
        return ""
    try:
        with open(os.path.join(path, "tokenizer_config.json"), "rb") as file:
            return str(json.load(file).get("processor_class") or "")
    except (OSError, ValueError):
        return ""


def _torchvision_hint() -> str:
    """What to do where torchvision cannot be imported: mostly it was built for another torch."""
    try:
        torch, torchvision = map(metadata.version, ("torch", "torchvision"))
    except metadata.PackageNotFoundError as error:
        return f"{error.name} is not installed: pip install {error.name}"
    return (
        f"torchvision {torchvision} may not match torch {torch}: install the torchvision that was built for "
        "this torch, from the same index"
    )


def is_at_least(least: str) -> bool:
    """Whether the installed transformers is of this version or a newer one; True if it is not installed."""
    installed = installed_transformers()
    return installed is None or _numbers(installed) >= _numbers(least)


def check_transformers(what: str, least: str) -> None:
    """Raise ConfigError if the installed transformers is older than ``what`` needs."""
    if not is_at_least(least):
        raise ConfigError(
            f"{what} needs transformers {least} or newer, and {installed_transformers()} is installed: "
            f"pip install 'transformers>={least}'"
        )


def installed_transformers() -> str | None:
    """The version of transformers; None if there is none."""
    imported = sys.modules.get("transformers")
    return getattr(imported, "__version__", None) or _installed_version()


@cache
def _installed_version() -> str | None:
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None


@cache
def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
