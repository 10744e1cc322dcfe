"""The family of unlisted processors: encode from the template and the processor's call alone.

Rendering, ids and labels are as exact as everywhere (labels are compared token by token);
:attr:`Generic.caveats` says what is not. A media tensor whose layout is not certain raises.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from packhorse.chat import TOKEN_KEYS, Answer, answer_spans, content_text, is_transformers, token_id
from packhorse.errors import ConfigError
from packhorse.families.encoder import Encoded, Encoder, Family
from packhorse.families.media_sizes import Pieces
from packhorse.types import MEDIA_KINDS, Conversation, MediaKind, TensorLayout

logger = logging.getLogger(__name__)

# Flat patches and the grid that says how many are each item's own; believed only if the numbers agree.
_GRIDS: tuple[tuple[str, str, MediaKind], ...] = (
    ("pixel_values", "image_grid_thw", "image"),
    ("pixel_values", "image_grid_hws", "image"),
    ("pixel_values", "image_grid_hw", "image"),
    ("pixel_values_videos", "video_grid_thw", "video"),
)


class ProbedFamily(Family):
    """A family whose counts come from running the processor on a placeholder of the same size."""

    exact: ClassVar[bool] = False
    off_by: ClassVar[int | None] = None

    def media_tokens(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """As many as a placeholder of this size has."""
        return encoder.probe(kind, size).tokens

    def media_patches(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """As many as a placeholder of this size has; 0 if the processor returns no grid."""
        return encoder.probe(kind, size).patches


class Generic(ProbedFamily):
    """A family whose layout grows with the tensors that the processor returns."""

    name = "generic"
    kinds: ClassVar[tuple[MediaKind, ...]] = MEDIA_KINDS
    listed: ClassVar[bool] = False
    caveats: ClassVar[tuple[str, ...]] = (
        "media tokens are counted by running the processor on a placeholder of the same size",
        "a media tensor is kept only if it has one entry per media item of one kind (or patches with a "
        "grid); any other stops the run",
        "text that types a placeholder is found only if the processor names its image_token, video_token or "
        "audio_token",
    )

    def __init__(self) -> None:
        # Entries are added when a tensor is seen for the first time, and never changed.
        self._known: dict[str, TensorLayout] = {}
        self.layout = self._known  # type: ignore[misc]

    def placeholders(self, encoder: Encoder) -> dict[MediaKind, str]:
        """The tokens that the processor or its tokenizer names; nothing for a kind it does not name."""
        tokens = {kind: encoder.find_token(f"{kind}_token") for kind in self.kinds}
        return {kind: token for kind, token in tokens.items() if token is not None}

    def media_token_ids(self, encoder: Encoder) -> frozenset[int]:
        """The ids of the placeholders that are tokens."""
        ids = (token_id(encoder.tokenizer, token) for token in encoder.placeholders.values())
        return frozenset(number for number in ids if number is not None)

    def pieces(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> Pieces:
        """What the processor writes for a placeholder of this size, decoded from the ids."""
        return encoder.probe(kind, size).pieces

    def render(self, encoder: Encoder, turns: Sequence[Mapping[str, Any]]) -> str:
        """The conversation as one text, with contents in the form that the template takes."""
        return encoder.apply_chat_template(_in_form(encoder, turns))

    def answer_spans(self, encoder: Encoder, turns: Sequence[Mapping[str, Any]], text: str) -> list[Answer]:
        """The supervised characters of ``text``, which was rendered from ``turns``."""
        return answer_spans(encoder, _in_form(encoder, turns), text)

    def takes_flat_arguments(self, encoder: Encoder) -> bool:
        """Whether it is no processor of transformers."""
        return not is_transformers(encoder.processor)

    def sort_output(self, encoded: Encoded, output: Mapping[str, Any]) -> None:
        """As every family, once the layout of tensors seen for the first time is known."""
        counts = Counter(kind for kind, _ in encoded.sizes)
        length = output["input_ids"].shape[-1]
        for key, value in output.items():
            if key not in TOKEN_KEYS and key not in self._known:
                self._known[key] = _layout_of(key, value, output, counts, length)
        super().sort_output(encoded, output)


class TextOnly(Generic):
    """The family of a tokenizer in place of a processor: conversations without media."""

    name = "text"
    kinds: ClassVar[tuple[MediaKind, ...]] = ()
    caveats: ClassVar[tuple[str, ...]] = ()

    def check(self, conversation: Conversation) -> None:
        """Raise if there are media: a tokenizer would write their placeholders and drop their content."""
        if conversation.media:
            row = f"row {conversation.key}" if conversation.key else "a row"
            raise ConfigError(
                f"{row} has media ({conversation.media[0].kind}), but the processor is a tokenizer: pass the "
                "model's processor, as AutoProcessor.from_pretrained(name)",
                setting="processor",
            )
        super().check(conversation)


def _layout_of(
    key: str, value: Any, output: Mapping[str, Any], counts: Mapping[MediaKind, int], length: int
) -> TensorLayout:
    """The layout of a tensor: patches with a grid, or one entry per item of one kind; else ConfigError."""
    shape = tuple(getattr(value, "shape", ()))
    for rows, grid, kind in _GRIDS:
        if key == rows and grid in output and len(output[grid]) == counts.get(kind):
            entries = output[grid].reshape(len(output[grid]), -1).prod(1)
            if shape and int(entries.sum()) == shape[0]:
                return TensorLayout((kind,), "rows", grid)
    owners = [kind for kind, number in counts.items() if shape and number == shape[0]]
    per_token = len(shape) > 1 and shape[1] == length
    if len(owners) == 1 and not per_token:
        return TensorLayout((owners[0],), "item")
    what = (
        f"the processor returned '{key}' of shape {shape} for {dict(counts)} and {length} tokens: which "
        "media item owns an entry is not certain. Declare it: write a family for this processor "
        "(docs/reference/families.md), or drop the tensor in a wrapper around it"
    )
    raise ConfigError(what, setting=key, value=shape)


def _in_form(encoder: Encoder, turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turns of text alone become plain strings for a template that would print a list of parts."""
    if encoder.takes_parts:
        return [dict(turn) for turn in turns]
    return [{**turn, "content": _as_text(turn["content"])} for turn in turns]


def _as_text(content: Any) -> Any:
    has_media = not isinstance(content, str) and any(part["type"] != "text" for part in content)
    return content if has_media else content_text(content)


@cache
def generic_for(processor_class: type) -> Generic:
    """Return the generic family of a processor class, and warn at the first call about what is not exact.

    One per class, because collating has to know the layouts of the tensors that encoding has seen.
    """
    logger.warning(
        "%s is no processor that Packhorse knows, so it is encoded from its template and call alone: %s",
        processor_class.__name__,
        "; ".join(Generic.caveats),
    )
    return Generic()
