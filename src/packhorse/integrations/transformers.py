"""Models and the Trainer of transformers.

:func:`prepare` makes a model ready for packed batches. :class:`TrainFromLoader` is a mix-in that makes a
Trainer train from a loader: no second sharding, no replay on resume, no label shifted twice.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from packhorse.collate.packed import model_inputs
from packhorse.errors import ConfigError, require
from packhorse.families.logits import LogitsChoice, LogitsMode, set_logits
from packhorse.families.models import (
    class_of,
    honours_shift_labels,
    is_compiled,
    make_honour_shift_labels,
    models_in,
    unwrap,
)
from packhorse.families.packing import accept_unproven, check_packable
from packhorse.families.probe import probe_logits
from packhorse.families.router_loss import (
    check_model_router_loss,
    check_router_loss,
    check_z_loss,
    has_router_loss,
    install_router_loss,
    takes_router_mask,
)
from packhorse.families.stateful import BOUNDARIES, PER_DOCUMENT, check_mode, install, layers_of
from packhorse.families.vision import ONE_CALL
from packhorse.integrations.attention import (
    check_vision,
    choose_attention,
    inspect_attention,
    use_attention,
    use_vision,
)
from packhorse.integrations.loss import (
    batch_loss,
    check_plain_answers,
    count_batch_supervised,
    count_supervised,
    evaluate,
)
from packhorse.integrations.trainer_feed import TrainerFeed, check_model, check_world
from packhorse.loader.loader import Loader
from packhorse.types import Batch, to_device
from packhorse.utils.files import write_atomic

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

LOADER_STATE = "packhorse_loader.json"
"""File name of the loader's state in a checkpoint folder."""


