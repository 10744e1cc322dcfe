"""Models and the Trainer of transformers: made ready for packed batches, fed by a loader.

:func:`prepare` goes over a model once, before training. :class:`TrainFromLoader` is put in front of a Trainer
class, and adds nothing but a loader: no second sharding, no replay on resume, no label shifted twice.
"""

from __future__ import annotations

from logging import getLogger
from typing import Any

import torch

from packhorse.collate.packed import check_router_loss
from packhorse.families.shift_labels import honours_shift_labels, make_honour_shift_labels
from packhorse.integrations.attention import choose, facts_of, use_attention
from packhorse.integrations.trainer import LOADER_STATE, TrainFromLoader

__all__ = ["LOADER_STATE", "TrainFromLoader", "honours_shift_labels", "prepare"]

logger = getLogger("packhorse.integrations")


def prepare(
    model: Any,
    attn: str = "auto",
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    longest: int | None = None,
) -> str:
    """Make a model of transformers ready for packed training.

    Sets the decoder's attention (the vision tower keeps its own) and turns off the cache of keys and values:
    with it, transformers takes each row for one document. Where the installed transformers would shift the
    labels of a batch a second time, the model gets hooks that compute its loss from ``shift_labels``. Costs
    nothing; weights are not touched.

    Args:
        model: the model, before or after it is moved to its device.
        attn: ``"varlen"``, ``"flash_attention_2"``, ``"flex_attention"``, ``"sdpa"`` or ``"eager"``;
            ``"auto"`` takes the first of these that is right for the model, on other devices than a GPU
            ``"sdpa"`` first.
        device: that the model is trained on. None for where it is now; a model that is not on a GPU yet is
            taken to be trained on it, if there is one.
        dtype: of the weights while they compute, where that is another than now (mixed precision of FSDP).
        autocast: the type of ``torch.autocast`` around the forward pass, if there is one (``bf16=True`` in
            the Trainer).
        longest: tokens of the longest document, where it is known: layers with a sliding window are then
            right with any backend if no document is longer than it.

    Returns:
        The attention that was set. A loader built with ``model=model`` makes batches for it.

    Raises:
        ConfigError: the backend would be wrong for this model, or the model cannot be trained on packs.
    """
    check_router_loss(model.config)
    backend = choose(facts_of(model, device, dtype, autocast), attn, longest)
    use_attention(model, backend)
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False
    make_honour_shift_labels(model)
    logger.info("%s runs with %s attention", type(model).__name__, backend)
    return backend
