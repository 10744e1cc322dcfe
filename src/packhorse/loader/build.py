"""Building a batch in a worker: a ticket goes in, the batch and a report of what is in it come out.

A ticket holds everything that has to be known: which samples, of which epoch, and which media the other ranks
have in that step. So workers never see the plan, and live on from epoch to epoch.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from logging import getLogger
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from packhorse.chat import IGNORE_INDEX
from packhorse.collate.packed import loss_inputs, neat_packed_vlm_collater
from packhorse.collate.packed_dataset import PackedDatasetWrapper
from packhorse.collate.padded import ordered, pad_collate_fn
from packhorse.collate.pixel_buffer import PixelRoom, RoomPool
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import DATA_ERRORS, BadSample, is_data_error
from packhorse.loader.placeholder import Blanks
from packhorse.plan.eligibility import load
from packhorse.pp_media import COUNT_KEYS
from packhorse.types import MEDIA_KINDS, Batch, BatchInfo, Drop, MediaKind
from packhorse.utils.pool import set_note

logger = getLogger("packhorse.loader")


class SampleTimeout(BaseException):
    """Raised in the middle of loading a sample; no ordinary handler may take it for something else."""


@cache
def _warn_of_no_limit(why: str) -> None:
    logger.warning("sample_timeout has no effect: %s", why)


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise :class:`SampleTimeout` in this thread if the block takes longer.

    Goes by an alarm of the operating system, which only a main thread can have (a worker of a DataLoader does
    its work there); elsewhere, and where somebody else uses the alarm, nothing is limited.
    """
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        _warn_of_no_limit("samples are built outside the main thread")
        yield
        return
    previous = signal.getsignal(signal.SIGALRM)
    if previous not in (signal.SIG_DFL, signal.SIG_IGN):
        _warn_of_no_limit("the program has a handler of its own for SIGALRM")
        yield
        return

    def stop(*_: Any) -> None:
        raise SampleTimeout(f"not ready after {seconds:g} s (sample_timeout)")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:  # even where the alarm goes off this very moment
            signal.signal(signal.SIGALRM, previous)


NO_SAMPLE = -1

Sample = dict[str, Any]
Finish = Callable[[dict[str, Any]], dict[str, Any]]


class Ticket(NamedTuple):
    """An order for one batch.

    Attributes:
        epoch: which one.
        step: the micro step of the epoch's present segment.
        packs: the samples of each pack (in padded batches: one sample each).
        kinds: the media that some rank has in this step, one bit for each kind: the batch has to have all of
            them.
    """

    epoch: int
    step: int
    packs: tuple[tuple[int, ...], ...]
    kinds: int = 0

    @property
    def samples(self) -> tuple[int, ...]:
        """All samples, in order."""
        return tuple(index for pack in self.packs for index in pack)


BatchReport = BatchInfo
"""What ``loader.last`` holds: the ``info`` of the batch handed out last."""


class Built(NamedTuple):
    """A batch, what it is made of (its ``info``), and the ledger entries of building it."""

    batch: Batch
    report: BatchReport
    drops: tuple[Drop, ...] = ()


