"""What fewer logits and fewer calls of the vision tower save in training on a GPU, one by one.

    PYTHONPATH=src python benchmarks/gpu_ablation.py [--quick]

The model and the data of ``gpu_train.py``, with the vocabulary of Qwen3-VL (151,936): 2.4 billion
parameters, packs of 8,192 tokens with images, attention with boundaries of documents. ``packhorse.prepare``
sets the ways: all logits and a call of the vision tower per image, as without Packhorse; logits of supervised
tokens only; one call of the vision tower; both; both, with log-probabilities in chunks instead of logits.
Each way trains the same packs. Reported are

- real tokens a second, and peak memory;
- how far the losses of tokens of the first packs, and some gradients of the first pack, are from those of the
  first way, over what two right kernels differ by (sdpa and varlen), with a control in which logits belong to
  the tokens next to the labels;
- how often a forward pass with its loss waits for the GPU, and where (``torch.cuda.set_sync_debug_mode``).

Some five minutes on an H200. ``--quick`` tries the script out on a CPU with a small model and promises exact
results only. If the installed Packhorse has no ``prepare(vision=…)``, the script says so, drops the ways
that need it, and promises nothing about speed.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gpu_train import GIB, Figures, make_setup, train  # before torch: it sets the allocator up

# isort: split
import torch

from gpu_data import Setup, load_batches
from gpu_parity import first_packs
from gpu_stages import Stages, free_memory, log
from packhorse.collate_fns import model_inputs
from packhorse.integrations.loss import batch_loss, count_batch_supervised, token_log_probs
from packhorse.integrations.transformers import prepare
from packhorse.types import to_device
from promises import fact, make_parser, parse, promise, record_outcome

VOCABULARY = 151_936
SPEED = 1.6
MOST_MEMORY = 0.9
TIMES_ROUNDING = 4.0
CONTROL_TIMES_ROUNDING = 10.0
GRADIENTS = ("lm_head.weight", "model.visual.patch_embed.proj.weight", "layers.0.self_attn.q_proj.weight")
ROUNDING = "two right kernels (rounding)"
SYNCHRONIZES = "called a synchronizing CUDA operation"
HAS_VISION = "vision" in inspect.signature(prepare).parameters


@dataclass(frozen=True)
class Way:
    """What ``packhorse.prepare`` gets."""

    name: str
    logits: str
    vision: str
    attention: str = "varlen"

    def prepare(self, setup: Setup) -> None:
        """Prepare the model; without ``vision`` where the installed Packhorse does not know it."""
        options = {"vision": self.vision} if HAS_VISION else {}
        report = prepare(setup.model, self.attention, logits=self.logits, **options)
        log(f"  {report}")


BEFORE = Way("all logits, vision per item", "all", "per_item")
BOTH = Way("supervised logits, vision in one call", "supervised", "one_call")
CHUNKED = Way("chunked log-probabilities, vision in one call", "chunked", "one_call")
WAYS = (
    BEFORE,
    BOTH,  # early: the time may not do for the rest
    Way("supervised logits, vision per item", "supervised", "per_item"),
    Way("all logits, vision in one call", "all", "one_call"),
    CHUNKED,
)
WITHOUT_VISION = (BEFORE, WAYS[2], Way("chunked log-probabilities, vision per item", "chunked", "per_item"))


class Computed(NamedTuple):
    """Losses of the tokens of the first packs, and some gradients of the first one, on the CPU."""

    losses: torch.Tensor
    gradients: torch.Tensor


class Apart(NamedTuple):
    """The mean difference of two ways' losses, and the relative difference of their gradients."""

    losses: float
    gradients: float


