"""Real processes with gloo: the same steps everywhere, similar lengths in each, own rows only."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.multiprocessing as mp

from distributed.gloo import process_group
from packhorse.datasets import RobustDatasetWrapper, open_meta_dataset
from packhorse.errors import ConfigError
from packhorse.samplers import LengthGroupedSampler
from packhorse.types import World

ROWS, BATCH, MAX_LENGTH, EPOCHS = 3997, 4, 1500, 3


def rank_main(rank: int, size: int, folder: str) -> None:
    """What every process runs; what it saw goes into a file."""
    with process_group(rank, size, folder):
        seen = _run_samplers(rank, size, folder)
    Path(folder, f"rank{rank}.json").write_text(json.dumps(seen))


def _run_samplers(rank: int, size: int, folder: str) -> dict[str, Any]:
    meta = json.loads(Path(folder, "meta.json").read_text())
    shard = open_meta_dataset(meta, shard_data=True, remainder="keep")  # rank and size from the group
    sampler = LengthGroupedSampler(RobustDatasetWrapper(shard), max_length=MAX_LENGTH, batch_size=BATCH)
    seen: dict[str, Any] = {
        "rows": [shard.key(index) for index in range(len(shard))],
        "kept": int((np.asarray(sampler.lengths) <= MAX_LENGTH + 512).sum()),
        "steps": [],
        "epochs": [],
    }
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        order = list(sampler)
        seen["steps"].append(len(sampler))
        seen["epochs"].append([[shard.key(index), sampler.lengths[index]] for index in order])
    seen["lost"] = [[drop.key, drop.reason, drop.epoch] for drop in shard.ledger if drop.stage == "plan"]
    # One rank has nothing at all: no rank may take a step, and none may wait.
    seen["with an empty rank"] = len(list(LengthGroupedSampler(shard[:rank])))
    seen["alone"] = len(LengthGroupedSampler(shard[:rank], world=World()))
    try:
        LengthGroupedSampler(shard[:4], seed=rank)
    except ConfigError as error:
        seen["rejected"] = str(error)
    return seen


def lengths_of_rows() -> list[int]:
    """From ten tokens to far too many; the overlong ones are not spread evenly."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6, 0.8, ROWS), 10, 1900).astype(int)
    lengths[: ROWS // 2 : 4] = 3000
    return [int(length) for length in lengths]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of 2 or 4 processes saw."""
    folder = tmp_path_factory.mktemp(f"world{request.param}")
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    rows = [{"messages": turns, "_text_tokens": length} for length in lengths_of_rows()]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "meta.json").write_text(json.dumps({"chat": {"file_name": str(folder / "rows.jsonl")}}))
    mp.spawn(rank_main, args=(request.param, str(folder)), nprocs=request.param)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(request.param)]


def test_all_ranks_take_as_many_steps_as_the_one_with_the_fewest_rows(ranks: list[dict[str, Any]]):
    kept = [rank["kept"] for rank in ranks]
    assert len(set(kept)) > 1, "the ranks would not need to agree"
    for rank in ranks:
        assert rank["steps"] == [min(kept)] * EPOCHS
        assert [len(epoch) for epoch in rank["epochs"]] == rank["steps"]


def waiting(lengths: Any) -> float:
    """The longest sample of a step over the mean of all ranks', on average; 1 if no rank ever waits."""
    return float((lengths.max(0) / lengths.mean(0)).mean())


def test_a_step_has_similar_lengths_on_all_ranks(ranks: list[dict[str, Any]]):
    for epoch in range(EPOCHS):
        lengths = np.array([[length for _, length in rank["epochs"][epoch]] for rank in ranks], float)
        assert waiting(lengths) < 1.05
        assert waiting(np.random.default_rng(0).permuted(lengths, axis=1)) > 1.3, "as it would be at random"
        for other in lengths[1:]:
            assert np.corrcoef(np.log(lengths[0]), np.log(other))[0, 1] > 0.99


def test_no_rank_sees_the_rows_of_another(ranks: list[dict[str, Any]]):
    for epoch in range(EPOCHS):
        taken = [{key for key, _ in rank["epochs"][epoch]} for rank in ranks]
        assert all(mine <= set(rank["rows"]) for mine, rank in zip(taken, ranks, strict=True))
        assert (
            len(set().union(*taken))
            == sum(map(len, taken))
            == sum(len(rank["epochs"][epoch]) for rank in ranks)
        )


def test_every_row_is_taken_or_named_in_a_ledger(ranks: list[dict[str, Any]]):
    lengths = lengths_of_rows()
    everything = {f"chat/{row}" for row in range(ROWS)}
    for epoch in range(EPOCHS):
        taken = {key for rank in ranks for key, _ in rank["epochs"][epoch]}
        lost = {
            (key, reason) for rank in ranks for key, reason, when in rank["lost"] if when in (None, epoch)
        }
        assert taken.isdisjoint(key for key, _ in lost)
        assert taken | {key for key, _ in lost} == everything
        too_long = {key for key, reason in lost if reason == "too_long"}
        assert too_long == {f"chat/{row}" for row, n in enumerate(lengths) if n > MAX_LENGTH + 512}


def test_a_rank_without_rows_stops_all_and_a_world_of_one_is_independent(ranks: list[dict[str, Any]]):
    assert [rank["with an empty rank"] for rank in ranks] == [0] * len(ranks)
    assert [rank["alone"] for rank in ranks] == list(range(len(ranks)))


def test_different_seeds_raise_on_every_rank(ranks: list[dict[str, Any]]):
    named = "; ".join(f"seed={rank}, batch_size=1 on ranks [{rank}]" for rank in range(len(ranks)))
    assert {rank["rejected"] for rank in ranks} == {
        f"the ranks sample with different settings: {named}. Pass the same on every rank."
    }
