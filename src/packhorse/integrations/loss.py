"""The loss of a step: one mean over every supervised token of the global batch.

An optimizer step may have many batches (ranks, accumulated micro-steps) with different numbers of supervised
tokens, so the mean of their means is not the mean over tokens, and a batch without any has none (NaN). Here
every batch contributes the *sum* over its tokens, divided by the number of tokens of *all* batches. If rows
have loss weights, that is the weighted sum, divided by the weights of all supervised tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from packhorse.chat import IGNORE_INDEX
from packhorse.collate.packed import known_supervised, model_inputs
from packhorse.distributed import has_process_group, reachable_device
from packhorse.errors import ConfigError
from packhorse.families.logits import TokenLogProbs, supervised_positions
from packhorse.families.router_loss import scaled_router_loss
from packhorse.types import World, to_device

if TYPE_CHECKING:
    from packhorse.loader.loader import Loader

Item = TypeVar("Item")


def token_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    tokens: float | torch.Tensor,
    replicas: int = 1,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the contribution of a batch to the mean loss over all supervised tokens of a step.

    Summed over all micro-steps and ranks, it is the mean cross entropy of the global batch; so are its
    gradients. DDP and FSDP average the gradients of ranks: ``replicas`` = the number of ranks makes that the
    sum.

    Computed in float32 (at least), about a thousand rows at a time, so that it needs little memory
    in addition to the logits and their gradient. Rows without a label cost nothing.

    Args:
        logits: [B, S, vocabulary]; or those of the supervised tokens alone, as a prepared model computes
            them, or their log-probabilities: see :func:`token_log_probs`.
        labels: [B, S], already shifted: the token after ``input_ids[:, t]``, or -100. May hold no label
            at all: then the loss is 0, and so are all gradients.
        tokens: supervised tokens of the step (the sum of their weights, if rows have weights), of all ranks
            and micro-steps, see :func:`count_supervised`.
        replicas: ranks whose gradients are averaged.
        weights: [B, S], ``batch.info.loss_weights``: factors for the loss of each token, on any device; None
            if all are 1.

    Raises:
        ConfigError: the shapes do not fit.
    """
    return _token_loss(logits, labels, tokens, replicas, weights)


def _token_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    tokens: float | torch.Tensor,
    replicas: int,
    weights: torch.Tensor | None,
    supervised: int | None = None,
) -> torch.Tensor:
    """As :func:`token_loss`; ``supervised`` is the number of labels if it is known without reading them."""
    if weights is not None and weights.shape != labels.shape:
        expected = f"expected the shape [B, S] of the labels {tuple(labels.shape)}"
        raise ConfigError.of("weights", tuple(weights.shape), expected)
    positions = _positions(logits, labels, supervised)
    factors = None
    if weights is not None:
        factors = to_device(weights, labels.device).flatten()[positions]
    log_probs = _log_probs_at(logits, labels, positions, factors)
    summed = -log_probs.sum()
    if supervised is not None and labels.device.type != "cpu" and logits.shape[:-1] != labels.shape:
        # Labels that were added on the device have no logits; an error would have to wait for the device.
        added = (labels != IGNORE_INDEX).sum() > supervised
        summed = summed * torch.where(added, float("nan"), 1.0).to(summed.device)
    return summed * _scale(tokens, replicas, summed.device)


def batch_token_loss(
    logits: torch.Tensor, batch: Mapping[str, Any], tokens: float | torch.Tensor, replicas: int = 1
) -> torch.Tensor:
    """As :func:`token_loss`, with the labels and weights of a batch; one of a loader waits for no GPU."""
    labels = batch["labels"]
    supervised = known_supervised(batch, labels)
    return _token_loss(logits, labels, tokens, replicas, loss_weights_of(batch), supervised)


def _scale(tokens: float | torch.Tensor, replicas: int, device: torch.device) -> float | torch.Tensor:
    """Return what a sum over tokens is multiplied by."""
    if isinstance(tokens, torch.Tensor):
        # 0 tokens give a sum of 0; a sum of weights may be below 1.
        return replicas / torch.where(tokens > 0, tokens, 1).to(device)
    return replicas / (tokens or 1)


def batch_loss(
    model: Any,
    output: Any,
    batch: Mapping[str, Any],
    tokens: float | torch.Tensor,
    replicas: int = 1,
) -> torch.Tensor:
    """Return the contribution of a batch to the loss of a step, with the auxiliary loss of a router.

    That is :func:`token_loss` with the labels and loss weights of the batch. If the model adds the auxiliary
    loss of its router (``output_router_logits=True``), it counts as the cross entropy of the batch does: by
    the share of the batch in the supervised tokens of the step. So the loss of a step is the mean of
    ``model(**batch).loss`` over its batches, weighted by their supervised tokens.

    Args:
        model: that was called, also in PEFT, DDP, FSDP or ``torch.compile``.
        output: of ``model(**model_inputs(batch, model))``.
        batch: of a loader or of a collate function.
        tokens: as for :func:`token_loss`.
        replicas: likewise.

    Raises:
        ConfigError: the model was not prepared, so padding counts in its auxiliary loss.
    """
    loss = batch_token_loss(output.logits, batch, tokens, replicas)
    auxiliary = scaled_router_loss(model, output)
    if auxiliary is None:
        return loss
    share = count_batch_supervised(batch) * _scale(tokens, replicas, loss.device)
    return loss + share * auxiliary.to(loss.device)


