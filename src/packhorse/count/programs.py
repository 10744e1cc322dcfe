"""Counting programs: how to count any conversation of one shape, worked out once.

Two conversations have the same shape if their roles, and the kinds of their parts, are the same. A template
that only *writes* the texts gives them the same frame, so it need not run again: rendering then costs a
microsecond instead of two hundred. Whether a template only writes them is not guessed: it is run once with
texts that notice everything else that is done to them.

The frame is cut at special tokens, media, and where supervision begins and ends. What is left to do for each
conversation is to fill in its texts and media, and to add up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from itertools import pairwise
from typing import Any, Literal

from packhorse.chat import PRIVATE_USE, ChatProcessor, Span, template_errors

Cut = Callable[[str, str], bool]

_OPEN, _CLOSE = chr(PRIVATE_USE[-1]), chr(PRIVATE_USE[-2])

# Filters and tests that hand a text on as it is, or look at what holds it and not at the text itself.
_PASSING = frozenset(("d", "default", "string"))
_ON_CONTAINERS = frozenset(
    ("count", "first", "items", "last", "length", "list", "rejectattr", "reverse", "selectattr")
)
_BLIND_TESTS = frozenset(("boolean", "defined", "mapping", "none", "number", "string", "undefined"))


def sentinel(number: int) -> str:
    """A text that shows if anything is done to it on the way: trimmed, quoted, escaped."""
    return f" \n\t{_OPEN}{number}\"'\\<&>%{_CLOSE}\t\n "


@dataclass(frozen=True, slots=True)
class Frame:
    """A rendered conversation with holes.

    Attributes:
        pieces: what the template writes before, between and after the texts.
        holes: which text stands after each piece but the last.
        text: the whole, with stand-ins in the holes.
    """

    pieces: tuple[str, ...]
    holes: tuple[int, ...]
    text: str


def find_frame(chat: ChatProcessor, turns: Sequence[Mapping[str, Any]], count: int) -> Frame | None:
    """The frame of turns whose texts are stand-ins 0 to ``count - 1``.

    Args:
        chat: the processor that renders them.
        turns: the messages, with :func:`sentinel` for each text.
        count: how many texts there are.

    Returns:
        None if the template looks into the texts, or changes, leaves out or repeats one.
    """
    text = chat.render(turns)
    if not _only_writes(chat, turns, text):
        return None
    pieces, holes, at = [], [], 0
    found = sorted((text.find(sentinel(number)), number) for number in range(count))
    for place, number in found:
        if place < at or text.count(sentinel(number)) != 1:
            return None
        pieces.append(text[at:place])
        holes.append(number)
        at = place + len(sentinel(number))
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


# --- programs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a program.

    Attributes:
        kind: ``text`` (written by the template), ``hole`` (text of the conversation), ``special`` (tokens
            that nothing merges with) or ``media``.
        text: of a ``text`` step.
        number: which text or media item; how many special tokens.
        supervised: whether it is supervised.
    """

    kind: Literal["text", "hole", "special", "media"]
    text: str = ""
    number: int = 0
    supervised: bool = False


@dataclass(slots=True)
class Assembled:
    """A conversation ready to be counted: pieces of text that can be counted apart, and what is fixed."""

    pieces: list[str] = field(default_factory=list)
    supervised: list[bool] = field(default_factory=list)
    fixed: int = 0
    fixed_supervised: int = 0


