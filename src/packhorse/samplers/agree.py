"""How ranks agree on the number of samples of an epoch: all take as many as the rank that has the fewest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from packhorse.datasets.meta import MetaDataset, Source
from packhorse.datasets.sidecar import counts_of
from packhorse.errors import ConfigError
from packhorse.ledger import Ledger
from packhorse.samplers.lengths import are_too_long
from packhorse.types import World


def has_process_group() -> bool:
    """Whether ranks can talk to each other."""
    return dist.is_available() and dist.is_initialized()


def smallest_by_talking(count: int, **settings: int) -> int:
    """The smallest ``count`` over all ranks of the process group; every rank must call this.

    Works with any backend: the numbers are put where the backend can reach them.

    Args:
        count: this rank's.
        **settings: must be the same everywhere, or the ranks would go different ways.

    Raises:
        ConfigError: a setting differs between ranks (raised on all of them).
    """
    values = list(settings.values())
    # The smallest of -x is the negative of the largest x: one call tells both ends.
    numbers = torch.tensor(
        [count, *values, *(-value for value in values)], dtype=torch.int64, device=reachable_device()
    )
    dist.all_reduce(numbers, dist.ReduceOp.MIN)
    smallest, *ends = numbers.tolist()
    for name, low, high in zip(settings, ends, ends[len(values) :], strict=False):
        if low != -high:
            raise ConfigError(f"{name} is {low} on one rank and {-high} on another: expected the same on all")
    return int(smallest)


def reachable_device(group: Any = None) -> str:
    """The kind of device that the backend moves data on: ``cuda`` for NCCL, ``cpu`` for gloo and MPI."""
    devices = [entry.partition(":")[0] for entry in str(dist.get_backend_config(group)).split(",")]
    return "cpu" if "cpu" in devices else devices[0]


def smallest_without_talking(
    dataset: Any, world: World, count: int, max_length: int | None, processor: Any
) -> int:
    """The smallest count over the ranks of a world in which nobody can be asked.

    Args:
        dataset: this rank's rows, without wrappers.
        world: how many ranks there are.
        count: this rank's number of rows that are not too long.
        max_length: rows above it are left out, see :func:`~packhorse.samplers.lengths.are_too_long`; None
            for no limit.
        processor: what the rows were counted with.

    Raises:
        ConfigError: it cannot be told: rows are left out by their length, and the lengths of the other
            ranks' rows are not in any count file.
    """
    if isinstance(dataset, MetaDataset):
        found = _smallest_share(dataset, world, max_length, processor)
        if found is not None:
            return found
    elif max_length is None:
        return count  # shards of equal size are the dataset's affair
    raise ConfigError(
        f"max_length with {world}: how many rows the other ranks leave out is not known. Initialise "
        "torch.distributed, pass smallest=, or run `packhorse count` and sample from open_meta_dataset(…)"
    )


def _smallest_share(dataset: MetaDataset, world: World, max_length: int | None, processor: Any) -> int | None:
    """From the files alone; every rank comes to the same number."""
    dealt = {source.selection.world.size for source in dataset.sources}
    if dealt - {1, world.size}:
        raise ConfigError(
            f"the dataset is dealt to {sorted(dealt)} ranks: expected {world.size}, as in {world}"
        )
    kept = np.zeros(world.size, np.int64)
    if max_length is None:
        for source in dataset.sources:
            kept += [len(_as_rank(source, rank).selection) for rank in range(world.size)]
        return int(kept.min())
    whole = [_of_everybody(source) for source in dataset.sources]
    counts = counts_of(MetaDataset(whole, Ledger()), processor) if processor is not None else None
    if counts is None:
        return None
    fits = ~are_too_long(counts.total, counts.exact, max_length)
    first = 0
    for source, all_rows in zip(dataset.sources, whole, strict=True):
        part = fits[first : first + len(all_rows)]
        first += len(all_rows)
        for rank in range(world.size):
            mine = _as_rank(source, rank).selection
            kept[rank] += part[mine.world.rank :: mine.world.size][: len(mine)].sum()
    return int(kept.min())


def _as_rank(source: Source, rank: int) -> Source:
    """A dataset's rows as another rank has them; the same where rows are not dealt."""
    size = source.selection.world.size
    return (
        source if size == 1 else replace(source, selection=replace(source.selection, world=World(rank, size)))
    )


def _of_everybody(source: Source) -> Source:
    return replace(source, selection=replace(source.selection, world=World(), remainder="keep"))
