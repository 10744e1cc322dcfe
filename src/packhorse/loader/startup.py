"""Start-up of the loader, of `packhorse plan` and of the viewer: from settings to rows, counts and a planner.

:func:`open_data` opens processor, model and rows; :func:`start_up` counts what was not counted before and
makes the planner. All ranks call both: a step that fails on one of them raises on all.

Counting reads text and the headers of media, once. The counts of a meta file are saved next to the data, so
the next start takes milliseconds. A list or a Hugging Face dataset is counted at every start (30 microseconds
to a millisecond per row).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from logging import getLogger
from os import PathLike
from typing import Any

import numpy as np
import torch

from packhorse.chat import is_tokenizer
from packhorse.collate.processor_call import pad_token_id
from packhorse.count.columns import CountColumns
from packhorse.count.contents import contents_of
from packhorse.count.counting import count_meta
from packhorse.count.engines import RankEngine, share_cores
from packhorse.count.parts import CountedRows, PartCounter, make_counter
from packhorse.count.sidecar import counts_of
from packhorse.count.token_counter import Counted, TokenCounter
from packhorse.distributed import Collectives
from packhorse.encode.preparation import with_audio_placed
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import DATA_ERRORS, BadSample, ConfigError, is_data_error
from packhorse.families import family_of
from packhorse.families.models import (
    EXPECTED,
    UNCHECKED,
    check_packable,
    check_router_loss,
    is_unchecked,
    media_parts,
    resolve_model,
    text_config,
)
from packhorse.families.positions import RopeIndex, rope_index
from packhorse.families.processors import as_whole_processor
from packhorse.families.shift_labels import check_shift_labels
from packhorse.formats.conversation import parse_conversation
from packhorse.formats.meta import MetaDataset, open_meta_dataset
from packhorse.ledger import Ledger
from packhorse.loader.config import LoaderConfig
from packhorse.loader.placeholder import Placeholders
from packhorse.loader.planner import Planner
from packhorse.media.source import is_address
from packhorse.plan.cost_model import CostWeights
from packhorse.types import MEDIA_KINDS, World
from packhorse.utils.pool import Engine, LocalEngine
from packhorse.utils.progress import Progress

logger = getLogger("packhorse.loader")

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


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loader needs to know of the model it feeds; the model itself is not kept.

    Attributes:
        get_rope_index: computes positions in three rows; None for models without mRoPE.
        attention: the attention implementation of its decoder.
        dtype: of its weights; None if unknown.
        weights: what tokens and patches cost.
        config: the model's; None if unknown.
        name: of the model's class or config, or ``"unchecked"``.
    """

    get_rope_index: RopeIndex | None = None
    attn_implementation: str = "sdpa"
    dtype: torch.dtype | None = None
    weights: CostWeights = field(default_factory=CostWeights)
    config: Any = None
    name: str = UNCHECKED


@dataclass(frozen=True, slots=True)
class OpenedData:
    """Rows, and the processor and model they are for; nothing is counted yet.

    Attributes:
        dataset: the rows.
        processor: encodes them.
        model: is trained on them.
        ledger: has the entries of rows that are not selected, and gets those of encoding.
    """

    dataset: Any
    processor: Any
    model: ModelInfo
    ledger: Ledger


@dataclass(frozen=True, slots=True)
class Startup:
    """What planning and building batches start from.

    Attributes:
        opened: rows, processor and model.
        counts: exact token counts of the rows.
        samples: encodes single rows.
        planner: plans the epochs.
        media_kinds: the media that any row has, one bit for each kind.
    """

    opened: OpenedData
    counts: CountColumns
    samples: PreTokenizedDatasetWrapper
    planner: Planner
    media_kinds: int


def open_data(
    config: LoaderConfig, processor: Any, model: Any, ranks: Collectives, ledger: Ledger
) -> OpenedData:
    """Open processor, model and rows.

    Args:
        config: the settings.
        processor: a processor, or the folder or hub name of one.
        model: see :func:`inspect_model`; or what that returned.
        ranks: all of them call this.
        ledger: gets an entry for each row that is not selected; the same on all ranks, so only the first one
            records them (each rank its own with ``shard_data``).

    Raises:
        ConfigError: one of them is not what is expected, or the ranks have different settings.
    """
    run = ranks.run_on_all_ranks
    ranks.same("have different settings", config.of_all_ranks(), "Give all of them the same settings")
    processor = run("open the processor", partial(as_whole_processor, processor))
    if not isinstance(model, ModelInfo):
        model = run("inspect the model", partial(inspect_model, model, packed=config.mode == "pack"))
    run("check the processor", partial(_check_processor, processor, model))
    selection = ledger if config.shard_data or ranks.world.rank == 0 else Ledger()
    shard = ranks.world if config.shard_data else None
    dataset = run("open the data", partial(open_rows, config.data, config.dataset_names, selection, shard))
    if getattr(dataset, "ledger", None) is selection:
        dataset.ledger = ledger  # remarks on a row are entries of the rank that delivers it
    return OpenedData(dataset, processor, model, ledger)


