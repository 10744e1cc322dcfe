"""The loader: data in, batches out, each sample exactly once, resumable at any step.

Opening counts what was not counted before, plans the epoch and schedules its packs. Batches are then built in
workers. The resume state is a handful of integers.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from packhorse.chat import chat_templates
from packhorse.count.columns import CountColumns
from packhorse.distributed import Collectives
from packhorse.errors import ConfigError
from packhorse.families.router_loss import has_router_loss
from packhorse.ledger import Ledger
from packhorse.loader.build import Built, PackBuilder, PadBuilder
from packhorse.loader.config import LoaderConfig
from packhorse.loader.epoch_stats import (
    BadSampleBudget,
    EpochStats,
    StepFile,
    count_lost,
    count_used,
    rank_file,
    reconcile,
    restore_entries,
    restore_epoch,
    roll_back,
)
from packhorse.loader.measured_cost import MeasuredEpoch, StepTimes, fit_epoch
from packhorse.loader.metrics import Metrics
from packhorse.loader.startup import (
    attn_backend,
    check_batches,
    compact_samples,
    describe_data,
    describe_remedy,
    open_data,
    start_up,
)
from packhorse.loader.state import LoaderState, Tally, describe_state
from packhorse.loader.worker_pool import WorkerPool, default_num_workers
from packhorse.plan.cost_model import CostWeights
from packhorse.plan.pack_plan import PackPlan
from packhorse.plan.schedule import BatchLayout, Packs, PackSchedule
from packhorse.types import Batch, Drop, Floats, MediaMask, WorkItem, World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from packhorse.chat import Processor

logger = logging.getLogger("packhorse.loader")


@dataclass
class Epoch:
    """The epoch that is being delivered.

    Attributes:
        packs: its packs.
        schedule: assigns them to micro-steps and ranks.
        budget: stops the run if too many samples are bad.
        first: the micro-step at which this process started.
        before: samples delivered and lost before ``first``, over all ranks; None if unknown.
        tallies: samples delivered to this rank and lost since ``first``, up to each micro-step.
        over: whether all of it was delivered.
    """

    packs: Packs
    schedule: PackSchedule
    budget: BadSampleBudget
    first: int
    before: Tally | None
    tallies: list[Tally] = field(default_factory=lambda: [Tally()])
    over: bool = False


class Loader:
    """Iterate over it for the batches of one rank.

    Each planned sample reaches exactly one rank exactly once per epoch, or is in the ledger with a reason.
    All ranks have the same number of steps. ``iter`` continues where the last iterator stopped; after the end
    of an epoch it starts the next one.

    Made by :meth:`LoaderConfig.build` or :func:`packhorse.load`.

    Attributes:
        config: the settings.
        world: this process's rank and the number of ranks.
        dataset: the examples.
        processor: encodes them.
        counts: their exact token counts.
        num_workers: processes that build batches.
        model_name: class of the model (or config) that batches are made for; ``"unchecked"`` if the caller
            opted out of checking it.
        attn_implementation: attention backend that packs are collated for; None in padded batches.
        ledger: samples dropped on this rank, with reasons; after a resume with ``ledger_dir`` also the
            entries that the rank's file has about the resumed epoch.
        epoch_stats: what became of the samples of the last finished epoch, also one at whose end the loader
            was resumed; None before that.
    """

    def __init__(
        self,
        config: LoaderConfig,
        processor: Processor | str | os.PathLike[str],
        *,
        model: Any = None,
        world: World | None = None,
        group: ProcessGroup | None = None,
        counts: CountColumns | None = None,
    ) -> None:
        self.config = config
        self.world = World.detect() if world is None else world
        self._ranks = Collectives(self.world, group)
        # An error on one rank raises on all of them; steps that may take long have names of their own.
        self._ranks.run_on_all_ranks("build the loader", partial(self._build, processor, model, counts))

    def _build(
        self, processor: Processor | str | os.PathLike[str], model: Any, counts: CountColumns | None
    ) -> None:
        config, folder = self.config, self.config.ledger_dir
        # Buffer entries until iteration starts, so a loader that fails validation never writes to its file.
        self.ledger = Ledger(None if folder is None else rank_file(folder, self.world.rank)).buffer()
        opened = open_data(config, processor, model, self._ranks, self.ledger)
        check_batches(config, opened)
        self._startup = start_up(config, opened, self._ranks, counts)
        self.dataset, self.processor, self.counts = opened.dataset, opened.processor, self._startup.counts
        self.model_name, self._model_proven = opened.model.name, opened.model.proven
        self.attn_implementation = attn_backend(config, opened.model) if config.mode == "pack" else None
        self._samples, self._planner = self._startup.samples, self._startup.planner
        self._keep_bytes = config.pixels == "compact"
        if config.pixels != "processor":
            self._samples = compact_samples(self._samples, self._startup.media_mask)
            self._log_pixels()
        self._templates = deepcopy(chat_templates(self.processor))  # a dict of them may be changed in place
        # Schedule all packs over all ranks; with shard_data each rank schedules its own.
        self._plan_world = World() if config.shard_data else self.world
        self._layout = BatchLayout(
            self._plan_world.size, config.batch_size, config.gradient_accumulation_steps
        ).check()
        builder = (PadBuilder if config.mode == "pad" else PackBuilder)(config, self._samples, opened.model)
        self._workers = WorkerPool(builder, config, self._choose_num_workers())
        if config.pin_memory and not torch.cuda.is_available():
            logger.warning("pin_memory=True has no effect: no GPU is available")
        if self.counts.weighted and (self.world.rank == 0 or config.shard_data):
            logger.warning(
                "rows have loss weights, which model(**batch).loss ignores. In a loop of your own write "
                "token_loss(logits, batch['labels'], tokens, weights=batch.info.loss_weights) with tokens = "
                "count_supervised(…); TrainFromLoader, SFTTrainer, step_loss and evaluate apply them"
            )
        if has_router_loss(opened.model.config) and self.world.rank == 0:
            logger.warning(
                "%s adds the auxiliary loss of its router, which token_loss does not contain. In a loop of "
                "your own write batch_loss(model, model(**model_inputs(batch, model)), batch, tokens); "
                "TrainFromLoader, SFTTrainer, step_loss and evaluate add it",
                self.model_name,
            )
        self.epoch_stats: EpochStats | None = None
        self._recorded_dropped = False
        self._step_file = StepFile.of(self.ledger)
        self._undelivered: tuple[Drop, ...] = ()  # entries of a batch at which the run was stopped
        self._times = StepTimes(config.gradient_accumulation_steps) if config.measure_cost else None
        if config.measure_cost and not self._ranks.reaches_all_ranks:
            raise ConfigError.of(
                "measure_cost",
                True,
                f"the ranks have to agree on the weights, but {self.world} cannot communicate: initialise "
                "torch.distributed before building the loader and, if its default group has other ranks, "
                "pass group=",
            )
        self._state = LoaderState().under(self._layout)
        self._current = self._ranks.run_on_all_ranks("plan the packs", self._plan_epoch)

    def _log_pixels(self) -> None:
        """Log for which media pixels cannot be bytes; as a warning if they were to be."""
        compact = self._samples.encoder.compact
        level = logging.WARNING if self.config.pixels == "compact" else logging.INFO
        for kind, problem in compact.problems.items() if compact is not None and not self.world.rank else ():
            logger.log(level, "pixels of %ss are sent as the processor returns them: %s", kind, problem)

    def _choose_num_workers(self) -> int:
        cores = self._ranks.share_cores()  # a collective: called on every rank, whatever its settings
        if not self._ranks.reaches_all_ranks:
            cores //= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if self.config.num_workers is not None:
            return self.config.num_workers
        return default_num_workers(len(self.dataset) // self._plan_world.size, cores)

    def __len__(self) -> int:
        """Micro-steps of the epoch under the current batch layout; the same on every rank.

        After a resume under another layout these are the steps of the remaining packs.
        """
        return len(self._current.schedule)

    def __repr__(self) -> str:
        config, data = self.config, self.config.data
        name = repr(os.fspath(data)) if isinstance(data, str | os.PathLike) else type(data).__name__
        checked = "checked" if self._model_proven else "not proven"
        model = {"unchecked": "unchecked", "none": None}.get(
            self.model_name, f"{self.model_name} ({checked})"
        )
        return (
            f"Loader(data={name}, rows={len(self.dataset)}, mode={config.mode!r}, "
            f"pack_size={config.pack_size}, batch_size={config.batch_size}, "
            f"rank={self.world.rank} of {self.world.size}, num_workers={self.num_workers}, "
            f"attn_implementation={self.attn_implementation!r}, model={model}, packs={len(self.plan)}, "
            f"epoch={self.epoch}, step={self.cursor} of {len(self)})"
        )

    @cached_property
    def metrics(self) -> Metrics:
        """Fill, speed and waiting time of the last steps."""
        return Metrics(self.config.gradient_accumulation_steps)

    @property
    def num_workers(self) -> int:
        """Processes that build batches; 0 builds them in this process."""
        return self._workers.num_workers

    @property
    def cost_weights(self) -> CostWeights:
        """The weights by which this epoch is scheduled: measured ones, or those of the model's operations."""
        return self._state.weights or self._planner.weights

    def measured_costs(self) -> tuple[Floats, Floats]:
        """Return features [steps, weights] and seconds of the optimizer steps that this rank measured.

        Those of this epoch; the columns are ``cost_weights.names``. Empty without ``measure_cost``.
        """
        seconds = {} if self._times is None else self._times.seconds()
        return self.step_features(list(seconds)), np.array(list(seconds.values()), np.float64)

    def step_features(self, steps: Sequence[int]) -> Floats:
        """Return what ``cost_weights`` are multiplied with in optimizer steps of this rank: [steps, weights].

        The columns are ``cost_weights.names``.
        """
        rank = self._plan_world.rank
        return self._measured_epoch().features(steps, slice(rank, rank + 1))[:, 0]

    def _measured_epoch(self) -> MeasuredEpoch:
        current = self._current
        accumulation = self.config.gradient_accumulation_steps
        placeholder = self.config.placeholder != "never"
        return MeasuredEpoch(self._planner, current.schedule, placeholder, accumulation, current.first)

    @property
    def plan(self) -> PackPlan:
        """The packs of this epoch."""
        return self._current.packs.plan

    @property
    def plan_key(self) -> str:
        """Identifies the plan: a state can be loaded if it is the same."""
        return self._planner.name

    @property
    def epoch(self) -> int:
        """The current epoch, or the last one if it is over."""
        return self._state.epoch

    @property
    def cursor(self) -> int:
        """Micro-steps of this epoch delivered under the current batch layout."""
        return self._state.cursor

    @property
    def remaining(self) -> int:
        """Micro-steps of this epoch that were not delivered yet."""
        return len(self) - self.cursor

    def key(self, index: int) -> str:
        """Return the key of an example: dataset and row, ``coco/812``."""
        return self._samples.key(index)

    def straggler_ratio(self) -> float:
        """Return the planned cost of the slowest rank of a step over the mean, averaged over the epoch."""
        return self._current.schedule.straggler_ratio()

    def describe(self) -> str:
        """Return what was read and how, the plan, the steps and what was dropped, as text."""
        size, reserve = self.config.pack_size, self._planner.reserve_in(self.plan)
        reserved = f"; {reserve:,} of the {size:,} tokens of a pack are reserved for a placeholder"
        mode = f"mode {self.config.mode}, epoch {self.epoch}"
        rows = f"{len(self.dataset):,} rows, plan {self.plan_key}, {mode}"
        steps = f"{len(self):,} micro-steps of {self.config.batch_size} x {self.world.size} ranks"
        plan, ledger = self._planner.describe(self.plan), self.ledger.summary(len(self.dataset))
        basis = self.cost_weights.basis
        steps += f", straggler ratio {self.straggler_ratio():.4f} (predicted from {basis})"
        data = describe_data(self.dataset)
        return "\n".join([*data, rows + (reserved if reserve else ""), *plan, steps, ledger])

    # Batches.

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the batches of this epoch that were not delivered yet, or over the next epoch.

        Raises:
            ConfigError: the chat template is not the one that tokens were counted with; also while iterating.
        """
        self._check_templates()
        if self._current.over:
            self._move_to(self._state.start_of(self.epoch + 1))
        self.metrics.pause()
        if self._times is not None:
            self._times.pause()
        return self._batches(self._current)

    def keep_bytes(self) -> Loader:
        """Let batches hold pixels as bytes with ``pixels="auto"``, for trainers, which move them."""
        self._keep_bytes = self.config.pixels != "processor"
        return self

    def _batches(self, epoch: Epoch) -> Iterator[Batch]:
        if self.ledger.is_buffering:  # the run starts here, perhaps in the folder of an earlier one
            try:
                roll_back(self.ledger, self.world, self.epoch, self._remaining_keys)
            except OSError as error:  # raised on all ranks when the epoch is reconciled
                logger.warning("the ledger of an earlier run cannot be rolled back: %s", error)
            self.ledger.flush()
        if self._undelivered:  # the batch is rebuilt
            self.ledger.roll_back(self.epoch, {drop.key for drop in self._undelivered})
            self._undelivered = ()
        self._check_templates()
        requested = time.perf_counter()
        for built in self._workers.batches(self._work_items(epoch), self.cursor, len(epoch.schedule)):
            if epoch is not self._current:
                return  # set_epoch or load_state_dict was called
            self._deliver(built, time.perf_counter() - requested)
            step = built.batch.info.step
            if self._times is not None:
                self._times.start(step)
            yield built.with_pixels
            if self._times is not None and epoch is self._current:
                self._times.stop(step + 1)
            if not epoch.over:  # before the next one is built: workers have a copy of the processor
                self._check_templates()
            requested = time.perf_counter()

    def _check_templates(self) -> None:
        if chat_templates(self.processor) != self._templates:
            raise ConfigError(
                f"the chat template of {type(self.processor).__name__} was changed after its tokens were "
                "counted: set it before packhorse.load, or load the data once more"
            )

    def _work_items(self, epoch: Epoch) -> Callable[[int], WorkItem]:
        """Return a function from a step to its work item.

        Captures the epoch, not ``self``, so the loader (and its workers) can be garbage-collected.
        """
        schedule, number, rank = epoch.schedule, self.epoch, self._plan_world.rank
        keep_bytes = self._keep_bytes
        # With shard_data a rank does not know which media the others have in a step.
        always = self._startup.media_mask if self.config.shard_data else None
        if self.config.placeholder == "never":
            always = MediaMask.NONE

        def make(step: int) -> WorkItem:
            packs = tuple(map(tuple, schedule.samples(step, rank)))
            media_mask = schedule.media_mask(step) if always is None else always
            return WorkItem(number, step, packs, media_mask, keep_bytes)

        return make

    def _deliver(self, built: Built, waited: float) -> None:
        """Count a batch as delivered, and reconcile the epoch after its last one.

        If that raises, the run stops and the batch does not count; its ledger entries stay until iterating or
        resuming rolls them back.
        """
        current, state = self._current, self._state
        counters, delivered = current.budget.counters, len(current.tallies)
        try:
            self._count(built, waited)
            if not self.remaining:  # now: many trainers never request the end
                self._ranks.run_on_all_ranks("reconcile the epoch", self._finish_epoch)
                current.over = True
        except BaseException:
            self._state, current.budget.counters = state, counters
            del current.tallies[delivered:]
            self._undelivered = built.drops
            raise

    def _count(self, built: Built, waited: float) -> None:
        """Count a batch as delivered, with its ledger entries."""
        info, current = built.batch.info, self._current
        self.ledger.record_all(built.drops)
        current.budget.update(info)
        tally = Tally(len(info.samples), len(info.lost))
        if self._step_file is not None:
            branch = self._state.branch(len(self._state.segments) - 1)
            self._step_file.append(branch, info.step, tally, built.drops)
        costs = current.schedule.costs(info.step)
        mean = float(costs.mean())
        self._state = self._state.at(info.step + 1)
        current.tallies.append(current.tallies[-1].plus(tally))
        self.metrics.update(info, float(costs.max()) / mean if mean else 1.0, waited)

    def _finish_epoch(self) -> None:
        """Reconcile the epoch; raise if too many of its samples failed. Fit the cost weights of the next."""
        stats = self._reconcile()
        if not self.config.shard_data:
            self._current.budget.check(stats.lost)
        if self._times is not None:
            before = self._state.next_weights or self.cost_weights
            fit = fit_epoch(self._measured_epoch(), self._times, before, self._ranks)
            if not fit.problem:
                self._state = replace(self._state, next_weights=fit.weights)

    def _reconcile(self) -> EpochStats:
        current, shard_data = self._current, self.config.shard_data
        planned, counts = self.plan.indices, self.counts
        stats = EpochStats(
            self.epoch,
            len(self.dataset),
            len(planned),
            *current.tallies[-1],
            supervised=int(counts.supervised[planned].sum()),
            supervised_weight=float(counts.weight[planned].sum()),
        )
        self.epoch_stats = reconcile(
            stats, current.before, shard_data=shard_data, ledger=self.ledger, ranks=self._ranks
        )
        return self.epoch_stats

    def close(self) -> None:
        """End the workers; the next iteration starts new ones."""
        self._workers.close()

    # Epochs and resuming.

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; does nothing in the middle of that epoch.

        Ledger entries of an earlier pass over that epoch, and of later ones, are rolled back; before the
        first batch of a loader, when that batch is requested.
        """
        if epoch < 0:
            raise ConfigError.of("epoch", epoch, "expected 0 or more")
        if epoch != self.epoch or self._current.over:
            self._move_to(self._state.start_of(epoch))
            if not self.ledger.is_buffering:
                roll_back(self.ledger, self.world, epoch, self._remaining_keys)

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the resume state: small, plain, and the same on every rank (except with ``shard_data``).

        Args:
            consumed: micro-steps of this epoch that count as used since the loader was built or loaded; None
                for all that were delivered. For trainers that fetch batches ahead of training on them.

        Raises:
            ConfigError: fewer were delivered.
        """
        current, planner = self._current, self._planner
        delivered = self.cursor - current.first
        if consumed is None:
            consumed = delivered
        elif not 0 <= consumed <= delivered:
            expected = f"{delivered} micro-steps of this epoch were delivered"
            raise ConfigError.of("consumed", consumed, expected)
        used = current.before
        if used is not None and consumed:
            # What other ranks were given is in their step files, see `count_used`.
            used = used.plus(current.tallies[consumed]) if self._plan_world.size == 1 else None
        state = replace(self._state.at(current.first + consumed), used=used)
        saved = state.to_dict(self.plan_key, planner.key, planner.contents) | {"packs": current.packs.digest}
        if self.config.shard_data:
            saved["shard"] = self._shard()
        return saved

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state: the packs that were not used by then are scheduled for this world.

        All ranks have to call it. Costs scheduling the epoch once (half a second for a million packs); no
        sample is read.

        Raises:
            ConfigError: the ranks load different states; the data have changed, or the state belongs to
                another plan (both are named); or it is no state of a loader.
        """
        before = self._state, self._current
        try:
            self._ranks.run_on_all_ranks("load the state", partial(self._resume, state))
        except BaseException:
            self._state, self._current = before
            raise

    def _resume(self, saved: Mapping[str, Any]) -> None:
        planner, shard_data = self._planner, self.config.shard_data
        self._ranks.assert_same(
            "load different states",
            describe_state(saved, own_rows=shard_data),
            "A run that is killed while its ranks write their checkpoints leaves such states: load the last "
            "checkpoint that all ranks have finished",
        )
        if shard_data and saved.get("shard") != self._shard():
            raise ConfigError(
                "with shard_data=True each rank plans its own rows: the state has [rank, world size, batch "
                f"size, gradient_accumulation_steps] {saved.get('shard')}, this loader has {self._shard()}. "
                "Resume with the same ones; without shard_data they may change",
                setting="shard_data",
                value=True,
            )
        state = LoaderState.from_dict(saved, self.plan_key, planner.key, planner.contents)
        self._move_to(state)
        if saved.get("packs") != self._current.packs.digest:
            raise ConfigError(
                f"pack plan mismatch: the state has packs {saved.get('packs')}, this run planned "
                f"{self._current.packs.digest} from the same counts (a different scipy version can do this). "
                "Resume with the original version, or set effort=0 from the start",
                setting="packs",
                value=saved.get("packs"),
            )
        used = state.used  # from the state, else from the step files
        if used is None and not shard_data:
            used = count_used(self.ledger, self._ranks, state)
        self._current.before, self._state = used, replace(self._state, used=used)
        # Roll the ledger back, or forward, to the state.
        roll_back(self.ledger, self.world, state.epoch, self._remaining_keys)
        restore_entries(self.ledger, self.world, state)
        if self.remaining:
            restore_epoch(self.ledger, state.epoch)
            self._current.budget = self._make_budget(self.plan)
        else:  # the epoch was over
            self._reconcile()
            self._move_to(self._state.start_of(self.epoch + 1))

    def _remaining_keys(self) -> set[str]:
        """Return the keys of the samples of this epoch that were not delivered yet."""
        schedule = self._current.schedule
        units = schedule.table[self.cursor :].reshape(-1).tolist()
        return {self.key(int(index)) for unit in units if unit >= 0 for index in schedule.units.samples(unit)}

    def _shard(self) -> list[int]:
        """Return what must not change between runs with ``shard_data``."""
        return [self.world.rank, self.world.size, *self._layout[1:]]

    def _move_to(self, state: LoaderState) -> None:
        packs = self._current.packs if state.epoch == self.epoch else None
        before, self._state = self._state, state.under(self._layout)
        try:
            self._current = self._ranks.run_on_all_ranks("plan the packs", partial(self._plan_epoch, packs))
        except BaseException:
            self._state = before
            raise
        self._undelivered = ()
        if self._times is not None:
            self._times.clear()

    def _plan_epoch(self, packs: Packs | None = None) -> Epoch:
        """Plan the epoch of the current state (unless its packs are given) and schedule it."""
        state, planner = self._state, self._planner
        info = planner.sample_info if state.weights is None else planner.sample_info_by(state.weights)
        if packs is None or packs.info is not info:
            packs = Packs(planner.plan(state.epoch) if packs is None else packs.plan, info)
        if not self.config.shard_data:
            advice = "Install the same version of scipy on all of them, or set effort=0"
            self._ranks.assert_same("have different packs", packs.digest, advice)
        self._check_plan(packs.plan)
        budget = self._make_budget(packs.plan)
        return Epoch(packs, self._schedule(packs, state), budget, state.cursor, state.used)

    def _schedule(self, packs: Packs, state: LoaderState) -> PackSchedule:
        schedule = partial(PackSchedule, packs, seed=self.config.seed, epoch=state.epoch)
        if not self.config.shard_data or self.world.size == 1:
            return schedule(state.segments)
        if not self._ranks.reaches_all_ranks:
            raise ConfigError(
                f"shard_data=True on {self.world}: the ranks have to agree on the number of steps. "
                "Initialise torch.distributed before building the loader and, if its default group has other "
                "ranks, pass group=; or set shard_data=False",
                setting="shard_data",
                value=True,
            )
        # All ranks take as many steps as the one with the most, computed without the state.
        steps = len(schedule(LoaderState().under(self._layout).segments))
        return schedule(state.segments, at_least=max(self._ranks.gather(steps)))

    def _check_plan(self, plan: PackPlan) -> None:
        """Record what the plan drops; raise if the settings do not allow it, or nothing is left."""
        self._planner.check(plan)
        # Which samples are in no pack depends on their counts alone: record it once.
        if not self._recorded_dropped and (self.world.rank == 0 or self.config.shard_data):
            drops = self._planner.drops(plan)
            self._planner.warn_of_dropped(plan, drops)
            self.ledger.record_all(drops)
        self._recorded_dropped = True
        if not len(plan):
            dropped = self._ledger_of_drops(plan)
            first = next(iter(dropped), None)
            example = "" if first is None else f"\nfor example {first.key}: {first.detail}"
            advice = describe_remedy(self.dataset, dropped.counts())
            raise ConfigError(
                f"no example can be used:\n{dropped.summary(len(self.dataset))}{example}{advice}"
            )

    def _make_budget(self, plan: PackPlan) -> BadSampleBudget:
        lost, used = 0, self._state.used
        if used is not None and self._plan_world.size == 1:
            lost = used.lost
        elif self.cursor:
            lost = count_lost(self.ledger, self.epoch)
        limits = (self.config.max_bad_share, self.config.max_consecutive_bad)
        bad = int((~self.counts.ok).sum())
        budget = BadSampleBudget(len(self.counts), bad, self._plan_world.size, *limits, self.ledger, lost)
        if budget.is_exceeded(0):
            budget.ledger = self._ledger_of_drops(plan)
            budget.check(0)
        return budget

    def _ledger_of_drops(self, plan: PackPlan) -> Ledger:
        """Return the entries of the rows that are in no pack, which only the ledger of rank 0 has."""
        ledger = Ledger()
        ledger.record_all(self._planner.drops(plan))
        return ledger