class SpecialTokens:
    """Finds a tokenizer's special tokens in texts.

    Args:
        tokens: all of them, as text.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if tokens else re.compile(r"(?!)")

    def __contains__(self, text: str) -> bool:
        return self._pattern.search(text) is not None

    def cut(self, text: str) -> list[str | int]:
        """The text as plain pieces and numbers of special tokens between them."""
        cut: list[str | int] = []
        at = 0
        for found in self._pattern.finditer(text):
            if found.start() > at:
                cut.append(text[at : found.start()])
            if cut and isinstance(cut[-1], int):
                cut[-1] += 1
            else:
                cut.append(1)
            at = found.end()
        if at < len(text):
            cut.append(text[at:])
        return cut


def compile_program(
    frame: Frame, spans: Sequence[Span], placeholders: Sequence[str], special: SpecialTokens
) -> list[Step] | None:
    """The steps that count a conversation of this frame.

    Args:
        frame: of the shape.
        spans: the supervised characters of ``frame.text``.
        placeholders: what the template writes for each media item of the conversation, in order; the first of
            equal ones in the text is the first of these.
        special: finds special tokens.

    Returns:
        None if a span begins or ends inside a text, a media item is supervised, or media and placeholders do
        not agree.
    """
    steps: list[Step] = []
    waiting = list(enumerate(placeholders))
    for kind, text, number, start in _stretches(frame, set(placeholders)):
        inside = [(a, b) for a, b in spans if a < start + len(text) and b > start]
        if kind == "text":
            steps += _literal(text, start, inside, special)
            continue
        supervised = bool(inside)
        if supervised and (kind == "media" or len(inside) > 1 or not _covers(inside[0], start, len(text))):
            return None
        if kind == "media":
            one = next(((place, written) for place, written in waiting if written == text), None)
            if one is None:
                return None
            waiting.remove(one)
            number = one[0]
        steps.append(Step(kind, "", number, supervised))
    return None if waiting else steps


def _covers(span: Span, start: int, length: int) -> bool:
    return span[0] <= start and span[1] >= start + length


def _stretches(
    frame: Frame, placeholders: set[str]
) -> Iterator[tuple[Literal["text", "hole", "media"], str, int, int]]:
    """Kind, text, number and first character of what the frame is made of."""
    longest_first = sorted(placeholders, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first))) if placeholders else re.compile(r"(?!)")
    at = 0
    for number, piece in enumerate(frame.pieces):
        begin = 0
        for found in pattern.finditer(piece):
            if found.start() > begin:
                yield "text", piece[begin : found.start()], 0, at + begin
            yield "media", found.group(), 0, at + found.start()
            begin = found.end()
        if begin < len(piece):
            yield "text", piece[begin:], 0, at + begin
        at += len(piece)
        if number < len(frame.holes):
            hole = sentinel(frame.holes[number])
            yield "hole", hole, frame.holes[number], at
            at += len(hole)


def _literal(text: str, start: int, spans: Sequence[Span], special: SpecialTokens) -> Iterator[Step]:
    """Steps of what the template writes, cut at special tokens and where supervision begins and ends."""
    edges = {0, len(text), *(min(max(edge - start, 0), len(text)) for span in spans for edge in span)}
    cuts = sorted(edges)
    for begin, end in pairwise(cuts):
        supervised = any(a <= start + begin and b >= start + end for a, b in spans)
        for piece in special.cut(text[begin:end]):
            if isinstance(piece, int):
                yield Step("special", number=piece, supervised=supervised)
            else:
                yield Step("text", piece, supervised=supervised)


def assemble(
    steps: Sequence[Step], texts: Sequence[str], media: Sequence[Sequence[str | int]], cut: Cut
) -> Assembled | None:
    """Fill a program with the texts of a conversation and the written form of its media.

    Args:
        steps: the program.
        texts: of the conversation, in order.
        media: for each media item its plain pieces and numbers of special tokens.
        cut: whether two texts can be counted apart for certain.

    Returns:
        None if supervision begins or ends where the texts cannot be counted apart.
    """
    made = Assembled()
    piece, learning = "", False
    for step in steps:
        if step.kind == "special":
            parts: Sequence[str | int] = (step.number,)
        elif step.kind == "media":
            parts = media[step.number]
        else:
            parts = (step.text if step.kind == "text" else texts[step.number],)
        for part in parts:
            if isinstance(part, int):
                made.fixed += part
                made.fixed_supervised += part if step.supervised else 0
                if piece:
                    made.pieces.append(piece)
                    made.supervised.append(learning)
                    piece = ""
            elif part:
                if piece and step.supervised != learning:
                    if not cut(piece, part):
                        return None
                    made.pieces.append(piece)
                    made.supervised.append(learning)
                    piece = ""
                piece, learning = piece + part, step.supervised
    if piece:
        made.pieces.append(piece)
        made.supervised.append(learning)
    return made
