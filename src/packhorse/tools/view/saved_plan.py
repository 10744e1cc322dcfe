"""The plan that a loader with the same settings uses, and the file it is saved in.

:func:`make_plan` runs the loader's start-up and counts rows that are not counted yet. The file has all that
the viewer needs, as JSON in the plan's key; ``PackPlan.load`` reads it like any other plan file.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packhorse.chat import tokenizer_of
from packhorse.count.columns import CountColumns
from packhorse.distributed import Collectives
from packhorse.errors import ConfigError
from packhorse.families.models import model_classes, open_config, open_processor
from packhorse.families.packing import check_packable
from packhorse.ledger import Ledger
from packhorse.loader.config import LoaderConfig
from packhorse.loader.planner import Planner, too_long_detail
from packhorse.loader.startup import ModelInfo, OpenedData, inspect_model, open_data, start_up
from packhorse.media.source import is_address
from packhorse.plan.lengths import after_shift
from packhorse.plan.pack_plan import PackPlan, load_key
from packhorse.plan.schedule import Packs
from packhorse.types import Drop, World

_MAX_DETAIL = 500  # characters
VERSION = 3  # of the JSON in the plan file; earlier versions have other names of settings and report fields
# The settings that a plan depends on.
_SETTINGS = (
    *("dataset_names", "task", "pack_size", "seed", "alignment", "on_overlong", "max_patches", "max_media"),
    *("max_documents", "placeholder", "spread_datasets", "effort"),
)


@dataclass(frozen=True)
class PlanRequest:
    """What to plan.

    Attributes:
        config: the loader's settings; ``data`` is the meta file.
        processor: the model's processor, or its folder or hub name.
        model: folder or hub name of the model config, used for costs and positions; None looks for one next
            to the processor.
        epoch: the epoch to plan.
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
        name = getattr(tokenizer_of(self.processor), "name_or_path", "")
        return str(name or type(self.processor).__name__)


@dataclass(frozen=True)
class PlanResult:
    """A plan and what it was made from."""

    request: PlanRequest
    opened: OpenedData
    counts: CountColumns
    planner: Planner
    packs: Packs  # of the requested epoch
    reserve: int  # tokens of each pack that stay free for a placeholder

    @property
    def model(self) -> str | None:
        """Where the model config came from; None if there was none."""
        if self.opened.model.config is None:
            return None
        return self.request.model or self.request.processor_name

    @property
    def dropped(self) -> list[Drop]:
        """Rows in no pack, as the loader records them."""
        return self.planner.drops(self.packs.plan)


def open_request(request: PlanRequest) -> OpenedData:
    """Open rows, processor and model, without counting; raise if one of them is invalid."""
    processor = request.processor
    if isinstance(processor, str):
        processor = open_processor(processor, request.trust_remote_code)
    return open_data(request.config, processor, _find_model(request), Collectives(World()), Ledger())


def make_plan(
    request: PlanRequest, opened: OpenedData | None = None, counts: CountColumns | None = None
) -> PlanResult:
    """Count rows that are not counted yet, and plan.

    Args:
        request: what to plan.
        opened: its rows and processor, if an earlier plan opened them.
        counts: the counts of its rows, if the caller has them.

    Raises:
        ConfigError: rows, processor or model are invalid, the model is known to be wrong in packs, or a
            sample is too long and ``on_overlong="raise"``.
    """
    opened = open_request(request) if opened is None else opened
    if opened.model.config is not None and model_classes(opened.model.config):
        check_packable(opened.model.config, measured=True)  # nothing is trained: load asks for a proof
    start = start_up(request.config, opened, Collectives(World()), counts)
    planner = start.planner
    plan = planner.plan(request.epoch)
    planner.check(plan)
    packs = Packs(plan, planner.sample_info)
    return PlanResult(request, opened, start.counts, planner, packs, planner.reserve_in(plan))


def _find_model(request: PlanRequest) -> ModelInfo:
    """Return what is known of the model; without a model name, from a config next to the processor."""
    path = request.model or request.processor
    if not isinstance(path, str):
        return ModelInfo()
    if request.model is None and os.path.isdir(path) and not os.path.isfile(f"{path}/config.json"):
        return ModelInfo()
    try:
        return inspect_model(open_config(path, request.trust_remote_code), trains=False)
    except ConfigError:
        if request.model is None:
            return ModelInfo()
        raise


