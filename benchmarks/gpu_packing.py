"""Training speed on a GPU: padded at random, padded by length, and packed with three attention backends.

    PYTHONPATH=src python benchmarks/gpu_packing.py [--quick]

A decoder of 1.5 billion parameters in the shape of Qwen3-VL's (random weights, bfloat16) runs forward and
backward over the same samples (mean about 700 tokens) in each way; packs have 8,192 tokens. Prints real
tokens a second, and how far losses of packed tokens are from those of the samples alone, with two measures
for it: how far two right ways are apart (rounding), and a control in which documents see each other. Exit
code 1 if a promise is missed. Under eight minutes on an H200, of which compiling flex attention is about one;
``--quick`` tries the script out on a CPU with a small model; nothing is said about speed then.

Needs torch 2.10 or later and transformers 5; of Packhorse's other dependencies, numpy, pillow, orjson and
filelock. No network, no flash-attn build.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers

from packhorse.collate_fns import model_inputs, neat_packed_vlm_collater
from packhorse.families.models import attention_of
from packhorse.integrations.attention import use_attention
from packhorse.neat_packing_vlm import _build_packed_vlm_sample, _shift_sample, greedy_knapsack
from packhorse.types import to_device
from promises import fact, make_parser, parse, promise, record_outcome

Batch = dict[str, Any]
VARLEN_OVER_PADDED, VARLEN_OVER_SDPA = 2.5, 1.5
TIMES_ROUNDING = 2.0
CONTROL_TIMES_ROUNDING = 3.0
FIRST_TOKENS = 64  # of each document: what others leak into it shows there most
PACKED = ("sdpa", "flex_attention", "varlen")
ROUNDING = "two right kernels on the sample alone (rounding)"
LEAK = "the same with a mask that leaks (control: must be seen)"
COLUMNS = f"{'':<26}{'batches':>9}{'filled':>9}{'seconds':>10}{'tokens/s':>12}{'ratio':>8}"


@dataclass(frozen=True)
class Speed:
    """The speed of one method; ``base`` is that of random padding, as this file measures it."""

    way: str
    tokens: int
    slots: int
    batches: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens of samples per second."""
        return self.tokens / self.seconds

    def row(self, base: float) -> str:
        """Return a row of the table of ``COLUMNS``."""
        counts = f"{self.batches:>9}{self.tokens / self.slots:>9.1%}{self.seconds:>10.2f}"
        return f"{self.way:<26}{counts}{self.rate:>12,.0f}{self.rate / base:>8.2f}"

    def describe(self, base: float) -> str:
        """Return the figures as text."""
        return (
            f"{self.rate:,.0f} real tokens/s, {self.rate / base:.2f}x, {self.batches} batches, "
            f"{self.tokens / self.slots:.1%} filled"
        )


@record_outcome()
def main() -> None:
    """Build the model and the samples, measure and print the promises."""
    parser = make_parser(__doc__, samples=320, pack=8192, longest=4096, mean=700.0)
    parser.add_argument("--batch", type=int, default=8, help="samples of a padded batch")
    options = parse(parser, samples=16, pack=384, longest=256, mean=60.0)
    if options.quick:
        torch.set_num_threads(1)
        torch.compiler.set_stance("force_eager")  # compiling flex attention for a CPU takes half a minute
    device = "cpu" if options.quick else "cuda"
    model = decoder(options.quick, device)
    samples = make_samples(options)
    speeds = measure(model, samples, options, device)
    apart = parity(model, samples, options, device)
    print()
    if not options.quick:
        promise_speed(speeds)
    promise_parity(apart)


