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

from packhorse.families.packing import STATEFUL_LAYERS

_HERE = Path(__file__).parent
_DELTA = ("qwen3_next", "olmo_hybrid")
_MAMBA = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2")
_CONVOLUTION = ("lfm2", "lfm2_moe")


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
    return compare((*_DELTA, *_MAMBA, *_CONVOLUTION), "recurrence", "state_space", "convolution")


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


@pytest.mark.parametrize("name", [*_DELTA, *_MAMBA, *_CONVOLUTION])
def test_kernels_that_take_boundaries_keep_documents_apart(
    name: str, with_all: dict[str, Any], parity: Any
) -> None:
    found = with_all[name]
    assert found["arguments"] == (["cu_seq_lens_q", "seq_idx"] if name in _DELTA else ["seq_idx"])
    assert found["mode"] == {"auto": "boundaries", "per_document": "per_document"}
    check(parity, name, found)


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
