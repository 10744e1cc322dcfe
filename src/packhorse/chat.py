"""Chat templates, tokenizers and labels: how a conversation is rendered, and which tokens are supervised.

:class:`ChatProcessor` renders with the processor's own chat template. :func:`answer_spans` locates the
answers in the rendered text: by ``{% generation %}`` marks if the template has them, else by a second
rendering with sentinels for the answers. So whatever a user types, a literal ``<|im_start|>assistant``
included, never becomes a label. :func:`supervised_tokens` maps these characters to token positions by the
special tokens around them and compares the ids; what does not agree raises :class:`CannotAlign`.
"""

from __future__ import annotations

import bisect
import copy
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise, repeat, takewhile
from typing import Any

from packhorse.errors import ConfigError, PackhorseError

Turns = Sequence[Mapping[str, Any]]
Render = Callable[[Turns], str]

PRIVATE_USE = range(0xE000, 0xF900)
"""Characters that stand in for texts: no template writes them, and hardly anybody types them."""

_CHATML = ("<|im_start|>", "<|im_end|>")
_CHATML_OPENING = "<|im_start|>assistant\n"


class CannotAlign(PackhorseError):
    """The assistant turns of this conversation could not be found in its token ids with certainty."""


@dataclass(frozen=True, slots=True)
class TurnMarkers:
    """How a template writes an assistant turn.

    Attributes:
        assistant: the tokens that open it, after the end of the turn before.
        stop: the special token that closes it, or None where the template writes none.
        assistant_text: the opening as text; empty where the tokenizer cannot tell it.
        stop_text: the stop token as text; empty where there is none.
    """

    assistant: tuple[int, ...]
    stop: int | None
    assistant_text: str = ""
    stop_text: str = ""


class ChatProcessor:
    """A processor with its tokenizer and chat template; what they say is looked up once.

    Args:
        processor: of any kind, or a tokenizer. Changes made to it after the first use are not noticed.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    @cached_property
    def tokenizer(self) -> Any:
        """See :func:`tokenizer_of`."""
        return tokenizer_of(self.processor)

    @cached_property
    def chat_template(self) -> str | None:
        """See :func:`chat_template`."""
        return chat_template(self.processor)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """See :func:`special_tokens`."""
        return special_tokens(self.tokenizer)

    @cached_property
    def turn_markers(self) -> TurnMarkers:
        r"""How the template opens and closes an assistant turn.

        ``<|im_start|>assistant\n`` and ``<|im_end|>`` for ChatML templates; for others, what surrounds an
        answer in a rendered example. A blank at the end of the opening belongs to the answer's first token
        and is not part of it.

        Raises:
            CannotAlign: the template does not write a user turn and an answer one after the other.
        """
        return _derive_markers(self)

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template writes the text of a list of parts, and not the list."""
        turn = {"role": "user", "content": [{"type": "text", "text": chr(PRIVATE_USE[0])}]}
        try:
            text = self.apply_chat_template([turn])
        except template_errors(TypeError, ValueError):
            return False
        return chr(PRIVATE_USE[0]) in text and not any(quoted in text for quoted in ("'text'", '"text"'))

    def apply_chat_template(self, turns: Turns) -> str:
        """Render turns as one text with the processor's own method."""
        text = self.processor.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=False)
        # Some processors take one conversation for a batch of one.
        return str(text[0] if isinstance(text, list) else text)

    def render(self, turns: Turns) -> str:
        """Render turns as one text, media placeholders not expanded."""
        return self.apply_chat_template(turns)


def template_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """What a chat template raises when it refuses a conversation, for an ``except`` clause."""
    jinja2 = sys.modules.get("jinja2")  # whoever renders with it has imported it
    return others if jinja2 is None else (*others, jinja2.TemplateError)


def is_transformers(processor: Any) -> bool:
    """Whether a processor is one that transformers ships (or a subclass), and so takes grouped options.

    One that comes with a model's repository only shares the base class; what its call takes is its own.
    """
    return any(kind.__module__.startswith("transformers.models.") for kind in type(processor).__mro__)


def tokenizer_of(processor: Any) -> Any:
    """The processor's tokenizer, or the processor itself where it is one."""
    tokenizer = getattr(processor, "tokenizer", None)
    return processor if tokenizer is None else tokenizer


def is_tokenizer(processor: Any) -> bool:
    """Whether a tokenizer was given in place of a processor."""
    known = any(kind.__name__ == "PreTrainedTokenizerBase" for kind in type(processor).__mro__)
    return known or (tokenizer_of(processor) is processor and hasattr(processor, "convert_tokens_to_ids"))


