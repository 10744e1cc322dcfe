"""Frames: what a chat template writes around the texts of a conversation, found once for each shape.

Two conversations have the same shape if their roles, and the kinds of their parts, are the same. A template
that only *writes* the texts gives them the same frame, so it need not be run again: rendering then costs
a microsecond instead of two hundred. Whether a template only writes them is not guessed: it is run once with
texts that notice everything else that is done to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any

from packhorse.chat.template import PRIVATE_USE, ChatProcessor, template_errors

_OPEN, _CLOSE = chr(PRIVATE_USE[-1]), chr(PRIVATE_USE[-2])

# Filters and tests that hand a text on as it is, or look at what holds it and not at the text itself.
_PASSING = frozenset(("d", "default", "string"))
_ON_CONTAINERS = frozenset(
    ("count", "first", "items", "last", "length", "list", "rejectattr", "reverse", "selectattr")
)
_BLIND_TESTS = frozenset(("boolean", "defined", "mapping", "none", "number", "string", "undefined"))


def stand_in(number: int) -> str:
    """A text that shows if anything is done to it on the way: trimmed, quoted, escaped."""
    return f" \n\t{_OPEN}{number}\"'\\<&>%{_CLOSE}\t\n "


@dataclass(frozen=True, slots=True)
class Frame:
    """A rendered conversation with holes.

    Attributes:
        pieces: what the template writes before, between and behind the texts.
        holes: which text stands behind each piece but the last.
        text: the whole, with stand-ins in the holes.
    """

    pieces: tuple[str, ...]
    holes: tuple[int, ...]
    text: str


def find_frame(chat: ChatProcessor, turns: Sequence[Mapping[str, Any]], count: int) -> Frame | None:
    """The frame of turns whose texts are stand-ins 0 to ``count - 1``.

    Args:
        chat: the processor that renders them.
        turns: the messages, with :func:`stand_in` for each text.
        count: how many texts there are.

    Returns:
        None if the template looks into the texts, or changes, leaves out or repeats one.
    """
    text = chat.render(turns)
    if not _only_writes(chat, turns, text):
        return None
    pieces, holes, at = [], [], 0
    found = sorted((text.find(stand_in(number)), number) for number in range(count))
    for place, number in found:
        if place < at or text.count(stand_in(number)) != 1:
            return None
        pieces.append(text[at:place])
        holes.append(number)
        at = place + len(stand_in(number))
    return Frame((*pieces, text[at:]), tuple(holes), text)


def _only_writes(chat: ChatProcessor, turns: Sequence[Mapping[str, Any]], text: str) -> bool:
    watching = None if chat.chat_template is None else _watching(chat.chat_template)
    if watching is None:
        return False
    touched: list[str] = []
    special = getattr(chat.tokenizer, "special_tokens_map", {})
    watched = [_watch(turn, touched) for turn in turns]
    try:
        again = watching.render(
            messages=watched, tools=None, documents=None, add_generation_prompt=False, **special
        )
    except template_errors(_Touched):
        return False
    return not touched and str.__eq__(str.__str__(again), text)


@lru_cache(maxsize=16)
def _watching(template: str) -> Any:
    """The template with filters and tests that notice texts; None if it does what cannot be watched."""
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template as compiled
    except ImportError:  # a private name of transformers: without it every conversation is rendered
        return None
    environment = compiled(template).environment.overlay()
    if not _watchable(environment.parse(template)):
        return None
    environment.concat = _concat
    environment.filters = {name: _filter(name, one) for name, one in environment.filters.items()}
    environment.tests = {name: _test(name, one) for name, one in environment.tests.items()}
    return environment.from_string(template)


def _watchable(tree: Any) -> bool:
    """Whether all that the template does with texts goes through what notices them."""
    from jinja2 import nodes

    if any(tree.find_all(nodes.Concat)):
        return False
    for call in tree.find_all(nodes.Call):
        # A plain string may be asked about a text: `'yes, no'.find(text)`.
        given = [*call.args, *(one.value for one in call.kwargs)]
        by_name = isinstance(call.node, nodes.Name)
        if not by_name and not all(isinstance(one, nodes.Const) for one in given):
            return False
    for compared in tree.find_all(nodes.Compare):
        left = compared.expr
        for operand in compared.ops:
            # `text in 'yes, no'` asks the plain string; members of a list are compared with the text itself.
            listed = isinstance(operand.expr, nodes.List | nodes.Tuple | nodes.Dict)
            if operand.op in ("in", "notin") and not (isinstance(left, nodes.Const) or listed):
                return False
            left = operand.expr
    return True


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def noticing(*arguments: Any, **options: Any) -> Any:
        given = (*arguments, *options.values())
        if name in _ON_CONTAINERS:
            _notice(name, (one for one in given if isinstance(one, _Watched)))
        elif name not in _PASSING or not any(isinstance(one, _Watched) for one in given):
            _notice(name, given)
        return function(*arguments, **options)

    return noticing


def _test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if name in _BLIND_TESTS:
        return function

    @wraps(function)
    def noticing(*arguments: Any, **options: Any) -> Any:
        _notice(name, (*arguments, *options.values()))
        return function(*arguments, **options)

    return noticing


def _notice(name: str, values: Iterable[Any]) -> None:
    """Tell the texts among the values, and in what they hold, that they are looked at."""
    for value in values:
        if isinstance(value, _Watched):
            value.touched.append(name)
            raise _Touched(name)
        if isinstance(value, Mapping):
            _notice(name, value.values())
        elif isinstance(value, list | tuple):
            _notice(name, value)


class _Touched(Exception):
    """A template did something else with a text than to write it."""


class _Watched(str):
    """A text that may be written, joined and asked whether it is empty, and nothing else."""

    __slots__ = ("touched",)
    touched: list[str]

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return True  # whether a text is empty is part of the shape

    def __add__(self, other: str) -> str:
        return _joined([self, other], self.touched)

    def __radd__(self, other: str) -> str:
        return _joined([other, self], self.touched)


def _noticing(name: str) -> Callable[..., Any]:
    def method(self: _Watched, *_: Any, **__: Any) -> Any:
        self.touched.append(name)
        raise _Touched(name)

    return method


_KEPT = frozenset(
    (
        *("__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__"),
        *("__setattr__", "__delattr__", "__dir__", "__doc__", "__reduce__", "__reduce_ex__", "__sizeof__"),
        *("__getstate__", "__getnewargs__"),
    )
)
for _name in {*dir(str), "__rmod__", "__rmul__"} - _KEPT - vars(_Watched).keys():
    setattr(_Watched, _name, _noticing(_name))


def _concat(parts: Iterable[str]) -> str:
    """What a template puts together: watched if a part of it is."""
    pieces = list(parts)
    watched = next((piece for piece in pieces if isinstance(piece, _Watched)), None)
    return "".join(pieces) if watched is None else _joined(pieces, watched.touched)


def _joined(parts: Iterable[str], touched: list[str]) -> _Watched:
    """Texts put together; the result is watched as its parts were."""
    made = _Watched("".join(str.__str__(part) for part in parts))
    made.touched = touched
    return made


def _watch(turn: Mapping[str, Any], touched: list[str]) -> dict[str, Any]:
    content = turn["content"]
    if isinstance(content, str):
        return {**turn, "content": _joined([content], touched)}
    parts = [{**p, "text": _joined([p["text"]], touched)} if "text" in p else dict(p) for p in content]
    return {**turn, "content": parts}
