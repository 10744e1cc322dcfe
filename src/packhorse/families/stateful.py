"""Layers that carry state along the sequence, called document by document.

Linear attention, state spaces and short convolutions see every earlier token of their row, whatever the
attention mask says. :func:`separate_documents` lets such layers of a model run on one document at a time:
documents of similar length are padded on the right and run together. A batch that is not packed, and
generation, run as before. Which classes they are says :mod:`.packing`.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from typing import Any, Protocol

import torch

from packhorse.errors import ConfigError, require

logger = getLogger("packhorse.families.stateful")

_BOUNDS = "_packhorse_bounds"
_LENGTH_STEP = 64  # the kernels compute chunks of about this many tokens anyway
_LEAST_FILL = 0.75  # a document has at least this share of the tokens of its group
_CACHES = ("past_key_values", "past_key_value", "cache_params", "layer_past", "cache")
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_DENSE, _PADDING = 4, 2  # axes of a mask [B, 1, S, S], and of one [B, S]


class _HasBounds(Protocol):
    """A module that :func:`separate_documents` has changed."""

    _packhorse_bounds: DocumentBounds


@dataclass(frozen=True, slots=True)
class Documents:
    """Where the documents of a packed batch are.

    Attributes:
        rows, length: the axes [B, S] of the batch.
        groups: for each group of similar documents, the indices [N, L] of their tokens in the flattened
            batch. A document that is shorter than L repeats its last token.
        source: for each token of the batch its index in the concatenated groups; the one after the last for a
            token of no document.
    """

    rows: int
    length: int
    groups: tuple[torch.Tensor, ...]
    source: torch.Tensor

    @classmethod
    def of(cls, numbers: torch.Tensor) -> Documents:
        """Return the documents of a batch from their numbers [B, S], which are 0 for hidden tokens."""
        rows, length = numbers.shape
        flat = numbers.detach().to("cpu", torch.int64)
        flat = (flat + torch.arange(rows)[:, None] * (length + 1) * (flat > 0)).flatten()
        visible = torch.nonzero(flat).flatten()
        # Hidden tokens inside a document do not divide it.
        _, owner, sizes = torch.unique_consecutive(flat[visible], return_inverse=True, return_counts=True)
        starts = sizes.cumsum(0) - sizes
        source = torch.full((rows * length,), -1)
        groups: list[torch.Tensor] = []
        total = 0
        for members, width in _similar(sizes.tolist()):
            of_group = torch.tensor(members)
            steps = torch.minimum(torch.arange(width), sizes[of_group, None] - 1)
            groups.append(visible[starts[of_group, None] + steps])
            number = torch.full((len(sizes),), -1)
            number[of_group] = torch.arange(len(members))
            here = number[owner] >= 0
            offset = torch.arange(len(visible)) - starts[owner]
            source[visible[here]] = (total + number[owner] * width + offset)[here]
            total += len(members) * width
        source[source < 0] = total
        device = numbers.device
        return cls(rows, length, tuple(group.to(device) for group in groups), source.to(device))

    def take(self, value: Any, group: torch.Tensor) -> Any:
        """Return what a group gets of an argument: rows of tensors per token, nothing of masks."""
        if isinstance(value, torch.Tensor):
            if value.dim() == _DENSE and value.shape[-2:] == (self.length, self.length):
                return None
            if value.dim() < 2 or value.shape[1] != self.length or value.shape[0] not in (1, self.rows):
                return value
            return value.expand(self.rows, *value.shape[1:]).flatten(0, 1)[group]
        if isinstance(value, tuple | list):
            return type(value)(self.take(part, group) for part in value)
        return value

    def join(self, outputs: Sequence[Any]) -> Any:
        """Return the outputs of all groups as one [B, S, …]; tokens of no document get zeros."""
        first = outputs[0]
        if isinstance(first, tuple | list):
            return type(first)(self.join(parts) for parts in zip(*outputs, strict=True))
        if not isinstance(first, torch.Tensor) or first.shape[:2] != self.groups[0].shape:
            return None  # not per token: weights or states, which packed training does not use
        flat = [output.flatten(0, 1) for output in outputs]
        flat.append(first.new_zeros(1, *first.shape[2:]))
        return torch.cat(flat)[self.source].view(self.rows, self.length, *first.shape[2:])


def _similar(sizes: Sequence[int]) -> Iterator[tuple[list[int], int]]:
    """Yield groups of documents of similar length, and the length to which each group is padded."""
    order = sorted(range(len(sizes)), key=lambda number: -sizes[number])
    members: list[int] = []
    for number in order:
        steps, most = (-(-sizes[n] // _LENGTH_STEP) for n in (number, members[0] if members else number))
        if members and steps < _LEAST_FILL * most:
            yield members, sizes[members[0]]
            members = []
        members.append(number)
    if members:
        yield members, sizes[members[0]]


def document_numbers(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the document numbers [B, S] of the inputs of a model, as its attention separates them.

    Numbers are 0 for tokens that no token sees. None if layers with state can run on whole rows: the batch
    has neither ``cu_seq_lens_q``, nor a mask for pairs of tokens, nor hidden tokens before visible ones.
    """
    if any(inputs.get(name) is not None for name in _CACHES):  # generation
        return None
    tokens = inputs.get("input_ids")
    tokens = inputs.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        return None
    cumulative, mask = inputs.get("cu_seq_lens_q"), inputs.get("attention_mask")
    if cumulative is not None:
        index = torch.arange(tokens.shape[0] * tokens.shape[1], device=cumulative.device)
        return torch.searchsorted(cumulative, index, right=True).view(tokens.shape[:2])
    if isinstance(mask, Mapping):  # one for each kind of layer
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    documents = getattr(getattr(mask, "mask_mod", None), "documents", None)  # of flex attention
    if documents is not None:
        return documents if isinstance(documents, torch.Tensor) else None
    if not isinstance(mask, torch.Tensor):
        return None
    if mask.dim() == _PADDING and mask.shape == tokens.shape[:2] and not inputs.get("use_cache"):
        return _numbers_in_padding_mask(mask != 0)
    if mask.dim() != _DENSE or mask.shape[-1] != mask.shape[-2]:
        return None
    return _numbers_in_mask(mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0)


