"""Start-up of the loader, of `packhorse plan` and of the viewer: from settings to rows, counts and a planner.

:func:`open_data` opens processor, model and rows; :func:`start_up` counts what was not counted before and
makes the planner. All ranks call both: a step that fails on one of them raises on all.

Counting reads text and media headers. The counts of a meta file are saved next to the data, so the next start
takes milliseconds. A list or a Hugging Face dataset is counted at every start (30 microseconds to a
millisecond per row).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from logging import getLogger
from os import PathLike
from typing import Any

import numpy as np
import torch

from packhorse.chat import Processor, is_tokenizer, pad_token_id
from packhorse.collate.batch_formats import CONTIGUOUS, batch_format_of
from packhorse.collate.packed import check_takes_batches_of
from packhorse.count.columns import CountColumns
from packhorse.count.contents import contents_of
from packhorse.count.counting import count_meta
from packhorse.count.engines import RankEngine
from packhorse.count.parts import CountedRows, PartCounter, make_counter
from packhorse.count.sidecar import counts_of
from packhorse.distributed import Collectives
from packhorse.encode.robust import dataset_key
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import ConfigError, data_errors
from packhorse.families import Encoder
from packhorse.families.compact import find_compact
from packhorse.families.models import (
    EXPECTED,
    UNCHECKED,
    as_whole_processor,
    attention_of,
    check_shift_labels,
    is_unchecked,
    media_parts,
    resolve_model,
)
from packhorse.families.packing import Packing, boundaries_error, check_decoder, check_packable
from packhorse.families.qwen_vl import RopeIndex, rope_index
from packhorse.families.router_loss import check_router_loss, has_router_loss, takes_router_mask
from packhorse.families.vision import VisionIndices, indices_of_model
from packhorse.formats.conversation import parse_conversation, parse_documents
from packhorse.formats.in_memory import ConvertedRows, open_examples
from packhorse.formats.meta import (
    DATA_SUFFIXES,
    MetaDataset,
    is_data_file,
    meta_of_file,
    open_meta_dataset,
    row_format,
)
from packhorse.ledger import Ledger
from packhorse.loader.config import LoaderConfig
from packhorse.loader.placeholder import Placeholders
from packhorse.loader.planner import Planner
from packhorse.media.source import is_address
from packhorse.plan.cost_model import CostWeights
from packhorse.types import MEDIA_KINDS, Conversation, MediaMask, Rows, Task, World
from packhorse.utils.pool import Engine, LocalEngine
from packhorse.utils.progress import Progress

logger = getLogger("packhorse.loader")

USUAL_WEIGHTS = CostWeights().with_overhead()
"""Of a model whose sizes are unknown."""

_MAX_ROWS_WITHOUT_PROCESSES = 20_000  # starting processes takes some seconds
_BLOCK = 256
_COUNT, _READ_COUNTS = "count the tokens", "read the count files"
_EXPECTED = (
    "a data file (.jsonl, .parquet, a JSON array), a meta file (JSON that names data files), a dict with its "
    "content, or rows with len() and [index] (a list, a Hugging Face dataset that is not streamed)"
)
_OTHER_FILES = (".arrow", ".tar", ".tar.gz", ".tgz", ".zip", ".csv", ".tsv", ".xlsx")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a loader needs to know about the model; the model itself is not kept.

    Attributes:
        get_rope_index: computes mRoPE positions; None for models without mRoPE.
        attn_implementation: attention backend of its decoder.
        dtype: dtype of its weights; None if unknown.
        weights: compute cost of tokens and patches.
        config: its config; None if unknown.
        name: class of the model or config; ``"unchecked"``, or ``"none"`` without a model.
        loaded: whether the model itself is known; a config does not determine the attention that runs.
        no_boundaries: why attention that takes boundaries of documents would be wrong; empty if it is right.
        counts_documents: whether the model takes the tokens that count in its router's auxiliary loss.
        proven: whether a test or a measurement shows that packed rows are right for the model.
        vision: computes the indices of its vision tower that batches hold; None if they hold none.
    """

    get_rope_index: RopeIndex | None = None
    attn_implementation: str = "sdpa"
    dtype: torch.dtype | None = None
    weights: CostWeights = USUAL_WEIGHTS
    config: Any = None
    name: str = UNCHECKED
    loaded: bool = False
    no_boundaries: str = ""
    counts_documents: bool = False
    proven: bool = True
    vision: VisionIndices | None = None


