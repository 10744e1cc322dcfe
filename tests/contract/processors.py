"""Real processors of every family, built from their constructors: nothing is downloaded, nothing is mocked.

``processor("qwen2_vl")`` gives transformers' own ``Qwen2VLProcessor`` with a small tokenizer and a chat
template written here. Geometry is the family's own; only budgets (pixels, tiles, tokens per tile) are
small, so that a call takes milliseconds. Two families whose processors come with the model's own code have
substitutes (see `contract.remote_processors`). Objects are cached: to change one, make one with ``build``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from contract.chat_templates import TEMPLATES
from contract.tiny_tokenizers import tokenizer
from contract.torchvision_ops import make_torchvision_importable


@dataclass(frozen=True)
class FamilyFixture:
    """One family under test.

    Attributes:
        class_name: The name of the processor's class, by which a family is found.
        build: Makes a fresh processor (the tokenizer is shared).
        modalities: What a sample may hold in addition to text.
        chats: Whether the processor has a chat template.
        bundled: Whether the class is transformers' own; otherwise it is a substitute.
        model_type: Its name in transformers' auto mappings, where it is not the fixture's own name.
    """

    name: str
    class_name: str
    build: Callable[[], Any]
    modalities: frozenset[str]
    chats: bool = True
    bundled: bool = True
    model_type: str = ""


def _qwen_vl(name: str) -> Any:
    import transformers

    classes = {"qwen2_vl": transformers.Qwen2VLProcessor, "qwen2_5_vl": transformers.Qwen2_5_VLProcessor}
    return classes[name](
        image_processor=transformers.Qwen2VLImageProcessor(
            size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 256}, patch_size=14
        ),
        video_processor=transformers.Qwen2VLVideoProcessor(
            size={"shortest_edge": 4 * 28 * 28, "longest_edge": 28 * 28 * 64}
        ),
        tokenizer=tokenizer(name),
        chat_template=TEMPLATES[name],
    )


def _qwen3_images() -> Any:
    """The image processor of Qwen3-VL and Qwen3-Omni: patches of 16, so 32 pixels a token."""
    from transformers import Qwen2VLImageProcessor

    return Qwen2VLImageProcessor(
        size={"shortest_edge": 4 * 32 * 32, "longest_edge": 32 * 32 * 256},
        patch_size=16,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def _qwen3_vl(name: str) -> Any:
    from transformers import Qwen3VLProcessor, Qwen3VLVideoProcessor

    return Qwen3VLProcessor(
        image_processor=_qwen3_images(),
        # The budget is one for all frames together, as in the released Qwen3-VL.
        video_processor=Qwen3VLVideoProcessor(
            size={"shortest_edge": 4 * 32 * 32, "longest_edge": 32 * 32 * 256}
        ),
        tokenizer=tokenizer(name),
        chat_template=TEMPLATES[name],
    )


def _qwen3_omni() -> Any:
    from transformers import Qwen2VLVideoProcessor, Qwen3OmniMoeProcessor, WhisperFeatureExtractor

    return Qwen3OmniMoeProcessor(
        feature_extractor=WhisperFeatureExtractor(feature_size=128, return_attention_mask=True),
        image_processor=_qwen3_images(),
        # The budget is for each frame, and the processor's call sets it: 128 to 768 tokens.
        video_processor=Qwen2VLVideoProcessor(
            patch_size=16, image_mean=[0.5, 0.5, 0.5], image_std=[0.5, 0.5, 0.5]
        ),
        tokenizer=tokenizer("qwen3_omni"),
        chat_template=TEMPLATES["qwen3_omni"],
    )


def _kimi_k25() -> Any:
    from transformers import Kimi_K25Processor
    from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor
    from transformers.models.kimi_k25.video_processing_kimi_k25 import Kimi_K25VideoProcessor

    return Kimi_K25Processor(
        image_processor=Kimi_K25ImageProcessor(max_patches=256),
        video_processor=Kimi_K25VideoProcessor(max_patches=64),
        tokenizer=tokenizer("kimi_k25"),
        chat_template=TEMPLATES["kimi_k25"],
    )


def _gemma3() -> Any:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    return Gemma3Processor(
        image_processor=Gemma3ImageProcessor(size={"height": 224, "width": 224}),
        tokenizer=tokenizer("gemma3"),
        chat_template=TEMPLATES["gemma3"],
        image_seq_length=16,
    )


def _gemma4() -> Any:
    from transformers import Gemma4AudioFeatureExtractor, Gemma4ImageProcessor, Gemma4Processor
    from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor

    return Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(max_soft_tokens=70),
        video_processor=Gemma4VideoProcessor(max_soft_tokens=70),
        tokenizer=tokenizer("gemma4"),
        chat_template=TEMPLATES["gemma4"],
        image_seq_length=70,
    )


def _llava_onevision() -> Any:
    from transformers import (
        LlavaOnevisionImageProcessor,
        LlavaOnevisionProcessor,
        LlavaOnevisionVideoProcessor,
    )

    side = 70  # 5 by 5 patches of 14: odd, as the real 384 pixels (27 by 27) are
    size = {"height": side, "width": side}
    grid = [[side * rows, side * columns] for rows in range(1, 7) for columns in range(1, 7)]
    return LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=grid),
        video_processor=LlavaOnevisionVideoProcessor(size=size),
        tokenizer=tokenizer("llava_onevision"),
        num_image_tokens=25,
        vision_feature_select_strategy="full",
        chat_template=TEMPLATES["llava_onevision"],
    )


def _internvl() -> Any:
    from transformers import GotOcr2ImageProcessor, InternVLProcessor, InternVLVideoProcessor

    size = {"height": 112, "width": 112}  # 8 by 8 patches of 14, a quarter of them after pixel shuffle
    return InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size=size, max_patches=12),
        video_processor=InternVLVideoProcessor(size=size),
        tokenizer=tokenizer("internvl"),
        image_seq_length=16,
        chat_template=TEMPLATES["internvl"],
    )


def _smolvlm() -> Any:
    from transformers import SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

    side = 56  # 4 by 4 patches of 14, a quarter of them after pixel shuffle
    tile, whole = {"longest_edge": side}, {"longest_edge": 4 * side}
    video = SmolVLMVideoProcessor(
        max_image_size=tile, video_sampling={"max_frames": 8, "fps": 1, "video_size": whole}
    )
    return SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(size=whole, max_image_size=tile),
        video_processor=video,
        tokenizer=tokenizer("smolvlm"),
        image_seq_len=4,
        chat_template=TEMPLATES["smolvlm"],
    )


def _lfm2_vl() -> Any:
    from transformers import Lfm2VlImageProcessor, Lfm2VlProcessor

    return Lfm2VlProcessor(
        # Images are tiled from half of the budget on, not from twice the budget, so that large.png is.
        image_processor=Lfm2VlImageProcessor(
            min_image_tokens=4, max_image_tokens=64, max_pixels_tolerance=0.5, tile_size=128
        ),
        tokenizer=tokenizer("lfm2_vl"),
        chat_template=TEMPLATES["lfm2_vl"],
    )


def _phi4_mm() -> Any:
    from transformers import (
        Phi4MultimodalFeatureExtractor,
        Phi4MultimodalImageProcessor,
        Phi4MultimodalProcessor,
    )

    return Phi4MultimodalProcessor(
        image_processor=Phi4MultimodalImageProcessor(dynamic_hd=4),  # 448 pixels are written into the class
        audio_processor=Phi4MultimodalFeatureExtractor(),
        tokenizer=tokenizer("phi4_mm"),
        chat_template=TEMPLATES["phi4_mm"],
    )


def _nemotron_omni() -> Any:
    from transformers import NemotronH_Omni_Reasoning_V3Processor, ParakeetFeatureExtractor
    from transformers.models.nemotron_h_omni.image_processing_nemotron_h_omni import (
        NemotronH_Omni_Reasoning_V3ImageProcessor,
    )
    from transformers.models.nemotron_h_omni.video_processing_nemotron_h_omni import (
        NemotronH_Omni_Reasoning_V3VideoProcessor,
    )

    return NemotronH_Omni_Reasoning_V3Processor(
        image_processor=NemotronH_Omni_Reasoning_V3ImageProcessor(min_num_patches=16, max_num_patches=256),
        video_processor=NemotronH_Omni_Reasoning_V3VideoProcessor(
            norm_mean=[0.5, 0.5, 0.5], norm_std=[0.5, 0.5, 0.5], video_target_num_patches=64
        ),
        feature_extractor=ParakeetFeatureExtractor(feature_size=128),
        tokenizer=tokenizer("nemotron_omni"),
        chat_template=TEMPLATES["nemotron_omni"],
    )


def _kimi_vl() -> Any:
    from contract.remote_processors import KimiVLProcessor

    return KimiVLProcessor(tokenizer("kimi_vl"), TEMPLATES["kimi_vl"])


def _nemotron_parse() -> Any:
    from contract.remote_processors import NemotronParseProcessor

    words = tokenizer("nemotron_parse")
    words.decoder_start_token_id = words.bos_token_id
    return NemotronParseProcessor(words)


QWEN3_VL = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Models with the processor of Qwen3-VL."""

