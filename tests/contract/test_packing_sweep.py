"""Classes of transformers through the public path: none that is accepted mixes the documents of a pack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from contract import sweep
from contract.sweep import (
    CANNOT_BUILD,
    ENCODER_DECODER,
    FAILS,
    LAYERS,
    NOT_BUILT,
    NOT_PROVEN,
    PACKS,
    REJECTED,
    Result,
    classes,
    examine,
    subject_of,
)
from contract.torchvision_ops import make_torchvision_importable
from packhorse.collate_fns import model_inputs
from packhorse.families.packing import PACKABLE
from packing_table import PAGE, differences, magnitude, page_of, reason_of, row_of, rows_on

make_torchvision_importable()

pytestmark = pytest.mark.usefixtures("uncompiled_flex")
examined = cache(examine)

_SAMPLE = {
    "CodeGenForCausalLM": PACKS,  # attention of its own, so eager alone
    "CwmForCausalLM": PACKS,  # windows in some layers
    "Dots1ForCausalLM": PACKS,  # experts
    "LlamaForCausalLM": PACKS,
    "SmolVLMForConditionalGeneration": PACKS,
    "Lfm2ForCausalLM": LAYERS,
    "MambaForCausalLM": LAYERS,  # no attention
    "Qwen3_5ForConditionalGeneration": LAYERS,
    "BloomForCausalLM": NOT_PROVEN,  # a tiny copy cannot be run
    "LlavaForConditionalGeneration": NOT_PROVEN,
    "BartForCausalLM": REJECTED,  # its loss drops shift_labels
    "T5Gemma2ForConditionalGeneration": ENCODER_DECODER,
}
_WITH_IMAGES = {"SmolVLMForConditionalGeneration", "Qwen3_5ForConditionalGeneration"}


@pytest.mark.parametrize("name", _SAMPLE)
def test_a_class_is_packed_right_or_rejected(name: str) -> None:
    result = examined(name)
    assert result.group == _SAMPLE[name], result.reason
    assert bool(result.reason) == (result.group not in (PACKS, LAYERS))
    assert bool(result.layers) == (result.group == LAYERS)
    assert all(measurement.right for measurement in result.measured.values())
    assert result.media == (name in _WITH_IMAGES)


def test_attentions_that_a_class_does_not_run_are_not_measured() -> None:
    assert examined("LlamaForCausalLM").measured.keys() == {"auto", "eager", "varlen", "flex_attention"}
    assert examined("CodeGenForCausalLM").measured["auto"].attention == "eager"
    assert examined("CodeGenForCausalLM").measured.keys() == {"auto"}
    assert "varlen" not in examined("MambaForCausalLM").measured
    assert "varlen, short window" in examined("CwmForCausalLM").measured


@pytest.mark.parametrize("function", ["_leaking", "_unprepared_change"])
def test_a_control_that_raises_is_no_control(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(*arguments: Any) -> Any:
        raise TypeError("a mistake in the control")

    monkeypatch.setattr(sweep, function, raise_error)
    name = "LlamaForCausalLM" if function == "_leaking" else "MambaForCausalLM"
    assert examine(name).group == FAILS


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MambaForCausalLM"])
def test_a_control_that_keeps_documents_apart_is_no_control(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_leaking", lambda inputs: inputs)
    monkeypatch.setattr(sweep, "_unprepared_change", lambda subject, plain: 0.0)
    assert examine(name).group == FAILS


@pytest.mark.parametrize(
    "name",
    [
        "Kimi_K25ForConditionalGeneration",
        "Phi4MultimodalForCausalLM",
        "Qwen3OmniMoeThinkerForConditionalGeneration",
    ],
)
def test_images_change_the_logits_of_the_answer(name: str) -> None:
    subject = subject_of(name)
    model = subject.build()
    rows, others = sweep.documents(0, images=True), sweep.documents(1, images=True)
    exchanged = [{"conversation": [dict(turn) for turn in row["conversation"]]} for row in rows]
    for row, other in zip(exchanged, others, strict=True):
        content = [dict(part) for part in row["conversation"][0]["content"]]
        content[0]["image"] = other["conversation"][0]["content"][0]["image"]
        row["conversation"][0]["content"] = content
    logits = [_padded_logits(subject, model, some) for some in (rows, exchanged)]
    assert float((logits[0] - logits[1]).abs().max()) > 0.01


def _padded_logits(subject: sweep.Subject, model: Any, rows: list[dict[str, Any]]) -> torch.Tensor:
    """Return the logits of the last token of each row."""
    (batch,) = subject.load(rows, model, mode="pad", batch_size=len(rows))
    with torch.no_grad():
        logits: torch.Tensor = model(**model_inputs(batch), use_cache=False).logits
    return logits[torch.arange(len(rows)), batch["attention_mask"].sum(1) - 1]


def test_the_page_has_a_row_for_each_class_and_the_reasons() -> None:
    page = page_of(examined(name) for name in _SAMPLE)
    assert {name: group for (_, name), (group, _) in rows_on(page).items()} == _SAMPLE
    assert "| `codegen` | `CodeGenForCausalLM` | measurement | text | 0 | " in page
    assert "no test shows that its media are" in page
    assert "packhorse parity --model" not in page, "reasons alone: the page says what to do once"


def test_reasons_are_short_and_have_magnitudes() -> None:
    reason = "X: document 2 of a pack differs from document 2 alone by 3.1e-02, a | b"
    result = Result("x", "X", REJECTED, reason)
    assert reason_of(result) == r"document 2 of a pack differs from document 2 alone by 1e-02, a \| b"
    assert reason_of(replace(result, reason=200 * "x")).endswith("xxx…")
    assert [magnitude(value) for value in (0.0, 9.9e-7, 1.0, 20.0)] == ["0", "1e-07", "1e+00", "1e+01"]


def test_rows_are_compared_without_their_numbers() -> None:
    result = examined("LlamaForCausalLM")
    page = page_of([result])
    measured = {
        name: replace(measurement, difference=measurement.floor / 100, control=100.0)
        for name, measurement in result.measured.items()
    }
    assert row_of(replace(result, measured=measured)) != row_of(result)
    assert differences(page, page_of([replace(result, measured=measured)])) == []
    change: Callable[..., Result] = partial(replace, result)
    for changed in (
        change(tested=not result.tested),
        change(media=True),
        change(measured={"auto": result.measured["auto"]}),
        change(group=REJECTED, reason="documents mix"),
    ):
        (line,) = differences(page, page_of([changed]))
        assert line.startswith("llama LlamaForCausalLM: packs | `llama` |")
    assert differences(page, page_of([])) != []
    hybrid = examined("Lfm2ForCausalLM")
    assert differences(page_of([hybrid]), page_of([replace(hybrid, layers=("Other",))]))


@pytest.mark.parametrize("name", _SAMPLE)
def test_the_committed_page_has_the_row_of_the_class(name: str) -> None:
    result = examined(name)
    key = result.model_type, name
    assert rows_on(PAGE.read_text())[key] == rows_on(page_of([result]))[key]


def test_the_committed_page_has_every_class_and_no_wrong_one() -> None:
    rows = rows_on(PAGE.read_text())
    assert {(model_type, name) for name, model_type in classes().items()} == set(rows)
    groups = {key: group for key, (group, _) in rows.items()}
    assert FAILS not in groups.values()
    assert {name for (_, name), group in groups.items() if group == NOT_BUILT} == CANNOT_BUILD.keys()
    rejected = {model_type for (model_type, _), group in groups.items() if group not in (PACKS, LAYERS)}
    assert not rejected & PACKABLE
    tested = {model_type for (model_type, _), (_, row) in rows.items() if "| test |" in row}
    assert tested == PACKABLE & {model_type for model_type, _ in rows}


def test_the_committed_page_says_what_was_not_run() -> None:
    page = " ".join(PAGE.read_text().split())
    assert "`causal_conv1d` and `mamba_ssm`: not run with the real kernel" in page
    assert "Flash attention was not run" in page
    assert "not compiled" in page


@pytest.mark.slow
def test_no_class_that_is_accepted_mixes_documents_and_no_row_has_changed() -> None:
    results = [examined(name) for name in classes()]
    assert not [result for result in results if result.group == FAILS]
    assert not differences(PAGE.read_text(), page_of(results))
    not_built = {result.class_name: result.reason for result in results if result.group == NOT_BUILT}
    assert not_built.keys() == CANNOT_BUILD.keys(), not_built
    for name, reason in CANNOT_BUILD.items():
        assert reason in not_built[name]
