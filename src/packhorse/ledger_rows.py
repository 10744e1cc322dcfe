"""An entry of a ledger that stands for many rows: data that no rank takes, rows drawn by no ratio."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packhorse.types import Action, Drop, Reason, Stage

if TYPE_CHECKING:
    import numpy as np

_IN_COMMON = ("dataset", "stage", "reason", "detail", "action", "epoch")


@dataclass(frozen=True, slots=True, eq=False)
class ManyRows:
    """One reason for many rows of a dataset, kept as an array so that five million rows stay one entry."""

    dataset: str
    rows: np.ndarray
    stage: Stage
    reason: Reason
    detail: str
    action: Action
    epoch: int | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def group(self) -> tuple[Any, ...]:
        """What rows of one entry have in common."""
        return tuple(getattr(self, name) for name in _IN_COMMON)

    def joined(self, rows: np.ndarray) -> ManyRows:
        """The same entry with further rows; each is in it once."""
        import numpy as np

        return dataclasses.replace(self, rows=np.union1d(self.rows, rows))

    def drops(self) -> Iterator[Drop]:
        """An entry for each row."""
        for row in self.rows.tolist():
            key = f"{self.dataset}/{row}"
            yield Drop(key, self.stage, self.reason, self.detail, self.action, self.dataset, self.epoch)

    def to_json(self) -> dict[str, Any]:
        """As a line of a ledger file, the rows as ranges."""
        import numpy as np

        breaks = np.flatnonzero(np.diff(self.rows) != 1) + 1
        firsts = self.rows[np.concatenate([[0], breaks])]
        lasts = self.rows[np.concatenate([breaks - 1, [len(self.rows) - 1]])]
        ranges = np.stack([firsts, lasts + 1], axis=1).tolist()
        return {"rows": ranges, "n": len(self.rows), **{name: getattr(self, name) for name in _IN_COMMON}}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> ManyRows:
        """What :meth:`to_json` made; older files tell no epoch."""
        import numpy as np

        rows = np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in entry["rows"]])
        told = {name: entry[name] for name in _IN_COMMON if name != "epoch"}
        return cls(rows=rows, epoch=entry.get("epoch"), **told)
