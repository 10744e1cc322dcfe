"""Rules that need the processor: special tokens in texts, what it refuses, lengths, what is learned.

Lengths and learned tokens come from the counter that ``packhorse count`` uses: no pixel is decoded for them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from packhorse.chat import tokenizer_of
from packhorse.check.rules import Found, found
from packhorse.errors import BadSample
from packhorse.families.counting import REFUSALS
from packhorse.tokens.count import Counted, TokenCounter
from packhorse.types import Conversation, MediaKind, TextPart

_UNEVEN = 10
"""Whatever is refused for its size with sides of more than 1 to 10 is refused for its shape."""


class EncodingRules:
    """The rules for one processor.

    Args:
        counter: of the processor.
        max_length: more tokens are too many; None for no limit.
    """

    def __init__(self, counter: TokenCounter, max_length: int | None = None) -> None:
        self.counter, self.max_length = counter, max_length
        tokens = _special_texts(counter)
        longest_first = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
        self._special = re.compile(longest_first or r"(?!)")

    def typed_tokens(self, conversation: Conversation) -> list[Found]:
        """Special tokens that a text of the conversation types out: one finding for each turn."""
        findings = []
        for number, message in enumerate(conversation.messages):
            texts = (part.text for part in message.parts if isinstance(part, TextPart))
            typed = dict.fromkeys(token for text in texts for token in self._special.findall(text))
            if typed:
                what = f"turn {number} ({message.role}) types out {', '.join(typed)}"
                findings.append(found("special_token_in_text", what))
        return findings

    def shape(self, kind: MediaKind, size: tuple[int, int], images: int, name: str) -> list[Found]:
        """Whether the processor refuses a picture of this (height, width) for its shape."""
        family, processor = self.counter.family, self.counter.processor
        if kind != "image" or kind not in family.kinds or max(size) <= _UNEVEN * min(size):
            return []
        try:
            family.media_tokens(processor, kind, size, images)
        except REFUSALS as error:
            height, width = size
            what = (
                f"{name} is {width:,} x {height:,}, sides of 1 to {max(size) / min(size):,.0f}; "
                f"{type(processor).__name__} (family {family.name}) refuses it: {error}"
            )
            return [found("extreme_aspect_ratio", what, "error")]
        return []

    def lengths(self, conversations: Sequence[Conversation]) -> list[list[Found]]:
        """What the counts of conversations tell, in order."""
        return [self._of_count(one) for one in self.counter.count_many(conversations)]

    def _of_count(self, counted: Counted | BadSample) -> list[Found]:
        if isinstance(counted, BadSample):
            return [found("sample_failed", counted.detail)]
        count, findings = counted.count, []
        if not count.supervised:
            what = f"of {count.total:,} tokens none is learned"
            findings.append(found("nothing_supervised", what))
        if self.max_length is not None and count.total > self.max_length:
            what = f"{count.total:,} tokens, more than max_length={self.max_length:,}"
            findings.append(found("too_long", what))
        return findings


def _special_texts(counter: TokenCounter) -> set[str]:
    """Tokens that are read as themselves wherever they stand, and are not meant to be typed.

    Added tokens that are not special (``<think>``, ``<tool_call>``) are text like any other.
    """
    tokenizer: Any = tokenizer_of(counter.processor)
    known = {str(token) for token in getattr(tokenizer, "all_special_tokens", ())}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    known |= {str(token.content) for token in added.values() if getattr(token, "special", False)}
    known |= set(counter.family.placeholders(counter.processor).values())
    return {token for token in known if token}