def token_log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each label that is not -100 [N], row after row.

    Computed in float32 (at least), about a thousand tokens at a time, so that it needs little memory in
    addition to the logits and their gradient.

    Args:
        logits: [B, S, vocabulary]; or what a model gives for ``model_inputs(batch, model)`` that is prepared
            to compute less: logits [1, N, vocabulary] or [N, vocabulary] of the supervised tokens alone, or
            their log-probabilities [N] (``prepare(model, logits="chunked")``), which are returned.
        labels: [B, S], already shifted.

    Raises:
        ConfigError: the shapes do not fit.
    """
    supervised = _count_labels(labels)
    positions = _positions(logits, labels, supervised)
    # A model computes the logits of one token where no token has a label.
    return _log_probs_at(logits, labels, positions)[:supervised]


def _count_labels(labels: torch.Tensor) -> int:
    return int((labels != IGNORE_INDEX).sum())


def _positions(logits: torch.Tensor, labels: torch.Tensor, supervised: int | None) -> torch.Tensor:
    """Return the positions of the supervised tokens; ConfigError if the logits are of others."""
    if logits.shape[:-1] == labels.shape:
        return supervised_positions(labels, _count_labels(labels))
    supervised = _count_labels(labels) if supervised is None else supervised
    number = max(supervised, 1)  # a model computes the logits of one token where no token has a label
    if logits.shape[:-1] in ((1, number), (number,)) or logits.shape == (number,):
        return supervised_positions(labels, number)
    detail = f"{supervised:,} of their tokens are supervised, and the logits are {tuple(logits.shape)}"
    hint = (
        "expected logits of all tokens [B, S, vocabulary], or of the supervised ones; labels of a batch are "
    )
    raise ConfigError.of("labels", tuple(labels.shape), f"{detail}: {hint}already shifted, do not cut them")


def _log_probs_at(
    logits: torch.Tensor,
    labels: torch.Tensor,
    positions: torch.Tensor,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the log-probabilities of the labels at these positions [N], times factors."""
    targets = labels.flatten()[positions]
    if factors is not None:
        targets = targets.masked_fill(factors == 0, IGNORE_INDEX)  # whatever their logits are
    targets = to_device(targets, logits.device)
    if logits.dim() == 1:  # computed in chunks
        log_probs = logits.masked_fill(targets == IGNORE_INDEX, 0)
    else:
        rows = to_device(positions, logits.device) if logits.shape[:-1] == labels.shape else None
        log_probs = TokenLogProbs.apply(logits, rows, targets)  # type: ignore[no-untyped-call]
    return (
        log_probs if factors is None else log_probs * to_device(factors.to(log_probs.dtype), log_probs.device)
    )


