"""The family of processors nobody listed: what can be done from the template and the call alone.

Rendering, ids and labels are as exact as everywhere (labels are compared token by token). What is not known
is said in :attr:`Generic.caveats`: nothing about media is guessed, and a tensor whose owner is not certain
stops the run instead of being lost or mixed up.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from packhorse.chat import (
    answer_spans,
    chat_template,
    is_transformers,
    renderer,
    template_errors,
    tokenizer_of,
)
from packhorse.chat.labels import TOKEN_KEYS
from packhorse.errors import ConfigError
from packhorse.families.base import Encoded, Family
from packhorse.families.expansion import Pieces
from packhorse.families.media_sizes import LoadedMedia
from packhorse.families.probe import blank
from packhorse.types import MEDIA_KINDS, Conversation, MediaKind, TensorLayout

logger = logging.getLogger(__name__)

# Flat patches and the grid that says how many are each item's own; believed only if the numbers agree.
_GRIDS: tuple[tuple[str, str, MediaKind], ...] = (
    ("pixel_values", "image_grid_thw", "image"),
    ("pixel_values", "image_grid_hws", "image"),
    ("pixel_values", "image_grid_hw", "image"),
    ("pixel_values_videos", "video_grid_thw", "video"),
)
_PROBE = "\ue000"


class Generic(Family):
    """One instance per processor class; its layout grows with the tensors that the processor returns."""

    name = "generic"
    kinds: ClassVar[tuple[MediaKind, ...]] = MEDIA_KINDS
    exact: ClassVar[bool] = False
    off_by: ClassVar[int | None] = None
    listed: ClassVar[bool] = False
    caveats: ClassVar[tuple[str, ...]] = (
        "media tokens are counted by running the processor on a blank medium of the same size",
        "a media tensor is kept only if it has one entry per medium of one kind (or patches with a grid); "
        "any other stops the run",
        "text that types a placeholder is found only if the processor names its image_token, video_token or "
        "audio_token",
    )

    def __init__(self) -> None:
        # Entries are added when a tensor is seen for the first time, and never changed.
        self._known: dict[str, TensorLayout] = {}
        self.layout = self._known  # type: ignore[misc]
        self._wants_parts: dict[str | None, bool] = {}

    def placeholders(self, processor: Any) -> dict[MediaKind, str]:
        """The tokens that the processor or its tokenizer names; nothing for a kind it does not name."""
        owners = (processor, tokenizer_of(processor))
        found = {}
        for kind in self.kinds:
            names = (getattr(owner, f"{kind}_token", None) for owner in owners)
            token = next((name for name in names if name is not None), None)
            if token is not None:
                found[kind] = str(token)
        return found

    def media_token_ids(self, processor: Any) -> frozenset[int]:
        """The ids of the placeholders that are tokens."""
        tokenizer = tokenizer_of(processor)
        unknown = getattr(tokenizer, "unk_token_id", None)
        ids = (tokenizer.convert_tokens_to_ids(token) for token in self.placeholders(processor).values())
        return frozenset(int(number) for number in ids if number is not None and number != unknown)

    def media_tokens(self, processor: Any, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """What a blank medium of this size gets."""
        return blank(self, processor, kind, size).tokens

    def media_patches(self, processor: Any, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """As many as a blank medium of this size has; 0 where the processor returns no grid that tells it."""
        return 0 if kind == "audio" else blank(self, processor, kind, size).patches

    def pieces(self, processor: Any, kind: MediaKind, size: Any, images_in_sample: int = 1) -> Pieces:
        """What the processor writes for a blank medium of this size, read back from the ids."""
        return blank(self, processor, kind, size).pieces

    def render(self, processor: Any, turns: Sequence[Mapping[str, Any]]) -> str:
        """The conversation as one text, with contents in the form that the template takes."""
        return renderer(processor)(self._in_form(processor, turns))

    def answer_spans(self, processor: Any, encoded: Encoded) -> list[tuple[int, int]]:
        """The characters of ``encoded.text`` that are supervised."""
        return answer_spans(processor, self._in_form(processor, encoded.turns), encoded.text)

    def call_arguments(self, processor: Any, media: LoadedMedia) -> dict[str, Any]:
        """As transformers' processors take them; flat lists for any other object."""
        if is_transformers(processor):
            return super().call_arguments(processor, media)
        given = {
            "images": media.images,
            "videos": [video.frames for video in media.videos],
            "audio": [array for array, _ in media.audios],
        }
        return {name: value for name, value in given.items() if value}

    def text_arguments(self, processor: Any, text: str) -> dict[str, Any]:
        """As transformers' processors take them; a plain option for any other object."""
        arguments = super().text_arguments(processor, text)
        return arguments if is_transformers(processor) else dict(arguments.get("text_kwargs", {}))

    def _in_form(self, processor: Any, turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Turns of text alone become plain strings for a template that would print a list of parts."""
        template = chat_template(processor)
        if template not in self._wants_parts:
            self._wants_parts[template] = _takes_parts(processor)
        if self._wants_parts[template]:
            return [dict(turn) for turn in turns]
        return [{**turn, "content": _joined(turn["content"])} for turn in turns]

    def _sorted_out(self, encoded: Encoded, output: Mapping[str, Any]) -> Encoded:
        counts = Counter(kind for kind, _ in encoded.sizes)
        length = output["input_ids"].shape[-1]
        for key, value in output.items():
            if key not in TOKEN_KEYS and key not in self._known:
                self._known[key] = _layout_of(key, value, output, counts, length)
        return super()._sorted_out(encoded, output)


class TextOnly(Generic):
    """The family of a tokenizer in place of a processor: conversations without media."""

    name = "text"
    kinds: ClassVar[tuple[MediaKind, ...]] = ()
    caveats: ClassVar[tuple[str, ...]] = ()

    def check(self, conversation: Conversation) -> None:
        """Raise if there are media: a tokenizer would write their placeholders and drop their content.

        Raises:
            ConfigError: there are.
        """
        if conversation.media:
            row = f"row {conversation.key}" if conversation.key else "a row"
            raise ConfigError(
                f"{row} has media ({conversation.media[0].kind}), but the processor is a tokenizer: pass the "
                "model's processor, as AutoProcessor.from_pretrained(name)"
            )
        super().check(conversation)


def _layout_of(
    key: str, value: Any, output: Mapping[str, Any], counts: Mapping[MediaKind, int], length: int
) -> TensorLayout:
    """What is certain about a tensor.

    Raises:
        ConfigError: nothing is.
    """
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
    raise ConfigError(
        f"the processor returned '{key}' of shape {shape} for {dict(counts)} and {length} tokens: whose its "
        "entries are cannot be told with certainty. Declare it: write a family for this processor "
        "(docs/families.md), or drop the tensor in a wrapper around it"
    )


def _takes_parts(processor: Any) -> bool:
    """Whether the template writes the text of a list of parts, and not the list."""
    turn = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
    try:
        text = renderer(processor)([turn])
    except template_errors(TypeError, ValueError):
        return False
    return _PROBE in text and not any(quoted in text for quoted in ("'text'", '"text"'))


def _joined(content: Any) -> Any:
    if isinstance(content, str) or any(part["type"] != "text" for part in content):
        return content
    return "".join(part["text"] for part in content)


_served: dict[type, Generic] = {}


def generic_for(processor_class: type, text_only: bool = False) -> Generic:
    """The generic family of a processor class (of tokenizers, if text_only).

    For a processor it says what is not exact, the first time.
    """
    if processor_class not in _served and text_only:
        _served[processor_class] = TextOnly()
    elif processor_class not in _served:
        logger.warning(
            "%s is no processor that Packhorse knows, so it is encoded from its template and call alone: %s",
            processor_class.__name__,
            "; ".join(Generic.caveats),
        )
        _served[processor_class] = Generic()
    return _served[processor_class]
