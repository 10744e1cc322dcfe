"""What the processes of the tests of opening run: ``python opening_work.py runs.json``, see loader_work."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from copy import deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import packhorse
from contract.processors import processor
from distributed.loader_work import JOBS, PROCESSOR, chats, main
from packhorse.count import counting
from packhorse.count.parts import PartCounter, PartResult, PartTask
from packhorse.datasets import make_meta_dataset
from packhorse.distributed import Collectives, Rendezvous, agree_on_token
from packhorse.loader import startup

BAD_RANK = 1


class Rows(Sequence[Any]):
    """Examples of which one does something to the process that reads it, on one rank."""

    def __init__(self, rank: int, act: Any, number: int = 40) -> None:
        self.rows, self.act, self.bad = chats(number, 4), act, rank == BAD_RANK

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if self.bad and index == len(self) // 2:  # in the middle of its share
            self.act()
        return self.rows[index]


def wrong_code() -> None:
    raise NameError("name 'columns' is not defined")


def interrupt() -> None:
    raise KeyboardInterrupt


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def open_badly(run: dict[str, Any], rank: int) -> dict[str, Any]:
    """Build a loader with which one rank has a problem; return what this rank raises, and when."""
    data: Any = run["meta"]
    settings: dict[str, Any] = {"model": "unchecked", "pack_size": 128}
    how, bad, used = run["how"], rank == BAD_RANK, processor(PROCESSOR)
    if how == "file":  # a folder that is not mounted on one machine
        folder = Path(run["folder"], f"node{rank}")
        folder.mkdir()
        if not bad:
            folder.joinpath("data").symlink_to(Path(run["meta"]).parent)
        os.chdir(folder)
        data = "data/meta.json"
    elif how == "model":
        settings["model"] = object() if bad else "unchecked"
    elif how == "processor" and bad:
        used = deepcopy(used)
        used.chat_template = used.chat_template.replace("assistant", "helper")
    elif how == "counting":
        data = Rows(rank, wrong_code)
    elif how == "planning":
        data = [row for r in range(run["world"]) for row in chats(1, 400 if r == BAD_RANK else 3)]
        settings |= {"shard_data": True, "on_overlong": "raise"}
    elif how == "interrupted":
        data = Rows(rank, interrupt)
    elif how == "killed":
        data = Rows(rank, die)
    started = time.monotonic()
    try:
        packhorse.load(data, used, **settings)
    except BaseException as error:  # noqa: BLE001 (whatever it is, the test wants to know)
        seconds = time.monotonic() - started
        return {"class": type(error).__name__, "message": str(error), "seconds": seconds}
    return {"class": None}


def count_slowly(run: dict[str, Any], rank: int) -> dict[str, Any]:
    """Build a loader whose counting takes longer than the process group's timeout."""
    counted: list[list[int]] = []
    count = PartCounter.__call__

    def slow(self: PartCounter, task: PartTask) -> PartResult:
        if rank in run["slow"]:
            time.sleep(run["seconds"])
        result = count(self, task)
        counted.append([task.first, task.stop])
        if rank == run.get("victim") and len(counted) == run["dies_at"]:
            die()
        return result

    PartCounter.__call__ = slow  # type: ignore[method-assign]
    counting.PART_ROWS = run["part_rows"]  # type: ignore[attr-defined]
    startup._MAX_ROWS_WITHOUT_PROCESSES = run.get("in_this_process", startup._MAX_ROWS_WITHOUT_PROCESSES)
    meta = run["meta"]
    if run.get("own_folders"):  # machines without a shared file system
        meta = meta.replace("node0", f"node{rank}")
    started = time.monotonic()
    try:
        loader = packhorse.load(
            meta, processor(PROCESSOR), model="unchecked", pack_size=128, **run["settings"]
        )
    except packhorse.errors.PackhorseError as error:
        return {"class": type(error).__name__, "message": str(error), "counted": counted}
    return {
        "class": None,
        "counted": counted,
        "total": loader.counts.total.tolist(),
        "keys": [loader.key(index) for index in range(len(loader.dataset))],
        "seconds": time.monotonic() - started,
    }