class BatchBuilder(Dataset[Built]):
    """Builds batches from tickets; see the subclasses.

    Args:
        samples: encodes single samples; a sample that fails is recorded in its ledger and left out.
        finish: done to every batch at the end (casting, chunks for a pipeline).
        sample_timeout: after so many seconds a sample counts as failed; None waits for ever.
    """

    def __init__(
        self,
        samples: PreTokenizedDatasetWrapper,
        finish: Finish | None = None,
        sample_timeout: float | None = None,
    ) -> None:
        self.samples, self.finish, self.sample_timeout = samples, finish, sample_timeout
        self.blanks = Blanks(samples)

    def __getitem__(self, ticket: Ticket) -> Built:
        """Encode the samples of a ticket and make a batch of those that can be used."""
        started = time.perf_counter()
        self.begin(ticket)
        packs: list[list[tuple[int, Sample]]] = []
        for pack in ticket.packs:
            found = [(index, sample) for index in pack if (sample := self._loaded(index)) is not None]
            packs += self.into_rows(found)
        missing = ticket.kinds & ~self._kinds_of(sample for pack in packs for _, sample in pack)
        rows = [[sample for _, sample in pack] for pack in packs]
        blank = bool(missing) or not rows
        if blank:
            self.add_blank(rows, missing)
        rows, batch, refused = self._collated(rows, packs, ticket)
        delivered = {id(s): index for at, pack in enumerate(packs) if at not in refused for index, s in pack}
        info = self._describe(
            ticket, self.in_order(rows), delivered, batch, placeholder=blank or bool(refused)
        )
        finished = batch if self.finish is None else self.finish(batch)
        info = replace(info, seconds=time.perf_counter() - started)
        return Built(Batch(loss_inputs(finished), info), info)

    def _describe(
        self,
        ticket: Ticket,
        rows: list[list[Sample]],
        delivered: Mapping[int, int],
        batch: Mapping[str, Any],
        *,
        placeholder: bool,
    ) -> BatchInfo:
        """What a batch is made of; ``delivered`` has the index of each sample's ``id``, of no placeholder."""
        documents = [[delivered.get(id(sample)) for sample in row] for row in rows]
        samples = tuple(index for row in documents for index in row if index is not None)
        inside, labels = set(samples), batch["labels"]
        used = [sample for row in rows for sample in row if id(sample) in delivered]
        return BatchInfo(
            ticket.epoch,
            ticket.step,
            samples=samples,
            lost=tuple(index for index in ticket.samples if index not in inside),
            in_a_row=tuple(index in inside for index in ticket.samples),
            tokens=sum(map(self.length, used)),
            slots=labels.numel(),
            supervised=int((labels != IGNORE_INDEX).sum()),
            placeholder=placeholder,
            document_keys=tuple(
                tuple("" if index is None else self.samples.key(index) for index in row) for row in documents
            ),
            document_lengths=tuple(tuple(map(self.length, row)) for row in rows),
            document_ids=batch.get("_packed_seq_ids"),
            num_images=_per_row(batch, "image"),
            num_videos=_per_row(batch, "video"),
            num_audios=_per_row(batch, "audio"),
        )

    def begin(self, ticket: Ticket) -> None:
        """Get ready for the samples of a ticket; entries of the ledger belong to its epoch from now on."""
        self.samples.set_epoch(ticket.epoch)

    def sample(self, index: int) -> Sample | None:
        """One sample; None if it cannot be used, which is recorded."""
        raise NotImplementedError

    def into_rows(self, samples: list[tuple[int, Sample]]) -> list[list[tuple[int, Sample]]]:
        """The samples of a pack in rows: in one, as a rule, and in none if there is no sample."""
        return [samples] if samples else []

    def add_blank(self, rows: list[list[Sample]], kinds: int) -> None:
        """Add a placeholder with these media: one row at least where there is none."""
        raise NotImplementedError

    def collate(self, rows: list[list[Sample]]) -> dict[str, Any]:
        """A batch of the samples of each row."""
        raise NotImplementedError

    def in_order(self, rows: list[list[Sample]]) -> list[list[Sample]]:
        """The samples of each row of the batch, in the order of its rows."""
        return rows

    def length(self, sample: Sample) -> int:
        """How many tokens of the batch a sample takes up."""
        return int(sample["input_ids"].shape[-1])

    def _kinds_of(self, samples: Iterable[Sample]) -> int:
        """The media that samples really have, one bit for each kind."""
        found = 0
        for sample in samples:
            for bit, kind in enumerate(MEDIA_KINDS):
                count = sample.get(f"n_{kind}s")
                has = bool(count) if count is not None else kind == "audio" and self._has_sound(sample)
                found |= has << bit
        return found

    def _has_sound(self, sample: Sample) -> bool:
        layout = self.samples.family.layout
        return any(key in layout and layout[key].kinds == ("audio",) for key in sample)

    def _loaded(self, index: int) -> Sample | None:
        set_note(index)  # for the message if the sample kills its worker
        try:
            with time_limit(self.sample_timeout):
                return self.sample(index)
        except SampleTimeout as error:
            slow = BadSample(str(error), reason="broken_media", stage="media", key=self.samples.key(index))
            if self.samples.on_bad == "raise":
                raise slow from None
            self.samples.record(index, slow, replaced=False)
            return None
        finally:
            set_note(NO_SAMPLE)

    def _collated(
        self, rows: list[list[Sample]], packs: Sequence[list[tuple[int, Sample]]], ticket: Ticket
    ) -> tuple[list[list[Sample]], dict[str, Any], set[int]]:
        """The rows of the batch, the batch, and the packs that are not in it because collating them fails."""
        try:
            return rows, self.collate(rows), set()
        except DATA_ERRORS as error:
            if self.samples.on_bad == "raise" or not is_data_error(error):
                raise
            first = error
        refused: set[int] = set()
        for at, pack in enumerate(packs):
            refusal = self._refusal([sample for _, sample in pack])
            if refusal is not None:
                refused.add(at)
                for index, _ in pack:
                    self.samples.record(index, refusal, replaced=False)
        if not refused:  # each for itself is good: no sample is at fault
            raise first
        kept = [rows[at] for at in range(len(packs)) if at not in refused]
        missing = ticket.kinds & ~self._kinds_of(sample for row in kept for sample in row)
        if missing or not kept:
            self.add_blank(kept, missing)
        return kept, self.collate(kept), refused

    def _refusal(self, row: list[Sample]) -> BadSample | None:
        """Why nothing can be made of a row; None if something can."""
        try:
            self.collate([row])
        except DATA_ERRORS as error:
            if not is_data_error(error):
                raise
            return BadSample(f"{type(error).__name__}: {error}", reason="collate_failed", stage="collate")
        return None


def _per_row(batch: Mapping[str, Any], kind: MediaKind) -> tuple[int, ...]:
    """How many media items of a kind each row has."""
    counts = batch.get(COUNT_KEYS[kind])
    return (0,) * len(batch["labels"]) if counts is None else tuple(counts.tolist())