def _numbers_in_padding_mask(visible: torch.Tensor) -> torch.Tensor | None:
    """Return 1 for visible and 0 for hidden tokens [B, S]; None if hidden ones come last.

    transformers sets the inputs of hidden tokens to zero. Zeros fill the window of a convolution and let the
    state decay, as any other token does.
    """
    return visible.long() if bool((visible[:, 1:] & ~visible[:, :-1]).any()) else None


def _numbers_in_mask(seen: torch.Tensor) -> torch.Tensor:
    """Return the document numbers in a mask [B, S, S]."""
    visible = seen.diagonal(dim1=-2, dim2=-1)
    index = torch.where(visible, torch.arange(seen.shape[-1], device=seen.device), -1)
    previous = index.cummax(-1).values.roll(1, -1)
    previous[:, 0] = -1
    continues = seen.gather(-1, previous.clamp(min=0)[..., None])[..., 0] & (previous >= 0)
    return (visible & ~continues).cumsum(-1) * visible


class DocumentBounds:
    """The documents of the batch that a decoder computes, for its layers with state.

    Attributes:
        documents: of the batch that is computed now; None for a batch that is not packed.
        layers: the number of layers that need them.
        served: the layers that used them in this forward pass.
    """

    def __init__(self, decoder: torch.nn.Module) -> None:
        parameters = inspect.signature(decoder.forward).parameters
        self.names = tuple(parameters)
        self.takes_use_cache = "use_cache" in parameters or any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
        )
        self.documents: Documents | None = None
        self.layers = 0
        self.served: set[int] = set()
        self.changed: list[tuple[Any, str, Any]] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(
        self, decoder: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Find the documents of the batch before the forward pass of the decoder."""
        numbers = document_numbers({**dict(zip(self.names, arguments, strict=False)), **options})
        if numbers is None:
            self.documents = None
            return None
        self.documents, self.served = Documents.of(numbers), set()
        self._keep_for_checkpoints(decoder, self.documents)
        return arguments, {**options, "use_cache": False} if self.takes_use_cache else options

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, decoder: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """Forget the documents after the forward pass; raise if a layer has not used them."""
        for module, name, function in self.changed:
            setattr(module, name, function)
        self.changed.clear()
        documents, self.documents = self.documents, None
        if documents is not None and output is not None and len(self.served) < self.layers:
            raise ConfigError(
                f"{self.layers - len(self.served)} of {self.layers} layers with state in "
                f"{type(decoder).__name__} ran without the boundaries of documents, because something "
                "replaced their forward pass after packhorse.prepare(model): call prepare last",
                setting="model",
            )

    def _keep_for_checkpoints(self, decoder: torch.nn.Module, documents: Documents) -> None:
        """Let layers that are computed again in the backward pass use the documents of this forward pass."""
        for module in decoder.modules():
            # That of transformers' layers, and that of torch's CheckpointWrapper (FSDP).
            for name in ("_gradient_checkpointing_func", "checkpoint_fn"):
                function = vars(module).get(name)
                if function is not None:
                    self.changed.append((module, name, function))
                    setattr(module, name, partial(_checkpoint, function, self, documents))


def _checkpoint(
    function: Callable[..., Any],
    bounds: DocumentBounds,
    documents: Documents,
    forward: Callable[..., Any],
    *arguments: Any,
    **options: Any,
) -> Any:
    """Checkpoint a layer whose later computation uses these documents."""

    def with_documents(*inputs: Any, **named: Any) -> Any:
        before, bounds.documents = bounds.documents, documents
        try:
            return forward(*inputs, **named)
        finally:
            bounds.documents = before

    return function(with_documents, *arguments, **options)


def _forward(layer: torch.nn.Module, own: Callable[..., Any] | None, *arguments: Any, **options: Any) -> Any:
    """Run the forward pass of a layer, on each document if the batch is packed."""
    bounds: DocumentBounds = getattr(layer, _BOUNDS)
    forward = partial(type(layer).forward, layer) if own is None else own
    if bounds.documents is None:
        return forward(*arguments, **options)
    return _by_document(layer, forward, bounds, arguments, options)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_document(
    layer: torch.nn.Module,
    forward: Callable[..., Any],
    bounds: DocumentBounds,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    documents = bounds.documents
    assert documents is not None
    bounds.served.add(id(layer))
    options = {
        name: None if name in _CACHES or name.endswith("mask") else value
        for name, value in options.items()
        if name not in _BOUNDARIES
    }
    outputs = []
    bounds.documents = None  # layers with state inside of this one get whole documents
    try:
        for group in documents.groups:
            inputs = [documents.take(value, group) for value in arguments]
            named = {name: documents.take(value, group) for name, value in options.items()}
            outputs.append(forward(*inputs, **named))
    finally:
        bounds.documents = documents
    return documents.join(outputs)


def layers_of(model: torch.nn.Module, classes: Sequence[str]) -> dict[str, torch.nn.Module]:
    """Return the modules of a model, by name, whose class has one of these names."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(kind.__name__ in classes for kind in type(module).__mro__)
    }


