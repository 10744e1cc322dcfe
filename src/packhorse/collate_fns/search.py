"""Answers go in, the places in the ids where they stand come out: labels when nothing else tells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from packhorse.chat import IGNORE_INDEX, CannotAlign, tokenizer_of, turn_markers
from packhorse.collate_fns.contract import NOT_MADE_FOR_IT, Turns, call, logger, text_ids, tolerated

_STOP_TEXTS = frozenset(
    {"<|im_end|>", "<end_of_turn>", "<turn|>", "<|eot_id|>", "<|end|>", "<end_of_utterance>", "</s>", "<eos>"}
)


def _find_pattern_indices(
    template: Any, pattern: Any, search_start_index: int = 0, allow_first_token_mismatch: bool = False
) -> tuple[int, int]:
    """Where ``pattern`` stands in ``template``: (first, behind last), or (-1, -1).

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
    """Labels of one row, in which each answer is searched behind the one before; not found, it is logged."""
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
            behind = _behind(ids, before, at, tokenizer, processor)
            start, end = _find_answer(ids, text, behind, tokenizer)
        before = []
        if start < 0:
            logger.warning("an answer was not found in the ids and is not learned: %r", text[:80])
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


def _behind(ids: list[int], texts: Iterable[str], at: int, tokenizer: Any, processor: Any) -> int:
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
        return token == turn_markers(processor).stop
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
    """Label the ids from ``start`` to ``end``, media tokens left out."""
    labels[start:end] = [token if token not in media else IGNORE_INDEX for token in ids[start:end]]
