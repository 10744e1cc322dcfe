"""Opening what is to be loaded, and its exact counts: from the count files, or counted now.

Counting reads text and the headers of media, once; a meta file's counts are kept beside the data, so the
next start takes milliseconds. A list or a Hugging Face dataset is counted at every start (some 30
microseconds to a millisecond a row).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from logging import getLogger
from os import PathLike
from typing import Any

import numpy as np

from packhorse.conversation import parse_conversation
from packhorse.datasets import open_meta_dataset
from packhorse.datasets.count_columns import COUNTS, OK, CountColumns
from packhorse.datasets.count_part import make_counter
from packhorse.datasets.counting import OnProgress, count_meta
from packhorse.datasets.meta import MetaDataset
from packhorse.datasets.prepare import with_sound_in_place
from packhorse.datasets.progress import Progress, bars_are_wanted
from packhorse.datasets.sidecar import counts_of
from packhorse.engines import LocalEngine
from packhorse.errors import DATA_ERRORS, BadSample, ConfigError, is_data_error
from packhorse.ledger import Ledger
from packhorse.loader.talk import Ranks
from packhorse.tokens.count import Counted, TokenCounter
from packhorse.types import World

logger = getLogger("packhorse.loader")

Data = str | PathLike[str] | Mapping[str, Any] | Sequence[Any]
"""A meta file, its content, or examples: a list, or anything with ``len`` and ``[index]``."""

_IN_THIS_PROCESS = 20_000
"""Up to so many rows are counted without starting other processes, which takes some seconds."""
_BLOCK = 256
_ROWS_LOOKED_AT = 32


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
            f"data is a {type(data).__name__}: expected a meta file, a dict with its content, or examples "
            "with len() and [index] (a list, a Hugging Face dataset that is not streamed)"
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


def digest_of_rows(dataset: Any) -> str:
    """A name for the texts of a data set: of some of its rows, so that it costs milliseconds.

    Two data sets may have the same lengths; a run that is taken up with the other one would feed some samples
    twice and others never.
    """
    hashed = blake2b(str(len(dataset)).encode(), digest_size=12)
    for index in np.unique(np.linspace(0, len(dataset) - 1, _ROWS_LOOKED_AT).astype(np.int64)).tolist():
        hashed.update(_text_of(dataset, index).encode("utf-8", "backslashreplace"))
    return hashed.hexdigest()


def _text_of(dataset: Any, index: int) -> str:
    try:
        example = dataset[index]
        return "\n".join(message.text for message in parse_conversation(example, "").messages)
    except DATA_ERRORS as error:
        if not is_data_error(error):
            raise
        return ""  # counting records it


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
        ranks: the first one counts, the others wait for it where they can.
        workers: processes to count with; one for each core if None.
    """
    if not isinstance(dataset, MetaDataset):
        counted = partial(count_examples, dataset, processor)
        # Shards are counted by their ranks; what all ranks have, by the first.
        return counted() if isinstance(dataset, Shard) else ranks.from_first(counted)
    retry = not os.environ.get("PACKHORSE_KEEP_COUNTS")
    found = counts_of(dataset, processor, tell=ranks.world.rank == 0, retry_unreachable=retry)
    if ranks.all_agree(found is not None) and found is not None:
        return found
    if isinstance(meta, MetaDataset):  # opened by the caller: there is no file to count
        return found if found is not None else count_examples(dataset, processor)
    meta = dict(meta) if isinstance(meta, Mapping) else str(meta)
    first = ranks.world.rank == 0 or not ranks.can_talk
    ranks.together(lambda: _count_meta(meta, names, processor, workers, len(dataset)) if first else None)
    found = counts_of(dataset, processor)
    if found is None:  # another machine has counted, whose files cannot be seen from here
        _count_meta(meta, names, processor, workers, len(dataset))
        found = counts_of(dataset, processor)
    if found is None:
        raise ConfigError(
            f"{dataset!r} was counted, but its count files are not found: run `packhorse count` and see what "
            "it says"
        )
    return found


def _count_meta(
    meta: Any, names: Sequence[str] | None, processor: Any, workers: int | None, rows: int
) -> None:
    logger.info("counting the tokens of %s rows; `packhorse count` does this ahead of a run", f"{rows:,}")
    engine = LocalEngine(workers) if rows > _IN_THIS_PROCESS else None
    with _progress_bar("counting tokens") as progress:
        report = count_meta(meta, processor, dataset_names=names, engine=engine, progress=progress)
    logger.info("counted %s rows in %.1f s", f"{report.counted_rows:,}", report.seconds)


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


def count_examples(dataset: Any, processor: Any) -> CountColumns:
    """Count the examples of a sequence, one after the other; one that cannot be counted has its reason."""
    counter = make_counter(processor)
    found: list[Counted | BadSample] = []
    with _progress_bar("counting tokens") as bar:
        report = Progress("counting tokens", len(dataset))
        for first in range(0, len(dataset), _BLOCK):
            block = range(first, min(first + _BLOCK, len(dataset)))
            found += [_counted(counter, dataset, index) for index in block]
            report(block.stop)
            if bar is not None:
                bar(block.stop, len(dataset))
    return _columns(found)


def _counted(counter: TokenCounter, dataset: Any, index: int) -> Counted | BadSample:
    try:
        example = with_sound_in_place(dataset[index], counter.family, counter.processor, str(index))
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
