"""Reading ledgers: a file, or a folder with one for each rank, goes in; one ledger comes out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from packhorse.errors import ConfigError
from packhorse.ledger import Ledger
from packhorse.types import Drop

_ENTRY = {"stage", "reason", "action", "dataset"}


def read_ledgers(path: str | os.PathLike[str]) -> tuple[Ledger, list[Path]]:
    """The entries of a ledger file, or of all ledger files (``*.jsonl``) of a folder together.

    Other files of the folder, the rows of a data set for instance, are passed over; an entry that several
    ranks have recorded counts once.

    Returns:
        The ledger, and the files it was read from.

    Raises:
        FileNotFoundError: nothing is there.
        ConfigError: the file is no ledger, or the folder has none.
    """
    home = Path(path)
    if not home.is_dir():
        return Ledger.load(home), [home]
    files = [file for file in sorted(home.glob("*.jsonl")) if file.is_file() and is_ledger(file)]
    if not files:
        raise ConfigError(f"{path}: no ledger in this folder (files *.jsonl as Ledger.save writes them)")
    whole = Ledger()
    for file in files:
        whole.merge(Ledger.load(file))
    return whole, files


def is_ledger(file: Path) -> bool:
    """Whether the first line that is not blank is an entry of a ledger; empty ones go by their name."""
    with open(file, "rb") as lines:
        first = next((line for line in lines if line.strip()), None)
    if first is None:
        return "ledger" in file.name
    try:
        entry = json.loads(first)
    except ValueError:
        return False
    return isinstance(entry, dict) and entry.keys() >= _ENTRY and bool({"key", "rows"} & entry.keys())


def selected(
    ledger: Ledger, *, reason: str | None = None, dataset: str | None = None, key: str | None = None
) -> Iterator[Drop]:
    """The entries with this reason, of this data set, of this row (``coco/812``, its copies included)."""
    for drop in ledger:
        if reason is not None and drop.reason != reason:
            continue
        if dataset is not None and drop.dataset != dataset:
            continue
        if key is not None and drop.key != key and not drop.key.startswith(f"{key}#"):
            continue
        yield drop
