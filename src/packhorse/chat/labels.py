"""Labels: which characters of a rendered conversation are supervised, and which tokens they become.

Answers are found by ``{% generation %}`` marks where the template has them; else the conversation is rendered
once more with substitutes for the answers, and what surrounds the substitutes is the frame that the template
and the other speakers wrote. So it does not matter what anybody types.

Every span of characters is carried over to token positions by the special tokens around it, and then compared
token by token with the ids it lands on. What does not agree raises and is never guessed.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise, takewhile
from typing import Any

from packhorse.chat.repeated_tokens import Tokenised, tokenised
from packhorse.chat.template import (
    PRIVATE_USE,
    CannotAlign,
    ChatProcessor,
    Render,
    TurnMarkers,
    Turns,
    template_errors,
    token_ids,
)
from packhorse.errors import ConfigError

Span = tuple[int, int]

IGNORE_INDEX = -100
"""The label of a token that is not supervised. Written nowhere else."""

TOKEN_KEYS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
"""Tensors with one entry per token, whatever the family."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


_PER_TOKEN = frozenset({"labels", *TOKEN_KEYS, "position_ids"})


def token_keys(values: Mapping[str, Any], media: Container[str] = ()) -> list[str]:
    """Names of the entries with one value per token, in a sample or a batch of unknown origin.

    These are the known names, and tensors shaped like ``input_ids`` that are no ``media``. This is the only
    place that tells tokens from media by their shape.
    """
    shape = getattr(values.get("input_ids"), "shape", None)
    return [
        key
        for key, value in values.items()
        if value is not None
        and (
            key in _PER_TOKEN
            or (key not in media and shape is not None and getattr(value, "shape", None) == shape)
        )
    ]


def shift_tokens(batch: Mapping[str, Any], media: Container[str] = ()) -> dict[str, Any]:
    """The one autoregressive shift: each position gets the label of the next token.

    Takes tensors of one sample ([S]) or a batch ([B, S]; ``position_ids`` also [3, B, S]); returns a new dict
    of views one token shorter: ``labels`` without the first, every other token tensor
    (see :func:`token_keys`) without the last. Everything else stays.

    Raises:
        ConfigError: there are no labels, or a token tensor has another length than they.
    """
    if "labels" not in batch:
        raise ConfigError(f"cannot shift without 'labels', only {', '.join(batch)}")
    shifted = dict(batch)
    length = batch["labels"].shape[-1]
    for key in token_keys(batch, media):
        shape = tuple(batch[key].shape)
        if shape[-1] != length or len(shape) > (3 if key == "position_ids" else 2):
            raise ConfigError(f"'{key}' is {shape}, expected one entry for each of {length} labels")
        shifted[key] = batch[key][..., 1:] if key == "labels" else batch[key][..., :-1]
    return shifted


# --- from answers to characters ---------------------------------------------------------------------------


def answer_spans(chat: ChatProcessor, turns: Turns, text: str, render: Render | None = None) -> list[Span]:
    """Where the assistant turns stand in the rendered ``text``, each with its end-of-turn token.

    Args:
        chat: the processor that rendered the text.
        turns: the messages that ``text`` was rendered from.
        text: the rendered conversation, media placeholders not yet expanded.
        render: renders turns; None for ``chat.render``.

    Raises:
        CannotAlign: the template writes something that does not lead back to the answers.
    """
    template, markers = chat.chat_template, chat.turn_markers
    if template is not None and _GENERATION.search(template):
        spans = _marked_spans(chat, template, turns, text)
    else:
        spans = _stand_in_spans(render or chat.render, turns, text, markers)
    closed = (_up_to_stop(text, span, markers.stop_text) for span in spans)
    return [(start, end) for start, end in closed if start < end]


