"""Which logits a model computes, and the log-probabilities of labels.

A step of training reads the logits of supervised tokens only. ``packhorse.prepare`` decides with
:mod:`.probe` whether a model computes no others (``logits_to_keep`` of transformers), or log-probabilities
without keeping any logits (:func:`install_chunks`); :func:`logits_inputs` makes it do so.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from packhorse.chat import IGNORE_INDEX
from packhorse.errors import ConfigError
from packhorse.families.models import has_virtual_tokens, resolve_model, text_config, unwrap

LogitsMode = Literal["all", "supervised", "chunked"]
CHUNK_LABELS = "chunk_labels"
"""Name of the input with the labels [B, S] of a model that computes log-probabilities in chunks."""

CHUNK_TOKENS = 1024
"""Tokens of a chunk: 0.6 GB of logits in float32 with a vocabulary of 150,000."""

_CHOICE = "_packhorse_logits"
_CHUNKS = "_packhorse_chunks"


@dataclass(frozen=True, slots=True)
class LogitsChoice:
    """Which logits a model computes for the inputs of a batch.

    Attributes:
        mode: ``"all"``, those of ``"supervised"`` tokens, or none but log-probabilities (``"chunked"``).
        several_rows: whether that also holds for batches of several rows.
    """

    mode: LogitsMode = "all"
    several_rows: bool = True


def logits_of(model: object) -> LogitsChoice:
    """Return which logits a model computes: all of them if it is not prepared, or adds virtual tokens.

    Virtual tokens of prompt tuning move the positions of the others.
    """
    try:
        inner = resolve_model(model)[0]
        if inner is not None and has_virtual_tokens(model):
            return LogitsChoice()
    except ConfigError:  # a module of the user, with a model somewhere inside
        return LogitsChoice()
    choice: LogitsChoice = getattr(inner, _CHOICE, LogitsChoice())
    return choice


def set_logits(model: object, choice: LogitsChoice) -> None:
    """Let :func:`logits_inputs` request these logits of a model."""
    inner = unwrap(model)
    if choice.mode == "chunked":
        install_chunks(inner)
    setattr(inner, _CHOICE, choice)


def logits_inputs(choice: LogitsChoice, labels: torch.Tensor, supervised: int) -> dict[str, Any]:
    """Return the inputs with which a model computes the chosen logits.

    Args:
        choice: of the model.
        labels: [B, S], already shifted.
        supervised: labels that are not -100, as known on the CPU: a GPU is not waited for.
    """
    if choice.mode == "all" or (len(labels) > 1 and not choice.several_rows):
        return {}
    # At least one token: its logits, which have no label, connect the loss of 0 with every parameter. Without
    # gradients of some, DDP and FSDP would wait for them.
    if len(labels) == 1:
        inputs = {"logits_to_keep": supervised_positions(labels, max(supervised, 1))}
    else:
        # transformers indexes with the mask, which waits for a GPU to know the number of tokens.
        mask = labels != IGNORE_INDEX
        if not supervised:
            mask[0, 0] = True
        inputs = {"logits_to_keep": mask}
    return inputs | ({CHUNK_LABELS: labels} if choice.mode == "chunked" else {})


def supervised_positions(labels: torch.Tensor, number: int) -> torch.Tensor:
    """Return the positions of the first ``number`` supervised tokens, row after row; then those of others.

    Unlike ``torch.nonzero``, sorting does not wait for a GPU to know how many there are.
    """
    unsupervised = (labels.flatten() == IGNORE_INDEX).to(torch.uint8)
    return unsupervised.argsort(stable=True)[:number]


class TokenLogProbs(torch.autograd.Function):
    """Log-probabilities of targets [N]; 0 for a target of -100. Saves the logits and a number per target.

    Computed in float32 (at least), about a thousand tokens at a time. Nothing waits for a GPU.

    Args:
        logits: […, vocabulary].
        rows: the rows of the logits that the targets belong to [N]; None if these are all rows.
        targets: token ids [N].
    """

    @staticmethod
    def forward(
        context: Any, logits: torch.Tensor, rows: torch.Tensor | None, targets: torch.Tensor
    ) -> torch.Tensor:
        """Return the log-probabilities."""
        flat = logits.reshape(-1, logits.shape[-1])
        exact = torch.promote_types(logits.dtype, torch.float32)
        log_probs, norms = (logits.new_empty(len(targets), dtype=exact) for _ in range(2))
        tokens = targets.clamp(min=0)
        for part in _chunks(targets):
            scores = flat[part if rows is None else rows[part]].to(exact)
            norms[part] = scores.logsumexp(-1)
            torch.sub(scores.gather(-1, tokens[part, None])[:, 0], norms[part], out=log_probs[part])
        context.save_for_backward(logits, rows, targets, norms)
        return log_probs.masked_fill_(targets == IGNORE_INDEX, 0)

    @staticmethod
    @once_differentiable
    def backward(context: Any, outer: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of the logits."""
        logits, rows, targets, norms = context.saved_tensors
        flat = logits.reshape(-1, logits.shape[-1])
        # Rows that are not picked have no gradient.
        gradient = torch.empty_like(flat) if rows is None else torch.zeros_like(flat)
        tokens, ignored = targets.clamp(min=0), targets == IGNORE_INDEX
        for part in _chunks(targets):
            scores = flat[part if rows is None else rows[part]]
            shares = scores.to(norms.dtype, copy=rows is None)  # rows that were picked are a copy
            shares = shares.sub_(norms[part, None]).exp_()
            shares.scatter_add_(-1, tokens[part, None], shares.new_full((len(shares), 1), -1.0))
            # Filled, not multiplied by 0: logits of tokens without a label may be infinite.
            shares.mul_(-outer[part, None]).masked_fill_(ignored[part, None], 0)
            gradient[part if rows is None else rows[part]] = shares.to(gradient.dtype)
        return gradient.view(logits.shape), None, None


