"""The data of the viewer's pages: the plan, its rows and steps, the outcome of each row, and search.

Opening maps the plan and opens the data files (milliseconds each). The processor takes seconds to import, so
it is opened in the background, or when the first page needs it.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.count.sidecar import counts_of
from packhorse.distributed import Collectives
from packhorse.errors import BadSample, ConfigError
from packhorse.formats.meta import MetaDataset, Source, is_data_file, read_meta, task_of_meta
from packhorse.ledger import GONE, Ledger, read_ledgers
from packhorse.loader.build import make_packer
from packhorse.loader.config import LoaderConfig
from packhorse.loader.planner import Planner
from packhorse.loader.startup import OpenedData, encoding_dataset, open_dataset, start_up
from packhorse.plan.pack_plan import DROP_REASONS
from packhorse.plan.schedule import BatchLayout, Packs, PackSchedule, ResumeSegment
from packhorse.rows.row_files import JsonRows
from packhorse.tools.view.plan_report import plan_report
from packhorse.tools.view.row_encoder import RowEncoder
from packhorse.tools.view.saved_plan import (
    PlanRequest,
    SavedPlan,
    make_plan,
    make_saved_plan,
    open_request,
    open_saved_plan,
)
from packhorse.types import Drop, Integers, Reason, Task, World, mask_secrets

_MAX_DIGITS = 18  # Python does not convert a string of thousands of digits
_MAX_RAW_BYTES = 100_000  # of a row that are shown
_NOT_IN_MIXTURE = ("not_sampled", "left_over")  # drops of rows that are no examples of this mixture

OUTCOMES = ("trained", "trained, changed", "not trained")
"""What becomes of a row: trained as it is in its file, trained after a change, or not trained."""
TRAINED, CHANGED, NOT_TRAINED = range(3)

SEARCH_SECONDS = 1.5
MAX_HITS = 50
_SEARCH_BLOCK = 256  # rows read at a time
_CONTEXT = 60  # characters shown on each side of a match


class EpochSchedule(NamedTuple):
    """The steps of an epoch, with the mean straggler ratio and the mean cost of a pack."""

    steps: PackSchedule
    straggler_ratio: float
    mean_cost: float


class RowFinder:
    """Find rows of a mixture by key; the rows of a dataset are sorted at the first search in it."""

    def __init__(self, dataset: MetaDataset) -> None:
        self._sources = {source.config.name: source for source in dataset.sources}
        lengths = [len(source) for source in dataset.sources]
        self._first = dict(zip(self._sources, np.cumsum([0, *lengths]).tolist(), strict=False))
        self._ends = np.cumsum(lengths)
        self._order = lru_cache(maxsize=None)(self._sort_rows)

    def locate(self, index: int) -> tuple[Source, int]:
        """Return the dataset of a sample index and the row's number in its file."""
        name = list(self._sources)[int(np.searchsorted(self._ends, index, side="right"))]
        source = self._sources[name]
        return source, source.selection.row(index - self._first[name])

    def find(self, key: str) -> int | None:
        """Return the sample index of ``name/row`` or ``name/row#copy``, or None if there is none."""
        name, _, rest = key.rpartition("/")
        row, _, copy = rest.partition("#")
        if name not in self._sources or not _is_number(row) or not _is_number(copy or "0"):
            return None
        rows, order = self._order(name)
        source, start = self._sources[name], int(self._first[name])
        first, end = np.searchsorted(rows, [int(row), int(row) + 1])
        for position in order[first:end]:
            if source.selection.copy(int(position)) == int(copy or 0):
                return start + int(position)
        return None

    def _sort_rows(self, name: str) -> tuple[Integers, Integers]:
        rows = np.asarray(self._sources[name].selection.rows(), np.int64)
        order = np.argsort(rows, kind="stable")
        return rows[order], order


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= _MAX_DIGITS


