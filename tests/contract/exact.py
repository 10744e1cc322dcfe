"""Sizes and conversations for the proof that counting is exact, and the two sides that are compared.

One side is the processor's own call; the other is the text that Packhorse predicts from sizes alone,
tokenised with the processor's tokenizer. A rejection is compared like any other result.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from contract.processors import FAMILIES, build
from contract.samples import tone
from packhorse.errors import BadSample
from packhorse.families import Encoder, LoadedMedia
from packhorse.media import VideoFrames, VideoMetadata
from packhorse.types import Conversation, MediaRef, Message, TextPart

Ids = list[int] | str
"""The tokens of a sample, or why it has none."""

_SIDES = (
    *(1, 2, 3, 5, 7, 9, 10, 13, 14, 15, 20, 27, 28, 29, 31, 32, 33, 40, 55, 56, 57, 70, 84, 100, 112, 113),
    *(150, 199, 200, 201, 223, 224, 225, 280, 336, 400, 447, 448, 449, 512, 600, 640, 768, 800, 896, 1000),
    *(1024, 1280, 1600, 2000, 3000, 4096, 5000, 6000, 8000),
)
_MOST_PIXELS = 8000 * 200
_ALL_SIZES = [(h, w) for h in _SIDES for w in _SIDES if h * w <= _MOST_PIXELS]
_EDGES = ((1, 1), (8000, 200), (200, 8000), (1, 200), (1, 201), (200, 1), (201, 1), (1, 8000), (8000, 1))


def image_sizes(every: int) -> list[tuple[int, int]]:
    """Heights and widths from 1 x 1 to 8000 x 200, all shapes; every how manieth of nearly 3,000."""
    return sorted({*_ALL_SIZES[::every], *_EDGES})


def predict_ids(encoder: Encoder, text: str, sizes: Any) -> Ids:
    """The ids of a rendered text, from the sizes of its media; "rejected" where the family rejects them."""
    try:
        whole = encoder.expand(text, sizes)
    except BadSample as error:
        return "rejected" if error.reason == "sample_failed" else error.reason
    ids = encoder.tokenize(whole, rendered=text)
    outline, omitted = encoder.outline(text, sizes)
    assert len(encoder.tokenize(outline, rendered=text)) + omitted == len(ids)
    return ids


def really(encoder: Encoder, text: str, media: LoadedMedia) -> Ids:
    """The ids that the processor's own call gives; "rejected" where it raises."""
    try:
        ids: list[int] = encoder.family.call(encoder, text, media)["input_ids"][0].tolist()
        return ids
    except (ValueError, ZeroDivisionError):
        return "rejected"


def render(encoder: Encoder, *kinds: str) -> str:
    """A question with media, whose neighbours melt into them where they can, and an answer."""
    parts = [part for kind in kinds for part in ({"type": kind}, {"type": "text", "text": "\n5: the"})]
    turns = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
    ]
    return encoder.render(turns)


def video(frames: int, fps: float | None, step: int, height: int = 20, width: int = 30) -> VideoFrames:
    """Frames that are every ``step``-th one of a video."""
    total = frames * step
    metadata = VideoMetadata(
        total_num_frames=total,
        fps=fps,
        width=width,
        height=height,
        duration=None if fps is None else total / fps,
        video_backend=None,
        frames_indices=tuple(range(0, total, step)),
    )
    return VideoFrames(np.zeros((frames, height, width, 3), np.uint8), metadata)


_TEXTS = (
    "What is it?",
    "\n",
    "\n\nAnd this?",
    " the cat",
    "5",
    ": 12 seconds>",
    " ",
    "这是什么\n",
    "\U0001f914 a",
    "Look:\n\n\n",
    "<0.5",
)


