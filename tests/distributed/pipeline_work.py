"""What each of two processes runs: pipelined steps and steps of the whole model, and how far they differ.

    python pipeline_work.py rank folder

The folder has the media files; what was found goes to ``rank<n>.json`` in it.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from contract.cases import conversation
from contract.processors import processor
from contract.tiny_models import tiny_model, with_layers
from noise_floor import largest_difference, noise_floor
from packhorse.collate_fns import model_inputs, neat_packed_vlm_collater, pad_collate_fn
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.families import family_of
from packhorse.families.qwen_vl import rope_index
from packhorse.integrations.attention import use_attention
from packhorse.integrations.loss import token_loss
from packhorse.integrations.pipelining import VlmPipeline, pipeline_inputs, split_vlm
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm import PackedDatasetWrapper
from packhorse.pp_media import prepare_vlm_media_for_pp, stage_vlm_media_for_pp, wrap_vlm_collate_for_pp

MICROBATCHES, RATE = 3, 0.05
# Five rows for three microbatches, then as many, then fewer; text alone in whole microbatches.
PADDED = (
    ("text", "one image", "two images", "video", "many turns"),
    ("image and video", "text", "text", "system", "one image", "video, then image"),
    ("two images", "text"),
)
# For each step the documents of its rows.
PACKED = (
    (("text", "one image", "video"), ("many turns", "text"), ("two images", "image and video"), ("text",)),
    (("one image", "two images"), ("video",), ("text", "text", "one image")),
    (("video, then image", "text"), ("one image", "text")),
)
WHATS = ("loss", "evaluation", "gradient", "weight")
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Data:
    """Batches of a family, before they are prepared."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.processor = name, processor(name)
        cases = sorted({case for step in PADDED for case in step} | {c for s in PACKED for r in s for c in r})
        files = {path.name: path for path in folder.iterdir()}
        rows = [{"conversation": conversation(name, case, files)} for case in cases]
        self.places = {case: place for place, case in enumerate(cases)}
        self.samples = {
            fakes: PreTokenizedDatasetWrapper(
                rows, self.processor, inject_fake_images=fakes, on_bad="raise", ledger=Ledger()
            )
            for fakes in (False, True)
        }

    @cache  # noqa: B019 - lives as long as the process
    def padded_batches(self, fakes: bool = False) -> list[dict[str, Any]]:
        steps = ([self.samples[fakes][self.places[case]] for case in step] for step in PADDED)
        return [pad_collate_fn(samples, self.processor, pixel_dtype=None) for samples in steps]

    @cache  # noqa: B019
    def packed_batches(self, backend: str) -> list[dict[str, Any]]:
        rope, made = rope_index(tiny_model(self.name)), []
        for step in PACKED:
            bins = [[self.places[case] for case in row] for row in step]
            packs = PackedDatasetWrapper(self.samples[True], bins, 4096, 0, rope, on_bad="raise")
            rows = [packs[row] for row in range(len(bins))]
            made.append(neat_packed_vlm_collater(rows, attn_implementation=backend, pixel_dtype=None))
        return made

    def prepare(self, batch: dict[str, Any], n_microbatches: int) -> dict[str, Any]:
        collate = wrap_vlm_collate_for_pp(dict, n_microbatches, layout=family_of(self.processor).layout)
        return dict(collate(batch))


def reference_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    logits = model(**model_inputs(batch)).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def step_along_gradients(model: Any) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            if weight.grad is not None:
                weight -= RATE * weight.grad
                weight.grad = None


