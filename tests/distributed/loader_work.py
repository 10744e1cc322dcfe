"""What the processes of the loader's tests run: ``python loader_work.py runs.json``.

One process imports everything and forks the ranks of each run, one run after the other. As a launcher of
training jobs does, it ends all ranks of a run when one of them dies. What a rank finds goes into a file.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import packhorse
from contract.processors import processor
from loader_samples import mixed_rows, texts
from packhorse.errors import PackhorseError
from packhorse.loader import measured_cost
from packhorse.loader.state import describe_state

PROCESSOR = "qwen2_vl"


def build_loader(run: dict[str, Any], **changes: Any) -> packhorse.Loader:
    """The loader of a run, in this process's place of the process group."""
    return packhorse.load(
        run["meta"], processor(PROCESSOR), **{"model": "unchecked", **run["settings"], **changes}
    )


def epoch(run: dict[str, Any], rank: int, **changes: Any) -> dict[str, Any]:
    """Deliver whole epochs."""
    loader = build_loader(run, **changes)
    found: dict[str, Any] = {
        "plan": loader.plan_key,
        "planned": [loader.key(int(index)) for index in loader.plan.indices],
        "length": len(loader),
        "rows": [loader.key(index) for index in range(len(loader.dataset))],
        "epochs": [],
        "media": [],
    }
    for number in range(run.get("epochs", 1)):
        steps = []
        for batch in loader:
            steps.append([loader.key(index) for index in batch.info.samples])
            found["media"].append(sorted(name for name in batch if "pixel" in name or "grid" in name))
        assert loader.epoch == number
        found["epochs"].append(steps)
        stats = loader.epoch_stats
        assert stats is not None
        found["stats"] = [stats.rows, stats.planned, stats.delivered, stats.lost, stats.reasons]
    loader.close()
    return found


def load_with_other_settings(run: dict[str, Any], rank: int) -> list[list[str]]:
    """Return the error of each rank if the last one has other settings, and its plan when alone."""
    last = dist.get_world_size() - 1
    errors = []
    cases: list[dict[str, Any]] = [{"pack_size": 200}, {"seed": 3}]
    cases += [{"batch_size": 2}, {"gradient_accumulation_steps": 2}, {"ledger_dir": None}]
    for changes in cases:
        own = changes if rank == last else {}
        plan = build_loader(run, **own, world=packhorse.World()).plan_key
        try:
            build_loader(run, **own)
        except PackhorseError as error:
            errors.append([str(error), plan])
    return errors


def everything(run: dict[str, Any], rank: int) -> dict[str, Any]:
    """All that one set of processes can show."""
    return {
        "scheduled": epoch(run, rank),
        "sharded": epoch(run, rank, shard_data=True, ledger_dir=f"{run['folder']}/sharded"),
        "rejected": load_with_other_settings(run, rank),
        "too few": too_few(run, rank),
        "uneven": uneven(run, rank),
        "torn": torn(run, rank),
        "mixed": mixed_states(run, rank),
    }


def chats(number: int, words: int) -> list[dict[str, Any]]:
    turns = [("user", "why"), ("assistant", "so " * words)]
    content = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
    return [{"conversation": content}] * number


def uneven(run: dict[str, Any], rank: int) -> dict[str, Any]:
    """Shards of which the first has long rows only: stopped after the natural end of the others' steps."""
    size = dist.get_world_size()
    rows = [
        row
        for pair in zip(*(chats(20, 60 if r == 0 else 4) for r in range(size)), strict=True)
        for row in pair
    ]
    settings: dict[str, Any] = {"shard_data": True, "pack_size": 256}
    seen: list[int] = []
    loader = packhorse.load(rows, processor(PROCESSOR), model="unchecked", **settings)
    for batch in loader:
        seen += batch.info.samples
        if loader.remaining == 2:
            break
    again = packhorse.load(rows, processor(PROCESSOR), model="unchecked", **settings)
    again.load_state_dict(loader.state_dict())
    left = 0
    for batch in again:
        seen += batch.info.samples
        left += 1
    return {"steps": len(loader), "left": left, "seen": sorted(seen), "rows": len(loader.dataset)}


