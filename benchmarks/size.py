"""End to end at size: a million conversations over 50,000 images, from opening to the first batch.

    python benchmarks/size.py [--rows 10000,100000,1000000] [--images 50000] [--quick]

Writes images (JPEG and PNG, small files of many sizes, each used by many rows) and for each size a JSONL file
of conversations (one to four turns; some without an image, some with several), both streamed. Then each stage
runs as users run it, in a process of its own, on the files that the stage before it has left:

- open: ``open_meta_dataset``, which indexes the file, and a look at the first and the last row;
- count: ``packhorse count``, all rows, each with the tokenizer (of ``words.py``) and its images' headers;
- plan: ``packhorse plan`` from these counts, its comparisons included (they read at most 200,000 rows);
- first batch: ``packhorse.load`` with two workers until the first batch is there, images decoded and encoded.

Time is wall time from the start of the process to its end, imports included. Memory is what the processes of
the stage hold together and only they can free: the sum of their anonymous and shared memory (``Pss`` less
``Pss_File``, so a page that two of them share counts once), looked at ten times a second, so that what lasts
less than that may be missed. Pages of files that are memory-mapped are not in it, as the system drops them
when it needs the room; what it is with them stands beside it.

Promises: each stage deals with every row. CPU time (which others at work on the machine hardly change) grows
with the rows to the power of at most 1.1 from the last size but one to the last, each stage and all together:
what the smallest size took is taken off both, and its rows off both numbers of rows, so that starting up has
no part in it; a stage that has too little to do beside starting up (see ``NOISE``) is told and not judged.
Memory grows by no more than what has to be kept of a row (see ``KEPT``): nothing, or some numbers. The
baseline is a plain list of the rows. Exit code 1 if one is missed. ``--quick`` runs one small size, of which
growth cannot be told, with a small tokenizer and without ``plan``. Needs Linux (/proc).
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from PIL import Image

from promises import fact, parse, promise, recorded
from words import Text

MEGABYTE = 1e6
STAGES = ("open", "count", "plan", "first batch")
MOST_GROWTH = 1.1
NOISE = 1.0
"""Seconds of CPU by which two runs of a stage may differ. A stage is judged where its work at the last size
is what linear growth makes of more than that."""
KEPT = {"open": 0, "count": 0, "plan": 200, "first batch": 200}
"""Bytes of memory that a stage may need for each row: planning has the counts of all rows as columns of
numbers (100 bytes a row), and what it computes from them."""
SLACK = 75.0
"""Megabytes that a stage may need beyond, whatever the number of rows: two runs differ, and counting
remembers words and sizes of images that it has seen, up to a limit."""

_LOOK_EVERY = 0.1
_DIFFERENT_IMAGES = 240
_SEED = 9


class Cost(NamedTuple):
    """What a stage took.

    Attributes:
        seconds: on the clock.
        cpu: seconds of processors.
        left: rows that it has not dealt with.
        memory: megabytes of its own.
        with_files: megabytes with those of mapped files.
    """

    seconds: float
    cpu: float
    left: int
    memory: float
    with_files: float


# --- the data --------------------------------------------------------------------------------------------


def write_images(folder: Path, number: int) -> None:
    """Write ``number`` image files; they are copies of fewer, so that it takes seconds."""
    rng = np.random.default_rng(_SEED)
    made = []
    for place in range(min(number, _DIFFERENT_IMAGES)):
        width, height = (int(side) for side in rng.integers(56, 449, 2))
        pixels = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST)
        file = io.BytesIO()
        image.save(file, *(("JPEG",) if place % 4 else ("PNG",)))
        made.append((file.getvalue(), "jpg" if place % 4 else "png"))
    folder.mkdir()
    for place in range(number):
        data, _ = made[place % len(made)]
        (folder / image_name(place)).write_bytes(data)


def image_name(number: int) -> str:
    """The file of an image; the kinds come as ``write_images`` makes them."""
    return f"{number:06}.{'jpg' if number % _DIFFERENT_IMAGES % 4 else 'png'}"


class Cuts:
    """One long text, to be cut into questions and answers: much quicker than making each of them."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0, *(found.end() for found in re.finditer(r"\s+", text))]

    def cut(self, rng: random.Random, words: int) -> str:
        """So many words from anywhere."""
        at = int(rng.random() * (len(self.starts) - words))
        return self.text[self.starts[at] : self.starts[at + words]].rstrip()


