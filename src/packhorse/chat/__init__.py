"""From a conversation to labels: what the template writes as assistant turns is supervised, nothing else.

The text of each assistant turn is located in the *rendered* conversation and carried over to token positions,
so whatever a user types, a literal ``<|im_start|>assistant`` included, never becomes a label. Costs one more
rendering of the text per sample, and one more tokenisation where the processor's own cannot be used.
"""

from packhorse.chat.labels import (
    IGNORE_INDEX,
    TOKEN_KEYS,
    Span,
    answer_spans,
    label_tokens,
    shift_tokens,
    supervised_tokens,
    token_keys,
)
from packhorse.chat.repeated_tokens import Tokenised, with_repeated_tokens
from packhorse.chat.template import (
    CannotAlign,
    ChatProcessor,
    Render,
    TurnMarkers,
    Turns,
    chat_template,
    is_tokenizer,
    is_transformers,
    special_tokens,
    template_errors,
    tokenizer_of,
)

__all__ = [
    "IGNORE_INDEX",
    "TOKEN_KEYS",
    "CannotAlign",
    "ChatProcessor",
    "Render",
    "Span",
    "Tokenised",
    "TurnMarkers",
    "Turns",
    "answer_spans",
    "chat_template",
    "is_tokenizer",
    "is_transformers",
    "label_tokens",
    "shift_tokens",
    "special_tokens",
    "supervised_tokens",
    "template_errors",
    "token_keys",
    "tokenizer_of",
    "with_repeated_tokens",
]
