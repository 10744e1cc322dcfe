"""``prepare(model, vision=…)``: what it chooses, rejects and reports, and models in wrappers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import packhorse
from contract.processors import processor
from contract.samples import make_image
from contract.separate import gradients_of
from contract.tiny_models import tiny_model
from noise_floor import largest_difference, noise_floor, relative_difference
from packhorse.families import varlen, vision
from packhorse.families.vision import FLASH_VARLEN, attention_of_tower, find_towers, runs_in_one_call
from packhorse.integrations import attention
from packhorse.integrations.attention import AttentionInfo, use_vision
from raising import raises_config

GPU = AttentionInfo("cuda", dtype=torch.bfloat16, capability=(9, 0))


def model_of(name: str = "qwen3_vl") -> Any:
    return copy.deepcopy(tiny_model(name))


def one_call(model: Any) -> Any:
    assert packhorse.prepare(model, "sdpa", device="cpu", vision="one_call").vision == "one_call"
    return model


def tower_of(model: Any) -> Any:
    return find_towers(model)[0]


def choose(info: AttentionInfo = GPU, setting: str = "auto", name: str = "qwen3_vl", **options: Any) -> Any:
    model = model_of(name).to(info.dtype)
    result = use_vision(model, setting, info, options.pop("decoder", "varlen"), **options)
    return *result, attention_of_tower(tower_of(model))


# What is chosen.


def test_on_a_cpu_auto_leaves_the_tower_as_it_is() -> None:
    model = model_of()
    report = packhorse.prepare(model, device="cpu")
    assert (report.vision, report.vision_problem) == ("per_item", "")
    assert "one attention call per image in the vision tower" in str(report)
    assert attention_of_tower(tower_of(model)) == "sdpa"
    assert not tower_of(model)._forward_pre_hooks


def test_on_a_gpu_auto_is_one_call_where_the_kernel_is_right() -> None:
    assert choose() == ("one_call", "", FLASH_VARLEN)
    report = packhorse.prepare(model_of().bfloat16(), "sdpa", device="cuda")
    assert report.vision == "one_call"
    assert "one attention call for all images in the vision tower" in str(report)


@pytest.mark.parametrize(
    ("info", "why"),
    [
        (replace(GPU, dtype=torch.float32), "not in float32"),
        (replace(GPU, varlen=False), "no varlen kernel"),
        (replace(GPU, capability=(7, 5)), "compute capability"),
    ],
    ids=["float32", "old torch", "old GPU"],
)
def test_where_the_kernel_does_not_run_auto_says_why_and_one_call_is_rejected(
    info: AttentionInfo, why: str
) -> None:
    mode, problem, attention_then = choose(info)
    assert (mode, attention_then) == ("per_item", "sdpa")
    assert why in problem
    with raises_config("vision", "one_call", match=why):
        choose(info, "one_call")
    assert choose(info, "per_item") == ("per_item", "", "sdpa")


@pytest.mark.parametrize(
    ("width", "why"),
    [(320, "256 dimensions, the model's 320"), (36, "multiple of 8 dimensions")],
)
def test_heads_of_another_width_than_the_kernel_takes_are_rejected(width: int, why: str) -> None:
    model = model_of().bfloat16()
    for layer in vision.attention_layers(tower_of(model)):
        layer.head_dim = width
    with raises_config("vision", "one_call", match=why):
        use_vision(model, "one_call", GPU, "varlen")
    assert not runs_in_one_call(tower_of(model))


def test_float32_weights_under_autocast_are_one_call() -> None:
    assert choose(replace(GPU, dtype=torch.float32), dtype=torch.bfloat16)[0] == "one_call"
    report = packhorse.prepare(model_of(), "sdpa", device="cuda", autocast=torch.bfloat16)
    assert report.vision == "one_call"
    report = packhorse.prepare(model_of(), "sdpa", device="cuda")
    assert report.vision_problem == "its kernel computes in bfloat16 or float16, not in float32"
    assert f"({report.vision_problem})" in str(report)


def test_the_tower_runs_the_flash_attention_of_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "installed_flash", lambda: frozenset({"flash_attention_2"}))
    info = replace(GPU, flash=frozenset({"flash_attention_2"}))
    assert choose(info, decoder="flash_attention_2") == ("one_call", "", "flash_attention_2")
    assert choose(info, decoder="flex_attention") == ("one_call", "", FLASH_VARLEN)


def test_a_tower_that_was_loaded_with_flash_attention_keeps_it() -> None:
    for setting, expected in (("auto", "flash_attention_2"), ("per_item", "sdpa")):
        model = model_of()
        vision.set_tower_attention(tower_of(model), "flash_attention_2")
        use_vision(model, setting, AttentionInfo("cpu"), "sdpa")
        assert attention_of_tower(tower_of(model)) == expected


@pytest.mark.parametrize("name", ["gemma3", "internvl", "llava_onevision", "smolvlm"])
def test_models_with_another_tower_report_nothing_and_reject_one_call(name: str) -> None:
    model = model_of(name).bfloat16()
    assert use_vision(model, "auto", GPU, "sdpa") == ("", "")
    assert "vision tower" not in str(packhorse.prepare(model, "sdpa", device="cpu"))
    with raises_config("vision", "one_call", match=f"{type(model).__name__} has no vision tower"):
        packhorse.prepare(model, "sdpa", device="cpu", vision="one_call")


def test_a_tower_of_the_users_own_class_is_not_known() -> None:
    class OwnTower(type(tower_of(tiny_model("qwen3_vl")))):  # type: ignore[misc]
        pass

    model = model_of()
    tower_of(model).__class__ = OwnTower
    assert use_vision(model, "auto", GPU, "sdpa") == ("", "")
    with raises_config("vision", "one_call"):
        use_vision(model, "one_call", GPU, "sdpa")


def test_a_model_without_images_rejects_one_call() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=32, num_attention_heads=2))
    with raises_config("vision", "one_call", match="LlamaForCausalLM has no vision tower"):
        packhorse.prepare(model, "sdpa", device="cpu", vision="one_call")


def test_an_unknown_value_is_rejected_before_anything_changes() -> None:
    model = model_of()
    before = copy.deepcopy(model.config)
    with raises_config("vision", "one-call", match="one_call"):
        packhorse.prepare(model, "varlen", device="cpu", vision="one-call")
    assert model.config.to_dict() == before.to_dict()


def test_a_rejected_model_keeps_the_attention_of_its_decoder() -> None:
    model = model_of()
    with raises_config("vision", "one_call"):
        packhorse.prepare(model, "eager", device="cuda", vision="one_call")
    assert model.config.get_text_config()._attn_implementation == "sdpa"


def test_a_model_can_be_prepared_again_and_again() -> None:
    model = model_of()
    for setting in ("one_call", "one_call", "per_item", "auto", "one_call", "auto"):
        packhorse.prepare(model, device="cpu", vision=setting)
        assert runs_in_one_call(tower_of(model)) == (setting == "one_call")
    assert len(tower_of(model)._forward_pre_hooks) == 1


def test_a_model_that_is_built_or_saved_with_the_config_is_as_before(tmp_path: Path) -> None:
    model = one_call(model_of())
    built = type(model)(copy.deepcopy(model.config))
    assert not runs_in_one_call(tower_of(built))
    model.save_pretrained(tmp_path)
    assert not runs_in_one_call(tower_of(type(model).from_pretrained(tmp_path)))


# What runs.


def test_attention_gets_the_kernel_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def kernel(query: Any, *_: Any, **options: Any) -> Any:
        seen.append(options)
        return query

    states = [torch.zeros(6, 2, 8)] * 3
    bounds = torch.tensor([0, 2, 6])
    for takes in ({"window_size", "scale"}, {"is_causal"}):
        monkeypatch.setattr(varlen, "varlen_kernel", lambda names=takes: (kernel, frozenset(names)))
        for causal in (False, True):
            varlen._run_kernel(states, bounds, 4, 0.5, None, causal)
    assert [options.get("window_size") for options in seen] == [(-1, -1), (-1, 0), None, None]
    assert [options.get("is_causal") for options in seen] == [None, None, False, True]


@pytest.mark.parametrize(
    "more", [{"attention_mask": torch.ones(1)}, {"dropout": 0.1}, {"cu_seq_lens_q": None}]
)
def test_attention_without_boundaries_alone_is_rejected(more: dict[str, Any]) -> None:
    states = torch.zeros(1, 2, 6, 8)
    given = {"attention_mask": None, "cu_seq_lens_q": torch.tensor([0, 6]), "max_length_q": 6, **more}
    with raises_config("vision", match='vision="per_item"'):
        vision.segment_attention(torch.nn.Linear(1, 1), states, states, states, **given)


# Wrappers.


INPUTS: dict[str, Any] = {}


def inputs() -> dict[str, Any]:
    """Two images, as the processor returns them."""
    if not INPUTS:
        made = processor("qwen3_vl")
        images = [make_image(70, 90), make_image(140, 64)]
        text = "<|vision_start|><|image_pad|><|vision_end|>" * 2 + "why"
        INPUTS.update(made(images=images, text=[text], return_tensors="pt"))
    return dict(INPUTS)


def run(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logits = model(**inputs()).logits
    logits.float().square().mean().backward()
    return logits.detach(), gradients_of(model)


def one_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = vision.attend_by_segment

    def attend_to_all(
        query: Any, key: Any, value: Any, bounds: Any, longest: int, *more: Any, **named: Any
    ) -> Any:
        end = query.shape[2]
        return attend(query, key, value, torch.tensor([0, end]), end, *more, **named)

    monkeypatch.setattr(vision, "attend_by_segment", attend_to_all)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_see_the_same_boundaries_again(
    reentrant: bool, parity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = run(model_of().train())
    model = one_call(model_of()).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    _, found = run(model)
    one_segment(monkeypatch)
    _, wrong = run(one_call(model_of()).train())
    check_gradients(found, expected, wrong, parity)


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "weights"])
def test_bfloat16_gives_the_same_up_to_rounding(
    autocast: bool, parity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def logits_of(model: Any) -> torch.Tensor:
        model = model if autocast else model.bfloat16()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(**inputs()).logits

    eager = model_of()
    vision.set_tower_attention(tower_of(eager), "eager")
    expected, other, found = (logits_of(model) for model in (model_of(), eager, one_call(model_of())))
    one_segment(monkeypatch)
    control = largest_difference(logits_of(one_call(model_of())), expected)
    floor = noise_floor(expected, other)
    parity.check("logits", largest_difference(found, expected), floor, control, exact=False)


def check_gradients(found: Any, expected: Any, wrong: Any, parity: Any) -> None:
    assert found.keys() == expected.keys()
    floor = noise_floor(expected, measure=relative_difference)
    difference, control = (relative_difference(value, expected) for value in (found, wrong))
    parity.check("gradients", difference, floor, control)


def test_a_frozen_tower_trains_the_decoder_as_before(parity: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = model_of(), one_call(model_of())
    for each in (plain, model):
        tower_of(each).requires_grad_(False)
    expected, found = run(plain)[1], run(model)[1]
    assert not any("visual" in name for name in found)
    one_segment(monkeypatch)
    check_gradients(found, expected, run(model)[1], parity)


def test_copies_and_pickled_models_run_in_one_call() -> None:
    model = one_call(model_of())
    expected = model(**inputs()).logits
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert runs_in_one_call(tower_of(copied))
        assert torch.equal(copied(**inputs()).logits, expected)


def test_generation_is_as_before() -> None:
    plain, model = model_of(), one_call(model_of())
    given = inputs() | {"max_new_tokens": 5, "do_sample": False}
    for each in (plain, model):
        each.eval()
    assert torch.equal(model.generate(**given), plain.generate(**given))


@contextmanager
def process_group(folder: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _peft(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["qkv", "q_proj"]))


def _peft_of_whole_towers(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["visual"]))


def _ddp(model: Any) -> Any:
    return torch.nn.parallel.DistributedDataParallel(model)


def _fsdp2(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model.model.visual, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _fsdp(model: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def _compile(model: Any) -> Any:
    model.model.visual = torch.compile(model.model.visual, backend="eager")
    return model


@pytest.mark.parametrize("first", ["prepare", "wrap"])
@pytest.mark.parametrize("wrap", [_peft, _peft_of_whole_towers, _ddp, _fsdp2, _fsdp, _compile])
def test_models_in_wrappers_run_in_one_call(
    wrap: Callable[[Any], Any], first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        expected = model_of()(**inputs()).logits
    calls: list[int] = []
    attend = vision.attend_by_segment

    def count(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        return attend(*arguments, **options)

    monkeypatch.setattr(vision, "attend_by_segment", count)
    with process_group(tmp_path):
        model = wrap(one_call(model_of()) if first == "prepare" else model_of())
        if first == "wrap":
            one_call(model)
        found = model(**inputs()).logits
        found.float().square().mean().backward()
    assert len(calls) == len(list(vision.attention_layers(find_towers(model)[0])))
    assert largest_difference(found, expected) <= 4 * noise_floor(expected)
