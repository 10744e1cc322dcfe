"""The collate function for raw examples of Qwen3-Omni, whose media go through ``qwen_omni_utils``."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from packhorse.chat import Processor
from packhorse.collate.finish import records_of
from packhorse.collate.raw_batched import call_with_texts, collate_batched, fake_span, fill_media
from packhorse.collate.raw_examples import Example, pad_labelled, read_examples
from packhorse.errors import MissingDependency
from packhorse.families import Encoded, Encoder
from packhorse.families.processor_call import call, can_encode
from packhorse.media import load_image, local_path, probe_video
from packhorse.media.settings import size_names, size_settings
from packhorse.types import MediaRef, Sample

_SAMPLING_RATE = 16_000  # of the audio that the package loads

ProcessMedia = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Media:
    """What the package returns for one conversation; ``rates`` are frames per second of its videos."""

    audio: list[Any]
    images: list[Any]
    videos: list[Any]
    rates: list[float]


def qwen3_omni_collate_fn(
    examples: Sequence[Mapping[str, Any]], processor: Processor, use_audio_in_video: bool = False
) -> dict[str, Any]:
    """Collate raw examples for Qwen3-Omni: media go through ``qwen_omni_utils``, then through the processor.

    The package resizes images and frames itself before the processor does, and decodes videos that are files
    (at 2 frames per second, unless a part has ``fps`` or ``num_frames``); everything else is loaded by
    Packhorse. :func:`~packhorse.collate_fns.default_collate_fn` takes the same processor without the package.

    Args:
        examples: in the documented format; they are not changed.
        processor: a Qwen3-Omni processor.
        use_audio_in_video: use the audio of videos too, interleaved with their frames; the videos must then
            be files with an audio track.

    Returns:
        The batch as :func:`~packhorse.collate_fns.default_collate_fn` describes it, padded to the longest
        sample; pixels stay as the processor returns them.

    Raises:
        MissingDependency: (an ``ImportError``) ``qwen_omni_utils`` is not installed.
        BadSample: (a ``ValueError``) a media item cannot be loaded, or text and media do not agree.
    """
    if not examples:
        return {}
    process = _import_process_mm_info()
    encoder = Encoder(processor)

    def load(example: Example) -> _Media:
        return _load_media(example, encoder, process, use_audio_in_video)

    def call_stub(read: Sequence[Example], encoder: Encoder) -> Mapping[str, Any]:
        media = list(map(load, read))
        given: dict[str, Any] = {
            "audio": [item for sample in media for item in sample.audio],
            "images": [item for sample in media for item in sample.images],
            "videos": [item for sample in media for item in sample.videos],
        }
        if given["videos"]:
            given["use_audio_in_video"] = use_audio_in_video
        return call_with_texts(read, encoder, padding=True, **given)

    if not can_encode(encoder):
        return collate_batched(examples, encoder, call_stub)
    samples = [
        _encode(example, load(example), encoder, use_audio_in_video)
        for example in read_examples(examples, encoder)
    ]
    return pad_labelled(samples, encoder, records_of(examples))


def _import_process_mm_info() -> ProcessMedia:
    try:
        function: ProcessMedia = importlib.import_module("qwen_omni_utils").process_mm_info
    except ImportError as error:
        raise MissingDependency(
            "Qwen3-Omni's media go through the package 'qwen_omni_utils': pip install qwen-omni-utils"
        ) from error
    return function


def _load_media(
    example: Example, encoder: Encoder, process: ProcessMedia, use_audio_in_video: bool
) -> _Media:
    turns = fill_media(example, encoder, lambda ref: _part_for_package(ref, encoder))
    output = call(
        process,
        turns,
        use_audio_in_video=use_audio_in_video,
        return_video_kwargs=True,
        image_patch_size=getattr(getattr(encoder.processor, "image_processor", None), "patch_size", 14),
    )
    audio, images, videos = ([] if items is None else list(items) for items in output[:3])
    rates = output[3].get("fps") if len(output) > 3 else None
    return _Media(audio, images, videos, list(rates or []))


def _part_for_package(ref: MediaRef, encoder: Encoder) -> dict[str, Any]:
    settings, names = size_settings(ref.kind, ref.options), size_names(ref.kind, ref.options)
    options = {name: value for name, value in ref.options.items() if name not in names}
    ref, options = replace(ref, options=dict(options)), {**options, **settings}  # the package resizes
    if ref.kind == "image":
        return {**options, "image": load_image(ref.source)}
    if ref.kind == "audio":
        ((array, _),) = encoder.load([ref]).audios
        return {**options, "audio": array}
    path = local_path(ref.source)
    if path is not None and "frame_indices" not in options and "video_metadata" not in options:
        probe_video(path)  # raises for a missing or broken file
        if "num_frames" in options:
            options["nframes"] = options.pop("num_frames")
        return {**options, "video": path}
    (video,) = encoder.load([ref]).videos
    metadata, rates = video.metadata, {}
    if metadata.fps is not None:
        sampled = len(video.frames) / metadata.total_num_frames * metadata.fps
        rates = {"sample_fps": sampled, "raw_fps": metadata.fps}
    return {"video": [Image.fromarray(frame) for frame in video.frames], **rates, **settings}


def _encode(example: Example, media: _Media, encoder: Encoder, use_audio_in_video: bool) -> Sample:
    """Encode one example with the media of the package."""
    conversation, family = example.conversation, encoder.family
    text = encoder.render_conversation(conversation)
    encoder.check_placeholders(text, conversation)
    encoded = Encoded(text, conversation, {}, {})
    family.sort_output(encoded, _call(encoder, text, media, use_audio_in_video))
    if example.fake:
        first, after = fake_span(encoded.tokens["input_ids"].tolist(), example, encoder)
        encoded.tokens["attention_mask"][first:after] = 0
    counts = Counter(ref.kind for ref in conversation.media)
    counts["audio"] = len(media.audio)  # the audio of videos is counted too
    return replace(encoder.label_sample(encoded, example.key), num_items=counts)


def _call(encoder: Encoder, text: str, media: _Media, use_audio_in_video: bool) -> Mapping[str, Any]:
    processor, options = encoder.processor, dict[str, Any]()
    if media.audio:
        # Whole hops: a remainder counts in a batch with a longer clip, and does not count otherwise.
        hop = processor.feature_extractor.hop_length
        options["audio"] = [np.asarray(item)[: len(item) // hop * hop] for item in media.audio]
        options["audio_kwargs"] = {"sampling_rate": _SAMPLING_RATE}
    if media.images:
        options["images"] = media.images
    if media.videos:
        options["videos"] = media.videos
        options["videos_kwargs"] = {
            "do_sample_frames": False,
            "use_audio_in_video": use_audio_in_video,
            "input_data_format": "channels_first",
            "fps": media.rates[0] if media.rates else None,
        }
    output = dict(processor(text=[text], return_tensors="pt", **options))
    if len(media.rates) == len(media.videos) > 1:  # the processor takes one rate for all videos of a call
        seconds = [processor.video_processor.temporal_patch_size / rate for rate in media.rates]
        output["video_second_per_grid"] = torch.tensor(seconds, dtype=torch.float32)
    return output
