"""What becomes of the samples of an epoch: the bad-sample budget, and the reconciled numbers at its end."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from logging import getLogger
from pathlib import Path
from types import MappingProxyType

from packhorse.distributed import Collectives
from packhorse.errors import ConfigError, PackhorseError, write_fault
from packhorse.ledger import GONE, Ledger
from packhorse.loader.state import LoaderState, Tally
from packhorse.plan.pack_plan import BAD_ROW, DROP_REASONS
from packhorse.types import BatchInfo, Drop, World

logger = getLogger("packhorse.loader")

_TOLERATED = 3  # bad samples, whatever their share
_LEDGER, _STEPS = ".jsonl", ".steps"
_NO_COUNTS = "part of the epoch was before a restart: set ledger_dir to have it"
_NO_STEPS = "part of the epoch was before a restart, and not all of its step files are in {}: see the warning"
_NO_GROUP = "this rank's part alone: ranks without a process group cannot be reconciled"
# Samples that are good, but excluded by the settings.
_GOOD = frozenset((*DROP_REASONS[:BAD_ROW], "not_sampled"))


class TooManyBad(PackhorseError):
    """Raised when the bad-sample budget (``max_bad_share``, ``max_consecutive_bad``) is exceeded.

    Attributes:
        setting: the name of the exceeded setting.
        bad: number of bad samples, or of consecutive ones.
        samples: samples of the epoch.
        reasons: bad samples by reason, on the rank that raises.
    """

    setting: str = ""
    bad: int = 0
    samples: int = 0
    reasons: Mapping[str, int] = MappingProxyType({})


def exceeds_share(bad: int, samples: int, max_share: float | None) -> bool:
    """Whether more samples are bad than ``max_bad_share`` allows.

    Three bad samples are tolerated whatever their share, unless ``max_share`` is 0.
    """
    if max_share is None or not samples or (bad <= _TOLERATED and max_share):
        return False
    return bad / samples > max_share  # divided, not multiplied: 29 of 100 are 0.29 to the bit


@dataclass
class BadSampleBudget:
    """Stops the run when too many samples of an epoch are bad, or too many consecutive ones.

    Attributes:
        samples: samples of the epoch, on all ranks.
        bad: those that were bad when they were counted.
        ranks: ranks that share them.
        max_share: maximum share of bad samples, see :func:`exceeds_share`; None for any.
        max_consecutive: maximum consecutive bad samples on this rank; None for any.
        ledger: has the reasons.
        lost: samples that failed on this rank before a restart.
        counters: samples that failed on this rank in this epoch, and consecutive ones at the end.
    """

    samples: int
    bad: int
    ranks: int
    max_share: float | None
    max_consecutive: int | None
    ledger: Ledger
    lost: int = 0
    counters: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.counters = self.lost, 0

    def update(self, info: BatchInfo) -> None:
        """Count a batch; one that stops the run (:class:`TooManyBad`) does not count."""
        lost, consecutive = self.counters
        lost += len(info.lost)
        for delivered in info.delivered:
            consecutive = 0 if delivered else consecutive + 1
            if self.max_consecutive is not None and consecutive > self.max_consecutive:
                what = f"{consecutive} consecutive samples failed"
                raise self._error(what, "max_consecutive_bad", consecutive, f"{self.max_consecutive}")
        if self.ranks == 1 or self.max_share == 0:
            self.check(lost)
        elif self.max_share is not None:
            # A rank may lose its part, and as much more as chance may assign to one of thousands. All ranks
            # together are checked at the end of the epoch.
            expected = self.max_share * self.samples / self.ranks
            if lost > expected + 5 * math.sqrt(expected) + 5:
                raise self._error(f"{lost:,} samples failed on this rank in this epoch", bad=lost)
        self.counters = lost, consecutive

    def is_exceeded(self, lost: int) -> bool:
        """Whether too many samples are bad if ``lost`` failed on all ranks together."""
        return exceeds_share(self.bad + lost, self.samples, self.max_share)

    def check(self, lost: int) -> None:
        """Raise :class:`TooManyBad` if too many samples are bad; see :meth:`is_exceeded`."""
        if self.is_exceeded(lost):
            bad, failed = self.bad + lost, f", {lost:,} of them failed in this epoch" if lost else ""
            raise self._error(f"{bad:,} of {self.samples:,} samples cannot be used{failed}", bad=bad)

    def _error(
        self, what: str, setting: str = "max_bad_share", bad: int = 0, limit: str | None = None
    ) -> TooManyBad:
        drops = (drop for drop in self.ledger if drop.action in GONE and drop.reason not in _GOOD)
        examples = "; ".join(f"{drop.key}: {drop.reason}, {drop.detail}" for drop in deque(drops, maxlen=3))
        by_reason = self.ledger.samples_by_reason(gone=True).items()
        reasons = {reason: count for reason, count in by_reason if reason not in _GOOD}
        message = (
            f"{what}, more than {setting}={limit or f'{self.max_share:.2%}'} allows. By reason: "
            f"{_format_reasons(reasons)}. For example {examples}. The ledger lists all of them. For data in "
            f"files, `packhorse check` does so before training and `packhorse check --fix` writes the data "
            f"without them; or raise {setting}"
        )
        error = TooManyBad(message)
        error.setting, error.bad, error.samples, error.reasons = setting, bad, self.samples, reasons
        return error


def _format_reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in counts.items()) or "none"


@dataclass(frozen=True, slots=True)
class EpochStats:
    """What became of the samples of an epoch, over all ranks.

    Attributes:
        epoch: the epoch.
        rows: examples of the dataset.
        planned: examples in the plan; the others are in the ledger.
        delivered: samples delivered to a rank, counted batch by batch; None if unknown (see ``unknown``).
        lost: samples that were planned and failed, counted likewise.
        reasons: samples that were not delivered, by reason: those in no plan, and those that failed in this
            epoch.
        remarks: samples that were delivered with a ledger entry (cut, nothing supervised), by reason.
        unknown: why ``delivered`` is None, and what to do; empty if it is known.
        supervised: supervised tokens of the planned examples, as they were counted.
        supervised_weight: the sum of their loss weights.
    """

    epoch: int
    rows: int
    planned: int
    delivered: int | None
    lost: int
    reasons: dict[str, int] = field(default_factory=dict)
    remarks: dict[str, int] = field(default_factory=dict)
    unknown: str = ""
    supervised: int = 0
    supervised_weight: float = 0.0

    @property
    def dropped(self) -> int:
        """Rows that are in no pack: bad when they were counted, too long, empty."""
        return self.rows - self.planned

    def __str__(self) -> str:
        delivered = f", delivered unknown ({self.unknown})" if self.unknown else ""
        if self.delivered is not None:
            delivered = f", {self.delivered:,} delivered"
        known = " in the known part" if self.delivered is None else ""
        lost = f", {self.lost:,} failed{known}" if self.lost else ""
        lines = [f"epoch {self.epoch}: {self.rows:,} rows, {self.planned:,} in the plan{delivered}{lost}"]
        lines += [f"  {reason}: {count:,} of {self.rows:,}" for reason, count in self.reasons.items()]
        if self.supervised_weight != self.supervised:
            weight, tokens = f"{self.supervised_weight:,.1f}", f"{self.supervised:,}"
            lines.append(f"  loss weights sum to {weight} over {tokens} supervised tokens")
        if self.remarks:
            lines.append(f"  delivered with a remark: {_format_reasons(self.remarks)}")
        return "\n".join(lines)


def reconcile(
    own: EpochStats, before: Tally | None, *, shard_data: bool, ledger: Ledger, ranks: Collectives
) -> EpochStats:
    """Sum the epoch over all ranks and compare it with the plan; rank 0 logs the result.

    ``own`` is what this rank was given since this process started the epoch, without ``reasons``. ``before``
    are samples delivered and lost before that, over all ranks (``shard_data``: on this one); None if unknown.
    With ``shard_data`` rows and plan are this rank's own and are summed too. Without a process group the
    result is this rank's part. Raises if samples were planned but neither delivered nor lost.
    """
    parts = ranks.gather((own, before))
    stats = [part for part, _ in parts]
    earlier = [tally for _, tally in parts] if shard_data else [before]
    reasons, remarks = _count_reasons(ledger, ranks, own.epoch)
    own = replace(own, reasons=reasons, remarks=remarks)
    unknown = "" if ranks.reaches_all_ranks else _NO_GROUP
    if ranks.reaches_all_ranks and None in earlier:
        unknown = _NO_COUNTS if ledger.path is None else _NO_STEPS.format(ledger.path.parent)
    total = Tally(sum(part.delivered or 0 for part in stats), sum(part.lost for part in stats))
    for tally in earlier:
        total = total.plus(tally or Tally())
    if shard_data:
        names = ("rows", "planned", "supervised", "supervised_weight")
        own = replace(own, **{name: sum(getattr(part, name) for part in stats) for name in names})
    delivered = None if unknown else total.delivered
    summed = replace(own, delivered=delivered, lost=total.lost, unknown=unknown)
    if summed.delivered is not None and summed.delivered + summed.lost != summed.planned:
        raise PackhorseError(
            f"epoch {summed.epoch} does not reconcile: {summed.planned:,} samples planned, "
            f"{summed.delivered:,} delivered and {summed.lost:,} lost"
        )
    if ranks.world.rank == 0:
        logger.info("%s", summed)
    return summed


class StepFile:
    """What each micro-step gave a rank, in a file next to the rank's ledger: one JSON line per micro-step.

    The resume state is the same on every rank, so it cannot hold what a single rank was given. A line holds
    the branch (see :meth:`LoaderState.branch`), the micro-step, how many samples were delivered and lost, and
    the step's ledger entries. A run that resumes from an earlier state rewrites steps: the last line of a
    step counts.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._appended = path, False

    @classmethod
    def of(cls, ledger: Ledger) -> StepFile | None:
        """Return the step file of a rank, if its ledger has a file."""
        return None if ledger.path is None else cls(ledger.path.with_suffix(_STEPS))

    def append(self, branch: str, step: int, tally: Tally, drops: Iterable[Drop] = ()) -> None:
        """Write one micro-step; raise :class:`SystemFault` if the file cannot be written."""
        line = json.dumps([branch, step, *tally, *map(asdict, drops)]).encode() + b"\n"
        try:
            if not self._appended:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                line = b"\n" + line  # a crash, or a full disk, may have cut off the last line of the file
            self._appended = False
            with open(self.path, "ab", buffering=0) as file:
                while line:  # a disk that is almost full takes only a part of it
                    line = line[file.write(line) :]
            self._appended = True
        except OSError as error:
            remedy = "Free disk space or choose a writable ledger_dir, and resume from the last checkpoint"
            raise write_fault(error, self.path, remedy) from error

    def read(self, state: LoaderState) -> list[dict[int, tuple[Tally, list[Drop]]]]:
        """Return, for each segment of a state, its used micro-steps with their tallies and ledger entries."""
        by_segment: list[dict[int, tuple[Tally, list[Drop]]]] = [{} for _ in state.segments]
        segments = {state.branch(segment): segment for segment in range(len(state.segments))}
        for line in self.path.read_bytes().splitlines() if self.path.exists() else ():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a line that a crash cut off
                branch, step, delivered, lost, *drops = json.loads(line)
                segment = segments.get(branch)
                if segment is not None and step < state.segments[segment].steps:
                    entry = Tally(int(delivered), int(lost)), [Drop.from_json(drop) for drop in drops]
                    by_segment[segment][step] = entry
        return by_segment


