"""Mangled files: how many inputs each reader was given, and what it did with them.

    python benchmarks/fuzz.py [--quick] [--seconds 30] [TARGET …]

Each reader (JSONL, JSON arrays, the row index, ShareGPT rows, count files and their parts, plans, the headers
of images, sound and videos) is fuzzed in a process of its own for so many seconds, beginning with real files
(see tests/fuzz). It may read an input or refuse it with an error of Packhorse. To reach: no other exception,
no crash of the interpreter, no input that takes ten seconds or two gigabytes. Exit code 1 otherwise. With
``--quick`` every third reader (the tests fuzz all of them for a moment).

Needs the checkout's development packages (atheris among them).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from promises import fact, parse, promise, recorded

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fuzz"))


@recorded()
def main() -> None:
    """Fuzz all readers and judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="which readers; all without it")
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
        # Each in a process of its own, so as many at a time as there are cores.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            reports = list(pool.map(run, names))
        for name, report in zip(names, reports, strict=True):
            fact(f"{name}: inputs tried", report.tried)
            fact(f"{name}: of them rejected by name", report.rejected)
            fact(f"{name}: of them read", report.read)
            if report.detail:
                print(report.detail, file=sys.stderr)
            tried += report.tried
            unexpected += report.unexpected
            crashes += report.crashes
    baseline = f"{tried:,} mangled inputs"
    for claim, found in (("other exceptions", unexpected), ("crashes and hangs", crashes)):
        promise(f"fuzzing: {claim}", found, 0, baseline=baseline, unit="", at_least=False, kind="exact")


if __name__ == "__main__":
    main()
