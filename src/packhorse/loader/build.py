"""Build batches from work items, in workers.

A work item names the samples, the epoch, and the media that other ranks have in that step. So workers never
see the plan, and live on from epoch to epoch.
"""

from __future__ import annotations

import hashlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import groupby
from logging import getLogger
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from packhorse.chat import IGNORE_INDEX, pad_token_id
from packhorse.collate.batch_formats import batch_format_of
from packhorse.collate.packed import collate_packs, loss_inputs
from packhorse.collate.packer import Packer
from packhorse.collate.padded import collate_samples, order_rows
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import BadSample, data_errors
from packhorse.families.router_loss import ROUTER_MASK, has_router_loss
from packhorse.loader.config import LoaderConfig, as_dtype
from packhorse.loader.placeholder import Placeholders
from packhorse.loader.startup import ModelInfo, attn_backend
from packhorse.pp_media import prepare_vlm_media_for_pp
from packhorse.types import (
    MEDIA_KINDS,
    Batch,
    BatchInfo,
    Drop,
    MediaMask,
    PixelFormat,
    Sample,
    WorkItem,
    expand_tensors,
)
from packhorse.utils import pool

logger = getLogger("packhorse.loader")

NO_SAMPLE = -1


class SampleTimeout(BaseException):
    """Raised while a sample is loaded.

    Inherits from ``BaseException`` so that ``except Exception`` in a decoder cannot swallow it.
    """


@cache
def _warn_of_no_limit(why: str) -> None:
    logger.warning("sample_timeout has no effect: %s", why)


@contextmanager
def time_limit(seconds: float | None, key: Callable[[], str]) -> Iterator[None]:
    """Raise :class:`BadSample` if the block, which reads the sample ``key()``, takes longer.

    Uses SIGALRM, which only the main thread can handle (a worker builds batches there). In other threads, and
    if the program has its own handler, there is no limit.
    """
    previous, why = signal.getsignal(signal.SIGALRM), ""
    if threading.current_thread() is not threading.main_thread():
        why = "samples are built outside the main thread"
    elif previous not in (signal.SIG_DFL, signal.SIG_IGN):
        why = "the program has its own handler for SIGALRM"
    if seconds is None or why:
        if seconds is not None:
            _warn_of_no_limit(why)
        yield
        return

    def stop(*_: Any) -> None:
        raise SampleTimeout

    signal.signal(signal.SIGALRM, stop)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except SampleTimeout:
        detail = f"not ready after {seconds:g} s (sample_timeout)"
        raise BadSample(detail, reason="broken_media", stage="media", key=key()) from None
    finally:  # even if the alarm goes off at this moment
        signal.signal(signal.SIGALRM, previous)


def _seed_random(text: str) -> None:
    """Seed the random numbers of Python, numpy and torch, for what a dataset or a hook draws."""
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would initialise the GPUs


@contextmanager
def restore_random_state() -> Iterator[None]:
    """Restore the random numbers of Python, numpy and torch after the block."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


class Built(NamedTuple):
    """A batch and the ledger entries of building it."""

    batch: Batch
    drops: tuple[Drop, ...] = ()


Row = list[tuple[int | None, Sample]]
"""The samples of one row of a batch with their indices; None for a placeholder.

