"""The plan that a loader with the same settings trains, made without starting one.

A meta file, a processor and settings go in; examples, counts, encoder and plan come out. Every step is the
loader's own function, called in the loader's order. Costs what opening a loader costs: milliseconds where the
rows are counted, the counting where they are not.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from packhorse.chat import tokenizer_of
from packhorse.collate.packer import Packer
from packhorse.count.columns import CountColumns
from packhorse.distributed import Ranks
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import ConfigError
from packhorse.families.models import check_packable, model_classes, open_config
from packhorse.families.processors import open_processor
from packhorse.formats.meta import MetaDataset
from packhorse.ledger import Ledger
from packhorse.loader.assemble import batch_builder, encoding_dataset, make_planner
from packhorse.loader.build import PackBuilder
from packhorse.loader.config import LoaderConfig
from packhorse.loader.data import counts_for, open_data
from packhorse.loader.model_info import ModelFacts, facts_of
from packhorse.loader.planner import Planner, record_left_out, refuse_overlong
from packhorse.plan.schedule import Packs
from packhorse.types import Drop, World


@dataclass(frozen=True)
class Request:
    """What is to be planned.

    Attributes:
        config: the loader's settings; ``data`` is the meta file.
        processor: the model's processor, or its folder or hub name.
        model: folder or hub name of its config, for what tokens and patches cost and for positions; None
            looks for one beside the processor.
        epoch: which one is planned.
        trust_remote_code: run code that comes with the processor.
    """

    config: LoaderConfig
    processor: Any
    model: str | None = None
    epoch: int = 0
    trust_remote_code: bool = False

    @property
    def processor_name(self) -> str:
        """Where the processor is, or was loaded from."""
        if isinstance(self.processor, str):
            return self.processor
        known = getattr(tokenizer_of(self.processor), "name_or_path", "")
        return str(known or type(self.processor).__name__)


@dataclass(frozen=True)
class Opened:
    """Examples and what encodes them; nothing is counted or planned yet.

    Attributes:
        request: what was asked for.
        dataset: the examples.
        samples: encodes single ones.
        facts: what is known of the model.
        ledger: rows that were not drawn.
    """

    request: Request
    dataset: MetaDataset
    samples: PreTokenizedDatasetWrapper
    facts: ModelFacts
    ledger: Ledger

    @property
    def model(self) -> str | None:
        """Where the config was found that costs and positions are of; None where there was none."""
        if self.facts.config is None:
            return None
        return self.request.model or self.request.processor_name

    def under(self, request: Request) -> Opened:
        """The same examples and processor under other settings; costs nothing."""
        samples = encoding_dataset(request.config, self.dataset, self.samples.processor, Ledger())
        return replace(self, request=request, samples=samples)

    @cached_property
    def packer(self) -> Packer:
        """Shifts, places and joins samples as the loader does."""
        builder = batch_builder(self.request.config, self.samples, self.facts)
        assert isinstance(builder, PackBuilder)  # the settings of a plan are always those of packs
        return builder.packer


@dataclass(frozen=True)
class Planned:
    """A plan and all that it was made from.

    Attributes:
        opened: examples and encoder.
        counts: exact counts of the examples.
        planner: the loader's.
        packs: of the epoch that was asked for.
        reserve: tokens of each pack that stay free for a placeholder.
    """

    opened: Opened
    counts: CountColumns
    planner: Planner
    packs: Packs
    reserve: int

    @cached_property
    def left_out(self) -> list[Drop]:
        """Rows that are in no pack, as the loader records them."""
        ledger = Ledger()
        dataset = self.opened.dataset
        record_left_out(self.planner, self.packs.plan, dataset.key, ledger, dataset.locations)
        return list(ledger)


def open_request(request: Request) -> Opened:
    """Open the examples and the processor.

    Raises:
        ConfigError: one of them is not in order, or there is no example.
    """
    config = request.config
    processor = request.processor
    if isinstance(processor, str):
        processor = open_processor(processor, request.trust_remote_code)
    ledger = Ledger()
    dataset = open_data(config.data, config.dataset_names, ledger, None)
    if not len(dataset):
        raise ConfigError(f"{config.data}: there is no example in the data")
    samples = encoding_dataset(config, dataset, processor, Ledger())
    return Opened(request, dataset, samples, model_facts(request), ledger)


def make_plan(request: Request, opened: Opened | None = None) -> Planned:
    """Count what was not counted before, and plan.

    Args:
        request: what is to be planned.
        opened: its examples and processor, where an earlier plan has opened them.

    Raises:
        ConfigError: see :func:`open_request`; the model cannot be trained on packs; or a sample is too long,
            and that was to be an error.
    """
    opened = open_request(request) if opened is None else opened.under(request)
    if opened.facts.config is not None and model_classes(opened.facts.config):
        check_packable(opened.facts.config)
    config, processor = request.config, opened.samples.processor
    ranks = Ranks(World())
    counts = counts_for(
        opened.dataset, config.data, config.dataset_names, processor, ranks, config.count_workers
    )
    planner, _ = make_planner(config, opened.samples, counts, opened.facts, ranks)
    plan = planner.plan(request.epoch)
    refuse_overlong(planner, plan, opened.dataset.key)
    return Planned(opened, counts, planner, Packs(plan, planner.facts), planner.reserve_in(plan))


def model_facts(request: Request) -> ModelFacts:
    """What a model's config tells: the cost of tokens and patches, positions in three rows.

    Without ``request.model`` a config beside the processor is used where there is one, the loader's defaults
    where there is none.

    Raises:
        ConfigError: a model was named, and has no config.
    """
    path = request.model or request.processor
    if not isinstance(path, str):
        return ModelFacts()
    if (
        request.model is None
        and os.path.isdir(path)
        and not os.path.isfile(os.path.join(path, "config.json"))
    ):
        return ModelFacts()
    try:
        return facts_of(open_config(path, request.trust_remote_code), trains=False)
    except ConfigError:
        if request.model is None:
            return ModelFacts()
        raise
