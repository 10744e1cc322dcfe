"""Keeping account: when too much is lost the run stops, and at the end of an epoch all of it adds up."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from typing import Any, NamedTuple

from packhorse.errors import ConfigError, PackhorseError
from packhorse.ledger import GONE, Ledger
from packhorse.loader.build import BatchReport
from packhorse.loader.talk import Ranks
from packhorse.neat_packing_vlm.pack_plan import BAD_ROW, DROP_REASONS
from packhorse.types import World

logger = getLogger("packhorse.loader")

# Good samples, which the settings leave no room for, or do not draw.
_GOOD = frozenset((*DROP_REASONS[:BAD_ROW], "not_sampled"))

_NO_FOLDER = "part of the epoch was before a restart: set ledger_dir to have it"
_NO_GROUP = "this rank's part alone: ranks without a process group cannot add up"


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
        self.ranks, self.lost, self._row = ranks, lost, 0
        self.check(0)

    def saw(self, report: BatchReport) -> None:
        """Take a batch into account.

        Raises:
            TooManyBad: that is enough.
        """
        self.lost += len(report.lost)
        for inside in report.in_a_row:
            self._row = 0 if inside else self._row + 1
            if self.in_a_row is not None and self._row > self.in_a_row:
                raise TooManyBad(self._told(f"{self._row} samples in a row failed", "max_bad_in_a_row"))
        if self.ranks == 1:
            self.check(self.lost)
        elif self.share is not None:
            # What a rank may lose: its part, and as much more as chance may deal to one of thousands. All
            # ranks together are judged at the end of the epoch.
            mine = self.share * self.samples / self.ranks
            if self.lost > mine + 5 * math.sqrt(mine) + 5:
                raise TooManyBad(self._told(f"{self.lost:,} samples failed on this rank in this epoch"))

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


@dataclass(frozen=True, slots=True)
class EpochAccount:
    """Where the samples of an epoch went, over all ranks.

    Attributes:
        epoch: which one.
        rows: examples of the data set.
        planned: of them are in the plan; the others are in the ledger.
        delivered: were handed out to a rank; None where that is not known (``unknown`` says why).
        lost: were planned and failed on the way (before a restart too, where there is a ``ledger_dir``).
        reasons: how many samples were not delivered for each reason, in this epoch or in all.
        remarks: how many were, though the ledger has a reason for them (cut, nothing to learn in them).
        unknown: why ``delivered`` is not known, and what would tell; empty where it is.
    """

    epoch: int
    rows: int
    planned: int
    delivered: int | None
    lost: int
    reasons: dict[str, int] = field(default_factory=dict)
    remarks: dict[str, int] = field(default_factory=dict)
    unknown: str = ""

    @property
    def left_out(self) -> int:
        """Rows that are in no pack: bad already when they were counted, too long, empty."""
        return self.rows - self.planned

    def __str__(self) -> str:
        handed = f", delivered not known ({self.unknown})" if self.unknown else ""
        if self.delivered is not None:
            handed = f", {self.delivered:,} delivered"
        known = " in the part that is known" if self.delivered is None else ""
        lost = f", {self.lost:,} failed{known}" if self.lost else ""
        lines = [f"epoch {self.epoch}: {self.rows:,} rows, {self.planned:,} in the plan{handed}{lost}"]
        lines += [f"  {reason}: {number:,} of {self.rows:,}" for reason, number in self.reasons.items()]
        if self.remarks:
            lines.append(f"  delivered with a remark: {_by_reason(self.remarks)}")
        return "\n".join(lines)


def close_epoch(
    mine: EpochAccount, *, whole: bool, shard_data: bool, ledger: Ledger, ranks: Ranks
) -> EpochAccount:
    """Add up the epoch over all ranks; the first rank logs it.

    Args:
        mine: this rank's part; ``reasons`` are found here.
        whole: whether this run handed out all of the epoch.
        shard_data: rows and plan are this rank's own, so they are added up too.
        ledger: this rank's.
        ranks: to add up over; those that cannot talk tell their own part only.
    """
    found = ranks.gather(mine)
    written = _written(ledger, ranks, mine.epoch)
    everybody = ranks.can_talk or ranks.world.size == 1
    lost = sum(one.lost for one in found)
    planned = sum(one.planned for one in found) if shard_data else mine.planned
    delivered, unknown = None, ""
    if everybody and whole:
        delivered = sum(one.delivered or 0 for one in found)
    elif everybody and ledger.path is not None:  # what was lost before a restart is in the files
        lost = written.lost
        delivered = planned - lost
    else:
        unknown = _NO_FOLDER if everybody else _NO_GROUP
    account = EpochAccount(
        mine.epoch,
        sum(one.rows for one in found) if shard_data else mine.rows,
        planned,
        delivered,
        lost,
        written.reasons,
        written.remarks,
        unknown,
    )
    if account.delivered is not None and account.delivered + account.lost != account.planned:
        raise PackhorseError(
            f"epoch {account.epoch} does not add up: {account.planned:,} samples planned, "
            f"{account.delivered:,} delivered and {account.lost:,} lost"
        )
    if ranks.world.rank == 0:
        logger.info("%s", account)
    return account


def rank_file(folder: str | Path, rank: int) -> Path:
    """Where a rank keeps its ledger."""
    return Path(folder) / f"rank-{rank:05d}.jsonl"


def lost_before(ledger: Ledger, epoch: int) -> int:
    """How many samples of an epoch the file of a ledger names as lost, from before a restart."""
    if ledger.path is None or not ledger.path.exists():
        return 0
    return _lost_in(_read(ledger.path, epoch))


def _lost_in(ledger: Ledger) -> int:
    """Samples that failed on the way, without those that belong to no epoch: they were never planned."""
    return ledger.lost() - ledger.of_epoch(-1).lost()


def recall(ledger: Ledger, epoch: int) -> None:
    """Take in what the file of a ledger has on an epoch from before a restart; it is not written again."""
    if ledger.path is not None and ledger.path.exists():
        ledger.take_in(_read(ledger.path).of_epoch(epoch, alone=True))


def take_back(ledger: Ledger, world: World, epoch: int, unused: Callable[[], Collection[str]]) -> None:
    """Forget what was recorded behind a state: about samples that it says are to come, and later epochs.

    Args:
        ledger: this rank's.
        world: the first rank also looks after the files of ranks that are no more.
        epoch: of the state.
        unused: the names of these samples; asked for only if there is anything to take back.
    """
    if ledger.path is None:
        if ledger.last_epoch() >= epoch:
            ledger.take_back(epoch, unused())
        return
    files = [rank_file(ledger.path.parent, world.rank)]
    if not world.rank:
        files += [path for rank, path in _rank_files(ledger.path.parent).items() if rank >= world.size]
    for path in files:
        if path.exists() and _read(path).last_epoch() >= epoch:
            own = ledger if path == ledger.path else Ledger(path)
            number = own.take_back(epoch, unused())
            if number:
                logger.info("%s: %s entries behind the state are taken back", path, number)


def warn_of_lost_entries(ledger: Ledger, world: World, state: Mapping[str, Any]) -> None:
    """Say so if the file of a ledger has fewer entries than it had when a state was saved on this rank."""
    told, path = state.get("ledger") or {}, ledger.path
    if path is None or told.get("rank") != world.rank:
        return
    there = len(_read(path)) if path.exists() else 0
    if there < int(told.get("entries", 0)):
        logger.warning(
            "%s has %s entries, but had %s when the state was saved: entries were lost",
            path,
            there,
            told["entries"],
        )


def _read(path: Path, epoch: int | None = None) -> Ledger:
    """The entries of a file (that belong to an epoch, or to all); a torn file has those that are whole."""
    try:
        whole = Ledger.load(path)
        return whole if epoch is None else whole.of_epoch(epoch)
    except ConfigError as error:
        logger.warning("%s: taken as empty", error)
        return Ledger()


class _Written(NamedTuple):
    reasons: dict[str, int]
    remarks: dict[str, int]
    lost: int


def _told_by(ledger: Ledger) -> _Written:
    gone, kept = (ledger.samples_by_reason(gone=one) for one in (True, False))
    return _Written(gone, kept, _lost_in(ledger))


def _written(ledger: Ledger, ranks: Ranks, epoch: int) -> _Written:
    """What the ledgers of all ranks have on an epoch: samples for each reason, and how many were lost.

    Files are read: they have what an earlier run, or a process that was killed, has recorded too. After a
    restart a sample may be in the files of two ranks; where the first rank sees all files, it counts once.
    """
    path = ledger.path
    own = _read(path, epoch) if path is not None and path.exists() else ledger.of_epoch(epoch)
    parts = ranks.gather((_told_by(own), len(own)))
    files = {} if path is None else _rank_files(path.parent)
    seen = {rank: _read(file, epoch) for rank, file in files.items()} if not ranks.world.rank else {}
    all_seen = all(not number or len(seen.get(rank, ())) >= number for rank, (_, number) in enumerate(parts))
    merged = _merged(seen.values()) if all_seen and seen else None
    told: _Written | None = ranks.gather(None if merged is None else _told_by(merged))[0]
    if told is not None:
        return told
    # Beside those of this run, what ranks of an earlier, larger one have left behind.
    found = [one for one, _ in parts]
    found += [_told_by(file) for rank, file in seen.items() if rank >= ranks.world.size]
    reasons, remarks = Counter[str](), Counter[str]()
    for one in found:
        reasons.update(one.reasons)
        remarks.update(one.remarks)
    lost = sum(one.lost for one in found)
    return _Written(dict(reasons.most_common()), dict(remarks.most_common()), lost)


def _merged(ledgers: Iterable[Ledger]) -> Ledger:
    merged = Ledger()
    for ledger in ledgers:
        merged.merge(ledger)
    return merged


def _rank_files(folder: Path) -> dict[int, Path]:
    numbers = {path: path.stem.partition("-")[2] for path in sorted(folder.glob("rank-*.jsonl"))}
    return {int(number): path for path, number in numbers.items() if number.isdigit()}