def start_up(
    config: LoaderConfig, opened: OpenedData, ranks: Collectives, counts: CountColumns | None = None
) -> Startup:
    """Count what was not counted before, and make the planner.

    Args:
        config: the settings.
        opened: of :func:`open_data`; may be opened under other settings of packs.
        ranks: all of them call this.
        counts: of the rows, if the caller has them.

    Raises:
        ConfigError: the counts are of other rows, a pack has no room for a placeholder, or the plans of the
            ranks differ.
    """
    dataset, processor = opened.dataset, opened.processor
    if counts is None:
        counts = count_rows(config, opened, ranks)
    if len(counts) != len(dataset):
        raise ConfigError(f"{len(counts):,} counts for {len(dataset):,} examples")
    samples = encoding_dataset(config, opened, config.pack_size)
    present, lacking = _media_of_samples(counts, ranks, config.shard_data)
    if samples.truncate and (counts.total - 1 > config.pack_size).any():
        lacking = present  # truncation may remove the only image of a sample
    read = partial(contents_of, dataset, processor, hash_all=config.verify == "full")
    planner = Planner(
        counts,
        samples,
        config,
        opened.model.weights,
        reserve=_placeholder_tokens(config, samples, present & lacking),
        reserved_kinds=present & lacking,
        contents=ranks.run_on_all_ranks("hash the rows", read),
    )
    if not config.shard_data:
        advice = (
            "Give all of them the same settings and the same rows in the same order: copies of the data may "
            "differ between machines"
        )
        ranks.same("have different plans", planner.name, advice)
    if samples.truncate:
        samples = encoding_dataset(config, opened, planner.room)
    return Startup(opened, counts, samples, planner, present)


def encoding_dataset(config: LoaderConfig, opened: OpenedData, capacity: int) -> PreTokenizedDatasetWrapper:
    """What encodes single rows; ``on_overlong="truncate"`` cuts them to ``capacity`` tokens after the shift.

    Raises:
        ConfigError: the processor has no chat template.
    """
    truncate = config.on_overlong == "truncate"
    return PreTokenizedDatasetWrapper(
        opened.dataset,
        opened.processor,
        capacity + 1 if truncate else None,
        truncate=truncate,
        inject_fake_images=False,  # batches get a placeholder where they need one
        on_bad=config.on_bad,
        seed=config.seed,
        ledger=opened.ledger,
    )


def _media_of_samples(counts: CountColumns, ranks: Collectives, shard_data: bool) -> tuple[int, int]:
    """The kinds of media that any sample has, and those that any sample lacks, one bit for each."""
    present = lacking = 0
    for bit, kind in enumerate(MEDIA_KINDS):
        have = getattr(counts, f"{kind}s")[counts.ok] > 0
        present |= bool(have.any()) << bit
        lacking |= bool((~have).any()) << bit
    if shard_data:
        for others in ranks.gather((present, lacking)):
            present, lacking = present | others[0], lacking | others[1]
    return present, lacking


def _placeholder_tokens(config: LoaderConfig, samples: PreTokenizedDatasetWrapper, kinds: int) -> int:
    """How many tokens of every pack stay free for a placeholder with these kinds of media.

    Raises:
        ConfigError: packs are too small for it.
    """
    if config.placeholder == "never" or config.mode == "pad" or not kinds:
        return 0
    reserve = sum(length + -length % config.alignment for length in Placeholders(samples).lengths(kinds))
    if 2 * reserve > config.pack_size:
        raise ConfigError(
            f"pack_size={config.pack_size:,} has no room for the placeholder of {reserve} tokens: make it "
            "larger, or set placeholder='never'"
        )
    return reserve


# The model.


