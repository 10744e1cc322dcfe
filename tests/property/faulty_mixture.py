"""Row files for the machines of the loader, and a mixture whose reads fail as those of real stores do."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import packhorse
from packhorse.formats.meta import MetaDataset

ROWS = 24
BROKEN = frozenset({2, 5, 7, 13, 19})  # these rows cannot be read after they were counted
TRANSIENT = frozenset({0, 3, 10, 16, 22})  # and these fail once, then the store has recovered
LONG = 11  # this one does not fit into a pack


def row(number: int, word: str = "so") -> dict[str, Any]:
    draw = random.Random(number)
    question = "why " * (400 if number == LONG else draw.randint(1, 20))
    answer = f"{word} {number} " * draw.randint(1, 8)
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def rows() -> list[dict[str, Any]]:
    return [row(number) for number in range(ROWS)]


def write(file: Path, content: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(one) + "\n" for one in content))


class FaultyMixture(MetaDataset):
    """A mixture of one file of which some rows cannot be read, once ``faults`` is set.

    Attributes:
        faults: a folder with a file for each transient fault that has happened, in whichever process; None
            while nothing fails.
        broken: whether the broken rows are.
    """

    faults: Path | None = None
    broken = False

    def __getitem__(self, index: Any) -> Any:
        if self.faults is not None and self.broken and index in BROKEN:
            raise OSError("this row is broken")
        if self.faults is not None and index in TRANSIENT:
            try:
                (self.faults / str(index)).touch(exist_ok=False)
            except FileExistsError:
                return super().__getitem__(index)
            raise OSError("the store does not answer")
        return super().__getitem__(index)


def open_mixture(file: Path) -> FaultyMixture:
    opened = packhorse.open_meta_dataset({"chats": {"file_name": str(file)}})
    return FaultyMixture(opened.sources, opened.ledger)
