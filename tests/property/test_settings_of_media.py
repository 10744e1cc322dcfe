"""Settings for the size of media: the size is that of qwen_vl_utils, and precedence is a total order."""

from __future__ import annotations

import importlib
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from contract.processors import processor
from packhorse.families import Encoder
from packhorse.media import VideoInfo
from packhorse.media.images import fit_image
from packhorse.media.settings import size_settings, with_dataset_settings

SIDES = st.integers(17, 3000)  # half a token or less is another case
TOKENS = st.integers(1, 2000)


def utils() -> Any:
    processor("qwen2_vl")  # makes torchvision importable
    return importlib.import_module("qwen_omni_utils.v2_5.vision_process")


@settings(deadline=None)  # the first example imports torch
@given(SIDES, SIDES, TOKENS, TOKENS, st.sampled_from([28, 32]), st.integers(0, 783))
def test_an_image_is_resized_as_by_qwen_vl_utils(height, width, one, other, factor, more):
    if max(height, width) > 200 * min(height, width):
        return
    low, high = sorted((one * factor**2, other * factor**2 + more))
    theirs = utils().smart_resize(height, width, factor, low, high)
    if min(theirs) == 0:  # the package then fails; the processors give such a side one token
        return
    assert fit_image(height, width, factor, low, high) == theirs
    name = "qwen2_vl" if factor == 28 else "qwen3_vl"
    encoder = Encoder(processor(name))
    ours = encoder.configure("image", (height, width), {"min_pixels": low, "max_pixels": high})
    assert encoder.media_tokens("image", ours) == math.prod(theirs) // factor**2


@settings(deadline=None)
@given(
    st.integers(2, 60),
    st.integers(40, 1000),
    st.integers(40, 1000),
    st.integers(1, 200),
    st.none() | st.integers(1, 900),
    st.none() | st.integers(200, 200_000),
    st.sampled_from(["qwen2_vl", "qwen3_vl", "qwen3_omni"]),
)
def test_a_frame_is_resized_as_by_qwen_vl_utils(frames, height, width, least, more, total, name):
    encoder = Encoder(processor(name))
    owner = encoder.processor.video_processor
    factor = owner.patch_size * owner.merge_size
    # fetch_video has no function for its limits, so its lines are repeated here.
    limits = {"min_pixels": least * factor**2}
    padded, all_pixels = frames + frames % 2, 128_000 * factor**2 * 0.9
    if total is not None:
        limits["total_pixels"] = all_pixels = total * factor**2
    most = max(min(768 * factor**2, all_pixels / padded * 2), int(limits["min_pixels"] * 1.05))
    limits["max_pixels"] = (least + (700 if more is None else more)) * factor**2
    most = min(limits["max_pixels"], most)
    theirs = utils().smart_resize(height, width, factor, limits["min_pixels"], most)
    if min(theirs) == 0:
        return
    info = VideoInfo(frames, height, width, 2.0, frames / 2)
    ours = encoder.configure("video", info, limits)
    assert (ours.size.height, ours.size.width) == theirs
    assert encoder.media_tokens("video", ours) == padded // 2 * math.prod(theirs) // factor**2


_NAMES = st.sampled_from(["min_pixels", "max_pixels", "resized_height", "resized_width"])


def _valid(settings: dict[str, int]) -> bool:
    pair = {"resized_height", "resized_width"} & settings.keys()
    return len(pair) != 1 and settings.get("min_pixels", 0) <= settings.get("max_pixels", 1 << 60)


_SETTINGS = st.dictionaries(_NAMES, st.integers(1, 5000)).filter(_valid)


@given(_SETTINGS, _SETTINGS)
def test_what_an_item_sets_holds_and_valid_settings_stay_valid_together(own, dataset):
    merged = size_settings("image", with_dataset_settings("image", own, dataset))
    assert merged.items() >= own.items()
    assert all(merged[name] == dataset[name] for name in merged.keys() - own.keys())
    if not own:
        assert merged == dataset
