"""Classes of transformers through the public path: none that is accepted mixes the documents of a pack."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from contract.sweep import FAILS, LAYERS, NOT_BUILT, PACKS, REJECTED, Result, classes, examine
from contract.torchvision_ops import make_torchvision_importable
from packhorse.families.packing import PACKABLE
from packing_table import PAGE, groups_on, page_of, reason_of

make_torchvision_importable()

pytestmark = pytest.mark.usefixtures("uncompiled_flex")
examined = cache(examine)

_SAMPLE = {
    "CodeGenForCausalLM": PACKS,  # attention of its own, so eager alone
    "CwmForCausalLM": PACKS,  # windows in some layers
    "Dots1ForCausalLM": PACKS,  # experts
    "LlamaForCausalLM": PACKS,
    "SmolVLMForConditionalGeneration": PACKS,
    "JambaForCausalLM": LAYERS,
    "Lfm2ForCausalLM": LAYERS,
    "Mamba2ForCausalLM": LAYERS,
    "Qwen3_5ForConditionalGeneration": LAYERS,
    "BloomForCausalLM": REJECTED,
    "LlavaForConditionalGeneration": REJECTED,
    "FuyuForCausalLM": REJECTED,
}


@pytest.mark.parametrize("name", _SAMPLE)
def test_a_class_is_packed_right_or_rejected(name: str) -> None:
    result = examined(name)
    assert (result.group, bool(result.reason)) == (_SAMPLE[name], _SAMPLE[name] == REJECTED), result.reason
    assert bool(result.layers) == (result.group == LAYERS)
    assert all(measured.right for measured in result.measured.values())
    assert result.media == (name in ("SmolVLMForConditionalGeneration", "Qwen3_5ForConditionalGeneration"))


def test_attentions_that_a_class_does_not_run_are_not_measured() -> None:
    assert examined("LlamaForCausalLM").measured.keys() == {"auto", "eager", "varlen", "flex_attention"}
    assert examined("CodeGenForCausalLM").measured["auto"].attention == "eager"
    assert examined("CodeGenForCausalLM").measured.keys() == {"auto"}
    assert "varlen" not in examined("Mamba2ForCausalLM").measured
    assert "varlen, short window" in examined("CwmForCausalLM").measured


def test_the_page_has_a_row_for_each_class_and_the_reasons() -> None:
    page = page_of(examined(name) for name in _SAMPLE)
    found = {name: group for (_, name), group in groups_on(page).items()}
    assert found == _SAMPLE
    assert "| `codegen` | `CodeGenForCausalLM` | measurement | text | 0 / " in page
    assert "no test shows that its media are" in page
    assert "packhorse parity --model" not in page, "reasons alone: the page says what to do once"
    long = Result("x", "X", REJECTED, "X: a | b" + 200 * "x")
    assert reason_of(long).startswith(r"a \| bxxx")
    assert reason_of(long).endswith("…")


def test_the_committed_page_has_every_class_and_no_wrong_one() -> None:
    groups = groups_on(PAGE.read_text())
    assert {name for _, name in groups} == set(classes())
    assert FAILS not in groups.values()
    accepted = {kind for (kind, _), group in groups.items() if group in (PACKS, LAYERS)}
    assert not {name for name in accepted & PACKABLE if name not in Path(PAGE).read_text()}


@pytest.mark.slow
def test_no_class_that_is_accepted_mixes_documents_and_no_group_has_changed() -> None:
    results = [examined(name) for name in classes()]
    assert not [result for result in results if result.group == FAILS]
    groups = groups_on(PAGE.read_text())
    now = {(result.model_type, result.class_name): result.group for result in results}
    assert now == groups
    assert sum(group == NOT_BUILT for group in now.values()) < len(now) / 8
