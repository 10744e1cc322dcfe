"""Measure models whose layers have kernels for a GPU, with tensors on the CPU; print JSON.

Runs in an interpreter of its own: transformers looks for kernels when it is imported.
"""

from __future__ import annotations

import importlib
import inspect
import json
from types import ModuleType
from typing import Any

import torch
from transformers import CONFIG_MAPPING, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_5 import modeling_qwen3_5

from packhorse.families.probe import measure

causal_conv1d_fn: Any = importlib.import_module("causal_conv1d").causal_conv1d_fn
_MEASURED = ("kimi_linear", "zamba", "jamba", "mamba2")
_SIZES = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
is_fast_path_available = True


class Subclass(modeling_qwen3_5.Qwen3_5ForCausalLM):  # type: ignore[misc]
    """A user's class, with layers of transformers."""


def lazy_load_kernel(name: str) -> ModuleType:
    """As in files of older versions of transformers, whose layers look for kernels when they are built."""
    return importlib.import_module(name)


class Convolution(torch.nn.Module):
    """Chooses its function as much code of the Hub does."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.conv1d = torch.nn.Conv1d(size, size, 4, groups=size, padding=3)
        self.kernel = self.choose()

    def choose(self) -> Any:
        return causal_conv1d_fn

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if is_fast_path_available or self.kernel is not None:
            self.kernel(hidden_states)
        output: torch.Tensor = self.conv1d(hidden_states.mT)[..., : hidden_states.shape[1]].mT
        return output


class LazyConvolution(Convolution):
    def choose(self) -> Any:
        return getattr(lazy_load_kernel("causal_conv1d"), "causal_conv1d_fn", None)


def model_with(layer: type[Convolution]) -> type:
    class Model(LlamaForCausalLM):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for block in self.model.layers:
                block.mlp = layer(config.hidden_size)

    return Model


def wrap_as_kernels_does(function: Any) -> Any:
    """The module that the package ``kernels`` puts in the place of a function."""

    class Func(torch.nn.Module):
        def forward(self, *arguments: Any, **options: Any) -> Any:
            return function(*arguments, **options)

    Func.forward.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return Func()


def describe(model_class: Any, config: Any) -> dict[str, Any]:
    result = measure(model_class, config)
    return {"layers": result.layers, "problem": result.problem}


def needs_gpu(function: Any) -> bool:
    try:
        function(torch.ones(1, 2, 3), torch.ones(2, 1))
    except RuntimeError as error:
        return "expected x.is_cuda()" in str(error)
    return False


if __name__ == "__main__":
    results = {}
    for name in _MEASURED:
        config = CONFIG_MAPPING[name]()
        results[name] = describe(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    results["subclass"] = describe(Subclass, CONFIG_MAPPING["qwen3_5_text"]())
    llama = LlamaConfig(**_SIZES, num_attention_heads=2)
    results["installed"] = describe(model_with(Convolution), llama)
    results["lazy"] = describe(model_with(LazyConvolution), llama)
    lfm2 = CONFIG_MAPPING["lfm2"](num_hidden_layers=2, layer_types=["conv", "full_attention"])
    modeling_lfm2.causal_conv1d_fn = wrap_as_kernels_does(modeling_lfm2.causal_conv1d_fn)
    results["module"] = describe(modeling_lfm2.Lfm2ForCausalLM, lfm2)
    functions = {
        "wrapper": modeling_qwen3_5.causal_conv1d_fn,
        "module": modeling_lfm2.causal_conv1d_fn,
        "function": causal_conv1d_fn,
    }
    restored = [name for name, function in functions.items() if needs_gpu(function)]
    print(json.dumps(results | {"restored": restored, "fast": is_fast_path_available}))
