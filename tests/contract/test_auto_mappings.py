"""Fixtures are the released classes: those that transformers' auto classes build for the model type."""

import pytest
from transformers import AutoProcessor
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

from contract.exact import render, video
from contract.processors import FAMILIES, build, processor
from contract.samples import make_image, tone
from packhorse.families import Encoder, LoadedMedia

REMOTE_CODE = {"kimi_vl", "nemotron_parse"}
RELEASED = tuple(name for name in FAMILIES if name not in REMOTE_CODE)
# Not among the image processors of transformers 5.22. AutoProcessor builds the class that the file
# preprocessor_config.json of its checkpoints names: that of Qwen3-VL.
UNLISTED_IMAGE_PROCESSORS = {"qwen3_vl_moe": "qwen3_vl"}


def test_only_the_two_remote_code_families_have_no_released_class():
    assert {name for name, fixture in FAMILIES.items() if not fixture.bundled} == REMOTE_CODE
    assert not {FAMILIES[name].class_name for name in REMOTE_CODE} & set(PROCESSOR_MAPPING_NAMES.values())


@pytest.mark.parametrize("name", RELEASED)
def test_every_part_of_a_fixture_is_the_class_of_the_auto_mappings(name):
    made, model_type = build(name), FAMILIES[name].model_type or name
    assert type(made).__name__ == PROCESSOR_MAPPING_NAMES[model_type]
    listed = UNLISTED_IMAGE_PROCESSORS.get(model_type, model_type)
    assert (model_type in IMAGE_PROCESSOR_MAPPING_NAMES) is (listed == model_type)
    parts = {
        "image_processor": IMAGE_PROCESSOR_MAPPING_NAMES.get(listed),
        "video_processor": VIDEO_PROCESSOR_MAPPING_NAMES.get(model_type),
    }
    for part, by_backend in parts.items():
        expected = (by_backend or {}).get("torchvision")
        assert getattr(made, part, None).__class__.__name__ == (expected or "NoneType"), part
    expected = FEATURE_EXTRACTOR_MAPPING_NAMES.get(model_type)
    if expected is not None:
        listener = "audio_processor" if hasattr(made, "audio_processor") else "feature_extractor"
        assert type(getattr(made, listener)).__name__ == expected
    else:  # the mapping has no feature extractor for it; its processor names none either
        assert ("audio" in FAMILIES[name].modalities) is (name == "nemotron_omni")


@pytest.mark.parametrize("name", RELEASED)
def test_a_saved_processor_is_loaded_back_as_the_same(name, tmp_path):
    made = build(name)
    made.save_pretrained(tmp_path)
    loaded = AutoProcessor.from_pretrained(tmp_path)
    assert type(loaded) is type(made)
    assert loaded.to_dict() == made.to_dict()
    if (
        name == "phi4_mm"
    ):  # transformers drops its template when it loads; the released one is the tokenizer's
        loaded.chat_template = made.chat_template
    media = {
        "image": LoadedMedia([make_image(300, 200)], [], []),
        "video": LoadedMedia([], [video(6, 24.0, 2, 100, 40)], []),
        "audio": LoadedMedia([], [], [(tone(16_000), 16_000)]),
    }
    encoder, original = Encoder(loaded), Encoder(made)
    for kind in FAMILIES[name].modalities:
        ((_, size),) = media[kind].sizes()
        text = render(encoder, kind)
        ids = encoder.family.call(encoder, text, media[kind])["input_ids"][0].tolist()
        assert ids == encoder.family.call(original, text, media[kind])["input_ids"][0].tolist()
        content = sum(token in encoder.media_token_ids for token in ids)
        assert encoder.media_tokens(kind, size) == content


def test_qwen3_omni_counts_videos_by_the_class_of_its_video_processor():
    """AutoProcessor builds Qwen2VLVideoProcessor, whose budget is per frame; a user may pass Qwen3-VL's."""
    other = build("qwen3_omni")
    other.video_processor = processor("qwen3_vl").video_processor
    counts = []
    for made in (processor("qwen3_omni"), other):
        encoder = Encoder(made)
        media = LoadedMedia([], [video(6, 24.0, 2, 100, 40)], [])
        ((_, size),) = media.sizes()
        output = encoder.family.call(encoder, render(encoder, "video"), media)
        content = sum(token in encoder.media_token_ids for token in output["input_ids"][0].tolist())
        assert encoder.media_tokens("video", size) == content
        assert encoder.media_patches("video", size) == len(output["pixel_values_videos"])
        counts.append(content)
    assert counts[0] > 2 * counts[1]
