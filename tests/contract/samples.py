"""Media and conversations for the contract tests, the same at every run."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

SAMPLING_RATE = 16_000


def make_image(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """A colour ramp, so that a resized, cropped or shuffled image has other pixels."""
    across = np.linspace(0, 255, width, dtype=np.uint8)[None, :].repeat(height, axis=0)
    down = np.linspace(0, 255, height, dtype=np.uint8)[:, None].repeat(width, axis=1)
    return Image.fromarray(np.stack([across, down, 255 - across], axis=-1)).convert(mode)


def clip(
    frames: int, width: int = 64, height: int = 48, *, step: int = 12, fps: float = 24.0
) -> tuple[np.ndarray, dict[str, Any]]:
    """Decoded frames ``[frames, height, width, 3]`` and the metadata that says when each was shown.

    The frames are every ``step``-th one of a video of ``frames * step`` frames at ``fps``.
    """
    still = np.asarray(make_image(width, height), dtype=np.int32)
    video = np.stack([(still + 40 * number) % 256 for number in range(frames)]).astype(np.uint8)
    metadata = {
        "total_num_frames": frames * step,
        "fps": fps,
        "width": width,
        "height": height,
        "duration": frames * step / fps,
        "frames_indices": [number * step for number in range(frames)],
    }
    return video, metadata


def tone(samples: int, pitch: float = 440.0) -> np.ndarray:
    """A sine at `SAMPLING_RATE`, float32."""
    return (0.3 * np.sin(2 * np.pi * pitch * np.arange(samples) / SAMPLING_RATE)).astype(np.float32)


def turns(*kinds: str, question: str = "What is it?", answer: str = "A cat.") -> list[dict[str, Any]]:
    """A question with one part per name in ``kinds`` (image, video, audio) before its text, and an answer."""
    parts = [{"type": kind} for kind in kinds]
    return [
        {"role": "user", "content": [*parts, {"type": "text", "text": question}]},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]
