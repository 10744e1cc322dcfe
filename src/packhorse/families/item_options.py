"""One call of a processor in which each image and video has its own options.

A call of a transformers processor has one setting for all its images. :func:`with_item_options` returns a
copy of the processor that calls its image and its video processor once for each item, with that item's
options, and joins what they return; everything else of the call is the processor's own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from packhorse.chat import Processor, is_transformers
from packhorse.errors import ConfigError
from packhorse.families.media_sizes import CallOptions, call_arguments
from packhorse.types import MediaKind

_PARTS: Mapping[MediaKind, str] = {"image": "image_processor", "video": "video_processor"}
_PER_ITEM = ("video_metadata",)  # arguments that are a list with an entry for each item


def has_own_call(processor: Processor) -> bool:
    """Return whether the processor's call is that of transformers; another may use its parts in any way."""
    return is_transformers(processor) and type(processor).__call__.__module__.startswith("transformers.")


def check_own_call(processor: Processor) -> None:
    """Raise if the processor's call is not that of transformers."""
    if not has_own_call(processor):
        raise ConfigError.of(
            "processor",
            type(processor).__name__,
            "settings for the size of media (max_pixels, …) need a processor of transformers itself",
        )


def with_options(processor: Processor, kind: MediaKind, options: CallOptions) -> Processor:
    """Return a copy of a processor whose part for images or videos has these options as attributes."""
    changed: Any = copy.copy(processor)
    part = copy.copy(getattr(processor, _PARTS[kind]))
    for name, value in call_arguments(options).items():
        setattr(part, name, value)
    setattr(changed, _PARTS[kind], part)
    result: Processor = changed
    return result


def with_item_options(
    processor: Processor,
    images: Sequence[CallOptions],
    videos: Sequence[CallOptions],
    fill: Mapping[str, float],
) -> Processor:
    """Return a copy of a processor whose call uses these options for each image and for each video.

    ``fill`` pads tensors of items that differ in their other axes; 0 for those that it does not name.
    """
    changed: Any = copy.copy(processor)
    for name, options in ((_PARTS["image"], images), (_PARTS["video"], videos)):
        if options:
            setattr(changed, name, _ItemProcessor(getattr(processor, name), options, fill))
    result: Processor = changed
    return result


class _ItemProcessor:
    """An image or video processor that is called once for each item, with the item's own options."""

    def __init__(self, owner: Any, options: Sequence[CallOptions], fill: Mapping[str, float]) -> None:
        self.owner, self.options, self.fill = owner, options, fill

    def __getattr__(self, name: str) -> Any:
        return getattr(self.owner, name)

    def __call__(self, items: Any = None, **arguments: Any) -> Any:
        """Return the outputs of all items, joined."""
        for name in ("images", "videos"):
            items = arguments.pop(name, items)
        (sample,) = items  # one conversation
        outputs = []
        for index, (item, options) in enumerate(zip(sample, self.options, strict=True)):
            own = {name: [arguments[name][index]] for name in _PER_ITEM if arguments.get(name) is not None}
            outputs.append(self.owner([[item]], **{**arguments, **own, **call_arguments(options)}))
        joined = {key: self._join(key, [output[key] for output in outputs]) for key in outputs[0]}
        return type(outputs[0])(joined)

    def _join(self, key: str, values: list[Any]) -> Any:
        if isinstance(values[0], list | tuple):
            return [entry for value in values for entry in value]
        if isinstance(values[0], np.ndarray):
            return np.concatenate(values)
        import torch

        widest = [max(sides) for sides in zip(*(value.shape[1:] for value in values), strict=True)]
        return torch.cat([_pad(value, widest, self.fill.get(key, 0)) for value in values])


def _pad(value: Any, sides: Sequence[int], fill: float) -> Any:
    """Return a tensor whose axes but the first are filled up to these sides."""
    if list(value.shape[1:]) == list(sides):
        return value
    padded = value.new_full((len(value), *sides), fill)
    padded[(slice(None), *(slice(side) for side in value.shape[1:]))] = value
    return padded
