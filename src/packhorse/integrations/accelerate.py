"""A loader in a loop of Accelerate.

``accelerator.prepare`` is for the model and the optimizer; the loader stands beside it, as it deals batches
to ranks itself. :func:`attach` makes its state part of every ``accelerator.save_state`` and ``load_state``.
Save when an optimizer step is complete: Accelerate does not save the gradients of a step that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from packhorse.errors import ConfigError
from packhorse.integrations.loss import Batch, count_supervised, grouped
from packhorse.integrations.trainer_feed import check_model, check_world
from packhorse.types import to_device


def attach(accelerator: Any, loader: Any) -> Any:
    """Put the loader's state into checkpoints; ``load_state`` goes on after the last batch delivered.

    Args:
        accelerator: an ``accelerate.Accelerator``, whose ``gradient_accumulation_steps`` is the loader's.
        loader: a :class:`packhorse.Loader`.

    Returns:
        The loader.

    Raises:
        ConfigError: the loader deals to other ranks, or accumulates another number of micro-steps; or packed
            rows are wrong for a model that was prepared. Later ``save_state`` raises it in the middle of an
            optimizer step, before anything is saved or an old checkpoint is removed.
    """
    check_world(
        loader, accelerator.process_index, accelerator.num_processes, accelerator.gradient_accumulation_steps
    )
    _check_models(accelerator, loader)
    accelerator.register_for_checkpointing(loader)
    accelerator.save_state = _checked(accelerator.save_state, accelerator, loader)
    return loader


def _checked(save_state: Callable[..., Any], accelerator: Any, loader: Any) -> Callable[..., Any]:
    # Not a pre-hook: Accelerate runs these after it has removed the checkpoints beyond `total_limit`.
    @wraps(save_state)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _refuse_unfinished_step(accelerator, loader)
        return save_state(*args, **kwargs)

    return checked


def _check_models(accelerator: Any, loader: Any) -> None:
    # Accelerate has no public list of the models that were prepared.
    for model in accelerator._models:
        check_model(loader, model)


def _refuse_unfinished_step(accelerator: Any, loader: Any) -> None:
    """Raise while gradients are accumulated: the state would count micro-batches that are lost with them."""
    per_step = loader.config.gradient_accumulation_steps
    if not accelerator.sync_gradients or loader.cursor % per_step:
        raise ConfigError(
            f"save_state in the middle of an optimizer step of {per_step} micro-batches: the accumulated "
            "gradients are not saved, so the micro-batches so far would never be trained. Save after the "
            "last one, when accelerator.sync_gradients is True"
        )


def steps(accelerator: Any, loader: Any) -> Iterator[tuple[list[Batch], int]]:
    """The micro-batches of each step on the accelerator's device, and the supervised tokens of all ranks.

    Loop over the micro-batches under ``accelerator.accumulate(model)``.

    Raises:
        ConfigError: packed rows are wrong for a model that was prepared.
    """
    _check_models(accelerator, loader)
    for group in grouped(loader, accelerator.gradient_accumulation_steps):
        yield [to_device(batch, accelerator.device) for batch in group], count_supervised(group)


def replicas(accelerator: Any) -> int:
    """What :func:`~packhorse.integrations.loss.token_loss` is to be told.

    ``accelerator.backward`` divides by the number of accumulated micro-steps, and ranks average gradients:
    both are undone, as the loss is divided by the tokens of all of them already.
    """
    return int(accelerator.num_processes * accelerator.gradient_accumulation_steps)
