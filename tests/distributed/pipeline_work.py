"""What each of two processes runs: pipelined steps beside steps of the whole model, and how far they differ.

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
from contract.tiny_models import tiny_model
from packhorse.collate_fns import model_inputs, neat_packed_vlm_collater, pad_collate_fn
from packhorse.datasets.tokenized import PreTokenizedDatasetWrapper
from packhorse.families import family_of
from packhorse.integrations.attention import use_attention
from packhorse.integrations.loss import token_loss
from packhorse.integrations.pipelining import VlmPipeline, pipeline_inputs, split_vlm
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm import PackedDatasetWrapper
from packhorse.positions import rope_index
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
    def padded(self, fakes: bool = False) -> list[dict[str, Any]]:
        steps = ([self.samples[fakes][self.places[case]] for case in step] for step in PADDED)
        return [pad_collate_fn(samples, self.processor, pixel_dtype=None) for samples in steps]

    @cache  # noqa: B019
    def packed(self, backend: str) -> list[dict[str, Any]]:
        rope, made = rope_index(tiny_model(self.name)), []
        for step in PACKED:
            bins = [[self.places[case] for case in row] for row in step]
            packs = PackedDatasetWrapper(self.samples[True], bins, 4096, 0, rope, on_bad="raise")
            rows = [packs[row] for row in range(len(bins))]
            made.append(neat_packed_vlm_collater(rows, attn_implementation=backend, pixel_dtype=None))
        return made

    def prepared(self, batch: dict[str, Any], n_microbatches: int) -> dict[str, Any]:
        collate = wrap_vlm_collate_for_pp(dict, n_microbatches, layout=family_of(self.processor).layout)
        return collate(batch)


def with_layers(name: str, layers: int) -> Any:
    """The tiny model with more layers."""
    config = copy.deepcopy(tiny_model(name).config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = [text.layer_types[0]] * layers
    torch.manual_seed(1)
    return type(tiny_model(name))(config)


def reference_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    logits = model(**model_inputs(batch)).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


class Compared:
    """Whole model and stages side by side; the worst differences."""

    def __init__(self, whole: Any, parts: list[Any]) -> None:
        self.whole, self.parts = whole, parts
        self.worst = {"loss": 0.0, "evaluation": 0.0, "gradient": 0.0, "weight": 0.0}
        self.compared = dict.fromkeys(self.worst, 0)
        self.losses: list[float] = []
        self.learned: set[str] = set()

    def note(self, what: str, wanted: torch.Tensor, found: torch.Tensor | None) -> None:
        if found is not None:
            self.compared[what] += 1
            self.worst[what] = max(self.worst[what], float((wanted - found).detach().abs().max()))

    def step(self, batch: dict[str, Any], loss: torch.Tensor | None) -> None:
        """Compare after a pipelined step, then move both models along their gradients."""
        wanted = reference_loss(self.whole, batch)
        wanted.backward()
        self.losses.append(float(wanted.detach()))
        self.note("loss", wanted, loss)
        weights = dict(self.whole.named_parameters())
        for part in self.parts:
            for name, own in part.named_parameters():
                other = weights[name]
                assert (own.grad is None) == (other.grad is None), name
                if own.grad is not None:
                    self.note("gradient", other.grad, own.grad)
                    self.learned |= {name} if bool(own.grad.any()) else set()
                    with torch.no_grad():
                        own -= RATE * own.grad
                    own.grad = None
        with torch.no_grad():
            for other in weights.values():
                if other.grad is not None:
                    other -= RATE * other.grad
                    other.grad = None
        for part in self.parts:
            for name, own in part.named_parameters():
                self.note("weight", weights[name], own)

    def result(self) -> dict[str, Any]:
        kinds = ("visual", "embed_tokens", "layers", "lm_head")
        learned = [kind for kind in kinds if any(kind in name for name in self.learned)]
        return {**self.worst, "losses": self.losses, "learned": learned, "compared": self.compared}


def pipelined(
    rank: int,
    whole: Any,
    batches: list[dict[str, Any]],
    data: Data,
    schedule: type,
    n: int,
    n_stages: int = 2,
    wrap: Callable[[Any], Any] = lambda part: part,
) -> dict[str, Any]:
    """Three steps, each followed by an evaluation of the first batch."""
    parts = split_vlm(copy.deepcopy(whole), n_stages)[rank::2]
    pipeline = VlmPipeline([wrap(part) for part in parts], n, schedule)
    compared = Compared(whole, parts)
    for batch in batches:
        compared.step(batch, pipeline.step(data.prepared(batch, n)))
        loss = pipeline.eval(data.prepared(batches[0], n))
        with torch.no_grad():
            compared.note("evaluation", reference_loss(whole, batches[0]), loss)
        assert all(value is None for part in parts for value in staged(part))
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
    compared = Compared(whole, [part])
    for _ in range(2):
        losses: list[torch.Tensor] = []
        with stage_vlm_media_for_pp(Pipe, [part], prepared):
            options = {"target": inputs.labels, "losses": losses} if rank == 1 else {}
            schedule.step(*([inputs.ids] if rank == 0 else []), **options, **inputs.kwargs)
        compared.step(batch, torch.stack(losses).sum() if losses else None)
    return {**compared.result(), "cursor": calls}


def staged(part: Any) -> list[Any]:
    return [value for name, value in vars(part).items() if name.startswith("_vlm_")]


def failing(rank: int, whole: Any, batch: dict[str, Any], data: Data) -> dict[str, Any]:
    """Stage 0 fails in its second microbatch; the other rank learns of it when the process is gone."""
    part = split_vlm(copy.deepcopy(whole), 2)[rank]
    pipeline = VlmPipeline([part], 3, Schedule1F1B)
    prepared = data.prepared(batch, 3)
    if rank == 0:
        prepared["_vlm_pp_media_chunks"]["pixel_values"][1] = torch.zeros(3, 5)
    try:
        pipeline.step(prepared)
    except RuntimeError as error:
        left = [name for name, value in vars(part).items() if name.startswith("_vlm_") and value is not None]
        return {"error": str(error), "left": left, "schedules": len(pipeline._built)}
    return {"error": None}


def found(rank: int, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in ("qwen2_vl", "qwen3_vl"):
        data, model = Data(name, folder), tiny_model(name)
        for kind, schedule in SCHEDULES.items():
            for shape, batches in (("padded", data.padded()), ("packed", data.packed("sdpa"))):
                whole = copy.deepcopy(model)
                use_attention(whole, "sdpa")
                results[f"{name} {kind} {shape}"] = pipelined(
                    rank, whole, batches, data, schedule, MICROBATCHES
                )
        whole = copy.deepcopy(model)
        use_attention(whole, "varlen")
        batches = data.packed("varlen")
        results[f"{name} 1f1b varlen"] = pipelined(rank, whole, batches, data, Schedule1F1B, MICROBATCHES)
        batches = data.padded(fakes=True)
        results[f"{name} 1f1b fakes"] = pipelined(
            rank, copy.deepcopy(model), batches, data, Schedule1F1B, MICROBATCHES
        )
        results[f"{name} 1f1b checkpointed"] = pipelined(
            rank,
            copy.deepcopy(model),
            data.padded(),
            data,
            Schedule1F1B,
            MICROBATCHES,
            wrap=checkpoint_wrapper,
        )
        results[f"{name} interleaved"] = pipelined(
            rank, with_layers(name, 4), data.padded(), data, ScheduleInterleaved1F1B, 4, n_stages=4
        )
        results[f"{name} by hand"] = by_hand(rank, copy.deepcopy(model), data.padded()[1], data)
    results["failing"] = failing(rank, copy.deepcopy(model), data.padded()[1], data)
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
    results = found(rank, folder)
    (folder.parent / f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
