"""What encoding needs on its way, for one sample or for a batch.

Sound is put in its place, users' hooks are run, and the tokens that a fake image brought in are found (one
more rendering and tokenisation of the text).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from packhorse.errors import DATA_ERRORS, BadSample, ConfigError
from packhorse.families import Encoder
from packhorse.families.media_sizes import Sizes
from packhorse.formats.conversation import place_audio
from packhorse.types import Conversation, MediaRef

T = TypeVar("T")


def with_audio_placed(example: Mapping[str, Any], encoder: Encoder, key: str = "") -> Mapping[str, Any]:
    """The example with sound beside its conversation made a part of it (see :func:`place_audio`).

    Raises:
        BadSample: it cannot be told where the sound belongs.
    """
    if example.get("audio") is None:
        return example
    placeholders: list[str] = []
    with suppress(ConfigError):  # a small object by the name of a known class names none
        placeholders = [encoder.placeholders["audio"]] if "audio" in encoder.family.kinds else []
    return place_audio(example, placeholders, key)


def run_hook(hook: Callable[[dict[str, Any], Any], T], result: dict[str, Any], processor: Any) -> T:
    """What a user's hook makes of a processor's tensors.

    Raises:
        BadSample: the hook refuses the sample.
        ConfigError: it failed, or gives no ``input_ids`` back. A sample's fault cannot be told from a slip of
            the hook's author, which no other sample would mend.
    """
    try:
        made = hook(result, processor)
    except BadSample:
        raise
    except DATA_ERRORS as error:
        raise ConfigError(
            f"the post-tokenize hook failed: {type(error).__name__}: {error} (it may raise "
            "packhorse.errors.BadSample to refuse a sample)"
        ) from error
    if not isinstance(made, Mapping) or "input_ids" not in made:
        raise ConfigError(
            f"the post-tokenize hook gave back a {type(made).__name__} without input_ids: expected the "
            "tensors that it was given, changed as it likes"
        )
    return made


def fake_tokens(
    encoder: Encoder, ids: Sequence[int], conversation: Conversation, sizes: Sizes
) -> tuple[int, int]:
    """First and after-last token that the fake image brought into a sample, brackets and newlines included.

    They are what lies between the tokens that the conversation with the image and that without it have in
    common at their beginning and at their end. (A blank that the template writes only before a text, or that
    melts with the image's own newlines into one token, goes with them.)

    Args:
        encoder: made the ids.
        ids: of the sample, without padding.
        conversation: with the fake image, its first one.
        sizes: of its media, in the order of the text.

    Raises:
        BadSample: the chat template refuses the conversation without the image.
    """
    plain = _plain_ids(encoder, _without_first_image(conversation), sizes)
    first = _common(ids, plain)
    after = _common(ids[::-1], plain[first:][::-1])
    return first, len(ids) - after


def _plain_ids(encoder: Encoder, without: Conversation, sizes: Sizes) -> list[int]:
    """The tokens of the conversation without the fake image; its other media are expanded."""
    text = encoder.render_conversation(without)
    if without.media:
        if not encoder.family.exact:
            return [int(token) for token in encoder.encode(without).tokens["input_ids"]]
        fake = [kind for kind, _ in sizes].index("image")
        rest = [size for place, size in enumerate(sizes) if place != fake]
        text = encoder.expand(text, rest, without.key)
    return encoder.tokenize(text)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many items two sequences have in common at their beginning."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(left), len(right)))


def _without_first_image(conversation: Conversation) -> Conversation:
    messages = list(conversation.messages)
    for number, message in enumerate(messages):
        images = [p for p in message.parts if isinstance(p, MediaRef) and p.kind == "image"]
        if images:
            rest = tuple(part for part in message.parts if part is not images[0])
            messages[number : number + 1] = [replace(message, parts=rest)] if rest else []
            break
    return replace(conversation, messages=tuple(messages))
