"""Counting tokens: our pass against a pool of processes that encode sample by sample and rewrite the file.

    python benchmarks/count.py [--quick] [--processor PATH] [--rows 100000] [--num-workers 2] [--repeat 2]

The baseline is how token counts are commonly added to a JSONL file, written out below: worker processes parse
each line, call ``tokenizer.encode`` on the text of the conversation, add the count as ``_text_tokens`` and
write the line again. It ignores the chat template, media and supervised tokens. ``packhorse count`` counts
all of these exactly and writes a sidecar. Both run in fresh processes with the same number of workers, in
the same run; start-up and loading the tokenizer are part of both. Exit code 1 if a promise is missed.

``--processor`` is a folder with a processor, or with a tokenizer (a Qwen2-VL processor is built around it).
Without it, a tokenizer of 30,000 entries that splits text like Qwen2 to Qwen3 is trained first (``words.py``)
and used by both. The promise does not cover tokenizers that split text differently from these and Llama 3:
counting is slower with them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from count_samples import python_path
from promises import fact, make_parser, parse, promise, record_outcome
from words import Text, qwen2_vl


@record_outcome()
def main() -> None:
    """Write the file, measure both and print the promises."""
    parser = make_parser(__doc__)
    parser.add_argument("--processor")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--num-workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--run", choices=("ours", "baseline"), help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    options = parse(parser, rows=20_000, repeat=1)  # fewer are mostly start-up
    if options.run:
        (run_ours if options.run == "ours" else run_baseline)(
            options.data, options.processor, options.num_workers
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPATH"] = python_path(Path(folder))
        processor = prepare_processor(options.processor, Path(folder) / "processor")
        data, tenth = Path(folder) / "rows.jsonl", Path(folder) / "tenth.jsonl"
        write_conversations(data, options.rows)
        if not options.quick:
            write_conversations(tenth, options.rows // 10)
        report(data, tenth, processor, options)


def prepare_processor(given: str | None, home: Path) -> str:
    """A processor's folder as it is; a tokenizer (the trained one without any) gets a Qwen2-VL processor."""
    if given is None:
        qwen2_vl().save_pretrained(home)
        return str(home)
    if any((Path(given) / name).exists() for name in ("preprocessor_config.json", "processor_config.json")):
        return given
    from transformers import AutoTokenizer

    qwen2_vl(AutoTokenizer.from_pretrained(given)).save_pretrained(home)
    return str(home)


def write_conversations(path: Path, rows: int) -> None:
    """Questions and answers."""
    rng, text = random.Random(0), Text(seed=0)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(rows):
            turns = []
            for _ in range(rng.choice((1, 1, 2, 3))):
                turns.append({"role": "user", "content": text.words(rng.randint(5, 60))})
                turns.append({"role": "assistant", "content": text.words(rng.randint(10, 200))})
            file.write(json.dumps({"id": number, "messages": turns}, ensure_ascii=False) + "\n")


# --- the baseline ----------------------------------------------------------------------------------------

_tokenizer: Any = None


def _start(processor: str) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from transformers import AutoTokenizer

    _tokenizer = AutoTokenizer.from_pretrained(processor)


def _rewrite(line: str) -> str:
    row = json.loads(line)
    text = "\n".join(turn["content"] for turn in row["messages"])
    row["_text_tokens"] = len(_tokenizer.encode(text))
    return json.dumps(row, ensure_ascii=False)


def run_baseline(data: str, processor: str, num_workers: int) -> None:
    """Encode every sample and rewrite every line."""
    with (
        open(data, encoding="utf-8") as file,
        open(f"{data}.counted", "w", encoding="utf-8") as out,
        get_context("spawn").Pool(num_workers, _start, (processor,)) as pool,
    ):
        for line in pool.imap(_rewrite, file, chunksize=256):
            out.write(line + "\n")


# --- ours ------------------------------------------------------------------------------------------------


def run_ours(data: str, processor: str, num_workers: int) -> None:
    """Count every sample exactly, into a sidecar."""
    from packhorse.count.counting import count_meta
    from packhorse.count.engines import make_engine

    engine = make_engine("local", num_workers)  # like the command `packhorse count`
    result = count_meta({"rows": {"file_name": data}}, processor, engine=engine, fresh=True)
    print(result.counted_rows)


# --- measuring -------------------------------------------------------------------------------------------


def measure(what: str, data: Path, processor: str, options: argparse.Namespace) -> tuple[float, float]:
    """Return the best seconds of ``--repeat``, and the peak megabytes of the largest process."""
    command = [sys.executable, __file__, "--run", what, "--data", str(data), "--processor", processor]
    seconds, peaks = [], []
    for _ in range(options.repeat):
        started = time.perf_counter()
        child = subprocess.Popen(
            [*command, "--num-workers", str(options.num_workers)], stdout=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(child.pid, 0)
        seconds.append(time.perf_counter() - started)
        if status:
            sys.exit(f"{what} failed")
        peaks.append(usage.ru_maxrss / 1024)
    return min(seconds), max(peaks)


def report(data: Path, tenth: Path, processor: str, options: argparse.Namespace) -> None:
    """Print the table and the promises."""
    print(f"{options.rows:,} rows, {data.stat().st_size / 1e6:.0f} MB, {options.num_workers} workers\n")
    print(f"{'way':34}{'seconds':>10}{'rows/s':>10}{'MB':>8}")
    ways = [
        ("encode each, rewrite JSONL", "baseline", data, options.rows),
        ("packhorse count", "ours", data, options.rows),
        ("packhorse count, a tenth", "ours", tenth, options.rows // 10),
    ]
    results = []
    for label, what, file, rows in ways[:2] if options.quick else ways:
        seconds, peak = measure(what, file, processor, options)
        results.append((seconds, peak))
        print(f"{label:34}{seconds:10.2f}{rows / seconds:10,.0f}{peak:8.0f}")
    plain, ours = results[:2]
    print()
    each = f"tokenizer.encode of each sample in {options.num_workers} processes, rewriting the JSONL"
    promise(
        "counting exactly with a tokenizer of the Qwen2 kind, speed", plain[0] / ours[0], 1.5, baseline=each
    )
    if not options.quick:  # meaningless for few rows
        over, fewer = ours[1] - results[2][1], "the same for a tenth of the rows"
        claim = "memory of counting, over a tenth of the rows"
        promise(claim, over, 60, baseline=fewer, unit="MB", at_least=False, kind="exact")
    fact("rows counted", options.rows)
    fact("rows counted a second", options.rows / ours[0])
    fact("rows counted a second by the baseline", options.rows / plain[0])


if __name__ == "__main__":
    main()