class Noise:
    """The same steps computed in another correct way, and the first one with a mistake.

    The other way is eager attention, and one backward pass for each half of the labels; the mistake is to
    take the mean over rows of their means.
    """

    def __init__(self, whole: Any, batches: list[dict[str, Any]]) -> None:
        self.whole, self.batches = whole, batches
        self.other, self.wrong = copy.deepcopy(whole), copy.deepcopy(whole)
        for model in (self.other, self.wrong):
            use_attention(model, "eager")
        self.floor = dict.fromkeys(WHATS, 0.0)
        self.control = dict.fromkeys(WHATS, 0.0)

    def note(self, what: str, wanted: torch.Tensor, other: torch.Tensor, wrong: torch.Tensor | None) -> None:
        self.floor[what] = max(self.floor[what], noise_floor(wanted, other))
        if wrong is not None:
            self.control[what] = max(self.control[what], largest_difference(wrong, wanted))

    def step(self, number: int, wanted: torch.Tensor) -> None:
        """Compare the loss and the gradients of the whole model, which are there, with the others'."""
        batch = self.batches[number]
        tokens, total = int((batch["labels"] != -100).sum()), torch.zeros(())
        every_other = torch.arange(batch["labels"].shape[1]) % 2 == 0
        logits = self.other(**model_inputs(batch)).logits
        for half in (every_other, ~every_other):
            loss = token_loss(logits, batch["labels"].masked_fill(~half, -100), tokens)
            loss.backward(retain_graph=True)
            total += loss.detach()
        mean_of_means = None
        if number == 0:
            logits = self.wrong(**model_inputs(batch)).logits
            pairs = zip(logits, batch["labels"], strict=True)
            rows = [F.cross_entropy(row, labels, ignore_index=-100) for row, labels in pairs]
            mean_of_means = torch.stack(rows).nanmean()
            mean_of_means.backward()
        self.note("loss", wanted, total, mean_of_means)
        self._note_weights("gradient", number)

    def after(self, number: int) -> None:
        """Compare the weights, once the whole model has made its step."""
        for model in (self.other, self.wrong):
            step_along_gradients(model)
        self._note_weights("weight", number)

    def evaluate(self, wanted: torch.Tensor, number: int) -> None:
        other = reference_loss(self.other, self.batches[0])
        wrong = reference_loss(self.wrong, self.batches[0]) if number == 0 else None
        self.note("evaluation", wanted, other, wrong)

    def _note_weights(self, what: str, number: int) -> None:
        models = (self.whole, self.other, self.wrong)
        for whole, other, wrong in zip(*(model.parameters() for model in models), strict=True):
            if what == "weight":
                self.note(what, whole, other, wrong if number == 0 else None)
            elif whole.grad is not None:
                assert other.grad is not None
                self.note(what, whole.grad, other.grad, wrong.grad if number == 0 else None)


class Compared:
    """Whole model and stages side by side; the worst differences.

    Args:
        whole: the model that is not split.
        parts: its stages on this rank.
        noise: measures the noise of these steps; None where it is that of another case.
    """

    def __init__(self, whole: Any, parts: list[Any], noise: Noise | None) -> None:
        self.whole, self.parts, self.noise = whole, parts, noise
        self.worst = dict.fromkeys(WHATS, 0.0)
        self.compared = dict.fromkeys(WHATS, 0)
        self.losses: list[float] = []
        self.supervised: set[str] = set()

    def note(self, what: str, wanted: torch.Tensor, found: torch.Tensor | None) -> None:
        if found is not None:
            self.compared[what] += 1
            self.worst[what] = max(self.worst[what], largest_difference(found, wanted))

    def step(self, batch: dict[str, Any], loss: torch.Tensor | None) -> None:
        """Compare after a pipelined step, then move both models along their gradients."""
        wanted = reference_loss(self.whole, batch)
        wanted.backward()
        if self.noise is not None:
            self.noise.step(len(self.losses), wanted)
        self.losses.append(float(wanted.detach()))
        self.note("loss", wanted, loss)
        weights = dict(self.whole.named_parameters())
        for part in self.parts:
            for name, own in part.named_parameters():
                other = weights[name]
                assert (own.grad is None) == (other.grad is None), name
                if own.grad is not None:
                    self.note("gradient", other.grad, own.grad)
                    self.supervised |= {name} if bool(own.grad.any()) else set()
                    with torch.no_grad():
                        own -= RATE * own.grad
                    own.grad = None
        step_along_gradients(self.whole)
        if self.noise is not None:
            self.noise.after(len(self.losses) - 1)
        for part in self.parts:
            for name, own in part.named_parameters():
                self.note("weight", weights[name], own)

    def evaluate(self, batch: dict[str, Any], loss: torch.Tensor | None) -> None:
        with torch.no_grad():
            wanted = reference_loss(self.whole, batch)
            if self.noise is not None:
                self.noise.evaluate(wanted, len(self.losses) - 1)
        self.note("evaluation", wanted, loss)

    def result(self) -> dict[str, Any]:
        kinds = ("visual", "embed_tokens", "layers", "lm_head")
        supervised = [kind for kind in kinds if any(kind in name for name in self.supervised)]
        found = {"difference": self.worst, "losses": self.losses, "supervised": supervised}
        if self.noise is not None:
            found |= {"floor": self.noise.floor, "control": self.noise.control}
        return {**found, "compared": self.compared}