@dataclass(frozen=True, slots=True)
class OpenedData:
    """Rows, and the processor (bound to its family once) and model they are for; nothing is counted yet.

    ``ledger`` has entries of rows that are not selected, and later those of encoding.
    """

    dataset: Any
    encoder: Encoder
    model: ModelInfo
    ledger: Ledger

    @property
    def processor(self) -> Any:
        """The encoder's processor."""
        return self.encoder.processor


@dataclass(frozen=True, slots=True)
class Startup:
    """What planning and building batches start from; ``media_mask`` are the media that any row has."""

    opened: OpenedData
    counts: CountColumns
    samples: PreTokenizedDatasetWrapper
    planner: Planner
    media_mask: MediaMask


def open_data(
    config: LoaderConfig,
    processor: Processor | str | PathLike[str],
    model: Any,
    ranks: Collectives,
    ledger: Ledger,
) -> OpenedData:
    """Open processor, model (see :func:`inspect_model`; or its result) and rows; all ranks call this.

    ``ledger`` gets an entry for each row that is not selected. These are the same on all ranks; only rank 0
    records them (with ``shard_data`` each rank its own).
    """
    run = ranks.run_on_all_ranks
    ranks.assert_same("have different settings", config.of_all_ranks(), "Give all of them the same settings")
    encoder = run("open the processor", lambda: Encoder(as_whole_processor(processor)))
    if not isinstance(model, ModelInfo):
        # Batches of preference data have no labels.
        inspect = partial(inspect_model, packed=config.mode == "pack", trains=config.task == "sft")
        model = run("inspect the model", partial(inspect, model))
    run("check the processor", partial(_check_processor, encoder.processor, model))
    selection = ledger if config.shard_data or ranks.world.rank == 0 else Ledger()
    shard = ranks.world if config.shard_data else None
    dataset = run("open the data", partial(open_dataset, config, selection, shard))
    if isinstance(dataset, MetaDataset | ConvertedRows) and dataset.ledger is selection:
        dataset.ledger = ledger  # remarks on a row are entries of the rank that delivers it
    run("check the settings of the datasets", partial(_check_dataset_settings, dataset, encoder))
    return OpenedData(dataset, encoder, model, ledger)


def start_up(
    config: LoaderConfig, opened: OpenedData, ranks: Collectives, counts: CountColumns | None = None
) -> Startup:
    """Count rows without counts (unless ``counts`` has those of all rows) and make the planner.

    All ranks call this. ``opened`` may have been opened with other pack settings.
    """
    dataset = opened.dataset
    if counts is None:
        counts = count_rows(config, opened, ranks)
    if len(counts) != len(dataset):
        message = f"{len(counts):,} counts for {len(dataset):,} examples"
        raise ConfigError(message, setting="counts", value=len(counts))
    weights = ranks.run_on_all_ranks("read the cost weights", partial(_cost_weights, config, opened.model))
    samples = encoding_dataset(config, opened, config.pack_size)
    present, lacking = _media_of_samples(counts, ranks, config.shard_data)
    if samples.truncate and (counts.total - 1 > config.pack_size).any():
        lacking = present  # truncation may remove the only image of a sample
    read = partial(contents_of, dataset, opened.encoder, hash_all=config.verify == "full")
    planner = Planner(
        counts,
        samples,
        config,
        weights,
        reserve=_placeholder_tokens(config, samples, present & lacking),
        reserved_mask=present & lacking,
        contents=ranks.run_on_all_ranks("hash the rows", read),
    )
    if not config.shard_data:
        advice = (
            "Give all of them the same settings and the same rows in the same order: copies of the data may "
            "differ between machines"
        )
        ranks.assert_same("have different plans", planner.name, advice)
    if samples.truncate:
        samples = encoding_dataset(config, opened, planner.capacity)
    return Startup(opened, counts, samples, planner, present)


