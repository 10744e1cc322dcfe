"""The front door: data in, batches out, each sample exactly once, and a run can be taken up anywhere.

Opening counts what was not counted before, plans the epoch and deals its packs to the ranks. Batches are then
built in workers. How far the run has come is a handful of numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from logging import getLogger
from pathlib import Path
from typing import Any

from packhorse.count.columns import CountColumns
from packhorse.distributed import Collectives
from packhorse.errors import ConfigError
from packhorse.ledger import Ledger
from packhorse.loader.build import BatchReport, Built, make_builder
from packhorse.loader.config import LoaderConfig
from packhorse.loader.epoch_stats import (
    BadSampleBudget,
    EpochStats,
    StepFile,
    TooManyBad,
    close_epoch,
    counted_before,
    lost_before,
    rank_file,
    restore_entries,
    restore_epoch,
    roll_back,
)
from packhorse.loader.metrics import Metrics
from packhorse.loader.startup import check_batches, open_data, start_up
from packhorse.loader.state import LoaderState, Tally, describe_state
from packhorse.loader.worker_pool import WorkerPool, WorkerSettings
from packhorse.plan.pack_plan import PackPlan
from packhorse.plan.schedule import BatchLayout, Packs, PackSchedule
from packhorse.types import Batch, Drop, MediaMask, WorkItem, World


@dataclass
class Epoch:
    """The epoch that is being delivered.

    Attributes:
        packs: of its plan.
        schedule: who gets them when.
        guard: stops it when too much fails.
        first: the micro-step at which this process began with it.
        before: what was delivered and lost before ``first``, over all ranks; None if unknown.
        tallies: what this rank was given since ``first``, up to each micro-step.
        over: whether all of it was delivered.
    """

    packs: Packs
    schedule: PackSchedule
    guard: BadSampleBudget
    first: int
    before: Tally | None
    tallies: list[Tally] = field(default_factory=lambda: [Tally()])
    over: bool = False


def work_item_of(
    schedule: PackSchedule, epoch: int, rank: int, media_mask: MediaMask | None, step: int
) -> WorkItem:
    """What a rank is to build in a step; ``media_mask`` of None is what any rank has in it."""
    packs = tuple(map(tuple, schedule.samples(step, rank)))
    return WorkItem(epoch, step, packs, schedule.media_mask(step) if media_mask is None else media_mask)


logger = getLogger("packhorse.loader")


class Loader:
    """Batches of a dataset for one rank; iterate over it.

    Each sample of the plan reaches exactly one rank exactly once in an epoch, or is in the ledger with its
    reason. All ranks make the same number of steps. ``iter`` goes on where the last one stopped; when the
    epoch is over, the next ``iter`` begins the next one.

    Made by :meth:`LoaderConfig.build` or :func:`packhorse.load`.

    Attributes:
        config: the settings.
        world: this rank's place.
        dataset: the examples.
        counts: their exact counts.
        model_name: class of the model (or of its config) that batches are made for; ``"unchecked"`` if the
            user opted out of checking one.
        ledger: what was dropped on this rank, and why; after a resume with ``ledger_dir`` also what the
            rank's file has on the epoch that goes on.
        metrics: fill, speed and waiting of the last steps.
        last: the ``info`` of the batch delivered last; None before the first.
        account: where the samples of the last finished epoch went; None before that.
    """

    def __init__(
        self,
        config: LoaderConfig,
        processor: Any,
        *,
        model: Any = None,
        world: World | None = None,
        group: Any = None,
        counts: CountColumns | None = None,
    ) -> None:
        self.config = config
        self.world = World.detect() if world is None else world
        self._ranks = Collectives(self.world, group)
        # What fails on one rank raises on all of them; steps that may take long have their own names.
        self._ranks.run_on_all_ranks("build the loader", partial(self._build, processor, model, counts))

    def _build(self, processor: Any, model: Any, counts: CountColumns | None) -> None:
        config, folder = self.config, self.config.ledger_dir
        # Buffer entries until iteration starts, so a loader that fails validation never writes to its file.
        self.ledger = Ledger(None if folder is None else rank_file(Path(folder), self.world.rank)).buffer()
        opened = open_data(config, processor, model, self._ranks, self.ledger)
        check_batches(config, opened)
        self._start = start_up(config, opened, self._ranks, counts)
        self.dataset, self.processor, self.counts = opened.dataset, opened.processor, self._start.counts
        self.model_name = opened.model.name
        self._samples, self._planner = self._start.samples, self._start.planner
        # Schedule all packs over all ranks, or this rank's own rows on itself.
        self._dealing = World() if config.shard_data else self.world
        self._layout = BatchLayout(
            self._dealing.size, config.batch_size, config.gradient_accumulation_steps
        ).check()
        self.metrics = Metrics(config.gradient_accumulation_steps)
        self.last: BatchReport | None = None
        self.account: EpochStats | None = None
        self._told = False
        self._steps = StepFile.of(self.ledger)
        self._not_delivered: tuple[Drop, ...] = ()  # entries of a batch at which the run was stopped
        self._progress = LoaderState().under(self._layout)
        self._now = self._ranks.run_on_all_ranks("plan the packs", self._plan_epoch)

    # What there is.

    def __len__(self) -> int:
        """Micro-steps of the epoch under the present shape; the same on every rank.

        After a resume under another shape these are the steps of what was left; else of the whole epoch.
        """
        return len(self._now.schedule)

    def __repr__(self) -> str:
        size = f"packs of {self.config.pack_size:,}" if self.config.mode == "pack" else "padded samples"
        return (
            f"<Loader: {len(self.dataset):,} rows, {size} tokens, {len(self):,} micro-steps of "
            f"{self.config.batch_size}, rank {self.world.rank} of {self.world.size}, epoch {self.epoch}, "
            f"step {self.cursor:,}, model {self.model_name}>"
        )

    @property
    def plan(self) -> PackPlan:
        """The packs of this epoch."""
        return self._now.packs.plan

    @property
    def plan_key(self) -> str:
        """Names the plan: a state can be loaded where it is the same."""
        return self._planner.name

    @property
    def epoch(self) -> int:
        """The epoch that is, or was last, delivered."""
        return self._progress.epoch

    @property
    def cursor(self) -> int:
        """Micro-steps of this epoch that were delivered under the present shape."""
        return self._progress.cursor

    @property
    def remaining(self) -> int:
        """Micro-steps of this epoch that are still to come."""
        return len(self) - self.cursor

    def key(self, index: int) -> str:
        """The name of an example: dataset and row, ``coco/812``."""
        return self._samples.key(index)

    def straggler_ratio(self) -> float:
        """What the slowest rank of a step takes over the mean, as planned, over the epoch."""
        return self._now.schedule.straggler_ratio()

    def describe(self) -> str:
        """The plan, the steps and what was dropped, for reading."""
        size, free = self.config.pack_size, self._planner.reserve_in(self.plan)
        kept = f"; {free:,} of the {size:,} tokens of a pack are kept free for a placeholder" if free else ""
        lines = [
            f"{len(self.dataset):,} rows, plan {self.plan_key}, epoch {self.epoch}{kept}",
            *self._planner.describe(self.plan),
            f"{len(self):,} micro-steps of {self._layout.batch_size} x {self.world.size} ranks, straggler "
            f"ratio {self.straggler_ratio():.4f}",
            self.ledger.summary(len(self.dataset)),
        ]
        return "\n".join(lines)

    # Batches.

    def __iter__(self) -> Iterator[Batch]:
        """The batches of this epoch that were not delivered yet, or those of the next one."""
        if self._now.over:
            self._go_to(LoaderState(self.epoch + 1))
        self.metrics.paused()
        return self._batches(self._now)

    def _batches(self, epoch: Epoch) -> Iterator[Batch]:
        if self.ledger.is_buffering:  # the run begins here, perhaps in the folder of an earlier one
            try:
                roll_back(self.ledger, self.world, self.epoch, self._unused)
            except OSError as error:  # raised again, on all ranks, when the epoch is reconciled
                logger.warning("the ledger of an earlier run cannot be rolled back: %s", error)
            self.ledger.flush()
        self._roll_back_stopped()
        asked = time.perf_counter()
        for built in self._feed.batches(self._work_items(epoch), self.cursor, len(epoch.schedule)):
            if epoch is not self._now:
                return  # set_epoch or load_state_dict in the middle: this iterator is of the past
            self._hand_out(built, time.perf_counter() - asked)
            yield built.batch
            asked = time.perf_counter()

    def _work_items(self, epoch: Epoch) -> Callable[[int], WorkItem]:
        """What orders the batches of an epoch.

        It holds on to the epoch and not to the loader, whose workers end with the last reference to it.
        """
        media_mask: MediaMask | None = MediaMask.NONE
        if self.config.placeholder == "auto":
            # With shards of their own ranks do not know what the others have in this step.
            media_mask = self._start.media_mask if self.config.shard_data else None
        return partial(work_item_of, epoch.schedule, self.epoch, self._dealing.rank, media_mask)

    def _hand_out(self, built: Built, waited: float) -> None:
        """Count a batch as delivered, and reconcile the epoch after its last one.

        Raises:
            PackhorseError: the run stops here, and the batch does not count; its entries say why until they
                are rolled back by iterating again, or by resuming.
        """
        now, before = self._now, (self._progress, self.last)
        counted, delivered = now.guard.counted, len(now.tallies)
        try:
            self._note(built, waited)
            if not self.remaining:  # now: many trainers never ask for the end
                self._ranks.run_on_all_ranks("reconcile the epoch", self._add_up)
                now.over = True
        except BaseException:
            self._progress, self.last = before
            now.guard.counted = counted
            del now.tallies[delivered:]
            self._not_delivered = built.drops
            raise

    def _note(self, built: Built, waited: float) -> None:
        """Count a batch as delivered, with its ledger entries."""
        report, now = built.report, self._now
        self.ledger.record_all(built.drops)
        now.guard.update(report)
        tally = Tally(len(report.samples), len(report.lost))
        if self._steps is not None:
            branch = self._progress.branch(len(self._progress.segments) - 1)
            self._steps.append(branch, report.step, tally, built.drops)
        costs = now.schedule.costs(report.step)
        mean = float(costs.mean())
        self._progress = self._progress.at(report.step + 1)
        now.tallies.append(now.tallies[-1].plus(tally))
        self.last = report
        self.metrics.delivered(report, float(costs.max()) / mean if mean else 1.0, waited)

    def _roll_back_stopped(self) -> None:
        """Forget the entries of a batch that was not delivered: it is built again."""
        keys, self._not_delivered = {drop.key for drop in self._not_delivered}, ()
        if keys:
            self.ledger.roll_back(self.epoch, keys)

    def _add_up(self) -> None:
        now = self._now
        mine = EpochStats(self.epoch, len(self.dataset), len(self.plan.indices), *now.tallies[-1])
        self.account = close_epoch(
            mine, now.before, shard_data=self.config.shard_data, ledger=self.ledger, ranks=self._ranks
        )
        if not self.config.shard_data:
            now.guard.check(self.account.lost)

    def close(self) -> None:
        """End the workers; iterating again starts new ones."""
        if "_feed" in vars(self):
            self._feed.close()

    @cached_property
    def _feed(self) -> WorkerPool:
        """Builds batches, in workers; made when the first batch is asked for."""
        config, samples = self.config, self._samples
        settings = WorkerSettings(
            config.num_workers,
            config.prefetch_factor,
            config.pin_memory,
            config.timeout,
            config.multiprocessing_context,
        )
        return WorkerPool(make_builder(config, samples, self._start.opened.model), settings, samples.key)

    # Epochs and resuming.

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; in the middle of that epoch nothing changes.

        What the ledger has on an earlier pass over that epoch, and on later ones, is rolled back; in a loader
        that has delivered no batch yet, with its first one.
        """
        if epoch < 0:
            raise ConfigError(f"epoch {epoch}: expected 0 or more")
        if epoch != self.epoch or self._now.over:
            self._go_to(LoaderState(epoch))
            if not self.ledger.is_buffering:
                roll_back(self.ledger, self.world, epoch, self._unused)

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """How far the run has come: small, plain, and the same on every rank (but with ``shard_data``).

        Args:
            consumed: micro-steps of this epoch that count as used since the loader was built or loaded; None
                for all that were delivered. For trainers that fetch batches ahead of training on them.

        Raises:
            ConfigError: more than were delivered.
        """
        now = self._now
        delivered = self.cursor - now.first
        if consumed is None:
            consumed = delivered
        elif not 0 <= consumed <= delivered:
            raise ConfigError(f"{consumed=}: {delivered} micro-steps of this epoch were delivered")
        used = now.before
        if used is not None and consumed:
            # What other ranks were given is in their step files, see `counted_before`.
            used = used.plus(now.tallies[consumed]) if self._dealing.size == 1 else None
        progress = replace(self._progress.at(now.first + consumed), used=used)
        planner = self._planner
        state = progress.to_dict(self.plan_key, planner.key, planner.contents) | {"packs": now.packs.digest}
        if self.config.shard_data:
            state["shard"] = self._shard()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken: the packs not used by then are dealt to this world.

        All ranks have to call it. Costs one dealing of the epoch (half a second for a million packs); no
        sample is touched.

        Raises:
            ConfigError: the ranks load different states; the data have changed, or the state belongs to
                another plan (both are named); or it is no state of a loader.
        """
        before = self._progress, self._now
        try:
            self._ranks.run_on_all_ranks("load the state", partial(self._go_on_from, state))
        except BaseException:
            self._progress, self._now = before
            raise

    def _go_on_from(self, state: Mapping[str, Any]) -> None:
        planner, shard_data = self._planner, self.config.shard_data
        self._ranks.assert_same(  # they would go on with different batches
            "load different states",
            describe_state(state, own_rows=shard_data),
            "A run that is killed while its ranks write their checkpoints leaves such states: load the last "
            "checkpoint that all ranks have finished",
        )
        if shard_data and state.get("shard") != self._shard():
            raise ConfigError(
                "with shard_data=True each rank has a plan of its own: the state is of [rank, world size, "
                f"batch size, accumulation] {state.get('shard')}, this is {self._shard()}. Without "
                "shard_data any of them can go on"
            )
        progress = LoaderState.from_dict(state, self.plan_key, planner.key, planner.contents)
        self._go_to(progress)
        planned = self._now.packs.digest
        if state.get("packs") != planned:
            raise ConfigError(
                f"the state belongs to packs {state.get('packs')}, this loader has planned packs "
                f"{planned} from the same counts: another version of scipy may do that. Go on "
                "with the version that the state was saved with, or set effort=0 from the beginning"
            )
        used = progress.used  # delivered and lost in the used steps: from the state, else from step files
        if used is None and not shard_data:
            used = counted_before(self.ledger, self._ranks, progress)
        self._now.before, self._progress = used, replace(self._progress, used=used)
        # Roll the ledger back, or forward, to the state.
        roll_back(self.ledger, self.world, progress.epoch, self._unused)
        restore_entries(self.ledger, self.world, progress)
        if self.remaining:
            restore_epoch(self.ledger, progress.epoch)
            self._now.guard = self._guard(self.plan)
        else:  # the epoch was over
            self._go_to(LoaderState(self.epoch + 1))

    def _unused(self) -> set[str]:
        """The names of the samples of this epoch that are still to come."""
        schedule = self._now.schedule
        units = schedule.table[self.cursor :].reshape(-1).tolist()
        return {self.key(int(index)) for unit in units if unit >= 0 for index in schedule.units.samples(unit)}

    def _shard(self) -> list[int]:
        """What has to stay the same where each rank has a plan of its own."""
        return [
            self.world.rank,
            self.world.size,
            self._layout.batch_size,
            self._layout.gradient_accumulation_steps,
        ]

    def _go_to(self, progress: LoaderState) -> None:
        packs = self._now.packs if progress.epoch == self.epoch else None
        before = self._progress
        self._progress = progress.under(self._layout)
        try:
            plan = partial(self._plan_epoch, packs)
            self._now = self._ranks.run_on_all_ranks("plan the packs", plan)
        except BaseException:
            self._progress = before
            raise
        self._not_delivered = ()

    def _plan_epoch(self, packs: Packs | None = None) -> Epoch:
        """The epoch of the present progress, planned (unless it is) and scheduled."""
        progress = self._progress
        if packs is None:
            packs = Packs(self._planner.plan(progress.epoch), self._planner.sample_info)
        if not self.config.shard_data:
            advice = "Install the same version of scipy on all of them, or set effort=0"
            self._ranks.assert_same("have different packs", packs.digest, advice)
        guard = self._guard(packs.plan)
        return Epoch(packs, self._dealt(packs, progress), guard, progress.cursor, progress.used)

    def _dealt(self, packs: Packs, progress: LoaderState) -> PackSchedule:
        deal = partial(PackSchedule, packs, seed=self.config.seed, epoch=progress.epoch)
        if not self.config.shard_data or self.world.size == 1:
            return deal(progress.segments)
        if not self._ranks.is_distributed:
            raise ConfigError(
                f"shard_data=True on {self.world}: the ranks have to agree on the number of steps. "
                "Initialise torch.distributed before building the loader and, if its default group has other "
                "ranks, pass group=; or leave shard_data out"
            )
        # As many as the rank with the most, which is the same whenever it is asked.
        natural = len(deal(LoaderState().under(self._layout).segments))
        most = max(self._ranks.gather(natural))
        return deal(progress.segments, at_least=most)

    def _guard(self, plan: PackPlan) -> BadSampleBudget:
        self._planner.check_overlong(plan)
        if self.config.on_bad == "raise":
            self._planner.check_bad()
        # Which samples are in no pack depends on their counts alone: it is reported once.
        if not self._told and (self.world.rank == 0 or self.config.shard_data):
            self._planner.warn_of_overlong(plan)
            self.ledger.record_all(self._planner.dropped(plan))
        self._told = True
        if not len(plan):
            told = self._dropped(plan)
            first = next(iter(told), None)
            example = "" if first is None else f"\nas {first.key}: {first.detail}"
            raise ConfigError(
                f"no example can be used:\n{told.summary(len(self.dataset))}{example}\n"
                "`packhorse check` says what to do"
            )
        bad = int((~self.counts.ok).sum())
        config, samples, ranks = self.config, len(self.counts), self._dealing.size
        guard = partial(
            BadSampleBudget, samples, bad, ranks, config.max_bad_share, config.max_consecutive_bad
        )
        lost, used = 0, self._progress.used
        if used is not None and ranks == 1:
            lost = used.lost
        elif self._progress.cursor:
            lost = lost_before(self.ledger, self.epoch)
        try:
            return guard(self.ledger, lost)
        except TooManyBad:
            pass  # said below, once and with the rows, which the ledger of the first rank alone has
        return guard(self._dropped(plan))

    def _dropped(self, plan: PackPlan) -> Ledger:
        """What is in no pack; the ledger of the first rank alone has it."""
        ledger = Ledger()
        ledger.record_all(self._planner.dropped(plan))
        return ledger
