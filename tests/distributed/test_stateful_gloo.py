"""Two gloo processes with DDP and two micro-steps: packed hybrids and mixtures of experts train as unpacked.

The loss and the gradients of an optimizer step, through loader, ``prepare`` and ``batch_loss``, are those of
its samples one by one, in a model as transformers builds it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import packhorse
from contract.processors import processor
from contract.test_packable_types import decoder, with_random_weights
from contract.tiny_models import MODELS, tiny_model
from contract.tiny_tokenizers import tokenizer
from distributed.gloo import process_group
from noise_floor import largest_difference, noise_floor, relative_difference
from packhorse import World, batch_loss, count_supervised, model_inputs
from packhorse.integrations.attention import use_attention

RANKS, ACCUMULATION = 2, 2
NAMES = ("qwen3_5", "qwen3_5_moe", "lfm2_vl", "nemotron_h", "bamba", "qwen3_vl_moe")


@dataclass
class Step:
    """An optimizer step: its loss, its gradients, and the samples and the number of images of its batches."""

    loss: float
    gradients: dict[str, torch.Tensor]
    samples: list[int]
    images: int = 0


def parts_of(name: str) -> tuple[Any, Any]:
    """A model as transformers builds it, and its processor."""
    if name in MODELS:
        return copy.deepcopy(tiny_model(name, by_document=False)), processor(name)
    words = copy.deepcopy(tokenizer("qwen2_vl"))
    words.chat_template = processor("qwen2_vl").chat_template
    torch.manual_seed(0)
    model = with_random_weights(decoder(name, vocab_size=len(words)))
    return model, words


def rows_of(name: str) -> list[dict[str, Any]]:
    """Sixteen chats, every third with an image if the model takes images."""
    from PIL import Image

    rows = []
    for number in range(16):
        image = {"type": "image", "image": Image.new("RGB", (60 + 8 * number, 70), (9 * number, 99, 7))}
        media = [image] if name in MODELS and number % 3 == 0 else []
        turns = [
            ("user", [*media, {"type": "text", "text": "why " * (1 + number * 5 % 11)}]),
            ("assistant", [{"type": "text", "text": f"so {number} " * (1 + number % 6)}]),
        ]
        rows.append({"conversation": [{"role": role, "content": content} for role, content in turns]})
    return rows


def load(
    name: str, model: Any, words: Any, rank: int = 0, size: int = 1, **settings: Any
) -> packhorse.Loader:
    return packhorse.load(rows_of(name), words, model=model, world=World(rank, size), **settings)


def packed_batches(name: str, model: Any, words: Any, rank: int) -> list[Any]:
    loader = load(
        name,
        model,
        words,
        rank,
        RANKS,
        pack_size=320,
        gradient_accumulation_steps=ACCUMULATION,
        num_workers=0,
    )
    return [batch for _, batch in zip(range(ACCUMULATION), loader, strict=False)]


def rank_main(rank: int, folder: str) -> None:
    with process_group(rank, RANKS, folder):
        for name in NAMES:
            torch.save(packed_step(name, rank), f"{folder}/{name}-{rank}.pt")
        for kind in SHARDING:
            torch.save(sharded_step(rank, kind), f"{folder}/{kind}-{rank}.pt")


def packed_step(name: str, rank: int) -> Step:
    """Train an optimizer step on the packs of this rank."""
    model, words = parts_of(name)
    packhorse.prepare(model, "sdpa", device="cpu")
    batches = packed_batches(name, model, words, rank)
    wrapped = DistributedDataParallel(model)
    tokens, loss = count_supervised(batches), torch.zeros(())
    for number, batch in enumerate(batches, 1):
        wrapped.require_backward_grad_sync = number == ACCUMULATION
        part = batch_loss(wrapped, wrapped(**model_inputs(batch, wrapped)), batch, tokens, RANKS)
        part.backward()
        loss += part.detach() / RANKS
    dist.all_reduce(loss)
    samples = [sample for batch in batches for sample in batch.info.samples]
    images = sum(sum(batch.info.num_images) for batch in batches if "pixel_values" in batch)
    return Step(float(loss), gradients_of(model), samples, images)


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stateful")
    mp.spawn(rank_main, args=(str(path),), nprocs=RANKS)
    return path


def one_by_one(name: str, samples: Sequence[int], attention: str) -> Step:
    """Train on these samples alone, in a model that was not prepared."""
    model, words = parts_of(name)
    use_attention(model, attention)
    batches = {
        batch.info.samples[0]: batch
        for batch in load(name, model, words, mode="pad", batch_size=1, num_workers=0)
    }
    tokens = sum(count_supervised([batches[sample]]) for sample in samples)
    loss = 0.0
    for sample in samples:
        batch = batches[sample]
        part = batch_loss(model, model(**model_inputs(batch)), batch, tokens)
        part.backward()
        loss += float(part.detach())
    return Step(loss, gradients_of(model), list(samples))


def leaking(name: str) -> Step:
    """Train on the packs of all ranks without their boundaries."""
    model, words = parts_of(name)
    prepared = copy.deepcopy(model)
    packhorse.prepare(prepared, "sdpa", device="cpu")
    batches = [batch for rank in range(RANKS) for batch in packed_batches(name, prepared, words, rank)]
    tokens, loss = count_supervised(batches), 0.0
    for batch in batches:
        inputs = model_inputs(batch)
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"]).tril()
        part = batch_loss(model, model(**inputs), batch, tokens)
        part.backward()
        loss += float(part.detach())
    return Step(loss, gradients_of(model), [])


@pytest.mark.parametrize("name", NAMES)
def test_a_packed_step_on_two_ranks_is_its_samples_one_by_one(name: str, folder: Path, parity: Any) -> None:
    ranks = [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(RANKS)]
    samples = [sample for rank in ranks for sample in rank.samples]
    assert len(samples) > 2 * RANKS * ACCUMULATION, "packs have several documents"
    assert len(set(samples)) == len(samples)
    assert any(rank.images for rank in ranks) == (name in MODELS)
    expected = one_by_one(name, samples, "sdpa")
    others = [one_by_one(name, samples[::-1], attention) for attention in ("sdpa", "eager")]
    control = leaking(name)
    floor = noise_floor(expected.loss, *(other.loss for other in others))
    gradient_floor = noise_floor(
        expected.gradients, *(other.gradients for other in others), measure=relative_difference
    )
    away = relative_difference(control.gradients, expected.gradients)
    for rank in ranks:
        parity.check("loss", abs(rank.loss - expected.loss), floor, abs(control.loss - expected.loss))
        parity.check(
            "gradients", relative_difference(rank.gradients, expected.gradients), gradient_floor, away
        )


SHARDING = ("fully_shard", "fsdp")
LENGTHS = ((30, 30, 30, 30), (200, 3))  # of the documents of each rank: one group, and two


@dataclass
class ShardedStep:
    """The logits of a rank, the averaged gradients of a layer, and how often it was called.

    ``padded`` and ``padded_calls`` are those of padded rows, of which only rank 0 has hidden tokens first.
    """

    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]
    calls: int
    padded: torch.Tensor
    padded_calls: int


def short_convolution() -> Any:
    torch.manual_seed(0)
    return with_random_weights(decoder("lfm2")).train()


def layer_gradients(model: Any) -> dict[str, torch.Tensor]:
    whole = {
        name.replace("_fsdp_wrapped_module.", ""): getattr(grad, "full_tensor", lambda g=grad: g)()
        for name, grad in gradients_of(model).items()
    }
    return {name: grad for name, grad in whole.items() if "conv.in_proj" in name or "conv.out_proj" in name}


def packed_row(rank: int) -> dict[str, torch.Tensor]:
    lengths = torch.tensor(LENGTHS[rank])
    numbers = torch.arange(len(lengths)).repeat_interleave(lengths)
    mask = (numbers[:, None] == numbers) & torch.ones(len(numbers), len(numbers)).tril().bool()
    ids = torch.randint(5, 90, (1, len(numbers)), generator=torch.Generator().manual_seed(rank))
    positions = torch.cat([torch.arange(int(length)) for length in lengths])[None]
    return {"input_ids": ids, "attention_mask": mask[None, None], "position_ids": positions}


def padded_rows(rank: int) -> dict[str, torch.Tensor]:
    """Two rows of 20 tokens, of which the last has 5 hidden ones: the first on rank 0, the last on others."""
    ids = torch.randint(5, 90, (2, 20), generator=torch.Generator().manual_seed(rank))
    visible = torch.ones_like(ids)
    visible[1, slice(0, 5) if rank == 0 else slice(15, 20)] = 0
    return {"input_ids": ids, "attention_mask": visible}


def sharded_step(rank: int, kind: str) -> ShardedStep:
    """Train on a row with FSDP around each projection of the layer with state."""
    model = short_convolution()
    packhorse.prepare(model, "sdpa", device="cpu")
    layer = next(block.conv for block in model.model.layers if hasattr(block, "conv"))
    calls: list[int] = []
    for name in ("in_proj", "out_proj"):
        projection = getattr(layer, name)
        if kind == "fully_shard":
            fully_shard(projection)
        else:
            device = torch.device("cpu")
            setattr(layer, name, FullyShardedDataParallel(projection, device_id=device, use_orig_params=True))
    layer.in_proj.register_forward_hook(lambda *_: calls.append(1))
    logits = model(**packed_row(rank)).logits
    logits.square().sum().backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        gradients = {key: gradient.clone() for key, gradient in layer_gradients(model).items()}
    number = len(calls)
    with torch.no_grad():
        padded = model(**padded_rows(rank), use_cache=False).logits
    return ShardedStep(logits.detach(), gradients, number, padded, len(calls) - number)


def sharded_alone(reverse: bool = False) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Logits of both rows, and averaged gradients, of documents one by one in a model that is not sharded."""
    model, rows = short_convolution(), []
    for rank in range(RANKS):
        parts = packed_row(rank)["input_ids"].split(LENGTHS[rank], 1)
        logits = [model(input_ids=part, use_cache=False).logits for part in parts]
        total = torch.stack([part.square().sum() for part in (logits[::-1] if reverse else logits)]).sum()
        (total / RANKS).backward()
        rows.append(torch.cat([part.detach() for part in logits], 1))
    return rows, layer_gradients(model)