def _cost_weights(config: LoaderConfig, model: ModelInfo) -> CostWeights:
    """Return the weights of the settings, or of the model's operations."""
    if config.cost_weights is None:
        return model.weights
    weights = CostWeights.of(config.cost_weights)
    if model.config is not None and weights.names != model.weights.names:
        logger.warning(
            "cost_weights has %s, but %s has layers for %s: were they measured with another model?",
            ", ".join(weights.names),
            model.name,
            ", ".join(model.weights.names),
        )
    return weights


def encoding_dataset(config: LoaderConfig, opened: OpenedData, capacity: int) -> PreTokenizedDatasetWrapper:
    """Return what encodes rows; ``on_overlong="truncate"`` cuts them to ``capacity`` shifted tokens."""
    truncate = config.on_overlong == "truncate"
    return PreTokenizedDatasetWrapper(
        opened.dataset,
        opened.encoder,
        capacity + 1 if truncate else None,
        truncate=truncate,
        inject_fake_images=False,  # batches get a placeholder where they need one
        on_bad=config.on_bad,
        seed=config.seed,
        ledger=opened.ledger,
    )


def compact_samples(samples: PreTokenizedDatasetWrapper, media_mask: MediaMask) -> PreTokenizedDatasetWrapper:
    """Return a dataset whose pixels are bytes, for the media that rows have and where that is right."""
    if not media_mask & ~MediaMask.AUDIO:
        return samples
    changed = copy(samples)
    compact = find_compact(samples.encoder, media_mask.kinds)
    changed.encoder = Encoder(samples.processor, samples.family, compact)
    return changed


def _media_of_samples(
    counts: CountColumns, ranks: Collectives, shard_data: bool
) -> tuple[MediaMask, MediaMask]:
    """Return the kinds of media that any sample has, and those that any sample lacks."""
    have = {kind: getattr(counts, f"{kind}s")[counts.ok] > 0 for kind in MEDIA_KINDS}
    present = MediaMask.of(kind for kind in MEDIA_KINDS if have[kind].any())
    lacking = MediaMask.of(kind for kind in MEDIA_KINDS if not have[kind].all())
    if shard_data:
        for others in ranks.gather((present, lacking)):
            present, lacking = present | others[0], lacking | others[1]
    return present, lacking


def _placeholder_tokens(
    config: LoaderConfig, samples: PreTokenizedDatasetWrapper, media_mask: MediaMask
) -> int:
    """Return how many tokens of every pack are reserved for a placeholder with these kinds of media."""
    if config.placeholder == "never" or config.mode == "pad" or not media_mask:
        return 0
    reserve = sum(length + -length % config.alignment for length in Placeholders(samples).lengths(media_mask))
    if 2 * reserve > config.pack_size:
        expected = f"too small for the placeholder of {reserve} tokens; raise it, or set placeholder='never'"
        raise ConfigError.of("pack_size", config.pack_size, expected)
    return reserve


# The model.


def inspect_model(model: Any, *, packed: bool = False, trains: bool = True) -> ModelInfo:
    """Return what a loader needs to know about a model of transformers; see :meth:`LoaderConfig.build`.

    ``packed`` raises for None, and for a model for which packed rows are wrong; ``trains`` if the model's own
    loss would shift labels a second time.
    """
    if is_unchecked(model):
        return ModelInfo()
    if model is None:
        if packed:
            raise ConfigError(
                "model is missing: packed rows need the model's positions, and not every model keeps the "
                f"documents of a row apart. Pass {EXPECTED}: packhorse.load(data, processor, model=model). "
                f'Without one use mode="pad", or model="{UNCHECKED}" to pack without these checks',
                setting="model",
            )
        return ModelInfo(name="none")
    inner, config = resolve_model(model)
    packing = Packing()
    if packed:
        packing = check_packable(config if inner is None else model, trains=trains)
    known = config if inner is None else inner
    if trains:
        check_shift_labels(known)
    try:
        weights = CostWeights.of_model(config)
    except ConfigError:  # its sizes have unknown names: the usual proportions
        weights = USUAL_WEIGHTS
    return ModelInfo(
        get_rope_index=rope_index(known),
        attn_implementation=attention_of(config),
        dtype=getattr(inner, "dtype", None),
        weights=weights,
        config=config,
        name=type(known).__name__,
        loaded=inner is not None,
        no_boundaries=packing.no_boundaries,
        counts_documents=takes_router_mask(inner),
        proven=not packing.problems,
        vision=None if inner is None else indices_of_model(inner),
    )