def count_used(ledger: Ledger, ranks: Collectives, state: LoaderState) -> Tally | None:
    """Sum what all ranks were given in the used steps of a state; None if a step file lacks a step."""
    own = StepFile.of(ledger)
    if own is None or not ranks.reaches_all_ranks:
        return None
    by_rank = {ranks.world.rank: own.read(state)}
    if not ranks.world.rank:  # files of ranks that only an earlier, larger run had
        for rank, path in _rank_files(own.path.parent, _STEPS).items():
            if rank >= ranks.world.size:
                by_rank[rank] = StepFile(path).read(state)
    for others in ranks.gather(by_rank):
        by_rank.update(others)
    total = Tally()
    for number, segment in enumerate(state.segments):
        for rank in range(segment.world_size):
            steps = by_rank[rank][number] if rank in by_rank else {}
            if len(steps) != segment.steps:
                if not ranks.world.rank:
                    has = f"{len(steps):,} of {segment.steps:,}"
                    file = rank_file(own.path.parent, rank, _STEPS)
                    logger.warning(
                        "%s has %s micro-steps before the restart: delivered is unknown", file, has
                    )
                return None
            for tally, _ in steps.values():
                total = total.plus(tally)
    return total


# Ledger files of all ranks.


def rank_file(folder: str | os.PathLike[str], rank: int, suffix: str = _LEDGER) -> Path:
    """Return the path of a rank's ledger file."""
    return Path(folder) / f"rank-{rank:05d}{suffix}"


