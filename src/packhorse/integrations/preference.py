"""Preference losses on batches of ``packhorse.load(…, task="preference")``: DPO, KTO and reward models.

A batch holds documents: both answers of a pair next to each other, or answers with a label.
:func:`document_log_probs` returns a log-probability for each document of a packed or padded batch, and the
losses compare it with that of a reference model. As in :mod:`packhorse.integrations.loss`, a batch
contributes a *sum*, divided by the number of pairs (or labelled answers) of all batches of the step.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F

from packhorse.chat import IGNORE_INDEX
from packhorse.collate.mismatched import mismatch_answers
from packhorse.collate.packed import model_inputs
from packhorse.distributed import has_process_group, reachable_device
from packhorse.errors import ConfigError, suggest
from packhorse.integrations.loss import count_supervised, evaluation_mode, token_log_probs
from packhorse.types import Batch, BatchInfo, DocumentRole, to_device

logger = logging.getLogger(__name__)

DpoLoss = Literal["sigmoid", "robust", "hinge", "ipo"]
KtoLoss = Literal["kto", "apo_zero_unpaired"]


class PreferenceLoss(NamedTuple):
    """A loss, and metrics of this batch without a gradient (empty if it has only placeholders).

    Rewards are the factor ``beta`` times the log-probability less that of the reference; a reward model's are
    its own. ``rewards/accuracies`` is the share of pairs whose chosen answer has the higher reward,
    ``rewards/margins`` the mean difference.
    """

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


# Documents of a batch.


def info_of(batch: Mapping[str, Any]) -> BatchInfo:
    """Return what a loader says about its batch; ConfigError for any other batch."""
    if not isinstance(batch, Batch):
        raise ConfigError(
            f"batch is a {type(batch).__name__}, expected a batch of a loader, whose info says what each "
            'document is: packhorse.load(…, task="preference")',
            setting="batch",
        )
    return batch.info


def labels_of(batch: Batch) -> torch.Tensor:
    """Return the labels of a batch of preference data [B, S], on the CPU; ConfigError for any other batch."""
    labels = info_of(batch).labels
    if labels is None:
        raise ConfigError(
            'the batch has plain answers, not preference data: packhorse.load(…, task="preference")',
            setting="batch",
            value="plain answers",
        )
    return labels


def document_log_probs(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the log-probability of each document's supervised tokens, in float32 [D].

    Documents are those of ``batch.info.document_roles``, row after row; a placeholder has 0. Needs little
    memory in addition to the logits and their gradient, see
    :func:`~packhorse.integrations.loss.token_log_probs`.

    Args:
        logits: of ``model(**model_inputs(batch, model))``: [B, S, vocabulary], or what
            :func:`~packhorse.integrations.loss.token_log_probs` takes of a model that computes less.
        batch: of a loader.
    """
    info, labels = info_of(batch), labels_of(batch)
    values = token_log_probs(logits, labels)
    documents = _document_of_tokens(info, labels.shape)[labels != IGNORE_INDEX]
    documents = to_device(documents, values.device)  # does not wait for a GPU
    return values.new_zeros(_number_of_documents(info)).index_add(0, documents, values)


