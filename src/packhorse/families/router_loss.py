"""The auxiliary loss of a mixture of experts, in which only tokens of documents count.

With ``output_router_logits=True`` the head of a model computes it from the router logits of all tokens and
the attention mask [B, S]. The mask of a packed batch has another form, or there is none, and the tokens of
placeholders attend like any others. So a packed batch says which tokens count (:data:`ROUTER_MASK`), and
:func:`install_router_loss` gives these to the head as its attention mask, and the mask of the batch to its
decoder. How the head computes and scales the loss differs by class and does not change.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

from packhorse.errors import ConfigError
from packhorse.families.models import (
    CACHES,
    resolve_model,
    router_loss_coefficient,
    text_config,
    unwrap,
)

ROUTER_MASK = "router_mask"
"""Name of the input that says which tokens count, bool [B, S]."""

_ROUTED_TOKENS = "_packhorse_router_loss"
_INSTANCE_FORWARD = "_packhorse_router_loss_forward"
_WRAPPER = "_packhorse_takes_router_mask"


class RoutedTokens:
    """The attention mask of a batch, between a head that has another one and its decoder."""

    def __init__(self) -> None:
        self._shape: torch.Size | None = None
        self._mask: Any = None

    def hold(self, mask: Any, tokens: torch.Tensor) -> None:
        """Keep the mask of the decoder, while its head has ``tokens`` as attention mask."""
        self._shape, self._mask = tokens.shape, mask

    def release(self) -> bool:
        """Forget the mask; return whether the decoder has got it."""
        delivered = self._shape is None
        self._shape = self._mask = None
        return delivered

    def give_mask(
        self, module: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Replace the mask before the forward pass of the decoder; raise if the head was replaced."""
        if ROUTER_MASK in options:
            raise ConfigError(
                f"something replaced the forward pass of the head of {type(module).__name__} after "
                "packhorse.prepare(model), or the model was pickled, so padding would count in the auxiliary "
                "loss of the router: call prepare again after that. If it still fails, load the model again "
                "and call prepare last",
                setting="model",
            )
        mask = options.get("attention_mask")
        # By shape: FSDP may have copied it.
        if self._shape is None or not isinstance(mask, torch.Tensor) or mask.shape != self._shape:
            return None
        self._shape = None
        return arguments, {**options, "attention_mask": self._mask}


def has_router_loss(config: Any) -> bool:
    """Return whether a model with this config adds the auxiliary loss of its router."""
    parts = () if config is None else (config, text_config(config))
    return any(getattr(part, "output_router_logits", False) for part in parts)


@contextmanager
def without_router_loss(config: Any) -> Iterator[None]:
    """Let a model with this config compute logits alone, of packed batches too, prepared or not."""
    parts = [part for part in (config, text_config(config)) if hasattr(part, "output_router_logits")]
    before = [part.output_router_logits for part in parts]
    try:
        for part in parts:
            part.output_router_logits = False
        yield
    finally:
        for part, value in zip(parts, before, strict=True):
            part.output_router_logits = value


def takes_router_mask(model: object) -> bool:
    """Return whether :func:`install_router_loss` has prepared the model (None: there is none)."""
    return hasattr(model, _ROUTED_TOKENS)


def check_router_loss(config: Any, takes_mask: bool) -> None:
    """Raise if padding would change what the model adds to cross entropy.

    Args:
        config: of the model; None if unknown.
        takes_mask: whether the model computes the auxiliary loss of its router from tokens of documents
            (:func:`takes_router_mask`).
    """
    if config is None:
        return
    text = text_config(config)
    check_z_loss(text)
    if getattr(config, "output_router_logits", False) and not getattr(text, "output_router_logits", True):
        raise ConfigError.of(
            "output_router_logits",
            True,
            f"it is set in {type(config).__name__}, but not in the part of it that the decoder reads: "
            "set model.config.get_text_config().output_router_logits = True",
        )
    if has_router_loss(config) and not takes_mask:
        raise ConfigError.of(
            "output_router_logits",
            True,
            "the model counts padding and placeholders in the auxiliary loss of its router, or fails. Call "
            "packhorse.prepare(model) first, and pass the model itself: packhorse.load(…, model=model). To "
            "train without this loss, set model.config.get_text_config().output_router_logits = False",
        )


