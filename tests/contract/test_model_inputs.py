"""A batch and a model that do not belong together are rejected, not trained with leaking attention."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import packhorse
from contract.cases import conversation
from contract.processors import processor
from contract.tiny_models import tiny_model
from loader_samples import load, texts
from noise_floor import CONTROL, FACTOR, largest_difference, noise_floor
from packhorse.collate.batch_formats import ATTENTION
from packhorse.collate_fns import model_inputs, neat_packed_vlm_collater, pad_collate_fn
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import ConfigError
from packhorse.families.models import attention_of
from packhorse.families.qwen_vl import rope_index
from packhorse.integrations.attention import use_attention
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm import PackedDatasetWrapper
from raising import raises_config

pytestmark = pytest.mark.usefixtures("attention_as_before")

INSTALLED = ("sdpa", "eager", "flex_attention", "varlen")
# A batch is right for the attention it was made for; and numbers to add are right for sdpa, too.
RIGHT = {
    "sdpa": {"sdpa"},
    "eager": {"eager", "sdpa"},
    "flex_attention": {"flex_attention"},
    "varlen": {"varlen"},
    "flash_attention_2": {"varlen"},
}


def encode_samples(name: str, files: dict[str, Path], **options: Any) -> PreTokenizedDatasetWrapper:
    rows = [{"conversation": conversation(name, case, files)} for case in ("text", "one image", "many turns")]
    return PreTokenizedDatasetWrapper(rows, processor(name), on_bad="raise", ledger=Ledger(), **options)


def pack(name: str, files: dict[str, Path], **options: Any) -> dict[str, Any]:
    samples = encode_samples(name, files, **options)
    made = PackedDatasetWrapper(samples, [[0, 1, 2]], 8192, 0, rope_index(tiny_model(name)), exact=True)
    return dict(made[0])


@pytest.mark.parametrize("made_for", ATTENTION)
def test_a_batch_for_another_attention_than_the_decoders_is_rejected(
    made_for: str, files: dict[str, Path]
) -> None:
    model = tiny_model("qwen2_vl")
    batch = neat_packed_vlm_collater([pack("qwen2_vl", files)], attn_implementation=made_for)
    for runs in INSTALLED:
        use_attention(model, runs)
        if runs in RIGHT[made_for]:
            assert model_inputs(batch, model).keys() == model_inputs(batch).keys()
            continue
        with raises_config("attn_implementation", runs, match=f"the batch is for .*{made_for}"):
            model_inputs(batch, model)


def test_a_leaking_batch_is_the_one_that_is_rejected(files: dict[str, Path]) -> None:
    model, packs = tiny_model("qwen2_vl"), [pack("qwen2_vl", files)]
    names = ("sdpa", "eager", "varlen")
    batches = {name: neat_packed_vlm_collater(packs, attn_implementation=name) for name in names}
    places = {name: batch["_packed_seq_ids"][0] == 2 for name, batch in batches.items()}
    logits = {}
    for name, attention in (("sdpa", "sdpa"), ("eager", "eager"), ("varlen", "sdpa")):
        use_attention(model, attention)
        with torch.no_grad():
            logits[name] = model(**model_inputs(batches[name])).logits[0][places[name]]
    floor = noise_floor(logits["sdpa"], logits["eager"])
    assert largest_difference(logits["varlen"], logits["sdpa"]) > CONTROL * FACTOR * floor
    with raises_config("attn_implementation", "sdpa", match=r"use_attention\(model, 'varlen'\)"):
        model_inputs(batches["varlen"], model)


def test_the_attention_of_a_model_inside_a_wrapper_is_used(files: dict[str, Path]) -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

    use_attention(tiny_model("qwen2_vl"), "sdpa")
    batch = neat_packed_vlm_collater([pack("qwen2_vl", files)], attn_implementation="varlen")
    with raises_config("attn_implementation", "sdpa"):
        model_inputs(batch, Wrapper(tiny_model("qwen2_vl")))


def test_batches_that_are_not_packed_go_with_any_attention(files: dict[str, Path]) -> None:
    batch = pad_collate_fn([encode_samples("qwen2_vl", files)[0]], processor("qwen2_vl"))
    for runs in INSTALLED:
        use_attention(tiny_model("qwen2_vl"), runs)
        assert "input_ids" in model_inputs(batch, tiny_model("qwen2_vl"))


@pytest.mark.parametrize("fakes", [True, False])
def test_images_with_bidirectional_attention_are_rejected_where_no_mask_is_made(
    fakes: bool, files: dict[str, Path]
) -> None:
    model = tiny_model("gemma3")
    packs = [pack("gemma3", files, inject_fake_images=fakes)]
    batch = neat_packed_vlm_collater(packs, attn_implementation="sdpa", config=model.config)
    use_attention(model, "sdpa")
    assert model_inputs(batch, model)
    use_attention(model, "varlen")
    with raises_config("attn_implementation", "varlen"):
        model_inputs(batch, model)


def test_an_unknown_attention_is_rejected_and_the_model_stays_as_it_was() -> None:
    model = tiny_model("qwen2_vl")
    before = attention_of(model)
    with pytest.raises(ConfigError, match=r"'bogus': expected one of eager, .*sdpa.*varlen"):
        use_attention(model, "bogus")
    with pytest.raises(ConfigError, match="flash_attention_2 needs the package flash-attn"):
        use_attention(model, "flash_attention_2")
    assert attention_of(model) == before


def test_varlen_runs_under_autocast(files):
    """Queries leave the rotary embedding in float32 there; a kernel wants one type for all."""
    import torch

    from contract.tiny_models import tiny_model
    from packhorse.families.varlen import varlen_attention
    from packhorse.integrations.attention import use_attention

    model = tiny_model("qwen2_vl")
    before = attention_of(model)
    use_attention(model, "varlen")
    try:
        layer = model.model.language_model.layers[0].self_attn
        states = torch.randn(1, 4, 6, 16)
        value = torch.randn(1, 2, 6, 16).bfloat16()
        ends = torch.tensor([0, 2, 6], dtype=torch.int32)
        with torch.autocast("cpu", torch.bfloat16):
            made, _ = varlen_attention(
                layer, states, states[:, :2], value, None, cu_seq_lens_q=ends, max_length_q=4, is_causal=True
            )
        assert made.dtype == torch.bfloat16
        assert made.shape == (1, 6, 4, 16)
    finally:
        use_attention(model, before)


# A loader and a model.


def make_loader(model: Any, **options: Any) -> packhorse.Loader:
    return load(texts(6), model=model, family="qwen2_5_vl", pack_size=1024, **options)


def test_a_loader_for_another_attention_leaks_and_raises_if_it_is_given_the_model() -> None:
    model = tiny_model("qwen2_5_vl")
    logits = {}
    for name, attention in (("sdpa", "sdpa"), ("eager", "eager"), ("varlen", "sdpa")):
        use_attention(model, attention)
        # A config is not compared: the model may be loaded later, with the attention of the setting.
        batch = next(iter(make_loader(model.config, attn_implementation=name)))
        place = torch.cumsum(torch.tensor((0, *batch.info.document_lengths[0])), 0)
        assert ("attention_mask" in batch) == (name != "varlen")
        with torch.no_grad():
            logits[name] = model(**batch).logits[0][place[1] : place[2]]
    floor = noise_floor(logits["sdpa"], logits["eager"])
    assert largest_difference(logits["varlen"], logits["sdpa"]) > CONTROL * FACTOR * floor
    remedy = r"prepare\(model, 'varlen'\) before.*or remove attn_implementation"
    with raises_config("attn_implementation", "varlen", match=remedy):
        make_loader(model, attn_implementation="varlen")
    packhorse.prepare(model, "varlen")
    batch = next(iter(make_loader(model, attn_implementation="varlen")))
    with torch.no_grad():
        right = model(**batch).logits[0][place[1] : place[2]]
    assert largest_difference(right, logits["sdpa"]) <= FACTOR * floor


@pytest.mark.parametrize("backend", ATTENTION)
def test_a_loader_raises_for_a_model_that_does_not_take_its_batches(backend: str) -> None:
    model = tiny_model("qwen2_5_vl")
    flash = {"flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2"}
    takes = {**RIGHT, "varlen": {"varlen", *flash}, "flash_attention_2": {"varlen", *flash}}[backend]
    for runs in (*INSTALLED, *flash, "paged|flash_attention_2", "paged|sdpa"):
        model.config.get_text_config()._attn_implementation = runs
        if runs in takes:
            assert make_loader(model, attn_implementation=backend).attn_implementation == backend
            continue
        with raises_config("attn_implementation", backend, match=f"runs {re.escape(repr(runs))} attention"):
            make_loader(model, attn_implementation=backend)


def test_the_attention_of_a_model_inside_adapters_and_wrappers_is_compared() -> None:
    from peft import LoraConfig, get_peft_model

    model = copy.deepcopy(tiny_model("qwen2_5_vl"))
    use_attention(model, "sdpa")
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    for wrapped in (adapted, torch.compile(model), torch.compile(adapted)):
        assert make_loader(wrapped, attn_implementation="sdpa").attn_implementation == "sdpa"
        with raises_config("attn_implementation", "varlen"):
            make_loader(wrapped, attn_implementation="varlen")


def test_padded_batches_go_with_any_attention() -> None:
    model = tiny_model("qwen2_5_vl")
    use_attention(model, "sdpa")
    assert make_loader(model, mode="pad", attn_implementation="varlen").attn_implementation is None