@dataclass(frozen=True)
class SavedPlan:
    """The content of a plan file."""

    plan: PackPlan  # with costs and media masks
    request: PlanRequest
    report: Mapping[str, Any]  # see plan_report
    bad: Mapping[int, tuple[str, str]]  # reason and detail of rows that could not be counted, by sample index
    details: Mapping[str, str]  # ledger details of the plan's own reasons
    too_long: Mapping[int, int] = field(default_factory=dict)  # tokens after the shift, by sample index

    @property
    def truncated(self) -> Collection[int]:
        """The sample indices of the rows that are truncated to fit into a pack."""
        return self.too_long if self.request.config.on_overlong == "truncate" else ()

    def detail(self, index: int, reason: str) -> str:
        """Return the ledger's detail for a row that the plan drops or truncates for this reason."""
        length = self.too_long.get(index)
        if length is None or reason not in ("too_long", "truncated"):
            return self.details.get(reason, "")
        return too_long_detail(length, self.request.config, self.report["reserve"])


def make_saved_plan(planned: PlanResult, report: Mapping[str, Any]) -> SavedPlan:
    """Return what :func:`save_plan` writes and :func:`open_saved_plan` reads."""
    counts, packs = planned.counts, planned.packs
    bad = {
        index: (str(counts.status[index]), shorten(str(counts.detail[index]), _MAX_DETAIL))
        for index in (~counts.ok).nonzero()[0].tolist()
    }
    overlong, lengths = packs.plan.dropped_by_reason().get("too_long", ()), planned.planner.lengths
    if planned.request.config.on_overlong == "truncate":
        lengths = after_shift(counts.total)
        overlong = (counts.ok & (lengths > packs.plan.capacity)).nonzero()[0]
    return SavedPlan(
        packs.plan.with_costs(packs.costs, packs.media_masks),
        planned.request,
        report,
        bad,
        {"over_limit": planned.planner.limit_detail},
        {int(index): int(lengths[index]) for index in overlong},
    )


def shorten(text: str, most: int) -> str:
    """Return a text of at most ``most`` characters; one that is cut ends with an ellipsis."""
    return text if len(text) <= most else text[: most - 1] + "…"


def save_plan(planned: PlanResult, report: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a plan with everything the viewer needs, atomically."""
    saved, request = make_saved_plan(planned, report), planned.request
    folder = Path(path).absolute().parent
    settings = {name: getattr(request.config, name) for name in _SETTINGS}
    if settings["dataset_names"] is not None:
        settings["dataset_names"] = [str(name) for name in settings["dataset_names"]]
    made_from = {
        "version": VERSION,
        "meta": _describe_path(str(request.config.data), folder),
        "processor": _describe_path(request.processor_name, folder),
        "model": None if request.model is None else _describe_path(request.model, folder),
        "epoch": request.epoch,
        "settings": settings,
    }
    key = {
        **planned.planner.key,
        "epoch": request.epoch,
        "made_from": made_from,
        "report": report,
        "bad": [[index, reason, detail] for index, (reason, detail) in saved.bad.items()],
        "details": saved.details,
        "too_long": list(saved.too_long.items()),
    }
    saved.plan.save(path, key)


def open_saved_plan(
    path: str | os.PathLike[str], processor: str | None = None, trust_remote_code: bool = False
) -> SavedPlan:
    """Open a file written by :func:`save_plan`; ``processor`` is its new path if it has moved."""
    plan, key = PackPlan.load(path), load_key(path)
    source = key.get("made_from")
    if source is None or key.get("report") is None:
        raise ConfigError(f"{path} does not name its data: write it with `packhorse plan`", path=path)
    if source.get("version") != VERSION:
        raise ConfigError(
            f"{path} has plan format {source.get('version', 1)}, this version of packhorse reads {VERSION}: "
            "write it again with `packhorse plan`",
            path=path,
        )
    folder = Path(path).absolute().parent
    request = PlanRequest(
        LoaderConfig(data=_find_path(source["meta"], folder), **source["settings"]),
        processor or _find_path(source["processor"], folder),
        None if source["model"] is None else _find_path(source["model"], folder),
        source["epoch"],
        trust_remote_code,
    )
    bad = {int(index): (reason, detail) for index, reason, detail in key["bad"]}
    too_long = {int(index): int(length) for index, length in key.get("too_long", ())}
    return SavedPlan(plan, request, key["report"], bad, key["details"], too_long)


def _describe_path(path: str, folder: Path) -> dict[str, str]:
    """Return a path as given and relative to the plan's folder, in case both are moved together."""
    if is_address(path) or not os.path.exists(path):
        return {"name": path}
    return {"name": os.path.abspath(path), "relative": os.path.relpath(path, folder)}


def _find_path(described: Mapping[str, str], folder: Path) -> str:
    if not os.path.exists(described["name"]) and "relative" in described:
        moved = os.path.normpath(folder / described["relative"])
        if os.path.exists(moved):
            return moved
    return described["name"]
