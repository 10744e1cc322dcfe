"""Where the assistant turns stand in a rendered conversation.

By ``{% generation %}`` marks where the template has them; else the conversation is rendered once more with
stand-ins for the answers, and what lies around the stand-ins is the frame that the template and the other
speakers wrote. So it does not matter what anybody types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from packhorse.chat.template import (
    PRIVATE_USE,
    CannotAlign,
    Render,
    TurnMarkers,
    Turns,
    chat_template,
    renderer,
    template_errors,
    tokenizer_of,
    turn_markers,
)

Span = tuple[int, int]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def answer_spans(processor: Any, turns: Turns, text: str, render: Render | None = None) -> list[Span]:
    """Where the assistant turns stand in the rendered ``text``, each with its end-of-turn token.

    Args:
        processor: with ``apply_chat_template`` and a ``tokenizer``.
        turns: the messages that ``text`` was rendered from.
        text: the rendered conversation, media placeholders not yet expanded.
        render: what rendered it, where that is not :func:`renderer`.

    Raises:
        CannotAlign: the template writes something that does not lead back to the answers.
    """
    template, markers = chat_template(processor), turn_markers(processor)
    if template is not None and _GENERATION.search(template):
        spans = _marked_spans(processor, template, turns, text)
    else:
        spans = _stand_in_spans(render or renderer(processor), turns, text, markers)
    closed = (_up_to_stop(text, span, markers.stop_text) for span in spans)
    return [(start, end) for start, end in closed if start < end]


def _marked_spans(processor: Any, template: str, turns: Turns, text: str) -> list[Span]:
    from transformers.utils.chat_template_utils import render_jinja_template

    special = getattr(tokenizer_of(processor), "special_tokens_map", {})
    render: Any = render_jinja_template  # it returns a pair, whatever its annotation says
    rendered, marks = render(
        [list(turns)], chat_template=template, return_assistant_tokens_mask=True, **special
    )
    if rendered[0] != text:
        raise CannotAlign("the template renders differently when its generation marks are asked for")
    return [(start, end) for start, end in marks[0]]


def _stand_in_spans(render: Render, turns: Turns, text: str, markers: TurnMarkers) -> list[Span]:
    """Render with a stand-in for each piece of each answer; what lies around the stand-ins is the frame."""
    answers: list[str] = []
    mark = next(char for char in map(chr, PRIVATE_USE) if char not in text)

    def stand_in(answer: str) -> str:
        answers.append(answer)
        return f"{mark}{len(answers) - 1}{mark}"

    masked = [_replace_text(turn, stand_in) if turn["role"] == "assistant" else turn for turn in turns]
    if not answers:
        return []
    try:
        frame = re.split(f"{mark}(\\d+){mark}", render(masked))
    except template_errors() as error:
        raise CannotAlign(f"the template refuses stand-ins for the answers: {error}") from error
    if [int(number) for number in frame[1::2]] != list(range(len(answers))):
        raise CannotAlign("the template does not write every answer exactly once")
    return _fit(text, frame[0::2], answers, markers.assistant_text)


def _replace_text(turn: Mapping[str, Any], replace: Callable[[str], str]) -> dict[str, Any]:
    """The turn with its texts replaced, an empty one added where it has none, and no other field.

    What the template writes of other fields (``tool_calls``, ``reasoning_content``) is then not in the frame:
    it is part of the answer.
    """
    content = turn["content"]
    if isinstance(content, str):
        return {"role": turn["role"], "content": replace(content)}
    parts = [{**p, "text": replace(p["text"])} if p.get("type") == "text" else p for p in content or ()]
    if not any(part.get("type") == "text" for part in parts):
        parts.append({"type": "text", "text": replace("")})
    return {"role": turn["role"], "content": parts}


def _fit(text: str, frame: Sequence[str], answers: Sequence[str], opening: str) -> list[Span]:
    """Lay the frame over the text: between its pieces are the answers, perhaps trimmed by the template.

    Args:
        text: the rendered conversation.
        frame: what stands before, between and behind the answers.
        answers: as they were said.
        opening: how the template opens an assistant turn, empty where that is not known.
    """
    cut = [_at_opening(piece, opening) for piece in frame[:-1]]
    heads = [*(head for head, _, _ in cut), frame[-1]]
    if not text.startswith(heads[0]):
        raise CannotAlign("the rendered text does not begin as its frame does")
    spans: list[Span] = []
    at = len(heads[0])
    for answer, (_, extra, opened), behind in zip(answers, cut, heads[1:], strict=True):
        last = len(spans) == len(answers) - 1
        span = _as_said(text, at, answer, extra, behind, last)
        if span is None and opened:
            span = _rewritten(text, at, answer, behind, last)
        if span is None:
            raise CannotAlign(f"the template changes the answer {answer[:40]!r}")
        spans.append(span)
        at = span[1] + len(behind)
    return spans


def _at_opening(piece: str, opening: str) -> tuple[str, str, bool]:
    """A piece of the frame up to the opening of a turn, what it has behind that, and whether it has one."""
    head, found, extra = piece.rpartition(opening) if opening else ("", "", "")
    return (head + found, extra, True) if found else (piece, "", False)


def _as_said(text: str, at: int, answer: str, extra: str, behind: str, last: bool) -> Span | None:
    start = at + len(extra)
    for form in (answer, answer.strip(), answer.lstrip(), answer.rstrip(), answer.strip("\n")):
        end = start + len(form)
        ends = not last or end + len(behind) == len(text)
        if ends and text.startswith(extra + form, at) and text.startswith(behind, end):
            return start, end
    return None


def _rewritten(text: str, at: int, answer: str, behind: str, last: bool) -> Span | None:
    """All that the template writes in the turn, for an answer that it rewrites (one that thinks, mostly)."""
    end = len(text) - len(behind) if last else text.find(behind, at)
    # In the middle, what follows must not be found too early.
    certain = last or (behind and behind not in answer)
    return (at, end) if certain and at <= end and text.startswith(behind, end) else None


def _up_to_stop(text: str, span: Span, stop: str) -> Span:
    """The span with the stop token that follows it, and with nothing behind a stop token it holds already."""
    start, end = span
    if not stop:
        return span
    follows = re.compile(rf"\s*{re.escape(stop)}").match(text, end)
    if follows:
        return start, follows.end()
    held = text[start:end].rstrip()  # generation marks may take in the newline after the turn
    return (start, start + len(held)) if held.endswith(stop) else span
