"""A sample that teaches nothing: the placeholder that keeps ranks in step.

Under FSDP or ZeRO every rank has to run the vision tower whenever one rank does, and every rank has to step
as often as the others. Where a rank has no image in a step in which another has one, or no sample at all, it
gets this: a blank image (or video, or audio clip) of which no token is supervised. It is a document of its
own, so no other token sees it, and its gradient is exactly zero. Every pack keeps that many tokens free, so
it is the media item with the fewest tokens that the processor accepts.
"""

from __future__ import annotations

from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import Any

from packhorse.chat import IGNORE_INDEX
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import BadSample, ConfigError
from packhorse.families import Encoder, Family
from packhorse.families.encoder import PROCESSOR_ERRORS
from packhorse.ledger import Ledger
from packhorse.media import MediaSize, VideoInfo, placeholder_media
from packhorse.types import MediaKind, MediaMask, Sample

_SIDE = 56  # preferred among sizes with as few tokens: most processors do not enlarge it
_SIDES = (7, 14, 20, 28, 32, 40, 48, 56, 64, 80, 100, 112, 128, 160, 200, 224, 256, 320, 400, 512)
_MOST_PIXELS = 100_000
_FRAMES = (1, 2)
_TENTHS = tuple(range(1, 11))  # of a second: shorter clips vanish in the convolutions of an audio encoder


def smallest_media(encoder: Encoder, kind: MediaKind) -> MediaSize:
    """The size of the media item of a kind that has the fewest tokens.

    Found by the family's own count over small sizes. A family that has to run the processor to count gets
    a fixed size.

    Raises:
        ConfigError: the processor accepts none of them.
    """
    family = encoder.family
    shapes = [(h, w) for h in _SIDES for w in _SIDES if h * w <= _MOST_PIXELS] if family.exact else []
    shapes.sort(key=lambda shape: abs(shape[0] - _SIDE) + abs(shape[1] - _SIDE))
    shapes = shapes or [(_SIDE, _SIDE)]
    sizes: dict[MediaKind, list[MediaSize]] = {
        "image": list(shapes),
        "video": [VideoInfo(n, h, w, None, None, tuple(range(n))) for h, w in shapes for n in _FRAMES],
        "audio": [family.sampling_rate * tenths // 10 for tenths in _TENTHS],
    }
    if not family.exact:
        return sizes[kind][-1]
    counted: list[tuple[int, int]] = []
    for place, size in enumerate(sizes[kind]):
        with suppress(*PROCESSOR_ERRORS):
            tokens = encoder.media_tokens(kind, size)
            if tokens:
                counted.append((tokens, place))
    if not counted:
        raise ConfigError(f"{family.name} accepts no small {kind}: set placeholder='never'")
    return sizes[kind][min(counted)[1]]


def placeholder_example(kind: MediaKind | None, size: MediaSize | None, sampling_rate: int) -> dict[str, Any]:
    """A conversation with one blank media item of a size, or with none."""
    media = []
    if kind is not None and size is not None:
        placeholder = placeholder_media(kind, size, sampling_rate)
        media = [{"type": kind, kind: placeholder.source, **placeholder.options}]
    full_stop = {"type": "text", "text": "."}
    turns = [("user", [*media, full_stop]), ("assistant", [full_stop])]
    return {"conversation": [{"role": role, "content": content} for role, content in turns]}


class Placeholders:
    """Blank samples for an encoding dataset, each encoded once.

    Args:
        dataset: whose processor and family encode them.
    """

    def __init__(self, dataset: PreTokenizedDatasetWrapper) -> None:
        # A copy that cuts nothing off and whose remarks go nowhere: a blank is no row of the data.
        self.dataset = copy(dataset)
        self.dataset.ledger, self.dataset.truncate, self.dataset.max_length = Ledger(), False, None
        self._made: dict[MediaKind | None, Sample] = {}
        self._smallest: dict[MediaKind, tuple[MediaKind, MediaSize]] = {}

    def samples(self, media_mask: MediaMask) -> list[tuple[MediaKind | None, Sample]]:
        """Encoded samples before the shift, without a supervised token, each with the kind of its media.

        There is one for each kind; kinds that fill the same tensors (images and frames of SmolVLM and
        InternVL) share one, so there may be fewer of them than kinds.

        Args:
            media_mask: the kinds; none gives a sample without media.

        Raises:
            ConfigError: the processor cannot encode such a thing.
        """
        chosen = dict(self._smallest_like(kind) for kind in media_mask.kinds)
        if not chosen:
            return [(None, self._encoded(None, None))]
        return [(kind, self._encoded(kind, size)) for kind, size in chosen.items()]

    def lengths(self, media_mask: MediaMask) -> list[int]:
        """How many tokens each of them takes up, after the shift."""
        return [len(sample) - 1 for _, sample in self.samples(media_mask)]

    def _smallest_like(self, kind: MediaKind) -> tuple[MediaKind, MediaSize]:
        """The smallest media item that fills the tensors of a kind, and its own kind."""
        if kind not in self._smallest:
            encoder, family = self.dataset.encoder, self.dataset.family
            keys = {other: _tensors(family, other) for other in family.kinds}
            alike = [other for other in family.kinds if keys[other] == keys.get(kind)] or [kind]
            sizes = {other: smallest_media(encoder, other) for other in alike}
            best = alike[0]
            if len(alike) > 1:
                best = min(alike, key=lambda other: encoder.media_tokens(other, sizes[other]))
            self._smallest[kind] = best, sizes[best]
        return self._smallest[kind]

    def _encoded(self, kind: MediaKind | None, size: MediaSize | None) -> Sample:
        import torch

        if kind in self._made:
            return self._made[kind]
        example = placeholder_example(kind, size, self.dataset.family.sampling_rate)
        try:
            sample = self.dataset.encode(example, "blank")
        except BadSample as error:
            raise ConfigError(
                f"{self.dataset.family.name} cannot encode a blank {kind or 'text'} ({error.detail}): "
                "placeholder='never' does without"
            ) from error
        labels = torch.full_like(sample.tokens["input_ids"], IGNORE_INDEX, dtype=torch.int64)
        self._made[kind] = self._without_words(replace(sample, labels=labels))
        return self._made[kind]

    def _without_words(self, sample: Sample) -> Sample:
        """The media's own tokens with one on each side: what is said around them costs room and does nothing.

        The token after them goes when labels are shifted.
        """
        ids = sample.tokens["input_ids"].tolist()
        media = self.dataset.encoder.media_token_ids
        places = [place for place, token in enumerate(ids) if token in media] or [0]
        return sample.cut(slice(max(0, places[0] - 1), places[-1] + 3))


def _tensors(family: Family, kind: MediaKind) -> frozenset[str]:
    return frozenset(key for key, layout in family.layout.items() if kind in layout.kinds)
