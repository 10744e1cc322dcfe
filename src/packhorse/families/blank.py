"""Counting the tokens of a medium by feeding the processor a blank one of the same size.

For processors whose arithmetic nobody wrote down. Costs a whole call of the processor for each size asked
for, and is right only where the number of tokens depends on the size alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from packhorse.types import Conversation, MediaKind, MediaRef, Message

if TYPE_CHECKING:
    from packhorse.families.base import Family


def tokens_of_a_blank(family: Family, processor: Any, kind: MediaKind, size: Any) -> int:
    """How many content tokens the processor writes for a blank medium.

    Args:
        family: encodes it.
        processor: the family's processor.
        kind: image, video or audio.
        size: see :data:`packhorse.families.base.MediaSize`.
    """
    source: Any
    options: dict[str, Any] = {}
    if kind == "image":
        height, width = size
        source = Image.new("RGB", (width, height))
    elif kind == "video":
        source = np.zeros((size.total_frames, size.height, size.width, 3), np.uint8)
        options = {"fps": size.fps} if size.fps else {}
    else:
        source = (np.zeros(size, np.float32), family.sampling_rate)
    asked = Message("user", (MediaRef(kind, source, options),))
    ids = family.encode(Conversation((asked,)), processor).tokens["input_ids"].tolist()
    content = family.media_token_ids(processor)
    return sum(token in content for token in ids)