def decoder(tiny: bool, device: str) -> Any:
    """Return Qwen3's decoder with random weights, large enough that attention changes the logits."""
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "vocab_size": 32_768}
    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    config = transformers.Qwen3Config(
        **sizes,
        num_attention_heads=4 if tiny else 16,
        num_key_value_heads=2 if tiny else 8,
        head_dim=16 if tiny else 128,
        initializer_range=0.1 if tiny else 0.04,
        tie_word_embeddings=False,
        use_cache=False,
        dtype=torch.float32 if tiny else torch.bfloat16,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.Qwen3ForCausalLM(config).to(config.dtype)
    return model.train()


def make_samples(options: argparse.Namespace) -> list[Batch]:
    """Return shifted samples of random tokens, many short and few long."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(options.samples, generator=generator).mul(0.85).exp()
    lengths = (drawn / drawn.mean() * options.mean).clamp(24, options.longest).long().tolist()
    vocabulary = 512 if options.quick else 32_768
    made = []
    for length in lengths:
        ids = torch.randint(0, vocabulary, (length + 1,), generator=generator)
        sample = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
        made.append(_shift_sample(sample))
    return made


# --- batches ------------------------------------------------------------------------------------------------


def pad_samples(samples: list[Batch]) -> Batch:
    """Return a batch of samples padded to the longest."""
    width = max(len(sample["input_ids"]) for sample in samples)
    fills = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        key: torch.stack(
            [F.pad(sample[key], (0, width - len(sample[key])), value=fill) for sample in samples]
        )
        for key, fill in fills.items()
    }


def padded_batches(samples: list[Batch], size: int, *, by_length: bool) -> list[Batch]:
    """Return all samples in batches of ``size``, in random order or grouped by length."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(1)).tolist()
    if by_length:
        order.sort(key=lambda index: len(samples[index]["input_ids"]))
    return [
        pad_samples([samples[i] for i in order[first : first + size]]) for first in range(0, len(order), size)
    ]


def bins_of(samples: list[Batch], pack: int) -> list[list[int]]:
    """Return the samples of each pack."""
    return greedy_knapsack([len(sample["input_ids"]) for sample in samples], pack)


def packed_batches(samples: list[Batch], bins: list[list[int]], pack: int, attention: str) -> list[Batch]:
    """Return batches of one pack, all of the same length, to avoid recompilation."""
    packs = [_build_packed_vlm_sample([samples[i] for i in one], pack, 0) for one in bins]
    return [neat_packed_vlm_collater([one], 0, pack, attention) for one in packs]


# --- speed --------------------------------------------------------------------------------------------------


def token_losses(model: Any, batch: Batch) -> torch.Tensor:
    """Return the loss of each token [B, S]; labels are already shifted."""
    logits = model(**model_inputs(batch), use_cache=False).logits
    losses = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), reduction="none")
    return losses.view(batch["labels"].shape)


def step(model: Any, batch: Batch) -> None:
    """Run forward and backward (flex attention has no backward pass on a CPU)."""
    if model.device.type == "cpu" and attention_of(model) == "flex_attention":
        with torch.no_grad():
            token_losses(model, batch)
        return
    token_losses(model, batch).sum().div(batch["labels"].numel()).backward()
    model.zero_grad(set_to_none=True)


def measure_way(
    way: str, model: Any, made: list[Batch], tokens: int, device: str, *, warm_up: int = 3
) -> Speed:
    """Return the speed of one pass over all batches, after the largest and the first ones as a warm-up."""
    batches = [to_device(batch, device) for batch in made]
    wait: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    largest = max(batches, key=lambda batch: batch["input_ids"].numel())
    for batch in [largest, *batches[:warm_up]]:
        step(model, batch)
    wait()
    start = time.perf_counter()
    for batch in batches:
        step(model, batch)
    wait()
    seconds = time.perf_counter() - start
    slots = sum(batch["input_ids"].numel() for batch in batches)
    return Speed(way, tokens, slots, len(batches), seconds)


