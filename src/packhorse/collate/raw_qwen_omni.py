"""The collate function for Qwen3-Omni, whose media go through the model's own package ``qwen_omni_utils``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from packhorse.chat import is_transformers
from packhorse.collate.finish import named
from packhorse.collate.padded import pad_samples
from packhorse.collate.processor_call import call, pad_token_id, padding_side, plain_turns
from packhorse.collate.raw_default import finish
from packhorse.collate.raw_limit import Batch
from packhorse.collate.raw_media import count_turns
from packhorse.collate.raw_prepare import (
    Opened,
    Ready,
    check_text,
    hide_fakes,
    in_order,
    open_batch,
    rendered,
)
from packhorse.errors import MissingDependency
from packhorse.families import Encoder, Family, LoadedMedia, family_of
from packhorse.media import load_image, local_path, probe_video
from packhorse.types import MediaRef

_SAMPLING_RATE = 16_000  # of the sound that the package loads


@dataclass(frozen=True, slots=True)
class _Media:
    """What the package made of one conversation's media; ``rates`` are frames per second of its videos."""

    audio: list[Any]
    images: list[Any]
    videos: list[Any]
    rates: list[float]


def qwen3_omni_collate_fn(
    examples: Sequence[Mapping[str, Any]], processor: Any, use_audio_in_video: bool = False
) -> Batch:
    """Sound, images and videos through ``qwen_omni_utils``, then through the processor.

    The package resizes images and frames itself before the processor does, and decodes videos that are files
    (at 2 frames per second, unless a part says ``fps`` or ``num_frames``); all else is loaded by Packhorse.
    :func:`~packhorse.collate_fns.default_collate_fn` takes the same processor without the package.

    Args:
        examples: in the documented format; they are not changed.
        processor: a Qwen3-Omni processor.
        use_audio_in_video: take the sound of videos too, interleaved with their frames; the videos must then
            be files with a sound track.

    Returns:
        The batch as :func:`~packhorse.collate_fns.default_collate_fn` describes it, padded to the longest
        sample; pixels stay as the processor makes them.

    Raises:
        MissingDependency: (an ``ImportError``) ``qwen_omni_utils`` is not installed.
        BadSample: (a ``ValueError``) a media item cannot be loaded, or text and media do not agree.
    """
    if not examples:
        return {}
    process = _process_mm_info()
    family = family_of(processor)
    found = [_ready(one, processor, family) for one in open_batch(examples, processor, family)]
    ready = in_order(found, family)
    media = [_processed(one, process, processor, use_audio_in_video) for one in ready]
    texts = rendered(ready, processor, family)
    if not is_transformers(processor):
        batch = _plain_call(processor, texts, media, use_audio_in_video)
    elif not any(one.videos for one in media):
        batch = _call(processor, texts, media, use_audio_in_video)
    else:
        # The processor knows one rate for all videos of a call.
        samples = [
            _call(processor, [text], [one], use_audio_in_video)
            for text, one in zip(texts, media, strict=True)
        ]
        pad, side = pad_token_id(processor), padding_side(processor)
        batch = pad_samples(samples, family, pad, side=side)
    # The sound of a video counts too.
    sounds = [len(one.audio) for one in media]
    counts = count_turns([one.turns for one in ready])._replace(audios=sounds)
    return finish(hide_fakes(batch, ready, processor, family), ready, processor, family, counts)


def _process_mm_info() -> Callable[..., Any]:
    try:
        found: Callable[..., Any] = importlib.import_module("qwen_omni_utils").process_mm_info
    except ImportError as error:
        raise MissingDependency(
            "Qwen3-Omni's media go through the package 'qwen_omni_utils': pip install qwen-omni-utils"
        ) from error
    return found


def _ready(one: Opened, processor: Any, family: Family) -> Ready:
    """The conversation with media as the package takes them."""
    with named(one.conversation.key):
        family.check(one.conversation)
        check_text(one.conversation, processor, family)
        turns = _turns(one, processor, family)
    return Ready(one.conversation, turns, LoadedMedia([], [], []), one.fake, one.records)


