"""A length limit for batches of examples: longer samples are truncated, or dropped.

A media item is never cut in two: it is in the batch with all its tokens and tensors, or not at all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from packhorse.collate.finish import per_token
from packhorse.collate.packer import stack_tokens
from packhorse.collate.processor_call import pad_token_id
from packhorse.collate.raw_labels import media_ids
from packhorse.collate.raw_media import drop_turn, token_length
from packhorse.collate.raw_prepare import Opened, Ready, decode, hide_fakes, in_order, open_batch
from packhorse.encode.tokenized import run_hook
from packhorse.families import Family
from packhorse.formats.conversation import parse_conversation
from packhorse.types import MEDIA_KINDS

Batch = dict[str, Any]
Hook = Callable[[Batch, Any], Mapping[str, Any]]
Make = Callable[[Sequence[Ready]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Made:
    """What the processor made of a batch of examples.

    Attributes:
        batch: tensors per token, of which rows may still be longer than ``max_length``, and media.
        ready: the samples that are its rows.
        lengths: tokens of each row without padding.
        max_length: the most tokens that a row may have in the end; None for no limit.
    """

    batch: Batch
    ready: list[Ready]
    lengths: list[int]
    max_length: int | None


def within_length(
    examples: Sequence[Mapping[str, Any]],
    processor: Any,
    family: Family,
    max_length: int | None,
    make: Make,
    hook: Hook | None = None,
    *,
    drop_overlong: bool = False,
) -> Made:
    """Make the batch of examples of which each fits into ``max_length`` tokens or can be cut to them.

    Cutting tokens is left to :func:`cut_rows`, after labels were made of the whole rows. Here samples lose
    the media that do not fit, most of them before anything is decoded.

    Args:
        examples: in the documented format.
        processor: makes the batch.
        family: of the processor.
        max_length: the most tokens; None for no limit.
        make: calls the processor.
        hook: changes the batch after the tokens of fake images are hidden in it.
        drop_overlong: drop longer samples instead of cutting them.

    Raises:
        BadSample: with ``drop_overlong``, all are longer.
    """
    opened = open_batch(examples, processor, family)

    def made(ready: list[Ready]) -> Made:
        batch, lengths = _hidden(make(ready), ready, processor, family, hook)
        return Made(batch, ready, lengths, max_length)

    if max_length is None:
        return made(decode(opened, processor, family))
    estimates = [token_length(one.turns, processor, one.conversation.key) for one in opened]
    if not drop_overlong:
        return _with_fitting_media(opened, estimates, processor, family, max_length, made)
    found = made(decode(drop_turn(opened, estimates, max_length), processor, family))
    if max(found.lengths) > max_length:  # what only the processor could tell
        found = made(drop_turn(found.ready, found.lengths, max_length))
    return found


def _hidden(
    made: Mapping[str, Any], ready: Sequence[Ready], processor: Any, family: Family, hook: Hook | None
) -> tuple[Batch, list[int]]:
    """The batch with fake images hidden and changed by the hook, and how long each row is then."""
    batch = hide_fakes(made, ready, processor, family)
    # Hidden at an end of a row they would look like padding.
    pairs = zip(_lengths(made), _lengths(batch), strict=True)
    at_the_ends = [whole - seen for whole, seen in pairs]
    if hook is not None:
        batch = dict(run_hook(hook, batch, processor))
    return batch, [seen + more for seen, more in zip(_lengths(batch), at_the_ends, strict=True)]


def _lengths(batch: Mapping[str, Any]) -> list[int]:
    """How long each row is without padding (tokens hidden from attention in its midst count)."""
    mask = batch.get("attention_mask")
    if mask is None:
        return [batch["input_ids"].shape[1]] * len(batch["input_ids"])
    lengths = []
    for row in mask:
        places = row.nonzero().flatten()
        lengths.append(int(places[-1] - places[0]) + 1 if len(places) else 0)
    return lengths


# --- media that do not fit --------------------------------------------------------------------------------


def _with_fitting_media(
    opened: Sequence[Opened],
    estimates: Sequence[int],
    processor: Any,
    family: Family,
    max_length: int,
    made: Callable[[list[Ready]], Made],
) -> Made:
    """The batch, in which each sample ends before the first media item that does not fit.

    What headers cannot answer is found by bisection on what the processor makes of the batch, because items
    differ in size.
    """
    chosen = [
        one if length <= max_length else _fitting(one, processor, max_length)
        for one, length in zip(opened, estimates, strict=True)
    ]
    samples = [decode([one], processor, family)[0] for one in chosen]
    content = torch.tensor(sorted(media_ids(processor, family)))
    longest = list(estimates)
    most_fitting = [0] * len(chosen)
    fewest_too_many = [len(one.conversation.media) + 1 for one in chosen]
    while True:
        found = made(in_order(samples, family))
        places = [next(n for n, sample in enumerate(samples) if sample is row) for row in found.ready]
        for row, place in enumerate(places):
            longest[place] = max(longest[place], found.lengths[row])
        settled = True
        for row, place in enumerate(places):
            number = len(chosen[place].conversation.media)
            if _media_fit(found, row, content, max_length):
                most_fitting[place] = number
            else:
                fewest_too_many[place] = number
                # The other samples of the batch may have changed since fewer were seen to fit.
                most_fitting[place] = min(most_fitting[place], number - 1)
            tried_next = (most_fitting[place] + fewest_too_many[place]) // 2
            if tried_next != number:
                settled = False
                chosen[place] = first_media(opened[place], tried_next)
                samples[place] = decode([chosen[place]], processor, family)[0]
        if settled:
            break
    for row, place in enumerate(places):
        one = opened[place]
        lost = len(one.conversation.media) - len(chosen[place].conversation.media)
        if lost or found.lengths[row] > max_length:
            what = f"{longest[place]} tokens are more than max_length={max_length}: the rest was cut"
            what += f", with {lost} media" if lost else ""
            one.records.record(one.conversation.key, "truncated", what, "cut")
    return found


def _media_fit(made: Made, row: int, content: torch.Tensor, max_length: int) -> bool:
    """Whether a row can be cut to ``max_length`` without cutting inside or before one of its media."""
    length = made.lengths[row]
    if length <= max_length or not len(content) or not made.ready[row].conversation.media:
        return True
    start = _start(made.batch, row, length)
    ids = made.batch["input_ids"][row, start : start + length]
    places = torch.isin(ids, content.to(ids.device)).nonzero().flatten()
    # The shift of labels cuts one token more.
    return not len(places) or int(places[-1]) < max_length - 1


def _fitting(one: Opened, processor: Any, max_length: int) -> Opened:
    """The sample without the media that do not fit, as far as headers tell."""

    def too_long(number: int) -> bool:
        turns = first_media(one, number, with_rest=False).turns
        return token_length(turns, processor, one.conversation.key) >= max_length

    number = len(one.conversation.media)
    kept = bisect_left(range(1, number + 1), True, key=too_long)
    return one if kept == number else first_media(one, kept)


def first_media(one: Opened, number: int, *, with_rest: bool = True) -> Opened:
    """The sample up to its media item ``number`` (from 0), without that one.

    Args:
        one: the sample.
        number: how many media it keeps.
        with_rest: also keep the text between the last one that is kept and the first one that is not.
    """
    turns: list[Mapping[str, Any]] = []
    kept = 0
    for turn in one.turns:
        parts: list[Any] = []
        for part in turn["content"] if not isinstance(turn["content"], str) else ():
            is_media = part["type"] in MEDIA_KINDS
            if kept == number and (is_media or (number and not with_rest)):
                return _replaced(one, [*turns, *_cut_turn(turn, parts, turns)])
            kept += is_media
            parts.append(part)
        turns.append(turn)
        if kept == number and number and not with_rest:
            break
    return _replaced(one, turns)


def _cut_turn(
    turn: Mapping[str, Any], parts: list[Any], before: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A turn of which only these parts are left; none without parts, unless it is the user's first."""
    if parts:
        return [{**turn, "content": parts}]
    asked = any(earlier["role"] == "user" for earlier in before)
    return [] if asked else [{**turn, "content": [{"type": "text", "text": ""}]}]