def measure(model: Any, samples: list[Batch], options: argparse.Namespace, device: str) -> dict[str, float]:
    """Return tokens of samples per second of every method."""
    real = sum(len(sample["input_ids"]) for sample in samples)
    bins = bins_of(samples, options.pack)
    ways: dict[str, tuple[str, Callable[[], list[Batch]]]] = {
        "padded at random": ("sdpa", lambda: padded_batches(samples, options.batch, by_length=False)),
        "padded by length": ("sdpa", lambda: padded_batches(samples, options.batch, by_length=True)),
    }
    for attention in PACKED:
        ways[f"packed, {attention}"] = (
            attention,
            lambda attention=attention: packed_batches(samples, bins, options.pack, attention),
        )
    describe_inputs(model, samples, options)
    print()
    print(COLUMNS, flush=True)
    speeds: dict[str, Speed] = {}
    base = 0.0
    for way, (attention, make) in ways.items():
        use_attention(model, attention)
        speeds[way] = measure_way(way, model, make(), real, device)
        base = speeds["padded at random"].rate
        print(speeds[way].row(base), flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
    print()
    for way, speed in speeds.items():
        fact(way, speed.describe(base))
    return {way: speed.rate for way, speed in speeds.items()}


def describe_inputs(model: Any, samples: list[Batch], options: argparse.Namespace) -> None:
    """Report the size of the model, of the samples and of packs."""
    real = sum(len(sample["input_ids"]) for sample in samples)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    fact("parameters", f"{parameters / 1e9:.2f} B, {model.dtype}")
    fact("samples", f"{len(samples)} of {real:,} tokens in all, mean {real / len(samples):.0f}")
    fact("tokens of a pack", options.pack)


# --- parity -------------------------------------------------------------------------------------------------


def parity(model: Any, samples: list[Batch], options: argparse.Namespace, device: str) -> dict[str, float]:
    """Return the mean difference of a token's loss packed and alone.

    In addition ``rounding`` (alone with one kernel, and with another) and ``control`` (documents see each
    other).
    """
    model.eval()
    bins = bins_of(samples, options.pack)[:4]
    chosen = [index for one in bins for index in one]
    with torch.no_grad():
        alone, other = (losses_alone(model, samples, chosen, attention) for attention in ("sdpa", "eager"))
        off = torch.cat([other[index] - alone[index] for index in chosen])
        found = {"rounding": float(off.abs().mean())}
        for name in (*PACKED, "control"):
            attention = "sdpa" if name == "control" else name
            use_attention(model, attention)
            batches = packed_batches(samples, bins, options.pack, attention)
            if name == "control":
                for batch in batches:
                    width = batch["input_ids"].shape[1]
                    batch["attention_mask"] = torch.ones(1, 1, width, width, dtype=torch.bool).tril()
            found[name] = packed_difference(model, batches, bins, alone, device)
    model.train()
    return found


def losses_alone(
    model: Any, samples: list[Batch], chosen: Sequence[int], attention: str
) -> dict[int, torch.Tensor]:
    """Return the losses of the first tokens of samples that are run one by one."""
    use_attention(model, attention)
    batches = ((index, to_device(pad_samples([samples[index]]), str(model.device))) for index in chosen)
    return {index: token_losses(model, batch)[0, :FIRST_TOKENS] for index, batch in batches}


def packed_difference(
    model: Any, batches: list[Batch], bins: list[list[int]], alone: dict[int, torch.Tensor], device: str
) -> float:
    """Return the mean difference of the loss of a document's first tokens packed and alone."""
    off, tokens = 0.0, 0
    for batch, one in zip(batches, bins, strict=True):
        moved = to_device(batch, device)
        losses = token_losses(model, moved)[0]
        numbers = moved.get("_packed_seq_ids", torch.ones_like(moved["input_ids"]))[0]
        for number, index in enumerate(one, 1):
            mine = losses[numbers == number][:FIRST_TOKENS]
            off += float((mine - alone[index]).abs().sum())
            tokens += len(mine)
    return off / tokens


def promise_speed(speeds: dict[str, float]) -> None:
    """Promise how fast packed training is."""
    for way, target in (("padded at random", VARLEN_OVER_PADDED), ("packed, sdpa", VARLEN_OVER_SDPA)):
        ratio = speeds["packed, varlen"] / speeds[way]
        promise("real tokens a second, packed with varlen", ratio, target, baseline=way)


def promise_parity(
    apart: dict[str, float],
    backends: Sequence[str] = PACKED,
    *,
    usual: str = ROUNDING,
    leak: str = LEAK,
    where: str = "",
) -> None:
    """Promise that packed tokens have the losses they have alone; ``where`` ends each claim."""
    rounding = max(apart["rounding"], 1e-12)
    for backend in backends:
        off = apart[backend] / rounding
        claim = f"a token's loss, packed with {backend} against alone{where}"
        promise(claim, off, TIMES_ROUNDING, baseline=usual, at_least=False, kind="exact")
    seen = apart["control"] / rounding
    promise(f"{leak}{where}", seen, CONTROL_TIMES_ROUNDING, baseline=usual, kind="exact")
    fact("mean difference of a token's loss by rounding", apart["rounding"])


if __name__ == "__main__":
    main()