_IMAGE = frozenset({"image"})
_VIDEO = frozenset({"image", "video"})
_AUDIO = frozenset({"image", "audio"})
_ALL = frozenset({"image", "video", "audio"})


def _runs_here(fixture: FamilyFixture) -> FamilyFixture | None:
    """The family with the media that the installed transformers is new enough for, by what it declares."""
    from packhorse.families import FAMILIES as DECLARED
    from packhorse.families.models import is_at_least

    family = next(family for family in DECLARED if fixture.class_name in family.processor_classes)
    if not is_at_least(family.min_transformers):
        return None
    newer = {kind for kind, least in family.min_transformers_for.items() if not is_at_least(least)}
    return replace(fixture, modalities=fixture.modalities - newer)


FAMILIES: dict[str, FamilyFixture] = {
    fixture.name: fixture
    for declared in (
        FamilyFixture("qwen2_vl", "Qwen2VLProcessor", lambda: _qwen_vl("qwen2_vl"), _VIDEO),
        FamilyFixture("qwen2_5_vl", "Qwen2_5_VLProcessor", lambda: _qwen_vl("qwen2_5_vl"), _VIDEO),
        *(FamilyFixture(name, "Qwen3VLProcessor", partial(_qwen3_vl, name), _VIDEO) for name in QWEN3_VL),
        FamilyFixture("qwen3_omni", "Qwen3OmniMoeProcessor", _qwen3_omni, _ALL, model_type="qwen3_omni_moe"),
        FamilyFixture("kimi_k25", "Kimi_K25Processor", _kimi_k25, _VIDEO),
        FamilyFixture("gemma3", "Gemma3Processor", _gemma3, _IMAGE),
        FamilyFixture("gemma4", "Gemma4Processor", _gemma4, _ALL),
        FamilyFixture("llava_onevision", "LlavaOnevisionProcessor", _llava_onevision, _VIDEO),
        FamilyFixture("internvl", "InternVLProcessor", _internvl, _VIDEO),
        FamilyFixture("smolvlm", "SmolVLMProcessor", _smolvlm, _VIDEO),
        FamilyFixture("lfm2_vl", "Lfm2VlProcessor", _lfm2_vl, _IMAGE),
        FamilyFixture("phi4_mm", "Phi4MultimodalProcessor", _phi4_mm, _AUDIO, model_type="phi4_multimodal"),
        FamilyFixture(
            "nemotron_omni",
            "NemotronH_Omni_Reasoning_V3Processor",
            _nemotron_omni,
            _ALL,
            model_type="nemotron_h_omni",
        ),
        FamilyFixture("kimi_vl", "KimiVLProcessor", _kimi_vl, _IMAGE, bundled=False),
        FamilyFixture(
            "nemotron_parse", "NemotronParseProcessor", _nemotron_parse, _IMAGE, chats=False, bundled=False
        ),
    )
    if (fixture := _runs_here(declared)) is not None
}


def build(name: str) -> Any:
    """A processor of its own, for a test that changes it (its tokenizer is still the shared one)."""
    make_torchvision_importable()
    return FAMILIES[name].build()


@cache
def processor(name: str) -> Any:
    """The processor of the family ``name``; the same object at every call."""
    return build(name)
