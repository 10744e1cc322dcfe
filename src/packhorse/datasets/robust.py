"""Datasets that do not stop at a broken sample, and never lose one without a word.

A sample that fails is replaced by another one (chosen from seed, epoch and index: the same on every run),
left out, or raised, as ``on_bad`` says; the first two are recorded in the ledger. Only failures that can be
the sample's fault are handled so (see :func:`packhorse.errors.is_data_error`): a ``NameError`` stops the run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from logging import getLogger
from typing import Any, Literal, get_args

from torch.utils.data import Dataset

from packhorse.conversation import parse_conversation
from packhorse.errors import DATA_ERRORS, BadSample, ConfigError, is_data_error
from packhorse.ledger import Ledger, default_ledger
from packhorse.media import VideoSampling, inject_fake_image, preload_media
from packhorse.types import Drop, Reason, Stage

logger = getLogger("packhorse.datasets")

OnBad = Literal["replace", "skip", "raise"]
Collate = Callable[[list[Any]], Any]


class Batch(list[Any]):
    """The samples of one batch, which know their indices, so that a collate failure can name them."""

    def __init__(self, samples: Iterable[Any], indices: Sequence[int]) -> None:
        super().__init__(samples)
        self.indices = tuple(indices)


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
        try:
            sample = self.load(idx)
        except DATA_ERRORS as error:
            if self.on_bad == "raise" or not is_data_error(error):
                raise
            if self.on_bad == "skip":
                self.record(idx, error, replaced=False)
                self._skipped_in_a_row += 1
                check_in_a_row(self._skipped_in_a_row, self.max_in_a_row, "samples", error)
                return None
            sample = self._replacement(idx, error)
        self._skipped_in_a_row = 0
        return sample

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The samples of a batch. A DataLoader fetches through this, and hands the result to collate."""
        return Batch([self[index] for index in indices], [index % len(self) for index in indices])

    def __iter__(self) -> Iterator[Any]:
        # Spelled out: without it, a sample that raises IndexError would look like the end of the data.
        return (self[index] for index in range(len(self)))

    def key(self, idx: int) -> str:
        """The name of a sample in the ledger: the dataset's own, else its number."""
        own = getattr(self.dataset, "key", None)
        return str(own(idx)) if callable(own) else str(idx)

    def robust_collate(self, collate_fn: Collate) -> Collate:
        """Wrap ``collate_fn`` so that a batch it cannot build is drawn anew and recorded."""
        return make_robust_collate(self, collate_fn, self.max_retries)

    def record(self, idx: int | None, error: BaseException, more: str = "", *, replaced: bool) -> None:
        """Write into the ledger (and the log) that a sample was replaced or left out, and why.

        ``idx`` is None where nobody knows which sample it was: the entry then names none, but counts.
        """
        stage: Stage = error.stage if isinstance(error, BadSample) else "read"
        reason: Reason = error.reason if isinstance(error, BadSample) else "sample_failed"
        detail = (error.detail if isinstance(error, BadSample) else _described(error)) + more
        key = "" if idx is None else self.key(idx)
        dataset = key.rpartition("/")[0]
        action: Literal["replaced", "left_out"] = "replaced" if replaced else "left_out"
        self.ledger.record(Drop(key, stage, reason, detail, action, dataset, self.epoch))
        logger.warning("%s %s: %s", key or "a sample", action.replace("_", " "), detail)

    def substitute(self, idx: int, attempt: int) -> int:
        """The index that stands in for ``idx`` at an attempt; depends on seed, epoch and index alone."""
        others = len(self) - 1
        if others < 1:
            return idx
        step = 1 + random.Random(f"{self.seed}/{self.epoch or 0}/{idx}/{attempt}").randrange(others)
        return (idx + step) % len(self)

    def load(self, idx: int) -> Any:
        """Make the sample; what it raises is judged by :func:`packhorse.errors.is_data_error`."""
        raise NotImplementedError

    def _replacement(self, idx: int, error: BaseException) -> Any:
        last = error
        for attempt in range(self.max_retries):
            other = self.substitute(idx, attempt)
            try:
                sample = self.load(other)
            except DATA_ERRORS as failure:
                if not is_data_error(failure):
                    raise
                last = failure
                continue
            self.record(idx, error, f"; {self.key(other)} instead", replaced=True)
            return sample
        raise RuntimeError(
            f"sample {self.key(idx)} failed ({_described(error)}), {self.max_retries} replacements too; "
            f"the last: {_described(last)}"
        ) from last


