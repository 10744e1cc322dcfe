"""Build batches from work items, in workers.

A work item holds everything that has to be known: which samples, of which epoch, and which media the other
ranks have in that step. So workers never see the plan, and live on from epoch to epoch.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from logging import getLogger
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from packhorse.chat import IGNORE_INDEX
from packhorse.collate.packed import collate_packs, loss_inputs
from packhorse.collate.packer import Packer
from packhorse.collate.padded import collate_samples, order_rows
from packhorse.collate.processor_call import pad_token_id
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import BadSample, data_errors
from packhorse.loader.config import LoaderConfig, as_dtype
from packhorse.loader.placeholder import Placeholders
from packhorse.loader.startup import ModelInfo, attn_backend
from packhorse.pp_media import prepare_vlm_media_for_pp
from packhorse.types import MEDIA_KINDS, Batch, BatchInfo, Drop, MediaMask, Sample, WorkItem
from packhorse.utils import pool

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

Finish = Callable[[dict[str, Any]], dict[str, Any]]


class Built(NamedTuple):
    """A batch and the ledger entries of building it."""

    batch: Batch
    drops: tuple[Drop, ...] = ()


class BatchBuilder(Dataset[Built]):
    """Builds batches from work items; see the subclasses.

    Args:
        samples: encodes single samples; a sample that fails is recorded in its ledger and dropped.
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
        self.blanks = Placeholders(samples)

    def __getitem__(self, item: WorkItem) -> Built:
        """Encode the samples of a work item and make a batch of those that can be used."""
        started = time.perf_counter()
        self.begin(item)
        packs: list[list[tuple[int, Sample]]] = []
        for pack in item.packs:
            found = [(index, sample) for index in pack if (sample := self._loaded(index)) is not None]
            packs += self.into_rows(found)
        missing = item.media_mask & ~self._media_mask(sample for pack in packs for _, sample in pack)
        rows = [[sample for _, sample in pack] for pack in packs]
        blank = bool(missing) or not rows
        if blank:
            self.add_placeholder(rows, missing)
        rows, batch, rejected = self._collated(rows, packs, item)
        delivered = {s: index for at, pack in enumerate(packs) if at not in rejected for index, s in pack}
        info = self._describe(
            item, self.in_order(rows), delivered, batch, placeholder=blank or bool(rejected)
        )
        finished = batch if self.finish is None else self.finish(batch)
        info = replace(info, seconds=time.perf_counter() - started)
        return Built(Batch(loss_inputs(finished), info))

    def _describe(
        self,
        item: WorkItem,
        rows: list[list[Sample]],
        delivered: Mapping[Sample, int],
        batch: Mapping[str, Any],
        *,
        placeholder: bool,
    ) -> BatchInfo:
        """What a batch is made of; ``delivered`` has the index of each sample, of no placeholder."""
        documents = [[delivered.get(sample) for sample in row] for row in rows]
        samples = tuple(index for row in documents for index in row if index is not None)
        inside, labels = set(samples), batch["labels"]
        used = [sample for row in rows for sample in row if sample in delivered]
        images, videos, audios = (
            tuple(sum(sample.num_items[kind] for sample in row) for row in rows) for kind in MEDIA_KINDS
        )
        return BatchInfo(
            item.epoch,
            item.step,
            samples=samples,
            lost=tuple(index for index in item.samples if index not in inside),
            delivered=tuple(index in inside for index in item.samples),
            tokens=sum(map(self.length, used)),
            slots=labels.numel(),
            supervised=int((labels != IGNORE_INDEX).sum()),
            placeholder=placeholder,
            document_keys=tuple(
                tuple("" if index is None else self.samples.key(index) for index in row) for row in documents
            ),
            document_lengths=tuple(tuple(map(self.length, row)) for row in rows),
            document_ids=batch.get("_packed_seq_ids"),
            num_images=images,
            num_videos=videos,
            num_audios=audios,
        )

    def begin(self, item: WorkItem) -> None:
        """Get ready for the samples of a work item; ledger entries belong to its epoch from now on."""
        self.samples.set_epoch(item.epoch)

    def sample(self, index: int) -> Sample | None:
        """One sample as :meth:`prepare` makes it; None if it cannot be used, which is recorded."""
        with data_errors(self.samples.on_bad, partial(self.samples.record, index)):
            return self.prepare(self.samples.load_sample(index))
        return None

    def prepare(self, sample: Sample) -> Sample:
        """An encoded sample as :meth:`collate` takes it."""
        return sample

    def into_rows(self, samples: list[tuple[int, Sample]]) -> list[list[tuple[int, Sample]]]:
        """The samples of a pack in rows: in one, as a rule, and in none if there is no sample."""
        return [samples] if samples else []

    def add_placeholder(self, rows: list[list[Sample]], media_mask: MediaMask) -> None:
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
        return len(sample)

    def _media_mask(self, samples: Iterable[Sample]) -> MediaMask:
        """The kinds of media that the samples have."""
        return MediaMask.of(kind for sample in samples for kind in MEDIA_KINDS if sample.num_items[kind])

    def _loaded(self, index: int) -> Sample | None:
        pool.note.value = index  # for the message if the sample kills its worker
        try:
            with time_limit(self.sample_timeout):
                return self.sample(index)
        except SampleTimeout as error:
            key = self.samples.key(index)
            with data_errors(self.samples.on_bad, partial(self.samples.record, index)):
                raise BadSample(str(error), reason="broken_media", stage="media", key=key) from None
            return None
        finally:
            pool.note.value = NO_SAMPLE

    def _collated(
        self, rows: list[list[Sample]], packs: Sequence[list[tuple[int, Sample]]], item: WorkItem
    ) -> tuple[list[list[Sample]], dict[str, Any], set[int]]:
        """The rows of the batch, the batch, and the packs that are not in it because collating them fails."""
        with data_errors(self.samples.on_bad) as outcome:
            return rows, self.collate(rows), set()
        assert outcome.error is not None
        rejected: set[int] = set()
        for at, pack in enumerate(packs):
            refusal = self._refusal([sample for _, sample in pack])
            if refusal is not None:
                rejected.add(at)
                for index, _ in pack:
                    self.samples.record(index, refusal)
        if not rejected:  # each for itself is good: no sample is at fault
            raise outcome.error.original
        kept = [rows[at] for at in range(len(packs)) if at not in rejected]
        missing = item.media_mask & ~self._media_mask(sample for row in kept for sample in row)
        if missing or not kept:
            self.add_placeholder(kept, missing)
        return kept, self.collate(kept), rejected

    def _refusal(self, row: list[Sample]) -> BadSample | None:
        """Why nothing can be made of a row; None if something can."""
        with data_errors(reason="collate_failed", stage="collate") as outcome:
            self.collate([row])
        return outcome.error


