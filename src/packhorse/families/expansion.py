"""What a medium becomes in the text, from its size alone: the part of a family that no pixel is needed for.

A family says how many tokens of content a medium has and what the processor writes around them; the text that
the processor tokenises follows, and with it the exact length of a sample. All of it is arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from packhorse.chat import special_tokens, tokenizer_of
from packhorse.errors import BadSample, PackhorseError
from packhorse.families.media_sizes import MediaSize
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


Sizes = Sequence[tuple[MediaKind, MediaSize]]
"""Kind and size of each medium of a sample, in the order of the conversation."""

REFUSALS = (ValueError, ArithmeticError)
"""What a processor raises for a medium that it cannot take; some divide by a side that has become 0."""


class Counting:
    """The part of a :class:`~packhorse.families.base.Family` that counts.

    Attributes:
        exact: whether :meth:`media_tokens` and :meth:`expansion` equal what the processor does.
        off_by: by how many tokens a sample's count can be wrong; None where nobody can tell.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = True
    off_by: ClassVar[int | None] = 0

    # --- facts; families override what differs -----------------------------------------------------------

    def placeholders(self, processor: Any) -> dict[MediaKind, str]:
        """What the chat template writes for one medium of each kind, before it is expanded."""
        raise NotImplementedError

    def media_tokens(self, processor: Any, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """How many content tokens a medium of this size has, without a pixel of it.

        Args:
            processor: the family's processor.
            kind: image, video or audio.
            size: see :data:`MediaSize`; ``family.size_of`` reads it from a header.
            images_in_sample: how many images the sample has, where that matters.

        Raises:
            ValueError: the processor refuses a medium of this size.
        """
        raise NotImplementedError(f"{self.name} has no {kind} tokens")

    def media_patches(self, processor: Any, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """How many positions the vision encoder attends over for a medium of this size; none for sound.

        Padding up to the size of a tile counts, since it is computed; tiles that only fill up a batch do not.
        Arguments and errors are those of :meth:`media_tokens`. 0 where a family does not say.
        """
        return 0

    def pieces(self, processor: Any, kind: MediaKind, size: Any, images_in_sample: int = 1) -> Pieces:
        """What the processor writes in the text in place of one medium's placeholder.

        Here: the placeholder, once per token of content. Brackets, times and the like are added by the
        families whose processors write them; what the template has written stays around it. Arguments and
        errors are those of :meth:`media_tokens`.
        """
        tokens = self.media_tokens(processor, kind, size, images_in_sample)
        return [(self.placeholders(processor)[kind], tokens)]

    def pieces_together(self, processor: Any, sizes: Sizes) -> list[Pieces]:
        """:meth:`pieces` of each medium of one sample; overridden where they depend on each other.

        Raises:
            ValueError: the processor refuses them.
        """
        images = sum(kind == "image" for kind, _ in sizes)
        return [self.pieces(processor, kind, size, images) for kind, size in sizes]

    # --- what all share ----------------------------------------------------------------------------------

    def expansion(self, processor: Any, kind: MediaKind, size: Any, images_in_sample: int = 1) -> str:
        """:meth:`pieces` in full: the very text that the processor tokenises for one medium."""
        return written_out(self.pieces(processor, kind, size, images_in_sample))

    def expanded(self, processor: Any, text: str, sizes: Sizes, key: str = "") -> str:
        """A rendered text as the processor tokenises it, from the sizes of its media alone.

        Tokenised with the options of ``family.text_arguments`` it gives the ids of ``family.encode``.

        Args:
            processor: the family's processor.
            text: the rendered conversation, with one placeholder per medium.
            sizes: of its media.
            key: of the sample, for the error.

        Raises:
            BadSample: the processor refuses the media, as ``family.encode`` would say.
        """
        texts = [written_out(pieces) for pieces in self._pieces_or_bad(processor, sizes, key)]
        return put_in(text, self.placeholders(processor), [kind for kind, _ in sizes], texts)

    def outline(self, processor: Any, text: str, sizes: Sizes, key: str = "") -> tuple[str, int]:
        """:meth:`expanded` with every repeated token written once, and how many tokens that leaves out.

        The length of a sample is the number of tokens of the outline and those left out. Only tokens that the
        tokenizer never splits or joins to a neighbour are shortened, so the count stays exact; it costs the
        text alone, however large the media.
        """
        if not sizes:
            return text, 0
        whole = special_tokens(tokenizer_of(processor))
        short = [shortened(pieces, whole) for pieces in self._pieces_or_bad(processor, sizes, key)]
        kinds = [kind for kind, _ in sizes]
        outlined = put_in(text, self.placeholders(processor), kinds, [written for written, _ in short])
        return outlined, sum(left_out for _, left_out in short)

    def _pieces_or_bad(self, processor: Any, sizes: Sizes, key: str) -> list[Pieces]:
        try:
            return self.pieces_together(processor, sizes)
        except PackhorseError:
            raise
        except REFUSALS as error:
            detail = f"the processor refuses it: {error}"
            raise BadSample(detail, reason="sample_failed", key=key, stage="encode") from error
