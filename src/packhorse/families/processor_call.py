"""Calls of any processor: options that it takes are passed, what it requires is supplied, no media is lost.

Users pass processors of transformers, wrapped ones, those of a model's own repository, and stubs that have
the documented methods only. A call reads the signature first (about 20 microseconds); an option that a
processor does not take is omitted, but media that it does not take is an error.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from packhorse.chat import (
    CannotAlign,
    Processor,
    Tokenizer,
    Turns,
    is_transformers,
    template_errors,
    tokenizer_of,
)
from packhorse.errors import ConfigError
from packhorse.families.encoder import Encoder, Family
from packhorse.families.generic import Generic
from packhorse.types import MEDIA_KINDS

# Values for required parameters that the caller does not set.
_MEDIA = ("images", "videos", "audio", "audios", "medias")
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys((*_MEDIA, "max_length")),
    **dict.fromkeys(("add_generation_prompt", "add_special_tokens", "tokenize", "truncation"), False),
    **dict.fromkeys(("padding", "return_dict"), True),
    "return_tensors": "pt",
}
_NEVER_OMITTED = frozenset({"text", *_MEDIA})

STUB_ERRORS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a stub raises for a call that it was not written for."""


def can_encode(encoder: Encoder) -> bool:
    """Return whether the processor is one of the family's, and not a stub with the same class name."""
    classes = type(encoder.tokenizer).__mro__
    return encoder.family.listed and any(kind.__name__ == "PreTrainedTokenizerBase" for kind in classes)


def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call ``function`` with those of ``options`` that it takes, and neutral values for what it requires."""
    parameters = _parameters(function)
    if parameters is None:
        return function(*arguments, **options)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    usable = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [p.name for p in parameters.values() if p.kind in usable]
    given = {name: value for name, value in options.items() if takes_all or name in names}
    lost = _NEVER_OMITTED & (options.keys() - given.keys())
    if lost:
        name = getattr(function, "__qualname__", None) or type(function).__name__
        what = f"{name} does not take {', '.join(sorted(lost))}: it takes {', '.join(names)}"
        raise ConfigError(what, setting=min(lost))
    for name in names[len(arguments) :]:
        if parameters[name].default is inspect.Parameter.empty and name in _NEUTRAL:
            given.setdefault(name, _NEUTRAL[name])
    return function(*arguments, **given)


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """Return the parameters of a function or callable; None if they are unknown."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


def has_parameter(function: Callable[..., Any], parameter: str) -> bool:
    """Return whether a function names this parameter."""
    return parameter in (_parameters(function) or {})


def takes_grouped_options(method: Callable[..., Any]) -> bool:
    """Return whether an ``apply_chat_template`` takes the options of the call in ``processor_kwargs``."""
    if has_parameter(method, "processor_kwargs"):
        return True
    owner = type(getattr(method, "__self__", None))
    bases: list[Any] = [kind for kind in owner.__mro__ if kind.__name__ == "ProcessorMixin"]
    return any(has_parameter(kind.apply_chat_template, "processor_kwargs") for kind in bases)


def tolerated_errors(processor: Processor, *others: type[Exception]) -> tuple[type[Exception], ...]:
    """Return what trying out a method may raise, for an ``except`` clause, together with ``others``.

    For processors of transformers only errors of the chat template, for others :data:`STUB_ERRORS` too.
    """
    return template_errors(*others, *(() if is_transformers(processor) else STUB_ERRORS))


def plain_turns(conversation: Turns, family: Family) -> list[dict[str, Any]]:
    """Return a conversation for the chat template: media parts hold their type alone.

    Templates of listed families take lists of parts (most take nothing else), so a text becomes one.
    """
    turns = []
    for turn in conversation:
        content = turn.get("content")
        if isinstance(content, str):
            content = content if isinstance(family, Generic) else [{"type": "text", "text": content}]
        elif isinstance(content, list | tuple):
            kinds = (part.get("type") if isinstance(part, Mapping) else None for part in content)
            pairs = zip(kinds, content, strict=True)
            content = [{"type": kind} if kind in MEDIA_KINDS else part for kind, part in pairs]
        turns.append({**turn, "content": content})
    return turns


def render(encoder: Encoder, turns: Turns) -> str:
    """Render turns as one text with the processor's own template; placeholders are not expanded.

    Raises :class:`CannotAlign` if the processor does not return a text.
    """
    if can_encode(encoder):
        return encoder.render(turns)
    name, method = type(encoder.processor).__name__, getattr(encoder.processor, "apply_chat_template", None)
    if method is None:
        raise ConfigError.of("processor", name, "it has no apply_chat_template")
    text = call(method, list(turns), tokenize=False, add_generation_prompt=False)
    if isinstance(text, list | tuple) and len(text) == 1:
        text = text[0]  # some take one conversation for a batch of one
    if not isinstance(text, str):
        raise CannotAlign(f"{name}.apply_chat_template returns {type(text).__name__} with tokenize=False")
    return text


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenize a text without special tokens around it, whatever form a tokenizer returns ids in."""
    output = call(tokenizer if callable(tokenizer) else tokenizer.encode, text, add_special_tokens=False)
    ids = output["input_ids"] if hasattr(output, "keys") else output
    return [int(token) for token in np.asarray(ids).reshape(-1)]


def padding_side(processor: Processor) -> str:
    """Return the side on which the processor pads: its tokenizer's, if set, before its own default."""
    tokenizer = tokenizer_of(processor)
    settings = getattr(tokenizer, "init_kwargs", None)
    kwargs = getattr(processor, "valid_processor_kwargs", None)
    if getattr(kwargs, "__name__", "ProcessingKwargs") == "ProcessingKwargs":
        # The common base class: the processor declares none. Older ones (InternVL before transformers 5.17)
        # pass the class next to their own to the call without declaring it.
        module, name = sys.modules.get(type(processor).__module__), f"{type(processor).__name__}Kwargs"
        kwargs = getattr(module, name, None)
    # Private, as transformers has no public way to read the defaults of a processor's call.
    defaults = getattr(kwargs, "_defaults", None)
    sides = (
        settings.get("padding_side") if isinstance(settings, Mapping) else None,
        defaults.get("text_kwargs", {}).get("padding_side") if isinstance(defaults, Mapping) else None,
        getattr(tokenizer, "padding_side", None),
    )
    return next((side for side in sides if side in ("left", "right")), "right")
