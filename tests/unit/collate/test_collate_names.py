"""Every documented name is in `packhorse.collate_fns`, with the documented arguments."""

import inspect
import logging
import subprocess
import sys

import pytest

import packhorse.collate_fns as collate_fns
from packhorse.encode.robust import make_robust_collate

NEEDED = inspect.Parameter.empty
DOCUMENTED = {
    "make_robust_collate": {"dataset": NEEDED, "collate_fn": NEEDED, "max_retries": 10},
    "_find_pattern_indices": {
        "template": NEEDED,
        "pattern": NEEDED,
        "search_start_index": 0,
        "allow_first_token_mismatch": False,
    },
    "_extract_assistant_text": {"message": NEEDED},
    "_decode_single_token": {"tokenizer": NEEDED, "token_id": NEEDED},
    "build_labels": {"input_ids_batch": NEEDED, "conversations": NEEDED, "processor": NEEDED},
    "_get_assistant_marker": {"tokenizer": NEEDED},
    "_get_stop_token_id": {"tokenizer": NEEDED},
    "build_labels_from_template": {"input_ids_batch": NEEDED, "conversations": NEEDED, "processor": NEEDED},
    "phi4_mm_collate_fn": {"examples": NEEDED, "processor": NEEDED},
    "_extract_media_from_conversations": {"conversations": NEEDED},
    "_count_media_per_sample": {"conversations": NEEDED},
    "qwen2_5_collate_fn": {"examples": NEEDED, "processor": NEEDED},
    "qwen3_omni_collate_fn": {"examples": NEEDED, "processor": NEEDED, "use_audio_in_video": False},
    "kimi_vl_collate_fn": {"examples": NEEDED, "processor": NEEDED, "max_length": None},
    "_expand_image_tokens": {
        "input_ids": NEEDED,
        "attention_mask": NEEDED,
        "grid_thws": NEEDED,
        "media_token_id": NEEDED,
        "merge_kernel_size": (2, 2),
    },
    "kimi_k25_vl_collate_fn": {"examples": NEEDED, "processor": NEEDED, "max_length": None},
    "nemotron_omni_collate_fn": {
        "examples": NEEDED,
        "processor": NEEDED,
        "max_length": None,
        "max_video_frames": 8,
    },
    "gemma4_inject_thinking_prefix": {"batch": NEEDED, "processor": NEEDED},
    "nemotron_parse_collate_fn": {
        "examples": NEEDED,
        "processor": NEEDED,
        "task_prompt": "</s><s><predict_bbox><predict_classes><output_markdown>",
    },
    "_ensure_rgb": {"conversations": NEEDED},
    "_extract_image_config": {"processor": NEEDED},
    "_estimate_media_tokens": {"conversation": NEEDED, "processor": NEEDED},
    "_drop_overlong_samples": {"conversations": NEEDED, "processor": NEEDED, "max_length": NEEDED},
    "default_collate_fn": {
        "examples": NEEDED,
        "processor": NEEDED,
        "max_length": None,
        "_post_tokenize_hook": None,
    },
    "pad_collate_fn": {"examples": NEEDED, "processor": NEEDED, "max_length": None},
    "_inject_thinking_prefix_tokens": {"batch": NEEDED, "tokenizer": NEEDED},
    "gemma4_prefix_collate_fn": {"examples": NEEDED, "processor": NEEDED, "max_length": None},
    "llava_onevision_collate_fn": {"examples": NEEDED, "processor": NEEDED, "max_length": None},
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_documented_call_has_the_documented_arguments(name):
    parameters = inspect.signature(getattr(collate_fns, name)).parameters.values()
    found = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(found.items()) == list(DOCUMENTED[name].items())
    assert name in collate_fns.__all__


def test_the_other_documented_names_are_there():
    assert isinstance(collate_fns.logger, logging.Logger)
    assert collate_fns._GEMMA4_MODEL_TURN == "<|turn>model\n"
    assert collate_fns._GEMMA4_THINKING_PREFIX == "<|channel>thought\n<channel|>"
    assert isinstance(collate_fns._IMSTART_TEMPLATE_PROCESSORS, frozenset)
    assert "Qwen2_5_VLProcessor" in collate_fns._IMSTART_TEMPLATE_PROCESSORS
    assert collate_fns.make_robust_collate is make_robust_collate


@pytest.mark.parametrize(
    ("processor", "function"),
    [
        ("Qwen2_5_VLProcessor", "qwen2_5_collate_fn"),
        ("Qwen3OmniMoeProcessor", "qwen3_omni_collate_fn"),
        ("KimiVLProcessor", "kimi_vl_collate_fn"),
        ("KimiK25Processor", "kimi_k25_vl_collate_fn"),
        ("Kimi_K25Processor", "kimi_k25_vl_collate_fn"),
        ("NemotronParseProcessor", "nemotron_parse_collate_fn"),
        ("NemotronH_Nano_Omni_Reasoning_V3Processor", "nemotron_omni_collate_fn"),
        ("NemotronH_Omni_Reasoning_V3Processor", "nemotron_omni_collate_fn"),
        ("LlavaOnevisionProcessor", "llava_onevision_collate_fn"),
        ("Phi4MultimodalProcessor", "phi4_mm_collate_fn"),
        ("default", "default_collate_fn"),
    ],
)
def test_the_registry_knows_the_function_of_a_processor(processor, function):
    assert collate_fns.COLLATE_FNS[processor] is getattr(collate_fns, function)


def test_the_registry_has_every_class_that_a_family_serves():
    from packhorse.families import FAMILIES

    served = {name for family in FAMILIES for name in family.processor_classes}
    assert served <= collate_fns.COLLATE_FNS.keys()


def test_importing_it_does_not_import_transformers():
    script = "import sys, packhorse.collate_fns; print('transformers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
