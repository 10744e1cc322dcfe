"""Two gloo processes with DDP and three accumulated micro-steps: the gradients of one big batch."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from noise_floor import noise_floor, relative_difference
from packhorse.integrations.loss import count_supervised, token_loss

RANKS, STEPS, LENGTH, WORDS = 2, 3, 12, 30
# Supervised tokens of each rank's micro-batches: uneven, and one padding batch without any.
SUPERVISED = ((12, 1, 5), (2, 0, 7))


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(WORDS, 16), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, WORDS)
    ).double()


def batch_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank * STEPS + step)
    ids = torch.randint(0, WORDS, (1, LENGTH), generator=generator)
    labels = torch.randint(0, WORDS, (1, LENGTH), generator=generator)
    labels[:, SUPERVISED[rank][step] :] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def rank_main(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    batches = [batch_of(rank, step) for step in range(STEPS)]
    tokens = count_supervised(batches)
    found = {"tokens": torch.tensor(tokens)}
    for name in ("ours", "naive"):
        model = small_model()
        wrapped = DistributedDataParallel(model)
        for step, batch in enumerate(batches):
            wrapped.require_backward_grad_sync = step == STEPS - 1
            logits = wrapped(batch["input_ids"])
            if name == "ours":
                loss = token_loss(logits, batch["labels"], tokens, replicas=RANKS)
            else:  # the mean of each batch, divided by the number of batches; a padding batch has none
                summed = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
                loss = summed / max(SUPERVISED[rank][step], 1) / STEPS
            loss.backward()
        found[name] = gradients(model)
    torch.save(found, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("loss")
    mp.spawn(rank_main, args=(str(folder),), nprocs=RANKS)
    return [torch.load(Path(folder, f"rank{rank}.pt")) for rank in range(RANKS)]


def one_big_batch(order: int = 1) -> torch.Tensor:
    model = small_model()
    batches = [batch_of(rank, step) for rank in range(RANKS) for step in range(STEPS)][::order]
    ids, labels = (torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels"))
    F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
    return gradients(model)


def test_every_rank_counts_the_tokens_of_all(ranks: list[dict[str, torch.Tensor]]) -> None:
    assert [int(rank["tokens"]) for rank in ranks] == [sum(map(sum, SUPERVISED))] * RANKS


def test_gradients_are_those_of_one_big_batch(ranks: list[dict[str, torch.Tensor]], parity: Any) -> None:
    expected, other_order = one_big_batch(), one_big_batch(-1)
    floor = noise_floor(expected, other_order, measure=relative_difference)
    for rank in ranks:
        parity.check(
            "gradients",
            relative_difference(rank["ours"], expected),
            floor,
            relative_difference(rank["naive"], expected),  # the mean of means
        )