def document_rewards(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the value of a scalar head at the last token of each document, in float32 (at least) [D].

    The label shift has removed one token. Most templates write a line break after the end of a turn, so the
    last token is the one that ends the answer; to score an answer later, read the head at that token too.

    Args:
        values: [B, S] or [B, S, 1], of a head on the last hidden state of every token.
        batch: of a loader.
    """
    info, shape = info_of(batch), labels_of(batch).shape
    if values.shape[:2] != shape or values.numel() != shape.numel():
        raise ConfigError.of("values", tuple(values.shape), f"expected one for each token {tuple(shape)}")
    documents = _document_of_tokens(info, shape).flatten()
    tokens = torch.nonzero(documents >= 0).flatten()
    last = torch.zeros(_number_of_documents(info), dtype=torch.int64)
    last = last.scatter_reduce(0, documents[tokens], tokens, "amax").to(values.device)
    return values.flatten()[last].to(torch.promote_types(values.dtype, torch.float32))


def _number_of_documents(info: BatchInfo) -> int:
    return sum(map(len, info.document_roles))


def _roles_of(info: BatchInfo) -> list[DocumentRole]:
    return [role for row in info.document_roles for role in row]


def _document_of_tokens(info: BatchInfo, shape: torch.Size) -> torch.Tensor:
    """Return the index of each token's document [B, S], -1 for padding."""
    ids = info.document_ids
    if ids is None:  # one document in each row
        lengths = torch.tensor([row[0] for row in info.document_lengths])
        ids = (torch.arange(shape[-1]) < lengths[:, None]).to(torch.int64)
    before = torch.tensor([0, *map(len, info.document_roles)][:-1]).cumsum(0)
    return torch.where(ids > 0, ids - 1 + before[:, None], -1)


def _find(
    info: BatchInfo, first: DocumentRole, second: DocumentRole, what: str
) -> tuple[list[int], list[int]]:
    """Return the indices of the documents with each of two roles; ConfigError for any other document."""
    roles = _roles_of(info)
    keys = (key for row in info.document_keys for key in row)  # empty for a placeholder
    others = {role or "plain answers" for role, key in zip(roles, keys, strict=True) if key}
    if others := others - {first, second}:
        names = ", ".join(sorted(others))
        raise ConfigError(
            f"this loss is for {what} ({first}, {second}); the batch has {names}. Load each kind of rows "
            'in a loader of its own, with task="preference"',
            setting="batch",
            value=names,
        )
    found = ([n for n, role in enumerate(roles) if role == wanted] for wanted in (first, second))
    return next(found), next(found)


def _find_pairs(info: BatchInfo) -> tuple[list[int], list[int]]:
    """Return the indices of the chosen and of the rejected documents, pair by pair."""
    chosen, rejected = _find(info, "chosen", "rejected", "pairs of answers")
    if len(chosen) != len(rejected):
        expected = f"expected a rejected answer for each of {len(chosen)} chosen ones"
        raise ConfigError.of("batch", len(rejected), expected)
    return chosen, rejected


def _find_labelled(info: BatchInfo) -> tuple[list[int], list[int]]:
    """Return the indices of the good and of the bad documents."""
    return _find(info, "good", "bad", "answers with a label")


def count_preferences(
    batches: Sequence[Batch],
    group: dist.ProcessGroup | None = None,
    device: str | torch.device | None = None,
) -> int:
    """Return the number of pairs and labelled answers of a step: of these micro-batches, on all ranks.

    Every rank must call it once per step: one all-reduce of a number, none without a process group.

    Args:
        batches: of this rank.
        group: the data-parallel ranks; None for all.
        device: of the all-reduce; None for that of the backend.
    """
    count = sum(len(batch.info.samples) for batch in batches)
    return int(_sum_over_ranks(torch.tensor([count]), group, device))


def count_for_loss(batches: Sequence[Batch], group: dist.ProcessGroup | None = None) -> float:
    """Return what a step's loss is divided by: pairs and labelled answers, else supervised tokens."""
    if any(batch.info.labels is not None for batch in batches):
        return count_preferences(batches, group)
    return count_supervised(batches, group)


def _sum_over_ranks(
    values: torch.Tensor, group: dist.ProcessGroup | None, device: str | torch.device | None = None
) -> torch.Tensor:
    if not has_process_group():
        return values
    total = values.to(device or reachable_device(group))
    dist.all_reduce(total, group=group)
    return total.to(values.device)


# The reference.


class LogProbCache(MutableMapping[str, list[float]]):
    """Log-probabilities of a reference by row key, in a file of JSON lines that later runs read.

    Ranks may share a file, and read what others have written to it. It belongs to one reference model and one
    state of the data: use another file, or delete it, if either changes.

    Args:
        path: of the file, which is created if needed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self._values = Path(path), dict[str, list[float]]()
        self._end, self._appended = 0, False
        self._read()

    def _read(self) -> None:
        """Read the lines that were written since."""
        if not self.path.exists() or self.path.stat().st_size == self._end:
            return
        with open(self.path, "rb") as file:
            file.seek(self._end)
            lines, newline, _ = file.read().rpartition(b"\n")  # the last line may be incomplete
        self._end += len(lines) + len(newline)
        for line in lines.splitlines():
            with contextlib.suppress(ValueError):  # a line that a crash cut off
                self._values.update(json.loads(line))

    def __getitem__(self, key: str) -> list[float]:
        if key not in self._values:
            self._read()
        return self._values[key]

    def __setitem__(self, key: str, value: list[float]) -> None:
        self._values[key] = value
        line = json.dumps({key: value}).encode() + b"\n"
        if not self._appended:
            line = b"\n" + line  # a crash may have cut off the last line of the file
        with open(self.path, "ab") as file:
            file.write(line)
        self._appended = True

    def __delitem__(self, key: str) -> None:
        raise TypeError(f"values of {self.path} are never deleted")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def reference_log_probs(
    reference: Callable[..., Any],
    batch: Batch,
    cache: MutableMapping[str, list[float]] | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the log-probability of each document under a reference [D], without a gradient.

    ::

        frozen = copy.deepcopy(model)                   # a frozen copy, before training begins
        reference = reference_log_probs(frozen, batch)
        with model.disable_adapter():                   # or the model itself without its adapter (PEFT)
            reference = reference_log_probs(model, batch)

    A module runs in evaluation mode. With a cache, the reference runs on all ranks unless all of them find
    their rows in it, so that a sharded reference (FSDP, ZeRO) does not hang. Every rank must then call this
    in every micro-step: one all-reduce of a number, none without a process group.

    Args:
        reference: called with the inputs of the batch, returns an output with ``logits``.
        batch: of a loader, on the device of the reference.
        cache: keeps the values by row key: a dict, or a :class:`LogProbCache`. If it has all rows of the
            batch, the reference does not run.
        group: the ranks that run the reference together; None for all.

    Raises:
        ConfigError: the reference runs another attention than the batch is for.
    """
    info, device = info_of(batch), batch["input_ids"].device
    keys = [key for row in info.document_keys for key in row]
    missing = [] if cache is None else [key for key in dict.fromkeys(keys) if key and key not in cache]
    if cache is not None and not _sum_over_ranks(torch.tensor([len(missing)]), group).any():
        values = {key: iter(cache[key]) for key in keys if key}
        return torch.tensor([next(values[key]) if key else 0.0 for key in keys], device=device)
    modules = [reference] if isinstance(reference, torch.nn.Module) else []
    with evaluation_mode(*modules):
        found = document_log_probs(reference(**model_inputs(batch, *modules)).logits, batch)
    if cache is not None:
        values_of_rows: dict[str, list[float]] = {}
        for key, value in zip(keys, found.tolist(), strict=True):
            values_of_rows.setdefault(key, []).append(value)
        for key in missing:
            cache[key] = values_of_rows[key]
    return found


# Losses.


def dpo_loss(
    log_probs: torch.Tensor,
    reference: torch.Tensor,
    batch: Batch,
    *,
    beta: float = 0.1,
    loss_type: DpoLoss = "sigmoid",
    label_smoothing: float = 0.0,
    pairs: int | None = None,
    replicas: int = 1,
) -> PreferenceLoss:
    """Return the contribution of a batch of pairs to the mean DPO loss of a step.

    Args:
        log_probs: of the trained model, from :func:`document_log_probs`.
        reference: of the reference, from :func:`reference_log_probs`.
        batch: of a loader.
        beta: strength of the pull towards the reference (for ``"ipo"``, the regularization tau).
        loss_type: ``"sigmoid"`` (DPO), ``"robust"``, ``"hinge"`` or ``"ipo"`` (by the mean log-probability of
            a document's tokens), as TRL defines them.
        label_smoothing: probability that a pair is the wrong way round, with ``"sigmoid"`` (conservative DPO)
            and ``"robust"``.
        pairs: of the step, on all ranks and in all micro-steps (:func:`count_preferences`); None for those of
            this batch.
        replicas: ranks whose gradients are averaged (DDP, FSDP).

    Raises:
        ConfigError: the batch has no pairs, or a setting is wrong.
    """
    _check_choice("loss_type", loss_type, get_args(DpoLoss))
    if not 0 <= label_smoothing < 0.5 or (label_smoothing and loss_type not in ("sigmoid", "robust")):
        raise ConfigError.of(
            "label_smoothing", label_smoothing, "expected 0 to below 0.5, with 'sigmoid' or 'robust'"
        )
    chosen, rejected = _find_pairs(info_of(batch))
    ratios = _log_ratios(log_probs, reference)
    scores = ratios
    if loss_type == "ipo":
        scores = ratios / _supervised_tokens(batch).to(ratios).clamp(min=1)
    delta = scores[chosen] - scores[rejected]
    right, wrong = -F.logsigmoid(beta * delta), -F.logsigmoid(-beta * delta)
    if loss_type == "ipo":
        losses = (delta - 1 / (2 * beta)) ** 2
    elif loss_type == "hinge":
        losses = torch.relu(1 - beta * delta)
    elif loss_type == "robust":
        losses = ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)
    else:
        losses = (1 - label_smoothing) * right + label_smoothing * wrong
    metrics = _pair_metrics(beta * ratios, chosen, rejected) | _means(
        {"logps/chosen": log_probs[chosen], "logps/rejected": log_probs[rejected]}
    )
    return PreferenceLoss(_mean(losses, pairs, replicas), metrics)


