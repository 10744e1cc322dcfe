"""The check itself: it passes what is right, and says what is wrong with what is not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from contract.cases import conversation
from contract.processors import build, processor
from contract.tiny_models import tiny_model
from demo_data import write_demo_data
from packhorse.cli.app import app
from packhorse.collate_fns import neat_packed_vlm_collater
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import ConfigError
from packhorse.families.models import attention_of
from packhorse.tools.parity import ParityReport, check_parity
from raising import raises_config

CASES = ("text", "one image", "two images", "many turns")


@pytest.fixture(scope="module")
def examples(files: dict[str, Path]) -> list[dict[str, Any]]:
    return [{"conversation": conversation("qwen2_vl", case, files)} for case in CASES]


def check(examples: Any, name: str = "qwen2_vl", **options: Any) -> ParityReport:
    return check_parity(tiny_model(name), processor(name), examples, **options)


def leaking(packs: Any) -> dict[str, Any]:
    """A packed batch whose mask lets each document see those before it."""
    batch = neat_packed_vlm_collater(packs)
    length = batch["input_ids"].shape[1]
    batch["attention_mask"] = torch.ones(len(packs), 1, length, length, dtype=torch.bool).tril()
    return batch


@pytest.fixture(scope="module")
def leak(examples: list[dict[str, Any]]) -> ParityReport:
    """The control: far enough from the samples alone to be no noise."""
    return check(examples, collate=leaking)


def compare(parity: Any, report: ParityReport, leak: ParityReport, *, exact: bool = True) -> None:
    assert report.floor is not None
    assert report.gradient_floor is not None
    parity.check("loss", report.largest, report.floor, leak.largest, exact=exact)
    if report.gradients is not None:
        assert leak.gradients is not None
        parity.check("gradients", report.gradients, report.gradient_floor, leak.gradients, exact=exact)


@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
def test_a_right_batch_passes_and_the_model_comes_back_as_it_was(
    examples: Any, backend: str, leak: ParityReport, parity: Any
) -> None:
    model = tiny_model("qwen2_vl")
    before = attention_of(model)
    report = check(examples, attn_implementation=backend)
    compare(parity, report, leak)
    assert report.ok, report.describe()
    assert report.causes == ()
    assert [document.document for document in report.documents] == [1, 2, 1, 2]
    assert report.gradients is not None
    assert "packed equals unpacked" in report.describe()
    assert attention_of(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_tolerance_is_four_times_the_measured_noise(examples: Any) -> None:
    report = check(examples)
    assert report.floor is not None
    assert report.gradient_floor is not None
    assert 0 < report.floor == report.tolerance / 4
    assert 0 < report.gradient_floor == report.gradient_tolerance / 4
    assert f"noise floor {report.floor:.1e}" in report.describe()


def test_a_given_tolerance_is_taken_and_nothing_is_measured(examples: Any) -> None:
    report = check(examples, tolerance=1e-12, gradient_tolerance=1.0)
    assert not report.ok
    assert (report.tolerance, report.gradient_tolerance) == (1e-12, 1.0)
    assert report.floor is None
    assert report.gradient_floor is None


def test_noise_of_more_than_half_the_digits_is_no_excuse(examples: Any) -> None:
    """A model whose answers depend on the kernel has a large floor; a leak is found all the same."""
    model = copy.deepcopy(tiny_model("qwen2_vl"))

    def noisy(module: Any, arguments: Any, output: Any) -> None:
        if attention_of(module) == "eager":
            output.logits = output.logits * 1.5

    model.register_forward_hook(noisy)
    report = check_parity(model, processor("qwen2_vl"), examples, collate=leaking)
    assert report.floor is not None
    assert report.floor > 0.1
    assert report.tolerance < 0.01
    assert not report.ok


def test_a_model_whose_loss_is_no_number_is_not_blamed_on_packing(examples: Any) -> None:
    model = copy.deepcopy(tiny_model("qwen2_vl"))
    model.lm_head.weight.data[3] = float("nan")
    with raises_config("model", match="sample 0 alone is nan or infinite, so nothing can be compared"):
        check_parity(model, processor("qwen2_vl"), examples)


@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
def test_bfloat16_is_compared_with_its_own_noise(examples: Any, backend: str, parity: Any) -> None:
    model = copy.deepcopy(tiny_model("qwen2_vl")).bfloat16()
    leak = check_parity(model, processor("qwen2_vl"), examples, collate=leaking)
    report = check_parity(model, processor("qwen2_vl"), examples, backend)
    assert report.ok, report.describe()
    assert report.floor is not None
    assert report.floor > 1e-4
    assert not leak.ok
    compare(parity, report, leak, exact=False)


def test_encoded_samples_are_taken_too(examples: Any) -> None:
    encoded = PreTokenizedDatasetWrapper(examples, processor("qwen2_vl"))
    assert check([encoded[index] for index in range(len(examples))], gradients=False).ok


def test_positions_in_one_row_on_a_model_with_mrope_are_named(examples: Any) -> None:
    report = check(examples, get_rope_index=None)
    assert not report.ok
    (cause,) = report.causes
    assert "position_ids have the shape" in cause
    assert "Qwen2VLForConditionalGeneration has mRoPE" in cause
    assert "PACKED DOES NOT EQUAL UNPACKED" in report.describe()


def test_samples_have_the_names_they_are_given(examples: Any) -> None:
    keys = ["a/0", "a/1", "b/0", "b/7"]
    report = check(examples, keys=keys, gradients=False)
    assert [(one.row, one.document, one.key) for one in report.documents] == [
        (0, 1, "a/0"), (0, 2, "b/0"), (1, 1, "a/1"), (1, 2, "b/7"),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="2 keys for 4 samples"):
        check(examples, keys=keys[:2])


def test_why_gradients_of_flex_attention_are_not_compared_on_a_cpu_is_said(examples: Any) -> None:
    report = check(examples, attn_implementation="flex_attention")
    assert report.ok, report.describe()
    assert report.gradients is None
    assert "not compared (flex_attention has no backward pass on a CPU" in report.describe()


def test_a_mask_that_leaks_is_named(leak: ParityReport) -> None:
    assert not leak.ok
    (cause,) = leak.causes
    assert cause.startswith(
        "attention leaks: pack 0, document 2 (2) changes with the tokens of pack 0, document 1 (0)."
    )


def test_a_bool_mask_on_eager_attention_is_named(examples: Any) -> None:
    report = check(examples, attn_implementation="eager", collate=neat_packed_vlm_collater)
    assert not report.ok
    assert any(cause.startswith("attention leaks") for cause in report.causes)


@pytest.mark.parametrize(("by", "words"), [(-1, "shifted twice"), (1, "are not shifted")])
def test_labels_shifted_wrongly_are_named(examples: Any, by: int, words: str) -> None:
    def shift_again(packs: Any) -> dict[str, Any]:
        batch = neat_packed_vlm_collater(packs)
        for pack in range(len(packs)):
            for document in range(1, int(batch["_packed_seq_ids"].max()) + 1):
                places = torch.nonzero(batch["_packed_seq_ids"][pack] == document).flatten()
                labels = batch["labels"][pack, places].roll(by)
                labels[-1 if by < 0 else 0] = -100
                batch["labels"][pack, places] = labels
        return batch

    report = check(examples, collate=shift_again)
    assert not report.ok
    (cause,) = report.causes
    assert words in cause


CAUSES = {
    "state": "Qwen3_5GatedDeltaNet of Qwen3_5ForConditionalGeneration carries state from one document",
    "positions": "position_ids have the shape",
    "mask": "attention leaks: pack 0, document 2 (2) changes with the tokens of pack 0, document 1 (0)",
}


@pytest.mark.parametrize(
    ("mistakes", "causes"),
    [
        (["state"], ["state"]),
        (["state", "mask"], ["state"]),  # while the state leaks, logits show nothing about the mask
        (["state", "positions"], ["state", "positions"]),
        (["mask"], ["mask"]),
        (["mask", "positions"], ["positions", "mask"]),
    ],
)
def test_a_state_leak_is_the_first_cause(
    files: dict[str, Path], mistakes: list[str], causes: list[str]
) -> None:
    rows = [{"conversation": conversation("qwen3_5", case, files)} for case in CASES]
    model = tiny_model("qwen3_5", by_document="state" not in mistakes)
    options: dict[str, Any] = {"collate": leaking} if "mask" in mistakes else {}
    options |= {"get_rope_index": None} if "positions" in mistakes else {}
    report = check_parity(model, processor("qwen3_5"), rows, **options)
    assert not report.ok
    for cause, name in zip(report.causes, causes, strict=True):
        assert cause.startswith(CAUSES[name])


def test_positions_that_run_on_are_named(files: dict[str, Path]) -> None:
    rows = [{"conversation": conversation("llava_onevision", case, files)} for case in CASES]

    def running_on(packs: Any) -> dict[str, Any]:
        batch = neat_packed_vlm_collater(packs)
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand(len(packs), -1) * 2
        return batch

    report = check(rows, "llava_onevision", collate=running_on)
    assert any("must restart with each document" in cause for cause in report.causes)


def test_too_few_samples_are_rejected(examples: Any) -> None:
    with pytest.raises(ConfigError, match="2 samples for 2 packs"):
        check(examples[:2])


# --- the command --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("qwen2_vl").save_pretrained(folder)
    build("qwen2_vl").save_pretrained(folder)
    return folder


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["parity", *map(str, arguments)])


def test_the_command_checks_a_model_on_its_data(tmp_path: Path, saved: Path) -> None:
    meta = write_demo_data(tmp_path)
    result = run(meta, "--model", saved, "--samples", 4, "--dataset", "chats")
    assert result.exit_code == 0, result.output
    for backend in ("sdpa", "eager", "varlen"):
        assert f"{backend}: packed equals unpacked. 4 documents" in result.stdout
    assert "dropped" not in result.stdout
    assert "document 1" not in result.stdout
    result = run(meta, "--model", saved, "--samples", 4, "--dataset", "chats", "-v")
    assert result.stdout.count("  pack 0, document 1, chats/0: ") == 3
    result = run(
        meta, "--model", saved, "--samples", 2, "--random-weights", "--attn-implementation", "sdpa", "--json",
        "--dataset", "chats",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (report,) = json.loads(result.stdout)["reports"]
    assert report["ok"]
    assert len(report["documents"]) == 2


def test_the_command_says_what_it_cannot_do(tmp_path: Path, saved: Path) -> None:
    meta = write_demo_data(tmp_path)
    result = run(meta, "--model", tmp_path / "none")
    assert result.exit_code == 2
    assert "no such folder" in result.stderr
    result = run(meta, "--model", saved, "--dtype", "float99")
    assert result.exit_code == 2
    assert "--dtype float99" in result.stderr


def test_the_command_reports_the_rows_that_it_drops_and_continues(tmp_path: Path, saved: Path) -> None:
    meta = write_demo_data(tmp_path)
    (tmp_path / "media" / "chart00.png").unlink()
    result = run(
        meta, "--model", saved, "--samples", 24, "--attn-implementation", "sdpa", "--dataset", "charts"
    )
    assert result.exit_code == 0, result.output
    assert "3 rows dropped:\n  charts/0: missing_media, no file " in result.stdout
    assert "\n  charts/7: malformed_row, " in result.stdout
    assert "\n  charts/13: broken_media, " in result.stdout
    assert "21 documents" in result.stdout


def test_a_backend_that_is_not_installed_is_one_line(tmp_path: Path, saved: Path) -> None:
    meta = write_demo_data(tmp_path)
    result = run(meta, "--model", saved, "--attn-implementation", "flash_attention_2", "--dataset", "chats")
    assert result.exit_code == 2
    assert result.stderr.startswith("packhorse parity: flash_attention_2 needs the package flash-attn")
    assert len(result.stderr.splitlines()) == 1
    result = run(meta, "--model", saved, "--attn-implementation", "bogus", "--dataset", "chats")
    assert result.stderr.startswith("packhorse parity: --attn-implementation bogus: expected one of eager, ")
