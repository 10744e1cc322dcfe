"""Model families, one file each: what differs from one processor to the next.

``Encoder(processor)`` finds the family of a processor; ``Encoder(processor).encode(conversation)`` encodes
one sample. Importing this imports neither torch nor transformers.
"""

from packhorse.chat import Processor, is_tokenizer
from packhorse.families.encoder import Encoded, Encoder, Family, LoadedMedia
from packhorse.families.gemma3 import Gemma3
from packhorse.families.gemma4 import Gemma4
from packhorse.families.generic import Generic, TextOnly, generic_for
from packhorse.families.internvl import InternVL
from packhorse.families.kimi_k25 import KimiK25, KimiK25Remote
from packhorse.families.kimi_vl import KimiVL
from packhorse.families.lfm2_vl import Lfm2VL
from packhorse.families.llava_onevision import LlavaOnevision
from packhorse.families.models import check_transformers
from packhorse.families.nemotron_omni import NemotronOmni
from packhorse.families.nemotron_parse import NemotronParse
from packhorse.families.phi4_mm import Phi4MM
from packhorse.families.qwen3_omni import Qwen3Omni
from packhorse.families.qwen_vl import Qwen2VL, Qwen3VL
from packhorse.families.smolvlm import SmolVLM
from packhorse.media import MediaSize

__all__ = ["FAMILIES", "Encoded", "Encoder", "Family", "Generic", "LoadedMedia", "MediaSize", "family_of"]

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
    Lfm2VL(),
    Phi4MM(),
    NemotronParse(),
    NemotronOmni(),
)
"""All families but the generic one. A new family is added here."""


def family_of(processor: Processor) -> Family:
    """Return the family of a processor, found by the names of its class and its base classes.

    A wrapper with a known processor in ``.processor`` is served as that one if both have the same tokenizer
    and image processor. A tokenizer gets a family without media; any other processor the generic family of
    its class, which is built once, with a warning about what is not exact.

    Raises:
        ConfigError: the installed transformers is too old for the family.
    """
    inner = getattr(processor, "processor", None)
    transparent = inner is not None and all(
        getattr(processor, name, None) is getattr(inner, name, None) is not None
        for name in ("tokenizer", "image_processor")
    )
    for candidate in (processor, inner) if transparent else (processor,):
        for kind in type(candidate).__mro__:
            for family in FAMILIES:
                if kind.__name__ in family.processor_classes:
                    check_transformers(family.name, family.min_transformers)
                    return family
    if is_tokenizer(processor):
        return TextOnly()
    return generic_for(type(processor))