@record_outcome()
def main() -> None:
    """Build model and data, and measure each way."""
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--pack", type=int, default=8192, help="tokens of a pack")
    parser.add_argument("--batch", type=int, default=8, help="unused; of gpu_train.py")
    parser.add_argument("--num-workers", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=4, help="steps that are not measured")
    parser.add_argument("--steps", type=int, default=40, help="steps that are; the same packs for all ways")
    parser.add_argument("--seconds", type=float, default=90.0, help="of measuring a way, at most")
    parser.add_argument("--budget", type=float, default=440.0, help="start nothing after this many seconds")
    options = parse(parser, samples=24, pack=256, batch=4, num_workers=0, warmup=1, steps=2, seconds=20.0)
    if not options.quick and not torch.cuda.is_available():
        sys.exit("there is no GPU; --quick tries this out on a CPU")
    if not HAS_VISION:
        fact(
            "NOT MEASURED", "the installed Packhorse has no prepare(vision=…): ways with one call are missing"
        )
    stages = Stages(options.budget)
    ways = WAYS if HAS_VISION else WITHOUT_VISION
    with tempfile.TemporaryDirectory() as folder:
        setup = make_setup(options, Path(folder), VOCABULARY)
        measure_exactness(setup, stages, ways)
        found = measure_speed(setup, stages, ways)
        if not options.quick:
            promise_speed(found)
            for way in ways:
                stages.run(f"synchronisations: {way.name}", partial(count_synchronisations, setup, way))
    log("done")
    if stages.failed:
        sys.exit(f"failed: {', '.join(stages.failed)}")


# --- exactness ----------------------------------------------------------------------------------------------


def measure_exactness(setup: Setup, stages: Stages, ways: tuple[Way, ...]) -> None:
    """Promise that all ways compute the losses of the first one, before anything is trained."""
    setup.model.eval()
    other = Way("sdpa", BEFORE.logits, BEFORE.vision, "sdpa")
    expected = stages.run(f"losses: {BEFORE.name}", partial(compute, setup, BEFORE))
    rounded = stages.run(f"losses: {other.name}", partial(compute, setup, other))
    if expected is None or rounded is None:
        return
    floor = apart(rounded, expected)
    fact("mean difference of a token's loss by rounding", floor.losses)
    fact("relative difference of gradients by rounding", floor.gradients)
    for way in ways[1:]:
        found = stages.run(f"losses: {way.name}", partial(compute, setup, way))
        if found is None:
            continue
        differences = zip(("losses of tokens", "gradients"), apart(found, expected), floor, strict=True)
        for what, off, least in differences:
            claim = f"{what}, {way.name}, against {BEFORE.name}"
            promise(claim, off / least, TIMES_ROUNDING, baseline=ROUNDING, at_least=False, kind="exact")
    wrong = stages.run("losses: control", partial(compute, setup, ways[-1], wrong=True))
    if wrong is not None:
        off = apart(wrong, expected).losses / floor.losses
        claim = "losses of logits next to the supervised tokens (control: must be seen)"
        promise(claim, off, CONTROL_TIMES_ROUNDING, baseline=ROUNDING, kind="exact")


def apart(found: Computed, expected: Computed) -> Apart:
    """Compare two ways."""
    losses = float((found.losses - expected.losses).abs().mean())
    difference = found.gradients - expected.gradients
    gradients = float(difference.norm() / expected.gradients.norm())
    least = torch.finfo(torch.float32).eps  # correct computations may agree to the bit
    return Apart(max(losses, least), max(gradients, least))


def compute(setup: Setup, way: Way, *, wrong: bool = False) -> Computed:
    """Return what the model computes in one way; ``wrong``: from the tokens before the supervised ones."""
    way.prepare(setup)
    losses, gradients = [], torch.zeros(1)
    for number, (batch, _) in enumerate(first_packs(setup, way.attention)):
        moved = to_device(batch, setup.device)
        inputs = model_inputs(moved, setup.model)
        if wrong:
            inputs["logits_to_keep"] = (inputs["logits_to_keep"] - 1).clamp(min=0)
        with torch.set_grad_enabled(not number):
            output = setup.model(**inputs)
            losses.append(-token_log_probs(output.logits, moved["labels"]).detach().float().cpu())
            if not number:
                batch_loss(setup.model, output, moved, count_batch_supervised(batch)).backward()
                gradients = take_gradients(setup.model)
        del output
    return Computed(torch.cat(losses), gradients)