def _check_processor(processor: Processor, model: ModelInfo) -> None:
    """Raise if the processor is a tokenizer, but the model has a vision or audio part."""
    parts = media_parts(model.config) if model.config is not None else ()
    if parts and is_tokenizer(processor):
        raise ConfigError(
            f"processor is a tokenizer ({type(processor).__name__}), but {model.name} has a {parts[0]}: pass "
            "the model's processor, AutoProcessor.from_pretrained(name)",
            setting="processor",
            value=type(processor).__name__,
        )


def check_batches(config: LoaderConfig, opened: OpenedData) -> None:
    """Raise if batches cannot be built with these settings, or would be wrong for the model."""
    model, family = opened.model, opened.encoder.family
    if model.config is not None:
        check_decoder(model.config)
    if has_router_loss(model.config):
        _check_adds_router_loss(config)
    if config.mode == "pad":
        return
    pad_token_id(opened.processor)
    if family.mrope and model.get_rope_index is None:
        if model.config is not None:
            raise ConfigError(
                f"{model.name} has no get_rope_index, but models of the processor's family {family.name} "
                "have positions in three rows (mRoPE): pass the whole model that belongs to the processor, "
                "or processor.tokenizer if the data has no media",
                setting="model",
                value=model.name,
            )
        logger.warning(
            "model='unchecked': positions have one row, but models of family %s have three (mRoPE), so "
            "packed training will differ from unpacked. Pass model=",
            family.name,
        )
    if config.pad_to_size and config.pack_size % config.alignment:
        expected = f"pad_to_size=True needs a multiple of alignment={config.alignment}"
        raise ConfigError.of("pack_size", config.pack_size, expected)
    if batch_format_of(attn_backend(config, model)) in CONTIGUOUS and model.no_boundaries:
        raise boundaries_error(model.no_boundaries)
    check_router_loss(model.config, model.counts_documents)
    if model.loaded and config.attn_implementation is not None:
        check_takes_batches_of(model.name, model.attn_implementation, config.attn_implementation)


def _check_adds_router_loss(config: LoaderConfig) -> None:
    """Raise for a loss without the auxiliary loss of the model's router."""
    without = "preference losses do" if config.task == "preference" else ""
    if config.pipeline_microbatches is not None:
        without = "the loss of a pipeline does"
    if without:
        raise ConfigError.of(
            "output_router_logits",
            True,
            f"{without} not contain the auxiliary loss of the router. Set "
            "model.config.get_text_config().output_router_logits = False",
        )


def attn_backend(config: LoaderConfig, model: ModelInfo) -> str:
    """Return the attention backend that packs are collated for."""
    return config.attn_implementation or model.attn_implementation


# The rows.


