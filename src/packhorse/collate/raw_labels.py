"""Labels of a padded batch: the answers and the tokens that end them are supervised, nothing else.

Three ways, each tried where the one before cannot be certain: the rendered conversation is laid over the ids
(exact; see :mod:`packhorse.chat`); the template's turn markers are looked for in the ids; the answers are
tokenised by themselves and searched. The first needs a processor that can render the conversation, which
costs one more rendering and tokenisation of the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from packhorse.chat import (
    IGNORE_INDEX,
    CannotAlign,
    ChatProcessor,
    answer_spans,
    is_transformers,
    label_tokens,
    tokenizer_of,
)
from packhorse.collate.finish import Records
from packhorse.collate.processor_call import (
    NOT_MADE_FOR_IT,
    Turns,
    call,
    logger,
    plain_turns,
    render,
    text_ids,
    tolerated,
)
from packhorse.errors import ConfigError
from packhorse.families import Encoder, Family, Generic, family_of
from packhorse.types import MEDIA_KINDS

_STOP_TEXTS = frozenset(
    {"<|im_end|>", "<end_of_turn>", "<turn|>", "<|eot_id|>", "<|end|>", "<end_of_utterance>", "</s>", "<eos>"}
)


def _find_pattern_indices(
    template: Any, pattern: Any, search_start_index: int = 0, allow_first_token_mismatch: bool = False
) -> tuple[int, int]:
    """Where ``pattern`` stands in ``template``: (first, after last), or (-1, -1).

    Args:
        template: ids, a 1-D tensor or a list.
        pattern: the ids to find.
        search_start_index: where the search begins.
        allow_first_token_mismatch: the first id of the pattern may differ (a blank before a word changes
            it); a pattern of one id must still be equal.
    """
    ids, wanted = _listed(template), _listed(pattern)
    if not wanted:
        return -1, -1
    skip = 1 if allow_first_token_mismatch and len(wanted) > 1 else 0
    for start in range(search_start_index, len(ids) - len(wanted) + 1):
        if ids[start + skip : start + len(wanted)] == wanted[skip:]:
            return start, start + len(wanted)
    return -1, -1


def _listed(ids: Any) -> list[int]:
    return list(ids.tolist() if hasattr(ids, "tolist") else ids)


def search_answers(ids: list[int], conversation: Turns, processor: Any, media: frozenset[int]) -> list[int]:
    """Labels of one row, in which each answer is searched after the one before; not found, it is logged."""
    tokenizer = tokenizer_of(processor)
    labels, at = [IGNORE_INDEX] * len(ids), 0
    before: list[str] = []  # what others said since the last answer
    for turn in conversation:
        if turn.get("role") != "assistant":
            before.append(_extract_assistant_text(turn))
            continue
        text = _extract_assistant_text(turn)
        if not text:
            continue
        start, end = _find_answer(ids, text, at, tokenizer)
        if start >= 0 and _find_pattern_indices(ids, ids[start:end], start + 1)[0] >= 0:
            # It stands there more than once: first pass over what was said before it.
            after = _after(ids, before, at, tokenizer, processor)
            start, end = _find_answer(ids, text, after, tokenizer)
        before = []
        if start < 0:
            logger.warning("an answer was not found in the ids and is not supervised: %r", text[:80])
            continue
        if end < len(ids) and is_stop(ids[end], processor):
            end += 1
        learn(labels, ids, start, end, media)
        at = end
    return labels


def _find_answer(ids: list[int], text: str, at: int, tokenizer: Any) -> tuple[int, int]:
    """Exactly as it is, then with other blanks around it, then with another first token."""
    found = (
        _find_pattern_indices(ids, text_ids(tokenizer, form), at, allow_first_token_mismatch=loosely)
        for loosely in (False, True)
        for form in dict.fromkeys((text, text.strip(), f" {text.strip()}"))
    )
    return next((place for place in found if place[0] >= 0), (-1, -1))


def _after(ids: list[int], texts: Iterable[str], at: int, tokenizer: Any, processor: Any) -> int:
    for text in texts:
        pattern = tokens_or_nothing(tokenizer, text.strip(), processor)
        end = _find_pattern_indices(ids, pattern, at, allow_first_token_mismatch=True)[1]
        at = max(at, end)
    return at


def is_stop(token: int, processor: Any) -> bool:
    """Whether a token ends a turn: by its text, by the tokenizer's word, or by the template."""
    tokenizer = tokenizer_of(processor)
    if token == getattr(tokenizer, "eos_token_id", None):
        return True
    if callable(getattr(tokenizer, "decode", None)):
        text = _decode_single_token(tokenizer, token).strip()
        if text in _STOP_TEXTS or (text and text == getattr(tokenizer, "eos_token", None)):
            return True
    try:
        return token == ChatProcessor(processor).turn_markers.stop
    except tolerated(processor, CannotAlign):
        return False