def inspect_model(model: Any, *, packed: bool = False, trains: bool = True) -> ModelInfo:
    """What a loader needs to know of a model.

    Args:
        model: a model of transformers, also inside PEFT, DDP, FSDP or ``torch.compile``; its config; the
            folder or hub name of one; ``"unchecked"``; or None.
        packed: whether it is fed packed rows. Then None raises, and a model that they are wrong for.
        trains: whether it is trained on the batches. Then its own loss must not shift labels a second time.

    Raises:
        ConfigError: it is no model, cannot be fed packed rows, or would shift labels twice.
    """
    if is_unchecked(model):
        return ModelInfo()
    if model is None:
        if packed:
            raise ConfigError(
                "model is missing: packed rows need the model's positions, and not every model keeps the "
                f"documents of a row apart. Pass {EXPECTED}: packhorse.load(data, processor, model=model). "
                f'Without one use mode="pad", or model="{UNCHECKED}" to pack without these checks'
            )
        return ModelInfo(name="none")
    inner, config = resolve_model(model)
    if packed:
        check_packable(model if inner is not None else config)
    known = config if inner is None else inner
    if trains:
        check_shift_labels(known)
    try:
        weights = CostWeights.of_model(config)
    except ConfigError:  # its sizes have unknown names: the usual proportions
        weights = CostWeights()
    return ModelInfo(
        rope_index(known),
        str(getattr(text_config(config), "_attn_implementation", None) or "sdpa"),
        getattr(inner, "dtype", None),
        weights,
        config,
        type(known).__name__,
    )


def _check_processor(processor: Any, model: ModelInfo) -> None:
    """Raise if a tokenizer is to feed a model that has a vision or audio part.

    Raises:
        ConfigError: naming both.
    """
    parts = media_parts(model.config) if model.config is not None else ()
    if parts and is_tokenizer(processor):
        raise ConfigError(
            f"processor is a tokenizer ({type(processor).__name__}), but {model.name} has a {parts[0]}: pass "
            "the model's processor, as AutoProcessor.from_pretrained(name)"
        )


def check_batches(config: LoaderConfig, opened: OpenedData) -> None:
    """Raise if batches cannot be built with these settings, or would be wrong for the model.

    Raises:
        ConfigError: the pixel type is unknown, the tokenizer has no padding token, packs cannot be padded to
            whole documents; or the model lacks the positions of the processor's family, or adds a loss that
            packed batches do not have.
    """
    model, family = opened.model, family_of(opened.processor)
    as_dtype(config.pixel_dtype)
    if config.mode == "pad":
        return
    pad_token_id(opened.processor)
    if family.mrope and model.get_rope_index is None:
        if model.config is not None:
            raise ConfigError(
                f"{model.name} has no get_rope_index, but models of the processor's family {family.name} "
                "have positions in three rows (mRoPE): pass the whole model that belongs to the processor"
            )
        logger.warning(
            "model='unchecked': positions have one row, but models of family %s have three (mRoPE), so "
            "packed training will differ from unpacked. Pass model=",
            family.name,
        )
    if config.pad_to_size and config.pack_size % config.alignment:
        raise ConfigError(
            f"pad_to_size=True pads to pack_size={config.pack_size:,}, which is no multiple of "
            f"alignment={config.alignment}: the last document could not be divided. Make it one"
        )
    check_router_loss(model.config)


def as_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """A torch dtype by its name.

    Raises:
        ConfigError: there is none.
    """
    if name is None or isinstance(name, torch.dtype):
        return name
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"pixel_dtype={name!r}: expected the name of a torch type, as 'bfloat16'")
    return found


# The rows.


def open_rows(data: Any, names: Sequence[str] | None, ledger: Ledger, shard: World | None = None) -> Any:
    """The rows of a meta file, or the sequence itself; at least one.

    Args:
        data: a meta file, its content, or examples: a list, or anything with ``len`` and ``[index]``.
        names: only these datasets of a meta file.
        ledger: gets an entry for each row that is not selected.
        shard: take only this rank's rows; None takes all.

    Raises:
        ConfigError: it is nothing of the kind, or there is no row.
    """
    dataset = _open_rows(data, names, ledger, shard)
    if not len(dataset):
        name = f"{data}: " if isinstance(data, str | PathLike) else ""
        where = f" for {shard}: it has fewer rows than ranks" if shard is not None else ""
        raise ConfigError(f"{name}there is no example in the data{where}")
    return dataset


def _open_rows(data: Any, names: Sequence[str] | None, ledger: Ledger, shard: World | None) -> Any:
    if isinstance(data, Mapping) and data and all(hasattr(part, "column_names") for part in data.values()):
        raise ConfigError(f"data has the splits {', '.join(data)}: choose one, as data['{next(iter(data))}']")
    if isinstance(data, str | PathLike | Mapping):
        meta: Any = dict(data) if isinstance(data, Mapping) else str(data)
        if not isinstance(data, Mapping):
            _refuse_other_files(str(data))
        if shard is None:
            return open_meta_dataset(meta, names, ledger=ledger)
        rank, size = shard.rank, shard.size
        return open_meta_dataset(meta, names, "train", True, rank, size, remainder="keep", ledger=ledger)
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


