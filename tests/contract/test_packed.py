"""Packed equals unpacked: real processors, tiny models, every attention backend that runs on a CPU.

Two rows of mixed documents (text with a fake image, one image, two images, a video), padding at the end of
the shorter one. Logits and gradients are those of separate forward passes of the same samples.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from contract.cases import conversation
from contract.processors import FAMILIES, processor
from contract.separate import Separate, gradients_of, separate_forwards
from contract.tiny_models import MODELS, media_of, tiny_model
from noise_floor import largest_difference, noise_floor, relative_difference
from packhorse.chat import IGNORE_INDEX
from packhorse.collate_fns import (
    model_inputs,
    neat_packed_vlm_collater,
    packed_sequence_thd_vlm_collater,
    pad_collate_fn,
)
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.families.models import attention_of
from packhorse.families.qwen_vl import mrope_position_ids, rope_index
from packhorse.integrations.attention import use_attention
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm import PackedDatasetWrapper, neat_pack_dataset_vlm
from raising import raises_config

pytestmark = pytest.mark.usefixtures("attention_as_before")

ROWS = (
    ("text", "one image", "two images", "video", "many turns", "one image"),
    ("two images", "text", "video", "system"),
)
CASES = tuple(case for row in ROWS for case in row)
BIDIRECTIONAL = ("gemma3", "gemma4")
WITH_STATE = ("qwen3_5", "qwen3_5_moe", "lfm2_vl", "nemotron_omni")
BACKENDS = ("sdpa", "eager", "varlen", "flex_attention")
# Gemma's images have bidirectional attention, which kernels for causal sequences do not support.
PAIRS = [
    (name, backend)
    for name in MODELS
    for backend in BACKENDS
    if name not in BIDIRECTIONAL or backend != "varlen"
]


@dataclass(frozen=True)
class Unpacked:
    """A family's samples, what its model says about each alone, and how far a leaking mask is from that."""

    samples: PreTokenizedDatasetWrapper
    bins: list[list[int]]
    separate: Separate
    leak: float
    gradient_leak: float


@pytest.fixture(scope="module")
def unpacked(files: dict[str, Path]) -> Callable[..., Unpacked]:
    @cache
    def unpacked_of(name: str, fakes: bool) -> Unpacked:
        numbers = [
            [
                number
                for number in range(len(CASES))
                if CASES[number] in _accepted_cases(name) and (number < 6) == first
            ]
            for first in (True, False)
        ]
        rows = [
            {"conversation": conversation(name, case, files)}
            for case in CASES
            if case in _accepted_cases(name)
        ]
        renumbered = iter(range(len(rows)))
        bins = [[next(renumbered) for _ in row] for row in numbers]
        return with_leak(name, encode(name, rows, fakes), bins)

    return lambda name, fakes=True: unpacked_of(name, fakes)  # one entry for both spellings of a call


def encode(name: str, rows: list[dict[str, Any]], fakes: bool) -> PreTokenizedDatasetWrapper:
    return PreTokenizedDatasetWrapper(
        rows, processor(name), inject_fake_images=fakes, on_bad="raise", ledger=Ledger()
    )


def with_leak(name: str, samples: PreTokenizedDatasetWrapper, bins: list[list[int]]) -> Unpacked:
    """Samples alone, and packed with a mask that lets each document see those before it."""
    model = tiny_model(name)
    given = Unpacked(samples, bins, separate_forwards(model, processor(name), samples), 0.0, 0.0)
    before = attention_of(model)
    batch = packed_batch(name, given, "sdpa")
    length = batch["input_ids"].shape[1]
    batch["attention_mask"] = torch.ones(len(bins), 1, length, length, dtype=torch.bool).tril()
    logits, gradients = forward(model, batch)
    use_attention(model, before)
    leak = largest_difference(of_documents(given, logits, batch), given.separate.logits)
    return replace(given, leak=leak, gradient_leak=relative_difference(gradients, given.separate.gradients))


