"""End to end at size: a million conversations over 50,000 images, from opening to the first batch.

    python benchmarks/size.py [--rows 10000,100000,1000000] [--images 50000] [--quick]

Writes images (JPEG and PNG, small files of many sizes, each used by many rows) and for each size a JSONL file
of conversations (one to four turns; some without an image, some with several), both streamed. Then each stage
runs like a user runs it, in its own process, on the files of the stage before:

- open: ``open_meta_dataset``, which indexes the file, and reads the first and the last row;
- count: ``packhorse count``, all rows, each with the tokenizer (of ``words.py``) and its images' headers;
- plan: ``packhorse plan`` from these counts, its comparisons included (they read at most 200,000 rows);
- first batch: ``packhorse.load`` with two workers until the first batch, with images decoded and encoded.

Time is wall time from the start of the process to its end, imports included. Memory is the sum of the
anonymous and shared memory of the processes of the stage (``Pss`` less ``Pss_File``, so a shared page counts
once), sampled ten times a second, so that short peaks may be missed. Memory-mapped files are not included, as
the system drops their pages when it needs memory; the value with them is printed too.

Promises: each stage processes every row. CPU time (which other work on the machine hardly changes) grows with
the rows to the power of at most 1.1 from the last size but one to the last, for each stage and in total: the
time and rows of the smallest size are subtracted from both, to exclude start-up; a stage with little work
except start-up (see ``NOISE``) is reported without a target. Memory grows at most by ``KEPT`` bytes per row.
The baseline is a plain list of the rows. Exit code 1 if one is missed. ``--quick`` runs one small size,
without growth, with a small tokenizer and without ``plan``. Needs Linux (/proc).
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

from promises import fact, make_parser, parse, promise, record_outcome
from words import Text

MEGABYTE = 1e6
STAGES = ("open", "count", "plan", "first batch")
MAX_GROWTH = 1.1
NOISE = 1.0
"""Seconds of CPU by which two runs of a stage may differ. A stage with less work has no target."""
KEPT = {"open": 0, "count": 0, "plan": 200, "first batch": 200}
"""Bytes of memory that a stage may need per row: planning has the counts of all rows as columns of numbers
(100 bytes per row), and values computed from them."""
SLACK = 75.0
"""Megabytes that a stage may need in addition, for any number of rows: runs differ, and counting caches words
and image sizes up to a limit."""

_SAMPLE_SECONDS = 0.1
_DIFFERENT_IMAGES = 240
_SEED = 9


class Cost(NamedTuple):
    """Time and memory of a stage.

    Attributes:
        seconds: wall time.
        cpu: CPU seconds.
        left: rows that it has not processed.
        memory: megabytes without mapped files.
        with_files: megabytes with mapped files.
    """

    seconds: float
    cpu: float
    left: int
    memory: float
    with_files: float


# --- the data --------------------------------------------------------------------------------------------


def write_images(folder: Path, number: int) -> None:
    """Write ``number`` image files, copies of fewer images, so that it takes seconds."""
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
    """Return the file name of an image, with the extension that ``write_images`` uses."""
    return f"{number:06}.{'jpg' if number % _DIFFERENT_IMAGES % 4 else 'png'}"


class Cuts:
    """One long text, split into questions and answers, which is faster than generating each."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0, *(match.end() for match in re.finditer(r"\s+", text))]

    def cut(self, rng: random.Random, words: int) -> str:
        """Return random consecutive words."""
        start = int(rng.random() * (len(self.starts) - words))
        return self.text[self.starts[start] : self.starts[start + words]].rstrip()


def conversations(rows: int, images: int) -> Iterator[bytes]:
    """Yield the lines of a data file; a smaller file is the beginning of a larger one."""
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


def rows_of(stage: str, report: dict[str, Any]) -> int:
    """Return how many rows a stage has processed, to check that none is missing."""
    if stage == "count":
        assert not report["all"]["bad"], report["all"]["bad"]
        return int(report["counted_rows"])
    return int(report["packed"] + report["dropped"]) if stage == "plan" else int(report["rows"])


# --- measuring -------------------------------------------------------------------------------------------


def measure(stage: str, rows: int, meta: Path, processor: Path, env: dict[str, str]) -> Cost:
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
                time.sleep(_SAMPLE_SECONDS)
                ended, status, usage = os.wait4(child.pid, os.WNOHANG)
        finally:
            if not ended:  # interrupted: a session of its own does not hear of it
                os.killpg(child.pid, signal.SIGKILL)
        seconds = time.perf_counter() - started
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        output = out.read()
    if child.returncode:
        sys.exit(f"{stage} of {rows:,} rows failed with {child.returncode}: {output[-2000:].decode()}")
    left = abs(rows - rows_of(stage, json.loads(output)))
    return Cost(seconds, usage.ru_utime + usage.ru_stime, left, *memory.tolist())


