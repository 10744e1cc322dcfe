"""Fuzzing of all readers with damaged files.

    python benchmarks/fuzz.py [--quick] [--seconds 30] [TARGET …]

Each reader (JSONL, JSON arrays, the row index, ShareGPT rows, count files and their parts, plans, the headers
of images, audio and videos) is fuzzed in its own process for the given seconds, starting with real files
(see tests/fuzz). It may read an input or reject it with an error of Packhorse. Target: no other exception,
no crash of the interpreter, no input that takes ten seconds or two gigabytes. Exit code 1 otherwise. With
``--quick`` every third reader (the tests fuzz all of them briefly).

Needs the checkout's development packages (atheris among them).
"""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from promises import fact, make_parser, parse, promise, record_outcome

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fuzz"))


@record_outcome()
def main() -> None:
    """Fuzz all readers and print the promises."""
    parser = make_parser(__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="readers (default: all)")
    parser.add_argument("--seconds", type=int, default=30, help="for each reader")
    parser.add_argument("--seed", type=int, default=1)
    options = parse(parser, seconds=1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PACKHORSE_CACHE"] = f"{folder}/cache"
        from fuzz_parent import Report, fuzz
        from fuzz_targets import TARGETS

        def run(name: str) -> Report:
            return fuzz(name, options.seconds, Path(folder) / name, options.seed)

        tried = unexpected = crashes = 0
        names = options.targets or list(TARGETS)[:: 3 if options.quick else 1]
        # Each in its own process, one per core.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            reports = list(pool.map(run, names))
        for name, report in zip(names, reports, strict=True):
            fact(f"{name}: inputs tried", report.tried)
            fact(f"{name}: rejected", report.rejected)
            fact(f"{name}: read", report.read)
            if report.detail:
                print(report.detail, file=sys.stderr)
            tried += report.tried
            unexpected += report.unexpected
            crashes += report.crashes
    baseline = f"{tried:,} damaged inputs"
    for claim, count in (("other exceptions", unexpected), ("crashes and hangs", crashes)):
        promise(f"fuzzing: {claim}", count, 0, baseline=baseline, unit="", at_least=False, kind="exact")


if __name__ == "__main__":
    main()