def kto_loss(
    log_probs: torch.Tensor,
    reference: torch.Tensor,
    batch: Batch,
    kl: float | torch.Tensor = 0.0,
    *,
    beta: float = 0.1,
    loss_type: KtoLoss = "kto",
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    examples: int | None = None,
    replicas: int = 1,
) -> PreferenceLoss:
    """Return the contribution of a batch of labelled answers to the mean KTO loss of a step.

    Args:
        log_probs: of the trained model, from :func:`document_log_probs`.
        reference: of the reference, from :func:`reference_log_probs`.
        batch: of a loader.
        kl: the reference point, from :func:`kl_term`; not used by ``"apo_zero_unpaired"``.
        beta: strength of the pull towards the reference.
        loss_type: ``"kto"`` or ``"apo_zero_unpaired"``, as TRL defines them.
        desirable_weight: factor for good answers.
        undesirable_weight: factor for bad answers.
        examples: labelled answers of the step, on all ranks and in all micro-steps
            (:func:`count_preferences`); None for those of this batch.
        replicas: ranks whose gradients are averaged (DDP, FSDP).

    Raises:
        ConfigError: the batch has no labelled answers, or a setting is wrong.
    """
    _check_choice("loss_type", loss_type, get_args(KtoLoss))
    good, bad = _find_labelled(info_of(batch))
    ratios = _log_ratios(log_probs, reference)
    point = torch.as_tensor(kl, dtype=ratios.dtype, device=ratios.device).detach()
    if loss_type == "apo_zero_unpaired":
        point = torch.zeros_like(point)
    losses = torch.cat(
        [
            desirable_weight * (1 - torch.sigmoid(beta * (ratios[good] - point))),
            undesirable_weight * (1 - torch.sigmoid(beta * (point - ratios[bad]))),
        ]
    )
    rewards = beta * ratios
    metrics = _means(
        {
            "rewards/chosen": rewards[good],
            "rewards/rejected": rewards[bad],
            "logps/chosen": log_probs[good],
            "logps/rejected": log_probs[bad],
        }
    )
    if good and bad:
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return PreferenceLoss(_mean(losses, examples, replicas), metrics | {"kl": point})


