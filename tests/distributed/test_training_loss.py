"""Two gloo processes with DDP and three accumulated micro-steps: the gradients of one big batch."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from distributed.gloo import process_group
from noise_floor import noise_floor, relative_difference
from packhorse.integrations.loss import count_supervised, token_loss
from packhorse.integrations.preference import reference_log_probs
from packhorse.types import Batch, BatchInfo

RANKS, STEPS, LENGTH, WORDS = 2, 3, 12, 30
# Supervised tokens of each rank's micro-batches: uneven, and one padding batch without any.
SUPERVISED = ((12, 1, 5), (2, 0, 7))
WEIGHTED = ((True, False, True), (False, False, False))  # the other rank's count has weights too


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(WORDS, 16), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, WORDS)
    ).double()


def batch_of(rank: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(rank * STEPS + step)
    ids = torch.randint(0, WORDS, (1, LENGTH), generator=generator)
    labels = torch.randint(0, WORDS, (1, LENGTH), generator=generator)
    labels[:, SUPERVISED[rank][step] :] = -100
    weights = torch.rand(1, LENGTH, generator=generator) * 3 if WEIGHTED[rank][step] else None
    return Batch({"input_ids": ids, "labels": labels}, BatchInfo(0, step, loss_weights=weights))


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def rank_main(rank: int, folder: str) -> None:
    with process_group(rank, RANKS, folder):
        train(rank, folder)


def train(rank: int, folder: str) -> None:
    batches = [batch_of(rank, step) for step in range(STEPS)]
    plain = [Batch(batch) for batch in batches]  # without info
    tokens, weight = count_supervised(plain), count_supervised(batches)
    found = {"tokens": torch.tensor(tokens), "weight": torch.tensor(weight, dtype=torch.float64)}
    for name in ("ours", "naive", "weighted"):
        model = small_model()
        wrapped = DistributedDataParallel(model)
        for step, batch in enumerate(batches):
            wrapped.require_backward_grad_sync = step == STEPS - 1
            logits = wrapped(batch["input_ids"])
            if name == "ours":
                loss = token_loss(logits, batch["labels"], tokens, replicas=RANKS)
            elif name == "weighted":
                weights = batch.info.loss_weights
                loss = token_loss(logits, batch["labels"], weight, replicas=RANKS, weights=weights)
            else:  # the mean of each batch, divided by the number of batches; a padding batch has none
                summed = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
                loss = summed / max(SUPERVISED[rank][step], 1) / STEPS
            loss.backward()
        found[name] = gradients(model)
    torch.save(found, f"{folder}/rank{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("loss")
    mp.spawn(rank_main, args=(str(folder),), nprocs=RANKS)
    return [torch.load(Path(folder, f"rank{rank}.pt")) for rank in range(RANKS)]


def all_batches(order: int = 1) -> list[Batch]:
    return [batch_of(rank, step) for rank in range(RANKS) for step in range(STEPS)][::order]


def one_big_batch(order: int = 1, weighted: bool = False) -> torch.Tensor:
    model, batches = small_model(), all_batches(order)
    ids, labels = (torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels"))
    losses = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="none")
    weights = (labels != -100).double().flatten()
    if weighted:
        weights *= torch.cat([weights_of(batch) for batch in batches]).flatten()
    ((losses * weights).sum() / weights.sum()).backward()
    return gradients(model)


def weights_of(batch: Batch) -> torch.Tensor:
    weights = batch.info.loss_weights
    return torch.ones(1, LENGTH) if weights is None else weights


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


def test_every_rank_counts_the_weights_of_all(ranks: list[dict[str, torch.Tensor]]) -> None:
    expected = sum(
        float(weights_of(batch)[batch["labels"] != -100].double().sum()) for batch in all_batches()
    )
    assert [float(rank["weight"]) for rank in ranks] == [pytest.approx(expected, rel=1e-12)] * RANKS


def test_gradients_of_weighted_tokens_are_those_of_the_weighted_mean(
    ranks: list[dict[str, torch.Tensor]], parity: Any
) -> None:
    expected, other_order = one_big_batch(weighted=True), one_big_batch(-1, weighted=True)
    floor = noise_floor(expected, other_order, measure=relative_difference)
    for rank in ranks:
        parity.check(
            "gradients",
            relative_difference(rank["weighted"], expected),
            floor,
            relative_difference(rank["ours"], expected),  # weights ignored
        )


def reference_main(rank: int, folder: str) -> None:
    with process_group(rank, RANKS, folder):
        ask_reference(rank, folder)


def ask_reference(rank: int, folder: str) -> None:
    """Ask a reference for rows of which each rank has cached others, as for one that is sharded."""
    model, ran = small_model(), []

    def reference(input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        dist.all_reduce(torch.ones(1))  # hangs if another rank does not run it
        ran.append(rank)
        return SimpleNamespace(logits=model(input_ids))

    cache: dict[str, list[float]] = {}
    of_steps = []
    # Rank 1 has only a placeholder in step 0, and a row that it knows in step 2.
    for key in (("a", ""), ("b", "c"), ("d", "c"), ("b", "c")):
        batch = batch_of(rank, 0)
        described = {"document_keys": ((key[rank],),), "document_roles": (("good" if key[rank] else "",),)}
        lengths = {"document_lengths": ((LENGTH,),), "labels": batch["labels"]}
        batch = Batch({"input_ids": batch["input_ids"]}, BatchInfo(0, 0, **described, **lengths))
        before = len(ran)
        reference_log_probs(reference, batch, cache)
        of_steps.append(len(ran) - before)
    Path(folder, f"ran{rank}.json").write_text(json.dumps([of_steps, sorted(cache)]))


def test_a_reference_runs_on_all_ranks_or_on_none(tmp_path: Path) -> None:
    mp.spawn(reference_main, args=(str(tmp_path),), nprocs=RANKS)
    found = [json.loads((tmp_path / f"ran{rank}.json").read_text()) for rank in range(RANKS)]
    assert found == [[[1, 1, 1, 0], ["a", "b", "d"]], [[1, 1, 1, 0], ["c"]]]
