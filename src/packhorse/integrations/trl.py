"""A loader in TRL's SFTTrainer; importing this imports TRL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from packhorse.errors import ConfigError, require
from packhorse.families.models import router_loss_coefficient
from packhorse.families.router_loss import has_router_loss
from packhorse.integrations.transformers import TrainFromLoader
from packhorse.loader.loader import Loader

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin, TrainingArguments

_trl: Any = require("trl", "trl")
_datasets: Any = require("datasets", "trl")

_OF_THE_LOADER = ("train_dataset", "formatting_func", "data_collator", "compute_metrics")
# Settings of SFTConfig that contradict a loader, and the reason.
_CONTRADICTIONS = {
    "packing": "the loader makes the packs",
    "eval_packing": "the loader makes the packs",
    "padding_free": "the loader makes the packs, without padding",
    "assistant_only_loss": "the loader supervises the assistant's turns, and nothing else",
    "chat_template_path": "set processor.chat_template before packhorse.load",
}
_MAX_LENGTH = 1024  # the default of SFTConfig


class SFTTrainer(TrainFromLoader, _trl.SFTTrainer):  # type: ignore[misc]
    """TRL's ``SFTTrainer`` that trains from a loader.

    ::

        from packhorse.integrations.trl import SFTTrainer

        trainer = SFTTrainer(model, SFTConfig("out", gradient_accumulation_steps=4), loader=loader)
        trainer.train(resume_from_checkpoint=True)

    The loader reads, packs, truncates and labels the rows, so there is no ``train_dataset``. Loss,
    checkpoints and logged metrics are those of :class:`~packhorse.integrations.transformers.TrainFromLoader`.

    Args:
        model: the model that the loader was built with, or a ``PeftModel`` around it.
        args: an ``SFTConfig`` with the loader's ``gradient_accumulation_steps``.
        loader: a :class:`packhorse.Loader`.
        eval_dataset: a loader over validation rows, or a dict of several by name.
        processing_class: saved with checkpoints; None takes the loader's processor.
        **options: other arguments of TRL's class: ``peft_config``, ``callbacks``, ``optimizers``, ….

    Raises:
        ConfigError: arguments contradict the loader, or would have no effect.
    """

    def __init__(
        self,
        model: PreTrainedModel | Any,
        args: TrainingArguments | None = None,
        *,
        loader: Loader,
        eval_dataset: Loader | dict[str, Loader] | None = None,
        processing_class: ProcessorMixin | None = None,
        **options: Any,
    ) -> None:
        _check_arguments(model, eval_dataset, options)
        _check_settings(args, model, loader)
        # TRL requires datasets and prepares them; this one is encoded already, and never read.
        unused = _datasets.Dataset.from_dict({"input_ids": [[0, 0]], "labels": [[0, 0]]})
        super().__init__(
            model,
            args,
            loader=loader,
            train_dataset=unused,
            eval_dataset=None if eval_dataset is None else unused,
            processing_class=loader.processor if processing_class is None else processing_class,
            **options,
        )
        self.eval_dataset = eval_dataset


def _check_arguments(model: Any, eval_dataset: Any, options: dict[str, Any]) -> None:
    if isinstance(model, str):
        raise ConfigError.of(
            "model",
            model,
            "expected a model. Load it before the loader, which makes batches for it: "
            "AutoModelForImageTextToText.from_pretrained(…), packhorse.prepare(model), "
            "packhorse.load(…, model=model)",
        )
    for name in _OF_THE_LOADER:
        if options.get(name) is not None:
            raise ConfigError(
                f"{name} would have no effect: the rows are those of the loader. Remove it", setting=name
            )
    loaders = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    if eval_dataset is not None and not all(isinstance(value, Loader) for value in loaders):
        raise ConfigError(
            f"eval_dataset is a {type(eval_dataset).__name__}: expected a loader over the validation rows "
            "(packhorse.load), or a dict of loaders",
            setting="eval_dataset",
        )


def _check_settings(args: Any, model: Any, loader: Loader) -> None:
    for name, reason in _CONTRADICTIONS.items():
        if value := getattr(args, name, None):
            raise ConfigError.of(name, value, f"remove it; {reason}")
    if getattr(args, "completion_only_loss", None) is False:
        raise ConfigError.of("completion_only_loss", False, "remove it; the loader supervises answers only")
    length, pack_size = getattr(args, "max_length", None), loader.config.pack_size
    if length not in (None, _MAX_LENGTH, pack_size):
        raise ConfigError.of(
            "max_length", length, f"the loader has {pack_size=}: remove max_length, and set pack_size"
        )
    text, coefficient = model.config.get_text_config(), getattr(args, "router_aux_loss_coef", None)
    if coefficient is None:
        coefficient = getattr(text, "router_aux_loss_coef", 0.0)
    if not hasattr(text, "output_router_logits") or not coefficient:
        return
    if not has_router_loss(model.config):
        raise ConfigError.of(
            "router_aux_loss_coef",
            coefficient,
            "TRL adds the router's auxiliary loss, for which packhorse.load has to know it. Set "
            "model.config.get_text_config().output_router_logits = True before packhorse.load, or "
            "SFTConfig(router_aux_loss_coef=0.0) to train without it",
        )
    if coefficient != (own := router_loss_coefficient(model)):
        raise ConfigError.of(
            "router_aux_loss_coef",
            coefficient,
            f"the model has {own}: remove it, and load the model with from_pretrained(…, "
            f"router_aux_loss_coef={coefficient})",
        )