def _extract_assistant_text(message: Mapping[str, Any]) -> str:
    """The text of a turn: its content, or the text parts of its content joined; empty where there is none."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else ()
    texts = (part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text")
    return "".join(text for text in texts if isinstance(text, str))


def _decode_single_token(tokenizer: Any, token_id: int) -> str:
    """The text of one token, from tokenizers that decode a number and from those that want a list.

    Of a token that cannot be decoded (an id outside the vocabulary, a tokenizer without ``decode``), its name
    in the vocabulary, or else its number.
    """
    forms: tuple[Any, ...] = (token_id, [token_id], torch.tensor([token_id]))
    for form in forms:
        with suppress(*NOT_MADE_FOR_IT, ArithmeticError):
            return str(call(tokenizer.decode, form))
    with suppress(*NOT_MADE_FOR_IT, ArithmeticError):
        names = tokenizer.convert_ids_to_tokens([token_id])
        if names and names[0] is not None:
            return str(names[0])
    return str(token_id)


def tokens_or_nothing(tokenizer: Any, text: str, processor: Any) -> list[int]:
    """The ids of a text; none where a small tokenizer cannot take it."""
    try:
        return text_ids(tokenizer, text) if text else []
    except tolerated(processor):
        return []


def learn(labels: list[int], ids: Sequence[int], start: int, end: int, media: frozenset[int]) -> None:
    """Label the ids from ``start`` to ``end``, media tokens dropped."""
    labels[start:end] = [token if token not in media else IGNORE_INDEX for token in ids[start:end]]


_IMSTART_TEMPLATE_PROCESSORS = frozenset(
    {
        "Qwen2VLProcessor",
        "Qwen2_5_VLProcessor",
        "Qwen3VLProcessor",
        "Qwen3VLMoeProcessor",
        "Qwen2_5OmniProcessor",
        "Qwen3OmniMoeProcessor",
        "InternVLProcessor",
        "LlavaOnevisionProcessor",
        "NemotronH_Nano_Omni_Reasoning_V3Processor",
        "NemotronH_Omni_Reasoning_V3Processor",
    }
)
"""Processors whose templates are ChatML: their marker is believed even where they cannot render."""

_IM_START, _IM_END = "<|im_start|>", "<|im_end|>"


def build_labels_from_template(
    input_ids_batch: torch.Tensor, conversations: Sequence[Turns], processor: Any
) -> torch.Tensor:
    """Labels [B, S] for ids [B, S]: answers with their end-of-turn token; :data:`IGNORE_INDEX` elsewhere.

    Whatever a user types, a literal ``<|im_start|>assistant`` included, never becomes a label; nor do media
    tokens and padding. A row in which nothing is supervised is logged and recorded in the process's ledger.

    Args:
        input_ids_batch: what the processor made of the conversations; rows may be padded on either side, or
            cut at the end.
        conversations: the turns of each row, in the documented format.
        processor: anything with ``apply_chat_template`` or at least a ``tokenizer``.
    """
    labels = make_labels(input_ids_batch, conversations, processor)
    report_unsupervised(labels, [""] * len(labels), Records())
    return labels


def make_labels(
    input_ids_batch: torch.Tensor, conversations: Sequence[Turns], processor: Any
) -> torch.Tensor:
    """:func:`build_labels_from_template` without a report of rows in which nothing is supervised."""
    encoder = Encoder(processor)
    media = media_ids(processor, encoder.family)

    def row(ids: list[int], conversation: Turns) -> list[int]:
        try:
            return _laid_over(ids, conversation, encoder, media)
        except CannotAlign:
            pass
        try:
            return _between_markers(ids, conversation, processor, media)
        except CannotAlign:
            return search_answers(ids, conversation, processor, media)

    rows = [row(ids, conversation) for ids, conversation in _rows(input_ids_batch, conversations)]
    return _tensor(rows, input_ids_batch)


def build_labels(
    input_ids_batch: torch.Tensor, conversations: Sequence[Turns], processor: Any
) -> torch.Tensor:
    """Labels [B, S] by tokenising each answer alone and looking for it in the ids; the last resort.

    A blank that the template puts before an answer may change its first token, so that may differ. The token
    that ends the turn is supervised too. An answer that is not found is logged.
    """
    media = media_ids(processor, family_of(processor))
    rows = [
        search_answers(ids, turns, processor, media) for ids, turns in _rows(input_ids_batch, conversations)
    ]
    labels = _tensor(rows, input_ids_batch)
    report_unsupervised(labels, [""] * len(labels), Records())
    return labels


def media_ids(processor: Any, family: Family) -> frozenset[int]:
    """The ids that stand for media, as far as the processor tells."""
    tokenizer = tokenizer_of(processor)
    known: frozenset[int] = frozenset()
    if callable(getattr(tokenizer, "convert_tokens_to_ids", None)):
        with suppress(*tolerated(processor, ConfigError)):
            known = Encoder(processor, family).media_token_ids
    if known and not isinstance(family, Generic):
        return known
    owners = (processor, tokenizer)
    found = (getattr(owner, f"{kind}_token_id", None) for owner in owners for kind in MEDIA_KINDS)
    return known | {number for number in found if isinstance(number, int)}


# --- the rendered text laid over the ids ------------------------------------------------------------------


def _laid_over(ids: list[int], conversation: Turns, encoder: Encoder, media: frozenset[int]) -> list[int]:
    processor, family = encoder.processor, encoder.family
    turns = plain_turns(conversation, family)
    try:
        text = render(processor, family, turns)
        if isinstance(family, Generic) or not is_transformers(processor):
            spans = answer_spans(encoder, turns, text, lambda changed: render(processor, family, changed))
        else:
            spans = family.answer_spans(encoder, turns, text)
        labels = label_tokens(encoder, text, spans, ids, media)
        return labels if encoder.turn_markers.stop is not None else _with_stops(labels, ids, processor)
    except CannotAlign:
        raise
    except tolerated(processor, ConfigError) as error:
        raise CannotAlign(f"{type(processor).__name__} does not render the conversation: {error}") from error


def _with_stops(labels: list[int], ids: Sequence[int], processor: Any) -> list[int]:
    """Learn the token after each answer if it ends a turn; for tokenizers that name no special tokens."""
    ends = [
        place
        for place in range(1, len(labels))
        if labels[place] == IGNORE_INDEX != labels[place - 1] and is_stop(ids[place], processor)
    ]
    for place in ends:
        labels[place] = ids[place]
    return labels


# --- turn markers -----------------------------------------------------------------------------------------


def _get_assistant_marker(tokenizer: Any) -> list[int] | None:
    r"""The ids of ``<|im_start|>assistant\n``, or None where ``<|im_start|>`` is no token of its own."""
    start = token_id(tokenizer, _IM_START)
    if start is None:
        return None
    ids = text_ids(tokenizer, f"{_IM_START}assistant\n")
    return ids if ids[:1] == [start] else [start, *text_ids(tokenizer, "assistant\n")]


def _get_stop_token_id(tokenizer: Any) -> int | None:
    """The id of ``<|im_end|>``, or None where the tokenizer has no such token."""
    return token_id(tokenizer, _IM_END)


def token_id(tokenizer: Any, token: str) -> int | None:
    """The id of a token, or None where the tokenizer has no such token."""
    convert = getattr(tokenizer, "convert_tokens_to_ids", None)
    if convert is None:
        return None
    number = convert(token)
    unknown = getattr(tokenizer, "unk_token_id", None)
    return None if not isinstance(number, int) or number == unknown else number


def _markers(processor: Any) -> tuple[list[int], int]:
    """How an assistant turn begins and ends in ids.

    Raises:
        CannotAlign: the processor does not tell.
    """
    if type(processor).__name__ not in _IMSTART_TEMPLATE_PROCESSORS:
        with suppress(*tolerated(processor, CannotAlign)):
            found = ChatProcessor(processor).turn_markers
            if found.assistant and found.stop is not None:
                return list(found.assistant), found.stop
    tokenizer = tokenizer_of(processor)
    with suppress(*tolerated(processor)):
        marker, stop = _get_assistant_marker(tokenizer), _get_stop_token_id(tokenizer)
        if marker is not None and stop is not None:
            return marker, stop
    raise CannotAlign(f"{type(tokenizer).__name__} does not tell how an answer begins and ends")


def _between_markers(ids: list[int], conversation: Turns, processor: Any, media: frozenset[int]) -> list[int]:
    """Label what follows each marker that the template wrote, up to the stop token.

    Which of the markers were typed is known from the texts of the conversation; where they do not add up,
    nothing is guessed.
    """
    marker, stop = _markers(processor)
    tokenizer = tokenizer_of(processor)
    places = _places(ids, marker)
    written: list[int | None] = []  # one entry per marker: typed stop tokens in the answer; None if typed
    for turn in conversation:
        typed = tokens_or_nothing(tokenizer, _extract_assistant_text(turn), processor)
        if turn.get("role") == "assistant":
            written.append(typed.count(stop))
        written.extend([None] * len(_places(typed, marker)))
    if len(places) != len(written):
        raise CannotAlign(f"{len(places)} assistant markers in the ids where {len(written)} were expected")
    labels = [IGNORE_INDEX] * len(ids)
    for place, typed_stops in zip(places, written, strict=True):
        if typed_stops is None:
            continue
        start = place + len(marker)
        stops = [at for at in range(start, len(ids)) if ids[at] == stop]
        cut_off = len(stops) <= typed_stops
        end = _end_without_padding(ids, tokenizer) if cut_off else stops[typed_stops] + 1
        learn(labels, ids, start, end, media)
    return labels


def _end_without_padding(ids: Sequence[int], tokenizer: Any) -> int:
    pad, end = getattr(tokenizer, "pad_token_id", None), len(ids)
    while end and ids[end - 1] == pad:
        end -= 1
    return end


def _places(ids: Sequence[int], pattern: Sequence[int]) -> list[int]:
    width, wanted = len(pattern), list(pattern)
    return [at for at in range(len(ids) - width + 1) if list(ids[at : at + width]) == wanted]


# --- what all ways share ----------------------------------------------------------------------------------


def _rows(input_ids_batch: torch.Tensor, conversations: Sequence[Turns]) -> Iterable[tuple[list[int], Turns]]:
    if len(input_ids_batch) != len(conversations):
        raise ConfigError(f"{len(input_ids_batch)} rows of ids for {len(conversations)} conversations")
    return zip(input_ids_batch.tolist(), conversations, strict=True)


def _tensor(rows: list[list[int]], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(rows, dtype=like.dtype, device=like.device).reshape(like.shape)


def report_unsupervised(labels: torch.Tensor, keys: Sequence[str], records: Records) -> None:
    """Log and record each row of ``labels`` [B, S] in which nothing is supervised."""
    for row in (labels == IGNORE_INDEX).all(dim=1).nonzero().flatten().tolist():
        records.record(keys[row], "nothing_supervised", "no token of it is supervised", "kept")
