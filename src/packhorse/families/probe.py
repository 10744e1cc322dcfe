"""What a processor does with a medium, found out by feeding it a blank one of the same size.

For processors whose arithmetic nobody wrote down. Costs a whole call of the processor for each size asked
for, once per processor, and is right only where the size alone decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from PIL import Image

from packhorse.chat import tokenizer_of
from packhorse.families.expansion import Pieces
from packhorse.families.media_sizes import MediaSize, frame_numbers
from packhorse.types import Conversation, MediaKind, MediaRef, Message

if TYPE_CHECKING:
    from packhorse.families.base import Encoded, Family


@dataclass(frozen=True, slots=True)
class Blank:
    """What became of a blank medium.

    Attributes:
        tokens: its content tokens.
        patches: rows of a tensor of patches that are its own; 0 where there is no such tensor.
        pieces: what stands in the text in place of its placeholder.
    """

    tokens: int
    patches: int
    pieces: Pieces


_found: WeakKeyDictionary[Any, dict[Any, Blank]] = WeakKeyDictionary()


def blank(family: Family, processor: Any, kind: MediaKind, size: Any) -> Blank:
    """What the processor makes of a blank medium; remembered as long as the processor lives.

    Args:
        family: encodes it.
        processor: the family's processor.
        kind: image, video or audio.
        size: see :data:`packhorse.families.media_sizes.MediaSize`.

    Raises:
        BadSample: the processor refuses it.
    """
    try:
        known = _found.setdefault(processor, {})
    except TypeError:  # one that cannot be a key is asked every time
        known = {}
    if (kind, size) not in known:
        known[kind, size] = _tried(family, processor, kind, size)
    return known[kind, size]


def blanked(
    family: Family, conversation: Conversation, sizes: Sequence[tuple[MediaKind, MediaSize]]
) -> Conversation:
    """A conversation with a blank medium in place of each of its own.

    To be encoded in its place where nothing else tells how long it gets: no medium is decoded, but the
    processor does all its work.

    Args:
        family: whose sizes they are.
        conversation: what is said stays.
        sizes: kind and size of each of its media, in order.
    """
    blanks = iter([_blank_ref(family, kind, size) for kind, size in sizes])
    messages = [
        replace(
            message,
            parts=tuple(next(blanks) if isinstance(part, MediaRef) else part for part in message.parts),
        )
        for message in conversation.messages
    ]
    return replace(conversation, messages=tuple(messages))


def _blank_ref(family: Family, kind: MediaKind, size: Any) -> MediaRef:
    if kind == "image":
        height, width = size
        return MediaRef(kind, Image.new("RGB", (width, height)))
    if kind == "audio":
        return MediaRef(kind, (np.zeros(size, np.float32), family.sampling_rate))
    frames = np.zeros((size.total_frames, size.height, size.width, 3), np.uint8)
    numbers = list(frame_numbers(size))
    # As frames that were sampled before, so that they keep their times.
    metadata = {
        "total_num_frames": max(numbers) + 1,
        "fps": size.fps,
        "height": size.height,
        "width": size.width,
        "duration": size.duration,
        "frames_indices": numbers,
    }
    return MediaRef(kind, frames, {"video_metadata": metadata})


def _tried(family: Family, processor: Any, kind: MediaKind, size: Any) -> Blank:
    asked = Conversation((Message("user", (_blank_ref(family, kind, size),)),))
    encoded = family.encode(asked, processor)
    content = family.media_token_ids(processor)
    ids = encoded.tokens["input_ids"].tolist()
    tokens = sum(token in content for token in ids)
    return Blank(
        tokens, _patches(family, processor, encoded), _pieces(family, processor, encoded, ids, tokens)
    )


def _patches(family: Family, processor: Any, encoded: Encoded) -> int:
    """Rows of the tensors that say how many are whose."""
    counted = [key for key in encoded.media if family.layout[key].rows_from is not None]
    return sum(sum(family.rows(processor, encoded, key)) for key in counted)


def _pieces(family: Family, processor: Any, encoded: Encoded, ids: list[int], tokens: int) -> Pieces:
    """What the ids read as where the text has the placeholder; else the placeholder, once per token."""
    ((kind, _),) = encoded.sizes
    placeholder = family.placeholders(processor).get(kind)
    if placeholder is None:
        return []
    before, _, behind = encoded.text.partition(placeholder)
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    read = str(tokenizer_of(processor).decode(ids, **options))
    start = read.find(before)
    end = len(read) - len(behind)
    if start < 0 or start + len(before) > end or not read.endswith(behind):
        return [(placeholder, tokens)]
    middle = read[start + len(before) : end]
    # Its tokens apart from what stands around them, so that they can be told to be the same ones.
    return _in_runs(middle, placeholder)


def _in_runs(text: str, token: str) -> Pieces:
    """The text cut into runs of a token and what is between them."""
    runs: list[tuple[str, int]] = []
    for at, between in enumerate(text.split(token)):
        if at and runs and runs[-1][0] == token:
            runs[-1] = (token, runs[-1][1] + 1)
        elif at:
            runs.append((token, 1))
        if between:
            runs.append((between, 1))
    return runs