class PackBuilder(BatchBuilder):
    """Builds packed batches.

    Args:
        samples: see :class:`BatchBuilder`, like ``finish`` and ``sample_timeout``.
        packer: joins samples.
        collater: keyword arguments for :func:`~packhorse.collate_fns.neat_packed_vlm_collater`.
        finish: see there.
        sample_timeout: see there.
    """

    def __init__(
        self,
        samples: PreTokenizedDatasetWrapper,
        packer: PackedDatasetWrapper,
        collater: Mapping[str, Any],
        finish: Finish | None = None,
        sample_timeout: float | None = None,
    ) -> None:
        super().__init__(samples, finish, sample_timeout)
        self.packer, self.collater = packer, dict(collater)
        self._pool = RoomPool()
        self._pixels: PixelRoom | None = None

    def begin(self, ticket: Ticket) -> None:
        """As above, with room for the pixels of one batch."""
        self.packer.set_epoch(ticket.epoch)
        tokens = len(ticket.packs) * self.packer.pack_size
        self._pixels = PixelRoom(tokens, self.collater.get("pixel_dtype"), self._pool)

    def sample(self, index: int) -> Sample | None:
        """One sample, shifted and with its positions, its pixels where the batch has them."""
        found = self.packer.sample(index)
        if found is not None and self._pixels is not None:
            self._pixels.settle(found)
        return found

    def into_rows(self, samples: list[tuple[int, Sample]]) -> list[list[tuple[int, Sample]]]:
        """With exact counts all fit into one row; a sample that turns out too long for it begins another."""
        rows: list[list[tuple[int, Sample]]] = []
        used = self.packer.pack_size
        for index, sample in samples:
            room = self.packer.room_of(sample)
            if room > self.packer.pack_size:
                what = f"{room:,} tokens, more than a pack has, and more than were counted"
                bad = BadSample(what, reason="too_long", stage="encode", key=self.samples.key(index))
                if self.samples.on_bad == "raise":
                    raise bad
                self.samples.record(index, bad, replaced=False)
                continue
            if used + room > self.packer.pack_size:
                rows.append([])
                used = 0
            rows[-1].append((index, sample))
            used += room
        return rows

    def add_blank(self, rows: list[list[Sample]], kinds: int) -> None:
        """Add documents to the row that has the most room, which was reserved; else a row of their own."""
        blanks = [self.packer.prepared(sample) for _, sample in self.blanks.samples(kinds)]
        needed = sum(map(self.packer.room_of, blanks))
        used = [sum(map(self.packer.room_of, row)) for row in rows]
        if rows and min(used) + needed <= self.packer.pack_size:
            rows[used.index(min(used))] += blanks
        else:
            rows.append(blanks)

    def collate(self, rows: list[list[Sample]]) -> dict[str, Any]:
        """A packed batch."""
        self._pixels = None  # every sample is there; the room lives on in the batch alone
        return neat_packed_vlm_collater(
            [self.packer.joined(row, keep_parts=True) for row in rows], **self.collater
        )


class PadBuilder(BatchBuilder):
    """Builds padded batches, one sample a row.

    Args:
        samples: see :class:`BatchBuilder`, like ``finish`` and ``sample_timeout``.
        pad_to: pad every batch to so many tokens; None pads to its longest sample.
        pixel_dtype: what pixels are converted to; None leaves them.
        finish: see there.
        sample_timeout: see there.
        media_layout: see :func:`~packhorse.collate_fns.pad_collate_fn`.
    """

    def __init__(
        self,
        samples: PreTokenizedDatasetWrapper,
        pad_to: int | None = None,
        pixel_dtype: torch.dtype | None = None,
        finish: Finish | None = None,
        sample_timeout: float | None = None,
        *,
        media_layout: bool = False,
    ) -> None:
        super().__init__(samples, finish, sample_timeout)
        self.pad_to, self.pixel_dtype, self.media_layout = pad_to, pixel_dtype, media_layout

    def sample(self, index: int) -> Sample | None:
        """One sample, not yet shifted."""
        try:
            return dict(load(self.samples, index))
        except DATA_ERRORS as error:
            if self.samples.on_bad == "raise" or not is_data_error(error):
                raise
            self.samples.record(index, error, replaced=False)
            return None

    def length(self, sample: Sample) -> int:
        """How many tokens of the batch a sample takes up: the collate function takes off one."""
        return super().length(sample) - 1

    def add_blank(self, rows: list[list[Sample]], kinds: int) -> None:
        """Add rows."""
        rows += [[sample] for _, sample in self.blanks.samples(kinds)]

    def in_order(self, rows: list[list[Sample]]) -> list[list[Sample]]:
        """The rows as :func:`~packhorse.collate_fns.pad_collate_fn` orders them."""
        return [[sample] for sample in ordered([s for row in rows for s in row], self.samples.family)]

    def collate(self, rows: list[list[Sample]]) -> dict[str, Any]:
        """A padded batch."""
        width = None if self.pad_to is None else self.pad_to + 1
        samples = [sample for row in rows for sample in row]
        return pad_collate_fn(
            samples,
            self.samples.processor,
            width,
            pixel_dtype=self.pixel_dtype,
            media_layout=self.media_layout,
        )
