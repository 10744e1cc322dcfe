"""Where the samples of an epoch go: the budget of bad samples, which stops a run, and the sums at its end."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field
from logging import getLogger
from pathlib import Path

from packhorse.distributed import Collectives
from packhorse.errors import FULL_DISK, ConfigError, PackhorseError, SystemFault
from packhorse.ledger import GONE, Ledger
from packhorse.loader.build import BatchReport
from packhorse.loader.state import LoaderState, Tally
from packhorse.plan.pack_plan import BAD_ROW, DROP_REASONS
from packhorse.types import Drop, World

logger = getLogger("packhorse.loader")

_NO_COUNTS = "part of the epoch was before a restart: set ledger_dir to have it"
_NO_STEPS = "part of the epoch was before a restart, and not all of its step files are in {}: see the warning"
_STEPS = ".steps"
_NO_GROUP = "this rank's part alone: ranks without a process group cannot add up"
# Good samples, which the settings leave no room for, or do not draw.
_GOOD = frozenset((*DROP_REASONS[:BAD_ROW], "not_sampled"))


class TooManyBad(PackhorseError):
    """More samples are bad than the run is to bear; the message has the reasons."""


class BadSampleBudget:
    """Stops the run when too many samples of an epoch are bad, or too many in a row.

    Args:
        samples: of the epoch, on all ranks.
        bad: of them were bad already when they were counted.
        ranks: that share them.
        share: the most that may be bad; None for any.
        consecutive_bad: the most that may fail one after the other on this rank; None for any.
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
        consecutive_bad: int | None,
        ledger: Ledger,
        lost: int = 0,
    ) -> None:
        self.samples, self.bad, self.share, self.consecutive_bad, self.ledger = (
            samples,
            bad,
            share,
            consecutive_bad,
            ledger,
        )
        self.ranks, self.counted = ranks, (lost, 0)
        self.check(0)

    def update(self, report: BatchReport) -> None:
        """Take a batch into account; one that stops the run is not delivered, and leaves no trace here.

        Raises:
            TooManyBad: that is enough.
        """
        lost, row = self.counted
        lost += len(report.lost)
        for inside in report.delivered:
            row = 0 if inside else row + 1
            if self.consecutive_bad is not None and row > self.consecutive_bad:
                raise TooManyBad(self._told(f"{row} samples in a row failed", "max_consecutive_bad"))
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
        value = f"{self.share:.2%}" if setting == "max_bad_share" else self.consecutive_bad
        return (
            f"{what}, more than {setting}={value} allows. By reason: {_by_reason(bad)}. "
            f"As: {examples}. `packhorse check` finds them all, with --fix it writes the data without them; "
            f"raise {setting} if that is meant"
        )


