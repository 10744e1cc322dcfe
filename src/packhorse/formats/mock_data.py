"""Random conversations about random images, to try out a model or a recipe without data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from logging import getLogger
from typing import Any

import numpy as np
from PIL import Image

from packhorse.errors import ConfigError

logger = getLogger("packhorse.mock")

_WORDS = (
    *("a", "the", "red", "blue", "small", "large", "round", "old", "house", "road", "tree", "horse"),
    *("stands", "near", "under", "and", "with", "two"),
)
_ANSWER_WORDS = 256


def build_mock_vlm_dataset(
    *,
    num_samples: int = 10,
    num_images_per_sample: int = 1,
    image_size: tuple[int, int] = (256, 256),
    prompt: str = "Describe this image.",
    responses: Sequence[str] | None = None,
    max_length: int | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> list[dict[str, Any]]:
    """Make examples with random images, the same for the same arguments.

    Args:
        num_samples: how many examples.
        num_images_per_sample: images in each; 0 gives text alone.
        image_size: width and height of every image, in pixels.
        prompt: the user's text after the images.
        responses: answers, of which each example gets one at random.
        max_length: without ``responses``: words of each answer (256 if None).
        seed: of images and answers.
        **kwargs: ignored, and named in the log.

    Returns:
        Examples ``{"conversation": [user: images + prompt, assistant: answer]}``.
    """
    if kwargs:
        logger.warning("build_mock_vlm_dataset ignores %s", ", ".join(sorted(kwargs)))
    for name, number in (("num_samples", num_samples), ("num_images_per_sample", num_images_per_sample)):
        if number < 0:
            raise ConfigError.of(name, number, "expected at least 0")
    if responses is not None and not responses:
        raise ConfigError.of("responses", responses, "give at least one answer, or None for random words")
    random = np.random.default_rng(seed)
    width, height = image_size
    length = _ANSWER_WORDS if max_length is None else max_length

    def image() -> Image.Image:
        return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))

    def example() -> dict[str, Any]:
        parts: list[dict[str, Any]] = [
            {"type": "image", "image": image()} for _ in range(num_images_per_sample)
        ]
        if responses is None:
            answer = " ".join(random.choice(_WORDS, length))
        else:
            answer = responses[int(random.integers(len(responses)))]
        return {
            "conversation": [
                {"role": "user", "content": [*parts, {"type": "text", "text": prompt}]},
                {"role": "assistant", "content": [{"type": "text", "text": answer}]},
            ]
        }

    return [example() for _ in range(num_samples)]


@dataclass(slots=True)
class MockVlmDatasetConfig:
    """Settings of :func:`build_mock_vlm_dataset`."""

    num_samples: int = 10
    num_images_per_sample: int = 1
    image_size: tuple[int, int] = (256, 256)
    prompt: str = "Describe this image."
    responses: Sequence[str] | None = None
    max_length: int | None = None
    seed: int = 0

    def build(self) -> list[dict[str, Any]]:
        """Make the examples."""
        return build_mock_vlm_dataset(**{field.name: getattr(self, field.name) for field in fields(self)})