def forward(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of a packed batch and, where the attention has a backward pass, gradients of its mean loss."""
    learns = attention_of(model) != "flex_attention"  # it has none on a CPU
    with torch.set_grad_enabled(learns):
        logits = model(**model_inputs(batch)).logits
    if learns:
        F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE_INDEX).backward()
    return logits.detach(), gradients_of(model)


def _accepted_cases(name: str) -> tuple[str, ...]:
    return tuple(c for c in dict.fromkeys(CASES) if c != "video" or "video" in media_of(name))


def packed_batch(name: str, given: Unpacked, backend: str, **options: Any) -> dict[str, Any]:
    model = tiny_model(name)
    packs = PackedDatasetWrapper(
        given.samples, given.bins, 8192, 0, rope_index(model), on_bad="raise", **options
    )
    use_attention(model, backend)
    rows = [packs[row] for row in range(len(given.bins))]
    return neat_packed_vlm_collater(rows, attn_implementation=backend, config=model.config)


def of_documents(given: Unpacked, logits: torch.Tensor, batch: dict[str, Any]) -> list[torch.Tensor]:
    """The logits of each sample's visible tokens in a packed batch."""
    found = {
        sample: logits[row][batch["_packed_seq_ids"][row] == document]
        for row, samples in enumerate(given.bins)
        for document, sample in enumerate(samples, 1)
    }
    return [found[sample] for sample in range(len(found))]


def check_logits(parity: Any, given: Unpacked, logits: torch.Tensor, batch: dict[str, Any]) -> None:
    found = of_documents(given, logits, batch)
    assert all(bool(one.isfinite().all()) for one in found)
    difference = largest_difference(found, given.separate.logits)
    parity.check("logits", difference, given.separate.floor, given.leak)


@pytest.mark.usefixtures("uncompiled_flex")
@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_a_packed_batch_is_what_separate_forwards_are(
    name: str, backend: str, unpacked: Any, parity: Any
) -> None:
    # A fake image is rejected if flex attention would have to be bidirectional.
    given = unpacked(name, fakes=name not in BIDIRECTIONAL or backend != "flex_attention")
    batch = packed_batch(name, given, backend)
    assert len(given.bins[0]) >= 4
    assert bool((batch["_packed_seq_ids"][1][-1:] == 0).all())
    logits, gradients = forward(tiny_model(name), batch)
    check_logits(parity, given, logits, batch)
    if backend != "flex_attention":
        difference = relative_difference(gradients, given.separate.gradients)
        parity.check("gradients", difference, given.separate.gradient_floor, given.gradient_leak)


@pytest.mark.parametrize("name", [n for n in MODELS if n not in BIDIRECTIONAL])
def test_alignment_changes_no_logit(name: str, unpacked: Any, parity: Any) -> None:
    given = unpacked(name)
    batch = packed_batch(name, given, "varlen", sequence_alignment=16)
    assert batch["input_ids"].shape[1] % 16 == 0
    with torch.no_grad():
        logits = tiny_model(name)(**model_inputs(batch)).logits
    check_logits(parity, given, logits, batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "llava_onevision", "smolvlm"])
def test_compiled_flex_attention_is_what_separate_forwards_are(name: str, unpacked: Any, parity: Any) -> None:
    given = unpacked(name)
    batch = packed_batch(name, given, "flex_attention")
    with torch.no_grad():
        logits = tiny_model(name)(**model_inputs(batch)).logits
    check_logits(parity, given, logits, batch)


@pytest.mark.parametrize("name", [n for n in MODELS if n.startswith("qwen")])
def test_positions_without_the_models_weights_are_the_models(name: str, unpacked: Any) -> None:
    model = tiny_model(name)
    light = pickle.loads(pickle.dumps(rope_index(model)))
    for sample in unpacked(name).samples:
        expected = mrope_position_ids(sample, model.model.get_rope_index)
        assert torch.equal(mrope_position_ids(sample, light), expected)
    assert rope_index(tiny_model("gemma3")) is None


@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_kernels_without_bidirectional_attention_are_rejected_for_gemma(name: str, unpacked: Any) -> None:
    given = unpacked(name)
    packs = list(PackedDatasetWrapper(given.samples, given.bins, 8192, on_bad="raise"))
    for backend in ("varlen", "flash_attention_2"):
        with raises_config("attn_implementation", backend, match="bidirectional"):
            neat_packed_vlm_collater(packs, attn_implementation=backend)
    with raises_config("attn_implementation", "Transformer Engine", match="bidirectional"):
        packed_sequence_thd_vlm_collater(packs)


@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_flex_attention_is_rejected_for_gemma_packs_with_a_fake_image(name: str, unpacked: Any) -> None:
    with raises_config("inject_fake_images", True):
        packed_batch(name, unpacked(name), "flex_attention")


@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_gemma_without_fake_images_needs_no_mask(name: str, unpacked: Any, parity: Any) -> None:
    given = unpacked(name, fakes=False)
    batch = packed_batch(name, given, "sdpa")
    assert "attention_mask" not in batch
    with torch.no_grad():
        logits = tiny_model(name)(**model_inputs(batch)).logits
    check_logits(parity, given, logits, batch)


