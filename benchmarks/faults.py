"""Faults: processes killed at random moments, spoilt media, stores that fail, races, full disks.

    python benchmarks/faults.py [--rounds 20] [--quick] [--folder DIR] [--seed 0]

Plays ``--rounds`` rounds of each kind of work that is killed (``packhorse count``, ``plan`` and ``view``, the
writing of ledgers, training with resume) with SIGKILL, at moments drawn from the time that an undisturbed run
takes. Then faults of other kinds are put in and counted. Baseline, in the same run: the same work
undisturbed, with which the bytes of all files, the weights of the model and the samples are compared. Exit
code 1 if a sample was lost or doubled, a file was seen half, or a process was left after.

The rounds are those of ``tests/faults``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from promises import fact, parse, promise, recorded

# Instead of this folder: there `faults` is this script, and not the tests.
sys.path[0] = str(Path(__file__).parents[1] / "tests")
from contract.torchvision_ops import make_torchvision_importable

make_torchvision_importable()

import torch

from faults.fault_cases import RACES, SPOILT, Outcome, bad_store, prepared, race, spoilt_media
from faults.kill_desk import Tally, open_desk
from faults.kill_rounds import ROUNDS

UNDISTURBED = "the same work undisturbed"


@recorded()
def main() -> None:
    """Play the rounds, put in the faults, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="of each kind of work that is killed")
    parser.add_argument("--kinds", default=",".join(ROUNDS), help="which work is killed, with commas between")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="where to write (a temporary folder)")
    options = parse(parser, rounds=1)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        home = Path(folder)
        os.environ["PACKHORSE_CACHE"] = str(home / "cache")
        killed(home, [kind for kind in options.kinds.split(",") if kind], options.rounds, options.seed)
        others(home, 1 if options.quick else 5, 2 if options.quick else 20, options.seed)


def killed(home: Path, kinds: list[str], rounds: int, seed: int) -> None:
    """Rounds of work that is killed."""
    tallies: dict[str, Tally] = {}
    with open_desk(home / "desk") as desk:
        for kind in kinds:
            started = time.monotonic()
            tally = tallies[kind] = ROUNDS[kind](desk, rounds, seed=seed)
            told = f"{tally.rounds} rounds, {tally.kills} kills, {time.monotonic() - started:.0f} s"
            fact(f"killed: {kind}", told)
            for remark in tally.remarks:
                fact(f"killed: {kind}", remark)
    everything = list(tallies.values())
    promise(
        "rounds in which a process at work was killed",
        sum(one.rounds for one in everything),
        rounds * len(kinds),
        baseline="the rounds that were asked for",
        unit="rounds",
        kind="exact",
    )
    fact("killed: processes at work hit by SIGKILL", sum(one.kills for one in everything))
    none("killed: samples lost", sum(one.lost for one in everything))
    none("killed: samples doubled", sum(one.doubled for one in everything))
    none("killed: files seen half, or other than undisturbed", sum(one.half for one in everything))
    none("killed: processes left after", sum(one.left for one in everything))


def others(home: Path, times: int, races_each: int, seed: int) -> None:
    """Faults of other kinds."""
    total = Outcome()
    rows = 40 * times
    kinds = ("slow", "timeout", "reset", "denied", "short", "late_timeout")
    for number, num_workers in enumerate((0, 1)):
        add(total, spoilt_media(home / f"spoilt{number}", 5 * rows, seed + number, num_workers))
        shares = dict.fromkeys(kinds, 0.08)
        add(total, bad_store(home / f"store{number}", shares, rows, seed + number, num_workers))
    for kind in (*SPOILT, *kinds):
        fact(f"faults put in: {'media_item ' if kind in SPOILT else 'store '}{kind}", total.injected[kind])
    races = Counter[str]()
    differ = 0
    for number in range(races_each):
        for what in RACES:
            folder = prepared(home / f"race{number}{what}", what)
            found = race(folder, what, one_machine=bool(number % 2))
            differ += len(set(found)) - 1 + abs(len(list(folder.glob(RACES[what][1]))) - 1)
            races[what] += 1
    for what, number in races.items():
        fact(f"races of three processes for one file: {what}", number)
    none("media and stores: samples neither delivered nor in the ledger", total.lost)
    none("media and stores: samples doubled", total.doubled)
    none("races: files that differ, or more than one", differ)


def add(total: Outcome, more: Outcome) -> None:
    """Add up outcomes."""
    total.injected += more.injected
    total.lost += more.lost
    total.doubled += more.doubled


def none(what: str, number: int) -> None:
    """A promise that there is none of something."""
    promise(what, number, 0, baseline=UNDISTURBED, unit="", at_least=False, kind="exact")


if __name__ == "__main__":
    main()
