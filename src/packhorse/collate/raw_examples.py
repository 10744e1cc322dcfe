"""Batches of raw examples: each example is encoded alone, kept within the length limit, then padded.

What an example becomes does not depend on the others in its batch. A media item is never cut in two: it is in
the batch with all its tokens and tensors, or not at all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

from packhorse.chat import Turns, pad_token_id
from packhorse.collate.finish import Records, check_present, keys_of, records_of, sample_key
from packhorse.collate.padded import collate_samples
from packhorse.collate.raw_media import drop_overlong, token_length
from packhorse.errors import ConfigError
from packhorse.families import Encoder
from packhorse.families.processor_call import padding_side
from packhorse.formats.conversation import parse_conversation
from packhorse.types import MEDIA_KINDS, Conversation, Sample

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Example:
    """An example of a batch in the documented format, and parsed; its conversation has the sample's key."""

    values: Mapping[str, Any]
    conversation: Conversation

    @property
    def key(self) -> str:
        """The key of the sample; empty if unknown."""
        return self.conversation.key

    @property
    def turns(self) -> Turns:
        """The turns of the example."""
        turns: Turns = self.values["conversation"]
        return turns

    @property
    def fake(self) -> bool:
        """Whether its first image is the fake one."""
        flagged = bool(self.values.get("_injected_fake"))
        return flagged and any(ref.kind == "image" for ref in self.conversation.media)


def read_examples(
    examples: Sequence[Mapping[str, Any]], encoder: Encoder, *, place_audio: bool = True
) -> list[Example]:
    """Parse the examples of a batch; ``place_audio`` makes audio next to a conversation a part of it."""
    check_present(examples)
    for index, example in enumerate(examples):
        if "input_ids" in example and "conversation" not in example:
            what = (
                f"sample {index} of the batch has no conversation: it is already encoded, use pad_collate_fn"
            )
            raise ConfigError(what, setting="conversation")
    encoder.check_template()
    read = []
    for example, key in zip(examples, keys_of(examples), strict=True):
        values = encoder.place_audio(example, key) if place_audio else example
        read.append(Example(values, parse_conversation(values, key)))
    return read


def collate_encoded(
    examples: Sequence[Mapping[str, Any]],
    encoder: Encoder,
    max_length: int | None = None,
    *,
    drop_longer: bool = False,
    pixel_dtype: torch.dtype | None = None,
    side: str | None = None,
) -> dict[str, Any]:
    """Encode each example, cut or drop what is longer than ``max_length``, pad.

    ``max_length`` is the length of every row before the shift; None pads to the longest. With ``drop_longer``
    longer samples are dropped, not cut; if all are, it raises :class:`BadSample`. ``pixel_dtype`` of None
    leaves pixels, ``side`` of None pads on the processor's side.
    """
    records, read = records_of(examples), read_examples(examples, encoder)

    def encode(example: Example) -> Sample:
        with sample_key(example.key):
            encoded = encoder.encode(example.conversation, fake_image=example.fake)
            return encoder.label_sample(encoded, example.key)

    if max_length is not None and drop_longer:
        read = drop_overlong(read, [token_length(e.turns, encoder, e.key) for e in read], max_length, records)
    samples = [encode(example) for example in read]
    if max_length is not None and drop_longer:
        samples = drop_overlong(samples, list(map(len, samples)), max_length, records)
    elif max_length is not None:

        def fits(sample: Sample) -> bool:
            return can_be_cut(sample.tokens["input_ids"], encoder.media_token_ids, max_length)

        for index, (example, sample) in enumerate(zip(read, samples, strict=True)):
            if len(sample) > max_length:
                kept, shorter = keep_fitting_media(example, sample, encode, fits)
                record_truncation(example, kept, len(sample), max_length, records)
                samples[index] = shorter.cut(slice(max_length))
    return pad_labelled(samples, encoder, records, max_length, pixel_dtype=pixel_dtype, side=side)


def pad_labelled(
    samples: Sequence[Sample],
    encoder: Encoder,
    records: Records,
    max_length: int | None = None,
    *,
    pixel_dtype: torch.dtype | None = None,
    side: str | None = None,
) -> dict[str, Any]:
    """Record samples without a supervised token, and pad; see :func:`collate_encoded`."""
    labels = [sample.per_token["labels"] for sample in samples]
    records.record_unsupervised(labels, [sample.key for sample in samples])
    side = padding_side(encoder.processor) if side is None else side
    pad = pad_token_id(encoder.processor)
    return collate_samples(samples, encoder.family, pad, max_length, side=side, pixel_dtype=pixel_dtype)


def can_be_cut(ids: torch.Tensor, media_ids: frozenset[int], max_length: int) -> bool:
    """Return whether ids [S] can be cut to ``max_length`` without cutting inside or before a media item."""
    if len(ids) <= max_length:
        return True
    # The label shift cuts one token more.
    cut = ids[max_length - 1 :]
    return not bool(torch.isin(cut, torch.tensor(sorted(media_ids), dtype=ids.dtype)).any())


def keep_fitting_media(
    example: Example, encoded: T, encode: Callable[[Example], T], fits: Callable[[T], bool]
) -> tuple[Example, T]:
    """Cut an example before the first media item that does not fit; return it and its encoding.

    ``fits`` returns whether all media of an encoded example are within the limit. Finds the number of media
    items by bisection on encoded examples.
    """
    if fits(encoded):
        return example, encoded

    @cache
    def encode_first(number: int) -> tuple[Example, T]:
        shorter = _first_media(example, number)
        return shorter, encode(shorter)

    numbers = range(1, len(example.conversation.media))
    kept = bisect_left(numbers, True, key=lambda number: not fits(encode_first(number)[1]))
    return encode_first(kept)


def record_truncation(
    example: Example, shorter: Example, length: int, max_length: int, records: Records
) -> None:
    """Record that an example of ``length`` tokens was cut."""
    lost = len(example.conversation.media) - len(shorter.conversation.media)
    detail = f"{length} tokens are more than max_length={max_length}: the rest was cut"
    records.record(example.key, "truncated", detail + (f", with {lost} media" if lost else ""), "cut")


def _first_media(example: Example, number: int) -> Example:
    """Return the example up to its media item ``number`` (from 0), exclusive."""
    turns: list[Mapping[str, Any]] = []
    kept = 0
    for turn in example.turns:
        parts: list[Any] = []
        for part in turn["content"] if not isinstance(turn["content"], str) else ():
            if part["type"] in MEDIA_KINDS:
                if kept == number:
                    cut = [*turns, *_cut_turn(turn, parts, turns)]
                    values = {**example.values, "conversation": cut}
                    return Example(values, parse_conversation(values, example.key))
                kept += 1
            parts.append(part)
        turns.append(turn)
    return example


def _cut_turn(turn: Mapping[str, Any], parts: list[Any], before: Turns) -> list[dict[str, Any]]:
    """Return a turn with only these parts; nothing without parts, unless it is the first of the user."""
    if parts:
        return [{**turn, "content": parts}]
    asked = any(earlier["role"] == "user" for earlier in before)
    return [] if asked else [{**turn, "content": [{"type": "text", "text": ""}]}]