@pytest.mark.parametrize("looks", ["vision", None])
def test_gemma_4_with_audio_and_a_fake_image_is_what_separate_forwards_are(
    looks: str | None, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, parity: Any
) -> None:
    """Audio attends causally, and in the smaller Gemma 4 models so do images."""
    name, model = "gemma4", tiny_model("gemma4")
    monkeypatch.setattr(model.config.get_text_config(), "use_bidirectional_attention", looks)
    cases = ("audio", "text", "audio and image", "one image")
    rows = [{"conversation": conversation(name, case, files)} for case in cases]
    samples = PreTokenizedDatasetWrapper(rows, processor(name), on_bad="raise", ledger=Ledger())
    given = with_leak(name, samples, [list(range(len(cases)))])
    for backend in ("sdpa", "eager"):
        batch = packed_batch(name, given, backend)
        with torch.no_grad():
            logits = model(**model_inputs(batch)).logits
        check_logits(parity, given, logits, batch)


def test_nemotron_omni_with_audio_is_what_separate_forwards_are(files: dict[str, Path], parity: Any) -> None:
    name, cases = "nemotron_omni", ("audio", "text", "audio and image", "two audio clips", "one image")
    rows = [{"conversation": conversation(name, case, files)} for case in cases]
    given = with_leak(name, encode(name, rows, fakes=True), [list(range(len(cases)))])
    for backend in ("sdpa", "varlen"):
        batch = packed_batch(name, given, backend)
        with torch.no_grad():
            logits = tiny_model(name)(**model_inputs(batch)).logits
        check_logits(parity, given, logits, batch)


@pytest.mark.parametrize("name", WITH_STATE)
def test_layers_with_state_see_no_fake_image_in_a_pack_and_none_in_a_padded_batch(
    name: str, files: dict[str, Path], parity: Any
) -> None:
    """Otherwise zeros in its place move the state, and the text after it gets other logits."""
    rows = [{"conversation": conversation(name, case, files)} for case in ("text", "many turns")]
    fakes, plain = (encode(name, rows, fakes=fakes) for fakes in (True, False))
    model, as_built = tiny_model(name), tiny_model(name, by_document=False)
    batch = packed_batch(name, Unpacked(fakes, [[0, 1]], Separate([], {}, 0.0, 0.0), 0.0, 0.0), "sdpa")
    with torch.no_grad():
        packed = model(**model_inputs(batch)).logits[0]
        for index, (with_fake, without) in enumerate(zip(fakes, plain, strict=True)):
            visible = batch["_packed_seq_ids"][0] == index + 1
            text = {
                "input_ids": without["input_ids"][None, :-1],
                "position_ids": batch["position_ids"][..., visible],  # one that counts the fake image, too
            }
            use_attention(as_built, "eager")
            other = as_built(**text).logits[0]
            use_attention(as_built, "sdpa")
            alone = as_built(**text).logits[0]
            padded = pad_collate_fn([with_fake], processor(name))
            hidden = padded["attention_mask"][0] == 0
            found = [m(**model_inputs(padded)).logits[0][~hidden] for m in (model, as_built)]
            floor, control = noise_floor(alone, other), largest_difference(found[1], alone)
            parity.check("packed logits", largest_difference(packed[visible], alone), floor, control)
            parity.check("padded logits", largest_difference(found[0], alone), floor, control)
            assert 0 < int(hidden.sum()) < len(hidden) - 1


def test_a_fake_image_in_a_pack_changes_no_loss_of_its_text(unpacked: Any) -> None:
    """Its features reach no token that is supervised: their gradient is nothing."""
    given, model = unpacked("qwen2_vl"), tiny_model("qwen2_vl")
    packs = PackedDatasetWrapper(given.samples, [[CASES.index("text")]], 8192, 0, rope_index(model))
    for backend in ("sdpa", "eager", "varlen"):
        use_attention(model, backend)
        batch = neat_packed_vlm_collater([packs[0]], attn_implementation=backend)
        batch["pixel_values"].requires_grad_()
        logits = model(**model_inputs(batch)).logits
        F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
        assert float(batch["pixel_values"].grad.abs().max()) == 0.0
        gradients_of(model)


@pytest.mark.parametrize("name", [n for n in MODELS if FAMILIES[n].bundled])
def test_samples_counted_before_they_are_encoded_fill_packs_exactly(
    name: str, files: dict[str, Path]
) -> None:
    rows = [{"conversation": conversation(name, case, files)} for case in _accepted_cases(name) * 4]
    samples = PreTokenizedDatasetWrapper(rows, processor(name), on_bad="raise", ledger=Ledger())
    longest = max(len(samples[index]["input_ids"]) for index in range(len(_accepted_cases(name))))
    ledger = Ledger()
    packs = neat_pack_dataset_vlm(
        samples, longest + 100, get_rope_index=rope_index(tiny_model(name)), ledger=ledger
    )
    assert packs._carries
    delivered = sum(len(pack["seq_lens"]) for pack in packs)
    assert delivered + len([drop for drop in ledger if drop.reason == "pack_full"]) == len(rows)
    counted = packs._lazy_lengths.lengths(range(len(_accepted_cases(name))))
    assert counted == [len(samples[index]["input_ids"]) for index in range(len(_accepted_cases(name)))]
