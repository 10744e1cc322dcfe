"""Injected faults: failing stores, damaged media, races for one file.

Each case returns the number of injected faults and the outcome of the samples; ``tests/faults`` runs small
cases, ``benchmarks/faults.py`` larger ones.
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
from faults.failing_store import PROTOCOL, RETRIED, count_faults, set_faults
from packhorse.count.counting import count_meta
from packhorse.datasets import open_rows
from packhorse.loader import planner as plans
from packhorse.rows.index import KEEP_FROM_BYTES

DAMAGES = ("truncated", "empty", "html", "audio", "renamed")
"""How media are damaged: truncated after the header, empty, a 404 page, an audio file, and an image of
another format under the same name, which is valid."""


@dataclass
class Outcome:
    """The outcome of a case.

    Attributes:
        injected: number of faults by kind.
        lost: samples that were neither delivered nor in the ledger.
        duplicates: samples that were in both, or twice in one.
        reasons: reasons in the ledger.
        details: details in the ledger.
    """

    injected: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    duplicates: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)

    def compare(self, loader: packhorse.Loader, delivered: list[str], all_keys: set[str]) -> None:
        """Compare delivered and dropped samples with all samples."""
        counts = Counter(delivered + [drop.key for drop in loader.ledger])
        self.lost += len(all_keys - set(counts))
        self.duplicates += sum(count - 1 for count in counts.values()) + len(set(counts) - all_keys)
        self.reasons += Counter(drop.reason for drop in loader.ledger)
        self.details += [drop.detail for drop in loader.ledger]
        stats = loader.epoch_stats
        assert stats is not None
        assert stats.delivered == len(delivered)
        assert stats.delivered + stats.lost + stats.dropped == stats.rows == len(all_keys)


def run_epoch(loader: packhorse.Loader) -> list[str]:
    """Return the keys of all samples that an epoch delivers."""
    keys: list[str] = []
    for batch in loader:
        keys += [loader.key(index) for index in batch.info.samples]
    loader.close()
    return keys


def write_images(folder: Path, rows: int, suffix: str = "jpg") -> Path:
    """Write a dataset whose rows have different images; return the meta file."""
    media = folder / "media"
    media.mkdir(parents=True)
    examples = []
    for number in range(rows):
        make_image(56 + number % 9, 60).save(media / f"{number}.{suffix}")
        turns = [("user", "<image>what is it"), ("assistant", f"so {number}")]
        row = {"messages": [{"role": role, "content": text} for role, text in turns]}
        examples.append(row | {"images": [f"{number}.{suffix}"]})
    write_rows(folder / "shots.jsonl", examples)
    return write_meta(folder, {"shots": {"file_name": "shots.jsonl", "media_dir": "media"}})


def damage_media(folder: Path, rows: int, seed: int, share: float = 0.1) -> dict[int, str]:
    """Damage a share of the media; return the kind of damage by row."""
    draw = random.Random(seed)
    chosen = draw.sample(range(rows), round(share * rows))
    damages = {number: DAMAGES[n % len(DAMAGES)] for n, number in enumerate(chosen)}
    for number, kind in damages.items():
        path = folder / "media" / f"{number}.jpg"
        whole = path.read_bytes()
        if kind == "truncated":
            path.write_bytes(whole[: len(whole) * 2 // 3])
        elif kind == "empty":
            path.write_bytes(b"")
        elif kind == "html":
            path.write_text("<!DOCTYPE html><title>404</title><p>No such image.")
        elif kind == "audio":
            path.write_bytes(b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(28))
        else:
            make_image(60, 60).save(path, format="PNG")
    return damages


def run_with_damaged_media(
    folder: Path, rows: int = 60, seed: int = 0, num_workers: int = 0, **options: Any
) -> Outcome:
    """Run an epoch in which 10 % of the media are damaged."""
    meta = write_images(folder, rows)
    damages = damage_media(folder, rows, seed)
    outcome = Outcome(Counter(damages.values()))
    settings = {"pack_size": 256, "max_bad_share": 0.2, "num_workers": num_workers, **options}
    loader = packhorse.load(str(meta), processor("qwen2_vl"), model="unchecked", **settings)
    outcome.compare(loader, run_epoch(loader), {f"shots/{number}" for number in range(rows)})
    harmless = sum(kind == "renamed" for kind in damages.values())
    assert len(loader.ledger) == len(damages) - harmless, "readable media are delivered"
    return outcome


def run_with_failing_store(
    folder: Path,
    shares: dict[str, float],
    rows: int = 40,
    seed: int = 0,
    num_workers: int = 0,
    delay: float = 0.05,
    **options: Any,
) -> Outcome:
    """Run an epoch over media in a failing or slow store; rows are counted before it fails."""
    log = folder / "faults.jsonl"
    write_images(folder, rows)
    media = f"{PROTOCOL}://{folder / 'media'}"
    meta = {"shots": {"file_name": str(folder / "shots.jsonl"), "media_dir": media}}
    set_faults(log, {})
    settings: dict[str, Any] = {"pack_size": 256, "max_bad_share": 0.9, "num_workers": num_workers, **options}
    loader = packhorse.load(meta, processor("qwen2_vl"), model="unchecked", **settings)
    set_faults(log, shares, seed=seed, delay=delay)
    try:
        outcome = Outcome()
        outcome.compare(loader, run_epoch(loader), {f"shots/{number}" for number in range(rows)})
    finally:
        set_faults(log, {})
    outcome.injected = count_faults(log)
    harmless = outcome.injected["slow"] if delay < settings.get("sample_timeout", math.inf) else 0
    lasting = outcome.injected.total() - harmless - sum(outcome.injected[name] for name in RETRIED)
    most = outcome.injected.total() - harmless
    assert lasting <= len(loader.ledger) <= most, "each fault that a retry does not fix is one entry"
    return outcome


# --- races -----------------------------------------------------------------------------------------------


def write_many(folder: Path, size: int = KEEP_FROM_BYTES) -> Path:
    """Write a JSONL file that is large enough for an index."""
    folder.mkdir(parents=True, exist_ok=True)
    row = json.dumps({"text": "word " * 200}) + "\n"
    path = folder / "many.jsonl"
    path.write_text("".join(f'{{"n": {n}}}\n{row}' for n in range(size // len(row) + 1)))
    return path


def prepare_race(folder: Path, what: str) -> Path:
    """Make a folder with data for one of the :data:`RACES`; return it."""
    write_chats(folder, 60)
    if what == "index":
        write_many(folder)
    return folder


def open_index(folder: Path) -> str:
    """Return the number of rows and some rows, read with the index."""
    rows = open_rows(str(folder / "many.jsonl"))
    return json.dumps([len(rows), rows[0], rows[len(rows) // 2], rows[len(rows) - 1]])


def count_all(folder: Path) -> str:
    """Count and return the bytes of the count files."""
    count_meta(str(folder / "meta.json"), processor("qwen2_vl"), part_rows=5)
    return "".join(f"{path.name} {path.read_bytes().hex()}" for path in sidecars(folder))


def plan_all(folder: Path) -> str:
    """Return the plan of a loader."""
    plans._CACHED_FROM = 1  # cache small plans too
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
"""What several processes do at once, and the file that they write."""


def race(folder: Path, what: str, processes: int = 3, one_machine: bool = True) -> list[str]:
    """Return the results of several processes that start at the same moment.

    Args:
        folder: folder of the data.
        what: a key of :data:`RACES`.
        processes: number of processes.
        one_machine: share a cache and its locks; else only the folder of the data, like several machines.
    """
    context = multiprocessing.get_context("fork")
    start, answers = context.Barrier(processes), context.SimpleQueue()
    running = [
        context.Process(target=_racer, args=(folder, what, number, one_machine, start, answers))
        for number in range(processes)
    ]
    for process in running:
        process.start()
    results = [answers.get() for _ in running]
    for process in running:
        process.join(60)
        assert process.exitcode == 0
    return results


def _racer(folder: Path, what: str, number: int, one_machine: bool, start: Any, answers: Any) -> None:
    cache = folder / ("cache" if one_machine else f"cache{number}")
    os.environ["PACKHORSE_CACHE"] = str(cache)
    start.wait(60)
    try:
        answers.put(RACES[what][0](folder))
    except BaseException as error:
        answers.put(f"{number} failed: {error!r}")
        raise
