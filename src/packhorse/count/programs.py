"""Programs: how to count any conversation of one shape, worked out once.

The frame of a shape (see :mod:`packhorse.chat.template_cache`) is cut at special tokens, media, and where
supervision begins and ends. What is left to do for each conversation is to fill in its texts and media, and
to add up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from packhorse.chat.template_cache import Frame, stand_in

Span = tuple[int, int]
Cut = Callable[[str, str], bool]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a program.

    Attributes:
        kind: ``text`` (written by the template), ``hole`` (text of the conversation), ``special`` (tokens
            that nothing merges with) or ``media``.
        text: of a ``text`` step.
        number: which text or medium; how many special tokens.
        learned: whether it is supervised.
    """

    kind: Literal["text", "hole", "special", "media"]
    text: str = ""
    number: int = 0
    learned: bool = False


@dataclass(slots=True)
class Assembled:
    """A conversation ready to be counted: pieces of text that can be counted apart, and what is fixed."""

    pieces: list[str] = field(default_factory=list)
    learned: list[bool] = field(default_factory=list)
    fixed: int = 0
    fixed_learned: int = 0


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
        placeholders: what the template writes for each medium of the conversation, in order; the first of
            equal ones in the text is the first of these.
        special: finds special tokens.

    Returns:
        None if a span begins or ends inside a text, a medium is supervised, or media and placeholders do not
        agree.
    """
    steps: list[Step] = []
    waiting = list(enumerate(placeholders))
    for kind, text, number, start in _stretches(frame, set(placeholders)):
        inside = [(a, b) for a, b in spans if a < start + len(text) and b > start]
        if kind == "text":
            steps += _literal(text, start, inside, special)
            continue
        learned = bool(inside)
        if learned and (kind == "media" or len(inside) > 1 or not _covers(inside[0], start, len(text))):
            return None
        if kind == "media":
            one = next(((place, written) for place, written in waiting if written == text), None)
            if one is None:
                return None
            waiting.remove(one)
            number = one[0]
        steps.append(Step(kind, "", number, learned))
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
            hole = stand_in(frame.holes[number])
            yield "hole", hole, frame.holes[number], at
            at += len(hole)


def _literal(text: str, start: int, spans: Sequence[Span], special: SpecialTokens) -> Iterator[Step]:
    """Steps of what the template writes, cut at special tokens and where supervision begins and ends."""
    edges = {0, len(text), *(min(max(edge - start, 0), len(text)) for span in spans for edge in span)}
    cuts = sorted(edges)
    for begin, end in pairwise(cuts):
        learned = any(a <= start + begin and b >= start + end for a, b in spans)
        for piece in special.cut(text[begin:end]):
            if isinstance(piece, int):
                yield Step("special", number=piece, learned=learned)
            else:
                yield Step("text", piece, learned=learned)


def assemble(
    steps: Sequence[Step], texts: Sequence[str], media: Sequence[Sequence[str | int]], cut: Cut
) -> Assembled | None:
    """Fill a program with the texts of a conversation and the written form of its media.

    Args:
        steps: the program.
        texts: of the conversation, in order.
        media: for each medium its plain pieces and numbers of special tokens.
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
                made.fixed_learned += part if step.learned else 0
                if piece:
                    made.pieces.append(piece)
                    made.learned.append(learning)
                    piece = ""
            elif part:
                if piece and step.learned != learning:
                    if not cut(piece, part):
                        return None
                    made.pieces.append(piece)
                    made.learned.append(learning)
                    piece = ""
                piece, learning = piece + part, step.learned
    if piece:
        made.pieces.append(piece)
        made.learned.append(learning)
    return made
