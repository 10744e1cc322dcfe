"""Collate functions for raw examples of Nemotron-Omni and Nemotron-Parse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from packhorse.collate.processor_call import call, can_encode, plain_turns
from packhorse.collate.raw_batched import collate_batched, decode
from packhorse.collate.raw_default import default_collate_fn
from packhorse.collate.raw_examples import Batch, Example, collate_encoded, read_examples
from packhorse.encode.robust import Batch as Samples
from packhorse.families import Encoder
from packhorse.families.nemotron_parse import TASK_PROMPT, NemotronParse
from packhorse.formats.conversation import extra_audio

_SAMPLING_RATE = 16_000  # of a processor that has no audio_sampling_rate
_FRAME_OPTIONS = ("frame_indices", "video_metadata")  # a part with one of these has its frames selected


def nemotron_omni_collate_fn(
    examples: Sequence[Mapping[str, Any]],
    processor: Any,
    max_length: int | None = None,
    max_video_frames: int | None = 8,
    *,
    drop_overlong: bool = False,
) -> Batch:
    """Collate raw examples for Nemotron-Omni, with few frames of each video and audio next to conversations.

    Args:
        examples: in the documented format; they are not changed. ``audio`` next to the conversation may be an
            array at the processor's rate, an (array, rate) pair, which is resampled to it, a file, or a list
            of them. A conversation has at most one video.
        processor: a Nemotron-Omni processor.
        max_length: see :func:`~packhorse.collate_fns.default_collate_fn`, like ``drop_overlong``.
        max_video_frames: sample at most this many frames of a video, evenly; None leaves that to the
            processor. A part with a lower ``num_frames``, ``max_frames`` or ``fps`` gets fewer.
        drop_overlong: see there.
    """
    rate = int(getattr(processor, "audio_sampling_rate", None) or _SAMPLING_RATE)
    prepared = [_with_rate(_with_max_frames(example, max_video_frames), rate) for example in examples]
    if isinstance(examples, Samples):  # keeps the keys of the samples and their ledger
        prepared = Samples(prepared, examples.indices, examples.keys, examples.ledger, examples.epoch)
    return default_collate_fn(prepared, processor, max_length, drop_overlong=drop_overlong)


def _with_rate(example: Mapping[str, Any], rate: int) -> Mapping[str, Any]:
    """Return the example with a sampling rate for audio that is a bare array."""
    if not isinstance(example, Mapping) or example.get("audio") is None:
        return example
    clips = [(clip, rate) if hasattr(clip, "shape") else clip for clip in extra_audio(example)]
    return {**example, "audio": clips}


def _with_max_frames(example: Mapping[str, Any], max_frames: int | None) -> Mapping[str, Any]:
    """Return the example with this limit in its video parts."""
    if max_frames is None or not isinstance(example, Mapping) or "conversation" not in example:
        return example
    turns = [
        {**turn, "content": [_limit_frames(part, max_frames) for part in turn["content"]]}
        if isinstance(turn, Mapping) and isinstance(turn.get("content"), list | tuple)
        else turn
        for turn in example["conversation"]
    ]
    return {**example, "conversation": turns}


def _limit_frames(part: Any, max_frames: int) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "video":
        return part
    if any(part.get(name) is not None for name in _FRAME_OPTIONS):
        return part
    by_rate = part.get("fps") is not None or part.get("max_frames") is not None
    name = "max_frames" if by_rate else "num_frames"
    return {**part, name: min(part.get(name) or max_frames, max_frames)}


def nemotron_parse_collate_fn(
    examples: Sequence[Mapping[str, Any]],
    processor: Any,
    task_prompt: str = TASK_PROMPT,
    *,
    pixel_dtype: torch.dtype | None = torch.bfloat16,
) -> Batch:
    """Collate raw examples for Nemotron-Parse: the text is ``task_prompt`` and the answer of each sample.

    Args:
        examples: in the documented format, each with one image; they are not changed. Of the turns only the
            assistant's are used. The model learns where to stop only if answers end in ``</s>``.
        processor: ``processor(images=…, text=…, padding=True, add_special_tokens=False,
            return_tensors="pt")``; it needs no chat template.
        task_prompt: the text before each answer; not supervised.
        pixel_dtype: what pixels are cast to; None leaves them as the processor returns them.

    Returns:
        ``pixel_values``; ``input_ids``, ``attention_mask`` and ``labels`` [B, S - 1], shifted by one;
        ``decoder_input_ids`` and ``decoder_attention_mask`` [B, S - 1], the same: each label is the token
        after its decoder input, and the decoder begins with the start token of the task prompt
        (``</s>``, as generation begins). ``n_images_per_sample`` [B].

    Raises:
        BadSample: (a ``ValueError``) an image is missing or cannot be loaded, or there are two.
    """
    if not examples:
        return {}
    encoder = Encoder(processor, NemotronParse(task_prompt))
    for index, example in enumerate(read_examples(examples, encoder)):
        if not example.conversation.media:
            raise encoder.family.bad(f"sample {index} of the batch has no image", example.conversation)
    if can_encode(encoder):
        batch = collate_encoded(examples, encoder, pixel_dtype=pixel_dtype)
    else:
        batch = collate_batched(examples, encoder, _call_parse, pixel_dtype=pixel_dtype)
    del batch["shift_labels"]  # the model has a decoder of its own, and never shifts labels
    # The task prompt begins with the decoder's start token, so none is added.
    return {
        **batch,
        "decoder_input_ids": batch["input_ids"],
        "decoder_attention_mask": batch["attention_mask"],
    }


def _call_parse(examples: Sequence[Example], encoder: Encoder) -> Mapping[str, Any]:
    images = [image for example in examples for image in decode(example, encoder).media.images]
    texts = [encoder.render(plain_turns(example.turns, encoder.family)) for example in examples]
    options = {"padding": True, "add_special_tokens": False, "return_tensors": "pt"}
    batch = dict(call(encoder.processor, images=images, text=texts, **options))
    batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
    return batch
