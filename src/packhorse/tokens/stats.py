"""What a set of examples holds, estimated from the rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from packhorse.conversation import parse_conversation
from packhorse.types import MediaRef

# Without better knowledge a token is three characters and a medium 500 tokens.
CHARS_PER_TOKEN = 3
TOKENS_PER_MEDIUM = 500

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
        conversation = parse_conversation(example)
        kinds = [ref.kind for ref in conversation.media]
        stats["n_images"] += kinds.count("image")
        stats["n_videos"] += kinds.count("video")
        stats["n_text_only"] += not kinds
        tokens = example.get("_text_tokens")
        if tokens is None:
            stats["n_missing_text_tokens"] += 1
            tokens = sum(len(message.text) for message in conversation.messages) // CHARS_PER_TOKEN
        stats["n_text_tokens"] += tokens
        if kinds:
            meta = example.get("mm_inputs_meta")
            stats["n_missing_mm_inputs_meta"] += meta is None
            stats["n_media_tokens"] += _media_tokens(conversation.media, meta or {})
    return stats


def add_stats(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of several statistics, key by key; all zero for none."""
    total = dict.fromkeys(STAT_KEYS, 0)
    for part in parts:
        for name in STAT_KEYS:
            total[name] += part[name]
    return total


def _media_tokens(media: Iterable[MediaRef], meta: Mapping[str, Any]) -> int:
    entries = {
        "image": iter(meta.get("images_meta") or ()),
        "video": iter(meta.get("videos_meta") or ()),
        "audio": iter(()),
    }
    return sum(_tokens_of(next(entries[ref.kind], {})) for ref in media)


def _tokens_of(entry: Any) -> int:
    if entry is None:
        return 0
    if isinstance(entry, Mapping) and "n_tokens" in entry:
        return int(entry["n_tokens"])
    return TOKENS_PER_MEDIUM