def _turns(one: Opened, processor: Any, family: Family) -> list[dict[str, Any]]:
    turns = []
    for turn, message in zip(plain_turns(one.turns, family), one.conversation.messages, strict=True):
        content = turn["content"]
        if not isinstance(content, str):
            parts = zip(content, message.parts, strict=True)
            content = [
                {**part, **_for_package(ref, processor, family)} if isinstance(ref, MediaRef) else part
                for part, ref in parts
            ]
        turns.append({**turn, "content": content})
    return turns


def _for_package(ref: MediaRef, processor: Any, family: Family) -> dict[str, Any]:
    options = dict(ref.options)
    if ref.kind == "image":
        return {**options, "image": load_image(ref.source)}
    if ref.kind == "audio":
        ((array, _),) = Encoder(processor, family).load([ref]).audios
        return {**options, "audio": array}
    path = local_path(ref.source)
    if path is not None and "frame_indices" not in options and "video_metadata" not in options:
        probe_video(path)  # a file that is missing or broken is named here
        if "num_frames" in options:
            options["nframes"] = options.pop("num_frames")
        return {**options, "video": path}
    (video,) = Encoder(processor, family).load([ref]).videos
    told, taken = video.metadata, len(video.frames)
    rates = (
        {}
        if told.fps is None
        else {
            "sample_fps": taken / told.total_num_frames * told.fps,
            "raw_fps": told.fps,
        }
    )
    return {"video": [Image.fromarray(frame) for frame in video.frames], **rates}


def _processed(one: Ready, process: Callable[..., Any], processor: Any, use_audio_in_video: bool) -> _Media:
    patch = getattr(getattr(processor, "image_processor", None), "patch_size", 14)
    found = call(
        process,
        one.turns,
        use_audio_in_video=use_audio_in_video,
        return_video_kwargs=True,
        image_patch_size=patch,
    )
    audio, images, videos = ([] if items is None else list(items) for items in found[:3])
    rates = found[3].get("fps") if len(found) > 3 else None
    return _Media(audio, images, videos, list(rates or []))


def _plain_call(processor: Any, texts: list[str], media: Sequence[_Media], use_audio_in_video: bool) -> Batch:
    """Any other processor: plain options, and only the media that there are."""
    given: dict[str, Any] = {
        "audio": [item for one in media for item in one.audio],
        "images": [item for one in media for item in one.images],
        "videos": [item for one in media for item in one.videos],
    }
    options = {name: items for name, items in given.items() if items}
    if given["videos"]:
        options["use_audio_in_video"] = use_audio_in_video
    return dict(call(processor, text=texts, return_tensors="pt", padding=True, **options))


def _call(processor: Any, texts: list[str], media: Sequence[_Media], use_audio_in_video: bool) -> Batch:
    options: dict[str, Any] = {"text_kwargs": {"padding": True}}
    images = [item for one in media for item in one.images]
    videos = [item for one in media for item in one.videos]
    rates = [rate for one in media for rate in one.rates]
    # Whole hops: a remainder counts in a batch with a longer clip, and does not count otherwise.
    hop = processor.feature_extractor.hop_length
    audio = [np.asarray(item)[: len(item) // hop * hop] for one in media for item in one.audio]
    if audio:
        options |= {"audio": audio, "audio_kwargs": {"sampling_rate": _SAMPLING_RATE}}
    if images:
        options["images"] = images
    if videos:
        options["videos"] = videos
        options["videos_kwargs"] = {
            "do_sample_frames": False,
            "use_audio_in_video": use_audio_in_video,
            "input_data_format": "channels_first",
            "fps": rates[0] if rates else None,
        }
    batch = dict(processor(text=texts, return_tensors="pt", **options))
    if len(rates) == len(videos) > 1:
        seconds = [processor.video_processor.temporal_patch_size / rate for rate in rates]
        batch["video_second_per_grid"] = torch.tensor(seconds, dtype=torch.float32)
    return batch
