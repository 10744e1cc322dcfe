"""Training speed of a hybrid decoder on a GPU: padded, and packed with layers that carry state.

    PYTHONPATH=src python benchmarks/gpu_hybrid.py [--quick]

A decoder of 1.5 billion parameters in the shape of Qwen3.5's (three gated delta nets to one layer of full
attention, random weights, bfloat16) runs forward and backward over the same samples (mean about 700 tokens)
padded at random, padded by length, and in packs of 8,192 tokens whose layers with state keep documents apart
in the ways of ``packhorse.prepare(stateful=…)``: called document by document, and once with boundaries. All
layers are checkpointed, padded and packed: 8 samples of 4,096 tokens need more than 139 GiB otherwise.

Padded and packed runs of a comparison use the same kernels for the recurrence. There are two comparisons,
each in its own process, since transformers chooses the kernels when it is imported:

- ``torch``: PyTorch operations, which transformers falls back to and which take no boundaries.
- ``fla``: Triton kernels of flash-linear-attention, each with one launch configuration: to choose among all
  of them takes longer than the rest. Padded and packed runs have the same ones. Each way runs over all
  batches once before it is measured, since kernels are compiled for their shapes.

Prints real tokens a second, and how far losses of packed tokens are from those of the samples alone, with
two measures for it: how far two right attention kernels on the sample alone are apart (rounding), and a
control, in which the attention separates documents and the layers with state do not. What fails is printed,
the rest goes on, and the exit code is 1. Each comparison takes under eight minutes on an H200, most of it to
compile kernels; ``--kernels`` runs one of them, and ``--records`` joins the records of both. ``--quick``
tries ``torch`` out on a CPU with a small model; nothing is said about speed then.

Needs torch 2.10 or later, transformers 5.22 and flash-linear-attention (its package fla-core is enough; on an
H100 or H200 the backward pass of version 0.6 needs Triton 3.7.1 or later); of Packhorse's other dependencies,
numpy, pillow, orjson and filelock. No network.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import packhorse
from gpu_packing import (
    COLUMNS,
    ROUNDING,
    Batch,
    Speed,
    bins_of,
    describe_inputs,
    losses_alone,
    make_samples,
    measure_way,
    packed_batches,
    packed_difference,
    padded_batches,
    promise_parity,
)
from gpu_stages import Stages, log
from packhorse.integrations.attention import use_attention
from promises import RECORD, fact, make_parser, parse, promise, record_outcome

PACKED_OVER_PADDED = 2.0
PACKS = 4  # of which losses are compared
MODES = {"torch": ("per_document",), "fla": ("boundaries", "per_document")}  # the default of a GPU first
SHARE_OF_TORCH = 0.4  # of the time, at most
RANDOM = "padded at random"
LEAK = "the same with state that leaks between documents (control: must be seen)"
SHORTEST_STEP, LONGEST_STEP = 0.001, 0.1  # of the decay of state, per token


@record_outcome()
def main() -> None:
    """Run both comparisons, each in its own process, or the one of this process."""
    parser = make_parser(__doc__, samples=160, pack=8192, longest=4096, mean=700.0, budget=460.0)
    parser.add_argument("--batch", type=int, default=8, help="samples of a padded batch")
    parser.add_argument("--kernels", choices=tuple(MODES), help="run only the comparison with these kernels")
    parser.add_argument("--records", nargs=len(MODES), help="of the comparisons, in the order above")
    options = parse(parser, samples=16, pack=384, longest=256, mean=60.0)
    if not options.quick and not torch.cuda.is_available():
        sys.exit("there is no GPU; --quick tries this out on a CPU")
    if options.kernels is None:
        run_all(options)
    else:
        compare(options)


# --- processes ----------------------------------------------------------------------------------------------


def run_all(options: argparse.Namespace) -> None:
    """Run a process for each comparison and record what they promise and report."""
    started = time.perf_counter()
    if not options.quick:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # the record names the GPU
    packages = ("transformers", "fla-core", "flash-linear-attention", "triton", "causal-conv1d")
    fact("packages", f"packhorse {packhorse.__version__}, " + ", ".join(map(describe_package, packages)))
    failed = []
    # Nothing is compiled for torch, so its time is known: fla has all of the rest.
    for number, kernels in enumerate(("torch",) if options.quick else MODES):
        left = options.budget - (time.perf_counter() - started)
        if options.records:
            record = json.loads(Path(options.records[number]).read_bytes())
        else:
            record = run_process(kernels, SHARE_OF_TORCH * left if kernels == "torch" else left)
        for entry in record["facts"]:
            fact(f"{kernels}: {entry['fact']}", entry["value"], entry["unit"])
        for entry in record["promises"]:
            repeat_promise(entry)
        if record["problem"] or record["exit"] is None:
            failed.append(f"{kernels}: {record['problem'] or 'it did not end in time, or was killed'}")
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


def describe_package(name: str) -> str:
    """Return the name and the version of a package."""
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {name}"


def run_process(kernels: str, seconds: float) -> dict[str, Any]:
    """Run the comparison with these kernels in a process; show what it prints and return its record."""
    command = [sys.executable, "-u", *sys.argv, "--kernels", kernels, "--budget", str(0.85 * seconds)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "record.json"
        settings = {RECORD: str(file), "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        print(f"{kernels}: at most {seconds:.0f} s", flush=True)
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **settings},
        ) as process:
            assert process.stdout is not None  # it has a pipe
            timer = threading.Timer(seconds, process.kill)
            timer.start()
            try:
                for line in process.stdout:
                    print(f"  | {line}", end="", flush=True)
            finally:
                timer.cancel()
                process.kill()
        if file.exists():
            record: dict[str, Any] = json.loads(file.read_bytes())
            return record
    return {"facts": [], "promises": [], "exit": process.returncode, "problem": "it recorded nothing"}


def repeat_promise(entry: dict[str, Any]) -> None:
    """Record a promise of another process here."""
    promise(
        entry["claim"],
        entry["value"],
        entry.get("full_target", entry["target"]),
        baseline=entry["baseline"],
        unit=entry["unit"],
        at_least=entry["sign"] == ">=",
        kind=entry["kind"],
    )


# --- one comparison -----------------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> None:
    """Measure speed and parity with the chosen kernels, what is promised first."""
    kernels, device = options.kernels, "cpu" if options.quick else "cuda"
    if options.quick:
        torch.set_num_threads(1)
    if kernels == "torch":
        sys.modules["fla"] = None  # type: ignore[assignment]  # as if it were not installed
    else:
        launch_one_configuration()
        importlib.import_module("fla.ops.gated_delta_rule")  # transformers would ignore an error here
    stages = Stages(options.budget)
    samples = make_samples(options)
    model = hybrid_decoder(options.quick, device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    describe_inputs(model, samples, options)
    tokens = sum(len(sample["input_ids"]) for sample in samples)
    speeds: dict[str, Speed] = {}

    def measure(way: str, batches: list[Batch]) -> None:
        begun = time.perf_counter()
        warm_up = len(batches) if kernels == "fla" else 3
        speeds[way] = measure_way(way, model, batches, tokens, device, warm_up=warm_up)
        log(f"  {time.perf_counter() - begun - speeds[way].seconds:.0f} s before the measured pass")
        print(COLUMNS, speeds[way].row(speeds[RANDOM].rate), sep="\n", flush=True)
        fact(way, speeds[way].describe(speeds[RANDOM].rate))

    def measure_padded(way: str, *, by_length: bool) -> None:
        use_attention(model, "sdpa")
        measure(way, padded_batches(samples, options.batch, by_length=by_length))

    def measure_packed(way: str, mode: str) -> None:
        prepared = packhorse.prepare(model, "varlen", device=device, stateful=mode)
        log(str(prepared))
        if bool(prepared.kernels) != (mode == "boundaries"):
            raise RuntimeError(f"the layers do not run with {mode}")
        measure(way, packed_batches(samples, bins, options.pack, "varlen"))
        if not options.quick and mode == MODES[kernels][0]:
            claim = f"real tokens a second, a hybrid model packed with {mode} ({kernels})"
            promise(claim, speeds[way].rate / speeds[RANDOM].rate, PACKED_OVER_PADDED, baseline=RANDOM)

    stages.run(RANDOM, partial(measure_padded, RANDOM, by_length=False))
    if RANDOM not in speeds:
        sys.exit(f"failed: {RANDOM}")
    check_kernels(kernels, device)
    bins = bins_of(samples, options.pack)
    some = bins[:: math.ceil(len(bins) / PACKS)]  # packs of long samples and of short ones
    # Before the model is prepared: its layers with state let documents leak then.
    known = stages.run("parity: alone and control", partial(references, model, samples, some, options))
    compared = []
    for mode in MODES[kernels]:
        way = f"packed, {mode}"
        stages.run(way, partial(measure_packed, way, mode))
        if known is None or way not in speeds:
            continue
        found = stages.run(f"parity: {way}", partial(packed_apart, model, samples, some, options, known))
        if found is not None:
            compared.append(mode)
            known[1][mode] = found
            log(f"  {found:.3g}, by rounding {known[1]['rounding']:.3g}")
    if known is not None:
        promise_parity(known[1], compared, usual=ROUNDING, leak=LEAK, where=f" ({kernels})")
    by_length = "padded by length"
    stages.run(by_length, partial(measure_padded, by_length, by_length=True))
    log("done")
    if stages.failed:
        sys.exit(f"failed: {', '.join(stages.failed)}")


def hybrid_decoder(tiny: bool, device: str) -> Any:
    """Return Qwen3.5's decoder with random weights, large enough that attention changes the logits.

    State decays slowly, as in trained models; with the initial values of transformers it is gone after a
    token, and no leak could be seen.
    """
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "vocab_size": 32_768}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256}
    linear = {"linear_num_key_heads": 16, "linear_num_value_heads": 16}
    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 512}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        linear |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    config = transformers.Qwen3_5TextConfig(
        **sizes,
        **heads,
        **linear,
        initializer_range=0.1 if tiny else 0.04,
        tie_word_embeddings=False,
        use_cache=False,
        dtype=torch.float32 if tiny else torch.bfloat16,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.Qwen3_5ForCausalLM(config).to(config.dtype)
    for module in model.modules():
        if hasattr(module, "dt_bias"):
            low, high = math.log(SHORTEST_STEP), math.log(LONGEST_STEP)
            steps = torch.empty_like(module.dt_bias, dtype=torch.float32).uniform_(low, high).exp()
            module.dt_bias.data.copy_(steps.expm1().log())  # softplus of it are the steps
    return model.train()


def launch_one_configuration() -> None:
    """Let Triton take one of the launch configurations of each kernel, instead of timing all of them."""
    triton = importlib.import_module("triton")
    tune = triton.autotune

    def take_one(configs: list[Any], *arguments: Any, **options: Any) -> Any:
        return tune([configs[len(configs) // 2]], *arguments, **options)

    triton.autotune = take_one


def check_kernels(kernels: str, device: str) -> None:
    """Raise if transformers does not run the recurrence with these kernels, which take boundaries or not."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    states = torch.randn(1, 1024, 16, 128, device=device, dtype=torch.bfloat16)
    gates = torch.full((1, 1024, 16), 0.5, device=device, dtype=torch.bfloat16)
    cumulative = torch.tensor([0, 1024], device=device)
    try:
        torch_chunk_gated_delta_rule(
            states, states, states, g=-gates.float(), beta=gates, cu_seqlens=cumulative
        )
        takes = True
    except ValueError:  # PyTorch operations take none
        takes = False
    if takes != (kernels == "fla"):
        raise RuntimeError(f"transformers does not run {kernels}: its kernels take boundaries: {takes}")


