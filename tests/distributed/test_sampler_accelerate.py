"""Real Accelerate, two processes: which rows reach which rank when it splits the sampler's batches."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp
from accelerate import Accelerator, PartialState
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

from packhorse.datasets import make_meta_dataset, open_meta_dataset
from packhorse.samplers import LengthGroupedSampler

ROWS, BATCH, RANKS = 64, 4, 2
SHARE_WARNING = "rows are this rank's share"


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def rank_main(rank: int, folder: str) -> None:
    """What every process runs; what it saw goes into a file."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": Path(folder, "port").read_text()}
    seen = {
        "sharded, prepared": steps(folder, {"shard_data": True}, BATCH, prepare=True),
        "sharded": steps(folder, {"shard_data": True}, BATCH, prepare=False),
        "sharded list": steps(folder, {"shard_data": True}, BATCH, prepare=False, opened=make_meta_dataset),
        "all, prepared": steps(folder, {}, BATCH, prepare=True),
        "all, split": steps(folder, {}, BATCH * RANKS, prepare=True, split_batches=True),
    }
    Path(folder, f"rank{rank}.json").write_text(json.dumps(seen))
    PartialState().destroy_process_group()  # or a thread of gloo ends the interpreter with SIGABRT, sometimes


def steps(
    folder: str,
    settings: dict[str, Any],
    batch: int,
    *,
    prepare: bool,
    opened: Any = open_meta_dataset,
    **more: Any,
) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**more))
    logger, messages = logging.getLogger("packhorse.samplers"), _Messages()
    logger.addHandler(messages)
    rows = opened(str(Path(folder, "meta.json")), **settings)
    sampler = LengthGroupedSampler(rows, batch_size=batch)
    logger.removeHandler(messages)
    keys = [(rows.key(index), sampler.lengths[index]) for index in range(len(rows))]
    loader = DataLoader(keys, batch_size=batch, sampler=sampler, collate_fn=list)  # type: ignore[arg-type]
    if prepare:
        loader = accelerator.prepare_data_loader(loader, device_placement=False)
    found = [list(map(list, rows)) for rows in loader]
    return {"steps": found, "warned": sum(SHARE_WARNING in text for text in messages.texts)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    import socket

    folder = tmp_path_factory.mktemp("accelerate")
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    rows = [{"messages": turns, "_text_tokens": 10 + number * 37 % 640} for number in range(ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "meta.json").write_text(json.dumps({"chat": {"file_name": str(folder / "rows.jsonl")}}))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        (folder / "port").write_text(str(free.getsockname()[1]))
    mp.spawn(rank_main, args=(str(folder),), nprocs=RANKS)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def delivered_keys(ranks: list[dict[str, Any]], how: str) -> list[str]:
    return [key for one in ranks for batch in one[how]["steps"] for key, _ in batch]


def test_a_prepared_loader_over_rows_that_are_sharded_already_loses_half_and_is_warned_of(
    ranks: list[dict[str, Any]],
) -> None:
    assert len(set(delivered_keys(ranks, "sharded, prepared"))) == ROWS // RANKS
    assert all(one["sharded, prepared"]["warned"] == 1 for one in ranks)
    assert all(one["sharded list"]["warned"] == 1 for one in ranks)


@pytest.mark.parametrize("how", ["sharded", "sharded list", "all, prepared", "all, split"])
def test_every_row_comes_once_if_rows_are_sharded_once(how: str, ranks: list[dict[str, Any]]) -> None:
    assert sorted(delivered_keys(ranks, how)) == sorted(f"chat/{number}" for number in range(ROWS))
    assert {len(one[how]["steps"]) for one in ranks} == {ROWS // RANKS // BATCH}


@pytest.mark.parametrize("how", ["all, prepared", "all, split"])
def test_rows_of_all_ranks_are_not_warned_of(how: str, ranks: list[dict[str, Any]]) -> None:
    assert not any(one[how]["warned"] for one in ranks)


@pytest.mark.parametrize("how", ["sharded", "all, split"])
def test_ranks_have_similar_lengths_in_each_step(how: str, ranks: list[dict[str, Any]]) -> None:
    for batches in zip(*(one[how]["steps"] for one in ranks), strict=True):
        lengths = [length for batch in batches for _, length in batch]
        assert max(lengths) - min(lengths) <= 2 * BATCH * RANKS * 10  # of 640
