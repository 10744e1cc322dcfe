"""What the pages know: the plan, the rows and how to find them, why rows are dropped, what ledgers say.

Opening maps the plan and opens the data files (milliseconds each). The processor, which takes seconds to
import, is opened in the background, or when the first page needs it.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from packhorse.errors import BadSample, ConfigError
from packhorse.formats.meta import MetaDataset, Source, read_meta
from packhorse.ledger import Ledger, read_ledgers
from packhorse.loader.build import make_packer
from packhorse.loader.config import LoaderConfig
from packhorse.loader.startup import OpenedData, encoding_dataset, open_rows
from packhorse.plan.pack_plan import DROP_REASONS
from packhorse.rows.row_files import JsonRows
from packhorse.tools.view.plan_book import PlanBook, Request, book_of, make_plan, open_book, open_request
from packhorse.tools.view.plan_report import plan_report
from packhorse.tools.view.row_encoder import RowEncoder
from packhorse.types import Drop, Reason, mask_secrets

Integers = npt.NDArray[np.int64]

_MOST_DIGITS = 18


class RowFinder:
    """Finds rows of a mixture; sorts the rows of a dataset when it is first asked for one of them."""

    def __init__(self, dataset: MetaDataset) -> None:
        self._sources = {source.config.name: source for source in dataset.sources}
        lengths = [len(source) for source in dataset.sources]
        self._first = dict(zip(self._sources, np.cumsum([0, *lengths]).tolist(), strict=False))
        self._ends = np.cumsum(lengths)
        self._order = lru_cache(maxsize=None)(self._sorted_rows)

    def place(self, index: int) -> tuple[Source, int]:
        """The dataset of a position, and the row's number in its file."""
        name = list(self._sources)[int(np.searchsorted(self._ends, index, side="right"))]
        source = self._sources[name]
        return source, source.selection.row(index - self._first[name])

    def find(self, key: str) -> int | None:
        """The position of ``name/row`` or ``name/row#copy``; None if there is none."""
        name, _, rest = key.rpartition("/")
        number, _, copy = rest.partition("#")
        if name not in self._sources or not _is_number(number) or not _is_number(copy or "0"):
            return None
        rows, order = self._order(name)
        first = int(np.searchsorted(rows, int(number)))
        source, start = self._sources[name], int(self._first[name])
        while first < len(rows) and int(rows[first]) == int(number):
            position = int(order[first])
            if source.selection.copy(position) == int(copy or 0):
                return start + position
            first += 1
        return None

    def _sorted_rows(self, name: str) -> tuple[Integers, Integers]:
        rows = np.asarray(self._sources[name].selection.rows(), np.int64)
        order = np.argsort(rows, kind="stable")
        return rows[order], order


def _is_number(text: str) -> bool:
    """Whether a text can be the number of a row; Python refuses to read one of thousands of digits."""
    return text.isdecimal() and len(text) <= _MOST_DIGITS


_MOST_RAW = 100_000  # bytes of a row that are shown
_NOT_ROWS_OF_IT = ("not_sampled", "left_over")  # rows that are no examples of this mixture