def count_rows(config: LoaderConfig, opened: OpenedData, ranks: Collectives) -> CountColumns:
    """The exact counts of all rows: from the count files, or counted now.

    Each rank counts a share; ranks without a process group count all rows, each for itself.
    """
    meta, dataset, processor = config.data, opened.dataset, opened.processor
    if isinstance(dataset, Shard):  # no other rank has these rows
        return ranks.run_on_all_ranks(_COUNT, partial(count_examples, dataset, processor))
    if not isinstance(dataset, MetaDataset):
        return _count_slices(dataset, processor, ranks)
    retry = not os.environ.get("PACKHORSE_KEEP_COUNTS")
    first = ranks.world.rank == 0
    look = partial(counts_of, dataset, processor, log_missing=first, retry_unreachable=retry)
    found = ranks.run_on_all_ranks("read the count files", look)
    if ranks.all_agree(found is not None) and found is not None:
        return found
    if isinstance(meta, MetaDataset):  # opened by the caller: there is no file to count
        return _count_slices(dataset, processor, ranks)
    processes = share_cores(ranks, config.count_workers)  # on every rank: their shards may differ in length
    local = LocalEngine(processes if len(dataset) > _IN_THIS_PROCESS else 1)
    ranks.run_on_all_ranks(_COUNT, partial(_count_meta, config, opened, ranks, local))
    look = partial(counts_of, dataset, processor, log_missing=False)  # only rank 0 may see the files
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


def _count_meta(config: LoaderConfig, opened: OpenedData, ranks: Collectives, local: LocalEngine) -> None:
    """Count the files of a meta file; on several ranks, each counts a share of their parts."""
    engine: Engine = local
    if ranks.can_talk and ranks.rendezvous is not None:
        engine = RankEngine(ranks, ranks.rendezvous, local)
        if ranks.world.rank:
            return engine.serve(PartCounter(opened.processor))
    elif ranks.can_talk and ranks.world.rank:
        return None  # without a store rank 0 counts alone
    rows, names = f"{len(opened.dataset):,}", config.dataset_names
    logger.info("counting the tokens of %s rows; `packhorse count` does this ahead of a run", rows)
    meta = dict(config.data) if isinstance(config.data, Mapping) else str(config.data)
    with Progress("counting tokens") as progress:
        report = count_meta(meta, opened.processor, dataset_names=names, engine=engine, progress=progress)
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


def _count_slices(dataset: Any, processor: Any, ranks: Collectives) -> CountColumns:
    """Count examples that all ranks have: each rank a slice of them."""
    rank, size = (ranks.world.rank, ranks.world.size) if ranks.can_talk else (0, 1)
    rows = range(len(dataset) * rank // size, len(dataset) * (rank + 1) // size)
    counted = ranks.run_on_all_ranks(_COUNT, partial(count_examples, dataset, processor, rows))
    return CountColumns.concat(ranks.gather(counted))


def count_examples(dataset: Any, processor: Any, rows: range | None = None) -> CountColumns:
    """Count the examples of a sequence, one after the other; one that cannot be counted has its reason.

    Args:
        dataset: the sequence.
        processor: what will encode them.
        rows: only these examples; all if None.
    """
    rows = range(len(dataset)) if rows is None else rows
    counter = make_counter(processor)
    parts = []
    with Progress("counting tokens", len(rows)) as progress:
        for first in range(0, len(rows), _BLOCK):
            counted = CountedRows()
            for index in rows[first : first + _BLOCK]:
                counted.add(_counted(counter, dataset, index))
            parts.append(CountColumns.of(counted.batch()))
            done = min(first + _BLOCK, len(rows))
            progress(done)
    return CountColumns.concat(parts)


def _counted(counter: TokenCounter, dataset: Any, index: int) -> Counted | BadSample:
    try:
        example = with_audio_placed(dataset[index], counter.encoder, str(index))
        return counter.count(parse_conversation(example, str(index)))
    except DATA_ERRORS as error:
        if not is_data_error(error):
            raise
        if isinstance(error, BadSample):
            return error
        return BadSample(f"{type(error).__name__}: {error}", reason="sample_failed", key=str(index))
