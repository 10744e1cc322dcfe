"""Layers that carry state along the sequence, called document by document.

Linear attention, state spaces and short convolutions see every earlier token of their row, whatever the
attention mask says. :func:`install` lets such layers of a model compute each document alone, in one of two
ways. Documents of similar length are padded on the right and run together; that needs nothing but the layer.
Or all documents run in one call, with kernels that take their boundaries (:data:`KERNELS`). A batch that is
not packed, and generation, run as before. :mod:`.packing` decides which classes of layers these are.

A hook of the decoder finds the documents of a batch before its forward pass, and the layers that are in the
model then: also copies, and those that a wrapper or another library has changed since :func:`install`.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from itertools import pairwise
from logging import getLogger
from typing import Any

import numpy as np
import torch

from packhorse.errors import ConfigError, require
from packhorse.families.models import CACHES, attention_of
from packhorse.families.varlen import VARLEN, VARLEN_ARGUMENTS

logger = getLogger("packhorse.families.stateful")

_BOUNDS = "_packhorse_bounds"  # of a layer
_DECODER_BOUNDS = "_packhorse_document_bounds"
PER_DOCUMENT, BOUNDARIES = "per_document", "boundaries"
_CONVOLUTION = "causal_conv1d"
KERNEL_PACKAGES = {"fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm", _CONVOLUTION: "causal-conv1d"}
"""Packages with kernels for layers that carry state, and the names to install them by."""
_DELTA = ("fla",)  # the convolution can do without a kernel, see _zero_rows
_MAMBA_2 = ("mamba_ssm", _CONVOLUTION)
_LAYERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("bamba", "BambaMixer", _MAMBA_2),
    ("falcon_h1", "FalconH1Mixer", _MAMBA_2),
    ("falcon_mamba", "FalconMambaMixer", ()),
    ("granitemoehybrid", "GraniteMoeHybridMambaLayer", _MAMBA_2),
    ("jamba", "JambaMambaMixer", ()),
    ("lfm2", "Lfm2ShortConv", (_CONVOLUTION,)),
    ("lfm2_moe", "Lfm2MoeShortConv", (_CONVOLUTION,)),
    ("mamba", "MambaMixer", ()),
    ("mamba2", "Mamba2Mixer", _MAMBA_2),
    ("nemotron_h", "NemotronHMamba2Mixer", _MAMBA_2),
    ("olmo_hybrid", "OlmoHybridGatedDeltaNet", _DELTA),
    ("qwen3_5_moe_text", "Qwen3_5MoeGatedDeltaNet", _DELTA),
    ("qwen3_5_text", "Qwen3_5GatedDeltaNet", _DELTA),
    ("qwen3_next", "Qwen3NextGatedDeltaNet", _DELTA),
    ("zamba2", "Zamba2MambaMixer", _MAMBA_2),
)
STATEFUL_LAYERS: dict[str, tuple[str, ...]] = {model_type: (layer,) for model_type, layer, _ in _LAYERS}
"""Classes of the layers that carry state, by the model type of the decoder."""
KERNELS: dict[str, tuple[str, ...]] = {layer: packages for _, layer, packages in _LAYERS if packages}
"""Packages whose kernels take the boundaries of documents, by the class of the layer that passes them on."""
_LENGTH_STEP = 64  # the kernels compute chunks of about this many tokens anyway
# What a step of such a chunk costs apart from its documents, in units of a document. Measured on an H200 with
# the PyTorch operations that transformers falls back to; they run one after the other, and are small.
_STEP_COST = {"cpu": 0.5, "cuda": 8.0}
_EQUAL_CALLS = 4  # of a layer whose weights are gathered inside of it; more groups save little
_BOUNDARIES = (*VARLEN_ARGUMENTS, "seq_idx")
_DENSE, _PADDING = 4, 2  # axes of a mask [B, 1, S, S], and of one [B, S]
_PER_TOKEN = 3  # axes of a tensor [B, S, …] that has more than a number for each token
# To measure whether kernels keep documents apart: how much larger replaced documents are, and by what share
# of the largest value the other documents may change then. Rounding to bfloat16 is a fifth of that.
_REPLACEMENT_SCALE, _ALLOWED_LEAK = 8.0, 0.02


@dataclass(frozen=True, slots=True)
class _Calls:
    """How a layer is called for the documents of a batch.

    Attributes:
        groups: for each call the indices [N, L] of its tokens in the flattened batch.
        source: for each token of the batch its index in the concatenated groups; the one after the last for a
            token of no document.
        gaps: whether groups have rows of zeros, whose index is the one after the last token.
        boundaries: arguments for kernels that keep the documents of one call apart.
    """

    groups: tuple[torch.Tensor, ...]
    source: torch.Tensor
    gaps: bool = False
    boundaries: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Documents:
    """Where the documents of a packed batch are.

    Args:
        numbers: of each token's document [B, S]; 0 for hidden tokens. Hidden tokens inside a document do not
            divide it. If all are hidden, each row is one document.
        padded: whether rows are padded and each is one document, not packed.
    """

    def __init__(self, numbers: torch.Tensor, padded: bool = False) -> None:
        self.rows, self.length = numbers.shape
        self.padded = padded
        self.device = numbers.device
        flat = numbers.detach().to("cpu", torch.int64)
        if not bool(flat.any()):
            flat = torch.ones_like(flat)
        flat = (flat + torch.arange(self.rows)[:, None] * (self.length + 1) * (flat > 0)).flatten()
        self._visible = torch.nonzero(flat).flatten()
        _, self._owner, self._sizes = torch.unique_consecutive(
            flat[self._visible], return_inverse=True, return_counts=True
        )
        self._starts = self._sizes.cumsum(0) - self._sizes
        self._offset = torch.arange(len(self._visible)) - self._starts[self._owner]
        self.count = len(self._sizes)
        self._in_groups: dict[int | None, _Calls] = {}
        self._in_one_row: dict[int, _Calls] = {}

    def in_groups(self, number: int | None = None) -> _Calls:
        """Calls for documents of similar length; shorter ones repeat their last token.

        With a ``number``, there are that many calls whatever the documents are; some may have no result.
        """
        if number not in self._in_groups:
            groups: list[torch.Tensor] = []
            start_of = torch.empty_like(self._sizes)
            total = 0
            step_cost = _STEP_COST.get(self.device.type, 8.0)
            for members, width in _group_by_length(self._sizes.tolist(), step_cost, number):
                of_group = torch.tensor(members)
                steps = torch.minimum(torch.arange(width), self._sizes[of_group, None] - 1)
                groups.append(self._visible[self._starts[of_group, None] + steps].to(self.device))
                start_of[of_group] = total + torch.arange(len(members)) * width
                total += len(members) * width
            for _ in range(len(groups), number or 0):
                groups.append(self._visible[:1, None].to(self.device))
                total += 1
            self._in_groups[number] = _Calls(tuple(groups), self._source(start_of, total))
        return self._in_groups[number]

    def in_one_row(self, gap: int) -> _Calls:
        """One call for all documents, with this many rows of zeros after each."""
        if gap not in self._in_one_row:
            starts = self._starts + gap * torch.arange(self.count)
            total = len(self._visible) + gap * self.count
            index = torch.full((total,), self.rows * self.length)
            index[starts[self._owner] + self._offset] = self._visible
            ends = torch.cat([starts, torch.tensor([total])])
            numbers = torch.arange(self.count).repeat_interleave(ends.diff())
            boundaries = {
                "cu_seq_lens_q": ends.to(self.device),
                "seq_idx": numbers[None].to(self.device, torch.int32),
            }
            groups = (index[None].to(self.device),)
            self._in_one_row[gap] = _Calls(groups, self._source(starts, total), gap > 0, boundaries)
        return self._in_one_row[gap]

    def _source(self, starts: torch.Tensor, total: int) -> torch.Tensor:
        """Return where each token of the batch is in calls in which documents begin at ``starts``."""
        source = torch.full((self.rows * self.length,), total)
        source[self._visible] = starts[self._owner] + self._offset
        return source.to(self.device)

    def is_mask(self, value: Any) -> bool:
        """Whether a value is a mask for pairs of tokens."""
        square = (self.length, self.length)
        return isinstance(value, torch.Tensor) and value.dim() == _DENSE and value.shape[-2:] == square

    def take(self, value: Any, calls: _Calls, group: torch.Tensor) -> Any:
        """Return what a call gets of an argument: rows of tensors per token, nothing of masks."""
        if isinstance(value, torch.Tensor):
            if self.is_mask(value):
                return None
            if value.dim() < 2 or value.shape[1] != self.length or value.shape[0] not in (1, self.rows):
                return value
            flat = value.expand(self.rows, *value.shape[1:]).flatten(0, 1)
            return (torch.cat([flat, torch.zeros_like(flat[:1])]) if calls.gaps else flat)[group]
        if isinstance(value, tuple | list):
            return type(value)(self.take(part, calls, group) for part in value)
        return value

    def join(self, outputs: Sequence[Any], calls: _Calls) -> Any:
        """Return the outputs of all calls as one [B, S, …]; tokens of no document get zeros."""
        first = outputs[0]
        if isinstance(first, tuple | list):
            return type(first)(self.join(parts, calls) for parts in zip(*outputs, strict=True))
        if not isinstance(first, torch.Tensor) or first.shape[:2] != calls.groups[0].shape:
            return None  # not per token: weights or states, which packed training does not use
        flat = [output.flatten(0, 1) for output in outputs]
        flat.append(torch.zeros_like(flat[0][:1]))
        return torch.cat(flat)[calls.source].view(self.rows, self.length, *first.shape[2:])


def _group_by_length(
    sizes: Sequence[int], step_cost: float, most: int | None = None
) -> list[tuple[list[int], int]]:
    """Return groups of documents of similar length that cost least, each with its longest length.

    A group of ``n`` documents costs ``n + step_cost`` for each step of its longest one. If there are more
    than ``most`` groups, neighbours are joined.
    """
    order = sorted(range(len(sizes)), key=lambda number: -sizes[number])
    steps = np.array([-(-sizes[number] // _LENGTH_STEP) for number in order])
    firsts = np.flatnonzero(np.diff(steps, prepend=-1))  # of the documents with as many steps
    ends = np.append(firsts[1:], len(steps))
    best, begin = np.zeros(len(firsts) + 1), np.zeros(len(firsts) + 1, np.int64)
    for last, end in enumerate(ends):  # the last group begins at one of the lengths so far
        costs = best[: last + 1] + steps[firsts[: last + 1]] * (end - firsts[: last + 1] + step_cost)
        begin[last + 1] = costs.argmin()
        best[last + 1] = costs.min()
    groups: list[tuple[list[int], int]] = []
    last = len(firsts)
    while last:
        members = order[firsts[begin[last]] : ends[last - 1]]
        groups.append((members, sizes[members[0]]))
        last = int(begin[last])
    groups.reverse()
    while most is not None and len(groups) > most:
        added = [(left[1] - right[1]) * len(right[0]) for left, right in pairwise(groups)]
        index = int(np.argmin(added))
        groups[index : index + 2] = [(groups[index][0] + groups[index + 1][0], groups[index][1])]
    return groups


def document_numbers(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the document numbers [B, S] of the inputs of a model, as its attention separates them.

    Numbers are 0 for tokens that no token sees. None if layers with state can run on whole rows: the batch
    has neither ``cu_seq_lens_q``, nor a mask for pairs of tokens, nor hidden tokens before visible ones, nor
    positions that restart without a mask.
    """
    if any(inputs.get(name) is not None for name in CACHES):  # generation
        return None
    tokens = inputs.get("input_ids")
    tokens = inputs.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        return None
    cumulative, mask = inputs.get("cu_seq_lens_q"), inputs.get("attention_mask")
    if cumulative is not None:
        index = torch.arange(tokens.shape[0] * tokens.shape[1], device=cumulative.device)
        numbers = torch.searchsorted(cumulative, index, right=True)
        return _without_padding(numbers, inputs.get("position_ids")).view(tokens.shape[:2])
    if isinstance(mask, Mapping):  # one for each kind of layer
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    mask_mod = getattr(mask, "mask_mod", None)
    if mask_mod is not None:  # of flex attention
        documents = getattr(mask_mod, "documents", None)
        if not isinstance(documents, torch.Tensor):
            raise ConfigError(
                "layers with state do not find the documents in this block mask, because Packhorse did not "
                "build it: use the attention_mask of the batch",
                setting="attention_mask",
            )
        return documents
    if mask is None and not inputs.get("use_cache"):
        return _numbers_in_positions(inputs.get("position_ids"), tokens.shape[0])
    if not isinstance(mask, torch.Tensor):
        return None
    if mask.dim() == _PADDING and mask.shape == tokens.shape[:2] and not inputs.get("use_cache"):
        return _numbers_in_padding_mask(mask != 0)
    if mask.dim() != _DENSE or mask.shape[-1] != mask.shape[-2]:
        return None
    return _numbers_in_mask(mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0)