class Book:
    """A plan and everything around it, for looking at.

    Args:
        made: the plan and what it was made from.
        opened: rows, processor and model, if they are open already.
        ledger: entries of a run, to be shown with the rows.

    Attributes:
        plan: which rows make up each pack.
        report: the numbers of the overview.
        dataset: the examples.
        names: of the datasets, in order.
        marks: what ledgers, and this viewer, have to say of rows, by their position.
    """

    def __init__(
        self, made: PlanBook, opened: OpenedData | None = None, ledger: Ledger | None = None
    ) -> None:
        self.made, self.plan, self.report = made, made.plan, made.report
        config = made.request.config
        self.dataset: MetaDataset = (
            open_rows(config.data, config.dataset_names, Ledger()) if opened is None else opened.dataset
        )
        if len(self.dataset) != self.plan.samples:
            raise ConfigError(
                f"the plan is of {self.plan.samples:,} rows, {config.data} has "
                f"{len(self.dataset):,} now: plan anew"
            )
        self.names = list(self.dataset.lengths())
        self._starts = np.cumsum([0, *self.dataset.lengths().values()])
        self._opened = opened
        self._encoder: RowEncoder | None = None
        self._opening, self._marking = threading.Lock(), threading.Lock()
        self.finder = RowFinder(self.dataset)
        self.marks: dict[int, list[Drop]] = defaultdict(list)
        self.elsewhere: list[Drop] = []  # entries of rows that are not in this mixture
        self._entries = 0
        for drop in ledger or ():
            self._take_in(drop)

    @classmethod
    def open(
        cls,
        source: str,
        processor: str | None = None,
        *,
        ledger: str | os.PathLike[str] | None = None,
        pack_size: int = 8192,
        trust_remote_code: bool = False,
    ) -> Book:
        """Open a plan file, or plan a meta file first.

        Raises:
            ConfigError: it is neither, or a meta file without a processor.
            OSError: it cannot be read.
        """
        entries = None if ledger is None else read_ledgers(ledger)[0]
        if _is_plan(source):
            return cls(open_book(source, processor, trust_remote_code), None, entries)
        if processor is None:
            read_meta(source)  # says what is wrong with what is neither
            raise ConfigError(f"{source} is a meta file: name the --processor, and it is planned first")
        config = LoaderConfig(data=source, pack_size=pack_size)
        planned = make_plan(Request(config, processor, trust_remote_code=trust_remote_code))
        return cls(book_of(planned, plan_report(planned)), planned.opened, entries)

    @property
    def encoder(self) -> RowEncoder:
        """What shows rows as the model sees them; opens the processor the first time.

        Raises:
            ConfigError: the processor is not to be had.
        """
        with self._opening:
            if self._encoder is None:
                opened, config = self._opened or open_request(self.made.request), self.made.request.config
                samples = encoding_dataset(config, opened, self.plan.capacity)
                self._encoder = RowEncoder(samples, make_packer(config, samples, opened.model))
            return self._encoder

    def warm_up(self, after: float = 2.0) -> None:
        """Open the processor in the background, so that the first pack does not wait for it.

        Args:
            after: seconds to wait before, so that the first page does not share the processor with imports.
        """

        def open_it() -> None:
            with suppress(ConfigError, OSError):  # the page that needs it says why
                _ = self.encoder

        timer = threading.Timer(after, open_it)
        timer.daemon = True
        timer.start()

    # Rows.

    def __len__(self) -> int:
        return len(self.dataset)

    def key(self, index: int) -> str:
        """The name of a row: ``coco/812``."""
        return self.dataset.key(index)

    def dataset_of(self, index: int) -> int:
        """The number of a row's dataset."""
        return int(np.searchsorted(self._starts, index, side="right")) - 1

    def datasets_of(self, indices: npt.NDArray[np.integer]) -> Integers:
        """The same for many rows."""
        return np.asarray(np.searchsorted(self._starts, indices, side="right") - 1, np.int64)

    @cached_property
    def pack_of(self) -> Integers:
        """The pack of each row; -1 for those in none."""
        return self.plan.pack_of()

    def raw(self, index: int) -> str:
        """The row as its file has it, as text, or its beginning; what is not UTF-8 is escaped."""
        source, row = self.finder.place(index)
        if isinstance(source.file, JsonRows):
            raw = source.file.raw(row)
            rest = f" … ({len(raw):,} bytes)" if len(raw) > _MOST_RAW else ""
            return mask_secrets(raw[:_MOST_RAW].decode("utf-8", "backslashreplace")) + rest
        try:
            return mask_secrets(repr(source.file[row]))
        except BadSample as error:
            return error.detail

    def dropped(self, index: int) -> Drop | None:
        """Why a row is in no pack; None if it is in one."""
        code = self._drop_code(index)
        if code is None:
            return None
        key = self.key(index)
        bad = self.made.bad.get(index)
        reason: Reason = DROP_REASONS[code] if bad is None else bad[0]  # type: ignore[assignment]
        detail = self.made.detail(index, reason) if bad is None else bad[1]
        return Drop(key, "plan", reason, detail, dataset=self.names[self.dataset_of(index)])

    def _drop_code(self, index: int) -> int | None:
        place = int(np.searchsorted(self.plan.dropped, index))
        found = place < len(self.plan.dropped) and int(self.plan.dropped[place]) == index
        return int(self.plan.drop_codes[place]) if found else None

    @cached_property
    def _dropped_reasons(self) -> npt.NDArray[np.object_]:
        """The reason of each row of ``plan.dropped``."""
        reasons = np.array(DROP_REASONS, object)[self.plan.drop_codes]
        if self.made.bad:
            bad = np.fromiter(self.made.bad, np.int64)
            reasons[np.searchsorted(self.plan.dropped, bad)] = [why for why, _ in self.made.bad.values()]
        return reasons

    # What is wrong.

    def reasons(self) -> list[tuple[str, int, int]]:
        """For each reason: its name, rows in no pack, rows in a pack that a ledger has a remark on."""
        gone = Counter(self._dropped_reasons.tolist())
        marked = Counter(
            reason
            for index, drops in list(self.marks.items())
            if self.pack_of[index] >= 0
            for reason in {drop.reason for drop in drops}
        )
        names = sorted({*gone, *marked}, key=lambda name: (-gone[name] - marked[name], name))
        return [(name, gone[name], marked[name]) for name in names]

    def problems(self, reason: str = "", dataset: int = -1) -> list[int]:
        """The rows that are dropped or marked, in order; only of a reason, or of a dataset."""
        reasons = self._dropped_reasons
        gone = self.plan.dropped[reasons == reason] if reason else self.plan.dropped
        marked = [
            index
            for index, drops in list(self.marks.items())
            if not reason or any(drop.reason == reason for drop in drops)
        ]
        found = np.union1d(np.asarray(gone, np.int64), np.asarray(marked, np.int64))
        if dataset >= 0:
            found = found[self.datasets_of(found) == dataset]
        rows: list[int] = found.tolist()
        return rows

    def remarks(self, index: int) -> list[Drop]:
        """All that is to be said of a row: why it is in no pack, and what ledgers have."""
        own = self.dropped(index)
        drops = [] if own is None else [own]
        said = {own.reason} if own is not None else set()
        return drops + [drop for drop in self.marks.get(index, ()) if drop.reason not in said]

    def wrong_ledger(self) -> str:
        """A warning where entries of the ledger name rows that this data do not have; else nothing."""
        if not self.elsewhere:
            return ""
        return (
            f"{len(self.elsewhere):,} of {self._entries:,} entries of the ledger name no row of "
            f"{self.made.request.config.data} (as {self.elsewhere[0].key}): is it another dataset's?"
        )

    def mark(self, index: int, drops: Sequence[Drop]) -> None:
        """Remember what was found when a row was looked at."""
        with self._marking:
            for drop in drops:
                if not any(_says_the_same(drop, known) for known in self.marks.get(index, ())):
                    self.marks[index].append(drop)

    def _take_in(self, drop: Drop) -> None:
        if drop.reason in _NOT_ROWS_OF_IT:
            return
        self._entries += 1
        index = self.finder.find(drop.key)
        if index is None:
            self.elsewhere.append(drop)
        else:
            self.mark(index, [drop])


