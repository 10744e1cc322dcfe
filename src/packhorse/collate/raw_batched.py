"""Batches of raw examples with one call of the processor for all of them.

For processors of no listed family, whose tensors cannot be assigned to samples, and for hooks, which take a
whole batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from logging import getLogger
from typing import Any, NamedTuple

import torch

from packhorse.chat import (
    IGNORE_INDEX,
    is_transformers,
    pad_token_id,
    rejected_by_template,
    template_errors,
    token_keys,
)
from packhorse.collate.finish import add_counts, records_of, row_order, sample_key, shift_batch
from packhorse.collate.packer import cast_pixels, media_keys, stack_tokens
from packhorse.collate.raw_examples import (
    Example,
    can_be_cut,
    keep_fitting_media,
    read_examples,
    record_truncation,
)
from packhorse.collate.raw_labels import make_labels, media_ids
from packhorse.collate.raw_media import drop_overlong, token_length
from packhorse.encode.tokenized import Hook, run_hook
from packhorse.errors import BadSample, ConfigError
from packhorse.families import Encoder, LoadedMedia
from packhorse.families.processor_call import call, can_encode, padding_side, plain_turns, render
from packhorse.media import load_image
from packhorse.media.settings import size_names
from packhorse.types import MediaRef

logger = getLogger("packhorse.collate_fns")

CallProcessor = Callable[[Sequence[Example], Encoder], Mapping[str, Any]]


def collate_batched(
    examples: Sequence[Mapping[str, Any]],
    encoder: Encoder,
    call_processor: CallProcessor,
    max_length: int | None = None,
    *,
    hook: Hook | None = None,
    drop_longer: bool = False,
    pixel_dtype: torch.dtype | None = None,
    place_audio: bool = True,
    media_tokens: frozenset[int] | None = None,
) -> dict[str, Any]:
    """Encode all examples in one call, label the answers, cut or drop what is longer than ``max_length``.

    ``call_processor`` returns the padded tensors of examples; ``hook`` changes the batch before labels are
    made; ``media_tokens`` are the ids that stand for media, None for those that the processor names. For the
    rest see :func:`~packhorse.collate.raw_examples.collate_encoded` and ``read_examples``.
    """
    records, family = records_of(examples), encoder.family
    read = read_examples(examples, encoder, place_audio=place_audio)
    _check_weights(read)
    if max_length is not None and drop_longer:
        read = drop_overlong(read, [token_length(e.turns, encoder, e.key) for e in read], max_length, records)
    images = [sum(ref.kind == "image" for ref in example.conversation.media) for example in read]
    read = [read[index] for index in row_order([example.fake for example in read], images, family)]

    def encode(batch: Sequence[Example]) -> _Rows:
        return _encode(batch, encoder, call_processor, hook)

    rows = encode(read)
    if max_length is not None and drop_longer and max(rows.lengths) > max_length:
        read = drop_overlong(read, rows.lengths, max_length, records)
        rows = encode(read)
    elif max_length is not None:
        known = media_ids(encoder) if media_tokens is None else media_tokens
        fits = partial(can_be_cut, media_ids=known, max_length=max_length)
        shorter = [
            keep_fitting_media(example, rows.ids(row), lambda shorter: encode([shorter]).ids(0), fits)[0]
            for row, example in enumerate(read)
        ]
        for example, kept, length in zip(read, shorter, rows.lengths, strict=True):
            if length > max_length:
                record_truncation(example, kept, length, max_length, records)
        if any(kept is not example for kept, example in zip(shorter, read, strict=True)):
            read, rows = shorter, encode(shorter)
    labels = make_labels(rows.batch["input_ids"], [example.turns for example in read], encoder)
    if "attention_mask" in rows.batch:
        labels = labels.masked_fill(rows.batch["attention_mask"] == 0, IGNORE_INDEX)
    # Rows are cut after labels are made: answers are located with more certainty in whole rows.
    rows = _Rows({**rows.batch, "labels": labels}, rows.lengths)
    batch = rows.batch if max_length is None else rows.resize(max_length, encoder)
    records.record_unsupervised(batch["labels"].unbind(), [example.key for example in read])
    counts = [Counter(ref.kind for ref in example.conversation.media) for example in read]
    return shift_batch(add_counts(cast_pixels(batch, pixel_dtype), counts), family)


def _check_weights(examples: Sequence[Example]) -> None:
    """Raise if an example has loss weights: labels are made from the ids of the whole batch, without them."""
    for number, example in enumerate(examples):
        turns = example.conversation.messages
        if example.conversation.weight != 1 or any(turn.weight != 1 for turn in turns):
            raise ConfigError(
                f"{example.key or f'sample {number} of the batch'} has loss weights (weight, loss or train), "
                "which this collate function cannot apply: encode the rows with PreTokenizedDatasetWrapper "
                "and collate with pad_collate_fn, or remove the weights",
                setting="weight",
            )


class _Rows(NamedTuple):
    """A padded batch, and the tokens of each row without padding."""

    batch: dict[str, Any]
    lengths: list[int]

    def start(self, row: int) -> int:
        """Return where a row begins after padding on its left."""
        mask, width = self.batch.get("attention_mask"), int(self.batch["input_ids"].shape[1])
        return width - self.lengths[row] if mask is not None and bool(mask[row, -1]) else 0

    def ids(self, row: int) -> torch.Tensor:
        """Return the ids of a row without padding."""
        start = self.start(row)
        ids: torch.Tensor = self.batch["input_ids"][row, start : start + self.lengths[row]]
        return ids

    def resize(self, width: int, encoder: Encoder) -> dict[str, Any]:
        """Cut or pad the tensors per token to ``width``; media tensors stay."""
        starts = [self.start(row) for row in range(len(self.lengths))]
        full = min(self.lengths) == self.batch["input_ids"].shape[1]
        left = padding_side(encoder.processor) == "left" if full else any(starts)
        pad = pad_token_id(encoder.processor) if min(self.lengths) < width else 0
        keys = token_keys(self.batch, media_keys(encoder.family))
        rows = [
            {key: self.batch[key].select(-2, row)[..., start : start + min(length, width)] for key in keys}
            for row, (start, length) in enumerate(zip(starts, self.lengths, strict=True))
        ]
        return {**self.batch, **stack_tokens(rows, width, pad, "left" if left else "right")}


def _encode(
    examples: Sequence[Example], encoder: Encoder, call_processor: CallProcessor, hook: Hook | None
) -> _Rows:
    """Call the processor, hide the tokens of fake images, run the hook."""
    output = dict(call_processor(examples, encoder))
    batch = _hide_fakes(output, examples, encoder)
    # Hidden tokens at an end of a row look like padding.
    pairs = zip(_visible_lengths(output), _visible_lengths(batch), strict=True)
    hidden = [length - visible for length, visible in pairs]
    if hook is not None:
        batch = dict(run_hook(hook, batch, encoder.processor))
    return _Rows(batch, [length + more for length, more in zip(_visible_lengths(batch), hidden, strict=True)])


def _visible_lengths(batch: Mapping[str, Any]) -> list[int]:
    """Return the tokens of each row from the first to the last one that is attended to."""
    mask = batch.get("attention_mask")
    if mask is None:
        return [batch["input_ids"].shape[1]] * len(batch["input_ids"])
    return [after - first for first, after in map(visible_span, mask)]


def visible_span(mask: torch.Tensor) -> tuple[int, int]:
    """Return the first and after-last token of a row that is attended to."""
    visible = mask.nonzero().flatten()
    return (int(visible[0]), int(visible[-1]) + 1) if len(visible) else (0, 0)


def _hide_fakes(batch: dict[str, Any], examples: Sequence[Example], encoder: Encoder) -> dict[str, Any]:
    """Return the batch with attention 0 on the tokens of fake images."""
    if not any(example.fake for example in examples):
        return batch
    ids = batch["input_ids"]
    mask = batch["attention_mask"].clone() if "attention_mask" in batch else torch.ones_like(ids)
    for row, example in enumerate(examples):
        if example.fake:
            tokens = mask[row].nonzero().flatten()
            first, after = fake_span(ids[row][tokens].tolist(), example, encoder)
            mask[row, tokens[first:after]] = 0
    return {**batch, "attention_mask": mask}


def fake_span(ids: Sequence[int], example: Example, encoder: Encoder) -> tuple[int, int]:
    """Return the first and after-last token of the fake image in the ids of its sample, without padding."""
    if can_encode(encoder):
        refs = example.conversation.media
        sizes = [(ref.kind, encoder.size_of(ref)) for ref in refs] if len(refs) > 1 else []
        return encoder.fake_image_span(ids, example.conversation, sizes)
    owners = (encoder.processor, encoder.tokenizer)
    named = {getattr(owner, "image_token_id", None) for owner in owners} - {None}
    tokens = [index for index, token in enumerate(ids) if token in (named or media_ids(encoder))]
    if not tokens:
        logger.warning(
            "%s has no image_token_id: the fake image of a sample is not hidden from attention",
            type(encoder.processor).__name__,
        )
        return 0, 0
    return tokens[0], tokens[-1] + 1


class Decoded(NamedTuple):
    """An example with decoded media: turns for ``apply_chat_template``, and the media by kind."""

    turns: list[dict[str, Any]]
    media: LoadedMedia


def decode(example: Example, encoder: Encoder) -> Decoded:
    """Decode the media of an example; raise :class:`BadSample` if one is missing or broken."""
    media = LoadedMedia([], [], [])

    def load(ref: MediaRef) -> Any:
        if ref.options and (names := size_names(ref.kind, ref.options)):
            name = type(encoder.processor).__name__
            what = f"{', '.join(names)}: one call of {name} has one setting for all media; remove it"
            raise BadSample(what, reason="wrong_format", key=example.key, stage="collate")
        if ref.kind == "image":
            media.images.append(load_image(ref.source))
            return media.images[-1]
        loaded = encoder.load([ref])
        media.videos.extend(loaded.videos)
        media.audios.extend(loaded.audios)
        return loaded.videos[0].frames if loaded.videos else loaded.audios[0][0]

    return Decoded(fill_media(example, encoder, lambda ref: {ref.kind: load(ref)}), media)


def fill_media(
    example: Example, encoder: Encoder, load: Callable[[MediaRef], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the turns of an example with what ``load`` returns in each media part."""
    turns = []
    with sample_key(example.key):
        encoder.family.check(example.conversation)
        plain = plain_turns(example.turns, encoder.family)
        for turn, message in zip(plain, example.conversation.messages, strict=True):
            content = turn["content"]
            if not isinstance(content, str):
                parts = zip(content, message.parts, strict=True)
                content = [
                    {**part, **load(ref)} if isinstance(ref, MediaRef) else part for part, ref in parts
                ]
            turns.append({**turn, "content": content})
    return turns


