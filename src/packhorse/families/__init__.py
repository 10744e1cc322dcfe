"""Model families: what differs from one processor to the next, and nothing else.

``Encoder(processor)`` finds the family of a processor; ``Encoder(processor).encode(conversation)`` makes one
sample. Importing this imports neither torch nor transformers.
"""

from typing import Any

from packhorse.chat import is_tokenizer
from packhorse.families.encoder import Encoded, Encoder, Family
from packhorse.families.gemma3 import Gemma3
from packhorse.families.gemma4 import Gemma4
from packhorse.families.generic import Generic, generic_for
from packhorse.families.internvl import InternVL
from packhorse.families.kimi_k25 import KimiK25, KimiK25Remote
from packhorse.families.kimi_vl import KimiVL
from packhorse.families.llava_onevision import LlavaOnevision
from packhorse.families.media_sizes import LoadedMedia
from packhorse.families.nemotron_omni import NemotronOmni
from packhorse.families.nemotron_parse import NemotronParse
from packhorse.families.phi4_mm import Phi4MM
from packhorse.families.processors import check_transformers
from packhorse.families.qwen3_omni import Qwen3Omni
from packhorse.families.qwen_vl import Qwen2VL, Qwen3VL
from packhorse.families.smolvlm import SmolVLM
from packhorse.media import MediaSize

__all__ = [
    "FAMILIES",
    "Encoded",
    "Encoder",
    "Family",
    "Generic",
    "LoadedMedia",
    "MediaSize",
    "family_of",
]

FAMILIES: tuple[Family, ...] = (
    Qwen2VL(),
    Qwen3VL(),
    Qwen3Omni(),
    KimiVL(),
    KimiK25(),
    KimiK25Remote(),
    Gemma3(),
    Gemma4(),
    LlavaOnevision(),
    InternVL(),
    SmolVLM(),
    Phi4MM(),
    NemotronParse(),
    NemotronOmni(),
)
"""All families but the generic one. A new family is added here."""


def family_of(processor: Any) -> Family:
    """The family that serves a processor, found by the names of its class and its base classes.

    An object around a known processor (``.processor``) is served as that one if it delivers the same
    tokenizer and image processor, so that the family's facts hold for it. Any other gets the generic family,
    with one warning per class that says what is not exact; a tokenizer gets one that takes no media.

    Raises:
        ConfigError: the installed transformers is too old for the family.
    """
    inner = getattr(processor, "processor", None)
    shown = ("tokenizer", "image_processor")
    see_through = inner is not None and all(
        getattr(processor, name, None) is getattr(inner, name, None) is not None for name in shown
    )
    for candidate in (processor, inner) if see_through else (processor,):
        names = [kind.__name__ for kind in type(candidate).__mro__]
        for name in names:
            for family in FAMILIES:
                if name in family.processor_classes:
                    check_transformers(family.name, family.min_transformers)
                    return family
    kind: type = type(processor)
    return generic_for(kind, is_tokenizer(processor))
