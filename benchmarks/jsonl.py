"""Reading a large ShareGPT JSONL file: plain ``json.loads``, eager and lazy.

    python benchmarks/jsonl.py [--quick] [--gigabytes 2] [--folder DIR] [--repeat 5]

Writes the file itself, then runs every reading in a fresh process (so that peak memory is that reading's own)
and prints the best time of ``--repeat`` (one for the world sizes of which nothing is promised), peak resident
memory over a bare interpreter, and the ratios that are promised. Exit code 1 if one is missed. Baselines, in
the same run: ``wc -l``, and the plain way of sharded loading, ``json.loads`` on each line of the shard while
iterating over the file in text mode.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from promises import fact, make_parser, parse, promise, record_outcome

WORLDS = (1, 8, 64)
PROMISED = 8  # the world size with a promise; both are measured alternately

# The code of each process. The measured part is between the two clock readings.
READINGS = {
    "interpreter": "start = time.perf_counter(); rows = 0",
    "plain": """
import json
start = time.perf_counter()
shard, number = [], 0
with open({path!r}, encoding="utf-8") as file:
    for line in file:
        if line.strip():
            if number % {world} == 0:
                shard.append(json.loads(line))
            number += 1
rows = len(shard)
""",
    "eager": """
from packhorse.datasets import _load_jsonl_for_rank
start = time.perf_counter()
shard, total = _load_jsonl_for_rank({path!r}, 1.0, 0, {world})
rows = len(shard)
""",
    "lazy": """
from packhorse.datasets import open_rows
start = time.perf_counter()
rows = len(open_rows({path!r}))
""",
    "lazy, 100,000 random rows": """
