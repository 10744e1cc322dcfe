"""Training a vision-language model on a GPU: padded and packed, with images, through the loader.

    PYTHONPATH=src python benchmarks/gpu_train.py [--quick]

A model of 1.9 billion parameters in the shape of Qwen3-VL (random weights, bfloat16) is trained (forward,
backward, AdamW) on chats about drawn JPEG files. Workers open the files and call transformers' own processor;
tokens were counted before. The same samples are run in five ways: padded in random batches, padded by length,
and packed with three attention backends. Reported are

- real and supervised tokens a second, and the share of the time in which the GPU waits for data: from the
  end of a step (synchronized) until the next batch is there;
- the memory that padded batches need: 8 samples hold half the tokens of a pack, but more of them do not fit
  into the 139 GiB of an H200 (16 would need about 170 at random, 220 by length; ``--batch`` sets another);
- peak memory of the heaviest packs with and without a limit of patches per pack (``max_patches``);
- how far the losses of packed tokens are from those of the samples alone, as ``gpu_packing.py`` measures it.

Some seven minutes on an H200, of which compiling flex attention takes one or two. What fails is printed, the
rest goes on, and the exit code is 1. ``--quick`` tries the script out on a CPU with a small model; nothing is
promised about speed and memory then.

Needs torch 2.10 or later, transformers 5, numpy, pillow, orjson and filelock; prints what is missing. On a
machine without a network, packages in build/device are used where they are not installed:

    pip install --target build/device --no-deps --only-binary=:all: --python-version 3.12
        --platform manylinux2014_x86_64 orjson
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "build" / "device"), str(ROOT / "src")]  # last: only for what is not installed
NEEDED = ("numpy", "PIL", "torch", "transformers", "tokenizers", "jinja2", "orjson", "filelock")
USED_IF_THERE = ("torchvision", "scipy")
MISSING = {name for name in (*NEEDED, *USED_IF_THERE) if importlib.util.find_spec(name) is None}
if MISSING:
    print(f"missing: {', '.join(sorted(MISSING))}", flush=True)
if MISSING & set(NEEDED):
    sys.exit(f"cannot run without {', '.join(sorted(MISSING & set(NEEDED)))}: see the top of {__file__}")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers are forked
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # padded batches differ in size

import torch

from gpu_data import (
    Batch,
    DataShape,
    Fed,
    Setup,
    load_batches,
    make_model,
    make_processor,
    padded_at_random,
    patches,
    set_attention,
    tiny_shape,
    write_rows,
)
from gpu_packing import promise_parity
from gpu_parity import difference, losses_alone, model_loss_error
from gpu_stages import Stages, free_memory, log
from packhorse import open_meta_dataset
from packhorse.collate_fns import model_inputs
from packhorse.count.columns import CountColumns
from packhorse.families.models import attention_of
from packhorse.integrations.loss import batch_loss, count_batch_supervised
from packhorse.loader.startup import count_examples
from packhorse.types import to_device
from promises import fact, make_parser, parse, promise, record_outcome

VARLEN_OVER_PADDED = 2.5
VARLEN_OVER_BY_LENGTH = 1.5
MOST_MEMORY = 0.9  # with a limit of patches, of that without
MOST_WAITING = 2.0  # percent
BACKENDS = ("varlen", "sdpa", "flex_attention")
LOSS_APART = 1e-4  # share of the loss: the same sum in another order, in float32
GIB = 2**30
SHARED_MEMORY_OF_A_BATCH = 0.15 * GIB  # pixels of some 20,000 patches, and for sdpa a mask


@dataclass
class Figures:
    """The measured figures, without warm-up."""

    batches: int = 0
    tokens: int = 0
    supervised: int = 0
    slots: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    build: float = 0.0
    peak: int = 0
    note: str = ""

    def describe(self) -> str:
        """Return the figures as text."""
        return (
            f"{self.tokens / self.seconds:,.0f} real tokens/s, {self.supervised / self.seconds:,.0f} "
            f"supervised tokens/s, {self.batches} batches, {self.tokens / self.slots:.1%} filled, waits for "
            f"data {self.waited / self.seconds:.2%} of the time, peak {self.peak / GIB:.1f} GiB{self.note}"
        )


@record_outcome()
def main() -> None:
    """Build model and data, measure each stage and print its promises."""
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--pack", type=int, default=8192, help="tokens of a pack")
    parser.add_argument("--batch", type=int, default=8, help="samples of a padded batch")
    parser.add_argument("--num-workers", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=5, help="steps that are not measured")
    parser.add_argument("--steps", type=int, default=10_000, help="steps that are, at most")
    parser.add_argument("--seconds", type=float, default=90.0, help="of measuring a way, at most")
    parser.add_argument("--budget", type=float, default=480.0, help="start nothing after this many seconds")
    options = parse(parser, samples=24, pack=256, batch=4, num_workers=1, warmup=1, seconds=20.0)
    if not options.quick and not torch.cuda.is_available():
        sys.exit("there is no GPU; --quick tries this out on a CPU")
    stages = Stages(options.budget)
    with tempfile.TemporaryDirectory() as folder:
        setup = make_setup(options, Path(folder))
        fact("samples of a padded batch", options.batch)
        measure_speed(setup, stages)
        measure_memory(setup, stages)
        measure_parity(setup, stages)
    log("done")
    if stages.failed:
        sys.exit(f"failed: {', '.join(stages.failed)}")


# --- model and data -----------------------------------------------------------------------------------------


def make_setup(
    options: argparse.Namespace, folder: Path, vocabulary: int = 32_768, shape: DataShape | None = None
) -> Setup:
    """Write the data, count it, and build the model."""
    if options.quick:
        torch.set_num_threads(1)
        torch.compiler.set_stance("force_eager")  # compiling flex attention for a CPU takes half a minute
    device = "cpu" if options.quick else "cuda"
    log(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}")
    free = shutil.disk_usage("/dev/shm").free
    log(f"{os.cpu_count()} cores, shared memory for batches: {free / GIB:.1f} GiB")
    if options.num_workers * 2 * SHARED_MEMORY_OF_A_BATCH > free and not options.quick:
        options.num_workers = max(1, int(free / 2 / SHARED_MEMORY_OF_A_BATCH))
        log(f"little shared memory: {options.num_workers} workers instead")
    if shape is None:
        shape = tiny_shape(options.samples) if options.quick else DataShape(rows=options.samples)
    meta, processor, counts = write_data(folder, shape)
    model = make_model(processor, options.quick, device, vocabulary)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tower = sum(parameter.numel() for parameter in model.model.visual.parameters())
    total = int(counts.total.sum())
    fact(
        "model",
        f"{parameters / 1e9:.2f} B parameters ({tower / 1e9:.2f} B of them see), {model.dtype}, AdamW",
    )
    fact(
        "samples",
        f"{len(counts):,} of {total:,} tokens, mean {total / len(counts):.0f}, longest "
        f"{int(counts.total.max()):,}; {int(counts.images.sum()):,} images, "
        f"{counts.image.sum() / total:.0%} of the tokens; packs of {options.pack:,}, {options.num_workers} "
        "workers",
    )
    return Setup(options, device, meta, processor, counts, model)


def write_data(folder: Path, shape: DataShape, processor: Any = None) -> tuple[Path, Any, CountColumns]:
    """Write rows; return their meta file, the processor (if None, one for their words) and their counts."""
    meta = write_rows(folder, shape)
    processor = make_processor(meta, shape) if processor is None else processor
    log(f"data written; images go through {type(processor.image_processor).__name__}")
    counts = count_examples(open_meta_dataset(str(meta)), processor)
    if not counts.ok.all():
        raise RuntimeError(f"rows that cannot be counted: {set(counts.status)}, {set(counts.detail)}")
    return meta, processor, counts


# --- speed --------------------------------------------------------------------------------------------------


def step(setup: Setup, batch: Batch, optimizer: torch.optim.Optimizer | None) -> torch.Tensor:
    """Run forward, backward and an optimizer step, if there is one; return the loss."""
    model, moved = setup.model, to_device(batch, setup.device)
    forward_only = setup.device == "cpu" and attention_of(model) == "flex_attention"
    with torch.set_grad_enabled(not forward_only):
        output = model(**model_inputs(moved, model))
        loss = batch_loss(model, output, moved, count_batch_supervised(batch))
    if not forward_only:
        loss.backward()  # type: ignore[no-untyped-call]
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)
    return loss.detach()


def make_optimizer(setup: Setup) -> torch.optim.Optimizer:
    """Return AdamW with a tiny learning rate, so that all methods train the same model."""
    return torch.optim.AdamW(setup.model.parameters(), lr=1e-7, fused=setup.device == "cuda")


def train(setup: Setup, fed: Iterator[Fed]) -> Figures:
    """Train on all batches, and measure after the warm-up."""
    options, found = setup.options, Figures()
    optimizer = make_optimizer(setup)
    total = torch.zeros((), device=setup.device)
    setup.model.train()
    for number in count():
        setup.synchronize()
        asked = time.perf_counter()
        one = next(fed, None)
        if one is None:
            break
        waited = time.perf_counter() - asked
        total += step(setup, one.batch, optimizer)
        setup.synchronize()
        if number < options.warmup:
            log(f"  warming up, step {number + 1}: {time.perf_counter() - asked:.1f} s")
            continue
        found.seconds += time.perf_counter() - asked
        found.waited += waited
        found.build += one.build
        found.batches += 1
        found.tokens += one.tokens
        found.supervised += count_batch_supervised(one.batch)
        found.slots += one.batch["input_ids"].numel()
        if found.seconds > options.seconds or found.batches >= options.steps:
            break
    if not bool(total.isfinite()):
        raise RuntimeError("a loss is not finite")
    if not found.batches:
        raise RuntimeError(f"fewer batches than --warmup {options.warmup}: give more --samples")
    if setup.device == "cuda":
        found.peak = torch.cuda.max_memory_allocated()
    return found


def run_way(setup: Setup, attention: str, fed: Iterator[Fed]) -> Figures:
    """Train with one method; its workers end with it."""
    set_attention(setup, attention)
    free_memory()
    try:
        return train(setup, fed)
    finally:
        fed.close()  # type: ignore[attr-defined]


def run_padded(setup: Setup, make: Callable[[int], Iterator[Fed]]) -> Figures:
    """Train on padded batches; on smaller ones if memory is insufficient (they have less padding)."""
    size = setup.options.batch
    while True:
        try:
            found = run_way(setup, "sdpa", make(size))
            found.note = "" if size == setup.options.batch else f", batches of {size}: more do not fit"
            return found
        except torch.OutOfMemoryError as error:
            if size == 1:
                raise
            log(f"  {size} samples do not fit ({str(error)[:120]}…): {size // 2} instead")
        size //= 2
        free_memory()


def measure_speed(setup: Setup, stages: Stages) -> None:
    """Measure all methods, those with promises first."""
    ways: dict[str, Callable[[], Figures]] = {
        "padded at random": lambda: run_padded(setup, partial(padded_at_random, setup)),
        "packed, varlen": lambda: run_way(setup, "varlen", load_batches(setup, attn_implementation="varlen")),
        "padded by length": lambda: run_padded(
            setup, lambda size: load_batches(setup, mode="pad", batch_size=size)
        ),
        "packed, sdpa": lambda: run_way(setup, "sdpa", load_batches(setup, attn_implementation="sdpa")),
        "packed, flex_attention": lambda: run_way(
            setup, "flex_attention", load_batches(setup, attn_implementation="flex_attention")
        ),
    }
    found: dict[str, Figures] = {}
    for name, work in ways.items():
        one: Figures | None = stages.run(name, work)
        if one is None:
            continue
        found[name] = one
        ratio = ""
        if "padded at random" in found:
            base = found["padded at random"]
            ratio = f", {one.tokens / one.seconds / (base.tokens / base.seconds):.2f}x random padding"
        fact(name, one.describe() + ratio)
        if not setup.options.quick:  # at once: the time may not do for the rest
            promise_speed(name, found, setup)


def promise_speed(name: str, found: dict[str, Figures], setup: Setup) -> None:
    """Promise how fast packed training is, and that it does not wait; ``name`` was just measured."""
    varlen, num_workers = found.get("packed, varlen"), setup.options.num_workers
    if name == "packed, varlen" and varlen is not None:
        promise_against("padded at random", VARLEN_OVER_PADDED, found)
        waiting, baseline = 100 * varlen.waited / varlen.seconds, "the time of the training steps"
        claim = f"the GPU waits for data, packed with varlen, {num_workers} workers"
        promise(claim, waiting, MOST_WAITING, baseline=baseline, unit="%", at_least=False)
        supply = num_workers * varlen.seconds / varlen.build
        fact("packs that the workers can build while one is trained", supply)
    elif name == "padded by length" and varlen is not None:
        promise_against(name, VARLEN_OVER_BY_LENGTH, found)
    if name.startswith("padded"):
        report_memory(name, found[name], setup)


def promise_against(padded: str, target: float, found: dict[str, Figures]) -> None:
    """Promise tokens of samples per second against one kind of padding; also report supervised tokens."""
    varlen, base = found["packed, varlen"], found.get(padded)
    if base is None:
        return
    time_ratio = base.seconds / varlen.seconds
    claim = "real tokens a second, images and text packed with varlen"
    promise(claim, varlen.tokens / base.tokens * time_ratio, target, baseline=padded)
    ratio = varlen.supervised / base.supervised * time_ratio
    fact(f"supervised tokens a second, packed with varlen, over {padded}", ratio, "x")


def report_memory(name: str, padded: Figures, setup: Setup) -> None:
    """Report why a padded batch has no more samples: the memory of twice as many, and of the GPU."""
    # Weights, their gradients and two averages of AdamW stay as they are; the rest grows with the samples.
    kept = 4 * sum(one.numel() * one.element_size() for one in setup.model.parameters())
    twice, there = 2 * padded.peak - kept, torch.cuda.get_device_properties(0).total_memory
    step = f"{padded.tokens / padded.batches:,.0f} real tokens, peak {padded.peak / GIB:.1f} GiB"
    more = f"twice the samples would need about {twice / GIB:.0f} of {there / GIB:.0f} GiB"
    fact(f"a step, {name}", f"{step}; {more}")


# --- memory -------------------------------------------------------------------------------------------------


def measure_memory(setup: Setup, stages: Stages) -> None:
    """Measure the peak memory of the heaviest packs, with and without a limit of patches."""
    limit = patch_limit(setup)
    free = stages.run("memory without a limit of patches", lambda: heaviest(setup, None))
    held = stages.run(f"memory with at most {limit:,} patches a pack", lambda: heaviest(setup, limit))
    if free is None or held is None:
        return
    for name, (most, peak) in {"no limit": free, f"max_patches={limit}": held}.items():
        fact(f"heaviest pack, {name}", f"{most:,} patches, peak {peak / GIB:.2f} GiB")
    claim = "patches of the heaviest pack with max_patches"
    promise(claim, held[0] / limit, 1.0, baseline="the limit", at_least=False, kind="exact")
    if not setup.options.quick:
        claim = "peak memory with max_patches"
        promise(claim, held[1] / free[1], MOST_MEMORY, baseline="no limit", at_least=False, kind="exact")


def patch_limit(setup: Setup) -> int:
    """Return a limit a tenth over the average of packs, but enough for every sample."""
    per_pack = setup.counts.patches.sum() * setup.options.pack / setup.counts.total.sum()
    return max(int(1.1 * per_pack), int(setup.counts.patches.max()))


def heaviest(setup: Setup, limit: int | None) -> tuple[int, int]:
    """Train on the two packs with the most patches; return their number and the peak in bytes."""
    set_attention(setup, "varlen")
    chosen: list[Batch] = []
    for one in load_batches(setup, attn_implementation="varlen", max_patches=limit, pin_memory=False):
        chosen = sorted([*chosen, one.batch], key=patches)[-2:]
    free_memory()
    optimizer = make_optimizer(setup)
    setup.model.train()
    for batch in (*chosen, *chosen):
        step(setup, batch, optimizer)
    peak = torch.cuda.max_memory_allocated() if setup.device == "cuda" else 0
    return max(map(patches, chosen)), peak


# --- parity -------------------------------------------------------------------------------------------------


def measure_parity(setup: Setup, stages: Stages) -> None:
    """Measure the mean difference of a supervised token's loss packed and alone; see ``gpu_packing.py``."""
    setup.model.eval()
    alone = stages.run("parity: samples alone", lambda: losses_alone(setup))
    if alone is None:
        return
    found: dict[str, float] = {"rounding": alone[1]}
    for name in (*BACKENDS, "control"):
        apart = stages.run(f"parity: {name}", partial(difference, setup, name, alone[0]))
        if apart is not None:
            found[name] = apart
    if all(name in found for name in (*BACKENDS, "control")):
        promise_parity(found)
    else:
        fact("parity, as far as it was measured", str(found))
    measure_own_loss(setup, stages)


def measure_own_loss(setup: Setup, stages: Stages) -> None:
    """Compare ``model(**batch).loss`` with the mean over supervised tokens, for each backend."""
    baseline = "cross entropy of the same logits (share of the loss)"
    for name in (*BACKENDS, "eager"):
        apart = stages.run(f"model(**batch).loss: {name}", partial(model_loss_error, setup, name))
        if apart is None:
            continue
        claim = f"model(**batch).loss with {name}"
        promise(claim, apart[0], LOSS_APART, baseline=baseline, at_least=False, kind="exact")
        control = f"the same with labels shifted twice, {name} (control: must be seen)"
        promise(control, apart[1], 10 * LOSS_APART, baseline=baseline, kind="exact")


if __name__ == "__main__":
    main()