@pytest.mark.parametrize("kind", SHARDING)
def test_ranks_whose_layers_gather_weights_call_them_equally_often(
    kind: str, folder: Path, parity: Any
) -> None:
    ranks = [torch.load(folder / f"{kind}-{rank}.pt", weights_only=False) for rank in range(RANKS)]
    assert len({rank.calls for rank in ranks}) == 1, "or ranks would wait for each other"
    rows, gradients = sharded_alone()
    _, reversed_gradients = sharded_alone(reverse=True)
    leaking = short_convolution()
    leak = leaking(**packed_row(0)).logits
    leak.square().sum().backward()
    for rank, expected in zip(ranks, rows, strict=True):
        difference = largest_difference(rank.logits, expected)
        parity.check("logits", difference, noise_floor(expected), largest_difference(leak, rows[0]))
        floor = noise_floor(gradients, reversed_gradients, measure=relative_difference)
        control = relative_difference(layer_gradients(leaking), gradients)
        parity.check("gradients", relative_difference(rank.gradients, gradients), floor, control)


@pytest.mark.parametrize("kind", SHARDING)
def test_ranks_whose_layers_gather_weights_call_them_equally_often_for_padded_rows(
    kind: str, folder: Path, parity: Any
) -> None:
    model = short_convolution()
    for rank in range(RANKS):
        step = torch.load(folder / f"{kind}-{rank}.pt", weights_only=False)
        assert step.padded_calls == 1
        rows = padded_rows(rank)
        visible = rows["attention_mask"][1].bool()
        with torch.no_grad():
            alone, wider = (
                model(input_ids=ids[None], use_cache=False).logits[0]
                for ids in (rows["input_ids"][1][visible], rows["input_ids"][1])
            )
        control = largest_difference(wider[-len(alone) :], alone)
        difference = largest_difference(step.padded[1][visible], alone)
        parity.check("logits", difference, noise_floor(alone), control)