def run_pipeline(
    rank: int,
    whole: Any,
    batches: list[dict[str, Any]],
    data: Data,
    schedule: type,
    n: int,
    n_stages: int = 2,
    wrap: Callable[[Any], Any] = lambda part: part,
    eager: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Three steps, each followed by an evaluation of the first batch; the noise of ``eager`` batches."""
    parts = split_vlm(copy.deepcopy(whole), n_stages)[rank::2]
    pipeline = VlmPipeline([wrap(part) for part in parts], n, schedule)
    compared = Compared(whole, parts, None if eager is None else Noise(whole, eager))
    for batch in batches:
        compared.step(batch, pipeline.step(data.prepare(batch, n)))
        compared.evaluate(batches[0], pipeline.eval(data.prepare(batches[0], n)))
        assert all(value is None for part in parts for value in staged_values(part))
    return compared.result()


def by_hand(rank: int, whole: Any, batch: dict[str, Any], data: Data) -> dict[str, Any]:
    """A schedule of the user's own, that probes shapes: six rows, three microbatches, twice."""
    part = split_vlm(copy.deepcopy(whole), 2)[rank]
    prepared = prepare_vlm_media_for_pp(dict(batch), 6, 3, layout=family_of(data.processor).layout)
    inputs = pipeline_inputs(prepared, 3, part.rope_index, part.config)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(
        stage,
        3,
        loss_fn=lambda logits, labels: token_loss(logits, labels, inputs.tokens),
        kwargs_chunk_spec=TensorChunkSpec.from_dict(inputs.axes),
        scale_grads=False,
    )

    class Pipe:
        class info:
            has_first_stage = rank == 0

    calls: list[int] = []
    if rank == 0:
        part.register_forward_hook(lambda module, _, __: calls.append(module._vlm_chunk_idx))
    compared = Compared(whole, [part], Noise(whole, [batch, batch]))
    for _ in range(2):
        losses: list[torch.Tensor] = []
        with stage_vlm_media_for_pp(Pipe, [part], prepared):
            options: dict[str, Any] = {"target": inputs.labels, "losses": losses} if rank == 1 else {}
            schedule.step(*([inputs.ids] if rank == 0 else []), **options, **inputs.kwargs)
        compared.step(batch, torch.stack(losses).sum() if losses else None)
    return {**compared.result(), "cursor": calls}


def staged_values(part: Any) -> list[Any]:
    return [value for name, value in vars(part).items() if name.startswith("_vlm_")]


def failing(rank: int, whole: Any, batch: dict[str, Any], data: Data) -> dict[str, Any]:
    """Stage 0 fails in its second microbatch; the other rank learns of it when the process is gone."""
    part = split_vlm(copy.deepcopy(whole), 2)[rank]
    pipeline = VlmPipeline([part], 3, Schedule1F1B)
    prepared = data.prepare(batch, 3)
    if rank == 0:
        prepared["_vlm_pp_media_chunks"]["pixel_values"][1] = torch.zeros(3, 5)
    try:
        pipeline.step(prepared)
    except RuntimeError as error:
        left = [name for name, value in vars(part).items() if name.startswith("_vlm_") and value is not None]
        return {"error": str(error), "left": left, "schedules": len(pipeline._schedules)}
    return {"error": None}


def run_all(rank: int, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in ("qwen2_vl", "qwen3_vl"):
        data, model = Data(name, folder), tiny_model(name)
        for kind, schedule in SCHEDULES.items():
            for shape, batches in (
                ("padded", data.padded_batches()),
                ("packed", data.packed_batches("sdpa")),
            ):
                whole = copy.deepcopy(model)
                use_attention(whole, "sdpa")
                eager = None
                if kind == "gpipe":
                    eager = data.packed_batches("eager") if shape == "packed" else batches
                results[f"{name} {kind} {shape}"] = run_pipeline(
                    rank, whole, batches, data, schedule, MICROBATCHES, eager=eager
                )
        whole = copy.deepcopy(model)
        use_attention(whole, "varlen")
        batches = data.packed_batches("varlen")
        results[f"{name} 1f1b varlen"] = run_pipeline(rank, whole, batches, data, Schedule1F1B, MICROBATCHES)
        batches = data.padded_batches(fakes=True)
        results[f"{name} 1f1b fakes"] = run_pipeline(
            rank, copy.deepcopy(model), batches, data, Schedule1F1B, MICROBATCHES, eager=batches
        )
        results[f"{name} 1f1b checkpointed"] = run_pipeline(
            rank,
            copy.deepcopy(model),
            data.padded_batches(),
            data,
            Schedule1F1B,
            MICROBATCHES,
            wrap=checkpoint_wrapper,
        )
        batches = data.padded_batches()
        results[f"{name} interleaved"] = run_pipeline(
            rank, with_layers(name, 4), batches, data, ScheduleInterleaved1F1B, 4, n_stages=4, eager=batches
        )
        results[f"{name} by hand"] = by_hand(rank, copy.deepcopy(model), data.padded_batches()[1], data)
    results["failing"] = failing(rank, copy.deepcopy(model), data.padded_batches()[1], data)
    return results


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder.parent}/meeting",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=120),
    )
    results = run_all(rank, folder)
    (folder.parent / f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
