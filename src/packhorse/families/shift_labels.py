"""Whether a model's own loss takes labels that are shifted already.

The labels of a batch are shifted, and the batch has them a second time as ``shift_labels``: a loss that gets
these does not shift again. Some model classes of older transformers (Qwen3-VL and Gemma 3 before 5.17) drop
that argument on the way to their loss, and shift ``labels`` once more.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import torch

from packhorse.errors import ConfigError, require
from packhorse.families.models import model_classes, resolve_model, text_config, unwrap

_MADE_TO = "_packhorse_shift_labels"


def honours_shift_labels(model: Any) -> bool:
    """Whether ``model(labels=…, shift_labels=…).loss`` uses ``shift_labels`` as they are.

    Args:
        model: a model of transformers, also inside PEFT, DDP or ``torch.compile``, or its class.
    """
    if isinstance(model, type):
        return _passes_on(model)
    inner = unwrap(model)
    return bool(getattr(inner, _MADE_TO, False)) or _passes_on(type(inner))


def make_honour_shift_labels(model: Any) -> None:
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


def check_shift_labels(model: Any) -> None:
    """Raise if ``model(**batch).loss`` would shift the labels of a batch a second time.

    Args:
        model: a model of transformers, also inside a wrapper; or the config of one, for which the class that
            transformers has for it is looked at.

    Raises:
        ConfigError: naming the class, and what to do.
    """
    inner, config = resolve_model(model)
    kind = type(inner) if inner is not None else next(iter(model_classes(config)), None)
    # Encoder-decoder models do not shift labels at all, and other classes may compute any loss they like.
    if kind is None or config.is_encoder_decoder or not kind.__module__.startswith("transformers."):
        return
    learns = "labels" in inspect.signature(kind.forward).parameters  # type: ignore[attr-defined]
    if learns and not honours_shift_labels(kind if inner is None else inner):
        version = require("transformers", "train").__version__
        # prepare is for packed batches, which the router's loss cannot be computed for.
        routed = getattr(text_config(config), "output_router_logits", False)
        call = "shift_labels.make_honour_shift_labels" if routed else "integrations.transformers.prepare"
        passed = "" if inner is not None else " and pass the model itself"
        raise ConfigError(
            f"{kind.__name__} of transformers {version} drops shift_labels, so model(**batch).loss would "
            f"shift labels twice: call packhorse.{call}(model) first{passed}, or install a newer transformers"
        )


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
    module: Any, arguments: Any, options: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    if options.get("shift_labels") is None:
        return None
    return arguments, {key: value for key, value in options.items() if key != "labels"}


def _with_loss(module: Any, arguments: Any, options: dict[str, Any], output: Any) -> Any:
    labels = options.get("shift_labels")
    if labels is None:
        return None
    whole = not isinstance(output, tuple)
    if whole:
        logits, auxiliary = output.logits, output.get("aux_loss")
    else:  # where an auxiliary loss is depends on the class, but it is one number
        tensors = [part for part in output if isinstance(part, torch.Tensor)]
        logits = next(part for part in tensors if part.dim())
        auxiliary = next((part for part in tensors if not part.dim()), None)
    loss = require("transformers.loss.loss_utils", "train").ForCausalLMLoss(
        logits,
        None,
        logits.shape[-1],
        num_items_in_batch=options.get("num_items_in_batch"),
        shift_labels=labels,
    )
    if auxiliary is not None:
        loss = loss + text_config(module.config).router_aux_loss_coef * auxiliary
    return type(output)(**{**output, "loss": loss}) if whole else (loss, *output)
