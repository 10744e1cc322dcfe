"""``LengthGroupedSampler``: batches of samples of similar length, in the same step on every rank.

Sorting ten million rows takes a few seconds and 240 MB; an epoch starts in well under a second.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from logging import getLogger
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset, Sampler, Subset

from packhorse.chat import Processor
from packhorse.count.sidecar import counts_of
from packhorse.distributed import Collectives, has_process_group
from packhorse.errors import ConfigError, list_some
from packhorse.families.models import as_processor
from packhorse.formats.estimate import (
    columns_of,
    estimate_image_tokens,
    estimate_lengths,
    estimate_video_tokens,
    image_config,
    video_config,
)
from packhorse.formats.meta import MetaDataset
from packhorse.ledger import Ledger, default_ledger
from packhorse.plan.lengths import SOURCES, UNKNOWN, Counts, row_lengths, wrapped_dataset
from packhorse.types import Drop, Flags, Integers, Reason, Rows, World


class IntegerSequence(Sequence[int]):
    """A sequence of ints (``[i]``, ``len``, ``==`` with a list) over a numpy array."""

    __slots__ = ("_values",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: Integers) -> None:
        self._values = values.view()
        self._values.flags.writeable = False

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        values: int | list[int] = self._values[index].tolist()
        return values

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | tuple | IntegerSequence | np.ndarray):
            return NotImplemented
        return len(self) == len(other) and bool(np.array_equal(self._values, np.asarray(other)))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self._values.astype(dtype or np.int64, copy=bool(copy))

    def __repr__(self) -> str:
        return f"IntegerSequence([{list_some(self, 8)}], {len(self):,} in all)"


MARGIN = 512
"""Rows whose length is not exact are excluded only if they are this much above ``max_length``."""


def are_too_long(tokens: Integers, exact: Flags, max_length: int) -> Flags:
    """Return which rows are excluded by their length; inexact lengths have a margin of ``MARGIN``."""
    too_long: Flags = tokens > max_length + np.where(exact, 0, MARGIN)
    return too_long


def raw_samples(dataset: Rows) -> Any:
    """Return what is inside the wrappers of a dataset, as long as they keep its rows and their order."""
    inner = None if isinstance(dataset, Subset | ConcatDataset) else wrapped_dataset(dataset)
    return dataset if inner is None else raw_samples(inner)


def key_of(dataset: Rows, index: int) -> str:
    """Return the key of a row in the ledger: that of the dataset (``coco/812``), else its index."""
    for wrapper in _wrappers(dataset):
        if isinstance(wrapper, Subset):
            index = int(wrapper.indices[index])
        elif callable(key := getattr(wrapper, "key", None)):
            return str(key(index))
    return str(index)


def ledger_of(dataset: Rows) -> Ledger:
    """Return the ledger of the dataset, of what it wraps, or of this process."""
    for wrapper in _wrappers(dataset):
        if isinstance(ledger := getattr(wrapper, "ledger", None), Ledger):
            return ledger
    return default_ledger()


def processor_of(dataset: Any) -> Processor | None:
    """Return the processor that a wrapper encodes with; None if there is none, or several are joined."""
    for wrapper in _wrappers(dataset):
        if isinstance(wrapper, ConcatDataset):
            processors = {id(processor): processor for processor in map(processor_of, wrapper.datasets)}
            return next(iter(processors.values())) if len(processors) == 1 else None
        processor: Processor | None = getattr(wrapper, "processor", None)
        if processor is not None:
            return processor
    return None


def _wrappers(dataset: Any) -> Iterator[Any]:
    """Yield a dataset, what it wraps, what that wraps, and so on."""
    while dataset is not None:
        yield dataset
        dataset = dataset.dataset if isinstance(dataset, Subset) else wrapped_dataset(dataset)


def smallest_share(
    dataset: MetaDataset, world: World, max_length: int | None, processor: Processor | None
) -> int | None:
    """Return the smallest number of rows that a rank keeps, from the files alone: the same on every rank.

    None if unknown: rows above ``max_length`` are excluded, and the other ranks' rows have not been counted.
    Raises :class:`ConfigError` if the rows are split across another number of ranks.
    """
    sizes = {source.selection.world.size for source in dataset.sources}
    if sizes - {1, world.size}:
        problem = (
            f"the dataset is split across {sorted(sizes)} ranks: expected {world.size}, as in world={world}"
        )
        raise ConfigError(problem, setting="world", value=world.size)
    everything = [replace(source.selection, world=World(), remainder="keep") for source in dataset.sources]
    fits = np.ones(sum(map(len, everything)), np.bool_)
    if max_length is not None:
        pairs = zip(dataset.sources, everything, strict=True)
        unsplit = MetaDataset([replace(source, selection=rows) for source, rows in pairs], Ledger())
        counts = counts_of(unsplit, processor) if processor is not None else None
        if counts is None:
            return None
        fits = ~are_too_long(counts.total, counts.exact, max_length)
    kept, first = np.zeros(world.size, np.int64), 0
    for source, rows in zip(dataset.sources, everything, strict=True):
        part, size = fits[first : first + len(rows)], source.selection.world.size
        first += len(rows)
        for rank in range(world.size):
            share = replace(source.selection, world=World(rank if size > 1 else 0, size))
            kept[rank] += part[share.world.rank :: size][: len(share)].sum()
    return int(kept.min())


logger = getLogger("packhorse.samplers")

_CHUNKS_AT_ONCE = 8192
_MOST_SINGLE_ENTRIES = 10_000
_GOLDEN = 0.6180339887498949


class LengthGroupedSampler(Sampler[int]):
    """Yields batches of samples of similar length; step N has similar lengths on every rank.

    Each rank samples from its own rows (``shard_data=True``), sorted by tokens, the longest first. Each epoch
    the sorted order is cut into chunks of ``batch_size``, which are shuffled with ``seed + epoch``, the same
    on all ranks. If ``batch_size`` does not divide the number of rows, one chunk is short: a different one
    each epoch, which comes last.

    All ranks take as many rows as the rank with the fewest. With a process group they agree on that number in
    the constructor, which all ranks have to call. Surplus rows are dropped evenly along the sorted order,
    different ones each epoch, and recorded in the ledger.

    Lengths come from the count file of ``packhorse count`` for this processor, else from the row's own
    fields, else they are estimated; the log has the number of rows of each.

    Args:
        dataset: this rank's rows, wrapped or not.
        seed: the same on every rank.
        processor: finds count files and, by its geometry (``image_processor``, ``video_processor``), the
            tokens of media of known size. A processor or the path of one; None for the one that the
            dataset's wrapper encodes with.
        max_length: drop rows of more tokens or, if the length is not exact, of more than
            ``max_length + 512``; they are recorded in the ledger.
        batch_size: samples of a batch.
        world: this rank, if there is no process group; ``World()`` does not communicate.
        counts: the lengths of the rows, if the caller has them.
        smallest: the rows that every rank takes, if agreed on elsewhere.
        ledger: records dropped rows; by default that of the dataset, else of the process.

    Attributes:
        lengths: tokens of each row of the dataset, in its order.
        sorted_indices: the rows of this epoch, the longest first.
        length_source: number of rows by the source of their length: ``given``, ``sidecar``, ``row fields``,
            ``estimate``, or ``unknown`` (the row cannot be read: 0 tokens).
        epoch: see :meth:`set_epoch`.
        batch_size: at least 1.

    Raises:
        ConfigError: ranks differ in ``seed`` or ``batch_size``, or cannot agree on the number of rows.
    """

    def __init__(
        self,
        dataset: Rows,
        seed: int = 42,
        processor: Processor | str | None = None,
        max_length: int | None = None,
        batch_size: int = 1,
        *,
        world: World | None = None,
        counts: Counts | None = None,
        smallest: int | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.seed, self.batch_size, self.epoch = seed, max(1, batch_size), 0
        self.max_length = max_length
        self.ledger = ledger if ledger is not None else ledger_of(dataset)
        self.length_source: Counter[str] = Counter()
        processor = processor_of(dataset) if processor is None else as_processor(processor)
        self._dataset, self._processor, self._counts = dataset, processor, counts
        self._image_cfg = self._extract_image_config(processor)
        self._video_cfg = self._extract_video_config(processor)
        self.lengths = self._compute_or_load_lengths(dataset)
        self._order = self._sort_rows()
        self._count = self._agree_on_count(len(self._order), world, smallest)
        self._start = self._position = 0
        self._thinned: tuple[int, Integers] | None = None
        self._log_summary()

    @property
    def sorted_indices(self) -> IntegerSequence:
        """The rows of this epoch, the longest first (of equals, the first in the dataset first)."""
        return IntegerSequence(self._rows_of(self.epoch))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which changes the order. A position loaded for the same epoch is kept."""
        if epoch != self.epoch:
            self.epoch, self._start, self._position = epoch, 0, 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        self._position = self._start
        return self._iterate()

    def _iterate(self) -> Iterator[int]:
        epoch, start = self.epoch, self._start
        self._start, self._position = 0, start
        rows = self._rows_of(epoch)
        self._record_left_over(epoch, rows)
        for block in self._blocks(rows, epoch, start):
            for index in block.tolist():
                self._position += 1
                yield index

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of indices that were yielded.

        A ``DataLoader`` prefetches: to resume exactly, set ``position`` to the number of samples used.
        """
        return {
            "epoch": self.epoch,
            "position": self._position,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "samples": self._count,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume from :meth:`state_dict`: the next iteration starts at its position.

        Raises:
            ConfigError: seed, batch size or the number of samples differ.
        """
        current = self.state_dict()
        for name in ("seed", "batch_size", "samples"):
            if state[name] != current[name]:
                problem = f"the state has {name}={state[name]}, this sampler {current[name]}"
                raise ConfigError(problem, setting=name, value=state[name])
        position = state["position"]
        if not 0 <= position <= self._count:
            raise ConfigError.of("position", position, f"expected 0 to {self._count}, the number of samples")
        self.epoch, self._start, self._position = state["epoch"], position, position

    _extract_image_config = staticmethod(image_config)
    _extract_video_config = staticmethod(video_config)
    _get_raw_samples = staticmethod(raw_samples)

    def _compute_or_load_lengths(self, dataset: Rows) -> IntegerSequence:
        """Return the tokens of each row, from the best source."""
        configs = self._image_cfg, self._video_cfg
        lengths = row_lengths(dataset, self._processor, *configs, counts=self._counts)
        self.length_source = lengths.sources
        self._exact: Flags = lengths.exact
        return IntegerSequence(lengths.tokens)

    def _estimate_tokens(self, example: Mapping[str, Any]) -> tuple[int, int]:
        """Return (text tokens, media tokens) of one example, from its fields or estimated."""
        total, media, _ = estimate_lengths(columns_of([example]), self._image_cfg, self._video_cfg)
        return int(total[0] - media[0]), int(media[0])

    def _estimate_image_tokens(self, img_meta: Any) -> int:
        """Return the tokens of an image of ``[height, width]``."""
        return estimate_image_tokens(img_meta, self._image_cfg)

    def _estimate_video_tokens(self, vid_meta: Any) -> int:
        """Return the tokens of a video of ``[total_frames, height, width, fps, duration]``."""
        return estimate_video_tokens(vid_meta, self._video_cfg)

    def _sort_rows(self) -> Integers:
        """Return the rows that are not too long, the longest first; record the others."""
        lengths = np.asarray(self.lengths)
        order: Integers = np.argsort(-lengths, kind="stable")
        if self.max_length is None:
            return order
        too_long = are_too_long(lengths, self._exact, self.max_length)
        above = f"more than max_length={self.max_length}"
        for exact, detail in ((True, above), (False, f"{above} and a margin of {MARGIN}")):
            dropped = np.flatnonzero(too_long & (self._exact == exact))
            self._record(dropped, "too_long", detail, lengths=lengths[dropped])
        return order[~too_long[order]]

    def _agree_on_count(self, count: int, world: World | None, smallest: int | None) -> int:
        """Return the number of rows that every rank takes in an epoch."""
        if smallest is not None:
            if not 0 <= smallest <= count:
                detail = f"this rank has {count} rows that are not too long"
                raise ConfigError.of("smallest", smallest, detail)
            return smallest
        if world is not None and world.size == 1:
            return count
        if has_process_group():
            ranks, settings = Collectives(World.detect()), f"seed={self.seed}, batch_size={self.batch_size}"
            ranks.assert_same("sample with different settings", settings, "Pass the same on every rank.")
            return int(min(ranks.gather(count)))
        if world is None:
            return count
        raw, agreed = raw_samples(self._dataset), None
        if isinstance(raw, MetaDataset) and (self._counts is None or self.max_length is None):
            agreed = smallest_share(raw, world, self.max_length, self._processor)
        elif self.max_length is None:
            return count  # the dataset has to have equal shards
        if agreed is None:
            raise ConfigError.of(
                "max_length",
                self.max_length,
                f"with {world} the number of rows that other ranks drop is unknown. Initialise "
                "torch.distributed, pass smallest=, or run `packhorse count` and sample from "
                "open_meta_dataset(…) without counts=",
            )
        if agreed > count:
            problem = f"by the files every rank has {agreed} rows, but this one has {count}: sample from "
            remedy = "the rows of open_meta_dataset(…) themselves, or pass smallest="
            raise ConfigError(problem + remedy, setting="dataset", value=count)
        return agreed

    def _rows_of(self, epoch: int) -> Integers:
        """Return the rows of an epoch in sorted order, without surplus rows."""
        rows, over = len(self._order), len(self._order) - self._count
        if not over:
            return self._order
        if self._thinned is None or self._thinned[0] != epoch:
            # Evenly along the order, so that equal positions keep similar lengths on all ranks; shifted by
            # the golden ratio, so that epochs drop different rows.
            phase = (abs(self.seed) + epoch) * _GOLDEN % 1
            without = ((np.arange(over) + phase) * rows / over).astype(np.int64)
            self._thinned = epoch, np.delete(self._order, without)
        return self._thinned[1]

    def _blocks(self, rows: Integers, epoch: int, start: int) -> Iterator[Integers]:
        """Yield the rows of an epoch in their random order, from ``start`` on."""
        size, count = self.batch_size, len(rows)
        chunks, rest = -(-count // size), count % size
        generator = torch.Generator().manual_seed(self.seed + epoch)
        drawn = torch.randperm(chunks, generator=generator).numpy()
        firsts, last = drawn * size, np.empty(0, np.int64)
        if rest:
            # The short chunk comes last, to shift no batch, and is drawn, so that drop_last does not drop
            # the same rows in every epoch.
            short = int(torch.randint(chunks, (1,), generator=generator))
            firsts = (drawn * size - (drawn > short) * (size - rest))[drawn != short]
            last = rows[short * size : short * size + rest]
        within = np.arange(size)
        for chunk in range(start // size, len(firsts), _CHUNKS_AT_ONCE):
            block = rows[(firsts[chunk : chunk + _CHUNKS_AT_ONCE, None] + within).ravel()]
            yield block[max(0, start - chunk * size) :]
        yield last[max(0, start - len(firsts) * size) :]

    def _record_left_over(self, epoch: int, rows: Integers) -> None:
        if len(rows) < len(self._order):
            over = np.setdiff1d(self._order, rows, assume_unique=True)
            detail = f"another rank has only {self._count} rows; this one has {len(self._order)}"
            self._record(over, "left_over", detail, epoch=epoch)

    def _record(
        self,
        rows: Integers,
        reason: Reason,
        detail: str,
        *,
        lengths: Integers | None = None,
        epoch: int | None = None,
    ) -> None:
        """Record rows in the ledger: single entries with their lengths, or arrays if they are many."""
        many: dict[str, list[int]] = defaultdict(list)
        for position, row in enumerate(rows.tolist()):
            key = key_of(self._dataset, row)
            name, _, number = key.rpartition("/")
            if number.isdigit() and len(rows) > _MOST_SINGLE_ENTRIES:
                many[name].append(int(number))
                continue
            tokens = "" if lengths is None else f"{lengths[position]} tokens are "
            self.ledger.record(Drop(key, "plan", reason, tokens + detail, "dropped", name, epoch))
        for name, numbers in many.items():
            unique = np.unique(np.array(numbers, np.int64))
            self.ledger.record_rows(name, unique, stage="plan", reason=reason, detail=detail, epoch=epoch)

    def _warn_of_accelerate(self) -> None:
        """Warn that Accelerate splits batches of a prepared DataLoader, even if rows are split already."""
        state, raw = sys.modules.get("accelerate.state"), raw_samples(self._dataset)
        mixture = getattr(getattr(raw, "key", None), "mixture", raw)  # of a loaded list
        sources = mixture.sources if isinstance(mixture, MetaDataset) else ()
        is_split = any(source.selection.world.size > 1 for source in sources)
        if is_split and state is not None and state.is_initialized():
            logger.warning(
                "the rows are this rank's share of a dataset: do not pass their DataLoader through "
                "accelerator.prepare, which would give each rank a part of its own batches only; or open the "
                "rows without shard_data=True"
            )

    def _log_summary(self) -> None:
        self._warn_of_accelerate()
        sources = ", ".join(f"{rows:,} by {source}" for source, rows in self.length_source.items())
        logger.info("lengths of %s rows: %s", f"{len(self.lengths):,}", sources or "none")
        if unknown := self.length_source[SOURCES[UNKNOWN]]:
            logger.warning(
                "%s rows cannot be read and count as 0 tokens; loading them records why", f"{unknown:,}"
            )
        if too_long := len(self.lengths) - len(self._order):
            logger.warning("%s rows above max_length=%s are dropped", f"{too_long:,}", self.max_length)
        if self._count < len(self._order):
            gone = f"{len(self._order) - self._count:,}"
            logger.warning("another rank has fewer rows: %s are dropped in each epoch", gone)
        if not self._count:
            logger.warning("no rows to sample from on at least one rank: every epoch is empty")
