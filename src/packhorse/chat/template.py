"""Processors, tokenizers and chat templates: how a conversation is written, and how a turn is marked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from packhorse.errors import PackhorseError

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