def _replaced(one: Opened, turns: Sequence[Mapping[str, Any]]) -> Opened:
    example = {**one.example, "conversation": list(turns)}
    conversation = parse_conversation(example, one.conversation.key)
    # The fake image is the first one of its sample.
    if all(ref.kind != "image" for ref in conversation.media):
        example.pop("_injected_fake", None)
    return replace(one, example=example, conversation=conversation)


# --- tokens -----------------------------------------------------------------------------------------------


def cut_rows(batch: Batch, made: Made, processor: Any, family: Family) -> Batch:
    """The batch with its tensors per token cut to ``max_length``; media tensors stay as they are."""
    limit = made.max_length
    width = batch["input_ids"].shape[1]
    if limit is None or width <= limit:
        return batch
    starts = [_start(batch, row, length) for row, length in enumerate(made.lengths)]
    left = any(start + length == width for start, length in zip(starts, made.lengths, strict=True) if start)
    pad = pad_token_id(processor) if min(made.lengths) < limit else 0
    keys = per_token(batch, family)
    rows = [
        {key: batch[key].select(-2, row)[..., start : start + min(length, limit)] for key in keys}
        for row, (start, length) in enumerate(zip(starts, made.lengths, strict=True))
    ]
    return {**batch, **stack_tokens(rows, limit, pad, "left" if left else "right")}


def _start(batch: Mapping[str, Any], row: int, length: int) -> int:
    """Where a row begins after padding on its left."""
    mask = batch.get("attention_mask")
    width: int = batch["input_ids"].shape[1]
    return width - length if mask is not None and bool(mask[row, -1]) else 0