def check_model_router_loss(model: object) -> None:
    """As :func:`check_router_loss`, for a model in any wrapper."""
    inner, config = resolve_model(model)
    check_z_loss(inner)
    check_router_loss(config, takes_router_mask(inner))


def check_z_loss(part: object) -> None:
    """Raise if a model, or its config, has a z-loss; a model uses its own value, not that of its config."""
    if coefficient := getattr(part, "z_loss_coefficient", None):
        raise ConfigError.of(
            "z_loss_coefficient",
            coefficient,
            "the model adds a z-loss, a mean over all tokens that counts padding and placeholders, so it "
            "depends on how rows are packed. Set model.z_loss_coefficient = 0 and "
            "model.config.get_text_config().z_loss_coefficient = 0 to train without it",
        )


def scaled_router_loss(model: object, output: Any) -> torch.Tensor | None:
    """Return the auxiliary loss in an output of a model times the model's coefficient; None without one.

    Raises:
        ConfigError: the model is not prepared, so that padding counts.
    """
    auxiliary = output.get("aux_loss") if isinstance(output, Mapping) else getattr(output, "aux_loss", None)
    if not isinstance(auxiliary, torch.Tensor):
        return None
    check_model_router_loss(model)
    return router_loss_coefficient(model) * auxiliary


def install_router_loss(model: object) -> None:
    """Let the head of a model take :data:`ROUTER_MASK`; nothing happens to a model without experts.

    Batches that are not packed, generation and a model with ``output_router_logits=False`` run as before. A
    head that has lost its forward pass (others replace it too) gets it back.
    """
    inner = unwrap(model)
    parts = (inner.config, text_config(inner.config))
    if not any(hasattr(part, "output_router_logits") for part in parts):
        return
    if not takes_router_mask(inner):
        routed_tokens = RoutedTokens()
        setattr(inner, _ROUTED_TOKENS, routed_tokens)
        for child in inner.children():
            # First, because layers with state look for documents in the mask of the batch.
            child.register_forward_pre_hook(routed_tokens.give_mask, with_kwargs=True, prepend=True)
    elif not _has_lost_forward(inner):
        return
    vars(inner).pop(_INSTANCE_FORWARD, None)
    if (instance_forward := vars(inner).get("forward")) is not None:
        setattr(inner, _INSTANCE_FORWARD, instance_forward)
    # Not hooks of the head: older PEFT calls its forward pass without them. Bound, so that deepcopy binds the
    # copy.
    inner.forward = MethodType(_wrap_forward(inspect.unwrap(type(inner).forward)), inner)


def _has_lost_forward(model: Any) -> bool:
    """Return whether a call of the model is one of its class again.

    A function that wraps the forward pass without naming it in ``__wrapped__`` calls it: that is no loss.
    """
    forward = vars(model).get("forward")
    if forward is None:
        return True
    innermost = inspect.unwrap(forward, stop=lambda function: hasattr(function, _WRAPPER))
    function = getattr(innermost, "__func__", innermost)
    return function is inspect.unwrap(type(model).forward) and not hasattr(innermost, _WRAPPER)