def mismatched_batch(batch: Batch) -> Batch:
    """Return a batch of labelled answers in which each prompt has the answer of the document before it.

    KTO estimates how far the model is from its reference on such documents (:func:`kl_term`). As in TRL's
    vision collator, answers move on by one within the batch, and media stay with their prompts. A single
    document keeps its answer, but has the role ``""``, and does not count; a warning is logged once. The keys
    of documents name both rows, so that a cache of reference values does not take them for the rows
    themselves.

    Args:
        batch: of a loader, before it is moved to a device.

    Raises:
        ConfigError: the batch has no labelled answers, or an answer has media.
    """
    good, bad = _find_labelled(info_of(batch))
    if len(good) + len(bad) == 1:
        _warn_about_single_answer()
    return mismatch_answers(batch)


@functools.cache
def _warn_about_single_answer() -> None:
    logger.warning(
        "a batch has a single labelled answer, so no other answer can move to its prompt, and the batch adds "
        "nothing to the KL term of KTO. Use at least 2 rows in a batch: a larger pack_size or batch_size"
    )


def kl_term(
    log_probs: torch.Tensor, reference: torch.Tensor, batch: Batch, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return KTO's reference point: the mean log ratio of mismatched documents on all ranks, at least 0.

    Every rank must call it in every micro-step: one all-reduce of two numbers, none without a process group.

    Args:
        log_probs: of the trained model for the mismatched batch, without a gradient.
        reference: likewise of the reference.
        batch: of :func:`mismatched_batch`.
        group: the data-parallel ranks; None for all.
    """
    counted = [index for index, role in enumerate(_roles_of(info_of(batch))) if role]
    ratios = _log_ratios(log_probs, reference).detach()[counted]
    total, number = _sum_over_ranks(torch.stack([ratios.sum(), ratios.new_tensor(len(counted))]), group)
    point: torch.Tensor = total / number.clamp(min=1)
    return point.clamp(min=0)


def reward_loss(
    rewards: torch.Tensor,
    batch: Batch,
    *,
    center_rewards_coefficient: float = 0.0,
    pairs: int | None = None,
    replicas: int = 1,
) -> PreferenceLoss:
    """Return the contribution of a batch of pairs to the mean Bradley-Terry loss of a reward model.

    Args:
        rewards: from :func:`document_rewards`.
        batch: of a loader.
        center_rewards_coefficient: factor of the squared sum of both rewards, which keeps their mean near 0.
        pairs: see :func:`dpo_loss`.
        replicas: see :func:`dpo_loss`.

    Raises:
        ConfigError: the batch has no pairs.
    """
    chosen, rejected = _find_pairs(info_of(batch))
    losses = -F.logsigmoid(rewards[chosen] - rewards[rejected])
    losses = losses + center_rewards_coefficient * (rewards[chosen] + rewards[rejected]) ** 2
    return PreferenceLoss(_mean(losses, pairs, replicas), _pair_metrics(rewards, chosen, rejected))


def _supervised_tokens(batch: Batch) -> torch.Tensor:
    """Return the number of supervised tokens of each document [D]."""
    labels = labels_of(batch)
    owners = _document_of_tokens(batch.info, labels.shape)[labels != IGNORE_INDEX]
    return torch.bincount(owners, minlength=_number_of_documents(batch.info))


def _log_ratios(log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    if log_probs.shape != reference.shape:
        raise ConfigError.of(
            "reference", tuple(reference.shape), f"expected one value per document {tuple(log_probs.shape)}"
        )
    return log_probs - reference.detach().to(log_probs.device)


def _mean(losses: torch.Tensor, number: int | None, replicas: int) -> torch.Tensor:
    return losses.sum() * (replicas / max(len(losses) if number is None else number, 1))


def _pair_metrics(rewards: torch.Tensor, chosen: list[int], rejected: list[int]) -> dict[str, torch.Tensor]:
    better, worse = rewards[chosen], rewards[rejected]
    return _means(
        {
            "rewards/chosen": better,
            "rewards/rejected": worse,
            "rewards/accuracies": (better > worse).to(rewards.dtype),
            "rewards/margins": better - worse,
        }
    )


def _means(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().mean() for name, value in values.items() if len(value)}


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError.of(name, value, f"expected one of {', '.join(choices)}{suggest(value, choices)}")