Both answers of a pair are always together, also in a padded batch, in which each gets a row of its own.
"""


class BatchBuilder:
    """Builds batches from work items, see the subclasses; a sample that fails is recorded and dropped."""

    def __init__(self, config: LoaderConfig, samples: PreTokenizedDatasetWrapper, model: ModelInfo) -> None:
        self.config, self.samples, self.model = config, samples, model
        self.pixel_dtype = as_dtype(config.pixel_dtype) or model.dtype
        self.placeholders = Placeholders(samples)

    def build(self, item: WorkItem) -> Built:
        """Encode the samples of a work item and collate those that can be used."""
        started = time.perf_counter()
        self.samples.set_epoch(item.epoch)  # of ledger entries
        rows: list[Row] = []
        for pack in item.packs:
            rows += self.split_rows([(index, sample) for index in pack for sample in self.documents(index)])
        rows, batch = self._collate_usable(rows, item.media_mask)
        pixels, microbatches = self._pixel_formats(batch), self.config.pipeline_microbatches
        if not item.keep_bytes or microbatches is not None:
            batch, pixels = {**batch, **expand_tensors(batch, pixels)}, {}
        if microbatches is not None:
            batch = dict(prepare_vlm_media_for_pp(batch, len(batch["input_ids"]), microbatches))
        elif self.model.vision is not None:
            batch |= self.model.vision.of_batch(batch)
        info = self._describe(item, self.in_order(rows), batch, time.perf_counter() - started)
        info = replace(info, pixels=pixels)
        inputs = loss_inputs(batch)
        if self.config.task == "preference":  # model(**batch) must not train on rejected answers
            info = replace(info, labels=inputs.pop("labels"))
            del inputs["shift_labels"]
        return Built(Batch(inputs, info))

    def _pixel_formats(self, batch: Mapping[str, Any]) -> dict[str, PixelFormat]:
        """Return the tensors of a batch whose pixels are bytes, with what they become."""
        compact = self.samples.encoder.compact
        formats = {} if compact is None else compact.formats
        return {key: replace(one, dtype=self.pixel_dtype) for key, one in formats.items() if key in batch}

    def _describe(
        self, item: WorkItem, rows: Sequence[Row], batch: Mapping[str, Any], seconds: float
    ) -> BatchInfo:
        used = {index: None for row in rows for index, _ in row if index is not None}
        images, videos, audios = (
            tuple(sum(sample.num_items[kind] for _, sample in row) for row in rows) for kind in MEDIA_KINDS
        )
        return BatchInfo(
            item.epoch,
            item.step,
            samples=tuple(used),
            lost=tuple(index for index in item.samples if index not in used),
            delivered=tuple(index in used for index in item.samples),
            tokens=sum(self.length(sample) for row in rows for index, sample in row if index is not None),
            slots=batch["labels"].numel(),
            supervised=int((batch["labels"] != IGNORE_INDEX).sum()),
            placeholder=any(index is None for row in rows for index, _ in row),
            seconds=seconds,
            document_keys=tuple(
                tuple("" if index is None else self.samples.key(index) for index, _ in row) for row in rows
            ),
            document_roles=tuple(tuple(sample.role for _, sample in row) for row in rows),
            document_lengths=tuple(tuple(self.length(sample) for _, sample in row) for row in rows),
            document_ids=batch.get("_packed_seq_ids"),
            num_images=images,
            num_videos=videos,
            num_audios=audios,
            loss_weights=batch.get("loss_weights"),
        )

    def documents(self, index: int) -> list[Sample]:
        """Return the documents of a row as :meth:`prepare` makes them: two for a pair, else one.

        The list is empty if the row cannot be used, which is recorded.
        """
        key = partial(self.samples.key, index)
        # With shard_data each rank has its own indices: keys differ.
        _seed_random(f"{self.config.seed}/{self.samples.epoch}/{key() if self.config.shard_data else index}")
        pool.note.value = index  # for the message if the sample kills its worker
        try:
            record, seconds = partial(self.samples.record, index), self.config.sample_timeout
            with data_errors(self.samples.on_bad, record), time_limit(seconds, key):
                if self.config.task == "preference":
                    return [self.prepare(document) for document in self.samples.load_documents(index)]
                return [self.prepare(self.samples.load_sample(index))]
        finally:
            pool.note.value = NO_SAMPLE
        return []

    def prepare(self, sample: Sample) -> Sample:
        """Return an encoded sample as :meth:`collate` takes it."""
        return sample

    def split_rows(self, samples: Sequence[tuple[int, Sample]]) -> list[Row]:
        """Return the samples of a pack in rows: one row, or none if there is no sample."""
        return [list(samples)] if samples else []

    def add_placeholder(self, rows: list[Row], media_mask: MediaMask) -> None:
        """Add a placeholder with these media to ``rows``, or a row with one if there is none."""
        raise NotImplementedError

    def collate(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Collate a batch of the samples of each row."""
        raise NotImplementedError

    def in_order(self, rows: list[Row]) -> list[Row]:
        """Return the rows in the order in which they are in the batch."""
        return rows

    def length(self, sample: Sample) -> int:
        """Return how many tokens of the batch a sample takes."""
        return len(sample)

    def _collate_usable(self, rows: list[Row], media_mask: MediaMask) -> tuple[list[Row], dict[str, Any]]:
        """Collate the rows and placeholders; if that fails, without the rows that cannot be collated."""
        completed = self._with_placeholders(rows, media_mask)
        with data_errors(self.samples.on_bad) as outcome:
            return completed, self.collate(completed)
        assert outcome.error is not None
        usable = [row for row in rows if not self._reject(row)]
        if len(usable) == len(rows):  # each row alone can be collated: no sample is at fault
            raise outcome.error.original
        completed = self._with_placeholders(usable, media_mask)
        return completed, self.collate(completed)

    def _with_placeholders(self, rows: Iterable[Row], media_mask: MediaMask) -> list[Row]:
        rows = [list(row) for row in rows]
        samples = (sample for row in rows for _, sample in row)
        present = MediaMask.of(kind for sample in samples for kind in MEDIA_KINDS if sample.num_items[kind])
        missing = media_mask & ~present
        if missing or not rows:
            self.add_placeholder(rows, missing)
        return rows

    def _reject(self, row: Row) -> bool:
        """Record the samples of a row that cannot be collated; return whether it is one."""
        with data_errors(reason="collate_failed", stage="collate") as outcome:
            self.collate([row])
        if outcome.error is None:
            return False
        for index in dict.fromkeys(index for index, _ in row):
            self.samples.record(index, outcome.error)
        return True