def open_dataset(config: LoaderConfig, ledger: Ledger, shard: World | None = None) -> Any:
    """Open the rows of a meta file, or rows in memory as examples; there must be at least one.

    Uses only this rank's rows with ``shard``. ``ledger`` gets an entry for each row that is not selected, and
    for fields that are not used.
    """
    data, names = config.data, config.dataset_names
    if isinstance(data, Mapping) and data and all(hasattr(part, "column_names") for part in data.values()):
        expected = f"these are splits; choose one, for example data['{next(iter(data))}']"
        raise ConfigError.of("data", list(data), expected)
    dataset: Rows
    if isinstance(data, str | PathLike | Mapping):
        if isinstance(data, str | PathLike):
            _check_is_file(str(data))
        meta = meta_of(config)
        options: dict[str, Any] = {"task": config.task}
        if shard is not None:
            of_rank = {"rank": shard.rank, "world_size": shard.size, "remainder": "keep"}
            options |= {"shard_data": True, **of_rank}
        dataset = open_meta_dataset(meta, names, ledger=ledger, **options)
    else:
        _check_examples(data, names)
        dataset = _open_rows(config, ledger)
    if isinstance(dataset, MetaDataset | ConvertedRows):
        for line in advice_on_media(dataset):
            logger.warning("%s", line)
    if shard is not None and not isinstance(data, str | PathLike | Mapping):
        dataset = Shard(dataset, shard)
    if not len(dataset):
        path = data if isinstance(data, str | PathLike) else ""
        where = f" for {shard}: it has fewer rows than ranks" if shard is not None else ""
        message = f"{path}{': ' if path else ''}there is no example in the data{where}"
        raise ConfigError(message, setting="data", path=path)
    return dataset


def meta_of(config: LoaderConfig) -> str | dict[str, Any]:
    """Return the meta file of a configuration, or its content; a data file with options is one dataset."""
    data, options = config.data, config.row_options
    if isinstance(data, Mapping):
        meta: str | dict[str, Any] = dict(data)
    else:
        meta = str(data)
        if options and is_data_file(meta):
            return meta_of_file(meta, options)
    if options:
        raise ConfigError(
            f"{', '.join(options)}: data is a meta file; write these settings into its entries",
            setting="dataset_options",
            value=sorted(options),
        )
    return meta


def _open_rows(config: LoaderConfig, ledger: Ledger) -> Rows:
    """Return the examples of rows in memory."""
    data: Any = config.data
    if isinstance(data, MetaDataset):
        for source in data.sources:
            if (task := source.config.rules.task) != config.task:
                raise ConfigError.of(
                    "task",
                    config.task,
                    f"data was opened for {task!r}: open_meta_dataset(…, task={config.task!r})",
                )
        return data
    options = config.row_options
    rules = row_format({**options, "task": config.task}) if options or config.task != "sft" else None
    return open_examples(data, rules, ledger)


def _check_examples(data: Any, names: Sequence[str] | None) -> None:
    """Raise if ``data`` is no sequence of rows."""
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise ConfigError(
            f'data is a {type(data).__name__}: expected {_EXPECTED}. Write data="train.jsonl", or '
            'data=[{"messages": […]}, …]',
            setting="data",
            value=type(data).__name__,
        )
    if names is not None:
        expected = "only for a meta file, but data is a sequence of rows"
        raise ConfigError.of("dataset_names", names, expected)


def _check_is_file(path: str) -> None:
    """Raise if a local path is missing, a folder, an archive or a table; say what to write."""
    if is_address(path):
        return
    if not os.path.exists(path):
        message = f"data {path}: no such file or directory. Expected {_EXPECTED}"
        raise ConfigError(message, setting="data", path=path)
    if any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json")):
        remedy = f"pass datasets.load_from_disk({path!r}), of several splits one"
        message = f"data {path} is a folder of the datasets library (save_to_disk): {remedy}"
        raise ConfigError(message, setting="data", path=path)
    if os.path.isdir(path):
        data_files = (name for name in sorted(os.listdir(path)) if name.endswith(DATA_SUFFIXES))
        file, kind, advice = os.path.join(path, next(data_files, "train.jsonl")), "a directory", "Pass"
    elif path.lower().endswith(_OTHER_FILES):
        kind = "an archive or table"
        file = os.path.join(os.path.dirname(path), f"{os.path.basename(path).partition('.')[0]}.jsonl")
        advice = "Write its rows to a file, one JSON object a line, then pass"
    else:
        return
    message = f"data {path} is {kind}. Expected {_EXPECTED}. {advice} {file}"
    raise ConfigError(message, setting="data", path=path)