class TrainFromLoader:
    """Mix-in for a Trainer class that adds the argument ``loader``.

    ::

        class MyTrainer(TrainFromLoader, Trainer):
            pass

        trainer = MyTrainer(model, TrainingArguments("out", gradient_accumulation_steps=4), loader=loader)
        trainer.train(resume_from_checkpoint=True)

    - The loader assigns batches to ranks; ``per_device_train_batch_size`` has no effect.
    - The loss is one mean over the supervised tokens of all ranks and accumulated micro-steps; a weighted one
      if rows have loss weights. With ``output_router_logits=True`` each micro-batch adds the auxiliary loss
      of the router as :func:`packhorse.batch_loss` says.
    - Each checkpoint holds the loader's state; ``resume_from_checkpoint`` resumes after the last trained
      batch, without loading earlier ones, also with another number of ranks.
    - The loader's metrics are logged with the loss.

    ``eval_dataset`` may be a second loader, or several by name: ``eval_loss`` is then the mean over their
    supervised tokens (:func:`packhorse.evaluate`). Evaluation on other datasets is that of the Trainer.

    Args:
        loader: a :class:`packhorse.Loader` with the ``gradient_accumulation_steps`` of the Trainer.

    Raises:
        ConfigError: arguments of the Trainer contradict the loader, packed rows are wrong for the model, or
            the Trainer class has its own loss (preference and reward trainers of TRL).
    """

    # The Trainer then does not divide by the number of accumulated micro-steps.
    loss_is_scaled_for_ga: bool | None = True

    def __init__(self, *arguments: Any, loader: Loader, **options: Any) -> None:
        _check_loss(type(self))
        check_plain_answers(loader, type(self).__name__)
        self.loader = loader
        self._feed = TrainerFeed(loader)
        super().__init__(*arguments, **options)
        args: TrainingArguments = self.args  # type: ignore[attr-defined]
        _check(args, loader)
        check_model(loader, self.model)  # type: ignore[attr-defined]
        if self.compute_loss_func is not None:  # type: ignore[attr-defined]
            raise ConfigError(
                "compute_loss_func is set, but TrainFromLoader computes the loss. Remove it, or override "
                "compute_loss in your class",
                setting="compute_loss_func",
            )
        for routed in models_in(self.model):  # type: ignore[attr-defined]
            check_model_router_loss(routed)
        self._check_metrics(self.eval_dataset)  # type: ignore[attr-defined]
        args.ignore_data_skip = True  # the loader skips used batches
        self.model_accepts_loss_kwargs = True  # for versions without loss_is_scaled_for_ga
        self._requested_steps = args.max_steps
        self._resumed = self._finished = False
        self._counted_step = 0  # the global_step at which micro-batches were last counted

    def get_train_dataloader(self) -> TrainerFeed:
        """Return the loader's batches, not prepared by Accelerate; raise if the model does not suit them."""
        check_model(self.loader, self.model)  # type: ignore[attr-defined]
        return self._feed

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **options: Any) -> Any:
        """Train as the Trainer does; the loader resumes from the checkpoint too."""
        args: TrainingArguments = self.args  # type: ignore[attr-defined]
        args.max_steps, self._resumed, self._finished = self._requested_steps, False, False
        self._count_finished_step()
        if resume_from_checkpoint is True:
            last = _last_checkpoint(Path(str(args.output_dir)))
            if last is None:
                raise ConfigError(
                    f"resume_from_checkpoint=True, but there is no checkpoint in {args.output_dir}",
                    setting="resume_from_checkpoint",
                    value=True,
                    path=str(args.output_dir),
                )
            resume_from_checkpoint = str(last)
        if resume_from_checkpoint:
            self._resume(Path(str(resume_from_checkpoint)))
        elif self._feed.trained < self._feed.delivered:
            self._feed.load_state_dict(self._feed.state_dict())
        return super().train(resume_from_checkpoint or None, *arguments, **options)  # type: ignore[misc]

    def _resume(self, checkpoint: Path) -> None:
        """Restore the loader, and set ``max_steps`` from the remaining epochs.

        The Trainer derives its epoch from the number of steps, which is wrong for another number of ranks.
        """
        args: TrainingArguments = self.args  # type: ignore[attr-defined]
        self._feed.load_state_dict(_read_state(checkpoint / _state_file(self.loader)))
        self._resumed = True
        if not (checkpoint / _WRITTEN_LAST).is_file():
            raise ConfigError(
                f"{checkpoint} is incomplete: it has no {_WRITTEN_LAST} (was the run stopped while it was "
                "written?). Resume from an earlier checkpoint",
                path=checkpoint,
            )
        done = int(json.loads((checkpoint / _WRITTEN_LAST).read_text())["global_step"])
        if self._requested_steps <= 0:
            accumulation = args.gradient_accumulation_steps
            rest, whole = (math.ceil(n / accumulation) for n in (self.loader.remaining, len(self._feed)))
            remaining = rest + math.ceil((args.num_train_epochs - self.loader.epoch - 1) * whole)
            args.max_steps = max(done + remaining, 1)  # 0 would mean "not set"
        self._finished = args.max_steps <= done

    def set_initial_training_values(self, *arguments: Any, **options: Any) -> Any:
        """Return the values of the Trainer, with more epochs on resume: the first one is a partial one.

        ``max_steps`` ends training, so surplus epochs have no effect. A finished run gets no epoch: the
        Trainer would stop one step too late.
        """
        epochs, *others = super().set_initial_training_values(*arguments, **options)  # type: ignore[misc]
        return (0 if self._finished else epochs + 2 * self._resumed, *others)

    def get_batch_samples(self, *arguments: Any, **options: Any) -> tuple[list[Any], float | None]:
        """Return the micro-batches of a step, and their supervised tokens (or weight) on all ranks."""
        batches, _ = super().get_batch_samples(*arguments, **options)  # type: ignore[misc]
        return batches, count_supervised(batches) if batches else None

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        """Train a micro-batch as the Trainer does, and count it."""
        self._count_finished_step()
        loss = super().training_step(*arguments, **options)  # type: ignore[misc]
        self._feed.accumulated += 1
        return loss

    def _count_finished_step(self) -> None:
        """Count micro-batches as trained after their optimizer step.

        A checkpoint may be saved before: on SIGTERM (``enable_jit_checkpoint``), or by a callback.
        """
        step: int = self.state.global_step  # type: ignore[attr-defined]
        if step != self._counted_step:
            self._counted_step = step
            self._feed.finish_step()

    def _prepare_inputs(self, inputs: Mapping[str, Any]) -> Any:
        """Move inputs; the Trainer alone would not move block masks nor keep ``info``."""
        moved = to_device(inputs, self.args.device)  # type: ignore[attr-defined]
        prepared = super()._prepare_inputs(moved)  # type: ignore[misc]
        return Batch(prepared, moved.info) if isinstance(moved, Batch) else prepared

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: float | torch.Tensor | None = None,
    ) -> Any:
        """Return the contribution of a micro-batch to the mean over the step's tokens; see :mod:`.loss`."""
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        outputs = model(**model_inputs(inputs, model, check=False))  # the feed has checked the model
        tokens = count_batch_supervised(inputs) if num_items_in_batch is None else num_items_in_batch
        ranks = int(self.accelerator.num_processes)  # type: ignore[attr-defined]
        loss = batch_loss(model, outputs, inputs, tokens, ranks)
        return (loss, outputs) if return_outputs else loss

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate as the Trainer does; with a loader, return the loss and perplexity over its tokens."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset  # type: ignore[attr-defined]
        if isinstance(dataset, dict) and any(isinstance(value, Loader) for value in dataset.values()):
            prefix, found = metric_key_prefix, dict[str, float]()
            for name, value in dataset.items():
                found |= self.evaluate(value, ignore_keys, f"{prefix}_{name}")
            return found
        if not isinstance(dataset, Loader):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)  # type: ignore[misc,no-any-return]
        self._check_metrics(dataset)
        start = time.time()
        with self.accelerator.autocast():  # type: ignore[attr-defined]
            result = evaluate(self.model, dataset)  # type: ignore[attr-defined]
        values = {"loss": result.loss, "perplexity": result.perplexity, "tokens": result.tokens}
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in values.items()}
        metrics[f"{metric_key_prefix}_runtime"] = round(time.time() - start, 4)
        self.log(metrics)
        handler = self.callback_handler  # type: ignore[attr-defined]
        self.control = handler.on_evaluate(self.args, self.state, self.control, metrics)  # type: ignore[attr-defined,has-type]
        return metrics

    def _check_metrics(self, dataset: Any) -> None:
        datasets = dataset.values() if isinstance(dataset, dict) else [dataset]
        if self.compute_metrics is not None and any(isinstance(value, Loader) for value in datasets):  # type: ignore[attr-defined]
            raise ConfigError(
                "compute_metrics is set, but an evaluation with a loader has the loss only: remove it, or "
                "pass encoded samples as eval_dataset",
                setting="compute_metrics",
            )

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: PreTrainedModel | None = None
    ) -> None:
        """Load weights as the Trainer does, or with ``from_pretrained`` if their names differ.

        transformers saves Qwen2-VL under the names of the first release, which its Trainer does not find: it
        would silently keep the initial weights.
        """
        whole = self.model if model is None else model  # type: ignore[attr-defined]
        saved = _saved_names(Path(resume_from_checkpoint))
        if model is None and saved and not saved <= whole.state_dict().keys():
            loaded = type(whole).from_pretrained(resume_from_checkpoint, dtype=whole.dtype)
            whole.load_state_dict(loaded.state_dict())
            return
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """Log as the Trainer does, with the loader's metrics and epoch."""
        if "loss" in logs:
            self.state.epoch = self._feed.position  # type: ignore[attr-defined]
            metrics = self.loader.metrics.as_dict()
            logs = {**logs, **{f"data/{name}": value for name, value in metrics.items()}}
        super().log(logs, *arguments, **options)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as the Trainer does; a checkpoint gets the loader's state first."""
        args: TrainingArguments = self.args  # type: ignore[attr-defined]
        per_rank = self.loader.config.shard_data
        self._count_finished_step()
        if _internal_call and output_dir is not None and (args.should_save or per_rank):
            state = json.dumps(self._feed.state_dict()).encode()
            write_atomic(Path(output_dir) / _state_file(self.loader), lambda file: file.write(state))
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]


