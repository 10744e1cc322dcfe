"""What a loader wants to know of the model it feeds; nothing of the model is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from packhorse.chat import is_tokenizer
from packhorse.errors import ConfigError
from packhorse.families.models import (
    EXPECTED,
    UNCHECKED,
    check_packable,
    is_unchecked,
    media_parts,
    resolve_model,
    text_config,
)
from packhorse.families.positions import RopeIndex, rope_index
from packhorse.families.shift_labels import check_shift_labels
from packhorse.plan.cost_model import CostWeights


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Of a model, or the defaults where there is none.

    Attributes:
        get_rope_index: positions in three rows, where the model has such.
        attention: the backend of its decoder.
        dtype: of its weights; None if unknown.
        weights: what tokens and patches cost.
        config: the model's.
        name: of the model's class or config, or ``"unchecked"``.
    """

    get_rope_index: RopeIndex | None = None
    attention: str = "sdpa"
    dtype: torch.dtype | None = None
    weights: CostWeights = field(default_factory=CostWeights)
    config: Any = None
    name: str = UNCHECKED


def facts_of(model: Any, *, packed: bool = False, trains: bool = True) -> ModelFacts:
    """What a loader wants to know of a model.

    Args:
        model: a model of transformers, also inside PEFT, DDP, FSDP or ``torch.compile``; its config; the
            folder or hub name of one; ``"unchecked"``; or None.
        packed: whether it is fed packed rows. Then None is not accepted, and neither is a model that packed
            rows are wrong for.
        trains: whether it is trained on the batches. Then its own loss must not shift labels a second time.

    Raises:
        ConfigError: it is no model, cannot be fed packed rows, or would shift labels twice.
    """
    if is_unchecked(model):
        return ModelFacts()
    if model is None:
        if packed:
            raise ConfigError(
                "model is missing: packed rows need the model's positions, and not every model keeps the "
                f"documents of a row apart. Pass {EXPECTED}: packhorse.load(data, processor, model=model). "
                f'Without one use mode="pad", or model="{UNCHECKED}" to pack without these checks'
            )
        return ModelFacts(name="none")
    inner, config = resolve_model(model)
    if packed:
        check_packable(model if inner is not None else config)
    if trains:
        check_shift_labels(config if inner is None else inner)
    text = text_config(config)
    return ModelFacts(
        rope_index(config if inner is None else inner),
        str(getattr(text, "_attn_implementation", None) or "sdpa"),
        getattr(inner, "dtype", None),
        weights_of(config),
        config,
        type(config if inner is None else inner).__name__,
    )


def refuse_tokenizer(processor: Any, facts: ModelFacts) -> None:
    """Raise if a tokenizer is to feed a model that has a vision or audio part.

    Raises:
        ConfigError: naming both.
    """
    parts = media_parts(facts.config) if facts.config is not None else ()
    if parts and is_tokenizer(processor):
        raise ConfigError(
            f"processor is a tokenizer ({type(processor).__name__}), but {facts.name} has a {parts[0]}: pass "
            "the model's processor, as AutoProcessor.from_pretrained(name)"
        )


def weights_of(config: Any) -> CostWeights:
    """What tokens and patches cost by a model's config; the usual proportions where it does not tell."""
    try:
        return CostWeights.of_model(config)
    except ConfigError:  # sizes under names that nobody has written down
        return CostWeights()


def as_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """A type of torch by its name.

    Raises:
        ConfigError: there is none.
    """
    if name is None or isinstance(name, torch.dtype):
        return name
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"pixel_dtype={name!r}: expected the name of a torch type, as 'bfloat16'")
    return found