class PlanViewer:
    """A plan with its rows, drops and ledger entries.

    Args:
        saved: the plan and what it was made from.
        opened: rows, processor and model, if they are open already.
        ledger: entries of a run, shown with the rows.
        planner: what made the plan, if it is open already.

    Attributes:
        names: the dataset names, in order.
        outcomes: what becomes of each row, as a position in ``OUTCOMES``.
        marks: drops found by ledgers and by this viewer, by sample index.
        unmatched: ledger entries whose key is not in this mixture.
    """

    def __init__(
        self,
        saved: SavedPlan,
        opened: OpenedData | None = None,
        ledger: Ledger | None = None,
        planner: Planner | None = None,
    ) -> None:
        self.saved, self.plan, self.report = saved, saved.plan, saved.report
        config = saved.request.config
        self.dataset: MetaDataset = open_dataset(config, Ledger()) if opened is None else opened.dataset
        if len(self.dataset) != self.plan.samples:
            raise ConfigError(
                f"the plan was made for {self.plan.samples:,} rows, but {config.data} now has "
                f"{len(self.dataset):,}: run `packhorse plan` again",
                path=str(config.data),
            )
        self.names: list[str] = list(self.dataset.lengths())
        self._starts = np.cumsum([0, *self.dataset.lengths().values()])
        self._opened = opened
        self._encoder: RowEncoder | None = None
        self._planner = planner
        self._open_lock, self._mark_lock = threading.RLock(), threading.Lock()
        self._packs = lru_cache(maxsize=2)(self._make_packs)
        self._schedule = lru_cache(maxsize=4)(self._make_schedule)
        self.finder = RowFinder(self.dataset)
        self.outcomes = np.zeros(len(self.dataset), np.uint8)
        self.outcomes[list(saved.truncated)] = CHANGED
        self.outcomes[self.plan.dropped] = NOT_TRAINED
        self.marks: dict[int, list[Drop]] = defaultdict(list)
        self.unmatched: list[Drop] = []
        drops = [drop for drop in ledger or () if drop.reason not in _NOT_IN_MIXTURE]
        self._ledger_entries = len(drops)
        for drop in drops:
            index = self.finder.find(drop.key)
            if index is None:
                self.unmatched.append(drop)
                continue
            (location,) = self.dataset.locations([index])  # pages show it next to the detail
            drop = replace(drop, detail=drop.detail.removesuffix(f"; {location}"))
            if not any(_is_duplicate(drop, known) for known in self.marks.get(index, ())):
                self._add(index, drop)

    @classmethod
    def open(
        cls,
        source: str,
        processor: str | None = None,
        *,
        ledger: str | os.PathLike[str] | None = None,
        pack_size: int = 8192,
        task: Task | None = None,
        trust_remote_code: bool = False,
    ) -> PlanViewer:
        """Open a plan file, or plan a meta file first.

        Raises:
            ConfigError: the file is neither, or it is a meta file and no processor is given.
            OSError: the file cannot be read.
        """
        entries = None if ledger is None else read_ledgers(ledger)[0]
        if _is_plan(source):
            return cls(open_saved_plan(source, processor, trust_remote_code), None, entries)
        if processor is None:
            read_meta(source)  # raises if it has no datasets either
            kind = "a data file" if is_data_file(source) else "a meta file"
            raise ConfigError(
                f"{source} is {kind}: pass --processor to plan it first", setting="processor", path=source
            )
        config = LoaderConfig(data=source, pack_size=pack_size, task=task or task_of_meta(source))
        planned = make_plan(PlanRequest(config, processor, trust_remote_code=trust_remote_code))
        saved = make_saved_plan(planned, plan_report(planned))
        return cls(saved, planned.opened, entries, planned.planner)

    @property
    def opened(self) -> OpenedData:
        """Rows, processor and model; the first use opens the processor."""
        with self._open_lock:
            if self._opened is None:
                self._opened = open_request(self.saved.request)
            return self._opened

    @property
    def encoder(self) -> RowEncoder:
        """The encoder that shows rows as the model sees them; the first use opens the processor."""
        with self._open_lock:
            if self._encoder is None:
                config = self.saved.request.config
                samples = encoding_dataset(config, self.opened, self.plan.capacity)
                self._encoder = RowEncoder(samples, make_packer(config, samples, self.opened.model))
            return self._encoder

    # Steps.

    @property
    def planner(self) -> Planner:
        """The loader's planner; the first use reads the counts of all rows.

        Raises:
            ConfigError: the counts are missing, or belong to another plan.
        """
        with self._open_lock:
            if self._planner is None:
                config, counts = self.saved.request.config, counts_of(self.dataset, self.opened.encoder)
                if counts is None:
                    raise ConfigError(
                        f"the token counts of {config.data} are missing or out of date: run `packhorse plan` "
                        "again",
                        path=str(config.data),
                    )
                planner = start_up(config, self.opened, Collectives(World()), counts).planner
                if planner.name != self.report["name"]:
                    raise ConfigError(
                        f"the data, the processor or the model have changed since the plan was made (plan "
                        f"{self.report['name']}, now {planner.name}): run `packhorse plan` again"
                    )
                self._planner = planner
            return self._planner

    def packs(self, epoch: int) -> Packs:
        """Return the packs of an epoch; another epoch than the plan's is planned now, as the loader does."""
        with self._open_lock:
            return self._packs(epoch)

    def schedule(self, layout: BatchLayout, epoch: int) -> EpochSchedule:
        """Return the steps of an epoch, as a loader with this layout delivers them."""
        with self._open_lock:
            return self._schedule(layout, epoch)

    def _make_packs(self, epoch: int) -> Packs:
        plan = self.plan if epoch == self.report["epoch"] else self.planner.plan(epoch)
        return Packs(plan, self.planner.sample_info)

    def _make_schedule(self, layout: BatchLayout, epoch: int) -> EpochSchedule:
        packs, seed = self.packs(epoch), self.saved.request.config.seed
        schedule = PackSchedule(packs, [ResumeSegment(*layout, 0)], seed=seed, epoch=epoch)
        mean = float(packs.costs.mean()) if len(packs.costs) else 1.0
        return EpochSchedule(schedule, schedule.straggler_ratio(), mean)

    def warm_up(self) -> None:
        """Open the processor in the background, so that the first pack does not wait for it."""

        def open_encoder() -> None:
            with suppress(ConfigError, OSError):  # the page that needs it shows the error
                _ = self.encoder

        timer = threading.Timer(2.0, open_encoder)  # the first page does not compete with imports
        timer.daemon = True
        timer.start()

    # Rows.

    def __len__(self) -> int:
        return len(self.dataset)

    def key(self, index: int) -> str:
        """Return the key of a row, e.g. ``coco/812``."""
        return self.dataset.key(index)

    def dataset_ids(self, indices: npt.NDArray[np.integer] | int) -> Integers:
        """Return the position in ``names`` of each row's dataset."""
        return np.asarray(np.searchsorted(self._starts, indices, side="right") - 1, np.int64)

    def dataset_name(self, index: int) -> str:
        """Return the name of a row's dataset."""
        return self.names[int(self.dataset_ids(index))]

    @cached_property
    def pack_of(self) -> Integers:
        """The pack of each row; -1 for rows in no pack."""
        return self.plan.pack_of()

    def raw(self, index: int) -> str:
        """Return the row as text, shortened if it is long; bytes that are not UTF-8 are escaped."""
        source, row = self.finder.locate(index)
        if isinstance(source.file, JsonRows):
            raw = source.file.raw(row)
            rest = f" … ({len(raw):,} bytes)" if len(raw) > _MAX_RAW_BYTES else ""
            return mask_secrets(raw[:_MAX_RAW_BYTES].decode("utf-8", "backslashreplace")) + rest
        try:
            return mask_secrets(repr(source.file[row]))
        except BadSample as error:
            return error.detail

    # Drops.

    def plan_drop(self, index: int) -> Drop | None:
        """Return why the plan drops or truncates a row, or None."""
        key, dataset = self.key(index), self.dataset_name(index)
        position = int(np.searchsorted(self.plan.dropped, index))
        if position == len(self.plan.dropped) or int(self.plan.dropped[position]) != index:
            if index not in self.saved.truncated:
                return None
            return Drop(key, "plan", "truncated", self.saved.detail(index, "truncated"), "cut", dataset)
        bad = self.saved.bad.get(index)
        code = int(self.plan.drop_codes[position])
        reason: Reason = DROP_REASONS[code] if bad is None else bad[0]  # type: ignore[assignment]
        detail = self.saved.detail(index, reason) if bad is None else bad[1]
        return Drop(key, "plan", reason, detail, dataset=dataset)

    @cached_property
    def _plan_reasons(self) -> npt.NDArray[np.object_]:
        """The reason of each row of ``plan.dropped``."""
        reasons = np.array(DROP_REASONS, object)[self.plan.drop_codes]
        if self.saved.bad:
            bad = np.fromiter(self.saved.bad, np.int64)
            reasons[np.searchsorted(self.plan.dropped, bad)] = [why for why, _ in self.saved.bad.values()]
        return reasons

    def drops(self, index: int) -> list[Drop]:
        """Return all drops of a row, those that decide its outcome first."""
        planned, marks = self.plan_drop(index), list(self.marks.get(index, ()))
        if planned is not None and planned.reason not in {drop.reason for drop in marks}:
            marks.insert(0, planned)
        return sorted(marks, key=_outcome_of, reverse=True)

    def outcome(self, index: int) -> str:
        """Return what becomes of a row, one of the ``OUTCOMES``."""
        return OUTCOMES[self.outcomes[index]]

    def reason(self, index: int) -> str:
        """Return the reason of a row's outcome; empty for a row that is trained as it is in its file."""
        drops = self.drops(index)
        return drops[0].reason if drops else ""

    def _listed_in_packs(self) -> list[int]:
        """Return the rows in a pack that have a drop."""
        return [row for row in {*self.saved.truncated, *list(self.marks)} if self.pack_of[row] >= 0]

    def totals(self) -> dict[str, int]:
        """Return the number of rows with each outcome."""
        return dict(zip(OUTCOMES, _count_outcomes(self.outcomes), strict=True))

    def totals_by_dataset(self) -> dict[str, list[int]]:
        """Return the number of rows of each dataset with each of the ``OUTCOMES``."""
        parts = np.split(self.outcomes, self._starts[1:-1])
        return dict(zip(self.names, map(_count_outcomes, parts), strict=True))

    def reasons(self) -> dict[str, list[int]]:
        """Return the number of rows with each of the ``OUTCOMES`` by reason, the most frequent first.

        A row counts once, with the reason of its outcome.
        """
        counts: dict[str, list[int]] = defaultdict(lambda: [0] * len(OUTCOMES))
        for reason, rows in Counter(self._plan_reasons.tolist()).items():
            counts[reason][NOT_TRAINED] = rows
        for row in self._listed_in_packs():
            counts[self.reason(row)][self.outcomes[row]] += 1
        return dict(sorted(counts.items(), key=lambda item: (-sum(item[1]), item[0])))

    def rows(self, outcome: str = "", reason: str = "", dataset: str = "") -> Integers:
        """Return the rows with an outcome, with a reason and of a dataset, in order; ``""`` is any."""
        rows = np.arange(len(self))
        if reason:
            dropped = np.asarray(self.plan.dropped[self._plan_reasons == reason], np.int64)
            marked = [row for row in self._listed_in_packs() if self.reason(row) == reason]
            rows = np.union1d(dropped, np.asarray(marked, np.int64))
        if dataset:
            number = self.names.index(dataset) if dataset in self.names else len(self.names)
            rows = rows[self.dataset_ids(rows) == number]
        return rows[self.outcomes[rows] == OUTCOMES.index(outcome)] if outcome in OUTCOMES else rows

    def unmatched_warning(self) -> str:
        """Return a warning if ledger entries name rows that this data does not have, else an empty string."""
        if not self.unmatched:
            return ""
        return (
            f"{len(self.unmatched):,} of {self._ledger_entries:,} ledger entries name no row of "
            f"{self.saved.request.config.data} (for example {self.unmatched[0].key}): does the ledger belong "
            "to another dataset?"
        )

    def mark(self, index: int, drops: Sequence[Drop]) -> None:
        """Add drops that this viewer found in a row, except those whose reason is known already."""
        with self._mark_lock:
            known = {drop.reason for drop in self.marks.get(index, ())}
            for drop in drops:
                if drop.reason not in known:
                    self._add(index, drop)

    def _add(self, index: int, drop: Drop) -> None:
        self.marks[index].append(drop)
        self.outcomes[index] = max(int(self.outcomes[index]), _outcome_of(drop))