class RobustDatasetWrapper(ReplacingDataset):
    """Wraps any dataset so that a broken sample is replaced, left out or raised, and always named.

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
        sample = self.dataset[idx]
        if not self.preload_media:
            return sample
        return inject_fake_image(preload_media(sample, sampling=self._sampling(sample)))

    def _sampling(self, sample: Any) -> VideoSampling | None:
        """How the processor samples frames, asked only where there is a video (not every processor knows)."""
        if self.processor is None or all(r.kind != "video" for r in parse_conversation(sample).media):
            return None
        return VideoSampling.from_processor(self.processor)


def check_in_a_row(failures: int, limit: int, what: str, last: BaseException) -> None:
    """Stop the run where failures follow each other so closely that no single sample can be at fault."""
    if failures >= limit:
        raise RuntimeError(
            f"{failures} {what} in a row were left out; the last: {_described(last)}. "
            "If the data really are like this, raise max_in_a_row"
        ) from last


def make_robust_collate(dataset: Any, collate_fn: Collate, max_retries: int = 10) -> Collate:
    """Wrap ``collate_fn`` so that a batch it cannot build is drawn anew from ``dataset``.

    Samples that were skipped (None) are taken out first; a batch with none left is None. When ``collate_fn``
    fails on the data, the whole batch is replaced, reproducibly, and its samples are recorded.

    Args:
        dataset: a :class:`ReplacingDataset`, or any dataset, which is then wrapped in one.
        collate_fn: takes a list of samples.
        max_retries: after so many further failures a ``RuntimeError`` names the last one.
    """
    wrapper = dataset if isinstance(dataset, ReplacingDataset) else RobustDatasetWrapper(dataset)
    return _RobustCollate(wrapper, collate_fn, max_retries)


class _RobustCollate:
    """What :func:`make_robust_collate` returns; a class, so that it can be sent to spawned workers."""

    def __init__(self, dataset: ReplacingDataset, collate_fn: Collate, max_retries: int) -> None:
        self.dataset, self.collate_fn, self.max_retries = dataset, collate_fn, max_retries
        self._skipped_in_a_row = 0

    def __call__(self, samples: Sequence[Any]) -> Any:
        indices = getattr(samples, "indices", None) or [None] * len(samples)
        known = [(index, s) for index, s in zip(indices, samples, strict=True) if s is not None]
        present = [sample for _, sample in known]
        if not present:
            return None
        try:
            batch = self.collate_fn(present)
        except DATA_ERRORS as error:
            if self.dataset.on_bad == "raise" or not is_data_error(error):
                raise
            return self._instead([index for index, _ in known], error)
        self._skipped_in_a_row = 0
        return batch

    def _instead(self, indices: list[int | None], error: BaseException) -> Any:
        # Stand-ins for samples that nobody knows are chosen by their place in the batch.
        places = [place if index is None else index for place, index in enumerate(indices)]
        if self.dataset.on_bad == "skip":
            batch, others = None, None
        else:
            batch, others = self._retry(places, error)
        failure = BadSample(_described(error), reason="collate_failed", stage="collate")
        for number, index in enumerate(indices):
            more = "" if others is None else f"; {self.dataset.key(others[number])} instead"
            self.dataset.record(index, failure, more, replaced=others is not None)
        if others is None:
            self._skipped_in_a_row += 1
            check_in_a_row(self._skipped_in_a_row, self.dataset.max_in_a_row, "batches", error)
        return batch

    def _retry(self, places: list[int], error: BaseException) -> tuple[Any, list[int]]:
        last = error
        for attempt in range(self.max_retries):
            others = [self.dataset.substitute(place, attempt) for place in places]
            try:
                samples = [self.dataset[other] for other in others]
                return self.collate_fn([sample for sample in samples if sample is not None]), others
            except DATA_ERRORS as failure:
                if not is_data_error(failure):
                    raise
                last = failure
        raise RuntimeError(
            f"collating a batch failed ({_described(error)}), {self.max_retries} replacements too; "
            f"the last: {_described(last)}"
        ) from last


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
