"""What a set of examples holds, estimated from the rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from packhorse.conversation import parse_conversation
from packhorse.tokens.estimate import CHARS_PER_TOKEN, Outline, media_tokens

STAT_KEYS = (
    "n_images",
    "n_videos",
    "n_text_only",
    "n_text_tokens",
    "n_media_tokens",
    "n_missing_text_tokens",
    "n_missing_mm_inputs_meta",
)


def collect_sample_stats(examples: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Count media and estimate tokens over ``examples``: one pass, no file is opened.

    Text tokens are an example's ``_text_tokens``, else characters // 3. A medium's tokens are the
    ``n_tokens`` of its entry in ``mm_inputs_meta``; an entry that is null counts 0; anything else 500.

    Returns:
        ``n_images``, ``n_videos``, ``n_text_only``, ``n_text_tokens``, ``n_media_tokens``,
        ``n_missing_text_tokens`` and ``n_missing_mm_inputs_meta`` (examples that lack the field; the latter
        only among those with media).
    """
    stats = dict.fromkeys(STAT_KEYS, 0)
    for example in examples:
        # Parsed, not merely outlined: whoever loads examples wants to hear of one that is none.
        conversation = parse_conversation(example)
        kinds = [ref.kind for ref in conversation.media]
        stats["n_images"] += kinds.count("image")
        stats["n_videos"] += kinds.count("video")
        stats["n_text_only"] += not kinds
        characters = sum(len(message.text) for message in conversation.messages)
        tokens = example.get("_text_tokens")
        if tokens is None:
            stats["n_missing_text_tokens"] += 1
            tokens = characters // CHARS_PER_TOKEN
        stats["n_text_tokens"] += tokens
        if kinds:
            seen = Outline(characters, kinds.count("image"), kinds.count("video"), kinds.count("audio"))
            meta = example.get("mm_inputs_meta")
            stats["n_missing_mm_inputs_meta"] += meta is None
            stats["n_media_tokens"] += media_tokens(seen, meta)[0]
    return stats


def add_stats(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of several statistics, key by key; all zero for none."""
    total = dict.fromkeys(STAT_KEYS, 0)
    for part in parts:
        for name in STAT_KEYS:
            total[name] += part[name]
    return total
