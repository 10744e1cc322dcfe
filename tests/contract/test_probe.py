"""Measuring on a tiny copy: the same result in any state of a process, and kept only while it holds."""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.torch_version import TorchVersion
from transformers import Lfm2Config, Lfm2ForCausalLM, LlamaConfig, LlamaForCausalLM

import packhorse
from packhorse.families import probe as probe_module
from packhorse.families.models import attention_of
from packhorse.families.probe import measure, probe
from raising import raises_config

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


class SubclassOfLlama(LlamaForCausalLM):  # type: ignore[misc]
    """Code without a version."""


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what this process has measured."""
    for name in ("_RESULTS", "_CLASSES"):
        monkeypatch.setattr(probe_module, name, {})


def stored_files(cache: Path) -> list[Path]:
    return list(cache.glob("probe-*.json"))


# What is kept, and for how long.


def test_a_result_for_a_class_of_transformers_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_process(monkeypatch)
    config = LlamaConfig(**SMALL)
    result = probe(LlamaForCausalLM, config)
    assert not result.problem
    (file,) = stored_files(cache)
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "problem": "of the file"}))
    new_process(monkeypatch)
    assert probe(LlamaForCausalLM, config).problem == "of the file"


@pytest.mark.parametrize("package", ["transformers", "torch"])
def test_a_result_of_another_version_is_not_used(
    package: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_process(monkeypatch)
    config = LlamaConfig(**SMALL)
    assert not probe(LlamaForCausalLM, config).problem
    (file,) = stored_files(cache)
    file.write_text(json.dumps({**json.loads(file.read_text()), "problem": "of the file"}))
    with monkeypatch.context() as context:
        # transformers puts another module in its place while it is imported.
        context.setattr(importlib.import_module(package), "__version__", TorchVersion("99.0"))
        new_process(context)
        assert not probe(LlamaForCausalLM, config).problem
        assert len(stored_files(cache)) == 2
    new_process(monkeypatch)
    assert probe(LlamaForCausalLM, config).problem == "of the file", "the same version uses it"
    assert len(stored_files(cache)) == 2


@pytest.mark.parametrize(
    "content", ['{"layers": [', "", "[]", "{}", '{"layers": "Lfm2ShortConv"}', "\0" * 40]
)
def test_a_damaged_file_is_replaced(
    content: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    new_process(monkeypatch)
    config = LlamaConfig(**SMALL)
    result = probe(LlamaForCausalLM, config)
    (file,) = stored_files(cache)
    file.write_text(content)
    new_process(monkeypatch)
    assert probe(LlamaForCausalLM, config) == result
    assert "measuring again" in caplog.text
    assert json.loads(file.read_text())["layers"] == []


def test_what_cannot_be_measured_is_measured_by_the_next_process(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_process(monkeypatch)
    config = LlamaConfig(**SMALL)

    def forward(self: Any, **inputs: Any) -> Any:
        raise MemoryError("no memory")

    with monkeypatch.context() as context:
        context.setattr(LlamaForCausalLM, "forward", forward)
        assert "no memory" in probe(LlamaForCausalLM, config).problem
    assert "no memory" in probe(LlamaForCausalLM, config).problem, "the same in all of a process"
    assert not stored_files(cache)
    new_process(monkeypatch)
    assert not probe(LlamaForCausalLM, config).problem
    assert stored_files(cache)


def test_a_cache_that_cannot_be_written_costs_a_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    new_process(monkeypatch)
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACKHORSE_CACHE", str(tmp_path / "file" / "cache"))
    assert not probe(LlamaForCausalLM, LlamaConfig(**SMALL)).problem
    assert "so every process measures" in caplog.text


def test_code_without_a_version_is_measured_in_every_process(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only a layer, a registered decoder or a replaced class is not of transformers."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration
    from transformers.models.llama import modeling_llama

    new_process(monkeypatch)
    assert not probe(SubclassOfLlama, LlamaConfig(**SMALL)).problem

    class SubclassOfConfig(LlamaConfig):  # type: ignore[misc]
        pass

    assert not probe(LlamaForCausalLM, SubclassOfConfig(**SMALL)).problem

    class SubclassOfMLP(modeling_llama.LlamaMLP):  # type: ignore[misc]
        pass

    with monkeypatch.context() as context:
        context.setattr(modeling_llama, "LlamaMLP", SubclassOfMLP)
        assert not probe(LlamaForCausalLM, LlamaConfig(**SMALL)).problem

    class RegisteredConfig(LlamaConfig):  # type: ignore[misc]
        model_type = "registered"

    from transformers import AutoConfig, AutoModel, LlamaModel

    class RegisteredModel(LlamaModel):  # type: ignore[misc]
        config_class = RegisteredConfig

    AutoConfig.register("registered", RegisteredConfig)
    AutoModel.register(RegisteredConfig, RegisteredModel)
    config = LlavaConfig(text_config=RegisteredConfig(**SMALL))
    assert not probe(LlavaForConditionalGeneration, config).problem
    assert not stored_files(cache)


def test_a_class_that_is_defined_once_more_is_measured_once_more(cache: Path) -> None:
    """Two classes of one name in one file, as of a notebook, with a layer that is wrong in the second."""

    def define(layer: type[torch.nn.Module]) -> Any:
        class Model(LlamaForCausalLM):  # type: ignore[misc]
            def __init__(self, config: Any) -> None:
                super().__init__(config)
                for block in self.model.layers:
                    block.mlp = layer()

        return Model

    class Sum(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states.cumsum(1) / 8

    config = LlamaConfig(**SMALL)
    assert probe(define(torch.nn.ReLU), config).layers == ()
    assert probe(define(Sum), config).layers == ("Sum",)


# The state of the process.


@contextmanager
def default(setting: str) -> Iterator[None]:
    if setting == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            yield
    elif setting == "inference mode":
        with torch.inference_mode():
            yield
    elif setting == "meta":
        with torch.device("meta"):
            yield
    elif setting == "default device":
        torch.set_default_device("meta")
        try:
            yield
        finally:
            torch.set_default_device(None)
    else:
        torch.set_default_dtype(getattr(torch, setting))
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "setting", ["autocast", "inference mode", "meta", "default device", "bfloat16", "float64"]
)
def test_defaults_of_the_process_do_not_change_the_result(setting: str) -> None:
    config = Lfm2Config(**SMALL, num_key_value_heads=1, layer_types=["conv", "full_attention"])
    expected = measure(Lfm2ForCausalLM, config)
    assert expected.layers == ("Lfm2ShortConv",)
    with default(setting):
        dtype, device = torch.get_default_dtype(), torch.get_default_device()
        result = measure(Lfm2ForCausalLM, config)
        assert (torch.get_default_dtype(), torch.get_default_device()) == (dtype, device)
    assert result == expected


def test_random_numbers_of_the_user_are_as_without_a_measurement() -> None:
    class Random(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *arguments: Any, **options: Any) -> Any:
            torch.manual_seed(random.randrange(100) + np.random.randint(100))
            return super().forward(*arguments, **options)

    def draw() -> tuple[float, ...]:
        numbers = (torch.rand(()).item(), random.random(), float(np.random.rand()))
        return (*numbers, torch.rand((), device="cuda").item()) if torch.cuda.is_available() else numbers

    def seed() -> None:
        torch.manual_seed(7), random.seed(7), np.random.seed(7)

    for model_class in (LlamaForCausalLM, Random):
        seed()
        expected = draw()
        seed()
        measure(model_class, LlamaConfig(**SMALL))
        assert draw()[:3] == expected[:3]
        if model_class is LlamaForCausalLM:
            seed()
            measure(model_class, LlamaConfig(**SMALL))
            assert draw() == expected
    assert measure(Random, LlamaConfig(**SMALL)) == measure(Random, LlamaConfig(**SMALL))


def test_kernels_that_need_a_gpu_are_not_measured() -> None:
    """The structure of a model is measured, on the CPU, whatever is installed for its layers."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here / "kernels" / "gpu"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, here / "probe_work.py"]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(run.stdout)
    restored, fast = result.pop("restored"), result.pop("fast")
    assert {name: measured["layers"] for name, measured in result.items()} == {
        "kimi_linear": ["KimiLinearDeltaAttention"],
        "zamba": ["ZambaMambaMixer"],
        "jamba": ["JambaMambaMixer"],
        "mamba2": ["Mamba2Mixer"],
        "subclass": ["Qwen3_5GatedDeltaNet"],
        "installed": ["Convolution"],
        "lazy": ["LazyConvolution"],
        "module": ["Lfm2ShortConv"],
    }
    assert not any(measured["problem"] for measured in result.values())
    assert restored == ["wrapper", "module", "function"], "the model itself runs the kernels"
    assert fast is True


