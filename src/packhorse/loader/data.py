"""Opening what is to be loaded, and its exact counts: from the count files, or counted now.

Counting reads text and the headers of media, once; a meta file's counts are kept beside the data, so the
next start takes milliseconds. A list or a Hugging Face dataset is counted at every start (some 30
microseconds to a millisecond a row).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from logging import getLogger
from os import PathLike
from typing import Any

import numpy as np

from packhorse.count.columns import COUNTS, OK, CountColumns
from packhorse.count.counting import OnProgress, Runner, count_meta
from packhorse.count.engines import RankEngine, share_cores
from packhorse.count.parts import PartCounter, make_counter
from packhorse.count.sidecar import counts_of
from packhorse.count.token_counter import Counted, TokenCounter
from packhorse.distributed import Ranks
from packhorse.encode.preparation import with_sound_in_place
from packhorse.errors import DATA_ERRORS, BadSample, ConfigError, is_data_error
from packhorse.formats.conversation import parse_conversation
from packhorse.formats.meta import MetaDataset, open_meta_dataset
from packhorse.ledger import Ledger
from packhorse.media.source import is_address
from packhorse.types import World
from packhorse.utils.pool import LocalEngine
from packhorse.utils.progress import Progress, bars_are_wanted

logger = getLogger("packhorse.loader")

Data = str | PathLike[str] | Mapping[str, Any] | Sequence[Any]
"""A meta file, its content, or examples: a list, or anything with ``len`` and ``[index]``."""

_IN_THIS_PROCESS = 20_000
"""Up to so many rows are counted without starting other processes, which takes some seconds."""
_BLOCK = 256
_COUNT = "count the tokens"
_EXPECTED = (
    "a meta file (JSON that names data files), a dict with its content, or examples with len() and [index] "
    "(a list, a Hugging Face dataset that is not streamed)"
)
_DATA_FILES = (".jsonl", ".ndjson", ".parquet", ".arrow", ".jsonl.gz", ".jsonl.zst")
_OTHER_FILES = (".tar", ".tar.gz", ".tgz", ".zip", ".csv", ".tsv", ".xlsx")


def open_data(
    data: Data | Any, names: Sequence[str] | None, ledger: Ledger, shard: World | None
) -> MetaDataset | Any:
    """The examples of a meta file, or the sequence itself.

    Args:
        data: see :data:`Data`.
        names: only these data sets of a meta file.
        ledger: where rows that are not drawn are recorded.
        shard: take only this rank's rows; None takes all.

    Raises:
        ConfigError: it is nothing of the kind.
    """
    if isinstance(data, Mapping) and data and all(hasattr(part, "column_names") for part in data.values()):
        raise ConfigError(f"data has the splits {', '.join(data)}: choose one, as data['{next(iter(data))}']")
    if isinstance(data, str | PathLike | Mapping):
        meta: Any = dict(data) if isinstance(data, Mapping) else str(data)
        if not isinstance(data, Mapping):
            _refuse_other_files(str(data))
        if shard is None:
            return open_meta_dataset(meta, names, ledger=ledger)
        return open_meta_dataset(
            meta,
            names,
            shard_data=True,
            rank=shard.rank,
            world_size=shard.size,
            remainder="keep",
            ledger=ledger,
        )
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise ConfigError(
            f'data is a {type(data).__name__}: expected {_EXPECTED}. Write data="meta.json", or '
            'data=[{"conversation": […]}, …]'
        )
    if names is not None:
        raise ConfigError("dataset_names= goes with a meta file; data is a sequence of examples")
    if len(data) and shard is None and not isinstance(data, MetaDataset):
        try:
            first = data[0]
        except DATA_ERRORS as error:
            if not is_data_error(error):
                raise
            return data  # counting records it
        if not isinstance(first, Mapping) or "conversation" not in first:
            found = ", ".join(first) if isinstance(first, Mapping) else type(first).__name__
            raise ConfigError(
                f"examples need a 'conversation' (found: {found}): see docs/datasets.md, or give a meta file"
            )
    return data if shard is None else Shard(data, shard)


def _refuse_other_files(path: str) -> None:
    """Raise if a path on this machine is no meta file, with the line to write instead.

    Raises:
        ConfigError: it is missing, a folder, a data file, an archive or a table.
    """
    if is_address(path):
        return
    if not os.path.exists(path):
        raise ConfigError(f"data {path}: no such file or directory. Expected {_EXPECTED}")
    if os.path.isdir(path):
        inside = (name for name in sorted(os.listdir(path)) if name.endswith(_DATA_FILES))
        file = os.path.join(path, next(inside, "train.jsonl"))
        raise _no_meta_file(path, "a directory", f"Write {_entry(file, path)}")
    folder = os.path.dirname(path) or "."
    if path.lower().endswith(_DATA_FILES):
        raise _no_meta_file(path, "a data file", f"Write {_entry(path, folder)}")
    if path.lower().endswith(_OTHER_FILES):
        stem = os.path.basename(path).partition(".")[0]
        converted = os.path.join(folder, f"{stem}.jsonl")
        how = f"Write its rows to {converted} first, one JSON object a line, then {_entry(converted, folder)}"
        raise _no_meta_file(path, "an archive or table", how)


def _entry(file: str, media_dir: str) -> str:
    name = os.path.basename(file).partition(".")[0] or "train"
    return f"data={{{name!r}: {{'file_name': {file!r}, 'media_dir': {media_dir!r}}}}}"


def _no_meta_file(path: str, kind: str, advice: str) -> ConfigError:
    return ConfigError(f"data {path} is {kind}. Expected {_EXPECTED}. {advice}")


class Shard(Sequence[Any]):
    """Every ``size``-th example of a sequence, from ``rank`` on."""

    def __init__(self, data: Any, world: World) -> None:
        self.data, self.world = data, world

    def __len__(self) -> int:
        return len(range(self.world.rank, len(self.data), self.world.size))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return self.data[self._place(index)]

    def key(self, index: int) -> str:
        """The name of an example: that of the sequence, else its number there."""
        own = getattr(self.data, "key", None)
        place = self._place(index)
        return str(own(place)) if callable(own) else str(place)

    def _place(self, index: int) -> int:
        return self.world.rank + index % len(self) * self.world.size


def counts_for(
    dataset: Any, meta: Any, names: Sequence[str] | None, processor: Any, ranks: Ranks, workers: int | None
) -> CountColumns:
    """The exact counts of all examples; counted now where that was not done before.

    Args:
        dataset: of :func:`open_data`.
        meta: what it was opened from.
        names: the data sets of it.
        processor: what will encode them.
        ranks: each counts a share; those that cannot talk count for themselves.
        workers: processes to count with on each machine; one for each core if None.
    """
    if isinstance(dataset, Shard):  # no other rank has these rows
        return ranks.run_on_all_ranks(_COUNT, partial(count_examples, dataset, processor))
    if not isinstance(dataset, MetaDataset):
        return _count_slices(dataset, processor, ranks)
    retry = not os.environ.get("PACKHORSE_KEEP_COUNTS")
    tell = ranks.world.rank == 0
    look = partial(counts_of, dataset, processor, tell=tell, retry_unreachable=retry)
    found = ranks.run_on_all_ranks("read the count files", look)
    if ranks.all_agree(found is not None) and found is not None:
        return found
    if isinstance(meta, MetaDataset):  # opened by the caller: there is no file to count
        return _count_slices(dataset, processor, ranks)
    meta = dict(meta) if isinstance(meta, Mapping) else str(meta)
    processes = share_cores(ranks, workers)  # on every rank: their shards may differ in length
    local = LocalEngine(processes if len(dataset) > _IN_THIS_PROCESS else 1)
    ranks.run_on_all_ranks(_COUNT, partial(_count_meta, meta, names, processor, ranks, local, len(dataset)))
    look = partial(counts_of, dataset, processor, tell=False)  # only rank 0 may see the files
    found = ranks.run_on_all_ranks("read the count files", look)
    if not ranks.all_agree(found is not None):  # no shared folder: the count files are rank 0's alone
        whole = ranks.from_first("read the count files", partial(_whole_counts, dataset, processor))
        found = None if whole is None else _own_counts(dataset, whole)
    if found is None:
        raise ConfigError(
            f"{dataset!r} was counted, but its count files are not found: run `packhorse count` and see what "
            "it says"
        )
    return found


def _count_meta(
    meta: Any, names: Sequence[str] | None, processor: Any, ranks: Ranks, local: LocalEngine, rows: int
) -> None:
    """Count the files of a meta file; on several ranks, each counts a share of their parts."""
    engine: Runner = local
    if ranks.can_talk and ranks.rendezvous is not None:
        engine = RankEngine(ranks, ranks.rendezvous, local)
        if ranks.world.rank:
            return engine.serve(PartCounter.of(processor))
    elif ranks.can_talk and ranks.world.rank:
        return None  # without a store rank 0 counts alone
    logger.info("counting the tokens of %s rows; `packhorse count` does this ahead of a run", f"{rows:,}")
    with _progress_bar("counting tokens") as progress:
        report = count_meta(meta, processor, dataset_names=names, engine=engine, progress=progress)
    logger.info("counted %s rows in %.1f s", f"{report.counted_rows:,}", report.seconds)
    return None


def _whole_counts(dataset: MetaDataset, processor: Any) -> CountColumns | None:
    """The counts of the rows of all ranks, where each takes a share."""
    whole = [
        replace(source, selection=replace(source.selection, world=World(), remainder="keep"))
        for source in dataset.sources
    ]
    return counts_of(MetaDataset(whole, Ledger()), processor)


def _own_counts(dataset: MetaDataset, whole: CountColumns) -> CountColumns:
    """This rank's share of the counts of all rows."""
    positions, first = [], 0
    for source in dataset.sources:
        selection = source.selection
        rows = len(replace(selection, world=World(), remainder="keep"))
        every = np.arange(first, first + rows)
        positions.append(every[selection.world.rank :: selection.world.size][: len(source)])
        first += rows
    return whole.take(np.concatenate(positions))