def conversations(rows: int, images: int) -> Iterator[bytes]:
    """The lines of a data file: those of a smaller one are the first of a larger one."""
    words, rng = Cuts(Text(seed=_SEED).words(400_000)), random.Random(_SEED)
    for number in range(rows):
        # A fifth is text alone; of the others most have one image, some up to four.
        shown = rng.choices((0, 1, 2, 3, 4), (20, 65, 8, 4, 3))[0]
        turns = []
        for turn in range(rng.choices((1, 2, 3, 4), (55, 25, 12, 8))[0]):
            question = words.cut(rng, 4 + int(rng.expovariate(1 / 14)))
            answer = words.cut(rng, 5 + int(rng.expovariate(1 / 45)))
            turns.append({"role": "user", "content": ("" if turn else "<image>" * shown) + question})
            turns.append({"role": "assistant", "content": answer})
        chosen = [image_name(int(rng.random() * images)) for _ in range(shown)]
        yield orjson.dumps({"id": number, "messages": turns, "images": chosen}) + b"\n"


def write_rows(folder: Path, rows: int, images: int, media_dir: Path) -> Path:
    """A dataset of its own folder; returns the meta file."""
    folder.mkdir()
    with (folder / "chats.jsonl").open("wb") as file:
        file.writelines(conversations(rows, images))
    meta = folder / "meta.json"
    meta.write_text(json.dumps({"chats": {"file_name": "chats.jsonl", "media_dir": str(media_dir)}}))
    return meta


# --- the stages that are Python calls (the others are commands) ------------------------------------------


def stage_open(meta: str, processor: str) -> dict[str, Any]:
    """Open the data and look at both ends."""
    from packhorse.datasets import open_meta_dataset

    dataset = open_meta_dataset(meta)
    assert all(dataset[place]["conversation"] for place in (0, len(dataset) - 1))
    return {"rows": len(dataset)}


def stage_first_batch(meta: str, processor: str) -> dict[str, Any]:
    """Open, plan and build until there is a batch."""
    import packhorse

    settings: dict[str, Any] = {
        "pack_size": 8192,
        "attn_implementation": "varlen",
        "pixel_dtype": "bfloat16",
        "num_workers": 2,
    }
    loader = packhorse.load(meta, processor, model="unchecked", world=packhorse.World(), **settings)
    batch = next(iter(loader))
    assert "pixel_values" in batch, "the first batch has no image"
    assert not batch.info.lost, "a sample of the first batch was lost"
    found = {"rows": len(loader.counts), "samples": len(batch.info.samples), "tokens": batch.info.tokens}
    loader.close()
    return found


def stage_list(meta: str, processor: str) -> dict[str, Any]:
    """The baseline: all rows in a list."""
    with (Path(meta).parent / "chats.jsonl").open("rb") as file:
        rows = [json.loads(line) for line in file]
    return {"rows": len(rows)}


def command_of(stage: str, meta: Path, processor: Path) -> list[str]:
    """What runs a stage; it prints JSON."""
    if stage in ("count", "plan"):
        return [sys.executable, "-m", "packhorse", stage, str(meta), "--processor", str(processor), "--json"]
    return [sys.executable, __file__, "--stage", stage, "--meta", str(meta), "--processor", str(processor)]


def rows_of(stage: str, told: dict[str, Any]) -> int:
    """How many rows a stage has dealt with, to see that none is dropped."""
    if stage == "count":
        assert not told["all"]["bad"], told["all"]["bad"]
        return int(told["counted_rows"])
    return int(told["packed"] + told["dropped"]) if stage == "plan" else int(told["rows"])