def loss_weights_of(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the loss weights [B, S] of a batch of a loader or of a collate function; None if all are 1."""
    weights: torch.Tensor | None = batch.get("loss_weights")
    info = getattr(batch, "info", None)  # only a batch of a loader has it
    return info.loss_weights if weights is None and info is not None else weights


def count_batch_supervised(batch: Mapping[str, Any]) -> float:
    """Return the number of supervised tokens of a batch, or the sum of their weights if it has weights."""
    supervised, weights = batch["labels"] != IGNORE_INDEX, loss_weights_of(batch)
    if weights is None:
        return int(supervised.sum())
    return float(weights.to("cpu", torch.float64)[supervised.cpu()].sum())


def count_supervised(
    batches: Sequence[Mapping[str, Any]],
    group: dist.ProcessGroup | None = None,
    device: str | torch.device | None = None,
) -> float:
    """Return the supervised tokens of a step: of these micro-batches, on all ranks.

    That is their number, an ``int``; if any of the batches has loss weights, the sum of the weights, a
    ``float``, in which tokens of batches without weights count 1.

    Every rank must call it once per step: one all-reduce of two numbers, none without a process group.

    Args:
        batches: of this rank.
        group: the data-parallel ranks; None for all. Ranks that train on the same batches (tensor or context
            parallel) must not share a group, or their tokens count twice.
        device: of the all-reduce; None for that of the backend.
    """
    counts = [count_batch_supervised(batch) for batch in batches]
    weighted = any(isinstance(count, float) for count in counts)
    if not has_process_group():
        return sum(counts)
    device = device or reachable_device(group)
    totals = torch.tensor([sum(counts), weighted], dtype=torch.float64, device=device)
    dist.all_reduce(totals, group=group)
    total, on_ranks = totals.tolist()
    return total if on_ranks else int(total)


def grouped(batches: Iterable[Item], gradient_accumulation_steps: int) -> Iterator[list[Item]]:
    """Yield the micro-batches of each optimizer step together, so that their tokens can be counted first.

    A loader with the same ``gradient_accumulation_steps`` gives full groups; otherwise the last one may be
    shorter.

    >>> list(grouped(range(5), 2))
    [[0, 1], [2, 3], [4]]

    Raises:
        ConfigError: ``gradient_accumulation_steps`` is below 1.
    """
    if gradient_accumulation_steps < 1:
        raise ConfigError.of("gradient_accumulation_steps", gradient_accumulation_steps, "expected 1 or more")
    iterator = iter(batches)
    while group := list(islice(iterator, gradient_accumulation_steps)):
        yield group


def check_plain_answers(loader: Loader, what: str) -> None:
    """Raise for a loader of preference data: cross entropy would train, or measure, rejected answers too."""
    if loader.config.task == "preference":
        raise ConfigError(
            f"the loader has task='preference', but {what} is for the cross entropy of plain answers: "
            "compute dpo_loss, kto_loss or reward_loss of packhorse.integrations.preference in a loop of "
            "your own, as docs/how-to/preference.md shows",
            setting="task",
            value="preference",
        )


def wrong_world(world: World, ranks: str) -> ConfigError:
    """Return the error for a loader that is for other ranks than these."""
    message = (
        f"the loader is for rank {world.rank} of {world.size}, but {ranks}: build the loader when "
        "torch.distributed is initialised, or pass world="
    )
    return ConfigError(message, setting="world", value=(world.rank, world.size))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of :func:`evaluate`.

    Attributes:
        loss: mean cross entropy over all supervised tokens; weighted, if rows have loss weights. A model with
            ``output_router_logits=True`` adds ``router_loss``.
        tokens: supervised tokens, of all ranks.
        router_loss: the part of ``loss`` that is the auxiliary loss of the model's router, the mean over
            batches weighted by their supervised tokens; 0 without one.
    """

    loss: float
    tokens: int
    router_loss: float = 0.0

    @property
    def perplexity(self) -> float:
        """Return ``exp`` of the mean cross entropy."""
        return float(torch.tensor(self.loss - self.router_loss, dtype=torch.float64).exp())


@contextmanager
def evaluation_mode(*modules: torch.nn.Module) -> Iterator[None]:
    """Run modules in evaluation mode without gradients; restore the mode of each of their modules."""
    training = [child for module in modules for child in module.modules() if child.training]
    try:
        for module in modules:
            module.eval()
        with torch.no_grad():
            yield
    finally:
        for child in training:
            child.training = True


def evaluate(model: torch.nn.Module, loader: Loader, group: dist.ProcessGroup | None = None) -> Evaluation:
    """Return the mean loss over all supervised tokens of a loader's rows, on all ranks.

    If rows have loss weights, it is the weighted mean: the sum of weight times loss, over the sum of weights.

    Each call iterates over the loader's epoch 0 from its start: every row once, in the same batches. The
    model runs in evaluation mode without gradients; its modules then get their mode back. Every rank of a
    process group must call it.

    Args:
        model: prepared for the loader's batches; also inside PEFT, DDP or FSDP.
        loader: over validation rows, not the one that is trained on.
        group: the data-parallel ranks; None for all.

    Raises:
        ConfigError: the rows have no supervised token (or all weights are 0), the loader is for another
            number of ranks, or the model runs another attention than the batches are for.
    """
    check_plain_answers(loader, "evaluate")
    if has_process_group() and loader.world.size != (ranks := dist.get_world_size(group)):
        raise wrong_world(loader.world, f"{ranks} ranks evaluate")
    if loader.cursor and loader.remaining:  # an evaluation was interrupted
        loader.set_epoch(loader.epoch + 1)
    loader.set_epoch(0)
    device = next(model.parameters()).device
    totals = torch.zeros(4, dtype=torch.float64)  # cross entropy, weights, tokens, loss of the router
    with evaluation_mode(model):
        for number, batch in enumerate(loader.keep_bytes()):
            moved = to_device(batch, device)
            inputs = model_inputs(moved, model, check=not number)  # checking one batch is enough
            output, weight = model(**inputs), count_batch_supervised(batch)
            totals[0] += batch_token_loss(output.logits, moved, 1).cpu()
            totals[1] += weight
            totals[2] += batch.info.supervised
            if (auxiliary := scaled_router_loss(model, output)) is not None:
                totals[3] += weight * auxiliary.cpu()
    if has_process_group():
        totals = totals.to(reachable_device(group))
        dist.all_reduce(totals, group=group)
    loss, weight, tokens, router_loss = totals.tolist()
    if not weight:
        raise ConfigError(
            "no supervised token in the validation rows: each row needs an assistant turn. "
            "loader.epoch_stats says what became of the rows"
        )
    return Evaluation((loss + router_loss) / weight, int(tokens), router_loss / weight)
