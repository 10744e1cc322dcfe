"""Which batch format each attention implementation of transformers needs.

The names are those of transformers: its own, kernels of the Hub (``owner/repository``, with ``@revision`` or
``:function``), and functions that users register with ``AttentionInterface``. A format is named after an
attention that takes it.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from packhorse.errors import ConfigError, require, suggest

ATTENTION = ("sdpa", "eager", "flash_attention_2", "flex_attention", "varlen")
"""The batch formats of packs; each is also the name of an attention."""

CONTIGUOUS = ("flash_attention_2", "varlen")
"""The formats that say where documents begin; the others have a mask."""

FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
"""The flash attentions of transformers that are packages; all take the same arguments."""

NAMES = tuple(dict.fromkeys([*ATTENTION[:2], *FLASH, *ATTENTION[2:]]))

_HUB_KERNEL = re.compile(r"[^/:|\s]+/[^/:|\s]+(:[^/:|\s]+)?")
PAGED = "paged|"
"""How names of attention for generation begin."""

_declared: dict[str, str] = {}


def is_hub_kernel(attn_implementation: str) -> bool:
    """Return whether the name is one of a kernel of the Hub: ``owner/repository[@revision][:function]``."""
    return _HUB_KERNEL.fullmatch(attn_implementation) is not None


def declare_batch_format(attn_implementation: str, batch_format: str) -> None:
    """Say which batches a function registered with transformers' ``AttentionInterface`` takes.

    Args:
        attn_implementation: the name that it is registered with, or a kernel of the Hub.
        batch_format: one of :data:`ATTENTION`. ``"varlen"`` and ``"flash_attention_2"``: the function keeps
            the documents apart that ``cu_seq_lens_q`` separates, is causal, and honours ``sliding_window``.
            The others: it applies the mask of the batch.

    Raises:
        ConfigError: the format is unknown, the name is one of transformers, no function is registered, or no
            function for its mask.
    """
    if batch_format not in ATTENTION:
        expected = f"expected one of {', '.join(ATTENTION)}{suggest(batch_format, ATTENTION)}"
        raise ConfigError.of("batch_format", batch_format, expected)
    if attn_implementation in NAMES or attn_implementation.startswith(PAGED):
        why = "it is a name of transformers: register the function with a name of its own"
        raise ConfigError.of("attn_implementation", attn_implementation, why)
    if attn_implementation not in require("transformers", "train").AttentionInterface():
        why = "no function has this name: transformers.AttentionInterface.register(name, function) before"
        raise ConfigError.of("attn_implementation", attn_implementation, why)
    masks = require("transformers.masking_utils", "train").AttentionMaskInterface()
    # Without one, transformers passes no mask where it builds the mask itself (Gemma 3 and 4).
    if batch_format not in CONTIGUOUS and attn_implementation not in masks:
        why = (
            "transformers builds no mask for it: transformers.AttentionMaskInterface.register(name, mask) "
            f"before, with the mask of {batch_format!r}"
        )
        raise ConfigError.of("attn_implementation", attn_implementation, why)
    _declared[attn_implementation] = batch_format


def find_batch_format(attn_implementation: str) -> str | None:
    """Return the format in which packs are collated for an attention; None if that is unknown.

    >>> find_batch_format("flash_attention_3"), find_batch_format("kernels-community/vllm-flash-attn3")
    ('flash_attention_2', 'flash_attention_2')
    >>> find_batch_format("paged|eager") is None
    True
    """
    if attn_implementation in ATTENTION:
        return attn_implementation
    if attn_implementation in FLASH:
        return "flash_attention_2"
    if attn_implementation in _declared:
        return _declared[attn_implementation]
    if not is_hub_kernel(attn_implementation):
        return None
    registered = _registered_functions().get(attn_implementation)
    if registered is None:  # not loaded yet: transformers too goes by the name
        return "flash_attention_2" if "flash" in attn_implementation.partition(":")[0] else None
    flash = require("transformers.integrations.flash_attention", "train").flash_attention_forward
    return "flash_attention_2" if registered is flash else None


def batch_format_of(attn_implementation: str, also: tuple[str, ...] = ()) -> str:
    """Return the format in which packs are collated for an attention; ``also`` are more values to name.

    Raises:
        ConfigError: the name is unknown, packs cannot be collated for it, or it is a function of its own
            whose format is not declared.
    """
    known = find_batch_format(attn_implementation)
    if known is not None:
        return known
    if attn_implementation == "auto" and "auto" not in also:
        why = "leave it out: the default is the model's, which packhorse.prepare(model) sets"
    elif attn_implementation.startswith(PAGED):
        why = f"it is for generation; packs can be collated for one of {', '.join(NAMES)}"
    elif attn_implementation in _registered_functions() or is_hub_kernel(attn_implementation):
        why = (
            "how it keeps the documents of a pack apart is unknown. Call packhorse.integrations.attention."
            f"declare_batch_format({attn_implementation!r}, 'varlen') if it honours cu_seq_lens_q, or 'sdpa' "
            f"if it applies a mask [B, 1, S, S]; or use one of {', '.join(NAMES)}"
        )
    else:
        choices = ", ".join((*also, *NAMES))
        hint = suggest(attn_implementation, [*also, *NAMES, *_registered_functions()])
        why = f"expected one of {choices}, a flash kernel of the Hub ('kernels-community/flash-attn2'){hint}"
    raise ConfigError.of("attn_implementation", attn_implementation, why)


def _registered_functions() -> dict[str, Any]:
    """Return the functions that are registered with transformers, if it is imported."""
    if "transformers" not in sys.modules:
        return {}
    return dict(require("transformers", "train").AttentionInterface())
