"""Nemotron-Parse, an encoder and decoder for pages: no chat template, no image tokens in the text."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, ClassVar

from packhorse.chat import Turns, content_text
from packhorse.families.encoder import Encoder, Family
from packhorse.families.media_sizes import Pieces
from packhorse.types import Conversation, MediaKind, MediaLayout, TensorLayout

TASK_PROMPT = "</s><s><predict_bbox><predict_classes><output_markdown>"
"""The prompt of the released model for a page: boxes, classes and markdown."""

_PATCH = 16  # of the vision encoder; the processor does not know it


class NemotronParse(Family):
    """The text is the task prompt and the answer; the prompt is not supervised.

    Args:
        task_prompt: used for every sample in place of what its other turns say. None uses their text, or
            :data:`TASK_PROMPT` where they say nothing.
        stop: written after the answer and supervised with it. The documented text has none: the model then
            learns where to stop only if the answers themselves end in ``</s>``.
    """

    name = "nemotron_parse"
    processor_classes: ClassVar[tuple[str, ...]] = ("NemotronParseProcessor",)
    layout: ClassVar[MediaLayout] = {"pixel_values": TensorLayout(("image",), "sample")}
    chats: ClassVar[bool] = False
    flat_arguments: ClassVar[bool] = True
    writes_special_tokens: ClassVar[bool] = True
    caveats: ClassVar[tuple[str, ...]] = (
        "the text is prompt and answer alone: end answers in </s> for the model to learn where to stop",
        "a second image in a sample is rejected: the encoder takes one page",
    )

    def __init__(self, task_prompt: str | None = None, stop: str = "") -> None:
        self.task_prompt, self.stop = task_prompt, stop

    def placeholders(self, encoder: Encoder) -> dict[MediaKind, str]:
        """The decoder's text does not mention the image."""
        return {}

    def media_token_ids(self, encoder: Encoder) -> frozenset[int]:
        """None: the decoder attends to the encoder's output."""
        return frozenset()

    def media_tokens(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """None."""
        return 0

    def media_patches(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """Those of a page, which has one size; 0 if the processor does not have it."""
        owner = getattr(encoder.processor, "image_processor", encoder.processor)
        page = getattr(owner, "final_size", None) or getattr(owner, "image_size", None) or (0, 0)
        height, width = page
        return int(height // _PATCH) * int(width // _PATCH)

    def pieces(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> Pieces:
        """Nothing."""
        return []

    def check(self, conversation: Conversation) -> None:
        """Reject a second image."""
        super().check(conversation)
        if len(conversation.media) > 1:
            raise self.bad(f"{len(conversation.media)} images: {self.name} takes one page", conversation)

    def render(self, encoder: Encoder, turns: Turns) -> str:
        """Prompt and answer."""
        return "".join(text for text, _ in self._pieces(turns))

    def answer_spans(self, encoder: Encoder, turns: Turns, text: str) -> list[tuple[int, int]]:
        """Where the answers are."""
        pieces = self._pieces(turns)
        ends = accumulate(len(piece) for piece, _ in pieces)
        found = zip(pieces, ends, strict=True)
        return [(end - len(piece), end) for (piece, supervised), end in found if supervised and piece]

    def _pieces(self, turns: Turns) -> list[tuple[str, bool]]:
        """The texts in order, and whether each is an answer."""
        texts = [(content_text(turn["content"]), turn["role"] == "assistant") for turn in turns]
        answers = [(text + self.stop, supervised) for text, supervised in texts if supervised]
        if self.task_prompt is not None:
            return [(self.task_prompt, False), *answers]
        if not any(text for text, supervised in texts if not supervised):
            return [(TASK_PROMPT, False), *answers]
        return [(text + self.stop, True) if supervised else (text, False) for text, supervised in texts]
