"""Calls a processor the way its own documentation asks, so that tests have an answer to compare with.

Processors differ in how media are handed over; the differences are here and not in the tests. Images and
videos are nested per sample. Video metadata is a flat list (for Nemotron one object), decoded frames are not
sampled again, and their layout is named because a video one pixel high is misread otherwise. BOS is not added
where the template has written it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from contract.chat_templates import TEMPLATES
from contract.processors import FAMILIES, processor
from contract.samples import SAMPLING_RATE


@dataclass(frozen=True)
class Raw:
    """One sample before any processing; media in the order of their placeholders."""

    conversation: list[dict[str, Any]]
    images: tuple[Image.Image, ...] = ()
    clips: tuple[tuple[np.ndarray, dict[str, Any]], ...] = ()
    audios: tuple[np.ndarray, ...] = ()


def render(name: str, conversation: list[dict[str, Any]], **options: Any) -> str:
    """The text with one placeholder per media item; without a chat template, the joined texts."""
    if FAMILIES[name].chats:
        # By name, because SmolVLM's processor takes another template when it sees a video.
        options.setdefault("chat_template", TEMPLATES[name])
        text: str = processor(name).apply_chat_template(conversation, tokenize=False, **options)
        return text
    parts = [part for message in conversation for part in message["content"]]
    return "".join(part["text"] for part in parts if part["type"] == "text")


def own_batch(name: str, samples: Sequence[Raw], **options: Any) -> Any:
    """The processor's own tensors for ``samples``, padded to the longest unless ``options`` say otherwise."""
    made = processor(name)
    media: dict[str, Any] = {}
    if any(sample.images for sample in samples):
        media["images"] = [list(sample.images) for sample in samples]
    clips = [clip for sample in samples for clip in sample.clips]
    if clips:
        media["videos"] = [[frames for frames, _ in sample.clips] for sample in samples]
        media["videos_kwargs"] = {
            "video_metadata": _metadata(name, [metadata for _, metadata in clips]),
            "do_sample_frames": False,
            "input_data_format": "channels_last",
        }
    audios = [audio for sample in samples for audio in sample.audios]
    if audios:
        media["audio"] = audios
        media["audio_kwargs"] = {"sampling_rate": SAMPLING_RATE}
    text = [render(name, sample.conversation) for sample in samples]
    settings = {"padding": len(samples) > 1, "add_special_tokens": False, **options}
    if FAMILIES[name].bundled:
        # Not as plain arguments: those reach the audio extractor too, which would pad and cut by them.
        settings = {"text_kwargs": settings}
    return made(text=text, return_tensors="pt", **settings, **media)


def _metadata(name: str, clips: list[dict[str, Any]]) -> Any:
    from transformers.video_utils import VideoMetadata

    if name == "nemotron_omni":
        (only,) = clips
        return VideoMetadata(**only)
    return clips