def _count_outcomes(outcomes: npt.NDArray[np.uint8]) -> list[int]:
    """Return the number of rows with each of the ``OUTCOMES``."""
    return [int(np.count_nonzero(outcomes == position)) for position in range(len(OUTCOMES))]


def _outcome_of(drop: Drop) -> int:
    """Return the position in ``OUTCOMES`` of a row's outcome that a ledger entry implies."""
    if drop.action in GONE:
        return NOT_TRAINED
    return TRAINED if drop.action == "kept" else CHANGED


def _is_duplicate(drop: Drop, other: Drop) -> bool:
    """Return whether two drops of a row are one; a training run appends the location to the detail."""
    same_detail = drop.detail.startswith(other.detail) or other.detail.startswith(drop.detail)
    return drop.reason == other.reason and same_detail


def _is_plan(path: str) -> bool:
    """Return whether a file is an Arrow file, as plans are, independent of its name."""
    if not os.path.isfile(path):
        return path.endswith(".phplan")
    with open(path, "rb") as file:
        return file.read(6) == b"ARROW1"


class Hit(NamedTuple):
    """A row that contains the searched text, with the text around the match."""

    row: int
    key: str
    before: str
    match: str
    after: str


class Hits(NamedTuple):
    """The result of one search request."""

    hits: list[Hit]
    next: int | None  # the index to continue from; None if all rows were searched
    searched: int  # rows read by this request


