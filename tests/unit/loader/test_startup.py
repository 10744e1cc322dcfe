"""The start-up that the loader shares with ``packhorse plan`` and the viewer."""

from pathlib import Path
from typing import Any

import pytest

from contract.processors import processor
from contract.tiny_models import tiny_model
from contract.tiny_tokenizers import tokenizer
from count_samples import sidecars
from packhorse.errors import ConfigError
from packhorse.loader import LoaderConfig
from packhorse.tools.view.plan_book import Request, make_plan
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
    planned = make_plan(Request(config, processor("qwen2_vl"), epoch=1))
    loader = config.build(processor("qwen2_vl"), model="unchecked")
    loader.set_epoch(1)
    assert loader.plan_key == planned.planner.name
    assert loader.plan.bins() == planned.packs.plan.bins()
    assert list(loader.ledger) == planned.dropped


def test_settings_that_batches_cannot_be_built_with_raise_before_rows_are_counted(tmp_path: Path) -> None:
    meta = write_samples(tmp_path / "data")
    config = LoaderConfig(data=str(meta), pack_size=256, alignment=3, pad_to_size=True, max_bad_share=None)
    with pytest.raises(ConfigError, match="no multiple of alignment=3"):
        config.build(processor("qwen2_vl"), model="unchecked")
    assert not sidecars(meta.parent)
    config.with_changes(pad_to_size=False).build(processor("qwen2_vl"), model="unchecked")
    assert sidecars(meta.parent)


def test_a_plan_rejects_a_tokenizer_for_a_model_with_images_as_the_loader_does(tmp_path: Path) -> None:
    tiny_model("qwen2_vl").config.save_pretrained(tmp_path / "model")
    config = LoaderConfig(data=str(write_samples(tmp_path / "data")), pack_size=256)
    with pytest.raises(ConfigError, match="processor is a tokenizer"):
        make_plan(Request(config, tokenizer("qwen2_vl"), str(tmp_path / "model")))