class PackBuilder(BatchBuilder):
    """Builds packed batches.

    Args:
        samples: see :class:`BatchBuilder`, like ``finish`` and ``sample_timeout``.
        packer: joins samples.
        collater: keyword arguments for :func:`~packhorse.collate.packed.collate_packs`.
        finish: see there.
        sample_timeout: see there.
    """

    def __init__(
        self,
        samples: PreTokenizedDatasetWrapper,
        packer: Packer,
        collater: Mapping[str, Any],
        finish: Finish | None = None,
        sample_timeout: float | None = None,
    ) -> None:
        super().__init__(samples, finish, sample_timeout)
        self.packer, self.collater = packer, dict(collater)

    def prepare(self, sample: Sample) -> Sample:
        """Shift the sample by one token and compute its positions."""
        return self.packer.prepare(sample)

    def into_rows(self, samples: list[tuple[int, Sample]]) -> list[list[tuple[int, Sample]]]:
        """With exact counts all fit into one row; a sample that turns out too long for it begins another."""
        rows: list[list[tuple[int, Sample]]] = []
        used = self.packer.pack_size
        for index, sample in samples:
            room = self.packer.padded_length(len(sample))
            if room > self.packer.pack_size:
                what = f"{room:,} tokens, more than a pack has, and more than were counted"
                with data_errors(self.samples.on_bad, partial(self.samples.record, index)):
                    raise BadSample(what, reason="too_long", stage="encode", key=self.samples.key(index))
                continue
            if used + room > self.packer.pack_size:
                rows.append([])
                used = 0
            rows[-1].append((index, sample))
            used += room
        return rows

    def add_placeholder(self, rows: list[list[Sample]], media_mask: MediaMask) -> None:
        """Add documents to the row that has the most room, which was reserved; else a row of their own."""
        blanks = [self.packer.prepare(sample) for _, sample in self.blanks.samples(media_mask)]
        needed, *used = (sum(self.packer.padded_length(len(s)) for s in row) for row in (blanks, *rows))
        if rows and min(used) + needed <= self.packer.pack_size:
            rows[used.index(min(used))] += blanks
        else:
            rows.append(blanks)

    def collate(self, rows: list[list[Sample]]) -> dict[str, Any]:
        """A packed batch."""
        return collate_packs(list(map(self.packer.join, rows)), self.packer.family, **self.collater)


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

    def length(self, sample: Sample) -> int:
        """How many tokens of the batch a sample takes up: the collate function takes off one."""
        return super().length(sample) - 1

    def add_placeholder(self, rows: list[list[Sample]], media_mask: MediaMask) -> None:
        """Add rows."""
        rows += [[sample] for _, sample in self.blanks.samples(media_mask)]

    def in_order(self, rows: list[list[Sample]]) -> list[list[Sample]]:
        """The rows as :func:`~packhorse.collate_fns.pad_collate_fn` orders them."""
        return [[sample] for sample in order_rows([s for row in rows for s in row], self.samples.family)]

    def collate(self, rows: list[list[Sample]]) -> dict[str, Any]:
        """A padded batch."""
        width = None if self.pad_to is None else self.pad_to + 1
        samples = [sample for row in rows for sample in row]
        return collate_samples(
            samples,
            self.samples.family,
            pad_token_id(self.samples.processor),
            width,
            pixel_dtype=self.pixel_dtype,
            media_layout=self.media_layout,
        )