def conversations(name: str, number: int, files: dict[str, Path]) -> Iterator[Conversation]:
    """Conversations of all shapes that the family's kinds of media allow, a few of which it rejects."""
    draw = random.Random(name)
    for at in range(number):
        system = [Message("system", (TextPart("Be brief."),))] if draw.random() < 0.3 else []
        turns: list[Message] = []
        for _ in range(draw.choice((1, 1, 2, 3))):
            turns += (Message("user", _turn(name, draw, files)), Message("assistant", (_words(draw),)))
        yield Conversation((*system, *turns), f"{name}/{at}")


def _turn(name: str, draw: random.Random, files: dict[str, Path]) -> tuple[Any, ...]:
    kinds = sorted(FAMILIES[name].modalities)
    parts: list[Any] = [_words(draw)]
    for _ in range(draw.choice((0, 0, 1, 1, 1, 2))):
        if name == "nemotron_parse" and draw.random() < 0.7:
            continue  # it takes one page
        parts.append(_media_item(draw.choice(kinds), draw, files))
        if draw.random() < 0.6:
            parts.append(_words(draw))
    return tuple(parts)


def _words(draw: random.Random) -> TextPart:
    return TextPart("".join(draw.choices(_TEXTS, k=draw.randint(1, 3))))


def _media_item(kind: str, draw: random.Random, files: dict[str, Path]) -> MediaRef:
    if kind == "image":
        if draw.random() < 0.3:
            return MediaRef("image", str(files[draw.choice(("wide.png", "tall.png", "rgba.png"))]))
        most = draw.choice((30, 300, 900))
        return MediaRef("image", Image.new("RGB", (draw.randint(1, most), draw.randint(1, most))))
    if kind == "audio":
        if draw.random() < 0.4:
            return MediaRef("audio", str(files[draw.choice(("second.wav", "studio.wav"))]))
        return MediaRef("audio", (tone(draw.choice((100, 400, 5_000, 16_001, 40_000))), 16_000))
    if draw.random() < 0.7:
        options = draw.choice(({}, {}, {"fps": 3}, {"num_frames": 4}, {"frame_indices": [0, 2, 4]}))
        return MediaRef("video", str(files[draw.choice(("video.mp4", "slow.mp4"))]), options)
    frames = np.zeros((draw.randint(2, 5), draw.randint(20, 60), draw.randint(20, 60), 3), np.uint8)
    return MediaRef("video", frames, draw.choice(({}, {"fps": 2}, {"fps": 29.97})))


def with_video_settings(name: str, settings: dict[str, Any]) -> Any:
    """A processor of the family whose video processor has these settings (``fps`` or ``num_frames``)."""
    made = build(name)
    owner = made.video_processor
    for key, value in settings.items():
        setattr(owner, key, value)
    if settings and name != "smolvlm":  # most raise if both are set; SmolVLM's num_frames is a limit
        setattr(owner, "fps" if "num_frames" in settings else "num_frames", None)
    return made


def samples_frames(video_processor: Any) -> bool:
    """Whether frames of a file are sampled; a rate or number that is set asks for it."""
    owner = video_processor
    return bool(owner.do_sample_frames) or owner.fps is not None or owner.num_frames is not None


def own_call(encoder: Encoder, path: Path) -> tuple[list[int], list[int]]:
    """Frames and ids of the processor's own call on a video file, which transformers decodes itself."""
    processor, family = encoder.processor, encoder.family
    call: dict[str, Any] = {"do_sample_frames": samples_frames(processor.video_processor)}
    seen = processor.video_processor(videos=[str(path)], return_tensors="pt", return_metadata=True, **call)
    (metadata,) = seen["video_metadata"]
    frames = range(metadata.total_num_frames) if metadata.frames_indices is None else metadata.frames_indices
    if family.name == "nemotron_omni":  # writes times of frames only if it is given the metadata
        call["video_metadata"] = metadata
    text = render(encoder, "video")
    arguments = family.text_arguments(encoder, text) | {"videos_kwargs": call}
    whole = processor(text=[text], videos=[[str(path)]], return_tensors="pt", **arguments)
    return [int(number) for number in frames], whole["input_ids"][0].tolist()
