"""Fault injection: processes killed at random moments, damaged media, failing stores, races, full disks.

    python benchmarks/faults.py [--rounds 20] [--quick] [--folder DIR] [--seed 0]

Kills ``packhorse count``, ``plan`` and ``view``, processes that write ledgers, and training runs with SIGKILL
at random moments, ``--rounds`` times each, and lets the next process continue. Then injects and counts
other faults. The baseline, in the same run, is the same work undisturbed: the bytes of all files, the weights
of the model and the samples must be equal. Exit code 1 if a sample is lost or duplicate, a file is
incomplete, or a process is left running.

The rounds are those of ``tests/faults``.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from promises import fact, make_parser, parse, promise, record_outcome

# Instead of this folder, where `faults` is this script.
sys.path[0] = str(Path(__file__).parents[1] / "tests")
from contract.torchvision_ops import make_torchvision_importable

make_torchvision_importable()

import torch

from faults.fault_cases import (
    DAMAGES,
    RACES,
    Outcome,
    prepare_race,
    race,
    run_with_damaged_media,
    run_with_failing_store,
)
from faults.kill_rounds import ROUNDS
from faults.kill_runner import Tally, open_runner

UNDISTURBED = "the same work undisturbed"


@record_outcome()
def main() -> None:
    """Run the rounds, inject the faults, print the promises."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="of each kind of work that is killed")
    parser.add_argument("--kinds", default=",".join(ROUNDS), help="which work is killed, separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="where to write (a temporary folder)")
    options = parse(parser, rounds=1)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        home = Path(folder)
        os.environ["PACKHORSE_CACHE"] = str(home / "cache")
        run_kill_rounds(
            home, [kind for kind in options.kinds.split(",") if kind], options.rounds, options.seed
        )
        run_other_faults(home, 1 if options.quick else 5, 2 if options.quick else 20, options.seed)


def run_kill_rounds(home: Path, kinds: list[str], rounds: int, seed: int) -> None:
    """Run the rounds with kills."""
    tallies: dict[str, Tally] = {}
    with open_runner(home / "desk") as runner:
        for kind in kinds:
            started = time.monotonic()
            tally = tallies[kind] = ROUNDS[kind](runner, rounds, seed=seed)
            summary = f"{tally.rounds} rounds, {tally.kills} kills, {time.monotonic() - started:.0f} s"
            fact(f"killed: {kind}", summary)
            for remark in tally.remarks:
                fact(f"killed: {kind}", remark)
    everything = list(tallies.values())
    promise(
        "rounds in which a process at work was killed",
        sum(tally.rounds for tally in everything),
        rounds * len(kinds),
        baseline="the requested rounds",
        unit="rounds",
        kind="exact",
    )
    fact("killed: processes at work hit by SIGKILL", sum(tally.kills for tally in everything))
    promise_zero("killed: samples lost", sum(tally.lost for tally in everything))
    promise_zero("killed: duplicate samples", sum(tally.duplicates for tally in everything))
    promise_zero("killed: incomplete or different files", sum(tally.partial for tally in everything))
    promise_zero("killed: processes left running", sum(tally.left for tally in everything))


def run_other_faults(home: Path, times: int, races_each: int, seed: int) -> None:
    """Inject faults into media, stores and races."""
    total = Outcome()
    rows = 40 * times
    kinds = ("slow", "timeout", "reset", "denied", "short", "late_timeout")
    for number, num_workers in enumerate((0, 1)):
        add(total, run_with_damaged_media(home / f"spoilt{number}", 5 * rows, seed + number, num_workers))
        shares = dict.fromkeys(kinds, 0.08)
        add(total, run_with_failing_store(home / f"store{number}", shares, rows, seed + number, num_workers))
    for kind in (*DAMAGES, *kinds):
        fact(f"faults injected: {'media ' if kind in DAMAGES else 'store '}{kind}", total.injected[kind])
    races = Counter[str]()
    differ = 0
    for number in range(races_each):
        for what in RACES:
            folder = prepare_race(home / f"race{number}{what}", what)
            digests = race(folder, what, one_machine=bool(number % 2))
            differ += len(set(digests)) - 1 + abs(len(list(folder.glob(RACES[what][1]))) - 1)
            races[what] += 1
    for what, number in races.items():
        fact(f"races of three processes for one file: {what}", number)
    promise_zero("media and stores: samples neither delivered nor in the ledger", total.lost)
    promise_zero("media and stores: duplicate samples", total.duplicates)
    promise_zero("races: different or duplicate files", differ)


def add(total: Outcome, more: Outcome) -> None:
    """Sum outcomes."""
    total.injected += more.injected
    total.lost += more.lost
    total.duplicates += more.duplicates


def promise_zero(what: str, number: int) -> None:
    """Promise that a number is 0."""
    promise(what, number, 0, baseline=UNDISTURBED, unit="", at_least=False, kind="exact")


if __name__ == "__main__":
    main()