def _marked_spans(chat: ChatProcessor, template: str, turns: Turns, text: str) -> list[Span]:
    from transformers.utils.chat_template_utils import render_jinja_template

    special = getattr(chat.tokenizer, "special_tokens_map", {})
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

    def sentinel(answer: str) -> str:
        answers.append(answer)
        return f"{mark}{len(answers) - 1}{mark}"

    masked = [_replace_text(turn, sentinel) if turn["role"] == "assistant" else turn for turn in turns]
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
        frame: what stands before, between and after the answers.
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
    """A piece of the frame up to the opening of a turn, what it has after that, and whether it has one."""
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
    """The span with the stop token that follows it, and with nothing after a stop token it holds already."""
    start, end = span
    if not stop:
        return span
    follows = re.compile(rf"\s*{re.escape(stop)}").match(text, end)
    if follows:
        return start, follows.end()
    held = text[start:end].rstrip()  # generation marks may take in the newline after the turn
    return (start, start + len(held)) if held.endswith(stop) else span


# --- from characters to tokens ----------------------------------------------------------------------------


def label_tokens(
    chat: ChatProcessor, text: str, spans: Sequence[Span], ids: Sequence[int], media_ids: frozenset[int]
) -> list[int]:
    """Labels for ``ids``: the id itself inside the spans, :data:`IGNORE_INDEX` elsewhere.

    Arguments and errors are those of :func:`supervised_tokens`.
    """
    labels = [IGNORE_INDEX] * len(ids)
    for start, end in supervised_tokens(chat, text, spans, ids, media_ids):
        labels[start:end] = ids[start:end]
    return labels


def supervised_tokens(
    chat: ChatProcessor,
    text: str,
    spans: Sequence[Span],
    ids: Sequence[int],
    media_ids: frozenset[int],
    read: Tokenised | None = None,
) -> list[Span]:
    """Where the spans of a text are in its ids: first and after-last token of each piece, media dropped.

    Args:
        chat: its tokenizer made ``ids``.
        text: the rendered conversation with unexpanded placeholders.
        spans: characters of ``text`` to supervise, none of them empty.
        ids: the tokens of ``text`` with placeholders expanded; may be padded, or cut at the end.
        media_ids: ids that stand for media or their placeholders; never supervised.
        read: tokens of a text, as the processor's call made them; if it is this one, they are used.

    Raises:
        CannotAlign: a span's tokens are not found where they must be.
    """
    if not spans:
        return []
    tokenizer = chat.tokenizer
    special = frozenset(chat.special_tokens.values()) - media_ids
    pad = getattr(tokenizer, "pad_token_id", None)

    def tokenise(bos: bool, padded: bool) -> list[Span]:
        return over(_tokenise(tokenizer, text, spans, add_special_tokens=bos), padded)

    def over(tokens: Tokenised, padded: bool) -> list[Span]:
        low, high = _without_padding(tokens.ids, ids, pad) if padded else (0, len(ids))
        pieces = [piece for span in spans for piece in _pieces(tokens, span, media_ids)]
        found = _carried_over(tokens.ids, pieces, ids[low:high], special)
        return [(low + start, low + end) for start, end in found]

    if read is not None and read.text == text:
        with suppress(CannotAlign):
            return over(read, padded=False)
    try:
        return tokenise(bos=False, padded=False)
    except CannotAlign:
        # Pad tokens may hide the stop tokens they are equal to. And where no special token comes before an
        # answer, the one that the tokenizer puts in front must be counted.
        for bos, padded in ((False, True), (True, False), (True, True)):
            with suppress(CannotAlign):
                return tokenise(bos, padded)
        raise


def _pieces(tokens: Tokenised, span: Span, media_ids: frozenset[int]) -> Iterator[Span]:
    """First and after-last token of each run that touches the characters of ``span``, between media."""
    first, last = bisect.bisect_right(tokens.ends, span[0]), bisect.bisect_left(tokens.starts, span[1])
    for place in range(first, last):
        if tokens.ids[place] in media_ids:
            yield first, place
            first = place + 1
    yield first, last