def take_gradients(model: Any) -> torch.Tensor:
    """Return every eighth row of some gradients, each scaled to the norm 1, and remove all."""
    chosen = {name: p.grad for name, p in model.named_parameters() if name.endswith(GRADIENTS)}
    taken = [chosen[name][::8].float().flatten() for name in sorted(chosen)]
    scale = [float(gradient.norm()) for gradient in taken]
    model.zero_grad(set_to_none=True)
    return torch.cat([gradient.cpu() / norm for gradient, norm in zip(taken, scale, strict=True)])


# --- speed --------------------------------------------------------------------------------------------------


def measure_speed(setup: Setup, stages: Stages, ways: tuple[Way, ...]) -> dict[str, Figures]:
    """Train the same packs in each way."""
    found: dict[str, Figures] = {}
    for way in ways:
        figures: Figures | None = stages.run(way.name, partial(train_way, setup, way))
        if figures is None:
            continue
        found[way.name] = figures
        base, ratio = found.get(BEFORE.name), ""
        if base is not None:
            ratio = f", {rate(figures) / rate(base):.2f}x the first way"
            ratio += f", {figures.peak / base.peak:.2f}x its peak" if base.peak else ""
        fact(way.name, figures.describe() + ratio)
    return found


def train_way(setup: Setup, way: Way) -> Figures:
    """Train the first packs of the epoch; the workers end with them."""
    way.prepare(setup)
    free_memory()
    fed = load_batches(setup, attn_implementation=way.attention)
    try:
        return train(setup, fed)
    finally:
        fed.close()  # type: ignore[attr-defined]


def rate(figures: Figures) -> float:
    """Return real tokens a second."""
    return figures.tokens / figures.seconds


def promise_speed(found: dict[str, Figures]) -> None:
    """Promise what both parts together save."""
    before, both = found.get(BEFORE.name), found.get(BOTH.name)
    if before is None or both is None:
        return
    for name, figures in found.items():
        fact(f"peak memory, {name}", figures.peak / GIB, "GiB")
    claim = "real tokens a second, supervised logits and vision in one call"
    promise(claim, rate(both) / rate(before), SPEED, baseline=BEFORE.name)
    claim = "peak memory, supervised logits and vision in one call"
    promise(claim, both.peak / before.peak, MOST_MEMORY, baseline=BEFORE.name, at_least=False, kind="exact")


# --- synchronisations ---------------------------------------------------------------------------------------


def count_synchronisations(setup: Setup, way: Way) -> None:
    """Report how often the forward pass of a pack, and its loss, wait for the GPU."""
    way.prepare(setup)
    batch = next(batch for batch, _ in first_packs(setup, way.attention) if "pixel_values" in batch)
    moved, tokens = to_device(batch, setup.device), count_batch_supervised(batch)
    for _ in range(2):  # the first pass sets things up
        with waits_for_gpu() as forward:
            output = setup.model(**model_inputs(moved, setup.model))
        with waits_for_gpu() as of_loss:
            batch_loss(setup.model, output, moved, tokens)
        del output
    places = ", ".join(f"{place} {times}x" for place, times in forward.most_common(5)) or "nowhere"
    fact(f"synchronisations in forward, {way.name}", f"{forward.total()} ({places})")
    fact(f"synchronisations in the loss, {way.name}", of_loss.total())
    if way.logits != "all":
        claim = f"synchronisations in the loss, {way.name}"
        promise(claim, of_loss.total(), 0, baseline="none", unit="", at_least=False, kind="exact")


@contextmanager
def waits_for_gpu() -> Iterator[Counter[str]]:
    """Count the operations that wait for the GPU, by file and line."""
    found: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    chosen = [one for one in caught if SYNCHRONIZES in str(one.message)]
    found.update(f"{Path(one.filename).name}:{one.lineno}" for one in chosen)


if __name__ == "__main__":
    main()
