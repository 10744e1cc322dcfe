"""Expanding placeholders: the text in which one medium is one placeholder becomes the text that is tokenised.

What a processor writes for a medium is kept as *pieces*, each a text and how often it is repeated, because a
picture is mostly one token repeated thousands of times. The pieces can be written out in full, or shortened:
a token that the tokenizer never splits or joins to its neighbours is as good once, if the others are added to
the count.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from packhorse.types import MediaKind

Pieces = Sequence[tuple[str, int]]
"""Texts in order, and how often each is written in a row."""


def written_out(pieces: Pieces) -> str:
    """The text in full.

    >>> written_out([("<img>", 1), ("<pad>", 3), ("</img>", 1)])
    '<img><pad><pad><pad></img>'
    """
    return "".join(text * times for text, times in pieces)


def shortened(pieces: Pieces, whole_tokens: Container[str]) -> tuple[str, int]:
    """The text with every repeated token written once, and how many tokens were left out.

    >>> shortened([("<img>", 1), ("<pad>", 3), ("</img>", 1)], {"<img>", "<pad>", "</img>"})
    ('<img><pad></img>', 2)

    Args:
        pieces: what the processor writes.
        whole_tokens: texts that the tokenizer makes one token of, whatever stands beside them
            (:func:`packhorse.chat.special_tokens`); no other is shortened.
    """
    texts, left_out = [], 0
    for text, times in pieces:
        if times > 1 and text in whole_tokens:
            texts.append(text)
            left_out += times - 1
        else:
            texts.append(text * times)
    return "".join(texts), left_out


def put_in(
    text: str, placeholders: Mapping[MediaKind, str], kinds: Iterable[MediaKind], texts: Iterable[str]
) -> str:
    """The rendered text with the text of each medium in place of its placeholder.

    As the processors do it: the first placeholder of a kind is the first medium of that kind, wherever the
    template has put it.

    >>> put_in("a <i> b <v> c <i>", {"image": "<i>", "video": "<v>"}, ("image", "image", "video"), "123")
    'a 1 b 3 c 2'

    Args:
        text: one placeholder per medium.
        placeholders: of each kind; a kind that has none is not written.
        kinds: of each medium, in the order of the conversation.
        texts: of each medium, in the same order.
    """
    waiting: dict[str, list[str]] = {}
    for kind, written in zip(kinds, texts, strict=True):
        if kind in placeholders:
            waiting.setdefault(placeholders[kind], []).append(written)
    if not waiting:
        return text
    queues: dict[str, Iterator[str]] = {token: iter(found) for token, found in waiting.items()}
    longest_first = sorted(waiting, key=len, reverse=True)
    pattern = "|".join(re.escape(token) for token in longest_first)
    return re.sub(pattern, lambda found: next(queues[found.group()]), text)


def same_number_of_frames(sizes: Iterable[tuple[MediaKind, Any]]) -> None:
    """Refuse videos of different numbers of frames, for processors that make one tensor of them.

    Raises:
        ValueError: as the processor does.
    """
    numbers = sorted({size.total_frames for kind, size in sizes if kind == "video"})
    if len(numbers) > 1:
        found = ", ".join(map(str, numbers))
        raise ValueError(f"videos of {found} frames in one sample, expected the same number for each")
