"""The collate function for Qwen2.5-VL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from packhorse.collate_fns.contract import call, is_transformers
from packhorse.collate_fns.default import Batch, finish
from packhorse.collate_fns.media import _extract_media_from_conversations
from packhorse.collate_fns.prepare import flat_options, grouped_options, hide_fakes, make_ready, rendered
from packhorse.families import family_of


def qwen2_5_collate_fn(examples: Sequence[Mapping[str, Any]], processor: Any) -> Batch:
    """Render each conversation, then call the processor once with all texts, images and videos.

    Args:
        examples: in the documented format; they are not changed.
        processor: ``apply_chat_template(conversation, tokenize=False)`` gives a text, and
            ``processor(text=…, images=…, videos=…, padding=True, return_tensors="pt")`` the tensors.

    Returns:
        The batch as :func:`~packhorse.collate_fns.default_collate_fn` describes it, padded to the longest
        sample; pixels stay as the processor makes them.

    Raises:
        BadSample: (a ``ValueError``) a medium cannot be loaded, or text and media do not agree.
    """
    if not examples:
        return {}
    family = family_of(processor)
    ready = make_ready(examples, processor, family)
    images, videos = _extract_media_from_conversations([one.turns for one in ready])
    options: dict[str, Any] = {"images": images, "videos": videos}
    options = {name: value for name, value in options.items() if value is not None}
    if is_transformers(processor):
        options |= grouped_options(ready, processor, family)
        options["text_kwargs"] = {**options.get("text_kwargs", {}), "padding": True}
    else:
        options |= {"padding": True, **flat_options(ready, family)}
    batch = dict(call(processor, text=rendered(ready, processor, family), return_tensors="pt", **options))
    return finish(hide_fakes(batch, ready, processor, family), ready, processor, family)