# Trainers whose loss is a mean of cross entropies over tokens, which the mix-in may replace.
_CROSS_ENTROPY = frozenset({("transformers", "Trainer"), ("trl", "SFTTrainer")})


def _check_loss(trainer: type) -> None:
    """Raise if the trainer class after the mix-in computes another loss."""
    after = trainer.__mro__[trainer.__mro__.index(TrainFromLoader) + 1 :]
    owner = next((base for base in after if "compute_loss" in vars(base)), None)
    if owner is None or (owner.__module__.partition(".")[0], owner.__name__) in _CROSS_ENTROPY:
        return
    raise ConfigError(
        f"{owner.__module__}.{owner.__name__} computes its own loss, but TrainFromLoader trains plain cross "
        "entropy: use it with transformers.Trainer or trl.SFTTrainer. For DPO, KTO and reward models write "
        'packhorse.load(…, task="preference") and a loop of your own with the losses of '
        "packhorse.integrations.preference, as docs/how-to/preference.md shows"
    )


def _check(args: TrainingArguments, loader: Loader) -> None:
    """Raise if arguments of the Trainer contradict the loader."""
    steps = args.gradient_accumulation_steps
    check_world(loader, args.process_index, args.world_size, steps, saved_by_all=True)
    if args.n_gpu > 1:
        raise ConfigError.of(
            "n_gpu",
            args.n_gpu,
            "one process for several GPUs (DataParallel) would split packs: start one process per GPU, with "
            "torchrun or accelerate launch",
        )
    if args.auto_find_batch_size:
        raise ConfigError.of(
            "auto_find_batch_size", True, "the loader's batches are planned, set pack_size instead"
        )
    if factor := args.label_smoothing_factor:
        raise ConfigError.of("label_smoothing_factor", factor, "the loss of packed batches has none")
    if (loss_type := getattr(args, "loss_type", "nll")) != "nll":  # of trl's SFTConfig
        raise ConfigError.of("loss_type", loss_type, "TrainFromLoader trains cross entropy ('nll') only")


