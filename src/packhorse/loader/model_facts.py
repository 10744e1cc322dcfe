"""What a loader wants to know of the model it feeds; nothing of the model is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from packhorse.errors import ConfigError
from packhorse.neat_packing_vlm import CostWeights
from packhorse.positions import RopeIndex, rope_index
from packhorse.shift_labels import check_shift_labels

UNCHECKED = "unchecked"  # ``model="unchecked"``: pack without a model, at the user's own risk


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Of a model, or the defaults where there is none.

    Attributes:
        get_rope_index: positions in three rows, where the model has such.
        attention: the backend of its decoder.
        dtype: of its weights; None where nobody knows.
        weights: what tokens and patches cost.
        config: the model's.
    """

    get_rope_index: RopeIndex | None = None
    attention: str = "sdpa"
    dtype: torch.dtype | None = None
    weights: CostWeights = field(default_factory=CostWeights)
    config: Any = None


def facts_of(model: Any) -> ModelFacts:
    """What a model of transformers tells; wrappers (DDP, FSDP, ``torch.compile``) are looked through."""
    if model is None or (isinstance(model, str) and model == UNCHECKED):
        return ModelFacts()
    inner = model
    while not hasattr(inner, "config"):
        inner = next(
            (found for name in ("module", "_orig_mod") if (found := getattr(inner, name, None)) is not None),
            None,
        )
        if inner is None:
            raise ConfigError(
                f"model is a {type(model).__name__} without a config: expected a model of transformers"
            )
    check_shift_labels(inner)
    config = inner.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return ModelFacts(
        rope_index(inner),
        str(getattr(text, "_attn_implementation", None) or "sdpa"),
        getattr(inner, "dtype", None),
        weights_of(config),
        config,
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
