"""Placeholder samples, which keep ranks in step.

Under FSDP or ZeRO every rank has to run the vision tower whenever one rank does, and every rank needs the
same number of steps. A rank that has no image in a step in which another has one, or no sample at all, gets a
placeholder image (or video, or audio clip) without supervised tokens. It is a document of its own, so no
other token attends to it, and its gradient is zero. Packs reserve its tokens, so it is the media item with
the fewest tokens that the processor accepts.
"""

from __future__ import annotations

from contextlib import suppress
from copy import copy
from dataclasses import replace

from packhorse.chat import IGNORE_INDEX
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import BadSample, ConfigError
from packhorse.families import Encoder
from packhorse.families.encoder import PROCESSOR_ERRORS
from packhorse.ledger import Ledger
from packhorse.media import MediaSize, VideoInfo, placeholder_media
from packhorse.types import MediaKind, MediaMask, Sample

_SIDE = 56  # preferred among sizes with as few tokens: most processors do not enlarge it
_SIDES = (7, 14, 20, 28, 32, 40, 48, 56, 64, 80, 100, 112, 128, 160, 200, 224, 256, 320, 400, 512)
_MAX_PIXELS = 100_000
_FRAMES = (1, 2)
_TENTHS = tuple(range(1, 11))  # of a second: shorter clips vanish in the convolutions of an audio encoder


def smallest_media(encoder: Encoder, kind: MediaKind) -> MediaSize:
    """Return the size of the media item of a kind with the fewest tokens; raise if none is accepted.

    Counts small sizes by the family's rule. A family that has to run the processor to count gets a fixed
    size.
    """
    family = encoder.family
    shapes = [(_SIDE, _SIDE)]
    if family.exact:
        shapes = [(h, w) for h in _SIDES for w in _SIDES if h * w <= _MAX_PIXELS]
        shapes.sort(key=lambda shape: abs(shape[0] - _SIDE) + abs(shape[1] - _SIDE))
    sizes: dict[MediaKind, list[MediaSize]] = {
        "image": list(shapes),
        "video": [VideoInfo(n, h, w, None, None, tuple(range(n))) for h, w in shapes for n in _FRAMES],
        "audio": [family.sampling_rate * tenths // 10 for tenths in _TENTHS],
    }
    if not family.exact:
        return sizes[kind][-1]
    counted: list[tuple[int, int]] = []
    for index, size in enumerate(sizes[kind]):
        with suppress(*PROCESSOR_ERRORS):
            if tokens := encoder.media_tokens(kind, size):
                counted.append((tokens, index))
    if not counted:
        message = f"{family.name} accepts no small {kind}: set placeholder='never'"
        raise ConfigError(message, setting="placeholder", value="auto")
    return sizes[kind][min(counted)[1]]


class Placeholders:
    """Placeholder samples, each encoded once by a copy of ``dataset``."""

    def __init__(self, dataset: PreTokenizedDatasetWrapper) -> None:
        # A copy that does not truncate and has its own ledger: a placeholder is no row of the data.
        self.dataset = copy(dataset)
        self.dataset.ledger, self.dataset.truncate, self.dataset.max_length = Ledger(), False, None
        self._encoded: dict[MediaKind | None, Sample] = {}
        self._smallest: dict[MediaKind, tuple[MediaKind, MediaSize]] = {}

    def samples(self, media_mask: MediaMask) -> list[tuple[MediaKind | None, Sample]]:
        """Return encoded samples without supervised tokens, before the shift, each with its media kind.

        One for each kind; kinds that fill the same tensors (images and frames of SmolVLM and InternVL) share
        one. An empty mask gives a sample without media. Media are copies: they may be changed in a batch.
        """
        chosen = dict(self._smallest_like(kind) for kind in media_mask.kinds)
        if not chosen:
            return [(None, self._encode(None, None))]
        encoded = ((kind, self._encode(kind, size)) for kind, size in chosen.items())
        return [
            (kind, replace(sample, media={key: value.clone() for key, value in sample.media.items()}))
            for kind, sample in encoded
        ]

    def lengths(self, media_mask: MediaMask) -> list[int]:
        """Return the tokens of each of them, after the shift."""
        return [len(sample) - 1 for _, sample in self.samples(media_mask)]

    def _smallest_like(self, kind: MediaKind) -> tuple[MediaKind, MediaSize]:
        """Return the kind and size of the smallest media item that fills the tensors of a kind."""
        if kind not in self._smallest:
            encoder, family = self.dataset.encoder, self.dataset.family
            keys = {
                other: {key for key, layout in family.layout.items() if other in layout.kinds}
                for other in family.kinds
            }
            alike = [other for other in family.kinds if keys[other] == keys.get(kind)] or [kind]
            sizes = {other: smallest_media(encoder, other) for other in alike}
            best = alike[0]
            if len(alike) > 1:
                best = min(alike, key=lambda other: encoder.media_tokens(other, sizes[other]))
            self._smallest[kind] = best, sizes[best]
        return self._smallest[kind]

    def _encode(self, kind: MediaKind | None, size: MediaSize | None) -> Sample:
        import torch

        if kind in self._encoded:
            return self._encoded[kind]
        media = []
        if kind is not None and size is not None:
            placeholder = placeholder_media(kind, size, self.dataset.family.sampling_rate)
            media = [{"type": kind, kind: placeholder.source, **placeholder.options}]
        full_stop = {"type": "text", "text": "."}
        turns = [("user", [*media, full_stop]), ("assistant", [full_stop])]
        example = {"conversation": [{"role": role, "content": content} for role, content in turns]}
        try:
            sample = self.dataset.encode(example, "placeholder")
        except BadSample as error:
            raise ConfigError(
                f"{self.dataset.family.name} cannot encode a placeholder {kind or 'text'} ({error.detail}): "
                "set placeholder='never'",
                setting="placeholder",
                value="auto",
            ) from error
        ids = sample.tokens["input_ids"]
        labels = torch.full_like(ids, IGNORE_INDEX, dtype=torch.int64)
        # Only the media's own tokens and one on each side. The token after them goes with the label shift.
        media_ids = self.dataset.encoder.media_token_ids
        positions = [position for position, token in enumerate(ids.tolist()) if token in media_ids] or [0]
        kept = slice(max(0, positions[0] - 1), positions[-1] + 3)
        self._encoded[kind] = replace(sample, labels=labels).cut(kept)
        return self._encoded[kind]
