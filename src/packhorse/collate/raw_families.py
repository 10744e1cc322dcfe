"""Collate functions for raw examples of single families, and the table of all by processor class."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count, pairwise
from typing import Any

import torch

from packhorse.chat import (
    IGNORE_INDEX,
    Processor,
    Tokenizer,
    content_text,
    is_transformers,
    pad_token_id,
    token_id,
    token_keys,
    tokenizer_of,
)
from packhorse.collate.finish import sample_key
from packhorse.collate.packer import stack_tokens
from packhorse.collate.padded import pad_samples
from packhorse.collate.raw_batched import (
    call_with_texts,
    collate_batched,
    decode,
    render_examples,
    visible_span,
    with_padding,
)
from packhorse.collate.raw_default import default_collate_fn, llava_onevision_collate_fn, qwen2_5_collate_fn
from packhorse.collate.raw_examples import Example, collate_encoded, read_examples
from packhorse.collate.raw_labels import find_all
from packhorse.collate.raw_qwen_omni import qwen3_omni_collate_fn
from packhorse.encode.robust import SampleBatch
from packhorse.errors import ConfigError
from packhorse.families import Encoder
from packhorse.families.kimi_k25 import KimiK25Remote, expand_placeholders, media_pad_id
from packhorse.families.nemotron_parse import TASK_PROMPT, NemotronParse
from packhorse.families.processor_call import call, can_encode, has_parameter, plain_turns, text_ids
from packhorse.formats.conversation import extra_audio
from packhorse.media import load_audio

# --- Gemma 4 ----------------------------------------------------------------------------------------------

_GEMMA4_MODEL_TURN = "<|turn>model\n"
_GEMMA4_THINKING_PREFIX = "<|channel>thought\n<channel|>"


def gemma4_prefix_collate_fn(
    examples: Sequence[Mapping[str, Any]],
    processor: Processor,
    max_length: int | None = None,
    *,
    drop_overlong: bool = False,
) -> dict[str, Any]:
    """Collate raw examples for Gemma 4 models that open every answer with an empty thinking channel.

    Training data without it starts with a high loss, so it is inserted in every answer. The prefix counts
    towards ``max_length``; its tokens are not supervised. Everything else is as in
    :func:`~packhorse.collate_fns.default_collate_fn`.
    """
    if not examples:
        return {}
    tokenizer = tokenizer_of(processor)

    def insert(batch: dict[str, Any], _: Any) -> Mapping[str, Any]:
        return _inject_thinking_prefix_tokens(batch, tokenizer)

    batch = default_collate_fn(examples, processor, max_length, insert, drop_overlong=drop_overlong)
    marker, prefix = _patterns(tokenizer)
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"], strict=True):
        for start in find_all(ids, [*marker, *prefix]):
            first = start + len(marker) - 1  # the label of a token is one index before it
            labels[first : first + len(prefix)] = IGNORE_INDEX
    return batch


def gemma4_inject_thinking_prefix(batch: Mapping[str, Any], processor: Processor) -> dict[str, Any]:
    r"""Insert Gemma 4's thinking prefix after every ``<|turn>model\n``, as a hook after tokenization.

    For ``PreTokenizedDatasetWrapper(…, post_tokenize_hook=gemma4_inject_thinking_prefix)`` and
    ``default_collate_fn(…, _post_tokenize_hook=…)``. Labels that are made after the hook exclude the prefix;
    ``labels`` that the batch already has are :data:`~packhorse.chat.IGNORE_INDEX` on it.

    Args:
        batch: ``input_ids`` [B, S], and any other tensors.
        processor: its tokenizer must have Gemma 4's tokens; otherwise the batch is returned unchanged.
    """
    tokenizer = tokenizer_of(processor)
    tokens = ("<|turn>", "<|channel>", "<channel|>")
    if any(token_id(tokenizer, token) is None for token in tokens):
        return dict(batch)
    return _inject_thinking_prefix_tokens(batch, tokenizer)


def _inject_thinking_prefix_tokens(batch: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    r"""Insert ``<|channel>thought\n<channel|>`` after every ``<|turn>model\n`` that is not followed by it.

    For inserted tokens ``attention_mask`` is 1, ``labels`` are IGNORE_INDEX and every other integer tensor
    [B, S] is 0; everything else stays. The new batch has the same length if the padding leaves enough space,
    else that of its longest row.
    """
    marker, prefix = _patterns(tokenizer)
    ids = batch["input_ids"]
    ends = ((row, [at + len(marker) for at in find_all(row, marker)]) for row in ids.tolist())
    insertions = [[end for end in after if row[end : end + len(prefix)] != prefix] for row, after in ends]
    if not any(insertions):
        return dict(batch)
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None and len(set(map(len, insertions))) > 1:
        pad_token_id(tokenizer)  # raises: rows with more answers become longer
    spans = [visible_span(row) for row in batch.get("attention_mask", torch.ones_like(ids))]
    keys = [
        key
        for key, value in batch.items()
        if isinstance(value, torch.Tensor) and value.shape == ids.shape and not value.is_floating_point()
    ]
    zeros = [0] * len(prefix)
    inserted = {
        "input_ids": prefix,
        "attention_mask": [1] * len(prefix),
        "labels": [IGNORE_INDEX] * len(prefix),
    }
    rows = []
    for row, ((start, end), indices) in enumerate(zip(spans, insertions, strict=True)):
        positions = [index - start for index in indices]
        rows.append(
            {key: _insert(batch[key][row, start:end], positions, inserted.get(key, zeros)) for key in keys}
        )
    width = max(ids.shape[1], *(len(row["input_ids"]) for row in rows))
    left = all(end == ids.shape[1] for _, end in spans) and any(start for start, _ in spans)
    return {**batch, **stack_tokens(rows, width, pad or 0, "left" if left else "right")}


def _patterns(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    return text_ids(tokenizer, _GEMMA4_MODEL_TURN), text_ids(tokenizer, _GEMMA4_THINKING_PREFIX)


def _insert(row: torch.Tensor, positions: Sequence[int], values: Sequence[int]) -> torch.Tensor:
    """Return the row with ``values`` inserted at each of these positions."""
    piece = torch.tensor(values, dtype=row.dtype, device=row.device)
    edges = [0, *positions, len(row)]
    pieces = [part for start, end in pairwise(edges) for part in (piece, row[start:end])]
    return torch.cat(pieces[1:])


# --- Kimi-VL and Kimi K2.5 --------------------------------------------------------------------------------


def kimi_vl_collate_fn(
    examples: Sequence[Mapping[str, Any]],
    processor: Processor,
    max_length: int | None = None,
    *,
    drop_overlong: bool = False,
) -> dict[str, Any]:
    """Collate raw examples for Kimi-VL, without special tokens around the texts.

    Args:
        examples: in the documented format; they are not changed.
        processor: ``apply_chat_template(conversation, tokenize=False)`` returns a text, and
            ``processor(text=…, images=…, padding=…, add_special_tokens=False, return_tensors="pt")`` the
            tensors.
        max_length: every batch has this many tokens before the shift; longer samples are truncated as by
            :func:`~packhorse.collate_fns.default_collate_fn`. None pads to the longest sample.
        drop_overlong: drop longer samples instead.

    Returns:
        The batch as :func:`~packhorse.collate_fns.default_collate_fn` describes it; pixels stay as the
        processor returns them.

    Raises:
        BadSample: (a ``ValueError``) a media item cannot be loaded, or ``drop_overlong`` leaves no sample.
    """
    if not examples:
        return {}
    encoder = Encoder(processor)
    if can_encode(encoder):
        return collate_encoded(examples, encoder, max_length, drop_longer=drop_overlong)
    return collate_batched(examples, encoder, _call_kimi_vl, max_length, drop_longer=drop_overlong)


def _call_kimi_vl(examples: Sequence[Example], encoder: Encoder) -> Mapping[str, Any]:
    images = [image for example in examples for image in decode(example, encoder).media.images]
    return call_with_texts(examples, encoder, images=images, add_special_tokens=False, padding=True)


def _expand_image_tokens(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    grid_thws: torch.Tensor,
    media_token_id: int,
    merge_kernel_size: tuple[int, int] = (2, 2),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat each image placeholder in ids [S] and mask [S] once per token of its image.

    As :func:`~packhorse.families.kimi_k25.expand_placeholders`, but ids without a placeholder stay unchanged.
    """
    tokens = {"input_ids": input_ids, "attention_mask": attention_mask}
    if bool((input_ids == media_token_id).any()):
        tokens = expand_placeholders(tokens, grid_thws, media_token_id, merge_kernel_size)
    return tokens["input_ids"], tokens["attention_mask"]


