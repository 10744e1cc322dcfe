"""A loader in a training loop with Accelerate.

Pass model and optimizer to ``accelerator.prepare``, but not the loader, which assigns batches to ranks
itself. :func:`attach` adds its state to ``accelerator.save_state`` and ``load_state``. Save when an optimizer
step is complete: Accelerate does not save accumulated gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

from packhorse.errors import ConfigError
from packhorse.integrations.loss import grouped
from packhorse.integrations.preference import count_for_loss
from packhorse.integrations.trainer_feed import check_model, check_world
from packhorse.types import Batch, to_device

if TYPE_CHECKING:
    from accelerate import Accelerator

    from packhorse.loader.loader import Loader


def attach(accelerator: Accelerator, loader: Loader) -> Loader:
    """Add the loader's state to checkpoints; ``load_state`` resumes after the last batch delivered.

    Args:
        accelerator: an ``accelerate.Accelerator``, whose ``gradient_accumulation_steps`` is the loader's.
        loader: a :class:`packhorse.Loader`.

    Returns:
        The loader.

    Raises:
        ConfigError: the loader has another world or ``gradient_accumulation_steps``, or packed rows are wrong
            for a prepared model. ``save_state`` raises it in the middle of an optimizer step, before it saves
            or removes anything.
    """
    check_world(
        loader, accelerator.process_index, accelerator.num_processes, accelerator.gradient_accumulation_steps
    )
    _check_models(accelerator, loader)
    accelerator.register_for_checkpointing(loader)
    save_state = accelerator.save_state

    # Not a pre-hook: Accelerate runs these after it has removed the checkpoints beyond `total_limit`.
    @wraps(save_state)
    def check_and_save(*args: Any, **kwargs: Any) -> Any:
        per_step = loader.config.gradient_accumulation_steps
        if not accelerator.sync_gradients or loader.cursor % per_step:
            raise ConfigError(
                f"save_state in the middle of an optimizer step of {per_step} micro-batches: the accumulated "
                "gradients are not saved, so these micro-batches would never be trained. Save after the "
                "last one, when accelerator.sync_gradients is True"
            )
        return save_state(*args, **kwargs)

    accelerator.save_state = check_and_save
    return loader


def _check_models(accelerator: Accelerator, loader: Loader) -> None:
    # Accelerate has no public list of the models that were prepared.
    for model in accelerator._models:
        check_model(loader, model)


def steps(accelerator: Accelerator, loader: Loader) -> Iterator[tuple[list[Batch], float]]:
    """Yield the micro-batches of each step on the device, and what its loss is divided by.

    That are the supervised tokens of all ranks; of preference data, the pairs and labelled answers.

    Loop over the micro-batches under ``accelerator.accumulate(model)``, with the loss
    ``batch_loss(model, output, batch, tokens, replicas(accelerator))``
    (:func:`~packhorse.integrations.loss.batch_loss`).

    Raises:
        ConfigError: packed rows are wrong for a prepared model.
    """
    _check_models(accelerator, loader)
    for group in grouped(loader.keep_bytes(), accelerator.gradient_accumulation_steps):
        yield [to_device(batch, accelerator.device) for batch in group], count_for_loss(group)


def replicas(accelerator: Accelerator) -> int:
    """Return ``replicas`` for :func:`~packhorse.integrations.loss.batch_loss`.

    It undoes that ``accelerator.backward`` divides by the accumulated micro-steps and that ranks average
    gradients: the loss is divided by the tokens of all of them.
    """
    return int(accelerator.num_processes * accelerator.gradient_accumulation_steps)
