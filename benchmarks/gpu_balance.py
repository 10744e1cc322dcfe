"""How evenly the ranks of a step are loaded on a GPU: packs are timed, then scheduled in six ways.

    PYTHONPATH=src python benchmarks/gpu_balance.py [--quick] [--save-times FILE] [--times FILE]

Forward and backward of every pack are timed on one GPU (a model of 1.9 billion parameters in the shape of
Qwen3-VL, bfloat16, random weights, packs of 8,192 tokens, varlen) for two mixes: many images, and long texts
with few. After a pass over all packs, the better of two more counts; there is no optimizer step. As in
training, nothing waits for the GPU: events in its stream measure the time. The packs are then assigned to
steps of 8 simulated ranks. Reported is the slowest rank of a step over the mean, averaged over all steps and
over 20 shuffles, for

- packs in random order, and sorted by patches;
- ``order_packs`` with the costs of the default weights, of weights fitted to the other mix, and to this one;
- ``order_packs`` with the times of the first pass, judged by those of the second: what knowing the times
  gives, but for the noise of single passes, which the others do not have.

``--save-times`` writes what was measured, as JSON: the tokens of each pack's documents, the patches of its
images, its supervised tokens and both times. ``--times`` repeats fits and schedules from such a file on any
machine. ``--vision`` is that setting of ``packhorse.prepare``.

Six minutes on an H200. ``--quick`` tries the script out on a CPU with a small model; nothing is said about
balance then. Needs what ``gpu_train.py`` needs, and scipy for the fits: without it only times are measured.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import inspect
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

import gpu_train  # first: it finds packages that are not installed
from gpu_data import DataShape, Fed, Setup, load_batches, set_attention, tiny_shape
from gpu_stages import free_memory, log
from packhorse.errors import ConfigError
from packhorse.integrations.transformers import prepare
from packhorse.plan.cost_fit import fit_weights
from packhorse.plan.cost_model import CostWeights, cost_features, straggler_ratio
from packhorse.plan.schedule import order_packs
from packhorse.types import Floats, Integers, to_device
from promises import fact, make_parser, parse, promise, record_outcome, write_atomically

RANKS = 8
SHUFFLES = 20
PASSES = 2
MOST_UNEVEN = 1.03
FIT_ERROR = 1e-3
MIXES = ("image-heavy", "long text")
Times: TypeAlias = dict[str, Any]
Pack: TypeAlias = dict[str, Any]
"""What was measured of a pack: ``documents`` and ``images`` (tokens and patches of each), ``supervised``,
``seconds`` of each pass."""


@record_outcome()
def main() -> None:
    """Measure the packs of both mixes, or read what was measured; then judge the schedules."""
    parser = make_parser(__doc__, packs=15 * RANKS, pack=8192, num_workers=12)
    parser.add_argument("--vision", help="setting of packhorse.prepare (default: its own)")
    parser.add_argument("--save-times", type=Path, metavar="FILE", help="write what was measured")
    parser.add_argument("--times", type=Path, metavar="FILE", help="measure nothing, read this file")
    options = parse(parser, packs=2 * RANKS, pack=256, num_workers=0)
    if options.times is not None:
        times: Times = json.loads(options.times.read_text(encoding="utf-8"))
    elif options.quick or torch.cuda.is_available():
        times = measure(options)
    else:
        sys.exit("there is no GPU; --quick tries this out on a CPU, --times reads what a GPU measured")
    fact("measured", f"{times['device']}, torch {times['torch']}, vision {times['vision']}")
    promise_exactness(times)
    if importlib.util.find_spec("scipy") is None:
        log("no scipy, so nothing is fitted: run this with --times on another machine")
    else:
        judge(times, options.quick)


# --- measuring ----------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> Times:
    """Time the packs of both mixes."""
    with tempfile.TemporaryDirectory() as folder:
        setup = None
        mixes: dict[str, list[Pack]] = {}
        for name in MIXES:
            home = Path(folder) / name.replace(" ", "_")
            home.mkdir()
            setup = make_mix(options, home, name, setup)
            if name == MIXES[0]:
                vision = prepare_model(setup)
            log(f"{name}: loading packs")
            mixes[name] = time_packs(setup, name)
            times = {
                "device": torch.cuda.get_device_name() if setup.device == "cuda" else "CPU",
                **{"torch": torch.__version__, "vision": vision, "pack_size": options.pack},
                "config": json.loads(setup.model.config.to_json_string(use_diff=False)),
                "mixes": mixes,
            }
            if options.save_times is not None:  # after each mix: the time may not do for both
                write_atomically(options.save_times, json.dumps(times) + "\n")
    return times


def shape_of(name: str, options: argparse.Namespace) -> DataShape:
    """Return the rows of a mix, some more than the packs need."""
    if options.quick:
        shape = replace(tiny_shape(rows=7 * options.packs), text_only=0.1 if name == MIXES[0] else 0.8)
        return replace(shape, text=24.0 if name == MIXES[0] else 60.0, longest=160)
    rows = options.packs * options.pack // (420 if name == MIXES[0] else 1000)
    if name == MIXES[0]:
        return DataShape(rows=rows, text=200.0, text_only=0.15, several=0.2, heavy=0.06)
    return DataShape(
        rows=rows, text=1100.0, spread=1.1, longest=8000, text_only=0.65, several=0.04, heavy=0.0
    )


def make_mix(options: argparse.Namespace, folder: Path, name: str, before: Setup | None) -> Setup:
    """Write the rows of a mix; model and processor are those of the mix before, if there was one."""
    shape = shape_of(name, options)
    if before is None:
        return gpu_train.make_setup(options, folder, shape=shape)
    meta, _, counts = gpu_train.write_data(folder, shape, before.processor)
    return replace(before, meta=meta, counts=counts)


def prepare_model(setup: Setup) -> str:
    """Prepare the model; return how its vision tower is called."""
    vision, attention = setup.options.vision, attention_of(setup)
    if "vision" not in inspect.signature(prepare).parameters:
        if vision is not None:
            raise ConfigError.of("vision", vision, "this version of packhorse.prepare has no such setting")
        set_attention(setup, attention)
        return "per_item"
    chosen: dict[str, Any] = {} if vision is None else {"vision": vision}
    return str(getattr(prepare(setup.model, attention, **chosen), "vision", vision))


def attention_of(setup: Setup) -> str:
    """Return the attention of this run."""
    return "sdpa" if setup.options.quick else "varlen"


def time_packs(setup: Setup, name: str) -> list[Pack]:
    """Return features and both times of the packs of a mix."""
    fed = []
    for one in load_batches(setup, attn_implementation=attention_of(setup), pad_to_size=False):
        fed.append(one)
        if len(fed) == setup.options.packs:
            break
    if len(fed) < setup.options.packs:
        raise RuntimeError(f"{name}: {len(fed)} packs, {setup.options.packs} are needed: write more rows")
    packs = [features_of(one) for one in fed]
    log(f"{name}: {len(fed)} packs of {sum(one.tokens for one in fed):,} tokens")
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection takes as long as a pack
    try:
        # The first pass warms up: most packs have sizes for which no memory was allocated before.
        for number in range(PASSES + 1):
            seconds = time_pass(setup, fed)
            log(f"{name}: {f'pass {number}' if number else 'warm-up'} took {sum(seconds):.1f} s")
            for pack, took in zip(packs, seconds, strict=True):
                pack["seconds"] += [took] if number else []
    finally:
        gc.enable()
    free_memory()
    return packs


def time_pass(setup: Setup, fed: list[Fed]) -> list[float]:
    """Return the seconds of forward and backward of each pack, one after the other without waiting."""
    marks: list[tuple[Any, Any]] = []
    for one in fed:
        batch = to_device(one.batch, setup.device)
        started = mark(setup)
        gpu_train.step(setup, batch, None)
        marks.append((started, mark(setup)))
    setup.synchronize()
    if setup.device == "cpu":
        return [ended - started for started, ended in marks]
    return [started.elapsed_time(ended) / 1000 for started, ended in marks]


def mark(setup: Setup) -> Any:
    """Return this moment: of the GPU's stream, or by the clock."""
    if setup.device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def features_of(one: Fed) -> Pack:
    """Return what is in a batch of one pack."""
    info = one.batch.info  # type: ignore[attr-defined]
    (documents,) = info.document_lengths
    grids = one.batch.get("image_grid_thw")
    images = [] if grids is None else grids.prod(dim=-1).tolist()
    return {
        "documents": list(documents),
        "images": images,
        "supervised": info.supervised,
        "seconds": list[float](),
    }