import random
from packhorse.datasets import open_rows
start = time.perf_counter()
file = open_rows({path!r})
rows = sum(bool(file[i]) for i in random.Random(0).choices(range(len(file)), k=100_000))
""",
}
# Peak memory from /proc: getrusage would include the memory of the parent at the fork.
MEASURE = """
import re, time
{body}
seconds = time.perf_counter() - start
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
print(seconds, peak / 1024, rows)
"""


@record_outcome()
def main() -> None:
    """Write the files, measure and print the promises."""
    parser = make_parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write the file (a temporary folder)"
    )
    parser.add_argument("--repeat", type=int, default=5)
    options = parse(parser, gigabytes=0.1, repeat=2)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "sharegpt.jsonl"
        tenth = Path(folder) / "tenth.jsonl"
        rows = write_sharegpt(path, options.gigabytes * 1e9)
        write_sharegpt(tenth, options.gigabytes * 1e8)
        print(f"{path.stat().st_size / 1e9:.2f} GB, {rows:,} rows of {path.stat().st_size // rows} bytes\n")
        short = Path(folder) / "short.jsonl"
        write_short(short, options.gigabytes * 5e7)
        report(path, tenth, short, options.repeat)


def write_sharegpt(path: Path, size: float) -> int:
    """Write a file of image chats of about ``size`` bytes; return the number of rows."""
    rng = random.Random(0)
    words = ["the", "chart", "compares", "a", "large", "share", "over", "time", "while", "sales", "fall"]
    block = []
    for number in range(2000):
        turns = []
        for _ in range(rng.randint(1, 3)):
            question, answer = (" ".join(rng.choices(words, k=rng.randint(5, n))) for n in (60, 200))
            turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        turns[0]["content"] = "<image>" + turns[0]["content"]
        block.append(json.dumps({"id": number, "messages": turns, "images": [f"train/{number:08}.jpg"]}))
    data = ("\n".join(block) + "\n").encode()
    copies = max(1, round(size / len(data)))
    with open(path, "wb") as file:
        for _ in range(copies):
            file.write(data)
    return copies * len(block)


def write_short(path: Path, size: float) -> None:
    """Write a file of rows of ten bytes, about ``size`` bytes and at least one block."""
    block = b'{"id": 0}\n' * 100_000
    with open(path, "wb") as file:
        for _ in range(max(1, round(size / len(block)))):
            file.write(block)


Result = tuple[float, float, int]  # best seconds, peak MB, rows


def run(reading: str, path: Path, world: int, repeat: int, *, cold: bool = False) -> Result:
    """Run a reading in new processes."""
    script = MEASURE.format(body=READINGS[reading].format(path=str(path), world=world))
    results = []
    for _ in range(repeat):
        if cold:
            path.with_name(f"{path.name}.phidx").unlink(missing_ok=True)
        out = subprocess.run(
            [sys.executable, "-c", script], check=True, capture_output=True, text=True
        ).stdout
        seconds, peak, rows = out.split()
        results.append((float(seconds), float(peak), int(rows)))
    return best(results)


def best(results: Sequence[Result]) -> Result:
    """Return the fastest time and the largest memory."""
    return min(r[0] for r in results), max(r[1] for r in results), results[0][2]


def in_turns(path: Path, world: int, times: int) -> tuple[Result, Result]:
    """Measure plain and eager reading alternately, so that a busy moment affects both."""
    rounds = [(run("plain", path, world, 1), run("eager", path, world, 1, cold=True)) for _ in range(times)]
    return best([one for one, _ in rounds]), best([other for _, other in rounds])


def count_lines(path: Path, repeat: int) -> float:
    """Return the best seconds of ``wc -l``."""
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        subprocess.run(["wc", "-l", path], check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def report(path: Path, tenth: Path, short: Path, repeat: int) -> None:
    """Print the table and the promises."""
    count_lines(path, 1)  # loads the file into the page cache
    base = run("interpreter", path, 1, repeat)[1]
    wc = count_lines(path, repeat)
    line("reading", "world", "seconds", "MB over bare", "rows")
    line("wc -l", "", f"{wc:.2f}", "", "")

    def print_row(label: str, world: int, result: Result) -> None:
        seconds, peak, rows = result
        line(label, str(world), f"{seconds:.3f}", f"{peak - base:,.0f}", f"{rows:,}")

    def measure(label: str, reading: str, file: Path, *, cold: bool) -> tuple[float, float]:
        result = run(reading, file, 1, repeat, cold=cold)
        print_row(label, 1, result)
        return result[0], result[1] - base

    plain, eager = {}, {}
    for world in WORLDS:
        plain[world], eager[world] = in_turns(path, world, repeat if world == PROMISED else 1)
        print_row("plain json.loads", world, plain[world])
        print_row("ours eager, cold index", world, eager[world])
        print_row("ours eager, warm index", world, run("eager", path, world, 1))
    cold = measure("ours lazy, cold index", "lazy", path, cold=True)
    warm = measure("ours lazy, warm index", "lazy", path, cold=False)
    touched = measure("ours lazy, 100,000 rows", "lazy, 100,000 random rows", path, cold=False)
    small = measure("… of a tenth of the file", "lazy, 100,000 random rows", tenth, cold=True)
    many = measure("… of rows of 10 bytes", "lazy, 100,000 random rows", short, cold=True)
    per_row = 1e6 * (plain[1][1] - base) / plain[1][2]
    print(f"\n{os.cpu_count()} cores; dicts of the plain way take {per_row:,.0f} bytes a row\n")
    loads = "json.loads on each line of the shard"
    bare = "a bare interpreter"
    speed = plain[PROMISED][0] / eager[PROMISED][0]
    promise(f"eager rows at world size {PROMISED}, speed", speed, 2.5, baseline=loads)
    promise("opening lazily, no index yet, time", cold[0] / wc, 4, baseline="wc -l", at_least=False)
    warm_claim = "opening lazily, indexed before, time"
    promise(
        warm_claim,
        warm[0] * 1000,
        100,
        baseline=f"{1000 * cold[0]:.0f} ms without an index",
        unit="ms",
        at_least=False,
    )
    for claim, megabytes, most, baseline in (
        ("lazy memory, no index yet", cold[1], 50, bare),
        ("lazy memory, 100,000 rows read", touched[1], 50, bare),
        (
            "lazy memory, the file over its tenth",
            touched[1] - small[1],
            15,
            "the same of a tenth of the file",
        ),
        (f"lazy memory, {short.stat().st_size // 10:,} short rows", many[1], 50, bare),
    ):
        promise(claim, megabytes, most, baseline=baseline, unit="MB", at_least=False, kind="exact")
    fact("size of the file", path.stat().st_size / 1e9, "GB")
    fact("wc -l", wc, "s")
    fact("opening lazily, no index yet", cold[0], "s")
    fact("opening lazily, indexed before", 1000 * warm[0], "ms")


def line(*cells: str) -> None:
    """Print one row of the table."""
    print(f"{cells[0]:<26}{cells[1]:>6}{cells[2]:>10}{cells[3]:>14}{cells[4]:>12}", flush=True)


if __name__ == "__main__":
    main()
