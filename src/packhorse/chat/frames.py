"""Frames: what a chat template writes around the texts of a conversation, found once for each shape.

Two conversations have the same shape if their roles, and the kinds of their parts, are the same. A template
that only *writes* the texts gives them the same frame, so it need not be run again: rendering then costs
a microsecond instead of two hundred. Whether a template only writes them is not guessed: it is run once with
texts that notice everything else that is done to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packhorse.chat.template import PRIVATE_USE, chat_template, template_errors, tokenizer_of

_OPEN, _CLOSE = chr(PRIVATE_USE[-1]), chr(PRIVATE_USE[-2])

# Filters that leave a text as it is, work on other things, or go through the text's own methods.
_WATCHED_FILTERS = frozenset(
    (
        *("capitalize", "count", "d", "default", "first", "items", "last", "length", "list", "lower"),
        *("replace", "reverse", "selectattr", "string", "tojson", "trim", "upper"),
    )
)


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


def find_frame(
    processor: Any, turns: Sequence[Mapping[str, Any]], count: int, render: Callable[[Any], str]
) -> Frame | None:
    """The frame of turns whose texts are stand-ins 0 to ``count - 1``.

    Args:
        processor: with a chat template of its own or of its tokenizer.
        turns: the messages, with :func:`stand_in` for each text.
        count: how many texts there are.
        render: writes turns as one text.

    Returns:
        None if the template looks into the texts, or changes, leaves out or repeats one.
    """
    text = render(turns)
    if not _only_writes(processor, turns, text):
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


def _only_writes(processor: Any, turns: Sequence[Mapping[str, Any]], text: str) -> bool:
    template = chat_template(processor)
    if template is None:
        return False
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template as compiled
    except ImportError:  # a private name of transformers: without it every conversation is rendered
        return False
    environment = compiled(template).environment.overlay()
    if not _watchable(environment.parse(template)):
        return False
    touched: list[str] = []
    environment.concat = lambda parts: _joined(list(parts), touched)
    special = getattr(tokenizer_of(processor), "special_tokens_map", {})
    watched = [_watch(turn, touched) for turn in turns]
    try:
        again = environment.from_string(template).render(
            messages=watched, tools=None, documents=None, add_generation_prompt=False, **special
        )
    except template_errors(_Touched):
        return False
    return not touched and str.__eq__(str.__str__(again), text)


def _watchable(tree: Any) -> bool:
    """Whether all that the template does with texts goes through methods that a watched text has."""
    from jinja2 import nodes

    if any(one.name not in _WATCHED_FILTERS for one in tree.find_all(nodes.Filter)):
        return False
    if any(tree.find_all(nodes.Concat)):
        return False
    calls = (call.node for call in tree.find_all(nodes.Call))
    if any(isinstance(node, nodes.Getattr) and node.attr in ("join", "format") for node in calls):
        return False
    operands = (one for one in tree.find_all(nodes.Operand) if one.op in ("in", "notin"))
    return not any(isinstance(one.expr, nodes.Const) for one in operands)


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
        *("__getstate__", "__getnewargs__", "__repr__"),
    )
)
for _name in {*dir(str), "__rmod__", "__rmul__"} - _KEPT - vars(_Watched).keys():
    setattr(_Watched, _name, _noticing(_name))


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