def count_lost(ledger: Ledger, epoch: int) -> int:
    """Count the samples of an epoch that failed before a restart, from the file of a ledger."""
    entries = _read_ledger(ledger.path, epoch)
    return entries.lost() - entries.of_epoch(-1).lost()  # entries of no epoch: rows that were never planned


def restore_epoch(ledger: Ledger, epoch: int) -> None:
    """Read the entries about an epoch from the file of a ledger; they are not rewritten to it."""
    ledger.restore(_read_ledger(ledger.path).of_epoch(epoch, alone=True))


def roll_back(ledger: Ledger, world: World, epoch: int, remaining: Callable[[], Collection[str]]) -> None:
    """Remove entries that are later than a state: about its remaining samples, and about later epochs.

    Rank 0 also rolls back the files of ranks that only an earlier, larger run had. ``remaining`` returns the
    keys of these samples; it is called only if there is anything to roll back.
    """
    if ledger.path is None:
        if ledger.last_epoch() >= epoch:
            ledger.roll_back(epoch, remaining())
        return
    for path in _own_files(ledger.path.parent, world):
        own = ledger if path == ledger.path else Ledger(path)
        if max(own.last_epoch(), _read_ledger(path).last_epoch()) >= epoch:
            removed = own.roll_back(epoch, remaining())
            if removed:
                logger.info("%s: %s entries after the state are rolled back", path, removed)