def _saved_names(checkpoint: Path) -> set[str]:
    """Return the weight names of a whole model in a checkpoint; empty for adapters and shards."""
    index, weights = checkpoint / "model.safetensors.index.json", checkpoint / "model.safetensors"
    if index.exists():
        return set(json.loads(index.read_text())["weight_map"])
    if not weights.exists():
        return set()
    with require("safetensors", "train").safe_open(weights, "pt") as file:
        return set(file.keys())


def _state_file(loader: Loader) -> str:
    # With shard_data, each rank has its own rows and its own state.
    return f"packhorse_loader_{loader.world.rank}.json" if loader.config.shard_data else LOADER_STATE


def _read_state(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path.parent} has no {path.name}: expected a checkpoint of TrainFromLoader. "
            "To start with its weights and the first epoch, load the model from it and call train()",
            path=path,
        ) from error


__all__ = ["LOADER_STATE", "TrainFromLoader", "honours_shift_labels", "prepare"]

logger = getLogger("packhorse.integrations")

_WRITTEN_LAST = "trainer_state.json"  # of the files of a checkpoint


def _last_checkpoint(folder: Path) -> Path | None:
    """Return the last complete checkpoint; a run that is killed may leave an incomplete one."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")}
    for path in sorted((path for path in steps if steps[path].isdigit()), key=lambda path: -int(steps[path])):
        if (path / _WRITTEN_LAST).is_file():
            return path
        logger.warning("%s is incomplete, because the run was stopped while it was written: skipped", path)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What :func:`prepare` set; ``print`` it.

    Attributes:
        model: name of the model's class.
        attn_implementation: of the decoder. A loader built with ``model=model`` makes batches for it.
        stateful_layers: the layers that carry state, by their class: how many there are.
        kernels: of those, the classes that run in one call, with kernels that take the boundaries of
            documents; the others are called document by document. The first batch measures whether these
            kernels keep documents apart; if not, a warning says that their layers do not use them.
        computes_loss: whether hooks compute the model's own loss, because the installed transformers would
            shift the labels of a batch again.
        tested: whether tests of Packhorse show that packed rows are right for this class; else a tiny copy of
            it was measured.
        router_loss: whether the model adds the auxiliary loss of its router (``output_router_logits=True``),
            in which only tokens of documents count.
        logits: which ones the model computes for ``model_inputs(batch, model)``: ``"supervised"``,
            ``"chunked"`` (none, but log-probabilities) or ``"all"``.
        all_logits: that the model computes all of them nevertheless, or those of batches of several rows, and
            why; empty if it does not, or ``logits="all"`` was requested.
        unproven: why no test and no measurement shows it for this model, with ``allow_unproven=True``; empty
            if one does.
        vision: ``"one_call"`` if the attention of the vision tower runs once for all images, ``"per_item"``
            if once for each image; empty for models without a tower that could do either.
        vision_problem: why it runs once for each image on a GPU with ``vision="auto"``.
    """

    model: str
    attn_implementation: str
    stateful_layers: Mapping[str, int]
    kernels: tuple[str, ...]
    computes_loss: bool
    tested: bool
    router_loss: bool = False
    logits: LogitsMode = "all"
    all_logits: str = ""
    unproven: str = ""
    vision: str = ""
    vision_problem: str = ""

    @property
    def proven(self) -> bool:
        """Whether a test, or the measurement, shows that packed rows are right for this model."""
        return not self.unproven

    def __str__(self) -> str:
        parts = [f"{self.attn_implementation} attention"]
        for name, count in self.stateful_layers.items():
            parts.append(describe_layers(name, count, BOUNDARIES if name in self.kernels else PER_DOCUMENT))
        if self.vision:
            images = "for all images" if self.vision == ONE_CALL else "per image"
            why = f" ({self.vision_problem})" if self.vision_problem else ""
            parts.append(f"one attention call {images} in the vision tower{why}")
        if self.computes_loss:
            parts.append("the loss computed from shift_labels by hooks")
        if self.router_loss:
            parts.append("only tokens of documents in the router's auxiliary loss")
        parts += [_LOGITS[self.logits]] if self.logits != "all" else []
        parts += [self.all_logits] if self.all_logits else []
        proof = "" if self.tested else " (measured on a tiny copy: packed equals unpacked)"
        if not self.proven:
            proof = (
                f" (not proven that packed equals unpacked: {self.unproven}; packhorse parity measures it)"
            )
        return f"{self.model}: {'; '.join(parts)}{proof}"


