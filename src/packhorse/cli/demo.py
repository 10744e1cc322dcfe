"""``make demo``: write a small mixed dataset, load it, and show where every row went."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from packhorse.cli.demo_data import write_demo_data
from packhorse.datasets import make_meta_dataset, open_meta_dataset
from packhorse.datasets.robust import RobustDatasetWrapper
from packhorse.ledger import Ledger


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the demo; ``--out`` is the folder it writes to."""
    parser = argparse.ArgumentParser(prog="packhorse demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-data"), help="folder to write to")
    out: Path = parser.parse_args(arguments).out
    logging.basicConfig(stream=sys.stdout, level=logging.ERROR, format="%(message)s")
    meta = write_demo_data(out)
    print(f"Wrote three small datasets to {out}/ (three of their rows are broken on purpose).\n")

    print("1. Load them all, leaving out what cannot be read:\n")
    with _log_level(logging.INFO):
        ledger = make_meta_dataset(meta, on_bad="skip").ledger

    print("\n2. Decode every picture and video, and take out what is broken:\n")
    with _log_level(logging.ERROR):  # the ledger says it below
        delivered, rows = _decode_all(meta, ledger)
    print(f"   {rows} rows in the files, {delivered} delivered, {ledger.lost()} left out.\n")

    print("3. Where did my rows go? The ledger knows:\n")
    for drop in ledger:
        print(f"   {drop.key:<10} {drop.action:<9} {drop.reason:<20} {drop.detail}")
    ledger.save(out / "ledger.jsonl")
    print(f"\nThe same as a file: {out}/ledger.jsonl")


def _decode_all(meta: Path, ledger: Ledger) -> tuple[int, int]:
    dataset = RobustDatasetWrapper(open_meta_dataset(meta, ledger=ledger), on_bad="skip")
    dataset.preload_media = True
    return sum(dataset[index] is not None for index in range(len(dataset))), len(dataset)


@contextlib.contextmanager
def _log_level(level: int) -> Iterator[None]:
    log = logging.getLogger("packhorse.datasets")
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)


if __name__ == "__main__":
    main()
