"""Datasets that do not stop at a broken sample, and never lose one without a word.

A sample that fails is replaced by another one (chosen from seed, epoch and index: the same on every run),
dropped, or raised, as ``on_bad`` says; the first two are recorded in the ledger. Only failures that can be
the sample's fault are handled so (see :func:`packhorse.errors.data_errors`): a ``NameError`` stops the run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Literal, get_args

from torch.utils.data import Dataset

from packhorse.errors import BadSample, ConfigError, data_errors
from packhorse.formats.conversation import parse_conversation
from packhorse.formats.example_media import inject_fake_image, preload_media
from packhorse.ledger import Ledger, default_ledger, reading_row
from packhorse.media import VideoSampling
from packhorse.types import Action, Drop, Stage

logger = getLogger("packhorse.datasets")

OnBad = Literal["replace", "skip", "raise"]
Collate = Callable[[list[Any]], Any]


class Batch(list[Any]):
    """The samples of one batch, which know where they come from, so that a collate function can name them.

    Attributes:
        indices: of the samples in their dataset, None where nobody knows.
        keys: their names in the ledger, empty where nobody knows.
        ledger: the dataset's.
        epoch: the dataset's.
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
    """A wrapped dataset in which a broken sample neither stops the run nor disappears.

    Subclasses say in :meth:`load` what a sample is.

    Args:
        dataset: anything with ``len`` and ``[index]``. If it has ``key(index)``, that names the samples.
        max_retries: how many replacements are tried before the run stops with a ``RuntimeError``.
        on_bad: ``"replace"`` a failing sample by another one, ``"skip"`` it (``None`` comes back, which
            :meth:`robust_collate` takes out of the batch), or ``"raise"``.
        max_in_a_row: after so many samples (or batches) skipped in a row by one process, the run stops with a
            ``RuntimeError``: then not a sample but the set-up is broken (a wrong folder, a faulty collate).
        seed: chooses the replacements, with the epoch and the index.
        ledger: where failures are recorded; the dataset's own (``dataset.ledger``) or else the process's.
    """

    def __init__(
        self,
        dataset: Any,
        max_retries: int = 10,
        *,
        on_bad: OnBad = "replace",
        max_in_a_row: int = 100,
        seed: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        if on_bad not in get_args(OnBad):
            raise ConfigError(f"on_bad={on_bad!r}: expected one of {', '.join(get_args(OnBad))}")
        self.dataset, self.max_retries, self.on_bad, self.seed = dataset, max_retries, on_bad, seed
        self.max_in_a_row = max_in_a_row
        if ledger is None:
            own = getattr(dataset, "ledger", None)
            ledger = own if isinstance(own, Ledger) else default_ledger()
        self.ledger = ledger
        self.epoch: int | None = None  # until set_epoch is called, entries belong to no epoch
        self._skipped_in_a_row = 0

    def set_epoch(self, epoch: int) -> None:
        """Another epoch chooses other replacements."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> Any:
        """The sample, its recorded replacement, or None if it is skipped."""
        if not -len(self) <= idx < len(self):
            raise IndexError(f"sample {idx} of {len(self)}")
        idx %= len(self)
        with data_errors(self.on_bad) as outcome:
            sample = self.load(idx)
        if outcome.error is not None and self.on_bad == "skip":
            self.record(idx, outcome.error, replaced=False)
            self._skipped_in_a_row += 1
            check_in_a_row(self._skipped_in_a_row, self.max_in_a_row, "samples", outcome.error)
            return None
        if outcome.error is not None:
            sample = self._replacement(idx, outcome.error)
        self._skipped_in_a_row = 0
        return sample

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The samples of a batch. A DataLoader fetches through this, and hands the result to collate."""
        return self.batch([self[index] for index in indices], [index % len(self) for index in indices])

    def batch(self, samples: Iterable[Any], indices: Sequence[int | None]) -> Batch:
        """Samples with what names them."""
        keys = ["" if index is None else self.key(index) for index in indices]
        return Batch(samples, indices, keys, self.ledger, self.epoch)

    def __iter__(self) -> Iterator[Any]:
        # Spelled out: without it, a sample that raises IndexError would look like the end of the data.
        return (self[index] for index in range(len(self)))

    def key(self, idx: int) -> str:
        """The name of a sample in the ledger: the dataset's own, else its number."""
        own = getattr(self.dataset, "key", None)
        return str(own(idx)) if callable(own) else str(idx)

    def read(self, idx: int) -> Any:
        """The dataset's own sample; what it remarks about the row is recorded under the sample's name."""
        with reading_row(self.ledger, self.key(idx)):
            return self.dataset[idx]

    def robust_collate(self, collate_fn: Collate) -> Collate:
        """Wrap ``collate_fn`` so that a batch it cannot build is drawn anew and recorded."""
        return make_robust_collate(self, collate_fn, self.max_retries)

    def record(self, idx: int | None, error: BadSample, more: str = "", *, replaced: bool = False) -> None:
        """Write into the ledger and the log that a sample was replaced or dropped, and why.

        Args:
            idx: the sample; None if unknown: the entry then names none, but counts.
            error: what is wrong with it.
            more: text after the detail.
            replaced: whether another sample is delivered instead.
        """
        detail = error.detail + self._location(idx, error.stage) + more
        key = "" if idx is None else self.key(idx)
        action: Action = "replaced" if replaced else "dropped"
        dataset = key.rpartition("/")[0]
        self.ledger.record(Drop(key, error.stage, error.reason, detail, action, dataset, self.epoch))
        logger.warning("%s %s: %s", key or "a sample", action, detail)

    def _location(self, idx: int | None, stage: Stage) -> str:
        """File and line of the row, if the dataset has ``locations``; errors of reading name them already."""
        locations = getattr(self.dataset, "locations", None)
        if idx is None or not callable(locations) or stage not in ("media", "encode", "collate"):
            return ""
        return f"; {locations([idx])[0]}"

    def substitute(self, idx: int, attempt: int) -> int:
        """The index that stands in for ``idx`` at an attempt; depends on seed, epoch and index alone."""
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
        raise RuntimeError(
            f"sample {self.key(idx)} failed ({error.detail}), {self.max_retries} replacements too; "
            f"the last: {last.detail}"
        ) from last.original


def load_sample(dataset: Any, index: int) -> Any:
    """Return one sample, without the replacement that a :class:`ReplacingDataset` would choose.

    Raises:
        BadSample: the dataset gives None for it.
    """
    own = getattr(dataset, "load", None)
    sample = own(index) if callable(own) else dataset[index]
    if sample is None:
        raise BadSample("the dataset gives no sample", reason="sample_failed", stage="encode")
    return sample


class RobustDatasetWrapper(ReplacingDataset):
    """Wraps any dataset so that a broken sample is replaced, dropped or raised, and always named.

    Arguments are those of :class:`ReplacingDataset`.

    Attributes:
        preload_media: when True, media are loaded here (in the worker) and samples without an image or video
            get the fake image and ``_injected_fake=True``. The dataset's own examples stay as they are.
        processor: tells how video frames are sampled when media are preloaded.
    """

    preload_media: bool = False
    processor: Any = None

    def load(self, idx: int) -> Any:
        """The dataset's sample, with its media loaded if that is asked for."""
        sample = self.read(idx)
        if not self.preload_media:
            return sample
        return inject_fake_image(preload_media(sample, sampling=self._sampling(sample)))

    def _sampling(self, sample: Any) -> VideoSampling | None:
        """How the processor samples frames, asked only where there is a video (not every processor knows)."""
        if self.processor is None or all(r.kind != "video" for r in parse_conversation(sample).media):
            return None
        return VideoSampling.from_processor(self.processor)


def check_in_a_row(failures: int, limit: int, what: str, last: BadSample) -> None:
    """Raise after this many consecutive failures: then no single sample is at fault."""
    if failures >= limit:
        raise RuntimeError(
            f"{failures} {what} in a row were dropped; the last: {last.detail}. "
            "If the data really are like this, raise max_in_a_row"
        ) from last.original


def make_robust_collate(dataset: Any, collate_fn: Collate, max_retries: int = 10) -> Collate:
    """Wrap ``collate_fn`` so that a batch it cannot build is drawn anew from ``dataset``.

    Samples that were skipped (None) are taken out first; a batch with none left is None. When ``collate_fn``
    raises :class:`BadSample` with the key of a sample, that one is replaced or dropped. When it fails on the
    data otherwise, nobody knows which sample is at fault: the whole batch is replaced (or dropped),
    reproducibly, and its samples are recorded.

    Args:
        dataset: a :class:`ReplacingDataset`, or any dataset, which is then wrapped in one.
        collate_fn: takes a list of samples (a :class:`Batch`, which names them).
        max_retries: after so many further failures a ``RuntimeError`` names the last one.
    """
    wrapper = dataset if isinstance(dataset, ReplacingDataset) else RobustDatasetWrapper(dataset)
    return _RobustCollate(wrapper, collate_fn, max_retries)


@dataclass(slots=True)
class _Entry:
    """One sample of a batch that is being collated.

    Attributes:
        index: the sample that was asked for; None where nobody knows.
        now: the sample that stands there.
        sample: its content.
        error: why another one stands there.
        attempts: how many replacements were chosen for it.
    """

    index: int | None
    now: int | None
    sample: Any
    error: BadSample | None = None
    attempts: int = 0


class _RobustCollate:
    """What :func:`make_robust_collate` returns; a class, so that it can be sent to spawned workers."""

    def __init__(self, dataset: ReplacingDataset, collate_fn: Collate, max_retries: int) -> None:
        self.dataset, self.collate_fn, self.max_retries = dataset, collate_fn, max_retries
        self._skipped_in_a_row = 0

    def __call__(self, samples: Sequence[Any]) -> Any:
        indices = getattr(samples, "indices", None) or [None] * len(samples)
        found = zip(indices, samples, strict=True)
        entries = [_Entry(index, index, sample) for index, sample in found if sample is not None]
        last: BadSample | None = None
        for _ in range(len(entries) + self.max_retries):
            if not entries:
                break
            with data_errors(self.dataset.on_bad) as outcome:
                batch = self._collate(entries)
            if outcome.error is None:
                self._record_exchanged(entries)
                self._skipped_in_a_row = 0
                return batch
            last = outcome.error
            culprit = self._culprit(entries, last)
            if culprit is None:
                return self._instead(entries, last)
            self._exchange(entries, culprit, last)
        if entries and last is not None:
            raise self._give_up(entries[0].error or last, last)
        return self._count_skipped(last)

    def _collate(self, entries: Sequence[_Entry]) -> Any:
        samples = [entry.sample for entry in entries]
        return self.collate_fn(self.dataset.batch(samples, [entry.now for entry in entries]))

    def _culprit(self, entries: Sequence[_Entry], error: BadSample) -> int | None:
        """The position of the sample that an error names."""
        keys = ["" if entry.now is None else self.dataset.key(entry.now) for entry in entries]
        return keys.index(error.key) if error.key and error.key in keys else None

    def _exchange(self, entries: list[_Entry], position: int, error: BadSample) -> None:
        """Put another sample in the place of one that is at fault, or take it out."""
        entry = entries[position]
        if self.dataset.on_bad == "skip" or entry.index is None:  # a named one has an index
            self.dataset.record(entry.index, error, replaced=False)
            del entries[position]
            return
        entry.error = entry.error or error
        while entry.attempts < self.max_retries:
            other = self.dataset.substitute(entry.index, entry.attempts)
            entry.attempts += 1
            with data_errors(self.dataset.on_bad) as outcome:
                entry.sample, entry.now = self.dataset.load(other), other
            if outcome.error is None:
                return
            error = outcome.error
        raise self._give_up(entry.error, error)

    def _record_exchanged(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            if entry.error is not None and entry.now is not None:
                more = f"; {self.dataset.key(entry.now)} instead"
                self.dataset.record(entry.index, entry.error, more, replaced=True)

    def _instead(self, entries: Sequence[_Entry], error: BadSample) -> Any:
        """Another batch, or None; all samples of this one are recorded."""
        indices = [entry.index for entry in entries]
        # Stand-ins for samples that nobody knows are chosen by their place in the batch.
        places = [place if index is None else index for place, index in enumerate(indices)]
        if self.dataset.on_bad == "skip":
            batch, others = None, None
        else:
            batch, others = self._retry(places, error)
        failure = _batch_failure(error, named=None not in indices)
        for number, index in enumerate(indices):
            more = "" if others is None else f"; {self.dataset.key(others[number])} instead"
            self.dataset.record(index, failure, more, replaced=others is not None)
        return batch if others is not None else self._count_skipped(error)

    def _count_skipped(self, last: BadSample | None) -> None:
        if last is not None:
            self._skipped_in_a_row += 1
            check_in_a_row(self._skipped_in_a_row, self.dataset.max_in_a_row, "batches", last)

    def _retry(self, places: list[int], error: BadSample) -> tuple[Any, list[int]]:
        last = error
        for attempt in range(self.max_retries):
            others = [self.dataset.substitute(place, attempt) for place in places]
            with data_errors(self.dataset.on_bad) as outcome:
                samples = [self.dataset[other] for other in others]
                entries = [_Entry(n, n, s) for n, s in zip(others, samples, strict=True) if s is not None]
                return self._collate(entries), others
            assert outcome.error is not None
            last = outcome.error
        raise self._give_up(error, last)

    def _give_up(self, error: BadSample, last: BadSample) -> RuntimeError:
        failure = RuntimeError(
            f"collating a batch failed ({error.detail}), {self.max_retries} replacements too; "
            f"the last: {last.detail}"
        )
        failure.__cause__ = last.original
        return failure


def _batch_failure(error: BadSample, *, named: bool) -> BadSample:
    """What is recorded for each sample of a batch that could not be built.

    If the samples have keys, a :class:`BadSample` without a key is about all of them.
    """
    if error.original is error and not error.key and named:
        return error
    detail = f"{error.detail} (which sample of the batch is at fault is not known)"
    return BadSample(detail, reason="collate_failed", stage="collate")