def make_builder(config: LoaderConfig, samples: PreTokenizedDatasetWrapper, model: ModelInfo) -> BatchBuilder:
    """The batch builder for settings that :func:`~packhorse.loader.startup.check_batches` has accepted."""
    dtype = as_dtype(config.pixel_dtype) or model.dtype
    microbatches = config.pipeline_microbatches
    finish = None if microbatches is None else partial(_chunk_media, microbatches)
    for_pipeline = microbatches is not None
    if config.mode == "pad":
        pad_to = config.pack_size if config.pad_to_size else None
        return PadBuilder(samples, pad_to, dtype, finish, config.sample_timeout, media_layout=for_pipeline)
    collater: dict[str, Any] = {
        "padding_idx": pad_token_id(samples.processor),
        "max_length": config.pack_size if config.pad_to_size else None,
        "attn_implementation": attn_backend(config, model),
        "pixel_dtype": dtype,
        "config": model.config,
        "media_layout": for_pipeline,
    }
    if model.dtype is not None:
        collater["mask_dtype"] = model.dtype
    packer = make_packer(config, samples, model)
    return PackBuilder(samples, packer, collater, finish, config.sample_timeout)


def make_packer(config: LoaderConfig, samples: PreTokenizedDatasetWrapper, model: ModelInfo) -> Packer:
    """What shifts, places and joins samples; see :func:`make_builder`."""
    padding = pad_token_id(samples.processor)
    return Packer(config.pack_size, padding, model.get_rope_index, config.alignment, samples.family)


def _chunk_media(microbatches: int, batch: dict[str, Any]) -> dict[str, Any]:
    return dict(prepare_vlm_media_for_pp(batch, len(batch["input_ids"]), microbatches))
