"""The plan that a loader with the same settings trains, and the file it is saved in.

:func:`make_plan` runs the loader's own start-up, so it costs what opening a loader costs: milliseconds where
the rows are counted, the counting where they are not.

The file says what the plan was made from, so a viewer needs nothing else. In addition to the plan's own key
it holds, as JSON: the meta file, the processor and the settings (``made_from``), the report (``report``), and
why rows that could not be counted are in no pack (``bad``, about 150 bytes per row). ``PackPlan.load`` opens
it like any other plan file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packhorse.chat import tokenizer_of
from packhorse.count.columns import CountColumns
from packhorse.distributed import Collectives
from packhorse.errors import ConfigError
from packhorse.families.models import check_packable, model_classes, open_config, open_processor
from packhorse.ledger import Ledger
from packhorse.loader.config import LoaderConfig
from packhorse.loader.planner import Planner, too_long_detail
from packhorse.loader.startup import ModelInfo, OpenedData, inspect_model, open_data, start_up
from packhorse.media.source import is_address
from packhorse.plan.pack_plan import PackPlan, load_key
from packhorse.plan.schedule import Packs
from packhorse.types import Drop, World

_LONGEST_DETAIL = 500
VERSION = 2  # of the JSON in the plan file; 1 had other names for settings and report fields
# What a plan and its packs depend on; where batches are built and how ledgers are kept is the run's affair.
_SETTINGS = (
    "dataset_names",
    "pack_size",
    "seed",
    "alignment",
    "on_overlong",
    "max_patches",
    "max_media",
    "max_documents",
    "placeholder",
    "spread_datasets",
    "effort",
)


@dataclass(frozen=True)
class Request:
    """What is to be planned.

    Attributes:
        config: the loader's settings; ``data`` is the meta file.
        processor: the model's processor, or its folder or hub name.
        model: folder or hub name of its config, for what tokens and patches cost and for positions; None
            looks for one next to the processor.
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
class Planned:
    """A plan and what it was made from.

    Attributes:
        request: what was to be planned.
        opened: rows, processor and model.
        counts: exact counts of the rows.
        planner: the loader's.
        packs: of the requested epoch.
        reserve: tokens of each pack that stay free for a placeholder.
    """

    request: Request
    opened: OpenedData
    counts: CountColumns
    planner: Planner
    packs: Packs
    reserve: int

    @property
    def model(self) -> str | None:
        """Where the config was found that costs and positions are from; None if there was none."""
        if self.opened.model.config is None:
            return None
        return self.request.model or self.request.processor_name

    @property
    def dropped(self) -> list[Drop]:
        """Rows that are in no pack, as the loader records them."""
        return self.planner.drops(self.packs.plan)


def open_request(request: Request) -> OpenedData:
    """Open rows, processor and model; nothing is counted.

    Raises:
        ConfigError: one of them is not in order, or there is no row.
    """
    processor = request.processor
    if isinstance(processor, str):
        processor = open_processor(processor, request.trust_remote_code)
    return open_data(request.config, processor, _find_model(request), Collectives(World()), Ledger())


def make_plan(
    request: Request, opened: OpenedData | None = None, counts: CountColumns | None = None
) -> Planned:
    """Count what was not counted before, and plan.

    Args:
        request: what is to be planned.
        opened: its rows and processor, if an earlier plan has opened them.
        counts: of its rows, if the caller has them.

    Raises:
        ConfigError: see :func:`open_request`; the model cannot be trained on packs; or a sample is too long,
            and ``on_overlong="raise"``.
    """
    opened = open_request(request) if opened is None else opened
    if opened.model.config is not None and model_classes(opened.model.config):
        check_packable(opened.model.config)
    start = start_up(request.config, opened, Collectives(World()), counts)
    planner = start.planner
    plan = planner.plan(request.epoch)
    planner.check(plan)
    packs = Packs(plan, planner.sample_info)
    return Planned(request, opened, start.counts, planner, packs, planner.reserve_in(plan))


def _find_model(request: Request) -> ModelInfo:
    """What is known of the model; from a config next to the processor if no model is named.

    Raises:
        ConfigError: a model was named, and has no config.
    """
    path = request.model or request.processor
    if not isinstance(path, str):
        return ModelInfo()
    if (
        request.model is None
        and os.path.isdir(path)
        and not os.path.isfile(os.path.join(path, "config.json"))
    ):
        return ModelInfo()
    try:
        return inspect_model(open_config(path, request.trust_remote_code), trains=False)
    except ConfigError:
        if request.model is None:
            return ModelInfo()
        raise


