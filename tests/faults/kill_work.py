"""The processes that are killed: ``python kill_work.py PROCESSOR``, driven by ``kill_rounds.py``.

One process imports everything and forks a child for each request (a line of JSON on its standard input), so
that a kill hits the work and not the imports. It tells the child's number, kills it where that is asked for,
and tells how it ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import packhorse
from packhorse.ledger import Ledger
from packhorse.types import Drop

LONGEST = 120.0
"""Seconds after which a process that nobody kills is taken for hanging."""
SAVE_EVERY = 3
TAKEN_BACK = 5


def command_line(request: dict[str, Any]) -> None:
    """The command line, as a user types it."""
    from packhorse.cli.app import main

    sys.argv = ["packhorse", *request["arguments"]]
    main()


# --- ledgers ---------------------------------------------------------------------------------------------


def operation(number: int, dataset: str = "data") -> list[Drop]:
    """What the operation of this number records: one entry, or three at once."""
    return [
        Drop(
            f"{dataset}/{3 * number + more}", "media", "broken_media", "torn " * 40, dataset=dataset, epoch=0
        )
        for more in range(3 if number % 10 == 9 else 1)
    ]


def taken_back(number: int) -> list[Drop]:
    """What the operation of this number takes back, and records once more (as a resumed run does)."""
    if number % 25 != 24:
        return []
    return [drop for earlier in range(number - TAKEN_BACK, number) for drop in operation(earlier)]


def write_ledger(request: dict[str, Any], dataset: str = "data") -> None:
    """Record what the operations say; each that is done is confirmed in a file of its own."""
    ledger = Ledger(request["ledger"])
    confirmed = os.open(f"{request['confirmed']}-{dataset}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for number in range(request["first"].get(dataset, 0), request["last"]):
        again = taken_back(number) if request["writers"] == 1 else []
        if again:
            ledger.roll_back(0, {drop.key for drop in again})
            ledger.record_all(again)
        drops = operation(number, dataset)
        if len(drops) == 1:
            ledger.record(drops[0])
        else:
            ledger.record_all(drops)
        os.write(confirmed, b"%d\n" % number)


def write_ledgers(request: dict[str, Any]) -> None:
    """One process, or several that write into the same file at the same time."""
    if request["writers"] == 1:
        write_ledger(request)
        return
    children = [forked(write_ledger, request, f"writer{number}") for number in range(request["writers"])]
    for child in children:
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise RuntimeError("a writer failed")


# --- training --------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Small enough for a step of a millisecond; pixels matter, so that a wrong image is noticed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedded = torch.nn.Embedding(512, 8)
        self.seen = torch.nn.Linear(1, 8)
        self.out = torch.nn.Linear(8, 512)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        hidden = self.embedded(batch["input_ids"])
        if "pixel_values" in batch:
            hidden = hidden + self.seen(batch["pixel_values"].float().mean().reshape(1))
        loss = torch.nn.functional.cross_entropy(
            self.out(hidden).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
        )
        return loss / 100

    def weights(self) -> list[list[float]]:
        return [parameter.detach().flatten().tolist() for parameter in self.parameters()]

    def set_weights(self, values: list[list[float]]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters(), values, strict=True):
                parameter.copy_(torch.tensor(value).reshape(parameter.shape))


def train(request: dict[str, Any]) -> None:
    """Train an epoch with checkpoints; goes on at the last one if there is one."""
    torch.set_num_threads(1)
    checkpoint, model, trained = Path(request["checkpoint"]), Model(), []
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = packhorse.load(request["meta"], request["processor"], model="unchecked", **request["settings"])
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        loader.load_state_dict(saved["state"])
        model.set_weights(saved["weights"])
        trained = saved["trained"]
    for step, batch in enumerate(loader, 1):
        trained += [loader.key(index) for index in batch.info.samples]
        optimiser.zero_grad()
        model(batch).backward()
        optimiser.step()
        if step % SAVE_EVERY == 0 and loader.remaining:
            told = {"state": loader.state_dict(), "weights": model.weights(), "trained": trained}
            save(checkpoint, told)
    assert loader.epoch_stats is not None
    account = loader.epoch_stats
    numbers = [account.rows, account.planned, account.delivered, account.lost]
    final = {"trained": trained, "weights": model.weights(), "account": numbers, "reasons": account.reasons}
    save(Path(request["final"]), final)
    loader.close()


def save(path: Path, content: Any) -> None:
    half = path.with_suffix(".half")
    half.write_text(json.dumps(content))
    half.replace(path)


# --- processes -------------------------------------------------------------------------------------------

JOBS: dict[str, Callable[[dict[str, Any]], None]] = {
    "command": command_line,
    "ledger": write_ledgers,
    "train": train,
}


def forked(work: Callable[..., None], *arguments: Any) -> int:
    """Do some work in a child; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work(*arguments)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 0
    except BaseException:  # noqa: BLE001 (the parent's stack must not run twice)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def child(request: dict[str, Any]) -> None:
    """The whole life of a child."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(request["environment"])
    JOBS[request["job"]](request)


def ended(pid: int, request: dict[str, Any]) -> dict[str, Any]:
    """Wait for a child, kill it at its moment; how it ended, and after how long."""
    started, delay = time.monotonic(), request["delay"]
    deadline = started + (LONGEST if delay is None else delay)
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        now = time.monotonic()
        if found:
            break
        if now >= deadline:
            # One that has just begun has no group of its own yet, and nobody in it.
            group = request["group"] and os.getpgid(pid) == pid
            (os.killpg if group else os.kill)(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            break
        time.sleep(min(0.001, deadline - now))
    return {"code": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - started}


def preload(processor: str) -> None:
    """All that the jobs import, so that children begin with their work."""
    import jinja2  # noqa: F401
    import pandas  # noqa: F401 (by pyarrow, if it is there)
    import rich.progress
    import rich.table  # noqa: F401
    import scipy.optimize  # noqa: F401
    import starlette.applications  # noqa: F401
    import uvicorn  # noqa: F401

    from packhorse.families.models import as_processor
    from packhorse.loader import planner as plans

    as_processor(processor)
    plans._CACHED_FROM = 1  # small plans are kept too: a kill may hit their writing


def requests() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    preload(sys.argv[1])
    tell({"ready": True})
    for request in requests():
        pid = forked(child, request)
        tell({"pid": pid})
        tell(ended(pid, request))


def tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
