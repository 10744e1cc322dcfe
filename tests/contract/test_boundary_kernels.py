"""Layers with state in one call for all documents, by the arguments of the kernels that take boundaries.

causal-conv1d and mamba-ssm cannot be built on a CPU, and flash-linear-attention needs a GPU. So the functions
that transformers imports from them are written in PyTorch here (`contract/kernels`), with their arguments;
transformers' own layers call them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from packhorse.families.stateful import STATEFUL_LAYERS

_HERE = Path(__file__).parent
_DELTA = ("qwen3_next", "olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text")
_MAMBA = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2")
_CONVOLUTION = ("lfm2", "lfm2_moe")
_WITH_KERNELS = (*_DELTA, *_MAMBA, *_CONVOLUTION)
_PARTS = [
    *((name, part) for name in (*_DELTA, *_MAMBA) for part in ("convolution", "recurrence")),
    *((name, "convolution") for name in _CONVOLUTION),
]
_CHECKPOINTED = [
    *((name, "reentrant=False") for name in _WITH_KERNELS),
    *((name, "reentrant=True") for name in _WITH_KERNELS),
]


def compare(names: tuple[str, ...], *kernels: str) -> dict[str, Any]:
    """What ``boundary_work.py`` prints for these models (or options), with these kernels."""
    folders = [str(_HERE / "kernels" / kernel) for kernel in kernels]
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, _HERE / "boundary_work.py", *names]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@pytest.fixture(scope="module")
def without_convolution() -> dict[str, Any]:
    return compare((*_DELTA, "bamba", "lfm2"), "recurrence")


@pytest.fixture(scope="module")
def with_all() -> dict[str, Any]:
    return compare(_WITH_KERNELS, "recurrence", "state_space", "convolution")


def check(parity: Any, name: str, found: dict[str, Any]) -> None:
    parity.check(f"logits of {name}", found["difference"], found["floor"], found["control"])
    control = found["gradient_control"]
    parity.check(f"gradients of {name}", found["gradients"], found["gradient_floor"], control)


@pytest.mark.parametrize("name", _DELTA)
def test_gaps_separate_documents_for_a_convolution_without_a_kernel(
    name: str, without_convolution: dict[str, Any], parity: Any
) -> None:
    found = without_convolution[name]
    assert found["arguments"] == ["cu_seq_lens_q"]
    assert found["mode"]["auto"] == "boundaries"
    assert not found["error"]
    check(parity, name, found)


@pytest.mark.parametrize("name", ["bamba", "lfm2"])
def test_layers_without_their_kernels_run_document_by_document(
    name: str, without_convolution: dict[str, Any], parity: Any
) -> None:
    found = without_convolution[name]
    assert found["arguments"] == []
    assert found["mode"]["auto"] == "per_document"
    check(parity, name, found)
    missing = "mamba-ssm and causal-conv1d" if name == "bamba" else "causal-conv1d"
    assert f"cannot be called with boundaries: its kernels need {missing}: pip install" in found["error"]


@pytest.mark.parametrize("name", _WITH_KERNELS)
def test_kernels_that_take_boundaries_keep_documents_apart(
    name: str, with_all: dict[str, Any], parity: Any
) -> None:
    found = with_all[name]
    assert found["arguments"] == (["cu_seq_lens_q", "seq_idx"] if name in _DELTA else ["seq_idx"])
    assert found["mode"] == {"auto": "boundaries", "per_document": "per_document"}
    check(parity, name, found)


def check_part(parity: Any, name: str, part: str, found: dict[str, Any]) -> None:
    """Assert that documents mix without the boundaries of one part of a layer, and that this is noticed."""
    result = found[name]["without"][part]
    check(parity, f"{name} without boundaries for the {part}", result)
    (warning,) = result["warnings"]
    layer = STATEFUL_LAYERS[name][0]
    assert warning.startswith(f"kernels of {layer} do not keep documents apart: they ignore the boundaries")


@pytest.mark.parametrize(("name", "part"), _PARTS)
def test_the_kernels_of_convolution_and_recurrence_each_need_the_boundaries(
    name: str, part: str, with_all: dict[str, Any], parity: Any
) -> None:
    check_part(parity, name, part, with_all)


@pytest.mark.parametrize("part", ["convolution", "recurrence"])
@pytest.mark.parametrize("name", _DELTA)
def test_a_convolution_needs_gaps_and_the_kernel_of_the_recurrence_needs_boundaries(
    name: str, part: str, without_convolution: dict[str, Any], parity: Any
) -> None:
    check_part(parity, name, part, without_convolution)


@pytest.mark.parametrize("name", _WITH_KERNELS)
def test_hidden_tokens_do_not_reach_the_kernels(name: str, with_all: dict[str, Any], parity: Any) -> None:
    check(parity, f"{name} with hidden tokens", with_all[name]["hidden"])


@pytest.mark.parametrize("name", _DELTA)
def test_hidden_tokens_do_not_fill_the_gaps_between_documents(
    name: str, without_convolution: dict[str, Any], parity: Any
) -> None:
    check(parity, f"{name} with hidden tokens", without_convolution[name]["hidden"])


@pytest.mark.parametrize("name", _WITH_KERNELS)
def test_a_batch_of_padding_alone_has_zero_gradients_with_kernels(
    name: str, with_all: dict[str, Any]
) -> None:
    assert with_all[name]["padding"] == {"largest": 0.0, "same_weights": True}


@pytest.mark.parametrize(("name", "checkpointing"), _CHECKPOINTED)
def test_gradient_checkpointing_with_kernels_gives_the_same_gradients(
    name: str, checkpointing: str, with_all: dict[str, Any], parity: Any
) -> None:
    check(parity, f"{name} with checkpointing", with_all[name]["checkpointing"][checkpointing])


@pytest.mark.parametrize("name", _WITH_KERNELS)
def test_generation_with_kernels_is_as_before(name: str, with_all: dict[str, Any], parity: Any) -> None:
    found = with_all[name]["generation"]
    assert found["same"], "the logits of a model that is not prepared"
    parity.check(f"generated logits of {name}", found["difference"], found["floor"], found["control"])
    assert found["packed_as_before"]


@pytest.mark.parametrize(
    ("kernels", "why"),
    [("ignoring", "they ignore the boundaries of documents"), ("broken", "they raise ValueError")],
)
def test_kernels_that_do_not_keep_documents_apart_are_noticed(kernels: str, why: str, parity: Any) -> None:
    for name, found in compare(("--unsound", *_DELTA), kernels).items():
        layer = STATEFUL_LAYERS[name][0]
        for difference in found["differences"]:
            parity.check(f"logits of {name}", difference, found["floor"], found["control"])
        assert not found["warned_before"], "a single document needs no boundaries"
        (warning,) = found["warnings"]
        assert warning.startswith(f"kernels of {layer} do not keep documents apart: {why}")
        assert warning.endswith("called document by document instead")
        assert found["error"].startswith(f"stateful: kernels of {layer} do not keep documents apart: {why}")
        assert 'prepare(model, stateful="auto")' in found["error"]


def test_dropout_of_adapters_is_not_taken_for_documents_that_mix() -> None:
    for found in compare(("--dropout", "qwen3_next", "lfm2"), "recurrence", "convolution").values():
        assert found["dropout"] > 0
        assert not found["error"]


@pytest.mark.parametrize("name", _WITH_KERNELS)
def test_boundaries_are_rejected_where_ranks_gather_the_weights_of_a_layer(
    name: str, with_all: dict[str, Any]
) -> None:
    errors = with_all[name]["gathered"]
    assert not errors["auto"], "the layer is called for groups of documents"
    assert "ranks gather weights inside of" in errors["boundaries"]
    assert 'call packhorse.prepare(model, stateful="auto")' in errors["boundaries"]