def _tokenise(tokenizer: Any, text: str, spans: Sequence[Span], *, add_special_tokens: bool) -> Tokenised:
    if getattr(tokenizer, "is_fast", False):
        return tokenised(tokenizer, text, add_special_tokens)
    return _tokenise_in_pieces(tokenizer, text, spans, add_special_tokens)


def _tokenise_in_pieces(tokenizer: Any, text: str, spans: Sequence[Span], bos: bool) -> Tokenised:
    """Without offsets: cut the text at the spans, and use the pieces if together they give the same ids."""
    whole = token_ids(tokenizer(text, add_special_tokens=bos))
    cuts = sorted({0, len(text), *(c for span in spans for c in span)})
    made = Tokenised(text, bos, [], [], [])
    for a, b in pairwise(cuts):
        piece = token_ids(tokenizer(text[a:b], add_special_tokens=bos and a == 0))
        made.ids.extend(piece)
        # Positions inside a piece do not matter, only that they lie inside it.
        made.starts.extend([a] * len(piece))
        made.ends.extend([b] * len(piece))
    if made.ids != whole:
        raise CannotAlign("the tokenizer has no offsets, and the text cut at its turns gives other tokens")
    return made


def _carried_over(
    text: Sequence[int], pieces: Iterable[Span], body: Sequence[int], special: frozenset[int]
) -> Iterator[Span]:
    """Positions in ``body`` of pieces of the text's tokens; what a cut has left nothing of is passed over.

    A position is the nearest anchor before it plus the plain tokens in between; or, where tokens were put in
    there (a media item, what a hook inserts after the assistant's marker), the nearest anchor after it.
    """
    at, to = _anchors(text, body, special)
    for first, last in pieces:
        wanted = list(text[first:last])
        before, after = bisect.bisect_right(at, first) - 1, bisect.bisect_left(at, last - 1)
        if before >= len(to):
            continue  # even its anchor is after the cut
        # Text before the first anchor begins where the ids begin.
        start = first + (to[before] - at[before] if before >= 0 else 0)
        found = list(body[start : start + len(wanted)])
        if found != wanted[: len(body) - start] and after < len(to):
            start = first + to[after] - at[after]
            found = list(body[start : start + len(wanted)]) if start >= 0 else []
        if start >= len(body):
            continue
        if found != wanted[: len(body) - start]:
            raise CannotAlign(f"tokens {start} on do not read as tokens {first} to {last} of the text do")
        yield start, start + len(found)


def _without_padding(text: Sequence[int], ids: Sequence[int], pad: int | None) -> Span:
    """Where ``ids`` begin and end without padding: the pad tokens at an end that the text has not there."""

    def surplus(of: Iterable[int], beyond: Iterable[int]) -> int:
        runs = [sum(1 for _ in takewhile(lambda token: token == pad, row)) for row in (of, beyond)]
        return max(0, runs[0] - runs[1])

    low = surplus(ids, text)
    return low, max(low, len(ids) - surplus(reversed(ids), reversed(text)))


def _anchors(text: Sequence[int], body: Sequence[int], special: frozenset[int]) -> list[list[int]]:
    """Positions of the special tokens that both have, in the text and in the ids (fewer, after a cut).

    Expanding a media item adds tokens but keeps the others and their order. So a kind of token that comes
    out of order (the brackets around each frame of a video) is no anchor.
    """
    kinds, present = set(special), frozenset(body)
    while True:
        at = [place for place, token in enumerate(text) if token in kinds]
        to = [place for place, token in enumerate(body) if token in kinds]
        wrong = next(((text[a], body[b]) for a, b in zip(at, to, strict=False) if text[a] != body[b]), None)
        if wrong is None:
            return [at, to[: len(at)]]
        # The text's token is nowhere: it was expanded. Else the other one was put in.
        kinds.discard(wrong[0] if wrong[0] not in present else wrong[1])
