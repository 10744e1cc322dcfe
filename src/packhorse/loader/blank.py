"""A sample that teaches nothing: the placeholder that keeps ranks in step.

Under FSDP or ZeRO every rank has to run the vision tower whenever one rank does, and every rank has to step
as often as the others. Where a rank has no image in a step in which another has one, or no sample at all, it
gets this: a blank picture (or video, or sound) of which no token is learned. It is a document of its own, so
no other token sees it, and its gradient is exactly zero.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
from PIL import Image

from packhorse.chat import IGNORE_INDEX
from packhorse.datasets.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import BadSample, ConfigError
from packhorse.ledger import Ledger
from packhorse.types import MEDIA_KINDS

_SIDE = 56  # the smallest picture that the families' processors do not enlarge, or refuse
_FRAMES = 2
_SECONDS = 1


def kinds_in(bits: int) -> tuple[str, ...]:
    """The names of media for their bits."""
    return tuple(kind for bit, kind in enumerate(MEDIA_KINDS) if bits >> bit & 1)


def blank_example(kind: str | None, sampling_rate: int) -> dict[str, Any]:
    """A conversation with one blank medium, or with none."""
    made: dict[str, Any] = {
        "image": Image.new("RGB", (_SIDE, _SIDE), "white"),
        "video": [Image.new("RGB", (_SIDE, _SIDE), "white")] * _FRAMES,
        "audio": (np.zeros(_SECONDS * sampling_rate, np.float32), sampling_rate),
    }
    media = [] if kind is None else [{"type": kind, kind: made[kind]}]
    full_stop = {"type": "text", "text": "."}
    turns = [("user", [*media, full_stop]), ("assistant", [full_stop])]
    return {"conversation": [{"role": role, "content": content} for role, content in turns]}


class Blanks:
    """Blank samples for an encoding dataset, each encoded once.

    Args:
        dataset: whose processor and family encode them.
    """

    def __init__(self, dataset: PreTokenizedDatasetWrapper) -> None:
        # A copy that cuts nothing off and whose remarks go nowhere: a blank is no row of the data.
        self.dataset = copy(dataset)
        self.dataset.ledger, self.dataset.truncate, self.dataset.max_length = Ledger(), False, None
        self._made: dict[str | None, dict[str, Any]] = {}

    def samples(self, kinds: int) -> list[dict[str, Any]]:
        """Encoded samples, before the shift, of which nothing is learned: one for each kind of medium.

        Args:
            kinds: one bit for each kind; 0 gives a sample without a medium.

        Raises:
            ConfigError: the processor cannot encode such a thing.
        """
        wanted: tuple[str | None, ...] = kinds_in(kinds) or (None,)
        for kind in wanted:
            if kind not in self._made:
                self._made[kind] = self._encoded(kind)
        return [dict(self._made[kind]) for kind in wanted]

    def lengths(self, kinds: int) -> list[int]:
        """How many tokens each of them takes up, after the shift."""
        return [len(sample["input_ids"]) - 1 for sample in self.samples(kinds)]

    def _encoded(self, kind: str | None) -> dict[str, Any]:
        import torch

        example = blank_example(kind, self.dataset.family.sampling_rate)
        try:
            sample = self.dataset.encode(example, "blank")
        except BadSample as error:
            raise ConfigError(
                f"{self.dataset.family.name} cannot encode a blank {kind or 'text'} ({error.detail}): "
                "placeholder='never' does without"
            ) from error
        return self._without_words({**sample, "labels": torch.full_like(sample["labels"], IGNORE_INDEX)})

    def _without_words(self, sample: dict[str, Any]) -> dict[str, Any]:
        """The media's own tokens with one on each side: what is said around them costs room and does nothing.

        The token behind them goes when labels are shifted.
        """
        ids = sample["input_ids"].tolist()
        media = self.dataset.family.media_token_ids(self.dataset.processor)
        places = [place for place, token in enumerate(ids) if token in media] or [0]
        kept = slice(max(0, places[0] - 1), places[-1] + 3)
        return {
            name: value[..., kept] if self.dataset.is_per_token(name, value, len(ids)) else value
            for name, value in sample.items()
        }
