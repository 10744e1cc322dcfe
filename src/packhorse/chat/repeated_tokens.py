"""Tokens that a text has thousands of in a row: an image's. They are tokenised once, and repeated.

A processor writes a media item's token into the text as often as the media item is long, and has all of it
tokenised, which takes longer than the words do. A token that the tokenizer never splits or joins to its
neighbours is as good once, if its id is repeated afterwards.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from packhorse.chat.template import is_transformers, special_tokens

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