def _chunks(targets: torch.Tensor) -> list[slice]:
    return [slice(start, start + CHUNK_TOKENS) for start in range(0, len(targets), CHUNK_TOKENS)]


# --- log-probabilities without logits ----------------------------------------------------------------------


def install_chunks(model: Any) -> None:
    """Let a model with the input :data:`CHUNK_LABELS` return log-probabilities [N] in the place of logits.

    Its head then runs for a chunk of tokens at a time, and again in the backward pass, so neither all logits
    nor their gradient exist. That happens within the forward pass, so wrappers see every use of the head's
    weights: adapters, DDP, sharded parameters. Other calls of the model compute logits as before.

    Raises:
        ConfigError: the model has no head.
    """
    if hasattr(model, _CHUNKS):
        return
    path = find_head(model)
    if not path:
        what = f"{type(model).__name__} has no output embeddings, which could run in chunks"
        raise ConfigError(what, setting="logits", value="chunked")
    chunks = _Chunks(path)
    setattr(model, _CHUNKS, chunks)
    model.register_forward_pre_hook(chunks.replace_forward, with_kwargs=True)
    # First: the hooks of FSDP look at what is returned.
    model.register_forward_hook(chunks.restore_forward, always_call=True, prepend=True)


def find_head(model: Any) -> str:
    """Return the path of the module that computes logits; empty if there is none."""
    heads = (getattr(module, "get_output_embeddings", lambda: None)() for module in model.modules())
    head = next((head for head in heads if head is not None), None)
    return next((name for name, module in model.named_modules() if module is head), "")


class _Chunks:
    """Replaces what the head of a model computes, during a forward pass of the model.

    Not the head itself: it is called once, however many chunks there are, so that ranks that shard its
    weights gather them equally often.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._head: Any = None
        self._forward: Any = None
        self._log_probs: torch.Tensor | None = None

    def replace_forward(
        self, model: Any, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Let the head compute log-probabilities if the inputs have labels."""
        if CHUNK_LABELS not in options:
            return None
        head = model.get_submodule(self._path)  # an adapter may have replaced it since
        head = getattr(head, "_fsdp_wrapped_module", head)  # FSDP has no public name for it
        self._head, self._forward = head, vars(head).get("forward")
        scores = partial(_final_logits, head.forward, text_config(model.config))
        head.forward = partial(self._compute, scores, options[CHUNK_LABELS])
        return arguments, {key: value for key, value in options.items() if key != CHUNK_LABELS}

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of chunks differs by batch
    def _compute(self, scores: Any, labels: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities [N] of the labels of hidden states."""
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        labels = labels.to(flat.device)
        targets = labels.flatten()[supervised_positions(labels, len(flat))]
        parts = zip(torch.split(flat, CHUNK_TOKENS), torch.split(targets, CHUNK_TOKENS), strict=True)
        chunks = [checkpoint(_chunk_log_probs, scores, *part, use_reentrant=False) for part in parts]
        self._log_probs = torch.cat(chunks)
        return self._log_probs

    def restore_forward(self, model: Any, arguments: Any, output: Any) -> None:
        """Let the head compute logits again, also after an error; return the log-probabilities."""
        head, log_probs = self._head, self._log_probs
        self._head = self._log_probs = None
        if head is None:
            return
        del head.forward
        if self._forward is not None:
            head.forward = self._forward
        if output is None or log_probs is None:  # after an error
            return
        if not isinstance(output, MutableMapping):
            expected = "log-probabilities in chunks need an output with names, as by default"
            raise ConfigError.of("return_dict", False, expected)
        output["logits"] = log_probs  # the model may have capped or scaled them like logits


def _chunk_log_probs(scores: Any, hidden_states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    log_probs: torch.Tensor = TokenLogProbs.apply(scores(hidden_states), None, targets)  # type: ignore[no-untyped-call]
    return log_probs


def _final_logits(head: Any, config: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return logits as a model makes them of those of its head; :mod:`.probe` compares them with its own."""
    logits: torch.Tensor = head(hidden_states)
    if scale := getattr(config, "logit_scale", None):  # Cohere
        logits = logits * scale
    if divisor := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / divisor
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = torch.tanh(logits / cap) * cap
    return logits