def kimi_k25_vl_collate_fn(
    examples: Sequence[Mapping[str, Any]], processor: Processor, max_length: int | None = None
) -> dict[str, Any]:
    """Collate raw examples for Kimi K2.5, with expanded image placeholders.

    So the length of a sequence does not change inside the model, as pipeline parallelism requires.

    Args:
        examples: in the documented format; they are not changed.
        processor: the model's own (``processor(text=…, medias=[{"type": "image", "image": …}])`` leaves one
            ``<|media_pad|>`` per image and returns ``grid_thws``), or transformers' (which expands itself).
        max_length: every batch has this many tokens before the shift; longer samples are cut, before the
            first media item that does not fit, and that is recorded in the ledger. None pads to the longest.

    Returns:
        The batch as :func:`~packhorse.collate_fns.default_collate_fn` describes it, padded on the right.
        Media whose tokens were cut are dropped and not counted. With ``grid_thws`` there is
        ``image_grid_hws``: the same without t.

    Raises:
        BadSample: (a ``ValueError``) a media item cannot be loaded.
        ValueError: placeholders and images differ in number.
    """
    if not examples:
        return {}
    encoder = Encoder(processor)
    if can_encode(encoder):
        batch = collate_encoded(examples, encoder, max_length, side="right")
    else:
        placeholder = frozenset({media_pad_id(encoder)})
        batch = collate_batched(examples, encoder, _call_kimi_k25, max_length, media_tokens=placeholder)
    if "grid_thws" in batch:
        batch["image_grid_hws"] = batch["grid_thws"][:, 1:]
    return batch