# What a measurement reports.


def test_a_mistake_in_the_measurement_itself_is_not_reported_as_one_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compare(*tensors: torch.Tensor) -> float:
        raise NameError("a mistake")

    monkeypatch.setattr(probe_module, "_difference", compare)
    with pytest.raises(NameError, match="a mistake"):
        measure(LlamaForCausalLM, LlamaConfig(**SMALL))


@pytest.mark.parametrize("kinds", [["full_attention"] * 2, ["conv", "full_attention"]])
def test_documents_that_mix_in_eager_attention_alone_exclude_that_attention(kinds: list[str]) -> None:
    class Mixing(Lfm2ForCausalLM):  # type: ignore[misc]
        def forward(self, *arguments: Any, **options: Any) -> Any:
            output = super().forward(*arguments, **options)
            if attention_of(self) == "eager":
                output.logits = output.logits.cumsum(1)
            return output

    config = Lfm2Config(**SMALL, num_key_value_heads=1, layer_types=kinds)
    result = measure(Mixing, config)
    assert not result.problem
    assert result.eager.startswith("document 2 of a pack differs from document 2 alone")
    assert not measure(Lfm2ForCausalLM, config).eager
    model = Mixing(config)
    with raises_config("attn_implementation", "eager", match="document 2 of a pack differs"):
        packhorse.prepare(model, "eager", device="cpu")
    assert packhorse.prepare(model, device="cpu").attn_implementation == "sdpa"


def test_eager_attention_that_raises_is_no_problem() -> None:
    class WithoutEager(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *arguments: Any, **options: Any) -> Any:
            if attention_of(self) == "eager":
                raise ValueError("use sdpa")
            return super().forward(*arguments, **options)

    result = measure(WithoutEager, LlamaConfig(**SMALL))
    assert (result.problem, result.varlen, result.complete) == ("", "", False)


def test_a_model_without_logits_for_each_token_is_rejected_with_their_shape() -> None:
    class LastToken(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *arguments: Any, **options: Any) -> Any:
            output = super().forward(*arguments, **options)
            output.logits = output.logits[:, -1:]
            return output

    result = measure(LastToken, LlamaConfig(**SMALL))
    assert "its logits [1, 1, 128] are not those of its tokens [1, 26]" in result.problem
    assert not result.complete