def _check_dataset_settings(dataset: Rows, encoder: Encoder) -> None:
    """Raise if a dataset has settings for its media that the processor's family does not take."""
    if isinstance(dataset, Shard):
        dataset = dataset.data
    if isinstance(dataset, MetaDataset):
        for source in dataset.sources:
            encoder.check_dataset_settings(source.config.name, source.config.rules.media_settings)
    elif isinstance(dataset, ConvertedRows):
        encoder.check_dataset_settings("", dataset.rules.media_settings)


class Shard(Sequence[Any]):
    """Every ``size``-th example of a sequence, from ``rank`` on."""

    def __init__(self, data: Rows, world: World) -> None:
        self.data, self.indices = data, range(world.rank, len(data), world.size)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.data[position] for position in self.indices[index]]
        return self.data[self.indices[index]]

    def key(self, index: int) -> str:
        """Return the key of an example: that of the sequence, or its index there."""
        return dataset_key(self.data, self.indices[index])


def advice_on_media(dataset: MetaDataset | ConvertedRows) -> list[str]:
    """Return a line for each dataset of which no text mentions the media of the first rows."""
    found = {"data": dataset.found} if isinstance(dataset, ConvertedRows) else {}
    if isinstance(dataset, MetaDataset):
        found = {source.config.name: source.found for source in dataset.sources}
    return [f"{name}: {advice}" for name, one in found.items() if (advice := one.advice())]


def describe_data(dataset: Rows) -> list[str]:
    """Return a line for each dataset: its rows, their format, and the fields that nothing reads."""
    if isinstance(dataset, Shard):
        whole = dataset.data
        return [*describe_data(whole), f"this rank has {len(dataset):,} of {len(whole):,} rows"]
    if isinstance(dataset, MetaDataset | ConvertedRows):
        return [*dataset.describe(), *advice_on_media(dataset)]
    return [f"{type(dataset).__name__}: {len(dataset):,} rows, examples"]


def count_rows(config: LoaderConfig, opened: OpenedData, ranks: Collectives) -> CountColumns:
    """Return the exact counts of all rows, from the count files or counted now.

    Each rank counts a share; without a process group each rank counts all rows.
    """
    dataset, encoder, run = opened.dataset, opened.encoder, ranks.run_on_all_ranks
    if isinstance(dataset, Shard):  # no other rank has these rows
        return run(_COUNT, partial(count_examples, dataset, encoder, task=config.task))
    if not isinstance(dataset, MetaDataset):
        return _count_slices(dataset, encoder, ranks, config.task)
    retry = not os.environ.get("PACKHORSE_KEEP_COUNTS")
    read = partial(counts_of, dataset, encoder, log_missing=ranks.world.rank == 0, retry_unreachable=retry)
    counts = run(_READ_COUNTS, read)
    if ranks.all_agree(counts is not None) and counts is not None:
        return counts
    if isinstance(config.data, MetaDataset):  # opened by the caller: there is no file to count
        return _count_slices(dataset, encoder, ranks, config.task)
    processes = ranks.share_cores(config.count_workers)  # on every rank: their shards may differ in length
    local = LocalEngine(processes if len(dataset) > _MAX_ROWS_WITHOUT_PROCESSES else 1)
    run(_COUNT, partial(_count_meta, config, opened, ranks, local))
    counts = run(_READ_COUNTS, partial(counts_of, dataset, encoder, log_missing=False))
    if not ranks.all_agree(counts is not None):  # no shared folder: only rank 0 has the count files
        whole = ranks.broadcast(_READ_COUNTS, partial(_counts_of_all_ranks, dataset, encoder))
        counts = None if whole is None else _own_counts(dataset, whole)
    if counts is None:
        raise ConfigError(
            f"{dataset!r} was counted, but its count files are not found: `packhorse count` says why"
        )
    return counts


