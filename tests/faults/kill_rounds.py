"""Rounds of work, each killed with SIGKILL at moments drawn from the time that it takes undisturbed.

After a kill nothing but whole files may be seen under their names; the next process goes on, and what comes
out in the end is, to the bit, what comes out of a run that nobody has disturbed. ``tests/faults`` runs a few
rounds of each kind, ``benchmarks/faults.py`` many.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from contract.samples import make_image
from count_samples import sidecars, write_meta, write_rows
from faults.kill_desk import Desk, Ended, Moments, Tally, until_hit
from faults.kill_work import operation, taken_back
from packhorse.count.sidecar import Sidecar
from packhorse.errors import PackhorseError
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm import PackPlan

PACK = 256
PICTURES = 8
MALFORMED, MISSING, LONG = 11, 25, 42
"""Rows that are not JSON, have no image where one should be, and are too long for a pack."""


def write_data(folder: Path, rows: int) -> Path:
    """A mixture of chats and chats about images, some of them bad; returns the meta file."""
    media = folder / "media"
    media.mkdir(parents=True)
    for number in range(PICTURES):
        make_image(56 + 7 * number, 60).save(media / f"{number}.png")
    made: list[Any] = []
    for number in range(rows):
        question, answer = "why " * (number % 9 + 1), f"so {number} " * (number % 7 + 1)
        row: dict[str, Any] = {}
        if number % 5 == 0:
            question = "<image>" + question
            row["images"] = [f"{'gone' if number == MISSING else number % PICTURES}.png"]
        if number == LONG:
            answer = "so " * 500
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        made.append({"messages": turns, **row})
    made[MALFORMED] = json.dumps(made[MALFORMED])[:40]
    write_rows(folder / "first.jsonl", made[: rows // 2])
    write_rows(folder / "second.jsonl", made[rows // 2 :])
    names = {name: {"file_name": f"{name}.jsonl", "media_dir": "media"} for name in ("first", "second")}
    return write_meta(folder, names)


def every_key(rows: int) -> list[str]:
    half = rows // 2
    return [f"first/{n}" if n < half else f"second/{n - half}" for n in range(rows)]


def count_rounds(desk: Desk, rounds: int, seed: int = 0, rows: int = 400) -> Tally:
    """``packhorse count``, killed once or twice, then run to its end."""
    tally, part = Tally(), 20
    meta = write_data(desk.folder / "count", rows)

    def count(delay: float | None = None) -> Ended:
        options = ["--processor", desk.processor, "--num-workers", 1, "--part-rows", part, "--json"]
        return desk.command("count", meta, *options, delay=delay)

    moments = Moments(count().seconds, seed)
    expected = {path.name: path.read_bytes() for path in sidecars(meta.parent)}
    assert len(expected) == 2
    all_rows = _counted_rows(meta.parent)

    def play(number: int) -> int:
        for path in sidecars(meta.parent):
            path.unlink()
        kept = hits = 0
        for _ in range(1 + number % 2):
            hits += moments.saw(count(moments.drawn()))
            _compare_counts(tally, meta.parent, expected)
            now = kept_rows(meta.parent, part)
            tally.lost += max(0, kept - now)  # what was kept stays
            kept = now
        counted = json.loads(_json_of(count().written))["counted_rows"]
        tally.doubled += max(0, counted + kept - rows)  # counted once more though it was there
        _compare_counts(tally, meta.parent, expected)
        tally.whole(len(sidecars(meta.parent)) == len(expected), "a count file is missing")
        tally.whole(not list(meta.parent.glob("*.parts")), "parts were left")
        tally.compare(_counted_rows(meta.parent), all_rows)
        return hits

    until_hit(rounds, play, tally)
    tally.left = desk.left_over()
    return tally


def kept_rows(folder: Path, part: int) -> int:
    """How many rows were counted and kept: in a count file, or else in parts of so many rows.

    A process that is killed when its count file is there, and before it has removed the parts, leaves both.
    """
    kept = 0
    for data in folder.glob("*.jsonl"):
        whole = [len(Sidecar(path)) for path in sidecars(folder) if path.name.startswith(f"{data.name}.")]
        kept += max(whole, default=part * len(list(folder.glob(f"{data.name}.*.parts/*.arrow"))))
    return kept


def _json_of(written: str) -> str:
    return written[written.index("{") :]


def _compare_counts(tally: Tally, folder: Path, expected: Mapping[str, bytes]) -> None:
    """Count files have to be, to the byte, those of an undisturbed run."""
    for path in sidecars(folder):
        tally.whole(expected.get(path.name) == path.read_bytes(), f"{path.name} differs")


def _counted_rows(folder: Path) -> list[tuple[str, int, int]]:
    """Every row of the count files: its file, number and length."""
    found = []
    for path in sidecars(folder):
        totals = Sidecar(path).columns().total.tolist()
        found += [(path.name, number, total) for number, total in enumerate(totals)]
    return found


def plan_rounds(desk: Desk, rounds: int, seed: int = 0, rows: int = 400) -> Tally:
    """``packhorse plan``, killed, then run to its end; every second time rows have to be counted first."""
    tally = Tally()
    meta = write_data(desk.folder / "plan", rows)
    target = meta.with_suffix(".phplan")

    def plan(delay: float | None = None) -> Ended:
        options = ["--processor", desk.processor, "--num-workers", 1, "--pack-size", PACK, "--no-estimates"]
        return desk.command("plan", meta, *options, delay=delay)

    uncounted = Moments(plan().seconds, seed)
    expected, counts = target.read_bytes(), {path.name: path.read_bytes() for path in sidecars(meta.parent)}
    counted = Moments(plan().seconds, seed + 1)

    def play(number: int) -> int:
        target.unlink()
        shutil.rmtree(desk.cache, ignore_errors=True)
        for path in sidecars(meta.parent) if number % 2 else ():
            path.unlink()
        moments = uncounted if number % 2 else counted
        hit = moments.saw(plan(moments.drawn()))
        tally.whole(not target.exists() or target.read_bytes() == expected, "the plan after the kill")
        _compare_counts(tally, meta.parent, counts)
        _open_plans(tally, desk.cache)
        plan()
        tally.whole(target.read_bytes() == expected, "the plan in the end")
        tally.compare(_planned_rows(target), range(rows))
        return hit

    until_hit(rounds, play, tally)
    tally.left = desk.left_over()
    return tally


def _planned_rows(path: Path) -> list[int]:
    """Every row that a plan knows: in a pack, or dropped."""
    plan = PackPlan.load(path)
    return plan.indices.tolist() + plan.dropped.tolist()


def _open_plans(tally: Tally, folder: Path) -> None:
    """All plans of a cache can be opened."""
    for path in folder.rglob("*.phplan"):
        tally.whole(not _is_torn(path), f"{path.name} in the cache")


def _is_torn(path: Path) -> bool:
    try:
        PackPlan.load(path)
    except PackhorseError:
        return True
    return False


def view_rounds(desk: Desk, rounds: int, seed: int = 0, rows: int = 120) -> Tally:
    """``packhorse view``, killed while it starts or while its pages are loaded; a new server answers as ever.

    Every second time it is given the meta file, which it counts and plans itself.
    """
    tally, draw = Tally(), random.Random(seed)
    meta = write_data(desk.folder / "view", rows)
    plan = meta.with_suffix(".phplan")
    desk.command("plan", meta, "--processor", desk.processor, "--pack-size", PACK, "--num-workers", 1)
    planned, counts = plan.read_bytes(), {path.name: path.read_bytes() for path in sidecars(meta.parent)}
    expected, took = _pages(desk, plan)

    def play(number: int) -> int:
        for path in sidecars(meta.parent) if number % 2 else ():
            path.unlink()
        source: list[object] = [meta, "--processor", desk.processor, "--pack-size", PACK]
        arguments = [str(one) for one in (source if number % 2 else [plan])]
        delay = draw.uniform(0, took)
        desk.start("command", delay=delay, arguments=["view", *arguments, "--port", "0"])
        _load_until_it_is_gone(desk, draw, delay)
        hit = desk.end().killed
        tally.whole(plan.read_bytes() == planned, "the plan that was looked at")
        _compare_counts(tally, meta.parent, counts)
        _open_plans(tally, desk.cache)
        tally.compare(_pages(desk, plan)[0].items(), expected.items())
        tally.compare(_planned_rows(plan), range(rows))
        return hit

    until_hit(rounds, play, tally)
    tally.left = desk.left_over()
    return tally


_LOOKED_AT = ("", "packs", "pack/0", "pack/1", "row/0", "row/5", "problems", "report.json", "media/0/0")


def _pages(desk: Desk, plan: Path) -> tuple[dict[str, bytes], float]:
    """What a server shows until it is told to stop, and how many seconds it takes to answer."""
    started = time.monotonic()
    pid = desk.start("command", arguments=["view", str(plan), "--port", "0"])
    address = _address(desk, time.monotonic() + 60)
    assert address is not None, desk.written()
    pages = {name: _page(address + name) for name in _LOOKED_AT}
    took = time.monotonic() - started
    os.kill(pid, signal.SIGINT)
    ended = desk.end()
    assert ended.code == 0, ended.written
    return pages, took


def _page(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=30) as answer:
        found: bytes = answer.read()
    return found


def _address(desk: Desk, end: float) -> str | None:
    """Where the server that runs now listens; None if it does not say so in time."""
    while time.monotonic() < end:
        found = re.findall(r"http://127\.0\.0\.1:\d+/", desk.written())
        if found:
            return str(found[0])
        time.sleep(0.005)
    return None


def _load_until_it_is_gone(desk: Desk, draw: random.Random, delay: float) -> None:
    address = _address(desk, time.monotonic() + delay)
    with contextlib.suppress(OSError, http.client.HTTPException):  # it was killed, in mid-sentence perhaps
        while address is not None:
            _page(address + draw.choice(_LOOKED_AT))


def ledger_rounds(desk: Desk, rounds: int, seed: int = 0, last: int = 600) -> Tally:
    """A process (or two at once) that writes a ledger, killed several times; what was confirmed is there."""
    tally, folder = Tally(), desk.folder / "ledger"
    folder.mkdir()
    moments = {
        writers: Moments(
            desk.run("ledger", **_writing(folder / f"whole{writers}", writers, {}, last)).seconds, seed
        )
        for writers in (1, 2)
    }

    def play(number: int) -> int:
        writers, home, hits = 1 + number % 2, folder / f"round{number}", 0
        for _ in range(1 + number % 3):
            request = _writing(home, writers, _confirmed(home), last)
            ended = desk.run("ledger", delay=moments[writers].drawn(), group=True, **request)
            hits += ended.killed  # what is left to do takes less time from kill to kill
            _check_confirmed(tally, home, writers)
        desk.run("ledger", **_writing(home, writers, _confirmed(home), last))
        tally.compare(*_entries(home, writers, last))
        return hits

    until_hit(rounds, play, tally)
    tally.left = desk.left_over()
    return tally


def _writing(home: Path, writers: int, first: Mapping[str, int], last: int) -> dict[str, Any]:
    home.mkdir(exist_ok=True)
    ledger, confirmed = str(home / "ledger.jsonl"), str(home / "confirmed")
    return {"ledger": ledger, "confirmed": confirmed, "writers": writers, "first": dict(first), "last": last}


def _confirmed(home: Path) -> dict[str, int]:
    """For each writer the first operation that nobody has confirmed."""
    paths = home.glob("confirmed-*")
    return {path.name.partition("-")[2]: len(path.read_bytes().splitlines()) for path in paths}


def _check_confirmed(tally: Tally, home: Path, writers: int) -> None:
    """What was confirmed is there; of the operation in which the kill came, anything may be."""
    path = home / "ledger.jsonl"
    there = Counter(Ledger.load(path)) if path.exists() and path.stat().st_size else Counter()
    for dataset, done in _confirmed(home).items():
        open_now = set(taken_back(done)) if writers == 1 else set()
        wanted = {drop for number in range(done) for drop in operation(number, dataset)}
        tally.lost += len(wanted - open_now - set(there))
        allowed = wanted | set(operation(done, dataset))
        tally.doubled += len({drop for drop in there if drop.dataset == dataset} - allowed)
    tally.doubled += sum(times - 1 for times in there.values())


def _entries(home: Path, writers: int, last: int) -> tuple[list[Any], list[Any]]:
    """The entries that are there, and those that should be."""
    names = ["data"] if writers == 1 else [f"writer{n}" for n in range(writers)]
    wanted = [drop for name in names for number in range(last) for drop in operation(number, name)]
    return list(Ledger.load(home / "ledger.jsonl")), wanted


def train_rounds(desk: Desk, rounds: int, seed: int = 0, rows: int = 160, most: int = 4) -> Tally:
    """A training run with checkpoints, killed (at most so often) and taken up until its epoch is over."""
    tally = Tally()
    meta = write_data(desk.folder / "train", rows)
    whole = _request(desk, meta, "whole", num_workers=1)
    desk.run("train", **whole)  # which has to count
    expected = json.loads(Path(whole["final"]).read_text())
    moments = Moments(desk.run("train", **_request(desk, meta, "again", num_workers=1)).seconds, seed)

    def play(number: int) -> int:
        request, hits = _request(desk, meta, f"round{number}", num_workers=number % 3), 0
        while hits < most and desk.run("train", delay=moments.drawn(), **request).killed:
            hits += 1
        if not Path(request["final"]).exists():
            desk.run("train", **request)
        final = json.loads(Path(request["final"]).read_text())
        ledger = Ledger.load(Path(request["settings"]["ledger_dir"]) / "rank-00000.jsonl")
        tally.compare(final["trained"] + [drop.key for drop in ledger], every_key(rows))
        for what in ("weights", "account", "reasons"):
            told = "" if what == "weights" else f": {final[what]} for {expected[what]}"
            tally.whole(final[what] == expected[what], f"{what} with {number % 3} workers{told}")
        return hits

    until_hit(rounds, play, tally)
    tally.left = desk.left_over()
    return tally


def _request(desk: Desk, meta: Path, name: str, num_workers: int) -> dict[str, Any]:
    home = desk.folder / "train" / name
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
        "processor": desk.processor,
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
