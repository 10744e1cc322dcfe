"""Dataset wrappers and collate functions that replace, drop or raise a bad sample (``on_bad``).

A replacement depends on seed, epoch and index alone. Replaced and dropped samples are recorded in the ledger.
Only errors of the data are handled (:func:`packhorse.errors.data_errors`): a ``NameError`` stops the run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Literal, get_args

from torch.utils.data import Dataset

from packhorse.chat import Processor
from packhorse.errors import BadSample, ConfigError, ReplacementsFailed, data_errors, suggest
from packhorse.formats.conversation import parse_conversation
from packhorse.formats.example_media import inject_fake_image, preload_media
from packhorse.ledger import Ledger, default_ledger, reading_row
from packhorse.media import VideoSampling
from packhorse.types import Action, Drop, Rows, Stage

logger = getLogger("packhorse.datasets")

OnBad = Literal["replace", "skip", "raise"]
Collate = Callable[[list[Any]], Any]


class SampleBatch(list[Any]):
    """The samples of one batch with their origin, so that a collate function can name them in errors.

    Attributes:
        indices: of the samples in their dataset; None if unknown.
        keys: of the samples in the ledger; empty if unknown.
        ledger: of the dataset.
        epoch: of the dataset.
    """

    def __init__(
        self,
        samples: Iterable[Any],
        indices: Sequence[int | None],
        keys: Sequence[str],
        ledger: Ledger,
        epoch: int | None = None,
    ) -> None:
        super().__init__(samples)
        self.indices, self.keys, self.ledger, self.epoch = tuple(indices), tuple(keys), ledger, epoch


class ReplacingDataset(Dataset[Any]):
    """Base class of datasets that replace, drop or raise a bad sample; subclasses define :meth:`load`.

    Args:
        dataset: anything with ``len`` and ``[index]``; its ``key(index)``, if any, names the samples.
        max_retries: replacements to try before raising ``ReplacementsFailed`` (a ``RuntimeError``).
        on_bad: ``"replace"`` a bad sample by another one, ``"skip"`` it (return ``None``, which
            :meth:`robust_collate` removes from the batch), or ``"raise"``.
        max_consecutive_bad: raise the same after this many consecutive skipped samples (or batches)
            in one process: then the set-up is wrong (a wrong folder, a faulty collate function).
        seed: chooses the replacements, with the epoch and the index.
        ledger: records bad samples; by default ``dataset.ledger``, else the ledger of the process.
    """

    def __init__(
        self,
        dataset: Rows,
        max_retries: int = 10,
        *,
        on_bad: OnBad = "replace",
        max_consecutive_bad: int = 100,
        seed: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        if on_bad not in get_args(OnBad):
            choices = get_args(OnBad)
            expected = f"expected one of {', '.join(choices)}{suggest(on_bad, choices)}"
            raise ConfigError.of("on_bad", on_bad, expected)
        self.dataset, self.max_retries, self.on_bad, self.seed = dataset, max_retries, on_bad, seed
        self.max_consecutive_bad = max_consecutive_bad
        if ledger is None:
            inner = getattr(dataset, "ledger", None)
            ledger = inner if isinstance(inner, Ledger) else default_ledger()
        self.ledger = ledger
        self.epoch: int | None = None  # until set_epoch is called, entries belong to no epoch
        self._consecutive_skipped = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which chooses other replacements."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> Any:
        """Return the sample, its replacement, or None if it is skipped."""
        if not -len(self) <= idx < len(self):
            raise IndexError(f"sample {idx} of {len(self)}")
        idx %= len(self)
        with data_errors(self.on_bad) as outcome:
            sample = self.load(idx)
        if outcome.error is not None and self.on_bad == "skip":
            self.record(idx, outcome.error, replaced=False)
            self._consecutive_skipped += 1
            check_consecutive(self._consecutive_skipped, self.max_consecutive_bad, "samples", outcome.error)
            return None
        if outcome.error is not None:
            sample = self._replacement(idx, outcome.error)
        self._consecutive_skipped = 0
        return sample

    def __getitems__(self, indices: Sequence[int]) -> SampleBatch:
        """Return the samples of a batch; a DataLoader passes the result to its collate function."""
        return self.batch([self[index] for index in indices], [index % len(self) for index in indices])

    def batch(self, samples: Iterable[Any], indices: Sequence[int | None]) -> SampleBatch:
        """Return samples with their indices and keys."""
        keys = ["" if index is None else self.key(index) for index in indices]
        return SampleBatch(samples, indices, keys, self.ledger, self.epoch)

    def __iter__(self) -> Iterator[Any]:
        # Without this, a sample that raises IndexError would end the iteration.
        return (self[index] for index in range(len(self)))

    def key(self, idx: int) -> str:
        """Return the key of a sample in the ledger: that of the dataset, else the index."""
        return dataset_key(self.dataset, idx)

    def read(self, idx: int) -> tuple[str, Any]:
        """Return key and sample of the wrapped dataset; remarks on the row are recorded under its key."""
        key = self.key(idx)
        with reading_row(self.ledger, key):
            return key, self.dataset[idx]

    def robust_collate(self, collate_fn: Collate) -> Collate:
        """Wrap ``collate_fn``, see :func:`make_robust_collate`."""
        return make_robust_collate(self, collate_fn, self.max_retries)

    def record(self, idx: int | None, error: BadSample, more: str = "", *, replaced: bool = False) -> None:
        """Write into the ledger and the log that a sample was replaced or dropped, and why.

        If ``idx`` is unknown (None), the entry names no sample, but counts. ``more`` follows the detail.
        """
        detail = error.detail + self._location(idx, error.stage) + more
        key = "" if idx is None else self.key(idx)
        action: Action = "replaced" if replaced else "dropped"
        drop = Drop.from_key(key, error.stage, error.reason, detail, action, epoch=self.epoch)
        self.ledger.record(drop)
        logger.warning("%s %s: %s", key or "a sample", action, detail)

    def _location(self, idx: int | None, stage: Stage) -> str:
        """File and line of the row, if the dataset has ``locations``; errors of reading name them already."""
        locations = getattr(self.dataset, "locations", None)
        if idx is None or not callable(locations) or stage not in ("media", "encode", "collate"):
            return ""
        return f"; {locations([idx])[0]}"

    def substitute(self, idx: int, attempt: int) -> int:
        """Return the replacement of ``idx`` at an attempt; it depends on seed, epoch and index alone."""
        others = len(self) - 1
        if others < 1:
            return idx
        step = 1 + random.Random(f"{self.seed}/{self.epoch or 0}/{idx}/{attempt}").randrange(others)
        return (idx + step) % len(self)

    def load(self, idx: int) -> Any:
        """Return the sample; :func:`packhorse.errors.data_errors` handles what it raises."""
        raise NotImplementedError

    def _replacement(self, idx: int, error: BadSample) -> Any:
        last = error
        for attempt in range(self.max_retries):
            other = self.substitute(idx, attempt)
            with data_errors(self.on_bad) as outcome:
                sample = self.load(other)
            if outcome.error is None:
                self.record(idx, error, f"; {self.key(other)} instead", replaced=True)
                return sample
            last = outcome.error
        raise _replacements_failed(f"sample {self.key(idx)} failed", error, self.max_retries, last)


def _replacements_failed(what: str, error: BadSample, retries: int, last: BadSample) -> ReplacementsFailed:
    message = f"{what} ({error.detail}), {retries} replacements too; the last: {last.detail}"
    return ReplacementsFailed(message, 1 + retries, last)


def dataset_key(dataset: Rows, index: int) -> str:
    """Return the key that a dataset gives a row (``coco/812``); the index if it has no ``key``."""
    key = getattr(dataset, "key", None)
    return str(key(index)) if callable(key) else str(index)


def load_sample(dataset: Rows, index: int) -> Any:
    """Return one sample, without the replacement that a :class:`ReplacingDataset` would choose."""
    load = getattr(dataset, "load", None)
    sample = load(index) if callable(load) else dataset[index]
    if sample is None:
        raise BadSample("the dataset returns None for this sample", stage="encode")
    return sample


class RobustDatasetWrapper(ReplacingDataset):
    """Wraps any dataset so that a bad sample is replaced, dropped or raised.

    Arguments are those of :class:`ReplacingDataset`.

    Attributes:
        preload_media: load media here (in the worker), and give samples without an image or video the fake
            image and ``_injected_fake=True``. The dataset's own examples do not change.
        processor: defines how video frames are sampled when media are preloaded.
    """

    preload_media: bool = False
    processor: Processor | None = None

    def load(self, idx: int) -> Any:
        """Return the sample of the wrapped dataset, with its media loaded if ``preload_media`` is set."""
        _, sample = self.read(idx)
        if not self.preload_media:
            return sample
        sampling = None  # without a video: not every processor defines it
        if self.processor is not None and any(r.kind == "video" for r in parse_conversation(sample).media):
            sampling = VideoSampling.from_processor(self.processor)
        return inject_fake_image(preload_media(sample, sampling=sampling))


def check_consecutive(failures: int, limit: int, what: str, last: BadSample) -> None:
    """Raise after this many consecutive failures: then no single sample is at fault."""
    if failures >= limit:
        raise ReplacementsFailed(
            f"{failures} consecutive {what} were dropped; the last: {last.detail}. "
            "If the data really are like this, raise max_consecutive_bad",
            failures,
            last,
        )


def make_robust_collate(dataset: Rows, collate_fn: Collate, max_retries: int = 10) -> Collate:
    """Wrap ``collate_fn`` so that samples it cannot collate are replaced or dropped.

    Skipped samples (None) are removed first; an empty batch becomes None. If ``collate_fn`` raises
    :class:`BadSample` with the key of a sample, that sample is replaced or dropped. After any other error of
    the data the whole batch is replaced (or dropped), reproducibly, and all its samples are recorded.

    Args:
        dataset: a :class:`ReplacingDataset`, or any dataset, which is then wrapped in one.
        collate_fn: takes a list of samples (a :class:`SampleBatch`, which has their keys).
        max_retries: replacements to try before raising ``ReplacementsFailed`` (a ``RuntimeError``).
    """
    wrapper = dataset if isinstance(dataset, ReplacingDataset) else RobustDatasetWrapper(dataset)
    return _RobustCollate(wrapper, collate_fn, max_retries)


@dataclass(slots=True)
class _Entry:
    """One sample of a batch that is being collated."""

    index: int | None  # the requested sample; None if unknown
    current: int | None  # the sample that is used, perhaps a replacement
    sample: Any
    error: BadSample | None = None  # why the requested sample was replaced
    attempts: int = 0  # replacements tried


class _RobustCollate:
    """The result of :func:`make_robust_collate`; a class, so that it can be pickled for workers."""

    def __init__(self, dataset: ReplacingDataset, collate_fn: Collate, max_retries: int) -> None:
        self.dataset, self.collate_fn, self.max_retries = dataset, collate_fn, max_retries
        self._consecutive_skipped = 0

    def __call__(self, samples: Sequence[Any]) -> Any:
        indices = getattr(samples, "indices", None) or [None] * len(samples)
        pairs = zip(indices, samples, strict=True)
        entries = [_Entry(index, index, sample) for index, sample in pairs if sample is not None]
        last: BadSample | None = None
        for _ in range(len(entries) + self.max_retries):
            if not entries:
                break
            with data_errors(self.dataset.on_bad) as outcome:
                batch = self._collate(entries)
            if outcome.error is None:
                self._record_exchanged(entries)
                self._consecutive_skipped = 0
                return batch
            last = outcome.error
            culprit = self._culprit(entries, last)
            if culprit is None:
                return self._replace_batch(entries, last)
            self._exchange(entries, culprit, last)
        if entries and last is not None:
            raise self._give_up(entries[0].error or last, last)
        return self._count_skipped(last)

    def _collate(self, entries: Sequence[_Entry]) -> Any:
        samples = [entry.sample for entry in entries]
        return self.collate_fn(self.dataset.batch(samples, [entry.current for entry in entries]))

    def _culprit(self, entries: Sequence[_Entry], error: BadSample) -> int | None:
        """Return the position of the sample that an error names."""
        keys = ["" if entry.current is None else self.dataset.key(entry.current) for entry in entries]
        return keys.index(error.key) if error.key and error.key in keys else None

    def _exchange(self, entries: list[_Entry], position: int, error: BadSample) -> None:
        """Replace a bad sample of the batch, or remove it."""
        entry = entries[position]
        if self.dataset.on_bad == "skip" or entry.index is None:
            self.dataset.record(entry.index, error, replaced=False)
            del entries[position]
            return
        entry.error = entry.error or error
        while entry.attempts < self.max_retries:
            other = self.dataset.substitute(entry.index, entry.attempts)
            entry.attempts += 1
            with data_errors(self.dataset.on_bad) as outcome:
                entry.sample, entry.current = self.dataset.load(other), other
            if outcome.error is None:
                return
            error = outcome.error
        raise self._give_up(entry.error, error)

    def _record_exchanged(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            if entry.error is not None and entry.current is not None:
                more = f"; {self.dataset.key(entry.current)} instead"
                self.dataset.record(entry.index, entry.error, more, replaced=True)

    def _replace_batch(self, entries: Sequence[_Entry], error: BadSample) -> Any:
        """Return another batch, or None; record all samples of this one."""
        indices = [entry.index for entry in entries]
        # Replacements of unknown samples are chosen by the position in the batch.
        seeds = [position if index is None else index for position, index in enumerate(indices)]
        if self.dataset.on_bad == "skip":
            batch, others = None, None
        else:
            batch, others = self._retry(seeds, error)
        failure = _batch_failure(error, named=None not in indices)
        for position, index in enumerate(indices):
            more = "" if others is None else f"; {self.dataset.key(others[position])} instead"
            self.dataset.record(index, failure, more, replaced=others is not None)
        return batch if others is not None else self._count_skipped(error)

    def _count_skipped(self, last: BadSample | None) -> None:
        if last is not None:
            self._consecutive_skipped += 1
            check_consecutive(self._consecutive_skipped, self.dataset.max_consecutive_bad, "batches", last)

    def _retry(self, seeds: list[int], error: BadSample) -> tuple[Any, list[int]]:
        last = error
        for attempt in range(self.max_retries):
            others = [self.dataset.substitute(seed, attempt) for seed in seeds]
            with data_errors(self.dataset.on_bad) as outcome:
                samples = [self.dataset[other] for other in others]
                entries = [_Entry(n, n, s) for n, s in zip(others, samples, strict=True) if s is not None]
                return self._collate(entries), others
            assert outcome.error is not None
            last = outcome.error
        raise self._give_up(error, last)

    def _give_up(self, error: BadSample, last: BadSample) -> ReplacementsFailed:
        return _replacements_failed("collating a batch failed", error, self.max_retries, last)


def _batch_failure(error: BadSample, *, named: bool) -> BadSample:
    """Return the error to record for each sample of a batch that could not be built."""
    if error.original is error and not error.key and named:
        return error  # a BadSample without a key is about all samples
    detail = f"{error.detail} (which sample of the batch is at fault is not known)"
    return BadSample(detail, reason="collate_failed", stage="collate")