# --- judging ------------------------------------------------------------------------------------------------


def table_of(packs: list[Pack], weights: CostWeights) -> Floats:
    """Return the features of packs: [packs, weights]."""
    rows = []
    for pack in packs:
        images = np.asarray(pack["images"], np.float64)
        documents = cost_features(pack["documents"], weights).sum(axis=0)
        media = cost_features(np.zeros_like(images), weights, patches=images).sum(axis=0)
        rows.append(documents + media)
    table = np.stack(rows)
    table[:, weights.names.index("encoder")] = [bool(pack["images"]) for pack in packs]
    table[:, weights.names.index("supervised")] = [pack["supervised"] for pack in packs]
    table[:, weights.names.index("pack")] = 1
    return table


def promise_exactness(times: Times) -> None:
    """Promise that a fit finds the weights of times that were computed, among outliers."""
    if importlib.util.find_spec("scipy") is None:
        return
    before = CostWeights.of_model(times["config"])
    factors = np.where(np.array(before.names) == "patch", 3.0, 1.5)
    table = np.concatenate([table_of(packs, before) for packs in times["mixes"].values()])
    right = table @ (before.values() * factors)
    seconds = right.copy()
    seconds[::7] *= 5  # a checkpoint was saved
    fitted = table @ fit_weights(table, seconds, before).weights.values()
    error = float(np.abs(fitted / right - 1).max())
    baseline = "times computed with known weights, a seventh of them wrong"
    claim = "largest error of times computed with fitted weights"
    promise(claim, error, FIT_ERROR, baseline=baseline, unit="", at_least=False, kind="exact")