class PackBuilder(BatchBuilder):
    """Builds packed batches."""

    def __init__(self, config: LoaderConfig, samples: PreTokenizedDatasetWrapper, model: ModelInfo) -> None:
        super().__init__(config, samples, model)
        self.packer = make_packer(config, samples, model)
        self.collater: dict[str, Any] = {
            "padding_idx": self.packer.padding_idx,
            "max_length": config.pack_size if config.pad_to_size else None,
            # The format: a worker process has no declarations of this one.
            "attn_implementation": batch_format_of(attn_backend(config, model)),
            "pixel_dtype": self.pixel_dtype,
            "config": model.config,
            "media_layout": config.pipeline_microbatches is not None,
        }
        if model.dtype is not None:
            self.collater["mask_dtype"] = model.dtype

    def prepare(self, sample: Sample) -> Sample:
        """Shift the sample by one token and compute its positions."""
        return self.packer.prepare(sample)

    def split_rows(self, samples: Sequence[tuple[int, Sample]]) -> list[Row]:
        """Return the samples in one row; a sample that is longer than counted may need another."""
        rows: list[Row] = []
        capacity = used = self.packer.pack_size
        for index, documents in groupby(samples, itemgetter(0)):  # both documents of a pair
            row = list(documents)
            length = sum(self.packer.padded_length(len(sample)) for _, sample in row)
            if length > capacity:
                detail = f"{length:,} tokens, more than a pack has, and more than were counted"
                with data_errors(self.samples.on_bad, partial(self.samples.record, index)):
                    raise BadSample(detail, reason="too_long", stage="encode", key=self.samples.key(index))
                continue
            if used + length > capacity:
                rows.append([])
                used = 0
            rows[-1] += row
            used += length
        return rows

    def add_placeholder(self, rows: list[Row], media_mask: MediaMask) -> None:
        """Add documents to the row with the most free tokens, which were reserved; else a new row."""
        added: Row = [
            (None, self.packer.prepare(sample)) for _, sample in self.placeholders.samples(media_mask)
        ]
        needed, *used = (
            sum(self.packer.padded_length(len(sample)) for _, sample in row) for row in (added, *rows)
        )
        if rows and min(used) + needed <= self.packer.pack_size:
            rows[used.index(min(used))] += added
        else:
            rows.append(added)

    def collate(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Collate a packed batch."""
        packs = [self.packer.join([sample for _, sample in row]) for row in rows]
        batch = collate_packs(packs, self.packer.family, **self.collater)
        if ROUTER_MASK in batch:
            documents = batch.get("_packed_seq_ids", torch.tensor(1))
            _exclude_placeholders(batch[ROUTER_MASK], rows, documents)
        return batch


class PadBuilder(BatchBuilder):
    """Builds padded batches, one document per row."""

    def length(self, sample: Sample) -> int:
        """Return how many tokens of the batch a sample takes: collating shifts it by one."""
        return super().length(sample) - 1

    def add_placeholder(self, rows: list[Row], media_mask: MediaMask) -> None:
        """Add a row for each sample."""
        rows += [[(None, sample)] for _, sample in self.placeholders.samples(media_mask)]

    def in_order(self, rows: list[Row]) -> list[Row]:
        """Return the rows as :func:`~packhorse.collate_fns.pad_collate_fn` orders them."""
        by_sample = {sample: index for row in rows for index, sample in row}
        ordered = order_rows(list(by_sample), self.samples.family)
        return [[(by_sample[sample], sample)] for sample in ordered]

    def collate(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Collate a padded batch."""
        batch = collate_samples(
            [sample for row in rows for _, sample in row],
            self.samples.family,
            pad_token_id(self.samples.processor),
            self.config.pack_size + 1 if self.config.pad_to_size else None,
            pixel_dtype=self.pixel_dtype,
            media_layout=self.config.pipeline_microbatches is not None,
        )
        # A model that is not prepared does not take it, and counts what its 2-D mask has.
        if self.model.counts_documents and has_router_loss(self.model.config):
            batch[ROUTER_MASK] = batch["attention_mask"] > 0
            _exclude_placeholders(batch[ROUTER_MASK], self.in_order(list(rows)), torch.tensor(1))
        return batch


def _exclude_placeholders(mask: torch.Tensor, rows: Sequence[Row], documents: torch.Tensor) -> None:
    """Set the tokens of placeholders to False in a mask [B, S]; ``documents`` are their numbers."""
    numbers = documents.expand_as(mask)
    for row, samples in enumerate(rows):
        for number, (index, _) in enumerate(samples, 1):
            if index is None:
                mask[row] &= numbers[row] != number


def make_packer(config: LoaderConfig, samples: PreTokenizedDatasetWrapper, model: ModelInfo) -> Packer:
    """Return what shifts samples, computes their positions and joins them."""
    padding = pad_token_id(samples.processor)
    return Packer(config.pack_size, padding, model.get_rope_index, config.alignment, samples.family)