def mixed_states(run: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the errors of ranks that load different states, as after a kill between two writes."""
    last = dist.get_world_size() - 1
    started = time.monotonic()
    found: dict[str, Any] = {}
    for name, sharded in (("", False), ("sharded ", True)):
        settings = {"num_workers": 0, "ledger_dir": f"{run['folder']}/mixed{sharded}", "shard_data": sharded}
        states = []
        loader = build_loader(run, **settings)
        for _ in loader:
            states.append(loader.state_dict())
            if len(states) == 2:
                break
        found[f"{name}steps"] = error_of_loading(build_loader(run, **settings), states[rank == last])
        if not sharded:
            found["state"] = states[1]
            found["digest"] = describe_state(states[1], own_rows=False).partition("digest ")[2][:-1]
            found["nonsense"] = error_of_loading(build_loader(run, **settings), states[1] if rank else None)
            found["not rejected"] = error_of_loading(build_loader(run, **settings), states[1])
            continue
        shards: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shards, states[1])
        swapped = shards[last if rank == 0 else rank]
        found["other shard"] = error_of_loading(build_loader(run, **settings), swapped)
    return {**found, "seconds": time.monotonic() - started}


def error_of_loading(loader: packhorse.Loader, state: Any) -> str:
    try:
        loader.load_state_dict(state)
    except PackhorseError as error:
        return str(error)
    return "not rejected"


def torn(run: dict[str, Any], rank: int) -> dict[str, Any]:
    """A ledger of which a crash has left half a line, and one of an earlier rank likewise."""
    folder = Path(run["folder"], "torn")
    folder.mkdir(exist_ok=True)
    for number in (rank, 17):
        (folder / f"rank-{number:05d}.jsonl").write_text('{"key": "half')
    loader = packhorse.load(
        chats(12, 5), processor(PROCESSOR), model="unchecked", ledger_dir=str(folder), pack_size=128
    )
    for _ in loader:
        pass
    assert loader.epoch_stats is not None
    return {"delivered": loader.epoch_stats.delivered, "reasons": loader.epoch_stats.reasons}


def too_few(run: dict[str, Any], rank: int) -> str:
    """A shard for each rank, of fewer rows than there are ranks."""
    turns = [("user", "a"), ("assistant", "b")]
    content = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
    try:
        packhorse.load([{"conversation": content}], processor(PROCESSOR), model="unchecked", shard_data=True)
    except PackhorseError as error:
        return str(error)
    return "not rejected"


def train(run: dict[str, Any], rank: int) -> dict[str, Any]:
    """Use batches, save every few steps how far all ranks have come, and die if the run says so."""
    loader = build_loader(run)
    checkpoint = Path(run["checkpoint"])
    trained: list[str] = []
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        loader.load_state_dict(saved["state"])
        trained = saved["ids"]
    fresh: list[str] = []
    after: list[str] = []
    for step, batch in enumerate(loader, 1):
        fresh += [loader.key(index) for index in batch.info.samples]
        dist.barrier()  # as an optimiser's step: no rank is ahead of the others
        if step % run["save_every"] == 0:
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, fresh)
            trained = trained + [key for part in parts for key in part]
            after, fresh = after + fresh, []
            if rank == 0:
                save(checkpoint, {"state": loader.state_dict(), "ids": trained, "step": step})
        if rank == run.get("victim") and step == run["dies_at"]:
            os.kill(os.getpid(), signal.SIGKILL)
    loader.close()
    assert loader.epoch_stats is not None
    return {
        "after": after + fresh,
        "planned": [loader.key(int(index)) for index in loader.plan.indices],
        "delivered": loader.epoch_stats.delivered,
        "reasons": loader.epoch_stats.reasons,
    }


def save(path: Path, content: Any) -> None:
    half = path.with_suffix(".half")
    half.write_text(json.dumps(content))
    half.replace(path)


def open_alone(run: dict[str, Any], rank: int) -> dict[str, Any]:
    """Open the data in a process that knows no other, at the same moment as others do."""
    time.sleep(max(0.0, run["start"] - time.time()))
    loader = build_loader(run, world=packhorse.World(rank, run["world"]))
    return {"plan": loader.plan_key, "samples": [i for batch in loader for i in batch.info.samples]}


def measure(run: dict[str, Any], rank: int) -> dict[str, Any]:
    """Measure two epochs: with a slower last rank, and with ranks that wait for each other in every step."""
    found = {}
    now = torch.zeros(1, dtype=torch.float64)  # a clock, so that steps take exactly as long as they say
    measured_cost._mark = lambda: float(now)
    cases: dict[str, Any] = {
        "slower": (mixed_rows(160), "pack", 2e-5, 4e-3),
        "waiting": (texts(160), "pad", 3e-4, 0.0),
    }
    for name, (rows, mode, per_token, per_item) in cases.items():
        loader = packhorse.load(
            rows,
            processor(PROCESSOR),
            model="unchecked",
            mode=mode,
            pack_size=256,
            measure_cost=True,
            num_workers=0,
        )
        slower = 2.0 if name == "slower" and rank == dist.get_world_size() - 1 else 1.0
        for batch in loader:
            items = sum(batch.info.num_images) + sum(batch.info.num_videos)
            took = torch.tensor([slower * (per_token * batch.info.tokens + per_item * items)]).double()
            if name == "waiting":  # for the slowest rank
                dist.all_reduce(took, dist.ReduceOp.MAX)
            now += took
        state = loader.state_dict()
        features, _ = loader.measured_costs()
        loader.set_epoch(1)
        right = per_token * features[:, 0] + per_item * features[:, loader.cost_weights.names.index("item")]
        found[name] = {
            "state": state,
            "weights": loader.cost_weights.to_dict(),
            "correlation": float(np.corrcoef(right, features @ loader.cost_weights.values())[0, 1]),
            "straggler": loader.straggler_ratio(),
            "keys": [loader.key(index) for batch in loader for index in batch.info.samples],
        }
    return found


JOBS: dict[str, Callable[[dict[str, Any], int], Any]] = {
    "everything": everything,
    "train": train,
    "measure": measure,
    "open_alone": open_alone,
}


def rank_main(run: dict[str, Any], rank: int) -> None:
    """One rank, from the beginning to the end."""
    torch.set_num_threads(1)
    alone = run["job"] == "open_alone"
    if not alone:
        meeting = f"file://{run['folder']}/meeting"
        timeout = timedelta(seconds=run.get("timeout", 60))
        dist.init_process_group(
            "gloo", init_method=meeting, rank=rank, world_size=run["world"], timeout=timeout
        )
    found = JOBS[run["job"]](run, rank)
    Path(run["folder"], f"rank{rank}.json").write_text(json.dumps(found))
    if not alone and not run.get("others_go_on"):
        dist.barrier()
        dist.destroy_process_group()


def start(run: dict[str, Any], rank: int) -> int:
    """Fork a rank; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        rank_main(run, rank)
        code = 0
    except BaseException:  # noqa: BLE001 (the parent's stack must not run twice)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run_ranks(run: dict[str, Any]) -> list[int]:
    """The exit codes of the ranks of a run, by rank; when one dies, the others are ended by default."""
    Path(run["folder"]).mkdir(parents=True, exist_ok=True)
    run["start"] = time.time() + 0.5
    ranks = {start(run, rank): rank for rank in range(run["world"])}
    codes: dict[int, int] = {}
    while ranks:
        pid, status = os.wait()
        if pid not in ranks:
            continue
        code = os.waitstatus_to_exitcode(status)
        codes[ranks.pop(pid)] = code
        if code and not run.get("others_go_on"):
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return [codes[rank] for rank in range(run["world"])]


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(process)d %(name)s %(message)s")
    processor(PROCESSOR)  # once, before forking
    file = Path(sys.argv[1])
    for one in json.loads(file.read_text()):
        Path(one["folder"]).mkdir(parents=True, exist_ok=True)
        Path(one["folder"], "codes.json").write_text(json.dumps(run_ranks(one)))


if __name__ == "__main__":
    main()