def held_by_session(session: int) -> tuple[float, float]:
    """Return the megabytes of the processes of a session, without and with mapped files."""
    kilobytes = {b"Pss": 0, b"Pss_File": 0}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                # Fields after the name, which may contain anything: state, parent, group, session.
                if int(file.read().rpartition(b")")[2].split()[3]) != session:
                    continue
            with open(f"/proc/{entry}/smaps_rollup", "rb") as file:
                for name, _, value in (line.partition(b":") for line in file):
                    if name in kilobytes:
                        kilobytes[name] += int(value.split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended
    whole, files = (kilobytes[name] * 1024 / MEGABYTE for name in (b"Pss", b"Pss_File"))
    return whole - files, whole


def exponent(sizes: list[int], seconds: list[float]) -> float | None:
    """Return how work grows with the rows from the last size but one to the last, without start-up.

    Args:
        sizes: rows, three or more, ascending.
        seconds: CPU time of each.

    Returns:
        The slope of the logarithm of time over that of rows; None if there is too little work to measure.
    """
    grown = (sizes[-1] - sizes[0]) / (sizes[-2] - sizes[0])
    before, last = (max(value - seconds[0], NOISE) for value in seconds[-2:])
    return math.log(last / before) / math.log(grown) if last >= NOISE * grown else None


# --- the report ------------------------------------------------------------------------------------------


def measure_all(
    folder: Path, sizes: list[int], images: int, quick: bool
) -> tuple[dict[str, list[Cost]], list[Cost]]:
    """Measure every stage at every size, and the baseline (all rows in a list) at the first two."""
    # Imported here, because the processes of the stages run this file without it.
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
    # At a small size the first batch covers planning.
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
            cost = measure(stage, rows, meta, processor, env)
            costs[stage].append(cost)
            print_cost(f"{rows:,} rows, {stage}", cost)
        if number < 2 and not quick:  # a list of the largest size would need gigabytes
            lists.append(measure("list", rows, meta, processor, env))
            print_cost(f"{rows:,} rows, baseline: all in a list", lists[-1])
    return costs, lists


def print_cost(what: str, cost: Cost) -> None:
    """Print one stage at one size."""
    times = f"{cost.seconds:.1f} s ({cost.cpu:.1f} s of CPU)"
    fact(what, f"{times}, {cost.memory:,.0f} MB ({cost.with_files:,.0f} MB with mapped files)")


def promise_rows(costs: dict[str, list[Cost]]) -> None:
    """Promise that every stage processes all rows."""
    left = sum(cost.left for stage_costs in costs.values() for cost in stage_costs)
    claim = f"rows that a stage has not processed ({', '.join(costs)})"
    promise(claim, left, 0, baseline="the rows written", unit="", at_least=False, kind="exact")


def promise_growth(sizes: list[int], costs: dict[str, list[Cost]], lists: list[Cost]) -> None:
    """Promise how time and memory grow with the rows."""
    first, last = sizes[0], sizes[-1]
    fact(f"all stages, {last:,} rows", sum(costs[stage][-1].seconds for stage in STAGES), "s")
    fact(f"rows counted a second, {last:,} rows", last / costs["count"][-1].seconds, "rows/s")
    cpu = {stage: [cost.cpu for cost in costs[stage]] for stage in STAGES}
    cpu["all stages"] = [sum(times) for times in zip(*cpu.values(), strict=True)]
    linear = f"1 is linear; less the CPU time of {first:,} rows"
    for stage, times in cpu.items():
        work = [f"{value - times[0]:.1f} s" for value in times[-2:]]
        claim = f"{stage}: growth exponent of CPU time, {sizes[-2]:,} to {last:,} rows"
        growth = exponent(sizes, times)
        if growth is None:
            fact(f"{claim}, no target", f"CPU above that of {first:,} rows: {' and '.join(work)}, too little")
            continue
        baseline = f"{linear}: {' and '.join(work)}"
        promise(claim, growth, MAX_GROWTH, baseline=baseline, unit="", at_least=False, kind="exact")
    added = last - first
    list_bytes = (lists[1].memory - lists[0].memory) * MEGABYTE / (sizes[1] - first)
    baseline = f"all rows in a list: {list_bytes * added / MEGABYTE:,.0f} MB ({list_bytes:,.0f} bytes a row)"
    for stage in STAGES:
        grown = costs[stage][-1].memory - costs[stage][0].memory
        most = SLACK + KEPT[stage] * added / MEGABYTE
        claim = f"{stage}: memory that {added:,} more rows need"
        promise(claim, grown, most, baseline=baseline, unit="MB", at_least=False, kind="exact")


@record_outcome()
def main() -> None:
    """Write the data, measure and print the promises; or run one stage."""
    parser = make_parser(__doc__)
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
        parser.error("growth needs three sizes or more: the smallest is subtracted from the others")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        costs, lists = measure_all(Path(folder), sizes, options.images, options.quick)
    promise_rows(costs)
    if not options.quick:
        promise_growth(sizes, costs, lists)


if __name__ == "__main__":
    main()