def _call_kimi_k25(examples: Sequence[Example], encoder: Encoder) -> Mapping[str, Any]:
    """Call a processor like that of the model's repository for each example; expands the placeholders."""
    family, samples = KimiK25Remote(), []
    for text, example in zip(render_examples(examples, encoder), examples, strict=True):
        output = family.call(encoder, text, decode(example, encoder).media)
        tokens = {key: output[key][0] for key in token_keys(output, family.layout)}
        samples.append({**output, **tokens})
    return pad_samples(samples, encoder.family, pad_token_id(encoder.processor))


# --- Nemotron-Omni and Nemotron-Parse ---------------------------------------------------------------------

_SAMPLING_RATE = 16_000  # of a processor that has no audio_sampling_rate
_FRAME_OPTIONS = ("frame_indices", "video_metadata")  # a part with one of these has its frames selected


def nemotron_omni_collate_fn(
    examples: Sequence[Mapping[str, Any]],
    processor: Processor,
    max_length: int | None = None,
    max_video_frames: int | None = 8,
    *,
    drop_overlong: bool = False,
) -> dict[str, Any]:
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
    if isinstance(examples, SampleBatch):  # keeps the keys of the samples and their ledger
        prepared = SampleBatch(prepared, examples.indices, examples.keys, examples.ledger, examples.epoch)
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
    processor: Processor,
    task_prompt: str = TASK_PROMPT,
    *,
    pixel_dtype: torch.dtype | None = torch.bfloat16,
) -> dict[str, Any]:
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


# --- Phi-4-multimodal -------------------------------------------------------------------------------------

_IMAGE_KEYS = ("input_image_embeds", "image_pixel_values", "image_sizes", "image_attention_mask")
_TEXT, _IMAGE, _AUDIO = 0, 1, 2  # input_mode; an image and audio together are 3


def phi4_mm_collate_fn(examples: Sequence[Mapping[str, Any]], processor: Processor) -> dict[str, Any]:
    """Collate raw examples for Phi-4-multimodal.

    Args:
        examples: in the documented format; they are not changed. Audio is a part of the conversation, or an
            ``audio`` field next to it (an (array, rate) pair, a dict with ``array`` and ``sampling_rate``, a
            file, or a list of them) whose placeholder the text has typed out, as
            :func:`packhorse.datasets.make_cv17_dataset` does.
        processor: the model's own, which takes ``audios`` as (array, rate) pairs, or transformers', which
            takes ``audio`` as arrays (they are resampled for it). If only its tokenizer has a chat template,
            as the released one has, that is used; its turns are texts with typed placeholders.

    Returns:
        The batch as :func:`~packhorse.collate_fns.default_collate_fn` describes it, padded to the longest
        sample; pixels stay as the processor returns them. ``input_mode`` [1] is 0 for text, 1 with images, 2
        with audio, 3 with both, if the processor does not set it. A batch without images has no image keys.

    Raises:
        BadSample: (a ``ValueError``) a media item cannot be loaded.
    """
    if not examples:
        return {}
    encoder = Encoder(_with_template(processor))
    if is_transformers(processor) and can_encode(encoder):
        batch = collate_encoded(examples, encoder)
    else:
        # The placeholders are typed as the processor requires, and the audio stays next to them.
        batch = collate_batched(examples, encoder, _call_phi4, place_audio=False)
        clips = [_audio_clips(example) for example in examples]
        if any(clips):
            batch["n_audios_per_sample"] = torch.tensor(clips)
    if "n_images_per_sample" not in batch:
        batch = {key: value for key, value in batch.items() if key not in _IMAGE_KEYS}
    if batch.get("input_mode") is None:
        image = _IMAGE if "n_images_per_sample" in batch else _TEXT
        batch["input_mode"] = torch.tensor([image + (_AUDIO if "n_audios_per_sample" in batch else _TEXT)])
    return batch


