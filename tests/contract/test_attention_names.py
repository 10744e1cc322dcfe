"""Other names of attention: their decoders get what keeps documents apart, and compute the same as alone.

The kernels do not run on a CPU: functions with their names do, which record their arguments and compute in
PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

import packhorse
from contract.tiny_models import tiny_model
from loader_samples import load, texts
from noise_floor import largest_difference, noise_floor
from packhorse.collate import batch_formats
from packhorse.collate_fns import model_inputs
from packhorse.families.varlen import varlen_attention
from packhorse.integrations.attention import declare_batch_format, use_attention
from raising import raises_config

pytestmark = pytest.mark.usefixtures("attention_as_before")


@dataclass
class Recorder:
    """Attention that honours ``cu_seq_lens_q``, or ignores it."""

    leaks: bool = False
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __call__(
        self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> Any:
        self.calls.append({"attention_mask": attention_mask, **options})
        if self.leaks:
            options = {name: value for name, value in options.items() if not name.startswith("cu_seq")}
        return varlen_attention(module, query, key, value, attention_mask, **options)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[AttentionInterface]]:
    monkeypatch.setattr(batch_formats, "_declared", {})
    before = dict(AttentionInterface())
    yield AttentionInterface
    for name in [*AttentionInterface()]:
        if name in before:
            AttentionInterface.register(name, before[name])
        else:  # transformers has no way to unregister a function
            del AttentionInterface._global_mapping[name]


def logits_of(model: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        model_inputs(batch, model)  # checks the model
        return model(**model_inputs(batch)).logits


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("flash_attention_2", False),
        ("flash_attention_3", False),
        ("flash_attention_4", False),
        ("kernels-community/flash-attn2@main", True),
        ("my_attention", True),
    ],
)
def test_the_decoder_gets_where_documents_begin_and_no_mask(
    name: str, declared: bool, registry: type[AttentionInterface], parity: Any
) -> None:
    model, packed, leaking = tiny_model("qwen2_5_vl"), Recorder(), Recorder(leaks=True)
    samples = {"pack_size": 512, "batch_size": 2, "family": "qwen2_5_vl"}
    expected = {}
    for masked in ("sdpa", "eager"):
        use_attention(model, masked)
        expected[masked] = logits_of(model, next(iter(load(texts(12), model=model, **samples))))
    registry.register(name, packed)
    model.config.get_text_config()._attn_implementation = name
    if declared:
        with raises_config("attn_implementation", name, match="declare_batch_format"):
            load(texts(12), model=model, **samples)
        declare_batch_format(name, "varlen")
    loader = load(texts(12), model=model, **samples)
    assert loader.attn_implementation == name
    batch = next(iter(loader))
    assert len(batch.info.document_lengths[0]) > 1
    found = logits_of(model, batch)
    assert packed.calls
    for call in packed.calls:
        assert call["attention_mask"] is None
        assert torch.equal(call["cu_seq_lens_q"], batch["cu_seq_lens_q"])
        assert torch.equal(call["cu_seq_lens_k"], batch["cu_seq_lens_q"])
        assert call["max_length_q"] == call["max_length_k"] == batch["max_length_q"]
    registry.register(name, leaking)
    real = batch.info.document_ids > 0
    rows = {key: value[real] for key, value in expected.items()}
    floor = noise_floor(rows["sdpa"], rows["eager"])
    control = largest_difference(logits_of(model, batch)[real], rows["sdpa"])
    parity.check(f"logits, {name}", largest_difference(found[real], rows["sdpa"]), floor, control)


def test_workers_that_are_spawned_need_no_declaration(registry: type[AttentionInterface]) -> None:
    model = tiny_model("qwen2_5_vl")
    registry.register("my_attention", Recorder())
    declare_batch_format("my_attention", "varlen")
    model.config.get_text_config()._attn_implementation = "my_attention"
    loader = load(texts(6), model=model, num_workers=1, multiprocessing_context="spawn", family="qwen2_5_vl")
    with closing(loader):
        assert "cu_seq_lens_q" in next(iter(loader))


def test_prepare_sets_a_declared_function(registry: type[AttentionInterface]) -> None:
    model = tiny_model("qwen2_vl", seed=5)
    registry.register("my_attention", Recorder())
    with raises_config("attn_implementation", "my_attention", match="declare_batch_format"):
        packhorse.prepare(model, "my_attention")
    declare_batch_format("my_attention", "varlen")
    assert packhorse.prepare(model, "my_attention").attn_implementation == "my_attention"
    assert model.config.get_text_config()._attn_implementation == "my_attention"
