"""How any processor is called: what it can take is passed, what it needs is supplied, nothing is lost.

Users pass transformers' processors, wrapped ones, those of a model's own repository, and small objects that
have the documented methods only. A call here looks at the signature first (some 20 microseconds); an option
that a processor does not take is dropped, but a media item that it does not take is an error.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from logging import getLogger
from typing import Any

from packhorse.chat import CannotAlign, is_transformers, template_errors, tokenizer_of
from packhorse.errors import ConfigError
from packhorse.families import Encoder, Family, Generic

__all__ = [
    "NOT_MADE_FOR_IT",
    "Turns",
    "call",
    "is_transformers",
    "logger",
    "names",
    "pad_token_id",
    "padding_side",
    "parameters",
    "plain_turns",
    "render",
    "takes_grouped_options",
    "text_ids",
    "tolerated",
]

logger = getLogger("packhorse.collate_fns")

Turns = Sequence[Mapping[str, Any]]

# What a call without an opinion says, for parameters that have no default.
_NEUTRAL: dict[str, Any] = {
    "add_generation_prompt": False,
    "add_special_tokens": False,
    "audio": None,
    "audios": None,
    "images": None,
    "max_length": None,
    "medias": None,
    "padding": True,
    "return_dict": True,
    "return_tensors": "pt",
    "tokenize": False,
    "truncation": False,
    "videos": None,
}
_NEVER_LEFT_OUT = frozenset({"text", "images", "videos", "audio", "audios", "medias"})

# What a small object raises where it is asked for something that it was not written for.
NOT_MADE_FOR_IT = (
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call ``function`` with those of ``options`` that it takes, and neutral values for what it requires.

    Raises:
        ConfigError: it does not take a media item, which would be lost.
    """
    named = parameters(function)
    if named is None:
        return function(*arguments, **options)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in named.values())
    usable = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    places = [p.name for p in named.values() if p.kind in usable]
    filled = set(places[: len(arguments)])
    given = {name: value for name, value in options.items() if takes_all or name in places}
    lost = _NEVER_LEFT_OUT & (options.keys() - given.keys())
    if lost:
        raise ConfigError(f"{_name(function)} does not take {', '.join(sorted(lost))}: it has {places}")
    for name in places:
        required = named[name].default is inspect.Parameter.empty and name not in filled
        if required and name not in given and name in _NEUTRAL:
            given[name] = _NEUTRAL[name]
    return function(*arguments, **given)


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """The parameters of a function or of an object's call; None where they cannot be told."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


def names(function: Callable[..., Any], parameter: str) -> bool:
    """Whether a function has a parameter of this name."""
    return parameter in (parameters(function) or {})


def takes_grouped_options(method: Callable[..., Any]) -> bool:
    """Whether an ``apply_chat_template`` takes the options of the call in ``processor_kwargs``."""
    if names(method, "processor_kwargs"):
        return True
    owner = type(getattr(method, "__self__", None))
    bases: list[Any] = [kind for kind in owner.__mro__ if kind.__name__ == "ProcessorMixin"]
    return any(names(kind.apply_chat_template, "processor_kwargs") for kind in bases)


def tolerated(processor: Any, *others: type[Exception]) -> tuple[type[Exception], ...]:
    """What trying out a method may raise: for transformers' own classes, only what a template raises.

    For an ``except`` clause, together with ``others``.
    """
    small_objects = () if is_transformers(processor) else NOT_MADE_FOR_IT
    return template_errors(*others, *small_objects)


def plain_turns(conversation: Turns, family: Family) -> list[dict[str, Any]]:
    """A conversation as its template is given it: media parts hold their type alone.

    Templates of known families take lists of parts (most take nothing else), so a text becomes one.
    """
    turns = []
    for turn in conversation:
        content = turn.get("content")
        if isinstance(content, str):
            content = content if isinstance(family, Generic) else [{"type": "text", "text": content}]
        elif isinstance(content, list | tuple):
            content = [_without_payload(part) for part in content]
        turns.append({**turn, "content": content})
    return turns


def _without_payload(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return {"type": kind} if kind in ("image", "video", "audio") else part


def render(processor: Any, family: Family, turns: Turns) -> str:
    """The conversation as one text, with the processor's own template; placeholders are not expanded.

    Raises:
        CannotAlign: what the processor gives back is no text.
        ConfigError: it has no ``apply_chat_template``.
    """
    if is_transformers(processor) and not isinstance(family, Generic):
        return Encoder(processor, family).render(turns)
    method = getattr(processor, "apply_chat_template", None)
    if method is None:
        raise ConfigError(f"{type(processor).__name__} has no apply_chat_template")
    text = call(method, list(turns), tokenize=False, add_generation_prompt=False)
    if isinstance(text, list | tuple) and len(text) == 1:
        text = text[0]  # some take one conversation for a batch of one
    if not isinstance(text, str):
        raise CannotAlign(f"{type(processor).__name__} gives {type(text).__name__} where text was asked for")
    return text


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text without special tokens around it, whatever form a tokenizer returns them in."""
    encode = tokenizer if callable(tokenizer) else tokenizer.encode
    made = call(encode, text, add_special_tokens=False)
    if isinstance(made, Mapping) or hasattr(made, "keys"):
        made = made["input_ids"]
    ids = _as_list(made)
    while ids and isinstance(_as_list(ids[0]), list):
        ids = _as_list(ids[0])
    return [int(number) for number in ids]


def _as_list(value: Any) -> Any:
    """Tensors and arrays as (nested) lists, tuples as lists; a number stays one."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, list | tuple) else value


def padding_side(processor: Any) -> str:
    """The side on which the processor pads: a tokenizer that names one wins over the processor's default."""
    tokenizer = tokenizer_of(processor)
    own = getattr(tokenizer, "init_kwargs", None)
    kwargs = getattr(processor, "valid_processor_kwargs", None)
    if getattr(kwargs, "__name__", "ProcessingKwargs") == "ProcessingKwargs":
        # The common base class: the processor declares none. Older ones (InternVL before transformers 5.17)
        # pass the class next to their own to the call without declaring it.
        module, name = sys.modules.get(type(processor).__module__), f"{type(processor).__name__}Kwargs"
        kwargs = getattr(module, name, None)
    # Private, as transformers has no public way to read the defaults of a processor's call.
    defaults = getattr(kwargs, "_defaults", None)
    told = (
        own.get("padding_side") if isinstance(own, Mapping) else None,
        defaults.get("text_kwargs", {}).get("padding_side") if isinstance(defaults, Mapping) else None,
        getattr(tokenizer, "padding_side", None),
    )
    return next((side for side in told if side in ("left", "right")), "right")


def pad_token_id(processor: Any) -> int:
    """The id that fills up short rows.

    Raises:
        ConfigError: the tokenizer has none.
    """
    tokenizer = tokenizer_of(processor)
    found = getattr(tokenizer, "pad_token_id", None)
    if found is None:
        raise ConfigError(
            f"{type(tokenizer).__name__} has no pad token, so short rows cannot be filled up: set "
            "tokenizer.pad_token (to tokenizer.eos_token, say)"
        )
    return int(found)


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__