def install(model: torch.nn.Module, classes: Sequence[str]) -> dict[str, int]:
    """Call the layers of these classes document by document; return how many there are of each."""
    layers = layers_of(model, classes)
    if not layers:
        return {}
    decoder = _decoder_of(model, layers)
    bounds = getattr(decoder, _BOUNDS, None)
    if bounds is None:
        bounds = DocumentBounds(decoder)
        setattr(decoder, _BOUNDS, bounds)
        decoder.register_forward_pre_hook(bounds.begin, with_kwargs=True)
        decoder.register_forward_hook(bounds.end, always_call=True)
    for layer in layers.values():
        if getattr(layer, _BOUNDS, None) is None:
            setattr(layer, _BOUNDS, bounds)
            layer.forward = partial(_forward, layer, vars(layer).get("forward"))
            bounds.layers += 1
    return dict(Counter(type(layer).__name__ for layer in layers.values()))


def is_installed(model: torch.nn.Module, classes: Sequence[str]) -> bool:
    """Return whether all layers of these classes are called document by document."""
    return all(hasattr(layer, _BOUNDS) for layer in layers_of(model, classes).values())


def _decoder_of(model: torch.nn.Module, layers: Mapping[str, torch.nn.Module]) -> torch.nn.Module:
    """Return the innermost model of transformers that contains all of these layers.

    Wrappers such as PEFT call the forward pass of the outermost one without its hooks.
    """
    pretrained: Any = require("transformers", "train").PreTrainedModel
    inner = model
    for name, module in model.named_modules():
        if isinstance(module, pretrained) and all(layer.startswith(f"{name}.") for layer in layers):
            inner = module
    return inner