def chat_template(processor: Any) -> str | None:
    """The template as text, the processor's before the tokenizer's; None where there is not exactly one."""
    template = getattr(processor, "chat_template", None)
    if template is None:
        template = getattr(tokenizer_of(processor), "chat_template", None)
    return template if isinstance(template, str) else None


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Text -> id of the tokens that a tokenizer never splits: special and added ones."""
    found = dict(getattr(tokenizer, "get_added_vocab", dict)())
    for token in getattr(tokenizer, "all_special_tokens", ()):
        found.setdefault(str(token), int(tokenizer.convert_tokens_to_ids(str(token))))
    return {token: number for token, number in found.items() if token}


def _derive_markers(chat: ChatProcessor) -> TurnMarkers:
    tokenizer, template, special = chat.tokenizer, chat.chat_template, chat.special_tokens
    if template is not None and all(token in template and token in special for token in _CHATML):
        opening = token_ids(tokenizer(_CHATML_OPENING, add_special_tokens=False))
        return TurnMarkers(tuple(opening), special["<|im_end|>"], _CHATML_OPENING, "<|im_end|>")
    between, after = _around_an_answer(chat)
    between = between.rstrip(" ")
    ends = token_ids(tokenizer(after, add_special_tokens=False))
    opening = token_ids(tokenizer(between, add_special_tokens=False))
    names = {number: token for token, number in special.items()}
    stop = next((token for token in ends if token in names), None)
    # A user's turn ends as an answer does; what is left of the text between them opens the answer.
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(opening, ends, strict=False))))
    if stop not in opening[:same]:
        same = 0
    text = "" if same else between
    if same < len(opening) and getattr(tokenizer, "is_fast", False):
        made = tokenizer(between, add_special_tokens=False, return_offsets_mapping=True)
        text = between[made["offset_mapping"][same][0] :]
    return TurnMarkers(tuple(opening[same:]), stop, text, "" if stop is None else names[stop])


def _around_an_answer(chat: ChatProcessor) -> tuple[str, str]:
    """What a rendered example has between a question and its answer, and after the answer."""
    if not hasattr(chat.processor, "apply_chat_template"):
        raise CannotAlign(f"{type(chat.processor).__name__} has no chat template")
    question, answer = chr(PRIVATE_USE[0]), chr(PRIVATE_USE[1])
    texts = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in texts]
    # Texts first: a template that wants texts would print a list of parts as Python does.
    for example in (texts, parts):
        try:
            text = chat.apply_chat_template(example)
        except template_errors(TypeError, ValueError):
            continue
        if text.count(question) == 1 == text.count(answer):
            between, _, after = text.partition(question)[2].partition(answer)
            return between, after
    raise CannotAlign("the template does not write a question and its answer as they are")


def token_ids(made: Any) -> list[int]:
    """The ids that a tokenizer returned for one text, whatever it wraps them in."""
    ids = made["input_ids"] if isinstance(made, Mapping) or hasattr(made, "keys") else made
    return list(ids[0]) if len(ids) and isinstance(ids[0], list | tuple) else list(ids)


# --- repeated tokens --------------------------------------------------------------------------------------


# What a single text, which is neither padded nor cut, can be asked for with.
_PASSED_ON = frozenset({"add_special_tokens", "return_token_type_ids", "return_attention_mask"})
_UNDERSTOOD = _PASSED_ON | {"padding", "padding_side", "return_tensors", "is_split_into_words"}
_NO_PADDING = (False, True, "longest", "do_not_pad")


@dataclass(frozen=True, slots=True)
class Tokenised:
    """A text's tokens and where in the text each begins and ends.

    Attributes:
        text: that was tokenised.
        special: whether the tokenizer was to put its own tokens around it.
        ids: its tokens.
        starts: of each token in the text.
        ends: of each token in the text.
    """

    text: str
    special: bool
    ids: list[int]
    starts: list[int]
    ends: list[int]


def tokenised(tokenizer: Any, text: str, special: bool) -> Tokenised:
    """The tokens of a text, by a fast tokenizer."""
    made = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    return _with_offsets(made, text, special)


def _with_offsets(made: Any, text: str, special: bool) -> Tokenised:
    offsets = made["offset_mapping"]
    starts, ends = [a for a, _ in offsets], [b for _, b in offsets]
    # What the tokenizer puts after a text is said to stand at its beginning: places would not be in order.
    place = len(ends)
    while place and not ends[place - 1]:
        place -= 1
    if place:
        starts[place:] = ends[place:] = [len(text)] * (len(ends) - place)
    return Tokenised(text, special, list(made["input_ids"]), starts, ends)


class RepeatedTokenTokenizer:
    """Stands in for a processor's tokenizer during one call, and gives the same ids.

    What it does not understand (several texts, truncation, padding to a length) goes to the tokenizer itself.

    Args:
        tokenizer: a fast one.
        tokens: text and id of the tokens whose runs are shortened; see :func:`repeated_media_tokens`.

    Attributes:
        read: what was tokenised, runs written once; None while nothing was, or the tokenizer itself did it.
    """

    def __init__(self, tokenizer: Any, tokens: Mapping[str, int]) -> None:
        self._original, self._shortened = tokenizer, tokens
        longest_first = sorted(map(re.escape, tokens), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(longest_first)})(?:\\1)*")
        self.read: Tokenised | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_original" or name.startswith("__"):  # a copy asks for them before it has anything
            raise AttributeError(name)
        return getattr(self._original, name)

    def __len__(self) -> int:
        return len(self._original)

    def __call__(self, text: Any = None, *others: Any, **options: Any) -> Any:
        """As the tokenizer's own call."""
        self.read = None
        one = text[0] if isinstance(text, list) and len(text) == 1 else None
        understood = (
            not others
            and options.keys() <= _UNDERSTOOD
            and options.get("padding", False) in _NO_PADDING
            and options.get("return_tensors") in (None, "pt")
            and not options.get("is_split_into_words")
        )
        made = self._made(one, options) if isinstance(one, str) and understood else None
        return self._original(text, *others, **options) if made is None else made

    def _made(self, text: str, options: Mapping[str, Any]) -> Any:
        """The tokenizer's answer for one text; None where the runs are not found again among the tokens."""
        found: list[tuple[int, int]] = []

        def once(run: re.Match[str]) -> str:
            token = run[1]
            found.append((self._shortened[token], len(run[0]) // len(token)))
            return token

        short = self._pattern.sub(once, text)
        passed_on = {name: value for name, value in options.items() if name in _PASSED_ON}
        answer = self._original(short, **passed_on, return_offsets_mapping=True)
        read = _with_offsets(answer, short, bool(options.get("add_special_tokens", True)))
        ours = frozenset(self._shortened.values())
        places = [place for place, token in enumerate(read.ids) if token in ours]
        if [read.ids[place] for place in places] != [token for token, _ in found]:
            return None
        self.read = read
        times = [1] * len(read.ids)
        for place, (_, number) in zip(places, found, strict=True):
            times[place] = number
        rows = {
            key: [list(chain.from_iterable(map(repeat, row, times)))]
            for key, row in answer.items()
            if key != "offset_mapping"
        }
        return type(answer)(rows, tensor_type=options.get("return_tensors"))


def repeated_media_tokens(tokenizer: Any, ids: frozenset[int]) -> dict[str, int]:
    """Text and id of those tokens of ``ids`` that are the same written alone and among their like."""
    special = special_tokens(tokenizer)
    added = getattr(tokenizer, "added_tokens_decoder", {})

    def stays(text: str, number: int) -> bool:
        token = added.get(number)
        if token is None or token.single_word or token.normalized:
            return False  # what it becomes depends on its neighbours
        if any(text + text[0] in other for other in special):
            return False  # two of them may begin another token
        made = tokenizer(text * 3, add_special_tokens=False)
        return list(made["input_ids"]) == [number] * 3

    return {text: number for text, number in special.items() if number in ids and stays(text, number)}


def with_repeated_tokens(processor: Any, ids: frozenset[int]) -> tuple[Any, RepeatedTokenTokenizer | None]:
    """Return a copy of the processor with a :class:`RepeatedTokenTokenizer`, and that tokenizer.

    Returns the processor itself and None if it cannot have one.

    The processor that is passed is not changed; what is returned shares all else with it.

    Args:
        processor: of any kind; only those with a fast tokenizer that are called as transformers wrote it get
            one: a call of somebody else's may do anything with its tokenizer.
        ids: of the tokens that stand for the content of media.
    """
    tokenizer = getattr(processor, "tokenizer", None)
    if not is_transformers(processor) or not getattr(tokenizer, "is_fast", False):
        return processor, None
    if not type(processor).__call__.__module__.startswith("transformers."):
        return processor, None
    tokens = repeated_media_tokens(tokenizer, ids)
    if not tokens:
        return processor, None
    quick = copy.copy(processor)
    quick.tokenizer = RepeatedTokenTokenizer(tokenizer, tokens)
    return quick, quick.tokenizer


# --- labels -----------------------------------------------------------------------------------------------


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