def render_examples(examples: Sequence[Example], encoder: Encoder) -> list[str]:
    """Render each example as a text, placeholders not expanded."""
    return [_render(example, encoder) for example in examples]


def _render(example: Example, encoder: Encoder) -> str:
    try:
        return render(encoder, plain_turns(example.turns, encoder.family))
    except template_errors() as error:
        raise rejected_by_template(error, example.key) from error


def call_with_texts(examples: Sequence[Example], encoder: Encoder, **options: Any) -> dict[str, Any]:
    """Call the processor with the rendered examples; options without a value (no images, say) are omitted."""
    given = {name: value for name, value in options.items() if value != []}
    texts = render_examples(examples, encoder)
    return dict(call(encoder.processor, text=texts, return_tensors="pt", **given))


def media_options(decoded: Sequence[Decoded], encoder: Encoder) -> dict[str, Any]:
    """Return the options of a call that describe its media; grouped (``videos_kwargs``) for transformers."""
    media = LoadedMedia(
        [image for item in decoded for image in item.media.images],
        [video for item in decoded for video in item.media.videos],
        [audio for item in decoded for audio in item.media.audios],
    )
    if is_transformers(encoder.processor):
        arguments = encoder.family.call_arguments(encoder, media)
        return {name: value for name, value in arguments.items() if name.endswith("_kwargs")}
    options: dict[str, Any] = {}
    if media.videos:
        options["video_metadata"] = [video.metadata.as_dict() for video in media.videos]
        options["do_sample_frames"] = False
    if media.audios:
        options["sampling_rate"] = encoder.family.sampling_rate
    return options


def with_padding(options: Mapping[str, Any], encoder: Encoder) -> dict[str, Any]:
    """Return the options of a call that pads to the longest text."""
    if not is_transformers(encoder.processor):
        return {**options, "padding": True}
    # Not as a plain option: that would reach the feature extractor of audio too.
    return {**options, "text_kwargs": {**options.get("text_kwargs", {}), "padding": True}}