# --- measuring -------------------------------------------------------------------------------------------


def measured(stage: str, rows: int, meta: Path, processor: Path, env: dict[str, str]) -> Cost:
    """Run a stage and watch it.

    Raises:
        SystemExit: it failed.
    """
    with tempfile.TemporaryFile() as out:
        started = time.perf_counter()
        child = subprocess.Popen(
            command_of(stage, meta, processor), stdout=out, env=env, start_new_session=True
        )
        memory, ended, status = np.zeros(2), 0, 0
        try:
            while not ended:
                memory = np.maximum(memory, held_by_session(child.pid))
                time.sleep(_LOOK_EVERY)
                ended, status, usage = os.wait4(child.pid, os.WNOHANG)
        finally:
            if not ended:  # interrupted: a session of its own does not hear of it
                os.killpg(child.pid, signal.SIGKILL)
        seconds = time.perf_counter() - started
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        told = out.read()
    if child.returncode:
        sys.exit(f"{stage} of {rows:,} rows failed with {child.returncode}: {told[-2000:].decode()}")
    left = abs(rows - rows_of(stage, json.loads(told)))
    return Cost(seconds, usage.ru_utime + usage.ru_stime, left, *memory.tolist())


def held_by_session(session: int) -> tuple[float, float]:
    """Megabytes that the processes of a session hold, without and with the pages of mapped files."""
    kilobytes = {b"Pss": 0, b"Pss_File": 0}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                # After the name, which may hold anything: state, parent, group, session.
                if int(file.read().rpartition(b")")[2].split()[3]) != session:
                    continue
            with open(f"/proc/{entry}/smaps_rollup", "rb") as file:
                for name, _, value in (line.partition(b":") for line in file):
                    if name in kilobytes:
                        kilobytes[name] += int(value.split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
    whole, files = (kilobytes[name] * 1024 / MEGABYTE for name in (b"Pss", b"Pss_File"))
    return whole - files, whole


def exponent(sizes: list[int], seconds: list[float]) -> float | None:
    """How work grows with the rows from the last size but one to the last, start-up taken off.

    Args:
        sizes: rows, three or more, ascending.
        seconds: CPU time of each.

    Returns:
        The slope of the logarithm of time over that of rows; None where the work is too little to tell.
    """
    grown = (sizes[-1] - sizes[0]) / (sizes[-2] - sizes[0])
    before, last = (max(one - seconds[0], NOISE) for one in seconds[-2:])
    return math.log(last / before) / math.log(grown) if last >= NOISE * grown else None


# --- the report ------------------------------------------------------------------------------------------


def measure_all(
    folder: Path, sizes: list[int], images: int, quick: bool
) -> tuple[dict[str, list[Cost]], list[Cost]]:
    """Every stage at every size, and at the first two the baseline: all rows in a list."""
    # Here, as the processes of the stages start with this file too, and need nothing of it.
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from count_samples import python_path, save_processor

    paths = [python_path(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PACKHORSE_CACHE": str(folder / "cache")}
    processor, media = folder / "processor", folder / "images"
    if quick:
        save_processor(processor)
    else:
        from encode import released_qwen2_vl

        released_qwen2_vl().save_pretrained(processor)
    started = time.perf_counter()
    write_images(media, images)
    fact(f"{images:,} images written", time.perf_counter() - started, "s")
    # A plan takes no other way at a small size than the first batch, which plans too.
    costs: dict[str, list[Cost]] = {stage: [] for stage in STAGES if stage != "plan" or not quick}
    lists: list[Cost] = []
    for number, rows in enumerate(sizes):
        started = time.perf_counter()
        meta = write_rows(folder / str(rows), rows, images, media)
        size = (meta.parent / "chats.jsonl").stat().st_size
        took = time.perf_counter() - started
        fact(
            f"{rows:,} rows written",
            f"{took:.1f} s, {size / MEGABYTE:,.0f} MB, {size / rows:.0f} bytes a row",
        )
        for stage in costs:
            cost = measured(stage, rows, meta, processor, env)
            costs[stage].append(cost)
            tell(f"{rows:,} rows, {stage}", cost)
        if number < 2 and not quick:  # a list of the largest size would need gigabytes
            lists.append(measured("list", rows, meta, processor, env))
            tell(f"{rows:,} rows, baseline: all in a list", lists[-1])
    return costs, lists


def tell(what: str, cost: Cost) -> None:
    """One stage at one size."""
    times = f"{cost.seconds:.1f} s ({cost.cpu:.1f} s of CPU)"
    fact(what, f"{times}, {cost.memory:,.0f} MB ({cost.with_files:,.0f} MB with mapped files)")


def judge_rows(costs: dict[str, list[Cost]]) -> None:
    """Promise that no stage leaves a row out."""
    left = sum(cost.left for told in costs.values() for cost in told)
    claim = f"rows that a stage has not dealt with ({', '.join(costs)})"
    promise(claim, left, 0, baseline="the rows written", unit="", at_least=False, kind="exact")


def judge_growth(sizes: list[int], costs: dict[str, list[Cost]], lists: list[Cost]) -> None:
    """Promise how time and memory grow with the rows."""
    first, last = sizes[0], sizes[-1]
    fact(f"all stages, {last:,} rows", sum(costs[stage][-1].seconds for stage in STAGES), "s")
    fact(f"rows counted a second, {last:,} rows", last / costs["count"][-1].seconds, "rows/s")
    cpu = {stage: [cost.cpu for cost in costs[stage]] for stage in STAGES}
    cpu["all stages"] = [sum(times) for times in zip(*cpu.values(), strict=True)]
    linear = f"1 is linear; less the CPU time of {first:,} rows"
    for stage, times in cpu.items():
        work = [f"{one - times[0]:.1f} s" for one in times[-2:]]
        claim = f"{stage}: growth exponent of CPU time, {sizes[-2]:,} to {last:,} rows"
        found = exponent(sizes, times)
        if found is None:
            fact(
                f"{claim}, not judged", f"CPU above that of {first:,} rows: {' and '.join(work)}, too little"
            )
            continue
        baseline = f"{linear}: {' and '.join(work)}"
        promise(claim, found, MOST_GROWTH, baseline=baseline, unit="", at_least=False, kind="exact")
    added = last - first
    list_bytes = (lists[1].memory - lists[0].memory) * MEGABYTE / (sizes[1] - first)
    baseline = f"all rows in a list: {list_bytes * added / MEGABYTE:,.0f} MB ({list_bytes:,.0f} bytes a row)"
    for stage in STAGES:
        grown = costs[stage][-1].memory - costs[stage][0].memory
        most = SLACK + KEPT[stage] * added / MEGABYTE
        claim = f"{stage}: memory that {added:,} more rows need"
        promise(claim, grown, most, baseline=baseline, unit="MB", at_least=False, kind="exact")


@recorded()
def main() -> None:
    """Write the data, measure, judge; or be one of the stages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="10000,100000,1000000", help="sizes, three or more")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--folder", help="where to make the temporary folder for the data (1.5 GB)")
    parser.add_argument("--stage", choices=("open", "first batch", "list"), help=argparse.SUPPRESS)
    parser.add_argument("--meta", help=argparse.SUPPRESS)
    parser.add_argument("--processor", help=argparse.SUPPRESS)
    options = parse(parser, rows="300", images=100)
    if options.stage:
        stage = {"open": stage_open, "first batch": stage_first_batch, "list": stage_list}[options.stage]
        print(json.dumps(stage(options.meta, options.processor)))
        return
    sizes = sorted(set(map(int, options.rows.split(","))))
    if len(sizes) < 3 and not options.quick:
        parser.error("growth needs three sizes or more: that of the smallest is taken off the others")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        costs, lists = measure_all(Path(folder), sizes, options.images, options.quick)
    judge_rows(costs)
    if not options.quick:
        judge_growth(sizes, costs, lists)


if __name__ == "__main__":
    main()