def restore_entries(ledger: Ledger, world: World, state: LoaderState) -> None:
    """Write entries of the used steps of a state that the ledger files lack, from the step files.

    They are missing if the run resumed from an earlier state, which rolled them back, and now resumes from a
    later one; or if the ledger file is damaged.
    """
    if ledger.path is None:
        return
    for steps in _own_files(ledger.path.parent, world, _STEPS):
        segments, file = StepFile(steps).read(state), steps.with_suffix(_LEDGER)
        drops = [drop for segment in segments for _, entries in segment.values() for drop in entries]
        present = set(_read_ledger(file)) if drops else set()
        missing = [drop for drop in drops if drop not in present]
        if missing:
            Ledger(file).record_all(missing)
            logger.info("%s: %s entries from before the state are restored", file, len(missing))


def _own_files(folder: Path, world: World, suffix: str = _LEDGER) -> list[Path]:
    """Return the file of a rank; for rank 0 also those of ranks that only an earlier, larger run had."""
    files = [rank_file(folder, world.rank, suffix)]
    if not world.rank:
        files += [path for rank, path in _rank_files(folder, suffix).items() if rank >= world.size]
    return files


def _rank_files(folder: Path, suffix: str = _LEDGER) -> dict[int, Path]:
    numbers = {path: path.stem.partition("-")[2] for path in sorted(folder.glob(f"rank-*{suffix}"))}
    return {int(number): path for path, number in numbers.items() if number.isdigit()}


def _read_ledger(path: Path | None, epoch: int | None = None) -> Ledger:
    """Read a ledger file (entries of an epoch and of no epoch); empty if missing or unreadable."""
    if path is None or not path.exists():
        return Ledger()
    try:
        whole = Ledger.load(path)
    except ConfigError as error:
        logger.warning("%s: treated as empty", error)
        return Ledger()
    return whole if epoch is None else whole.of_epoch(epoch)


_Reasons = tuple[dict[str, int], dict[str, int]]


def _by_reason(ledger: Ledger) -> _Reasons:
    """Count the samples that were not delivered, and those that were, by the reason of their entries."""
    return ledger.samples_by_reason(gone=True), ledger.samples_by_reason(gone=False)


def _count_reasons(ledger: Ledger, ranks: Collectives, epoch: int) -> _Reasons:
    """Count the reasons that the ledgers of all ranks have for an epoch.

    Reads the files, which also have the entries of an earlier run and of a process that was killed. After a
    restart a sample may be in the files of two ranks; if rank 0 can read all files, it counts once.
    """
    path = ledger.path
    own = _read_ledger(path, epoch) if path is not None and path.exists() else ledger.of_epoch(epoch)
    parts = ranks.gather((_by_reason(own), len(own)))
    files = {} if path is None or ranks.world.rank else _rank_files(path.parent)
    seen = {rank: _read_ledger(file, epoch) for rank, file in files.items()}
    merged: Ledger | None = None
    if seen and all(len(seen.get(rank, ())) >= entries for rank, (_, entries) in enumerate(parts)):
        merged = Ledger()
        for part in seen.values():
            merged.merge(part)
    of_files: _Reasons | None = ranks.gather(None if merged is None else _by_reason(merged))[0]
    if of_files is not None:
        return of_files
    counts = [reasons for reasons, _ in parts]
    # In addition to those of this run: ranks that only an earlier, larger run had.
    counts += [_by_reason(file) for rank, file in seen.items() if rank >= ranks.world.size]
    gone, kept = Counter[str](), Counter[str]()
    for gone_by_reason, kept_by_reason in counts:
        gone.update(gone_by_reason)
        kept.update(kept_by_reason)
    return dict(gone.most_common()), dict(kept.most_common())