def judge(times: Times, quick: bool) -> None:
    """Schedule the packs of each mix and compare their times."""
    default = CostWeights.of_model(times["config"])
    mixes: dict[str, list[Pack]] = times["mixes"]
    fits = {
        name: fit_weights(table_of(packs, default), best_times(packs), default)
        for name, packs in mixes.items()
    }
    for name, packs in mixes.items():
        passes = np.array([pack["seconds"] for pack in packs])
        noise = np.median(np.abs(np.log(passes[:, 0] / passes[:, 1])))
        fact(f"{name}: median difference of a pack's two times", 100 * noise, "%")
    for name, fit in fits.items():
        fact(f"{name}: {len(mixes[name])} packs", fit.describe())
        for way, weights in {"fitted": fit.weights, "default": default}.items():
            fact(f"{name}: shares of the time, {way}", describe_weights(mixes[name], weights))
    for name, packs in mixes.items():
        (other,) = (fit.weights for mix, fit in fits.items() if mix != name)
        found = uneven(packs, {"default": default, "other mix": other, "same mix": fits[name].weights})
        for way, ratio in found.items():
            fact(f"{name}: slowest rank over the mean, {way}", ratio)
        usual = f"random order {found['random order']:.3f}, known times {found['known times']:.3f}"
        if not quick:
            claim = f"{name}: slowest rank over the mean, weights fitted on the other mix"
            promise(claim, found["other mix"], MOST_UNEVEN, baseline=usual, unit="", at_least=False)
            claim = f"{name}: slowest rank over the mean, default weights"
            target = found["sorted by patches"]
            promise(claim, found["default"], target, baseline="sorted by patches", unit="", at_least=False)


def best_times(packs: list[Pack]) -> Floats:
    """Return the better time of each pack."""
    return np.array([min(pack["seconds"]) for pack in packs])


def uneven(packs: list[Pack], weights: dict[str, CostWeights]) -> dict[str, float]:
    """Return the slowest rank over the mean for each way to assign packs to steps."""
    best = best_times(packs)
    first, second = (np.array([pack["seconds"][number] for pack in packs]) for number in range(2))
    patches = np.array([sum(pack["images"]) for pack in packs])
    ways: dict[str, Callable[[int], Integers]] = {
        "random order": lambda epoch: np.random.default_rng(epoch).permutation(len(packs)),
        "sorted by patches": lambda epoch: np.lexsort(
            (np.random.default_rng(epoch).random(len(packs)), patches)
        ),
    }
    found = {name: mean_ratio(best, order) for name, order in ways.items()}
    for name, one in weights.items():
        found[name] = mean_ratio(best, schedule_of(table_of(packs, one) @ one.values()))
    found["known times"] = mean_ratio(second, schedule_of(first))
    return found


def schedule_of(costs: Floats) -> Callable[[int], Integers]:
    """Return how packs of these costs are scheduled in each epoch.

    By costs alone: so few packs without images would have a step with others, which a loader has rarely.
    """
    return lambda epoch: order_packs(costs, RANKS, epoch=epoch).steps.reshape(-1)


def mean_ratio(times: Floats, order: Callable[[int], Integers]) -> float:
    """Return the slowest rank over the mean, averaged over steps and shuffles."""
    steps = len(times) // RANKS
    ratios = [
        straggler_ratio(times, order(epoch)[: steps * RANKS].reshape(-1, RANKS)) for epoch in range(SHUFFLES)
    ]
    return float(np.mean(ratios))


def describe_weights(packs: list[Pack], weights: CostWeights) -> str:
    """Return the share of the predicted time that is due to each weight."""
    parts = table_of(packs, weights).sum(axis=0) * weights.values()
    return ", ".join(
        f"{name} {part:.1%}" for name, part in zip(weights.names, parts / parts.sum(), strict=True)
    )


if __name__ == "__main__":
    main()