# --- parity -------------------------------------------------------------------------------------------------

Reference = tuple[dict[int, torch.Tensor], dict[str, float]]


@torch.no_grad()
def references(
    model: Any, samples: list[Batch], bins: list[list[int]], options: argparse.Namespace
) -> Reference:
    """Return the losses of samples alone, and how far another kernel (rounding) and the control are off.

    The control are packs in a model that is not prepared, with a mask by which its attention is right.
    """
    device = str(model.device)
    chosen = [index for one in bins for index in one]
    model.eval()
    alone, other = (losses_alone(model, samples, chosen, attention) for attention in ("sdpa", "eager"))
    off = torch.cat([other[index] - alone[index] for index in chosen])
    use_attention(model, "sdpa")
    batches = packed_batches(samples, bins, options.pack, "sdpa")
    control = packed_difference(model, batches, bins, alone, device)
    model.train()
    found = {"rounding": float(off.abs().mean()), "control": control}
    log(f"  by rounding {found['rounding']:.3g}, control {control:.3g}")
    return alone, found


@torch.no_grad()
def packed_apart(
    model: Any, samples: list[Batch], bins: list[list[int]], options: argparse.Namespace, known: Reference
) -> float:
    """Return how far the losses of packed samples are from those alone, in the prepared model."""
    model.eval()
    batches = packed_batches(samples, bins, options.pack, "varlen")
    found = packed_difference(model, batches, bins, known[0], str(model.device))
    model.train()
    return found


if __name__ == "__main__":
    main()