def _with_template(processor: Processor) -> Any:
    """Return the processor, or a copy that renders with its tokenizer's template if it has none itself."""
    tokenizer = tokenizer_of(processor)
    renders = hasattr(processor, "apply_chat_template") and (
        getattr(processor, "chat_template", "its own way") is not None
    )
    if renders or getattr(tokenizer, "chat_template", None) is None:
        return processor
    placeholders: dict[str, str] = {}
    with suppress(ConfigError):  # the model's own processor numbers them
        placeholders = {str(kind): text for kind, text in Encoder(processor).placeholders.items()}

    def apply_chat_template(turns: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        numbers = {"image": count(1), "audio": count(1)}

        def write_media(part: Mapping[str, Any]) -> str:
            kind = part["type"]
            return placeholders.get(kind) or f"<|{kind}_{next(numbers[kind])}|>"

        texts = [{**turn, "content": content_text(turn["content"], write_media)} for turn in turns]
        return call(tokenizer.apply_chat_template, texts, **options)

    copied: Any = copy.copy(processor)
    copied.chat_template = tokenizer.chat_template
    copied.apply_chat_template = apply_chat_template
    return copied


def _audio_clips(example: Mapping[str, Any]) -> int:
    """Return the number of audio clips in an example, next to its conversation or in it."""
    contents = (turn["content"] for turn in example["conversation"])
    parts = (part for content in contents if not isinstance(content, str) for part in content)
    return len(extra_audio(example)) + len([part for part in parts if part["type"] == "audio"])


def _extra_audio(example: Example, encoder: Encoder) -> list[tuple[Any, int]]:
    """Return the (array, rate) pairs next to a conversation, each at its own rate."""
    family, sources = encoder.family, extra_audio(example.values)
    if sources and any(ref.kind == "audio" for ref in example.conversation.media):
        raise family.bad("audio next to the conversation ('audio') and in it", example.conversation)
    with sample_key(example.key):
        clips = [load_audio(source) for source in sources]
    for array, rate in clips:
        if len(array) * family.sampling_rate < family.least_samples * rate:
            detail = f"{len(array)} samples at {rate:,} Hz are too short for {family.name}"
            raise family.bad(detail, example.conversation, "broken_media")
    return clips


def _call_phi4(examples: Sequence[Example], encoder: Encoder) -> Mapping[str, Any]:
    processor, rate = encoder.processor, encoder.family.sampling_rate
    decoded = [decode(example, encoder).media for example in examples]
    clips = [
        clip
        for example, media in zip(examples, decoded, strict=True)
        for clip in _extra_audio(example, encoder) or media.audios
    ]
    options = with_padding({}, encoder)
    if any(media.images for media in decoded):
        nested = [list(media.images) for media in decoded]
        options["images"] = nested if is_transformers(processor) else [i for images in nested for i in images]
    if clips and has_parameter(processor, "audio") and not has_parameter(processor, "audios"):
        options["audio"] = [load_audio(clip, sampling_rate=rate)[0] for clip in clips]
        options |= {"audio_kwargs": {"sampling_rate": rate}} if is_transformers(processor) else {}
    elif clips:
        options["audios"] = clips
    return call_with_texts(examples, encoder, **options)


# --- all functions ----------------------------------------------------------------------------------------

COLLATE_FNS: dict[str, Callable[..., dict[str, Any]]] = {
    "Gemma3Processor": default_collate_fn,
    "Gemma4Processor": default_collate_fn,
    "InternVLProcessor": default_collate_fn,
    "KimiK25Processor": kimi_k25_vl_collate_fn,
    "KimiVLProcessor": kimi_vl_collate_fn,
    "Kimi_K25Processor": kimi_k25_vl_collate_fn,
    "Lfm2VlProcessor": default_collate_fn,
    "LlavaOneVisionProcessor": llava_onevision_collate_fn,
    "LlavaOnevisionProcessor": llava_onevision_collate_fn,
    "NemotronH_Nano_Omni_Reasoning_V3Processor": nemotron_omni_collate_fn,
    "NemotronH_Omni_Reasoning_V3Processor": nemotron_omni_collate_fn,
    "NemotronParseProcessor": nemotron_parse_collate_fn,
    "Phi4MMProcessor": phi4_mm_collate_fn,
    "Phi4MultimodalProcessor": phi4_mm_collate_fn,
    "Qwen2VLProcessor": qwen2_5_collate_fn,
    "Qwen2_5_VLProcessor": qwen2_5_collate_fn,
    "Qwen3OmniMoeProcessor": qwen3_omni_collate_fn,
    "Qwen3VLProcessor": default_collate_fn,
    "SmolVLMProcessor": default_collate_fn,
    "default": default_collate_fn,
}
"""The collate function for raw examples by the class name of the processor; ``"default"`` for any other.

Only some models of Gemma 4 need the thinking prefix, so :func:`gemma4_prefix_collate_fn` is not in it."""
