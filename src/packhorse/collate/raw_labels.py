"""Labels of a padded batch whose rendered texts are unknown: answers and the tokens that end them.

Samples of listed families are labelled when they are encoded (:meth:`packhorse.families.Encoder.labels`). The
functions here serve the documented label builders and processors of no listed family, in three ways, each
tried if the one before is not certain: align the rendered conversation with the ids (exact; see
:mod:`packhorse.chat`), look for the template's turn markers in the ids, and search the tokens of each answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from packhorse.chat import (
    IGNORE_INDEX,
    CannotAlign,
    Processor,
    Tokenizer,
    Turns,
    answer_spans,
    content_text,
    label_tokens,
    token_id,
)
from packhorse.collate.finish import Records, logger
from packhorse.errors import ConfigError
from packhorse.families import Encoder, Generic
from packhorse.families.processor_call import (
    STUB_ERRORS,
    call,
    can_encode,
    plain_turns,
    render,
    text_ids,
    tolerated_errors,
)
from packhorse.types import MEDIA_KINDS

_STOP_TEXTS = frozenset(
    {"<|im_end|>", "<end_of_turn>", "<turn|>", "<|eot_id|>", "<|end|>", "<end_of_utterance>", "</s>", "<eos>"}
)
_IM_START, _IM_END = "<|im_start|>", "<|im_end|>"

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
"""Processors with a ChatML template: its marker is used even if they cannot render."""


def build_labels_from_template(
    input_ids_batch: torch.Tensor, conversations: Sequence[Turns], processor: Processor
) -> torch.Tensor:
    """Build labels [B, S] for ids [B, S]: answers with their end-of-turn token, else :data:`IGNORE_INDEX`.

    Nothing that a user types becomes a label, not even a literal ``<|im_start|>assistant``; nor do media
    tokens and padding. A row without a supervised token is logged and recorded in the ledger of the process.

    Args:
        input_ids_batch: what the processor returns for the conversations; rows may be padded on either side,
            or cut at the end.
        conversations: the turns of each row, in the documented format.
        processor: anything with ``apply_chat_template`` or at least a ``tokenizer``.
    """
    labels = make_labels(input_ids_batch, conversations, Encoder(processor))
    Records().record_unsupervised(labels.unbind(), [""] * len(labels))
    return labels


def build_labels(
    input_ids_batch: torch.Tensor, conversations: Sequence[Turns], processor: Processor
) -> torch.Tensor:
    """Build labels [B, S] by tokenizing each answer alone and searching it in the ids; the last resort.

    A space that the template writes before an answer may change its first token, so that may differ. The
    token that ends the turn is supervised too. An answer that is not found is logged.
    """
    labels = make_labels(input_ids_batch, conversations, Encoder(processor), search=True)
    Records().record_unsupervised(labels.unbind(), [""] * len(labels))
    return labels


def make_labels(
    input_ids_batch: torch.Tensor, conversations: Sequence[Turns], encoder: Encoder, *, search: bool = False
) -> torch.Tensor:
    """Build labels as :func:`build_labels_from_template` does, without recording unsupervised rows.

    With ``search``, as :func:`build_labels` does.
    """
    if len(input_ids_batch) != len(conversations):
        expected = f"expected as many as rows of ids ({len(input_ids_batch)})"
        raise ConfigError.of("conversations", len(conversations), expected)
    media, labels = media_ids(encoder), torch.full_like(input_ids_batch, IGNORE_INDEX)
    ways = (_search_answers,) if search else (_align_text, _label_between_markers, _search_answers)
    for row, ids, turns in zip(labels, input_ids_batch.tolist(), conversations, strict=True):
        for label in ways:
            with suppress(CannotAlign):
                row[:] = torch.tensor(label(ids, turns, encoder, media))
                break
    return labels


def media_ids(encoder: Encoder) -> frozenset[int]:
    """Return the ids that stand for media, as far as the processor names them."""
    processor, tokenizer = encoder.processor, encoder.tokenizer
    known: frozenset[int] = frozenset()
    if callable(getattr(tokenizer, "convert_tokens_to_ids", None)):
        with suppress(*tolerated_errors(processor, ConfigError)):
            known = encoder.media_token_ids
    if known and not isinstance(encoder.family, Generic):
        return known
    ids = (
        getattr(owner, f"{kind}_token_id", None) for owner in (processor, tokenizer) for kind in MEDIA_KINDS
    )
    return known | {token for token in ids if isinstance(token, int)}


def _align_text(ids: list[int], conversation: Turns, encoder: Encoder, media: frozenset[int]) -> list[int]:
    turns = plain_turns(conversation, encoder.family)
    try:
        text = render(encoder, turns)
        if can_encode(encoder):
            answers = encoder.family.answer_spans(encoder, turns, text)
        else:
            answers = answer_spans(encoder, turns, text, lambda changed: render(encoder, changed))
        labels = label_tokens(encoder, text, [(start, end) for start, end, _ in answers], ids, media)
        if encoder.turn_markers.stop is not None:
            return labels
    except tolerated_errors(encoder.processor, ConfigError) as error:
        name = type(encoder.processor).__name__
        raise CannotAlign(f"{name} does not render the conversation: {error}") from error
    # The tokenizer names no special tokens: supervise the token after each answer if it ends a turn.
    return [
        token if label == IGNORE_INDEX != before and _is_stop(token, encoder) else label
        for label, before, token in zip(labels, [IGNORE_INDEX, *labels], ids, strict=False)
    ]


def _get_assistant_marker(tokenizer: Tokenizer) -> list[int] | None:
    r"""Return the ids of ``<|im_start|>assistant\n``; None if ``<|im_start|>`` is not one token."""
    start = token_id(tokenizer, _IM_START)
    if start is None:
        return None
    ids = text_ids(tokenizer, f"{_IM_START}assistant\n")
    return ids if ids[:1] == [start] else [start, *text_ids(tokenizer, "assistant\n")]


def _get_stop_token_id(tokenizer: Tokenizer) -> int | None:
    """Return the id of ``<|im_end|>``; None if the tokenizer has no such token."""
    return token_id(tokenizer, _IM_END)


def _markers(encoder: Encoder) -> tuple[list[int], int]:
    """Return the ids that open an assistant turn, and the id that closes it; raise if they are unknown."""
    if type(encoder.processor).__name__ not in _IMSTART_TEMPLATE_PROCESSORS:
        with suppress(*tolerated_errors(encoder.processor, CannotAlign)):
            markers = encoder.turn_markers
            if markers.assistant and markers.stop is not None:
                return list(markers.assistant), markers.stop
    with suppress(*tolerated_errors(encoder.processor)):
        marker, stop = _get_assistant_marker(encoder.tokenizer), _get_stop_token_id(encoder.tokenizer)
        if marker is not None and stop is not None:
            return marker, stop
    raise CannotAlign(f"{type(encoder.tokenizer).__name__} does not name how an answer begins and ends")


def _label_between_markers(
    ids: list[int], conversation: Turns, encoder: Encoder, media: frozenset[int]
) -> list[int]:
    """Label what follows each marker that the template wrote, up to the stop token.

    The texts of the conversation show which markers were typed. Raises :class:`CannotAlign` if the ids have
    more or fewer markers than template and texts together.
    """
    marker, stop = _markers(encoder)
    starts = find_all(ids, marker)
    typed_stops: list[int | None] = []  # by marker: stop tokens typed in its answer; None if it is typed
    for turn in conversation:
        typed = tokens_or_nothing(_extract_assistant_text(turn), encoder)
        if turn.get("role") == "assistant":
            typed_stops.append(typed.count(stop))
        typed_stops.extend([None] * len(find_all(typed, marker)))
    if len(starts) != len(typed_stops):
        raise CannotAlign(f"{len(starts)} assistant markers in the ids, expected {len(typed_stops)}")
    pad, end_of_text = getattr(encoder.tokenizer, "pad_token_id", None), len(ids)
    while end_of_text and ids[end_of_text - 1] == pad:
        end_of_text -= 1
    labels = [IGNORE_INDEX] * len(ids)
    for start, number in zip(starts, typed_stops, strict=True):
        if number is not None:
            first = start + len(marker)
            stops = [index for index in range(first, len(ids)) if ids[index] == stop]
            end = stops[number] + 1 if number < len(stops) else end_of_text
            _supervise(labels, ids, first, end, media)
    return labels


def find_all(ids: Sequence[int], pattern: Sequence[int]) -> list[int]:
    """Return where a pattern begins in ids."""
    width, wanted = len(pattern), list(pattern)
    return [start for start in range(len(ids) - width + 1) if list(ids[start : start + width]) == wanted]


def _supervise(labels: list[int], ids: Sequence[int], start: int, end: int, media: frozenset[int]) -> None:
    """Label the ids from ``start`` to ``end``, except media tokens."""
    labels[start:end] = [token if token not in media else IGNORE_INDEX for token in ids[start:end]]


def _search_answers(
    ids: list[int], conversation: Turns, encoder: Encoder, media: frozenset[int]
) -> list[int]:
    """Label each answer where its tokens occur after the answer before; one that does not occur is logged."""
    labels, position = [IGNORE_INDEX] * len(ids), 0
    questions: list[str] = []  # texts of other roles since the last answer
    for turn in conversation:
        text = _extract_assistant_text(turn)
        if turn.get("role") != "assistant":
            questions.append(text)
            continue
        if not text:
            continue
        start, end = _find_answer(ids, text, position, encoder.tokenizer)
        if start >= 0 and _find_pattern_indices(ids, ids[start:end], start + 1)[0] >= 0:
            # It occurs more than once: search after the questions.
            for question in questions:
                pattern = tokens_or_nothing(question.strip(), encoder)
                after = _find_pattern_indices(ids, pattern, position, allow_first_token_mismatch=True)[1]
                position = max(position, after)
            start, end = _find_answer(ids, text, position, encoder.tokenizer)
        questions = []
        if start < 0:
            logger.warning("an answer was not found in the ids and is not supervised: %r", text[:80])
            continue
        position = end + (end < len(ids) and _is_stop(ids[end], encoder))
        _supervise(labels, ids, start, position, media)
    return labels


def _find_answer(ids: list[int], text: str, position: int, tokenizer: Tokenizer) -> tuple[int, int]:
    """Search an answer as it is, then with other spaces around it, then with another first token."""
    found = (
        _find_pattern_indices(ids, text_ids(tokenizer, form), position, allow_first_token_mismatch=mismatch)
        for mismatch in (False, True)
        for form in dict.fromkeys((text, text.strip(), f" {text.strip()}"))
    )
    return next((span for span in found if span[0] >= 0), (-1, -1))


def _find_pattern_indices(
    template: Any, pattern: Any, search_start_index: int = 0, allow_first_token_mismatch: bool = False
) -> tuple[int, int]:
    """Return (first, after last) of ``pattern`` in ``template``, both ids, or (-1, -1).

    With ``allow_first_token_mismatch`` the first id of the pattern may differ (a space before a word changes
    it); a pattern of one id must still be equal.
    """
    ids, wanted = (
        list(value.tolist() if hasattr(value, "tolist") else value) for value in (template, pattern)
    )
    if not wanted:
        return -1, -1
    skip = 1 if allow_first_token_mismatch and len(wanted) > 1 else 0
    for start in range(search_start_index, len(ids) - len(wanted) + 1):
        if ids[start + skip : start + len(wanted)] == wanted[skip:]:
            return start, start + len(wanted)
    return -1, -1


def _is_stop(token: int, encoder: Encoder) -> bool:
    """Return whether a token ends a turn: by its text, as end-of-text token, or in the template."""
    tokenizer = encoder.tokenizer
    if token == getattr(tokenizer, "eos_token_id", None):
        return True
    if callable(getattr(tokenizer, "decode", None)):
        text = _decode_single_token(tokenizer, token).strip()
        if text in _STOP_TEXTS or (text and text == getattr(tokenizer, "eos_token", None)):
            return True
    try:
        return token == encoder.turn_markers.stop
    except tolerated_errors(encoder.processor, CannotAlign):
        return False


def _extract_assistant_text(message: Mapping[str, Any]) -> str:
    """Return the text of a turn: its content, or the text parts of its content joined; empty without any."""
    return content_text(message.get("content"))


def _decode_single_token(tokenizer: Any, token_id: int) -> str:
    """Decode one token with tokenizers that take a number and with those that take a list.

    Of a token that cannot be decoded (an id outside the vocabulary, a tokenizer without ``decode``), return
    its name in the vocabulary, or else its number.
    """
    forms: tuple[Any, ...] = (token_id, [token_id], torch.tensor([token_id]))
    for form in forms:
        with suppress(*STUB_ERRORS, ArithmeticError):
            return str(call(tokenizer.decode, form))
    with suppress(*STUB_ERRORS, ArithmeticError):
        names = tokenizer.convert_ids_to_tokens([token_id])
        if names and names[0] is not None:
            return str(names[0])
    return str(token_id)


def tokens_or_nothing(text: str, encoder: Encoder) -> list[int]:
    """Tokenize a text; return nothing if a stub cannot take it."""
    try:
        return text_ids(encoder.tokenizer, text) if text else []
    except tolerated_errors(encoder.processor):
        return []
