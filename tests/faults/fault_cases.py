"""Faults that are put in on purpose and counted: bad lines, spoilt media, full disks, races for one file.

Each case returns how many faults it has put in and what became of the samples; ``tests/faults`` runs them
small, ``benchmarks/faults.py`` larger.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import packhorse
from contract.processors import processor
from contract.samples import make_image
from count_samples import sidecars, write_chats, write_meta, write_rows
from faults.failing_store import PROTOCOL, RETRIED, bad_line, happened
from packhorse.count.counting import count_meta
from packhorse.datasets import open_rows
from packhorse.loader import planner as plans
from packhorse.rows.index import KEEP_FROM_BYTES

SPOILT = ("truncated", "empty", "html", "sound", "renamed")
"""What media are made: cut off after the header, no byte, a page that says 404, a sound file, and an image
of another kind under the same name, which is no damage at all."""


@dataclass
class Outcome:
    """What a case has come to.

    Attributes:
        injected: faults, by kind.
        lost: samples that were neither delivered nor in the ledger; ``doubled``: in both, or twice in one.
        reasons: what the ledger says; ``details``: in its own words.
    """

    injected: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    doubled: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)

    def settle(self, loader: packhorse.Loader, delivered: list[str], every: set[str]) -> None:
        """Compare what was delivered and what is in the ledger with all there is."""
        gone = [drop.key for drop in loader.ledger]
        there = Counter(delivered + gone)
        self.lost += len(every - set(there))
        self.doubled += sum(times - 1 for times in there.values()) + len(set(there) - every)
        self.reasons += Counter(drop.reason for drop in loader.ledger)
        self.details += [drop.detail for drop in loader.ledger]
        account = loader.epoch_stats
        assert account is not None
        assert account.delivered == len(delivered)
        assert account.delivered + account.lost + account.dropped == account.rows == len(every)


def epoch(loader: packhorse.Loader) -> list[str]:
    """The names of all samples that an epoch delivers."""
    seen: list[str] = []
    for batch in loader:
        seen += [loader.key(index) for index in batch.info.samples]
    loader.close()
    return seen


def write_images(folder: Path, rows: int, suffix: str = "jpg") -> Path:
    """A dataset of which every row has an image of its own; returns the meta file."""
    media = folder / "media"
    media.mkdir(parents=True)
    made = []
    for number in range(rows):
        make_image(56 + number % 9, 60).save(media / f"{number}.{suffix}")
        turns = [("user", "<image>what is it"), ("assistant", f"so {number}")]
        row = {"messages": [{"role": role, "content": text} for role, text in turns]}
        made.append(row | {"images": [f"{number}.{suffix}"]})
    write_rows(folder / "shots.jsonl", made)
    return write_meta(folder, {"shots": {"file_name": "shots.jsonl", "media_dir": "media"}})


def spoil(folder: Path, rows: int, seed: int, share: float = 0.1) -> dict[int, str]:
    """Spoil a share of the media; returns what was done to which."""
    draw = random.Random(seed)
    chosen = draw.sample(range(rows), round(share * rows))
    done = {number: SPOILT[place % len(SPOILT)] for place, number in enumerate(chosen)}
    for number, kind in done.items():
        path = folder / "media" / f"{number}.jpg"
        whole = path.read_bytes()
        if kind == "truncated":
            path.write_bytes(whole[: len(whole) * 2 // 3])
        elif kind == "empty":
            path.write_bytes(b"")
        elif kind == "html":
            path.write_text("<!DOCTYPE html><title>404</title><p>No such image.")
        elif kind == "sound":
            path.write_bytes(b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(28))
        else:
            make_image(60, 60).save(path, format="PNG")
    return done


def spoilt_media(
    folder: Path, rows: int = 60, seed: int = 0, num_workers: int = 0, **options: Any
) -> Outcome:
    """An epoch over data of which 10 % of the media are spoilt."""
    meta = write_images(folder, rows)
    done = spoil(folder, rows, seed)
    outcome = Outcome(Counter(done.values()))
    settings = {"pack_size": 256, "max_bad_share": 0.2, "num_workers": num_workers, **options}
    loader = packhorse.load(str(meta), processor("qwen2_vl"), model="unchecked", **settings)
    outcome.settle(loader, epoch(loader), {f"shots/{number}" for number in range(rows)})
    harmless = sum(kind == "renamed" for kind in done.values())
    assert len(loader.ledger) == len(done) - harmless, "what can be read is delivered"
    return outcome


def bad_store(
    folder: Path,
    shares: dict[str, float],
    rows: int = 40,
    seed: int = 0,
    num_workers: int = 0,
    delay: float = 0.05,
    **options: Any,
) -> Outcome:
    """An epoch over media in a store that fails, or takes ``delay`` seconds; counted while all was well."""
    log = folder / "happened.jsonl"
    write_images(folder, rows)
    media = f"{PROTOCOL}://{folder / 'media'}"
    meta = {"shots": {"file_name": str(folder / "shots.jsonl"), "media_dir": media}}
    bad_line(log, {})
    settings: dict[str, Any] = {"pack_size": 256, "max_bad_share": 0.9, "num_workers": num_workers, **options}
    loader = packhorse.load(meta, processor("qwen2_vl"), model="unchecked", **settings)
    bad_line(log, shares, seed=seed, delay=delay)
    try:
        outcome = Outcome()
        outcome.settle(loader, epoch(loader), {f"shots/{number}" for number in range(rows)})
    finally:
        bad_line(log, {})
    outcome.injected = happened(log)
    harmless = outcome.injected["slow"] if delay < settings.get("sample_timeout", math.inf) else 0
    lasting = outcome.injected.total() - harmless - sum(outcome.injected[name] for name in RETRIED)
    most = outcome.injected.total() - harmless
    assert lasting <= len(loader.ledger) <= most, "each fault that another try does not mend is one entry"
    return outcome


# --- races -----------------------------------------------------------------------------------------------


def write_many(folder: Path, size: int = KEEP_FROM_BYTES) -> Path:
    """A JSONL file that is large enough for an index."""
    folder.mkdir(parents=True, exist_ok=True)
    row = json.dumps({"text": "mule " * 200}) + "\n"
    path = folder / "many.jsonl"
    path.write_text("".join(f'{{"n": {n}}}\n{row}' for n in range(size // len(row) + 1)))
    return path


def prepared(folder: Path, what: str) -> Path:
    """A new folder with data for one of the :data:`RACES`."""
    write_chats(folder, 60)
    if what == "index":
        write_many(folder)
    return folder


def open_index(folder: Path) -> str:
    """What the index of a file says: the number of rows, and some of them."""
    rows = open_rows(str(folder / "many.jsonl"))
    return json.dumps([len(rows), rows[0], rows[len(rows) // 2], rows[len(rows) - 1]])


def count_all(folder: Path) -> str:
    """The bytes of the count files."""
    count_meta(str(folder / "meta.json"), processor("qwen2_vl"), part_rows=5)
    return "".join(f"{path.name} {path.read_bytes().hex()}" for path in sidecars(folder))


def plan_all(folder: Path) -> str:
    """The plan that a loader trains."""
    plans._CACHED_FROM = 1  # as if there were many rows
    loader = packhorse.load(
        str(folder / "meta.json"),
        processor("qwen2_vl"),
        model="unchecked",
        pack_size=256,
        cache_dir=str(folder / "plans"),
    )
    return f"{loader.plan_key} {loader.plan.bins()}"


RACES: dict[str, tuple[Callable[[Path], str], str]] = {
    "index": (open_index, "*.phidx"),
    "counts": (count_all, "*.phcount"),
    "plan": (plan_all, "plans/*.phplan"),
}
"""What several processes do at once, and which one file comes of it."""


def race(folder: Path, what: str, processes: int = 3, one_machine: bool = True) -> list[str]:
    """What each of several processes found that began at the same moment.

    Args:
        folder: has the data.
        what: of :data:`RACES`.
        processes: so many.
        one_machine: they share a cache and its locks; else only the folder of the data, as machines do.
    """
    context = multiprocessing.get_context("fork")
    start, answers = context.Barrier(processes), context.SimpleQueue()
    running = [
        context.Process(target=_racer, args=(folder, what, number, one_machine, start, answers))
        for number in range(processes)
    ]
    for one in running:
        one.start()
    found = [answers.get() for _ in running]
    for one in running:
        one.join(60)
        assert one.exitcode == 0
    return found


def _racer(folder: Path, what: str, number: int, one_machine: bool, start: Any, answers: Any) -> None:
    cache = folder / ("cache" if one_machine else f"cache{number}")
    os.environ["PACKHORSE_CACHE"] = str(cache)
    start.wait(60)
    try:
        answers.put(RACES[what][0](folder))
    except BaseException as error:
        answers.put(f"{number} failed: {error!r}")
        raise
