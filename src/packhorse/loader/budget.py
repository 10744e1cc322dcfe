"""Keeping account: when too much is lost the run stops, and at the end of an epoch all of it adds up."""

from __future__ import annotations

import math
from collections import deque

from packhorse.errors import PackhorseError
from packhorse.ledger import GONE, Ledger
from packhorse.loader.build import BatchReport
from packhorse.plan.pack_plan import BAD_ROW, DROP_REASONS

# Good samples, which the settings leave no room for, or do not draw.
_GOOD = frozenset((*DROP_REASONS[:BAD_ROW], "not_sampled"))


class TooManyBad(PackhorseError):
    """More samples are bad than the run is to bear; the message has the reasons."""


class Guard:
    """Stops the run when too many samples of an epoch are bad, or too many in a row.

    Args:
        samples: of the epoch, on all ranks.
        bad: of them were bad already when they were counted.
        ranks: that share them.
        share: the most that may be bad; None for any.
        in_a_row: the most that may fail one after the other on this rank; None for any.
        ledger: has the reasons.
        lost: so many have failed on this rank already, before a restart.

    Attributes:
        counted: how many samples have failed on this rank in this epoch, and how many of them in a row, last.

    Raises:
        TooManyBad: too many were bad when they were counted.
    """

    def __init__(
        self,
        samples: int,
        bad: int,
        ranks: int,
        share: float | None,
        in_a_row: int | None,
        ledger: Ledger,
        lost: int = 0,
    ) -> None:
        self.samples, self.bad, self.share, self.in_a_row, self.ledger = samples, bad, share, in_a_row, ledger
        self.ranks, self.counted = ranks, (lost, 0)
        self.check(0)

    def saw(self, report: BatchReport) -> None:
        """Take a batch into account; one that stops the run is not handed out, and leaves no trace here.

        Raises:
            TooManyBad: that is enough.
        """
        lost, row = self.counted
        lost += len(report.lost)
        for inside in report.in_a_row:
            row = 0 if inside else row + 1
            if self.in_a_row is not None and row > self.in_a_row:
                raise TooManyBad(self._told(f"{row} samples in a row failed", "max_bad_in_a_row"))
        if self.ranks == 1:
            self.check(lost)
        elif self.share is not None:
            # What a rank may lose: its part, and as much more as chance may deal to one of thousands. All
            # ranks together are judged at the end of the epoch.
            mine = self.share * self.samples / self.ranks
            if lost > mine + 5 * math.sqrt(mine) + 5:
                raise TooManyBad(self._told(f"{lost:,} samples failed on this rank in this epoch"))
        self.counted = lost, row

    def check(self, lost: int) -> None:
        """Take into account what all ranks have lost together.

        Raises:
            TooManyBad: with those that were bad when they were counted, it is too much.
        """
        # Divided, not multiplied: 29 of 100 are 0.29 to the bit.
        if self.share is not None and self.samples and (self.bad + lost) / self.samples > self.share:
            failed = f", {lost:,} of them failed in this epoch" if lost else ""
            raise TooManyBad(
                self._told(f"{self.bad + lost:,} of {self.samples:,} samples cannot be used{failed}")
            )

    def _told(self, what: str, setting: str = "max_bad_share") -> str:
        counted = (drop for drop in self.ledger if drop.action in GONE and drop.reason not in _GOOD)
        last = deque(counted, maxlen=3)
        examples = "; ".join(f"{drop.key}: {drop.reason}, {drop.detail}" for drop in last)
        gone = self.ledger.samples_by_reason(gone=True)
        bad = {reason: number for reason, number in gone.items() if reason not in _GOOD}
        value = f"{self.share:.2%}" if setting == "max_bad_share" else self.in_a_row
        return (
            f"{what}, more than {setting}={value} allows. By reason: {_by_reason(bad)}. "
            f"As: {examples}. `packhorse check` finds them all, with --fix it writes the data without them; "
            f"raise {setting} if that is meant"
        )


def _by_reason(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {number:,}" for reason, number in counts.items()) or "none"