def _count_meta(config: LoaderConfig, opened: OpenedData, ranks: Collectives, local: LocalEngine) -> None:
    """Count the files of a meta file; on several ranks, each counts a share of their parts."""
    engine: Engine = local
    if ranks.is_distributed and ranks.rendezvous is not None:
        engine = RankEngine(ranks, ranks.rendezvous, local)
        if ranks.world.rank:
            return engine.serve(PartCounter(opened.encoder))
    elif ranks.is_distributed and ranks.world.rank:
        return None  # without a store rank 0 counts alone
    rows, names = f"{len(opened.dataset):,}", config.dataset_names
    logger.info("counting the tokens of %s rows; `packhorse count` does this ahead of a run", rows)
    meta = meta_of(config)
    with Progress("counting tokens") as progress:
        report = count_meta(
            meta, opened.encoder, dataset_names=names, engine=engine, task=config.task, progress=progress
        )
    logger.info("counted %s rows in %.1f s", f"{report.counted_rows:,}", report.seconds)
    return None


def _counts_of_all_ranks(dataset: MetaDataset, encoder: Encoder) -> CountColumns | None:
    """Return the counts of the rows of all ranks, of which this one has a share."""
    sources = [
        replace(source, selection=replace(source.selection, world=World(), remainder="keep"))
        for source in dataset.sources
    ]
    return counts_of(MetaDataset(sources, Ledger()), encoder)


def _own_counts(dataset: MetaDataset, whole: CountColumns) -> CountColumns:
    """Return this rank's share of the counts of all rows."""
    positions, first = [], 0
    for source in dataset.sources:
        selection = source.selection
        rows = len(replace(selection, world=World(), remainder="keep"))
        own = np.arange(first, first + rows)[selection.world.rank :: selection.world.size]
        positions.append(own[: len(source)])
        first += rows
    return whole.take(np.concatenate(positions))


def _count_slices(dataset: Rows, encoder: Encoder, ranks: Collectives, task: Task) -> CountColumns:
    """Count examples that all ranks have: each rank a slice of them."""
    rank, size = (ranks.world.rank, ranks.world.size) if ranks.is_distributed else (0, 1)
    rows = range(len(dataset) * rank // size, len(dataset) * (rank + 1) // size)
    counted = ranks.run_on_all_ranks(_COUNT, partial(count_examples, dataset, encoder, rows, task))
    return CountColumns.concat(ranks.gather(counted))


def count_examples(
    dataset: Rows, processor: Encoder | Processor, rows: range | None = None, task: Task = "sft"
) -> CountColumns:
    """Count the examples of a sequence (``rows``: only these); one that fails has a reason instead."""
    rows = range(len(dataset)) if rows is None else rows
    counter = make_counter(processor)
    parts = []
    with Progress("counting tokens", len(rows)) as progress:
        for first in range(0, len(rows), _BLOCK):
            block = CountedRows()
            for index in rows[first : first + _BLOCK]:
                key = dataset_key(dataset, index)
                with data_errors("drop", block.add, key=key):
                    example = counter.encoder.place_audio(dataset[index], key)
                    parse = parse_documents if task == "preference" else _parse_plain
                    (counted,) = counter.count_documents([parse(example, key)])
                    block.add(counted)
            parts.append(CountColumns.of(block.batch()))
            progress(min(first + _BLOCK, len(rows)))
    return CountColumns.concat(parts)


def _parse_plain(example: Mapping[str, Any], key: str) -> tuple[Conversation, ...]:
    return (parse_conversation(example, key),)


def describe_remedy(dataset: Rows, reasons: Collection[str]) -> str:
    """Return a line with what to do about rows that cannot be used; empty if the reasons say all of it."""
    whole = dataset.data if isinstance(dataset, Shard) else dataset
    if isinstance(whole, MetaDataset):
        return "\nRun `packhorse check`, which says how to fix them"
    if "missing_media" not in reasons:
        return ""
    media_dir = whole.rules.media_dir if isinstance(whole, ConvertedRows) else None
    folder = f"the working directory, {os.getcwd()}" if media_dir is None else media_dir
    return (
        f"\nRelative paths of media start at {folder}: dataset_options={{'media_dir': …}} sets another folder"
    )
