"""Packed equals unpacked: real processors, tiny models, every attention backend that runs on a CPU.

Two rows of mixed documents (text with a fake image, one image, two images, a video), padding at the end of
the shorter one. Logits and gradients are those of separate forward passes of the same samples.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from contract.cases import conversation
from contract.processors import FAMILIES, processor
from contract.tiny_models import MODELS, tiny_model
from packhorse.chat import IGNORE_INDEX
from packhorse.collate_fns import (
    model_inputs,
    neat_packed_vlm_collater,
    packed_sequence_thd_vlm_collater,
    pad_collate_fn,
)
from packhorse.datasets.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import ConfigError
from packhorse.integrations.attention import attention_of, use_attention
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm import PackedDatasetWrapper, neat_pack_dataset_vlm
from packhorse.positions import mrope_position_ids, rope_index

ROWS = (
    ("text", "one image", "two images", "video", "many turns", "one image"),
    ("two images", "text", "video", "system"),
)
CASES = tuple(case for row in ROWS for case in row)
BOTH_WAYS = ("gemma3", "gemma4")
BACKENDS = ("sdpa", "eager", "varlen", "flex_attention")
# Gemma's images see both ways, which a kernel for causal sequences cannot do, and refuses.
PAIRS = [
    (name, backend) for name in MODELS for backend in BACKENDS if name not in BOTH_WAYS or backend != "varlen"
]


@dataclass(frozen=True)
class Unpacked:
    """A family's samples and what its model says about each alone."""

    samples: PreTokenizedDatasetWrapper
    bins: list[list[int]]
    logits: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.fixture(scope="module")
def unpacked(files: dict[str, Path]) -> Callable[..., Unpacked]:
    @cache
    def made(name: str, fakes: bool = True) -> Unpacked:
        numbers = [
            [
                number
                for number in range(len(CASES))
                if CASES[number] in _taken(name) and (number < 6) == first
            ]
            for first in (True, False)
        ]
        rows = [{"conversation": conversation(name, case, files)} for case in CASES if case in _taken(name)]
        renumbered = iter(range(len(rows)))
        bins = [[next(renumbered) for _ in row] for row in numbers]
        samples = PreTokenizedDatasetWrapper(
            rows, processor(name), inject_fake_images=fakes, on_bad="raise", ledger=Ledger()
        )
        model = tiny_model(name)
        batches = [pad_collate_fn([samples[index]], processor(name)) for index in range(len(rows))]
        learned = sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in batches)
        logits = []
        for batch in batches:
            out = model(**model_inputs(batch)).logits[0]
            loss = F.cross_entropy(out, batch["labels"][0], ignore_index=IGNORE_INDEX, reduction="sum")
            (loss / learned).backward()
            logits.append(out.detach()[batch["attention_mask"][0].bool()])
        return Unpacked(samples, bins, logits, gradients_of(model))

    return made


def _taken(name: str) -> tuple[str, ...]:
    return tuple(c for c in dict.fromkeys(CASES) if c != "video" or "video" in FAMILIES[name].modalities)


@pytest.fixture(autouse=True)
def _attention_as_before() -> Iterator[None]:
    before = {name: attention_of(tiny_model(name)) for name in MODELS}
    yield
    for name, attention in before.items():
        use_attention(tiny_model(name), attention)


def packed_batch(name: str, given: Unpacked, backend: str, **options: Any) -> dict[str, Any]:
    model = tiny_model(name)
    packs = PackedDatasetWrapper(
        given.samples, given.bins, 8192, 0, rope_index(model), on_bad="raise", **options
    )
    use_attention(model, backend)
    return neat_packed_vlm_collater([packs[0], packs[1]], attn_implementation=backend, config=model.config)


def largest_difference(given: Unpacked, logits: torch.Tensor, numbers: torch.Tensor) -> float:
    worst = 0.0
    for row, samples in enumerate(given.bins):
        for document, sample in enumerate(samples, 1):
            found = logits[row][numbers[row] == document]
            assert found.shape == given.logits[sample].shape
            assert bool(found.isfinite().all())
            worst = max(worst, float((found - given.logits[sample]).abs().max()))
    return worst


@pytest.fixture
def _uncompiled_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention and its masks as plain PyTorch: compiling them takes a minute."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from transformers import masking_utils
    from transformers.integrations import flex_attention as used

    def plain(query: Any, key: Any, value: Any, training: bool = False, **options: Any) -> Any:
        return flex_attention(query, key, value, **options)

    def plain_mask(_compile: bool = False, **options: Any) -> Any:
        return create_block_mask(**options)

    monkeypatch.setattr(used, "compile_friendly_flex_attention", plain)
    monkeypatch.setattr(masking_utils, "create_block_mask", plain_mask)


@pytest.mark.usefixtures("_uncompiled_flex")
@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_a_packed_batch_is_what_separate_forwards_are(name: str, backend: str, unpacked: Any) -> None:
    # A fake image is refused where flex attention would have to look both ways.
    given, model = (
        unpacked(name, fakes=name not in BOTH_WAYS or backend != "flex_attention"),
        tiny_model(name),
    )
    batch = packed_batch(name, given, backend)
    numbers = batch["_packed_seq_ids"]
    assert len(given.bins[0]) >= 4
    assert bool((numbers[1][-1:] == 0).all())
    with torch.set_grad_enabled(backend != "flex_attention"):  # which has no backward pass on a CPU
        logits = model(**model_inputs(batch)).logits
    assert largest_difference(given, logits.detach(), numbers) <= 2e-5
    if backend == "flex_attention":
        return
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE_INDEX)
    loss.backward()
    found = gradients_of(model)
    assert found.keys() >= given.gradients.keys()
    whole = torch.cat([g.flatten() for g in given.gradients.values()]).norm()
    off = torch.cat([(found[name] - g).flatten() for name, g in given.gradients.items()]).norm()
    assert float(off / whole) <= 1e-4