def _says_the_same(one: Drop, other: Drop) -> bool:
    """Whether two remarks on a row are one; a run adds where it stood to what was found."""
    same_words = one.detail.startswith(other.detail) or other.detail.startswith(one.detail)
    return one.reason == other.reason and same_words


def _is_plan(path: str) -> bool:
    """Whether a file is an Arrow file, as plans are, whatever it is called."""
    if not os.path.isfile(path):
        return path.endswith(".phplan")
    with open(path, "rb") as file:
        return file.read(6) == b"ARROW1"


# Searching: by key at once, by text by reading rows for a second or two at a time.

SECONDS = 1.5
MOST = 50

_BLOCK = 256
_AROUND = 60


@dataclass(frozen=True, slots=True)
class Hit:
    """A row and the text around what was looked for."""

    index: int
    key: str
    before: str
    match: str
    after: str


@dataclass(frozen=True, slots=True)
class Hits:
    """What was found.

    Attributes:
        hits: at most ``MOST``.
        next: where to go on; None if all rows were looked at.
        looked_at: how many rows were read now.
    """

    hits: list[Hit]
    next: int | None
    looked_at: int


def find_key(book: Book, wanted: str) -> list[int]:
    """The rows with this key: ``coco/812``, or 812 in every dataset."""
    wanted = wanted.strip()
    keys = [f"{name}/{wanted}" for name in book.names] if wanted.isdecimal() else [wanted]
    found = (book.finder.find(key) for key in keys)
    return [index for index in found if index is not None]


def find_text(book: Book, wanted: str, first: int = 0, seconds: float = SECONDS) -> Hits:
    """Rows in which a text stands, whatever its case, from a position on.

    A row that cannot be parsed is searched as its bytes are.
    """
    needle = re.compile(re.escape(wanted), re.IGNORECASE)
    hits: list[Hit] = []
    until = time.monotonic() + seconds
    index, start = first, 0
    for source in book.dataset.sources:
        begin, start = start, start + len(source)
        while index < start:
            positions = range(index - begin, min(index - begin + _BLOCK, len(source)))
            rows = source.file.read(source.selection.row(position) for position in positions)
            for position, row in zip(positions, rows, strict=True):
                place = begin + position
                text = book.raw(place) if isinstance(row, BadSample) else _text(row)
                found = needle.search(text)
                if found is not None:
                    hits.append(_hit(book, place, text, *found.span()))
                    if len(hits) == MOST:
                        return Hits(hits, place + 1 if place + 1 < len(book) else None, place + 1 - first)
            index = begin + positions.stop
            if time.monotonic() > until and index < len(book):
                return Hits(hits, index, index - first)
    return Hits(hits, None, max(0, index - first))


def _hit(book: Book, index: int, text: str, at: int, end: int) -> Hit:
    before = ("…" if at > _AROUND else "") + text[max(0, at - _AROUND) : at]
    after = text[end : end + _AROUND] + ("…" if end + _AROUND < len(text) else "")
    return Hit(index, book.key(index), before, text[at:end], after)


def _text(value: object) -> str:
    """All texts of a row, one after the other."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "\n".join(filter(None, map(_text, value.values())))
    if isinstance(value, list | tuple):
        return "\n".join(filter(None, map(_text, value)))
    return ""