def _count_slices(dataset: Any, processor: Any, ranks: Ranks) -> CountColumns:
    """Count examples that all ranks have: each rank a slice of them."""
    rank, size = (ranks.world.rank, ranks.world.size) if ranks.can_talk else (0, 1)
    rows = range(len(dataset) * rank // size, len(dataset) * (rank + 1) // size)
    counted = ranks.run_on_all_ranks(_COUNT, partial(count_examples, dataset, processor, rows))
    return CountColumns.joined(ranks.gather(counted))


@contextmanager
def _progress_bar(what: str) -> Iterator[OnProgress | None]:
    """A bar on a terminal; None elsewhere, so that the log tells."""
    if not bars_are_wanted():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield show


def count_examples(dataset: Any, processor: Any, rows: range | None = None) -> CountColumns:
    """Count the examples of a sequence, one after the other; one that cannot be counted has its reason.

    Args:
        dataset: the sequence.
        processor: what will encode them.
        rows: only these examples; all if None.
    """
    rows = range(len(dataset)) if rows is None else rows
    counter = make_counter(processor)
    found: list[Counted | BadSample] = []
    with _progress_bar("counting tokens") as bar:
        report = Progress("counting tokens", len(rows))
        for first in range(0, len(rows), _BLOCK):
            found += [_counted(counter, dataset, index) for index in rows[first : first + _BLOCK]]
            report(len(found))
            if bar is not None:
                bar(len(found), len(rows))
    return _columns(found)


def _counted(counter: TokenCounter, dataset: Any, index: int) -> Counted | BadSample:
    try:
        example = with_sound_in_place(dataset[index], counter.encoder, str(index))
        return counter.count(parse_conversation(example, str(index)))
    except DATA_ERRORS as error:
        if not is_data_error(error):
            raise
        if isinstance(error, BadSample):
            return error
        return BadSample(f"{type(error).__name__}: {error}", reason="sample_failed", key=str(index))


def _columns(found: Sequence[Counted | BadSample]) -> CountColumns:
    good = [one.count if isinstance(one, Counted) else None for one in found]
    integers = {
        name: np.array([0 if count is None else getattr(count, name) for count in good], np.int64)
        for name in (*COUNTS, "off_by")
    }
    bad = [one if isinstance(one, BadSample) else None for one in found]
    status, detail = np.full(len(found), OK, object), np.full(len(found), "", object)
    for place, error in enumerate(bad):
        if error is not None:
            status[place], detail[place] = error.reason, error.detail
    return CountColumns(
        **integers,
        status=status,
        ok=np.array([count is not None for count in good], np.bool_),
        exact=np.array([count is not None and count.exact for count in good], np.bool_),
        detail=detail,
    )