def find_key(viewer: PlanViewer, query: str) -> list[int]:
    """Return the rows with this key: ``coco/812``, or 812 in every dataset."""
    query = query.strip()
    keys = [f"{name}/{query}" for name in viewer.names] if query.isdecimal() else [query]
    return [index for index in map(viewer.finder.find, keys) if index is not None]


def find_text(viewer: PlanViewer, query: str, first: int = 0, seconds: float = SEARCH_SECONDS) -> Hits:
    """Search rows for a text, ignoring case, from an index on and for a limited time.

    A row that cannot be parsed is searched as raw text.
    """
    needle = re.compile(re.escape(query), re.IGNORECASE)
    hits: list[Hit] = []
    deadline = time.monotonic() + seconds
    block, end = first, 0
    for source in viewer.dataset.sources:
        start, end = end, end + len(source)
        while block < end:
            positions = range(block - start, min(block - start + _SEARCH_BLOCK, len(source)))
            rows = source.file.read(source.selection.row(position) for position in positions)
            for index, row in enumerate(rows, block):
                text = viewer.raw(index) if isinstance(row, BadSample) else _join_texts(row)
                if (match := needle.search(text)) is not None:
                    hits.append(_make_hit(viewer, index, match))
                    if len(hits) == MAX_HITS:
                        return Hits(hits, index + 1 if index + 1 < len(viewer) else None, index + 1 - first)
            block = start + positions.stop
            if time.monotonic() > deadline and block < len(viewer):
                return Hits(hits, block, block - first)
    return Hits(hits, None, max(0, block - first))


def _make_hit(viewer: PlanViewer, index: int, match: re.Match[str]) -> Hit:
    text, (start, end) = match.string, match.span()
    before = ("…" if start > _CONTEXT else "") + text[max(0, start - _CONTEXT) : start]
    after = text[end : end + _CONTEXT] + ("…" if end + _CONTEXT < len(text) else "")
    return Hit(index, viewer.key(index), before, match[0], after)


def _join_texts(value: object) -> str:
    """Return all strings of a row, one per line."""
    if isinstance(value, str):
        return value
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return "\n".join(filter(None, map(_join_texts, values)))
