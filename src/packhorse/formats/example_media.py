"""Examples with their media loaded (:func:`preload_media`), or with a fake image (:func:`inject_fake_image`).

Under FSDP or ZeRO the vision tower has to run on every rank in every step, so a text-only sample gets a small
white image; later stages hide its tokens from attention (``_injected_fake``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from PIL import Image

from packhorse.formats.conversation import parse_conversation, prepend_part, replace_media
from packhorse.media.failure import DEFAULT_MAX_BYTES
from packhorse.media.images import DEFAULT_MAX_PIXELS
from packhorse.media.loading import load_media, placeholder_media
from packhorse.media.sampling import VideoSampling
from packhorse.media.video import VideoFrames
from packhorse.types import Conversation, MediaRef


def preload_media(
    example: Mapping[str, Any],
    *,
    sampling: VideoSampling | None = None,
    sampling_rate: int | None = None,
    exif: bool = True,
    backend: str = "auto",
    max_pixels: int | None = DEFAULT_MAX_PIXELS,
    max_bytes: int | None = DEFAULT_MAX_BYTES,
) -> dict[str, Any]:
    """A copy of an example with its media decoded in place; the arguments are those of :func:`load_media`.

    An image part's ``image`` becomes an RGB PIL image; a video part's ``video`` a list of PIL frames, with
    ``video_metadata`` (a dict, for the processor) next to it; an audio part's ``audio`` becomes
    (samples, rate). All other fields stay. Preloading twice gives the same as once. A video is in memory
    twice for a moment: as one array, which ``max_bytes`` limits, and as PIL frames.

    Raises:
        BadSample: as :func:`load_media`; ``wrong_format`` where the example is not in the documented format.
    """

    def load(ref: MediaRef) -> dict[str, Any]:
        media_item = load_media(
            ref,
            sampling=sampling,
            sampling_rate=sampling_rate,
            exif=exif,
            backend=backend,
            max_pixels=max_pixels,
            max_bytes=max_bytes,
        )
        if isinstance(media_item, VideoFrames):
            frames = [Image.fromarray(frame) for frame in media_item.frames]
            return {"video": frames, "video_metadata": media_item.metadata.as_dict()}
        return {ref.kind: media_item}

    return replace_media(example, load)


FAKE_IMAGE_SIZE = 56
"""Two merged patches of 28 pixels a side: four tokens for the Qwen2-VL family."""


def has_image(conversation: Conversation) -> bool:
    """Whether there is an image or a video in it, for which the vision tower runs."""
    return any(ref.kind in ("image", "video") for ref in conversation.media)


def inject_fake_image(example: Mapping[str, Any]) -> Mapping[str, Any]:
    """Put the fake image at the front of the first user turn of a sample that shows no image.

    Args:
        example: a sample in the documented format. One with an image or a video comes back itself; audio
            does not count, since it does not run the vision tower.

    Returns:
        A copy with the image part and ``_injected_fake=True``. A text turn becomes a list of parts. Where
        there is no user turn, one with the image alone is put after the leading system turns.

    Raises:
        BadSample: ``wrong_format`` where the example is not in the documented format.
    """
    conversation = parse_conversation(example)
    if has_image(conversation):
        return example
    roles = [message.role for message in conversation.messages]
    fake = placeholder_media("image", (FAKE_IMAGE_SIZE, FAKE_IMAGE_SIZE))
    image_part = {"type": "image", "image": fake.source}
    if "user" in roles:
        return {**prepend_part(example, roles.index("user"), image_part), "_injected_fake": True}
    leading = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    turns = list(example["conversation"])
    turns.insert(leading, {"role": "user", "content": [image_part]})
    return {**example, "conversation": turns, "_injected_fake": True}
