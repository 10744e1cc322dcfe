"""One sample as its processor made it, and whether that agrees with what the family declares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packhorse.chat import Tokenised
from packhorse.errors import ConfigError
from packhorse.families.media import MediaSize
from packhorse.types import Conversation, MediaKind

if TYPE_CHECKING:
    import torch

    from packhorse.families.base import Family


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sample as the processor made it, not yet labelled.

    Attributes:
        text: the rendered conversation, placeholders not expanded.
        turns: the messages it was rendered from.
        tokens: tensors of shape [S] by key, ``input_ids`` and ``attention_mask`` at least.
        media: media tensors by key, as the family's layout declares them.
        sizes: kind and size of each medium, in the order of the text.
        read: how the text was tokenised, a medium's token once; None where nobody looked.
    """

    text: str
    turns: Sequence[Mapping[str, Any]]
    tokens: dict[str, torch.Tensor]
    media: dict[str, torch.Tensor]
    sizes: tuple[tuple[MediaKind, MediaSize], ...] = ()
    read: Tokenised | None = None


def check_layout(family: Family, processor: Any, encoded: Encoded) -> None:
    """Refuse a media tensor whose axis 0 is not as long as the family's layout says for these media."""
    for key, value in encoded.media.items():
        layout = family.layout[key]
        expected = 1 if layout.owner == "sample" else sum(family.rows(processor, encoded, key))
        if value.shape[0] != expected:
            kinds = Counter(kind for kind, _ in encoded.sizes)
            raise ConfigError(
                f"the processor returned '{key}' of shape {tuple(value.shape)}; for {dict(kinds)} family "
                f"'{family.name}' ({layout.owner}) expects {expected} along axis 0"
            )


def check_media_tensors(family: Family, encoded: Encoded, conversation: Conversation) -> None:
    """Refuse a sample with a media item that the processor returned no tensor for."""
    made = {kind for key in encoded.media for kind in family.layout[key].kinds}
    for kind, number in Counter(kind for kind, _ in encoded.sizes).items():
        if kind not in made:
            raise family.bad(f"the processor returned no tensor for its {number} {kind}(s)", conversation)


def check_media_tokens(family: Family, processor: Any, encoded: Encoded, conversation: Conversation) -> None:
    """Refuse a sample with more or fewer media tokens than its media need, where the family can tell."""
    if not family.exact:
        return
    ids = encoded.tokens["input_ids"]
    found = sum(int((ids == token).sum()) for token in family.media_token_ids(processor))
    images = sum(kind == "image" for kind, _ in encoded.sizes)
    expected = sum(family.media_tokens(processor, kind, size, images) for kind, size in encoded.sizes)
    if found != expected:
        raise family.bad(f"{found} media tokens where its media need {expected}", conversation)
