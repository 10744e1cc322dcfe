"""Rounds of work in which processes are killed with SIGKILL at random moments.

After a kill there are only complete files; the next process continues, and the result equals that of an
undisturbed run bit for bit. ``tests/faults`` runs a few rounds of each kind, ``benchmarks/faults.py`` many.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from contract.samples import make_image
from count_samples import sidecars, write_meta, write_rows
from faults.kill_runner import KillTimes, ProcessResult, ProcessRunner, Tally, repeat_until_killed
from faults.kill_work import operation, rolled_back
from packhorse.count.sidecar import Sidecar
from packhorse.errors import PackhorseError
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm import PackPlan

PACK = 256
IMAGES = 8
MALFORMED, MISSING, LONG = 11, 25, 42
"""Rows that are not JSON, have a missing image, and are too long for a pack."""


def write_data(folder: Path, rows: int) -> Path:
    """Write a mixture of chats with and without images, some of them bad; return the meta file."""
    media = folder / "media"
    media.mkdir(parents=True)
    for number in range(IMAGES):
        make_image(56 + 7 * number, 60).save(media / f"{number}.png")
    examples: list[Any] = []
    for number in range(rows):
        question, answer = "why " * (number % 9 + 1), f"so {number} " * (number % 7 + 1)
        row: dict[str, Any] = {}
        if number % 5 == 0:
            question = "<image>" + question
            row["images"] = [f"{'gone' if number == MISSING else number % IMAGES}.png"]
        if number == LONG:
            answer = "so " * 500
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        examples.append({"messages": turns, **row})
    examples[MALFORMED] = json.dumps(examples[MALFORMED])[:40]
    write_rows(folder / "first.jsonl", examples[: rows // 2])
    write_rows(folder / "second.jsonl", examples[rows // 2 :])
    names = {name: {"file_name": f"{name}.jsonl", "media_dir": "media"} for name in ("first", "second")}
    return write_meta(folder, names)


def all_keys(rows: int) -> list[str]:
    half = rows // 2
    return [f"first/{n}" if n < half else f"second/{n - half}" for n in range(rows)]


def count_rounds(runner: ProcessRunner, rounds: int, seed: int = 0, rows: int = 400) -> Tally:
    """Kill ``packhorse count`` once or twice, then run it to the end."""
    tally, part = Tally(), 20
    meta = write_data(runner.folder / "count", rows)

    def count(delay: float | None = None) -> ProcessResult:
        options = ["--processor", runner.processor, "--num-workers", 1, "--part-rows", part, "--json"]
        return runner.command("count", meta, *options, delay=delay)

    kill_times = KillTimes(count().seconds, seed)
    expected = {path.name: path.read_bytes() for path in sidecars(meta.parent)}
    assert len(expected) == 2
    all_rows = _counted_rows(meta.parent)

    def play(number: int) -> int:
        for path in sidecars(meta.parent):
            path.unlink()
        kept = hits = 0
        for _ in range(1 + number % 2):
            hits += kill_times.record(count(kill_times.draw()))
            _compare_counts(tally, meta.parent, expected)
            now = kept_rows(meta.parent, part)
            tally.lost += max(0, kept - now)  # saved parts stay
            kept = now
        counted = json.loads(_json_of(count().output))["counted_rows"]
        tally.duplicates += max(0, counted + kept - rows)  # recounted although it was saved
        _compare_counts(tally, meta.parent, expected)
        tally.check(len(sidecars(meta.parent)) == len(expected), "a count file is missing")
        tally.check(not list(meta.parent.glob("*.parts")), "parts were left")
        tally.compare(_counted_rows(meta.parent), all_rows)
        return hits

    repeat_until_killed(rounds, play, tally)
    tally.left = runner.count_left_running()
    return tally


def kept_rows(folder: Path, part: int) -> int:
    """Return how many rows are counted and saved, in a count file or else in parts of ``part`` rows.

    A process that is killed after it wrote its count file, and before it removed the parts, leaves both.
    """
    kept = 0
    for data in folder.glob("*.jsonl"):
        whole = [len(Sidecar(path)) for path in sidecars(folder) if path.name.startswith(f"{data.name}.")]
        kept += max(whole, default=part * len(list(folder.glob(f"{data.name}.*.parts/*.arrow"))))
    return kept


def _json_of(output: str) -> str:
    return output[output.index("{") :]


def _compare_counts(tally: Tally, folder: Path, expected: Mapping[str, bytes]) -> None:
    """Check that count files equal those of an undisturbed run."""
    for path in sidecars(folder):
        tally.check(expected.get(path.name) == path.read_bytes(), f"{path.name} differs")


def _counted_rows(folder: Path) -> list[tuple[str, int, int]]:
    """Return file, number and length of every row of the count files."""
    rows = []
    for path in sidecars(folder):
        totals = Sidecar(path).columns().total.tolist()
        rows += [(path.name, number, total) for number, total in enumerate(totals)]
    return rows


def plan_rounds(runner: ProcessRunner, rounds: int, seed: int = 0, rows: int = 400) -> Tally:
    """Kill ``packhorse plan``, then run it to the end; every second time without counts."""
    tally = Tally()
    meta = write_data(runner.folder / "plan", rows)
    target = meta.with_suffix(".phplan")

    def plan(delay: float | None = None) -> ProcessResult:
        options = ["--processor", runner.processor, "--num-workers", 1, "--pack-size", PACK]
        return runner.command("plan", meta, *options, delay=delay)

    uncounted = KillTimes(plan().seconds, seed)
    expected, counts = target.read_bytes(), {path.name: path.read_bytes() for path in sidecars(meta.parent)}
    counted = KillTimes(plan().seconds, seed + 1)

    def play(number: int) -> int:
        target.unlink()
        shutil.rmtree(runner.cache, ignore_errors=True)
        for path in sidecars(meta.parent) if number % 2 else ():
            path.unlink()
        kill_times = uncounted if number % 2 else counted
        hit = kill_times.record(plan(kill_times.draw()))
        tally.check(not target.exists() or target.read_bytes() == expected, "the plan after the kill")
        _compare_counts(tally, meta.parent, counts)
        _open_plans(tally, runner.cache)
        plan()
        tally.check(target.read_bytes() == expected, "the plan in the end")
        tally.compare(_planned_rows(target), range(rows))
        return hit

    repeat_until_killed(rounds, play, tally)
    tally.left = runner.count_left_running()
    return tally


def _planned_rows(path: Path) -> list[int]:
    """Return every row of a plan, in a pack or dropped."""
    plan = PackPlan.load(path)
    return [*plan.indices.tolist(), *plan.dropped.tolist()]


def _open_plans(tally: Tally, folder: Path) -> None:
    """Check that all plans of a cache can be opened."""
    for path in folder.rglob("*.phplan"):
        tally.check(not _is_damaged(path), f"{path.name} in the cache")


def _is_damaged(path: Path) -> bool:
    try:
        PackPlan.load(path)
    except PackhorseError:
        return True
    return False


def view_rounds(runner: ProcessRunner, rounds: int, seed: int = 0, rows: int = 120) -> Tally:
    """Kill ``packhorse view`` while it starts or serves pages; a new server shows the same pages.

    Every second time it gets the meta file, which it counts and plans.
    """
    tally, draw = Tally(), random.Random(seed)
    meta = write_data(runner.folder / "view", rows)
    plan = meta.with_suffix(".phplan")
    runner.command("plan", meta, "--processor", runner.processor, "--pack-size", PACK, "--num-workers", 1)
    planned, counts = plan.read_bytes(), {path.name: path.read_bytes() for path in sidecars(meta.parent)}
    expected, took = _pages(runner, [plan])

    def play(number: int) -> int:
        for path in sidecars(meta.parent) if number % 2 else ():
            path.unlink()
        source: list[object] = [meta, "--processor", runner.processor, "--pack-size", PACK]
        arguments = source if number % 2 else [plan]
        delay = draw.uniform(0, took)
        runner.start("command", delay=delay, arguments=["view", *map(str, arguments), "--port", "0"])
        _load_until_killed(runner, draw, delay)
        hit = runner.wait().killed
        tally.check(plan.read_bytes() == planned, "the plan that was shown")
        _compare_counts(tally, meta.parent, counts)
        _open_plans(tally, runner.cache)
        tally.compare(_pages(runner, arguments)[0].items(), expected.items())
        tally.compare(_planned_rows(plan), range(rows))
        return hit

    repeat_until_killed(rounds, play, tally)
    tally.left = runner.count_left_running()
    return tally


_ADDRESSES = ("", "packs", "pack/0", "pack/1", "row/0", "row/5", "rows", "steps", "report.json", "media/0/0")


def _pages(runner: ProcessRunner, arguments: Sequence[object]) -> tuple[dict[str, bytes], float]:
    """Return the pages of ``packhorse view``, and how many seconds it takes to load them."""
    started = time.monotonic()
    pid = runner.start("command", arguments=["view", *map(str, arguments), "--port", "0"])
    address = _address(runner, time.monotonic() + 60)
    assert address is not None, runner.output()
    pages = {name: _page(address + name) for name in _ADDRESSES}
    took = time.monotonic() - started
    os.kill(pid, signal.SIGINT)
    result = runner.wait()
    assert result.code == 0, result.output
    return pages, took


def _page(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=30) as response:
        body: bytes = response.read()
    return body


def _address(runner: ProcessRunner, end: float) -> str | None:
    """Return the address of the running server; None if it is not printed in time."""
    while time.monotonic() < end:
        addresses = re.findall(r"http://127\.0\.0\.1:\d+/", runner.output())
        if addresses:
            return str(addresses[0])
        time.sleep(0.005)
    return None


def _load_until_killed(runner: ProcessRunner, draw: random.Random, delay: float) -> None:
    address = _address(runner, time.monotonic() + delay)
    with contextlib.suppress(OSError, http.client.HTTPException):  # the server was killed
        while address is not None:
            _page(address + draw.choice(_ADDRESSES))


def ledger_rounds(runner: ProcessRunner, rounds: int, seed: int = 0, last: int = 600) -> Tally:
    """Kill a process (or two at once) that writes a ledger, several times; confirmed entries stay."""
    tally, folder = Tally(), runner.folder / "ledger"
    folder.mkdir()
    kill_times = {
        writers: KillTimes(
            runner.run("ledger", **_ledger_request(folder / f"whole{writers}", writers, {}, last)).seconds,
            seed,
        )
        for writers in (1, 2)
    }

    def play(number: int) -> int:
        writers, home, hits = 1 + number % 2, folder / f"round{number}", 0
        for _ in range(1 + number % 3):
            request = _ledger_request(home, writers, _count_confirmed(home), last)
            result = runner.run("ledger", delay=kill_times[writers].draw(), group=True, **request)
            hits += result.killed
            _check_confirmed(tally, home, writers)
        runner.run("ledger", **_ledger_request(home, writers, _count_confirmed(home), last))
        tally.compare(*_entries(home, writers, last))
        return hits

    repeat_until_killed(rounds, play, tally)
    tally.left = runner.count_left_running()
    return tally


def _ledger_request(home: Path, writers: int, first: Mapping[str, int], last: int) -> dict[str, Any]:
    home.mkdir(exist_ok=True)
    ledger, confirmed = str(home / "ledger.jsonl"), str(home / "confirmed")
    return {"ledger": ledger, "confirmed": confirmed, "writers": writers, "first": dict(first), "last": last}


def _count_confirmed(home: Path) -> dict[str, int]:
    """Return the number of confirmed operations of each writer."""
    paths = home.glob("confirmed-*")
    return {path.name.partition("-")[2]: len(path.read_bytes().splitlines()) for path in paths}


def _check_confirmed(tally: Tally, home: Path, writers: int) -> None:
    """Check that confirmed entries exist; the operation that was killed may be partial."""
    path = home / "ledger.jsonl"
    entries = Counter(Ledger.load(path)) if path.exists() and path.stat().st_size else Counter()
    for dataset, done in _count_confirmed(home).items():
        in_progress = set(rolled_back(done)) if writers == 1 else set()
        expected = {drop for number in range(done) for drop in operation(number, dataset)}
        tally.lost += len(expected - in_progress - set(entries))
        allowed = expected | set(operation(done, dataset))
        tally.duplicates += len({drop for drop in entries if drop.dataset == dataset} - allowed)
    tally.duplicates += sum(count - 1 for count in entries.values())


def _entries(home: Path, writers: int, last: int) -> tuple[list[Any], list[Any]]:
    """Return the actual and the expected entries."""
    names = ["data"] if writers == 1 else [f"writer{n}" for n in range(writers)]
    expected = [drop for name in names for number in range(last) for drop in operation(number, name)]
    return list(Ledger.load(home / "ledger.jsonl")), expected


def train_rounds(runner: ProcessRunner, rounds: int, seed: int = 0, rows: int = 160, most: int = 4) -> Tally:
    """Kill a training run with checkpoints at most ``most`` times and resume it until its epoch is over."""
    tally = Tally()
    meta = write_data(runner.folder / "train", rows)
    whole = _request(runner, meta, "whole", num_workers=1)
    runner.run("train", **whole)  # counts the rows
    expected = json.loads(Path(whole["final"]).read_text())
    kill_times = KillTimes(
        runner.run("train", **_request(runner, meta, "counted", num_workers=1)).seconds, seed
    )

    def play(number: int) -> int:
        request, hits = _request(runner, meta, f"round{number}", num_workers=number % 3), 0
        while hits < most and runner.run("train", delay=kill_times.draw(), **request).killed:
            hits += 1
        if not Path(request["final"]).exists():
            runner.run("train", **request)
        final = json.loads(Path(request["final"]).read_text())
        ledger = Ledger.load(Path(request["settings"]["ledger_dir"]) / "rank-00000.jsonl")
        tally.compare(final["trained"] + [drop.key for drop in ledger], all_keys(rows))
        for what in ("weights", "totals", "reasons"):
            values = "" if what == "weights" else f": {final[what]} for {expected[what]}"
            tally.check(final[what] == expected[what], f"{what} with {number % 3} workers{values}")
        return hits

    repeat_until_killed(rounds, play, tally)
    tally.left = runner.count_left_running()
    return tally


def _request(runner: ProcessRunner, meta: Path, name: str, num_workers: int) -> dict[str, Any]:
    home = runner.folder / "train" / name
    home.mkdir()
    settings: dict[str, Any] = {
        "pack_size": PACK,
        "max_bad_share": 0.1,
        "num_workers": num_workers,
        "prefetch_factor": 2,
    }
    settings |= {"ledger_dir": str(home / "ledger"), "cache_dir": str(home / "plans")}
    return {
        "meta": str(meta),
        "processor": runner.processor,
        "settings": settings,
        "checkpoint": str(home / "checkpoint.json"),
        "final": str(home / "final.json"),
    }


ROUNDS: dict[str, Callable[..., Tally]] = {
    "count": count_rounds,
    "plan": plan_rounds,
    "view": view_rounds,
    "ledger": ledger_rounds,
    "train": train_rounds,
}
