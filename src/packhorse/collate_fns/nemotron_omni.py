"""The collate function for Nemotron-Omni: images, one video per conversation, and sound next to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from packhorse.collate_fns.default import Batch, default_collate_fn
from packhorse.conversation import sounds_beside
from packhorse.datasets.robust import Batch as Samples

_SAMPLING_RATE = 16_000  # where the processor does not say it
_CHOSEN_FRAMES = ("frame_indices", "video_metadata")  # a part with one of these names its frames itself


def nemotron_omni_collate_fn(
    examples: Sequence[Mapping[str, Any]],
    processor: Any,
    max_length: int | None = None,
    max_video_frames: int | None = 8,
    *,
    drop_overlong: bool = False,
) -> Batch:
    """:func:`~packhorse.collate_fns.default_collate_fn` with few frames of a video, and sound as arrays.

    Args:
        examples: in the documented format; they are not changed. ``audio`` next to the conversation may be an
            array at the processor's rate, an (array, rate) pair, which is resampled to it, a file, or a list
            of them. A conversation has at most one video.
        processor: a Nemotron-Omni processor.
        max_length: see :func:`~packhorse.collate_fns.default_collate_fn`, like ``drop_overlong``.
        max_video_frames: take at most this many frames of a video, spread evenly; None leaves that to the
            processor. A part that asks for fewer (``num_frames``, ``max_frames``, ``fps``) gets fewer.
        drop_overlong: see there.
    """
    rate = int(getattr(processor, "audio_sampling_rate", None) or _SAMPLING_RATE)
    prepared = [_with_rate(_with_few_frames(example, max_video_frames), rate) for example in examples]
    if isinstance(examples, Samples):  # the names of the samples and their ledger
        prepared = Samples(prepared, examples.indices, examples.keys, examples.ledger, examples.epoch)
    return default_collate_fn(prepared, processor, max_length, drop_overlong=drop_overlong)


def _with_rate(example: Mapping[str, Any], rate: int) -> Mapping[str, Any]:
    """The example with a sampling rate for sound that is a bare array."""
    if not isinstance(example, Mapping) or example.get("audio") is None:
        return example
    sounds = [(sound, rate) if hasattr(sound, "shape") else sound for sound in sounds_beside(example)]
    return {**example, "audio": sounds}


def _with_few_frames(example: Mapping[str, Any], most: int | None) -> Mapping[str, Any]:
    """The example with the most frames written into its video parts."""
    if most is None or not isinstance(example, Mapping) or "conversation" not in example:
        return example
    turns = [
        {**turn, "content": [_limited(part, most) for part in turn["content"]]}
        if isinstance(turn, Mapping) and isinstance(turn.get("content"), list | tuple)
        else turn
        for turn in example["conversation"]
    ]
    return {**example, "conversation": turns}


def _limited(part: Any, most: int) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "video":
        return part
    if any(part.get(name) is not None for name in _CHOSEN_FRAMES):
        return part
    by_rate = part.get("fps") is not None or part.get("max_frames") is not None
    name = "max_frames" if by_rate else "num_frames"
    return {**part, name: min(part.get(name) or most, most)}
