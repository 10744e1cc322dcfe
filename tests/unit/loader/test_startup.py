"""The start-up that the loader shares with ``packhorse plan`` and the viewer."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from contract.processors import build, processor
from contract.tiny_models import tiny_model
from contract.tiny_tokenizers import tokenizer
from count_samples import sidecars, write_chats
from packhorse import count_meta, counts_of, open_meta_dataset
from packhorse.families import Encoder
from packhorse.loader import LoaderConfig
from packhorse.tools.view.plan_report import sizes_report
from packhorse.tools.view.saved_plan import PlanRequest, make_plan
from raising import raises_config
from view_samples import write_samples


@pytest.mark.parametrize(
    "settings",
    [{}, {"pack_size": 100, "on_overlong": "truncate"}, {"alignment": 8}, {"placeholder": "never"}],
    ids=str,
)
def test_a_plan_and_a_loader_with_the_same_settings_have_the_same_packs(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    meta = write_samples(tmp_path / "data")
    config = LoaderConfig(data=str(meta), max_bad_share=None, **{"pack_size": 256, **settings})
    planned = make_plan(PlanRequest(config, processor("qwen2_vl"), epoch=1))
    loader = config.build(processor("qwen2_vl"), model="unchecked")
    loader.set_epoch(1)
    assert loader.plan_key == planned.planner.name
    assert loader.plan.bins() == planned.packs.plan.bins()
    assert list(loader.ledger) == planned.dropped


def count_calls(run: Callable[[], Any], *functions: Callable[..., Any]) -> list[int]:
    """Return how often ``run`` calls each function."""
    counts = {function.__code__: 0 for function in functions}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in counts:
            counts[frame.f_code] += 1

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return list(counts.values())


@pytest.mark.parametrize("counted", [True, False])
def test_a_loader_builds_one_encoder_and_describes_its_processor_once(counted: bool, tmp_path: Path) -> None:
    config = LoaderConfig(data=str(write_chats(tmp_path, 5)), pack_size=256)
    if counted:
        config.build(processor("qwen2_vl"), model="unchecked")
    calls = count_calls(
        lambda: config.build(processor("qwen2_vl"), model="unchecked"),
        Encoder.__init__,
        Encoder._describe_settings,
    )
    assert calls == [1, 1]


def test_plans_of_several_sizes_build_one_encoder_and_read_the_counts_once(tmp_path: Path) -> None:
    config = LoaderConfig(data=str(write_chats(tmp_path, 5)))
    request = PlanRequest(config, processor("qwen2_vl"))
    make_plan(request)
    calls = count_calls(
        lambda: sizes_report(request, [64, 128, 256]),
        Encoder.__init__,
        Encoder._describe_settings,
        counts_of,
    )
    assert calls == [1, 1, 1]


def test_a_template_that_is_set_later_has_counts_of_its_own(tmp_path: Path) -> None:
    made, dataset = build("qwen2_vl"), open_meta_dataset(write_chats(tmp_path, 5))
    encoder = Encoder(made)
    before = encoder.settings
    count_meta(tmp_path / "meta.json", encoder)
    assert counts_of(dataset, encoder) is not None
    made.chat_template += " "
    assert counts_of(dataset, encoder) is None
    assert encoder.settings == {**before, "template": made.chat_template}
    assert encoder.settings == Encoder(made).settings


def test_settings_that_batches_cannot_be_built_with_raise_before_rows_are_counted(tmp_path: Path) -> None:
    meta = write_samples(tmp_path / "data")
    config = LoaderConfig(data=str(meta), pack_size=256, alignment=3, pad_to_size=True, max_bad_share=None)
    with raises_config("pack_size", 256, match="a multiple of alignment=3"):
        config.build(processor("qwen2_vl"), model="unchecked")
    assert not sidecars(meta.parent)
    config.with_changes(pad_to_size=False).build(processor("qwen2_vl"), model="unchecked")
    assert sidecars(meta.parent)


def test_a_plan_rejects_a_tokenizer_for_a_model_with_images_as_the_loader_does(tmp_path: Path) -> None:
    tiny_model("qwen2_vl").config.save_pretrained(tmp_path / "model")
    config = LoaderConfig(data=str(write_samples(tmp_path / "data")), pack_size=256)
    with raises_config("processor", type(tokenizer("qwen2_vl")).__name__, match="processor is a tokenizer"):
        make_plan(PlanRequest(config, tokenizer("qwen2_vl"), str(tmp_path / "model")))