def _wrap_forward(original: Any) -> Any:
    """Return a forward pass that takes a router mask, with the signature of ``original``."""
    signature = inspect.signature(original)
    names = tuple(signature.parameters)[1:]

    def forward(self: Any, *arguments: Any, router_mask: torch.Tensor | None = None, **options: Any) -> Any:
        inner_forward = vars(self).get(_INSTANCE_FORWARD) or functools.partial(type(self).forward, self)
        inputs = {**dict(zip(names, arguments, strict=False)), **options}
        if router_mask is None:
            _check_unpacked(self, inputs)
            return inner_forward(*arguments, **options)
        return _run_with_router_mask(self, inner_forward, router_mask, inputs)

    functools.update_wrapper(forward, original)
    forward.__signature__ = signature  # type: ignore[attr-defined]
    setattr(forward, _WRAPPER, True)
    # To remove autocast, Accelerate follows __wrapped__ to its end and binds that function: it must be ours,
    # and not a bound method.
    del forward.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(forward)
    def call_forward(self: Any, *arguments: Any, **options: Any) -> Any:
        return forward(self, *arguments, **options)

    return call_forward


def _check_unpacked(model: Any, inputs: Mapping[str, Any]) -> None:
    """Raise if a packed batch does not say which of its tokens count in the auxiliary loss."""
    adds_loss = inputs.get("output_router_logits")
    if not (has_router_loss(model.config) if adds_loss is None else adds_loss):
        return
    if any(inputs.get(name) is not None for name in CACHES):  # generation
        return
    mask = inputs.get("attention_mask")
    is_padding_mask = isinstance(mask, torch.Tensor) and mask.dim() == 2
    if (mask is not None and not is_padding_mask) or inputs.get("cu_seq_lens_q") is not None:
        raise ConfigError.of(
            "output_router_logits",
            True,
            f"the batch has no '{ROUTER_MASK}', which says what tokens count in the auxiliary loss of the "
            "router. Set model.config.get_text_config().output_router_logits = True before "
            "packhorse.load(…, model=model); pass config=model.config to a collate function that you call",
        )


def _run_with_router_mask(
    model: Any, inner_forward: Any, router_mask: torch.Tensor, inputs: dict[str, Any]
) -> Any:
    """Run the forward pass of a head with the tokens that count."""
    routed_tokens: RoutedTokens = getattr(model, _ROUTED_TOKENS)
    return_dict = inputs.pop("return_dict", None)
    return_dict = model.config.return_dict if return_dict is None else return_dict
    any_counts = router_mask.any()
    # In a batch of placeholders nothing counts, and a mean over no token has no value: it is removed below.
    tokens = (router_mask | ~any_counts).to(torch.int64)
    routed_tokens.hold(inputs.get("attention_mask"), tokens)
    try:
        output = inner_forward(**{**inputs, "attention_mask": tokens, "return_dict": True})
    finally:
        mask_delivered = routed_tokens.release()
    if not mask_delivered:
        raise ConfigError(
            f"{type(model).__name__} does not pass attention_mask on to its decoder, so documents of a pack "
            "would not be kept apart: set output_router_logits = False",
            setting="output_router_logits",
        )
    auxiliary = output.get("aux_loss")
    if isinstance(auxiliary, torch.Tensor):
        _check_gradient(model, output.logits, auxiliary)
        # Subtracted, not multiplied by 0: values and gradients of other batches do not change at all.
        excess = torch.where(any_counts.to(auxiliary.device), 0, auxiliary)
        output["aux_loss"] = auxiliary - excess
        if output.get("loss") is not None:
            output["loss"] = output.loss - router_loss_coefficient(model) * excess.to(output.loss.device)
    return output if return_dict else output.to_tuple()


def _check_gradient(model: Any, logits: torch.Tensor, auxiliary: torch.Tensor) -> None:
    """Raise if checkpointed layers have computed router logits without a graph."""
    if auxiliary.requires_grad or not logits.requires_grad or not model.is_gradient_checkpointing:
        return
    embeddings = model.get_output_embeddings()
    head = set() if embeddings is None else {id(weight) for weight in embeddings.parameters()}
    if any(weight.requires_grad and id(weight) not in head for weight in model.parameters()):
        raise ConfigError(
            "the auxiliary loss of the router has no gradient with reentrant gradient checkpointing: set "
            'gradient_checkpointing_kwargs={"use_reentrant": False}',
            setting="gradient_checkpointing_kwargs",
        )