@dataclass(frozen=True)
class PlanBook:
    """What a plan file holds.

    Attributes:
        plan: the plan, with costs and media masks.
        request: what it was made from.
        report: see :func:`packhorse.tools.view.plan_report.plan_report`.
        bad: of rows that could not be counted, by their position: the reason and what was found.
        details: of the plan's own reasons: the words of the ledger.
        too_long: of rows that are longer than a pack, by their position: their tokens after the shift.
    """

    plan: PackPlan
    request: Request
    report: Mapping[str, Any]
    bad: Mapping[int, tuple[str, str]]
    details: Mapping[str, str]
    too_long: Mapping[int, int] = field(default_factory=dict)

    def detail(self, index: int, reason: str) -> str:
        """What the ledger says of a row that the plan leaves out for this reason."""
        length = self.too_long.get(index)
        if length is None:
            return self.details.get(reason, "")
        return too_long_detail(length, self.request.config, self.report["reserve"])


def book_of(planned: Planned, report: Mapping[str, Any]) -> PlanBook:
    """The same without a file."""
    counts, packs = planned.counts, planned.packs
    bad = {
        index: (str(counts.status[index]), str(counts.detail[index])[:_LONGEST_DETAIL])
        for index in (~counts.ok).nonzero()[0].tolist()
    }
    details = {"over_limit": planned.planner.limit_detail}
    plan = packs.plan.with_costs(packs.costs, packs.media_masks)
    longer = packs.plan.dropped_by_reason().get("too_long", ())
    too_long = {int(index): int(planned.planner.lengths[index]) for index in longer}
    return PlanBook(plan, planned.request, report, bad, details, too_long)


def save_book(planned: Planned, report: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a plan with all that a viewer needs; the file appears when it is whole."""
    made, request = book_of(planned, report), planned.request
    home = Path(path).absolute().parent
    settings = {name: getattr(request.config, name) for name in _SETTINGS}
    made_from = {
        "version": VERSION,
        "meta": _place(str(request.config.data), home),
        "processor": _place(request.processor_name, home),
        "model": None if request.model is None else _place(request.model, home),
        "epoch": request.epoch,
        "settings": settings | {"dataset_names": _plain(settings["dataset_names"])},
    }
    key = {
        **planned.planner.key,
        "epoch": request.epoch,
        "made_from": made_from,
        "report": report,
        "bad": [[index, reason, detail] for index, (reason, detail) in made.bad.items()],
        "details": made.details,
        "too_long": list(made.too_long.items()),
    }
    made.plan.save(path, key)


def open_book(
    path: str | os.PathLike[str], processor: str | None = None, trust_remote_code: bool = False
) -> PlanBook:
    """Open a plan file.

    Args:
        path: as :func:`save_book` wrote it.
        processor: where the processor is now, if it is not where it was.
        trust_remote_code: run code that comes with it.

    Raises:
        ConfigError: it is no plan, or one that does not say what it was made from.
    """
    plan, key = PackPlan.load(path), load_key(path)
    source = key.get("made_from")
    if source is None or key.get("report") is None:
        raise ConfigError(
            f"{os.fspath(path)} is a plan that does not say which data it is of: make one with "
            "`packhorse plan`"
        )
    if source.get("version") != VERSION:
        raise ConfigError(
            f"{os.fspath(path)} has plan format {source.get('version', 1)}, this version of packhorse reads "
            f"{VERSION}: make the plan again with `packhorse plan`"
        )
    home = Path(path).absolute().parent
    config = LoaderConfig(data=_found(source["meta"], home), **source["settings"])
    request = Request(
        config,
        processor or _found(source["processor"], home),
        None if source["model"] is None else _found(source["model"], home),
        source["epoch"],
        trust_remote_code,
    )
    bad = {int(index): (reason, detail) for index, reason, detail in key["bad"]}
    too_long = {int(index): int(length) for index, length in key.get("too_long", ())}
    return PlanBook(plan, request, key["report"], bad, key["details"], too_long)


def _plain(names: Any) -> list[str] | None:
    return None if names is None else [str(name) for name in names]


def _place(path: str, home: Path) -> dict[str, str]:
    """Where something is: as it was named, and from the plan's own folder, if both are moved together."""
    if is_address(path) or not os.path.exists(path):
        return {"name": path}
    whole = os.path.abspath(path)
    return {"name": whole, "beside": os.path.relpath(whole, home)}


def _found(place: Mapping[str, str], home: Path) -> str:
    if os.path.exists(place["name"]) or "beside" not in place:
        return place["name"]
    beside = os.path.normpath(home / place["beside"])
    return beside if os.path.exists(beside) else place["name"]
