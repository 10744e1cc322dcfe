"""Positions of tokens: numbers that restart with each document, or mRoPE's three rows.

Qwen-VL models turn their attention by time, height and width: positions [3, S], which only the model's own
``get_rope_index`` knows. One sample goes in, its positions come out; costs a few hundred microseconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from packhorse.errors import ConfigError
from packhorse.families.models import resolve_model, weightless_model

RopeIndex = Callable[..., Any]

_ROWS = 3
# What get_rope_index calls its arguments, and what the processor calls the same thing.
_GRIDS = {
    "image_grid_thw": ("image_grid_thw",),
    "video_grid_thw": ("video_grid_thw",),
    "second_per_grid_ts": ("second_per_grid_ts",),
    "second_per_grids": ("video_second_per_grid", "second_per_grid_ts"),
}
# In mm_token_type_ids, with the names under which a model's config has their ids.
_TYPES = {1: ("image_token_id", "image_token_index"), 2: ("video_token_id", "video_token_index")}


def mrope_position_ids(sample: Mapping[str, Any], get_rope_index: RopeIndex) -> torch.Tensor | None:
    """Positions [3, S] of one sample, as the model itself would compute them.

    Args:
        sample: not shifted: ``input_ids`` [S], usually ``attention_mask`` (hidden tokens get no position of
            their own) and ``mm_token_type_ids``, and the grids of its media.
        get_rope_index: ``model.model.get_rope_index``, or :func:`rope_index` of the model.

    Returns:
        None if the callable takes neither ``input_ids`` nor any keyword.

    Raises:
        ConfigError: it needs ``mm_token_type_ids``, which the sample has not and no model config tells, or
            it returns something else than [3, 1, S].
    """
    takes, takes_any = _parameters(get_rope_index)
    if "input_ids" not in takes and not takes_any:
        return None
    ids = _row(sample["input_ids"])
    arguments: dict[str, Any] = {"input_ids": ids}
    if sample.get("attention_mask") is not None:
        arguments["attention_mask"] = _row(sample["attention_mask"])
    for name, keys in _GRIDS.items():
        found = next((sample[key] for key in keys if sample.get(key) is not None), None)
        if found is not None:
            arguments[name] = torch.stack(list(found)) if isinstance(found, list | tuple) else found
    if sample.get("feature_attention_mask") is not None:
        arguments["audio_seqlens"] = sample["feature_attention_mask"].sum(-1)
    if takes_any or "mm_token_type_ids" in takes:
        types = _token_types(sample, ids, get_rope_index, needed="mm_token_type_ids" in takes)
        if types is not None:
            arguments["mm_token_type_ids"] = types
    if not takes_any:
        arguments = {name: value for name, value in arguments.items() if name in takes}
    made = get_rope_index(**arguments)
    positions = made[0] if isinstance(made, tuple | list) else made
    if tuple(positions.shape) != (_ROWS, 1, ids.shape[1]):
        raise ConfigError(
            f"get_rope_index returned positions of shape {tuple(positions.shape)} for {ids.shape[1]} tokens: "
            f"expected ({_ROWS}, 1, {ids.shape[1]})"
        )
    return torch.as_tensor(positions)[:, 0]


def rope_index(model: Any) -> RopeIndex | None:
    """The ``get_rope_index`` of a model without its weights, so that it can be sent to DataLoader workers.

    Args:
        model: of transformers, wrapped or not; its config; or the folder or hub name of one. The method is
            looked for in the model and in its ``model``.

    Returns:
        None where the model has none: its positions are one row of numbers.

    Raises:
        ConfigError: it is no model.
    """
    inner, config = resolve_model(model)
    if inner is None:
        inner = weightless_model(config)
    owner: Any
    for owner in (getattr(inner, "model", None), inner):
        if callable(getattr(type(owner), "get_rope_index", None)):
            plain = {name: value for name, value in vars(owner).items() if _is_plain(name, value)}
            return WeightlessRopeIndex(type(owner), owner.config, plain)
    return None


def _is_plain(name: str, value: Any) -> bool:
    """Whether an attribute is a setting (``spatial_merge_size``) and no state of torch's or a weight."""
    return not name.startswith("_") and isinstance(value, int | float | str) and name != "training"


class WeightlessRopeIndex:
    """A model class's ``get_rope_index``, called on an object with the model's config and settings alone.

    Args:
        model_class: has the method.
        config: of the model.
        settings: numbers and words that the model keeps as attributes and the method reads.
    """

    def __init__(self, model_class: type, config: Any, settings: Mapping[str, Any] | None = None) -> None:
        self.model_class, self.config, self.settings = model_class, config, dict(settings or {})
        parameters = dict(inspect.signature(model_class.get_rope_index).parameters)  # type: ignore[attr-defined]
        parameters.pop("self")
        self.__signature__ = inspect.Signature(list(parameters.values()))

    def __call__(self, **arguments: Any) -> Any:
        """What the method returns."""
        shell: Any = object.__new__(self.model_class)
        shell.__dict__.update(self.settings, config=self.config)
        return self.model_class.get_rope_index(shell, **arguments)  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.model_class, self.config, self.settings)


def _parameters(function: RopeIndex) -> tuple[set[str], bool]:
    """The names it takes, and whether it takes any others."""
    parameters = inspect.signature(function).parameters
    names = {name for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _row(tokens: Any) -> torch.Tensor:
    """Values per token as [1, S]."""
    return torch.as_tensor(tokens).reshape(1, -1)


def _token_types(
    sample: Mapping[str, Any], ids: torch.Tensor, get_rope_index: RopeIndex, *, needed: bool
) -> torch.Tensor | None:
    """0 for text, 1 for image tokens, 2 for video tokens: the sample's own, or by the ids in the config."""
    if sample.get("mm_token_type_ids") is not None:
        return _row(sample["mm_token_type_ids"])
    if not needed:
        return None
    types = torch.zeros_like(ids)
    if all(sample.get(key) is None for key in ("image_grid_thw", "video_grid_thw")):
        return types
    config = getattr(get_rope_index, "config", None)
    if config is None:
        config = getattr(getattr(get_rope_index, "__self__", None), "config", None)
    known = {
        kind: next((getattr(config, name) for name in names if hasattr(config, name)), None)
        for kind, names in _TYPES.items()
    }
    if all(token is None for token in known.values()):
        raise ConfigError(
            "get_rope_index needs 'mm_token_type_ids' (0 text, 1 image, 2 video), which the sample has not: "
            "pass the model's own method, model.model.get_rope_index, whose config tells the ids"
        )
    for kind, token in known.items():
        if token is not None:
            types[ids == token] = kind
    return types