_LOGITS: dict[LogitsMode, str] = {
    "all": "",
    "supervised": "logits of supervised tokens only",
    "chunked": "log-probabilities of supervised tokens in chunks, without logits",
}


def describe_layers(name: str, count: int, mode: str) -> str:
    """Return how the layers of a class that carry state keep documents apart."""
    how = "with the boundaries of documents" if mode == BOUNDARIES else "document by document"
    return f"{count} {name} called {how}"


def check_stateful(stateful: str) -> None:
    """Raise ConfigError for another value of ``stateful`` than :func:`prepare` takes."""
    if stateful not in (choices := ("auto", PER_DOCUMENT, BOUNDARIES)):
        raise ConfigError.of("stateful", stateful, f"expected one of {', '.join(choices)}")


def prepare(
    model: PreTrainedModel,
    attn_implementation: str | None = "auto",
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    longest: int | None = None,
    stateful: str = "auto",
    vision: str = "auto",
    logits: str = "auto",
    allow_unproven: bool = False,
) -> Prepared:
    """Make a model of transformers ready for packed training.

    Sets the decoder's attention and ``use_cache=False``: with a cache, transformers takes each row for one
    document. On a GPU the attention of a vision tower runs once for all images, instead of once for each.
    Layers that carry state (linear attention, state spaces, short convolutions) get their inputs document by
    document. If the installed transformers would shift the labels of a batch again, the model gets hooks that
    compute its loss from ``shift_labels``. A mixture of experts gets a forward pass in which only tokens of
    documents count in the auxiliary loss of its router (``output_router_logits=True``). Weights do not
    change.

    Args:
        model: the model, before or after it is moved to its device; also inside PEFT, DDP, FSDP or
            ``torch.compile``.
        attn_implementation: ``"varlen"``, ``"flash_attention_2"``, ``"flex_attention"``, ``"sdpa"`` or
            ``"eager"``; ``"auto"`` or None chooses the first of these that is right for the model (without a
            GPU ``"sdpa"`` first). Or another name of transformers, a flash kernel of the Hub, or a registered
            function (:func:`packhorse.integrations.attention.declare_batch_format`).
        device: to train on; None for a GPU if there is one, else the model's.
        dtype: of the weights in computations, if different from now (mixed precision of FSDP).
        autocast: the dtype of ``torch.autocast`` around the forward pass (``bf16=True`` in the Trainer).
        longest: tokens of the longest document, if known: sliding windows at least as long do not matter.
        stateful: how layers that carry state keep documents apart: ``"per_document"`` calls them for groups
            of documents of similar length; ``"boundaries"`` calls them once, if packages with kernels that
            take boundaries are installed (flash-linear-attention, causal-conv1d, mamba-ssm); ``"auto"`` is
            ``"boundaries"`` on a GPU.
        vision: how often a layer of the vision tower calls its attention: ``"one_call"`` once for all images
            of a batch, with PyTorch's varlen kernel (or the decoder's flash attention); ``"per_item"`` once
            for each image, with sdpa, as transformers does; ``"auto"`` is ``"one_call"`` on a GPU, where the
            kernel is right for the tower. Towers that run padded in one call do not change.
        logits: which ones the model computes for :func:`packhorse.model_inputs` with ``model``.
            ``"supervised"``: those of tokens with a label, which are all that a loss reads. ``"chunked"``:
            none; ``output.logits`` are then the log-probabilities [N] of the labels, computed a thousand
            tokens at a time, and once more in the backward pass, so large vocabularies need little memory.
            ``"all"``. ``"auto"`` is ``"supervised"`` if a measurement on a tiny copy shows that the model
            computes these, else ``"all"``. Losses of Packhorse take all of them, and ``model(**batch).loss``
            stays as it is.
        allow_unproven: also prepare a model whose only problem is that nothing proves packed rows right for
            it (a class that takes images and has no test, say). Run ``packhorse parity`` first. Loaders,
            trainers and :func:`packhorse.model_inputs` then accept this very model.

    Returns:
        What was set.

    Raises:
        ConfigError: the backend would be wrong for this model, the model cannot be trained on packs, or does
            not compute the ``logits``.
    """
    check_stateful(stateful)
    check_vision(vision)
    if logits not in (choices := ("auto", *_LOGITS)):
        raise ConfigError.of("logits", logits, f"expected one of {', '.join(choices)}")
    if not isinstance(model, torch.nn.Module):
        what = f"prepare changes the model itself, and model is a {type(model).__name__}"
        expected = "the model that AutoModelForImageTextToText.from_pretrained(…) returned"
        raise ConfigError(f"{what}: pass {expected}", setting="model", value=model)
    inner = unwrap(model)
    check_z_loss(inner)
    check_router_loss(inner.config, True)
    packing = check_packable(model, measured=allow_unproven, trains=False)
    info = inspect_attention(inner, device, dtype, autocast)
    if packing.problems and attn_implementation in (None, "auto"):
        info = replace(info, no_boundaries=info.no_boundaries or "nothing proves that this model uses them")
    backend = choose_attention(info, attn_implementation or "auto", longest)
    check_mode(layers_of(inner, packing.layers), stateful)
    towers, problem = use_vision(inner, vision, info, backend, autocast or dtype)
    choice, all_logits = _choose_logits(inner, logits)
    use_attention(inner, backend)
    for config in (inner.config, inner.config.get_text_config()):
        config.use_cache = False
    make_honour_shift_labels(inner)
    install_router_loss(inner)
    layers = install(inner, packing.layers, stateful, info.device)
    set_logits(inner, choice)
    hooks = layers or towers == ONE_CALL or takes_router_mask(inner) or choice.mode == "chunked"
    if hooks and is_compiled(model):
        torch.compiler.reset()  # code compiled before has no hooks
    if packing.problems:
        accept_unproven(inner)
    prepared = Prepared(
        model=type(inner).__name__,
        attn_implementation=backend,
        stateful_layers={name: count for name, (count, _) in layers.items()},
        kernels=tuple(name for name, (_, mode) in layers.items() if mode == BOUNDARIES),
        computes_loss=not honours_shift_labels(type(inner)),
        tested=packing.tested,
        router_loss=has_router_loss(inner.config),
        logits=choice.mode,
        all_logits=all_logits,
        unproven="; ".join(packing.problems),
        vision=towers,
        vision_problem=problem,
    )
    logger.info("%s", prepared)
    return prepared


def _choose_logits(model: Any, requested: str) -> tuple[LogitsChoice, str]:
    """Return which logits a model computes, and of which batches, and why, it computes all nevertheless."""
    if requested == "all":
        return LogitsChoice(), ""
    name = class_of(model).__name__
    measured = probe_logits(class_of(model), model.config)
    mode: LogitsMode = "chunked" if requested == "chunked" else "supervised"
    problem = measured.one_row or (measured.chunked if mode == "chunked" else "")
    if problem and requested != "auto":
        why = f'{name} does not compute them ({problem}). Use logits="auto"'
        raise ConfigError.of("logits", requested, why)
    if problem:
        return LogitsChoice(), f"all logits, because {name} computes no others ({problem})"
    if why := measured.several_rows:
        return LogitsChoice(mode, several_rows=False), f"all logits of batches of several rows ({why})"
    return LogitsChoice(mode), ""