def _without_padding(numbers: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """Return document numbers [B * S] without padding: segments whose tokens are all at position 0."""
    if positions is None or positions.shape[-2:].numel() != len(numbers):
        return numbers
    moved = positions.reshape(-1, len(numbers)).ne(0).any(0)
    segments = torch.zeros(int(numbers.max()) + 1, dtype=torch.int64, device=numbers.device)
    sizes, moves = (
        segments.index_add(0, numbers, count) for count in (torch.ones_like(numbers), moved.long())
    )
    return numbers * ((sizes == 1) | (moves > 0))[numbers]


def _numbers_in_positions(positions: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    """Return the document numbers [B, S] of a batch without a mask; None if each row is one document.

    As in transformers, a document begins where a position is not the one after the last. Positions in four
    rows (mRoPE) have those of the text first; attention does not separate documents by three rows.
    """
    if positions is None or positions.dim() == 1 or (positions.dim() > _PADDING and len(positions) != 1 + 3):
        return None
    text = positions if positions.dim() == _PADDING else positions[0]
    begins = text.diff(prepend=text[:, :1] - 1) != 1
    return begins.cumsum(-1).add(1).expand(rows, -1) if bool(begins.any()) else None


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


_Checkpoint = tuple[Any, str, Any]  # a module, the name of its function for checkpoints, and that function


class DocumentBounds:
    """The documents of the batch that a decoder computes, for its layers with state.

    Attributes:
        documents: of the batch that is computed now; None for a batch that is not packed.
        classes: of the layers that need them.
        mode: whether layers run in groups of documents, or in one call with kernels that take boundaries.
        required: whether the user requested ``mode``, so that kernels that ignore boundaries raise.
        keeps_apart: whether the kernels of a kind of layer keep documents apart, once that is measured.
    """

    def __init__(self, decoder: torch.nn.Module) -> None:
        self.classes: tuple[str, ...] = ()
        self.mode = PER_DOCUMENT
        self.required = False
        self.keeps_apart: dict[tuple[str, bool, str], bool] = {}
        parameters = inspect.signature(decoder.forward).parameters
        self.names = tuple(parameters)
        self.takes_use_cache = "use_cache" in parameters or any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
        )
        self.documents: Documents | None = None
        self._running = self._has_packed = False
        self._changed: list[_Checkpoint] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(
        self, decoder: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Find the documents of the batch before the forward pass of the decoder."""
        self._forget()  # torch calls no hook after a KeyboardInterrupt
        inputs = {**dict(zip(self.names, arguments, strict=False)), **options}
        numbers = document_numbers(inputs)
        padded = getattr(inputs.get("attention_mask"), "ndim", 0) == _PADDING
        self._running, self.documents = True, None if numbers is None else Documents(numbers, padded)
        self._has_packed = self._has_packed or numbers is not None
        if numbers is not None or torch.is_grad_enabled():
            self._keep_for_checkpoints(decoder, self.bind_layers(decoder))
        if numbers is None:
            return None
        return arguments, {**options, "use_cache": False} if self.takes_use_cache else options

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, decoder: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """Forget the documents after the forward pass."""
        self._forget()

    def _forget(self) -> None:
        for module, name, function in reversed(self._changed):
            setattr(module, name, function)
        self._changed.clear()
        self.documents, self._running = None, False

    def bind_layers(self, decoder: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """Let all layers of the classes use these documents; return them by name."""
        layers = layers_of(decoder, self.classes)
        for layer in layers.values():
            forward = vars(layer).get("forward")
            if isinstance(forward, partial) and forward.func is _forward:
                if getattr(layer, _BOUNDS, None) is self:
                    continue
                forward = forward.args[1]  # of a copy of a layer: what this function replaced
            setattr(layer, _BOUNDS, self)
            layer.forward = partial(_forward, layer, forward)
        return layers

    @contextmanager
    def use(self, documents: Documents | None, checkpoints: Sequence[_Checkpoint] = ()) -> Iterator[None]:
        """Let layers use these documents (None: of a batch that is not packed) in the backward pass.

        ``checkpoints`` are the functions of layers inside of the one that is computed again, which use the
        documents too.
        """
        before = self.documents, self._running
        self.documents, self._running = documents, True
        replaced = [(module, name, getattr(module, name)) for module, name, _ in checkpoints]
        for module, name, function in checkpoints:
            setattr(module, name, partial(_checkpoint, function, self, documents, checkpoints))
        try:
            yield
        finally:
            self.documents, self._running = before
            for module, name, function in replaced:
                setattr(module, name, function)

    def check_running(self, layer: torch.nn.Module) -> None:
        """Raise if a layer is computed again in the backward pass, without the documents of its batch."""
        if self._running or not self._has_packed or not _is_in_backward():
            return
        raise ConfigError(
            f"{type(layer).__name__} is computed again in the backward pass, where the documents of its "
            "batch are unknown. For gradient checkpointing call model.gradient_checkpointing_enable(), or "
            "wrap layers in torch's checkpoint_wrapper",
            setting="gradient_checkpointing",
        )

    def _keep_for_checkpoints(self, decoder: torch.nn.Module, layers: Mapping[str, torch.nn.Module]) -> None:
        """Let layers that are computed again in the backward pass use the documents of this forward pass."""
        modules: dict[int, torch.nn.Module] = {id(decoder): decoder}
        for name in layers:
            module = decoder
            for part in name.split("."):  # the layer, and the modules that contain it
                module = getattr(module, part)
                modules[id(module)] = module
        # That of transformers' layers, and that of torch's CheckpointWrapper (FSDP).
        names = ("_gradient_checkpointing_func", "checkpoint_fn")
        found = ((module, name, vars(module).get(name)) for module in modules.values() for name in names)
        self._changed = [checkpoint for checkpoint in found if checkpoint[2] is not None]
        for module, name, function in self._changed:
            parts = {id(part) for part in module.modules() if part is not module}
            inside = [checkpoint for checkpoint in self._changed if id(checkpoint[0]) in parts]
            setattr(module, name, partial(_checkpoint, function, self, self.documents, inside))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _is_in_backward() -> bool:
    # Private: torch has no public way to ask whether a backward pass recomputes this forward.
    return bool(torch._C._current_graph_task_id() != -1)


def _gathers_inside(layer: torch.nn.Module) -> bool:
    """Whether ranks gather weights at each call of a module inside of a layer, for which they wait.

    Then all ranks must call it equally often, whatever their documents are.
    """
    # DeepSpeed has no public name for whether ZeRO-3 shards a weight.
    if any(hasattr(weight, "ds_id") for weight in layer.parameters()):
        return True
    return any(module is not layer and isinstance(module, _fsdp_classes()) for module in layer.modules())


@cache
def _fsdp_classes() -> tuple[type, ...]:
    if not torch.distributed.is_available():
        return ()
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return FSDPModule, FullyShardedDataParallel


def _checkpoint(
    function: Callable[..., Any],
    bounds: DocumentBounds,
    documents: Documents | None,
    inside: Sequence[_Checkpoint],
    forward: Callable[..., Any],
    *arguments: Any,
    **options: Any,
) -> Any:
    """Checkpoint a layer whose later computation, and that of layers inside, uses these documents."""

    def with_documents(*inputs: Any, **named: Any) -> Any:
        with bounds.use(documents, inside):
            return forward(*inputs, **named)

    return function(with_documents, *arguments, **options)


def _forward(
    layer: torch.nn.Module, original: Callable[..., Any] | None, *arguments: Any, **options: Any
) -> Any:
    """Run the forward pass of a layer, on each document if the batch is packed."""
    bounds: DocumentBounds = getattr(layer, _BOUNDS)
    forward = partial(type(layer).forward, layer) if original is None else original
    if bounds.documents is None:
        bounds.check_running(layer)
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
    _check_attention(layer, documents, (*arguments, *options.values()))
    options = {
        name: None if name in CACHES or name.endswith("mask") else value
        for name, value in options.items()
        if name not in _BOUNDARIES
    }
    gathers = _gathers_inside(layer)
    if gathers and bounds.required:
        what = f"ranks gather weights inside of {type(layer).__name__}, which rules out boundaries:"
        remedy = 'call packhorse.prepare(model, stateful="auto")'
        raise ConfigError(f"{what} {remedy}", setting="stateful", value=BOUNDARIES)
    names: tuple[str, ...] = ()
    if bounds.mode == BOUNDARIES and documents.count > 1 and not gathers:
        names = boundary_arguments(layer)
    bounds.documents = None  # layers with state inside of this one get whole documents
    try:
        if names:
            calls = documents.in_one_row(_zero_rows(layer, names))
            run = partial(_run_calls, forward, documents, calls, arguments)
            passed = options | {name: calls.boundaries[name] for name in names}
            if _keeps_apart(layer, bounds, calls, partial(run, passed)):
                return documents.join(run(passed), calls)
        # Ranks whose padded rows have no hidden tokens first call the layer once.
        calls = documents.in_groups((1 if documents.padded else _EQUAL_CALLS) if gathers else None)
        return documents.join(_run_calls(forward, documents, calls, arguments, options), calls)
    finally:
        bounds.documents = documents


def _check_attention(layer: torch.nn.Module, documents: Documents, values: Sequence[Any]) -> None:
    """Raise if attention inside of a layer needs its mask, which calls for groups of documents do not have.

    Without a mask, ``sdpa`` and ``varlen`` are causal; others attend in both directions.
    """
    if not any(documents.is_mask(value) or hasattr(value, "mask_mod") for value in values):
        return
    for module in layer.modules():
        config = getattr(module, "config", None)
        # Attention modules of transformers say whether they are causal.
        if module is layer or config is None or not hasattr(module, "is_causal"):
            continue
        attention = attention_of(config)
        if attention not in ("sdpa", VARLEN):
            raise ConfigError(
                f"{type(layer).__name__} carries state and contains {type(module).__name__}. Called for each "
                f"document, it has no mask, without which attn_implementation={attention!r} attends in both "
                'directions: call packhorse.prepare(model, "sdpa")',
                setting="attn_implementation",
                value=attention,
            )


def _run_calls(
    forward: Callable[..., Any],
    documents: Documents,
    calls: _Calls,
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
    change: Callable[[Any], Any] = lambda value: value,
) -> list[Any]:
    """Return the outputs of all calls; ``change`` replaces their inputs."""
    outputs = []
    for group in calls.groups:
        inputs = [change(documents.take(value, calls, group)) for value in arguments]
        named = {name: change(documents.take(value, calls, group)) for name, value in options.items()}
        outputs.append(forward(*inputs, **named))
    return outputs


def _keeps_apart(
    layer: torch.nn.Module, bounds: DocumentBounds, calls: _Calls, run: Callable[..., list[Any]]
) -> bool:
    """Return whether the kernels of a layer keep documents apart, measured once for each class.

    Some releases of transformers and of kernels ignore boundaries without an error. So every second document
    is replaced by a much larger one: the others must not change.

    Raises:
        ConfigError: they do not, and the user requested boundaries.
    """
    numbers = calls.boundaries["seq_idx"][0]
    # Kernels for training and for evaluation, and of devices, differ.
    kind = (type(layer).__name__, layer.training, numbers.device.type)
    if kind in bounds.keeps_apart:
        return bounds.keeps_apart[kind]
    replaced = numbers % 2 == 0

    def change(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(change, value))
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if value.dim() < _PER_TOKEN or value.shape[:2] != (1, len(numbers)):
            return value
        changed = _REPLACEMENT_SCALE * value.flip(-1)
        return torch.where(replaced.view(1, -1, *(1 for _ in value.shape[2:])), changed, value)

    why = "they ignore the boundaries of documents"
    # Both computations draw the same random numbers (of dropout in adapters), which go on as if nothing was
    # measured: checkpointed layers run once more with the same ones.
    devices = [numbers.device] if numbers.is_cuda else []

    def compute(function: Callable[[Any], Any]) -> torch.Tensor:
        with torch.no_grad(), torch.random.fork_rng(devices), _without_autocast_cache():
            return _first_tensor(run(change=function))[0, ~replaced]

    try:
        before, after = compute(lambda value: value), compute(change)
    except (ValueError, TypeError, NotImplementedError) as error:  # they take no boundaries
        apart, why = False, f"they raise {type(error).__name__}: {str(error).rstrip('.')}"
    else:
        size = float(before.abs().max())
        if not size:  # as of weights that begin as zeros: a leak would not show
            return False
        apart = float((after - before).abs().max()) <= _ALLOWED_LEAK * size
    if not apart:
        what = f"kernels of {type(layer).__name__} do not keep documents apart: {why}"
        if bounds.required:
            remedy = 'Update transformers and the kernels, or call packhorse.prepare(model, stateful="auto")'
            raise ConfigError(f"{what}. {remedy}", setting="stateful", value=BOUNDARIES)
        logger.warning("%s. These layers are called document by document instead", what)
    bounds.keeps_apart[kind] = apart
    return apart


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Let autocast keep no weights of a block without gradients, which it might use again with gradients."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _first_tensor(outputs: Any) -> torch.Tensor:
    """Return the tensor per token among the outputs of a layer."""
    while not isinstance(outputs, torch.Tensor):
        outputs = outputs[0]
    return outputs


@cache
def _has_package(package: str) -> bool:
    return find_spec(package) is not None


def kernel_packages(layer: torch.nn.Module) -> tuple[str, ...]:
    """Return the packages whose kernels take boundaries for a layer (:data:`KERNELS`); empty if none do."""
    return next((KERNELS[kind.__name__] for kind in type(layer).__mro__ if kind.__name__ in KERNELS), ())


def boundary_arguments(layer: torch.nn.Module) -> tuple[str, ...]:
    """Return the arguments by which kernels of a layer keep documents apart; empty if it has no such kernels.

    Layers with a recurrence of fla take ``cu_seq_lens_q`` for it, and ``seq_idx`` for a convolution with a
    kernel; without that kernel, rows of zeros between documents separate them for the convolution.
    """
    packages = kernel_packages(layer)
    if not packages or not all(map(_has_package, packages)):
        return ()
    if "fla" not in packages:
        return ("seq_idx",)
    if _has_package(_CONVOLUTION):
        return ("cu_seq_lens_q", "seq_idx")
    return ("cu_seq_lens_q",) if _keeps_zeros(layer) else ()


def _zero_rows(layer: torch.nn.Module, names: Sequence[str]) -> int:
    """Return how many rows of zeros after each document keep its end out of the next one's convolution."""
    if "seq_idx" in names:
        return 0
    return max(kernel.kernel_size[0] - 1 for kernel in _convolutions(layer))


def _convolutions(layer: torch.nn.Module) -> list[torch.nn.Conv1d]:
    return [module for module in layer.modules() if isinstance(module, torch.nn.Conv1d)]


def _keeps_zeros(layer: torch.nn.Module) -> bool:
    """Whether rows of zeros reach the convolution as zeros: no projection has a bias."""
    linear = (module for module in layer.modules() if isinstance(module, torch.nn.Linear))
    return bool(_convolutions(layer)) and all(module.bias is None for module in linear)


def layers_of(model: torch.nn.Module, classes: Sequence[str]) -> dict[str, torch.nn.Module]:
    """Return the modules of a model, by name, whose class has one of these names."""
    known: dict[type, bool] = {}
    layers = {}
    for name, module in model.named_modules():
        kind = type(module)
        if kind not in known:
            known[kind] = any(base.__name__ in classes for base in kind.__mro__)
        if known[kind]:
            layers[name] = module
    return layers


def install(
    model: torch.nn.Module,
    classes: Sequence[str],
    mode: str = PER_DOCUMENT,
    device: str | torch.device | None = None,
) -> dict[str, tuple[int, str]]:
    """Let the layers of these classes compute each document alone; return their number and how they do it.

    Args:
        model: in any wrapper.
        classes: names of the classes of layers.
        mode: ``"per_document"``, ``"boundaries"`` (in one call, with kernels) or ``"auto"`` (boundaries on a
            GPU, for layers that have such kernels).
        device: that the model will be trained on; None for a GPU if there is one.

    Raises:
        ConfigError: boundaries are requested, and a class has no kernels that take them.
    """
    layers = layers_of(model, classes)
    if not layers:
        return {}
    check_mode(layers, mode)
    decoder = _decoder_of(model, layers)
    bounds = getattr(decoder, _DECODER_BOUNDS, None)
    if bounds is None:
        bounds = DocumentBounds(decoder)
        setattr(decoder, _DECODER_BOUNDS, bounds)
        decoder.register_forward_pre_hook(bounds.begin, with_kwargs=True)
        decoder.register_forward_hook(bounds.end, always_call=True)
    bounds.required = mode == BOUNDARIES
    if mode == "auto":
        cuda = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
        mode = BOUNDARIES if cuda else PER_DOCUMENT
    bounds.mode = mode
    bounds.keeps_apart.clear()
    bounds.classes = tuple(dict.fromkeys((*bounds.classes, *classes)))
    bounds.bind_layers(decoder)
    kinds = {type(layer).__name__: layer for layer in layers.values()}
    counts = Counter(type(layer).__name__ for layer in layers.values())
    return {
        name: (counts[name], mode if boundary_arguments(layer) else PER_DOCUMENT)
        for name, layer in kinds.items()
    }


def check_mode(layers: Mapping[str, torch.nn.Module], mode: str) -> None:
    """Raise ConfigError if boundaries are requested for layers without kernels that take them."""
    lacking = (layer for layer in layers.values() if mode == BOUNDARIES and not boundary_arguments(layer))
    layer = next(lacking, None)
    if layer is None:
        return
    packages = kernel_packages(layer)
    # With fla alone, rows of zeros separate documents for the convolution, if there are no biases.
    missing = [name for name in packages if not _has_package(name)] or [_CONVOLUTION]
    missing = [KERNEL_PACKAGES[name] for name in missing]
    why = f"its kernels need {' and '.join(missing)}: pip install {' '.join(missing)}, or"
    if not packages:
        why = "it has no kernels that take the boundaries of documents:"
    what = f"{type(layer).__name__} cannot be called with boundaries: {why} use stateful='auto'"
    raise ConfigError(what, setting="stateful", value=BOUNDARIES)


def has_document_bounds(model: torch.nn.Module, classes: Sequence[str]) -> bool:
    """Return whether all layers of these classes are called document by document."""
    for module in model.modules() if classes else ():
        bounds = vars(module).get(_DECODER_BOUNDS)
        if isinstance(bounds, DocumentBounds):
            return set(classes) <= set(bounds.classes)
    return not layers_of(model, classes)


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