def _by_reason(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {number:,}" for reason, number in counts.items()) or "none"


@dataclass(frozen=True, slots=True)
class EpochStats:
    """Where the samples of an epoch went, over all ranks.

    Attributes:
        epoch: which one.
        rows: examples of the dataset.
        planned: of them are in the plan; the others are in the ledger.
        delivered: were delivered to a rank, counted batch by batch; None where that is not known
            (``unknown`` says why).
        lost: were planned and failed on the way; counted likewise.
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
    def dropped(self) -> int:
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
    mine: EpochStats, before: Tally | None, *, shard_data: bool, ledger: Ledger, ranks: Collectives
) -> EpochStats:
    """Add up the epoch over all ranks; the first rank logs it.

    Args:
        mine: what this rank was given since this process began with the epoch; ``reasons`` are found here.
        before: delivered and lost before that, over all ranks (``shard_data``: on this one); None if unknown.
        shard_data: rows and plan are this rank's own, so they are added up too.
        ledger: this rank's.
        ranks: to add up over; those that cannot talk tell their own part only.
    """
    parts = ranks.gather((mine, before))
    earlier = [one for _, one in parts] if shard_data else [before]
    reasons, remarks = _written(ledger, ranks, mine.epoch)
    everybody = ranks.is_distributed or ranks.world.size == 1
    known = everybody and None not in earlier
    total = Tally(sum(one.delivered or 0 for one, _ in parts), sum(one.lost for one, _ in parts))
    for one in earlier:
        total = total.plus(one or Tally())
    account = EpochStats(
        mine.epoch,
        sum(one.rows for one, _ in parts) if shard_data else mine.rows,
        sum(one.planned for one, _ in parts) if shard_data else mine.planned,
        total.delivered if known else None,
        total.lost,
        reasons,
        remarks,
        "" if known else _why_unknown(ledger) if everybody else _NO_GROUP,
    )
    if account.delivered is not None and account.delivered + account.lost != account.planned:
        raise PackhorseError(
            f"epoch {account.epoch} does not add up: {account.planned:,} samples planned, "
            f"{account.delivered:,} delivered and {account.lost:,} lost"
        )
    if ranks.world.rank == 0:
        logger.info("%s", account)
    return account


def _why_unknown(ledger: Ledger) -> str:
    return _NO_COUNTS if ledger.path is None else _NO_STEPS.format(ledger.path.parent)


class StepFile:
    """What each micro-step gave a rank, in a file next to the rank's ledger: one JSON line per micro-step.

    The resume state is the same on every rank, so it cannot hold what a single rank was given. A line holds
    the branch (see :meth:`LoaderState.branch`), the micro-step, how many samples were delivered and lost, and
    the step's ledger entries. A run that goes back to an earlier state writes the steps again: the last line
    of a step counts.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._appended = path, False

    @classmethod
    def of(cls, ledger: Ledger) -> StepFile | None:
        """The file of a rank, if its ledger has one."""
        return None if ledger.path is None else cls(ledger.path.with_suffix(_STEPS))

    def append(self, branch: str, step: int, tally: Tally, drops: Iterable[Drop] = ()) -> None:
        """Write one micro-step.

        Raises:
            SystemFault: that cannot be done.
        """
        line = json.dumps([branch, step, *tally, *map(asdict, drops)]).encode() + b"\n"
        try:
            if not self._appended:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                line = b"\n" + line  # a crash, or a full disk, may have cut off the last line of the file
            self._appended = False
            with open(self.path, "ab", buffering=0) as file:
                while line:  # a disk that is almost full takes a part of it, and refuses the rest
                    line = line[file.write(line) :]
            self._appended = True
        except OSError as error:
            why = FULL_DISK.get(error.errno or 0, error.strerror or str(error))
            raise SystemFault(
                f"{self.path} cannot be written: {why}. Make room (or give a ledger_dir that can be "
                "written) and start from the last checkpoint"
            ) from error

    def read(self, progress: LoaderState) -> list[dict[int, Tally]]:
        """For each segment of a progress: its used micro-steps that this file has."""
        return [{step: tally for step, (tally, _) in steps.items()} for steps in self._read(progress)]

    def drops(self, progress: LoaderState) -> list[Drop]:
        """The ledger entries of the used micro-steps."""
        return [drop for steps in self._read(progress) for _, drops in steps.values() for drop in drops]

    def _read(self, progress: LoaderState) -> list[dict[int, tuple[Tally, list[Drop]]]]:
        found: list[dict[int, tuple[Tally, list[Drop]]]] = [{} for _ in progress.segments]
        branches = {progress.branch(number): number for number in range(len(progress.segments))}
        if not self.path.exists():
            return found
        for line in self.path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a line that a crash cut off
                branch, step, delivered, lost, *drops = json.loads(line)
                number = branches.get(branch)
                if number is not None and step < progress.segments[number].steps:
                    entry = Tally(int(delivered), int(lost)), [Drop.from_json(drop) for drop in drops]
                    found[number][step] = entry
        return found


def counted_before(ledger: Ledger, ranks: Collectives, progress: LoaderState) -> Tally | None:
    """What all ranks were given in the used steps of a state, from their step files; the same on all ranks.

    Returns:
        None if a step of a rank is in no file that can be seen.
    """
    own = StepFile.of(ledger)
    if own is None or (ranks.world.size > 1 and not ranks.is_distributed):
        return None
    by_rank = {ranks.world.rank: own.read(progress)}
    if not ranks.world.rank:  # files of ranks that only an earlier, larger run had
        for rank, path in _rank_files(own.path.parent, _STEPS).items():
            if rank >= ranks.world.size:
                by_rank[rank] = StepFile(path).read(progress)
    for others in ranks.gather(by_rank):
        by_rank.update(others)
    total = Tally()
    for number, segment in enumerate(progress.segments):
        for rank in range(segment.world_size):
            steps = by_rank[rank][number] if rank in by_rank else {}
            if len(steps) != segment.steps:
                if not ranks.world.rank:
                    file = rank_file(own.path.parent, rank).with_suffix(_STEPS)
                    told = f"{file} has {len(steps):,} of {segment.steps:,} micro-steps before the restart"
                    logger.warning("%s: how many samples they delivered is not known", told)
                return None
            for tally in steps.values():
                total = total.plus(tally)
    return total


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


def restore_epoch(ledger: Ledger, epoch: int) -> None:
    """Take in what the file of a ledger has on an epoch from before a restart; it is not written again."""
    if ledger.path is not None and ledger.path.exists():
        ledger.restore(_read(ledger.path).of_epoch(epoch, alone=True))


def roll_back(ledger: Ledger, world: World, epoch: int, unused: Callable[[], Collection[str]]) -> None:
    """Forget what was recorded after a state: about samples that it says are to come, and later epochs.

    Args:
        ledger: this rank's.
        world: the first rank also looks after the files of ranks that are no more.
        epoch: of the state.
        unused: the names of these samples; asked for only if there is anything to take back.
    """
    if ledger.path is None:
        if ledger.last_epoch() >= epoch:
            ledger.roll_back(epoch, unused())
        return
    for path in _own_files(ledger.path.parent, world):
        own = ledger if path == ledger.path else Ledger(path)
        last = max(own.last_epoch(), _read(path).last_epoch() if path.exists() else -1)
        if last >= epoch:
            number = own.roll_back(epoch, unused())
            if number:
                logger.info("%s: %s entries after the state are taken back", path, number)


def restore_entries(ledger: Ledger, world: World, progress: LoaderState) -> None:
    """Write entries of the used steps of a state that the ledger files lack, from the step files.

    They are missing if the run went back to an earlier state, which took them back, and now goes on from a
    later one; or if the ledger file is damaged.
    """
    if ledger.path is None:
        return
    for steps in _own_files(ledger.path.parent, world, _STEPS):
        drops, file = StepFile(steps).drops(progress), steps.with_suffix(".jsonl")
        there = set(_read(file)) if drops and file.exists() else set()
        missing = [drop for drop in drops if drop not in there]
        if missing:
            Ledger(file).record_all(missing)
            logger.info("%s: %s entries from before the state are restored", file, len(missing))


def _own_files(folder: Path, world: World, suffix: str = ".jsonl") -> list[Path]:
    """The file of a rank, and for the first one also those of ranks that are no more."""
    files = [rank_file(folder, world.rank).with_suffix(suffix)]
    if not world.rank:
        files += [path for rank, path in _rank_files(folder, suffix).items() if rank >= world.size]
    return files


def _read(path: Path, epoch: int | None = None) -> Ledger:
    """The entries of a file (that belong to an epoch, or to all); a torn file has those that are whole."""
    try:
        whole = Ledger.load(path)
        return whole if epoch is None else whole.of_epoch(epoch)
    except ConfigError as error:
        logger.warning("%s: taken as empty", error)
        return Ledger()


_Reasons = tuple[dict[str, int], dict[str, int]]


def _reasons(ledger: Ledger) -> _Reasons:
    """How many samples were not delivered for each reason, and how many were though there is an entry."""
    return ledger.samples_by_reason(gone=True), ledger.samples_by_reason(gone=False)


def _written(ledger: Ledger, ranks: Collectives, epoch: int) -> _Reasons:
    """The reasons that the ledgers of all ranks have for an epoch.

    Files are read: they have what an earlier run, or a process that was killed, has recorded too. After a
    restart a sample may be in the files of two ranks; where the first rank sees all files, it counts once.
    """
    path = ledger.path
    own = _read(path, epoch) if path is not None and path.exists() else ledger.of_epoch(epoch)
    parts = ranks.gather((_reasons(own), len(own)))
    files = {} if path is None else _rank_files(path.parent)
    seen = {rank: _read(file, epoch) for rank, file in files.items()} if not ranks.world.rank else {}
    all_seen = all(not number or len(seen.get(rank, ())) >= number for rank, (_, number) in enumerate(parts))
    merged = _merged(seen.values()) if all_seen and seen else None
    of_files: _Reasons | None = ranks.gather(None if merged is None else _reasons(merged))[0]
    if of_files is not None:
        return of_files
    # In addition to those of this run: ranks that only an earlier, larger run had.
    found = [one for one, _ in parts]
    found += [_reasons(file) for rank, file in seen.items() if rank >= ranks.world.size]
    gone, kept = Counter[str](), Counter[str]()
    for one in found:
        gone.update(one[0])
        kept.update(one[1])
    return dict(gone.most_common()), dict(kept.most_common())


def _merged(ledgers: Iterable[Ledger]) -> Ledger:
    merged = Ledger()
    for ledger in ledgers:
        merged.merge(ledger)
    return merged


def _rank_files(folder: Path, suffix: str = ".jsonl") -> dict[int, Path]:
    numbers = {path: path.stem.partition("-")[2] for path in sorted(folder.glob(f"rank-*{suffix}"))}
    return {int(number): path for path, number in numbers.items() if number.isdigit()}