@pytest.mark.parametrize("name", [n for n in MODELS if n not in BOTH_WAYS])
def test_alignment_changes_no_logit(name: str, unpacked: Any) -> None:
    given = unpacked(name)
    batch = packed_batch(name, given, "varlen", sequence_alignment=16)
    assert batch["input_ids"].shape[1] % 16 == 0
    with torch.no_grad():
        logits = tiny_model(name)(**model_inputs(batch)).logits
    assert largest_difference(given, logits, batch["_packed_seq_ids"]) <= 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "llava_onevision", "smolvlm"])
def test_compiled_flex_attention_is_what_separate_forwards_are(name: str, unpacked: Any) -> None:
    given = unpacked(name)
    batch = packed_batch(name, given, "flex_attention")
    with torch.no_grad():
        logits = tiny_model(name)(**model_inputs(batch)).logits
    assert largest_difference(given, logits, batch["_packed_seq_ids"]) <= 2e-5


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_without_the_models_weights_are_the_models(name: str, unpacked: Any) -> None:
    model = tiny_model(name)
    light = pickle.loads(pickle.dumps(rope_index(model)))
    for sample in unpacked(name).samples:
        expected = mrope_position_ids(sample, model.model.get_rope_index)
        assert torch.equal(mrope_position_ids(sample, light), expected)
    assert rope_index(tiny_model("gemma3")) is None


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_gemma_refuses_kernels_that_cannot_look_both_ways(name: str, unpacked: Any) -> None:
    given = unpacked(name)
    packs = list(PackedDatasetWrapper(given.samples, given.bins, 8192, on_bad="raise"))
    for backend in ("varlen", "flash_attention_2"):
        with pytest.raises(ConfigError, match=f"both ways, which {backend} cannot do"):
            neat_packed_vlm_collater(packs, attn_implementation=backend)
    with pytest.raises(ConfigError, match="both ways, which Transformer Engine cannot do"):
        packed_sequence_thd_vlm_collater(packs)


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_gemma_refuses_flex_attention_for_packs_with_a_fake_image(name: str, unpacked: Any) -> None:
    with pytest.raises(ConfigError, match="inject_fake_images=False"):
        packed_batch(name, unpacked(name), "flex_attention")


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_gemma_without_fake_images_needs_no_mask(name: str, unpacked: Any) -> None:
    given = unpacked(name, fakes=False)
    batch = packed_batch(name, given, "sdpa")
    assert "attention_mask" not in batch
    with torch.no_grad():
        logits = tiny_model(name)(**model_inputs(batch)).logits
    assert largest_difference(given, logits, batch["_packed_seq_ids"]) <= 2e-5


@pytest.mark.parametrize("looks", ["vision", None])
def test_gemma_4_with_sound_and_a_fake_image_is_what_separate_forwards_are(
    looks: str | None, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sound looks back only, and in the smaller Gemma 4 models so do images."""
    name, model = "gemma4", tiny_model("gemma4")
    monkeypatch.setattr(model.config.get_text_config(), "use_bidirectional_attention", looks)
    cases = ("audio", "text", "audio and image", "one image")
    rows = [{"conversation": conversation(name, case, files)} for case in cases]
    samples = PreTokenizedDatasetWrapper(rows, processor(name), on_bad="raise", ledger=Ledger())
    bins = [list(range(len(cases)))]
    with torch.no_grad():
        batches = [pad_collate_fn([sample], processor(name)) for sample in samples]
        alone = [
            model(**model_inputs(batch)).logits[0][batch["attention_mask"][0].bool()] for batch in batches
        ]
        given = Unpacked(samples, bins, alone, {})
        for backend in ("sdpa", "eager"):
            use_attention(model, backend)
            pack = PackedDatasetWrapper(samples, bins, 8192, on_bad="raise")[0]
            batch = neat_packed_vlm_collater([pack], attn_implementation=backend, config=model.config)
            logits = model(**model_inputs(batch)).logits
            assert largest_difference(given, logits, batch["_packed_seq_ids"]) <= 2e-5


def test_a_fake_image_in_a_pack_changes_no_loss_of_its_text(unpacked: Any) -> None:
    """Its features reach no token that is learned: their gradient is nothing."""
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
    rows = [{"conversation": conversation(name, case, files)} for case in _taken(name) * 4]
    samples = PreTokenizedDatasetWrapper(rows, processor(name), on_bad="raise", ledger=Ledger())
    longest = max(len(samples[index]["input_ids"]) for index in range(len(_taken(name))))
    ledger = Ledger()
    packs = neat_pack_dataset_vlm(
        samples, longest + 100, get_rope_index=rope_index(tiny_model(name)), ledger=ledger
    )
    assert packs._carries
    delivered = sum(len(pack["seq_lens"]) for pack in packs)
    assert delivered + len([drop for drop in ledger if drop.reason == "pack_full"]) == len(rows)
    counted = packs._claims.lengths(range(len(_taken(name))))
    assert counted == [len(samples[index]["input_ids"]) for index in range(len(_taken(name)))]
