"""How a loader is put together: from its settings to the parts that do the work."""

from __future__ import annotations

from functools import partial
from logging import getLogger
from typing import Any

from packhorse.collate.packed import check_router_loss
from packhorse.collate.packer import Packer
from packhorse.collate.processor_call import pad_token_id
from packhorse.count.columns import CountColumns
from packhorse.count.contents import contents_of
from packhorse.distributed import Ranks
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import ConfigError
from packhorse.ledger import Ledger
from packhorse.loader.build import BatchBuilder, Finish, PackBuilder, PadBuilder
from packhorse.loader.config import LoaderConfig
from packhorse.loader.model_info import ModelFacts, as_dtype
from packhorse.loader.placeholder import Blanks
from packhorse.loader.planner import Planner, PlanSettings, strata_of
from packhorse.loader.worker_pool import WorkerSettings
from packhorse.pp_media import prepare_vlm_media_for_pp
from packhorse.types import MEDIA_KINDS

logger = getLogger("packhorse.loader")


def encoding_dataset(
    config: LoaderConfig, dataset: Any, processor: Any, ledger: Ledger
) -> PreTokenizedDatasetWrapper:
    """What encodes single samples, in workers."""
    truncate = config.on_overlong == "truncate"
    return PreTokenizedDatasetWrapper(
        dataset,
        processor,
        config.pack_size + 1 if truncate else None,
        truncate=truncate,
        inject_fake_images=False,  # placeholders are added where they are needed, and only there
        on_bad=config.on_bad,
        seed=config.seed,
        ledger=ledger,
    )


def media_of_samples(counts: CountColumns, ranks: Ranks, shard_data: bool) -> tuple[int, int]:
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


def plan_settings(config: LoaderConfig, facts: ModelFacts, reserve: int, kinds: int = 0) -> PlanSettings:
    """What the plan depends on."""
    return PlanSettings(
        mode=config.mode,
        size=config.pack_size,
        reserve=reserve,
        reserved_kinds=kinds if reserve else 0,
        alignment=config.alignment,
        on_overlong=config.on_overlong,
        max_patches=config.max_patches,
        max_media=config.max_media,
        max_documents=config.max_documents,
        seed=config.seed,
        weights=facts.weights,
        spread_datasets=config.spread_datasets,
        effort=config.effort,
    )


def room_for_placeholder(config: LoaderConfig, samples: PreTokenizedDatasetWrapper, mixed: int) -> int:
    """How many tokens of every pack stay free for a placeholder with these kinds of media.

    Raises:
        ConfigError: packs are too small for it.
    """
    if config.placeholder == "never" or config.mode == "pad" or not mixed:
        return 0
    reserve = sum(length + -length % config.alignment for length in Blanks(samples).lengths(mixed))
    if 2 * reserve > config.pack_size:
        raise ConfigError(
            f"pack_size={config.pack_size:,} has no room for the placeholder of {reserve} tokens: make it "
            "larger, or set placeholder='never'"
        )
    return reserve


def make_planner(
    config: LoaderConfig,
    samples: PreTokenizedDatasetWrapper,
    counts: CountColumns,
    facts: ModelFacts,
    ranks: Ranks,
) -> tuple[Planner, int]:
    """What plans the epochs, and the kinds of media that any sample has, one bit for each.

    Samples that are to be truncated are so from now on: to what fits into a pack beside a placeholder.
    """
    present, lacking = media_of_samples(counts, ranks, config.shard_data)
    if samples.truncate and (counts.total - 1 > config.pack_size).any():
        lacking = present  # a cut may take the only picture of a sample
    reserve = room_for_placeholder(config, samples, present & lacking)
    cache = True if config.cache_dir is None else config.cache_dir
    settings = plan_settings(config, facts, reserve, present & lacking)
    read = partial(contents_of, samples.dataset, samples.processor, hash_all=config.verify == "full")
    contents = ranks.run_on_all_ranks("hash the rows", read)
    planner = Planner(counts, settings, strata_of(samples.dataset), cache, contents)
    if samples.truncate:
        samples.max_length = planner.room + 1
    return planner, present


def batch_builder(
    config: LoaderConfig, samples: PreTokenizedDatasetWrapper, facts: ModelFacts
) -> BatchBuilder:
    """What makes batches of work items, in workers."""
    dtype = as_dtype(config.pixel_dtype) or facts.dtype
    finish = _finish(config)
    if config.mode == "pad":
        pad_to = config.pack_size if config.pad_to_size else None
        for_pipeline = config.pipeline_microbatches is not None
        return PadBuilder(samples, pad_to, dtype, finish, config.sample_timeout, media_layout=for_pipeline)
    if samples.family.mrope and facts.get_rope_index is None:
        _refuse_one_row(samples.family.name, facts)
    if config.pad_to_size and config.pack_size % config.alignment:
        raise ConfigError(
            f"pad_to_size=True pads to pack_size={config.pack_size:,}, which is no multiple of "
            f"alignment={config.alignment}: the last document could not be divided. Make it one"
        )
    check_router_loss(facts.config)
    padding = pad_token_id(samples.processor)
    packer = Packer(config.pack_size, padding, facts.get_rope_index, config.alignment, samples.family)
    collater: dict[str, Any] = {
        "padding_idx": padding,
        "max_length": config.pack_size if config.pad_to_size else None,
        "attn_implementation": config.attention or facts.attention,
        "pixel_dtype": dtype,
        "config": facts.config,
        "media_layout": config.pipeline_microbatches is not None,
    }
    if facts.dtype is not None:
        collater["mask_dtype"] = facts.dtype
    return PackBuilder(samples, packer, collater, finish, config.sample_timeout)


def _refuse_one_row(family: str, facts: ModelFacts) -> None:
    """Raise if a model without mRoPE is to be fed by a processor of models with it; warn if unchecked."""
    if facts.config is not None:
        raise ConfigError(
            f"{facts.name} has no get_rope_index, but models of the processor's family {family} have "
            "positions in three rows (mRoPE): pass the whole model that belongs to the processor"
        )
    logger.warning(
        "model='unchecked': positions have one row, but models of family %s have three (mRoPE), so packed "
        "training will differ from unpacked. Pass model=",
        family,
    )


def _finish(config: LoaderConfig) -> Finish | None:
    if config.pipeline_microbatches is None:
        return None
    return partial(_chunked, config.pipeline_microbatches)


def _chunked(microbatches: int, batch: dict[str, Any]) -> dict[str, Any]:
    return dict(prepare_vlm_media_for_pp(batch, len(batch["input_ids"]), microbatches))


def worker_settings(config: LoaderConfig) -> WorkerSettings:
    """How batches are built ahead."""
    return WorkerSettings(config.workers, config.prefetch, config.pin_memory, config.timeout, config.start)