def on_a_mesh(run: dict[str, Any], rank: int) -> dict[str, Any]:
    """What this rank gets where two ranks share a model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    world = packhorse.World.from_mesh(mesh, "dp")
    rows = make_meta_dataset(run["meta"], shard_data=True, rank=world.rank, world_size=world.size)
    found: dict[str, Any] = {
        "world": [world.rank, world.size],
        "part": [(one := packhorse.World.from_mesh(mesh["tp"])).rank, one.size],
        "both": [(one := packhorse.World.from_mesh(both, ("dp_replicate", "dp_shard"))).rank, one.size],
        "turned": [(one := packhorse.World.from_mesh(both, ("dp_shard", "dp_replicate"))).rank, one.size],
        "rows": [rows.key(index) for index in range(len(rows))],
    }
    for shard_data in (False, True):
        loader = packhorse.load(
            run["meta"],
            processor(PROCESSOR),
            model="unchecked",
            world=world,
            group=mesh.get_group("dp"),
            pack_size=128,
            shard_data=shard_data,
        )
        steps = [[loader.key(index) for index in batch.info.samples] for batch in loader]
        assert loader.epoch_stats is not None
        found[f"shard_data={shard_data}"] = {"steps": steps, "delivered": loader.epoch_stats.delivered}
    return found


def in_another_order(run: dict[str, Any], rank: int) -> dict[str, Any]:
    """What a rank gets whose place in the world is not its place in the process group."""
    world = packhorse.World([1, 3, 0, 2][rank], 4)
    ranks = Collectives(world)
    rows = [row for words in range(1, 41) for row in chats(1, words)]
    loader = packhorse.load(rows, processor(PROCESSOR), model="unchecked", pack_size=256, world=world)
    samples = [index for batch in loader for index in batch.info.samples]
    assert loader.epoch_stats is not None
    found = {
        "gathered": ranks.gather(world.rank),
        "broadcast": ranks.broadcast("name the rank", lambda: world.rank),
        "counts": loader.counts.total.tolist(),
        "samples": samples,
        "delivered": loader.epoch_stats.delivered,
    }
    try:
        Collectives(packhorse.World(rank // 2, 4)).gather(None)
    except packhorse.errors.ConfigError as error:
        found["duplicates"] = [error.setting, error.value]
    try:
        ranks.run_on_all_ranks("read a row", partial(read_badly, world.rank))
    except packhorse.errors.BadSample as error:
        found["bad"] = [error.reason, error.key, error.stage, error.detail]
        found["message"] = str(error)
    try:
        ranks.run_on_all_ranks("choose datasets", partial(choose_badly, world.rank))
    except packhorse.errors.ConfigError as error:
        found["wrong"] = [error.setting, error.value]
    return found


def choose_badly(rank: int) -> None:
    if rank == 1:
        raise packhorse.errors.ConfigError.of("dataset_names", ["coco", "maps"], "expected others")


def read_badly(rank: int) -> None:
    if rank == 1:
        raise packhorse.errors.BadSample("9,000 tokens", reason="too_long", key="coco/3", stage="encode")


def two_groups_in_turn(run: dict[str, Any], rank: int) -> list[Any]:
    """What a rank finds in a store, which outlives both process groups that meet there in turn."""
    dist.destroy_process_group()
    store = dist.FileStore(f"{run['folder']}/store", run["world"])  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=10))
    world = packhorse.World(rank, run["world"])
    found = []
    for number in range(2):
        # gloo finds its own keys of an earlier group, too
        backend = dist.PrefixStore(str(number), store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=backend, rank=rank, world_size=world.size)
        group = dist.group.WORLD
        assert group is not None
        rendezvous = Rendezvous(store, world, agree_on_token(group))
        before = [rendezvous.has_message("task"), rendezvous.has_moved_on(0), rendezvous.has_moved_on(1)]
        dist.barrier()  # so that the others have looked, too
        rendezvous.send("task", b"")
        rendezvous.meet()
        found.append([*before, rendezvous.meetings])
        dist.barrier()
        if not number:
            dist.destroy_process_group()
    return found


def unreadable_at_the_end(run: dict[str, Any], rank: int) -> dict[str, Any]:
    """What a rank raises at the end of an epoch if rank 0 cannot read a ledger file, and what comes after."""
    rows, ledgers = chats(24, 20), Path(run["folder"], "ledger")
    loader = packhorse.load(rows, processor(PROCESSOR), model="unchecked", pack_size=128, ledger_dir=ledgers)
    blocked = ledgers / "rank-00007.jsonl"
    if rank == 0:
        blocked.mkdir(parents=True)
    dist.barrier()
    started, found = time.monotonic(), {}
    try:
        for _ in loader:
            pass
    except OSError as error:
        found = {"class": type(error).__name__, "message": str(error), "remaining": loader.remaining}
        found["seconds"] = time.monotonic() - started
    dist.barrier()
    if rank == 0:
        blocked.rmdir()
    dist.barrier()
    found["steps"] = sum(1 for _ in loader)
    assert loader.epoch_stats is not None
    return {**found, "delivered": loader.epoch_stats.delivered}


JOBS |= {
    "unreadable_at_the_end": unreadable_at_the_end,
    "two_groups_in_turn": two_groups_in_turn,
    "open_badly": open_badly,
    "count_slowly": count_slowly,
    "on_a_mesh": on_a_mesh,
    "in_another_order": in_another_order,
}

if __name__ == "__main__":
    main()
